//! Configurations: refused where they are wrong, and replaced while requests wait.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::app::App;
use crate::support::envoy::{Document, Envoy, Setup};
use crate::support::http::{Request, at_once_from_each, with_status};
use crate::support::server::{Kind, Server, wait_until};
use crate::support::shim::{Mode, Shim};
use crate::{is_waved_through, quota, slow};

/// An Envoy with that configuration does not start, and its log says this.
fn check_refused(what: &str, tweak: impl FnOnce(&mut Document) + 'static, says: &[&str]) {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let log = Setup::new(redis.port(), &app).tweak(tweak).start_refused();
    for says in says {
        assert!(log.contains(says), "{what}: the log does not say {says:?}:\n{log}");
    }
}

fn json_of(value: Value) -> impl FnOnce(&mut Document) {
    move |document| document.plugin()["configuration"]["value"] = json!(value.to_string())
}

#[test]
fn a_fault_keeps_envoy_from_starting_and_is_named_with_its_path() {
    let limit = json!({"capacity": 10, "refill": "1/s"});
    let cases = [
        (
            "every fault at once",
            json!({
                "failure_mode": "open",
                "redis": {"timeout": "0s", "max_in_flite": 10},
                "rules": [
                    {"name": "per-ip", "limits": [{"capacity": 0, "refill": "10/s"}, {"capacity": 5, "refill": "0/s"}]},
                    {"name": "per-ip", "limits": [limit]},
                ],
            }),
            &[
                "failure_mode: ",
                "redis.timeout: ",
                "max_in_flite",
                "max_in_flight",
                "rules[0].limits[0].capacity: ",
                "rules[0].limits[1].refill: ",
                "rules[1].name: ",
            ][..],
        ),
        ("no rule", json!({"rules": []}), &["rules: "]),
        ("no limits", json!({"rules": [{"name": "per-ip"}]}), &["rules[0].limits: "]),
        (
            "two faces of trust",
            json!({
                "client_ip": {"trusted_hops": 0, "trusted_proxies": ["10.0.0.0/33"]},
                "rules": [{"name": "per-ip", "limits": [limit]}],
            }),
            &["client_ip.trusted_hops: ", "client_ip.trusted_proxies[0]: ", "10.0.0.0/33"],
        ),
        (
            "an empty namespace with two limits",
            json!({"rules": [{"name": "per-ip", "namespace": "", "limits": [limit, limit]}]}),
            &["rules[0].namespace: "],
        ),
        (
            "a field of another limiter",
            json!({"rules": [{"name": "a", "burst": 5, "limits": [limit]}]}),
            &["rules[0]", "burst"],
        ),
    ];
    for (what, configuration, says) in cases {
        check_refused(what, json_of(configuration), says);
    }
}

#[test]
fn what_is_not_json_keeps_envoy_from_starting() {
    let text =
        |text: &'static str| move |document: &mut Document| document.plugin()["configuration"]["value"] = json!(text);
    check_refused("YAML", text("rules:\n- name: per-ip\n"), &["not JSON", "line 1"]);
    check_refused("half", text("{\"rules\": ["), &["not JSON"]);
}

#[test]
fn no_configuration_is_refused_with_an_example() {
    let none = |document: &mut Document| {
        document.plugin().as_object_mut().unwrap().remove("configuration");
    };
    check_refused("none", none, &["no configuration", "\"rules\""]);
    let empty = |document: &mut Document| document.plugin()["configuration"]["value"] = json!("");
    check_refused("empty", empty, &["no configuration", "\"rules\""]);
    check_refused("an empty object", json_of(json!({})), &["rules: "]);
}

#[test]
fn a_protobuf_struct_is_refused_with_the_remedy() {
    let as_struct = |document: &mut Document| {
        let value = document.plugin()["configuration"]["value"].as_str().unwrap().to_owned();
        document.plugin()["configuration"] = json!({
            "@type": "type.googleapis.com/google.protobuf.Struct",
            "value": serde_json::from_str::<Value>(&value).unwrap(),
        });
    };
    check_refused("a struct", as_struct, &["google.protobuf.Struct", "StringValue"]);
}

#[test]
fn a_refused_configuration_names_no_secret() {
    let configuration = json!({
        "redis": {"password": ["hunter2-in-a-list"], "username": "hunter2-user"},
        "rules": [{"name": "per-ip", "limits": [{"refill": "1/s"}]}],
    });
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let log = Setup::new(redis.port(), &app).tweak(json_of(configuration)).start_refused();
    let refusal = log.split("the configuration is refused").nth(1).expect("it is refused");
    let refusal = refusal.split("[critical]").next().unwrap();
    assert!(refusal.contains("redis.password: "), "{refusal}");
    assert!(!refusal.contains("hunter2"), "{refusal}");
}

#[test]
fn numbers_that_a_control_plane_wrote_as_floats_are_taken() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let text = r#"{"redis": {"timeout": "5s", "database": 0.0, "max_in_flight": 1e3},
        "rules": [{"name": "per-ip", "limits": [{"capacity": 100.0, "refill": "1/day"}]}]}"#;
    let envoy = Setup::new(redis.port(), &app)
        .tweak(move |document| document.plugin()["configuration"]["value"] = json!(text))
        .start();
    assert_eq!(quota(&envoy.get("/")), Some((100, 99)));
    envoy.finish();
}

#[test]
fn what_is_legal_and_surely_not_meant_is_taken_and_said() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let mut envoy = Setup::new(redis.port(), &app)
        .configuration(json!({
            "redis": {"timeout": "5s"},
            "rules": [
                {"name": "per-ip", "limits": [{"capacity": 10, "refill": "1/day"}, {"capacity": 20, "refill": "1/s"}]},
                {"name": "login", "match": {"path": "/login"}, "limits": [{"capacity": 10, "refill": "1/s"}]},
            ],
        }))
        .start();
    envoy.tolerate("the configuration is taken, but");
    assert_eq!(quota(&envoy.get("/")), Some((10, 9)));
    let log = envoy.log();
    assert!(log.contains("the configuration is taken, but rules[0].limits[1]: never binds"), "{log}");
    assert!(log.contains("the configuration is taken, but rules[1]: never denies a request"), "{log}");
    assert!(log.contains("is rules[0] (\"per-ip\")"), "{log}");
    envoy.finish();
}

/// Waits until Envoy has taken so many updates of its listeners, the first one included.
fn updated(envoy: &Envoy, times: i64) {
    wait_until("the listener is updated", || envoy.statistic("listener_manager.lds.update_success") >= times);
    wait_until("the workers have it", || {
        envoy.statistic("listener_manager.total_listeners_warming") == 0
            && envoy.statistic("listener_manager.listener_in_place_updated")
                + envoy.statistic("listener_manager.listener_modified")
                >= times - 1
    });
}

#[test]
fn a_new_configuration_takes_effect_at_once_and_the_old_one_leaves_nothing_behind() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let mut envoy = Setup::new(redis.port(), &app).configuration(slow(10, "5s")).workers(2).reloading().start();
    assert_eq!(quota(&envoy.get("/")), Some((10, 9)));
    for (times, capacity) in [(2, 20), (3, 5)] {
        envoy.reload(&slow(capacity, "5s"));
        updated(&envoy, times);
        wait_until("the new limit holds", || quota(&envoy.get("/")).is_some_and(|(limit, _)| limit == capacity));
    }
    // A lower capacity cuts what there was.
    let mut left = 5;
    while let Some((limit, next)) = quota(&envoy.get("/")).filter(|(_, next)| *next > 0) {
        assert!(limit == 5 && next < left, "{next} of {limit} after {left}");
        left = next;
    }
    wait_until("a request is denied", || envoy.get("/").status() == 429);
    // The machines of the old configurations are gone, with their connections.
    wait_until("two workers are connected", || envoy.gauge("connected") == 2);
    wait_until("Redis has one connection a worker", || clients(&redis) == 2);
    wait_until("the old machines are gone", || envoy.statistic("wasm.envoy.wasm.runtime.v8.active") == 4);
    assert!(!envoy.counts().contains_key("per-ip fail_allow"), "{:?}", envoy.counts());
    envoy.finish();
}

/// The connections that a server has, but for the one that asks.
fn clients(redis: &Server) -> usize {
    let list: String = redis::cmd("CLIENT").arg("LIST").query(&mut redis.client()).unwrap();
    list.lines().count() - 1
}

#[test]
fn requests_that_wait_while_the_configuration_changes_are_decided() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    let mut envoy = Setup::new(shim.port(), &app)
        .configuration(slow(1000, "10s"))
        .workers(2)
        .draining(Duration::from_secs(5))
        .reloading()
        .start();
    assert!(quota(&envoy.get("/")).is_some());
    shim.forget();
    shim.set(Mode::Hold);
    let ingress = envoy.ingress();
    let requests = std::thread::spawn(move || at_once_from_each(ingress, 200, &Request::get("/")));
    shim.wait_for("EVALSHA", 200);
    envoy.reload(&slow(2000, "10s"));
    updated(&envoy, 2);
    shim.set(Mode::Pass);
    let responses = requests.join().unwrap();
    assert_eq!(with_status(&responses, 200), 200);
    let limits = responses.iter().filter_map(quota).map(|(limit, _)| limit).collect::<Vec<_>>();
    assert_eq!(limits, [1000; 200], "each is decided by the configuration under which it came");
    assert_eq!(shim.count("EVALSHA"), 200);
    wait_until("the new limit holds", || quota(&envoy.get("/")).is_some_and(|(limit, _)| limit == 2000));
    wait_until("the old machines are gone", || envoy.statistic("wasm.envoy.wasm.runtime.v8.active") == 4);
    wait_until("two workers are connected", || envoy.gauge("connected") == 2);
    wait_until("nothing is in flight", || envoy.gauge("redis_in_flight") == 0);
    envoy.wait_for_count("per-ip allow", |times| times == app.count() as i64);
    envoy.finish();
}

#[test]
fn requests_that_wait_in_vain_while_the_configuration_changes_are_let_through() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    let mut envoy = Setup::new(shim.port(), &app)
        .configuration(slow(1000, "1s"))
        .draining(Duration::from_secs(5))
        .reloading()
        .start();
    shim.set(Mode::Hold);
    let ingress = envoy.ingress();
    let sent = shim.count("EVALSHA");
    let requests = std::thread::spawn(move || at_once_from_each(ingress, 50, &Request::get("/")));
    shim.wait_for("EVALSHA", sent + 50);
    envoy.reload(&slow(2000, "5s"));
    updated(&envoy, 2);
    let responses = requests.join().unwrap();
    assert!(responses.iter().all(is_waved_through));
    shim.set(Mode::Pass);
    wait_until("the new limit holds", || quota(&envoy.get("/")).is_some_and(|(limit, _)| limit == 2000));
    wait_until("the old machine is gone", || envoy.statistic("wasm.envoy.wasm.runtime.v8.active") == 3);
    wait_until("one worker is connected", || envoy.gauge("connected") == 1);
    envoy.wait_for_count("per-ip fail_allow", |times| times == 50);
    envoy.finish();
}

#[test]
fn a_faulty_configuration_is_refused_while_the_one_before_it_goes_on() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let mut envoy = Setup::new(redis.port(), &app).configuration(slow(100, "5s")).reloading().start();
    envoy.tolerate("the configuration is refused");
    envoy.tolerate("wasm");
    assert_eq!(quota(&envoy.get("/")), Some((100, 99)));
    envoy.reload(&json!({"rules": [{"name": "per-ip", "limits": [{"capacity": 5, "refill": "often"}]}]}));
    wait_until("the update is rejected", || envoy.statistic("listener_manager.lds.update_rejected") == 1);
    assert!(envoy.log().contains("rules[0].limits[0].refill: "), "the log names the fault");
    assert_eq!(quota(&envoy.get("/")), Some((100, 98)));
    assert_eq!(quota(&envoy.get("/")), Some((100, 97)));
    // And a right one is taken after that.
    envoy.reload(&slow(50, "5s"));
    wait_until("the new limit holds", || quota(&envoy.get("/")).is_some_and(|(limit, _)| limit == 50));
    envoy.finish();
}

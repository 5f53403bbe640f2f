//! The example of `docs/migrate-from-application.md`: an application and the filter take from the same buckets.
//!
//! The application is the page's own, run by Python; Envoy, the module, the command line and Redis are real.

use std::process::Command;

use redis::Commands;
use serde_json::{Value, json};

use crate::support::app::App;
use crate::support::envoy::{Envoy, PATIENT, Setup};
use crate::support::http::Request;
use crate::support::markdown::blocks_of;
use crate::support::program::run;
use crate::support::project::{project, read};
use crate::support::quota::keys;
use crate::support::server::{Kind, Server, wait_until};

const RULES: &str = "envoy/migration/application/meshquota.json";
const PROGRAM: &str = "envoy/migration/application/quota.py";

fn rules() -> Value {
    let mut rules: Value = serde_json::from_str(&read(RULES)).unwrap();
    rules["redis"] = json!({"timeout": PATIENT});
    rules
}

/// Runs the application: whether it was granted, and what it printed.
fn application(redis: &Server, words: &str) -> (bool, Value) {
    application_told(redis, &words.split(' ').collect::<Vec<_>>())
}

/// The same, by words that may have blanks in them.
fn application_told(redis: &Server, words: &[&str]) -> (bool, Value) {
    let output = Command::new("python3")
        .args(["-B", PROGRAM, &format!("127.0.0.1:{}", redis.port())])
        .args(words)
        .current_dir(project())
        .output()
        .expect("python3 runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let printed = serde_json::from_str(&said);
    let printed = printed.unwrap_or_else(|_| panic!("{words:?}: {said}{}", String::from_utf8_lossy(&output.stderr)));
    (output.status.success(), printed)
}

/// How many tokens the command line finds in each bucket of a caller.
fn inspected(redis: &Server, rule: &str, caller: &str) -> Vec<u64> {
    let url = format!("redis://127.0.0.1:{}", redis.port());
    let arguments = ["inspect", "--json", "--redis", &url, RULES, rule, caller];
    run(&arguments).json()["buckets"]
        .as_array()
        .unwrap()
        .iter()
        .map(|bucket| bucket["left"].as_u64().unwrap())
        .collect()
}

fn start(redis: &Server, app: &App, configuration: Value) -> Envoy {
    Setup::new(redis.port(), app).configuration(configuration).start()
}

fn with_key(key: &str) -> Request {
    Request::get("/").with("x-api-key", key)
}

#[test]
fn what_the_application_takes_the_filter_does_not_find_and_the_other_way_round() {
    for kind in Kind::ALL {
        let (redis, app) = (Server::start(kind, &[]), App::start());
        let envoy = start(&redis, &app, rules());
        // Seven by the application leave three to the filter, and then nothing to either.
        assert_eq!(application(&redis, "take per-ip 127.0.0.1 7").1["remaining"], 3);
        assert_eq!(inspected(&redis, "per-ip", "127.0.0.1"), [3]);
        for expected in [200, 200, 200, 429] {
            assert_eq!(envoy.get("/").status(), expected);
        }
        let (granted, said) = application(&redis, "take per-ip 127.0.0.1");
        assert_eq!((granted, &said["granted"]), (false, &json!(0)));
        assert!(said["retry_after_ms"].as_u64().unwrap() > 300_000, "{said}");
        assert_eq!(inspected(&redis, "per-ip", "127.0.0.1"), [0]);
        // The other way round, from another address.
        for _ in 0..4 {
            assert_eq!(envoy.client_from("127.0.0.2").get("/").status(), 200);
        }
        assert!(!application(&redis, "take per-ip 127.0.0.2 7").0);
        assert_eq!(application(&redis, "take per-ip 127.0.0.2 6").1["remaining"], 0);
        assert!(!application(&redis, "look per-ip 127.0.0.2").0);
        // What is given back is there for the filter too, once it has forgotten the denial.
        assert_eq!(envoy.client_from("127.0.0.2").get("/").status(), 429);
        assert_eq!(application(&redis, "give-back per-ip 127.0.0.2 2").1["remaining"], 2);
        wait_until("the filter asks again", || envoy.client_from("127.0.0.2").get("/").status() == 200);
        assert_eq!(inspected(&redis, "per-ip", "127.0.0.2"), [1]);
        // A cost that no bucket can hold is never granted.
        assert_eq!(application(&redis, "take per-ip 127.0.0.3 11").1["retry_after_ms"], -1);
        envoy.finish();
    }
}

#[test]
fn a_rule_with_two_limits_and_a_digest_in_its_keys_is_shared_too() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = start(&redis, &app, rules());
    assert!(application(&redis, "take plan gold-key-1 2").0);
    for expected in [200, 200, 200, 429] {
        assert_eq!(envoy.client().exchange(&with_key("gold-key-1")).status(), expected);
    }
    assert_eq!(inspected(&redis, "plan", "gold-key-1"), [0, 15]);
    assert_eq!(application(&redis, "look plan gold-key-1").1["remaining"], 0);
    assert_eq!(envoy.client().exchange(&with_key("gold-key-2")).status(), 200);
    assert_eq!(application(&redis, "look plan gold-key-2").1["remaining"], 4);
    envoy.finish();
}

#[test]
fn the_application_has_the_keys_and_the_limits_that_the_command_line_prints() {
    let redis = Server::start(Kind::Redis, &[]);
    let callers = ["192.0.2.17", "2001:db8:1:2:3::4", "::ffff:192.0.2.18", "::1"];
    let explained = |arguments: &[&str]| run(arguments).json()["rules"].clone();
    for caller in callers {
        let rules = explained(&["explain", "--json", RULES, "--client-ip", caller, "--header", "x-api-key: blue one "]);
        for (rule, caller) in [("per-ip", caller), ("plan", "blue one ")] {
            let buckets = rules.as_array().unwrap().iter().find(|one| one["rule"] == rule).unwrap()["buckets"].clone();
            // One token more than the bucket holds is never granted, so this one is full, and of this size.
            let capacity = buckets[0]["capacity"].as_u64().unwrap();
            let said = |cost: u64| application_told(&redis, &["take", rule, caller, &cost.to_string()]).1;
            assert_eq!(said(capacity + 1)["retry_after_ms"], -1, "{rule} {caller}");
            assert_eq!(said(capacity)["remaining"], 0, "{rule} {caller}");
            let expected = buckets.as_array().unwrap().iter().map(|bucket| bucket["key"].as_str().unwrap());
            assert_eq!(keys(&redis), expected.collect::<Vec<_>>(), "{rule} {caller}");
            // The time to live is the time to fill and a second: the refill is the same too.
            for bucket in buckets.as_array().unwrap() {
                let refill = |name: &str| bucket["refill"][name].as_u64().unwrap();
                let full = capacity * refill("period_ms") / refill("tokens") + 1_000;
                let life: u64 = redis.client().pttl(bucket["key"].as_str().unwrap()).unwrap();
                assert!((full / 2..=full).contains(&life), "{bucket}: {life}");
            }
            redis::cmd("FLUSHALL").exec(&mut redis.client()).unwrap();
        }
    }
}

#[test]
fn a_filter_that_watches_under_a_prefix_of_its_own_charges_nobody_of_the_application() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let page = read("docs/migrate-from-application.md");
    let steps = blocks_of("json", &page);
    let step = steps.iter().find(|block| block.contains("\"key_prefix\": \"watch:\"")).unwrap();
    let mut watching: Value = serde_json::from_str(step).unwrap();
    watching["redis"] = json!({"timeout": PATIENT});
    let envoy = start(&redis, &app, watching);
    for _ in 0..12 {
        assert_eq!(envoy.get("/").status(), 200);
    }
    envoy.wait_for_count("per-ip shadow_deny", |count| count == 2);
    assert_eq!(keys(&redis), ["watch:127.0.0.1"]);
    envoy.finish();
    // And without the prefix it finds the buckets of the application as they stand.
    application(&redis, "take per-ip 127.0.0.1 9");
    let envoy = start(&redis, &app, rules());
    assert_eq!([envoy.get("/").status(), envoy.get("/").status()], [200, 429]);
    envoy.finish();
}

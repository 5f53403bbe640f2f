//! What an operator sees: metrics, the access log, the log.

use serde_json::json;

use crate::support::app::App;
use crate::support::envoy::{PATIENT, Setup};
use crate::support::http::{Client, Request, address};
use crate::support::server::{Kind, Server, wait_until};
use crate::support::shim::{Mode, Shim};
use crate::{forgetful, is_waved_through, quota, slow};

#[test]
fn prometheus_gets_the_documented_names_and_labels_and_no_more_than_that() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app)
        .configuration(json!({
            "redis": {"timeout": PATIENT},
            "deny_cache": {"entries": 0},
            "rules": [
                {"name": "per-ip", "limits": [{"capacity": 3, "refill": "1/day"}]},
                {"name": "other_1", "limits": [{"capacity": 100, "refill": "1/day"}]},
            ],
        }))
        .workers(2)
        .start();
    for _ in 0..5 {
        envoy.get("/");
    }
    envoy.wait_for_count("given_back", |times| times == 2);
    let mut client = Client::connect(envoy.listener("metrics"));
    let mut scrape = || {
        let response = client.get("/stats/prometheus");
        assert_eq!(response.status(), 200);
        response.text()
    };
    wait_until("a histogram is in the scrape", || !scrape().contains("meshquota_redis_call_ms_count{} 0\n"));
    let text = scrape();
    let lines = text.lines().collect::<Vec<_>>();
    for line in [
        r#"meshquota_decisions_total{rule="per-ip",outcome="allow"} 3"#,
        r#"meshquota_decisions_total{rule="per-ip",outcome="deny"} 2"#,
        r#"meshquota_decisions_total{rule="per-ip",outcome="fail_allow"} 0"#,
        r#"meshquota_decisions_total{rule="per-ip",outcome="fail_deny"} 0"#,
        r#"meshquota_decisions_total{rule="other_1",outcome="allow"} 5"#,
        r#"meshquota_skipped_total{rule="per-ip"} 0"#,
        r#"meshquota_redis_calls_total{result="ok"} 12"#,
        r#"meshquota_redis_calls_total{result="timeout"} 0"#,
        r#"meshquota_redis_calls_total{result="overload"} 0"#,
        r#"meshquota_redis_calls_total{result="error"} 0"#,
        r#"meshquota_redis_calls_total{result="late"} 0"#,
        "meshquota_deny_cache_hits_total{} 0",
        "meshquota_coalesced_total{} 0",
        "meshquota_given_back_total{} 2",
        "meshquota_reconnects_total{} 0",
        "meshquota_redis_in_flight{} 0",
        "meshquota_connected{} 2",
        "meshquota_redis_call_ms_count{} 12",
        "# TYPE meshquota_decisions_total counter",
        "# TYPE meshquota_redis_calls_total counter",
        "# TYPE meshquota_redis_errors_total counter",
        "# TYPE meshquota_connected gauge",
        "# TYPE meshquota_redis_in_flight gauge",
        "# TYPE meshquota_redis_call_ms histogram",
    ] {
        assert!(lines.contains(&line), "no {line} in:\n{}", only_ours(&lines));
    }
    for kind in
        ["readonly", "loading", "oom", "busy", "auth", "noperm", "cluster", "type", "protocol", "unavailable", "other"]
    {
        let line = format!("meshquota_redis_errors_total{{kind=\"{kind}\"}} 0");
        assert!(lines.contains(&line.as_str()), "no {line} in:\n{}", only_ours(&lines));
    }
    let ours = only_ours(&lines);
    assert!(!ours.contains("127.0.0.1") && !ours.contains("=.="), "{ours}");
    // Nothing else of the admin interface is to be had here.
    assert_eq!(client.get("/stats").status(), 404);
    assert_eq!(client.get("/config_dump").status(), 404);
    envoy.finish();
}

fn only_ours(lines: &[&str]) -> String {
    lines
        .iter()
        .filter(|line| line.contains("meshquota_") && !line.contains("envoy_"))
        .map(|line| format!("{line}\n"))
        .collect()
}

#[test]
fn the_access_log_tells_the_decision_the_rule_and_what_is_left() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app).capacity(2).start();
    let mut client = envoy.client();
    for _ in 0..3 {
        client.get("/path");
    }
    drop(client);
    let lines = envoy.wait_for_access_log(3);
    let ends = [
        "127.0.0.1 GET /path 200 via_upstream quota=allow rule=per-ip remaining=1",
        "127.0.0.1 GET /path 200 via_upstream quota=allow rule=per-ip remaining=0",
        "127.0.0.1 GET /path 429 meshquota_denied quota=deny rule=per-ip remaining=0",
    ];
    for (line, end) in lines.iter().zip(ends) {
        assert!(line.ends_with(end), "{line}");
    }
    envoy.finish();
}

#[test]
fn a_request_that_is_let_through_is_told_apart_in_the_access_log() {
    let (mut redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app).capacity(2).start();
    redis.kill();
    assert!(is_waved_through(&envoy.get("/")));
    let lines = envoy.wait_for_access_log(1);
    assert!(lines[0].ends_with("200 via_upstream quota=fail_allow rule=per-ip remaining=-"), "{}", lines[0]);
    envoy.finish();
}

#[test]
fn no_request_writes_a_line_to_the_log_and_none_names_a_client_a_key_or_a_password() {
    let (redis, app) = (Server::start(Kind::Redis, &["--requirepass", "open-sesame"]), App::start());
    let shim = Shim::before(redis.port());
    let mut configuration = slow(100, "200ms");
    configuration["redis"]["password"] = json!("open-sesame");
    let envoy = Setup::new(shim.port(), &app).configuration(forgetful(configuration)).start();
    let mut client = envoy.client_from("127.0.0.9");
    for _ in 0..150 {
        client.get("/");
    }
    let quiet = envoy.said();
    assert_eq!(quiet, [], "a healthy service has nothing to say");
    for (mode, what) in [
        (Mode::Hold, "timeouts"),
        (Mode::Cut(3), "a cut"),
        (Mode::Garbage(b"?\r\n".to_vec()), "garbage"),
        (
            Mode::Answer(
                b"-ERR unknown command 'EVALSHA', with args beginning with: 'quota:{per-ip:127.0.0.9}:0'\r\n".to_vec(),
            ),
            "an error that repeats the key",
        ),
        (
            Mode::Answer(b"-WRONGTYPE quota:{per-ip:127.0.0.9}:0 open-sesame\r\n".to_vec()),
            "an error that names the key",
        ),
    ] {
        shim.set(mode);
        for _ in 0..3 {
            assert_eq!(client.get("/").status(), 200, "{what}");
        }
    }
    shim.set(Mode::Pass);
    wait_until("a request is decided by Redis again", || {
        quota(&client.get("/")).is_some() || client.get("/").status() == 429
    });
    let log = envoy.log();
    for secret in ["127.0.0.9", "open-sesame", "per-ip:"] {
        assert!(!log.contains(secret), "the log has {secret}");
    }
    assert!(envoy.said().len() <= 4, "{:#?}", envoy.said());
    envoy.finish();
}

#[test]
fn the_gauges_tell_what_is_under_way_over_all_workers() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    let envoy = Setup::new(shim.port(), &app).capacity(1000).workers(2).start();
    assert_eq!((envoy.gauge("connected"), envoy.gauge("redis_in_flight")), (2, 0));
    shim.set(Mode::Hold);
    let mut clients = (0..40)
        .map(|nth| {
            let mut client = envoy.client_from(&address(nth).to_string());
            client.send(&Request::get("/"));
            client
        })
        .collect::<Vec<_>>();
    wait_until("the calls are seen in flight", || envoy.gauge("redis_in_flight") == 40);
    shim.set(Mode::Pass);
    for client in &mut clients {
        assert_eq!(client.receive().status(), 200);
    }
    wait_until("no call is in flight", || envoy.gauge("redis_in_flight") == 0);
    shim.set(Mode::Refuse);
    wait_until("no worker is connected", || envoy.gauge("connected") == 0);
    shim.set(Mode::Pass);
    wait_until("both workers are connected again", || {
        envoy.get("/");
        envoy.gauge("connected") == 2
    });
    envoy.finish();
}

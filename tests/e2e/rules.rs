//! Several rules, and several limits of one.

use std::time::Duration;

use redis::Commands;
use serde_json::json;

use crate::quota;
use crate::support::app::App;
use crate::support::envoy::{PATIENT, Setup};
use crate::support::http::Request;
use crate::support::server::{Kind, Server, wait_until};
use crate::support::shim::{Mode, Shim};

/// The whole tokens in the bucket of the client on 127.0.0.1 under that name and limit.
fn tokens(redis: &Server, namespace: &str, limit: usize) -> u64 {
    let text: String = redis.client().hget(format!("quota:{{{namespace}:127.0.0.1}}:{limit}"), "tokens").unwrap();
    text.split('.').next().unwrap().parse().unwrap()
}

#[test]
fn all_rules_must_admit_and_what_a_denied_request_took_is_given_back() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app)
        .configuration(json!({
            "redis": {"timeout": PATIENT}, "deny_cache": {"entries": 0},
            "rules": [
                {"name": "wide", "limits": [{"capacity": 100, "refill": "1/day"}]},
                {"name": "narrow", "limits": [{"capacity": 3, "refill": "1/min"}]},
            ],
        }))
        .start();
    for left in (0..3).rev() {
        // The rule with the least left relative to its capacity is shown.
        assert_eq!(quota(&envoy.get("/")), Some((3, left)));
    }
    for _ in 0..5 {
        let response = envoy.get("/");
        assert_eq!((response.status(), quota(&response)), (429, Some((3, 0))));
        assert!(response.number("retry-after").unwrap() <= 60);
    }
    envoy.wait_for_count("given_back", |times| times == 5);
    wait_until("the wide bucket has got back what the denied requests took", || tokens(&redis, "wide", 0) == 97);
    assert_eq!(tokens(&redis, "narrow", 0), 0);
    assert_eq!(app.count(), 3);
    envoy.expect_counts(&[
        ("wide allow", 8),
        ("narrow allow", 3),
        ("narrow deny", 5),
        ("given_back", 5),
        ("calls ok", 8 + 8 + 5),
        ("calls noscript", 2),
    ]);
    let log = envoy.wait_for_access_log(8);
    assert!(log[0].ends_with("quota=allow rule=narrow remaining=2"), "{}", log[0]);
    assert!(log[7].ends_with("quota=deny rule=narrow remaining=0"), "{}", log[7]);
    envoy.finish();
}

#[test]
fn what_is_given_back_goes_out_though_another_request_is_admitted_in_the_same_turn() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    let envoy = Setup::new(shim.port(), &app)
        .configuration(json!({
            "redis": {"timeout": PATIENT},
            "rules": [
                {"name": "wide", "limits": [{"capacity": 100, "refill": "1/day"}]},
                {"name": "narrow", "limits": [{"capacity": 1, "refill": "1/day"}]},
            ],
        }))
        .start();
    assert_eq!(envoy.get("/").status(), 200);
    shim.forget();
    shim.set(Mode::Hold);
    let mut denied = envoy.client();
    denied.send(&Request::get("/"));
    shim.wait_for("EVALSHA", 2);
    let mut admitted = envoy.client_from("127.0.0.2");
    admitted.send(&Request::get("/"));
    shim.wait_for("EVALSHA", 4);
    // All four replies lie in the worker's socket when it wakes: it denies, admits, and gives back, in one turn.
    envoy.freeze();
    shim.set(Mode::Pass);
    std::thread::sleep(Duration::from_millis(100));
    envoy.thaw();
    assert_eq!(denied.receive().status(), 429);
    assert_eq!(quota(&admitted.receive()), Some((1, 0)));
    envoy.expect_counts(&[
        ("wide allow", 3),
        ("narrow allow", 2),
        ("narrow deny", 1),
        ("given_back", 1),
        ("calls ok", 7),
        ("calls noscript", 2),
    ]);
    assert_eq!(tokens(&redis, "wide", 0), 99);
    envoy.finish();
}

#[test]
fn the_limits_of_one_rule_are_charged_all_or_none() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app)
        .configuration(json!({
            "redis": {"timeout": PATIENT}, "deny_cache": {"entries": 0},
            "rules": [{"name": "both", "limits": [
                {"capacity": 50, "refill": "1/day"},
                {"capacity": 4, "refill": "1/h"},
            ]}],
        }))
        .start();
    for left in (0..4).rev() {
        assert_eq!(quota(&envoy.get("/")), Some((4, left)));
    }
    for _ in 0..5 {
        let response = envoy.get("/");
        assert_eq!((response.status(), quota(&response)), (429, Some((4, 0))));
        let retry_after = response.number("retry-after").unwrap();
        assert!((3500..=3600).contains(&retry_after), "{retry_after}");
    }
    assert_eq!((tokens(&redis, "both", 0), tokens(&redis, "both", 1)), (46, 0));
    envoy.expect_counts(&[("both allow", 4), ("both deny", 5), ("calls ok", 9), ("calls noscript", 1)]);
    envoy.finish();
}

#[test]
fn rules_of_one_namespace_share_their_buckets() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app)
        .configuration(json!({
            "redis": {"timeout": PATIENT},
            "rules": [
                {"name": "one", "namespace": "shared", "limits": [{"capacity": 10, "refill": "1/day"}]},
                {"name": "two", "namespace": "shared", "limits": [{"capacity": 10, "refill": "1/day"}]},
            ],
        }))
        .start();
    for left in [8, 6, 4, 2, 0] {
        assert_eq!(quota(&envoy.get("/")), Some((10, left)));
    }
    assert_eq!(envoy.get("/").status(), 429);
    envoy.finish();
}

#[test]
fn an_absent_capacity_is_what_one_second_brings() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app)
        .configuration(json!({
            "redis": {"timeout": PATIENT},
            "rules": [
                {"name": "fast", "limits": [{"refill": "7000/s"}]},
                {"name": "slow", "limits": [{"refill": "1/h"}]},
            ],
        }))
        .start();
    assert_eq!(quota(&envoy.get("/")), Some((1, 0)));
    assert_eq!(envoy.get("/").status(), 429);
    assert!(tokens(&redis, "fast", 0) >= 6999);
    envoy.finish();
}

#[test]
fn the_clock_may_be_the_proxys() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app)
        .configuration(json!({
            "redis": {"timeout": PATIENT},
            "clock": "proxy",
            "rules": [{"name": "per-ip", "limits": [{"capacity": 3, "refill": "1/day"}]}],
        }))
        .start();
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis();
    let before = now();
    for left in (0..3).rev() {
        assert_eq!(quota(&envoy.get("/")), Some((3, left)));
    }
    assert_eq!(envoy.get("/").status(), 429);
    let ts: u128 = redis.client().hget::<_, _, String>(crate::KEY, "ts").unwrap().parse().unwrap();
    assert!((before..=now()).contains(&ts), "{ts}");
    envoy.finish();
}

#[test]
fn numbers_of_every_size_are_right() {
    let cases = [
        (json!({"capacity": 1e12, "refill": "1000000000000/day"}), 1_000_000_000_000_u64),
        (json!({"capacity": 2.0, "refill": "1/1month"}), 2),
        (json!({"capacity": 1, "refill": "1/10years"}), 1),
    ];
    for (limit, capacity) in cases {
        let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
        let envoy = Setup::new(redis.port(), &app)
            .configuration(json!({
                "redis": {"timeout": PATIENT},
                "rules": [{"name": "per-ip", "limits": [limit]}],
            }))
            .start();
        let response = envoy.get("/");
        assert_eq!(response.header("x-ratelimit-limit"), Some(capacity.to_string()));
        assert!(response.number("x-ratelimit-remaining").unwrap() >= capacity - 1);
        if capacity <= 2 {
            while envoy.get("/").status() == 200 {}
            let denied = envoy.get("/");
            assert!(denied.number("retry-after").unwrap() > 86_400 * 27, "{:?}", denied.headers);
        }
        envoy.finish();
    }
}

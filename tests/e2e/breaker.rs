//! Failures in a row, and what decides while Redis cannot be asked.

use std::time::{Duration, Instant};

use redis::Commands;
use serde_json::{Value, json};

use crate::support::app::App;
use crate::support::envoy::Setup;
use crate::support::http::{Message, Request};
use crate::support::server::{Kind, Server, wait_until};
use crate::{KEY, is_waved_through, quota};

fn with(failure_mode: &str, breaker: Value, timeout: &str) -> Value {
    json!({
        "redis": {"timeout": timeout, "breaker": breaker},
        "failure_mode": failure_mode,
        "rules": [{"name": "per-ip", "limits": [{"capacity": 10, "refill": "1/day"}]}],
    })
}

#[test]
fn a_frozen_redis_delays_a_few_requests_and_then_none_until_it_answers() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let breaker = json!({"failures": 5, "cool_down": "500ms"});
    let envoy = Setup::new(redis.port(), &app).configuration(with("allow", breaker, "1s")).start();
    let mut client = envoy.client();
    assert_eq!(quota(&client.get("/")), Some((10, 9)));
    assert_eq!(envoy.gauge("breaker_open"), 0);
    redis.stop();
    for _ in 0..5 {
        assert!(is_waved_through(&client.get("/")));
    }
    // Each of these would wait for a second; one in half a second does.
    let begin = Instant::now();
    for _ in 0..200 {
        assert!(is_waved_through(&client.get("/")));
    }
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
    wait_until("it is open", || envoy.gauge("breaker_open") == 1);
    envoy.wait_for_count("per-ip fail_allow", |times| times == 205);
    let refused = envoy.count("calls breaker");
    assert!(refused >= 150, "{refused} of 200 were decided at once");
    redis.cont();
    wait_until("Redis decides again", || quota(&client.get("/")).is_some());
    wait_until("it is closed", || envoy.gauge("breaker_open") == 0);
    let said =
        envoy.said().into_iter().map(|(_, line)| line).filter(|line| line.contains("breaker")).collect::<Vec<_>>();
    assert_eq!(said.len(), 2, "one line when it opens and one when it closes: {said:?}");
    envoy.finish();
}

#[test]
fn buckets_of_the_worker_take_over_and_hand_back_without_a_burst() {
    let (mut redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy =
        Setup::new(redis.port(), &app).configuration(with("local", json!({"cool_down": "200ms"}), "5s")).start();
    let mut client = envoy.client();
    for left in (4..10).rev() {
        assert_eq!(quota(&client.get("/")), Some((10, left)));
    }
    redis.kill();
    // The four that were left, and no more.
    for _ in 0..4 {
        assert!(is_waved_through(&client.get("/")));
    }
    for _ in 0..3 {
        let denied = client.get("/");
        assert_eq!((denied.status(), quota(&denied)), (429, Some((10, 0))));
        assert!(denied.number("retry-after").is_some_and(|wait| wait > 3600));
    }
    // Somebody of whom nothing was known has a full bucket.
    let mut other = envoy.client_from("127.0.0.2");
    let admitted = |responses: &[Message]| responses.iter().filter(|response| response.status() == 200).count();
    assert_eq!(admitted(&(0..15).map(|_| other.get("/")).collect::<Vec<_>>()), 10);
    let counts = [envoy.count("per-ip local_allow"), envoy.count("per-ip local_deny")];
    envoy.wait_for_count("per-ip local_allow", |times| times == 14);
    envoy.wait_for_count("per-ip local_deny", |times| times == 8);
    assert!(counts[0] <= 14 && counts[1] <= 8);
    // Redis comes back with full buckets. Who has had ten already gets no more of them.
    redis.restart();
    envoy.wait_for_count("reconnects", |times| times == 1);
    let mut responses = Vec::new();
    wait_until("Redis is asked again", || {
        responses.push(client.get("/"));
        envoy.count("calls ok") > 6
    });
    assert_eq!(admitted(&responses), 0);
    let denied = envoy.wait_for_access_log(30);
    assert!(denied.iter().any(|line| line.contains("quota=local_deny rule=per-ip")), "{denied:?}");
    // What Redis had granted before the worker said no was given back.
    wait_until("it is given back", || {
        redis.client().hget::<_, _, Option<f64>>(KEY, "tokens").unwrap().is_none_or(|tokens| tokens > 9.9)
    });
    // A caller of whom the worker remembers nothing is decided by Redis alone.
    assert_eq!(quota(&envoy.client_from("127.0.0.3").get("/")), Some((10, 9)));
    envoy.finish();
}

#[test]
fn each_rule_fails_in_its_own_way() {
    let (mut redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let limits = json!([{"capacity": 3, "refill": "1/day"}]);
    let mut envoy = Setup::new(redis.port(), &app)
        .configuration(json!({
            "redis": {"timeout": "5s"}, "failure_mode": "local", "local_share": 3,
            "rules": [
                {"name": "pay", "match": {"path": "/pay"}, "limits": limits, "failure_mode": "deny"},
                {"name": "read", "match": {"path": "/read"}, "limits": limits, "failure_mode": "allow"},
                {"name": "rest", "match": {"path": "/rest"}, "limits": limits},
            ],
        }))
        .start();
    redis.kill();
    let mut client = envoy.client();
    let mut statuses = |path: &str| (0..4).map(|_| client.exchange(&Request::get(path)).status()).collect::<Vec<_>>();
    assert_eq!(statuses("/read"), [200, 200, 200, 200]);
    assert_eq!(statuses("/pay"), [503, 503, 503, 503]);
    // A third of three.
    assert_eq!(statuses("/rest"), [200, 429, 429, 429]);
    envoy.wait_for_count("rest local_deny", |times| times == 3);
    envoy.wait_for_count("pay fail_deny", |times| times == 4);
    envoy.wait_for_count("read fail_allow", |times| times == 4);
    envoy.expect_5xx(4);
    envoy.finish();
}

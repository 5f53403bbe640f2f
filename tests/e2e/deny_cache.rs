//! Denials that a worker remembers: a flood costs Redis nothing, and nobody is kept out for longer than is right.

use std::thread;
use std::time::{Duration, Instant};

use redis::Commands;
use serde_json::{Value, json};

use crate::support::app::App;
use crate::support::envoy::Setup;
use crate::support::http::{Client, Message, Request};
use crate::support::server::{Kind, Server, wait_until};
use crate::support::shim::Shim;
use crate::{KEY, quota};

fn of(limits: Value, deny_cache: Value) -> Value {
    json!({
        "redis": {"timeout": "5s"}, "deny_cache": deny_cache,
        "rules": [{"name": "per-ip", "limits": limits}],
    })
}

fn drain(client: &mut Client, capacity: usize) {
    for _ in 0..capacity {
        assert_eq!(client.get("/").status(), 200);
    }
}

fn check_denied(response: &Message, capacity: u64) -> u64 {
    assert_eq!((response.status(), quota(response)), (429, Some((capacity, 0))));
    assert_eq!(response.header("x-envoy-ratelimited").as_deref(), Some("true"));
    response.number("retry-after").unwrap()
}

#[test]
fn a_flood_asks_redis_once_a_greatest_age_and_its_retry_after_counts_down() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    let limits = json!([{"capacity": 5, "refill": "1/min"}]);
    let envoy = Setup::new(shim.port(), &app).configuration(of(limits, json!({"max_age": "1min"}))).start();
    let mut client = envoy.client();
    drain(&mut client, 5);
    let first = check_denied(&client.get("/"), 5);
    shim.forget();
    let mut last = first;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(3) {
        let wait = check_denied(&client.get("/"), 5);
        assert!(wait <= last, "{wait} after {last}");
        last = wait;
    }
    assert!(last < first, "it counts down: {last} after {first}");
    assert_eq!(shim.count("EVALSHA"), 0);
    wait_until("it is counted", || {
        envoy.statistic("wasmcustom.meshquota_deny_cache_hits_total") == envoy.count("per-ip deny") - 1
    });
    envoy.finish();
}

#[test]
fn who_waits_as_long_as_was_told_is_admitted() {
    for kind in Kind::ALL {
        let (redis, app) = (Server::start(kind, &[]), App::start());
        let limits = json!([{"capacity": 2, "refill": "1/s"}]);
        let envoy = Setup::new(redis.port(), &app).configuration(of(limits, json!({"max_age": "1min"}))).start();
        let mut client = envoy.client();
        drain(&mut client, 2);
        for round in 0..3 {
            let mut wait = 0;
            for _ in 0..10 {
                wait = check_denied(&client.get("/"), 2);
            }
            thread::sleep(Duration::from_secs(wait));
            assert_eq!(client.get("/").status(), 200, "{kind:?}, round {round}");
        }
        envoy.finish();
    }
}

#[test]
fn a_bucket_that_an_operator_resets_is_seen_within_the_greatest_age() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let limits = json!([{"capacity": 5, "refill": "1/day"}]);
    let envoy = Setup::new(redis.port(), &app).configuration(of(limits, json!({"max_age": "200ms"}))).start();
    let mut client = envoy.client();
    drain(&mut client, 5);
    check_denied(&client.get("/"), 5);
    let () = redis.client().del(KEY).unwrap();
    wait_until("it is admitted again", || client.get("/").status() == 200);
    envoy.finish();
}

#[test]
fn a_costly_denial_says_nothing_of_what_is_cheap() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    let envoy = Setup::new(shim.port(), &app)
        .configuration(json!({
            "redis": {"timeout": "5s"}, "deny_cache": {"max_age": "1min"},
            "rules": [{"name": "per-ip", "cost": {"header": "x-cost"}, "limits": [{"capacity": 10, "refill": "1/min"}]}],
        }))
        .start();
    let mut client = envoy.client();
    let mut ask = |cost: u64| client.exchange(&Request::get("/").with("x-cost", cost.to_string()));
    assert_eq!(ask(7).status(), 200);
    let five = ask(5).number("retry-after").unwrap();
    shim.forget();
    // More than was denied is denied, and takes longer: one a minute.
    let eight = ask(8);
    assert_eq!(eight.status(), 429);
    assert!(
        (five + 179..=five + 181).contains(&eight.number("retry-after").unwrap()),
        "{five} and {:?}",
        eight.headers
    );
    assert_eq!(shim.count("EVALSHA"), 0);
    // Less is asked for, and there is enough.
    assert_eq!(quota(&ask(3)), Some((10, 0)));
    assert_eq!(shim.count("EVALSHA"), 1);
    // What can never fit says so again.
    for _ in 0..3 {
        let never = ask(11);
        assert_eq!((never.status(), never.header("retry-after")), (429, None));
    }
    assert_eq!(shim.count("EVALSHA"), 2);
    envoy.finish();
}

#[test]
fn a_denial_that_is_known_takes_nothing_from_other_rules_and_is_forgotten_with_its_configuration() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let rules = |capacity: u64| {
        json!({
            "redis": {"timeout": "5s"}, "deny_cache": {"max_age": "1min"},
            "rules": [
                {"name": "all", "key": [], "limits": [{"capacity": 100, "refill": "1/day"}]},
                {"name": "per-ip", "limits": [{"capacity": capacity, "refill": "1/day"}]},
            ],
        })
    };
    let mut envoy = Setup::new(redis.port(), &app).configuration(rules(3)).reloading().start();
    let mut client = envoy.client();
    drain(&mut client, 3);
    for _ in 0..20 {
        check_denied(&client.get("/"), 3);
    }
    let left = || redis.client().hget::<_, _, f64>("quota:{all:}:0", "tokens").unwrap() as u64;
    wait_until("what was taken in vain is given back", || left() == 97);
    envoy.wait_for_count("per-ip deny", |times| times == 20);
    assert_eq!(envoy.count("all allow"), 4, "one of the denied asked for it");
    // A raised capacity lets the level grow, and a bucket that is gone is full; neither waits for a minute.
    let () = redis.client().del(KEY).unwrap();
    envoy.reload(&rules(50));
    wait_until("the new limit holds", || quota(&envoy.get("/")).is_some_and(|(limit, _)| limit == 50));
    envoy.finish();
}

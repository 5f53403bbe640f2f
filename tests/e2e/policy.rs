//! What a request costs, and rules that only watch.

use redis::Commands;
use serde_json::{Value, json};

use crate::support::app::App;
use crate::support::envoy::{Envoy, PATIENT, Setup};
use crate::support::http::Request;
use crate::support::server::{Kind, Server};
use crate::{KEY, is_waved_through, quota};

fn start(redis: &Server, app: &App, rules: &Value) -> Envoy {
    Setup::new(redis.port(), app)
        .configuration(json!({"redis": {"timeout": PATIENT}, "deny_cache": {"entries": 0}, "rules": rules}))
        .start()
}

/// The whole tokens in a bucket.
fn tokens(redis: &Server, key: &str) -> i64 {
    redis.client().hget::<_, _, f64>(key, "tokens").unwrap().floor() as i64
}

#[test]
fn a_request_costs_what_its_header_says_within_bounds() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let rules = json!([{
        "name": "per-ip", "limits": [{"capacity": 100, "refill": "1/day"}],
        "cost": {"header": "x-cost", "default": 2, "max": 40},
    }]);
    let envoy = start(&redis, &app, &rules);
    let mut client = envoy.client();
    let mut left = 100;
    for (cost, taken) in [("5", 5), ("", 2), ("junk", 2), ("-5", 2), ("0", 2), ("1e2", 2), ("99999999999999999999", 40)]
    {
        left -= taken;
        let response = client.exchange(&Request::get("/").with("x-cost", cost));
        assert_eq!(quota(&response), Some((100, left as u64)), "{cost}");
        assert_eq!(tokens(&redis, KEY), left, "{cost}");
    }
    left -= 2;
    assert_eq!(quota(&client.get("/")), Some((100, left as u64)));
    // What is left is too little for this one, and stays.
    let denied = client.exchange(&Request::get("/").with("x-cost", "40"));
    assert_eq!(denied.status(), 200);
    let denied = client.exchange(&Request::get("/").with("x-cost", "40"));
    assert_eq!((denied.status(), quota(&denied)), (429, Some((100, left as u64 - 40))));
    assert!(denied.number("retry-after").is_some());
    envoy.finish();
}

#[test]
fn a_cost_above_the_capacity_is_denied_without_a_promise() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let rules = json!([{"name": "per-ip", "limits": [{"capacity": 10, "refill": "1/s"}], "cost": 11}]);
    let envoy = start(&redis, &app, &rules);
    let denied = envoy.get("/");
    assert_eq!((denied.status(), quota(&denied), denied.number("retry-after")), (429, Some((10, 10)), None));
    assert!(!redis.client().exists::<_, bool>(KEY).unwrap(), "a denial writes nothing");
    assert_eq!(app.count(), 0);
    envoy.finish();
}

#[test]
fn a_rule_that_only_watches_counts_and_changes_nothing() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let limits = json!([{"capacity": 2, "refill": "1/day"}]);
    let envoy = start(&redis, &app, &json!([{"name": "per-ip", "limits": limits, "shadow": true}]));
    for _ in 0..5 {
        assert!(is_waved_through(&envoy.get("/")));
    }
    assert_eq!(app.count(), 5);
    assert_eq!(tokens(&redis, KEY), 0);
    envoy.expect_counts(&[("per-ip allow", 2), ("per-ip shadow_deny", 3), ("calls ok", 5), ("calls noscript", 1)]);
    let log = envoy.wait_for_access_log(5);
    assert!(log[1].contains("quota=allow rule=per-ip"), "{}", log[1]);
    assert!(log[4].contains("quota=shadow_deny rule=per-ip"), "{}", log[4]);
    envoy.finish();
}

#[test]
fn a_rule_that_only_watches_stands_beside_one_that_binds() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let rules = json!([
        {"name": "tried", "limits": [{"capacity": 1, "refill": "1/day"}], "shadow": true},
        {"name": "binds", "limits": [{"capacity": 3, "refill": "1/day"}]},
    ]);
    let envoy = start(&redis, &app, &rules);
    for left in (0..3).rev() {
        assert_eq!(quota(&envoy.get("/")), Some((3, left)));
    }
    assert_eq!(envoy.get("/").status(), 429);
    envoy.expect_counts(&[
        ("tried allow", 1),
        ("tried shadow_deny", 3),
        ("binds allow", 3),
        ("binds deny", 1),
        ("calls ok", 8),
        ("calls noscript", 2),
    ]);
    let log = envoy.wait_for_access_log(4);
    assert!(log[2].contains("quota=shadow_deny rule=tried"), "{}", log[2]);
    assert!(log[3].contains("quota=deny rule=binds"), "{}", log[3]);
    envoy.finish();
}

#[test]
fn an_override_gives_its_callers_other_limits_or_none_at_all() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    // Ten thousand others, among which the ones that count have to be found.
    let others = (0..10_000).map(|number| format!("other-{number}")).collect::<Vec<_>>();
    let networks = (0..10_000).map(|number| format!("10.{}.{}.0/24", number / 256, number % 256)).collect::<Vec<_>>();
    let rules = json!([{
        "name": "plan", "key": [{"header": "x-api-key"}], "limits": [{"capacity": 2, "refill": "1/day"}],
        "overrides": [
            {"values": others, "limits": [{"capacity": 7, "refill": "1/day"}]},
            {"cidrs": networks, "unlimited": true},
            {"values": ["gold"], "limits": [{"capacity": 5, "refill": "1/day"}, {"capacity": 9, "refill": "1/day"}]},
            {"cidrs": ["127.0.0.2"], "unlimited": true},
        ],
    }]);
    let envoy = start(&redis, &app, &rules);
    let with = |key: &str| Request::get("/").with("x-api-key", key);
    let mut client = envoy.client();
    let admitted = |client: &mut crate::support::http::Client, key: &str| {
        (0..12).filter(|_| client.exchange(&with(key)).status() == 200).count()
    };
    assert_eq!(admitted(&mut client, "silver"), 2);
    assert_eq!(admitted(&mut client, "gold"), 5);
    assert_eq!(admitted(&mut client, "other-9999"), 7);
    let calls = envoy.count("plan allow") + envoy.count("plan deny");
    let mut unlimited = envoy.client_from("127.0.0.2");
    assert_eq!(admitted(&mut unlimited, "silver"), 12);
    assert!(is_waved_through(&unlimited.exchange(&with("silver"))));
    envoy.wait_for_count("calls ok", |times| times == 36);
    assert!(calls <= 36);
    let mut keys: Vec<String> = redis.client().keys("*").unwrap();
    keys.sort();
    // One bucket each, and two for the plan with two limits.
    assert_eq!(keys.len(), 4, "{keys:?}");
    envoy.finish();
}

#[test]
fn a_denial_looks_as_it_is_configured_and_each_header_comes_once() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app)
        .configuration(json!({
            "redis": {"timeout": PATIENT},
            "response": {
                "status": 403, "body": "{\"error\": \"quota\"}", "content_type": "application/json", "grpc_status": 9,
                "headers": "both", "set": {"access-control-expose-headers": "retry-after, ratelimit"},
            },
            "rules": [{"name": "per-ip", "limits": [{"capacity": 2, "refill": "1/min"}]}],
        }))
        .start();
    let mut client = envoy.client();
    let admitted = client.get("/");
    assert_eq!(quota(&admitted), Some((2, 1)));
    assert_eq!(admitted.all("ratelimit-policy"), ["\"per-ip\";q=2;w=120"]);
    assert_eq!(admitted.all("ratelimit"), ["\"per-ip\";r=1;t=60"]);
    assert_eq!(client.get("/").status(), 200);
    let denied = client.get("/");
    assert_eq!((denied.status(), denied.text().as_str()), (403, "{\"error\": \"quota\"}"));
    assert_eq!(denied.all("content-type"), ["application/json"]);
    assert_eq!(denied.all("access-control-expose-headers"), ["retry-after, ratelimit"]);
    assert_eq!(denied.all("ratelimit"), ["\"per-ip\";r=0;t=120"]);
    assert_eq!(denied.all("retry-after").len(), 1);
    // The connection stays usable, and a HEAD has no body.
    let head = client.exchange(&Request::new("HEAD", "/"));
    assert_eq!((head.status(), head.text().as_str()), (403, ""));
    let grpc = Request::new("POST", "/service/Method").with("content-type", "application/grpc");
    assert_eq!(client.exchange(&grpc).header("grpc-status").as_deref(), Some("9"));
    envoy.finish();
}

#[test]
fn quota_headers_can_be_left_out_and_a_rule_may_answer_in_its_own_way() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app)
        .configuration(json!({
            "redis": {"timeout": PATIENT},
            "response": {"headers": "none", "body": "common"},
            "rules": [
                {"name": "a", "match": {"path": "/a"}, "limits": [{"capacity": 1, "refill": "1/day"}]},
                {"name": "b", "match": {"path": "/b"}, "limits": [{"capacity": 1, "refill": "1/day"}],
                 "response": {"retry_after": false, "headers": "ietf"}},
            ],
        }))
        .start();
    let mut client = envoy.client();
    assert!(is_waved_through(&client.get("/a")) && is_waved_through(&client.get("/b")));
    let (a, b) = (client.get("/a"), client.get("/b"));
    assert_eq!((a.status(), a.text().as_str(), b.text().as_str()), (429, "common", "common"));
    assert!(a.number("retry-after").is_some() && a.all("ratelimit").is_empty());
    assert!(b.number("retry-after").is_none() && b.all("ratelimit").len() == 1);
    assert_eq!((quota(&a), quota(&b)), (None, None));
    envoy.finish();
}

#[test]
fn a_request_that_cannot_be_decided_is_refused_as_it_is_configured() {
    let (mut redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    redis.kill();
    let mut envoy = Setup::new(redis.port(), &app)
        .configuration(json!({
            "failure_mode": "deny",
            "failure_response": {"status": 500, "body": "later", "content_type": "text/html", "grpc_status": 13},
            "rules": [{"name": "per-ip", "limits": [{"capacity": 1, "refill": "1/day"}]}],
        }))
        .unconnected()
        .start();
    envoy.expect_5xx(1);
    let refused = envoy.get("/");
    assert_eq!((refused.status(), refused.text().as_str()), (500, "later"));
    assert_eq!(refused.all("content-type"), ["text/html"]);
    assert!(refused.number("retry-after").is_none() && quota(&refused).is_none());
    envoy.finish();
}

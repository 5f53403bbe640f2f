//! Which requests a rule is for: `match` and `unless`, and that what they leave out costs nothing.

use redis::Commands;
use serde_json::{Value, json};

use crate::quota;
use crate::support::app::App;
use crate::support::envoy::{Envoy, PATIENT, Setup};
use crate::support::http::Request;
use crate::support::server::{Kind, Server};

fn start(redis: &Server, app: &App, scope: &Value) -> Envoy {
    let mut rule = json!({"name": "a", "limits": [{"capacity": 1000, "refill": "1/day"}]});
    for (field, value) in scope.as_object().unwrap() {
        rule[field] = value.clone();
    }
    Setup::new(redis.port(), app)
        .configuration(json!({"redis": {"timeout": PATIENT}, "rules": [rule]}))
        .tweak(|document| {
            // Paths reach the filter as they were sent.
            document.manager("ingress")["normalize_path"] = json!(false);
            let route = &mut document.manager("ingress")["route_config"]["virtual_hosts"][0]["routes"];
            route[0]["name"] = json!("everything");
            let mut named = route[0].clone();
            named["name"] = json!("checkout");
            named["match"] = json!({"prefix": "/checkout"});
            *route = json!([named, route[0]]);
        })
        .start()
}

/// Sends each request, and checks which of them the rule met; then that Redis was asked for those and no others.
fn check(scope: &Value, requests: Vec<(Request, bool)>) {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = start(&redis, &app, scope);
    let mut client = envoy.client();
    let mut met = 0;
    for (request, expected) in requests {
        let response = client.exchange(&request);
        assert_eq!(response.status(), 200, "{request:?}");
        assert_eq!(quota(&response).is_some(), expected, "{request:?}");
        met += i64::from(expected);
    }
    let left: Option<f64> = redis.client().hget("quota:{a:127.0.0.1}:0", "tokens").unwrap();
    assert_eq!(left.map_or(1000, |tokens| tokens.floor() as i64), 1000 - met);
    envoy.expect_counts(&[("a allow", met), ("calls ok", met), ("calls noscript", i64::from(met > 0))]);
    envoy.finish();
}

#[test]
fn a_path_cannot_be_written_so_that_it_passes_by_its_rule() {
    let get = |path: &str, met| (Request::get(path), met);
    check(
        &json!({"match": {"path": "/login"}}),
        vec![
            get("/login", true),
            get("//login", true),
            get("/./login", true),
            get("/%6Cogin", true),
            get("/%6cogin?x=1", true),
            get("/a/..//login", true),
            get("/%2e/login", true),
            get("/login/", false),
            get("/Login", false),
            get("/%256Cogin", false),
            get("/", false),
        ],
    );
}

#[test]
fn methods_hosts_headers_and_routes_are_matched_as_envoy_means_them() {
    let post = |path: &str| Request::new("POST", path).with("x-plan", "gold");
    check(
        &json!({"match": {
            "path_regex": "/(checkout|cart)/[0-9]+",
            "methods": ["POST"],
            "hosts": ["*.example.com"],
            "headers": [{"name": "X-Plan", "exact": "gold"}, {"name": "x-internal", "present": false}],
            "route": "checkout",
        }}),
        vec![
            (post("/checkout/17").at_host("a.example.com:80"), true),
            (post("/checkout/17/x").at_host("a.example.com"), false),
            (post("/cart/17").at_host("a.example.com"), false),
            (post("/checkout/17").at_host("example.com"), false),
            (post("/checkout/17").at_host("a.example.com").with("x-internal", "1"), false),
            (post("/checkout/17").at_host("a.example.com").with("x-plan", "silver"), false),
            (Request::get("/checkout/17").at_host("a.example.com").with("x-plan", "gold"), false),
        ],
    );
}

#[test]
fn what_is_exempt_costs_no_call() {
    check(
        &json!({"unless": [
            {"path": "/healthz"},
            {"client_ip": ["127.0.0.0/8"], "headers": [{"name": "x-office", "contains": "b"}]},
            {"cors_preflight": true},
        ]}),
        vec![
            (Request::get("/healthz"), false),
            (Request::get("//healthz?full"), false),
            (Request::get("/").with("x-office", "a").with("x-office", "b"), false),
            (Request::get("/").with("x-office", "a"), true),
            (
                Request::new("OPTIONS", "/").with("origin", "https://x").with("access-control-request-method", "PUT"),
                false,
            ),
            (Request::new("OPTIONS", "/").with("origin", "https://x"), true),
            (Request::get("/").with("x-other", b"\xff\xfe"), true),
        ],
    );
}

#[test]
fn each_rule_is_for_its_own_requests() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app)
        .configuration(json!({
            "redis": {"timeout": PATIENT}, "deny_cache": {"entries": 0},
            "rules": [
                {"name": "login", "match": {"path": "/login", "methods": ["POST"]},
                 "limits": [{"capacity": 2, "refill": "1/day"}]},
                {"name": "rest", "limits": [{"capacity": 100, "refill": "1/day"}]},
            ],
        }))
        .start();
    let mut client = envoy.client();
    let statuses = (0..4).map(|_| client.exchange(&Request::new("POST", "/login")).status()).collect::<Vec<_>>();
    assert_eq!(statuses, [200, 200, 429, 429]);
    assert_eq!(quota(&client.get("/login")), Some((100, 97)));
    assert_eq!(quota(&client.get("/")), Some((100, 96)));
    envoy.expect_counts(&[
        ("login allow", 2),
        ("login deny", 2),
        ("rest allow", 6),
        ("given_back", 2),
        ("calls ok", 4 + 6 + 2),
        ("calls noscript", 2),
    ]);
    envoy.finish();
}

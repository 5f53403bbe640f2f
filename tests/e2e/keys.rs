//! Who a request counts as: every part of a key, alone and together, as it lies in Redis.

use redis::Commands;
use serde_json::{Value, json};

use crate::quota;
use crate::support::app::App;
use crate::support::envoy::{Envoy, PATIENT, Setup};
use crate::support::http::Request;
use crate::support::server::{Kind, Server};

fn start(redis: &Server, app: &App, key: &Value, if_missing: &str) -> Envoy {
    Setup::new(redis.port(), app)
        .configuration(json!({
            "redis": {"timeout": PATIENT},
            "rules": [{
                "name": "a", "key": key, "if_missing": if_missing, "limits": [{"capacity": 100, "refill": "1/day"}],
            }],
        }))
        .tweak(|document| {
            document.manager("ingress")["normalize_path"] = json!(false);
            let route = &mut document.manager("ingress")["route_config"]["virtual_hosts"][0]["routes"][0];
            route["name"] = json!("everything");
            route["metadata"] = json!({"filter_metadata": {"quota": {"plan": "gold"}}});
        })
        .start()
}

/// The keys in Redis, in order.
fn keys(redis: &Server) -> Vec<String> {
    let mut keys: Vec<String> = redis.client().keys("*").unwrap();
    keys.sort();
    keys
}

#[test]
fn each_part_of_a_key_tells_requests_apart_by_what_it_names() {
    let secret = "#2bb80d537b1da3e38bd30361aa855686";
    let request = || {
        Request::new("PUT", "//v1/./orders?token=s%65cret")
            .at_host("API.example.com:8080")
            .with("authorization", "secret")
            .with("cookie", "a=b; session=secret")
    };
    let cases = [
        (json!([]), String::new()),
        (json!(["client_ip"]), "127.0.0.1".to_owned()),
        (json!(["method"]), "PUT".to_owned()),
        (json!(["host"]), "api.example.com".to_owned()),
        (json!(["path"]), "/v1/orders".to_owned()),
        (json!(["route"]), "everything".to_owned()),
        (json!([{"header": "Authorization"}]), secret.to_owned()),
        (json!([{"cookie": "session"}]), secret.to_owned()),
        (json!([{"query": "token"}]), secret.to_owned()),
        (json!(["client_ip", "method", {"header": "authorization"}]), format!("127.0.0.1|PUT|{secret}")),
        (
            json!([{"property": ["xds", "route_metadata", "filter_metadata", "quota", "plan"]}]),
            "#24d7f03d8dc3c3666969e6fa5bb1fac4".to_owned(),
        ),
    ];
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    for (key, identity) in cases {
        let envoy = start(&redis, &app, &key, "skip");
        assert_eq!(quota(&envoy.client().exchange(&request())), Some((100, 99)), "{key}");
        assert_eq!(keys(&redis), [format!("quota:{{a:{identity}}}:0")], "{key}");
        redis::cmd("FLUSHALL").exec(&mut redis.client()).unwrap();
        envoy.finish();
    }
}

#[test]
fn parts_do_not_run_together_and_strange_bytes_stay_apart() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = start(&redis, &app, &json!([{"header": "x"}, {"header": "y"}]), "share");
    let mut client = envoy.client();
    let pairs: &[(&[u8], &[u8])] = &[
        (b"a:b", b"c"),
        (b"a", b"b:c"),
        (b"a|b", b"c"),
        (b"a", b"b|c"),
        (b"\xfe", b"x"),
        (b"\xff", b"x"),
        (b"*1 $5", b"x"),
        (b"a", b""),
        (b"", b"a"),
    ];
    for (x, y) in pairs {
        let response = client.exchange(&Request::get("/").with("x", x).with("y", y));
        assert_eq!(quota(&response), Some((100, 99)), "{} {}", x.escape_ascii(), y.escape_ascii());
    }
    let long = "k".repeat(48 * 1024);
    assert_eq!(quota(&client.exchange(&Request::get("/").with("x", &long).with("y", "1"))), Some((100, 99)));
    let keys = keys(&redis);
    assert_eq!(keys.len(), pairs.len() + 1);
    assert!(keys.iter().all(|key| key.len() < 90 && key.bytes().all(|byte| byte.is_ascii_graphic())), "{keys:?}");
    envoy.finish();
}

#[test]
fn a_request_that_lacks_a_part_is_skipped_or_shares_a_bucket() {
    for (if_missing, counted) in [("skip", false), ("share", true)] {
        let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
        let envoy = start(&redis, &app, &json!([{"header": "x-api-key"}]), if_missing);
        let mut client = envoy.client();
        let requests =
            [Request::get("/"), Request::get("/").with("x-api-key", ""), Request::get("/").with("x-api-key", "  ")];
        for (place, request) in requests.iter().enumerate() {
            let expected = counted.then_some((100, 99 - place as u64));
            assert_eq!(quota(&client.exchange(request)), expected, "{if_missing} {request:?}");
        }
        assert_eq!(quota(&client.exchange(&Request::get("/").with("x-api-key", "k"))), Some((100, 99)));
        envoy.wait_for_count(if counted { "a allow" } else { "a skipped" }, |times| times >= 3);
        envoy.finish();
    }
}

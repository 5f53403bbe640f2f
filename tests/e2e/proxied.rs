//! The tunnel through Envoy's own Redis client, `redis_proxy`, which looks after credentials and connections.

use serde_json::{Value, json};

use crate::support::app::App;
use crate::support::envoy::{Document, Setup};
use crate::support::http::{Request, at_once, with_status};
use crate::support::server::{Kind, Server, wait_until};
use crate::support::shim::Shim;
use crate::{is_waved_through, quota, slow};

const PASSWORD: &str = "correct-horse-battery-staple";

/// Puts `redis_proxy`, on an internal listener, between the tunnel and the cluster of Redis.
fn through_redis_proxy(document: &mut Document) {
    const NAME: &str = "meshquota_redis_proxy";
    let listener = json!({
        "name": NAME,
        "internal_listener": {},
        "filter_chains": [{"filters": [{
            "name": "envoy.filters.network.redis_proxy",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.network.redis_proxy.v3.RedisProxy",
                "stat_prefix": NAME,
                "settings": {"op_timeout": "5s"},
                "prefix_routes": {"catch_all_route": {"cluster": "meshquota_redis"}},
            },
        }]}],
    });
    let cluster = json!({
        "name": NAME,
        "load_assignment": {"cluster_name": NAME, "endpoints": [{"lb_endpoints": [{"endpoint": {
            "address": {"envoy_internal_address": {"server_listener_name": NAME}},
        }}]}]},
    });
    let add = |list: &mut Value, element| list.as_array_mut().unwrap().push(element);
    add(&mut document.0["static_resources"]["listeners"], listener);
    add(&mut document.0["static_resources"]["clusters"], cluster);
    document.cluster("meshquota_redis")["typed_extension_protocol_options"] = json!({
        "envoy.filters.network.redis_proxy": {
            "@type": "type.googleapis.com/envoy.extensions.filters.network.redis_proxy.v3.RedisProtocolOptions",
            "auth_password": {"inline_string": PASSWORD},
        },
    });
    let routes = &mut document.manager("meshquota_tunnel")["route_config"]["virtual_hosts"][0]["routes"];
    routes[0]["route"]["cluster"] = json!(NAME);
}

#[test]
fn redis_proxy_carries_the_calls_and_logs_in_by_itself() {
    let (redis, app) = (Server::start(Kind::Redis, &["--requirepass", PASSWORD]), App::start());
    let shim = Shim::before(redis.port());
    let envoy =
        Setup::new(shim.port(), &app).configuration(slow(100, "5s")).workers(2).tweak(through_redis_proxy).start();
    for left in (90..100).rev() {
        assert_eq!(quota(&envoy.get("/")), Some((100, left)));
    }
    // NOSCRIPT passes through it, and so does the retry with the whole script.
    let mut admin = redis.connect(&format!(":{PASSWORD}@")).unwrap();
    redis::cmd("SCRIPT").arg("FLUSH").exec(&mut admin).unwrap();
    let responses = at_once(envoy.ingress(), 150, &Request::get("/"));
    assert_eq!((with_status(&responses, 200), with_status(&responses, 429)), (90, 60));
    let evals = shim.count("EVAL");
    assert_eq!(shim.count("EVALSHA"), 160);
    envoy.expect_counts(&[
        ("per-ip allow", 100),
        ("per-ip deny", 60),
        ("calls ok", 160),
        ("calls noscript", evals as i64),
    ]);
    for commands in shim.conversations().into_values() {
        assert_eq!(commands[0], "AUTH", "{commands:?}");
    }
    assert!(!envoy.log().contains(PASSWORD));
    envoy.finish();
}

#[test]
fn what_redis_proxy_answers_in_place_of_redis_is_an_outage() {
    let (mut redis, app) = (Server::start(Kind::Redis, &["--requirepass", PASSWORD]), App::start());
    let envoy = Setup::new(redis.port(), &app).configuration(slow(100, "5s")).tweak(through_redis_proxy).start();
    assert_eq!(quota(&envoy.get("/")), Some((100, 99)));
    redis.kill();
    for _ in 0..5 {
        assert!(is_waved_through(&envoy.get("/")));
    }
    envoy.wait_for_count("errors unavailable", |times| times == 5);
    assert_eq!(envoy.count("per-ip fail_allow"), 5);
    // The stream ends at redis_proxy, so it has not been lost.
    assert_eq!((envoy.gauge("connected"), envoy.count("reconnects")), (1, 0));
    assert_eq!(envoy.said().len(), 1, "{:?}", envoy.said());
    redis.restart();
    wait_until("a request is decided by Redis again", || quota(&envoy.get("/")).is_some());
    envoy.finish();
}

//! What the chart has rendered, in a real Envoy as Istio would configure it, before real servers.

use serde_json::{Value, json};

use crate::helm::{Helm, example};
use crate::mesh::{Hop, boot};
use crate::support::app::App;
use crate::support::envoy::{PATIENT, Setup};
use crate::support::program::{file, path};
use crate::support::quota::{check_limit, key, keys, quota};
use crate::support::server::{Kind, Server, free_port};
use crate::support::tls::{certificates, tls_server};
use crate::translation::{Layout, Proxy};

const PASSWORD: &str = "correct-horse-battery-staple";

/// An example with these values besides: a limit of ten that brings next to nothing back, and a patient timeout.
fn rendered(helm: &Helm, name: &str, values: &Value) -> Vec<Value> {
    let mut values = values.clone();
    values["config"]["redis"]["timeout"] = json!(PATIENT);
    values["config"]["rules"] = json!([{"name": "per-ip", "limits": [{"capacity": 10, "refill": "1/day"}]}]);
    let file = file(values.to_string());
    helm.rendered("shop", &["--values", &example(name), "--values", path(&file)])
}

#[test]
fn a_sidecar_that_the_chart_has_configured_limits_and_has_its_bucket_in_redis() {
    for helm in Helm::each() {
        let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
        let manifests = rendered(&helm, "namespace", &json!({}));
        let setup = Setup::new(redis.port(), &app);
        let envoy = setup.tweak(boot(&manifests, Hop::Inbound, &[redis.port()], app.port(), &[])).start();
        check_limit(&envoy);
        assert_eq!((keys(&redis), app.count()), (vec![key("127.0.0.1")], 10));
        envoy.finish();
    }
}

#[test]
fn a_gateway_that_the_chart_has_configured_limits_and_has_its_bucket_in_redis() {
    for (helm, layout) in Helm::each().iter().zip([Layout::Listed, Layout::Chained]) {
        let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
        let proxy = Proxy::new(rendered(helm, "envoy-gateway", &json!({})), layout);
        let envoy = Setup::new(redis.port(), &app).tweak(proxy.boot(&[redis.port()], app.port())).start();
        check_limit(&envoy);
        assert_eq!((keys(&redis), app.count()), (vec![key("127.0.0.1")], 10));
        envoy.finish();
    }
}

#[test]
fn redis_is_reached_over_tls_where_its_certificate_has_the_name_and_not_otherwise() {
    let files = tempfile::tempdir().unwrap();
    let [authority, certificate, key] = certificates(files.path(), "chart");
    let (port, app) = (free_port(), App::start());
    let _redis = tls_server(port, [&authority, &certificate, &key], "no", &["--requirepass", PASSWORD]);
    for helm in Helm::each() {
        let values = |name: &str| {
            json!({
                "redis": {"tls": {"enabled": true, "serverName": name, "caFile": authority}},
                "config": {"redis": {"password": PASSWORD, "cluster": "meshquota_tunnel"}, "key_prefix": helm.version},
            })
        };
        let setup = |name: &str| {
            let manifests = rendered(&helm, "namespace", &values(name));
            Setup::new(port, &app).tweak(boot(&manifests, Hop::Inbound, &[port], app.port(), &[]))
        };
        let trusting = setup("redis.test").start();
        check_limit(&trusting);
        trusting.finish();
        let wary = setup("redis.example").unconnected().start();
        let response = wary.get("/");
        assert_eq!((response.status(), quota(&response)), (200, None));
        wary.wait_for_count("errors unavailable", |times| times == 1);
        wary.finish();
    }
}

#[test]
fn redis_proxy_logs_in_with_the_password_of_the_proxys_environment() {
    for helm in Helm::each() {
        let (redis, app) = (Server::start(Kind::Redis, &["--requirepass", PASSWORD]), App::start());
        let credentials =
            json!({"mode": "proxied", "username": "default", "passwordVariable": "MESHQUOTA_REDIS_PASSWORD"});
        let manifests = rendered(&helm, "namespace", &json!({"redis": credentials}));
        assert!(!format!("{manifests:?}").contains(PASSWORD));
        let setup = Setup::new(redis.port(), &app).variable("MESHQUOTA_REDIS_PASSWORD", PASSWORD);
        let envoy = setup.tweak(boot(&manifests, Hop::Inbound, &[redis.port()], app.port(), &[])).start();
        check_limit(&envoy);
        envoy.finish();
    }
}

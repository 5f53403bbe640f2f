//! Values that are wrong: refused before anything is rendered, and named.

use serde_json::{Value, json};

use crate::helm::{Helm, example};
use crate::support::program::{file, path};

/// Values for the sidecars of a namespace, with these in their place.
fn refused(helm: &Helm, namespace: &str, values: &Value) -> String {
    let file = file(values.to_string());
    let said = helm.template(namespace, &["--values", &example("namespace"), "--values", path(&file)]);
    assert!(!said.fine && said.out.is_empty(), "Helm {} renders this: {values}", helm.version);
    said.err
}

#[test]
fn a_value_of_the_wrong_kind_or_name_is_refused_by_the_schema_with_its_path() {
    // Helm 3 and 4 name a path in different ways, by the same words.
    let cases = [
        (json!({"redi": {}}), &["redi"][..]),
        (json!({"redis": {"hosts": "x"}}), &["redis", "hosts"]),
        (json!({"redis": {"port": 70000}}), &["redis", "port", "65"]),
        (json!({"redis": {"port": "6379"}}), &["redis", "port", "string", "integer"]),
        (json!({"redis": {"mode": "sentinel"}}), &["redis", "mode", "direct", "proxied", "cluster"]),
        (json!({"redis": {"host": "redis://redis:6379"}}), &["redis", "host", "does not match pattern"]),
        (json!({"redis": {"mode": "cluster", "nodes": ["redis-0"]}}), &["redis", "nodes", "0", "string", "object"]),
        (json!({"redis": {"mode": "cluster", "nodes": [{"port": 1}]}}), &["redis", "nodes", "0", "host"]),
        (json!({"redis": {"passwordVariable": "$PASSWORD"}}), &["redis", "passwordVariable", "does not match pattern"]),
        (json!({"redis": {"opTimeout": "500ms"}}), &["redis", "opTimeout", "does not match pattern"]),
        (json!({"redis": {"tls": true}}), &["redis", "tls", "boolean", "object"]),
        (json!({"image": {"url": "registry.example.com/meshquota"}}), &["image", "url", "does not match pattern"]),
        (json!({"image": {"sha256": "sha256:ab"}}), &["image", "sha256", "does not match pattern"]),
        (json!({"image": {"pullPolicy": "Never"}}), &["image", "pullPolicy", "IfNotPresent", "Always"]),
        (json!({"failStrategy": "FAIL_CLOSED"}), &["failStrategy", "FAIL_RELOAD", "FAIL_OPEN", "FAIL_CLOSE"]),
        (json!({"config": [{"name": "per-ip"}]}), &["config", "array", "object"]),
        (json!({"istio": {"mode": "sidecar"}}), &["istio", "mode", "namespace", "mesh", "gateway", "waypoint"]),
        (json!({"istio": {"selector": {"app": 1}}}), &["istio", "selector", "app", "string"]),
        (json!({"istio": {"targetRefs": [{"name": "public"}]}}), &["istio", "targetRefs", "0", "kind"]),
        (json!({"istio": {"priority": "high"}}), &["istio", "priority", "integer", "string"]),
        (json!({"envoyGateway": {"gateway": ["public"]}}), &["envoyGateway", "gateway", "array", "string"]),
        (json!({"labels": {"a": true}}), &["labels", "a", "string"]),
    ];
    for helm in Helm::each() {
        for (values, words) in &cases {
            let said = refused(&helm, "shop", values);
            assert!(said.contains("values don't meet the specifications of the schema"), "{said}");
            // The first lines only say that something is refused.
            let faults = said.to_lowercase().lines().skip(2).collect::<Vec<_>>().join(" ");
            for word in *words {
                assert!(faults.contains(&word.to_lowercase()), "Helm {}, {values}: no {word} in\n{said}", helm.version);
            }
        }
    }
}

#[test]
fn values_that_need_each_other_are_refused_with_what_is_missing() {
    let gateway = json!([{"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "public"}]);
    let web = json!({"app": "web"});
    let nodes = json!([{"host": "redis-0"}]);
    let cases = [
        ("shop", json!({"image": {"url": ""}}), "image.url: missing"),
        ("shop", json!({"config": null}), "config: missing"),
        ("shop", json!({"redis": {"host": ""}}), "redis.host: missing"),
        ("shop", json!({"redis": {"mode": "proxied", "host": ""}}), "redis.host: missing"),
        ("shop", json!({"redis": {"nodes": nodes}}), "redis.nodes: not used by redis.mode direct"),
        ("shop", json!({"redis": {"mode": "cluster", "host": ""}}), "redis.nodes: missing"),
        ("shop", json!({"redis": {"mode": "cluster", "nodes": nodes}}), "redis.host: not used by redis.mode cluster"),
        (
            "shop",
            json!({"redis": {"mode": "cluster", "host": "", "nodes": nodes, "tls": {"enabled": true}}}),
            "redis.tls.serverName: missing",
        ),
        ("shop", json!({"redis": {"host": "10.0.0.7", "tls": {"enabled": true}}}), "redis.tls.serverName: missing"),
        ("shop", json!({"redis": {"host": "2001:db8::7", "tls": {"enabled": true}}}), "redis.tls.serverName: missing"),
        ("shop", json!({"redis": {"passwordVariable": "A"}}), "redis.username, redis.passwordVariable: not used"),
        ("shop", json!({"redis": {"username": "a"}}), "redis.username, redis.passwordVariable: not used"),
        ("shop", json!({"redis": {"mode": "proxied", "username": "a"}}), "redis.passwordVariable: missing"),
        ("shop", json!({"istio": {"enabled": false}}), "istio.enabled, envoyGateway.enabled: both are false"),
        (
            "shop",
            json!({"envoyGateway": {"enabled": true, "gateway": "public"}}),
            "istio.enabled, envoyGateway.enabled: both are true",
        ),
        (
            "shop",
            json!({"istio": {"enabled": false}, "envoyGateway": {"enabled": true}}),
            "envoyGateway.gateway: missing",
        ),
        (
            "shop",
            json!({"istio": {"enabled": false}, "envoyGateway": {"enabled": true, "gateway": "a"}, "failStrategy": "FAIL_RELOAD"}),
            "failStrategy: FAIL_RELOAD, which Envoy Gateway does not know",
        ),
        (
            "shop",
            json!({"istio": {"enabled": false}, "envoyGateway": {"enabled": true, "gateway": "a"}, "image": {"url": "file:///q.wasm"}}),
            "image.url: a file, which Envoy Gateway does not take",
        ),
        ("shop", json!({"istio": {"mode": "mesh"}}), "istio.mode: mesh, but the release is in the namespace shop"),
        ("istio-system", json!({}), "istio.mode: namespace, but the release is in istio-system"),
        ("shop", json!({"istio": {"rootNamespace": "shop"}}), "istio.mode: namespace, but the release is in shop"),
        ("shop", json!({"istio": {"targetRefs": gateway}}), "istio.targetRefs: not used by istio.mode namespace"),
        ("shop", json!({"istio": {"mode": "gateway"}}), "istio.targetRefs: missing, expected the gateway"),
        (
            "shop",
            json!({"istio": {"mode": "gateway", "targetRefs": gateway, "selector": web}}),
            "istio.selector, istio.targetRefs: both are there",
        ),
        ("shop", json!({"istio": {"mode": "waypoint"}}), "istio.targetRefs: missing, expected the waypoint"),
        (
            "shop",
            json!({"istio": {"mode": "waypoint", "targetRefs": [{"group": "", "kind": "Service", "name": "web"}]}}),
            "istio.tunnel.selector: missing",
        ),
        (
            "istio-system",
            json!({"istio": {"mode": "gateway", "targetRefs": [gateway[0], gateway[0]]}}),
            "istio.tunnel.selector: missing",
        ),
    ];
    for helm in Helm::each() {
        for (namespace, values, expected) in &cases {
            let said = refused(&helm, namespace, values);
            let faults = said.lines().filter_map(|line| line.strip_prefix("- ")).collect::<Vec<_>>();
            assert!(
                faults.len() == 1 && faults[0].starts_with(expected),
                "Helm {}, {values}: not {expected} alone in\n{said}",
                helm.version
            );
        }
    }
}

#[test]
fn without_any_value_all_that_is_missing_is_named_at_once() {
    for helm in Helm::each() {
        let said = helm.template("shop", &[]);
        assert!(!said.fine);
        for missing in ["- image.url: missing", "- config: missing", "- redis.host: missing"] {
            assert!(said.err.lines().any(|line| line.starts_with(missing)), "{missing}\n{}", said.err);
        }
    }
}

#[test]
fn a_configuration_that_is_no_object_is_refused_with_the_readers_words() {
    let cases = [
        (r#"{"rules": [}"#, "config: a text that is no object in JSON or YAML: "),
        ("rules: [", "config: a text that is no object in JSON or YAML: "),
        ("- name: per-ip\n", "config: a text that is no object in JSON or YAML: "),
        ("rules", "config: a text that is no object in JSON or YAML: "),
        ("# nothing\n", "config: a text that is no object in JSON or YAML: it is empty"),
    ];
    for helm in Helm::each() {
        for (text, expected) in cases {
            let file = file(text);
            let config = format!("config={}", path(&file));
            let said = helm.template("shop", &["--values", &example("namespace"), "--set-file", &config]);
            let fault = said.err.lines().find_map(|line| line.strip_prefix("- ")).unwrap_or_default();
            assert!(!said.fine && fault.starts_with(expected), "Helm {}, {text}: {}", helm.version, said.err);
        }
    }
}

//! The Helm chart of envoy/chart/: what Helm makes of it is what the plain manifests say, and a configuration arrives as it is.
//!
//! Helm is real, in its versions 3 and 4; so are the Envoys, the servers and the command line.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, clippy::string_slice)]

mod support;

// Of what the tests of the plain manifests have, some is used here.
#[allow(dead_code)]
#[path = "istio/mesh.rs"]
mod mesh;
#[path = "gateway/schemas.rs"]
mod of_envoy_gateway;
#[path = "istio/schemas.rs"]
mod of_istio;
#[allow(dead_code)]
#[path = "gateway/translation.rs"]
mod translation;

#[path = "chart/configuration.rs"]
mod configuration;
#[path = "chart/helm.rs"]
mod helm;
#[path = "chart/refusals.rs"]
mod refusals;
#[path = "chart/requests.rs"]
mod requests;

use std::collections::BTreeMap;

use serde_json::{Value, json};

use helm::{CHART, Helm, example};
use mesh::{Hop, added};
use support::manifests::{self, of_kind, with, yaml};
use support::project::{files, read};
use support::tunnel::check_parts;

/// The examples of the chart: each with its namespace, and the folder that kustomize makes the same of.
const EXAMPLES: [(&str, &str, &str); 7] = [
    ("envoy-gateway-route", "shop", "envoy/gateway/overlays/route"),
    ("envoy-gateway", "shop", "envoy/gateway/overlays/gateway"),
    ("gateway", "istio-ingress", "envoy/istio/overlays/gateway"),
    ("mesh", "istio-system", "envoy/istio/overlays/mesh"),
    ("namespace", "shop", "envoy/istio/overlays/namespace"),
    ("redis-cluster", "shop", "envoy/istio/overlays/proxied"),
    ("waypoint", "shop", "envoy/istio/overlays/waypoint"),
];

/// What is wrong with an object, by the fields that are documented for its kind.
fn faults(object: &Value) -> Vec<String> {
    let istio = object["apiVersion"].as_str().unwrap().contains(".istio.io/");
    if istio { of_istio::faults(object) } else { of_envoy_gateway::faults(object) }
}

/// Objects by their kinds and names.
fn by_name(objects: Vec<Value>) -> BTreeMap<String, Value> {
    let named = |object: Value| (format!("{} {}", object["kind"], object["metadata"]["name"]), object);
    objects.into_iter().map(named).collect()
}

#[test]
fn helm_finds_no_fault_in_the_chart_nor_in_its_examples() {
    for helm in Helm::each() {
        let mut values = vec![None];
        values.extend(EXAMPLES.map(|(name, ..)| Some(example(name))));
        for file in values {
            let mut arguments = vec!["lint", "--strict", CHART];
            arguments.extend(file.iter().flat_map(|file| ["--values", file.as_str()]));
            let said = helm.run(&arguments);
            assert!(said.fine, "Helm {}, {file:?}: {}{}", helm.version, said.out, said.err);
        }
    }
}

#[test]
fn each_example_makes_what_kustomize_makes_of_the_plain_manifests() {
    let names = EXAMPLES.map(|(name, ..)| example(name));
    assert_eq!(files(&format!("{CHART}/examples")), names);
    for helm in Helm::each() {
        for (name, namespace, folder) in EXAMPLES {
            let objects = helm.rendered(namespace, &["--values", &example(name)]);
            for object in &objects {
                assert_eq!(faults(object), [""; 0], "{name}");
            }
            assert_eq!(by_name(objects), by_name(manifests::rendered(folder)), "Helm {}, {name}", helm.version);
        }
        let nodes = (0..3).map(|number| json!({"host": format!("redis-{number}.redis.redis.svc.cluster.local")}));
        let cluster = json!({"mode": "cluster", "host": "", "nodes": nodes.collect::<Vec<_>>()});
        let set = format!("redis={cluster}");
        let objects = helm.rendered("shop", &["--values", &example("envoy-gateway"), "--set-json", &set]);
        assert_eq!(by_name(objects), by_name(manifests::rendered("envoy/gateway/overlays/proxied")));
    }
}

#[test]
fn with_redis_proxy_the_way_to_one_redis_is_that_of_the_configuration_for_envoy() {
    for helm in Helm::each() {
        let proxied = ["--values", &example("namespace"), "--set", "redis.mode=proxied"];
        let objects = helm.rendered("shop", &proxied);
        for (apply_to, list) in [("LISTENER", "listeners"), ("CLUSTER", "clusters")] {
            check_parts(added(&objects, Hop::Inbound, apply_to), "envoy/redis-proxy.yaml", list);
        }
        let slower = helm.rendered("shop", &[&proxied[..], &["--set", "redis.opTimeout=3s"]].concat());
        let listeners = added(&slower, Hop::Inbound, "LISTENER");
        let proxy = listeners.iter().find(|listener| listener["name"] == "meshquota_redis_proxy").unwrap();
        assert_eq!(proxy["filter_chains"][0]["filters"][0]["typed_config"]["settings"]["op_timeout"], "3s");
        let logging_in = ["--set", "redis.username=meshquota,redis.passwordVariable=MESHQUOTA_REDIS_PASSWORD"];
        let clusters = added(&helm.rendered("shop", &[&proxied[..], &logging_in].concat()), Hop::Inbound, "CLUSTER");
        let options = "typed_extension_protocol_options";
        let shipped = yaml("envoy/redis-proxy.yaml");
        let expected = shipped["static_resources"]["clusters"].as_array().unwrap().iter();
        let redis = |cluster: &&Value| cluster["name"] == "meshquota_redis";
        assert_eq!(clusters.iter().find(redis).unwrap()[options], expected.clone().find(redis).unwrap()[options]);
    }
}

/// Where a change is: the kind of the object, the path inside it, and the value.
type Change<'a> = (&'a str, &'a str, Value);

/// Checks that each value, given to Helm besides an example, makes these changes of what the example renders, and no others.
fn check_values(name: &str, cases: &[(&str, &[Change])]) {
    for helm in Helm::each() {
        let before = helm.rendered("shop", &["--values", &example(name)]);
        for (set, changes) in cases {
            let mut expected = before.clone();
            for (kind, at, value) in *changes {
                let object = manifests::of_kind_mut(&mut expected, kind);
                *object = with(object, at, value.clone());
            }
            let objects = helm.rendered("shop", &["--values", &example(name), "--set-json", set]);
            for object in &objects {
                assert_eq!(faults(object), [""; 0], "{set}");
            }
            assert_eq!(by_name(objects), by_name(expected), "Helm {}, {set}", helm.version);
        }
    }
}

#[test]
fn each_value_for_istio_goes_where_it_belongs_and_changes_nothing_else() {
    let digest = "ab".repeat(32);
    let (plugin, tunnel) = ("WasmPlugin", "EnvoyFilter");
    let redis = "/spec/configPatches/2/patch/value";
    let socket = format!("{redis}/load_assignment/endpoints/0/lb_endpoints/0/endpoint/address/socket_address");
    let transport = format!("{redis}/transport_socket");
    let web = json!({"app": "web"});
    let tls = |name: &str| {
        let context = json!({
            "trusted_ca": {"filename": "/etc/ssl/certs/ca-certificates.crt"},
            "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": name}}],
        });
        let kind = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext";
        let typed = json!({"@type": kind, "sni": name, "common_tls_context": {"validation_context": context}});
        json!({"name": "envoy.transport_sockets.tls", "typed_config": typed})
    };
    let everywhere = |field: &'static str, value: Value| [(plugin, field, value.clone()), (tunnel, field, value)];
    let cases: [(&str, &[Change]); 15] = [
        (r#"image={"url":"https://r.example/q.wasm"}"#, &[(plugin, "/spec/url", json!("https://r.example/q.wasm"))]),
        (&format!(r#"image.sha256="{digest}""#), &[(plugin, "/spec/sha256", json!(digest))]),
        (r#"image.pullPolicy="Always""#, &[(plugin, "/spec/imagePullPolicy", json!("Always"))]),
        (r#"image.pullSecret="registry""#, &[(plugin, "/spec/imagePullSecret", json!("registry"))]),
        (r#"failStrategy="FAIL_OPEN""#, &[(plugin, "/spec/failStrategy", json!("FAIL_OPEN"))]),
        (
            r#"redis={"host":"10.0.0.7","port":6380}"#,
            &[(tunnel, &socket, json!({"address": "10.0.0.7", "port_value": 6380}))],
        ),
        ("redis.tls.enabled=true", &[(tunnel, &transport, tls("redis.redis.svc.cluster.local"))]),
        (r#"redis.tls={"enabled":true,"serverName":"redis.test"}"#, &[(tunnel, &transport, tls("redis.test"))]),
        (
            r#"istio.selector={"app":"web"}"#,
            &[
                (plugin, "/spec/selector", json!({"matchLabels": web})),
                (tunnel, "/spec/workloadSelector", json!({"labels": web})),
            ],
        ),
        (r#"istio.tunnel.selector={"app":"web"}"#, &[(tunnel, "/spec/workloadSelector", json!({"labels": web}))]),
        (r#"istio.phase="AUTHZ""#, &[(plugin, "/spec/phase", json!("AUTHZ"))]),
        ("istio.priority=0", &[(plugin, "/spec/priority", json!(0))]),
        ("istio.priority=-5", &[(plugin, "/spec/priority", json!(-5))]),
        (r#"labels={"team":"true"}"#, &everywhere("/metadata/labels", json!({"team": "true"}))),
        (r#"annotations={"a.example/b":"1"}"#, &everywhere("/metadata/annotations", json!({"a.example/b": "1"}))),
    ];
    check_values("namespace", &cases);
}

#[test]
fn each_value_for_envoy_gateway_goes_where_it_belongs_and_changes_nothing_else() {
    let digest = "ab".repeat(32);
    let (policy, patches) = ("EnvoyExtensionPolicy", "EnvoyPatchPolicy");
    let code = "/spec/wasm/0/code";
    let at = |field: &str| format!("{code}/{field}");
    let module = json!({"type": "HTTP", "http": {"url": "https://r.example/q.wasm"}});
    let class = json!({"group": "gateway.networking.k8s.io", "kind": "GatewayClass", "name": "eg"});
    let route = json!([{"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "name": "login"}]);
    let secret = json!({"kind": "Secret", "name": "registry"});
    let redis = "/spec/jsonPatches/2/operation/value";
    let socket = format!("{redis}/load_assignment/endpoints/0/lb_endpoints/0/endpoint/address/socket_address");
    let cases: [(&str, &[Change]); 10] = [
        (r#"image.url="oci://r.example/q:1""#, &[(policy, &at("image/url"), json!("r.example/q:1"))]),
        (r#"image.url="https://r.example/q.wasm""#, &[(policy, code, module)]),
        (&format!(r#"image.sha256="{digest}""#), &[(policy, &at("image/sha256"), json!(digest))]),
        (r#"image.pullPolicy="IfNotPresent""#, &[(policy, &at("pullPolicy"), json!("IfNotPresent"))]),
        (r#"image.pullSecret="registry""#, &[(policy, &at("image/pullSecretRef"), secret)]),
        (r#"failStrategy="FAIL_OPEN""#, &[]),
        (r#"failStrategy="FAIL_CLOSE""#, &[(policy, "/spec/wasm/0/failOpen", json!(false))]),
        (&format!("envoyGateway.targetRefs={route}"), &[(policy, "/spec/targetRefs", route.clone())]),
        (r#"envoyGateway.gatewayClass="eg""#, &[(patches, "/spec/targetRef", class)]),
        (
            r#"redis={"host":"10.0.0.7","port":6380}"#,
            &[(patches, &socket, json!({"address": "10.0.0.7", "port_value": 6380}))],
        ),
    ];
    check_values("envoy-gateway", &cases);
}

#[test]
fn a_second_release_for_the_same_proxies_leaves_the_tunnel_to_the_first() {
    for helm in Helm::each() {
        let objects =
            helm.rendered("shop", &["--values", &example("namespace"), "--set", "istio.tunnel.enabled=false"]);
        assert_eq!(objects.len(), 1);
        assert_eq!(objects[0]["kind"], "WasmPlugin");
        let text =
            helm.run(&["template", "strict", CHART, "--namespace", "shop", "--values", &example("namespace")]).out;
        let names = by_name(manifests::documents(&text)).into_keys().collect::<Vec<_>>();
        assert_eq!(names, [r#""EnvoyFilter" "strict-tunnel""#, r#""WasmPlugin" "strict""#]);
        let left_out = "envoyGateway.tunnel=false,envoyGateway.envoyProxy=false";
        let objects = helm.rendered("shop", &["--values", &example("envoy-gateway-route"), "--set", left_out]);
        assert_eq!(objects.len(), 1);
        assert_eq!(objects[0]["kind"], "EnvoyExtensionPolicy");
    }
}

#[test]
fn after_an_install_the_next_step_is_named() {
    let patch = "kubectl patch gateway public -n shop --type merge -p";
    let cases = [
        ("namespace", "", &["istioctl proxy-config listener"][..]),
        ("envoy-gateway", "", &[patch, r#""kind": "EnvoyProxy", "name": "meshquota""#, "kubectl get envoypatchpolicy"]),
        ("envoy-gateway", "envoyGateway.envoyProxy=false", &["kubectl get envoypatchpolicy"]),
    ];
    // Helm 3 asks a cluster even for this.
    for helm in Helm::each().iter().filter(|helm| helm.version.starts_with('4')) {
        for (name, set, steps) in cases {
            let install = ["install", "meshquota", CHART, "--namespace", "shop", "--dry-run=client"];
            let said = helm.run(&[&install[..], &["--values", &example(name), "--set", set]].concat());
            let notes = said.out.split("NOTES:\n").nth(1).unwrap_or_else(|| panic!("{}", said.err));
            for step in steps {
                assert!(notes.contains(step), "Helm {}, {name}: no {step} in\n{notes}", helm.version);
            }
            assert_eq!(notes.contains(patch), steps.contains(&patch), "{name}, {set}");
        }
    }
}

#[test]
fn a_gateway_that_is_known_by_its_labels_gets_filter_and_tunnel_by_them() {
    for helm in Helm::each() {
        let values = r#"istio={"mode":"gateway","targetRefs":[],"selector":{"istio":"ingressgateway"}}"#;
        let objects = helm.rendered("istio-system", &["--values", &example("gateway"), "--set-json", values]);
        let labels = json!({"istio": "ingressgateway"});
        let plugin = &of_kind(&objects, "WasmPlugin")["spec"];
        assert_eq!(plugin["selector"]["matchLabels"], labels);
        assert!(plugin.get("targetRefs").is_none() && plugin.get("match").is_none());
        assert_eq!(of_kind(&objects, "EnvoyFilter")["spec"]["workloadSelector"]["labels"], labels);
    }
}

#[test]
fn in_the_root_namespace_the_tunnel_is_for_the_gateway_alone() {
    for helm in Helm::each() {
        let objects = helm.rendered("istio-system", &["--values", &example("gateway")]);
        let labels = json!({"gateway.networking.k8s.io/gateway-name": "public"});
        assert_eq!(of_kind(&objects, "EnvoyFilter")["spec"]["workloadSelector"]["labels"], labels);
    }
}

#[test]
fn a_release_whose_names_look_like_numbers_has_them_as_texts() {
    for helm in Helm::each() {
        let values = example("namespace");
        let text = helm.run(&["template", "1e3", CHART, "--namespace", "123", "--values", &values]).out;
        let plugin = of_kind(&manifests::documents(&text), "WasmPlugin")["metadata"].clone();
        assert_eq!(plugin, json!({"name": "1e3", "namespace": "123"}));
    }
}

/// The paths of what has no fields of its own, with what it is.
fn leaves(value: &Value, path: &str, found: &mut Vec<(String, Value)>) {
    match value.as_object() {
        Some(fields) if !fields.is_empty() => {
            for (name, value) in fields {
                leaves(value, &format!("{path}{}{name}", if path.is_empty() { "" } else { "." }), found);
            }
        }
        _ => found.push((path.to_owned(), value.clone())),
    }
}

/// The paths of what a schema gives no properties.
fn described(schema: &Value, path: &str, found: &mut Vec<String>) {
    match schema["properties"].as_object() {
        Some(fields) => {
            assert_eq!(schema["additionalProperties"], false, "{path}");
            for (name, schema) in fields {
                described(schema, &format!("{path}{}{name}", if path.is_empty() { "" } else { "." }), found);
            }
        }
        None => found.push(path.to_owned()),
    }
}

#[test]
fn every_value_is_in_the_schema_and_in_the_table_with_its_default() {
    let mut values = Vec::new();
    leaves(&yaml(format!("{CHART}/values.yaml")), "", &mut values);
    assert!(values.len() > 20);
    let schema: Value = serde_json::from_str(&read(format!("{CHART}/values.schema.json"))).unwrap();
    let mut known = Vec::new();
    described(&schema, "", &mut known);
    // What Helm itself puts there.
    known.retain(|path| path != "global");
    let mut paths = values.iter().map(|(path, _)| path.clone()).collect::<Vec<_>>();
    known.sort();
    paths.sort();
    assert_eq!(known, paths);
    let page = read(format!("{CHART}/README.md"));
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")).collect::<Vec<_>>();
    for (path, default) in &values {
        let default = match default {
            Value::String(text) if text.is_empty() => String::new(),
            Value::String(text) => format!("`{text}`"),
            Value::Null => String::new(),
            other => format!("`{other}`"),
        };
        let start = format!("{path}` | {default}{}|", if default.is_empty() { "" } else { " " });
        assert!(rows.iter().any(|row| row.starts_with(&start)), "README.md has no row that begins with: | `{start}");
    }
    let of_values = rows.iter().filter(|row| values.iter().any(|(path, _)| row.starts_with(&format!("{path}`"))));
    assert_eq!(of_values.count(), values.len());
}

#[test]
fn the_chart_has_the_version_of_the_project() {
    let chart = yaml(format!("{CHART}/Chart.yaml"));
    assert_eq!(chart["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(chart["appVersion"], env!("CARGO_PKG_VERSION"));
}

//! What the manifests may say: the fields that Envoy Gateway, the Gateway API and Envoy's bootstrap document, and no others.

use serde_json::{Value, json};

use crate::support::schemas::{self, closed, labels, list, object, of_kustomize, one_of, text};

const GROUP: &str = "gateway.networking.k8s.io";

/// A reference to objects of the Gateway API.
fn target(kinds: &[&str]) -> Value {
    closed(&["group", "kind", "name"], json!({"group": {"const": GROUP}, "kind": one_of(kinds), "name": text()}))
}

fn port() -> Value {
    json!({"type": "integer", "minimum": 1, "maximum": 65535})
}

fn envoy_extension_policy() -> Value {
    let digest = json!({"type": "string", "pattern": "^[a-f0-9]{64}$"});
    let secret = closed(&["kind", "name"], json!({"kind": {"const": "Secret"}, "name": text(), "group": text()}));
    // The scheme oci:// is Envoy Gateway's to add.
    let image = json!({"type": "string", "pattern": "^[a-z0-9.-]+(:[0-9]+)?/[^:@]+(:[^:@]+|@sha256:[a-f0-9]{64})$"});
    let image = json!({"url": image, "sha256": digest, "pullSecretRef": secret});
    let http = json!({"url": {"type": "string", "pattern": "^https?://."}, "sha256": digest});
    let code = json!({
        "type": one_of(&["Image", "HTTP"]),
        "image": closed(&["url"], image),
        "http": closed(&["url"], http),
        "pullPolicy": one_of(&["IfNotPresent", "Always"]),
    });
    let mut code = closed(&["type"], code);
    code["oneOf"] = json!([
        {"required": ["image"], "properties": {"type": {"const": "Image"}}, "not": {"required": ["http"]}},
        {"required": ["http"], "properties": {"type": {"const": "HTTP"}}, "not": {"required": ["image"]}},
    ]);
    let wasm = json!({
        "name": text(),
        "rootID": text(),
        "code": code,
        "config": {"type": "object"},
        "failOpen": {"type": "boolean"},
        "env": closed(&[], json!({"hostKeys": list(text())})),
    });
    let mut wasm = list(closed(&["code"], wasm));
    wasm["maxItems"] = json!(16);
    let targets = list(target(&["Gateway", "HTTPRoute", "GRPCRoute"]));
    object(
        "gateway.envoyproxy.io/v1alpha1",
        "EnvoyExtensionPolicy",
        closed(&["targetRefs"], json!({"targetRefs": targets, "wasm": wasm})),
    )
}

/// Only patches that add a whole listener or cluster.
fn envoy_patch_policy() -> Value {
    let value = json!({"type": "object", "required": ["name"]});
    let operation = json!({"op": {"const": "add"}, "path": {"const": ""}, "value": value});
    let kind = |kind: &str| format!("type.googleapis.com/envoy.config.{kind}");
    let patch = json!({
        "type": one_of(&[&kind("listener.v3.Listener"), &kind("cluster.v3.Cluster")]),
        "name": text(),
        "operation": closed(&["op", "path", "value"], operation),
    });
    let fields = json!({
        "targetRef": target(&["Gateway", "GatewayClass"]),
        "type": {"const": "JSONPatch"},
        "priority": {"type": "integer"},
        "jsonPatches": list(closed(&["type", "name", "operation"], patch)),
    });
    let spec = closed(&["targetRef", "type", "jsonPatches"], fields);
    object("gateway.envoyproxy.io/v1alpha1", "EnvoyPatchPolicy", spec)
}

fn envoy_proxy() -> Value {
    let kinds = ["Merge", "Replace", "JSONPatch"];
    let bootstrap = closed(&["type", "value"], json!({"type": one_of(&kinds), "value": text()}));
    let before = json!({"name": text(), "before": text(), "after": text()});
    let mut before = closed(&["name"], before);
    before["oneOf"] = json!([{"required": ["before"]}, {"required": ["after"]}]);
    let secret = closed(&["name", "key"], json!({"name": text(), "key": text()}));
    let source = closed(&["secretKeyRef"], json!({"secretKeyRef": secret}));
    let variable = closed(&["name"], json!({"name": text(), "value": text(), "valueFrom": source}));
    let container = closed(&[], json!({"env": list(variable)}));
    let deployment = closed(&[], json!({"container": container}));
    let kubernetes = closed(&[], json!({"envoyDeployment": deployment}));
    let provider = closed(&["type"], json!({"type": {"const": "Kubernetes"}, "kubernetes": kubernetes}));
    let fields = json!({"bootstrap": bootstrap, "filterOrder": list(before), "provider": provider});
    object("gateway.envoyproxy.io/v1alpha1", "EnvoyProxy", closed(&[], fields))
}

/// The bootstrap in an EnvoyProxy: Envoy's own fields.
fn bootstrap() -> Value {
    let typed = json!({"type": "object", "required": ["@type"], "maxProperties": 1});
    let extension = closed(&["name", "typed_config"], json!({"name": text(), "typed_config": typed}));
    let tag = closed(&["tag_name", "regex"], json!({"tag_name": text(), "regex": text()}));
    let stats = closed(&[], json!({"stats_tags": list(tag)}));
    closed(&["bootstrap_extensions"], json!({"bootstrap_extensions": list(extension), "stats_config": stats}))
}

fn client_traffic_policy() -> Value {
    let hops = json!({"numTrustedHops": {"type": "integer", "minimum": 1}, "trustedCIDRs": list(text())});
    let mut forwarded = closed(&[], hops);
    forwarded["oneOf"] = json!([{"required": ["numTrustedHops"]}, {"required": ["trustedCIDRs"]}]);
    let header = closed(&["name"], json!({"name": text(), "failClosed": {"type": "boolean"}}));
    let mut detection = closed(&[], json!({"xForwardedFor": forwarded, "customHeader": header}));
    detection["oneOf"] = json!([{"required": ["xForwardedFor"]}, {"required": ["customHeader"]}]);
    let fields = json!({"targetRefs": list(target(&["Gateway"])), "clientIPDetection": detection});
    object("gateway.envoyproxy.io/v1alpha1", "ClientTrafficPolicy", closed(&["targetRefs"], fields))
}

fn gateway() -> Value {
    let group = json!({"const": "gateway.envoyproxy.io"});
    let parameters = json!({"group": group, "kind": {"const": "EnvoyProxy"}, "name": text()});
    let parameters = closed(&["group", "kind", "name"], parameters);
    let listener = json!({"name": text(), "protocol": one_of(&["HTTP", "HTTPS"]), "port": port(), "hostname": text()});
    let fields = json!({
        "gatewayClassName": text(),
        "infrastructure": closed(&["parametersRef"], json!({"parametersRef": parameters, "labels": labels()})),
        "listeners": list(closed(&["name", "protocol", "port"], listener)),
    });
    object("gateway.networking.k8s.io/v1", "Gateway", closed(&["gatewayClassName", "listeners"], fields))
}

fn gateway_class() -> Value {
    let spec = closed(&["controllerName"], json!({"controllerName": text()}));
    object("gateway.networking.k8s.io/v1", "GatewayClass", spec)
}

fn http_route() -> Value {
    let kinds = ["PathPrefix", "Exact", "RegularExpression"];
    let path = closed(&["type", "value"], json!({"type": one_of(&kinds), "value": text()}));
    let backend = closed(&["name", "port"], json!({"name": text(), "port": port()}));
    let rule = json!({"matches": list(closed(&["path"], json!({"path": path}))), "backendRefs": list(backend)});
    let parents = list(closed(&["name"], json!({"name": text()})));
    let fields = json!({"parentRefs": parents, "hostnames": list(text()), "rules": list(closed(&[], rule))});
    object("gateway.networking.k8s.io/v1", "HTTPRoute", closed(&["parentRefs", "rules"], fields))
}

/// The values of the chart.
fn values() -> Value {
    let apis = json!({"enableEnvoyPatchPolicy": {"const": true}});
    let gateway = closed(&["extensionApis"], json!({"extensionApis": closed(&["enableEnvoyPatchPolicy"], apis)}));
    closed(&["config"], json!({"config": closed(&["envoyGateway"], json!({"envoyGateway": gateway}))}))
}

/// What is wrong with a document, by its kind.
///
/// # Panics
/// Where nothing of that kind should be there.
pub fn faults(document: &Value) -> Vec<String> {
    let schema = match document.get("kind").and_then(Value::as_str) {
        Some("EnvoyExtensionPolicy") => envoy_extension_policy(),
        Some("EnvoyPatchPolicy") => envoy_patch_policy(),
        Some("EnvoyProxy") => envoy_proxy(),
        Some("ClientTrafficPolicy") => client_traffic_policy(),
        Some("Gateway") => gateway(),
        Some("GatewayClass") => gateway_class(),
        Some("HTTPRoute") => http_route(),
        None if document.is_object() => values(),
        _ => of_kustomize(document),
    };
    let mut faults = schemas::faults(document, &schema);
    if let Some(value) = document.pointer("/spec/bootstrap/value").and_then(Value::as_str) {
        match serde_yaml_ng::from_str(value) {
            Ok(value) => faults.extend(schemas::faults(&value, &bootstrap())),
            Err(error) => faults.push(error.to_string()),
        }
    }
    faults
}

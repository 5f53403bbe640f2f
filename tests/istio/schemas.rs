//! What the manifests may say: the fields that Istio and Kubernetes document, and no others.

use serde_json::{Value, json};

use crate::support::schemas::{self, closed, labels, list, object, of_kustomize, one_of, text};

fn target_refs() -> Value {
    let fields = json!({"group": {"type": "string"}, "kind": text(), "name": text(), "namespace": text()});
    json!({"type": "array", "minItems": 1, "maxItems": 16, "items": closed(&["kind", "name"], fields)})
}

fn wasm_plugin() -> Value {
    let mode = one_of(&["CLIENT", "SERVER", "CLIENT_AND_SERVER"]);
    let port = closed(&["number"], json!({"number": {"type": "integer", "minimum": 1, "maximum": 65535}}));
    let variable = json!({"name": text(), "valueFrom": one_of(&["INLINE", "HOST"]), "value": text()});
    let fields = json!({
        "selector": closed(&[], json!({"matchLabels": labels()})),
        "targetRefs": target_refs(),
        "url": {"type": "string", "pattern": "^(oci|https?|file)://."},
        "sha256": {"type": "string", "pattern": "^[a-f0-9]{64}$"},
        "imagePullPolicy": one_of(&["IfNotPresent", "Always"]),
        "imagePullSecret": text(),
        "pluginConfig": {"type": "object"},
        "pluginName": {"type": "string", "minLength": 1, "maxLength": 256},
        "phase": one_of(&["AUTHN", "AUTHZ", "STATS"]),
        "priority": {"type": "integer"},
        "failStrategy": one_of(&["FAIL_CLOSE", "FAIL_OPEN", "FAIL_RELOAD"]),
        "vmConfig": closed(&[], json!({"env": list(closed(&["name"], variable))})),
        "match": list(closed(&[], json!({"mode": mode, "ports": list(port)}))),
        "type": one_of(&["HTTP", "NETWORK"]),
    });
    let mut spec = closed(&["url"], fields);
    spec["not"] = json!({"required": ["selector", "targetRefs"]});
    object("extensions.istio.io/v1alpha1", "WasmPlugin", spec)
}

/// Only patches that add a listener or a cluster: with an address of its own, none at all, or found otherwise.
fn envoy_filter() -> Value {
    let context = one_of(&["ANY", "SIDECAR_INBOUND", "SIDECAR_OUTBOUND", "GATEWAY"]);
    let proxy = closed(&[], json!({"proxyVersion": text(), "metadata": labels()}));
    let value = json!({"type": "object", "required": ["name"]});
    let patch = json!({
        "applyTo": one_of(&["LISTENER", "CLUSTER"]),
        "match": closed(&["context"], json!({"context": context, "proxy": proxy})),
        "patch": closed(&["operation", "value"], json!({"operation": {"const": "ADD"}, "value": value})),
    });
    let fields = json!({
        "workloadSelector": closed(&["labels"], json!({"labels": labels()})),
        "targetRefs": target_refs(),
        "priority": {"type": "integer"},
        "configPatches": list(closed(&["applyTo", "match", "patch"], patch)),
    });
    let mut spec = closed(&["configPatches"], fields);
    spec["not"] = json!({"required": ["workloadSelector", "targetRefs"]});
    object("networking.istio.io/v1alpha3", "EnvoyFilter", spec)
}

fn authorization_policy() -> Value {
    let from = json!({"source": closed(&[], json!({"principals": list(text()), "notPrincipals": list(text())}))});
    let when = json!({"key": text(), "values": list(text()), "notValues": list(text())});
    let rule = json!({"from": list(closed(&["source"], from)), "when": list(closed(&["key"], when))});
    let fields = json!({
        "selector": closed(&[], json!({"matchLabels": labels()})),
        "action": one_of(&["ALLOW", "DENY", "AUDIT", "CUSTOM"]),
        "rules": list(closed(&[], rule)),
    });
    object("security.istio.io/v1", "AuthorizationPolicy", closed(&[], fields))
}

/// What is wrong with a document, by its kind.
///
/// # Panics
/// Where nothing of that kind should be there.
pub fn faults(document: &Value) -> Vec<String> {
    let schema = match document.get("kind").and_then(Value::as_str) {
        Some("WasmPlugin") => wasm_plugin(),
        Some("EnvoyFilter") => envoy_filter(),
        Some("AuthorizationPolicy") => authorization_policy(),
        _ => of_kustomize(document),
    };
    schemas::faults(document, &schema)
}

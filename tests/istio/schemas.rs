//! What the manifests may say: the fields that Istio, Kubernetes and kustomize document, and no others.

use serde_json::{Value, json};

/// An object of these fields alone.
fn closed(required: &[&str], properties: Value) -> Value {
    json!({"type": "object", "additionalProperties": false, "required": required, "properties": properties})
}

fn list(items: Value) -> Value {
    json!({"type": "array", "minItems": 1, "items": items})
}

fn text() -> Value {
    json!({"type": "string", "minLength": 1})
}

fn one_of(values: &[&str]) -> Value {
    json!({"enum": values})
}

fn labels() -> Value {
    json!({"type": "object", "minProperties": 1, "additionalProperties": text()})
}

/// A whole object of Kubernetes.
fn object(api_version: &str, kind: &str, spec: Value) -> Value {
    let metadata = json!({"name": text(), "namespace": text(), "labels": labels(), "annotations": labels()});
    let fields = json!({
        "apiVersion": {"const": api_version},
        "kind": {"const": kind},
        "metadata": closed(&["name"], metadata),
        "spec": spec,
    });
    closed(&["apiVersion", "kind", "metadata", "spec"], fields)
}

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

fn kustomization(kind: &str, api_version: &str) -> Value {
    let target = closed(&["kind", "name"], json!({"kind": text(), "name": text()}));
    let patch = closed(&["path"], json!({"path": text(), "target": target}));
    let fields = json!({
        "apiVersion": {"const": api_version},
        "kind": {"const": kind},
        "namespace": text(),
        "resources": list(text()),
        "components": list(text()),
        "patches": list(patch),
    });
    closed(&["apiVersion", "kind"], fields)
}

/// The steps of a JSON patch.
fn steps() -> Value {
    let fields = json!({"op": one_of(&["add", "replace", "test"]), "path": text(), "value": {}});
    list(closed(&["op", "path", "value"], fields))
}

/// The schema for a document: by its kind, or that of a JSON patch.
///
/// # Panics
/// Where nothing of that kind should be there.
fn schema(document: &Value) -> Value {
    if document.is_array() {
        return steps();
    }
    match document["kind"].as_str() {
        Some("WasmPlugin") => wasm_plugin(),
        Some("EnvoyFilter") => envoy_filter(),
        Some("AuthorizationPolicy") => authorization_policy(),
        Some("Kustomization") => kustomization("Kustomization", "kustomize.config.k8s.io/v1beta1"),
        Some("Component") => kustomization("Component", "kustomize.config.k8s.io/v1alpha1"),
        other => panic!("no document of the kind {other:?} is known"),
    }
}

/// What is wrong with a document.
pub fn faults(document: &Value) -> Vec<String> {
    let validator = jsonschema::validator_for(&schema(document)).unwrap();
    validator.iter_errors(document).map(|error| format!("{}: {error}", error.instance_path())).collect()
}

//! What documents may say, as JSON Schemas: the pieces that those for manifests are made of, and kustomize's own documents.
//!
//! A field that is not named is refused, so a misspelt one is found without a cluster. Which kinds there are beside those
//! of kustomize is for each test to say.

use serde_json::{Value, json};

/// An object of these fields alone.
pub fn closed(required: &[&str], properties: Value) -> Value {
    json!({"type": "object", "additionalProperties": false, "required": required, "properties": properties})
}

pub fn list(items: Value) -> Value {
    json!({"type": "array", "minItems": 1, "items": items})
}

pub fn text() -> Value {
    json!({"type": "string", "minLength": 1})
}

pub fn one_of(values: &[&str]) -> Value {
    json!({"enum": values})
}

pub fn labels() -> Value {
    json!({"type": "object", "minProperties": 1, "additionalProperties": text()})
}

/// A whole object of Kubernetes.
pub fn object(api_version: &str, kind: &str, spec: Value) -> Value {
    let metadata = json!({"name": text(), "namespace": text(), "labels": labels(), "annotations": labels()});
    let fields = json!({
        "apiVersion": {"const": api_version},
        "kind": {"const": kind},
        "metadata": closed(&["name"], metadata),
        "spec": spec,
    });
    closed(&["apiVersion", "kind", "metadata", "spec"], fields)
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

/// The schema for a document of kustomize, a JSON patch included.
///
/// # Panics
/// Where it is none.
pub fn of_kustomize(document: &Value) -> Value {
    if document.is_array() {
        return steps();
    }
    match document["kind"].as_str() {
        Some("Kustomization") => kustomization("Kustomization", "kustomize.config.k8s.io/v1beta1"),
        Some("Component") => kustomization("Component", "kustomize.config.k8s.io/v1alpha1"),
        other => panic!("no document of the kind {other:?} is known"),
    }
}

/// What is wrong with a document, by its schema.
pub fn faults(document: &Value, schema: &Value) -> Vec<String> {
    let validator = jsonschema::validator_for(schema).unwrap();
    validator.iter_errors(document).map(|error| format!("{}: {error}", error.instance_path())).collect()
}

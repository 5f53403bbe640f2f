//! The manifests of a folder, and what kustomize makes of its overlays.
//!
//! Only what the overlays use is done here: resources, components, patches of both kinds, and the namespace. [`check_against_kubectl`]
//! shows that kubectl makes the same. What the manifests say is no matter here.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::markdown::blocks_of;
use super::pinned::kubectl;
use super::project::{project, read};

/// A file of YAML, by its path inside the project.
pub fn yaml(path: impl AsRef<Path>) -> Value {
    let path = path.as_ref();
    serde_yaml_ng::from_str(&read(path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The documents of a text in YAML.
pub fn documents(text: &str) -> Vec<Value> {
    serde_yaml_ng::Deserializer::from_str(text).map(|one| Value::deserialize(one).unwrap()).collect()
}

/// The rules of the filter in `envoy/envoy.yaml`.
pub fn shipped_rules() -> Value {
    let envoy = yaml("envoy/envoy.yaml");
    let filters =
        &envoy["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"];
    let shipped = filters[0]["typed_config"]["config"]["configuration"]["value"].as_str().unwrap();
    serde_json::from_str::<Value>(shipped).unwrap()["rules"].take()
}

/// The blocks of YAML on a page, without their indentation.
pub fn snippets(page: &str) -> Vec<Value> {
    let parsed = |block: String| serde_yaml_ng::from_str(&block).unwrap_or_else(|error| panic!("{error}:\n{block}"));
    blocks_of("yaml", &read(page)).into_iter().map(parsed).collect()
}

/// What the kustomization in a folder comes to.
pub fn rendered(folder: &str) -> Vec<Value> {
    render(Path::new(folder))
}

/// Checks that `kubectl kustomize` makes the same of a folder; nothing where there is no kubectl for this platform.
pub fn check_against_kubectl(folder: &str) {
    let Some(kubectl) = kubectl() else { return };
    let output = Command::new(kubectl).arg("kustomize").arg(project().join(folder)).output().unwrap();
    assert!(output.status.success(), "{folder}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let named = |object: Value| ((object["kind"].to_string(), object["metadata"]["name"].to_string()), object);
    let by_name = |objects: Vec<Value>| objects.into_iter().map(named).collect::<BTreeMap<_, _>>();
    assert_eq!(by_name(documents(&text)), by_name(rendered(folder)), "{folder}");
}

/// The one object of a kind.
pub fn of_kind<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    let mut found = objects.iter().filter(|object| object["kind"] == kind);
    let first = found.next().unwrap_or_else(|| panic!("there is no {kind}"));
    assert!(found.next().is_none(), "there are several of the kind {kind}");
    first
}

/// The one object of a kind, to be changed.
pub fn of_kind_mut<'a>(objects: &'a mut [Value], kind: &str) -> &'a mut Value {
    objects.iter_mut().find(|object| object["kind"] == kind).unwrap_or_else(|| panic!("there is no {kind}"))
}

/// An object with another value at a path, or with none there, where that is `null`.
pub fn with(object: &Value, path: &str, value: Value) -> Value {
    let mut object = object.clone();
    let (parent, field) = path.rsplit_once('/').unwrap();
    let parent = object.pointer_mut(parent).unwrap().as_object_mut().unwrap();
    match value {
        Value::Null => parent.remove(field),
        value => parent.insert(field.to_owned(), value),
    };
    object
}

fn render(folder: &Path) -> Vec<Value> {
    let kustomization = yaml(folder.join("kustomization.yaml"));
    let mut objects = Vec::new();
    for path in texts(&kustomization["resources"]) {
        let path = folder.join(path);
        if project().join(&path).is_dir() {
            objects.extend(render(&path));
        } else {
            objects.push(yaml(path));
        }
    }
    for path in texts(&kustomization["components"]) {
        let component = folder.join(path);
        patch(&component, &yaml(component.join("kustomization.yaml")), &mut objects);
    }
    patch(folder, &kustomization, &mut objects);
    if let Some(namespace) = kustomization["namespace"].as_str() {
        for object in &mut objects {
            object["metadata"]["namespace"] = namespace.into();
        }
    }
    objects
}

fn texts(list: &Value) -> Vec<&str> {
    list.as_array().into_iter().flatten().map(|text| text.as_str().unwrap()).collect()
}

fn patch(folder: &Path, kustomization: &Value, objects: &mut [Value]) {
    for entry in kustomization["patches"].as_array().into_iter().flatten() {
        let patch = yaml(folder.join(entry["path"].as_str().unwrap()));
        let target = if patch.is_array() { &entry["target"] } else { &patch };
        let (kind, name) =
            (&target["kind"], if patch.is_array() { &target["name"] } else { &patch["metadata"]["name"] });
        let object = objects.iter_mut().find(|object| object["kind"] == *kind && object["metadata"]["name"] == *name);
        let object = object.unwrap_or_else(|| panic!("{}: nothing to patch", folder.display()));
        match patch.as_array() {
            Some(steps) => steps.iter().for_each(|step| take(step, object)),
            None => merge(object, &patch),
        }
    }
}

/// One step of a JSON patch (RFC 6902).
fn take(step: &Value, object: &mut Value) {
    let (path, value) = (step["path"].as_str().unwrap(), &step["value"]);
    match step["op"].as_str().unwrap() {
        "test" => assert_eq!(object.pointer(path), Some(value), "{path}"),
        "replace" => *object.pointer_mut(path).unwrap_or_else(|| panic!("there is no {path}")) = value.clone(),
        "add" => {
            let (parent, last) = path.rsplit_once('/').unwrap();
            match object.pointer_mut(parent).unwrap_or_else(|| panic!("there is no {parent}")) {
                Value::Array(list) if last == "-" => list.push(value.clone()),
                Value::Object(fields) => {
                    fields.insert(last.to_owned(), value.clone());
                }
                other => panic!("{path}: nothing can be added to {other}"),
            }
        }
        other => panic!("{other} is not used here"),
    }
}

/// A merge patch (RFC 7386), which is what kustomize does where it does not know the kind.
fn merge(object: &mut Value, patch: &Value) {
    let Some(fields) = patch.as_object() else {
        *object = patch.clone();
        return;
    };
    if !object.is_object() {
        *object = Value::Object(Map::new());
    }
    for (name, value) in fields {
        if value.is_null() {
            object.as_object_mut().unwrap().remove(name);
        } else {
            merge(&mut object[name], value);
        }
    }
}

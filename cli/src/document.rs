//! Configurations in the files in which they come: alone, or inside an Envoy configuration or a Kubernetes manifest.
//!
//! This module does not know what a configuration may say.

use std::io::Read;
use std::path::Path;

use meshquota::config::Config;
use serde_json::Value;
use serde_yaml_ng::Deserializer;

use crate::arguments::Source;

/// What the filter's configuration is called inside such files: the root_id, or the name of a plugin.
const NAME: &str = "meshquota";

/// A configuration, and where it was found.
#[derive(Debug, PartialEq, Eq)]
pub struct Found {
    /// The file, and the place in it where it is not the whole file.
    pub place: String,
    /// The configuration in JSON.
    pub text: String,
}

/// Reads a file. There is at least one configuration in it.
pub fn read(file: &Path) -> Result<Vec<Found>, String> {
    let name = file.display().to_string();
    let text = if name == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map(|_| text)
    } else {
        std::fs::read_to_string(file)
    };
    find(&name, &text.map_err(|error| format!("{name}: {error}"))?)
}

/// Reads the one configuration that is meant, which is right.
pub fn read_one(source: &Source) -> Result<Config, String> {
    let found = read(&source.file)?;
    let one = choose(&found, source.which.as_deref()).map_err(|what| format!("{}: {what}", source.file.display()))?;
    Config::from_json(one.text.as_bytes()).map_err(|errors| format!("{}: {errors}", one.place))
}

/// The configuration that is meant. Where it is there several times, each is as good.
fn choose<'a>(found: &'a [Found], which: Option<&str>) -> Result<&'a Found, String> {
    let number = which.and_then(|which| which.parse::<usize>().ok());
    let meant = (1..).zip(found).filter(|(place, one)| match (number, which) {
        (Some(number), _) => *place == number,
        (None, Some(part)) => one.place.contains(part),
        (None, None) => true,
    });
    let meant = meant.map(|(_, one)| one).collect::<Vec<_>>();
    match meant.as_slice() {
        [one, others @ ..] if others.iter().all(|other| other.text == one.text) => Ok(one),
        several => {
            let (count, what) = match (several, which) {
                ([], Some(which)) => (found.len(), format!("none of them is {which:?}")),
                (several, Some(which)) => (found.len(), format!("{} of them are {which:?}", several.len())),
                (several, None) => (several.len(), "say which by --which".to_owned()),
            };
            let places = (1..).zip(found).map(|(place, one)| format!("\n  {place}: {}", one.place)).collect::<String>();
            Err(format!("it has {count} configurations, and {what}:{places}"))
        }
    }
}

fn find(name: &str, text: &str) -> Result<Vec<Found>, String> {
    // JSON is read by the filter's own reader, which knows more faults than YAML's.
    if text.trim_start().starts_with('{') && !is_wrapped(text) {
        return Ok(vec![Found { place: name.to_owned(), text: text.to_owned() }]);
    }
    let mut found = Vec::new();
    for (number, document) in (1..).zip(Deserializer::from_str(text)) {
        let value: Value = serde::Deserialize::deserialize(document).map_err(|error| format!("{name}: {error}"))?;
        if value.get("rules").is_some() {
            found.push(Found { place: name.to_owned(), text: value.to_string() });
        } else {
            search(&value, &format!("{name}, document {number}"), &mut found);
        }
    }
    if found.is_empty() {
        return Err(format!(
            "{name}: no configuration in it: neither `rules` at the top, nor a WasmPlugin, an EnvoyExtensionPolicy or a wasm \
             filter of Envoy that is called {NAME}"
        ));
    }
    Ok(found)
}

/// Whether a text in JSON is a manifest or an Envoy configuration, and not a configuration itself.
fn is_wrapped(text: &str) -> bool {
    let value = serde_json::from_str::<Value>(text).unwrap_or_default();
    value.get("rules").is_none()
        && ["kind", "static_resources", "resources"].iter().any(|field| value.get(field).is_some())
}

/// Looks for configurations in a value, and what is in it.
fn search(value: &Value, place: &str, found: &mut Vec<Found>) {
    let text = |path: &str| value.pointer(path).and_then(Value::as_str);
    if text("/kind") == Some("WasmPlugin") {
        let name =
            format!("{place}, WasmPlugin {}: spec.pluginConfig", text("/metadata/name").unwrap_or("without a name"));
        let config = value.pointer("/spec/pluginConfig").cloned().unwrap_or_default();
        found.push(Found { place: name, text: if config.is_null() { String::new() } else { config.to_string() } });
        return;
    }
    let is_ours = ["/root_id", "/rootID", "/name", "/pluginName"].iter().any(|field| text(field) == Some(NAME));
    match value {
        Value::Object(fields) => {
            // Envoy's plugin, and that of an EnvoyExtensionPolicy.
            if is_ours && fields.contains_key("vm_config") {
                let config = value.pointer("/configuration").cloned().unwrap_or_default();
                // Envoy turns everything but a StringValue into bytes that are no JSON.
                let text = match (config.get("@type").and_then(Value::as_str), config.get("value")) {
                    (Some(kind), Some(Value::String(text))) if kind.ends_with("google.protobuf.StringValue") => {
                        text.clone()
                    }
                    (Some(kind), _) if kind.ends_with("google.protobuf.Struct") => "\n\u{1}".to_owned(),
                    _ => String::new(),
                };
                found.push(Found { place: format!("{place}: configuration of {NAME}"), text });
            } else if is_ours && fields.contains_key("code") {
                let config = value.get("config").cloned().unwrap_or_default();
                found.push(Found { place: format!("{place}: config of {NAME}"), text: config.to_string() });
            } else {
                fields.values().for_each(|value| search(value, place, found));
            }
        }
        Value::Array(elements) => elements.iter().for_each(|value| search(value, place, found)),
        _ => {}
    }
}

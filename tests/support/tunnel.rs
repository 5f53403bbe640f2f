//! The tunnel as manifests bring it: listeners and clusters that must be those of the configurations for Envoy, and the
//! changes that make them work on one machine.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::envoy::local;
use super::manifests::yaml;
use super::project::read;

/// The script inside the tunnel's listener.
fn script(listener: &mut Value) -> &mut Value {
    let manager = &mut listener["filter_chains"][0]["filters"][0]["typed_config"];
    &mut manager["http_filters"][0]["typed_config"]["default_source_code"]
}

/// The names of listeners or clusters, sorted.
pub fn names(parts: &[Value]) -> Vec<&str> {
    let mut names = parts.iter().map(|part| part["name"].as_str().unwrap()).collect::<Vec<_>>();
    names.sort_unstable();
    names
}

/// Checks that the script among these listeners is that of the project, to the byte.
pub fn check_script(listeners: &mut [Value]) {
    let tunnel = listeners.iter_mut().find(|listener| listener["name"] == "meshquota_tunnel").unwrap();
    let inline = script(tunnel)["inline_string"].as_str().unwrap();
    assert!(inline == read("lua/tunnel.lua"), "the script is not that of lua/tunnel.lua");
}

/// Checks that these parts are those of a configuration for Envoy: its `listeners` or `clusters` whose names are ours,
/// but for addresses, credentials, and where the script is.
pub fn check_parts(parts: Vec<Value>, shipped: &str, list: &str) {
    let document = yaml(shipped);
    let expected = document["static_resources"][list].as_array().unwrap();
    let own = expected.iter().filter(|part| part["name"].as_str().unwrap().starts_with("meshquota_")).cloned();
    assert_eq!(by_name(parts, list), by_name(own.collect(), list), "{shipped}, {list}");
}

fn by_name(parts: Vec<Value>, list: &str) -> BTreeMap<String, Value> {
    let mut parts = parts.into_iter().map(|part| (part["name"].to_string(), part)).collect::<BTreeMap<_, _>>();
    if let Some(tunnel) = parts.get_mut("\"meshquota_tunnel\"").filter(|_| list == "listeners") {
        script(tunnel).take();
    }
    if let Some(redis) = parts.get_mut("\"meshquota_redis\"") {
        redis.as_object_mut().unwrap().remove("typed_extension_protocol_options");
        for host in hosts(redis) {
            host["endpoint"]["address"]["socket_address"]["address"].take();
        }
    }
    parts
}

fn hosts(cluster: &mut Value) -> &mut Vec<Value> {
    cluster["load_assignment"]["endpoints"][0]["lb_endpoints"].as_array_mut().unwrap()
}

/// Aims the cluster of Redis among these at servers on this machine, as many as it has hosts.
pub fn aim_at_redis(clusters: &mut [Value], ports: &[u16]) {
    let redis = clusters.iter_mut().find(|cluster| cluster["name"] == "meshquota_redis").unwrap();
    let hosts = hosts(redis);
    assert_eq!(hosts.len(), ports.len());
    for (host, port) in hosts.iter_mut().zip(ports) {
        host["endpoint"]["address"] = local(*port);
    }
}

/// Envoy's extension for internal listeners, as a bootstrap names it.
pub fn internal_listeners() -> Value {
    let kind = "type.googleapis.com/envoy.extensions.bootstrap.internal_listener.v3.InternalListener";
    json!([{"name": "envoy.bootstrap.internal_listener", "typed_config": {"@type": kind}}])
}

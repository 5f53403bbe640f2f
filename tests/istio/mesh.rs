//! The Envoy configuration that Istio would make of the manifests.
//!
//! Istio adds the parts of an EnvoyFilter to a proxy by their contexts, puts a WasmPlugin into the connection managers that
//! it is for, and has the bootstrap extension for internal listeners in every proxy. What it would fetch (the module) and
//! find by name (Redis, the service) is here on this machine; nothing else is changed.

use serde_json::{Value, json};

use crate::support::envoy::{Document, local};
use crate::support::manifests::of_kind;
use crate::support::tunnel::{aim_at_redis, internal_listeners};

const TYPES: &str = "type.googleapis.com/envoy.extensions";

/// A place on a request's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hop {
    /// The sidecar of the service that is called.
    Inbound,
    /// The sidecar of the caller.
    Outbound,
    /// A gateway, with so many trusted proxies before it.
    Gateway(u64),
    Waypoint,
}

impl Hop {
    /// The contexts in which Istio adds what an EnvoyFilter says to the proxy of this hop.
    fn contexts(self, apply_to: &str) -> &'static [&'static str] {
        match (self, apply_to) {
            (Self::Inbound | Self::Outbound, _) => &["SIDECAR_OUTBOUND", "SIDECAR_INBOUND"],
            (Self::Gateway(_), _) => &["GATEWAY"],
            (Self::Waypoint, "CLUSTER") => &["SIDECAR_INBOUND"],
            (Self::Waypoint, _) => &["SIDECAR_INBOUND", "SIDECAR_OUTBOUND"],
        }
    }

    /// Whether a plugin is for this hop.
    fn is_meant(self, plugin: &Value) -> bool {
        let spec = &plugin["spec"];
        let targeted = spec.get("targetRefs").is_some();
        let reached = match self {
            Self::Inbound | Self::Outbound => !targeted,
            Self::Gateway(_) => true,
            Self::Waypoint => targeted,
        };
        let own = if matches!(self, Self::Inbound | Self::Waypoint) { "SERVER" } else { "CLIENT" };
        let matches = |one: &Value| {
            let mode = one["mode"].as_str().unwrap_or("CLIENT_AND_SERVER");
            mode == own || mode == "CLIENT_AND_SERVER"
        };
        reached && spec.get("match").is_none_or(|all| all.as_array().unwrap().iter().any(matches))
    }
}

/// What the EnvoyFilter adds to the proxy of a hop: the values of its patches for listeners or clusters.
pub fn added(manifests: &[Value], hop: Hop, apply_to: &str) -> Vec<Value> {
    let patches = of_kind(manifests, "EnvoyFilter")["spec"]["configPatches"].as_array().unwrap();
    let lands = |patch: &Value, context: &str| match patch["match"]["context"].as_str().unwrap_or("ANY") {
        "ANY" => ["SIDECAR_OUTBOUND", "GATEWAY"].contains(&context),
        named => named == context,
    };
    let mut all = Vec::new();
    for context in hop.contexts(apply_to) {
        let here = patches.iter().filter(|patch| patch["applyTo"] == apply_to && lands(patch, context));
        all.extend(here.map(|patch| patch["patch"]["value"].clone()));
    }
    all
}

/// A document in which every number is a double, as in a protobuf Struct.
pub fn with_doubles(value: &Value) -> Value {
    match value {
        Value::Number(number) => json!(number.as_f64().unwrap()),
        Value::Array(list) => list.iter().map(with_doubles).collect(),
        Value::Object(fields) => fields.iter().map(|(name, value)| (name.clone(), with_doubles(value))).collect(),
        other => other.clone(),
    }
}

/// The filters of a hop that the manifests make, with the module from there.
fn filters(manifests: &[Value], hop: Hop, code: &Value) -> Vec<Value> {
    let plugin = of_kind(manifests, "WasmPlugin");
    if !hop.is_meant(plugin) {
        return Vec::new();
    }
    let (spec, metadata) = (&plugin["spec"], &plugin["metadata"]);
    let name = format!("{}.{}", metadata["namespace"].as_str().unwrap(), metadata["name"].as_str().unwrap());
    let failure_policy = match spec["failStrategy"].as_str().unwrap_or("FAIL_CLOSE") {
        "FAIL_CLOSE" => "FAIL_CLOSED",
        other => other,
    };
    let config = json!({
        "name": name,
        "root_id": spec["pluginName"],
        "failure_policy": failure_policy,
        "vm_config": {"runtime": "envoy.wasm.runtime.v8", "code": code},
        "configuration": {
            "@type": "type.googleapis.com/google.protobuf.StringValue",
            "value": with_doubles(&spec["pluginConfig"]).to_string(),
        },
    });
    let typed = json!({"@type": format!("{TYPES}.filters.http.wasm.v3.Wasm"), "config": config});
    vec![json!({"name": name, "typed_config": typed})]
}

/// The connection manager of a hop, as far as it matters to the filter.
fn manager(hop: Hop, mut filters: Vec<Value>) -> Value {
    let router = json!({"@type": format!("{TYPES}.filters.http.router.v3.Router")});
    filters.push(json!({"name": "envoy.filters.http.router", "typed_config": router}));
    let mut manager = json!({
        "@type": format!("{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager"),
        "stat_prefix": "ingress",
        "server_name": "istio-envoy",
        "use_remote_address": matches!(hop, Hop::Gateway(_)),
        "normalize_path": true,
        "stream_idle_timeout": "0s",
        "upgrade_configs": [{"upgrade_type": "websocket"}],
        "route_config": {"virtual_hosts": [{
            "name": "app",
            "domains": ["*"],
            "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "app", "timeout": "0s"}}],
        }]},
        "http_filters": filters,
    });
    if let Hop::Gateway(trusted @ 1..) = hop {
        manager["xff_num_trusted_hops"] = json!(trusted);
    }
    manager
}

/// The labels that Istio's `extraStatTags` make of the names of metrics.
fn stats_tags(tags: &[String]) -> Vec<Value> {
    tags.iter().map(|tag| json!({"tag_name": tag, "regex": format!(r"({tag}=\.=(.*?);\.;)")})).collect()
}

/// Makes the configuration of an Envoy that of a hop, where Redis is on these ports and what comes next on that one.
pub fn boot(
    manifests: &[Value],
    hop: Hop,
    redis: &[u16],
    next: u16,
    tags: &[String],
) -> impl FnOnce(&mut Document) + use<> {
    let (manifests, redis, stats_tags) = (manifests.to_vec(), redis.to_vec(), stats_tags(tags));
    move |document| {
        let code = document.plugin()["vm_config"]["code"].take();
        let mut app = document.cluster("app").take();
        app["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"] = local(next);
        let mut clusters = added(&manifests, hop, "CLUSTER");
        aim_at_redis(&mut clusters, &redis);
        clusters.push(app);
        let mut listeners = added(&manifests, hop, "LISTENER");
        listeners.push(json!({
            "name": "ingress",
            "address": local(0),
            "traffic_direction": if matches!(hop, Hop::Inbound | Hop::Waypoint) { "INBOUND" } else { "OUTBOUND" },
            "filter_chains": [{"filters": [{
                "name": "envoy.filters.network.http_connection_manager",
                "typed_config": manager(hop, filters(&manifests, hop, &code)),
            }]}],
        }));
        document.0 = json!({
            "admin": document.0["admin"],
            "bootstrap_extensions": internal_listeners(),
            "static_resources": {"listeners": listeners, "clusters": clusters},
            "stats_config": {"stats_tags": stats_tags},
        });
    }
}

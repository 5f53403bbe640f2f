//! The Envoy configuration that Envoy Gateway would make of the manifests, as its sources say.
//!
//! Envoy Gateway turns routes into routes of Envoy, puts the filter of an EnvoyExtensionPolicy where its routes are, adds the
//! resources of an EnvoyPatchPolicy, and merges the bootstrap of an EnvoyProxy into its own. It serves the module itself. What
//! proxies would have from it by xDS is in one file here; addresses are of this machine, and the listener has the name and
//! the statistics that `support/envoy.rs` looks for. Nothing else is changed.

use std::path::Path;
use std::sync::OnceLock;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::support::app::App;
use crate::support::envoy::{Document, local};
use crate::support::module::module;
use crate::support::tunnel::aim_at_redis;

const TYPES: &str = "type.googleapis.com/envoy.extensions";
const ROUTE: &str = "type.googleapis.com/envoy.config.route.v3.FilterConfig";

/// The placeholders of [`Layout::Chained`], for what the Gateway's policy says and for what a route's says.
const LISTENER_CHAIN: &str = "envoy.filters.http.filter_chain.eep.listener";
const ROUTE_CHAIN: &str = "envoy.filters.http.filter_chain.eep.route";

/// Where the filter stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// In the listener's list of filters, disabled, and enabled by each route that has it: until Envoy Gateway 1.9.
    Listed,
    /// In a chain that the route or the virtual host brings along, to a placeholder in that list: since then. Envoy has had
    /// such chains since 1.39.
    Chained,
}

/// How the trusted hops of a ClientTrafficPolicy become Envoy's, which has changed too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hops {
    /// By an extension for the detection of addresses, which counts the last hop as none.
    ByExtension,
    /// By the connection manager.
    ByManager,
}

/// A proxy of the Gateway that these manifests describe.
#[derive(Clone)]
pub struct Proxy {
    pub manifests: Vec<Value>,
    pub layout: Layout,
    pub hops: Hops,
    /// The names of its listeners, the first of which is `ingress`.
    pub listeners: &'static [&'static str],
    /// Whether the proxy finds the module where Envoy Gateway serves it.
    pub finds_module: bool,
}

impl Proxy {
    pub fn new(manifests: Vec<Value>, layout: Layout) -> Self {
        Self { manifests, layout, hops: Hops::ByManager, listeners: &["ingress"], finds_module: true }
    }

    /// Makes the configuration of an Envoy that of the proxy, where Redis is on these ports and the service on that one.
    pub fn boot(&self, redis: &[u16], service: u16) -> impl FnOnce(&mut Document) + use<> {
        let (proxy, redis) = (self.clone(), redis.to_vec());
        move |document| {
            let mut app = document.cluster("app").take();
            app["load_assignment"] = at("app", service);
            let mut clusters = added(&proxy.manifests, "cluster");
            aim_at_redis(&mut clusters, &redis);
            clusters.extend([app, json!({"name": "wasm_cluster", "load_assignment": at("wasm_cluster", served())})]);
            let mut listeners = added(&proxy.manifests, "listener");
            listeners.extend(proxy.listeners.iter().map(|name| proxy.listener(name)));
            let mut bootstrap = bootstrap(&proxy.manifests);
            merge(
                &mut bootstrap,
                &json!({
                    "admin": document.0["admin"],
                    "static_resources": {"listeners": listeners, "clusters": clusters},
                }),
            );
            document.0 = bootstrap;
        }
    }

    fn listener(&self, name: &str) -> Value {
        let manager = json!({"name": "envoy.filters.network.http_connection_manager", "typed_config": self.manager()});
        json!({
            "name": name,
            "address": local(0),
            "per_connection_buffer_limit_bytes": 32768,
            "default_filter_chain": {"filters": [manager]},
        })
    }

    fn manager(&self) -> Value {
        let (mut filters, host) = match self.layout {
            Layout::Listed => self.listed(),
            Layout::Chained => self.chained(),
        };
        let router = json!({"@type": format!("{TYPES}.filters.http.router.v3.Router"), "suppress_envoy_headers": true});
        filters.push(json!({"name": "envoy.filters.http.router", "typed_config": router}));
        let mut manager = json!({
            "@type": format!("{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager"),
            "stat_prefix": "ingress",
            "common_http_protocol_options": {"headers_with_underscores_action": "REJECT_REQUEST"},
            "http2_protocol_options": {"max_concurrent_streams": 100},
            "normalize_path": true,
            "merge_slashes": true,
            "path_with_escaped_slashes_action": "UNESCAPE_AND_REDIRECT",
            "server_header_transformation": "PASS_THROUGH",
            "use_remote_address": true,
            "http_filters": filters,
            "route_config": {"virtual_hosts": [host]},
        });
        if let Some(hops) = self.trusted_hops() {
            match self.hops {
                Hops::ByManager => manager["xff_num_trusted_hops"] = json!(hops),
                Hops::ByExtension => {
                    manager["use_remote_address"] = json!(false);
                    let kind = format!("{TYPES}.http.original_ip_detection.xff.v3.XffConfig");
                    manager["original_ip_detection_extensions"] = json!([{
                        "name": "envoy.extensions.http.original_ip_detection.xff",
                        "typed_config": {"@type": kind, "xff_num_trusted_hops": hops - 1, "skip_xff_append": false},
                    }]);
                }
            }
        }
        manager
    }

    fn trusted_hops(&self) -> Option<u64> {
        let policy = of_kind(&self.manifests, "ClientTrafficPolicy").next()?;
        policy["spec"]["clientIPDetection"]["xForwardedFor"]["numTrustedHops"].as_u64()
    }

    /// The filters of every policy that a route has, and the virtual host whose routes enable their own.
    fn listed(&self) -> (Vec<Value>, Value) {
        let mut filters = Vec::<Value>::new();
        let routes = self.routes().into_iter().map(|(mut route, name)| {
            for (id, config) in self.own(&name).or_else(|| self.gateways()).into_iter().flatten() {
                let name = format!("envoy.filters.http.wasm/{id}");
                route["typed_per_filter_config"][&name] = json!({"@type": ROUTE, "config": {}});
                if !filters.iter().any(|filter| filter["name"] == name) {
                    filters.push(json!({"name": name, "disabled": true, "typed_config": config}));
                }
            }
            route
        });
        let host = host(routes.collect());
        (filters, host)
    }

    /// The two placeholders, and the virtual host with the chain of the Gateway's policy, which the chain of a route's policy
    /// takes the place of.
    fn chained(&self) -> (Vec<Value>, Value) {
        let kind = |name: &str| format!("{TYPES}.filters.http.filter_chain.v3.{name}");
        let chain = |filters: Vec<(String, Value)>, name: &str| {
            let filters = filters
                .into_iter()
                .enumerate()
                .map(|(number, (_, config))| json!({"name": format!("{name}/{number}"), "typed_config": config}));
            let filters = filters.collect::<Vec<_>>();
            json!({"@type": kind("FilterChainConfigPerRoute"), "filter_chain": {"filters": filters}})
        };
        let routes = self.routes().into_iter().map(|(mut route, name)| {
            if let Some(filters) = self.own(&name) {
                route["typed_per_filter_config"] = json!({
                    LISTENER_CHAIN: {"@type": ROUTE, "disabled": true},
                    ROUTE_CHAIN: chain(filters, "envoy.filters.http.wasm"),
                });
            }
            route
        });
        let mut host = host(routes.collect());
        if let Some(filters) = self.gateways() {
            let chain = chain(filters, "envoy.filters.http.wasm/listener");
            host["typed_per_filter_config"] = json!({LISTENER_CHAIN: chain});
        }
        let placeholder =
            |name: &str| json!({"name": name, "disabled": true, "typed_config": {"@type": kind("FilterChainConfig")}});
        ([LISTENER_CHAIN, ROUTE_CHAIN].map(placeholder).to_vec(), host)
    }

    /// Envoy's routes, the longest prefix first, each with the name of its HTTPRoute. Without one there is a route `web`.
    fn routes(&self) -> Vec<(Value, String)> {
        let mut routes = Vec::new();
        for route in of_kind(&self.manifests, "HTTPRoute") {
            let name = route["metadata"]["name"].as_str().unwrap();
            for rule in route["spec"]["rules"].as_array().unwrap() {
                let paths = rule["matches"].as_array().into_iter().flatten();
                let paths = paths.map(|one| one["path"]["value"].as_str().unwrap()).collect::<Vec<_>>();
                let paths = if paths.is_empty() { vec!["/"] } else { paths };
                routes.extend(paths.into_iter().map(|path| (path.to_owned(), name.to_owned())));
            }
        }
        if routes.is_empty() {
            routes.push(("/".to_owned(), "web".to_owned()));
        }
        routes.sort_by_key(|(path, _)| std::cmp::Reverse(path.len()));
        let envoys =
            |(path, name): (String, String)| (json!({"match": {"prefix": path}, "route": {"cluster": "app"}}), name);
        routes.into_iter().map(envoys).collect()
    }

    /// The filters of the policy for a route, and of that for the Gateway; none where there is no such policy.
    fn own(&self, route: &str) -> Option<Vec<(String, Value)>> {
        self.filters(|target| target["kind"] == "HTTPRoute" && target["name"] == route)
    }

    fn gateways(&self) -> Option<Vec<(String, Value)>> {
        self.filters(|target| target["kind"] == "Gateway")
    }

    /// The filters of the policy with such a target, each with the id of its machine.
    fn filters(&self, is_meant: impl Fn(&Value) -> bool) -> Option<Vec<(String, Value)>> {
        let mut policies = of_kind(&self.manifests, "EnvoyExtensionPolicy");
        let policy = policies.find(|policy| policy["spec"]["targetRefs"].as_array().unwrap().iter().any(&is_meant))?;
        let [namespace, name] = ["namespace", "name"].map(|field| policy["metadata"][field].as_str().unwrap());
        let plugins = policy["spec"]["wasm"].as_array().unwrap().iter().enumerate().map(|(number, wasm)| {
            let id = format!("envoyextensionpolicy/{namespace}/{name}/wasm/{number}");
            let config = self.plugin(wasm, &id);
            (id, config)
        });
        Some(plugins.collect())
    }

    fn plugin(&self, wasm: &Value, id: &str) -> Value {
        let hash = if self.finds_module { hash() } else { "0".repeat(64) };
        let uri = json!({"uri": "http://envoy-gateway/module.wasm", "cluster": "wasm_cluster", "timeout": "10s"});
        let value = wasm.get("config").map_or(String::new(), Value::to_string);
        let config = json!({
            "name": wasm["name"].as_str().unwrap_or(id),
            "root_id": wasm["rootID"].as_str().unwrap_or_default(),
            "fail_open": wasm["failOpen"].as_bool().unwrap_or_default(),
            "vm_config": {
                "vm_id": id,
                "runtime": "envoy.wasm.runtime.v8",
                "code": {"remote": {"http_uri": uri, "sha256": hash, "retry_policy": {"num_retries": 0}}},
            },
            "configuration": {"@type": "type.googleapis.com/google.protobuf.StringValue", "value": value},
        });
        json!({"@type": format!("{TYPES}.filters.http.wasm.v3.Wasm"), "config": config})
    }
}

/// What an Envoy has as updates, each of which it may refuse: its listeners, clusters and routes, in files of a folder.
pub struct Deliveries {
    folder: TempDir,
}

impl Deliveries {
    pub fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    /// Has an Envoy take them from there.
    pub fn deliver(&self) -> impl FnOnce(&mut Document) + use<> {
        let folder = self.folder.path().to_owned();
        move |document| {
            document.0["node"] = json!({"id": "test", "cluster": "test"});
            let manager = &mut document.listener("ingress")["default_filter_chain"]["filters"][0]["typed_config"];
            let mut routes = manager.as_object_mut().unwrap().remove("route_config").unwrap();
            routes["name"] = json!("routes");
            let routes = write(&folder, "routes", "route.v3.RouteConfiguration", json!([routes]));
            manager["rds"] = json!({"route_config_name": "routes", "config_source": routes});
            let parts = document.0.as_object_mut().unwrap().remove("static_resources").unwrap();
            document.0["dynamic_resources"] = json!({
                "lds_config": write(&folder, "listeners", "listener.v3.Listener", parts["listeners"].clone()),
                "cds_config": write(&folder, "clusters", "cluster.v3.Cluster", parts["clusters"].clone()),
            });
        }
    }

    /// Replaces a text in all of them while Envoy runs.
    ///
    /// # Panics
    /// Where it is in none of them.
    pub fn replace(&self, from: &str, to: &str) {
        let mut replaced = false;
        for name in ["routes", "listeners"] {
            let path = self.folder.path().join(name).with_extension("json");
            let text = std::fs::read_to_string(&path).unwrap();
            if text.contains(from) {
                let next = path.with_extension("next");
                std::fs::write(&next, text.replace(from, to)).unwrap();
                std::fs::rename(next, path).unwrap();
                replaced = true;
            }
        }
        assert!(replaced, "nothing says {from}");
    }
}

/// Writes resources to a file, and returns where they are as Envoy is told of it.
fn write(folder: &Path, name: &str, kind: &str, mut resources: Value) -> Value {
    for resource in resources.as_array_mut().unwrap() {
        resource["@type"] = json!(format!("type.googleapis.com/envoy.config.{kind}"));
    }
    let path = folder.join(name).with_extension("json");
    std::fs::write(&path, json!({"resources": resources}).to_string()).unwrap();
    json!({"resource_api_version": "V3", "path_config_source": {"path": path}})
}

fn of_kind<'a>(manifests: &'a [Value], kind: &'a str) -> impl Iterator<Item = &'a Value> {
    manifests.iter().filter(move |object| object["kind"] == kind)
}

fn host(routes: Vec<Value>) -> Value {
    json!({"name": "app", "domains": ["*"], "routes": routes})
}

/// A load assignment of one port of this machine.
fn at(cluster: &str, port: u16) -> Value {
    json!({"cluster_name": cluster, "endpoints": [{"lb_endpoints": [{"endpoint": {"address": local(port)}}]}]})
}

/// Where the module is served, as Envoy Gateway would serve it.
fn served() -> u16 {
    static SERVER: OnceLock<App> = OnceLock::new();
    SERVER.get_or_init(|| App::serving(std::fs::read(module()).unwrap())).port()
}

/// The SHA-256 of the module, in hexadecimal.
fn hash() -> String {
    static HASH: OnceLock<String> = OnceLock::new();
    let digits = || Sha256::digest(std::fs::read(module()).unwrap()).iter().map(|byte| format!("{byte:02x}")).collect();
    HASH.get_or_init(digits).clone()
}

/// The listeners or clusters that the EnvoyPatchPolicy adds.
///
/// # Panics
/// Where a patch does anything else, or its name or type are not those of what it adds.
pub fn added(manifests: &[Value], kind: &str) -> Vec<Value> {
    let policies = of_kind(manifests, "EnvoyPatchPolicy");
    let patches = policies.flat_map(|policy| policy["spec"]["jsonPatches"].as_array().unwrap());
    let of_that_kind = patches.filter(|patch| {
        let named = patch["type"].as_str().unwrap().strip_prefix("type.googleapis.com/envoy.config.").unwrap();
        named.split('.').next() == Some(kind)
    });
    let value = |patch: &Value| {
        let operation = &patch["operation"];
        assert_eq!((&operation["op"], &operation["path"]), (&json!("add"), &json!("")), "it adds no whole resource");
        assert_eq!(operation["value"]["name"], patch["name"]);
        operation["value"].clone()
    };
    of_that_kind.map(value).collect()
}

/// The bootstrap that Envoy Gateway makes of its own, as far as it matters here, and of that in the EnvoyProxy.
pub fn bootstrap(manifests: &[Value]) -> Value {
    let mut bootstrap = json!({
        "stats_config": {
            "use_all_default_tags": true,
            "stats_tags": [{"tag_name": "priority", "regex": r"circuit_breakers\.((.+?)\.).+"}],
        },
        "layered_runtime": {"layers": [{"name": "global_config", "static_layer": {"re2.max_program_size.warn_level": 1000}}]},
    });
    for proxy in of_kind(manifests, "EnvoyProxy") {
        let own = &proxy["spec"]["bootstrap"];
        assert_eq!(own["type"], "Merge");
        merge(&mut bootstrap, &serde_yaml_ng::from_str(own["value"].as_str().unwrap()).unwrap());
    }
    bootstrap
}

/// What protobuf calls a merge: fields of messages one by one, lists appended, all else replaced.
fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (name, value) in from {
                merge(into.entry(name).or_insert(Value::Null), value);
            }
        }
        (Value::Array(into), Value::Array(from)) => into.extend(from.iter().cloned()),
        (into, from) => *into = from.clone(),
    }
}

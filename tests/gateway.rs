//! The manifests of envoy/gateway/: what they say, and what a proxy does that is configured as Envoy Gateway would
//! configure it.
//!
//! There is no cluster of Kubernetes here. Envoy Gateway's own part, which is to make the configuration of Envoy out of the
//! manifests, is done by `translation.rs`; the Envoys, the module and the servers are real.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, clippy::string_slice)]

mod support;

#[path = "gateway/schemas.rs"]
mod schemas;
#[path = "gateway/translation.rs"]
mod translation;

use meshquota::config::Config;
use serde_json::{Value, json};

use support::app::App;
use support::cluster::Cluster;
use support::envoy::{Envoy, NEWEST, PATIENT, Setup};
use support::http::{Body, Client, Request};
use support::manifests::{self, of_kind, of_kind_mut, shipped_rules, with, yaml};
use support::program::{Said, file, path, run};
use support::project::{files, read};
use support::quota::{check_limit, key, keys, left, quota};
use support::server::{Kind, Server, wait_until};
use support::tunnel::{check_parts, check_script, names};
use translation::{Deliveries, Hops, Layout, Proxy, added, bootstrap};

/// The Envoys of Envoy Gateway 1.6 and later, with what their release makes of the manifests.
const PROXIES: [(&str, Layout); 4] =
    [("1.36.2", Layout::Listed), (NEWEST, Layout::Listed), ("1.39.3", Layout::Chained), (NEWEST, Layout::Chained)];

const LAYOUTS: [Layout; 2] = [Layout::Listed, Layout::Chained];

/// What an Envoy says that refuses an internal listener.
const REFUSED: &str = "InternalListener bootstrap extension is mandatory";

/// What an Envoy says of a filter whose module it cannot have, or not yet: one that is being fetched for another filter comes
/// a moment later.
const LOADING: &str = "failed to load";

const PAGE: &str = "docs/envoy-gateway.md";

const OVERLAYS: [&str; 4] = ["gateway", "route", "proxied", "example"];

/// The path of an overlay inside the project.
fn overlay(name: &str) -> String {
    format!("envoy/gateway/overlays/{name}")
}

/// What an overlay comes to.
fn rendered(name: &str) -> Vec<Value> {
    manifests::rendered(&overlay(name))
}

/// The blocks of YAML of the page that are of that kind.
fn shown(kind: &str) -> Vec<Value> {
    let found = manifests::snippets(PAGE).into_iter().filter(|snippet| snippet["kind"] == kind).collect::<Vec<_>>();
    assert!(!found.is_empty(), "{PAGE} shows no {kind}");
    found
}

#[test]
fn every_manifest_has_the_fields_that_are_documented_and_no_others() {
    let files = files("envoy/gateway");
    assert!(files.len() > OVERLAYS.len());
    for file in files {
        assert_eq!(schemas::faults(&yaml(&file)), [""; 0], "{file}");
    }
    for name in OVERLAYS {
        for object in rendered(name) {
            assert_eq!(schemas::faults(&object), [""; 0], "{name}");
            assert_eq!(object["metadata"]["namespace"], "shop", "{name}");
        }
    }
    for snippet in manifests::snippets(PAGE) {
        assert_eq!(schemas::faults(&snippet), [""; 0], "{PAGE}: {snippet}");
    }
}

#[test]
fn a_field_that_is_misspelt_missing_or_out_of_range_is_found() {
    let objects = rendered("example");
    let cases = [
        ("EnvoyExtensionPolicy", "/spec/targetRef", json!({"kind": "Gateway", "name": "public"})),
        ("EnvoyExtensionPolicy", "/spec/targetRefs/0/kind", json!("Service")),
        ("EnvoyExtensionPolicy", "/spec/targetRefs/0/group", Value::Null),
        ("EnvoyExtensionPolicy", "/spec/wasm/0/rootId", json!("meshquota")),
        ("EnvoyExtensionPolicy", "/spec/wasm/0/failOpen", json!("true")),
        ("EnvoyExtensionPolicy", "/spec/wasm/0/config", json!("{}")),
        ("EnvoyExtensionPolicy", "/spec/wasm/0/code/type", json!("HTTP")),
        ("EnvoyExtensionPolicy", "/spec/wasm/0/code/image/url", json!("oci://registry.example.com/meshquota:0.1.0")),
        ("EnvoyExtensionPolicy", "/spec/wasm/0/code/image/sha256", json!("sha256:00")),
        ("EnvoyExtensionPolicy", "/apiVersion", json!("gateway.envoyproxy.io/v1")),
        ("EnvoyPatchPolicy", "/spec/type", json!("Merge")),
        ("EnvoyPatchPolicy", "/spec/jsonPatches/0/type", json!("envoy.config.listener.v3.Listener")),
        ("EnvoyPatchPolicy", "/spec/jsonPatches/0/name", Value::Null),
        ("EnvoyPatchPolicy", "/spec/jsonPatches/0/operation/path", json!("/")),
        ("EnvoyProxy", "/spec/bootstrap/type", json!("merge")),
        ("EnvoyProxy", "/spec/bootstrap/value", json!("bootstrap_extension: []")),
        ("EnvoyProxy", "/spec/bootstrap/value", json!("bootstrap_extensions: {")),
        ("Gateway", "/spec/infrastructure/parametersRef/group", json!("gateway.networking.k8s.io")),
        ("HTTPRoute", "/spec/rules/0/backendRefs/0/port", json!("8080")),
    ];
    for (kind, path, value) in cases {
        assert!(!schemas::faults(&with(of_kind(&objects, kind), path, value)).is_empty(), "{kind} {path}");
    }
    let chart = yaml("envoy/gateway/values.yaml");
    let misspelt = with(&chart, "/config/envoyGateway/extensionApis/enableEnvoyPatchPolicies", json!(true));
    assert!(!schemas::faults(&misspelt).is_empty());
}

#[test]
fn kustomize_makes_the_same_of_the_overlays() {
    for name in OVERLAYS {
        manifests::check_against_kubectl(&overlay(name));
    }
}

#[test]
fn the_script_in_the_manifests_is_that_of_the_project_to_the_byte() {
    for name in OVERLAYS {
        check_script(&mut added(&rendered(name), "listener"));
    }
}

#[test]
fn the_tunnel_is_that_of_the_configurations_for_envoy_but_for_addresses_and_credentials() {
    for (name, shipped) in [("gateway", "envoy/envoy.yaml"), ("proxied", "envoy/redis-cluster.yaml")] {
        let manifests = rendered(name);
        check_parts(added(&manifests, "listener"), shipped, "listeners");
        check_parts(added(&manifests, "cluster"), shipped, "clusters");
    }
}

#[test]
fn a_proxy_gets_each_part_once_and_the_policies_are_for_the_gateway_of_the_example() {
    let gateway = rendered("example");
    let gateway = of_kind(&gateway, "Gateway");
    for name in OVERLAYS {
        let manifests = rendered(name);
        let proxied = (name == "proxied").then_some("meshquota_redis_proxy");
        let listeners = proxied.into_iter().chain(["meshquota_tunnel"]).collect::<Vec<_>>();
        let clusters = ["meshquota_redis"].into_iter().chain(listeners.clone()).collect::<Vec<_>>();
        assert_eq!(names(&added(&manifests, "listener")), listeners, "{name}");
        assert_eq!(names(&added(&manifests, "cluster")), clusters, "{name}");
        let target =
            json!({"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": gateway["metadata"]["name"]});
        assert_eq!(of_kind(&manifests, "EnvoyPatchPolicy")["spec"]["targetRef"], target, "{name}");
        if name != "route" {
            assert_eq!(of_kind(&manifests, "EnvoyExtensionPolicy")["spec"]["targetRefs"], json!([target]), "{name}");
        }
        let proxy = &of_kind(&manifests, "EnvoyProxy")["metadata"]["name"];
        assert_eq!(gateway["spec"]["infrastructure"]["parametersRef"]["name"], *proxy, "{name}");
    }
}

#[test]
fn the_bootstrap_has_what_that_of_the_configuration_for_envoy_has_and_keeps_envoy_gateways_own() {
    let envoy = yaml("envoy/envoy.yaml");
    for name in OVERLAYS {
        let bare = bootstrap(&[]);
        let bootstrap = bootstrap(&rendered(name));
        assert_eq!(bootstrap["bootstrap_extensions"], envoy["bootstrap_extensions"], "{name}");
        assert_eq!(bootstrap["layered_runtime"], bare["layered_runtime"], "{name}");
        let tags = |bootstrap: &Value| bootstrap["stats_config"]["stats_tags"].as_array().unwrap().clone();
        assert_eq!(tags(&bootstrap), [tags(&bare), tags(&envoy)].concat(), "{name}");
        assert_eq!(bootstrap["stats_config"]["use_all_default_tags"], true, "{name}");
    }
}

/// The configuration of the filter in the one policy among these manifests.
fn configuration(manifests: &mut [Value]) -> &mut Value {
    &mut of_kind_mut(manifests, "EnvoyExtensionPolicy")["spec"]["wasm"][0]["config"]
}

#[test]
fn the_filter_accepts_its_configuration_which_has_the_rule_of_the_configuration_for_envoy() {
    for name in OVERLAYS {
        let mut manifests = rendered(name);
        let configuration = configuration(&mut manifests).clone();
        assert_eq!(configuration["rules"], shipped_rules(), "{name}");
        match Config::from_json(configuration.to_string().as_bytes()) {
            Ok(config) => assert!(config.warnings.is_empty(), "{name}: {:?}", config.warnings),
            Err(errors) => panic!("{name}: {errors}"),
        }
        let wasm = &of_kind(&manifests, "EnvoyExtensionPolicy")["spec"]["wasm"][0];
        assert_eq!((&wasm["name"], &wasm["rootID"]), (&json!("meshquota"), &json!("meshquota")), "{name}");
        check_by_program(&manifests);
    }
    for policy in shown("EnvoyExtensionPolicy") {
        check_by_program(&[policy]);
    }
}

/// Checks that `meshquota check` finds one configuration in these manifests, and no fault.
fn check_by_program(manifests: &[Value]) {
    let texts = manifests.iter().map(|object| format!("---\n{}\n", serde_yaml_ng::to_string(object).unwrap()));
    let Said { out: said, err, code } = run(&["check", path(&file(texts.collect::<String>()))]);
    assert_eq!(code, 0, "{said}{err}");
    assert!(said.ends_with(": config of meshquota: fine, 1 rule\n") && said.lines().count() == 1, "{said}");
}

/// An Envoy as Envoy Gateway would configure it, before that service.
fn setup(proxy: &Proxy, redis: &[u16], service: &App, version: &'static str) -> Setup {
    Setup::new(redis[0], service).version(version).tweak(proxy.boot(redis, service.port()))
}

/// An overlay whose limit brings next to nothing back while a test runs, and whose timeout is patient.
fn patient(name: &str) -> Vec<Value> {
    let mut manifests = rendered(name);
    make_patient(&mut manifests);
    manifests
}

fn make_patient(manifests: &mut [Value]) {
    let configuration = configuration(manifests);
    configuration["redis"] = json!({"timeout": PATIENT});
    configuration["rules"][0]["limits"] = json!([{"capacity": 10, "refill": "1/day"}]);
}

#[test]
fn each_overlay_as_it_is_limits_and_has_its_bucket_in_redis() {
    for (version, layout) in PROXIES {
        for name in ["gateway", "route", "example"] {
            if version != NEWEST && name != "example" {
                continue;
            }
            let (redis, service) = (Server::start(Kind::Redis, &[]), App::start());
            let envoy = setup(&Proxy::new(rendered(name), layout), &[redis.port()], &service, version).start();
            check_limit(&envoy);
            assert_eq!(keys(&redis), [key("127.0.0.1")], "{version} {layout:?} {name}");
            assert!(service.count() >= 10);
            envoy.finish();
        }
    }
}

#[test]
fn a_client_that_is_denied_learns_when_to_come_again() {
    for layout in LAYOUTS {
        let (redis, service) = (Server::start(Kind::Redis, &[]), App::start());
        let envoy = setup(&Proxy::new(patient("gateway"), layout), &[redis.port()], &service, NEWEST).start();
        check_limit(&envoy);
        let denied = envoy.get("/");
        assert_eq!((denied.status(), quota(&denied), service.count()), (429, Some((10, 0)), 10), "{layout:?}");
        // One token comes back in a day.
        assert!(denied.number("retry-after").is_some_and(|seconds| (86_000..=86_400).contains(&seconds)));
        assert_eq!(denied.header("x-envoy-ratelimited").as_deref(), Some("true"));
        assert_eq!(denied.text(), "rate limit exceeded\n");
        envoy.finish();
    }
}

#[test]
fn the_overlay_for_redis_cluster_limits_and_has_its_bucket_in_its_slot() {
    let cluster = Cluster::start(Kind::Redis, &[]);
    let ports = cluster.nodes.iter().take(3).map(Server::port).collect::<Vec<_>>();
    for (version, layout) in PROXIES {
        for node in cluster.nodes.iter().take(3) {
            redis::cmd("FLUSHALL").exec(&mut node.client()).unwrap();
        }
        let service = App::start();
        let envoy = setup(&Proxy::new(patient("proxied"), layout), &ports, &service, version).start();
        wait_until("Envoy knows the slots", || quota(&envoy.client_from("127.0.0.9").get("/")).is_some());
        check_limit(&envoy);
        let owner = &cluster.nodes[cluster.owner(&key("127.0.0.1"))];
        assert!(left(owner, "127.0.0.1").is_some(), "{version} {layout:?}");
        envoy.finish();
    }
}

#[test]
fn a_request_is_charged_once_with_a_body_that_is_larger_than_what_the_listener_holds() {
    for layout in LAYOUTS {
        let (redis, service) = (Server::start(Kind::Redis, &[]), App::start());
        let envoy = setup(&Proxy::new(patient("example"), layout), &[redis.port()], &service, NEWEST).start();
        let body = vec![b'x'; 1 << 20];
        for left in (7..10).rev() {
            let request = Request::new("POST", "/").body(Body::Sized(body.clone()));
            assert_eq!(quota(&envoy.client_from("127.0.0.2").exchange(&request)), Some((10, left)), "{layout:?}");
        }
        assert!(service.take().iter().all(|request| request.body == body), "{layout:?}");
        assert_eq!(left(&redis, "127.0.0.2"), Some(7), "{layout:?}");
        envoy.expect_counts(&[("per-ip allow", 3), ("calls ok", 3), ("calls noscript", 1)]);
        envoy.finish();
    }
}

#[test]
fn the_client_is_the_peer_and_behind_a_trusted_proxy_who_the_policy_of_the_page_says() {
    let policies = shown("ClientTrafficPolicy");
    assert_eq!(policies[0]["spec"]["clientIPDetection"]["xForwardedFor"]["numTrustedHops"], 1);
    let forwarded = Request::get("/").with("x-forwarded-for", "6.6.6.6, 192.0.2.7");
    let cases = [
        (None, Hops::ByManager, "127.0.0.2"),
        (Some(1), Hops::ByExtension, "192.0.2.7"),
        (Some(1), Hops::ByManager, "192.0.2.7"),
        (Some(2), Hops::ByExtension, "6.6.6.6"),
        (Some(2), Hops::ByManager, "6.6.6.6"),
    ];
    for (version, layout) in [("1.36.2", Layout::Listed), (NEWEST, Layout::Chained)] {
        for (hops, how, client) in cases {
            let mut proxy = Proxy::new(patient("gateway"), layout);
            proxy.hops = how;
            let path = "/spec/clientIPDetection/xForwardedFor/numTrustedHops";
            proxy.manifests.extend(hops.map(|hops| with(&policies[0], path, json!(hops))));
            let (redis, service) = (Server::start(Kind::Redis, &[]), App::start());
            let envoy = setup(&proxy, &[redis.port()], &service, version).start();
            let response = envoy.client_from("127.0.0.2").exchange(&forwarded);
            assert_eq!(quota(&response), Some((10, 9)), "{version} {how:?} {hops:?}");
            // Without the header there is no one but the peer.
            assert_eq!(envoy.client_from("127.0.0.3").get("/").status(), 200);
            let mut expected = [client, "127.0.0.3"].map(key);
            expected.sort();
            assert_eq!(keys(&redis), expected, "{version} {how:?} {hops:?}");
            envoy.finish();
        }
    }
}

/// The example with a second route, `/login`, and the page's policy for it.
fn with_login() -> Vec<Value> {
    let mut manifests = patient("example");
    manifests.extend(shown("HTTPRoute"));
    assert_eq!(manifests.last().unwrap()["metadata"]["name"], "login");
    manifests
}

#[test]
fn the_policy_of_a_route_takes_the_place_of_that_of_the_gateway() {
    for (version, layout) in PROXIES {
        let (redis, service) = (Server::start(Kind::Redis, &[]), App::start());
        let mut manifests = with_login();
        let policies = shown("EnvoyExtensionPolicy");
        let own = policies.iter().find(|policy| policy["spec"]["targetRefs"][0]["name"] == "login").unwrap();
        manifests.push(with(own, "/spec/wasm/0/config/redis", json!({"timeout": PATIENT})));
        let setup = setup(&Proxy::new(manifests, layout), &[redis.port()], &service, version).unconnected();
        let mut envoy = setup.start();
        envoy.tolerate(LOADING);
        wait_until("both filters are connected", || envoy.gauge("connected") == 2);
        for left in [4, 3] {
            assert_eq!(quota(&envoy.get("/login")), Some((5, left)), "{version} {layout:?}");
        }
        assert_eq!(quota(&envoy.get("/")), Some((10, 9)), "{version} {layout:?}");
        assert_eq!(quota(&envoy.get("/login")), Some((5, 2)), "{version} {layout:?}");
        assert_eq!(keys(&redis), ["quota:{login:127.0.0.1}:0", &key("127.0.0.1")], "{version} {layout:?}");
        envoy.wait_for_count("login allow", |times| times == 3);
        envoy.wait_for_count("per-ip allow", |times| times == 1);
        envoy.finish();
    }
}

#[test]
fn routes_without_a_policy_of_their_own_share_the_buckets_and_the_connection_of_the_gateways() {
    for layout in LAYOUTS {
        let (redis, service) = (Server::start(Kind::Redis, &[]), App::start());
        let envoy = setup(&Proxy::new(with_login(), layout), &[redis.port()], &service, NEWEST).start();
        for (left, path) in [(9, "/"), (8, "/login"), (7, "/other")] {
            assert_eq!(quota(&envoy.get(path)), Some((10, left)), "{layout:?}");
        }
        assert_eq!(keys(&redis), [key("127.0.0.1")]);
        assert_eq!(envoy.gauge("connected"), 1, "{layout:?}");
        envoy.finish();
    }
}

#[test]
fn the_listeners_of_a_gateway_share_the_buckets_and_the_connection() {
    for (version, layout) in PROXIES {
        let (redis, service) = (Server::start(Kind::Redis, &[]), App::start());
        let mut proxy = Proxy::new(patient("gateway"), layout);
        proxy.listeners = &["ingress", "second"];
        let mut envoy = setup(&proxy, &[redis.port()], &service, version).start();
        envoy.tolerate(LOADING);
        assert_eq!(quota(&envoy.get("/")), Some((10, 9)), "{version} {layout:?}");
        let mut client = Client::connect(envoy.listener("second"));
        assert_eq!(quota(&client.get("/")), Some((10, 8)), "{version} {layout:?}");
        assert_eq!(envoy.gauge("connected"), 1, "{version} {layout:?}");
        envoy.finish();
    }
}

#[test]
fn a_policy_for_one_route_leaves_the_others_alone() {
    for layout in LAYOUTS {
        let (redis, service) = (Server::start(Kind::Redis, &[]), App::start());
        let mut manifests = with_login();
        of_kind_mut(&mut manifests, "EnvoyExtensionPolicy")["spec"]["targetRefs"] =
            of_kind(&rendered("route"), "EnvoyExtensionPolicy")["spec"]["targetRefs"].clone();
        let envoy = setup(&Proxy::new(manifests, layout), &[redis.port()], &service, NEWEST).start();
        assert_eq!(quota(&envoy.get("/")), Some((10, 9)), "{layout:?}");
        assert_eq!(quota(&envoy.get("/login")), None, "{layout:?}");
        envoy.wait_for_count("per-ip allow", |times| times == 1);
        envoy.finish();
    }
}

#[test]
fn the_bootstrap_makes_labels_of_the_names_of_metrics() {
    for layout in LAYOUTS {
        let (redis, service) = (Server::start(Kind::Redis, &[]), App::start());
        let envoy = setup(&Proxy::new(patient("gateway"), layout), &[redis.port()], &service, NEWEST).start();
        check_limit(&envoy);
        for expected in [
            r#"meshquota_decisions_total{rule="per-ip",outcome="allow"} 10"#,
            r#"meshquota_decisions_total{rule="per-ip",outcome="deny"} 1"#,
            r#"meshquota_redis_calls_total{result="ok"} 11"#,
            r#"meshquota_redis_errors_total{kind="readonly"} 0"#,
            "meshquota_connected{} 1",
        ] {
            wait_until(expected, || envoy.admin("/stats/prometheus").lines().any(|line| line == expected));
        }
        envoy.finish();
    }
}

#[test]
fn the_tunnel_counts_among_the_connections_for_which_the_end_of_a_pod_waits() {
    let (redis, service) = (Server::start(Kind::Redis, &[]), App::start());
    let setup = setup(&Proxy::new(patient("gateway"), Layout::Listed), &[redis.port()], &service, NEWEST);
    let envoy = setup.workers(2).start();
    wait_until("both connections are counted", || envoy.statistic("server.total_connections") == 2);
    envoy.finish();
}

/// Sends some requests, of which each goes on without a quota.
fn check_no_quota(envoy: &Envoy) {
    for _ in 0..20 {
        let response = envoy.get("/");
        assert_eq!((response.status(), quota(&response)), (200, None));
    }
}

#[test]
fn a_filter_whose_tunnel_is_not_there_lets_requests_go_on_without_a_quota() {
    for layout in LAYOUTS {
        let (redis, service) = (Server::start(Kind::Redis, &[]), App::start());
        let mut manifests = rendered("gateway");
        let patches = of_kind_mut(&mut manifests, "EnvoyPatchPolicy")["spec"]["jsonPatches"].as_array_mut().unwrap();
        patches.retain(|patch| patch["name"] != "meshquota_tunnel");
        let proxy = Proxy::new(manifests, layout);
        let envoy = setup(&proxy, &[redis.port()], &service, NEWEST).unconnected().start();
        check_no_quota(&envoy);
        envoy.wait_for_count("per-ip fail_allow", |times| times == 20);
        assert_eq!(envoy.gauge("connected"), 0);
        envoy.finish();
    }
}

#[test]
fn a_proxy_without_the_bootstrap_refuses_the_tunnels_listener_alone_and_requests_go_on_without_a_quota() {
    for layout in LAYOUTS {
        for has_bootstrap in [true, false] {
            let (redis, service) = (Server::start(Kind::Redis, &[]), App::start());
            let mut manifests = patient("gateway");
            manifests.retain(|object| has_bootstrap || object["kind"] != "EnvoyProxy");
            let deliveries = Deliveries::new();
            let setup = setup(&Proxy::new(manifests, layout), &[redis.port()], &service, NEWEST);
            let setup = setup.tweak(deliveries.deliver());
            if has_bootstrap {
                let envoy = setup.start();
                check_limit(&envoy);
                envoy.finish();
                continue;
            }
            let envoy = setup.unconnected().start();
            check_no_quota(&envoy);
            assert!(envoy.log().contains(REFUSED), "{layout:?}");
            envoy.finish();
        }
    }
}

#[test]
fn a_policy_that_changes_takes_effect_and_no_request_fails() {
    for layout in LAYOUTS {
        let (redis, service) = (Server::start(Kind::Redis, &[]), App::start());
        let deliveries = Deliveries::new();
        let setup = setup(&Proxy::new(patient("gateway"), layout), &[redis.port()], &service, NEWEST);
        let envoy = setup.tweak(deliveries.deliver()).start();
        assert_eq!(quota(&envoy.get("/")), Some((10, 9)), "{layout:?}");
        let capacity = |capacity: u64| format!(r#"\"capacity\":{capacity},"#);
        deliveries.replace(&capacity(10), &capacity(2000));
        wait_until("the new limit holds", || {
            let response = envoy.get("/");
            let (limit, _) = quota(&response).expect("no request goes on without a quota");
            // The old limit may be spent before.
            assert!(response.status() == 200 || limit == 10, "{layout:?}");
            limit == 2000
        });
        wait_until("the old filter is gone", || envoy.gauge("connected") == 1);
        envoy.finish();
    }
}

#[test]
fn a_module_that_cannot_be_had_lets_requests_go_on_or_refuses_them_as_the_policy_says() {
    for layout in LAYOUTS {
        for fails_open in [true, false] {
            let (redis, service) = (Server::start(Kind::Redis, &[]), App::start());
            let mut manifests = rendered("gateway");
            let wasm = &mut of_kind_mut(&mut manifests, "EnvoyExtensionPolicy")["spec"]["wasm"][0];
            assert_eq!(wasm["failOpen"], true);
            wasm["failOpen"] = json!(fails_open);
            let mut proxy = Proxy::new(manifests, layout);
            proxy.finds_module = false;
            let mut envoy = setup(&proxy, &[redis.port()], &service, NEWEST).unconnected().start();
            envoy.tolerate(LOADING);
            if fails_open {
                check_no_quota(&envoy);
            } else {
                assert_eq!(envoy.get("/").status(), 503, "{layout:?}");
                envoy.expect_5xx(1);
            }
            assert_eq!(keys(&redis), [""; 0]);
            envoy.finish();
        }
    }
}

#[test]
fn the_page_says_what_an_envoy_says() {
    let page = read(PAGE);
    for said in [REFUSED, LOADING] {
        assert!(page.contains(said), "{PAGE} does not say: {said}");
    }
}

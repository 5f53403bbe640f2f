//! The manifests of envoy/istio/: what they say, and what a proxy does that is configured as Istio would configure it.
//!
//! There is no cluster of Kubernetes here. Istio's own part, which is to make the configuration of Envoy out of the
//! manifests, is done by `mesh.rs`; the Envoys, the module and the servers are real.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, clippy::string_slice)]

mod support;

#[path = "istio/mesh.rs"]
mod mesh;
#[path = "istio/schemas.rs"]
mod schemas;

use meshquota::config::Config;
use serde_json::{Value, json};

use mesh::{Hop, added, boot, with_doubles};
use support::app::App;
use support::cluster::Cluster;
use support::envoy::{Envoy, NEWEST, PATIENT, Setup};
use support::http::Request;
use support::manifests::{self, of_kind, of_kind_mut, shipped_rules, with, yaml};
use support::project::files;
use support::quota::{check_limit, key, keys, left, quota};
use support::server::{Kind, Server, wait_until};
use support::tunnel::{check_parts, check_script, names};

/// The Envoy of the oldest Istio that is supported, 1.28, and the newest there is.
const VERSIONS: [&str; 2] = ["1.36.2", NEWEST];

const PAGE: &str = "docs/istio.md";

const OVERLAYS: [&str; 5] = ["namespace", "mesh", "gateway", "waypoint", "proxied"];

/// The path of an overlay inside the project.
fn overlay(name: &str) -> String {
    format!("envoy/istio/overlays/{name}")
}

/// What an overlay comes to.
fn rendered(name: &str) -> Vec<Value> {
    manifests::rendered(&overlay(name))
}

fn snippets() -> Vec<Value> {
    manifests::snippets(PAGE)
}

#[test]
fn every_manifest_has_the_fields_that_istio_documents_and_no_others() {
    let files = files("envoy/istio");
    assert!(files.len() > OVERLAYS.len());
    for file in files {
        let document = yaml(&file);
        // A patch says only what is different.
        let patch = file.contains("/overlays/") && document["kind"] == "WasmPlugin";
        if !patch {
            assert_eq!(schemas::faults(&document), [""; 0], "{file}");
        }
    }
    for name in OVERLAYS {
        for object in rendered(name) {
            assert_eq!(schemas::faults(&object), [""; 0], "{name}");
            assert!(object["metadata"]["namespace"].is_string(), "{name}");
        }
    }
    for snippet in snippets().iter().filter(|snippet| snippet.get("kind").is_some()) {
        assert_eq!(schemas::faults(snippet), [""; 0], "{PAGE}: {snippet}");
    }
}

#[test]
fn a_field_that_is_misspelt_missing_or_out_of_range_is_found() {
    let objects = rendered("gateway");
    let plugin = of_kind(&objects, "WasmPlugin");
    let tunnel = of_kind(&objects, "EnvoyFilter");
    let cases = [
        (plugin, "/spec/failStrategy", json!("FAIL_CLOSED")),
        (plugin, "/spec/url", Value::Null),
        (plugin, "/spec/phase", json!("FIRST")),
        (plugin, "/spec/selector", json!({"matchLabels": {"istio": "ingressgateway"}})),
        (plugin, "/spec/rootId", json!("meshquota")),
        (plugin, "/apiVersion", json!("extensions.istio.io/v1")),
        (tunnel, "/spec/configPatches", json!([])),
        (tunnel, "/spec/configPatches/0/match/context", json!("SIDECAR")),
        (tunnel, "/spec/configPatches/0/applyto", json!("LISTENER")),
    ];
    for (object, path, value) in cases {
        assert_eq!(schemas::faults(&with(object, path, value)).len(), 1, "{path}");
    }
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
        let hop = if name == "waypoint" { Hop::Waypoint } else { Hop::Gateway(0) };
        check_script(&mut added(&rendered(name), hop, "LISTENER"));
    }
}

#[test]
fn the_tunnel_is_that_of_the_configurations_for_envoy_but_for_addresses_and_credentials() {
    for (name, shipped) in [("namespace", "envoy/envoy.yaml"), ("proxied", "envoy/redis-cluster.yaml")] {
        let manifests = rendered(name);
        for (apply_to, list) in [("LISTENER", "listeners"), ("CLUSTER", "clusters")] {
            check_parts(added(&manifests, Hop::Inbound, apply_to), shipped, list);
        }
    }
}

#[test]
fn a_proxy_gets_each_part_once_and_none_has_a_name_of_istio() {
    const ISTIO: [&str; 4] =
        ["connect_originate", "inner_connect_originate", "outer_connect_originate", "main_internal"];
    for name in OVERLAYS {
        let manifests = rendered(name);
        let hops = match name {
            "waypoint" => &[Hop::Waypoint][..],
            "gateway" => &[Hop::Gateway(0)],
            _ => &[Hop::Inbound, Hop::Outbound, Hop::Gateway(0)],
        };
        for hop in hops {
            for apply_to in ["LISTENER", "CLUSTER"] {
                let parts = added(&manifests, *hop, apply_to);
                let names = names(&parts);
                let proxied = (name == "proxied").then_some("meshquota_redis_proxy");
                let redis = (apply_to == "CLUSTER").then_some("meshquota_redis");
                let expected = redis.into_iter().chain(proxied).chain(["meshquota_tunnel"]).collect::<Vec<_>>();
                assert_eq!(names, expected, "{name} {hop:?}");
                assert!(!names.iter().any(|name| ISTIO.contains(name)));
            }
        }
    }
}

#[test]
fn the_filter_accepts_its_configuration_which_has_the_rule_of_the_configuration_for_envoy() {
    for name in OVERLAYS {
        let manifests = rendered(name);
        let configuration = &of_kind(&manifests, "WasmPlugin")["spec"]["pluginConfig"];
        assert_eq!(configuration["rules"], shipped_rules(), "{name}");
        // Istio carries numbers as doubles.
        for text in [configuration.to_string(), with_doubles(configuration).to_string()] {
            if let Err(errors) = Config::from_json(text.as_bytes()) {
                panic!("{name}: {errors}\n{text}");
            }
        }
        assert_eq!(of_kind(&manifests, "WasmPlugin")["spec"]["pluginName"], "meshquota", "{name}");
    }
}

/// An Envoy as Istio would configure it at that hop, before that service or the next hop.
fn start(manifests: &[Value], hop: Hop, redis: &Server, next: u16, version: &'static str) -> Envoy {
    // The service is named by its port in `boot`.
    let app = App::start();
    let setup = Setup::new(redis.port(), &app).version(version);
    setup.tweak(boot(manifests, hop, &[redis.port()], next, &[])).start()
}

/// The same, where no filter is meant to be.
fn start_bare(manifests: &[Value], hop: Hop, redis: &Server, next: u16) -> Envoy {
    let app = App::start();
    Setup::new(redis.port(), &app).tweak(boot(manifests, hop, &[redis.port()], next, &[])).unconnected().start()
}

/// An overlay whose limit brings next to nothing back while a test runs, and whose timeout is patient.
fn patient(name: &str) -> Vec<Value> {
    let mut manifests = rendered(name);
    let configuration = &mut of_kind_mut(&mut manifests, "WasmPlugin")["spec"]["pluginConfig"];
    configuration["redis"] = json!({"timeout": PATIENT});
    configuration["rules"][0]["limits"] = json!([{"capacity": 10, "refill": "1/day"}]);
    manifests
}

#[test]
fn each_overlay_as_it_is_limits_at_its_hop_and_has_its_bucket_in_redis() {
    let places = [
        ("namespace", Hop::Inbound),
        ("mesh", Hop::Inbound),
        ("gateway", Hop::Gateway(0)),
        ("waypoint", Hop::Waypoint),
    ];
    for version in VERSIONS {
        for (name, hop) in places {
            let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
            let envoy = start(&rendered(name), hop, &redis, app.port(), version);
            check_limit(&envoy);
            assert_eq!(keys(&redis), [key("127.0.0.1")], "{version} {name}");
            assert!(app.count() >= 10);
            envoy.finish();
        }
    }
}

#[test]
fn the_overlay_for_redis_cluster_limits_and_has_its_bucket_in_its_slot() {
    let cluster = Cluster::start(Kind::Redis, &[]);
    let ports = cluster.nodes.iter().take(3).map(Server::port).collect::<Vec<_>>();
    for version in VERSIONS {
        for node in cluster.nodes.iter().take(3) {
            redis::cmd("FLUSHALL").exec(&mut node.client()).unwrap();
        }
        let app = App::start();
        let setup = Setup::new(ports[0], &app).version(version);
        let envoy = setup.tweak(boot(&patient("proxied"), Hop::Inbound, &ports, app.port(), &[])).start();
        wait_until("Envoy knows the slots", || quota(&envoy.client_from("127.0.0.9").get("/")).is_some());
        check_limit(&envoy);
        let owner = &cluster.nodes[cluster.owner(&key("127.0.0.1"))];
        assert!(left(owner, "127.0.0.1").is_some(), "{version}");
        envoy.finish();
    }
}

#[test]
fn a_sidecar_behind_a_gateway_counts_each_client_by_the_address_that_the_gateway_saw() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let manifests = patient("mesh");
    let sidecar = start(&manifests, Hop::Inbound, &redis, app.port(), NEWEST);
    let gateway = start_bare(&manifests, Hop::Gateway(0), &redis, sidecar.ingress().port());
    for client in ["127.0.0.2", "127.0.0.3"] {
        assert_eq!(quota(&gateway.client_from(client).get("/")), Some((10, 9)), "{client}");
    }
    // What a client outside writes into the header stands left of what the gateway adds.
    for forged in ["6.6.6.6", "6.6.6.6, 7.7.7.7", "no address"] {
        let request = Request::get("/").with("x-forwarded-for", forged);
        assert_eq!(gateway.client_from("127.0.0.2").exchange(&request).status(), 200);
    }
    assert_eq!((left(&redis, "127.0.0.2"), left(&redis, "127.0.0.3")), (Some(6), Some(9)));
    assert_eq!(keys(&redis), ["127.0.0.2", "127.0.0.3"].map(key));
    // A caller inside the mesh, which needs no gateway, is believed: the page says what to do about it.
    let request = Request::get("/").with("x-forwarded-for", "6.6.6.6");
    assert_eq!(sidecar.client_from("127.0.0.4").exchange(&request).status(), 200);
    assert_eq!((left(&redis, "6.6.6.6"), left(&redis, "127.0.0.4")), (Some(9), None));
    gateway.finish();
    sidecar.finish();
}

#[test]
fn with_a_trusted_proxy_before_the_gateway_the_client_is_one_hop_further_left() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let mut manifests = patient("mesh");
    of_kind_mut(&mut manifests, "WasmPlugin")["spec"]["pluginConfig"]["client_ip"]["trusted_hops"] = json!(2);
    let sidecar = start(&manifests, Hop::Inbound, &redis, app.port(), NEWEST);
    let gateway = start_bare(&manifests, Hop::Gateway(1), &redis, sidecar.ingress().port());
    // As the proxy before the gateway sends it: what the client wrote, and the client.
    let request = Request::get("/").with("x-forwarded-for", "6.6.6.6, 192.0.2.7");
    assert_eq!(quota(&gateway.client_from("127.0.0.2").exchange(&request)), Some((10, 9)));
    // The gateway's own filter agrees, and needs no settings for it.
    let own = start(&patient("gateway"), Hop::Gateway(1), &redis, app.port(), NEWEST);
    assert_eq!(quota(&own.client_from("127.0.0.2").exchange(&request)), Some((10, 8)));
    assert_eq!(keys(&redis), [key("192.0.2.7")]);
    own.finish();
    gateway.finish();
    sidecar.finish();
}

#[test]
fn a_call_is_charged_once_and_not_at_the_gateway_and_the_sidecars_of_both_ends() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let manifests = patient("mesh");
    let service = start(&manifests, Hop::Inbound, &redis, app.port(), NEWEST);
    let caller = start_bare(&manifests, Hop::Outbound, &redis, service.ingress().port());
    let gateway = start_bare(&manifests, Hop::Gateway(0), &redis, caller.ingress().port());
    for left in (7..10).rev() {
        assert_eq!(quota(&gateway.client_from("127.0.0.2").get("/")), Some((10, left)));
    }
    assert_eq!(left(&redis, "127.0.0.2"), Some(7));
    service.expect_counts(&[("per-ip allow", 3), ("calls ok", 3), ("calls noscript", 1)]);
    for envoy in [gateway, caller] {
        assert!(envoy.statistics("wasmcustom.").is_empty(), "there is no filter");
        envoy.finish();
    }
    service.finish();
    // Without the mode, both sidecars charge.
    let mut manifests = patient("mesh");
    of_kind_mut(&mut manifests, "WasmPlugin")["spec"].as_object_mut().unwrap().remove("match");
    let service = start(&manifests, Hop::Inbound, &redis, app.port(), NEWEST);
    let caller = start(&manifests, Hop::Outbound, &redis, service.ingress().port(), NEWEST);
    assert_eq!(caller.client_from("127.0.0.5").get("/").status(), 200);
    // The caller's sidecar sees the caller, and the service's sees the other sidecar.
    assert_eq!((left(&redis, "127.0.0.5"), left(&redis, "127.0.0.1")), (Some(9), Some(9)));
    for envoy in [caller, service] {
        envoy.wait_for_count("per-ip allow", |times| times == 1);
        envoy.finish();
    }
}

#[test]
fn a_quota_at_the_gateway_is_charged_once_however_many_sidecars_follow() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let manifests = patient("gateway");
    let service = start_bare(&manifests, Hop::Inbound, &redis, app.port());
    let caller = start_bare(&manifests, Hop::Outbound, &redis, service.ingress().port());
    let gateway = start(&manifests, Hop::Gateway(0), &redis, caller.ingress().port(), NEWEST);
    for left in (0..10).rev() {
        assert_eq!(quota(&gateway.client_from("127.0.0.2").get("/")), Some((10, left)));
    }
    assert_eq!(gateway.client_from("127.0.0.2").get("/").status(), 429);
    assert_eq!(app.count(), 10);
    for envoy in [gateway, caller, service] {
        envoy.finish();
    }
}

/// The names of labels in the page's setting.
fn stat_tags() -> Vec<Vec<String>> {
    let names = |value: &Value| {
        value["extraStatTags"]
            .as_array()
            .map(|tags| tags.iter().map(|tag| tag.as_str().unwrap().to_owned()).collect::<Vec<_>>())
    };
    let mut found = Vec::new();
    for snippet in snippets() {
        found.extend(names(&snippet["meshConfig"]["defaultConfig"]));
        let annotations = &snippet["metadata"]["annotations"]["proxy.istio.io/config"];
        found.extend(annotations.as_str().and_then(|text| names(&serde_yaml_ng::from_str(text).unwrap())));
    }
    found
}

#[test]
fn the_settings_of_the_page_make_labels_of_the_names_of_metrics() {
    let tags = stat_tags();
    assert!(tags.len() == 2 && tags[0] == tags[1], "{tags:?}");
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let setup = Setup::new(redis.port(), &app);
    let envoy = setup.tweak(boot(&patient("namespace"), Hop::Inbound, &[redis.port()], app.port(), &tags[0])).start();
    check_limit(&envoy);
    for expected in [
        r#"meshquota_decisions_total{rule="per-ip",outcome="allow"} 10"#,
        r#"meshquota_decisions_total{rule="per-ip",outcome="deny"} 1"#,
        r#"meshquota_redis_calls_total{result="ok"} 11"#,
        r#"meshquota_redis_errors_total{kind="readonly"} 0"#,
    ] {
        wait_until(expected, || envoy.admin("/stats/prometheus").lines().any(|line| line == expected));
    }
    envoy.finish();
}

#[test]
fn a_filter_whose_tunnel_is_not_there_lets_requests_go_on_without_a_quota() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let mut manifests = rendered("waypoint");
    let patches = of_kind_mut(&mut manifests, "EnvoyFilter")["spec"]["configPatches"].as_array_mut().unwrap();
    patches.retain(|patch| patch["patch"]["value"]["name"] != "meshquota_tunnel");
    for version in VERSIONS {
        let setup = Setup::new(redis.port(), &app).version(version).unconnected();
        let envoy = setup.tweak(boot(&manifests, Hop::Waypoint, &[redis.port()], app.port(), &[])).start();
        for _ in 0..20 {
            let response = envoy.get("/");
            assert_eq!((response.status(), quota(&response)), (200, None), "{version}");
        }
        envoy.wait_for_count("per-ip fail_allow", |times| times == 20);
        assert_eq!(envoy.gauge("connected"), 0);
        envoy.finish();
    }
}

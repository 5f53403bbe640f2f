//! The tables of the page, row by row: what an action of Envoy and a descriptor do, the rule does that stands beside them.

use serde_json::{Value, json};

use crate::example::{With, World, adapt, get, request, send, statuses};
use crate::ratelimit::Service;
use crate::support::envoy::{PATIENT, Setup};
use crate::support::http::Request;
use crate::support::project::read;

/// A row of the page's table of actions: what Envoy and the service are told, what the filter is told instead, and requests.
struct Row {
    action: &'static str,
    rate_limits: Value,
    descriptor: Value,
    configuration: Value,
    requests: Vec<Request>,
    passed: &'static [u16],
}

fn rows() -> Vec<Row> {
    let limits = json!([{"capacity": 1, "refill": "1/h"}]);
    let one_an_hour = json!({"unit": "hour", "requests_per_unit": 1});
    let descriptor = |key: &str, value: &str| match value {
        "" => json!({"key": key, "rate_limit": one_an_hour}),
        value => json!({"key": key, "value": value, "rate_limit": one_an_hour}),
    };
    let rule = |rule: Value| {
        let mut rule = rule;
        rule["name"] = json!("row");
        rule["limits"] = limits.clone();
        json!({"rules": [rule]})
    };
    let tenant = |client: u8, tenant: &str| get(client, "/").with("x-tenant", tenant);
    vec![
        Row {
            action: "masked_remote_address",
            rate_limits: json!([{"actions": [{"masked_remote_address": {"v4_prefix_mask_len": 31}}]}]),
            descriptor: descriptor("masked_remote_address", ""),
            configuration: {
                let mut configuration = rule(json!({}));
                configuration["client_ip"] = json!({"ipv4_prefix": 31});
                configuration
            },
            requests: [4, 5, 6].map(|client| get(client, "/")).to_vec(),
            passed: &[200, 429, 200],
        },
        Row {
            action: "remote_address_match",
            rate_limits: json!([{"actions": [{"remote_address_match": {
                "descriptor_value": "lab",
                "address_matcher": {"ranges": [{"address_prefix": "198.51.100.8", "prefix_len": 31}]},
            }}]}]),
            descriptor: descriptor("remote_address_match", "lab"),
            configuration: rule(json!({"match": {"client_ip": ["198.51.100.8/31"]}, "key": []})),
            requests: [8, 9, 10, 10].map(|client| get(client, "/")).to_vec(),
            passed: &[200, 429, 200, 200],
        },
        Row {
            action: "header_value_match",
            rate_limits: json!([{"actions": [
                {"header_value_match": {
                    "descriptor_value": "anonymous",
                    "expect_match": false,
                    "headers": [{"name": "x-tenant", "present_match": true}],
                }},
                {"remote_address": {}},
            ]}]),
            descriptor: json!({"key": "header_match", "value": "anonymous", "descriptors": [descriptor("remote_address", "")]}),
            configuration: rule(json!({"match": {"headers": [{"name": "x-tenant", "present": false}]}})),
            requests: vec![get(1, "/"), get(1, "/"), tenant(1, "a"), get(2, "/")],
            passed: &[200, 429, 200, 200],
        },
        Row {
            action: "query_parameter_value_match",
            rate_limits: json!([{"actions": [{"query_parameter_value_match": {
                "descriptor_value": "preview",
                "query_parameters": [{"name": "mode", "string_match": {"exact": "preview"}}],
            }}]}]),
            descriptor: descriptor("query_match", "preview"),
            // A route of Envoy's that matches the parameter stands in for the condition; `envoy` adds it to both.
            configuration: rule(json!({"match": {"route": "preview"}, "key": []})),
            requests: ["/?mode=preview", "/?a=b&mode=preview", "/?mode=live", "/"].map(|path| get(1, path)).to_vec(),
            passed: &[200, 429, 200, 200],
        },
        Row {
            action: "metadata",
            rate_limits: json!([{"actions": [{"metadata": {
                "descriptor_key": "tenant",
                "source": "DYNAMIC",
                "metadata_key": {"key": "com.example", "path": [{"key": "tenant"}]},
            }}]}]),
            descriptor: descriptor("tenant", ""),
            configuration: rule(
                json!({"key": [{"property": ["metadata", "filter_metadata", "com.example", "tenant"]}]}),
            ),
            requests: vec![tenant(1, "a"), tenant(2, "a"), tenant(2, "b"), get(3, "/"), get(3, "/")],
            passed: &[200, 429, 200, 200, 200],
        },
        Row {
            action: "generic_key",
            rate_limits: json!([{"actions": [
                {"generic_key": {"descriptor_key": "site", "descriptor_value": "shop"}},
                {"request_headers": {"header_name": "x-tenant", "descriptor_key": "tenant"}},
                {"request_headers": {"header_name": ":method", "descriptor_key": "method"}},
            ]}]),
            descriptor: json!({"key": "site", "value": "shop", "descriptors": [
                {"key": "tenant", "descriptors": [descriptor("method", "")]},
            ]}),
            configuration: rule(json!({"key": [{"header": "x-tenant"}, "method"]})),
            requests: vec![
                tenant(1, "a"),
                tenant(2, "a"),
                request("PUT", 2, "/").with("x-tenant", "a"),
                get(3, "/"),
                get(3, "/"),
            ],
            passed: &[200, 429, 200, 200, 200],
        },
    ]
}

#[test]
fn each_action_has_a_rule_that_decides_alike() {
    let page = read("docs/migrate-from-ratelimit.md");
    for Row { action, rate_limits, descriptor, configuration, requests, passed } in rows() {
        assert!(page.contains(&format!("\n| `{action}`")), "the page has no row for {action}");
        let world = World::start();
        let service = Service::start(&json!({"domain": "shop", "descriptors": [descriptor]}));
        for with in [With::Service, With::Meshquota] {
            let mut configuration = configuration.clone();
            configuration["redis"] = json!({"timeout": PATIENT});
            let (port, app, rate_limits) = (service.port(), world.app.port(), rate_limits.clone());
            let setup = Setup::new(world.redis.port(), &world.app).configuration(configuration);
            let setup = setup.tweak(move |document| {
                adapt(document, with, port, app);
                let manager = document.manager("ingress");
                let host = &mut manager["route_config"]["virtual_hosts"][0];
                host["rate_limits"] = rate_limits;
                let routed = |name: &str, conditions: Value| {
                    json!({"name": name, "match": {"prefix": "/", "query_parameters": conditions}, "route": {"cluster": "app"}})
                };
                let preview = json!([{"name": "mode", "string_match": {"exact": "preview"}}]);
                host["routes"] = json!([routed("preview", preview), routed("all", json!([]))]);
                let tenant = json!({"metadata_namespace": "com.example", "key": "tenant"});
                let to_metadata = json!({
                    "name": "to_metadata",
                    "typed_config": {
                        "@type": "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config",
                        "request_rules": [{"header": "x-tenant", "on_header_present": tenant}],
                    },
                });
                manager["http_filters"].as_array_mut().unwrap().insert(0, to_metadata);
            });
            let envoy = if with == With::Service { setup.unconnected().start() } else { setup.start() };
            assert_eq!(statuses(&send(&envoy, &requests)), passed, "{action}");
            envoy.finish();
        }
    }
}

#[test]
fn envoy_ignores_hits_in_the_rate_limits_of_a_route_as_the_page_says() {
    let world = World::start();
    let (service, app) = (world.service.port(), world.app.port());
    let setup = Setup::new(world.redis.port(), &world.app).unconnected().tweak(move |document| {
        adapt(document, With::Service, service, app);
        let routes = &mut document.manager("ingress")["route_config"]["virtual_hosts"][0]["routes"];
        let export = routes.as_array_mut().unwrap().iter_mut().find(|route| route["name"] == "export").unwrap();
        let limits = export["typed_per_filter_config"].take()["envoy.filters.http.ratelimit"]["rate_limits"].take();
        assert!(limits.to_string().contains("hits_addend"));
        export.as_object_mut().unwrap().remove("typed_per_filter_config");
        export["route"]["rate_limits"] = limits;
    });
    let envoy = setup.start();
    // Ten hits a day: two exports of five. Each counts one.
    let exports = (1..5).map(|client| get(client, "/export")).collect::<Vec<_>>();
    assert_eq!(statuses(&send(&envoy, &exports)), [200, 200, 200, 200]);
    envoy.finish();
}

//! The command line `meshquota`: what it finds in files, and what it does to real servers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod support;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::{Arc, Barrier, Mutex};

use meshquota::config::schema::json_schema;
use serde_json::{Value, json};
use support::app::App;
use support::cluster::Cluster;
use support::envoy::Setup;
use support::http::{self, Unsaid};
use support::listener::Listener;
use support::program::{file, path, program, run, run_with};
use support::project::{project, read};
use support::server::{Kind, Server, free_port, wait_until};

const RULES: &str = r#"{
    "rules": [
        {"name": "per-ip", "limits": [{"capacity": 3, "refill": "1/hour"}, {"capacity": 5, "refill": "1/day"}],
         "overrides": [{"cidrs": ["10.0.0.0/8"], "unlimited": true}]},
        {"name": "per-key", "key": [{"header": "x-api-key"}, "method"], "limits": [{"capacity": 2, "refill": "1/hour"}]},
        {"name": "login", "match": {"path": "/login"}, "cost": 2, "shadow": true, "limits": [{"capacity": 4, "refill": "4/min"}]}
    ]}"#;

/// The first key of an address.
const KEY: &str = "quota:{per-ip:192.0.2.1}:0";

fn rules() -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(RULES.as_bytes()).unwrap();
    file
}

#[test]
fn every_shipped_configuration_is_fine() {
    for folder in ["envoy", "envoy/recipes"] {
        for entry in std::fs::read_dir(project().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if path.is_file() && name != "meshquota.schema.json" {
                let said = run(&["check", path.to_str().unwrap()]);
                assert_eq!((said.code, said.out.contains(": fine, ")), (0, true), "{}{}", said.out, said.err);
            }
        }
    }
}

#[test]
fn every_fault_is_told_at_its_place_and_the_answer_is_no() {
    let faulty = r#"{"rules": [{"name": "a", "limit": []}]}"#;
    let said = run_with(&["check", "-"], &[], faulty);
    assert_eq!(said.code, 1);
    assert_eq!(
        said.out,
        "-: rules[0]: unknown field \"limit\", did you mean \"limits\"?\n\
         -: rules[0].limits: missing, expected a list of limits\n"
    );
    let said = run_with(&["check", "-", "--json"], &[], faulty);
    assert_eq!(said.code, 1);
    let faults = &said.json()["configurations"][0]["faults"];
    assert_eq!(faults[0], json!({"path": "rules[0]", "what": "unknown field \"limit\", did you mean \"limits\"?"}));
    assert_eq!(faults.as_array().unwrap().len(), 2);
}

#[test]
fn a_warning_is_told_and_the_answer_is_yes() {
    let twice = r#"{"rules": [{"name": "a", "limits": [{"refill": "1/s"}, {"capacity": 100, "refill": "100/s"}]}]}"#;
    let said = run_with(&["check", "-"], &[], twice);
    assert_eq!((said.code, said.out.contains("-: warning: rules[0]")), (0, true), "{}", said.out);
}

#[test]
fn a_configuration_is_found_where_it_comes() {
    let plugin = "apiVersion: extensions.istio.io/v1alpha1\nkind: WasmPlugin\nmetadata: {name: quota}\nspec:\n  pluginConfig:\n    \
                  rules: [{name: a, limits: [{refill: 1/s}]}]\n";
    let policy = "kind: EnvoyExtensionPolicy\nspec:\n  wasm:\n  - name: meshquota\n    rootID: meshquota\n    code: {type: Image}\n    \
                  config: {rules: [{name: a, limits: [{refill: 1/s}]}]}\n";
    let as_json = serde_json::to_string(&serde_yaml_ng::from_str::<Value>(plugin).unwrap()).unwrap();
    let bare = "rules:\n- name: a\n  limits: [{refill: 1/s}]\n";
    let struct_of = read("envoy/envoy.yaml").replace("google.protobuf.StringValue", "google.protobuf.Struct");
    let cases = [
        (plugin, "-, document 1, WasmPlugin quota: spec.pluginConfig: fine, 1 rule\n", 0),
        (&as_json, "-, document 1, WasmPlugin quota: spec.pluginConfig: fine, 1 rule\n", 0),
        (policy, "-, document 1: config of meshquota: fine, 1 rule\n", 0),
        (bare, "-: fine, 1 rule\n", 0),
        (
            "kind: WasmPlugin\nspec: {url: x}\n",
            "-, document 1, WasmPlugin without a name: spec.pluginConfig: no configuration;",
            1,
        ),
        (&struct_of, "-, document 1: configuration of meshquota: the configuration is binary, not JSON:", 1),
    ];
    for (input, expected, code) in cases {
        let said = run_with(&["check", "-"], &[], input);
        assert_eq!((said.code, said.out.starts_with(expected)), (code, true), "{}{}", said.out, said.err);
    }
    let several = format!("{plugin}---\nkind: Service\n---\n{policy}");
    let said = run_with(&["check", "-"], &[], &several);
    assert_eq!(said.out.lines().count(), 2, "{}", said.out);
    // The same twice would be no question.
    let said = run_with(&["explain", "-"], &[], several.replacen("1/s", "2/s", 1));
    let places = "\n  1: -, document 1, WasmPlugin quota: spec.pluginConfig\n  2: -, document 3: config of meshquota\n";
    assert_eq!(
        (said.code, said.err),
        (2, format!("meshquota: -: it has 2 configurations, and say which by --which:{places}"))
    );
}

#[test]
fn one_of_several_configurations_is_chosen_by_its_number_or_its_place() {
    let plugin = |name: &str, rule: &str| {
        format!(
            "kind: WasmPlugin\nmetadata: {{name: {name}}}\nspec: {{pluginConfig: {{rules: [{{name: {rule}, limits: [{{refill: 1/s}}]}}]}}}}\n---\n"
        )
    };
    let both = [plugin("gateway", "a"), plugin("sidecar", "b"), plugin("sidecars", "c")].concat();
    let explained = |input: &str, which: &[&str]| run_with(&[&["explain", "-"], which].concat(), &[], input);
    for (which, rule) in [("1", "a"), ("2", "b"), ("3", "c"), ("gateway", "a"), ("sidecars", "c"), ("document 2", "b")]
    {
        let said = explained(&both, &["--which", which]);
        assert_eq!(
            (said.code, said.out.starts_with(&format!("{rule}: takes 1 token"))),
            (0, true),
            "{which}: {}",
            said.err
        );
    }
    for (which, expected) in
        [("4", "none of them is \"4\":"), ("sidecar", "2 of them are \"sidecar\":"), ("", "3 of them are")]
    {
        let said = explained(&both, &["--which", which]);
        assert_eq!(
            (said.code, said.err.contains(&format!("it has 3 configurations, and {expected}"))),
            (2, true),
            "{}",
            said.err
        );
        assert_eq!(said.err.lines().count(), 4);
    }
    // The same one in several listeners is one.
    assert_eq!(explained(&plugin("gateway", "a").repeat(2), &[]).code, 0);
    assert_eq!(explained(&plugin("gateway", "a"), &["--which", "2"]).code, 2);
}

#[test]
fn what_cannot_be_read_is_no_answer() {
    let cases: [(&[&str], &str, &str); 5] = [
        (&["check", "no-such-file"], "", "meshquota: no-such-file: No such file"),
        (&["check", "-"], "kind: Service\n", "meshquota: -: no configuration in it"),
        (&["check", "-"], "a: [\n", "meshquota: -: "),
        (&["explain", "-"], "rules: []\n", "meshquota: -: rules: "),
        (&["explain", "-", "--header", "x"], "", "error: invalid value 'x' for '--header"),
    ];
    for (arguments, input, expected) in cases {
        let said = run_with(arguments, &[], input);
        assert_eq!((said.code, said.err.starts_with(expected), said.out.as_str()), (2, true, ""), "{}", said.err);
    }
}

#[test]
fn a_request_is_explained_rule_by_rule() {
    let file = rules();
    let file = file.path().to_str().unwrap();
    let said =
        run(&["explain", file, "--client-ip", "192.0.2.1", "--path", "//login?x=1", "--header", "X-Api-Key: secret"]);
    assert_eq!(
        said.out,
        "per-ip: takes 1 token\n  \
           from quota:{per-ip:192.0.2.1}:0: 3 tokens at most, 1 more every 1h\n  \
           from quota:{per-ip:192.0.2.1}:1: 5 tokens at most, 1 more every 1day\n\
         per-key: takes 1 token\n  \
           from quota:{per-key:#2bb80d537b1da3e38bd30361aa855686|GET}:0: 2 tokens at most, 1 more every 1h\n\
         login: takes 2 tokens, and only watches\n  \
           from quota:{login:192.0.2.1}:0: 4 tokens at most, 1 more every 15s\n"
    );
    let said = run(&["explain", file, "--client-ip", "10.1.2.3", "--json"]);
    let rules = said.json()["rules"].clone();
    assert_eq!(said.code, 1, "no rule counts it");
    assert_eq!(rules[0], json!({"rule": "per-ip", "applies": false}), "unlimited");
    assert_eq!(rules[1], json!({"rule": "per-key", "applies": false, "skipped": true}));
    assert_eq!(rules[2], json!({"rule": "login", "applies": false}));
}

#[test]
fn the_schema_is_that_of_the_code() {
    assert_eq!(run(&["schema"]).json(), json_schema());
}

/// How many tokens the first bucket of the caller holds, and whether it is there.
fn left(connection: &mut redis::Connection) -> Option<u64> {
    redis::cmd("HGET").arg(KEY).arg("tokens").query(connection).unwrap()
}

#[test]
fn a_caller_is_looked_at_without_a_trace_and_reset_alone() {
    let file = rules();
    let file = file.path().to_str().unwrap();
    for kind in Kind::ALL {
        let server = Server::start(kind, &[]);
        let (url, mut connection) = (format!("redis://127.0.0.1:{}", server.port()), server.client());
        let inspect = |more: &[&str]| run(&[&["inspect", "--redis", &url, file, "per-ip", "192.0.2.1"], more].concat());
        // Nobody has asked: full, and nothing is written.
        let said = inspect(&[]);
        assert_eq!(said.code, 0, "{}", said.err);
        assert!(said.out.starts_with(&format!("{KEY}: 3 of 3 left; the next request now, full now")), "{}", said.out);
        assert_eq!(redis::cmd("DBSIZE").query::<u64>(&mut connection).unwrap(), 0);
        // All taken but half a token.
        let (seconds, _): (u64, u64) = redis::cmd("TIME").query(&mut connection).unwrap();
        for (key, tokens) in [(KEY, "0.5"), ("quota:{per-ip:192.0.2.1}:1", "2"), ("quota:{per-ip:192.0.2.2}:0", "0")] {
            redis::cmd("HSET")
                .arg(key)
                .arg(&["tokens", tokens, "ts", &(seconds * 1000).to_string()])
                .exec(&mut connection)
                .unwrap();
        }
        let said = inspect(&["--json"]);
        let buckets = &said.json()["buckets"];
        assert_eq!((said.code, &buckets[0]["left"], &buckets[1]["left"]), (1, &json!(0), &json!(2)), "{buckets}");
        let next_ms = buckets[0]["next_ms"].as_u64().unwrap();
        assert!((1_700_000..=1_800_000).contains(&next_ms), "half an hour: {next_ms}");
        assert_eq!(redis::cmd("HGET").arg(KEY).arg("tokens").query::<String>(&mut connection).unwrap(), "0.5");
        // His buckets are removed, and nobody else's.
        let reset = || run(&["reset", "--redis", &url, file, "per-ip", "192.0.2.1"]);
        let said = reset();
        assert_eq!((said.code, said.out.matches(": removed").count()), (0, 2), "{}{}", said.out, said.err);
        assert_eq!(
            redis::cmd("KEYS").arg("*").query::<Vec<String>>(&mut connection).unwrap(),
            ["quota:{per-ip:192.0.2.2}:0"]
        );
        assert_eq!(left(&mut connection), None);
        assert_eq!(reset().code, 1, "there is nothing any more");
    }
}

/// Rules whose limits depend on where a request comes from, and keys of two limits under each.
const BY_NETWORK: &str = r#"{"client_ip": {"ipv4_prefix": 24}, "rules": [
    {"name": "ip", "limits": [{"capacity": 5, "refill": "1/h"}],
     "overrides": [{"cidrs": ["10.0.0.0/8", "2001:db8::/32", "192.0.2.128/25"], "limits": [{"capacity": 50, "refill": "1/h"}, {"capacity": 99, "refill": "1/h"}]}]},
    {"name": "key", "key": [{"header": "x-k"}, "client_ip"], "limits": [{"capacity": 5, "refill": "1/h"}]},
    {"name": "tenant", "key": [{"header": "x-k"}], "limits": [{"capacity": 5, "refill": "1/h"}],
     "overrides": [{"cidrs": ["10.0.0.0/8"], "limits": [{"capacity": 50, "refill": "1/h"}, {"capacity": 99, "refill": "1/h"}]}]},
    {"name": "none", "key": [{"header": "x-k"}], "if_missing": "share", "limits": [{"capacity": 7, "refill": "1/h"}]},
    {"name": "wide", "namespace": "tenant", "key": [{"header": "x-k"}], "limits": [{"refill": "1/h"}, {"refill": "1/h"}, {"refill": "1/h"}]}
]}"#;

#[test]
fn limits_of_a_network_are_found_for_whoever_is_in_it_however_he_is_named() {
    let rules = file(BY_NETWORK);
    let server = Server::start(Kind::Redis, &[]);
    let url = format!("redis://127.0.0.1:{}", server.port());
    let inspect = |caller: &[&str]| run(&[&["inspect", "--redis", &url, path(&rules)], caller].concat());
    let limited: [&[&str]; 11] = [
        &["ip", "10.1.1.1"],
        &["ip", "10.1.1.1:99"],
        &["ip", "::ffff:10.1.1.1"],
        &["ip", "10.1.1.0/24"],
        &["ip", "2001:db8:1:2::3"],
        &["ip", "2001:db8:1:2::/64"],
        &["ip", "--key", "quota:{ip:10.1.1.0/24}:0"],
        &["ip", "--key", "quota:{ip:2001:db8:1:2::/64}:1"],
        // The network of this caller has both limits, by the address.
        &["ip", "192.0.2.200"],
        &["ip", "192.0.2.0/24", "--client-ip", "192.0.2.128"],
        &["tenant", "a", "--client-ip", "10.1.1.1"],
    ];
    for caller in limited {
        let said = inspect(caller);
        let capacities =
            said.out.lines().filter(|line| line.contains(" 50 of 50 left") || line.contains(" 99 of 99 left"));
        assert_eq!((said.code, capacities.count()), (0, 2), "{caller:?}: {}{}", said.out, said.err);
    }
    for caller in [
        &["ip", "192.0.2.1"][..],
        &["ip", "192.0.2.0/24", "--client-ip", "192.0.2.1:7"],
        &["tenant", "a", "--client-ip", "192.0.2.1"],
    ] {
        assert!(inspect(caller).out.contains(" 5 of 5 left"), "{caller:?}");
    }
    let digest = run(&["explain", path(&rules), "--header", "x-k: a", "--client-ip", "192.0.2.1"]).out;
    let key = digest
        .lines()
        .find_map(|line| line.trim().strip_prefix("from ")?.split(": ").next().filter(|key| key.contains("{key:")))
        .unwrap();
    assert_eq!(inspect(&["key", "--key", key]).out, inspect(&["key", "a", "192.0.2.1"]).out);
    // Those who have no key share a bucket, which no value names.
    assert!(inspect(&["none", "--key", "quota:{none:}:0"]).out.starts_with("quota:{none:}:0: 7 of 7 left"));
    let refused: [(&[&str], &str); 7] = [
        (&["ip", "192.0.2.0/24"], "which limits ip has for this caller depends on its address: say it by --client-ip"),
        (&["tenant", "a"], "which limits tenant has for this caller depends on its address: say it by --client-ip"),
        (&["ip", "10.1.0.0/16"], "10.1.0.0/16 is not one caller of ip, and 10.1.0.0/24 is"),
        (&["ip", "10.1.1.1", "--client-ip", "10.1.2.1"], "--client-ip 10.1.2.1: the caller is 10.1.1.0/24"),
        (
            &["ip", "--key", "quota:{tenant:#1}:0"],
            "--key quota:{tenant:#1}:0: no key of ip; expected quota:{ip:IDENTITY}:0",
        ),
        (
            &["ip", "--key", "quota:{ip:10.1.1.1}:x"],
            "--key quota:{ip:10.1.1.1}:x: no key of ip; expected quota:{ip:IDENTITY}:0",
        ),
        (&["ip", "10.1.1.1/"], "the key of ip is one value: expected ADDRESS"),
    ];
    for (caller, expected) in refused {
        let said = inspect(caller);
        assert_eq!((said.code, said.err), (2, format!("meshquota: {expected}\n")), "{caller:?}: {}", said.out);
    }
    for arguments in [
        &["explain", path(&rules), "--client-ip", "junk"][..],
        &["inspect", "--redis", &url, path(&rules), "tenant", "a", "--client-ip", "junk"],
    ] {
        let said = run(arguments);
        assert_eq!(
            (said.code, said.err.contains("--client-ip <ADDRESS>': expected an IP address")),
            (2, true),
            "{}",
            said.err
        );
    }
}

#[test]
fn all_buckets_of_a_caller_are_reset_by_whichever_limits_he_was_charged() {
    let rules = file(BY_NETWORK);
    for kind in Kind::ALL {
        let server = Server::start(kind, &[]);
        let (url, mut connection) = (format!("redis://127.0.0.1:{}", server.port()), server.client());
        let identity = "#ca978112ca1bbdcafac231b39a23dc4d";
        let keys = (0..4).map(|limit| format!("quota:{{tenant:{identity}}}:{limit}")).collect::<Vec<_>>();
        for key in keys.iter().chain([&format!("quota:{{key:{identity}|10.1.1.0/24}}:0")]) {
            redis::cmd("HSET").arg(key).arg(&["tokens", "0", "ts", "1"]).exec(&mut connection).unwrap();
        }
        let said = run(&["reset", "--redis", &url, path(&rules), "tenant", "a", "--json"]);
        // The fourth is of no rule.
        assert_eq!((said.code, said.json()["removed"].clone()), (0, json!(keys[..3])), "{}", said.err);
        assert_eq!(redis::cmd("DBSIZE").query::<u64>(&mut connection).unwrap(), 2);
    }
}

#[test]
fn whoever_is_named_wrongly_is_told_what_is_expected() {
    let file = rules();
    let file = file.path().to_str().unwrap();
    let of = |caller: &[&str]| run(&[&["inspect", "--redis", "redis://127.0.0.1:1", file], caller].concat());
    let said = of(&["per-ip"]);
    assert_eq!((said.code, said.err.as_str()), (2, "meshquota: the key of per-ip is one value: expected ADDRESS\n"));
    let said = of(&["per-key", "secret"]);
    assert!(said.err.contains("expected HEADER(x-api-key) METHOD"), "{}", said.err);
    let said = of(&["per-op", "x"]);
    assert_eq!(said.err, "meshquota: no rule is called per-op; there are: per-ip, per-key, login\n");
    let said = of(&["per-ip", "10.1.2.3"]);
    assert_eq!((said.code, said.out.contains("unlimited")), (0, true));
    assert_eq!(of(&["per-ip", "192.0.2.1"]).code, 2, "no server is there");
}

#[test]
fn a_password_comes_from_a_file_or_the_environment_and_is_never_told() {
    let rules = rules();
    let file = rules.path().to_str().unwrap();
    let server = Server::start(Kind::Redis, &["--requirepass", "s3cret"]);
    let url = format!("redis://127.0.0.1:{}", server.port());
    let mut password = tempfile::NamedTempFile::new().unwrap();
    password.write_all(b"s3cret\n").unwrap();
    let caller = ["inspect", "--redis", &url, file, "per-ip", "192.0.2.1"];
    let said = run_with(&caller, &[("MESHQUOTA_REDIS_PASSWORD", "s3cret")], "");
    assert_eq!((said.code, said.err.as_str()), (0, ""));
    let said = run(&[&caller, ["--password-file", password.path().to_str().unwrap()].as_slice()].concat());
    assert_eq!((said.code, said.err.as_str()), (0, ""));
    let said = run_with(&caller, &[("MESHQUOTA_REDIS_PASSWORD", "wr0ng")], "");
    assert_eq!((said.code, said.err.contains("wr0ng")), (2, false), "{}", said.err);
    let in_url = format!("redis://:s3cret@127.0.0.1:{}", server.port());
    let said = run(&["inspect", "--redis", &in_url, file, "per-ip", "192.0.2.1"]);
    assert_eq!((said.code, said.err.starts_with("meshquota: warning: a password in a URL")), (0, true), "{}", said.err);
    assert!(!said.err.contains("s3cret"));
}

#[test]
fn a_server_is_reached_over_tls_where_its_certificate_is_trusted() {
    let rules = rules();
    let file = rules.path().to_str().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let [certificate, key] =
        ["certificate.pem", "key.pem"].map(|name| folder.path().join(name).to_str().unwrap().to_owned());
    let names =
        ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"];
    let new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", &key];
    let output = Command::new("openssl")
        .args(["req", "-x509", "-days", "2", "-subj", "/CN=localhost", "-out", &certificate])
        .args(names)
        .args(new_key)
        .output()
        .expect("openssl runs");
    assert!(output.status.success(), "openssl: {}", String::from_utf8_lossy(&output.stderr));
    let port = free_port().to_string();
    let files = ["--tls-cert-file", &certificate, "--tls-key-file", &key, "--tls-ca-cert-file", &certificate];
    let _server =
        Server::start(Kind::Redis, &[&["--tls-port", &port, "--tls-auth-clients", "no"], &files[..]].concat());
    let url = format!("rediss://localhost:{port}");
    let caller = [file, "per-ip", "192.0.2.1"];
    let said = run(&[&["inspect", "--redis", &url, "--ca", &certificate], &caller[..]].concat());
    assert_eq!((said.code, said.out.lines().count()), (0, 2), "{}{}", said.out, said.err);
    let said = run(&[&["inspect", "--redis", &url], &caller[..]].concat());
    assert_eq!((said.code, said.out.as_str()), (2, ""), "the system does not know it");
}

#[test]
fn the_node_of_a_cluster_that_has_the_bucket_is_found() {
    let file = rules();
    let file = file.path().to_str().unwrap();
    let cluster = Cluster::start(Kind::Redis, &[]);
    let owner = cluster.owner(KEY);
    redis::cmd("HSET").arg(KEY).arg(&["tokens", "1", "ts", "1"]).exec(&mut cluster.nodes[owner].client()).unwrap();
    let other = cluster.nodes.iter().position(|node| node.port() != cluster.nodes[owner].port()).unwrap();
    let url = format!("redis://127.0.0.1:{}", cluster.nodes[other].port());
    let at = |command| run(&[command, "--cluster", "--redis", &url, file, "per-ip", "192.0.2.1"]);
    let said = at("inspect");
    assert_eq!((said.code, said.out.lines().count()), (0, 2), "{}{}", said.out, said.err);
    let said = at("reset");
    assert_eq!((said.code, said.out.contains(&format!("{KEY}: removed"))), (0, true), "{}{}", said.out, said.err);
}

#[test]
fn a_proxy_is_watched_through_its_admin_interface() {
    let server = Server::start(Kind::Redis, &[]);
    let configuration = json!({"rules": [
        {"name": "per-ip", "limits": [{"capacity": 4, "refill": "1/h"}]},
        {"name": "login", "match": {"path": "/login"}, "shadow": true, "limits": [{"capacity": 1, "refill": "1/h"}]},
    ]});
    let app = App::start();
    // The admin interface of the tests has no port, so a listener leads to it.
    let envoys = [0, 1].map(|_| {
        let setup = Setup::new(server.port(), &app).configuration(configuration.clone());
        let setup = setup.tweak(|document| {
            let manager = document.manager("metrics");
            manager["route_config"]["virtual_hosts"][0]["routes"][0]["match"] = json!({"path": "/stats"});
        });
        setup.start()
    });
    for envoy in &envoys {
        for path in ["/", "/login", "/login"] {
            envoy.get(path);
        }
    }
    let admins = envoys.each_ref().map(|envoy| format!("http://{}/", envoy.listener("metrics")));
    let arguments = ["watch", "--admin", &admins[0], "--admin", &admins[1], "--interval", "20ms", "--count"];
    // Each worker hands its counts over from a tick.
    wait_until("both proxies have told all", || {
        let said = run(&[&arguments[..], &["1", "--json"]].concat());
        said.json()["decisions"]["per-ip"]["allow"]["total"] == 4
    });
    let said = run(&[&arguments[..], &["2", "--json"]].concat());
    assert_eq!((said.code, said.err.as_str()), (0, ""));
    let looks = said.out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).collect::<Vec<_>>();
    let [first, second] = &looks[..] else { panic!("{looks:?}") };
    let decisions = &second["decisions"];
    assert_eq!((&first["seconds"], &first["proxies"], &second["proxies"]), (&Value::Null, &json!(2), &json!(2)));
    assert_eq!(first["decisions"]["per-ip"]["deny"], json!({"total": 2, "per_second": null}));
    assert_eq!(decisions["per-ip"]["deny"], json!({"total": 2, "per_second": 0.0}));
    // What is known to be denied by one rule is not asked of another.
    assert!(decisions["login"]["shadow_deny"]["total"].as_u64() > Some(1), "{second}");
    assert_eq!((&second["redis"]["breaker_open"], &second["redis"]["given_back"]["total"]), (&json!(0), &json!(0)));
    assert!(second["redis"]["redis_calls"]["ok"]["total"].as_u64() > Some(6), "{second}");
    assert!(second["redis"]["connected"].as_u64() > Some(1), "{second}");
    let said = run(&[&arguments[..], &["1"]].concat());
    for part in ["meshquota: 2 proxies, since the start, no rates yet\n", "allow/s", "shadow_deny/s", "breaker: closed"]
    {
        assert!(said.out.contains(part), "{part}: {}", said.out);
    }
    assert!(!said.out.contains('\u{1b}'));
    // One that never was there hides nobody.
    let nobody = format!("http://127.0.0.1:{}", free_port());
    let said = run(&["watch", "--count", "1", "--admin", &nobody, "--admin", &admins[0]]);
    assert_eq!((said.code, said.err.as_str()), (0, ""));
    let head = format!("meshquota: 1 proxy, since the start, no rates yet\nnot seen: {nobody}: ");
    assert!(said.out.starts_with(&head) && said.out.contains("per-ip "), "{}", said.out);
    // Nor does one that is stopped, and without all of them it goes on until nobody looks any more.
    let mut watching =
        Command::new(program()).args(&arguments[..7]).arg("--json").stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    let mut looks = lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    assert_eq!(looks.next().unwrap()["proxies"], 2);
    for (stopped, envoy) in envoys.into_iter().enumerate() {
        envoy.finish();
        let look = looks.find(|look| look["proxies"] == json!(1 - stopped)).unwrap();
        let failed = look["failed"].as_array().unwrap().iter().map(|failed| &failed["admin"]).collect::<Vec<_>>();
        assert_eq!(failed, admins[..=stopped].iter().collect::<Vec<_>>(), "{look}");
        let rate = &look["decisions"]["per-ip"]["allow"]["per_second"];
        assert_eq!(rate, &if stopped == 0 { json!(0.0) } else { Value::Null }, "{look}");
    }
    drop(looks);
    watching.wait().unwrap();
}

/// An admin interface that gives these answers, one after the other: how much a rule has admitted, or status 503. It answers
/// only when those that share the barrier are being asked as well.
fn admin(answers: [Option<u64>; 3], together: &Arc<Barrier>) -> (String, Listener) {
    let (answers, together) = (Mutex::new(answers.into_iter()), Arc::clone(together));
    let listener = Listener::start(move |mut stream| {
        http::read(&mut BufReader::new(&stream), Unsaid::Request).unwrap();
        together.wait();
        let name = "wasmcustom.meshquota_decisions.rule=.=a;.;outcome=.=allow;.;total";
        let (status, body) = match answers.lock().unwrap().next().flatten() {
            Some(allowed) => ("200 OK", json!({"stats": [{"name": name, "value": allowed}]}).to_string()),
            None => ("503 Service Unavailable", String::new()),
        };
        let head = format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
        stream.write_all((head + &body).as_bytes()).unwrap();
    });
    (format!("http://127.0.0.1:{}", listener.port()), listener)
}

#[test]
fn a_proxy_that_was_away_and_started_anew_is_watched_beside_one_that_was_not() {
    let together = Arc::new(Barrier::new(2));
    let (steady, _steady) = admin([Some(500), Some(500), Some(500)], &together);
    let (anew, _anew) = admin([Some(10), None, Some(3)], &together);
    let said = run(&["watch", "--json", "--interval", "1ms", "--count", "3", "--admin", &steady, "--admin", &anew]);
    assert_eq!((said.code, said.err.as_str()), (0, ""));
    let looks = said.out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).collect::<Vec<_>>();
    let of = |look: &Value| [&look["proxies"], &look["decisions"]["a"]["allow"]["total"]].map(Value::as_u64);
    let seen = looks.iter().map(of).collect::<Vec<_>>();
    assert_eq!(seen, [[Some(2), Some(510)], [Some(1), Some(500)], [Some(2), Some(503)]]);
    assert_eq!(looks[1]["failed"], json!([{"admin": anew, "error": "http status: 503"}]));
    assert_eq!(looks[1]["decisions"]["a"]["allow"]["per_second"], 0.0);
    // Three were admitted since it was started, in the time since it was last seen, which is longer than that of the other.
    let [rate, seconds] = [&looks[2]["decisions"]["a"]["allow"]["per_second"], &looks[2]["seconds"]];
    assert!((rate.as_f64().unwrap() * seconds.as_f64().unwrap() - 3.0).abs() < 0.001, "{}", looks[2]);
}

#[test]
fn what_cannot_be_watched_is_told() {
    let nobody = format!("http://127.0.0.1:{}", free_port());
    let server = Server::start(Kind::Redis, &[]);
    let no_proxy = format!("http://127.0.0.1:{}", server.port());
    let said = run(&["watch", "--count", "1", "--admin", &nobody, "--admin", &no_proxy]);
    assert_eq!((said.code, said.out.as_str()), (2, ""));
    let (start, then) = (format!("meshquota: no proxy answers: {nobody}: "), format!("; {no_proxy}: "));
    assert!(said.err.starts_with(&start) && said.err.contains(&then), "{}", said.err);
    // What is gone at the last look is told on the page, and then as the reason.
    let (gone, _gone) = admin([Some(1), None, None], &Arc::new(Barrier::new(1)));
    let said = run(&["watch", "--interval", "1ms", "--count", "2", "--admin", &gone]);
    assert_eq!((said.code, said.err), (2, format!("meshquota: no proxy answers: {gone}: http status: 503\n")));
    let last = format!("\nmeshquota: no proxy answers\nnot seen: {gone}: http status: 503\n\n");
    assert!(said.out.starts_with("meshquota: 1 proxy, ") && said.out.ends_with(&last), "{}", said.out);
    for (option, why) in [("--interval=0s", "expected some time between two looks"), ("--count=0", "0 is not in 1..")] {
        let said = run(&["watch", "--admin", &nobody, option]);
        let told = said.err.starts_with("error: invalid value '0") && said.err.contains(why);
        assert_eq!((said.code, told), (2, true), "{}", said.err);
    }
}

/// The commands, as the program's help lists them.
fn commands() -> Vec<String> {
    let help = run(&["--help"]).out;
    let (_, rest) = help.split_once("Commands:\n").unwrap();
    let lines = rest.lines().take_while(|line| !line.is_empty());
    let names =
        lines.filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).filter(|name| !["", "help"].contains(name));
    names.map(str::to_owned).collect()
}

#[test]
fn a_shell_can_complete_every_command() {
    let commands = commands();
    assert!(commands.contains(&"simulate".to_owned()));
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let said = run(&["completions", shell]);
        assert_eq!(said.code, 0);
        commands.iter().for_each(|command| assert!(said.out.contains(command.as_str()), "{shell}: {command}"));
    }
    let mut script = tempfile::NamedTempFile::new().unwrap();
    script.write_all(run(&["completions", "bash"]).out.as_bytes()).unwrap();
    let ask = r#"source "$1"; COMP_WORDS=(meshquota sim); COMP_CWORD=1; _meshquota meshquota sim meshquota; echo "${COMPREPLY[@]}""#;
    let output = Command::new("bash").args(["-c", ask, "bash"]).arg(script.path()).output().unwrap();
    assert_eq!(
        String::from_utf8(output.stdout).unwrap().trim(),
        "simulate",
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn every_command_has_a_man_page() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man1");
    assert_eq!(run(&["man", pages.to_str().unwrap()]).code, 0);
    for name in commands().iter().map(|command| format!("meshquota-{command}.1")).chain(["meshquota.1".to_owned()]) {
        let page = std::fs::read_to_string(pages.join(&name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(page.contains(".TH ") && page.contains(".SH DESCRIPTION"), "{name}: {page}");
    }
}

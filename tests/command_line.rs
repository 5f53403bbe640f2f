//! The command line `meshquota`: what it finds in files, and what it does to real servers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod support;

use std::io::Write;
use std::process::{Command, Stdio};

use meshquota::config::schema::json_schema;
use serde_json::{Value, json};
use support::cluster::Cluster;
use support::program::program;
use support::project::{project, read};
use support::server::{Kind, Server, free_port};

/// What the program said, on both channels, and its exit code.
struct Said {
    out: String,
    err: String,
    code: i32,
}

impl Said {
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}", self.out))
    }
}

/// Runs the program in the project's folder.
fn run(arguments: &[&str]) -> Said {
    run_with(arguments, &[], "")
}

fn run_with(arguments: &[&str], variables: &[(&str, &str)], input: &str) -> Said {
    let mut child = Command::new(program())
        .args(arguments)
        .envs(variables.iter().copied())
        .current_dir(project())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Said { out: text(output.stdout), err: text(output.stderr), code: output.status.code().unwrap() }
}

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
    let said = run_with(&["explain", "-"], &[], &several);
    assert_eq!((said.code, said.err.as_str()), (2, "meshquota: -: it has 2 configurations; give a file with one\n"));
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

//! Who the client is, and the key of its bucket.

use std::collections::HashMap;
use std::io::{BufReader, Write};
use std::os::unix::net::UnixStream;

use redis::{Commands, Connection};
use serde_json::{Value, json};

use crate::support::app::App;
use crate::support::envoy::{Document, Envoy, PATIENT, Setup};
use crate::support::http::{Client, Request, Unsaid, read};
use crate::support::http2::Http2;
use crate::support::server::{Kind, Server};
use crate::{KEY, quota};

/// A configuration with these settings of `client_ip`.
fn trusting(client_ip: Value) -> Value {
    json!({
        "redis": {"timeout": PATIENT},
        "client_ip": client_ip,
        "rules": [{"name": "per-ip", "limits": [{"capacity": 100, "refill": "1/day"}]}],
    })
}

/// Every key there is.
fn keys(redis: &mut Connection) -> Vec<String> {
    let mut keys: Vec<String> = redis.keys("*").unwrap();
    keys.sort();
    keys
}

#[test]
fn each_client_address_has_a_bucket_of_its_own_whatever_its_port() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app).capacity(3).start();
    for source in ["127.0.0.1", "127.0.0.2", "127.0.0.3"] {
        for left in [Some(2), Some(1), Some(0), None] {
            // A new connection each time, and so a new port.
            let response = envoy.client_from(source).get("/");
            match left {
                Some(left) => assert_eq!(quota(&response), Some((3, left)), "{source}"),
                None => assert_eq!(response.status(), 429, "{source}"),
            }
        }
    }
    assert_eq!(
        keys(&mut redis.client()),
        ["quota:{per-ip:127.0.0.1}:0", "quota:{per-ip:127.0.0.2}:0", "quota:{per-ip:127.0.0.3}:0"]
    );
    envoy.expect_counts(&[("per-ip allow", 9), ("per-ip deny", 3), ("calls ok", 12), ("calls noscript", 1)]);
    envoy.finish();
}

/// One request from a client of that address to a listener on it makes this key.
fn check_address(listen: Value, client: impl FnOnce(&Envoy) -> Client, expected: &str) {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app)
        .capacity(3)
        .tweak(move |document| document.listener("ingress")["address"]["socket_address"] = listen)
        .start();
    assert_eq!(quota(&client(&envoy).get("/")), Some((3, 2)));
    assert_eq!(keys(&mut redis.client()), [expected]);
    envoy.finish();
}

#[test]
fn a_client_of_ipv6_is_its_network() {
    check_address(json!({"address": "::1", "port_value": 0}), Envoy::client, "quota:{per-ip:::/64}:0");
}

#[test]
fn a_client_of_ipv4_on_a_listener_of_ipv6_is_its_ipv4_address() {
    check_address(
        json!({"address": "::", "port_value": 0, "ipv4_compat": true}),
        |envoy| Client::connect(([127, 0, 0, 1], envoy.ingress().port()).into()),
        KEY,
    );
}

#[test]
fn an_ipv6_prefix_of_128_makes_each_address_a_client() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app)
        .configuration(trusting(json!({"ipv6_prefix": 128, "ipv4_prefix": 24, "trusted_hops": 2})))
        .start();
    for forwarded in ["2001:db8::1", "[2001:DB8:0:0::2]:443", "192.0.2.77", "::ffff:192.0.2.78"] {
        envoy.client().exchange(&Request::get("/").with("x-forwarded-for", forwarded));
    }
    assert_eq!(
        keys(&mut redis.client()),
        ["quota:{per-ip:192.0.2.0/24}:0", "quota:{per-ip:2001:db8::1}:0", "quota:{per-ip:2001:db8::2}:0"]
    );
    envoy.finish();
}

/// What was forged on the left.
const FORGED: &str = "6.6.6.6";

/// Lines of x-forwarded-for, and the client that they are taken for.
type Forwarded<'a> = (&'a [&'a [u8]], &'a str);

/// Under these settings, requests from 127.0.0.1 with these headers use these buckets.
fn check_forwarded(client_ip: Value, use_remote_address: bool, cases: &[Forwarded]) {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app)
        .configuration(trusting(client_ip.clone()))
        .tweak(move |document: &mut Document| {
            document.manager("ingress")["use_remote_address"] = json!(use_remote_address);
        })
        .start();
    let mut redis = redis.client();
    for (lines, expected) in cases {
        redis::cmd("FLUSHALL").exec(&mut redis).unwrap();
        let request = lines.iter().fold(Request::get("/"), |request, line| request.with("x-forwarded-for", line));
        let shown = lines.iter().map(|line| line.escape_ascii().to_string()).collect::<Vec<_>>();
        assert_eq!(quota(&envoy.client().exchange(&request)), Some((100, 99)), "{client_ip} {shown:?}");
        assert_eq!(keys(&mut redis), [format!("quota:{{per-ip:{expected}}}:0")], "{client_ip} {shown:?}");
    }
    envoy.finish();
}

#[test]
fn nothing_in_x_forwarded_for_counts_where_envoy_trusts_the_peer_only() {
    check_forwarded(
        json!({}),
        true,
        &[
            (&[], "127.0.0.1"),
            (&[FORGED.as_bytes()], "127.0.0.1"),
            (&[b"6.6.6.6, 198.51.100.7"], "127.0.0.1"),
            (&[FORGED.as_bytes(), b"198.51.100.7"], "127.0.0.1"),
            (&[b"\xff\xfe"], "127.0.0.1"),
            (&[b""], "127.0.0.1"),
        ],
    );
}

#[test]
fn the_right_most_entry_counts_where_envoy_takes_the_word_of_the_hop_before() {
    check_forwarded(
        json!({}),
        false,
        &[
            (&[], "127.0.0.1"),
            (&[b"198.51.100.7"], "198.51.100.7"),
            (&[b"6.6.6.6, 198.51.100.7"], "198.51.100.7"),
            (&[FORGED.as_bytes(), b"198.51.100.7"], "198.51.100.7"),
            (&[b"2001:db8:1:2:3::4"], "2001:db8:1:2::/64"),
        ],
    );
}

#[test]
fn trusted_hops_count_entries_from_the_right_over_all_lines() {
    check_forwarded(
        json!({"trusted_hops": 2}),
        false,
        &[
            (&[], "127.0.0.1"),
            (&[b"198.51.100.7"], "198.51.100.7"), // Too few: what Envoy itself makes of the header.
            (&[b"198.51.100.7, 10.0.0.9"], "198.51.100.7"),
            (&[b"6.6.6.6,198.51.100.7,10.0.0.9"], "198.51.100.7"),
            (&[FORGED.as_bytes(), b"198.51.100.7", b"10.0.0.9"], "198.51.100.7"),
            (&[b"6.6.6.6, 198.51.100.7", b"10.0.0.9"], "198.51.100.7"),
            (&[b"\xff\xfe, junk,, 198.51.100.7, 10.0.0.9"], "198.51.100.7"),
            (&[b"6.6.6.6, [2001:db8:1:2::3]:443, 10.0.0.9"], "2001:db8:1:2::/64"),
            (&[b"6.6.6.6, ::ffff:198.51.100.7, 10.0.0.9"], "198.51.100.7"),
            (&[b"6.6.6.6, junk, 10.0.0.9"], "10.0.0.9"), // No address there: Envoy's word, its right-most entry.
        ],
    );
}

// Envoy appends the peer, or this machine's own address where the peer is on the same machine.
#[test]
fn the_hop_that_envoy_appends_itself_is_counted_too() {
    check_forwarded(
        json!({"trusted_hops": 2}),
        true,
        &[
            (&[], "127.0.0.1"),
            (&[b"198.51.100.7"], "198.51.100.7"),
            (&[b"6.6.6.6, 198.51.100.7"], "198.51.100.7"),
            (&[FORGED.as_bytes(), b"198.51.100.7"], "198.51.100.7"),
            (&[b"6.6.6.6, junk"], "127.0.0.1"),
            (&[b"6.6.6.6, \xfe"], "127.0.0.1"),
        ],
    );
}

#[test]
fn the_right_most_entry_that_is_no_trusted_proxy_is_the_client() {
    check_forwarded(
        json!({"trusted_proxies": ["10.0.0.0/8", "2001:db8:f::/48"]}),
        false,
        &[
            (&[], "127.0.0.1"),
            (&[b"198.51.100.7"], "198.51.100.7"),
            (&[b"6.6.6.6, 198.51.100.7, 10.1.2.3"], "198.51.100.7"),
            (&[FORGED.as_bytes(), b"198.51.100.7", b"2001:db8:f::9, 10.1.2.3"], "198.51.100.7"),
            // None there: Envoy's word, its right-most entry.
            (&[b"10.1.2.3, 10.4.5.6"], "10.4.5.6"),
            (&[b"6.6.6.6, junk, 10.4.5.6"], "10.4.5.6"),
            (&[b"6.6.6.6, \xff, 10.4.5.6"], "10.4.5.6"),
        ],
    );
}

#[test]
fn bytes_that_are_not_utf_8_harm_nobody() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app).configuration(trusting(json!({"trusted_hops": 2}))).start();
    // Envoy appends a hop, so what a client writes is the second from the right.
    let mut client = envoy.client();
    for name in ["x-forwarded-for", "cookie", "user-agent", "authorization", "x-other", "content-type"] {
        for value in [&b"\xff"[..], b"\xfe", b"a\x80b", b"\xc3\x28", b"\xf0\x9f\x98"] {
            let response = client.exchange(&Request::get("/").with(name, value));
            assert_eq!(response.status(), 200, "{name}: {}", value.escape_ascii());
            assert!(quota(&response).is_some(), "{name}: {}", value.escape_ascii());
        }
    }
    // The header reaches the service as it was sent.
    let seen = app.take();
    assert_eq!(seen.len(), 30);
    assert!(seen.iter().any(|request| request.headers.contains(&("x-other".to_owned(), b"a\x80b".to_vec()))));
    let mut client = Http2::connect(envoy.ingress());
    let value = http::HeaderValue::from_bytes(b"\xff\xfe").unwrap();
    let request = http::Request::get("http://app.test/").header("x-forwarded-for", value).body(()).unwrap();
    assert!(quota(&client.exchange(request, b"", None)).is_some());
    assert_eq!(keys(&mut redis.client()), [KEY]);
    envoy.finish();
}

#[test]
fn a_header_of_48_kilobytes_is_read_like_any_other() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app).configuration(trusting(json!({"trusted_hops": 2}))).start();
    let forwarded = format!("{}198.51.100.7", "6.6.6.6,".repeat(6 * 1024));
    assert!(forwarded.len() > 48 * 1024);
    let response = envoy.client().exchange(&Request::get("/").with("x-forwarded-for", forwarded));
    assert_eq!(quota(&response), Some((100, 99)));
    assert_eq!(keys(&mut redis.client()), ["quota:{per-ip:198.51.100.7}:0"]);
    envoy.finish();
}

#[test]
fn a_peer_without_an_ip_address_is_skipped_and_counted() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let socket = tempfile::tempdir().unwrap();
    let path = socket.path().join("ingress");
    let listen = json!({"pipe": {"path": path}});
    let envoy = Setup::new(redis.port(), &app)
        .capacity(1)
        .tweak(move |document| document.listener("ingress")["address"] = listen)
        .start();
    for _ in 0..2 {
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.write_all(&Request::get("/").head()).unwrap();
        let response = read(&mut BufReader::new(stream), Unsaid::Response).unwrap().unwrap();
        assert_eq!((response.status(), quota(&response)), (200, None));
    }
    assert_eq!(keys(&mut redis.client()), [""; 0]);
    envoy.expect_counts(&[("per-ip skipped", 2)]);
    envoy.finish();
}

#[test]
fn the_empty_namespace_shares_its_buckets_with_a_limiter_in_an_application() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app)
        .configuration(json!({
            "redis": {"timeout": PATIENT},
            "rules": [{"name": "legacy", "namespace": "", "limits": [{"capacity": 10, "refill": "1/day"}]}],
        }))
        .start();
    let mut redis = redis.client();
    assert_eq!(quota(&envoy.get("/")), Some((10, 9)));
    assert_eq!(keys(&mut redis), ["quota:127.0.0.1"]);
    let bucket: HashMap<String, String> = redis.hgetall("quota:127.0.0.1").unwrap();
    let mut fields = bucket.keys().map(String::as_str).collect::<Vec<_>>();
    fields.sort_unstable();
    assert_eq!(fields, ["tokens", "ts"]);
    assert_eq!(bucket["tokens"].parse::<f64>().unwrap().floor(), 9.0);
    let (seconds, _): (u64, u64) = redis::cmd("TIME").query(&mut redis).unwrap();
    let ts = bucket["ts"].parse::<u64>().unwrap();
    assert!(ts.abs_diff(seconds * 1000) < 60_000, "{ts} is no time in milliseconds");

    // What the application writes counts for the filter.
    let () =
        redis.hset_multiple("quota:127.0.0.1", &[("tokens", "2.5"), ("ts", &(seconds * 1000).to_string())]).unwrap();
    assert_eq!(quota(&envoy.get("/")), Some((10, 1)));
    assert_eq!(quota(&envoy.get("/")), Some((10, 0)));
    assert_eq!(envoy.get("/").status(), 429);
    envoy.finish();
}

#[test]
fn the_key_prefix_is_the_first_of_every_key() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app)
        .configuration(json!({
            "redis": {"timeout": PATIENT},
            "key_prefix": "prod/q:",
            "rules": [{"name": "a", "namespace": "shared", "limits": [{"capacity": 3, "refill": "1/day"}]}],
        }))
        .start();
    assert_eq!(quota(&envoy.get("/")), Some((3, 2)));
    assert_eq!(keys(&mut redis.client()), ["prod/q:{shared:127.0.0.1}:0"]);
    envoy.finish();
}

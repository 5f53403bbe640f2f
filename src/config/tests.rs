//! Documents and what is said of them.

use std::time::Duration;

use super::*;
use crate::client_ip::{Prefixes, Trust};
use crate::quota::Refill;

/// The smallest configuration that does something.
const SMALLEST: &str = r#"{"rules": [{"name": "per-ip", "limits": [{"refill": "10/s"}]}]}"#;

fn faults(json: &str) -> String {
    match Config::from_json(json.as_bytes()) {
        Ok(_) => "fine".to_owned(),
        Err(errors) => errors.to_string(),
    }
}

/// A document with these fields beside one right rule.
fn with(fields: &str) -> String {
    format!(r#"{{{fields}, "rules": [{{"name": "a", "limits": [{{"refill": "1/s"}}]}}]}}"#)
}

/// A document with these rules.
fn rules(rules: &str) -> String {
    format!(r#"{{"rules": {rules}}}"#)
}

/// A document whose one rule has these fields beside its name and limits.
fn rule(fields: &str) -> String {
    rules(&format!(r#"[{{"name": "a", "limits": [{{"refill": "1/s"}}], {fields}}}]"#))
}

/// A document with one rule of this limit.
fn limit(limit: &str) -> String {
    rules(&format!(r#"[{{"name": "a", "limits": [{limit}]}}]"#))
}

#[test]
fn everything_but_a_name_and_a_refill_has_the_documented_default() {
    let config = Config::from_json(SMALLEST.as_bytes()).unwrap();
    assert_eq!(config.redis.cluster, "meshquota_tunnel");
    assert_eq!(config.redis.timeout, Duration::from_millis(50));
    assert_eq!(config.redis.max_in_flight, 4096);
    assert_eq!(config.redis.credentials, Credentials::default());
    assert_eq!(config.redis.database, 0);
    assert_eq!(Some(config.key_prefix), KeyPrefix::new("quota:"));
    assert_eq!(config.clock, Clock::Redis);
    assert_eq!(config.failure_mode, FailureMode::Allow);
    assert_eq!(config.client_ip, ClientIp { trust: Trust::Proxy, prefixes: Prefixes { ipv4: 32, ipv6: 64 } });
    let [rule] = config.rules.as_slice() else { panic!("one rule") };
    assert_eq!(rule.name().as_str(), "per-ip");
    let [limit] = rule.limits() else { panic!("one limit") };
    assert_eq!(limit.capacity().get(), 10);
    assert_eq!(Some(limit.refill()), Refill::new(10, 1000));
}

#[test]
fn every_field_can_be_set() {
    let json = r#"{
        "redis": {"cluster": "outbound|6379||redis.default.svc.cluster.local", "timeout": "1s 500ms",
                  "max_in_flight": 100.0, "username": "proxy", "password": "secret", "database": 3},
        "key_prefix": "prod:", "clock": "proxy", "failure_mode": "deny",
        "client_ip": {"trusted_proxies": ["10.0.0.0/8", "2001:db8::1"], "ipv4_prefix": 24, "ipv6_prefix": 56},
        "rules": [
            {"name": "a", "namespace": "", "key": ["client_ip"], "limits": [{"capacity": 1e+3, "refill": "100/min"}]},
            {"name": "b", "namespace": "shared", "limits": [{"refill": "10/s"}, {"capacity": 5, "refill": "1/15s"}]}
        ]}"#;
    let config = Config::from_json(json.as_bytes()).unwrap();
    assert_eq!(config.redis.timeout, Duration::from_millis(1500));
    assert_eq!((config.redis.max_in_flight, config.redis.database), (100, 3));
    assert_eq!(config.redis.credentials.username.as_deref(), Some("proxy"));
    assert_eq!(config.redis.credentials.password.as_deref(), Some("secret"));
    assert_eq!(config.clock, Clock::Proxy);
    assert_eq!(config.failure_mode, FailureMode::Deny);
    assert!(matches!(&config.client_ip.trust, Trust::Networks(networks) if networks.len() == 2));
    assert_eq!(config.client_ip.prefixes, Prefixes { ipv4: 24, ipv6: 56 });
    assert_eq!(config.rules[0].limits()[0].capacity().get(), 1000);
    assert_eq!(config.rules[1].limits().len(), 2);
    let hops = with(r#""client_ip": {"trusted_hops": 2}"#);
    let trust = Config::from_json(hops.as_bytes()).unwrap().client_ip.trust;
    assert!(matches!(trust, Trust::Hops(hops) if hops.get() == 2));
}

#[test]
fn the_password_is_never_shown() {
    let json = with(r#""redis": {"username": "hush", "password": "hush"}"#);
    assert!(!format!("{:?}", Config::from_json(json.as_bytes()).unwrap()).contains("hush"));
    let wrong = with(r#""redis": {"username": ["hush"], "password": {"hush": 1}}"#);
    assert!(!faults(&wrong).contains("hush"), "{}", faults(&wrong));
}

const A_RATE: &str = r#"tokens over time, such as "10/s", "100/min", "1000/h", "5000/day" or "1/15s""#;
const TOKENS: &str = r#"a whole number of tokens, from 1 to 9007199254740991, before the "/""#;
const TIME: &str = r#"a time from 1ms to 10 years after the "/", such as s, min, h, day or 15s"#;
const A_PART: &str = "a part: \"client_ip\", \"method\", \"host\", \"path\", \"route\", or an object of one field header, \
                      cookie, query or property";
const CAPACITY: &str = "an integer from 1 to 9007199254740991";
const NAME: &str = "a name of 1 to 64 of the characters a-z 0-9 _ -";

/// Wrong documents, and what is said of each.
pub fn wrong_documents() -> Vec<(String, String)> {
    vec![
        // The document.
        (String::new(), NOTHING.into()),
        (" \n ".into(), NOTHING.into()),
        ("{}".into(), "rules: missing, expected a list of rules".into()),
        ("[]".into(), "found a list of 0, expected an object".into()),
        ("null".into(), "found null, expected an object".into()),
        (
            "{\n  \"rules\": [,]\n}".into(),
            "the configuration is not JSON: expected value at line 2 column 13".into(),
        ),
        (
            format!("{SMALLEST} x"),
            format!("the configuration is not JSON: trailing characters at line 1 column {}", SMALLEST.len() + 2),
        ),
        (
            "[".repeat(5000),
            "the configuration is not JSON: recursion limit exceeded at line 1 column 128".into(),
        ),
        ("\n\u{1a}\n\u{5}rules\u{12}".into(), A_STRUCT.into()),
        // Fields.
        (with(r#""rule": []"#), r#"unknown field "rule", did you mean "rules"?"#.into()),
        (with(r#""Failure_Mode": "deny""#), r#"unknown field "Failure_Mode", did you mean "failure_mode"?"#.into()),
        (
            with(r#""zzz": 1"#),
            r#"unknown field "zzz", expected one of redis, key_prefix, clock, failure_mode, local_share, deny_cache, client_ip, response, failure_response, rules"#.into(),
        ),
        (with(r#""clock": "redis", "clock": "proxy""#), r#"the field "clock" is there twice"#.into()),
        (with(r#""clock": "utc""#), r#"clock: found "utc", expected "redis" or "proxy""#.into()),
        (with(r#""failure_mode": true"#), r#"failure_mode: found true, expected "allow", "deny" or "local""#.into()),
        (with(r#""failure_mode": "open""#), r#"failure_mode: found "open", expected "allow", "deny" or "local""#.into()),
        (
            with(r#""key_prefix": "a{b""#),
            r#"key_prefix: found "a{b", expected a text of at most 64 printable ASCII characters without spaces and braces"#
                .into(),
        ),
        // Redis.
        (with(r#""redis": "redis://:hush@localhost""#), "redis: found a text, expected an object".into()),
        (
            with(r#""redis": {"host": "x"}"#),
            "redis: unknown field \"host\", expected one of cluster, timeout, max_in_flight, breaker, username, password, database"
                .into(),
        ),
        (
            with(r#""redis": {"cluster": ""}"#),
            "redis.cluster: found an empty text, expected the name of an Envoy cluster, of 1 to 120 printable characters"
                .into(),
        ),
        (
            with(r#""redis": {"timeout": 50}"#),
            r#"redis.timeout: found 50, expected a duration from 1ms to 10s, such as "50ms""#.into(),
        ),
        (
            with(r#""redis": {"timeout": "0s"}"#),
            r#"redis.timeout: found "0s", expected a duration from 1ms to 10s, such as "50ms""#.into(),
        ),
        (
            with(r#""redis": {"timeout": "11s"}"#),
            r#"redis.timeout: found "11s", expected a duration from 1ms to 10s, such as "50ms""#.into(),
        ),
        (
            with(r#""redis": {"max_in_flight": 0}"#),
            "redis.max_in_flight: found 0, expected an integer from 1 to 1000000".into(),
        ),
        (
            with(r#""redis": {"max_in_flight": 1.5}"#),
            "redis.max_in_flight: found a fraction, expected an integer from 1 to 1000000".into(),
        ),
        (with(r#""redis": {"database": -1}"#), "redis.database: found -1, expected an integer from 0 to 65535".into()),
        (
            with(r#""redis": {"username": "u"}"#),
            "redis: a username without a password; Redis takes both or the password alone".into(),
        ),
        (
            with(r#""redis": {"breaker": {"failures": 0, "cool_down": "1ms", "timeout": 1}}"#),
            "redis.breaker: unknown field \"timeout\", expected one of failures, cool_down\n\
             redis.breaker.failures: found 0, expected an integer from 1 to 1000000\n\
             redis.breaker.cool_down: found \"1ms\", expected a duration from 10ms to 10min, such as \"1s\""
                .into(),
        ),
        (
            with(r#""deny_cache": {"entries": -1, "max_age": "2min", "size": 1}"#),
            "deny_cache: unknown field \"size\", expected one of entries, max_age\n\
             deny_cache.entries: found -1, expected an integer from 0 to 1000000\n\
             deny_cache.max_age: found \"2min\", expected a duration from 1ms to 1min, such as \"1s\""
                .into(),
        ),
        (with(r#""local_share": 0"#), "local_share: found 0, expected an integer from 1 to 10000".into()),
        (
            rule(r#""failure_mode": "locally""#),
            "rules[0].failure_mode: found \"locally\", expected \"allow\", \"deny\" or \"local\"".into(),
        ),
        (with(r#""redis": {"password": 7}"#), "redis.password: found something else, expected a text".into()),
        // The client's address.
        (
            with(r#""client_ip": {"trusted_hops": 0}"#),
            "client_ip.trusted_hops: found 0, expected an integer from 1 to 1000".into(),
        ),
        (
            with(r#""client_ip": {"trusted_hops": 1, "trusted_proxies": ["10.0.0.0/8"]}"#),
            "client_ip: both trusted_hops and trusted_proxies, expected one of them".into(),
        ),
        (
            with(r#""client_ip": {"trusted_proxies": "10.0.0.0/8"}"#),
            r#"client_ip.trusted_proxies: found "10.0.0.0/8", expected a list of addresses and networks, such as "10.0.0.0/8""#
                .into(),
        ),
        (
            with(r#""client_ip": {"trusted_proxies": []}"#),
            "client_ip.trusted_proxies: found a list of 0, expected at least one address or network, or no such field"
                .into(),
        ),
        (
            with(r#""client_ip": {"trusted_proxies": ["10.0.0.0/33", "gateway"]}"#),
            "client_ip.trusted_proxies[0]: found \"10.0.0.0/33\", expected an address or a network, such as \"10.0.0.0/8\"\n\
             client_ip.trusted_proxies[1]: found \"gateway\", expected an address or a network, such as \"10.0.0.0/8\""
                .into(),
        ),
        (
            with(r#""client_ip": {"ipv4_prefix": 33, "ipv6_prefix": 0}"#),
            "client_ip.ipv4_prefix: found 33, expected an integer from 1 to 32\n\
             client_ip.ipv6_prefix: found 0, expected an integer from 1 to 128"
                .into(),
        ),
        // Rules.
        (rules("{}"), "rules: found an object, expected a list of rules".into()),
        (rules("[]"), "rules: found a list of 0, expected at least one rule; a filter without one does nothing".into()),
        (rules("[7]"), "rules[0]: found 7, expected an object".into()),
        (
            rules("[{}]"),
            format!("rules[0].name: missing, expected {NAME}\nrules[0].limits: missing, expected a list of limits"),
        ),
        (
            rules(r#"[{"name": "Per IP", "limits": [{"refill": "1/s"}]}]"#),
            format!("rules[0].name: found \"Per IP\", expected {NAME}"),
        ),
        (
            rules(r#"[{"name": "a", "limit": [{"refill": "1/s"}]}]"#),
            "rules[0]: unknown field \"limit\", did you mean \"limits\"?\n\
             rules[0].limits: missing, expected a list of limits"
                .into(),
        ),
        (
            rules(r#"[{"name": "a", "limits": [{"refill": "1/s"}]}, {"name": "a", "limits": [{"refill": "0/s"}]}]"#),
            format!(
                "rules[1].name: the name \"a\" is that of rules[0] already; names must differ\n\
                 rules[1].limits[0].refill: found \"0/s\", expected {TOKENS}"
            ),
        ),
        (
            rule(r#""namespace": "A""#),
            "rules[0].namespace: found \"A\", expected a text of at most 64 of the characters a-z 0-9 _ -, or an empty one"
                .into(),
        ),
        (
            rules(r#"[{"name": "a", "namespace": "", "limits": [{"refill": "1/s"}, {"refill": "9/h"}]}]"#),
            "rules[0].namespace: an empty namespace goes with one limit only, since its key has no number".into(),
        ),
        (rule(r#""key": "client_ip""#), r#"rules[0].key: found "client_ip", expected a list of parts, such as ["client_ip"]"#.into()),
        (rule(r#""key": ["ip"]"#), format!("rules[0].key[0]: found \"ip\", expected {A_PART}")),
        (rule(r#""key": ["path", {}]"#), "rules[0].key[1]: expected one field of header, cookie, query or property".into()),
        (
            rule(r#""key": [{"header": "a", "cookie": "b"}]"#),
            "rules[0].key[0]: expected one field of header, cookie, query or property".into(),
        ),
        (
            rule(r#""key": [{"headers": "a"}]"#),
            "rules[0].key[0]: unknown field \"headers\", did you mean \"header\"?".into(),
        ),
        (
            rule(r#""key": [{"header": "x key"}, {"property": "a"}]"#),
            "rules[0].key[0].header: found \"x key\", expected the name of a header, such as \"x-api-key\"\n\
             rules[0].key[1].property: found \"a\", expected a list of names that lead to a property, such as [\"connection\", \
             \"uri_san_peer_certificate\"]"
                .into(),
        ),
        (
            rule(r#""key": ["path", "path", "path", "path", "path", "path", "path", "path", "path"]"#),
            "rules[0].key: found a list of 9, expected at most 8 parts".into(),
        ),
        (
            rule(r#""if_missing": "deny""#),
            "rules[0].if_missing: found \"deny\", expected \"skip\" or \"share\"".into(),
        ),
        // Who may take more.
        (rule(r#""overrides": {}"#), "rules[0].overrides: found an object, expected a list of overrides".into()),
        (
            rule(r#""overrides": [{"limits": [{"refill": "9/s"}]}]"#),
            "rules[0].overrides[0]: expected either values or cidrs, which say whom the override is for".into(),
        ),
        (
            rule(r#""overrides": [{"values": ["192.0.2.1"], "unlimited": true, "limits": []}]"#),
            "rules[0].overrides[0]: expected either limits or unlimited\n\
             rules[0].overrides[0].limits: found a list of 0, expected 1 to 8 limits"
                .into(),
        ),
        (
            rule(r#""overrides": [{"values": ["gold"], "unlimited": false}]"#),
            "rules[0].overrides[0].values[0]: found \"gold\", expected a value of the key's part\n\
             rules[0].overrides[0].unlimited: found false, expected true, or limits in its place"
                .into(),
        ),
        (
            rule(r#""key": ["client_ip", "method"], "overrides": [{"values": ["GET", ["192.0.2.1", ""]], "unlimited": true}]"#),
            "rules[0].overrides[0].values[0]: found \"GET\", expected a list of 2 values, one for each part of the key\n\
             rules[0].overrides[0].values[1]: found a list of 2, expected values that are not blank"
                .into(),
        ),
        (
            rule(
                r#""namespace": "", "overrides": [{"cidrs": ["10.0.0.0/8"], "limits": [{"refill": "1/s"}, {"refill": "9/h"}]}]"#,
            ),
            "rules[0].namespace: an empty namespace goes with one limit only, since its key has no number".into(),
        ),
        // What clients are told.
        (with(r#""response": 403"#), "response: found 403, expected an object".into()),
        (
            with(r#""response": {"status": 200, "grpc_status": 0, "headers": "x", "retry_after": 1}"#),
            "response.status: found 200, expected an integer from 400 to 599\n\
             response.grpc_status: found 0, expected an integer from 1 to 16\n\
             response.headers: found \"x\", expected \"x-ratelimit\", \"ietf\", \"both\" or \"none\"\n\
             response.retry_after: found 1, expected true or false"
                .into(),
        ),
        (
            with(r#""response": {"content_type": "json", "set": {"x-a": "1", "X-A": "2"}}"#),
            "response.content_type: found \"json\", expected a content type, such as \"application/json\"\n\
             response.set: the field \"X-A\" is there twice"
                .into(),
        ),
        (
            with(r#""response": {"set": {"Content-Type": "a/b", "x-b": "\u00e9"}}"#),
            "response.set.Content-Type: expected the name of a header that is not content-type (there is a field for it), \
             content-length, transfer-encoding or connection\n\
             response.set.x-b: found \"é\", expected the value of a header, of printable ASCII characters"
                .into(),
        ),
        (
            with(r#""failure_response": {"retry_after": true}"#),
            "failure_response: unknown field \"retry_after\", expected one of status, body, content_type, grpc_status".into(),
        ),
        (rule(r#""response": {"status": "429"}"#), "rules[0].response.status: found \"429\", expected an integer from 400 to 599".into()),
        // What it costs, and whether it counts.
        (rule(r#""cost": 0"#), format!("rules[0].cost: found 0, expected {CAPACITY}")),
        (rule(r#""cost": "5""#), format!("rules[0].cost: found \"5\", expected {CAPACITY}")),
        (
            rule(r#""cost": {"default": 1}"#),
            "rules[0].cost.header: missing, expected the name of a header, such as \"x-cost\"".into(),
        ),
        (
            rule(r#""cost": {"header": "x-cost", "default": 5, "max": 3}"#),
            "rules[0].cost: a default of 5 is above the max of 3".into(),
        ),
        (rule(r#""shadow": "yes""#), "rules[0].shadow: found \"yes\", expected true or false".into()),
        // Which requests it is for.
        (rule(r#""match": "/login""#), "rules[0].match: found a text, expected an object".into()),
        (
            rule(r#""match": {}"#),
            "rules[0].match: found no condition, expected at least one; leave the field out to mean no condition".into(),
        ),
        (
            rule(r#""unless": []"#),
            "rules[0].unless: found a list of 0, expected at least one object of conditions; leave the field out to mean \
             no condition"
                .into(),
        ),
        (
            rule(r#""match": {"path_prefixes": "/a"}"#),
            "rules[0].match: unknown field \"path_prefixes\", did you mean \"path_prefix\"?".into(),
        ),
        (
            rule(r#""unless": [{"path": "/a"}, {"path": "//b"}]"#),
            "rules[0].unless[1].path: found \"//b\", expected a path in its normal form, \"/b\"".into(),
        ),
        (
            rule(r#""match": {"path": "login?x=1", "path_prefix": "/%6Cogin", "path_regex": "("}"#),
            "rules[0].match.path: found \"login?x=1\", expected a path in its normal form, \"/login\"\n\
             rules[0].match.path_prefix: found \"/%6Cogin\", expected a path in its normal form, \"/login\"\n\
             rules[0].match.path_regex: found \"(\", expected a regular expression that matches the whole text \
             (found open group without closing ')')"
                .into(),
        ),
        (
            rule(r#""match": {"methods": ["get"]}"#),
            "rules[0].match.methods[0]: found \"get\", expected a method in capitals, such as \"GET\"".into(),
        ),
        (
            rule(r#""match": {"methods": "GET"}"#),
            "rules[0].match.methods: found \"GET\", expected a list of methods, such as \"GET\"".into(),
        ),
        (
            rule(r#""match": {"hosts": ["example.com:80"]}"#),
            "rules[0].match.hosts[0]: found \"example.com:80\", expected a host without a port, or all below one, such as \
             \"api.example.com\" or \"*.example.com\""
                .into(),
        ),
        (
            rule(r#""match": {"client_ip": ["10.0.0.0/8", "10.0.0.256"]}"#),
            "rules[0].match.client_ip[1]: found \"10.0.0.256\", expected an address or a network, such as \"10.0.0.0/8\""
                .into(),
        ),
        (
            rule(r#""match": {"headers": [{"exact": "gold"}]}"#),
            "rules[0].match.headers[0].name: missing, expected the name of a header, such as \"x-plan\"".into(),
        ),
        (
            rule(r#""match": {"headers": [{"name": "x plan"}]}"#),
            "rules[0].match.headers[0].name: found \"x plan\", expected the name of a header, such as \"x-plan\"".into(),
        ),
        (
            rule(r#""match": {"headers": [{"name": "a", "exact": "b", "prefix": "c", "invert": 1}]}"#),
            "rules[0].match.headers[0]: several tests, expected one of exact, prefix, suffix, contains, regex, present\n\
             rules[0].match.headers[0].invert: found 1, expected true or false"
                .into(),
        ),
        (
            rule(r#""match": {"cors_preflight": "yes", "route": ""}"#),
            "rules[0].match.route: found an empty text, expected the name of a route\n\
             rules[0].match.cors_preflight: found \"yes\", expected true or false"
                .into(),
        ),
        // Limits.
        (
            rules(r#"[{"name": "a", "limits": []}]"#),
            "rules[0].limits: found a list of 0, expected 1 to 8 limits".into(),
        ),
        (limit("{}"), format!("rules[0].limits[0].refill: missing, expected {A_RATE}")),
        (limit(r#"{"refill": 10}"#), format!("rules[0].limits[0].refill: found 10, expected {A_RATE}")),
        (limit(r#"{"refill": "10"}"#), format!("rules[0].limits[0].refill: found \"10\", expected {A_RATE}")),
        (limit(r#"{"refill": "0/s"}"#), format!("rules[0].limits[0].refill: found \"0/s\", expected {TOKENS}")),
        (limit(r#"{"refill": "-5/s"}"#), format!("rules[0].limits[0].refill: found \"-5/s\", expected {TOKENS}")),
        (limit(r#"{"refill": "5/0s"}"#), format!("rules[0].limits[0].refill: found \"5/0s\", expected {TIME}")),
        (limit(r#"{"refill": "5/week!"}"#), format!("rules[0].limits[0].refill: found \"5/week!\", expected {TIME}")),
        (
            limit(r#"{"refill": "1/s", "capacity": 0}"#),
            format!("rules[0].limits[0].capacity: found 0, expected {CAPACITY}"),
        ),
        (
            limit(r#"{"refill": "1/s", "capacity": "100"}"#),
            format!("rules[0].limits[0].capacity: found \"100\", expected {CAPACITY}"),
        ),
        (
            limit(r#"{"refill": "1/s", "capacity": 1e16}"#),
            format!("rules[0].limits[0].capacity: found 10000000000000000, expected {CAPACITY}"),
        ),
        (
            limit(r#"{"refill": "1234567/365days", "capacity": 1234567}"#),
            "rules[0].limits[0]: with this refill a capacity of at most 285616 can be counted exactly; \
             lower the capacity or write the refill over a rounder or shorter time"
                .into(),
        ),
        // All at once.
        (
            r#"{"redis": {"timeout": "1h"}, "clok": "redis", "rules": [{"name": "", "limits": [{"capacity": -1, "refil": "1/s"}]}]}"#
                .into(),
            format!(
                "unknown field \"clok\", did you mean \"clock\"?\n\
                 redis.timeout: found \"1h\", expected a duration from 1ms to 10s, such as \"50ms\"\n\
                 rules[0].name: found an empty text, expected {NAME}\n\
                 rules[0].limits[0]: unknown field \"refil\", did you mean \"refill\"?\n\
                 rules[0].limits[0].refill: missing, expected {A_RATE}\n\
                 rules[0].limits[0].capacity: found -1, expected {CAPACITY}"
            ),
        ),
    ]
}

#[test]
fn a_wrong_document_is_told_where_and_what_and_what_else() {
    let mut wrong = String::new();
    for (document, expected) in &wrong_documents() {
        let found = faults(document);
        if found != *expected {
            wrong.push_str(&format!("\n{document}\n  found:    {found}\n  expected: {expected}\n"));
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn bytes_that_are_no_text_are_refused() {
    assert!(Config::from_json(b"{\"rules\": \xff}").is_err());
    let long = with(&format!(r#""{}": 1"#, "é\u{7}".repeat(5000)));
    assert!(faults(&long).len() < 1000);
}

#[test]
fn extreme_limits_are_right_or_refused() {
    let fine = [
        r#"{"refill": "1/10years"}"#,
        r#"{"refill": "1000000/s", "capacity": 1000000000000}"#,
        r#"{"refill": "1000000000000/s"}"#,
        r#"{"refill": "1/10years", "capacity": 28000}"#,
    ];
    for json in fine {
        assert_eq!(faults(&limit(json)), "fine", "{json}");
    }
    for json in [r#"{"refill": "1/10years", "capacity": 29000}"#, r#"{"refill": "1/20years"}"#] {
        assert_ne!(faults(&limit(json)), "fine", "{json}");
    }
}

#[test]
fn a_line_feed_before_the_document_does_not_make_it_binary() {
    assert_eq!(faults(&format!("\n\t{SMALLEST}\r\n")), "fine");
}

proptest::proptest! {
    #[test]
    fn no_bytes_are_too_strange(bytes: Vec<u8>) {
        let _ = Config::from_json(&bytes);
    }

    #[test]
    fn no_value_is_too_strange_for_any_field(place in 0..9_usize, number: f64, text: String) {
        for value in [format!("{number:?}"), serde_json::to_string(&text).unwrap_or_default()] {
            let document = match place {
                0 => with(&format!(r#""redis": {{"timeout": {value}}}"#)),
                1 => with(&format!(r#""redis": {{"database": {value}}}"#)),
                2 => with(&format!(r#""client_ip": {{"trusted_hops": {value}}}"#)),
                3 => with(&format!(r#""client_ip": {{"trusted_proxies": [{value}]}}"#)),
                4 => rule(&format!(r#""namespace": {value}"#)),
                5 => limit(&format!(r#"{{"refill": {value}}}"#)),
                6 => limit(&format!(r#"{{"refill": "1/s", "capacity": {value}}}"#)),
                7 => with(&format!(r#""key_prefix": {value}"#)),
                _ => rules(&format!("[{value}]")),
            };
            let _ = Config::from_json(document.as_bytes());
        }
    }
}

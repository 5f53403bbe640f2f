//! Redis that is not there, goes away, freezes and comes back.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::app::{ANSWER, App};
use crate::support::envoy::{Document, Endpoints, Envoy, Setup, local};
use crate::support::http2::Http2;
use crate::support::server::{Kind, Server, free_port, wait_until};
use crate::support::shim::{Mode, Shim};
use crate::{is_waved_through, quota, slow, until_decided};

/// The filter's lines of that level.
fn lines(envoy: &Envoy, level: &str) -> Vec<String> {
    envoy.said().into_iter().filter(|(other, _)| other == level).map(|(_, text)| text).collect()
}

#[test]
fn redis_that_is_absent_at_the_start_lets_requests_pass_and_counts_once_it_is_there() {
    let (mut redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    redis.kill();
    let envoy = Setup::new(redis.port(), &app).configuration(slow(10, "5s")).workers(2).unconnected().start();
    let begin = Instant::now();
    for _ in 0..20 {
        assert!(is_waved_through(&envoy.get("/")));
    }
    assert!(
        begin.elapsed() < Duration::from_secs(50),
        "a refused connection is no reason to wait: {:?}",
        begin.elapsed()
    );
    assert_eq!(app.count(), 20);
    envoy.wait_for_count("per-ip fail_allow", |times| times == 20);
    envoy.wait_for_failed_calls(20, "unavailable");
    assert_eq!(envoy.gauge("connected"), 0);
    redis.restart();
    assert_eq!(until_decided(&envoy).0, 10);
    wait_until("both workers are connected", || envoy.gauge("connected") == 2);
    // From now on the limit holds, on both workers.
    let admitted = (0..30).filter(|_| envoy.get("/").status() == 200).count();
    assert!(admitted <= 9, "{admitted}");
    assert_eq!(envoy.get("/").status(), 429);
    envoy.finish();
}

#[test]
fn redis_that_is_killed_and_comes_back_empty_fills_the_buckets_and_nothing_else_is_lost() {
    let (mut redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app).configuration(slow(10, "5s")).start();
    for left in (4..10).rev() {
        assert_eq!(quota(&envoy.get("/")), Some((10, left)));
    }
    redis.kill();
    for _ in 0..5 {
        assert!(is_waved_through(&envoy.get("/")));
    }
    assert_eq!(envoy.gauge("connected"), 0);
    redis.restart();
    // The data and the script are gone: the bucket is full, and the whole script is sent again.
    assert_eq!(until_decided(&envoy), (10, 9));
    assert_eq!(quota(&envoy.get("/")), Some((10, 8)));
    envoy.wait_for_count("calls ok", |times| times == 8);
    assert_eq!((envoy.count("calls noscript"), envoy.count("reconnects")), (2, 1));
    assert_eq!(envoy.gauge("connected"), 1);
    envoy.finish();
}

#[test]
fn redis_that_restarts_with_its_data_goes_on_where_it_was() {
    let (mut redis, app) =
        (Server::start(Kind::Redis, &["--appendonly", "yes", "--appendfsync", "always"]), App::start());
    let envoy = Setup::new(redis.port(), &app).configuration(slow(10, "5s")).start();
    for left in (4..10).rev() {
        assert_eq!(quota(&envoy.get("/")), Some((10, left)));
    }
    redis.restart();
    assert_eq!(until_decided(&envoy), (10, 3));
    envoy.finish();
}

#[test]
fn redis_that_is_frozen_delays_a_request_by_the_timeout_at_most_and_takes_up_again() {
    const REQUESTS: u32 = 10;
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app).configuration(slow(100, "100ms")).start();
    assert_eq!(until_decided(&envoy), (100, 99));
    redis.stop();
    let begin = Instant::now();
    let mut client = envoy.client();
    for _ in 0..REQUESTS {
        assert!(is_waved_through(&client.get("/")));
    }
    // A tenth of a second each, and as much again twice over for a busy machine.
    assert!(begin.elapsed() < Duration::from_millis(300) * REQUESTS + Duration::from_secs(2), "{:?}", begin.elapsed());
    envoy.wait_for_count("per-ip fail_allow", |times| times == i64::from(REQUESTS));
    assert!(envoy.count("calls timeout") >= 1);
    redis.cont();
    let (limit, left) = until_decided(&envoy);
    // What was sent while it was frozen may have been charged once, and never twice.
    let asked = app.count() as u64;
    assert_eq!(limit, 100);
    assert!(left < 99 && left >= 100_u64.saturating_sub(asked), "{left} left after {asked} requests");
    assert_eq!(quota(&envoy.get("/")).map(|(_, next)| next), Some(left - 1));
    envoy.finish();
}

#[test]
fn a_failure_mode_of_deny_answers_503_and_never_429() {
    let (mut redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let mut configuration = slow(10, "5s");
    configuration["failure_mode"] = json!("deny");
    let mut envoy = Setup::new(redis.port(), &app).configuration(configuration).start();
    assert_eq!(quota(&envoy.get("/")), Some((10, 9)));
    redis.kill();
    for _ in 0..3 {
        let response = envoy.get("/");
        assert_eq!(response.status(), 503);
        assert_eq!(response.header("content-type").as_deref(), Some("text/plain"));
        assert_eq!(response.text(), "rate limit unavailable\n");
        for name in ["retry-after", "x-envoy-ratelimited", "x-ratelimit-limit", "x-ratelimit-remaining"] {
            assert_eq!(response.header(name), None, "{name}");
        }
    }
    let request = http::Request::post("http://app.test/shop.Shop/Buy").header("content-type", "application/grpc");
    let response = Http2::connect(envoy.ingress()).exchange(request.body(()).unwrap(), &[0, 0, 0, 0, 0], None);
    assert_eq!((response.status(), response.header("grpc-status").as_deref()), (200, Some("14")));
    assert_eq!((response.header("retry-after"), response.header("x-envoy-ratelimited")), (None, None));
    assert_eq!(app.count(), 1);
    envoy.wait_for_count("per-ip fail_deny", |times| times == 4);
    assert_eq!(envoy.count("per-ip deny"), 0);
    let log = envoy.wait_for_access_log(5);
    assert!(log[1].contains(" 503 meshquota_unavailable quota=fail_deny rule=per-ip remaining=-"), "{}", log[1]);
    redis.restart();
    wait_until("a request is decided by Redis again", || envoy.get("/").status() == 200);
    let answered = envoy.statistic("http.ingress.downstream_rq_5xx");
    envoy.expect_5xx(answered);
    // Each 503, and one over gRPC, is the filter's.
    envoy.wait_for_count("per-ip fail_deny", |times| times == answered + 1);
    envoy.finish();
}

#[test]
fn an_outage_is_one_warning_and_one_line_at_its_end_and_not_one_a_request() {
    let (mut redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app).configuration(slow(1000, "5s")).start();
    for _ in 0..5 {
        assert!(quota(&envoy.get("/")).is_some());
    }
    assert_eq!(envoy.said(), []);
    redis.kill();
    let begin = Instant::now();
    for _ in 0..100 {
        assert!(is_waved_through(&envoy.get("/")));
    }
    let warnings = lines(&envoy, "warning");
    // One more for every ten seconds that it lasts.
    assert!(warnings.len() as u64 <= 1 + begin.elapsed().as_secs() / 10, "{warnings:#?}");
    assert!(warnings[0].contains("Redis"), "{warnings:?}");
    assert!(warnings[0].contains("unavailable"), "its kind: {warnings:?}");
    assert!(warnings[0].contains("allow"), "what becomes of requests: {warnings:?}");
    redis.restart();
    wait_until("the end of the outage is said", || {
        envoy.get("/");
        lines(&envoy, "info").len() >= 3
    });
    for _ in 0..20 {
        assert!(quota(&envoy.get("/")).is_some());
    }
    let said = lines(&envoy, "info");
    assert_eq!(said.len(), 3, "{said:?}");
    assert!(said[0].contains("the breaker is open") && said[1].contains("the breaker is closed"), "{said:?}");
    assert!(said[2].contains("Redis") && said[2].contains("again"), "{said:?}");
    envoy.finish();
}

/// With this change of the configuration, requests are decided at once, under one warning that says why.
fn check_unreachable(what: &str, redis: serde_json::Value, tweak: fn(&mut Document), says: &str) {
    let (server, app) = (Server::start(Kind::Redis, &[]), App::start());
    let mut configuration = slow(10, "10s");
    for (name, value) in redis.as_object().unwrap() {
        configuration["redis"][name] = value.clone();
    }
    let envoy = Setup::new(server.port(), &app).configuration(configuration).tweak(tweak).unconnected().start();
    let begin = Instant::now();
    for _ in 0..20 {
        assert!(is_waved_through(&envoy.get("/")), "{what}");
    }
    // Any one that waited for its deadline would take ten seconds.
    assert!(begin.elapsed() < Duration::from_secs(10), "{what}: {:?}", begin.elapsed());
    envoy.wait_for_count("per-ip fail_allow", |times| times == 20);
    envoy.wait_for_failed_calls(20, "unavailable");
    let warnings = lines(&envoy, "warning");
    assert_eq!(warnings.len(), 1, "{what}: {warnings:?}");
    assert!(warnings[0].contains(says), "{what}: {warnings:?}");
    envoy.finish();
}

#[test]
fn a_cluster_that_is_unknown_is_decided_at_once() {
    check_unreachable("unknown", json!({"cluster": "nowhere"}), |_| {}, "nowhere");
}

#[test]
fn a_cluster_without_hosts_is_decided_at_once() {
    let tweak =
        |document: &mut Document| document.cluster("meshquota_redis")["load_assignment"]["endpoints"] = json!([]);
    check_unreachable("no hosts", json!({}), tweak, "no healthy upstream");
}

#[test]
fn a_name_that_does_not_resolve_is_decided_at_once() {
    let tweak = |document: &mut Document| {
        document.aim("meshquota_redis", json!({"socket_address": {"address": "redis.invalid", "port_value": 6379}}));
    };
    check_unreachable("no address", json!({}), tweak, "no healthy upstream");
}

#[test]
fn a_port_on_which_nothing_listens_is_decided_at_once() {
    let tweak = |document: &mut Document| document.aim("meshquota_redis", local(free_port()));
    check_unreachable("no listener", json!({}), tweak, "remote connection failure");
}

#[test]
fn hosts_that_appear_later_are_found() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let endpoints = Endpoints::of(&[]);
    let envoy = Setup::new(redis.port(), &app).configuration(slow(10, "5s")).found_by(&endpoints).unconnected().start();
    for _ in 0..5 {
        assert!(is_waved_through(&envoy.get("/")));
    }
    endpoints.set(&[redis.port()]);
    assert_eq!(until_decided(&envoy), (10, 9));
    envoy.finish();
}

#[test]
fn a_server_that_accepts_and_says_nothing_is_given_up_and_tried_again() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    shim.set(Mode::Mute);
    let envoy = Setup::new(shim.port(), &app).configuration(slow(10, "50ms")).unconnected().start();
    for _ in 0..3 {
        assert!(is_waved_through(&envoy.get("/")));
    }
    envoy.wait_for_count("calls timeout", |times| times >= 1);
    shim.set(Mode::Pass);
    // The connection there is stays mute, so it takes another one.
    assert_eq!(until_decided(&envoy), (10, 9));
    assert!(shim.accepted() >= 2);
    envoy.finish();
}

#[test]
fn a_server_that_hangs_up_at_once_is_not_hammered() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    shim.set(Mode::Refuse);
    let envoy = Setup::new(shim.port(), &app).configuration(slow(10, "5s")).unconnected().start();
    let (begin, mut requests) = (Instant::now(), 0);
    while begin.elapsed() < Duration::from_secs(3) {
        assert!(is_waved_through(&envoy.get("/")));
        requests += 1;
    }
    // Attempts at growing distances, up to a second: a dozen in three seconds, and as many again for a slow machine.
    let attempts = shim.accepted();
    assert!(attempts <= 24, "{attempts} connections for {requests} requests in {:?}", begin.elapsed());
    shim.set(Mode::Pass);
    assert_eq!(until_decided(&envoy), (10, 9));
    envoy.finish();
}

#[test]
fn the_callout_aimed_straight_at_redis_is_said_in_one_line_and_is_no_storm() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    let port = shim.port();
    let mut envoy = Setup::new(shim.port(), &app)
        .configuration(slow(10, "5s"))
        .tweak(move |document| document.aim("meshquota_tunnel", local(port)))
        .unconnected()
        .start();
    envoy.tolerate("[http2]");
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(3) {
        let response = envoy.get("/");
        assert!(is_waved_through(&response));
        assert_eq!(response.text(), ANSWER);
    }
    let attempts = shim.accepted();
    assert!(attempts <= 40, "{attempts} connections in {:?}", begin.elapsed());
    let warnings = lines(&envoy, "warning");
    assert_eq!(warnings.len(), 1, "{warnings:#?}");
    assert!(warnings[0].contains("protocol"), "{warnings:?}");
    envoy.finish();
}

//! The main paths on every Envoy and every server that is promised.

use std::time::Duration;

use crate::support::app::App;
use crate::support::envoy::{NEWEST, OLDER, Setup};
use crate::support::http::{Body, Request, at_once, at_once_from_each, with_status};
use crate::support::server::{Kind, Server, wait_until};
use crate::support::shim::{Mode, Shim};
use crate::{forgetful, quota, slow};

/// A burst, a denial, a body that comes while its request waits, SCRIPT FLUSH, a restart, a new configuration with
/// calls under way.
fn main_paths(version: &'static str, kind: Kind) {
    let (mut redis, app) = (Server::start(kind, &[]), App::start());
    let shim = Shim::before(redis.port());
    let mut envoy = Setup::new(shim.port(), &app)
        .version(version)
        .configuration(forgetful(slow(10, "5s")))
        .workers(2)
        .draining(Duration::from_secs(3))
        .reloading()
        .start();
    let mut client = envoy.client();
    for left in (0..10).rev() {
        assert_eq!(quota(&client.get("/")), Some((10, left)));
    }
    let denied = client.get("/");
    assert_eq!((denied.status(), denied.text().as_str()), (429, "rate limit exceeded\n"));
    assert!(denied.number("retry-after").is_some());
    envoy.expect_counts(&[("per-ip allow", 10), ("per-ip deny", 1), ("calls ok", 11), ("calls noscript", 1)]);

    let body = b"0123456789abcdef".repeat(5 * 1024 * 1024 / 16);
    app.take();
    shim.set(Mode::Hold);
    let sent = shim.count("EVALSHA");
    let mut other = envoy.client_from("127.0.0.2");
    other.send(&Request::new("POST", "/").body(Body::Chunked(body.clone(), 50_000)));
    shim.wait_for("EVALSHA", sent + 1);
    shim.set(Mode::Pass);
    assert_eq!(quota(&other.receive()), Some((10, 9)));
    assert!(app.take().iter().any(|request| request.body == body));

    redis::cmd("FLUSHALL").exec(&mut redis.client()).unwrap();
    redis::cmd("SCRIPT").arg("FLUSH").exec(&mut redis.client()).unwrap();
    let responses = at_once(envoy.ingress(), 50, &Request::get("/"));
    assert_eq!((with_status(&responses, 200), with_status(&responses, 429)), (10, 40));

    redis.restart();
    wait_until("the empty server is asked again", || quota(&envoy.get("/")) == Some((10, 9)));
    // The other worker may have tried in vain while the server was away, and be about to try again.
    wait_until("both workers are connected again", || envoy.gauge("connected") == 2);

    shim.set(Mode::Hold);
    let (ingress, sent) = (envoy.ingress(), shim.count("EVALSHA"));
    let waiting = std::thread::spawn(move || at_once_from_each(ingress, 50, &Request::get("/")));
    shim.wait_for("EVALSHA", sent + 50);
    envoy.reload(&forgetful(slow(20, "5s")));
    wait_until("the listener is updated", || envoy.statistic("listener_manager.lds.update_success") >= 2);
    shim.set(Mode::Pass);
    let responses = waiting.join().unwrap();
    assert!(responses.iter().all(|response| quota(response).is_some_and(|(limit, _)| limit == 10)));
    wait_until("the new limit holds", || quota(&envoy.get("/")).is_some_and(|(limit, _)| limit == 20));
    drop((client, other));
    wait_until("the old machines are gone", || envoy.statistic("wasm.envoy.wasm.runtime.v8.active") == 4);
    wait_until("two workers are connected", || envoy.gauge("connected") == 2);
    envoy.finish();
}

#[test]
fn envoy_1_40_with_redis() {
    main_paths(NEWEST, Kind::Redis);
}

#[test]
fn envoy_1_40_with_valkey() {
    main_paths(NEWEST, Kind::Valkey);
}

#[test]
fn envoy_1_39_with_redis() {
    main_paths(OLDER[0], Kind::Redis);
}

#[test]
fn envoy_1_38_with_valkey() {
    main_paths(OLDER[1], Kind::Valkey);
}

#[test]
fn envoy_1_37_with_redis() {
    main_paths(OLDER[2], Kind::Redis);
}

#[test]
fn envoy_1_36_with_valkey() {
    main_paths(OLDER[3], Kind::Valkey);
}

//! The tunnel through Envoy's own Redis client, `redis_proxy`, which looks after credentials and connections.

use crate::support::app::App;
use crate::support::envoy::Setup;
use crate::support::http::{Request, at_once, with_status};
use crate::support::server::{Kind, Server, wait_until};
use crate::support::shim::Shim;
use crate::{is_waved_through, quota, slow};

const PASSWORD: &str = "correct-horse-battery-staple";
/// The user that the shipped file names, with the least rights, as the server's arguments.
pub const USER: [&str; 11] = [
    "--user",
    "meshquota",
    "on",
    ">correct-horse-battery-staple",
    "~quota:*",
    "+eval",
    "+evalsha",
    "+time",
    "+hmget",
    "+hset",
    "+pexpire",
];

/// A server that knows the user of `envoy/redis-proxy.yaml`, and nobody else.
fn guarded() -> Server {
    Server::start(Kind::Redis, &[&["--requirepass", PASSWORD], USER.as_slice()].concat())
}

fn setup(redis: u16, app: &App) -> Setup {
    let setup = Setup::new(redis, app).file("envoy/redis-proxy.yaml").variable("MESHQUOTA_REDIS_PASSWORD", PASSWORD);
    setup.configuration(slow(100, "5s"))
}

#[test]
fn redis_proxy_carries_the_calls_and_logs_in_by_itself() {
    let (redis, app) = (guarded(), App::start());
    let shim = Shim::before(redis.port());
    let envoy = setup(shim.port(), &app).workers(2).start();
    for left in (90..100).rev() {
        assert_eq!(quota(&envoy.get("/")), Some((100, left)));
    }
    // NOSCRIPT passes through it, and so does the retry with the whole script.
    let mut admin = redis.connect(&format!(":{PASSWORD}@")).unwrap();
    redis::cmd("SCRIPT").arg("FLUSH").exec(&mut admin).unwrap();
    let responses = at_once(envoy.ingress(), 150, &Request::get("/"));
    assert_eq!((with_status(&responses, 200), with_status(&responses, 429)), (90, 60));
    let (calls, evals) = (shim.count("EVALSHA") as i64, shim.count("EVAL") as i64);
    envoy.wait_for_count("per-ip deny", |times| times == 60);
    envoy.wait_for_count("calls ok", |times| times == calls);
    envoy.wait_for_count("calls noscript", |times| times == evals);
    assert_eq!((envoy.count("per-ip allow"), envoy.count("per-ip deny")), (100, 60));
    assert_eq!(envoy.count("deny_cache_hits") + envoy.count("coalesced") + calls, 160);
    for commands in shim.conversations().into_values() {
        assert_eq!(commands[0], "AUTH", "{commands:?}");
    }
    assert!(!envoy.log().contains(PASSWORD));
    envoy.finish();
}

#[test]
fn what_redis_proxy_answers_in_place_of_redis_is_an_outage() {
    let (mut redis, app) = (guarded(), App::start());
    let envoy = setup(redis.port(), &app).start();
    assert_eq!(quota(&envoy.get("/")), Some((100, 99)));
    redis.kill();
    for _ in 0..5 {
        assert!(is_waved_through(&envoy.get("/")));
    }
    envoy.wait_for_count("errors unavailable", |times| times == 5);
    assert_eq!(envoy.count("per-ip fail_allow"), 5);
    // The stream ends at redis_proxy, so it has not been lost.
    assert_eq!((envoy.gauge("connected"), envoy.count("reconnects")), (1, 0));
    assert_eq!(envoy.said().len(), 1, "{:?}", envoy.said());
    redis.restart();
    wait_until("a request is decided by Redis again", || quota(&envoy.get("/")).is_some());
    envoy.finish();
}

//! Errors that Redis answers: each is counted under its kind, decided by the failure mode, and never a denial.

use std::thread;

use redis::Commands;
use serde_json::json;

use crate::support::app::App;
use crate::support::envoy::{Envoy, Setup};
use crate::support::server::{Kind, Server, say, wait_until};
use crate::support::shim::{Mode, Shim};
use crate::{KEY, is_waved_through, quota, slow, until_decided};

/// With the server in that state, requests are let through and counted under that kind; when it is well again, they are
/// decided.
fn check(
    server: Kind,
    kind: &str,
    fall_ill: impl Fn(&mut redis::Connection),
    recover: impl Fn(&mut redis::Connection),
) {
    let (redis, app) = (Server::start(server, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app).capacity(10).start();
    assert_eq!(quota(&envoy.get("/")), Some((10, 9)));
    let mut admin = redis.client();
    fall_ill(&mut admin);
    for _ in 0..5 {
        assert!(is_waved_through(&envoy.get("/")), "{server:?} {kind}");
    }
    envoy.wait_for_count(&format!("errors {kind}"), |times| times == 5);
    assert_eq!((envoy.count("calls error"), envoy.count("per-ip fail_allow")), (5, 5));
    assert_eq!(envoy.count("per-ip deny"), 0);
    let warnings = envoy.said();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].1.contains(kind), "{warnings:?}");
    recover(&mut admin);
    until_decided(&envoy);
    envoy.finish();
}

#[test]
fn a_key_of_another_type_is_an_error_of_the_kind_type() {
    for server in Kind::ALL {
        let fall_ill = |admin: &mut redis::Connection| {
            let () = admin.set(KEY, "not a bucket").unwrap();
        };
        check(server, "type", fall_ill, |admin| say(admin, &format!("DEL {KEY}")));
        let fall_ill = |admin: &mut redis::Connection| say(admin, &format!("HSET {KEY} tokens many"));
        check(server, "type", fall_ill, |admin| say(admin, &format!("DEL {KEY}")));
    }
}

#[test]
fn a_server_out_of_memory_is_an_error_of_the_kind_oom() {
    for server in Kind::ALL {
        check(
            server,
            "oom",
            |admin| say(admin, "CONFIG SET maxmemory 1"),
            |admin| say(admin, "CONFIG SET maxmemory 0"),
        );
    }
}

#[test]
fn a_server_that_has_become_a_replica_is_an_error_of_the_kind_readonly() {
    for server in Kind::ALL {
        check(server, "readonly", |admin| say(admin, "REPLICAOF 127.0.0.1 1"), |admin| say(admin, "REPLICAOF NO ONE"));
    }
}

#[test]
fn a_server_that_has_become_a_replica_is_asked_on_a_new_connection() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    let envoy = Setup::new(shim.port(), &app).capacity(10).start();
    assert_eq!(quota(&envoy.get("/")), Some((10, 9)));
    let mut admin = redis.client();
    say(&mut admin, "REPLICAOF 127.0.0.1 1");
    assert!(is_waved_through(&envoy.get("/")));
    // The name of the server may lead to another one by now.
    wait_until("there is a new connection", || shim.accepted() >= 2);
    wait_until("the old one is closed", || shim.open() == 1);
    say(&mut admin, "REPLICAOF NO ONE");
    until_decided(&envoy);
    envoy.finish();
}

#[test]
fn a_server_that_is_busy_with_a_script_is_an_error_of_the_kind_busy() {
    for server in Kind::ALL {
        let (redis, app) = (Server::start(server, &["--busy-reply-threshold", "50"]), App::start());
        let envoy = Setup::new(redis.port(), &app).configuration(slow(10, "10s")).start();
        assert_eq!(quota(&envoy.get("/")), Some((10, 9)));
        let mut busy = redis.client();
        let script = thread::spawn(move || redis::cmd("EVAL").arg("while true do end").arg(0).exec(&mut busy));
        let mut admin = redis.client();
        wait_until("the server is busy", || {
            redis::cmd("PING").exec(&mut admin).is_err_and(|error| error.to_string().contains("BUSY"))
                || error_code(redis::cmd("PING").exec(&mut admin)).as_deref() == Some("BUSY")
        });
        for _ in 0..5 {
            assert!(is_waved_through(&envoy.get("/")), "{server:?}");
        }
        envoy.wait_for_count("errors busy", |times| times == 5);
        say(&mut admin, "SCRIPT KILL");
        assert!(script.join().unwrap().is_err());
        until_decided(&envoy);
        assert_eq!(envoy.count("per-ip deny"), 0);
        envoy.finish();
    }
}

fn error_code(result: redis::RedisResult<()>) -> Option<String> {
    result.err().and_then(|error| error.code().map(str::to_owned))
}

/// A server that answers every call by this.
fn answering(envoy: &Envoy, shim: &Shim, answer: &str) {
    shim.set(Mode::Answer(format!("{answer}\r\n").into_bytes()));
    assert!(is_waved_through(&envoy.get("/")), "{answer}");
}

#[test]
fn every_error_of_redis_is_counted_under_its_kind() {
    let cases = [
        ("-LOADING Redis is loading the dataset in memory", "loading"),
        ("-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", "unavailable"),
        ("-CLUSTERDOWN The cluster is down", "cluster"),
        ("-MOVED 3999 127.0.0.1:6381", "cluster"),
        ("-ASK 3999 127.0.0.1:6381", "cluster"),
        ("-TRYAGAIN Multiple keys request during rehashing of slot", "cluster"),
        ("-CROSSSLOT Keys in request don't hash to the same slot", "cluster"),
        ("-ERR max number of clients reached", "unavailable"),
        ("-NOAUTH Authentication required.", "auth"),
        ("-WRONGPASS invalid username-password pair or user is disabled.", "auth"),
        ("-NOPERM this user has no permissions to run the 'evalsha' command", "noperm"),
        ("-BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.", "busy"),
        ("-OOM command not allowed when used memory > 'maxmemory'.", "oom"),
        ("-READONLY You can't write against a read only replica.", "readonly"),
        ("-WRONGTYPE Operation against a key holding the wrong kind of value", "type"),
        ("-ERR unknown command 'EVALSHA', with args beginning with: 'a' 'b'", "other"),
        ("-upstream failure", "unavailable"),
        ("-no upstream host", "unavailable"),
        ("-", "other"),
    ];
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    let envoy = Setup::new(shim.port(), &app).capacity(1000).start();
    let decided = || wait_until("a request is decided by Redis", || quota(&envoy.get("/")).is_some());
    for (answer, kind) in cases {
        decided();
        let name = format!("errors {kind}");
        let before = envoy.count(&name);
        answering(&envoy, &shim, answer);
        wait_until(&format!("{answer} is counted as {kind}"), || envoy.count(&name) == before + 1);
        shim.set(Mode::Pass);
    }
    decided();
    assert_eq!(envoy.count("per-ip fail_allow"), envoy.count("calls error"));
    assert_eq!(envoy.count("per-ip deny"), 0);
    envoy.finish();
}

#[test]
fn a_server_that_never_knows_the_script_is_asked_twice_and_no_more() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    let envoy = Setup::new(shim.port(), &app).capacity(10).start();
    shim.set(Mode::Answer(b"-NOSCRIPT No matching script. Please use EVAL.\r\n".to_vec()));
    for _ in 0..3 {
        assert!(is_waved_through(&envoy.get("/")));
    }
    assert_eq!((shim.count("EVALSHA"), shim.count("EVAL")), (3, 3));
    envoy.expect_counts(&[("per-ip fail_allow", 3), ("calls noscript", 3), ("calls error", 3), ("errors other", 3)]);
    envoy.finish();
}

#[test]
fn a_denial_of_one_rule_counts_though_another_could_not_be_asked() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app)
        .configuration(json!({
            "redis": {"timeout": "5s"},
            "rules": [
                {"name": "sick", "limits": [{"capacity": 10, "refill": "1/day"}]},
                {"name": "well", "limits": [{"capacity": 2, "refill": "1/day"}]},
            ],
        }))
        .start();
    let () = redis.client().set("quota:{sick:127.0.0.1}:0", "not a bucket").unwrap();
    for _ in 0..2 {
        assert!(is_waved_through(&envoy.get("/")));
    }
    let response = envoy.get("/");
    assert_eq!((response.status(), quota(&response)), (429, Some((2, 0))));
    envoy.wait_for_count("errors type", |times| times == 3);
    envoy.finish();
}

//! Faults of Redis that an operator makes: connections killed and refused, hosts replaced, data thrown away, a server that
//! sleeps, one that never ends its reply.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use redis::Commands;
use serde_json::json;

use crate::support::app::App;
use crate::support::envoy::{Endpoints, PATIENT, Setup};
use crate::support::server::{DEADLINE, Kind, Server, say, wait_until};
use crate::support::shim::{Mode, Shim};
use crate::{KEY, forgetful, is_waved_through, quota, slow, until_decided};

fn left(redis: &Server) -> u64 {
    redis.client().hget::<_, _, String>(KEY, "tokens").unwrap().parse::<f64>().unwrap() as u64
}

#[test]
fn a_server_that_takes_no_more_connections_is_an_outage_and_is_tried_again() {
    for kind in Kind::ALL {
        let (redis, app) = (Server::start(kind, &[]), App::start());
        let mut admin = redis.client();
        say(&mut admin, "CONFIG SET maxclients 1");
        let envoy = Setup::new(redis.port(), &app).configuration(slow(10, "5s")).unconnected().start();
        for _ in 0..3 {
            assert!(is_waved_through(&envoy.get("/")), "{kind:?}");
        }
        envoy.wait_for_failed_calls(3, "unavailable");
        say(&mut admin, "CONFIG SET maxclients 100");
        until_decided(&envoy);
        assert_eq!(envoy.count("per-ip deny"), 0);
        envoy.finish();
    }
}

#[test]
fn connections_that_are_killed_all_the_time_charge_no_request_twice() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let mut configuration = slow(100_000, "5s");
    configuration["redis"]["breaker"] = json!({"failures": 1000});
    let envoy = Setup::new(redis.port(), &app).configuration(configuration).workers(2).start();
    let ended = AtomicBool::new(false);
    let (mut decided, mut waved) = (0, 0);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut admin = redis.client();
            let deadline = Instant::now() + DEADLINE;
            while !ended.load(Ordering::SeqCst) && Instant::now() < deadline {
                let () = redis::cmd("CLIENT").arg("KILL").arg("TYPE").arg("normal").query(&mut admin).unwrap();
                thread::sleep(Duration::from_millis(20));
            }
        });
        let mut clients = [envoy.client(), envoy.client(), envoy.client()];
        wait_until("some are decided and some are not", || {
            match quota(&clients[(decided + waved) as usize % 3].get("/")) {
                Some(_) => decided += 1,
                None => waved += 1,
            }
            decided > 20 && waved > 0
        });
        ended.store(true, Ordering::SeqCst);
    });
    wait_until("no call is in flight", || envoy.gauge("redis_in_flight") == 0);
    let gone = 100_000 - left(&redis);
    assert!(
        (decided..=decided + waved).contains(&gone),
        "{gone} are gone for {decided} decided and {waved} waved through"
    );
    until_decided(&envoy);
    envoy.finish();
}

#[test]
fn data_that_is_thrown_away_fills_the_buckets_and_breaks_nothing() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app).configuration(forgetful(slow(10, PATIENT))).start();
    let mut client = envoy.client();
    for round in 0..3 {
        for left in (0..10).rev() {
            assert_eq!(quota(&client.get("/")), Some((10, left)), "round {round}");
        }
        assert_eq!(client.get("/").status(), 429);
        say(&mut redis.client(), "FLUSHALL");
    }
    envoy.expect_counts(&[("per-ip allow", 30), ("per-ip deny", 3), ("calls ok", 33), ("calls noscript", 1)]);
    envoy.finish();
}

#[test]
fn a_server_that_sleeps_answers_too_late_and_then_as_ever() {
    for kind in Kind::ALL {
        let (redis, app) = (Server::start(kind, &["--enable-debug-command", "local"]), App::start());
        let envoy = Setup::new(redis.port(), &app).configuration(slow(100, "100ms")).start();
        until_decided(&envoy);
        let before = left(&redis);
        let mut asleep = redis.client();
        let sleep = thread::spawn(move || redis::cmd("DEBUG").arg("SLEEP").arg(1).exec(&mut asleep));
        let mut waved = 0;
        wait_until("a request is waved through", || {
            waved += u64::from(is_waved_through(&envoy.get("/")));
            waved > 0
        });
        sleep.join().unwrap().unwrap();
        until_decided(&envoy);
        assert!(before - left(&redis) <= app.count() as u64, "{kind:?}: a call was charged twice");
        assert_eq!(envoy.count("per-ip deny"), 0);
        envoy.finish();
    }
}

#[test]
fn a_reply_that_never_ends_is_cut_and_costs_no_memory() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    let envoy = Setup::new(shim.port(), &app).configuration(slow(10_000, "5s")).start();
    until_decided(&envoy);
    let memory = envoy.resident_kib();
    for head in ["$1000000000\r\n", "+", "*1000000000\r\n", "*3\r\n$16000\r\n"] {
        shim.set(Mode::Answer([head.as_bytes(), &vec![b'x'; 1 << 20]].concat()));
        let before = envoy.count("errors protocol");
        assert!(is_waved_through(&envoy.get("/")), "{head:?}");
        envoy.wait_for_count("errors protocol", |times| times > before);
        shim.set(Mode::Pass);
        until_decided(&envoy);
    }
    // A few buffers of Envoy itself, and none of the megabytes in the module.
    assert!(envoy.resident_kib() < memory + 64 * 1024, "from {memory} to {} KiB", envoy.resident_kib());
    envoy.finish();
}

#[test]
fn a_host_that_is_replaced_is_left_for_the_new_one() {
    let (mut old, new, app) = (Server::start(Kind::Redis, &[]), Server::start(Kind::Redis, &[]), App::start());
    let endpoints = Endpoints::of(&[old.port()]);
    let envoy = Setup::new(old.port(), &app).configuration(slow(10, "5s")).found_by(&endpoints).start();
    assert_eq!(quota(&envoy.get("/")), Some((10, 9)));
    endpoints.set(&[old.port(), new.port()]);
    wait_until("there are two", || envoy.statistic("cluster.meshquota_redis.membership_total") == 2);
    assert_eq!(quota(&envoy.get("/")), Some((10, 8)), "a host that is added changes nothing");
    endpoints.set(&[new.port()]);
    wait_until("there is one", || envoy.statistic("cluster.meshquota_redis.membership_total") == 1);
    old.kill();
    wait_until("the new one is asked", || quota(&envoy.get("/")).is_some_and(|_| left(&new) < 10));
    envoy.finish();
}

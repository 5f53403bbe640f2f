//! Exact totals, however many requests come at once and wherever they come in.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use redis::Commands;

use crate::support::app::App;
use crate::support::envoy::{PATIENT, Setup};
use crate::support::http::{Client, Message, Request, at_once, with_status};
use crate::support::server::{Kind, Server, wait_until};
use crate::support::shim::Shim;
use crate::{KEY, forgetful, slow};

/// Many clients at once, each with a connection of its own and so many requests. Returns how many got each status:
/// 200, 429, another.
fn load(to: SocketAddr, clients: usize, requests: usize) -> [usize; 3] {
    let of_one = || {
        let mut client = Client::connect(to);
        (0..requests).map(|_| client.get("/").status()).collect::<Vec<_>>()
    };
    let statuses = thread::scope(|scope| {
        let clients = (0..clients).map(|_| scope.spawn(of_one)).collect::<Vec<_>>();
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect::<Vec<_>>()
    });
    let count = |status| statuses.iter().filter(|other| **other == status).count();
    let (admitted, denied) = (count(200), count(429));
    [admitted, denied, statuses.len() - admitted - denied]
}

fn tokens(redis: &Server) -> f64 {
    redis.client().hget::<_, _, String>(KEY, "tokens").unwrap().parse().unwrap()
}

#[test]
fn two_envoys_of_two_workers_admit_together_exactly_what_the_bucket_holds() {
    for kind in Kind::ALL {
        let (redis, app) = (Server::start(kind, &[]), App::start());
        let start = || Setup::new(redis.port(), &app).configuration(forgetful(slow(300, PATIENT))).workers(2).start();
        let (one, other) = (start(), start());
        let totals = thread::scope(|scope| {
            let (one, other) =
                (scope.spawn(|| load(one.ingress(), 12, 25)), scope.spawn(|| load(other.ingress(), 12, 25)));
            [one.join().unwrap(), other.join().unwrap()]
        });
        assert_eq!(totals.iter().map(|[admitted, ..]| admitted).sum::<usize>(), 300, "{kind:?} {totals:?}");
        assert_eq!(totals.iter().map(|[_, denied, _]| denied).sum::<usize>(), 300, "{kind:?} {totals:?}");
        assert_eq!(app.count(), 300);
        assert!(tokens(&redis) < 1.0);
        for (envoy, [admitted, denied, _]) in [(&one, totals[0]), (&other, totals[1])] {
            wait_until("each was asked for, by itself or with others", || {
                envoy.count("calls ok") + envoy.count("coalesced") == 300
            });
            assert_eq!(envoy.count("per-ip allow"), admitted as i64);
            assert_eq!(envoy.count("per-ip deny"), denied as i64);
            // Nothing went wrong on the way: these, and retries with the whole script, are all there is.
            let mut names = envoy.counts().into_keys().filter(|name| name != "calls noscript").collect::<Vec<_>>();
            names.retain(|name| !["per-ip allow", "per-ip deny", "calls ok", "coalesced"].contains(&name.as_str()));
            assert_eq!(names, [""; 0]);
            assert_eq!(envoy.statistic("cluster.meshquota_redis.upstream_cx_total"), 2, "one connection a worker");
            for worker in 0..2 {
                let name = format!("listener.127.0.0.1_0.worker_{worker}.downstream_cx_total");
                assert!(envoy.statistic(&name) > 0, "worker {worker} had nothing to do");
            }
        }
        one.finish();
        other.finish();
    }
}

#[test]
fn a_script_flush_under_200_requests_at_once_costs_one_eval_a_call_and_waves_nobody_through() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    let envoy = Setup::new(shim.port(), &app).capacity(150).workers(2).start();
    assert_eq!(envoy.get("/").status(), 200);
    shim.forget();
    let mut connection = redis.client();
    redis::cmd("SCRIPT").arg("FLUSH").exec(&mut connection).unwrap();
    let responses: Vec<Message> = at_once(envoy.ingress(), 200, &Request::get("/"));
    assert_eq!((with_status(&responses, 200), with_status(&responses, 429)), (149, 51));
    assert!(responses.iter().all(|response| response.header("x-ratelimit-limit").is_some()), "one was waved through");
    let (calls, evals) = (shim.count("EVALSHA") as i64, shim.count("EVAL") as i64);
    assert!((1..=calls).contains(&evals), "{evals} EVAL");
    envoy.wait_for_count("per-ip deny", |times| times == 51);
    envoy.wait_for_count("calls ok", |times| times == 1 + calls);
    envoy.wait_for_count("calls noscript", |times| times == 1 + evals);
    assert_eq!((envoy.count("per-ip allow"), envoy.count("per-ip deny")), (150, 51));
    assert_eq!(envoy.count("deny_cache_hits") + envoy.count("coalesced") + calls, 200);
    assert_eq!(app.count(), 150);
    assert!(tokens(&redis) < 1.0);
    envoy.finish();
}

#[test]
fn scripts_that_are_flushed_all_the_time_change_no_total() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app).capacity(200).workers(2).start();
    let done = AtomicBool::new(false);
    let totals = thread::scope(|scope| {
        scope.spawn(|| {
            let mut connection = redis.client();
            while !done.load(Ordering::SeqCst) {
                redis::cmd("SCRIPT").arg("FLUSH").exec(&mut connection).unwrap();
            }
        });
        let totals = load(envoy.ingress(), 10, 40);
        done.store(true, Ordering::SeqCst);
        totals
    });
    assert_eq!(totals, [200, 200, 0]);
    let counts = envoy.counts();
    assert!(!counts.contains_key("per-ip fail_allow"), "{counts:?}");
    envoy.wait_for_count("calls noscript", |times| times > 0);
    envoy.finish();
}

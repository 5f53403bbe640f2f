//! A master that is one no longer.

use redis::Commands;
use serde_json::json;

use crate::support::app::App;
use crate::support::envoy::{Setup, local};
use crate::support::server::{Kind, Server, wait_until};
use crate::support::shim::Shim;
use crate::{KEY, is_waved_through, quota, slow, until_decided};

fn replicate(replica: &Server, master: &Server) {
    redis::cmd("REPLICAOF").arg("127.0.0.1").arg(master.port()).exec(&mut replica.client()).unwrap();
}

fn promote(replica: &Server) {
    redis::cmd("REPLICAOF").arg("NO").arg("ONE").exec(&mut replica.client()).unwrap();
}

/// Waits until a replica has the bucket with no more than so many tokens.
fn wait_for_copy(replica: &Server, tokens: f64) {
    wait_until("the replica has the bucket", || {
        let left = replica.client().hget::<_, _, Option<f64>>(KEY, "tokens");
        left.is_ok_and(|left| left.is_some_and(|left| left < tokens + 1.0))
    });
}

#[test]
fn a_server_that_becomes_a_replica_is_left_for_the_master_behind_its_name() {
    for kind in Kind::ALL {
        let (first, second, app) = (Server::start(kind, &[]), Server::start(kind, &[]), App::start());
        replicate(&second, &first);
        let shim = Shim::before(first.port());
        let envoy = Setup::new(shim.port(), &app).configuration(slow(100, "5s")).start();
        for left in (95..100).rev() {
            assert_eq!(quota(&envoy.get("/")), Some((100, left)));
        }
        wait_for_copy(&second, 95.0);
        promote(&second);
        replicate(&first, &second);
        shim.lead_to(second.port());
        // The old connection still stands, and what is at its end refuses to write.
        assert!(is_waved_through(&envoy.get("/")), "{kind:?}");
        let left = until_decided(&envoy).1;
        assert!((80..95).contains(&left), "{kind:?}: what was counted is not forgotten: {left}");
        assert_eq!(quota(&envoy.get("/")), Some((100, left - 1)));
        envoy.wait_for_count("errors readonly", |times| times >= 1);
        envoy.wait_for_count("reconnects", |times| times == 1);
        wait_until("the worker is connected", || envoy.gauge("connected") == 1);
        envoy.finish();
    }
}

#[test]
fn of_several_addresses_the_masters_is_kept_to_and_a_failover_is_followed() {
    for kind in Kind::ALL {
        let (mut first, second, app) = (Server::start(kind, &[]), Server::start(kind, &[]), App::start());
        replicate(&second, &first);
        let hosts = [&second, &first].map(|server| json!({"endpoint": {"address": local(server.port())}}));
        let envoy = Setup::new(first.port(), &app)
            .file("envoy/redis-replicas.yaml")
            .configuration(slow(100, "5s"))
            .workers(2)
            .tweak(move |document| {
                document.cluster("meshquota_redis")["load_assignment"]["endpoints"][0]["lb_endpoints"] = json!(hosts);
            })
            .start();
        for left in (90..100).rev() {
            assert_eq!(quota(&envoy.get("/")), Some((100, left)));
        }
        assert_eq!(envoy.count("errors readonly"), 0, "a replica was asked: {:?}", envoy.counts());
        wait_for_copy(&second, 90.0);
        first.kill();
        assert!(is_waved_through(&envoy.get("/")));
        promote(&second);
        let left = until_decided(&envoy).1;
        assert!((60..90).contains(&left), "what was counted is not forgotten: {left}");
        // And back: the master is told to follow the other one, and has its connections closed for it.
        first.restart();
        replicate(&first, &second);
        wait_for_copy(&first, left as f64);
        promote(&first);
        replicate(&second, &first);
        wait_until("the first one is asked again", || {
            envoy.get("/");
            let calls: String = redis::cmd("INFO").arg("commandstats").query(&mut first.client()).unwrap();
            calls.contains("cmdstat_evalsha")
        });
        assert!(until_decided(&envoy).1 < left);
        envoy.finish();
    }
}

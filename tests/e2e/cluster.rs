//! Redis Cluster behind the tunnel: slots, redirections, and a master that dies.

use redis::Commands;
use serde_json::json;

use crate::support::app::App;
use crate::support::cluster::Cluster;
use crate::support::envoy::{Envoy, Setup, local};
use crate::support::server::{Kind, wait_until};
use crate::{is_waved_through, quota, slow};

const PASSWORD: &str = "correct-horse-battery-staple";
/// The user that the shipped file names, with the least rights, as the servers' arguments. Envoy asks for the map of slots
/// and the state of replicas as well.
const USER: [&str; 14] = [
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
    "+cluster|slots",
    "+asking",
    "+readonly",
];

fn start(cluster: &Cluster, app: &App, capacity: u64) -> Envoy {
    let seeds = cluster.nodes.iter().take(3).map(|node| json!({"endpoint": {"address": local(node.port())}}));
    let seeds = seeds.collect::<Vec<_>>();
    Setup::new(cluster.nodes[0].port(), app)
        .file("envoy/redis-cluster.yaml")
        .variable("MESHQUOTA_REDIS_PASSWORD", PASSWORD)
        .configuration(slow(capacity, "5s"))
        .tweak(move |document| {
            document.cluster("meshquota_redis")["load_assignment"]["endpoints"][0]["lb_endpoints"] = json!(seeds);
        })
        .start()
}

fn key(client: &str) -> String {
    format!("quota:{{per-ip:{client}}}:0")
}

#[test]
fn each_bucket_is_in_its_slot_and_a_slot_that_moves_takes_its_buckets_along() {
    for kind in Kind::ALL {
        let (cluster, app) = (Cluster::start(kind, &USER), App::start());
        let envoy = start(&cluster, &app, 10);
        wait_until("Envoy knows the slots", || quota(&envoy.client_from("127.0.0.9").get("/")).is_some());
        let clients = (20..50).map(|number| format!("127.0.0.{number}")).collect::<Vec<_>>();
        for address in &clients {
            let mut client = envoy.client_from(address);
            let admitted = (0..12).filter(|_| client.get("/").status() == 200).count();
            assert_eq!(admitted, 10, "{address}");
        }
        for node in &cluster.nodes[..3] {
            let keys: Vec<String> = redis::cmd("KEYS").arg("quota:*").query(&mut node.client()).unwrap();
            assert!(keys.len() > 2, "a master has {keys:?}");
        }
        // A bucket moves from master to master while it is used; none of its tokens is lost or comes back.
        let mut client = envoy.client_from("127.0.0.77");
        let mut left = 10;
        for round in 0..3 {
            assert_eq!(quota(&client.get("/")), Some((10, left - 1)), "round {round}");
            left -= 1;
            let from = cluster.owner(&key("127.0.0.77"));
            let to = (from + 1) % 3;
            std::thread::scope(|scope| {
                let moving = scope.spawn(|| cluster.move_slot(&key("127.0.0.77"), to));
                // In the middle of it, from the old node or, by ASK, from the new one.
                let mut other = envoy.client_from("127.0.0.77");
                std::thread::sleep(std::time::Duration::from_millis(50));
                assert_eq!(quota(&other.get("/")), Some((10, left - 1)), "round {round}");
                left -= 1;
                moving.join().unwrap();
            });
            assert_eq!(cluster.owner(&key("127.0.0.77")), to);
        }
        assert_eq!(quota(&client.get("/")), Some((10, left - 1)));
        assert_eq!(envoy.count("calls error"), 0, "{:?}", envoy.counts());
        assert!(!envoy.log().contains(PASSWORD));
        envoy.finish();
    }
}

#[test]
fn a_master_that_dies_is_followed_by_its_replica_without_a_restart_of_anything() {
    for kind in Kind::ALL {
        let (mut cluster, app) = (Cluster::start(kind, &USER), App::start());
        let envoy = start(&cluster, &app, 1000);
        wait_until("Envoy knows the slots", || quota(&envoy.client_from("127.0.0.9").get("/")).is_some());
        let mut client = envoy.client_from("127.0.0.88");
        for left in (990..1000).rev() {
            assert_eq!(quota(&client.get("/")), Some((1000, left)));
        }
        let owner = cluster.owner(&key("127.0.0.88"));
        let replica = owner + 3;
        wait_until("the replica has the bucket", || {
            let mut connection = cluster.nodes[replica].client();
            redis::cmd("READONLY").exec(&mut connection).unwrap();
            connection
                .hget::<_, _, Option<f64>>(key("127.0.0.88"), "tokens")
                .unwrap()
                .is_some_and(|tokens| tokens < 991.0)
        });
        cluster.nodes[owner].kill();
        assert!(is_waved_through(&client.get("/")), "nothing fails with it");
        let mut found = None;
        wait_until("the replica decides", || {
            found = quota(&client.get("/"));
            found.is_some()
        });
        // What the master had counted is not forgotten.
        let (limit, left) = found.unwrap();
        assert!(limit == 1000 && left < 990, "{left}");
        assert_eq!(quota(&client.get("/")), Some((1000, left - 1)));
        envoy.finish();
    }
}

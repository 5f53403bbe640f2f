//! A Redis Cluster of real processes: three masters, each with a replica.

use super::server::{Kind, Server, free_port, wait_until};

const MASTERS: usize = 3;
const SLOTS: u16 = 16384;

/// Six servers of one cluster. The first three were its masters at the beginning, and each has one of the others as its
/// replica.
pub struct Cluster {
    pub nodes: Vec<Server>,
}

impl Cluster {
    /// Starts a cluster, and waits until it is one. `arguments` are for each of its servers.
    pub fn start(kind: Kind, arguments: &[&str]) -> Self {
        let node = |_| {
            let bus = free_port().to_string();
            let mut all = vec!["--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-port", &bus];
            all.extend(["--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0"]);
            all.extend(arguments);
            (Server::start(kind, &all), bus)
        };
        let nodes = (0..2 * MASTERS).map(node).collect::<Vec<_>>();
        let port = |node: usize| nodes[node].0.port().to_string();
        for (number, (server, _)) in nodes.iter().enumerate() {
            command(server, &["CLUSTER", "SET-CONFIG-EPOCH", &(number + 1).to_string()]);
        }
        for (number, (server, _)) in nodes.iter().take(MASTERS).enumerate() {
            let share = |number: usize| (usize::from(SLOTS) * number / MASTERS) as u16;
            let (first, last) = (share(number).to_string(), (share(number + 1) - 1).to_string());
            command(server, &["CLUSTER", "ADDSLOTSRANGE", &first, &last]);
        }
        for (number, (_, bus)) in nodes.iter().enumerate().skip(1) {
            command(&nodes[0].0, &["CLUSTER", "MEET", "127.0.0.1", &port(number), bus]);
        }
        let nodes = nodes.into_iter().map(|(server, _)| server).collect::<Vec<_>>();
        wait_until("all nodes know each other", || nodes.iter().all(|node| said(node, "cluster_known_nodes:6")));
        for (number, replica) in nodes.iter().enumerate().skip(MASTERS) {
            let master = text(&nodes[number - MASTERS], &["CLUSTER", "MYID"]);
            wait_until("its master is known to the replica", || {
                redis::cmd("CLUSTER").arg("REPLICATE").arg(&master).exec(&mut replica.client()).is_ok()
            });
        }
        wait_until("the cluster is one", || nodes.iter().all(|node| said(node, "cluster_state:ok")));
        wait_until("the replicas have the data", || {
            nodes
                .iter()
                .skip(MASTERS)
                .all(|node| text(node, &["INFO", "replication"]).contains("master_link_status:up"))
        });
        Self { nodes }
    }

    /// The node that has a key: its place among the nodes.
    pub fn owner(&self, key: &str) -> usize {
        let is_owner = |node: &&Server| redis::cmd("EXISTS").arg(key).query::<i64>(&mut node.client()).is_ok();
        let masters = || self.nodes.iter().filter(|node| node.runs() && role(node) == "master");
        let owner = masters().find(is_owner).expect("a master has the slot");
        self.nodes.iter().position(|node| std::ptr::eq(node, owner)).unwrap()
    }

    /// Moves the slot of a key to another node, as a reshard does it: keys first, then the slot.
    pub fn move_slot(&self, key: &str, to: usize) {
        let (from, to) = (&self.nodes[self.owner(key)], &self.nodes[to]);
        let slot = redis::cmd("CLUSTER").arg("KEYSLOT").arg(key).query::<u16>(&mut from.client()).unwrap().to_string();
        let [from_id, to_id] = [from, to].map(|node| text(node, &["CLUSTER", "MYID"]));
        command(to, &["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]);
        command(from, &["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]);
        let keys: Vec<String> =
            redis::cmd("CLUSTER").arg("GETKEYSINSLOT").arg(&slot).arg(100).query(&mut from.client()).unwrap();
        let port = to.port().to_string();
        for key in keys {
            command(from, &["MIGRATE", "127.0.0.1", &port, &key, "0", "5000"]);
        }
        // For a moment the one node says ASK and the other has the key.
        std::thread::sleep(std::time::Duration::from_millis(100));
        for node in [to, from] {
            command(node, &["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]);
        }
    }
}

fn role(node: &Server) -> String {
    let (role,): (String,) = match redis::cmd("ROLE").query::<Vec<redis::Value>>(&mut node.client()) {
        Ok(values) => (redis::from_redis_value(values.into_iter().next().unwrap()).unwrap(),),
        Err(_) => (String::new(),),
    };
    role
}

fn command(node: &Server, words: &[&str]) {
    redis::cmd(words[0]).arg(&words[1..]).exec(&mut node.client()).unwrap_or_else(|error| panic!("{words:?}: {error}"));
}

fn text(node: &Server, words: &[&str]) -> String {
    redis::cmd(words[0]).arg(&words[1..]).query(&mut node.client()).unwrap()
}

fn said(node: &Server, what: &str) -> bool {
    text(node, &["CLUSTER", "INFO"]).contains(what)
}

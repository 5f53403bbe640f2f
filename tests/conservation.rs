//! Nothing is lost and nothing is made: after any mix of admitted and denied requests, over several workers whose replies
//! come late and in pieces, the tokens that are gone from a real server's buckets are those of the requests that were
//! admitted.
//!
//! Time stands still here (the clock is the proxy's, and does not move), so that nothing is refilled and levels can be
//! compared exactly.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod support;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use meshquota::config::Config;
use meshquota::decision::Decision;
use meshquota::limiter::{Admission, Effect, Limiter, RequestId};
use meshquota::request::Facts;
use meshquota::rule::{self, Application};
use meshquota::script;
use proptest::prelude::*;
use proptest::sample::select;
use redis::Commands;
use redis_protocol::resp2::decode::decode_bytes_mut;

use support::server::{DEADLINE, Kind, Server};

/// A request, as far as the rules here ask about it.
#[derive(Clone, Debug)]
struct Told {
    path: &'static str,
    client: &'static str,
    cost: u64,
}

impl Facts for Told {
    fn header(&self, name: &str) -> Option<Vec<u8>> {
        match name {
            ":path" => Some(self.path.as_bytes().to_vec()),
            "x-cost" => Some(self.cost.to_string().into_bytes()),
            _ => None,
        }
    }

    fn property(&self, path: &[&str]) -> Option<Vec<u8>> {
        (path == ["source", "address"]).then(|| format!("{}:1", self.client).into_bytes())
    }
}

/// One worker: its limiter, its connection, and what Redis has said that it has not heard yet.
struct Worker {
    limiter: Limiter,
    stream: TcpStream,
    unheard: VecDeque<u8>,
    waiting: HashMap<RequestId, Told>,
    /// What became of each request that did not go by all rules.
    ends: Vec<(Told, End)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Admitted,
    Denied,
    Left,
}

/// Time does not move, but for the first tick.
struct Clock(Instant);

impl Worker {
    fn new(config: &str, port: u16, clock: &Clock) -> Self {
        let config = Config::from_json(config.as_bytes()).unwrap_or_else(|errors| panic!("{errors}\n{config}"));
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut limiter = Limiter::new(config, 7, clock.0 - Duration::from_secs(1));
        limiter.tick(clock.0);
        assert_eq!(limiter.next_effect(clock.0), Some(Effect::Open));
        limiter.connected(clock.0);
        Self { limiter, stream, unheard: VecDeque::new(), waiting: HashMap::new(), ends: Vec::new() }
    }

    fn request(&mut self, clock: &Clock, id: RequestId, told: Told) {
        let met = self.limiter.meets(&told);
        match self.limiter.request(clock.0, || 1_700_000_000_000, id, met) {
            Admission::NotLimited => {}
            Admission::Waits => drop(self.waiting.insert(id, told)),
            Admission::Decided(decision) => self.decided(told, &decision),
        }
        self.carry_out(clock);
    }

    /// A request was decided by Redis, or by a denial of its that is known.
    fn decided(&mut self, told: Told, decision: &Decision) {
        assert!(decision.verdict.quota().is_some() || decision.verdict.admits(), "{decision:?}");
        let end = if decision.verdict.admits() { End::Admitted } else { End::Denied };
        self.ends.push((told, end));
    }

    /// The client of a request leaves.
    fn leave(&mut self, id: RequestId) {
        if let Some(told) = self.waiting.remove(&id) {
            self.limiter.gone(id);
            self.ends.push((told, End::Left));
        }
    }

    /// Hears so many of the bytes that have come.
    fn hear(&mut self, clock: &Clock, bytes: usize) {
        let bytes = self.unheard.drain(..bytes.min(self.unheard.len())).collect::<Vec<_>>();
        self.limiter.received(clock.0, &bytes);
        self.carry_out(clock);
    }

    fn carry_out(&mut self, clock: &Clock) {
        while let Some(effect) = self.limiter.next_effect(clock.0) {
            match effect {
                Effect::Send(bytes) => self.ask(&bytes),
                Effect::Decide(id, decision) => {
                    let told = self.waiting.remove(&id).expect("it waits");
                    self.decided(told, &decision);
                }
                other => panic!("nothing goes wrong here: {other:?}"),
            }
        }
    }

    /// Sends commands, and waits until Redis has carried them out.
    fn ask(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
        let mut commands = BytesMut::from(bytes);
        let mut replies = BytesMut::new();
        while decode_bytes_mut(&mut commands).unwrap().is_some() {
            loop {
                let mut rest = replies.clone();
                if let Some((_, taken, _)) = decode_bytes_mut(&mut rest).unwrap() {
                    self.unheard.extend(replies.split_to(taken));
                    break;
                }
                let mut piece = [0; 4096];
                let read = self.stream.read(&mut piece).expect("Redis answers");
                assert!(read > 0);
                replies.extend_from_slice(&piece[..read]);
            }
        }
        assert!(commands.is_empty() && replies.is_empty());
    }
}

#[derive(Clone, Debug)]
enum Step {
    Request(Told),
    Hear(usize),
    Leave(RequestId),
}

fn told() -> impl Strategy<Value = Told> {
    let (paths, clients) = (select(vec!["/", "/a", "/a/b", "/c"]), select(vec!["192.0.2.1", "192.0.2.2", "10.0.0.1"]));
    (paths, clients, 0..7_u64).prop_map(|(path, client, cost)| Told { path, client, cost })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => told().prop_map(Step::Request),
        5 => select(vec![1, 7, 30, 1000]).prop_map(Step::Hear),
        1 => (0..60_u32).prop_map(Step::Leave),
    ]
}

/// A rule that overlaps with others, of a name of its own.
fn rule() -> impl Strategy<Value = String> {
    let limit = || (1..12_u64).prop_map(|capacity| format!(r#"{{"capacity": {capacity}, "refill": "1/10years"}}"#));
    let limits = || proptest::collection::vec(limit(), 1..4).prop_map(|limits| limits.join(", "));
    let scope = select(vec!["", r#""match": {"path_prefix": "/a"},"#, r#""unless": {"path": "/c"},"#]);
    let key = select(vec!["", r#""key": ["path"],"#, r#""key": ["client_ip", "path"],"#, r#""key": [],"#]);
    let cost = select(vec!["", r#""cost": 3,"#, r#""cost": {"header": "x-cost", "max": 5},"#]);
    let overrides = (any::<bool>(), limits()).prop_map(|(are_there, limits)| {
        let overrides = format!(r#""overrides": [{{"cidrs": ["10.0.0.0/8"], "limits": [{limits}]}}],"#);
        if are_there { overrides } else { String::new() }
    });
    (scope, key, cost, overrides, proptest::bool::weighted(0.2), limits()).prop_map(
        |(scope, key, cost, overrides, shadow, limits)| {
            // Callers with other limits have other buckets: a lower capacity would cut what a higher one left.
            let overrides = if key.is_empty() || key.contains("client_ip") { overrides } else { String::new() };
            format!(r#"{scope} {key} {cost} {overrides} "shadow": {shadow}, "limits": [{limits}]"#)
        },
    )
}

fn check(server: &Server, known_denials: u32, rules: &[String], steps: &[(usize, Step)]) -> Result<(), TestCaseError> {
    let _: () = redis::cmd("FLUSHALL").query(&mut server.client()).unwrap();
    let _: String = redis::cmd("SCRIPT").arg("LOAD").arg(script::SOURCE).query(&mut server.client()).unwrap();
    let rules = rules.iter().enumerate().map(|(number, rule)| format!(r#"{{"name": "r{number}", {rule}}}"#));
    let rules = rules.collect::<Vec<_>>().join(", ");
    let config = format!(r#"{{"clock": "proxy", "deny_cache": {{"entries": {known_denials}}}, "rules": [{rules}]}}"#);
    let clock = Clock(Instant::now());
    let mut workers = (0..3).map(|_| Worker::new(&config, server.port(), &clock)).collect::<Vec<_>>();
    for (id, (worker, step)) in (0..).zip(steps) {
        let worker = &mut workers[*worker];
        match step {
            Step::Request(told) => worker.request(&clock, id, told.clone()),
            Step::Hear(bytes) => worker.hear(&clock, *bytes),
            Step::Leave(id) => worker.leave(*id),
        }
    }
    for worker in &mut workers {
        // What is given back is answered as well.
        while !worker.unheard.is_empty() {
            worker.hear(&clock, usize::MAX);
        }
        prop_assert!(worker.waiting.is_empty(), "a request was never decided");
    }
    // What each bucket should have lost: to those that were admitted, and at most to those that left as well.
    let config = Config::from_json(config.as_bytes()).unwrap();
    let mut taken: BTreeMap<String, (u64, u64, u64)> = BTreeMap::new();
    for (told, end) in workers.iter().flat_map(|worker| &worker.ends) {
        for application in rule::apply(&config, told) {
            let Application::Charge(charge) = application else { continue };
            for (key, limit) in charge.buckets() {
                let (_, least, most) = taken.entry(key.to_owned()).or_insert((limit.capacity().get(), 0, 0));
                // A rule that only watches admits what it cannot charge.
                *least += if *end == End::Admitted && !charge.shadow { charge.cost.get() } else { 0 };
                *most += if *end == End::Denied { 0 } else { charge.cost.get() };
            }
        }
    }
    let mut client = server.client();
    let keys: Vec<String> = client.keys("*").unwrap();
    for key in &keys {
        prop_assert!(taken.contains_key(key), "{key} lost something to nobody");
    }
    for (key, (capacity, least, most)) in taken {
        let left: Option<u64> = client.hget(&key, "tokens").unwrap();
        let gone = capacity - left.unwrap_or(capacity);
        prop_assert!(
            (least..=most).contains(&gone),
            "{key}: {gone} of {capacity} gone, {least} to {most} admitted\n{config:?}"
        );
    }
    Ok(())
}

#[test]
fn the_tokens_that_are_gone_are_those_of_the_requests_that_were_admitted() {
    for kind in Kind::ALL {
        let server = Server::start(kind, &[]);
        let rules = proptest::collection::vec(rule(), 1..5);
        let steps = proptest::collection::vec((0..3_usize, step()), 1..80);
        let cases = (select(vec![0, 1, 10_000]), rules, steps);
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
            cases: 300,
            failure_persistence: None,
            ..ProptestConfig::default()
        });
        if let Err(failure) =
            runner.run(&cases, |(known_denials, rules, steps)| check(&server, known_denials, &rules, &steps))
        {
            panic!("{kind:?}: {failure}");
        }
    }
}

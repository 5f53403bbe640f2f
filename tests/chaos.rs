//! Three Envoys of two workers each, one of them through `redis_proxy`, under load, while everything between them and Redis
//! goes wrong in turn.
//!
//! All the time: no answer that the limiter made is a server error, none takes for ever, no machine fails. After each fault:
//! every Envoy is served by Redis again, and of each bucket whose data survived exactly that is gone which was admitted,
//! but for requests whose answer was lost on the way, which may have been charged once. At the end: no call is in flight,
//! memory is what it was, and buckets that are full again have left Redis.
//!
//! Every fault comes once, in an order that the seed gives (CHAOS_SEED); `make chaos` goes on for minutes (CHAOS_SECONDS)
//! and shows what each fault did.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod support;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use redis::Commands;
use serde_json::{Value, json};

use support::app::App;
use support::envoy::{Envoy, Setup};
use support::http::Client;
use support::server::{Kind, Server, say, wait_until};
use support::shim::{Mode, Shim};

/// Tokens of a bucket that next to nothing comes back to.
const CAPACITY: u64 = 60;
/// Callers of one client, between two faults.
const CALLERS: u8 = 6;
const CLIENTS: u8 = 4;
/// An answer that takes longer has hung. A request waits for a tenth of a second at most, on a machine that has time.
const HANG: Duration = Duration::from_secs(5);

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    Killed,
    KilledAndEmptied,
    Loading,
    Frozen,
    Asleep,
    Busy,
    ScriptsFlushed,
    DataFlushed,
    OutOfMemory,
    Replica,
    PasswordChanged,
    ClientsKilled,
    NoClientsTaken,
    Slow,
    Bytewise,
    RepliesCut,
    RepliesHalf,
    Garbage,
    Mute,
    Refused,
    Reloaded,
}

impl Fault {
    const ALL: [Self; 21] = [
        Self::Killed,
        Self::KilledAndEmptied,
        Self::Loading,
        Self::Frozen,
        Self::Asleep,
        Self::Busy,
        Self::ScriptsFlushed,
        Self::DataFlushed,
        Self::OutOfMemory,
        Self::Replica,
        Self::PasswordChanged,
        Self::ClientsKilled,
        Self::NoClientsTaken,
        Self::Slow,
        Self::Bytewise,
        Self::RepliesCut,
        Self::RepliesHalf,
        Self::Garbage,
        Self::Mute,
        Self::Refused,
        Self::Reloaded,
    ];

    /// Whether buckets are full afterwards.
    fn loses_data(self) -> bool {
        matches!(self, Self::KilledAndEmptied | Self::DataFlushed)
    }
}

/// What became of one caller's requests.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    admitted: u64,
    denied: u64,
    /// Let through without a decision: perhaps charged.
    waved: u64,
    /// The connection to Envoy ended: perhaps charged.
    cut: u64,
}

/// What the clients share with the one who makes the faults.
struct Load {
    envoys: Vec<SocketAddr>,
    /// Between two faults: callers of one epoch are not those of another.
    epoch: AtomicUsize,
    paused: AtomicBool,
    ended: AtomicBool,
    /// Clients that wait for an answer.
    busy: AtomicUsize,
    tallies: Mutex<BTreeMap<(usize, String), Tally>>,
    slowest: Mutex<Duration>,
    sent: AtomicUsize,
}

impl Load {
    fn tallies(&self) -> MutexGuard<'_, BTreeMap<(usize, String), Tally>> {
        self.tallies.lock().unwrap()
    }

    /// One client: asks an Envoy as one of its callers, again and again.
    fn run(&self, client: u8, mut random: Rng) {
        let mut connections: HashMap<(usize, String), Client> = HashMap::new();
        let mut last_epoch = 0;
        while !self.ended.load(Ordering::SeqCst) {
            self.busy.fetch_add(1, Ordering::SeqCst);
            if self.paused.load(Ordering::SeqCst) {
                self.busy.fetch_sub(1, Ordering::SeqCst);
                thread::sleep(Duration::from_millis(2));
                continue;
            }
            let epoch = self.epoch.load(Ordering::SeqCst);
            if epoch != last_epoch {
                connections.clear();
                last_epoch = epoch;
            }
            let caller = random.u8(0..CALLERS);
            let address = format!("127.{}.{}.{}", 1 + epoch / 200, 1 + epoch % 200, 10 * client + caller + 1);
            let envoy = random.usize(..self.envoys.len());
            let place = (envoy, address.clone());
            let path = if random.u8(..) < 64 { "/fast" } else { "/slow" };
            let mut connection = connections
                .remove(&place)
                .unwrap_or_else(|| Client::connect_from(address.parse().unwrap(), self.envoys[envoy]));
            let begin = Instant::now();
            let answer = connection.try_get(path);
            let took = begin.elapsed();
            self.sent.fetch_add(1, Ordering::SeqCst);
            {
                let mut slowest = self.slowest.lock().unwrap();
                *slowest = took.max(*slowest);
            }
            let mut count = Tally::default();
            match answer {
                Ok(response) => {
                    let decided = response.header("x-ratelimit-limit").is_some();
                    match (response.status(), decided) {
                        (200, true) => count.admitted = 1,
                        (429, true) => count.denied = 1,
                        (200, false) => count.waved = 1,
                        _ => panic!("an answer that nobody should get: {response:?}"),
                    }
                    if response.header("connection").as_deref() != Some("close") {
                        connections.insert(place, connection);
                    }
                }
                Err(_) => count.cut = 1,
            }
            if path == "/slow" || count.cut > 0 {
                let mut tallies = self.tallies();
                let tally = tallies.entry((epoch, address)).or_default();
                tally.admitted += count.admitted;
                tally.denied += count.denied;
                tally.waved += count.waved;
                tally.cut += count.cut;
            }
            self.busy.fetch_sub(1, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(random.u64(4..14)));
        }
    }
}

/// Everything that can be made to fail.
struct World {
    redis: Server,
    shims: [Shim; 2],
    envoys: Vec<Envoy>,
    app: App,
    random: Rng,
    /// So many times a configuration has been replaced.
    reloads: u64,
    long: bool,
}

const PERSISTENT: [&str; 8] = [
    "--appendonly",
    "yes",
    "--appendfsync",
    "always",
    "--enable-debug-command",
    "local",
    "--busy-reply-threshold",
    "50",
];

fn configuration(reloads: u64) -> Value {
    json!({
        "redis": {"timeout": "100ms"},
        "rules": [
            {"name": "slow", "match": {"path": "/slow"}, "limits": [{"capacity": CAPACITY, "refill": "1/day"}]},
            {"name": "fast", "match": {"path": "/fast"}, "limits": [{"capacity": 5, "refill": "100/s"}]},
        ],
        // What is replaced has to differ.
        "response": {"body": format!("too many requests ({reloads})\n")},
    })
}

impl World {
    fn new(kind: Kind, random: Rng, long: bool) -> Self {
        let (redis, app) = (Server::start(kind, &PERSISTENT), App::start());
        let shims = [Shim::before(redis.port()), Shim::before(redis.port())];
        let direct = || Setup::new(shims[0].port(), &app).reloading();
        let open = |document: &mut support::envoy::Document| {
            // This server knows no users.
            document.cluster("meshquota_redis").as_object_mut().unwrap().remove("typed_extension_protocol_options");
        };
        let proxied = Setup::new(shims[1].port(), &app).file("envoy/redis-proxy.yaml").tweak(open).reloading();
        let start = |setup: Setup| setup.configuration(configuration(0)).workers(2).start();
        let envoys = vec![start(direct()), start(direct()), start(proxied)];
        Self { redis, shims, envoys, app, random, reloads: 0, long }
    }

    fn command(&self, words: &str) {
        say(&mut self.redis.client(), words);
    }

    /// Says this again and again for a while.
    fn insist(&self, words: &str, span: Duration) {
        let end = Instant::now() + span;
        while Instant::now() < end {
            self.command(words);
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn network(&self, mode: &Mode, span: Duration) {
        for shim in &self.shims {
            shim.set(mode.clone());
        }
        thread::sleep(span);
        for shim in &self.shims {
            shim.set(Mode::Pass);
        }
    }

    /// Makes a fault, lets it last, and ends it.
    fn suffer(&mut self, fault: Fault) {
        let span = Duration::from_millis(self.random.u64(300..1200));
        let some = self.random.usize(1..20);
        match fault {
            Fault::Killed | Fault::KilledAndEmptied => {
                self.redis.kill();
                if fault.loses_data() {
                    fs::remove_dir_all(self.redis.directory().join("appendonlydir")).unwrap();
                }
                thread::sleep(span);
                self.redis.restart();
            }
            Fault::Loading => {
                // So that a second goes by until it has read all keys.
                self.command("BGREWRITEAOF");
                let mut admin = self.redis.client();
                let mut info = || redis::cmd("INFO").arg("persistence").query::<String>(&mut admin).unwrap();
                wait_until("the log is written anew", || {
                    let info = info();
                    info.contains("aof_rewrite_in_progress:0") && info.contains("aof_rewrite_scheduled:0")
                });
                let keys = redis::cmd("DBSIZE").query::<u64>(&mut self.redis.client()).unwrap();
                let delay = (1_000_000 / keys.max(1)).to_string();
                let slowly = ["--key-load-delay", &delay, "--loading-process-events-interval-bytes", "1024"];
                self.redis.restart_with(&[&PERSISTENT, &slowly]);
                self.redis.restart_with(&[&PERSISTENT]);
            }
            Fault::Frozen => {
                self.redis.stop();
                thread::sleep(if self.long { Duration::from_secs(30) } else { 2 * span });
                self.redis.cont();
            }
            Fault::Asleep => self.command(&format!("DEBUG SLEEP {}", span.as_secs_f64())),
            Fault::Busy => {
                let mut busy = self.redis.client();
                let script = thread::spawn(move || redis::cmd("EVAL").arg("while true do end").arg(0).exec(&mut busy));
                thread::sleep(span);
                self.command("SCRIPT KILL");
                assert!(script.join().unwrap().is_err());
            }
            Fault::ScriptsFlushed => self.insist("SCRIPT FLUSH", span),
            Fault::DataFlushed => self.command("FLUSHALL"),
            Fault::OutOfMemory => {
                self.command("CONFIG SET maxmemory 1");
                thread::sleep(span);
                self.command("CONFIG SET maxmemory 0");
            }
            Fault::Replica => {
                self.command("REPLICAOF 127.0.0.1 1");
                thread::sleep(span);
                self.command("REPLICAOF NO ONE");
            }
            Fault::PasswordChanged => {
                let mut admin = self.redis.client();
                say(&mut admin, "CONFIG SET requirepass another");
                say(&mut admin, "CLIENT KILL TYPE normal");
                thread::sleep(span);
                say(&mut admin, "CONFIG SET requirepass ");
            }
            Fault::ClientsKilled => self.insist("CLIENT KILL TYPE normal", span),
            Fault::NoClientsTaken => {
                let mut admin = self.redis.client();
                say(&mut admin, "CONFIG SET maxclients 1");
                say(&mut admin, "CLIENT KILL TYPE normal");
                thread::sleep(span);
                say(&mut admin, "CONFIG SET maxclients 10000");
            }
            Fault::Slow => self.network(&Mode::Delay(Duration::from_millis(150)), span),
            Fault::Bytewise => self.network(&Mode::Bytewise, span),
            Fault::RepliesCut => self.network(&Mode::Cut(some), span),
            Fault::RepliesHalf => self.network(&Mode::Half(some), span),
            Fault::Garbage => self.network(&Mode::Garbage(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()), span),
            Fault::Mute => self.network(&Mode::Mute, span),
            Fault::Refused => self.network(&Mode::Refuse, span),
            Fault::Reloaded => {
                self.reloads += 1;
                for envoy in &mut self.envoys {
                    envoy.reload(&configuration(self.reloads));
                }
                thread::sleep(Duration::from_secs(2));
            }
        }
    }

    /// Waits until Redis decides again at each Envoy.
    fn recover(&self, fault: Fault) {
        let mut caller = 0_u8;
        for (number, envoy) in self.envoys.iter().enumerate() {
            let mut served = 0;
            wait_until(&format!("Envoy {number} is served by Redis again after {fault:?}"), || {
                caller = caller.wrapping_add(1);
                let mut client = envoy.client_from(&format!("127.250.0.{}", caller % 200 + 1));
                let decided =
                    client.try_get("/fast").is_ok_and(|response| response.header("x-ratelimit-limit").is_some());
                served = if decided { served + 1 } else { 0 };
                served == 4
            });
        }
    }

    /// What is gone from the buckets of an epoch is what was admitted.
    fn check_conservation(&self, load: &Load, epoch: usize) -> u64 {
        let mut connection = self.redis.client();
        let mut checked = 0;
        for ((_, address), tally) in load.tallies().iter().filter(|((other, _), _)| *other == epoch) {
            let tokens: Option<f64> = connection.hget(format!("quota:{{slow:{address}}}:0"), "tokens").unwrap();
            let gone = CAPACITY - tokens.map_or(CAPACITY, |tokens| tokens.round() as u64);
            let Tally { admitted, denied, waved, cut } = *tally;
            assert!(
                (admitted..=admitted + waved + cut).contains(&gone),
                "{address}: {gone} tokens are gone, {tally:?}"
            );
            assert!(denied == 0 || gone == CAPACITY, "{address} was denied with {gone} gone: {tally:?}");
            checked += admitted + denied;
        }
        checked
    }

    fn in_flight(&self) -> i64 {
        self.envoys.iter().map(|envoy| envoy.gauge("redis_in_flight")).sum()
    }

    fn resident_kib(&self) -> Vec<u64> {
        self.envoys.iter().map(Envoy::resident_kib).collect()
    }
}

/// What was seen of one kind of fault.
#[derive(Default)]
struct Seen {
    times: u32,
    slowest: Duration,
    recovery: Duration,
    waved: u64,
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn whatever_happens_to_redis_no_request_fails_or_hangs_and_the_count_stays_right() {
    let seed = number("CHAOS_SEED").unwrap_or_else(|| fastrand::u64(..1 << 48));
    let seconds = number("CHAOS_SECONDS").unwrap_or(0);
    println!("CHAOS_SEED={seed}");
    let mut random = Rng::with_seed(seed);
    let kind = Kind::ALL[random.usize(..2)];
    let mut world = World::new(kind, random.fork(), seconds >= 120);
    let load = Load {
        envoys: world.envoys.iter().map(Envoy::ingress).collect(),
        epoch: AtomicUsize::new(1),
        paused: AtomicBool::new(false),
        ended: AtomicBool::new(false),
        busy: AtomicUsize::new(0),
        tallies: Mutex::default(),
        slowest: Mutex::default(),
        sent: AtomicUsize::new(0),
    };
    let (begin, mut seen, mut memory, mut checked) = (Instant::now(), BTreeMap::<Fault, Seen>::new(), Vec::new(), 0);
    thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (load, random) = (&load, random.fork());
            scope.spawn(move || load.run(client, random));
        }
        // The load ends whatever happens here, or a failure would wait for it for ever.
        let _end = End(&load.ended);
        loop {
            let mut faults = Fault::ALL;
            random.shuffle(&mut faults);
            for fault in faults {
                thread::sleep(Duration::from_millis(200));
                world.suffer(fault);
                world.long = world.long && fault != Fault::Frozen;
                let mended = Instant::now();
                world.recover(fault);
                let recovery = mended.elapsed();
                // A little later, since what was under way at the end of a fault may be charged late.
                load.paused.store(true, Ordering::SeqCst);
                wait_until("no client waits for an answer", || load.busy.load(Ordering::SeqCst) == 0);
                wait_until("no call is in flight", || world.in_flight() == 0);
                thread::sleep(Duration::from_millis(50));
                let epoch = load.epoch.load(Ordering::SeqCst);
                if !fault.loses_data() {
                    checked += world.check_conservation(&load, epoch);
                }
                let tallies = std::mem::take(&mut *load.tallies());
                assert!(
                    fault == Fault::Reloaded || tallies.values().all(|tally| tally.cut == 0),
                    "{fault:?}: {tallies:?}"
                );
                let slowest = std::mem::take(&mut *load.slowest.lock().unwrap());
                assert!(slowest < HANG, "{fault:?}: an answer took {slowest:?}");
                let entry = seen.entry(fault).or_default();
                entry.times += 1;
                entry.slowest = entry.slowest.max(slowest);
                entry.recovery = entry.recovery.max(recovery);
                entry.waved += tallies.values().map(|tally| tally.waved).sum::<u64>();
                load.epoch.fetch_add(1, Ordering::SeqCst);
                load.paused.store(false, Ordering::SeqCst);
            }
            memory.push(world.resident_kib());
            if begin.elapsed() >= Duration::from_secs(seconds) {
                break;
            }
        }
    });
    assert!(checked > 500, "only {checked} decisions were checked");
    report(kind, &load, &seen, &memory, checked);
    // Buckets that are full again are gone.
    wait_until("the buckets that are full have left Redis", || {
        world.redis.client().keys::<_, Vec<String>>("quota:{fast:*").unwrap().is_empty()
    });
    let (first, last) = (&memory[0], &memory[memory.len() - 1]);
    for (first, last) in first.iter().zip(last) {
        assert!(*last <= first + first / 4 + 32 * 1024, "memory grew from {first} to {last} KiB: {memory:?}");
    }
    assert!(world.app.count() > 0);
    for mut envoy in world.envoys {
        // What a connection of Redis that ends in the middle of something makes Envoy say.
        envoy.tolerate("lua");
        envoy.finish();
    }
}

fn report(kind: Kind, load: &Load, seen: &BTreeMap<Fault, Seen>, memory: &[Vec<u64>], checked: u64) {
    let sent = load.sent.load(Ordering::SeqCst);
    println!("{kind:?}; {sent} requests, {checked} decisions checked against what was left in Redis");
    println!("{:<18}{:>6}{:>20}{:>14}{:>15}", "fault", "times", "slowest answer ms", "recovery ms", "waved through");
    for (fault, Seen { times, slowest, recovery, waved }) in seen {
        let fault = format!("{fault:?}");
        println!("{fault:<18}{times:>6}{:>20}{:>14}{waved:>15}", slowest.as_millis(), recovery.as_millis());
    }
    println!("resident memory of each Envoy in KiB after each round: {memory:?}");
}

/// Sets a flag at its end.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

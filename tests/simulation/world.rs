//! A world of proxies, workers, connections and one server, in virtual time. Everything that happens is an event in one
//! queue; what is left to chance comes from one seed; so a run can be repeated.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use fastrand::Rng;
use meshquota::config::Config;
use meshquota::decision::{Decision, Verdict};
use meshquota::limiter::{Admission, Effect, Limiter, RequestId};
use meshquota::request::Facts;

use super::server::{Run, Server};

/// Microseconds since the world began.
pub type Time = u64;
pub const MS: Time = 1000;
pub const SECOND: Time = 1000 * MS;

/// The server's time of day when the world begins.
const EPOCH_US: u64 = 1_700_000_000_000_000;
/// `redis.timeout` of every worker.
pub const TIMEOUT: Time = 50 * MS;
/// By how much a decision may come after its deadline: a tick, and the ticks that a stalled worker is forgiven.
const SLACK: Time = 15 * MS;
/// `redis.max_in_flight` of every worker.
const MAX_IN_FLIGHT: usize = 20;

/// Tokens of the bucket of an address, and a millisecond's refill. Callers ask for more than that.
const IP_CAPACITY: f64 = 5.0;
const IP_PER_MS: f64 = 0.005;
/// Tokens of the bucket that each request has of its own.
const OWN_CAPACITY: u64 = 1000;

/// What becomes of requests while Redis cannot be asked: one of these in each world.
const FAILURE_MODES: [&str; 3] = ["allow", "deny", "local"];

/// How many denials workers remember.
const DENY_CACHES: [&str; 3] = ["0", "1", "10000"];
/// `deny_cache.max_age` of every worker.
const MAX_AGE: Time = 300 * MS;

const CONFIG: &str = r#"{
    "failure_mode": "MODE",
    "deny_cache": {"entries": ENTRIES, "max_age": "300ms"},
    "redis": {"timeout": "50ms", "max_in_flight": 20, "breaker": {"failures": 5, "cool_down": "500ms"}},
    "rules": [
        {"name": "ip", "match": {"path_prefix": "/ip"}, "limits": [{"capacity": 5, "refill": "5/s"}]},
        {"name": "own", "match": [{"path": "/own"}, {"path": "/ip/own"}], "key": ["route"],
         "cost": {"header": "x-cost"}, "limits": [{"capacity": 1000, "refill": "1/day"}]}
    ]}"#;

/// A request: by `/ip` it meets the bucket of its address, by `/own` one that no other request has, by `/ip/own` both.
#[derive(Clone, Debug)]
struct Told {
    path: &'static str,
    client: u8,
    /// Its number, which its own bucket is named after.
    number: u32,
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
        match path {
            ["source", "address"] => Some(format!("192.0.2.{}:1", self.client).into_bytes()),
            ["xds", "route_name"] => Some(format!("r{}", self.number).into_bytes()),
            _ => None,
        }
    }
}

impl Told {
    fn ip_key(&self) -> Option<String> {
        self.path.starts_with("/ip").then(|| format!("quota:{{ip:192.0.2.{}}}:0", self.client))
    }

    /// How many buckets it meets.
    fn buckets(&self) -> usize {
        if self.path == "/ip/own" { 2 } else { 1 }
    }

    fn own_key(&self) -> Option<String> {
        self.path.ends_with("/own").then(|| format!("quota:{{own:r{}}}:0", self.number))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Request(usize),
    Leave(usize, RequestId),
    Tick(usize, u64),
    /// A connection stands, or could not be made.
    Opened(usize, u64, bool),
    ToServer(usize, u64, Vec<u8>),
    ToWorker(usize, u64, Vec<u8>),
    /// The worker learns that its connection is gone.
    Closed(usize, u64),
    Fault(u32),
    Mend(u32),
}

/// A request that waits.
#[derive(Clone)]
struct Waiting {
    told: Told,
    since: Time,
    /// How often the script had run when it came.
    runs: usize,
    /// Whether so many were waiting that it may have been one too many.
    crowded: bool,
    /// Whether it was decided when it came.
    at_once: bool,
}

/// One worker, and its one connection.
struct Worker {
    limiter: Limiter,
    waiting: BTreeMap<RequestId, Waiting>,
    /// Of the ticks that were asked for, the one that counts, and when it comes.
    tick: u64,
    tick_at: Time,
    /// The connection, by its number, where there is one.
    connection: Option<u64>,
    /// Until when nothing that was sent before can have come, in each direction.
    sent_until: Time,
    heard_until: Time,
    /// It gets no turn before this.
    stalled_until: Time,
    /// What waits for that turn.
    missed: VecDeque<Event>,
}

/// What is wrong at the moment.
#[derive(Default)]
struct Faults {
    frozen: bool,
    dead: bool,
    /// Workers whose network delivers nothing.
    dark: Vec<bool>,
    /// How many are under way.
    active: u32,
}

pub struct World {
    random: Rng,
    base: Instant,
    now: Time,
    queue: BinaryHeap<Reverse<(Time, u64, Event)>>,
    order: u64,
    workers: Vec<Worker>,
    server: Server,
    /// What each connection has sent that the server has not read, by worker and number.
    unread: HashMap<(usize, u64), BytesMut>,
    faults: Faults,
    next_request: u32,
    next_connection: u64,
    /// By how much the server's clock is ahead.
    clock_us: i64,
    last_fault: Time,
    storm_until: Time,
    /// When each worker admitted an address, by Redis or, where that is the failure mode, by itself.
    admitted: BTreeMap<(usize, String), Vec<Time>>,
    /// When the server lost its data, and when its clock stepped forward and by how many milliseconds.
    losses: Vec<Time>,
    steps: Vec<(Time, f64)>,
    /// When a request was decided last without Redis.
    failed: Option<Time>,
    /// Requests that Redis decided.
    decided: u32,
}

/// Why a run is wrong.
pub type Violation = String;

impl World {
    /// A world of so many workers. `source` is the script that its server runs.
    pub fn new(seed: u64, source: &str) -> Self {
        let mut random = Rng::with_seed(seed);
        let base = Instant::now() + Duration::from_secs(1_000_000);
        let count = random.usize(2..=6);
        let config = CONFIG.replace("MODE", FAILURE_MODES[random.usize(..3)]);
        let config = config.replace("ENTRIES", DENY_CACHES[random.usize(..3)]);
        let coalesces = random.bool();
        let limiter = |number: usize| {
            let mut config = Config::from_json(config.as_bytes()).unwrap();
            config.coalesces = coalesces;
            Limiter::new(config, seed ^ (number as u64) << 7, base)
        };
        let worker = |number: usize| Worker {
            limiter: limiter(number),
            waiting: BTreeMap::new(),
            tick: 0,
            tick_at: Time::MAX,
            connection: None,
            sent_until: 0,
            heard_until: 0,
            stalled_until: 0,
            missed: VecDeque::new(),
        };
        let mut world = Self {
            workers: (0..count).map(worker).collect(),
            server: Server::new(source),
            random,
            base,
            now: 0,
            queue: BinaryHeap::new(),
            order: 0,
            unread: HashMap::new(),
            faults: Faults { dark: vec![false; count], ..Faults::default() },
            next_request: 1,
            next_connection: 1,
            clock_us: 0,
            last_fault: 0,
            storm_until: 0,
            admitted: BTreeMap::new(),
            losses: Vec::new(),
            steps: Vec::new(),
            failed: None,
            decided: 0,
        };
        for worker in 0..count {
            world.at(MS, Event::Tick(worker, 0));
        }
        world
    }

    fn instant(&self) -> Instant {
        self.base + Duration::from_micros(self.now)
    }

    fn at(&mut self, time: Time, event: Event) {
        self.order += 1;
        self.queue.push(Reverse((time.max(self.now), self.order, event)));
    }

    fn after(&mut self, delay: Time, event: Event) {
        self.at(self.now + delay, event);
    }

    /// Lives through faults and calm, and says what went wrong.
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn run(&mut self) -> Result<(), Violation> {
        // Requests all the time; faults at first; then calm, in which service has to be normal again.
        let (stormy, calm) = (self.random.u64(SECOND / 2..2 * SECOND), 3 * SECOND + SECOND / 2);
        self.storm_until = stormy;
        let mut time = 10 * MS;
        while time < stormy + calm {
            let worker = self.random.usize(..self.workers.len());
            self.at(time, Event::Request(worker));
            // Some come together, so that they meet at a bucket.
            if self.random.u8(..) < 48 {
                for _ in 0..self.random.u64(1..8) {
                    let soon = self.random.u64(0..MS);
                    self.at(time + soon, Event::Request(worker));
                }
            }
            time += self.random.u64(0..40 * MS);
        }
        let mut time = self.random.u64(0..SECOND);
        let mut number = 0;
        while time < stormy {
            self.at(time, Event::Fault(number));
            number += 1;
            time += self.random.u64(0..SECOND);
        }
        while let Some(Reverse((time, _, event))) = self.queue.pop() {
            if time > stormy + calm {
                break;
            }
            self.now = time;
            self.server.set_time(time, (EPOCH_US + time).saturating_add_signed(self.clock_us));
            if matches!(event, Event::Fault(_)) && time > stormy {
                continue;
            }
            self.happen(event)?;
            self.check_deadlines()?;
        }
        self.check_calm()?;
        self.check_buckets()
    }

    fn happen(&mut self, event: Event) -> Result<(), Violation> {
        if let Some(worker) = turn_of(&event)
            && self.workers[worker].stalled_until > self.now
        {
            self.workers[worker].missed.push_back(event);
            return Ok(());
        }
        match event {
            Event::Request(worker) => self.request(worker)?,
            Event::Leave(worker, id) => {
                if self.workers[worker].waiting.remove(&id).is_some() {
                    self.workers[worker].limiter.gone(id);
                }
            }
            Event::Tick(worker, generation) => {
                if self.workers[worker].tick == generation {
                    let now = self.instant();
                    self.workers[worker].tick_at = Time::MAX;
                    self.workers[worker].limiter.tick(now);
                    self.carry_out(worker)?;
                }
            }
            Event::Opened(worker, connection, stands) if self.workers[worker].connection == Some(connection) => {
                let now = self.instant();
                if stands {
                    self.workers[worker].limiter.connected(now);
                } else {
                    self.workers[worker].connection = None;
                    self.workers[worker].limiter.closed(now, "refused");
                }
                self.carry_out(worker)?;
            }
            Event::ToServer(worker, connection, bytes) => {
                if self.unread.contains_key(&(worker, connection)) {
                    self.unread.entry((worker, connection)).or_default().extend_from_slice(&bytes);
                    self.serve(worker, connection);
                }
            }
            Event::ToWorker(worker, connection, bytes) if self.workers[worker].connection == Some(connection) => {
                let now = self.instant();
                self.workers[worker].limiter.received(now, &bytes);
                self.carry_out(worker)?;
            }
            Event::Closed(worker, connection) if self.workers[worker].connection == Some(connection) => {
                self.workers[worker].connection = None;
                let now = self.instant();
                self.workers[worker].limiter.closed(now, "reset");
                self.carry_out(worker)?;
            }
            Event::Opened(..) | Event::ToWorker(..) | Event::Closed(..) => {}
            Event::Fault(number) => self.fault(number),
            Event::Mend(kind) => self.mend(kind)?,
        }
        Ok(())
    }

    fn request(&mut self, worker: usize) -> Result<(), Violation> {
        let number = self.next_request;
        self.next_request += 1;
        let told = Told {
            path: ["/ip", "/own", "/ip/own"][self.random.usize(..3)],
            client: self.random.u8(1..=2),
            number,
            cost: u64::from(number) % (OWN_CAPACITY - 1) + 1,
        };
        let (now, runs) = (self.instant(), self.server.runs.len());
        let state = &mut self.workers[worker];
        let met = state.limiter.meets(&told);
        match state.limiter.request(now, || 0, number, met) {
            Admission::Waits => {
                let charges = state.waiting.values().map(|waiting| waiting.told.buckets()).sum::<usize>();
                let crowded = charges + told.buckets() > MAX_IN_FLIGHT;
                state.waiting.insert(number, Waiting { told, since: self.now, runs, crowded, at_once: false });
                if self.random.u8(..) < 12 {
                    let delay = self.random.u64(0..20 * MS);
                    self.after(delay, Event::Leave(worker, number));
                }
            }
            Admission::Decided(decision) => {
                let waiting = Waiting { told, since: self.now, runs, crowded: false, at_once: true };
                self.check_decision(worker, &waiting, &decision)?;
            }
            Admission::NotLimited => return Err("a rule applies to every request".to_owned()),
        }
        self.carry_out(worker)?;
        match self.workers[worker].waiting.len() {
            ..=MAX_IN_FLIGHT => Ok(()),
            waiting => Err(format!("{waiting} requests wait at worker {worker}")),
        }
    }

    /// Does what a worker's limiter wants, and asks for the tick that it wants next.
    fn carry_out(&mut self, worker: usize) -> Result<(), Violation> {
        let now = self.instant();
        while let Some(effect) = self.workers[worker].limiter.next_effect(now) {
            match effect {
                Effect::Open => self.open(worker),
                Effect::Send(bytes) => self.send(worker, &bytes),
                Effect::Close => {
                    if let Some(connection) = self.workers[worker].connection.take() {
                        self.unread.remove(&(worker, connection));
                    }
                }
                Effect::Decide(id, decision) => {
                    let waiting = self.workers[worker]
                        .waiting
                        .remove(&id)
                        .ok_or_else(|| format!("{id} is decided, and does not wait"))?;
                    self.check_decision(worker, &waiting, &decision)?;
                }
                Effect::Log(_) => {}
            }
        }
        let state = &mut self.workers[worker];
        let wanted = state.limiter.next_tick(now).map_or(10 * SECOND, |wanted| wanted.as_micros() as u64);
        let tick_at = self.now + wanted.max(MS);
        // As in the shell, a tick that is coming anyway is not put off.
        if tick_at < state.tick_at {
            state.tick += 1;
            state.tick_at = tick_at;
            let generation = state.tick;
            self.at(tick_at, Event::Tick(worker, generation));
        }
        Ok(())
    }

    fn open(&mut self, worker: usize) {
        let connection = self.next_connection;
        self.next_connection += 1;
        let stands = !self.faults.dead;
        if stands {
            self.unread.insert((worker, connection), BytesMut::new());
        }
        let state = &mut self.workers[worker];
        state.connection = Some(connection);
        (state.sent_until, state.heard_until) = (self.now, self.now);
        let delay = self.random.u64(100..2 * MS);
        if !self.faults.dark[worker] {
            self.after(delay, Event::Opened(worker, connection, stands));
        }
    }

    /// Bytes go out in pieces that come in order, each after a time of its own.
    fn send(&mut self, worker: usize, bytes: &[u8]) {
        let Some(connection) = self.workers[worker].connection else { return };
        let mut rest = bytes;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(self.piece(rest.len()));
            let time = (self.now + self.latency()).max(self.workers[worker].sent_until);
            self.workers[worker].sent_until = time;
            self.at(time, Event::ToServer(worker, connection, piece.to_vec()));
            rest = after;
        }
    }

    /// How much of so many bytes comes at once: mostly all.
    fn piece(&mut self, bytes: usize) -> usize {
        if self.random.u8(..) < 64 { self.random.usize(1..=bytes) } else { bytes }
    }

    fn latency(&mut self) -> Time {
        // Mostly short, now and then longer than the timeout, while the storm lasts.
        let slow = self.now < self.storm_until && self.random.u8(..) < 3;
        if slow { self.random.u64(0..80 * MS) } else { self.random.u64(50..MS) }
    }

    fn serve(&mut self, worker: usize, connection: u64) {
        if self.faults.frozen || self.faults.dark[worker] {
            return;
        }
        let Some(unread) = self.unread.get_mut(&(worker, connection)) else { return };
        let replies = self.server.serve(worker, unread).concat();
        let mut rest = replies.as_slice();
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(self.piece(rest.len()));
            let time = (self.now + self.latency()).max(self.workers[worker].heard_until);
            self.workers[worker].heard_until = time;
            self.at(time, Event::ToWorker(worker, connection, piece.to_vec()));
            rest = after;
        }
    }

    fn serve_all(&mut self) {
        let mut connections = self.unread.keys().copied().collect::<Vec<_>>();
        connections.sort_unstable();
        for (worker, connection) in connections {
            self.serve(worker, connection);
        }
    }

    /// Cuts a worker's connection, of which some bytes may still come.
    fn cut(&mut self, worker: usize) {
        if let Some(connection) = self.workers[worker].connection {
            self.unread.remove(&(worker, connection));
            let delay = self.random.u64(0..MS);
            self.after(delay, Event::Closed(worker, connection));
        }
    }

    fn fault(&mut self, number: u32) {
        let (kind, worker) = (self.random.u32(0..10), self.random.usize(..self.workers.len()));
        let lasts = self.random.u64(MS..800 * MS);
        self.last_fault = self.last_fault.max(self.now);
        let mends = match kind {
            0 => {
                self.faults.frozen = true;
                true
            }
            1 => {
                self.faults.dead = true;
                self.server.flush_scripts();
                for worker in 0..self.workers.len() {
                    self.cut(worker);
                }
                self.unread.clear();
                if self.random.bool() {
                    self.server.lose_data();
                    self.losses.push(self.now);
                }
                true
            }
            2 => {
                self.server.flush_scripts();
                false
            }
            3 => {
                self.cut(worker);
                false
            }
            4 => {
                self.faults.dark[worker] = true;
                true
            }
            5 => {
                let refusals = [
                    "LOADING Redis is loading the dataset in memory",
                    "READONLY You can't write against a read only replica.",
                    "OOM command not allowed when used memory > 'maxmemory'.",
                    "BUSY Redis is busy running a script.",
                    "ERR something else",
                ];
                self.server.refusal = Some(refusals[self.random.usize(..refusals.len())]);
                true
            }
            6 => {
                let step_ms = self.random.i64(-2000..500);
                self.clock_us += step_ms * 1000;
                self.steps.push((self.now, step_ms.max(0) as f64));
                false
            }
            7 => {
                self.workers[worker].stalled_until = self.now + lasts;
                true
            }
            8 => {
                if let Some(connection) = self.workers[worker].connection {
                    let time = self.workers[worker].heard_until.max(self.now);
                    self.at(time, Event::ToWorker(worker, connection, b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()));
                }
                false
            }
            _ => {
                // A reply that is cut anywhere, and then nothing.
                if let Some(connection) = self.workers[worker].connection {
                    let time = self.workers[worker].heard_until.max(self.now);
                    self.at(time, Event::ToWorker(worker, connection, b"*4\r\n:1\r\n:9".to_vec()));
                    self.cut(worker);
                }
                false
            }
        };
        if mends {
            self.faults.active += 1;
            self.last_fault = self.last_fault.max(self.now + lasts);
            self.after(lasts, Event::Mend(kind + 10 * worker as u32));
        }
        let _ = number;
    }

    fn mend(&mut self, fault: u32) -> Result<(), Violation> {
        let (kind, worker) = (fault % 10, (fault / 10) as usize);
        match kind {
            0 => self.faults.frozen = false,
            1 => self.faults.dead = false,
            4 => {
                self.faults.dark[worker] = false;
                // Whoever wanted to connect meanwhile finds out now.
                if let Some(connection) = self.workers[worker].connection {
                    let stands = self.unread.contains_key(&(worker, connection));
                    self.after(MS, Event::Opened(worker, connection, stands));
                }
            }
            5 => self.server.refusal = None,
            7 => {
                while let Some(event) = self.workers[worker].missed.pop_front() {
                    if self.workers[worker].stalled_until > self.now {
                        self.workers[worker].missed.push_front(event);
                        break;
                    }
                    self.happen(event)?;
                }
            }
            _ => {}
        }
        self.faults.active -= 1;
        self.serve_all();
        Ok(())
    }

    /// No request waits past its deadline, where its worker had a turn since.
    fn check_deadlines(&self) -> Result<(), Violation> {
        for (number, worker) in self.workers.iter().enumerate() {
            if worker.stalled_until + 2 * TIMEOUT > self.now {
                continue;
            }
            for (id, Waiting { told, since, .. }) in &worker.waiting {
                if self.now > since + TIMEOUT + SLACK {
                    return Err(format!(
                        "request {id} ({told:?}) of worker {number} waits since {since}, at {}",
                        self.now
                    ));
                }
            }
        }
        Ok(())
    }

    /// A decision by Redis is one that Redis made, for this very request, since it came; and each is of one request.
    fn check_decision(&mut self, worker: usize, waiting: &Waiting, decision: &Decision) -> Result<(), Violation> {
        let &Waiting { ref told, since, runs, crowded, at_once } = waiting;
        // Where a request met two buckets it is not seen which of them the worker stood in for.
        if let (Verdict::LocalAllow, "/ip", Some(key)) = (decision.verdict, told.path, told.ip_key()) {
            self.admitted.entry((worker, key)).or_default().push(self.now);
        }
        let (allowed, wait_ms) = match decision.verdict {
            Verdict::Allow(_) => (true, 0),
            Verdict::Deny { retry_after, .. } => (false, retry_after.map_or(-1, |wait| wait.as_millis() as i64)),
            // Redis has granted, and the worker remembers more than it.
            Verdict::LocalDeny { .. } if told.path != "/own" => return Ok(()),
            _ => {
                self.failed = if crowded { self.failed } else { Some(self.now) };
                return Ok(());
            }
        };
        self.decided += 1;
        let quota = decision.verdict.quota().unwrap();
        // One that met two buckets may have heard of the one before it heard of the other.
        let since = if told.buckets() == 1 { self.now } else { since };
        for key in [told.ip_key(), told.own_key()].into_iter().flatten() {
            let shown = decision.rule == usize::from(key.contains("own"));
            if !shown && !allowed {
                // Another rule denied, and this one's word counts for nothing.
                continue;
            }
            let says = |run: &Run| run.reply[1] as u64 == quota.remaining && (allowed || run.reply[2] == wait_ms);
            let fits = |run: &mut Run| {
                !at_once
                    && (run.asked_by, run.key.as_str()) == (worker, key.as_str())
                    && run.count > 0
                    && (!shown || says(run))
                    && run.take(allowed)
            };
            match self.server.runs.iter_mut().skip(runs).position(fits) {
                Some(place) => {
                    let run = &self.server.runs[runs + place];
                    if allowed && key.contains("ip") {
                        self.admitted.entry((worker, key)).or_default().push(run.at);
                    }
                }
                None if !allowed && self.was_still_denied(&key, since) => {}
                None => return Err(format!("{told:?} was told {decision:?}, which {key} never said")),
            }
        }
        if told.path == "/own" && (!allowed || quota.remaining != OWN_CAPACITY - told.cost) {
            return Err(format!("{told:?} was told {decision:?}, which is another's"));
        }
        Ok(())
    }

    /// Whether a denial that was made for somebody before still held then: not past its wait, nor past its greatest age.
    fn was_still_denied(&self, key: &str, since: Time) -> bool {
        self.server.runs.iter().rev().any(|run| {
            let holds_until = run.at + MAX_AGE.min(run.reply[2].max(0) as Time * MS);
            run.key == key && run.count > run.reply[0] && run.count > 0 && since < holds_until
        })
    }

    /// Two seconds after the last fault every request is decided by Redis.
    fn check_calm(&self) -> Result<(), Violation> {
        let calm_since = self.last_fault.max(self.storm_until) + 2 * SECOND;
        if let Some(failed) = self.failed.filter(|failed| *failed > calm_since) {
            return Err(format!("a request failed at {failed}; the last fault ended at {}", self.last_fault));
        }
        if self.decided == 0 { Err("Redis never decided a request".to_owned()) } else { Ok(()) }
    }

    /// What one worker admits to a caller, by Redis and by itself, fits into one bucket, but for what the server forgot and
    /// what its clock made of it.
    fn check_workers(&self) -> Result<(), Violation> {
        for ((worker, key), times) in &self.admitted {
            // The worker counts a grant from when it hears of it, at most a timeout after it was made; one that stalled
            // hears of it much later.
            let slack =
                if self.workers[*worker].stalled_until > 0 { IP_CAPACITY } else { IP_PER_MS * (TIMEOUT / MS) as f64 };
            let mut times = times.clone();
            times.sort_unstable();
            for (first, from) in times.iter().enumerate() {
                for (last, to) in times.iter().enumerate().skip(first) {
                    let between = |at: &Time| (*from..=*to).contains(at);
                    let losses = self.losses.iter().filter(|at| between(at)).count();
                    let steps = self.steps.iter().filter(|(at, _)| between(at)).map(|(_, step)| step).sum::<f64>();
                    let elapsed = (to - from) as f64 / MS as f64 + steps + 1.0;
                    let most = IP_CAPACITY * (1 + losses) as f64 + IP_PER_MS * elapsed + slack;
                    let admitted = (last - first + 1) as f64;
                    if admitted > most + 1e-6 {
                        let what = format!("{admitted} from {from} to {to}, and {most} at most");
                        return Err(format!("worker {worker} admitted {key} {what}"));
                    }
                }
            }
        }
        Ok(())
    }

    /// No bucket gave more than it had and what came in; and no call was charged twice.
    fn check_buckets(&self) -> Result<(), Violation> {
        let mut granted: BTreeMap<&str, Vec<&Run>> = BTreeMap::new();
        for run in self.server.runs.iter().filter(|run| run.key.contains("ip") && run.reply[0] > 0) {
            granted.entry(&run.key).or_default().push(run);
        }
        granted.into_iter().try_for_each(|(key, runs)| check_bucket(key, &runs))?;
        self.check_workers()?;
        let mut charges: HashMap<&str, (u32, u32)> = HashMap::new();
        for run in self.server.runs.iter().filter(|run| run.key.contains("own") && run.reply[0] > 0) {
            let (charged, given_back) = charges.entry(&run.key).or_default();
            *(if run.count > 0 { charged } else { given_back }) += 1;
        }
        for (key, (charged, given_back)) in charges {
            if charged > 1 || given_back > charged {
                return Err(format!("{key} was charged {charged} times, and given back {given_back} times"));
            }
        }
        Ok(())
    }
}

/// What a bucket gave, in order: never more than it holds and what came in since by the latest time that it saw; and it is
/// full again without having been refilled only where the server lost its data.
fn check_bucket(key: &str, runs: &[&Run]) -> Result<(), Violation> {
    // Of each grant since the bucket was new, the latest time that the bucket had seen.
    let mut grants: Vec<u64> = Vec::new();
    let (mut last, mut seen): (Option<&Run>, u64) = (None, 0);
    for run in runs {
        if run.count < 0 {
            // What is given back was never given. Which one it was makes the bucket no fuller than this. A bucket that is
            // there sees the time then.
            grants.pop();
            seen = if run.existed { seen.max(run.now_ms) } else { seen };
            continue;
        }
        let before = last.replace(run);
        let is_new = !run.existed || before.is_some_and(|before| before.losses < run.losses);
        if let Some(before) = before.filter(|before| is_new && before.losses == run.losses) {
            let full_at = before.now_ms + before.reply[3] as u64;
            if run.latest_ms < full_at {
                return Err(format!("{key} was gone at {}, and full only at {full_at}", run.latest_ms));
            }
        }
        if is_new {
            (grants, seen) = (Vec::new(), 0);
        }
        seen = seen.max(run.now_ms);
        grants.extend((0..run.reply[0]).map(|_| seen));
        for (place, since) in grants.iter().enumerate() {
            let given = (grants.len() - place) as f64;
            let most = IP_CAPACITY + IP_PER_MS * (seen - since) as f64;
            if given > most + 1e-6 {
                return Err(format!("{key} gave {given} tokens from {since} to {seen}, and had {most}"));
            }
        }
    }
    Ok(())
}

/// Whose turn an event is.
fn turn_of(event: &Event) -> Option<usize> {
    match event {
        Event::Request(worker)
        | Event::Leave(worker, _)
        | Event::Tick(worker, _)
        | Event::Opened(worker, ..)
        | Event::ToWorker(worker, ..)
        | Event::Closed(worker, _) => Some(*worker),
        Event::ToServer(..) | Event::Fault(_) | Event::Mend(_) => None,
    }
}

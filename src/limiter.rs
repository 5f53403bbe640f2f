//! The limiter of one worker: requests and replies in, decisions out. Pure; the shell in `filter` carries out what it
//! says.
//!
//! All the calls of a request go out together, and the request is decided when the last of them has been answered or
//! has failed. What a denied request took from other rules is given back; a call to give back that fails is lost, since
//! repeating it might give back twice.
//!
//! Invariant: a request that [`Limiter::request`] told to wait gets exactly one [`Effect::Decide`], unless
//! [`Limiter::gone`] comes first.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::config::{Clock, Config};
use crate::decision::{Answer, Decision, decide, rule_outcome};
use crate::exchange::{self, ErrorKind, Exchange, Failure, Reply, Settings, greeting};
use crate::outage::{Line, Outage};
use crate::request::Facts;
use crate::rule::{self, Application, Charge};
use crate::script::{Call, Outcome};
use crate::stats::{CallResult, Counter, Stats};

/// Names a request while it lasts.
pub type RequestId = u32;

/// What a request is told at once.
#[derive(Debug, PartialEq, Eq)]
pub enum Admission {
    /// No rule applies: it goes on.
    NotLimited,
    /// It is decided already, without Redis.
    Decided(Decision),
    /// It waits for its [`Effect::Decide`].
    Waits,
}

/// What the shell has to do, in order.
#[derive(Debug, PartialEq)]
pub enum Effect {
    /// Open a stream to Redis.
    Open,
    /// Send these bytes on it.
    Send(Bytes),
    /// Close it.
    Close,
    /// Do to a waiting request what was decided.
    Decide(RequestId, Decision),
    /// Write a line to the log.
    Log(Line),
}

/// Who waits for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ticket {
    /// A request, for the part that one rule has in it.
    Request(RequestId, usize),
    /// Nobody; a charge is given back.
    GiveBack,
}

/// One rule's part in a request.
#[derive(Debug)]
struct Part {
    charge: Charge,
    /// The caller's time, where the configuration's clock is the proxy's.
    now_ms: Option<u64>,
    said: Option<Result<Outcome, Failure>>,
}

/// The limiter of one worker.
#[derive(Debug)]
pub struct Limiter {
    config: Config,
    exchange: Exchange<Ticket>,
    /// The requests that wait, each with the parts of the rules that apply to it, in the order of the configuration.
    waiting: HashMap<RequestId, Vec<Part>>,
    stats: Stats,
    outage: Outage,
    effects: VecDeque<Effect>,
}

/// Charges are made one request at a time.
const ONE: NonZeroU32 = NonZeroU32::MIN;

impl Limiter {
    /// A limiter without a connection; the first tick asks for one. The seed should differ between workers.
    pub fn new(config: Config, seed: u64, now: Instant) -> Self {
        let redis = &config.redis;
        let settings = Settings {
            timeout: redis.timeout,
            max_in_flight: redis.max_in_flight,
            greeting: greeting(
                redis.credentials.username.as_deref(),
                redis.credentials.password.as_deref(),
                redis.database,
            ),
            seed,
        };
        Self {
            exchange: Exchange::new(settings, now),
            waiting: HashMap::new(),
            stats: Stats::new(config.rules.len()),
            outage: Outage::default(),
            effects: VecDeque::new(),
            config,
        }
    }

    /// The configuration.
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// A request has come. `wall_ms` gives the time of day in milliseconds since 1970 and is asked only where the
    /// configuration's clock is the proxy's.
    pub fn request(
        &mut self,
        now: Instant,
        wall_ms: impl FnOnce() -> u64,
        id: RequestId,
        facts: &dyn Facts,
    ) -> Admission {
        let now_ms = match self.config.clock {
            Clock::Redis => None,
            Clock::Proxy => Some(wall_ms()),
        };
        let mut parts = Vec::new();
        for application in rule::apply(&self.config, facts) {
            match application {
                Application::Charge(charge) => parts.push(Part { charge, now_ms, said: None }),
                Application::Skipped { rule } => self.stats.count(Counter::Skipped(rule)),
            }
        }
        if parts.is_empty() {
            return Admission::NotLimited;
        }
        for (place, part) in parts.iter_mut().enumerate() {
            let call = Call::charge(part.charge.buckets(), part.charge.cost, ONE, now_ms);
            if let Err(failure) = self.exchange.call(now, Ticket::Request(id, place), call) {
                self.failed(now, &failure);
                part.said = Some(Err(failure));
            }
        }
        if parts.iter().any(|part| part.said.is_none()) {
            self.waiting.insert(id, parts);
            return Admission::Waits;
        }
        self.conclude(now, &parts).map_or(Admission::NotLimited, Admission::Decided)
    }

    /// A request will not hear its decision any more: its client left.
    pub fn gone(&mut self, id: RequestId) {
        self.waiting.remove(&id);
    }

    /// The stream that [`Effect::Open`] asked for has reached Redis.
    pub fn connected(&mut self, now: Instant) {
        self.exchange.connected(now);
        self.settle(now);
    }

    /// Redis said something.
    pub fn received(&mut self, now: Instant, bytes: &[u8]) {
        self.exchange.received(now, bytes);
        self.settle(now);
    }

    /// The stream is gone or could not be opened, for this reason.
    pub fn closed(&mut self, now: Instant, reason: &str) {
        self.exchange.closed(now, &exchange::printable(reason));
        self.settle(now);
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Instant) {
        self.exchange.tick(now);
        self.settle(now);
        let counts = self.exchange.take_counts();
        self.stats.add(Counter::Call(CallResult::Noscript), counts.noscript);
        self.stats.add(Counter::Call(CallResult::Late), counts.late);
        self.stats.add(Counter::Reconnect, counts.reconnects);
    }

    /// When the next tick is wanted, from now on; `None` where nothing is under way.
    pub fn next_tick(&self, now: Instant) -> Option<Duration> {
        self.exchange.next_tick(now)
    }

    /// The next thing to do.
    pub fn next_effect(&mut self, now: Instant) -> Option<Effect> {
        self.settle(now);
        self.effects.pop_front()
    }

    /// The counts since they were last taken.
    pub const fn stats(&mut self) -> &mut Stats {
        &mut self.stats
    }

    /// Takes in what the exchange wants done.
    fn settle(&mut self, now: Instant) {
        while let Some(effect) = self.exchange.next_effect() {
            match effect {
                exchange::Effect::Open => self.effects.push_back(Effect::Open),
                exchange::Effect::Send(bytes) => self.effects.push_back(Effect::Send(bytes)),
                exchange::Effect::Close => self.effects.push_back(Effect::Close),
                exchange::Effect::Answer { who, answer, took } => self.answered(now, who, answer, took),
            }
        }
        self.stats.gauges(self.exchange.in_flight(), self.exchange.is_ready());
    }

    fn answered(&mut self, now: Instant, who: Ticket, answer: Result<Reply, Failure>, took: Duration) {
        let limits = match who {
            Ticket::Request(id, place) => {
                self.waiting.get(&id).and_then(|parts| parts.get(place)).map(|part| part.charge.limits().len())
            }
            Ticket::GiveBack => None,
        };
        let said = match (answer, limits) {
            (Err(failure), _) => Err(failure),
            // Nobody is there any more to make something of the numbers.
            (Ok(_), None) => {
                self.succeeded(now, took);
                if who == Ticket::GiveBack {
                    self.stats.count(Counter::GivenBack);
                }
                return;
            }
            (Ok(reply), Some(limits)) => Outcome::from_reply(&reply, ONE, limits).map_err(|unexpected| {
                Failure::error(ErrorKind::Protocol, &exchange::printable(&unexpected.to_string()))
            }),
        };
        match &said {
            Ok(_) => self.succeeded(now, took),
            Err(failure) => self.failed(now, failure),
        }
        if let Err(failure @ Failure::Error { kind: ErrorKind::Protocol, .. }) = &said {
            // An answer to something else: replies and commands are out of step.
            self.exchange.distrust(now, failure.clone());
        }
        let Ticket::Request(id, place) = who else {
            return;
        };
        let Some(parts) = self.waiting.get_mut(&id) else {
            return;
        };
        if let Some(part) = parts.get_mut(place) {
            part.said = Some(said);
        }
        if parts.iter().all(|part| part.said.is_some())
            && let Some(parts) = self.waiting.remove(&id)
            && let Some(decision) = self.conclude(now, &parts)
        {
            self.effects.push_back(Effect::Decide(id, decision));
        }
    }

    /// Decides a request all of whose parts are known, counts it, and gives back what it took in vain.
    fn conclude(&mut self, now: Instant, parts: &[Part]) -> Option<Decision> {
        let answers = parts
            .iter()
            .filter_map(|part| {
                let said = part.said.as_ref()?;
                Some(Answer { rule: part.charge.rule, limits: part.charge.limits(), shadow: part.charge.shadow, said })
            })
            .collect::<Vec<_>>();
        let mode = self.config.failure_mode;
        let decision = decide(&answers, mode)?;
        for answer in &answers {
            self.stats.count(Counter::Decision(answer.rule, rule_outcome(answer, mode)));
        }
        if !decision.verdict.admits() {
            for part in parts {
                if let Some(Ok(Outcome::Granted { .. })) = part.said {
                    self.give_back(now, part);
                }
            }
        }
        Some(decision)
    }

    fn give_back(&mut self, now: Instant, part: &Part) {
        let call = Call::give_back(part.charge.buckets(), part.charge.cost, ONE, part.now_ms);
        if let Err(failure) = self.exchange.call(now, Ticket::GiveBack, call) {
            self.failed(now, &failure);
        }
    }

    fn succeeded(&mut self, now: Instant, took: Duration) {
        self.stats.count(Counter::Call(CallResult::Ok));
        self.stats.call_took(u64::try_from(took.as_millis()).unwrap_or(u64::MAX));
        self.effects.extend(self.outage.answered(now).map(Effect::Log));
    }

    fn failed(&mut self, now: Instant, failure: &Failure) {
        let result = match failure {
            Failure::Timeout => CallResult::Timeout,
            Failure::Overload => CallResult::Overload,
            Failure::Error { kind, .. } => {
                self.stats.count(Counter::Error(*kind));
                CallResult::Error
            }
        };
        self.stats.count(Counter::Call(result));
        let then = self.config.failure_mode.in_words();
        self.effects.extend(self.outage.failed(now, failure, then).map(Effect::Log));
    }
}

#[cfg(test)]
mod tests;

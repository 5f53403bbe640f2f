//! The limiter of one worker: requests and replies in, decisions out. Pure; the shell in `filter` carries out what it
//! says.
//!
//! A request is decided when all its rules have been heard of: by a call that was answered or has failed, or without one,
//! where a denial is known or the breaker is open. Where a rule is known to deny it, the others are not asked. Requests that
//! want a bucket while it is being asked go in one call after that. What a denied request took from other rules is given
//! back; a call to give back that fails is lost, since repeating it might give back twice.
//!
//! Invariant: a request that [`Limiter::request`] told to wait gets exactly one [`Effect::Decide`], unless
//! [`Limiter::gone`] comes first.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use nohash_hasher::IntMap;

use crate::breaker::{Breaker, Change, Settings};
use crate::coalesce::{Group, Queues};
use crate::config::{Clock, Config};
use crate::decision::{Answer, Decision, FailureMode, decide, rule_outcome};
use crate::deny_cache::DenyCache;
use crate::exchange::{self, ErrorKind, Exchange, Failure, Reply, greeting};
use crate::local::{GrantedBy, LocalBuckets};
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
    /// No rule counts it: it goes on.
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

/// A request, for the part that one of its rules has in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Member {
    id: RequestId,
    place: usize,
}

/// Who waits for a call.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Ticket {
    /// Requests that want a bucket.
    Charges(Group<Member>),
    /// Nobody; a charge is given back to the buckets of which this is the first key.
    GiveBack(Rc<str>),
}

/// One rule's part in a request.
#[derive(Debug)]
struct Part {
    charge: Charge,
    /// The caller's time, where the configuration's clock is the proxy's.
    now_ms: Option<u64>,
    said: Option<Result<Outcome, Failure>>,
    /// Whether that was known without asking.
    known: bool,
    /// What this worker's own bucket said, where it was asked.
    local: Option<Outcome>,
}

impl Part {
    /// Asks this worker's own bucket, where it is the one that decides, or has a say after an outage.
    fn ask(&mut self, now: Instant, local: &mut LocalBuckets) {
        let charge = &self.charge;
        if charge.failure_mode != FailureMode::Local || charge.shadow || self.known {
            return;
        }
        self.local = match &self.said {
            Some(Err(_)) => local.charge(now, charge),
            Some(Ok(Outcome::Granted { .. })) => local.confirm(now, charge),
            _ => None,
        };
        if let (Some(Ok(outcome)), None) = (&self.said, self.local) {
            local.heard(now, charge, outcome.standing());
        }
    }
}

/// The limiter of one worker.
#[derive(Debug)]
pub struct Limiter {
    config: Config,
    exchange: Exchange<Ticket>,
    queues: Queues<Member>,
    was_ready: bool,
    /// The requests that wait, each with the parts of the rules that apply to it, in the order of the configuration.
    waiting: IntMap<RequestId, Vec<Part>>,
    breaker: Breaker,
    deny_cache: Option<DenyCache>,
    /// Where a rule wants them.
    local: Option<LocalBuckets>,
    stats: Stats,
    outage: Outage,
    effects: VecDeque<Effect>,
}

const ONE: NonZeroU32 = NonZeroU32::MIN;

/// The part of `redis.timeout` for which a request waits for the answer to another's call before it asks for itself. Most of
/// it is left for its own then.
const PATIENCE: u32 = 4;

impl Limiter {
    /// A limiter without a connection; the first tick asks for one. The seed should differ between workers.
    pub fn new(config: Config, seed: u64, now: Instant) -> Self {
        let redis = &config.redis;
        let settings = exchange::Settings {
            timeout: redis.timeout,
            max_in_flight: redis.max_in_flight,
            greeting: greeting(
                redis.credentials.username.as_deref(),
                redis.credentials.password.as_deref(),
                redis.database,
            ),
            seed,
        };
        let wants_local = config.rules.iter().any(|rule| rule.policy().failure_mode == FailureMode::Local);
        Self {
            exchange: Exchange::new(settings, now),
            queues: Queues::new(if config.coalesces { redis.timeout / PATIENCE } else { Duration::ZERO }),
            was_ready: false,
            breaker: Breaker::new(redis.breaker, seed),
            deny_cache: DenyCache::new(config.deny_cache),
            local: wants_local.then(|| LocalBuckets::new(config.local_share)),
            waiting: IntMap::default(),
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

    /// What a request meets. Where that is nothing it goes on, and nobody needs to know the time.
    pub fn meets(&self, facts: &dyn Facts) -> Vec<Application> {
        rule::apply(&self.config, facts)
    }

    /// A request has come that meets these. `wall_ms` gives the time of day in milliseconds since 1970 and is asked only
    /// where the configuration's clock is the proxy's.
    pub fn request(
        &mut self,
        now: Instant,
        wall_ms: impl FnOnce() -> u64,
        id: RequestId,
        met: Vec<Application>,
    ) -> Admission {
        let now_ms = match self.config.clock {
            Clock::Redis => None,
            Clock::Proxy => Some(wall_ms()),
        };
        let mut parts = Vec::new();
        for application in met {
            match application {
                Application::Charge(charge) => {
                    parts.push(Part { charge, now_ms, said: None, known: false, local: None });
                }
                Application::Skipped { rule } => self.stats.count(Counter::Skipped(rule)),
            }
        }
        if parts.is_empty() {
            return Admission::NotLimited;
        }
        self.recall(now, &mut parts);
        let unknown = parts.iter().any(|part| part.said.is_none());
        let asks = unknown && self.breaker.admits(now);
        if !asks {
            for part in parts.iter_mut().filter(|part| part.said.is_none()) {
                self.failed(now, &Failure::Breaker, part.charge.failure_mode);
                part.said = Some(Err(Failure::Breaker));
            }
            return self.conclude(now, &mut parts).map_or(Admission::NotLimited, Admission::Decided);
        }
        let count = parts.len();
        self.waiting.insert(id, parts);
        for member in (0..count).map(|place| Member { id, place }) {
            let unknown = self.part(member).filter(|part| part.said.is_none());
            let Some(bucket) = unknown.map(|part| Rc::clone(part.charge.first_key())) else { continue };
            if self.queues.under_way() >= self.config.redis.max_in_flight {
                self.failed(now, &Failure::Overload, self.failure_mode(member));
                self.say(now, member, Err(Failure::Overload));
            } else if let Some(group) = self.queues.join(now, &bucket, member) {
                self.ask(now, group);
            }
        }
        Admission::Waits
    }

    /// A request will not hear its decision any more: its client left.
    pub fn gone(&mut self, id: RequestId) {
        for (place, part) in self.waiting.remove(&id).iter().flatten().enumerate() {
            self.queues.leave(part.charge.first_key(), &Member { id, place });
        }
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
        for group in self.queues.overdue(now) {
            self.ask(now, group);
        }
        let counts = self.exchange.take_counts();
        self.stats.add(Counter::Call(CallResult::Noscript), counts.noscript);
        self.stats.add(Counter::Call(CallResult::Late), counts.late);
        self.stats.add(Counter::Reconnect, counts.reconnects);
    }

    /// The end of this limiter: its gauges go back to where they began.
    pub fn shut_down(&mut self, now: Instant) {
        self.closed(now, "shutting down");
        self.stats.gauges(0, false, false);
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
        let ready = self.exchange.is_ready();
        if ready && !self.was_ready {
            self.breaker.connected(now);
        }
        self.was_ready = ready;
        self.stats.gauges(self.exchange.in_flight(), ready, self.breaker.is_open());
    }

    /// Asks for a bucket: those who want the same of it in one call, the others after them.
    fn ask(&mut self, now: Instant, group: Group<Member>) {
        let (bucket, mut calls, mut rest) = (Rc::clone(&group.bucket), 0_usize, Some(group));
        while let Some(mut group) = rest {
            rest = group.split_off(|one, other| match (self.part(*one), self.part(*other)) {
                (Some(one), Some(other)) => one.charge.asks_like(&other.charge),
                _ => false,
            });
            let Some(first) = self.part(group.first) else {
                self.queues.decided(group.size());
                continue;
            };
            let now_ms = group.members().filter_map(|member| self.part(*member)?.now_ms).max();
            let call = Call::charge(first.charge.buckets(), first.charge.cost, count(&group), now_ms);
            let called = self.exchange.call(now, group.since, Ticket::Charges(group.clone()), call);
            match called {
                Ok(()) => {
                    calls = calls.saturating_add(1);
                    self.stats.add(Counter::Coalesced, group.others.len() as u64);
                }
                Err(failure) => {
                    self.queues.decided(group.size());
                    self.failed(now, &failure, self.failure_mode(group.first));
                    group.members().for_each(|member| self.say(now, *member, Err(failure.clone())));
                }
            }
        }
        self.queues.called(now, &bucket, calls);
    }

    fn answered(&mut self, now: Instant, who: Ticket, answer: Result<Reply, Failure>, took: Duration) {
        match who {
            Ticket::Charges(group) => self.group_answered(now, &group, answer, took),
            Ticket::GiveBack(bucket) => match answer {
                Ok(_) => {
                    self.succeeded(now, took);
                    self.stats.count(Counter::GivenBack);
                    // What was answered before this was asked before it, of a bucket that held less.
                    if let Some(deny_cache) = &mut self.deny_cache {
                        deny_cache.forget(&bucket);
                    }
                }
                Err(failure) => self.failed(now, &failure, self.config.failure_mode),
            },
        }
    }

    fn group_answered(&mut self, now: Instant, group: &Group<Member>, answer: Result<Reply, Failure>, took: Duration) {
        let first = group.members().find_map(|member| self.part(*member));
        let limits = first.map(|part| part.charge.limits().len());
        let failure_mode = first.map_or(self.config.failure_mode, |part| part.charge.failure_mode);
        let said = match (answer, limits) {
            (Err(failure), _) => Some(Err(failure)),
            // Nobody is there any more to make something of the numbers.
            (Ok(_), None) => None,
            (Ok(reply), Some(limits)) => {
                Some(Outcome::from_reply(&reply, count(group), limits).map_err(|unexpected| {
                    Failure::error(ErrorKind::Protocol, &exchange::printable(&unexpected.to_string()))
                }))
            }
        };
        if let Some(Err(failure)) = &said {
            self.failed(now, failure, failure_mode);
        } else {
            self.succeeded(now, took);
        }
        if let Some(Err(failure @ Failure::Error { kind: ErrorKind::Protocol, .. })) = &said {
            // An answer to something else: replies and commands are out of step.
            self.exchange.distrust(now, failure.clone());
        }
        // Of those who are still there, in the order in which they came.
        let mut place = 0;
        for member in group.members().copied() {
            if self.part(member).is_none() {
                continue;
            }
            match &said {
                Some(Ok(outcome)) => self.heard(now, took, member, outcome.of_one(place)),
                Some(Err(failure)) => self.say(now, member, Err(failure.clone())),
                None => {}
            }
            place = place.saturating_add(1);
        }
        if let Some(next) = self.queues.answered(&group.bucket, group.size()) {
            self.go_on(now, next);
        }
    }

    /// Redis has answered a member's charge.
    fn heard(&mut self, now: Instant, took: Duration, member: Member, outcome: Outcome) {
        if let Some(deny_cache) = &mut self.deny_cache
            && let Some(part) = self.waiting.get(&member.id).and_then(|parts| parts.get(member.place))
        {
            deny_cache.heard(now, took, &part.charge, &outcome);
        }
        self.say(now, member, Ok(outcome));
    }

    /// The turn of those who have waited for the answer to others. It may be all that they need to know.
    fn go_on(&mut self, now: Instant, group: Group<Member>) {
        let bucket = Rc::clone(&group.bucket);
        let mut unknown = Vec::new();
        for member in group.members() {
            let known = match (self.waiting.get_mut(&member.id), &mut self.deny_cache) {
                (Some(parts), Some(deny_cache)) => parts.get_mut(member.place).and_then(|part| {
                    let known = deny_cache.look_up(now, &part.charge);
                    part.known = known.is_some();
                    known
                }),
                _ => None,
            };
            match known {
                Some(outcome) => {
                    self.stats.count(Counter::DenyCacheHit);
                    self.queues.decided(1);
                    self.say(now, *member, Ok(outcome));
                }
                None => unknown.push(*member),
            }
        }
        let mut unknown = unknown.into_iter();
        let Some(first) = unknown.next() else {
            return self.queues.called(now, &bucket, 0);
        };
        let group = Group { first, others: unknown.collect(), ..group };
        if self.breaker.admits(now) {
            return self.ask(now, group);
        }
        self.queues.decided(group.size());
        for member in group.members() {
            self.failed(now, &Failure::Breaker, self.failure_mode(*member));
            self.say(now, *member, Err(Failure::Breaker));
        }
        self.queues.called(now, &bucket, 0);
    }

    /// A part of a request is known now. The last one decides it.
    fn say(&mut self, now: Instant, member: Member, said: Result<Outcome, Failure>) {
        let Some(parts) = self.waiting.get_mut(&member.id) else {
            return;
        };
        if let Some(part) = parts.get_mut(member.place) {
            part.said = Some(said);
        }
        if parts.iter().all(|part| part.said.is_some())
            && let Some(mut parts) = self.waiting.remove(&member.id)
            && let Some(decision) = self.conclude(now, &mut parts)
        {
            self.effects.push_back(Effect::Decide(member.id, decision));
        }
    }

    fn part(&self, member: Member) -> Option<&Part> {
        self.waiting.get(&member.id)?.get(member.place)
    }

    /// What becomes of a member that fails, for the log.
    fn failure_mode(&self, member: Member) -> FailureMode {
        self.part(member).map_or(self.config.failure_mode, |part| part.charge.failure_mode)
    }

    /// Decides a request all of whose parts are known, counts it, and gives back what it took in vain.
    fn conclude(&mut self, now: Instant, parts: &mut [Part]) -> Option<Decision> {
        if let Some(local) = &mut self.local {
            parts.iter_mut().for_each(|part| part.ask(now, local));
        }
        let answers = parts
            .iter()
            .filter_map(|part| {
                let said = part.said.as_ref()?;
                let Charge { rule, shadow, failure_mode: mode, .. } = part.charge;
                Some(Answer { rule, limits: part.charge.limits(), shadow, mode, said, local: part.local })
            })
            .collect::<Vec<_>>();
        let decision = decide(&answers)?;
        for answer in &answers {
            self.stats.count(Counter::Decision(answer.rule, rule_outcome(answer)));
        }
        if !decision.verdict.admits() {
            for part in parts {
                if let Some(Ok(Outcome::Granted { .. })) = part.said {
                    self.give_back(now, part);
                }
                if let (Some(Outcome::Granted { .. }), Some(local)) = (part.local, &mut self.local) {
                    let redis_was_asked = matches!(part.said, Some(Ok(_)));
                    let granted_by = if redis_was_asked { GrantedBy::Whole } else { GrantedBy::Share };
                    local.give_back(now, &part.charge, granted_by);
                }
            }
        }
        Some(decision)
    }

    /// Answers what is known without asking. Where that denies the request, the other rules have no part in it.
    fn recall(&mut self, now: Instant, parts: &mut Vec<Part>) {
        let Some(deny_cache) = &mut self.deny_cache else { return };
        let mut denied = false;
        for part in parts.iter_mut() {
            if let Some(outcome) = deny_cache.look_up(now, &part.charge) {
                (part.said, part.known) = (Some(Ok(outcome)), true);
                denied = denied || !part.charge.shadow;
                self.stats.count(Counter::DenyCacheHit);
            }
        }
        if denied {
            parts.retain(|part| part.known);
        }
    }

    fn give_back(&mut self, now: Instant, part: &Part) {
        let call = Call::give_back(part.charge.buckets(), part.charge.cost, ONE, part.now_ms);
        let who = Ticket::GiveBack(Rc::clone(part.charge.first_key()));
        if let Err(failure) = self.exchange.call(now, now, who, call) {
            self.failed(now, &failure, part.charge.failure_mode);
        }
    }

    fn succeeded(&mut self, now: Instant, took: Duration) {
        self.stats.count(Counter::Call(CallResult::Ok));
        self.stats.call_took(u64::try_from(took.as_millis()).unwrap_or(u64::MAX));
        self.redis_works();
        self.effects.extend(self.outage.answered(now).map(Effect::Log));
    }

    fn failed(&mut self, now: Instant, failure: &Failure, mode: FailureMode) {
        let result = match failure {
            Failure::Timeout => CallResult::Timeout,
            Failure::Overload => CallResult::Overload,
            Failure::Breaker => CallResult::Breaker,
            Failure::Error { kind, .. } => {
                self.stats.count(Counter::Error(*kind));
                CallResult::Error
            }
        };
        self.stats.count(Counter::Call(result));
        match failure {
            // Nothing was asked, so there is no news.
            Failure::Breaker => return,
            Failure::Overload => {}
            // The server works; this one key is not what it should be.
            Failure::Error { kind: ErrorKind::Type, .. } => self.redis_works(),
            Failure::Timeout | Failure::Error { .. } => {
                if let Some(Change::Opened) = self.breaker.failed(now) {
                    let Settings { failures, cool_down } = self.config.redis.breaker;
                    self.log(format!(
                        "the breaker is open after {failures} failures in a row: Redis is asked once in {} ms",
                        cool_down.as_millis()
                    ));
                }
            }
        }
        self.effects.extend(self.outage.failed(now, failure, mode.in_words()).map(Effect::Log));
    }

    fn redis_works(&mut self) {
        if let Some(Change::Closed) = self.breaker.answered() {
            self.log("the breaker is closed: Redis has answered".to_owned());
        }
    }

    fn log(&mut self, line: String) {
        self.effects.push_back(Effect::Log(Line::Info(line)));
    }
}

/// How many charges a group asks for.
fn count(group: &Group<Member>) -> NonZeroU32 {
    u32::try_from(group.size()).ok().and_then(NonZeroU32::new).unwrap_or(ONE)
}

#[cfg(test)]
mod tests;

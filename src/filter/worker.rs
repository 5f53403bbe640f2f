//! What the contexts of one worker share, and how the limiter's effects are carried out.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use nohash_hasher::IntMap;

use super::host::{self, Action, LogLevel};
use super::http::Http;
use crate::config::Config;
use crate::decision::Decision;
use crate::limiter::{Admission, Effect, Limiter, RequestId};
use crate::outage::Line;
use crate::request::Facts;
use crate::response::{self, Answer};
use crate::rule::Application;
use crate::stats::{Change, Stats};

/// The time between ticks while nothing is under way. Only a guard: whatever needs one sooner asks for it.
const IDLE_TICK: Duration = Duration::from_secs(10);
/// How soon counts are handed over where nothing else asks for a tick.
const FLUSH_TICK: Duration = Duration::from_millis(50);

/// The method of the stream's request, which the tunnel does not look at.
const SERVICE: &str = "meshquota";
const METHOD: &str = "Tunnel";

/// The property in which the rules stand that a request has met, by their places in the configuration.
const MET: &str = "quota_met";

/// A handle on what the contexts of one worker and one configuration share.
#[derive(Clone)]
pub struct Worker {
    root_id: u32,
    state: Rc<RefCell<State>>,
}

struct State {
    limiter: Limiter,
    /// The proxy's numbers for the metrics, in the order of [`Stats::metrics`].
    metrics: Vec<u32>,
    /// The stream to Redis, where there is one.
    stream: Option<u32>,
    /// The requests that wait for their decisions.
    waiting: IntMap<RequestId, Rc<Http>>,
    /// The tick period that the proxy was asked for last.
    tick: Option<Duration>,
}

/// Which ticks to ask for. One that comes too early does no harm, so only a tick itself finds out that the next may be
/// later; requests and replies, which are many, ask for sooner ones only.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Sooner,
    Any,
}

impl Worker {
    /// A worker for a configuration, with its metrics defined.
    pub fn new(root_id: u32, config: Config) -> Self {
        let mut metrics = Vec::new();
        for metric in Stats::metrics(config.rules.iter().map(|rule| rule.name().as_str())) {
            // A metric that cannot be defined is missed, and nothing else.
            metrics.push(host::define_metric(&metric).unwrap_or(u32::MAX));
        }
        let limiter = Limiter::new(config, seed(root_id), Instant::now());
        let state = State { limiter, metrics, stream: None, waiting: IntMap::default(), tick: None };
        Self { root_id, state: Rc::new(RefCell::new(state)) }
    }

    /// Asks for the first tick, which opens the stream. The root context is the effective one.
    pub fn start(&self) {
        let _ = host::keep_property(MET);
        self.arm(Instant::now(), self.root_id, Next::Sooner);
    }

    /// Does something with the state. `None` where it is in use, which no path leads to: while it is borrowed the proxy
    /// is asked for the time of day and for facts about a request at most, and that calls nothing back.
    fn with<R>(&self, act: impl FnOnce(&mut State) -> R) -> Option<R> {
        self.state.try_borrow_mut().ok().map(|mut state| act(&mut state))
    }

    /// The headers of a request have come; its context is the effective one. Returns what becomes of it now.
    pub fn request(&self, request: &Rc<Http>, facts: &dyn Facts) -> Action {
        let mut met = self.with(|state| state.limiter.meets(facts)).unwrap_or_default();
        let mut done = if met.is_empty() { Vec::new() } else { met_before(facts) };
        met.retain(|application| !done.contains(&application.rule()));
        if met.is_empty() {
            return Action::Continue;
        }
        done.extend(met.iter().map(Application::rule));
        request.meets(done);
        let (now, id) = (Instant::now(), request.id());
        let admission = self.with(|state| {
            let admission = state.limiter.request(now, host::wall_ms, id, met);
            if admission == Admission::Waits {
                state.waiting.insert(id, Rc::clone(request));
            }
            admission
        });
        // The calls go out on the stream of the root context.
        let sooner = self.carry_out(now, id);
        match (admission, sooner) {
            (Some(Admission::Decided(decision)), _) | (Some(Admission::Waits), Some(decision)) => {
                request.answer(self.answer(&decision))
            }
            (Some(Admission::Waits), None) => request.wait(),
            (Some(Admission::NotLimited) | None, _) => request.answer(Answer::Continue(Vec::new())),
        }
    }

    /// The context of a request ends.
    pub fn gone(&self, id: RequestId) {
        self.with(|state| {
            if state.waiting.remove(&id).is_some() {
                state.limiter.gone(id);
            }
        });
    }

    /// Writes down which rules the request of the effective context has met.
    pub fn remember(&self, rules: &[usize]) {
        let rules = rules.iter().map(usize::to_string).collect::<Vec<_>>();
        let _ = host::set_property(MET, &rules.join(","));
    }

    /// A tick of the root context.
    pub fn tick(&self) {
        let now = Instant::now();
        self.with(|state| state.limiter.tick(now));
        self.carry_out(now, self.root_id);
        self.flush();
        self.arm(now, self.root_id, Next::Any);
    }

    /// The stream with this token has reached Redis.
    pub fn connected(&self, token: u32) {
        self.on_stream(token, |limiter, now| limiter.connected(now));
    }

    /// Bytes have come on the stream with this token.
    pub fn received(&self, token: u32, bytes: &[u8]) {
        self.on_stream(token, |limiter, now| limiter.received(now, bytes));
    }

    /// The stream with this token is gone.
    pub fn closed(&self, token: u32, reason: &str) {
        let current = self.with(|state| state.stream.take_if(|current| *current == token).is_some());
        if current == Some(true) {
            let now = Instant::now();
            self.with(|state| state.limiter.closed(now, reason));
            self.carry_out(now, self.root_id);
        }
    }

    /// The configuration ends on this worker: no request is left.
    pub fn shut_down(&self) {
        self.close(self.root_id);
        // Brings the gauges back to zero.
        self.with(|state| state.limiter.shut_down(Instant::now()));
        self.flush();
    }

    fn on_stream(&self, token: u32, act: impl FnOnce(&mut Limiter, Instant)) {
        let now = Instant::now();
        let current = self.with(|state| {
            // A stream that was given up may still have had something to say.
            let current = state.stream == Some(token);
            if current {
                act(&mut state.limiter, now);
            }
            current
        });
        if current == Some(true) {
            self.carry_out(now, self.root_id);
        }
    }

    /// Carries out what the limiter wants, then asks for the tick that it wants. `effective` is the context for which
    /// the proxy made the current callback. The decision for that very context is returned and not carried out: a
    /// request that is not paused yet cannot be resumed.
    fn carry_out(&self, now: Instant, effective: u32) -> Option<Decision> {
        // A decision leaves its request's context the effective one: the next one makes another so anyway.
        let (mut own, mut context) = (None, effective);
        while let Some(effect) = self.with(|state| state.limiter.next_effect(now)).flatten() {
            match effect {
                Effect::Open => self.open(now),
                Effect::Send(bytes) => self.send(now, &bytes, context),
                Effect::Close => self.close(context),
                Effect::Decide(id, decision) if id == effective => {
                    self.with(|state| state.waiting.remove(&id));
                    own = Some(decision);
                }
                Effect::Decide(id, decision) => {
                    self.decide(id, &decision);
                    context = id;
                }
                Effect::Log(Line::Warning(line)) => host::log(LogLevel::Warn, &line),
                Effect::Log(Line::Info(line)) => host::log(LogLevel::Info, &line),
            }
        }
        if context != effective {
            let _ = host::set_effective_context(effective);
        }
        self.arm(now, effective, Next::Sooner);
        own
    }

    fn open(&self, now: Instant) {
        let cluster = self.with(|state| state.limiter.config().redis.cluster.clone());
        let Some(cluster) = cluster else { return };
        // The stream's callbacks go to the context that is the effective one now: effects that open a stream come from
        // ticks, which are the root context's.
        match host::grpc_open(&cluster, SERVICE, METHOD) {
            Ok(token) => {
                self.with(|state| state.stream = Some(token));
            }
            Err(_) => {
                let reason = format!("no cluster {cluster}, or no stream to it");
                self.with(|state| state.limiter.closed(now, &reason));
            }
        }
    }

    fn send(&self, now: Instant, bytes: &[u8], effective: u32) {
        let sent = match self.with(|state| state.stream).flatten() {
            Some(token) => self.as_root(effective, || host::grpc_send(token, bytes)).is_ok(),
            None => false,
        };
        if !sent {
            self.close(effective);
            self.with(|state| state.limiter.closed(now, "the stream takes no more"));
        }
    }

    fn close(&self, effective: u32) {
        if let Some(token) = self.with(|state| state.stream.take()).flatten() {
            // Refused where it is closed already.
            let _ = self.as_root(effective, || host::grpc_cancel(token));
        }
    }

    /// Does to a request what was decided. Its client may have left: a normal case.
    fn decide(&self, id: RequestId, decision: &Decision) {
        let Some(request) = self.with(|state| state.waiting.remove(&id)).flatten() else { return };
        if host::set_effective_context(id).is_ok() && request.answer(self.answer(decision)) == Action::Continue {
            let _ = host::continue_request();
        }
    }

    /// What to do to the request of the effective context, for which this was decided. It is also said in its access log.
    fn answer(&self, decision: &Decision) -> Answer {
        self.log_decision(decision);
        let answer = self.with(|state| response::answer(state.limiter.config(), decision));
        answer.unwrap_or(Answer::Continue(Vec::new()))
    }

    /// Writes a decision where an access log finds it. The request's context is the effective one.
    fn log_decision(&self, decision: &Decision) {
        let (outcome, rule) = decision.told();
        let _ = host::set_property("quota_decision", outcome.name());
        let rule = self.with(|state| state.limiter.config().rules.get(rule).map(|rule| rule.name().clone()));
        if let Some(rule) = rule.flatten() {
            let _ = host::set_property("quota_rule", rule.as_str());
        }
        if let Some(quota) = decision.verdict.quota() {
            let _ = host::set_property("quota_remaining", &quota.remaining.to_string());
        }
    }

    fn as_root<R>(&self, effective: u32, act: impl FnOnce() -> Result<R, host::Refused>) -> Result<R, host::Refused> {
        if effective == self.root_id {
            return act();
        }
        host::set_effective_context(self.root_id)?;
        let done = act();
        let _ = host::set_effective_context(effective);
        done
    }

    /// Asks for the tick that is wanted next, where that is not the one that is coming anyway.
    fn arm(&self, now: Instant, effective: u32, next: Next) {
        let wanted = self.with(|state| {
            let flush = state.limiter.stats().is_dirty().then_some(FLUSH_TICK);
            let wanted = state.limiter.next_tick(now).into_iter().chain(flush).min().unwrap_or(IDLE_TICK);
            let other = state.tick.is_none_or(|tick| wanted < tick || (next == Next::Any && wanted != tick));
            other.then(|| {
                state.tick = Some(wanted);
                wanted
            })
        });
        if let Some(period) = wanted.flatten() {
            let _ = self.as_root(effective, || host::set_tick_period(period));
        }
    }

    /// Hands the counts over to the proxy.
    fn flush(&self) {
        let changes = self.with(|state| {
            let changes = state.limiter.stats().take();
            let id = |place: usize| state.metrics.get(place).copied().unwrap_or(u32::MAX);
            changes.into_iter().map(|change| (id(change.metric()), change)).collect::<Vec<_>>()
        });
        for (id, change) in changes.unwrap_or_default() {
            let _ = match change {
                Change::Add(_, by) => host::increment_metric(id, by),
                Change::Record(_, value) => host::record_metric(id, value),
            };
        }
    }
}

/// The rules that a request met before the proxy followed a redirect itself: they are done with it. Anybody may send the
/// header; only this filter writes the property.
fn met_before(facts: &dyn Facts) -> Vec<usize> {
    if facts.header("x-envoy-original-url").is_none() {
        return Vec::new();
    }
    let before = facts.property(&[MET]).unwrap_or_default();
    String::from_utf8_lossy(&before).split(',').filter_map(|rule| rule.parse().ok()).collect()
}

/// A number that differs between workers and starts: their clocks and places in memory do.
fn seed(root_id: u32) -> u64 {
    use std::hash::{BuildHasher, Hasher};
    let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
    hasher.write_u32(root_id);
    hasher.write_u64(host::wall_ms());
    hasher.finish()
}

//! What is counted, and under which names the proxy knows it.
//!
//! Counts are gathered here and handed to the proxy once a tick, so that a request costs no host calls for them. The
//! set of metrics depends on the configuration alone: a rule's name is the only thing from outside in a name.
//!
//! Names carry their labels inside, as Istio writes its own (`meshquota_decisions.rule=.=a;.;outcome=.=deny;.;total`);
//! one `stats_tags` entry a label takes them out again for Prometheus.

use std::fmt;

use crate::exchange::ErrorKind;

/// How a rule's part in a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleOutcome {
    /// The bucket had enough.
    Allow,
    /// The bucket had too little, or can never have enough.
    Deny,
    /// The bucket had too little, but the rule only watches.
    ShadowDeny,
    /// The bucket could not be asked, and the failure mode let the request go on.
    FailAllow,
    /// The bucket could not be asked, and the failure mode refused the request.
    FailDeny,
    /// The bucket could not be asked, and one of this worker's own had enough.
    LocalAllow,
    /// This worker's own bucket had too little.
    LocalDeny,
}

impl RuleOutcome {
    const ALL: [Self; 7] =
        [Self::Allow, Self::Deny, Self::ShadowDeny, Self::FailAllow, Self::FailDeny, Self::LocalAllow, Self::LocalDeny];

    /// The value of the label `outcome`, and of the access log's `quota_decision`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
            Self::ShadowDeny => "shadow_deny",
            Self::FailAllow => "fail_allow",
            Self::FailDeny => "fail_deny",
            Self::LocalAllow => "local_allow",
            Self::LocalDeny => "local_deny",
        }
    }
}

/// How a call to Redis ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallResult {
    /// It was answered.
    Ok,
    /// The server did not know the script; the call was sent again.
    Noscript,
    /// Its deadline passed.
    Timeout,
    /// Too many calls were under way.
    Overload,
    /// It was not made, since too many before it had failed.
    Breaker,
    /// It was answered by an error, or the connection failed.
    Error,
    /// Its answer came after its deadline. It has been counted as a timeout before.
    Late,
}

impl CallResult {
    const ALL: [Self; 7] =
        [Self::Ok, Self::Noscript, Self::Timeout, Self::Overload, Self::Breaker, Self::Error, Self::Late];

    const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Noscript => "noscript",
            Self::Timeout => "timeout",
            Self::Overload => "overload",
            Self::Breaker => "breaker",
            Self::Error => "error",
            Self::Late => "late",
        }
    }
}

/// A count that only rises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counter {
    /// A rule's part in a request, by the rule's place in the configuration.
    Decision(usize, RuleOutcome),
    /// A rule applied, but the request has no identity for it.
    Skipped(usize),
    /// A call to Redis.
    Call(CallResult),
    /// An error of Redis, or on the way to it.
    Error(ErrorKind),
    /// A denial that was known without asking.
    DenyCacheHit,
    /// A charge that needed no call of its own, since it went with another.
    Coalesced,
    /// A charge given back, because another rule denied the request.
    GivenBack,
    /// A connection made after the first one of this worker.
    Reconnect,
}

/// What the proxy is told that a metric is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricType {
    /// Only rises.
    Counter,
    /// Rises and falls, by increments: all workers share it.
    Gauge,
    /// Whole milliseconds.
    Histogram,
}

/// A metric to define before the first request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its type.
    pub metric_type: MetricType,
    /// Its name, labels inside.
    pub name: String,
}

/// A change to hand to the proxy; the number is the metric's place in [`Stats::metrics`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Add to a counter or a gauge.
    Add(usize, i64),
    /// Record a value in a histogram.
    Record(usize, u64),
}

impl Change {
    /// The place of the metric that changes.
    pub const fn metric(self) -> usize {
        match self {
            Self::Add(place, _) | Self::Record(place, _) => place,
        }
    }
}

const CALLS: usize = 0;
const ERRORS: usize = CALLS + CallResult::ALL.len();
const DENY_CACHE_HITS: usize = ERRORS + ErrorKind::ALL.len();
const COALESCED: usize = DENY_CACHE_HITS + 1;
const GIVEN_BACK: usize = COALESCED + 1;
const RECONNECTS: usize = GIVEN_BACK + 1;
const IN_FLIGHT: usize = RECONNECTS + 1;
const CONNECTED: usize = IN_FLIGHT + 1;
const BREAKER_OPEN: usize = CONNECTED + 1;
const CALL_MS: usize = BREAKER_OPEN + 1;
const RULES: usize = CALL_MS + 1;
const PER_RULE: usize = RuleOutcome::ALL.len() + 1;

/// The counts of one worker since they were last handed over.
#[derive(Debug)]
pub struct Stats {
    added: Vec<i64>,
    dirty: bool,
    call_ms: Vec<u64>,
    in_flight: i64,
    connected: i64,
    breaker_open: i64,
}

impl Stats {
    /// The metrics of a configuration with these rules, in the order of the numbers in [`Change`].
    pub fn metrics<'a>(rules: impl IntoIterator<Item = &'a str>) -> Vec<Metric> {
        let counter = |name| Metric { metric_type: MetricType::Counter, name };
        let gauge = |name: &str| Metric { metric_type: MetricType::Gauge, name: name.to_owned() };
        let mut metrics = Vec::new();
        for result in CallResult::ALL {
            metrics.push(counter(labelled("redis_calls", &[("result", result.name())])));
        }
        for kind in ErrorKind::ALL {
            metrics.push(counter(labelled("redis_errors", &[("kind", kind.name())])));
        }
        metrics.push(counter("meshquota_deny_cache_hits_total".to_owned()));
        metrics.push(counter("meshquota_coalesced_total".to_owned()));
        metrics.push(counter("meshquota_given_back_total".to_owned()));
        metrics.push(counter("meshquota_reconnects_total".to_owned()));
        metrics.push(gauge("meshquota_redis_in_flight"));
        metrics.push(gauge("meshquota_connected"));
        metrics.push(gauge("meshquota_breaker_open"));
        metrics.push(Metric { metric_type: MetricType::Histogram, name: "meshquota_redis_call_ms".to_owned() });
        for rule in rules {
            for outcome in RuleOutcome::ALL {
                let labels = [("rule", rule), ("outcome", outcome.name())];
                metrics.push(counter(labelled("decisions", &labels)));
            }
            metrics.push(counter(labelled("skipped", &[("rule", rule)])));
        }
        metrics
    }

    /// No counts, for so many rules.
    pub fn new(rules: usize) -> Self {
        Self {
            added: vec![0; RULES.saturating_add(PER_RULE.saturating_mul(rules))],
            dirty: false,
            call_ms: Vec::new(),
            in_flight: 0,
            connected: 0,
            breaker_open: 0,
        }
    }

    /// Counts once.
    pub fn count(&mut self, counter: Counter) {
        self.add(counter, 1);
    }

    /// Counts so many times.
    pub fn add(&mut self, counter: Counter, times: u64) {
        if times > 0 {
            self.change(place(counter), i64::try_from(times).unwrap_or(i64::MAX));
        }
    }

    /// Records how long a call took, in milliseconds.
    pub fn call_took(&mut self, milliseconds: u64) {
        self.call_ms.push(milliseconds);
        self.dirty = true;
    }

    /// Says where the gauges of this worker stand.
    pub fn gauges(&mut self, in_flight: usize, connected: bool, breaker_open: bool) {
        let in_flight = i64::try_from(in_flight).unwrap_or(i64::MAX);
        let (connected, breaker_open) = (i64::from(connected), i64::from(breaker_open));
        self.change(IN_FLIGHT, in_flight.saturating_sub(self.in_flight));
        self.change(CONNECTED, connected.saturating_sub(self.connected));
        self.change(BREAKER_OPEN, breaker_open.saturating_sub(self.breaker_open));
        (self.in_flight, self.connected, self.breaker_open) = (in_flight, connected, breaker_open);
    }

    /// Whether there is something to hand over.
    pub const fn is_dirty(&self) -> bool {
        self.dirty
    }

    /// Hands over what has changed, and begins again.
    pub fn take(&mut self) -> Vec<Change> {
        if !std::mem::take(&mut self.dirty) {
            return Vec::new();
        }
        let mut changes = Vec::new();
        for (place, added) in self.added.iter_mut().enumerate().filter(|(_, added)| **added != 0) {
            changes.push(Change::Add(place, std::mem::take(added)));
        }
        changes.extend(self.call_ms.drain(..).map(|milliseconds| Change::Record(CALL_MS, milliseconds)));
        changes
    }

    fn change(&mut self, place: usize, by: i64) {
        if by == 0 {
            return;
        }
        if let Some(added) = self.added.get_mut(place) {
            *added = added.saturating_add(by);
            self.dirty = true;
        }
    }
}

/// Where a counter stands among the metrics. The enums are counted in the order of their declarations, which is that
/// of their `ALL`.
fn place(counter: Counter) -> usize {
    let of_rule = |rule: usize| RULES.saturating_add(PER_RULE.saturating_mul(rule));
    match counter {
        Counter::Call(result) => CALLS + result as usize,
        Counter::Error(kind) => ERRORS + kind as usize,
        Counter::DenyCacheHit => DENY_CACHE_HITS,
        Counter::Coalesced => COALESCED,
        Counter::GivenBack => GIVEN_BACK,
        Counter::Reconnect => RECONNECTS,
        Counter::Decision(rule, outcome) => of_rule(rule).saturating_add(outcome as usize),
        Counter::Skipped(rule) => of_rule(rule).saturating_add(RuleOutcome::ALL.len()),
    }
}

fn labelled(name: &str, labels: &[(&str, &str)]) -> String {
    struct Labels<'a>(&'a [(&'a str, &'a str)]);
    impl fmt::Display for Labels<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.iter().try_for_each(|(label, value)| write!(f, "{label}=.={value};.;"))
        }
    }
    format!("meshquota_{name}.{}total", Labels(labels))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counter_has_a_place_of_its_own_and_the_name_that_belongs_there() {
        let metrics = Stats::metrics(["a", "b"]);
        let mut counters = vec![(Counter::GivenBack, "meshquota_given_back_total".to_owned())];
        counters.push((Counter::DenyCacheHit, "meshquota_deny_cache_hits_total".to_owned()));
        counters.push((Counter::Coalesced, "meshquota_coalesced_total".to_owned()));
        counters.push((Counter::Reconnect, "meshquota_reconnects_total".to_owned()));
        for result in CallResult::ALL {
            counters.push((Counter::Call(result), format!("meshquota_redis_calls.result=.={};.;total", result.name())));
        }
        for kind in ErrorKind::ALL {
            counters.push((Counter::Error(kind), format!("meshquota_redis_errors.kind=.={};.;total", kind.name())));
        }
        for (place, rule) in ["a", "b"].into_iter().enumerate() {
            for outcome in RuleOutcome::ALL {
                let name = format!("meshquota_decisions.rule=.={rule};.;outcome=.={};.;total", outcome.name());
                counters.push((Counter::Decision(place, outcome), name));
            }
            counters.push((Counter::Skipped(place), format!("meshquota_skipped.rule=.={rule};.;total")));
        }
        // Three gauges and a histogram are no counters.
        assert_eq!(counters.len() + 4, metrics.len());
        for (counter, name) in counters {
            let metric = &metrics[place(counter)];
            assert_eq!((metric.metric_type, &metric.name), (MetricType::Counter, &name), "{counter:?}");
        }
        assert_eq!(metrics[IN_FLIGHT].name, "meshquota_redis_in_flight");
        assert_eq!(metrics[CONNECTED].name, "meshquota_connected");
        assert_eq!(metrics[BREAKER_OPEN].name, "meshquota_breaker_open");
        assert_eq!(metrics[CALL_MS].name, "meshquota_redis_call_ms");
    }

    #[test]
    fn counts_are_handed_over_once() {
        let mut stats = Stats::new(1);
        assert!(!stats.is_dirty());
        stats.count(Counter::Decision(0, RuleOutcome::Deny));
        stats.count(Counter::Decision(0, RuleOutcome::Deny));
        stats.call_took(3);
        let deny = place(Counter::Decision(0, RuleOutcome::Deny));
        assert_eq!(stats.take(), [Change::Add(deny, 2), Change::Record(CALL_MS, 3)]);
        assert_eq!(stats.take(), []);
    }

    #[test]
    fn gauges_move_by_differences_and_end_where_they_began() {
        let mut stats = Stats::new(1);
        let mut sum = 0;
        for in_flight in [5, 5, 7, 0] {
            stats.gauges(in_flight, true, in_flight == 7);
            for change in stats.take() {
                if let Change::Add(IN_FLIGHT, by) = change {
                    sum += by;
                }
            }
            assert_eq!(sum, in_flight as i64);
        }
        stats.gauges(0, false, false);
        assert_eq!(stats.take(), [Change::Add(CONNECTED, -1)]);
    }

    #[test]
    fn a_rule_that_does_not_exist_counts_nowhere() {
        let mut stats = Stats::new(1);
        stats.count(Counter::Skipped(7));
        assert_eq!(stats.take(), []);
    }
}

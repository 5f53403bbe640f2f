//! What rules make of requests at the times of a log: who is denied, and how much each caller wants.
//!
//! Decisions are made by the code of the filter; only the buckets are in this process instead of Redis.
//!
//! Invariant: what is kept grows with the number of callers and never with that of requests, and not beyond [`MOST_CALLERS`].

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::rc::Rc;

use hdrhistogram::Histogram;
use lru::LruCache;
use meshquota::bucket::Measure;
use meshquota::decision::{Answer, decide, rule_outcome};
use meshquota::exchange::Failure;
use meshquota::quota::{Limit, MAX_UNITS};
use meshquota::rule::{Application, Charge};
use meshquota::script::Outcome;
use meshquota::stats::RuleOutcome;

/// The most callers and the most buckets that are remembered. Beyond, those that came least lately are forgotten: they
/// come as somebody new, whose bucket is full.
pub const MOST_CALLERS: NonZeroUsize = NonZeroUsize::MIN.saturating_add((1 << 19) - 1);

/// The times over which demand is counted, by the clock: a second, a minute, an hour.
pub const WINDOWS_MS: [u64; 3] = [1000, 60_000, 3_600_000];

/// How many values there were of each size: one token up to all that can be counted, by steps of a thousandth.
pub type Sizes = Histogram<u64>;

/// What there is to say of all requests.
#[derive(Debug)]
pub struct Tally {
    /// How many requests there were.
    pub requests: u64,
    /// To how many no rule applied.
    pub unmet: u64,
    /// How many were denied.
    pub denied: u64,
    /// How many of the others a rule would have denied that only watches.
    pub watched: u64,
    /// The first and the last time, in milliseconds since 1970.
    pub span: Option<(u64, u64)>,
    /// How many came out of order, and counted at the time of the one before.
    pub late: u64,
    /// How often a caller or a bucket was forgotten.
    pub forgotten: u64,
    /// Each rule, in the order of the configuration.
    pub rules: Vec<RuleTally>,
    buckets: LruCache<(Rc<str>, Rc<[Limit]>), Bucket>,
    callers: LruCache<(usize, usize, Rc<str>), Caller>,
    /// How many callers of each rule are told.
    top: usize,
    no_sizes: Sizes,
}

/// What there is to say of one rule.
#[derive(Debug, Default)]
pub struct RuleTally {
    /// How many requests it charged.
    pub asked: u64,
    /// How many of them it denied, or would have.
    pub denied: u64,
    /// How many of these cost more than its bucket can hold.
    pub never: u64,
    /// How many it did not count, since a part of its key was missing.
    pub skipped: u64,
    /// Its limits, and those of its overrides that applied.
    pub groups: Vec<Group>,
    /// Those who were denied most often, or asked most: as many as are wanted.
    pub top: Vec<Top>,
    places: HashMap<Rc<[Limit]>, usize>,
}

/// The callers of one rule that have the same limits.
#[derive(Debug)]
pub struct Group {
    /// The limits.
    pub limits: Rc<[Limit]>,
    /// How many there were.
    pub callers: u64,
    /// How many of them were ever denied.
    pub denied: u64,
    /// For each limit: the tokens that had to be there for each request, had none before been denied.
    pub needed: Vec<Sizes>,
    /// For each limit: the capacity that would have denied a caller nothing.
    pub peaks: Vec<Sizes>,
    /// For each window: the most tokens that a caller asked for in one.
    pub most: [Sizes; WINDOWS_MS.len()],
}

/// A caller under a rule, at the end.
#[derive(Clone, Debug)]
pub struct Top {
    /// The key of its bucket.
    pub key: Rc<str>,
    /// How many requests it made.
    pub asked: u64,
    /// How many were denied.
    pub denied: u64,
    /// For each limit: the capacity that would have denied it nothing.
    pub peaks: Vec<u64>,
    /// For each window: the most tokens that it asked for in one.
    pub most: [u64; WINDOWS_MS.len()],
}

#[derive(Debug)]
struct Bucket {
    levels: Vec<u128>,
    at_ms: u64,
}

#[derive(Debug)]
struct Caller {
    asked: u64,
    denied: u64,
    at_ms: u64,
    /// For each limit, in units: what was asked for and has not been refilled yet, and the most that it ever was.
    demand: Vec<(u128, u128)>,
    windows: [Window; WINDOWS_MS.len()],
}

#[derive(Clone, Copy, Debug, Default)]
struct Window {
    number: u64,
    tokens: u64,
    most: u64,
}

impl Window {
    /// Counts tokens at a time.
    fn add(&mut self, number: u64, tokens: u64) {
        let before = if self.number == number { self.tokens } else { 0 };
        (self.number, self.tokens) = (number, before.saturating_add(tokens));
        self.most = self.most.max(self.tokens);
    }
}

/// Units as whole tokens, rounded up.
fn tokens(units: u128, limit: &Limit) -> u64 {
    u64::try_from(units.div_ceil(u128::from(limit.refill().period_ms()).max(1))).unwrap_or(MAX_UNITS).min(MAX_UNITS)
}

/// Adds a value, of which zero is the least that there is.
fn add(sizes: &mut Sizes, value: u64) {
    // Every value up to the largest has a place: the histogram grows.
    let _ = sizes.record(value.max(1));
}

impl Tally {
    /// Nothing so far, of so many rules. That many callers and buckets are remembered, and for each rule so many callers
    /// told at the end.
    pub fn new(rules: usize, most: NonZeroUsize, top: usize) -> Result<Self, String> {
        Ok(Self {
            requests: 0,
            unmet: 0,
            denied: 0,
            watched: 0,
            span: None,
            late: 0,
            forgotten: 0,
            rules: (0..rules).map(|_| RuleTally::default()).collect(),
            buckets: LruCache::new(most),
            callers: LruCache::new(most),
            top,
            no_sizes: Histogram::new(3).map_err(|error| error.to_string())?,
        })
    }

    /// Decides a request that began then, and to which these rules apply.
    pub fn request(&mut self, at_ms: u64, met: &[Application]) {
        self.requests += 1;
        let (first, last) = self.span.unwrap_or((at_ms, at_ms));
        self.late += u64::from(at_ms < last);
        let now_ms = at_ms.max(last);
        self.span = Some((first.min(at_ms), now_ms));
        let mut charges = Vec::new();
        for application in met {
            match application {
                Application::Charge(charge) => charges.push((charge, self.charge(now_ms, charge))),
                Application::Skipped { rule } => {
                    if let Some(rule) = self.rules.get_mut(*rule) {
                        rule.skipped += 1;
                    }
                }
            }
        }
        let answers = charges.iter().map(|(charge, said)| Answer {
            rule: charge.rule,
            limits: charge.limits(),
            shadow: charge.shadow,
            mode: charge.failure_mode,
            said,
            local: None,
        });
        let answers = answers.collect::<Vec<_>>();
        let Some(decision) = decide(&answers) else {
            self.unmet += 1;
            return;
        };
        for (answer, (charge, said)) in answers.iter().zip(&charges) {
            let denied = matches!(rule_outcome(answer), RuleOutcome::Deny | RuleOutcome::ShadowDeny);
            self.count(now_ms, charge, denied, matches!(said, Ok(Outcome::Never { .. })));
        }
        if decision.verdict.admits() {
            self.watched += u64::from(decision.would_deny.is_some());
            return;
        }
        self.denied += 1;
        for (charge, said) in &charges {
            if let Ok(Outcome::Granted { .. }) = said {
                let bucket = self.buckets.get_mut(&(Rc::clone(charge.first_key()), charge.shared_limits()));
                bucket.into_iter().for_each(|bucket| Measure::new(charge, 1).give_back(&mut bucket.levels));
            }
        }
    }

    /// Takes a charge from its bucket.
    fn charge(&mut self, now_ms: u64, charge: &Charge) -> Result<Outcome, Failure> {
        let measure = Measure::new(charge, 1);
        let key = (Rc::clone(charge.first_key()), charge.shared_limits());
        if !self.buckets.contains(&key) {
            let full = Bucket { levels: measure.all_full(), at_ms: now_ms };
            self.forgotten += u64::from(self.buckets.push(key.clone(), full).is_some());
        }
        let Some(bucket) = self.buckets.get_mut(&key) else {
            return Err(Failure::Overload);
        };
        measure.refill(&mut bucket.levels, now_ms.saturating_sub(bucket.at_ms).into());
        bucket.at_ms = now_ms;
        Ok(measure.charge(&mut bucket.levels))
    }

    /// Counts what was said to a charge, and what its caller wants.
    fn count(&mut self, now_ms: u64, charge: &Charge, denied: bool, never: bool) {
        let Some(rule) = self.rules.get_mut(charge.rule) else { return };
        rule.asked += 1;
        rule.denied += u64::from(denied);
        rule.never += u64::from(never);
        let place = rule.group(charge, &self.no_sizes);
        let key = (charge.rule, place, Rc::clone(charge.first_key()));
        if !self.callers.contains(&key) {
            let demand = vec![(0, 0); charge.limits().len()];
            let new = Caller { asked: 0, denied: 0, at_ms: now_ms, demand, windows: Default::default() };
            if let Some((key, caller)) = self.callers.push(key.clone(), new) {
                self.forgotten += 1;
                self.settle(&key, &caller);
            }
        }
        let group = self.rules.get_mut(charge.rule).and_then(|rule| rule.groups.get_mut(place));
        let (Some(caller), Some(group)) = (self.callers.get_mut(&key), group) else { return };
        caller.asked += 1;
        caller.denied += u64::from(denied);
        let (cost, ms) = (charge.cost.get(), u128::from(now_ms.saturating_sub(caller.at_ms)));
        caller.at_ms = now_ms;
        for (window, length_ms) in caller.windows.iter_mut().zip(WINDOWS_MS) {
            window.add(now_ms / length_ms, cost);
        }
        for ((wanted, most), (limit, needed)) in
            caller.demand.iter_mut().zip(charge.limits().iter().zip(&mut group.needed))
        {
            let came = u128::from(limit.refill().tokens()).saturating_mul(ms);
            let cost = u128::from(limit.refill().period_ms()).saturating_mul(cost.into());
            *wanted = wanted.saturating_sub(came).saturating_add(cost);
            *most = (*most).max(*wanted);
            add(needed, tokens(*wanted, limit));
        }
    }

    /// Adds a caller, of whom no more comes, to those of its kind.
    fn settle(&mut self, (rule, place, key): &(usize, usize, Rc<str>), caller: &Caller) {
        let Some(rule) = self.rules.get_mut(*rule) else { return };
        let Some(group) = rule.groups.get_mut(*place) else { return };
        let peaks = caller.demand.iter().zip(group.limits.iter()).map(|((_, most), limit)| tokens(*most, limit));
        let peaks = peaks.collect::<Vec<_>>();
        let most = caller.windows.map(|window| window.most);
        group.callers += 1;
        group.denied += u64::from(caller.denied > 0);
        group.peaks.iter_mut().zip(&peaks).for_each(|(sizes, peak)| add(sizes, *peak));
        group.most.iter_mut().zip(most).for_each(|(sizes, most)| add(sizes, most));
        let top = Top { key: Rc::clone(key), asked: caller.asked, denied: caller.denied, peaks, most };
        let order = |top: &Top| (std::cmp::Reverse((top.denied, top.asked)), Rc::clone(&top.key));
        let at = rule.top.partition_point(|other| order(other) < order(&top));
        if at < self.top {
            rule.top.insert(at, top);
            rule.top.truncate(self.top);
        }
    }

    /// No more requests come.
    pub fn finish(&mut self) {
        while let Some((key, caller)) = self.callers.pop_lru() {
            self.settle(&key, &caller);
        }
    }
}

impl RuleTally {
    /// The place of the group of a charge.
    fn group(&mut self, charge: &Charge, no_sizes: &Sizes) -> usize {
        if let Some(place) = self.places.get(charge.limits()) {
            return *place;
        }
        let each = || vec![no_sizes.clone(); charge.limits().len()];
        let most = [no_sizes.clone(), no_sizes.clone(), no_sizes.clone()];
        let limits = charge.shared_limits();
        self.places.insert(Rc::clone(&limits), self.groups.len());
        self.groups.push(Group { limits, callers: 0, denied: 0, needed: each(), peaks: each(), most });
        self.groups.len() - 1
    }
}

#[cfg(test)]
mod tests {
    use meshquota::config::Config;
    use meshquota::rule;

    use super::*;
    use crate::simulate::entry::{Asked, Entry, Field, Missing};

    const MANY: NonZeroUsize = NonZeroUsize::MIN.saturating_add(999);

    /// The tally of requests, each at a time and of an address.
    fn tally(config: &str, most: NonZeroUsize, requests: impl IntoIterator<Item = (u64, String)>) -> Tally {
        let config = Config::from_json(config.as_bytes()).unwrap();
        let mut tally = Tally::new(config.rules.len(), most, 3).unwrap();
        for (at_ms, address) in requests {
            let mut entry = Entry::default();
            entry.add(&Field::Property("source.address".into()), &address).unwrap();
            let missing = Missing::default();
            tally.request(at_ms, &rule::apply(&config, &Asked { entry: &entry, missing: &missing }));
        }
        tally.finish();
        tally
    }

    fn times(times: impl IntoIterator<Item = u64>) -> impl Iterator<Item = (u64, String)> {
        times.into_iter().map(|at_ms| (at_ms, "192.0.2.1".to_owned()))
    }

    const THREE: &str = r#"{"rules": [{"name": "a", "limits": [{"capacity": 3, "refill": "1/s"}]}]}"#;

    #[test]
    fn a_bucket_is_charged_at_the_times_of_the_log() {
        let cases: [(&[u64], u64); 6] = [
            (&[1000, 1000, 1000], 0),
            (&[1000, 1000, 1000, 1000, 1000], 2),
            (&[1000, 1000, 1000, 1999], 1),
            (&[1000, 1000, 1000, 2000], 0),
            (&[1000, 1000, 1000, 1000, 2000, 3000, 3000], 2),
            // What comes late finds the bucket as the one before left it.
            (&[5000, 5000, 5000, 4000], 1),
        ];
        for (at, denied) in cases {
            let tally = tally(THREE, MANY, times(at.iter().copied()));
            assert_eq!((tally.denied, tally.rules[0].denied), (denied, denied), "{at:?}");
            assert_eq!(tally.late, u64::from(at == [5000, 5000, 5000, 4000]));
        }
    }

    #[test]
    fn a_caller_is_denied_nothing_by_the_capacity_that_is_told_and_something_by_one_less() {
        // Bursts of several lengths, with pauses between them.
        let at =
            (0..2000_u64).map(|place| 1000 + place * 37 + (place / 90) * 1700 - (place % 7) * 5).collect::<Vec<_>>();
        let peak = tally(THREE, MANY, times(at.iter().copied())).rules[0].top[0].peaks[0];
        assert!(peak > 4, "{peak}");
        for (capacity, denies) in [(peak, false), (peak - 1, true)] {
            let config = THREE.replace("\"capacity\": 3", &format!("\"capacity\": {capacity}"));
            assert_eq!(tally(&config, MANY, times(at.iter().copied())).denied > 0, denies, "{capacity}");
        }
    }

    #[test]
    fn a_capacity_that_is_told_for_a_share_of_the_requests_admits_no_smaller_one() {
        let requests = (0..5000_u64).map(|place| {
            let busy = place % 3 == 0 && place % 1000 < 400;
            (1000 + place * 20, if busy { "192.0.2.1".to_owned() } else { format!("198.51.100.{}", place % 250) })
        });
        let requests = requests.collect::<Vec<_>>();
        for quantile in [0.9, 0.99, 0.999] {
            let capacity =
                tally(THREE, MANY, requests.clone()).rules[0].groups[0].needed[0].value_at_quantile(quantile);
            let config = THREE.replace("\"capacity\": 3", &format!("\"capacity\": {capacity}"));
            let admitted = 5000 - tally(&config, MANY, requests.clone()).denied;
            assert!(admitted as f64 >= 5000.0 * quantile, "{quantile}: {admitted} by {capacity}");
        }
    }

    #[test]
    fn what_a_rule_takes_in_vain_is_given_back() {
        let both = r#"{"rules": [{"name": "a", "limits": [{"capacity": 3, "refill": "1/h"}]},
                                 {"name": "b", "limits": [{"capacity": 1, "refill": "1/s"}]}]}"#;
        // The second is denied by b and costs a nothing, so a has two left for what b admits later.
        let tally = tally(both, MANY, times([1000, 1000, 2000, 3000, 4000]));
        assert_eq!((tally.denied, tally.rules[0].denied, tally.rules[1].denied), (2, 1, 1));
    }

    #[test]
    fn a_rule_that_only_watches_denies_nothing_and_is_told() {
        let watching = THREE.replace("\"limits\"", "\"shadow\": true, \"limits\"");
        let tally = tally(&watching, MANY, times([1000; 5]));
        assert_eq!((tally.denied, tally.watched, tally.rules[0].denied), (0, 2, 2));
    }

    #[test]
    fn callers_of_an_override_are_told_apart() {
        let config = r#"{"rules": [{"name": "a", "limits": [{"capacity": 3, "refill": "1/s"}],
            "overrides": [{"cidrs": ["198.51.100.0/24"], "limits": [{"capacity": 1, "refill": "1/s"}]},
                          {"cidrs": ["203.0.113.0/24"], "unlimited": true}]}]}"#;
        let addresses = ["192.0.2.1", "192.0.2.1", "198.51.100.1", "198.51.100.1", "203.0.113.1"];
        let tally = tally(config, MANY, addresses.map(|address| (1000, address.to_owned())));
        let told =
            tally.rules[0].groups.iter().map(|group| (group.limits[0].capacity().get(), group.callers, group.denied));
        assert_eq!(told.collect::<Vec<_>>(), [(3, 1, 0), (1, 1, 1)]);
        assert_eq!((tally.denied, tally.unmet), (1, 1));
    }

    #[test]
    fn those_who_were_denied_most_are_told_first_and_then_those_who_asked_most() {
        let counts = [("192.0.2.1", 2), ("192.0.2.2", 5), ("192.0.2.3", 9), ("192.0.2.4", 3), ("192.0.2.5", 1)];
        let requests = counts.iter().flat_map(|(address, count)| vec![(1000, (*address).to_owned()); *count]);
        let tally = tally(THREE, MANY, requests);
        let told = tally.rules[0].top.iter().map(|top| (&*top.key, top.asked, top.denied, top.most[0]));
        let expected = [
            ("quota:{a:192.0.2.3}:0", 9, 6, 9),
            ("quota:{a:192.0.2.2}:0", 5, 2, 5),
            ("quota:{a:192.0.2.4}:0", 3, 0, 3),
        ];
        assert_eq!(told.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn no_more_callers_are_kept_than_may_be_and_none_of_them_is_lost_from_the_sum() {
        let few = NonZeroUsize::MIN.saturating_add(9);
        let requests = (0..1000_u64).map(|place| (1000 + place, format!("10.0.{}.{}", place / 250, place % 250)));
        let tally = tally(THREE, few, requests);
        assert_eq!(tally.buckets.len(), 10);
        assert_eq!(tally.forgotten, 2 * 990);
        let group = &tally.rules[0].groups[0];
        assert_eq!((group.callers, group.peaks[0].len()), (1000, 1000));
    }

    #[test]
    fn what_costs_more_than_a_bucket_holds_is_told_apart() {
        let dear = THREE.replace("\"limits\"", "\"cost\": 4, \"limits\"");
        let tally = tally(&dear, MANY, times([1000, 9000]));
        assert_eq!((tally.rules[0].denied, tally.rules[0].never, tally.rules[0].top[0].peaks[0]), (2, 2, 4));
    }
}

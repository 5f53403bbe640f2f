//! What rules make of requests at the times of a log: who is denied, and how much each caller wants.
//!
//! Decisions are made by the code of the filter; only the buckets are in this process instead of Redis.
//!
//! Invariant: what is kept grows with the number of callers and never with that of requests, and not beyond [`MOST_CALLERS`].

use std::cmp::Reverse;
use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::rc::Rc;

use lru::LruCache;
use meshquota::decision::{Answer, decide, rule_outcome};
use meshquota::quota::Limit;
use meshquota::rule::{Application, Charge};
use meshquota::script::Outcome;
use meshquota::stats::RuleOutcome;

use super::buckets::Buckets;
use super::demand::{Demand, WINDOWS_MS};
use super::sizes::Sizes;

/// The most callers that are remembered. Beyond, those that came least lately are forgotten: one that comes back counts as
/// somebody new, whose bucket is full.
pub const MOST_CALLERS: NonZeroUsize = NonZeroUsize::MIN.saturating_add((1 << 19) - 1);

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
    /// How many callers were forgotten.
    pub forgotten: u64,
    /// Each rule, in the order of the configuration.
    pub rules: Vec<RuleTally>,
    /// By the first key of their buckets, which rules that share a namespace have in common.
    callers: LruCache<Rc<str>, Caller>,
    /// How many callers of each rule are told.
    top: usize,
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
    /// How many callers it charged.
    pub callers: u64,
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
    /// For each limit: how many requests it denied. Of several that would have it is the one with the longest wait.
    pub denied_by: Vec<u64>,
    /// How many of them had buckets that were charged by other limits as well.
    pub mixed: u64,
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
    /// For each window: the most tokens that were asked of its bucket in one.
    pub most: [u64; WINDOWS_MS.len()],
}

/// Whoever has one key, as the rules of its namespace see it.
#[derive(Debug)]
struct Caller {
    buckets: Buckets,
    demand: Demand,
    /// What each rule made of it by each limits, most often one.
    counts: Vec<Count>,
}

#[derive(Debug)]
struct Count {
    rule: usize,
    group: usize,
    asked: u64,
    denied: u64,
}

impl Tally {
    /// Nothing so far, of so many rules. That many callers are remembered, and for each rule so many told at the end.
    pub fn new(rules: usize, most: NonZeroUsize, top: usize) -> Self {
        Self {
            requests: 0,
            unmet: 0,
            denied: 0,
            watched: 0,
            span: None,
            late: 0,
            forgotten: 0,
            rules: (0..rules).map(|_| RuleTally::default()).collect(),
            callers: LruCache::new(most),
            top,
        }
    }

    /// Decides a request that began then, and to which these rules apply.
    pub fn request(&mut self, at_ms: u64, met: &[Application]) {
        self.requests += 1;
        let (first, last) = self.span.unwrap_or((at_ms, at_ms));
        self.late += u64::from(at_ms < last);
        let now_ms = at_ms.max(last);
        self.span = Some((first, now_ms));
        let mut charges = Vec::new();
        for application in met {
            match application {
                Application::Charge(charge) => {
                    let said = self.caller(now_ms, charge).map(|caller| caller.buckets.charge(now_ms, charge));
                    charges.extend(said.map(|said| (charge, Ok(said))));
                }
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
        self.unmet += u64::from(met.is_empty());
        let Some(decision) = decide(&answers) else { return };
        for (answer, (charge, said)) in answers.iter().zip(&charges) {
            let denied = matches!(rule_outcome(answer), RuleOutcome::Deny | RuleOutcome::ShadowDeny);
            let said = said.as_ref().ok().filter(|_| denied);
            self.count(now_ms, charge, said);
        }
        if decision.verdict.admits() {
            self.watched += u64::from(decision.would_deny.is_some());
            return;
        }
        self.denied += 1;
        for (charge, said) in &charges {
            if let Ok(Outcome::Granted { .. }) = said {
                let caller = self.callers.get_mut(charge.first_key());
                caller.into_iter().for_each(|caller| caller.buckets.give_back(now_ms, charge));
            }
        }
    }

    /// Whom a charge is for. One who is not known yet may take the place of another.
    fn caller(&mut self, now_ms: u64, charge: &Charge) -> Option<&mut Caller> {
        let key = charge.first_key();
        if !self.callers.contains(key) {
            let new = Caller { buckets: Buckets::default(), demand: Demand::new(now_ms), counts: Vec::new() };
            if let Some((key, caller)) = self.callers.push(Rc::clone(key), new) {
                self.forgotten += 1;
                self.settle(&key, &caller);
            }
        }
        self.callers.get_mut(key)
    }

    /// Counts a charge, by what it was denied if it was, and what its caller wants.
    fn count(&mut self, now_ms: u64, charge: &Charge, denial: Option<&Outcome>) {
        let Some(rule) = self.rules.get_mut(charge.rule) else { return };
        rule.asked += 1;
        rule.denied += u64::from(denial.is_some());
        rule.never += u64::from(matches!(denial, Some(Outcome::Never { .. })));
        let place = rule.group(charge);
        let Some(caller) = self.caller(now_ms, charge) else { return };
        caller.demand.add(now_ms, charge);
        caller.count(charge.rule, place, denial.is_some());
        let needed = caller.demand.now(charge.limits()).collect::<Vec<_>>();
        let Some(group) = self.rules.get_mut(charge.rule).and_then(|rule| rule.groups.get_mut(place)) else { return };
        group.needed.iter_mut().zip(needed).for_each(|(sizes, tokens)| sizes.add(tokens));
        if let Some(Outcome::Denied { standing, .. } | Outcome::Never { standing }) = denial
            && let Some(denied) = group.denied_by.get_mut(standing.limit)
        {
            *denied += 1;
        }
    }

    /// Adds a caller, of whom no more comes, to those of its kind.
    fn settle(&mut self, key: &Rc<str>, caller: &Caller) {
        for (place, first) in caller.counts.iter().enumerate() {
            let counts = caller.counts.iter().filter(|count| count.rule == first.rule);
            // Told once for each rule, however many limits of it there were.
            if caller.counts.iter().take(place).any(|count| count.rule == first.rule) {
                continue;
            }
            let Some(rule) = self.rules.get_mut(first.rule) else { continue };
            rule.callers += 1;
            counts.clone().for_each(|count| rule.settle(count, &caller.demand));
            let limits = rule.groups.get(first.group).map(|group| Rc::clone(&group.limits));
            let top = Top {
                key: Rc::clone(key),
                asked: counts.clone().map(|count| count.asked).sum(),
                denied: counts.map(|count| count.denied).sum(),
                peaks: limits.map(|limits| caller.demand.peaks(&limits)).unwrap_or_default(),
                most: caller.demand.most(),
            };
            rule.top.push(top);
            // Sorted not each time, which would take long where many are wanted.
            if rule.top.len() > self.top.saturating_mul(2).max(1000) {
                rule.sort_top(self.top);
            }
        }
    }

    /// No more requests come.
    pub fn finish(&mut self) {
        while let Some((key, caller)) = self.callers.pop_lru() {
            self.settle(&key, &caller);
        }
        self.rules.iter_mut().for_each(|rule| rule.sort_top(self.top));
    }
}

impl Caller {
    fn count(&mut self, rule: usize, group: usize, denied: bool) {
        let known = self.counts.iter_mut().find(|count| (count.rule, count.group) == (rule, group));
        if let Some(count) = known {
            count.asked += 1;
            count.denied += u64::from(denied);
        } else {
            self.counts.push(Count { rule, group, asked: 1, denied: denied.into() });
        }
    }
}

impl RuleTally {
    /// The place of the group of a charge.
    fn group(&mut self, charge: &Charge) -> usize {
        if let Some(place) = self.places.get(charge.limits()) {
            return *place;
        }
        let each = || vec![Sizes::default(); charge.limits().len()];
        let limits = charge.shared_limits();
        self.places.insert(Rc::clone(&limits), self.groups.len());
        let (needed, peaks, denied_by) = (each(), each(), vec![0; limits.len()]);
        let most = Default::default();
        self.groups.push(Group { limits, callers: 0, denied: 0, denied_by, mixed: 0, needed, peaks, most });
        self.groups.len() - 1
    }

    /// Keeps so many of those who are told.
    fn sort_top(&mut self, top: usize) {
        self.top.sort_by_key(|one| (Reverse((one.denied, one.asked)), Rc::clone(&one.key)));
        self.top.truncate(top);
    }

    /// Adds a caller to its group.
    fn settle(&mut self, count: &Count, demand: &Demand) {
        let Some(group) = self.groups.get_mut(count.group) else { return };
        group.callers += 1;
        group.denied += u64::from(count.denied > 0);
        group.mixed += u64::from(demand.is_mixed());
        let peaks = demand.peaks(&group.limits);
        group.peaks.iter_mut().zip(peaks).for_each(|(sizes, peak)| sizes.add(peak));
        group.most.iter_mut().zip(demand.most()).for_each(|(sizes, most)| sizes.add(most));
    }
}

#[cfg(test)]
mod tests {
    use meshquota::config::Config;
    use meshquota::rule;

    use super::*;
    use crate::simulate::entry::{Asked, Entry, Field, Missing, Says};

    const MANY: NonZeroUsize = NonZeroUsize::MIN.saturating_add(999);

    /// The tally of requests, each at a time and of an address.
    fn tally(config: &str, most: NonZeroUsize, requests: impl IntoIterator<Item = (u64, String)>) -> Tally {
        let config = Config::from_json(config.as_bytes()).unwrap();
        let mut tally = Tally::new(config.rules.len(), most, 3);
        for (at_ms, address) in requests {
            let mut entry = Entry::default();
            entry.add(&Field::named(Says::Property("source.address".into())), &address);
            let missing = Missing::default();
            tally.request(at_ms, &rule::apply(&config, &Asked { entry: &entry, missing: &missing }));
        }
        tally.finish();
        tally
    }

    /// The tally of one address, by the path and the time of each request.
    fn tally_of<'a>(config: &str, requests: impl IntoIterator<Item = (&'a str, u64)>) -> Tally {
        let config = Config::from_json(config.as_bytes()).unwrap();
        let mut tally = Tally::new(config.rules.len(), MANY, 3);
        for (path, at_ms) in requests {
            let mut entry = Entry::default();
            entry.add(&Field::named(Says::Property("source.address".into())), "192.0.2.1");
            entry.add(&Field::named(Says::Header(":path".into())), path);
            tally.request(at_ms, &rule::apply(&config, &Asked { entry: &entry, missing: &Missing::default() }));
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
        for per_mille in [900, 990, 999] {
            let capacity = tally(THREE, MANY, requests.clone()).rules[0].groups[0].needed[0].at(per_mille);
            let config = THREE.replace("\"capacity\": 3", &format!("\"capacity\": {capacity}"));
            let admitted = 5000 - tally(&config, MANY, requests.clone()).denied;
            assert!(admitted >= 5 * per_mille, "{per_mille}: {admitted} by {capacity}");
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
    fn rules_that_share_a_namespace_share_what_is_told_of_it() {
        let both = r#"{"rules": [
            {"name": "a", "namespace": "ns", "match": {"path": "/a"}, "limits": [{"capacity": 3, "refill": "1/s"}]},
            {"name": "b", "namespace": "ns", "unless": {"path": "/a"}, "cost": 2, "limits": [{"capacity": 3, "refill": "1/s"}]}
        ]}"#;
        let told = tally_of(both, [("/a", 1000), ("/b", 1000), ("/a", 1000), ("/a", 5000)]);
        assert_eq!((told.denied, told.rules[0].denied, told.rules[1].denied), (1, 1, 0));
        for rule in &told.rules {
            let (group, top) = (&rule.groups[0], &rule.top[0]);
            assert_eq!((rule.callers, group.callers, group.mixed), (1, 1, 0));
            assert_eq!((&top.peaks, top.most, group.peaks[0].at(1000)), (&vec![4], [4, 5, 5], 4));
        }
        assert_eq!((told.rules[0].top[0].asked, told.rules[1].top[0].asked), (3, 1));
        assert_eq!((told.rules[0].groups[0].needed[0].at(1000), told.rules[1].groups[0].needed[0].at(1000)), (4, 3));
        let enough = both.replace("\"capacity\": 3", "\"capacity\": 4");
        assert_eq!(tally_of(&enough, [("/a", 1000), ("/b", 1000), ("/a", 1000), ("/a", 5000)]).denied, 0);
    }

    #[test]
    fn a_bucket_that_is_charged_by_several_limits_is_one_and_is_told_to_be_so() {
        // By the one limit a token is 1000 units, by the other 1500.
        let both = r#"{"rules": [
            {"name": "a", "namespace": "ns", "match": {"path": "/a"}, "limits": [{"capacity": 3, "refill": "1/s"}]},
            {"name": "b", "namespace": "ns", "match": {"path": "/b"}, "limits": [{"capacity": 10, "refill": "2/3s"}]}
        ]}"#;
        let cases: [(&[(&str, u64)], u64); 5] = [
            (&[("/b", 1000); 10], 0),
            (&[("/b", 1000); 11], 1),
            // What is left to the smaller one is what it can hold: three of nine.
            (&[("/b", 1000), ("/a", 1000), ("/a", 1000), ("/a", 1000), ("/a", 1000)], 1),
            // Half a token is left, which is three quarters of a second away from one.
            (&[("/a", 1000), ("/a", 1000), ("/a", 1500), ("/b", 1500), ("/b", 2249), ("/b", 2250)], 2),
            // Full by the smaller one a second ago, and so forgotten, and full by the larger one.
            (&[("/a", 1000), ("/b", 3000), ("/b", 3000), ("/b", 3000), ("/b", 3000)], 0),
        ];
        for (requests, denied) in cases {
            let told = tally_of(both, requests.iter().copied());
            assert_eq!(told.denied, denied, "{requests:?}");
            let mixed = requests.iter().any(|(path, _)| *path == "/a");
            let group = told.rules.iter().rev().find_map(|rule| rule.groups.first()).unwrap();
            assert_eq!(group.mixed, u64::from(mixed), "{requests:?}");
        }
    }

    #[test]
    fn a_token_that_lacks_less_than_redis_can_tell_is_one() {
        // In Redis the second finds 0.999999999 tokens, of which the decimals are taken for all that one is worth to it.
        let both = r#"{"rules": [
            {"name": "a", "namespace": "ns", "match": {"path": "/a"}, "limits": [{"capacity": 2, "refill": "1/1000000s"}]},
            {"name": "b", "namespace": "ns", "match": {"path": "/b"}, "limits": [{"capacity": 5, "refill": "1/s"}]}
        ]}"#;
        let later = 1000 + 999_999_999;
        let told = tally_of(both, [("/a", 1000), ("/a", later), ("/b", later), ("/b", later + 998)]);
        assert_eq!((told.denied, told.rules[1].denied), (1, 1));
    }

    #[test]
    fn a_caller_with_several_limits_under_one_rule_is_one_caller() {
        let config = r#"{"rules": [{"name": "a", "key": [], "limits": [{"capacity": 3, "refill": "1/s"}],
            "overrides": [{"cidrs": ["198.51.100.0/24"], "limits": [{"capacity": 9, "refill": "1/s"}, {"capacity": 20, "refill": "1/h"}]}]}]}"#;
        let addresses = ["192.0.2.1", "198.51.100.1", "192.0.2.1", "192.0.2.1", "192.0.2.1"];
        let tally = tally(config, MANY, addresses.map(|address| (1000, address.to_owned())));
        let rule = &tally.rules[0];
        assert_eq!((rule.callers, rule.asked, rule.denied, rule.groups.len()), (1, 5, 2, 2));
        assert_eq!((rule.top.len(), rule.top[0].asked, rule.top[0].denied, &rule.top[0].peaks), (1, 5, 2, &vec![5]));
        assert_eq!(rule.groups[1].peaks.iter().map(|sizes| sizes.at(1000)).collect::<Vec<_>>(), [5, 1]);
    }

    #[test]
    fn no_more_callers_are_kept_than_may_be_and_none_of_them_is_lost_from_the_sum() {
        let few = NonZeroUsize::MIN.saturating_add(9);
        let requests = (0..1000_u64).map(|place| (1000 + place, format!("10.0.{}.{}", place / 250, place % 250)));
        let tally = tally(THREE, few, requests);
        let group = &tally.rules[0].groups[0];
        assert_eq!((tally.forgotten, group.callers, group.peaks[0].at(1000)), (990, 1000, 1));
    }

    #[test]
    fn what_costs_more_than_a_bucket_holds_is_told_apart() {
        let dear = THREE.replace("\"limits\"", "\"cost\": 4, \"limits\"");
        let tally = tally(&dear, MANY, times([1000, 9000]));
        assert_eq!((tally.rules[0].denied, tally.rules[0].never, tally.rules[0].top[0].peaks[0]), (2, 2, 4));
    }
}

//! What one look at the proxies shows: rates and totals of those that answered, added up, how Redis is, and who did not answer.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::proxy::Seen;
use super::stats::{CallMs, Name};

/// The outcomes that each rule has a column for. Others have one where there are any.
const ALWAYS: [&str; 2] = ["allow", "deny"];

/// One look, for people and for scripts.
#[derive(Debug)]
pub struct Page {
    /// For people.
    pub text: String,
    /// For scripts.
    pub json: Value,
}

/// What the proxies have answered, or why they have not, each with the URL of its admin interface.
pub fn page(looks: &[(&str, Result<Seen, String>)]) -> Page {
    let seen = looks.iter().filter_map(|(_, look)| look.as_ref().ok()).collect::<Vec<_>>();
    let failed = looks.iter().filter_map(|(admin, look)| Some((*admin, look.as_ref().err()?))).collect::<Vec<_>>();
    let sum = Sum::of(&seen);
    let (decisions, decisions_json) = sum.decisions();
    let (redis, redis_json) = sum.redis();
    let seconds = sum.longest.map(|time| time.as_secs_f64());
    let over = seconds
        .map_or_else(|| "since the start, no rates yet".to_owned(), |seconds| format!("rates over {seconds:.1} s"));
    let mut text = match seen.len() {
        0 => "meshquota: no proxy answers\n".to_owned(),
        1 => format!("meshquota: 1 proxy, {over}\n"),
        proxies => format!("meshquota: {proxies} proxies, {over}\n"),
    };
    for (admin, why) in &failed {
        let _ = writeln!(text, "not seen: {admin}: {why}");
    }
    if !seen.is_empty() {
        let _ = write!(text, "\n{decisions}\n{redis}");
    }
    let failed = failed.iter().map(|(admin, why)| json!({"admin": admin, "error": why})).collect::<Vec<_>>();
    Page {
        text,
        json: json!({"proxies": seen.len(), "failed": failed, "seconds": seconds, "decisions": decisions_json, "redis": redis_json}),
    }
}

/// A counter, and how much it grows in a second, where a proxy that has it was seen before.
#[derive(Clone, Copy, Default)]
struct Count {
    total: u64,
    rate: Option<f64>,
}

impl Count {
    fn rate_in_words(self) -> String {
        self.rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}"))
    }

    fn json(self) -> Value {
        json!({"total": self.total, "per_second": self.rate})
    }
}

/// The numbers of all proxies that answered.
#[derive(Default)]
struct Sum {
    counters: BTreeMap<Name, Count>,
    gauges: BTreeMap<String, u64>,
    /// The longest of any proxy, by tenths of a per cent of its calls.
    call_ms: BTreeMap<u64, CallMs>,
    /// The longest time that rates are of, since one of the proxies may have been away.
    longest: Option<Duration>,
}

impl Sum {
    fn of(seen: &[&Seen]) -> Self {
        let mut sum = Self::default();
        for Seen { stats, since } in seen {
            for (name, total) in &stats.counters {
                let count = sum.counters.entry(name.clone()).or_default();
                count.total = count.total.saturating_add(*total);
            }
            for (name, rate) in since.iter().flat_map(|since| &since.rates) {
                let count = sum.counters.entry(name.clone()).or_default();
                count.rate = Some(count.rate.unwrap_or(0.0) + rate);
            }
            for (name, gauge) in &stats.gauges {
                let all = sum.gauges.entry(name.clone()).or_default();
                *all = all.saturating_add(*gauge);
            }
            for (quantile, (interval, ever)) in &stats.call_ms {
                let longest = sum.call_ms.entry(*quantile).or_default();
                *longest = (longer(longest.0, *interval), longer(longest.1, *ever));
            }
            sum.longest = sum.longest.max(since.as_ref().map(|since| since.time));
        }
        sum
    }

    /// A counter by its name and the values of its labels.
    fn count(&self, name: &str, labels: &[&str]) -> Count {
        let key = (name.to_owned(), labels.iter().map(|label| (*label).to_owned()).collect());
        self.counters.get(&key).copied().unwrap_or_default()
    }

    /// The values that a label of a counter has, where it is not zero.
    fn values(&self, name: &str, label: usize) -> BTreeSet<&str> {
        let ours = self.counters.iter().filter(|((other, _), count)| other == name && count.total > 0);
        ours.filter_map(|((_, labels), _)| labels.get(label).map(String::as_str)).collect()
    }

    /// A row for each rule: the rate of each outcome and the total, and the share that is denied.
    fn decisions(&self) -> (String, Value) {
        let rules = self.counters.keys().filter(|(name, _)| name == "decisions");
        let rules = rules.filter_map(|(_, labels)| labels.first().map(String::as_str)).collect::<BTreeSet<_>>();
        let seen = self.values("decisions", 1);
        let others = seen.into_iter().filter(|outcome| !ALWAYS.contains(outcome));
        let outcomes = ALWAYS.into_iter().chain(others).collect::<Vec<_>>();
        let width = rules.iter().map(|rule| rule.len()).max().unwrap_or(0).max(4);
        let mut text = format!("{:width$}", "rule");
        for outcome in &outcomes {
            let _ = write!(text, "  {:>12} {:>9}", format!("{outcome}/s"), "total");
        }
        text.push_str("  denied\n");
        let mut told = Map::new();
        for rule in rules {
            let _ = write!(text, "{rule:width$}");
            let mut of_rule = Map::new();
            for outcome in &outcomes {
                let count = self.count("decisions", &[rule, outcome]);
                let _ = write!(text, "  {:>12} {:>9}", count.rate_in_words(), count.total);
                of_rule.insert((*outcome).to_owned(), count.json());
            }
            let _ = writeln!(text, "  {}", self.share_denied(rule));
            told.insert(rule.to_owned(), Value::Object(of_rule));
        }
        (text, Value::Object(told))
    }

    /// The share of a rule's decisions that are denials, real or not, of late.
    fn share_denied(&self, rule: &str) -> String {
        let of = |outcome: &str| self.count("decisions", &[rule, outcome]).rate.unwrap_or(0.0);
        let denied = of("deny") + of("shadow_deny") + of("local_deny");
        let all = denied + of("allow") + of("local_allow") + of("fail_allow") + of("fail_deny");
        if all > 0.0 { format!("{:.1}%", denied * 100.0 / all) } else { "-".to_owned() }
    }

    fn redis(&self) -> (String, Value) {
        let gauge = |name: &str| self.gauges.get(name).copied().unwrap_or(0);
        let breaker = match gauge("breaker_open") {
            0 => "closed".to_owned(),
            1 => "OPEN in 1 worker".to_owned(),
            workers => format!("OPEN in {workers} workers"),
        };
        let connected = gauge("connected");
        let mut text = format!(
            "connected: {connected} {}   breaker: {breaker}   in flight: {}\n",
            if connected == 1 { "worker" } else { "workers" },
            gauge("redis_in_flight")
        );
        let mut told = Map::new();
        let mut tell = |name: &str, value: Value| told.insert(name.to_owned(), value);
        tell("connected", json!(connected));
        tell("breaker_open", json!(gauge("breaker_open")));
        tell("in_flight", json!(gauge("redis_in_flight")));
        for (name, what) in [("redis_calls", "calls/s"), ("redis_errors", "errors/s")] {
            let mut of_kind = Map::new();
            let mut words = Vec::new();
            for kind in self.values(name, 0) {
                let count = self.count(name, &[kind]);
                words.push(format!("{kind} {} ({})", count.rate_in_words(), count.total));
                of_kind.insert(kind.to_owned(), count.json());
            }
            if !words.is_empty() {
                let _ = writeln!(text, "{what} (total): {}", words.join(", "));
            }
            tell(name, Value::Object(of_kind));
        }
        let mut saved = Vec::new();
        for (name, what) in [
            ("deny_cache_hits", "denied by what was known"),
            ("coalesced", "joined with others"),
            ("given_back", "given back"),
        ] {
            let count = self.count(name, &[]);
            saved.push(format!("{what} {} ({})", count.rate_in_words(), count.total));
            tell(name, count.json());
        }
        let _ = writeln!(text, "requests/s (total): {}", saved.join(", "));
        let of = |tenths: u64| self.call_ms.get(&tenths).and_then(|(interval, ever)| interval.or(*ever));
        let times = [(500, "half within"), (990, "99% within"), (999, "99.9% within")];
        let times = times.into_iter().filter_map(|(tenths, name)| Some(format!("{name} {:.1} ms", of(tenths)?)));
        let times = times.collect::<Vec<_>>();
        if !times.is_empty() {
            let _ = writeln!(text, "calls take: {}", times.join(", "));
        }
        tell("call_ms", json!({"50": of(500), "99": of(990), "99.9": of(999)}));
        (text, Value::Object(told))
    }
}

fn longer(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    one.into_iter().chain(other).reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use super::super::proxy::Since;
    use super::super::stats::Stats;
    use super::*;

    /// A proxy with one connected worker that has counted so much for a rule `a`, and counts so fast.
    fn seen(seconds: u64, decisions: &[(&str, u64, f64)], interval: Option<f64>) -> Seen {
        let name = |outcome: &str| ("decisions".to_owned(), vec!["a".to_owned(), outcome.to_owned()]);
        let stats = Stats {
            counters: decisions.iter().map(|(outcome, total, _)| (name(outcome), *total)).collect(),
            gauges: [("connected".to_owned(), 1), ("breaker_open".to_owned(), 1)].into(),
            call_ms: [(500, (interval, Some(8.0)))].into(),
        };
        let rates = decisions.iter().map(|(outcome, _, rate)| (name(outcome), *rate)).collect();
        Seen { stats, since: (seconds > 0).then_some(Since { time: Duration::from_secs(seconds), rates }) }
    }

    #[test]
    fn rates_totals_and_gauges_of_proxies_are_added_up_and_the_longest_times_count() {
        let looks = [
            seen(1, &[("allow", 40, 15.0), ("deny", 2, 2.5)], Some(1.5)),
            seen(9, &[("allow", 7, 0.0), ("deny", 3, 2.5)], Some(1.0)),
            // It has come just now.
            seen(0, &[("allow", 100, 0.0)], None),
        ];
        let Page { text, json } = page(&looks.map(|seen| ("http://a", Ok(seen))));
        assert_eq!(json["decisions"]["a"]["allow"], json!({"total": 147, "per_second": 15.0}));
        assert_eq!(json["decisions"]["a"]["deny"], json!({"total": 5, "per_second": 5.0}));
        assert_eq!((&json["redis"]["connected"], &json["redis"]["call_ms"]["50"]), (&json!(3), &json!(1.5)));
        assert_eq!((&json["seconds"], &json["failed"]), (&json!(9.0), &json!([])));
        assert!(text.starts_with("meshquota: 3 proxies, rates over 9.0 s\n\n") && text.contains("25.0%"), "{text}");
    }

    #[test]
    fn the_first_look_has_totals_and_no_rates() {
        let Page { text, json } = page(&[("http://a", Ok(seen(0, &[("fail_allow", 2, 0.0)], None)))]);
        assert_eq!(json["decisions"]["a"]["fail_allow"], json!({"total": 2, "per_second": null}));
        assert!(text.contains("fail_allow/s") && text.contains("OPEN in 1 worker"), "{text}");
        assert!(!text.contains("local_deny"), "{text}");
    }

    #[test]
    fn whoever_did_not_answer_is_named_and_hides_nobody() {
        let gone = || ("http://b", Err("gone".to_owned()));
        let some = page(&[gone(), ("http://a", Ok(seen(1, &[("allow", 4, 2.0)], None)))]);
        assert_eq!(some.json["failed"], json!([{"admin": "http://b", "error": "gone"}]));
        assert_eq!((&some.json["proxies"], &some.json["decisions"]["a"]["allow"]["total"]), (&json!(1), &json!(4)));
        assert!(some.text.starts_with("meshquota: 1 proxy, rates over 1.0 s\nnot seen: http://b: gone\n\nrule"));
        let none = page(&[gone()]);
        assert_eq!((&none.json["proxies"], &none.json["decisions"]), (&json!(0), &json!({})));
        assert_eq!(none.text, "meshquota: no proxy answers\nnot seen: http://b: gone\n");
    }
}

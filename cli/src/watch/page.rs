//! What one look at the proxies shows: rates since the last one, totals, and how Redis is.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::stats::Stats;

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

/// What is to be seen now, and how much more it is than some time before.
pub fn page(now: &Stats, before: Option<(Duration, &Stats)>) -> Page {
    let view = View { now, before };
    let (decisions, decisions_json) = view.decisions();
    let (redis, redis_json) = view.redis();
    let over = before.map_or_else(
        || "since the start, no rates yet".to_owned(),
        |(time, _)| format!("rates over {:.1} s", time.as_secs_f64()),
    );
    let proxies = if now.proxies == 1 { "1 proxy".to_owned() } else { format!("{} proxies", now.proxies) };
    let seconds = before.map(|(time, _)| time.as_secs_f64());
    Page {
        text: format!("meshquota: {proxies}, {over}\n\n{decisions}\n{redis}"),
        json: json!({"proxies": now.proxies, "seconds": seconds, "decisions": decisions_json, "redis": redis_json}),
    }
}

struct View<'a> {
    now: &'a Stats,
    before: Option<(Duration, &'a Stats)>,
}

impl View<'_> {
    /// How many a second. A counter that is smaller than before has begun again, with its proxy.
    fn rate(&self, name: &str, labels: &[&str]) -> Option<f64> {
        let (time, before) = self.before?;
        let (now, before) = (self.now.get(name, labels), before.get(name, labels));
        let more = now.checked_sub(before).unwrap_or(now);
        Some(more as f64 / time.as_secs_f64().max(0.001))
    }

    /// The values that a label of a number has, where it is not zero.
    fn values(&self, name: &str, label: usize) -> BTreeSet<&str> {
        let ours = self.now.numbers.iter().filter(|((other, _), number)| other == name && **number > 0);
        ours.filter_map(|((_, labels), _)| labels.get(label).map(String::as_str)).collect()
    }

    /// A row for each rule: the rate of each outcome and the total, and the share that is denied.
    fn decisions(&self) -> (String, Value) {
        let rules = self.now.numbers.keys().filter(|(name, _)| name == "decisions");
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
                let labels = [rule, outcome];
                let (total, rate) = (self.now.get("decisions", &labels), self.rate("decisions", &labels));
                let _ = write!(text, "  {:>12} {total:>9}", in_words(rate));
                of_rule.insert((*outcome).to_owned(), json!({"total": total, "per_second": rate}));
            }
            let _ = writeln!(text, "  {}", self.share_denied(rule));
            told.insert(rule.to_owned(), Value::Object(of_rule));
        }
        (text, Value::Object(told))
    }

    /// The share of a rule's decisions that are denials, real or not, of late.
    fn share_denied(&self, rule: &str) -> String {
        let of = |outcome: &str| self.rate("decisions", &[rule, outcome]).unwrap_or(0.0);
        let denied = of("deny") + of("shadow_deny") + of("local_deny");
        let all = denied + of("allow") + of("local_allow") + of("fail_allow") + of("fail_deny");
        if all > 0.0 { format!("{:.1}%", denied * 100.0 / all) } else { "-".to_owned() }
    }

    fn redis(&self) -> (String, Value) {
        let gauge = |name: &str| self.now.get(name, &[]);
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
                let (total, rate) = (self.now.get(name, &[kind]), self.rate(name, &[kind]));
                words.push(format!("{kind} {} ({total})", in_words(rate)));
                of_kind.insert(kind.to_owned(), json!({"total": total, "per_second": rate}));
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
            let (total, rate) = (self.now.get(name, &[]), self.rate(name, &[]));
            saved.push(format!("{what} {} ({total})", in_words(rate)));
            tell(name, json!({"total": total, "per_second": rate}));
        }
        let _ = writeln!(text, "requests/s (total): {}", saved.join(", "));
        let quantile = |tenths: u64, name: &str| {
            let (interval, ever) = self.now.call_ms.get(&tenths)?;
            interval.or(*ever).map(|ms| format!("{name} {ms:.1} ms"))
        };
        let times = [(500, "half within"), (990, "99% within"), (999, "99.9% within")];
        let times = times.into_iter().filter_map(|(tenths, name)| quantile(tenths, name)).collect::<Vec<_>>();
        if !times.is_empty() {
            let _ = writeln!(text, "calls take: {}", times.join(", "));
        }
        let of = |tenths: u64| self.now.call_ms.get(&tenths).and_then(|(interval, ever)| interval.or(*ever));
        tell("call_ms", json!({"50": of(500), "99": of(990), "99.9": of(999)}));
        (text, Value::Object(told))
    }
}

fn in_words(rate: Option<f64>) -> String {
    rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(numbers: &[(&str, &[&str], u64)]) -> Stats {
        let key = |name: &str, labels: &[&str]| (name.to_owned(), labels.iter().map(ToString::to_string).collect());
        let numbers = numbers.iter().map(|(name, labels, number)| (key(name, labels), *number)).collect();
        Stats { proxies: 1, numbers, ..Stats::default() }
    }

    #[test]
    fn rates_are_of_the_time_between_two_looks_and_a_counter_may_begin_again() {
        let before = stats(&[("decisions", &["a", "allow"], 10), ("decisions", &["a", "deny"], 500)]);
        let now = stats(&[("decisions", &["a", "allow"], 40), ("decisions", &["a", "deny"], 10)]);
        let page = page(&now, Some((Duration::from_secs(2), &before)));
        assert_eq!(page.json["decisions"]["a"]["allow"], json!({"total": 40, "per_second": 15.0}));
        assert_eq!(page.json["decisions"]["a"]["deny"], json!({"total": 10, "per_second": 5.0}));
        assert!(page.text.contains("25.0%"), "{}", page.text);
    }

    #[test]
    fn the_first_look_has_totals_and_no_rates() {
        let now = stats(&[
            ("decisions", &["a", "allow"], 40),
            ("decisions", &["a", "fail_allow"], 2),
            ("breaker_open", &[], 2),
        ]);
        let page = page(&now, None);
        assert_eq!(page.json["decisions"]["a"]["fail_allow"], json!({"total": 2, "per_second": null}));
        assert!(page.text.contains("fail_allow/s") && page.text.contains("OPEN in 2 workers"), "{}", page.text);
        assert!(!page.text.contains("local_deny"), "{}", page.text);
    }
}

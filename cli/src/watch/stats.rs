//! The filter's numbers, as the admin interface of Envoy tells them.
//!
//! They are asked for as JSON, by the names that they have in the filter, which carry their labels whether or not Envoy is
//! told to make labels of them.

use std::collections::BTreeMap;

use serde_json::Value;
use ureq::Agent;

/// What the numbers of the filter begin with.
const PREFIX: &str = "wasmcustom.meshquota_";

/// The numbers of some proxies, added up.
#[derive(Debug, Default, PartialEq)]
pub struct Stats {
    /// How many proxies.
    pub proxies: usize,
    /// Counters and gauges: their name without prefix, `total` and labels; and the values of the labels, in their order.
    pub numbers: BTreeMap<(String, Vec<String>), u64>,
    /// The time of calls in the last interval of Envoy's, and since its start: by the quantile, in ms. Of several proxies,
    /// the longest.
    pub call_ms: BTreeMap<u64, (Option<f64>, Option<f64>)>,
}

impl Stats {
    /// Asks each proxy.
    ///
    /// # Errors
    /// That one cannot be asked, or has no filter.
    pub fn ask(agent: &Agent, admins: &[String]) -> Result<Self, String> {
        let mut stats = Self { proxies: admins.len(), ..Self::default() };
        for admin in admins {
            // The others than the filter's would be many.
            let address = format!("{}/stats?format=json&filter=meshquota_", admin.trim_end_matches('/'));
            let answer = agent.get(&address).call().and_then(|mut answer| answer.body_mut().read_to_string());
            let answer = answer.map_err(|error| format!("{address}: {error}"))?;
            let known = stats.numbers.len();
            let json = serde_json::from_str(&answer)
                .map_err(|error| format!("{address}: {error}; is that the admin interface of Envoy?"))?;
            if !stats.add(&json) && known == stats.numbers.len() {
                return Err(format!("{admin}: there are no metrics of meshquota; is the filter in this proxy?"));
            }
        }
        Ok(stats)
    }

    /// A number by its name and the values of its labels.
    pub fn get(&self, name: &str, labels: &[&str]) -> u64 {
        let key = (name.to_owned(), labels.iter().map(|label| (*label).to_owned()).collect());
        self.numbers.get(&key).copied().unwrap_or(0)
    }

    /// Adds what one proxy said; whether there was anything of the filter.
    fn add(&mut self, json: &Value) -> bool {
        let mut found = false;
        for stat in json.get("stats").and_then(Value::as_array).into_iter().flatten() {
            if let Some(histograms) = stat.get("histograms") {
                self.add_histogram(histograms);
            }
            let named = stat.get("name").and_then(Value::as_str).and_then(parts);
            if let (Some(key), Some(value)) = (named, stat.get("value").and_then(Value::as_u64)) {
                found = true;
                let sum = self.numbers.entry(key).or_default();
                *sum = sum.saturating_add(value);
            }
        }
        found
    }

    fn add_histogram(&mut self, histograms: &Value) {
        let list = |value: &Value, name: &str| value.get(name).and_then(Value::as_array).cloned().unwrap_or_default();
        let quantiles = list(histograms, "supported_quantiles");
        let ours = |one: &Value| one.get("name").and_then(Value::as_str) == Some("wasmcustom.meshquota_redis_call_ms");
        for one in list(histograms, "computed_quantiles").iter().filter(|one| ours(one)) {
            for (quantile, values) in quantiles.iter().zip(list(one, "values")) {
                let Some(quantile) = quantile.as_f64() else { continue };
                // Tenths of a per cent.
                let known = self.call_ms.entry((quantile * 10.0) as u64).or_default();
                let value = |name: &str| values.get(name).and_then(Value::as_f64);
                let longer = |one: Option<f64>, other: Option<f64>| match (one, other) {
                    (Some(one), Some(other)) => Some(one.max(other)),
                    (one, other) => one.or(other),
                };
                *known = (longer(known.0, value("interval")), longer(known.1, value("cumulative")));
            }
        }
    }
}

/// A name of the filter's, taken apart: `wasmcustom.meshquota_decisions.rule=.=a;.;outcome=.=deny;.;total`.
fn parts(name: &str) -> Option<(String, Vec<String>)> {
    let name = name.strip_prefix(PREFIX)?;
    let Some((name, mut rest)) = name.split_once('.') else {
        return Some((name.strip_suffix("_total").unwrap_or(name).to_owned(), Vec::new()));
    };
    let mut labels = Vec::new();
    while let Some((_, after)) = rest.split_once("=.=") {
        let (value, after) = after.split_once(";.;")?;
        labels.push(value.to_owned());
        rest = after;
    }
    Some((name.to_owned(), labels))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_name_is_taken_apart() {
        let cases = [
            ("meshquota_decisions.rule=.=per-ip;.;outcome=.=shadow_deny;.;total", "decisions per-ip shadow_deny"),
            ("meshquota_redis_calls.result=.=ok;.;total", "redis_calls ok"),
            ("meshquota_deny_cache_hits_total", "deny_cache_hits"),
            ("meshquota_connected", "connected"),
        ];
        for (name, expected) in cases {
            let (number, labels) = parts(&format!("wasmcustom.{name}")).unwrap();
            assert_eq!([vec![number], labels].concat().join(" "), expected);
        }
        for name in ["cluster.meshquota_redis.upstream_cx_total", "wasmcustom.meshquota_redis_calls.result=.=ok"] {
            assert_eq!(parts(name), None);
        }
    }

    #[test]
    fn proxies_are_added_up_and_the_longest_time_counts() {
        let said = |connected: u64, p50: Value| {
            json!({"stats": [
                {"name": "wasmcustom.meshquota_connected", "value": connected},
                {"histograms": {"supported_quantiles": [0.0, 50.0, 99.9], "computed_quantiles": [
                    {"name": "cluster.meshquota_redis.upstream_cx_length_ms", "values": [{"interval": 9, "cumulative": 9}]},
                    {"name": "wasmcustom.meshquota_redis_call_ms",
                     "values": [{"interval": 0, "cumulative": 0}, {"interval": p50, "cumulative": 2.0}, {"interval": 7.5, "cumulative": 8}]},
                ]}},
            ]})
        };
        let mut stats = Stats::default();
        assert!(stats.add(&said(2, Value::Null)) && stats.add(&said(1, json!(1.05))));
        assert!(!stats.add(&json!({"stats": [{"name": "server.uptime", "value": 3}]})));
        assert_eq!(stats.get("connected", &[]), 3);
        assert_eq!(stats.call_ms[&500], (Some(1.05), Some(2.0)));
        assert_eq!(stats.call_ms[&999], (Some(7.5), Some(8.0)));
    }
}

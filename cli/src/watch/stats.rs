//! The filter's numbers in one proxy, as the admin interface of Envoy tells them.
//!
//! They are asked for as JSON, by the names that they have in the filter, which carry their labels whether or not Envoy is
//! told to make labels of them.

use std::collections::BTreeMap;

use serde_json::Value;
use ureq::Agent;

/// What the numbers of the filter begin with.
const PREFIX: &str = "wasmcustom.meshquota_";

/// A counter's name without prefix, `total` and labels; and the values of the labels, in their order.
pub type Name = (String, Vec<String>);

/// What only rises while a proxy runs.
pub type Counters = BTreeMap<Name, u64>;

/// How long calls took in the last interval of Envoy's, if there were any, and since its start.
pub type CallMs = (Option<f64>, Option<f64>);

/// The numbers of one proxy.
#[derive(Debug, Default, PartialEq)]
pub struct Stats {
    /// The names of counters end in `total`.
    pub counters: Counters,
    /// What rises and falls, by its name without prefix.
    pub gauges: BTreeMap<String, u64>,
    /// The time of calls, in ms, by tenths of a per cent of the calls.
    pub call_ms: BTreeMap<u64, CallMs>,
}

impl Stats {
    /// Asks a proxy, which is named by the URL of its admin interface.
    ///
    /// # Errors
    /// That it does not answer, or has no filter.
    pub fn ask(agent: &Agent, admin: &str) -> Result<Self, String> {
        // The others than the filter's would be many.
        let address = format!("{}/stats?format=json&filter=meshquota_", admin.trim_end_matches('/'));
        let answer = agent.get(&address).call().and_then(|mut answer| answer.body_mut().read_to_string());
        let answer = answer.map_err(|error| error.to_string())?;
        let answer =
            serde_json::from_str(&answer).map_err(|error| format!("{error}; is that the admin interface of Envoy?"))?;
        let stats = Self::read(&answer);
        if stats.counters.is_empty() {
            return Err("there are no metrics of meshquota; is the filter in this proxy?".to_owned());
        }
        Ok(stats)
    }

    fn read(answer: &Value) -> Self {
        let mut stats = Self::default();
        for stat in list(answer, "stats") {
            if let Some(histograms) = stat.get("histograms") {
                stats.read_histograms(histograms);
            }
            let name = stat.get("name").and_then(Value::as_str).and_then(|name| name.strip_prefix(PREFIX));
            let (Some(name), Some(value)) = (name, stat.get("value").and_then(Value::as_u64)) else { continue };
            if !name.ends_with("total") {
                stats.gauges.insert(name.to_owned(), value);
            } else if let Some(name) = parts(name) {
                stats.counters.insert(name, value);
            }
        }
        stats
    }

    fn read_histograms(&mut self, histograms: &Value) {
        let ours = |one: &&Value| one.get("name").and_then(Value::as_str) == Some("wasmcustom.meshquota_redis_call_ms");
        for one in list(histograms, "computed_quantiles").iter().filter(ours) {
            for (quantile, values) in list(histograms, "supported_quantiles").iter().zip(list(one, "values")) {
                let Some(quantile) = quantile.as_f64() else { continue };
                let value = |name: &str| values.get(name).and_then(Value::as_f64);
                self.call_ms.insert((quantile * 10.0) as u64, (value("interval"), value("cumulative")));
            }
        }
    }
}

fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value.get(name).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// The name of a counter, taken apart: `decisions.rule=.=a;.;outcome=.=deny;.;total`.
fn parts(name: &str) -> Option<Name> {
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
            ("decisions.rule=.=per-ip;.;outcome=.=shadow_deny;.;total", "decisions per-ip shadow_deny"),
            ("redis_calls.result=.=ok;.;total", "redis_calls ok"),
            ("deny_cache_hits_total", "deny_cache_hits"),
        ];
        for (name, expected) in cases {
            let (number, labels) = parts(name).unwrap();
            assert_eq!([vec![number], labels].concat().join(" "), expected);
        }
        assert_eq!(parts("redis_calls.result=.=total"), None);
    }

    #[test]
    fn counters_gauges_and_the_times_of_calls_are_kept_apart() {
        let stats = Stats::read(&json!({"stats": [
            {"name": "server.total", "value": 3},
            {"name": "cluster.meshquota_redis.upstream_cx_total", "value": 3},
            {"name": "wasmcustom.meshquota_connected", "value": 2},
            {"name": "wasmcustom.meshquota_coalesced_total", "value": 7},
            {"histograms": {"supported_quantiles": [0.0, 50.0, 99.9], "computed_quantiles": [
                {"name": "cluster.meshquota_redis.upstream_cx_length_ms", "values": [{"interval": 9, "cumulative": 9}]},
                {"name": "wasmcustom.meshquota_redis_call_ms",
                 "values": [{"interval": null, "cumulative": null}, {"interval": null, "cumulative": 2.0}, {"interval": 7.5, "cumulative": 8}]},
            ]}},
        ]}));
        assert_eq!(stats.counters, [(("coalesced".to_owned(), Vec::new()), 7)].into());
        assert_eq!(stats.gauges, [("connected".to_owned(), 2)].into());
        assert_eq!(stats.call_ms[&500], (None, Some(2.0)));
        assert_eq!(stats.call_ms[&999], (Some(7.5), Some(8.0)));
    }
}

//! `explain`: which rules a request meets, and what they would take from which buckets.

use std::fmt::Write;
use std::time::Duration;

use meshquota::quota::Limit;
use meshquota::request::Facts;
use meshquota::rule::{self, Application};
use serde_json::{Value, json};

use crate::arguments::Request;
use crate::{Answer, document};

/// The request of a command line.
impl Facts for Request {
    fn header(&self, name: &str) -> Option<Vec<u8>> {
        match name {
            ":method" => return Some(self.method.clone().into_bytes()),
            ":path" => return Some(self.path.clone().into_bytes()),
            _ => {}
        }
        let lines = self.headers.iter().filter(|(other, _)| other == name).map(|(_, value)| value.as_str());
        let lines = lines.collect::<Vec<_>>();
        (!lines.is_empty()).then(|| lines.join(",").into_bytes())
    }

    fn property(&self, path: &[&str]) -> Option<Vec<u8>> {
        if path == ["source", "address"] {
            return Some(self.client_ip.to_string().into_bytes());
        }
        let path = path.join(".");
        self.properties.iter().find(|(other, _)| *other == path).map(|(_, value)| value.clone().into_bytes())
    }
}

/// What the rules of the file make of the request.
pub fn explain(request: &Request) -> Result<Answer, String> {
    let config = document::read_one(&request.source)?;
    let met = rule::apply(&config, request);
    let (mut text, mut rules) = (String::new(), Vec::new());
    for (place, rule) in config.rules.iter().enumerate() {
        let name = rule.name().as_str();
        match met.iter().find(|application| application.rule() == place) {
            None => {
                let _ = writeln!(text, "{name}: is not for this request");
                rules.push(json!({"rule": name, "applies": false}));
            }
            Some(Application::Skipped { .. }) => {
                let _ = writeln!(text, "{name}: does not count it, since a part of its key is missing");
                rules.push(json!({"rule": name, "applies": false, "skipped": true}));
            }
            Some(Application::Charge(charge)) => {
                let shadow = if charge.shadow { ", and only watches" } else { "" };
                let _ = writeln!(text, "{name}: takes {}{shadow}", tokens(charge.cost.get()));
                let mut buckets = Vec::new();
                for (key, limit) in charge.buckets() {
                    let _ = writeln!(text, "  from {key}: {}", in_words(&limit));
                    buckets.push(bucket(key, &limit));
                }
                let cost = charge.cost.get();
                rules.push(
                    json!({"rule": name, "applies": true, "cost": cost, "shadow": charge.shadow, "buckets": buckets}),
                );
            }
        }
    }
    let yes = met.iter().any(|application| matches!(application, Application::Charge(_)));
    Ok(Answer { yes, text, json: json!({ "rules": rules }) })
}

/// A bucket, for scripts.
pub fn bucket(key: &str, limit: &Limit) -> Value {
    json!({"key": key, "capacity": limit.capacity().get(), "refill": refill(limit)})
}

/// A refill, for scripts.
pub fn refill(limit: &Limit) -> Value {
    json!({"tokens": limit.refill().tokens(), "period_ms": limit.refill().period_ms()})
}

/// A limit, for people.
pub fn in_words(limit: &Limit) -> String {
    let period = humantime::format_duration(Duration::from_millis(limit.refill().period_ms()));
    format!("{} at most, {} more every {period}", tokens(limit.capacity().get()), limit.refill().tokens())
}

fn tokens(count: u64) -> String {
    if count == 1 { "1 token".to_owned() } else { format!("{count} tokens") }
}

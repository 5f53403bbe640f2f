//! `inspect` and `reset`: the buckets of one caller under one rule.

use std::fmt::Write;
use std::net::IpAddr;
use std::time::Duration;

use meshquota::config::Config;
use meshquota::identity::Part;
use meshquota::quota::Limit;
use meshquota::rule::Rule;
use meshquota::script;
use redis::cmd;
use serde_json::json;

use crate::arguments::Caller;
use crate::explain::{bucket, in_words};
use crate::server::Server;
use crate::{Answer, document};

/// Shows what is left in each bucket, when a token is there and when it is full. Nothing is taken.
pub fn inspect(caller: &Caller) -> Result<Answer, String> {
    let config = document::read_one(&caller.source)?;
    let Some(buckets) = buckets(&config, caller)? else { return Ok(unlimited(caller)) };
    let mut server = Server::connect(caller)?;
    let (mut yes, mut text, mut told) = (true, String::new(), Vec::new());
    for (key, limit) in &buckets {
        // A count of 0 takes nothing; the time is the server's.
        let (capacity, refill) = (limit.capacity().get(), limit.refill());
        let call = cmd("EVAL")
            .arg(script::SOURCE)
            .arg(1)
            .arg(key)
            .arg(capacity)
            .arg(refill.tokens())
            .arg(refill.period_ms())
            .arg(0)
            .arg(1)
            .arg(0)
            .to_owned();
        let (_, left, next_ms, full_ms): (i64, u64, i64, u64) = server.query(&call)?;
        yes = yes && next_ms == 0;
        let (next, full) = (after(next_ms.unsigned_abs()), after(full_ms));
        let _ = writeln!(
            text,
            "{key}: {left} of {capacity} left; the next request {next}, full {full} ({})",
            in_words(limit)
        );
        let mut bucket = bucket(key, limit);
        if let Some(fields) = bucket.as_object_mut() {
            fields.extend([
                ("left".to_owned(), json!(left)),
                ("next_ms".to_owned(), json!(next_ms)),
                ("full_ms".to_owned(), json!(full_ms)),
            ]);
        }
        told.push(bucket);
    }
    Ok(Answer { yes, text, json: json!({"rule": caller.rule, "unlimited": false, "buckets": told}) })
}

/// Removes the buckets: no bucket is a full one. Workers that know of a denial believe it for `deny_cache.max_age` at most.
pub fn reset(caller: &Caller) -> Result<Answer, String> {
    let config = document::read_one(&caller.source)?;
    let Some(buckets) = buckets(&config, caller)? else { return Ok(unlimited(caller)) };
    let mut server = Server::connect(caller)?;
    let (mut removed, mut text) = (Vec::new(), String::new());
    for (key, _) in &buckets {
        if server.query::<u64>(cmd("DEL").arg(key))? > 0 {
            let _ = writeln!(text, "{key}: removed");
            removed.push(key.as_str());
        } else {
            let _ = writeln!(text, "{key}: was not there, and so was full");
        }
    }
    Ok(Answer {
        yes: !removed.is_empty(),
        text,
        json: json!({"rule": caller.rule, "unlimited": false, "removed": removed}),
    })
}

fn unlimited(caller: &Caller) -> Answer {
    let text = format!("{}: the rule is not for this caller, who is unlimited by an override\n", caller.rule);
    Answer { yes: true, text, json: json!({"rule": caller.rule, "unlimited": true, "buckets": []}) }
}

/// The caller's buckets, each by its key and with its limit. `None` where the rule is not for him.
fn buckets(config: &Config, caller: &Caller) -> Result<Option<Vec<(String, Limit)>>, String> {
    let rule = rule(config, &caller.rule)?;
    let parts = &rule.policy().identity.parts;
    let values = caller.values.iter().map(String::as_str).collect::<Vec<_>>();
    let Some(identity) = rule.policy().identity.of_values(&values, &config.client_ip) else {
        let expected = parts.iter().map(name).collect::<Vec<_>>().join(" ");
        return Err(format!(
            "the key of {} is {}: expected {expected}",
            caller.rule,
            if parts.len() == 1 { "one value" } else { "of several values" }
        ));
    };
    let address = parts.iter().zip(&values).find(|(part, _)| **part == Part::ClientIp);
    let address: Option<IpAddr> = address.and_then(|(_, value)| value.parse().ok());
    let buckets = rule.buckets_of(config, &identity, || address);
    Ok(buckets.map(|(keys, limits)| keys.iter().map(str::to_owned).zip(limits.iter().copied()).collect()))
}

fn rule<'a>(config: &'a Config, name: &str) -> Result<&'a Rule, String> {
    let names = || config.rules.iter().map(|rule| rule.name().as_str()).collect::<Vec<_>>().join(", ");
    config
        .rules
        .iter()
        .find(|rule| rule.name().as_str() == name)
        .ok_or_else(|| format!("no rule is called {name}; there are: {}", names()))
}

/// A part of a key, as a placeholder.
fn name(part: &Part) -> String {
    match part {
        Part::ClientIp => "ADDRESS".to_owned(),
        Part::Method => "METHOD".to_owned(),
        Part::Host => "HOST".to_owned(),
        Part::Path => "PATH".to_owned(),
        Part::Route => "ROUTE".to_owned(),
        Part::Header(name) => format!("HEADER({name})"),
        Part::Cookie(name) => format!("COOKIE({name})"),
        Part::Query(name) => format!("QUERY({name})"),
        Part::Property(path) => format!("PROPERTY({})", path.join(".")),
    }
}

/// When that is.
fn after(ms: u64) -> String {
    if ms == 0 { "now".to_owned() } else { format!("in {}", humantime::format_duration(Duration::from_millis(ms))) }
}

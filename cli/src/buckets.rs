//! `inspect` and `reset`: the buckets of one caller under one rule.

use std::fmt::Write;
use std::time::Duration;

use meshquota::config::Config;
use meshquota::script;
use redis::cmd;
use serde_json::json;

use crate::arguments::Caller;
use crate::caller::Meant;
use crate::explain::{bucket, in_words};
use crate::server::Server;
use crate::{Answer, document};

/// Shows what is left in each bucket, when a token is there and when it is full. Nothing is taken.
pub fn inspect(caller: &Caller) -> Result<Answer, String> {
    let config = document::read_one(&caller.source)?;
    let meant = meant(&config, caller)?;
    let address = meant.address()?;
    let Some((keys, limits)) = meant.rule.buckets_of(&config, &meant.identity, || address) else {
        return Ok(unlimited(caller));
    };
    let mut server = Server::connect(caller)?;
    let (mut yes, mut text, mut told) = (true, String::new(), Vec::new());
    for (key, limit) in keys.iter().zip(limits.iter()) {
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
///
/// All that the caller may have are removed, by whichever limits, so the address need not be known.
pub fn reset(caller: &Caller) -> Result<Answer, String> {
    let config = document::read_one(&caller.source)?;
    let meant = meant(&config, caller)?;
    let mut server = Server::connect(caller)?;
    let (mut removed, mut text) = (Vec::new(), String::new());
    for key in meant.all_keys(&config).iter() {
        if server.query::<u64>(cmd("DEL").arg(key))? > 0 {
            let _ = writeln!(text, "{key}: removed");
            removed.push(key.to_owned());
        } else {
            let _ = writeln!(text, "{key}: was not there, and so was full");
        }
    }
    Ok(Answer { yes: !removed.is_empty(), text, json: json!({"rule": caller.rule, "removed": removed}) })
}

fn meant<'a>(config: &'a Config, caller: &Caller) -> Result<Meant<'a>, String> {
    match &caller.key {
        Some(key) => Meant::by_key(config, &caller.rule, key, caller.client_ip),
        None => Meant::by_values(config, &caller.rule, &caller.values, caller.client_ip),
    }
}

fn unlimited(caller: &Caller) -> Answer {
    let text = format!("{}: the rule is not for this caller, who is unlimited by an override\n", caller.rule);
    Answer { yes: true, text, json: json!({"rule": caller.rule, "unlimited": true, "buckets": []}) }
}

/// When that is.
fn after(ms: u64) -> String {
    if ms == 0 { "now".to_owned() } else { format!("in {}", humantime::format_duration(Duration::from_millis(ms))) }
}

//! What a simulation has found, for people and for scripts.

use std::collections::BTreeSet;
use std::fmt::{Display, Write};
use std::time::Duration;

use jiff::Timestamp;
use meshquota::config::Config;
use serde_json::{Map, Value, json};

use super::demand::WINDOWS_MS;
use super::logs::Faults;
use super::sizes::Sizes;
use super::tally::{Group, MOST_CALLERS, RuleTally, Tally, Top};
use crate::Answer;
use crate::explain::{in_words, refill};

/// One of so many requests that came out of order is enough to doubt the rest.
const MANY_LATE: u64 = 100;

/// The shares for which a limit is told, in thousandths.
const SHARES: [(u64, &str); 3] = [(990, "99%"), (999, "99.9%"), (1000, "all")];

/// What the windows are called.
const WINDOWS: [&str; WINDOWS_MS.len()] = ["second", "minute", "hour"];

/// What the logs did not say.
pub struct Gaps<'a> {
    /// What was not understood.
    pub faults: &'a Faults,
    /// What rules asked for in vain.
    pub missing: Vec<String>,
    /// The names that were told and met no line.
    pub unmet: &'a BTreeSet<String>,
}

/// The report, which tells people of so many limits of each rule. The answer is no where a request would have been denied.
pub fn report(config: &Config, tally: &Tally, top: usize, gaps: &Gaps<'_>) -> Answer {
    let Gaps { faults, missing, unmet } = gaps;
    let names = config.rules.iter().map(|rule| rule.name().as_str());
    let rules = names.clone().zip(&tally.rules).map(|(name, rule)| rule_as_json(name, rule)).collect::<Vec<_>>();
    let (first, last) = tally.span.unwrap_or_default();
    let json = json!({
        "requests": tally.requests,
        "first": time(first),
        "last": time(last),
        "denied": tally.denied,
        "would_deny": tally.watched,
        "without_a_rule": tally.unmet,
        "lines_not_understood": faults.count,
        "lines_without_a_request": faults.connections,
        "logs_cut_short": faults.cut,
        "out_of_order": tally.late,
        "forgotten": tally.forgotten,
        "missing": missing,
        "fields_not_met": unmet,
        "rules": rules,
    });
    let mut text = summary(tally, gaps);
    for (name, rule) in names.zip(&tally.rules) {
        text.push('\n');
        tell_rule(&mut text, name, rule, top.max(1));
    }
    Answer { yes: tally.denied == 0, text, json }
}

fn summary(tally: &Tally, gaps: &Gaps<'_>) -> String {
    let Gaps { faults, missing, unmet } = gaps;
    let (first, last) = tally.span.unwrap_or_default();
    let took = humantime::format_duration(Duration::from_millis(last.saturating_sub(first)));
    let mut text = format!("{} from {} to {} ({took})\n", count(tally.requests, "request"), time(first), time(last));
    let _ = writeln!(text, "{} denied ({})", tally.denied, share(tally.denied, tally.requests));
    // Told where there is any.
    let forgotten = format!("callers forgotten, beyond {MOST_CALLERS}; one that came back was taken for somebody new");
    let mut late = "that came out of order by very much; each counts at the time of the one before".to_owned();
    if tally.late.saturating_mul(MANY_LATE) > tally.requests {
        late.push_str(", so who is denied is not to be trusted: is the clock of a proxy wrong?");
    }
    let unusual: [(u64, &str, &[String]); 7] = [
        (tally.watched, "more that a rule would have denied, had it not only watched", &[]),
        (tally.unmet, "to which no rule applied", &[]),
        (faults.count, "lines not understood:", &faults.first),
        (faults.connections, "lines of no request: they have neither a method nor a path, as of TCP connections", &[]),
        (faults.cut.len() as u64, "of the logs could not be read to the end; what was read counts:", &faults.cut),
        (tally.late, &late, &[]),
        (tally.forgotten, &forgotten, &[]),
    ];
    for (count, what, places) in unusual.into_iter().filter(|(count, ..)| *count > 0) {
        let _ = writeln!(text, "{count} {what}");
        places.iter().for_each(|place| {
            let _ = writeln!(text, "  {place}");
        });
    }
    if !missing.is_empty() {
        let _ = writeln!(text, "asked for by rules, and in no line of the log: {}", missing.join(", "));
    }
    if !unmet.is_empty() {
        let names = unmet.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        let _ = writeln!(text, "named by --field, and in no line of the log: {names}");
    }
    text
}

fn tell_rule(text: &mut String, name: &str, rule: &RuleTally, top: usize) {
    let _ = write!(text, "{name}: {} of {}, ", count(rule.asked, "request"), count(rule.callers, "caller"));
    let _ = write!(text, "{} denied ({})", rule.denied, share(rule.denied, rule.asked));
    if rule.never > 0 {
        let _ = write!(text, ", {} of them since they cost more than a bucket can hold", rule.never);
    }
    if rule.skipped > 0 {
        let _ = write!(text, "; {} not counted, since a part of the key was missing", rule.skipped);
    }
    text.push('\n');
    let mut groups = rule.groups.iter().collect::<Vec<_>>();
    if groups.len() > top {
        groups.sort_by_key(|group| std::cmp::Reverse((group.denied, group.callers)));
    }
    groups.iter().take(top).for_each(|group| tell_group(text, group));
    if let Some(others) = groups.len().checked_sub(top).filter(|others| *others > 0) {
        let _ = writeln!(
            text,
            "  {others} more with limits of their own, whose callers were denied no more often; see --json"
        );
    }
    if !rule.top.is_empty() {
        let width = rule.top.iter().map(|top| top.key.len()).max().unwrap_or(0);
        let _ = writeln!(
            text,
            "  {:width$}  {:>9} {:>9} {:>9}  most in a second, minute, hour",
            "", "requests", "denied", "capacity"
        );
        for top in &rule.top {
            let Top { key, asked, denied, peaks, most: [second, minute, hour] } = top;
            let peaks = peaks.iter().map(u64::to_string).collect::<Vec<_>>().join("/");
            let _ = writeln!(text, "  {key:width$}  {asked:>9} {denied:>9} {peaks:>9}  {second}, {minute}, {hour}");
        }
    }
}

fn tell_group(text: &mut String, group: &Group) {
    let Group { limits, callers, denied, denied_by, mixed, needed, peaks, most } = group;
    let _ = writeln!(text, "  limits of {}, {denied} of them denied:", count(*callers, "caller"));
    if *mixed > 0 {
        let _ = writeln!(text, "  {mixed} of them with buckets that other limits charge too: no capacity is exact");
    }
    for ((limit, denied), (needed, peaks)) in limits.iter().zip(denied_by).zip(needed.iter().zip(peaks)) {
        let _ = writeln!(text, "  {}: denied {}", in_words(limit), count(*denied, "request"));
        row(text, "a capacity that at this refill", SHARES.map(|(_, share)| share));
        row(text, "  passes so many of the requests", SHARES.map(|(share, _)| needed.at(share)));
        row(text, "  denies nothing to so many callers", SHARES.map(|(share, _)| peaks.at(share)));
    }
    row(text, "tokens that so many callers want at most", SHARES.map(|(_, share)| share));
    for (window, sizes) in WINDOWS.iter().zip(most) {
        row(
            text,
            &format!("  in {} {window}", if *window == "hour" { "an" } else { "a" }),
            SHARES.map(|(share, _)| sizes.at(share)),
        );
    }
}

fn row<T: Display>(text: &mut String, what: &str, [first, second, third]: [T; SHARES.len()]) {
    let _ = writeln!(text, "    {what:<40} {first:>9} {second:>9} {third:>9}");
}

fn rule_as_json(name: &str, rule: &RuleTally) -> Value {
    let quantiles = |sizes: &Sizes| {
        let told = SHARES.iter().map(|(share, name)| ((*name).to_owned(), json!(sizes.at(*share))));
        Value::Object(told.collect())
    };
    let groups = rule.groups.iter().map(|group| {
        let sizes = group.needed.iter().zip(&group.peaks);
        let limits = group.limits.iter().zip(&group.denied_by).zip(sizes).map(|((one, denied), (needed, peaks))| {
            json!({
                "capacity": one.capacity().get(),
                "refill": refill(one),
                "denied": denied,
                "capacity_for_requests": quantiles(needed),
                "capacity_for_callers": quantiles(peaks),
            })
        });
        let most = WINDOWS.iter().zip(&group.most).map(|(window, sizes)| ((*window).to_owned(), quantiles(sizes)));
        json!({
            "callers": group.callers,
            "callers_denied": group.denied,
            "callers_charged_by_other_limits_too": group.mixed,
            "limits": limits.collect::<Vec<_>>(),
            "most_in_a": most.collect::<Map<_, _>>(),
        })
    });
    let top = rule.top.iter().map(|top| {
        let most = WINDOWS.iter().zip(top.most).map(|(window, most)| ((*window).to_owned(), json!(most)));
        json!({
            "key": &*top.key,
            "requests": top.asked,
            "denied": top.denied,
            "capacity": top.peaks,
            "most_in_a": most.collect::<Map<_, _>>(),
        })
    });
    json!({
        "rule": name,
        "requests": rule.asked,
        "callers": rule.callers,
        "denied": rule.denied,
        "never": rule.never,
        "skipped": rule.skipped,
        "groups": groups.collect::<Vec<_>>(),
        "top": top.collect::<Vec<_>>(),
    })
}

fn time(ms: u64) -> String {
    let time = i64::try_from(ms).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok());
    time.map_or_else(|| format!("{ms} ms"), |time| time.to_string())
}

fn count(number: u64, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

fn share(part: u64, whole: u64) -> String {
    format!("{:.2}%", part as f64 * 100.0 / whole.max(1) as f64)
}

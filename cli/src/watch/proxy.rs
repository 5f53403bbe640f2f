//! One proxy that is watched: what it told last, and how fast that grows.
//!
//! Counters of several proxies can be compared with nothing once they are added up, since each proxy begins again by itself and
//! answers at times of its own. So rates are made here, before anything is added.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ureq::Agent;

use super::stats::{Counters, Name, Stats};

/// A proxy, and what it counted when it last answered.
#[derive(Debug)]
pub struct Proxy {
    /// The URL of its admin interface.
    pub admin: String,
    last: Option<(Instant, Counters)>,
}

/// An answer of a proxy's.
#[derive(Debug)]
pub struct Seen {
    /// What it said.
    pub stats: Stats,
    /// How much more that is than in the answer before, if there was one.
    pub since: Option<Since>,
}

/// What has come between two answers.
#[derive(Debug)]
pub struct Since {
    /// The time between them.
    pub time: Duration,
    /// How much was counted in a second.
    pub rates: BTreeMap<Name, f64>,
}

impl Proxy {
    /// One that has not been asked yet.
    pub fn new(admin: &str) -> Self {
        Self { admin: admin.to_owned(), last: None }
    }

    /// Asks it. Where it does not answer, the answer before is still what the next one is compared with.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn look(&mut self, agent: &Agent) -> Result<Seen, String> {
        let stats = Stats::ask(agent, &self.admin)?;
        Ok(self.answered(Instant::now(), stats))
    }

    fn answered(&mut self, at: Instant, stats: Stats) -> Seen {
        let before = self.last.replace((at, stats.counters.clone()));
        let since = before.map(|(then, before)| {
            let time = at.duration_since(then);
            // A clock may be too coarse to tell two answers apart.
            let seconds = time.as_secs_f64().max(1e-6);
            let rates = counted(&before, &stats.counters).map(|(name, more)| (name.clone(), more as f64 / seconds));
            Since { time, rates: rates.collect() }
        });
        Seen { stats, since }
    }
}

/// How much was counted between two answers. Envoy takes no counter back and drops none while it runs, so where one is smaller
/// or gone the proxy was started anew, and all the others count from zero too.
fn counted<'a>(before: &'a Counters, now: &'a Counters) -> impl Iterator<Item = (&'a Name, u64)> {
    let anew = before.iter().any(|(name, count)| now.get(name).is_none_or(|now| now < count));
    let old = move |name| if anew { 0 } else { before.get(name).copied().unwrap_or(0) };
    now.iter().map(move |(name, count)| (name, count.saturating_sub(old(name))))
}

#[cfg(test)]
mod tests {
    use super::*;

    type Counts<'a> = &'a [(&'a str, u64)];

    fn stats(counters: Counts) -> Stats {
        let counters = counters.iter().map(|(name, count)| (((*name).to_owned(), Vec::new()), *count)).collect();
        Stats { counters, ..Stats::default() }
    }

    #[test]
    fn a_proxy_that_was_started_anew_counts_from_zero_and_in_all_its_counters() {
        let before = [("a", 10), ("b", 500)];
        let cases: [(&str, Counts, &[f64]); 5] = [
            ("it went on", &[("a", 14), ("b", 502)], &[2.0, 1.0]),
            ("nothing happened", &before, &[0.0, 0.0]),
            ("a counter came", &[("a", 10), ("b", 500), ("c", 6)], &[0.0, 0.0, 3.0]),
            ("a counter shrank", &[("a", 40), ("b", 8)], &[20.0, 4.0]),
            ("a counter is gone", &[("a", 40)], &[20.0]),
        ];
        for (what, now, expected) in cases {
            let (mut proxy, start) = (Proxy::new("http://a"), Instant::now());
            assert!(proxy.answered(start, stats(&before)).since.is_none());
            let since = proxy.answered(start + Duration::from_secs(2), stats(now)).since.unwrap();
            assert_eq!(since.rates.into_values().collect::<Vec<_>>(), expected, "{what}");
        }
    }
}

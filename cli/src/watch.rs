//! `watch`: what running proxies decide, looked at again and again.
//!
//! A terminal shows one page, which is drawn anew. Elsewhere one page follows the other, or one line of JSON.

mod page;
mod stats;

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::arguments::Watching;
use page::{Page, page};
use stats::Stats;

/// How long a proxy may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Looks until it is told to stop, or as often as it was told to.
pub fn watch(watching: &Watching, as_json: bool) -> Result<(), String> {
    let agent = ureq::Agent::config_builder().timeout_global(Some(TIMEOUT)).build().new_agent();
    let (mut before, mut looks) = (None::<(Instant, Stats)>, 0);
    loop {
        let at = Instant::now();
        let asked = Stats::ask(&agent, &watching.admins);
        let told = match &asked {
            Ok(now) => page(now, before.as_ref().map(|(then, stats)| (at.duration_since(*then), stats))),
            // What was there once may come back, as a proxy that is started anew.
            Err(what) if before.is_some() => Page { text: format!("{what}\n"), json: json!({"error": what}) },
            Err(what) => return Err(what.clone()),
        };
        let shown = if as_json { writeln!(std::io::stdout(), "{}", told.json) } else { show(&told.text) };
        looks += 1;
        // Nobody looks any more where nothing can be written.
        if shown.is_err() || watching.count.is_some_and(|count| looks >= count) {
            return Ok(());
        }
        before = asked.ok().map(|now| (at, now)).or(before);
        std::thread::sleep(watching.interval.saturating_sub(at.elapsed()));
    }
}

fn show(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout();
    if out.is_terminal() {
        write!(out, "\u{1b}[H\u{1b}[J")?;
    }
    writeln!(out, "{text}")?;
    out.flush()
}

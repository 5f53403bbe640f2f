//! `watch`: what running proxies decide, looked at again and again.
//!
//! A terminal shows one page, which is drawn anew. Elsewhere one page follows the other, or one line of JSON.

mod page;
mod stats;

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::arguments::Watching;
use page::page;
use stats::Stats;

/// How long a proxy may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Looks until it is told to stop, or as often as it was told to.
pub fn watch(watching: &Watching, as_json: bool) -> Result<(), String> {
    let agent = ureq::Agent::config_builder().timeout_global(Some(TIMEOUT)).build().new_agent();
    let (mut before, mut looks) = (None::<(Instant, Stats)>, 0);
    loop {
        let at = Instant::now();
        let now = Stats::ask(&agent, &watching.admins)?;
        let since = before.as_ref().map(|(then, stats)| (at.duration_since(*then), stats));
        let told = page(&now, since);
        let shown = if as_json { writeln!(std::io::stdout(), "{}", told.json) } else { show(&told.text) };
        looks += 1;
        // Nobody looks any more where nothing can be written.
        if shown.is_err() || watching.count.is_some_and(|count| looks >= count) {
            return Ok(());
        }
        before = Some((at, now));
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

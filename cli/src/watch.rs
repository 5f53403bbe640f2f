//! `watch`: what running proxies decide, looked at again and again.
//!
//! A terminal shows one page, which is drawn anew. Elsewhere one page follows the other, or one line of JSON.

mod page;
mod proxy;
mod stats;

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::arguments::Watching;
use page::page;
use proxy::{Proxy, Seen};

/// How long a proxy may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Looks until it is told to stop, or as often as it was told to.
///
/// # Errors
/// Why no proxy at all answers the first look, or the last one. What answered once may come back, so a look between them goes on.
pub fn watch(watching: &Watching, as_json: bool) -> Result<(), String> {
    let agent = ureq::Agent::config_builder().timeout_global(Some(TIMEOUT)).build().new_agent();
    let mut proxies = watching.admins.iter().map(|admin| Proxy::new(admin)).collect::<Vec<_>>();
    let mut looks = 0;
    loop {
        let at = Instant::now();
        let seen = look(&agent, &mut proxies);
        let answered = at_least_one(&seen);
        if looks == 0 {
            answered.clone()?;
        }
        let page = page(&seen);
        let shown = if as_json { writeln!(std::io::stdout(), "{}", page.json) } else { show(&page.text) };
        looks += 1;
        // Nobody looks any more where nothing can be written.
        if shown.is_err() {
            return Ok(());
        }
        if watching.count.is_some_and(|count| looks >= count) {
            return answered;
        }
        std::thread::sleep(watching.interval.saturating_sub(at.elapsed()));
    }
}

/// Asks all proxies at once, since each that hangs takes the whole time that it may take.
fn look<'a>(agent: &ureq::Agent, proxies: &'a mut [Proxy]) -> Vec<(&'a str, Result<Seen, String>)> {
    let mut looks = proxies.iter().map(|_| Err("not asked".to_owned())).collect::<Vec<_>>();
    std::thread::scope(|scope| {
        for (proxy, look) in proxies.iter_mut().zip(&mut looks) {
            scope.spawn(|| *look = proxy.look(agent));
        }
    });
    proxies.iter().map(|proxy| proxy.admin.as_str()).zip(looks).collect()
}

fn at_least_one(seen: &[(&str, Result<Seen, String>)]) -> Result<(), String> {
    let mut failed = Vec::new();
    for (admin, look) in seen {
        match look {
            Ok(_) => return Ok(()),
            Err(why) => failed.push(format!("{admin}: {why}")),
        }
    }
    Err(format!("no proxy answers: {}", failed.join("; ")))
}

fn show(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout();
    if out.is_terminal() {
        write!(out, "\u{1b}[H\u{1b}[J")?;
    }
    writeln!(out, "{text}")?;
    out.flush()
}

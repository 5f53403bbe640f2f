//! `simulate`: what the rules of a configuration would have made of the requests in access logs.
//!
//! The requests are taken at the times of the log and decided by the code of the filter; nothing is asked of Redis.

mod callers;
mod entry;
mod format;
mod logs;
mod report;

use meshquota::rule;

use crate::arguments::Simulation;
use crate::{Answer, document};
use callers::{MOST_CALLERS, Tally};
use entry::{Asked, Missing};
use format::Format;
use logs::Logs;

/// Runs the rules over the logs.
pub fn simulate(simulation: &Simulation) -> Result<Answer, String> {
    let config = document::read_one(&simulation.file)?;
    let format = Format::new(simulation.format.as_deref(), &simulation.fields)?;
    let mut logs = Logs::open(&simulation.logs, format)?;
    let mut tally = Tally::new(config.rules.len(), MOST_CALLERS, simulation.top)?;
    let missing = Missing::default();
    while let Some(entry) = logs.next()? {
        tally.request(entry.at_ms, &rule::apply(&config, &Asked { entry: &entry, missing: &missing }));
    }
    if tally.requests == 0 {
        let hint = "say how the log is written with --format, or what its names mean with --field";
        return Err(match logs.faults.first.first() {
            Some(first) => format!("none of {} lines was understood; {first}; {hint}", logs.faults.count),
            None => "there is no request in the log".to_owned(),
        });
    }
    tally.finish();
    Ok(report::report(&config, &tally, &logs.faults, &missing.names()))
}

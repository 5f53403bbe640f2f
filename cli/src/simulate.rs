//! `simulate`: what the rules of a configuration would have made of the requests in access logs.
//!
//! The requests are taken at the times of the log and decided by the code of the filter; nothing is asked of Redis.

mod buckets;
mod demand;
mod entry;
mod format;
mod json;
mod line;
mod logs;
mod meaning;
mod report;
mod sizes;
mod tally;
mod time;
mod wrapper;

use std::path::Path;

use meshquota::rule;

use crate::arguments::Simulation;
use crate::{Answer, document};
use entry::{Asked, Missing};
use format::Format;
use logs::Logs;
use report::Gaps;
use tally::{MOST_CALLERS, Tally};

/// Runs the rules over the logs.
pub fn simulate(simulation: &Simulation) -> Result<Answer, String> {
    let stdin = Path::new("-");
    if simulation.source.file == stdin && simulation.logs.iter().any(|log| log == stdin) {
        return Err("-: standard input is either the configuration or a log; name a file for one of them".to_owned());
    }
    let config = document::read_one(&simulation.source)?;
    let format = Format::new(simulation.format.as_deref(), &simulation.fields)?;
    let mut logs = Logs::open(&simulation.logs, format)?;
    let mut tally = Tally::new(config.rules.len(), MOST_CALLERS, simulation.top);
    let missing = Missing::default();
    while let Some(entry) = logs.next() {
        tally.request(entry.at_ms, &rule::apply(&config, &Asked { entry: &entry, missing: &missing }));
    }
    if tally.requests == 0 {
        if let Some(cut) = logs.faults.cut.first() {
            return Err(cut.clone());
        }
        let hint = "say how the log is written with --format, or what its names mean with --field";
        return Err(match logs.faults.first.first() {
            Some(first) => format!("none of {} lines was understood; {first}; {hint}", logs.faults.count),
            None if logs.faults.connections > 0 => {
                format!("none of {} lines has a method or a path; {hint}", logs.faults.connections)
            }
            None => "there is no request in the log".to_owned(),
        });
    }
    tally.finish();
    let gaps = Gaps { faults: &logs.faults, missing: missing.names(), unmet: logs.format.unmet() };
    Ok(report::report(&config, &tally, simulation.top, &gaps))
}

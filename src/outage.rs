//! What is said in the log about an outage: a warning when it begins, a line when it ends, and a summary now and then
//! between. Never a line a request.

use std::time::{Duration, Instant};

use crate::exchange::Failure;

/// The time between two summaries.
const SUMMARY_EVERY: Duration = Duration::from_secs(10);
/// An outage is over at the first answer after so long without a failure. Answers and failures that alternate are one
/// outage and not many.
const QUIET_FOR: Duration = Duration::from_secs(1);

/// A line for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    /// For the level `warn`.
    Warning(String),
    /// For the level `info`.
    Info(String),
}

/// Whether Redis answers, as far as this worker's requests have noticed.
#[derive(Debug, Default)]
pub enum Outage {
    /// It does.
    #[default]
    None,
    /// It does not.
    Since {
        /// The first failure.
        began: Instant,
        /// The last one.
        last: Instant,
        /// The last line in the log.
        told: Instant,
        /// Calls that failed.
        failed: u64,
    },
}

impl Outage {
    /// A call failed; `then` says what becomes of such requests.
    pub fn failed(&mut self, now: Instant, failure: &Failure, then: &str) -> Option<Line> {
        match self {
            Self::None => {
                *self = Self::Since { began: now, last: now, told: now, failed: 1 };
                Some(Line::Warning(format!("Redis does not answer ({failure}); {then} until it does")))
            }
            Self::Since { began, last, told, failed } => {
                *last = now;
                *failed = failed.saturating_add(1);
                if now.saturating_duration_since(*told) < SUMMARY_EVERY {
                    return None;
                }
                *told = now;
                let seconds = now.saturating_duration_since(*began).as_secs();
                Some(Line::Warning(format!(
                    "Redis has not answered for {seconds} s, {failed} calls failed, the last one: {failure}"
                )))
            }
        }
    }

    /// A call was answered.
    pub fn answered(&mut self, now: Instant) -> Option<Line> {
        let Self::Since { began, last, failed, .. } = *self else {
            return None;
        };
        if now.saturating_duration_since(last) < QUIET_FOR {
            return None;
        }
        *self = Self::None;
        let lasted = last.saturating_duration_since(began);
        let (seconds, tenths) = (lasted.as_secs(), lasted.subsec_millis() / 100);
        Some(Line::Info(format!("Redis answers again; {failed} calls failed over {seconds}.{tenths} s")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exchange::ErrorKind;

    #[test]
    fn an_outage_is_one_warning_a_summary_every_ten_seconds_and_one_line_at_its_end() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let failure = Failure::error(ErrorKind::Unavailable, "connection refused");
        let mut outage = Outage::default();
        assert_eq!(outage.answered(at(0)), None);
        let mut lines = Vec::new();
        for ms in (0..25_000).step_by(10) {
            lines.extend(outage.failed(at(ms), &failure, "requests are allowed"));
        }
        for ms in (25_000..30_000).step_by(10) {
            lines.extend(outage.answered(at(ms)));
        }
        assert_eq!(
            lines,
            [
                Line::Warning(
                    "Redis does not answer (unavailable: connection refused); requests are allowed until it does"
                        .to_owned()
                ),
                Line::Warning(
                    "Redis has not answered for 10 s, 1001 calls failed, the last one: unavailable: connection refused"
                        .to_owned()
                ),
                Line::Warning(
                    "Redis has not answered for 20 s, 2001 calls failed, the last one: unavailable: connection refused"
                        .to_owned()
                ),
                Line::Info("Redis answers again; 2500 calls failed over 24.9 s".to_owned()),
            ]
        );
    }

    #[test]
    fn failures_that_alternate_with_answers_are_one_outage() {
        let start = Instant::now();
        let mut outage = Outage::default();
        let mut lines = 0;
        for turn in 0..900 {
            let now = start + Duration::from_millis(turn * 10);
            lines += outage.failed(now, &Failure::Timeout, "requests are allowed").iter().count();
            lines += outage.answered(now + Duration::from_millis(5)).iter().count();
        }
        assert_eq!(lines, 1);
    }
}

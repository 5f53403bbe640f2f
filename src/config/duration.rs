//! Durations and rates as they are written: `50ms`, `10/s`, `100/min`, `1/15s`.

use std::time::Duration;

use crate::quota::{MAX_PERIOD_MS, MAX_UNITS, Refill};

/// What is expected, for faults.
pub mod in_words {
    /// A rate.
    pub const A_RATE: &str = "tokens over time, such as \"10/s\", \"100/min\", \"1000/h\", \"5000/day\" or \"1/15s\"";
    /// A rate's tokens.
    pub const TOKENS: &str = "a whole number of tokens, from 1 to 9007199254740991, before the \"/\"";
    /// A rate's time.
    pub const TIME: &str = "a time from 1ms to 10 years after the \"/\", such as s, min, h, day or 15s";
}

/// Reads a duration: numbers with units, as in `50ms`, `1s`, `2h`, `1day 12h`.
pub fn duration(text: &str) -> Option<Duration> {
    humantime::parse_duration(text).ok()
}

/// Reads a rate: tokens, a slash, and a unit or a duration of whole milliseconds.
pub fn rate(text: &str) -> Result<Refill, &'static str> {
    let (tokens, time) = text.split_once('/').ok_or(in_words::A_RATE)?;
    let tokens =
        tokens.trim().parse::<u64>().ok().filter(|tokens| (1..=MAX_UNITS).contains(tokens)).ok_or(in_words::TOKENS)?;
    let time = time.trim();
    // A unit by itself is one of it.
    let period = duration(time).or_else(|| duration(&format!("1{time}"))).ok_or(in_words::TIME)?;
    let period_ms = u64::try_from(period.as_millis())
        .ok()
        .filter(|_| period.subsec_nanos().is_multiple_of(1_000_000))
        .filter(|period| (1..=MAX_PERIOD_MS).contains(period))
        .ok_or(in_words::TIME)?;
    Refill::new(tokens, period_ms).ok_or(in_words::A_RATE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_tokens_over_a_unit_or_a_duration() {
        let cases = [
            ("10/s", (10, 1000)),
            ("10/sec", (10, 1000)),
            ("10 / second", (10, 1000)),
            ("100/min", (100, 60_000)),
            ("100/m", (100, 60_000)),
            ("1000/h", (1000, 3_600_000)),
            ("1000/hour", (1000, 3_600_000)),
            ("5000/day", (5000, 86_400_000)),
            ("5000/d", (5000, 86_400_000)),
            ("1/15s", (1, 15_000)),
            ("1/1h 30m", (1, 5_400_000)),
            ("3/250ms", (3, 250)),
            ("1000000/s", (1_000_000, 1000)),
            ("1/10years", (1, MAX_PERIOD_MS)),
        ];
        for (text, (tokens, period)) in cases {
            assert_eq!(rate(text).ok(), Refill::new(tokens, period), "{text}");
        }
    }

    #[test]
    fn a_rate_that_is_none_says_which_half_is_wrong() {
        let cases = [
            ("", in_words::A_RATE),
            ("10", in_words::A_RATE),
            ("10 per s", in_words::A_RATE),
            ("/s", in_words::TOKENS),
            ("0/s", in_words::TOKENS),
            ("-1/s", in_words::TOKENS),
            ("1.5/s", in_words::TOKENS),
            ("1e3/s", in_words::TOKENS),
            ("ten/s", in_words::TOKENS),
            ("99999999999999999999/s", in_words::TOKENS),
            ("10/", in_words::TIME),
            ("10/0s", in_words::TIME),
            ("10/fortnight", in_words::TIME),
            ("10/11years", in_words::TIME),
            ("10/-1s", in_words::TIME),
            ("10/1us", in_words::TIME),
            ("10/1ms 1ns", in_words::TIME),
            ("10/s/s", in_words::TIME),
        ];
        for (text, what) in cases {
            assert_eq!(rate(text), Err(what), "{text}");
        }
    }
}

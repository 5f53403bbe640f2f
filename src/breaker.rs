//! The circuit breaker: while Redis fails, requests are decided at once instead of each waiting for its timeout.
//!
//! So many failures in a row open it. Then one request a cool-down asks all the same, and the first answer, to whomever,
//! closes it. A connection that has just come to stand is asked at once.
//!
//! Invariant: an open breaker lets at most one request through in a cool-down, and never keeps the next from trying.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

/// When it opens, and for how long it stays so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Failures in a row that open it: 1 to 1,000,000.
    pub failures: NonZeroU32,
    /// The time between two attempts while it is open: 10 ms to 10 min. A quarter more or less of it is chance, so that
    /// workers do not all try at once.
    pub cool_down: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { failures: NonZeroU32::MIN.saturating_add(9), cool_down: Duration::from_secs(1) }
    }
}

/// What has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It is open now.
    Opened,
    /// It is closed again.
    Closed,
}

/// The breaker of one worker.
#[derive(Debug)]
pub struct Breaker {
    settings: Settings,
    state: State,
    random: fastrand::Rng,
}

#[derive(Debug)]
enum State {
    /// Everybody may ask. So many failures came in a row.
    Closed { failures: u32 },
    /// Nobody may ask until then, and then one request may.
    Open { until: Instant },
}

impl Breaker {
    /// A closed breaker. The seed should differ between workers.
    pub fn new(settings: Settings, seed: u64) -> Self {
        Self { settings, state: State::Closed { failures: 0 }, random: fastrand::Rng::with_seed(seed) }
    }

    /// Whether it is open.
    pub const fn is_open(&self) -> bool {
        matches!(self.state, State::Open { .. })
    }

    /// Whether a request may ask Redis now. Where it is open, the one that may is the one for this cool-down.
    pub fn admits(&mut self, now: Instant) -> bool {
        match self.state {
            State::Closed { .. } => true,
            State::Open { until } if now < until => false,
            State::Open { .. } => {
                self.state = self.open(now);
                true
            }
        }
    }

    /// A call was answered.
    pub fn answered(&mut self) -> Option<Change> {
        let was_open = self.is_open();
        self.state = State::Closed { failures: 0 };
        was_open.then_some(Change::Closed)
    }

    /// A call failed.
    pub fn failed(&mut self, now: Instant) -> Option<Change> {
        let State::Closed { failures } = &mut self.state else {
            return None;
        };
        *failures = failures.saturating_add(1);
        if *failures < self.settings.failures.get() {
            return None;
        }
        self.state = self.open(now);
        Some(Change::Opened)
    }

    /// A new connection stands: whatever was wrong with the last one, this one may be asked.
    pub fn connected(&mut self, now: Instant) {
        if let State::Open { until } = &mut self.state {
            *until = now;
        }
    }

    fn open(&mut self, now: Instant) -> State {
        let share = self.random.u32(75..=125);
        let cool_down = self.settings.cool_down.saturating_mul(share) / 100;
        State::Open { until: now.checked_add(cool_down).unwrap_or(now) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn breaker() -> Breaker {
        let settings = Settings { failures: NonZeroU32::new(3).unwrap(), cool_down: Duration::from_secs(1) };
        Breaker::new(settings, 5)
    }

    #[test]
    fn failures_in_a_row_open_it_and_an_answer_between_does_not_count() {
        let (mut breaker, now) = (breaker(), Instant::now());
        for _ in 0..5 {
            assert_eq!((breaker.failed(now), breaker.failed(now)), (None, None));
            assert_eq!(breaker.answered(), None);
        }
        assert_eq!((breaker.failed(now), breaker.failed(now)), (None, None));
        assert!(breaker.admits(now));
        assert_eq!(breaker.failed(now), Some(Change::Opened));
        assert!(breaker.is_open() && !breaker.admits(now));
        // Calls that were under way fail as well, which is no news.
        assert_eq!(breaker.failed(now), None);
        assert_eq!(breaker.answered(), Some(Change::Closed));
        assert!(breaker.admits(now) && breaker.admits(now));
    }

    #[test]
    fn one_request_a_cool_down_asks_all_the_same() {
        let (mut breaker, start) = (breaker(), Instant::now());
        while breaker.failed(start).is_none() {}
        let mut asked = Vec::new();
        for ms in 0..10_000 {
            let now = start + Duration::from_millis(ms);
            if breaker.admits(now) {
                asked.push(ms);
                assert_eq!(breaker.failed(now), None);
            }
        }
        let gaps = asked.windows(2).map(|two| two[1] - two[0]).chain(asked.first().copied()).collect::<Vec<_>>();
        assert!((8..=13).contains(&asked.len()), "{asked:?}");
        assert!(gaps.iter().all(|gap| (750..=1251).contains(gap)), "{gaps:?}");
        assert!(gaps.iter().any(|gap| *gap != gaps[0]), "there is chance in it: {gaps:?}");
    }

    #[test]
    fn a_new_connection_is_asked_at_once() {
        let (mut breaker, now) = (breaker(), Instant::now());
        while breaker.failed(now).is_none() {}
        assert!(!breaker.admits(now));
        breaker.connected(now);
        assert!(breaker.admits(now) && !breaker.admits(now));
    }
}

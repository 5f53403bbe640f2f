//! How long to wait before the next attempt to connect.
//!
//! Exponential with jitter, so that the workers of a fleet that lost the same server do not come back to it in step.

use std::time::Duration;

/// The wait after the first failed attempt, before jitter.
const FIRST: Duration = Duration::from_millis(25);
/// The longest wait. Short, since an attempt is cheap and service should be normal within two seconds of Redis'
/// return.
const LONGEST: Duration = Duration::from_secs(1);
/// The longest wait while nothing has been asked for: on the proxy's main thread, where no stream can be opened and no
/// request comes, and on workers without traffic.
const LONGEST_UNUSED: Duration = Duration::from_secs(60);

/// The waits between attempts.
#[derive(Debug)]
pub struct Backoff {
    random: fastrand::Rng,
    failed: u32,
    longest: Duration,
}

impl Backoff {
    /// A sequence of waits; the seed decides the jitter.
    pub fn new(seed: u64) -> Self {
        Self { random: fastrand::Rng::with_seed(seed), failed: 0, longest: LONGEST_UNUSED }
    }

    /// An attempt failed: the wait before the next, between half of and the whole of a step that doubles up to a
    /// second, or to a minute while the connection is unused.
    pub fn next(&mut self) -> Duration {
        let step = FIRST.saturating_mul(1 << self.failed.min(16)).min(self.longest);
        self.failed = self.failed.saturating_add(1);
        step.mul_f64(0.5 + self.random.f64() / 2.0)
    }

    /// The connection is wanted from now on: begin again, with waits that stay short. Returns whether that is news.
    pub fn used(&mut self) -> bool {
        let news = self.longest == LONGEST_UNUSED;
        if news {
            self.longest = LONGEST;
            self.reset();
        }
        news
    }

    /// The connection proved itself: begin again with short waits.
    pub fn reset(&mut self) {
        self.failed = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_second_and_differ_between_workers() {
        let waits = |seed| {
            let mut backoff = Backoff::new(seed);
            assert!(backoff.used());
            (0..40).map(|_| backoff.next()).collect::<Vec<_>>()
        };
        let (one, other) = (waits(1), waits(2));
        assert_ne!(one, other);
        let mut step = FIRST;
        for wait in one {
            assert!(wait >= step / 2 && wait <= step, "{wait:?} of {step:?}");
            step = (step * 2).min(LONGEST);
        }
    }

    #[test]
    fn unused_the_waits_grow_to_a_minute_and_the_first_use_ends_that() {
        let mut backoff = Backoff::new(4);
        let longest = (0..40).map(|_| backoff.next()).max();
        assert!(longest > Some(LONGEST_UNUSED / 2));
        assert!(backoff.used());
        assert!(backoff.next() <= FIRST);
        assert!(!backoff.used());
    }

    #[test]
    fn a_reset_begins_again() {
        let mut backoff = Backoff::new(3);
        for _ in 0..10 {
            backoff.next();
        }
        backoff.reset();
        assert!(backoff.next() <= FIRST);
    }
}

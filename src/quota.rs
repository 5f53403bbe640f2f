//! Capacity, refill and cost: the arithmetic of one bucket, without time and without storage.
//!
//! Invariant: a value of these types can be computed with exactly. A bucket's level is counted in *units*, of
//! which one token has `period` and one millisecond of refill brings `tokens`, both in lowest terms. A full
//! bucket has fewer than 2^53 units, so every level is an integer that a Lua number holds without rounding,
//! and no fraction of a token is ever lost: not at one token in ten years, and not at a million a second.
//!
//! This module does not know how a limit is written in a configuration, nor where buckets are kept.

use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;

/// The largest count of units that a Lua number (an IEEE 754 double) still counts one by one: 2^53 - 1.
pub const MAX_UNITS: u64 = (1 << 53) - 1;

/// The longest period a refill may have: ten years of 365.25 days, in milliseconds.
pub const MAX_PERIOD_MS: u64 = 315_576_000_000;

/// A number above zero that a Lua number counts exactly.
const fn countable(number: u64) -> Option<NonZeroU64> {
    match NonZeroU64::new(number) {
        Some(countable) if number <= MAX_UNITS => Some(countable),
        _ => None,
    }
}

/// How many tokens a bucket holds when it is full: 1 to 2^53 - 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Capacity(NonZeroU64);

impl Capacity {
    /// A capacity of so many tokens, or `None` where that is zero or above [`MAX_UNITS`].
    pub const fn new(tokens: u64) -> Option<Self> {
        match countable(tokens) {
            Some(tokens) => Some(Self(tokens)),
            None => None,
        }
    }

    /// The capacity in tokens.
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

/// How fast a bucket refills: `tokens` every `period_ms` milliseconds, evenly, in lowest terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Refill {
    tokens: NonZeroU64,
    period_ms: NonZeroU64,
}

impl Refill {
    /// So many tokens every so many milliseconds, or `None` where either is zero, the tokens are above
    /// [`MAX_UNITS`] or the period is above [`MAX_PERIOD_MS`].
    ///
    /// ```
    /// # use meshquota::quota::Refill;
    /// assert_eq!(Refill::new(100, 60_000), Refill::new(1, 600));
    /// ```
    pub const fn new(tokens: u64, period_ms: u64) -> Option<Self> {
        if tokens > MAX_UNITS || period_ms > MAX_PERIOD_MS {
            return None;
        }
        let (Some(tokens), Some(period_ms)) = (NonZeroU64::new(tokens), NonZeroU64::new(period_ms)) else {
            return None;
        };
        let divisor = greatest_common_divisor(tokens, period_ms);
        // Dividing by a common divisor leaves at least one of each.
        match (NonZeroU64::new(tokens.get() / divisor.get()), NonZeroU64::new(period_ms.get() / divisor.get())) {
            (Some(tokens), Some(period_ms)) => Some(Self { tokens, period_ms }),
            _ => None,
        }
    }

    /// Units that one millisecond brings.
    pub const fn tokens(self) -> u64 {
        self.tokens.get()
    }

    /// Units that one token is worth; also the milliseconds in which [`tokens`](Self::tokens) tokens arrive.
    pub const fn period_ms(self) -> u64 {
        self.period_ms.get()
    }

    /// How long it takes until so many units have come, in whole milliseconds, rounded up. The units may be smaller ones, of
    /// a bucket that is a part of this.
    pub fn time_for(self, units: u128) -> Duration {
        milliseconds(units.div_ceil(u128::from(self.tokens.get()).max(1)))
    }

    /// The whole tokens that one second brings, at least one: the capacity of a limit that names none.
    pub fn per_second(self) -> Capacity {
        let tokens = self.tokens.get().saturating_mul(1000) / self.period_ms;
        Capacity::new(tokens.clamp(1, MAX_UNITS)).unwrap_or(Capacity(NonZeroU64::MIN))
    }
}

/// So many milliseconds, or as many as there can be.
pub fn milliseconds(ms: u128) -> Duration {
    Duration::from_millis(u64::try_from(ms).unwrap_or(u64::MAX))
}

const fn greatest_common_divisor(a: NonZeroU64, b: NonZeroU64) -> NonZeroU64 {
    let (mut a, mut b) = (a, b);
    while let Some(rest) = NonZeroU64::new(a.get() % b.get()) {
        a = b;
        b = rest;
    }
    b
}

/// How many tokens one request takes: 1 to 2^53 - 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cost(NonZeroU64);

impl Cost {
    /// One token, the cost of a request that names none.
    pub const ONE: Self = Self(NonZeroU64::MIN);

    /// A cost of so many tokens, or `None` where that is zero or above [`MAX_UNITS`].
    pub const fn new(tokens: u64) -> Option<Self> {
        match countable(tokens) {
            Some(tokens) => Some(Self(tokens)),
            None => None,
        }
    }

    /// The cost in tokens.
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

/// A capacity and a refill that can be computed with exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limit {
    capacity: Capacity,
    refill: Refill,
}

/// A full bucket would have more units than can be counted exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooFine {
    /// The largest capacity that this refill allows, in tokens. Zero where it allows none.
    pub largest_capacity: u64,
}

impl fmt::Display for TooFine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "with this refill a capacity of at most {} can be counted exactly; \
             lower the capacity or write the refill over a rounder or shorter time",
            self.largest_capacity
        )
    }
}

impl std::error::Error for TooFine {}

impl Limit {
    /// Pairs a capacity with a refill.
    ///
    /// # Errors
    /// [`TooFine`] where capacity times the period in milliseconds (in lowest terms with the refill's tokens)
    /// is above 2^53 - 1. Such a pair is a large odd number of tokens over a very long time, as in 1234567 in
    /// 365 days.
    pub const fn new(capacity: Capacity, refill: Refill) -> Result<Self, TooFine> {
        let largest_capacity = MAX_UNITS / refill.period_ms();
        if capacity.get() > largest_capacity {
            return Err(TooFine { largest_capacity });
        }
        Ok(Self { capacity, refill })
    }

    /// What the bucket holds when full.
    pub const fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// How fast the bucket refills.
    pub const fn refill(&self) -> Refill {
        self.refill
    }

    /// Whether whoever keeps to this limit keeps to the other as well: its burst and its rate are no larger.
    pub fn implies(&self, other: &Self) -> bool {
        let rate = |these: Refill, those: Refill| u128::from(these.tokens()) * u128::from(those.period_ms());
        self.capacity <= other.capacity && rate(self.refill, other.refill) <= rate(other.refill, self.refill)
    }

    /// The time in which an empty bucket fills, in milliseconds, rounded up.
    pub const fn window(&self) -> Duration {
        // Fewer than 2^53 units.
        let units = self.capacity.get().saturating_mul(self.refill.period_ms());
        Duration::from_millis(units.div_ceil(self.refill.tokens.get()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refill_is_kept_in_lowest_terms() {
        let cases = [
            ((10, 1000), (1, 100)),
            ((100, 60_000), (1, 600)),
            ((1_000_000, 1000), (1000, 1)),
            ((1, MAX_PERIOD_MS), (1, MAX_PERIOD_MS)),
            ((7, 1000), (7, 1000)),
        ];
        for ((tokens, period), (units, of)) in cases {
            let refill = Refill::new(tokens, period).unwrap();
            assert_eq!((refill.tokens(), refill.period_ms()), (units, of));
        }
    }

    #[test]
    fn a_window_is_the_time_in_which_an_empty_bucket_fills() {
        for ((capacity, tokens, period), milliseconds) in [
            ((10, 2, 1000), 5000),
            ((1, 3, 1000), 334),
            ((1000, 1_000_000, 1000), 1),
            ((7, 1, MAX_PERIOD_MS), 7 * MAX_PERIOD_MS),
        ] {
            let limit = Limit::new(Capacity::new(capacity).unwrap(), Refill::new(tokens, period).unwrap()).unwrap();
            assert_eq!(limit.window(), Duration::from_millis(milliseconds));
        }
    }

    #[test]
    fn nothing_that_never_refills_is_a_refill() {
        for (tokens, period) in [(0, 1000), (1, 0), (1, MAX_PERIOD_MS + 1), (u64::MAX, 1)] {
            assert_eq!(Refill::new(tokens, period), None);
        }
        assert_eq!(Capacity::new(0), None);
        assert_eq!(Capacity::new(MAX_UNITS + 1), None);
        assert_eq!(Cost::new(0), None);
    }

    #[test]
    fn a_limit_without_a_capacity_holds_a_second_of_refill_and_at_least_one_token() {
        let cases =
            [((10, 1000), 10), ((100, 60_000), 1), ((90, 60_000), 1), ((200, 60_000), 3), ((MAX_UNITS, 1), MAX_UNITS)];
        for ((tokens, period), capacity) in cases {
            assert_eq!(Refill::new(tokens, period).unwrap().per_second().get(), capacity);
        }
    }

    #[test]
    fn a_limit_that_cannot_be_counted_exactly_says_what_would_fit() {
        let year = 365 * 86_400_000;
        let odd = Refill::new(1_234_567, year).unwrap();
        let refused = Limit::new(Capacity::new(1_234_567).unwrap(), odd).unwrap_err();
        assert_eq!(refused.largest_capacity, MAX_UNITS / year);
        assert!(Limit::new(Capacity::new(refused.largest_capacity).unwrap(), odd).is_ok());
        let round = Refill::new(1_000_000, year).unwrap();
        assert!(Limit::new(Capacity::new(1_000_000).unwrap(), round).is_ok());
    }
}

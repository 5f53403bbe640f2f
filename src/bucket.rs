//! The bucket in this process: what `lua/bucket.lua` does to the buckets of one caller in Redis, with levels that are kept
//! here.
//!
//! Invariant: levels are counted in units, as there (see [`quota`](crate::quota)), and exactly. What a full bucket holds is
//! never exceeded, and one charge is taken from the buckets of all limits or of none.
//!
//! This module does not know the time, nor who keeps the levels and for how long.

use std::num::NonZeroU32;
use std::time::Duration;

use crate::quota::Limit;
use crate::rule::Charge;
use crate::script::{Outcome, Standing};

/// The limits of a charge, divided by a number: a token is worth `period · number` units of which `tokens` come in a
/// millisecond. Each level that it is given is that of the limit at the same place.
#[derive(Clone, Copy, Debug)]
pub struct Measure<'a> {
    limits: &'a [Limit],
    cost: u64,
    divisor: u64,
}

impl<'a> Measure<'a> {
    /// The measure of a charge; a divisor of 1 leaves the limits as they are.
    pub fn new(charge: &'a Charge, divisor: u64) -> Self {
        Self { limits: charge.limits(), cost: charge.cost.get(), divisor: divisor.max(1) }
    }

    fn token(&self, limit: &Limit) -> u128 {
        u128::from(limit.refill().period_ms()).saturating_mul(self.divisor.into())
    }

    /// A full bucket. One request has to fit, where it fits the undivided one.
    fn full(&self, limit: &Limit) -> u128 {
        let capacity = limit.capacity().get();
        let tokens = (capacity / self.divisor).max(self.cost.min(capacity)).max(1);
        self.token(limit).saturating_mul(tokens.into())
    }

    /// The levels of full buckets.
    pub fn all_full(&self) -> Vec<u128> {
        self.limits.iter().map(|limit| self.full(limit)).collect()
    }

    /// Lets time pass.
    pub fn refill(&self, levels: &mut [u128], ms: u128) {
        for (level, limit) in levels.iter_mut().zip(self.limits) {
            let came = u128::from(limit.refill().tokens()).saturating_mul(ms);
            *level = level.saturating_add(came).min(self.full(limit));
        }
    }

    /// Whether all are full.
    pub fn is_full(&self, levels: &[u128]) -> bool {
        levels.iter().zip(self.limits).all(|(level, limit)| *level >= self.full(limit))
    }

    fn need(&self, limit: &Limit) -> u128 {
        self.token(limit).saturating_mul(self.cost.into())
    }

    fn take(&self, levels: &mut [u128]) {
        for (level, limit) in levels.iter_mut().zip(self.limits) {
            *level = level.saturating_sub(self.need(limit));
        }
    }

    /// Gives one charge back.
    pub fn give_back(&self, levels: &mut [u128]) {
        for (level, limit) in levels.iter_mut().zip(self.limits) {
            *level = level.saturating_add(self.need(limit)).min(self.full(limit));
        }
    }

    /// So many tokens of the undivided bucket are left under a limit.
    pub fn set(&self, levels: &mut [u128], limit: usize, remaining: u64) {
        if let (Some(level), Some(limit)) = (levels.get_mut(limit), self.limits.get(limit)) {
            // The divided bucket has its part of them, in units of which a token has so many more.
            let units = u128::from(limit.refill().period_ms()).saturating_mul(remaining.into());
            *level = units.min(self.full(limit));
        }
    }

    /// Takes one charge from all buckets, or says how long that has to wait.
    pub fn charge(&self, levels: &mut [u128]) -> Outcome {
        if let Some(limit) = self.limits.iter().position(|limit| self.cost > limit.capacity().get()) {
            return Outcome::Never { standing: self.standing(levels, limit) };
        }
        let waits = levels
            .iter()
            .zip(self.limits)
            .map(|(level, limit)| limit.refill().time_for(self.need(limit).saturating_sub(*level)));
        // The first of those that take longest.
        let longest = waits.enumerate().max_by(|one, other| one.1.cmp(&other.1).then(other.0.cmp(&one.0)));
        match longest {
            Some((limit, retry_after)) if retry_after > Duration::ZERO => {
                Outcome::Denied { retry_after, standing: self.standing(levels, limit) }
            }
            _ => {
                self.take(levels);
                let scarcest = levels.iter().zip(self.limits).enumerate().min_by(|(_, one), (_, other)| {
                    // a/b < c/d where a·d < c·b.
                    let product = |level: &u128, limit: &Limit| level.saturating_mul(self.full(limit));
                    product(one.0, other.1).cmp(&product(other.0, one.1))
                });
                let standing = self.standing(levels, scarcest.map_or(0, |(limit, _)| limit));
                Outcome::Granted { granted: NonZeroU32::MIN, retry_after: None, standing }
            }
        }
    }

    fn standing(&self, levels: &[u128], place: usize) -> Standing {
        let level = levels.get(place).copied().unwrap_or(0);
        let (remaining, reset_after) = self.limits.get(place).map_or((0, Duration::ZERO), |limit| {
            let missing = self.full(limit).saturating_sub(level);
            (level / self.token(limit).max(1), limit.refill().time_for(missing))
        });
        let remaining = u64::try_from(remaining).unwrap_or(u64::MAX);
        Standing { limit: place, remaining, reset_after }
    }
}

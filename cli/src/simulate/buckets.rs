//! The buckets of one caller, kept as `lua/bucket.lua` keeps them in Redis.
//!
//! Invariant: what is granted is taken, and a refusal changes nothing. The limits in force are those of the charge: rules that
//! share a namespace may charge one bucket by different limits, and each finds what the other has left.

use std::time::Duration;

use meshquota::bucket::Measure;
use meshquota::quota::Limit;
use meshquota::rule::Charge;
use meshquota::script::Outcome;

/// How long Redis keeps a bucket that is full, in milliseconds.
const SLACK_MS: u64 = 1000;

/// A bucket for each limit, by its number. One that is not there is full.
#[derive(Debug, Default)]
pub struct Buckets(Vec<Option<Bucket>>);

#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// In units, of which a token has `period_ms`.
    level: u128,
    period_ms: u64,
    /// When that was so.
    at_ms: u64,
    /// When Redis forgets it, since it is full by then for whoever charged it last.
    gone_ms: u64,
}

impl Bucket {
    /// The level by a limit, in its units.
    fn level(&self, limit: &Limit, now_ms: u64) -> u128 {
        let (period_ms, came_ms) = (limit.refill().period_ms(), now_ms.saturating_sub(self.at_ms));
        let kept = if self.period_ms == period_ms {
            self.level
        } else {
            // A part of a unit is dropped. What is within a hundredth of a whole one is that: Redis keeps decimals.
            let hundredths = self.level.saturating_mul(u128::from(period_ms)).saturating_mul(100);
            let of = u128::from(self.period_ms).max(1);
            hundredths.saturating_add(of) / of.saturating_mul(100)
        };
        kept.saturating_add(u128::from(limit.refill().tokens()).saturating_mul(came_ms.into())).min(full(limit))
    }
}

/// The level of a full bucket.
fn full(limit: &Limit) -> u128 {
    u128::from(limit.capacity().get()).saturating_mul(limit.refill().period_ms().into())
}

impl Buckets {
    /// Takes a charge from them, or says why not. Time does not go back.
    pub fn charge(&mut self, now_ms: u64, charge: &Charge) -> Outcome {
        let mut levels = self.levels(now_ms, charge);
        let outcome = Measure::new(charge, 1).charge(&mut levels);
        if matches!(outcome, Outcome::Granted { .. }) {
            self.keep(now_ms, charge, &levels);
        }
        outcome
    }

    /// Gives back what was granted.
    pub fn give_back(&mut self, now_ms: u64, charge: &Charge) {
        let mut levels = self.levels(now_ms, charge);
        Measure::new(charge, 1).give_back(&mut levels);
        self.keep(now_ms, charge, &levels);
    }

    fn levels(&self, now_ms: u64, charge: &Charge) -> Vec<u128> {
        let limits = charge.limits().iter().enumerate();
        limits
            .map(|(place, limit)| {
                let kept = self.0.get(place).and_then(Option::as_ref).filter(|bucket| now_ms < bucket.gone_ms);
                kept.map_or_else(|| full(limit), |bucket| bucket.level(limit, now_ms))
            })
            .collect()
    }

    fn keep(&mut self, now_ms: u64, charge: &Charge, levels: &[u128]) {
        if self.0.len() < levels.len() {
            self.0.resize(levels.len(), None);
        }
        for (kept, (level, limit)) in self.0.iter_mut().zip(levels.iter().zip(charge.limits())) {
            let until_full = limit.refill().time_for(full(limit).saturating_sub(*level));
            let life = until_full.saturating_add(Duration::from_millis(SLACK_MS)).as_millis();
            let gone_ms = now_ms.saturating_add(u64::try_from(life).unwrap_or(u64::MAX));
            *kept = Some(Bucket { level: *level, period_ms: limit.refill().period_ms(), at_ms: now_ms, gone_ms });
        }
    }
}

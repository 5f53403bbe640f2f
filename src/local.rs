//! Buckets of this worker's own, which decide while Redis cannot be asked (`failure_mode: local`).
//!
//! A caller has two here. Into its *share*, of the limits divided by `local_share`, a request has to fit during an outage. The
//! *whole*, of the limits as they are, keeps account of what it took: Redis never hears of that, so for as long as the whole
//! is not full again after an outage, a request has to fit into it as well as into the bucket in Redis; and so it has to in
//! the next outage. Both begin where Redis said last that the caller stood. So nothing is gained by the change from one to
//! the other, in either direction.
//!
//! Invariant: what this worker admits to a caller, by Redis and by itself, fits into one bucket of the rule's limits, as far
//! as it remembers: beyond [`MOST_CALLERS`] those are forgotten that came least lately.
//!
//! This module does not know why Redis cannot be asked, nor what becomes of the request.

use std::num::{NonZeroU32, NonZeroUsize};
use std::rc::Rc;
use std::time::{Duration, Instant};

use lru::LruCache;

use crate::quota::{Limit, milliseconds};
use crate::rule::Charge;
use crate::script::{Outcome, Standing};

/// The most callers that are remembered.
const MOST_CALLERS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(9_999);

/// The buckets, by the first key of each caller under each rule.
#[derive(Debug)]
pub struct LocalBuckets {
    share: u64,
    callers: LruCache<Rc<str>, Caller>,
}

/// By which bucket a charge was granted here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrantedBy {
    /// The share, during an outage.
    Share,
    /// The whole, after it.
    Whole,
}

/// What is left to one caller under one rule, in units for each limit.
#[derive(Debug)]
struct Caller {
    share: Vec<u128>,
    whole: Vec<u128>,
    /// When that was so.
    at: Instant,
    /// Whether something was taken that Redis does not know of.
    owes: bool,
}

/// The limits of a charge, divided by a number: a token is worth `period · number` units of which `tokens` come in a
/// millisecond.
struct Measure<'a> {
    limits: &'a [Limit],
    cost: u64,
    divisor: u64,
}

impl<'a> Measure<'a> {
    fn new(charge: &'a Charge, divisor: u64) -> Self {
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

    fn all_full(&self) -> Vec<u128> {
        self.limits.iter().map(|limit| self.full(limit)).collect()
    }

    /// Lets time pass.
    fn refill(&self, levels: &mut [u128], ms: u128) {
        for (level, limit) in levels.iter_mut().zip(self.limits) {
            let came = u128::from(limit.refill().tokens()).saturating_mul(ms);
            *level = level.saturating_add(came).min(self.full(limit));
        }
    }

    fn is_full(&self, levels: &[u128]) -> bool {
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

    fn give_back(&self, levels: &mut [u128]) {
        for (level, limit) in levels.iter_mut().zip(self.limits) {
            *level = level.saturating_add(self.need(limit)).min(self.full(limit));
        }
    }

    /// So many tokens of the undivided bucket are left under a limit.
    fn set(&self, levels: &mut [u128], limit: usize, remaining: u64) {
        if let (Some(level), Some(limit)) = (levels.get_mut(limit), self.limits.get(limit)) {
            // The divided bucket has its part of them, in units of which a token has so many more.
            let units = u128::from(limit.refill().period_ms()).saturating_mul(remaining.into());
            *level = units.min(self.full(limit));
        }
    }

    /// Takes one charge from all buckets, or says how long that has to wait.
    fn charge(&self, levels: &mut [u128]) -> Outcome {
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

impl LocalBuckets {
    /// No caller is known: the buckets of each are full. The limits of shares are divided by that number.
    pub fn new(share: u64) -> Self {
        Self { share, callers: LruCache::new(MOST_CALLERS) }
    }

    /// Decides for a caller by its share, since Redis cannot be asked.
    pub fn charge(&mut self, now: Instant, charge: &Charge) -> Option<Outcome> {
        let share = Measure::new(charge, self.share);
        let caller = self.caller(now, charge)?;
        let outcome = share.charge(&mut caller.share);
        if let Outcome::Granted { .. } = outcome {
            // What was confirmed after an earlier outage came out of the whole alone.
            let whole = Measure::new(charge, 1).charge(&mut caller.whole);
            if !matches!(whole, Outcome::Granted { .. }) {
                share.give_back(&mut caller.share);
                return Some(whole);
            }
            caller.owes = true;
        }
        Some(outcome)
    }

    /// What there is to say here to a request that Redis grants: nothing, where all that was taken here is refilled.
    pub fn confirm(&mut self, now: Instant, charge: &Charge) -> Option<Outcome> {
        if !self.callers.peek(charge.first_key())?.owes {
            return None;
        }
        let whole = Measure::new(charge, 1);
        let caller = self.caller(now, charge)?;
        caller.owes = !whole.is_full(&caller.whole);
        caller.owes.then(|| whole.charge(&mut caller.whole))
    }

    /// Takes back what [`charge`](Self::charge) or [`confirm`](Self::confirm) granted.
    pub fn give_back(&mut self, now: Instant, charge: &Charge, granted_by: GrantedBy) {
        let share = Measure::new(charge, self.share);
        if let Some(caller) = self.caller(now, charge) {
            if granted_by == GrantedBy::Share {
                share.give_back(&mut caller.share);
            }
            Measure::new(charge, 1).give_back(&mut caller.whole);
        }
    }

    /// What Redis said of a caller.
    pub fn heard(&mut self, now: Instant, charge: &Charge, standing: &Standing) {
        let share = Measure::new(charge, self.share);
        if let Some(caller) = self.caller(now, charge).filter(|caller| !caller.owes) {
            share.set(&mut caller.share, standing.limit, standing.remaining);
            Measure::new(charge, 1).set(&mut caller.whole, standing.limit, standing.remaining);
        }
    }

    /// A caller as it stands now. Its buckets are full where it is not known, or where its limits are others than before.
    fn caller(&mut self, now: Instant, charge: &Charge) -> Option<&mut Caller> {
        let (key, share, whole) = (charge.first_key(), Measure::new(charge, self.share), Measure::new(charge, 1));
        let full = || Caller { share: share.all_full(), whole: whole.all_full(), at: now, owes: false };
        if self.callers.peek(key).is_none_or(|caller| caller.whole.len() != charge.limits().len()) {
            self.callers.put(Rc::clone(key), full());
        }
        let caller = self.callers.get_mut(key)?;
        let ms = now.saturating_duration_since(caller.at).as_millis();
        share.refill(&mut caller.share, ms);
        whole.refill(&mut caller.whole, ms);
        // What is left of a millisecond counts next time.
        caller.at = caller.at.checked_add(milliseconds(ms)).unwrap_or(now);
        Some(caller)
    }
}

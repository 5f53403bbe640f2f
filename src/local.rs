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

use std::num::NonZeroUsize;
use std::rc::Rc;
use std::time::Instant;

use lru::LruCache;

use crate::bucket::Measure;
use crate::quota::milliseconds;
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

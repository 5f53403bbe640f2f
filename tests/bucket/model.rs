//! The bucket as it ought to be, in 128-bit integers: what the script is measured against.
//!
//! It counts in the units of `quota`, and shares neither code nor number format with the script.

use meshquota::quota::{Limit, MAX_UNITS};

/// What a key that is full lives on, in milliseconds.
pub const SLACK: u64 = 1000;

/// One stored bucket: so many units at that time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    pub units: u128,
    pub at: u64,
}

/// The buckets of one rule. A bucket that is not stored is full.
#[derive(Clone, Debug, Default)]
pub struct Model {
    pub buckets: Vec<Option<Bucket>>,
}

/// What a call is to be answered, and how long each key is to live then, where it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Granted, remaining, retry after, reset after, limit.
    pub reply: [i64; 5],
    pub ttl: Vec<Option<u64>>,
}

impl Bucket {
    /// The bucket at `now` with nothing taken. A clock that is behind it changes nothing.
    pub fn seen_at(self, now: u64, limit: &Limit) -> Self {
        let gained = u128::from(now.saturating_sub(self.at)) * rate(limit);
        Self { units: full(limit).min(self.units + gained), at: self.at.max(now) }
    }

    /// The first time, counted from `now`, at which there are that many units. Zero where there are already.
    fn wait_for(self, units: u128, now: u64, limit: &Limit) -> u64 {
        if self.units >= units {
            return 0;
        }
        let filling = (units - self.units).div_ceil(rate(limit));
        let wait = u128::from(self.at - now) + filling;
        let wait = wait.min(u128::from(MAX_UNITS)) as u64;
        if wait < MAX_UNITS {
            assert!(self.seen_at(now + wait, limit).units >= units);
            assert!(self.seen_at(now + wait - 1, limit).units < units);
        }
        wait
    }
}

impl Model {
    pub fn new(limits: usize) -> Self {
        Self { buckets: vec![None; limits] }
    }

    pub fn view(&self, i: usize, now: u64, limit: &Limit) -> Bucket {
        let unstored = Bucket { units: full(limit), at: now };
        self.buckets[i].unwrap_or(unstored).seen_at(now, limit)
    }

    /// Charges `count` times `cost`, or gives back where `count` is negative.
    pub fn call(&mut self, limits: &[Limit], now: u64, cost: u64, count: i64) -> Answer {
        let mut seen: Vec<Bucket> = limits.iter().enumerate().map(|(i, limit)| self.view(i, now, limit)).collect();
        let need: Vec<u128> = limits.iter().map(|limit| u128::from(cost) * one_token(limit)).collect();
        let all = || 0..limits.len();

        let too_small = (count > 0).then(|| all().find(|&i| cost > limits[i].capacity().get())).flatten();
        let fitting = all().map(|i| seen[i].units / need[i]).min().unwrap();
        let granted = match (count, too_small) {
            (..=0, _) => 0,
            (_, Some(_)) => 0,
            _ => fitting.min(count as u128),
        };
        let given_back = u128::from(count.min(0).unsigned_abs());

        let mut ttl = vec![None; limits.len()];
        for i in all() {
            let after = seen[i].units - granted * need[i] + given_back * need[i];
            seen[i].units = after.min(full(&limits[i]));
            if granted > 0 || given_back > 0 && self.buckets[i].is_some() {
                self.buckets[i] = Some(seen[i]);
                let filled = seen[i].wait_for(full(&limits[i]), now, &limits[i]);
                let life = filled.max(seen[i].at - now) + SLACK;
                ttl[i] = Some(life.min(MAX_UNITS));
            }
        }

        let refused = too_small.is_none() && count > 0 && granted < count as u128;
        let wait = |i: usize| {
            if refused { seen[i].wait_for(need[i], now, &limits[i]) } else { 0 }
        };
        let longest = all().map(wait).max().unwrap();
        let left = |i: usize| seen[i].units as f64 / full(&limits[i]) as f64;
        let least = all().map(left).fold(f64::INFINITY, f64::min);
        let (limit, retry_after) = match too_small {
            Some(i) => (i, -1),
            None if refused => (all().find(|&i| wait(i) == longest).unwrap(), longest as i64),
            None => (all().find(|&i| left(i) == least).unwrap(), 0),
        };
        let bound = seen[limit];
        let reply = [
            (granted + given_back) as i64,
            (bound.units / one_token(&limits[limit])) as i64,
            retry_after,
            bound.wait_for(full(&limits[limit]), now, &limits[limit]) as i64,
            limit as i64,
        ];
        Answer { reply, ttl }
    }
}

/// Units that fill the bucket.
pub fn full(limit: &Limit) -> u128 {
    u128::from(limit.capacity().get()) * one_token(limit)
}

/// Units that one token is worth.
pub fn one_token(limit: &Limit) -> u128 {
    u128::from(limit.refill().period_ms())
}

/// Units that one millisecond brings.
pub fn rate(limit: &Limit) -> u128 {
    u128::from(limit.refill().tokens())
}

//! How much one caller wants: the tokens that would have had to be there, had none of its requests ever been denied.
//!
//! What is asked for flows off again as the bucket refills; the most that ever stood there is the capacity that would have
//! denied nothing.

use std::rc::Rc;

use meshquota::quota::{Limit, MAX_UNITS};
use meshquota::rule::Charge;

/// The times over which tokens are counted, by the clock: a second, a minute, an hour.
pub const WINDOWS_MS: [u64; 3] = [1000, 60_000, 3_600_000];

/// What one caller wants of its buckets, whichever rules charge them.
#[derive(Debug)]
pub struct Demand {
    at_ms: u64,
    windows: [Window; WINDOWS_MS.len()],
    /// By each limits by which its buckets were charged, most often one.
    by_limits: Vec<(Rc<[Limit]>, Vec<Standing>)>,
}

/// What was asked for and has not been refilled yet, and the most that it ever was, in units.
#[derive(Clone, Copy, Debug, Default)]
struct Standing {
    now: u128,
    most: u128,
}

#[derive(Clone, Copy, Debug, Default)]
struct Window {
    number: u64,
    tokens: u64,
    most: u64,
}

impl Window {
    fn add(&mut self, number: u64, tokens: u64) {
        let before = if self.number == number { self.tokens } else { 0 };
        (self.number, self.tokens) = (number, before.saturating_add(tokens));
        self.most = self.most.max(self.tokens);
    }
}

/// So many tokens in units.
fn units(tokens: u64, limit: &Limit) -> u128 {
    u128::from(limit.refill().period_ms()).saturating_mul(tokens.into())
}

/// Units as whole tokens, rounded up.
fn tokens(units: u128, limit: &Limit) -> u64 {
    u64::try_from(units.div_ceil(u128::from(limit.refill().period_ms()).max(1))).unwrap_or(MAX_UNITS).min(MAX_UNITS)
}

impl Demand {
    /// Nothing until then.
    pub fn new(now_ms: u64) -> Self {
        Self { at_ms: now_ms, windows: Default::default(), by_limits: Vec::new() }
    }

    /// Adds what a charge asks for. Time does not go back.
    pub fn add(&mut self, now_ms: u64, charge: &Charge) {
        let (cost, ms) = (charge.cost.get(), u128::from(now_ms.saturating_sub(self.at_ms)));
        self.at_ms = now_ms;
        for (window, length_ms) in self.windows.iter_mut().zip(WINDOWS_MS) {
            window.add(now_ms / length_ms, cost);
        }
        if self.of(charge.limits()).is_none() {
            self.begin(charge.shared_limits());
        }
        for (limits, standings) in &mut self.by_limits {
            for (place, (limit, standing)) in limits.iter().zip(standings).enumerate() {
                let came = u128::from(limit.refill().tokens()).saturating_mul(ms);
                // A charge by fewer limits leaves the buckets of the others alone.
                let cost = if place < charge.limits().len() { cost } else { 0 };
                standing.now = standing.now.saturating_sub(came).saturating_add(units(cost, limit));
                standing.most = standing.most.max(standing.now);
            }
        }
    }

    /// Counts by limits that had not charged these buckets so far. What was asked before is what stands by other limits: it
    /// may be a little more or less by these.
    fn begin(&mut self, limits: Rc<[Limit]>) {
        let before = |place: usize| {
            let stand = self
                .by_limits
                .iter()
                .filter_map(|(limits, standings)| Some(tokens(standings.get(place)?.now, limits.get(place)?)));
            stand.max().unwrap_or(0)
        };
        let standings = limits.iter().enumerate();
        let standings =
            standings.map(|(place, limit)| Standing { now: units(before(place), limit), most: 0 }).collect();
        self.by_limits.push((limits, standings));
    }

    fn of(&self, limits: &[Limit]) -> Option<&[Standing]> {
        self.by_limits.iter().find(|(other, _)| **other == *limits).map(|(_, standings)| standings.as_slice())
    }

    /// For each limit: the tokens that have to be there now.
    pub fn now(&self, limits: &[Limit]) -> impl Iterator<Item = u64> {
        let standings = self.of(limits).unwrap_or_default();
        limits.iter().zip(standings).map(|(limit, standing)| tokens(standing.now, limit))
    }

    /// For each limit: the most tokens that ever had to be there.
    pub fn peaks(&self, limits: &[Limit]) -> Vec<u64> {
        let standings = self.of(limits).unwrap_or_default();
        limits.iter().zip(standings).map(|(limit, standing)| tokens(standing.most, limit)).collect()
    }

    /// For each window: the most tokens that were asked for in one.
    pub fn most(&self) -> [u64; WINDOWS_MS.len()] {
        self.windows.map(|window| window.most)
    }

    /// Whether its buckets were charged by several limits.
    pub const fn is_mixed(&self) -> bool {
        self.by_limits.len() > 1
    }
}

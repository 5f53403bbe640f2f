//! Denials that are still true, so that a flood costs Redis nothing.
//!
//! A bucket that admits nothing before a time cannot admit anything sooner, since others only take from it. So a denial
//! answers for its bucket from when the call was made until the wait that it told is over. Two things would end it sooner: a
//! charge that is given back, and an operator who resets the bucket. The first is forgotten here at once where it is this
//! worker's own; for the rest `max_age` bounds how long a denial is believed.
//!
//! Invariant: nobody is admitted here. What is told of a wait is never too short: who waits that long, and is alone, passes.
//!
//! This module does not know where denials come from, nor what becomes of the request.

use std::num::NonZeroUsize;
use std::rc::Rc;
use std::time::{Duration, Instant};

use lru::LruCache;

use crate::quota::{Limit, milliseconds};
use crate::rule::Charge;
use crate::script::{Outcome, Standing};

/// How many denials are remembered, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The most of one worker; those go first that were asked for least lately. 0: none.
    pub entries: usize,
    /// After so long Redis is asked again whatever it said.
    pub max_age: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { entries: 10_000, max_age: Duration::from_secs(1) }
    }
}

/// The denials of one worker, by the first key of each caller under each rule.
#[derive(Debug)]
pub struct DenyCache {
    max_age: Duration,
    denials: LruCache<Rc<str>, Denial>,
}

/// What Redis said of one caller.
#[derive(Debug)]
struct Denial {
    limits: Rc<[Limit]>,
    /// What was asked for.
    cost: u64,
    /// Nothing is admitted before this.
    until: Instant,
    /// When that much will be admitted, at the latest; `None` where it never is.
    admits_at: Option<Instant>,
    standing: Standing,
    /// When the bucket of the standing will be full, at the latest.
    full_at: Instant,
}

impl DenyCache {
    /// No denials. `None` where none are to be remembered.
    pub fn new(settings: Settings) -> Option<Self> {
        let entries = NonZeroUsize::new(settings.entries)?;
        Some(Self { max_age: settings.max_age, denials: LruCache::new(entries) })
    }

    /// What is known of a charge without asking: that it is denied.
    pub fn look_up(&mut self, now: Instant, charge: &Charge) -> Option<Outcome> {
        if self.denials.is_empty() {
            return None;
        }
        let key = charge.first_key();
        let denial = self.denials.get(key)?;
        if denial.until <= now {
            self.denials.pop(key);
            return None;
        }
        denial.outcome(now, charge)
    }

    /// Redis has answered a charge that was asked for so long ago.
    pub fn heard(&mut self, now: Instant, took: Duration, charge: &Charge, outcome: &Outcome) {
        let key = charge.first_key();
        if let Outcome::Granted { .. } = outcome {
            // It has been reset, if more than this was denied a moment ago.
            self.forget(key);
        } else if let Some(denial) = Denial::new(now, took, self.max_age, charge, outcome) {
            self.denials.put(Rc::clone(key), denial);
        }
    }

    /// A bucket holds more than it did: a charge was given back to it.
    pub fn forget(&mut self, key: &str) {
        if !self.denials.is_empty() {
            self.denials.pop(key);
        }
    }
}

impl Denial {
    /// What is worth remembering of an answer. The wait began when the bucket was looked at: not before the call was made,
    /// and not after it was answered.
    fn new(now: Instant, took: Duration, max_age: Duration, charge: &Charge, outcome: &Outcome) -> Option<Self> {
        let (wait, standing) = match outcome {
            Outcome::Denied { retry_after, standing } => (Some(*retry_after), *standing),
            Outcome::Never { standing } => (None, *standing),
            Outcome::Granted { .. } => return None,
        };
        let believed = wait.unwrap_or(max_age).min(max_age);
        let denial = Self {
            limits: charge.shared_limits(),
            cost: charge.cost.get(),
            until: now.checked_sub(took)?.checked_add(believed)?,
            admits_at: match wait {
                Some(wait) => Some(now.checked_add(wait)?),
                None => None,
            },
            standing,
            full_at: now.checked_add(standing.reset_after)?,
        };
        Some(denial).filter(|denial| denial.until > now)
    }

    fn outcome(&self, now: Instant, charge: &Charge) -> Option<Outcome> {
        let cost = charge.cost.get();
        // Less than was denied may fit, and other limits have other waits.
        if cost < self.cost || *charge.limits() != *self.limits {
            return None;
        }
        let reset_after = whole_ms(self.full_at.saturating_duration_since(now));
        let standing = Standing { reset_after, ..self.standing };
        let Some(admits_at) = self.admits_at else {
            return Some(Outcome::Never { standing });
        };
        if self.limits.iter().any(|limit| cost > limit.capacity().get()) {
            // Never; but what is left under that limit is for Redis to say.
            return None;
        }
        let more = cost.saturating_sub(self.cost);
        let extra = self.limits.iter().map(|limit| {
            // How long so many tokens more take, at most.
            limit.refill().time_for(u128::from(more).saturating_mul(limit.refill().period_ms().into()))
        });
        let extra = extra.max().unwrap_or_default();
        let retry_after = whole_ms(admits_at.saturating_duration_since(now).saturating_add(extra));
        Some(Outcome::Denied { retry_after, standing })
    }
}

/// Rounded up to whole milliseconds, as Redis would say it.
fn whole_ms(span: Duration) -> Duration {
    milliseconds(span.as_nanos().div_ceil(1_000_000))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::request::tests::Told;
    use crate::rule::{self, Application};

    /// What a request of that cost takes under these limits.
    fn charge(limits: &str, cost: u64) -> Charge {
        charge_of(b"192.0.2.1:1", limits, cost)
    }

    fn charge_of(address: &[u8], limits: &str, cost: u64) -> Charge {
        let text = format!(r#"{{"rules": [{{"name": "a", "cost": {cost}, "limits": {limits}}}]}}"#);
        let config = Config::from_json(text.as_bytes()).unwrap();
        match rule::apply(&config, &Told::from(address)).pop() {
            Some(Application::Charge(charge)) => charge,
            other => panic!("{other:?}"),
        }
    }

    const TEN: &str = r#"[{"capacity": 10, "refill": "1/s"}]"#;
    const TWO: &str = r#"[{"capacity": 10, "refill": "1/s"}, {"capacity": 100, "refill": "1/min"}]"#;

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    fn denied(wait: u64) -> Outcome {
        Outcome::Denied { retry_after: ms(wait), standing: Standing { limit: 0, remaining: 0, reset_after: ms(9_000) } }
    }

    fn cache(max_age: u64) -> DenyCache {
        DenyCache::new(Settings { entries: 2, max_age: ms(max_age) }).unwrap()
    }

    fn wait(outcome: Option<Outcome>) -> Option<u64> {
        match outcome? {
            Outcome::Denied { retry_after, .. } => Some(retry_after.as_millis() as u64),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_denial_counts_from_when_it_was_asked_for_and_its_wait_from_when_it_was_heard() {
        let (mut cache, now, one) = (cache(5_000), Instant::now(), charge(TEN, 1));
        cache.heard(now, ms(20), &one, &denied(800));
        assert_eq!(wait(cache.look_up(now, &one)), Some(800));
        assert_eq!(wait(cache.look_up(now + ms(300), &one)), Some(500));
        assert_eq!(wait(cache.look_up(now + Duration::from_micros(300_001), &one)), Some(500), "rounded up");
        assert_eq!(wait(cache.look_up(now + ms(779), &one)), Some(21));
        assert_eq!(cache.look_up(now + ms(780), &one), None);
        assert_eq!(cache.look_up(now, &one), None, "it is gone");
    }

    #[test]
    fn the_time_until_the_bucket_is_full_counts_down_too() {
        let (mut cache, now, one) = (cache(5_000), Instant::now(), charge(TEN, 1));
        cache.heard(now, ms(0), &one, &denied(800));
        match cache.look_up(now + ms(500), &one) {
            Some(Outcome::Denied { standing, .. }) => assert_eq!(standing.reset_after, ms(8_500)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn no_denial_is_believed_for_longer_than_its_greatest_age() {
        let (mut cache, now, one) = (cache(1_000), Instant::now(), charge(TEN, 1));
        cache.heard(now, ms(100), &one, &denied(60_000));
        assert_eq!(wait(cache.look_up(now + ms(899), &one)), Some(59_101));
        assert_eq!(cache.look_up(now + ms(900), &one), None);
        // One that was slower than it lasts is not worth remembering.
        cache.heard(now, ms(100), &one, &denied(100));
        assert_eq!(cache.look_up(now, &one), None);
    }

    #[test]
    fn a_denial_says_something_of_what_costs_more_and_nothing_of_what_costs_less() {
        let (mut cache, now) = (cache(5_000), Instant::now());
        cache.heard(now, ms(0), &charge(TEN, 3), &denied(700));
        assert_eq!(cache.look_up(now, &charge(TEN, 2)), None);
        assert_eq!(wait(cache.look_up(now, &charge(TEN, 3))), Some(700));
        assert_eq!(wait(cache.look_up(now, &charge(TEN, 5))), Some(2_700), "two tokens more, one a second");
        assert_eq!(cache.look_up(now, &charge(TEN, 11)), None, "what can never fit is for Redis to say");
        // Of several limits, any may be the one that takes longest then.
        cache.heard(now, ms(0), &charge(TWO, 1), &denied(700));
        assert_eq!(wait(cache.look_up(now, &charge(TWO, 2))), Some(60_700));
    }

    #[test]
    fn what_never_fits_is_remembered_as_that() {
        let (mut cache, now, eleven) = (cache(1_000), Instant::now(), charge(TEN, 11));
        let never = Outcome::Never { standing: Standing { limit: 0, remaining: 7, reset_after: ms(3_000) } };
        cache.heard(now, ms(10), &eleven, &never);
        assert!(matches!(cache.look_up(now + ms(900), &eleven), Some(Outcome::Never { .. })));
        assert!(matches!(cache.look_up(now, &charge(TEN, 12)), Some(Outcome::Never { .. })));
        assert_eq!(cache.look_up(now, &charge(TEN, 10)), None);
        assert_eq!(cache.look_up(now + ms(990), &eleven), None);
    }

    #[test]
    fn other_limits_what_was_given_back_and_what_was_granted_end_it() {
        let (mut cache, now, one) = (cache(1_000), Instant::now(), charge(TEN, 1));
        cache.heard(now, ms(0), &one, &denied(700));
        assert_eq!(cache.look_up(now, &charge(r#"[{"capacity": 20, "refill": "2/s"}]"#, 1)), None);
        assert!(cache.look_up(now, &one).is_some());
        cache.forget(one.first_key());
        assert_eq!(cache.look_up(now, &one), None);
        cache.heard(now, ms(0), &one, &denied(700));
        let standing = Standing { limit: 0, remaining: 9, reset_after: ms(1_000) };
        let granted = Outcome::Granted { granted: std::num::NonZeroU32::MIN, retry_after: None, standing };
        cache.heard(now, ms(0), &one, &granted);
        assert_eq!(cache.look_up(now, &one), None);
    }

    #[test]
    fn the_ones_asked_for_least_lately_are_forgotten_first() {
        let (mut cache, now) = (cache(1_000), Instant::now());
        let callers = [b"192.0.2.1:1", b"192.0.2.2:1", b"192.0.2.3:1"].map(|address| charge_of(address, TEN, 1));
        cache.heard(now, ms(0), &callers[0], &denied(700));
        cache.heard(now, ms(0), &callers[1], &denied(700));
        assert!(cache.look_up(now, &callers[0]).is_some());
        cache.heard(now, ms(0), &callers[2], &denied(700));
        let known = callers.each_ref().map(|caller| cache.look_up(now, caller).is_some());
        assert_eq!(known, [true, false, true]);
        assert!(DenyCache::new(Settings { entries: 0, max_age: ms(1) }).is_none());
    }
}

//! From what the buckets said to what becomes of the request.
//!
//! A request goes on where every rule that applies to it admits it. A rule that denies decides the request whatever the
//! others said; where none denies but one could not be asked, the failure mode decides, here and nowhere else.

use std::cmp::Ordering;
use std::time::Duration;

use crate::exchange::Failure;
use crate::quota::Limit;
use crate::script::{Outcome, Standing};
use crate::stats::RuleOutcome;

/// What happens to a request whose buckets could not be asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FailureMode {
    /// It goes on.
    #[default]
    Allow,
    /// It is refused, with a status that says so (503), which is no denial.
    Deny,
}

impl FailureMode {
    /// What becomes of such requests, for a line in the log.
    pub const fn in_words(self) -> &'static str {
        match self {
            Self::Allow => "requests are allowed",
            Self::Deny => "requests are refused",
        }
    }

    const fn outcome(self) -> RuleOutcome {
        match self {
            Self::Allow => RuleOutcome::FailAllow,
            Self::Deny => RuleOutcome::FailDeny,
        }
    }
}

/// What one rule said of a request.
#[derive(Debug)]
pub struct Answer<'a> {
    /// The rule's place in the configuration.
    pub rule: usize,
    /// The limits of the rule.
    pub limits: &'a [Limit],
    /// Whether the rule only watches: what it says has no effect.
    pub shadow: bool,
    /// What became of the call.
    pub said: &'a Result<Outcome, Failure>,
}

/// The numbers of the limit that binds, for headers and logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// The capacity, in tokens.
    pub capacity: u64,
    /// Whole tokens left.
    pub remaining: u64,
    /// The time until the bucket is full.
    pub reset_after: Duration,
    /// The time in which an empty bucket fills.
    pub window: Duration,
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It goes on.
    Allow(Quota),
    /// It is over its quota.
    Deny {
        /// Of the rule that denied.
        quota: Quota,
        /// How long a caller that is alone has to wait, or `None` where waiting never helps.
        retry_after: Option<Duration>,
    },
    /// It goes on: rules apply to it, and all of them only watch.
    Watched,
    /// It goes on, though it could not be decided.
    FailAllow,
    /// It is refused, since it could not be decided.
    FailDeny,
}

impl Verdict {
    /// Its name in metrics and in the access log.
    pub const fn outcome(&self) -> RuleOutcome {
        match self {
            Self::Allow(_) | Self::Watched => RuleOutcome::Allow,
            Self::Deny { .. } => RuleOutcome::Deny,
            Self::FailAllow => RuleOutcome::FailAllow,
            Self::FailDeny => RuleOutcome::FailDeny,
        }
    }

    /// The numbers to show, where there are any.
    pub const fn quota(&self) -> Option<&Quota> {
        match self {
            Self::Allow(quota) | Self::Deny { quota, .. } => Some(quota),
            Self::Watched | Self::FailAllow | Self::FailDeny => None,
        }
    }

    /// Whether the request goes on.
    pub const fn admits(&self) -> bool {
        matches!(self, Self::Allow(_) | Self::Watched | Self::FailAllow)
    }
}

/// A verdict, and the rule to which it is owed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What becomes of the request.
    pub verdict: Verdict,
    /// The rule that denied, or that could not be asked: the first one in the order of the configuration. Otherwise the
    /// rule with the least left relative to its capacity. A place in the configuration.
    pub rule: usize,
    /// The first rule that only watches and would have denied the request.
    pub would_deny: Option<usize>,
}

impl Decision {
    /// What the access log says: the outcome, and the rule to which it is owed. Where the request goes on although a rule
    /// that only watches would have denied it, that is what is said.
    pub const fn told(&self) -> (RuleOutcome, usize) {
        match self.would_deny {
            Some(rule) if self.verdict.admits() => (RuleOutcome::ShadowDeny, rule),
            _ => (self.verdict.outcome(), self.rule),
        }
    }
}

/// How a rule's part in a request is counted.
pub const fn rule_outcome(answer: &Answer<'_>, mode: FailureMode) -> RuleOutcome {
    match answer.said {
        Ok(Outcome::Granted { .. }) => RuleOutcome::Allow,
        Ok(Outcome::Denied { .. } | Outcome::Never { .. }) if answer.shadow => RuleOutcome::ShadowDeny,
        Ok(Outcome::Denied { .. } | Outcome::Never { .. }) => RuleOutcome::Deny,
        // A rule that only watches lets everything through.
        Err(_) if answer.shadow => FailureMode::Allow.outcome(),
        Err(_) => mode.outcome(),
    }
}

/// Decides a request by the answers of all rules that apply to it, in the order of the configuration. `None` where
/// there are none.
pub fn decide(answers: &[Answer<'_>], mode: FailureMode) -> Option<Decision> {
    let first = answers.first()?;
    let (watching, binding): (Vec<_>, Vec<_>) = answers.iter().partition(|answer| answer.shadow);
    let would_deny = watching.iter().find_map(|answer| denial(answer)).map(|(rule, ..)| rule);
    let (verdict, rule) = verdict(&binding, mode).unwrap_or((Verdict::Watched, first.rule));
    Some(Decision { verdict, rule, would_deny })
}

/// What the rules say that are not only watching. `None` where there are none.
fn verdict(answers: &[&Answer<'_>], mode: FailureMode) -> Option<(Verdict, usize)> {
    let denials = answers.iter().filter_map(|answer| denial(answer)).collect::<Vec<_>>();
    if let Some((first, ..)) = denials.first() {
        let (_, quota, _) = denials.iter().min_by(|a, b| scarcer(&a.1, &b.1).then(b.2.cmp(&a.2)))?;
        return Some((Verdict::Deny { quota: *quota, retry_after: longest_wait(&denials) }, *first));
    }
    if let Some(answer) = answers.iter().find(|answer| answer.said.is_err()) {
        let verdict = match mode {
            FailureMode::Allow => Verdict::FailAllow,
            FailureMode::Deny => Verdict::FailDeny,
        };
        return Some((verdict, answer.rule));
    }
    let standings = answers.iter().filter_map(|answer| match answer.said {
        Ok(Outcome::Granted { standing, .. }) => Some((answer.rule, quota(answer.limits, standing)?)),
        _ => None,
    });
    let (rule, quota) = standings.min_by(|a, b| scarcer(&a.1, &b.1))?;
    Some((Verdict::Allow(quota), rule))
}

/// How long to wait: a denial by several rules lasts as long as the longest of them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Wait {
    For(Duration),
    ForEver,
}

fn denial(answer: &Answer<'_>) -> Option<(usize, Quota, Wait)> {
    let (standing, wait) = match answer.said {
        Ok(Outcome::Denied { standing, retry_after }) => (standing, Wait::For(*retry_after)),
        Ok(Outcome::Never { standing }) => (standing, Wait::ForEver),
        _ => return None,
    };
    Some((answer.rule, quota(answer.limits, standing)?, wait))
}

fn longest_wait(denials: &[(usize, Quota, Wait)]) -> Option<Duration> {
    match denials.iter().map(|(_, _, wait)| *wait).max()? {
        Wait::For(wait) => Some(wait),
        Wait::ForEver => None,
    }
}

fn quota(limits: &[Limit], standing: &Standing) -> Option<Quota> {
    let limit = limits.get(standing.limit)?;
    Some(Quota {
        capacity: limit.capacity().get(),
        remaining: standing.remaining,
        reset_after: standing.reset_after,
        window: limit.window(),
    })
}

/// Compares what is left relative to the capacity, without a division: a/b < c/d where a·d < c·b.
fn scarcer(one: &Quota, other: &Quota) -> Ordering {
    let product = |left: u64, capacity: u64| u128::from(left).saturating_mul(u128::from(capacity));
    product(one.remaining, other.capacity).cmp(&product(other.remaining, one.capacity))
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::quota::{Capacity, Refill};

    fn limits(capacity: u64) -> Vec<Limit> {
        vec![Limit::new(Capacity::new(capacity).unwrap(), Refill::new(1, 1000).unwrap()).unwrap()]
    }

    fn standing(remaining: u64) -> Standing {
        Standing { limit: 0, remaining, reset_after: Duration::from_secs(remaining) }
    }

    fn granted(remaining: u64) -> Result<Outcome, Failure> {
        Ok(Outcome::Granted { granted: NonZeroU32::MIN, retry_after: None, standing: standing(remaining) })
    }

    fn denied(seconds: u64) -> Result<Outcome, Failure> {
        Ok(Outcome::Denied { standing: standing(0), retry_after: Duration::from_secs(seconds) })
    }

    fn never() -> Result<Outcome, Failure> {
        Ok(Outcome::Never { standing: standing(3) })
    }

    /// What becomes of a request whose rules have these capacities and said this.
    fn check(said: &[(u64, Result<Outcome, Failure>)], mode: FailureMode, expected: &str) {
        check_with_shadows(said, &[], mode, expected);
    }

    /// The same, where some rules only watch.
    fn check_with_shadows(
        said: &[(u64, Result<Outcome, Failure>)],
        shadows: &[usize],
        mode: FailureMode,
        expected: &str,
    ) {
        let rules = said.iter().map(|(capacity, said)| (limits(*capacity), said)).collect::<Vec<_>>();
        let answers = rules
            .iter()
            .enumerate()
            .map(|(rule, (limits, said))| Answer { rule, limits, said, shadow: shadows.contains(&rule) })
            .collect::<Vec<_>>();
        let told = decide(&answers, mode).map(|decision| {
            let verdict = match decision.verdict {
                Verdict::Allow(quota) => format!("allow {}/{}", quota.remaining, quota.capacity),
                Verdict::Deny { quota, retry_after: Some(wait) } => {
                    format!("deny {}/{} for {}", quota.remaining, quota.capacity, wait.as_secs())
                }
                Verdict::Deny { quota, retry_after: None } => {
                    format!("deny {}/{} for ever", quota.remaining, quota.capacity)
                }
                Verdict::Watched => "watched".to_owned(),
                Verdict::FailAllow => "fail_allow".to_owned(),
                Verdict::FailDeny => "fail_deny".to_owned(),
            };
            let (outcome, rule) = decision.told();
            let told = if outcome == decision.verdict.outcome() && rule == decision.rule {
                String::new()
            } else {
                format!(", told as {} by {rule}", outcome.name())
            };
            format!("{verdict} by {}{told}", decision.rule)
        });
        assert_eq!(told.as_deref().unwrap_or("nothing"), expected);
    }

    #[test]
    fn every_rule_must_admit_and_the_first_that_denies_is_named() {
        use FailureMode::{Allow, Deny};
        let timeout = || Err(Failure::Timeout);
        check(&[], Allow, "nothing");
        check(&[(10, granted(9))], Allow, "allow 9/10 by 0");
        check(&[(10, denied(2))], Allow, "deny 0/10 for 2 by 0");
        check(&[(10, granted(9)), (100, denied(2))], Allow, "deny 0/100 for 2 by 1");
        check(&[(10, denied(2)), (100, denied(7))], Allow, "deny 0/100 for 7 by 0");
        check(&[(10, denied(2)), (100, never())], Allow, "deny 0/10 for ever by 0");
        check(&[(10, timeout())], Allow, "fail_allow by 0");
        check(&[(10, timeout())], Deny, "fail_deny by 0");
        check(&[(10, granted(1)), (10, timeout())], Allow, "fail_allow by 1");
        check(&[(10, timeout()), (10, denied(3))], Allow, "deny 0/10 for 3 by 1");
        check(&[(10, timeout()), (10, denied(3))], Deny, "deny 0/10 for 3 by 1");
    }

    #[test]
    fn a_rule_that_only_watches_has_no_effect_and_is_told() {
        use FailureMode::{Allow, Deny};
        let timeout = || Err(Failure::Timeout);
        let check = check_with_shadows;
        check(&[(10, granted(9))], &[0], Allow, "watched by 0");
        check(&[(10, denied(2))], &[0], Allow, "watched by 0, told as shadow_deny by 0");
        check(&[(10, timeout())], &[0], Deny, "watched by 0");
        check(&[(10, granted(0)), (10, granted(5))], &[0], Allow, "allow 5/10 by 1");
        check(&[(10, granted(5)), (10, never())], &[1], Allow, "allow 5/10 by 0, told as shadow_deny by 1");
        check(&[(10, denied(9)), (10, denied(3))], &[0], Allow, "deny 0/10 for 3 by 1");
        check(&[(10, timeout()), (10, granted(3))], &[0], Deny, "allow 3/10 by 1");
        check(&[(10, denied(1)), (10, timeout())], &[0], Allow, "fail_allow by 1, told as shadow_deny by 0");
        check(&[(10, denied(1)), (10, timeout())], &[0], Deny, "fail_deny by 1");
    }

    #[test]
    fn the_rule_with_the_least_left_relative_to_its_capacity_is_shown() {
        use FailureMode::Allow;
        check(&[(10, granted(5)), (1000, granted(400))], Allow, "allow 400/1000 by 1");
        check(&[(10, granted(4)), (1000, granted(500))], Allow, "allow 4/10 by 0");
        // Where they are level, the first one.
        check(&[(10, granted(5)), (1000, granted(500))], Allow, "allow 5/10 by 0");
        let most = crate::quota::MAX_UNITS / 1000;
        check(&[(most, granted(most)), (most, granted(most - 1))], Allow, &format!("allow {}/{most} by 1", most - 1));
    }
}

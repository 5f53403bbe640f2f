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
    /// A bucket of this worker's own decides it.
    Local,
}

impl FailureMode {
    /// What becomes of such requests, for a line in the log.
    pub const fn in_words(self) -> &'static str {
        match self {
            Self::Allow => "requests are allowed",
            Self::Deny => "requests are refused",
            Self::Local => "requests are decided by each worker for itself",
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
    /// What becomes of a request that could not be asked about.
    pub mode: FailureMode,
    /// What became of the call.
    pub said: &'a Result<Outcome, Failure>,
    /// What this worker's own bucket said, where it was asked too.
    pub local: Option<Outcome>,
}

/// What a rule makes of a request, once the failure mode has been applied.
enum Part<'a> {
    /// Its bucket has decided: this worker's own where the last field says so.
    Bucket(&'a Outcome, bool),
    /// It lets the request go on undecided.
    FailAllow,
    /// It refuses the request undecided.
    FailDeny,
}

impl Answer<'_> {
    /// The one place where the failure mode is applied.
    fn part(&self) -> Part<'_> {
        match (self.said, &self.local, self.mode) {
            // What Redis grants has to fit in here as well, where this worker was asked at all.
            (Ok(Outcome::Granted { .. }), Some(local @ (Outcome::Denied { .. } | Outcome::Never { .. })), _) => {
                Part::Bucket(local, true)
            }
            (Ok(outcome), ..) => Part::Bucket(outcome, false),
            (Err(_), Some(local), _) => Part::Bucket(local, true),
            // A rule that only watches lets everything through.
            (Err(_), None, FailureMode::Deny) if !self.shadow => Part::FailDeny,
            (Err(_), None, _) => Part::FailAllow,
        }
    }
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
    /// It goes on by the word of this worker's own buckets.
    LocalAllow,
    /// It is over its quota by this worker's own buckets.
    LocalDeny {
        /// Of the rule that denied.
        quota: Quota,
        /// How long a caller that is alone has to wait, or `None` where waiting never helps.
        retry_after: Option<Duration>,
    },
}

impl Verdict {
    /// Its name in metrics and in the access log.
    pub const fn outcome(&self) -> RuleOutcome {
        match self {
            Self::Allow(_) | Self::Watched => RuleOutcome::Allow,
            Self::Deny { .. } => RuleOutcome::Deny,
            Self::FailAllow => RuleOutcome::FailAllow,
            Self::FailDeny => RuleOutcome::FailDeny,
            Self::LocalAllow => RuleOutcome::LocalAllow,
            Self::LocalDeny { .. } => RuleOutcome::LocalDeny,
        }
    }

    /// The numbers to show, where there are any.
    pub const fn quota(&self) -> Option<&Quota> {
        match self {
            Self::Allow(quota) | Self::Deny { quota, .. } | Self::LocalDeny { quota, .. } => Some(quota),
            Self::Watched | Self::FailAllow | Self::FailDeny | Self::LocalAllow => None,
        }
    }

    /// Whether the request goes on.
    pub const fn admits(&self) -> bool {
        matches!(self, Self::Allow(_) | Self::Watched | Self::FailAllow | Self::LocalAllow)
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
pub fn rule_outcome(answer: &Answer<'_>) -> RuleOutcome {
    match answer.part() {
        Part::Bucket(Outcome::Granted { .. }, false) => RuleOutcome::Allow,
        Part::Bucket(Outcome::Granted { .. }, true) => RuleOutcome::LocalAllow,
        Part::Bucket(..) if answer.shadow => RuleOutcome::ShadowDeny,
        Part::Bucket(_, false) => RuleOutcome::Deny,
        Part::Bucket(_, true) => RuleOutcome::LocalDeny,
        Part::FailAllow => RuleOutcome::FailAllow,
        Part::FailDeny => RuleOutcome::FailDeny,
    }
}

/// Decides a request by the answers of all rules that apply to it, in the order of the configuration. `None` where
/// there are none.
pub fn decide(answers: &[Answer<'_>]) -> Option<Decision> {
    let first = answers.first()?;
    let would_deny = answers.iter().filter(|answer| answer.shadow).find_map(denial).map(|denial| denial.rule);
    let binding = answers.iter().filter(|answer| !answer.shadow);
    let (verdict, rule) = verdict(binding).unwrap_or((Verdict::Watched, first.rule));
    Some(Decision { verdict, rule, would_deny })
}

/// What the rules say that are not only watching. `None` where there are none.
fn verdict<'a>(answers: impl Iterator<Item = &'a Answer<'a>> + Clone) -> Option<(Verdict, usize)> {
    let denials = answers.clone().filter_map(denial).collect::<Vec<_>>();
    if let Some(first) = denials.first() {
        let shown = denials.iter().min_by(|a, b| scarcer(&a.quota, &b.quota).then(b.wait.cmp(&a.wait)))?;
        let (quota, retry_after) = (shown.quota, longest_wait(&denials));
        let verdict =
            if first.local { Verdict::LocalDeny { quota, retry_after } } else { Verdict::Deny { quota, retry_after } };
        return Some((verdict, first.rule));
    }
    let find = |is_so: fn(&Part<'_>) -> bool| answers.clone().find(|answer| is_so(&answer.part()));
    if let Some(answer) = find(|part| matches!(part, Part::FailDeny)) {
        return Some((Verdict::FailDeny, answer.rule));
    }
    if let Some(answer) = find(|part| matches!(part, Part::FailAllow)) {
        return Some((Verdict::FailAllow, answer.rule));
    }
    if let Some(answer) = find(|part| matches!(part, Part::Bucket(_, true))) {
        return Some((Verdict::LocalAllow, answer.rule));
    }
    let standings = answers.filter_map(|answer| match answer.said {
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

/// That a rule denies a request.
struct Denial {
    rule: usize,
    quota: Quota,
    wait: Wait,
    local: bool,
}

fn denial(answer: &Answer<'_>) -> Option<Denial> {
    let Part::Bucket(outcome, local) = answer.part() else { return None };
    let (standing, wait) = match outcome {
        Outcome::Denied { standing, retry_after } => (standing, Wait::For(*retry_after)),
        Outcome::Never { standing } => (standing, Wait::ForEver),
        Outcome::Granted { .. } => return None,
    };
    Some(Denial { rule: answer.rule, quota: quota(answer.limits, standing)?, wait, local })
}

fn longest_wait(denials: &[Denial]) -> Option<Duration> {
    match denials.iter().map(|denial| denial.wait).max()? {
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
            .map(|(rule, (limits, said))| Answer {
                rule,
                limits,
                said,
                mode,
                local: None,
                shadow: shadows.contains(&rule),
            })
            .collect::<Vec<_>>();
        assert_eq!(told(&answers).as_deref().unwrap_or("nothing"), expected);
    }

    fn told(answers: &[Answer<'_>]) -> Option<String> {
        decide(answers).map(|decision| {
            let verdict = match decision.verdict {
                Verdict::Allow(quota) => format!("allow {}/{}", quota.remaining, quota.capacity),
                Verdict::Deny { quota, retry_after: Some(wait) } => {
                    format!("deny {}/{} for {}", quota.remaining, quota.capacity, wait.as_secs())
                }
                Verdict::LocalAllow => "local_allow".to_owned(),
                Verdict::LocalDeny { quota, .. } => format!("local_deny {}/{}", quota.remaining, quota.capacity),
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
        })
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

    #[test]
    fn a_bucket_of_the_worker_decides_where_redis_did_not_and_has_a_say_where_it_did() {
        let (limits, failed) = (limits(10), Err(Failure::Timeout));
        let (yes, no) = (granted(4), denied(2));
        let answer = |rule, said, mode, local: Option<&Result<Outcome, Failure>>| {
            let local = local.and_then(|outcome| outcome.clone().ok());
            Answer { rule, limits: &limits, shadow: false, mode, said, local }
        };
        let (local, allow, deny) = (FailureMode::Local, FailureMode::Allow, FailureMode::Deny);
        let check = |answers: &[Answer<'_>], expected: &str| assert_eq!(told(answers).as_deref(), Some(expected));
        check(&[answer(0, &failed, local, Some(&yes))], "local_allow by 0");
        check(&[answer(0, &failed, local, Some(&no))], "local_deny 0/10 by 0");
        check(&[answer(0, &yes, local, Some(&yes))], "allow 4/10 by 0");
        check(&[answer(0, &yes, local, Some(&no))], "local_deny 0/10 by 0");
        check(&[answer(0, &no, local, Some(&yes))], "deny 0/10 for 2 by 0");
        // Each rule has its own mode: a refusal weighs most, then what nobody decided.
        check(&[answer(0, &failed, allow, None), answer(1, &failed, deny, None)], "fail_deny by 1");
        check(&[answer(0, &failed, local, Some(&yes)), answer(1, &failed, allow, None)], "fail_allow by 1");
        check(&[answer(0, &failed, deny, None), answer(1, &failed, local, Some(&no))], "local_deny 0/10 by 1");
        check(&[answer(0, &yes, local, None), answer(1, &failed, local, Some(&yes))], "local_allow by 1");
    }
}

//! Which rules a request meets, and the charges that they make.
//!
//! A rule is for the requests that its `match` describes, less those of its `unless`; that is decided before anything is
//! looked up that only an identity needs.

use std::net::IpAddr;
use std::rc::Rc;

use crate::condition::Conditions;
use crate::config::Config;
use crate::decision::FailureMode;
use crate::identity::Identity;
use crate::key::{Keys, Namespace};
use crate::overrides::{Allowance, Overrides};
use crate::quota::{Cost, Limit, MAX_UNITS};
use crate::request::{Facts, Request};
use crate::response::Style;

/// What a rule is called in metrics, logs and keys: 1 to 64 of the characters a-z 0-9 _ -.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RuleName(Rc<str>);

impl RuleName {
    /// What a name is, for faults.
    pub const EXPECTED: &str = "a name of 1 to 64 of the characters a-z 0-9 _ -";

    /// A name, or `None` where the text is not one.
    pub fn new(text: &str) -> Option<Self> {
        let fits = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-');
        ((1..=64).contains(&text.len()) && text.bytes().all(fits)).then(|| Self(Rc::from(text)))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A rule: whom it tells apart, and what each of them may take.
#[derive(Clone, Debug)]
pub struct Rule {
    name: RuleName,
    namespace: Namespace,
    limits: Rc<[Limit]>,
    policy: Policy,
}

/// What a rule can be told beside its name, its keys and its limits.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    /// Which requests it is for.
    pub scope: Scope,
    /// Who a request counts as.
    pub identity: Identity,
    /// Who may take more, or less.
    pub overrides: Overrides,
    /// What a request costs.
    pub price: Price,
    /// Whether it only watches: it counts, and never denies.
    pub shadow: bool,
    /// What becomes of a request while Redis cannot be asked.
    pub failure_mode: FailureMode,
    /// What clients are told.
    pub response: Style,
}

/// What a request costs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Price {
    /// Always this.
    Fixed(Cost),
    /// What a header says.
    Header {
        /// The header's name in lower case.
        name: String,
        /// What a request costs whose header is absent or says no whole number above zero.
        default: Cost,
        /// What it costs at most.
        max: Cost,
    },
}

impl Default for Price {
    fn default() -> Self {
        Self::Fixed(Cost::ONE)
    }
}

impl Price {
    fn of(&self, request: &Request<'_>) -> Cost {
        match self {
            Self::Fixed(cost) => *cost,
            Self::Header { name, default, max } => {
                request.header(name).and_then(|value| cost(&value)).map_or(*default, |cost| cost.min(*max))
            }
        }
    }
}

/// A whole number above zero, in decimal digits; one that is too large to be counted is the largest cost there is.
fn cost(value: &[u8]) -> Option<Cost> {
    let digits = std::str::from_utf8(value.trim_ascii()).ok()?;
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let tokens = digits.parse::<u64>().unwrap_or(MAX_UNITS).min(MAX_UNITS);
    Cost::new(tokens)
}

/// Which requests a rule is for.
#[derive(Clone, Debug, Default)]
pub struct Scope {
    /// Those for which one of these holds; all where there are none.
    pub matches: Vec<Conditions>,
    /// Less those for which one of these holds.
    pub unless: Vec<Conditions>,
}

impl Scope {
    fn includes(&self, request: &Request<'_>) -> bool {
        let holds = |conditions: &[Conditions]| conditions.iter().any(|conditions| conditions.hold(request));
        (self.matches.is_empty() || holds(&self.matches)) && !holds(&self.unless)
    }

    /// Whether it is for no request at all: whatever it matches it leaves out. `false` where that cannot be told.
    pub fn is_empty(&self) -> bool {
        !self.matches.is_empty() && each_implies_one(&self.matches, &self.unless)
    }

    /// Whether every request of the other is one of this. `false` where that cannot be told.
    pub fn covers(&self, other: &Self) -> bool {
        let matches =
            self.matches.is_empty() || (!other.matches.is_empty() && each_implies_one(&other.matches, &self.matches));
        matches && each_implies_one(&self.unless, &other.unless)
    }
}

fn each_implies_one(these: &[Conditions], those: &[Conditions]) -> bool {
    these.iter().all(|this| those.iter().any(|that| this.imply(that)))
}

impl Rule {
    /// The most limits that a rule may have. Each is a key more in the same call.
    pub const MOST_LIMITS: usize = 8;

    /// A rule with these limits, of which there should be at least one.
    pub const fn new(name: RuleName, namespace: Namespace, limits: Rc<[Limit]>, policy: Policy) -> Self {
        Self { name, namespace, limits, policy }
    }

    /// Its name.
    pub const fn name(&self) -> &RuleName {
        &self.name
    }

    /// Its limits.
    pub fn limits(&self) -> &[Limit] {
        &self.limits
    }

    /// The space of its keys.
    pub const fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// What else it was told.
    pub const fn policy(&self) -> &Policy {
        &self.policy
    }

    /// What clients are told that it admits or denies.
    pub const fn response(&self) -> &Style {
        &self.policy.response
    }
}

/// What one rule takes for one request.
#[derive(Clone, Debug)]
pub struct Charge {
    /// The rule's place in the configuration.
    pub rule: usize,
    /// Tokens from each of its buckets.
    pub cost: Cost,
    /// Whether the rule only watches.
    pub shadow: bool,
    /// What becomes of the request while Redis cannot be asked.
    pub failure_mode: FailureMode,
    keys: Keys,
    limits: Rc<[Limit]>,
}

impl Charge {
    /// The keys of the buckets, each with its limit.
    pub fn buckets(&self) -> impl Iterator<Item = (&str, Limit)> + Clone {
        self.keys.iter().zip(self.limits.iter().copied())
    }

    /// The key that stands for all of them: they differ in the limit's number alone.
    pub const fn first_key(&self) -> &Rc<str> {
        self.keys.first()
    }

    /// Whether both ask the same, so that one call can ask for both. They are of the same first key.
    pub fn asks_like(&self, other: &Self) -> bool {
        self.cost == other.cost && *self.limits == *other.limits
    }

    /// The limits, in the order of the buckets.
    pub fn limits(&self) -> &[Limit] {
        &self.limits
    }

    /// The same, to keep.
    pub fn shared_limits(&self) -> Rc<[Limit]> {
        Rc::clone(&self.limits)
    }
}

/// What becomes of a rule that a request meets.
#[derive(Clone, Debug)]
pub enum Application {
    /// It takes this.
    Charge(Charge),
    /// It takes nothing, since the request has no identity for it.
    Skipped {
        /// The rule's place in the configuration.
        rule: usize,
    },
}

impl Application {
    /// The rule's place in the configuration.
    pub const fn rule(&self) -> usize {
        match self {
            Self::Charge(charge) => charge.rule,
            Self::Skipped { rule } => *rule,
        }
    }
}

/// The rules that a request meets, in the order of the configuration.
pub fn apply(config: &Config, facts: &dyn Facts) -> Vec<Application> {
    let request = Request::new(facts, &config.client_ip);
    let rules = config.rules.iter().enumerate();
    rules.filter_map(|(place, rule)| rule.apply(place, config, &request)).collect()
}

impl Rule {
    /// What becomes of this rule for a request; nothing where the rule is not for it.
    fn apply(&self, place: usize, config: &Config, request: &Request<'_>) -> Option<Application> {
        let Policy { scope, identity, overrides: _, price, shadow, failure_mode, response: _ } = &self.policy;
        if !scope.includes(request) {
            return None;
        }
        let Some(identity) = identity.of(request, &config.client_ip) else {
            return Some(Application::Skipped { rule: place });
        };
        let (keys, limits) = self.buckets_of(config, &identity, || request.address())?;
        Some(Application::Charge(Charge {
            rule: place,
            cost: price.of(request),
            shadow: *shadow,
            failure_mode: *failure_mode,
            keys,
            limits,
        }))
    }

    /// The keys of somebody's buckets, and their limits. The address is asked for where networks have limits of their own.
    /// `None` for whom the rule is not.
    pub fn buckets_of(
        &self,
        config: &Config,
        identity: &str,
        address: impl FnOnce() -> Option<IpAddr>,
    ) -> Option<(Keys, Rc<[Limit]>)> {
        let limits = match self.policy.overrides.find(identity, address) {
            None => &self.limits,
            Some(Allowance::Limits(limits)) => limits,
            Some(Allowance::Unlimited) => return None,
        };
        let keys = Keys::new(&config.key_prefix, &self.namespace, identity, limits.len());
        Some((keys, Rc::clone(limits)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::tests::Told;

    /// The rules that a request meets, by their names.
    fn met(rules: &str, told: &Told) -> Vec<String> {
        let config = Config::from_json(format!(r#"{{"rules": {rules}}}"#).as_bytes()).unwrap();
        let name = |rule: usize| config.rules[rule].name().as_str().to_owned();
        apply(&config, told)
            .into_iter()
            .map(|application| match application {
                Application::Charge(charge) => name(charge.rule),
                Application::Skipped { rule } => format!("{} skipped", name(rule)),
            })
            .collect()
    }

    #[test]
    fn a_rule_is_for_what_it_matches_unless_it_is_not() {
        let rules = r#"[
            {"name": "all", "limits": [{"refill": "1/s"}]},
            {"name": "api", "limits": [{"refill": "1/s"}], "match": {"path_prefix": "/api"}},
            {"name": "writes", "limits": [{"refill": "1/s"}],
             "match": [{"methods": ["POST"]}, {"methods": ["PUT"], "path_prefix": "/api"}],
             "unless": [{"path": "/api/health"}, {"client_ip": ["192.0.2.0/24"], "hosts": ["internal"]}]}
        ]"#;
        let cases: &[(&str, &str, &str, &[&str])] = &[
            ("GET", "/", "a", &["all"]),
            ("GET", "//api/x?y", "a", &["all", "api"]),
            ("POST", "/", "a", &["all", "writes"]),
            ("PUT", "/", "a", &["all"]),
            ("PUT", "/api/x", "a", &["all", "api", "writes"]),
            ("PUT", "/api/./health", "a", &["all", "api"]),
            ("PUT", "/api/x", "internal:80", &["all", "api"]),
        ];
        for (method, path, host, expected) in cases {
            let told = Told::new(&[(":method", method), (":path", path), (":authority", host)]);
            assert_eq!(met(rules, &told), *expected, "{method} {path} {host}");
        }
    }

    #[test]
    fn an_override_gives_its_callers_other_limits_or_none() {
        let config = Config::from_json(
            br#"{"rules": [{"name": "a", "key": [{"header": "x-plan"}], "limits": [{"refill": "1/s"}], "overrides": [
                {"values": ["gold"], "limits": [{"refill": "5/s"}, {"refill": "100/h"}]},
                {"cidrs": ["198.51.100.0/24"], "unlimited": true}
            ]}]}"#,
        )
        .unwrap();
        let charged = |plan: &'static str, address: &[u8]| {
            let mut told = Told::from(address);
            told.headers.push(("x-plan", plan.as_bytes().to_vec()));
            match apply(&config, &told).as_slice() {
                [Application::Charge(charge)] => {
                    let buckets = charge.buckets().map(|(key, limit)| format!("{} {key}", limit.capacity().get()));
                    buckets.collect::<Vec<_>>()
                }
                [] => Vec::new(),
                other => panic!("{other:?}"),
            }
        };
        let gold = charged("gold", b"198.51.100.7:1");
        assert_eq!(gold.len(), 2);
        assert!(gold[0].starts_with("5 quota:{a:#") && gold[1].ends_with("}:1"), "{gold:?}");
        assert_eq!(charged("silver", b"198.51.100.7:1"), [""; 0]);
        let silver = charged("silver", b"192.0.2.1:1");
        assert!(silver.len() == 1 && silver[0].starts_with("1 "), "{silver:?}");
    }

    #[test]
    fn a_header_says_what_a_request_costs_within_bounds() {
        let config = Config::from_json(
            br#"{"rules": [{"name": "a", "limits": [{"refill": "1/s"}],
                            "cost": {"header": "X-Cost", "default": 2, "max": 50}}]}"#,
        )
        .unwrap();
        let cases: &[(&[&str], u64)] = &[
            (&[], 2),
            (&[""], 2),
            (&["7"], 7),
            (&[" 7\t"], 7),
            (&["007"], 7),
            (&["50"], 50),
            (&["51"], 50),
            (&["99999999999999999999999"], 50),
            (&["0"], 2),
            (&["-7"], 2),
            (&["+7"], 2),
            (&["7.0"], 2),
            (&["1e1"], 2),
            (&["seven"], 2),
            (&["7", "8"], 2),
        ];
        for (lines, expected) in cases {
            let headers = lines.iter().map(|line| ("x-cost", *line)).collect::<Vec<_>>();
            match apply(&config, &Told::new(&headers)).as_slice() {
                [Application::Charge(charge)] => assert_eq!(charge.cost.get(), *expected, "{lines:?}"),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn what_exempts_a_request_is_asked_before_who_it_is() {
        let rules = r#"[{"name": "a", "limits": [{"refill": "1/s"}], "unless": {"path": "/healthz"}}]"#;
        let told = Told::new(&[(":path", "/healthz")]);
        assert_eq!(met(rules, &told), [""; 0]);
        assert_eq!(*told.asked.borrow(), [":path"]);
    }

    #[test]
    fn a_request_without_an_address_is_skipped_where_it_is_met() {
        let rules = r#"[{"name": "a", "limits": [{"refill": "1/s"}], "match": {"path": "/a"}}]"#;
        let mut told = Told::from(b"/var/run/socket");
        assert_eq!(met(rules, &told), [""; 0]);
        told.headers.push((":path", b"/a".to_vec()));
        assert_eq!(met(rules, &told), ["a skipped"]);
    }
}

//! Which rules a request meets, and the charges that they make.
//!
//! So far every rule applies to every request, and tells callers apart by the client's address.

use std::rc::Rc;

use crate::config::Config;
use crate::key::{Keys, Namespace};
use crate::quota::{Cost, Limit};

/// What the shell knows of a request.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// The proxy's `source.address`.
    pub source_address: &'a [u8],
    /// x-forwarded-for, its lines joined by commas; only where the configuration needs it.
    pub forwarded_for: Option<&'a [u8]>,
}

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
}

impl Rule {
    /// The most limits that a rule may have. Each is a key more in the same call.
    pub const MOST_LIMITS: usize = 8;

    /// A rule with these limits, of which there should be at least one.
    pub const fn new(name: RuleName, namespace: Namespace, limits: Rc<[Limit]>) -> Self {
        Self { name, namespace, limits }
    }

    /// Its name.
    pub const fn name(&self) -> &RuleName {
        &self.name
    }

    /// Its limits.
    pub fn limits(&self) -> &[Limit] {
        &self.limits
    }
}

/// What one rule takes for one request.
#[derive(Clone, Debug)]
pub struct Charge {
    /// The rule's place in the configuration.
    pub rule: usize,
    /// Tokens from each of its buckets.
    pub cost: Cost,
    keys: Keys,
    limits: Rc<[Limit]>,
}

impl Charge {
    /// The keys of the buckets, each with its limit.
    pub fn buckets(&self) -> impl Iterator<Item = (&str, Limit)> {
        self.keys.iter().zip(self.limits.iter().copied())
    }

    /// The limits, in the order of the buckets.
    pub fn limits(&self) -> &[Limit] {
        &self.limits
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

/// The rules that a request meets, in the order of the configuration.
pub fn apply(config: &Config, facts: &Facts<'_>) -> impl Iterator<Item = Application> {
    let client = config.client_ip.client(facts.source_address, facts.forwarded_for);
    config.rules.iter().enumerate().map(move |(place, rule)| {
        let Some(client) = client else { return Application::Skipped { rule: place } };
        Application::Charge(Charge {
            rule: place,
            cost: Cost::ONE,
            keys: Keys::new(&config.key_prefix, &rule.namespace, client, rule.limits.len()),
            limits: Rc::clone(&rule.limits),
        })
    })
}

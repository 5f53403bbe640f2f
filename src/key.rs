//! Identities as keys of Redis: `<prefix>{<namespace>:<identity>}:<limit>`.
//!
//! The braces are Redis Cluster's hash tag: what is inside decides the slot, so that all the limits of one identity are
//! in one slot and can be charged together.
//!
//! Invariant: different identities have different keys, and different namespaces too. A key is printable and bounded:
//! prefix, namespace and identity are, and none of them can hold what ends it.

use std::rc::Rc;

use crate::rule::RuleName;

/// The first bytes of every key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPrefix(String);

impl KeyPrefix {
    /// What a prefix is, for faults.
    pub const EXPECTED: &str = "a text of at most 64 printable ASCII characters without spaces and braces";

    /// A prefix, or `None` where the text is not one. A brace in it would move the hash tag.
    pub fn new(text: &str) -> Option<Self> {
        let fits = |byte: u8| byte.is_ascii_graphic() && byte != b'{' && byte != b'}';
        (text.len() <= 64 && text.bytes().all(fits)).then(|| Self(text.to_owned()))
    }

    /// The prefix.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for KeyPrefix {
    fn default() -> Self {
        Self("quota:".to_owned())
    }
}

/// The space of keys of a rule. Rules that name the same one share their buckets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace(String);

impl Namespace {
    /// What a namespace is, for faults.
    pub const EXPECTED: &str = "a text of at most 64 of the characters a-z 0-9 _ -, or an empty one";

    /// A namespace, or `None` where the text is not one.
    pub fn new(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(Self(String::new()));
        }
        RuleName::new(text).as_ref().map(Self::of_rule)
    }

    /// The namespace of a rule that names none.
    pub fn of_rule(name: &RuleName) -> Self {
        Self(name.as_str().to_owned())
    }

    /// Whether it is the empty one, whose keys are only prefix and identity, as application-side limiters write them.
    pub fn is_bare(&self) -> bool {
        self.0.is_empty()
    }
}

/// The keys of one identity under one rule, by the number of the limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    first: Rc<str>,
    /// Those of further limits.
    others: Vec<String>,
}

impl Keys {
    /// The keys of an identity, for so many limits.
    pub fn new(prefix: &KeyPrefix, namespace: &Namespace, identity: &str, limits: usize) -> Self {
        if namespace.is_bare() {
            return Self { first: [&prefix.0, identity].concat().into(), others: Vec::new() };
        }
        let mut key = [&prefix.0, "{", &namespace.0, ":", identity, "}:0"].concat();
        let first = Rc::from(key.as_str());
        key.pop();
        let others = (1..limits).map(|limit| format!("{key}{limit}")).collect();
        Self { first, others }
    }

    /// The first of them, which stands for all: they differ in the limit's number alone.
    pub const fn first(&self) -> &Rc<str> {
        &self.first
    }

    /// The keys, in the order of the limits.
    pub fn iter(&self) -> impl Iterator<Item = &str> + Clone {
        std::iter::once(&*self.first).chain(self.others.iter().map(String::as_str))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client_ip::ClientIp;

    fn keys(namespace: &str, source: &str, limits: usize) -> Vec<String> {
        let client_ip = ClientIp::default();
        let address = client_ip.address(|| source.as_bytes().to_vec(), None).unwrap();
        let client = client_ip.identity(address).unwrap().to_string();
        let keys = Keys::new(&KeyPrefix::default(), &Namespace::new(namespace).unwrap(), &client, limits);
        keys.iter().map(str::to_owned).collect()
    }

    #[test]
    fn a_key_is_prefix_tag_and_number() {
        assert_eq!(keys("per-ip", "192.0.2.1:9", 1), ["quota:{per-ip:192.0.2.1}:0"]);
        assert_eq!(keys("a", "192.0.2.1:9", 2), ["quota:{a:192.0.2.1}:0", "quota:{a:192.0.2.1}:1"]);
        assert_eq!(keys("a", "[2001:db8:1:2::9]:9", 1), ["quota:{a:2001:db8:1:2::/64}:0"]);
        assert_eq!(keys("a", "[::ffff:1.2.3.4]:9", 1), ["quota:{a:1.2.3.4}:0"]);
    }

    #[test]
    fn the_empty_namespace_is_the_layout_of_application_side_limiters() {
        assert_eq!(keys("", "192.0.2.1:9", 1), ["quota:192.0.2.1"]);
    }

    #[test]
    fn a_prefix_or_a_namespace_that_would_break_the_tag_is_none() {
        for text in ["{", "a}b", "a b", "a\n", "é", &"x".repeat(65)] {
            assert_eq!(KeyPrefix::new(text), None, "{text}");
        }
        assert!(KeyPrefix::new("").is_some() && KeyPrefix::new("prod/quota:").is_some());
        for text in ["{", "a:b", "A", "a b", &"x".repeat(65)] {
            assert_eq!(Namespace::new(text), None, "{text}");
        }
    }
}

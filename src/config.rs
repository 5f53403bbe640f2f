//! The configuration: JSON in, and out comes a value that cannot be wrong, or every fault of the document.
//!
//! A field that is not there has the default of the documentation. A field that is unknown, of the wrong type or out of
//! range is a fault, and a document with a fault is refused as a whole: the proxy keeps what it had.

mod duration;
mod identity;
mod overrides;
mod reader;
mod redis;
mod response;
mod scope;

use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;

use self::duration::{in_words, rate};
use self::reader::{Fault, Faults, Node, Object, Value};
pub use self::redis::{Credentials, Redis};
use crate::client_ip::{ClientIp, Prefixes, Trust};
use crate::decision::FailureMode;
use crate::identity::Identity;
use crate::key::{KeyPrefix, Namespace};
use crate::quota::{Capacity, Cost, Limit, MAX_UNITS};
use crate::response::{Reply, Style};
use crate::rule::{Policy, Price, Rule, RuleName};

/// Everything that the filter can be told.
#[derive(Debug)]
pub struct Config {
    /// How Redis is reached.
    pub redis: Redis,
    /// The first bytes of every key.
    pub key_prefix: KeyPrefix,
    /// Whose time counts.
    pub clock: Clock,
    /// What happens to requests while Redis cannot be asked.
    pub failure_mode: FailureMode,
    /// Whose address is the client's.
    pub client_ip: ClientIp,
    /// What clients are told, where a rule says nothing else.
    pub response: Style,
    /// What a request is told that is refused because it could not be decided.
    pub failure_response: Reply,
    /// The rules, at least one, of different names.
    pub rules: Vec<Rule>,
}

/// Whose time counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Clock {
    /// The server's.
    #[default]
    Redis,
    /// The proxy's.
    Proxy,
}

/// Every fault of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Errors(Vec<Fault>);

impl Errors {
    fn one(what: String) -> Self {
        Self(vec![Fault { path: String::new(), what }])
    }
}

/// A line a fault.
impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, fault) in self.0.iter().enumerate() {
            if place > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{fault}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Errors {}

const NOTHING: &str = "no configuration; it needs at least one rule, such as \
    {\"rules\": [{\"name\": \"per-ip\", \"limits\": [{\"capacity\": 100, \"refill\": \"10/s\"}]}]}";
const A_STRUCT: &str = "the configuration is binary, not JSON: Envoy passes a google.protobuf.Struct as protobuf; \
    write the JSON into a google.protobuf.StringValue";

impl Config {
    /// Reads a configuration.
    ///
    /// # Errors
    /// Every fault of the document, each with its path, what was found and what is expected.
    pub fn from_json(bytes: &[u8]) -> Result<Self, Errors> {
        if bytes.trim_ascii().is_empty() {
            return Err(Errors::one(NOTHING.to_owned()));
        }
        // A Struct begins with the tag of its first field; as JSON that byte would be a line feed, followed by a
        // document, and not by the length of a map's entry.
        if bytes.first() == Some(&b'\n') && bytes.iter().any(|byte| *byte < b' ' && !byte.is_ascii_whitespace()) {
            return Err(Errors::one(A_STRUCT.to_owned()));
        }
        let document: Value = serde_json::from_slice(bytes)
            .map_err(|error| Errors::one(format!("the configuration is not JSON: {error}")))?;
        let faults = Faults::default();
        let config = read(Node::root(&document, &faults));
        let faults = faults.into_vec();
        match config {
            Some(config) if faults.is_empty() => Ok(config),
            _ => Err(Errors(faults)),
        }
    }
}

fn read(document: Node<'_>) -> Option<Config> {
    let object = document.object(&[
        "redis",
        "key_prefix",
        "clock",
        "failure_mode",
        "client_ip",
        "response",
        "failure_response",
        "rules",
    ])?;
    let redis = object.get("redis").map_or_else(|| Some(Redis::default()), redis::read);
    let key_prefix = or_default(object.get("key_prefix"), |node| node.parsed(KeyPrefix::EXPECTED, KeyPrefix::new));
    let clock = or_default(object.get("clock"), |node| {
        node.parsed("\"redis\" or \"proxy\"", |text| match text {
            "redis" => Some(Clock::Redis),
            "proxy" => Some(Clock::Proxy),
            _ => None,
        })
    });
    let failure_mode = or_default(object.get("failure_mode"), |node| {
        node.parsed("\"allow\" or \"deny\"", |text| match text {
            "allow" => Some(FailureMode::Allow),
            "deny" => Some(FailureMode::Deny),
            _ => None,
        })
    });
    let client_ip = or_default(object.get("client_ip"), read_client_ip);
    let style = or_default(object.get("response"), |node| response::read(node, &Style::default()));
    let failure_response =
        object.get("failure_response").map_or_else(|| Some(Reply::unavailable()), response::read_unavailable);
    let common =
        Common { client_ip: client_ip.clone().unwrap_or_default(), response: style.clone().unwrap_or_default() };
    let rules = read_rules(&object, &common);
    Some(Config {
        redis: redis?,
        key_prefix: key_prefix?,
        clock: clock?,
        failure_mode: failure_mode?,
        client_ip: client_ip?,
        response: style?,
        failure_response: failure_response?,
        rules: rules?,
    })
}

/// What rules take from the document around them.
struct Common {
    client_ip: ClientIp,
    response: Style,
}

/// The default where a field is not there, and what it says where it is.
fn or_default<T: Default>(node: Option<Node<'_>>, read: impl FnOnce(Node<'_>) -> Option<T>) -> Option<T> {
    node.map_or_else(|| Some(T::default()), read)
}

fn read_client_ip(node: Node<'_>) -> Option<ClientIp> {
    let object = node.object(&["trusted_hops", "trusted_proxies", "ipv4_prefix", "ipv6_prefix"])?;
    let prefix = |name, longest: u8, default: u8| {
        object
            .get(name)
            .map_or(Some(default), |node| node.integer(1..=longest.into()).and_then(|length| u8::try_from(length).ok()))
    };
    let (ipv4, ipv6) = (prefix("ipv4_prefix", 32, 32), prefix("ipv6_prefix", 128, 64));
    let hops = object
        .get("trusted_hops")
        .map(|node| node.integer(1..=1000).and_then(|hops| std::num::NonZeroUsize::new(usize::try_from(hops).ok()?)));
    let proxies = object.get("trusted_proxies").map(|node| read_networks(&node));
    let trust = match (hops, proxies) {
        (None, None) => Some(Trust::Proxy),
        (Some(hops), None) => hops.map(Trust::Hops),
        (None, Some(proxies)) => proxies.map(Trust::Networks),
        (Some(_), Some(_)) => {
            object.fault("both trusted_hops and trusted_proxies, expected one of them".to_owned());
            None
        }
    };
    Some(ClientIp { trust: trust?, prefixes: Prefixes { ipv4: ipv4?, ipv6: ipv6? } })
}

/// Addresses and networks, at least one.
fn read_networks(node: &Node<'_>) -> Option<Vec<ipnet::IpNet>> {
    let networks = node.list("addresses and networks, such as \"10.0.0.0/8\"")?;
    if networks.is_empty() {
        node.expected("at least one address or network, or no such field");
    }
    let read = |network: Node<'_>| network.parsed("an address or a network, such as \"10.0.0.0/8\"", Trust::network);
    all(networks.into_iter().map(read))
}

/// All of them, or `None` where one is missing; each is looked at in any case, for its faults.
fn all<T>(values: impl Iterator<Item = Option<T>>) -> Option<Vec<T>> {
    let values = values.collect::<Vec<_>>();
    values.into_iter().collect()
}

fn read_rules(object: &Object<'_>, common: &Common) -> Option<Vec<Rule>> {
    let node = object.require("rules", "a list of at least one rule")?;
    let rules = node.list("rules")?;
    if rules.is_empty() {
        node.expected("at least one rule; a filter without one does nothing");
    }
    let mut named: HashMap<&str, String> = HashMap::new();
    let rules = rules.into_iter().map(|node| read_rule(node, &mut named, common));
    all(rules)
}

fn read_rule<'a>(node: Node<'a>, named: &mut HashMap<&'a str, String>, common: &Common) -> Option<Rule> {
    let object = node.object(&[
        "name",
        "namespace",
        "match",
        "unless",
        "key",
        "if_missing",
        "limits",
        "overrides",
        "cost",
        "shadow",
        "response",
    ])?;
    let name = object.require("name", RuleName::EXPECTED).and_then(|node| {
        if let Some(text) = node.text(RuleName::EXPECTED) {
            if let Some(first) = named.get(text) {
                node.fault(format!("the name \"{text}\" is that of {first} already; names must differ"));
            }
            named.entry(text).or_insert_with(|| node.path().trim_end_matches(".name").to_owned());
        }
        node.parsed(RuleName::EXPECTED, RuleName::new)
    });
    let limits = object.require("limits", "a list of at least one limit").map(|node| read_limits(&node));
    let namespace = match object.get("namespace") {
        None => name.as_ref().map(Namespace::of_rule),
        Some(node) => {
            let namespace = node.parsed(Namespace::EXPECTED, Namespace::new);
            if has_several_limits(&object) && namespace.as_ref().is_some_and(Namespace::is_bare) {
                node.fault("an empty namespace goes with one limit only, since its key has no number".to_owned());
            }
            namespace
        }
    };
    let (scope, identity) = (scope::read(&object), identity::read(&object));
    // Without a key there is nothing to compare an override's values with.
    let overrides = overrides::read(&object, identity.as_ref().unwrap_or(&Identity::default()), &common.client_ip);
    let price = or_default(object.get("cost"), read_price);
    let shadow = or_default(object.get("shadow"), |node| node.boolean());
    let response = object
        .get("response")
        .map_or_else(|| Some(common.response.clone()), |node| response::read(node, &common.response));
    let policy = Policy {
        scope: scope?,
        identity: identity?,
        overrides: overrides?,
        price: price?,
        shadow: shadow?,
        response: response?,
    };
    Some(Rule::new(name?, namespace?, Rc::from(limits??), policy))
}

/// Limits, at least one.
fn read_limits(node: &Node<'_>) -> Option<Vec<Limit>> {
    let limits = node.list("limits")?;
    if !(1..=Rule::MOST_LIMITS).contains(&limits.len()) {
        node.expected(&format!("1 to {} limits", Rule::MOST_LIMITS));
    }
    all(limits.into_iter().map(read_limit))
}

/// Whether a rule or one of its overrides has more than one limit.
fn has_several_limits(rule: &Object<'_>) -> bool {
    let own = rule.get("limits").into_iter();
    let others = rule.get("overrides").into_iter().flat_map(|node| node.elements());
    own.chain(others.filter_map(|node| node.field("limits"))).any(|limits| limits.elements().len() > 1)
}

/// What a request costs: a number, or what a header says.
fn read_price(node: Node<'_>) -> Option<Price> {
    let cost = |node: Node<'_>| node.integer(1..=MAX_UNITS).and_then(Cost::new);
    if !node.is_object() {
        return cost(node).map(Price::Fixed);
    }
    let object = node.object(&["header", "default", "max"])?;
    let what = "the name of a header, such as \"x-cost\"";
    let name = object.require("header", what).and_then(|node| node.parsed(what, scope::header_name));
    let default = object.get("default").map_or(Some(Cost::ONE), cost);
    let max = object.get("max").map_or_else(|| Cost::new(MAX_UNITS), cost);
    if let (Some(default), Some(max)) = (default, max)
        && default > max
    {
        object.fault(format!("a default of {} is above the max of {}", default.get(), max.get()));
    }
    Some(Price::Header { name: name?, default: default?, max: max? })
}

fn read_limit(node: Node<'_>) -> Option<Limit> {
    let object = node.object(&["capacity", "refill"])?;
    let capacity = object.get("capacity").map(|node| node.integer(1..=MAX_UNITS).and_then(Capacity::new));
    let refill = object.require("refill", in_words::A_RATE).and_then(|node| {
        let text = node.text(in_words::A_RATE)?;
        rate(text).map_err(|fault| node.expected(fault)).ok()
    });
    let (capacity, refill) = (capacity.unwrap_or_else(|| refill.map(crate::quota::Refill::per_second))?, refill?);
    match Limit::new(capacity, refill) {
        Ok(limit) => Some(limit),
        Err(too_fine) => {
            object.fault(too_fine.to_string());
            None
        }
    }
}

#[cfg(test)]
mod tests;

//! The configuration: JSON in, and out comes a value that cannot be wrong, or every fault of the document.
//!
//! A field that is not there has the default of the documentation. A field that is unknown, of the wrong type or out of
//! range is a fault, and a document with a fault is refused as a whole: the proxy keeps what it had.

mod advice;
mod client_ip;
mod deny_cache;
mod duration;
mod identity;
mod limits;
mod overrides;
mod reader;
mod redis;
mod response;
mod rule;
#[cfg(not(target_arch = "wasm32"))]
pub mod schema;
mod scope;
pub mod shape;

use std::fmt;

pub use self::reader::Remark;
use self::reader::{Node, Remarks, Value};
pub use self::redis::{Credentials, Redis};
use self::shape::{Field, Shape, Words};
use crate::client_ip::ClientIp;
use crate::decision::FailureMode;
use crate::deny_cache::Settings;
use crate::key::KeyPrefix;
use crate::response::{Reply, Style};
use crate::rule::Rule;

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
    /// By how many the limits of a worker's own buckets are divided: 1 to 10,000.
    pub local_share: u64,
    /// How long a denial is believed.
    pub deny_cache: Settings,
    /// Whether requests for one bucket go to Redis together. No document says so: the count is the same either way.
    pub coalesces: bool,
    /// Whose address is the client's.
    pub client_ip: ClientIp,
    /// What clients are told, where a rule says nothing else.
    pub response: Style,
    /// What a request is told that is refused because it could not be decided.
    pub failure_response: Reply,
    /// The rules, at least one, of different names.
    pub rules: Vec<Rule>,
    /// What is legal, and surely not meant.
    pub warnings: Vec<Remark>,
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
pub struct Errors(Vec<Remark>);

impl Errors {
    /// The faults, in the order of the document.
    pub fn remarks(&self) -> &[Remark] {
        &self.0
    }

    fn one(what: String) -> Self {
        Self(vec![Remark { path: String::new(), what }])
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
        let remarks = Remarks::default();
        let config = read(Node::root(&document, &SHAPE, &remarks));
        let (faults, warnings) = remarks.into_faults_and_warnings();
        match config {
            Some(mut config) if faults.is_empty() => {
                config.warnings = warnings;
                config.warnings.extend(advice::on(&config.rules));
                Ok(config)
            }
            _ => Err(Errors(faults)),
        }
    }
}

/// What a configuration may look like.
pub const SHAPE: Shape = Shape::fields(&[
    Field::new("redis", redis::SHAPE, "{}", "how Redis is reached"),
    Field::new(
        "key_prefix",
        Shape::Text(Words::matching(KeyPrefix::EXPECTED, "^[!-z|~]{0,64}$")),
        "\"quota:\"",
        "the first bytes of every key",
    ),
    Field::new(
        "clock",
        Shape::Choice(&["redis", "proxy"]),
        "\"redis\"",
        "whose time counts: the server's, or the proxy's",
    ),
    Field::new(
        "failure_mode",
        rule::FAILURE_MODE,
        "\"allow\"",
        "what happens to requests while Redis cannot be asked: they go on, they are refused, or a bucket of this worker's own \
         with the same limits decides",
    ),
    Field::new(
        "local_share",
        Shape::Integer(1, 10_000),
        "1",
        "`failure_mode: local`: the limits of a worker's own buckets are divided by so many",
    ),
    Field::new(
        "deny_cache",
        deny_cache::SHAPE,
        "{}",
        "a caller that was denied is denied again without asking Redis, for as long as that is certain",
    ),
    Field::new("client_ip", client_ip::SHAPE, "{}", "whose address is the client's"),
    Field::new("response", response::DENIAL, "{}", "what clients are told"),
    Field::new(
        "failure_response",
        response::UNAVAILABLE,
        "{}",
        "what a request is told that `failure_mode: deny` refuses; it has no `retry-after`",
    ),
    Field::required("rules", rule::SHAPE, "the rules, all of which have to admit a request; at least one"),
]);

fn read(document: Node<'_>) -> Option<Config> {
    let object = document.object()?;
    let redis = object.or("redis", Redis::default(), redis::read);
    let key_prefix = object.or("key_prefix", KeyPrefix::default(), |node| node.parsed(KeyPrefix::new));
    let clock = object.or("clock", Clock::default(), |node| {
        node.parsed(|text| match text {
            "redis" => Some(Clock::Redis),
            "proxy" => Some(Clock::Proxy),
            _ => None,
        })
    });
    let failure_mode = object.or("failure_mode", FailureMode::default(), rule::read_failure_mode);
    let local_share = object.or("local_share", 1, |node| node.integer());
    let deny_cache = object.or("deny_cache", Settings::default(), deny_cache::read);
    let client_ip = object.or("client_ip", ClientIp::default(), client_ip::read);
    let style = object.or("response", Style::default(), |node| response::read(node, &Style::default()));
    let failure_response = object.or("failure_response", Reply::unavailable(), response::read_unavailable);
    let common = rule::Common {
        failure_mode: failure_mode.unwrap_or_default(),
        client_ip: client_ip.clone().unwrap_or_default(),
        response: style.clone().unwrap_or_default(),
    };
    let rules = object.get("rules").and_then(|node| rule::read(&node, &common));
    Some(Config {
        redis: redis?,
        key_prefix: key_prefix?,
        clock: clock?,
        failure_mode: failure_mode?,
        local_share: local_share?,
        deny_cache: deny_cache?,
        coalesces: true,
        client_ip: client_ip?,
        response: style?,
        failure_response: failure_response?,
        rules: rules?,
        warnings: Vec::new(),
    })
}

#[cfg(test)]
mod tests;

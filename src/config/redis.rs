//! How Redis is reached: the field `redis`.

use std::fmt;
use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::duration::duration;
use super::reader::{Node, Object};
use super::shape::{Field, Shape, Words};
use crate::breaker;

/// How Redis is reached.
#[derive(Debug)]
pub struct Redis {
    /// The cluster that leads into the tunnel.
    pub cluster: String,
    /// The longest that a decision waits: 1 ms to 10 s.
    pub timeout: Duration,
    /// Calls that a worker may have under way: 1 to 1,000,000.
    pub max_in_flight: usize,
    /// When requests are decided without asking.
    pub breaker: breaker::Settings,
    /// Sent first on every connection.
    pub credentials: Credentials,
    /// The number of the database, 0 to 65535.
    pub database: u32,
}

/// A user's name and password, neither of which is ever shown.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Credentials {
    /// The name of an ACL user. There is none without a password.
    pub username: Option<String>,
    /// The password.
    pub password: Option<String>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.password.is_some() { "Credentials(hidden)" } else { "Credentials(none)" })
    }
}

impl Default for Redis {
    fn default() -> Self {
        Self {
            cluster: "meshquota_tunnel".to_owned(),
            timeout: Duration::from_millis(50),
            max_in_flight: 4096,
            breaker: breaker::Settings::default(),
            credentials: Credentials::default(),
            database: 0,
        }
    }
}

/// The field.
pub const SHAPE: Shape = Shape::fields(&[
    Field::new(
        "cluster",
        Shape::Text(Words::matching(
            "the name of an Envoy cluster, of 1 to 120 printable characters",
            "^[!-~]{1,120}$",
        )),
        "\"meshquota_tunnel\"",
        "the Envoy cluster that leads into the tunnel",
    ),
    Field::new(
        "timeout",
        Shape::Text(Words::matching("a duration from 1ms to 10s, such as \"50ms\"", r"^\s*[0-9].*[A-Za-z]\s*$")),
        "\"50ms\"",
        "the longest that a request waits for its decision, from 1ms to 10s",
    ),
    Field::new(
        "max_in_flight",
        Shape::Integer(1, 1_000_000),
        "4096",
        "charges that a worker may have under way, in calls or waiting for another's; the next is decided by the failure mode at once",
    ),
    Field::new(
        "breaker",
        Shape::fields(&[
            Field::new(
                "failures",
                Shape::Integer(1, 1_000_000),
                "10",
                "so many calls that failed in a row open it: requests are then decided by the failure mode at once",
            ),
            Field::new(
                "cool_down",
                Shape::Text(Words::matching(
                    "a duration from 10ms to 10min, such as \"1s\"",
                    r"^\s*[0-9].*[A-Za-z]\s*$",
                )),
                "\"1s\"",
                "while it is open, one request in so long asks all the same, a quarter more or less",
            ),
        ]),
        "{}",
        "when Redis is no longer asked",
    ),
    Field::new("username", A_TEXT, "none", "the ACL user of `AUTH`, which goes first on every connection"),
    Field::new("password", A_TEXT, "none", "its password, or that of the default user; an empty text is none"),
    Field::new("database", Shape::Integer(0, 65535), "0", "the database of `SELECT`, likewise"),
]);
const A_TEXT: Shape = Shape::Secret(Words::new("a text"));

/// Reads the field.
pub fn read(node: Node<'_>) -> Option<Redis> {
    const TIMEOUTS: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(10);
    let default = Redis::default();
    let object = node.object()?;
    let cluster = object.or("cluster", default.cluster, |node| {
        let fits = |text: &&str| (1..=120).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic());
        node.parsed(|text| Some(text).filter(fits).map(str::to_owned))
    });
    let timeout = object.or("timeout", default.timeout, |node| {
        node.parsed(|text| duration(text).filter(|timeout| TIMEOUTS.contains(timeout)))
    });
    let max_in_flight = object.or("max_in_flight", default.max_in_flight, |node| node.integer());
    let breaker = object.or("breaker", default.breaker, read_breaker);
    let database = object.or("database", default.database, |node| node.integer());
    let credentials = credentials(&object);
    Some(Redis {
        cluster: cluster?,
        timeout: timeout?,
        max_in_flight: max_in_flight?,
        breaker: breaker?,
        credentials: credentials?,
        database: database?,
    })
}

fn read_breaker(node: Node<'_>) -> Option<breaker::Settings> {
    const COOL_DOWNS: RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(600);
    let default = breaker::Settings::default();
    let object = node.object()?;
    let failures = object.or("failures", default.failures, |node| node.integer().and_then(NonZeroU32::new));
    let cool_down = object.or("cool_down", default.cool_down, |node| {
        node.parsed(|text| duration(text).filter(|cool_down| COOL_DOWNS.contains(cool_down)))
    });
    Some(breaker::Settings { failures: failures?, cool_down: cool_down? })
}

/// An empty text is no name and no password: templates leave one where nothing is set.
fn credentials(object: &Object<'_>) -> Option<Credentials> {
    let text = |name| object.given(name, |node| node.text().map(str::to_owned));
    let (username, password) = (text("username"), text("password"));
    let (username, password) = (username?.filter(|text| !text.is_empty()), password?.filter(|text| !text.is_empty()));
    if username.is_some() && password.is_none() {
        object.fault("a username without a password; Redis takes both or the password alone".to_owned());
        return None;
    }
    Some(Credentials { username, password })
}

//! How Redis is reached: the field `redis`.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::duration::duration;
use super::reader::{Node, Object};

/// How Redis is reached.
#[derive(Debug)]
pub struct Redis {
    /// The cluster that leads into the tunnel.
    pub cluster: String,
    /// The longest that a decision waits: 1 ms to 10 s.
    pub timeout: Duration,
    /// Calls that a worker may have under way: 1 to 1,000,000.
    pub max_in_flight: usize,
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
            credentials: Credentials::default(),
            database: 0,
        }
    }
}

/// Reads the field `redis`.
pub fn read(node: Node<'_>) -> Option<Redis> {
    const TIMEOUTS: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(10);
    let default = Redis::default();
    let object = node.object(&["cluster", "timeout", "max_in_flight", "username", "password", "database"])?;
    let cluster = object.get("cluster").map_or(Some(default.cluster), |node| {
        let fits = |text: &&str| (1..=120).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic());
        node.parsed("the name of an Envoy cluster, of 1 to 120 printable characters", |text| {
            Some(text).filter(fits).map(str::to_owned)
        })
    });
    let timeout = object.get("timeout").map_or(Some(default.timeout), |node| {
        let what = "a duration from 1ms to 10s, such as \"50ms\"";
        node.parsed(what, |text| duration(text).filter(|timeout| TIMEOUTS.contains(timeout)))
    });
    let max_in_flight = object.get("max_in_flight").map_or(Some(default.max_in_flight), |node| {
        node.integer(1..=1_000_000).and_then(|calls| usize::try_from(calls).ok())
    });
    let database = object
        .get("database")
        .map_or(Some(default.database), |node| node.integer(0..=65535).and_then(|number| u32::try_from(number).ok()));
    let credentials = credentials(&object);
    Some(Redis {
        cluster: cluster?,
        timeout: timeout?,
        max_in_flight: max_in_flight?,
        credentials: credentials?,
        database: database?,
    })
}

/// An empty text is no name and no password: templates leave one where nothing is set.
fn credentials(object: &Object<'_>) -> Option<Credentials> {
    let text = |name| match object.get(name) {
        None => Some(None),
        Some(node) => Some(Some(node.secret().text("a text")?.to_owned()).filter(|text| !text.is_empty())),
    };
    let (username, password) = (text("username"), text("password"));
    let (username, password) = (username?, password?);
    if username.is_some() && password.is_none() {
        object.fault("a username without a password; Redis takes both or the password alone".to_owned());
        return None;
    }
    Some(Credentials { username, password })
}

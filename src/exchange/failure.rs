//! What can go wrong with a call, by kind.
//!
//! Invariant: a failure is never a denial. Nothing in here says that a bucket is empty; it says that the bucket
//! could not be asked.

use std::fmt;
use std::rc::Rc;

/// Why a call got no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The deadline passed. The call may have been charged.
    Timeout,
    /// As many calls as allowed are in flight already. This one was not sent.
    Overload,
    /// So many calls failed before it that this one was not made.
    Breaker,
    /// The server, or the way to it, said no.
    Error {
        /// Which of the known kinds of error it was.
        kind: ErrorKind,
        /// What was said, fit for a log line: printable, short, without arguments of the command.
        cause: Rc<str>,
    },
}

impl Failure {
    /// An error of a kind, with its cause in words.
    pub fn error(kind: ErrorKind, cause: &str) -> Self {
        Self::Error { kind, cause: Rc::from(cause) }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Timeout => f.write_str("timeout: no answer within redis.timeout"),
            Self::Overload => f.write_str("overload: redis.max_in_flight calls are waiting already"),
            Self::Breaker => f.write_str("breaker: Redis has failed too often in a row"),
            Self::Error { kind, cause } => write!(f, "{}: {cause}", kind.name()),
        }
    }
}

/// The kinds of error that are told apart, each with a counter of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ErrorKind {
    /// The server is a replica: a failover happened, or is happening. Retires the connection.
    Readonly,
    /// The server is reading its data set.
    Loading,
    /// The server is out of memory and evicts nothing.
    Oom,
    /// A script or function runs for too long.
    Busy,
    /// No credentials, or wrong ones. Retires the connection.
    Auth,
    /// The credentials do not allow the command or the key.
    Noperm,
    /// An answer of Redis Cluster that a plain connection cannot follow.
    Cluster,
    /// The key holds something that is no bucket.
    Type,
    /// Bytes that are not RESP, or a reply that nothing waited for. The stream is closed.
    Protocol,
    /// No connection, or it broke, or the proxy's own Redis client found no server.
    Unavailable,
    /// Every other error reply.
    Other,
}

impl ErrorKind {
    /// Every kind, in the order of the documentation.
    pub const ALL: [Self; 11] = [
        Self::Readonly,
        Self::Loading,
        Self::Oom,
        Self::Busy,
        Self::Auth,
        Self::Noperm,
        Self::Cluster,
        Self::Type,
        Self::Protocol,
        Self::Unavailable,
        Self::Other,
    ];

    /// The name in metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Readonly => "readonly",
            Self::Loading => "loading",
            Self::Oom => "oom",
            Self::Busy => "busy",
            Self::Auth => "auth",
            Self::Noperm => "noperm",
            Self::Cluster => "cluster",
            Self::Type => "type",
            Self::Protocol => "protocol",
            Self::Unavailable => "unavailable",
            Self::Other => "other",
        }
    }

    /// Whether a connection that says so is of no more use: the next one may reach another server, or bring
    /// credentials that are right by then.
    pub const fn retires_connection(self) -> bool {
        matches!(self, Self::Readonly | Self::Auth)
    }
}

/// An error reply, sorted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ErrorReply {
    /// The server does not know the script by its digest: the one error that a repetition mends.
    NoScript,
    /// Everything else.
    Failure(Failure),
}

impl ErrorReply {
    /// Sorts an error reply by its first word, as Redis means it.
    ///
    /// Servers before Redis 7 wrap what a command inside a script answered in a sentence of their own; the word is
    /// then looked for inside. Envoy's `redis_proxy` has errors without such a word.
    pub fn sort(text: &[u8]) -> Self {
        let text = String::from_utf8_lossy(text);
        let code = match text.split_once("@user_script") {
            Some((wrapper, inner)) if wrapper.starts_with("ERR Error running script") => {
                inner.split_once(": ").map_or("", |(_, inner)| inner)
            }
            _ => &text,
        };
        let first = code.trim_start_matches('-').split([' ', ':']).next().unwrap_or_default();
        let kind = match first {
            "NOSCRIPT" => return Self::NoScript,
            "READONLY" => ErrorKind::Readonly,
            "LOADING" => ErrorKind::Loading,
            "OOM" => ErrorKind::Oom,
            "BUSY" => ErrorKind::Busy,
            // DENIED is what a server in protected mode says to anybody from outside, at once.
            "NOAUTH" | "WRONGPASS" | "DENIED" => ErrorKind::Auth,
            "NOPERM" => ErrorKind::Noperm,
            "CLUSTERDOWN" | "MOVED" | "ASK" | "TRYAGAIN" | "CROSSSLOT" => ErrorKind::Cluster,
            "WRONGTYPE" => ErrorKind::Type,
            "MASTERDOWN" | "NOREPLICAS" | "upstream" | "no" => ErrorKind::Unavailable,
            "ERR" if text.starts_with("ERR max number of clients") => ErrorKind::Unavailable,
            "ERR" if text.starts_with("ERR AUTH") => ErrorKind::Auth,
            // What a command inside a script may not do is told in a sentence: Redis 7.0's and Valkey's.
            "ERR" if text.contains("user executing the script can't run") || text.contains("ACL failure in script") => {
                ErrorKind::Noperm
            }
            _ => ErrorKind::Other,
        };
        Self::Failure(Failure::error(kind, &printable(&text)))
    }
}

/// What of an error's text may go into a log: nothing that repeats the arguments of the command (they hold the key),
/// no control characters, no more than a line.
pub fn printable(text: &str) -> String {
    const LONGEST: usize = 160;
    let text = text.split(", with args beginning").next().unwrap_or_default();
    text.chars().map(|c| if c.is_ascii_graphic() || c == ' ' { c } else { '?' }).take(LONGEST).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_reply_has_its_kind() {
        let cases: &[(&str, ErrorKind)] = &[
            ("READONLY You can't write against a read only replica.", ErrorKind::Readonly),
            ("LOADING Redis is loading the dataset in memory", ErrorKind::Loading),
            ("OOM command not allowed when used memory > 'maxmemory'.", ErrorKind::Oom),
            ("BUSY Redis is busy running a script.", ErrorKind::Busy),
            ("NOAUTH Authentication required.", ErrorKind::Auth),
            ("WRONGPASS invalid username-password pair or user is disabled.", ErrorKind::Auth),
            ("DENIED Redis is running in protected mode because protected mode is enabled", ErrorKind::Auth),
            ("ERR AUTH <password> called without any password configured", ErrorKind::Auth),
            ("NOPERM User x has no permissions to run the 'evalsha' command", ErrorKind::Noperm),
            ("ERR The user executing the script can't run this command or subcommand script: ab", ErrorKind::Noperm),
            ("ERR ACL failure in script: User x has no permissions to run the 'hset' command", ErrorKind::Noperm),
            ("MOVED 3999 127.0.0.1:6381", ErrorKind::Cluster),
            ("ASK 3999 127.0.0.1:6381", ErrorKind::Cluster),
            ("TRYAGAIN Multiple keys request during rehashing of slot", ErrorKind::Cluster),
            ("CLUSTERDOWN Hash slot not served", ErrorKind::Cluster),
            ("CROSSSLOT Keys in request don't hash to the same slot", ErrorKind::Cluster),
            ("WRONGTYPE Operation against a key holding the wrong kind of value", ErrorKind::Type),
            ("MASTERDOWN Link with MASTER is down", ErrorKind::Unavailable),
            ("NOREPLICAS Not enough good replicas to write.", ErrorKind::Unavailable),
            ("ERR max number of clients reached", ErrorKind::Unavailable),
            ("upstream failure", ErrorKind::Unavailable),
            ("no upstream host", ErrorKind::Unavailable),
            ("ERR unknown command 'EVALSHA'", ErrorKind::Other),
            ("", ErrorKind::Other),
            (
                "ERR Error running script (call to f_aa): @user_script:4: WRONGTYPE Operation against a key",
                ErrorKind::Type,
            ),
            ("ERR Error running script (call to f_aa): @user_script:9: OOM command not allowed", ErrorKind::Oom),
        ];
        for (text, kind) in cases {
            match ErrorReply::sort(text.as_bytes()) {
                ErrorReply::Failure(Failure::Error { kind: found, .. }) => {
                    assert_eq!(found, *kind, "{text}")
                }
                other => panic!("{text}: {other:?}"),
            }
        }
        assert_eq!(ErrorReply::sort(b"NOSCRIPT No matching script."), ErrorReply::NoScript);
    }

    #[test]
    fn a_cause_repeats_no_arguments_and_no_control_characters() {
        let text = "ERR unknown command 'EVALSHA', with args beginning with: 'aa' '1' 'quota:{per-ip:1.2.3.4}:0'";
        assert_eq!(printable(text), "ERR unknown command 'EVALSHA'");
        assert_eq!(printable("a\r\nb\u{7f}\u{e9}"), "a??b??");
        assert_eq!(printable(&"x".repeat(1000)).len(), 160);
    }
}

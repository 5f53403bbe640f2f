//! What the client gets to see: headers of an admitted request, and the replies that the filter makes itself.
//!
//! The `x-ratelimit-*` headers are what limiters in this field send; `RateLimit-Policy` and `RateLimit` follow
//! draft-ietf-httpapi-ratelimit-headers-10, as structured fields (RFC 9651); `retry-after` is RFC 9110, section 10.2.3,
//! in its form of whole seconds.
//!
//! Invariant: no header comes twice, and none promises what is not so: a denial that waiting does not end has no
//! `retry-after`, and a request that was not decided by its bucket has no quota headers.

use std::borrow::Cow;
use std::time::Duration;

use sfv::{Integer, KeyRef, ListSerializer, StringRef};

use crate::config::Config;
use crate::decision::{Decision, Quota, Verdict};

/// A header of lower-case name.
pub type Header = (Cow<'static, str>, String);

/// What a denial looks like, and which headers tell a client where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Style {
    /// How the filter's own reply looks.
    pub reply: Reply,
    /// Which quota headers there are.
    pub headers: HeaderStyle,
    /// Whether a denial says how long to wait.
    pub retry_after: bool,
    /// Further headers of a denial, by their names in lower case; one of them replaces one of the filter's.
    pub set: Vec<(String, String)>,
}

/// How a reply of the filter looks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The HTTP status, 400 to 599.
    pub status: u16,
    /// The body.
    pub body: String,
    /// The content type of the body; text/plain where there is none.
    pub content_type: Option<String>,
    /// The status for a gRPC request, 1 to 16.
    pub grpc_status: u8,
}

/// Which quota headers there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeaderStyle {
    /// `x-ratelimit-limit`, `-remaining` and `-reset`.
    #[default]
    XRateLimit,
    /// `RateLimit-Policy` and `RateLimit`.
    Ietf,
    /// All of them.
    Both,
    /// None.
    None,
}

impl Default for Style {
    fn default() -> Self {
        Self {
            reply: Reply { status: 429, body: "rate limit exceeded\n".to_owned(), content_type: None, grpc_status: 8 },
            headers: HeaderStyle::default(),
            retry_after: true,
            set: Vec::new(),
        }
    }
}

impl Reply {
    /// What a request is told that is refused because it could not be decided.
    pub fn unavailable() -> Self {
        Self { status: 503, body: "rate limit unavailable\n".to_owned(), content_type: None, grpc_status: 14 }
    }

    fn with(&self, details: &'static str, mut headers: Vec<Header>) -> LocalReply {
        if let Some(content_type) = &self.content_type {
            headers.push(("content-type".into(), content_type.clone()));
        }
        LocalReply {
            status: self.status.into(),
            details,
            headers,
            body: self.body.clone(),
            grpc_status: self.grpc_status.into(),
        }
    }
}

/// A reply that the filter makes. The proxy turns it into a gRPC status where the request is gRPC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalReply {
    /// The HTTP status.
    pub status: u32,
    /// The response-code details for the access log: a word.
    pub details: &'static str,
    /// Headers besides those that the proxy adds.
    pub headers: Vec<Header>,
    /// The body.
    pub body: String,
    /// The status for a gRPC request.
    pub grpc_status: i32,
}

/// What to do to a request that is decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It goes on; its response gets these headers, in place of the upstream's of the same names.
    Continue(Vec<Header>),
    /// It is answered so.
    Reply(LocalReply),
}

/// What to do to a request for which this was decided.
pub fn answer(config: &Config, decision: &Decision) -> Answer {
    let rule = config.rules.get(decision.rule);
    let style = rule.map_or(&config.response, |rule| rule.response());
    let name = rule.map_or("", |rule| rule.name().as_str());
    match &decision.verdict {
        Verdict::Allow(quota) => Answer::Continue(quota_headers(style.headers, name, quota)),
        Verdict::Watched | Verdict::FailAllow | Verdict::LocalAllow => Answer::Continue(Vec::new()),
        Verdict::Deny { quota, retry_after } | Verdict::LocalDeny { quota, retry_after } => {
            Answer::Reply(style.reply.with("meshquota_denied", denial_headers(style, name, quota, *retry_after)))
        }
        Verdict::FailDeny => Answer::Reply(config.failure_response.with("meshquota_unavailable", Vec::new())),
    }
}

fn denial_headers(style: &Style, rule: &str, quota: &Quota, retry_after: Option<Duration>) -> Vec<Header> {
    let mut headers = quota_headers(style.headers, rule, quota);
    if let Some(wait) = retry_after.filter(|_| style.retry_after) {
        headers.push(("retry-after".into(), whole_seconds(wait).max(1).to_string()));
    }
    headers.push(("x-envoy-ratelimited".into(), "true".to_owned()));
    headers.retain(|(name, _)| style.set.iter().all(|(other, _)| other != name));
    headers.extend(style.set.iter().map(|(name, value)| (Cow::Owned(name.clone()), value.clone())));
    headers
}

/// The headers that tell a client where it stands.
fn quota_headers(style: HeaderStyle, rule: &str, quota: &Quota) -> Vec<Header> {
    // With those of a denial, but for what the configuration adds.
    let mut headers = Vec::with_capacity(8);
    let reset = whole_seconds(quota.reset_after);
    if matches!(style, HeaderStyle::XRateLimit | HeaderStyle::Both) {
        headers.push(("x-ratelimit-limit".into(), quota.capacity.to_string()));
        headers.push(("x-ratelimit-remaining".into(), quota.remaining.to_string()));
        headers.push(("x-ratelimit-reset".into(), reset.to_string()));
    }
    if matches!(style, HeaderStyle::Ietf | HeaderStyle::Both) {
        const QUOTA: &KeyRef = KeyRef::constant("q");
        const WINDOW: &KeyRef = KeyRef::constant("w");
        const REMAINING: &KeyRef = KeyRef::constant("r");
        const RESET: &KeyRef = KeyRef::constant("t");
        let window = whole_seconds(quota.window).max(1);
        let policy = item(rule, [(QUOTA, quota.capacity), (WINDOW, window)]);
        let standing = item(rule, [(REMAINING, quota.remaining), (RESET, reset)]);
        headers.extend(policy.map(|value| ("ratelimit-policy".into(), value)));
        headers.extend(standing.map(|value| ("ratelimit".into(), value)));
    }
    headers
}

/// A list of one item: a rule's name with parameters. A number that a structured field cannot hold is the largest that it
/// can.
fn item(rule: &str, parameters: [(&KeyRef, u64); 2]) -> Option<String> {
    let mut list = ListSerializer::new();
    let mut item = list.bare_item(StringRef::from_str(rule).ok()?);
    for (key, number) in parameters {
        let number = i64::try_from(number).ok().and_then(|number| Integer::try_from(number).ok());
        item = item.parameter(key, number.unwrap_or(Integer::MAX));
    }
    list.finish()
}

/// Whole seconds, rounded up: who waits so long has waited long enough.
fn whole_seconds(duration: Duration) -> u64 {
    duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUOTA: Quota = Quota {
        capacity: 10,
        remaining: 3,
        reset_after: Duration::from_millis(3001),
        window: Duration::from_millis(5000),
    };

    /// What a request is told, a line a header; replies begin with status, details, gRPC status and body.
    fn told(fields: &str, verdict: Verdict) -> String {
        let json =
            format!(r#"{{{fields} "rules": [{{"name": "a", "limits": [{{"capacity": 10, "refill": "2/s"}}]}}]}}"#);
        let config = Config::from_json(json.as_bytes()).unwrap();
        let (first, headers) = match answer(&config, &Decision { verdict, rule: 0, would_deny: None }) {
            Answer::Continue(headers) => ("continue".to_owned(), headers),
            Answer::Reply(LocalReply { status, details, headers, body, grpc_status }) => {
                (format!("{status} {details} {grpc_status} {body:?}"), headers)
            }
        };
        let lines = headers.into_iter().map(|(name, value)| format!("{name}: {value}"));
        std::iter::once(first).chain(lines).collect::<Vec<_>>().join("\n")
    }

    fn denied(milliseconds: Option<u64>) -> Verdict {
        Verdict::Deny { quota: QUOTA, retry_after: milliseconds.map(Duration::from_millis) }
    }

    const THREE: &str = "x-ratelimit-limit: 10\nx-ratelimit-remaining: 3\nx-ratelimit-reset: 4";
    const TWO: &str = "ratelimit-policy: \"a\";q=10;w=5\nratelimit: \"a\";r=3;t=4";

    #[test]
    fn seconds_are_whole_and_rounded_up() {
        for (milliseconds, seconds) in [(0, 0), (1, 1), (999, 1), (1000, 1), (1001, 2)] {
            assert_eq!(whole_seconds(Duration::from_millis(milliseconds)), seconds);
        }
    }

    #[test]
    fn an_admitted_request_learns_where_it_stands_in_the_style_that_is_wanted() {
        let allowed = || Verdict::Allow(QUOTA);
        assert_eq!(told("", allowed()), format!("continue\n{THREE}"));
        assert_eq!(told(r#""response": {"headers": "ietf"},"#, allowed()), format!("continue\n{TWO}"));
        assert_eq!(told(r#""response": {"headers": "both"},"#, allowed()), format!("continue\n{THREE}\n{TWO}"));
        assert_eq!(told(r#""response": {"headers": "none"},"#, allowed()), "continue");
        assert_eq!(told("", Verdict::FailAllow), "continue");
        assert_eq!(told("", Verdict::Watched), "continue");
    }

    #[test]
    fn a_denial_says_how_long_to_wait_unless_waiting_never_helps() {
        let reply = "429 meshquota_denied 8 \"rate limit exceeded\\n\"";
        let with = |wait: &str| format!("{reply}\n{THREE}\n{wait}x-envoy-ratelimited: true");
        assert_eq!(told("", denied(Some(1500))), with("retry-after: 2\n"));
        assert_eq!(told("", denied(Some(1))), with("retry-after: 1\n"));
        assert_eq!(told("", denied(Some(0))), with("retry-after: 1\n"));
        assert_eq!(told("", denied(None)), with(""));
        assert_eq!(told(r#""response": {"retry_after": false},"#, denied(Some(1500))), with(""));
        let bare = format!("{reply}\nretry-after: 2\nx-envoy-ratelimited: true");
        assert_eq!(told(r#""response": {"headers": "none"},"#, denied(Some(1500))), bare);
    }

    #[test]
    fn a_denial_looks_as_configured_and_no_header_comes_twice() {
        let response = r#""response": {"status": 403, "body": "{}", "content_type": "application/json", "grpc_status": 7,
            "set": {"X-Ratelimit-Limit": "many", "access-control-expose-headers": "retry-after"}},"#;
        let expected = "403 meshquota_denied 7 \"{}\"\nx-ratelimit-remaining: 3\nx-ratelimit-reset: 4\nretry-after: 2\n\
            x-envoy-ratelimited: true\nx-ratelimit-limit: many\naccess-control-expose-headers: retry-after\n\
            content-type: application/json";
        assert_eq!(told(response, denied(Some(1500))), expected);
    }

    #[test]
    fn a_request_that_cannot_be_decided_is_never_called_denied() {
        let expected = "503 meshquota_unavailable 14 \"rate limit unavailable\\n\"";
        assert_eq!(told(r#""response": {"status": 403},"#, Verdict::FailDeny), expected);
        let configured =
            r#""failure_response": {"status": 500, "body": "x", "content_type": "text/html", "grpc_status": 13},"#;
        assert_eq!(told(configured, Verdict::FailDeny), "500 meshquota_unavailable 13 \"x\"\ncontent-type: text/html");
    }

    #[test]
    fn a_number_that_a_structured_field_cannot_hold_is_the_largest_that_it_can() {
        let quota = Quota { capacity: crate::quota::MAX_UNITS, ..QUOTA };
        let headers = quota_headers(HeaderStyle::Ietf, "a", &quota);
        assert_eq!(headers[0].1, "\"a\";q=999999999999999;w=5");
    }

    #[test]
    fn a_rule_answers_in_its_own_style_merged_into_the_common_one() {
        let config = Config::from_json(
            br#"{"response": {"status": 403, "body": "common", "set": {"x-a": "1", "x-b": "1"}}, "rules": [
                {"name": "a", "limits": [{"refill": "1/s"}]},
                {"name": "b", "limits": [{"refill": "1/s"}], "response": {"body": "own", "set": {"X-B": "2"}}}
            ]}"#,
        )
        .unwrap();
        let looks = |rule| match answer(&config, &Decision { verdict: denied(None), rule, would_deny: None }) {
            Answer::Reply(reply) => {
                let set = reply.headers.into_iter().filter(|(name, _)| matches!(&**name, "x-a" | "x-b"));
                (reply.status, reply.body, set.map(|(_, value)| value).collect::<Vec<_>>().join(" "))
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(looks(0), (403, "common".to_owned(), "1 1".to_owned()));
        assert_eq!(looks(1), (403, "own".to_owned(), "1 2".to_owned()));
    }
}

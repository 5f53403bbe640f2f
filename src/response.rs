//! What the client gets to see: headers of an admitted request, and the replies that the filter makes itself.
//!
//! The `x-ratelimit-*` headers follow what limiters in this field send; `retry-after` is RFC 9110, section 10.2.3, in
//! its form of whole seconds.

use std::time::Duration;

use crate::decision::{Quota, Verdict};

/// A header of lower-case name.
pub type Header = (&'static str, String);

/// Status `RESOURCE_EXHAUSTED` of gRPC.
const GRPC_RESOURCE_EXHAUSTED: i32 = 8;
/// Status `UNAVAILABLE` of gRPC.
const GRPC_UNAVAILABLE: i32 = 14;

/// A reply that the filter makes. The proxy gives its body the content type text/plain, and turns it into a gRPC
/// status where the request is gRPC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalReply {
    /// The HTTP status.
    pub status: u32,
    /// The response-code details for the access log: a word.
    pub details: &'static str,
    /// Headers besides those that the proxy adds.
    pub headers: Vec<Header>,
    /// The body.
    pub body: &'static str,
    /// The status for a gRPC request.
    pub grpc_status: i32,
}

/// The headers that tell a client where it stands. Set on the response, they replace those of the upstream.
pub fn quota_headers(quota: &Quota) -> [Header; 3] {
    [
        ("x-ratelimit-limit", quota.capacity.to_string()),
        ("x-ratelimit-remaining", quota.remaining.to_string()),
        ("x-ratelimit-reset", whole_seconds(quota.reset_after).to_string()),
    ]
}

/// The reply to a request that does not go on, or `None` where it does.
pub fn local_reply(verdict: &Verdict) -> Option<LocalReply> {
    match verdict {
        Verdict::Allow(_) | Verdict::Watched | Verdict::FailAllow => None,
        Verdict::Deny { quota, retry_after } => {
            let mut headers = Vec::from(quota_headers(quota));
            if let Some(wait) = retry_after {
                headers.push(("retry-after", whole_seconds(*wait).max(1).to_string()));
            }
            headers.push(("x-envoy-ratelimited", "true".to_owned()));
            Some(LocalReply {
                status: 429,
                details: "meshquota_denied",
                headers,
                body: "rate limit exceeded\n",
                grpc_status: GRPC_RESOURCE_EXHAUSTED,
            })
        }
        Verdict::FailDeny => Some(LocalReply {
            status: 503,
            details: "meshquota_unavailable",
            headers: Vec::new(),
            body: "rate limit unavailable\n",
            grpc_status: GRPC_UNAVAILABLE,
        }),
    }
}

/// Whole seconds, rounded up: who waits so long has waited long enough.
fn whole_seconds(duration: Duration) -> u64 {
    duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUOTA: Quota = Quota { capacity: 10, remaining: 3, reset_after: Duration::from_millis(3001) };

    #[test]
    fn seconds_are_whole_and_rounded_up() {
        for (milliseconds, seconds) in [(0, 0), (1, 1), (999, 1), (1000, 1), (1001, 2)] {
            assert_eq!(whole_seconds(Duration::from_millis(milliseconds)), seconds);
        }
    }

    #[test]
    fn an_admitted_request_learns_its_limit_what_is_left_and_when_it_is_full_again() {
        let expected = [("x-ratelimit-limit", "10"), ("x-ratelimit-remaining", "3"), ("x-ratelimit-reset", "4")];
        assert_eq!(quota_headers(&QUOTA), expected.map(|(name, value)| (name, value.to_owned())));
    }

    #[test]
    fn a_denial_says_how_long_to_wait_unless_waiting_never_helps() {
        let header = |retry_after| {
            let reply = local_reply(&Verdict::Deny { quota: QUOTA, retry_after }).unwrap();
            assert_eq!((reply.status, reply.grpc_status), (429, 8));
            assert!(reply.headers.contains(&("x-envoy-ratelimited", "true".to_owned())));
            let found = reply.headers.into_iter().find(|(name, _)| *name == "retry-after");
            found.map(|(_, value)| value)
        };
        assert_eq!(header(Some(Duration::from_millis(1500))).as_deref(), Some("2"));
        assert_eq!(header(Some(Duration::from_micros(1))).as_deref(), Some("1"));
        assert_eq!(header(Some(Duration::ZERO)).as_deref(), Some("1"));
        assert_eq!(header(None), None);
    }

    #[test]
    fn a_request_that_cannot_be_decided_is_never_called_denied() {
        let reply = local_reply(&Verdict::FailDeny).unwrap();
        assert_eq!((reply.status, reply.grpc_status), (503, 14));
        assert_eq!(reply.headers, []);
        assert_eq!(local_reply(&Verdict::FailAllow), None);
        assert_eq!(local_reply(&Verdict::Watched), None);
        assert_eq!(local_reply(&Verdict::Allow(QUOTA)), None);
    }
}

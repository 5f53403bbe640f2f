//! Requests of one worker, with the server's words given, told by what becomes of them.

use redis_protocol::resp2::types::Resp2Frame;

use super::*;
use crate::decision::Verdict;
use crate::request::tests::Told;
use crate::stats::Change;

const ADMITTED: &[u8] = b"*4\r\n:1\r\n:9\r\n:0\r\n:1000\r\n";
const DENIED: &[u8] = b"*4\r\n:0\r\n:0\r\n:1500\r\n:10000\r\n";
const NEVER: &[u8] = b"*4\r\n:0\r\n:9\r\n:-1\r\n:1000\r\n";

const ONE_RULE: &str = r#"{"rules": [{"name": "a", "limits": [{"capacity": 10, "refill": "1/s"}]}]}"#;
const TWO_RULES: &str = r#"{"rules": [
    {"name": "a", "limits": [{"capacity": 10, "refill": "1/s"}]},
    {"name": "b", "limits": [{"capacity": 20, "refill": "1/s"}]}
]}"#;
const REFUSING: &str =
    r#"{"failure_mode": "deny", "rules": [{"name": "a", "limits": [{"capacity": 10, "refill": "1/s"}]}]}"#;
const PROXY_CLOCK: &str = r#"{"clock": "proxy", "rules": [
    {"name": "a", "limits": [{"capacity": 10, "refill": "1/s"}]},
    {"name": "b", "limits": [{"capacity": 20, "refill": "1/s"}]}
]}"#;

mod coalesce;
mod deny_cache;

struct Table {
    limiter: Limiter,
    now: Instant,
    /// What happened, in order.
    told: Vec<String>,
}

impl Table {
    fn new(config: &str) -> Self {
        let now = Instant::now();
        let config = Config::from_json(config.as_bytes()).unwrap();
        Self { limiter: Limiter::new(config, 5, now), now, told: Vec::new() }
    }

    fn connected(config: &str) -> Self {
        let mut table = Self::new(config);
        table.wait(1);
        table.limiter.connected(table.now);
        table.drain();
        table.told.clear();
        table
    }

    fn request(&mut self, id: RequestId) {
        self.request_from(id, b"192.0.2.1:4711");
    }

    fn request_from(&mut self, id: RequestId, address: &[u8]) {
        let facts = Told::from(address);
        let met = self.limiter.meets(&facts);
        match self.limiter.request(self.now, || 1_700_000_000_000, id, met) {
            Admission::NotLimited => self.told.push(format!("{id} not limited")),
            Admission::Decided(decision) => self.told.push(format!("{id} at once {}", in_words(&decision))),
            Admission::Waits => {}
        }
        self.drain();
    }

    fn hear(&mut self, bytes: &[u8]) {
        self.limiter.received(self.now, bytes);
        self.drain();
    }

    fn wait(&mut self, milliseconds: u64) {
        let end = self.now + Duration::from_millis(milliseconds);
        while let Some(next) = self.limiter.next_tick(self.now).filter(|next| self.now + *next <= end) {
            self.now += next;
            self.limiter.tick(self.now);
            self.drain();
        }
        self.now = end;
    }

    fn drain(&mut self) {
        while let Some(effect) = self.limiter.next_effect(self.now) {
            self.told.push(match effect {
                Effect::Open => "open".to_owned(),
                Effect::Close => "close".to_owned(),
                Effect::Send(bytes) => commands(&bytes),
                Effect::Decide(id, decision) => format!("{id} {}", in_words(&decision)),
                Effect::Log(Line::Warning(line)) => format!("warning: {line}"),
                Effect::Log(Line::Info(line)) => format!("info: {line}"),
            });
        }
    }

    /// The counts by the names of their metrics.
    fn counts(&mut self) -> Vec<String> {
        self.limiter.tick(self.now);
        let metrics = Stats::metrics(self.limiter.config().rules.iter().map(|rule| rule.name().as_str()));
        let name = |place: usize| {
            let name = metrics[place].name.trim_start_matches("meshquota_").replace("=.=", "=").replace(";.;", " ");
            name.trim_end_matches("total").trim_end().to_owned()
        };
        self.limiter
            .stats()
            .take()
            .into_iter()
            .map(|change| match change {
                Change::Add(place, by) => format!("{} {by}", name(place)),
                Change::Record(place, value) => format!("{} took {value}", name(place)),
            })
            .collect()
    }
}

fn in_words(decision: &Decision) -> String {
    let verdict = match decision.verdict {
        Verdict::Allow(quota) => format!("allow {}/{}", quota.remaining, quota.capacity),
        Verdict::Deny { retry_after, .. } => format!("deny {retry_after:?}"),
        Verdict::Watched => "watched".to_owned(),
        Verdict::FailAllow => "fail_allow".to_owned(),
        Verdict::FailDeny => "fail_deny".to_owned(),
        Verdict::LocalAllow => "local_allow".to_owned(),
        Verdict::LocalDeny { retry_after, .. } => format!("local_deny for {:?}", retry_after.unwrap_or_default()),
    };
    format!("{verdict} by rule {}", decision.rule)
}

/// The commands in these bytes, each as its key, its time and its count.
fn commands(bytes: &[u8]) -> String {
    let mut rest = bytes::BytesMut::from(bytes);
    let mut told = Vec::new();
    while let Ok(Some((Reply::Array(words), ..))) = redis_protocol::resp2::decode::decode_bytes_mut(&mut rest) {
        let words = words.iter().map(|word| word.as_str().unwrap().to_owned()).collect::<Vec<_>>();
        told.push(match words.as_slice() {
            [name, _, _, key, _, _, _, rest @ ..] => {
                // The usual is left out.
                let now = rest.first().map_or("0", AsRef::as_ref);
                let count = rest.get(2).map_or("1", AsRef::as_ref);
                format!("{name} {key} now {now} count {count}")
            }
            other => other.join(" "),
        });
    }
    told.join(", ")
}

const A: &str = "EVALSHA quota:{a:192.0.2.1}:0 now 0 count 1";

#[test]
fn a_request_waits_for_its_bucket_and_is_decided_by_it() {
    let mut table = Table::connected(ONE_RULE);
    table.request(1);
    table.request_from(2, b"192.0.2.2:1");
    table.request_from(3, b"192.0.2.3:1");
    table.hear(&[ADMITTED, DENIED, NEVER].concat());
    let others = ["2.2", "2.3"].map(|other| A.replace("2.1", other));
    let expected =
        [A, &others[0], &others[1], "1 allow 9/10 by rule 0", "2 deny Some(1.5s) by rule 0", "3 deny None by rule 0"];
    assert_eq!(table.told, expected);
    let counts = table.counts();
    assert!(counts.contains(&"redis_calls.result=ok 3".to_owned()), "{counts:?}");
    assert!(counts.contains(&"decisions.rule=a outcome=allow 1".to_owned()), "{counts:?}");
    assert!(counts.contains(&"decisions.rule=a outcome=deny 2".to_owned()), "{counts:?}");
    assert_eq!(counts.iter().filter(|count| count.starts_with("redis_call_ms took")).count(), 3);
}

#[test]
fn the_calls_of_a_request_go_out_together_and_what_it_took_in_vain_is_given_back() {
    let mut table = Table::connected(TWO_RULES);
    table.request(1);
    let calls = "EVALSHA quota:{a:192.0.2.1}:0 now 0 count 1, EVALSHA quota:{b:192.0.2.1}:0 now 0 count 1";
    assert_eq!(table.told, [calls]);
    table.told.clear();
    table.hear(&[ADMITTED, DENIED].concat());
    let mut told = table.told.clone();
    told.sort();
    assert_eq!(told, ["1 deny Some(1.5s) by rule 1", "EVALSHA quota:{a:192.0.2.1}:0 now 0 count -1"]);
    table.hear(ADMITTED);
    let counts = table.counts();
    assert!(counts.contains(&"given_back_ 1".to_owned()), "{counts:?}");
}

#[test]
fn a_charge_is_given_back_by_the_clock_that_took_it() {
    let mut table = Table::connected(PROXY_CLOCK);
    table.request(1);
    table.hear(&[ADMITTED, DENIED].concat());
    let told = table.told.join("\n");
    assert!(told.contains("quota:{a:192.0.2.1}:0 now 1700000000000 count 1"), "{told}");
    assert!(told.contains("quota:{a:192.0.2.1}:0 now 1700000000000 count -1"), "{told}");
}

#[test]
fn giving_back_that_fails_is_not_repeated() {
    let mut table = Table::connected(TWO_RULES);
    table.request(1);
    table.hear(&[ADMITTED, DENIED].concat());
    table.limiter.closed(table.now, "cut");
    table.told.clear();
    table.wait(2_000);
    table.limiter.connected(table.now);
    table.drain();
    assert!(table.told.iter().all(|told| !told.contains("EVAL")), "{:?}", table.told);
    assert!(!table.counts().iter().any(|count| count.starts_with("given_back")));
}

#[test]
fn the_failure_mode_decides_where_redis_does_not() {
    for (config, outcome) in [(ONE_RULE, "fail_allow"), (REFUSING, "fail_deny")] {
        let mut table = Table::connected(config);
        table.request(1);
        table.hear(b"-OOM command not allowed\r\n");
        table.request(2);
        table.wait(60);
        let decided = table.told.iter().filter(|told| told.contains("by rule")).collect::<Vec<_>>();
        assert_eq!(decided, [&format!("1 {outcome} by rule 0"), &format!("2 {outcome} by rule 0")]);
        let counts = table.counts();
        for expected in [
            format!("decisions.rule=a outcome={outcome} 2"),
            "redis_calls.result=error 1".to_owned(),
            "redis_calls.result=timeout 1".to_owned(),
            "redis_errors.kind=oom 1".to_owned(),
        ] {
            assert!(counts.contains(&expected), "{counts:?} lacks {expected}");
        }
    }
}

#[test]
fn a_request_refused_for_want_of_an_answer_gives_back_what_other_rules_took() {
    let config = TWO_RULES.replacen('{', r#"{"failure_mode": "deny","#, 1);
    let mut table = Table::connected(&config);
    table.request(1);
    table.hear(&[ADMITTED, b"-LOADING data\r\n"].concat());
    let told = table.told.join("\n");
    assert!(told.contains("1 fail_deny by rule 1"), "{told}");
    assert!(told.contains("EVALSHA quota:{a:192.0.2.1}:0 now 0 count -1"), "{told}");
}

#[test]
fn an_outage_is_one_line_when_it_begins_and_one_when_it_ends() {
    let mut table = Table::connected(ONE_RULE);
    for id in 1..=10 {
        table.request(id);
        table.hear(LOADING);
    }
    // The breaker is open, so these change nothing.
    for id in 11..=200 {
        table.request(id);
    }
    table.wait(1_500);
    table.request(201);
    table.hear(ADMITTED);
    let lines = table.told.iter().filter(|told| told.contains(": Redis")).collect::<Vec<_>>();
    let warning = "warning: Redis does not answer (loading: LOADING Redis is loading the dataset in memory); \
                   requests are allowed until it does";
    let expected = [
        warning,
        "info: the breaker is open after 10 failures in a row: Redis is asked once in 1000 ms",
        "info: the breaker is closed: Redis has answered",
        "info: Redis answers again; 10 calls failed over 0.0 s",
    ];
    assert_eq!(lines, expected);
}

#[test]
fn a_client_that_leaves_hears_nothing_and_leaves_nothing_behind() {
    let mut table = Table::connected(ONE_RULE);
    table.request(1);
    table.request_from(2, b"192.0.2.9:1");
    table.limiter.gone(1);
    table.hear(&[ADMITTED, ADMITTED].concat());
    assert_eq!(table.told, [A, &A.replace("2.1", "2.9"), "2 allow 9/10 by rule 0"]);
    assert!(table.limiter.waiting.is_empty());
    assert!(table.counts().contains(&"redis_calls.result=ok 2".to_owned()));
}

#[test]
fn a_reply_of_another_shape_is_no_answer_and_the_stream_is_not_trusted_any_more() {
    for reply in [
        b"+OK\r\n".as_slice(),
        b":1\r\n",
        b"$-1\r\n",
        b"*0\r\n",
        b"*3\r\n:1\r\n:9\r\n:0\r\n",
        b"*4\r\n:2\r\n:9\r\n:0\r\n:1000\r\n",
        b"*5\r\n:1\r\n:9\r\n:0\r\n:1000\r\n:1\r\n",
        b"*4\r\n:1\r\n:-9\r\n:0\r\n:1000\r\n",
    ] {
        let mut table = Table::connected(ONE_RULE);
        table.request(1);
        table.hear(reply);
        let told = table.told.join("\n");
        assert!(told.contains("1 fail_allow by rule 0") && told.contains("close"), "{told}");
        assert!(table.counts().contains(&"redis_errors.kind=protocol 1".to_owned()));
    }
}

#[test]
fn a_request_without_an_identity_is_skipped_and_counted() {
    let mut table = Table::connected(ONE_RULE);
    table.request_from(1, b"/var/run/socket");
    table.request_from(2, b"");
    assert_eq!(table.told, ["1 not limited", "2 not limited"]);
    assert!(table.counts().contains(&"skipped.rule=a 2".to_owned()));
}

#[test]
fn a_request_before_the_first_connection_waits_for_it() {
    let mut table = Table::new(ONE_RULE);
    table.request(1);
    table.wait(1);
    table.limiter.connected(table.now);
    table.hear(ADMITTED);
    assert_eq!(table.told, ["open", A, "1 allow 9/10 by rule 0"]);
}

#[test]
fn gauges_show_calls_and_connection_and_return_to_zero() {
    let mut table = Table::connected(ONE_RULE);
    assert!(table.counts().contains(&"connected 1".to_owned()));
    table.request(1);
    assert!(table.counts().contains(&"redis_in_flight 1".to_owned()));
    table.limiter.closed(table.now, "cut");
    let counts = table.counts();
    assert!(counts.contains(&"redis_in_flight -1".to_owned()), "{counts:?}");
    assert!(counts.contains(&"connected -1".to_owned()), "{counts:?}");
}

const LOADING: &[u8] = b"-LOADING Redis is loading the dataset in memory\r\n";

#[test]
fn after_failures_in_a_row_requests_are_decided_at_once_until_one_is_answered() {
    let mut table = Table::connected(
        r#"{"redis": {"breaker": {"failures": 3, "cool_down": "1s"}},
            "rules": [{"name": "a", "limits": [{"capacity": 10, "refill": "1/s"}]}]}"#,
    );
    for id in 1..=3 {
        table.request(id);
        table.hear(LOADING);
    }
    assert_eq!(table.told.last().unwrap(), "3 fail_allow by rule 0");
    let opened = "info: the breaker is open after 3 failures in a row: Redis is asked once in 1000 ms";
    assert!(table.told.contains(&opened.to_owned()), "{:?}", table.told);
    table.told.clear();
    table.request(4);
    table.request(5);
    assert_eq!(table.told, ["4 at once fail_allow by rule 0", "5 at once fail_allow by rule 0"]);
    assert!(table.counts().contains(&"redis_calls.result=breaker 2".to_owned()));
    // One in a cool-down asks; what it hears opens nothing anew, and one answer is enough.
    table.wait(1_250);
    table.told.clear();
    table.request(6);
    table.request(7);
    assert_eq!(table.told, [A, "7 at once fail_allow by rule 0"]);
    table.hear(LOADING);
    table.wait(1_250);
    table.told.clear();
    table.request(8);
    table.hear(ADMITTED);
    let closed = "info: the breaker is closed: Redis has answered";
    assert!(table.told.contains(&closed.to_owned()), "{:?}", table.told);
    table.told.clear();
    table.request(9);
    assert_eq!(table.told, [A]);
    let counts = table.counts();
    assert!(!counts.contains(&"breaker_open 1".to_owned()), "{counts:?}");
}

#[test]
fn a_key_that_is_no_bucket_opens_no_breaker_and_a_new_connection_is_asked_at_once() {
    let mut table = Table::connected(
        r#"{"redis": {"breaker": {"failures": 2, "cool_down": "10s"}},
            "rules": [{"name": "a", "limits": [{"capacity": 10, "refill": "1/s"}]}]}"#,
    );
    for id in 1..=5 {
        table.request(id);
        table.hear(b"-WRONGTYPE Operation against a key\r\n");
    }
    table.told.clear();
    table.request(6);
    table.request_from(7, b"192.0.2.9:1");
    assert_eq!(table.told, [A, &A.replace("2.1", "2.9")]);
    table.limiter.closed(table.now, "cut");
    table.drain();
    table.told.clear();
    table.request(8);
    assert_eq!(table.told, ["8 at once fail_allow by rule 0"]);
    table.wait(1_000);
    table.limiter.connected(table.now);
    table.drain();
    table.told.clear();
    table.request(9);
    assert_eq!(table.told, [A]);
}

#[test]
fn no_request_waits_for_longer_than_the_timeout_whenever_it_came_between_two_ticks() {
    let mut table = Table::connected(ONE_RULE);
    table.request(1);
    table.told.clear();
    table.wait(2);
    table.wait(48);
    assert!(table.told.contains(&"1 fail_allow by rule 0".to_owned()), "{:?}", table.told);
}

const LOCAL: &str = r#"{"failure_mode": "local", "redis": {"breaker": {"failures": 1, "cool_down": "1s"}},
    "rules": [{"name": "a", "limits": [{"capacity": 10, "refill": "1/s"}]}]}"#;

#[test]
fn buckets_of_the_worker_take_over_from_what_redis_said_last_and_hand_back_without_a_burst() {
    let mut table = Table::connected(LOCAL);
    table.request(1);
    table.hear(b"*4\r\n:1\r\n:4\r\n:0\r\n:6000\r\n");
    assert_eq!(table.told, [A, "1 allow 4/10 by rule 0"]);
    table.request(2);
    table.hear(LOADING);
    // Three of the four that were left, with the one that failed; then nothing until a token is back.
    table.told.clear();
    for id in 3..=6 {
        table.request(id);
    }
    let yes = |id| format!("{id} at once local_allow by rule 0");
    assert_eq!(table.told[..3], [yes(3), yes(4), yes(5)]);
    assert!(table.told[3].starts_with("6 at once local_deny for"), "{:?}", table.told);
    assert!(table.counts().iter().any(|count| count == "decisions.rule=a outcome=local_deny 1"));
    // Another caller, of whom Redis had said nothing, has a full bucket.
    table.told.clear();
    for id in 10..21 {
        table.request_from(id, b"192.0.2.9:1");
    }
    assert_eq!(table.told.iter().filter(|told| told.contains("local_allow")).count(), 10);
    // Redis is back, and would grant; what was taken here counts for as long as it is not refilled.
    table.wait(1_250);
    table.told.clear();
    table.request(30);
    table.hear(ADMITTED);
    assert!(table.told.contains(&"30 allow 9/10 by rule 0".to_owned()), "{:?}", table.told);
    table.told.clear();
    table.request(31);
    table.hear(ADMITTED);
    assert!(table.told[1].starts_with("31 local_deny for"), "{:?}", table.told);
    // What Redis had granted is given back.
    assert!(table.told.iter().any(|told| told.contains("count -1")), "{:?}", table.told);
    table.hear(ADMITTED);
    // Full again, it has no say any more: the next is decided by Redis alone.
    table.wait(10_000);
    table.told.clear();
    for id in 40..60 {
        table.request(id);
        table.hear(ADMITTED);
    }
    assert_eq!(table.told.iter().filter(|told| told.contains("allow 9/10")).count(), 20);
}

#[test]
fn one_outage_soon_after_another_gives_no_caller_a_second_bucket() {
    let mut table = Table::connected(LOCAL);
    table.request(1);
    table.hear(LOADING);
    for id in 2..=8 {
        table.request(id);
    }
    // Two of ten are left of what this worker keeps account of; two come back, and both are asked of Redis.
    table.wait(2_000);
    for id in 10..12 {
        table.request(id);
        table.hear(ADMITTED);
    }
    table.request(12);
    table.hear(LOADING);
    table.request(13);
    table.told.clear();
    for id in 20..30 {
        table.request(id);
    }
    let admitted = table.told.iter().filter(|told| told.contains("local_allow")).count();
    assert_eq!(admitted, 0, "{:?}", table.told);
}

#[test]
fn a_share_of_the_limits_is_what_each_worker_has() {
    let config = r#"{"failure_mode": "local", "local_share": 5, "redis": {"breaker": {"failures": 1}},
        "rules": [{"name": "a", "limits": [{"capacity": 10, "refill": "1/s"}, {"capacity": 20, "refill": "2/s"}]}]}"#;
    let mut table = Table::connected(config);
    table.request(1);
    table.hear(LOADING);
    let mut admitted = 1;
    for second in 0..60 {
        for id in 0..3 {
            table.told.clear();
            table.request(100 + second * 10 + id);
            // One in a cool-down asks Redis.
            table.hear(LOADING);
            admitted += table.told.iter().filter(|told| told.contains("local_allow")).count();
        }
        table.wait(1_000);
    }
    // Two at once, and one in five seconds.
    assert!((13..=14).contains(&admitted), "{admitted}");
}

#[test]
fn each_rule_has_the_failure_mode_that_it_names() {
    let config = r#"{"failure_mode": "deny", "rules": [
        {"name": "a", "limits": [{"refill": "1/s"}], "match": {"path": "/a"}, "failure_mode": "allow"},
        {"name": "b", "limits": [{"refill": "1/s"}], "unless": {"path": "/a"}}
    ]}"#;
    let mut table = Table::connected(config);
    let mut request = |id, path| {
        let mut facts = Told::new(&[(":path", path)]);
        facts.properties.push(("none", Vec::new()));
        let met = table.limiter.meets(&facts);
        table.limiter.request(table.now, || 0, id, met);
        table.drain();
        table.hear(LOADING);
    };
    request(1, "/a");
    request(2, "/b");
    let told = table.told.iter().filter(|told| told.contains("fail")).cloned().collect::<Vec<_>>();
    assert!(told.contains(&"1 fail_allow by rule 0".to_owned()), "{told:?}");
    assert!(told.contains(&"2 fail_deny by rule 1".to_owned()), "{told:?}");
}

#[test]
fn after_an_outage_a_caller_has_its_whole_quota_again_and_not_its_share_of_it() {
    let config = r#"{"failure_mode": "local", "local_share": 10, "redis": {"breaker": {"failures": 1, "cool_down": "1s"}},
        "rules": [{"name": "a", "limits": [{"capacity": 20, "refill": "10/s"}]}]}"#;
    let mut table = Table::connected(config);
    table.request(1);
    table.hear(LOADING);
    for id in 2..=4 {
        table.request(id);
    }
    // A tenth of twenty, of which the one that failed was the first.
    assert_eq!(table.told.iter().filter(|told| told.contains("local_allow")).count(), 2, "{:?}", table.told);
    // At nine tenths of its quota the caller keeps its own bucket busy, and is admitted all the same.
    table.wait(1_250);
    let mut denied = 0;
    for id in 10..100 {
        table.told.clear();
        table.request(id);
        table.hear(ADMITTED);
        denied += table.told.iter().filter(|told| told.contains("deny")).count();
        table.wait(111);
    }
    assert_eq!(denied, 0);
}

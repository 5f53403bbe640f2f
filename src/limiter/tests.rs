//! Requests of one worker, with the server's words given, told by what becomes of them.

use redis_protocol::resp2::types::Resp2Frame;

use super::*;
use crate::decision::Verdict;
use crate::request::tests::Told;
use crate::stats::Change;

const ADMITTED: &[u8] = b"*5\r\n:1\r\n:9\r\n:0\r\n:1000\r\n:0\r\n";
const DENIED: &[u8] = b"*5\r\n:0\r\n:0\r\n:1500\r\n:10000\r\n:0\r\n";
const NEVER: &[u8] = b"*5\r\n:0\r\n:9\r\n:-1\r\n:1000\r\n:0\r\n";

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
        match self.limiter.request(self.now, || 1_700_000_000_000, id, &facts) {
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
            [name, _, _, key, now, _, count, ..] => format!("{name} {key} now {now} count {count}"),
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
    table.request(2);
    table.request(3);
    table.hear(&[ADMITTED, DENIED, NEVER].concat());
    let expected = [A, A, A, "1 allow 9/10 by rule 0", "2 deny Some(1.5s) by rule 0", "3 deny None by rule 0"];
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
    for id in 1..=200 {
        table.request(id);
        table.hear(b"-LOADING Redis is loading the dataset in memory\r\n");
    }
    table.wait(1_500);
    table.request(201);
    table.hear(ADMITTED);
    let lines = table.told.iter().filter(|told| told.contains(": Redis")).collect::<Vec<_>>();
    let warning = "warning: Redis does not answer (loading: LOADING Redis is loading the dataset in memory); \
                   requests are allowed until it does";
    assert_eq!(lines, [warning, "info: Redis answers again; 200 calls failed over 0.0 s"]);
}

#[test]
fn a_client_that_leaves_hears_nothing_and_leaves_nothing_behind() {
    let mut table = Table::connected(ONE_RULE);
    table.request(1);
    table.request(2);
    table.limiter.gone(1);
    table.hear(&[ADMITTED, ADMITTED].concat());
    assert_eq!(table.told, [A, A, "2 allow 9/10 by rule 0"]);
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
        b"*4\r\n:1\r\n:9\r\n:0\r\n:1000\r\n",
        b"*5\r\n:2\r\n:9\r\n:0\r\n:1000\r\n:0\r\n",
        b"*5\r\n:1\r\n:9\r\n:0\r\n:1000\r\n:1\r\n",
        b"*5\r\n:1\r\n:-9\r\n:0\r\n:1000\r\n:0\r\n",
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

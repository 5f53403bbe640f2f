//! Whole conversations, each told as steps and as what came of them, and each held with the server's bytes cut in every
//! way.

use std::num::NonZeroU32;

use redis_protocol::resp2::types::Resp2Frame;

use super::*;
use crate::quota::{Capacity, Cost, Limit, Refill};

const OK: &[u8] = b"*4\r\n:1\r\n:9\r\n:0\r\n:1000\r\n";
const NOSCRIPT: &[u8] = b"-NOSCRIPT No matching script. Please use EVAL.\r\n";
const TIMEOUT: Duration = Duration::from_millis(50);

#[derive(Clone, Copy)]
enum Step<'a> {
    /// A call by this number.
    Call(u32),
    /// The stream has reached the server.
    Connected,
    /// The server says this.
    Hear(&'a [u8]),
    /// The stream breaks.
    Closed,
    /// So many milliseconds pass, with ticks as they are wanted.
    Wait(u64),
    /// So many milliseconds pass in which the worker has no turn, then a tick.
    Away(u64),
}
use Step::{Away, Call, Closed, Connected, Hear, Wait};

/// How the server's bytes are cut.
#[derive(Clone, Copy, Debug)]
enum Cut {
    Whole,
    Bytewise,
    At(usize),
}

#[derive(Debug, Default, PartialEq)]
struct Told {
    /// Streams opened and closed, and the names of the commands sent.
    did: Vec<String>,
    /// The answers, in order: who, and the reply or the failure.
    answers: Vec<(u32, String)>,
}

struct Talk {
    exchange: Exchange<u32>,
    now: Instant,
    told: Told,
}

fn call() -> crate::script::Call {
    let limit = Limit::new(Capacity::new(10).unwrap(), Refill::new(1, 1000).unwrap()).unwrap();
    crate::script::Call::charge([("quota:{a:1.2.3.4}:0", limit)], Cost::ONE, NonZeroU32::MIN, None)
}

fn settings() -> Settings {
    Settings { timeout: TIMEOUT, max_in_flight: 4, greeting: Vec::new(), seed: 7 }
}

impl Talk {
    fn new(settings: Settings) -> Self {
        let now = Instant::now();
        Self { exchange: Exchange::new(settings, now), now, told: Told::default() }
    }

    fn hold(mut self, steps: &[Step<'_>], cut: Cut) -> Told {
        for step in steps {
            match *step {
                Call(who) => {
                    if let Err(failure) = self.exchange.call(self.now, self.now, who, call()) {
                        self.told.answers.push((who, format!("at once: {failure}")));
                    }
                    self.drain();
                }
                Connected => self.exchange.connected(self.now),
                Hear(bytes) => self.hear(bytes, cut),
                Closed => self.exchange.closed(self.now, "cut"),
                Wait(milliseconds) => self.wait(milliseconds),
                Away(milliseconds) => {
                    self.now += Duration::from_millis(milliseconds);
                    self.exchange.tick(self.now);
                }
            }
            self.drain();
        }
        self.told
    }

    fn hear(&mut self, bytes: &[u8], cut: Cut) {
        let pieces: Vec<&[u8]> = match cut {
            Cut::Whole => vec![bytes],
            Cut::Bytewise => bytes.chunks(1).collect(),
            Cut::At(place) => {
                let (head, tail) = bytes.split_at(place.min(bytes.len()));
                vec![head, tail]
            }
        };
        for piece in pieces {
            self.exchange.received(self.now, piece);
            self.drain();
        }
    }

    fn wait(&mut self, milliseconds: u64) {
        let end = self.now + Duration::from_millis(milliseconds);
        while let Some(next) = self.exchange.next_tick(self.now).filter(|next| self.now + *next <= end) {
            self.now += next;
            self.exchange.tick(self.now);
            self.drain();
        }
        self.now = end;
    }

    fn drain(&mut self) {
        while let Some(effect) = self.exchange.next_effect() {
            match effect {
                Effect::Open => self.told.did.push("open".to_owned()),
                Effect::Close => self.told.did.push("close".to_owned()),
                Effect::Send(bytes) => self.told.did.extend(commands(&bytes)),
                Effect::Answer { who, answer, .. } => {
                    let answer = match answer {
                        Ok(Reply::Array(elements)) => format!("{} numbers", elements.len()),
                        Ok(other) => format!("{other:?}"),
                        Err(failure) => failure.to_string(),
                    };
                    self.told.answers.push((who, answer));
                }
            }
        }
    }
}

/// The first words of the commands in these bytes.
fn commands(bytes: &[u8]) -> Vec<String> {
    let mut rest = BytesMut::from(bytes);
    let mut names = Vec::new();
    while let Ok(Some((Reply::Array(words), ..))) = redis_protocol::resp2::decode::decode_bytes_mut(&mut rest) {
        names.push(String::from_utf8_lossy(words[0].as_bytes().unwrap()).into_owned());
    }
    assert!(rest.is_empty(), "half a command was sent");
    names
}

/// Holds a conversation in every cut and checks that it is told the same each time.
fn check(settings: &Settings, steps: &[Step<'_>], did: &str, answers: &[(u32, &str)]) {
    let longest = steps.iter().map(|step| if let Hear(bytes) = step { bytes.len() } else { 0 }).max();
    let cuts = [Cut::Whole, Cut::Bytewise].into_iter().chain((0..longest.unwrap_or(0)).map(Cut::At));
    for cut in cuts {
        let told = Talk::new(settings.clone()).hold(steps, cut);
        assert_eq!(told.did.join(" "), did, "{cut:?}");
        let told_answers = told.answers.iter().map(|(who, text)| (*who, text.as_str())).collect::<Vec<_>>();
        assert_eq!(told_answers, answers, "{cut:?}");
    }
}

const FOUR: &str = "4 numbers";
const LATE: &str = "timeout: no answer within redis.timeout";
const CUT: &str = "unavailable: the connection was closed: cut";
const NEVER: &str = "unavailable: cannot connect: cut";

#[test]
fn replies_go_to_their_calls_first_in_first_out() {
    let replies = [OK, b":7\r\n", OK].concat();
    check(
        &settings(),
        &[Wait(1), Connected, Call(1), Call(2), Call(3), Hear(&replies)],
        "open EVALSHA EVALSHA EVALSHA",
        &[(1, FOUR), (2, "Integer(7)"), (3, FOUR)],
    );
}

#[test]
fn calls_made_before_the_connection_wait_for_it() {
    check(
        &settings(),
        &[Call(1), Wait(1), Call(2), Wait(20), Connected, Hear(OK), Hear(OK)],
        "open EVALSHA EVALSHA",
        &[(1, FOUR), (2, FOUR)],
    );
}

#[test]
fn a_call_that_waits_for_a_connection_waits_no_longer_than_its_deadline() {
    check(
        &settings(),
        &[Wait(1), Call(1), Wait(60), Call(2), Connected, Call(3), Hear(OK)],
        "open EVALSHA",
        &[(1, LATE), (2, "at once: unavailable: connecting takes too long"), (3, FOUR)],
    );
}

#[test]
fn only_a_call_whose_script_is_unknown_is_sent_again_and_only_once() {
    let replies = [NOSCRIPT, OK, NOSCRIPT].concat();
    check(
        &settings(),
        &[Wait(1), Connected, Call(1), Call(2), Call(3), Hear(&replies), Hear(OK), Hear(NOSCRIPT)],
        "open EVALSHA EVALSHA EVALSHA EVAL EVAL",
        &[(2, FOUR), (1, FOUR), (3, "other: NOSCRIPT in answer to EVAL")],
    );
}

#[test]
fn a_late_reply_is_thrown_away_and_shifts_nothing() {
    check(
        &settings(),
        &[Wait(1), Connected, Call(1), Wait(40), Call(2), Wait(20), Hear(b":1\r\n"), Hear(b":2\r\n")],
        "open EVALSHA EVALSHA",
        &[(1, LATE), (2, "Integer(2)")],
    );
}

#[test]
fn a_call_past_its_deadline_is_not_sent_again_when_its_script_turns_out_unknown() {
    check(
        &settings(),
        &[Wait(1), Connected, Call(1), Wait(60), Hear(NOSCRIPT), Call(2), Hear(OK)],
        "open EVALSHA EVALSHA",
        &[(1, LATE), (2, FOUR)],
    );
}

#[test]
fn no_more_than_max_in_flight_calls_are_under_way_late_ones_included() {
    check(
        &settings(),
        &[
            Wait(1),
            Connected,
            Call(1),
            Call(2),
            Call(3),
            Call(4),
            Call(5),
            Wait(60),
            Call(6),
            Hear(OK),
            Call(7),
            Hear(&[OK, OK, OK, OK].concat()),
        ],
        "open EVALSHA EVALSHA EVALSHA EVALSHA EVALSHA",
        &[
            (5, "at once: overload: redis.max_in_flight calls are waiting already"),
            (1, LATE),
            (2, LATE),
            (3, LATE),
            (4, LATE),
            (6, "at once: overload: redis.max_in_flight calls are waiting already"),
            (7, FOUR),
        ],
    );
}

#[test]
fn what_was_sent_on_a_stream_that_breaks_fails_and_is_not_repeated() {
    check(
        &settings(),
        &[Wait(1), Connected, Call(1), Hear(OK), Call(2), Call(3), Closed, Call(4), Wait(1), Connected, Hear(OK)],
        "open EVALSHA EVALSHA EVALSHA open EVALSHA",
        &[(1, FOUR), (2, CUT), (3, CUT), (4, FOUR)],
    );
}

#[test]
fn half_a_reply_before_a_break_is_no_part_of_the_next_stream() {
    check(
        &settings(),
        &[
            Wait(1),
            Connected,
            Call(1),
            Hear(OK),
            Call(2),
            Hear(b"*4\r\n:1\r\n:9"),
            Closed,
            Wait(1),
            Connected,
            Call(3),
            Hear(OK),
        ],
        "open EVALSHA EVALSHA open EVALSHA",
        &[(1, FOUR), (2, CUT), (3, FOUR)],
    );
}

#[test]
fn after_a_failed_attempt_calls_fail_at_once_until_the_next_one() {
    check(
        &settings(),
        &[Wait(1), Call(1), Closed, Call(2), Wait(25), Call(3), Connected, Hear(OK)],
        "open open EVALSHA",
        &[(1, NEVER), (2, &format!("at once: {NEVER}")), (3, FOUR)],
    );
}

#[test]
fn the_first_call_of_an_unused_exchange_does_not_believe_an_old_failure() {
    // Half an hour of failed attempts on a worker without traffic; the server has come back since the last of them.
    let steps: Vec<Step<'_>> = std::iter::repeat_n([Wait(30_000), Closed], 60).flatten().collect();
    let mut talk = Talk::new(settings());
    for step in &steps {
        match step {
            Wait(milliseconds) => talk.wait(*milliseconds),
            _ => talk.exchange.closed(talk.now, "cut"),
        }
        talk.drain();
    }
    talk.told = Told::default();
    let told = talk.hold(&[Call(1), Wait(1), Connected, Hear(OK)], Cut::Whole);
    assert_eq!(told.did, ["open", "EVALSHA"]);
    assert_eq!(told.answers, [(1, FOUR.to_owned())]);
}

#[test]
fn a_reply_that_nothing_waits_for_closes_the_stream() {
    check(
        &settings(),
        &[Wait(1), Connected, Call(1), Hear(OK), Hear(OK), Wait(1), Connected, Call(2), Hear(OK)],
        "open EVALSHA close open EVALSHA",
        &[(1, FOUR), (2, FOUR)],
    );
}

#[test]
fn bytes_that_are_no_reply_close_the_stream_and_fail_what_waits() {
    let cases: &[(&[u8], &str)] = &[
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "protocol: bytes that are not RESP2"),
        (b"*x\r\n", "protocol: a malformed RESP2 reply"),
        (b"*1\r\n*1\r\n:1\r\n", "protocol: a nested reply"),
        (b"$99999\r\n", "protocol: a reply that is too long"),
    ];
    for (garbage, failure) in cases {
        let steps = [
            Wait(1),
            Connected,
            Call(1),
            Call(2),
            Call(3),
            Hear(OK),
            Hear(garbage),
            Wait(25),
            Connected,
            Call(4),
            Hear(OK),
        ];
        check(
            &settings(),
            &steps,
            "open EVALSHA EVALSHA EVALSHA close open EVALSHA",
            &[(1, FOUR), (2, failure), (3, failure), (4, FOUR)],
        );
    }
}

#[test]
fn bytes_after_the_last_reply_wait_for_the_rest_of_theirs() {
    let trailing = [OK, b"*4\r\n:1"].concat();
    check(
        &settings(),
        &[Wait(1), Connected, Call(1), Call(2), Hear(&trailing), Hear(b"\r\n:8\r\n:0\r\n:1\r\n")],
        "open EVALSHA EVALSHA",
        &[(1, FOUR), (2, FOUR)],
    );
}

#[test]
fn an_error_reply_fails_its_own_call_and_no_other() {
    check(
        &settings(),
        &[
            Wait(1),
            Connected,
            Call(1),
            Call(2),
            Call(3),
            Hear(&[b"-OOM command not allowed\r\n".as_slice(), OK, b"-LOADING data\r\n"].concat()),
            Call(4),
            Hear(OK),
        ],
        "open EVALSHA EVALSHA EVALSHA EVALSHA",
        &[(1, "oom: OOM command not allowed"), (2, FOUR), (3, "loading: LOADING data"), (4, FOUR)],
    );
}

#[test]
fn a_replica_or_missing_credentials_retire_the_connection() {
    for (reply, failure) in [
        (b"-READONLY You can't write\r\n".as_slice(), "readonly: READONLY You can't write"),
        (b"-NOAUTH Authentication required.\r\n", "auth: NOAUTH Authentication required."),
    ] {
        check(
            &settings(),
            &[
                Wait(1),
                Connected,
                Call(1),
                Hear(OK),
                Call(2),
                Call(3),
                Hear(reply),
                Wait(25),
                Connected,
                Call(4),
                Hear(OK),
            ],
            "open EVALSHA EVALSHA EVALSHA close open EVALSHA",
            &[(1, FOUR), (2, failure), (3, failure), (4, FOUR)],
        );
    }
}

#[test]
fn what_was_about_to_be_sent_again_does_not_go_out_on_the_next_stream() {
    let replies = [NOSCRIPT, b"garbage"].concat();
    let steps = [Wait(1), Connected, Call(1), Hear(&replies), Wait(25), Connected, Call(2), Hear(OK)];
    let told = Talk::new(settings()).hold(&steps, Cut::Whole);
    assert_eq!(told.did, ["open", "EVALSHA", "close", "open", "EVALSHA"]);
    assert_eq!(told.answers.len(), 2);
}

#[test]
fn a_second_connection_to_a_replica_is_not_followed_by_a_third_at_once() {
    let readonly = b"-READONLY x\r\n";
    let steps = [
        Wait(1),
        Connected,
        Call(1),
        Hear(OK),
        Call(2),
        Hear(readonly),
        Call(3),
        Wait(1),
        Connected,
        Hear(readonly),
        Call(4),
    ];
    check(
        &settings(),
        &steps,
        "open EVALSHA EVALSHA close open EVALSHA close",
        &[(1, FOUR), (2, "readonly: READONLY x"), (3, "readonly: READONLY x"), (4, "at once: readonly: READONLY x")],
    );
}

#[test]
fn credentials_come_first_and_no_call_is_sent_before_they_are_accepted() {
    let settings = Settings { greeting: greeting(Some("proxy"), Some("secret"), 3), ..settings() };
    check(
        &settings,
        &[Call(1), Wait(1), Connected, Hear(b"+OK\r\n"), Call(2), Hear(b"+OK\r\n"), Hear(OK), Hear(OK)],
        "open AUTH SELECT EVALSHA EVALSHA",
        &[(1, FOUR), (2, FOUR)],
    );
}

#[test]
fn wrong_credentials_fail_what_waits_and_are_tried_again_on_the_next_stream() {
    let settings = Settings { greeting: greeting(None, Some("secret"), 0), ..settings() };
    check(
        &settings,
        &[
            Call(1),
            Wait(1),
            Connected,
            Hear(b"-WRONGPASS invalid username-password pair\r\n"),
            Call(2),
            Wait(25),
            Connected,
            Call(3),
            Hear(b"+OK\r\n"),
            Hear(OK),
        ],
        "open AUTH close open AUTH EVALSHA",
        &[
            (1, "auth: WRONGPASS invalid username-password pair"),
            (2, "at once: auth: WRONGPASS invalid username-password pair"),
            (3, FOUR),
        ],
    );
}

#[test]
fn a_server_that_never_answers_its_greeting_is_given_up() {
    let settings = Settings { greeting: greeting(None, Some("secret"), 0), ..settings() };
    let mut talk = Talk::new(settings);
    talk.wait(1);
    talk.exchange.connected(talk.now);
    talk.drain();
    talk.now += Duration::from_secs(1);
    let told = talk.hold(&[Away(0), Wait(25)], Cut::Whole);
    assert_eq!(told.did, ["open", "AUTH", "close", "open"]);
}

#[test]
fn a_stream_that_stalls_is_given_up_and_a_new_one_opened() {
    check(
        &settings(),
        &[Wait(1), Connected, Call(1), Hear(OK), Call(2), Wait(560), Connected, Call(3), Hear(OK)],
        "open EVALSHA EVALSHA close open EVALSHA",
        &[(1, FOUR), (2, LATE), (3, FOUR)],
    );
}

#[test]
fn a_worker_that_was_away_reads_its_sockets_before_it_calls_a_reply_late() {
    check(&settings(), &[Wait(1), Connected, Call(1), Away(80), Hear(OK)], "open EVALSHA", &[(1, FOUR)]);
    // Each time that it was away…
    check(
        &settings(),
        &[Wait(1), Connected, Call(1), Away(80), Hear(OK), Call(2), Away(80), Hear(OK)],
        "open EVALSHA EVALSHA",
        &[(1, FOUR), (2, FOUR)],
    );
    // …but not for ever.
    let away = [Wait(1), Connected, Call(1), Away(80), Away(80), Away(80), Away(80)];
    check(&settings(), &away, "open EVALSHA", &[(1, LATE)]);
}

#[test]
fn an_idle_exchange_wants_no_ticks_and_one_with_calls_wants_them_often() {
    let mut talk = Talk::new(settings());
    assert!(talk.exchange.next_tick(talk.now).is_some());
    talk.wait(1);
    talk.exchange.connected(talk.now);
    assert_eq!(talk.exchange.next_tick(talk.now), None);
    talk.exchange.call(talk.now, talk.now, 1, call()).unwrap();
    assert!(talk.exchange.next_tick(talk.now).unwrap() <= Duration::from_millis(10));
    talk.hear(OK, Cut::Whole);
    assert_eq!(talk.exchange.next_tick(talk.now), None);
    assert_eq!(talk.exchange.in_flight(), 0);
}

#[test]
fn what_only_the_exchange_can_see_is_counted() {
    let mut talk = Talk::new(settings());
    talk.wait(1);
    talk.exchange.connected(talk.now);
    for who in 1..=2 {
        talk.exchange.call(talk.now, talk.now, who, call()).unwrap();
    }
    talk.hear(NOSCRIPT, Cut::Whole);
    talk.hear(OK, Cut::Whole);
    talk.wait(60);
    talk.hear(OK, Cut::Whole);
    talk.exchange.closed(talk.now, "cut");
    talk.wait(1);
    talk.exchange.connected(talk.now);
    assert_eq!(talk.exchange.take_counts(), Counts { noscript: 1, late: 1, reconnects: 1 });
    assert_eq!(talk.exchange.take_counts(), Counts::default());
}

#[test]
fn settings_do_not_show_the_password() {
    let settings = Settings { greeting: greeting(None, Some("secret"), 0), ..settings() };
    assert!(!format!("{settings:?}").contains("secret"));
}

#[test]
fn every_call_is_answered_once_whatever_happens() {
    let mut random = fastrand::Rng::with_seed(11);
    for round in 0..2_000 {
        let mut talk = Talk::new(settings());
        let mut made = 0;
        for _ in 0..random.usize(1..60) {
            match random.u32(0..9) {
                0..=2 => {
                    made += 1;
                    if let Err(failure) = talk.exchange.call(talk.now, talk.now, made, call()) {
                        talk.told.answers.push((made, failure.to_string()));
                    }
                }
                3 => talk.exchange.connected(talk.now),
                4 => talk.wait(random.u64(0..80)),
                5 if random.u32(0..4) == 0 => talk.exchange.closed(talk.now, "cut"),
                6 => {
                    let reply: &[u8] =
                        [OK, NOSCRIPT, b"-READONLY x\r\n", b"*4\r\n:1", b"-OOM x\r\n", OK][random.usize(0..6)];
                    talk.hear(reply, Cut::At(random.usize(0..10)));
                }
                _ => talk.hear(OK, Cut::Whole),
            }
            talk.drain();
            assert!(talk.exchange.in_flight() <= 4);
        }
        talk.wait(1_000);
        let mut answered = talk.told.answers.iter().map(|(who, _)| *who).collect::<Vec<_>>();
        answered.sort_unstable();
        assert_eq!(answered, (1..=made).collect::<Vec<_>>(), "round {round}");
    }
}

//! lua/bucket.lua in real Redis and real Valkey: against an exact model, and case by case.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "bucket/model.rs"]
mod model;
#[path = "bucket/properties.rs"]
mod properties;
#[path = "bucket/store.rs"]
mod store;
mod support;

use meshquota::quota::MAX_UNITS;
use meshquota::script::{Outcome, SOURCE};
use redis_protocol::resp2::types::BytesFrame;
use store::{START, Store, Wire, call, five, key, limit};
use support::server::wait_until;

/// As widely published: the clock of the caller, HMGET, HMSET, and whatever comes of it. It stands for the limiter
/// of an application that shares our buckets.
const NAIVE: &str = "
    local capacity, per_ms, now = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
    local state = redis.call('HMGET', KEYS[1], 'tokens', 'ts')
    local tokens = tonumber(state[1]) or capacity
    local ts = tonumber(state[2]) or now
    tokens = math.min(capacity, tokens + math.max(0, now - ts) * per_ms)
    local allowed = tokens >= 1
    if allowed then tokens = tokens - 1 end
    redis.call('HMSET', KEYS[1], 'tokens', tostring(tokens), 'ts', now)
    redis.call('PEXPIRE', KEYS[1], 3600000)
    return allowed and 1 or 0";

fn set(wire: &mut Wire, tokens: &str, ts: &str) {
    wire.command(&["DEL", &key(0)]);
    wire.command(&["HSET", &key(0), "tokens", tokens, "ts", ts]);
}

/// How many changes the data set has seen.
fn changes(wire: &mut Wire) -> String {
    let info = wire.text(&["INFO", "persistence"]);
    let line = info.lines().find(|line| line.starts_with("rdb_changes_since_last_save:"));
    line.unwrap().to_owned()
}

#[test]
fn a_missing_key_is_a_full_bucket_and_an_empty_one_tells_when_to_come_back() {
    let ten = [limit(10, 1, 100)];
    let cases = [
        // now, cost, count -> granted, remaining, retry after, reset after, limit
        (START, 1, 1, [1, 9, 0, 100, 0]),
        (START, 3, 2, [2, 3, 0, 700, 0]),
        (START, 1, 9, [3, 0, 100, 1000, 0]),
        (START + 1, 1, 1, [0, 0, 99, 999, 0]),
        (START + 99, 1, 1, [0, 0, 1, 901, 0]),
        (START + 100, 1, 1, [1, 0, 0, 1000, 0]),
        (START + 150, 11, 1, [0, 0, -1, 950, 0]),
        (START + 5000, 11, 1, [0, 10, -1, 0, 0]),
        (START + 5000, 10, 1, [1, 0, 0, 1000, 0]),
    ];
    for Store { mut wire, .. } in Store::both() {
        for (now, cost, count, reply) in cases {
            let call = call(&ten, now, cost, count);
            assert_eq!(wire.reply(&call), reply, "{count} of {cost} at {now}");
        }
    }
}

#[test]
fn several_limits_are_charged_all_or_none_and_the_one_that_bound_is_named() {
    let limits = [limit(10, 10, 1000), limit(15, 1, 60_000), limit(100, 1, 1)];
    let cases = [
        (START, 1, 4, [4, 6, 0, 400, 0]),
        (START + 1000, 1, 8, [8, 2, 0, 800, 0]),
        (START + 2000, 1, 8, [3, 0, 58_000, 898_000, 1]),
        (START + 2000, 1, 1, [0, 0, 58_000, 898_000, 1]),
        (START + 60_000, 12, 1, [0, 10, -1, 0, 0]),
        (START + 60_000, 1, 1, [1, 0, 0, 900_000, 1]),
    ];
    for Store { mut wire, .. } in Store::both() {
        for (now, cost, count, reply) in cases {
            assert_eq!(wire.reply(&call(&limits, now, cost, count)), reply, "{count} at {now}");
        }
    }
}

#[test]
fn two_clocks_five_seconds_apart_admit_ten_of_fifteen_where_the_naive_script_admits_all() {
    for Store { mut wire, .. } in Store::both() {
        let (mut ours, mut naive) = (0, 0);
        for i in 0..15 {
            let now = START + if i % 2 == 0 { 5000 } else { 0 };
            ours += wire.reply(&call(&[limit(10, 1, 1000)], now, 1, 1))[0];
            naive += wire.integer(&["EVAL", NAIVE, "1", "naive", "10", "0.001", &now.to_string()]);
        }
        assert_eq!((ours, naive), (10, 15));
    }
}

#[test]
fn an_impatient_caller_at_one_a_second_gets_ten_in_ten_seconds() {
    let second = [limit(1, 1, 1000)];
    for Store { mut wire, .. } in Store::both() {
        let granted: i64 = (0..100).map(|i| wire.reply(&call(&second, START + i * 100, 1, 1))[0]).sum();
        assert_eq!(granted, 10);
    }
}

#[test]
fn no_fraction_is_lost_by_charging_at_odd_times() {
    let decade = 315_576_000_000;
    let cases = [
        // the limit, and the odd step between two charges
        (limit(20_000, 1, decade), 777_777_777_777),
        (limit(20_000, 1, decade), 10_000_000_019),
        (limit(9_000_000_000_000, 1_000_000, 1000), 17),
        (limit(9_000_000_000, 1_000_003, 1000), 1),
        (limit(1000, 7, 1000), 13),
        (limit(1_000_000, 999_983, 86_399_999), 8641),
    ];
    for Store { mut wire, .. } in Store::both() {
        for (limit, step) in cases {
            wire.text(&["FLUSHDB"]);
            let all = i64::from(u32::MAX);
            let (mut taken, mut now) = (0_u128, START);
            for _ in 0..500 {
                taken += wire.reply(&call(&[limit], now, 1, all))[0] as u128;
                now += step;
            }
            loop {
                match wire.reply(&call(&[limit], now, 1, all))[0] {
                    0 => break,
                    granted => taken += granted as u128,
                }
            }
            let brought = u128::from(now - START) * model::rate(&limit);
            assert_eq!(taken, (model::full(&limit) + brought) / model::one_token(&limit));
        }
    }
}

#[test]
fn a_denial_touches_neither_the_fields_nor_the_expiry_nor_the_data_set() {
    let limits = [limit(2, 1, 3_600_000), limit(1000, 7, 1_000_000)];
    for Store { mut wire, .. } in Store::both() {
        assert_eq!(five(&wire.run(&call(&limits, START, 2, 1)))[0], 1);
        let state = |wire: &mut Wire| {
            let stored =
                [key(0), key(1)].map(|key| (wire.command(&["DUMP", &key]), wire.integer(&["PEXPIRETIME", &key])));
            (stored, changes(wire))
        };
        let before = state(&mut wire);
        for (now, cost) in [(START, 1), (START + 99_999, 1), (START - 5000, 2), (START + 1, 3)] {
            assert_eq!(five(&wire.run(&call(&limits, now, cost, 7)))[0], 0);
        }
        assert_eq!(state(&mut wire), before);
    }
}

#[test]
fn a_look_takes_nothing_and_tells_when_one_charge_would_fit() {
    let limits = [limit(3, 1, 1000)];
    for Store { mut wire, .. } in Store::both() {
        let look = |wire: &mut Wire, now: u64, cost: &str| {
            let words = ["EVAL", SOURCE, "1", &key(0), "3", "1", "1000", &now.to_string(), cost, "0"];
            five(&wire.command(&words))
        };
        assert_eq!(look(&mut wire, START, "1"), [0, 3, 0, 0, 0], "full");
        assert_eq!(wire.integer(&["EXISTS", &key(0)]), 0);
        assert_eq!(wire.reply(&call(&limits, START, 1, 3))[0], 3);
        let before = (wire.fields(&key(0)), changes(&mut wire));
        assert_eq!(look(&mut wire, START + 400, "1"), [0, 0, 600, 2600, 0]);
        assert_eq!(look(&mut wire, START + 1000, "1"), [0, 1, 0, 2000, 0]);
        assert_eq!(look(&mut wire, START + 1000, "2"), [0, 1, 1000, 2000, 0]);
        assert_eq!(look(&mut wire, START, "4"), [0, 0, -1, 3000, 0], "never");
        assert_eq!((wire.fields(&key(0)), changes(&mut wire)), before);
    }
}

#[test]
fn what_is_given_back_can_be_charged_again_and_never_fills_a_bucket_over_its_capacity() {
    let two = [limit(10, 1, 100), limit(20, 1, 100)];
    for Store { mut wire, .. } in Store::both() {
        // A bucket that has no key is full, and stays without one.
        assert_eq!(wire.reply(&call(&two, START, 3, -1)), [1, 10, 0, 0, 0]);
        assert_eq!(wire.integer(&["EXISTS", &key(0), &key(1)]), 0);

        assert_eq!(wire.reply(&call(&two, START, 2, 5)), [5, 0, 0, 1000, 0]);
        assert_eq!(wire.reply(&call(&two, START + 50, 2, -2)), [2, 4, 0, 550, 0]);
        assert_eq!(wire.fields(&key(0)), ["4.5", "1700000000050"].map(|it| Some(it.into())));
        wire.command(&["DEL", &key(1)]);
        assert_eq!(wire.reply(&call(&two, START + 50, MAX_UNITS, -4_000_000_000))[1], 10);
        assert_eq!(wire.fields(&key(0))[0].as_deref(), Some("10"));
        assert_eq!(wire.integer(&["EXISTS", &key(1)]), 0);

        // A full bucket keeps its time for a while, so that a clock behind it is not paid that time again.
        assert_eq!(wire.reply(&call(&two[..1], START, 10, 1)), [1, 0, 0, 1050, 0]);
        assert_eq!(wire.reply(&call(&two[..1], START + 50, 1, 1)), [0, 0, 100, 1000, 0]);
    }
}

#[test]
fn a_lower_capacity_cuts_at_the_next_call_and_a_raised_one_grows_from_where_the_bucket_is() {
    for Store { mut wire, .. } in Store::both() {
        assert_eq!(wire.reply(&call(&[limit(1000, 1, 100)], START, 1, 1))[1], 999);
        assert_eq!(wire.reply(&call(&[limit(10, 1, 100)], START, 1, 99)), [10, 0, 100, 1000, 0]);
        let raised = [limit(1000, 1, 100)];
        assert_eq!(wire.reply(&call(&raised, START + 2000, 1, 1)), [1, 19, 0, 98_100, 0]);
        // The refill changes on an empty bucket: what it brings is counted at the refill of the caller.
        assert_eq!(wire.reply(&call(&raised, START + 2000, 1, 99))[0], 19);
        let hourly = [limit(1000, 1, 3_600_000)];
        assert_eq!(wire.reply(&call(&hourly, START + 2001, 1, 1))[..3], [0, 0, 3_599_999]);
    }
}

#[test]
fn what_another_limiter_has_stored_is_understood_and_is_never_more_than_the_capacity() {
    let ten = [limit(10, 1, 100)];
    let at = START.to_string();
    let cases = [
        // tokens, ts -> the reply to a charge of one
        ("7", at.as_str(), [1, 6, 0, 400, 0]),
        ("7.5", &at, [1, 6, 0, 350, 0]),
        ("7.", &at, [1, 6, 0, 400, 0]),
        ("0007.50", &at, [1, 6, 0, 350, 0]),
        ("9.999999999999998", &at, [1, 9, 0, 100, 0]),
        ("0.99999999999999999999", &at, [1, 0, 0, 1000, 0]),
        ("0.989", &at, [0, 0, 2, 902, 0]),
        ("1e-05", &at, [0, 0, 100, 1000, 0]),
        ("7.5e0", &at, [1, 6, 0, 350, 0]),
        ("-0.5", &at, [0, 0, 100, 1000, 0]),
        ("-1e300", &at, [0, 0, 100, 1000, 0]),
        ("10.5", &at, [1, 9, 0, 100, 0]),
        ("1e+16", &at, [1, 9, 0, 100, 0]),
        ("99999999999999999999999999", &at, [1, 9, 0, 100, 0]),
        ("inf", &at, [1, 9, 0, 100, 0]),
        // A fraction of a millisecond is waited out, in the future as well.
        ("0", "1699999999900.5", [0, 0, 1, 901, 0]),
        ("5", "1700000000000.5", [1, 4, 0, 601, 0]),
        ("0", "1699999999", [1, 9, 0, 100, 0]),
        ("0", "-1e300", [1, 9, 0, 100, 0]),
        ("0", "1.7e12", [0, 0, 100, 1000, 0]),
        ("1", "1700000005000", [1, 0, 0, 6000, 0]),
        ("1", "1e300", [1, 0, 0, 9_005_499_254_741_991, 0]),
    ];
    for Store { mut wire, .. } in Store::both() {
        for (tokens, ts, reply) in cases {
            set(&mut wire, tokens, ts);
            assert_eq!(wire.reply(&call(&ten, START, 1, 1)), reply, "{tokens} at {ts}");
            set(&mut wire, tokens, ts);
            let [granted, ..] = wire.reply(&call(&ten, START, 1, 1000));
            assert!(granted <= 10, "{tokens} at {ts} admits {granted}");
            if granted > 0 {
                let plain = |field: &Option<String>| {
                    let text = field.as_deref().unwrap();
                    text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')
                };
                assert!(wire.fields(&key(0)).iter().all(plain), "{tokens} at {ts}");
            }
        }
        // A hash of something else holds no bucket yet.
        wire.command(&["DEL", &key(0)]);
        wire.command(&["HSET", &key(0), "owner", "someone"]);
        assert_eq!(wire.reply(&call(&ten, START, 1, 1)), [1, 9, 0, 100, 0]);
    }
}

#[test]
fn no_time_is_longer_than_can_be_counted() {
    let decade = [limit(28_542, 1, 315_576_000_000)];
    let most = MAX_UNITS.cast_signed();
    for Store { mut wire, .. } in Store::both() {
        set(&mut wire, "0", "1e300");
        assert_eq!(wire.reply(&call(&decade, START, 10, 1)), [0, 0, most, most, 0]);
        set(&mut wire, "10", "1e300");
        assert_eq!(wire.reply(&call(&decade, START, 10, 1)), [1, 0, 0, most, 0]);
    }
}

#[test]
fn a_key_that_is_no_bucket_is_an_error_of_its_type_and_nothing_is_charged() {
    let two = [limit(10, 1, 100), limit(10, 1, 100)];
    let no_buckets: [&[&str]; 10] = [
        &["SET", "{b}:1", "7"],
        &["RPUSH", "{b}:1", "7"],
        &["HSET", "{b}:1", "tokens", "seven", "ts", "1"],
        &["HSET", "{b}:1", "tokens", "7,5", "ts", "1"],
        &["HSET", "{b}:1", "tokens", "", "ts", "1"],
        &["HSET", "{b}:1", "tokens", "nan", "ts", "1"],
        &["HSET", "{b}:1", "tokens", "7", "ts", "now"],
        &["HSET", "{b}:1", "tokens", "7", "ts", "-nan"],
        &["HSET", "{b}:1", "tokens", "0"],
        &["HSET", "{b}:1", "ts", "1"],
    ];
    for Store { mut wire, .. } in Store::both() {
        for words in no_buckets {
            wire.text(&["FLUSHDB"]);
            wire.command(words);
            for count in [1, -1] {
                assert_eq!(wire.error(&call(&two, START, 1, count)), "WRONGTYPE", "{words:?}");
            }
            assert_eq!(wire.integer(&["EXISTS", &key(0)]), 0, "{words:?}");
        }
    }
}

#[test]
fn a_limiter_in_an_application_shares_the_bucket_and_together_they_keep_to_the_limit() {
    for Store { mut wire, .. } in Store::both() {
        let mut admitted = 0;
        for i in 0..600_u64 {
            let now = START + i * 7;
            admitted += if i % 3 == 0 {
                wire.reply(&call(&[limit(10, 3, 1000)], now, 1, 1))[0]
            } else {
                wire.integer(&["EVAL", NAIVE, "1", &key(0), "10", "0.003", &now.to_string()])
            };
        }
        // Ten, and three a second for 4.193 s; the other one's binary fractions may cost the last of them.
        assert!((21..=22).contains(&admitted), "{admitted}");
    }
}

#[test]
fn a_store_that_cannot_be_written_answers_an_error_and_leaves_every_bucket_as_it_was() {
    let two = [limit(10, 1, 100), limit(10, 1, 100)];
    for Store { mut wire, .. } in Store::both() {
        wire.text(&["CONFIG", "SET", "maxmemory", "1"]);
        assert_eq!(wire.error(&call(&two, START, 1, 1)), "OOM");
        wire.text(&["CONFIG", "SET", "maxmemory", "0"]);
        wire.text(&["REPLICAOF", "127.0.0.1", "1"]);
        assert_eq!(wire.error(&call(&two, START, 1, 1)), "READONLY");
        wire.text(&["REPLICAOF", "NO", "ONE"]);
        assert_eq!(wire.integer(&["DBSIZE"]), 0);
    }
}

#[test]
fn a_script_that_is_unknown_is_an_error_until_it_has_been_sent_whole() {
    let call = call(&[limit(10, 1, 100)], START, 1, 1);
    for Store { mut wire, .. } in Store::both() {
        wire.text(&["SCRIPT", "FLUSH"]);
        assert_eq!(wire.error(&call), "NOSCRIPT");
        let mut bytes = bytes::BytesMut::new();
        call.eval(&mut bytes);
        assert_eq!(five(&wire.exchange(&bytes, 1)[0]), [1, 9, 0, 100, 0]);
        assert_eq!(wire.reply(&call), [1, 8, 0, 200, 0]);
    }
}

#[test]
fn a_user_needs_six_commands_on_the_keys_and_no_more() {
    // What a user of the filter has to be granted. Without any one of the six, the answer is an error. (A user who
    // is to select another database needs +select as well.)
    const NEEDED: [&str; 6] = ["+evalsha", "+eval", "+hmget", "+hset", "+pexpire", "+time"];
    let call = call(&[limit(10, 1, 100)], None, 1, 1);
    for Store { server, mut wire } in Store::both() {
        let mut answers = |granted: &[&str]| {
            let user = ["ACL", "SETUSER", "filter", "reset", "on", ">secret", "~{b}:*"];
            assert_eq!(wire.text(&[&user, granted].concat()), "OK");
            let mut filter = Wire::open(server.port());
            assert_eq!(filter.text(&["AUTH", "filter", "secret"]), "OK");
            let mut bytes = bytes::BytesMut::new();
            call.evalsha(&mut bytes);
            call.eval(&mut bytes);
            filter.exchange(&bytes, 2)
        };
        for reply in answers(&NEEDED) {
            assert!(matches!(reply, BytesFrame::Array(_)), "{reply:?}");
        }
        for without in NEEDED {
            let granted: Vec<_> = NEEDED.into_iter().filter(|it| *it != without).collect();
            let replies = answers(&granted);
            // NOPERM for the call itself; for a command inside the script both servers say ERR, each with a text of
            // its own.
            let refused = |reply: &BytesFrame| match reply {
                BytesFrame::Error(text) => {
                    ["NOPERM", "can't run this command", "ACL failure"].iter().any(|sign| text.contains(sign))
                }
                _ => false,
            };
            assert!(replies.iter().any(refused), "without {without}: {replies:?}");
        }
    }
}

#[test]
fn a_bucket_is_kept_in_the_compact_encoding_however_many_digits_it_has() {
    for Store { mut wire, .. } in Store::both() {
        for limit in [limit(9_000_000_000_000, 7, 1000), limit(28_542, 1, 315_576_000_000)] {
            wire.text(&["FLUSHDB"]);
            assert_eq!(wire.reply(&call(&[limit], START, 1, 1))[0], 1);
            assert_eq!(wire.reply(&call(&[limit], START + 1, 1, 1))[0], 1);
            assert!(wire.fields(&key(0))[0].as_deref().unwrap().contains('.'));
            assert_eq!(wire.text(&["OBJECT", "ENCODING", &key(0)]), "listpack");
        }
    }
}

#[test]
fn the_servers_own_time_is_used_where_the_caller_names_none() {
    let fast = [limit(1, 1, 40)];
    for Store { mut wire, .. } in Store::both() {
        let ts = |wire: &mut Wire| wire.fields(&key(0))[1].as_deref().unwrap().parse::<u64>().unwrap();
        let time = |wire: &mut Wire| match wire.command(&["TIME"]) {
            BytesFrame::Array(parts) => match &parts[..] {
                [BytesFrame::BulkString(seconds), BytesFrame::BulkString(micros)] => {
                    let number = |bytes: &[u8]| -> u64 { std::str::from_utf8(bytes).unwrap().parse().unwrap() };
                    number(seconds) * 1000 + number(micros) / 1000
                }
                parts => panic!("{parts:?}"),
            },
            reply => panic!("{reply:?}"),
        };
        let before = time(&mut wire);
        assert_eq!(wire.reply(&call(&fast, None, 1, 1)), [1, 0, 0, 40, 0]);
        let first = ts(&mut wire);
        assert!((before..=time(&mut wire)).contains(&first));
        // Polled without a pause, the next comes through on the fortieth millisecond or, on a busy machine, later.
        let mut denied = 0;
        wait_until("the next token is there", || match wire.outcome(&call(&fast, None, 1, 1)) {
            Outcome::Granted { .. } => true,
            Outcome::Denied { retry_after, .. } => {
                denied += 1;
                assert!(retry_after.as_millis() <= 40);
                false
            }
            outcome @ Outcome::Never { .. } => panic!("{outcome:?}"),
        });
        assert!(denied > 0 || ts(&mut wire) > first + 40);
        assert!(ts(&mut wire) >= first + 40);
    }
}

#[test]
fn a_key_is_gone_soon_after_its_bucket_is_full_and_not_before() {
    let fast = [limit(100, 1, 1)];
    for Store { mut wire, .. } in Store::both() {
        assert_eq!(five(&wire.run(&call(&fast, None, 1, 100))), [100, 0, 0, 100, 0]);
        let written: i64 = wire.fields(&key(0))[1].as_deref().unwrap().parse().unwrap();
        let expires = wire.integer(&["PEXPIRETIME", &key(0)]);
        assert!(expires >= written + 100 + 1000, "{expires} after {written}");
        wait_until("the key is gone", || wire.integer(&["EXISTS", &key(0)]) == 0);
        assert_eq!(five(&wire.run(&call(&fast, None, 1, 1))), [1, 99, 0, 1, 0]);
    }
}

#[test]
fn a_call_without_limits_is_an_error_and_no_verdict() {
    for Store { mut wire, .. } in Store::both() {
        let reply = wire.run(&call(&[], START, 1, 1));
        Outcome::from_reply(&reply, std::num::NonZeroU32::MIN, 0).unwrap_err();
    }
}

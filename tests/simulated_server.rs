//! The server of the simulation is like a real one.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod support;

#[allow(dead_code)]
#[path = "simulation/server.rs"]
mod simulated;

use meshquota::quota::{Capacity, Cost, Limit, Refill};
use meshquota::script::{Call, SOURCE};
use redis_protocol::resp2::types::Resp2Frame;

use support::server::{Kind, Server as Real};

#[test]
fn the_same_calls_leave_the_same_replies_and_the_same_fields() {
    const START: u64 = 1_700_000_000_000;
    let mut random = fastrand::Rng::new();
    for kind in Kind::ALL {
        let (real, mut simulated) = (Real::start(kind, &[]), simulated::Server::new(SOURCE));
        let mut connection = real.client();
        let mut now = START;
        // Keys live as long as a run: their time is the caller's, and passes faster than the servers'.
        simulated.set_time(0, START * 1000);
        for number in 0..3000 {
            now = (now + random.u64(0..3000)).saturating_sub(random.u64(0..1500));
            let key = format!("k{}", random.u8(0..5));
            let limits = (0..random.usize(1..=3)).map(|place| {
                let refill = Refill::new(random.u64(1..50), [1, 7, 1000, 60_000][random.usize(..4)]).unwrap();
                let limit = Limit::new(Capacity::new(random.u64(1..30)).unwrap(), refill).unwrap();
                (format!("{{{key}}}:{place}"), limit)
            });
            let limits = limits.collect::<Vec<_>>();
            let cost = Cost::new(random.u64(1..6)).unwrap();
            let count = std::num::NonZeroU32::new(random.u32(1..4)).unwrap();
            let make = if random.u8(..) < 40 { Call::give_back } else { Call::charge };
            let call = make(limits.iter().map(|(key, limit)| (key, *limit)), cost, count, Some(now));
            let mut bytes = bytes::BytesMut::new();
            call.eval(&mut bytes);
            let words = redis_protocol::resp2::decode::decode_bytes_mut(&mut bytes).unwrap().unwrap().0;
            let redis_protocol::resp2::types::BytesFrame::Array(words) = words else { panic!("a command") };
            let words = words.iter().map(|word| word.as_str().unwrap().to_owned()).collect::<Vec<_>>();
            let mut command = redis::cmd(&words[0]);
            command.arg(&words[1..]);
            let expected: Vec<i64> = command.query(&mut connection).unwrap();
            let reply = simulated.run(0, &words[2..]);
            let text = expected.iter().map(|number| format!(":{number}\r\n")).collect::<String>();
            assert_eq!(reply, format!("*{}\r\n{text}", expected.len()), "call {number}: {words:?}");
            for (key, _) in &limits {
                let fields: std::collections::BTreeMap<String, String> =
                    redis::cmd("HGETALL").arg(key).query(&mut connection).unwrap();
                assert_eq!(simulated.fields(key), fields, "call {number}: {words:?}");
                let life: i64 = redis::cmd("PTTL").arg(key).query(&mut connection).unwrap();
                if let (Some(simulated), 0..) = (simulated.life_ms(key), life) {
                    // The real server's time passes meanwhile.
                    let passed = simulated.abs_diff(life as u64);
                    assert!(passed < 10_000, "call {number}: {key} lives for {life} ms, and simulated for {simulated}");
                }
                let _: i64 = redis::cmd("PERSIST").arg(key).query(&mut connection).unwrap();
                simulated.persist(key);
            }
        }
    }
}

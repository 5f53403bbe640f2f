//! Whatever comes from outside is read without a panic, and what is made of it keeps its promises: configurations, headers and
//! addresses, and the bytes of a server.
//!
//! Inputs are mutations of right ones, which reach further in than bytes by chance. Each run has its own seed, which a
//! failure names; FUZZ_SEED repeats it. `make fuzz` goes on for longer (FUZZ_CASES).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::cell::RefCell;
use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use fastrand::Rng;
use meshquota::client_ip::{ClientIp, Trust};
use meshquota::condition::HostPattern;
use meshquota::config::Config;
use meshquota::exchange::{Effect, Exchange, MAX_REPLY, Replies, Settings};
use meshquota::identity::{Identity, IfMissing, LONGEST_PART, Part};
use meshquota::path;
use meshquota::quota::{Capacity, Cost, Limit, Refill};
use meshquota::request::{Facts, Request, host};
use meshquota::rule;
use meshquota::script::Call;

/// Cases of one test; those of all of them are two and a half million.
const CASES: usize = 500_000;

/// Runs a check on as many mutations of the seeds as are wanted.
fn fuzz(seeds: &[&[u8]], check: impl Fn(&[u8])) {
    let cases = std::env::var("FUZZ_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(CASES);
    let seed = std::env::var("FUZZ_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(|| fastrand::u64(..));
    let mut random = Rng::with_seed(seed);
    let mut input = Vec::new();
    for case in 0..cases {
        input.clear();
        input.extend_from_slice(seeds[random.usize(..seeds.len())]);
        for _ in 0..random.usize(0..6) {
            mutate(&mut input, seeds, &mut random);
        }
        if catch_unwind(AssertUnwindSafe(|| check(&input))).is_err() {
            panic!("case {case} of FUZZ_SEED={seed}: {:?}", String::from_utf8_lossy(&input));
        }
    }
}

/// Changes an input a little.
fn mutate(input: &mut Vec<u8>, seeds: &[&[u8]], random: &mut Rng) {
    const TELLING: [&[u8]; 24] = [
        b"",
        b"\"",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"%",
        b"%2",
        b"/",
        b"//",
        b"/../",
        b"?",
        b"=",
        b";",
        b"\r\n",
        b"\0",
        b"\xff",
        b"-1",
        b"1e308",
        b"99999999999999999999",
        b"null",
        b"\xc3\xa9",
    ];
    let place = random.usize(..=input.len());
    let end = (place + random.usize(0..12)).min(input.len());
    match random.u8(0..7) {
        0 => drop(input.splice(place..end, [])),
        1 => drop(input.splice(place..place, [random.u8(..)])),
        2 if place < input.len() => input[place] ^= 1 << random.u8(0..8),
        3 => {
            let piece = input[place..end].to_vec();
            let times = if random.u8(..) == 0 { 500 } else { 1 };
            drop(input.splice(place..place, piece.repeat(times)));
        }
        4 => {
            let other = seeds[random.usize(..seeds.len())];
            let from = random.usize(..=other.len());
            let to = (from + random.usize(0..20)).min(other.len());
            drop(input.splice(place..end, other[from..to].iter().copied()));
        }
        5 => input.truncate(place),
        _ => drop(input.splice(place..end, TELLING[random.usize(..TELLING.len())].iter().copied())),
    }
}

#[test]
fn any_configuration_is_taken_or_refused_in_words() {
    let seeds: &[&[u8]] = &[
        br#"{"rules": [{"name": "per-ip", "limits": [{"capacity": 100, "refill": "10/s"}]}]}"#,
        br#"{"redis": {"cluster": "c", "timeout": "50ms", "password": "a"}, "rules": [{"name": "a", "limits": [{"refill": "1/15s"}]}]}"#,
        br#"{"rules": [{"name": "a", "match": {"path_prefix": "/a", "hosts": ["*.b"]}, "limits": [{"refill": "1/h"}], "cost": 2}]}"#,
        br#"{"rules": [{"name": "a", "key": [{"header": "x"}, "path"], "limits": [{"refill": "1/s"}], "overrides": [{"values": [["a", "/b"]], "unlimited": true}]}]}"#,
        br#"{"client_ip": {"trusted_proxies": ["10.0.0.0/8"]}, "rules": [{"name": "a", "unless": [{"path_regex": "/[a-z]+"}], "limits": [{"refill": "1/s"}]}]}"#,
        br#"{"response": {"set": {"x-a": "b"}, "headers": "ietf"}, "rules": [{"name": "a", "limits": [{"refill": "1/s"}]}]}"#,
    ];
    let taken = RefCell::new(0);
    fuzz(seeds, |input| match Config::from_json(input) {
        Ok(config) => {
            assert!(!config.rules.is_empty() && config.rules.iter().all(|rule| !rule.limits().is_empty()));
            let told = Told { value: input.to_vec() };
            rule::apply(&config, &told);
            *taken.borrow_mut() += 1;
        }
        Err(errors) => {
            let text = errors.to_string();
            assert!(!text.is_empty());
            for line in text.lines() {
                assert!(line.len() < 2000 && line.chars().all(|c| !c.is_control()), "{line}");
            }
        }
    });
    assert!(taken.into_inner() > 0, "nothing is ever taken");
}

/// A request that says the same everywhere.
struct Told {
    value: Vec<u8>,
}

impl Facts for Told {
    fn header(&self, _name: &str) -> Option<Vec<u8>> {
        Some(self.value.clone())
    }

    fn property(&self, _path: &[&str]) -> Option<Vec<u8>> {
        Some(self.value.clone())
    }
}

#[test]
fn any_header_is_part_of_a_bounded_printable_identity() {
    let seeds: &[&[u8]] = &[
        b"/api/orders?token=s%65cret&x=1",
        b"//a/./b/../%6Cogin#x",
        b"session=abc; theme=dark, session=def",
        b"Example.COM:8080",
        b"u@[2001:db8::1]:443",
        b"  7 ",
        b"Bearer abc.def",
        b"a,b, c",
        b"*",
    ];
    let name = || "session".to_owned();
    let parts = vec![
        Part::ClientIp,
        Part::Method,
        Part::Host,
        Part::Path,
        Part::Route,
        Part::Header(name()),
        Part::Cookie(name()),
        Part::Query(name()),
        Part::Property(vec![name()]),
    ];
    let count = parts.len();
    let identity = Identity { parts, if_missing: IfMissing::Share };
    let client_ip = ClientIp::default();
    fuzz(seeds, |input| {
        let normal = path::normal(input);
        assert_eq!(path::normal(normal.as_bytes()), normal, "the normal form of a path is its own");
        assert!(normal.bytes().all(|byte| byte.is_ascii_graphic()));
        assert!(!normal.starts_with('/') || !normal.contains("//"), "{normal}");
        assert!(normal.len() <= 3 * input.len() + 1);
        let told = Told { value: input.to_vec() };
        let text = identity.of(&Request::new(&told, &client_ip), &client_ip).unwrap();
        assert!(text.len() <= count * (LONGEST_PART + 1) && text.bytes().all(|byte| byte.is_ascii_graphic()));
        assert!(!text.contains(['{', '}']) && text.matches('|').count() == count - 1, "{text}");
        let host = host(input);
        assert!(host.bytes().all(|byte| byte.is_ascii_graphic() && !byte.is_ascii_uppercase()));
        let _ = HostPattern::new(&String::from_utf8_lossy(input));
    });
}

#[test]
fn any_forwarded_address_is_one_or_none() {
    let seeds: &[&[u8]] = &[
        b"203.0.113.7, 10.1.2.3",
        b"[2001:db8::1]:443,192.0.2.1:80",
        b"::ffff:192.0.2.1",
        b"fe80::1%eth0, unknown, _hidden",
        b"10.0.0.1,10.0.0.2,10.0.0.3",
        b"192.0.2.1:4711",
    ];
    let networks = ["10.0.0.0/8", "2001:db8::/32"].iter().filter_map(|text| Trust::network(text)).collect();
    let trusts = [Trust::Proxy, Trust::Hops(std::num::NonZeroUsize::new(2).unwrap()), Trust::Networks(networks)];
    let clients = trusts.map(|trust| ClientIp { trust, ..ClientIp::default() });
    fuzz(seeds, |input| {
        for client_ip in &clients {
            let address = client_ip.address(|| b"198.51.100.1:1".to_vec(), Some(input));
            assert!(address.is_some(), "the peer is there where nothing else is");
            if let Some(client) = address.and_then(|address| client_ip.identity(address)) {
                let text = client.to_string();
                assert!(
                    text.len() <= 43 && text.bytes().all(|byte| byte.is_ascii_hexdigit() || b".:/".contains(&byte))
                );
            }
            let _ = client_ip.address(|| input.to_vec(), None);
        }
        let _ = Trust::network(&String::from_utf8_lossy(input));
    });
}

#[test]
fn any_bytes_of_a_server_are_replies_or_a_violation() {
    let seeds: &[&[u8]] = &[
        b"*4\r\n:1\r\n:9\r\n:0\r\n:1000\r\n",
        b"-NOSCRIPT No matching script\r\n+OK\r\n",
        b"$5\r\nhello\r\n$-1\r\n*-1\r\n",
        b"*2\r\n*1\r\n:1\r\n$3\r\nabc\r\n",
        b"-READONLY You can't write\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ];
    fuzz(seeds, |input| {
        let heard = |pieces: &[&[u8]]| {
            let mut replies = Replies::default();
            let mut heard = Vec::new();
            for piece in pieces {
                replies.push(piece);
                loop {
                    match replies.take() {
                        Ok(Some(reply)) => heard.push(format!("{reply:?}")),
                        Ok(None) => break,
                        Err(violation) => {
                            heard.push(format!("{violation:?}"));
                            return heard;
                        }
                    }
                }
            }
            heard
        };
        let whole = heard(&[input]);
        assert!(whole.len() <= input.len());
        // However they are cut, they say the same.
        let (first, second) = input.split_at(input.len() / 2);
        assert_eq!(heard(&[first, second]), whole);
    });
}

#[test]
fn any_bytes_of_a_server_answer_each_call_at_most_once_and_pile_up_nowhere() {
    const CALLS: usize = 5;
    let seeds: &[&[u8]] = &[
        b"*4\r\n:1\r\n:9\r\n:0\r\n:1000\r\n",
        b"*4\r\n:0\r\n:0\r\n:5\r\n:5\r\n*4\r\n:1\r\n:9\r\n:0\r\n:1000\r\n+OK\r\n",
        b"-NOSCRIPT No matching script\r\n*4\r\n:1\r\n:9\r\n:0\r\n:1000\r\n-NOSCRIPT No\r\n",
        b"-READONLY You can't write\r\n-LOADING Redis is loading\r\n",
        b"$16000\r\nhello",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ];
    let limit = Limit::new(Capacity::new(10).unwrap(), Refill::new(1, 1000).unwrap()).unwrap();
    let (begin, one) = (Instant::now(), Cost::new(1).unwrap());
    let after = |ms| begin + Duration::from_millis(ms);
    fuzz(seeds, |input| {
        // What is done between the pieces, and where they end, is taken from the input as well.
        let mut choice = input.iter().fold(1_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(*byte)));
        let mut choose = |below: u32| {
            choice = choice.wrapping_mul(1_103_515_245).wrapping_add(12_345);
            (choice >> 16) % below
        };
        let timeout = Duration::from_millis(50);
        let greeting = Vec::new();
        let mut exchange = Exchange::new(Settings { timeout, max_in_flight: CALLS, greeting, seed: 1 }, begin);
        let (mut now, mut rest, mut next, mut refused) = (0, input, 0_usize, 0_usize);
        let mut answered = [false; 64];
        exchange.tick(begin);
        exchange.connected(begin);
        while !rest.is_empty() && next < answered.len() {
            now += u64::from(choose(8));
            match choose(4) {
                0 => exchange.tick(after(now)),
                1 => {
                    let call = Call::charge([("quota:{a:1}:0", limit)], one, NonZeroU32::MIN, None);
                    if exchange.call(after(now), after(now), next, call).is_err() {
                        refused += 1;
                        answered[next] = true;
                    }
                    next += 1;
                }
                2 => exchange.connected(after(now)),
                _ => {
                    let (piece, other) = rest.split_at((choose(40) as usize + 1).min(rest.len()));
                    exchange.received(after(now), piece);
                    rest = other;
                }
            }
            assert!(exchange.in_flight() <= CALLS);
            while let Some(effect) = exchange.next_effect() {
                match effect {
                    Effect::Answer { who, .. } => {
                        assert!(!std::mem::replace(&mut answered[who], true), "{who} is answered twice");
                    }
                    // As many calls as there were, each with the whole script.
                    Effect::Send(bytes) => assert!(bytes.len() <= CALLS * 2 * MAX_REPLY),
                    Effect::Open | Effect::Close => {}
                }
            }
        }
        exchange.closed(after(now), "the end");
        while let Some(effect) = exchange.next_effect() {
            if let Effect::Answer { who, .. } = effect {
                assert!(!std::mem::replace(&mut answered[who], true), "{who} is answered twice");
            }
        }
        let open = answered[..next].iter().filter(|answered| !**answered).count();
        assert_eq!(open, exchange.in_flight(), "{refused} of {next} were refused");
    });
}

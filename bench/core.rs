//! What the core takes for a request, without a proxy and without Redis: `cargo bench`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

use std::hint::black_box;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use meshquota::config::Config;
use meshquota::exchange::Replies;
use meshquota::limiter::{Admission, Effect, Limiter};
use meshquota::request::Facts;
use meshquota::response;
use meshquota::rule;
use meshquota::script::Outcome;

const RULE: &str = r#"{"name": "per-ip", "limits": [{"capacity": 100, "refill": "10/s"}]}"#;
const OTHER: &str = r#"{"name": "per-key", "key": [{"header": "x-api-key"}], "limits": [{"refill": "10/s"}]}"#;
const SCOPED: &str = r#"{"name": "login", "match": {"path": "/login"}, "limits": [{"refill": "10/s"}]}"#;
const GRANTED: &[u8] = b"*4\r\n:1\r\n:99\r\n:0\r\n:100\r\n";
const DENIED: &[u8] = b"*4\r\n:0\r\n:0\r\n:100\r\n:10000\r\n";

/// A request of one of many callers.
struct Caller(u32);

impl Facts for Caller {
    fn header(&self, name: &str) -> Option<Vec<u8>> {
        match name {
            ":path" => Some(b"/api/items?id=17".to_vec()),
            "x-api-key" => Some(self.0.to_string().into_bytes()),
            _ => None,
        }
    }

    fn property(&self, path: &[&str]) -> Option<Vec<u8>> {
        let [_, a, b, c] = self.0.to_be_bytes();
        (path == ["source", "address"]).then(|| format!("10.{a}.{b}.{c}:40000").into_bytes())
    }
}

fn config(rules: &[&str]) -> Config {
    Config::from_json(format!(r#"{{"rules": [{}]}}"#, rules.join(", ")).as_bytes()).unwrap()
}

/// A limiter whose connection stands.
fn limiter(rules: &[&str], now: Instant) -> Limiter {
    let mut limiter = Limiter::new(config(rules), 1, now);
    limiter.tick(now);
    assert_eq!(limiter.next_effect(now), Some(Effect::Open));
    limiter.connected(now);
    limiter
}

/// One request, from what the proxy says of it to the headers of its response.
fn decide(limiter: &mut Limiter, now: Instant, id: u32, replies: &[u8]) {
    let met = limiter.meets(&Caller(id));
    match limiter.request(now, || 0, id, met) {
        Admission::Decided(decision) => drop(black_box(response::answer(limiter.config(), &decision))),
        Admission::NotLimited => {}
        Admission::Waits => {
            let Some(Effect::Send(bytes)) = limiter.next_effect(now) else { panic!("nothing is sent") };
            black_box(bytes);
            limiter.received(now, replies);
            let Some(Effect::Decide(_, decision)) = limiter.next_effect(now) else { panic!("nothing is decided") };
            black_box(response::answer(limiter.config(), &decision));
        }
    }
    limiter.stats().take();
}

fn requests(criterion: &mut Criterion) {
    let now = Instant::now() + Duration::from_secs(10);
    let cases: [(&str, &[&str], Vec<u8>); 3] = [
        ("a request that no rule meets", &[SCOPED], Vec::new()),
        ("a request that is admitted", &[RULE], GRANTED.to_vec()),
        ("a request that two rules admit", &[RULE, OTHER], GRANTED.repeat(2)),
    ];
    for (name, rules, replies) in cases {
        let (mut limiter, mut id) = (limiter(rules, now), 0_u32);
        criterion.bench_function(name, |bencher| {
            bencher.iter(|| {
                id = id.wrapping_add(1);
                decide(&mut limiter, now, id, &replies);
            });
        });
    }
    let mut limiter = limiter(&[RULE], now);
    decide(&mut limiter, now, 1, DENIED);
    criterion.bench_function("a request whose denial is known", |bencher| {
        bencher.iter(|| decide(&mut limiter, now, 1, DENIED));
    });
}

fn parts(criterion: &mut Criterion) {
    let config = config(&[RULE]);
    criterion.bench_function("rules and keys", |bencher| {
        let mut id = 0_u32;
        bencher.iter(|| {
            id = id.wrapping_add(1);
            rule::apply(&config, &Caller(id))
        });
    });
    criterion.bench_function("a reply", |bencher| {
        let mut replies = Replies::default();
        bencher.iter(|| {
            replies.push(GRANTED);
            let reply = replies.take().unwrap().unwrap();
            Outcome::from_reply(&reply, NonZeroU32::MIN, 1)
        });
    });
}

criterion_group!(benches, requests, parts);
criterion_main!(benches);

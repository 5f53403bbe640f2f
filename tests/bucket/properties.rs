//! What holds for every limit, every clock and every order of calls.

use bytes::BytesMut;
use meshquota::quota::{Capacity, Limit, MAX_PERIOD_MS, MAX_UNITS, Refill};
use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};
use redis_protocol::resp2::types::{BytesFrame, Resp2Frame};

use crate::model::{Answer, Bucket, Model, SLACK, full, one_token, rate};
use crate::store::{START, Store, array, call, encode, fields, five, integer, key};
use crate::support::server::Kind;

/// The script writes 15 decimal places.
const PLACES: u128 = 10_u128.pow(15);

/// Runs a property so many times on Redis and so many times on Valkey, or as many as PROPTEST_CASES says.
fn holds<S: Strategy>(cases: u32, strategy: &S, test: impl Fn(&mut Store, S::Value) -> TestCaseResult) {
    let config = match std::env::var_os("PROPTEST_CASES") {
        Some(_) => ProptestConfig::default(),
        None => ProptestConfig::with_cases(cases),
    };
    let config = ProptestConfig { failure_persistence: None, max_shrink_iters: 2000, ..config };
    for kind in Kind::ALL {
        let store = std::cell::RefCell::new(Store::start(kind));
        let outcome = TestRunner::new(config.clone()).run(strategy, |value| {
            let store = &mut *store.borrow_mut();
            store.wire.text(&["FLUSHDB"]);
            test(store, value)
        });
        if let Err(failure) = outcome {
            panic!("{kind:?}: {failure}");
        }
    }
}

fn any_refill() -> impl Strategy<Value = Refill> {
    const SECOND: u64 = 1000;
    const DAY: u64 = 86_400 * SECOND;
    let units = prop::sample::select(vec![1, 15, SECOND, 60 * SECOND, 3600 * SECOND, DAY, 365 * DAY]);
    prop_oneof![
        Just((1, MAX_PERIOD_MS)),
        Just((1_000_000, SECOND)),
        Just((1, SECOND)),
        (1..=100_u64, units),
        (1..=2_000_000_u64, 1..=100_000_u64),
        (1..=2_000_000_u64, 1..=MAX_PERIOD_MS),
    ]
    .prop_map(|(tokens, period)| Refill::new(tokens, period).unwrap())
}

/// A capacity that can be counted exactly, small as often as large.
fn capacity_for(refill: Refill) -> impl Strategy<Value = Capacity> {
    let most = MAX_UNITS / refill.period_ms();
    prop_oneof![1..=20_u64, 1..=5_000_u64, 1..=most, Just(most)]
        .prop_map(move |tokens| Capacity::new(tokens.min(most)).unwrap())
}

fn any_limit() -> impl Strategy<Value = Limit> {
    any_refill()
        .prop_flat_map(|refill| capacity_for(refill).prop_map(move |capacity| Limit::new(capacity, refill).unwrap()))
}

/// How the clock moves before a step. The last reply decides where it is to move to.
#[derive(Clone, Copy, Debug)]
enum Tick {
    By(u64),
    BackBy(u64),
    /// To the very millisecond that retry-after named.
    Punctual,
    /// One millisecond before it.
    Impatient,
    /// So many thousandths of the time that the bucket takes to be full.
    PartOfReset(u64),
}

#[derive(Clone, Copy, Debug)]
enum Deed {
    /// That share of the smallest capacity, in thousandths, and at least one token.
    Charge {
        share: u64,
        count: u32,
    },
    GiveBack {
        share: u64,
        count: u32,
    },
    /// Another configuration: the limit with that number, where there is one, is replaced.
    Replace {
        limit: usize,
        by: Limit,
    },
}

fn any_step() -> impl Strategy<Value = (Tick, Deed)> {
    let tick = prop_oneof![
        3 => Just(Tick::By(0)),
        3 => (0..5_000_u64).prop_map(Tick::By),
        1 => (0..10_000_u64).prop_map(Tick::BackBy),
        3 => Just(Tick::Punctual),
        2 => Just(Tick::Impatient),
        2 => (0..1_500_u64).prop_map(Tick::PartOfReset),
    ];
    let share = || prop_oneof![4 => Just(0), 4 => 0..=400_u64, 1 => 1_000..=1_100_u64];
    let count = || prop_oneof![3 => Just(1), 3 => 1..=10_u32, 1 => 1..=u32::MAX];
    let deed = prop_oneof![
        12 => (share(), count()).prop_map(|(share, count)| Deed::Charge { share, count }),
        2 => (share(), count()).prop_map(|(share, count)| Deed::GiveBack { share, count }),
        1 => (0..3_usize, any_limit()).prop_map(|(limit, by)| Deed::Replace { limit, by }),
    ];
    (tick, deed)
}

/// The script and the model side by side.
struct Run<'a> {
    store: &'a mut Store,
    model: Model,
    limits: Vec<Limit>,
    now: u64,
    /// A clock behind this would meet a bucket again that has already been dropped.
    not_before: u64,
    last: [i64; 5],
    stored: Vec<[Option<String>; 2]>,
    /// When each key expires, and whether its limit is still the one it was written under.
    expires: Vec<Option<(u64, bool)>>,
    ledgers: Vec<Ledger>,
}

impl<'a> Run<'a> {
    fn new(store: &'a mut Store, limits: Vec<Limit>) -> Self {
        Self {
            store,
            model: Model::new(limits.len()),
            now: START,
            not_before: 0,
            last: [0; 5],
            stored: vec![[None, None]; limits.len()],
            expires: vec![None; limits.len()],
            ledgers: limits.iter().map(Ledger::new).collect(),
            limits,
        }
    }

    fn step(&mut self, tick: Tick, deed: Deed) -> TestCaseResult {
        let [_, _, retry, reset, _] = self.last.map(|field| field.max(0) as u64);
        let target = match tick {
            Tick::By(ms) => self.now + ms,
            Tick::BackBy(ms) => self.now - ms,
            Tick::Punctual => self.now + retry,
            Tick::Impatient => self.now + retry.saturating_sub(1),
            Tick::PartOfReset(share) => self.now + (u128::from(reset) * u128::from(share) / 1000) as u64,
        };
        self.now = target.clamp(self.not_before, MAX_UNITS);
        self.expire()?;
        let tokens = |share: u64| {
            let smallest = self.limits.iter().map(|limit| limit.capacity().get()).min().unwrap();
            let tokens = u128::from(smallest) * u128::from(share) / 1000;
            (tokens as u64).clamp(1, MAX_UNITS)
        };
        match deed {
            Deed::Charge { share, count } => self.call(tokens(share), i64::from(count)),
            Deed::GiveBack { share, count } => self.call(tokens(share), -i64::from(count)),
            Deed::Replace { limit, by } => {
                if limit < self.limits.len() {
                    self.replace(limit, by)?;
                }
                Ok(())
            }
        }
    }

    /// Drops the keys whose time has come, as Redis would. Nothing may differ by it: they are full.
    fn expire(&mut self) -> TestCaseResult {
        for i in 0..self.limits.len() {
            let Some((at, same_limit)) = self.expires[i] else {
                continue;
            };
            if self.now < at {
                continue;
            }
            if same_limit && at < MAX_UNITS {
                let when_full = self.model.view(i, at - SLACK, &self.limits[i]);
                prop_assert_eq!(when_full.units, full(&self.limits[i]));
            }
            if !same_limit {
                // It was full under its old limit, and is full under its new one from here.
                self.ledgers[i].check()?;
                self.ledgers[i] = Ledger::new(&self.limits[i]);
            }
            self.store.wire.command(&["DEL", &key(i)]);
            self.not_before = self.not_before.max(at - SLACK);
            self.model.buckets[i] = None;
            self.stored[i] = [None, None];
            self.expires[i] = None;
        }
        Ok(())
    }

    fn call(&mut self, cost: u64, count: i64) -> TestCaseResult {
        let before = self.stored.clone();
        let expected = self.model.call(&self.limits, self.now, cost, count);
        let (reply, started, ended, lives) = self.ask(cost, count);
        prop_assert_eq!(reply, expected.reply, "cost {} count {} at {}", cost, count, self.now);
        self.last = reply;

        for (i, limit) in self.limits.iter().enumerate() {
            match expected.ttl[i] {
                Some(ttl) => {
                    let ttl_now = ttl as i64;
                    prop_assert!(
                        (started + ttl_now..=ended + ttl_now).contains(&lives[i]),
                        "key {i} expires at {}, not {ttl} ms after {started} to {ended}",
                        lives[i],
                    );
                    self.expires[i] = Some((self.now + ttl, true));
                    let bucket = self.model.buckets[i].unwrap();
                    check_text(&self.stored[i], bucket, limit)?;
                    let signed = if count < 0 { count } else { reply[0] };
                    self.ledgers[i].add(bucket.at, i128::from(signed) * i128::from(cost));
                }
                None => prop_assert_eq!(&self.stored[i], &before[i], "nothing is written"),
            }
        }
        Ok(())
    }

    /// Calls the script in one transaction with the questions that need an answer of the same moment. The keys are
    /// kept from expiring in real time, which is not the time of this test.
    fn ask(&mut self, cost: u64, count: i64) -> ([i64; 5], i64, i64, Vec<i64>) {
        let mut bytes = BytesMut::new();
        encode(&mut bytes, &["MULTI"]);
        encode(&mut bytes, &["TIME"]);
        call(&self.limits, self.now, cost, count).evalsha(&mut bytes);
        for i in 0..self.limits.len() {
            encode(&mut bytes, &["PEXPIRETIME", &key(i)]);
            encode(&mut bytes, &["HMGET", &key(i), "tokens", "ts"]);
            encode(&mut bytes, &["PERSIST", &key(i)]);
        }
        encode(&mut bytes, &["TIME"]);
        encode(&mut bytes, &["EXEC"]);
        let commands = 5 + 3 * self.limits.len();
        let replies = self.store.wire.exchange(&bytes, commands);
        let results = array(replies.last().unwrap());
        let lives = results[2..].chunks_exact(3).map(|answers| integer(&answers[0])).collect();
        self.stored = results[2..].chunks_exact(3).map(|answers| fields(&answers[1])).collect();
        let ended = milliseconds(results.last().unwrap());
        (five(&results[1]), milliseconds(&results[0]), ended, lives)
    }

    /// Another configuration. A level that is no whole number of the new units is cut to one, as far as the text
    /// tells; where that is not clear to the last digit, the case proves nothing.
    fn replace(&mut self, i: usize, limit: Limit) -> TestCaseResult {
        if let (Some(bucket), [Some(text), _]) = (&mut self.model.buckets[i], &self.stored[i]) {
            let text = digits(text)?;
            // In 10^-15 units.
            let places = text % PLACES * one_token(&limit);
            let hundredth = PLACES / 100;
            let doubt = PLACES / 1000;
            let cut = |places: u128| places / PLACES;
            prop_assume!(cut(places + hundredth - doubt) == cut(places + hundredth + doubt));
            bucket.units = text / PLACES * one_token(&limit) + cut(places + hundredth);
        }
        self.limits[i] = limit;
        self.expires[i] = self.expires[i].map(|(at, _)| (at, false));
        self.ledgers[i].allow(&limit);
        Ok(())
    }
}

fn milliseconds(time: &BytesFrame) -> i64 {
    let parts: Vec<i64> = array(time).iter().map(|part| part.as_str().unwrap().parse().unwrap()).collect();
    parts[0] * 1000 + parts[1] / 1000
}

/// A plain decimal of at most 15 places, in 10^-15.
fn digits(text: &str) -> Result<u128, TestCaseError> {
    let (whole, places) = text.split_once('.').unwrap_or((text, ""));
    let plain = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    prop_assert!(!whole.is_empty() && plain(whole) && plain(places) && places.len() <= 15, "{}", text);
    prop_assert!(!text.ends_with('.') && (places.is_empty() || !text.ends_with('0')), "{}", text);
    Ok(format!("{whole}{places:0<15}").parse().unwrap())
}

/// The stored fields are the bucket, to the last of 15 places.
fn check_text(stored: &[Option<String>; 2], bucket: Bucket, limit: &Limit) -> TestCaseResult {
    let [Some(tokens), Some(ts)] = stored else { panic!("not stored: {stored:?}") };
    prop_assert_eq!(ts, &bucket.at.to_string());
    let (whole, rest) = (bucket.units / one_token(limit), bucket.units % one_token(limit));
    let exact = whole * PLACES + rest * PLACES / one_token(limit);
    prop_assert!(digits(tokens)?.abs_diff(exact) <= 1, "{} for {:?}", tokens, bucket);
    if rest == 0 {
        prop_assert_eq!(tokens, &whole.to_string());
    }
    Ok(())
}

/// What one bucket has admitted, and when.
struct Ledger {
    capacity: u64,
    fastest: Refill,
    /// The periods of limits that came later: under each a level is cut to other units.
    cut_to: Vec<u64>,
    entries: Vec<(u64, i128)>,
}

impl Ledger {
    fn new(limit: &Limit) -> Self {
        Self { capacity: limit.capacity().get(), fastest: limit.refill(), cut_to: Vec::new(), entries: Vec::new() }
    }

    fn allow(&mut self, limit: &Limit) {
        self.capacity = self.capacity.max(limit.capacity().get());
        let faster = |a: Refill, b: Refill| {
            u128::from(a.tokens()) * u128::from(b.period_ms()) > u128::from(b.tokens()) * u128::from(a.period_ms())
        };
        if faster(limit.refill(), self.fastest) {
            self.fastest = limit.refill();
        }
        self.cut_to.push(limit.refill().period_ms());
    }

    fn add(&mut self, at: u64, tokens: i128) {
        let latest = self.entries.last().map_or(0, |&(latest, _)| latest);
        self.entries.push((at.max(latest), tokens));
    }

    /// In every window, what was admitted is at most the capacity and what the time brought.
    fn check(&self) -> TestCaseResult {
        // Such a level may be above what it was by a hundredth of a new unit.
        let period = self.fastest.period_ms();
        let gained = self.cut_to.iter().map(|cut_to| u128::from(period.div_ceil(100 * cut_to))).sum::<u128>();
        for (first, &(start, _)) in self.entries.iter().enumerate() {
            let mut admitted = 0_i128;
            for &(end, tokens) in &self.entries[first..] {
                admitted += tokens;
                let time = u128::from(end - start);
                let allowed =
                    u128::from(self.capacity) * u128::from(period) + time * u128::from(self.fastest.tokens()) + gained;
                let admitted = admitted * i128::from(period);
                prop_assert!(admitted <= allowed as i128, "{:?}", &self.entries[first..]);
            }
        }
        Ok(())
    }
}

#[test]
fn every_reply_every_stored_digit_and_every_expiry_is_that_of_the_exact_bucket() {
    let strategy = (prop::collection::vec(any_limit(), 1..=3), prop::collection::vec(any_step(), 1..60));
    holds(400, &strategy, |store, (limits, steps)| {
        let mut run = Run::new(store, limits);
        for (tick, deed) in steps {
            run.step(tick, deed)?;
        }
        for ledger in &run.ledgers {
            ledger.check()?;
        }
        Ok(())
    });
}

#[test]
fn who_is_alone_and_waits_as_told_is_granted_and_a_millisecond_earlier_is_not() {
    let strategy =
        (prop::collection::vec(any_limit(), 1..=3), prop::collection::vec((0..=1000_u64, 0..=20_000_u64), 1..12));
    holds(100, &strategy, |store, (limits, rounds)| {
        let smallest = limits.iter().map(|limit| limit.capacity().get()).min().unwrap();
        let mut now = START;
        for (share, pause) in rounds {
            let cost = ((u128::from(smallest) * u128::from(share) / 1000) as u64).max(1);
            let mut granted = |now: u64, count: u32| {
                let [granted, _, retry, ..] = store.wire.reply(&call(&limits, now, cost, i64::from(count)));
                (granted, retry as u64)
            };
            // Take what there is, so that one more has to wait. Enough may be there for a while.
            let (_, told) = granted(now, u32::MAX);
            if told > 0 && now + told < MAX_UNITS {
                prop_assert_eq!(granted(now, 1), (0, told));
                prop_assert_eq!(granted(now + told - 1, 1), (0, 1));
                prop_assert_eq!(granted(now + told, 1).0, 1);
                now += told;
            }
            now = (now + pause).min(MAX_UNITS);
        }
        Ok(())
    });
}

#[test]
fn the_model_itself_grants_a_full_bucket_and_then_what_the_time_brings() {
    let tenth = crate::store::limit(3, 10, 1000);
    let mut model = Model::new(1);
    let steps = [
        (START, 1, 5, [3, 0, 100, 300, 0]),
        (START + 99, 1, 1, [0, 0, 1, 201, 0]),
        (START - 50, 1, 1, [0, 0, 150, 350, 0]),
        (START + 100, 1, 1, [1, 0, 0, 300, 0]),
        (START + 100, 1, -1, [1, 1, 0, 200, 0]),
        (START + 100, 4, 1, [0, 1, -1, 200, 0]),
    ];
    for (now, cost, count, reply) in steps {
        let Answer { reply: found, .. } = model.call(&[tenth], now, cost, count);
        assert_eq!(found, reply, "at {now}");
    }
    assert_eq!(rate(&tenth), 1);
}

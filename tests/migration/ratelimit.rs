//! A stand-in for envoyproxy/ratelimit: the service that Envoy's `envoy.filters.http.ratelimit` asks.
//!
//! It speaks the service's protocol (gRPC, `ShouldRateLimit`), reads the service's own configuration file, and does what
//! the service documents: descriptors are looked up level by level, a value before a wildcard before a key alone; hits are
//! counted in windows that begin at multiples of the unit; everything is counted, also what is denied. It is not the
//! service: its counters are in memory, its clock is the test's, and what a test here does not need (`replaces`, limits that
//! Envoy sends along, settings of the environment) it refuses instead of guessing.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use bytes::Bytes;
use serde_json::Value;

use crate::support::http2;
use crate::support::listener::Listener;

/// The path of the one call.
const CALL: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// An entry of the configuration: what it matches, its limit, and what is nested in it.
#[derive(Debug)]
struct Descriptor {
    key: String,
    value: Option<String>,
    limit: Option<Limit>,
    shadow: bool,
    shared: bool,
    nested: Vec<Descriptor>,
}

#[derive(Clone, Copy, Debug)]
enum Limit {
    Unlimited,
    /// So many hits in a window of so many seconds.
    Window {
        hits: u64,
        seconds: u64,
    },
}

impl Descriptor {
    fn list(value: &Value) -> Vec<Self> {
        value.as_array().map(|list| list.iter().map(Self::read).collect()).unwrap_or_default()
    }

    fn read(value: &Value) -> Self {
        let known = ["key", "value", "rate_limit", "shadow_mode", "share_threshold", "detailed_metric", "descriptors"];
        let unknown = value.as_object().unwrap().keys().find(|name| !known.contains(&name.as_str()));
        assert_eq!(unknown, None, "a field that the stand-in does not know");
        let text = |name: &str| value[name].as_str().map(str::to_owned);
        let flag = |name: &str| value[name].as_bool().unwrap_or(false);
        let shared = flag("share_threshold");
        let read = Self {
            key: text("key").expect("a descriptor has a key"),
            value: text("value"),
            limit: value.get("rate_limit").map(Limit::read),
            shadow: flag("shadow_mode"),
            shared,
            nested: Self::list(&value["descriptors"]),
        };
        assert!(!shared || read.prefix().is_some(), "only a wildcard can share a threshold");
        read
    }

    /// What a value has to begin with, where this is a wildcard.
    fn prefix(&self) -> Option<&str> {
        self.value.as_deref()?.strip_suffix('*')
    }
}

impl Limit {
    fn read(value: &Value) -> Self {
        if value["unlimited"] == true {
            assert_eq!(value.get("unit"), None, "an unlimited descriptor has no unit");
            return Self::Unlimited;
        }
        let seconds = match value["unit"].as_str() {
            Some("second") => 1,
            Some("minute") => 60,
            Some("hour") => 3_600,
            Some("day") => 86_400,
            other => panic!("a unit that the stand-in does not know: {other:?}"),
        };
        Self::Window { hits: value["requests_per_unit"].as_u64().expect("a number of requests"), seconds }
    }
}

/// A descriptor of a call: its entries, and how many hits it adds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    pub entries: Vec<(String, String)>,
    pub hits: u64,
}

/// What became of one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Code {
    Ok,
    OverLimit,
}

struct Status {
    code: Code,
    /// Limit, window in seconds, what remains of it, seconds until it ends; `None` without a limit.
    standing: Option<(u64, u64, u64, u64)>,
}

struct State {
    domain: String,
    descriptors: Vec<Descriptor>,
    /// Seconds since the epoch.
    now: AtomicU64,
    counters: Mutex<HashMap<String, u64>>,
    /// By the path of the limit in the configuration: how often it let pass and how often not, shadow or not.
    decided: Mutex<BTreeMap<String, [u64; 2]>>,
}

/// The service on a free port of 127.0.0.1, until it is dropped.
pub struct Service {
    listener: Listener,
    state: Arc<State>,
}

impl Service {
    /// One that reads this configuration. Its clock stands at noon of a day.
    pub fn start(configuration: &Value) -> Self {
        let state = Arc::new(State {
            domain: configuration["domain"].as_str().expect("a domain").to_owned(),
            descriptors: Descriptor::list(&configuration["descriptors"]),
            now: AtomicU64::new(20_000 * 86_400 + 43_200),
            counters: Mutex::default(),
            decided: Mutex::default(),
        });
        let shared = Arc::clone(&state);
        let listener = Listener::start(move |stream| {
            let state = Arc::clone(&shared);
            thread::spawn(move || {
                http2::serve(stream, |request, respond| answer(request, respond, Arc::clone(&state)));
            });
        });
        Self { listener, state }
    }

    pub fn port(&self) -> u16 {
        self.listener.port()
    }

    /// Moves its clock.
    pub fn advance(&self, seconds: u64) {
        self.state.now.fetch_add(seconds, Ordering::SeqCst);
    }

    /// How often each limit let pass and how often not.
    pub fn decided(&self) -> BTreeMap<String, [u64; 2]> {
        self.state.decided.lock().unwrap().clone()
    }

    /// Whether it lets pass what has these descriptors, without a network between.
    pub fn allows(&self, descriptors: &[Asked]) -> bool {
        self.state.decide(&self.state.domain, descriptors).iter().all(|status| status.code == Code::Ok)
    }
}

impl State {
    /// Counts all descriptors, and says what becomes of each.
    fn decide(&self, domain: &str, descriptors: &[Asked]) -> Vec<Status> {
        let known = domain == self.domain;
        descriptors.iter().map(|asked| if known { self.count(asked) } else { Status::without_limit() }).collect()
    }

    fn count(&self, asked: &Asked) -> Status {
        let Some((path, found, counted)) = self.find(&asked.entries) else { return Status::without_limit() };
        let Some(Limit::Window { hits, seconds }) = found.limit else { return Status::without_limit() };
        let now = self.now.load(Ordering::SeqCst);
        let key = format!("{}_{counted}_{}", self.domain, now / seconds * seconds);
        let mut counters = self.counters.lock().unwrap();
        let count = counters.entry(key).or_default();
        *count += asked.hits;
        let over = *count > hits;
        self.decided.lock().unwrap().entry(path).or_default()[usize::from(over)] += 1;
        let code = if over && !found.shadow { Code::OverLimit } else { Code::Ok };
        Status { code, standing: Some((hits, seconds, hits.saturating_sub(*count), seconds - now % seconds)) }
    }

    /// The entry of the configuration for a descriptor, its path there, and the descriptor as it is counted.
    fn find(&self, entries: &[(String, String)]) -> Option<(String, &Descriptor, String)> {
        let (mut level, mut found) = (&self.descriptors, None);
        let (mut path, mut counted) = (Vec::new(), Vec::new());
        for (key, value) in entries {
            let of_key = || level.iter().filter(|one| one.key == *key);
            let exact = of_key().find(|one| one.value.as_ref() == Some(value));
            let wild = || of_key().find(|one| one.prefix().is_some_and(|prefix| value.starts_with(prefix)));
            let next = exact.or_else(wild).or_else(|| of_key().find(|one| one.value.is_none()))?;
            path.push(format!("{key}={}", next.value.as_deref().unwrap_or("?")));
            let value = if next.shared { next.value.as_ref().unwrap() } else { value };
            counted.push(format!("{key}_{value}"));
            level = &next.nested;
            found = Some(next);
        }
        Some((path.join(" "), found?, counted.join("_")))
    }
}

impl Status {
    fn without_limit() -> Self {
        Self { code: Code::Ok, standing: None }
    }
}

async fn answer(
    request: http::Request<h2::RecvStream>,
    mut respond: h2::server::SendResponse<Bytes>,
    state: Arc<State>,
) -> Result<(), h2::Error> {
    let (head, mut incoming) = request.into_parts();
    assert_eq!(head.uri.path(), CALL);
    let message = http2::whole(&mut incoming).await?;
    // A byte that says "not compressed", and the length.
    let (domain, descriptors) = read_request(&message[5..]);
    let statuses = state.decide(&domain, &descriptors);
    let reply = write_response(&statuses);
    let mut framed = vec![0];
    framed.extend_from_slice(&u32::try_from(reply.len()).unwrap().to_be_bytes());
    framed.extend_from_slice(&reply);
    let headers = http::Response::builder().header("content-type", "application/grpc").body(()).unwrap();
    let mut outgoing = respond.send_response(headers, false)?;
    outgoing.send_data(framed.into(), false)?;
    let mut trailers = http::HeaderMap::new();
    trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
    outgoing.send_trailers(trailers)
}

/// A field of a protobuf message.
enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

impl<'a> Field<'a> {
    fn bytes(self) -> &'a [u8] {
        if let Self::Bytes(bytes) = self { bytes } else { panic!("bytes are expected") }
    }

    fn text(self) -> String {
        String::from_utf8(self.bytes().to_vec()).unwrap()
    }

    fn number(self) -> u64 {
        if let Self::Number(number) = self { number } else { panic!("a number is expected") }
    }
}

/// The fields of a message, by their numbers.
fn fields(mut message: &[u8]) -> Vec<(u64, Field<'_>)> {
    let mut fields = Vec::new();
    while !message.is_empty() {
        let tag = varint(&mut message);
        let field = match tag & 7 {
            0 => Field::Number(varint(&mut message)),
            2 => {
                let length = usize::try_from(varint(&mut message)).unwrap();
                let (bytes, rest) = message.split_at(length);
                message = rest;
                Field::Bytes(bytes)
            }
            other => panic!("a field of the wire type {other}"),
        };
        fields.push((tag >> 3, field));
    }
    fields
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let (mut number, mut shift) = (0, 0);
    loop {
        let (byte, rest) = bytes.split_first().expect("a number that ends");
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            return number;
        }
    }
}

/// A `RateLimitRequest`: its domain and its descriptors.
fn read_request(message: &[u8]) -> (String, Vec<Asked>) {
    let (mut domain, mut descriptors, mut hits) = (String::new(), Vec::new(), 0);
    for (number, field) in fields(message) {
        match number {
            1 => domain = field.text(),
            2 => descriptors.push(read_descriptor(field.bytes())),
            3 => hits = field.number(),
            other => panic!("field {other} of a request"),
        }
    }
    // What a descriptor says of itself wins over what the call says of all, and that is at least one.
    let counted = |(entries, own): (_, Option<u64>)| Asked { entries, hits: own.unwrap_or(hits.max(1)) };
    (domain, descriptors.into_iter().map(counted).collect())
}

fn read_descriptor(message: &[u8]) -> (Vec<(String, String)>, Option<u64>) {
    let (mut entries, mut hits) = (Vec::new(), None);
    for (number, field) in fields(message) {
        match number {
            1 => {
                let (mut key, mut value) = (String::new(), String::new());
                for (number, field) in fields(field.bytes()) {
                    *(if number == 1 { &mut key } else { &mut value }) = field.text();
                }
                entries.push((key, value));
            }
            3 => hits = Some(fields(field.bytes()).pop().map_or(0, |(_, value)| value.number())),
            other => panic!("field {other} of a descriptor, which the stand-in does not know"),
        }
    }
    (entries, hits)
}

/// A `RateLimitResponse`.
fn write_response(statuses: &[Status]) -> Vec<u8> {
    let code = |code: Code| if code == Code::Ok { 1 } else { 2 };
    let denied = statuses.iter().any(|status| status.code == Code::OverLimit);
    let mut response = Vec::new();
    write_number(&mut response, 1, code(if denied { Code::OverLimit } else { Code::Ok }));
    for status in statuses {
        let mut message = Vec::new();
        write_number(&mut message, 1, code(status.code));
        if let Some((hits, seconds, remaining, reset)) = status.standing {
            let (mut limit, mut duration) = (Vec::new(), Vec::new());
            write_number(&mut limit, 1, hits);
            write_number(
                &mut limit,
                2,
                [1, 60, 3_600, 86_400].iter().position(|unit| *unit == seconds).unwrap() as u64 + 1,
            );
            write_number(&mut duration, 1, reset);
            write_bytes(&mut message, 2, &limit);
            write_number(&mut message, 3, remaining);
            write_bytes(&mut message, 4, &duration);
        }
        write_bytes(&mut response, 2, &message);
    }
    response
}

fn write_number(message: &mut Vec<u8>, field: u64, number: u64) {
    write_varint(message, field << 3);
    write_varint(message, number);
}

fn write_bytes(message: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    write_varint(message, field << 3 | 2);
    write_varint(message, bytes.len() as u64);
    message.extend_from_slice(bytes);
}

fn write_varint(message: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        message.push((number as u8 & 0x7f) | 0x80);
        number >>= 7;
    }
    message.push(number as u8);
}

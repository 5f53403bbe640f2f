//! What a request costs: how often the module calls the proxy, and how often the core asks for memory. Both are the same each
//! time, so they are written down here exactly, and cannot creep up unseen. How long it takes is for `make bench`.
//!
//! The module runs in an interpreter for this, with just so much of a proxy around it that it can be counted.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "support/module.rs"]
mod module;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use meshquota::config::Config;
use meshquota::limiter::{Admission, Effect, Limiter};
use meshquota::request::Facts;
use meshquota::response;
use wasmi::{Caller, Engine, Extern, Func, Instance, Linker, Module, Store, Val};

use module::module;

const PER_IP: &str = r#"{"rules": [{"name": "per-ip", "limits": [{"capacity": 10, "refill": "1/s"}]}]}"#;
const NO_DENY_CACHE: &str =
    r#"{"deny_cache": {"entries": 0}, "rules": [{"name": "per-ip", "limits": [{"refill": "1/s"}]}]}"#;
const LOGIN: &str = r#"{"rules": [{"name": "login", "match": {"path": "/login"}, "limits": [{"refill": "1/s"}]}]}"#;
const GRANTED: &[u8] = b"*4\r\n:1\r\n:9\r\n:0\r\n:1000\r\n";
const DENIED: &[u8] = b"*4\r\n:0\r\n:0\r\n:1000\r\n:10000\r\n";
/// The root context, the stream, and the first request.
const ROOT: i32 = 1;
const STREAM: i32 = 7;
const REQUEST: i32 = 2;

/// A proxy, as far as the module asks.
#[derive(Default)]
struct Proxy {
    calls: BTreeMap<String, usize>,
    /// What is in the buffer that is asked for.
    buffer: Vec<u8>,
    now_ns: u64,
    metrics: u32,
}

struct Table {
    store: Store<Proxy>,
    instance: Instance,
}

impl Table {
    /// A worker with this configuration, connected.
    fn connected(configuration: &str) -> Self {
        let engine = Engine::default();
        let module = Module::new(&engine, std::fs::read(module()).unwrap()).unwrap();
        let mut store = Store::new(&engine, Proxy { now_ns: 1_000_000_000_000, ..Proxy::default() });
        let mut linker = Linker::new(&engine);
        for import in module.imports() {
            let name = import.name().to_owned();
            let function = Func::new(&mut store, import.ty().func().unwrap().clone(), move |caller, given, results| {
                let status = called(caller, &name, given);
                if let Some(result) = results.first_mut() {
                    *result = Val::I32(status);
                }
                Ok(())
            });
            linker.define(import.module(), import.name(), function).unwrap();
        }
        let instance = linker.instantiate_and_start(&mut store, &module).unwrap();
        let mut table = Self { store, instance };
        table.call("_initialize", &[]);
        table.call("proxy_on_context_create", &[ROOT, 0]);
        let size = configuration.len() as i32;
        table.store.data_mut().buffer = configuration.into();
        assert_eq!(table.call("proxy_on_configure", &[ROOT, size]), Some(1));
        table.call("proxy_on_tick", &[ROOT]);
        table.call("proxy_on_grpc_receive_initial_metadata", &[ROOT, STREAM, 1]);
        table
    }

    fn call(&mut self, name: &str, arguments: &[i32]) -> Option<i32> {
        *self.store.data_mut().calls.entry(format!("-> {name}")).or_default() += 1;
        let function = self.instance.get_func(&self.store, name).unwrap();
        let arguments = arguments.iter().map(|argument| Val::I32(*argument)).collect::<Vec<_>>();
        let mut results = vec![Val::I32(0); function.ty(&self.store).results().len()];
        function.call(&mut self.store, &arguments, &mut results).unwrap();
        results.first().and_then(Val::i32)
    }

    fn begin(&mut self, request: i32) -> i32 {
        self.call("proxy_on_context_create", &[request, ROOT]);
        self.call("proxy_on_request_headers", &[request, 8, 1]).unwrap()
    }

    fn hear(&mut self, bytes: &[u8]) {
        self.store.data_mut().buffer = bytes.to_vec();
        self.call("proxy_on_grpc_receive", &[ROOT, STREAM, bytes.len() as i32]);
    }

    fn end(&mut self, request: i32) {
        self.call("proxy_on_response_headers", &[request, 5, 1]);
        self.call("proxy_on_delete", &[request]);
    }

    /// A request from its beginning to its end, and what Redis answers where it is asked.
    fn request(&mut self, request: i32, reply: &[u8]) {
        if self.begin(request) == 1 && !reply.is_empty() {
            self.hear(reply);
        }
        self.end(request);
    }

    /// What that took, in calls from one side to the other, by name.
    fn counted(&mut self, act: impl FnOnce(&mut Self)) -> Vec<String> {
        self.store.data_mut().calls.clear();
        act(self);
        let calls = std::mem::take(&mut self.store.data_mut().calls);
        calls.into_iter().map(|(name, times)| format!("{name} {times}")).collect()
    }
}

/// The module calls the proxy. Returns the status: 0 is good, 1 is that something is not there.
fn called(mut caller: Caller<'_, Proxy>, name: &str, given: &[Val]) -> i32 {
    *caller.data_mut().calls.entry(name.to_owned()).or_default() += 1;
    let number = |place: usize| given[place].i32().unwrap_or(0) as u32;
    match name {
        "clock_time_get" => {
            let now = caller.data().now_ns;
            write(&mut caller, number(2), &now.to_le_bytes());
        }
        "proxy_get_property" => give(&mut caller, b"192.0.2.1:4711", number(2), number(3)),
        "proxy_get_buffer_bytes" => {
            let buffer = caller.data().buffer.clone();
            give(&mut caller, &buffer, number(3), number(4));
        }
        "proxy_get_header_map_value" => match text(&caller, number(1), number(2)).as_str() {
            ":path" => give(&mut caller, b"/index.html", number(3), number(4)),
            ":status" => give(&mut caller, b"200", number(3), number(4)),
            _ => return 1,
        },
        "proxy_define_metric" => {
            caller.data_mut().metrics += 1;
            let id = caller.data().metrics;
            write(&mut caller, number(3), &id.to_le_bytes());
        }
        "proxy_grpc_stream" => write(&mut caller, number(8), &STREAM.to_le_bytes()),
        _ => {}
    }
    0
}

fn text(caller: &Caller<'_, Proxy>, at: u32, size: u32) -> String {
    let memory = caller.get_export("memory").and_then(Extern::into_memory).unwrap();
    String::from_utf8_lossy(&memory.data(caller)[at as usize..(at + size) as usize]).into_owned()
}

fn write(caller: &mut Caller<'_, Proxy>, at: u32, bytes: &[u8]) {
    let memory = caller.get_export("memory").and_then(Extern::into_memory).unwrap();
    memory.write(caller, at as usize, bytes).unwrap();
}

/// Hands a value over, in memory that the module is asked for.
fn give(caller: &mut Caller<'_, Proxy>, bytes: &[u8], value: u32, size: u32) {
    const ALLOCATE: &str = "proxy_on_memory_allocate";
    *caller.data_mut().calls.entry(format!("-> {ALLOCATE}")).or_default() += 1;
    let allocate = caller.get_export(ALLOCATE).and_then(Extern::into_func).unwrap();
    let mut place = [Val::I32(0)];
    allocate.call(&mut *caller, &[Val::I32(bytes.len() as i32)], &mut place).unwrap();
    let place = place[0].i32().unwrap() as u32;
    write(caller, place, bytes);
    write(caller, value, &place.to_le_bytes());
    write(caller, size, &(bytes.len() as u32).to_le_bytes());
}

#[test]
fn a_request_that_no_rule_meets_is_one_look_at_its_path() {
    let mut table = Table::connected(LOGIN);
    table.request(REQUEST, b"");
    let expected = [
        "-> proxy_on_context_create 1",
        "-> proxy_on_delete 1",
        "-> proxy_on_memory_allocate 1",
        "-> proxy_on_request_headers 1",
        "-> proxy_on_response_headers 1",
        "proxy_get_header_map_value 1",
    ];
    assert_eq!(table.counted(|table| table.request(REQUEST + 1, b"")), expected);
}

#[test]
fn a_request_that_is_admitted() {
    let mut table = Table::connected(PER_IP);
    table.request(REQUEST, GRANTED);
    let expected = [
        "-> proxy_on_context_create 1",
        "-> proxy_on_delete 1",
        "-> proxy_on_grpc_receive 1",
        "-> proxy_on_memory_allocate 2",
        "-> proxy_on_request_headers 1",
        "-> proxy_on_response_headers 1",
        "clock_time_get 2",
        "proxy_continue_stream 1",
        "proxy_get_buffer_bytes 1",
        "proxy_get_header_map_value 1",
        "proxy_get_property 1",
        "proxy_grpc_send 1",
        "proxy_replace_header_map_value 3",
        "proxy_set_effective_context 4",
        "proxy_set_property 3",
    ];
    assert_eq!(table.counted(|table| table.request(REQUEST + 1, GRANTED)), expected);
}

#[test]
fn a_request_that_is_denied() {
    let mut table = Table::connected(NO_DENY_CACHE);
    table.request(REQUEST, DENIED);
    let expected = [
        "-> proxy_on_context_create 1",
        "-> proxy_on_delete 1",
        "-> proxy_on_grpc_receive 1",
        "-> proxy_on_memory_allocate 2",
        "-> proxy_on_request_headers 1",
        "-> proxy_on_response_headers 1",
        "clock_time_get 2",
        "proxy_get_buffer_bytes 1",
        "proxy_get_header_map_value 1",
        "proxy_get_property 1",
        "proxy_grpc_send 1",
        "proxy_send_local_response 1",
        "proxy_set_effective_context 4",
        "proxy_set_property 3",
    ];
    assert_eq!(table.counted(|table| table.request(REQUEST + 1, DENIED)), expected);
}

#[test]
fn a_request_whose_denial_is_known() {
    let mut table = Table::connected(PER_IP);
    table.request(REQUEST, DENIED);
    let expected = [
        "-> proxy_on_context_create 1",
        "-> proxy_on_delete 1",
        "-> proxy_on_memory_allocate 1",
        "-> proxy_on_request_headers 1",
        "-> proxy_on_response_headers 1",
        "clock_time_get 1",
        "proxy_get_header_map_value 1",
        "proxy_get_property 1",
        "proxy_send_local_response 1",
        "proxy_set_property 3",
    ];
    assert_eq!(table.counted(|table| table.request(REQUEST + 1, b"")), expected);
}

#[test]
fn requests_that_are_decided_by_one_reply_share_what_it_costs() {
    let mut table = Table::connected(PER_IP);
    table.request(REQUEST, GRANTED);
    table.begin(10);
    for request in 11..21 {
        table.begin(request);
    }
    table.hear(GRANTED);
    // The other ten have asked together meanwhile.
    let expected = [
        "-> proxy_on_grpc_receive 1",
        "-> proxy_on_memory_allocate 1",
        "clock_time_get 1",
        "proxy_continue_stream 10",
        "proxy_get_buffer_bytes 1",
        "proxy_set_effective_context 11",
        "proxy_set_property 30",
    ];
    let all = b"*4\r\n:10\r\n:0\r\n:0\r\n:1000\r\n";
    assert_eq!(table.counted(|table| table.hear(all)), expected);
}

/// Counts what is asked for, on each thread for itself.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: all is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|allocations| allocations.set(allocations.get() + 1));
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        unsafe { System.dealloc(pointer, layout) };
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// A request of one caller, whose words are there already.
struct Known(Vec<u8>);

impl Facts for Known {
    fn header(&self, _: &str) -> Option<Vec<u8>> {
        None
    }

    fn property(&self, _: &[&str]) -> Option<Vec<u8>> {
        Some(self.0.clone())
    }
}

/// How often the core asks for memory for the last of some requests, which is answered so.
fn allocations(reply: &[u8]) -> usize {
    let now = Instant::now();
    let config = Config::from_json(PER_IP.as_bytes()).unwrap();
    let mut limiter = Limiter::new(config, 1, now);
    limiter.tick(now);
    assert_eq!(limiter.next_effect(now), Some(Effect::Open));
    limiter.connected(now);
    let mut counted = 0;
    for id in 0..10 {
        let caller = Known(b"192.0.2.1:4711".to_vec());
        let before = ALLOCATIONS.get();
        let met = limiter.meets(&caller);
        let decision = match limiter.request(now, || 0, id, met) {
            Admission::Decided(decision) => decision,
            Admission::NotLimited => panic!("it is limited"),
            Admission::Waits => {
                drop(limiter.next_effect(now));
                limiter.received(now, reply);
                match limiter.next_effect(now) {
                    Some(Effect::Decide(_, decision)) => decision,
                    other => panic!("{other:?}"),
                }
            }
        };
        drop(response::answer(limiter.config(), &decision));
        counted = ALLOCATIONS.get() - before;
        limiter.tick(now + Duration::from_millis(1));
        limiter.stats().take();
    }
    counted
}

#[test]
fn the_core_asks_for_memory_no_more_often_than_this() {
    assert_eq!((allocations(GRANTED), allocations(DENIED)), (16, 17));
}

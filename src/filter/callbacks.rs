//! The module's exports: the callbacks of the proxy-wasm ABI (version 0.2.1) that the filter has a use for. The proxy asks
//! for each by its name, and does without those that are not there.
//!
//! Invariant: the tables are not borrowed while a callback does its work, which may lead to another callback.

use std::cell::RefCell;
use std::rc::Rc;

use nohash_hasher::IntMap;

use super::host::{Action, allocated};
use super::http::Http;
use super::root;
use super::worker::Worker;

/// The contexts that the proxy has created, by its numbers for them.
#[derive(Default)]
struct Contexts {
    /// The root contexts, each with its worker once it is configured.
    roots: RefCell<IntMap<u32, Option<Worker>>>,
    requests: RefCell<IntMap<u32, Rc<Http>>>,
}

thread_local! {
    static CONTEXTS: Contexts = Contexts::default();
}

/// Looks something up, or changes a table. `None` where it is in use, which no path leads to.
fn with<T, R>(table: impl Fn(&Contexts) -> &RefCell<T>, act: impl FnOnce(&mut T) -> R) -> Option<R> {
    CONTEXTS.with(|contexts| table(contexts).try_borrow_mut().ok().map(|mut table| act(&mut table)))
}

fn worker(root: u32) -> Option<Worker> {
    with(|contexts| &contexts.roots, |roots| roots.get(&root).cloned().flatten()).flatten()
}

fn request(id: u32) -> Option<Rc<Http>> {
    with(|contexts| &contexts.requests, |requests| requests.get(&id).cloned()).flatten()
}

/// Says which version of the ABI this is, by its name.
#[unsafe(no_mangle)]
extern "C" fn proxy_abi_version_0_2_1() {}

/// The first call of all: what the compiler wants to be done before anything else.
#[unsafe(no_mangle)]
extern "C" fn _initialize() {
    unsafe extern "C" {
        fn __wasm_call_ctors();
    }
    // SAFETY: the linker makes this function, and this is its one call.
    unsafe { __wasm_call_ctors() };
}

/// Memory for something that the proxy has to say.
#[unsafe(no_mangle)]
extern "C" fn proxy_on_memory_allocate(size: usize) -> *mut u8 {
    allocated(size)
}

/// A context begins: a root context where it has no root of its own.
#[unsafe(no_mangle)]
extern "C" fn proxy_on_context_create(id: u32, root: u32) {
    if root == 0 {
        with(|contexts| &contexts.roots, |roots| roots.insert(id, None));
    } else {
        let request = Rc::new(Http::new(id, worker(root)));
        with(|contexts| &contexts.requests, |requests| requests.insert(id, request));
    }
}

/// A context ends.
#[unsafe(no_mangle)]
extern "C" fn proxy_on_delete(id: u32) {
    if let Some(request) = with(|contexts| &contexts.requests, |requests| requests.remove(&id)).flatten() {
        request.on_delete();
    } else if let Some(worker) = with(|contexts| &contexts.roots, |roots| roots.remove(&id)).flatten().flatten() {
        worker.shut_down();
    }
}

/// A root context is given its configuration.
#[unsafe(no_mangle)]
extern "C" fn proxy_on_configure(root: u32, size: usize) -> bool {
    let Some(worker) = root::configured(root, size) else {
        return false;
    };
    let before = with(|contexts| &contexts.roots, |roots| roots.insert(root, Some(worker)));
    if let Some(before) = before.flatten().flatten() {
        before.shut_down();
    }
    true
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_tick(root: u32) {
    if let Some(worker) = worker(root) {
        worker.tick();
    }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_request_headers(id: u32, _headers: u32, _end_of_stream: u32) -> Action {
    request(id).map_or(Action::Continue, |request| request.on_request_headers())
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_response_headers(id: u32, _headers: u32, _end_of_stream: u32) -> Action {
    if let Some(request) = request(id) {
        request.on_response_headers();
    }
    Action::Continue
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_grpc_receive_initial_metadata(root: u32, token: u32, _headers: u32) {
    if let Some(worker) = worker(root) {
        root::on_stream_headers(&worker, token);
    }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_grpc_receive(root: u32, token: u32, size: usize) {
    if let Some(worker) = worker(root) {
        root::on_stream_message(&worker, token, size);
    }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_grpc_close(root: u32, token: u32, status: u32) {
    if let Some(worker) = worker(root) {
        root::on_stream_close(&worker, token, status);
    }
}

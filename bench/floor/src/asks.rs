//! Asks Redis about every request by one command, and lets each go on with the reply, whatever it says: what the way to Redis
//! costs by itself. The command is the plugin's configuration, with five digits of its key left open.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use proxy_wasm::hostcalls::{resume_http_request, send_grpc_stream_message, set_effective_context};
use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{Action, ContextType};

/// Where the command takes the number of the caller.
const CALLER: &str = "#####";
/// Each of so many callers has a turn.
const CALLERS: u32 = 65536;
const TICK: Duration = Duration::from_millis(100);

/// A reply is an array of integers, and so has one of these, at its beginning.
const REPLY: u8 = b'*';

#[derive(Default)]
struct Worker {
    before: String,
    after: String,
    caller: u32,
    stream: Option<u32>,
    /// The requests that wait for their replies, in order.
    waiting: VecDeque<Option<u32>>,
}

pub struct Root {
    id: u32,
    worker: Rc<RefCell<Worker>>,
}

struct Http {
    id: u32,
    root_id: u32,
    worker: Rc<RefCell<Worker>>,
}

impl Root {
    pub fn new(id: u32) -> Self {
        Self { id, worker: Rc::default() }
    }

    fn resume(&self, count: usize) {
        for _ in 0..count {
            let request = self.worker.borrow_mut().waiting.pop_front().flatten();
            if request.is_some_and(|id| set_effective_context(id).is_ok()) {
                let _ = resume_http_request();
            }
        }
        let _ = set_effective_context(self.id);
    }
}

impl Context for Root {
    fn on_grpc_stream_message(&mut self, _: u32, size: usize) {
        let bytes = self.get_grpc_stream_message(0, size).unwrap_or_default();
        self.resume(bytes.iter().filter(|byte| **byte == REPLY).count());
    }

    fn on_grpc_stream_close(&mut self, _: u32, _: u32) {
        self.worker.borrow_mut().stream = None;
        let all = self.worker.borrow().waiting.len();
        self.resume(all);
    }
}

impl RootContext for Root {
    fn on_configure(&mut self, _: usize) -> bool {
        let command = String::from_utf8(self.get_plugin_configuration().unwrap_or_default()).unwrap_or_default();
        let Some((before, after)) = command.split_once(CALLER) else { return false };
        let mut worker = self.worker.borrow_mut();
        (worker.before, worker.after) = (before.to_owned(), after.to_owned());
        self.set_tick_period(TICK);
        true
    }

    fn on_tick(&mut self) {
        if self.worker.borrow().stream.is_none() {
            let stream = self.open_grpc_stream("meshquota_tunnel", "meshquota", "Tunnel", vec![]);
            self.worker.borrow_mut().stream = stream.ok();
        }
    }

    fn create_http_context(&self, id: u32) -> Option<Box<dyn HttpContext>> {
        Some(Box::new(Http { id, root_id: self.id, worker: Rc::clone(&self.worker) }))
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}

impl Context for Http {
    /// Its client may leave while it waits. Its reply comes all the same.
    fn on_done(&mut self) -> bool {
        if let Some(place) = self.worker.borrow_mut().waiting.iter_mut().find(|id| **id == Some(self.id)) {
            *place = None;
        }
        true
    }
}

impl HttpContext for Http {
    fn on_http_request_headers(&mut self, _: usize, _: bool) -> Action {
        let mut worker = self.worker.borrow_mut();
        let Some(stream) = worker.stream else { return Action::Continue };
        worker.caller = (worker.caller + 1) % CALLERS;
        let command = format!("{}{:05}{}", worker.before, worker.caller, worker.after);
        worker.waiting.push_back(Some(self.id));
        drop(worker);
        let _ = set_effective_context(self.root_id);
        let _ = send_grpc_stream_message(stream, Some(command.as_bytes()), false);
        let _ = set_effective_context(self.id);
        Action::Pause
    }

    fn on_http_response_headers(&mut self, _: usize, _: bool) -> Action {
        Action::Continue
    }
}

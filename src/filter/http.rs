//! An HTTP context: one request, from its headers to its end.

use std::cell::{OnceCell, RefCell};
use std::rc::Rc;

use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::{Action, MapType};

use super::host;
use super::worker::{Worker, set};
use crate::request::Facts;
use crate::response::{Answer, Header};

/// Where a request is.
pub enum Phase {
    /// Its headers have not come. A response now is the proxy's own or an earlier filter's.
    New,
    /// It is paused until its decision comes.
    Waiting,
    /// It was let through; the response gets these headers.
    Admitted(Vec<Header>),
    /// It goes on, since no rule applies.
    Passed,
    /// The filter has answered it. What comes back is that answer.
    Answered,
}

/// The request of the effective context, asked from the proxy.
#[derive(Default)]
struct Live {
    /// All headers, fetched when the first is wanted whose lines the proxy does not join itself.
    headers: OnceCell<Vec<(Vec<u8>, Vec<u8>)>>,
}

impl Facts for Live {
    fn header(&self, name: &str) -> Option<Vec<u8>> {
        // Of these there is one line, or the proxy joins them.
        if name.starts_with(':') || name == "x-forwarded-for" {
            return host::header(MapType::HttpRequestHeaders, name);
        }
        let headers = self.headers.get_or_init(|| host::headers(MapType::HttpRequestHeaders));
        let lines = headers.iter().filter(|(other, _)| other == name.as_bytes()).map(|(_, value)| value.as_slice());
        let lines = lines.collect::<Vec<_>>();
        (!lines.is_empty()).then(|| lines.join(b",".as_slice()))
    }

    fn property(&self, path: &[&str]) -> Option<Vec<u8>> {
        host::property(path)
    }
}

pub struct Http {
    id: u32,
    /// `None` where the root context has no configuration, and so no rule.
    worker: Option<Worker>,
    phase: Rc<RefCell<Phase>>,
}

impl Http {
    pub fn new(id: u32, worker: Option<Worker>) -> Self {
        Self { id, worker, phase: Rc::new(RefCell::new(Phase::New)) }
    }
}

impl Context for Http {
    fn on_done(&mut self) -> bool {
        if let Some(worker) = &self.worker {
            worker.gone(self.id);
        }
        true
    }
}

impl HttpContext for Http {
    fn on_http_request_headers(&mut self, _headers: usize, _end_of_stream: bool) -> Action {
        let Some(worker) = &self.worker else {
            return Action::Continue;
        };
        let Some(decision) = worker.request(self.id, &Live::default(), &self.phase) else {
            return match self.phase.try_borrow().as_deref() {
                Ok(Phase::Waiting) => Action::Pause,
                _ => Action::Continue,
            };
        };
        worker.log_decision(&decision);
        match worker.answer(&decision) {
            Answer::Continue(headers) => {
                set(&self.phase, Phase::Admitted(headers));
                Action::Continue
            }
            Answer::Reply(reply) => {
                set(&self.phase, Phase::Answered);
                let _ = host::send_local_reply(&reply);
                Action::Pause
            }
        }
    }

    fn on_http_response_headers(&mut self, _headers: usize, _end_of_stream: bool) -> Action {
        let Ok(phase) = self.phase.try_borrow() else {
            return Action::Continue;
        };
        if let Phase::Admitted(headers) = &*phase {
            for (name, value) in headers {
                let _ = host::set_header(MapType::HttpResponseHeaders, name, value);
            }
        }
        Action::Continue
    }
}

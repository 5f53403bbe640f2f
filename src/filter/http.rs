//! An HTTP context: one request, from its headers to its end.

use std::cell::{OnceCell, RefCell};
use std::rc::Rc;

use super::host::{self, Action, Headers};
use super::worker::Worker;
use crate::request::Facts;
use crate::response::{Answer, Header};

/// Where a request is.
enum Phase {
    /// Its headers have not come. A response now is the proxy's own or an earlier filter's.
    New,
    /// It is paused until its decision comes.
    Waiting,
    /// It was let through; the response gets these headers.
    Admitted(Vec<Header>),
    /// The response that it was let through for has come, or its context has ended.
    Done,
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
        if name.starts_with(':') || matches!(name, "x-forwarded-for" | "x-envoy-original-url") {
            return host::header(Headers::Request, name);
        }
        let headers = self.headers.get_or_init(|| host::headers(Headers::Request));
        let lines = headers.iter().filter(|(other, _)| other == name.as_bytes()).map(|(_, value)| value.as_slice());
        let lines = lines.collect::<Vec<_>>();
        (!lines.is_empty()).then(|| lines.join(b",".as_slice()))
    }

    fn property(&self, path: &[&str]) -> Option<Vec<u8>> {
        host::property(path)
    }
}

/// A request.
pub struct Http {
    id: u32,
    /// `None` where the root context has no configuration, and so no rule.
    worker: Option<Worker>,
    phase: RefCell<Phase>,
    /// The rules that it has met, by their places in the configuration.
    met: OnceCell<Vec<usize>>,
}

impl Http {
    /// A request whose headers have not come.
    pub const fn new(id: u32, worker: Option<Worker>) -> Self {
        Self { id, worker, phase: RefCell::new(Phase::New), met: OnceCell::new() }
    }

    /// The proxy's number for its context.
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// Its headers have come. Its context is the effective one.
    pub fn on_request_headers(self: Rc<Self>) -> Action {
        match &self.worker {
            Some(worker) => worker.request(&self, &Live::default()),
            None => Action::Continue,
        }
    }

    /// The headers of a response have come: of the upstream, of an earlier filter, or the filter's own.
    pub fn on_response_headers(&self) {
        // While it waits, the proxy may have answered it by itself: it waits until its context ends.
        if matches!(self.phase.try_borrow().as_deref(), Ok(Phase::Admitted(_)))
            && let Phase::Admitted(headers) = self.set(Phase::Done)
        {
            for (name, value) in headers {
                let _ = host::set_header(Headers::Response, &name, &value);
            }
        }
    }

    /// Its context ends. Where no response has come, this may be because the proxy follows a redirect itself: it makes a new
    /// request of it next, which finds out here what it has met.
    pub fn on_delete(&self) {
        match (&self.worker, self.set(Phase::Done)) {
            (Some(worker), Phase::Waiting) => worker.gone(self.id),
            (Some(worker), Phase::Admitted(_)) => worker.remember(self.met.get().map_or(&[], Vec::as_slice)),
            _ => {}
        }
    }

    /// It has met these rules.
    pub fn meets(&self, rules: Vec<usize>) {
        let _ = self.met.set(rules);
    }

    /// It waits for its decision.
    pub fn wait(&self) -> Action {
        self.set(Phase::Waiting);
        Action::Pause
    }

    /// Answers it, or says that it goes on. Its context is the effective one.
    pub fn answer(&self, answer: Answer) -> Action {
        match answer {
            Answer::Continue(headers) => {
                self.set(Phase::Admitted(headers));
                Action::Continue
            }
            Answer::Reply(reply) => {
                self.set(Phase::Answered);
                let _ = host::send_local_reply(&reply);
                Action::Pause
            }
        }
    }

    /// Goes on to another phase, and returns the one before. Nothing is called while the phase is in use, and so it never is
    /// here.
    fn set(&self, to: Phase) -> Phase {
        self.phase.try_borrow_mut().map_or(Phase::Done, |mut phase| std::mem::replace(&mut phase, to))
    }
}

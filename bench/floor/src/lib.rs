//! Lets every request go on, and looks at nothing; or, with the feature `answers`, denies each as meshquota would, always the
//! same; with `tells` it reads and writes the properties that meshquota has to, too; or, with `asks`, it asks Redis first.

mod asks;

use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{Action, ContextType};

proxy_wasm::main! {{
    proxy_wasm::set_root_context(|id| if cfg!(feature = "asks") { Box::new(asks::Root::new(id)) } else { Box::new(Root) });
}}

struct Root;
struct Http;

impl Context for Root {}
impl Context for Http {}

impl RootContext for Root {
    fn create_http_context(&self, _: u32) -> Option<Box<dyn HttpContext>> {
        Some(Box::new(Http))
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}

impl HttpContext for Http {
    fn on_http_request_headers(&mut self, _: usize, _: bool) -> Action {
        if cfg!(feature = "tells") {
            let _ = self.get_property(vec!["source", "address"]);
            self.set_property(vec!["quota_decision"], Some(b"deny"));
            self.set_property(vec!["quota_rule"], Some(b"flood"));
            self.set_property(vec!["quota_remaining"], Some(b"0"));
        }
        if cfg!(feature = "answers") {
            let headers = vec![
                ("x-ratelimit-limit", "1"),
                ("x-ratelimit-remaining", "0"),
                ("x-ratelimit-reset", "86400"),
                ("retry-after", "86400"),
                ("x-envoy-ratelimited", "true"),
            ];
            self.send_http_response(429, headers, Some(b"rate limit exceeded\n"));
            return Action::Pause;
        }
        Action::Continue
    }

    fn on_http_response_headers(&mut self, _: usize, _: bool) -> Action {
        Action::Continue
    }
}

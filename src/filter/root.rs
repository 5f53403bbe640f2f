//! The root context: one a worker and configuration, and one each on the main thread and in the proxy's throw-away
//! machine that checks a configuration. Those two never see a request, and their streams never open; nothing is
//! logged for that.

use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{BufferType, ContextType, LogLevel, MapType};

use super::host;
use super::http::Http;
use super::worker::Worker;
use crate::config::Config;

/// The longest configuration that is read, in bytes.
const LONGEST_CONFIGURATION: usize = 16 * 1024 * 1024;

pub struct Root {
    id: u32,
    worker: Option<Worker>,
}

impl Root {
    pub const fn new(id: u32) -> Self {
        Self { id, worker: None }
    }
}

impl Context for Root {
    /// The tunnel's response begins: with 200 once its TCP connection stands, with an error that is soon followed by the
    /// stream's close where it does not.
    fn on_grpc_stream_initial_metadata(&mut self, token: u32, _headers: u32) {
        let status = host::header(MapType::GrpcReceiveInitialMetadata, ":status");
        if let (Some(worker), Some(b"200")) = (&self.worker, status.as_deref()) {
            worker.connected(token);
        }
    }

    fn on_grpc_stream_message(&mut self, token: u32, size: usize) {
        if let Some(worker) = &self.worker {
            let bytes = host::buffer(BufferType::GrpcReceiveBuffer, size).unwrap_or_default();
            worker.received(token, &bytes);
        }
    }

    fn on_grpc_stream_close(&mut self, token: u32, status: u32) {
        if let Some(worker) = &self.worker {
            let reason = host::grpc_close_reason();
            let reason = if reason.is_empty() { format!("stream closed, gRPC status {status}") } else { reason };
            worker.closed(token, &reason);
        }
    }

    fn on_done(&mut self) -> bool {
        if let Some(worker) = self.worker.take() {
            worker.shut_down();
        }
        true
    }
}

impl RootContext for Root {
    /// The configuration is checked and taken, or refused as a whole; what ran before goes on running then.
    fn on_configure(&mut self, size: usize) -> bool {
        let bytes = host::buffer(BufferType::PluginConfiguration, size.min(LONGEST_CONFIGURATION));
        match Config::from_json(&bytes.unwrap_or_default()) {
            Ok(config) => {
                let worker = Worker::new(self.id, config);
                worker.start();
                if let Some(before) = self.worker.replace(worker) {
                    before.shut_down();
                }
                true
            }
            Err(errors) => {
                host::log(LogLevel::Error, &format!("the configuration is refused:\n{errors}"));
                false
            }
        }
    }

    fn on_tick(&mut self) {
        if let Some(worker) = &self.worker {
            worker.tick();
        }
    }

    fn create_http_context(&self, id: u32) -> Option<Box<dyn HttpContext>> {
        Some(Box::new(Http::new(id, self.worker.clone())))
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}

//! The root context: one a worker and configuration, and one each on the main thread and in the proxy's throw-away
//! machine that checks a configuration. Those two never see a request, and their streams never open; nothing is
//! logged for that.

use super::host::{self, BufferType, Headers, LogLevel};
use super::worker::Worker;
use crate::config::Config;

/// The longest configuration that is read, in bytes.
const LONGEST_CONFIGURATION: usize = 16 * 1024 * 1024;

/// A worker for the configuration of so many bytes that the proxy has for this context, or none where it is refused.
/// What ran before goes on running then.
pub fn configured(root_id: u32, size: usize) -> Option<Worker> {
    let bytes = host::buffer(BufferType::PluginConfiguration, size.min(LONGEST_CONFIGURATION));
    match Config::from_json(&bytes.unwrap_or_default()) {
        Ok(config) => {
            for warning in &config.warnings {
                host::log(LogLevel::Warn, &format!("the configuration is taken, but {warning}"));
            }
            let worker = Worker::new(root_id, config);
            worker.start();
            Some(worker)
        }
        Err(errors) => {
            host::log(LogLevel::Error, &format!("the configuration is refused:\n{errors}"));
            None
        }
    }
}

/// The tunnel's response begins: with 200 once its TCP connection stands, with an error that is soon followed by the
/// stream's close where it does not.
pub fn on_stream_headers(worker: &Worker, token: u32) {
    if host::header(Headers::Stream, ":status").as_deref() == Some(b"200") {
        worker.connected(token);
    }
}

/// Redis has said so many bytes.
pub fn on_stream_message(worker: &Worker, token: u32, size: usize) {
    let bytes = host::buffer(BufferType::StreamMessage, size).unwrap_or_default();
    worker.received(token, &bytes);
}

/// The stream has ended.
pub fn on_stream_close(worker: &Worker, token: u32, status: u32) {
    let reason = host::grpc_close_reason();
    let reason = if reason.is_empty() { format!("stream closed, gRPC status {status}") } else { reason };
    worker.closed(token, &reason);
}

//! The calls of the proxy-wasm ABI (version 0.2.1) that the filter makes.
//!
//! Each returns whatever the proxy says. Texts of requests are bytes: a header may hold anything.

use std::time::Duration;

use crate::response::{Header, LocalReply};
use crate::stats::{Metric, MetricType};

/// What becomes of a request or a response after a callback.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// It goes on.
    Continue = 0,
    /// It waits, with all that comes after it.
    Pause = 1,
}

/// How urgent a line of the log is.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum LogLevel {
    Info = 2,
    Warn = 3,
    Error = 4,
}

/// Bytes that the proxy has.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum BufferType {
    /// The message of a gRPC stream, inside its callback.
    StreamMessage = 5,
    /// The configuration of the root context, inside that callback.
    PluginConfiguration = 7,
}

/// Headers that the proxy has.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum Headers {
    Request = 0,
    Response = 2,
    /// The headers of a gRPC stream's response, inside that callback.
    Stream = 4,
}

/// A status other than OK. What it was changes nothing for a caller, except that the call did not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused(u32);

#[link(wasm_import_module = "env")]
unsafe extern "C" {
    fn proxy_log(level: u32, message: *const u8, size: usize) -> u32;
    fn proxy_set_tick_period_milliseconds(period: u32) -> u32;
    fn proxy_get_current_time_nanoseconds(time: *mut u64) -> u32;
    fn proxy_get_property(path: *const u8, path_size: usize, value: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_set_property(path: *const u8, path_size: usize, value: *const u8, size: usize) -> u32;
    fn proxy_get_buffer_bytes(buffer: u32, start: usize, length: usize, value: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_get_header_map_value(
        map: u32,
        name: *const u8,
        name_size: usize,
        value: *mut *mut u8,
        size: *mut usize,
    ) -> u32;
    fn proxy_get_header_map_pairs(map: u32, value: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_replace_header_map_value(
        map: u32,
        name: *const u8,
        name_size: usize,
        value: *const u8,
        size: usize,
    ) -> u32;
    fn proxy_send_local_response(
        status: u32,
        details: *const u8,
        details_size: usize,
        body: *const u8,
        body_size: usize,
        headers: *const u8,
        headers_size: usize,
        grpc_status: i32,
    ) -> u32;
    fn proxy_continue_stream(stream: u32) -> u32;
    fn proxy_set_effective_context(context_id: u32) -> u32;
    fn proxy_grpc_stream(
        cluster: *const u8,
        cluster_size: usize,
        service: *const u8,
        service_size: usize,
        method: *const u8,
        method_size: usize,
        metadata: *const u8,
        metadata_size: usize,
        token: *mut u32,
    ) -> u32;
    fn proxy_grpc_send(token: u32, message: *const u8, size: usize, end_stream: u32) -> u32;
    fn proxy_grpc_cancel(token: u32) -> u32;
    fn proxy_call_foreign_function(
        name: *const u8,
        name_size: usize,
        arguments: *const u8,
        arguments_size: usize,
        result: *mut *mut u8,
        result_size: *mut usize,
    ) -> u32;
    fn proxy_get_status(code: *mut u32, message: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_define_metric(metric_type: u32, name: *const u8, size: usize, id: *mut u32) -> u32;
    fn proxy_increment_metric(id: u32, by: i64) -> u32;
    fn proxy_record_metric(id: u32, value: u64) -> u32;
}

fn ok(status: u32) -> Result<(), Refused> {
    if status == 0 { Ok(()) } else { Err(Refused(status)) }
}

/// Memory of so many bytes for the proxy to write a value into.
pub fn allocated(size: usize) -> *mut u8 {
    Box::into_raw(vec![0_u8; size].into_boxed_slice()).cast()
}

/// Takes over memory that the proxy had [allocated](allocated) for a value.
fn taken(value: *mut u8, size: usize) -> Vec<u8> {
    if value.is_null() {
        return Vec::new();
    }
    // SAFETY: the proxy got this memory from `allocated`, a boxed slice of that size, has filled it, and has forgotten it.
    unsafe { Vec::from_raw_parts(value, size, size) }
}

/// Writes a line to the proxy's log.
pub fn log(level: LogLevel, message: &str) {
    // SAFETY: pointer and length are of one string. The same holds for every pair below.
    unsafe { proxy_log(level as u32, message.as_ptr(), message.len()) };
}

/// Asks for ticks of the effective context, which must be a root context. The first comes after one period.
pub fn set_tick_period(period: Duration) -> Result<(), Refused> {
    let milliseconds = u32::try_from(period.as_millis()).unwrap_or(u32::MAX).max(1);
    ok(unsafe { proxy_set_tick_period_milliseconds(milliseconds) })
}

/// The time of day, in milliseconds since 1970, or zero where the proxy does not say.
pub fn wall_ms() -> u64 {
    let mut nanoseconds = 0;
    // SAFETY: the pointer is to a local.
    let status = unsafe { proxy_get_current_time_nanoseconds(&mut nanoseconds) };
    if ok(status).is_ok() { nanoseconds / 1_000_000 } else { 0 }
}

/// The value of a property.
pub fn property(path: &[&str]) -> Option<Vec<u8>> {
    // The ABI wants the parts of the path separated by zero bytes.
    let path = path.join("\0");
    let (mut value, mut size) = (std::ptr::null_mut(), 0);
    // SAFETY: the pointers are to locals; the value is taken over at once.
    let status = unsafe { proxy_get_property(path.as_ptr(), path.len(), &mut value, &mut size) };
    ok(status).ok().map(|()| taken(value, size))
}

/// Has a property of requests last for as long as the request does, and not only until an internal redirect begins it anew.
/// The effective context is a root context. Refused where that is so already.
pub fn keep_property(name: &str) -> Result<(), Refused> {
    const FUNCTION: &str = "declare_property";
    // Envoy's message DeclarePropertyArguments: the name is field 1, the type is field 3 (1 is a string), the span is
    // field 5 (1 is the request).
    let mut arguments = vec![0x0A, u8::try_from(name.len()).unwrap_or(0)];
    arguments.extend_from_slice(name.as_bytes());
    arguments.extend([0x18, 1, 0x28, 1]);
    let (mut value, mut size) = (std::ptr::null_mut(), 0);
    // SAFETY: as in `property`.
    let status = unsafe {
        proxy_call_foreign_function(
            FUNCTION.as_ptr(),
            FUNCTION.len(),
            arguments.as_ptr(),
            arguments.len(),
            &mut value,
            &mut size,
        )
    };
    drop(taken(value, size));
    ok(status)
}

/// Sets a property of the effective context, which an access log reads as `%FILTER_STATE(wasm.NAME:PLAIN)%`.
pub fn set_property(name: &str, value: &str) -> Result<(), Refused> {
    ok(unsafe { proxy_set_property(name.as_ptr(), name.len(), value.as_ptr(), value.len()) })
}

/// The first bytes of a buffer, at most so many.
pub fn buffer(buffer: BufferType, length: usize) -> Option<Vec<u8>> {
    let (mut value, mut size) = (std::ptr::null_mut(), 0);
    // SAFETY: as in `property`.
    let status = unsafe { proxy_get_buffer_bytes(buffer as u32, 0, length, &mut value, &mut size) };
    ok(status).ok().map(|()| taken(value, size))
}

/// A header's value. The proxy joins the lines of x-forwarded-for; of others it gives the first.
pub fn header(map: Headers, name: &str) -> Option<Vec<u8>> {
    let (mut value, mut size) = (std::ptr::null_mut(), 0);
    // SAFETY: as in `property`.
    let status = unsafe { proxy_get_header_map_value(map as u32, name.as_ptr(), name.len(), &mut value, &mut size) };
    ok(status).ok().map(|()| taken(value, size)).filter(|value| !value.is_empty())
}

/// All headers, line by line, in their order. Names are in lower case.
pub fn headers(map: Headers) -> Vec<(Vec<u8>, Vec<u8>)> {
    let (mut value, mut size) = (std::ptr::null_mut(), 0);
    // SAFETY: as in `property`.
    let status = unsafe { proxy_get_header_map_pairs(map as u32, &mut value, &mut size) };
    let serialized = ok(status).ok().map(|()| taken(value, size)).unwrap_or_default();
    deserialized(&serialized).unwrap_or_default()
}

/// The reverse of [`serialized`]; `None` where the bytes end too soon.
fn deserialized(bytes: &[u8]) -> Option<Vec<(Vec<u8>, Vec<u8>)>> {
    fn number(bytes: &mut &[u8]) -> Option<usize> {
        let (number, rest) = bytes.split_first_chunk::<4>()?;
        *bytes = rest;
        usize::try_from(u32::from_le_bytes(*number)).ok()
    }
    fn text(bytes: &mut &[u8], size: usize) -> Option<Vec<u8>> {
        let (text, rest) = bytes.split_at_checked(size)?;
        *bytes = rest.split_first()?.1;
        Some(text.to_vec())
    }
    let mut rest = bytes;
    let count = number(&mut rest)?;
    let sizes = (0..count).map(|_| Some((number(&mut rest)?, number(&mut rest)?))).collect::<Option<Vec<_>>>()?;
    sizes.into_iter().map(|(name, value)| Some((text(&mut rest, name)?, text(&mut rest, value)?))).collect()
}

/// Sets a header, in place of all of that name.
pub fn set_header(map: Headers, name: &str, value: &str) -> Result<(), Refused> {
    ok(unsafe { proxy_replace_header_map_value(map as u32, name.as_ptr(), name.len(), value.as_ptr(), value.len()) })
}

/// Answers the request of the effective context.
pub fn send_local_reply(reply: &LocalReply) -> Result<(), Refused> {
    let headers = serialized(&reply.headers);
    ok(unsafe {
        proxy_send_local_response(
            reply.status,
            reply.details.as_ptr(),
            reply.details.len(),
            reply.body.as_ptr(),
            reply.body.len(),
            headers.as_ptr(),
            headers.len(),
            reply.grpc_status,
        )
    })
}

/// Headers as the ABI wants them: their number, the sizes of each name and value, then the texts, each ended by a zero
/// byte. Numbers are of 32 bits, least significant byte first.
fn serialized(headers: &[Header]) -> Vec<u8> {
    fn number(size: usize) -> [u8; 4] {
        u32::try_from(size).unwrap_or(u32::MAX).to_le_bytes()
    }
    let mut bytes = Vec::from(number(headers.len()));
    for (name, value) in headers {
        bytes.extend(number(name.len()));
        bytes.extend(number(value.len()));
    }
    for (name, value) in headers {
        for text in [&**name, value.as_str()] {
            bytes.extend_from_slice(text.as_bytes());
            bytes.push(0);
        }
    }
    bytes
}

/// Lets the paused request of the effective context go on.
pub fn continue_request() -> Result<(), Refused> {
    const REQUEST: u32 = 0;
    ok(unsafe { proxy_continue_stream(REQUEST) })
}

/// Makes the calls that follow count for another context. Refused where that context is gone: a normal case.
pub fn set_effective_context(context_id: u32) -> Result<(), Refused> {
    ok(unsafe { proxy_set_effective_context(context_id) })
}

/// Opens a gRPC stream without metadata. Its callbacks go to the effective context, which must be a root context.
pub fn grpc_open(cluster: &str, service: &str, method: &str) -> Result<u32, Refused> {
    let metadata = serialized(&[]);
    let mut token = 0;
    // SAFETY: the last pointer is to a local.
    ok(unsafe {
        proxy_grpc_stream(
            cluster.as_ptr(),
            cluster.len(),
            service.as_ptr(),
            service.len(),
            method.as_ptr(),
            method.len(),
            metadata.as_ptr(),
            metadata.len(),
            &mut token,
        )
    })?;
    Ok(token)
}

/// Sends a message on a gRPC stream. The effective context must be the one that opened it.
pub fn grpc_send(token: u32, message: &[u8]) -> Result<(), Refused> {
    ok(unsafe { proxy_grpc_send(token, message.as_ptr(), message.len(), 0) })
}

/// Resets a gRPC stream. Its callbacks end with that.
pub fn grpc_cancel(token: u32) -> Result<(), Refused> {
    ok(unsafe { proxy_grpc_cancel(token) })
}

/// What the proxy says about the close of a gRPC stream, inside that callback.
pub fn grpc_close_reason() -> String {
    let (mut code, mut value, mut size) = (0, std::ptr::null_mut(), 0);
    // SAFETY: as in `property`.
    let status = unsafe { proxy_get_status(&mut code, &mut value, &mut size) };
    let message = ok(status).ok().map(|()| taken(value, size)).unwrap_or_default();
    String::from_utf8_lossy(&message).into_owned()
}

/// Defines a metric, or finds the one of that name.
pub fn define_metric(metric: &Metric) -> Result<u32, Refused> {
    let metric_type = match metric.metric_type {
        MetricType::Counter => 0,
        MetricType::Gauge => 1,
        MetricType::Histogram => 2,
    };
    let mut id = 0;
    // SAFETY: the pointers are to locals.
    ok(unsafe { proxy_define_metric(metric_type, metric.name.as_ptr(), metric.name.len(), &mut id) })?;
    Ok(id)
}

/// Adds to a counter or a gauge.
pub fn increment_metric(id: u32, by: i64) -> Result<(), Refused> {
    ok(unsafe { proxy_increment_metric(id, by) })
}

/// Records a value in a histogram.
pub fn record_metric(id: u32, value: u64) -> Result<(), Refused> {
    ok(unsafe { proxy_record_metric(id, value) })
}

//! The module itself: what it asks of the proxy, and what the proxy is made to call.

use std::fs;

use wasmparser::{Parser, Payload};

use crate::support::module::module;

/// The largest module that is shipped, in bytes.
const LARGEST: usize = 500_000;

#[test]
fn the_proxy_calls_what_has_something_to_do_and_the_module_stays_small() {
    let bytes = fs::read(module()).unwrap();
    assert!(bytes.len() <= LARGEST, "{} bytes", bytes.len());
    let (mut exports, mut imports) = (Vec::new(), Vec::new());
    for payload in Parser::new(0).parse_all(&bytes) {
        match payload.unwrap() {
            Payload::ExportSection(section) => exports.extend(section.into_iter().map(|export| export.unwrap().name)),
            Payload::ImportSection(section) => {
                imports.extend(section.into_iter().map(|import| import.unwrap().module));
            }
            _ => {}
        }
    }
    exports.sort_unstable();
    // Each of them that is there is a call into the module, once a request or more.
    let expected = [
        "_initialize",
        "memory",
        "proxy_abi_version_0_2_1",
        "proxy_on_configure",
        "proxy_on_context_create",
        "proxy_on_delete",
        "proxy_on_grpc_close",
        "proxy_on_grpc_receive",
        "proxy_on_grpc_receive_initial_metadata",
        "proxy_on_memory_allocate",
        "proxy_on_request_headers",
        "proxy_on_response_headers",
        "proxy_on_tick",
    ];
    assert_eq!(exports, expected);
    imports.sort_unstable();
    imports.dedup();
    assert_eq!(imports, ["env", "wasi_snapshot_preview1"]);
}

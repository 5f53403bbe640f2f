//! What the integration tests share: real servers on free ports, a real Envoy with the module in it, clients, a service,
//! and a proxy that spoils replies.
//!
//! A test binary takes what it needs with `mod support;`, so what one of them leaves unused is no mistake.
#![allow(dead_code, missing_docs)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, clippy::string_slice)]

pub mod markdown;
pub mod pinned;
pub mod program;
pub mod project;

pub mod server;
pub mod tls;

pub mod listener;

pub mod app;
pub mod http;
pub mod http2;

pub mod cluster;
pub mod docker;
pub mod envoy;
pub mod module;
pub mod quota;

pub mod manifests;
pub mod schemas;
pub mod tunnel;

pub mod shim;

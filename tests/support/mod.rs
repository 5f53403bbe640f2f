//! What the integration tests share: real servers on free ports.
//!
//! A test binary takes what it needs with `mod support;`, so what one of them leaves unused is no mistake.
#![allow(dead_code, missing_docs)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, clippy::string_slice)]

pub mod module;
pub mod server;

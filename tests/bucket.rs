//! lua/bucket.lua in real Redis and real Valkey: against an exact model, and case by case.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing
)]

#[path = "bucket/model.rs"]
mod model;
#[path = "bucket/properties.rs"]
mod properties;
#[path = "bucket/store.rs"]
mod store;
mod support;

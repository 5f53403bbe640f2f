//! The pages on migration are true: the example of each decides as its page says, in real Envoys with real servers.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, clippy::string_slice)]

mod support;

#[path = "migration/actions.rs"]
mod actions;
#[path = "migration/alike.rs"]
mod alike;
#[path = "migration/application.rs"]
mod application;
#[path = "migration/example.rs"]
mod example;
#[path = "migration/ratelimit.rs"]
mod ratelimit;

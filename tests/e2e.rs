//! The module in real Envoys, against real servers: what clients, operators and Redis get to see.
//!
//! Every test starts what it needs on ports of its own, and ends with [`Envoy::finish`](support::envoy::Envoy::finish).
//! Assertions are about order and counts where they can be: the machine may be slow and busy, and a test must not mind.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, clippy::string_slice)]

mod support;

#[path = "e2e/client.rs"]
mod client;
#[path = "e2e/identity.rs"]
mod identity;
#[path = "e2e/keys.rs"]
mod keys;
#[path = "e2e/rules.rs"]
mod rules;

#[path = "e2e/policy.rs"]
mod policy;
#[path = "e2e/recipes.rs"]
mod recipes;
#[path = "e2e/scope.rs"]
mod scope;

#[path = "e2e/totals.rs"]
mod totals;

#[path = "e2e/coalesce.rs"]
mod coalesce;
#[path = "e2e/deny_cache.rs"]
mod deny_cache;

#[path = "e2e/breaker.rs"]
mod breaker;
#[path = "e2e/cluster.rs"]
mod cluster;
#[path = "e2e/failover.rs"]
mod failover;
#[path = "e2e/faults.rs"]
mod faults;
#[path = "e2e/login.rs"]
mod login;
#[path = "e2e/outage.rs"]
mod outage;
#[path = "e2e/proxied.rs"]
mod proxied;
#[path = "e2e/refusals.rs"]
mod refusals;
#[path = "e2e/wire.rs"]
mod wire;

#[path = "e2e/paused.rs"]
mod paused;

#[path = "e2e/configuration.rs"]
mod configuration;
#[path = "e2e/operator.rs"]
mod operator;

#[path = "e2e/module.rs"]
mod module;
#[path = "e2e/versions.rs"]
mod versions;

use serde_json::{Value, json};

use support::envoy::Envoy;
use support::http::Message;
use support::server::wait_until;

/// The key of the bucket of a client on 127.0.0.1 under the rule `per-ip`.
const KEY: &str = "quota:{per-ip:127.0.0.1}:0";

/// The quota headers of a response: limit and remaining. `None` where it has none of them.
///
/// # Panics
/// Where one of them is there twice, or some are there and others not.
fn quota(response: &Message) -> Option<(u64, u64)> {
    let [limit, remaining, reset] =
        ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"].map(|name| response.number(name));
    assert!(limit.is_some() == remaining.is_some() && limit.is_some() == reset.is_some(), "{:?}", response.headers);
    limit.zip(remaining)
}

/// Whether the response is one that the filter let through without a decision.
fn is_waved_through(response: &Message) -> bool {
    response.status() == 200 && quota(response).is_none()
}

/// Sends requests until one is decided by Redis, and returns its limit and what it left.
fn until_decided(envoy: &Envoy) -> (u64, u64) {
    let mut found = None;
    wait_until("a request is decided by Redis", || {
        found = quota(&envoy.get("/"));
        found.is_some()
    });
    found.unwrap()
}

/// The same, but that Redis is asked about each request, known denials or not.
fn forgetful(mut configuration: Value) -> Value {
    configuration["deny_cache"] = json!({"entries": 0});
    configuration
}

/// A configuration of one rule `per-ip` with that capacity, that timeout, and next to no refill.
fn slow(capacity: u64, timeout: &str) -> Value {
    json!({
        "redis": {"timeout": timeout},
        "rules": [{"name": "per-ip", "limits": [{"capacity": capacity, "refill": "1/day"}]}],
    })
}

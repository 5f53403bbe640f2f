//! meshquota: quotas over a whole mesh, enforced by a proxy-wasm filter that runs a token bucket in Redis from
//! inside stock Envoy.
//!
//! A pure core decides and a thin shell talks to the proxy. In reading order:
//!
//! * [`quota`]: capacity, refill and cost.
//! * [`script`]: the bucket's script in Redis, its calls and its replies.
//! * [`client_ip`]: which address is the client's.
//! * [`path`]: the normal form of a path.
//! * [`request`]: a request, as far as rules ask about it.
//! * [`condition`]: which requests a rule is for.
//! * [`identity`]: who a request counts as.
//! * [`overrides`]: other limits for some callers.
//! * [`key`]: identities as keys of Redis.
//! * [`rule`]: which rules a request meets, and the charges that they make.
//! * [`config`]: JSON to a configuration that cannot be wrong.
//! * [`exchange`]: the conversation with Redis, without I/O.
//! * [`breaker`]: when Redis is no longer asked.
//! * [`bucket`]: the bucket in this process.
//! * [`local`]: buckets of the worker's own, for the time when Redis is not asked.
//! * [`decision`]: what the buckets said, and what becomes of the request.
//! * [`response`]: what the client sees of it.
//! * [`stats`] and [`outage`]: what the operator sees.
//! * [`limiter`]: all of it together, for one worker.
//! * `filter`: the shell, which exists only in the module.

pub mod quota;
pub mod script;

pub mod client_ip;
pub mod coalesce;
pub mod key;
pub mod path;
pub mod request;

pub mod condition;
pub mod identity;
pub mod overrides;
pub mod rule;

pub mod config;

pub mod exchange;

pub mod breaker;
pub mod bucket;
pub mod deny_cache;
pub mod local;

pub mod decision;
pub mod response;

pub mod outage;
pub mod stats;

pub mod limiter;

#[cfg(target_arch = "wasm32")]
mod filter;

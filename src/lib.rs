//! meshquota: quotas over a whole mesh, enforced by a proxy-wasm filter that runs a token bucket in Redis from
//! inside stock Envoy.
//!
//! A pure core decides and a thin shell talks to the proxy. In reading order:
//!
//! * [`quota`]: capacity, refill and cost.
//! * [`script`]: the Lua script that keeps the buckets, its arguments and its replies.

pub mod quota;
pub mod script;

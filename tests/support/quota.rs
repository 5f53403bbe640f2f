//! What a client and Redis know of a quota of the rule `per-ip` with ten tokens, as the tests of manifests use it.

use redis::Commands;

use super::envoy::Envoy;
use super::http::Message;
use super::server::{Server, wait_until};

/// The quota headers of a response: limit and remaining.
pub fn quota(response: &Message) -> Option<(u64, u64)> {
    response.number("x-ratelimit-limit").zip(response.number("x-ratelimit-remaining"))
}

/// The key of a client's bucket.
pub fn key(client: &str) -> String {
    format!("quota:{{per-ip:{client}}}:0")
}

/// What is left in a client's bucket of ten, and none where it has no bucket.
pub fn left(redis: &Server, client: &str) -> Option<u64> {
    let tokens: Option<f64> = redis.client().hget(key(client), "tokens").unwrap();
    // A day's refill brings a part of a token back.
    tokens.map(|tokens| tokens as u64)
}

/// All keys of a server, sorted.
pub fn keys(redis: &Server) -> Vec<String> {
    let mut keys: Vec<String> = redis.client().keys("*").unwrap();
    keys.sort();
    keys
}

/// Sends requests until one has been denied; before that some have been admitted, and they told of the limit.
pub fn check_limit(envoy: &Envoy) {
    let mut admitted = 0;
    wait_until("a request is denied", || {
        let response = envoy.get("/");
        match response.status() {
            200 => admitted += usize::from(quota(&response).is_some_and(|(limit, _)| limit == 10)),
            status => assert_eq!((status, quota(&response)), (429, Some((10, 0)))),
        }
        response.status() == 429
    });
    assert!(admitted >= 10, "{admitted}");
}

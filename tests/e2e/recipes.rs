//! The recipes of `envoy/recipes/`: each is loaded as it stands, and does what its page promises.
//!
//! Their limits are those of real life and refill while a test runs. So a test counts how many requests are admitted
//! before the first denial, which is the capacity at least, and no more than what came in meanwhile on top.

use std::time::Instant;

use redis::Commands;
use serde_json::{Value, json};

use crate::support::app::App;
use crate::support::envoy::{Envoy, PATIENT, Setup};
use crate::support::http::{Client, Message, Request};
use crate::support::server::{Kind, Server};
use crate::{is_waved_through, quota};

fn recipe(text: &str) -> Value {
    let mut recipe: Value = serde_json::from_str(text).unwrap();
    recipe["redis"] = json!({"timeout": PATIENT});
    recipe
}

struct Kitchen {
    redis: Server,
    envoy: Envoy,
    app: App,
    started: Instant,
}

impl Kitchen {
    /// An Envoy with that configuration, behind a proxy that writes x-forwarded-for.
    fn new(configuration: Value) -> Self {
        let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
        let envoy = Setup::new(redis.port(), &app)
            .configuration(configuration)
            .tweak(|document| document.manager("ingress")["use_remote_address"] = json!(false))
            .start();
        Self { redis, envoy, app, started: Instant::now() }
    }

    fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = self.redis.client().keys("*").unwrap();
        keys.sort();
        keys
    }

    /// How often Redis ran the script.
    fn calls(&self) -> String {
        let statistics: String = redis::cmd("INFO").arg("commandstats").query(&mut self.redis.client()).unwrap();
        let evalsha = statistics.lines().find(|line| line.starts_with("cmdstat_evalsha:"));
        evalsha.and_then(|line| line.split(',').next()).expect("it was run").to_owned()
    }

    /// Sends a request until it is denied. Checks that as many were admitted as a bucket of this capacity and refill a
    /// second can have given since the beginning, and no fewer than it held. Returns the denial.
    fn drain(&self, client: &mut Client, request: &Request, capacity: u64, refill: f64) -> Message {
        let mut admitted = 0;
        loop {
            let response = client.exchange(request);
            if response.status() != 200 {
                let most = capacity as f64 + refill * self.started.elapsed().as_secs_f64();
                assert!(
                    (capacity..=most.ceil() as u64).contains(&admitted),
                    "{admitted} of {capacity}, at most {most}"
                );
                assert_eq!(response.status(), 429);
                assert!(response.number("retry-after").is_some_and(|wait| wait >= 1));
                return response;
            }
            admitted += 1;
            assert!(admitted < 100_000, "nothing is denied");
        }
    }

    fn finish(self) {
        self.envoy.wait_for_count("calls ok", |calls| calls > 0);
        self.envoy.finish();
    }
}

#[test]
fn per_ip() {
    let kitchen = Kitchen::new(recipe(include_str!("../../envoy/recipes/per-ip.json")));
    let mut client = kitchen.envoy.client();
    kitchen.drain(&mut client, &Request::get("/"), 100, 10.0);
    // Another address is another caller.
    assert_eq!(quota(&kitchen.envoy.client_from("127.0.0.2").get("/")), Some((100, 99)));
    assert_eq!(kitchen.keys(), ["quota:{per-ip:127.0.0.1}:0", "quota:{per-ip:127.0.0.2}:0"]);
    kitchen.finish();
}

#[test]
fn behind_proxies() {
    let kitchen = Kitchen::new(recipe(include_str!("../../envoy/recipes/behind-proxies.json")));
    let mut client = kitchen.envoy.client();
    let from = |forwarded: &str| Request::get("/").with("x-forwarded-for", forwarded);
    assert_eq!(quota(&client.exchange(&from("203.0.113.7, 10.1.2.3"))), Some((100, 99)));
    // What the caller wrote left of its own address buys nothing.
    assert_eq!(quota(&client.exchange(&from("198.51.100.9, 203.0.113.7, 10.1.2.3"))), Some((100, 98)));
    assert_eq!(quota(&client.exchange(&from("203.0.113.8, 10.1.2.3"))), Some((100, 99)));
    assert_eq!(kitchen.keys(), ["quota:{per-ip:203.0.113.7}:0", "quota:{per-ip:203.0.113.8}:0"]);
    kitchen.finish();
}

#[test]
fn api_key_plans() {
    let kitchen = Kitchen::new(recipe(include_str!("../../envoy/recipes/api-key-plans.json")));
    let mut client = kitchen.envoy.client();
    let with = |key: &str| Request::get("/").with("x-api-key", key);
    kitchen.drain(&mut client, &with("silver"), 20, 10.0);
    kitchen.drain(&mut client, &with("gold-key-1"), 200, 100.0);
    assert_eq!(quota(&client.exchange(&with("gold-key-2"))), Some((200, 199)), "each key has a bucket of its own");
    for _ in 0..30 {
        assert!(is_waved_through(&client.exchange(&with("internal-key"))));
    }
    // Who shows no key is counted by address.
    kitchen.drain(&mut client, &Request::get("/"), 5, 1.0);
    for blank in ["", " ", "\t"] {
        assert_eq!(client.exchange(&with(blank)).status(), 429, "a blank key is none: {blank:?}");
    }
    assert_eq!(client.exchange(&with("bronze")).status(), 200);
    let keys = kitchen.keys();
    assert!(!keys.iter().any(|key| key.contains("gold") || key.contains("silver")), "{keys:?}");
    kitchen.finish();
}

#[test]
fn login() {
    let kitchen = Kitchen::new(recipe(include_str!("../../envoy/recipes/login.json")));
    let mut client = kitchen.envoy.client();
    kitchen.drain(&mut client, &Request::new("POST", "/login"), 5, 5.0 / 60.0);
    for disguise in ["//login", "/./login", "/%6cogin?next=/", "/x/../login"] {
        assert_eq!(client.exchange(&Request::new("POST", disguise)).status(), 429, "{disguise}");
    }
    // The form itself, and all else, is not for that rule.
    assert_eq!(quota(&client.get("/login")).map(|(limit, _)| limit), Some(200));
    kitchen.drain(&mut client, &Request::get("/"), 200, 100.0);
    kitchen.finish();
}

#[test]
fn burst_and_sustained() {
    let kitchen = Kitchen::new(recipe(include_str!("../../envoy/recipes/burst-and-sustained.json")));
    let mut client = kitchen.envoy.client();
    let first = kitchen.drain(&mut client, &Request::get("/"), 20, 10.0);
    assert_eq!(quota(&first), Some((20, 0)), "the burst binds first");
    // Who goes on at the pace of the burst meets the other limit.
    let mut admitted = 0;
    loop {
        let response = client.get("/");
        admitted += u64::from(response.status() == 200);
        if quota(&response) == Some((60, 0)) && response.status() == 429 {
            assert!(response.number("retry-after").is_some());
            break;
        }
        assert!(admitted < 200, "the sustained limit never binds");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(kitchen.keys(), ["quota:{per-ip:127.0.0.1}:0", "quota:{per-ip:127.0.0.1}:1"]);
    kitchen.finish();
}

#[test]
fn expensive_endpoint() {
    let kitchen = Kitchen::new(recipe(include_str!("../../envoy/recipes/expensive-endpoint.json")));
    let mut client = kitchen.envoy.client();
    let export = Request::get("/export/orders");
    assert_eq!(quota(&client.exchange(&export)), Some((100, 60)));
    assert_eq!(client.exchange(&export).status(), 200);
    let third = client.exchange(&export);
    let most = 100.0 + 5.0 * kitchen.started.elapsed().as_secs_f64();
    assert!(third.status() == 429 || most >= 120.0, "three exports cost 120");
    if third.status() == 429 {
        // One budget for both: what is left is enough for the small ones, down to the last.
        kitchen.drain(&mut client, &Request::get("/"), 20, 5.0);
    }
    assert_eq!(kitchen.keys(), ["quota:{budget:127.0.0.1}:0"]);
    kitchen.finish();
}

#[test]
fn grpc_method() {
    let kitchen = Kitchen::new(recipe(include_str!("../../envoy/recipes/grpc-method.json")));
    let mut client = kitchen.envoy.client();
    let call = |method: &str, tenant: &str| {
        Request::new("POST", method).with("content-type", "application/grpc").with("x-tenant", tenant)
    };
    let create = "/shop.v1.Orders/Create";
    for _ in 0..10 {
        let response = client.exchange(&call(create, "a"));
        assert!(response.header("grpc-status").is_none_or(|status| status == "0"));
    }
    let denied = client.exchange(&call(create, "a"));
    assert_eq!((denied.status(), denied.header("grpc-status").as_deref()), (200, Some("8")));
    assert_eq!(denied.header("grpc-message").as_deref(), Some("too many orders, see retry-after"));
    assert!(denied.number("retry-after").is_some());
    assert_eq!(quota(&client.exchange(&call(create, "b"))), Some((10, 9)));
    assert!(is_waved_through(&client.exchange(&call("/shop.v1.Orders/List", "a"))));
    assert_eq!(kitchen.app.count(), 12);
    kitchen.finish();
}

#[test]
fn exemptions() {
    let mut configuration = recipe(include_str!("../../envoy/recipes/exemptions.json"));
    configuration["client_ip"] = json!({"trusted_hops": 1});
    let kitchen = Kitchen::new(configuration);
    let mut client = kitchen.envoy.client();
    let from = |request: Request, forwarded: &str| request.with("x-forwarded-for", forwarded);
    let outside = |path: &str| from(Request::get(path), "203.0.113.7");
    kitchen.drain(&mut client, &outside("/"), 30, 1.0);
    let preflight = from(Request::new("OPTIONS", "/"), "203.0.113.7")
        .with("origin", "https://app.example.com")
        .with("access-control-request-method", "PUT");
    let exempt = [outside("/healthz"), outside("/metrics"), from(Request::get("/"), "10.20.30.40"), preflight];
    let calls = kitchen.calls();
    for request in exempt {
        assert!(is_waved_through(&client.exchange(&request)), "{request:?}");
    }
    assert_eq!(kitchen.calls(), calls, "what is exempt costs no call");
    assert_eq!(client.exchange(&outside("/healthz/deep")).status(), 429);
    kitchen.finish();
}

#[test]
fn shadow_then_enforce() {
    let watching = recipe(include_str!("../../envoy/recipes/shadow.json"));
    let mut enforcing = watching.clone();
    enforcing["rules"][0].as_object_mut().unwrap().remove("shadow").unwrap();
    let kitchen = Kitchen::new(watching);
    let mut client = kitchen.envoy.client();
    for _ in 0..60 {
        assert!(is_waved_through(&client.get("/")));
    }
    kitchen.envoy.wait_for_count("per-ip shadow_deny", |times| times > 0);
    let kept = kitchen.envoy.count("per-ip allow") + kitchen.envoy.count("per-ip shadow_deny");
    assert!(kept <= 60, "{kept}");
    kitchen.finish();
    let kitchen = Kitchen::new(enforcing);
    let mut client = kitchen.envoy.client();
    kitchen.drain(&mut client, &Request::get("/"), 30, 1.0);
    kitchen.finish();
}

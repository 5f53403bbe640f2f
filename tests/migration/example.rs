//! The example of `docs/migrate-from-ratelimit.md`, run: a user's Envoy with one of the two limiters, or with both.
//!
//! Envoy, its filter `envoy.filters.http.ratelimit`, the actions, the module and Redis are real. The service is a stand-in
//! (`ratelimit.rs`), whose clock stands still unless a test moves it: no window ends by chance.

use serde_json::{Value, json};

use crate::ratelimit::Service;
use crate::support::app::App;
use crate::support::envoy::{Document, Envoy, PATIENT, Setup, local};
use crate::support::http::{Message, Request};
use crate::support::project::read;
use crate::support::server::{Kind, Server};

/// Its folder.
const EXAMPLE: &str = "envoy/migration/ratelimit";

pub fn yaml(text: &str) -> Value {
    serde_yaml_ng::from_str(text).unwrap()
}

/// The rules of the example. A busy machine is no outage.
pub fn rules() -> Value {
    let mut rules: Value = serde_json::from_str(&read(format!("{EXAMPLE}/meshquota.json"))).unwrap();
    rules["redis"] = json!({"timeout": PATIENT});
    rules
}

/// Which of the two limiters a listener has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum With {
    Service,
    Both,
    Meshquota,
}

/// Puts the listener and the clusters of the example's file beside the parts of `envoy/envoy.yaml` that its page says to add.
pub fn adapt(document: &mut Document, with: With, service: u16, app: u16) {
    let mut user = Document(yaml(&read(format!("{EXAMPLE}/envoy.yaml"))));
    for (cluster, port) in [("ratelimit", service), ("app", app), ("payments", app), ("shipping", app)] {
        user.aim(cluster, local(port));
    }
    let mut manager = user.manager("ingress").take();
    let shipped = document.manager("ingress").take();
    let quota = &shipped["http_filters"][0];
    let filters = manager["http_filters"].as_array_mut().unwrap();
    assert_eq!((&quota["name"], filters.len()), (&json!("meshquota"), 2));
    // An answer that comes late on a busy machine would let a request pass.
    filters[0]["typed_config"]["timeout"] = json!(PATIENT);
    match with {
        With::Service => {}
        With::Both => filters.insert(0, quota.clone()),
        With::Meshquota => filters[0] = quota.clone(),
    }
    manager["access_log"] = shipped["access_log"].clone();
    *document.manager("ingress") = manager;
    let clusters = document.0["static_resources"]["clusters"].as_array_mut().unwrap();
    clusters.retain(|cluster| cluster["name"] != "app");
    clusters.extend(user.0["static_resources"]["clusters"].as_array().unwrap().iter().cloned());
}

/// The servers of a test.
pub struct World {
    pub redis: Server,
    pub app: App,
    pub service: Service,
}

impl World {
    pub fn start() -> Self {
        let service = Service::start(&yaml(&read(format!("{EXAMPLE}/config.yaml"))));
        Self { redis: Server::start(Kind::Redis, &[]), app: App::start(), service }
    }

    pub fn envoy(&self, with: With, rules: &Value) -> Envoy {
        let (service, app) = (self.service.port(), self.app.port());
        let setup = Setup::new(self.redis.port(), &self.app).configuration(rules.clone());
        let setup = setup.tweak(move |document| adapt(document, with, service, app));
        if with == With::Service { setup.unconnected().start() } else { setup.start() }
    }
}

/// Sends the requests one after the other.
pub fn send(envoy: &Envoy, requests: &[Request]) -> Vec<Message> {
    let mut client = envoy.client();
    requests.iter().map(|request| client.exchange(request)).collect()
}

pub fn statuses(answers: &[Message]) -> Vec<u16> {
    answers.iter().map(Message::status).collect()
}

/// A request that the load balancer passes on for the client with this last byte of 198.51.100.0/24.
pub fn request(method: &'static str, client: u8, path: &str) -> Request {
    Request::new(method, path).with("x-forwarded-for", format!("198.51.100.{client}"))
}

pub fn get(client: u8, path: &str) -> Request {
    request("GET", client, path)
}

pub fn batch(client: u8, size: &str) -> Request {
    get(client, "/batch").with("x-batch-size", size)
}

//! The compose file of envoy/docker/, run as a user would run it, with stand-ins for the stock images: the pinned Envoy and
//! this machine's programs under the names that the file uses. Where no Docker engine runs, or an image of such a name is there
//! already, the tests say so in a line and do nothing.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use support::docker::{StandIn, compose, docker, engine, program, run};
use support::module;
use support::project::{project, read};
use support::server::{free_port, wait_until};

/// What sends requests from inside.
const CLIENT: &str = "meshquota-test-client";

/// The services of the compose file; taken down when dropped, and then the stand-ins that they ran.
struct Services {
    compose: Vec<&'static str>,
    profiles: Option<&'static str>,
    project: String,
    http: u16,
    metrics: u16,
    _images: Vec<StandIn>,
    /// The names of images belong to the engine, so one test at a time.
    _alone: MutexGuard<'static, ()>,
}

impl Services {
    /// Starts what these profiles have, or what a user gets who names none; nothing where it cannot be tested here.
    fn start(profiles: Option<&'static str>) -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let said =
            compose().ok_or_else(|| "no Docker Compose here".to_owned()).and_then(|words| Ok((words, stand_ins()?)));
        let (compose, images) = said.map_err(|why| eprintln!("skipped: {why}")).ok()?;
        module::module();
        let services = Self {
            compose,
            profiles,
            project: format!("meshquota-test-{}", std::process::id()),
            http: free_port(),
            metrics: free_port(),
            _images: images,
            _alone: alone,
        };
        services.command(&["up", "-d"]).unwrap();
        Some(services)
    }

    fn command(&self, arguments: &[&str]) -> Result<String, String> {
        let mut command = Command::new(self.compose[0]);
        command.args(&self.compose[1..]).args(["-f", "envoy/docker/compose.yaml", "-p", &self.project]).args(arguments);
        command.current_dir(project()).env_remove("COMPOSE_PROFILES").env_remove("MODULE");
        command.env("HTTP_PORT", self.http.to_string()).env("METRICS_PORT", self.metrics.to_string());
        run(command.envs(self.profiles.map(|profiles| ("COMPOSE_PROFILES", profiles))))
    }

    fn get(&self, port: u16, path: &str) -> std::io::Result<String> {
        let mut connection = TcpStream::connect(("127.0.0.1", port))?;
        connection.set_read_timeout(Some(Duration::from_secs(5)))?;
        write!(connection, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
        let mut response = String::new();
        connection.read_to_string(&mut response)?;
        Ok(response)
    }

    /// What redis-cli says inside a service.
    fn redis(&self, service: &str, arguments: &[&str]) -> String {
        self.command(&[&["exec", "-T", service, "redis-cli"], arguments].concat()).unwrap().trim().to_owned()
    }

    /// That requests through the published port are limited, and the metrics say so.
    fn limit(&self) {
        wait_until("a request through the published port to be limited", || {
            self.get(self.http, "/").is_ok_and(|response| response.contains("x-ratelimit-remaining: "))
        });
        let responses = (0..20).map(|_| self.get(self.http, "/").unwrap()).collect::<Vec<_>>();
        let denied = responses.iter().filter(|response| response.starts_with("HTTP/1.1 429")).collect::<Vec<_>>();
        assert!(!denied.is_empty(), "{responses:?}");
        for response in denied {
            assert!(response.contains("retry-after: ") && response.ends_with("rate limit exceeded\n"), "{response}");
        }
        let admitted = responses.iter().find(|response| response.starts_with("HTTP/1.1 200")).expect("one is admitted");
        assert!(admitted.contains("x-ratelimit-limit: 10") && admitted.ends_with("hello\n"), "{admitted}");
        wait_until("the metrics to show the denials", || {
            self.get(self.metrics, "/stats/prometheus").is_ok_and(|text| {
                let line = r#"meshquota_decisions_total{rule="per-ip",outcome="deny"} "#;
                text.lines().any(|other| other.starts_with(line) && !other.ends_with(" 0"))
            })
        });
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.command(&["logs", "--no-color"]).unwrap_or_else(|error| error));
        }
        if let Err(error) = self.command(&["down", "--volumes", "--remove-orphans", "--timeout", "1"]) {
            eprintln!("the services were not taken down: {error}");
        }
    }
}

/// The stand-ins for the images of the compose file, or why there are none.
fn stand_ins() -> Result<Vec<StandIn>, String> {
    engine()?;
    let text = read("envoy/docker/compose.yaml");
    let default_of = |variable: &str| {
        let (_, rest) = text.split_once(&format!("${{{variable}:-")).unwrap_or_else(|| panic!("no {variable}"));
        rest.split_once('}').unwrap().0.to_owned()
    };
    let found = |name: &'static str| program(name).map(|path| (name, path)).ok_or_else(|| format!("no {name} here"));
    let all = |names: &[&'static str]| names.iter().map(|name| found(name)).collect::<Result<Vec<_>, _>>();
    let images = [
        (default_of("ENVOY_IMAGE"), vec![("envoy", project().join(".tools/envoy-1.40.0/envoy"))]),
        (default_of("REDIS_IMAGE"), all(&["redis-server", "redis-cli", "sh", "getent", "sleep"])?),
        (CLIENT.to_owned(), all(&["curl", "sleep"])?),
    ];
    images.iter().map(|(image, programs)| StandIn::build(image, programs)).collect()
}

#[test]
fn whoever_names_no_profile_gets_one_server_and_is_limited_through_the_published_port() {
    let Some(services) = Services::start(None) else { return };
    services.limit();
    let running = services.command(&["ps", "--services", "--filter", "status=running"]).unwrap();
    let mut running = running.lines().collect::<Vec<_>>();
    running.sort_unstable();
    assert_eq!(running, ["app", "envoy", "redis"]);
    assert!(services.redis("redis", &["--scan"]).starts_with("quota:{per-ip:"));
}

/// Containers beside the services, each with an address of its own, for as long as they are there.
struct Clients(Vec<String>);

impl Clients {
    fn start(services: &Services, count: usize) -> Self {
        let network = format!("{}_default", services.project);
        let mut clients = Self(Vec::new());
        for _ in 0..count {
            let said = docker(&["run", "--detach", "--rm", "--network", &network, CLIENT, "sleep", "600"]).unwrap();
            clients.0.push(said.trim().to_owned());
        }
        clients
    }

    fn address(client: &str) -> String {
        let format = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}";
        docker(&["inspect", "--format", format, client]).unwrap().trim().to_owned()
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        for client in &self.0 {
            let _ = docker(&["rm", "--force", client]);
        }
    }
}

/// The masters, and the last slot of each as redis-cli shares them out.
const MASTERS: [(&str, u32); 3] = [("redis-0", 5460), ("redis-1", 10922), ("redis-2", 16383)];

/// How often each master was asked for a decision.
fn asked(services: &Services) -> [u64; 3] {
    MASTERS.map(|(service, _)| {
        let said = services.redis(service, &["info", "commandstats"]);
        let calls = said.lines().filter_map(|line| line.strip_prefix("cmdstat_evalsha:calls=")?.split(',').next());
        calls.map(|calls| calls.parse::<u64>().unwrap()).sum()
    })
}

#[test]
fn with_the_profile_cluster_the_master_of_its_slot_decides_each_bucket_also_after_a_stop_and_a_start() {
    let Some(services) = Services::start(Some("cluster")) else { return };
    services.limit();
    let clients = Clients::start(&services, 10);
    let mut expected = [0; 3];
    for client in &clients.0 {
        let key = format!("quota:{{per-ip:{}}}:0", Clients::address(client));
        let slot: u32 = services.redis("redis-0", &["cluster", "keyslot", &key]).parse().unwrap();
        expected[MASTERS.iter().position(|(_, last)| slot <= *last).unwrap()] += 1;
    }
    let before = asked(&services);
    for client in &clients.0 {
        let said = docker(&["exec", client, "curl", "-si", "http://envoy:10000/"]).unwrap();
        assert!(said.starts_with("HTTP/1.1 200") && said.contains("x-ratelimit-remaining: 9"), "{said}");
    }
    let after = asked(&services);
    for (master, expected) in expected.into_iter().enumerate() {
        // The script may have been unknown to a master once.
        let calls = after[master] - before[master];
        assert!((expected..=expected + u64::from(expected > 0)).contains(&calls), "{before:?} {after:?}");
    }
    drop(clients);
    services.command(&["stop", "--timeout", "1"]).unwrap();
    services.command(&["up", "-d"]).unwrap();
    services.limit();
}

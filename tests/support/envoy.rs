//! A real Envoy that runs `envoy/envoy.yaml` as it is shipped, with the module that was just built.
//!
//! Changed are only the things that the file marks to be adapted and what two Envoys on one machine cannot share:
//! addresses and paths. Invariants: an Envoy is ended by its process id when its value is dropped, and a test that
//! passes has called [`Envoy::finish`], which looks for what no scenario may leave behind.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufReader, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::app::App;
use super::http::{Client, Message, Unsaid, read};
use super::module::module;
use super::project::project;
use super::server::{DEADLINE, wait_until};

/// The version on which everything is tested.
pub const NEWEST: &str = "1.40.0";
/// The versions on which the main paths are tested.
pub const OLDER: [&str; 4] = ["1.39.3", "1.38.2", "1.37.0", "1.36.2"];

/// Long enough that no pause of a busy machine looks like an outage.
pub const PATIENT: &str = "5s";

/// The name by which a file says that its listeners come from another file.
const LISTENERS_FILE: &str = "listeners.json";

/// An Envoy configuration, with ways to its parts.
pub struct Document(pub Value);

impl Document {
    /// A file of the project, as it is shipped.
    fn shipped(file: &str) -> Self {
        let text = fs::read_to_string(project().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        Self(serde_yaml_ng::from_str(&text).unwrap_or_else(|error| panic!("{file}: {error}")))
    }

    /// A listener, by its name.
    pub fn listener(&mut self, name: &str) -> &mut Value {
        named(&mut self.0["static_resources"]["listeners"], name)
    }

    /// A cluster, by its name.
    pub fn cluster(&mut self, name: &str) -> &mut Value {
        named(&mut self.0["static_resources"]["clusters"], name)
    }

    /// The connection manager of a listener.
    pub fn manager(&mut self, listener: &str) -> &mut Value {
        &mut self.listener(listener)["filter_chains"][0]["filters"][0]["typed_config"]
    }

    /// The configuration of the plugin, as Envoy's `PluginConfig`.
    pub fn plugin(&mut self) -> &mut Value {
        &mut named(&mut self.manager("ingress")["http_filters"], "meshquota")["typed_config"]["config"]
    }

    /// Sets where a cluster's one endpoint is.
    pub fn aim(&mut self, cluster: &str, address: Value) {
        self.cluster(cluster)["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"] = address;
    }
}

fn named<'a>(list: &'a mut Value, name: &str) -> &'a mut Value {
    let list = list.as_array_mut().expect("a list");
    list.iter_mut().find(|element| element["name"] == name).unwrap_or_else(|| panic!("nothing is named {name}"))
}

/// The address of a port on 127.0.0.1.
pub fn local(port: u16) -> Value {
    json!({"socket_address": {"address": "127.0.0.1", "port_value": port}})
}

type Tweak = Box<dyn FnOnce(&mut Document)>;

/// What an Envoy is started with.
pub struct Setup {
    file: &'static str,
    environment: Vec<(&'static str, &'static str)>,
    version: &'static str,
    workers: usize,
    redis: u16,
    app: u16,
    configuration: Option<Value>,
    tweaks: Vec<Tweak>,
    reloads: bool,
    connects: bool,
    drain: Duration,
}

impl Setup {
    /// The newest Envoy with one worker and the quotas of the file, for a Redis (or a shim) on that port and a service.
    pub fn new(redis: u16, app: &App) -> Self {
        Self {
            file: "envoy/envoy.yaml",
            environment: Vec::new(),
            version: NEWEST,
            workers: 1,
            redis,
            app: app.port(),
            configuration: None,
            tweaks: Vec::new(),
            reloads: false,
            connects: true,
            drain: Duration::from_secs(1),
        }
    }

    /// Another of the files under `envoy/`.
    pub fn file(mut self, file: &'static str) -> Self {
        self.file = file;
        self
    }

    /// A variable in the environment of Envoy.
    pub fn variable(mut self, name: &'static str, value: &'static str) -> Self {
        self.environment.push((name, value));
        self
    }

    /// Another configuration for the filter.
    pub fn configuration(mut self, configuration: Value) -> Self {
        self.configuration = Some(configuration);
        self
    }

    /// One rule `per-ip` with one limit that brings next to nothing back while a test runs, and a patient timeout.
    pub fn capacity(self, capacity: u64) -> Self {
        self.configuration(json!({
            "redis": {"timeout": PATIENT},
            "rules": [{"name": "per-ip", "limits": [{"capacity": capacity, "refill": "1/day"}]}],
        }))
    }

    pub fn version(mut self, version: &'static str) -> Self {
        self.version = version;
        self
    }

    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }

    /// Any other change of the configuration, after all those made here.
    pub fn tweak(mut self, tweak: impl FnOnce(&mut Document) + 'static) -> Self {
        self.tweaks.push(Box::new(tweak));
        self
    }

    /// Redis is where this file says.
    pub fn found_by(self, endpoints: &Endpoints) -> Self {
        let path = endpoints.path();
        self.tweak(move |document| {
            document.0["node"] = json!({"id": "test", "cluster": "test"});
            let cluster = document.cluster("meshquota_redis");
            cluster.as_object_mut().unwrap().remove("load_assignment");
            cluster["type"] = json!("EDS");
            cluster["eds_cluster_config"] = json!({"eds_config": {
                "resource_api_version": "V3",
                "path_config_source": {"path": path},
            }});
        })
    }

    /// Redis is not to be reached: do not wait for the workers to be connected.
    pub fn unconnected(mut self) -> Self {
        self.connects = false;
        self
    }

    /// Reads the listener with the filter from a file that [`Envoy::reload`] replaces.
    pub fn reloading(mut self) -> Self {
        self.reloads = true;
        self
    }

    /// How long requests of a replaced configuration have to end.
    pub fn draining(mut self, drain: Duration) -> Self {
        self.drain = drain;
        self
    }

    /// Starts it, and waits until it serves and its workers are connected to Redis.
    ///
    /// # Panics
    /// Where it does not come up, with its log.
    pub fn start(self) -> Envoy {
        let (workers, connects) = (self.workers, self.connects);
        let mut envoy = self.launch();
        envoy.wait_until_ready();
        envoy.ingress = envoy.try_listener("ingress");
        if connects {
            wait_until("the workers are connected to Redis", || envoy.gauge("connected") == workers as i64);
        }
        envoy
    }

    /// Starts it, and waits until it has given up. Returns its log.
    ///
    /// # Panics
    /// Where it serves all the same.
    pub fn start_refused(self) -> String {
        let mut envoy = self.launch();
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = envoy.process.try_wait().unwrap() {
                assert!(!status.success(), "it ended as if all were well");
                envoy.finished = true;
                return envoy.log();
            }
            assert!(Instant::now() < deadline, "it should not have started:\n{}", envoy.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn launch(self) -> Envoy {
        let directory = tempfile::Builder::new().prefix("meshquota-envoy-").tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let mut document = Document::shipped(self.file);
        document.0["admin"]["address"] = json!({"pipe": {"path": at("admin")}});
        document.aim("admin", json!({"pipe": {"path": at("admin")}}));
        document.listener("ingress")["address"] = local(0);
        document.listener("metrics")["address"] = local(0);
        document.aim("app", local(self.app));
        document.aim("meshquota_redis", local(self.redis));
        document.plugin()["vm_config"]["code"]["local"]["filename"] = json!(module());
        let lua = &mut document.manager("meshquota_tunnel")["http_filters"][0]["typed_config"]["default_source_code"];
        assert_eq!(lua["filename"], "/etc/meshquota/tunnel.lua");
        lua["filename"] = json!(project().join("lua/tunnel.lua"));
        if let Some(configuration) = &self.configuration {
            document.plugin()["configuration"]["value"] = json!(configuration.to_string());
        }
        for tweak in self.tweaks {
            tweak(&mut document);
        }
        let mut listeners = None;
        if self.reloads {
            let all = document.0["static_resources"]["listeners"].as_array_mut().unwrap();
            let place = all.iter().position(|listener| listener["name"] == "ingress").unwrap();
            let ingress = all.remove(place);
            write_listener(&at(LISTENERS_FILE), &ingress);
            listeners = Some(ingress);
            document.0["node"] = json!({"id": "test", "cluster": "test"});
            document.0["dynamic_resources"]["lds_config"] = json!({
                "resource_api_version": "V3",
                "path_config_source": {"path": at(LISTENERS_FILE)},
            });
        }
        fs::write(at("envoy.json"), serde_json::to_vec_pretty(&document.0).unwrap()).unwrap();
        let binary = project().join(format!(".tools/envoy-{}/envoy", self.version));
        assert!(binary.is_file(), "no {}: run make tools", binary.display());
        let process = Command::new(binary)
            .arg("--config-path")
            .arg(at("envoy.json"))
            .args(["--concurrency", &self.workers.to_string(), "--use-dynamic-base-id"])
            .args(["--drain-time-s", &self.drain.as_secs().to_string(), "--drain-strategy", "immediate"])
            .args(["--file-flush-interval-msec", "20"])
            .envs(self.environment)
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .stdout(File::create(at("access")).unwrap())
            .stderr(File::create(at("log")).unwrap())
            .spawn()
            .unwrap();
        Envoy {
            process,
            directory,
            ingress: None,
            listener: listeners,
            answered_5xx: 0,
            tolerated: Vec::new(),
            finished: false,
        }
    }
}

fn write_listener(path: &Path, listener: &Value) {
    let mut listener = listener.clone();
    listener["@type"] = json!("type.googleapis.com/envoy.config.listener.v3.Listener");
    write_resource(path, &listener);
}

/// Writes the one resource of a file that Envoy watches: for one that is moved into place.
fn write_resource(path: &Path, resource: &Value) {
    let next = path.with_extension("next");
    fs::write(&next, json!({"resources": [resource]}).to_string()).unwrap();
    fs::rename(next, path).unwrap();
}

/// Where Redis is, in a file that may change while Envoy runs.
pub struct Endpoints {
    folder: TempDir,
}

impl Endpoints {
    /// On these ports.
    pub fn of(ports: &[u16]) -> Self {
        let endpoints = Self { folder: tempfile::tempdir().unwrap() };
        endpoints.set(ports);
        endpoints
    }

    /// On these from now on.
    pub fn set(&self, ports: &[u16]) {
        let hosts = ports.iter().map(|port| json!({"endpoint": {"address": local(*port)}})).collect::<Vec<_>>();
        let resource = json!({
            "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
            "cluster_name": "meshquota_redis",
            "endpoints": [{"lb_endpoints": hosts}],
        });
        write_resource(&self.path(), &resource);
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("endpoints.json")
    }
}

/// An Envoy that runs.
pub struct Envoy {
    process: Child,
    directory: TempDir,
    ingress: Option<SocketAddr>,
    /// The listener with the filter, where it comes from a file.
    listener: Option<Value>,
    answered_5xx: i64,
    tolerated: Vec<String>,
    finished: bool,
}

impl Envoy {
    /// Where the clients go.
    pub fn ingress(&self) -> SocketAddr {
        self.ingress.expect("the listener has an address of IP")
    }

    /// A new connection of a client on 127.0.0.1.
    pub fn client(&self) -> Client {
        Client::connect(self.ingress())
    }

    /// A new connection of a client on another address of this machine.
    pub fn client_from(&self, source: &str) -> Client {
        Client::connect_from(source.parse().unwrap(), self.ingress())
    }

    /// Sends a GET on a new connection.
    pub fn get(&self, path: &str) -> Message {
        self.client().get(path)
    }

    /// The address on which a listener listens, where it is one of IP.
    pub fn try_listener(&self, name: &str) -> Option<SocketAddr> {
        let listeners: Value = serde_json::from_str(&self.admin("/listeners?format=json")).unwrap();
        let listener = listeners["listener_statuses"]
            .as_array()
            .and_then(|all| all.iter().find(|listener| listener["name"] == name))
            .unwrap_or_else(|| panic!("no listener {name} in {listeners}"));
        let address = &listener["local_address"]["socket_address"];
        let ip = address["address"].as_str()?.parse().unwrap();
        Some(SocketAddr::new(ip, u16::try_from(address["port_value"].as_u64().unwrap()).unwrap()))
    }

    /// The address on which a listener listens.
    pub fn listener(&self, name: &str) -> SocketAddr {
        self.try_listener(name).expect("an address of IP")
    }

    /// What the admin interface says.
    pub fn admin(&self, path: &str) -> String {
        self.try_admin(path).unwrap_or_else(|| panic!("no answer to {path}"))
    }

    fn try_admin(&self, path: &str) -> Option<String> {
        let mut stream = UnixStream::connect(self.directory.path().join("admin")).ok()?;
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n").ok()?;
        let answer = read(&mut BufReader::new(stream), Unsaid::Response).ok()??;
        (answer.status() == 200).then(|| answer.text())
    }

    fn wait_until_ready(&mut self) {
        let deadline = Instant::now() + DEADLINE;
        while self.try_admin("/ready").is_none() {
            let ended = self.process.try_wait().unwrap();
            assert!(ended.is_none() && Instant::now() < deadline, "Envoy does not start ({ended:?}):\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Every number of Envoy's own statistics whose name has that start.
    pub fn statistics(&self, start: &str) -> BTreeMap<String, i64> {
        let number = |line: &str| {
            let (name, value) = line.rsplit_once(": ")?;
            Some((name.to_owned(), value.parse().ok()?))
        };
        self.admin("/stats").lines().filter(|line| line.starts_with(start)).filter_map(number).collect()
    }

    /// One number of Envoy's own statistics, zero where it is not there.
    pub fn statistic(&self, name: &str) -> i64 {
        self.statistics(name).get(name).copied().unwrap_or(0)
    }

    /// One of the filter's gauges.
    pub fn gauge(&self, name: &str) -> i64 {
        self.statistic(&format!("wasmcustom.meshquota_{name}"))
    }

    /// The filter's counters that are not zero, by short names: `per-ip allow`, `calls ok`, `errors auth`,
    /// `per-ip skipped`, `given_back`, `reconnects`.
    pub fn counts(&self) -> BTreeMap<String, i64> {
        let all = self.statistics("wasmcustom.meshquota_");
        all.into_iter()
            .filter(|(_, value)| *value != 0)
            .filter_map(|(name, value)| Some((short(&name)?, value)))
            .collect()
    }

    /// One of [`counts`](Self::counts).
    pub fn count(&self, name: &str) -> i64 {
        self.counts().get(name).copied().unwrap_or(0)
    }

    /// Waits until the filter's counters are these, and all others zero.
    ///
    /// # Panics
    /// Where they are not before the deadline, with what they are.
    pub fn expect_counts(&self, expected: &[(&str, i64)]) {
        let expected = expected.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect::<BTreeMap<_, _>>();
        let deadline = Instant::now() + DEADLINE;
        loop {
            let counts = self.counts();
            if counts == expected {
                return;
            }
            if Instant::now() > deadline {
                assert_eq!(counts, expected);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until so many calls have failed, or were not made since too many had; those that failed did so in that way.
    pub fn wait_for_failed_calls(&self, number: i64, kind: &str) {
        let failed = || (self.count("calls error"), self.count("calls breaker"));
        wait_until("the calls have failed", || {
            let (failed, refused) = failed();
            failed + refused == number
        });
        assert!(failed().0 > 0);
        assert_eq!(self.count(&format!("errors {kind}")), failed().0);
    }

    /// Waits until one counter is what is wanted.
    pub fn wait_for_count(&self, name: &str, wanted: impl Fn(i64) -> bool) {
        wait_until(&format!("{name} is as wanted"), || wanted(self.count(name)));
    }

    /// Replaces the configuration of the filter while Envoy runs.
    ///
    /// # Panics
    /// Where the Envoy was not set up as [`reloading`](Setup::reloading).
    pub fn reload(&mut self, configuration: &Value) {
        let listener = self.listener.as_mut().expect("set up as reloading");
        let filters = &mut listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"];
        named(filters, "meshquota")["typed_config"]["config"]["configuration"]["value"] =
            json!(configuration.to_string());
        write_listener(&self.directory.path().join(LISTENERS_FILE), listener);
    }

    /// The memory that the process has, in KiB.
    pub fn resident_kib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a process has memory");
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    /// Stops the process (SIGSTOP) as a machine without time for it would.
    pub fn freeze(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Lets it go on (SIGCONT).
    pub fn thaw(&self) {
        self.signal(Signal::SIGCONT);
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.process.id()).expect("a process id is small");
        kill(Pid::from_raw(pid), signal).expect("a child can be signalled");
    }

    /// The log so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    /// What the filter itself has logged: the level of each line, and its text.
    pub fn said(&self) -> Vec<(String, String)> {
        let line = |line: &str| {
            // The names of plugin, root and machine follow, as far as there are any.
            let (head, text) = line.split_once("] wasm log")?;
            let (_, text) = text.split_once(": ")?;
            let level = head.split(['[', ']']).filter(|word| !word.is_empty()).nth(2)?;
            Some((level.to_owned(), text.to_owned()))
        };
        self.log().lines().filter_map(line).collect()
    }

    /// The lines of the access log.
    pub fn access_log(&self) -> Vec<String> {
        let text = fs::read_to_string(self.directory.path().join("access")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Waits until the access log has so many lines, and returns them.
    pub fn wait_for_access_log(&self, lines: usize) -> Vec<String> {
        wait_until("the access log is written", || self.access_log().len() >= lines);
        self.access_log()
    }

    /// So many answers with a status from 500 on are right in this test.
    pub fn expect_5xx(&mut self, number: i64) {
        self.answered_5xx = number;
    }

    /// Lines of the level error or above are right in this test where they contain this.
    pub fn tolerate(&mut self, text: &str) {
        self.tolerated.push(text.to_owned());
    }

    /// The directory in which it runs.
    pub fn directory(&self) -> PathBuf {
        self.directory.path().to_owned()
    }

    /// The end of every test: nothing is in flight, no machine has failed, the filter has answered no request with a
    /// server error, and the log names nobody.
    pub fn finish(mut self) {
        wait_until("no call is in flight", || self.gauge("redis_in_flight") == 0);
        for (name, value) in self.statistics("wasm.meshquota.vm_reload") {
            assert_eq!(value, 0, "{name}: a machine has failed");
        }
        let machines = self.statistics("wasm.envoy.wasm.runtime.v8.");
        assert!(machines.values().all(|value| *value > 0), "no machines: {machines:?}");
        let answered = self.statistic("http.ingress.downstream_rq_5xx");
        assert_eq!(answered, self.answered_5xx, "answers with a server error");
        for line in self.log().lines() {
            let bad = line.contains("[critical]")
                || line.contains("[error]")
                || line.contains("panicked")
                || line.contains("Uncaught RuntimeError")
                || line.contains("in-VM backtrace");
            assert!(!bad || self.tolerated.iter().any(|text| line.contains(text.as_str())), "in the log: {line}");
        }
        for (_, text) in self.said() {
            assert!(!text.contains("quota:") && !text.contains("127.0.0."), "the log names somebody: {text}");
        }
        self.finished = true;
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if std::thread::panicking() {
            let log = self.log();
            let telling =
                |line: &&str| !line.contains("][info]") || line.contains("[wasm]") || line.contains("[upstream]");
            let lines = log.lines().filter(telling).collect::<Vec<_>>();
            let last = &lines[lines.len().saturating_sub(60)..];
            eprintln!("--- the end of Envoy's log ---\n{}\n--- its access log ---", last.join("\n"));
            let access = self.access_log();
            eprintln!("{}\n---", access[access.len().saturating_sub(10)..].join("\n"));
        } else {
            assert!(self.finished, "the test ended without finish()");
        }
    }
}

/// The short name of a counter; `None` for a gauge.
fn short(name: &str) -> Option<String> {
    let name = name.strip_prefix("wasmcustom.meshquota_")?.strip_suffix("total")?;
    let (metric, labels) = name.split_once('.').unwrap_or((name.trim_end_matches('_'), ""));
    let values = labels.split(";.;").filter_map(|label| label.split_once("=.=")).map(|(_, value)| value);
    let mut words = values.collect::<Vec<_>>();
    match metric {
        "decisions" => {}
        "redis_calls" => words.insert(0, "calls"),
        "redis_errors" => words.insert(0, "errors"),
        _ => words.push(metric),
    }
    Some(words.join(" "))
}

//! The compose file of envoy/docker/, run as a user would run it, with stand-ins for the stock images.
//!
//! Images cannot be pulled everywhere, so images of the names that the compose file uses are built from scratch out of the
//! pinned Envoy, this machine's redis-server, and the shared libraries that they load. Where no Docker engine runs, or an
//! image of such a name is there already, the test says so in a line and does nothing.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod support;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use support::module;
use support::project::project;
use support::server::{free_port, wait_until};

/// Marks the images that this test builds, which are the only ones that it removes.
const LABEL: &str = "meshquota.stand-in";

/// Runs a command; its output, or what it said where it failed.
fn run(command: &mut Command) -> Result<String, String> {
    let Output { status, stdout, stderr } = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let said = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    if status.success() { Ok(said(stdout)) } else { Err(format!("{command:?}: {status}\n{}", said(stderr))) }
}

fn docker(arguments: &[&str]) -> Result<String, String> {
    run(Command::new("docker").args(arguments))
}

/// The words that run Compose here: the engine's plug-in or the tool of its own.
fn compose() -> Option<Vec<&'static str>> {
    [vec!["docker", "compose"], vec!["docker-compose"]]
        .into_iter()
        .find(|words| run(Command::new(words[0]).args(&words[1..]).arg("version")).is_ok())
}

/// A folder with a binary, the libraries that it loads, and what every container needs, at their places.
fn root_folder(folder: &Path, binary: &Path, name: &str) {
    let put = |from: &Path, to: &str| {
        let to = folder.join(to.trim_start_matches('/'));
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(from, &to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    };
    put(binary, &format!("/usr/local/bin/{name}"));
    let libraries = run(Command::new("ldd").arg(binary)).unwrap();
    for word in libraries.split_whitespace().filter(|word| word.starts_with('/')) {
        put(Path::new(word), word);
    }
    fs::create_dir_all(folder.join("tmp")).unwrap();
    fs::create_dir_all(folder.join("etc")).unwrap();
    fs::write(folder.join("etc/passwd"), "root:x:0:0:root:/:/none\n").unwrap();
}

/// An image of a stock image's name; removed when dropped.
struct StandIn(String);

impl StandIn {
    fn build(image: &str, binary: &Path, name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        root_folder(&folder.path().join("root"), binary, name);
        let recipe = format!("FROM scratch\nCOPY root /\nENV PATH=/usr/local/bin\nLABEL {LABEL}=1\n");
        fs::write(folder.path().join("Dockerfile"), recipe).unwrap();
        docker(&["build", "--quiet", "--tag", image, folder.path().to_str().unwrap()]).unwrap();
        Self(image.to_owned())
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        let _ = docker(&["image", "rm", "--force", &self.0]);
    }
}

/// The services of the compose file; taken down when dropped.
struct Services {
    compose: Vec<&'static str>,
    project: String,
    http: u16,
    metrics: u16,
}

impl Services {
    fn command(&self, arguments: &[&str]) -> Result<String, String> {
        let file = project().join("envoy/docker/compose.yaml");
        let mut command = Command::new(self.compose[0]);
        command.args(&self.compose[1..]).arg("-f").arg(file).args(["-p", &self.project]).args(arguments);
        run(command.env("HTTP_PORT", self.http.to_string()).env("METRICS_PORT", self.metrics.to_string()))
    }

    fn get(port: u16, path: &str) -> std::io::Result<String> {
        let mut connection = TcpStream::connect(("127.0.0.1", port))?;
        connection.set_read_timeout(Some(Duration::from_secs(5)))?;
        write!(connection, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
        let mut response = String::new();
        connection.read_to_string(&mut response)?;
        Ok(response)
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.command(&["logs", "--no-color"]).unwrap_or_else(|error| error));
        }
        let _ = self.command(&["down", "--volumes", "--timeout", "1"]);
    }
}

/// The stand-ins for the images of the compose file, or why there are none.
fn stand_ins() -> Result<Vec<StandIn>, String> {
    docker(&["info"]).map_err(|_| "no Docker engine runs here".to_owned())?;
    let redis = run(Command::new("sh").args(["-c", "command -v redis-server"]))
        .map_err(|_| "no redis-server to build a stand-in from".to_owned())?;
    let redis = fs::canonicalize(redis.trim()).unwrap();
    let envoy = project().join(".tools/envoy-1.40.0/envoy");
    let text = fs::read_to_string(project().join("envoy/docker/compose.yaml")).unwrap();
    let default_of = |variable: &str| {
        let (_, rest) = text.split_once(&format!("${{{variable}:-")).unwrap_or_else(|| panic!("no {variable}"));
        rest.split_once('}').unwrap().0.to_owned()
    };
    let images = [
        (default_of("ENVOY_IMAGE"), envoy.as_path(), "envoy"),
        (default_of("REDIS_IMAGE"), redis.as_path(), "redis-server"),
    ];
    for (image, ..) in &images {
        let labels = docker(&["image", "inspect", "--format", "{{json .Config.Labels}}", image]);
        if labels.is_ok_and(|labels| !labels.contains(LABEL)) {
            return Err(format!("{image} is here already, and is not replaced"));
        }
    }
    Ok(images.iter().map(|(image, binary, name)| StandIn::build(image, binary, name)).collect())
}

#[test]
fn the_compose_file_limits_through_its_published_port() {
    let Some(compose) = compose() else {
        eprintln!("skipped: no Docker Compose here");
        return;
    };
    // Dropped after the services that run them.
    let _images = match stand_ins() {
        Ok(images) => images,
        Err(why) => {
            eprintln!("skipped: {why}");
            return;
        }
    };
    module::module();
    let services = Services {
        compose,
        project: format!("meshquota-test-{}", std::process::id()),
        http: free_port(),
        metrics: free_port(),
    };
    services.command(&["up", "-d"]).unwrap();
    wait_until("a request through the published port to be limited", || {
        Services::get(services.http, "/").is_ok_and(|response| response.contains("x-ratelimit-remaining: "))
    });
    let responses = (0..20).map(|_| Services::get(services.http, "/").unwrap()).collect::<Vec<_>>();
    let denied = responses.iter().filter(|response| response.starts_with("HTTP/1.1 429")).collect::<Vec<_>>();
    assert!(!denied.is_empty(), "{responses:?}");
    for response in denied {
        assert!(response.contains("retry-after: ") && response.ends_with("rate limit exceeded\n"), "{response}");
    }
    let admitted = responses.iter().find(|response| response.starts_with("HTTP/1.1 200")).expect("one is admitted");
    assert!(admitted.contains("x-ratelimit-limit: 10") && admitted.ends_with("hello\n"), "{admitted}");
    wait_until("the metrics to show the denials", || {
        Services::get(services.metrics, "/stats/prometheus").is_ok_and(|text| {
            let line = r#"meshquota_decisions_total{rule="per-ip",outcome="deny"} "#;
            text.lines().any(|other| other.starts_with(line) && !other.ends_with(" 0"))
        })
    });
}

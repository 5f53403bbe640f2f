//! The dashboard of `envoy/grafana/` shows something: it is well formed, and each of its queries is answered with data by a
//! real Prometheus that has scraped a real Envoy while Redis was well, frozen, gone and back.
//!
//! All metrics are there from the start, at zero, so a query counts as answered only where it has brought a number that is
//! not zero. The files of the profile `observability` in `envoy/docker/` are those that are run, or are checked here.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::ErrorKind::NotFound;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use meshquota::stats::{MetricType, Stats};
use serde_json::{Value, json};
use tempfile::TempDir;

use support::app::App;
use support::envoy::Setup;
use support::http::{Client, Request, at_once, with_status};
use support::project::{project, read};
use support::server::{DEADLINE, Kind, Server, free_port, wait_until};

const DASHBOARD: &str = "envoy/grafana/meshquota.json";
const ALERTS: &str = "envoy/prometheus/alerts.yaml";
const DOCKER: &str = "envoy/docker";
const PROMETHEUS: &str = "envoy/docker/observability/prometheus.yaml";

/// How often Envoy is scraped here, and over how long a rate is taken. Grafana takes at least four scrapes.
const SCRAPE: &str = "200ms";
const RATE_INTERVAL: &str = "2s";

fn dashboard() -> Value {
    serde_json::from_str(&read(DASHBOARD)).unwrap_or_else(|error| panic!("{DASHBOARD}: {error}"))
}

fn yaml(path: &str) -> Value {
    serde_yaml_ng::from_str(&read(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Words of a JSON value that have to be there.
fn text<'a>(value: &'a Value, path: &str) -> &'a str {
    value.pointer(path).and_then(Value::as_str).unwrap_or_else(|| panic!("no text at {path} in {value}"))
}

fn list<'a>(value: &'a Value, path: &str) -> &'a [Value] {
    value.pointer(path).and_then(Value::as_array).unwrap_or_else(|| panic!("no list at {path} in {value}"))
}

/// A query of the dashboard, with the title of its panel.
#[derive(Clone, Debug)]
struct Query {
    panel: String,
    expr: String,
}

/// The panels that show something.
fn charts(dashboard: &Value) -> impl Iterator<Item = &Value> {
    list(dashboard, "/panels").iter().filter(|panel| panel["type"] != "row")
}

fn queries(dashboard: &Value) -> Vec<Query> {
    let queries = charts(dashboard).flat_map(|panel| {
        let query = |target| Query { panel: text(panel, "/title").to_owned(), expr: text(target, "/expr").to_owned() };
        list(panel, "/targets").iter().map(query)
    });
    queries.collect()
}

/// What this dashboard uses of Grafana's model.
fn schema() -> Value {
    let source = json!({
        "type": "object", "additionalProperties": false, "required": ["type", "uid"],
        "properties": {"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}},
    });
    let grid = json!({
        "type": "object", "additionalProperties": false, "required": ["x", "y", "w", "h"],
        "properties": {
            "x": {"type": "integer", "minimum": 0, "maximum": 23}, "w": {"type": "integer", "minimum": 1, "maximum": 24},
            "y": {"type": "integer", "minimum": 0}, "h": {"type": "integer", "minimum": 1},
        },
    });
    let target = json!({
        "type": "object", "additionalProperties": false, "required": ["refId", "datasource", "expr", "legendFormat"],
        "properties": {
            "refId": {"type": "string", "pattern": "^[A-Z]$"}, "datasource": source, "editorMode": {"const": "code"},
            "expr": {"type": "string", "minLength": 1}, "legendFormat": {"type": "string", "minLength": 1},
            "range": {"const": true},
        },
    });
    let row = json!({
        "type": "object", "additionalProperties": false, "required": ["id", "type", "title", "gridPos", "collapsed", "panels"],
        "properties": {
            "id": {"type": "integer", "minimum": 1}, "type": {"const": "row"}, "title": {"type": "string", "minLength": 1},
            "gridPos": grid, "collapsed": {"const": false}, "panels": {"const": []},
        },
    });
    let chart = json!({
        "type": "object", "additionalProperties": false,
        "required": ["id", "type", "title", "description", "gridPos", "datasource", "fieldConfig", "options", "targets"],
        "properties": {
            "id": {"type": "integer", "minimum": 1}, "type": {"enum": ["stat", "timeseries"]},
            "title": {"type": "string", "minLength": 1}, "description": {"type": "string", "minLength": 1},
            "gridPos": grid, "datasource": source, "options": {"type": "object"},
            "targets": {"type": "array", "minItems": 1, "items": target},
            "fieldConfig": {"type": "object", "required": ["defaults", "overrides"], "properties": {
                "overrides": {"type": "array"},
                "defaults": {"type": "object", "required": ["unit"], "properties": {
                    "unit": {"enum": ["reqps", "ops", "cps", "ms", "percentunit", "none"]},
                }},
            }},
        },
    });
    let variable = json!({
        "type": "object", "required": ["type", "name", "label", "query"],
        "if": {"properties": {"type": {"const": "query"}}},
        "then": {"required": ["datasource", "definition", "allValue"], "properties": {
            "datasource": source, "allValue": {"const": ".*"}, "includeAll": {"const": true},
            "query": {"type": "object", "required": ["query", "refId"]},
        }},
        "else": {"properties": {"type": {"const": "datasource"}, "query": {"const": "prometheus"}}},
    });
    json!({
        "type": "object", "required": ["id", "uid", "title", "schemaVersion", "time", "refresh", "templating", "panels"],
        "properties": {
            "id": {"const": null}, "uid": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,40}$"},
            "title": {"type": "string", "minLength": 1}, "schemaVersion": {"type": "integer", "minimum": 39},
            "time": {"type": "object", "required": ["from", "to"]},
            "templating": {"type": "object", "required": ["list"], "properties": {"list": {"items": variable}}},
            "panels": {"type": "array", "minItems": 2, "items": {"oneOf": [row, chart]}},
        },
    })
}

#[test]
fn the_dashboard_is_well_formed_and_no_panel_lies_on_another() {
    let dashboard = dashboard();
    let validator = jsonschema::validator_for(&schema()).unwrap();
    let errors = validator.iter_errors(&dashboard).map(|error| format!("{}: {error}", error.instance_path()));
    let errors = errors.collect::<Vec<_>>();
    assert!(errors.is_empty(), "{errors:#?}");
    let (mut ids, mut titles, mut taken) = (BTreeSet::new(), BTreeSet::new(), BTreeMap::new());
    for panel in list(&dashboard, "/panels") {
        let title = text(panel, "/title");
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title}: its id is another's");
        assert!(titles.insert(title), "{title} is there twice");
        let [x, y, w, h] = ["x", "y", "w", "h"].map(|side| panel["gridPos"][side].as_u64().unwrap());
        assert!(x + w <= 24, "{title} is wider than the page");
        for place in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
            let other = taken.insert(place, title);
            assert!(other.is_none(), "{title} lies on {other:?}");
        }
        let targets = panel["targets"].as_array().map_or(&[][..], Vec::as_slice);
        let references = targets.iter().map(|target| text(target, "/refId")).collect::<BTreeSet<_>>();
        assert_eq!(references.len(), targets.len(), "{title}");
    }
    assert!(charts(&dashboard).count() >= 14);
}

#[test]
fn each_panel_says_in_a_sentence_what_is_normal_and_leads_to_a_heading_of_the_runbook() {
    let runbook = read("docs/operations.md");
    let headings = runbook.lines().filter(|line| line.starts_with('#'));
    let anchors = headings.map(|line| {
        let line = line.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
        line.chars().filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_')).collect::<String>()
    });
    let anchors = anchors.collect::<BTreeSet<_>>();
    for panel in charts(&dashboard()) {
        let (title, description) = (text(panel, "/title"), text(panel, "/description"));
        let (sentence, anchor) =
            description.split_once("docs/operations.md#").unwrap_or_else(|| panic!("{title} leads nowhere"));
        let anchor = anchor.strip_suffix('.').unwrap_or_else(|| panic!("{title} does not end as a sentence"));
        assert!(anchors.contains(anchor), "{title}: the runbook has no heading #{anchor}");
        assert!(!sentence.contains(". "), "{title}: more than a sentence");
        assert!(sentence.starts_with("Normally ") || sentence.starts_with("Zero "), "{title}: what is normal?");
    }
}

/// The names under which Prometheus knows the filter's metrics, a histogram by that of its buckets.
fn names() -> BTreeSet<String> {
    let name = |metric: meshquota::stats::Metric| match (metric.metric_type, metric.name.split_once('.')) {
        (MetricType::Histogram, _) => format!("{}_bucket", metric.name),
        (_, Some((name, _))) => format!("{name}_total"),
        (_, None) => metric.name,
    };
    Stats::metrics(["a"]).into_iter().map(name).collect()
}

/// The values of a label that there are.
fn values(label: &str) -> BTreeSet<String> {
    let value = |name: &str| Some(name.split_once(&format!("{label}=.="))?.1.split_once(";.;")?.0.to_owned());
    Stats::metrics(["a"]).iter().filter_map(|metric| value(&metric.name)).collect()
}

/// What a query asks for that is none of the filter's metrics and their labels, and the metrics that it names.
fn unknown(expr: &str) -> (Vec<String>, BTreeSet<String>) {
    // Envoy's own: how many workers there should be.
    let foreign = "envoy_server_concurrency";
    let words = expr.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let named = words.filter(|word| word.starts_with("meshquota_") || word.starts_with("envoy_"));
    let named = named.map(str::to_owned).collect::<BTreeSet<_>>();
    let mut unknown =
        named.iter().filter(|name| **name != foreign && !names().contains(*name)).cloned().collect::<Vec<_>>();
    for label in ["outcome", "result", "kind"] {
        for found in expr.split(&format!("{label}=~\"")).skip(1) {
            let asked = found.split('"').next().unwrap().split('|').filter(|value| !values(label).contains(*value));
            unknown.extend(asked.map(|value| format!("{label}={value}")));
        }
        for found in expr.split(&format!("{label}=\"")).skip(1) {
            let asked = found.split('"').next().unwrap();
            unknown.extend((!values(label).contains(asked)).then(|| format!("{label}={asked}")));
        }
    }
    (unknown, named)
}

#[test]
fn the_queries_name_metrics_that_there_are_and_all_of_them() {
    assert_eq!(unknown("meshquota_gone{kind=~\"auth|x\"}").0, ["meshquota_gone", "kind=x"]);
    let mut shown = BTreeSet::new();
    for Query { panel, expr } in queries(&dashboard()) {
        let (unknown, named) = unknown(&expr);
        assert!(unknown.is_empty(), "{panel}: {expr} asks for {unknown:?}");
        assert!(!named.is_empty(), "{panel}: {expr} asks for nothing");
        for variable in ["job", "instance"] {
            assert!(expr.contains(&format!("{variable}=~\"${variable}\"")), "{panel}: {expr} does not use {variable}");
        }
        let of_rules = ["decisions", "skipped"].iter().any(|name| expr.contains(&format!("meshquota_{name}_total")));
        assert_eq!(expr.contains("rule=~\"$rule\""), of_rules, "{panel}: {expr}");
        shown.extend(named);
    }
    let hidden = names().difference(&shown).cloned().collect::<Vec<_>>();
    assert!(hidden.is_empty(), "no panel shows {hidden:?}");
}

/// Whether a program is installed; a line that says so where it is not.
fn installed(program: &str) -> bool {
    match Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status() {
        Err(error) if error.kind() == NotFound => {
            eprintln!("skipped: no {program} on the PATH (Debian has it in the package prometheus)");
            false
        }
        other => other.unwrap().success(),
    }
}

/// Puts the configuration of Prometheus in a folder, with the alerts beside it, as in the container.
fn configuration(folder: &Path, change: impl FnOnce(&mut Value)) {
    let mut configuration = yaml(PROMETHEUS);
    change(&mut configuration);
    fs::write(folder.join("prometheus.yaml"), configuration.to_string()).unwrap();
    fs::write(folder.join("alerts.yaml"), read(ALERTS)).unwrap();
}

#[test]
fn promtool_takes_the_configuration_of_prometheus() {
    if !installed("promtool") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    configuration(folder.path(), |_| {});
    fs::write(folder.path().join("prometheus.yaml"), read(PROMETHEUS)).unwrap();
    let checked =
        Command::new("promtool").args(["check", "config", "prometheus.yaml"]).current_dir(&folder).output().unwrap();
    let said = String::from_utf8_lossy(&checked.stdout).into_owned() + &String::from_utf8_lossy(&checked.stderr);
    assert!(checked.status.success() && said.contains("1 rule files found"), "{said}");
}

/// The services of a compose file that a profile has.
fn services<'a>(compose: &'a Value, profile: &str) -> BTreeSet<&'a str> {
    let services = compose["services"].as_object().unwrap().iter();
    services
        .filter(|(_, service)| list(service, "/profiles").contains(&json!(profile)))
        .map(|(name, _)| name.as_str())
        .collect()
}

/// The place in a service's container at which a file of the project is mounted.
fn mounted(compose: &Value, service: &str, file: &str) -> String {
    let volumes = list(&compose["services"][service], "/volumes");
    let place = volumes.iter().find_map(|volume| {
        let mut parts = volume.as_str()?.split(':');
        let from = fs::canonicalize(project().join(DOCKER).join(parts.next()?)).ok()?;
        (from == fs::canonicalize(project().join(file)).ok()?).then(|| parts.next().unwrap().to_owned())
    });
    place.unwrap_or_else(|| panic!("{service} has no {file}"))
}

#[test]
fn the_profile_adds_prometheus_and_grafana_and_each_finds_its_files() {
    let compose = yaml("envoy/docker/compose.yaml");
    let observing = services(&compose, "observability");
    assert_eq!(observing, BTreeSet::from(["grafana", "prometheus"]));
    for service in observing {
        assert_eq!(compose["services"][service]["profiles"], json!(["observability"]), "{service}");
        for port in list(&compose["services"][service], "/ports") {
            assert!(port.as_str().unwrap().starts_with("127.0.0.1:"), "{service}: {port}");
        }
    }
    // Prometheus reads its file, finds the alerts beside it, and scrapes the port that Envoy's file opens for that.
    let file = mounted(&compose, "prometheus", PROMETHEUS);
    let command = list(&compose["services"]["prometheus"], "/command");
    assert!(command.contains(&json!(format!("--config.file={file}"))), "{command:?}");
    let configuration = yaml(PROMETHEUS);
    let alerts = mounted(&compose, "prometheus", ALERTS);
    let beside = Path::new(&file).parent().unwrap().join(text(&configuration, "/rule_files/0"));
    assert_eq!(Path::new(&alerts), beside);
    assert_eq!(text(&configuration, "/scrape_configs/0/static_configs/0/targets/0"), "envoy:9902");
    assert!(services(&compose, "single").contains("envoy"));
    assert_eq!(compose["services"]["envoy-cluster"]["networks"]["default"]["aliases"], json!(["envoy"]));
    assert_eq!(text(&configuration, "/scrape_configs/0/metrics_path"), "/stats/prometheus");
    // Grafana reads both files where it looks for such, and they lead to that Prometheus and to the dashboard.
    for kind in ["datasources", "dashboards"] {
        let place = mounted(&compose, "grafana", &format!("envoy/docker/observability/{kind}.yaml"));
        assert!(place.starts_with(&format!("/etc/grafana/provisioning/{kind}/")), "{place}");
    }
    let sources = yaml("envoy/docker/observability/datasources.yaml");
    assert_eq!(text(&sources, "/datasources/0/type"), "prometheus");
    assert_eq!(text(&sources, "/datasources/0/url"), "http://prometheus:9090");
    let interval = text(&configuration, "/global/scrape_interval");
    assert_eq!(text(&sources, "/datasources/0/jsonData/timeInterval"), interval);
    let place = mounted(&compose, "grafana", DASHBOARD);
    let boards = yaml("envoy/docker/observability/dashboards.yaml");
    assert!(place.starts_with(&format!("{}/", text(&boards, "/providers/0/options/path"))), "{place}");
    let home = "/services/grafana/environment/GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH";
    assert_eq!(text(&compose, home), place);
}

#[test]
fn compose_takes_the_profile() {
    let said = [&["docker", "compose"][..], &["docker-compose"]].into_iter().find_map(|words| {
        let compose = || {
            let mut command = Command::new(words[0]);
            command.args(&words[1..]);
            command
        };
        compose().arg("version").output().ok().filter(|output| output.status.success())?;
        let file = project().join(DOCKER).join("compose.yaml");
        Some(
            compose()
                .arg("-f")
                .arg(file)
                .arg("config")
                .env("COMPOSE_PROFILES", "single,observability")
                .output()
                .unwrap(),
        )
    });
    let Some(output) = said else {
        eprintln!("skipped: no Docker Compose here");
        return;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let compose: Value = serde_yaml_ng::from_slice(&output.stdout).unwrap();
    assert_eq!(services(&compose, "single").union(&services(&compose, "observability")).count(), 5, "{compose}");
}

/// A Prometheus that scrapes one Envoy, until it is dropped.
struct Prometheus {
    process: Child,
    folder: TempDir,
    address: SocketAddr,
}

impl Prometheus {
    /// With the configuration as it is shipped, but for the target and the pace.
    fn scraping(target: SocketAddr) -> Self {
        let folder = tempfile::Builder::new().prefix("meshquota-prometheus-").tempdir().unwrap();
        configuration(folder.path(), |configuration| {
            configuration["global"] = json!({"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE});
            configuration["scrape_configs"][0]["static_configs"][0]["targets"] = json!([target.to_string()]);
        });
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
        let log = File::create(folder.path().join("log")).unwrap();
        let process = Command::new("prometheus")
            .args(["--config.file=prometheus.yaml", "--storage.tsdb.path=data", "--log.level=warn"])
            .arg(format!("--web.listen-address={address}"))
            .current_dir(&folder)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut prometheus = Self { process, folder, address };
        wait_until("Prometheus is ready", || {
            let ended = prometheus.process.try_wait().unwrap();
            assert!(ended.is_none(), "it ended: {ended:?}");
            TcpStream::connect(address).is_ok() && Client::connect(address).get("/-/ready").status() == 200
        });
        prometheus
    }

    /// The field `data` of its answer.
    fn ask(&self, path: &str, parameters: &[(&str, &str)]) -> Result<Value, String> {
        let encode = |text: &str| text.bytes().map(|byte| format!("%{byte:02X}")).collect::<String>();
        let parameters = parameters.iter().map(|(name, value)| format!("{}={}", encode(name), encode(value)));
        let path = format!("/api/v1/{path}?{}", parameters.collect::<Vec<_>>().join("&"));
        let answer = Client::connect(self.address).get(&path);
        let mut value: Value = serde_json::from_slice(&answer.body).map_err(|error| format!("{error}"))?;
        if value["status"] == "success" { Ok(value["data"].take()) } else { Err(value["error"].to_string()) }
    }

    /// The number that a query has now.
    fn now(&self, expr: &str) -> Option<f64> {
        let data = self.ask("query", &[("query", expr)]).unwrap();
        data.pointer("/result/0/value/1")?.as_str()?.parse().ok()
    }

    /// Whether a query has had a number since then that is neither zero nor none.
    fn shows(&self, expr: &str, since: SystemTime) -> Result<(), String> {
        let seconds = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64().to_string();
        let (start, end) = (seconds(since), seconds(SystemTime::now()));
        let parameters = [("query", expr), ("start", &start), ("end", &end), ("step", SCRAPE)];
        let data = self.ask("query_range", &parameters)?;
        let series = list(&data, "/result");
        let numbers = series.iter().flat_map(|series| list(series, "/values")).map(|pair| text(pair, "/1"));
        let numbers = numbers.map(|number| number.parse::<f64>().unwrap()).collect::<Vec<_>>();
        if numbers.iter().any(|number| number.is_finite() && *number != 0.0) {
            return Ok(());
        }
        Err(format!("{} series with {} values, none of them finite and not zero", series.len(), numbers.len()))
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if thread::panicking() {
            let log = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            eprintln!("--- what Prometheus said ---\n{log}\n---");
        }
    }
}

/// Rules that together meet every outcome.
fn rules() -> Value {
    let much = json!([{"capacity": 1_000_000, "refill": "1000/s"}]);
    let little = json!([{"capacity": 5, "refill": "1/s"}]);
    json!({"rules": [
        {"name": "open", "match": {"path": "/open"}, "limits": much},
        {"name": "scarce", "match": {"path": "/scarce"}, "limits": little},
        {"name": "watched", "match": {"path": "/watched"}, "limits": little, "shadow": true},
        {"name": "strict", "match": {"path": "/strict"}, "limits": much, "failure_mode": "deny"},
        {"name": "own", "match": {"path": "/own"}, "limits": little, "failure_mode": "local"},
        {"name": "wide", "match": {"path": "/both"}, "limits": much},
        {"name": "once", "match": {"path": "/both"}, "key": [{"header": "x-caller"}], "limits": [{"refill": "1/min"}]},
    ]})
}

/// Sends requests to every rule until it is told to end. Returns how many were refused with 503.
fn load(to: SocketAddr, ended: &AtomicBool) -> usize {
    let mut client = Client::connect(to);
    let mut refused = 0;
    for round in 0.. {
        if ended.load(Ordering::SeqCst) {
            break;
        }
        let mut responses = ["/open", "/scarce", "/watched", "/strict", "/own"].map(|path| client.get(path)).to_vec();
        // The second of a caller is denied, and what the other rule took is given back. Without a caller, a rule is skipped.
        let caller = Request::get("/both").with("x-caller", round.to_string());
        responses.extend([&caller, &caller, &Request::get("/both")].map(|request| client.exchange(request)));
        // These want one bucket at once.
        responses.extend(at_once(to, 8, &Request::get("/open")));
        refused += with_status(&responses, 503);
        thread::sleep(Duration::from_millis(5));
    }
    refused
}

/// Lets Redis be well, frozen, gone and back, each until Prometheus has seen what comes of it: a count that had risen
/// before its first scrape would have no rate.
fn live_through(redis: &mut Server, prometheus: &Prometheus) {
    let sees = |expr: &str| wait_until(&format!("Prometheus sees {expr}"), || prometheus.now(expr) == Some(1.0));
    let rises = |series: &str| sees(&format!("sum(rate(meshquota_{series}[{RATE_INTERVAL}])) > bool 0"));
    for series in
        ["deny_cache_hits_total", "coalesced_total", "given_back_total", "skipped_total", "redis_call_ms_count"]
    {
        rises(series);
    }
    for outcome in ["allow", "deny", "shadow_deny"] {
        rises(&format!("decisions_total{{outcome=\"{outcome}\"}}"));
    }
    redis.stop();
    sees("sum(meshquota_redis_in_flight) > bool 0");
    sees("sum(meshquota_breaker_open) > bool 0");
    redis.cont();
    sees("sum(meshquota_breaker_open) == bool 0");
    redis.kill();
    sees("sum(meshquota_connected) == bool 0");
    rises("redis_errors_total");
    for outcome in ["fail_allow", "fail_deny", "local_deny"] {
        rises(&format!("decisions_total{{outcome=\"{outcome}\"}}"));
    }
    redis.restart();
    sees("sum(meshquota_connected) == bool 2");
    rises("reconnects_total");
}

#[test]
fn every_query_of_the_dashboard_has_data_of_an_envoy_under_load() {
    if !installed("prometheus") {
        return;
    }
    let (mut redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let setup = Setup::new(redis.port(), &app).configuration(rules()).workers(2);
    // Envoy shows the histogram when it flushes, which it does every five seconds where it is not told otherwise.
    let mut envoy = setup.tweak(|document| document.0["stats_flush_interval"] = json!("0.2s")).start();
    let since = SystemTime::now();
    let target = envoy.listener("metrics");
    let prometheus = Prometheus::scraping(target);
    wait_until("the zeros are scraped", || prometheus.now("sum(meshquota_decisions_total)") == Some(0.0));
    let (ingress, ended) = (envoy.ingress(), AtomicBool::new(false));
    let refused = thread::scope(|scope| {
        /// Ends the load also where this test fails.
        struct End<'a>(&'a AtomicBool);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        let end = End(&ended);
        let load = scope.spawn(|| load(ingress, &ended));
        live_through(&mut redis, &prometheus);
        drop(end);
        load.join().unwrap()
    });
    assert!(refused > 0);
    envoy.expect_5xx(i64::try_from(refused).unwrap());

    // With all of each variable, as Grafana opens it, and with one.
    let dashboard = dashboard();
    let target = target.to_string();
    let all = [("job", ".*"), ("instance", ".*"), ("rule", ".*")];
    let one = [("job", "envoy"), ("instance", target.as_str()), ("rule", "open|scarce|watched|strict|own|wide|once")];
    for chosen in [all, one] {
        let put = |text: &str| {
            let text = text.replace("$__rate_interval", RATE_INTERVAL);
            let text = chosen.iter().fold(text, |text, (name, value)| text.replace(&format!("${name}"), value));
            assert!(!text.contains('$'), "an unknown variable is in {text}");
            text
        };
        for variable in list(&dashboard, "/templating/list").iter().filter(|variable| variable["type"] == "query") {
            // label_values(series, label)
            let question = put(text(variable, "/query/query"));
            let inner = question.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')')).unwrap();
            let (series, label) = inner.rsplit_once(", ").unwrap();
            let found = prometheus.ask(&format!("label/{label}/values"), &[("match[]", series)]).unwrap();
            assert!(!found.as_array().unwrap().is_empty(), "no values of {}: {question}", text(variable, "/name"));
        }
        // The last numbers may still be on their way.
        let deadline = Instant::now() + DEADLINE;
        loop {
            let unanswered = queries(&dashboard).into_iter().filter_map(|Query { panel, expr }| {
                let expr = put(&expr);
                let why = prometheus.shows(&expr, since).err()?;
                Some(format!("{panel}: {expr}: {why}"))
            });
            let unanswered = unanswered.collect::<Vec<_>>();
            if unanswered.is_empty() {
                break;
            }
            assert!(Instant::now() < deadline, "queries without data: {unanswered:#?}");
            thread::sleep(Duration::from_millis(100));
        }
    }
    // Nor would anything else pass for data.
    for nothing in
        ["meshquota_redis_errors_total{kind=\"oom\"}", "meshquota_gone_total", "0 / (meshquota_connected * 0)"]
    {
        assert!(prometheus.shows(nothing, since).is_err(), "{nothing}");
    }
    envoy.finish();
}

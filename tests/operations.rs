//! The runbook is true: what `docs/operations.md` says of errors, log lines, metrics and keys is what the code does, and the
//! alerts of `envoy/prometheus/` name metrics that there are and headings that can be found.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, clippy::string_slice)]

#[path = "support/project.rs"]
mod project;

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind::NotFound;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use meshquota::config::Config;
use meshquota::exchange::ErrorKind;
use meshquota::limiter::{Effect, Limiter};
use meshquota::outage::Line;
use meshquota::request::Facts;
use meshquota::stats::{Change, MetricType, Stats};
use serde_json::Value;

use project::{project, read};

const RUNBOOK: &str = "docs/operations.md";
const ALERTS: &str = "envoy/prometheus/alerts.yaml";
const ALERTS_TESTS: &str = "envoy/prometheus/alerts.test.yaml";

/// The rows of a table of the runbook, by the first cells of its head. A `\|` inside a cell is a `|`.
fn table(head: &str) -> Vec<Vec<String>> {
    let runbook = read(RUNBOOK);
    let (_, rest) = runbook.split_once(head).unwrap_or_else(|| panic!("no table {head}"));
    let rows = rest.lines().skip(2).take_while(|line| line.starts_with('|'));
    rows.map(|row| {
        let cells = row.trim_matches('|').replace("\\|", "\u{0}");
        cells.split('|').map(|cell| cell.trim().replace('\u{0}', "|")).collect()
    })
    .collect()
}

/// What stands in backticks.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// The text between the first pair of such fences.
fn block<'a>(document: &'a str, fence: &str) -> &'a str {
    document.split_once(fence).unwrap().1.split_once("```").unwrap().0
}

/// A request.
struct Told {
    address: &'static str,
}

impl Facts for Told {
    fn header(&self, name: &str) -> Option<Vec<u8>> {
        let value = match name {
            ":method" => "GET",
            "x-api-key" => "gold-key-1",
            _ => return None,
        };
        Some(value.as_bytes().to_vec())
    }

    fn property(&self, path: &[&str]) -> Option<Vec<u8>> {
        (path == ["source", "address"]).then(|| self.address.as_bytes().to_vec())
    }
}

/// A worker that is connected, in virtual time.
struct Worker {
    limiter: Limiter,
    now: Instant,
    requests: u32,
    log: Vec<String>,
}

/// What a worker did.
#[derive(Debug, Default)]
struct Done {
    opened: bool,
    closed: bool,
    sent: String,
}

const ONE_RULE: &str =
    r#"{"redis": {"breaker": {"failures": 2}}, "rules": [{"name": "a", "limits": [{"refill": "9/s"}]}]}"#;

impl Worker {
    fn connected(config: &str) -> Self {
        let config = Config::from_json(config.as_bytes()).unwrap_or_else(|errors| panic!("{errors}"));
        let now = Instant::now();
        let mut worker = Self { limiter: Limiter::new(config, 7, now), now, requests: 0, log: Vec::new() };
        assert!(worker.pass(1).opened);
        worker.limiter.connected(worker.now);
        worker.drain();
        worker
    }

    fn request(&mut self, address: &'static str) -> Done {
        self.requests += 1;
        let met = self.limiter.meets(&Told { address });
        self.limiter.request(self.now, || 0, self.requests, met);
        self.drain()
    }

    fn hear(&mut self, text: &str) -> Done {
        self.limiter.received(self.now, format!("{text}\r\n").as_bytes());
        self.drain()
    }

    /// Lets so many milliseconds pass, and a tick come.
    fn pass(&mut self, milliseconds: u64) -> Done {
        self.now += Duration::from_millis(milliseconds);
        self.limiter.tick(self.now);
        self.drain()
    }

    fn drain(&mut self) -> Done {
        let mut done = Done::default();
        while let Some(effect) = self.limiter.next_effect(self.now) {
            match effect {
                Effect::Open => done.opened = true,
                Effect::Close => done.closed = true,
                Effect::Send(bytes) => done.sent.push_str(&String::from_utf8_lossy(&bytes)),
                Effect::Log(Line::Warning(line) | Line::Info(line)) => self.log.push(line),
                Effect::Decide(..) => {}
            }
        }
        done
    }

    fn breaker_has_opened(&self) -> bool {
        self.log.iter().any(|line| line.starts_with("the breaker is open"))
    }

    /// The kinds of the errors since this was asked last, each as often as it was counted.
    fn kinds(&mut self) -> Vec<String> {
        let metrics = Stats::metrics(["a"]);
        let changes = self.limiter.stats().take().into_iter().filter_map(|change| match change {
            Change::Add(place, times) => Some((label(&metrics[place].name, "kind")?, times)),
            Change::Record(..) => None,
        });
        changes.flat_map(|(kind, times)| vec![kind; usize::try_from(times).unwrap()]).collect()
    }
}

/// The value of a label inside a metric's name.
fn label(name: &str, label: &str) -> Option<String> {
    let (_, rest) = name.split_once(&format!("{label}=.="))?;
    Some(rest.split_once(";.;")?.0.to_owned())
}

#[test]
fn each_kind_of_error_has_a_row_that_is_true() {
    let rows = table("| kind | what Redis says |");
    let names = rows.iter().map(|row| row[0].trim_matches('`').to_owned()).collect::<Vec<_>>();
    assert_eq!(names, ErrorKind::ALL.map(ErrorKind::name));
    for (row, kind) in rows.iter().zip(ErrorKind::ALL) {
        let [_, says, _, connection, breaker, _] = row.as_slice() else { panic!("{row:?}") };
        let replaced = match connection.as_str() {
            "kept" | "kept after a reply, replaced where it broke" => false,
            "replaced" => true,
            other => panic!("{kind:?}: a connection is not {other}"),
        };
        assert_eq!(connection.contains("where it broke"), kind == ErrorKind::Unavailable, "{kind:?}");
        assert_eq!(replaced, kind.retires_connection() || kind == ErrorKind::Protocol, "{kind:?}");
        let replies = quoted(says);
        assert!(!replies.is_empty(), "{kind:?}");
        for reply in replies {
            let reply = if kind == ErrorKind::Protocol { reply.to_owned() } else { format!("-{reply}") };
            let mut worker = Worker::connected(ONE_RULE);
            // One failure before, so that one more opens the breaker and none after an answer does.
            worker.request("192.0.2.1:1");
            worker.hear("-LOADING");
            worker.kinds();
            worker.request("192.0.2.1:1");
            assert_eq!(worker.hear(&reply).closed, replaced, "{reply}");
            assert_eq!(worker.kinds(), [kind.name()], "{reply}");
            assert_eq!(worker.breaker_has_opened(), breaker == "counts", "{reply}");
            if breaker != "counts" {
                assert_eq!(breaker, "closes it", "{kind:?}");
                worker.request("192.0.2.1:1");
                worker.hear("-LOADING");
                assert!(!worker.breaker_has_opened(), "{reply}");
            }
            // The same before anything was asked.
            assert!(Worker::connected(ONE_RULE).hear(&reply).closed, "{reply}");
        }
    }
}

#[test]
fn a_connection_that_broke_is_replaced() {
    let mut worker = Worker::connected(ONE_RULE);
    worker.request("192.0.2.1:1");
    worker.limiter.closed(worker.now, "gone");
    worker.drain();
    assert_eq!(worker.kinds(), ["unavailable"]);
    assert!(worker.pass(30).opened);
}

#[test]
fn each_result_of_a_call_has_a_row() {
    let metrics = Stats::metrics([]);
    let results = metrics.iter().filter_map(|metric| label(&metric.name, "result")).collect::<Vec<_>>();
    assert!(results.len() >= 7, "{results:?}");
    let rows = table("| result | what happened |");
    assert_eq!(rows.iter().map(|row| row[0].trim_matches('`')).collect::<Vec<_>>(), results);
    let breaker = |name: &str| rows.iter().find(|row| row[0] == format!("`{name}`")).unwrap()[2].clone();
    // Two calls that time out, and one that is not sent.
    let config = ONE_RULE.replace("\"breaker\"", "\"max_in_flight\": 2, \"breaker\"");
    let mut worker = Worker::connected(&config);
    for _ in 0..5 {
        worker.request("192.0.2.1:1");
    }
    assert_eq!((worker.breaker_has_opened(), breaker("overload").as_str()), (false, "no"));
    for _ in 0..20 {
        worker.pass(5);
    }
    assert_eq!((worker.breaker_has_opened(), breaker("timeout").as_str()), (true, "counts"));
    worker.hear("*4\r\n:1\r\n:8\r\n:0\r\n:1");
    let closed = |worker: &Worker| worker.log.iter().any(|line| line.starts_with("the breaker is closed"));
    assert_eq!((closed(&worker), breaker("late").as_str()), (false, "no"));
    worker.hear("*4\r\n:1\r\n:8\r\n:0\r\n:1");
    for _ in 0..30 {
        worker.pass(50);
    }
    assert!(!worker.request("192.0.2.1:1").sent.is_empty(), "one request in a cool-down asks");
    worker.hear("*4\r\n:1\r\n:8\r\n:0\r\n:1");
    assert_eq!((closed(&worker), breaker("ok").as_str()), (true, "closes it"));
}

/// A line of the log without what differs from one outage to the next.
fn shape(line: &str) -> String {
    let line = line.split_once("the last one: ").map_or(line, |(head, _)| head);
    let mut shape = String::new();
    for c in line.chars() {
        match c.is_ascii_digit() {
            true if shape.ends_with('0') => {}
            true => shape.push('0'),
            false => shape.push(c),
        }
    }
    shape
}

#[test]
fn an_outage_is_told_in_the_log_as_the_runbook_shows() {
    let runbook = read(RUNBOOK);
    let (_, what_to_do) = runbook.split_once("## What to do\n").unwrap();
    let shown = block(what_to_do, "```\n").lines().map(shape).collect::<Vec<_>>();
    // A frozen server, which is asked every 20 ms; a connection to it is made at once.
    let mut worker = Worker::connected(r#"{"rules": [{"name": "a", "limits": [{"refill": "9/s"}]}]}"#);
    for _ in 0..2750 {
        worker.request("192.0.2.1:1");
        for _ in 0..4 {
            if worker.pass(5).opened {
                worker.limiter.connected(worker.now);
                worker.drain();
            }
        }
        if worker.log.len() == 3 {
            break;
        }
    }
    // It goes on.
    for _ in 0..200 {
        if worker.pass(10).opened {
            worker.limiter.connected(worker.now);
        }
        if !worker.request("192.0.2.1:1").sent.is_empty() {
            worker.hear("*4\r\n:1\r\n:8\r\n:0\r\n:1");
        }
    }
    assert_eq!(worker.log.iter().map(|line| shape(line)).collect::<Vec<_>>(), shown, "{:#?}", worker.log);
    // What becomes of requests under the other modes, and the causes that no server says.
    let mut said = vec!["timeout: ".to_owned(), "overload: redis.max_in_flight calls are waiting already".to_owned()];
    for (mode, words) in [("deny", "requests are refused"), ("local", "requests are decided by each worker for itself")]
    {
        let mut worker = Worker::connected(&ONE_RULE.replacen('{', &format!("{{\"failure_mode\": \"{mode}\", "), 1));
        worker.request("192.0.2.1:1");
        worker.hear("-LOADING");
        assert_eq!(worker.log, [format!("Redis does not answer (loading: LOADING); {words} until it does")]);
        said.push(format!("\"{words}\" (`{mode}`)"));
    }
    let flowing = runbook.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in said {
        assert!(flowing.contains(&words), "{RUNBOOK} does not say {words}");
    }
}

/// The names under which Prometheus knows the metrics.
fn names() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for metric in Stats::metrics(["a"]) {
        let name = metric.name.split_once('.').map_or(metric.name.clone(), |(name, _)| format!("{name}_total"));
        if metric.metric_type == MetricType::Histogram {
            names.extend(["bucket", "count", "sum"].map(|part| format!("{name}_{part}")));
        }
        names.insert(name);
    }
    names
}

/// The words of a text that begin like a metric.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("meshquota_")).map(str::to_owned).collect()
}

#[test]
fn the_metrics_that_are_named_are_those_that_there_are() {
    let names = names();
    for path in [RUNBOOK, ALERTS, ALERTS_TESTS] {
        let unknown = metrics_in(&read(path)).difference(&names).cloned().collect::<Vec<_>>();
        assert!(unknown.is_empty(), "{path} names {unknown:?}");
    }
    let listed = table("| metric | meaning |").iter().flat_map(|row| metrics_in(&row[0])).collect::<BTreeSet<_>>();
    let parts = ["_bucket", "_count", "_sum"];
    let missing = names.difference(&listed).filter(|name| !parts.iter().any(|part| name.ends_with(part)));
    assert_eq!(missing.collect::<Vec<_>>(), Vec::<&String>::new(), "{RUNBOOK} does not list them");
}

#[test]
fn the_values_of_labels_that_are_asked_for_are_those_that_there_are() {
    let metrics = Stats::metrics(["per-ip"]);
    let mut seen = 0;
    for path in [RUNBOOK, ALERTS] {
        let text = read(path);
        for name in ["outcome", "result", "kind"] {
            let known = metrics.iter().filter_map(|metric| label(&metric.name, name)).collect::<BTreeSet<_>>();
            for found in text.split(&format!("{name}=")).skip(1) {
                let Some(values) = found.trim_start_matches('~').strip_prefix('"') else { continue };
                for value in values.split_once('"').unwrap().0.split('|') {
                    let is_known = match value.strip_suffix(".*") {
                        Some(start) => known.iter().any(|other| other.starts_with(start)),
                        None => known.contains(value),
                    };
                    assert!(is_known, "{path}: {name}={value}");
                    seen += 1;
                }
            }
        }
    }
    assert!(seen > 20, "{seen}");
}

/// The anchors of a document's headings, as they are made where it is shown.
fn anchors(document: &str) -> BTreeSet<String> {
    let headings = document.lines().filter(|line| line.starts_with('#'));
    let anchor = |line: &str| {
        let text = line.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
        text.chars().filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_')).collect()
    };
    headings.map(anchor).collect()
}

/// The alerts, each with its rule.
fn alerts() -> Vec<(String, Value)> {
    let document: Value = serde_yaml_ng::from_str(&read(ALERTS)).unwrap();
    let groups = document["groups"].as_array().unwrap();
    let rules = groups.iter().flat_map(|group| group["rules"].as_array().unwrap());
    rules.map(|rule| (rule["alert"].as_str().expect("an alert").to_owned(), rule.clone())).collect()
}

#[test]
fn each_alert_is_whole_and_leads_to_a_heading_of_the_runbook() {
    let (runbook, tests) = (read(RUNBOOK), read(ALERTS_TESTS));
    let anchors = anchors(&runbook);
    let alerts = alerts();
    assert!(alerts.len() >= 7, "{alerts:?}");
    for (name, rule) in alerts {
        for path in ["/expr", "/for", "/annotations/summary", "/annotations/description"] {
            let text = rule.pointer(path).and_then(Value::as_str).unwrap_or_default();
            assert!(!text.trim().is_empty(), "{name} has no {path}");
        }
        let severity = rule.pointer("/labels/severity").and_then(Value::as_str).unwrap_or_default();
        assert!(["critical", "warning", "info"].contains(&severity), "{name}: {severity}");
        let pointer = rule.pointer("/annotations/runbook").and_then(Value::as_str).unwrap_or_default();
        let anchor = pointer.strip_prefix("docs/operations.md#").unwrap_or_else(|| panic!("{name}: {pointer}"));
        assert!(anchors.contains(anchor), "{name}: {RUNBOOK} has no heading #{anchor}");
        assert!(runbook.contains(&name), "{RUNBOOK} does not name {name}");
        // Once where it does not fire, and once where it does.
        assert!(tests.matches(&format!("alertname: {name}")).count() >= 2, "{name} has no tests");
        let fires = tests.contains(&format!("alertname: {name}\n    exp_alerts:\n"));
        assert!(fires && tests.contains(&format!("alertname: {name}}}")), "{name}");
    }
}

#[test]
fn what_the_runbook_points_to_is_there() {
    let runbook = read(RUNBOOK);
    for link in runbook.split("](").skip(1).map(|rest| rest.split_once(')').unwrap().0) {
        let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
        let document = if file.is_empty() { runbook.clone() } else { read(format!("docs/{file}")) };
        assert!(anchor.is_empty() || anchors(&document).contains(anchor), "{link}");
    }
    let paths = quoted(&runbook).into_iter().filter(|word| word.starts_with("envoy/") || word.starts_with("lua/"));
    let paths = paths.collect::<BTreeSet<_>>();
    assert!(paths.len() >= 5, "{paths:?}");
    for path in paths {
        assert!(project().join(path).exists(), "{path}");
    }
}

#[test]
fn the_keys_of_the_runbook_are_those_of_its_callers() {
    let limits = r#""limits": [{"refill": "10/s"}, {"refill": "1000/day"}]"#;
    let rules = |names: &[(&str, &str)]| {
        let rules = names.iter().map(|(name, key)| format!(r#"{{"name": "{name}", "key": {key}, {limits}}}"#));
        rules.collect::<Vec<_>>().join(", ")
    };
    let plain = [
        ("per-ip", r#"["client_ip"]"#),
        ("plan", r#"[{"header": "x-api-key"}]"#),
        ("both", r#"["client_ip", "method"]"#),
    ];
    let plain = format!(r#"{{"rules": [{}]}}"#, rules(&plain));
    let cut = r#"{"client_ip": {"ipv4_prefix": 24}, "rules": [RULES]}"#
        .replace("RULES", &rules(&[("by-net", r#"["client_ip"]"#)]));
    let mut sent = String::new();
    for (config, address) in
        [(&plain, "192.0.2.17:4711"), (&plain, "[2001:db8:1:2:3:4:5:6]:4711"), (&cut, "192.0.2.17:4711")]
    {
        sent.push_str(&Worker::connected(config).request(address).sent);
    }
    let mut seen = 0;
    for row in table("| part of `key` |") {
        for key in row.iter().flat_map(|cell| quoted(cell)).filter(|word| word.starts_with("quota:")) {
            assert!(sent.contains(&format!("\r\n{key}\r\n")), "{key} is no key of {sent}");
            seen += 1;
        }
    }
    assert_eq!(seen, 5);
    // Those of the commands, and the pattern that finds them.
    for key in ["quota:{per-ip:192.0.2.17}:0", "quota:{per-ip:192.0.2.17}:1"] {
        assert!(read(RUNBOOK).contains(key) && sent.contains(&format!("\r\n{key}\r\n")), "{key}");
    }
}

/// Runs promtool in a folder. `None`, and a line that says so, where it is not installed.
fn promtool(folder: &Path, arguments: &[&str]) -> Option<()> {
    let output = match Command::new("promtool").args(arguments).current_dir(folder).output() {
        Err(error) if error.kind() == NotFound => {
            eprintln!("skipped: no promtool on the PATH (Debian has it in the package prometheus)");
            return None;
        }
        other => other.unwrap(),
    };
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "promtool {arguments:?}:\n{said}");
    Some(())
}

#[test]
fn prometheus_takes_the_alerts_and_each_fires_where_it_should_and_nowhere_else() {
    let folder = project().join("envoy/prometheus");
    let checked = promtool(&folder, &["check", "rules", "alerts.yaml"]);
    checked.and_then(|()| promtool(&folder, &["test", "rules", "alerts.test.yaml"]));
}

#[test]
fn prometheus_understands_the_questions_of_the_runbook() {
    let runbook = read(RUNBOOK);
    let questions = block(&runbook, "```promql\n").lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>();
    assert!(questions.len() >= 8, "{questions:?}");
    let rules =
        questions.iter().enumerate().map(|(place, expr)| format!("  - {{record: 'q{place}', expr: '{expr}'}}\n"));
    let folder = tempfile::tempdir().unwrap();
    let text = format!("groups:\n- name: questions\n  rules:\n{}", rules.collect::<String>());
    fs::write(folder.path().join("questions.yaml"), text).unwrap();
    promtool(folder.path(), &["check", "rules", "questions.yaml"]);
}

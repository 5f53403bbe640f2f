//! `meshquota simulate`: what it makes of access logs, compared with what the script in Redis and the filter in Envoy say.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod support;

#[allow(dead_code)]
#[path = "bucket/store.rs"]
mod store;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::num::NonZeroU32;
use std::ops::Range;
use std::process::{Child, Command, Stdio};

use meshquota::config::Config;
use meshquota::quota::Cost;
use meshquota::script::{Call, Outcome};
use serde_json::{Value, json};
use store::Store;
use support::app::App;
use support::envoy::Setup;
use support::markdown::blocks;
use support::program::{Said, file, path, program, run, run_with};
use support::project::read;
use support::server::{Kind, Server};
use tempfile::NamedTempFile;

fn rules(rules: &str) -> NamedTempFile {
    file(format!(r#"{{"rules": {rules}}}"#))
}

/// Runs the rules over a log on standard input.
fn simulate(config: &NamedTempFile, log: impl AsRef<[u8]>) -> Value {
    let said = run_with(&["simulate", path(config), "--json"], &[], log);
    assert!(said.code < 2, "{}", said.err);
    said.json()
}

/// A request of a log: milliseconds after 2026-01-01, an address, a path, and a key.
type Row = (u64, &'static str, &'static str, &'static str);

const ROWS: [Row; 7] = [
    (0, "192.0.2.1", "/", "k1"),
    (10, "192.0.2.1", "/login", "k1"),
    (20, "192.0.2.2", "/login?next=%20", "k2"),
    (400, "192.0.2.1", "/a", "k1"),
    (600, "192.0.2.1", "/login", "k1"),
    (1400, "2001:db8::1", "/", "k3"),
    (59_999, "192.0.2.1", "/", "k1"),
];

fn time(ms: u64) -> String {
    format!("2026-01-01T00:{:02}:{:02}.{:03}Z", ms / 60_000, ms / 1000 % 60, ms % 1000)
}

fn with_port(address: &str) -> String {
    if address.contains(':') { format!("[{address}]:4711") } else { format!("{address}:4711") }
}

/// The rows as lines of a log, each made by that.
fn log(line: impl Fn(&Row) -> String) -> String {
    ROWS.iter().map(|row| line(row) + "\n").collect()
}

fn envoys_text() -> String {
    log(|(at, address, path, _)| {
        format!(
            "[{}] \"GET {path} HTTP/1.1\" 200 - 0 12 3 2 \"{address}\" \"an agent (of sorts)\" \"b1f\" \"example.com\" \"127.0.0.1:80\"",
            time(*at)
        )
    })
}

fn istios_text() -> String {
    log(|(at, address, path, _)| {
        format!(
            "[{}] \"GET {path} HTTP/1.1\" 200 - via_upstream - \"-\" 0 12 3 2 \"203.0.113.9, {address}\" \"agent\" \"b1f\" \"example.com\" \
             \"10.0.0.1:80\" inbound|80|| 127.0.0.6:1 10.0.0.1:80 {} - default",
            time(*at),
            with_port(address)
        )
    })
}

fn istios_json() -> String {
    log(|(at, address, path, key)| {
        json!({
            "start_time": time(*at), "method": "GET", "path": path, "protocol": "HTTP/1.1", "response_code": 200,
            "bytes_sent": 12, "x_forwarded_for": null, "downstream_remote_address": with_port(address),
            "authority": "example.com", "x_api_key": key, "upstream_service_time": "-",
        })
        .to_string()
    })
}

const BY_ADDRESS: &str = r#"[
    {"name": "per-ip", "limits": [{"capacity": 2, "refill": "1/s"}]},
    {"name": "login", "match": {"path": "/login"}, "key": [], "shadow": true, "limits": [{"capacity": 1, "refill": "1/h"}]}
]"#;

/// What there is to say of the rows by these rules.
fn expect(told: &Value) {
    assert_eq!((&told["requests"], &told["denied"], &told["would_deny"]), (&json!(7), &json!(2), &json!(1)), "{told}");
    assert_eq!((&told["first"], &told["last"]), (&json!("2026-01-01T00:00:00Z"), &json!("2026-01-01T00:00:59.999Z")));
    let [per_ip, login] = [&told["rules"][0], &told["rules"][1]];
    assert_eq!((&per_ip["requests"], &per_ip["denied"]), (&json!(7), &json!(2)));
    assert_eq!(
        (&login["requests"], &login["denied"], &login["top"][0]["key"]),
        (&json!(3), &json!(2), &json!("quota:{login:}:0"))
    );
    assert_eq!((&per_ip["groups"][0]["callers"], &per_ip["groups"][0]["callers_denied"]), (&json!(3), &json!(1)));
    let first = &per_ip["top"][0];
    assert_eq!(
        (&first["key"], &first["requests"], &first["denied"]),
        (&json!("quota:{per-ip:192.0.2.1}:0"), &json!(5), &json!(2))
    );
    // Of what came until 0.6 s, 4 tokens, 0.6 are refilled; 4 are asked for in the first second.
    assert_eq!((&first["capacity"], &first["most_in_a"]), (&json!([4]), &json!({"second": 4, "minute": 5, "hour": 5})));
    assert_eq!(per_ip["top"][2]["key"], "quota:{per-ip:2001:db8::/64}:0");
}

#[test]
fn each_usual_way_of_writing_a_log_says_the_same() {
    let config = rules(BY_ADDRESS);
    for log in [envoys_text(), istios_text(), istios_json(), envoys_text().replace('\n', "\r\n\r\n")] {
        let told = simulate(&config, &log);
        assert_eq!(told["lines_not_understood"], 0, "{told}");
        expect(&told);
    }
}

#[test]
fn a_log_of_another_format_is_read_by_that_format() {
    let config = rules(BY_ADDRESS);
    let text =
        log(|(at, address, path, _)| format!("{address} 100% {} | GET {path} | {}", at % 7, 1_767_225_600_000 + at));
    let format = "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT% 100%% %DURATION% | %REQ(:METHOD)% %REQ(X-ENVOY-ORIGINAL-PATH?:PATH):200% | %START_TIME(%s%3f)%\n";
    expect(&run_with(&["simulate", path(&config), "--json", "--format", format], &[], text).json());
    let json = log(|(at, address, path, _)| {
        // What is named by hand counts more than what has a usual name, wherever it stands.
        json!({
            "start_time": "2020-02-02T00:00:00Z", "ts": 1_767_225_600.0 + (*at as f64) / 1000.0, "client": {"ip": address},
            "url": path, "path": "/rewritten", "downstream_remote_address": "192.0.2.77:1",
        })
        .to_string()
    });
    let fields =
        ["--field", "ts=%START_TIME%", "--field", "ip=%DOWNSTREAM_REMOTE_ADDRESS%", "--field", "url=%REQ(:PATH)%"];
    expect(&run_with(&[&["simulate", path(&config), "--json"], &fields[..]].concat(), &[], json).json());
}

#[test]
fn a_format_is_read_as_it_was_copied() {
    let config = rules(BY_ADDRESS);
    let log = log(|(at, address, path, _)| format!("[{}] \"GET {path}\" {address}", time(*at)));
    for format in [
        "[%START_TIME%] \"%REQ(:METHOD)% %REQ(:PATH)%\" %DOWNSTREAM_REMOTE_ADDRESS%",
        "[%START_TIME%] \\\"%REQ(:METHOD)% %REQ(:PATH)%\\\" %DOWNSTREAM_REMOTE_ADDRESS%\\n",
    ] {
        expect(&run_with(&["simulate", path(&config), "--json", "--format", format], &[], &log).json());
    }
}

#[test]
fn a_text_that_begins_like_json_is_read_by_its_format() {
    let config = rules(BY_ADDRESS);
    // The path is not escaped, so this is no JSON.
    let log = log(|(at, address, path, _)| {
        format!("{{\"ts\":\"{}\",\"m\":\"GET\",\"p\":\"{path}\",\t\"ip\":{address}}}", time(*at))
    });
    let format = r#"{"ts":"%START_TIME%","m":"%REQ(:METHOD)%","p":"%REQ(:PATH)%",\t"ip":%DOWNSTREAM_REMOTE_ADDRESS%}"#;
    expect(&run_with(&["simulate", path(&config), "--json", "--format", format], &[], log).json());
}

#[test]
fn what_others_write_around_each_line_is_taken_off() {
    let config = rules(BY_ADDRESS);
    let docker = |line: &str| json!({"log": format!("{line}\n"), "stream": "stdout", "time": "2020-02-02T00:00:00Z"});
    let docker = |line: &str| docker(line).to_string();
    let wrappers: [&dyn Fn(&str) -> String; 4] = [
        &|line| format!("2020-02-02T00:00:00.000000000Z stdout F {line}"),
        &|line| format!("[pod/gateway-7f/istio-proxy] {line}"),
        &|line| format!("envoy-1  | {line}"),
        &docker,
    ];
    for wrapper in wrappers {
        for log in [envoys_text(), istios_text(), istios_json()] {
            let told = simulate(&config, log.lines().map(|line| wrapper(line) + "\n").collect::<String>());
            assert_eq!(told["lines_not_understood"], 0, "{told}");
            expect(&told);
        }
    }
    // A format that was given is also that of what is within.
    let log = log(|(at, address, path, _)| format!("envoy-1 | [{}] {path} {address}", time(*at)));
    for format in [
        "envoy-1 | [%START_TIME%] %REQ(:PATH)% %DOWNSTREAM_REMOTE_ADDRESS%",
        "[%START_TIME%] %REQ(:PATH)% %DOWNSTREAM_REMOTE_ADDRESS%",
    ] {
        expect(&run_with(&["simulate", path(&config), "--json", "--format", format], &[], &log).json());
    }
    let part = "2020-02-02T00:00:00Z stdout P {\"start_time\": \n";
    let said = run_with(&["simulate", path(&config)], &[], envoys_text() + part);
    assert!(
        said.out.contains("  -:8: it is a part of a line, which the container runtime has split\n"),
        "{}",
        said.out
    );
    assert_eq!(simulate(&config, format!("\u{feff}{}", envoys_text()))["lines_not_understood"], 0);
}

#[test]
fn times_are_read_as_the_format_writes_them() {
    let config = rules(BY_ADDRESS);
    let written = |at: &u64| format!("01/Jan/2026:00:{:02}:{:02}.{:03} +0000", at / 60_000, at / 1000 % 60, at % 1000);
    let operator = "%START_TIME(%d/%b/%Y:%H:%M:%E3S %z)%";
    let text = log(|(at, address, path, _)| format!("{address} - - {} {path}", written(at)));
    let format = format!("%DOWNSTREAM_DIRECT_REMOTE_ADDRESS_WITHOUT_PORT% - - {operator} %PATH(NQ:ORIG)%");
    expect(&run_with(&["simulate", path(&config), "--json", "--format", &format], &[], text).json());
    let json =
        log(|(at, address, path, _)| json!({"at": written(at), "remote_address": address, "path": path}).to_string());
    let field = format!("at={operator}");
    expect(&run_with(&["simulate", path(&config), "--json", "--field", &field], &[], json).json());
}

#[test]
fn the_headers_of_an_answer_are_not_those_of_its_request() {
    let config = rules(
        r#"[{"name": "a", "key": [], "cost": {"header": "x-cost"}, "limits": [{"capacity": 9, "refill": "1/h"}]}]"#,
    );
    let line = r#"{"response": {"headers": {"x-cost": "5"}}, "response_headers": {"x-cost": "5"}, "request": {"headers": {"x-cost": "2"}, "start_time": 1, "path": "/"}}"#;
    assert_eq!(simulate(&config, line)["rules"][0]["top"][0]["most_in_a"]["second"], 2);
}

#[test]
fn nothing_of_a_line_is_left_out_silently() {
    let config = rules(BY_ADDRESS);
    let one = r#"{"start_time": 1767225600, "path": "/"}"#;
    let said = run_with(&["simulate", path(&config)], &[], format!("{one}\n{one} {one}\n{one}]\n"));
    for part in [
        "1 request from",
        "2 lines not understood:\n  -:2: no JSON: trailing characters",
        "  -:3: no JSON: trailing characters",
    ] {
        assert!(said.out.contains(part), "{part}: {}", said.out);
    }
    let fields = ["--field", "ip=%DOWNSTREAM_REMOTE_ADDRESS%", "--field", "path=%REQ(:PATH)%"];
    let said = run_with(&[&["simulate", path(&config)], &fields[..]].concat(), &[], one);
    assert!(said.out.contains("\nnamed by --field, and in no line of the log: ip\n"), "{}", said.out);
    // What is quoted is cut.
    let said = run_with(
        &["simulate", path(&config)],
        &[],
        json!({"start_time": "x".repeat(100_000), "path": "/"}).to_string(),
    );
    assert!(said.err.len() < 500 && said.err.contains("xxx…\""), "{}", said.err.len());
    let connections = "[2026-01-01T00:00:00.000Z] \"- - -\" 0 - 12 3 2 - \"-\" \"-\" \"-\" \"-\" \"10.0.0.1:80\"\n";
    let said = run_with(&["simulate", path(&config)], &[], connections);
    assert!(said.err.starts_with("meshquota: none of 1 lines has a method or a path; say how"), "{}", said.err);
}

#[test]
fn the_time_of_a_request_is_that_of_its_start_whatever_else_has_a_time() {
    let config = rules(BY_ADDRESS);
    let since_1970 = |at: &u64| 1_767_225_600_000 + at;
    let logs: [fn(u64) -> Value; 4] = [
        |ms| json!({"@timestamp": "2026-03-03T00:00:00Z", "time": "of day", "timestamp": "never", "start_time": ms}),
        |ms| json!({"start_time": ms * 1000 + 999, "timestamp": 1}),
        |ms| json!({"time": 7, "timestamp": ms * 1_000_000 + 999_999, "@timestamp": 8}),
        |ms| json!({"@timestamp": ms, "time": 9}),
    ];
    for times in logs {
        let log = log(|(at, address, path, _)| {
            let mut line = times(since_1970(at));
            line.as_object_mut().unwrap().extend([
                ("path".to_owned(), json!("/rewritten")),
                ("x-envoy-original-path".to_owned(), json!(path)),
                ("client_ip".to_owned(), json!("of another")),
                ("downstream_remote_address".to_owned(), json!(with_port(address))),
            ]);
            line.to_string()
        });
        expect(&simulate(&config, log));
    }
}

#[test]
fn logs_that_are_packed_or_in_pieces_are_read_in_the_order_of_time() {
    let config = rules(BY_ADDRESS);
    let all = istios_json();
    let lines = all.lines().collect::<Vec<_>>();
    let every_other =
        |start: usize| lines.iter().skip(start).step_by(2).map(|line| format!("{line}\n")).collect::<String>();
    // A log is in the order of the ends of requests.
    let backwards = lines.iter().rev().map(|line| format!("{line}\n")).collect::<String>();
    let pieces = [file(every_other(1)), file(gzip(&every_other(0)))];
    let said = run(&["simulate", path(&config), path(&pieces[0]), path(&pieces[1]), "--json"]);
    expect(&said.json());
    assert_eq!(said.code, 1, "a request is denied");
    expect(&simulate(&config, gzip(&backwards)));
    // Two of gzip's members in one file, as a rotated log may have.
    expect(&simulate(&config, [gzip(&every_other(0)), gzip(&every_other(1))].concat()));
    let mut cut = gzip(&all);
    cut.truncate(cut.len() - 9);
    // What could be read counts, and is told to be not all.
    let said = run_with(&["simulate", path(&config)], &[], &cut);
    assert_eq!((said.code, said.err.as_str()), (1, ""), "{}", said.out);
    let told = "\n1 of the logs could not be read to the end; what was read counts:\n  -:8: ";
    assert!(said.out.starts_with("7 requests") && said.out.contains(told), "{}", said.out);
    let said = run_with(&["simulate", path(&config)], &[], &cut[..20]);
    assert_eq!((said.code, said.err.starts_with("meshquota: -:1: ")), (2, true), "{}", said.err);
}

#[test]
fn logs_that_are_longer_than_what_is_held_back_are_read_side_by_side() {
    let config = rules(BY_ADDRESS);
    let every_other = |start: u64| {
        let line = |at: u64| format!("{{\"start_time\": {}, \"path\": \"/\"}}\n", 1_767_225_600_000 + at);
        file((start..80_000).step_by(2).map(line).collect::<String>())
    };
    let logs = [every_other(0), every_other(1)];
    let told = run(&["simulate", path(&config), path(&logs[0]), path(&logs[1]), "--json"]).json();
    assert_eq!((&told["requests"], &told["out_of_order"]), (&json!(80_000), &json!(0)));
}

#[test]
fn a_clock_that_is_wrong_for_a_request_holds_up_no_other() {
    let config = rules(r#"[{"name": "a", "limits": [{"capacity": 2, "refill": "1/min"}]}]"#);
    let line = |at: u64, address: &str| {
        format!("{{\"start_time\": {}, \"path\": \"/\", \"client_ip\": \"{address}\"}}\n", 1_767_225_600_000 + at)
    };
    let year = 365 * 86_400_000;
    let of = |address: &str| (0..40_000).map(|minute| line(minute * 60_000, address)).collect::<String>();
    let logs = [file(line(year, "192.0.2.1") + &of("192.0.2.1")), file(of("192.0.2.2"))];
    let told = run(&["simulate", path(&config), path(&logs[0]), path(&logs[1]), "--json"]).json();
    assert_eq!((&told["requests"], &told["denied"], &told["out_of_order"]), (&json!(80_001), &json!(0), &json!(0)));
    // Where there is nothing left to be done about it, it is said.
    let late = (0..40_000).map(|place| line(year - place, "192.0.2.1")).collect::<String>();
    let said = run_with(&["simulate", path(&config)], &[], late);
    assert!(
        said.out.contains(", so who is denied is not to be trusted: is the clock of a proxy wrong?\n"),
        "{}",
        said.out
    );
}

#[test]
fn what_would_be_read_twice_is_refused() {
    let (config, log) = (rules(BY_ADDRESS), file(istios_json()));
    let said = run_with(&["simulate", "-"], &[], BY_ADDRESS);
    let expected = "meshquota: -: standard input is either the configuration or a log; name a file for one of them\n";
    assert_eq!((said.code, said.err.as_str()), (2, expected));
    let said = run(&["simulate", path(&config), path(&log), path(&log)]);
    let expected = format!("meshquota: {}: it is given twice, and would count twice\n", path(&log));
    assert_eq!((said.code, said.err), (2, expected));
}

#[test]
fn the_limit_that_denied_is_told() {
    let config = rules(
        r#"[{"name": "a", "key": [], "limits": [{"capacity": 2, "refill": "2/s"}, {"capacity": 4, "refill": "1/h"}]}]"#,
    );
    let at = [0, 0, 0, 1000, 1000, 1000, 2000];
    let log = at.map(|at| format!("{{\"start_time\": {}, \"path\": \"/\"}}\n", 1_767_225_600_000_u64 + at)).concat();
    let told = simulate(&config, &log);
    let limits = told["rules"][0]["groups"][0]["limits"].as_array().unwrap();
    // The fourth is the last that the hour allows.
    assert_eq!(limits.iter().map(|limit| limit["denied"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2]);
    let said = run_with(&["simulate", path(&config)], &[], log);
    for part in [
        "  limits of 1 caller, 1 of them denied:\n",
        "every 500ms: denied 1 request\n",
        "every 1h: denied 2 requests\n",
        "          7         3       4/7  3, 7, 7\n",
    ] {
        assert!(said.out.contains(part), "{part}:\n{}", said.out);
    }
}

fn gzip(text: &str) -> Vec<u8> {
    let mut child = Command::new("gzip").arg("-c").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    child.wait_with_output().unwrap().stdout
}

#[test]
fn what_is_not_understood_is_told_with_its_place_and_loses_nothing_else() {
    let config = rules(BY_ADDRESS);
    let spoiled = istios_json().replacen(
        '\n',
        "\nnot a line\n{\"start_time\": 7\n{\"start_time\": \"yesterday\", \"path\": \"/\"}\n",
        1,
    );
    let said = run_with(
        &["simulate", path(&config)],
        &[],
        format!("{spoiled}{{\"path\": \"/\"}}\n{{\"start_time\": 1}}\n\u{0}\n"),
    );
    assert_eq!(said.code, 1);
    for part in [
        "7 requests from 2026-01-01T00:00:00Z to 2026-01-01T00:00:59.999Z (59s 999ms)\n2 denied (28.57%)\n",
        "1 more that a rule would have denied, had it not only watched\n",
        "5 lines not understood:\n",
        "\n1 lines of no request: they have neither a method nor a path, as of TCP connections\n",
        "  -:2: it is neither JSON nor of the format of the log\n",
        "  -:3: no JSON: EOF while parsing an object at line 1 column 16\n",
        "  -:4: the time \"yesterday\" is not understood; expected RFC 3339, or a number since 1970\n",
        "  -:11: it has no time\n",
        "per-ip: 7 requests of 3 callers, 2 denied (28.57%)\n  limits of 3 callers, 1 of them denied:\n  2 tokens at most, 1 more every 1s: denied 2 requests\n",
    ] {
        assert!(said.out.contains(part), "{part}:\n{}", said.out);
    }
}

#[test]
fn what_cannot_be_simulated_is_refused_with_a_remedy() {
    let config = rules(BY_ADDRESS);
    let said = |arguments: &[&str], input: &str| -> Said {
        run_with(&[&["simulate", path(&config)], arguments].concat(), &[], input)
    };
    let cases: [(&[&str], &str, &str); 8] = [
        (&[], "", "there is no request in the log"),
        (
            &[],
            "a\nb\n",
            "none of 2 lines was understood; -:1: it is neither JSON nor of the format of the log; say how the log is written with --format, or what its names mean with --field",
        ),
        (&["/no/such/log"], "", "/no/such/log: No such file or directory (os error 2)"),
        (&["--format", "%REQ(:PATH)%"], "", "--format: it has no %START_TIME%, without which nothing can be told"),
        (&["--format", "%START_TIME%%REQ(:PATH)%"], "", "--format: nothing parts two operators before %"),
        (
            &["--format", "%START_TIME% %Req(:PATH)%"],
            "",
            "--format: no command operator of Envoy begins at %Req(:PATH)%",
        ),
        (&["--field", "a=%DURATION%"], "", "--field a: %DURATION% says nothing that a rule asks for"),
        (&["--field", "a=b"], "", "--field a: expected a command operator of Envoy's, such as %START_TIME%"),
    ];
    for (arguments, input, expected) in cases {
        let said = said(arguments, input);
        assert_eq!((said.code, said.err.trim_end()), (2, format!("meshquota: {expected}").as_str()), "{arguments:?}");
    }
}

#[test]
fn a_rule_that_asks_for_what_no_log_has_is_told() {
    let config = rules(
        r#"[{"name": "a", "key": [{"header": "x-api-key"}], "limits": [{"refill": "1/s"}]},
            {"name": "b", "match": {"route": "checkout"}, "limits": [{"refill": "1/s"}]}]"#,
    );
    let told = simulate(&config, envoys_text());
    // A rule that lacks a part of its key was met.
    assert_eq!((&told["missing"], &told["without_a_rule"]), (&json!(["x-api-key", "xds.route_name"]), &json!(0)));
    assert_eq!(told["rules"][0]["skipped"], 7);
    let told = simulate(&config, istios_json());
    assert_eq!((&told["missing"], &told["rules"][0]["groups"][0]["callers"]), (&json!(["xds.route_name"]), &json!(3)));
}

/// A log of many requests of a few callers in bursts, and what is to know of it: for each request its time and its caller.
fn bursts(count: u64) -> (String, Vec<(u64, String)>) {
    let mut random = fastrand::Rng::with_seed(11);
    let (mut at, mut requests) = (0, Vec::new());
    for _ in 0..count {
        at += if random.u8(..) < 8 { random.u64(..3000) } else { random.u64(..40) };
        requests.push((at, format!("192.0.2.{}", 1 + random.u8(..9).min(random.u8(..9)))));
    }
    let line = |(at, address): &(u64, String)| {
        json!({"start_time": 1_767_225_600_000 + at, "path": "/", "client_ip": address}).to_string() + "\n"
    };
    (requests.iter().map(line).collect(), requests)
}

#[test]
fn those_are_denied_whom_the_script_in_redis_denies() {
    let config = r#"{"rules": [{"name": "per-ip", "limits": [{"capacity": 7, "refill": "13/3s"}, {"capacity": 100, "refill": "200/min"}], "cost": 2}]}"#;
    let (log, requests) = bursts(4000);
    let told = simulate(&file(config), log);
    let limits = Config::from_json(config.as_bytes()).unwrap().rules[0].limits().to_vec();
    let mut store = Store::start(Kind::Redis);
    let mut denied = BTreeMap::new();
    for (at, address) in &requests {
        let keys = (0..limits.len()).map(|limit| format!("quota:{{per-ip:{address}}}:{limit}")).collect::<Vec<_>>();
        let buckets = keys.iter().zip(limits.iter().copied());
        let call = Call::charge(buckets, Cost::new(2).unwrap(), NonZeroU32::MIN, Some(1_767_225_600_000 + at));
        let granted = matches!(store.wire.outcome(&call), Outcome::Granted { .. });
        // The times of the log pass faster than the server's, by which keys would expire.
        for key in &keys {
            store.wire.integer(&["PERSIST", key]);
        }
        *denied.entry(keys[0].clone()).or_insert(0) += u64::from(!granted);
    }
    let told = told["rules"][0]["top"].as_array().unwrap();
    let told = told.iter().map(|top| (top["key"].as_str().unwrap().to_owned(), top["denied"].as_u64().unwrap()));
    let told = told.collect::<BTreeMap<_, _>>();
    assert!(denied.values().sum::<u64>() > 400 && denied.values().sum::<u64>() < 3600, "{denied:?}");
    assert_eq!(told, denied);
}

#[test]
fn a_bucket_that_several_limits_charge_denies_whom_the_script_in_redis_denies() {
    let config = r#"{"rules": [
        {"name": "a", "namespace": "ns", "match": {"path": "/a"}, "limits": [{"capacity": 7, "refill": "13/3s"}]},
        {"name": "b", "namespace": "ns", "match": {"path": "/b"}, "cost": 3, "limits": [{"capacity": 20, "refill": "70/11s"}]},
        {"name": "c", "namespace": "ns", "match": {"path": "/c"}, "cost": 2, "limits": [{"capacity": 5, "refill": "1/s"}]}
    ]}"#;
    let rules = Config::from_json(config.as_bytes()).unwrap().rules;
    let (_, requests) = bursts(4000);
    let mut random = fastrand::Rng::with_seed(12);
    let requests =
        requests.into_iter().map(|(at, address)| (at, address, random.usize(..rules.len()))).collect::<Vec<_>>();
    let line = |(at, address, rule): &(u64, String, usize)| {
        let path = format!("/{}", rules[*rule].name().as_str());
        json!({"start_time": 1_767_225_600_000 + at, "path": path, "client_ip": address}).to_string() + "\n"
    };
    let told = simulate(&file(config), requests.iter().map(line).collect::<String>());
    let mut store = Store::start(Kind::Redis);
    let mut denied = vec![BTreeMap::new(); rules.len()];
    // When Redis would forget a bucket, were the times of the log its own.
    let mut gone = BTreeMap::new();
    for (at, address, rule) in &requests {
        let key = format!("quota:{{ns:{address}}}:0");
        if gone.get(&key).is_some_and(|gone| gone <= at) {
            store.wire.integer(&["DEL", &key]);
        }
        let cost = Cost::new([1, 3, 2][*rule]).unwrap();
        let buckets = [(key.as_str(), rules[*rule].limits()[0])];
        let call = Call::charge(buckets, cost, NonZeroU32::MIN, Some(1_767_225_600_000 + at));
        let outcome = store.wire.outcome(&call);
        if let Outcome::Granted { standing, .. } = &outcome {
            store.wire.integer(&["PERSIST", &key]);
            let life = u64::try_from(standing.reset_after.as_millis()).unwrap() + 1000;
            gone.insert(key.clone(), at + life);
        }
        *denied[*rule].entry(key).or_insert(0) += u64::from(!matches!(outcome, Outcome::Granted { .. }));
    }
    for (rule, denied) in denied.iter().enumerate() {
        let told = told["rules"][rule]["top"].as_array().unwrap();
        let told = told.iter().map(|top| (top["key"].as_str().unwrap().to_owned(), top["denied"].as_u64().unwrap()));
        assert!(denied.values().sum::<u64>() > 100, "{rule}: {denied:?}");
        assert_eq!(told.collect::<BTreeMap<_, _>>(), *denied, "{rule}");
    }
}

#[test]
fn the_log_of_an_envoy_says_what_its_filter_decided() {
    let (server, app) = (Server::start(Kind::Redis, &[]), App::start());
    let configuration = json!({"rules": [
        {"name": "per-ip", "limits": [{"capacity": 5, "refill": "1/h"}]},
        {"name": "login", "match": {"path": "/login"}, "shadow": true, "limits": [{"capacity": 2, "refill": "1/h"}]},
    ]});
    let default = Setup::new(server.port(), &app).configuration(configuration.clone()).tweak(|document| {
        let log = &mut document.manager("ingress")["access_log"][0]["typed_config"];
        log.as_object_mut().unwrap().remove("log_format");
    });
    let as_json = Setup::new(server.port(), &app).configuration(configuration.clone()).tweak(|document| {
        document.manager("ingress")["access_log"][0]["typed_config"]["log_format"] = json!({"json_format": {
            "start_time": "%START_TIME%", "method": "%REQ(:METHOD)%", "path": "%REQ(X-ENVOY-ORIGINAL-PATH?:PATH)%",
            "downstream_remote_address": "%DOWNSTREAM_REMOTE_ADDRESS%", "response_code": "%RESPONSE_CODE%",
        }});
    });
    let config = file(configuration.to_string());
    for setup in [default, as_json] {
        let envoy = setup.start();
        redis::cmd("FLUSHALL").exec(&mut server.client()).unwrap();
        let paths = ["/", "/login", "/login", "/login?a", "/b", "/c", "/login", "/d"];
        let statuses = paths.map(|path| envoy.get(path).status());
        assert_eq!(statuses, [200, 200, 200, 200, 200, 429, 429, 429]);
        let log = envoy.wait_for_access_log(paths.len()).join("\n");
        let told = simulate(&config, &log);
        // The last login is denied by the one rule, and would have been by the other.
        assert_eq!(
            (&told["requests"], &told["denied"], &told["would_deny"]),
            (&json!(8), &json!(3), &json!(1)),
            "{log}"
        );
        assert_eq!((&told["rules"][1]["requests"], &told["rules"][1]["denied"]), (&json!(4), &json!(2)));
        let top = &told["rules"][0]["top"][0];
        assert_eq!((&top["requests"], &top["denied"]), (&json!(8), &json!(3)));
        envoy.finish();
    }
}

/// The most memory that a process has had so far, in KiB.
fn peak_kib(child: &Child) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// What is said of requests, made by their number, and the memory that was taken by the first so many of them and by all.
fn memory(config: &NamedTempFile, early: u64, all: u64, line: impl Fn(u64) -> String) -> (Value, u64, u64) {
    let mut child = Command::new(program())
        .args(["simulate", path(config), "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = BufWriter::new(child.stdin.take().unwrap());
    let mut write = |requests: Range<u64>| {
        requests.for_each(|at| writeln!(input, "{}", line(at)).unwrap());
        input.flush().unwrap();
        peak_kib(&child)
    };
    let (early, late) = (write(0..early), write(early..all));
    drop(input);
    let mut told = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_to_string(&mut told).unwrap();
    child.wait().unwrap();
    (serde_json::from_str(&told).unwrap(), early, late)
}

fn line(at: u64, more: &str) -> String {
    let (net, host) = (at % 20, at % 250);
    format!(r#"{{"start_time": {}, "path": "/{at}", "client_ip": "10.0.{net}.{host}"{more}}}"#, 1_767_225_600_000 + at)
}

#[test]
fn no_more_memory_is_taken_for_a_longer_log() {
    // By the first so many as much is held back as ever is.
    let (told, early, late) = memory(&rules(BY_ADDRESS), 60_000, 400_000, |at| line(at, ""));
    assert_eq!((&told["requests"], &told["forgotten"], &told["out_of_order"]), (&json!(400_000), &json!(0), &json!(0)));
    assert!(late < early + early / 4, "{early} KiB after 60000 requests, {late} KiB after 400000");
}

#[test]
fn no_more_memory_is_taken_for_longer_lines() {
    let more = format!(r#", "x-trace": "{}""#, "x".repeat(200_000));
    let (told, early, late) = memory(&rules(BY_ADDRESS), 1000, 2000, |at| line(at, &more));
    assert_eq!(told["requests"], 2000);
    assert!(late < early + early / 4, "{early} KiB after 1000 requests, {late} KiB after 2000");
}

#[test]
fn no_more_memory_is_taken_where_each_line_has_names_of_its_own() {
    let name = "x".repeat(200_000);
    let (told, early, late) = memory(&rules(BY_ADDRESS), 1000, 2000, |at| line(at, &format!(r#", "{name}{at}": 1"#)));
    assert_eq!(told["requests"], 2000);
    assert!(late < early + early / 4, "{early} KiB after 1000 requests, {late} KiB after 2000");
}

#[test]
fn hardly_more_memory_is_taken_where_each_caller_has_limits_of_its_own() {
    let overrides = |count: u64| {
        let overrides = (0..count).map(|place| {
            let address = format!("10.0.{}.{}", place % 20, place % 250);
            json!({"values": [address], "limits": [{"capacity": place + 1, "refill": "1/s"}, {"capacity": 9000, "refill": "1/h"}]})
        });
        file(
            json!({"rules": [{"name": "a", "limits": [{"refill": "1/s"}], "overrides": overrides.collect::<Vec<_>>()}]})
                .to_string(),
        )
    };
    let taken = |count: u64| memory(&overrides(count), 1, 5000, |at| line(at, ""));
    let ((few, _, by_few), (many, _, by_many)) = (taken(1), taken(500));
    let groups = |told: &Value| told["rules"][0]["groups"].as_array().unwrap().len();
    assert_eq!((groups(&few), groups(&many)), (2, 500));
    assert!(by_many < by_few + by_few / 2, "{by_few} KiB by one override, {by_many} KiB by 500");
    // People are told of the first of them.
    let said = run_with(
        &["simulate", path(&overrides(500)), "--top", "3"],
        &[],
        (0..5000).map(|at| line(at, "") + "\n").collect::<String>(),
    );
    assert!(said.out.contains("\n  497 more with limits of their own, "), "{}", said.out);
}

#[test]
fn nothing_of_a_progress_bar_is_written_where_there_is_no_terminal() {
    let log = file(istios_json());
    let said = run(&["simulate", path(&rules(BY_ADDRESS)), path(&log)]);
    assert_eq!(said.err, "");
    assert!(said.out.as_bytes().lines().all(|line| !line.unwrap().contains('\u{1b}')));
}

#[test]
fn the_page_on_the_command_line_shows_what_is_said() {
    let page = read("docs/command-line.md");
    let blocks = blocks(&page).into_iter().map(|block| block.text).collect::<Vec<_>>();
    let [config, log, expected, ..] = &blocks[..] else { panic!("{blocks:?}") };
    assert_eq!(run_with(&["simulate", path(&file(config))], &[], log).out, *expected);
}

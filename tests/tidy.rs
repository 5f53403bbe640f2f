//! Rules of the house that the compiler does not know.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::fs;
use std::path::{Path, PathBuf};

fn project() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The files below a folder of the project, by their paths inside the project.
fn files(folder: &str, ending: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![project().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.to_string_lossy().ends_with(ending) {
                found.push(path.strip_prefix(project()).unwrap().to_string_lossy().into_owned());
            }
        }
    }
    found.sort();
    assert!(!found.is_empty(), "no {ending} below {folder}");
    found
}

fn read(path: &str) -> String {
    fs::read_to_string(project().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn only_the_shell_knows_the_proxy() {
    let mut seen = 0;
    for path in files("src", ".rs") {
        let shell = path == "src/filter.rs" || path.starts_with("src/filter/");
        for (number, line) in read(&path).lines().enumerate() {
            if line.contains("proxy_wasm") {
                assert!(shell, "{path}:{}: proxy_wasm outside src/filter", number + 1);
                seen += 1;
            }
        }
    }
    assert!(seen > 0);
}

#[test]
fn the_core_has_no_clock_no_files_and_no_sockets() {
    for path in files("src", ".rs") {
        if path.starts_with("src/filter/") || path.contains("tests") {
            continue;
        }
        let text = read(&path);
        let code = text.split("#[cfg(test)]").next().unwrap();
        for word in
            ["Instant::now", "SystemTime::now", "TcpStream", "UdpSocket", "std::fs", "std::thread", "std::env::"]
        {
            assert!(!code.contains(word), "{path} mentions {word}: time and I/O come from outside");
        }
    }
}

#[test]
fn every_module_says_what_it_is_for_and_stays_readable() {
    const LONGEST: usize = 600;
    for path in files("src", ".rs") {
        let text = read(&path);
        assert!(text.starts_with("//! "), "{path} does not begin with its job");
        let lines = text.lines().count();
        assert!(lines <= LONGEST, "{path} has {lines} lines; more than {LONGEST} are not read in one go");
    }
}

#[test]
fn no_module_is_a_bag_of_odds_and_ends() {
    for path in files("src", ".rs").into_iter().chain(files("tests", ".rs")) {
        let name = Path::new(&path).file_stem().unwrap().to_string_lossy().into_owned();
        assert!(!["util", "utils", "helpers", "common", "misc"].contains(&name.as_str()), "{path}");
    }
}

/// The words in backticks that look like paths of the project.
fn paths_in(text: &str) -> Vec<&str> {
    const FOLDERS: [&str; 8] = ["src/", "lua/", "envoy/", "tests/", "demo/", "tools/", "bench/", ".ci/"];
    text.split('`')
        .skip(1)
        .step_by(2)
        .filter(|word| FOLDERS.iter().any(|folder| word.starts_with(folder)))
        .filter(|word| !word.contains([' ', '*', '{', '<']))
        .collect()
}

#[test]
fn the_paths_that_the_documents_name_exist() {
    for document in ["ARCHITECTURE.md", "README.md"] {
        let text = read(document);
        let paths = paths_in(&text);
        assert!(!paths.is_empty(), "{document} names no path");
        for path in paths {
            assert!(project().join(path).exists(), "{document} names {path}, which does not exist");
        }
    }
}

#[test]
fn the_architecture_names_every_module() {
    let text = read("ARCHITECTURE.md");
    for path in files("src", ".rs") {
        let tests_of_a_module = path.ends_with("/tests.rs");
        assert!(tests_of_a_module || text.contains(&format!("`{path}`")), "ARCHITECTURE.md does not name {path}");
    }
}

/// The fields and defaults of the README's rows of field, default and meaning.
fn documented_fields(readme: &str) -> Vec<(String, String)> {
    let rows = readme.lines().filter_map(|line| {
        let mut cells = line.trim_matches('|').split('|').map(str::trim);
        let (fields, default, _meaning) = (cells.next()?, cells.next()?, cells.next()?);
        fields.starts_with('`').then(|| (fields.to_owned(), default.to_owned()))
    });
    rows.flat_map(|(fields, defaults)| {
        let fields = fields.split(", ").map(|field| field.trim_matches('`').to_owned()).collect::<Vec<_>>();
        let defaults = defaults.split(", ").map(|default| default.trim_matches('`').to_owned()).collect::<Vec<_>>();
        let of = move |place: usize| defaults.get(place).or(defaults.first()).cloned().unwrap_or_default();
        fields.into_iter().enumerate().map(move |(place, field)| (field, of(place))).collect::<Vec<_>>()
    })
    .collect()
}

#[test]
fn the_documented_defaults_are_those_of_the_code() {
    use meshquota::client_ip::Trust;
    use meshquota::config::{Clock, Config};
    use meshquota::decision::FailureMode;

    let config = Config::from_json(br#"{"rules": [{"name": "a", "limits": [{"refill": "7/s"}]}]}"#).unwrap();
    let redis = &config.redis;
    let prefixes = config.client_ip.prefixes;
    assert!(redis.credentials.username.is_none() && redis.credentials.password.is_none());
    assert_eq!(config.client_ip.trust, Trust::Proxy);
    assert_eq!(config.rules[0].limits()[0].capacity().get(), 7);
    let defaults: Vec<(&str, String)> = vec![
        ("redis.cluster", redis.cluster.clone()),
        ("redis.timeout", format!("{:?}", redis.timeout)),
        ("redis.max_in_flight", redis.max_in_flight.to_string()),
        ("redis.username", "none".to_owned()),
        ("redis.password", "none".to_owned()),
        ("redis.database", redis.database.to_string()),
        ("key_prefix", config.key_prefix.as_str().to_owned()),
        ("clock", if config.clock == Clock::Redis { "redis" } else { "proxy" }.to_owned()),
        ("failure_mode", if config.failure_mode == FailureMode::Allow { "allow" } else { "deny" }.to_owned()),
        ("client_ip", "{}".to_owned()),
        ("client_ip.ipv4_prefix", prefixes.ipv4.to_string()),
        ("client_ip.ipv6_prefix", prefixes.ipv6.to_string()),
        ("response", "see below".to_owned()),
        ("failure_response", "see below".to_owned()),
        ("rules[].name", String::new()),
        ("rules[].namespace", "the name".to_owned()),
        ("rules[].match", "every request".to_owned()),
        ("rules[].unless", "none".to_owned()),
        ("rules[].key", r#"["client_ip"]"#.to_owned()),
        ("rules[].if_missing", "skip".to_owned()),
        ("rules[].limits[].refill", String::new()),
        ("rules[].limits[].capacity", "one second's refill".to_owned()),
        ("rules[].overrides", "none".to_owned()),
        ("rules[].cost", "1".to_owned()),
        ("rules[].response", "response".to_owned()),
        ("rules[].shadow", "false".to_owned()),
    ];
    let mut documented = documented_fields(&read("README.md"));
    documented.retain(|(field, _)| defaults.iter().any(|(name, _)| name == field));
    let code = defaults.iter().map(|(field, default)| ((*field).to_owned(), default.clone())).collect::<Vec<_>>();
    assert_eq!(documented, code);
}

#[test]
fn the_configurations_in_the_documents_are_right() {
    let readme = read("README.md");
    let mut seen = 0;
    for block in readme.split("```json").skip(1) {
        let json = block.split("```").next().unwrap();
        if let Err(errors) = meshquota::config::Config::from_json(json.as_bytes()) {
            panic!("README.md: {errors}\n{json}");
        }
        seen += 1;
    }
    assert!(seen > 0);
    let envoy = read("envoy/envoy.yaml");
    let json = envoy.split("value: |").nth(1).unwrap().split("- name:").next().unwrap();
    if let Err(errors) = meshquota::config::Config::from_json(json.as_bytes()) {
        panic!("envoy/envoy.yaml: {errors}\n{json}");
    }
}

#[test]
fn the_version_of_the_changelog_is_that_of_the_crate() {
    let version = concat!("## ", env!("CARGO_PKG_VERSION"));
    assert!(read("CHANGELOG.md").contains(version), "CHANGELOG.md has no {version}");
}

//! Rules of the house that the compiler does not know.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "support/project.rs"]
mod project;

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use project::read;

/// The files below a folder of the project that have this ending, by their paths inside the project.
fn files(folder: &str, ending: &str) -> Vec<String> {
    let mut found = project::files(folder);
    found.retain(|file| file.ends_with(ending));
    assert!(!found.is_empty(), "no {ending} below {folder}");
    found
}

#[test]
fn only_the_shell_knows_the_proxy() {
    let mut seen = 0;
    for path in files("src", ".rs") {
        let shell = path == "src/filter.rs" || path.starts_with("src/filter/");
        for (number, line) in read(&path).lines().enumerate() {
            if ["wasm_import_module", "no_mangle", "unsafe", "crate::filter"].iter().any(|word| line.contains(word)) {
                assert!(shell, "{path}:{}: the proxy's business outside src/filter: {line}", number + 1);
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

#[test]
fn the_tests_that_the_documents_name_exist() {
    for document in files("docs", ".md").into_iter().chain(["SECURITY.md".to_owned()]) {
        let text = read(&document);
        // Written as `file::function`.
        let words = text.split('`').skip(1).step_by(2).filter_map(|word| word.split_once("::"));
        let named = words.filter(|(path, _)| path.ends_with(".rs")).collect::<Vec<_>>();
        assert!(!named.is_empty() || document != "SECURITY.md", "{document} names no test");
        for (path, name) in named {
            let file = read(path);
            let lines = file.lines().map(str::trim).collect::<Vec<_>>();
            let is_test = |pair: &[&str]| pair[0] == "#[test]" && pair[1].starts_with(&format!("fn {name}("));
            assert!(lines.windows(2).any(is_test), "{document} names {path}::{name}, which is no test");
        }
    }
}

#[test]
fn the_architecture_names_every_module() {
    let text = read("ARCHITECTURE.md");
    for path in files("src", ".rs") {
        let tests_of_a_module = path.ends_with("/tests.rs") || path.contains("/tests/");
        assert!(tests_of_a_module || text.contains(&format!("`{path}`")), "ARCHITECTURE.md does not name {path}");
    }
}

#[test]
fn the_version_of_the_changelog_is_that_of_the_crate() {
    let version = concat!("## ", env!("CARGO_PKG_VERSION"));
    assert!(read("CHANGELOG.md").contains(version), "CHANGELOG.md has no {version}");
}

/// Listeners and clusters of a file under `envoy/`, by their names, and the rest of it.
fn parts(path: &str) -> (BTreeMap<String, Value>, Value) {
    let mut document: Value = serde_yaml_ng::from_str(&read(path)).unwrap();
    let resources = document["static_resources"].take();
    let lists = [&resources["listeners"], &resources["clusters"]].map(|list| list.as_array().unwrap().clone());
    let kinds = ["listener", "cluster"].into_iter().zip(lists);
    let named = |kind: &str, part: Value| (format!("{kind} {}", part["name"].as_str().unwrap()), part);
    let parts = kinds.flat_map(|(kind, list)| list.into_iter().map(|part| named(kind, part)).collect::<Vec<_>>());
    (parts.collect(), document)
}

#[test]
fn the_shipped_configurations_differ_in_how_they_reach_redis_and_in_nothing_else() {
    let (mut direct, direct_rest) = parts("envoy/envoy.yaml");
    for path in ["envoy/redis-proxy.yaml", "envoy/redis-cluster.yaml"] {
        let (mut proxied, rest) = parts(path);
        assert_eq!(rest, direct_rest, "{path}");
        for own in ["listener meshquota_redis_proxy", "cluster meshquota_redis_proxy"] {
            proxied.remove(own).unwrap_or_else(|| panic!("{path} has no {own}"));
        }
        let tunnel = "listener meshquota_tunnel";
        let route = "/filter_chains/0/filters/0/typed_config/route_config/virtual_hosts/0/routes/0/route/cluster";
        let leads_to = proxied.get_mut(tunnel).unwrap().pointer_mut(route).unwrap();
        assert_eq!(leads_to.take(), "meshquota_redis_proxy", "{path}");
        direct.get_mut(tunnel).unwrap().pointer_mut(route).unwrap().take();
        assert!(proxied.remove("cluster meshquota_redis").is_some());
        let mut others = direct.clone();
        others.remove("cluster meshquota_redis");
        assert_eq!(proxied, others, "{path}");
    }
    let (mut direct, _) = parts("envoy/envoy.yaml");
    let (mut replicas, rest) = parts("envoy/redis-replicas.yaml");
    for parts in [&mut direct, &mut replicas] {
        assert!(parts.remove("cluster meshquota_redis").is_some());
    }
    assert_eq!((replicas, rest), (direct, direct_rest));
}

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
        for word in ["Instant::now", "SystemTime::now", "std::net", "std::fs", "std::thread", "std::env::"] {
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

#[test]
fn the_version_of_the_changelog_is_that_of_the_crate() {
    let version = concat!("## ", env!("CARGO_PKG_VERSION"));
    assert!(read("CHANGELOG.md").contains(version), "CHANGELOG.md has no {version}");
}

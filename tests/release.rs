//! What a release hands out, as `tools/dist.py` gathers it, and the workflows that make one.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use support::docker::run;
use support::module::module;
use support::program::program;
use support::project::{below, machine, project, read};
use tempfile::tempdir;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Gathers a release with this command line into the folder.
fn dist(cli: &Path, to: &Path) -> Output {
    gather(cli, to).output().expect("python3 runs")
}

/// The command that does.
fn gather(cli: &Path, to: &Path) -> Command {
    let mut command = Command::new("python3");
    command
        .arg(project().join("tools/dist.py"))
        .arg("--module")
        .arg(module())
        .arg("--cli")
        .arg(cli)
        .arg("--to")
        .arg(to);
    command
}

/// A folder with a release.
fn gathered() -> tempfile::TempDir {
    let folder = tempdir().unwrap();
    let output = dist(program(), folder.path());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    folder
}

/// The files below a folder, by their paths inside it.
fn files(folder: &Path) -> BTreeSet<String> {
    below(folder).into_iter().collect()
}

/// What the file SHA256SUMS of a folder names, all of which has these hashes.
fn verified(folder: &Path) -> BTreeSet<String> {
    let said = run(Command::new("sha256sum").args(["--check", "--strict", "SHA256SUMS"]).current_dir(folder)).unwrap();
    said.lines().map(|line| line.strip_suffix(": OK").unwrap().to_owned()).collect()
}

/// The archive of a release, unpacked into another folder; its own folder.
fn unpacked(release: &Path, to: &Path) -> PathBuf {
    let archive = files(release).into_iter().find(|name| name.ends_with(".tar.gz")).expect("an archive");
    run(Command::new("tar").arg("-xzf").arg(release.join(archive)).arg("-C").arg(to)).unwrap();
    to.join(format!("meshquota-{VERSION}"))
}

#[test]
fn a_release_has_everything_and_each_file_is_what_the_sums_say() {
    let (release, to) = (gathered(), tempdir().unwrap());
    let mut named = verified(release.path());
    assert_eq!(named.len(), 3, "{named:?}");
    assert!(named.insert("SHA256SUMS".to_owned()));
    assert_eq!(named, files(release.path()));

    let folder = unpacked(release.path(), to.path());
    let mut named = verified(&folder);
    assert!(named.insert("SHA256SUMS".to_owned()));
    assert_eq!(named, files(&folder));
    let sources = ["envoy", "docs"].map(|part| (part, files(&project().join(part))));
    let sources =
        sources.into_iter().flat_map(|(part, files)| files.into_iter().map(move |file| format!("{part}/{file}")));
    for file in sources.chain(["LICENSE", "CHANGELOG.md", "README.md", "lua/tunnel.lua"].map(str::to_owned)) {
        assert!(named.contains(&file), "{file}");
        if file != "envoy/docker/.env" {
            assert_eq!(fs::read(folder.join(&file)).unwrap(), fs::read(project().join(&file)).unwrap(), "{file}");
        }
    }
    let same =
        |name: &str, other: &Path| assert_eq!(fs::read(folder.join(name)).unwrap(), fs::read(other).unwrap(), "{name}");
    same("meshquota.wasm", module());
    same("bin/meshquota", program());
    same("meshquota.wasm", &release.path().join(format!("meshquota-{VERSION}.wasm")));
    same("meshquota-image.tar", &release.path().join(format!("meshquota-{VERSION}-image.tar")));
    for file in named {
        let bytes = fs::read(folder.join(&file)).unwrap();
        let text = String::from_utf8_lossy(&bytes);
        for folder in machine() {
            assert!(!text.contains(&format!("{folder}/")), "{file} names {folder}");
        }
    }
    for file in ["completions/meshquota.bash", "completions/_meshquota", "man/meshquota.1", "man/meshquota-simulate.1"]
    {
        assert!(folder.join(file).is_file(), "{file}");
    }
    // It is the command line, and runs from there.
    let said = run(Command::new("bin/meshquota").args(["check", "envoy/envoy.yaml"]).current_dir(&folder)).unwrap();
    assert!(said.contains(": fine, "), "{said}");
}

#[test]
fn the_compose_file_of_a_release_finds_the_filter_of_the_release() {
    let (release, to) = (gathered(), tempdir().unwrap());
    let folder = unpacked(release.path(), to.path()).join("envoy/docker");
    let settings = fs::read_to_string(folder.join(".env")).unwrap();
    let filter = settings.lines().find_map(|line| line.strip_prefix("MODULE=")).expect("it is set");
    let compose: Value = serde_yaml_ng::from_str(&fs::read_to_string(folder.join("compose.yaml")).unwrap()).unwrap();
    let mut mounted = 0;
    for (name, service) in compose["services"].as_object().unwrap() {
        for volume in service["volumes"].as_array().into_iter().flatten() {
            let volume = volume.as_str().unwrap();
            let from = match volume.split_once('}') {
                Some((variable, _)) => {
                    assert!(variable.starts_with("${MODULE:-"), "{volume}");
                    filter
                }
                None => volume.split(':').next().unwrap(),
            };
            assert!(folder.join(from).is_file(), "{name} mounts {from}, which is not there");
            mounted += 1;
        }
    }
    assert!(mounted > 5);
    assert_eq!(fs::read(folder.join(filter)).unwrap(), fs::read(module()).unwrap());
}

#[test]
fn the_same_files_make_the_same_release() {
    let (first, second) = (gathered(), gathered());
    run(Command::new("diff").arg("-r").args([first.path(), second.path()])).unwrap();
}

#[test]
fn what_must_not_be_handed_out_stops_a_release() {
    let folder = tempdir().unwrap();
    let leaking = folder.path().join("leaking");
    fs::write(&leaking, format!("#!/bin/sh\n# {}/x.rs\n", project().display())).unwrap();
    run(Command::new("chmod").arg("+x").arg(&leaking)).unwrap();
    let cases = [(leaking.as_path(), "a folder of this machine"), (&folder.path().join("none"), "run make cli")];
    for (cli, expected) in cases {
        let output = dist(cli, &folder.path().join("to"));
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), said.contains(expected)), (Some(1), true), "{said}");
        assert!(!folder.path().join("to").exists());
    }
}

#[test]
fn a_folder_that_is_a_part_of_other_names_stops_no_release() {
    for home in ["/src", "/library", "/checkout", "/docs"] {
        let folder = tempdir().unwrap();
        let output = gather(program(), folder.path()).env("HOME", home).output().unwrap();
        assert!(output.status.success(), "{home}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// The steps of a workflow that run something: what they run.
fn commands(workflow: &Value) -> Vec<&str> {
    let jobs = workflow["jobs"].as_object().unwrap().values();
    let steps = jobs.filter_map(|job| job["steps"].as_array()).flatten();
    steps.filter_map(|step| step["run"].as_str()).collect()
}

#[test]
fn what_the_workflows_make_is_in_the_makefile() {
    let makefile = read("Makefile");
    let targets =
        makefile.lines().filter_map(|line| line.split_once(':')).map(|(name, _)| name).collect::<BTreeSet<_>>();
    let mut made = BTreeSet::new();
    for name in ["ci", "release"] {
        let path = format!(".github/workflows/{name}.yaml");
        let workflow: Value = serde_yaml_ng::from_str(&read(&path)).unwrap();
        assert_eq!(workflow["permissions"], serde_json::json!({"contents": "read"}), "{path}: no more than it needs");
        for job in workflow["jobs"].as_object().unwrap().values() {
            let uses = job["steps"].as_array().into_iter().flatten().filter_map(|step| step["uses"].as_str());
            for action in uses {
                let (_, version) =
                    action.split_once('@').unwrap_or_else(|| panic!("{path}: {action} without a version"));
                let major = version.strip_prefix('v').and_then(|major| major.parse::<u32>().ok());
                assert!(major.is_some(), "{path}: {action}");
            }
            if let Some(other) = job["uses"].as_str() {
                assert!(project().join(other).is_file(), "{path}: {other}");
            }
        }
        for command in commands(&workflow) {
            let words = command.split(|letter: char| letter.is_whitespace() || "()\"".contains(letter));
            let mut words = words.filter(|word| !word.is_empty() && !word.starts_with("--"));
            while words.by_ref().any(|word| word.ends_with("make")) {
                let target = words.next().unwrap().to_owned();
                assert!(targets.contains(target.as_str()), "{path}: make {target}");
                made.insert(target);
            }
        }
    }
    assert_eq!(made, BTreeSet::from(["demo", "dist", "image", "lint", "test", "version"].map(str::to_owned)));
    let version = run(Command::new("make").args(["--silent", "version"]).current_dir(project())).unwrap();
    assert_eq!(version.trim(), VERSION);
}

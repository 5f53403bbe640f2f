//! The commands in the documents can be given as they stand: targets of `make` exist, the command line takes its arguments,
//! and what needs no more than a Redis or a proxy is run against one.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, clippy::string_slice)]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use support::app::App;
use support::envoy::Setup;
use support::markdown::{blocks, documents, spans};
use support::program::program;
use support::project::{files, project, read};
use support::server::{Kind, Server, free_port};

/// What the lines begin with that are commands of a shell.
const WORDS: [&str; 14] = [
    "make",
    "meshquota",
    "redis-cli",
    "redis-server",
    "python3",
    "kubectl",
    "istioctl",
    "docker",
    "curl",
    "helm",
    "awk",
    "seq",
    "for",
    "sha=$(redis-cli",
];

/// The commands in the blocks of all documents, each with its document. One may go on over lines, after a backslash or in
/// quotes.
fn commands() -> Vec<(String, String)> {
    let mut found = Vec::new();
    for document in documents() {
        let shells =
            blocks(&read(&document)).into_iter().filter(|block| ["", "sh", "bash"].contains(&&*block.language));
        for block in shells {
            let whole = block.text.replace("\\\n", " ");
            let mut lines = whole.lines();
            while let Some(line) = lines.next() {
                let mut command = line.trim().to_owned();
                if !WORDS.contains(&command.split(' ').next().unwrap()) {
                    continue;
                }
                while open_quote(&command) {
                    let Some(line) = lines.next() else { break };
                    command.push('\n');
                    command.push_str(line);
                }
                found.push((document.clone(), command));
            }
        }
    }
    assert!(found.len() > 40, "{found:?}");
    found
}

/// Whether a quote has begun that has not ended.
fn open_quote(command: &str) -> bool {
    let mut quote = None;
    for letter in command.chars() {
        match (quote, letter) {
            (None, '#') => return false,
            (None, '\'' | '"') => quote = Some(letter),
            (Some(open), _) if letter == open => quote = None,
            _ => {}
        }
    }
    quote.is_some()
}

/// The same, and what stands in backticks and begins with this word.
fn beginning(word: &str) -> Vec<(String, String)> {
    let mut found = commands();
    for document in documents() {
        found.extend(spans(&read(&document)).into_iter().map(|span| (document.clone(), span)));
    }
    let start = format!("{word} ");
    found.retain(|(_, command)| command.starts_with(&start));
    assert!(!found.is_empty(), "no document has a command {word}");
    found
}

/// The words of a command as a shell would part them, up to what is no more of it.
fn words(command: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for letter in command.chars() {
        match (quote, letter) {
            (None, '#') if word.is_none() => break,
            (None, '|' | '>' | '<' | ';' | '&') => break,
            (None, '\'' | '"') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (Some(open), _) if letter == open => quote = None,
            (None, ' ') => words.extend(word.take()),
            _ => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    words
}

#[test]
fn every_command_is_one_that_a_shell_can_read() {
    for (document, command) in commands() {
        let status = Command::new("sh").args(["-n", "-c", &command]).stderr(Stdio::null()).status().unwrap();
        assert!(status.success(), "{document}: {command}");
    }
}

#[test]
fn every_target_of_make_exists() {
    let makefile = read("Makefile");
    let targets = makefile.lines().filter_map(|line| line.split_once(':')).map(|(target, _)| target);
    let targets = targets.filter(|target| target.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-'));
    let targets = targets.collect::<BTreeSet<_>>();
    assert!(targets.contains("build"), "{targets:?}");
    for (document, command) in beginning("make") {
        for word in words(&command).iter().skip(1).filter(|word| !word.contains('=')) {
            assert!(targets.contains(word.as_str()), "{document}: {command}: there is no target {word}");
        }
    }
}

/// What make says in the project's folder.
fn make(arguments: &[&str], variables: &[(&str, &Path)]) -> (bool, String) {
    let mut command = Command::new("make");
    // Where the tests run below another make, its settings would go on to this one.
    command.env_remove("MAKEFLAGS").env_remove("MAKEOVERRIDES").env_remove("MAKELEVEL");
    let output = command.args(arguments).envs(variables.iter().copied()).current_dir(project()).output().unwrap();
    let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
    (output.status.success(), said)
}

#[test]
fn what_make_builds_is_where_the_documents_say_wherever_the_user_has_cargo_put_things() {
    let elsewhere = tempfile::tempdir().unwrap();
    // A target in the user's settings would put another folder between.
    let told = ["--silent", "--eval", "told: ; @echo \"$$CARGO_TARGET_DIR$$CARGO_BUILD_TARGET\"", "told"];
    let (_, said) = make(&told, &[("CARGO_TARGET_DIR", elsewhere.path()), ("CARGO_BUILD_TARGET", Path::new("/other"))]);
    assert_eq!(Path::new(said.trim()), project().join("target"));
}

/// The programs of the system that `make test` asks for.
fn needed() -> Vec<String> {
    let (_, said) = make(&["--silent", "--eval", "told: ; @echo $(NEEDED)", "told"], &[]);
    said.split_whitespace().map(|one| one.split_once('=').expect("PROGRAM=PACKAGE").0.to_owned()).collect()
}

#[test]
fn a_program_that_the_tests_need_and_is_missing_is_told_before_anything_else_is_done() {
    let needed = needed();
    for missing in [&["openssl"][..], &["redis-server", "redis-cli"], &[]] {
        let folder = tempfile::tempdir().unwrap();
        for program in needed.iter().filter(|program| !missing.contains(&program.as_str())) {
            symlink("/bin/sh", folder.path().join(program)).unwrap();
        }
        let (fine, said) = make(&["--silent", "needed", &format!("PATH={}", folder.path().display())], &[]);
        assert_eq!(fine, missing.is_empty(), "{said}");
        if let Some(said) = said.lines().next() {
            let (programs, remedy) = said.strip_prefix("missing: ").unwrap().split_once("; ").unwrap();
            assert_eq!(programs.split(' ').collect::<Vec<_>>(), missing);
            assert!(remedy.contains("apt-get install "), "{said}");
        }
    }
    for target in ["test", "chaos"] {
        let (_, said) = make(&["--dry-run", target], &[]);
        assert!(said.lines().next().unwrap().contains("for one in redis-server="), "{target}: {said}");
    }
}

#[test]
fn what_the_tests_run_is_asked_for_before_or_can_be_missing() {
    // Where one of these is missing, tests say that they are skipped, or do without.
    let optional = ["curl", "docker", "git", "ldd", "prometheus", "promtool"];
    // Without these there is no make; the last is what is tested.
    let there = ["sh", "make", "chmod", "bin/meshquota"];
    let needed = needed();
    let mut seen = 0;
    for file in files("tests").into_iter().filter(|file| file.ends_with(".rs")) {
        for rest in read(&file).split("Command::new(\"").skip(1) {
            let program = rest.split('"').next().unwrap();
            let known = needed.iter().map(String::as_str).chain(optional).chain(there).any(|one| one == program);
            assert!(known, "{file} runs {program}, which make test does not ask for");
            seen += 1;
        }
    }
    assert!(seen > 10, "{seen}");
}

#[test]
fn the_command_line_takes_what_the_documents_say() {
    for (document, command) in beginning("meshquota") {
        // Help comes in place of the work, once the words before it have been understood.
        let mut words = words(&command.replace(" COMMAND", " check"));
        if words[1] != "help" {
            words.push("--help".to_owned());
        }
        let output = Command::new(program()).args(&words[1..]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{document}: {command}\n{said}");
    }
    for wrong in ["meshquota explain FILE --pfad /", "meshquota explode FILE"] {
        let output = Command::new(program()).args(&words(wrong)[1..]).arg("--help").output().unwrap();
        assert!(!output.status.success(), "{wrong}");
    }
}

/// Whether a command ends by itself, and needs no more than the files of the project and a Redis.
fn can_run(command: &str) -> bool {
    let words = words(command);
    let placeholder = |word: &String| ["FILE", "URL", "RULE", "IDENTITY"].iter().any(|one| word.starts_with(one));
    match words[0].as_str() {
        "redis-cli" => words[1] != "-p",
        "meshquota" => {
            ["check", "explain", "inspect", "reset", "schema"].contains(&words[1].as_str())
                && !words.iter().any(placeholder)
        }
        "python3" => words[1].starts_with("envoy/"),
        _ => false,
    }
}

/// A folder that is like the project's, with programs that reach this server where nothing else is said.
fn prepare(folder: &Path, server: &Server) {
    for name in ["envoy", "lua", "docs"] {
        symlink(project().join(name), folder.join(name)).unwrap();
    }
    // The user's own file, as the pages call it.
    symlink(project().join("envoy/envoy.yaml"), folder.join("envoy.yaml")).unwrap();
    let path = std::env::var("PATH").unwrap();
    let real = path.split(':').map(|folder| Path::new(folder).join("redis-cli")).find(|path| path.is_file());
    let real = real.expect("redis-cli is where redis-server is");
    fs::create_dir(folder.join("bin")).unwrap();
    let script = folder.join("bin/redis-cli");
    fs::write(&script, format!("#!/bin/sh\nexec {} -p {} \"$@\"\n", real.display(), server.port())).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    symlink(program(), folder.join("bin/meshquota")).unwrap();
}

#[test]
fn what_needs_no_more_than_a_redis_is_run() {
    let server = Server::start(Kind::Redis, &[]);
    let folder = tempfile::tempdir().unwrap();
    prepare(folder.path(), &server);
    let path = format!("{}:{}", folder.path().join("bin").display(), std::env::var("PATH").unwrap());
    let place = format!("127.0.0.1:{}", server.port());
    let mut seen = BTreeSet::new();
    for (document, command) in commands().into_iter().filter(|(_, command)| can_run(command)) {
        // A caller who has taken something, so that there is something to see, and a key that is no bucket.
        let mut connection = server.client();
        let (seconds, _): (u64, u64) = redis::cmd("TIME").query(&mut connection).unwrap();
        for key in ["quota:{per-ip:192.0.2.17}:0", "quota:{per-ip:192.0.2.17}:1", "quota:192.0.2.17"] {
            let now = (seconds * 1000).to_string();
            redis::cmd("HSET").arg(key).arg(&["tokens", "5.5", "ts", &now]).exec(&mut connection).unwrap();
            redis::cmd("PEXPIRE").arg(key).arg(60_000).exec(&mut connection).unwrap();
        }
        redis::cmd("SET").arg("quota:stray").arg("x").exec(&mut connection).unwrap();
        let line = command.replace("HOST:6379", &place).replace("127.0.0.1:6379", &place);
        let output = Command::new("sh")
            .args(["-c", &line])
            .current_dir(folder.path())
            .env("PATH", &path)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .output()
            .unwrap();
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (out, err) = (said(&output.stdout), said(&output.stderr));
        assert!(output.status.success() && err.is_empty(), "{document}: {command}\n{out}{err}");
        assert!(!out.trim().is_empty() && !out.contains("ERR"), "{document}: {command}\n{out}");
        if command.contains("while read") {
            assert_eq!(out.trim(), "quota:stray", "{document}: {command}");
        }
        seen.insert(words(&command)[0].clone());
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), ["meshquota", "python3", "redis-cli"]);
}

#[test]
fn what_asks_the_proxy_is_run_against_one() {
    if Command::new("curl").arg("--version").output().is_err() {
        eprintln!("skipped: there is no curl");
        return;
    }
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app).start();
    let places =
        [("localhost:10000", envoy.ingress().to_string()), ("localhost:9902", envoy.listener("metrics").to_string())];
    let mut seen = 0;
    for (document, command) in commands() {
        let line = places.iter().fold(command.clone(), |line, (written, here)| line.replace(written, here));
        if line == command || !line.contains("curl ") {
            continue;
        }
        let output = Command::new("sh").args(["-c", &line]).output().unwrap();
        let out = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && !out.is_empty(), "{document}: {command}\n{out}");
        if command.contains("-si") {
            assert!(out.contains("x-ratelimit-remaining: "), "{document}: {command}\n{out}");
        }
        seen += 1;
    }
    assert!(seen >= 2, "{seen}");
    envoy.finish();
}

#[test]
fn the_memory_of_a_bucket_can_be_measured_as_the_page_says() {
    let page = read("SECURITY.md");
    let block = blocks(&page).into_iter().find(|block| block.text.contains("redis-server --port 7777")).unwrap();
    // A server of its own, which may take longer to start on a busy machine, and fewer buckets.
    let port = free_port().to_string();
    let started = "for try in $(seq 200); do redis-cli -p 7777 PING > /dev/null 2>&1 && break; sleep 0.1; done";
    assert!(block.text.contains("& sleep 1\n"));
    let script = block.text.replace("sleep 1\n", &format!("{started}\n"));
    let script = script.replace("7777", &port).replace("1000000", "10000");
    let output = Command::new("sh").args(["-e", "-c", &script]).current_dir(project()).output().unwrap();
    let _ = Command::new("redis-cli").args(["-p", &port, "SHUTDOWN", "NOSAVE"]).output();
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let used = out.lines().filter_map(|line| line.strip_prefix("used_memory:")?.trim().parse::<u64>().ok());
    let used = used.collect::<Vec<_>>();
    assert!(used.len() == 2 && out.contains("errors: 0, replies: 10000"), "{script}\n{out}");
    let bytes = (used[1] - used[0]) / 10_000;
    assert!((100..300).contains(&bytes), "{bytes} bytes a bucket");
}

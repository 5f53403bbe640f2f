//! The simulation notices when the code is wrong: the conversation with Redis, the memory of denials, or what goes together is
//! broken on purpose, in a copy of the project, and worlds are run until one of them says so. What it finds of a broken script is in `simulation.rs`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "support/project.rs"]
mod project;

use std::fs;
use std::path::Path;
use std::process::Command;

use project::copy;

/// Changes of a file, each of a place that is there once.
type Patch = &'static [(&'static str, &'static str)];

/// What is broken, and how.
const MUTANTS: [(&str, &str, Patch, &str); 5] = [
    (
        "a call that timed out is sent again",
        "src/exchange.rs",
        &[
            (
                "        for owed in &mut self.owed {",
                "        let mut again = 0;\n        for owed in &mut self.owed {",
            ),
            (
                "                let answer = Err(Failure::Timeout);\n",
                "                let answer = Err(Failure::Timeout);\n                \
                 waiting.call.evalsha(&mut self.outbox);\n                again += 1;\n",
            ),
            (
                "    /// The worker has a turn, and has seen to its sockets.\n    fn turn(&mut self, now: Instant) {\n",
                "    fn turn(&mut self, now: Instant) {\n",
            ),
            (
                "            }\n        }\n    }\n\n    fn turn(",
                "            }\n        }\n        for _ in 0..again {\n            \
                 self.owed.push_back(Owed::Nobody { made: now });\n        }\n    }\n\n    fn turn(",
            ),
        ],
        "was charged",
    ),
    (
        "replies belong to the call after",
        "src/exchange.rs",
        &[(
            "match (self.owed.pop_front(), sorted) {",
            "let next = if self.owed.len() > 1 { self.owed.remove(1) } else { self.owed.pop_front() };\n        \
             match (next, sorted) {",
        )],
        "was told",
    ),
    (
        "a late reply is taken for the next",
        "src/exchange.rs",
        &[
            (
                "    /// The worker has a turn, and has seen to its sockets.\n    fn turn(&mut self, now: Instant) {\n",
                "    fn turn(&mut self, now: Instant) {\n",
            ),
            (
                "            }\n        }\n    }\n\n    fn turn(",
                "            }\n        }\n        self.owed.retain(|owed| !matches!(owed, Owed::Nobody { .. }));\n    \
                 }\n\n    fn turn(",
            ),
        ],
        "was told",
    ),
    (
        "a denial is believed for longer than it holds",
        "src/deny_cache.rs",
        &[("checked_add(believed)?", "checked_add(believed * 2)?")],
        "was told",
    ),
    (
        "what is granted to many is charged once",
        "src/limiter.rs",
        &[("u32::try_from(group.size()).ok().and_then(NonZeroU32::new).unwrap_or(ONE)", "{ let _ = group; ONE }")],
        "was told",
    ),
];

/// The project's manifest, with what the simulation needs and no more.
fn manifest() -> String {
    let manifest = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).unwrap();
    let (before, rest) = manifest.split_once("[dev-dependencies]\n").unwrap();
    let (dependencies, after) = rest.split_once("\n\n").unwrap();
    let needed = dependencies
        .lines()
        .filter(|line| ["fastrand ", "mlua "].iter().any(|name| line.starts_with(name)))
        .collect::<Vec<_>>()
        .join("\n");
    assert!(!needed.is_empty());
    // The command line is a package of its own, which the copy does without.
    let members = "members = [\"cli\"]\n";
    assert!(before.contains(members));
    let before = before.replace(members, "");
    format!("{before}[dev-dependencies]\n{needed}\n\n{after}")
}

/// What the simulation of a copy of the project says, and whether it is content.
fn simulate(copy: &Path) -> (bool, String) {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["test", "--offline", "--test", "simulation", "nothing_that_happens"])
        .current_dir(copy)
        // Not the project's own, whose files of the same names would be overwritten.
        .env("CARGO_TARGET_DIR", Path::new(env!("CARGO_TARGET_TMPDIR")).join("mutants"))
        .env("SIMULATION_SEEDS", "3000")
        .env_remove("SIMULATION_SEED")
        .output()
        .expect("cargo runs");
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn each_way_of_getting_the_conversation_wrong_is_found() {
    let project = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::create_dir_all(folder.path().join("tests")).unwrap();
    for part in ["src", "lua", "Cargo.lock", "tests/simulation.rs", "tests/simulation"] {
        copy(&project.join(part), &folder.path().join(part));
    }
    fs::write(folder.path().join("Cargo.toml"), manifest()).unwrap();
    for (what, file, patch, says) in MUTANTS {
        let file = folder.path().join(file);
        let source = fs::read_to_string(&file).unwrap();
        let broken = patch.iter().fold(source.clone(), |text, (from, to)| {
            assert_eq!(text.matches(from).count(), 1, "{what}: {from:?} is not there once any more");
            text.replace(from, to)
        });
        fs::write(&file, broken).unwrap();
        let (content, said) = simulate(folder.path());
        fs::write(&file, &source).unwrap();
        assert!(!said.contains("could not compile"), "{what}: {said}");
        assert!(!content, "{what}: no world is wrong");
        assert!(said.contains("SIMULATION_SEED=") && said.contains(says), "{what}: {said}");
    }
    let (content, said) = simulate(folder.path());
    assert!(content, "the code as it is: {said}");
}

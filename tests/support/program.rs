//! The command line `meshquota`, built from this source and never an older one.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use serde_json::Value;
use tempfile::NamedTempFile;

use super::module::build;
use super::project::project;

/// The path of the program, which the first call in a process builds.
///
/// # Panics
/// Where the build fails.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    // A folder of its own, since the tests around it are built with other flags.
    let folder = concat!(env!("CARGO_TARGET_TMPDIR"), "/program");
    let small =
        [("CARGO_TARGET_DIR", folder), ("CARGO_PROFILE_DEV_DEBUG", "0"), ("CARGO_PROFILE_DEV_STRIP", "symbols")];
    PROGRAM.get_or_init(|| build(&["--package", "meshquota-cli"], &small, "meshquota"))
}

/// What the program said, on both channels, and its exit code.
pub struct Said {
    pub out: String,
    pub err: String,
    pub code: i32,
}

impl Said {
    /// The answer of a command that was told to give it in JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}", self.out))
    }
}

/// Runs the program in the project's folder.
pub fn run(arguments: &[&str]) -> Said {
    run_with(arguments, &[], "")
}

/// The same, with environment variables and something on standard input.
pub fn run_with(arguments: &[&str], variables: &[(&str, &str)], input: impl AsRef<[u8]>) -> Said {
    let mut child = Command::new(program())
        .args(arguments)
        .envs(variables.iter().copied())
        .current_dir(project())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // One that refuses its arguments does not read.
    match child.stdin.take().unwrap().write_all(input.as_ref()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => panic!("{error}"),
        _ => {}
    }
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Said { out: text(output.stdout), err: text(output.stderr), code: output.status.code().unwrap() }
}

/// A file with this text in it, for as long as the value lives.
pub fn file(text: impl AsRef<[u8]>) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    file
}

/// The path of such a file, as an argument.
pub fn path(file: &(impl AsRef<Path> + ?Sized)) -> &str {
    file.as_ref().to_str().unwrap()
}

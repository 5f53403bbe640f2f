//! The module under test: `meshquota.wasm`, built from this source and never an older one.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The path of the module, which the first call in a process builds. Where nothing has changed that takes no time.
///
/// # Panics
/// Where the build fails.
pub fn module() -> &'static Path {
    static MODULE: OnceLock<PathBuf> = OnceLock::new();
    MODULE.get_or_init(|| build(&["--release", "--lib", "--target", "wasm32-wasip1"], &[], "meshquota.wasm"))
}

/// Builds something as the Makefile does, so that neither has to build anew what the other has built, and returns the path of
/// the file of that name.
///
/// # Panics
/// Where the build fails.
pub fn build(arguments: &[&str], variables: &[(&str, &str)], name: &str) -> PathBuf {
    let output = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tools/build.sh"))
        .arg("--message-format=json-render-diagnostics")
        .args(arguments)
        .envs(variables.iter().copied())
        .output()
        .expect("tools/build.sh runs");
    assert!(output.status.success(), "{name} does not build:\n{}", String::from_utf8_lossy(&output.stderr));
    // Cargo says where it put what it built, which a variable or a setting may have changed.
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|message| message.get("filenames")?.as_array().cloned())
        .flatten()
        .filter_map(|file| file.as_str().map(PathBuf::from))
        .find(|path| path.file_name().is_some_and(|file| file == name))
        .expect("cargo names what it has built")
}

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
    MODULE.get_or_init(|| build(&["--release", "--lib", "--target", "wasm32-wasip1"], "meshquota.wasm"))
}

/// Builds something of this source by cargo, and returns the path of the file that has that name.
///
/// # Panics
/// Where the build fails.
pub fn build(arguments: &[&str], name: &str) -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["build", "--message-format=json-render-diagnostics"])
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
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

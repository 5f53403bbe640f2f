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
    MODULE.get_or_init(build)
}

fn build() -> PathBuf {
    // As `make build` does, so that neither has to build anew what the other has built.
    let output = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tools/build.sh"))
        .args(["--release", "--lib", "--target", "wasm32-wasip1", "--message-format=json-render-diagnostics"])
        .output()
        .expect("tools/build.sh runs");
    assert!(output.status.success(), "the module does not build:\n{}", String::from_utf8_lossy(&output.stderr));
    // Cargo says where it put what it built, which a variable or a setting may have changed.
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|message| message.get("filenames")?.as_array().cloned())
        .flatten()
        .filter_map(|name| name.as_str().map(PathBuf::from))
        .find(|path| path.file_name().is_some_and(|name| name == "meshquota.wasm"))
        .expect("cargo names the module that it has built")
}

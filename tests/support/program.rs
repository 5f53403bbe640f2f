//! The command line `meshquota`, built from this source and never an older one.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::module::build;

/// The path of the program, which the first call in a process builds.
///
/// # Panics
/// Where the build fails.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| build(&["--package", "meshquota-cli"], "meshquota"))
}

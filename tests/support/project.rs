//! The files of the project.

use std::fs;
use std::path::{Path, PathBuf};

/// The folder of the project.
pub fn project() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// What a file says, by its path inside the project.
///
/// # Panics
/// Where it is not there.
pub fn read(path: impl AsRef<Path>) -> String {
    let path = path.as_ref();
    fs::read_to_string(project().join(path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

//! The pinned programs of Kubernetes, which are there for one platform only.

use std::path::PathBuf;

use super::project::project;

/// A program under `.tools`, by its part and its name. On another platform than theirs there is none, which is said in a line.
///
/// # Panics
/// Where it should be there and is not, naming what to do about it.
pub fn pinned(part: &str, name: &str) -> Option<PathBuf> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        eprintln!("not run: there is no {part} for this platform");
        return None;
    }
    let path = project().join(".tools").join(part).join(name);
    assert!(path.is_file(), "no {}: run make tools", path.display());
    Some(path)
}

/// The pinned kubectl, of which only what needs no cluster is used.
///
/// # Panics
/// As [`pinned`].
pub fn kubectl() -> Option<PathBuf> {
    pinned("kubectl-1.37.1", "kubectl")
}

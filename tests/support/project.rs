//! The files of the project, and of other folders.

#![allow(dead_code)]

use std::fs;
use std::path::{Path, PathBuf};

/// The folder of the project.
pub fn project() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The folders that tell whose machine this is: the user's and the project's. A home that is the root is left out, and a project
/// in a folder of a single component, such as `/src`: other names have these as a part, and a search for them tells nothing.
pub fn machine() -> Vec<String> {
    let folders = [(PathBuf::from(std::env::var_os("HOME").expect("there is a HOME")), 1), (project(), 2)];
    let telling = folders.iter().filter(|(folder, short)| folder.components().count() > *short);
    telling.map(|(folder, _)| folder.display().to_string()).collect()
}

/// What a file says, by its path inside the project.
///
/// # Panics
/// Where it is not there.
pub fn read(path: impl AsRef<Path>) -> String {
    let path = path.as_ref();
    fs::read_to_string(project().join(path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Every file below a folder, by its path inside it, sorted.
pub fn below(folder: &Path) -> Vec<String> {
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(inside) = folders.pop() {
        for entry in fs::read_dir(&inside).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                found.push(path.strip_prefix(folder).unwrap().to_string_lossy().into_owned());
            }
        }
    }
    found.sort();
    found
}

/// Every file below a folder of the project, by its path inside the project, sorted.
pub fn files(folder: &str) -> Vec<String> {
    below(&project().join(folder)).into_iter().map(|file| format!("{folder}/{file}")).collect()
}

/// Copies a file, or a folder with all that is in it. The folders that the copy needs are made.
pub fn copy(from: &Path, to: &Path) {
    let copied = |from: &Path, to: &Path| {
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(from, to).unwrap();
    };
    if from.is_dir() {
        below(from).iter().for_each(|file| copied(&from.join(file), &to.join(file)));
    } else {
        copied(from, to);
    }
}

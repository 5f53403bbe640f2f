//! A Docker engine, where there is one, and stand-ins for stock images, which cannot be pulled everywhere: images of the same
//! names, built from scratch out of this machine's programs and the shared libraries that they load.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Marks the images that tests build, which are the only ones that they replace and remove.
const LABEL: &str = "meshquota.stand-in";

/// Runs a command; its output, or what it said where it failed.
pub fn run(command: &mut Command) -> Result<String, String> {
    let Output { status, stdout, stderr } = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let said = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    if status.success() { Ok(said(stdout)) } else { Err(format!("{command:?}: {status}\n{}", said(stderr))) }
}

/// Runs `docker`, likewise.
pub fn docker(arguments: &[&str]) -> Result<String, String> {
    run(Command::new("docker").args(arguments))
}

/// That an engine runs, or why nothing can be tested with one.
pub fn engine() -> Result<(), String> {
    docker(&["info"]).map(drop).map_err(|_| "no Docker engine runs here".to_owned())
}

/// The words that run Compose here: the engine's plug-in or the tool of its own.
pub fn compose() -> Option<Vec<&'static str>> {
    [vec!["docker", "compose"], vec!["docker-compose"]]
        .into_iter()
        .find(|words| run(Command::new(words[0]).args(&words[1..]).arg("version")).is_ok())
}

/// Where this machine has a program, with links followed.
pub fn program(name: &str) -> Option<PathBuf> {
    let found = run(Command::new("sh").args(["-c", &format!("command -v {name}")])).ok()?;
    fs::canonicalize(found.trim()).ok()
}

/// A folder with programs, the libraries that they load, and what every container needs, at their places.
fn root_folder(folder: &Path, programs: &[(&str, PathBuf)]) {
    let put = |from: &Path, to: &str| {
        let to = folder.join(to.trim_start_matches('/'));
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(from, &to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    };
    for (name, program) in programs {
        put(program, &format!("/usr/local/bin/{name}"));
        let libraries = run(Command::new("ldd").arg(program)).unwrap();
        for word in libraries.split_whitespace().filter(|word| word.starts_with('/')) {
            put(Path::new(word), word);
        }
    }
    fs::create_dir_all(folder.join("tmp")).unwrap();
    fs::create_dir_all(folder.join("etc")).unwrap();
    fs::write(folder.join("etc/passwd"), "root:x:0:0:root:/:/none\n").unwrap();
}

/// An image of a stock image's name; removed when dropped.
pub struct StandIn(String);

impl StandIn {
    /// Builds it with these programs, by their names inside; not where an image of that name is there already.
    ///
    /// # Panics
    /// Where it cannot be built.
    pub fn build(image: &str, programs: &[(&str, PathBuf)]) -> Result<Self, String> {
        let labels = docker(&["image", "inspect", "--format", "{{json .Config.Labels}}", image]);
        if labels.is_ok_and(|labels| !labels.contains(LABEL)) {
            return Err(format!("{image} is here already, and is not replaced"));
        }
        let folder = tempfile::tempdir().unwrap();
        root_folder(&folder.path().join("root"), programs);
        let recipe = format!("FROM scratch\nCOPY root /\nENV PATH=/usr/local/bin\nLABEL {LABEL}=1\n");
        fs::write(folder.path().join("Dockerfile"), recipe).unwrap();
        docker(&["build", "--quiet", "--tag", image, folder.path().to_str().unwrap()]).unwrap();
        Ok(Self(image.to_owned()))
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        let _ = docker(&["image", "rm", "--force", &self.0]);
    }
}

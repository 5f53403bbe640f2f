//! The OCI image of the module: what `tools/image.py` writes is the same for everyone, is valid, and is what those who fetch
//! modules and a container engine take. Where no Docker engine runs, what needs one says so in a line and does nothing.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use support::docker::{docker, engine, run};
use support::module::module;
use support::project::{copy, machine, project, read};
use tempfile::tempdir;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Runs the tool on a module; where it writes to is the folder.
fn image(module: &Path, to: &Path, variables: &[(&str, &str)]) -> Output {
    Command::new("python3")
        .arg(project().join("tools/image.py"))
        .arg("--module")
        .arg(module)
        .arg("--to")
        .arg(to)
        .envs(variables.iter().copied())
        .output()
        .expect("python3 runs")
}

/// The folder with the image of the module.
fn built() -> tempfile::TempDir {
    let folder = tempdir().unwrap();
    let output = image(module(), folder.path(), &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    folder
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex(&Sha256::digest(bytes)))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The document that a file is.
fn parsed(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// A blob of a layout, which has the digest and the size that its descriptor says.
fn blob(layout: &Path, descriptor: &Value) -> Vec<u8> {
    let named = descriptor["digest"].as_str().unwrap();
    let bytes = fs::read(layout.join("blobs").join(named.replace(':', "/"))).unwrap();
    assert_eq!((digest(&bytes).as_str(), bytes.len() as u64), (named, descriptor["size"].as_u64().unwrap()));
    bytes
}

/// What a program makes of a file.
fn output_of(program: &str, arguments: &[&str], file: &Path) -> Vec<u8> {
    let output = Command::new(program).args(arguments).arg(file).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

#[test]
fn the_image_of_a_commit_is_the_same_whoever_builds_it_and_when() {
    let (first, second, elsewhere) = (built(), tempdir().unwrap(), tempdir().unwrap());
    // The module as another file, of another age and other rights.
    let copy = elsewhere.path().join("copy.wasm");
    fs::write(&copy, fs::read(module()).unwrap()).unwrap();
    let output = image(&copy, second.path(), &[("TZ", "Asia/Tokyo"), ("LC_ALL", "C"), ("PYTHONHASHSEED", "7")]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for file in ["image/index.json", "meshquota-image.tar"] {
        assert_eq!(fs::read(first.path().join(file)).unwrap(), fs::read(second.path().join(file)).unwrap(), "{file}");
    }
    let said = String::from_utf8(output.stdout).unwrap();
    let index = parsed(&first.path().join("image/index.json"));
    assert!(said.contains(index["manifests"][0]["digest"].as_str().unwrap()), "it tells the digest: {said}");
    // The time is that of the commit, unless something else is asked for.
    let output = image(&copy, second.path(), &[("SOURCE_DATE_EPOCH", "86400")]);
    assert!(output.status.success());
    let layout = second.path().join("image");
    let manifest = blob(&layout, &parsed(&layout.join("index.json"))["manifests"][0]);
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    assert_eq!(manifest["annotations"]["org.opencontainers.image.created"], "1970-01-02T00:00:00Z");
}

#[test]
fn the_layout_is_valid_and_has_what_fetchers_of_modules_ask_for() {
    let folder = built();
    let layout = folder.path().join("image");
    assert_eq!(parsed(&layout.join("oci-layout")), json!({"imageLayoutVersion": "1.0.0"}));
    let index = parsed(&layout.join("index.json"));
    assert_eq!(index["schemaVersion"], 2);
    let [found] = index["manifests"].as_array().unwrap().as_slice() else { panic!("one image: {index}") };
    assert_eq!(found["mediaType"], "application/vnd.oci.image.manifest.v1+json");
    assert_eq!(found["platform"], json!({"architecture": "amd64", "os": "linux"}));
    assert_eq!(found["annotations"]["org.opencontainers.image.ref.name"], VERSION);

    let manifest: Value = serde_json::from_slice(&blob(&layout, found)).unwrap();
    assert_eq!((&manifest["schemaVersion"], &manifest["mediaType"]), (&json!(2), &found["mediaType"]));
    assert_eq!(manifest["config"]["mediaType"], "application/vnd.oci.image.config.v1+json");
    let about = |name: &str| manifest["annotations"][format!("org.opencontainers.image.{name}")].as_str();
    assert_eq!((about("title"), about("version")), (Some("meshquota"), Some(VERSION)));
    assert_eq!(about("description"), Some(env!("CARGO_PKG_DESCRIPTION")));
    assert_eq!(about("licenses"), Some(env!("CARGO_PKG_LICENSE")));
    let commit = run(Command::new("git").args(["rev-parse", "HEAD"]).current_dir(project()));
    let commit = commit.ok().map(|commit| commit.trim().to_owned());
    assert_eq!(about("revision").map(|told| told.trim_end_matches("-modified")), commit.as_deref());

    // As Istio and Envoy Gateway do it: the last layer, of this very kind, has a file of this base name.
    let [layer] = manifest["layers"].as_array().unwrap().as_slice() else { panic!("one layer: {manifest}") };
    assert_eq!(layer["mediaType"], "application/vnd.oci.image.layer.v1.tar+gzip");
    blob(&layout, layer);
    let file = layout.join("blobs").join(layer["digest"].as_str().unwrap().replace(':', "/"));
    assert_eq!(output_of("tar", &["-tzf"], &file), b"plugin.wasm\n");
    assert_eq!(output_of("tar", &["-xzO", "plugin.wasm", "-f"], &file), fs::read(module()).unwrap());

    let config: Value = serde_json::from_slice(&blob(&layout, &manifest["config"])).unwrap();
    assert_eq!((&config["architecture"], &config["os"]), (&json!("amd64"), &json!("linux")));
    let uncompressed = digest(&output_of("gzip", &["-dc", "--"], &named_as_gzip(&file, folder.path())));
    assert_eq!(config["rootfs"], json!({"type": "layers", "diff_ids": [uncompressed]}));
    assert_eq!(config["config"]["Labels"], manifest["annotations"]);

    // Nothing lies about, and the archive is the same files.
    let blobs = fs::read_dir(layout.join("blobs/sha256")).unwrap().map(|entry| entry.unwrap().file_name());
    let named = [&found["digest"], &manifest["config"]["digest"], &layer["digest"]];
    let named = named.map(|named| named.as_str().unwrap().trim_start_matches("sha256:").into());
    assert_eq!(blobs.collect::<BTreeSet<_>>(), BTreeSet::from(named));
    let unpacked = tempdir().unwrap();
    let archive = folder.path().join("meshquota-image.tar");
    output_of("tar", &["-C", unpacked.path().to_str().unwrap(), "-xf"], &archive);
    run(Command::new("diff").arg("-r").args([unpacked.path(), &layout])).unwrap();
}

/// The file under a name that gzip takes.
fn named_as_gzip(file: &Path, folder: &Path) -> std::path::PathBuf {
    let to = folder.join("layer.gz");
    fs::copy(file, &to).unwrap();
    to
}

#[test]
fn what_must_not_be_handed_out_becomes_no_image() {
    let folder = tempdir().unwrap();
    let home = folder.path().join("home");
    let leaking = folder.path().join("leaking.wasm");
    fs::write(&leaking, [b"\0asm".as_slice(), home.to_str().unwrap().as_bytes(), b"/x.rs"].concat()).unwrap();
    let no_module = folder.path().join("none.wasm");
    let cases = [
        (&no_module, "HOME", home.to_str().unwrap(), "is not there: run make build"),
        (&leaking, "HOME", home.to_str().unwrap(), "a folder of this machine"),
        (&leaking, "CARGO_HOME", home.to_str().unwrap(), "a folder of this machine"),
        (&leaking, "SOURCE_DATE_EPOCH", "yesterday", "expected seconds since 1970"),
    ];
    for (module, variable, value, expected) in cases {
        let output = image(module, &folder.path().join("to"), &[(variable, value)]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), said.contains(expected)), (Some(1), true), "{variable}: {said}");
        assert!(!folder.path().join("to/image").exists());
    }
}

#[test]
fn a_folder_of_one_component_is_refused_where_it_is_named_and_not_where_other_names_have_it() {
    let folder = tempdir().unwrap();
    let leaking = folder.path().join("leaking.wasm");
    let fine = fs::read(module()).unwrap();
    for home in ["/src", "/library", "/core"] {
        let name = format!("{home}/");
        assert!(fine.windows(name.len()).any(|bytes| bytes == name.as_bytes()), "{home} is a part of no name");
        let output = image(module(), folder.path(), &[("HOME", home)]);
        assert!(output.status.success(), "{home}: {}", String::from_utf8_lossy(&output.stderr));
        // The texts of a module follow each other, with nothing between them.
        let rustc = format!("/rustc/{}/library/core/src/fmt/mod.rs", "0".repeat(40));
        for before in ["", "it failed.", "crates", "crates/bytes-1.12.2/src/bytes.rs", "src/bucket.rs", &rustc] {
            let leak = format!("{before}{home}/src/bucket.rs");
            fs::write(&leaking, [&fine, leak.as_bytes()].concat()).unwrap();
            let output = image(&leaking, folder.path(), &[("HOME", home)]);
            let said = String::from_utf8(output.stderr).unwrap();
            let told = said.contains(&format!("names {home}/, a folder of this machine"));
            assert_eq!((output.status.code(), told), (Some(1), true), "{leak}: {said}");
        }
    }
}

#[test]
fn the_module_names_no_folder_of_this_machine() {
    let bytes = fs::read(module()).unwrap();
    let text = String::from_utf8_lossy(&bytes);
    for folder in machine().iter().map(String::as_str).chain(["/.cargo", "/registry/src", "/rustlib/src"]) {
        assert!(!text.contains(&format!("{folder}/")), "{folder}");
    }
    assert!(text.contains("src/local.rs") || text.contains("crates/bytes-"), "panics name files, but not these");
}

#[test]
fn the_same_sources_in_another_folder_of_another_user_make_the_same_module() {
    // Kept, so that only the first run builds the dependencies.
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("elsewhere");
    let sources = place.join("some/where/else");
    let _ = fs::remove_dir_all(&sources);
    let parts =
        ["Cargo.toml", "Cargo.lock", "rust-toolchain.toml", "src", "lua", "cli", "bench/core.rs", "tools/build.sh"];
    for part in parts {
        copy(&project().join(part), &sources.join(part));
    }
    // The user's folder has another name, and the same crates in it.
    let home = std::env::var_os("CARGO_HOME")
        .map_or_else(|| Path::new(&std::env::var_os("HOME").unwrap()).join(".cargo"), Into::into);
    let other = place.join("user/cargo");
    fs::create_dir_all(&other).unwrap();
    let _ = fs::remove_file(other.join("registry"));
    std::os::unix::fs::symlink(home.join("registry"), other.join("registry")).unwrap();
    let built = run(Command::new(sources.join("tools/build.sh"))
        .args(["--release", "--lib", "--target", "wasm32-wasip1", "--offline"])
        .current_dir(&sources)
        .env("CARGO_HOME", &other)
        .env("CARGO_TARGET_DIR", place.join("target")));
    built.unwrap();
    let [here, there] =
        [module(), &place.join("target/wasm32-wasip1/release/meshquota.wasm")].map(|path| fs::read(path).unwrap());
    assert_eq!(digest(&there), digest(&here));
}

/// An image in the engine; removed when dropped.
struct Loaded(String);

impl Drop for Loaded {
    fn drop(&mut self) {
        let _ = docker(&["image", "rm", "--force", &self.0]);
    }
}

#[test]
fn a_container_engine_loads_it_and_hands_the_module_out() {
    let name = format!("meshquota:{VERSION}");
    if let Err(why) = engine() {
        eprintln!("skipped: {why}");
        return;
    }
    if docker(&["image", "inspect", &name]).is_ok() {
        eprintln!("skipped: {name} is here already, and is not replaced");
        return;
    }
    let folder = built();
    let said = docker(&["load", "-i", folder.path().join("meshquota-image.tar").to_str().unwrap()]).unwrap();
    let loaded = Loaded(name);
    assert!(said.contains(&loaded.0), "{said}");
    let inspected: Value = serde_json::from_str(&docker(&["image", "inspect", &loaded.0]).unwrap()).unwrap();
    assert_eq!((&inspected[0]["Os"], &inspected[0]["Architecture"]), (&json!("linux"), &json!("amd64")));
    assert_eq!(inspected[0]["Config"]["Labels"]["org.opencontainers.image.version"], VERSION);
    assert_eq!(inspected[0]["RootFS"]["Layers"].as_array().unwrap().len(), 1);
    let container = docker(&["create", &loaded.0, "nothing-runs-in-it"]).unwrap();
    let out = folder.path().join("out.wasm");
    let copied = docker(&["cp", &format!("{}:/plugin.wasm", container.trim()), out.to_str().unwrap()]);
    docker(&["rm", container.trim()]).unwrap();
    copied.unwrap();
    assert_eq!(fs::read(out).unwrap(), fs::read(module()).unwrap());
}

#[test]
fn the_page_on_istio_pushes_what_is_built() {
    let page = read("docs/istio.md");
    for said in ["make image", "target/image", &format!("meshquota:{VERSION}")] {
        assert!(page.contains(said), "{said}");
    }
}

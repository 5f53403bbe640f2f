//! Helm, run on the chart of this project as a user runs it.
//!
//! Every version that is pinned, without a cluster and without the settings of whoever runs the tests. What the chart should
//! render is no matter here.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::manifests::documents;
use crate::support::pinned::pinned;
use crate::support::project::project;

/// Helm 3 and Helm 4, which parse, check and merge values by different code.
const VERSIONS: [&str; 2] = ["3.18.0", "4.3.1"];

/// The folder of the chart.
pub const CHART: &str = "envoy/chart";

pub struct Helm {
    pub version: &'static str,
    binary: PathBuf,
    home: TempDir,
}

/// What a run came to.
pub struct Said {
    pub out: String,
    pub err: String,
    pub fine: bool,
}

impl Helm {
    /// Each version, and none where there is none for this platform.
    pub fn each() -> Vec<Self> {
        let found = VERSIONS.into_iter().filter_map(|version| {
            let binary = pinned(&format!("helm-{version}"), "helm")?;
            Some(Self { version, binary, home: tempfile::tempdir().unwrap() })
        });
        found.collect()
    }

    pub fn run(&self, arguments: &[&str]) -> Said {
        let output = Command::new(&self.binary)
            .args(arguments)
            .current_dir(project())
            .env("HELM_CACHE_HOME", self.home.path())
            .env("HELM_CONFIG_HOME", self.home.path())
            .env("HELM_DATA_HOME", self.home.path())
            .env("KUBECONFIG", self.home.path().join("no-cluster"))
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Said { out: text(output.stdout), err: text(output.stderr), fine: output.status.success() }
    }

    /// Renders the chart, as the release `meshquota` in a namespace.
    pub fn template(&self, namespace: &str, arguments: &[&str]) -> Said {
        let all = [&["template", "meshquota", CHART, "--namespace", namespace], arguments].concat();
        self.run(&all)
    }

    /// What it renders.
    ///
    /// # Panics
    /// Where it renders nothing, with what it said.
    pub fn rendered(&self, namespace: &str, arguments: &[&str]) -> Vec<Value> {
        let said = self.template(namespace, arguments);
        assert!(said.fine, "Helm {}, {arguments:?}: {}", self.version, said.err);
        assert_eq!(said.err, "", "Helm {}, {arguments:?}", self.version);
        documents(&said.out)
    }
}

/// An example of the chart's, by its name: the path inside the project.
pub fn example(name: &str) -> String {
    format!("{CHART}/examples/{name}.yaml")
}

//! `check`: whether configurations are right, and what is wrong with them.

use std::fmt::Write;

use meshquota::config::{Config, Remark};
use serde_json::{Value, json};

use crate::Answer;
use crate::document::Found;

/// Says of each configuration what the filter would say of it.
pub fn check(found: &[Found]) -> Result<Answer, String> {
    let (mut yes, mut text, mut configurations) = (true, String::new(), Vec::new());
    for Found { place, text: document } in found {
        let (faults, warnings, rules) = match Config::from_json(document.as_bytes()) {
            Ok(config) => (Vec::new(), config.warnings, config.rules.len()),
            Err(errors) => (errors.remarks().to_vec(), Vec::new(), 0),
        };
        yes = yes && faults.is_empty();
        for fault in &faults {
            let _ = writeln!(text, "{place}: {fault}");
        }
        for warning in &warnings {
            let _ = writeln!(text, "{place}: warning: {warning}");
        }
        if faults.is_empty() {
            let _ = writeln!(text, "{place}: fine, {rules} {}", if rules == 1 { "rule" } else { "rules" });
        }
        configurations.push(json!({"place": place, "faults": remarks(&faults), "warnings": remarks(&warnings)}));
    }
    Ok(Answer { yes, text, json: json!({ "configurations": configurations }) })
}

fn remarks(remarks: &[Remark]) -> Value {
    remarks.iter().map(|Remark { path, what }| json!({"path": path, "what": what})).collect()
}

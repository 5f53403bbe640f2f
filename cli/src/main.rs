//! `meshquota`: checks a configuration, explains what it makes of a request, tries it on access logs, looks into the buckets
//! of a caller and removes them, and watches running proxies.
//!
//! What a configuration means is said by the same code as in the filter. Exit codes: 0 fine, 1 the answer is no, 2 usage or a
//! file that cannot be read.

mod arguments;
mod buckets;
mod caller;
mod check;
mod document;
mod explain;
mod server;
mod simulate;
mod watch;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use serde_json::{Value, json};

use arguments::{Arguments, Command};

/// What a command has found.
struct Answer {
    /// Whether the exit code says yes.
    yes: bool,
    /// For people.
    text: String,
    /// For scripts.
    json: Value,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match answer(arguments.command, arguments.json) {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(answer)) => {
            print(&if arguments.json { format!("{:#}\n", answer.json) } else { answer.text });
            ExitCode::from(u8::from(!answer.yes))
        }
        Err(what) => {
            eprintln!("meshquota: {what}");
            ExitCode::from(2)
        }
    }
}

/// What a command has found; nothing where it has said all itself.
fn answer(command: Command, as_json: bool) -> Result<Option<Answer>, String> {
    let answer = match command {
        Command::Check { file } => check::check(&document::read(&file)?),
        Command::Explain(request) => explain::explain(&request),
        Command::Inspect(caller) => buckets::inspect(&caller),
        Command::Reset(caller) => buckets::reset(&caller),
        Command::Simulate(simulation) => simulate::simulate(&simulation),
        Command::Watch(watching) => {
            watch::watch(&watching, as_json)?;
            return Ok(None);
        }
        Command::Completions { shell } => {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "meshquota", &mut text);
            let text = String::from_utf8_lossy(&text).into_owned();
            Ok(Answer { yes: true, json: json!({ "completions": text }), text })
        }
        Command::Man { folder } => {
            let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
            std::fs::create_dir_all(&folder).map_err(failed)?;
            clap_mangen::generate_to(Arguments::command(), &folder).map_err(failed)?;
            Ok(Answer { yes: true, text: String::new(), json: json!({ "folder": folder }) })
        }
        Command::Schema => {
            let json = meshquota::config::schema::json_schema();
            Ok(Answer { yes: true, text: format!("{json:#}\n"), json })
        }
    };
    answer.map(Some)
}

/// Writes to standard output. A reader that has seen enough, such as `head`, is no fault.
fn print(text: &str) {
    use std::io::Write;
    let _ = std::io::stdout().write_all(text.as_bytes());
}

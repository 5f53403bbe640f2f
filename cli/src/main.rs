//! `meshquota`: checks a configuration, explains what it makes of a request, looks into the buckets of a caller and empties
//! the way for one.
//!
//! What a configuration means is said by the same code as in the filter. Exit codes: 0 fine, 1 the answer is no, 2 usage or a
//! file that cannot be read.

mod arguments;
mod buckets;
mod check;
mod document;
mod explain;
mod server;

use std::process::ExitCode;

use clap::Parser;
use serde_json::Value;

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
    match answer(arguments.command) {
        Ok(answer) => {
            print(&if arguments.json { format!("{:#}\n", answer.json) } else { answer.text });
            ExitCode::from(u8::from(!answer.yes))
        }
        Err(what) => {
            eprintln!("meshquota: {what}");
            ExitCode::from(2)
        }
    }
}

fn answer(command: Command) -> Result<Answer, String> {
    match command {
        Command::Check { file } => check::check(&document::read(&file)?),
        Command::Explain(request) => explain::explain(&request),
        Command::Inspect(caller) => buckets::inspect(&caller),
        Command::Reset(caller) => buckets::reset(&caller),
        Command::Schema => {
            let json = meshquota::config::schema::json_schema();
            Ok(Answer { yes: true, text: format!("{json:#}\n"), json })
        }
    }
}

/// Writes to standard output. A reader that has seen enough, such as `head`, is no fault.
fn print(text: &str) {
    use std::io::Write;
    let _ = std::io::stdout().write_all(text.as_bytes());
}

//! What the command line can be told.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::caller;

/// Quotas for a mesh: check and explain a configuration, look into a caller's buckets, reset them.
#[derive(Debug, Parser)]
#[command(
    name = "meshquota",
    version,
    after_help = "Exit codes: 0 fine, 1 the answer is no, 2 usage or a file that cannot be read."
)]
pub struct Arguments {
    /// What to do
    #[command(subcommand)]
    pub command: Command,
    /// Answers in JSON
    #[arg(long, global = true)]
    pub json: bool,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Says whether a configuration is right, and every fault of it; 1 where it is not
    Check {
        /// JSON or YAML: a configuration, or a file with one inside: WasmPlugin, EnvoyExtensionPolicy, Envoy's; `-` reads standard input
        file: PathBuf,
    },
    /// Says which rules a request meets, by which keys and limits; 1 where it meets none
    Explain(Request),
    /// Shows a caller's buckets without taking from them; 1 where a request would be denied now
    Inspect(Caller),
    /// Removes a caller's buckets, which are full then; 1 where there were none
    Reset(Caller),
    /// Runs the rules over access logs and says who would have been denied, and which limits would have passed; 1 where any
    /// request would have been denied
    Simulate(Simulation),
    /// Shows live what running proxies decide
    Watch(Watching),
    /// Prints the JSON Schema of configurations
    Schema,
    /// Prints what a shell needs to complete the commands
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Writes the man pages, one for each command
    Man {
        /// The folder for them
        folder: PathBuf,
    },
}

/// A configuration.
#[derive(Args, Debug)]
pub struct Source {
    /// A file with a configuration, as for check
    pub file: PathBuf,
    /// Which one, of a file with several: the number, from 1, or a part of the place that check names
    #[arg(long, value_name = "CONFIGURATION")]
    pub which: Option<String>,
}

/// A request to explain.
#[derive(Args, Debug)]
pub struct Request {
    /// The configuration.
    #[command(flatten)]
    pub source: Source,
    /// Its method
    #[arg(long, default_value = "GET")]
    pub method: String,
    /// Its path, with the query
    #[arg(long, default_value = "/")]
    pub path: String,
    /// A header, as 'name: value'; may be repeated, and `host` is the authority
    #[arg(long = "header", value_name = "NAME: VALUE", value_parser = header)]
    pub headers: Vec<(String, String)>,
    /// The address that Envoy takes for the client's (source.address)
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = address)]
    pub client_ip: IpAddr,
    /// A property of Envoy's, such as 'xds.route_name=checkout'; may be repeated
    #[arg(long = "property", value_name = "PATH=VALUE", value_parser = property)]
    pub properties: Vec<(String, String)>,
}

/// Rules to try on logs.
#[derive(Args, Debug)]
pub struct Simulation {
    /// The configuration.
    #[command(flatten)]
    pub source: Source,
    /// Access logs, one or more for each proxy: JSON, or lines of text; packed by gzip or not; `-` reads standard input
    #[arg(value_name = "LOG", default_value = "-")]
    pub logs: Vec<PathBuf>,
    /// Envoy's format string of a log of text, as it is or as JSON and YAML escape it; else it has Envoy's default format, or
    /// Istio's
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<String>,
    /// What a name in a log of JSON means, as 'ip=%DOWNSTREAM_REMOTE_ADDRESS%'; may be repeated. The usual names are known, and
    /// others are taken for those of headers
    #[arg(long = "field", value_name = "NAME=%OPERATOR%", value_parser = field)]
    pub fields: Vec<(String, String)>,
    /// How many callers to tell of for each rule, and of how many limits where overrides have others
    #[arg(long, value_name = "COUNT", default_value_t = 10)]
    pub top: usize,
}

/// Proxies to watch.
#[derive(Args, Debug)]
pub struct Watching {
    /// Where a proxy's admin interface is; may be repeated, and the proxies are added up
    #[arg(long = "admin", value_name = "URL", default_value = "http://127.0.0.1:9901")]
    pub admins: Vec<String>,
    /// The time between two looks
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    pub interval: std::time::Duration,
    /// Ends after so many looks; 2 where no proxy answers the last one
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
}

/// A caller under a rule, and the Redis that counts him.
#[derive(Args, Debug)]
pub struct Caller {
    /// Where Redis is: redis://HOST:PORT/DATABASE, or rediss:// for TLS
    #[arg(long, value_name = "URL")]
    pub redis: String,
    /// It is a node of a Redis Cluster
    #[arg(long)]
    pub cluster: bool,
    /// Certificates to trust in place of the system's, as PEM
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// A file whose first line is the password
    #[arg(long, value_name = "FILE")]
    pub password_file: Option<PathBuf>,
    /// The password
    #[arg(long, env = "MESHQUOTA_REDIS_PASSWORD", hide = true, hide_env_values = true)]
    pub password: Option<String>,
    /// The configuration.
    #[command(flatten)]
    pub source: Source,
    /// The rule's name
    pub rule: String,
    /// The values of the rule's key, one for each of its parts
    #[arg(value_name = "IDENTITY")]
    pub values: Vec<String>,
    /// One of the caller's keys as Redis or simulate has it, in place of the values
    #[arg(long, value_name = "KEY", conflicts_with = "values")]
    pub key: Option<String>,
    /// The caller's address, where overrides by networks count and the key does not say it
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    pub client_ip: Option<IpAddr>,
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once(':').ok_or("expected 'name: value'")?;
    let name = name.trim().to_ascii_lowercase();
    if name.is_empty() {
        return Err("expected a name before the colon".to_owned());
    }
    Ok((if name == "host" { ":authority".to_owned() } else { name }, value.trim().to_owned()))
}

fn address(text: &str) -> Result<IpAddr, String> {
    caller::read(text).ok_or_else(|| "expected an IP address, with a port or without".to_owned())
}

fn property(text: &str) -> Result<(String, String), String> {
    let (path, value) = text.split_once('=').ok_or("expected 'path=value', such as 'xds.route_name=checkout'")?;
    Ok((path.to_owned(), value.to_owned()))
}

fn field(text: &str) -> Result<(String, String), String> {
    let (name, operator) =
        text.split_once('=').ok_or("expected 'name=%OPERATOR%', such as 'ip=%DOWNSTREAM_REMOTE_ADDRESS%'")?;
    Ok((name.to_owned(), operator.to_owned()))
}

fn interval(text: &str) -> Result<std::time::Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if time.is_zero() {
        return Err("expected some time between two looks, such as '1s'".to_owned());
    }
    Ok(time)
}

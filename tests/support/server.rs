//! A real Redis or Valkey on a free loopback port, for as long as the value lives.
//!
//! Invariant: the process that was started is the only one that is ever signalled, and it is gone, with its
//! directory, when the value is dropped. Nothing here sleeps for a fixed time where it can poll with a deadline.

use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// How long a server may take to start, or a condition to come true, on a busy machine.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// How often a free port is taken by someone else before that stops being bad luck.
const ATTEMPTS: usize = 10;

const VALKEY: &str = ".tools/valkey-9.1.2.post2/valkey-server";

/// Which server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// `redis-server` from the PATH: Redis 7.0 on Debian.
    Redis,
    /// The pinned Valkey 9.1 under `.tools`.
    Valkey,
}

impl Kind {
    /// Both, for tests that hold on either.
    pub const ALL: [Self; 2] = [Self::Redis, Self::Valkey];

    /// The binary to run.
    ///
    /// # Panics
    /// Where it is not there, naming what to do about it.
    pub fn binary(self) -> PathBuf {
        match self {
            Self::Redis => std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
                .map(|directory| directory.join("redis-server"))
                .find(|path| path.is_file())
                .unwrap_or_else(|| panic!("no redis-server in the PATH: run apt-get install redis-server")),
            Self::Valkey => {
                let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(VALKEY);
                assert!(path.is_file(), "no {}: run make tools", path.display());
                path
            }
        }
    }
}

/// A running server. Dropping it kills the process and removes its directory.
pub struct Server {
    kind: Kind,
    arguments: Vec<String>,
    port: u16,
    /// `None` between [`kill`](Server::kill) and [`restart`](Server::restart).
    process: Option<Child>,
    directory: TempDir,
}

impl Server {
    /// Starts a server that keeps nothing on disk, and waits until it answers PING.
    ///
    /// `arguments` come after the ones set here, and so win over them: `&["--appendonly", "yes"]`.
    ///
    /// # Panics
    /// Where the binary is missing, or the server does not answer before [`DEADLINE`]; the line holds the
    /// server's own last words.
    pub fn start(kind: Kind, arguments: &[&str]) -> Self {
        let mut server = Self {
            kind,
            arguments: arguments.iter().map(ToString::to_string).collect(),
            port: 0,
            process: None,
            directory: tempfile::Builder::new().prefix("meshquota-").tempdir().unwrap(),
        };
        for _ in 0..ATTEMPTS {
            server.port = free_port();
            if server.launch() {
                return server;
            }
        }
        panic!("{kind:?} did not start on {ATTEMPTS} ports:\n{}", server.log())
    }

    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The process id.
    ///
    /// # Panics
    /// After [`kill`](Self::kill) and before [`restart`](Self::restart).
    pub fn pid(&self) -> u32 {
        self.process.as_ref().expect("the server runs").id()
    }

    /// Whether it has been started and not been killed.
    pub fn runs(&self) -> bool {
        self.process.is_some()
    }

    /// The directory the server runs in: its log is `log` in there.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// What the server has written to its log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    /// A new connection as the default user, without a password.
    ///
    /// # Panics
    /// Where the server does not accept it.
    pub fn client(&self) -> redis::Connection {
        self.connect("").expect("the server accepts a connection")
    }

    /// A new connection with `credentials` as in a URL: `user:password@`, `:password@`, or nothing.
    ///
    /// # Errors
    /// Whatever the server or the socket answers.
    pub fn connect(&self, credentials: &str) -> redis::RedisResult<redis::Connection> {
        redis::Client::open(format!("redis://{credentials}127.0.0.1:{}/", self.port))?
            .get_connection_with_timeout(DEADLINE)
    }

    /// Kills the process as a crash would, and waits until it is gone. Killing it twice does nothing more.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            // `Child` never signals a process id that it has already waited for.
            process.kill().expect("a child can be killed");
            process.wait().expect("a child can be waited for");
        }
    }

    /// Starts it again on the same port, with the same arguments. Kills it first where it still runs.
    ///
    /// # Panics
    /// Where the port has been taken meanwhile, or the server does not answer in time.
    pub fn restart(&mut self) {
        self.kill();
        let started = self.launch();
        assert!(started, "{:?} did not come back:\n{}", self.kind, self.log());
    }

    /// Starts it again with these arguments in place of those that it had.
    pub fn restart_with(&mut self, arguments: &[&[&str]]) {
        self.arguments = arguments.concat().iter().map(ToString::to_string).collect();
        self.restart();
    }

    /// Freezes the process (SIGSTOP): connections stay open, and nothing is answered.
    pub fn stop(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Lets a frozen process go on (SIGCONT).
    pub fn cont(&self) {
        self.signal(Signal::SIGCONT);
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.pid()).expect("a process id is small");
        kill(Pid::from_raw(pid), signal).expect("a child can be signalled");
    }

    /// Starts the process; false where it ended by itself, as it does when the port is taken.
    fn launch(&mut self) -> bool {
        let log = File::create(self.directory.path().join("log")).unwrap();
        let process = Command::new(self.kind.binary())
            .args(["--port", &self.port.to_string(), "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no", "--daemonize", "no"])
            .arg("--dir")
            .arg(self.directory.path())
            .args(&self.arguments)
            .current_dir(self.directory.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let process = self.process.insert(process);
        let deadline = Instant::now() + DEADLINE;
        loop {
            if process.try_wait().unwrap().is_some() {
                self.process = None;
                return false;
            }
            if answers_ping(self.port) && process.try_wait().unwrap().is_none() {
                return true;
            }
            if Instant::now() >= deadline {
                panic!("{:?} did not answer PING:\n{}", self.kind, self.log());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Says a command to a server, in words with blanks between them.
///
/// # Panics
/// Where the server does not take it.
pub fn say(connection: &mut redis::Connection, words: &str) {
    let mut words = words.split(' ');
    let mut command = redis::cmd(words.next().unwrap());
    words.for_each(|word| {
        command.arg(word);
    });
    command.exec(connection).unwrap();
}

/// A port on 127.0.0.1 that nothing listens on at this moment.
pub fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

/// Polls until `condition` holds.
///
/// # Panics
/// Where it does not before [`DEADLINE`], saying what was waited for.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a Redis speaks on that port. One that asks for a password (-NOAUTH) is up as well.
fn answers_ping(port: u16) -> bool {
    use std::io::{Read, Write};
    let Ok(mut stream) = std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)) else {
        return false;
    };
    let timeout = Some(Duration::from_secs(1));
    let mut answer = [0; 7];
    stream.set_read_timeout(timeout).is_ok()
        && stream.write_all(b"*1\r\n$4\r\nPING\r\n").is_ok()
        && stream.read_exact(&mut answer).is_ok()
        && (answer.starts_with(b"+PONG") || answer.starts_with(b"-NOAUTH"))
}

//! A TCP proxy in front of a server that does to replies what networks and sick servers do.
//!
//! What it does can be changed at any time. A change holds for the connections there are as well as for those to come.
//! It reads the commands that pass, so that a test can tell how often the server was asked, and what for.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::listener::Listener;
use super::server::wait_until;

/// What happens to the server's replies. A "reply" is what the server sent in one piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// They pass.
    Pass,
    /// They pass so much later.
    Delay(Duration),
    /// They wait until the mode changes, and follow the new one then.
    Hold,
    /// They pass one byte at a time.
    Bytewise,
    /// So many bytes of the next one pass; then the connection is closed.
    Cut(usize),
    /// So many bytes of the next one pass; then there is silence on that connection, for good.
    Half(usize),
    /// These bytes come in place of each.
    Garbage(Vec<u8>),
    /// The server is not asked: each command is answered by these bytes.
    Answer(Vec<u8>),
    /// Nothing passes in either direction, for good on connections that wanted to say something meanwhile.
    Mute,
    /// Connections are closed, and new ones as soon as they are accepted.
    Refuse,
}

/// A shim on a free port of 127.0.0.1, until it is dropped.
pub struct Shim {
    listener: Listener,
    state: Arc<State>,
}

struct State {
    server: AtomicU16,
    mode: Mutex<Mode>,
    changed: Condvar,
    accepted: AtomicUsize,
    open: AtomicUsize,
    /// The commands that have come, each with the number of its connection.
    commands: Mutex<Vec<(usize, Command)>>,
    /// Both sides of every connection.
    streams: Mutex<Vec<TcpStream>>,
}

impl Shim {
    /// A shim before a server on this port of 127.0.0.1, that lets everything pass.
    pub fn before(server: u16) -> Self {
        let state = Arc::new(State {
            server: AtomicU16::new(server),
            mode: Mutex::new(Mode::Pass),
            changed: Condvar::new(),
            accepted: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            commands: Mutex::default(),
            streams: Mutex::default(),
        });
        let shared = Arc::clone(&state);
        Self { listener: Listener::start(move |stream| shared.accept(stream)), state }
    }

    pub fn port(&self) -> u16 {
        self.listener.port()
    }

    /// Changes what happens to replies from now on.
    pub fn set(&self, mode: Mode) {
        let refuse = mode == Mode::Refuse;
        *self.state.mode.lock().unwrap() = mode;
        self.state.changed.notify_all();
        if refuse {
            self.close_all();
        }
    }

    /// Connections lead to another server from now on; those that are open stay where they are.
    pub fn lead_to(&self, server: u16) {
        self.state.server.store(server, Ordering::SeqCst);
    }

    /// Closes every connection there is.
    pub fn close_all(&self) {
        for stream in self.state.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Connections accepted so far.
    pub fn accepted(&self) -> usize {
        self.state.accepted.load(Ordering::SeqCst)
    }

    /// Connections that are open now.
    pub fn open(&self) -> usize {
        self.state.open.load(Ordering::SeqCst)
    }

    /// How many commands of that name have come.
    pub fn count(&self, name: &str) -> usize {
        self.state.commands.lock().unwrap().iter().filter(|(_, command)| command.name == name).count()
    }

    /// Forgets the commands that have come.
    pub fn forget(&self) {
        self.state.commands.lock().unwrap().clear();
    }

    /// How many charges calls by the script's digest have asked for, of the buckets of that first key.
    pub fn charges(&self, key: &str) -> usize {
        let commands = self.state.commands.lock().unwrap();
        let of_key = commands.iter().filter(|(_, command)| command.name == "EVALSHA" && command.key == key);
        of_key.map(|(_, command)| command.count).sum()
    }

    /// The names of the commands in the order of each connection, by the connection's number from 1.
    pub fn conversations(&self) -> HashMap<usize, Vec<String>> {
        let mut conversations = HashMap::<usize, Vec<String>>::new();
        for (connection, command) in self.state.commands.lock().unwrap().iter() {
            conversations.entry(*connection).or_default().push(command.name.clone());
        }
        conversations
    }

    /// Waits until so many commands of that name have come.
    pub fn wait_for(&self, name: &str, number: usize) {
        wait_until(&format!("{number} {name} have come"), || self.count(name) >= number);
    }
}

impl Drop for Shim {
    fn drop(&mut self) {
        self.set(Mode::Refuse);
    }
}

/// Something for the client, and when it came.
type Chunk = (Instant, Said, Vec<u8>);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Said {
    ByServer,
    ByShim,
    /// The server has closed the connection.
    Farewell,
}

impl State {
    fn mode(&self) -> Mode {
        self.mode.lock().unwrap().clone()
    }

    fn accept(self: &Arc<Self>, client: TcpStream) {
        let number = self.accepted.fetch_add(1, Ordering::SeqCst) + 1;
        // Known before the mode is looked at: a change to `Refuse` in between finds it.
        self.streams.lock().unwrap().push(client.try_clone().unwrap());
        if self.mode() == Mode::Refuse {
            let _ = client.shutdown(Shutdown::Both);
            return;
        }
        let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, self.server.load(Ordering::SeqCst))) else {
            // A server that is not there refuses; a proxy before it can only hang up.
            let _ = client.shutdown(Shutdown::Both);
            return;
        };
        self.streams.lock().unwrap().push(server.try_clone().unwrap());
        let _ = (client.set_nodelay(true), server.set_nodelay(true));
        self.open.fetch_add(1, Ordering::SeqCst);
        let (replies, waiting) = channel();
        let (state, answers) = (Arc::clone(self), replies.clone());
        let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        thread::spawn(move || {
            state.upwards(number, &mut from, &mut to, &answers);
            state.open.fetch_sub(1, Ordering::SeqCst);
            let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
        });
        let mut from = server.try_clone().unwrap();
        thread::spawn(move || downwards(&mut from, &replies));
        let (state, mut client) = (Arc::clone(self), client);
        thread::spawn(move || {
            state.deliver(&waiting, &mut client);
            let _ = (client.shutdown(Shutdown::Both), server.shutdown(Shutdown::Both));
        });
    }

    /// From the client to the server.
    fn upwards(&self, number: usize, from: &mut TcpStream, to: &mut TcpStream, answers: &Sender<Chunk>) {
        let (mut bytes, mut pending, mut mute) = (vec![0; 64 * 1024], Vec::new(), false);
        while let Ok(size @ 1..) = from.read(&mut bytes) {
            let mode = self.mode();
            mute = mute || mode == Mode::Mute;
            pending.extend_from_slice(&bytes[..size]);
            let mut answer = Vec::new();
            while let Some((command, length)) = command(&pending) {
                pending.drain(..length);
                self.commands.lock().unwrap().push((number, command));
                if let Mode::Answer(each) = &mode {
                    answer.extend_from_slice(each);
                }
            }
            match mode {
                _ if mute => {}
                Mode::Answer(_) => {
                    let _ = answers.send((Instant::now(), Said::ByShim, answer));
                }
                _ if to.write_all(&bytes[..size]).is_err() => return,
                _ => {}
            }
        }
    }

    /// What goes to the client.
    fn deliver(&self, replies: &Receiver<Chunk>, client: &mut TcpStream) {
        let mut silent = false;
        for (came, said, chunk) in replies {
            let mut mode = self.mode.lock().unwrap();
            while *mode == Mode::Hold {
                mode = self.changed.wait(mode).unwrap();
            }
            let mode = mode.clone();
            if said == Said::Farewell {
                return;
            }
            if silent {
                continue;
            }
            let done = match mode {
                _ if said == Said::ByShim => client.write_all(&chunk),
                Mode::Pass | Mode::Hold | Mode::Answer(_) => client.write_all(&chunk),
                Mode::Delay(by) => {
                    thread::sleep((came + by).saturating_duration_since(Instant::now()));
                    client.write_all(&chunk)
                }
                Mode::Bytewise => chunk.iter().try_for_each(|byte| {
                    thread::sleep(Duration::from_micros(50));
                    client.write_all(&[*byte])
                }),
                Mode::Cut(after) => {
                    let _ = client.write_all(&chunk[..after.min(chunk.len())]);
                    return;
                }
                Mode::Half(after) => {
                    silent = true;
                    client.write_all(&chunk[..after.min(chunk.len())])
                }
                Mode::Garbage(bytes) => client.write_all(&bytes),
                Mode::Mute => {
                    silent = true;
                    Ok(())
                }
                Mode::Refuse => return,
            };
            if done.is_err() {
                return;
            }
        }
    }
}

/// From the server, until it closes.
fn downwards(from: &mut TcpStream, replies: &Sender<Chunk>) {
    let mut bytes = vec![0; 64 * 1024];
    while let Ok(size @ 1..) = from.read(&mut bytes) {
        if replies.send((Instant::now(), Said::ByServer, bytes[..size].to_vec())).is_err() {
            return;
        }
    }
    let _ = replies.send((Instant::now(), Said::Farewell, Vec::new()));
}

/// What is no command is recorded by this name.
pub const NO_COMMAND: &str = "?";

/// A command that has come.
#[derive(Default)]
struct Command {
    /// Its name, in upper case.
    name: String,
    /// Of a call of the script: the first key, and how many charges it asks for.
    key: String,
    count: usize,
}

impl Command {
    fn of(words: &[String]) -> Self {
        let name = words.first().map(|name| name.to_ascii_uppercase()).unwrap_or_default();
        // Name, script, number of keys, keys, three words for each, now, cost, count, which is one where it is not told.
        let keys = words.get(2).and_then(|keys| keys.parse::<usize>().ok()).unwrap_or(0);
        let count = words.get(5 + 4 * keys).and_then(|count| count.parse().ok()).unwrap_or(1);
        Self { name, key: words.get(3).cloned().unwrap_or_default(), count }
    }
}

/// The first command in the bytes and its length; `None` until it is whole.
fn command(bytes: &[u8]) -> Option<(Command, usize)> {
    let first = bytes.first()?;
    if *first != b'*' {
        return Some((Command { name: NO_COMMAND.to_owned(), ..Command::default() }, bytes.len()));
    }
    let (number_of_words, mut at) = number(bytes, 0)?;
    let mut words = Vec::new();
    for _ in 0..number_of_words {
        let (length, start) = number(bytes, at)?;
        words.push(String::from_utf8_lossy(bytes.get(start..start + length)?).into_owned());
        at = start + length + 2;
    }
    (at <= bytes.len()).then(|| (Command::of(&words), at))
}

/// The number in the line that starts there, after its type, and where the next line starts.
fn number(bytes: &[u8], at: usize) -> Option<(usize, usize)> {
    let line = bytes.get(at..)?;
    let end = line.windows(2).position(|pair| pair == b"\r\n")?;
    let number = std::str::from_utf8(line.get(1..end)?).ok()?.parse().ok()?;
    Some((number, at + end + 2))
}

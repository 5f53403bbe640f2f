//! A server in virtual time: the real script, in LuaJIT, over keys that live in memory. It knows the commands that the
//! script and the module use, and does with them what Redis does.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use bytes::BytesMut;
use meshquota::script;
use mlua::{Function, Lua, MultiValue, Value};
use redis_protocol::resp2::decode::decode_bytes_mut;
use redis_protocol::resp2::types::{BytesFrame, Resp2Frame};

/// A hash, and when it expires.
#[derive(Clone, Debug, Default)]
struct Key {
    fields: BTreeMap<String, String>,
    expires_ms: Option<u64>,
}

#[derive(Default)]
struct Keys {
    keys: HashMap<String, Key>,
    /// The server's time of day, in microseconds since 1970.
    time_us: u64,
}

impl Keys {
    fn now_ms(&self) -> u64 {
        self.time_us / 1000
    }

    fn live(&mut self, name: &str) -> Option<&mut Key> {
        let now = self.now_ms();
        if self.keys.get(name).is_some_and(|key| key.expires_ms.is_some_and(|at| at <= now)) {
            self.keys.remove(name);
        }
        self.keys.get_mut(name)
    }
}

/// One run of the script.
#[derive(Clone, Debug)]
pub struct Run {
    pub key: String,
    /// The worker that asked.
    pub asked_by: usize,
    pub count: i64,
    /// What the script answered: granted, remaining, retry after, reset after, limit.
    pub reply: [i64; 5],
    /// When, by the time of the world in microseconds.
    pub at: u64,
    /// The server's time, in milliseconds since 1970, and the latest that it ever showed.
    pub now_ms: u64,
    pub latest_ms: u64,
    /// Whether the key was there before.
    pub existed: bool,
    /// How often the server had lost its data before.
    pub losses: u32,
    /// How many requests' decisions have been laid to it: of those it granted, and of those it denied.
    pub granted: i64,
    pub denied: i64,
}

impl Run {
    /// Lays a decision to it, where there is one left of that kind.
    pub fn take(&mut self, allowed: bool) -> bool {
        let (taken, of) = match allowed {
            true => (&mut self.granted, self.reply[0]),
            false => (&mut self.denied, self.count - self.reply[0]),
        };
        let is_left = *taken < of;
        *taken += i64::from(is_left);
        is_left
    }
}

/// What a server answers instead of doing what it is asked.
pub type Refusal = Option<&'static str>;

pub struct Server {
    keys: Rc<RefCell<Keys>>,
    lua: Lua,
    /// The script, compiled; changed where a test breaks it on purpose.
    script: Function,
    knows_script: bool,
    world_time: u64,
    latest_ms: u64,
    losses: u32,
    pub refusal: Refusal,
    pub runs: Vec<Run>,
}

impl Server {
    /// A server that knows no script. `source` is what the digest of the real one stands for.
    pub fn new(source: &str) -> Self {
        let (keys, lua) = (Rc::new(RefCell::new(Keys::default())), Lua::new());
        let call = {
            let keys = Rc::clone(&keys);
            lua.create_function(move |lua, words: MultiValue| command(lua, &mut keys.borrow_mut(), words)).unwrap()
        };
        let error = lua.create_function(|lua, text: String| {
            let error = lua.create_table()?;
            error.set("err", text)?;
            Ok(error)
        });
        let redis = lua.create_table().unwrap();
        redis.set("call", call.clone()).unwrap();
        redis.set("pcall", call).unwrap();
        redis.set("error_reply", error.unwrap()).unwrap();
        lua.globals().set("redis", redis).unwrap();
        let script = lua.load(source).set_name("bucket.lua").into_function().unwrap();
        Self {
            keys,
            lua,
            script,
            knows_script: false,
            world_time: 0,
            latest_ms: 0,
            losses: 0,
            refusal: None,
            runs: Vec::new(),
        }
    }

    /// Sets the time of the world, and the server's time of day, both in microseconds.
    pub fn set_time(&mut self, world: u64, us: u64) {
        self.world_time = world;
        self.keys.borrow_mut().time_us = us;
        self.latest_ms = self.latest_ms.max(us / 1000);
    }

    pub fn flush_scripts(&mut self) {
        self.knows_script = false;
    }

    pub fn lose_data(&mut self) {
        self.losses += 1;
        self.keys.borrow_mut().keys.clear();
    }

    /// The fields of a key.
    pub fn fields(&self, key: &str) -> BTreeMap<String, String> {
        self.keys.borrow_mut().live(key).map(|key| key.fields.clone()).unwrap_or_default()
    }

    /// In how many milliseconds a key expires.
    pub fn life_ms(&self, key: &str) -> Option<u64> {
        let mut keys = self.keys.borrow_mut();
        let now = keys.now_ms();
        keys.live(key)?.expires_ms.map(|at| at - now)
    }

    /// Lets a key live for ever.
    pub fn persist(&self, key: &str) {
        if let Some(key) = self.keys.borrow_mut().keys.get_mut(key) {
            key.expires_ms = None;
        }
    }

    /// Carries out the whole commands at the beginning of what a connection has sent, and returns the replies.
    pub fn serve(&mut self, worker: usize, unread: &mut BytesMut) -> Vec<Vec<u8>> {
        let mut replies = Vec::new();
        while let Some((frame, ..)) = decode_bytes_mut(unread).expect("a client sends commands") {
            let BytesFrame::Array(words) = frame else { panic!("no command: {frame:?}") };
            let words = words.iter().map(|word| word.as_str().unwrap().to_owned()).collect::<Vec<_>>();
            replies.push(self.answer(worker, &words).into_bytes());
        }
        replies
    }

    fn answer(&mut self, worker: usize, words: &[String]) -> String {
        if let Some(refusal) = self.refusal {
            return format!("-{refusal}\r\n");
        }
        match words[0].as_str() {
            "EVALSHA" if words[1] != script::sha1() => "-NOSCRIPT No matching script.\r\n".to_owned(),
            "EVALSHA" if !self.knows_script => "-NOSCRIPT No matching script.\r\n".to_owned(),
            "EVAL" | "EVALSHA" => {
                self.knows_script = true;
                self.run(worker, &words[2..])
            }
            other => panic!("the module sends no {other}"),
        }
    }

    /// Runs the script for these words, from the number of keys on.
    pub fn run(&mut self, asked_by: usize, words: &[String]) -> String {
        let count: usize = words[0].parse().unwrap();
        let (keys, arguments) = words[1..].split_at(count);
        let globals = self.lua.globals();
        globals.set("KEYS", keys.to_vec()).unwrap();
        globals.set("ARGV", arguments.to_vec()).unwrap();
        let existed = self.keys.borrow_mut().live(&keys[0]).is_some();
        let now_ms = self.keys.borrow().now_ms();
        let reply: mlua::Table = self.script.call(()).unwrap();
        if let Ok(Some(error)) = reply.get::<Option<String>>("err") {
            return format!("-{error}\r\n");
        }
        // Redis cuts the fraction of a number off.
        let told = reply.sequence_values::<f64>().map(|number| number.unwrap() as i64).collect::<Vec<_>>();
        // The limit is not told where it is the first.
        let reply = std::array::from_fn(|place| told.get(place).copied().unwrap_or(0));
        let (at, latest_ms, losses) = (self.world_time, self.latest_ms, self.losses);
        // One is the usual count, which is not told.
        let told_count = arguments.get(3 * count + 2).map(|count| count.parse().unwrap());
        let (key, count) = (keys[0].clone(), told_count.unwrap_or(1));
        self.runs.push(Run {
            at,
            key,
            asked_by,
            count,
            reply,
            now_ms,
            latest_ms,
            existed,
            losses,
            granted: 0,
            denied: 0,
        });
        let integers = told.iter().map(|number| format!(":{number}\r\n")).collect::<String>();
        format!("*{}\r\n{integers}", told.len())
    }
}

/// A command that the script calls.
fn command(lua: &Lua, keys: &mut Keys, words: MultiValue) -> mlua::Result<Value> {
    let words = words.iter().map(text).collect::<Vec<_>>();
    match words.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["TIME"] => {
            let (seconds, rest) = (keys.time_us / 1_000_000, keys.time_us % 1_000_000);
            Ok(Value::Table(lua.create_sequence_from([seconds.to_string(), rest.to_string()])?))
        }
        ["HMGET", name, fields @ ..] => {
            let key = keys.live(name).cloned().unwrap_or_default();
            let values = lua.create_table()?;
            for (place, field) in fields.iter().enumerate() {
                match key.fields.get(*field) {
                    Some(value) => values.set(place + 1, value.as_str())?,
                    None => values.set(place + 1, false)?,
                }
            }
            Ok(Value::Table(values))
        }
        ["HSET", name, pairs @ ..] => {
            keys.live(name);
            let key = keys.keys.entry((*name).to_owned()).or_default();
            for pair in pairs.chunks(2) {
                key.fields.insert(pair[0].to_owned(), pair[1].to_owned());
            }
            Ok(Value::Integer(0))
        }
        ["PEXPIRE", name, ms] => {
            let (now, ms) = (keys.now_ms(), ms.parse::<u64>().expect("a whole number of milliseconds"));
            if let Some(key) = keys.live(name) {
                key.expires_ms = Some(now.saturating_add(ms));
            }
            Ok(Value::Integer(1))
        }
        other => panic!("the script calls no {other:?}"),
    }
}

/// A word of a command: Redis writes numbers with as many digits as tell them apart.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.to_str().unwrap().to_owned(),
        Value::Integer(number) => number.to_string(),
        Value::Number(number) if number.fract() == 0.0 && number.abs() < 1e17 => format!("{number:.0}"),
        Value::Number(number) => number.to_string(),
        other => panic!("no word: {other:?}"),
    }
}

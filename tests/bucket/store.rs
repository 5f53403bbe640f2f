//! A connection over which the real script is run, with the bytes that the module would send.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::num::NonZeroU32;

use bytes::BytesMut;
use meshquota::quota::{Capacity, Cost, Limit, Refill};
use meshquota::script::{self, Call, Outcome};
use redis_protocol::resp2::decode::decode_bytes_mut;
use redis_protocol::resp2::encode::extend_encode;
use redis_protocol::resp2::types::{BytesFrame, Resp2Frame};

use crate::support::server::{DEADLINE, Kind, Server};

/// Any time will do, so it is one that reads well.
pub const START: u64 = 1_700_000_000_000;

/// A server, and a connection to it that has the script loaded.
pub struct Store {
    pub server: Server,
    pub wire: Wire,
}

/// One connection.
pub struct Wire {
    stream: TcpStream,
    unread: BytesMut,
}

impl Store {
    pub fn start(kind: Kind) -> Self {
        let server = Server::start(kind, &[]);
        let mut wire = Wire::open(server.port());
        let digest = wire.text(&["SCRIPT", "LOAD", script::SOURCE]);
        assert_eq!(digest, script::sha1(), "Redis knows the script by the name we call it by");
        Self { server, wire }
    }

    /// One of each kind.
    pub fn both() -> impl Iterator<Item = Self> {
        Kind::ALL.into_iter().map(Self::start)
    }
}

impl Wire {
    pub fn open(port: u16) -> Self {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        Self { stream, unread: BytesMut::new() }
    }

    /// Sends bytes and reads so many replies.
    pub fn exchange(&mut self, bytes: &[u8], replies: usize) -> Vec<BytesFrame> {
        self.stream.write_all(bytes).unwrap();
        (0..replies).map(|_| self.read()).collect()
    }

    fn read(&mut self) -> BytesFrame {
        loop {
            if let Some((frame, _, _)) = decode_bytes_mut(&mut self.unread).unwrap() {
                return frame;
            }
            let mut chunk = [0; 4096];
            let length = self.stream.read(&mut chunk).unwrap();
            assert_ne!(length, 0, "the server hung up");
            self.unread.extend_from_slice(&chunk[..length]);
        }
    }

    /// Any command.
    pub fn command(&mut self, words: &[&str]) -> BytesFrame {
        let mut bytes = BytesMut::new();
        encode(&mut bytes, words);
        self.exchange(&bytes, 1).remove(0)
    }

    /// A command that answers text, as a bulk or a simple string.
    pub fn text(&mut self, words: &[&str]) -> String {
        let reply = self.command(words);
        reply.as_str().unwrap_or_else(|| panic!("{words:?}: {reply:?}")).to_owned()
    }

    /// A command that answers an integer.
    pub fn integer(&mut self, words: &[&str]) -> i64 {
        integer(&self.command(words))
    }

    /// The stored fields, `None` for one that is not there.
    pub fn fields(&mut self, key: &str) -> [Option<String>; 2] {
        fields(&self.command(&["HMGET", key, "tokens", "ts"]))
    }

    /// The script's reply as it is.
    pub fn run(&mut self, call: &Call) -> BytesFrame {
        let mut bytes = BytesMut::new();
        call.evalsha(&mut bytes);
        self.exchange(&bytes, 1).remove(0)
    }

    /// The script's reply, which must be an outcome.
    pub fn outcome(&mut self, call: &Call) -> Outcome {
        let reply = self.run(call);
        Outcome::from_reply(&reply, call.asked(), call.limits())
            .unwrap_or_else(|unexpected| panic!("{unexpected}: {reply:?}"))
    }

    /// The script's five integers, which must be an outcome as well. The keys are kept from expiring, since the time
    /// that a test names does not pass as real time does.
    pub fn reply(&mut self, call: &Call) -> [i64; 5] {
        let mut bytes = BytesMut::new();
        encode(&mut bytes, &["MULTI"]);
        call.evalsha(&mut bytes);
        for i in 0..call.limits() {
            encode(&mut bytes, &["PERSIST", &key(i)]);
        }
        encode(&mut bytes, &["EXEC"]);
        let replies = self.exchange(&bytes, 3 + call.limits());
        let reply = &array(replies.last().unwrap())[0];
        Outcome::from_reply(reply, call.asked(), call.limits()).unwrap();
        five(reply)
    }

    /// The first word of the error that the script answers.
    pub fn error(&mut self, call: &Call) -> String {
        match self.run(call) {
            BytesFrame::Error(text) => text.split(' ').next().unwrap().to_owned(),
            reply => panic!("expected an error, found {reply:?}"),
        }
    }
}

pub fn encode(out: &mut BytesMut, words: &[&str]) {
    let words = words.iter().map(|word| BytesFrame::BulkString(word.as_bytes().to_vec().into()));
    extend_encode(out, &BytesFrame::Array(words.collect()), false).unwrap();
}

pub fn array(frame: &BytesFrame) -> &[BytesFrame] {
    match frame {
        BytesFrame::Array(frames) => frames,
        other => panic!("expected an array, found {other:?}"),
    }
}

pub fn integer(frame: &BytesFrame) -> i64 {
    match frame {
        BytesFrame::Integer(value) => *value,
        other => panic!("expected an integer, found {other:?}"),
    }
}

/// The integers of a reply. The last is the limit, which is not told where it is the first.
pub fn five(frame: &BytesFrame) -> [i64; 5] {
    let mut fields: Vec<i64> = array(frame).iter().map(integer).collect();
    fields.resize(fields.len().max(5), 0);
    fields.try_into().unwrap()
}

pub fn fields(frame: &BytesFrame) -> [Option<String>; 2] {
    let fields = array(frame).iter().map(|field| field.as_str().map(str::to_owned));
    fields.collect::<Vec<_>>().try_into().unwrap()
}

pub fn limit(capacity: u64, tokens: u64, period_ms: u64) -> Limit {
    Limit::new(Capacity::new(capacity).unwrap(), Refill::new(tokens, period_ms).unwrap()).unwrap()
}

/// A call on the buckets `{b}:0`, `{b}:1` and so on. A negative count gives back.
pub fn call(limits: &[Limit], now: impl Into<Option<u64>>, cost: u64, count: i64) -> Call {
    let pairs = limits.iter().enumerate().map(|(i, limit)| (key(i), *limit));
    let size = NonZeroU32::new(u32::try_from(count.unsigned_abs()).unwrap()).unwrap();
    let make = if count < 0 { Call::give_back } else { Call::charge };
    make(pairs, Cost::new(cost).unwrap(), size, now.into())
}

pub fn key(i: usize) -> String {
    format!("{{b}}:{i}")
}

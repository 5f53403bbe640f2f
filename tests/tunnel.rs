//! lua/tunnel.lua in LuaJIT, which Envoy runs it in: frames come off and go on, however the chunks are cut.
//!
//! Envoy's part is played by a handle whose `bodyChunks` yields the chunks of a body one by one.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use mlua::{Function, Lua, MultiValue, Table, UserData, UserDataMethods};

/// A chunk of a body, as the script sees it. Positions count from zero, as Envoy's do.
#[derive(Clone)]
struct Chunk(Rc<RefCell<Vec<u8>>>);

impl UserData for Chunk {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        methods.add_method("length", |_, chunk, ()| Ok(chunk.0.borrow().len()));
        methods.add_method("getBytes", |lua, chunk, (start, length): (usize, usize)| {
            lua.create_string(&chunk.0.borrow()[start..start + length])
        });
        methods.add_method("setBytes", |_, chunk, bytes: mlua::LuaString| {
            *chunk.0.borrow_mut() = bytes.as_bytes().to_vec();
            Ok(())
        });
    }
}

struct Tunnel(Lua);

impl Tunnel {
    fn new() -> Self {
        let lua = Lua::new();
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/lua/tunnel.lua");
        lua.load(std::fs::read_to_string(source).unwrap()).set_name("tunnel.lua").exec().unwrap();
        Self(lua)
    }

    /// A handle over a body in these chunks.
    fn handle(&self, chunks: &[Chunk]) -> Table {
        let handle = self.0.create_table().unwrap();
        let chunks = Rc::new(RefCell::new(chunks.iter().cloned().collect::<VecDeque<_>>()));
        let body = self
            .0
            .create_function(move |lua, _: MultiValue| {
                let chunks = Rc::clone(&chunks);
                lua.create_function(move |_, _: MultiValue| Ok(chunks.borrow_mut().pop_front()))
            })
            .unwrap();
        handle.set("bodyChunks", body).unwrap();
        handle
    }

    /// What becomes of the chunks of a request or a response, each by itself.
    fn pass(&self, entry: &str, chunks: &[&[u8]]) -> Vec<Vec<u8>> {
        let chunks = chunks.iter().map(|bytes| Chunk(Rc::new(RefCell::new(bytes.to_vec())))).collect::<Vec<_>>();
        let function: Function = self.0.globals().get(entry).unwrap();
        function.call::<()>(self.handle(&chunks)).unwrap();
        chunks.iter().map(|chunk| chunk.0.borrow().clone()).collect()
    }

    fn request(&self, chunks: &[&[u8]]) -> Vec<u8> {
        self.pass("envoy_on_request", chunks).concat()
    }
}

/// A gRPC message, as the specification of gRPC over HTTP/2 frames it.
fn message(payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap();
    [&[0], length.to_be_bytes().as_slice(), payload].concat()
}

fn bytes(length: usize) -> Vec<u8> {
    (0..length).map(|place| (place * 7 % 256) as u8).collect()
}

#[test]
fn frames_come_off_wherever_the_chunks_are_cut() {
    let tunnel = Tunnel::new();
    let payloads = [bytes(0), bytes(1), bytes(5), b"*1\r\n$4\r\nPING\r\n".to_vec(), bytes(0), bytes(300)];
    let stream = payloads.iter().flat_map(|payload| message(payload)).collect::<Vec<_>>();
    let bare = payloads.concat();
    assert_eq!(tunnel.request(&[&stream]), bare);
    assert_eq!(tunnel.request(&stream.chunks(1).collect::<Vec<_>>()), bare);
    for first in 0..=stream.len() {
        let (head, tail) = stream.split_at(first);
        assert_eq!(tunnel.request(&[head, tail]), bare, "cut at {first}");
    }
    // Two cuts, around the short messages, where heads are cut more than once.
    for first in 0..=50 {
        for second in first..=50 {
            let chunks = [&stream[..first], &stream[first..second], &stream[second..]];
            assert_eq!(tunnel.request(&chunks), bare, "cut at {first} and {second}");
        }
    }
}

#[test]
fn what_has_come_goes_on_at_once() {
    let tunnel = Tunnel::new();
    let stream = [message(b"first"), message(b"second")].concat();
    let passed = tunnel.pass("envoy_on_request", &[&stream[..8], &stream[8..12], &stream[12..]]);
    assert_eq!(passed, [b"fir".to_vec(), b"st".to_vec(), b"second".to_vec()]);
}

#[test]
fn a_long_message_passes_whole() {
    let tunnel = Tunnel::new();
    for length in [255, 256, 65_535, 65_536, 70_000, 16_777_216] {
        let payload = bytes(length);
        let stream = message(&payload);
        let chunks = stream.chunks(16_384).collect::<Vec<_>>();
        assert!(tunnel.request(&chunks) == payload, "{length} bytes");
        let framed = tunnel.pass("envoy_on_response", &[&payload]);
        assert!(framed == [stream], "{length} bytes");
    }
}

#[test]
fn each_chunk_of_a_response_becomes_a_message() {
    let tunnel = Tunnel::new();
    let chunks: [&[u8]; 4] = [b":1\r\n", b"*", b"", b"5\r\n\0\xff"];
    let framed = tunnel.pass("envoy_on_response", &chunks);
    assert_eq!(framed, [message(b":1\r\n"), message(b"*"), Vec::new(), message(b"5\r\n\0\xff")]);
}

#[test]
fn two_streams_that_take_turns_do_not_know_of_each_other() {
    // As in Envoy, a stream that waits for its next chunk is a coroutine that has yielded.
    let tunnel = Tunnel::new();
    let (one, other) = ([message(b"abcdef"), message(b"g")].concat(), [message(b"12"), message(b"3456")].concat());
    tunnel.0.globals().set("one", tunnel.0.create_string(&one).unwrap()).unwrap();
    tunnel.0.globals().set("other", tunnel.0.create_string(&other).unwrap()).unwrap();
    let passed: (mlua::LuaString, mlua::LuaString) = tunnel
        .0
        .load(
            r#"
            local function stream(bytes, out)
              local at = 0
              local handle = {}
              function handle:bodyChunks()
                return function()
                  coroutine.yield()
                  at = at + 1
                  if at > #bytes then return nil end
                  local chunk = {bytes = bytes:sub(at, at)}
                  function chunk:length() return #self.bytes end
                  function chunk:getBytes(from, length) return self.bytes:sub(from + 1, from + length) end
                  function chunk:setBytes(new) out[#out + 1] = new end
                  return chunk
                end
              end
              return coroutine.create(function() envoy_on_request(handle) end)
            end
            local first, second = {}, {}
            local a, b = stream(one, first), stream(other, second)
            while coroutine.status(a) ~= "dead" or coroutine.status(b) ~= "dead" do
              coroutine.resume(a)
              coroutine.resume(b)
            end
            return table.concat(first), table.concat(second)
            "#,
        )
        .eval()
        .unwrap();
    assert_eq!((&*passed.0.as_bytes(), &*passed.1.as_bytes()), (b"abcdefg".as_slice(), b"123456".as_slice()));
}

#[test]
fn a_stream_that_ends_inside_a_message_leaves_nothing_to_the_next() {
    let tunnel = Tunnel::new();
    let stream = message(b"abcdef");
    assert_eq!(tunnel.request(&[&stream[..7]]), b"ab");
    assert_eq!(tunnel.request(&[&stream]), b"abcdef");
}

//! The service behind the proxy: answers, and remembers what it was asked.

use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::thread;

use bytes::Bytes;

use super::http::{Headers, Message, Unsaid, read};
use super::http2::{self, headers};
use super::listener::Listener;

/// The body of its answers.
pub const ANSWER: &str = "hello\n";

/// A service on a free port of 127.0.0.1, until it is dropped.
pub struct App {
    listener: Listener,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// Added to every answer.
    headers: Headers,
    /// The body of every answer in HTTP/1.1.
    body: Vec<u8>,
    seen: Mutex<Vec<Message>>,
}

impl App {
    /// A service that speaks HTTP/1.1. Who asks for `/far` is sent to `/elsewhere`, and from there to `/there`.
    pub fn start() -> Self {
        Self::answering(&[])
    }

    /// One that adds headers to its answers.
    pub fn answering(headers: &[(&str, &str)]) -> Self {
        let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec())).collect();
        Self::listen(headers, ANSWER.into(), serve)
    }

    /// One that has this to give, and nothing else.
    pub fn serving(body: Vec<u8>) -> Self {
        Self::listen(Headers::new(), body, serve)
    }

    /// One that speaks HTTP/2 without TLS. What comes on the path `/echo` goes back as it comes.
    pub fn http2() -> Self {
        Self::listen(Headers::new(), Vec::new(), serve_http2)
    }

    fn listen(headers: Headers, body: Vec<u8>, serve: fn(TcpStream, &Arc<State>)) -> Self {
        let state = Arc::new(State { headers, body, ..State::default() });
        let shared = Arc::clone(&state);
        let listener = Listener::start(move |stream| {
            let state = Arc::clone(&shared);
            thread::spawn(move || serve(stream, &state));
        });
        Self { listener, state }
    }

    pub fn port(&self) -> u16 {
        self.listener.port()
    }

    /// How many requests have come, whole.
    pub fn count(&self) -> usize {
        self.state.seen.lock().unwrap().len()
    }

    /// The requests that have come, whole, since this was last asked.
    pub fn take(&self) -> Vec<Message> {
        std::mem::take(&mut self.state.seen.lock().unwrap())
    }
}

/// Serves a connection until it ends.
fn serve(stream: TcpStream, state: &Arc<State>) {
    let mut writer = stream.try_clone().unwrap();
    let mut reader = BufReader::new(stream);
    while let Ok(Some(request)) = read(&mut reader, Unsaid::Request) {
        let upgrade = request.header("upgrade");
        let head = request.start.starts_with("HEAD ");
        let to = [(" /far ", "elsewhere"), (" /elsewhere ", "there")];
        let to = to.iter().find(|(from, _)| request.start.contains(from)).map(|(_, to)| to);
        state.seen.lock().unwrap().push(request);
        if let Some(protocol) = upgrade {
            let answer =
                format!("HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: {protocol}\r\n\r\n");
            if writer.write_all(answer.as_bytes()).is_ok() {
                echo(&mut reader, &mut writer);
            }
            return;
        }
        let status = to.map_or("200 OK".to_owned(), |to| format!("302 Found\r\nlocation: http://app/{to}"));
        let mut answer = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n", state.body.len()).into_bytes();
        for (name, value) in &state.headers {
            answer.extend_from_slice(name.as_bytes());
            answer.extend_from_slice(b": ");
            answer.extend_from_slice(value);
            answer.extend_from_slice(b"\r\n");
        }
        answer.extend_from_slice(b"\r\n");
        if !head {
            answer.extend_from_slice(&state.body);
        }
        if writer.write_all(&answer).is_err() {
            return;
        }
    }
}

fn echo(reader: &mut impl Read, writer: &mut impl Write) {
    let mut bytes = [0; 4096];
    while let Ok(size @ 1..) = reader.read(&mut bytes) {
        if writer.write_all(&bytes[..size]).is_err() {
            return;
        }
    }
}

fn serve_http2(stream: TcpStream, state: &Arc<State>) {
    http2::serve(stream, |request, respond| answer_http2(request, respond, Arc::clone(state)));
}

async fn answer_http2(
    request: http::Request<h2::RecvStream>,
    mut respond: h2::server::SendResponse<Bytes>,
    state: Arc<State>,
) -> Result<(), h2::Error> {
    let (head, mut incoming) = request.into_parts();
    let echoes = head.uri.path() == "/echo";
    let mut early = if echoes { Some(respond.send_response(http::Response::new(()), false)?) } else { None };
    let mut body = Vec::new();
    while let Some(piece) = incoming.data().await {
        let piece = piece?;
        incoming.flow_control().release_capacity(piece.len())?;
        body.extend_from_slice(&piece);
        if let Some(outgoing) = &mut early {
            outgoing.send_data(piece, false)?;
        }
    }
    let trailers = incoming.trailers().await?.unwrap_or_default();
    state.seen.lock().unwrap().push(Message {
        start: format!("{} {} HTTP/2", head.method, head.uri.path()),
        headers: headers(&head.headers),
        body,
        trailers: headers(&trailers),
    });
    let mut outgoing = match early {
        Some(outgoing) => outgoing,
        None => {
            let mut outgoing = respond.send_response(http::Response::new(()), false)?;
            outgoing.send_data(Bytes::from_static(ANSWER.as_bytes()), false)?;
            outgoing
        }
    };
    let mut trailers = http::HeaderMap::new();
    trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
    outgoing.send_trailers(trailers)
}

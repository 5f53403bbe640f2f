//! HTTP/1.1 over a plain socket: messages that are read to the byte, and a client that may write whatever it likes.
//!
//! No library stands between a test and the wire, so a test sees what a library would hide: a header that is there
//! twice, a body after HEAD, a connection that is closed too soon.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};

use socket2::{Domain, Protocol, Socket, Type};

use super::server::DEADLINE;

/// Names in lower case, in the order of the wire.
pub type Headers = Vec<(String, Vec<u8>)>;

/// A request or a response.
#[derive(Clone, Debug, Default)]
pub struct Message {
    /// The first line, without its end.
    pub start: String,
    pub headers: Headers,
    pub body: Vec<u8>,
    pub trailers: Headers,
}

impl Message {
    /// The values of a header, one a line of the message.
    pub fn all(&self, name: &str) -> Vec<String> {
        values(&self.headers, name)
    }

    /// The value of a header that may be there once.
    ///
    /// # Panics
    /// Where it is there more than once.
    pub fn header(&self, name: &str) -> Option<String> {
        let mut values = self.all(name);
        assert!(values.len() <= 1, "{name} is there {} times: {values:?}", values.len());
        values.pop()
    }

    /// The value of a header as a number.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.header(name).map(|value| value.parse().unwrap_or_else(|_| panic!("{name}: {value}")))
    }

    /// The status of a response.
    pub fn status(&self) -> u16 {
        self.start.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a response has a status")
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

fn values(headers: &Headers, name: &str) -> Vec<String> {
    let of_that_name = headers.iter().filter(|(other, _)| other == name);
    of_that_name.map(|(_, value)| String::from_utf8_lossy(value).into_owned()).collect()
}

/// Whether a message has a body where its headers do not say.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Unsaid {
    /// A request without a length has none.
    Request,
    /// A response without a length goes on until the connection ends.
    Response,
    /// The response to a HEAD never has one, whatever its headers say.
    Head,
}

/// Reads a message, or `None` where the connection has ended before one.
pub fn read(from: &mut impl BufRead, unsaid: Unsaid) -> std::io::Result<Option<Message>> {
    let Some(start) = line(from)? else {
        return Ok(None);
    };
    let mut message =
        Message { start: String::from_utf8_lossy(&start).into_owned(), headers: fields(from)?, ..Message::default() };
    let bodiless = unsaid == Unsaid::Head
        || (unsaid == Unsaid::Response && (matches!(message.status(), 204 | 304) || message.status() < 200));
    if bodiless {
        return Ok(Some(message));
    }
    if message.all("transfer-encoding").iter().any(|coding| coding.eq_ignore_ascii_case("chunked")) {
        loop {
            let size = line(from)?.ok_or(ErrorKind::UnexpectedEof)?;
            let size = String::from_utf8_lossy(&size).into_owned();
            let size = usize::from_str_radix(size.split(';').next().unwrap_or_default().trim(), 16)
                .map_err(|_| std::io::Error::other(format!("a chunk of size {size:?}")))?;
            if size == 0 {
                message.trailers = fields(from)?;
                return Ok(Some(message));
            }
            let at = message.body.len();
            message.body.resize(at + size, 0);
            from.read_exact(&mut message.body[at..])?;
            line(from)?;
        }
    }
    if let Some(length) = message.number("content-length") {
        message.body.resize(usize::try_from(length).unwrap(), 0);
        from.read_exact(&mut message.body)?;
    } else if unsaid == Unsaid::Response {
        from.read_to_end(&mut message.body)?;
    }
    Ok(Some(message))
}

fn line(from: &mut impl BufRead) -> std::io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    if from.read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    match line.strip_suffix(b"\r\n") {
        Some(line) => Ok(Some(line.to_vec())),
        None => Err(ErrorKind::UnexpectedEof.into()),
    }
}

fn fields(from: &mut impl BufRead) -> std::io::Result<Headers> {
    let mut headers = Headers::new();
    loop {
        let line = line(from)?.ok_or(ErrorKind::UnexpectedEof)?;
        if line.is_empty() {
            return Ok(headers);
        }
        let colon = line.iter().position(|byte| *byte == b':').ok_or(ErrorKind::InvalidData)?;
        let name = String::from_utf8_lossy(&line[..colon]).to_ascii_lowercase();
        headers.push((name, line[colon + 1..].trim_ascii().to_vec()));
    }
}

/// A request to send.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: &'static str,
    pub path: String,
    pub version: &'static str,
    pub headers: Headers,
    pub body: Body,
}

/// How a request's body is sent.
#[derive(Clone, Debug)]
pub enum Body {
    None,
    /// With a content-length.
    Sized(Vec<u8>),
    /// In chunks of that size.
    Chunked(Vec<u8>, usize),
}

impl Request {
    pub fn new(method: &'static str, path: &str) -> Self {
        let headers = vec![("host".to_owned(), b"app.test".to_vec())];
        Self { method, path: path.to_owned(), version: "HTTP/1.1", headers, body: Body::None }
    }

    pub fn get(path: &str) -> Self {
        Self::new("GET", path)
    }

    /// Adds a line; one of that name may be there already.
    pub fn with(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.headers.push((name.to_owned(), value.as_ref().to_vec()));
        self
    }

    /// Asks this host, in place of the usual one.
    pub fn at_host(mut self, host: &str) -> Self {
        self.headers.retain(|(name, _)| name != "host");
        self.with("host", host)
    }

    pub fn body(mut self, body: Body) -> Self {
        self.body = body;
        self
    }

    pub fn version(mut self, version: &'static str) -> Self {
        self.version = version;
        self
    }

    /// The head as it goes out.
    pub fn head(&self) -> Vec<u8> {
        let mut head = format!("{} {} {}\r\n", self.method, self.path, self.version).into_bytes();
        let mut add = |name: &str, value: &[u8]| {
            head.extend_from_slice(name.as_bytes());
            head.extend_from_slice(b": ");
            head.extend_from_slice(value);
            head.extend_from_slice(b"\r\n");
        };
        for (name, value) in &self.headers {
            add(name, value);
        }
        match &self.body {
            Body::None => {}
            Body::Sized(body) => add("content-length", body.len().to_string().as_bytes()),
            Body::Chunked(..) => add("transfer-encoding", b"chunked"),
        }
        head.extend_from_slice(b"\r\n");
        head
    }

    /// The body as it goes out.
    pub fn encoded_body(&self) -> Vec<u8> {
        match &self.body {
            Body::None => Vec::new(),
            Body::Sized(body) => body.clone(),
            Body::Chunked(body, size) => {
                let mut encoded = Vec::with_capacity(body.len() + body.len() / size * 12 + 16);
                for chunk in body.chunks(*size) {
                    encoded.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
                    encoded.extend_from_slice(chunk);
                    encoded.extend_from_slice(b"\r\n");
                }
                encoded.extend_from_slice(b"0\r\n\r\n");
                encoded
            }
        }
    }
}

/// One connection of a client.
pub struct Client {
    stream: BufReader<TcpStream>,
}

impl Client {
    /// Connects from whatever address the system picks.
    pub fn connect(to: SocketAddr) -> Self {
        Self::over(TcpStream::connect(to).expect("the listener accepts"))
    }

    /// Connects from an address: all of 127.0.0.0/8 is this machine, so a client can be another one.
    pub fn connect_from(source: IpAddr, to: SocketAddr) -> Self {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP)).unwrap();
        socket.bind(&SocketAddr::new(source, 0).into()).expect("a loopback address can be bound");
        socket.connect(&to.into()).expect("the listener accepts");
        Self::over(socket.into())
    }

    fn over(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.set_write_timeout(Some(DEADLINE)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream: BufReader::new(stream) }
    }

    /// Writes bytes as they are.
    pub fn write(&mut self, bytes: &[u8]) {
        self.stream.get_mut().write_all(bytes).expect("the peer reads");
    }

    /// Sends a request and does not wait for its response.
    pub fn send(&mut self, request: &Request) {
        self.write(&request.head());
        let body = request.encoded_body();
        // Sent aside, since the peer may answer before it has read all of it.
        if !body.is_empty() {
            let mut stream = self.stream.get_ref().try_clone().unwrap();
            std::thread::spawn(move || stream.write_all(&body));
        }
    }

    /// The next response.
    pub fn receive(&mut self) -> Message {
        self.receive_to("GET")
    }

    /// The next response, to a request of that method.
    ///
    /// # Panics
    /// Where the connection ends, or no response comes before the deadline.
    pub fn receive_to(&mut self, method: &str) -> Message {
        let unsaid = if method == "HEAD" { Unsaid::Head } else { Unsaid::Response };
        read(&mut self.stream, unsaid)
            .unwrap_or_else(|error| panic!("no response to {method}: {error}"))
            .unwrap_or_else(|| panic!("the connection ended before the response to {method}"))
    }

    /// Sends a request and waits for its response.
    pub fn exchange(&mut self, request: &Request) -> Message {
        self.send(request);
        self.receive_to(request.method)
    }

    pub fn get(&mut self, path: &str) -> Message {
        self.exchange(&Request::get(path))
    }

    /// Sends a GET and waits for its response, where the connection may end before it.
    ///
    /// # Errors
    /// What the socket says, or that it ended.
    pub fn try_get(&mut self, path: &str) -> std::io::Result<Message> {
        self.stream.get_mut().write_all(&Request::get(path).head())?;
        read(&mut self.stream, Unsaid::Response)?.ok_or_else(|| ErrorKind::UnexpectedEof.into())
    }

    /// Reads exactly so many bytes, as after an upgrade.
    pub fn read_bytes(&mut self, number: usize) -> Vec<u8> {
        let mut bytes = vec![0; number];
        self.stream.read_exact(&mut bytes).expect("the peer writes");
        bytes
    }

    /// Whether the peer has closed the connection, now or before the deadline, without another byte.
    pub fn is_closed(&mut self) -> bool {
        matches!(self.stream.read(&mut [0]), Ok(0))
    }

    /// Leaves at once, with a reset instead of a farewell.
    pub fn abort(self) {
        let stream = self.stream.into_inner();
        let socket = Socket::from(stream);
        socket.set_linger(Some(std::time::Duration::ZERO)).unwrap();
    }
}

/// Sends that request on so many connections before any response is read, and returns the responses.
pub fn at_once(to: SocketAddr, number: usize, request: &Request) -> Vec<Message> {
    all_at_once((0..number).map(|_| Client::connect(to)).collect(), request)
}

/// The same, from as many addresses, at most 65,000: 127.1.0.0 and those that follow. So each has a bucket of its own.
pub fn at_once_from_each(to: SocketAddr, number: usize, request: &Request) -> Vec<Message> {
    all_at_once((0..number).map(|nth| Client::connect_from(IpAddr::V4(address(nth)), to)).collect(), request)
}

/// The address of that number, from 0.
pub fn address(nth: usize) -> Ipv4Addr {
    let [.., high, low] = nth.to_be_bytes();
    Ipv4Addr::new(127, 1, high, low)
}

fn all_at_once(mut clients: Vec<Client>, request: &Request) -> Vec<Message> {
    for client in &mut clients {
        client.send(request);
    }
    clients.iter_mut().map(|client| client.receive_to(request.method)).collect()
}

/// How many of the responses have that status.
pub fn with_status(responses: &[Message], status: u16) -> usize {
    responses.iter().filter(|response| response.status() == status).count()
}

//! HTTP/2 without TLS: a client for tests that send one request after the other, and a server.

use std::net::{SocketAddr, TcpStream};

use bytes::Bytes;
use h2::client::SendRequest;
use http::{HeaderMap, Request, Response};
use tokio::runtime::Runtime;

use super::http::{Headers, Message};
use super::server::DEADLINE;

/// The most that is sent in one piece.
const PIECE: usize = 16 * 1024;

/// One connection. It is looked after only while a request of it is under way.
pub struct Http2 {
    runtime: Runtime,
    requests: SendRequest<Bytes>,
}

impl Http2 {
    pub fn connect(to: SocketAddr) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let requests = runtime.block_on(async {
            let stream = tokio::net::TcpStream::connect(to).await.expect("the listener accepts");
            let (requests, connection) = h2::client::handshake(stream).await.expect("the peer speaks HTTP/2");
            tokio::spawn(connection);
            requests
        });
        Self { runtime, requests }
    }

    /// Sends a request with a body and trailers, and waits for the whole response. Its first line is made up.
    ///
    /// # Panics
    /// Where the stream fails, or no response comes before the deadline.
    pub fn exchange(&mut self, request: Request<()>, body: &[u8], trailers: Option<HeaderMap>) -> Message {
        let requests = self.requests.clone();
        let body = Bytes::copy_from_slice(body);
        self.runtime.block_on(async {
            let exchange = exchange(requests, request, body, trailers);
            tokio::time::timeout(DEADLINE, exchange).await.expect("a response before the deadline").expect("no reset")
        })
    }

    /// Opens a stream, hands its two halves to `talk`, and waits until that is done.
    pub fn talk<F, R>(
        &mut self,
        request: Request<()>,
        talk: impl FnOnce(h2::client::ResponseFuture, h2::SendStream<Bytes>) -> F,
    ) -> R
    where
        F: Future<Output = R>,
    {
        let requests = self.requests.clone();
        self.runtime.block_on(async {
            let mut requests = requests.ready().await.expect("the connection stands");
            let (response, stream) = requests.send_request(request, false).expect("a stream opens");
            tokio::time::timeout(DEADLINE, talk(response, stream)).await.expect("an end before the deadline")
        })
    }
}

async fn exchange(
    requests: SendRequest<Bytes>,
    request: Request<()>,
    body: Bytes,
    trailers: Option<HeaderMap>,
) -> Result<Message, h2::Error> {
    let mut requests = requests.ready().await?;
    let bare = body.is_empty() && trailers.is_none();
    let (response, stream) = requests.send_request(request, bare)?;
    let sending = tokio::spawn(async move {
        if !bare {
            // The peer may answer before it has read all of it, and stop reading then.
            let _ = send(stream, body, trailers).await;
        }
    });
    let message = receive(response.await?).await;
    sending.abort();
    message
}

async fn send(
    mut stream: h2::SendStream<Bytes>,
    mut body: Bytes,
    trailers: Option<HeaderMap>,
) -> Result<(), h2::Error> {
    while !body.is_empty() {
        stream.reserve_capacity(body.len().min(PIECE));
        let Some(capacity) = std::future::poll_fn(|context| stream.poll_capacity(context)).await else {
            return Ok(());
        };
        let piece = body.split_to(capacity?.min(body.len()));
        stream.send_data(piece, body.is_empty() && trailers.is_none())?;
    }
    match trailers {
        Some(trailers) => stream.send_trailers(trailers),
        None => Ok(()),
    }
}

async fn receive(response: Response<h2::RecvStream>) -> Result<Message, h2::Error> {
    let (head, mut stream) = response.into_parts();
    let body = whole(&mut stream).await?;
    let trailers = stream.trailers().await?.unwrap_or_default();
    Ok(Message {
        start: format!("HTTP/2 {}", head.status.as_u16()),
        headers: headers(&head.headers),
        body,
        trailers: headers(&trailers),
    })
}

/// All that comes on a stream before its trailers.
pub async fn whole(stream: &mut h2::RecvStream) -> Result<Vec<u8>, h2::Error> {
    let mut body = Vec::new();
    while let Some(piece) = stream.data().await {
        let piece = piece?;
        stream.flow_control().release_capacity(piece.len())?;
        body.extend_from_slice(&piece);
    }
    Ok(body)
}

/// Serves a connection until it ends. Its requests are answered at the same time.
pub fn serve<F>(stream: TcpStream, answer: impl Fn(Request<h2::RecvStream>, h2::server::SendResponse<Bytes>) -> F)
where
    F: Future<Output = Result<(), h2::Error>> + Send + 'static,
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        stream.set_nonblocking(true).unwrap();
        let stream = tokio::net::TcpStream::from_std(stream).unwrap();
        let Ok(mut connection) = h2::server::handshake(stream).await else { return };
        while let Some(Ok((request, respond))) = connection.accept().await {
            tokio::spawn(answer(request, respond));
        }
    });
}

/// Headers in the form of [`Message`].
pub fn headers(map: &HeaderMap) -> Headers {
    map.iter().map(|(name, value)| (name.as_str().to_owned(), value.as_bytes().to_vec())).collect()
}

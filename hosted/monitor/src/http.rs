//! HTTP/1.1 server of small documents, on Unix sockets and TCP.
//!
//! It serves one request per connection. The number of connections, the size of requests and the
//! time for them are limited, so that a slow or malicious client affects no other client.

use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{ALLOW, CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use schemars::JsonSchema;
use serde::Serialize;
use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc, oneshot};

/// Most simultaneous connections; further ones are closed.
pub const MAX_CONNECTIONS: usize = 16;
/// Time limit of a request and its response, event streams excepted.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time for clients to read the last lines after the end.
const LINGER: Duration = Duration::from_millis(500);
/// Longest request head in bytes.
const HEAD: usize = 8 << 10;

/// Handler of requests.
pub trait Service: Clone + Send + Sync + 'static {
    /// Returns the response to a request.
    fn reply(
        &self,
        request: Request<Incoming>,
    ) -> impl Future<Output = Result<Response<Payload>, ProblemDetails>> + Send;
}

/// Socket that accepts connections.
pub trait Listener {
    /// Its connections.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Accepts a connection.
    fn poll_stream(&self, context: &mut Context<'_>) -> Poll<io::Result<Self::Stream>>;
}

impl Listener for UnixListener {
    type Stream = UnixStream;

    fn poll_stream(&self, context: &mut Context<'_>) -> Poll<io::Result<UnixStream>> {
        self.poll_accept(context).map_ok(|(stream, _)| stream)
    }
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    fn poll_stream(&self, context: &mut Context<'_>) -> Poll<io::Result<TcpStream>> {
        self.poll_accept(context).map_ok(|(stream, _)| stream)
    }
}

/// Serves connections until `ended` receives something or its sender is dropped.
pub async fn serve(
    listener: impl Listener,
    service: impl Service,
    mut ended: oneshot::Receiver<()>,
) {
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let accepted = std::future::poll_fn(|context| {
            if Pin::new(&mut ended).poll(context).is_ready() {
                return Poll::Ready(None);
            }
            listener.poll_stream(context).map(Some)
        });
        let Some(accepted) = accepted.await else { break };
        let Ok(stream) = accepted else {
            // Most likely file descriptors are exhausted; closing connections free some.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let Ok(permit) = Arc::clone(&room).try_acquire_owned() else { continue };
        let service = service.clone();
        tokio::spawn(async move {
            connection(stream, &service, TIMEOUT).await;
            drop(permit);
        });
    }
    let all = u32::try_from(MAX_CONNECTIONS).unwrap_or(u32::MAX);
    // All permits are available again when all connections are closed.
    let _ = tokio::time::timeout(LINGER, room.acquire_many(all)).await;
}

/// Serves one request of a connection. A client may close its direction after the request, as
/// `nc -N` does, and still gets the response; a stream of events ends then. `limit`: time for the
/// request and its response, and for the rest of a stream after its end.
async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    service: &impl Service,
    limit: Duration,
) {
    let (replies, lines) = (AtomicBool::new(false), OnceLock::new());
    let hidden = Mutex::new(None::<Waker>);
    let handler = service_fn(|request| {
        let (lines, hidden) = (&lines, &hidden);
        // Before hyper reads on.
        replies.store(true, Relaxed);
        async move {
            let reply = service.reply(request).await;
            let reply = reply.unwrap_or_else(ProblemDetails::into_response);
            if let Some(rest) = &reply.body().rest {
                lines.get_or_init(|| rest.clone());
            }
            if let Some(end) = hidden.lock().unwrap_or_else(PoisonError::into_inner).take() {
                end.wake();
            }
            Ok::<_, Infallible>(reply)
        }
    });
    let stream = Patient { stream, replies: &replies, lines: &lines, hidden: &hidden };
    let mut connection = std::pin::pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limit)
            .max_buf_size(HEAD)
            .keep_alive(false)
            .serve_connection(TokioIo::new(stream), handler)
    );
    // Errors of the connection concern only the client.
    let mut is_ending = false;
    while tokio::time::timeout(limit, &mut connection).await.is_err() {
        match lines.get() {
            // hyper sees the end only once the client has read what precedes it.
            Some(lines) if !is_ending => is_ending = lines.has_ended(),
            _ => break,
        }
    }
}

/// Stream whose end hyper does not see while a response is made: it would make none. hyper's own
/// setting for that (`half_close`) misses clients of event streams that have gone.
struct Patient<'a, S> {
    stream: S,
    /// A request has arrived.
    replies: &'a AtomicBool,
    /// Lines of a response that is a stream of events.
    lines: &'a OnceLock<Lines>,
    /// Wakes the connection, whose end was hidden.
    hidden: &'a Mutex<Option<Waker>>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<'_, S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        room: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = room.remaining();
        let read = Pin::new(&mut self.stream).poll_read(context, room);
        let has_ended = matches!(read, Poll::Ready(Ok(()))) && room.remaining() == before;
        if !has_ended || !self.replies.load(Relaxed) || self.lines.get().is_some() {
            return read;
        }
        let waker = context.waker().clone();
        *self.hidden.lock().unwrap_or_else(PoisonError::into_inner) = Some(waker);
        Poll::Pending
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<'_, S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Response body: a text, then streamed lines.
pub struct Payload {
    /// Text that comes first.
    pub text: Option<Bytes>,
    /// Lines after it.
    pub rest: Option<Lines>,
}

/// Streamed lines, shared by a body and the connection that sends it.
#[derive(Clone)]
pub struct Lines(Arc<Mutex<mpsc::Receiver<Bytes>>>);

impl From<mpsc::Receiver<Bytes>> for Lines {
    fn from(receiver: mpsc::Receiver<Bytes>) -> Self {
        Self(Arc::new(Mutex::new(receiver)))
    }
}

impl Lines {
    fn receiver(&self) -> MutexGuard<'_, mpsc::Receiver<Bytes>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether no lines follow those that wait to be sent.
    fn has_ended(&self) -> bool {
        self.receiver().is_closed()
    }
}

impl Body for Payload {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let frame = |bytes: Bytes| Ok(Frame::data(bytes));
        match (self.text.take(), &self.rest) {
            (Some(text), _) => Poll::Ready(Some(frame(text))),
            (None, Some(rest)) => rest.receiver().poll_recv(context).map(|line| line.map(frame)),
            (None, None) => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.text.is_none() && self.rest.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.rest {
            None => SizeHint::with_exact(self.text.as_ref().map_or(0, Bytes::len) as u64),
            Some(_) => SizeHint::default(),
        }
    }
}

/// Refusal of a request (RFC 9457).
#[derive(Debug, Serialize, JsonSchema)]
pub struct ProblemDetails {
    /// Status code.
    pub status: u16,
    /// Meaning of the status code.
    pub title: String,
    /// Reason of the refusal of this request.
    pub detail: String,
    #[serde(skip)]
    allow: Option<&'static str>,
}

impl ProblemDetails {
    /// Creates a refusal with this reason.
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        let title = status.canonical_reason().unwrap_or_default().to_owned();
        Self { status: status.as_u16(), title, detail: detail.into(), allow: None }
    }

    fn into_response(self) -> Response<Payload> {
        // Numbers and strings always serialize.
        let text = serde_json::to_vec(&self).unwrap_or_default();
        let mut response = response("application/problem+json", text);
        *response.status_mut() =
            StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        if let Some(allow) = self.allow {
            response.headers_mut().insert(ALLOW, hyper::header::HeaderValue::from_static(allow));
        }
        response
    }
}

/// Creates the response with a text of this media type.
pub fn response(kind: &'static str, text: impl Into<Bytes>) -> Response<Payload> {
    let mut response = Response::new(Payload { text: Some(text.into()), rest: None });
    let kind = hyper::header::HeaderValue::from_static(kind);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

/// Creates the response with a value as JSON.
pub fn json<T: Serialize>(value: &T) -> Result<Response<Payload>, ProblemDetails> {
    let text = serde_json::to_vec(value).map_err(|error| {
        ProblemDetails::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
    })?;
    Ok(response("application/json", text))
}

/// Path of a resource, its method, and its summary.
pub type Resource = (&'static str, &'static str, &'static str);

/// Checks that the resource exists, with this method, and that the request has no body.
pub fn check_request(
    request: &Request<Incoming>,
    resources: &[Resource],
) -> Result<(), ProblemDetails> {
    let headers = request.headers();
    let is_empty = headers.get(CONTENT_LENGTH).is_none_or(|length| length == "0");
    if !is_empty || headers.contains_key(TRANSFER_ENCODING) {
        let text = "request bodies are not supported";
        return Err(ProblemDetails::new(StatusCode::PAYLOAD_TOO_LARGE, text));
    }
    let path = request.uri().path();
    let Some(&(_, method, _)) = resources.iter().find(|known| known.0 == path) else {
        return Err(ProblemDetails::new(
            StatusCode::NOT_FOUND,
            format!("no such resource: {path}"),
        ));
    };
    if request.method().as_str() != method {
        let mut problem = ProblemDetails::new(
            StatusCode::METHOD_NOT_ALLOWED,
            format!("{path} supports {method} only, not {}", request.method()),
        );
        problem.allow = Some(method);
        return Err(problem);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// Replies after a moment: with a text, with events that do not come, or with the last events.
    #[derive(Clone)]
    struct Late;

    impl Service for Late {
        async fn reply(
            &self,
            request: Request<Incoming>,
        ) -> Result<Response<Payload>, ProblemDetails> {
            tokio::time::sleep(Duration::from_millis(50)).await;
            let mut response = response("text/plain", "late");
            if request.uri().path() == "/events" {
                let (sender, events) = mpsc::channel(1);
                std::mem::forget(sender);
                response.body_mut().rest = Some(events.into());
            }
            if request.uri().path() == "/last-events" {
                let (sender, events) = mpsc::channel(1);
                sender.send(vec![b'x'; 1 << 20].into()).await.unwrap();
                response.body_mut().rest = Some(events.into());
            }
            Ok(response)
        }
    }

    fn run<T>(act: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(act)
    }

    fn exchange(request: &str) -> String {
        run(async {
            let (mut client, server) = UnixStream::pair().unwrap();
            client.write_all(request.as_bytes()).await.unwrap();
            client.shutdown().await.unwrap();
            connection(server, &Late, TIMEOUT).await;
            let mut text = String::new();
            client.read_to_string(&mut text).await.unwrap();
            text
        })
    }

    #[test]
    fn a_client_that_sends_no_more_gets_its_response() {
        assert!(exchange("GET /late HTTP/1.0\r\n\r\n").ends_with("\r\n\r\nlate"));
        // They end, and so do requests that are not complete.
        assert!(exchange("GET /events HTTP/1.0\r\n\r\n").starts_with("HTTP/1.0 200"));
        assert_eq!(exchange("GET /late"), "");
    }

    #[test]
    fn a_client_that_does_not_read_the_last_events_is_disconnected() {
        run(async {
            let (mut client, server) = UnixStream::pair().unwrap();
            client.write_all(b"GET /last-events HTTP/1.0\r\n\r\n").await.unwrap();
            let served = connection(server, &Late, Duration::from_millis(200));
            let ended = tokio::time::timeout(Duration::from_secs(60), served).await;
            ended.expect("the connection stays open");
        });
    }
}

//! Client of a VM's control socket.

use hosted_command::failure::{self, Failure};
use hyper::body::{Body, Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::future::poll_fn;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::time::Duration;
use tokio::net::UnixStream;

/// Exit code: the VM refuses the request.
const REFUSED: u8 = 1;
/// Time limit of a response.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Longest response in bytes.
const MAX_BYTES: usize = 1 << 20;

/// Client of the VM that serves this socket.
#[derive(Clone, Copy, Debug)]
pub struct ControlClient<'a> {
    /// Control socket.
    pub socket: &'a Path,
}

impl ControlClient<'_> {
    fn failed(&self, text: impl std::fmt::Display) -> Failure {
        Failure::new(failure::UNAVAILABLE, format!("{}: {text}", self.socket.display()))
    }

    async fn send(&self, method: &str, path: &str) -> Result<Response<Incoming>, Failure> {
        let stream =
            UnixStream::connect(self.socket).await.map_err(|error| match error.kind() {
                io::ErrorKind::ConnectionRefused => {
                    self.failed("stale control socket: no VM listens on it")
                }
                _ => Failure::file("connect to the control socket", self.socket, &error),
            })?;
        let handshake = http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|error| self.failed(error))?;
        // The connection task ends with the response.
        tokio::spawn(connection);
        let request = Request::builder().method(method).uri(path).header("host", "parador");
        let request = request.body(String::new()).map_err(|error| self.failed(error))?;
        sender.send_request(request).await.map_err(|error| self.failed(error))
    }

    /// Sends a request and returns the body of a successful response.
    ///
    /// # Errors
    /// The VM refuses it: 1. No VM, or no response in time: 66, 69 or 77.
    pub async fn answer(&self, method: &str, path: &str) -> Result<Incoming, Failure> {
        let answer = tokio::time::timeout(TIMEOUT, self.send(method, path)).await;
        let answer = answer.unwrap_or_else(|_| Err(self.failed("no response within 10 s")))?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer.into_body());
        }
        let problem = self.whole(answer.into_body()).await?;
        let problem: Value = serde_json::from_slice(&problem).unwrap_or_default();
        let detail = problem["detail"].as_str().unwrap_or("no details in the response");
        let code = if status.as_u16() == 409 { REFUSED } else { failure::UNAVAILABLE };
        Err(Failure::new(code, format!("{} ({status})", detail)))
    }

    /// Returns the next part of a body; `None`: its end.
    pub async fn next(&self, body: &mut Incoming) -> Option<Result<Bytes, Failure>> {
        loop {
            let frame = poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await?;
            match frame.map(|frame| frame.into_data()) {
                Ok(Ok(data)) => return Some(Ok(data)),
                // Trailers, no data.
                Ok(Err(_)) => {}
                Err(error) => return Some(Err(self.failed(error))),
            }
        }
    }

    async fn whole(&self, mut body: Incoming) -> Result<Vec<u8>, Failure> {
        let mut all = Vec::new();
        while let Some(data) = self.next(&mut body).await {
            all.extend(data?);
            if all.len() > MAX_BYTES {
                return Err(self.failed("the response exceeds 1 MiB"));
            }
        }
        Ok(all)
    }

    /// Sends a request and returns the whole body of a successful response.
    ///
    /// # Errors
    /// As those of [`ControlClient::answer`]; it is too long, or incomplete after 10 s.
    pub async fn ask(&self, method: &str, path: &str) -> Result<Vec<u8>, Failure> {
        let body = self.answer(method, path).await?;
        let whole = tokio::time::timeout(TIMEOUT, self.whole(body)).await;
        whole.unwrap_or_else(|_| Err(self.failed("the response is incomplete after 10 s")))
    }

    /// Sends a request and reads the response, which is JSON.
    ///
    /// # Errors
    /// As those of [`ControlClient::ask`]; it has another form.
    pub async fn json<T: DeserializeOwned>(&self, method: &str, path: &str) -> Result<T, Failure> {
        serde_json::from_slice(&self.ask(method, path).await?).map_err(|error| self.failed(error))
    }
}

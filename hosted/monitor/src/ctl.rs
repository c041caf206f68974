//! `parador ctl`: client of a VM's control socket.

use clap::{Args, Subcommand};
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::output::print;
use hyper::body::{Body, Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::future::poll_fn;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};

/// Exit code: the VM refuses the request.
const REFUSED: u8 = 1;
/// Time limit of a response.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Longest response in bytes.
const MAX_BYTES: usize = 1 << 20;
/// Interval between two tables of `top`.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Options of `parador ctl`.
#[derive(Debug, Args)]
pub struct Options {
    /// Control socket, as created by `parador run --api-socket`.
    #[arg(short, long, value_name = "SOCKET", env = "PARADOR_SOCKET")]
    socket: PathBuf,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Clone, Copy, Debug, Subcommand)]
enum Verb {
    /// Print configuration and state of the VM (JSON).
    Status,
    /// Print statistics: events handled and host resources used (JSON).
    Stats,
    /// Print statistics for Prometheus.
    Metrics,
    /// Print past and new events, one JSON object per line, until the VM exits.
    Events,
    /// Start a VM that waits for it (parador run --wait-boot).
    Boot,
    /// Pause the guest.
    Pause,
    /// Resume the guest.
    Resume,
    /// Reset the VM.
    Reset,
    /// Press the ACPI power button.
    Shutdown {
        /// Kill the VM, whatever the guest does.
        #[arg(long)]
        force: bool,
    },
    /// Print a table of statistics every second.
    Top {
        /// Number of tables [default: until the VM exits].
        #[arg(short = 'n', long, value_name = "COUNT")]
        count: Option<u64>,
    },
}

/// Sends the request, prints the response and returns the exit code.
pub fn run(options: &Options) -> Result<u8, Failure> {
    let runtime = Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = runtime.os_error("wait for answers")?;
    let client = Client { runtime, socket: &options.socket };
    match options.verb {
        Verb::Status => client.show("/v1/vm"),
        Verb::Stats => client.show("/v1/vm/stats"),
        Verb::Metrics => print(text(client.ask("GET", "/v1/metrics")?)),
        Verb::Events => client.events(),
        Verb::Boot => client.put("/v1/vm/boot"),
        Verb::Pause => client.put("/v1/vm/pause"),
        Verb::Resume => client.put("/v1/vm/resume"),
        Verb::Reset => client.put("/v1/vm/reset"),
        Verb::Shutdown { force: false } => client.put("/v1/vm/shutdown"),
        Verb::Shutdown { force: true } => client.put("/v1/vm/shutdown?force"),
        Verb::Top { count } => client.top(count),
    }
    .map(|()| 0)
}

struct Client<'a> {
    runtime: Runtime,
    socket: &'a Path,
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Client<'_> {
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
    async fn answer(&self, method: &str, path: &str) -> Result<Incoming, Failure> {
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

    async fn next(&self, body: &mut Incoming) -> Option<Result<Bytes, Failure>> {
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

    fn ask(&self, method: &str, path: &str) -> Result<Vec<u8>, Failure> {
        self.runtime.block_on(async {
            let body = self.answer(method, path).await?;
            let whole = tokio::time::timeout(TIMEOUT, self.whole(body)).await;
            whole.unwrap_or_else(|_| Err(self.failed("the response is incomplete after 10 s")))
        })
    }

    fn json(&self, method: &str, path: &str) -> Result<Value, Failure> {
        serde_json::from_slice(&self.ask(method, path)?).map_err(|error| self.failed(error))
    }

    fn show(&self, path: &str) -> Result<(), Failure> {
        print(format!("{:#}\n", self.json("GET", path)?))
    }

    fn put(&self, path: &str) -> Result<(), Failure> {
        let state = self.json("PUT", path)?;
        print(format!("{}\n", state["state"].as_str().unwrap_or("done")))
    }

    fn events(&self) -> Result<(), Failure> {
        self.runtime.block_on(async {
            let mut body = self.answer("GET", "/v1/events").await?;
            while let Some(data) = self.next(&mut body).await {
                print(text(data?.to_vec()))?;
            }
            Ok(())
        })
    }

    fn top(&self, count: Option<u64>) -> Result<(), Failure> {
        let mut former: Option<Value> = None;
        let mut tables = 0;
        loop {
            let now = match self.json("GET", "/v1/vm/stats") {
                Ok(now) => now,
                // The VM answered before, so it has exited since.
                Err(_) if former.is_some() => return Ok(()),
                Err(failure) => return Err(failure),
            };
            let clear = if io::stdout().is_terminal() { "\x1b[H\x1b[J" } else { "" };
            print(format!("{clear}{}", table(&now, former.as_ref())))?;
            tables += 1;
            if count.is_some_and(|count| tables >= count) {
                return Ok(());
            }
            former = Some(now);
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Formats statistics; `former` are those of the previous second.
fn table(now: &Value, former: Option<&Value>) -> String {
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let seconds = |value: &Value| number(value) as f64 / 1000.0;
    let mebibytes = |value: &Value| number(value) >> 20;
    // Counters only grow, unless the guest tampers with them or the VM was reset.
    let grown = |of: &dyn Fn(&Value) -> u64| of(now).saturating_sub(former.map_or(of(now), of));
    let passed = grown(&|value| number(&value["uptime_ms"])).max(1) as f64 / 1000.0;
    let busy = grown(&|value| number(&value["user_ms"]) + number(&value["system_ms"]));
    let mut text = format!(
        "{}  up {:.1} s  processes {}  CPU {:.0}%  memory {} of {} MiB\n",
        now["state"].as_str().unwrap_or("?"),
        seconds(&now["uptime_ms"]),
        number(&now["processes"]),
        busy as f64 / 10.0 / passed,
        mebibytes(&now["memory_used_bytes"]),
        mebibytes(&now["memory_bytes"]),
    );
    text += &format!("{:>12} {:>12}\n", "total", "per second");
    for part in ["counters", "sites"] {
        let Some(all) = now["wedge"][part].as_object() else { continue };
        for (name, total) in all {
            let rate = grown(&|value| number(&value["wedge"][part][name])) as f64 / passed;
            text += &format!("{:>12} {rate:>12.0}  {}\n", number(total), name.replace('_', " "));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_table() {
        let at = |uptime: u64, calls: u64| {
            json!({
                "state": "running", "uptime_ms": uptime, "processes": 4, "user_ms": uptime / 2, "system_ms": 0,
                "memory_bytes": 1 << 30, "memory_used_bytes": 64 << 20,
                "wedge": { "counters": { "calls_by_signal": calls }, "sites": {} },
            })
        };
        let text = table(&at(3000, 250), Some(&at(2000, 50)));
        assert!(
            text.starts_with("running  up 3.0 s  processes 4  CPU 50%  memory 64 of 1024 MiB\n"),
            "{text}"
        );
        assert!(text.ends_with("         250          200  calls by signal\n"), "{text}");
        assert!(table(&at(1, 1), None).contains("CPU 0%"));
        // A restarted VM.
        assert!(table(&at(10, 1), Some(&at(2000, 50))).contains("CPU 0%"));
    }
}

//! `parador ctl`: client of a VM's control socket.

use crate::client::ControlClient;
use crate::config::name::VmName;
use crate::runtime::RuntimeFolder;
use crate::statistics::latency::LatencyHistogram;
use crate::verb::Verb;
use clap::Args;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::output::print;
use hosted_command::value::Size;
use serde_json::Value;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

/// Interval between two tables of `top`.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Options of `parador ctl`.
#[derive(Debug, Args)]
pub struct Options {
    /// Name of the VM, as of `parador run --name`.
    #[arg(value_name = "NAME", value_parser = VmName::parse)]
    name: Option<VmName>,
    /// Control socket, as created by `parador run --api-socket`; NAME takes precedence.
    #[arg(short, long, value_name = "SOCKET", env = "PARADOR_SOCKET")]
    socket: Option<PathBuf>,
    #[command(subcommand)]
    verb: Verb,
}

impl Options {
    /// Returns the path of the control socket.
    fn socket(&self) -> Result<PathBuf, Failure> {
        match (&self.name, &self.socket) {
            (Some(name), _) => RuntimeFolder::existing()?.socket_of(name),
            (None, Some(socket)) => Ok(socket.clone()),
            (None, None) => Err(Failure::new(failure::USAGE, "no VM is named")
                .help("use `parador ctl NAME ...` or `parador ctl -s SOCKET ...`")),
        }
    }
}

/// Returns path and query that set the balloon's target size in bytes, which are whole pages.
fn balloon_path(bytes: u64) -> String {
    format!("/v1/vm/balloon?size={}", Size(bytes).text())
}

fn runtime() -> Result<Runtime, Failure> {
    let runtime = Builder::new_current_thread().enable_io().enable_time().build();
    runtime.os_error("wait for answers")
}

/// Sets the target size of the balloon of the VM with this control socket, in bytes of whole pages.
///
/// # Errors
/// No VM serves the socket (66), or it refuses.
pub fn set_balloon(socket: &Path, bytes: u64) -> Result<(), Failure> {
    let client = ControlClient { socket };
    runtime()?.block_on(client.ask("PUT", &balloon_path(bytes))).map(drop)
}

/// Sends the request, prints the response and returns the exit code.
pub fn run(options: &Options) -> Result<u8, Failure> {
    let socket = options.socket()?;
    let client = Requests { runtime: runtime()?, client: ControlClient { socket: &socket } };
    match options.verb {
        Verb::Status => client.show("/v1/vm"),
        Verb::Stats => client.show("/v1/vm/stats"),
        Verb::Metrics => print(text(client.ask("GET", "/v1/metrics")?)),
        Verb::Events => client.events(),
        Verb::Boot => client.put("/v1/vm/boot"),
        Verb::Pause => client.put("/v1/vm/pause"),
        Verb::Resume => client.put("/v1/vm/resume"),
        Verb::Reset => client.put("/v1/vm/reset"),
        Verb::Balloon { size } => client.put(&balloon_path(size.0)),
        Verb::Shutdown { force: false } => client.put("/v1/vm/shutdown"),
        Verb::Shutdown { force: true } => client.put("/v1/vm/shutdown?force"),
        Verb::Top { count } => client.top(count),
    }
    .map(|()| 0)
}

/// Requests to one VM, one at a time.
struct Requests<'a> {
    runtime: Runtime,
    client: ControlClient<'a>,
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Requests<'_> {
    fn ask(&self, method: &str, path: &str) -> Result<Vec<u8>, Failure> {
        self.runtime.block_on(self.client.ask(method, path))
    }

    fn json(&self, method: &str, path: &str) -> Result<Value, Failure> {
        self.runtime.block_on(self.client.json(method, path))
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
            let mut body = self.client.answer("GET", "/v1/events").await?;
            while let Some(data) = self.client.next(&mut body).await {
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
    let row = |total: u64, rate: f64, name: &str| format!("{total:>12} {rate:>12.0}  {name}\n");
    for (part, name, ops) in [
        ("disks", "name", ["read", "write"]),
        ("nets", "name", ["receive", "transmit"]),
        ("shares", "tag", ["read", "write"]),
    ] {
        for (index, device) in now[part].as_array().into_iter().flatten().enumerate() {
            for op in ops {
                let bytes = |value: &Value| number(&value[part][index][op]["bytes"]);
                let name = format!("{} {op} bytes", device[name].as_str().unwrap_or("?"));
                text += &row(bytes(now), grown(&bytes) as f64 / passed, &name);
            }
        }
    }
    for part in ["counters", "sites"] {
        let Some(all) = now["wedge"][part].as_object() else { continue };
        for (name, total) in all {
            let rate = grown(&|value| number(&value["wedge"][part][name])) as f64 / passed;
            text += &row(number(total), rate, &name.replace('_', " "));
        }
    }
    text + &times(now, former)
}

/// Formats the 99th percentiles of the requests' times in microseconds, rounded up to the bounds of
/// the buckets: since the start, and in the last second. Operations without requests are left out.
fn times(now: &Value, former: Option<&Value>) -> String {
    let mut text = String::new();
    for (part, name, ops) in [
        ("disks", "name", &["read", "write", "flush", "discard"][..]),
        ("nets", "name", &["transmit"]),
        ("shares", "tag", &["read", "write", "other"]),
    ] {
        for (index, device) in now[part].as_array().into_iter().flatten().enumerate() {
            for op in ops {
                let of = |value: &Value| -> LatencyHistogram {
                    let histogram = &value[part][index][op]["histogram"];
                    serde_json::from_value(histogram.clone()).unwrap_or_default()
                };
                let all = of(now);
                let Some(time) = all.percentile_99() else { continue };
                let latest = former.and_then(|former| all.since(&of(former)).percentile_99());
                let latest =
                    latest.map_or_else(|| "-".to_owned(), |time| (time / 1000).to_string());
                let device = device[name].as_str().unwrap_or("?");
                text += &format!("{:>12} {latest:>12}  {device} {op} p99 us\n", time / 1000);
            }
        }
    }
    if text.is_empty() { text } else { format!("{:>12} {:>12}\n{text}", "all", "last second") }
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
                "disks": [{
                    "name": "disk0", "read": { "bytes": 7 },
                    "write": { "bytes": calls, "histogram": [calls, 3] },
                }],
                "wedge": { "counters": { "calls_by_signal": calls }, "sites": {} },
            })
        };
        let text = table(&at(3000, 250), Some(&at(2000, 50)));
        assert!(
            text.starts_with("running  up 3.0 s  processes 4  CPU 50%  memory 64 of 1024 MiB\n"),
            "{text}"
        );
        assert!(text.contains("         250          200  disk0 write bytes\n"), "{text}");
        assert!(text.contains("         250          200  calls by signal\n"), "{text}");
        assert!(text.ends_with("           8            4  disk0 write p99 us\n"), "{text}");
        assert!(!text.contains("read p99"), "no request: {text}");
        assert!(table(&at(1, 1), None).contains("CPU 0%"));
        // A restarted VM.
        assert!(table(&at(10, 1), Some(&at(2000, 50))).contains("CPU 0%"));
    }
}

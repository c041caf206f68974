//! All named VMs of the user: `parador ps`, `parador top`, `parador metrics`.

use crate::client::ControlClient;
use crate::config::name::VmName;
use crate::http::{self, Payload, ProblemDetails, Resource, Service, check_request, response};
use crate::runtime::RuntimeFolder;
use crate::state::State;
use crate::statistics::vcpus::VcpuTime;
use crate::statistics::{Statistics, prometheus};
use clap::Args;
use hosted_command::failure::{Failure, IoContext};
use hosted_command::messages::{Level, say};
use hosted_command::output::print;
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;
use std::io::{self, ErrorKind, IsTerminal};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::net::{TcpListener, UnixStream};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

/// Time limit of a VM for its answers; VMs are asked at the same time.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Interval between two tables of `top`, and between the two measurements of `top --once`.
const INTERVAL: Duration = Duration::from_secs(1);
/// Longest command that is shown, in characters.
const SHOWN: usize = 60;

/// Warnings of the last query: `top` asks each second, and monitoring systems often.
static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Options of `parador ps`.
#[derive(Debug, Args)]
pub struct PsOptions {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Options of `parador top`.
#[derive(Debug, Args)]
pub struct TopOptions {
    /// Print one table, of one second.
    #[arg(long)]
    once: bool,
}

/// Options of `parador metrics`.
#[derive(Debug, Args)]
pub struct MetricsOptions {
    /// Serve them at http://ADDRESS/metrics, until a signal ends `parador` [default: print them].
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
}

/// Part of a VM's own description ([`crate::control::VmInfo`]).
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Described {
    backend: String,
    pid: u32,
    command: Vec<String>,
}

/// VM that has answered.
struct VmReport {
    name: VmName,
    described: Described,
    statistics: Statistics,
}

/// Line of `parador ps --json`.
#[derive(Debug, Serialize)]
struct Row<'a> {
    name: &'a str,
    /// Process of `parador run`.
    pid: u32,
    backend: &'a str,
    state: State,
    vcpus: u8,
    memory_bytes: u64,
    uptime_ms: u64,
    /// Command line of `parador run`.
    command: &'a [String],
}

impl VmReport {
    /// Asks the VM with this control socket.
    async fn ask(name: VmName, socket: PathBuf) -> Result<Self, Failure> {
        let client = ControlClient { socket: &socket };
        let described = client.json("GET", "/v1/vm").await?;
        let statistics = client.json("GET", "/v1/vm/stats").await?;
        Ok(Self { name, described, statistics })
    }

    fn row(&self) -> Row<'_> {
        let Self { name, described: Described { backend, pid, command }, statistics } = self;
        let &Statistics { state, vcpus, memory_bytes, uptime_ms, .. } = statistics;
        let name = name.as_str();
        Row { name, pid: *pid, backend, state, vcpus, memory_bytes, uptime_ms, command }
    }
}

/// Asks all VMs. One that has ended meanwhile is left out; others that do not answer are reported.
async fn reports() -> Result<Vec<VmReport>, Failure> {
    let (reports, warnings) = ask_all(RuntimeFolder::existing()?.vms()?).await;
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    new_warnings(warnings, &mut said).iter().for_each(|text| say(Level::Warn, text));
    Ok(reports)
}

/// Returns the warnings that the former query did not have.
fn new_warnings(warnings: Vec<String>, former: &mut BTreeSet<String>) -> Vec<String> {
    let now = BTreeSet::from_iter(warnings);
    let new = now.difference(former).cloned().collect();
    *former = now;
    new
}

/// Asks the VMs with these control sockets; returns the warnings of those that do not answer, too.
async fn ask_all(vms: Vec<(VmName, PathBuf)>) -> (Vec<VmReport>, Vec<String>) {
    let asked = vms.into_iter().map(|(name, socket)| {
        let asked = VmReport::ask(name.clone(), socket.clone());
        (name, socket, tokio::spawn(tokio::time::timeout(TIMEOUT, asked)))
    });
    let (mut reports, mut warnings) = (Vec::new(), Vec::new());
    for (name, socket, asked) in asked.collect::<Vec<_>>() {
        let name = name.as_str();
        match asked.await {
            Ok(Ok(Ok(report))) => reports.push(report),
            Ok(Ok(Err(_))) if has_ended(&socket).await => {}
            Ok(Ok(Err(failure))) => {
                warnings.push(format!("cannot query the VM {name}: {}", failure.message()));
            }
            _ => warnings.push(format!("the VM {name} does not answer")),
        }
    }
    (reports, warnings)
}

/// Returns whether no process serves a control socket any more.
async fn has_ended(socket: &Path) -> bool {
    let kind = UnixStream::connect(socket).await.map_err(|error| error.kind());
    matches!(kind, Err(ErrorKind::NotFound | ErrorKind::ConnectionRefused))
}

fn runtime() -> Result<Runtime, Failure> {
    Builder::new_current_thread().enable_io().enable_time().build().os_error("wait for answers")
}

/// Lists the VMs.
///
/// # Errors
/// The runtime folder is another user's: 77. Standard output cannot be written.
pub fn ps(options: &PsOptions) -> Result<u8, Failure> {
    let reports = runtime()?.block_on(reports())?;
    let rows: Vec<Row<'_>> = reports.iter().map(VmReport::row).collect();
    if options.json {
        let text = serde_json::to_string_pretty(&rows).map_err(io::Error::from);
        print(text.os_error("write JSON")? + "\n")?;
        return Ok(0);
    }
    let mut text = format!(
        "{:<16} {:>8} {:<8} {:<9} {:>5} {:>7} {:>10} {}\n",
        "NAME", "PID", "BACKEND", "STATE", "VCPUS", "MEMORY", "UPTIME", "COMMAND"
    );
    for row in rows {
        let command: String = row.command.join(" ").chars().take(SHOWN).collect();
        let (memory, uptime) = (row.memory_bytes >> 20, row.uptime_ms / 1000);
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{:<16} {:>8} {:<8} {:<9} {:>5} {memory:>6}M {uptime:>9}s {command}",
            row.name, row.pid, row.backend, row.state, row.vcpus,
        );
    }
    print(text)?;
    Ok(0)
}

/// Prints tables of what the VMs use, one each second.
///
/// # Errors
/// As those of [`ps`].
pub fn top(options: &TopOptions) -> Result<u8, Failure> {
    let runtime = runtime()?;
    let by_name = |reports: Vec<VmReport>| -> HashMap<VmName, Statistics> {
        reports.into_iter().map(|report| (report.name, report.statistics)).collect()
    };
    let mut former = by_name(runtime.block_on(reports())?);
    loop {
        std::thread::sleep(INTERVAL);
        let now = runtime.block_on(reports())?;
        let is_screen = io::stdout().is_terminal() && !options.once;
        let clear = if is_screen { "\x1b[H\x1b[J" } else { "" };
        let lines = now
            .iter()
            .map(|report| line(report.name.as_str(), &report.statistics, former.get(&report.name)));
        print(format!("{clear}{HEAD}{}", lines.collect::<String>()))?;
        if options.once {
            return Ok(0);
        }
        former = by_name(now);
    }
}

/// Head of the table of `top`.
const HEAD: &str = "NAME             STATE     VCPUS   CPU%   RUN%  STEAL%  IDLE%  DISK-MB/s   NET-MB/s  \
     RESIDENT   MEMORY     FREE PROCESSES\n";

/// Returns the sum of a time of all vCPUs.
fn vcpus(statistics: &Statistics, of: fn(&VcpuTime) -> u64) -> u64 {
    statistics.vcpu_times.iter().map(of).sum()
}

/// Returns the bytes that all disks and shared directories have read and written.
fn stored(statistics: &Statistics) -> u64 {
    let disks = statistics.disks.iter().map(|disk| disk.read.bytes + disk.write.bytes);
    let shares = statistics.shares.iter().map(|share| share.read.bytes + share.write.bytes);
    disks.chain(shares).sum()
}

/// Returns the bytes of the frames of all network cards.
fn carried(statistics: &Statistics) -> u64 {
    statistics.nets.iter().map(|net| net.receive.bytes + net.transmit.bytes).sum()
}

/// Returns the line of a VM; `former` are its statistics of a second before. Shares are of the time
/// of all its virtual CPUs.
fn line(name: &str, now: &Statistics, former: Option<&Statistics>) -> String {
    let former = former.unwrap_or(now);
    // The figures of a VM that has restarted begin at 0, as do those of new processes.
    let grown = |of: fn(&Statistics) -> u64| of(now).saturating_sub(of(former)) as f64;
    let passed = grown(|it| it.uptime_ms).max(1.0);
    let share = |time: f64| 100.0 * time / (passed * f64::from(now.vcpus.max(1)));
    let cpu = share(grown(|it| it.user_ms + it.system_ms));
    let run = share(grown(|it| vcpus(it, |vcpu| vcpu.run_ms)));
    let steal = share(grown(|it| vcpus(it, |vcpu| vcpu.steal_ms)));
    let idle = (100.0 - run - steal).clamp(0.0, 100.0);
    // Bytes per millisecond, in thousands.
    let [disk, net] = [grown(stored), grown(carried)].map(|bytes| bytes / passed / 1000.0);
    let mebibytes = |bytes: u64| format!("{}M", bytes >> 20);
    let [used, memory] = [now.memory_used_bytes, now.memory_bytes].map(mebibytes);
    let free = now.guest_memory.as_ref().and_then(|memory| memory.free_bytes).map(mebibytes);
    let free = free.unwrap_or_else(|| "-".to_owned());
    format!(
        "{name:<16} {:<9} {:>5} {cpu:>6.1} {run:>6.1} {steal:>7.1} {idle:>6.1} {disk:>10.1} \
         {net:>10.1} {used:>9} {memory:>8} {free:>8} {:>9}\n",
        now.state, now.vcpus, now.processes,
    )
}

/// Returns the metrics of all VMs as text.
async fn metrics_text() -> Result<String, Failure> {
    let reports = reports().await?;
    let all = reports.iter().map(|it| (Some(it.name.as_str()), it.statistics.clone()));
    Ok(prometheus(&all.collect::<Vec<_>>()))
}

/// Server of the metrics of all VMs.
#[derive(Clone)]
struct MetricsServer;

/// Its resources.
const RESOURCES: [Resource; 1] = [("/metrics", "GET", "Statistics of all VMs for Prometheus.")];

impl Service for MetricsServer {
    async fn reply(&self, request: Request<Incoming>) -> Result<Response<Payload>, ProblemDetails> {
        check_request(&request, &RESOURCES)?;
        let text = metrics_text().await.map_err(|failure| {
            ProblemDetails::new(StatusCode::INTERNAL_SERVER_ERROR, failure.to_string())
        })?;
        Ok(response("text/plain; version=0.0.4", text))
    }
}

/// Prints the metrics of all VMs, or serves them until a signal ends this process.
///
/// # Errors
/// The address is in use or not this host's: 71 or 77; as those of [`ps`].
pub fn metrics(options: &MetricsOptions) -> Result<u8, Failure> {
    let runtime = runtime()?;
    let Some(address) = options.listen else {
        print(runtime.block_on(metrics_text())?)?;
        return Ok(0);
    };
    runtime.block_on(async {
        // Fails early if the folder is another user's.
        RuntimeFolder::existing()?;
        let listener = TcpListener::bind(address).await;
        let listener = listener.os_error(&format!("listen on {address}"))?;
        let address = listener.local_addr().os_error("find the address")?;
        if !address.ip().is_loopback() {
            let text = format!("every client that reaches {address} can read the metrics");
            say(Level::Warn, &text);
        }
        say(Level::Info, &format!("metrics at http://{address}/metrics"));
        let (_running, ended) = oneshot::channel();
        http::serve(listener, MetricsServer, ended).await;
        Ok(0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::testing::statistics;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;
    use std::thread;

    fn at(uptime_ms: u64, user_ms: u64, [run_ms, steal_ms]: [u64; 2], bytes: u64) -> Statistics {
        let vcpu_times = vec![VcpuTime { run_ms, steal_ms, idle_ms: 0 }; 2];
        let mut statistics = Statistics { uptime_ms, user_ms, vcpu_times, ..statistics() };
        statistics.disks[1].write.bytes += bytes;
        statistics.shares[0].read.bytes += bytes;
        statistics.nets[0].receive.bytes += bytes;
        statistics
    }

    #[test]
    fn shares_are_of_all_virtual_cpus() {
        let former = at(2000, 500, [100, 50], 0);
        let text = line("a", &at(3000, 1700, [600, 100], 3_000_000), Some(&former));
        let words: Vec<&str> = text.split_whitespace().collect();
        let figures = ["60.0", "50.0", "5.0", "45.0", "6.0", "3.0"];
        assert_eq!(words[..3], ["a", "running", "2"]);
        assert_eq!(words[3..9], figures);
        assert_eq!(words[9..], ["64M", "1024M", "0M", "4"]);
        assert_eq!(HEAD.split_whitespace().count(), words.len());
        let columns = |text: &str| text.trim_end().len();
        assert_eq!(columns(HEAD), columns(&text));
        let restarted = line("a", &at(5, 1, [1, 0], 0), Some(&former));
        assert!(restarted.contains(" 0.0 "), "{restarted}");
        let text = line("a", &Statistics { guest_memory: None, ..former }, None);
        assert!(text.contains(" - "), "{text}");
    }

    #[test]
    fn a_warning_is_said_once() {
        let mut former = BTreeSet::new();
        let mut new = |texts: &[&str]| {
            new_warnings(texts.iter().map(|&text| text.to_owned()).collect(), &mut former)
        };
        assert_eq!(new(&["a"]), ["a"]);
        assert_eq!(new(&["a", "b"]), ["b"]);
        assert_eq!(new(&["a", "b"]), [""; 0]);
        assert_eq!(new(&["b"]), [""; 0]);
        assert_eq!(new(&["a", "b"]), ["a"], "it had answered meanwhile");
    }

    #[test]
    fn a_running_vm_is_shown_or_reported() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        // Each answer ends its connection.
        let serve = |name: &str, body: &'static str| {
            let listener = UnixListener::bind(path(name)).unwrap();
            thread::spawn(move || {
                for stream in listener.incoming() {
                    let mut stream = stream.unwrap();
                    // A connection without a request only tests for the process.
                    if stream.read(&mut [0; 1024]).is_ok_and(|count| count != 0) {
                        let length = body.len();
                        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
                        stream.write_all((head + body).as_bytes()).unwrap();
                    }
                }
            });
        };
        serve("other", "{}");
        serve("broken", "[");
        drop(UnixListener::bind(path("killed")).unwrap());
        let names = ["other", "broken", "killed", "ended"];
        let vms = names.map(|name| (VmName::parse(name).unwrap(), path(name))).to_vec();
        let (reports, warnings) = runtime().unwrap().block_on(ask_all(vms));
        let shown: Vec<_> = reports.iter().map(|report| report.row().name).collect();
        assert_eq!(shown, ["other"]);
        assert_eq!(warnings.len(), 1);
        assert!(warnings[0].starts_with("cannot query the VM broken: "), "{warnings:?}");
    }
}

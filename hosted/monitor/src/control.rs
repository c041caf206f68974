//! Shared state of a running VM: its lifecycle state, its events and the queue of pending commands.
//!
//! [`Control`] connects the loop that serves the VM with the thread that serves the control socket.
//! Only [`executor::CommandExecutor`] acts on the VM; commands stay in a queue until it has
//! executed or refused them.

pub mod executor;

use crate::config::Config;
use crate::config::name::VmName;
use crate::event_loop::{self, EndingSignals, EventHandler, drain};
use crate::events::{Event, Events};
use crate::exit::ExitCause;
use crate::line_sink::LineSink;
use crate::metrics::Metrics;
use crate::spec::{MIN_MEMORY, PAGE};
use crate::state::State;
use crate::statistics::devices::DeviceStatistics;
use crate::statistics::guest_memory::{self, Ask, GuestReports};
use crate::statistics::vcpus::VcpuTimes;
use crate::statistics::{self, Statistics};
use hosted_command::failure::{Failure, IoContext};
use hosted_command::{proc_number, supervise};
use hyper::body::Bytes;
use proto::hosted::balloon::BalloonReport;
use rustix::event::PollFlags;
use rustix::io::write;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// Longest queue of pending commands.
const MAX_COMMANDS: usize = 16;
/// Places beyond it for the end of the VM and for the debugger, which must not depend on others.
const MORE_COMMANDS: usize = 16;
/// Longest wait for the guest's report on its memory, and the interval between two looks at it.
const GUEST_TIMEOUT: Duration = Duration::from_millis(200);
const GUEST_INTERVAL: Duration = Duration::from_millis(2);

/// Commands to a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Starts a VM that waits for boot.
    Boot,
    /// Pauses the guest.
    Pause,
    /// Resumes the guest.
    Resume,
    /// Restarts the VM.
    Reset,
    /// Presses the ACPI power button.
    Shutdown,
    /// Asks the guest for statistics of its memory.
    MemoryStatistics,
    /// Changes the target size of the balloon, in bytes.
    Balloon(u64),
    /// Stops the virtual CPUs for the debugger.
    Halt,
    /// Resumes the virtual CPUs as the debugger has requested.
    Go,
    /// Ends the VM, whatever the guest does.
    Terminate,
}

/// Result of a command: the state after it, or the reason of the refusal.
pub type Answer = Result<State, String>;

/// Status of the VM and its pending commands.
struct VmStatus {
    state: State,
    /// Time of the last start.
    began: Instant,
    /// Time from the start to the guest's first instruction.
    start: Option<Duration>,
    /// Number of restarts.
    resets: u64,
    /// Exit code of a VM that has ended.
    code: u8,
    /// Process ID of the VM's first process.
    process: Option<u32>,
    /// Guest memory, and the memory shared with the VM's processes.
    memory: Option<(File, File)>,
    /// Counters of the devices.
    counters: Option<File>,
    vcpu_times: VcpuTimes,
    guest_reports: GuestReports,
    /// Target size of the balloon in bytes; `None`: no balloon.
    balloon: Option<u64>,
    events: Events,
    commands: VecDeque<(Command, oneshot::Sender<Answer>)>,
    /// Commands sent to the VM's first process, as bytes, with the receivers of their results.
    waiting: Vec<(u8, oneshot::Sender<Answer>)>,
    /// Wakes the debugger.
    debugger: Option<UnixStream>,
}

impl VmStatus {
    /// Wakes the debugger after a change of the VM.
    fn notify_debugger(&self) {
        if let Some(debugger) = &self.debugger {
            // If the pipe is full, the debugger wakes up anyway.
            let _ = write(debugger, &[0]);
        }
    }

    /// Takes the next pending command whose client still waits. Other clients have got an error,
    /// or have disconnected.
    fn next_command(&mut self) -> Option<(Command, oneshot::Sender<Answer>)> {
        loop {
            let next = self.commands.pop_front()?;
            if !next.1.is_closed() {
                return Some(next);
            }
        }
    }

    /// Completes the oldest command to the first process of this kind.
    fn complete(&mut self, byte: u8, state: State) {
        if let Some(index) = self.waiting.iter().position(|waiting| waiting.0 == byte) {
            // The client may have disconnected in the meantime.
            let _ = self.waiting.remove(index).1.send(Ok(state));
        }
    }

    /// Drops all commands: nothing will execute them.
    fn discard_commands(&mut self) {
        self.commands.clear();
        self.waiting.clear();
    }
}

/// Handle on a VM; clones refer to the same VM.
#[derive(Clone)]
pub struct Control(Arc<Inner>);

struct Inner {
    status: Mutex<VmStatus>,
    /// Wakes the supervisor for a new command.
    waker: UnixStream,
    config: Config,
    /// Guest memory in bytes.
    size: u64,
    /// Name of the back end.
    backend: &'static str,
}

impl Inner {
    /// Returns whether the back end has the wedge's counters; KVM has none.
    fn has_wedge(&self) -> bool {
        self.backend == "process"
    }
}

/// Response of `GET /v1/vm`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct VmInfo {
    /// Lifecycle state.
    pub state: State,
    /// Back end: `kvm` or `process`.
    pub backend: String,
    /// Name, as of `--name`.
    pub name: Option<VmName>,
    /// Process ID of `parador run`.
    pub pid: u32,
    /// Command line of `parador run`.
    pub command: Vec<String>,
    /// Process ID of the VM's first process; its other processes are children of it.
    pub process: Option<u32>,
    /// Version of Parador.
    pub version: String,
    /// Configuration: file and options merged.
    pub config: Config,
}

impl Control {
    /// Creates the state of a VM with `size` bytes of memory and this back end. Events are also
    /// written to `sink`. The second value is for [`executor::CommandExecutor::new`].
    pub fn new(
        config: Config,
        size: u64,
        backend: &'static str,
        sink: Option<LineSink>,
    ) -> Result<(Self, UnixStream), Failure> {
        let pair = UnixStream::pair().and_then(|(waker, wakeup)| {
            waker.set_nonblocking(true)?;
            wakeup.set_nonblocking(true)?;
            Ok((waker, wakeup))
        });
        let (waker, wakeup) = pair.os_error("create a socket pair")?;
        let status = VmStatus {
            state: State::Starting,
            began: Instant::now(),
            start: None,
            resets: 0,
            code: 0,
            process: None,
            memory: None,
            counters: None,
            vcpu_times: VcpuTimes::default(),
            guest_reports: GuestReports::default(),
            balloon: balloon(&config),
            events: Events::new(sink),
            commands: VecDeque::new(),
            waiting: Vec::new(),
            debugger: None,
        };
        Ok((
            Self(Arc::new(Inner { status: Mutex::new(status), waker, config, size, backend })),
            wakeup,
        ))
    }

    fn status(&self) -> MutexGuard<'_, VmStatus> {
        // No code that can panic leaves the status half updated.
        self.0.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a start: `process` is the VM's first process; the descriptors are those of guest
    /// memory, of the memory shared with the VM's processes, and of the counters of its devices.
    pub fn started(
        &self,
        process: u32,
        memory: (OwnedFd, OwnedFd),
        counters: OwnedFd,
        began: Instant,
    ) {
        let mut status = self.status();
        status.state = State::Starting;
        status.began = began;
        status.start = None;
        status.process = Some(process);
        status.memory = Some((memory.0.into(), memory.1.into()));
        status.counters = Some(counters.into());
        status.vcpu_times = VcpuTimes::default();
        status.guest_reports = GuestReports::default();
        status.balloon = balloon(&self.0.config);
        status.events.record(Event::Started { process });
        status.notify_debugger();
    }

    /// Records that the VM waits for boot: see [`Self::await_boot`].
    pub fn created(&self) {
        let mut status = self.status();
        status.state = State::Created;
        status.events.record(Event::Created);
    }

    /// Waits for [`Command::Boot`]; returns the cause if something else ends the VM. `wakeup` is
    /// the second value of [`Self::new`].
    pub fn await_boot(
        &self,
        wakeup: &UnixStream,
        deadline: Option<Instant>,
        metrics: Option<&Metrics>,
    ) -> Result<Option<ExitCause>, Failure> {
        let signals = EndingSignals::subscribe()?;
        let mut waiter = BootWaiter { control: self, wakeup, metrics };
        match event_loop::run(&mut waiter, signals, deadline, "wait for boot")? {
            BootEnd::Boot => Ok(None),
            BootEnd::Cause(cause) => Ok(Some(cause)),
        }
    }

    /// Executes the commands of a VM that waits for boot. Returns the end of the wait.
    fn commands_before_boot(&self) -> Option<BootEnd> {
        let mut status = self.status();
        loop {
            let (command, answer) = status.next_command()?;
            let (said, end) = match command {
                Command::Boot => (Ok(State::Starting), Some(BootEnd::Boot)),
                Command::Terminate => (Ok(State::Ended), Some(BootEnd::Cause(ExitCause::Request))),
                _ => (Err("the VM waits for boot".to_owned()), None),
            };
            if matches!(end, Some(BootEnd::Boot)) {
                status.state = State::Starting;
            }
            // The client may have disconnected in the meantime.
            let _ = answer.send(said);
            if end.is_some() {
                return end;
            }
        }
    }

    /// Sets the pipe that wakes the debugger at changes of the VM.
    pub fn set_debugger(&self, notify_debugger: UnixStream) {
        self.status().debugger = Some(notify_debugger);
    }

    /// Returns the lifecycle state.
    pub fn state(&self) -> State {
        self.status().state
    }

    /// Returns the exit code of a VM that has ended.
    pub fn exit_code(&self) -> u8 {
        self.status().code
    }

    /// Returns the number of restarts.
    pub fn resets(&self) -> u64 {
        self.status().resets
    }

    /// Returns whether the VM's processes run: not before the first start, after the exit, and
    /// between the two at a restart.
    pub fn has_process(&self) -> bool {
        self.status().process.is_some()
    }

    /// Returns guest memory and the memory shared with the VM's processes; `None` while it has no
    /// processes.
    pub fn memory(&self) -> Option<(File, File)> {
        let status = self.status();
        let (memory, shared) = status.memory.as_ref().filter(|_| status.process.is_some())?;
        memory.try_clone().and_then(|memory| Ok((memory, shared.try_clone()?))).ok()
    }

    /// Records that the VM exited with this code and restarts. The commands that its first process
    /// has not completed are refused.
    pub fn reset(&self, code: u8) {
        let mut status = self.status();
        status.process = None;
        for (_, answer) in status.waiting.drain(..) {
            let _ = answer.send(Err("the VM restarts".to_owned()));
        }
        status.resets += 1;
        status.notify_debugger();
        status.events.record(Event::Reset { code });
    }

    /// Records that the VM exited with this code, and drops its pending commands. Event streams
    /// end; the sink's reader has a time limit for the last events.
    pub fn ended(&self, code: u8, reason: &str) {
        let mut status = self.status();
        status.state = State::Ended;
        status.code = code;
        status.notify_debugger();
        status.process = None;
        status.discard_commands();
        status.events.record(Event::Ended { code, reason: reason.to_owned() });
        let sink = status.events.close();
        // Clients must not wait for the sink's reader.
        drop(status);
        drop(sink);
    }

    /// Drops the pending commands: nothing will execute them.
    pub fn discard_commands(&self) {
        self.status().discard_commands();
    }

    /// Records a panic of the guest kernel.
    pub fn panicked(&self) {
        self.status().events.record(Event::Panic);
    }

    /// Returns state, back end and configuration.
    pub fn vm(&self) -> VmInfo {
        let status = self.status();
        VmInfo {
            state: status.state,
            backend: self.0.backend.to_owned(),
            name: self.0.config.vm.name.clone(),
            pid: proc_number::own(),
            command: supervise::arguments().map(|word| word.to_string_lossy().into()).collect(),
            process: status.process,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            config: self.0.config.clone(),
        }
    }

    /// Returns the current statistics.
    pub fn statistics(&self) -> Statistics {
        let mut status = self.status();
        // The fields are borrowed separately.
        let status = &mut *status;
        if let Some(process) = status.process {
            status.vcpu_times.update(process);
        }
        let uptime = status.began.elapsed();
        let memory = status.memory.as_ref();
        let cpu = statistics::cpu(status.process);
        let vcpus = self.0.config.vm.cpus.unwrap_or(1);
        let reported = memory.map(|memory| guest_memory::reported(&memory.1));
        let reports = &mut status.guest_reports;
        let DeviceStatistics { disks, nets, shares } =
            DeviceStatistics::read(&self.0.config, status.counters.as_ref());
        Statistics {
            state: status.state,
            uptime_ms: milliseconds(uptime),
            start_ms: status.start.map(milliseconds),
            resets: status.resets,
            vcpus,
            processes: cpu.processes,
            user_ms: cpu.user_ms,
            system_ms: cpu.system_ms,
            steal_ms: cpu.steal_ms,
            memory_bytes: self.0.size,
            memory_used_bytes: memory.map_or(0, |memory| statistics::used(&memory.0)),
            guest_memory: reported
                .and_then(|reported| reports.latest(reported, self.0.size, Instant::now())),
            balloon_bytes: status.balloon,
            vcpu_times: status.vcpu_times.times(vcpus.into(), uptime),
            disks,
            nets,
            shares,
            wedge: memory
                .filter(|_| self.0.has_wedge())
                .map(|memory| statistics::wedge(&memory.1))
                .unwrap_or_default(),
        }
    }

    /// Returns the current statistics, with those that the guest reports of its memory within
    /// [`GUEST_TIMEOUT`] if it was not asked before shortly.
    pub async fn fresh_statistics(&self) -> Statistics {
        let wait = async {
            let before = match self.ask_guest() {
                Ask::No => return,
                Ask::Once => None,
                Ask::AndWait(before) => Some(before),
            };
            let answered = self.submit(Command::MemoryStatistics).await;
            while matches!(answered, Ok(Ok(_))) && before.is_some_and(|it| it == self.reports()) {
                tokio::time::sleep(GUEST_INTERVAL).await;
            }
        };
        // A late report is in the next statistics.
        let _ = tokio::time::timeout(GUEST_TIMEOUT, wait).await;
        self.statistics()
    }

    /// Decides about a request to the guest.
    fn ask_guest(&self) -> Ask {
        let reports = self.reports();
        let mut status = self.status();
        match status.state {
            State::Running => status.guest_reports.ask(reports, Instant::now()),
            _ => Ask::No,
        }
    }

    /// Returns the number of the guest's reports on its memory.
    fn reports(&self) -> u64 {
        let status = self.status();
        status.memory.as_ref().map_or(0, |memory| guest_memory::reported(&memory.1).reports)
    }

    /// Sets the target size of the balloon in the memory shared with the VM's processes, in whole
    /// pages.
    ///
    /// # Errors
    /// The VM has no balloon, the guest would have too little memory, or the VM has ended.
    fn set_balloon(&self, bytes: u64) -> Result<(), String> {
        let most = self.0.size.saturating_sub(MIN_MEMORY);
        if bytes > most {
            return Err(format!(
                "a balloon of {bytes} bytes leaves the guest less than 64 MiB (limit {most} bytes)"
            ));
        }
        let mut status = self.status();
        if status.balloon.is_none() {
            return Err("the VM has no balloon (--balloon off)".to_owned());
        }
        let (_, shared) = status.memory.as_ref().ok_or("the guest is not running")?;
        let pages = bytes / PAGE;
        let written = shared.write_all_at(&pages.to_le_bytes(), BalloonReport::TARGET);
        written.map_err(|error| format!("cannot write to the VM's memory: {error}"))?;
        status.balloon = Some(pages * PAGE);
        Ok(())
    }

    /// Returns a stream of past and future events; `None` if there are too many subscribers.
    pub fn subscribe(&self) -> Option<mpsc::Receiver<Bytes>> {
        self.status().events.subscribe()
    }

    /// Queues a command. The result arrives at the returned receiver.
    pub fn submit(&self, command: Command) -> oneshot::Receiver<Answer> {
        let (answer, answered) = oneshot::channel();
        let mut status = self.status();
        // A dropped sender signals that the VM has exited.
        if status.state != State::Ended {
            let limit = match command {
                Command::Halt | Command::Go | Command::Terminate => MAX_COMMANDS + MORE_COMMANDS,
                _ => MAX_COMMANDS,
            };
            if status.commands.len() < limit {
                status.commands.push_back((command, answer));
            } else {
                let text = format!("too many pending commands (limit {limit})");
                let _ = answer.send(Err(text));
            }
        }
        self.wake_supervisor();
        answered
    }

    fn wake_supervisor(&self) {
        // If the pipe is full, the supervisor wakes up anyway.
        let _ = write(&self.0.waker, &[0]);
    }
}

/// Returns the size in bytes that the balloon has at the start; `None`: no balloon.
fn balloon(config: &Config) -> Option<u64> {
    config.vm.balloon.unwrap_or_default().0.map(|size| size.0)
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Reason for the end of the wait for boot.
enum BootEnd {
    /// The VM boots.
    Boot,
    /// The VM ends.
    Cause(ExitCause),
}

impl From<ExitCause> for BootEnd {
    fn from(cause: ExitCause) -> Self {
        Self::Cause(cause)
    }
}

/// Handler of the events of a VM that waits for boot.
struct BootWaiter<'a> {
    control: &'a Control,
    wakeup: &'a UnixStream,
    metrics: Option<&'a Metrics>,
}

/// Source of an event before boot.
#[derive(Clone, Copy)]
enum BootSource {
    Metrics,
    Commands,
}

impl EventHandler for BootWaiter<'_> {
    type Source = BootSource;
    type End = BootEnd;

    fn interest(&self) -> Vec<(BootSource, BorrowedFd<'_>, PollFlags)> {
        let metrics = self.metrics.map(|metrics| (BootSource::Metrics, metrics.request()));
        let commands = (BootSource::Commands, self.wakeup.as_fd());
        let all = metrics.into_iter().chain([commands]);
        all.map(|(source, fd)| (source, fd, PollFlags::IN)).collect()
    }

    fn ready(&mut self, source: BootSource) -> Result<Option<BootEnd>, Failure> {
        match (source, self.metrics) {
            (BootSource::Metrics, Some(metrics)) => {
                metrics.take_request();
                metrics.write(&self.control.statistics());
                Ok(None)
            }
            _ => {
                drain(self.wakeup.as_fd());
                Ok(self.control.commands_before_boot())
            }
        }
    }
}

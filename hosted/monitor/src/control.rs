//! Shared state of a running VM: its lifecycle state, its events and the queue of pending commands.
//!
//! [`Control`] connects the loop that serves the VM ([`Supervisor`]) with the thread that serves
//! the control socket. Only the supervisor acts on the VM; commands stay in a queue until it has
//! executed or refused them.

use crate::config::Config;
use crate::events::{Event, Events};
use crate::perf::Maps;
use crate::statistics::{self, Statistics};
use crate::vm_process::{self, EventSource, ExitCause};
use hosted_command::failure::Failure;
use hyper::body::Bytes;
use proto::hosted::control as byte;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, read, write};
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// Longest queue of pending commands.
const MAX_COMMANDS: usize = 16;

/// Lifecycle state of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Not started: the VM waits for boot.
    Created,
    /// Started; the guest has not executed its first instruction.
    Starting,
    /// The guest runs.
    Running,
    /// The guest is paused and can be resumed.
    Paused,
    /// The VM has exited.
    Ended,
}

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
    /// Process ID of the VM's first process.
    process: Option<u32>,
    /// Guest memory, and the memory shared with the VM's processes.
    memory: Option<(File, File)>,
    events: Events,
    commands: VecDeque<(Command, oneshot::Sender<Answer>)>,
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
    /// Process ID of the VM's first process; its other processes are children of it.
    pub process: Option<u32>,
    /// Version of Parador.
    pub version: String,
    /// Configuration: file and options merged.
    pub config: Config,
}

impl Control {
    /// Creates the state of a VM with `size` bytes of memory and this back end. Events are also
    /// written to `sink`. The second value is for [`Supervisor::new`].
    pub fn new(
        config: Config,
        size: u64,
        backend: &'static str,
        sink: Option<File>,
    ) -> Result<(Self, UnixStream), Failure> {
        let pair = UnixStream::pair().and_then(|(waker, wakeup)| {
            waker.set_nonblocking(true)?;
            wakeup.set_nonblocking(true)?;
            Ok((waker, wakeup))
        });
        let (waker, wakeup) = pair.map_err(|error| Failure::os("create a socket pair", &error))?;
        let status = VmStatus {
            state: State::Starting,
            began: Instant::now(),
            start: None,
            resets: 0,
            process: None,
            memory: None,
            events: Events::new(sink),
            commands: VecDeque::new(),
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
    /// memory and of the memory shared with the VM's processes.
    pub fn started(&self, process: u32, memory: (OwnedFd, OwnedFd), began: Instant) {
        let mut status = self.status();
        status.state = State::Starting;
        status.began = began;
        status.start = None;
        status.process = Some(process);
        status.memory = Some((memory.0.into(), memory.1.into()));
        status.events.record(Event::Started { process });
    }

    /// Records that the VM waits for boot: see [`Self::await_boot`].
    pub fn created(&self) {
        let mut status = self.status();
        status.state = State::Created;
        status.events.record(Event::Created);
    }

    /// Waits for [`Command::Boot`]; returns the cause if something else ends the VM. `wakeup` is
    /// the second value of [`Self::new`]; `metrics_request` is as in [`Supervisor::new`].
    pub fn await_boot(
        &self,
        wakeup: &UnixStream,
        deadline: Option<Instant>,
        metrics_request: Option<(&UnixStream, &dyn Fn())>,
    ) -> Result<Option<ExitCause>, Failure> {
        let signals = vm_process::ending_signals()?;
        loop {
            let mut fds = vec![
                wakeup.as_fd(),
                metrics_request.map_or(wakeup, |metrics_request| metrics_request.0).as_fd(),
            ];
            fds.extend(signals.iter().map(|signal| signal.1.as_fd()));
            let mut fds: Vec<_> =
                fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
            let Some(left) = vm_process::poll_timeout(deadline) else {
                return Ok(Some(ExitCause::Timeout));
            };
            match poll(&mut fds, left.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(Failure::os("wait for boot", &error.into())),
            }
            let is_ready = |index: usize| !fds[index].revents().is_empty();
            let signal = signals.iter().enumerate().find(|(index, _)| is_ready(index + 2));
            if let Some((_, (signal, _))) = signal {
                return Ok(Some(ExitCause::Signal(*signal)));
            }
            if let Some((pipe, write)) = metrics_request.filter(|_| is_ready(1)) {
                drain(pipe.as_fd());
                write();
            }
            drain(wakeup.as_fd());
            if let Some(what) = self.commands_before_boot() {
                return Ok(what);
            }
        }
    }

    /// Executes the commands of a VM that waits for boot. Returns `Some` when it boots (`None`) or
    /// ends (the cause).
    fn commands_before_boot(&self) -> Option<Option<ExitCause>> {
        let mut status = self.status();
        loop {
            let (command, answer) = status.commands.pop_front()?;
            let (said, what) = match command {
                Command::Boot => (Ok(State::Starting), Some(None)),
                Command::Terminate => (Ok(State::Ended), Some(Some(ExitCause::Request))),
                _ => (Err("the VM waits for boot".to_owned()), None),
            };
            if what == Some(None) {
                status.state = State::Starting;
            }
            // The client may have disconnected in the meantime.
            let _ = answer.send(said);
            if what.is_some() {
                return what;
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

    /// Returns guest memory and the memory shared with the VM's processes; `None` before the first
    /// start and after the exit.
    pub fn memory(&self) -> Option<(File, File)> {
        let status = self.status();
        let (memory, shared) = status.memory.as_ref().filter(|_| status.process.is_some())?;
        memory.try_clone().and_then(|memory| Ok((memory, shared.try_clone()?))).ok()
    }

    /// Records that the VM exited with this code and restarts.
    pub fn reset(&self, code: u8) {
        let mut status = self.status();
        status.process = None;
        status.resets += 1;
        status.events.record(Event::Reset { code });
    }

    /// Records that the VM exited with this code. Event streams end.
    pub fn ended(&self, code: u8, reason: &str) {
        let mut status = self.status();
        status.state = State::Ended;
        status.notify_debugger();
        status.process = None;
        status.commands.clear();
        status.events.record(Event::Ended { code, reason: reason.to_owned() });
        status.events.close();
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
            process: status.process,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            config: self.0.config.clone(),
        }
    }

    /// Returns the current statistics.
    pub fn statistics(&self) -> Statistics {
        let status = self.status();
        let memory = status.memory.as_ref();
        let cpu = statistics::cpu(status.process);
        Statistics {
            state: status.state,
            uptime_ms: milliseconds(status.began.elapsed()),
            start_ms: status.start.map(milliseconds),
            resets: status.resets,
            processes: cpu.processes,
            user_ms: cpu.user_ms,
            system_ms: cpu.system_ms,
            memory_bytes: self.0.size,
            memory_used_bytes: memory.map_or(0, |memory| statistics::used(&memory.0)),
            wedge: memory
                .filter(|_| self.0.has_wedge())
                .map(|memory| statistics::wedge(&memory.1))
                .unwrap_or_default(),
        }
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
            if status.commands.len() < MAX_COMMANDS {
                status.commands.push_back((command, answer));
            } else {
                let _ = answer.send(Err("too many pending commands (limit 16)".to_owned()));
            }
        }
        // If the pipe is full, the supervisor wakes up anyway.
        let _ = write(&self.0.waker, &[0]);
        answered
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Executes commands and follows the VM's state, in the loop that serves the VM.
pub struct Supervisor<'a> {
    control: &'a Control,
    /// Readable when commands are pending.
    wakeup: &'a UnixStream,
    /// A pipe that is readable after SIGUSR1, and the function that then writes statistics.
    metrics_request: Option<(&'a UnixStream, &'a dyn Fn())>,
    /// Symbol maps for profilers.
    maps: Option<&'a mut Maps>,
    /// Control socket of the VM's first process; `None` if it has closed it.
    device: Option<UnixStream>,
    /// Commands sent to the first process, with the receivers of their results.
    waiting: Vec<(u8, oneshot::Sender<Answer>)>,
}

impl<'a> Supervisor<'a> {
    /// Creates the supervisor. `device` is this side of the control socket of the VM's first
    /// process.
    pub fn new(
        control: &'a Control,
        wakeup: &'a UnixStream,
        device: UnixStream,
        metrics_request: Option<(&'a UnixStream, &'a dyn Fn())>,
        maps: Option<&'a mut Maps>,
    ) -> Self {
        Self { control, wakeup, metrics_request, maps, device: Some(device), waiting: Vec::new() }
    }

    fn commands(&mut self) -> Option<ExitCause> {
        drain(self.wakeup.as_fd());
        loop {
            let (state, command) = {
                let mut status = self.control.status();
                (status.state, status.commands.pop_front())
            };
            let (command, answer) = command?;
            let byte = match (command, state) {
                (Command::Terminate, _) => {
                    let _ = answer.send(Ok(State::Ended));
                    return Some(ExitCause::Request);
                }
                (Command::Boot, _) => {
                    let _ = answer.send(Err("the VM has already been started".to_owned()));
                    continue;
                }
                (Command::Reset, _) => {
                    let _ = answer.send(Ok(State::Starting));
                    return Some(ExitCause::Reset);
                }
                (Command::Halt, State::Starting | State::Running | State::Paused) => byte::HALT,
                (Command::Go, State::Starting | State::Running | State::Paused) => byte::GO,
                (Command::Pause, State::Running) => byte::PAUSE,
                (Command::Resume, State::Paused) => byte::RESUME,
                (Command::Shutdown, State::Running) => byte::POWER_BUTTON,
                (Command::Pause, State::Paused) => {
                    let _ = answer.send(Err("the VM is already paused".to_owned()));
                    continue;
                }
                (Command::Shutdown, State::Paused) => {
                    let text = "the VM is paused: resume it, or use --force";
                    let _ = answer.send(Err(text.to_owned()));
                    continue;
                }
                (Command::Resume, State::Running) => {
                    let _ = answer.send(Err("the VM is not paused".to_owned()));
                    continue;
                }
                (_, State::Created | State::Starting | State::Ended) => {
                    let _ = answer.send(Err("the guest is not running yet".to_owned()));
                    continue;
                }
            };
            match self.device.as_ref().map(|device| write(device, &[byte])) {
                Some(Ok(1)) => self.waiting.push((byte, answer)),
                _ => drop(answer.send(Err("the VM's control socket is closed".to_owned()))),
            }
        }
    }

    /// Handles the creation of a process of the VM.
    fn on_process_created(&mut self) {
        let process = self.control.status().process;
        if let (Some(maps), Some(process)) = (&mut self.maps, process) {
            maps.processes(statistics::children(process));
        }
    }

    /// Handles messages of the VM's first process.
    fn on_device_message(&mut self) {
        let Some(device) = &self.device else { return };
        let mut bytes = [0; 64];
        let length = match read(device, &mut bytes[..]) {
            Err(Errno::INTR | Errno::AGAIN) => return,
            Err(_) | Ok(0) => {
                self.device = None;
                return;
            }
            Ok(length) => length,
        };
        for &byte in &bytes[..length] {
            if byte == byte::PROCESS_CREATED {
                self.on_process_created();
                continue;
            }
            let mut status = self.control.status();
            let (state, event) = match byte {
                byte::STARTED if status.start.is_none() => {
                    let start = status.began.elapsed();
                    status.start = Some(start);
                    (State::Running, Event::Running { start_ms: milliseconds(start) })
                }
                byte::HALTED => {
                    status.notify_debugger();
                    continue;
                }
                byte::HALT | byte::GO => {
                    let state = status.state;
                    drop(status);
                    self.answer(byte, state);
                    continue;
                }
                byte::PAUSE => (State::Paused, Event::Paused),
                byte::RESUME => (State::Running, Event::Resumed),
                byte::POWER_BUTTON => (status.state, Event::ShutdownRequested),
                _ => continue,
            };
            status.state = state;
            status.events.record(event);
            drop(status);
            self.answer(byte, state);
        }
    }

    /// Completes the oldest command of this kind.
    fn answer(&mut self, byte: u8, state: State) {
        if let Some(index) = self.waiting.iter().position(|waiting| waiting.0 == byte) {
            // The client may have disconnected in the meantime.
            let _ = self.waiting.swap_remove(index).1.send(Ok(state));
        }
    }
}

impl EventSource for Supervisor<'_> {
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let metrics_request =
            self.metrics_request.map_or(self.wakeup, |metrics_request| metrics_request.0);
        let mut all = vec![self.wakeup.as_fd(), metrics_request.as_fd()];
        all.extend(self.device.as_ref().map(AsFd::as_fd));
        all
    }

    fn readable(&mut self, index: usize) -> Option<ExitCause> {
        match index {
            0 => return self.commands(),
            1 => {
                if let Some((pipe, write)) = self.metrics_request {
                    drain(pipe.as_fd());
                    write();
                }
            }
            _ => self.on_device_message(),
        }
        None
    }
}

/// Empties a pipe that only wakes.
fn drain(pipe: BorrowedFd<'_>) {
    let mut bytes = [0; 64];
    // Reads do not block.
    while matches!(read(pipe, &mut bytes[..]), Ok(1..)) {}
}

//! The child process that runs a VM, and the terminal that is the VM's console.
//!
//! The child uses pipes, never the terminal: however `parador` ends, the terminal's modes are
//! restored here, and the child dies with `parador` (parent-death signal). The child runs in a
//! process group of its own, so signals from the terminal reach `parador` only.

use crate::console::{HostConsole, Input};
use crate::orphans;
use crate::profile;
use crate::terminal::{Keys, Raw};
use hosted_command::failure::{self, Failure};
use hosted_command::interrupt::ENDING;
use hosted_command::messages::{self, Level, MessageLog};
use hosted_devices::READY;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, read, write};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::low_level::pipe;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Time for a device process to write its cached data.
const TERMINATION_GRACE: Duration = Duration::from_secs(10);
/// Longest error message of a device process in bytes.
const REFUSAL: u64 = 16 << 10;

/// Cause of the end of a VM.
#[derive(Debug, PartialEq, Eq)]
pub enum ExitCause {
    /// The child process exited.
    Exited(ExitStatus),
    /// `--timeout` was reached.
    Timeout,
    /// `parador` received this termination signal.
    Signal(i32),
    /// The user pressed Ctrl-A X.
    Keyboard,
    /// The reader of the console has closed it.
    OutputClosed,
    /// Shutdown by the control socket.
    Request,
    /// Restart by the control socket.
    Reset,
    /// A device process exited: its name and status.
    DeviceProcess(String, ExitStatus),
}

/// Additional descriptors that the event loop polls.
pub trait EventSource {
    /// Returns the descriptors to poll.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>>;

    /// Handles a readable descriptor, by its index. A returned cause ends the VM.
    fn readable(&mut self, index: usize) -> Option<ExitCause>;
}

/// Virtio console: the VM's side and its connection.
pub struct SecondaryConsole<'a> {
    /// Both directions.
    pub stream: UnixStream,
    /// Connection.
    pub console: &'a mut HostConsole,
}

/// Returns the deadline of a time limit that begins now.
pub fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}

/// Returns the timeout for poll(2) until a deadline: `Some(None)` is infinite; `None`: the deadline
/// has passed.
pub fn poll_timeout(deadline: Option<Instant>) -> Option<Option<Timespec>> {
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    if left == Some(Duration::ZERO) {
        return None;
    }
    Some(left.and_then(|left| Timespec::try_from(left).ok()))
}

/// Returns one pipe for each signal of [`ENDING`], readable once the signal has arrived; the
/// signals have no other effect.
pub fn ending_signals() -> Result<Vec<(i32, UnixStream)>, Failure> {
    let pipes = ENDING.into_iter().map(|signal| {
        let (ours, theirs) = UnixStream::pair()?;
        pipe::register(signal, theirs)?;
        Ok((signal, ours))
    });
    let pipes: io::Result<_> = pipes.collect();
    pipes.map_err(|error| Failure::os("install signal handlers", &error))
}

/// A device process of a VM. The VM ends with it; dropping it ends it.
#[derive(Debug)]
pub struct DeviceProcess {
    name: String,
    child: Child,
    /// Standard output: hangs up when the process exits.
    alive: ChildStdout,
}

impl DeviceProcess {
    /// Starts the process with a pipe as standard output and waits for [`READY`] on it. `name` is
    /// for messages.
    pub fn start(name: String, command: &mut Command) -> Result<Self, Failure> {
        let started = command.process_group(0).spawn();
        let mut child = started.map_err(|error| Failure::program(&name, &error))?;
        let Some(alive) = child.stdout.take() else {
            return Err(Failure::new(failure::INTERNAL, format!("{name} has no pipe")));
        };
        let mut process = Self { name, child, alive };
        let mut said = [READY];
        match process.alive.read(&mut said) {
            Ok(1) if said == [READY] => Ok(process),
            _ => Err(process.refusal(said)),
        }
    }

    /// Creates the failure from the error message that the process wrote instead of READY; it
    /// begins with `first`.
    fn refusal(mut self, first: [u8; 1]) -> Failure {
        let mut said = first.to_vec();
        // On a read error, the text so far is reported.
        let _ = (&mut self.alive).take(REFUSAL).read_to_end(&mut said);
        let text = String::from_utf8_lossy(&said).replace(char::is_control, "");
        let known_code = |status: &ExitStatus| {
            let codes = [failure::BAD_CONFIG, failure::OS_ERROR];
            codes.into_iter().find(|code| status.code() == Some((*code).into()))
        };
        let (code, text) = match self.child.wait().map(|status| (known_code(&status), status)) {
            Ok((Some(code), _)) => (code, text),
            Ok((None, status)) => {
                (failure::INTERNAL, format!("the process exited ({status}) {text}"))
            }
            Err(error) => (failure::INTERNAL, failure::describe(&error)),
        };
        Failure::new(code, format!("{}: {}", self.name, text.trim()))
    }
}

impl Drop for DeviceProcess {
    fn drop(&mut self) {
        let deadline = Instant::now() + TERMINATION_GRACE;
        let id = Pid::from_child(&self.child);
        // The signal fails if the process has exited.
        let _ = kill_process(id, Signal::TERM);
        while Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) {
            thread::sleep(Duration::from_millis(2));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        orphans::wait(id);
    }
}

/// A running VM. Dropping it ends the VM.
pub struct VmProcess {
    /// Name of the program, for messages.
    name: &'static str,
    child: Child,
    device_processes: Vec<DeviceProcess>,
    /// See [`ending_signals`].
    signals: Vec<(i32, UnixStream)>,
}

impl Drop for VmProcess {
    fn drop(&mut self) {
        // Fails if the process has exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
        orphans::wait(Pid::from_child(&self.child));
    }
}

impl VmProcess {
    /// Starts the child process; `name` is its name in messages.
    pub fn start(name: &'static str, mut command: Command) -> Result<Self, Failure> {
        let signals = ending_signals()?;
        let child = command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| Failure::program(name, &error))?;
        Ok(Self { name, child, device_processes: Vec::new(), signals })
    }

    /// Adds device processes. The VM ends with any of them.
    pub fn add(&mut self, device_processes: Vec<DeviceProcess>) {
        self.device_processes.extend(device_processes);
    }

    /// Returns the process ID.
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Serves the consoles until the VM ends. Returns the cause and the child's messages.
    pub fn serve(
        mut self,
        deadline: Option<Instant>,
        keys: &str,
        console: &mut HostConsole,
        second: Option<SecondaryConsole<'_>>,
        sources: Option<&mut dyn EventSource>,
    ) -> Result<(ExitCause, MessageLog), Failure> {
        let (Some(input), Some(output), Some(errors)) =
            (self.child.stdin.take(), self.child.stdout.take(), self.child.stderr.take())
        else {
            return Err(Failure::new(failure::INTERNAL, format!("{} has no pipes", self.name)));
        };
        set_nonblocking(input.as_fd())?;
        let (stream, second) =
            second.map(|SecondaryConsole { stream, console }| (stream, console)).unzip();
        if let Some(stream) = &stream {
            set_nonblocking(stream.as_fd())?;
        }
        let has_terminal = console.is_stdio() || second.as_ref().is_some_and(|one| one.is_stdio());
        let raw = if has_terminal { Raw::enter() } else { None };
        if raw.is_some() {
            if messages::is_json() {
                messages::say(Level::Info, keys);
            } else {
                eprint!("parador: {}\r\n", keys.replace('\n', "\r\n"));
            }
        }
        let mut lines = vec![ConsoleLine::new(input.as_fd(), output.as_fd(), console)];
        if let (Some(stream), Some(console)) = (&stream, second) {
            lines.push(ConsoleLine::new(stream.as_fd(), stream.as_fd(), console));
        }
        let mut event_loop = EventLoop {
            raw: raw.is_some(),
            keys: Keys::default(),
            lines,
            messages: MessageLog::new(self.name, Some(profile::MARK)),
        };
        let stop = event_loop.run(
            &self.signals,
            &self.device_processes,
            errors.as_fd(),
            deadline,
            sources,
        );
        drop(raw);
        let end = match stop? {
            LoopExit::Cause(end) => end,
            LoopExit::DeviceProcess(number) => {
                let DeviceProcess { name, child, .. } = &mut self.device_processes[number];
                let status =
                    child.wait().map_err(|error| Failure::os("wait for a process", &error))?;
                ExitCause::DeviceProcess(name.clone(), status)
            }
            LoopExit::OutputClosed => {
                let status =
                    self.child.wait().map_err(|error| Failure::os("wait for the VM", &error))?;
                ExitCause::Exited(status)
            }
        };
        event_loop.messages.end();
        Ok((end, event_loop.messages))
    }
}

fn set_nonblocking(pipe: BorrowedFd<'_>) -> Result<(), Failure> {
    fcntl_getfl(pipe)
        .and_then(|flags| fcntl_setfl(pipe, flags | OFlags::NONBLOCK))
        .map_err(|error| Failure::os("set up a pipe", &error.into()))
}

/// A console line of the VM and its connection on the host.
struct ConsoleLine<'a> {
    input: BorrowedFd<'a>,
    output: BorrowedFd<'a>,
    console: &'a mut HostConsole,
    input_open: bool,
    output_open: bool,
    /// Input that the VM has not taken yet; no more is read meanwhile.
    pending: Vec<u8>,
}

impl<'a> ConsoleLine<'a> {
    fn new(input: BorrowedFd<'a>, output: BorrowedFd<'a>, console: &'a mut HostConsole) -> Self {
        Self { input, output, console, input_open: true, output_open: true, pending: Vec::new() }
    }

    /// Returns the descriptors to poll and the events to wait for.
    fn interest(&self, index: usize) -> impl Iterator<Item = (Source, BorrowedFd<'_>, PollFlags)> {
        let reads = self.input_open && self.pending.is_empty();
        let keyboard = self.console.input().filter(|_| reads);
        let keyboard = keyboard.map(|fd| (Source::Keyboard(index), fd, PollFlags::IN));
        let output = (Source::Output(index), self.output, PollFlags::IN);
        let input = (Source::Input(index), self.input, PollFlags::OUT);
        let output = self.output_open.then_some(output);
        let input = (!self.pending.is_empty()).then_some(input);
        output.into_iter().chain(keyboard).chain(input)
    }

    /// Writes pending input to the VM, as much as it takes.
    fn send(&mut self) {
        match write(self.input, &self.pending) {
            Ok(taken) => drop(self.pending.drain(..taken)),
            Err(Errno::AGAIN | Errno::INTR) => {}
            // The VM has exited or closed its end.
            Err(_) => {
                self.pending.clear();
                self.input_open = false;
            }
        }
    }
}

/// State of the event loop.
struct EventLoop<'a> {
    raw: bool,
    keys: Keys,
    lines: Vec<ConsoleLine<'a>>,
    messages: MessageLog,
}

/// Source of an event.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Signal(i32),
    /// Hang-up of the device process with this index.
    DeviceProcess(usize),
    /// Output of the console line with this index.
    Output(usize),
    Errors,
    Keyboard(usize),
    Input(usize),
    /// Descriptor of [`EventSource`] with this index.
    Watched(usize),
}

impl EventLoop<'_> {
    /// Runs until the VM ends.
    fn run(
        &mut self,
        signals: &[(i32, UnixStream)],
        device_processes: &[DeviceProcess],
        errors: BorrowedFd<'_>,
        deadline: Option<Instant>,
        mut watched: Option<&mut dyn EventSource>,
    ) -> Result<LoopExit, Failure> {
        let mut errors_open = true;
        while errors_open || self.lines.iter().any(|line| line.output_open) {
            // poll(2) reports hang-ups of every listed descriptor, so descriptors without interest
            // are left out.
            let errors_wanted = errors_open.then_some((Source::Errors, errors, PollFlags::IN));
            let lines = self.lines.iter().enumerate();
            let pipes = lines.flat_map(|(index, line)| line.interest(index)).chain(errors_wanted);
            let signals = signals
                .iter()
                .map(|(signal, pipe)| (Source::Signal(*signal), pipe.as_fd(), PollFlags::IN));
            let device_processes = device_processes.iter().enumerate().map(|(number, other)| {
                (Source::DeviceProcess(number), other.alive.as_fd(), PollFlags::IN)
            });
            let more = watched.as_ref().map(|watched| watched.descriptors()).unwrap_or_default();
            let more = more
                .into_iter()
                .enumerate()
                .map(|(index, fd)| (Source::Watched(index), fd, PollFlags::IN));
            let (sources, mut fds): (Vec<Source>, Vec<PollFd<'_>>) = signals
                .chain(device_processes)
                .chain(pipes)
                .chain(more)
                .map(|(source, fd, flags)| (source, PollFd::from_borrowed_fd(fd, flags)))
                .unzip();
            let Some(timeout) = poll_timeout(deadline) else {
                return Ok(LoopExit::Cause(ExitCause::Timeout));
            };
            match poll(&mut fds, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(Failure::os("wait for the VM", &error.into())),
            }
            let ready = sources.into_iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
            let ready: Vec<Source> = ready.map(|(source, _)| source).collect();
            for source in ready {
                match source {
                    Source::Signal(signal) => {
                        return Ok(LoopExit::Cause(ExitCause::Signal(signal)));
                    }
                    Source::DeviceProcess(number) => return Ok(LoopExit::DeviceProcess(number)),
                    Source::Output(index) => {
                        let line = &mut self.lines[index];
                        match pass(line.output, line.console)? {
                            Flow::Open => {}
                            Flow::Closed => line.output_open = false,
                            Flow::Ended(end) => return Ok(LoopExit::Cause(end)),
                        }
                    }
                    Source::Errors => errors_open = self.errors(errors)?,
                    Source::Keyboard(index) => {
                        if self.keyboard(index) {
                            return Ok(LoopExit::Cause(ExitCause::Keyboard));
                        }
                    }
                    Source::Input(index) => self.lines[index].send(),
                    Source::Watched(index) => {
                        let end = watched.as_mut().and_then(|watched| watched.readable(index));
                        if let Some(end) = end {
                            return Ok(LoopExit::Cause(end));
                        }
                    }
                }
            }
        }
        Ok(LoopExit::OutputClosed)
    }

    /// Reads the VM's standard error.
    fn errors(&mut self, from: BorrowedFd<'_>) -> Result<bool, Failure> {
        let mut buffer = [0; 4096];
        let length = receive(from, &mut buffer)?;
        self.messages.bytes(&buffer[..length]);
        Ok(length != 0)
    }

    /// Reads console input. Returns `true` if the user ends the VM.
    fn keyboard(&mut self, index: usize) -> bool {
        let line = &mut self.lines[index];
        let mut buffer = [0; 4096];
        match line.console.read(&mut buffer) {
            Input::Bytes(length) if self.raw && line.console.is_stdio() => {
                return self.keys.pass(&buffer[..length], &mut line.pending);
            }
            Input::Bytes(length) => line.pending.extend_from_slice(&buffer[..length]),
            Input::Nothing => {}
            Input::End => line.input_open = false,
        }
        false
    }
}

/// Reason for the end of the event loop.
enum LoopExit {
    /// The VM has closed its output: it has exited.
    OutputClosed,
    /// Another cause.
    Cause(ExitCause),
    /// The device process with this index has exited.
    DeviceProcess(usize),
}

/// State of the VM's output after a read.
enum Flow {
    Open,
    Closed,
    Ended(ExitCause),
}

/// Copies VM output to its console.
fn pass(from: BorrowedFd<'_>, console: &mut HostConsole) -> Result<Flow, Failure> {
    let mut buffer = [0; 4096];
    let length = receive(from, &mut buffer)?;
    if length == 0 {
        return Ok(Flow::Closed);
    }
    match console.write(&buffer[..length]) {
        Ok(()) => Ok(Flow::Open),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            Ok(Flow::Ended(ExitCause::OutputClosed))
        }
        Err(error) if console.is_stdio() => Err(Failure::os("write to standard output", &error)),
        Err(error) => Err(Failure::os("write the console output", &error)),
    }
}

/// Reads available bytes; 0 at the end of the file.
fn receive(from: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<usize, Failure> {
    loop {
        match read(from, &mut *buffer) {
            Ok(length) => return Ok(length),
            Err(Errno::INTR) => {}
            // The peer closed the socket with unread data.
            Err(Errno::CONNRESET) => return Ok(0),
            Err(error) => return Err(Failure::os("read from a pipe", &error.into())),
        }
    }
}

//! The child process that runs a VM, and the terminal that is the VM's console.
//!
//! The child uses pipes, never the terminal: however `parador` ends, the terminal's modes are
//! restored here, and the child dies with `parador` (parent-death signal). The child runs in a
//! process group of its own, so signals from the terminal reach `parador` only.

use crate::console::{HostConsole, Input};
use crate::device_process::DeviceProcess;
use crate::event_loop::{self, EndingSignals, EventHandler};
use crate::exit::ExitCause;
use crate::orphans;
use crate::ports::{Port, PortMux, PortSource};
use crate::profile;
use crate::terminal::{Keys, Raw};
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::messages::{self, Level, MessageLog};
use hosted_command::proc_number;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, read, write};
use rustix::process::Pid;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// Additional descriptors that the event loop polls.
pub trait EventSource {
    /// Returns the descriptors to poll.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>>;

    /// Handles a readable descriptor, by its index. A returned cause ends the VM.
    fn readable(&mut self, index: usize) -> Option<ExitCause>;
}

/// Virtio console: the VM's side and its host ends.
pub struct SecondaryConsole<'a> {
    /// Both directions.
    pub stream: UnixStream,
    /// Host ends.
    pub ends: SecondaryEnds<'a>,
}

/// Host ends of the virtio console.
pub enum SecondaryEnds<'a> {
    /// The stream is that of one console.
    Console(&'a mut HostConsole),
    /// The stream carries the frames of several ports.
    Ports(&'a mut [Port]),
}

impl SecondaryEnds<'_> {
    /// Returns whether one of them is standard input and output.
    fn has_stdio(&self) -> bool {
        match self {
            Self::Console(console) => console.is_stdio(),
            Self::Ports(ports) => ports.iter().any(Port::is_stdio),
        }
    }
}

/// A running VM. Dropping it ends the VM.
pub struct VmProcess {
    /// Name of the program, for messages.
    name: &'static str,
    child: Child,
    device_processes: Vec<DeviceProcess>,
    signals: &'static EndingSignals,
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
        let signals = EndingSignals::subscribe()?;
        let child = command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .start_error(name)?;
        Ok(Self { name, child, device_processes: Vec::new(), signals })
    }

    /// Adds device processes. The VM ends with any of them.
    pub fn with_devices(mut self, device_processes: Vec<DeviceProcess>) -> Self {
        self.device_processes.extend(device_processes);
        self
    }

    /// Returns the number of the process in `/proc`.
    pub fn process(&self) -> u32 {
        proc_number::of_child(&self.child)
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
        let (stream, ends) = second.map(|SecondaryConsole { stream, ends }| (stream, ends)).unzip();
        if let Some(stream) = &stream {
            set_nonblocking(stream.as_fd())?;
        }
        let has_terminal =
            console.is_stdio() || ends.as_ref().is_some_and(SecondaryEnds::has_stdio);
        let raw = enter_terminal(has_terminal, keys);
        let mut lines = vec![ConsoleLine::new(input.as_fd(), output.as_fd(), console)];
        let mut ports = None;
        match (&stream, ends) {
            (Some(stream), Some(SecondaryEnds::Console(console))) => {
                lines.push(ConsoleLine::new(stream.as_fd(), stream.as_fd(), console));
            }
            (Some(stream), Some(SecondaryEnds::Ports(ends))) => {
                ports = Some(PortMux::new(stream, ends));
            }
            _ => {}
        }
        let mut events = VmEvents {
            raw: raw.is_some(),
            keys: Keys::default(),
            lines,
            ports,
            messages: MessageLog::new(self.name, Some(profile::MARK)),
            errors: Some(errors.as_fd()),
            device_processes: &self.device_processes,
            watched: sources,
        };
        let stop = event_loop::run(&mut events, self.signals, deadline, "wait for the VM");
        if !matches!(stop, Ok(LoopExit::OutputClosed)) {
            events.pass_rest();
        }
        let VmEvents { mut messages, .. } = events;
        drop(raw);
        let cause = self.exit_cause(stop?)?;
        messages.end();
        Ok((cause, messages))
    }

    /// Returns the cause of the end of the VM, with the status of the process that exited.
    fn exit_cause(&mut self, stop: LoopExit) -> Result<ExitCause, Failure> {
        Ok(match stop {
            LoopExit::Cause(cause) => cause,
            LoopExit::DeviceProcess(index) => {
                let (name, status) = self.device_processes[index].end()?;
                ExitCause::DeviceProcess(name, status)
            }
            LoopExit::OutputClosed => {
                let status = self.child.wait().os_error("wait for the VM")?;
                ExitCause::Exited(status)
            }
        })
    }
}

/// Takes the terminal, if it is the VM's console, and prints the help on its keys.
fn enter_terminal(has_terminal: bool, keys: &str) -> Option<Raw> {
    let raw = if has_terminal { Raw::enter() } else { None };
    if raw.is_some() {
        if messages::is_json() {
            messages::say(Level::Info, keys);
        } else {
            let keys = keys.replace('\n', "\r\n");
            messages::to_stderr(format_args!("parador: {keys}\r\n"));
        }
    }
    raw
}

fn set_nonblocking(pipe: BorrowedFd<'_>) -> Result<(), Failure> {
    fcntl_getfl(pipe)
        .and_then(|flags| fcntl_setfl(pipe, flags | OFlags::NONBLOCK))
        .os_error("set up a pipe")
}

/// A console line of the VM and its connection on the host.
struct ConsoleLine<'a> {
    input: BorrowedFd<'a>,
    output: BorrowedFd<'a>,
    console: &'a mut HostConsole,
    input_open: bool,
    output_open: bool,
    /// Input that the VM has not taken yet; no more is read meanwhile, except from a terminal in
    /// raw mode.
    pending: Vec<u8>,
}

impl<'a> ConsoleLine<'a> {
    fn new(input: BorrowedFd<'a>, output: BorrowedFd<'a>, console: &'a mut HostConsole) -> Self {
        Self { input, output, console, input_open: true, output_open: true, pending: Vec::new() }
    }

    /// Returns the descriptors to poll and their events. `raw`: a terminal is in raw mode.
    fn interest(
        &self,
        index: usize,
        raw: bool,
    ) -> impl Iterator<Item = (Source, BorrowedFd<'_>, PollFlags)> {
        // Some keys of a terminal are for `parador`, and a client that connects gets output.
        let is_awaited = raw && self.console.is_stdio() || !self.console.is_connected();
        let reads = self.input_open && (self.pending.is_empty() || is_awaited);
        let keyboard = self.console.input().filter(|_| reads);
        let keyboard = keyboard.map(|fd| (Source::Keyboard(index), fd, PollFlags::IN));
        // No more is read while output waits for room.
        let output = match self.console.waits() {
            Some(console) => (Source::Room(index), console, PollFlags::OUT),
            None => (Source::Output(index), self.output, PollFlags::IN),
        };
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

/// Handler of the events of a running VM.
struct VmEvents<'a, 'w> {
    raw: bool,
    keys: Keys,
    lines: Vec<ConsoleLine<'a>>,
    ports: Option<PortMux<'a>>,
    messages: MessageLog,
    /// The VM's standard error; `None` once it is closed.
    errors: Option<BorrowedFd<'a>>,
    device_processes: &'a [DeviceProcess],
    watched: Option<&'w mut dyn EventSource>,
}

/// Source of an event.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    /// Hang-up of the device process with this index.
    DeviceProcess(usize),
    /// Output of the console line with this index.
    Output(usize),
    /// Room for such output on the host.
    Room(usize),
    Errors,
    Keyboard(usize),
    Input(usize),
    Ports(PortSource),
    /// Descriptor of [`EventSource`] with this index.
    Watched(usize),
}

impl EventHandler for VmEvents<'_, '_> {
    type Source = Source;
    type End = LoopExit;

    fn interest(&self) -> Vec<(Source, BorrowedFd<'_>, PollFlags)> {
        let processes = self.device_processes.iter().enumerate();
        let processes = processes
            .map(|(index, process)| (Source::DeviceProcess(index), process.alive(), PollFlags::IN));
        let lines = self.lines.iter().enumerate();
        let lines = lines.flat_map(|(index, line)| line.interest(index, self.raw));
        let errors = self.errors.map(|fd| (Source::Errors, fd, PollFlags::IN));
        let watched = self.watched.as_ref().map(|watched| watched.descriptors());
        let watched = watched.unwrap_or_default().into_iter().enumerate();
        let watched = watched.map(|(index, fd)| (Source::Watched(index), fd, PollFlags::IN));
        let ports = self.ports.iter().flat_map(|ports| ports.interest(self.raw));
        let ports = ports.map(|(source, fd, flags)| (Source::Ports(source), fd, flags));
        processes.chain(lines).chain(ports).chain(errors).chain(watched).collect()
    }

    fn finished(&self) -> Option<LoopExit> {
        let has_output = self.lines.iter().any(|line| line.output_open);
        let has_ports = self.ports.as_ref().is_some_and(PortMux::is_open);
        let is_open = self.errors.is_some() || has_output || has_ports;
        (!is_open).then_some(LoopExit::OutputClosed)
    }

    fn ready(&mut self, source: Source) -> Result<Option<LoopExit>, Failure> {
        let cause = match source {
            Source::DeviceProcess(index) => return Ok(Some(LoopExit::DeviceProcess(index))),
            Source::Output(index) => {
                let line = &mut self.lines[index];
                match pass(line.output, line.console)? {
                    Flow::Open => None,
                    Flow::Closed => {
                        line.output_open = false;
                        None
                    }
                    Flow::Ended(cause) => Some(cause),
                }
            }
            Source::Room(index) => {
                let console = &mut *self.lines[index].console;
                let flushed = console.flush();
                written(flushed, console)?
            }
            Source::Errors => {
                self.receive_errors()?;
                None
            }
            Source::Keyboard(index) => self.keyboard(index).then_some(ExitCause::Keyboard),
            Source::Input(index) => {
                self.lines[index].send();
                None
            }
            Source::Ports(source) => match &mut self.ports {
                Some(ports) => {
                    let keys = self.raw.then_some(&mut self.keys);
                    ports.ready(source, keys)?.then_some(ExitCause::Keyboard)
                }
                None => None,
            },
            Source::Watched(index) => {
                self.watched.as_mut().and_then(|watched| watched.readable(index))
            }
        };
        Ok(cause.map(LoopExit::Cause))
    }
}

impl VmEvents<'_, '_> {
    /// Reads the VM's standard error.
    fn receive_errors(&mut self) -> Result<(), Failure> {
        let Some(from) = self.errors else { return Ok(()) };
        let mut buffer = [0; 4096];
        let length = receive(from, &mut buffer)?;
        self.messages.bytes(&buffer[..length]);
        if length == 0 {
            self.errors = None;
        }
        Ok(())
    }

    /// Passes on what the VM has written before its end, as long as there is room for it.
    fn pass_rest(&mut self) {
        /// Reads of a line: as many as empty a full pipe of Linux (pipe(7)).
        const READS: usize = 17;
        for line in self.lines.iter_mut().filter(|line| line.output_open) {
            for _ in 0..READS {
                let mut output = [PollFd::new(&line.output, PollFlags::IN)];
                let has_output = poll(&mut output, Some(&Timespec::default())) == Ok(1);
                // An error has no receiver: the VM ends for another reason.
                if line.console.flush().is_err() || line.console.waits().is_some() || !has_output {
                    break;
                }
                let _ = pass(line.output, line.console);
            }
        }
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

impl From<ExitCause> for LoopExit {
    fn from(cause: ExitCause) -> Self {
        Self::Cause(cause)
    }
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
    let result = console.write(&buffer[..length]);
    written(result, console).map(|end| end.map_or(Flow::Open, Flow::Ended))
}

/// Handles the result of a write to a console; returns the end of a VM whose reader has gone.
fn written(result: io::Result<()>, console: &HostConsole) -> Result<Option<ExitCause>, Failure> {
    match result {
        Ok(()) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            Ok(Some(ExitCause::OutputClosed))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::console::Target;

    #[test]
    fn unread_input_blocks_neither_keys_nor_connections() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let (stream, _peer) = UnixStream::pair().unwrap();
        let reads = |console: &mut HostConsole, raw| {
            let mut line = ConsoleLine::new(stream.as_fd(), stream.as_fd(), console);
            line.pending.push(b'k');
            line.interest(0, raw).any(|(source, ..)| source == Source::Keyboard(0))
        };
        let mut console = HostConsole::stdio().unwrap();
        assert_eq!([false, true].map(|raw| reads(&mut console, raw)), [false, true]);
        let mut console = HostConsole::open(&Target::Unix(socket.clone()), "it").unwrap();
        assert!(reads(&mut console, false), "no client");
        let _client = UnixStream::connect(&socket).unwrap();
        assert!(matches!(console.read(&mut [0]), Input::Nothing));
        assert!(!reads(&mut console, true), "a client");
    }
}

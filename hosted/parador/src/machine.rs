//! A machine that is another program, and the terminal that is its console.
//!
//! The program talks to pipes, never to the terminal itself: whatever ends this program, the terminal's modes are restored here and the
//! machine dies with it (parent-death signal). It runs in a process group of its own, so signals from the terminal reach this
//! program only.

use crate::console::{Console, Input};
use crate::failure::{self, Failure};
use crate::interrupt::ENDING;
use crate::messages::{self, Heard, Level};
use crate::profile;
use crate::terminal::{Keys, Raw};
use hosted_jail::READY;
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

/// Time that a process beside the machine has to write what it keeps.
const AT_END: Duration = Duration::from_secs(10);
/// Bytes of a refusal that are read.
const REFUSAL: u64 = 16 << 10;

/// How a machine ended.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    /// Its program ended.
    Exited(ExitStatus),
    /// The time limit was reached.
    Timeout,
    /// This program got a signal that asks it to end.
    Signal(i32),
    /// The user pressed Ctrl-A X.
    Keys,
    /// Nobody reads the console any more.
    OutputClosed,
    /// Somebody wants it by the control socket.
    Request,
    /// So, and it starts anew.
    Reset,
    /// Another process of it ended: which, and how.
    Other(String, ExitStatus),
}

/// What else is watched while a machine runs.
pub trait Watched {
    /// Descriptors that may become readable.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>>;

    /// The descriptor of this index is readable. An end ends the machine.
    fn readable(&mut self, index: usize) -> Option<End>;
}

/// When a time limit that begins now is reached.
pub fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}

/// A process beside the machine's program that the machine cannot do without. Dropping it ends it.
#[derive(Debug)]
pub struct Other {
    name: String,
    child: Child,
    /// Closed when it ends.
    alive: ChildStdout,
}

impl Other {
    /// Starts it, with a pipe as its output, and waits until it says there that it serves. `name` is for messages.
    pub fn start(name: String, command: &mut Command) -> Result<Self, Failure> {
        let started = command.process_group(0).spawn();
        let mut child = started.map_err(|error| Failure::program(&name, &error))?;
        let Some(alive) = child.stdout.take() else {
            return Err(Failure::new(failure::INTERNAL, format!("{name} has no pipe")));
        };
        let mut other = Self { name, child, alive };
        let mut said = [READY];
        match other.alive.read(&mut said) {
            Ok(1) if said == [READY] => Ok(other),
            _ => Err(other.refusal(said)),
        }
    }

    /// What it says instead, which begins with `first`.
    fn refusal(mut self, first: [u8; 1]) -> Failure {
        let mut said = first.to_vec();
        // What can be read is what there is to say.
        let _ = (&mut self.alive).take(REFUSAL).read_to_end(&mut said);
        let text = String::from_utf8_lossy(&said).replace(char::is_control, "");
        let (code, text) = match self.child.wait() {
            Ok(status) if status.code() == Some(failure::BAD_CONFIG.into()) => {
                (failure::BAD_CONFIG, text)
            }
            Ok(status) => (failure::INTERNAL, format!("its process has ended ({status}) {text}")),
            Err(error) => (failure::INTERNAL, error.to_string()),
        };
        Failure::new(code, format!("{}: {}", self.name, text.trim()))
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let deadline = Instant::now() + AT_END;
        let id = Pid::from_child(&self.child);
        // Fails if it has ended, which is what is wanted.
        let _ = kill_process(id, Signal::TERM);
        while Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) {
            thread::sleep(Duration::from_millis(2));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A running machine. Dropping it ends it.
pub struct Machine {
    /// Its program's name, for messages.
    name: &'static str,
    child: Child,
    others: Vec<Other>,
    /// One pipe for each of [`ENDING`], readable when the signal came.
    signals: Vec<(i32, UnixStream)>,
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Fails if it has ended, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Machine {
    /// Starts the program, which is called `name` in messages.
    pub fn start(name: &'static str, mut command: Command) -> Result<Self, Failure> {
        let mut signals = Vec::new();
        for signal in ENDING {
            let registered = UnixStream::pair().and_then(|(ours, theirs)| {
                pipe::register(signal, theirs)?;
                Ok(ours)
            });
            let ours = registered.map_err(|error| Failure::os("listen to signals", &error))?;
            signals.push((signal, ours));
        }
        let child = command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| Failure::program(name, &error))?;
        Ok(Self { name, child, others: Vec::new(), signals })
    }

    /// Adds processes that end with it, and it with them.
    pub fn add(&mut self, others: Vec<Other>) {
        self.others.extend(others);
    }

    /// The number of its process.
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Carries bytes between terminal and machine until something ends. Returns the program's messages, too.
    pub fn serve(
        mut self,
        deadline: Option<Instant>,
        keys: &str,
        console: &mut Console,
        watched: Option<&mut dyn Watched>,
    ) -> Result<(End, Heard), Failure> {
        let (Some(input), Some(output), Some(errors)) =
            (self.child.stdin.take(), self.child.stdout.take(), self.child.stderr.take())
        else {
            return Err(Failure::new(failure::INTERNAL, format!("{} has no pipes", self.name)));
        };
        set_nonblocking(input.as_fd())?;
        let raw = if console.is_stdio() { Raw::enter() } else { None };
        if raw.is_some() {
            if messages::is_json() {
                messages::say(Level::Info, keys);
            } else {
                eprint!("parador: {}\r\n", keys.replace('\n', "\r\n"));
            }
        }
        let mut traffic = Traffic {
            raw: raw.is_some(),
            keys: Keys::default(),
            input_open: true,
            pending: Vec::new(),
            messages: Heard::new(self.name, Some(profile::MARK)),
        };
        let pipes = [input.as_fd(), output.as_fd(), errors.as_fd()];
        let stop = traffic.carry(&self.signals, &self.others, pipes, console, deadline, watched);
        drop(raw);
        let end = match stop? {
            Stop::End(end) => end,
            Stop::Other(number) => {
                let Other { name, child, .. } = &mut self.others[number];
                let status =
                    child.wait().map_err(|error| Failure::os("wait for a process", &error))?;
                End::Other(name.clone(), status)
            }
            Stop::Closed => {
                let status = self
                    .child
                    .wait()
                    .map_err(|error| Failure::os("wait for the machine", &error))?;
                End::Exited(status)
            }
        };
        traffic.messages.end();
        Ok((end, traffic.messages))
    }
}

fn set_nonblocking(pipe: BorrowedFd<'_>) -> Result<(), Failure> {
    fcntl_getfl(pipe)
        .and_then(|flags| fcntl_setfl(pipe, flags | OFlags::NONBLOCK))
        .map_err(|error| Failure::os("set up a pipe", &error.into()))
}

/// Bytes on their way.
struct Traffic {
    raw: bool,
    keys: Keys,
    input_open: bool,
    /// Keys that the machine has not taken yet; while there are any, no more are read.
    pending: Vec<u8>,
    messages: Heard,
}

/// What is watched while a machine runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Signal(i32),
    /// Another process, by its number.
    Other(usize),
    Output,
    Errors,
    Keyboard,
    Input,
    /// A descriptor of [`Watched`].
    Watched(usize),
}

impl Traffic {
    /// Until something ends.
    fn carry(
        &mut self,
        signals: &[(i32, UnixStream)],
        others: &[Other],
        [input, output, errors]: [BorrowedFd<'_>; 3],
        console: &mut Console,
        deadline: Option<Instant>,
        mut watched: Option<&mut dyn Watched>,
    ) -> Result<Stop, Failure> {
        let (mut output_open, mut errors_open) = (true, true);
        while output_open || errors_open {
            // A descriptor reports hang-ups even if nothing is wanted from it; so only those that
            // matter now are listed.
            let reads = self.input_open && self.pending.is_empty();
            let keyboard = console.input().filter(|_| reads);
            let pipes = [
                (output_open, Source::Output, output, PollFlags::IN),
                (errors_open, Source::Errors, errors, PollFlags::IN),
                (keyboard.is_some(), Source::Keyboard, keyboard.unwrap_or(input), PollFlags::IN),
                (!self.pending.is_empty(), Source::Input, input, PollFlags::OUT),
            ];
            let signals = signals
                .iter()
                .map(|(signal, pipe)| (Source::Signal(*signal), pipe.as_fd(), PollFlags::IN));
            let others = others
                .iter()
                .enumerate()
                .map(|(number, other)| (Source::Other(number), other.alive.as_fd(), PollFlags::IN));
            let pipes = pipes
                .into_iter()
                .filter(|pipe| pipe.0)
                .map(|(_, source, fd, flags)| (source, fd, flags));
            let more = watched.as_ref().map(|watched| watched.descriptors()).unwrap_or_default();
            let more = more
                .into_iter()
                .enumerate()
                .map(|(index, fd)| (Source::Watched(index), fd, PollFlags::IN));
            let (sources, mut fds): (Vec<Source>, Vec<PollFd<'_>>) = signals
                .chain(others)
                .chain(pipes)
                .chain(more)
                .map(|(source, fd, flags)| (source, PollFd::from_borrowed_fd(fd, flags)))
                .unzip();
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(Stop::End(End::Timeout));
            }
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            match poll(&mut fds, left.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(Failure::os("wait for the machine", &error.into())),
            }
            let ready = sources.into_iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
            let ready: Vec<Source> = ready.map(|(source, _)| source).collect();
            for source in ready {
                match source {
                    Source::Signal(signal) => return Ok(Stop::End(End::Signal(signal))),
                    Source::Other(number) => return Ok(Stop::Other(number)),
                    Source::Output => match pass(output, console)? {
                        Flow::Open => {}
                        Flow::Closed => output_open = false,
                        Flow::Ended(end) => return Ok(Stop::End(end)),
                    },
                    Source::Errors => errors_open = self.errors(errors)?,
                    Source::Keyboard => {
                        if self.keyboard(console) {
                            return Ok(Stop::End(End::Keys));
                        }
                    }
                    Source::Input => self.input(input),
                    Source::Watched(index) => {
                        let end = watched.as_mut().and_then(|watched| watched.readable(index));
                        if let Some(end) = end {
                            return Ok(Stop::End(end));
                        }
                    }
                }
            }
        }
        Ok(Stop::Closed)
    }

    /// From the machine's standard error.
    fn errors(&mut self, from: BorrowedFd<'_>) -> Result<bool, Failure> {
        let mut buffer = [0; 4096];
        let length = receive(from, &mut buffer)?;
        self.messages.bytes(&buffer[..length]);
        Ok(length != 0)
    }

    /// From the console. `true`: the user ends the machine.
    fn keyboard(&mut self, console: &mut Console) -> bool {
        let mut buffer = [0; 4096];
        match console.read(&mut buffer) {
            Input::Bytes(length) if self.raw => {
                return self.keys.pass(&buffer[..length], &mut self.pending);
            }
            Input::Bytes(length) => self.pending.extend_from_slice(&buffer[..length]),
            Input::Nothing => {}
            Input::End => self.input_open = false,
        }
        false
    }

    /// To the machine, as much as it takes.
    fn input(&mut self, to: BorrowedFd<'_>) {
        match write(to, &self.pending) {
            Ok(taken) => drop(self.pending.drain(..taken)),
            Err(Errno::AGAIN | Errno::INTR) => {}
            // It has ended, or closed its side: nothing will be taken any more.
            Err(_) => {
                self.pending.clear();
                self.input_open = false;
            }
        }
    }
}

/// Why no more bytes are carried.
enum Stop {
    /// The machine closed its pipes, so it has ended.
    Closed,
    /// Something else.
    End(End),
    /// The other process with this number has ended.
    Other(usize),
}

/// What became of the machine's output.
enum Flow {
    Open,
    Closed,
    Ended(End),
}

/// From the machine to its console.
fn pass(from: BorrowedFd<'_>, console: &mut Console) -> Result<Flow, Failure> {
    let mut buffer = [0; 4096];
    let length = receive(from, &mut buffer)?;
    if length == 0 {
        return Ok(Flow::Closed);
    }
    match console.write(&buffer[..length]) {
        Ok(()) => Ok(Flow::Open),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            Ok(Flow::Ended(End::OutputClosed))
        }
        Err(error) if console.is_stdio() => Err(Failure::os("write to standard output", &error)),
        Err(error) => Err(Failure::os("write what the guest prints", &error)),
    }
}

/// Reads what is there; 0 at the end of the file.
fn receive(from: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<usize, Failure> {
    loop {
        match read(from, &mut *buffer) {
            Ok(length) => return Ok(length),
            Err(Errno::INTR) => {}
            Err(error) => return Err(Failure::os("read", &error.into())),
        }
    }
}

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
use crate::remains;
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

/// A line beside the serial one: the machine's side of it, and what it is connected to.
pub struct Second<'a> {
    /// Both directions.
    pub stream: UnixStream,
    /// What it is connected to.
    pub console: &'a mut Console,
}

/// When a time limit that begins now is reached.
pub fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}

/// How long that is from now on, for poll(2): for ever, or some time; `None`: it is reached.
pub fn left(deadline: Option<Instant>) -> Option<Option<Timespec>> {
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    if left == Some(Duration::ZERO) {
        return None;
    }
    Some(left.and_then(|left| Timespec::try_from(left).ok()))
}

/// One pipe for each of [`ENDING`], readable when the signal has come, which then does nothing else.
pub fn ending_signals() -> Result<Vec<(i32, UnixStream)>, Failure> {
    let pipes = ENDING.into_iter().map(|signal| {
        let (ours, theirs) = UnixStream::pair()?;
        pipe::register(signal, theirs)?;
        Ok((signal, ours))
    });
    let pipes: io::Result<_> = pipes.collect();
    pipes.map_err(|error| Failure::os("listen to signals", &error))
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
        let told = |status: &ExitStatus| {
            let told = [failure::BAD_CONFIG, failure::OS_ERROR];
            told.into_iter().find(|code| status.code() == Some((*code).into()))
        };
        let (code, text) = match self.child.wait().map(|status| (told(&status), status)) {
            Ok((Some(code), _)) => (code, text),
            Ok((None, status)) => {
                (failure::INTERNAL, format!("its process has ended ({status}) {text}"))
            }
            Err(error) => (failure::INTERNAL, failure::describe(&error)),
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
        remains::wait(id);
    }
}

/// A running machine. Dropping it ends it.
pub struct Machine {
    /// Its program's name, for messages.
    name: &'static str,
    child: Child,
    others: Vec<Other>,
    /// See [`ending_signals`].
    signals: Vec<(i32, UnixStream)>,
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Fails if it has ended, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
        remains::wait(Pid::from_child(&self.child));
    }
}

impl Machine {
    /// Starts the program, which is called `name` in messages.
    pub fn start(name: &'static str, mut command: Command) -> Result<Self, Failure> {
        let signals = ending_signals()?;
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
        second: Option<Second<'_>>,
        watched: Option<&mut dyn Watched>,
    ) -> Result<(End, Heard), Failure> {
        let (Some(input), Some(output), Some(errors)) =
            (self.child.stdin.take(), self.child.stdout.take(), self.child.stderr.take())
        else {
            return Err(Failure::new(failure::INTERNAL, format!("{} has no pipes", self.name)));
        };
        set_nonblocking(input.as_fd())?;
        let (stream, second) = second.map(|Second { stream, console }| (stream, console)).unzip();
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
        let mut lines = vec![Line::new(input.as_fd(), output.as_fd(), console)];
        if let (Some(stream), Some(console)) = (&stream, second) {
            lines.push(Line::new(stream.as_fd(), stream.as_fd(), console));
        }
        let mut traffic = Traffic {
            raw: raw.is_some(),
            keys: Keys::default(),
            lines,
            messages: Heard::new(self.name, Some(profile::MARK)),
        };
        let stop = traffic.carry(&self.signals, &self.others, errors.as_fd(), deadline, watched);
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

/// A line of the machine, and what it is connected to.
struct Line<'a> {
    input: BorrowedFd<'a>,
    output: BorrowedFd<'a>,
    console: &'a mut Console,
    input_open: bool,
    output_open: bool,
    /// Keys that the machine has not taken yet; while there are any, no more are read.
    pending: Vec<u8>,
}

impl<'a> Line<'a> {
    fn new(input: BorrowedFd<'a>, output: BorrowedFd<'a>, console: &'a mut Console) -> Self {
        Self { input, output, console, input_open: true, output_open: true, pending: Vec::new() }
    }

    /// What is wanted of its descriptors.
    fn wanted(&self, index: usize) -> impl Iterator<Item = (Source, BorrowedFd<'_>, PollFlags)> {
        let reads = self.input_open && self.pending.is_empty();
        let keyboard = self.console.input().filter(|_| reads);
        let keyboard = keyboard.map(|fd| (Source::Keyboard(index), fd, PollFlags::IN));
        let output = (Source::Output(index), self.output, PollFlags::IN);
        let input = (Source::Input(index), self.input, PollFlags::OUT);
        let output = self.output_open.then_some(output);
        let input = (!self.pending.is_empty()).then_some(input);
        output.into_iter().chain(keyboard).chain(input)
    }

    /// To the machine, as much as it takes.
    fn send(&mut self) {
        match write(self.input, &self.pending) {
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

/// Bytes on their way.
struct Traffic<'a> {
    raw: bool,
    keys: Keys,
    lines: Vec<Line<'a>>,
    messages: Heard,
}

/// What is watched while a machine runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Signal(i32),
    /// Another process, by its number.
    Other(usize),
    /// Of a line, by its number.
    Output(usize),
    Errors,
    Keyboard(usize),
    Input(usize),
    /// A descriptor of [`Watched`].
    Watched(usize),
}

impl Traffic<'_> {
    /// Until something ends.
    fn carry(
        &mut self,
        signals: &[(i32, UnixStream)],
        others: &[Other],
        errors: BorrowedFd<'_>,
        deadline: Option<Instant>,
        mut watched: Option<&mut dyn Watched>,
    ) -> Result<Stop, Failure> {
        let mut errors_open = true;
        while errors_open || self.lines.iter().any(|line| line.output_open) {
            // A descriptor reports hang-ups even if nothing is wanted from it; so only those that
            // matter now are listed.
            let errors_wanted = errors_open.then_some((Source::Errors, errors, PollFlags::IN));
            let lines = self.lines.iter().enumerate();
            let pipes = lines.flat_map(|(index, line)| line.wanted(index)).chain(errors_wanted);
            let signals = signals
                .iter()
                .map(|(signal, pipe)| (Source::Signal(*signal), pipe.as_fd(), PollFlags::IN));
            let others = others
                .iter()
                .enumerate()
                .map(|(number, other)| (Source::Other(number), other.alive.as_fd(), PollFlags::IN));
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
            let Some(left) = left(deadline) else { return Ok(Stop::End(End::Timeout)) };
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
                    Source::Output(index) => {
                        let line = &mut self.lines[index];
                        match pass(line.output, line.console)? {
                            Flow::Open => {}
                            Flow::Closed => line.output_open = false,
                            Flow::Ended(end) => return Ok(Stop::End(end)),
                        }
                    }
                    Source::Errors => errors_open = self.errors(errors)?,
                    Source::Keyboard(index) => {
                        if self.keyboard(index) {
                            return Ok(Stop::End(End::Keys));
                        }
                    }
                    Source::Input(index) => self.lines[index].send(),
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

    /// From what a line is connected to. `true`: the user ends the machine.
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
            // The other side of a socket has ended and left something that it was sent.
            Err(Errno::CONNRESET) => return Ok(0),
            Err(error) => return Err(Failure::os("read", &error.into())),
        }
    }
}

//! Carrier of a command or of a container's process: its streams or terminal, signals, and its end.

use crate::connection::{ControlConnection, check_time, time_left, time_limit};
use crate::patience::{AgentDeadline, AgentTimeout};
use crate::vm::AgentVm;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::interrupt::ENDING;
use hosted_command::streams;
use hosted_monitor::terminal::Raw;
use proto::agent::{AgentRequest, Answer, End, Stream, TerminalSize, io as wire};
use rustix::stdio::stdout;
use rustix::termios::tcgetwinsize;
use signal_hook::consts::SIGWINCH;
use signal_hook::iterator::Signals;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// A wait without a limit.
const FOREVER: Duration = Duration::from_secs(1 << 32);
/// Bytes copied at once.
const ROOM: usize = 64 << 10;

/// End of a command that was carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried {
    /// Its exit code, or 128 and the number of the signal that killed it.
    pub code: u8,
    /// Processes of its container were killed for lack of memory.
    pub lacked_memory: bool,
}

/// Carrier: this process, connected to the agent.
pub struct Carrier {
    control: ControlConnection,
    signals: Signals,
    streams: Streams,
    has_terminal: bool,
}

/// Carrier, or the exit code of one that a signal has ended before its command was started.
pub type Connected = Result<Carrier, u8>;

impl Carrier {
    /// Connects to the agent of a VM, which has `limit` for its answer. The command gets the
    /// signals `forwarded` once it was started; before, those that end programs end the carrier.
    /// Its streams are those of this process, or this process' terminal.
    ///
    /// # Errors
    /// The VM ends, or no agent answers in time; `deadline` has passed: 124.
    pub fn connect(
        vm: &mut AgentVm,
        limit: AgentTimeout,
        deadline: Option<Instant>,
        forwarded: &[i32],
        has_terminal: bool,
        set_up: Option<&AgentRequest<'_>>,
    ) -> Result<Connected, Failure> {
        let mut agent_deadline = AgentDeadline::new(limit);
        let mut signals = Signals::new(forwarded).os_error("install signal handlers")?;
        let control = loop {
            if let Some(code) = early_end(&mut signals) {
                return Ok(Err(code));
            }
            check_time(deadline)?;
            if let Some(control) = ControlConnection::open(vm, &mut agent_deadline)? {
                break control;
            }
        };
        if let Some(request) = set_up {
            control.request_by(vm, request, deadline)?;
        }
        if let Some(code) = early_end(&mut signals) {
            return Ok(Err(code));
        }
        let streams = Streams::connect(&control, vm, has_terminal, deadline)?;
        Ok(Ok(Self { control, signals, streams, has_terminal }))
    }

    /// Returns the exit code if a signal has ended this process before its command was started.
    pub fn early_end(&mut self) -> Option<u8> {
        early_end(&mut self.signals)
    }

    /// Returns the control connection. Until a request is sent it has nothing to read, except for
    /// its end: that of the VM.
    pub fn control(&self) -> BorrowedFd<'_> {
        self.control.stream.as_fd()
    }

    /// Returns the size of the command's terminal.
    pub fn terminal(&self) -> Option<TerminalSize> {
        self.has_terminal.then(window)
    }

    /// Sends a request and waits until it was carried out.
    ///
    /// # Errors
    /// The agent refuses it, or the connection fails.
    pub fn request(&self, vm: &mut AgentVm, request: &AgentRequest<'_>) -> Result<(), Failure> {
        self.control.request(vm, request)
    }

    /// Sends a request, as [`Self::request`] does, unless `deadline` has passed.
    ///
    /// # Errors
    /// Those of [`Self::request`]; the deadline: 124.
    pub fn request_by(
        &self,
        vm: &mut AgentVm,
        request: &AgentRequest<'_>,
        deadline: Option<Instant>,
    ) -> Result<(), Failure> {
        self.control.request_by(vm, request, deadline)
    }

    /// Moves bytes and signals until the end of the command, which was started, and of its output.
    ///
    /// # Errors
    /// The VM ends before the command; the time limit: 124; the command's output cannot be written,
    /// as on a full disk.
    pub fn carry(self, vm: &mut AgentVm, deadline: Option<Instant>) -> Result<Carried, Failure> {
        let Self { control, signals, streams, has_terminal } = self;
        let _raw = has_terminal.then(Raw::enter);
        let outputs = streams.copy()?;
        let size = has_terminal.then(window);
        if let Some(size) = size {
            // An engine may have set it since the command was created. The connection ends with
            // the command.
            let _ = wire::send(&control.stream, &AgentRequest::Resize(size));
        }
        forward(signals, &control.stream, size)?;
        let end = end_of(&control)?;
        match end.recv_timeout(time_left(deadline, FOREVER)) {
            Ok(Ok(Some(carried))) => finish(&outputs, deadline).map(|()| carried),
            Err(RecvTimeoutError::Timeout) => Err(time_limit()),
            // The streams may stay open: this process ends with its failure.
            Ok(Err(error)) => {
                let text = format!("the agent's answer cannot be understood: {error}");
                Err(Failure::new(failure::INTERNAL, text))
            }
            Ok(Ok(None)) | Err(RecvTimeoutError::Disconnected) => Err(match vm.wait() {
                true => vm.failure("the VM has ended before the command"),
                false => vm.failure("the agent has ended before the command"),
            }),
        }
    }
}

/// Waits until all output is written: each thread has sent its result, or has panicked, which was
/// reported.
fn finish(outputs: &Receiver<Option<io::Error>>, deadline: Option<Instant>) -> Result<(), Failure> {
    let mut first = None;
    loop {
        match outputs.recv_timeout(time_left(deadline, FOREVER)) {
            Ok(error) => first = first.or(error),
            Err(RecvTimeoutError::Disconnected) => break,
            // Its reader does not read.
            Err(RecvTimeoutError::Timeout) => return Err(time_limit()),
        }
    }
    first.map_or(Ok(()), |error| Err(Failure::os("write the command's output", &error)))
}

/// Returns the exit code if a signal is to end this process: there is no command yet that could get
/// it.
fn early_end(signals: &mut Signals) -> Option<u8> {
    let signal = signals.pending().find(|signal| ENDING.contains(signal));
    signal.map(|signal| 128_u8.wrapping_add(signal as u8))
}

/// Returns the size of this process' terminal.
fn window() -> TerminalSize {
    let size = tcgetwinsize(stdout());
    size.map_or(TerminalSize { rows: 24, columns: 80 }, |size| TerminalSize {
        rows: size.ws_row,
        columns: size.ws_col,
    })
}

/// Connected streams of a command.
enum Streams {
    Terminal(UnixStream),
    Three([UnixStream; 3]),
}

impl Streams {
    fn connect(
        control: &ControlConnection,
        vm: &mut AgentVm,
        has_terminal: bool,
        deadline: Option<Instant>,
    ) -> Result<Self, Failure> {
        let mut connect = |stream| control.stream(vm, stream, deadline);
        if has_terminal {
            return connect(Stream::Terminal).map(Self::Terminal);
        }
        let [input, output] = [connect(Stream::Input)?, connect(Stream::Output)?];
        Ok(Self::Three([input, output, connect(Stream::Error)?]))
    }

    /// Starts copying; each thread of output ends with it, and sends the error of a lost output.
    fn copy(self) -> Result<Receiver<Option<io::Error>>, Failure> {
        let has_terminal = matches!(self, Self::Terminal(_));
        let (input, outputs) = match self {
            Self::Terminal(stream) => {
                let own = stream.try_clone().os_error("copy a descriptor")?;
                (stream, vec![(own, own_file(io::stdout().as_fd())?)])
            }
            Self::Three([input, output, error]) => {
                let stdout = own_file(io::stdout().as_fd())?;
                let stderr = own_file(io::stderr().as_fd())?;
                (input, vec![(output, stdout), (error, stderr)])
            }
        };
        let stdin = own_file(io::stdin().as_fd())?;
        // It may wait for input when the command has ended, and ends with this process.
        spawn(move || {
            // The command has closed its input, or ended.
            let _ = copy(stdin, &input);
            let _ = input.shutdown(Shutdown::Write);
        })?;
        let (sender, receiver) = sync_channel(outputs.len());
        for (from, to) in outputs {
            let sender = sender.clone();
            spawn(move || {
                let copied = copy(&from, to);
                // No reader takes more: the command gets SIGPIPE.
                let _ = from.shutdown(Shutdown::Both);
                // That is all that a command learns of a reader or terminal that has gone.
                let is_lost = |error: &io::Error| error.kind() != ErrorKind::BrokenPipe;
                let lost = copied.err().filter(|error| !has_terminal && is_lost(error));
                // The carrier may have ended by its time limit.
                let _ = sender.send(lost);
            })?;
        }
        Ok(receiver)
    }
}

/// Returns a descriptor of its own for a standard stream, without a buffer.
fn own_file(stream: BorrowedFd<'_>) -> Result<File, Failure> {
    stream.try_clone_to_owned().map(File::from).os_error("copy a descriptor")
}

fn spawn(action: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    thread::Builder::new().spawn(action).map(drop).os_error("create a thread")
}

/// Copies until one side ends.
///
/// # Errors
/// The bytes cannot be written. A failed read is an end.
fn copy(from: impl AsFd, to: impl AsFd) -> io::Result<()> {
    let mut room = vec![0; ROOM];
    while let Ok(count @ 1..) = streams::read(&from, &mut room) {
        streams::write_all(&to, &room[..count])?;
    }
    Ok(())
}

/// Passes signals of this process on to the command, whose terminal has a `size`.
fn forward(
    mut signals: Signals,
    control: &UnixStream,
    mut size: Option<TerminalSize>,
) -> Result<(), Failure> {
    let control = control.try_clone().os_error("copy a descriptor")?;
    spawn(move || {
        for signal in signals.forever() {
            // The connection ends with the command.
            if wire::send(&control, &request_of(signal, &mut size, window)).is_err() {
                return;
            }
        }
    })
}

/// Returns the request that passes a signal on. The guest sends SIGWINCH itself when a terminal
/// gets another size than the last one; without that, it is for the command, as the `STOPSIGNAL` of
/// an image.
fn request_of(
    signal: i32,
    last: &mut Option<TerminalSize>,
    window: impl FnOnce() -> TerminalSize,
) -> AgentRequest<'static> {
    if signal == SIGWINCH
        && let Some(last) = last
    {
        let size = window();
        if std::mem::replace(last, size) != size {
            return AgentRequest::Resize(size);
        }
    }
    AgentRequest::Signal(signal as u8)
}

/// Returns what receives the end of the command, or the error of a malformed message; `None`: the
/// connection has ended before.
fn end_of(control: &ControlConnection) -> Result<Receiver<io::Result<Option<Carried>>>, Failure> {
    let (sender, receiver) = sync_channel(1);
    let control = control.stream.try_clone().os_error("copy a descriptor")?;
    // A command may run for ever.
    control.set_read_timeout(None).os_error("set a time limit")?;
    spawn(move || {
        let end = receive_end(&control);
        if end.is_err() {
            // No more of its messages are read.
            let _ = control.shutdown(Shutdown::Both);
        }
        // The carrier may have ended by its time limit.
        let _ = sender.send(end);
    })?;
    Ok(receiver)
}

fn receive_end(control: &UnixStream) -> io::Result<Option<Carried>> {
    let mut room = Vec::new();
    match wire::receive(control, &mut room) {
        Ok(Some(())) => {}
        Ok(None) => return Ok(None),
        Err(error) if error.kind() == ErrorKind::InvalidData => return Err(error),
        // The VM has ended.
        Err(_) => return Ok(None),
    }
    match wire::read(&room)? {
        Answer::Ended { end, lacked_memory } => {
            let code = match end {
                End::Exited(code) => code,
                End::Signalled(signal) => 128_u8.wrapping_add(signal),
            };
            Ok(Some(Carried { code, lacked_memory }))
        }
        answer => Err(io::Error::other(format!("unexpected answer {answer:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::frame;
    use std::io::{Read, Write};

    fn received(bytes: &[u8]) -> io::Result<Option<Carried>> {
        let (host, guest) = UnixStream::pair().unwrap();
        (&guest).write_all(bytes).unwrap();
        drop(guest);
        receive_end(&host)
    }

    fn past() -> Option<Instant> {
        Some(Instant::now())
    }

    #[test]
    fn a_vm_whose_time_is_over_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let mut vm = AgentVm::attach(folder.path().to_owned());
        let limit = AgentTimeout::default();
        let connected = Carrier::connect(&mut vm, limit, past(), &[], false, None);
        assert_eq!(connected.err().map(|failure| failure.code()), Some(failure::TIMEOUT));
    }

    #[test]
    fn a_command_whose_time_is_over_is_not_started() {
        let folder = tempfile::tempdir().unwrap();
        let mut vm = AgentVm::attach(folder.path().to_owned());
        let (host, mut guest) = UnixStream::pair().unwrap();
        let carrier = Carrier {
            control: ControlConnection { stream: host, command: 1 },
            signals: Signals::new([0; 0]).unwrap(),
            streams: Streams::Terminal(UnixStream::pair().unwrap().0),
            has_terminal: false,
        };
        let late = carrier.request_by(&mut vm, &AgentRequest::Signal(1), past()).unwrap_err();
        assert_eq!(late.code(), failure::TIMEOUT);
        // The agent does not answer in time.
        let soon = Some(Instant::now() + Duration::from_millis(20));
        let request = AgentRequest::Signal(2);
        let late = carrier.request_by(&mut vm, &request, soon).unwrap_err();
        assert_eq!(late.code(), failure::TIMEOUT);
        drop(carrier);
        let mut sent = Vec::new();
        guest.read_to_end(&mut sent).unwrap();
        let mut expected = Vec::new();
        wire::send(&mut expected, &request).unwrap();
        assert_eq!(sent, expected);
    }

    #[test]
    fn output_is_written_until_the_time_limit() {
        let (sender, outputs) = sync_channel(2);
        sender.send(None).unwrap();
        assert_eq!(finish(&outputs, past()).unwrap_err().code(), failure::TIMEOUT);
        sender.send(Some(ErrorKind::StorageFull.into())).unwrap();
        drop(sender);
        assert_eq!(finish(&outputs, None).unwrap_err().code(), failure::OS_ERROR);
        finish(&outputs, past()).unwrap();
    }

    #[test]
    fn ends_are_received() {
        for (end, code) in [(End::Exited(7), 7), (End::Signalled(9), 137)] {
            let ended = frame(&Answer::Ended { end, lacked_memory: true });
            assert_eq!(received(&ended).unwrap(), Some(Carried { code, lacked_memory: true }));
        }
        assert_eq!(received(&[]).unwrap(), None);
        assert_eq!(received(&[1, 0]).unwrap(), None);
        for malformed in [&[1, 0, 0, 0, 0xff][..], &[0xff; 8], &frame(&Answer::Done)] {
            assert!(received(malformed).is_err(), "{malformed:?}");
        }
    }

    #[test]
    fn a_signal_of_resizing_reaches_a_command() {
        let (host, guest) = UnixStream::pair().unwrap();
        forward(Signals::new([SIGWINCH]).unwrap(), &host, None).unwrap();
        signal_hook::low_level::raise(SIGWINCH).unwrap();
        let mut room = Vec::new();
        wire::receive(&guest, &mut room).unwrap().unwrap();
        let request: AgentRequest<'_> = wire::read(&room).unwrap();
        assert!(matches!(request, AgentRequest::Signal(28)), "{request:?}");
        let [size, other] = [80, 90].map(|columns| TerminalSize { rows: 24, columns });
        let mut last = Some(size);
        let mut is_resized =
            |now| matches!(request_of(SIGWINCH, &mut last, || now), AgentRequest::Resize(_));
        assert_eq!([size, other, other].map(&mut is_resized), [false, true, false]);
    }
}

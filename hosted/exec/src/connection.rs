//! Connections to the agent.

use crate::patience::AgentDeadline;
use crate::vm::AgentVm;
use hosted_command::failure::{self, Failure, IoContext};
use proto::agent::container::ContainerStatistics;
use proto::agent::{AgentRequest, Answer, Hello, PORT, Purpose, Stream, VERSION, io as wire};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Time limit for the agent's answer on a stream.
const STREAM: Duration = Duration::from_secs(10);
/// Time limit of one attempt, and of a request.
const ATTEMPT: Duration = Duration::from_millis(500);
const SETUP: Duration = Duration::from_secs(60);
/// Longest timer tick of Linux, by which the time limit of a socket may end too early.
const TICK: Duration = Duration::from_millis(10);
/// Interval of attempts.
const INTERVAL: Duration = Duration::from_millis(5);

/// Control connection, and the number of its command.
pub struct ControlConnection {
    /// The connection.
    pub stream: UnixStream,
    /// Number of the command.
    pub command: u32,
}

impl ControlConnection {
    /// Connects to the agent of a VM; `None`: it does not listen yet, or has not answered in time.
    ///
    /// # Errors
    /// The VM ends, or no agent answers by the deadline; it refuses.
    pub fn open(vm: &mut AgentVm, deadline: &mut AgentDeadline) -> Result<Option<Self>, Failure> {
        if vm.has_ended() {
            return Err(vm.failure("the VM has ended before its agent answered"));
        }
        match connect(&vm.socket(), control, ATTEMPT) {
            Ok((stream, command)) => {
                // A set-up waits for the host's files.
                stream.set_read_timeout(Some(SETUP)).os_error("set a time limit")?;
                Ok(Some(Self { stream, command }))
            }
            // An agent that has answered another process may take long on a busy host.
            Err(error) if is_early(&error) && !is_late(&error) && !vm.is_starting() => {
                Err(vm.failure("the VM has ended"))
            }
            Err(error) if is_early(&error) => match deadline.passed(vm.pid()) {
                Some(text) => Err(vm.failure(&text)),
                None => {
                    thread::sleep(INTERVAL);
                    Ok(None)
                }
            },
            Err(error) => Err(Failure::os("connect to the agent", &error)),
        }
    }

    /// Connects a stream of the command, until `deadline`.
    ///
    /// # Errors
    /// The agent does not answer, or refuses it: `vm` explains why; `deadline` has passed: 124.
    pub fn stream(
        &self,
        vm: &mut AgentVm,
        stream: Stream,
        deadline: Option<Instant>,
    ) -> Result<UnixStream, Failure> {
        check_time(deadline)?;
        let purpose = Purpose::Stream { command: self.command, stream };
        let result = connect_within(vm, purpose, time_left(deadline, STREAM) + TICK);
        result.or_else(|failure| check_time(deadline).and(Err(failure)))
    }

    /// Sends a request and waits until it was carried out.
    ///
    /// # Errors
    /// The agent refuses it, or the connection fails: `vm` explains why.
    pub fn request(&self, vm: &mut AgentVm, request: &AgentRequest<'_>) -> Result<(), Failure> {
        let mut room = Vec::new();
        match self.exchange(vm, request, &mut room)? {
            Answer::Done => Ok(()),
            _ => Err(wrong_answer()),
        }
    }

    /// Sends a request, as [`Self::request`] does, unless its time is over. The wait for each part
    /// of the answer has the rest of the time as its limit.
    ///
    /// # Errors
    /// See [`Self::request`]; `deadline` has passed: 124.
    pub fn request_by(
        &self,
        vm: &mut AgentVm,
        request: &AgentRequest<'_>,
        deadline: Option<Instant>,
    ) -> Result<(), Failure> {
        check_time(deadline)?;
        let limit = time_left(deadline, SETUP) + TICK;
        self.stream.set_read_timeout(Some(limit)).os_error("set a time limit")?;
        let result = self.request(vm, request);
        result.or_else(|failure| check_time(deadline).and(Err(failure)))
    }

    /// Asks for the statistics of a container.
    ///
    /// # Errors
    /// See [`Self::request`].
    pub fn statistics(
        &self,
        vm: &mut AgentVm,
        container: &str,
    ) -> Result<ContainerStatistics, Failure> {
        let mut room = Vec::new();
        match self.exchange(vm, &AgentRequest::Statistics { container }, &mut room)? {
            Answer::Statistics(statistics) => Ok(statistics),
            _ => Err(wrong_answer()),
        }
    }

    /// Sends a request and receives its answer, unless that is a failure.
    fn exchange<'a>(
        &self,
        vm: &mut AgentVm,
        request: &AgentRequest<'_>,
        room: &'a mut Vec<u8>,
    ) -> Result<Answer<'a>, Failure> {
        let answered = wire::send(&self.stream, request)
            .and_then(|()| wire::receive(&self.stream, room)?.ok_or_else(hang_up));
        let answered = answered.and_then(|()| wire::read::<Answer<'_>>(room));
        match answered {
            Ok(Answer::Failed(text)) => {
                Err(Failure::new(failure::UNAVAILABLE, format!("the guest cannot {text}")))
            }
            Ok(answer) => Ok(answer),
            // It may wait for a file of this host, and serves other connections meanwhile.
            Err(error) if is_late(&error) => {
                Err(Failure::new(failure::UNAVAILABLE, "the agent has not answered in time"))
            }
            Err(error) => Err(vm.failure(&format!("the agent has not answered: {error}"))),
        }
    }
}

/// Checks that there is time left until `deadline`.
///
/// # Errors
/// It has passed: 124.
pub fn check_time(deadline: Option<Instant>) -> Result<(), Failure> {
    match deadline.is_some_and(|time| time <= Instant::now()) {
        true => Err(time_limit()),
        false => Ok(()),
    }
}

/// Returns the time until `deadline`, `most` at the most, and without a deadline.
pub fn time_left(deadline: Option<Instant>, most: Duration) -> Duration {
    deadline.map_or(most, |time| time.saturating_duration_since(Instant::now()).min(most))
}

/// Returns the failure of a command whose time is over.
pub fn time_limit() -> Failure {
    Failure::new(failure::TIMEOUT, "time limit reached")
}

/// Makes a connection to an agent that has answered before.
///
/// # Errors
/// The agent does not answer, or refuses it: `vm` explains why.
pub fn connect_to_agent(vm: &mut AgentVm, purpose: Purpose) -> Result<UnixStream, Failure> {
    connect_within(vm, purpose, STREAM)
}

fn connect_within(
    vm: &mut AgentVm,
    purpose: Purpose,
    limit: Duration,
) -> Result<UnixStream, Failure> {
    match connect(&vm.socket(), || purpose, limit) {
        Ok((stream, _)) => Ok(stream),
        Err(error) => Err(vm.failure(&format!("cannot connect to the agent: {error}"))),
    }
}

fn wrong_answer() -> Failure {
    Failure::new(failure::INTERNAL, "the agent's answer is for no request")
}

fn hang_up() -> io::Error {
    ErrorKind::UnexpectedEof.into()
}

/// Returns whether the guest has not come to its agent.
fn is_early(error: &io::Error) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, NotFound, UnexpectedEof};
    let refused = matches!(error.kind(), ConnectionRefused | NotFound);
    let closed = matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof);
    refused || closed || is_late(error)
}

/// Returns whether the time limit of an attempt has passed.
fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock)
}

/// Returns the purpose of a control connection that is made now.
fn control() -> Purpose {
    Purpose::Control { time: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default() }
}

/// Connects to the agent's port for a purpose; returns the number of the command, too.
fn connect(
    socket: &Path,
    purpose: impl FnOnce() -> Purpose,
    patience: Duration,
) -> io::Result<(UnixStream, u32)> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(patience))?;
    writeln!(stream, "CONNECT {PORT}")?;
    expect_line(&mut stream)?;
    wire::send(&stream, &Hello { version: VERSION, purpose: purpose() })?;
    let mut room = Vec::new();
    wire::receive(&stream, &mut room)?.ok_or_else(hang_up)?;
    let welcomed = match wire::read(&room)? {
        Answer::Welcome { version: VERSION, command } => Ok(command),
        Answer::Welcome { version, .. } => Err(io::Error::other(format!(
            "the agent has version {version} of the protocol, and parador version {VERSION}"
        ))),
        Answer::Failed(text) => Err(io::Error::other(text.to_owned())),
        answer => Err(io::Error::other(format!("unexpected answer {answer:?}"))),
    };
    stream.set_read_timeout(None)?;
    Ok((stream, welcomed?))
}

/// Reads the line by which the VM's process confirms a connection, and no byte after it.
fn expect_line(stream: &mut UnixStream) -> io::Result<()> {
    const LONGEST: usize = 64;
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        if line.len() == LONGEST {
            return Err(hang_up());
        }
        // A signal interrupts a read with a time limit, and this continues it.
        stream.read_exact(&mut byte)?;
        line.push(byte[0]);
    }
    if line.starts_with(b"OK ") { Ok(()) } else { Err(io::Error::other("no vsock socket")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::patience::AgentTimeout;
    use crate::testing::{agent, frame};
    use std::os::unix::net::UnixListener;

    /// Returns the failure of a connection to an agent with this first answer.
    fn refused(answer: Vec<u8>) -> String {
        let folder = tempfile::tempdir().unwrap();
        let (mut vm, thread) = agent(folder.path(), vec![answer]);
        let text = match ControlConnection::open(
            &mut vm,
            &mut AgentDeadline::new(AgentTimeout::default()),
        ) {
            Err(Failure::Simple { message, .. }) => message,
            Err(Failure::Report { text, .. }) => text,
            Ok(_) => "connected".to_owned(),
        };
        thread.join().unwrap();
        text
    }

    #[test]
    fn other_agents_are_refused() {
        let other = Answer::Welcome { version: VERSION + 1, command: 1 };
        let text = format!("version {} of the protocol", VERSION + 1);
        assert!(refused(frame(&other)).contains(&text));
        let failed = refused(frame(&Answer::Failed("the agent has version 1")));
        assert!(failed.contains("the agent has version 1"), "{failed}");
        for malformed in [vec![1, 0, 0, 0, 0xff], vec![0xff; 4], frame(&Answer::Done)] {
            let text = refused(malformed.clone());
            assert!(text.starts_with("cannot connect to the agent"), "{malformed:?}: {text}");
        }
        assert_eq!(refused(frame(&Answer::Welcome { version: VERSION, command: 1 })), "connected");
    }

    #[test]
    fn an_agent_of_another_process_may_answer_late() {
        let folder = tempfile::tempdir().unwrap();
        let mut vm = AgentVm::attach(folder.path().to_owned());
        let listener = UnixListener::bind(vm.socket()).unwrap();
        let mut open = || {
            let control =
                ControlConnection::open(&mut vm, &mut AgentDeadline::new(AgentTimeout::default()));
            control.map(|it| it.is_some()).map_err(|failure| failure.to_string())
        };
        // It accepts, and does not answer within an attempt.
        assert_eq!(open(), Ok(false));
        // The VM has ended.
        drop(listener);
        assert!(open().unwrap_err().contains("the VM has ended"));
    }
}

//! The event loop of a VM: waits for descriptors, signals and the time limit with poll(2), while
//! the VM waits for boot and while it runs.

use crate::exit::ExitCause;
use hosted_command::failure::{Failure, IoContext};
use hosted_command::interrupt::{ENDING, heeded};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, read};
use signal_hook::low_level::pipe;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Returns the deadline of a time limit that begins now.
pub fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}

/// Receiver of a loop's events.
pub trait EventHandler {
    /// Name of a descriptor.
    type Source: Copy;
    /// Reason for the end of the loop.
    type End: From<ExitCause>;

    /// Returns the descriptors to wait for. poll(2) reports hang-ups of every listed descriptor, so
    /// descriptors without interest are left out.
    fn interest(&self) -> Vec<(Self::Source, BorrowedFd<'_>, PollFlags)>;

    /// Returns the end of the loop if there is nothing left to wait for.
    fn finished(&self) -> Option<Self::End> {
        None
    }

    /// Handles a ready descriptor; a returned value ends the loop.
    fn ready(&mut self, source: Self::Source) -> Result<Option<Self::End>, Failure>;
}

/// One pipe for each termination signal that the process does not ignore, readable once the signal
/// has arrived; the signals have no other effect.
pub struct EndingSignals(Vec<(i32, UnixStream)>);

impl EndingSignals {
    /// Returns the pipes of this process, whose handlers are installed once: a VM may start again
    /// any number of times, and a signal between two starts is not lost.
    pub fn subscribe() -> Result<&'static Self, Failure> {
        static ALL: OnceLock<EndingSignals> = OnceLock::new();
        if let Some(all) = ALL.get() {
            return Ok(all);
        }
        let pipes = heeded(&ENDING).into_iter().map(|signal| {
            let (ours, theirs) = UnixStream::pair()?;
            pipe::register(signal, theirs)?;
            Ok((signal, ours))
        });
        let pipes: io::Result<_> = pipes.collect();
        let pipes = pipes.os_error("install signal handlers")?;
        Ok(ALL.get_or_init(|| Self(pipes)))
    }

    /// Creates the signals of a test: `pipe` is readable once `signal` has arrived.
    #[cfg(test)]
    pub fn with_pipe(signal: i32, pipe: UnixStream) -> Self {
        Self(vec![(signal, pipe)])
    }
}

/// Passes events to `handler` until it, a signal or the deadline ends the loop. `action` completes
/// "cannot ..." in an error message.
pub fn run<H: EventHandler>(
    handler: &mut H,
    signals: &EndingSignals,
    deadline: Option<Instant>,
    action: &str,
) -> Result<H::End, Failure> {
    loop {
        if let Some(end) = handler.finished() {
            return Ok(end);
        }
        let ready = match wait(handler, signals, deadline, action)? {
            Wakeup::End(cause) => return Ok(cause.into()),
            Wakeup::Ready(sources) => sources,
        };
        for source in ready {
            if let Some(end) = handler.ready(source)? {
                return Ok(end);
            }
        }
    }
}

/// Result of a wait.
enum Wakeup<S> {
    /// These descriptors are ready.
    Ready(Vec<S>),
    /// A signal or the deadline.
    End(ExitCause),
}

/// Waits until a descriptor is ready, a signal arrives, or the deadline passes.
fn wait<H: EventHandler>(
    handler: &H,
    signals: &EndingSignals,
    deadline: Option<Instant>,
    action: &str,
) -> Result<Wakeup<H::Source>, Failure> {
    let Some(timeout) = poll_timeout(deadline) else {
        return Ok(Wakeup::End(ExitCause::Timeout));
    };
    let pipes = signals.0.iter().map(|(_, pipe)| (pipe.as_fd(), PollFlags::IN));
    let interest = handler.interest();
    let all = pipes.chain(interest.iter().map(|(_, fd, flags)| (*fd, *flags)));
    let mut fds: Vec<_> = all.map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)).collect();
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(Failure::os(action, &error.into())),
    }
    let (pipes, others) = fds.split_at(signals.0.len());
    let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
    if let Some(((signal, _), _)) = signals.0.iter().zip(pipes).find(|(_, fd)| is_ready(fd)) {
        return Ok(Wakeup::End(ExitCause::Signal(*signal)));
    }
    let ready = interest.iter().zip(others).filter(|(_, fd)| is_ready(fd));
    Ok(Wakeup::Ready(ready.map(|((source, ..), _)| *source).collect()))
}

/// Empties a pipe that only wakes.
pub fn drain(pipe: BorrowedFd<'_>) {
    let mut bytes = [0; 64];
    // Reads do not block.
    while matches!(read(pipe, &mut bytes[..]), Ok(1..)) {}
}

/// Returns the timeout for poll(2) until a deadline: `Some(None)` is infinite; `None`: the deadline
/// has passed.
fn poll_timeout(deadline: Option<Instant>) -> Option<Option<Timespec>> {
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    if left == Some(Duration::ZERO) {
        return None;
    }
    Some(left.and_then(|left| Timespec::try_from(left).ok()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    use std::io::{Read, Write};

    /// Counts the bytes of two sockets; ends after three, or when both are closed.
    struct Counter {
        sockets: [Option<UnixStream>; 2],
        bytes: Vec<usize>,
    }

    impl EventHandler for Counter {
        type Source = usize;
        type End = Option<ExitCause>;

        fn interest(&self) -> Vec<(usize, BorrowedFd<'_>, PollFlags)> {
            let open = self.sockets.iter().enumerate();
            let open = open.filter_map(|(index, socket)| Some((index, socket.as_ref()?)));
            open.map(|(index, socket)| (index, socket.as_fd(), PollFlags::IN)).collect()
        }

        fn finished(&self) -> Option<Option<ExitCause>> {
            self.sockets.iter().all(Option::is_none).then_some(None)
        }

        fn ready(&mut self, index: usize) -> Result<Option<Option<ExitCause>>, Failure> {
            let mut byte = [0];
            if self.sockets[index].as_mut().unwrap().read(&mut byte).unwrap() == 0 {
                self.sockets[index] = None;
            } else {
                self.bytes.push(index);
            }
            Ok((self.bytes.len() == 3).then_some(Some(ExitCause::Request)))
        }
    }

    fn counter() -> (Counter, [UnixStream; 2]) {
        let [a, b] = [UnixStream::pair().unwrap(), UnixStream::pair().unwrap()];
        (Counter { sockets: [Some(a.0), Some(b.0)], bytes: Vec::new() }, [a.1, b.1])
    }

    #[test]
    fn handlers_and_the_deadline_end_the_loop() {
        let none = EndingSignals(Vec::new());
        let (mut handler, [mut first, mut second]) = counter();
        first.write_all(b"ab").unwrap();
        second.write_all(b"c").unwrap();
        let end = run(&mut handler, &none, None, "wait").unwrap();
        assert_eq!((end, handler.bytes.len()), (Some(ExitCause::Request), 3));

        let (mut handler, [first, second]) = counter();
        let soon = deadline(Some(Duration::from_millis(20)));
        let end = run(&mut handler, &none, soon, "wait").unwrap();
        assert_eq!(end, Some(ExitCause::Timeout));
        drop((first, second));
        assert_eq!(run(&mut handler, &none, None, "wait").unwrap(), None);
    }

    /// A process gets its ignored signals from its parent, so the test is in a process of its own.
    #[test]
    fn a_signal_that_nohup_ignores_stays_ignored() {
        const MARK: &str = "PARADOR_TEST_OWN_PROCESS";
        const NAME: &str = "event_loop::tests::a_signal_that_nohup_ignores_stays_ignored";
        if std::env::var_os(MARK).is_none() {
            let mut shell = std::process::Command::new("env");
            shell.args(["--default-signal=INT,TERM", "sh", "-c", "trap '' HUP; exec \"$@\"", "sh"]);
            shell.env(MARK, "1");
            shell.arg(std::env::current_exe().unwrap()).args(["--exact", NAME]);
            let output = shell.output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
            return;
        }
        let signals = EndingSignals::subscribe().unwrap();
        let subscribed: Vec<i32> = signals.0.iter().map(|(signal, _)| *signal).collect();
        assert_eq!(subscribed, [SIGINT, SIGTERM]);
        assert!(heeded(&[SIGHUP]).is_empty());
    }

    #[test]
    fn a_signal_precedes_other_events() {
        let (pipe, mut raise) = UnixStream::pair().unwrap();
        let signals = EndingSignals::with_pipe(15, pipe);
        let (mut handler, [mut first, _second]) = counter();
        first.write_all(b"a").unwrap();
        raise.write_all(b"x").unwrap();
        let end = run(&mut handler, &signals, None, "wait").unwrap();
        assert_eq!((end, handler.bytes.len()), (Some(ExitCause::Signal(15)), 0));
    }
}

//! Child processes that serve devices of a VM.

use crate::event_loop::{self, EndingSignals, EventHandler};
use crate::exit::ExitCause;
use crate::orphans;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_devices::READY;
use rustix::event::PollFlags;
use rustix::process::{Pid, Signal, kill_process};
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

/// Time for a device process to write its cached data.
const TERMINATION_GRACE: Duration = Duration::from_secs(10);
/// Interval of the signals in this time.
const SIGNAL_INTERVAL: Duration = Duration::from_secs(1);
/// Longest error message of a device process in bytes.
const REFUSAL: u64 = 16 << 10;

/// A device process of a VM. The VM ends with it; dropping it ends it.
#[derive(Debug)]
pub struct DeviceProcess {
    name: String,
    child: Child,
    /// Standard output: hangs up when the process exits.
    alive: ChildStdout,
    /// It has reported [`READY`].
    is_ready: bool,
}

/// Waits until all processes have reported [`READY`]: several start at a time, and the repair of an
/// image may last. Returns the cause if a signal or the deadline ends the wait.
///
/// # Errors
/// The error that a process has reported instead.
pub fn wait_until_ready(
    processes: &mut [DeviceProcess],
    signals: &EndingSignals,
    deadline: Option<Instant>,
) -> Result<Option<ExitCause>, Failure> {
    event_loop::run(&mut StartingProcesses(processes), signals, deadline, "wait for devices")
}

/// Handler of the events of processes that start.
struct StartingProcesses<'a>(&'a mut [DeviceProcess]);

impl EventHandler for StartingProcesses<'_> {
    /// Index of a process.
    type Source = usize;
    /// `None`: all are ready.
    type End = Option<ExitCause>;

    fn interest(&self) -> Vec<(usize, BorrowedFd<'_>, PollFlags)> {
        let starting = self.0.iter().enumerate().filter(|(_, process)| !process.is_ready);
        starting.map(|(index, process)| (index, process.alive(), PollFlags::IN)).collect()
    }

    fn finished(&self) -> Option<Option<ExitCause>> {
        self.0.iter().all(|process| process.is_ready).then_some(None)
    }

    fn ready(&mut self, index: usize) -> Result<Option<Option<ExitCause>>, Failure> {
        self.0[index].read_report().map(|()| None)
    }
}

impl DeviceProcess {
    /// Starts the process with a pipe as standard output. `name` is for messages.
    pub fn start(name: String, command: &mut Command) -> Result<Self, Failure> {
        let started = command.process_group(0).spawn();
        let mut child = started.start_error(&name)?;
        let Some(alive) = child.stdout.take() else {
            return Err(Failure::new(failure::INTERNAL, format!("{name} has no pipe")));
        };
        Ok(Self { name, child, alive, is_ready: false })
    }

    /// Reads [`READY`].
    ///
    /// # Errors
    /// The error that the process has reported instead.
    fn read_report(&mut self) -> Result<(), Failure> {
        let mut said = [READY];
        match self.alive.read(&mut said) {
            Ok(1) if said == [READY] => {
                self.is_ready = true;
                Ok(())
            }
            _ => Err(self.refusal(said)),
        }
    }

    /// Creates the failure from the error message that the process wrote instead of READY; it
    /// begins with `first`.
    fn refusal(&mut self, first: [u8; 1]) -> Failure {
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

    /// Returns the descriptor that hangs up when the process exits.
    pub fn alive(&self) -> BorrowedFd<'_> {
        self.alive.as_fd()
    }

    /// Waits for the end of the process; returns its name and status.
    pub fn end(&mut self) -> Result<(String, ExitStatus), Failure> {
        let status = self.child.wait().os_error("wait for a process")?;
        Ok((self.name.clone(), status))
    }

    /// Sends a signal and waits for the exit; returns whether the process runs after
    /// [`SIGNAL_INTERVAL`]. A process that was about to wait misses a signal.
    fn is_running_after(&mut self, signal: Signal) -> bool {
        // The signal fails if the process has exited.
        let _ = kill_process(Pid::from_child(&self.child), signal);
        let until = Instant::now() + SIGNAL_INTERVAL;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() >= until {
                return true;
            }
            thread::sleep(Duration::from_millis(2));
        }
        false
    }
}

impl Drop for DeviceProcess {
    fn drop(&mut self) {
        // Before it is ready it has no cached data, and the next start repeats a killed repair.
        let grace = if self.is_ready { TERMINATION_GRACE } else { Duration::ZERO };
        let deadline = Instant::now() + grace;
        let id = Pid::from_child(&self.child);
        while Instant::now() < deadline && self.is_running_after(Signal::TERM) {}
        let _ = self.child.kill();
        let _ = self.child.wait();
        orphans::wait(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::process::Stdio;

    /// Starts a process that a termination signal does not end.
    fn start(script: &str) -> DeviceProcess {
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("trap '' TERM; {script}")).stdout(Stdio::piped());
        DeviceProcess::start("a disk".to_owned(), &mut command).unwrap()
    }

    fn signals() -> (EndingSignals, UnixStream) {
        let (pipe, raise) = UnixStream::pair().unwrap();
        (EndingSignals::with_pipe(15, pipe), raise)
    }

    #[test]
    fn a_signal_ends_the_wait_for_a_repair() {
        let ready = format!("printf '\\{READY:03o}'; exec sleep 60");
        let mut processes = [start(&ready), start("exec sleep 60")];
        let (signals, mut raise) = signals();
        let soon = event_loop::deadline(Some(Duration::from_millis(50)));
        let end = wait_until_ready(&mut processes[1..], &signals, soon).unwrap();
        assert_eq!(end, Some(ExitCause::Timeout));
        let end = wait_until_ready(&mut processes[..1], &signals, None).unwrap();
        assert!(end.is_none() && processes[0].is_ready);
        raise.write_all(b"x").unwrap();
        let end = wait_until_ready(&mut processes, &signals, None).unwrap();
        assert_eq!(end, Some(ExitCause::Signal(15)));
    }

    #[test]
    fn a_process_that_exits_before_is_an_error() {
        let mut processes = [start("printf unusable; exit 65")];
        let (signals, _raise) = signals();
        let failure = wait_until_ready(&mut processes, &signals, None).unwrap_err();
        assert_eq!(failure.code(), failure::BAD_CONFIG);
        assert!(failure.to_string().contains("a disk: unusable"), "{failure}");
    }
}

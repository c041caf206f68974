//! Child processes that serve devices of a VM.

use crate::orphans;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_devices::READY;
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
}

impl DeviceProcess {
    /// Starts the process with a pipe as standard output. `name` is for messages.
    pub fn start(name: String, command: &mut Command) -> Result<Self, Failure> {
        let started = command.process_group(0).spawn();
        let mut child = started.start_error(&name)?;
        let Some(alive) = child.stdout.take() else {
            return Err(Failure::new(failure::INTERNAL, format!("{name} has no pipe")));
        };
        Ok(Self { name, child, alive })
    }

    /// Waits until the process has reported [`READY`]. Several processes start at a time.
    ///
    /// # Errors
    /// The error that it has reported instead.
    pub fn wait_until_ready(&mut self) -> Result<(), Failure> {
        let mut said = [READY];
        match self.alive.read(&mut said) {
            Ok(1) if said == [READY] => Ok(()),
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
        let deadline = Instant::now() + TERMINATION_GRACE;
        let id = Pid::from_child(&self.child);
        while Instant::now() < deadline && self.is_running_after(Signal::TERM) {}
        let _ = self.child.kill();
        let _ = self.child.wait();
        orphans::wait(id);
    }
}

//! End of a VM: its cause, and the exit code and message of `parador run`.

use hosted_command::failure;
use hosted_command::messages::{self, Level, More};
use proto::hosted::exit;
use rustix::process::Signal;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Instant;

/// Back ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendKind {
    /// KVM.
    Kvm,
    /// Processes of this host.
    Process,
}

impl BackendKind {
    /// Returns the name for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Process => "process",
        }
    }
}

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

/// Reports the end of the VM.
pub fn report_exit(code: u8, text: &str, start: Instant) {
    let seconds = start.elapsed().as_secs_f64();
    let more = More { code: Some(code), reason: failure::word(code), help: None };
    let level = if code == 0 { Level::Info } else { Level::Warn };
    messages::emit(level, &format!("{text} (exit code {code}, {seconds:.1} s)"), more);
}

/// Returns the exit code and message for the end of a VM (`docs/spec/exit-codes.md`). A guest never
/// causes 82, 124 or 128 and above.
pub fn exit_status(end: &ExitCause, backend: BackendKind) -> (u8, String) {
    let text = |code, text: &str| (code, text.to_owned());
    match end {
        ExitCause::Timeout => text(failure::TIMEOUT, "time limit reached"),
        ExitCause::Signal(signal) => (128 + *signal as u8, format!("ended by signal {signal}")),
        ExitCause::Keyboard => text(0, "ended from the keyboard"),
        ExitCause::Request => text(0, "ended by request"),
        ExitCause::Reset => text(failure::GUEST_RESET, "reset by request"),
        ExitCause::OutputClosed => {
            text(128 + Signal::PIPE.as_raw() as u8, "the reader of the console has closed it")
        }
        ExitCause::DeviceProcess(name, status) => {
            let code = status.signal().map_or(failure::INTERNAL, code_of_signal);
            (code, format!("the process of {name} exited ({status})"))
        }
        ExitCause::Exited(status) => match (status.code(), status.signal()) {
            (Some(code), _) => exit_status_of_code(code as u8, backend),
            (None, signal) => {
                let signal = signal.unwrap_or(0);
                (code_of_signal(signal), format!("the VM was killed by signal {signal}"))
            }
        },
    }
}

/// Returns the exit code and message for the exit code of the VM's first process. A KVM guest
/// controls its exit code entirely; with processes, the wedge's first process reports why another
/// one ended.
fn exit_status_of_code(code: u8, backend: BackendKind) -> (u8, String) {
    let is_said = match backend {
        BackendKind::Process => !matches!(code, failure::WATCHDOG | failure::TIMEOUT | 128),
        BackendKind::Kvm => {
            exit::is_guest_code(code) || (failure::USAGE..exit::PANIC).contains(&code)
        }
    };
    if !is_said {
        let text = format!("the VM's first process exited with status {code}");
        return (failure::INTERNAL, text);
    }
    match code.checked_sub(128) {
        Some(signal) => (code, format!("a process of the VM was killed by signal {signal}")),
        None => (code, failure::meaning_of_end(code)),
    }
}

/// Returns the exit code for the death of a Parador process by a signal: sent from outside, or
/// caused by its own fault.
fn code_of_signal(signal: i32) -> u8 {
    match exit::SELF_INFLICTED.contains(&(signal as u32)) {
        true => failure::INTERNAL,
        false => 128 + signal as u8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::ExitStatus;

    const ALL: [BackendKind; 2] = [BackendKind::Process, BackendKind::Kvm];

    /// As wait(2) has it: an exit, a signal.
    fn exited(code: u8) -> ExitCause {
        ExitCause::Exited(ExitStatus::from_raw(i32::from(code) << 8))
    }

    fn killed(signal: i32) -> ExitCause {
        ExitCause::Exited(ExitStatus::from_raw(signal))
    }

    #[test]
    fn guests_have_their_codes_and_no_others() {
        for backend in ALL {
            for code in 0..=u8::MAX {
                let is_signal = code > 128 && backend == BackendKind::Process;
                let is_own = matches!(code, 0..=81 | 83) || is_signal || {
                    backend == BackendKind::Process && !matches!(code, 82 | 124 | 128)
                };
                let wanted = if is_own { code } else { failure::INTERNAL };
                assert_eq!(exit_status(&exited(code), backend).0, wanted, "{code}");
            }
        }
    }

    #[test]
    fn signals_that_others_send_have_their_codes() {
        for backend in ALL {
            for (signal, code) in [(9, 137), (15, 143), (31, 70), (11, 70), (6, 70)] {
                assert_eq!(exit_status(&killed(signal), backend).0, code, "{signal}");
                let other =
                    ExitCause::DeviceProcess("a disk".to_owned(), ExitStatus::from_raw(signal));
                assert_eq!(exit_status(&other, backend).0, code, "{signal}");
            }
        }
        assert_eq!(exit_status(&ExitCause::Timeout, BackendKind::Kvm).0, 124);
        assert_eq!(exit_status(&ExitCause::Signal(15), BackendKind::Kvm).0, 143);
    }
}

//! Errors of the KVM back end.

use std::fmt;
use std::io;

use kvm_bindings::{
    KVM_EXIT_EXCEPTION, KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_MEMORY_FAULT, KVM_EXIT_SYSTEM_EVENT,
    KVM_EXIT_UNKNOWN,
};
use proto::errno::{Cause, Errno};
use proto::hosted::log;
use vmm_x86::Exit;

/// Reason that KVM cannot run a VM.
#[derive(Debug)]
pub enum Error {
    /// A system call failed.
    Host(&'static str, io::Error),
    /// The host's KVM lacks a feature.
    Lacking(&'static str),
    /// A vCPU does not run a test program: its exit.
    NotRunning(Exit),
    /// The configuration passed to this process is invalid.
    Description(serde_json::Error),
    /// Kernel, command line and RAM disk do not fit into memory.
    Boot(vmm_boot::BootError),
    /// The seccomp filter cannot be built.
    Filter(hosted_filters::Error),
    /// The host refuses parts of a strict sandbox.
    Sandbox(host_linux::sandbox::Refused),
}

impl Error {
    /// Returns a conversion from errors of the host, for `map_err`; `action` completes "cannot
    /// ...".
    pub fn host<E: Into<io::Error>>(action: &'static str) -> impl Fn(E) -> Self {
        move |error| Self::Host(action, error.into())
    }

    /// Returns the exit code of the error (`docs/spec/exit-codes.md`).
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Host(..) => 71,
            Self::Lacking(_) | Self::NotRunning(_) | Self::Sandbox(_) => 69,
            Self::Description(_) | Self::Filter(_) => 70,
            Self::Boot(_) => 65,
        }
    }
}

/// Describes an unexpected exit of KVM.
pub fn cause_of(exit: &Exit) -> String {
    match exit {
        Exit::HostError(0) => "the host kernel gives no reason".to_owned(),
        Exit::HostError(number) => format!("KVM_RUN: {}", Errno(*number as i32)),
        Exit::InvalidState { why, code } => format!("{why} {code:#x}"),
        Exit::Shutdown => "KVM_EXIT_SHUTDOWN: triple fault".to_owned(),
        Exit::Unknown(reason) => match u32::try_from(*reason) {
            Ok(KVM_EXIT_UNKNOWN) => "KVM_EXIT_UNKNOWN: the CPU reports an exit that KVM does not know".to_owned(),
            Ok(KVM_EXIT_EXCEPTION) => "KVM_EXIT_EXCEPTION: an exception that KVM cannot inject".to_owned(),
            Ok(KVM_EXIT_INTERNAL_ERROR) => "KVM_EXIT_INTERNAL_ERROR: KVM cannot emulate an instruction, or cannot deliver an event".to_owned(),
            Ok(KVM_EXIT_SYSTEM_EVENT) => "KVM_EXIT_SYSTEM_EVENT: the guest asks for a reset".to_owned(),
            Ok(KVM_EXIT_MEMORY_FAULT) => "KVM_EXIT_MEMORY_FAULT: the host does not provide guest memory".to_owned(),
            _ => format!("unexpected KVM exit reason {reason}"),
        },
        exit => format!("unexpected exit {exit:?}"),
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(action, error) => {
                write!(f, "cannot {action}: {}", Cause::new(error.raw_os_error(), error))
            }
            Self::Lacking(what) => {
                write!(f, "the host's KVM does not support {what}: Linux 5.16 or newer is required")
            }
            Self::NotRunning(exit) => {
                write!(f, "a vCPU does not run a test program: {}", cause_of(exit))
            }
            Self::Description(error) => write!(f, "invalid VM configuration: {error}"),
            Self::Boot(error) => write!(f, "{error}"),
            Self::Sandbox(refused) => write!(f, "cannot enter the sandbox: {refused}"),
            Self::Filter(error) => write!(f, "{error}"),
        }
    }
}

/// Prints the reason of a vCPU failure, which ends the VM with an exit code only.
pub fn report_failure(exit: Exit) -> Exit {
    eprintln!("<{}>vCPU failure: {}", log::ERROR, cause_of(&exit));
    exit
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Neither KVM exits nor errors of the host appear as bare numbers.
    #[test]
    fn causes_have_names() {
        let text = |exit| Error::NotRunning(exit).to_string();
        assert!(text(Exit::Unknown(17)).contains("KVM_EXIT_INTERNAL_ERROR: KVM cannot emulate"));
        assert!(text(Exit::HostError(14)).ends_with("KVM_RUN: Bad address (EFAULT)"));
        let error = Error::host("open /dev/kvm")(io::Error::from_raw_os_error(13));
        assert_eq!(error.to_string(), "cannot open /dev/kvm: Permission denied (EACCES)");
    }
}

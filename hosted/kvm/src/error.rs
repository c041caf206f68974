//! Why a machine cannot be run by KVM.

use std::fmt;
use std::io;

use kvm_bindings::{
    KVM_EXIT_EXCEPTION, KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_MEMORY_FAULT, KVM_EXIT_SYSTEM_EVENT,
    KVM_EXIT_UNKNOWN,
};
use proto::errno::{Cause, Errno};
use vmm_cpu::Exit;

/// Why a machine cannot be run by KVM.
#[derive(Debug)]
pub enum Error {
    /// The host refused something.
    Host(&'static str, io::Error),
    /// The host's KVM is too old: what it lacks.
    Lacking(&'static str),
    /// A virtual processor does not run: how it has left its program.
    NotRunning(Exit),
    /// What this process was started with is not what it expects.
    Description(serde_json::Error),
    /// Kernel, command line, RAM disk and memory do not fit together.
    Boot(vmm_boot::BootError),
    /// No filter of system calls can be made.
    Filter(hosted_vmm::Error),
    /// The host does not let this process give up what it is to give up.
    Sandbox(hosted_jail::Refused),
}

impl Error {
    /// Makes an error of the host from what was to be done; for `map_err`.
    pub fn host<E: Into<io::Error>>(action: &'static str) -> impl Fn(E) -> Self {
        move |error| Self::Host(action, error.into())
    }

    /// The exit code that says so (`docs/spec/exit-codes.md`).
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Host(..) => 71,
            Self::Lacking(_) | Self::NotRunning(_) | Self::Sandbox(_) => 69,
            Self::Description(_) | Self::Filter(_) => 70,
            Self::Boot(_) => 65,
        }
    }
}

/// Why KVM has left a guest that should have run on.
pub fn cause_of(exit: &Exit) -> String {
    match exit {
        Exit::HostError(0) => "the host's kernel gives no reason".to_owned(),
        Exit::HostError(number) => format!("KVM_RUN: {}", Errno(*number as i32)),
        Exit::InvalidState { why, code } => format!("{why} {code:#x}"),
        Exit::Shutdown => "KVM_EXIT_SHUTDOWN: triple fault".to_owned(),
        Exit::Unknown(reason) => match u32::try_from(*reason) {
            Ok(KVM_EXIT_UNKNOWN) => "KVM_EXIT_UNKNOWN: the processor reports an exit that KVM does not know".to_owned(),
            Ok(KVM_EXIT_EXCEPTION) => "KVM_EXIT_EXCEPTION: an exception that KVM cannot inject".to_owned(),
            Ok(KVM_EXIT_INTERNAL_ERROR) => "KVM_EXIT_INTERNAL_ERROR: KVM cannot emulate an instruction, or cannot deliver an event".to_owned(),
            Ok(KVM_EXIT_SYSTEM_EVENT) => "KVM_EXIT_SYSTEM_EVENT: the guest asks for a reset".to_owned(),
            Ok(KVM_EXIT_MEMORY_FAULT) => "KVM_EXIT_MEMORY_FAULT: the host does not provide guest memory".to_owned(),
            _ => format!("exit reason {reason} of KVM, which nothing here asks for"),
        },
        exit => format!("it leaves the guest with {exit:?}"),
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(action, error) => {
                write!(f, "cannot {action}: {}", Cause::new(error.raw_os_error(), error))
            }
            Self::Lacking(what) => {
                write!(f, "the host's KVM has no {what}: it needs Linux 5.16 or newer")
            }
            Self::NotRunning(exit) => {
                write!(f, "a vCPU does not run a simple program: {}", cause_of(exit))
            }
            Self::Description(error) => write!(f, "the machine's description is wrong: {error}"),
            Self::Boot(error) => write!(f, "{error}"),
            Self::Sandbox(refused) => write!(f, "cannot enter the sandbox: {refused}"),
            Self::Filter(error) => write!(f, "{error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Neither an exit of KVM nor an error of the host is a number that the reader has to look up.
    #[test]
    fn causes_have_names() {
        let text = |exit| Error::NotRunning(exit).to_string();
        assert!(text(Exit::Unknown(17)).contains("KVM_EXIT_INTERNAL_ERROR: KVM cannot emulate"));
        assert!(text(Exit::HostError(14)).ends_with("KVM_RUN: Bad address (EFAULT)"));
        let error = Error::host("open /dev/kvm")(io::Error::from_raw_os_error(13));
        assert_eq!(error.to_string(), "cannot open /dev/kvm: Permission denied (EACCES)");
    }
}

//! Why a machine cannot be run by KVM.

use std::fmt;
use std::io;

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

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(action, error) => write!(f, "cannot {action}: {error}"),
            Self::Lacking(what) => {
                write!(f, "the host's KVM has no {what}: it needs Linux 5.16 or newer")
            }
            Self::NotRunning(exit) => {
                write!(f, "a virtual processor does not run a simple program: {exit:?}")
            }
            Self::Description(error) => write!(f, "the machine's description is wrong: {error}"),
            Self::Boot(error) => write!(f, "{error}"),
            Self::Sandbox(refused) => write!(f, "the host lets no process have {refused}"),
            Self::Filter(error) => write!(f, "{error}"),
        }
    }
}

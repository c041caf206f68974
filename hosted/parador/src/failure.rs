//! Why a command failed: an exit code, a message, and what to do about it.
//!
//! Exit codes of `parador` (64 to 78 as in `sysexits.h`):
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done; the guest powered off |
//! | 1–63 | code supplied by the guest |
//! | 64 | wrong usage |
//! | 65 | the system description, or a file it names, is wrong |
//! | 66 | a file is missing |
//! | 69 | a program or service that is needed is not available |
//! | 70 | internal error: Parador's kernel or QEMU failed |
//! | 71 | the operating system refused something |
//! | 77 | permission denied |
//! | 80 | guest panic |
//! | 81 | guest triple fault, unhandled fault, or the end of a guest process |
//! | 82 | watchdog |
//! | 83 | reset by the guest |
//! | 124 | `--timeout` reached |
//! | 128+n | ended by signal n |

use crate::messages::{self, Level, More};
use crate::problem::Report;
use proto::wedge::exit;
use std::fmt;
use std::io;
use std::path::Path;

/// Wrong usage.
pub const USAGE: u8 = 64;
/// The system description, or a file it names, is wrong.
pub const BAD_CONFIG: u8 = 65;
/// A file is missing.
pub const MISSING_FILE: u8 = 66;
/// A program or service that is needed is not available.
pub const UNAVAILABLE: u8 = 69;
/// Parador's kernel, QEMU or this program failed.
pub const INTERNAL: u8 = 70;
/// The operating system refused something.
pub const OS_ERROR: u8 = 71;
/// Permission denied.
pub const PERMISSION: u8 = 77;
/// A guest ended with a panic.
pub const GUEST_PANIC: u8 = exit::PANIC;
/// A guest ended with a triple fault or a fault that nobody handles.
pub const GUEST_FAULT: u8 = exit::FAULT;
/// A watchdog ended a guest.
pub const WATCHDOG: u8 = 82;
/// A guest reset its machine.
pub const GUEST_RESET: u8 = exit::RESET;
/// The time limit was reached.
pub const TIMEOUT: u8 = 124;

/// How a machine ended, by its exit code.
pub fn meaning_of_end(code: u8) -> String {
    match code {
        0 => "the guest powered off".to_owned(),
        1..=63 => format!("the guest ended with code {code}"),
        GUEST_PANIC => "the guest's kernel panicked".to_owned(),
        GUEST_FAULT => "the guest ended with a triple fault or unhandled fault".to_owned(),
        WATCHDOG => "the guest's watchdog ended it".to_owned(),
        GUEST_RESET => "the guest reset its machine".to_owned(),
        _ => format!("the system ended with code {code}"),
    }
}

/// A word for an exit code, for programs.
pub fn word(code: u8) -> Option<&'static str> {
    Some(match code {
        0 => "power-off",
        1..=63 => "guest-code",
        USAGE => "usage",
        BAD_CONFIG => "bad-config",
        MISSING_FILE => "missing-file",
        UNAVAILABLE => "unavailable",
        INTERNAL => "internal",
        OS_ERROR => "os-error",
        PERMISSION => "permission",
        GUEST_PANIC => "guest-panic",
        GUEST_FAULT => "guest-fault",
        WATCHDOG => "watchdog",
        GUEST_RESET => "guest-reset",
        TIMEOUT => "timeout",
        129.. => "signal",
        _ => return None,
    })
}

/// Why a command failed.
#[derive(Debug)]
pub enum Failure {
    /// One thing went wrong.
    Simple {
        /// Exit code.
        code: u8,
        /// What went wrong.
        message: String,
        /// What the user can do.
        help: Option<String>,
    },
    /// The description has problems.
    Description(Report),
}

impl Failure {
    /// A failure without advice.
    pub fn new(code: u8, message: impl Into<String>) -> Self {
        Self::Simple { code, message: message.into(), help: None }
    }

    /// Adds what the user can do.
    pub fn help(mut self, text: impl Into<String>) -> Self {
        if let Self::Simple { help, .. } = &mut self {
            *help = Some(text.into());
        }
        self
    }

    /// An operation on a file failed; `action` completes "cannot … PATH".
    pub fn file(action: &str, path: &Path, error: &io::Error) -> Self {
        let message = format!("cannot {action} {}: {}", path.display(), describe(error));
        Self::new(code_of(error), message)
    }

    /// A program could not be started.
    pub fn program(name: &str, error: &io::Error) -> Self {
        let code = match error.kind() {
            io::ErrorKind::NotFound => UNAVAILABLE,
            _ => code_of(error),
        };
        Self::new(code, format!("cannot start {name}: {}", describe(error)))
    }

    /// An operation of the system that names no file failed.
    pub fn os(action: &str, error: &io::Error) -> Self {
        Self::new(OS_ERROR, format!("cannot {action}: {}", describe(error)))
    }

    /// The exit code.
    pub fn code(&self) -> u8 {
        match self {
            Self::Simple { code, .. } => *code,
            Self::Description(report) => report.code(),
        }
    }

    /// Prints to standard error.
    pub fn print(&self) {
        if !messages::is_json() {
            eprint!("{self}");
            return;
        }
        let whole = self.to_string();
        let (text, help) = match self {
            Self::Simple { message, help, .. } => (message, help.as_deref()),
            Self::Description(_) => (&whole, None),
        };
        let (code, reason) = (Some(self.code()), word(self.code()));
        let more = More { help, code, reason };
        messages::tell(Level::Error, &messages::one_line(text), more);
    }
}

impl std::error::Error for Failure {}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Simple { message, help, .. } => {
                writeln!(f, "parador: error: {message}")?;
                help.iter().try_for_each(|help| writeln!(f, "   help: {help}"))
            }
            Self::Description(report) => report.fmt(f),
        }
    }
}

/// The exit code for an error of the operating system.
pub fn code_of(error: &io::Error) -> u8 {
    match error.kind() {
        io::ErrorKind::NotFound => MISSING_FILE,
        io::ErrorKind::PermissionDenied => PERMISSION,
        _ => OS_ERROR,
    }
}

/// The error's text as the C library has it, without Rust's "(os error N)".
pub fn describe(error: &io::Error) -> String {
    let text = error.to_string();
    match text.find(" (os error") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}

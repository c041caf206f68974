//! Failure of a command: exit code, message and remedy.
//!
//! Exit codes of `parador` (64 to 78 as in `sysexits.h`):
//!
//! | code | meaning |
//! |---|---|
//! | 0 | success; the guest powered off |
//! | 1–63 | code supplied by the guest |
//! | 64 | wrong usage |
//! | 65 | the system description, or a file it names, is invalid |
//! | 66 | a file is missing |
//! | 69 | a required program or facility is not available |
//! | 70 | internal error: Parador's kernel or QEMU failed |
//! | 71 | an operating system call failed |
//! | 77 | permission denied |
//! | 80 | guest panic |
//! | 81 | guest triple fault, unhandled fault, or the end of a guest process |
//! | 82 | watchdog |
//! | 83 | reset by the guest |
//! | 124 | `--timeout` reached |
//! | 128+n | ended by signal n |

use crate::messages::{self, Level, More};
use proto::hosted::exit;
use std::borrow::Cow;
use std::fmt;
use std::io;
use std::path::Path;

/// Wrong usage.
pub const USAGE: u8 = 64;
/// The system description, or a file it names, is invalid.
pub const BAD_CONFIG: u8 = 65;
/// A file is missing.
pub const MISSING_FILE: u8 = 66;
/// A required program or facility is not available.
pub const UNAVAILABLE: u8 = 69;
/// Parador's kernel, QEMU or this program failed.
pub const INTERNAL: u8 = 70;
/// An operating system call failed.
pub const OS_ERROR: u8 = 71;
/// Permission denied.
pub const PERMISSION: u8 = 77;
/// Guest panic.
pub const GUEST_PANIC: u8 = exit::PANIC;
/// Guest triple fault or unhandled fault.
pub const GUEST_FAULT: u8 = exit::FAULT;
/// A watchdog ended the guest.
pub const WATCHDOG: u8 = 82;
/// Reset by the guest.
pub const GUEST_RESET: u8 = exit::RESET;
/// `--timeout` reached.
pub const TIMEOUT: u8 = 124;

/// Describes the end of a VM by its exit code.
pub fn meaning_of_end(code: u8) -> String {
    match code {
        0 => "the guest powered off".to_owned(),
        1..=63 => format!("the guest ended with code {code}"),
        GUEST_PANIC => "the guest kernel panicked".to_owned(),
        GUEST_FAULT => "guest triple fault or unhandled fault".to_owned(),
        WATCHDOG => "the watchdog ended the guest".to_owned(),
        GUEST_RESET => "the guest reset".to_owned(),
        _ => format!("the system ended with code {code}"),
    }
}

/// Returns the machine-readable name of an exit code.
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

/// Failure of a command.
#[derive(Debug)]
pub enum Failure {
    /// A single error.
    Simple {
        /// Exit code.
        code: u8,
        /// Message.
        message: String,
        /// Remedy.
        help: Option<String>,
    },
    /// Problems of a file, as they are printed ([`crate::problem`]).
    Report {
        /// Exit code.
        code: u8,
        /// Complete lines.
        text: String,
    },
}

impl Failure {
    /// Creates a failure without a remedy.
    pub fn new(code: u8, message: impl Into<String>) -> Self {
        Self::Simple { code, message: message.into(), help: None }
    }

    /// Adds a remedy.
    pub fn help(mut self, text: impl Into<String>) -> Self {
        if let Self::Simple { help, .. } = &mut self {
            *help = Some(text.into());
        }
        self
    }

    /// Creates the failure of a file operation; `action` completes "cannot ... PATH".
    pub fn file(action: &str, path: &Path, error: &io::Error) -> Self {
        let message = format!("cannot {action} {}: {}", path.display(), describe(error));
        Self::new(code_of(error), message)
    }

    /// Creates the failure to start a program.
    pub fn program(name: &str, error: &io::Error) -> Self {
        let code = match error.kind() {
            io::ErrorKind::NotFound => UNAVAILABLE,
            _ => code_of(error),
        };
        Self::new(code, format!("cannot start {name}: {}", describe(error)))
    }

    /// Creates the failure of a system operation without a file; `action` completes "cannot ...".
    pub fn os(action: &str, error: &io::Error) -> Self {
        Self::new(OS_ERROR, format!("cannot {action}: {}", describe(error)))
    }

    /// Returns the exit code.
    pub fn code(&self) -> u8 {
        match self {
            Self::Simple { code, .. } | Self::Report { code, .. } => *code,
        }
    }

    /// Returns the message in one line, without the remedy.
    pub fn message(&self) -> Cow<'_, str> {
        let (Self::Simple { message: text, .. } | Self::Report { text, .. }) = self;
        messages::one_line(text)
    }

    /// Prints the failure to standard error.
    pub fn print(&self) {
        if !messages::is_json() {
            messages::to_stderr(format_args!("{self}"));
            return;
        }
        let help = match self {
            Self::Simple { help, .. } => help.as_deref(),
            Self::Report { .. } => None,
        };
        let (code, reason) = (Some(self.code()), word(self.code()));
        let more = More { help, code, reason };
        messages::emit(Level::Error, &self.message(), more);
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
            Self::Report { text, .. } => f.write_str(text),
        }
    }
}

/// Turns errors of the operating system into failures.
pub trait IoContext<T> {
    /// See [`Failure::file`].
    fn file_error(self, action: &str, path: &Path) -> Result<T, Failure>;
    /// See [`Failure::os`].
    fn os_error(self, action: &str) -> Result<T, Failure>;
    /// See [`Failure::program`].
    fn start_error(self, name: &str) -> Result<T, Failure>;
}

impl<T, E: Into<io::Error>> IoContext<T> for Result<T, E> {
    fn file_error(self, action: &str, path: &Path) -> Result<T, Failure> {
        self.map_err(|error| Failure::file(action, path, &error.into()))
    }

    fn os_error(self, action: &str) -> Result<T, Failure> {
        self.map_err(|error| Failure::os(action, &error.into()))
    }

    fn start_error(self, name: &str) -> Result<T, Failure> {
        self.map_err(|error| Failure::program(name, &error.into()))
    }
}

/// Returns the exit code for an operating system error.
pub fn code_of(error: &io::Error) -> u8 {
    match error.kind() {
        io::ErrorKind::NotFound => MISSING_FILE,
        io::ErrorKind::PermissionDenied => PERMISSION,
        _ => OS_ERROR,
    }
}

/// Returns the error's text as in the C library, without Rust's "(os error N)".
pub fn describe(error: &io::Error) -> String {
    let text = error.to_string();
    match text.find(" (os error") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}

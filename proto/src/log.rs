//! Log gate of every task: lines of text to root, which writes them to the kernel's log, prefixed
//! by the name of the sender.
//!
//! Message: label [`WRITE`], word 0 [`Level`], word 1 length, text in the message page. A text may
//! consist of several lines; root replaces control characters.

/// Operation: writes a text.
pub const WRITE: u64 = 1;
/// Longest text in bytes; longer texts are truncated.
pub const MAX_TEXT: usize = 512;

/// Severity of a text.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u64)]
pub enum Level {
    /// Failure.
    Error = 1,
    /// Unusual condition without failure.
    Warn = 2,
    /// Information for users.
    Info = 3,
    /// Information for developers.
    Debug = 4,
}

impl Level {
    /// Decodes a level; unknown codes read as [`Level::Error`].
    pub const fn from_code(code: u64) -> Self {
        match from_code!(code: u64, Warn, Info, Debug) {
            Some(level) => level,
            None => Self::Error,
        }
    }

    /// Returns the prefix of a text in the log; empty for [`Level::Info`].
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::Error => "error: ",
            Self::Warn => "warning: ",
            Self::Info => "",
            Self::Debug => "debug: ",
        }
    }
}

//! Log gate of every task: lines of text to root, which writes them to the kernel's log behind the
//! name of the sender.
//!
//! Message: label [`WRITE`], word 0 [`Level`], word 1 length, text in the message page. A text may hold several
//! lines; root replaces control characters.

/// Operation: write a text.
pub const WRITE: u64 = 1;
/// Longest text in bytes; longer ones are cut.
pub const MAX_TEXT: usize = 512;

/// Importance of a text.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u64)]
pub enum Level {
    /// Something failed.
    Error = 1,
    /// Something is odd, and works all the same.
    Warn = 2,
    /// What a user wants to know.
    Info = 3,
    /// What a developer wants to know.
    Debug = 4,
}

impl Level {
    /// The level with this number; an unknown one reads as [`Level::Error`], to be seen.
    pub const fn from_code(code: u64) -> Self {
        match code {
            2 => Self::Warn,
            3 => Self::Info,
            4 => Self::Debug,
            _ => Self::Error,
        }
    }

    /// What precedes a text in the log; nothing for the usual ones.
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::Error => "error: ",
            Self::Warn => "warning: ",
            Self::Info => "",
            Self::Debug => "debug: ",
        }
    }
}

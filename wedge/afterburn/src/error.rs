//! Errors of the afterburner.

use crate::rewrite::Misunderstood;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// The reason for which the afterburner failed.
#[derive(Debug)]
pub enum Error {
    /// Options that do not exist or contradict each other.
    Usage(String),
    /// Text that cannot be rewritten.
    Misunderstood(Misunderstood),
    /// A binary with a wrong format, wrong tables or too little room.
    Image(String),
    /// No assembler was found.
    NoAssembler,
    /// An operation on a file failed; `action` completes "cannot ... PATH".
    File {
        /// The operation.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
}

impl Error {
    /// Makes the error of a failed file operation.
    pub fn file(action: &'static str, path: &Path, error: io::Error) -> Self {
        Self::File { action, path: path.to_owned(), error }
    }

    /// Exit code of a program that ends with this error (`sysexits.h`; docs/spec/exit-codes.md).
    pub fn code(&self) -> u8 {
        match self {
            Self::Usage(_) => 64,
            Self::Misunderstood(_) | Self::Image(_) => 65,
            Self::NoAssembler => 69,
            Self::File { error, .. } => match error.kind() {
                io::ErrorKind::NotFound => 66,
                io::ErrorKind::PermissionDenied => 77,
                _ => 71,
            },
        }
    }
}

impl From<Misunderstood> for Error {
    fn from(misunderstood: Misunderstood) -> Self {
        Self::Misunderstood(misunderstood)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(text) | Self::Image(text) => f.write_str(text),
            Self::Misunderstood(misunderstood) => misunderstood.fmt(f),
            Self::NoAssembler => {
                f.write_str("no assembler: `as` is not in PATH (PARADOR_AS may name it)")
            }
            Self::File { action, path, error } => {
                write!(f, "cannot {action} {}: {error}", path.display())
            }
        }
    }
}

impl std::error::Error for Error {}

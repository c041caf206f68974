//! Results on standard output.

use crate::failure::{Failure, IoContext};
use crate::streams;
use std::io;

/// Prints a text.
///
/// # Errors
/// The reader has closed the pipe, or the disk is full.
pub fn print(text: impl AsRef<[u8]>) -> Result<(), Failure> {
    // Nothing stays in the buffer of the standard library, which has no user.
    streams::write_all(io::stdout(), text.as_ref()).os_error("write to standard output")
}

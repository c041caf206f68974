//! Results on standard output.

use crate::failure::{Failure, IoContext};
use std::io::{self, Write};

/// Prints a text.
///
/// # Errors
/// The reader has closed the pipe, or the disk is full.
pub fn print(text: impl AsRef<[u8]>) -> Result<(), Failure> {
    let mut output = io::stdout().lock();
    let written = output.write_all(text.as_ref()).and_then(|()| output.flush());
    written.os_error("write to standard output")
}

//! Messages of a device process on standard error.

use std::io::{self, Write};
use std::sync::OnceLock;

/// Turns a text into a line, with the newline. It runs in the sandbox, so it makes no system calls
/// but those for memory and time.
pub type LineFormat = fn(&str) -> String;

static FORMAT: OnceLock<LineFormat> = OnceLock::new();

/// Sets the format of all messages of this process; without it they are plain text.
pub fn set_format(format: LineFormat) {
    // A process has one parent, which wants one format.
    let _ = FORMAT.set(format);
}

/// Writes a message in one piece: the parent process has made standard error non-blocking where
/// others may not read it.
pub(crate) fn report(text: &str) {
    // It may have no reader, or no room.
    let _ = io::stderr().write_all(line(FORMAT.get().copied(), text).as_bytes());
}

fn line(format: Option<LineFormat>, text: &str) -> String {
    format.map_or_else(|| format!("parador: {text}\n"), |format| format(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_the_format_that_is_set() {
        assert_eq!(line(None, "text"), "parador: text\n");
        assert_eq!(line(Some(|text| format!("<{text}>\n")), "text"), "<text>\n");
    }
}

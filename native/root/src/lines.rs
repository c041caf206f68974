//! Lines of children in the log.

use core::fmt::Write;
use native_rt::Platform;
use native_rt::log::{Text, write_platform};
use proto::log::Level;

/// Writes a child's text behind its name, line by line.
pub fn write(name: &str, level: Level, text: &[u8]) {
    let platform = Platform::at(abi::boot::slot::PLATFORM);
    for line in text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        write_platform(platform, compose(name, level, line).bytes());
    }
}

/// A line of the log: name, level, text. Only printable ASCII gets through, so that a child can neither imitate
/// others nor command a terminal.
fn compose(name: &str, level: Level, line: &[u8]) -> Text {
    let mut text = Text::new();
    // A text takes everything and cuts what is too long.
    let _ = write!(text, "{name}: {}", level.prefix());
    let room = proto::log::MAX_TEXT - text.bytes().len() - 1;
    for &byte in &line[..line.len().min(room)] {
        let printable = (b' '..=b'~').contains(&byte) || byte == b'\t';
        let _ = text.write_char(if printable { byte as char } else { '?' });
    }
    let _ = text.write_char('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_unprintable() {
        let text = compose("vm", Level::Warn, b"a\x1b[2Jb\r\xffroot: c");
        assert_eq!(text.bytes(), b"vm: warning: a?[2Jb??root: c\n");
    }

    #[test]
    fn always_a_whole_line() {
        let text = compose("vm", Level::Info, &[b'x'; 600]);
        assert_eq!(text.bytes().len(), proto::log::MAX_TEXT);
        assert!(text.bytes().ends_with(b"x\n"));
    }
}

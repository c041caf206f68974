//! Source file and line of each line of the assembler's input.

use std::collections::HashMap;
use std::fmt;

/// Follows line markers `# 12 "file.h"` and the compiler's `.file` and `.loc`.
#[derive(Default)]
pub struct SourceTracker {
    marker: Option<Marker>,
    files: HashMap<u32, String>,
    location: Option<(u32, u32)>,
    name: String,
}

struct Marker {
    /// Source line of the line after the marker.
    line: usize,
    file: String,
    /// Input line of the marker.
    at: usize,
}

impl SourceTracker {
    /// Starts with the input's name only.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), ..Self::default() }
    }

    /// Processes a comment at the start of line `at`. Returns the meaning of a line marker.
    pub fn comment(&mut self, text: &[u8], at: usize) -> Option<Mark> {
        let text = text.strip_prefix(b"# ")?;
        let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let line: usize = str::from_utf8(&text[..digits]).ok()?.parse().ok()?;
        let (file, rest) = quoted(text[digits..].strip_prefix(b" ")?)?;
        // `# 0 "" 2` is the end of an inline assembly statement.
        if file.is_empty() {
            self.marker = None;
            return Some(Mark::End);
        }
        self.marker = Some(Marker { line, file, at });
        Some(if rest.trim_ascii() == b"1" { Mark::Begin } else { Mark::Other })
    }

    /// Processes the operands of a `.file` or `.loc`.
    pub fn directive(&mut self, name: &[u8], operands: &[u8]) {
        let operands = operands.trim_ascii();
        let digits = operands.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let number = |text: &[u8]| str::from_utf8(text).ok()?.parse::<u32>().ok();
        let Some(file) = number(&operands[..digits]) else {
            if name == b".file"
                && let Some((file, _)) = quoted(operands)
                && !file.is_empty()
            {
                self.name = file;
            }
            return;
        };
        let rest = operands[digits..].trim_ascii_start();
        if name == b".file" {
            // A directory may precede the name.
            if let Some((first, rest)) = quoted(rest) {
                let second = quoted(rest.trim_ascii_start()).map(|(second, _)| second);
                self.files.insert(file, second.unwrap_or(first));
            }
        } else {
            let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
            self.location = number(&rest[..digits]).map(|line| (file, line));
        }
    }

    /// The source of line `line` of the input, for messages.
    pub fn of(&self, line: usize) -> Source {
        if let Some(marker) = &self.marker {
            let line = marker.line + line.saturating_sub(marker.at + 1);
            return Source { file: marker.file.clone(), line };
        }
        if let Some((file, line)) = self.location
            && let Some(name) = self.files.get(&file).filter(|name| !name.is_empty())
        {
            return Source { file: name.clone(), line: line as usize };
        }
        Source { file: self.name.clone(), line }
    }
}

/// The meaning of a line marker in a compiler's output.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mark {
    /// Start of an inline assembly statement, or of an included file.
    Begin,
    /// End of an inline assembly statement.
    End,
    /// A line marker only.
    Other,
}

/// A line of the source.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Source {
    /// File.
    pub file: String,
    /// Line, from 1.
    pub line: usize,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// The string at the start of the text, and the rest.
fn quoted(text: &[u8]) -> Option<(String, &[u8])> {
    if text.first() != Some(&b'"') {
        return None;
    }
    let end = crate::lexer::string_end(text, 0)?;
    Some((String::from_utf8_lossy(&text[1..end - 1]).into_owned(), &text[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers() {
        let mut tracker = SourceTracker::new("x.s");
        assert_eq!(tracker.of(3).to_string(), "x.s:3");
        tracker.directive(b".file", b"\"x.c\"");
        assert_eq!(tracker.of(3).to_string(), "x.c:3");
        tracker.directive(b".file", b"1 \"/src\" \"sub/y.c\"");
        tracker.directive(b".loc", b"1 22 5");
        assert_eq!(tracker.of(4).to_string(), "sub/y.c:22");
        assert_eq!(tracker.comment(b"# 7 \"a.h\" 1", 10), Some(Mark::Begin));
        assert_eq!(tracker.of(11).to_string(), "a.h:7");
        assert_eq!(tracker.of(13).to_string(), "a.h:9");
        assert_eq!(tracker.comment(b"# 0 \"\" 2", 14), Some(Mark::End));
        assert_eq!(tracker.of(15).to_string(), "sub/y.c:22");
        assert_eq!(tracker.comment(b"# no marker", 15), None);
    }
}

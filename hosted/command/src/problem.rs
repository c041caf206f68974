//! Problems of a system description, printed as compilers do: position, line, caret, remedy.

use crate::failure::{BAD_CONFIG, Failure, MISSING_FILE};
use std::fmt;
use std::ops::Range;

/// One problem.
#[derive(Debug)]
pub struct Problem {
    /// Byte range in the description; `None`: the value is from the command line.
    pub span: Option<Range<usize>>,
    /// Message.
    pub message: String,
    /// Remedy.
    pub help: Option<String>,
    /// Exit code if all problems have the same.
    pub code: u8,
}

impl Problem {
    /// Creates a problem of the description.
    pub fn new(span: Range<usize>, message: impl Into<String>) -> Self {
        Self { span: Some(span), message: message.into(), help: None, code: BAD_CONFIG }
    }

    /// Adds a remedy.
    pub fn help(mut self, text: impl Into<String>) -> Self {
        self.help = Some(text.into());
        self
    }

    /// Sets the exit code.
    pub fn code(mut self, code: u8) -> Self {
        self.code = code;
        self
    }
}

/// All problems of a description.
#[derive(Debug)]
pub struct Diagnostics {
    /// File name as given by the user.
    pub file: String,
    /// Text of the description.
    pub text: String,
    /// Problems, not empty.
    pub problems: Vec<Problem>,
}

impl Diagnostics {
    /// Returns the problems' common exit code; 65 if they differ.
    pub fn code(&self) -> u8 {
        let mut codes = self.problems.iter().map(|problem| problem.code);
        let first = codes.next().unwrap_or(BAD_CONFIG);
        if codes.all(|code| code == first) { first } else { BAD_CONFIG }
    }
}

impl From<Diagnostics> for Failure {
    fn from(diagnostics: Diagnostics) -> Self {
        Self::Report { code: diagnostics.code(), text: diagnostics.to_string() }
    }
}

impl fmt::Display for Diagnostics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for problem in &self.problems {
            let Problem { span, message, help, .. } = problem;
            match span {
                None => writeln!(f, "{}: error: {message}", self.file)?,
                Some(span) => {
                    let place = Location::find(&self.text, span);
                    let Location { line, column, .. } = place;
                    writeln!(f, "{}:{line}:{column}: error: {message}", self.file)?;
                    writeln!(f, "{line:>5} | {}", place.content)?;
                    let (indent, carets) = (place.indent(), "^".repeat(place.width));
                    writeln!(f, "      | {indent}{carets}")?;
                }
            }
            help.iter().try_for_each(|help| writeln!(f, "   help: {help}"))?;
        }
        match self.problems.len() {
            1 => Ok(()),
            count => writeln!(f, "{}: {count} problems", self.file),
        }
    }
}

/// Position of a span in a text.
struct Location<'a> {
    /// Line, from 1.
    line: usize,
    /// Column in characters, from 1.
    column: usize,
    /// The whole line.
    content: &'a str,
    /// Characters of the span in this line, at least 1.
    width: usize,
}

impl<'a> Location<'a> {
    fn find(text: &'a str, span: &Range<usize>) -> Self {
        let at = floor_boundary(text, span.start);
        let end = floor_boundary(text, span.end.max(at));
        let line_start = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
        let line_end = text[at..].find('\n').map_or(text.len(), |newline| at + newline);
        Self {
            line: text[..at].matches('\n').count() + 1,
            column: text[line_start..at].chars().count() + 1,
            content: text[line_start..line_end].trim_end_matches('\r'),
            width: text[at..end.clamp(at, line_end)].chars().count().max(1),
        }
    }

    /// Returns blanks up to the column; tabs stay tabs, so that the caret is below its character.
    fn indent(&self) -> String {
        let before = self.content.chars().take(self.column - 1);
        before.map(|character| if character == '\t' { '\t' } else { ' ' }).collect()
    }
}

fn floor_boundary(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

impl Problem {
    /// Creates a problem of a file that is named in the description and missing.
    pub fn missing(span: Range<usize>, message: impl Into<String>) -> Self {
        Self::new(span, message).code(MISSING_FILE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(text: &str, span: Range<usize>) -> String {
        let problems = vec![Problem::new(span, "wrong").help("right it")];
        Diagnostics { file: "a.toml".into(), text: text.into(), problems }.to_string()
    }

    #[test]
    fn caret_below_its_text() {
        assert_eq!(
            report("first\n\tkey = 12\nlast", 13..15),
            "a.toml:2:8: error: wrong\n    2 | \tkey = 12\n      | \t      ^^\n   help: right it\n"
        );
    }

    #[test]
    fn spans_at_and_beyond_the_end() {
        assert_eq!(
            report("ä", 1..1),
            "a.toml:1:1: error: wrong\n    1 | ä\n      | ^\n   help: right it\n"
        );
        assert!(report("a\n", 9..20).starts_with("a.toml:2:1: error"));
        assert!(report("", 0..0).starts_with("a.toml:1:1: error"));
    }

    #[test]
    fn a_span_over_several_lines_marks_the_first() {
        assert!(report("[vm]\na=1\n", 0..8).contains("| ^^^^\n"));
    }
}

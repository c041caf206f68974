//! Messages on standard error: lines of text, or one JSON object per line (`--log-format json`).
//!
//! Messages of the VM's processes pass through here, too. A guest may have caused them, so each is
//! reduced to one line of plain text.

use crate::streams;
use clap::ValueEnum;
use proto::hosted::log;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::ffi::OsString;
use std::fmt;
use std::io::{ErrorKind, stderr};
use std::mem;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

/// Most bytes kept of the messages of the VM's processes.
const MAX_BYTES: usize = 16 << 10;
/// Time in which standard error must take a message.
const PATIENCE: Duration = Duration::from_secs(2);
/// Source name of `parador` itself.
const OWN: &str = "parador";

/// Format of messages.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize, Serialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// Lines of text.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Severity of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Error.
    Error,
    /// Warning.
    Warn,
    /// Information.
    Info,
}

/// Message as a JSON object.
#[derive(Debug, Serialize)]
struct Record<'a> {
    /// Time as in RFC 3339, UTC.
    time: String,
    level: Level,
    source: &'a str,
    message: &'a str,
    #[serde(flatten)]
    more: More<'a>,
}

/// Optional parts of a message.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct More<'a> {
    /// Remedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub help: Option<&'a str>,
    /// Exit code that follows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<u8>,
    /// Name of the exit code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
}

static JSON: AtomicBool = AtomicBool::new(false);

/// Sets the format of all further messages.
pub fn set(format: Format) {
    JSON.store(format == Format::Json, Relaxed);
}

static QUIET: AtomicBool = AtomicBool::new(false);

/// Restricts further messages to errors, or allows all.
pub fn set_quiet(is_quiet: bool) {
    QUIET.store(is_quiet, Relaxed);
}

/// Returns whether only errors are printed.
pub fn is_quiet() -> bool {
    QUIET.load(Relaxed)
}

/// Returns the format.
pub fn format() -> Format {
    if is_json() { Format::Json } else { Format::Text }
}

/// Returns whether the format is JSON.
pub fn is_json() -> bool {
    JSON.load(Relaxed)
}

/// Returns the format that a command line requests, even one with other errors.
pub fn wanted(arguments: impl Iterator<Item = OsString>) -> Format {
    let mut arguments = arguments.skip_while(|argument| {
        argument != "--log-format" && argument != "--log-format=json" && argument != "--"
    });
    match arguments.next() {
        Some(argument) if argument == "--log-format=json" => Format::Json,
        Some(argument) if argument == "--log-format" => match arguments.next() {
            Some(format) if format == "json" => Format::Json,
            _ => Format::Text,
        },
        _ => Format::Text,
    }
}

/// Prints a message of `parador`.
pub fn say(level: Level, text: &str) {
    emit(level, text, More::default());
}

/// Prints a message with its optional parts.
pub fn emit(level: Level, text: &str, more: More<'_>) {
    if is_quiet() && level != Level::Error {
        return;
    }
    write_to_stderr(formatted(format(), level, OWN, text, more).as_bytes());
}

/// Returns a message as a line in the format of all messages, for a process of the VM whose sandbox
/// does not let it print by this module.
pub fn line(level: Level, source: &str, text: &str) -> String {
    formatted(format(), level, source, text, More::default())
}

fn formatted(format: Format, level: Level, source: &str, text: &str, more: More<'_>) -> String {
    if format == Format::Text {
        return printable_lines(&format!("{OWN}: {text}\n"));
    }
    let record = Record { time: now(), level, source, message: text, more };
    // Numbers and strings always serialize.
    serde_json::to_string(&record).unwrap_or_default() + "\n"
}

/// Writes lines to standard error, and ignores that its reader or terminal has gone or does not
/// keep up, or the disk is full: `eprint` would panic, or wait, and end or stop a running VM.
/// Control characters are replaced: files of strangers may have them in names.
pub fn to_stderr(text: fmt::Arguments<'_>) {
    write_to_stderr(printable_lines(&text.to_string()).as_bytes());
}

fn write_to_stderr(bytes: &[u8]) {
    /// The reader did not take the last message in time: it gets no more time for others.
    static IS_LATE: AtomicBool = AtomicBool::new(false);
    let all = stderr().lock();
    let limit = if IS_LATE.load(Relaxed) { Duration::ZERO } else { PATIENCE };
    let written = streams::write_within(all.as_fd(), bytes, limit);
    let is_late = written.is_err_and(|error| error.kind() == ErrorKind::TimedOut);
    IS_LATE.store(is_late, Relaxed);
}

fn now() -> String {
    humantime::format_rfc3339_millis(SystemTime::now()).to_string()
}

/// Messages of a child process from its standard error. Text is printed at the exit, to keep the
/// console intact; JSON at once.
pub struct MessageLog {
    source: &'static str,
    /// Prefix of lines for [`Self::take_marked`].
    mark: Option<&'static str>,
    part: Vec<u8>,
    used: usize,
    lines: Vec<(Level, String)>,
}

impl MessageLog {
    /// Creates the log of a child with this name.
    pub fn new(source: &'static str, mark: Option<&'static str>) -> Self {
        Self { source, mark, part: Vec::new(), used: 0, lines: Vec::new() }
    }

    /// Adds output of the child.
    pub fn bytes(&mut self, bytes: &[u8]) {
        let room = MAX_BYTES.saturating_sub(self.used);
        self.used += bytes.len().min(room);
        for &byte in &bytes[..bytes.len().min(room)] {
            match byte {
                b'\n' => self.line(),
                _ => self.part.push(byte),
            }
        }
        if room != 0 && bytes.len() > room {
            self.line();
            self.part.extend_from_slice(b"further messages are omitted");
            self.line();
        }
    }

    fn line(&mut self) {
        let bytes = mem::take(&mut self.part);
        if bytes.is_empty() {
            return;
        }
        let (level, text) = read(&String::from_utf8_lossy(&bytes));
        if is_json() && !self.is_marked(&text) {
            write_to_stderr(line(level, self.source, &text).as_bytes());
        } else {
            self.lines.push((level, text));
        }
    }

    fn is_marked(&self, text: &str) -> bool {
        self.mark.is_some_and(|mark| text.starts_with(mark))
    }

    /// Ends the log.
    pub fn end(&mut self) {
        self.line();
    }

    /// Removes the lines with the mark and returns them without it.
    pub fn take_marked(&mut self) -> Vec<String> {
        let mark = self.mark.unwrap_or_default();
        let all = mem::take(&mut self.lines);
        let (marked, rest) = all.into_iter().partition(|line| self.is_marked(&line.1));
        self.lines = rest;
        let marked: Vec<(Level, String)> = marked;
        marked.into_iter().map(|line| line.1[mark.len()..].to_owned()).collect()
    }

    /// Returns the messages not printed yet, as lines.
    pub fn text(&self) -> String {
        self.lines.iter().map(|line| format!("{}\n", line.1)).collect()
    }

    /// Prints the messages not printed yet.
    pub fn print(&self) {
        for (_, text) in &self.lines {
            to_stderr(format_args!("{OWN}: {text}\n"));
        }
    }
}

/// Splits a line into its level and its text, without control characters.
fn read(line: &str) -> (Level, String) {
    let level = |digit: &str| match digit.parse() {
        Ok(log::ERROR) => Some(Level::Error),
        Ok(log::WARN) => Some(Level::Warn),
        Ok(log::INFO) => Some(Level::Info),
        _ => None,
    };
    let said = line.strip_prefix('<').and_then(|line| line.split_once('>'));
    let (level, text) = match said.and_then(|(digit, text)| Some((level(digit)?, text))) {
        Some(found) => found,
        None => match line.strip_prefix("parador: error: ") {
            Some(text) => (Level::Error, text),
            None => (Level::Warn, line.strip_prefix("parador: ").unwrap_or(line)),
        },
    };
    (level, printable(text))
}

/// Replaces the control characters of a line but tabs by question marks: a terminal would obey
/// them, and a line end would begin another message.
pub fn printable(line: &str) -> String {
    let replace = |letter: char| if letter.is_control() && letter != '\t' { '?' } else { letter };
    line.chars().map(replace).collect()
}

/// Does the same as [`printable`] for each line of a text. Raw terminals have lines that end in a
/// carriage return and a line feed.
fn printable_lines(text: &str) -> String {
    let lines = text.split_inclusive('\n').map(|line| {
        let end = ["\r\n", "\n"].into_iter().find(|end| line.ends_with(end)).unwrap_or_default();
        printable(&line[..line.len() - end.len()]) + end
    });
    lines.collect()
}

/// Joins the lines of a text.
pub fn one_line(text: &str) -> Cow<'_, str> {
    if text.contains('\n') { text.trim_end().replace('\n', "; ").into() } else { text.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_wedge() {
        let mut heard = MessageLog::new("parador-wedge", Some("profile "));
        heard.bytes(b"<0>gone\n<2>profile 0x1 2\n<1>od");
        heard.bytes(b"d \x1b[2J\n\nparador: error: no\n<7>raw");
        heard.end();
        assert_eq!(heard.take_marked(), ["0x1 2"]);
        let levels: Vec<_> = heard.lines.iter().map(|line| line.0).collect();
        assert_eq!(levels, [Level::Error, Level::Warn, Level::Error, Level::Warn]);
        assert_eq!(heard.text(), "gone\nodd ?[2J\nno\n<7>raw\n");
    }

    #[test]
    fn messages_in_both_formats() {
        let line = |format, more| formatted(format, Level::Warn, "disk", "a \"text\"", more);
        assert_eq!(line(Format::Text, More::default()), "parador: a \"text\"\n");
        let json = line(Format::Json, More { code: Some(3), ..More::default() });
        assert!(json.ends_with("}\n") && json.lines().count() == 1, "{json}");
        let record: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&record["level"], &record["source"]), (&"warn".into(), &"disk".into()));
        assert_eq!((&record["message"], &record["code"]), (&"a \"text\"".into(), &3.into()));
        assert!(record["time"].as_str().unwrap().ends_with('Z') && record.get("help").is_none());
    }

    #[test]
    fn text_has_no_control_characters_but_line_ends() {
        let text = "keys\r\n\ta\x1b[2J\rb\u{9b}2J\nä\x7f";
        assert_eq!(printable_lines(text), "keys\r\n\ta?[2J?b?2J\nä?");
        assert_eq!(printable("a\nparador: b"), "a?parador: b");
        let line = formatted(Format::Text, Level::Error, OWN, "\x1b]0;title\x07", More::default());
        assert_eq!(line, "parador: ?]0;title?\n");
    }

    #[test]
    fn a_flood_ends() {
        let mut heard = MessageLog::new("parador-wedge", None);
        (0..MAX_BYTES).for_each(|_| heard.bytes(b"<1>more and more\n"));
        let text = heard.text();
        assert!(
            text.len() < 2 * MAX_BYTES && text.ends_with("further messages are omitted\n"),
            "{text}"
        );
    }

    #[test]
    fn formats_of_command_lines() {
        let of = |line: &str| wanted(line.split(' ').map(OsString::from));
        assert_eq!(of("run k --log-format json --nonsense"), Format::Json);
        assert_eq!(of("run k --log-format=json"), Format::Json);
        assert_eq!(of("run k --log-format text"), Format::Text);
        assert_eq!(of("run -- --log-format=json"), Format::Text);
    }
}

//! Messages on standard error: lines of text for people, or a JSON object a line for programs (`--log-format json`).
//!
//! What a machine's processes say comes through here, too. It may be a guest's doing, so it is taken as text of one line and nothing else.

use clap::ValueEnum;
use proto::wedge::log;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::ffi::OsString;
use std::io::{Write, stderr};
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::SystemTime;

/// Bytes that are kept of what a machine's processes say.
const MOST: usize = 16 << 10;
/// This program as the source of a message.
const OWN: &str = "parador";

/// How messages look.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize, Serialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// Lines for people.
    #[default]
    Text,
    /// A JSON object a line.
    Json,
}

/// How grave a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Something cannot go on.
    Error,
    /// Something is not as it should be.
    Warn,
    /// Worth knowing.
    Info,
}

/// A line of JSON.
#[derive(Debug, Serialize)]
struct Record<'a> {
    /// As in RFC 3339, UTC.
    time: String,
    level: Level,
    source: &'a str,
    message: &'a str,
    #[serde(flatten)]
    more: More<'a>,
}

/// What some messages have beside their text.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct More<'a> {
    /// What the user can do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub help: Option<&'a str>,
    /// The exit code that follows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<u8>,
    /// A word for that code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
}

static JSON: AtomicBool = AtomicBool::new(false);

/// From now on messages look like this.
pub fn set(format: Format) {
    JSON.store(format == Format::Json, Relaxed);
}

static QUIET: AtomicBool = AtomicBool::new(false);

/// From now on only errors are printed, or all messages.
pub fn set_quiet(is_quiet: bool) {
    QUIET.store(is_quiet, Relaxed);
}

/// Only errors are printed.
pub fn is_quiet() -> bool {
    QUIET.load(Relaxed)
}

/// They are JSON.
pub fn is_json() -> bool {
    JSON.load(Relaxed)
}

/// The format that a command line wants, also one that is wrong otherwise.
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

/// Prints a message of this program.
pub fn say(level: Level, text: &str) {
    tell(level, text, More::default());
}

/// As [`say`], with more.
pub fn tell(level: Level, text: &str, more: More<'_>) {
    if is_quiet() && level != Level::Error {
        return;
    }
    if is_json() {
        print(&Record { time: now(), level, source: OWN, message: text, more });
    } else {
        eprintln!("{OWN}: {text}");
    }
}

fn print(record: &Record<'_>) {
    // Numbers and strings can always be written; nobody to tell if nobody listens.
    let mut line = serde_json::to_vec(record).unwrap_or_default();
    line.push(b'\n');
    let _ = stderr().lock().write_all(&line);
}

fn now() -> String {
    humantime::format_rfc3339_millis(SystemTime::now()).to_string()
}

/// What another program says on its standard error. As text it is printed in the end, where it does not disturb the console; as JSON at once.
pub struct Heard {
    source: &'static str,
    /// Lines beginning so are for [`Self::take_marked`].
    mark: Option<&'static str>,
    part: Vec<u8>,
    used: usize,
    lines: Vec<(Level, String)>,
}

impl Heard {
    /// Of a program of this name.
    pub fn new(source: &'static str, mark: Option<&'static str>) -> Self {
        Self { source, mark, part: Vec::new(), used: 0, lines: Vec::new() }
    }

    /// It has said this.
    pub fn bytes(&mut self, bytes: &[u8]) {
        let room = MOST.saturating_sub(self.used);
        self.used += bytes.len().min(room);
        for &byte in &bytes[..bytes.len().min(room)] {
            match byte {
                b'\n' => self.line(),
                _ => self.part.push(byte),
            }
        }
        if room != 0 && bytes.len() > room {
            self.line();
            self.part.extend_from_slice(b"what follows is left out");
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
            let (source, message) = (self.source, &*text);
            print(&Record { time: now(), level, source, message, more: More::default() });
        } else {
            self.lines.push((level, text));
        }
    }

    fn is_marked(&self, text: &str) -> bool {
        self.mark.is_some_and(|mark| text.starts_with(mark))
    }

    /// Nothing will be said any more.
    pub fn end(&mut self) {
        self.line();
    }

    /// Takes the lines with the mark out, without it.
    pub fn take_marked(&mut self) -> Vec<String> {
        let mark = self.mark.unwrap_or_default();
        let all = mem::take(&mut self.lines);
        let (marked, rest) = all.into_iter().partition(|line| self.is_marked(&line.1));
        self.lines = rest;
        let marked: Vec<(Level, String)> = marked;
        marked.into_iter().map(|line| line.1[mark.len()..].to_owned()).collect()
    }

    /// What has not been printed yet, as lines.
    pub fn text(&self) -> String {
        self.lines.iter().map(|line| format!("{}\n", line.1)).collect()
    }

    /// Prints what has not been printed.
    pub fn print(&self) {
        for (_, text) in &self.lines {
            eprintln!("{OWN}: {text}");
        }
    }
}

/// The level that a line says, and its text without anything that a terminal obeys.
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
    let printable = |letter: char| if letter.is_control() && letter != '\t' { '?' } else { letter };
    (level, text.chars().map(printable).collect())
}

/// A text of several lines as one.
pub fn one_line(text: &str) -> Cow<'_, str> {
    if text.contains('\n') { text.trim_end().replace('\n', "; ").into() } else { text.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_wedge() {
        let mut heard = Heard::new("parador-wedge", Some("profile "));
        heard.bytes(b"<0>gone\n<2>profile 0x1 2\n<1>od");
        heard.bytes(b"d \x1b[2J\n\nparador: error: no\n<7>raw");
        heard.end();
        assert_eq!(heard.take_marked(), ["0x1 2"]);
        let levels: Vec<_> = heard.lines.iter().map(|line| line.0).collect();
        assert_eq!(levels, [Level::Error, Level::Warn, Level::Error, Level::Warn]);
        assert_eq!(heard.text(), "gone\nodd ?[2J\nno\n<7>raw\n");
    }

    #[test]
    fn a_flood_ends() {
        let mut heard = Heard::new("parador-wedge", None);
        (0..MOST).for_each(|_| heard.bytes(b"<1>more and more\n"));
        let text = heard.text();
        assert!(text.len() < 2 * MOST && text.ends_with("what follows is left out\n"), "{text}");
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

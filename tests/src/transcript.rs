//! Text that a running system writes, searched while it grows.

use anyhow::{Result, bail};
use std::io::Read;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines of a transcript that a failure shows.
const SHOWN_LINES: usize = 30;

/// Fails if one of these texts is in `text`, all of which the error shows.
pub fn ensure_lacks(text: &str, wrong: &[&str]) -> Result<()> {
    let found = wrong.iter().find(|wrong| text.contains(**wrong));
    found.map_or(Ok(()), |found| bail!("`{found}` appeared:\n{text}"))
}

/// Text that was written so far, and the position up to which it was matched.
#[derive(Clone)]
pub struct Transcript {
    shared: Arc<(Mutex<State>, Condvar)>,
    name: &'static str,
    read: usize,
}

#[derive(Default)]
struct State {
    text: String,
    ended: bool,
}

impl Transcript {
    /// Follows a stream to its end, in a thread of its own. Carriage returns are left out.
    pub fn follow(name: &'static str, stream: impl Read + Send + 'static) -> Self {
        Self::follow_bytes(name, stream, |text| text.replace('\r', ""))
    }

    /// Follows the output of programs on a terminal. Carriage returns stay, since they tell which
    /// parts of a line were overwritten.
    pub fn follow_terminal(name: &'static str, stream: impl Read + Send + 'static) -> Self {
        Self::follow_bytes(name, stream, |text| text.to_owned())
    }

    fn follow_bytes(
        name: &'static str,
        mut stream: impl Read + Send + 'static,
        convert: fn(&str) -> String,
    ) -> Self {
        let shared: Arc<(Mutex<State>, Condvar)> = Arc::default();
        let writer = Arc::clone(&shared);
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            loop {
                // An error ends the stream like its end does: the other side is gone.
                let length = stream.read(&mut bytes).unwrap_or(0);
                let mut state = writer.0.lock().unwrap_or_else(PoisonError::into_inner);
                state.ended = length == 0;
                state.text.push_str(&convert(&String::from_utf8_lossy(&bytes[..length])));
                writer.1.notify_all();
                if length == 0 {
                    return;
                }
            }
        });
        Self { shared, name, read: 0 }
    }

    /// Waits until `text` appears after what was read before, and reads up to its end.
    pub fn expect(&mut self, text: &str, deadline: Instant) -> Result<()> {
        if !self.find(text, deadline)? {
            bail!("`{text}` did not appear on the {} in time", self.name);
        }
        Ok(())
    }

    /// Like [`Transcript::expect`], but returns `false` at the deadline. Fails only if the stream
    /// has ended.
    pub fn find(&mut self, text: &str, deadline: Instant) -> Result<bool> {
        let (state, changed) = &*self.shared;
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(at) = state.text[self.read..].find(text) {
                self.read += at + text.len();
                return Ok(true);
            }
            if state.ended {
                bail!("`{text}` did not appear on the {} before its end", self.name);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            state = changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until the stream has ended, at most `limit`.
    pub fn finish(&self, limit: Duration) {
        let (state, changed) = &*self.shared;
        let state = state.lock().unwrap_or_else(PoisonError::into_inner);
        // What is missing after the limit shows as missing text.
        drop(changed.wait_timeout_while(state, limit, |state| !state.ended));
    }

    /// Everything so far.
    pub fn text(&self) -> String {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner).text.clone()
    }

    /// The newest line that shows anything, as it is shown; empty if there is none.
    pub fn newest_line(&self) -> String {
        let text = self.text();
        text.lines().rev().map(shown).find(|line| !line.is_empty()).unwrap_or_default()
    }

    /// The last lines, each indented, under a title.
    pub fn tail(&self) -> String {
        let text = self.text();
        let lines: Vec<String> = text.lines().map(shown).collect();
        let first = lines.len().saturating_sub(SHOWN_LINES);
        let mut tail = format!("--- end of the {} ({} lines)\n", self.name, lines.len());
        for line in &lines[first..] {
            tail.push_str("    ");
            tail.push_str(line);
            tail.push('\n');
        }
        tail
    }
}

/// A line as a terminal shows it: its newest version, without control sequences.
fn shown(line: &str) -> String {
    let versions = line.rsplit('\r').map(|version| {
        let mut text = String::new();
        let mut characters = version.chars();
        while let Some(character) = characters.next() {
            if character == '\x1b' {
                // Parameters, up to the letter that ends the sequence.
                let _ = characters.by_ref().find(char::is_ascii_alphabetic);
            } else if !character.is_control() || character == '\t' {
                text.push(character);
            }
        }
        text.trim_end().to_owned()
    });
    let mut versions = versions.skip_while(String::is_empty);
    versions.next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    #[test]
    fn reads_in_order() {
        let mut transcript = Transcript::follow("console", &b"one\r\ntwo\r\nthree"[..]);
        transcript.expect("one\ntwo", soon()).unwrap();
        assert!(
            transcript.expect("two", soon()).unwrap_err().to_string().contains("before its end")
        );
        transcript.expect("three", soon()).unwrap();
    }

    #[test]
    fn shows_what_a_terminal_shows() {
        let output =
            b"\r\xe2\xa0\x81 one 0s\r\x1b[2K\x1b[32mtwo\x1b[0m 1s\r\nthree\r\n\r\x1b[K\r\n";
        let mut transcript = Transcript::follow_terminal("terminal", &output[..]);
        transcript.expect("one 0s\r", soon()).unwrap();
        transcript.finish(Duration::from_secs(5));
        assert_eq!(transcript.newest_line(), "three");
        let tail = transcript.tail();
        assert!(tail.ends_with("    two 1s\n    three\n    \n"), "{tail}");
        assert_eq!(Transcript::follow("log", &b""[..]).newest_line(), "");
    }

    #[test]
    fn time_runs_out() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let mut transcript = Transcript::follow("log", reader);
        let error = transcript.expect("x", Instant::now()).unwrap_err();
        assert!(error.to_string().contains("in time"));
    }
}

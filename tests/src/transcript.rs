//! Text that a running system writes, searched while it grows.

use anyhow::{Result, bail};
use std::io::Read;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines of a transcript that a failure shows.
const SHOWN_LINES: usize = 30;

/// What was written so far, and how far it has been read.
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
    /// Follows a stream to its end, in a thread of its own.
    pub fn follow(name: &'static str, mut stream: impl Read + Send + 'static) -> Self {
        let shared: Arc<(Mutex<State>, Condvar)> = Arc::default();
        let writer = Arc::clone(&shared);
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            loop {
                // An error ends the stream like its end does: the other side is gone.
                let length = stream.read(&mut bytes).unwrap_or(0);
                let mut state = writer.0.lock().unwrap_or_else(PoisonError::into_inner);
                state.ended = length == 0;
                state.text.push_str(&String::from_utf8_lossy(&bytes[..length]).replace('\r', ""));
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
        let (state, changed) = &*self.shared;
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(at) = state.text[self.read..].find(text) {
                self.read += at + text.len();
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if state.ended {
                bail!("`{text}` did not appear on the {} before its end", self.name);
            }
            if left.is_zero() {
                bail!("`{text}` did not appear on the {} in time", self.name);
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

    /// The last lines, each indented, under a title.
    pub fn tail(&self) -> String {
        let text = self.text();
        let lines: Vec<&str> = text.lines().collect();
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
    fn time_runs_out() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let mut transcript = Transcript::follow("log", reader);
        let error = transcript.expect("x", Instant::now()).unwrap_err();
        assert!(error.to_string().contains("in time"));
    }
}

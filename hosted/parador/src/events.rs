//! What happens to a machine, as lines of JSON for those who listen.

use hyper::body::Bytes;
use rustix::time::{ClockId, clock_gettime};
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use tokio::sync::mpsc;

/// Events that are kept for those who come later.
const KEPT: usize = 128;
/// Events that a listener may be behind before it is left.
const BEHIND: usize = 2 * KEPT;
/// Most listeners.
const MOST_LISTENERS: usize = 8;

/// Something that happens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// Everything is there, and waits for boot.
    Created,
    /// The machine's first process is there.
    Started {
        /// Its number.
        process: u32,
    },
    /// The guest's first instruction comes now.
    Running {
        /// Milliseconds from the start of the machine's first process.
        start_ms: u64,
    },
    /// The guest is stopped.
    Paused,
    /// It goes on.
    Resumed,
    /// The power button is pressed.
    ShutdownRequested,
    /// The guest's kernel has panicked.
    Panic,
    /// The machine has ended and is started anew.
    Reset {
        /// The exit code that it would have ended with.
        code: u8,
    },
    /// The machine has ended.
    Ended {
        /// The exit code.
        code: u8,
        /// What it means.
        reason: String,
    },
}

/// A line: an event, and when it was.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Line {
    /// What has happened.
    #[serde(flatten)]
    pub event: Event,
    /// Counts up from 0.
    pub number: u64,
    /// Nanoseconds of the host's `CLOCK_MONOTONIC`.
    pub monotonic_ns: u64,
    /// Milliseconds since 1970, UTC.
    pub unix_ms: u64,
}

/// The events of a machine.
pub struct Events {
    kept: VecDeque<Bytes>,
    next: u64,
    listeners: Vec<mpsc::Sender<Bytes>>,
    sink: Option<File>,
    closed: bool,
}

impl Events {
    /// None so far. They are written to `sink`, too.
    pub fn new(sink: Option<File>) -> Self {
        Self { kept: VecDeque::new(), next: 0, listeners: Vec::new(), sink, closed: false }
    }

    /// Tells everybody. Who does not keep up is left.
    pub fn happened(&mut self, event: Event) {
        let time = |clock| {
            let now = clock_gettime(clock);
            (now.tv_sec as u64, now.tv_nsec as u64)
        };
        let ((seconds, nanoseconds), wall) = (time(ClockId::Monotonic), time(ClockId::Realtime));
        let line = Line {
            event,
            number: self.next,
            monotonic_ns: seconds * 1_000_000_000 + nanoseconds,
            unix_ms: wall.0 * 1000 + wall.1 / 1_000_000,
        };
        self.next += 1;
        // Numbers and strings can always be written.
        let mut line = serde_json::to_vec(&line).unwrap_or_default();
        line.push(b'\n');
        if let Some(sink) = &mut self.sink
            && sink.write_all(&line).is_err()
        {
            self.sink = None;
        }
        let line = Bytes::from(line);
        self.listeners.retain(|listener| listener.try_send(line.clone()).is_ok());
        self.kept.push_back(line);
        if self.kept.len() > KEPT {
            self.kept.pop_front();
        }
    }

    /// What has happened, and what will. `None`: there are too many listeners.
    pub fn listen(&mut self) -> Option<mpsc::Receiver<Bytes>> {
        self.listeners.retain(|listener| !listener.is_closed());
        if self.listeners.len() >= MOST_LISTENERS {
            return None;
        }
        let (sender, receiver) = mpsc::channel(BEHIND);
        // There is room for all that is kept.
        let all = self.kept.iter().all(|line| sender.try_send(line.clone()).is_ok());
        if !self.closed && all {
            self.listeners.push(sender);
        }
        Some(receiver)
    }

    /// Nothing will happen any longer.
    pub fn close(&mut self) {
        self.closed = true;
        self.listeners.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(receiver: &mut mpsc::Receiver<Bytes>) -> Vec<serde_json::Value> {
        let lines = std::iter::from_fn(|| receiver.try_recv().ok());
        lines.map(|line| serde_json::from_slice(&line).unwrap()).collect()
    }

    #[test]
    fn who_comes_late_is_told_what_was() {
        let mut events = Events::new(None);
        events.happened(Event::Started { process: 7 });
        let mut early = events.listen().unwrap();
        events.happened(Event::Ended { code: 80, reason: "panic".to_owned() });
        events.close();
        let mut late = events.listen().unwrap();
        for receiver in [&mut early, &mut late] {
            let lines = lines(receiver);
            assert_eq!(lines[0]["event"], "started");
            assert_eq!(lines[0]["process"], 7);
            assert_eq!(lines[1]["event"], "ended");
            assert_eq!(lines[1]["number"], 1);
            assert!(lines[1]["monotonic_ns"].as_u64() >= lines[0]["monotonic_ns"].as_u64());
            assert!(receiver.is_closed());
        }
    }

    #[test]
    fn who_does_not_keep_up_is_left() {
        let mut events = Events::new(None);
        let mut slow = events.listen().unwrap();
        (0..3 * BEHIND).for_each(|_| events.happened(Event::Paused));
        assert_eq!(lines(&mut slow).len(), BEHIND);
        assert!(slow.is_closed());
        let many: Vec<_> = (0..MOST_LISTENERS).map(|_| events.listen().unwrap()).collect();
        assert!(events.listen().is_none());
        drop(many);
        assert_eq!(lines(&mut events.listen().unwrap()).len(), KEPT);
    }
}

//! Events of a VM, as lines of JSON for subscribers.

use crate::line_sink::LineSink;
use hyper::body::Bytes;
use rustix::time::{ClockId, clock_gettime};
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::VecDeque;
use tokio::sync::mpsc;

/// Past events kept for new subscribers.
const KEPT: usize = 128;
/// Events queued for a slow subscriber before it is dropped.
const MAX_BACKLOG: usize = 2 * KEPT;
/// Most subscribers.
const MAX_SUBSCRIBERS: usize = 8;

/// Events of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// The VM is set up and waits for boot.
    Created,
    /// The VM's first process has started.
    Started {
        /// Process ID.
        process: u32,
    },
    /// The guest executes its first instruction.
    Running {
        /// Milliseconds from the start of the VM's first process.
        start_ms: u64,
    },
    /// The guest is paused.
    Paused,
    /// The guest is resumed.
    Resumed,
    /// The power button has been pressed.
    ShutdownRequested,
    /// The guest kernel has panicked.
    Panic,
    /// The VM has exited and restarts.
    Reset {
        /// Exit code without the restart.
        code: u8,
    },
    /// The VM has exited.
    Ended {
        /// Exit code.
        code: u8,
        /// Meaning of the exit code.
        reason: String,
    },
}

/// One line: an event and its time.
#[derive(Debug, Serialize, JsonSchema)]
pub struct EventRecord {
    /// Event.
    #[serde(flatten)]
    pub event: Event,
    /// Sequence number, from 0.
    pub number: u64,
    /// Time of the host's `CLOCK_MONOTONIC` in nanoseconds.
    pub monotonic_ns: u64,
    /// Time since 1970 UTC in milliseconds.
    pub unix_ms: u64,
}

/// Events of a VM and their subscribers.
pub struct Events {
    kept: VecDeque<Bytes>,
    next: u64,
    listeners: Vec<mpsc::Sender<Bytes>>,
    sink: Option<LineSink>,
    closed: bool,
}

impl Events {
    /// Creates an empty list. Events are also written to `sink`.
    pub fn new(sink: Option<LineSink>) -> Self {
        Self { kept: VecDeque::new(), next: 0, listeners: Vec::new(), sink, closed: false }
    }

    /// Sends an event to all subscribers, without waiting for any. Subscribers whose queue is full
    /// are dropped; the sink only loses the line.
    pub fn record(&mut self, event: Event) {
        let time = |clock| {
            let now = clock_gettime(clock);
            (now.tv_sec as u64, now.tv_nsec as u64)
        };
        let ((seconds, nanoseconds), wall) = (time(ClockId::Monotonic), time(ClockId::Realtime));
        let line = EventRecord {
            event,
            number: self.next,
            monotonic_ns: seconds * 1_000_000_000 + nanoseconds,
            unix_ms: wall.0 * 1000 + wall.1 / 1_000_000,
        };
        self.next += 1;
        // Numbers and strings always serialize.
        let mut line = serde_json::to_vec(&line).unwrap_or_default();
        line.push(b'\n');
        if let Some(sink) = &self.sink {
            sink.write(line.clone());
        }
        let line = Bytes::from(line);
        self.listeners.retain(|listener| listener.try_send(line.clone()).is_ok());
        self.kept.push_back(line);
        if self.kept.len() > KEPT {
            self.kept.pop_front();
        }
    }

    /// Returns a stream of past and future events; `None` if there are too many subscribers.
    pub fn subscribe(&mut self) -> Option<mpsc::Receiver<Bytes>> {
        self.listeners.retain(|listener| !listener.is_closed());
        if self.listeners.len() >= MAX_SUBSCRIBERS {
            return None;
        }
        let (sender, receiver) = mpsc::channel(MAX_BACKLOG);
        // The channel has room for all kept events.
        let all = self.kept.iter().all(|line| sender.try_send(line.clone()).is_ok());
        if !self.closed && all {
            self.listeners.push(sender);
        }
        Some(receiver)
    }

    /// Ends all streams. Returns the sink, whose drop waits for its reader: the caller must not
    /// hold a lock then.
    pub fn close(&mut self) -> Option<LineSink> {
        self.closed = true;
        self.listeners.clear();
        self.sink.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::os::fd::OwnedFd;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    fn lines(receiver: &mut mpsc::Receiver<Bytes>) -> Vec<serde_json::Value> {
        let lines = std::iter::from_fn(|| receiver.try_recv().ok());
        lines.map(|line| serde_json::from_slice(&line).unwrap()).collect()
    }

    #[test]
    fn a_late_subscriber_gets_past_events() {
        let mut events = Events::new(None);
        events.record(Event::Started { process: 7 });
        let mut early = events.subscribe().unwrap();
        events.record(Event::Ended { code: 80, reason: "panic".to_owned() });
        events.close();
        let mut late = events.subscribe().unwrap();
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
    fn the_reader_of_the_sink_delays_nothing() {
        const COUNT: usize = 5000;
        let (from, to) = std::io::pipe().unwrap();
        let sink = LineSink::start(OwnedFd::from(to).into(), "--event-fd").unwrap();
        let mut events = Events::new(Some(sink));
        let (done, recorded) = channel();
        thread::spawn(move || {
            (0..COUNT).for_each(|_| events.record(Event::Paused));
            done.send(events.close()).ok()
        });
        let sink = recorded.recv_timeout(Duration::from_secs(60)).expect("events wait");
        let reader = thread::spawn(|| BufReader::new(from).lines().collect::<Result<Vec<_>, _>>());
        drop(sink);
        let lines = reader.join().unwrap().unwrap();
        assert!(lines.len() < COUNT, "{}", lines.len());
        let numbers = lines.iter().map(|line| {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            line["number"].as_u64()
        });
        assert!(numbers.is_sorted_by(|one, next| one < next));
    }

    #[test]
    fn a_slow_subscriber_is_dropped() {
        let mut events = Events::new(None);
        let mut slow = events.subscribe().unwrap();
        (0..3 * MAX_BACKLOG).for_each(|_| events.record(Event::Paused));
        assert_eq!(lines(&mut slow).len(), MAX_BACKLOG);
        assert!(slow.is_closed());
        let many: Vec<_> = (0..MAX_SUBSCRIBERS).map(|_| events.subscribe().unwrap()).collect();
        assert!(events.subscribe().is_none());
        drop(many);
        assert_eq!(lines(&mut events.subscribe().unwrap()).len(), KEPT);
    }
}

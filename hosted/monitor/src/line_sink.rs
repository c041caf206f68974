//! Lines for a file, pipe or terminal whose reader may stall.
//!
//! A thread writes them and waits for room: that is right for all of these, needs no flag of an
//! open file that other processes may share, and leaves no line half written while others wait.

use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::messages::{Level, say};
use hosted_command::streams;
use std::convert::Infallible;
use std::fs::File;
use std::io::ErrorKind;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread;
use std::time::Duration;

/// Lines queued for a slow reader before further ones are lost.
const MAX_BACKLOG: usize = 256;
/// Time for the reader to take the queued lines at the end.
const PATIENCE: Duration = Duration::from_secs(2);

/// Queue of lines that a thread writes to a file. Dropping it waits for the thread, not longer than
/// [`PATIENCE`].
pub struct LineSink {
    /// `None` while the sink is dropped.
    lines: Option<SyncSender<Vec<u8>>>,
    /// Disconnected once the thread has ended.
    end: Receiver<Infallible>,
}

impl LineSink {
    /// Starts the thread; `option` names the file in messages.
    ///
    /// # Errors
    /// No thread can be created: code 71.
    pub fn start(file: File, option: &'static str) -> Result<Self, Failure> {
        let (lines, queue) = sync_channel(MAX_BACKLOG);
        let (running, end) = channel();
        let write = move || {
            write_lines(file, queue, option);
            drop(running);
        };
        let thread = thread::Builder::new().name("lines".to_owned()).spawn(write);
        thread.os_error("create a thread")?;
        Ok(Self { lines: Some(lines), end })
    }

    /// Queues a line, which ends with a line feed. The line is lost if the queue is full.
    pub fn write(&self, line: Vec<u8>) {
        if let Some(lines) = &self.lines {
            // The thread may have ended after an error.
            let _ = lines.try_send(line);
        }
    }
}

impl Drop for LineSink {
    fn drop(&mut self) {
        drop(self.lines.take());
        // A thread whose reader still stalls ends with `parador`.
        let _ = self.end.recv_timeout(PATIENCE);
    }
}

/// Writes lines until the queue is closed or a write fails.
fn write_lines(file: File, queue: Receiver<Vec<u8>>, option: &str) {
    for line in queue {
        let Err(error) = streams::write_all(&file, &line) else { continue };
        // A named pipe may get another reader.
        if error.kind() != ErrorKind::BrokenPipe {
            // A part of the line may be in the file: another one would continue it.
            let error = failure::describe(&error);
            say(Level::Warn, &format!("cannot write {option}: {error}; further lines are lost"));
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, pipe};
    use std::os::fd::OwnedFd;
    use std::time::Instant;

    /// Time in which everything must end, on a busy host.
    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn a_stalled_reader_loses_whole_lines() {
        let (mut from, to) = pipe().unwrap();
        let sink = LineSink::start(OwnedFd::from(to).into(), "a test").unwrap();
        let (done, written) = channel();
        thread::spawn(move || {
            let line = |number: u32| format!("{number:09999}\n").into_bytes();
            (0..2000).for_each(|number| sink.write(line(number)));
            done.send(sink).unwrap();
        });
        let sink = written.recv_timeout(LIMIT).expect("a write waits for the reader");
        let reader = thread::spawn(move || {
            let mut text = String::new();
            from.read_to_string(&mut text).map(|_| text)
        });
        drop(sink);
        let text = reader.join().unwrap().unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines.iter().all(|line| line.len() == 9999) && text.ends_with('\n'));
        assert!(lines.is_sorted() && lines.len() >= MAX_BACKLOG && lines.len() < 2000);
    }

    /// Another program that shares the pipe may have made it non-blocking.
    #[test]
    fn a_full_pipe_that_does_not_block_loses_nothing() {
        let (mut from, to) = pipe().unwrap();
        rustix::io::ioctl_fionbio(&to, true).unwrap();
        let sink = LineSink::start(OwnedFd::from(to).into(), "a test").unwrap();
        sink.write(vec![b'x'; 1 << 20]);
        let reader = thread::spawn(move || from.read_to_end(&mut Vec::new()));
        drop(sink);
        assert_eq!(reader.join().unwrap().unwrap(), 1 << 20);
    }

    #[test]
    fn the_end_does_not_wait_for_a_stalled_reader() {
        let (_from, to) = pipe().unwrap();
        let sink = LineSink::start(OwnedFd::from(to).into(), "a test").unwrap();
        sink.write(vec![b'x'; 1 << 20]);
        let begin = Instant::now();
        let (done, dropped) = channel();
        thread::spawn(move || {
            drop(sink);
            done.send(()).unwrap();
        });
        dropped.recv_timeout(LIMIT).expect("the end waits for the reader");
        assert!(begin.elapsed() >= PATIENCE, "a slow reader gets some time");
    }
}

//! Serial line and virtio console: each direction is copied by a thread, so that no vCPU waits for
//! the host.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use vmm_bus::ByteStream;

use crate::vcpu_thread::{Notify, VcpuThread};

/// Buffer size per direction in bytes.
const ROOM: usize = 64 << 10;
/// Time to collect further output before it is written.
const GATHER: Duration = Duration::from_millis(1);

/// Buffers between the guest and the host.
#[derive(Default)]
pub struct ConsoleBuffer {
    /// Event for the vCPU.
    event: u64,
    output: Mutex<Output>,
    /// Signals available output.
    filled: Condvar,
    /// Signals that all output is written.
    written: Condvar,
    input: Mutex<VecDeque<u8>>,
    /// Signals space for input.
    room: Condvar,
}

#[derive(Default)]
struct Output {
    bytes: Vec<u8>,
    /// The thread is writing output that it has taken.
    is_writing: bool,
    /// The guest has been refused a byte.
    is_awaited: bool,
    /// The reader has closed its end.
    is_closed: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every update is atomic under the lock.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ByteStream for &ConsoleBuffer {
    /// Queues a byte from the guest; `false`: the buffer is full.
    fn put(&mut self, byte: u8) -> bool {
        let mut output = lock(&self.output);
        if output.bytes.len() >= ROOM {
            output.is_awaited = true;
            return false;
        }
        output.bytes.push(byte);
        if output.bytes.len() == 1 && !output.is_writing {
            self.filled.notify_one();
        }
        true
    }

    /// Returns the next byte for the guest.
    fn take(&mut self) -> Option<u8> {
        let mut input = lock(&self.input);
        let byte = input.pop_front();
        if input.len() == ROOM / 2 || byte.is_none() {
            self.room.notify_one();
        }
        byte
    }
}

impl ConsoleBuffer {
    /// Creates empty buffers; `event` notifies a vCPU of input, or of space for output.
    pub fn new(event: u64) -> Self {
        Self { event, ..Self::default() }
    }

    /// Loop of the output thread.
    pub fn write(&self, mut to: impl Write, vcpu_thread: &VcpuThread) {
        loop {
            let mut output = lock(&self.output);
            output.is_writing = false;
            while output.bytes.is_empty() {
                self.written.notify_all();
                output = self.filled.wait(output).unwrap_or_else(PoisonError::into_inner);
            }
            output.is_writing = true;
            drop(output);
            thread::sleep(GATHER);
            let mut output = lock(&self.output);
            let bytes = std::mem::take(&mut output.bytes);
            let is_awaited = std::mem::take(&mut output.is_awaited);
            let is_closed = output.is_closed;
            drop(output);
            if is_awaited {
                vcpu_thread.notify(self.event);
            }
            // The guest continues without a reader.
            if !is_closed && to.write_all(&bytes).and_then(|()| to.flush()).is_err() {
                lock(&self.output).is_closed = true;
            }
        }
    }

    /// Waits until all output is written.
    pub fn finish(&self) {
        let output = lock(&self.output);
        let is_left = |output: &mut Output| output.is_writing || !output.bytes.is_empty();
        drop(self.written.wait_while(output, is_left).unwrap_or_else(PoisonError::into_inner));
    }

    /// Loop of the input thread, until the end of the input.
    pub fn read(&self, mut from: impl Read, vcpu_thread: &VcpuThread) {
        let mut bytes = [0; 4096];
        loop {
            let length = match from.read(&mut bytes) {
                Ok(0) => return,
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return,
            };
            let input = lock(&self.input);
            let is_full = |input: &mut VecDeque<u8>| input.len() > ROOM / 2;
            let mut input =
                self.room.wait_while(input, is_full).unwrap_or_else(PoisonError::into_inner);
            input.extend(&bytes[..length]);
            drop(input);
            vcpu_thread.notify(self.event);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::mpsc::{Sender, channel};

    struct Collector(Sender<Vec<u8>>);

    impl Write for Collector {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.send(bytes.to_vec()).map_err(io::Error::other)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn output_comes_out_in_order() {
        let console = Arc::new(ConsoleBuffer::default());
        let text: Vec<u8> = (0..2 * ROOM).map(|number| number as u8).collect();
        assert_eq!(
            text.iter().filter(|&&byte| (&*console).put(byte)).count(),
            ROOM,
            "no more room"
        );
        let (sender, receiver) = channel();
        let writer = Arc::clone(&console);
        thread::spawn(move || writer.write(Collector(sender), &VcpuThread::default()));
        console.finish();
        assert!(text[ROOM..].iter().all(|&byte| (&*console).put(byte)));
        console.finish();
        let mut written = Vec::new();
        while written.len() < text.len() {
            written.extend(receiver.recv().unwrap());
        }
        assert_eq!(written, text);
    }

    #[test]
    fn input_waits_for_room() {
        let console = ConsoleBuffer::default();
        let text: Vec<u8> = (0..3 * ROOM).map(|number| number as u8).collect();
        thread::scope(|scope| {
            scope.spawn(|| console.read(&text[..], &VcpuThread::default()));
            let mut taken = Vec::new();
            while taken.len() < text.len() {
                match (&console).take() {
                    Some(byte) => taken.push(byte),
                    None => thread::yield_now(),
                }
            }
            assert_eq!(taken, text);
        });
    }
}

//! The serial line and the virtio console: bytes from and to descriptors, each carried by a thread, so that no virtual processor waits for the host.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::seat::Seat;

/// Bytes that wait in each direction.
const ROOM: usize = 64 << 10;
/// Time in which more output may come before it is written.
const GATHER: Duration = Duration::from_millis(1);

/// Bytes on their way between the guest and the outside.
#[derive(Default)]
pub struct Console {
    /// What a virtual processor is told.
    event: u64,
    output: Mutex<Output>,
    /// There is output.
    filled: Condvar,
    /// All output is written.
    written: Condvar,
    input: Mutex<VecDeque<u8>>,
    /// There is room for input.
    room: Condvar,
}

#[derive(Default)]
struct Output {
    bytes: Vec<u8>,
    /// The thread is writing some that it has taken.
    is_writing: bool,
    /// The guest has been refused a byte.
    is_awaited: bool,
    /// Nobody reads.
    is_closed: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nobody leaves it half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Console {
    /// Without bytes; `event` is what a virtual processor is told when there is input, or room for output again.
    pub fn new(event: u64) -> Self {
        Self { event, ..Self::default() }
    }

    /// Takes a byte from the guest; `false`: there is no room now.
    pub fn put(&self, byte: u8) -> bool {
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

    /// The next byte for the guest.
    pub fn take(&self) -> Option<u8> {
        let mut input = lock(&self.input);
        let byte = input.pop_front();
        if input.len() == ROOM / 2 || byte.is_none() {
            self.room.notify_one();
        }
        byte
    }

    /// Writes output until the process ends.
    pub fn write(&self, mut to: impl Write, seat: &Seat) {
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
                seat.tell(self.event);
            }
            // The guest goes on without a listener.
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

    /// Reads input until it ends.
    pub fn read(&self, mut from: impl Read, seat: &Seat) {
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
            seat.tell(self.event);
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
        let console = Arc::new(Console::default());
        let text: Vec<u8> = (0..2 * ROOM).map(|number| number as u8).collect();
        assert_eq!(text.iter().filter(|&&byte| console.put(byte)).count(), ROOM, "no more room");
        let (sender, receiver) = channel();
        let writer = Arc::clone(&console);
        thread::spawn(move || writer.write(Collector(sender), &Seat::default()));
        console.finish();
        assert!(text[ROOM..].iter().all(|&byte| console.put(byte)));
        console.finish();
        let mut written = Vec::new();
        while written.len() < text.len() {
            written.extend(receiver.recv().unwrap());
        }
        assert_eq!(written, text);
    }

    #[test]
    fn input_waits_for_room() {
        let console = Console::default();
        let text: Vec<u8> = (0..3 * ROOM).map(|number| number as u8).collect();
        thread::scope(|scope| {
            scope.spawn(|| console.read(&text[..], &Seat::default()));
            let mut taken = Vec::new();
            while taken.len() < text.len() {
                match console.take() {
                    Some(byte) => taken.push(byte),
                    None => thread::yield_now(),
                }
            }
            assert_eq!(taken, text);
        });
    }
}

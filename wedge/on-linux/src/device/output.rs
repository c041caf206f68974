//! Output of a console, from the ring in shared memory to its reader. The device process does not
//! wait for the reader: vCPUs depend on that process.

use host_linux::sys::{self, Errno};

use crate::linux::poll::{WRITABLE, wait};
use crate::state::shared::{ByteRing, RING};

/// Largest number of bytes that are printed at once. A pipe that poll(2) reports as writable takes
/// as many without a wait (`PIPE_BUF`).
const CHUNK: usize = 4096;

/// Output that was taken from the ring and not printed yet.
pub struct ConsoleOutput {
    bytes: [u8; CHUNK],
    printed: usize,
    used: usize,
}

/// State of a console's output.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OutputState {
    /// All of it is printed.
    Printed,
    /// More is pending, which waits for one round of the main loop.
    Pending,
    /// The reader takes no more now.
    Blocked,
}

impl ConsoleOutput {
    /// Creates the state without output.
    pub const fn new() -> Self {
        Self { bytes: [0; CHUNK], printed: 0, used: 0 }
    }

    /// Prints output, as much as a full ring at most.
    pub fn drain(&mut self, ring: &ByteRing, to: u32) -> OutputState {
        for _ in 0..RING / CHUNK {
            if self.printed == self.used {
                self.take_from(ring);
                if self.used == 0 {
                    return OutputState::Printed;
                }
            }
            if !self.print(to) {
                return OutputState::Blocked;
            }
        }
        OutputState::Pending
    }

    fn take_from(&mut self, ring: &ByteRing) {
        (self.printed, self.used) = (0, 0);
        while self.used < CHUNK {
            let Some(byte) = ring.take() else { break };
            self.bytes[self.used] = byte;
            self.used += 1;
        }
    }

    /// Prints what was taken; returns whether that was all of it.
    fn print(&mut self, to: u32) -> bool {
        while self.printed < self.used {
            // The descriptor may be blocking, and its flags belong to all of its users.
            let [is_writable] = wait([Some((to, WRITABLE))], 0);
            if !is_writable {
                return false;
            }
            match sys::write(to, &self.bytes[self.printed..self.used]) {
                Ok(count) => self.printed += count,
                // `EINTR`, `EAGAIN`
                Err(Errno(4 | 11)) => return false,
                // The reader has closed the descriptor.
                Err(_) => self.printed = self.used,
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, pipe};
    use std::os::fd::AsRawFd;
    use std::vec;

    #[test]
    fn output_waits_for_a_reader_without_blocking() {
        let (mut reader, writer) = pipe().unwrap();
        let to = writer.as_raw_fd() as u32;
        let ring = ByteRing::empty();
        let mut output = ConsoleOutput::new();
        let mut put = 0_usize;
        // More than the pipe has room for.
        while output.drain(&ring, to) != OutputState::Blocked {
            assert!(put < 1 << 22);
            while ring.put(put as u8) {
                put += 1;
            }
        }
        assert_eq!(output.drain(&ring, to), OutputState::Blocked, "and keeps the rest");
        let mut read = 0;
        let mut bytes = vec![0; CHUNK];
        while read < put {
            if output.drain(&ring, to) == OutputState::Printed {
                assert!(ring.take().is_none());
            }
            let count = reader.read(&mut bytes).unwrap();
            assert!(bytes[..count].iter().enumerate().all(|(at, byte)| *byte == (read + at) as u8));
            read += count;
        }
        assert_eq!(output.drain(&ring, to), OutputState::Printed);
    }

    #[test]
    fn output_without_a_reader_is_dropped() {
        let (reader, writer) = pipe().unwrap();
        drop(reader);
        let ring = ByteRing::empty();
        while ring.put(1) {}
        let mut output = ConsoleOutput::new();
        let to = writer.as_raw_fd() as u32;
        while output.drain(&ring, to) == OutputState::Pending {}
        assert_eq!(ring.room(), RING);
    }
}

//! Kernel log on a serial port.
//!
//! Any CPU may log at any time, except in an NMI. Each entry is appended to a buffer as a whole.
//! During boot and after a panic it is sent immediately, and the CPU waits for the port. Otherwise
//! ([`Log::start_buffering`]) no CPU waits: the logging CPU sends what the port accepts without
//! waiting, up to [`STEP`] bytes, and timer interrupts send the rest in such steps ([`Log::step`],
//! [`PERIOD`]). The time for which the kernel lock is held is therefore independent of the speed of
//! the port. Entries that do not fit the buffer are dropped and counted.

mod ring;

use core::fmt::{self, Write};
use core::sync::atomic::{AtomicBool, Ordering};

use spin::Mutex;

use ring::Ring;

/// Polls of the transmitter after which the port counts as absent: far longer than a FIFO takes at
/// 115200 baud.
const MAX_POLLS: u32 = 100_000;
/// Length of the buffer in bytes.
const BUFFER: usize = 16 << 10;
/// Maximum number of bytes sent per step, for ports that accept bytes without delay.
const STEP: usize = 128;
/// Time between two steps in ns: a FIFO of 16 bytes at 115200 baud.
pub const PERIOD: u64 = 1_400_000;

/// Transmitter of a serial port.
pub trait Transmitter {
    /// Returns whether there is a port.
    fn is_present(&self) -> bool;
    /// Returns whether the transmitter is empty.
    fn is_ready(&self) -> bool;
    /// Number of bytes that the port accepts when its transmitter is empty.
    fn depth(&self) -> usize;
    /// Sends a byte.
    fn send(&self, byte: u8);
}

/// The log.
pub struct Log<T: Transmitter> {
    port: T,
    /// Held by the CPU that uses the buffer.
    line: Mutex<()>,
    waiting: Ring<BUFFER>,
    is_buffered: AtomicBool,
}

impl<T: Transmitter> Log<T> {
    /// An empty log on a port.
    pub const fn new(port: T) -> Self {
        Self {
            port,
            line: Mutex::new(()),
            waiting: Ring::new(),
            is_buffered: AtomicBool::new(false),
        }
    }

    /// The port.
    pub const fn port(&self) -> &T {
        &self.port
    }

    /// Ends the phase in which a logging CPU waits for the port. Called by the first CPU before it
    /// schedules threads.
    pub fn start_buffering(&self) {
        self.is_buffered.store(true, Ordering::Release);
    }

    /// Sends at most `most` bytes, while the port accepts them. The caller holds `line`.
    fn send(&self, most: usize) {
        let mut sent = 0;
        while sent < most && self.is_waiting() && self.port.is_ready() {
            for byte in core::iter::from_fn(|| self.waiting.take()).take(self.port.depth()) {
                self.port.send(byte);
                sent += 1;
            }
        }
    }

    /// Sends the whole buffer and waits for the port, unless it is absent. The caller holds `line`.
    fn send_all(&self) {
        while self.is_waiting() && (0..MAX_POLLS).any(|_| self.port.is_ready()) {
            self.send(1);
        }
    }

    /// Appends an entry; returns the number of bytes still buffered.
    fn append(&self, write: impl FnOnce(&mut ring::EntryWriter<'_, BUFFER>)) -> usize {
        if !self.port.is_present() {
            return 0;
        }
        let _whole_entry = self.line.lock();
        self.waiting.append(write);
        if self.is_buffered.load(Ordering::Acquire) {
            self.send(STEP);
        } else {
            self.send_all();
        }
        self.waiting.len()
    }

    /// Logs a line with the prefix `kernel: `.
    pub fn line(&self, arguments: fmt::Arguments<'_>) {
        self.append(|entry| {
            // Writing to an entry never fails.
            let _ = writeln!(entry, "kernel: {arguments}");
        });
    }

    /// Logs a task's text unchanged, except that control characters other than line feed and tab
    /// become dots. Returns the number of bytes still buffered.
    pub fn text(&self, bytes: &[u8]) -> usize {
        self.append(|entry| {
            for &byte in bytes {
                entry.put(match byte {
                    b'\n' | b'\t' | b' '..=b'~' | 0x80.. => byte,
                    _ => b'.',
                });
            }
        })
    }

    /// Returns whether the buffer holds unsent bytes.
    #[inline(always)]
    pub fn is_waiting(&self) -> bool {
        self.waiting.len() != 0
    }

    /// Sends up to [`STEP`] bytes that the port accepts without waiting.
    pub fn step(&self) {
        self.text(&[]);
    }

    /// Sends the whole buffer, waiting for the port, before the machine is reset.
    pub fn flush(&self) {
        if self.port.is_present() {
            let _whole_entries = self.line.lock();
            self.send_all();
        }
    }

    /// Takes over the port for a panic. Sends the buffer, and from now on every line immediately.
    ///
    /// # Safety
    /// The CPU that holds the buffer, if any, has stopped or will be stopped.
    pub unsafe fn seize(&self) {
        self.is_buffered.store(false, Ordering::Release);
        if self.line.is_locked() {
            // SAFETY: the lock guards only atomics, and the integrity of lines, which a panic may
            // break; its holder does not continue, by the caller.
            unsafe { self.line.force_unlock() };
        }
        self.flush();
    }
}

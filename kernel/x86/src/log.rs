//! Kernel log on a serial port.
//!
//! Any CPU may log at any time, except in an NMI. Each entry is appended to a buffer as a whole.
//! During boot and after a panic it is sent immediately, and the CPU waits for the port. Otherwise
//! ([`start_buffering`]) no CPU waits: the logging CPU sends what the port accepts without waiting,
//! up to [`STEP`] bytes, and timer interrupts send the rest in such steps ([`step`], [`PERIOD`]).
//! The time for which the kernel lock is held is therefore independent of the speed of the port.
//! Entries that do not fit the buffer are dropped and counted.

mod ring;

use core::fmt::{self, Write};
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, Ordering};

use spin::Mutex;

use crate::io::{in8, out8};
use ring::Ring;

/// Conventional I/O base of the first serial port.
const COM1: u16 = 0x3f8;
/// Conventional I/O base of the second serial port.
const COM2: u16 = 0x2f8;
/// Polls of the transmitter after which the port counts as absent: far longer than a FIFO takes at
/// 115200 baud.
const MAX_POLLS: u32 = 100_000;
/// Length of the buffer in bytes.
const BUFFER: usize = 16 << 10;
/// Maximum number of bytes sent per step, for ports that accept bytes without delay.
const STEP: usize = 128;
/// Time between two steps in ns: a FIFO of 16 bytes at 115200 baud.
pub const PERIOD: u64 = 1_400_000;

/// Registers and bits of the 16550 (National Semiconductor PC16550D).
mod uart {
    pub const DATA: u16 = 0;
    pub const INTERRUPT_ENABLE: u16 = 1;
    pub const INTERRUPT_IDENTIFICATION: u16 = 2;
    pub const FIFO_CONTROL: u16 = 2;
    pub const LINE_CONTROL: u16 = 3;
    pub const MODEM_CONTROL: u16 = 4;
    pub const LINE_STATUS: u16 = 5;

    pub const FIFO_ON_AND_CLEAR: u8 = 0x07;
    pub const FIFO_IS_ON: u8 = 0xc0;
    pub const FIFO_LENGTH: u8 = 16;
    pub const EIGHT_BITS: u8 = 0x03;
    pub const DIVISOR_ACCESS: u8 = 0x80;
    pub const READY_TO_SEND: u8 = 0x03;
    pub const TRANSMITTER_EMPTY: u8 = 0x20;
    pub const DIVISOR_115200: u8 = 1;
}

static PORT: AtomicU16 = AtomicU16::new(0);
/// Number of bytes that the port accepts when its transmitter is empty.
static FIFO_DEPTH: AtomicU8 = AtomicU8::new(1);
/// Held by the CPU that uses the buffer.
static LINE: Mutex<()> = Mutex::new(());
static WAITING: Ring<BUFFER> = Ring::new();
static BUFFERED: AtomicBool = AtomicBool::new(false);

/// Selects the port by the command-line option `log=`: `com1` (also the default for unknown
/// values), `com2` or `none`. Called once, by the first CPU.
pub fn init(choice: Option<&str>) {
    let port = match choice {
        Some("none") => return,
        Some("com2") => COM2,
        _ => COM1,
    };
    let set_up = [
        (uart::INTERRUPT_ENABLE, 0),
        (uart::LINE_CONTROL, uart::DIVISOR_ACCESS),
        (uart::DATA, uart::DIVISOR_115200),
        (uart::INTERRUPT_ENABLE, 0),
        (uart::LINE_CONTROL, uart::EIGHT_BITS),
        (uart::FIFO_CONTROL, uart::FIFO_ON_AND_CLEAR),
        (uart::MODEM_CONTROL, uart::READY_TO_SEND),
    ];
    for (register, value) in set_up {
        // SAFETY: a UART without DMA, at the address where PCs have it.
        unsafe { out8(port + register, value) };
    }
    // SAFETY: as above; reading this register has no relevant effect while the UART's interrupts
    // are off.
    let identification = unsafe { in8(port + uart::INTERRUPT_IDENTIFICATION) };
    if identification & uart::FIFO_IS_ON == uart::FIFO_IS_ON {
        FIFO_DEPTH.store(uart::FIFO_LENGTH, Ordering::Relaxed);
    }
    PORT.store(port, Ordering::Release);
}

/// Ends the phase in which a logging CPU waits for the port. Called by the first CPU before it
/// schedules threads.
pub fn start_buffering() {
    BUFFERED.store(true, Ordering::Release);
}

fn is_ready(port: u16) -> bool {
    // SAFETY: reading the status of a UART without DMA.
    unsafe { in8(port + uart::LINE_STATUS) & uart::TRANSMITTER_EMPTY != 0 }
}

/// Sends at most `most` bytes, while the port accepts them. The caller holds `LINE`.
fn send(port: u16, most: usize) {
    let depth = usize::from(FIFO_DEPTH.load(Ordering::Relaxed));
    let mut sent = 0;
    while sent < most && WAITING.len() != 0 && is_ready(port) {
        for byte in core::iter::from_fn(|| WAITING.take()).take(depth) {
            // SAFETY: a UART without DMA.
            unsafe { out8(port + uart::DATA, byte) };
            sent += 1;
        }
    }
}

/// Sends the whole buffer and waits for the port, unless it is absent. The caller holds `LINE`.
fn send_all(port: u16) {
    while WAITING.len() != 0 && (0..MAX_POLLS).any(|_| is_ready(port)) {
        send(port, 1);
    }
}

/// Appends an entry; returns the number of bytes still buffered.
fn append(write: impl FnOnce(&mut ring::EntryWriter<'_, BUFFER>)) -> usize {
    let port = PORT.load(Ordering::Acquire);
    if port == 0 {
        return 0;
    }
    let _whole_entry = LINE.lock();
    WAITING.append(write);
    if BUFFERED.load(Ordering::Acquire) {
        send(port, STEP);
    } else {
        send_all(port);
    }
    WAITING.len()
}

/// Logs a line with the prefix `kernel: `. Used by [`log!`](crate::log!).
pub fn line(arguments: fmt::Arguments) {
    append(|entry| {
        // Writing to an entry never fails.
        let _ = writeln!(entry, "kernel: {arguments}");
    });
}

/// Logs a task's text unchanged, except that control characters other than line feed and tab become
/// dots. Returns the number of bytes still buffered.
pub fn text(bytes: &[u8]) -> usize {
    append(|entry| {
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
pub fn is_waiting() -> bool {
    WAITING.len() != 0
}

/// Sends up to [`STEP`] bytes that the port accepts without waiting.
pub fn step() {
    text(&[]);
}

/// Sends the whole buffer, waiting for the port, before the machine is reset.
pub fn flush() {
    let port = PORT.load(Ordering::Acquire);
    if port != 0 {
        let _whole_entries = LINE.lock();
        send_all(port);
    }
}

/// Takes over the port for a panic: the CPU that holds the lock has stopped or will be stopped.
/// Sends the buffer, and from now on every line immediately.
#[cfg(target_os = "none")]
pub(crate) fn seize() {
    BUFFERED.store(false, Ordering::Release);
    if LINE.is_locked() {
        // SAFETY: the lock guards only atomics, and the integrity of lines, which a panic may
        // break.
        unsafe { LINE.force_unlock() };
    }
    flush();
}

/// Logs a formatted line.
#[macro_export]
macro_rules! log {
    ($($argument:tt)*) => { $crate::log::line(format_args!($($argument)*)) };
}

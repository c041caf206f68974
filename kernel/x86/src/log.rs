//! The kernel's log: lines on a serial port.
//!
//! Any CPU may log at any time except from an NMI. An entry goes into a buffer, as a whole; while the machine boots and
//! after a panic it is then sent at once, and the CPU waits for the port. At all other times ([`buffer`]) no CPU waits:
//! whoever logs sends as much as the port takes without waiting, in a step of limited length, and the rest is left to
//! the interrupts of a timer, each of which takes such a step ([`step`], [`PERIOD`]). So the time that the kernel's lock
//! is held for the log does not depend on the speed of the port. What does not fit into the buffer is lost, and counted.

mod ring;

use core::fmt::{self, Write};
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, Ordering};

use spin::Mutex;

use crate::io::{in8, out8};
use ring::Ring;

/// Ports of the first serial interface, by tradition.
const COM1: u16 = 0x3f8;
/// Ports of the second.
const COM2: u16 = 0x2f8;
/// Polls for room before the port counts as dead: far more than a FIFO takes at 115200 baud.
const MAX_POLLS: u32 = 100_000;
/// Bytes that wait to be sent, at most.
const BUFFER: usize = 16 << 10;
/// Most bytes of one step, for ports that take bytes as fast as they come.
const STEP: usize = 128;
/// Nanoseconds in which a FIFO of 16 bytes is sent at 115200 baud: time between two steps.
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
/// Bytes that the port takes when its transmitter is empty.
static FIFO_DEPTH: AtomicU8 = AtomicU8::new(1);
/// Held by the CPU that uses the buffer.
static LINE: Mutex<()> = Mutex::new(());
static WAITING: Ring<BUFFER> = Ring::new();
static BUFFERED: AtomicBool = AtomicBool::new(false);

/// Chooses the port by the value of the command line's `log=`: `com1`, `com2` or `none`; `com1` if
/// there is none or it is unknown. Called once, by the first CPU.
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
    // SAFETY: as above; a read of this register has no effect that matters while its interrupts are off.
    let identification = unsafe { in8(port + uart::INTERRUPT_IDENTIFICATION) };
    if identification & uart::FIFO_IS_ON == uart::FIFO_IS_ON {
        FIFO_DEPTH.store(uart::FIFO_LENGTH, Ordering::Relaxed);
    }
    PORT.store(port, Ordering::Release);
}

/// Ends the time in which a CPU that logs waits for the port. Called by the first CPU when it begins to schedule.
pub fn start_buffering() {
    BUFFERED.store(true, Ordering::Release);
}

fn is_ready(port: u16) -> bool {
    // SAFETY: reading the status of a UART without DMA.
    unsafe { in8(port + uart::LINE_STATUS) & uart::TRANSMITTER_EMPTY != 0 }
}

/// Sends at most `most` bytes, as long as the port takes them. With `LINE` held.
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

/// Sends everything and waits for the port, unless that is dead. With `LINE` held.
fn send_all(port: u16) {
    while WAITING.len() != 0 && (0..MAX_POLLS).any(|_| is_ready(port)) {
        send(port, 1);
    }
}

/// Appends an entry; returns the number of bytes that wait to be sent.
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

/// Writes a line, with the prefix `kernel: `. Used through [`log!`](crate::log!).
pub fn line(arguments: fmt::Arguments) {
    append(|entry| {
        // An entry takes everything.
        let _ = writeln!(entry, "kernel: {arguments}");
    });
}

/// Writes text that came from a task, as it is, except that control characters other than line
/// feed and tab become dots. Returns the number of bytes that wait to be sent.
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

/// Whether bytes wait to be sent.
#[inline(always)]
pub fn is_waiting() -> bool {
    WAITING.len() != 0
}

/// Sends as much as the port takes without waiting, in a step of limited length.
pub fn step() {
    text(&[]);
}

/// Sends everything that waits, and waits for the port, before the machine ends.
pub fn flush() {
    let port = PORT.load(Ordering::Acquire);
    if port != 0 {
        let _whole_entries = LINE.lock();
        send_all(port);
    }
}

/// Takes the port over for a panic: whoever holds it has stopped, or will be stopped. What waits is sent, and from now on
/// every line at once.
#[cfg(target_os = "none")]
pub(crate) fn seize() {
    BUFFERED.store(false, Ordering::Release);
    if LINE.is_locked() {
        // SAFETY: the lock guards no data but atomics, and the wholeness of lines, which a panic may break.
        unsafe { LINE.force_unlock() };
    }
    flush();
}

/// Writes a line to the kernel's log.
#[macro_export]
macro_rules! log {
    ($($argument:tt)*) => { $crate::log::line(format_args!($($argument)*)) };
}

//! The kernel's log: lines on a serial port, polled.
//!
//! Any CPU may log at any time except from an NMI. A line is written as a whole. A port that does
//! not take bytes costs a bounded time, never a hang.

use crate::io::{in8, out8};
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicU16, Ordering};
use spin::Mutex;

/// Ports of the first serial interface, by tradition.
const COM1: u16 = 0x3f8;
/// Ports of the second.
const COM2: u16 = 0x2f8;
/// Polls for room before a byte is given up: far more than a byte takes at 115200 baud.
const PATIENCE: u32 = 100_000;

/// Registers and bits of the 16550 (National Semiconductor PC16550D).
mod uart {
    pub const DATA: u16 = 0;
    pub const INTERRUPT_ENABLE: u16 = 1;
    pub const FIFO_CONTROL: u16 = 2;
    pub const LINE_CONTROL: u16 = 3;
    pub const MODEM_CONTROL: u16 = 4;
    pub const LINE_STATUS: u16 = 5;

    pub const FIFO_ON_AND_CLEAR: u8 = 0x07;
    pub const EIGHT_BITS: u8 = 0x03;
    pub const DIVISOR_ACCESS: u8 = 0x80;
    pub const READY_TO_SEND: u8 = 0x03;
    pub const TRANSMITTER_EMPTY: u8 = 0x20;
    pub const DIVISOR_115200: u8 = 1;
}

static PORT: AtomicU16 = AtomicU16::new(0);
static LINE: Mutex<()> = Mutex::new(());

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
    PORT.store(port, Ordering::Release);
}

struct Serial(u16);

impl Serial {
    fn put(&self, byte: u8) {
        for _ in 0..PATIENCE {
            // SAFETY: reading the status of a UART without DMA.
            if unsafe { in8(self.0 + uart::LINE_STATUS) } & uart::TRANSMITTER_EMPTY != 0 {
                break;
            }
            core::hint::spin_loop();
        }
        // SAFETY: as above; a byte that does not fit is lost.
        unsafe { out8(self.0 + uart::DATA, byte) };
    }
}

impl Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            if byte == b'\n' {
                self.put(b'\r');
            }
            self.put(byte);
        }
        Ok(())
    }
}

/// Writes a line, with the prefix `kernel: `. Used through [`log!`](crate::log!).
pub fn line(arguments: fmt::Arguments) {
    prefixed("kernel: ", arguments);
}

/// Writes a line with a prefix of the caller's.
pub fn prefixed(prefix: &str, arguments: fmt::Arguments) {
    let port = PORT.load(Ordering::Acquire);
    if port != 0 {
        let _whole_line = LINE.lock();
        // Formatting into a port cannot fail.
        let _ = writeln!(Serial(port), "{prefix}{arguments}");
    }
}

/// Writes text that came from a task, as it is, except that control characters other than line
/// feed and tab become dots.
pub fn text(bytes: &[u8]) {
    let port = PORT.load(Ordering::Acquire);
    if port != 0 {
        let _whole_text = LINE.lock();
        let serial = Serial(port);
        for &byte in bytes {
            match byte {
                b'\n' => b"\r\n".iter().for_each(|&byte| serial.put(byte)),
                b'\t' | b' '..=b'~' | 0x80.. => serial.put(byte),
                _ => serial.put(b'.'),
            }
        }
    }
}

/// Takes the port over for a panic: whoever holds it has stopped, or will be stopped.
#[cfg(target_os = "none")]
pub(crate) fn seize() {
    if LINE.is_locked() {
        // SAFETY: the lock guards no data, only the wholeness of lines, which a panic may break.
        unsafe { LINE.force_unlock() };
    }
}

/// Writes a line to the kernel's log.
#[macro_export]
macro_rules! log {
    ($($argument:tt)*) => { $crate::log::line(format_args!($($argument)*)) };
}

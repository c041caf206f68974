//! Kernel log on a 16550 serial port ([`kernel_run::log`]).

use core::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use hw_x86::uart;
use kernel_run::log::{Log, Transmitter};

use crate::io::{in8, out8};

/// A 16550.
pub struct Uart {
    /// I/O base; 0: none.
    base: AtomicU16,
    /// Number of bytes that it accepts when its transmitter is empty.
    depth: AtomicU8,
}

impl Transmitter for Uart {
    fn is_present(&self) -> bool {
        self.base.load(Ordering::Acquire) != 0
    }

    fn is_ready(&self) -> bool {
        let status = self.base.load(Ordering::Relaxed) + uart::LINE_STATUS;
        // SAFETY: reading the status of a UART without DMA.
        unsafe { in8(status) & uart::TRANSMITTER_EMPTY != 0 }
    }

    fn depth(&self) -> usize {
        self.depth.load(Ordering::Relaxed).into()
    }

    fn send(&self, byte: u8) {
        // SAFETY: a UART without DMA.
        unsafe { out8(self.base.load(Ordering::Relaxed) + uart::DATA, byte) };
    }
}

impl Uart {
    /// Selects the port by the command-line option `log=`: `com1` (also the default for unknown
    /// values), `com2` or `none`. Called once, by the first CPU.
    pub fn init(&self, choice: Option<&str>) {
        let port = match choice {
            Some("none") => return,
            Some("com2") => uart::COM2,
            _ => uart::COM1,
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
        // SAFETY: as above; reading this register has no relevant effect while the UART raises no
        // interrupts.
        let identification = unsafe { in8(port + uart::INTERRUPT_IDENTIFICATION) };
        if identification & uart::FIFO_IS_ON == uart::FIFO_IS_ON {
            self.depth.store(uart::FIFO_LENGTH, Ordering::Relaxed);
        }
        self.base.store(port, Ordering::Release);
    }
}

/// The kernel's log.
pub static LOG: Log<Uart> = Log::new(Uart { base: AtomicU16::new(0), depth: AtomicU8::new(1) });

/// Logs a formatted line.
#[macro_export]
macro_rules! log {
    ($($argument:tt)*) => { $crate::log::LOG.line(format_args!($($argument)*)) };
}

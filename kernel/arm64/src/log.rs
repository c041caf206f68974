//! Kernel log on a PL011 ([`kernel_run::log`]).

use core::sync::atomic::{AtomicUsize, Ordering};

use hw_arm64::pl011;
use kernel_run::log::{Log, Transmitter};

use crate::io::DeviceRegisters;

/// A PL011.
pub struct Pl011 {
    /// Virtual address of its registers; 0: none.
    address: AtomicUsize,
}

impl Pl011 {
    /// Uses the registers at this virtual address, from now on.
    ///
    /// # Safety
    /// The registers of a PL011 are mapped there until the next call.
    pub unsafe fn init(&self, address: usize) {
        // SAFETY: by the caller; a UART without DMA.
        let registers = unsafe { DeviceRegisters::new(address) };
        registers.write(pl011::INTERRUPT_MASK, 0);
        registers.write(pl011::CONTROL, pl011::ENABLED);
        self.address.store(address, Ordering::Release);
    }

    /// The log has no port any more.
    pub fn remove(&self) {
        self.address.store(0, Ordering::Release);
    }

    fn registers(&self) -> DeviceRegisters {
        // SAFETY: by `init`; callers have seen that there is a port.
        unsafe { DeviceRegisters::new(self.address.load(Ordering::Relaxed)) }
    }
}

impl Transmitter for Pl011 {
    fn is_present(&self) -> bool {
        self.address.load(Ordering::Acquire) != 0
    }

    fn is_ready(&self) -> bool {
        self.registers().read(pl011::FLAGS) & pl011::TRANSMIT_EMPTY != 0
    }

    fn depth(&self) -> usize {
        pl011::FIFO
    }

    fn send(&self, byte: u8) {
        self.registers().write(pl011::DATA, byte.into());
    }
}

/// The kernel's log.
pub static LOG: Log<Pl011> = Log::new(Pl011 { address: AtomicUsize::new(0) });

/// Logs a formatted line.
#[macro_export]
macro_rules! log {
    ($($argument:tt)*) => { $crate::log::LOG.line(format_args!($($argument)*)) };
}

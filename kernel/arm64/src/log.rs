//! Kernel log on a PL011 or a virtio console ([`kernel_run::log`]).
//!
//! A virtio console sends characters by its emergency write: no queues, no interrupts. Emulated
//! machines have only one UART, which the console server drives.

use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use hw_arm64::pl011;
use hw_tables::virtio_mmio as virtio;
use kernel_run::log::{Log, Transmitter};

use crate::io::DeviceRegisters;

/// LogPort of the log.
pub struct LogPort {
    /// Virtual address of its registers; 0: none.
    address: AtomicUsize,
    /// Physical address of its registers.
    physical: AtomicU64,
    /// It is a virtio console, else a PL011.
    is_virtio: AtomicBool,
}

impl LogPort {
    const NONE: Self = Self {
        address: AtomicUsize::new(0),
        physical: AtomicU64::new(0),
        is_virtio: AtomicBool::new(false),
    };

    /// Uses the PL011 at this physical address, whose registers are at a virtual address.
    ///
    /// # Safety
    /// Its registers are mapped there until the next call.
    pub unsafe fn init_pl011(&self, physical: u64, address: usize) {
        // SAFETY: by the caller; a UART without DMA.
        let registers = unsafe { DeviceRegisters::new(address) };
        registers.write(pl011::INTERRUPT_MASK, 0);
        registers.write(pl011::CONTROL, pl011::ENABLED);
        self.set(physical, address, false);
    }

    /// Uses the virtio device at this physical address, whose registers are at a virtual address;
    /// returns `false` without effect if it is no console with emergency write.
    ///
    /// # Safety
    /// Its registers are mapped there until the next call.
    pub unsafe fn init_virtio(&self, physical: u64, address: usize) -> bool {
        // SAFETY: by the caller; these registers do not make the device access memory.
        let registers = unsafe { DeviceRegisters::new(address) };
        let read = |register: u64| registers.read(register as usize);
        let is_console = read(virtio::MAGIC) == virtio::MAGIC_VALUE
            && read(virtio::DEVICE_ID) == virtio::CONSOLE
            && read(virtio::DEVICE_FEATURES) & virtio::CONSOLE_EMERGENCY_WRITE != 0;
        if is_console {
            self.set(physical, address, true);
        }
        is_console
    }

    fn set(&self, physical: u64, address: usize, is_virtio: bool) {
        self.is_virtio.store(is_virtio, Ordering::Relaxed);
        self.physical.store(physical, Ordering::Relaxed);
        self.address.store(address, Ordering::Release);
    }

    /// Physical address of the port, if there is one.
    pub fn physical(&self) -> Option<u64> {
        self.is_present().then(|| self.physical.load(Ordering::Relaxed))
    }

    /// Uses the port's registers at another virtual address.
    ///
    /// # Safety
    /// They are mapped there, for ever.
    pub unsafe fn relocate(&self, address: usize) {
        self.address.store(address, Ordering::Release);
    }

    /// The log has no port any more.
    pub fn remove(&self) {
        self.address.store(0, Ordering::Release);
    }

    fn registers(&self) -> DeviceRegisters {
        // SAFETY: by the functions above; callers have seen that there is a port.
        unsafe { DeviceRegisters::new(self.address.load(Ordering::Relaxed)) }
    }

    fn is_virtio(&self) -> bool {
        self.is_virtio.load(Ordering::Relaxed)
    }
}

impl Transmitter for LogPort {
    fn is_present(&self) -> bool {
        self.address.load(Ordering::Acquire) != 0
    }

    fn is_ready(&self) -> bool {
        self.is_virtio() || self.registers().read(pl011::FLAGS) & pl011::TRANSMIT_EMPTY != 0
    }

    fn depth(&self) -> usize {
        pl011::FIFO
    }

    fn send(&self, byte: u8) {
        let register = match self.is_virtio() {
            true => virtio::EMERGENCY_WRITE as usize,
            false => pl011::DATA,
        };
        self.registers().write(register, byte.into());
    }
}

/// The kernel's log.
pub static LOG: Log<LogPort> = Log::new(LogPort::NONE);

/// Logs a formatted line.
#[macro_export]
macro_rules! log {
    ($($argument:tt)*) => { $crate::log::LOG.line(format_args!($($argument)*)) };
}

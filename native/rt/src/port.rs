//! I/O ports of devices without DMA.

use core::arch::asm;

/// First and last port of devices that cannot be programmed to access memory.
const HARMLESS: &[(u16, u16)] = &[
    // Real-time clock and its NVRAM.
    (0x70, 0x71),
    // QEMU's isa-debug-exit.
    (0xf4, 0xf4),
    // Serial ports.
    (0x2e8, 0x2ef),
    (0x2f8, 0x2ff),
    (0x3e8, 0x3ef),
    (0x3f8, 0x3ff),
];

/// A range of I/O ports. An access to a port that this task does not own stops the thread.
#[derive(Clone, Copy, Debug)]
pub struct Ports {
    base: u16,
    count: u16,
}

impl Ports {
    /// Creates a handle for the ports `base..base + count` if they belong to a device without DMA.
    pub fn new(base: u16, count: u16) -> Option<Self> {
        let last = base.checked_add(count.checked_sub(1)?)?;
        HARMLESS
            .iter()
            .any(|&(first, end)| base >= first && last <= end)
            .then_some(Self { base, count })
    }

    fn port(self, offset: u16) -> Option<u16> {
        (offset < self.count).then_some(self.base + offset)
    }

    /// Reads a byte; returns all ones beyond the range.
    #[inline]
    pub fn read(self, offset: u16) -> u8 {
        let Some(port) = self.port(offset) else { return 0xff };
        let value;
        // SAFETY: reading a port of these devices has no effect on memory.
        unsafe {
            asm!("in al, dx", in("dx") port, out("al") value, options(nomem, nostack, preserves_flags));
        }
        value
    }

    /// Writes a byte; ignores a write beyond the range.
    #[inline]
    pub fn write(self, offset: u16, value: u8) {
        let Some(port) = self.port(offset) else { return };
        // SAFETY: writing a port of these devices has no effect on memory.
        unsafe {
            asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack, preserves_flags));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_harmless_ports() {
        assert!(Ports::new(0x3f8, 8).is_some());
        assert!(Ports::new(0x3f8, 9).is_none());
        assert!(Ports::new(0xcf8, 8).is_none());
        assert!(Ports::new(0xf4, 0).is_none());
        assert!(Ports::new(0xffff, 2).is_none());
    }
}

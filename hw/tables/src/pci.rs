//! PCI configuration space (PCI Local Bus 3.0, chapter 6; PCI Express Base 3.0, chapter 7): where the registers are, and
//! readers of capabilities and base addresses. Reading goes through a function that gives the aligned 32-bit word at an
//! offset, so that the same code reads hardware and tests.

/// Offsets of registers.
pub mod register {
    /// Vendor, 16 bits; all ones where there is no function.
    pub const VENDOR: u16 = 0x00;
    /// Device, 16 bits.
    pub const DEVICE: u16 = 0x02;
    /// [`super::command`], 16 bits.
    pub const COMMAND: u16 = 0x04;
    /// Status, 16 bits; bit 4: there are capabilities.
    pub const STATUS: u16 = 0x06;
    /// Revision, programming interface, subclass, class: 8 bits each.
    pub const CLASS: u16 = 0x08;
    /// Header type, 8 bits: bits 6:0 layout, bit 7 more than one function.
    pub const HEADER_TYPE: u16 = 0x0e;
    /// First base address register, 32 bits; the others follow.
    pub const BASE_ADDRESS: u16 = 0x10;
    /// Layout 1: the bus behind the bridge, 8 bits.
    pub const SECONDARY_BUS: u16 = 0x19;
    /// First capability, 8 bits.
    pub const CAPABILITIES: u16 = 0x34;
}

/// Bits of the command register (section 6.2.2).
pub mod command {
    /// Answers at its I/O addresses.
    pub const IO: u16 = 1 << 0;
    /// Answers at its memory addresses.
    pub const MEMORY: u16 = 1 << 1;
    /// May access memory itself, which includes sending interrupt messages.
    pub const BUS_MASTER: u16 = 1 << 2;
    /// Its interrupt line stays silent.
    pub const NO_LINE: u16 = 1 << 10;
}

/// Capability ids (section 6.7, appendix H).
pub mod capability {
    /// Interrupts by messages.
    pub const MSI: u8 = 0x05;
    /// Of the vendor; virtio uses it.
    pub const VENDOR: u8 = 0x09;
    /// Interrupts by messages, with a table.
    pub const MSI_X: u8 = 0x11;
}

/// Message control of MSI, 16 bits at offset 2 of the capability (section 6.8.1).
pub mod msi {
    /// Messages are sent.
    pub const ENABLE: u16 = 1 << 0;
    /// Number of messages, as a power of two.
    pub const COUNT: u16 = 7 << 4;
    /// The address has 64 bits; the data then is at offset 12, else at 8.
    pub const LONG: u16 = 1 << 7;
    /// Address, low half.
    pub const ADDRESS: u16 = 4;
}

/// MSI-X (section 6.8.2).
pub mod msi_x {
    /// Message control, 16 bits at offset 2: number of entries, less one.
    pub const SIZE: u16 = 0x7ff;
    /// All entries are masked.
    pub const MASK: u16 = 1 << 14;
    /// Messages are sent.
    pub const ENABLE: u16 = 1 << 15;
    /// Where the table is, 32 bits: bits 2:0 number of the base address register, the others its offset.
    pub const TABLE: u16 = 4;
    /// Bytes of an entry of the table: address (64 bits), data (32), control (32; bit 0 masked).
    pub const ENTRY: u64 = 16;
}

/// Functions of a device, devices of a bus.
pub const FUNCTIONS: u8 = 8;
/// Devices of a bus.
pub const DEVICES: u8 = 32;
/// Base address registers of a function of layout 0.
pub const BARS: u8 = 6;
/// Bytes of configuration space of a function (PCI Express, section 7.2.2).
pub const SPACE: u64 = 4096;
/// First and last offset at which a capability can be.
const CAPABILITY_RANGE: core::ops::RangeInclusive<u8> = 0x40..=0xfc;
/// More capabilities do not fit the space that they share.
const MAX_CAPABILITIES: usize = 48;

/// Offsets and ids of the capabilities. A list that runs in circles ends.
pub fn capabilities(read: impl Fn(u16) -> u32) -> impl Iterator<Item = (u16, u8)> {
    let present = read(register::COMMAND) >> 16 & 1 << 4 != 0;
    let mut next = if present { read(register::CAPABILITIES) as u8 } else { 0 };
    core::iter::from_fn(move || {
        let at = next & !3;
        let word = CAPABILITY_RANGE.contains(&at).then(|| read(at.into()))?;
        next = (word >> 8) as u8;
        Some((at.into(), word as u8))
    })
    .take(MAX_CAPABILITIES)
}

/// A base address register of memory, as it is or with all ones written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryBar {
    /// Its address bits.
    pub base: u64,
    /// It takes two registers.
    pub is_long: bool,
}

impl MemoryBar {
    /// Reads a register and the one after it; `None` for I/O ports.
    pub const fn parse(low: u32, high: u32) -> Option<Self> {
        if low & 1 != 0 {
            return None;
        }
        let is_long = low >> 1 & 3 == 2;
        let upper = if is_long { (high as u64) << 32 } else { 0 };
        Some(Self { base: (low & !0xf) as u64 | upper, is_long })
    }

    /// The length in bytes, if these are the bits that remain of all ones; 0 for no register.
    pub const fn length(self) -> u64 {
        let mask = if self.is_long { self.base } else { self.base | !0xffff_ffff };
        if self.base == 0 { 0 } else { mask.wrapping_neg() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_end() {
        let space = |links: &[(u16, u8, u8)]| {
            let mut words = [0u32; 64];
            words[1] = 1 << 20;
            words[0x34 / 4] = links[0].0.into();
            for &(at, id, next) in links {
                words[usize::from(at) / 4] = u32::from(id) | u32::from(next) << 8;
            }
            words
        };
        let list =
            |words: [u32; 64]| capabilities(|at| words[usize::from(at) / 4]).collect::<Vec<_>>();
        assert_eq!(list([0; 64]), []);
        assert_eq!(list(space(&[(0x40, 9, 0x50), (0x50, 0x11, 0)])), [(0x40, 9), (0x50, 0x11)]);
        assert_eq!(list(space(&[(0x40, 9, 0x40)])).len(), MAX_CAPABILITIES, "a circle");
        assert_eq!(list(space(&[(0x40, 9, 0x10)])).len(), 1, "into the header");
        assert_eq!(list([u32::MAX; 64]).len(), MAX_CAPABILITIES);
    }

    #[test]
    fn base_addresses() {
        assert_eq!(MemoryBar::parse(0xc001, 0), None);
        let long = MemoryBar { base: 0x8_fe00_0000, is_long: true };
        assert_eq!(MemoryBar::parse(0xfe00_000c, 8), Some(long));
        assert_eq!(MemoryBar::parse(0xffff_f000, 7).unwrap().length(), 0x1000);
        assert_eq!(MemoryBar::parse(0xffff_c00c, u32::MAX).unwrap().length(), 0x4000);
        assert_eq!(MemoryBar::parse(0x0000_000c, 0xffff_ffff).unwrap().length(), 1 << 32);
        assert_eq!(MemoryBar::parse(0, 0).unwrap().length(), 0);
    }
}

//! PCI configuration space (PCI Local Bus 3.0, chapter 6; PCI Express Base 3.0, chapter 7):
//! register layout, and parsers of capabilities and base address registers. The parsers take a
//! function that returns the aligned 32-bit word at an offset, and so work on hardware and in
//! tests.

/// Offsets of registers.
pub mod register {
    /// Vendor, 16 bits; all ones if there is no function.
    pub const VENDOR: u16 = 0x00;
    /// Device, 16 bits.
    pub const DEVICE: u16 = 0x02;
    /// [`super::command`], 16 bits.
    pub const COMMAND: u16 = 0x04;
    /// Status, 16 bits; bit 4: the function has capabilities.
    pub const STATUS: u16 = 0x06;
    /// Revision, programming interface, subclass, class: 8 bits each.
    pub const CLASS: u16 = 0x08;
    /// Header type, 8 bits: bits 6:0 layout, bit 7 multi-function device.
    pub const HEADER_TYPE: u16 = 0x0e;
    /// First base address register, 32 bits; the others follow.
    pub const BASE_ADDRESS: u16 = 0x10;
    /// Layout 1: secondary bus of the bridge, 8 bits.
    pub const SECONDARY_BUS: u16 = 0x19;
    /// First capability, 8 bits.
    pub const CAPABILITIES: u16 = 0x34;
    /// Pin of the interrupt by line, 8 bits: 1 to 4 for INTA to INTD; 0: none.
    pub const INTERRUPT_PIN: u16 = 0x3d;
}

/// Bits of the command register (section 6.2.2).
pub mod command {
    /// I/O space enable.
    pub const IO: u16 = 1 << 0;
    /// Memory space enable.
    pub const MEMORY: u16 = 1 << 1;
    /// Bus master enable: memory accesses by the device, including MSIs.
    pub const BUS_MASTER: u16 = 1 << 2;
    /// Interrupt disable (INTx).
    pub const NO_LINE: u16 = 1 << 10;
}

/// Capability ids (section 6.7, appendix H).
pub mod capability {
    /// PCI Express.
    pub const EXPRESS: u8 = 0x10;
    /// MSI.
    pub const MSI: u8 = 0x05;
    /// Vendor-specific; used by virtio.
    pub const VENDOR: u8 = 0x09;
    /// MSI-X.
    pub const MSI_X: u8 = 0x11;
}

/// Message control of MSI, 16 bits at offset 2 of the capability (section 6.8.1).
pub mod msi {
    /// MSI enable.
    pub const ENABLE: u16 = 1 << 0;
    /// Number of messages enabled, as `log2`.
    pub const COUNT: u16 = 7 << 4;
    /// 64-bit address: the data is at offset 12, else at 8.
    pub const LONG: u16 = 1 << 7;
    /// Offset of the low half of the address.
    pub const ADDRESS: u16 = 4;
}

/// MSI-X (section 6.8.2).
pub mod msi_x {
    /// Message control, 16 bits at offset 2: number of entries minus one.
    pub const SIZE: u16 = 0x7ff;
    /// Function mask: all entries are masked.
    pub const MASK: u16 = 1 << 14;
    /// MSI-X enable.
    pub const ENABLE: u16 = 1 << 15;
    /// Location of the table, 32 bits: bits 2:0 index of the base address register, the rest the
    /// offset.
    pub const TABLE: u16 = 4;
    /// Length in bytes of a table entry: address (64 bits), data (32), control (32; bit 0 masked).
    pub const ENTRY: u64 = 16;
}

/// PCI Express capability (PCI Express Base 3.0, section 7.8): offsets in it.
pub mod express {
    /// Device capabilities, 32 bits.
    pub const DEVICE_CAPABILITIES: u16 = 4;
    /// Device capabilities: the function can be reset by itself (section 6.6.2).
    pub const CAN_RESET: u32 = 1 << 28;
    /// Device control, 16 bits.
    pub const DEVICE_CONTROL: u16 = 8;
    /// Device control: resets the function; reads as 0.
    pub const RESET: u16 = 1 << 15;
    /// Device status, 16 bits.
    pub const DEVICE_STATUS: u16 = 10;
    /// Device status: the function has requests without an answer yet.
    pub const PENDING: u16 = 1 << 5;
    /// Time in ns that a function has for its reset, and before it for its pending requests.
    pub const RESET_TIME: u64 = 100_000_000;
}

/// Vendor-specific capability of a virtio device: the place of a structure (virtio 1.2, section
/// 4.1.4). Offsets in it.
pub mod virtio {
    /// Kind of the structure, 8 bits.
    pub const KIND: u16 = 3;
    /// Index of the base address register, 8 bits.
    pub const BAR: u16 = 4;
    /// Offset of the structure in the registers, 32 bits.
    pub const OFFSET: u16 = 8;
    /// Kind: common configuration.
    pub const COMMON: u8 = 1;
    /// Offset of the device status, 8 bits, in the common configuration. Writing 0 resets the
    /// device, which then reads as 0.
    pub const STATUS: u64 = 20;
}

/// Functions per device.
pub const FUNCTIONS: u8 = 8;
/// Devices per bus.
pub const DEVICES: u8 = 32;
/// Base address registers of a function with layout 0.
pub const BARS: u8 = 6;
/// Length in bytes of a function's configuration space (PCI Express, section 7.2.2).
pub const SPACE: u64 = 4096;
/// Valid offsets of capabilities.
const CAPABILITY_RANGE: core::ops::RangeInclusive<u8> = 0x40..=0xfc;
/// Maximum number of capabilities that fit their part of configuration space.
const MAX_CAPABILITIES: usize = 48;

/// Offsets and ids of the capabilities. A cyclic list is cut off.
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

/// Returns the location of the MSI-X table: index of the base address register, offset, length in
/// bytes. `None`: the function has no MSI-X.
pub fn msi_x_table(read: impl Fn(u16) -> u32) -> Option<(u8, u64, u64)> {
    let (at, _) = capabilities(&read).find(|&(_, id)| id == capability::MSI_X)?;
    let entries = u64::from((read(at) >> 16) as u16 & msi_x::SIZE) + 1;
    let place = read(at + msi_x::TABLE);
    Some(((place & 7) as u8, u64::from(place & !7), entries * msi_x::ENTRY))
}

/// Returns the parts of the registers of a base address register that a driver may have: offset and
/// length in bytes, those below and those above the pages with the MSI-X table, if that is in them.
/// `length` is that of the registers, in whole pages of `page` bytes.
pub fn parts_without_table(
    table: Option<(u64, u64)>,
    length: u64,
    page: u64,
) -> impl Iterator<Item = (u64, u64)> {
    let (offset, of_table) = table.unwrap_or((length, 0));
    let first = (offset & !(page - 1)).min(length);
    let end = offset.saturating_add(of_table).checked_next_multiple_of(page);
    let end = end.unwrap_or(length).min(length);
    [(0, first), (end, length - end)].into_iter().filter(|&(_, length)| length != 0)
}

/// A memory base address register, in normal operation or after writing all ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryBar {
    /// Address bits.
    pub base: u64,
    /// 64-bit: uses two registers.
    pub is_long: bool,
}

impl MemoryBar {
    /// Parses a register and its successor; `None` for I/O ports.
    pub const fn parse(low: u32, high: u32) -> Option<Self> {
        if low & 1 != 0 {
            return None;
        }
        let is_long = low >> 1 & 3 == 2;
        let upper = if is_long { (high as u64) << 32 } else { 0 };
        Some(Self { base: (low & !0xf) as u64 | upper, is_long })
    }

    /// Length in bytes, from the register value after writing all ones; 0 if there is no register.
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
    fn registers_without_the_interrupt_table() {
        let parts = |table, length| parts_without_table(table, length, 4096).collect::<Vec<_>>();
        assert_eq!(parts(None, 0x4000), [(0, 0x4000)]);
        assert_eq!(parts(Some((0, 0x40)), 0x1000), []);
        assert_eq!(parts(Some((0x1800, 0x40)), 0x4000), [(0, 0x1000), (0x2000, 0x2000)]);
        assert_eq!(parts(Some((0x1ff0, 0x20)), 0x4000), [(0, 0x1000), (0x3000, 0x1000)]);
        assert_eq!(parts(Some((0x3000, 0x8000)), 0x4000), [(0, 0x3000)]);
        assert_eq!(parts(Some((0x8000, 0x40)), 0x4000), [(0, 0x4000)], "beyond");
        let mut words = [0u32; 64];
        words[1] = 1 << 20;
        words[0x34 / 4] = 0x40;
        (words[0x10], words[0x11]) = (3 << 16 | 0x11, 0x2004);
        let read = |at: u16| words[usize::from(at) / 4];
        assert_eq!(msi_x_table(read), Some((4, 0x2000, 64)));
        assert_eq!(msi_x_table(|_| 0), None);
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

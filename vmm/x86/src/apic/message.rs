//! Interrupt messages between I/O APIC, PCI functions and local APICs.
//!
//! Documentation: AMD APM vol. 2, sections 16.6 and 16.7; Intel SDM vol. 3A, section 11.11.

use vmm_bus::Msi;

/// Bits of a message-signalled interrupt to local APICs.
pub mod spec {
    /// First address of the range of local APICs, of 1 MiB.
    pub const APICS: u64 = 0xfee0_0000;
    /// Address bits that select the range.
    pub const RANGE: u64 = !0xf_ffff;
    /// Position of the destination in the address; eight bits.
    pub const DESTINATION_SHIFT: u32 = 12;
    /// Address: logical destination.
    pub const LOGICAL: u64 = 1 << 2;
    /// Data: position of the delivery mode; three bits. The vector is below it.
    pub const DELIVERY_SHIFT: u32 = 8;
    /// Data: level-triggered.
    pub const LEVEL: u32 = 1 << 15;
}
use spec::*;

/// An interrupt message as a local APIC receives it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InterruptMessage {
    /// Destination APIC id or logical mask. The physical broadcast has all 32 bits.
    pub destination: u32,
    /// Logical (else physical) destination mode.
    pub logical: bool,
    /// Delivery mode: 0 fixed, 1 lowest priority, 2 SMI, 4 NMI, 5 INIT, 6 start-up, 7 ExtINT.
    pub delivery: u8,
    /// Vector.
    pub vector: u8,
    /// Level (else edge) triggered.
    pub level: bool,
}

impl InterruptMessage {
    /// Decodes a message-signalled interrupt; `None` if its address is not in the range of local
    /// APICs.
    #[inline]
    pub const fn decode(msi: Msi) -> Option<Self> {
        let Msi { address, data } = msi;
        if address & RANGE != APICS {
            return None;
        }
        let logical = address & LOGICAL != 0;
        Some(Self {
            destination: widen((address >> DESTINATION_SHIFT) as u8, logical),
            logical,
            delivery: (data >> DELIVERY_SHIFT & 7) as u8,
            vector: data as u8,
            level: data & LEVEL != 0,
        })
    }
}

/// Widens an eight-bit destination: the physical broadcast has all 32 bits.
pub(super) const fn widen(destination: u8, logical: bool) -> u32 {
    if destination == 0xff && !logical { u32::MAX } else { destination as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(address: u64, data: u32) -> Option<InterruptMessage> {
        InterruptMessage::decode(Msi { address, data })
    }

    #[test]
    fn message_signalled_interrupts() {
        let logical = InterruptMessage {
            destination: 0xff,
            logical: true,
            delivery: 7,
            vector: 0x51,
            level: true,
        };
        assert_eq!(decode(0xfeef_f004, 0x8751), Some(logical));
        let physical = InterruptMessage {
            destination: 3,
            logical: false,
            delivery: 0,
            vector: 0x40,
            level: false,
        };
        assert_eq!(decode(0xfee0_3000, 0x40), Some(physical));
        let broadcast = InterruptMessage { destination: u32::MAX, ..physical };
        assert_eq!(decode(0xfeef_f000, 0x40), Some(broadcast));
        for outside in [0xfed0_0000, 0xfef0_0000, 0x1_fee0_0000, 0] {
            assert_eq!(decode(outside, 0x40), None, "{outside:#x}");
        }
    }
}

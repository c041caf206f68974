//! Generic Interrupt Controller, version 3: Arm IHI 0069. Version 2: [`v2`]; interrupt messages for
//! both: [`v2m`].

pub mod v2;
pub mod v2m;

use crate::esr::system_register;

/// Name in a device tree.
pub const COMPATIBLE: &str = "arm,gic-v3";
/// Property of its node: number of its regions of redistributors; 1 without it.
pub const REDISTRIBUTOR_REGIONS: &str = "#redistributor-regions";
/// Version of an interrupt controller.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Version {
    /// Version 2.
    V2,
    /// Version 3, or 4.
    #[default]
    V3,
}

/// First interrupt shared by all CPUs (SPI); private ones (PPI) begin at 16, SGIs at 0.
pub const FIRST_SHARED: u32 = 32;
/// First interrupt private to a CPU.
pub const FIRST_PRIVATE: u32 = 16;
/// End of the interrupts that the distributor has.
pub const END_SHARED: u32 = 1020;
/// First number that the CPU interface reports for "none".
pub const FIRST_SPECIAL: u64 = 1020;

/// Registers of the distributor: byte offsets.
pub mod distributor {
    /// Length of its registers in bytes.
    pub const LENGTH: u64 = 0x1_0000;
    /// Control.
    pub const CTLR: usize = 0x0000;
    /// Type: bits 4 to 0 have the number of interrupts, in units of 32, less one.
    pub const TYPER: usize = 0x0004;
    /// Group: a bit each.
    pub const IGROUPR: usize = 0x0080;
    /// Enables: a bit each.
    pub const ISENABLER: usize = 0x0100;
    /// Disables: a bit each.
    pub const ICENABLER: usize = 0x0180;
    /// Makes pending: a bit each.
    pub const ISPENDR: usize = 0x0200;
    /// Makes no longer pending: a bit each.
    pub const ICPENDR: usize = 0x0280;
    /// Makes active: a bit each.
    pub const ISACTIVER: usize = 0x0300;
    /// Deactivates: a bit each.
    pub const ICACTIVER: usize = 0x0380;
    /// Priority: a byte each.
    pub const IPRIORITYR: usize = 0x0400;
    /// Edge or level: two bits each.
    pub const ICFGR: usize = 0x0c00;
    /// Target: 8 bytes each.
    pub const IROUTER: usize = 0x6000;

    /// More about the type.
    pub const IIDR: usize = 0x0008;
    /// Identification: bits 7 to 4 have the version of the architecture.
    pub const PIDR2: usize = 0xffe8;
    /// Value of [`PIDR2`] for version 3.
    pub const VERSION_3: u32 = 0x3b;
    /// Bit of [`CTLR`]: interrupts of group 1, with one security state.
    pub const ENABLE_GROUP_1: u32 = 1 << 1;
    /// Bits of [`CTLR`] that are 1: affinity routing, one security state.
    pub const ONE_STATE: u32 = 1 << 4 | 1 << 6;
    /// Bit of a route: to any CPU.
    pub const ANY: u64 = 1 << 31;

    /// Bits of [`CTLR`]: both groups, affinity routing. With two security states bit 0 is group 1
    /// and bit 1 the same with affinity routing (12.9.4).
    pub const ENABLED: u32 = 1 << 0 | 1 << 1 | 1 << 4;
    /// Bit of [`CTLR`]: a write is pending.
    pub const PENDING: u32 = 1 << 31;
}

/// Registers of a CPU's redistributor: byte offsets.
pub mod redistributor {
    /// Length of the frames of a CPU in bytes: version 3, and with the virtual frames of version 4.
    pub const LENGTH: u64 = 0x2_0000;
    /// See [`LENGTH`].
    pub const LENGTH_V4: u64 = 0x4_0000;
    /// Type, 64 bits: affinity in the upper half.
    pub const TYPER: usize = 0x0008;
    /// Bit of [`TYPER`]: the last one in this region.
    pub const LAST: u64 = 1 << 4;
    /// Bit of [`TYPER`]: frames of version 4.
    pub const VIRTUAL: u64 = 1 << 1;
    /// Power.
    pub const WAKER: usize = 0x0014;
    /// Bit of [`WAKER`]: the CPU sleeps.
    pub const SLEEP: u32 = 1 << 1;
    /// Bit of [`WAKER`]: the interface to the CPU is off.
    pub const CHILDREN_ASLEEP: u32 = 1 << 2;
    /// Offset of the second frame, which has the registers of the distributor for the private
    /// interrupts.
    pub const PRIVATE: usize = 0x1_0000;
}

/// Indices of the set bits, ascending. Most words have none.
#[inline]
pub fn bits(mut of: u32) -> impl Iterator<Item = u32> + Clone {
    core::iter::from_fn(move || {
        let index = (of != 0).then(|| of.trailing_zeros());
        of &= of.wrapping_sub(1);
        index
    })
}

/// ICC_SGI1R_EL1: sends an interrupt of group 1 to other CPUs.
pub const SGI1R: u32 = system_register(3, 0, 12, 11, 5);

/// Interrupts of a write to ICC_SGI1R_EL1: the reverse of [`software_interrupt`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SoftwareInterrupt {
    /// Number of the interrupt, below 16.
    pub number: u32,
    /// All CPUs but the sender; otherwise those of `list`.
    pub to_others: bool,
    /// Affinity of the first of 16 CPUs.
    pub first: u64,
    /// A bit for each of these CPUs.
    pub list: u16,
}

impl SoftwareInterrupt {
    /// Decodes a value of the register.
    pub const fn decode(value: u64) -> Self {
        let [aff1, aff2, aff3] = [value >> 16 & 0xff, value >> 32 & 0xff, value >> 48 & 0xff];
        Self {
            number: (value >> 24 & 15) as u32,
            to_others: value & 1 << 40 != 0,
            first: aff3 << 32 | aff2 << 16 | aff1 << 8 | (value >> 44 & 15) << 4,
            list: value as u16,
        }
    }

    /// Returns whether the CPU with this affinity gets the interrupt.
    pub const fn is_for(self, affinity: u64, is_sender: bool) -> bool {
        let index = affinity.wrapping_sub(self.first);
        if self.to_others { !is_sender } else { index < 16 && self.list & 1 << index != 0 }
    }

    /// Returns whether the CPU with this affinity, which sends it, is the only one to get it.
    pub const fn is_for_sender_only(self, affinity: u64) -> bool {
        // `first` is a multiple of 16. The list comes first: in it most others differ.
        self.list == 1 << (affinity & 15) && self.first == affinity & !15 && !self.to_others
    }
}

/// Virtual interface, for guests: registers ICH_*_EL2 (9.4).
pub mod virtual_interface {
    /// ICH_HCR_EL2: virtual interrupts are delivered.
    pub const ENABLED: u64 = 1 << 0;
    /// ICH_HCR_EL2: maintenance interrupt when at most one list register is in use.
    pub const UNDERFLOW: u64 = 1 << 1;
    /// ICH_HCR_EL2: guests' accesses to the CPU interface trap (TC, TALL0, TALL1), and no virtual
    /// interrupts are delivered.
    pub const TRAP_ALL: u64 = 1 << 10 | 1 << 11 | 1 << 12;
    /// ICH_LR: pending.
    pub const PENDING: u64 = 1 << 62;
    /// ICH_LR: active.
    pub const ACTIVE: u64 = 1 << 63;
    /// ICH_LR: in group 1.
    pub const GROUP_1: u64 = 1 << 60;
    /// ICH_LR: lowest bit of the priority.
    pub const PRIORITY_SHIFT: u32 = 48;
    /// ICH_LR: linked to an interrupt of the host, which the guest's EOI deactivates.
    pub const LINKED: u64 = 1 << 61;
    /// ICH_LR: lowest bit of the number of that interrupt.
    pub const LINK_SHIFT: u32 = 32;
    /// ICH_LR without [`LINKED`]: maintenance interrupt when the guest has ended the interrupt.
    pub const REPORT_END: u64 = 1 << 41;
    /// ICH_LR: number of the interrupt.
    pub const NUMBER: u64 = 0xffff_ffff;

    /// Number of list registers, by ICH_VTR_EL2.
    pub const fn lists(kind: u64) -> usize {
        (kind & 31) as usize + 1
    }

    /// Returns whether the registers of active priorities are one for each group: five bits of
    /// preemption.
    pub const fn has_32_priorities(kind: u64) -> bool {
        kind >> 26 & 7 == 4
    }
}
/// Priority of all interrupts.
pub const PRIORITY: u8 = 0xa0;
/// ICC_CTLR_EL1: the end of an interrupt only lowers the priority; ICC_DIR_EL1 deactivates it.
pub const SEPARATE_DEACTIVATION: u64 = 1 << 1;
/// Priority mask of the CPU interface: all.
pub const ALL_PRIORITIES: u64 = 0xff;
/// Bits of ICC_SRE_EL2: system registers, no bypass, lower levels may use them.
pub const SYSTEM_REGISTERS: u64 = 0b1111;

/// Value of ICC_SGI1R_EL1 that sends interrupt `number` to the CPU with this affinity.
pub const fn software_interrupt(affinity: u64, number: u64) -> u64 {
    let [aff0, aff1, aff2] = [affinity & 0xff, affinity >> 8 & 0xff, affinity >> 16 & 0xff];
    let aff3 = affinity >> 32 & 0xff;
    // The target list has 16 CPUs of a range that RS selects.
    aff3 << 48 | (aff0 >> 4) << 44 | aff2 << 32 | number << 24 | aff1 << 16 | 1 << (aff0 & 0xf)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_virtual_interfaces() {
        // That of QEMU's Cortex-A76.
        let kind = 0x9028_0003;
        assert_eq!(virtual_interface::lists(kind), 4);
        assert!(virtual_interface::has_32_priorities(kind));
        assert!(!virtual_interface::has_32_priorities(kind | 7 << 26));
    }

    #[test]
    fn software_interrupts() {
        assert_eq!(software_interrupt(0, 0), 1);
        assert_eq!(software_interrupt(0x12_0000_0103, 5), 0x0012_0000_0501_0008);
        assert_eq!(software_interrupt(0x2_0011, 0), 0x0000_1002_0000_0002);
        for (affinity, number) in [(0, 0), (0x12_0000_0103, 5), (0x2_0011, 0)] {
            let one = SoftwareInterrupt::decode(software_interrupt(affinity, number));
            assert_eq!(u64::from(one.number), number);
            assert!(one.is_for(affinity, true) && !one.is_for(affinity + 1, false));
        }
        let others = SoftwareInterrupt::decode(1 << 40 | 3 << 24);
        assert!(others.is_for(1, false) && !others.is_for(1, true));
        assert!(!others.is_for_sender_only(0));
        let value = software_interrupt(0x2_0011, 0);
        assert!(SoftwareInterrupt::decode(value).is_for_sender_only(0x2_0011));
        assert!(!SoftwareInterrupt::decode(value).is_for_sender_only(0x11));
        assert!(!SoftwareInterrupt::decode(value | 1).is_for_sender_only(0x2_0011));
    }
}

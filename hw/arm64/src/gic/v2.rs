//! Generic Interrupt Controller, version 2: Arm IHI 0048B. Registers that version 3 has, too, are
//! those of [`super::distributor`].

use super::virtual_interface as ich;

/// Names in a device tree.
pub const COMPATIBLE: [&str; 2] = ["arm,cortex-a15-gic", "arm,gic-400"];
/// Most CPUs.
pub const MAX_CPUS: usize = 8;
/// Mask of an interrupt's number (INTID) where the source CPU of an SGI is above it.
pub const NUMBER: u32 = 0x3ff;
/// Lowest bit of that source.
pub const SOURCE_SHIFT: u32 = 10;
/// Mask of an interrupt's number with a source.
pub const NUMBER_AND_SOURCE: u32 = 0x1fff;

/// Registers of the distributor: byte offsets. Those of private interrupts are banked by CPU.
pub mod distributor {
    /// Length of its registers in bytes.
    pub const LENGTH: u64 = 0x1000;
    /// Targets: a byte each, with a bit for each CPU.
    pub const ITARGETSR: usize = 0x800;
    /// Sends an SGI.
    pub const SGIR: usize = 0xf00;
    /// Makes SGIs no longer pending: a byte each, with a bit for each source.
    pub const CPENDSGIR: usize = 0xf10;
    /// Makes SGIs pending, likewise.
    pub const SPENDSGIR: usize = 0xf20;
    /// Identification.
    pub const PIDR2: usize = 0xfe8;
    /// Value of [`PIDR2`] for version 2.
    pub const VERSION_2: u32 = 0x2b;
    /// Bit of CTLR: interrupts are forwarded to CPUs.
    pub const ENABLED: u32 = 1 << 0;
    /// Lowest bit in TYPER of the number of CPUs less one.
    pub const CPUS_SHIFT: u32 = 5;
}

/// Registers of the interface to the executing CPU: byte offsets.
pub mod cpu_interface {
    /// Length of its registers in bytes.
    pub const LENGTH: u64 = 0x2000;
    /// Control.
    pub const CTLR: usize = 0x00;
    /// Priority mask.
    pub const PMR: usize = 0x04;
    /// Acknowledges an interrupt.
    pub const IAR: usize = 0x0c;
    /// Ends an interrupt.
    pub const EOIR: usize = 0x10;
    /// Deactivates an interrupt.
    pub const DIR: usize = 0x1000;
    /// Bits of [`CTLR`]: interrupts reach the CPU; [`EOIR`] lowers the priority only (bit 9 is
    /// `EOImode`, or `EOImodeNS` for software that is not secure).
    pub const ENABLED: u32 = 1 << 0 | 1 << 9;
}

/// Registers of the executing CPU's virtual interface (GICH): byte offsets (5.3). Its control
/// register has the bits of ICH_HCR_EL2.
pub mod hypervisor_interface {
    /// Least length of its registers in bytes.
    pub const LENGTH: u64 = 0x200;
    /// Control.
    pub const HCR: usize = 0x00;
    /// Type.
    pub const VTR: usize = 0x04;
    /// The guest's settings.
    pub const VMCR: usize = 0x08;
    /// List registers whose interrupt the guest has ended, to be reported: a bit each.
    pub const EISR: usize = 0x20;
    /// List registers without an interrupt: a bit each.
    pub const ELRSR: usize = 0x30;
    /// Active priorities.
    pub const APR: usize = 0xf0;
    /// List registers, 32 bits each.
    pub const LR: usize = 0x100;

    /// Number of list registers, by [`VTR`].
    pub const fn lists(kind: u32) -> usize {
        (kind & 63) as usize + 1
    }
}

/// Bits of a list register (5.3.8).
mod list {
    pub const LINK_SHIFT: u32 = 10;
    pub const REPORT_END: u32 = 1 << 19;
    pub const PRIORITY_SHIFT: u32 = 23;
    pub const STATE_SHIFT: u32 = 28;
    pub const LINKED: u32 = 1 << 31;
}

/// Lowest bit of the state in [`ich`]'s list registers.
const STATE_SHIFT: u32 = ich::PENDING.trailing_zeros();

/// List register for one of version 3, whose number has an SGI's source as in IAR. Its priority has
/// five bits, and it is in group 0, which is the one of a guest without security extensions.
pub const fn to_list(from: u64) -> u32 {
    let number = (from & ich::NUMBER) as u32;
    let priority = (from >> ich::PRIORITY_SHIFT & 0xff) as u32 >> 3;
    let state = (from >> STATE_SHIFT & 3) as u32;
    let low = if from & ich::LINKED != 0 {
        let link = (from >> ich::LINK_SHIFT) as u32 & NUMBER;
        list::LINKED | link << list::LINK_SHIFT | number & NUMBER
    } else {
        let report = if from & ich::REPORT_END != 0 { list::REPORT_END } else { 0 };
        report | number & NUMBER_AND_SOURCE
    };
    state << list::STATE_SHIFT | priority << list::PRIORITY_SHIFT | low
}

/// List register of version 3 for one of version 2: the reverse of [`to_list`].
pub const fn from_list(from: u32) -> u64 {
    let state = (from >> list::STATE_SHIFT & 3) as u64;
    let priority = (from >> list::PRIORITY_SHIFT & 31) as u64;
    let common = state << STATE_SHIFT | priority << (ich::PRIORITY_SHIFT + 3);
    if from & list::LINKED != 0 {
        let link = (from >> list::LINK_SHIFT & NUMBER) as u64;
        return common | ich::LINKED | link << ich::LINK_SHIFT | (from & NUMBER) as u64;
    }
    let report = if from & list::REPORT_END != 0 { ich::REPORT_END } else { 0 };
    common | report | (from & NUMBER_AND_SOURCE) as u64
}

/// Interrupt that a write to SGIR sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SoftwareInterrupt {
    /// Number of the interrupt, below 16.
    pub number: u32,
    /// CPUs that get it: a bit each.
    pub targets: u8,
}

impl SoftwareInterrupt {
    /// Decodes a value that CPU `sender`, below [`MAX_CPUS`], writes.
    pub const fn decode(value: u32, sender: usize) -> Self {
        let own = 1u8 << (sender % MAX_CPUS);
        let targets = match value >> 24 & 3 {
            0 => (value >> 16) as u8,
            1 => !own,
            2 => own,
            // Reserved.
            _ => 0,
        };
        Self { number: value & 15, targets }
    }
}

/// Value of SGIR that sends interrupt `number` to these CPUs: a bit each.
pub const fn software_interrupt(targets: u8, number: u32) -> u32 {
    (targets as u32) << 16 | number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_registers() {
        let pending = ich::PENDING | 0xa8 << ich::PRIORITY_SHIFT | 40;
        assert_eq!(to_list(pending), 0x1a80_0028);
        let sgi = ich::PENDING | ich::ACTIVE | 3 << SOURCE_SHIFT | 5;
        assert_eq!(to_list(sgi), 0x3000_0c05);
        let linked = ich::ACTIVE | ich::LINKED | 27 << ich::LINK_SHIFT | 27;
        assert_eq!(to_list(linked), 0xa000_6c1b);
        let level = pending | ich::REPORT_END;
        assert_eq!(to_list(level), 0x1a88_0028);
        for one in [0, pending, sgi, linked, level] {
            assert_eq!(from_list(to_list(one)), one);
        }
        assert_eq!(to_list(ich::GROUP_1), 0, "group 0");
    }

    #[test]
    fn software_interrupts() {
        let decode = |value| {
            let SoftwareInterrupt { number, targets } = SoftwareInterrupt::decode(value, 2);
            (number, targets)
        };
        assert_eq!(decode(software_interrupt(0x81, 7)), (7, 0x81));
        assert_eq!(decode(1 << 24 | 0xff_0000 | 3), (3, 0xfb));
        assert_eq!(decode(2 << 24 | 15), (15, 4));
        assert_eq!(decode(3 << 24 | 0xff_0000), (0, 0));
    }
}

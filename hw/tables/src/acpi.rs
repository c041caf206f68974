//! ACPI tables (ACPI specification 6.5, chapter 5): root pointer, list of tables, and the tables
//! needed for start-up. No AML.
//!
//! The tables are in physical memory. The caller passes a function that returns `len` bytes at a
//! physical address, or `None` if it cannot access them; memory is accessed in no other way.

use crate::bytes;

mod ivrs;
pub use ivrs::IvrsIoApic;

const HEADER_LENGTH: usize = 36;
/// Maximum plausible length of a table in bytes.
const MAX_TABLE_LENGTH: usize = 1 << 24;

/// Error of ACPI table parsing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AcpiError {
    /// No RSDP signature, or too few bytes.
    BadRsdp,
    /// The bytes of a structure do not sum up to 0.
    BadChecksum,
    /// The memory function cannot access an address found in a table.
    Unreachable,
    /// Unexpected table signature.
    BadSignature,
    /// A table is shorter than its fixed part or longer than plausible.
    BadLength,
}

/// Offset of the first valid RSDP in `bytes`, which begin at a multiple of 16 (section 5.2.5.1:
/// search the first KiB of the EBDA and 0xe0000..0x100000).
pub fn find_rsdp(bytes: &[u8]) -> Option<usize> {
    (0..bytes.len()).step_by(16).find(|&at| Rsdp::parse(&bytes[at..]).is_ok())
}

/// Root System Description Pointer, section 5.2.5.3.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rsdp {
    /// 0 for ACPI 1.0, 2 for later versions.
    pub revision: u8,
    /// Physical address of the RSDT; 0 if none.
    pub rsdt: u32,
    /// Physical address of the XSDT; 0 if none.
    pub xsdt: u64,
}

impl Rsdp {
    /// Length since ACPI 2.0, in bytes.
    pub const LENGTH: usize = 36;
    const LENGTH_1: usize = 20;

    /// Parses and validates the RSDP at the start of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Self, AcpiError> {
        let first = bytes.get(..Self::LENGTH_1).ok_or(AcpiError::BadRsdp)?;
        if !first.starts_with(b"RSD PTR ") {
            return Err(AcpiError::BadRsdp);
        }
        check_sum(first)?;
        let revision = first[15];
        let rsdt = bytes::u32(first, 16).ok_or(AcpiError::BadRsdp)?;
        if revision < 2 {
            return Ok(Self { revision, rsdt, xsdt: 0 });
        }
        let length = bytes::u32(bytes, 20).ok_or(AcpiError::BadRsdp)? as usize;
        let all = bytes.get(..length.max(Self::LENGTH)).ok_or(AcpiError::BadRsdp)?;
        check_sum(all)?;
        let xsdt = bytes::u64(all, 24).ok_or(AcpiError::BadRsdp)?;
        Ok(Self { revision, rsdt, xsdt })
    }
}

fn check_sum(bytes: &[u8]) -> Result<(), AcpiError> {
    match bytes.iter().fold(0u8, |sum, &byte| sum.wrapping_add(byte)) {
        0 => Ok(()),
        _ => Err(AcpiError::BadChecksum),
    }
}

/// Validated system description table with its header (section 5.2.6).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Table<'a> {
    bytes: &'a [u8],
}

impl<'a> Table<'a> {
    /// Reads the table at physical address `address` and validates length and checksum.
    pub fn read(
        address: u64,
        memory: impl Fn(u64, usize) -> Option<&'a [u8]>,
    ) -> Result<Self, AcpiError> {
        let header = memory(address, HEADER_LENGTH).ok_or(AcpiError::Unreachable)?;
        let length = bytes::u32(header, 4).ok_or(AcpiError::Unreachable)? as usize;
        if !(HEADER_LENGTH..=MAX_TABLE_LENGTH).contains(&length) {
            return Err(AcpiError::BadLength);
        }
        let bytes = memory(address, length)
            .and_then(|bytes| bytes.get(..length))
            .ok_or(AcpiError::Unreachable)?;
        check_sum(bytes)?;
        Ok(Self { bytes })
    }

    /// Signature of the table.
    pub fn signature(&self) -> [u8; 4] {
        bytes::array(self.bytes, 0).unwrap_or_default()
    }

    /// Contents of the table, including the header.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    fn expect(self, signature: &[u8; 4], shortest: usize) -> Result<&'a [u8], AcpiError> {
        if &self.signature() != signature {
            return Err(AcpiError::BadSignature);
        }
        if self.bytes.len() < shortest {
            return Err(AcpiError::BadLength);
        }
        Ok(self.bytes)
    }
}

/// List of all tables.
#[derive(Clone, Copy, Debug)]
pub struct Tables<'a, F> {
    memory: F,
    entries: &'a [u8],
    entry_length: usize,
}

impl<'a, F: Fn(u64, usize) -> Option<&'a [u8]>> Tables<'a, F> {
    /// List of the tables of `rsdp`: its XSDT if there is one, else its RSDT.
    pub fn new(rsdp: Rsdp, memory: F) -> Result<Self, AcpiError> {
        let (address, signature, entry_length) = match rsdp.xsdt {
            0 => (u64::from(rsdp.rsdt), b"RSDT", 4),
            xsdt => (xsdt, b"XSDT", 8),
        };
        let root = Table::read(address, &memory)?.expect(signature, HEADER_LENGTH)?;
        Ok(Self { memory, entries: &root[HEADER_LENGTH..], entry_length })
    }

    /// List of the tables of the RSDP at physical address `rsdp`.
    pub fn from_address(rsdp: u64, memory: F) -> Result<Self, AcpiError> {
        let read = |length| memory(rsdp, length).ok_or(AcpiError::Unreachable);
        let pointer = read(Rsdp::LENGTH).or_else(|_| read(Rsdp::LENGTH_1)).and_then(Rsdp::parse)?;
        Self::new(pointer, memory)
    }

    /// Physical addresses of the tables.
    pub fn addresses(&self) -> impl Iterator<Item = u64> + use<'a, F> {
        let length = self.entry_length;
        self.entries.chunks_exact(length).filter_map(move |entry| match length {
            4 => bytes::u32(entry, 0).map(u64::from),
            _ => bytes::u64(entry, 0),
        })
    }

    /// Tables, except unreadable ones.
    pub fn tables(&self) -> impl Iterator<Item = Table<'a>> + '_ {
        self.addresses().filter_map(|address| Table::read(address, &self.memory).ok())
    }

    /// First table with this signature.
    pub fn find(&self, signature: &[u8; 4]) -> Option<Table<'a>> {
        self.tables().find(|table| &table.signature() == signature)
    }
}

/// Multiple APIC Description Table, section 5.2.12.
#[derive(Clone, Copy, Debug)]
pub struct Madt<'a> {
    bytes: &'a [u8],
}

/// Flags of local APIC entries (table 5.23).
pub mod apic_flag {
    /// The processor is usable.
    pub const ENABLED: u32 = 1;
}

/// Polarity and trigger mode of an interrupt input (table 5.26, "MPS INTI flags").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InterruptFlags(pub u16);

impl InterruptFlags {
    /// Defined by the source's bus; for ISA, active high and edge-triggered.
    pub const BUS: Self = Self(0);
    /// Active high, level-triggered.
    pub const LEVEL_HIGH: Self = Self(0b1101);

    /// Returns whether the input is active low; `isa_default` if the flags refer to the bus.
    pub fn active_low(self, isa_default: bool) -> bool {
        match self.0 & 0b11 {
            0b01 => false,
            0b11 => true,
            _ => isa_default,
        }
    }

    /// Returns whether the input is level-triggered; `isa_default` if the flags refer to the bus.
    pub fn level_triggered(self, isa_default: bool) -> bool {
        match self.0 >> 2 & 0b11 {
            0b01 => false,
            0b11 => true,
            _ => isa_default,
        }
    }
}

/// An entry of the MADT.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MadtEntry {
    /// Type 0: a processor with a local APIC.
    LocalApic {
        /// ACPI processor UID.
        uid: u8,
        /// Local APIC id.
        id: u8,
        /// [`apic_flag`].
        flags: u32,
    },
    /// Type 1: an I/O APIC.
    IoApic {
        /// I/O APIC id.
        id: u8,
        /// Physical address of its registers.
        address: u32,
        /// GSI of its first input.
        gsi_base: u32,
    },
    /// Type 2: an ISA interrupt that is not identity-mapped.
    InterruptOverride {
        /// Source bus; 0 is ISA.
        bus: u8,
        /// ISA interrupt number.
        source: u8,
        /// Global system interrupt number.
        gsi: u32,
        /// Polarity and trigger mode.
        flags: InterruptFlags,
    },
    /// Type 4: local interrupt input connected to NMI.
    LocalApicNmi {
        /// ACPI processor UID; 0xff for all.
        uid: u8,
        /// Polarity and trigger mode.
        flags: InterruptFlags,
        /// LINT input number.
        lint: u8,
    },
    /// Type 5: 64-bit address of the local APICs.
    LocalApicAddress(u64),
    /// Type 9: a processor with a local x2APIC.
    X2Apic {
        /// ACPI processor UID.
        uid: u32,
        /// x2APIC id.
        id: u32,
        /// [`apic_flag`].
        flags: u32,
    },
    /// Any other type.
    Other(u8),
}

impl<'a> Madt<'a> {
    /// Signature.
    pub const SIGNATURE: &'static [u8; 4] = b"APIC";
    const FIXED: usize = 44;

    /// Parses a table as MADT.
    pub fn parse(table: Table<'a>) -> Result<Self, AcpiError> {
        table.expect(Self::SIGNATURE, Self::FIXED).map(|bytes| Self { bytes })
    }

    /// Physical address of the local APICs; a type 5 entry overrides it.
    pub fn local_apic_address(&self) -> u64 {
        self.entries()
            .find_map(|entry| match entry {
                MadtEntry::LocalApicAddress(address) => Some(address),
                _ => None,
            })
            .unwrap_or_else(|| bytes::u32(self.bytes, 36).unwrap_or_default().into())
    }

    /// Returns whether the machine also has a pair of 8259 interrupt controllers, to be masked.
    pub fn has_8259(&self) -> bool {
        bytes::u32(self.bytes, 40).unwrap_or_default() & 1 != 0
    }

    /// Entries up to the first malformed one.
    pub fn entries(&self) -> impl Iterator<Item = MadtEntry> + use<'a> {
        MadtEntries { bytes: self.bytes.get(Self::FIXED..).unwrap_or(&[]) }
    }
}

struct MadtEntries<'a> {
    bytes: &'a [u8],
}

impl Iterator for MadtEntries<'_> {
    type Item = MadtEntry;

    fn next(&mut self) -> Option<MadtEntry> {
        let length = usize::from(bytes::u8(self.bytes, 1)?);
        if length < 2 {
            return None;
        }
        let raw = self.bytes.get(..length)?;
        self.bytes = &self.bytes[length..];
        Some(match raw[0] {
            0 => MadtEntry::LocalApic {
                uid: bytes::u8(raw, 2)?,
                id: bytes::u8(raw, 3)?,
                flags: bytes::u32(raw, 4)?,
            },
            1 => MadtEntry::IoApic {
                id: bytes::u8(raw, 2)?,
                address: bytes::u32(raw, 4)?,
                gsi_base: bytes::u32(raw, 8)?,
            },
            2 => MadtEntry::InterruptOverride {
                bus: bytes::u8(raw, 2)?,
                source: bytes::u8(raw, 3)?,
                gsi: bytes::u32(raw, 4)?,
                flags: InterruptFlags(bytes::u16(raw, 8)?),
            },
            4 => MadtEntry::LocalApicNmi {
                uid: bytes::u8(raw, 2)?,
                flags: InterruptFlags(bytes::u16(raw, 3)?),
                lint: bytes::u8(raw, 5)?,
            },
            5 => MadtEntry::LocalApicAddress(bytes::u64(raw, 4)?),
            9 => MadtEntry::X2Apic {
                id: bytes::u32(raw, 4)?,
                flags: bytes::u32(raw, 8)?,
                uid: bytes::u32(raw, 12)?,
            },
            other => MadtEntry::Other(other),
        })
    }
}

/// Memory-mapped configuration table (PCI Firmware Specification 3.3, section 4.1.2).
#[derive(Clone, Copy, Debug)]
pub struct Mcfg<'a> {
    bytes: &'a [u8],
}

/// Buses with memory-mapped configuration space: 4 KiB per function, 32 KiB per device, 1 MiB per
/// bus.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConfigurationRange {
    /// Physical address of bus 0's configuration space, even if the range excludes that bus.
    pub base: u64,
    /// PCI segment group.
    pub segment: u16,
    /// First bus.
    pub first_bus: u8,
    /// Last bus.
    pub last_bus: u8,
}

impl<'a> Mcfg<'a> {
    /// Signature.
    pub const SIGNATURE: &'static [u8; 4] = b"MCFG";
    const FIXED: usize = 44;
    const ENTRY: usize = 16;

    /// Parses a table as MCFG.
    pub fn parse(table: Table<'a>) -> Result<Self, AcpiError> {
        table.expect(Self::SIGNATURE, Self::FIXED).map(|bytes| Self { bytes })
    }

    /// Ranges, except those whose last bus precedes the first one.
    pub fn ranges(&self) -> impl Iterator<Item = ConfigurationRange> + use<'a> {
        let entries = self.bytes.get(Self::FIXED..).unwrap_or(&[]).chunks_exact(Self::ENTRY);
        entries.filter_map(|entry| {
            let range = ConfigurationRange {
                base: bytes::u64(entry, 0)?,
                segment: bytes::u16(entry, 8)?,
                first_bus: bytes::u8(entry, 10)?,
                last_bus: bytes::u8(entry, 11)?,
            };
            (range.first_bus <= range.last_bus).then_some(range)
        })
    }
}

/// I/O Virtualization Reporting Structure (AMD I/O Virtualization Technology Specification, rev. 3,
/// section 5.2).
#[derive(Clone, Copy, Debug)]
pub struct Ivrs<'a> {
    bytes: &'a [u8],
}

/// I/O virtualization hardware definition block (IVHD): describes an IOMMU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ivhd {
    /// PCI function of the IOMMU: bus, device (5 bits), function (3 bits).
    pub device: u16,
    /// Physical address of its registers.
    pub base: u64,
    /// PCI segment group of the functions that it translates.
    pub segment: u16,
}

impl<'a> Ivrs<'a> {
    /// Signature.
    pub const SIGNATURE: &'static [u8; 4] = b"IVRS";
    const FIXED: usize = 48;
    /// Types of IVHD. They share their first fields, and firmware may describe an IOMMU by several.
    const IVHD: [u8; 3] = [0x10, 0x11, 0x40];

    /// Parses a table as IVRS.
    pub fn parse(table: Table<'a>) -> Result<Self, AcpiError> {
        table.expect(Self::SIGNATURE, Self::FIXED).map(|bytes| Self { bytes })
    }

    /// IVHDs up to the first malformed block.
    pub fn iommus(&self) -> impl Iterator<Item = Ivhd> + use<'a> {
        self.blocks().filter_map(|block| {
            Some(Ivhd {
                device: bytes::u16(block, 4)?,
                base: bytes::u64(block, 8)?,
                segment: bytes::u16(block, 16)?,
            })
        })
    }
}

/// Address spaces of [`GenericAddress`] (table 5.1).
pub mod space {
    /// Memory.
    pub const MEMORY: u8 = 0;
    /// I/O ports.
    pub const IO: u8 = 1;
}

/// Generic Address Structure, section 5.2.3.2.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GenericAddress {
    /// One of [`space`].
    pub space: u8,
    /// Width of the register in bits.
    pub bits: u8,
    /// Address in that space; never 0.
    pub address: u64,
}

impl GenericAddress {
    /// Parses a register address. `None` if the register is absent: address 0 or beyond the table.
    fn parse(bytes: &[u8], at: usize) -> Option<Self> {
        let address = bytes::u64(bytes, at.checked_add(4)?)?;
        (address != 0).then_some(())?;
        Some(Self { space: bytes::u8(bytes, at)?, bits: bytes::u8(bytes, at + 1)?, address })
    }

    /// I/O port number, if the address is a port.
    pub fn port(&self) -> Option<u16> {
        if self.space == space::IO { self.address.try_into().ok() } else { None }
    }
}

/// Fixed ACPI Description Table, section 5.2.9.
#[derive(Clone, Copy, Debug)]
pub struct Fadt<'a> {
    bytes: &'a [u8],
}

/// Flags of the FADT (table 5.10).
pub mod fadt_flag {
    /// The PM timer is 32 bits wide, not 24.
    pub const TMR_VAL_EXT: u32 = 1 << 8;
    /// The reset register is supported.
    pub const RESET_REG_SUP: u32 = 1 << 10;
    /// No fixed hardware registers.
    pub const HW_REDUCED_ACPI: u32 = 1 << 20;
}

/// Boot architecture flags of the FADT (table 5.11).
pub mod boot_flag {
    /// The ISA bus has devices.
    pub const LEGACY_DEVICES: u16 = 1 << 0;
    /// VGA must not be probed.
    pub const VGA_NOT_PRESENT: u16 = 1 << 2;
}

impl<'a> Fadt<'a> {
    /// Signature.
    pub const SIGNATURE: &'static [u8; 4] = b"FACP";
    /// Length in ACPI 1.0, the minimum.
    const MIN_LENGTH: usize = 116;

    /// Parses a table as FADT.
    pub fn parse(table: Table<'a>) -> Result<Self, AcpiError> {
        table.expect(Self::SIGNATURE, Self::MIN_LENGTH).map(|bytes| Self { bytes })
    }

    /// Physical address of the DSDT, 0 if none.
    pub fn dsdt(&self) -> u64 {
        match bytes::u64(self.bytes, 140) {
            None | Some(0) => bytes::u32(self.bytes, 40).unwrap_or_default().into(),
            Some(address) => address,
        }
    }

    /// GSI of the system control interrupt.
    pub fn sci_interrupt(&self) -> u16 {
        bytes::u16(self.bytes, 46).unwrap_or_default()
    }

    /// PM1a event block: status in its first half, enable in its second.
    pub fn pm1a_event(&self) -> Option<GenericAddress> {
        self.register(148, 56, 88)
    }

    /// PM1a control block.
    pub fn pm1a_control(&self) -> Option<GenericAddress> {
        self.register(172, 64, 89)
    }

    /// PM timer, 3.579545 MHz; [`Fadt::flags`] determine its width.
    pub fn pm_timer(&self) -> Option<GenericAddress> {
        self.register(208, 76, 91)
    }

    /// Reset register and the value to write to it, if supported.
    pub fn reset(&self) -> Option<(GenericAddress, u8)> {
        if self.flags() & fadt_flag::RESET_REG_SUP == 0 {
            return None;
        }
        Some((GenericAddress::parse(self.bytes, 116)?, bytes::u8(self.bytes, 128)?))
    }

    /// [`boot_flag`].
    pub fn boot_flags(&self) -> u16 {
        bytes::u16(self.bytes, 109).unwrap_or_default()
    }

    /// [`fadt_flag`].
    pub fn flags(&self) -> u32 {
        bytes::u32(self.bytes, 112).unwrap_or_default()
    }

    /// Register with a generic address at `extended` (since ACPI 2.0), else with a port number at
    /// `port` and a length in bytes at `length`.
    fn register(&self, extended: usize, port: usize, length: usize) -> Option<GenericAddress> {
        GenericAddress::parse(self.bytes, extended).or_else(|| {
            let address = bytes::u32(self.bytes, port)?;
            let bits = bytes::u8(self.bytes, length)?.checked_mul(8)?;
            (address != 0).then_some(GenericAddress {
                space: space::IO,
                bits,
                address: address.into(),
            })
        })
    }
}

/// Address of the registers of the first HPET (IA-PC HPET specification 1.0a, section 3.2.4).
pub fn hpet_address(table: Table<'_>) -> Result<Option<GenericAddress>, AcpiError> {
    table.expect(b"HPET", 56).map(|bytes| GenericAddress::parse(bytes, 40))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seal(mut table: Vec<u8>, checksum_at: usize) -> Vec<u8> {
        let sum = table.iter().fold(0u8, |sum, &byte| sum.wrapping_add(byte));
        table[checksum_at] = table[checksum_at].wrapping_sub(sum);
        table
    }

    pub(crate) fn table(signature: &[u8; 4], body: &[u8]) -> Vec<u8> {
        let mut table = vec![0; HEADER_LENGTH];
        table[..4].copy_from_slice(signature);
        table[4..8].copy_from_slice(&((HEADER_LENGTH + body.len()) as u32).to_le_bytes());
        table.extend(body);
        seal(table, 9)
    }

    #[test]
    fn configuration_ranges() {
        let mut body = vec![0; 8];
        body.extend(0xb000_0000u64.to_le_bytes());
        body.extend([0, 0, 0, 0xff, 0, 0, 0, 0]);
        body.extend([0; 8]);
        body.extend([1, 0, 9, 8, 0, 0, 0, 0]);
        body.extend([0; 5]);
        let bytes = table(b"MCFG", &body).leak();
        let table = Table::read(0, |_, length| bytes.get(..length)).unwrap();
        let mcfg = Mcfg::parse(table).unwrap();
        let range =
            ConfigurationRange { base: 0xb000_0000, segment: 0, first_bus: 0, last_bus: 255 };
        assert_eq!(mcfg.ranges().collect::<Vec<_>>(), [range]);
        assert!(Madt::parse(table).is_err());
    }

    #[test]
    fn iommus() {
        let mut body = vec![0; 12];
        // An IVHD, a block of another type, an IVHD of the same IOMMU, and a truncated one.
        for (kind, length) in [(0x10, 28), (0x20, 32), (0x11, 40), (0x10, 28)] {
            let mut block = vec![kind, 0, length, 0, 0x02, 0, 0x40, 0];
            block.extend(0xfd00_0000u64.to_le_bytes());
            block.resize(length.into(), 0);
            body.extend(block);
        }
        body.truncate(body.len() - 1);
        let bytes = table(b"IVRS", &body).leak();
        let ivrs = |bytes: &'static [u8]| {
            Ivrs::parse(Table::read(0, |_, length| bytes.get(..length)).unwrap())
        };
        let iommu = Ivhd { device: 2, base: 0xfd00_0000, segment: 0 };
        assert_eq!(ivrs(bytes).unwrap().iommus().collect::<Vec<_>>(), [iommu, iommu]);
        let endless = table(b"IVRS", &[0; 40]).leak();
        assert_eq!(ivrs(endless).unwrap().iommus().count(), 0);
    }

    /// 4 KiB of memory at address 0 with tables at 0x100 (root), 0x200 (MADT), 0x400 (FADT).
    fn memory(extended: bool) -> Vec<u8> {
        let mut madt = Vec::new();
        madt.extend(0xfee0_0000u32.to_le_bytes());
        madt.extend(1u32.to_le_bytes());
        madt.extend([0, 8, 3, 7, 1, 0, 0, 0]);
        madt.extend([1, 12, 2, 0, 0, 0, 0xc0, 0xfe, 0, 0, 0, 0]);
        madt.extend([2, 10, 0, 9, 9, 0, 0, 0, 0x0d, 0]);
        madt.extend([4, 6, 0xff, 0, 0, 1]);
        madt.extend([9, 16, 0, 0, 0x34, 0x12, 0, 0, 1, 0, 0, 0, 5, 0, 0, 0]);
        madt.extend([77, 3, 0]);
        let mut fadt = vec![0; if extended { 276 } else { 116 } - HEADER_LENGTH];
        let mut set = |at: usize, bytes: &[u8]| {
            if at < fadt.len() + HEADER_LENGTH {
                fadt[at - HEADER_LENGTH..][..bytes.len()].copy_from_slice(bytes);
            }
        };
        set(40, &[0, 8, 0, 0]);
        set(46, &[9, 0]);
        set(64, &[4, 6, 0, 0]);
        set(76, &[8, 6, 0, 0]);
        set(89, &[2]);
        set(91, &[4]);
        set(109, &boot_flag::LEGACY_DEVICES.to_le_bytes());
        set(112, &(fadt_flag::TMR_VAL_EXT | fadt_flag::RESET_REG_SUP).to_le_bytes());
        set(116, &[1, 8, 0, 1, 0xf9, 0x0c, 0, 0, 0, 0, 0, 0]);
        set(128, &[6]);
        set(140, &[0, 9, 0, 0, 0, 0, 0, 0]);
        set(208, &[1, 32, 0, 3, 0x18, 6, 0, 0, 0, 0, 0, 0]);

        let mut entries = Vec::new();
        for address in [0x200u64, 0x400, 0x800] {
            let raw = address.to_le_bytes();
            entries.extend(if extended { &raw[..] } else { &raw[..4] });
        }
        let mut memory = vec![0; 4096];
        let mut place = |at: usize, bytes: Vec<u8>| {
            memory[at..at + bytes.len()].copy_from_slice(&bytes);
        };
        place(0x100, table(if extended { b"XSDT" } else { b"RSDT" }, &entries));
        place(0x200, table(b"APIC", &madt));
        place(0x400, table(b"FACP", &fadt));

        let mut rsdp = b"RSD PTR \0TESTER".to_vec();
        rsdp.resize(20, 0);
        rsdp[15] = if extended { 2 } else { 0 };
        rsdp[16..18].copy_from_slice(&[0, 1]);
        let mut rsdp = seal(rsdp, 8);
        if extended {
            rsdp.extend([36, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            rsdp = seal(rsdp, 32);
        }
        place(0x10, rsdp);
        memory
    }

    fn reach<'a>(memory: &'a [u8]) -> impl Fn(u64, usize) -> Option<&'a [u8]> {
        |address, length| bytes::slice(memory, address as usize, length)
    }

    #[test]
    fn both_generations() {
        for extended in [false, true] {
            let memory = memory(extended);
            let at = find_rsdp(&memory).unwrap();
            assert_eq!(at, 0x10);
            let tables = Tables::from_address(at as u64, reach(&memory)).unwrap();
            assert_eq!(tables.addresses().collect::<Vec<_>>(), [0x200, 0x400, 0x800]);
            assert_eq!(tables.tables().count(), 2);
            assert!(tables.find(b"HPET").is_none());

            let madt = Madt::parse(tables.find(Madt::SIGNATURE).unwrap()).unwrap();
            assert_eq!(madt.local_apic_address(), 0xfee0_0000);
            assert!(madt.has_8259());
            let level = InterruptFlags::LEVEL_HIGH;
            assert_eq!(
                madt.entries().collect::<Vec<_>>(),
                [
                    MadtEntry::LocalApic { uid: 3, id: 7, flags: 1 },
                    MadtEntry::IoApic { id: 2, address: 0xfec0_0000, gsi_base: 0 },
                    MadtEntry::InterruptOverride { bus: 0, source: 9, gsi: 9, flags: level },
                    MadtEntry::LocalApicNmi { uid: 0xff, flags: InterruptFlags::BUS, lint: 1 },
                    MadtEntry::X2Apic { uid: 5, id: 0x1234, flags: 1 },
                    MadtEntry::Other(77),
                ]
            );
            assert!(level.level_triggered(false) && !level.active_low(true));
            assert!(!InterruptFlags::BUS.level_triggered(false));

            let fadt = Fadt::parse(tables.find(Fadt::SIGNATURE).unwrap()).unwrap();
            assert_eq!(fadt.sci_interrupt(), 9);
            assert_eq!(fadt.dsdt(), if extended { 0x900 } else { 0x800 });
            assert_eq!(fadt.pm1a_event(), None);
            assert_eq!(fadt.pm1a_control().unwrap().port(), Some(0x604));
            let timer = fadt.pm_timer().unwrap();
            assert_eq!(
                (timer.port(), timer.bits),
                (Some(if extended { 0x618 } else { 0x608 }), 32)
            );
            assert_eq!(fadt.boot_flags(), boot_flag::LEGACY_DEVICES);
            let reset = fadt.reset().map(|(register, value)| (register.port(), value));
            assert_eq!(reset, extended.then_some((Some(0xcf9), 6)));
        }
    }

    #[test]
    fn what_is_refused() {
        let good = memory(true);
        let with = |at: usize, byte: u8| {
            let mut bad = good.clone();
            bad[at] = byte;
            Tables::from_address(0x10, reach(&bad)).err()
        };
        assert_eq!(with(0x10, 0), Some(AcpiError::BadRsdp));
        assert_eq!(with(0x1a, 1), Some(AcpiError::BadChecksum));
        assert_eq!(with(0x11f, 1), Some(AcpiError::BadChecksum));
        assert_eq!(with(0x104, 35), Some(AcpiError::BadLength));
        assert_eq!(with(0x106, 1), Some(AcpiError::Unreachable));
        assert!(Tables::from_address(0xfff, reach(&good)).is_err());
        let madt = Table::read(0x200, reach(&good)).unwrap();
        assert_eq!(Fadt::parse(madt).err(), Some(AcpiError::BadSignature));
    }
}

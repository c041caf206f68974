//! Blocks of the IVRS and their device entries (AMD I/O Virtualization Technology Specification,
//! rev. 3, section 5.2.2).

use super::Ivrs;
use crate::bytes;

/// An I/O APIC whose interrupts an IOMMU remaps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IvrsIoApic {
    /// I/O APIC id, as in the MADT.
    pub id: u8,
    /// Source function of its interrupts for the IOMMU: bus, device (5 bits), function (3 bits).
    pub device: u16,
}

impl<'a> Ivrs<'a> {
    /// Type of the IVHD with the short fixed part, and lengths of both fixed parts.
    const SHORT: u8 = 0x10;
    const SHORT_FIXED: usize = 24;
    const LONG_FIXED: usize = 40;
    /// Type of device entries for special devices, and the variety for I/O APICs.
    const SPECIAL: u8 = 72;
    const IO_APIC: u8 = 1;
    /// Type of device entries of variable length: the byte at 21 is the length beyond the first 22
    /// bytes.
    const NAMED: u8 = 240;

    /// IVHDs up to the first malformed block.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let mut rest = self.bytes.get(Self::FIXED..).unwrap_or(&[]);
        let blocks = core::iter::from_fn(move || {
            let length = usize::from(bytes::u16(rest, 2)?);
            let block = rest.get(..length).filter(|block| block.len() >= 4)?;
            rest = &rest[length..];
            Some(block)
        });
        blocks.filter(|block| Self::IVHD.contains(&block[0]))
    }

    /// Device entries of an IVHD, up to the first malformed one.
    fn entries(block: &'a [u8]) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let fixed = if block[0] == Self::SHORT { Self::SHORT_FIXED } else { Self::LONG_FIXED };
        let mut rest = block.get(fixed..).unwrap_or(&[]);
        core::iter::from_fn(move || {
            let kind = bytes::u8(rest, 0)?;
            let length = match kind {
                Self::NAMED => 22 + usize::from(bytes::u8(rest, 21)?),
                _ => 4 << (kind >> 6),
            };
            let entry = rest.get(..length)?;
            rest = &rest[length..];
            Some(entry)
        })
    }

    /// I/O APICs described by the IVHDs; one described several times is repeated.
    pub fn io_apics(&self) -> impl Iterator<Item = IvrsIoApic> + use<'a> {
        self.blocks().flat_map(Self::entries).filter_map(|entry| {
            let is_io_apic = entry[0] == Self::SPECIAL && bytes::u8(entry, 7)? == Self::IO_APIC;
            let id = bytes::u8(entry, 4)?;
            is_io_apic.then_some(IvrsIoApic { id, device: bytes::u16(entry, 5)? })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acpi::Table;
    use crate::acpi::tests::table;

    /// Creates an IVHD with these entries.
    fn block(kind: u8, fixed: usize, entries: &[u8]) -> Vec<u8> {
        let mut block = vec![0; fixed];
        block[0] = kind;
        block.extend(entries);
        let length = block.len() as u16;
        block[2..4].copy_from_slice(&length.to_le_bytes());
        block
    }

    fn io_apics(blocks: &[Vec<u8>]) -> Vec<IvrsIoApic> {
        let mut body = vec![0; 12];
        body.extend(blocks.concat());
        let bytes: &'static [u8] = table(b"IVRS", &body).leak();
        let table = Table::read(0, |_, length| bytes.get(..length)).unwrap();
        Ivrs::parse(table).unwrap().io_apics().collect()
    }

    #[test]
    fn io_apics_are_found_behind_entries_of_all_lengths() {
        const APIC: [u8; 8] = [72, 0, 0, 0xd7, 2, 0xa0, 0, 1];
        const HPET: [u8; 8] = [72, 0, 0, 0, 0, 0xa1, 0, 2];
        let named: Vec<u8> = [vec![240; 21], vec![3, 9, 9, 9]].concat();
        let all = [1, 0, 0, 0];
        let alias = [66, 1, 0, 0, 0, 8, 0, 0];
        let expected = IvrsIoApic { id: 2, device: 0xa0 };
        let short = block(0x10, 24, &[&all[..], &alias, &HPET, &APIC].concat());
        let long = block(0x40, 40, &[&named[..], &[200; 32], &APIC].concat());
        let foreign = block(0x20, 40, &APIC);
        assert_eq!(io_apics(&[short, foreign, long]), [expected; 2]);
        // A truncated entry, and one whose length exceeds the block.
        assert_eq!(io_apics(&[block(0x11, 40, &APIC[..7])]), []);
        assert_eq!(io_apics(&[block(0x11, 40, &[240; 22])]), []);
    }
}

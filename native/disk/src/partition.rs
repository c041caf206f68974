//! Partition tables: GPT (UEFI 2.10, section 5.3) and MBR (section 5.2.1) with logical partitions,
//! which are numbered from 5 as in Linux.
//!
//! The parser reads a table sector by sector, checks every number in it, and rejects a table that
//! contradicts itself. Partitions belong to clients that do not trust each other: of overlapping
//! ones, none is served, and neither is one that contains sectors of a table, with which its client
//! could change the partitions of other clients.

use crc::{CRC_32_ISO_HDLC, Crc, Digest, Table};
use heapless::Vec;

use crate::server::Extent;

/// Maximum number of partitions that are examined.
pub const MAX_PARTITIONS: usize = 32;
/// Bytes of a sector.
pub const SECTOR: usize = 512;

const SIGNATURE: &[u8; 8] = b"EFI PART";
/// MBR partition types: empty, extended (CHS, LBA, and Linux), and protective MBR of a GPT.
const TYPE_NONE: u8 = 0;
const TYPE_EXTENDED: [u8; 3] = [0x05, 0x0f, 0x85];
const TYPE_GPT: u8 = 0xee;
const MBR_SIGNATURE: [u8; 2] = [0x55, 0xaa];
const MBR_ENTRIES: usize = 446;
const MBR_ENTRY: usize = 16;
/// Number of the first logical partition.
const FIRST_LOGICAL: u8 = 5;
const HEADER: core::ops::RangeInclusive<u32> = 92..=SECTOR as u32;
/// An entry has 128 bytes times a power of two; a table has at most this many sectors.
const MAX_TABLE_SECTORS: u64 = 256;

static CRC: Crc<u32, Table<1>> = Crc::<u32, Table<1>>::new(&CRC_32_ISO_HDLC);

/// A partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Number from 1 in the order of the table, empty entries counted; from 5 for logical
    /// partitions, in the order of their chain.
    pub number: u8,
    /// Sectors of the partition.
    pub extent: Extent,
}

/// The partitions of a disk.
pub type Partitions = Vec<Partition, MAX_PARTITIONS>;

/// Result of a scan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScanResult {
    /// Partitions that are served.
    pub partitions: Partitions,
    /// Numbers of partitions that are not served: they overlap each other or a table.
    pub refused: Vec<u8, MAX_PARTITIONS>,
}

impl ScanResult {
    /// Splits partitions into those without overlap and those that overlap one another or a
    /// `reserved` extent of tables.
    fn of(all: &[Partition], reserved: &[Extent]) -> Self {
        let mut found = Self::default();
        for partition in all {
            let extent = &partition.extent;
            let mut others = all.iter().filter(|other| other.number != partition.number);
            let overlaps = others.any(|other| other.extent.overlaps(extent))
                || reserved.iter().any(|reserved| reserved.overlaps(extent));
            // Neither list has more entries than there are partitions.
            let _ = match overlaps {
                true => found.refused.push(partition.number).is_ok(),
                false => found.partitions.push(*partition).is_ok(),
            };
        }
        found
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// Finds the partitions of a disk of `sectors` sectors. `read` reads one sector; `None` on failure.
pub fn find(
    sectors: u64,
    mut read: impl FnMut(u64, &mut [u8; SECTOR]) -> Option<()>,
) -> ScanResult {
    let mut sector = [0; SECTOR];
    if sectors < 2 || read(0, &mut sector).is_none() || sector[510..] != MBR_SIGNATURE {
        return ScanResult::default();
    }
    let kind = |index: usize, sector: &[u8; SECTOR]| sector[MBR_ENTRIES + MBR_ENTRY * index + 4];
    if (0..4).any(|index| kind(index, &sector) == TYPE_GPT) {
        return gpt(sectors, read).unwrap_or_default();
    }
    // No partition may contain the table.
    let after_table = Extent { first: 1, sectors: sectors - 1 };
    let mut all = Partitions::new();
    let mut extended: Option<Extent> = None;
    for index in 0..4 {
        let entry = Entry::at(&sector, index, 0);
        if entry.is_extended() {
            extended = extended.or_else(|| entry.within(&after_table));
        } else if let Some(extent) = entry.within(&after_table) {
            // There are at most four.
            let _ = all.push(Partition { number: index as u8 + 1, extent });
        }
    }
    let Some(extended) = extended else { return ScanResult::of(&all, &[]) };
    let primary = all.len();
    let tables = logical(&extended, &mut all, read);
    // A primary partition must not overlap the extended one, even where that is unused.
    match all[..primary].iter().any(|partition| partition.extent.overlaps(&extended)) {
        true => ScanResult::of(&all, &[extended]),
        false => ScanResult::of(&all, &tables),
    }
}

/// Tables of logical partitions.
type Tables = Vec<Extent, MAX_PARTITIONS>;

/// Finds the logical partitions in an extended one, and returns the extents of their tables. Each
/// partition has a table in front of it with two entries: the partition, relative to this table,
/// and the next table, relative to the extended partition.
fn logical(
    extended: &Extent,
    partitions: &mut Partitions,
    mut read: impl FnMut(u64, &mut [u8; SECTOR]) -> Option<()>,
) -> Tables {
    let mut tables = Tables::new();
    let mut sector = [0; SECTOR];
    let mut number = FIRST_LOGICAL;
    let mut next = Some(extended.first);
    while let Some(place) = next {
        // The limit ends a chain that forms a cycle.
        let table = Extent { first: place, sectors: 1 };
        let is_new = !tables.contains(&table) && tables.push(table).is_ok();
        if !is_new || read(place, &mut sector).is_none() || sector[510..] != MBR_SIGNATURE {
            break;
        }
        for entry in (0..4).map(|index| Entry::at(&sector, index, place)) {
            if let (false, Some(extent)) = (entry.is_extended(), entry.within(extended)) {
                // Partitions beyond the limit are not served.
                let _ = partitions.push(Partition { number, extent });
                number += 1;
            }
        }
        let mut links = (0..4).map(|index| Entry::at(&sector, index, extended.first));
        let link = links.find(Entry::is_extended).map(|entry| entry.first);
        next = link.filter(|link| (extended.first..extended.end()).contains(link));
    }
    tables
}

/// An entry of a table in an MBR, or of a table of a logical partition.
struct Entry {
    kind: u8,
    first: u64,
    sectors: u64,
}

impl Entry {
    /// Parses entry `index` of a table whose sectors count from `base`.
    fn at(sector: &[u8; SECTOR], index: usize, base: u64) -> Self {
        let at = MBR_ENTRIES + MBR_ENTRY * index;
        Self {
            kind: sector[at + 4],
            first: base + u64::from(u32_at(sector, at + 8)),
            sectors: u32_at(sector, at + 12).into(),
        }
    }

    fn is_extended(&self) -> bool {
        TYPE_EXTENDED.contains(&self.kind)
    }

    /// Returns the extent if it is not empty and within `whole`.
    fn within(&self, whole: &Extent) -> Option<Extent> {
        let extent = Extent { first: self.first, sectors: self.sectors };
        let is_there = self.kind != TYPE_NONE && self.sectors > 0;
        let fits = extent.first >= whole.first && extent.end() <= whole.end();
        (is_there && fits).then_some(extent)
    }
}

/// A GPT header: usable sectors and the location of the entries.
struct Header {
    first: u64,
    last: u64,
    table: Extent,
    count: u32,
    size: u32,
    checksum: u32,
}

impl Header {
    /// Parses the header in a sector read from `place`.
    fn parse(mut sector: [u8; SECTOR], place: u64, sectors: u64) -> Option<Self> {
        let length = u32_at(&sector, 12);
        let is_here = u64_at(&sector, 24) == place;
        if !sector.starts_with(SIGNATURE) || !HEADER.contains(&length) || !is_here {
            return None;
        }
        let checksum = u32_at(&sector, 16);
        sector[16..20].fill(0);
        if CRC.checksum(&sector[..length as usize]) != checksum {
            return None;
        }
        let (first, last) = (u64_at(&sector, 40), u64_at(&sector, 48));
        let (table, count, size) = (u64_at(&sector, 72), u32_at(&sector, 80), u32_at(&sector, 84));
        let checksum = u32_at(&sector, 88);
        let whole = size >= 128 && size.is_power_of_two() && size as usize <= SECTOR;
        let length = (u64::from(count) * u64::from(size)).div_ceil(SECTOR as u64);
        if !whole || last >= sectors || length > MAX_TABLE_SECTORS {
            return None;
        }
        let fits = table.checked_add(length)? <= sectors;
        let table = Extent { first: table, sectors: length };
        fits.then_some(Self { first, last, table, count, size, checksum })
    }
}

/// Reads a disk's GPT: the first valid copy. The second copy is in the last sector.
fn gpt(
    sectors: u64,
    mut read: impl FnMut(u64, &mut [u8; SECTOR]) -> Option<()>,
) -> Option<ScanResult> {
    let places = [1, sectors - 1];
    let headers = places.map(|place| {
        let mut sector = [0; SECTOR];
        read(place, &mut sector)?;
        Header::parse(sector, place, sectors)
    });
    // The protective MBR, the headers, and the tables that they name.
    let mut reserved: Vec<Extent, 5> = Vec::new();
    let headers_at = [0].into_iter().chain(places).map(|first| Extent { first, sectors: 1 });
    let tables = headers.iter().flatten().map(|header| header.table);
    for extent in headers_at.chain(tables) {
        // Three and two.
        let _ = reserved.push(extent);
    }
    let all = headers.iter().flatten().find_map(|header| entries(header, &mut read))?;
    Some(ScanResult::of(&all, &reserved))
}

/// Reads the partitions of a GPT; `None` if the checksum of the entries is wrong.
fn entries(
    header: &Header,
    mut read: impl FnMut(u64, &mut [u8; SECTOR]) -> Option<()>,
) -> Option<Partitions> {
    let Header { first, last, table, count, size, checksum } = *header;
    let mut sector = [0; SECTOR];
    let mut digest: Digest<u32, Table<1>> = CRC.digest();
    let mut partitions = Vec::new();
    let mut left = (u64::from(count) * u64::from(size)) as usize;
    for index in 0..table.sectors {
        read(table.first + index, &mut sector)?;
        let used = left.min(SECTOR);
        left -= used;
        digest.update(&sector[..used]);
        for (entry, bytes) in sector[..used].chunks_exact(size as usize).enumerate() {
            let number = index as usize * (SECTOR / size as usize) + entry + 1;
            let (start, end) = (u64_at(bytes, 32), u64_at(bytes, 40));
            let is_empty = bytes[..16].iter().all(|&byte| byte == 0);
            if !is_empty && number < 256 && start >= first && start <= end && end <= last {
                let extent = Extent { first: start, sectors: end - start + 1 };
                // Partitions beyond the limit are not served.
                let _ = partitions.push(Partition { number: number as u8, extent });
            }
        }
    }
    (digest.finalize() == checksum).then_some(partitions)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECTORS: u64 = 2048;
    type Image = std::vec::Vec<u8>;

    fn search(image: &[u8]) -> Partitions {
        search_all(image).partitions
    }

    fn search_all(image: &[u8]) -> ScanResult {
        find(SECTORS, |number, sector| {
            let at = number as usize * SECTOR;
            sector.copy_from_slice(image.get(at..at + SECTOR)?);
            Some(())
        })
    }

    fn put(image: &mut Image, at: usize, bytes: &[u8]) {
        image[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn mbr(entries: &[(u8, u32, u32)]) -> Image {
        let mut image = vec![0; SECTORS as usize * SECTOR];
        put(&mut image, 510, &[0x55, 0xaa]);
        for (index, &(kind, first, sectors)) in entries.iter().enumerate() {
            let at = MBR_ENTRIES + MBR_ENTRY * index;
            image[at + 4] = kind;
            put(&mut image, at + 8, &first.to_le_bytes());
            put(&mut image, at + 12, &sectors.to_le_bytes());
        }
        image
    }

    fn seal(image: &mut Image, place: u64, table: u64) {
        let at = place as usize * SECTOR;
        let entries = &image[table as usize * SECTOR..][..128 * 128];
        let sum = CRC.checksum(entries);
        put(image, at, SIGNATURE);
        put(image, at + 12, &92u32.to_le_bytes());
        put(image, at + 16, &[0; 4]);
        put(image, at + 24, &place.to_le_bytes());
        put(image, at + 40, &34u64.to_le_bytes());
        put(image, at + 48, &(SECTORS - 34).to_le_bytes());
        put(image, at + 72, &table.to_le_bytes());
        put(image, at + 80, &128u32.to_le_bytes());
        put(image, at + 84, &128u32.to_le_bytes());
        put(image, at + 88, &sum.to_le_bytes());
        let sum = CRC.checksum(&image[at..at + 92]);
        put(image, at + 16, &sum.to_le_bytes());
    }

    fn gpt_image() -> Image {
        gpt_of(&[(0, 64, 163), (2, 200, 200), (3, 10, 40)])
    }

    fn gpt_of(entries: &[(u64, u64, u64)]) -> Image {
        let mut image = mbr(&[(TYPE_GPT, 1, SECTORS as u32 - 1)]);
        for table in [2, SECTORS - 33] {
            for &(index, first, last) in entries {
                let at = table as usize * SECTOR + index as usize * 128;
                put(&mut image, at, &[9; 16]);
                put(&mut image, at + 32, &first.to_le_bytes());
                put(&mut image, at + 40, &last.to_le_bytes());
            }
        }
        seal(&mut image, 1, 2);
        seal(&mut image, SECTORS - 1, SECTORS - 33);
        image
    }

    fn two() -> [Partition; 2] {
        [
            Partition { number: 1, extent: Extent { first: 64, sectors: 100 } },
            Partition { number: 3, extent: Extent { first: 200, sectors: 1 } },
        ]
    }

    #[test]
    fn both_kinds() {
        assert_eq!(search(&mbr(&[])), []);
        let image = mbr(&[(0x83, 64, 100), (0x05, 300, 10), (0x83, 200, 1), (0x83, 2000, 49)]);
        assert_eq!(search(&image), two());
        assert_eq!(search(&gpt_image()), two(), "the fourth lies outside");
    }

    /// Writes a table for a logical partition at `place`, with the next one at `next`, both
    /// relative to the extended partition.
    fn ebr(image: &mut Image, place: u64, logical: (u8, u32, u32), next: Option<u32>) {
        let at = place as usize * SECTOR;
        put(image, at + 510, &MBR_SIGNATURE);
        let next = next.map_or((0, 0, 0), |next| (0x05, next, 9));
        for (index, (kind, first, sectors)) in [logical, next].into_iter().enumerate() {
            let at = at + MBR_ENTRIES + MBR_ENTRY * index;
            image[at + 4] = kind;
            put(image, at + 8, &first.to_le_bytes());
            put(image, at + 12, &sectors.to_le_bytes());
        }
    }

    #[test]
    fn logical_partitions() {
        let mut image = mbr(&[(0x83, 64, 100), (0x0f, 300, 500)]);
        ebr(&mut image, 300, (0x83, 20, 30), Some(200));
        // Out of the order of the disk, one empty, one beyond the extended partition, one that
        // fills it.
        ebr(&mut image, 500, (0x83, 10, 20), Some(100));
        ebr(&mut image, 400, (0, 0, 0), Some(250));
        ebr(&mut image, 550, (0x83, 1, 250), Some(260));
        ebr(&mut image, 560, (0x83, 40, 200), None);
        let at = |number, first, sectors| Partition { number, extent: Extent { first, sectors } };
        let all = [at(1, 64, 100), at(5, 320, 30), at(6, 510, 20), at(7, 600, 200)];
        assert_eq!(search(&image), all);
        // The chain is a cycle, leaves the extended partition, or leads to a sector without a
        // table.
        for next in [0, 200, 250, 500, 900, u32::MAX, 233] {
            ebr(&mut image, 560, (0x83, 40, 200), Some(next));
            assert_eq!(search(&image), all, "next table at {next}");
        }
        // The chain leads to a sector of a partition, whose client could forge a table there.
        ebr(&mut image, 560, (0x83, 40, 200), Some(333));
        assert_eq!(search(&image), all[..3]);
        // More than are examined: bounded in number and in reads.
        let mut image = mbr(&[(0x05, 300, 1000)]);
        for number in 0..100 {
            let next = Some(2 * number as u32 + 2);
            ebr(&mut image, 300 + 2 * number, (0x83, 1, 1), next);
        }
        let mut reads = 0;
        let found = find(SECTORS, |number, sector| {
            reads += 1;
            let at = number as usize * SECTOR;
            sector.copy_from_slice(image.get(at..at + SECTOR)?);
            Some(())
        });
        assert_eq!((found.partitions.len(), reads), (MAX_PARTITIONS, MAX_PARTITIONS + 1));
    }

    #[test]
    fn a_damaged_gpt_is_replaced_by_its_copy() {
        let mut image = gpt_image();
        image[SECTOR + 40] ^= 1;
        assert_eq!(search(&image), two());
        let mut image = gpt_image();
        image[2 * SECTOR] ^= 1;
        assert_eq!(search(&image), two(), "the entries' checksum");
        image[(SECTORS as usize - 1) * SECTOR] ^= 1;
        assert_eq!(search(&image), []);
    }

    #[test]
    fn overlapping_partitions_are_not_served() {
        let split = |found: ScanResult| -> (std::vec::Vec<u8>, std::vec::Vec<u8>) {
            let served = found.partitions.iter().map(|partition| partition.number).collect();
            (served, found.refused.iter().copied().collect())
        };
        let of_mbr = |entries: &[(u8, u32, u32)]| split(search_all(&mbr(entries)));
        // By a sector, entirely, identical; adjacent.
        let third = (0x83, 900, 10);
        assert_eq!(of_mbr(&[(0x83, 64, 100), (0x83, 163, 9), third]), (vec![3], vec![1, 2]));
        assert_eq!(of_mbr(&[(0x83, 64, 100), (0x83, 70, 9), third]), (vec![3], vec![1, 2]));
        assert_eq!(of_mbr(&[(0x83, 64, 9), (0x83, 64, 9), third]), (vec![3], vec![1, 2]));
        assert_eq!(of_mbr(&[(0x83, 64, 100), (0x83, 164, 9), third]), (vec![1, 2, 3], vec![]));
        // Around the end of 32 bits, and over the table itself.
        assert_eq!(of_mbr(&[(0x83, u32::MAX, 66), third]), (vec![2], vec![]));
        assert_eq!(of_mbr(&[(0x83, 64, u32::MAX), third]), (vec![2], vec![]));
        assert_eq!(of_mbr(&[(0x83, 0, 66), third]), (vec![2], vec![]));

        let of_gpt = |entries: &[(u64, u64, u64)]| split(search_all(&gpt_of(entries)));
        assert_eq!(of_gpt(&[(0, 64, 163), (1, 163, 170), (2, 171, 180)]), (vec![3], vec![1, 2]));
        assert_eq!(of_gpt(&[(0, 64, 163), (1, 164, 170)]), (vec![1, 2], vec![]));
        assert_eq!(of_gpt(&[(0, 64, u64::MAX), (1, 164, 170)]), (vec![2], vec![]));
        assert_eq!(of_gpt(&[(0, 170, 164), (1, u64::MAX, 3)]), (vec![], vec![]));
    }

    #[test]
    fn a_partition_holds_no_table() {
        let of_gpt = |entries: &[(u64, u64, u64)], first: u64, last: u64| {
            let mut image = gpt_of(entries);
            for place in [1, SECTORS - 1] {
                let at = place as usize * SECTOR;
                put(&mut image, at + 40, &first.to_le_bytes());
                put(&mut image, at + 48, &last.to_le_bytes());
                put(&mut image, at + 16, &[0; 4]);
                let sum = CRC.checksum(&image[at..at + 92]);
                put(&mut image, at + 16, &sum.to_le_bytes());
            }
            search_all(&image)
        };
        // A header that permits partitions anywhere.
        let places = [(0, 0), (1, 1), (2, 2), (33, 40), (SECTORS - 40, SECTORS - 33)];
        for (first, last) in places.into_iter().chain([(SECTORS - 1, SECTORS - 1)]) {
            let found = of_gpt(&[(0, first, last), (1, 100, 200)], 0, SECTORS - 1);
            assert_eq!((found.partitions[0].number, found.partitions.len()), (2, 1), "{first}");
            assert_eq!(found.refused, [1], "{first}");
        }
        let found = of_gpt(&[(0, 34, SECTORS - 34)], 0, SECTORS - 1);
        assert_eq!(found.refused, []);
        assert_eq!(found.partitions.len(), 1);

        // Tables of logical partitions: the next one, its own, and a primary partition over all of
        // them.
        let chain = |first: (u32, u32)| {
            let mut image = mbr(&[(0x83, 64, 100), (0x0f, 300, 500)]);
            ebr(&mut image, 300, (0x83, first.0, first.1), Some(200));
            ebr(&mut image, 500, (0x83, 10, 20), None);
            let found = search_all(&image);
            (found.partitions.iter().map(|found| found.number).collect(), found.refused)
        };
        let all: std::vec::Vec<u8> = vec![1, 5, 6];
        assert_eq!(chain((20, 30)), (all, Vec::new()));
        for first in [(0, 30), (20, 181)] {
            assert_eq!(chain(first), (vec![1, 6], [5].into_iter().collect()), "{first:?}");
        }
        assert_eq!(chain((220, 1)), (vec![1], [5, 6].into_iter().collect()));
        let mut image = mbr(&[(0x83, 64, 300), (0x0f, 300, 500), (0x83, 900, 9)]);
        ebr(&mut image, 300, (0x83, 100, 30), None);
        let found = search_all(&image);
        assert_eq!((found.partitions.len(), found.partitions[0].number), (1, 3));
        assert_eq!(found.refused, [1, 5]);
    }

    /// Returns whether no two partitions share a sector.
    fn is_disjoint(partitions: &[Partition]) -> bool {
        partitions.iter().enumerate().all(|(index, one)| {
            partitions[..index].iter().all(|other| !one.extent.overlaps(&other.extent))
        })
    }

    proptest! {
        #[test]
        fn any_chain(changes in prop::collection::vec((0..4 * SECTOR, any::<u8>()), 0..40)) {
            let mut image = mbr(&[(0x83, 64, 100), (0x05, 1, 500)]);
            ebr(&mut image, 1, (0x83, 20, 30), Some(1));
            ebr(&mut image, 2, (0x83, 20, 30), Some(2));
            ebr(&mut image, 3, (0x83, 20, 30), None);
            for (at, byte) in changes {
                image[at] = byte;
            }
            prop_assert!(is_disjoint(&search(&image)));
            for partition in search(&image) {
                prop_assert!(partition.extent.first > 0 && partition.extent.sectors > 0);
                prop_assert!(partition.extent.end() <= SECTORS);
            }
        }

        #[test]
        fn any_bytes(changes in prop::collection::vec((0..3 * SECTOR, any::<u8>()), 0..40), sealed: bool) {
            let mut image = gpt_image();
            for (at, byte) in changes {
                image[at] = byte;
            }
            put(&mut image, 510, &[0x55, 0xaa]);
            if sealed {
                // Valid checksums do not make invalid entries valid.
                let sum = CRC.checksum(&image[2 * SECTOR..][..128 * 128]);
                put(&mut image, SECTOR + 88, &sum.to_le_bytes());
                put(&mut image, SECTOR + 16, &[0; 4]);
                let sum = CRC.checksum(&image[SECTOR..SECTOR + 92]);
                put(&mut image, SECTOR + 16, &sum.to_le_bytes());
            }
            prop_assert!(is_disjoint(&search(&image)));
            for partition in search(&image) {
                prop_assert!(partition.extent.first > 0);
                prop_assert!(partition.extent.sectors > 0);
                prop_assert!(partition.extent.first + partition.extent.sectors <= SECTORS);
            }
        }
    }
}

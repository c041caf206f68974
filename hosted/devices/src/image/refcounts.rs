//! Reference counts of a qcow2 image: comparison with its tables, and their rebuild.
//!
//! Source of the format: QEMU, `docs/interop/qcow2.txt`.
//!
//! A process that exits without closing an image may leave clusters that are counted but not used.
//! An image that is open for writing has the dirty bit set in its header, so the next opener
//! rebuilds the counts first. That needs memory for the L1 table, the table of refcount blocks and
//! a counter for each of at most [`WINDOW`] clusters; larger files take several passes over the
//! tables.
//!
//! Only counts are rebuilt. An image with contradicting tables (two entries with one cluster,
//! entries beyond the end of the file) requires `qemu-img check`, which may have to discard data.

use std::fmt;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Command that repairs other damage.
pub const COMMAND: &str = "qemu-img check -r all FILE";

/// Clusters counted in one pass over the tables.
const WINDOW: u64 = 32 << 20;
/// Largest L1 table and table of refcount blocks in bytes, as in QEMU.
const MAX_L1: u64 = 32 << 20;
const MAX_TABLE: u64 = 8 << 20;

/// Offset bits of a table entry.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Cluster with exactly one reference.
const COPIED: u64 = 1 << 63;
/// Compressed cluster.
const COMPRESSED: u64 = 1 << 62;
/// Cluster that reads as zeros (version 3).
const ZERO: u64 = 1;

/// Dirty bit of the incompatible features.
const DIRTY: u64 = 1;
/// Offset of the incompatible features in the header.
const FEATURES: u64 = 72;
/// Bytes of a version 3 header without optional fields.
const HEADER: usize = 104;
/// Header extensions that own no clusters: end, name of the backing format, names of features.
const PLAIN_EXTENSIONS: [u32; 3] = [0, 0xe279_2aca, 0x6803_f857];

/// A file, or its replacement in tests.
pub trait Medium {
    /// Returns the length in bytes.
    ///
    /// # Errors
    /// Errors of the host.
    fn length(&self) -> io::Result<u64>;

    /// Reads bytes; after the end of the file, zeros.
    ///
    /// # Errors
    /// Errors of the host.
    fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()>;

    /// Writes bytes.
    ///
    /// # Errors
    /// Errors of the host.
    fn write(&self, at: u64, from: &[u8]) -> io::Result<()>;
}

impl Medium for fs::File {
    fn length(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read(&self, at: u64, mut to: &mut [u8]) -> io::Result<()> {
        let mut at = at;
        while !to.is_empty() {
            match self.read_at(to, at) {
                Ok(0) => {
                    to.fill(0);
                    break;
                }
                Ok(done) => (at, to) = (at + done as u64, &mut to[done..]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        self.write_all_at(from, at)
    }
}

/// Reason not to rebuild counts.
#[derive(Debug)]
pub enum ImageError {
    /// Error of the host.
    Host(io::Error),
    /// The tables contradict each other, or the image has unknown features.
    Image(String),
}

impl From<io::Error> for ImageError {
    fn from(error: io::Error) -> Self {
        Self::Host(error)
    }
}

impl fmt::Display for ImageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(error) => error.fmt(f),
            Self::Image(text) => f.write_str(text),
        }
    }
}

fn image_error<T>(text: impl Into<String>) -> Result<T, ImageError> {
    Err(ImageError::Image(text.into()))
}

/// Differences between counts and tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CheckResult {
    /// Clusters with too high a count: leaked until repaired.
    pub leaked: u64,
    /// Clusters with too low a count: they would be reallocated while in use.
    pub missing: u64,
}

/// Header fields about the tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    cluster_bits: u32,
    l1: u64,
    l1_entries: u64,
    /// Table of refcount blocks.
    table: u64,
    table_entries: u64,
    /// Binary logarithm of the bits per count.
    order: u32,
    features: u64,
    /// This module finds all clusters in use.
    is_plain: bool,
}

impl Header {
    /// Reads the header of an image.
    ///
    /// # Errors
    /// Not an image header, or the positions of its tables are invalid.
    pub fn read(medium: &impl Medium) -> Result<Self, ImageError> {
        let mut bytes = [0; HEADER];
        medium.read(0, &mut bytes)?;
        let word = |at: usize| u32::from_be_bytes([0, 1, 2, 3].map(|byte| bytes[at + byte]));
        let long = |at: usize| u64::from(word(at)) << 32 | u64::from(word(at + 4));
        let (version, cluster_bits) = (word(4), word(20));
        if bytes[..4] != *b"QFI\xfb" || !(2..=3).contains(&version) {
            return image_error("it is not a qcow2 image of version 2 or 3");
        }
        if !(9..=21).contains(&cluster_bits) {
            return image_error(format!(
                "its cluster size is 2^{cluster_bits} bytes (supported: 2^9 to 2^21)"
            ));
        }
        let is_new = version == 3;
        let (features, order) = if is_new { (long(72), word(96)) } else { (0, 4) };
        if order > 6 {
            return image_error(format!("its reference counts have 2^{order} bits (limit 64)"));
        }
        // The name of a backing file is in the cluster of the header.
        let name_end = long(8).saturating_add(word(16).into());
        let has_near_name = long(8) == 0 || name_end <= 1 << cluster_bits;
        // No encryption or snapshots.
        let is_alone = has_near_name && word(32) == 0 && word(60) == 0;
        let header = Self {
            cluster_bits,
            l1: long(40),
            l1_entries: word(36).into(),
            table: long(48),
            table_entries: (u64::from(word(56)) << cluster_bits) / 8,
            order,
            features,
            is_plain: is_new && features & !DIRTY == 0 && is_alone,
        };
        let extensions = if is_new { word(100).into() } else { 0 };
        let is_plain = header.is_plain && header.has_plain_extensions(medium, extensions)?;
        Ok(Self { is_plain, ..header })
    }

    /// Returns whether no extension from this offset on can own clusters.
    fn has_plain_extensions(&self, medium: &impl Medium, first: u64) -> io::Result<bool> {
        let mut at = first;
        while at + 8 <= self.cluster() {
            let mut head = [0; 8];
            medium.read(at, &mut head)?;
            let [kind, length] =
                [0, 4].map(|at| u32::from_be_bytes([0, 1, 2, 3].map(|byte| head[at + byte])));
            if !PLAIN_EXTENSIONS.contains(&kind) {
                return Ok(false);
            }
            if kind == 0 {
                return Ok(true);
            }
            at += 8 + u64::from(length).next_multiple_of(8);
        }
        Ok(false)
    }

    /// Returns whether the image was open for writing and has not been closed.
    pub const fn is_dirty(&self) -> bool {
        self.features & DIRTY != 0
    }

    /// Returns whether the image supports the dirty bit and [`Self::rebuild`]. Version 2 has no
    /// such bit; images with bitmaps, encryption or snapshots own clusters that this module does
    /// not find.
    pub const fn is_plain(&self) -> bool {
        self.is_plain
    }

    /// Sets or clears the dirty bit in the file.
    ///
    /// # Errors
    /// Errors of the host.
    pub fn write_dirty(&self, medium: &impl Medium, is_dirty: bool) -> io::Result<()> {
        let features = self.features & !DIRTY | if is_dirty { DIRTY } else { 0 };
        medium.write(FEATURES, &features.to_be_bytes())
    }

    /// Returns whether the first cluster, with the header, is counted as used. Otherwise the
    /// library would allocate it; without a refcount block for it, it would recurse in the
    /// allocation until its stack overflows.
    ///
    /// # Errors
    /// Errors of the host.
    pub fn counts_itself(&self, medium: &impl Medium) -> io::Result<bool> {
        let block = read_table(medium, self.table, 1)?[0] & OFFSET;
        let mut first = [0; 8];
        medium.read(block, &mut first)?;
        Ok(block != 0 && get_count(&first, 0, self.order) != 0)
    }

    /// Compares all counts with the tables and corrects them in the file.
    ///
    /// # Errors
    /// Errors of the host, or more than the counts is wrong.
    pub fn rebuild(&self, medium: &impl Medium) -> Result<CheckResult, ImageError> {
        Tables::load(self, medium)?.compare(WINDOW, true)
    }

    /// Compares all counts with the tables.
    ///
    /// # Errors
    /// Errors of the host, or the tables contradict each other.
    #[cfg(test)]
    pub fn check(&self, medium: &impl Medium) -> Result<CheckResult, ImageError> {
        Tables::load(self, medium)?.compare(WINDOW, false)
    }

    /// Returns the bytes of a cluster.
    const fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Returns the number of counts in a refcount block.
    const fn counts(&self) -> u64 {
        (8 << self.cluster_bits) >> self.order
    }
}

/// Reads big-endian 64-bit numbers from this offset on.
fn read_table(medium: &impl Medium, at: u64, entries: u64) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; entries as usize * 8];
    medium.read(at, &mut bytes)?;
    let entry = |bytes: &[u8]| (0..8).fold(0, |value, at| value << 8 | u64::from(bytes[at]));
    Ok(bytes.chunks_exact(8).map(entry).collect())
}

/// Tables that are read repeatedly.
struct Tables<'a, M> {
    header: &'a Header,
    medium: &'a M,
    /// Clusters of the file; the last may be partial.
    clusters: u64,
    l1: Vec<u64>,
    /// Offsets of refcount blocks.
    table: Vec<u64>,
}

/// Uses of each cluster in a window.
struct Counters {
    first: u64,
    counts: Vec<u16>,
}

impl Counters {
    /// A cluster with one use that permits no other.
    const ALONE: u16 = 1 << 15;

    /// Counts a use of these clusters.
    fn add(&mut self, clusters: Range<u64>, is_shared: bool) -> Result<(), ImageError> {
        let end = self.first + self.counts.len() as u64;
        for cluster in clusters.start.max(self.first)..clusters.end.min(end) {
            let count = &mut self.counts[(cluster - self.first) as usize];
            *count = match (*count, is_shared) {
                (0, false) => Self::ALONE | 1,
                (count, true) if count < Self::ALONE - 1 => count + 1,
                _ => return image_error(format!("cluster {cluster} is in use twice")),
            };
        }
        Ok(())
    }

    /// Returns the counts of these clusters, as far as the window has them; they must not begin
    /// before it.
    fn of(&self, clusters: &Range<u64>) -> impl Iterator<Item = u64> {
        let index = |cluster: u64| (cluster - self.first).min(self.counts.len() as u64) as usize;
        let counts = &self.counts[index(clusters.start)..index(clusters.end)];
        counts.iter().map(|count| (count & !Self::ALONE).into())
    }
}

impl<'a, M: Medium> Tables<'a, M> {
    fn load(header: &'a Header, medium: &'a M) -> Result<Self, ImageError> {
        if !header.is_plain {
            return image_error("it has snapshots, bitmaps, encryption or unknown features");
        }
        if header.l1_entries * 8 > MAX_L1 || header.table_entries * 8 > MAX_TABLE {
            return image_error(format!(
                "its tables have {} and {} bytes (limits {MAX_L1} and {MAX_TABLE})",
                header.l1_entries * 8,
                header.table_entries * 8
            ));
        }
        let clusters = medium.length()?.div_ceil(header.cluster());
        let l1 = read_table(medium, header.l1, header.l1_entries)?;
        let table = read_table(medium, header.table, header.table_entries)?;
        Ok(Self { header, medium, clusters, l1, table })
    }

    /// Compares the counts of all refcount blocks, in passes over windows of `window` clusters.
    fn compare(&self, window: u64, writes: bool) -> Result<CheckResult, ImageError> {
        let counts = self.header.counts();
        let blocks = (window / counts).max(1) as usize;
        let mut found = CheckResult::default();
        for (number, entries) in self.table.chunks(blocks).enumerate() {
            let first = (number * blocks) as u64 * counts;
            let end = (first + entries.len() as u64 * counts).min(self.clusters);
            let length = end.saturating_sub(first) as usize;
            let mut used = Counters { first, counts: vec![0; length] };
            // The first pass has verified that no cluster after the end of the file is in use.
            if length != 0 || number == 0 {
                self.count(&mut used)?;
            }
            for (index, entry) in entries.iter().enumerate() {
                let first = first + index as u64 * counts;
                self.compare_block(*entry, first, &used, writes, &mut found)?;
            }
        }
        Ok(found)
    }

    /// Counts all uses of the clusters of a window.
    fn count(&self, used: &mut Counters) -> Result<(), ImageError> {
        let header = self.header;
        used.add(0..1, false)?;
        used.add(self.clusters_of(header.l1, header.l1_entries * 8)?, false)?;
        used.add(self.clusters_of(header.table, header.table_entries * 8)?, false)?;
        for entry in self.table.iter().filter(|entry| **entry != 0) {
            if entry & !OFFSET != 0 {
                return image_error(format!("a refcount block has the invalid offset {entry:#x}"));
            }
            used.add(self.clusters_of(*entry, header.cluster())?, false)?;
        }
        for entry in self.l1.iter().filter(|entry| **entry != 0) {
            if entry & !(OFFSET | COPIED) != 0 {
                return image_error(format!("an L2 table has the invalid offset {entry:#x}"));
            }
            let at = entry & OFFSET;
            used.add(self.clusters_of(at, header.cluster())?, false)?;
            for entry in read_table(self.medium, at, header.cluster() / 8)? {
                self.count_entry(entry, used)?;
            }
        }
        Ok(())
    }

    /// Counts the clusters of an L2 entry.
    fn count_entry(&self, entry: u64, used: &mut Counters) -> Result<(), ImageError> {
        if entry & COMPRESSED != 0 {
            // Offset in bytes, and the number of sectors after the first.
            let bits = 62 - (self.header.cluster_bits - 8);
            let at = entry & ((1 << bits) - 1);
            let more = (entry & (COMPRESSED - 1)) >> bits;
            let first = at >> self.header.cluster_bits;
            let end = (at & !511) + (more + 1) * 512;
            let end = end.div_ceil(self.header.cluster());
            return used.add(self.within(first..end)?, true);
        }
        if entry & !(OFFSET | COPIED | ZERO) != 0 {
            return image_error(format!("a cluster has the invalid offset {entry:#x}"));
        }
        match entry & OFFSET {
            0 => Ok(()),
            at => used.add(self.clusters_of(at, self.header.cluster())?, false),
        }
    }

    /// Returns the clusters of an object that begins with a cluster.
    fn clusters_of(&self, at: u64, length: u64) -> Result<Range<u64>, ImageError> {
        if !at.is_multiple_of(self.header.cluster()) {
            return image_error(format!("{at:#x} is not the offset of a cluster"));
        }
        let first = at >> self.header.cluster_bits;
        self.within(first..first + length.div_ceil(self.header.cluster()))
    }

    /// Returns these clusters if they are in the file and have counts.
    fn within(&self, clusters: Range<u64>) -> Result<Range<u64>, ImageError> {
        let counted = self.table.len() as u64 * self.header.counts();
        match clusters.end <= self.clusters.min(counted) || clusters.is_empty() {
            true => Ok(clusters),
            false => image_error(format!(
                "cluster {} is in use, but the file has {} and counts for {counted}",
                clusters.end - 1,
                self.clusters
            )),
        }
    }

    /// Compares a refcount block with the uses of the clusters from `first` on, and corrects it if
    /// `writes` is set.
    fn compare_block(
        &self,
        entry: u64,
        first: u64,
        used: &Counters,
        writes: bool,
        found: &mut CheckResult,
    ) -> Result<(), ImageError> {
        let (header, counts) = (self.header, self.header.counts() as usize);
        let clusters = first..first + counts as u64;
        if entry == 0 {
            return match used.of(&clusters).position(|count| count != 0) {
                None => Ok(()),
                Some(index) => {
                    image_error(format!("no reference count for cluster {}", first + index as u64))
                }
            };
        }
        let mut block = vec![0; header.cluster() as usize];
        self.medium.read(entry, &mut block)?;
        let before = *found;
        let unused = std::iter::repeat(0);
        for (index, wanted) in used.of(&clusters).chain(unused).take(counts).enumerate() {
            let is = get_count(&block, index, header.order);
            if header.order < 4 && wanted >> (1 << header.order) != 0 {
                let cluster = first + index as u64;
                return image_error(format!(
                    "cluster {cluster} has more uses than its count can represent"
                ));
            }
            found.leaked += u64::from(is > wanted);
            found.missing += u64::from(is < wanted);
            if is != wanted {
                set_count(&mut block, index, header.order, wanted);
            }
        }
        if writes && *found != before {
            self.medium.write(entry, &block)?;
        }
        Ok(())
    }
}

/// Reads a count of a refcount block: big-endian from 8 bits on; smaller counts fill a byte from
/// its lowest bits.
fn get_count(block: &[u8], index: usize, order: u32) -> u64 {
    if order < 3 {
        let (bits, in_byte) = (1 << order, 8 >> order);
        let shift = index % in_byte * bits;
        return u64::from(block[index / in_byte] >> shift & ((1 << bits) - 1));
    }
    let bytes = 1 << (order - 3);
    let count = block[index * bytes..(index + 1) * bytes].iter();
    count.fold(0, |count, byte| count << 8 | u64::from(*byte))
}

/// Writes a count of a refcount block; the value must fit.
fn set_count(block: &mut [u8], index: usize, order: u32, value: u64) {
    if order < 3 {
        let (bits, in_byte) = (1 << order, 8 >> order);
        let shift = index % in_byte * bits;
        let byte = &mut block[index / in_byte];
        *byte = *byte & !(((1 << bits) - 1) << shift) | (value as u8) << shift;
        return;
    }
    let bytes = 1 << (order - 3);
    let count = &mut block[index * bytes..(index + 1) * bytes];
    count.copy_from_slice(&value.to_be_bytes()[8 - bytes..]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    impl Medium for RefCell<Vec<u8>> {
        fn length(&self) -> io::Result<u64> {
            Ok(self.borrow().len() as u64)
        }

        fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
            let bytes = self.borrow();
            let rest = bytes.get(at as usize..).unwrap_or_default();
            let rest = rest.iter().chain(std::iter::repeat(&0));
            to.iter_mut().zip(rest).for_each(|(byte, is)| *byte = *is);
            Ok(())
        }

        fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
            self.borrow_mut()[at as usize..][..from.len()].copy_from_slice(from);
            Ok(())
        }
    }

    const CLUSTER: u64 = 512;

    /// An image with clusters of 512 bytes and counts of 64 bits: header, table of refcount blocks,
    /// two of these (for 64 clusters each), L1 table, L2 table, two data clusters, two clusters of
    /// compressed data, and a free one.
    fn image() -> RefCell<Vec<u8>> {
        let medium = RefCell::new(vec![0; 11 * CLUSTER as usize]);
        let put = |at: u64, value: u64| medium.write(at, &value.to_be_bytes()).unwrap();
        put(0, 0x5146_49fb_0000_0003);
        put(16, 9);
        put(24, 64 * CLUSTER);
        put(36 & !7, 1);
        put(40, 4 * CLUSTER);
        put(48, CLUSTER);
        put(56, 1 << 32);
        put(96, 6 << 32 | 104);
        put(CLUSTER, 2 * CLUSTER);
        put(CLUSTER + 8, 3 * CLUSTER);
        put(4 * CLUSTER, (5 * CLUSTER) | COPIED);
        put(5 * CLUSTER, (6 * CLUSTER) | COPIED);
        put(5 * CLUSTER + 8, (7 * CLUSTER) | COPIED | ZERO);
        put(5 * CLUSTER + 16, ZERO);
        // The number of sectors after the first begins at bit 61.
        put(5 * CLUSTER + 24, COMPRESSED | (8 * CLUSTER + 100));
        put(5 * CLUSTER + 32, COMPRESSED | 1 << 61 | (8 * CLUSTER + 300));
        for (cluster, count) in (0..10).zip([1, 1, 1, 1, 1, 1, 1, 1, 2, 1]) {
            put(2 * CLUSTER + 8 * cluster, count);
        }
        medium
    }

    #[test]
    fn counts_are_rebuilt() {
        let medium = image();
        let header = Header::read(&medium).unwrap();
        assert!(header.is_plain() && !header.is_dirty());
        assert_eq!(header.check(&medium).unwrap(), CheckResult::default());
        let put = |cluster: u64, count: u64| {
            medium.write(2 * CLUSTER + 8 * cluster, &count.to_be_bytes()).unwrap();
        };
        let good = medium.borrow().clone();
        // A free L2 table, an unused cluster, one after the end of the file, compressed data.
        [(5, 0), (10, 1), (20, 7), (8, 1)]
            .iter()
            .for_each(|(cluster, count)| put(*cluster, *count));
        // The first cluster of the second block.
        medium.write(3 * CLUSTER, &1_u64.to_be_bytes()).unwrap();
        let found = CheckResult { leaked: 3, missing: 2 };
        assert_eq!(header.check(&medium).unwrap(), found);
        let broken = medium.borrow().clone();
        for window in [1, 64, 65, 128, WINDOW] {
            medium.replace(broken.clone());
            let tables = Tables::load(&header, &medium).unwrap();
            assert_eq!(tables.compare(window, true).unwrap(), found);
            assert!(*medium.borrow() == good);
        }
    }

    /// A kill leaves the blocks before some byte corrected, and the dirty bit set.
    #[test]
    fn a_killed_rebuild_is_done_again() {
        let medium = image();
        Header::read(&medium).unwrap().write_dirty(&medium, true).unwrap();
        let good = medium.borrow().clone();
        medium.write(2 * CLUSTER, &[1; 2 * CLUSTER as usize]).unwrap();
        let broken = medium.borrow().clone();
        for cut in (2 * CLUSTER as usize..=4 * CLUSTER as usize).step_by(100) {
            medium.replace([&good[..cut], &broken[cut..]].concat());
            let header = Header::read(&medium).unwrap();
            assert!(header.is_dirty(), "the next opener repairs it");
            header.rebuild(&medium).unwrap();
            assert!(*medium.borrow() == good, "{cut}");
        }
    }

    #[test]
    fn the_dirty_bit() {
        let medium = image();
        let good = medium.borrow().clone();
        Header::read(&medium).unwrap().write_dirty(&medium, true).unwrap();
        let header = Header::read(&medium).unwrap();
        assert!(header.is_dirty() && header.is_plain());
        header.write_dirty(&medium, false).unwrap();
        assert!(*medium.borrow() == good);
    }

    #[test]
    fn contradictions_are_refused() {
        for (at, value, said) in [
            (4 * CLUSTER, (4 * CLUSTER) | COPIED, "in use twice"),
            (4 * CLUSTER, (5 * CLUSTER) | 1, "L2 table has the invalid offset"),
            (4 * CLUSTER, 11 * CLUSTER, "the file has 11"),
            (4 * CLUSTER, u64::MAX, "L2 table has the invalid offset"),
            (5 * CLUSTER, 0, ""),
            (5 * CLUSTER, 4 * CLUSTER, "cluster 4 is in use twice"),
            (5 * CLUSTER, OFFSET, "the file has 11"),
            (5 * CLUSTER, (6 * CLUSTER) | 2, "the invalid offset"),
            (5 * CLUSTER, COMPRESSED | (6 * CLUSTER), ""),
            (5 * CLUSTER, COMPRESSED | (5 * CLUSTER), "in use twice"),
            (5 * CLUSTER, u64::MAX, "the file has 11"),
            (CLUSTER, 0, "no reference count for cluster 0"),
            (CLUSTER, 3 * CLUSTER, "in use twice"),
            (CLUSTER + 8, 3 * CLUSTER + 8, "refcount block"),
            (40, 2 * CLUSTER, "in use twice"),
            (40, 100, "the offset of a cluster"),
            (48, u64::MAX << 9, ""),
            (56, u64::MAX << 32, "limits"),
            (32, u64::MAX >> 32, "tables have"),
        ] {
            let medium = image();
            medium.write(at, &value.to_be_bytes()).unwrap();
            let before = medium.borrow().clone();
            let result = Header::read(&medium).and_then(|header| header.rebuild(&medium));
            match result {
                Err(error) => assert!(error.to_string().contains(said), "{at} {value:#x}: {error}"),
                Ok(_) => assert!(said.is_empty(), "{at} {value:#x}"),
            }
            assert!(said.is_empty() || *medium.borrow() == before, "{at} {value:#x}");
        }
    }

    #[test]
    fn what_owns_clusters_otherwise_is_not_marked() {
        // Version 2, a distant name of a backing file, encryption, snapshots, external data,
        // bitmaps.
        for (at, value) in [(7, 2), (8, 1), (35, 1), (63, 1), (79, 4), (104, 0x23)] {
            let medium = image();
            medium.borrow_mut()[at] = value;
            let header = Header::read(&medium).unwrap();
            assert!(!header.is_plain(), "{at}");
            assert!(header.rebuild(&medium).is_err());
        }
        // A backing file's name in the same cluster.
        let medium = image();
        medium.borrow_mut()[15] = 120;
        medium.borrow_mut()[19] = 9;
        assert!(Header::read(&medium).unwrap().is_plain());
        let medium = image();
        medium.write(104, &0x6803_f857_0000_0009_u64.to_be_bytes()).unwrap();
        assert!(Header::read(&medium).unwrap().is_plain());
        // The end marker is missing in the cluster.
        medium.write(104, &0x6803_f857_ffff_ffff_u64.to_be_bytes()).unwrap();
        assert!(!Header::read(&medium).unwrap().is_plain());
    }

    #[test]
    fn counts_of_all_widths() {
        for order in 0..=6 {
            let most = u64::MAX >> (64 - (1 << order));
            let mut block = [0xa5; 64];
            for index in 0..512 >> order {
                for value in [most, 0, most.min(2) / 2] {
                    let before = block;
                    set_count(&mut block, index, order, value);
                    assert_eq!(get_count(&block, index, order), value);
                    let others = (0..512 >> order).filter(|other| *other != index);
                    for other in others {
                        let count = |block: &[u8]| get_count(block, other, order);
                        assert_eq!(count(&block), count(&before));
                    }
                }
            }
        }
    }
}

//! Record of a disk.

use super::{pack, unpack};

/// Record of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DiskRecord {
    /// Sectors of 512 bytes.
    pub sectors: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// Another process carries the requests out; the wedge inherits no descriptor for it.
    pub is_external: bool,
    /// Serial number reported to the guest, padded with zeros.
    pub serial: [u8; 20],
}

impl DiskRecord {
    /// Words of the record.
    pub const WORDS: usize = 5;

    /// Encodes the record.
    pub fn to_words(&self) -> [u64; Self::WORDS] {
        let flags = u64::from(self.read_only) | u64::from(self.is_external) << 1;
        let mut words = [self.sectors, flags, 0, 0, 0];
        pack(&self.serial, &mut words[2..]);
        words
    }

    /// Decodes the record.
    pub fn from_words(words: &[u64; Self::WORDS]) -> Self {
        let [sectors, flags, name @ ..] = words;
        let mut serial = [0; 20];
        unpack(name, &mut serial);
        Self { sectors: *sectors, read_only: flags & 1 != 0, is_external: flags & 2 != 0, serial }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_round_trips() {
        let serial = *b"abcdefghijklmnopqrst";
        let disk = DiskRecord { sectors: 7, read_only: true, is_external: false, serial };
        assert_eq!(DiskRecord::from_words(&disk.to_words()), disk);
        let disk = DiskRecord { read_only: false, is_external: true, ..disk };
        assert_eq!(DiskRecord::from_words(&disk.to_words()), disk);
        assert_eq!(DiskRecord::from_words(&[0; DiskRecord::WORDS]), DiskRecord::default());
    }
}

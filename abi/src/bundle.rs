//! Boot bundle: the single boot module, which contains root, servers, VMM, guest images and the
//! compiled system description. `parador system build` creates it; the kernel reads it only to find
//! `root`.
//!
//! Layout: one header page, then the files, each aligned to a page. All integers are little-endian.

/// "PARADORB".
pub const MAGIC: u64 = 0x4252_4f44_4152_4150;
/// Format version.
pub const VERSION: u32 = 1;
/// Maximum number of files in a bundle.
pub const MAX_FILES: usize = 63;
/// Maximum length of a name in bytes; shorter names are zero-padded.
pub const NAME_LENGTH: usize = 48;
/// Length of the header in bytes, and alignment of files.
pub const HEADER_LENGTH: usize = 4096;
/// Name of the root task's ELF executable.
pub const ROOT_NAME: &str = "root";
/// Name of the compiled system description.
pub const SYSTEM_NAME: &str = "system";

const ENTRY_LENGTH: usize = 64;

/// A file in the bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct File<'a> {
    /// Name, unique in the bundle.
    pub name: &'a str,
    /// Offset of the first byte in the bundle; page-aligned.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Error of bundle parsing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BundleError {
    /// The bundle is shorter than its header or ends before one of its files.
    Truncated,
    /// Wrong magic number, version or number of files.
    BadHeader,
    /// An entry is misaligned, or its name is not UTF-8.
    BadEntry,
}

/// Validated header of a bundle.
#[derive(Clone, Copy, Debug)]
pub struct Header<'a> {
    bytes: &'a [u8],
    count: usize,
}

impl<'a> Header<'a> {
    /// Parses the header. `bytes` must contain at least the header; `total` is the length of the
    /// bundle.
    pub fn parse(bytes: &'a [u8], total: u64) -> Result<Self, BundleError> {
        if bytes.len() < HEADER_LENGTH || total < HEADER_LENGTH as u64 {
            return Err(BundleError::Truncated);
        }
        if read_u64(bytes, 0) != MAGIC || read_u64(bytes, 8) as u32 != VERSION {
            return Err(BundleError::BadHeader);
        }
        let count = (read_u64(bytes, 8) >> 32) as usize;
        if count > MAX_FILES {
            return Err(BundleError::BadHeader);
        }
        let header = Self { bytes, count };
        for index in 0..count {
            let file = header.entry(index).ok_or(BundleError::BadEntry)?;
            if file.offset % HEADER_LENGTH as u64 != 0 {
                return Err(BundleError::BadEntry);
            }
            match file.offset.checked_add(file.length) {
                Some(end) if end <= total => {}
                _ => return Err(BundleError::Truncated),
            }
        }
        Ok(header)
    }

    fn entry(&self, index: usize) -> Option<File<'a>> {
        let at = ENTRY_LENGTH + index * ENTRY_LENGTH;
        let raw = &self.bytes[at..at + NAME_LENGTH];
        let end = raw.iter().position(|&byte| byte == 0).unwrap_or(NAME_LENGTH);
        Some(File {
            name: core::str::from_utf8(&raw[..end]).ok()?,
            offset: read_u64(self.bytes, at + NAME_LENGTH),
            length: read_u64(self.bytes, at + NAME_LENGTH + 8),
        })
    }

    /// Files of the bundle, in order.
    pub fn files(&self) -> impl Iterator<Item = File<'a>> + '_ {
        (0..self.count).filter_map(|index| self.entry(index))
    }

    /// Returns the file with this name.
    pub fn find(&self, name: &str) -> Option<File<'a>> {
        self.files().find(|file| file.name == name)
    }
}

fn read_u64(bytes: &[u8], at: usize) -> u64 {
    let mut raw = [0; 8];
    raw.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(raw)
}

/// Creates a header for files with these names and lengths, in order, and passes the offset of each
/// file to `place`. `None` if there are too many files or a name is too long.
pub fn write_header(
    files: &[(&str, u64)],
    mut place: impl FnMut(usize, u64),
) -> Option<[u8; HEADER_LENGTH]> {
    if files.len() > MAX_FILES {
        return None;
    }
    let mut header = [0; HEADER_LENGTH];
    header[..8].copy_from_slice(&MAGIC.to_le_bytes());
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&(files.len() as u32).to_le_bytes());
    let mut offset = HEADER_LENGTH as u64;
    for (index, (name, length)) in files.iter().enumerate() {
        if name.len() > NAME_LENGTH {
            return None;
        }
        let at = ENTRY_LENGTH + index * ENTRY_LENGTH;
        header[at..at + name.len()].copy_from_slice(name.as_bytes());
        header[at + NAME_LENGTH..at + NAME_LENGTH + 8].copy_from_slice(&offset.to_le_bytes());
        header[at + NAME_LENGTH + 8..at + ENTRY_LENGTH].copy_from_slice(&length.to_le_bytes());
        place(index, offset);
        offset = (offset + length).next_multiple_of(HEADER_LENGTH as u64);
    }
    Some(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip() {
        let mut offsets = [0; 2];
        let header =
            write_header(&[("root", 5000), ("system", 1)], |index, at| offsets[index] = at)
                .unwrap();
        assert_eq!(offsets, [4096, 12288]);
        let parsed = Header::parse(&header, 12289).unwrap();
        assert_eq!(parsed.find("system"), Some(File { name: "system", offset: 12288, length: 1 }));
        assert_eq!(parsed.files().count(), 2);
        assert!(parsed.find("vmm").is_none());
    }

    #[test]
    fn truncated_or_foreign() {
        let header = write_header(&[("root", 5000)], |_, _| {}).unwrap();
        assert_eq!(Header::parse(&header, 9000).err(), Some(BundleError::Truncated));
        assert_eq!(Header::parse(&header[..100], 9096).err(), Some(BundleError::Truncated));
        assert_eq!(Header::parse(&[0; 4096], 9096).err(), Some(BundleError::BadHeader));
    }
}

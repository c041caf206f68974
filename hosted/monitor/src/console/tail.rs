//! File with the end of a console's output: a guest that prints without end does not fill the
//! host's file system.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes that are kept at least, and half of those that the file has at most.
const KEPT: usize = 64 << 10;

/// File that keeps the last 64 to 128 KiB that were written to it.
pub struct TailFile {
    file: File,
    /// Bytes in the file.
    length: usize,
}

impl TailFile {
    /// Creates or truncates the file.
    ///
    /// # Errors
    /// It cannot be created.
    pub fn create(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true).open(path)?;
        Ok(Self { file, length: 0 })
    }

    /// Appends bytes, and drops the oldest ones if there are too many.
    ///
    /// # Errors
    /// The file system is full, or fails.
    pub fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let bytes = &bytes[bytes.len().saturating_sub(KEPT)..];
        match bytes.len() {
            KEPT => self.length = 0,
            more if self.length + more > 2 * KEPT => self.drop_oldest()?,
            _ => {}
        }
        self.file.write_all_at(bytes, self.length as u64)?;
        self.length += bytes.len();
        // A write in place of others may have left some behind it.
        self.file.set_len(self.length as u64)
    }

    fn drop_oldest(&mut self) -> io::Result<()> {
        let mut kept = vec![0; self.length.min(KEPT)];
        let first = self.length - kept.len();
        self.file.read_exact_at(&mut kept, first as u64)?;
        self.file.write_all_at(&kept, 0)?;
        self.length = kept.len();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_end_of_the_output_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("console");
        fs::write(&path, "older").unwrap();
        let mut tail = TailFile::create(&path).unwrap();
        let mut all = Vec::new();
        for round in 0..3000_u32 {
            let size = if round % 1000 == 999 { 3 * KEPT } else { (round % 200) as usize };
            let bytes: Vec<u8> = (0..size).map(|index| (round as usize + index) as u8).collect();
            tail.append(&bytes).unwrap();
            all.extend(bytes);
            let found = fs::read(&path).unwrap();
            assert!(found.len() <= 2 * KEPT && found.len() >= all.len().min(KEPT), "{round}");
            assert!(all.ends_with(&found), "{round}");
        }
    }
}

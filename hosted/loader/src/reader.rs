//! Kernel file, of which parts are read when they are needed: a copy of the whole file in fresh
//! memory costs more time than everything else before the start of a VM.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::fs::FileExt;

use object::read::ReadCache;
use rustix::fs::{MemfdFlags, memfd_create};

/// Most bytes of a kernel that is read as a whole: a pipe or device may have no end.
pub const MAX_KERNEL: u64 = 1 << 30;

/// Open kernel file.
pub struct KernelReader {
    file: File,
    /// Parts that the ELF parser has asked for.
    parts: ReadCache<File>,
}

impl KernelReader {
    /// Takes an open file. A pipe is read to its end, up to 1 GiB.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn new(mut file: File) -> io::Result<Self> {
        if !file.metadata()?.is_file() {
            let mut copy = File::from(memfd_create("parador-kernel", MemfdFlags::CLOEXEC)?);
            if io::copy(&mut (&file).take(MAX_KERNEL + 1), &mut copy)? > MAX_KERNEL {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
            copy.rewind()?;
            file = copy;
        }
        let parts = ReadCache::new(file.try_clone()?);
        Ok(Self { file, parts })
    }

    /// Returns the file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns the parts for a parser of [`object`].
    pub fn parts(&self) -> &ReadCache<File> {
        &self.parts
    }

    /// Reads all of `length` bytes from `offset` on in blocks of at most `block` bytes, which
    /// `act` gets with the offset of their first byte from the start of the range.
    ///
    /// # Errors
    /// The file cannot be read or ends before; those of `act`.
    pub(crate) fn read_blocks<E: From<io::Error>>(
        &self,
        offset: u64,
        length: u64,
        block: usize,
        mut act: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut room = vec![0; usize::try_from(length).unwrap_or(block).min(block)];
        let mut done = 0;
        while done < length {
            let count = usize::try_from(length - done).unwrap_or(block).min(block);
            let from = offset.checked_add(done).ok_or(io::ErrorKind::UnexpectedEof);
            self.file.read_exact_at(&mut room[..count], from.map_err(io::Error::from)?)?;
            act(done, &room[..count])?;
            done += count as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use object::ReadRef;
    use std::io::Write;
    use std::os::fd::OwnedFd;

    #[test]
    fn pipes_and_blocks() {
        let (pipe, mut writer) = io::pipe().unwrap();
        writer.write_all(b"0123456789").unwrap();
        drop(writer);
        let reader = KernelReader::new(File::from(OwnedFd::from(pipe))).unwrap();
        assert_eq!(reader.parts().read_bytes_at(2, 3), Ok(&b"234"[..]));
        let mut blocks = Vec::new();
        let mut take = |at, bytes: &[u8]| {
            blocks.push((at, bytes.to_vec()));
            Ok::<_, io::Error>(())
        };
        reader.read_blocks(1, 7, 3, &mut take).unwrap();
        let error = reader.read_blocks(8, 3, 16, &mut take).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        assert!(reader.read_blocks(u64::MAX, 2, 1, &mut take).is_err());
        let endless = KernelReader::new(File::open("/dev/zero").unwrap()).err().unwrap();
        assert_eq!(endless.kind(), io::ErrorKind::FileTooLarge);
        let whole = [(0, b"123".to_vec()), (3, b"456".to_vec()), (6, b"7".to_vec())];
        assert_eq!(blocks, whole);
    }
}

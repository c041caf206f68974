//! Process memory for large, short-lived data such as a kernel file.

use std::fs::File;
use std::io::{self, Read};
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;
use std::vec::Vec;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// A byte buffer in pages as large as the host provides: filling 4 KiB pages takes longer than
/// copying their content.
#[derive(Debug)]
pub struct Large {
    address: NonNull<u8>,
    length: usize,
}

// SAFETY: it owns its memory, as a vector does.
unsafe impl Send for Large {}
// SAFETY: a shared reference only permits reads.
unsafe impl Sync for Large {}

impl Large {
    /// Creates `length` zero bytes.
    ///
    /// # Errors
    /// If the host has no free memory.
    pub fn zeroed(length: usize) -> io::Result<Self> {
        if length == 0 {
            return Ok(Self { address: NonNull::dangling(), length });
        }
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses a free range.
        let address =
            unsafe { mmap_anonymous(ptr::null_mut(), length, rights, MapFlags::PRIVATE)? };
        let own = NonNull::new(address.cast()).map(|address| Self { address, length });
        // SAFETY: the range has just been mapped; only the size of its pages changes. Not every
        // host has large pages.
        let _ = unsafe { madvise(address, length, Advice::LinuxHugepage) };
        own.ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// Creates a copy of `bytes`.
    ///
    /// # Errors
    /// See [`Self::zeroed`].
    pub fn copy_of(bytes: &[u8]) -> io::Result<Self> {
        let mut copy = Self::zeroed(bytes.len())?;
        copy.copy_from_slice(bytes);
        Ok(copy)
    }

    /// Reads a file. A file that grows meanwhile is read to its first length, one that shrinks to
    /// its end.
    ///
    /// # Errors
    /// If it cannot be read, or as for [`Self::zeroed`].
    pub fn read(file: &mut File) -> io::Result<Self> {
        let length = usize::try_from(file.metadata()?.len());
        if length == Ok(0) {
            // A pipe, or another file without a length.
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            return Self::copy_of(&bytes);
        }
        let mut bytes = Self::zeroed(length.map_err(|_| io::ErrorKind::OutOfMemory)?)?;
        let mut used = 0;
        while used < bytes.len() {
            match file.read(&mut bytes[used..]) {
                Ok(0) => return Self::copy_of(&bytes[..used]),
                Ok(count) => used += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(bytes)
    }
}

impl Deref for Large {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: this object owns the memory, mapped and initialised for its whole length.
        unsafe { slice::from_raw_parts(self.address.as_ptr(), self.length) }
    }
}

impl DerefMut for Large {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; the object is borrowed mutably.
        unsafe { slice::from_raw_parts_mut(self.address.as_ptr(), self.length) }
    }
}

impl Drop for Large {
    fn drop(&mut self) {
        if self.length != 0 {
            // SAFETY: this object owns the mapping, and no reference to it remains.
            let result = unsafe { munmap(self.address.as_ptr().cast(), self.length) };
            debug_assert!(result.is_ok());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn files_are_read_completely() {
        let path = std::env::temp_dir().join(std::format!("parador-large-{}", std::process::id()));
        for length in [0, 1, 4097, 3 << 20] {
            let bytes: Vec<u8> = (0..length).map(|index| (index % 251) as u8).collect();
            File::create(&path).unwrap().write_all(&bytes).unwrap();
            assert_eq!(*Large::read(&mut File::open(&path).unwrap()).unwrap(), *bytes);
        }
        std::fs::remove_file(&path).unwrap();
        // A file without a known length.
        assert!(!Large::read(&mut File::open("/proc/self/stat").unwrap()).unwrap().is_empty());
        assert!(Large::read(&mut File::open("/").unwrap()).is_err());
    }

    #[test]
    fn a_copy_owns_its_memory() {
        let mut copy = Large::copy_of(b"abc").unwrap();
        copy[1] = b'x';
        assert_eq!(*copy, *b"axc");
    }
}

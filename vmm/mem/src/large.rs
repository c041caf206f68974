//! Memory of this process for what is large and soon gone again, as a kernel's file.

use std::fs::File;
use std::io::{self, Read};
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;
use std::vec::Vec;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Bytes in pages that are as large as the host gives them: to fill pages of 4 KiB takes longer than to copy what they are for.
#[derive(Debug)]
pub struct Large {
    address: NonNull<u8>,
    length: usize,
}

// SAFETY: it is the owner of its memory, as a vector is.
unsafe impl Send for Large {}
// SAFETY: whoever has only a reference to it reads.
unsafe impl Sync for Large {}

impl Large {
    /// So many zeros.
    ///
    /// # Errors
    /// The host has no room.
    pub fn zeroed(length: usize) -> io::Result<Self> {
        if length == 0 {
            return Ok(Self { address: NonNull::dangling(), length });
        }
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the host chooses a free range.
        let address =
            unsafe { mmap_anonymous(ptr::null_mut(), length, rights, MapFlags::PRIVATE)? };
        let own = NonNull::new(address.cast()).map(|address| Self { address, length });
        // SAFETY: the range is what has just been mapped; only the size of its pages changes. Not every host has large ones.
        let _ = unsafe { madvise(address, length, Advice::LinuxHugepage) };
        own.ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// A copy.
    ///
    /// # Errors
    /// As of [`Self::zeroed`].
    pub fn copy_of(bytes: &[u8]) -> io::Result<Self> {
        let mut copy = Self::zeroed(bytes.len())?;
        copy.copy_from_slice(bytes);
        Ok(copy)
    }

    /// What is in a file. One that becomes longer meanwhile is read as far as it was, one that becomes shorter as far as it is.
    ///
    /// # Errors
    /// It cannot be read, or as of [`Self::zeroed`].
    pub fn read(file: &mut File) -> io::Result<Self> {
        let length = usize::try_from(file.metadata()?.len());
        if length == Ok(0) {
            // A pipe, or what else does not say.
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
        // SAFETY: the memory is this object's, mapped and filled for its whole length.
        unsafe { slice::from_raw_parts(self.address.as_ptr(), self.length) }
    }
}

impl DerefMut for Large {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; it is borrowed for writing.
        unsafe { slice::from_raw_parts_mut(self.address.as_ptr(), self.length) }
    }
}

impl Drop for Large {
    fn drop(&mut self) {
        if self.length != 0 {
            // SAFETY: the mapping is this object's, and nobody uses it any longer.
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
    fn files_are_read_whole() {
        let path = std::env::temp_dir().join(std::format!("parador-large-{}", std::process::id()));
        for length in [0, 1, 4097, 3 << 20] {
            let bytes: Vec<u8> = (0..length).map(|index| (index % 251) as u8).collect();
            File::create(&path).unwrap().write_all(&bytes).unwrap();
            assert_eq!(*Large::read(&mut File::open(&path).unwrap()).unwrap(), *bytes);
        }
        std::fs::remove_file(&path).unwrap();
        // Whose length is not known.
        assert!(!Large::read(&mut File::open("/proc/self/stat").unwrap()).unwrap().is_empty());
        assert!(Large::read(&mut File::open("/").unwrap()).is_err());
    }

    #[test]
    fn a_copy_is_one_s_own() {
        let mut copy = Large::copy_of(b"abc").unwrap();
        copy[1] = b'x';
        assert_eq!(*copy, *b"axc");
    }
}

//! Guest memory in a Linux memory file descriptor, which other processes map too.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::vec::Vec;

use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::io::{Errno, pwrite};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::{GuestMemory, PAGE_SIZE, Window};

/// Anonymous memory with a descriptor, mapped in this process.
#[derive(Debug)]
pub struct SharedMemory {
    descriptor: OwnedFd,
    address: *mut u8,
    length: u64,
}

impl SharedMemory {
    /// Creates `length` bytes of zeros, a multiple of the page size. `name` appears in `/proc`.
    pub fn new(name: &str, length: u64) -> io::Result<Self> {
        let descriptor = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&descriptor, length)?;
        Self::map(descriptor, length)
    }

    /// Maps `length` bytes of memory created by another process.
    ///
    /// # Errors
    /// If the descriptor has fewer bytes or is not a memory file.
    pub fn open(descriptor: OwnedFd, length: u64) -> io::Result<Self> {
        let there = fstat(&descriptor)?.st_size;
        if u64::try_from(there).is_ok_and(|there| there >= length) {
            Self::map(descriptor, length)
        } else {
            Err(io::ErrorKind::UnexpectedEof.into())
        }
    }

    fn map(descriptor: OwnedFd, length: u64) -> io::Result<Self> {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        let size = usize::try_from(length).map_err(|_| io::ErrorKind::OutOfMemory)?;
        // SAFETY: the kernel chooses a free range.
        let address =
            unsafe { mmap(ptr::null_mut(), size, rights, MapFlags::SHARED, &descriptor, 0)? };
        Ok(Self { descriptor, address: address.cast(), length })
    }

    /// Address of `length` bytes from `offset` on in this process.
    ///
    /// # Errors
    /// If the range exceeds the memory.
    pub fn at(&self, offset: u64, length: u64) -> io::Result<*mut u8> {
        let end = offset.checked_add(length).filter(|&end| end <= self.length);
        end.ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(self.address.wrapping_add(offset as usize))
    }

    /// The descriptor.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Unmaps the memory and returns its descriptor, for other processes.
    pub fn into_descriptor(self) -> io::Result<OwnedFd> {
        self.descriptor.try_clone()
    }

    /// Writes through the descriptor without touching the mapping, which is faster for untouched
    /// pages.
    ///
    /// # Errors
    /// If the range exceeds the memory, or the host has no free memory.
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let end = offset.checked_add(bytes.len() as u64).filter(|&end| end <= self.length);
        end.ok_or(io::ErrorKind::UnexpectedEof)?;
        let mut done = 0;
        while done < bytes.len() {
            match pwrite(&self.descriptor, &bytes[done..], offset + done as u64) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Calls `act` with guest memory of these ranges (guest-physical base and length), consecutive
    /// in the descriptor.
    ///
    /// # Errors
    /// If the ranges exceed the memory or are no valid layout.
    pub fn with<T>(
        &mut self,
        ranges: impl IntoIterator<Item = (u64, u64)>,
        act: impl FnOnce(&GuestMemory) -> T,
    ) -> io::Result<T> {
        let mut windows = Vec::new();
        let mut offset = 0_u64;
        for (base, length) in ranges {
            let end = offset.checked_add(length).filter(|&end| end <= self.length);
            let Some(end) = end.filter(|_| offset.is_multiple_of(PAGE_SIZE)) else {
                return Err(io::ErrorKind::InvalidInput.into());
            };
            windows.push(Window { base, length, host: self.address.wrapping_add(offset as usize) });
            offset = end;
        }
        // SAFETY: the windows are disjoint parts of the mapping, which outlives `act` and has no
        // other user: `self` is borrowed mutably. Only a copy of the result that outlives `act`
        // would break this; such a copy exists only of memory that is never unmapped
        // (`hosted/devices`).
        let memory = unsafe { GuestMemory::new(&windows) };
        let memory = memory.map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(act(&memory))
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: this object owns the mapping, and no reference to it remains.
        let result = unsafe { munmap(self.address.cast(), self.length as usize) };
        debug_assert!(result.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_follow_each_other() {
        let mut memory = SharedMemory::new("test", 3 * PAGE_SIZE).unwrap();
        let ranges = [(0, 2 * PAGE_SIZE), (1 << 32, PAGE_SIZE)];
        memory.with(ranges, |memory| memory.write(1 << 32, 7_u64).unwrap()).unwrap();
        let read = |memory: &GuestMemory| memory.read::<u64>(2 * PAGE_SIZE).unwrap();
        assert_eq!(memory.with([(0, 3 * PAGE_SIZE)], read).unwrap(), 7);
        assert!(memory.with([(0, 4 * PAGE_SIZE)], |_| ()).is_err());
        assert!(memory.with([(0, 1)], |_| ()).is_err());
        memory.write_at(2 * PAGE_SIZE, &[9]).unwrap();
        assert_eq!(memory.with([(0, 3 * PAGE_SIZE)], read).unwrap(), 9);
        assert!(memory.write_at(3 * PAGE_SIZE - 1, &[1, 2]).is_err());
        assert!(memory.write_at(u64::MAX, &[1, 2]).is_err());
    }

    #[test]
    fn other_processes_map_it() {
        let mut memory = SharedMemory::new("test", 2 * PAGE_SIZE).unwrap();
        memory.with([(0, 2 * PAGE_SIZE)], |memory| memory.write(8, 7_u64).unwrap()).unwrap();
        let open =
            |length| SharedMemory::open(memory.descriptor().try_clone_to_owned().unwrap(), length);
        let mut other = open(PAGE_SIZE).unwrap();
        let read = |memory: &GuestMemory| memory.read::<u64>(8).unwrap();
        assert_eq!(other.with([(0, PAGE_SIZE)], read).unwrap(), 7);
        assert!(other.at(0, PAGE_SIZE).is_ok());
        assert!(other.at(8, PAGE_SIZE).is_err() && other.at(u64::MAX, 2).is_err());
        assert!(open(3 * PAGE_SIZE).is_err());
    }
}

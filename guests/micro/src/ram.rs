//! Unused RAM, for programs that access it word by word or give it to devices.

use crate::boot;
use core::sync::atomic::AtomicU64;

/// Words that can be read and written.
pub trait Word: Copy + private::Sealed {}
impl Word for u8 {}
impl Word for u16 {}
impl Word for u32 {}
impl Word for u64 {}

mod private {
    /// Nothing but these can be a word: any bits are a value of them.
    pub trait Sealed {}
    impl Sealed for u8 {}
    impl Sealed for u16 {}
    impl Sealed for u32 {}
    impl Sealed for u64 {}
}

/// A range of RAM, at the same linear and physical addresses. Devices may write to it at any time.
#[derive(Clone, Copy, Debug)]
pub struct Ram {
    start: u64,
    end: u64,
}

impl Ram {
    /// Returns the last free range; every call returns the same one.
    pub fn free() -> Option<Self> {
        boot::free_ram().last().map(|(start, end)| Self { start, end })
    }

    /// First address.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// First address after it.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// The part from `offset` on of `length` bytes, as far as it is there.
    pub fn part(&self, offset: u64, length: u64) -> Self {
        let start = self.end.min(self.start + offset);
        Self { start, end: self.end.min(start + length) }
    }

    fn place<T: Word>(&self, address: u64) -> *mut T {
        let length = size_of::<T>() as u64;
        let inside = address >= self.start && address < self.end && self.end - address >= length;
        assert!(inside && address.is_multiple_of(length), "{address:#x} is not in {self:x?}");
        address as *mut T
    }

    /// The words of the aligned 4 KiB page at `address`, which several processors may change.
    pub fn page(&self, address: u64) -> &'static [AtomicU64; 512] {
        let size = size_of::<[AtomicU64; 512]>() as u64;
        let inside = address >= self.start && address < self.end && self.end - address >= size;
        assert!(inside && address.is_multiple_of(size), "{address:#x} is no page in {self:x?}");
        // SAFETY: mapped RAM that no other code uses, aligned; any bits are a value.
        unsafe { &*(address as *const [AtomicU64; 512]) }
    }

    /// Reads a word at an aligned address inside.
    pub fn read<T: Word>(&self, address: u64) -> T {
        // SAFETY: mapped RAM that no other code uses, aligned; any bits are a value. Volatile,
        // because devices write it, too.
        unsafe { self.place::<T>(address).read_volatile() }
    }

    /// Writes a word at an aligned address inside.
    pub fn write<T: Word>(&self, address: u64, value: T) {
        // SAFETY: as in `read`.
        unsafe { self.place::<T>(address).write_volatile(value) }
    }
}

//! Guest-physical memory as its VMM sees it: a few ranges of guest-physical addresses, each backed
//! by a window of the VMM's own address space.
//!
//! # Soundness
//!
//! The guest, threads of other vCPUs and device servers change this memory at any time. So no Rust
//! reference to it exists: every access uses atomic operations with relaxed ordering, which the
//! language allows to race. Values are copied out once and validated afterwards, so a guest cannot
//! change a validated value. The only unsafe step for a user is [`GuestMemory::new`], which asserts
//! that the windows exist; after it, every access is bounds-checked in `GuestMemory::locate`, and
//! only there.
//!
//! Invariants, established by `new` and never changed: ranges are sorted, do not overlap or wrap,
//! and are multiples of [`PAGE_SIZE`] in base, length and window address. An aligned word therefore
//! never crosses a range, and is aligned in the window too.
#![cfg_attr(not(test), no_std)]

#[cfg(any(test, feature = "testing", feature = "shared"))]
extern crate std;

#[cfg(feature = "shared")]
pub mod large;
#[cfg(feature = "shared")]
pub mod shared;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Maximum number of ranges of a VM.
pub const MAX_RANGES: usize = 8;
/// Granularity of ranges, in bytes.
pub const PAGE_SIZE: u64 = 4096;

/// A range of guest-physical memory, and its address in the VMM.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Guest-physical address of the first byte; page-aligned.
    pub base: u64,
    /// Length in bytes; a multiple of the page size, not 0.
    pub length: u64,
    /// Address of the first byte in the VMM; page-aligned.
    pub host: *mut u8,
}

impl Window {
    #[inline(always)]
    fn locate(&self, address: u64) -> Option<(*mut u8, u64)> {
        let offset = address.wrapping_sub(self.base);
        // `wrapping_add` only forms the address; it is inside the window.
        (offset < self.length)
            .then(|| (self.host.wrapping_add(offset as usize), self.length - offset))
    }
}

/// Reason for rejecting a layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LayoutError {
    /// More than [`MAX_RANGES`], or none.
    BadCount,
    /// An address or length is not a multiple of [`PAGE_SIZE`].
    Misaligned,
    /// A range is empty, or wraps around.
    BadLength,
    /// A window is null, or wraps around the VMM's address space.
    BadWindow,
    /// Ranges overlap or are not in ascending order.
    Unordered,
}

/// Reason for rejecting an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryError {
    /// Part of the access is outside memory. A slice access may have been performed up to it.
    NotBacked {
        /// First address of the access outside memory.
        address: u64,
    },
    /// An atomic operation is not aligned to its size.
    Misaligned {
        /// Its address.
        address: u64,
    },
}

/// Direction of a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transfer {
    /// Guest memory is read.
    FromGuest,
    /// Guest memory is written.
    ToGuest,
}

/// Guest-physical memory. Copies refer to the same memory.
#[derive(Clone, Copy, Debug)]
pub struct GuestMemory {
    windows: [Window; MAX_RANGES],
    count: usize,
    /// Observer of writes: see [`GuestMemory::observed`].
    observer: Option<fn(u64, u64)>,
}

// SAFETY: the pointers are not tied to a thread, and all accesses through them are atomic.
unsafe impl Send for GuestMemory {}
// SAFETY: as for `Send`: all accesses are atomic, and there is no state besides the memory itself.
unsafe impl Sync for GuestMemory {}

impl GuestMemory {
    /// Creates guest memory from windows, in ascending order of guest-physical address.
    ///
    /// # Safety
    ///
    /// For each window, `length` bytes at `host` must be mapped readable and writable for as long
    /// as the result or a copy of it is used, and windows must not overlap each other or any Rust
    /// object. Meanwhile only the guest, other processes, and copies of the result may access that
    /// memory.
    pub unsafe fn new(windows: &[Window]) -> Result<Self, LayoutError> {
        if windows.is_empty() || windows.len() > MAX_RANGES {
            return Err(LayoutError::BadCount);
        }
        let mut end_of_last = 0;
        for window in windows {
            let host = window.host.addr() as u64;
            if [window.base, window.length, host]
                .iter()
                .any(|value| !value.is_multiple_of(PAGE_SIZE))
            {
                return Err(LayoutError::Misaligned);
            }
            let end = window.base.checked_add(window.length).ok_or(LayoutError::BadLength)?;
            if window.length == 0 {
                return Err(LayoutError::BadLength);
            }
            let host_end = window.host.addr().checked_add(window.length as usize);
            if window.host.is_null() || window.length > isize::MAX as u64 || host_end.is_none() {
                return Err(LayoutError::BadWindow);
            }
            if window.base < end_of_last {
                return Err(LayoutError::Unordered);
            }
            end_of_last = end;
        }
        let mut all = [Window { base: 0, length: 0, host: core::ptr::null_mut() }; MAX_RANGES];
        all[..windows.len()].copy_from_slice(windows);
        Ok(Self { windows: all, count: windows.len(), observer: None })
    }

    /// Returns the same memory with an observer that is called before each write through it, or
    /// through a copy, with address and length in bytes. A device with no other access to memory
    /// cannot write unobserved. Ranges that turn out to be outside memory are reported, too.
    pub fn observed(self, observer: fn(address: u64, length: u64)) -> Self {
        Self { observer: Some(observer), ..self }
    }

    #[inline]
    fn notify_observer(&self, address: u64, length: u64) {
        if let Some(observer) = self.observer {
            observer(address, length);
        }
    }

    /// Ranges as (base, length), ascending.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.windows[..self.count].iter().map(|window| (window.base, window.length))
    }

    /// Total size in bytes.
    pub fn size(&self) -> u64 {
        self.ranges().map(|(_, length)| length).sum()
    }

    /// True if every byte of `address..address + length` is memory.
    pub fn contains(&self, address: u64, length: u64) -> bool {
        let mut at = address;
        let mut left = length;
        while left != 0 {
            let Ok((_, available)) = self.locate(at) else { return false };
            left -= left.min(available);
            at = at.wrapping_add(available);
        }
        true
    }

    /// Reads a word: an aligned word in one access, any other byte by byte.
    #[inline]
    pub fn read<T: Word>(&self, address: u64) -> Result<T, MemoryError> {
        if address.is_multiple_of(T::SIZE) {
            let (host, _) = self.locate(address)?;
            // SAFETY: `locate` guarantees the first byte; by the invariants the whole aligned word
            // is in the same window and aligned there.
            Ok(unsafe { T::load(host) })
        } else {
            self.read_bytes(address)
        }
    }

    #[cold]
    fn read_bytes<T: Word>(&self, address: u64) -> Result<T, MemoryError> {
        let mut bytes = [0; 8];
        let bytes = &mut bytes[..T::SIZE as usize];
        self.read_slice(address, bytes)?;
        Ok(T::from_bytes(bytes))
    }

    /// Writes a word: an aligned word in one access, any other byte by byte.
    pub fn write<T: Word>(&self, address: u64, value: T) -> Result<(), MemoryError> {
        if address.is_multiple_of(T::SIZE) {
            let (host, _) = self.locate(address)?;
            self.notify_observer(address, T::SIZE);
            // SAFETY: as in `read`.
            unsafe { value.store(host) };
            Ok(())
        } else {
            self.write_slice(address, &value.to_bytes()[..T::SIZE as usize])
        }
    }

    /// Replaces `current` by `new` atomically, for the page-table walker to set accessed and dirty
    /// bits. The inner result is the old value, as `Err` if it differs from `current`. Ordering is
    /// sequential.
    pub fn compare_exchange<T: AtomicWord>(
        &self,
        address: u64,
        current: T,
        new: T,
    ) -> Result<Result<T, T>, MemoryError> {
        if !address.is_multiple_of(T::SIZE) {
            return Err(MemoryError::Misaligned { address });
        }
        let (host, _) = self.locate(address)?;
        self.notify_observer(address, T::SIZE);
        // SAFETY: as in `read`.
        Ok(unsafe { T::exchange(host, current, new) })
    }

    /// Copies guest memory to `to`. Not atomic as a whole.
    pub fn read_slice(&self, address: u64, to: &mut [u8]) -> Result<(), MemoryError> {
        let mut rest = to;
        self.for_each_part(Transfer::FromGuest, address, rest.len() as u64, |host, length| {
            let (part, after) = core::mem::take(&mut rest).split_at_mut(length);
            rest = after;
            // SAFETY: `for_each_part` guarantees `length` bytes at `host`.
            unsafe { copy_out(host, part) };
        })
    }

    /// Compares guest memory with `bytes`; faster than a copy of it. Not atomic as a whole.
    pub fn is_equal(&self, address: u64, bytes: &[u8]) -> Result<bool, MemoryError> {
        let (mut rest, mut same) = (bytes, true);
        self.for_each_part(Transfer::FromGuest, address, rest.len() as u64, |host, length| {
            let (part, after) = rest.split_at(length);
            rest = after;
            // SAFETY: `for_each_part` guarantees `length` bytes at `host`.
            same = same && unsafe { is_same(host, part) };
        })?;
        Ok(same)
    }

    /// Copies `from` to guest memory. Not atomic as a whole.
    pub fn write_slice(&self, address: u64, from: &[u8]) -> Result<(), MemoryError> {
        let mut rest = from;
        self.for_each_part(Transfer::ToGuest, address, rest.len() as u64, |host, length| {
            let (part, after) = rest.split_at(length);
            rest = after;
            // SAFETY: `for_each_part` guarantees `length` bytes at `host`.
            unsafe { copy_in(part, host) };
        })
    }

    /// Sets `length` bytes to `byte`.
    pub fn fill(&self, address: u64, length: u64, byte: u8) -> Result<(), MemoryError> {
        let pattern = [byte; 256];
        self.for_each_part(Transfer::ToGuest, address, length, |host, length| {
            let mut done = 0;
            while done < length {
                let part = &pattern[..(length - done).min(pattern.len())];
                // SAFETY: `for_each_part` guarantees `length` bytes at `host`; `done + part.len()`
                // does not exceed it.
                unsafe { copy_in(part, host.add(done)) };
                done += part.len();
            }
        })
    }

    /// Address in the VMM, and the number of bytes that follow in the window (at least one).
    #[inline]
    fn locate(&self, address: u64) -> Result<(*mut u8, u64), MemoryError> {
        // Most VMs have most of their memory in the first window.
        let [first, others @ ..] = &self.windows;
        match first.locate(address) {
            Some(place) => Ok(place),
            None => Self::locate_in(others, address),
        }
    }

    /// Unused windows are empty.
    #[inline(never)]
    fn locate_in(windows: &[Window], address: u64) -> Result<(*mut u8, u64), MemoryError> {
        windows
            .iter()
            .find_map(|window| window.locate(address))
            .ok_or(MemoryError::NotBacked { address })
    }

    /// Calls `act` for each contiguous part of a span, with its address in the VMM and its length.
    /// The lengths of the parts add up to `length` unless the span leaves memory.
    ///
    /// For callers that copy more than words by a means that may race with the guest: the memory is
    /// no Rust object, and changes at any time. `way` is the caller's operation on it.
    pub fn for_each_part(
        &self,
        way: Transfer,
        mut address: u64,
        mut length: u64,
        mut act: impl FnMut(*mut u8, usize),
    ) -> Result<(), MemoryError> {
        if way == Transfer::ToGuest && length != 0 {
            self.notify_observer(address, length);
        }
        while length != 0 {
            let (host, available) = self.locate(address)?;
            let part = length.min(available);
            act(host, part as usize);
            length -= part;
            // Wraps to 0 only at the end of the address space, which the next `locate` checks.
            address = address.wrapping_add(part);
        }
        Ok(())
    }
}

/// Bytes before the next multiple of eight, at most `length`.
fn head(host: *mut u8, length: usize) -> usize {
    (host.addr().next_multiple_of(8) - host.addr()).min(length)
}

/// Copies guest memory at `host` to `to`, eight bytes at a time where possible.
///
/// # Safety
///
/// `to.len()` bytes at `host` must be guest memory.
unsafe fn copy_out(host: *mut u8, to: &mut [u8]) {
    let (first, rest) = to.split_at_mut(head(host, to.len()));
    let mut at = host;
    for byte in first {
        // SAFETY: by contract; `at` advances with the destination.
        unsafe {
            *byte = u8::load(at);
            at = at.add(1);
        }
    }
    let mut words = rest.chunks_exact_mut(8);
    for word in &mut words {
        // SAFETY: by contract; after `head` bytes `at` is aligned, and stays so.
        unsafe {
            word.copy_from_slice(&u64::load(at).to_ne_bytes());
            at = at.add(8);
        }
    }
    for byte in words.into_remainder() {
        // SAFETY: by contract.
        unsafe {
            *byte = u8::load(at);
            at = at.add(1);
        }
    }
}

/// Compares guest memory at `host` with `bytes`: four words with one decision, where possible.
///
/// # Safety
///
/// `bytes.len()` bytes at `host` must be guest memory.
unsafe fn is_same(host: *mut u8, bytes: &[u8]) -> bool {
    let (first, rest) = bytes.split_at(head(host, bytes.len()));
    let (blocks, last) = rest.as_chunks::<32>();
    // SAFETY: by contract.
    let same = |at: usize, byte: u8| unsafe { u8::load(host.add(at)) } == byte;
    let behind = first.len() + 32 * blocks.len();
    first.iter().enumerate().all(|(at, &byte)| same(at, byte))
        && blocks.iter().enumerate().all(|(number, block)| {
            let mut differ = 0;
            for (index, word) in block.as_chunks().0.iter().enumerate() {
                let at = first.len() + 32 * number + 8 * index;
                // SAFETY: by contract; after `head` bytes `at` is aligned, and stays so.
                differ |= unsafe { u64::load(host.add(at)) } ^ u64::from_ne_bytes(*word);
            }
            differ == 0
        })
        && last.iter().enumerate().all(|(at, &byte)| same(behind + at, byte))
}

/// Copies `from` to guest memory at `host`, eight bytes at a time where possible.
///
/// # Safety
///
/// `from.len()` bytes at `host` must be guest memory.
unsafe fn copy_in(from: &[u8], host: *mut u8) {
    let (first, rest) = from.split_at(head(host, from.len()));
    let mut at = host;
    for byte in first {
        // SAFETY: by contract; `at` advances with the source.
        unsafe {
            byte.store(at);
            at = at.add(1);
        }
    }
    let words = rest.chunks_exact(8);
    let last = words.remainder();
    for word in words {
        // SAFETY: by contract; after `head` bytes `at` is aligned, and stays so.
        unsafe {
            u64::from_bytes(word).store(at);
            at = at.add(8);
        }
    }
    for byte in last {
        // SAFETY: by contract.
        unsafe {
            byte.store(at);
            at = at.add(1);
        }
    }
}

mod sealed {
    /// Access to a word. Host byte order, which is little-endian on all hosts and guests.
    pub trait RawAccess: Copy {
        /// Size in bytes.
        const SIZE: u64;
        /// # Safety
        /// `host` must be aligned guest memory.
        unsafe fn load(host: *mut u8) -> Self;
        /// # Safety
        /// `host` must be aligned guest memory.
        unsafe fn store(self, host: *mut u8);
        /// `bytes` has `SIZE` bytes.
        fn from_bytes(bytes: &[u8]) -> Self;
        /// The first `SIZE` bytes are the value.
        fn to_bytes(self) -> [u8; 8];
    }

    /// Exchange of an atomic word.
    pub trait Exchange: RawAccess {
        /// # Safety
        /// `host` must be aligned guest memory.
        unsafe fn exchange(host: *mut u8, current: Self, new: Self) -> Result<Self, Self>;
    }
}
use sealed::{Exchange, RawAccess};

/// A word for reads and writes of guest memory: `u8`, `u16`, `u32`, `u64`.
pub trait Word: RawAccess {}
/// A word that can be exchanged atomically: `u32`, `u64`.
pub trait AtomicWord: Word + Exchange {}

macro_rules! word {
    ($int:ty, $atomic:ty) => {
        impl RawAccess for $int {
            const SIZE: u64 = size_of::<$int>() as u64;

            #[inline]
            unsafe fn load(host: *mut u8) -> Self {
                // SAFETY: aligned and mapped by contract; all accesses are atomic (module head).
                unsafe { <$atomic>::from_ptr(host.cast()) }.load(Relaxed)
            }

            #[inline]
            unsafe fn store(self, host: *mut u8) {
                // SAFETY: as in `load`.
                unsafe { <$atomic>::from_ptr(host.cast()) }.store(self, Relaxed);
            }

            #[inline]
            fn from_bytes(bytes: &[u8]) -> Self {
                let mut raw = [0; size_of::<$int>()];
                raw.copy_from_slice(bytes);
                Self::from_le_bytes(raw)
            }

            #[inline]
            fn to_bytes(self) -> [u8; 8] {
                u64::from(self).to_le_bytes()
            }
        }

        impl Word for $int {}
    };
}

macro_rules! atomic_word {
    ($int:ty, $atomic:ty) => {
        impl Exchange for $int {
            #[inline]
            unsafe fn exchange(host: *mut u8, current: Self, new: Self) -> Result<Self, Self> {
                use core::sync::atomic::Ordering::SeqCst;
                // SAFETY: as in `load`.
                let word = unsafe { <$atomic>::from_ptr(host.cast()) };
                word.compare_exchange(current, new, SeqCst, SeqCst)
            }
        }

        impl AtomicWord for $int {}
    };
}

word!(u8, AtomicU8);
word!(u16, AtomicU16);
word!(u32, AtomicU32);
word!(u64, AtomicU64);
atomic_word!(u32, AtomicU32);
atomic_word!(u64, AtomicU64);

const _: () = assert!(cfg!(target_endian = "little"));

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[repr(align(4096))]
    #[derive(Clone)]
    struct Page(#[expect(dead_code, reason = "reached through pointers")] [u8; 4096]);

    /// Pages of host memory that outlive the guest memory made over them.
    struct Backing(Vec<Page>);

    impl Backing {
        fn new(pages: usize) -> Self {
            Self(vec![Page([0; 4096]); pages])
        }

        /// The pages as ranges at the given bases, each of the given number of pages.
        fn windows(&mut self, ranges: &[(u64, usize)]) -> Vec<Window> {
            let mut host = self.0.as_mut_ptr().cast::<u8>();
            let pages: usize = ranges.iter().map(|range| range.1).sum();
            assert!(pages <= self.0.len());
            ranges
                .iter()
                .map(|&(base, pages)| {
                    let window = Window { base, length: pages as u64 * PAGE_SIZE, host };
                    host = host.wrapping_add(pages * 4096);
                    window
                })
                .collect()
        }

        fn memory(&mut self, ranges: &[(u64, usize)]) -> GuestMemory {
            let windows = self.windows(ranges);
            // SAFETY: the windows are disjoint parts of the vector, which outlives the guest
            // memory.
            unsafe { GuestMemory::new(&windows) }.unwrap()
        }
    }

    std::thread_local! {
        static TOLD: core::cell::RefCell<Vec<(u64, u64)>> = const { core::cell::RefCell::new(Vec::new()) };
    }

    /// Each write is observed before it happens, once; no read is.
    #[test]
    fn writes_are_observed() {
        let mut backing = Backing::new(2);
        let memory = backing.memory(&[(0x1000, 1), (0x5000, 1)]);
        let seen =
            memory.observed(|at, length| TOLD.with_borrow_mut(|told| told.push((at, length))));
        let told = || TOLD.with_borrow_mut(core::mem::take);
        seen.write(0x1008, 1u64).unwrap();
        seen.write(0x1001, 1u32).unwrap();
        assert_eq!(told(), [(0x1008, 8), (0x1001, 4)]);
        seen.write_slice(0x5000, b"abc").unwrap();
        seen.fill(0x5100, 300, 1).unwrap();
        assert_eq!(told(), [(0x5000, 3), (0x5100, 300)]);
        seen.compare_exchange(0x1008, 1u64, 2).unwrap().unwrap();
        seen.for_each_part(Transfer::ToGuest, 0x1000, 8, |_, _| {}).unwrap();
        assert_eq!(told(), [(0x1008, 8), (0x1000, 8)]);
        seen.write_slice(0x1000, b"").unwrap();
        seen.read_slice(0x1000, &mut [0; 9]).unwrap();
        seen.is_equal(0x1000, b"ab").unwrap();
        seen.for_each_part(Transfer::FromGuest, 0x1000, 8, |_, _| {}).unwrap();
        memory.write(0x1008, 1u64).unwrap();
        assert_eq!(told(), []);
    }

    #[test]
    fn words_of_every_size_and_alignment() {
        let mut backing = Backing::new(1);
        let memory = backing.memory(&[(0x1000, 1)]);
        for at in 0x1000..0x1010 {
            memory.fill(0x1000, 64, 0).unwrap();
            memory.write(at, 0x8877_6655_4433_2211u64).unwrap();
            assert_eq!(memory.read::<u64>(at), Ok(0x8877_6655_4433_2211));
            assert_eq!(memory.read::<u32>(at + 1), Ok(0x5544_3322));
            assert_eq!(memory.read::<u16>(at + 3), Ok(0x5544));
            assert_eq!(memory.read::<u8>(at + 7), Ok(0x88));
            assert_eq!(memory.read::<u8>(at + 8), Ok(0));
        }
    }

    #[test]
    fn edges() {
        let mut backing = Backing::new(3);
        // Two adjacent ranges, backed in the other order, and a hole before a third.
        let windows = backing.windows(&[(0x1000, 1), (0x0, 1), (0x5000, 1)]);
        // SAFETY: as in `Backing::memory`.
        let memory = unsafe { GuestMemory::new(&[windows[1], windows[0], windows[2]]) }.unwrap();
        assert_eq!(memory.size(), 3 * PAGE_SIZE);
        assert_eq!(memory.ranges().nth(1), Some((0x1000, 0x1000)));
        assert!(memory.contains(0, 0x2000) && memory.contains(0x5fff, 1) && memory.contains(9, 0));
        assert!(!memory.contains(0, 0x2001) && !memory.contains(u64::MAX, 2));

        memory.write(0xffc, 0x0123_4567_89ab_cdefu64).unwrap();
        assert_eq!(memory.read::<u64>(0xffc), Ok(0x0123_4567_89ab_cdef));
        assert_eq!(memory.read::<u32>(0x1000), Ok(0x0123_4567));
        let error = Err(MemoryError::NotBacked { address: 0x2000 });
        assert_eq!(memory.read::<u32>(0x1ffe), error.map(|()| 0));
        assert_eq!(memory.read::<u32>(0x2000), error.map(|()| 0));
        assert_eq!(memory.write_slice(0x1f00, &[0; 0x200]), error);
        assert_eq!(memory.read_slice(0x1fff, &mut [0; 2]), error);
        assert_eq!(memory.fill(0x1fff, 2, 0), error);
        let end = MemoryError::NotBacked { address: u64::MAX };
        assert_eq!(memory.read::<u8>(u64::MAX), Err(end));
        assert_eq!(memory.read_slice(u64::MAX, &mut [0; 9]), Err(end));
        assert_eq!(memory.is_equal(u64::MAX, &[0; 9]), Err(end));
    }

    #[test]
    fn exchange() {
        let mut backing = Backing::new(1);
        let memory = backing.memory(&[(0, 1)]);
        memory.write(8, 5u64).unwrap();
        assert_eq!(memory.compare_exchange(8, 5u64, 7), Ok(Ok(5)));
        assert_eq!(memory.compare_exchange(8, 5u64, 9), Ok(Err(7)));
        assert_eq!(memory.compare_exchange(8, 7u32, 1), Ok(Ok(7)));
        assert_eq!(memory.read::<u64>(8), Ok(1));
        let misaligned = MemoryError::Misaligned { address: 4 };
        assert_eq!(memory.compare_exchange(4, 0u64, 1), Err(misaligned));
    }

    #[test]
    fn layouts_that_are_refused() {
        let mut backing = Backing::new(2);
        let good = backing.windows(&[(0, 1), (0x1000, 1)]);
        let refused = |windows: &[Window]| {
            // SAFETY: the windows that pass are those of `good`.
            unsafe { GuestMemory::new(windows) }.map(|_| ()).unwrap_err()
        };
        assert_eq!(refused(&[]), LayoutError::BadCount);
        assert_eq!(refused(&[good[0]; 9]), LayoutError::BadCount);
        assert_eq!(refused(&[Window { base: 1, ..good[0] }]), LayoutError::Misaligned);
        assert_eq!(refused(&[Window { length: 1, ..good[0] }]), LayoutError::Misaligned);
        let odd = good[0].host.wrapping_add(8);
        assert_eq!(refused(&[Window { host: odd, ..good[0] }]), LayoutError::Misaligned);
        assert_eq!(refused(&[Window { length: 0, ..good[0] }]), LayoutError::BadLength);
        let top = u64::MAX - 4095;
        assert_eq!(refused(&[Window { base: top, ..good[0] }]), LayoutError::BadLength);
        let null = core::ptr::null_mut();
        assert_eq!(refused(&[Window { host: null, ..good[0] }]), LayoutError::BadWindow);
        assert_eq!(refused(&[Window { length: 1 << 63, ..good[0] }]), LayoutError::BadWindow);
        assert_eq!(refused(&[good[1], good[0]]), LayoutError::Unordered);
        assert_eq!(refused(&[good[0], good[0]]), LayoutError::Unordered);
    }

    proptest! {
        /// Slices against a plain array, at every alignment, across ranges.
        #[test]
        fn slices_match_an_array(
            steps in proptest::collection::vec((0..8300u64, 0..600usize, any::<u8>()), 1..20)
        ) {
            let mut backing = Backing::new(2);
            let memory = backing.memory(&[(0, 1), (0x1000, 1)]);
            let mut model = vec![0u8; 8192];
            for (at, length, seed) in steps {
                let data: Vec<u8> = (0..length).map(|i| seed.wrapping_add(i as u8)).collect();
                let fits = at as usize + length <= model.len();
                let result = if seed % 2 == 0 {
                    memory.write_slice(at, &data)
                } else {
                    memory.fill(at, length as u64, seed)
                };
                prop_assert_eq!(result.is_ok(), fits || length == 0);
                for (index, &byte) in data.iter().enumerate() {
                    let byte = if seed % 2 == 0 { byte } else { seed };
                    if let Some(slot) = model.get_mut(at as usize + index) {
                        *slot = byte;
                    }
                }
                let mut all = vec![0; model.len()];
                memory.read_slice(0, &mut all).unwrap();
                prop_assert!(all == model);
                let mut part = vec![0; length.min(model.len().saturating_sub(at as usize))];
                if !part.is_empty() {
                    memory.read_slice(at, &mut part).unwrap();
                    prop_assert!(part == model[at as usize..][..part.len()]);
                    prop_assert_eq!(memory.is_equal(at, &part), Ok(true));
                    let index = usize::from(seed) * 7 % part.len();
                    part[index] ^= 1 << (seed % 8);
                    prop_assert_eq!(memory.is_equal(at, &part), Ok(false));
                }
            }
        }
    }
}

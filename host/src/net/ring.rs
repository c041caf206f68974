//! Ring of frames between one producer and one consumer, in memory that a guest may be able to
//! overwrite.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, Ordering::SeqCst};

use vmm_bus::Data;
use vmm_mem::Transfer;

use crate::sys::{self, Vector};

/// Length of the frame length field in bytes.
pub(super) const LENGTH: u32 = 4;

/// Ring of frames with `SIZE` bytes.
#[repr(C)]
pub(super) struct FrameRing<const SIZE: usize> {
    /// Bytes ever produced.
    pub head: AtomicU32,
    /// Bytes ever consumed.
    pub tail: AtomicU32,
    /// The consumer waits for [`Self::head`].
    pub consumer_waiting: AtomicU32,
    /// The producer waits for [`Self::tail`].
    pub producer_waiting: AtomicU32,
    bytes: UnsafeCell<[u8; SIZE]>,
}

// SAFETY: the bytes are accessed by address only, and every value is valid.
unsafe impl<const SIZE: usize> Sync for FrameRing<SIZE> {}

impl<const SIZE: usize> FrameRing<SIZE> {
    pub const SIZE: u32 = SIZE as u32;

    /// Returns the pending bytes for a consumer at `tail`. A value above the ring's size is a
    /// protocol violation.
    pub fn used(&self, tail: u32) -> u32 {
        self.head.load(SeqCst).wrapping_sub(tail)
    }

    /// Returns the free space for a producer at `head`.
    pub fn room(&self, head: u32) -> u32 {
        Self::SIZE.saturating_sub(head.wrapping_sub(self.tail.load(SeqCst)))
    }

    /// Waits until a producer at `head` may have `least` bytes of space.
    pub fn wait_for_room(&self, head: u32, least: u32) {
        let seen = self.tail.load(SeqCst);
        self.producer_waiting.store(1, SeqCst);
        if self.room(head) < least {
            sys::wait(&self.tail, seen, None);
        }
        self.producer_waiting.store(0, SeqCst);
    }

    /// Publishes the position of the producer; returns whether the consumer waits, which the caller
    /// must wake then.
    pub fn produce(&self, head: u32) -> bool {
        self.head.store(head, SeqCst);
        take(&self.consumer_waiting)
    }

    /// Publishes the position of the consumer; returns whether the producer waits and the ring is
    /// at most half full. The caller must wake it then.
    pub fn consume(&self, tail: u32) -> bool {
        self.tail.store(tail, SeqCst);
        self.producer_waiting.load(SeqCst) != 0 && self.used(tail) <= Self::SIZE / 2
    }

    /// Returns the one or two memory ranges of `length` bytes at a position.
    pub fn pieces(&self, at: u32, length: u32) -> [Vector; 2] {
        let offset = at % Self::SIZE;
        let first = length.min(Self::SIZE - offset);
        let start = self.bytes.get() as u64;
        [
            Vector { address: start + u64::from(offset), length: first.into() },
            Vector { address: start, length: u64::from(length - first) },
        ]
    }

    /// Copies `length` bytes, at most the ring's size, between a position and memory at `address`.
    ///
    /// # Safety
    /// That memory must hold no Rust objects and be readable, or writable if `direction` is
    /// [`Direction::Out`].
    unsafe fn exchange(&self, direction: Direction, at: u32, address: *mut u8, length: u32) {
        let mut address = address;
        for piece in self.pieces(at, length) {
            let (ours, length) = (piece.address as *mut u8, piece.length as usize);
            let (from, to) = match direction {
                Direction::In => (address, ours),
                Direction::Out => (ours, address),
            };
            // SAFETY: the pieces are in the ring; the caller guarantees the other side.
            unsafe { core::ptr::copy_nonoverlapping(from, to, length) };
            address = address.wrapping_add(length);
        }
    }

    /// Writes bytes at a position.
    pub fn put(&self, at: u32, bytes: &[u8]) {
        // SAFETY: the bytes are only read.
        unsafe { self.exchange(Direction::In, at, bytes.as_ptr().cast_mut(), bytes.len() as u32) };
    }

    /// Reads bytes at a position.
    pub fn get<const N: usize>(&self, at: u32) -> [u8; N] {
        let mut bytes = [0; N];
        // SAFETY: the array belongs to this function.
        unsafe { self.exchange(Direction::Out, at, bytes.as_mut_ptr(), N as u32) };
        bytes
    }

    /// Copies between the ring and guest memory until the data ends.
    pub fn exchange_with_guest(&self, direction: Direction, at: u32, data: &mut Data<'_>) {
        let mut at = at;
        while let Some(part) = data.part(u32::MAX) {
            let (address, length) = (part.address, part.length.into());
            let copied = data.memory().for_each_part(
                direction.of_guest(),
                address,
                length,
                |guest, length| {
                    // SAFETY: it is mapped guest memory of this length, where no Rust object is.
                    unsafe { self.exchange(direction, at, guest, length as u32) };
                    at = at.wrapping_add(length as u32);
                },
            );
            if copied.is_err() {
                return;
            }
        }
    }
}

/// Clears a flag; returns whether it was set.
pub(super) fn take(flag: &AtomicU32) -> bool {
    flag.load(SeqCst) != 0 && flag.swap(0, SeqCst) != 0
}

/// Direction of a copy from the ring's point of view.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    In,
    Out,
}

impl Direction {
    /// Returns the direction from guest memory's point of view.
    fn of_guest(self) -> Transfer {
        match self {
            Self::In => Transfer::FromGuest,
            Self::Out => Transfer::ToGuest,
        }
    }
}

//! Allocation of frames.

use core::sync::atomic::Ordering;

use abi::{PAGE_SHIFT, Status};

use super::{Account, CLASS_FIXED, CLASS_FREE, CLASS_RAW, CLASS_RAW_RETIRED, Frame, Memory};
use crate::Result;

/// Index of the first of `count` consecutive set bits of a word, if it has them.
fn first_run(word: u64, count: u32) -> Option<u32> {
    let runs = (1..count).fold(word, |runs, shift| runs & word >> shift);
    (runs != 0).then(|| runs.trailing_zeros())
}

impl Memory {
    /// Number of free frames.
    pub fn free_frames(&self) -> u32 {
        self.free.get()
    }

    /// Total number of frames.
    pub fn total_frames(&self) -> u32 {
        self.count
    }

    pub(super) fn set_free(&self, frame: u32, free: bool) {
        let word = &self.map()[frame as usize / 64];
        let bit = 1 << (frame % 64);
        word.set(if free { word.get() | bit } else { word.get() & !bit });
    }

    /// Finds `count` consecutive free frames within one word of the bitmap.
    fn find_free(&self, count: u32) -> Option<u32> {
        let map = self.map();
        let start = (self.hint.get() as usize / 64).min(map.len());
        let (before, after) = map.split_at(start);
        let places = (start..).zip(after).chain((0..).zip(before));
        places
            .filter(|(_, word)| word.get() != 0)
            .find_map(|(index, word)| Some(64 * index as u32 + first_run(word.get(), count)?))
    }

    /// Allocates `frames` consecutive frames, at most 64, charged to `factory`.
    pub(super) fn take_frames(&self, factory: Account, frames: u32, class: u8) -> Result<u32> {
        let account = self.factory(factory)?;
        account.charge(frames)?;
        let Some(first) = self.find_free(frames) else {
            account.uncharge(frames);
            return Err(Status::NoQuota);
        };
        for frame in first..first + frames {
            let info = self.info(frame);
            self.class(frame).set(class);
            self.set_free(frame, false);
            info.owner.set(factory);
            info.used.set(0);
        }
        self.free.set(self.free.get() - frames);
        self.hint.set(first);
        Ok(first)
    }

    pub(super) fn release_frame(&self, frame: u32) {
        self.owner(frame).uncharge(1);
        let info = self.info(frame);
        info.owner.set(None);
        if info.is_exhausted() {
            self.class(frame).set(CLASS_FIXED);
            return;
        }
        self.class(frame).set(CLASS_FREE);
        self.set_free(frame, true);
        self.free.set(self.free.get() + 1);
        self.hint.set(frame.min(self.hint.get()));
    }

    /// Allocates `count` consecutive zeroed raw frames; returns the first.
    pub fn alloc_raw(&self, factory: Account, count: u32) -> Result<Frame> {
        let first = self.take_frames(factory, count, CLASS_RAW)?;
        for frame in first..first + count {
            for word in self.words(Frame(frame)) {
                word.store(0, Ordering::Relaxed);
            }
        }
        Ok(Frame(first))
    }

    /// Retires `count` raw frames from `first`; [`Memory::reclaim`] frees them.
    pub fn free_raw(&self, first: Frame, count: u32) {
        for frame in first.0..first.0 + count {
            let info = self.info(frame);
            assert!(self.class(frame).get() == CLASS_RAW);
            self.class(frame).set(CLASS_RAW_RETIRED);
            info.next.set(self.retired_raw.replace(frame));
            self.has_work.set(true);
        }
    }

    /// Physical address of a raw frame.
    pub fn physical(&self, frame: Frame) -> u64 {
        self.physical + ((frame.0 as u64) << PAGE_SHIFT)
    }

    /// Raw frame at index `offset` of an allocation that starts at `first`.
    pub fn following(&self, first: Frame, offset: u32) -> Frame {
        let frame = Frame(first.0 + offset);
        assert!(self.class(frame.0).get() == CLASS_RAW);
        frame
    }

    /// Raw frame at a physical address. Panics if there is none: page tables refer only to frames
    /// that the kernel allocated.
    pub fn frame_at(&self, physical: u64) -> Frame {
        let frame = (physical.wrapping_sub(self.physical) >> PAGE_SHIFT) as u32;
        assert!(self.class(frame).get() == CLASS_RAW);
        Frame(frame)
    }
}

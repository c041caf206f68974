//! Memory of the machine, and who has it.

use abi::{Item, PAGE_SIZE};
use heapless::Vec;
use native_rt::Window;
use native_rt::start::Boot;

use crate::frames::{Frames, Run};

/// Most pieces of memory of all children together.
const MAX_PIECES: usize = 256;
/// Most pieces that guest memory is made of.
pub const MAX_GUEST_PIECES: usize = 20;
/// Smallest piece of guest memory: 1 MiB.
const MIN_GUEST_ORDER: u8 = 8;

#[derive(Clone, Copy)]
struct Piece {
    owner: usize,
    run: Run,
}

/// All RAM that the kernel gave root: each page is free or belongs to one child.
pub struct Memory {
    frames: Frames,
    /// First frame and window of each region.
    regions: Vec<(u64, Window), { abi::boot::MAX_REGIONS }>,
    pieces: Vec<Piece, MAX_PIECES>,
}

impl Memory {
    /// Everything is free.
    pub fn new(boot: &Boot) -> Self {
        let mut memory =
            Self { frames: Frames::default(), regions: Vec::new(), pieces: Vec::new() };
        for (base, window) in boot.ram() {
            let run = Run { first: base / PAGE_SIZE, count: window.length() / PAGE_SIZE };
            // There is room for as many regions as the boot page has.
            if memory.regions.push((run.first, window)).is_ok() {
                memory.frames.add(memory.regions.len() - 1, run);
            }
        }
        memory
    }

    /// Free bytes.
    pub fn free(&self) -> u64 {
        self.frames.count() * PAGE_SIZE
    }

    /// Pieces that free memory is in.
    pub fn pieces(&self) -> u64 {
        self.frames.pieces()
    }

    fn locate(&self, run: Run) -> Option<(usize, Window)> {
        self.regions.iter().enumerate().find_map(|(region, &(first, window))| {
            let offset = run.first.checked_sub(first)? * PAGE_SIZE;
            Some((region, window.part(offset, run.count * PAGE_SIZE)?))
        })
    }

    /// The same, the first page's number a multiple of `align`.
    pub fn take_aligned(&mut self, owner: usize, pages: u64, align: u64) -> Option<Window> {
        if self.pieces.is_full() {
            return None;
        }
        let run = self.frames.take(pages, align)?;
        let (_, window) = self.locate(run)?;
        // Room was checked.
        let _ = self.pieces.push(Piece { owner, run });
        window.clear();
        Some(window)
    }

    /// Takes `pages` pages, filled with zeros, in one piece for `owner`.
    pub fn take(&mut self, owner: usize, pages: u64) -> Option<Window> {
        self.take_aligned(owner, pages, 1)
    }

    /// Takes `bytes` bytes of guest memory for `owner`: naturally aligned powers of two, largest first, so that
    /// large pages map it. `None` if that much is not there in few enough pieces; some may be taken then.
    pub fn take_guest(
        &mut self,
        owner: usize,
        bytes: u64,
    ) -> Option<Vec<Window, MAX_GUEST_PIECES>> {
        let mut windows = Vec::new();
        let mut left = bytes / PAGE_SIZE;
        let mut order = Item::MAX_ORDER;
        while left != 0 {
            if windows.is_full() {
                return None;
            }
            let pages = 1 << order;
            if left >= pages
                && let Some(window) = self.take_aligned(owner, pages, pages)
            {
                left -= pages;
                // Room was checked.
                let _ = windows.push(window);
            } else if order > MIN_GUEST_ORDER {
                order -= 1;
            } else {
                return None;
            }
        }
        Some(windows)
    }

    /// Takes everything back from `owner` and from everybody whom it was passed on to.
    pub fn give_all(&mut self, owner: usize) {
        while let Some(index) = self.pieces.iter().position(|piece| piece.owner == owner) {
            let run = self.pieces.swap_remove(index).run;
            if let Some((region, window)) = self.locate(run) {
                // Fails only if nobody has it any more.
                let _ = window.revoke();
                self.frames.give(region, run);
            }
        }
    }
}

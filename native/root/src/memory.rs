//! Physical memory and its owners.

use abi::{Item, PAGE_SIZE, boot};
use heapless::Vec;
use native_rt::Window;
use native_rt::start::Boot;

use crate::frames::{Frames, Run};

/// Maximum number of pieces of memory of all children together.
const MAX_PIECES: usize = 256;
/// Maximum number of pieces of guest memory.
pub const MAX_GUEST_PIECES: usize = 20;
/// Smallest piece of guest memory: 1 MiB.
const MIN_GUEST_ORDER: u8 = 8;
/// Order of a large page: 2 MiB.
const LARGE_PAGE_ORDER: u32 = 9;

/// Returns the physical address of memory in root's window.
pub fn physical(window: Window) -> u64 {
    window.base() - boot::PHYSICAL_WINDOW
}

#[derive(Clone, Copy)]
struct Piece {
    owner: usize,
    run: Run,
}

/// All RAM that the kernel passed to root: each page is free or has one owner.
pub struct Memory {
    frames: Frames,
    /// First frame and window of each region.
    regions: Vec<(u64, Window), { abi::boot::MAX_REGIONS }>,
    pieces: Vec<Piece, MAX_PIECES>,
}

impl Memory {
    /// Creates the allocator with all RAM free.
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

    /// Returns the number of free bytes.
    pub fn free(&self) -> u64 {
        self.frames.count() * PAGE_SIZE
    }

    /// Returns the number of free ranges.
    pub fn pieces(&self) -> u64 {
        self.frames.pieces()
    }

    fn locate(&self, run: Run) -> Option<(usize, Window)> {
        self.regions.iter().enumerate().find_map(|(region, &(first, window))| {
            let offset = run.first.checked_sub(first)? * PAGE_SIZE;
            Some((region, window.part(offset, run.count * PAGE_SIZE)?))
        })
    }

    /// Allocates zeroed pages in one piece for `owner`, aligned to `align` pages.
    pub fn allocate_aligned(&mut self, owner: usize, pages: u64, align: u64) -> Option<Window> {
        if self.pieces.is_full() {
            return None;
        }
        let run = self.frames.allocate(pages, align)?;
        let (_, window) = self.locate(run)?;
        // Room was checked.
        let _ = self.pieces.push(Piece { owner, run });
        window.clear();
        Some(window)
    }

    /// Allocates `pages` pages, filled with zeros, in one piece for `owner`.
    pub fn allocate(&mut self, owner: usize, pages: u64) -> Option<Window> {
        self.allocate_aligned(owner, pages, 1)
    }

    /// Allocates `bytes` bytes of guest memory for `owner`: naturally aligned powers of two,
    /// largest first, so that large pages map it. Returns `None` if memory is too small or too
    /// fragmented; some pieces may be allocated then.
    pub fn allocate_guest(
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
                && let Some(window) = self.allocate_aligned(owner, pages, pages)
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

    /// Allocates `bytes` bytes of guest memory for `owner` in one piece, aligned for large pages.
    pub fn allocate_contiguous_guest(
        &mut self,
        owner: usize,
        bytes: u64,
    ) -> Option<Vec<Window, MAX_GUEST_PIECES>> {
        let pages = bytes / PAGE_SIZE;
        let whole = self.allocate_aligned(owner, pages, 1 << LARGE_PAGE_ORDER)?;
        Some(Vec::from_iter([whole]))
    }

    /// Gives all memory of `owner` to `other`.
    pub fn transfer(&mut self, owner: usize, other: usize) {
        let pieces = self.pieces.iter_mut().filter(|piece| piece.owner == owner);
        pieces.for_each(|piece| piece.owner = other);
    }

    /// Frees all memory of `owner` and revokes its delegations.
    pub fn free_all(&mut self, owner: usize) {
        while let Some(index) = self.pieces.iter().position(|piece| piece.owner == owner) {
            let run = self.pieces.swap_remove(index).run;
            if let Some((region, window)) = self.locate(run) {
                // It fails only if the memory has no mapping left.
                let _ = window.revoke();
                self.frames.free(region, run);
            }
        }
    }
}

//! Page tables that a program builds in free RAM.
//!
//! Every root maps the first GiB and the last GiB below 4 GiB to themselves for CPL 0 only (the
//! start-up's tables grant CPL 3, too, which SMEP and SMAP refuse to the kernel), and the code of
//! [`crate::access`] for CPL 3. A program must not change these parts.
//!
//! Documentation: APM vol. 2 (24593), §5.3 and §5.5.

use crate::ram::Ram;
use crate::{access, cpu};
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use hw_x86::cpuid::leaf;
use hw_x86::paging::{ENTRIES, entry, level_shift};

/// Bytes of a page of level 2.
pub const LARGE: u64 = 1 << level_shift(2);
/// Bytes of a page of level 3.
pub const HUGE: u64 = 1 << level_shift(3);
/// Bytes of a page of level 1 and of a table.
pub const PAGE: u64 = 1 << level_shift(1);
/// Rights without restriction.
pub const ALL: u64 = entry::PRESENT | entry::WRITE | entry::USER;
/// Present and writable, for CPL 0 only.
pub const KERNEL: u64 = entry::PRESENT | entry::WRITE;
/// Level of roots.
pub const TOP: u32 = 4;
/// Number of bits of a virtual address that are translated.
const VIRTUAL_BITS: u32 = 48;

/// Returns true if the CPU has 1 GiB pages (CPUID 8000_0001 EDX, bit 26).
pub fn has_huge_pages() -> bool {
    cpu::cpuid(leaf::AMD_FEATURES, 0).edx & 1 << 26 != 0
}

/// Number of bits of a physical address.
pub fn physical_bits() -> u32 {
    cpu::cpuid(leaf::SIZES, 0).eax & 0xff
}

/// Virtual address of indices into the tables of levels 4 to 1.
pub const fn address(indices: [u64; 4]) -> u64 {
    let [four, three, two, one] = indices;
    let low = four << level_shift(4)
        | three << level_shift(3)
        | two << level_shift(2)
        | one << level_shift(1);
    // The highest translated bit is repeated in those above it.
    ((low << (64 - VIRTUAL_BITS)) as i64 >> (64 - VIRTUAL_BITS)) as u64
}

/// Free RAM: two aligned large pages, which stay as they are, and pages that can be taken.
#[derive(Clone, Copy, Debug)]
pub struct FrameAllocator {
    ram: Ram,
    /// Address of the two large pages.
    pub large: [u64; 2],
    next: u64,
    user_code: u64,
    /// Root of the start-up's tables, which are not in free RAM.
    start_up: u64,
}

impl FrameAllocator {
    /// All free RAM. A program calls it once.
    ///
    /// # Panics
    ///
    /// There is no RAM for the large pages.
    pub fn new() -> Self {
        let ram = Ram::free().expect("the machine has RAM");
        let first = ram.start().next_multiple_of(LARGE);
        let next = first + 2 * LARGE;
        let large = [first, first + LARGE];
        let mut frames = Self { ram, large, next, user_code: 0, start_up: cpu::cr3() };
        frames.user_code = frames.take();
        access::copy_code(frames.page(frames.user_code));
        frames
    }

    /// Loads the start-up's tables, and returns a copy: what was taken from one of the two before
    /// must not be used from now on, because the other will take it again.
    pub fn start_over(&self) -> Self {
        // SAFETY: they map the program to itself.
        unsafe { cpu::write_cr3(self.start_up) };
        *self
    }

    /// Number of pages that can be taken.
    pub fn left(&self) -> u64 {
        (self.ram.end() - self.next) / PAGE
    }

    /// Takes a page of zeros.
    pub fn take(&mut self) -> u64 {
        let frame = self.next;
        self.page(frame).iter().for_each(|word| word.store(0, SeqCst));
        self.next += PAGE;
        frame
    }

    /// Words of the page that contains a physical address in free RAM.
    pub fn page(&self, physical: u64) -> &'static [AtomicU64; ENTRIES] {
        self.ram.page(physical & !(PAGE - 1))
    }

    /// The word at an aligned physical address in free RAM.
    pub fn word(&self, physical: u64) -> &'static AtomicU64 {
        &self.page(physical)[(physical % PAGE / 8) as usize]
    }
}

impl Default for FrameAllocator {
    fn default() -> Self {
        Self::new()
    }
}

/// Page tables of four levels, by the physical address of their root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RootTable(pub u64);

impl RootTable {
    /// Makes tables with nothing but what all have (module head).
    pub fn new(frames: &mut FrameAllocator) -> Self {
        let tables = Self(frames.take());
        for gib in [0, 3] {
            let base = gib * HUGE;
            for at in (base..base + HUGE).step_by(LARGE as usize) {
                tables.map(frames, at, 2, at | KERNEL);
            }
        }
        let code = frames.user_code | entry::PRESENT | entry::USER;
        tables.map(frames, access::USER_CODE, 1, code);
        tables
    }

    /// Makes tables that share those below `other`'s root.
    pub fn share(frames: &mut FrameAllocator, other: Self) -> Self {
        let tables = Self(frames.take());
        for (to, from) in frames.page(tables.0).iter().zip(frames.page(other.0)) {
            to.store(from.load(SeqCst), SeqCst);
        }
        tables
    }

    /// Writes the entry of `level` for an address. Tables above it are made with all rights where
    /// none is present. `value` gets the bit of a large page where the level needs it.
    pub fn map(self, frames: &mut FrameAllocator, address: u64, level: u32, value: u64) {
        for upper in (level + 1..=TOP).rev() {
            let place = self.entry(frames, address, upper);
            if place.load(SeqCst) & entry::PRESENT == 0 {
                place.store(frames.take() | ALL, SeqCst);
            }
        }
        let large = if level > 1 { entry::LARGE } else { 0 };
        self.entry(frames, address, level).store(value | large, SeqCst);
    }

    /// The entry of `level` for an address. Tables above it must exist; whether they are present
    /// for the CPU does not matter.
    pub fn entry(self, frames: &FrameAllocator, address: u64, level: u32) -> &'static AtomicU64 {
        let mut table = self.0;
        for upper in (level + 1..=TOP).rev() {
            table = entry_in(frames, table, address, upper).load(SeqCst) & entry::ADDRESS;
        }
        entry_in(frames, table, address, level)
    }

    /// Loads `CR3`.
    pub fn load(self) {
        // SAFETY: all tables map the program to itself.
        unsafe { cpu::write_cr3(self.0) };
    }
}

/// The entry for an address in the table of `level` at a physical address.
pub fn entry_in(
    frames: &FrameAllocator,
    table: u64,
    address: u64,
    level: u32,
) -> &'static AtomicU64 {
    &frames.page(table)[(address >> level_shift(level)) as usize % ENTRIES]
}

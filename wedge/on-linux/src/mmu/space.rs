//! A process's lists of its mappings, in its private memory. All zeros is a process without
//! mappings.

use wedge_core::mapped::Mapped;

use crate::mmu::exec_scan::Page;
use crate::mmu::ram::PAGE;
use crate::mmu::syscall_patch::Calls;

/// Capacity of the list of user-mode mappings.
pub const PIECES: usize = 1024;
/// Capacity in pages that end with the beginning of a sequence.
const ENDS: usize = 64;

/// Lists of the mappings of a process.
#[derive(Default)]
pub struct AddressSpace {
    /// User-mode mappings.
    pub mapped: Mapped<PIECES>,
    /// Rewritten system calls.
    pub calls: Calls,
    /// Executable pages.
    pub code: Code,
    /// Copied frames that the process has write-protected.
    pub applied: AppliedFrames,
    /// Pages of the kernel image outside of its code are executable.
    pub is_image_open: bool,
}

/// Changes of the table of copied frames that a process has applied.
#[derive(Clone, Copy, Default, Debug)]
pub struct AppliedFrames {
    /// Last change applied to its mappings.
    pub changes: u32,
    /// Last removal that all vCPUs of the VM have applied.
    pub settled: u32,
    /// Consecutive failures of protecting frames.
    pub refused: u32,
}

/// Executable pages of a process, with protection keys.
pub struct Code {
    /// Pages that end with the beginning of a sequence: address and last two bytes; 0: none.
    ends: [(u64, [u8; 2]); ENDS],
    /// Stepped pages.
    pub steps: Steps,
}

impl Default for Code {
    fn default() -> Self {
        Self { ends: [(0, [0; 2]); ENDS], steps: Steps::default() }
    }
}

/// Pages that are executed by single steps.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Steps {
    /// First address and end; equal: none.
    pub start: u64,
    /// End, exclusive.
    pub end: u64,
    /// Nothing is mapped after them.
    pub alone: bool,
    /// The current instruction pushes the flags.
    pub pushes: bool,
    /// The trap flag is user mode's own.
    pub traps: bool,
    /// Pages writable for the current instruction, as bits from the first page on.
    pub written: u8,
    /// Guest-physical addresses of the pages.
    pub frames: [u64; 2],
}

impl Steps {
    /// Returns whether an address is in the stepped pages.
    pub fn contains(&self, rip: u64) -> bool {
        (self.start..self.end).contains(&rip)
    }
}

impl Code {
    /// Returns the last two bytes of a page that ends with the beginning of a sequence.
    pub fn end_of(&self, page: u64) -> Option<[u8; 2]> {
        self.ends.iter().find(|(listed, _)| *listed == page).map(|(_, end)| *end)
    }

    /// Lists a page that ends with the beginning of a sequence; returns the page that is not listed
    /// any more for that, and must be dropped.
    pub fn remember(&mut self, page: u64, end: [u8; 2]) -> Option<u64> {
        let free = self.ends.iter().position(|(page, _)| *page == 0);
        let index = free.unwrap_or((page / PAGE) as usize % ENDS);
        let (other, _) = core::mem::replace(&mut self.ends[index], (page, end));
        free.is_none().then_some(other)
    }

    /// Forgets the pages of an unmapped range. Returns stepped pages after it, which must be
    /// dropped: they execute only together with those before.
    pub fn forget(&mut self, start: u64, end: u64) -> Option<(u64, u64)> {
        let mut left = None;
        let Steps { start: first, end: last, .. } = self.steps;
        if first < end && start < last {
            // The remaining page was not scanned: it may be stepped only.
            self.steps = match first < start {
                true => {
                    Steps { end: start, alone: true, written: self.steps.written & 1, ..self.steps }
                }
                false => Steps::default(),
            };
            left = (end < last).then_some((end, last));
        }
        for (page, _) in &mut self.ends {
            if (start..end).contains(page) {
                *page = 0;
            }
        }
        left
    }
}

/// Returns the first and the last two bytes of a page, which adjacent pages may complete.
pub fn borders(page: &Page) -> [u8; 4] {
    let ([a, b, ..], [.., y, z]) = (*page, *page);
    [a, b, y, z]
}

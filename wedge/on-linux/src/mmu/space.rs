//! A process's lists of its mappings, in its private memory. All zeros is a process without
//! mappings.

use wedge_core::mapped::Mapped;

use crate::mmu::exec_scan::Page;
use crate::mmu::syscall_patch::Calls;

/// Capacity of the list of user-mode mappings.
pub const PIECES: usize = 1024;

/// Lists of the mappings of a process.
#[derive(Default)]
pub struct AddressSpace {
    /// User-mode mappings.
    pub mapped: Mapped<PIECES>,
    /// Rewritten system calls.
    pub calls: Calls,
    /// Stepped pages, with protection keys.
    pub steps: Steps,
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

    /// Forgets the pages of an unmapped range. Returns stepped pages after it, which must be
    /// dropped: they execute only together with those before.
    pub fn forget(&mut self, start: u64, end: u64) -> Option<(u64, u64)> {
        let Self { start: first, end: last, .. } = *self;
        if first >= end || start >= last {
            return None;
        }
        // The remaining page was not scanned: it may be stepped only.
        *self = match first < start {
            true => Self { end: start, alone: true, written: self.written & 1, ..*self },
            false => Self::default(),
        };
        (end < last).then_some((end, last))
    }
}

/// Returns the first and the last two bytes of a page, which adjacent pages may complete.
pub fn borders(page: &Page) -> [u8; 4] {
    let ([a, b, ..], [.., y, z]) = (*page, *page);
    [a, b, y, z]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mmu::ram::PAGE;

    #[test]
    fn zeros_are_a_process_without_mappings() {
        let mut space = std::boxed::Box::<AddressSpace>::default();
        assert!(space.mapped.is_complete() && space.mapped.pieces().is_empty());
        assert_eq!((space.steps, space.calls.free_slot()), (Steps::default(), Some(0)));
        assert_eq!(space.steps.forget(0, u64::MAX), None);
    }

    #[test]
    fn unmapping_cuts_stepped_pages() {
        let whole = Steps { start: 0x1000, end: 0x3000, written: 3, ..Steps::default() };
        let mut steps = whole;
        assert_eq!(steps.forget(0x3000, 0x4000), None);
        assert_eq!(steps, whole);
        // The second page.
        assert_eq!(steps.forget(0x2000, 0x4000), None);
        assert_eq!(steps, Steps { end: 0x2000, alone: true, written: 1, ..whole });
        // The first page leaves the second.
        steps = whole;
        assert_eq!(steps.forget(0x0000, 0x2000), Some((0x2000, 0x3000)));
        assert_eq!(steps, Steps::default());
        assert!(!steps.contains(0x1000));
    }

    #[test]
    fn borders_are_the_outer_bytes() {
        let mut page = [0; PAGE as usize];
        (page[0], page[1], page[4094], page[4095]) = (1, 2, 3, 4);
        assert_eq!(borders(&page), [1, 2, 3, 4]);
    }
}

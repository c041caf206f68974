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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_a_process_without_mappings() {
        let mut space = std::boxed::Box::<AddressSpace>::default();
        assert!(space.mapped.is_complete() && space.mapped.pieces().is_empty());
        assert_eq!((space.code.steps, space.calls.free_slot()), (Steps::default(), Some(0)));
        assert_eq!(space.code.forget(0, u64::MAX), None);
    }

    #[test]
    fn ends_of_pages_are_remembered_until_they_are_unmapped() {
        let mut code = Code::default();
        assert_eq!(code.remember(0x1000, [0x90, 0x0f]), None);
        assert_eq!(code.end_of(0x1000), Some([0x90, 0x0f]));
        assert_eq!(code.end_of(0x2000), None);
        code.forget(0x2000, 0x3000);
        assert!(code.end_of(0x1000).is_some());
        code.forget(0x1000, 0x2000);
        assert_eq!(code.end_of(0x1000), None);
    }

    #[test]
    fn a_full_list_names_the_page_to_drop() {
        let mut code = Code::default();
        for page in 1..=ENDS as u64 {
            assert_eq!(code.remember(page * PAGE, [0x90, 0x0f]), None);
        }
        let dropped = code.remember(1000 * PAGE, [0x0f, 0xae]).unwrap();
        assert_eq!(code.end_of(dropped), None);
        assert_eq!(code.end_of(1000 * PAGE), Some([0x0f, 0xae]));
    }

    #[test]
    fn unmapping_cuts_stepped_pages() {
        let steps = Steps { start: 0x1000, end: 0x3000, written: 3, ..Steps::default() };
        let mut code = Code { steps, ..Code::default() };
        // The second page.
        assert_eq!(code.forget(0x2000, 0x4000), None);
        assert_eq!(code.steps, Steps { end: 0x2000, alone: true, written: 1, ..steps });
        // The first page leaves the second.
        code.steps = steps;
        assert_eq!(code.forget(0x0000, 0x2000), Some((0x2000, 0x3000)));
        assert_eq!(code.steps, Steps::default());
        assert!(!code.steps.contains(0x1000));
    }

    #[test]
    fn borders_are_the_outer_bytes() {
        let mut page = [0; PAGE as usize];
        (page[0], page[1], page[4094], page[4095]) = (1, 2, 3, 4);
        assert_eq!(borders(&page), [1, 2, 3, 4]);
    }
}

//! Copies of user pages for execution, with protection keys ([`crate::mmu::exec_scan`]).

use linux_raw_sys::general as linux;
use wedge_core::mapped::Piece;

use crate::mmu::Mmu;
use crate::mmu::exec_scan::{ScannedPage, find, is_beginning, is_end};
use crate::mmu::host::{HostMap, MappingListener};
use crate::mmu::ram::PAGE;
use crate::mmu::space::{Steps, borders};
use proto::errno::Errno;

impl<H: HostMap + MappingListener> Mmu<'_, H> {
    /// Drops the executable copies of frames in a range of guest memory, given by its offset,
    /// before a write.
    pub(super) fn drop_code_copies(&mut self, offset: u64, length: u64) {
        let Steps { start, end, .. } = self.space.steps;
        if start != end {
            self.drop_range(start, end);
        }
        self.drop_mapped(self.vm.copies().start + offset, length, linux::PROT_EXEC);
    }

    /// Refreshes the copy of a guest page; returns whether it has changed. `None`: the page must
    /// not be executed.
    fn renew(&mut self, address: u64, offset: u64) -> Option<bool> {
        let memory = self.vm.memory;
        let copy = self.host.code_copy(offset);
        if memory.is_equal(address, copy).ok()? {
            return Some(false);
        }
        let mut bytes = [0; PAGE as usize];
        memory.read_slice(address, &mut bytes).ok()?;
        let scanned = ScannedPage::closed(bytes)?;
        let bytes = scanned.bytes();
        let changes = copy != bytes;
        if borders(copy) != borders(bytes) && (is_beginning(bytes).is_some() || is_end(bytes)) {
            self.copy_changed(self.vm.copies().start + offset);
        }
        *self.host.code_copy(offset) = *bytes;
        Some(changes)
    }

    /// Maps contiguous user pages executable and read-only, from a guest-physical address and its
    /// offset in the file on; returns the end. A page that must not be executed ends the run.
    pub(super) fn map_code(
        &mut self,
        linear: u64,
        size: u64,
        address: u64,
        offset: u64,
    ) -> Result<u64, Errno> {
        let mut mapped = 0;
        let Steps { start, end, .. } = self.space.steps;
        if start != end && start < linear + size && linear <= end {
            // The last stepped page may have been mapped without its neighbour.
            self.drop_range(start, end);
        }
        let mut before = self.end_before(linear);
        let mut changes = false;
        while mapped < size {
            match self.renew(address + mapped, offset + mapped) {
                None => break,
                Some(changed) => changes |= changed,
            }
            let copy = self.host.code_copy(offset + mapped);
            if before.is_some_and(|[a, b]| find(&[a, b, copy[0], copy[1]], 0).is_some()) {
                break;
            }
            before = is_beginning(copy);
            mapped += PAGE;
        }
        if mapped == 0 {
            return Ok(linear);
        }
        if changes {
            self.host.serialize();
        }
        let rights = linux::PROT_READ | linux::PROT_EXEC;
        let offset_of_copy = self.vm.copies().start + offset;
        // If this drops the page before, the scanned pages stay harmless without it.
        self.map_or_drop_all(linear, mapped, rights, offset_of_copy)?;
        let piece = Piece { start: linear, end: linear + mapped, offset: offset_of_copy, rights };
        self.space.mapped.add(piece);
        self.forget(linear, linear + mapped);
        if before.is_some() {
            // The next page may complete a sequence; it is scanned when it is executed.
            self.drop_range(linear + mapped, linear + mapped + PAGE);
        }
        Ok(linear + mapped)
    }

    /// Returns the last two bytes of the executable page before an address, if a sequence may begin
    /// there. Drops all pages if that page is perhaps mapped but not listed.
    fn end_before(&mut self, linear: u64) -> Option<[u8; 2]> {
        let page = linear.wrapping_sub(PAGE);
        let Some(piece) = self.space.mapped.at(page) else {
            if !self.space.mapped.is_complete() {
                self.drop_user_pages();
            }
            return None;
        };
        // Its copy as it is now: if it has changed, the page is dropped before user mode runs.
        let offset = self.vm.original(piece.offset + (page - piece.start))?;
        is_beginning(self.host.code_copy(offset))
    }

    /// Returns whether a page executes from the copy of a guest page.
    pub(super) fn is_copy_of(&self, page: u64, address: u64) -> bool {
        let piece = self.space.mapped.at(page);
        let mapped = piece.and_then(|piece| self.vm.original(piece.offset + (page - piece.start)));
        mapped.is_some() && mapped == self.vm.ram.offset(address).map(|(offset, _)| offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mmu::fill::Fault;
    use crate::mmu::space::PIECES;
    use crate::mmu::testing::{CODE, Call, HIGH, LOW, READ, Rig, USER};
    use core::sync::atomic::Ordering::SeqCst;
    use hw_walk::Intent;

    const FRAME: u64 = 0x8_0000;

    fn guest() -> Rig {
        let mut rig = Rig::with_keys();
        rig.memory.fill(FRAME, 4 * PAGE, 0x90).unwrap();
        rig.set_run(USER, FRAME, 4, CODE);
        rig
    }

    /// Makes the list of mappings incomplete.
    fn overflow(rig: &mut Rig) {
        for index in 0..=PIECES as u64 {
            let start = USER + 0x1000_0000 + 2 * index * PAGE;
            let piece = Piece { start, end: start + PAGE, offset: FRAME, rights: READ };
            rig.space.mapped.add(piece);
        }
        assert!(!rig.space.mapped.is_complete());
    }

    #[test]
    fn a_sequence_across_two_pages_is_never_mapped() {
        let mut rig = guest();
        rig.memory.write_slice(FRAME + PAGE - 1, &[0x0f, 0x01, 0xef]).unwrap();
        rig.fill(USER, Intent::Fetch);
        assert_eq!(rig.host.pages.len(), 1);
        // The second page alone: the first is dropped for it.
        rig.fill(USER + PAGE, Intent::Fetch);
        assert!(rig.host.at(USER).is_none() || rig.host.at(USER + PAGE).is_none());
    }

    #[test]
    fn a_page_that_ends_like_a_sequence_may_have_a_harmless_neighbour() {
        let mut rig = guest();
        rig.memory.write(FRAME + PAGE - 1, 0x0f_u8).unwrap();
        rig.fill(USER, Intent::Fetch);
        assert_eq!(rig.host.pages.len(), 4);
        assert_eq!(rig.mmu().end_before(USER + PAGE), Some([0x90, 0x0f]));
        assert_eq!(rig.mmu().end_before(USER), None);
    }

    #[test]
    fn any_number_of_pages_that_end_like_a_sequence_stay_mapped() {
        // A compiler has 156 of them.
        const PAGES: u64 = 256;
        let mut rig = Rig::with_keys();
        rig.memory.fill(FRAME, PAGES * PAGE, 0x90).unwrap();
        rig.set_run(USER, FRAME, PAGES, CODE);
        for page in 0..PAGES {
            rig.memory.write(FRAME + (page + 1) * PAGE - 1, 0x0f_u8).unwrap();
        }
        let calls = (0..2).map(|_| {
            for page in 0..PAGES {
                if rig.host.at(USER + page * PAGE).is_none() {
                    assert_eq!(rig.fill(USER + page * PAGE, Intent::Fetch), Fault::Filled);
                }
            }
            rig.host.calls
        });
        let [first, second] = calls.collect::<std::vec::Vec<_>>()[..] else { unreachable!() };
        assert_eq!((rig.host.pages.len() as u64, second), (PAGES, first));
    }

    #[test]
    fn an_instruction_across_two_pages_executes_with_a_full_list() {
        let mut rig = guest();
        rig.memory.write(FRAME + PAGE - 1, 0x0f_u8).unwrap();
        overflow(&mut rig);
        for _ in 0..3 {
            rig.mmu().map_code(USER, PAGE, FRAME, FRAME).unwrap();
            rig.mmu().map_code(USER + PAGE, PAGE, FRAME + PAGE, FRAME + PAGE).unwrap();
        }
        assert!(rig.host.at(USER).is_some() && rig.host.at(USER + PAGE).is_some());
        assert!(rig.space.mapped.is_complete());
    }

    #[test]
    fn a_page_that_is_perhaps_mapped_is_not_joined() {
        let mut rig = guest();
        rig.memory.write_slice(FRAME + PAGE - 1, &[0x0f, 0x01, 0xef]).unwrap();
        rig.mmu().map_code(USER, PAGE, FRAME, FRAME).unwrap();
        rig.space.mapped.remove(USER, USER + PAGE);
        overflow(&mut rig);
        rig.mmu().map_code(USER + PAGE, PAGE, FRAME + PAGE, FRAME + PAGE).unwrap();
        assert!(rig.host.at(USER).is_none() && rig.host.at(USER + PAGE).is_some());
    }

    #[test]
    fn the_end_of_a_run_drops_an_unscanned_neighbour() {
        let mut rig = guest();
        rig.memory.write(FRAME + PAGE - 1, 0x0f_u8).unwrap();
        rig.fill(USER, Intent::Fetch);
        let [end] = [USER + PAGE];
        rig.mmu().map_code(USER, PAGE, FRAME, FRAME).unwrap();
        assert!(rig.host.at(end).is_none());
    }

    #[test]
    fn unchanged_copies_need_no_serialisation() {
        let mut rig = guest();
        rig.fill(USER, Intent::Fetch);
        assert_eq!(rig.host.serialized, 1);
        rig.mmu().drop_user_pages();
        rig.fill(USER, Intent::Fetch);
        assert_eq!(rig.host.serialized, 1);
    }

    #[test]
    fn a_changed_border_drops_the_copy_in_all_processes() {
        let mut rig = guest();
        rig.fill(USER, Intent::Fetch);
        rig.memory.write(FRAME + 4 * PAGE - 1, 0x0f_u8).unwrap();
        rig.mmu().drop_range(USER + 3 * PAGE, USER + 4 * PAGE);
        rig.fill(USER + 3 * PAGE, Intent::Fetch);
        assert_eq!(rig.vcpus[0].renewals.load(SeqCst), 1);
        assert_eq!(rig.vcpus[0].renewed[0].load(SeqCst), LOW + HIGH + FRAME + 3 * PAGE);
    }

    #[test]
    fn writes_drop_copies() {
        let mut rig = guest();
        rig.fill(USER, Intent::Fetch);
        rig.table.write(FRAME + PAGE, PAGE);
        rig.sync();
        assert!(rig.host.at(USER + PAGE).is_none() && rig.host.at(USER).is_some());
    }

    #[test]
    fn copies_know_their_originals() {
        let mut rig = guest();
        rig.fill(USER, Intent::Fetch);
        let mmu = rig.mmu();
        assert!(mmu.is_copy_of(USER + PAGE, FRAME + PAGE));
        assert!(!mmu.is_copy_of(USER + PAGE, FRAME) && !mmu.is_copy_of(USER + 0x10_0000, FRAME));
        assert_eq!(mmu.vm.original(FRAME), None);
    }

    #[test]
    fn a_refused_mapping_of_code_drops_all_and_is_retried_once() {
        let mut rig = guest();
        rig.memory.write(FRAME + 2 * PAGE - 1, 0x0f_u8).unwrap();
        rig.mmu().map_code(USER, PAGE, FRAME, FRAME).unwrap();
        rig.host.fails_after = Some(0);
        let end = rig.mmu().map_code(USER + PAGE, PAGE, FRAME + PAGE, FRAME + PAGE);
        assert_eq!(end, Ok(USER + 2 * PAGE));
        assert_eq!(rig.host.at(USER), None);
        assert!(rig.host.at(USER + PAGE).is_some());
        assert_eq!(rig.space.mapped.pieces().len(), 1);
    }

    #[test]
    fn a_page_outside_of_memory_is_not_copied() {
        let mut rig = guest();
        assert_eq!(rig.mmu().map_code(USER, PAGE, LOW, LOW), Ok(USER));
        assert!(rig.host.pages.is_empty());
        (rig.host.fails_after, rig.host.fails_again) = (Some(0), usize::MAX);
        rig.host.fails = |call| call == Call::Map;
        assert!(rig.mmu().map_code(USER, PAGE, FRAME, FRAME).is_err());
        assert_eq!(rig.space.mapped.at(USER).map(|piece| piece.rights & READ), None);
    }
}

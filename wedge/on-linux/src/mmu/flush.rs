//! Flushes: the removal of stale mappings.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use linux_raw_sys::general as linux;
use proto::errno::Errno;
use proto::hosted::{counter, layout};
use wedge_core::mapped::{Mapped, Piece};

use crate::mmu::Mmu;
use crate::mmu::host::{HostMap, MappingListener};
use crate::mmu::ram::{PAGE, is_filled_in, is_kernel, is_user};
use crate::mmu::space::PIECES;
use crate::mmu::walk::still_allows;
use crate::state::shared::{EVERYTHING, FLUSHES};
use hw_walk::{Leaf, leaf};
use vmm_x86::walk::GuestTables;

const LARGE: u64 = 2 << 20;
/// Largest number of system calls by which a flush drops stale mappings individually, before it
/// drops all.
const CHANGES: usize = 24;

/// Change of mapped pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    Drop,
    /// Reduce the rights.
    Narrow(u32),
}

/// Changes to carry out: contiguous pages with the same change need one call.
struct Changes {
    all: [(u64, u64, Change); CHANGES],
    used: usize,
    /// The last page belongs to the last change: no page is kept in between.
    continues: bool,
}

impl Changes {
    const fn new() -> Self {
        Self { all: [(0, 0, Change::Drop); CHANGES], used: 0, continues: false }
    }

    /// Adds the change of the pages from `at` to `next`; `None`: they stay. Fails if there are too
    /// many changes.
    fn add(&mut self, at: u64, next: u64, change: Option<Change>) -> Option<()> {
        let last = self.used.checked_sub(1).map(|index| &mut self.all[index]);
        match (change, last) {
            (None, _) => self.continues = false,
            // No mappings lie between, except for the hole of the kernel image.
            (Some(Change::Drop), Some((from, to, Change::Drop)))
                if self.continues && (*from < layout::IMAGE) == (at < layout::IMAGE) =>
            {
                *to = next;
            }
            (Some(change), Some((_, to, before)))
                if self.continues && *to == at && change == *before =>
            {
                *to = next;
            }
            (Some(change), _) => {
                *self.all.get_mut(self.used)? = (at, next, change);
                self.used += 1;
                self.continues = true;
            }
        }
        Some(())
    }
}

impl<H: HostMap + MappingListener> Mmu<'_, H> {
    /// Forgets what lists say of pages that are mapped again or unmapped.
    pub(super) fn forget(&mut self, start: u64, end: u64) {
        self.space.calls.forget(start, end);
        if let Some((start, end)) = self.space.steps.forget(start, end) {
            self.drop_range(start, end);
        }
    }

    /// Unmaps pages, perhaps with others.
    fn unmap(&mut self, start: u64, end: u64) {
        // At its limit of mappings the host cannot split one; dropping all splits none.
        match self.try_unmap(start, end) {
            Ok(()) => {}
            Err(_) if is_user(start) => self.drop_user_pages(),
            Err(_) => self.drop_all(),
        }
    }

    fn try_unmap(&mut self, start: u64, end: u64) -> Result<(), Errno> {
        self.space.mapped.remove(start, end);
        self.forget(start, end);
        self.host.unmap(start, end)?;
        if is_user(start) {
            self.host.on_unmap(start, end);
        }
        Ok(())
    }

    /// Unmaps all pages of a range in which pages are mapped on demand.
    fn unmap_whole(&mut self, start: u64, end: u64) {
        if let Err(error) = self.try_unmap(start, end) {
            self.host.fatal(format_args!("cannot unmap guest memory at {start:#x}: {error}"));
        }
    }

    /// Drops all user-mode mappings of this process.
    pub fn drop_user_pages(&mut self) {
        // The host may refuse mappings of the first pages.
        self.unmap_whole(0, layout::IMAGE);
        self.unmap_whole(layout::LOW_END, layout::TASK_SIZE);
        self.space.mapped.clear();
        self.host.on_stale();
        self.vm.slot.large.store(false, Relaxed);
        self.vm.slot.stale.store(false, Relaxed);
    }

    /// Drops user-mode mappings of this process.
    pub fn drop_range(&mut self, start: u64, end: u64) {
        if is_user(start) && is_user(end - 1) {
            self.unmap(start, end);
        }
    }

    /// Drops the writable user-mode mappings of frames, given by their offset in guest memory.
    pub(super) fn drop_writable(&mut self, offset: u64, length: u64) {
        self.drop_mapped(offset, length, linux::PROT_WRITE);
    }

    /// Drops the user-mode mappings of a range of the file of guest memory that have some of these
    /// rights.
    pub(super) fn drop_mapped(&mut self, offset: u64, length: u64, rights: u32) {
        if !self.space.mapped.is_complete() {
            self.drop_user_pages();
            return;
        }
        while let Some((start, end)) = first_mapped(&self.space.mapped, offset, length, rights) {
            self.unmap(start, end);
        }
    }

    fn drop_kernel(&mut self) {
        if core::mem::take(&mut self.space.is_image_open) {
            self.close_image();
        }
        self.unmap_whole(layout::MODULES, layout::MODULES_END);
        self.unmap_whole(layout::FIXMAP, layout::LOW_END);
        self.unmap_whole(layout::VMALLOC, layout::GUEST_END);
    }

    /// Makes the kernel image non-executable outside of its code.
    fn close_image(&mut self) {
        let (code, code_end) = self.vm.code;
        let end = code_end.next_multiple_of(PAGE);
        let rights = linux::PROT_READ | linux::PROT_WRITE;
        let (image, length) = self.vm.ram.image_mapping();
        for (from, to) in [(image, code), (end, image + length)] {
            if let Err(error) = self.host.close(from, to - from, rights) {
                self.host.fatal(format_args!("cannot protect the guest kernel's image: {error}"));
            }
        }
    }

    /// Drops all mappings on demand of this process.
    pub(super) fn drop_all(&mut self) {
        self.drop_user_pages();
        self.drop_kernel();
    }

    /// Drops a page of this process, with the large page that may contain it.
    pub fn drop_page(&mut self, linear: u64) {
        if !is_filled_in(linear) {
            return;
        }
        let size = if self.vm.slot.large.load(Relaxed) { LARGE } else { PAGE };
        let start = linear & !(size - 1);
        if size == PAGE || !is_user(linear) || !self.drop_stale(start, start + size) {
            self.unmap(start, start + size);
        }
    }

    /// Drops the user-mode mappings between two addresses that the page tables do not contain any
    /// more, and reduces rights. `false`: too many changes, or the list is incomplete.
    fn drop_stale(&mut self, start: u64, end: u64) -> bool {
        if !self.space.mapped.is_complete() || !self.vm.modes.batches {
            return false;
        }
        let mut changes = Changes::new();
        if self.find_stale(start, end, &mut changes).is_none() {
            return false;
        }
        for &(start, end, change) in &changes.all[..changes.used] {
            match change {
                Change::Drop => self.unmap(start, end),
                Change::Narrow(rights) => self.narrow(start, end, rights),
            }
        }
        true
    }

    fn find_stale(&self, start: u64, end: u64, changes: &mut Changes) -> Option<()> {
        let root = self.vm.slot.root.load(Relaxed);
        let pieces = self.space.mapped.pieces();
        let first = pieces.partition_point(|piece| piece.end <= start);
        for piece in pieces[first..].iter().take_while(|piece| piece.start < end) {
            let mut at = piece.start.max(start);
            let last = piece.end.min(end);
            while at < last {
                let leaf = leaf(&GuestTables(self.vm.memory), root, at);
                let size = leaf.map_or(PAGE, |leaf| leaf.size);
                // A copy is of code, which user mode cannot write.
                let is_copy = self.vm.original(piece.offset + (at - piece.start)).is_some();
                let unit = if is_copy { PAGE } else { size };
                let next = last.min((at & !(unit - 1)) + unit);
                changes.add(at, next, self.change_of(piece, at, leaf, unit))?;
                at = next;
            }
        }
        Some(())
    }

    /// Returns the change of the mapped pages at an address, which have this leaf entry now;
    /// `None`: they stay.
    fn change_of(&self, piece: &Piece, at: u64, leaf: Option<Leaf>, unit: u64) -> Option<Change> {
        let (ram, memory) = (&self.vm.ram, self.vm.memory);
        let offset = piece.offset + (at - piece.start);
        let copied = self.vm.original(offset);
        let wanted =
            leaf.map_or(0, |leaf| still_allows(&leaf, (ram, memory), at, copied.unwrap_or(offset)));
        let is_old = |leaf: Leaf| {
            let address = leaf.address + (at & (leaf.size - 1));
            // With protection keys all copies follow their frames.
            !self.vm.modes.keys
                && unit == PAGE
                && self.space.calls.has_copy(at)
                && !self.is_current(at, address, memory)
        };
        match wanted & piece.rights {
            rights if rights & linux::PROT_READ == 0 || leaf.is_some_and(is_old) => {
                Some(Change::Drop)
            }
            // Executable copies are all or nothing.
            rights if copied.is_some() && rights != piece.rights => Some(Change::Drop),
            rights if rights != piece.rights => Some(Change::Narrow(rights)),
            _ => None,
        }
    }

    /// Reduces the rights of pages that are mapped by one call, or parts of them.
    fn narrow(&mut self, start: u64, end: u64, rights: u32) {
        if self.host.protect(start, end - start, rights).is_err() {
            self.unmap(start, end);
            return;
        }
        self.host.on_narrow(start, end, rights);
        let mapped = &mut self.space.mapped;
        let mut at = start;
        while let Some(piece) = mapped.at(at).filter(|_| at < end) {
            let to = piece.end.min(end);
            let offset = piece.offset + (at - piece.start);
            mapped.add(Piece { start: at, end: to, offset, rights });
            at = to;
        }
    }

    /// Notifies all processes of this vCPU that the beginning or end of a code copy has changed:
    /// none may execute it next to previously mapped neighbours.
    pub(super) fn copy_changed(&mut self, offset: u64) {
        let vcpu = self.vm.vcpu;
        let number = vcpu.renewals.load(Relaxed);
        vcpu.renewed[number as usize % FLUSHES].store(offset, Relaxed);
        vcpu.renewals.store(number + 1, Relaxed);
        self.follow_copies();
    }

    /// Drops in this process the copies that have changed since it last ran the vCPU.
    fn follow_copies(&mut self) {
        let (vcpu, slot) = (self.vm.vcpu, self.vm.slot);
        let now = vcpu.renewals.load(Relaxed);
        let seen = slot.renewals.swap(now, Relaxed);
        if now != seen
            && (now.wrapping_sub(seen) > FLUSHES as u64 || !self.space.mapped.is_complete())
        {
            self.drop_user_pages();
            return;
        }
        for number in seen..now {
            let offset = vcpu.renewed[number as usize % FLUSHES].load(Relaxed);
            self.drop_mapped(offset, PAGE, linux::PROT_READ);
        }
    }

    /// Flushes a page in the current address space, or in all of them if the kernel shares it.
    pub fn flush_page(&mut self, linear: u64) {
        match is_kernel(linear) {
            true => self.kernel_changed(linear),
            false => self.drop_page(linear),
        }
    }

    /// Notifies all processes of this vCPU of a changed kernel mapping; [`EVERYTHING`]: of all
    /// kernel mappings.
    pub fn kernel_changed(&mut self, linear: u64) {
        let vcpu = self.vm.vcpu;
        let number = vcpu.changes.load(Relaxed);
        vcpu.changed[number as usize % FLUSHES].store(linear, Relaxed);
        vcpu.changes.store(number + 1, SeqCst);
        self.follow();
    }

    /// Applies to this process all changes since it last ran the vCPU.
    pub fn follow(&mut self) {
        let (vcpu, slot) = (self.vm.vcpu, self.vm.slot);
        if self.vm.modes.profile {
            self.host.on_follow();
        }
        let now = vcpu.changes.load(SeqCst);
        let seen = slot.followed.load(Relaxed);
        if now.wrapping_sub(seen) > FLUSHES as u64 {
            self.drop_kernel();
        } else {
            for number in seen..now {
                match vcpu.changed[number as usize % FLUSHES].load(Relaxed) {
                    EVERYTHING => self.drop_kernel(),
                    linear => self.drop_page(linear),
                }
            }
        }
        slot.followed.store(now, Relaxed);
        self.follow_copies();
        if slot.stale.load(Relaxed) {
            self.host.count(counter::FLUSHES);
            self.host.on_stale();
            if self.drop_stale(0, layout::TASK_SIZE) {
                slot.stale.store(false, Relaxed);
            } else {
                self.drop_user_pages();
            }
        }
    }
}

/// Returns the first mapped pages of a range of the file of guest memory that have some of these
/// rights: first address and end.
fn first_mapped(
    mapped: &Mapped<PIECES>,
    offset: u64,
    length: u64,
    rights: u32,
) -> Option<(u64, u64)> {
    let end = offset + length;
    let is_wanted = |piece: &&Piece| {
        let last = piece.offset + (piece.end - piece.start);
        piece.rights & rights != 0 && piece.offset < end && offset < last
    };
    let piece = mapped.pieces().iter().find(is_wanted)?;
    let at = |offset: u64| piece.start + (offset - piece.offset);
    let last = piece.offset + (piece.end - piece.start);
    Some((at(offset.max(piece.offset)), at(end.min(last))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mmu::testing::{CODE, DATA, Event, READ, Rig, USER, WRITE};
    use hw_walk::Intent;
    use hw_x86::paging::entry;

    fn mapped(pages: u64) -> Rig {
        let mut rig = Rig::new();
        rig.set_run(USER, 0x8_0000, pages, DATA);
        rig.fill(USER, Intent::Write);
        assert_eq!(rig.host.pages.len() as u64, pages);
        rig.host.events.clear();
        rig
    }

    fn flush_space(rig: &mut Rig) {
        rig.vcpus[0].slots[0].stale.store(true, Relaxed);
        rig.mmu().follow();
        assert!(!rig.vcpus[0].slots[0].stale.load(Relaxed));
    }

    #[test]
    fn a_flush_drops_exactly_what_has_changed() {
        let mut rig = mapped(6);
        rig.set(USER + PAGE, 0, 0);
        rig.set(USER + 2 * PAGE, 0xa_0000, DATA);
        rig.set(USER + 4 * PAGE, 0, 0);
        flush_space(&mut rig);
        let left: std::vec::Vec<u64> =
            rig.host.pages.keys().map(|page| (page - USER) / PAGE).collect();
        assert_eq!(left, [0, 3, 5]);
        let unmapped = [
            Event::Unmap(USER + PAGE, USER + 3 * PAGE),
            Event::Unmap(USER + 4 * PAGE, USER + 5 * PAGE),
        ];
        assert_eq!(rig.host.events[..], [&[Event::Stale][..], &unmapped].concat());
    }

    #[test]
    fn reduced_rights_are_narrowed_in_place() {
        let mut rig = mapped(3);
        rig.set_run(USER, 0x8_0000, 2, DATA & !entry::WRITE);
        flush_space(&mut rig);
        assert_eq!(rig.host.at(USER + PAGE), Some((0x8_1000, READ)));
        assert_eq!(rig.host.at(USER + 2 * PAGE), Some((0x8_2000, READ | WRITE)));
        assert!(rig.host.events.contains(&Event::Narrow(USER, USER + 2 * PAGE, READ)));
        assert_eq!(rig.space.mapped.at(USER).unwrap().rights, READ);
    }

    #[test]
    fn rights_that_cannot_be_narrowed_are_unmapped() {
        let mut rig = mapped(1);
        rig.set(USER, 0x8_0000, DATA & !entry::WRITE);
        rig.host.fails_after = Some(0);
        flush_space(&mut rig);
        assert_eq!((rig.host.at(USER), rig.space.mapped.at(USER)), (None, None));
    }

    #[test]
    fn too_many_changes_drop_all() {
        let mut rig = mapped(60);
        for page in (0..60).step_by(2) {
            rig.set(USER + page * PAGE, 0, 0);
        }
        flush_space(&mut rig);
        assert!(rig.host.pages.is_empty() && rig.space.mapped.pieces().is_empty());
    }

    #[test]
    fn without_batches_a_flush_drops_all() {
        let mut rig = mapped(2);
        rig.modes.batches = false;
        flush_space(&mut rig);
        assert!(rig.host.pages.is_empty());
    }

    #[test]
    fn one_page_is_flushed_alone() {
        let mut rig = mapped(3);
        rig.mmu().flush_page(USER + PAGE);
        assert_eq!((rig.host.pages.len(), rig.host.at(USER + PAGE)), (2, None));
        // Addresses that are never mapped on demand.
        rig.mmu().flush_page(layout::IMAGE);
        assert_eq!(rig.host.pages.len(), 2);
    }

    #[test]
    fn with_large_pages_a_flush_examines_the_large_page() {
        let mut rig = mapped(3);
        rig.vcpus[0].slots[0].large.store(true, Relaxed);
        rig.set(USER + 2 * PAGE, 0, 0);
        rig.mmu().flush_page(USER);
        assert_eq!(rig.host.pages.len(), 2);
    }

    #[test]
    fn kernel_changes_reach_a_process_that_follows_later() {
        let mut rig = Rig::new();
        rig.cpu.cpl = 0;
        let pages = [layout::MODULES, layout::VMALLOC].map(|at| at + 0x1000);
        for page in pages {
            rig.set(page, 0x8_0000, DATA & !entry::USER);
            rig.fill(page, Intent::Read);
        }
        let vcpu = &rig.vcpus[0];
        vcpu.changed[0].store(pages[0], Relaxed);
        vcpu.changes.store(1, SeqCst);
        rig.mmu().follow();
        assert_eq!(
            (rig.host.at(pages[0]), rig.host.at(pages[1])),
            (None, Some((0x8_0000, READ | WRITE)))
        );
        rig.mmu().kernel_changed(EVERYTHING);
        assert!(rig.host.pages.is_empty());
    }

    #[test]
    fn a_process_that_missed_changes_drops_the_kernel() {
        let mut rig = Rig::new();
        rig.cpu.cpl = 0;
        rig.set(layout::MODULES, 0x8_0000, DATA & !entry::USER);
        rig.fill(layout::MODULES, Intent::Read);
        rig.vcpus[0].changes.store(FLUSHES as u64 + 1, SeqCst);
        rig.mmu().follow();
        assert!(rig.host.pages.is_empty());
        // A guest that has set the counter back harms nothing else.
        rig.vcpus[0].changes.store(0, SeqCst);
        rig.mmu().follow();
        assert_eq!(rig.vcpus[0].slots[0].followed.load(Relaxed), 0);
    }

    #[test]
    fn dropping_all_user_pages_leaves_the_kernel() {
        let mut rig = mapped(2);
        rig.set(layout::FIXMAP, 0x8_0000, DATA);
        rig.fill(layout::FIXMAP, Intent::Read);
        rig.mmu().drop_user_pages();
        assert_eq!(rig.host.pages.len(), 1);
        assert!(rig.host.events.contains(&Event::Stale));
    }

    #[test]
    fn ranges_beside_user_mode_are_not_dropped() {
        let mut rig = mapped(1);
        rig.mmu().drop_range(layout::LOW_END - PAGE, layout::LOW_END);
        rig.mmu().drop_range(USER, layout::DIRECT + PAGE);
        assert_eq!((rig.host.calls, rig.host.pages.len()), (1, 1));
    }

    #[test]
    fn frames_are_dropped_wherever_they_are_mapped() {
        let mut rig = mapped(4);
        rig.set(USER + 0x100_0000, 0x8_1000, DATA & !entry::WRITE);
        rig.fill(USER + 0x100_0000, Intent::Read);
        rig.mmu().drop_writable(0x8_1000, PAGE);
        assert_eq!((rig.host.at(USER + PAGE), rig.host.pages.len()), (None, 4));
        rig.mmu().drop_mapped(0x8_0000, 4 * PAGE, READ);
        assert!(rig.host.pages.is_empty());
    }

    #[test]
    fn an_incomplete_list_drops_all() {
        let mut rig = mapped(1);
        for index in 0..PIECES as u64 {
            let start = USER + (2 * index + 0x1000) * PAGE;
            rig.space.mapped.add(Piece { start, end: start + PAGE, offset: 0, rights: READ });
        }
        assert!(!rig.space.mapped.is_complete());
        rig.mmu().drop_mapped(0x10_0000, PAGE, READ);
        assert!(rig.host.pages.is_empty() && rig.space.mapped.is_complete());
    }

    #[test]
    fn a_refused_unmapping_drops_all_user_pages() {
        let mut rig = mapped(3);
        rig.set(layout::FIXMAP, 0x8_0000, DATA);
        rig.fill(layout::FIXMAP, Intent::Read);
        rig.host.fails_after = Some(0);
        rig.mmu().drop_range(USER + PAGE, USER + 2 * PAGE);
        assert_eq!(rig.host.pages.keys().collect::<std::vec::Vec<_>>(), [&layout::FIXMAP]);
        assert!(rig.space.mapped.pieces().is_empty());
        // The user process, too.
        assert!(rig.host.events.contains(&Event::Unmap(0, layout::IMAGE)));
        assert!(rig.host.events.contains(&Event::Unmap(layout::LOW_END, layout::TASK_SIZE)));
    }

    #[test]
    fn rights_that_cannot_be_narrowed_or_unmapped_drop_all_user_pages() {
        let mut rig = mapped(3);
        rig.set(USER + PAGE, 0x8_1000, DATA & !entry::WRITE);
        (rig.host.fails_after, rig.host.fails_again) = (Some(0), 1);
        flush_space(&mut rig);
        assert!(rig.host.pages.is_empty() && rig.space.mapped.pieces().is_empty());
    }

    #[test]
    fn a_refused_unmapping_of_a_kernel_page_drops_all() {
        let mut rig = mapped(1);
        rig.set_run(layout::FIXMAP, 0x8_0000, 3, DATA);
        rig.fill(layout::FIXMAP, Intent::Read);
        rig.host.fails_after = Some(0);
        rig.mmu().drop_page(layout::FIXMAP + PAGE);
        assert!(rig.host.pages.is_empty());
    }

    #[test]
    #[should_panic(expected = "cannot unmap guest memory")]
    fn a_refused_unmapping_of_all_user_pages_ends_the_vm() {
        let mut rig = mapped(3);
        (rig.host.fails_after, rig.host.fails_again) = (Some(0), 1);
        rig.mmu().drop_range(USER + PAGE, USER + 2 * PAGE);
    }

    #[test]
    fn with_keys_a_changed_code_page_is_dropped() {
        let mut rig = Rig::with_keys();
        rig.set_run(USER, 0x8_0000, 2, CODE);
        rig.fill(USER, Intent::Fetch);
        rig.set(USER, 0x9_0000, CODE);
        flush_space(&mut rig);
        assert_eq!(rig.host.at(USER), None);
        assert!(rig.host.at(USER + PAGE).is_some());
        // Copies are all or nothing: without the right to execute nothing is left.
        rig.set(USER + PAGE, 0x8_1000, CODE | entry::NX);
        flush_space(&mut rig);
        assert!(rig.host.pages.is_empty());
    }
}

//! Page faults: the mapping of guest pages on demand.

use core::sync::atomic::Ordering::Relaxed;
use hw_walk::{Intent, Leaf, PageFault, leaf, set_accessed};
use hw_x86::paging::{cr0, entry};
use linux_raw_sys::general as linux;
use proto::errno::Errno;
use proto::hosted::{counter, layout};
use vmm_x86::walk::GuestTables;
use wedge_core::VirtualCpu;
use wedge_core::mapped::Piece;

use crate::mmu::Mmu;
use crate::mmu::exec_scan::{ScannedPage, is_beside};
use crate::mmu::host::{HostMap, MappingListener};
use crate::mmu::kernel_code::close_kernel;
use crate::mmu::ram::{PAGE, is_kernel, is_user};
use crate::mmu::walk::rights;

const LARGE: u64 = 2 << 20;
/// Number of pages of a fault-around block, which is aligned: as many as the guest kernel maps at
/// once.
const AROUND: u64 = 256;
/// Number of pages of a fault-around block of copied code.
const CODE_AROUND: u64 = 16;

/// Result of a page fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The guest's own page fault.
    Guest(PageFault),
    /// Access to a device at this guest-physical address.
    Device(u64),
    /// The page is mapped now.
    Filled,
    /// A page of code that must not be executed ([`crate::mmu::exec_scan`]).
    Sequence,
    /// With protection keys: a write to a page of code that may contain the instruction itself.
    OwnCode,
    /// The host is out of memory or mappings.
    Full(Errno),
}

impl<H: HostMap + MappingListener> Mmu<'_, H> {
    /// Maps the page for an access, and contiguous pages around it.
    pub fn fill(&mut self, cpu: &VirtualCpu, linear: u64, intent: Intent) -> Fault {
        let (ram, memory, modes) = (self.vm.ram, self.vm.memory, self.vm.modes);
        let mut paging = cpu.paging(linear, cpu.cpl == 3);
        if is_user(linear) {
            // User mode shares the mapping, so a read-only page stays read-only: a write of the
            // kernel faults as with WP.
            paging.cr0 |= cr0::WP;
        }
        let tables = GuestTables(memory);
        let address = match paging.translate(&tables, linear, intent, true) {
            Ok(found) => found.address,
            Err(fault) => return Fault::Guest(fault),
        };
        if ram.offset(address).is_none() {
            return Fault::Device(address);
        }
        if modes.profile {
            self.host.on_walk(memory, paging.cr3, linear);
        }
        let Some(mut leaf) = leaf(&tables, paging.cr3, linear) else { return Fault::Filled };
        let ignores_write_bit =
            intent == Intent::Write && !paging.user && paging.cr0 & cr0::WP == 0;
        if ignores_write_bit && !leaf.writable {
            // Until the change of WP that flushes all. With protection keys the page must be
            // scanned again before it is executed.
            leaf.writable = true;
            leaf.executable &= !modes.keys;
        }
        let is_own = intent == Intent::Write && cpu.cpl == 3 && is_beside(cpu.frame.rip, linear);
        if is_own && self.is_code(linear, &leaf) {
            return Fault::OwnCode;
        }
        // With protection keys an executable page must be scanned.
        let is_scanned = leaf.executable && modes.keys;
        if leaf.size == PAGE && modes.batches && !modes.profile && !is_scanned {
            return self.fill_around(linear & !(PAGE - 1), &leaf, intent);
        }
        if let Some(fault) = self.fill_code(cpu, linear, intent, &leaf) {
            return fault;
        }
        self.fill_one(cpu, linear, address, &leaf)
    }

    /// Maps the page of an access, or the part of a large page that the host maps at once.
    fn fill_one(&mut self, cpu: &VirtualCpu, linear: u64, address: u64, leaf: &Leaf) -> Fault {
        let ram = self.vm.ram;
        let size = leaf.size.min(LARGE);
        let first = linear & !(size - 1);
        if leaf.executable && is_kernel(linear) && self.vm.modes.keys {
            close_kernel(cpu, self.vm.memory, first, first + size);
        }
        let base = leaf.address + (first & (leaf.size - 1));
        let whole = ram.offset(base).filter(|&(_, left)| left >= size);
        let (linear, offset, size) = match whole {
            Some((offset, _)) => (first, offset, size),
            // A large page that is not all memory.
            None => match ram.offset(address & !(PAGE - 1)) {
                Some((offset, _)) => (linear & !(PAGE - 1), offset, PAGE),
                None => return Fault::Device(address),
            },
        };
        if size > PAGE {
            self.vm.slot.large.store(true, Relaxed);
        }
        let rights = match self.is_code(linear, leaf) {
            true => rights(leaf) & !linux::PROT_EXEC,
            false => rights(leaf),
        };
        if rights & linux::PROT_WRITE != 0 && self.vm.table.write(offset, size) {
            // It is mapped once no copy remains.
            return Fault::Filled;
        }
        self.map(linear, size, rights, offset, leaf.user)
    }

    /// Returns whether a page is executable user code, with protection keys.
    fn is_code(&self, linear: u64, leaf: &Leaf) -> bool {
        leaf.executable && is_user(linear) && self.vm.modes.keys
    }

    /// With protection keys, maps executable pages from copies. A page that is also writable is
    /// mapped in one way at a time. `None`: another kind of access, or a read by the kernel that
    /// must not wait for a copy.
    fn fill_code(
        &mut self,
        cpu: &VirtualCpu,
        linear: u64,
        intent: Intent,
        leaf: &Leaf,
    ) -> Option<Fault> {
        if !self.is_code(linear, leaf) || intent == Intent::Write {
            return None;
        }
        if leaf.writable && intent != Intent::Fetch {
            return None;
        }
        let page = linear & !(PAGE - 1);
        if leaf.writable && !self.is_executable(leaf.address + (page & (leaf.size - 1))) {
            // Its neighbours stay out of the table: a stepped instruction may write to them.
            return Some(Fault::Sequence);
        }
        let (run, base, size) = if leaf.size == PAGE {
            let (before, after) = self.contiguous(page, leaf, CODE_AROUND)?;
            (page - before, leaf.address - before, before + PAGE + after)
        } else {
            // A part of a large page, which a flush drops as a whole.
            const PIECE: u64 = CODE_AROUND * PAGE;
            self.vm.slot.large.store(true, Relaxed);
            let run = linear & !(PIECE - 1);
            (run, leaf.address + (run & (leaf.size - 1)), PIECE)
        };
        self.host.count(counter::FILLS);
        // If a page before it ends the run, map the page alone.
        for (start, length) in [(run, size), (page, PAGE)] {
            let address = base + (start - run);
            let (offset, left) = self.vm.ram.offset(address)?;
            let length = length.min(left);
            if !self.track(offset, length, cpu.cpl == 3) && intent != Intent::Fetch {
                return None;
            }
            match self.map_code(start, length, address, offset) {
                Err(error) => return Some(Fault::Full(error)),
                Ok(end) if end > page => return Some(Fault::Filled),
                Ok(_) => {}
            }
        }
        (intent == Intent::Fetch).then_some(Fault::Sequence)
    }

    /// Returns whether the page at a guest-physical address may be executed from a copy.
    fn is_executable(&self, address: u64) -> bool {
        let mut bytes = [0; PAGE as usize];
        let is_read = self.vm.memory.read_slice(address, &mut bytes).is_ok();
        is_read && ScannedPage::closed(bytes).is_some()
    }

    /// Maps a range of guest memory, given by its offset in the file. If the host refuses, drops
    /// all mappings on demand and tries once more.
    pub(super) fn map_or_drop_all(
        &mut self,
        linear: u64,
        size: u64,
        rights: u32,
        offset: u64,
    ) -> Result<(), Errno> {
        if self.host.map(linear, size, rights, offset).is_ok() {
            return Ok(());
        }
        // Too many mappings; the others can be faulted in again.
        self.drop_all();
        self.host.map(linear, size, rights, offset)
    }

    /// Handles a page fault by a mapping of a range of guest memory.
    fn map(&mut self, linear: u64, size: u64, rights: u32, offset: u64, user: bool) -> Fault {
        self.host.count(counter::FILLS);
        let end = linear + size;
        self.forget(linear, end);
        if let Err(error) = self.map_or_drop_all(linear, size, rights, offset) {
            return Fault::Full(error);
        }
        if is_user(linear) {
            self.space.mapped.add(Piece { start: linear, end, offset, rights });
            if user {
                self.host.on_map(linear, size, rights, offset);
            }
            return Fault::Filled;
        }
        match self.host.close(linear, size, rights) {
            Ok(()) => Fault::Filled,
            Err(error) => Fault::Full(error),
        }
    }

    /// Maps a page and contiguous pages around it.
    fn fill_around(&mut self, linear: u64, leaf: &Leaf, intent: Intent) -> Fault {
        let table = self.vm.table;
        let Some((offset, _)) = self.vm.ram.offset(leaf.address) else {
            return Fault::Device(leaf.address);
        };
        if intent == Intent::Write && table.write(offset, PAGE) {
            // It is mapped once no copy remains.
            return Fault::Filled;
        }
        let Some((before, after)) = self.contiguous(linear, leaf, AROUND) else {
            return Fault::Filled;
        };
        let (start, size) = (offset - before, before + PAGE + after);
        let rights = rights(leaf);
        if rights & linux::PROT_WRITE != 0 && table.holds(start, size) {
            let is_held = table.holds(offset, PAGE);
            let rights = if is_held { rights & !linux::PROT_WRITE } else { rights };
            return self.map(linear, PAGE, rights, offset, leaf.user);
        }
        self.map(linear - before, size, rights, start, leaf.user)
    }

    /// Returns the number of bytes before and after a page that are contiguous with it: in its
    /// block of `around` pages, in guest memory, with the same rights, and not mapped yet. Sets
    /// their accessed bits.
    fn contiguous(&self, linear: u64, leaf: &Leaf, around: u64) -> Option<(u64, u64)> {
        /// Bits that must be equal in contiguous entries.
        const SAME: u64 = entry::PRESENT | entry::WRITE | entry::USER | entry::DIRTY | entry::NX;
        let (ram, memory, space) = (self.vm.ram, self.vm.memory, &self.space);
        let index = linear / PAGE % around;
        let (offset, _) = ram.offset(leaf.address)?;
        let is_mapped = |page: u64, offset: u64| {
            let found = space.mapped.at(page);
            found.is_some_and(|piece| {
                piece.rights == rights(leaf) && piece.offset + (page - piece.start) == offset
            })
        };
        // `step` pages further; negative steps in two's complement. Other vCPUs may change the
        // entries.
        let joins = |step: u64| {
            let at = leaf.at.wrapping_add(step.wrapping_mul(8));
            let expected = leaf.address.wrapping_add(step.wrapping_mul(PAGE));
            // Guest memory has a hole, its file has none.
            let wanted = offset.wrapping_add(step.wrapping_mul(PAGE));
            let page = linear.wrapping_add(step.wrapping_mul(PAGE));
            let in_piece = ram.offset(expected).is_some_and(|(offset, _)| offset == wanted);
            in_piece
                && memory.read::<u64>(at).is_ok_and(|value| {
                    value & entry::ADDRESS == expected
                        && value & SAME == leaf.entry & SAME
                        && !space.calls.has_copy(page)
                        && !is_mapped(page, wanted)
                        && set_accessed(&GuestTables(memory), at, value)
                })
        };
        let before = (1..=index).take_while(|&step| joins(step.wrapping_neg())).count() as u64;
        let after = (1..around - index).take_while(|&step| joins(step)).count() as u64;
        Some((before * PAGE, after * PAGE))
    }

    /// With protection keys: permits the kernel to execute its image outside of its code segment,
    /// where its page tables permit it, until the next flush.
    pub fn fill_image(&mut self, cpu: &VirtualCpu, linear: u64) -> bool {
        if !self.vm.modes.keys
            || !(layout::IMAGE..layout::IMAGE + layout::IMAGE_LENGTH).contains(&linear)
        {
            return false;
        }
        let page = linear & !(PAGE - 1);
        let root = cpu.paging(linear, false).cr3;
        if !leaf(&GuestTables(self.vm.memory), root, page).is_some_and(|leaf| leaf.executable) {
            return false;
        }
        close_kernel(cpu, self.vm.memory, page, page + PAGE);
        self.space.is_image_open = true;
        let rights = linux::PROT_READ | linux::PROT_WRITE | linux::PROT_EXEC;
        self.host.close(page, PAGE, rights).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mmu::testing::{
        CODE, DATA, EXEC, Event, HIGH, IMAGE_START, LOW, READ, Rig, USER, WRITE,
    };

    #[test]
    fn a_page_is_mapped_with_its_rights() {
        let mut rig = Rig::new();
        rig.set(USER, 0x8_0000, DATA);
        assert_eq!(rig.fill(USER + 8, Intent::Write), Fault::Filled);
        assert_eq!(rig.host.at(USER), Some((0x8_0000, READ | WRITE)));
        assert_eq!(rig.host.events, [Event::Map(USER, PAGE, READ | WRITE, 0x8_0000)]);
        assert_eq!(rig.space.mapped.at(USER).unwrap().offset, 0x8_0000);
    }

    #[test]
    fn the_guests_own_faults_are_reported() {
        let mut rig = Rig::new();
        assert!(matches!(rig.fill(USER, Intent::Read), Fault::Guest(_)));
        rig.set(USER, 0x8_0000, CODE);
        assert!(matches!(rig.fill(USER, Intent::Write), Fault::Guest(_)));
        rig.set(USER, 0x8_0000, DATA);
        assert!(matches!(rig.fill(USER, Intent::Fetch), Fault::Guest(_)));
        assert!(rig.host.pages.is_empty());
    }

    #[test]
    fn other_addresses_are_devices() {
        let mut rig = Rig::new();
        for device in [LOW, 0xfee0_0000, (1 << 32) + HIGH] {
            rig.set(USER, device, DATA);
            assert_eq!(rig.fill(USER + 4, Intent::Read), Fault::Device(device + 4));
        }
    }

    #[test]
    fn contiguous_pages_are_mapped_by_one_call() {
        let mut rig = Rig::new();
        rig.set_run(USER, 0x8_0000, 4, DATA);
        // Not contiguous in memory; other rights.
        rig.set(USER + 4 * PAGE, 0x10_0000, DATA);
        assert_eq!(rig.fill(USER + 2 * PAGE, Intent::Read), Fault::Filled);
        assert_eq!((rig.host.calls, rig.host.pages.len()), (1, 4));
        assert_eq!(rig.host.at(USER + 3 * PAGE), Some((0x8_3000, READ | WRITE)));
    }

    #[test]
    fn a_run_ends_at_other_rights_mapped_pages_and_its_block() {
        let mut rig = Rig::new();
        rig.set_run(USER, 0x8_0000, 300, DATA);
        rig.set(USER + 2 * PAGE, 0x8_2000, DATA & !entry::WRITE);
        rig.fill(USER, Intent::Read);
        assert_eq!(rig.host.pages.len(), 2);
        rig.fill(USER + 255 * PAGE, Intent::Read);
        assert!(rig.host.at(USER + 3 * PAGE).is_some() && rig.host.at(USER + 256 * PAGE).is_none());
    }

    #[test]
    fn accessed_bits_of_the_run_are_set() {
        let mut rig = Rig::new();
        rig.set_run(USER, 0x8_0000, 2, DATA & !entry::ACCESSED);
        rig.fill(USER, Intent::Read);
        let at = rig.entry(USER + PAGE, 12);
        assert_eq!(rig.memory.read::<u64>(at).unwrap(), 0x8_1000 | DATA);
    }

    #[test]
    fn without_batches_pages_are_mapped_one_by_one() {
        let mut rig = Rig::new();
        rig.modes.batches = false;
        rig.set_run(USER, 0x8_0000, 4, DATA);
        rig.fill(USER + PAGE, Intent::Read);
        assert_eq!(rig.host.pages.len(), 1);
    }

    #[test]
    fn the_hole_of_guest_memory_ends_a_run() {
        let mut rig = Rig::new();
        rig.set(USER, LOW - PAGE, DATA);
        rig.set(USER + PAGE, 1 << 32, DATA);
        rig.fill(USER, Intent::Read);
        assert_eq!(rig.host.pages.len(), 1);
        rig.fill(USER + PAGE, Intent::Read);
        assert_eq!(rig.host.at(USER + PAGE), Some((LOW, READ | WRITE)));
    }

    #[test]
    fn large_pages_are_mapped_whole_and_noted() {
        let mut rig = Rig::new();
        let at = rig.entry(USER, 21);
        rig.memory.write(at, 0x40_0000 | DATA | entry::LARGE).unwrap();
        assert_eq!(rig.fill(USER + 0x1_2345, Intent::Read), Fault::Filled);
        assert_eq!(rig.host.pages.len(), 512);
        assert!(rig.vcpus[0].slots[0].large.load(Relaxed));
    }

    #[test]
    fn a_large_page_that_is_not_all_memory_is_mapped_in_parts() {
        let mut rig = Rig::new();
        let at = rig.entry(USER, 30);
        rig.memory.write(at, DATA | entry::LARGE).unwrap();
        rig.fill(USER + 0x1000, Intent::Read);
        assert_eq!(rig.host.pages.len(), 512);
        assert_eq!(rig.fill(USER + LOW, Intent::Read), Fault::Device(LOW));
    }

    #[test]
    fn a_refused_mapping_drops_all_and_is_retried_once() {
        let mut rig = Rig::new();
        rig.set(USER, 0x8_0000, DATA);
        rig.set(USER + 0x100_0000, 0x9_0000, DATA);
        rig.fill(USER, Intent::Read);
        rig.host.fails_after = Some(0);
        assert_eq!(rig.fill(USER + 0x100_0000, Intent::Read), Fault::Filled);
        assert_eq!(rig.host.at(USER), None);
        assert_eq!(rig.host.at(USER + 0x100_0000), Some((0x9_0000, READ | WRITE)));
        assert_eq!(rig.space.mapped.pieces().len(), 1);
    }

    #[test]
    fn kernel_pages_are_closed_and_not_listed() {
        let mut rig = Rig::with_keys();
        rig.cpu.cpl = 0;
        let module = layout::MODULES + 0x1000;
        rig.set(module, 0x8_0000, DATA & !entry::USER);
        assert_eq!(rig.fill(module, Intent::Write), Fault::Filled);
        assert_eq!(rig.host.closed[&module], (PAGE, READ | WRITE));
        assert!(rig.space.mapped.pieces().is_empty() && rig.host.events.is_empty());
    }

    #[test]
    fn without_wp_the_kernel_writes_its_read_only_pages() {
        let module = layout::MODULES + 0x1000;
        for keys in [false, true] {
            let mut rig = Rig::new();
            rig.modes.keys = keys;
            rig.cpu.cpl = 0;
            rig.set_run(module, 0x8_0000, 2, CODE & !entry::USER);
            assert!(matches!(rig.fill(module, Intent::Write), Fault::Guest(_)), "with it");
            rig.cpu.cr0 &= !cr0::WP;
            rig.fill(module, Intent::Read);
            assert_eq!(rig.host.at(module), Some((0x8_0000, READ | EXEC)), "only for a write");
            assert_eq!(rig.fill(module, Intent::Write), Fault::Filled);
            let execute = if keys { 0 } else { EXEC };
            assert_eq!(rig.host.at(module), Some((0x8_0000, READ | WRITE | execute)));
            // Its clean neighbour is not mapped with it.
            assert_ne!(rig.host.at(module + PAGE), Some((0x8_1000, READ | WRITE | execute)));
            rig.fill(module, Intent::Fetch);
            assert_eq!(rig.host.at(module), Some((0x8_0000, READ | EXEC)));
            // As the change of WP does.
            rig.fill(module, Intent::Write);
            rig.mmu().kernel_changed(crate::state::shared::EVERYTHING);
            assert_eq!(rig.host.at(module), None);
        }
    }

    #[test]
    fn without_wp_user_pages_stay_read_only() {
        for flags in [CODE, CODE & !entry::USER] {
            let mut rig = Rig::new();
            rig.cpu.cpl = 0;
            rig.cpu.cr0 &= !cr0::WP;
            rig.set(USER, 0x8_0000, flags | entry::DIRTY);
            assert!(matches!(rig.fill(USER, Intent::Write), Fault::Guest(_)));
            assert_eq!(rig.host.at(USER), None);
        }
    }

    #[test]
    fn a_copied_frame_is_mapped_read_only_and_leaves_the_table_on_a_write() {
        let mut rig = Rig::new();
        rig.set(USER, 0x8_0000, DATA);
        rig.table.insert_range(0x8_0000, PAGE);
        rig.fill(USER, Intent::Read);
        assert_eq!(rig.host.at(USER), Some((0x8_0000, READ)));
        // The write waits until the table is applied.
        assert_eq!(rig.fill(USER, Intent::Write), Fault::Filled);
        assert!(!rig.table.holds(0x8_0000, PAGE));
        assert_eq!(rig.host.at(USER), Some((0x8_0000, READ)));
        rig.sync();
        rig.fill(USER, Intent::Write);
        assert_eq!(rig.host.at(USER), Some((0x8_0000, READ | WRITE)));
    }

    #[test]
    fn the_profiler_sees_each_walk() {
        let mut rig = Rig::new();
        rig.modes.profile = true;
        rig.set(USER, 0x8_0000, DATA);
        rig.fill(USER, Intent::Read);
        assert_eq!(rig.host.events[0], Event::Walk(USER));
    }

    #[test]
    fn with_keys_code_is_mapped_from_scanned_copies() {
        let mut rig = Rig::with_keys();
        rig.set_run(USER, 0x8_0000, 2, CODE);
        rig.memory.write(0x8_0000, 0x9090_u16).unwrap();
        assert_eq!(rig.fill(USER, Intent::Fetch), Fault::Filled);
        let copies = LOW + HIGH;
        assert_eq!(rig.host.at(USER), Some((copies + 0x8_0000, READ | EXEC)));
        assert_eq!(rig.host.copies[&0x8_0000][..2], [0x90, 0x90]);
        assert_eq!(rig.host.pages.len(), 2);
        assert!(rig.table.has_all(0x8_0000, 2 * PAGE) && rig.host.serialized == 1);
    }

    #[test]
    fn with_keys_a_page_with_a_sequence_is_not_executed() {
        let mut rig = Rig::with_keys();
        rig.set_run(USER, 0x8_0000, 2, CODE);
        rig.memory.write_slice(0x8_0100, &[0x0f, 0x01, 0xef]).unwrap();
        assert_eq!(rig.fill(USER, Intent::Fetch), Fault::Sequence);
        assert_eq!(rig.host.at(USER), None);
        // Its neighbour is.
        assert_eq!(rig.fill(USER + PAGE, Intent::Fetch), Fault::Filled);
    }

    #[test]
    fn with_keys_writable_code_is_mapped_in_one_way_at_a_time() {
        let mut rig = Rig::with_keys();
        rig.set(USER, 0x8_0000, DATA & !entry::NX);
        rig.cpu.frame.rip = USER + 0x10_0000;
        assert_eq!(rig.fill(USER, Intent::Read), Fault::Filled);
        assert_eq!(rig.host.at(USER), Some((0x8_0000, READ | WRITE)));
        assert_eq!(rig.fill(USER, Intent::Fetch), Fault::Filled);
        assert_eq!(rig.host.at(USER).unwrap().1, READ | EXEC);
        rig.cpu.frame.rip = USER + 0x20;
        assert_eq!(rig.fill(USER + 0x40, Intent::Write), Fault::OwnCode);
    }

    #[test]
    fn large_code_pages_are_mapped_in_pieces_with_keys() {
        let mut rig = Rig::with_keys();
        let at = rig.entry(USER, 21);
        rig.memory.write(at, 0x40_0000 | CODE | entry::LARGE).unwrap();
        assert_eq!(rig.fill(USER + 0x2_0000, Intent::Fetch), Fault::Filled);
        assert_eq!(rig.host.pages.len() as u64, CODE_AROUND);
    }

    #[test]
    fn the_kernel_executes_its_image_where_its_tables_permit_it() {
        let mut rig = Rig::with_keys();
        rig.cpu.cpl = 0;
        let page = layout::IMAGE + 0x30_0000;
        rig.set(page, 0x30_0000, CODE & !entry::USER);
        let cpu = rig.cpu.clone();
        assert!(rig.mmu().fill_image(&cpu, page + 4));
        assert_eq!(rig.host.closed[&page], (PAGE, READ | WRITE | EXEC));
        assert!(!rig.mmu().fill_image(&cpu, page + PAGE));
        assert!(!rig.mmu().fill_image(&cpu, USER));
        rig.mmu().kernel_changed(crate::state::shared::EVERYTHING);
        // The image before its code, and after it.
        let start = layout::IMAGE + IMAGE_START;
        assert_eq!(rig.host.closed[&start], (0x10_0000 - IMAGE_START, READ | WRITE));
        rig.modes.keys = false;
        assert!(!rig.mmu().fill_image(&cpu, page));
    }
}

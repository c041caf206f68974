//! Rewriting of user-mode system calls in private copies of their pages
//! ([`crate::mmu::syscall_patch`]).

use linux_raw_sys::general as linux;
use vmm_mem::GuestMemory;
use wedge_core::{VirtualCpu, padding};

use crate::mmu::Mmu;
use crate::mmu::exec_scan::{Page, ScannedPage, find};
use crate::mmu::host::{HostMap, MappingListener};
use crate::mmu::ram::PAGE;
use crate::mmu::syscall_patch::{
    LENGTH, NONE, PAGES, Replacement, SHORT_JUMP, SYSCALL, call_site, decode_stub,
    find_replacement, jump_to, slot_of, stub_address, stub_at, stub_code,
};
use hw_walk::leaf;
use vmm_x86::walk::GuestTables;

/// A call site, as it is executed.
struct Site {
    /// Linear address of its page.
    page: u64,
    /// Offset of the page in guest memory.
    offset: u64,
    /// Return address of the call.
    after: u64,
    /// The page.
    bytes: Page,
    replacement: Replacement,
}

impl Site {
    /// Returns the offset of the call in its page.
    fn call(&self) -> usize {
        (self.after - self.page) as usize - SYSCALL.len()
    }
}

impl<H: HostMap + MappingListener> Mmu<'_, H> {
    /// Counts a user-mode system call by signal, and rewrites a frequent call site, whose stubs
    /// jump to `entry`. The instruction pointer is after the call.
    pub fn on_syscall_trap(&mut self, cpu: &VirtualCpu, entry: u64) {
        let after = cpu.frame.rip;
        if self.space.calls.note(after) && cpu.call_masks_flags() {
            // On failure signals continue.
            let _ = self.find_site(cpu, after).and_then(|site| self.rewrite(site, entry));
        }
    }

    /// Returns the call site before `after` if it may be rewritten.
    fn find_site(&mut self, cpu: &VirtualCpu, after: u64) -> Option<Site> {
        let (memory, keys) = (self.vm.memory, self.vm.modes.keys);
        let page = after.checked_sub(1)? & !(PAGE - 1);
        let found = leaf(&GuestTables(memory), cpu.paging(page, true).cr3, page)?;
        let frame = found.address + (page & (found.size - 1));
        if found.writable || !found.executable || keys && !self.is_copy_of(page, frame) {
            return None;
        }
        let (offset, _) = self.vm.ram.offset(frame)?;
        // With protection keys it is a copy already.
        if !keys && !self.may_copy(offset) {
            return None;
        }
        let mut bytes = [0; PAGE as usize];
        match keys {
            // The executed copy.
            true => bytes = *self.host.code_copy(offset),
            false => memory.read_slice(frame, &mut bytes).ok()?,
        }
        let number = cpu.frame.gpr[0] as u32;
        let replacement = find_replacement(&bytes, (after - page) as usize, number)?;
        Some(Site { page, offset, after, bytes, replacement })
    }

    fn rewrite(&mut self, mut site: Site, entry: u64) -> Option<()> {
        let index = self.space.calls.free_slot()?;
        let Replacement { first, jump: at, short } = site.replacement;
        // Numbers and addresses are chosen by user mode, and must not encode a forbidden
        // instruction in the stub.
        let code = stub_code(stub_address(index), &first, site.after, entry);
        if find(&code, 0).is_some() {
            return None;
        }
        if self.space.calls.has_copy(site.page) {
            let copy = self.host.page(site.page);
            // The page may have changed since it was copied, or another call's jump may be in the
            // same place.
            let is_same = |at: usize, length| copy[at..at + length] == site.bytes[at..at + length];
            if !is_same(site.call(), SYSCALL.len()) || !is_same(at, LENGTH) {
                return None;
            }
            site.bytes = *copy;
        }
        let place = self.space.calls.place_of(site.page)?;
        let jump = jump_to(index);
        let short = short.as_ref().map(|short| (site.call(), &short[..]));
        let edits = [Some((at, &jump[..])), short].into_iter().flatten();
        let page = ScannedPage::edited(site.bytes, self.vm.modes.keys, edits)?;
        self.host.put_stub(index, &code);
        self.space.calls.add(place, site.page, site.offset);
        self.host.map_private(site.page, page.bytes(), linux::PROT_READ | linux::PROT_EXEC).ok()
    }

    /// Returns the return address of the rewritten call whose second jump, between call site and
    /// stub, is at `rip`.
    fn pending_call(&self, rip: u64) -> Option<u64> {
        if rip % PAGE > PAGE - LENGTH as u64 || !self.space.calls.has_copy(rip & !(PAGE - 1)) {
            return None;
        }
        let mut jump = [0; LENGTH];
        self.host.read(rip, &mut jump);
        self.decode_jump(&jump).and_then(|(first, after)| (first == NONE).then_some(after))
    }

    /// Returns whether the second jump of a rewritten call is at `rip`.
    pub fn is_on_way(&self, rip: u64) -> bool {
        self.pending_call(rip).is_some()
    }

    /// Moves interrupted user mode back to its system call if it was on the way from a rewritten
    /// call to the wedge: copies and stubs are this process's, and may have changed when user mode
    /// resumes. The instructions of a stub can be executed again.
    pub fn step_back(&self, cpu: &mut VirtualCpu) {
        let rip = cpu.frame.rip;
        if let Some(after) = self.pending_call(rip) {
            cpu.frame.rip = call_site(NONE, after);
        } else if let Some(index) = stub_at(rip).filter(|&index| self.space.calls.is_used(index))
            && let Some((first, after)) = decode_stub(&self.host.stub(index as u32))
        {
            cpu.frame.rip = call_site(first, after);
        }
    }

    /// Returns whether a page's copy equals the page at this guest-physical address, except for
    /// rewritten calls.
    pub(super) fn is_current(&self, page: u64, frame: u64, memory: &GuestMemory) -> bool {
        /// Block size of the comparison in bytes.
        const CHUNK: usize = 64;
        let mut bytes = [0; PAGE as usize];
        if memory.read_slice(frame, &mut bytes).is_err() {
            return false;
        }
        let copy = self.host.page(page);
        let mut at = 0;
        while at < copy.len() {
            let end = copy.len().min(at + CHUNK);
            if bytes[at..end] == copy[at..end] {
                at = end;
            } else if bytes[at] == copy[at] {
                at += 1;
            } else {
                let Some(length) = self.replaced(page, copy, &bytes, at) else { return false };
                at += length;
            }
        }
        true
    }

    /// Returns the length of the rewritten code at an offset of a page's copy; `None`: the
    /// difference has another cause.
    fn replaced(&self, page: u64, copy: &Page, original: &Page, at: usize) -> Option<usize> {
        if original[at..].starts_with(&SYSCALL) {
            let after = at + SYSCALL.len();
            let distance = copy.get(at + 1)?;
            let is_short = copy[at] == SHORT_JUMP
                && self.is_short(page, copy, original, after, after + usize::from(*distance));
            return is_short.then_some(SYSCALL.len());
        }
        let jump = copy.get(at..at + LENGTH)?;
        let (first, after) = self.decode_jump(jump)?;
        let replaced = original.get(at..at + LENGTH)?;
        if replaced.starts_with(&first) && replaced.ends_with(&SYSCALL) {
            return Some(LENGTH);
        }
        let after = usize::try_from(after.checked_sub(page)?).ok()?;
        (first == NONE && self.is_short(page, copy, original, after, at)).then_some(LENGTH)
    }

    /// Returns whether the call before `after` was replaced by a short jump to the jump at `jump`
    /// in padding.
    fn is_short(&self, page: u64, copy: &Page, original: &Page, after: usize, jump: usize) -> bool {
        let Some(call) = after.checked_sub(SYSCALL.len()) else { return false };
        let there = copy.get(jump..jump + LENGTH).and_then(|bytes| self.decode_jump(bytes));
        original.get(call..after) == Some(&SYSCALL)
            && copy.get(call..after) == Some(&[SHORT_JUMP, jump.wrapping_sub(after) as u8])
            && padding::find(original, after, LENGTH) == Some(jump)
            && there == Some((NONE, page + after as u64))
    }

    /// Returns the first instruction of a jump's stub, and its return address; `None`: not such a
    /// jump.
    fn decode_jump(&self, jump: &[u8]) -> Option<([u8; NONE.len()], u64)> {
        let index = slot_of(jump).filter(|&index| self.space.calls.is_used(index))?;
        decode_stub(&self.host.stub(index as u32))
    }

    /// Drops the copies of frames in a range of guest memory, given by its offset.
    pub(super) fn drop_call_copies(&mut self, offset: u64, length: u64) {
        for index in 0..PAGES {
            if let Some(page) = self.space.calls.copy_of(index, offset, length) {
                self.drop_range(page, page + PAGE);
            }
        }
    }

    /// Drops the copy of a call's page when the guest kernel enters the handler of a system call
    /// that a seccomp filter of the guest has refused, so that the handler finds the original code.
    pub fn show_refused(&mut self, cpu: &VirtualCpu) {
        /// `SIGSYS`, and `SYS_SECCOMP` (`asm-generic/siginfo.h`).
        const SIGNAL: u32 = 31;
        const CODE: u32 = 1;
        let [number, information] = [7, 6].map(|register| cpu.frame.gpr[register]);
        if cpu.cpl != 3 || number != u64::from(SIGNAL) {
            return;
        }
        let mut bytes = [0; 24];
        if cpu.read(self.vm.memory, information, &mut bytes).is_err() {
            return;
        }
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        if word(0) == SIGNAL && word(8) == CODE {
            let after = u64::from(word(16)) | u64::from(word(20)) << 32;
            for page in [after.wrapping_sub(SYSCALL.len() as u64), after.wrapping_sub(1)] {
                let page = page & !(PAGE - 1);
                if self.space.calls.has_copy(page) {
                    self.drop_range(page, page + PAGE);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mmu::syscall_patch::{SLOTS, is_stub};
    use crate::mmu::testing::{CODE, ENTRY, EXEC, READ, Rig, USER};
    use core::sync::atomic::Ordering::SeqCst;
    use hw_walk::Intent;

    const FRAME: u64 = 0x8_0000;
    const CALL: [u8; 7] = [0xb8, 39, 0, 0, 0, 0x0f, 0x05];

    /// A guest that executes a page with two calls, at 100 and 200.
    fn guest(mut rig: Rig) -> Rig {
        rig.set(USER, FRAME, CODE);
        rig.memory.fill(FRAME, PAGE, 0xc3).unwrap();
        for at in [100, 200] {
            rig.memory.write_slice(FRAME + at, &CALL).unwrap();
        }
        rig.cpu.sfmask = u64::MAX;
        rig.cpu.frame.gpr[0] = 39;
        rig.fill(USER, Intent::Fetch);
        rig
    }

    /// Makes a call by signal as often as it takes until it is rewritten.
    fn call(rig: &mut Rig, at: u64) {
        rig.cpu.frame.rip = USER + at + CALL.len() as u64;
        for _ in 0..8 {
            let cpu = rig.cpu.clone();
            rig.mmu().on_syscall_trap(&cpu, ENTRY);
            rig.sync();
        }
    }

    #[test]
    fn frequent_calls_jump_to_their_stubs() {
        let mut rig = guest(Rig::new());
        call(&mut rig, 100);
        let slot = (SLOTS as u32).to_le_bytes();
        let page = *rig.mmu().host.page(USER);
        assert_eq!(page[100..103], [0xff, 0x24, 0x25]);
        assert_eq!(page[103..107], slot);
        assert_eq!(rig.host.at(USER).unwrap().1, READ | EXEC);
        let stub = rig.host.stubs[&0];
        assert_eq!(stub[..5], CALL[..5]);
        assert!(is_stub(stub_address(0)));
        // Guest memory stays.
        assert_eq!(rig.memory.is_equal(FRAME + 100, &CALL), Ok(true));
        let mmu = rig.mmu();
        assert!(
            mmu.space.calls.is_rewritten(USER + 105) && mmu.is_current(USER, FRAME, mmu.vm.memory)
        );
    }

    #[test]
    fn a_second_call_of_the_page_shares_its_copy() {
        let mut rig = guest(Rig::new());
        call(&mut rig, 100);
        call(&mut rig, 200);
        let page = *rig.mmu().host.page(USER);
        assert_eq!([page[100], page[200]], [0xff, 0xff]);
        assert_eq!(rig.host.stubs.len(), 2);
    }

    #[test]
    fn a_copy_that_differs_from_guest_memory_is_dropped_by_a_flush() {
        let mut rig = guest(Rig::new());
        call(&mut rig, 100);
        rig.memory.write(FRAME + 300, 0x90_u8).unwrap();
        let mmu = rig.mmu();
        assert!(!mmu.is_current(USER, FRAME, mmu.vm.memory));
        rig.vcpus[0].slots[0].stale.store(true, SeqCst);
        rig.mmu().follow();
        assert!(rig.host.at(USER).is_none() && !rig.space.calls.has_copy(USER));
    }

    #[test]
    fn an_equal_copy_survives_a_flush() {
        let mut rig = guest(Rig::new());
        call(&mut rig, 100);
        rig.vcpus[0].slots[0].stale.store(true, SeqCst);
        rig.mmu().follow();
        assert!(rig.space.calls.has_copy(USER));
    }

    #[test]
    fn a_write_to_the_frame_drops_the_copy() {
        let mut rig = guest(Rig::new());
        call(&mut rig, 100);
        rig.table.write(FRAME, PAGE);
        rig.sync();
        assert!(rig.host.at(USER).is_none() && !rig.space.calls.has_copy(USER));
    }

    #[test]
    fn writable_pages_are_not_rewritten() {
        let mut rig = guest(Rig::new());
        rig.set(USER, FRAME, CODE | hw_x86::paging::entry::WRITE);
        call(&mut rig, 100);
        assert!(rig.host.stubs.is_empty());
    }

    #[test]
    fn calls_keep_their_signals_if_the_kernel_keeps_flags() {
        let mut rig = guest(Rig::new());
        rig.cpu.sfmask = 0;
        call(&mut rig, 100);
        assert!(rig.host.stubs.is_empty());
    }

    #[test]
    fn the_handler_of_a_refused_call_finds_the_original_code() {
        let mut rig = guest(Rig::new());
        call(&mut rig, 100);
        rig.set(USER + PAGE, FRAME + PAGE, crate::mmu::testing::DATA);
        let mut information = [0; 24];
        information[0] = 31;
        information[8] = 1;
        information[16..].copy_from_slice(&(USER + 107).to_le_bytes());
        rig.memory.write_slice(FRAME + PAGE, &information).unwrap();
        let mut cpu = rig.cpu.clone();
        (cpu.frame.gpr[7], cpu.frame.gpr[6]) = (11, USER + PAGE);
        rig.mmu().show_refused(&cpu);
        assert!(rig.space.calls.has_copy(USER));
        cpu.frame.gpr[7] = 31;
        rig.mmu().show_refused(&cpu);
        assert!(!rig.space.calls.has_copy(USER));
    }

    #[test]
    fn a_call_without_a_move_goes_by_way_of_padding() {
        let mut rig = guest(Rig::new());
        // `syscall; ret`, and a long no-operation before the next function at a multiple of 16.
        let mut code = [0xc3; 16];
        code[..3].copy_from_slice(&[0x0f, 0x05, 0xc3]);
        code[3..].copy_from_slice(&[0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0, 0x0f, 0x1f, 0]);
        rig.memory.write_slice(FRAME + 512, &code).unwrap();
        let mut bytes = [0; PAGE as usize];
        rig.memory.read_slice(FRAME, &mut bytes).unwrap();
        let padding = padding::find(&bytes, 514, LENGTH);
        rig.cpu.frame.rip = USER + 514;
        for _ in 0..8 {
            let cpu = rig.cpu.clone();
            rig.mmu().on_syscall_trap(&cpu, ENTRY);
            rig.sync();
        }
        let jump = padding.unwrap();
        let page = *rig.mmu().host.page(USER);
        assert_eq!(page[512..514], [SHORT_JUMP, (jump - 514) as u8]);
        let mut cpu = rig.cpu.clone();
        cpu.frame.rip = USER + jump as u64;
        let mmu = rig.mmu();
        assert!(mmu.is_on_way(cpu.frame.rip) && mmu.is_current(USER, FRAME, mmu.vm.memory));
        mmu.step_back(&mut cpu);
        assert_eq!(cpu.frame.rip, USER + 512);
    }

    #[test]
    fn user_mode_in_a_stub_steps_back_to_its_call() {
        let mut rig = guest(Rig::new());
        call(&mut rig, 100);
        call(&mut rig, 200);
        let mut cpu = rig.cpu.clone();
        let mut back = |rip| {
            cpu.frame.rip = rip;
            rig.mmu().step_back(&mut cpu);
            cpu.frame.rip
        };
        for offset in [0, 5, 15] {
            assert_eq!(back(stub_address(0) + offset), USER + 100);
            assert_eq!(back(stub_address(1) + offset), USER + 200);
        }
        // Not an instruction, a stub without a call, and the ends of the area.
        let others =
            [stub_address(0) + 4, stub_address(2), stub_address(0) - 1, stub_address(8192)];
        for rip in others.into_iter().chain([0, 4]) {
            assert_eq!(back(rip), rip);
        }
    }

    #[test]
    fn with_keys_the_executed_copy_decides() {
        let mut rig = guest(Rig::with_keys());
        call(&mut rig, 100);
        assert_eq!(rig.mmu().host.page(USER)[100..102], [0xff, 0x24]);
        // A number that would encode a sequence in the stub.
        let mut rig = guest(Rig::with_keys());
        let number = 0x00ef_010f_u32;
        rig.memory.write(FRAME + 101, number).unwrap();
        rig.cpu.frame.gpr[0] = number.into();
        rig.fill(USER, Intent::Fetch);
        call(&mut rig, 100);
        assert!(rig.host.stubs.is_empty());
    }
}

//! Single steps of pages in which a sequence ([`crate::mmu::exec_scan`]) is part of other
//! instructions.
//!
//! Such a page executes from a private copy, one previously checked instruction at a time, with the
//! trap flag. The copy is dropped when execution leaves it.

use hw_walk::Intent;
use linux_raw_sys::general as linux;
use vmm_x86::walk::GuestTables;
use wedge_core::VirtualCpu;
use wedge_core::cpu::rflags;

use crate::mmu::Mmu;
use crate::mmu::exec_scan::{LONGEST, Next, next, pages_of};
use crate::mmu::host::{HostMap, MappingListener};
use crate::mmu::ram::{PAGE, is_user};
use crate::mmu::space::Steps;

/// Continuation of the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Begin {
    /// Without steps.
    Free,
    /// One instruction by a single step.
    Step,
    /// One instruction, emulated by the wedge.
    Instead,
}

impl<H: HostMap + MappingListener> Mmu<'_, H> {
    /// Prepares a user page with sequences for single-stepping. `false`: it cannot be executed.
    pub fn open_steps(&mut self, cpu: &VirtualCpu) -> bool {
        let (ram, memory) = (self.vm.ram, self.vm.memory);
        let rip = cpu.frame.rip;
        let (first, last) = pages_of(rip);
        if !is_user(first) || !is_user(last) {
            return false;
        }
        let mut frames = [0; 2];
        let mut found: usize = 0;
        for page in (first..=last).step_by(PAGE as usize) {
            let paging = cpu.paging(page, true);
            let tables = GuestTables(memory);
            let Ok(translation) = paging.translate(&tables, page, Intent::Fetch, true) else {
                break;
            };
            let address = translation.address;
            let Some((offset, _)) = ram.offset(address) else { break };
            self.track(offset, PAGE, cpu.cpl == 3);
            frames[found] = address;
            found += 1;
        }
        let mut offsets = frames[..found].iter().filter_map(|&address| ram.offset(address));
        if !offsets.all(|(offset, _)| self.vm.table.holds(offset, PAGE)) {
            // One of the pages has been written since: retry.
            return true;
        }
        self.drop_range(first, last + PAGE);
        let end = self.map_steps(first, &frames[..found]);
        if end > first {
            self.space.steps =
                Steps { start: first, end, alone: end <= last, frames, ..Steps::default() };
        }
        // A part of the mapping has failed. This may drop the other part, too.
        if end <= last {
            self.drop_range(end, last + PAGE);
        }
        if end == first {
            return false;
        }
        self.host.serialize();
        let goes = self.may_step(rip).is_some();
        if !goes {
            self.drop_range(first, end);
        }
        goes
    }

    /// Prepares a step of an instruction that may write to its own page, with that page writable.
    /// The written bytes go to guest memory afterwards. Otherwise execution and write faults of the
    /// page would alternate forever.
    pub fn open_writing_step(&mut self, cpu: &VirtualCpu, linear: u64) -> bool {
        let page = linear & !(PAGE - 1);
        let rights = linux::PROT_READ | linux::PROT_WRITE | linux::PROT_EXEC;
        for _ in 0..2 {
            if !self.is_stepped(page) && !self.open_steps(cpu) {
                return false;
            }
            let Steps { start, end, .. } = self.space.steps;
            if !self.is_stepped(page) {
                // A page has been written since: retry. Else the host is out of mappings for this
                // one.
                return start == end;
            }
            if self.host.protect(page, PAGE, rights).is_ok() {
                self.space.steps.written |= 1 << ((page - start) / PAGE);
                return true;
            }
            // Too many mappings. The previous stop has written back the stepped pages.
            self.drop_all();
        }
        false
    }

    /// Copies the bytes that a step has written to its pages to guest memory.
    fn write_back(&mut self) {
        let memory = self.vm.memory;
        let Steps { start, end, written, frames, .. } = self.space.steps;
        for (index, (page, address)) in (start..end).step_by(PAGE as usize).zip(frames).enumerate()
        {
            if written >> index & 1 == 0 {
                continue;
            }
            let new = self.host.page(page);
            let mut old = [0; PAGE as usize];
            if memory.is_equal(address, new) == Ok(true)
                || memory.read_slice(address, &mut old).is_err()
            {
                continue;
            }
            let differs = |&at: &usize| new[at] != old[at];
            let Some(first) = (0..new.len()).find(differs) else { continue };
            let last = (0..new.len()).rfind(differs).unwrap_or(first);
            if let Some((offset, _)) = self.vm.ram.offset(address) {
                self.vm.table.write(offset, PAGE);
            }
            // Guest memory is mapped for the life of the process.
            let _ = memory.write_slice(address + first as u64, &new[first..=last]);
        }
    }

    /// Maps private copies of the pages at guest-physical addresses from `first` on, and drops all
    /// other mappings on demand if the host refuses one. Returns the end of the mapped copies.
    fn map_steps(&mut self, first: u64, frames: &[u64]) -> u64 {
        let end = self.try_map_steps(first, frames);
        if end == first + frames.len() as u64 * PAGE {
            return end;
        }
        // Too many mappings.
        self.drop_all();
        self.try_map_steps(first, frames)
    }

    fn try_map_steps(&mut self, first: u64, frames: &[u64]) -> u64 {
        let pages = (first..).step_by(PAGE as usize).zip(frames);
        let mapped = pages.take_while(|&(page, &address)| self.map_step(page, address).is_some());
        first + mapped.count() as u64 * PAGE
    }

    /// Maps a private copy of the page at a guest-physical address.
    fn map_step(&mut self, page: u64, address: u64) -> Option<()> {
        let mut bytes = [0; PAGE as usize];
        self.vm.memory.read_slice(address & !(PAGE - 1), &mut bytes).ok()?;
        self.host.map_private(page, &bytes, linux::PROT_READ | linux::PROT_EXEC).ok()
    }

    /// Returns whether an address is in the stepped pages.
    pub fn is_stepped(&self, rip: u64) -> bool {
        self.space.steps.contains(rip)
    }

    /// Returns the instruction at an address in the stepped pages, as far as it is executable.
    fn may_step(&self, rip: u64) -> Option<Next> {
        let Steps { start, end, alone, .. } = self.space.steps;
        let is_whole = rip.checked_add(LONGEST).is_some_and(|after| after <= end);
        if !(start..end).contains(&rip) || !is_whole && !alone {
            return None;
        }
        let mut bytes = [0; LONGEST as usize];
        let bytes = &mut bytes[..LONGEST.min(end - rip) as usize];
        self.host.read(rip, bytes);
        Some(next(bytes))
    }

    /// Decides before an entry whether the guest executes a single step of the stepped pages. Drops
    /// the pages if execution has left them.
    pub fn begin_step(&mut self, cpu: &mut VirtualCpu) -> Begin {
        let Steps { start, end, .. } = self.space.steps;
        if start == end {
            return Begin::Free;
        }
        let next = if cpu.cpl == 3 { self.may_step(cpu.frame.rip) } else { None };
        let next = match next {
            None => {
                self.drop_range(start, end);
                return Begin::Free;
            }
            Some(Next::Never) => return Begin::Instead,
            Some(next) => next,
        };
        let steps = &mut self.space.steps;
        steps.pushes = next == Next::Pushes;
        steps.traps = cpu.frame.rflags & rflags::TF != 0;
        cpu.frame.rflags |= rflags::TF;
        Begin::Step
    }

    /// Ends a step begun by [`Self::begin_step`], after a trap or another stop. Returns whether the
    /// stop is due to the step alone.
    pub fn end_step(&mut self, cpu: &mut VirtualCpu, trapped: bool) -> bool {
        let Steps { start, end, pushes, traps, written, .. } = self.space.steps;
        if written != 0 {
            self.write_back();
            if trapped {
                self.drop_range(start, end);
            }
        }
        if traps {
            return false;
        }
        cpu.frame.rflags &= !rflags::TF;
        // Bit 8 is in the second byte.
        let (at, mut byte) = (cpu.frame.gpr[4].wrapping_add(1), [0]);
        if trapped && pushes && is_user(at) {
            // The instruction has just written it; if the page is unmapped by now, the value stays.
            let _ = cpu.read(self.vm.memory, at, &mut byte);
            let _ = cpu.write(self.vm.memory, at, &[byte[0] & !1]);
        }
        trapped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mmu::fill::Fault;
    use crate::mmu::testing::{CODE, Call, Content, DATA, EXEC, READ, Rig, USER, WRITE};

    const FRAME: u64 = 0x8_0000;

    /// A guest at a page with a sequence inside of other code at 0x100.
    fn guest(flags: u64) -> Rig {
        let mut rig = Rig::with_keys();
        rig.set_run(USER, FRAME, 2, flags);
        rig.memory.fill(FRAME, 2 * PAGE, 0x90).unwrap();
        rig.memory.write_slice(FRAME + 0x100, &[0x0f, 0x01, 0xef]).unwrap();
        rig.cpu.frame.rip = USER + 0x20;
        rig
    }

    fn open(rig: &mut Rig) -> bool {
        let cpu = rig.cpu.clone();
        rig.mmu().open_steps(&cpu)
    }

    fn begin(rig: &mut Rig) -> Begin {
        let mut cpu = rig.cpu.clone();
        let begin = rig.mmu().begin_step(&mut cpu);
        rig.cpu = cpu;
        begin
    }

    fn end(rig: &mut Rig, trapped: bool) -> bool {
        let mut cpu = rig.cpu.clone();
        let ended = rig.mmu().end_step(&mut cpu, trapped);
        rig.cpu = cpu;
        ended
    }

    #[test]
    fn a_page_with_a_sequence_is_stepped() {
        let mut rig = guest(CODE);
        assert_eq!(rig.fill(USER + 0x20, Intent::Fetch), Fault::Sequence);
        assert!(open(&mut rig));
        assert_eq!(rig.host.at(USER), Some((u64::MAX, READ | EXEC)));
        assert_eq!(begin(&mut rig), Begin::Step);
        assert!(rig.cpu.frame.rflags & rflags::TF != 0);
        rig.cpu.frame.rip += 1;
        assert!(end(&mut rig, true));
        assert!(rig.cpu.frame.rflags & rflags::TF == 0);
    }

    #[test]
    fn the_sequence_itself_is_emulated() {
        let mut rig = guest(CODE);
        assert!(open(&mut rig));
        rig.cpu.frame.rip = USER + 0x100;
        assert_eq!(begin(&mut rig), Begin::Instead);
    }

    #[test]
    fn the_pages_are_dropped_when_execution_leaves_them() {
        let mut rig = guest(CODE);
        open(&mut rig);
        rig.cpu.frame.rip = USER + 0x10_0000;
        assert_eq!(begin(&mut rig), Begin::Free);
        assert!(rig.host.at(USER).is_none() && rig.space.steps == Steps::default());
        assert_eq!(begin(&mut rig), Begin::Free);
    }

    #[test]
    fn the_kernel_leaves_them_too() {
        let mut rig = guest(CODE);
        open(&mut rig);
        rig.cpu.cpl = 0;
        assert_eq!(begin(&mut rig), Begin::Free);
        assert!(rig.host.at(USER).is_none());
    }

    #[test]
    fn an_instruction_across_pages_needs_both() {
        let mut rig = guest(CODE);
        rig.cpu.frame.rip = USER + PAGE - 4;
        assert!(open(&mut rig));
        assert!(rig.host.at(USER).is_some() && rig.host.at(USER + PAGE).is_some());
        assert_eq!(begin(&mut rig), Begin::Step);
        // Without a second page, the first is alone.
        let mut rig = guest(CODE);
        rig.set(USER + PAGE, 0, 0);
        rig.cpu.frame.rip = USER + PAGE - 4;
        assert!(open(&mut rig) && rig.space.steps.alone);
        assert_eq!(begin(&mut rig), Begin::Step);
    }

    #[test]
    fn pages_beside_user_mode_are_not_stepped() {
        let mut rig = guest(CODE);
        rig.cpu.frame.rip = proto::hosted::layout::IMAGE - 1;
        assert!(!open(&mut rig));
        rig.cpu.frame.rip = USER + 0x10_0000;
        assert!(!open(&mut rig));
    }

    #[test]
    fn pushed_flags_do_not_show_the_step() {
        let mut rig = guest(CODE);
        let stack = USER + 0x20_0000;
        rig.set(stack, FRAME + 2 * PAGE, DATA);
        // PUSHF.
        rig.memory.write(FRAME + 0x20, 0x9c_u8).unwrap();
        open(&mut rig);
        rig.cpu.frame.gpr[4] = stack;
        assert_eq!(begin(&mut rig), Begin::Step);
        rig.memory.write(FRAME + 2 * PAGE, 0x302_u64).unwrap();
        assert!(end(&mut rig, true));
        assert_eq!(rig.memory.read::<u64>(FRAME + 2 * PAGE).unwrap(), 0x202);
    }

    #[test]
    fn a_trap_of_user_modes_own_reaches_it() {
        let mut rig = guest(CODE);
        open(&mut rig);
        rig.cpu.frame.rflags |= rflags::TF;
        assert_eq!(begin(&mut rig), Begin::Step);
        assert!(!end(&mut rig, true));
        assert!(rig.cpu.frame.rflags & rflags::TF != 0);
    }

    #[test]
    fn a_write_to_the_own_page_goes_to_guest_memory() {
        let mut rig = guest(DATA & !hw_x86::paging::entry::NX);
        let cpu = rig.cpu.clone();
        assert!(rig.mmu().open_writing_step(&cpu, USER + 0x800));
        assert_eq!(rig.host.at(USER), Some((u64::MAX, READ | WRITE | EXEC)));
        assert_eq!(begin(&mut rig), Begin::Step);
        let mut page = *rig.mmu().host.page(USER);
        page[0x800] = 0xcc;
        (&mut rig.host).map_private(USER, &page, READ | WRITE | EXEC).unwrap();
        assert!(end(&mut rig, true));
        assert_eq!(rig.memory.read::<u8>(FRAME + 0x800).unwrap(), 0xcc);
        assert!(rig.host.at(USER).is_none() && !rig.table.holds(FRAME, PAGE));
    }

    #[test]
    fn a_page_that_the_host_refuses_is_not_stepped() {
        let mut rig = guest(CODE);
        assert!(open(&mut rig));
        rig.mmu().drop_range(USER, USER + PAGE);
        (rig.host.fails_after, rig.host.fails_again) = (Some(0), usize::MAX);
        rig.host.fails = |call| call == Call::MapPrivate;
        assert!(!open(&mut rig));
        assert!(rig.space.steps == Steps::default());
    }

    #[test]
    fn a_refused_step_drops_all_and_is_retried_once() {
        for rip in [USER + 0x20, USER + PAGE - 4] {
            let mut rig = guest(CODE);
            let other = USER + 0x20_0000;
            rig.set(other, FRAME + 2 * PAGE, DATA);
            rig.fill(other, Intent::Read);
            rig.cpu.frame.rip = rip;
            rig.host.fails = |call| call == Call::MapPrivate;
            // The last page.
            rig.host.fails_after = Some(pages_of(rip).1.abs_diff(USER) as usize / PAGE as usize);
            assert!(open(&mut rig));
            assert_eq!((begin(&mut rig), rig.space.steps.alone), (Begin::Step, false));
            assert_eq!(rig.host.at(other), None);
        }
    }

    #[test]
    fn a_refused_writing_step_drops_all_and_is_retried_once() {
        let mut rig = guest(DATA & !hw_x86::paging::entry::NX);
        let cpu = rig.cpu.clone();
        rig.host.fails = |call| call == Call::Protect;
        rig.host.fails_after = Some(1);
        assert!(rig.mmu().open_writing_step(&cpu, USER + 0x800));
        assert_eq!(rig.host.at(USER), Some((u64::MAX, READ | WRITE | EXEC)));
        assert_eq!((rig.space.steps.written, begin(&mut rig)), (1, Begin::Step));
        assert_eq!(rig.host.fails_after, None, "a call was refused");
    }

    /// Executes an instruction that increments a byte, as the host and the event loop would;
    /// returns the number of faults.
    fn increment(rig: &mut Rig, rip: u64, length: u64, data: u64) -> usize {
        rig.cpu.frame.rip = rip;
        for faults in 0..40 {
            rig.sync();
            let begun = begin(rig);
            assert_ne!(begun, Begin::Instead);
            let pages = [rip, rip + length - 1].map(|at| at & !(PAGE - 1));
            let lacks = |rig: &Rig, page: u64, right: u32| {
                rig.host.at(page).is_none_or(|(_, rights)| rights & right == 0)
            };
            let page = data & !(PAGE - 1);
            let fault = match pages.into_iter().find(|&page| lacks(rig, page, EXEC)) {
                Some(missing) => Some((missing.max(rip), Intent::Fetch)),
                None => lacks(rig, page, WRITE).then_some((data, Intent::Write)),
            };
            let Some((linear, intent)) = fault else {
                match rig.host.pages.get_mut(&page).unwrap() {
                    (Content::Private(bytes), _) => bytes[(data % PAGE) as usize] += 1,
                    (Content::File(offset), _) => {
                        let at = *offset + data % PAGE;
                        let old = rig.memory.read::<u8>(at).unwrap();
                        rig.memory.write(at, old + 1).unwrap();
                    }
                }
                rig.cpu.frame.rip = rip + length;
                if begun == Begin::Step {
                    assert!(end(rig, true));
                }
                return faults;
            };
            if begun == Begin::Step {
                assert!(!end(rig, false));
            }
            let cpu = rig.cpu.clone();
            let is_handled = match rig.fill(linear, intent) {
                Fault::Filled => true,
                Fault::Sequence => rig.mmu().open_steps(&cpu),
                Fault::OwnCode => rig.mmu().open_writing_step(&cpu, linear),
                _ => false,
            };
            assert!(is_handled, "{linear:#x} {intent:?}");
        }
        panic!("faults alternate forever");
    }

    #[test]
    fn own_code_is_written_in_a_bounded_number_of_faults() {
        for round in 0..16 {
            let mut rig = Rig::with_keys();
            rig.set_run(USER, FRAME, 2, DATA & !hw_x86::paging::entry::NX);
            rig.memory.fill(FRAME, 2 * PAGE, 0xc3).unwrap();
            let start = if round & 1 != 0 { PAGE - 1 - (round >> 1 & 1) } else { 64 };
            let data = 0x100 + if round & 2 != 0 { PAGE } else { 0 };
            for (bit, page) in [(4, 0), (8, PAGE)] {
                if round & bit != 0 {
                    rig.memory.write_slice(FRAME + page + 16, &[0x0f, 0x01, 0xef]).unwrap();
                }
            }
            let code = [0xfe, 0x86, 0, 1, 0, 0, 0xc3];
            rig.memory.write_slice(FRAME + start, &code).unwrap();
            let faults: std::vec::Vec<usize> =
                (0..3).map(|_| increment(&mut rig, USER + start, 6, USER + data)).collect();
            assert_eq!(rig.memory.read::<u8>(FRAME + data).unwrap(), 0xc3 + 3, "{round}");
            assert!(faults.iter().all(|&count| count < 12), "{round}: {faults:?}");
        }
    }
}

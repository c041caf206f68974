//! Exits of a guest with a vTLB that the kernel handles: page faults, loads of CR3, `INVLPG`.

use core::sync::atomic::Ordering::Relaxed;

use abi::vcpu::exit::MEMORY_FAULT;
use abi::vcpu::memory_fault;
use abi::vcpu::x86::exit::EXCEPTION;
use abi::vcpu::x86::{VcpuState, gpr, vtlb_counter};
use hw_walk::{Entry, Intent, PageTables, Paging, Rights, Translation, WalkedPage};
use hw_x86::msr::efer;
use hw_x86::paging::{entry, fault};
use hw_x86::vmcb::{ControlArea, Vmcb, event, exit, tlb_control, v_intr};
use kernel_core::vtlb::defects::breaks;
use kernel_core::vtlb::{Fill, FrameAccess, Step};

use super::control::Registers;
use super::decode::{Instruction, Kind, decode};
use super::memory::HostPage;
use super::{Code, State};
use crate::hvm::internal;
use crate::svm::asid::Asids;
use crate::svm::exit::{interrupted_event, reason};
use crate::svm::state::SHADOW;
use crate::svm::{is_tcg, virq};

/// Highest level of shadow leaves: 2 MiB.
const MAX_LEVEL: u32 = 1;
/// Resume flag.
const RFLAGS_RF: u64 = 1 << 16;
/// Flags with which an instruction has more effects than its own, which the VMM emulates: single
/// steps (TF) and the resume flag.
pub const RFLAGS_TRACED: u64 = 1 << 8 | RFLAGS_RF;
/// Attribute of a code segment: 64-bit mode.
const LONG_CODE: u64 = 1 << (16 + 9);

impl State {
    /// Handles an exit. Returns the reason of the exit for the caller, `None` if the guest
    /// continues.
    #[inline(always)]
    pub fn handle(&self, asids: &Asids, vmcb: &Vmcb, state: &VcpuState) -> Option<u64> {
        let code = vmcb.control.exit_code.get();
        let reason = match code {
            exit::PAGE_FAULT => self.page_fault(vmcb),
            exit::INVLPG | exit::CR3_READ | exit::CR3_WRITE => self.instruction(vmcb, state, code),
            _ => return Some(reason(code, || asids.refused(&vmcb.control))),
        };
        if reason.is_none() {
            vmcb.control.tlb_control.set(tlb_control::NOTHING);
            if code == exit::PAGE_FAULT && !self.tables.needs_flush() {
                return None;
            }
            if self.needs_load.get() {
                return Some(internal::NEEDS_FRAMES);
            }
            self.apply(asids, vmcb);
        }
        reason
    }

    /// Executes an instruction that the kernel recognises.
    fn instruction(&self, vmcb: &Vmcb, state: &VcpuState, code: u64) -> Option<u64> {
        let save = &vmcb.save;
        let for_vmm = Some(reason(code, || ()));
        let is_long = save.efer.get() & efer::LMA != 0
            && save.segments[VcpuState::CS].access.get() & LONG_CODE != 0;
        if !is_long || save.cpl.get() != 0 || save.rflags.get() & RFLAGS_TRACED != 0 {
            return for_vmm;
        }
        let Some(found) = self.decoded(save.rip.get()) else { return for_vmm };
        let register = found.register;
        let value = match register {
            gpr::RAX => save.rax.get(),
            gpr::RSP => save.rsp.get(),
            _ => state.gpr[register].get(),
        };
        match found.kind {
            Kind::LoadRoot => {
                if value & (!0 << 52 | self.tables.memory.reserved()) != 0 {
                    return for_vmm;
                }
                self.count(vtlb_counter::LOADS);
                self.control.set_root(value);
                self.load();
            }
            Kind::StoreRoot => {
                let cr3 = self.control.get(save).cr3;
                match register {
                    gpr::RAX => save.rax.set(cr3),
                    gpr::RSP => save.rsp.set(cr3),
                    _ => state.gpr[register].set(cr3),
                }
            }
            Kind::Invalidate => self.invalidate(value),
            Kind::Other => return for_vmm,
        }
        save.rip.set(save.rip.get().wrapping_add(found.length));
        vmcb.control.interrupt_shadow.set(0);
        vmcb.control.event_inj.set(0);
        None
    }

    /// Instruction at an address, by eight bytes that are read through the shadow tables; `None` if
    /// these lack them. Where it is and what it was is remembered, since there are few.
    #[inline(always)]
    fn decoded(&self, address: u64) -> Option<Instruction> {
        let key = (address, self.tables.epoch(address));
        let code = &self.code[((address / 4) ^ (key.1 & 0xff)) as usize % self.code.len()];
        let read = |at: u64| self.tables.memory.word(at).load(Relaxed);
        let (leaf_at, leaf) = code.leaf.get();
        if code.key.get() != key || read(leaf_at) != leaf {
            self.find(code, key)?;
        }
        let at = code.at.get();
        let words = (read(at), read(at + 7));
        if code.words.get() != words {
            code.words.set(words);
            let bytes = u128::from(words.1) << 64 | u128::from(words.0);
            code.instruction.set(decode((bytes >> (8 * (at % 8))) as u64));
        }
        Some(code.instruction.get())
    }

    /// Finds an instruction in memory; `None` if the shadow tables lack its page, or another one
    /// follows.
    #[inline(never)]
    fn find(&self, code: &Code, key: (u64, u64)) -> Option<()> {
        let (leaf_at, page) = self.tables.translate(key.0)?;
        let (leaf, offset) = (self.tables.memory.word(leaf_at).load(Relaxed), key.0 & 0xfff);
        // Reads of device memory may have effects.
        if offset > 4096 - 8 || leaf & entry::UNCACHED != 0 {
            return None;
        }
        code.key.set(key);
        code.leaf.set((leaf_at, leaf));
        code.at.set(page + offset);
        code.words.set((0, 0));
        code.instruction.set(Instruction::default());
        Some(())
    }

    /// Handles a page fault: fills the translation, or gives the fault to the guest.
    #[inline(never)]
    fn page_fault(&self, vmcb: &Vmcb) -> Option<u64> {
        let (paging, access) = self.access(vmcb);
        if let Some(known) = self.tables.known(access.0) {
            let entry = Entry { at: known.entry.at, value: known.entry.value };
            match paging.translate_last(&self.tables.memory, access, Rights(known.rights), entry) {
                Err(found) => return self.inject(vmcb, found.code.into(), access.0),
                Ok(None) => return resume(vmcb),
                Ok(Some(page)) => {
                    if let Some(table) = known.table
                        && let Some(fill) = self.page(&paging, access, &page, 0)
                    {
                        self.tables.fill_known(table, &fill);
                        return self.filled(vmcb, access.1);
                    }
                }
            }
        }
        self.walk(vmcb)
    }

    /// CPU state for the access that has faulted, and its address and kind.
    #[inline(always)]
    fn access(&self, vmcb: &Vmcb) -> (Paging, (u64, Intent)) {
        let (code, address) = (vmcb.control.exit_info1.get(), vmcb.control.exit_info2.get());
        let Registers { cr0, cr3, cr4, efer } = self.control.last();
        let (rflags, user) = (vmcb.save.rflags.get(), vmcb.save.cpl.get() == 3);
        let (paging, intent) = Paging { cr0, cr3, cr4, efer, rflags, user }.of_fault(code);
        (paging, (address, intent))
    }

    /// Handles a page fault by a walk of all levels: injects it, or fills the translation.
    #[inline(never)]
    fn walk(&self, vmcb: &Vmcb) -> Option<u64> {
        let (paging, access) = self.access(vmcb);
        let mut found = Translation::default();
        let outcome = paging.translate_to(&self.tables.memory, access, true, &mut found);
        let mut steps = [Step::default(); 4];
        for (step, &Entry { at, value }) in steps.iter_mut().zip(found.entries()) {
            *step = Step { at, value };
        }
        let steps = &steps[..found.entries().len()];
        if let Err(fault) = outcome {
            if u64::from(fault.code) & fault::PRESENT == 0 {
                self.tables.note_path(access.0, steps, None);
            }
            return self.inject(vmcb, fault.code.into(), access.0);
        }
        if !found.is_marked() {
            // Another vCPU changes the entry all the time: the guest repeats the access.
            return resume(vmcb);
        }
        let level = if steps.is_empty() { MAX_LEVEL } else { (found.page_shift - 12) / 9 };
        let Some(fill) = self.page(&paging, access, &found.page(), level) else {
            let info = match access.1 {
                Intent::Read => 0,
                Intent::Write => memory_fault::WRITE,
                Intent::Fetch => memory_fault::FETCH,
            };
            self.fault.set((found.address, info));
            return Some(MEMORY_FAULT);
        };
        match self.tables.fill(&Fill { steps, ..fill }) {
            Ok(()) => self.filled(vmcb, access.1),
            Err(_) => Some(internal::NEEDS_FRAMES),
        }
    }

    /// Lets the guest repeat an access whose translation was filled. Beside a fetch, others are
    /// filled, too.
    #[inline(always)]
    fn filled(&self, vmcb: &Vmcb, intent: Intent) -> Option<u64> {
        if intent == Intent::Fetch && self.tables.has_many_fills() {
            self.fill_ahead(vmcb.control.exit_info2.get());
        }
        resume(vmcb)
    }

    /// Fills translations beside that of a fetch.
    #[cold]
    #[inline(never)]
    fn fill_ahead(&self, address: u64) {
        let memory = &self.tables.memory;
        self.tables.fill_ahead(address, |page, leaf| {
            let host = memory.translate(page).filter(|host| host.is_executable())?;
            let flags = (leaf ^ entry::PRESENT) & (entry::PRESENT | entry::WRITE | entry::UNCACHED);
            let refused = flags | host.leaf & entry::UNCACHED | page & memory.reserved();
            (refused == 0).then_some(leaf & !entry::ADDRESS | host.physical)
        });
    }

    /// Injects a page fault that the guest's tables cause.
    #[inline(never)]
    fn inject(&self, vmcb: &Vmcb, code: u64, address: u64) -> Option<u64> {
        const PAGE_FAULT: u64 = event::VALID | event::TYPE_EXCEPTION | event::ERROR_VALID | 14;
        self.count(vtlb_counter::FAULTS);
        let control = &vmcb.control;
        if interrupted(control) != 0 {
            // The VMM decides what becomes of the event whose delivery it interrupted.
            self.fault.set((address, 14 | code << 32));
            return Some(EXCEPTION);
        }
        control.interrupt_shadow.set(0);
        vmcb.save.cr2.set(address);
        vmcb.save.rflags.set(vmcb.save.rflags.get() | RFLAGS_RF);
        control.event_inj.set(PAGE_FAULT | code << 32);
        None
    }

    /// Translation to fill for a page whose guest entry is at a level; `None` if the access is to
    /// be a memory fault.
    #[inline(always)]
    fn page(
        &self,
        paging: &Paging,
        (address, intent): (u64, Intent),
        found: &WalkedPage,
        level: u32,
    ) -> Option<Fill<'static>> {
        let is_allowed = |host: &HostPage| match intent {
            Intent::Read => true,
            Intent::Write => host.is_writable(),
            Intent::Fetch => host.is_executable(),
        };
        let host = self.tables.memory.translate(found.address).filter(is_allowed)?;
        let is_write = intent == Intent::Write;
        let (page, value) = (found.address >> 12, found.value);
        let level = self.tables.leaf_level(page, level.min(host.level).min(MAX_LEVEL));
        let leaf = leaf(paging, intent, found, &host, level);
        let is_global = paging.is_global(found);
        Some(Fill { address, steps: &[], value, leaf, level, page, is_global, is_write })
    }
}

/// Lets the guest repeat the access of a page fault.
fn resume(vmcb: &Vmcb) -> Option<u64> {
    if vmcb.control.interrupt_shadow.get() & SHADOW != 0 && is_tcg() {
        // The next entry would lose it; the VMM executes the instruction.
        return Some(internal::HOST_INTERRUPT);
    }
    vmcb.control.event_inj.set(interrupted(&vmcb.control));
    None
}

/// Event to inject again because the exit interrupted its delivery, or 0. QEMU TCG keeps a virtual
/// interrupt pending then, and delivers it; it reports it as an exception.
#[inline(always)]
fn interrupted(control: &ControlArea) -> u64 {
    let info = interrupted_event(control.exit_int_info.get());
    if info == 0 {
        return 0;
    }
    let vector = control.v_intr.get() >> v_intr::VECTOR_SHIFT;
    let is_same = (vector ^ info) & event::VECTOR == 0;
    if is_tcg() && virq::is_pending(control) && is_same { 0 } else { info }
}

/// Shadow leaf of a page.
#[inline(always)]
fn leaf(paging: &Paging, intent: Intent, found: &WalkedPage, host: &HostPage, level: u32) -> u64 {
    let has = |rule: &str, bits: u64| if breaks(rule) { bits } else { 0 };
    let Rights(granted) = paging.rights_of_copy(intent, found);
    let all = found.rights.0;
    let granted = granted
        | has("user-right", Rights::USER)
        | has("execute-right", Rights::EXECUTE)
        | has("dirty-before-write", all & Rights::WRITE)
        | has("supervisor-override", all & Rights::USER)
        | has("supervisor-override-execute", all & Rights::EXECUTE);
    let allowed = host.leaf | has("contain-writes", entry::WRITE);
    let allowed = allowed & !has("contain-fetches", entry::NX);
    let size = 1_u64 << (12 + 9 * level);
    let large = if level > 0 { entry::LARGE } else { 0 };
    entry::PRESENT
        | entry::ACCESSED
        | entry::DIRTY
        | granted & (entry::USER | allowed & entry::WRITE)
        | (!granted | allowed) & entry::NX
        | allowed & entry::UNCACHED
        | large
        | host.physical & !(size - 1)
}

//! Exits of a guest with a vTLB that the kernel handles: page faults, loads of CR3, `INVLPG`.

use core::sync::atomic::Ordering::Relaxed;

use abi::vcpu::exit::MEMORY_FAULT;
use abi::vcpu::memory_fault;
use abi::vcpu::x86::exit::EXCEPTION;
use abi::vcpu::x86::{VcpuState, gpr, vtlb_counter};
use hw_walk::{Intent, Paging, Translation};
use hw_x86::msr::efer;
use hw_x86::paging::{ENTRIES, cr4, entry, fault};
use hw_x86::vmcb::{ControlArea, Vmcb, event, exit, tlb_control, v_intr};
use kernel_core::vtlb::{Fill, FrameAccess, Step};

use super::State;
use super::control::Registers;
use super::decode::{Kind, decode};
use super::memory::HostPage;
use crate::features::features;
use crate::hvm::internal;
use crate::svm::asid::Asids;
use crate::svm::exit::{interrupted_event, reason};
use crate::svm::state::SHADOW;
use crate::svm::{is_tcg, virq};

/// Highest level of shadow leaves: 2 MiB.
const MAX_LEVEL: u32 = 1;
/// Trap flag: single-step mode.
const RFLAGS_TF: u64 = 1 << 8;
/// Resume flag.
const RFLAGS_RF: u64 = 1 << 16;
/// Alignment check; with SMAP: supervisor accesses to user pages are permitted.
const RFLAGS_AC: u64 = 1 << 18;
/// Attribute of a code segment: 64-bit mode.
const LONG_CODE: u64 = 1 << (16 + 9);

impl State {
    /// Handles an exit. Returns the reason of the exit for the caller, `None` if the guest
    /// continues.
    pub fn handle(&self, asids: &Asids, vmcb: &Vmcb, state: &VcpuState) -> Option<u64> {
        let code = vmcb.control.exit_code.get();
        let reason = match code {
            exit::PAGE_FAULT => self.page_fault(vmcb),
            exit::INVLPG | exit::CR3_READ | exit::CR3_WRITE => self.instruction(vmcb, state, code),
            _ => Some(reason(code)),
        };
        if reason.is_none() {
            if self.needs_load.get() {
                return Some(internal::NEEDS_FRAMES);
            }
            vmcb.control.tlb_control.set(tlb_control::NOTHING);
            self.apply(asids, vmcb);
        }
        reason
    }

    /// Executes an instruction that the kernel recognises.
    fn instruction(&self, vmcb: &Vmcb, state: &VcpuState, code: u64) -> Option<u64> {
        let save = &vmcb.save;
        let for_vmm = Some(reason(code));
        let is_long = save.efer.get() & efer::LMA != 0
            && save.segments[VcpuState::CS].access.get() & LONG_CODE != 0;
        if !is_long || save.cpl.get() != 0 || save.rflags.get() & (RFLAGS_TF | RFLAGS_RF) != 0 {
            return for_vmm;
        }
        let Some(found) = self.code(save.rip.get()).and_then(decode) else { return for_vmm };
        let register = found.register;
        let value = match register {
            gpr::RAX => save.rax.get(),
            gpr::RSP => save.rsp.get(),
            _ => state.gpr[register].get(),
        };
        match found.kind {
            Kind::LoadRoot => {
                if value >> features().physical_bits.min(52) != 0 {
                    return for_vmm;
                }
                self.count(vtlb_counter::LOADS);
                self.control.set_root(value);
                self.load(vmcb);
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
        }
        save.rip.set(save.rip.get().wrapping_add(found.length));
        vmcb.control.interrupt_shadow.set(0);
        vmcb.control.event_inj.set(0);
        None
    }

    /// Eight bytes of code, through the shadow tables; `None` if these lack them.
    fn code(&self, address: u64) -> Option<u64> {
        let offset = address as usize & 0xfff;
        if offset > 4096 - 8 {
            return None;
        }
        let words = self.memory.words(self.code_page(address)?);
        let (index, shift) = (offset / 8, 8 * (offset % 8));
        let low = words[index].load(Relaxed) >> shift;
        let high = match shift {
            0 => 0,
            _ => words[(index + 1) % ENTRIES].load(Relaxed) << (64 - shift),
        };
        Some(low | high)
    }

    /// Physical address of a page of code. It is remembered, since all loads of CR3 are in one.
    fn code_page(&self, address: u64) -> Option<u64> {
        let (space, removals) = self.tables().epoch(address);
        let known = &self.code[usize::from(space) % self.code.len()];
        let key = (address >> 12, space, removals);
        let (of, physical) = known.get();
        if of == key && physical != 0 {
            return Some(physical);
        }
        let (leaf, found) = self.tables().translate(&self.memory, address)?;
        if leaf & entry::UNCACHED != 0 {
            // Device memory: a read may have effects.
            return None;
        }
        known.set((key, found));
        Some(found)
    }

    /// Handles a page fault: fills the translation, or gives the fault to the guest.
    fn page_fault(&self, vmcb: &Vmcb) -> Option<u64> {
        let (code, address) = (vmcb.control.exit_info1.get(), vmcb.control.exit_info2.get());
        let Registers { cr0, cr3, cr4, efer } = self.control.get(&vmcb.save);
        let intent = match code {
            _ if code & fault::FETCH != 0 => Intent::Fetch,
            _ if code & fault::WRITE != 0 => Intent::Write,
            _ => Intent::Read,
        };
        let user = code & fault::USER != 0;
        // RFLAGS.AC does not permit implicit accesses of the processor at CPL 3 (SMAP).
        let implicit = if vmcb.save.cpl.get() == 3 && !user { RFLAGS_AC } else { 0 };
        let rflags = vmcb.save.rflags.get() & !implicit;
        let paging = Paging { cr0, cr3, cr4, efer, rflags, user };
        let found = paging.translate(&self.memory, address, intent, true);
        match &found {
            Err(found) => self.inject(vmcb, found.code.into(), address),
            // Another vCPU changes the entry all the time: the guest repeats the access.
            Ok(found) if !found.is_marked() => resume(vmcb),
            Ok(found) => self.fill(vmcb, &paging, (address, intent), found),
        }
    }

    /// Injects a page fault that the guest's tables cause.
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

    /// Fills a translation that the guest's tables allow.
    fn fill(
        &self,
        vmcb: &Vmcb,
        paging: &Paging,
        (address, intent): (u64, Intent),
        found: &Translation,
    ) -> Option<u64> {
        let is_write = intent == Intent::Write;
        let host = self.memory.translate(found.address);
        let Some(host) = host.filter(|host| host.is_writable() || !is_write) else {
            let info = match intent {
                Intent::Read => 0,
                Intent::Write => memory_fault::WRITE,
                Intent::Fetch => memory_fault::FETCH,
            };
            self.fault.set((found.address, info));
            return Some(MEMORY_FAULT);
        };
        self.count(vtlb_counter::FILLS);
        let entries = found.entries();
        let mut steps = [Step::default(); 4];
        for (step, read) in steps.iter_mut().zip(entries) {
            *step = Step { at: read.at, value: read.value | entry::ACCESSED };
        }
        if self.tables().top() < 3 {
            // A pointer of three-level tables has no marks.
            steps[0].value = entries.first().map_or(0, |pointer| pointer.value);
        }
        if is_write && let Some(leaf) = steps[..entries.len()].last_mut() {
            leaf.value |= entry::DIRTY;
        }
        let guest_level = if entries.is_empty() { MAX_LEVEL } else { (found.page_shift - 12) / 9 };
        let page = found.address >> 12;
        let level = guest_level.min(host.level).min(MAX_LEVEL);
        let level = self.tables().leaf_level(page, level);
        let leaf = leaf(paging, intent, found, &host, level);
        let is_global = paging.cr4 & cr4::PGE != 0
            && entries.last().is_some_and(|leaf| leaf.value & entry::GLOBAL != 0);
        let steps = &steps[..entries.len()];
        let fill = Fill { address, steps, leaf, level, page, is_global, is_write };
        if self.tables().fill(&self.memory, &fill).is_err() {
            return Some(internal::NEEDS_FRAMES);
        }
        resume(vmcb)
    }
}

/// Lets the guest repeat the access of a page fault.
fn resume(vmcb: &Vmcb) -> Option<u64> {
    if is_tcg() && vmcb.control.interrupt_shadow.get() & SHADOW != 0 {
        // The next entry would lose it; the VMM executes the instruction.
        return Some(internal::HOST_INTERRUPT);
    }
    vmcb.control.event_inj.set(interrupted(&vmcb.control));
    None
}

/// Event to inject again because the exit interrupted its delivery, or 0. QEMU TCG keeps a virtual
/// interrupt pending then, and delivers it; it reports it as an exception.
fn interrupted(control: &ControlArea) -> u64 {
    let info = interrupted_event(control.exit_int_info.get());
    let vector = control.v_intr.get() >> v_intr::VECTOR_SHIFT;
    let is_same = (vector ^ info) & event::VECTOR == 0;
    if is_tcg() && virq::is_pending(control) && is_same { 0 } else { info }
}

/// Shadow leaf of a translation.
fn leaf(paging: &Paging, intent: Intent, found: &Translation, host: &HostPage, level: u32) -> u64 {
    let last = found.entries().last();
    let is_dirty =
        intent == Intent::Write || last.is_none_or(|leaf| leaf.value & entry::DIRTY != 0);
    let (mut rights, mut no_execute) = (found.rights, found.no_execute);
    if intent == Intent::Write && rights & entry::WRITE == 0 {
        // Allowed because the guest's CR0.WP is clear: for its kernel only, as long as nothing else
        // asks.
        rights = entry::WRITE;
        no_execute |= paging.cr4 & cr4::SMEP != 0 && found.rights & entry::USER != 0;
    }
    let mut leaf = entry::PRESENT | entry::ACCESSED | entry::DIRTY | rights & entry::USER;
    if rights & entry::WRITE != 0 && is_dirty && host.is_writable() {
        leaf |= entry::WRITE;
    }
    let guest_forbids = no_execute && last.is_some();
    if guest_forbids || host.leaf & entry::NX != 0 {
        leaf |= entry::NX;
    }
    let size = 1_u64 << (12 + 9 * level);
    leaf |= host.leaf & entry::UNCACHED;
    leaf |= if level > 0 { entry::LARGE } else { 0 };
    leaf | host.physical & !(size - 1)
}

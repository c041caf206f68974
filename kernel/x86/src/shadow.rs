//! vTLB on SVM without nested paging (APM vol. 2 §15.25.1): shadow tables translate for the guest
//! ([`kernel_core::vtlb`]), and its page faults, loads of CR3 and `INVLPG` are exits, which end
//! here, in the loop of [`crate::svm::Svm::enter`], without the kernel lock.
//!
//! # Invariants
//!
//! * Only leaves that this module makes from the VM's nested tables enter the shadow tables. After
//!   an unmapping all are dropped before the next entry ([`Shadow::unmapped`]).
//! * The state page shows the guest's own control registers; the VMCB holds those of [`control`].
//! * Everything is used by the CPU that runs the vCPU, or under the lock.

mod control;
mod decode;
mod memory;

use core::cell::Cell;
use core::sync::atomic::Ordering::Relaxed;

use abi::Status;
use abi::vcpu::exit::MEMORY_FAULT;
use abi::vcpu::memory_fault;
use abi::vcpu::x86::exit::EXCEPTION;
use abi::vcpu::x86::{VcpuState, gpr, vtlb as option, vtlb_counter};
use hw_walk::{Intent, Paging, Translation};
use hw_x86::paging::{ENTRIES, cr0, cr4, entry, fault};
use hw_x86::vmcb::{ControlArea, Vmcb, event, exit, v_intr};
use kernel_core::pool::{Factory, Frame, Handle, Memory};
use kernel_core::vtlb::{FRAMES_PER_TABLE, Fill, Flush, Frames, Options, Step, Vtlb};

use crate::features::features;
use crate::format::UserFormat;
use crate::hvm::internal;
use crate::svm::asid::Asids;
use crate::svm::exit::interrupted_event;
use crate::svm::state::SHADOW;
use crate::svm::{is_tcg, virq};
use control::{Control, Registers};
use decode::{Kind, decode};
use memory::{GuestMemory, HostPage};

pub use control::is_supported;

type Tables = Vtlb<UserFormat>;

/// Frames of the state.
const FRAMES: u32 = size_of::<State>().div_ceil(4096) as u32;
/// Tables that are added to the pool at a time.
const GROWTH: u16 = 4;
/// Tables without which no guest runs: a path through them, the shared root, and one to evict.
const MIN_TABLES: u16 = 8;
/// Highest level of shadow leaves: 2 MiB.
const MAX_LEVEL: u32 = 1;
const RFLAGS_TF: u64 = 1 << 8;
const RFLAGS_RF: u64 = 1 << 16;

/// vTLB of a vCPU: its state is in frames of its own, since objects and stacks are small.
#[derive(Clone)]
pub struct Shadow {
    frame: Frame,
    state: *const State,
}

/// State of a vTLB. Memory that is zero is a valid value, which [`Shadow::new`] completes.
pub struct State {
    tables: Tables,
    memory: GuestMemory,
    control: Control,
    /// Value of the state page's `vtlb` in use, and whether there is one.
    word: Cell<u64>,
    has_word: Cell<bool>,
    /// The space is to be loaded before the next entry.
    needs_load: Cell<bool>,
    /// Guest-physical address or CR2, and information, of an exit for the VMM.
    fault: Cell<(u64, u64)>,
    /// Pages of code that were decoded last: page number, [`Vtlb::epoch`], physical address.
    code: [Cell<((u64, u8, u64), u64)>; 4],
    counters: [Cell<u64>; vtlb_counter::COUNT],
}

impl core::ops::Deref for Shadow {
    type Target = State;

    #[inline(always)]
    fn deref(&self) -> &State {
        // SAFETY: frames for this use only, which live as long as the vCPU and were zeroed when
        // allocated, which is a valid value: all fields are cells of integers, of types for which
        // zero is defined, or made of such. Only the CPU that runs the vCPU or holds the lock uses
        // it.
        unsafe { &*self.state }
    }
}

impl Shadow {
    /// Allocates the vTLB of a vCPU, with a pool of at most `pool` pages, and sets the intercepts.
    pub fn new(
        memory: &Memory,
        factory: Option<Handle<Factory>>,
        pool: u64,
        vmcb: &Vmcb,
    ) -> Result<Self, Status> {
        let frame = memory.alloc_raw(factory, FRAMES)?;
        let this = Self { frame, state: memory.address(frame).cast_const().cast() };
        this.tables().start(&this.memory, (pool / FRAMES_PER_TABLE) as u16);
        control::set_intercepts(&vmcb.control);
        let registers = Registers::written(&vmcb.save);
        this.tables().set_top(&this.memory, registers.top());
        this.control.set(vmcb, registers);
        this.needs_load.set(true);
        Ok(this)
    }

    /// Frees it.
    pub fn free(&self, memory: &Memory) {
        for physical in self.tables().frames() {
            memory.free_raw(memory.frame_at(physical), 1);
        }
        memory.free_raw(self.frame, FRAMES);
    }
}

impl State {
    #[inline(always)]
    fn tables(&self) -> &Tables {
        &self.tables
    }

    fn count(&self, counter: usize) {
        self.counters[counter].set(self.counters[counter].get() + 1);
    }

    // ---- between entries ------------------------------------------------------------------------

    /// Sets the VM's nested tables.
    pub fn set_root(&self, root: u64) {
        if !self.memory.has_root(root) {
            self.unmapped(root);
        }
    }

    /// The VM's nested tables, at `root`, have lost mappings.
    pub fn unmapped(&self, root: u64) {
        self.memory.set_root(root);
        self.drop_all();
    }

    fn drop_all(&self) {
        self.count(vtlb_counter::FLUSHES);
        self.tables().drop_all(&self.memory);
        self.needs_load.set(true);
    }

    /// Takes over the control registers that the VMM has written to the VMCB. Whatever they require
    /// to be flushed is flushed; everything, if none has changed.
    pub fn take_control(&self, vmcb: &Vmcb) {
        let (old, new) = (self.control.get(&vmcb.save), Registers::written(&vmcb.save));
        let old = Registers { cr0: self.last_cr0(old, new), ..old };
        self.control.set(vmcb, new);
        if old.role() != new.role() || old == new {
            self.tables().set_top(&self.memory, new.top());
            self.drop_all();
        } else if old.cr3 != new.cr3 {
            self.needs_load.set(true);
        }
    }

    /// CR0 before a write: the bits that the processor held are lost with the write, and matter
    /// only for the comparison.
    fn last_cr0(&self, old: Registers, new: Registers) -> u64 {
        old.cr0 & !(cr0::TS | cr0::MP) | new.cr0 & (cr0::TS | cr0::MP)
    }

    /// Removes the translation of an address.
    pub fn invalidate(&self, address: u64) {
        self.count(vtlb_counter::INVALIDATIONS);
        self.tables().invalidate(&self.memory, address);
    }

    /// Copies the guest's control registers to the state page.
    pub fn show_control(&self, state: &VcpuState, vmcb: &Vmcb) {
        let registers = self.control.get(&vmcb.save);
        state.cr0.set(registers.cr0);
        state.cr3.set(registers.cr3);
        state.cr4.set(registers.cr4);
        state.efer.set(registers.efer);
    }

    /// Copies the counters to the state page.
    pub fn show_counters(&self, state: &VcpuState) {
        let tables = self.tables();
        self.counters[vtlb_counter::EVICTIONS].set(tables.counters.evictions.get());
        self.counters[vtlb_counter::SYNCS].set(tables.counters.syncs.get());
        for (to, from) in state.vtlb_counters.iter().zip(&self.counters) {
            to.set(from.get());
        }
    }

    /// Guest-physical address or CR2, and information, of the last exit for the VMM.
    pub fn fault(&self) -> (u64, u64) {
        self.fault.get()
    }

    /// Grows the pool if it is short of tables, takes new options over, and loads the space. Before
    /// an entry, under the lock.
    pub fn prepare(
        &self,
        memory: &Memory,
        factory: Option<Handle<Factory>>,
        state: &VcpuState,
        vmcb: &Vmcb,
    ) -> Result<(), Status> {
        let word = state.vtlb.get();
        if !self.has_word.replace(true) || self.word.replace(word) != word {
            self.word.set(word);
            self.tables().set_options(&self.memory, options(word));
            self.needs_load.set(true);
        }
        if self.tables().free_tables() < GROWTH && self.tables().missing_tables() > 0 {
            self.grow(memory, factory)?;
        }
        if self.needs_load.get() {
            self.load(vmcb);
        }
        Ok(())
    }

    fn grow(&self, memory: &Memory, factory: Option<Handle<Factory>>) -> Result<(), Status> {
        let tables = self.tables();
        for _ in 0..GROWTH.min(tables.missing_tables()) {
            let pair = memory.alloc_raw(factory, 1).and_then(|shadow| {
                let copies = memory.alloc_raw(factory, 1);
                copies.map(|copies| (shadow, copies)).inspect_err(|_| memory.free_raw(shadow, 1))
            });
            match pair {
                Ok((shadow, copies)) => {
                    tables.add_table(memory.physical(shadow), memory.physical(copies));
                }
                Err(status) if tables.size() < MIN_TABLES => return Err(status),
                Err(_) => {
                    tables.close_pool();
                    break;
                }
            }
        }
        Ok(())
    }

    /// Loads the space of the guest's CR3.
    fn load(&self, vmcb: &Vmcb) {
        let root = self.control.get(&vmcb.save).root();
        let host = root.and_then(|root| Some(self.memory.table_page(root)? | root & 0xfff));
        let loaded = self.tables().load(&self.memory, root.unwrap_or(0), host);
        self.needs_load.set(loaded.is_err());
        if self.word.get() & option::ASID == 0 {
            self.tables().set_tag(0, 0);
        }
    }

    /// Flushes the TLB as far as needed, and sets the root and the ASID of the VMCB.
    pub fn apply(&self, asids: &Asids, Vmcb { control, save }: &Vmcb) {
        let tables = self.tables();
        let epoch = asids.epoch();
        let invalidates = self.word.get() & option::INVALIDATE_PAGE != 0;
        match tables.take_flush() {
            Flush::None => {}
            Flush::Page { address, everywhere: true } if invalidates => {
                tables.tags(epoch).for_each(|asid| invlpga(address, asid));
            }
            Flush::Page { address, everywhere: false } if invalidates => {
                let (asid, of) = tables.tag();
                if of == epoch {
                    invlpga(address, asid);
                }
            }
            Flush::Page { everywhere: false, .. } | Flush::Space => tables.set_tag(0, 0),
            Flush::Page { .. } | Flush::All => tables.drop_tags(),
        }
        let (mut asid, of) = tables.tag();
        if of != epoch {
            self.count(vtlb_counter::ASIDS);
            let epoch = asids.assign(control);
            asid = control.guest_asid.get();
            tables.set_tag(asid, epoch);
        }
        control.guest_asid.set(asid);
        save.cr3.set(tables.root().unwrap_or(0));
        control.clean.set(0);
    }

    // ---- exits ----------------------------------------------------------------------------------

    /// Handles an exit. Returns the reason of the exit for the caller, `None` if the guest
    /// continues.
    pub fn handle(&self, asids: &Asids, vmcb: &Vmcb, state: &VcpuState) -> Option<u64> {
        let code = vmcb.control.exit_code.get();
        let reason = match code {
            exit::PAGE_FAULT => self.page_fault(vmcb),
            exit::INVLPG | exit::CR3_READ | exit::CR3_WRITE => self.instruction(vmcb, state, code),
            _ => Some(crate::svm::exit::reason(code)),
        };
        if reason.is_none() {
            if self.needs_load.get() {
                return Some(internal::NEEDS_FRAMES);
            }
            vmcb.control.tlb_control.set(hw_x86::vmcb::tlb_control::NOTHING);
            self.apply(asids, vmcb);
        }
        reason
    }

    /// Executes an instruction that the kernel recognises.
    fn instruction(&self, vmcb: &Vmcb, state: &VcpuState, code: u64) -> Option<u64> {
        let save = &vmcb.save;
        let for_vmm = Some(crate::svm::exit::reason(code));
        let is_long = save.segments[VcpuState::CS].access.get() & 1 << (16 + 9) != 0;
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

    /// Eight bytes of code, through the shadow tables; `None` if they are not there.
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
        let (space, removals) = self.tables().epoch();
        let known = &self.code[usize::from(space) % self.code.len()];
        let key = (address >> 12, space, removals);
        let (of, physical) = known.get();
        if of == key && physical != 0 {
            return Some(physical);
        }
        let found = self.tables().translate(&self.memory, address)?;
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
        let rflags = vmcb.save.rflags.get();
        let paging = Paging { cr0, cr3, cr4, efer, rflags, user: code & fault::USER != 0 };
        match paging.translate(&self.memory, address, intent, true) {
            Err(found) => self.inject(vmcb, found.code.into(), address),
            Ok(found) => self.fill(vmcb, &paging, (address, intent), &found),
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
        let mut steps = [Step::default(); 4];
        let entries = found.entries();
        for (depth, (step, read)) in steps.iter_mut().zip(entries).enumerate() {
            let is_leaf = depth + 1 == entries.len();
            let marks = match depth {
                // A pointer of three-level tables has none.
                0 if self.tables().top() < 3 => 0,
                _ if is_leaf && is_write => entry::ACCESSED | entry::DIRTY,
                _ => entry::ACCESSED,
            };
            step.at = read.at;
            step.value = read.value | marks;
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
        if is_tcg() && vmcb.control.interrupt_shadow.get() & SHADOW != 0 {
            // The next entry would lose it; the VMM executes the instruction.
            return Some(internal::HOST_INTERRUPT);
        }
        vmcb.control.event_inj.set(interrupted(&vmcb.control));
        None
    }
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

/// Options of the state page's word.
fn options(word: u64) -> Options {
    let has = |bit: u64| word & bit != 0;
    Options {
        spaces: (word >> option::SPACES_SHIFT) as u8,
        global: has(option::GLOBAL),
        sync: has(option::SYNC),
        trace: has(option::TRACE),
        protect: has(option::TRACE_WRITES),
    }
}

/// Invalidates one address in the TLB.
fn invlpga(address: u64, asid: u32) {
    // Addresses of tables lack the sign.
    let address = ((address << 16) as i64 >> 16) as u64;
    // SAFETY: SVM is enabled; dropping a translation is harmless.
    unsafe {
        core::arch::asm!("invlpga rax, ecx", in("rax") address, in("ecx") asid, options(nostack));
    }
}

//! Guests on AMD SVM (APM vol. 2, chapter 15): VMCB, world switch and injection of events.
//!
//! # Invariants
//!
//! * The VMM controls guest state only; intercepts, permission maps, nested tables and ASIDs are
//!   the kernel's. Any value that the VMM writes harms at most its own guest: a state that the
//!   processor refuses is an exit.
//! * An event is in exactly one place: the state page's `inject`, the VMCB's `EVENTINJ`, the VMCB's
//!   virtual interrupt, or delivered.

pub mod asid;
pub mod exit;
pub mod intercepts;
mod paging;
pub mod state;
mod switch;
pub mod virq;
pub mod vmcb;

use core::cell::Cell;
use core::sync::atomic::{AtomicBool, Ordering};

use abi::ABI_VERSION;
use abi::vcpu::HYPERCALL_VERSION;
use abi::vcpu::exit::{HYPERCALL, MEMORY_FAULT};
use abi::vcpu::x86::exit::{CPUID, PORT};
use abi::vcpu::x86::{VcpuState, gpr, group, window};
use hw_x86::msr;
use hw_x86::vmcb::exit::{PAGE_FAULT, VMMCALL};
use hw_x86::vmcb::{ControlArea, Vmcb, event, npf, tlb_control};
use kernel_core::Result;
use kernel_core::object::Translation;
use kernel_core::pool::{Account, Frame, Memory};

use crate::features::features;
use crate::hvm::{GuestExit, Hvm, internal};
use crate::io::{rdmsr, wrmsr};
use crate::shadow::{RFLAGS_TRACED, Shadow};
use asid::Asids;
use paging::GuestPaging;

/// Clean bits of a VMCB without changes in cached groups: all defined bits (APM vol. 2 §15.15.3).
const CLEAN: u64 = 0xfff;

static IS_READY: AtomicBool = AtomicBool::new(false);
/// The processor is QEMU's TCG, whose errors need workarounds: [`Features::is_tcg`], in a place of
/// its own for the world switch.
///
/// [`Features::is_tcg`]: crate::features::Features::is_tcg
static IS_TCG: AtomicBool = AtomicBool::new(false);

#[inline(always)]
pub(crate) fn is_tcg() -> bool {
    IS_TCG.load(Ordering::Relaxed)
}

/// State of SVM on a CPU.
pub struct Local {
    /// Physical address of the page for host state (VMSAVE).
    host_state: Cell<u64>,
    asids: Asids,
}

/// The VMCB of a vCPU.
#[derive(Clone)]
pub struct Svm {
    frame: Frame,
    vmcb: *const Vmcb,
    physical: u64,
    /// Epoch of the VMCB's ASID; 0: it has none.
    asid_epoch: Cell<u64>,
    /// Value of the state page's `window` that the VMCB is configured for.
    window: Cell<u64>,
    /// Event that the VMCB holds as a virtual interrupt instead of injecting it; 0: none.
    virq_offered: Cell<u64>,
    /// The processor's cached copy of the VMCB is out of date.
    is_changed: Cell<bool>,
    paging: GuestPaging,
}

impl Svm {
    /// The VMCB. Its fields are cells: the processor writes them while the guest runs.
    #[inline(always)]
    fn vmcb(&self) -> &Vmcb {
        // SAFETY: a frame of this vCPU only, zeroed when allocated, which is valid for all fields
        // (cells of integers). Only the CPU that runs the vCPU or holds the lock uses it.
        unsafe { &*self.vmcb }
    }

    /// Configures the VMCB for a new value of the state page's `window`.
    #[cold]
    #[inline(never)]
    fn set_window(&self, wanted: u64) {
        let before = self.window.replace(wanted);
        self.is_changed.set(true);
        virq::set_window(&self.vmcb().control, before, wanted);
    }

    /// Injects an event at the next entry.
    ///
    /// On QEMU TCG an interrupt is made pending as a virtual interrupt if possible: TCG may deliver
    /// one from `EVENTINJ` twice, the second time even if the guest masks it, if a host interrupt
    /// arrives before the guest's next exit. It is not possible while a window uses the virtual
    /// interrupt.
    #[cold]
    #[inline(never)]
    fn inject(&self, event: u64) {
        let control = &self.vmcb().control;
        let event = exit::to_event_inj(event);
        let is_interrupt =
            event & (event::VALID | event::TYPE_MASK) == event::VALID | event::TYPE_INTR;
        if is_tcg() && is_interrupt && virq::is_unused(self.window.get()) {
            virq::offer(control, event, self.window.get());
            self.virq_offered.set(event);
            self.is_changed.set(true);
        } else {
            control.event_inj.set(event);
        }
    }

    /// Withdraws the virtual interrupt. Returns it if the guest has not taken it, else 0.
    #[cold]
    #[inline(never)]
    fn withdraw_virq(&self) -> u64 {
        let control = &self.vmcb().control;
        let offered = self.virq_offered.take();
        let taken = !virq::is_pending(control);
        virq::clear(control, self.window.get());
        self.is_changed.set(true);
        if taken { 0 } else { offered }
    }

    /// Enters the guest until an exit for which `end` returns a reason.
    #[inline(always)]
    fn run(
        &self,
        local: &Local,
        state: &VcpuState,
        mut end: impl FnMut(u64) -> Option<u64>,
    ) -> GuestExit {
        let (vmcb, physical, host_state) = (self.vmcb(), self.physical, local.host_state.get());
        let registers = state.gpr.as_ptr().cast::<u64>().cast_mut();
        vmcb.save.rax.set(state.gpr[gpr::RAX].get());
        let mut handled = 0;
        // SAFETY: host state is saved in this CPU's own page and restored from there, before any
        // use of GS or SYSRET; the VMCB is complete, with the kernel's maps and tables.
        let reason = unsafe {
            switch::load_guest(physical, host_state);
            let reason = loop {
                switch::world_switch(physical, registers);
                let code = vmcb.control.exit_code.get();
                if code != VMMCALL {
                    match end(code) {
                        Some(reason) => break reason,
                        None => {
                            handled += 1;
                            continue;
                        }
                    }
                }
                if vmcb.save.rax.get() != HYPERCALL_VERSION {
                    break HYPERCALL;
                }
                // A hypercall handled in the kernel.
                handled += 1;
                vmcb.save.rax.set(ABI_VERSION as u64);
                step_over_hypercall(vmcb);
                vmcb.control.event_inj.set(0);
                vmcb.control.tlb_control.set(tlb_control::NOTHING);
            };
            switch::restore_host(physical, host_state);
            let uses_virq = self.window.get() != 0 || self.virq_offered.get() != 0;
            if uses_virq && is_tcg() {
                switch::reevaluate_interrupts();
            }
            switch::end_guest_mode(reason == internal::HOST_INTERRUPT);
            reason
        };
        state.gpr[gpr::RAX].set(vmcb.save.rax.get());
        GuestExit { reason, handled }
    }

    /// Enters a guest with a vTLB, which handles some of its exits.
    #[cold]
    #[inline(never)]
    fn enter_shadow(&self, shadow: &Shadow, local: &Local, state: &VcpuState) -> GuestExit {
        shadow.apply(&local.asids, self.vmcb());
        let found = self.run(local, state, |_| shadow.handle(&local.asids, self.vmcb(), state));
        shadow.show_counters(state);
        found
    }

    /// Shows the guest's own control registers in the state page, if the processor has others.
    #[inline(always)]
    fn show_control(&self, state: &VcpuState, groups: u64) {
        if groups & group::CONTROL != 0
            && let Some(control) = self.paging.control()
        {
            control.get(&self.vmcb().save).show(state);
        }
    }

    /// Continues [`Hvm::describe`].
    #[inline(never)]
    fn describe_rare(&self, reason: u64, state: &VcpuState) -> u64 {
        let control = &self.vmcb().control;
        if (reason == MEMORY_FAULT || control.exit_code.get() == PAGE_FAULT)
            && let Some((address, info)) = self.paging.fault(reason, control)
        {
            state.run.exit_info.set(info);
            state.run.fault_address.set(address);
            return group::IP | group::CONTROL | group::CODE | group::SEGMENTS;
        }
        if reason == MEMORY_FAULT {
            state.run.exit_info.set(exit::memory_fault_info(control.exit_info1.get()));
            state.run.fault_address.set(control.exit_info2.get());
            page_fault_bytes(state, control);
            return group::IP | group::CONTROL | group::CODE | group::SEGMENTS;
        }
        state.run.exit_info.set(exit::info(reason, control));
        groups_to_decode(control.n_rip.get())
    }

    /// Finds out whether the guest has taken the interrupt of [`window::DELIVER_VIRQ`].
    #[cold]
    #[inline(never)]
    fn finish_window(&self, state: &VcpuState) {
        let control = &self.vmcb().control;
        if !virq::is_pending(control) {
            let left = self.window.get() & window::PERSISTENT;
            self.window.set(left);
            self.is_changed.set(true);
            virq::clear(control, left);
            state.window.set(left);
        } else if is_tcg() && (state.inject.get() ^ self.window.get()) & event::VECTOR == 0 {
            // TCG keeps a virtual interrupt pending whose delivery was interrupted, and delivers
            // it.
            state.inject.set(0);
        }
    }
}

impl Hvm for Svm {
    type Local = Local;
    const LOCAL: Local = Local { host_state: Cell::new(0), asids: Asids::new() };
    /// The host save area, which VMRUN uses, and a page for VMSAVE.
    const HOST_FRAMES: u32 = 2;

    fn init() {
        if features().svm {
            vmcb::init_maps();
            IS_TCG.store(features().is_tcg, Ordering::Relaxed);
            IS_READY.store(true, Ordering::Release);
        }
    }

    fn init_cpu(local: &Local, host: u64) {
        local.host_state.set(host + abi::PAGE_SIZE);
        // SAFETY: the CPU has SVM (`is_ready`); the host save area is a frame for this use only.
        unsafe {
            if rdmsr(msr::VM_CR) & msr::vm_cr::SVMDIS != 0 {
                IS_READY.store(false, Ordering::Release);
                crate::log!("SVM is disabled by the firmware: cannot run VMs");
                return;
            }
            wrmsr(msr::EFER, rdmsr(msr::EFER) | msr::efer::SVME);
            wrmsr(msr::VM_HSAVE_PA, host);
        }
    }

    fn is_ready() -> bool {
        IS_READY.load(Ordering::Acquire)
    }

    fn new(memory: &Memory, factory: Account, translation: Translation) -> Result<Self> {
        let frame = memory.alloc_raw(factory, 1)?;
        let mut this = Self {
            frame,
            vmcb: memory.address(frame).cast(),
            physical: memory.physical(frame),
            asid_epoch: Cell::new(0),
            window: Cell::new(0),
            virq_offered: Cell::new(0),
            is_changed: Cell::new(true),
            paging: GuestPaging::Nested,
        };
        let vmcb = this.vmcb();
        vmcb::reset(vmcb);
        let made = GuestPaging::new(memory, factory, translation, vmcb);
        this.paging = made.inspect_err(|_| memory.free_raw(frame, 1))?;
        Ok(this)
    }

    fn free(&self, memory: &Memory) {
        self.paging.free(memory);
        memory.free_raw(self.frame, 1);
    }

    #[inline(always)]
    fn needs_flush(&self, local: &Local) -> bool {
        self.asid_epoch.get() != local.asids.epoch()
    }

    #[cold]
    #[inline(never)]
    fn flush(&self, local: &Local, root: u64) {
        let control = &self.vmcb().control;
        self.is_changed.set(true);
        if let GuestPaging::Shadow(shadow) = &self.paging {
            // The entry assigns an ASID. Without an epoch, every entry is prepared.
            return shadow.set_root(root);
        }
        self.asid_epoch.set(local.asids.assign(control));
        control.n_cr3.set(root);
    }

    #[cold]
    fn unmapped(&self, root: u64) {
        if let GuestPaging::Shadow(shadow) = &self.paging {
            shadow.unmapped(root);
        }
    }

    #[inline(always)]
    fn prepare_memory(&self, memory: &Memory, factory: Account, state: &VcpuState) -> Result<()> {
        match &self.paging {
            GuestPaging::Nested => {}
            GuestPaging::Shadow(shadow) => shadow.prepare(memory, factory, state)?,
            GuestPaging::GuestVirtual(space) => {
                if !space.load(memory, self.vmcb()) {
                    self.asid_epoch.set(0);
                }
            }
        }
        Ok(())
    }

    #[cold]
    #[inline(never)]
    fn set_port_map(&self, map: u64) {
        self.vmcb().control.iopm_base_pa.set(map);
        self.is_changed.set(true);
    }

    #[inline(always)]
    fn prepare(&self, state: &VcpuState) {
        let window = state.window.get();
        if self.window.get() != window {
            self.set_window(window);
        }
        let control = &self.vmcb().control;
        control.event_inj.set(0);
        let event = state.inject.get();
        if event != 0 {
            state.inject.set(0);
            self.inject(event);
        }
        control.clean.set(CLEAN);
        if self.is_changed.get() {
            self.is_changed.set(false);
            control.clean.set(0);
        }
    }

    #[inline(always)]
    fn enter(&self, local: &Local, state: &VcpuState) -> GuestExit {
        match &self.paging {
            GuestPaging::Shadow(shadow) => self.enter_shadow(shadow, local, state),
            _ => self.run(local, state, |code| {
                Some(exit::reason(code, || local.asids.refused(&self.vmcb().control)))
            }),
        }
    }

    #[inline(always)]
    fn finish(&self, state: &VcpuState) {
        let control = &self.vmcb().control;
        let undelivered = if self.virq_offered.get() != 0 { self.withdraw_virq() } else { 0 };
        control.tlb_control.set(tlb_control::NOTHING);
        state.inject.set(match exit::interrupted_event(control.exit_int_info.get()) {
            0 => undelivered,
            // TCG also keeps a virtual interrupt pending whose delivery was interrupted.
            event => event,
        });
        state.cr8.set(virq::priority(control));
        if self.window.get() & window::DELIVER_VIRQ != 0 {
            self.finish_window(state);
        }
    }

    #[inline(always)]
    fn describe(&self, reason: u64, state: &VcpuState) -> u64 {
        let control = &self.vmcb().control;
        // 0 if the processor does not save the next instruction's address. Then the VMM decodes the
        // instruction, except for port accesses, where EXITINFO2 has that address.
        let next_rip = control.n_rip.get();
        state.next_rip.set(next_rip);
        state.bytes_len.set(0);
        match reason {
            CPUID => groups_to_decode(next_rip),
            PORT => {
                state.run.exit_info.set(exit::port_info(control.exit_info1.get()));
                state.next_rip.set(control.exit_info2.get());
                group::IP
            }
            _ => self.describe_rare(reason, state),
        }
    }

    fn read_groups(&self, state: &VcpuState, groups: u64) {
        state::read(state, self.vmcb(), groups);
        self.show_control(state, groups);
    }

    #[inline(always)]
    fn read_code(&self, state: &VcpuState, groups: u64) {
        state::read_code(state, self.vmcb(), groups);
        self.show_control(state, groups);
    }

    #[inline(always)]
    fn write_ip(&self, state: &VcpuState) {
        state::write_ip(state, self.vmcb());
    }

    fn write_groups(&self, state: &VcpuState, dirty: u64) {
        self.is_changed.set(true);
        state::write(state, self.vmcb(), dirty);
        if dirty & group::CONTROL != 0 {
            // TLB entries may be stale for the new registers: assign a new ASID.
            self.asid_epoch.set(0);
        }
        self.paging.take_groups(self.vmcb(), state, dirty);
    }

    fn ip(&self) -> u64 {
        self.vmcb().save.rip.get()
    }

    #[inline(always)]
    fn skip_kernel_hypercall(&self, number: u64) -> bool {
        let vmcb = self.vmcb();
        let save = &vmcb.save;
        // A single step over it is the VMM's, which handles this hypercall, too.
        let is_traced = save.rflags.get() & RFLAGS_TRACED != 0;
        let found = save.rax.get() == number && save.cpl.get() == 0 && !is_traced;
        if found {
            step_over_hypercall(vmcb);
        }
        found
    }

    fn loses_shadow(&self) -> bool {
        is_tcg() && self.vmcb().control.interrupt_shadow.get() & state::SHADOW != 0
    }
}

/// Advances the guest beyond the `VMMCALL` that caused the exit.
#[inline(always)]
fn step_over_hypercall(Vmcb { control, save }: &Vmcb) {
    const VMMCALL_LENGTH: u64 = 3;
    save.rip.set(save.rip.get().wrapping_add(VMMCALL_LENGTH));
    control.interrupt_shadow.set(0);
}

/// Returns the groups that the handler of an instruction needs. `next_rip`: address of the
/// instruction after it; 0: unknown.
#[inline(always)]
fn groups_to_decode(next_rip: u64) -> u64 {
    if next_rip != 0 { group::IP } else { group::IP | group::CONTROL | group::CODE }
}

/// Copies the bytes of the faulting instruction, if the processor reports them (APM vol. 2
/// §15.33.5).
#[cold]
fn page_fault_bytes(state: &VcpuState, control: &ControlArea) {
    if features().decode_assist && control.exit_info1.get() & npf::FETCH == 0 {
        state.bytes_len.set(control.fetched_bytes.get() as u64 & 0xf);
        for (to, from) in state.bytes.iter().zip(control.instruction_bytes.get()) {
            to.set(from);
        }
    }
}

//! vCPUs: entry, exits that the kernel handles, and exchange of state with the VMM through the
//! state page ([`abi::vcpu::arm64`]).
//!
//! # Invariants
//!
//! * While a guest runs, its CPU does not hold the kernel lock. Before a vCPU is destroyed, its CPU
//!   is forced out of the guest (`Arch::shootdown`), and afterwards looks up everything about it
//!   again.
//! * Whatever the VMM writes to the state page harms at most its own guest: the processor state is
//!   checked before every entry, and all other values are registers of EL0 and EL1.
//! * All guests have the same VMID, which no task has. A CPU flushes the TLB entries of guests when
//!   it enters another vCPU, or one whose VM has lost mappings.

mod aarch32;
mod events;
mod exits;
mod fault;
mod features;
pub mod float;
mod guest_entry;
mod registers;
mod sgi;
mod tables;
pub mod timer;
pub mod virqs;
mod wait;

use core::cell::Cell;
use core::sync::atomic::Ordering;

use abi::Status;
use abi::vcpu::arm64::{VcpuState, exit as arm64_exit, group, pstate};
use abi::vcpu::exit;
use hw_arm64::esr::{self, class};
use hw_arm64::registers::{spsr, vtcr};
use kernel_core::arch::ArchVcpu;
use kernel_core::object::{Thread, ThreadState, Translation, Vcpu, Vm};
use kernel_core::pool::{Account, Cached, Frame, Handle, Memory};
use kernel_core::{Kernel, Result, count};
use kernel_run::exit::ReturnToUser;
use kernel_run::lock::{lock, unlock};

use crate::entry::{GuestExit, enter_guest, exit_kind};
use crate::run::{Guard, arm, handle_interrupt, handle_interrupts};
use crate::{Arm64, cpu, gic, io, read_register, write_register};
use guest_entry::{GuestEntry, Lookup};
use registers::SystemRegisters;
use sgi::PendingSgis;
use timer::VirtualTimer;
use virqs::VirtualInterface;

/// Generation that no space has: the vCPU has not been entered with tables.
const NO_GENERATION: u64 = u64::MAX;
/// Length of A64 instructions in bytes.
const INSTRUCTION: u64 = 4;

/// Processor structures of a vCPU.
#[derive(Clone)]
pub struct VcpuFrames {
    state: *const VcpuState,
    system: SystemRegisters,
    interface: VirtualInterface,
    timer: VirtualTimer,
    sgis: PendingSgis,
    lookup: Lookup,
    /// Generation of the VM's space that the vCPU was last entered with, or [`NO_GENERATION`].
    generation: Cell<u64>,
    /// Physical address of the tables of that generation.
    tables: Cell<u64>,
    /// Counter value at which the VMM's thread blocked because the guest waits for an interrupt;
    /// 0: it is not blocked.
    halted: Cell<u64>,
}

impl ArchVcpu for VcpuFrames {
    fn new(
        memory: &Memory,
        _factory: Account,
        state: Frame,
        translation: Translation,
    ) -> Result<Self> {
        if translation != Translation::Nested {
            return Err(Status::Unsupported);
        }
        let this = Self {
            state: memory.address(state).cast_const().cast(),
            system: SystemRegisters::new(),
            interface: VirtualInterface::reset(),
            timer: VirtualTimer::reset(),
            sgis: PendingSgis::new(0),
            lookup: Lookup::new((Cached::NONE, Cached::NONE)),
            generation: Cell::new(NO_GENERATION),
            tables: Cell::new(0),
            halted: Cell::new(0),
        };
        this.state().pstate.set(pstate::EL1_MASKED);
        this.state().run.deadline.set(abi::FOREVER);
        Ok(this)
    }

    fn free(&self, _memory: &Memory) {
        // It has only the state page, which the caller frees.
    }

    fn count_preemption(&self) {
        let state = self.state();
        state.run.preemptions.add(1);
        if state.exit_after_preemption.get() != 0 {
            state.run.deadline.set(0);
        }
    }
}

impl VcpuFrames {
    /// The state page. The VMM may write it at any time: each field is an atomic word, read once.
    fn state(&self) -> &VcpuState {
        // SAFETY: a frame that exists as long as the vCPU; all fields are atomic integers, any
        // value is valid.
        unsafe { &*self.state }
    }

    /// Drops all interrupts of the vCPU. `is_loaded`: this CPU has its registers; those of the
    /// timer are loaded again before the guest runs.
    fn reset_interrupts(&self, is_loaded: bool) {
        self.sgis.set(0);
        self.interface.clear();
        self.timer.clear();
        if is_loaded {
            timer::stop();
            self.interface.load(false);
            self.timer.load(None);
        }
    }
}

/// State of a CPU that concerns guests.
pub struct GuestCpu {
    /// vCPU whose registers are loaded.
    owner: Cell<Option<Handle<Vcpu<Arm64>>>>,
    /// vCPU whose registers of floating point are loaded.
    float_owner: Cell<Option<Handle<Vcpu<Arm64>>>>,
    /// The last exit was handled, and the guest continues.
    continues: Cell<bool>,
    /// Why the last entry was refused.
    refused: Cell<Option<Refused>>,
}

impl GuestCpu {
    /// State before the first guest.
    pub const fn unused() -> Self {
        Self {
            owner: Cell::new(None),
            float_owner: Cell::new(None),
            continues: Cell::new(false),
            refused: Cell::new(None),
        }
    }
}

/// Sets this CPU's registers for guests that do not change later.
///
/// # Safety
/// No guest runs on this CPU.
pub unsafe fn init_this_cpu() {
    let sizes = read_register!("id_aa64mmfr0_el1") & 7;
    let identity = read_register!("midr_el1");
    let counters = read_register!("mdcr_el2") & hw_arm64::registers::MDCR_COUNTERS;
    // SAFETY: they concern guests alone, by the caller: stage 2 without guest memory; debug
    // and performance monitors trap.
    unsafe {
        write_register!("vtcr_el2", vtcr::KERNEL | sizes.min(vtcr::MAX_SIZE) << vtcr::SIZE_SHIFT);
        write_register!("vpidr_el2", identity);
        write_register!("mdcr_el2", hw_arm64::registers::MDCR_GUEST | counters);
    }
    tables::set(tables::none());
    timer::stop();
    virqs::init_this_cpu();
    io::instruction_barrier();
    flush_guests();
}

/// Flushes this CPU's TLB entries of guests.
fn flush_guests() {
    // SAFETY: flushes only.
    unsafe { core::arch::asm!("dsb nshst", "tlbi alle1", "dsb nsh", "isb", options(nostack)) };
}

/// Reason why a vCPU is not entered.
#[derive(Clone, Copy)]
enum Refused {
    /// The VMM gets this exit.
    Exit(u64),
    /// `VcpuRun` ends with this status.
    Failed(Status),
}

/// Enters the vCPU that `thread`, the CPU's current thread, runs in `VcpuRun`. Unless the VMM gets
/// an exit, the thread stays in `VcpuRun` and enters the guest again when next dispatched.
#[inline(always)]
pub fn run(
    mut kernel: Guard,
    cpu_index: usize,
    local: &GuestCpu,
    thread: &Thread<Arm64>,
    vcpu: &Vcpu<Arm64>,
) -> (Guard, Option<ReturnToUser<Arm64>>) {
    loop {
        let (after, to_vmm) = run_once(kernel, cpu_index, local, thread, vcpu);
        kernel = after;
        let continues = to_vmm.is_none() && local.continues.take();
        if !continues || kernel.has_work(cpu_index) {
            return (kernel, to_vmm);
        }
    }
}

/// [`run`] until an exit that it does not handle itself. Accesses to memory that is not mapped,
/// which the VMM emulates, and messages to other vCPUs and VMs are handled here; all else is in
/// functions of its own, so that these paths need few registers.
#[inline(never)]
fn run_once(
    mut kernel: Guard,
    cpu_index: usize,
    local: &GuestCpu,
    thread: &Thread<Arm64>,
    vcpu: &Vcpu<Arm64>,
) -> (Guard, Option<ReturnToUser<Arm64>>) {
    let Some(entry) = GuestEntry::new(&kernel.memory, thread, vcpu) else {
        abort_run(&kernel, cpu_index);
        return (kernel, None);
    };
    let mut pstate = guest_state(entry.state);
    let is_prepared = is_prepared(local, entry) || prepare(&kernel, local, entry);
    // By the kind of the vCPU, 64 or 32 bits, which is loaded after `prepare`.
    if !is_prepared || !vcpu.arch.system.permits(pstate) {
        let to_vmm = refuse_entry(&kernel, local, entry);
        return (kernel, Some(to_vmm));
    }
    begin_entry(&kernel, cpu_index, local, entry);
    let (vm, _) = vcpu.arch.lookup.get();
    let state = vcpu.arch.state();
    loop {
        arm(cpu_index, kernel.cpus[cpu_index].deadline().min(state.run.deadline.get()));
        let pc = state.pc.get();
        unlock(kernel);
        // SAFETY: the page is not freed before this CPU has answered a shootdown, when it acquires
        // the lock; the processor state has been checked, and the guest's registers are loaded.
        let exit = unsafe { stay_in_guest(state, pc, pstate) };
        kernel = lock(cpu_index);
        // If no object has been destroyed since, all still exist. The thread's state changes if
        // another CPU stops it.
        let runs = || matches!(thread.state.get(), ThreadState::InGuest { .. });
        let is_synchronous = exit.kind == exit_kind::SYNCHRONOUS;
        let Some(vm) = kernel.memory.cached(vm).filter(|_| is_synchronous && runs()) else {
            return handle_exit(kernel, cpu_index, local, exit);
        };
        let is_handled = match esr::class(exit.syndrome) {
            class::DATA_ABORT => {
                match report_fault(&kernel, cpu_index, (thread, vcpu, vm), exit.syndrome) {
                    None => return handle_exit(kernel, cpu_index, local, exit),
                    to_vmm => return (kernel, to_vmm),
                }
            }
            class::HYPERVISOR_CALL => exits::handle_hypercall(&kernel, vm, state),
            class::WAIT => {
                return handle_wait(kernel, cpu_index, local, (thread, vcpu), exit.syndrome);
            }
            class::SYSTEM_REGISTER => sgi::send(&kernel, (vcpu, vm), exit.syndrome),
            _ => false,
        };
        if !is_handled {
            return handle_exit(kernel, cpu_index, local, exit);
        }
        pstate = guest_state(state);
        if !may_continue(&kernel, cpu_index, (vcpu, vm, state), pstate) {
            local.continues.set(true);
            return (kernel, None);
        }
    }
}

/// Returns whether the guest continues at once after an exit that the kernel has handled; otherwise
/// the entry ends.
#[inline(always)]
fn may_continue(
    kernel: &Kernel<Arm64>,
    cpu_index: usize,
    (vcpu, vm, state): (&Vcpu<Arm64>, &Vm<Arm64>, &VcpuState),
    pstate: u64,
) -> bool {
    count_handled(kernel, state);
    count(&kernel.counters.vm_entries);
    let is_permitted = vcpu.arch.system.permits(pstate);
    if kernel.has_work(cpu_index) || !is_unchanged(vcpu, vm) || !is_permitted {
        end_entry(cpu_index, vcpu, vm, state);
        return false;
    }
    if kernel.cpus[cpu_index].waits.get() && !kernel.may_wait(cpu_index) {
        cpu::current().guest.may_wait.store(0, Ordering::Relaxed);
    }
    state.run.entries.add(1);
    true
}

/// Handles a wait of the guest, whose vCPU and VM exist, for an interrupt.
#[inline(never)]
fn handle_wait(
    kernel: Guard,
    cpu_index: usize,
    local: &GuestCpu,
    (thread, vcpu): (&Thread<Arm64>, &Vcpu<Arm64>),
    syndrome: u64,
) -> (Guard, Option<ReturnToUser<Arm64>>) {
    let Some(entry) = GuestEntry::new(&kernel.memory, thread, vcpu) else {
        let exit = GuestExit { syndrome, kind: exit_kind::SYNCHRONOUS };
        return handle_exit(kernel, cpu_index, local, exit);
    };
    count(&kernel.counters.vm_entries);
    end_entry(cpu_index, vcpu, entry.vm, entry.state);
    let to_vmm = wait::begin(&kernel, cpu_index, local, entry, syndrome);
    (kernel, to_vmm)
}

/// Handles an exit: [`run_once`] does not.
#[inline(never)]
fn handle_exit(
    kernel: Guard,
    cpu_index: usize,
    local: &GuestCpu,
    mut exit: GuestExit,
) -> (Guard, Option<ReturnToUser<Arm64>>) {
    // The time of waits is in the CPU's area, too.
    exit.kind &= (1 << exit_kind::WAITED_SHIFT) - 1;
    let Some(entry) = finish_run(&kernel, cpu_index, local, exit) else {
        handle_interrupts(&kernel, cpu_index);
        abort_run(&kernel, cpu_index);
        return (kernel, None);
    };
    let to_vmm = exits::handle(&kernel, cpu_index, local, entry, exit);
    // After an interrupt another thread may be the current one.
    local.continues.set(to_vmm.is_none() && exit.kind == exit_kind::SYNCHRONOUS);
    (kernel, to_vmm)
}

/// Returns the exit to the VMM whose cause [`prepare`] has recorded, or that of a processor state
/// that the vCPU may not have.
#[cold]
#[inline(never)]
fn refuse_entry(
    kernel: &Kernel<Arm64>,
    local: &GuestCpu,
    entry: GuestEntry<'_>,
) -> ReturnToUser<Arm64> {
    // `prepare` may have requested a maintenance interrupt.
    virqs::finish();
    match local.refused.take() {
        Some(Refused::Exit(reason)) => return_exit(kernel, entry, reason, 0),
        Some(Refused::Failed(status)) => end_run(kernel, entry, status),
        None => return_exit(kernel, entry, arm64_exit::INVALID_STATE, 0),
    }
}

/// Prepares this CPU for the guest that it enters next, with the lock held; [`end_entry`] follows.
/// Between them the guest can be left and entered again.
#[inline(always)]
fn begin_entry(
    kernel: &Kernel<Arm64>,
    cpu_index: usize,
    local: &GuestCpu,
    GuestEntry { vcpu, vm, state, .. }: GuestEntry<'_>,
) {
    let (active, run) = (&vm.space.active, &state.run);
    active.set(active.get() | 1 << cpu_index);
    vcpu.arch.system.load_readable();
    float::permit(local, vcpu);
    let may_wait =
        run.halt.get() != 0 && kernel.may_wait(cpu_index) && virqs::has_system_registers();
    cpu::current().guest.may_wait.store(may_wait.into(), Ordering::Relaxed);
}

/// Ends the entries of a vCPU that still exists.
#[inline(always)]
fn end_entry(cpu_index: usize, vcpu: &Vcpu<Arm64>, vm: &Vm<Arm64>, state: &VcpuState) {
    float::forbid();
    virqs::finish();
    vcpu.arch.system.save_readable();
    let active = &vm.space.active;
    active.set(active.get() & !(1 << cpu_index));
    state.run.entries.add(1);
}

/// Ends a run of a guest, with the lock held again, and handles the interrupt that has ended it.
/// `None`: the current thread has left `VcpuRun` meanwhile.
#[inline(always)]
fn finish_run<'a>(
    kernel: &'a Kernel<Arm64>,
    cpu_index: usize,
    local: &GuestCpu,
    exit: GuestExit,
) -> Option<GuestEntry<'a>> {
    count(&kernel.counters.vm_entries);
    let waited = &cpu::current().guest.waited;
    let ticks = waited.load(Ordering::Relaxed);
    if ticks != 0 {
        waited.store(0, Ordering::Relaxed);
        kernel.exclude_wait(cpu_index, ticks);
    }
    if exit.kind == exit_kind::INTERRUPT
        && let Some(interrupt) = gic::taken(exit.syndrome).or_else(gic::take)
    {
        handle_interrupt(kernel, cpu_index, interrupt);
    }
    let Some(entry) = GuestEntry::current(kernel, cpu_index) else {
        float::forbid();
        virqs::finish();
        match local.owner.get().and_then(|owner| kernel.memory.get(owner)) {
            Some(left) => left.arch.system.save_readable(),
            None => registers::clear_readable(),
        }
        return None;
    };
    // The current thread is the one that has entered the guest.
    end_entry(cpu_index, entry.vcpu, entry.vm, entry.state);
    if ticks != 0 {
        entry.state.run.halted.add(ticks);
    }
    Some(entry)
}

/// Enters a guest until there is an exit for which the kernel lock is needed: its SGIs to itself
/// need none.
///
/// # Safety
/// Those of [`enter_guest`] hold, and the state page exists until this CPU acquires the lock.
#[inline(always)]
unsafe fn stay_in_guest(page: *const VcpuState, pc: u64, processor_state: u64) -> GuestExit {
    // SAFETY: the page exists, by the caller; all fields are atomic integers, any value is valid.
    let state = unsafe { &*page };
    let (mut pc, mut processor_state) = (pc, processor_state);
    loop {
        // SAFETY: by the caller; the processor state has been checked, and the other registers are
        // those with which the guest was left, or what the VMM has made of them meanwhile.
        let exit = unsafe { enter_guest(page, pc, processor_state) };
        let is_handled =
            exit.kind == exit_kind::SYNCHRONOUS && sgi::send_to_itself(state, exit.syndrome);
        if !is_handled {
            return exit;
        }
        (pc, processor_state) = (state.pc.get().wrapping_add(INSTRUCTION), guest_state(state));
        if !is_state_of_64_bit(processor_state) {
            // The VMM has changed it meanwhile: the next entry checks it. 32-bit guests have no
            // such exits.
            return exit;
        }
        state.run.entries.add(1);
        state.run.handled_in_kernel.add(1);
    }
}

/// Returns whether the vCPU's registers in the CPU are as they have to be for an entry, and the VMM
/// gets no exit instead: most entries after an exit.
#[inline(always)]
fn is_prepared(local: &GuestCpu, entry: GuestEntry<'_>) -> bool {
    let (frames, state, space) = (&entry.vcpu.arch, entry.state, &entry.vm.space);
    // First what is most often not so.
    frames.halted.get() == 0
        && local.owner.get() == entry.vcpu.handle.get()
        && frames.generation.get() == space.generation.get()
        && state.run.dirty.get() == 0
        && entry.notification.bits.get() == 0
        && frames.sgis.get() == 0
        && !frames.timer.is_pending()
        && !space.dying.get()
        && !virqs::has_words(state)
}

/// Returns whether the guest may continue after an exit that the kernel has handled, as far as that
/// can have changed it, and other CPUs' changes of the VM's memory. Other threads that change the
/// state page notify the vCPU, which interrupts this CPU.
#[inline(always)]
fn is_unchanged(vcpu: &Vcpu<Arm64>, vm: &Vm<Arm64>) -> bool {
    tables::are_current(vcpu, vm) && vcpu.arch.sgis.get() == 0
}

/// Updates the vCPU's registers in the CPU before an entry. Returns `false` and records the cause
/// if the vCPU is not to be entered.
#[inline(never)]
fn prepare(kernel: &Kernel<Arm64>, local: &GuestCpu, entry: GuestEntry<'_>) -> bool {
    match try_prepare(kernel, local, entry) {
        Ok(()) => true,
        Err(refused) => {
            local.refused.set(Some(refused));
            false
        }
    }
}

#[inline(always)]
fn try_prepare(
    kernel: &Kernel<Arm64>,
    local: &GuestCpu,
    entry: GuestEntry<'_>,
) -> Result<(), Refused> {
    let (frames, state) = (&entry.vcpu.arch, entry.state);
    let has_waited = frames.halted.get() != 0;
    let pending = &entry.notification.bits;
    let mut bits = pending.take();
    if bits != 0 {
        pending.set(bits & events::with_virq(state));
        bits &= !pending.get();
    }
    if has_waited && !wait::end(kernel, entry, bits) {
        return Err(Refused::Exit(exit::HALTED));
    }
    if bits != 0 {
        state.run.events.set(bits);
        return Err(Refused::Exit(exit::RECALL));
    }
    let space = &entry.vm.space;
    if space.dying.get() {
        return Err(Refused::Failed(Status::Aborted));
    }
    let is_owner = local.owner.get() == entry.vcpu.handle.get();
    let dirty = state.run.dirty.get();
    let is_changed = dirty & group::SYSTEM != 0;
    if is_changed {
        frames.system.write(state).map_err(Refused::Failed)?;
        if dirty & group::INTERRUPTS != 0 {
            frames.reset_interrupts(is_owner);
        }
    }
    state.run.dirty.set(0);
    if !is_owner {
        change_owner(kernel, local, entry.vcpu);
    }
    virqs::deliver(state);
    sgi::deliver(&frames.sgis, state);
    events::deliver(pending, state);
    frames.timer.deliver(state);
    if is_changed || !is_owner {
        if is_owner {
            timer::stop();
        }
        frames.system.load();
    }
    let is_current = frames.generation.get() == space.generation.get();
    if !is_current {
        let root = tables::root(kernel, space);
        frames.tables.set(root.unwrap_or(tables::none()));
        // The next entry looks for tables again if there are none. Only an unmapping removes them,
        // which changes the generation.
        frames.generation.set(root.map_or(NO_GENERATION, |_| space.generation.get()));
    }
    if !is_owner || !is_current {
        tables::set(frames.tables.get());
        io::instruction_barrier();
        flush_guests();
    }
    Ok(())
}

/// Saves the registers of this CPU for its owner; returns whether the timer's interrupt is active.
/// `are_free` is the value of [`virqs::are_free`].
#[inline(always)]
fn save_registers(owner: &Vcpu<Arm64>, are_free: bool) -> bool {
    owner.arch.system.save();
    owner.arch.interface.save(are_free);
    owner.arch.timer.save(are_free)
}

/// Saves the registers of this CPU for the vCPU whose they are, and loads those of another, except
/// [`SystemRegisters`]; its timer is stopped.
#[inline(always)]
fn change_owner(kernel: &Kernel<Arm64>, local: &GuestCpu, vcpu: &Vcpu<Arm64>) {
    // Its registers are lost if it does not exist any more.
    let old = local.owner.get().and_then(|old| kernel.memory.get(old));
    let are_free = virqs::are_free();
    let is_timer_active = old.map(|old| save_registers(old, are_free));
    local.owner.set(vcpu.handle.get());
    timer::stop();
    vcpu.arch.interface.load(are_free);
    vcpu.arch.timer.load(is_timer_active);
}

/// Takes this CPU from the vCPU that is its owner if the end of an interrupt is to be reported by
/// it and the guest does not run: it was stopped meanwhile, or another exit came first. Otherwise
/// the maintenance interrupt would occur for ever; it occurs again when the guest runs.
#[cold]
#[inline(never)]
pub fn withdraw_ended(kernel: &Kernel<Arm64>, local: &GuestCpu) {
    virqs::finish();
    if !virqs::has_ended() {
        return;
    }
    if let Some(old) = local.owner.take().and_then(|old| kernel.memory.get(old)) {
        save_registers(old, false);
    }
    timer::stop();
    VirtualInterface::reset().load(false);
}

/// Processor state with which a guest is to run, without what no guest may have.
fn guest_state(state: &VcpuState) -> u64 {
    state.pstate.get() & spsr::GUEST
}

/// Returns whether a processor state is one of EL0 or EL1 in AArch64.
fn is_state_of_64_bit(state: u64) -> bool {
    spsr::GUEST_MODES >> (state & spsr::MODE) & 1 != 0
}

/// Ends the `VcpuRun` of the CPU's current thread, if it is still in it, because an object that it
/// needs was destroyed.
fn abort_run(kernel: &Kernel<Arm64>, cpu_index: usize) {
    let current = kernel.cpus[cpu_index].current.get();
    if let Some(thread) = current.and_then(|name| kernel.memory.get(name))
        && let Some(name) = thread.state.get().vcpu()
    {
        kernel.vcpu_return(thread, kernel.memory.get(name), Status::Aborted);
    }
}

/// Ends `VcpuRun` with an exit for the VMM.
fn return_exit(
    kernel: &Kernel<Arm64>,
    entry: GuestEntry<'_>,
    reason: u64,
    information: u64,
) -> ReturnToUser<Arm64> {
    let run = &entry.state.run;
    run.exit_reason.set(reason);
    run.exit_info.set(information);
    run.valid.set(0);
    end_run(kernel, entry, Status::Ok)
}

/// Ends entry and `VcpuRun` with the exit of an access at stage 2. `None`, without effect: the
/// guest accesses again ([`fault::address`]).
#[inline(always)]
fn report_fault(
    kernel: &Kernel<Arm64>,
    cpu_index: usize,
    (thread, vcpu, vm): (&Thread<Arm64>, &Vcpu<Arm64>, &Vm<Arm64>),
    syndrome: u64,
) -> Option<ReturnToUser<Arm64>> {
    let address = fault::address(vcpu, vm, syndrome)?;
    count(&kernel.counters.vm_entries);
    let state = vcpu.arch.state();
    end_entry(cpu_index, vcpu, vm, state);
    let run = &state.run;
    run.fault_address.set(address);
    run.exit_reason.set(exit::MEMORY_FAULT);
    run.exit_info.set(fault::kind(syndrome));
    run.valid.set(0);
    kernel.vcpu_return(thread, Some(vcpu), Status::Ok);
    Some(ReturnToUser { task: thread.task, context: &raw const thread.context })
}

/// Ends `VcpuRun` with a status.
fn end_run(
    kernel: &Kernel<Arm64>,
    GuestEntry { thread, vcpu, .. }: GuestEntry<'_>,
    status: Status,
) -> ReturnToUser<Arm64> {
    kernel.vcpu_return(thread, Some(vcpu), status);
    ReturnToUser { task: thread.task, context: &raw const thread.context }
}

/// Counts an exit that the kernel handles.
fn count_handled(kernel: &Kernel<Arm64>, state: &VcpuState) {
    state.run.handled_in_kernel.add(1);
    count(&kernel.counters.handled_in_kernel);
}

/// Copies groups of a vCPU's state to its state page. Registers that another CPU holds are not
/// copied, and not valid then.
pub fn read_groups(local: &GuestCpu, cpu_index: usize, vcpu: &Vcpu<Arm64>, groups: u64) {
    let is_here = vcpu.cpu.get().is_none_or(|cpu| cpu == cpu_index);
    if groups & group::SYSTEM == 0 || !is_here {
        return;
    }
    let (frames, state) = (&vcpu.arch, vcpu.arch.state());
    // The VMM may have changed them before an entry that was refused: the page has newer values.
    if state.run.dirty.get() & group::SYSTEM == 0 {
        if local.owner.get() == vcpu.handle.get() {
            frames.system.save();
        }
        frames.system.read(state);
    }
    state.run.valid.set(state.run.valid.get() | group::SYSTEM);
}

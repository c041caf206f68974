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
mod exits;
mod fault;
mod features;
pub mod float;
mod guest_entry;
mod registers;
mod sgi;
pub mod timer;
pub mod virqs;
mod wait;

use core::cell::Cell;
use core::sync::atomic::Ordering;

use abi::Status;
use abi::vcpu::arm64::{VcpuState, exit as arm64_exit, group, pstate};
use abi::vcpu::exit;
use hw_arm64::registers::{spsr, vtcr};
use kernel_core::arch::ArchVcpu;
use kernel_core::object::{Space, Thread, Translation, Vcpu};
use kernel_core::pool::{Cached, Factory, Frame, Handle, Memory};
use kernel_core::table::Format;
use kernel_core::{Kernel, count};
use kernel_run::exit::ReturnToUser;
use kernel_run::lock::{lock, unlock};

use crate::entry::{GuestExit, enter_guest, exit_kind};
use crate::format::Stage2;
use crate::run::{Guard, arm, handle_interrupt, handle_interrupts};
use crate::{Arm64, alternative, boot, cpu, gic, io, memory, read_register, write_register};
use guest_entry::{GuestEntry, Lookup};
use registers::SystemRegisters;
use sgi::PendingSgis;
use timer::VirtualTimer;
use virqs::VirtualInterface;

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
    /// Generation of the VM's space that the vCPU was last entered with, and whether that had
    /// tables.
    generation: Cell<u64>,
    has_tables: Cell<bool>,
    /// Counter value at which the VMM's thread blocked because the guest waits for an interrupt;
    /// 0: it is not blocked.
    halted: Cell<u64>,
}

impl ArchVcpu for VcpuFrames {
    fn new(
        memory: &Memory,
        _factory: Option<Handle<Factory>>,
        state: Frame,
        translation: Translation,
    ) -> Result<Self, Status> {
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
            generation: Cell::new(0),
            has_tables: Cell::new(false),
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
            self.interface.load();
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
}

impl GuestCpu {
    /// State before the first guest.
    pub const fn unused() -> Self {
        Self { owner: Cell::new(None), float_owner: Cell::new(None) }
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
    set_tables(no_tables());
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
enum EntryError {
    /// The VMM gets this exit.
    Exit(u64),
    /// `VcpuRun` ends with this status.
    Failed(Status),
}

/// State page and checked values for an entry.
struct Prepared {
    state: *const VcpuState,
    pc: u64,
    pstate: u64,
}

/// Enters the vCPU that `thread`, the CPU's current thread, runs in `VcpuRun`. Unless the VMM gets
/// an exit, the thread stays in `VcpuRun` and enters the guest again when next dispatched.
pub fn run(
    mut kernel: Guard,
    cpu_index: usize,
    local: &GuestCpu,
    thread: &Thread<Arm64>,
    vcpu: &Vcpu<Arm64>,
) -> (Guard, Option<ReturnToUser<Arm64>>) {
    let Some(mut entry) = GuestEntry::new(&kernel.memory, thread, vcpu) else {
        abort_run(&kernel, cpu_index);
        return (kernel, None);
    };
    if entry.vcpu.arch.halted.get() != 0
        && let Some(to_vmm) = wait::end(&kernel, entry)
    {
        return (kernel, Some(to_vmm));
    }
    loop {
        let prepared = match prepare(&kernel, local, entry) {
            Ok(prepared) => prepared,
            Err(EntryError::Exit(reason)) => {
                let to_vmm = return_exit(&kernel, entry, reason, 0);
                return (kernel, Some(to_vmm));
            }
            Err(EntryError::Failed(status)) => {
                let to_vmm = end_run(&kernel, entry, status);
                return (kernel, Some(to_vmm));
            }
        };
        begin_run(&kernel, cpu_index, local, entry);
        unlock(kernel);
        // SAFETY: the page is not freed before this CPU has answered a shootdown, when it acquires
        // the lock; `prepare` has checked the processor state and loaded the guest's registers.
        let exit = unsafe { stay_in_guest(&prepared) };
        float::forbid();
        kernel = lock(cpu_index);
        entry = match finish_run(&kernel, cpu_index, local, exit) {
            Some(entry) => entry,
            None => {
                handle_interrupts(&kernel, cpu_index);
                abort_run(&kernel, cpu_index);
                return (kernel, None);
            }
        };
        let to_vmm = exits::handle(&kernel, cpu_index, local, entry, exit);
        // After an interrupt another thread may be the current one.
        let is_handled = to_vmm.is_none() && exit.kind == exit_kind::SYNCHRONOUS;
        if !is_handled || kernel.has_work(cpu_index) {
            return (kernel, to_vmm);
        }
    }
}

/// Prepares this CPU for the guest that it enters next, with the lock held.
#[inline(always)]
fn begin_run(
    kernel: &Kernel<Arm64>,
    cpu_index: usize,
    local: &GuestCpu,
    GuestEntry { vcpu, vm, .. }: GuestEntry<'_>,
) {
    let (active, run) = (&vm.space.active, &vcpu.arch.state().run);
    active.set(active.get() | 1 << cpu_index);
    arm(cpu_index, kernel.cpus[cpu_index].deadline().min(run.deadline.get()));
    vcpu.arch.system.load_readable();
    float::permit(local, vcpu);
    let may_wait =
        run.halt.get() != 0 && kernel.may_wait(cpu_index) && virqs::has_system_registers();
    cpu::current().guest.may_wait.store(may_wait.into(), Ordering::Relaxed);
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
    virqs::finish();
    let Some(entry) = GuestEntry::current(kernel, cpu_index) else {
        match local.owner.get().and_then(|owner| kernel.memory.get(owner)) {
            Some(left) => left.arch.system.save_readable(),
            None => registers::clear_readable(),
        }
        return None;
    };
    // The current thread is the one that has entered the guest.
    entry.vcpu.arch.system.save_readable();
    let (active, run) = (&entry.vm.space.active, &entry.state().run);
    active.set(active.get() & !(1 << cpu_index));
    run.entries.add(1);
    if ticks != 0 {
        run.halted.add(ticks);
    }
    Some(entry)
}

/// Enters a guest until there is an exit for which the kernel lock is needed: its SGIs to itself
/// need none.
///
/// # Safety
/// Those of [`enter_guest`] hold, and the state page exists until this CPU acquires the lock.
unsafe fn stay_in_guest(prepared: &Prepared) -> GuestExit {
    // SAFETY: the page exists, by the caller; all fields are atomic integers, any value is valid.
    let state = unsafe { &*prepared.state };
    let (mut pc, mut processor_state) = (prepared.pc, prepared.pstate);
    loop {
        // SAFETY: by the caller; the processor state has been checked, and the other registers are
        // those with which the guest was left, or what the VMM has made of them meanwhile.
        let exit = unsafe { enter_guest(prepared.state, pc, processor_state) };
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

/// Updates the vCPU's registers in the CPU before an entry.
fn prepare(
    kernel: &Kernel<Arm64>,
    local: &GuestCpu,
    entry: GuestEntry<'_>,
) -> Result<Prepared, EntryError> {
    let (frames, state) = (&entry.vcpu.arch, entry.state());
    let bits = entry.notification.bits.take();
    if bits != 0 {
        state.run.events.set(bits);
        return Err(EntryError::Exit(exit::RECALL));
    }
    let pstate = guest_state(state);
    let space = &entry.vm.space;
    if space.dying.get() {
        return Err(EntryError::Failed(Status::Aborted));
    }
    let is_owner = local.owner.get() == entry.vcpu.handle.get();
    let dirty = state.run.dirty.get();
    let is_changed = dirty & group::SYSTEM != 0;
    if is_changed {
        frames.system.write(state).map_err(EntryError::Failed)?;
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
    frames.timer.deliver(state);
    if is_changed || !is_owner {
        if is_owner {
            timer::stop();
        }
        frames.system.load();
    }
    let is_stale = !is_owner || frames.generation.get() != space.generation.get();
    if is_stale || !frames.has_tables.get() {
        let root = guest_root(kernel, space);
        set_tables(root.unwrap_or(no_tables()));
        // Only an unmapping removes them, which changes the generation.
        frames.has_tables.set(root.is_some());
    }
    if is_stale {
        frames.generation.set(space.generation.get());
        io::instruction_barrier();
        flush_guests();
    }
    // By the kind of the vCPU, 64 or 32 bits, which is loaded now.
    if !frames.system.permits(pstate) {
        return Err(EntryError::Exit(arm64_exit::INVALID_STATE));
    }
    Ok(Prepared { state: frames.state, pc: state.pc.get(), pstate })
}

/// Saves the registers of this CPU for the vCPU whose they are, and loads those of another, except
/// [`SystemRegisters`]; its timer is stopped.
#[inline(always)]
fn change_owner(kernel: &Kernel<Arm64>, local: &GuestCpu, vcpu: &Vcpu<Arm64>) {
    // Its registers are lost if it does not exist any more.
    let old = local.owner.get().and_then(|old| kernel.memory.get(old));
    let is_timer_active = old.map(|old| {
        old.arch.system.save();
        old.arch.interface.save();
        old.arch.timer.save()
    });
    local.owner.set(vcpu.handle.get());
    timer::stop();
    vcpu.arch.interface.load();
    vcpu.arch.timer.load(is_timer_active);
}

/// Physical address of the VM's tables for 39 bits, if it has any: the first entry of the root,
/// since not every processor walks four levels at stage 2.
fn guest_root(kernel: &Kernel<Arm64>, space: &Space<Arm64>) -> Option<u64> {
    let first = kernel.memory.words(space.root)[0].load(Ordering::Relaxed);
    Stage2::is_present(first).then(|| Stage2::address(first))
}

/// Sets the tables of the guest that is entered next: those of its VM, or an empty one.
fn set_tables(physical: u64) {
    // SAFETY: they have no effect on the kernel, nor on tasks.
    unsafe {
        core::arch::asm!(
            alternative!("msr vttbr_el2, x9", "bl set_guest_tables"),
            in("x9") physical, out("x11") _, out("x30") _, options(nostack),
        );
    }
}

/// Physical address of a table without entries.
fn no_tables() -> u64 {
    memory::physical_of(&raw const boot::empty_table)
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
    let run = &entry.state().run;
    run.exit_reason.set(reason);
    run.exit_info.set(information);
    run.valid.set(0);
    end_run(kernel, entry, Status::Ok)
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
    if local.owner.get() == vcpu.handle.get() {
        frames.system.save();
    }
    frames.system.read(state);
    state.run.valid.set(state.run.valid.get() | group::SYSTEM);
}

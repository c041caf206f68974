//! vCPUs: entry, exits handled in the kernel, and exchange of state with the VMM through the state
//! page (`abi::vcpu`), on any vendor's virtualization extension ([`Hvm`]).
//!
//! # Invariants
//!
//! * While a guest runs, its CPU does not hold the kernel lock. Before a vCPU is destroyed, its CPU
//!   is forced out of the guest (`Arch::shootdown`), and afterwards looks up everything about it
//!   again.
//! * Whatever the VMM writes to the state page harms at most its own guest.

mod frames;
mod guest_entry;

use core::cell::Cell;
use core::sync::atomic::{AtomicU64, Ordering};

use abi::Status;
use abi::vcpu::x86::{VcpuState, exit as x86_exit, gpr, group, window};
use abi::vcpu::{HYPERCALL_DOORBELL, exit};
use kernel_core::arch::Arch;
use kernel_core::object::{Space, Thread, Vcpu};
use kernel_core::pool::Memory;
use kernel_core::{Kernel, Result, count};
use kernel_run::Processor as _;
use kernel_run::exit::ReturnToUser;
use kernel_run::lock::{lock, unlock};

use crate::cpu::MAX_CPUS;
use crate::fpu;
use crate::hvm::{GuestExit, Hvm, internal};
use crate::run::{Guard, arm, local};
use crate::{Extension, X86, machine_check};
use frames::{count_exit, count_handled, may_halt};
use guest_entry::GuestEntry;

pub use frames::{VcpuFrames, read_groups};

/// Initialises what all CPUs share. Called on the first CPU, before all others.
pub fn init() {
    fpu::init();
    Extension::init();
}

/// Physical addresses of the host-state pages of all CPUs, for their own initialisation.
static HOST_PAGES: [AtomicU64; MAX_CPUS] = [const { AtomicU64::new(0) }; MAX_CPUS];

/// Allocates a CPU's pages for host state.
pub fn alloc_host_pages(memory: &Memory, cpu_index: usize) -> Result<()> {
    let pages = memory.alloc_raw(None, Extension::HOST_FRAMES)?;
    HOST_PAGES[cpu_index].store(memory.physical(pages), Ordering::Release);
    Ok(())
}

/// Prepares this CPU for guests, after its pages were allocated.
pub fn init_this_cpu(cpu_index: usize) {
    let host = HOST_PAGES[cpu_index].load(Ordering::Acquire);
    if host != 0 && Extension::is_ready() {
        let guest = &local(cpu_index).guest;
        guest.bit.set(1 << cpu_index);
        Extension::init_cpu(&guest.extension, host);
    }
}

/// Per-CPU state of guests.
pub struct Local {
    /// Bit of the CPU in CPU masks.
    bit: Cell<u64>,
    extension: <Extension as Hvm>::Local,
    /// vCPU whose registers are loaded.
    pub owner: fpu::Owner,
}

impl Local {
    /// State before the first guest.
    pub(crate) const fn new() -> Self {
        Self { bit: Cell::new(0), extension: Extension::LOCAL, owner: fpu::Owner::new() }
    }
}

/// Loads this vCPU's FPU, debug and TSC_AUX registers, after saving those of the previous owner.
#[cold]
fn become_owner(kernel: &Kernel<X86>, local: &Local, GuestEntry { thread, vcpu }: GuestEntry<'_>) {
    let cpu_index = X86::this_cpu();
    if kernel.cpus[cpu_index].space.get() != Some(thread.task) {
        // The next task to run then loads its address space, which clears TSC_AUX
        // (`X86::load_space`).
        X86::flush_local();
        kernel.cpus[cpu_index].space.set(None);
    }
    let owner = &local.owner;
    if owner.vcpu() == vcpu.handle.get() {
        return owner.reload_tsc_aux();
    }
    let old = owner.vcpu().and_then(|old| kernel.memory.get(old));
    let old = old.map(|Vcpu { arch, .. }| &arch.extended);
    owner.switch(old, vcpu.handle.get(), &vcpu.arch.extended);
}

// ---- VcpuRun -----------------------------------------------------------------------------------

/// Reason why a vCPU is not entered.
enum EntryError {
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
    thread: &Thread<X86>,
    vcpu: &Vcpu<X86>,
) -> (Guard, Option<ReturnToUser<X86>>) {
    let local = local(cpu_index);
    let Some(mut entry) = GuestEntry::new(&kernel, thread, vcpu) else {
        abort_run(&kernel, cpu_index);
        return (kernel, None);
    };
    if entry.vcpu.arch.halted.get() != 0
        && let Some(to_vmm) = end_halt(&kernel, entry)
    {
        return (kernel, Some(to_vmm));
    }
    loop {
        if let Err(error) = prepare(&kernel, &local.guest, entry) {
            let to_vmm = end_entry(&kernel, entry, error);
            return (kernel, Some(to_vmm));
        }
        let active = &entry.vm().space.active;
        active.set(active.get() | local.guest.bit.get());
        let deadline = entry.vcpu.arch.state().run.deadline.get();
        arm(local, kernel.cpus[cpu_index].deadline().min(deadline));
        let (frames, unlocked, destroyed_count) =
            (&raw const entry.vcpu.arch, entry.unlocked(), kernel.memory.destroyed_count());
        unlock(kernel);
        // SAFETY: the vCPU is not freed before this CPU has answered a shootdown, when it acquires
        // the lock.
        let frames = unsafe { &*frames };
        let GuestExit { reason, handled } =
            frames.hvm.enter(&local.guest.extension, frames.state());
        kernel = lock(cpu_index);

        count(&kernel.counters.vm_entries);
        entry = match GuestEntry::revalidate(&kernel, &unlocked, destroyed_count, cpu_index) {
            Some(entry) => entry,
            None => {
                X86::handle_pending(&kernel, cpu_index);
                abort_run(&kernel, cpu_index);
                return (kernel, None);
            }
        };
        let active = &entry.vm().space.active;
        active.set(active.get() & !local.guest.bit.get());
        let frames = &entry.vcpu.arch;
        let state = frames.state();
        count_exit(&kernel, &state.run, handled);
        frames.hvm.finish(state);
        let to_vmm = handle(&kernel, cpu_index, (entry, state), reason);
        if to_vmm.is_none() && reason == exit::HYPERCALL && !kernel.has_work(cpu_index) {
            continue;
        }
        return (kernel, to_vmm);
    }
}

/// Handles an exit. Returns it to the VMM unless the kernel handles it alone.
#[inline(always)]
fn handle(
    kernel: &Kernel<X86>,
    cpu_index: usize,
    (entry, state): (GuestEntry<'_>, &VcpuState),
    reason: u64,
) -> Option<ReturnToUser<X86>> {
    let frames = &entry.vcpu.arch;
    match reason {
        exit::HYPERCALL if frames.hvm.skip_kernel_hypercall(HYPERCALL_DOORBELL) => {
            let result = kernel.ring_doorbell(entry.vm(), state.gpr[gpr::RBX].get());
            state.gpr[gpr::RAX].set(result);
            count_handled(kernel, &state.run);
            None
        }
        internal::HOST_INTERRUPT => {
            count_handled(kernel, &state.run);
            X86::handle_pending(kernel, cpu_index);
            after_interrupt(kernel, cpu_index);
            None
        }
        internal::NEEDS_FRAMES => {
            count_handled(kernel, &state.run);
            None
        }
        internal::MACHINE_CHECK => machine_check::stop("while a guest ran", frames.hvm.ip()),
        x86_exit::SHUTDOWN => Some(shut_down(kernel, entry)),
        x86_exit::WINDOW => {
            state.window.set(state.window.get() & window::PERSISTENT);
            Some(return_exit(kernel, entry, x86_exit::WINDOW, group::IP))
        }
        exit::HALT if may_halt(state) && halt(kernel, cpu_index, entry) => None,
        _ => Some(report(kernel, entry, reason, reason)),
    }
}

/// Blocks the VMM's thread in `VcpuRun` until an event or the deadline. Returns `false` if it
/// cannot wait.
#[inline(always)]
fn halt(kernel: &Kernel<X86>, cpu_index: usize, entry: GuestEntry<'_>) -> bool {
    let GuestEntry { thread, vcpu, .. } = entry;
    // The thread may have been stopped meanwhile.
    let Some(name) = kernel.cpus[cpu_index].current.get() else { return false };
    let since = crate::time::tsc();
    let deadline = vcpu.arch.state().run.deadline.get();
    let halts = deadline > since && kernel.halt(name, thread, entry.notification(), deadline);
    if halts {
        vcpu.arch.halted.set(since);
    }
    halts
}

/// Ends the wait at the guest's `HLT`: events are pending, or the deadline has passed. `None` if
/// the VMM has set another state, after it stopped the thread that waited.
#[cold]
fn end_halt(kernel: &Kernel<X86>, entry: GuestEntry<'_>) -> Option<ReturnToUser<X86>> {
    let state = entry.vcpu.arch.state();
    let since = entry.vcpu.arch.halted.take();
    state.run.halted.add(crate::time::tsc().saturating_sub(since));
    if state.run.dirty.get() != 0 {
        return None;
    }
    state.run.events.set(entry.notification().bits.take());
    Some(report(kernel, entry, exit::HALT, exit::HALTED))
}

/// Returns an exit of the guest to the VMM, as `reported`.
#[inline(always)]
fn report(
    kernel: &Kernel<X86>,
    entry: GuestEntry<'_>,
    reason: u64,
    reported: u64,
) -> ReturnToUser<X86> {
    let frames = &entry.vcpu.arch;
    let state = frames.state();
    let mut groups = frames.hvm.describe(reason, state);
    // The sizes in this leaf depend on XCR0.
    if reason == x86_exit::CPUID && state.gpr[gpr::RAX].get() as u32 == hw_x86::cpuid::leaf::XSAVE {
        frames.extended.save_xcr0();
        groups = group::IP | group::CONTROL | group::CODE | group::XCR0;
    }
    return_exit(kernel, entry, reported, groups)
}

/// Handles a shutdown of the guest: an exit for its VMM, unless a hardware error caused it.
#[cold]
#[inline(never)]
fn shut_down(kernel: &Kernel<X86>, entry: GuestEntry<'_>) -> ReturnToUser<X86> {
    machine_check::check_after_shutdown(entry.vcpu.arch.hvm.ip());
    report(kernel, entry, x86_exit::SHUTDOWN, x86_exit::SHUTDOWN)
}

/// Updates the processor structures of a vCPU, and its state loaded in the CPU, before an entry.
#[inline(always)]
fn prepare(kernel: &Kernel<X86>, local: &Local, entry: GuestEntry<'_>) -> Result<(), EntryError> {
    let (frames, space) = (&entry.vcpu.arch, &entry.vm().space);
    let state = frames.state();
    let dirty = state.run.dirty.get();
    if dirty != 0 {
        state.run.dirty.set(0);
        if dirty & group::IP != 0 {
            frames.hvm.write_ip(state);
        }
        if dirty & !(group::IP | group::INJECT) != 0 {
            let is_owner = local.owner.vcpu() == entry.vcpu.handle.get();
            frames.write_slow_groups(dirty, is_owner).map_err(EntryError::Failed)?;
        }
    }
    let bits = entry.notification().bits.take();
    if bits != 0 {
        state.run.events.set(bits);
        return Err(EntryError::Exit(exit::RECALL));
    }
    if local.owner.of_all() != entry.vcpu.handle.get() {
        become_owner(kernel, local, entry);
    }
    if frames.hvm.needs_flush(&local.extension)
        || frames.vm_generation.get() != space.generation.get()
    {
        let root = kernel.memory.physical(space.root);
        if frames.vm_generation.get() != space.generation.get() {
            follow(kernel, frames, space, root).map_err(EntryError::Failed)?;
        }
        frames.hvm.flush(&local.extension, root);
        let prepared = frames.hvm.prepare_memory(&kernel.memory, entry.vcpu.factory, state);
        prepared.map_err(EntryError::Failed)?;
    }
    frames.hvm.prepare(state);
    Ok(())
}

/// Takes over changes of the VM's space, whose tables are at `root`, except for the TLB flush.
#[cold]
fn follow(kernel: &Kernel<X86>, frames: &VcpuFrames, space: &Space<X86>, root: u64) -> Result<()> {
    if space.dying.get() {
        return Err(Status::Aborted);
    }
    frames.vm_generation.set(space.generation.get());
    frames.hvm.unmapped(root);
    if let Some(map) = space.port_map.get() {
        frames.hvm.set_port_map(kernel.memory.physical(map));
    }
    Ok(())
}

/// Ends `VcpuRun` without an entry.
#[cold]
fn end_entry(kernel: &Kernel<X86>, entry: GuestEntry<'_>, error: EntryError) -> ReturnToUser<X86> {
    match error {
        EntryError::Exit(reason) => return_exit(kernel, entry, reason, group::IP),
        EntryError::Failed(status) => end_run(kernel, entry, status),
    }
}

/// Ends the `VcpuRun` of the CPU's current thread, if it is still in it, because an object that it
/// needs was destroyed.
#[cold]
#[inline(never)]
fn abort_run(kernel: &Kernel<X86>, cpu_index: usize) {
    if let Some(thread) =
        kernel.cpus[cpu_index].current.get().and_then(|name| kernel.memory.get(name))
        && let Some(name) = thread.state.get().vcpu()
    {
        kernel.vcpu_return(thread, kernel.memory.get(name), Status::Aborted);
    }
}

/// Returns an exit to the VMM after a host interrupt, if needed. Only here is the deadline compared
/// with the clock: before an entry the VMM has just read the clock, and a deadline in the past
/// interrupts at once.
#[cold]
fn after_interrupt(kernel: &Kernel<X86>, cpu_index: usize) {
    // The thread may have been stopped, or its `VcpuRun` aborted.
    let Some(entry) = GuestEntry::current(kernel, cpu_index) else { return };
    let frames = &entry.vcpu.arch;
    if frames.hvm.loses_shadow() {
        // The VMM must emulate the instruction in the shadow.
        frames.state().run.events.set(0);
        return_exit(kernel, entry, exit::RECALL, group::IP);
    } else if frames.state().run.deadline.get() <= crate::time::tsc() {
        return_exit(kernel, entry, exit::DEADLINE, group::IP);
    }
}

/// Ends `VcpuRun` with an exit for the VMM.
#[inline(always)]
fn return_exit(
    kernel: &Kernel<X86>,
    GuestEntry { thread, vcpu }: GuestEntry<'_>,
    reason: u64,
    groups: u64,
) -> ReturnToUser<X86> {
    const IP_ONLY: u64 = group::IP;
    const DECODE: u64 = group::IP | group::CONTROL | group::CODE;
    let (frames, state) = (&vcpu.arch, vcpu.arch.state());
    state.run.exit_reason.set(reason);
    state.run.valid.set(group::INJECT | group::PRIORITY | groups);
    // Constant arguments make the frequent cases branch-free.
    match groups {
        IP_ONLY => frames.hvm.read_code(state, IP_ONLY),
        DECODE => frames.hvm.read_code(state, DECODE),
        _ => frames.read_groups(groups),
    }
    end_run(kernel, GuestEntry { thread, vcpu }, Status::Ok)
}

/// Ends `VcpuRun` with a status.
#[inline(always)]
fn end_run(
    kernel: &Kernel<X86>,
    GuestEntry { thread, vcpu }: GuestEntry<'_>,
    status: Status,
) -> ReturnToUser<X86> {
    kernel.vcpu_return(thread, Some(vcpu), status);
    ReturnToUser { task: thread.task, context: &raw const thread.context }
}

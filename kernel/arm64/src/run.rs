//! Implementation of `kernel_core::arch::Arch` and [`kernel_run::Processor`] for AArch64.

use core::arch::asm;
use core::cell::Cell;
use core::ops::Range;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use abi::args::IrqSource;
use abi::vcpu::arm64::{CPU_INTERFACE, CPU_INTERFACE_LENGTH};
use abi::{ItemKind, PAGE_SHIFT, PAGE_SIZE};
use hw_arm64::registers::vtcr;
use kernel_core::arch::Arch;
use kernel_core::mdb::Extent;
use kernel_core::object::{Irq, Space, Task, Thread, Vcpu};
use kernel_core::pool::{Handle, Memory};
use kernel_core::{Kernel, count};
use kernel_run::Processor;
use kernel_run::exit::ReturnToUser;
use kernel_run::lock::{self, KernelLock};
use kernel_run::log::PERIOD;

use crate::context::ThreadContext;
use crate::format::{Stage2, TaskTables};
use crate::gic::{self, Cause, InService};
use crate::log::LOG;
use crate::machine::MAX_CPUS;
use crate::vcpu::{self, VcpuFrames};
use crate::{Arm64, alternative, cpu, has_vhe, io, memory, psci, read_register, time};

static KERNEL: KernelLock<Arm64> = KernelLock::new();

/// Access to the kernel's state.
pub type Guard = kernel_run::lock::Guard<Arm64>;

/// State of a CPU that only this CPU accesses. The alignment keeps CPUs apart in the caches.
#[repr(align(128))]
struct Local {
    /// Time for which the timer is armed, in ticks; `u64::MAX` if it is not.
    timer_deadline: Cell<u64>,
    /// State of guests on this CPU.
    guest: vcpu::GuestCpu,
}

struct Locals([Local; MAX_CPUS]);

// SAFETY: each CPU uses only its own element, with interrupts masked.
unsafe impl Sync for Locals {}

static LOCALS: Locals = Locals(
    [const { Local { timer_deadline: Cell::new(u64::MAX), guest: vcpu::GuestCpu::unused() } };
        MAX_CPUS],
);

/// Arms the timer of this CPU to interrupt at `deadline` at the latest. An earlier setting stays.
pub fn arm(cpu_index: usize, deadline: u64) {
    let armed = &LOCALS.0[cpu_index].timer_deadline;
    if deadline < armed.get() {
        armed.set(deadline);
        time::arm(deadline);
    }
}

/// Arms the timer to send the rest of the log, if any.
fn arm_for_log(cpu_index: usize) {
    if LOG.is_waiting() {
        arm(cpu_index, time::counter().saturating_add(time::scale().ticks(PERIOD)));
    }
}

/// Handles all pending interrupts of this CPU.
#[inline(never)]
pub fn handle_interrupts(kernel: &Kernel<Arm64>, cpu_index: usize) {
    handle_interrupts_inline(kernel, cpu_index);
}

/// [`handle_interrupts`] as a part of its caller.
#[inline(always)]
pub fn handle_interrupts_inline(kernel: &Kernel<Arm64>, cpu_index: usize) {
    // The version is the same for all.
    if gic::v2::is_present() {
        while let Some(interrupt) = gic::taken(gic::v2::acknowledge()) {
            handle_interrupt_inline(kernel, cpu_index, interrupt, false);
        }
    } else {
        while let Some(interrupt) = gic::taken(read_register!("icc_iar1_el1")) {
            handle_interrupt_inline(kernel, cpu_index, interrupt, false);
        }
    }
}

/// Handles an interrupt of this CPU that has been taken by an exit of a guest.
#[inline(never)]
pub fn handle_interrupt(kernel: &Kernel<Arm64>, cpu_index: usize, interrupt: (InService, Cause)) {
    handle_interrupt_inline(kernel, cpu_index, interrupt, true);
}

/// `of_guest`: an exit has taken it, and the reports of the guest's interrupts are read next.
#[inline(always)]
fn handle_interrupt_inline(
    kernel: &Kernel<Arm64>,
    cpu_index: usize,
    (in_service, cause): (InService, Cause),
    of_guest: bool,
) {
    count(&kernel.counters.interrupts);
    match cause {
        Cause::Timer => {
            time::disarm();
            LOCALS.0[cpu_index].timer_deadline.set(u64::MAX);
            kernel.timer(cpu_index);
            if LOG.is_waiting() {
                LOG.step();
                arm_for_log(cpu_index);
            }
        }
        Cause::VirtualTimer => vcpu::timer::fired(kernel, &LOCALS.0[cpu_index].guest),
        Cause::Object(number) => kernel.interrupt(number),
        // The sender has changed scheduler state that this CPU evaluates on kernel exit.
        Cause::Kick => {}
        Cause::Unused if of_guest => {}
        Cause::Unused => vcpu::withdraw_ended(kernel, &LOCALS.0[cpu_index].guest),
    }
    gic::end(in_service);
}

/// VMID of tasks in VTTBR_EL2, without VHE. That of guests is 0.
pub const VMID_OF_TASKS: u64 = 1 << vtcr::VMID_SHIFT;

/// Sets the tables of a task, or those of the kernel, which have none of a task.
#[inline(always)]
pub fn set_tables(root: u64) {
    // SAFETY: the root of a task or of the kernel. With VHE both have the kernel's entries.
    unsafe {
        asm!(
            alternative!("msr ttbr0_el2, x9", "bl set_task_tables"), "isb",
            inout("x9") root => _, out("x10") _, out("x11") _, out("x30") _, options(nostack),
        );
    }
}

/// Sets the tables ([`set_tables`]), and flushes this CPU's TLB entries of tasks, which all have
/// ASID 0, or the same VMID. The return to EL0 synchronises it: the kernel does not use tasks'
/// addresses.
#[inline(always)]
fn load_table(root: u64) {
    set_tables(root);
    // SAFETY: flushes only.
    unsafe {
        asm!(
            "dsb nshst",
            alternative!("tlbi aside1, xzr", "tlbi vmalls12e1"),
            "dsb nsh",
            options(nostack)
        );
    }
}

/// Without VHE: loads the tables of the current thread's task again, and returns whether they are
/// others. The processor begins with what the first entry of the root refers to, and there is
/// nothing before the task's first mapping.
pub fn has_new_tables(kernel: &Kernel<Arm64>, cpu_index: usize) -> bool {
    let loaded = kernel.cpus[cpu_index].space.get().and_then(|task| kernel.memory.get(task));
    let before = read_register!("vttbr_el2");
    if let Some(task) = loaded {
        load_table(kernel.memory.physical(task.space.root));
    }
    read_register!("vttbr_el2") != before
}

fn line(source: IrqSource) -> Option<(u32, bool)> {
    match source {
        IrqSource::Line { gsi, level, active_low: false } => Some((gsi, level)),
        _ => None,
    }
}

impl Arch for Arm64 {
    type Context = ThreadContext;
    type Host = TaskTables;
    type Nested = Stage2;
    type Vcpu = VcpuFrames;
    const GUEST_PORT_FRAMES: u32 = 0;
    const PORT_FRAMES: u32 = 0;

    #[inline(always)]
    fn this_cpu() -> usize {
        cpu::current().id
    }

    fn cpus() -> usize {
        CPUS.load(Ordering::Relaxed)
    }

    #[inline(always)]
    fn now() -> u64 {
        time::counter()
    }

    fn ticks(nanoseconds: u64) -> u64 {
        time::scale().ticks(nanoseconds)
    }

    fn kick(cpu: usize) {
        gic::kick(cpu);
    }

    fn shootdown(cpus: u64) {
        lock::shoot_down::<Self>(cpus);
    }

    fn flush_local() {
        load_table(memory::kernel_root());
    }

    fn init_root(root: &[AtomicU64; 512]) {
        if !has_vhe() {
            // The kernel has tables of its own.
            return;
        }
        let kernel = memory::root_entries(memory::kernel_root());
        for (to, from) in root.iter().zip(kernel).skip(memory::FIRST_SLOT) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    fn user_entries() -> Range<usize> {
        // Without VHE the processor reaches those of the first entry alone.
        0..memory::FIRST_SLOT
    }

    fn has_nested() -> bool {
        true
    }

    fn has_vtlb() -> bool {
        false
    }

    fn guest_device() -> Option<Extent> {
        const ORDER: u32 = (CPU_INTERFACE_LENGTH / PAGE_SIZE).trailing_zeros();
        vcpu::virqs::guest_interface().map(|physical| Extent {
            kind: ItemKind::Memory,
            base: CPU_INTERFACE >> PAGE_SHIFT,
            physical: physical >> PAGE_SHIFT,
            order: ORDER as u8,
        })
    }

    fn vcpu_state(_memory: &Memory, of: &Vcpu<Self>, groups: u64) {
        let cpu_index = Self::this_cpu();
        vcpu::read_groups(&LOCALS.0[cpu_index].guest, cpu_index, of, groups);
    }

    fn irq_valid(source: IrqSource) -> bool {
        line(source).is_some_and(|(number, _)| gic::is_valid(number))
    }

    fn irq_set(irq: &Irq<Self>, masked: bool) {
        let Some((number, is_level)) = line(irq.source) else { return };
        match masked {
            true => gic::mask(number),
            false => gic::enable(number, is_level, irq.number, irq.cpu),
        }
    }

    fn irq_message(_irq: &Irq<Self>) -> (u64, u64) {
        // `irq_valid` accepts no messages.
        (0, 0)
    }

    fn log(text: core::fmt::Arguments<'_>) {
        LOG.line(text);
        arm_for_log(Self::this_cpu());
    }

    fn log_text(text: &[u8]) -> usize {
        let waiting = LOG.text(text);
        arm_for_log(Self::this_cpu());
        waiting
    }

    fn reset() -> ! {
        LOG.flush();
        psci::end(true);
        io::stop()
    }
}

// SAFETY: there is one lock, and the direct map includes all RAM that boot allocates.
unsafe impl Processor for Arm64 {
    #[inline(always)]
    fn kernel_lock() -> &'static KernelLock<Self> {
        &KERNEL
    }

    /// An emulator that executes the CPUs in turns changes to another one at `YIELD`. `ISB`, which
    /// the loops of other programs have, makes a core wait for its pipeline.
    #[inline(always)]
    fn relax() {
        core::hint::spin_loop();
        // SAFETY: a hint.
        unsafe { asm!("yield", options(nomem, nostack, preserves_flags)) };
    }

    fn direct(physical: u64) -> *mut u8 {
        memory::direct(physical)
    }

    fn wait_for_interrupt() {
        io::data_barrier();
        // SAFETY: waits; an interrupt ends it although it is masked.
        unsafe { asm!("wfi", options(nomem, nostack)) };
    }

    fn handle_pending(kernel: &Kernel<Self>, cpu_index: usize) {
        handle_interrupts(kernel, cpu_index);
    }

    #[inline(always)]
    fn arm_timer(cpu_index: usize, deadline: u64) {
        arm(cpu_index, deadline);
    }

    #[inline(always)]
    fn load_space(
        kernel: &Kernel<Self>,
        cpu_index: usize,
        task: Handle<Task<Self>>,
        space: &Space<Self>,
    ) {
        kernel.cpus[cpu_index].space.set(Some(task));
        load_table(kernel.memory.physical(space.root));
    }

    #[inline(always)]
    fn set_entry_context(_context: *const ThreadContext) {
        // `leave_kernel` does, by its stack pointer.
    }

    fn run_vcpu(
        kernel: Guard,
        cpu_index: usize,
        thread: &Thread<Self>,
        vcpu: &Vcpu<Self>,
    ) -> (Guard, Option<ReturnToUser<Self>>) {
        vcpu::run(kernel, cpu_index, &LOCALS.0[cpu_index].guest, thread, vcpu)
    }
}

static CPUS: AtomicUsize = AtomicUsize::new(1);

/// Sets the number of running CPUs.
pub fn set_cpus(cpus: usize) {
    CPUS.store(cpus, Ordering::Relaxed);
}

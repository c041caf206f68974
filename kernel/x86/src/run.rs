//! Kernel lock, kernel exit, and the implementation of `kernel_core::arch::Arch` for x86-64.

use core::cell::{Cell, UnsafeCell};
use core::ops::{Deref, DerefMut, Range};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use abi::Status;
use abi::args::IrqSource;
use kernel_core::arch::Arch;
use kernel_core::mdb::work::WORK;
use kernel_core::object::{Irq, Space, Task, Thread, ThreadState, Vcpu};
use kernel_core::pool::{Factory, Frame, Handle, Memory};
use kernel_core::{Kernel, count};

use crate::context::Context;
use crate::cpu::{self, MAX_CPUS};
use crate::format::UserFormat;
use crate::io::{out8, write_cr3};
use crate::ioapic::{self, Line};
use crate::{X86, apic, idt, log, memory, time, vcpu};

// ---- the lock ----------------------------------------------------------------------------------

struct Global(UnsafeCell<Kernel<X86>>);

// SAFETY: reached only through `Guard`, which exists once at a time.
unsafe impl Sync for Global {}

static KERNEL: Global = Global(UnsafeCell::new(Kernel::new()));
static READY: AtomicBool = AtomicBool::new(false);
static LOCKED: AtomicBool = AtomicBool::new(true);
/// CPUs that must flush their TLBs (bit mask).
static SHOOTDOWN: AtomicU64 = AtomicU64::new(0);

/// Access to the kernel state; exists while the lock is held.
pub struct Guard(());

impl Deref for Guard {
    type Target = Kernel<X86>;
    #[inline(always)]
    fn deref(&self) -> &Kernel<X86> {
        // SAFETY: a guard exists only while the lock is held.
        unsafe { &*KERNEL.0.get() }
    }
}

impl DerefMut for Guard {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Kernel<X86> {
        // SAFETY: as in `deref`.
        unsafe { &mut *KERNEL.0.get() }
    }
}

/// Initialises the kernel state, with the lock held.
pub fn publish(memory: Memory) -> Guard {
    assert!(!READY.swap(true, Ordering::Relaxed));
    // Only once, by the assertion; the lock starts out held, so no other CPU has access.
    let mut kernel = Guard(());
    kernel.memory = memory;
    kernel
}

/// Acquires the kernel lock for CPU `cpu_index`. Serves shootdowns while waiting, since the lock
/// holder may wait for this CPU's response.
#[inline(always)]
pub fn lock(cpu_index: usize) -> Guard {
    while LOCKED.swap(true, Ordering::Acquire) {
        wait_for_lock(cpu_index);
    }
    #[cfg(parador_longest_path)]
    crate::longest::begin();
    Guard(())
}

#[cold]
fn wait_for_lock(cpu_index: usize) {
    while LOCKED.load(Ordering::Relaxed) {
        serve_shootdown(cpu_index);
        core::hint::spin_loop();
    }
}

fn serve_shootdown(cpu_index: usize) {
    if SHOOTDOWN.load(Ordering::Acquire) & 1 << cpu_index != 0 {
        X86::flush_local();
        SHOOTDOWN.fetch_and(!(1 << cpu_index), Ordering::Release);
    }
}

/// Releases the kernel lock.
#[inline(always)]
pub fn unlock(_guard: Guard) {
    #[cfg(parador_longest_path)]
    crate::longest::end();
    LOCKED.store(false, Ordering::Release);
}

// ---- per-CPU state -----------------------------------------------------------------------------

/// State of a CPU that only this CPU accesses. The alignment keeps CPUs apart in the caches.
#[repr(align(128))]
pub struct Local {
    /// Time for which the timer is armed, in TSC ticks; `u64::MAX` if it is not.
    timer_deadline: Cell<u64>,
    /// Task whose ports are in the I/O permission bitmap, and the generation of its port map.
    loaded_ports: Cell<Option<(Handle<Task<X86>>, u64)>>,
    /// State of guests on this CPU.
    pub guest: vcpu::Local,
}

struct Locals([Local; MAX_CPUS]);

// SAFETY: each CPU uses only its own element (`local`), with interrupts off.
unsafe impl Sync for Locals {}

static LOCALS: Locals = Locals(
    [const {
        Local {
            timer_deadline: Cell::new(u64::MAX),
            loaded_ports: Cell::new(None),
            guest: vcpu::Local::new(),
        }
    }; MAX_CPUS],
);

/// State of CPU `cpu_index`, which must be the executing CPU.
#[inline(always)]
pub fn local(cpu_index: usize) -> &'static Local {
    &LOCALS.0[cpu_index]
}

/// Arms the timer to interrupt at `deadline` at the latest. An earlier setting stays: a guest's
/// deadline applies only while the guest runs, and an occasional spurious interrupt costs less than
/// arming the timer twice per VM exit.
#[inline(always)]
pub fn arm(local: &Local, deadline: u64) {
    if deadline < local.timer_deadline.get() {
        local.timer_deadline.set(deadline);
        apic::local().arm(deadline);
    }
}

/// Arms the timer to send the rest of the log, if any.
fn arm_for_log(cpu_index: usize) {
    if log::is_waiting() {
        arm(local(cpu_index), time::tsc().saturating_add(time::to_ticks(log::PERIOD)));
    }
}

// ---- interrupts --------------------------------------------------------------------------------

/// Handles an acknowledged interrupt.
pub fn handle_vector(kernel: &Kernel<X86>, cpu_index: usize, vector: u8) {
    count(&kernel.counters.interrupts);
    match vector {
        // A device can also send this vector. Such an interrupt is in service and needs an EOI.
        idt::SPURIOUS if !apic::local().is_in_service(vector) => return,
        idt::SPURIOUS => {}
        idt::TIMER => {
            local(cpu_index).timer_deadline.set(u64::MAX);
            kernel.timer(cpu_index);
            if log::is_waiting() {
                log::step();
                arm_for_log(cpu_index);
            }
        }
        // The sender has changed scheduler state that this CPU evaluates on kernel exit.
        idt::IPI => {}
        _ => kernel.interrupt(idt::irq_number(vector)),
    }
    apic::local().eoi();
}

/// Handles the interrupts recorded while the kernel had enabled them.
pub fn handle_pending(kernel: &Kernel<X86>, cpu_index: usize) {
    for (index, word) in cpu::current().pending.iter().enumerate() {
        if word.load(Ordering::Relaxed) == 0 {
            continue;
        }
        let mut bits = word.swap(0, Ordering::Relaxed);
        while bits != 0 {
            handle_vector(kernel, cpu_index, (index * 64) as u8 + bits.trailing_zeros() as u8);
            bits &= bits - 1;
        }
    }
}

/// Releases the lock and waits for an interrupt that causes rescheduling.
#[cold]
#[inline(never)]
fn idle(mut kernel: Guard, cpu_index: usize) -> Guard {
    arm(local(cpu_index), kernel.cpus[cpu_index].deadline());
    loop {
        unlock(kernel);
        // SAFETY: an interrupt here only sets a bit in `pending`. STI inhibits interrupts until
        // after HLT.
        unsafe { core::arch::asm!("sti", "hlt", "cli", options(nostack)) };
        kernel = lock(cpu_index);
        handle_pending(&kernel, cpu_index);
        if kernel.cpus[cpu_index].resched.get() {
            return kernel;
        }
        arm(local(cpu_index), kernel.cpus[cpu_index].deadline());
    }
}

// ---- kernel exit --------------------------------------------------------------------------------

/// Thread to be resumed, and the vCPU that it runs in `VcpuRun`, else null. Valid while the lock is
/// held and no object is freed.
pub struct Next {
    thread: *const Thread<X86>,
    vcpu: *const Vcpu<X86>,
}

impl Next {
    /// Converts a [`kernel_core::thread::Next`].
    #[inline(always)]
    pub fn new(next: &kernel_core::thread::Next<'_, X86>) -> Self {
        Self { thread: next.thread, vcpu: next.vcpu.map_or(ptr::null(), ptr::from_ref) }
    }
}

/// Finishes the current kernel entry, and idles until there is a thread to resume.
#[inline(never)]
pub fn pick_next(mut kernel: Guard, cpu_index: usize) -> (Guard, Next) {
    loop {
        kernel.finish(cpu_index);
        let Some(handle) = kernel.cpus[cpu_index].current.get() else {
            // No thread is runnable: continue the destruction of dying tasks and VMs first.
            let mut budget = WORK;
            kernel.reap(&mut budget);
            if budget == WORK {
                kernel = idle(kernel, cpu_index);
            }
            continue;
        };
        let thread = kernel.memory.at(handle);
        let vcpu = match thread.state.get() {
            ThreadState::InGuest { vcpu } => kernel
                .vcpu_of(thread, vcpu)
                .map_or_else(|| vcpu::abort_destroyed_vcpu(&kernel, thread), ptr::from_ref),
            _ => ptr::null(),
        };
        let next = Next { thread, vcpu };
        return (kernel, next);
    }
}

/// Runs guests until a thread is to return to user mode, and returns that thread's context.
#[inline(always)]
pub fn leave(mut kernel: Guard, cpu_index: usize, mut next: Next) -> *const Context {
    let target = loop {
        // SAFETY: looked up under the lock, which is held since; only `pick_next` frees objects.
        let (thread, guest) = unsafe { (&*next.thread, next.vcpu.as_ref()) };
        let Some(guest) = guest else {
            arm(local(cpu_index), kernel.cpus[cpu_index].deadline());
            break vcpu::ExitToVmm { task: thread.task, context: &raw const thread.context };
        };
        let (after, target) = vcpu::run(kernel, cpu_index, thread, guest);
        kernel = after;
        // Most VM exits: return to the VMM directly. The timer need not be armed: guests are
        // entered with the CPU's own deadline at the latest, which has not changed.
        if let Some(target) = target.filter(|_| !kernel.has_work(cpu_index)) {
            break target;
        }
        (kernel, next) = pick_next(kernel, cpu_index);
    };
    if kernel.cpus[cpu_index].space.get() != Some(target.task) {
        load_space(&kernel, cpu_index, target.task, &kernel.memory.at(target.task).space);
    }
    cpu::set_interrupt_stack(Context::end(target.context));
    unlock(kernel);
    target.context
}

/// Loads the address space `space` of `task`.
#[inline(always)]
pub fn load_space(
    kernel: &Kernel<X86>,
    cpu_index: usize,
    task: Handle<Task<X86>>,
    space: &Space<X86>,
) {
    kernel.enter_space(cpu_index, task);
    // SAFETY: every task's root includes the kernel half (`init_root`).
    unsafe { write_cr3(kernel.memory.physical(space.root)) };
    match space.port_map.get() {
        None => cpu::disable_ports(),
        Some(map) => load_ports(kernel, cpu_index, (task, space.port_generation.get()), map),
    }
    if cpu::current().guest_tsc_aux.load(Ordering::Relaxed) {
        local(cpu_index).guest.owner.clear_tsc_aux();
    }
}

/// Grants the ports of a task; copies its port map unless it was loaded last.
#[inline(never)]
fn load_ports(kernel: &Kernel<X86>, cpu_index: usize, of: (Handle<Task<X86>>, u64), map: Frame) {
    if local(cpu_index).loaded_ports.replace(Some(of)) == Some(of) {
        cpu::enable_loaded_ports();
        return;
    }
    // SAFETY: the map is two consecutive raw frames, which the kernel changes only under the lock.
    let bits = unsafe { &*kernel.memory.address(map).cast::<[u8; cpu::IO_MAP_LENGTH]>() };
    cpu::load_ports(bits);
}

// ---- the architecture --------------------------------------------------------------------------

fn line(source: IrqSource) -> Option<Line> {
    match source {
        IrqSource::Line { gsi, level, active_low } => Some(Line { gsi, level, active_low }),
        IrqSource::Message => None,
    }
}

impl Arch for X86 {
    type Context = Context;
    type Host = UserFormat;
    type Nested = UserFormat;
    type Vcpu = vcpu::VcpuFrames;
    const GUEST_PORT_FRAMES: u32 = 3;
    const PORT_FRAMES: u32 = 2;

    #[inline(always)]
    fn this_cpu() -> usize {
        cpu::current().id as usize
    }

    fn cpus() -> usize {
        CPUS.load(Ordering::Relaxed) as usize
    }

    #[inline(always)]
    fn now() -> u64 {
        time::tsc()
    }

    fn ticks(nanoseconds: u64) -> u64 {
        time::to_ticks(nanoseconds)
    }

    fn kick(cpu: usize) {
        apic::local().send_ipi(cpu, idt::IPI);
    }

    fn shootdown(cpus: u64) {
        SHOOTDOWN.fetch_or(cpus, Ordering::AcqRel);
        for cpu in (0..MAX_CPUS).filter(|cpu| cpus & 1 << cpu != 0) {
            Self::kick(cpu);
        }
        while SHOOTDOWN.load(Ordering::Acquire) & cpus != 0 {
            core::hint::spin_loop();
        }
    }

    fn flush_local() {
        // SAFETY: the kernel's own tables map everything that the kernel uses.
        unsafe { write_cr3(memory::kernel_root()) };
    }

    fn init_root(root: &[AtomicU64; 512]) {
        let kernel = memory::direct(memory::kernel_root()).cast::<u64>();
        for (slot, entry) in root.iter().enumerate().skip(memory::FIRST_SLOT).take(memory::SLOTS) {
            // SAFETY: the kernel's root table, whose used entries never change after boot.
            entry.store(unsafe { kernel.add(slot).read() }, Ordering::Relaxed);
        }
    }

    fn user_entries() -> Range<usize> {
        0..memory::FIRST_SLOT
    }

    fn has_nested() -> bool {
        vcpu::is_ready()
    }

    fn vcpu_new(
        memory: &Memory,
        factory: Option<Handle<Factory>>,
        state: Frame,
    ) -> Result<vcpu::VcpuFrames, Status> {
        vcpu::VcpuFrames::new(memory, factory, state)
    }

    fn vcpu_free(memory: &Memory, frames: &vcpu::VcpuFrames) {
        frames.free(memory);
    }

    fn vcpu_preempted(frames: &vcpu::VcpuFrames) {
        frames.count_preemption();
    }

    fn vcpu_state(memory: &Memory, of: &Vcpu<Self>, groups: u64) {
        vcpu::read_groups(memory, &local(Self::this_cpu()).guest.owner, of, groups);
    }

    fn irq_valid(source: IrqSource) -> bool {
        line(source).is_none_or(|line| line.gsi < ioapic::gsi_count())
    }

    fn irq_set(irq: &Irq<Self>, masked: bool) {
        let Some(line) = line(irq.source) else { return };
        if masked {
            ioapic::mask(line.gsi);
        } else if ioapic::configure(line, idt::vector(irq.number), irq.cpu).is_ok() {
            ioapic::unmask(line.gsi);
        }
    }

    fn irq_message(irq: &Irq<Self>) -> (u64, u64) {
        let address = ioapic::msi_address(irq.cpu).unwrap_or(0);
        (address, ioapic::msi_data(idt::vector(irq.number)) as u64)
    }

    fn log(text: core::fmt::Arguments<'_>) {
        log::line(text);
        arm_for_log(Self::this_cpu());
    }

    fn log_text(text: &[u8]) -> usize {
        let waiting = log::text(text);
        arm_for_log(Self::this_cpu());
        waiting
    }

    fn reset() -> ! {
        const RESET_CONTROL: u16 = 0xcf9;
        const KEYBOARD: u16 = 0x64;
        log::flush();
        // SAFETY: both reset the machine; where neither exists, the CPU stops.
        unsafe {
            out8(RESET_CONTROL, 0x02);
            out8(RESET_CONTROL, 0x06);
            out8(KEYBOARD, 0xfe);
        }
        crate::io::stop()
    }
}

static CPUS: AtomicU64 = AtomicU64::new(1);

/// Sets the number of running CPUs.
pub fn set_cpus(cpus: usize) {
    CPUS.store(cpus as u64, Ordering::Relaxed);
}

/// Waits until [`publish`] has been called.
pub fn wait_until_published() {
    while !READY.load(Ordering::Acquire) {
        core::hint::spin_loop();
    }
}

//! The kernel lock, the way out of the kernel, and this architecture as `kernel-core` sees it.

use core::cell::{Cell, UnsafeCell};
use core::ops::{Deref, DerefMut, Range};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use abi::Status;
use hw_x86::paging::cr0;
use kernel_core::arch::{Arch, IrqSource};
use kernel_core::object::{Irq, Task, Thread, Vcpu};
use kernel_core::pool::{Factory, Frame, Handle, Memory};
use kernel_core::space::work::WORK;
use kernel_core::{Kernel, count};

use crate::cpu::{self, MAX_CPUS};
use crate::entry::Context;
use crate::format::UserFormat;
use crate::io::{out8, read_cr0, write_cr0, write_cr3};
use crate::ioapic::{self, Line};
use crate::{apic, idt, log, memory, svm, time};

/// This architecture.
pub struct X86;

// ---- the lock ------------------------------------------------------------------------------------

struct Global(UnsafeCell<Kernel<X86>>);

// SAFETY: reached only through `Guard`, which exists once at a time.
unsafe impl Sync for Global {}

static KERNEL: Global = Global(UnsafeCell::new(Kernel::new()));
static READY: AtomicBool = AtomicBool::new(false);
static LOCKED: AtomicBool = AtomicBool::new(true);
/// CPUs that must drop their translations.
static SHOOTDOWN: AtomicU64 = AtomicU64::new(0);

/// The right to use the kernel's state.
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

/// Makes the kernel's state, with the lock held.
pub fn publish(memory: Memory) -> Guard {
    assert!(!READY.swap(true, Ordering::Relaxed));
    // Only once, by the assertion; the lock starts out held, so nobody else looks.
    let mut kernel = Guard(());
    kernel.memory = memory;
    kernel
}

/// Takes the lock, for CPU `number`. While it waits it serves shootdowns, since whoever holds the lock may
/// be waiting for that.
#[inline(always)]
pub fn lock(number: usize) -> Guard {
    while LOCKED.swap(true, Ordering::Acquire) {
        wait_for_lock(number);
    }
    #[cfg(parador_longest_path)]
    crate::longest::begin();
    Guard(())
}

#[cold]
fn wait_for_lock(number: usize) {
    while LOCKED.load(Ordering::Relaxed) {
        serve_shootdown(number);
        core::hint::spin_loop();
    }
}

fn serve_shootdown(number: usize) {
    if SHOOTDOWN.load(Ordering::Acquire) & 1 << number != 0 {
        X86::flush_local();
        SHOOTDOWN.fetch_and(!(1 << number), Ordering::Release);
    }
}

/// Gives the lock back.
#[inline(always)]
pub fn unlock(_guard: Guard) {
    #[cfg(parador_longest_path)]
    crate::longest::end();
    LOCKED.store(false, Ordering::Release);
}

// ---- what a CPU remembers --------------------------------------------------------------------------

/// State of a CPU that only it touches.
pub struct Local {
    /// When the timer is set to interrupt.
    armed: Cell<u64>,
    /// Task whose ports the I/O map shows, and that map's generation.
    ports: Cell<Option<(Handle<Task<X86>>, u64)>>,
    /// For the guests.
    pub guest: svm::Local,
}

struct Locals([Local; MAX_CPUS]);

// SAFETY: each CPU uses only its own element (`local`), with interrupts off.
unsafe impl Sync for Locals {}

static LOCALS: Locals = Locals(
    [const { Local { armed: Cell::new(u64::MAX), ports: Cell::new(None), guest: svm::Local::new() } };
        MAX_CPUS],
);

/// The state of CPU `number`, which is the caller's.
#[inline(always)]
pub fn local(number: usize) -> &'static Local {
    &LOCALS.0[number]
}

/// Sets the timer to interrupt at `deadline` at the latest. One that is set to come earlier stays: a guest's deadline holds
/// only while the guest runs, and an interrupt too many now and then costs less than setting the timer twice per exit.
#[inline(always)]
pub fn arm(local: &Local, deadline: u64) {
    if deadline < local.armed.get() {
        local.armed.set(deadline);
        apic::local().arm(deadline);
    }
}

/// Lets the timer send the rest of the log, if anything waits to be sent.
fn arm_for_log(number: usize) {
    if log::is_waiting() {
        arm(local(number), time::tsc().saturating_add(time::to_ticks(log::PERIOD)));
    }
}

// ---- interrupts ------------------------------------------------------------------------------------

/// Handles an interrupt that has been taken.
pub fn handle_vector(kernel: &Kernel<X86>, number: usize, vector: u8) {
    count(&kernel.counters.interrupts);
    match vector {
        // A device can send this vector, too. Then it is in service, and without its end nothing else comes.
        idt::SPURIOUS if !apic::local().is_in_service(vector) => return,
        idt::SPURIOUS => {}
        idt::TIMER => {
            local(number).armed.set(u64::MAX);
            kernel.timer(number);
            if log::is_waiting() {
                log::step();
                arm_for_log(number);
            }
        }
        // Whoever sent it has changed what this CPU looks at on its way out.
        idt::IPI => {}
        _ => kernel.interrupt(vector),
    }
    apic::local().eoi();
}

/// Handles what was noted while the kernel let interrupts in.
pub fn handle_pending(kernel: &Kernel<X86>, number: usize) {
    for (index, word) in cpu::current().pending.iter().enumerate() {
        if word.load(Ordering::Relaxed) == 0 {
            continue;
        }
        let mut bits = word.swap(0, Ordering::Relaxed);
        while bits != 0 {
            handle_vector(kernel, number, (index * 64) as u8 + bits.trailing_zeros() as u8);
            bits &= bits - 1;
        }
    }
}

/// Waits for an interrupt without the lock.
#[cold]
#[inline(never)]
fn idle(mut kernel: Guard, number: usize) -> Guard {
    arm(local(number), kernel.cpus[number].deadline());
    loop {
        unlock(kernel);
        // SAFETY: an interrupt here only sets a bit in `pending`. STI lets none in before HLT.
        unsafe { core::arch::asm!("sti", "hlt", "cli", options(nostack)) };
        kernel = lock(number);
        handle_pending(&kernel, number);
        if kernel.cpus[number].resched.get() {
            return kernel;
        }
        arm(local(number), kernel.cpus[number].deadline());
    }
}

// ---- the way out -----------------------------------------------------------------------------------

/// The thread that a CPU goes on with, and the vCPU that it is in `VcpuRun` on, else null. For as long as the lock is held and
/// nothing is freed.
pub struct Next {
    thread: *const Thread<X86>,
    vcpu: *const Vcpu<X86>,
}

impl Next {
    /// The same as [`kernel_core::thread::Next`].
    #[inline(always)]
    pub fn new(next: &kernel_core::thread::Next<'_, X86>) -> Self {
        Self { thread: next.thread, vcpu: next.vcpu.map_or(ptr::null(), ptr::from_ref) }
    }
}

/// Finishes what this entry of the kernel has begun, and waits until there is a thread to go on with.
#[inline(never)]
pub fn choose(mut kernel: Guard, number: usize) -> (Guard, Next) {
    loop {
        kernel.finish(number);
        let Some(handle) = kernel.cpus[number].current.get() else {
            // Nobody wants the time: what is left of ended tasks goes first.
            let mut budget = WORK;
            kernel.reap(&mut budget);
            if budget == WORK {
                kernel = idle(kernel, number);
            }
            continue;
        };
        let thread = kernel.memory.at(handle);
        let vcpu = thread.vcpu.get().map_or(ptr::null(), |name| {
            kernel.memory.get(name).map_or_else(|| svm::lost(&kernel, thread), ptr::from_ref)
        });
        let next = Next { thread, vcpu };
        return (kernel, next);
    }
}

/// Ends this entry of the kernel: runs guests, and returns the context to go on with.
#[inline(always)]
pub fn leave(mut kernel: Guard, number: usize, mut next: Next) -> *const Context {
    let back = loop {
        // SAFETY: they were found under the lock, which is held since, and objects are freed by `choose` only.
        let (thread, vcpu) = unsafe { (&*next.thread, next.vcpu.as_ref()) };
        let Some(vcpu) = vcpu else {
            arm(local(number), kernel.cpus[number].deadline());
            break svm::Back { task: thread.task, context: &raw const thread.context };
        };
        let (after, back) = svm::run(kernel, number, thread, vcpu);
        kernel = after;
        // Most exits: there is nothing to do but to go back to the VMM. The timer is set early enough: guests are
        // entered with the CPU's own deadline at the latest, and nobody has changed that.
        if let Some(back) = back.filter(|_| !kernel.has_work(number)) {
            break back;
        }
        (kernel, next) = choose(kernel, number);
    };
    if kernel.cpus[number].space.get() != Some(back.task) {
        load_space(&kernel, number, back.task);
    }
    cpu::set_interrupt_stack(Context::end(back.context));
    unlock(kernel);
    back.context
}

#[inline(always)]
fn load_space(kernel: &Kernel<X86>, number: usize, task: Handle<Task<X86>>) {
    let space = kernel.enter_space(number, task);
    // SAFETY: every task's root has the kernel's part (`init_root`).
    unsafe { write_cr3(kernel.memory.physical(space.root)) };
    match space.port_map.get() {
        None => cpu::hide_ports(),
        Some(map) => show_ports(kernel, number, (task, space.port_generation.get()), map),
    }
    if cpu::current().shows_aux.load(Ordering::Relaxed) {
        local(number).guest.hide();
    }
}

/// Shows the ports of a task, and copies its map if it is not the one that was shown last.
#[inline(never)]
fn show_ports(kernel: &Kernel<X86>, number: usize, of: (Handle<Task<X86>>, u64), map: Frame) {
    if local(number).ports.replace(Some(of)) == Some(of) {
        cpu::unhide_ports();
        return;
    }
    // SAFETY: the map is two raw frames in a row, which the kernel changes only under the lock.
    let bits = unsafe { &*kernel.memory.address(map).cast::<[u8; cpu::IO_MAP_LENGTH]>() };
    cpu::show_ports(bits);
}

/// Starts to run threads on this CPU.
pub fn start(kernel: Guard, number: usize) -> ! {
    kernel.cpus[number].resched.set(true);
    // A task that uses the FPU faults: native programs have none, and a guest's state may be in it.
    // SAFETY: the kernel is compiled without floating point.
    unsafe { write_cr0(read_cr0() | cr0::TS) };
    let (kernel, next) = choose(kernel, number);
    let context = leave(kernel, number, next);
    // SAFETY: a thread's context; this stack holds nothing that is needed.
    unsafe { crate::entry::leave_to(context) }
}

// ---- the architecture ------------------------------------------------------------------------------

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
    type Vcpu = svm::VcpuFrames;
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
        // SAFETY: the kernel's own tables map all that the kernel uses.
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
        svm::is_ready()
    }

    fn vcpu_new(
        memory: &Memory,
        factory: Option<Handle<Factory>>,
        state: Frame,
    ) -> Result<svm::VcpuFrames, Status> {
        svm::VcpuFrames::new(memory, factory, state)
    }

    fn vcpu_free(memory: &Memory, vcpu: &svm::VcpuFrames) {
        vcpu.free(memory);
    }

    fn vcpu_preempted(vcpu: &svm::VcpuFrames) {
        vcpu.preempted();
    }

    fn vcpu_state(memory: &Memory, vcpu: &Vcpu<Self>, groups: u64) {
        svm::read_groups(memory, &local(Self::this_cpu()).guest, vcpu, groups);
    }

    fn irq_valid(source: IrqSource) -> bool {
        line(source).is_none_or(|line| line.gsi < ioapic::gsi_count())
    }

    fn irq_set(irq: &Irq<Self>, masked: bool) {
        let Some(line) = line(irq.source) else { return };
        if masked {
            ioapic::mask(line.gsi);
        } else if ioapic::configure(line, irq.vector, irq.cpu).is_ok() {
            ioapic::unmask(line.gsi);
        }
    }

    fn irq_message(irq: &Irq<Self>) -> (u64, u64) {
        let address = ioapic::msi_address(irq.cpu).unwrap_or(0);
        (address, ioapic::msi_data(irq.vector) as u64)
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
        // SAFETY: both end the machine; where neither exists, the CPU stops.
        unsafe {
            out8(RESET_CONTROL, 0x02);
            out8(RESET_CONTROL, 0x06);
            out8(KEYBOARD, 0xfe);
        }
        crate::io::stop()
    }
}

static CPUS: AtomicU64 = AtomicU64::new(1);

/// Says how many CPUs run.
pub fn set_cpus(cpus: usize) {
    CPUS.store(cpus as u64, Ordering::Relaxed);
}

/// Whether [`publish`] has been called and the lock was given back once.
pub fn wait_until_published() {
    while !READY.load(Ordering::Acquire) {
        core::hint::spin_loop();
    }
}

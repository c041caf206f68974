//! Implementation of `kernel_core::arch::Arch` and [`kernel_run::Processor`] for x86-64.

use core::cell::Cell;
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};

use abi::args::IrqSource;
use kernel_core::arch::Arch;
use kernel_core::object::{Irq, Space, Task, Thread, Vcpu};
use kernel_core::pool::{Frame, Handle, Memory};
use kernel_core::{Kernel, count};
use kernel_run::Processor;
use kernel_run::exit::ReturnToUser;
use kernel_run::lock::{self, KernelLock};
use kernel_run::log::PERIOD;

use crate::context::Context;
use crate::cpu::{self, MAX_CPUS};
use crate::features::features;
use crate::format::UserFormat;
use crate::hvm::Hvm as _;
use crate::io::{out8, write_cr3};
use crate::log::LOG;
use crate::{Extension, X86, apic, idt, ioapic, memory, time, vcpu};

static KERNEL: KernelLock<X86> = KernelLock::new();

/// Access to the kernel's state.
pub type Guard = kernel_run::lock::Guard<X86>;

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
    if LOG.is_waiting() {
        arm(local(cpu_index), time::tsc().saturating_add(time::to_ticks(PERIOD)));
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
            if LOG.is_waiting() {
                LOG.step();
                arm_for_log(cpu_index);
            }
        }
        // The sender has changed scheduler state that this CPU evaluates on kernel exit.
        idt::IPI => {}
        _ => kernel.interrupt(idt::irq_number(vector)),
    }
    apic::local().eoi();
}

// ---- address spaces ----------------------------------------------------------------------------

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
        lock::shoot_down::<Self>(cpus);
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
        Extension::is_ready() && features().npt
    }

    fn has_vtlb() -> bool {
        Extension::is_ready()
    }

    fn vcpu_state(memory: &Memory, of: &Vcpu<Self>, groups: u64) {
        vcpu::read_groups(memory, &local(Self::this_cpu()).guest.owner, of, groups);
    }

    fn irq_valid(source: IrqSource) -> bool {
        !matches!(source, IrqSource::Line { gsi, .. } if gsi >= ioapic::gsi_count())
    }

    fn irq_set(irq: &Irq<Self>, masked: bool) {
        match irq.source {
            IrqSource::Line { gsi, .. } if masked => ioapic::mask(gsi),
            line => ioapic::route(line, idt::vector(irq.number), irq.cpu),
        }
    }

    fn irq_message(irq: &Irq<Self>) -> (u64, u64) {
        // The data of a fixed, edge-triggered interrupt are its vector.
        (ioapic::msi_address(irq.cpu).unwrap_or(0), idt::vector(irq.number).into())
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
        const RESET_CONTROL: u16 = 0xcf9;
        const KEYBOARD: u16 = 0x64;
        LOG.flush();
        // SAFETY: both reset the machine; where neither exists, the CPU stops.
        unsafe {
            out8(RESET_CONTROL, 0x02);
            out8(RESET_CONTROL, 0x06);
            out8(KEYBOARD, 0xfe);
        }
        crate::io::stop()
    }
}

// SAFETY: there is one lock, and the direct map includes all RAM that boot allocates.
unsafe impl Processor for X86 {
    #[inline(always)]
    fn kernel_lock() -> &'static KernelLock<Self> {
        &KERNEL
    }

    #[cfg(parador_longest_path)]
    fn lock_acquired() {
        crate::longest::begin();
    }

    #[cfg(parador_longest_path)]
    fn lock_released() {
        crate::longest::end();
    }

    fn direct(physical: u64) -> *mut u8 {
        memory::direct(physical)
    }

    fn wait_for_interrupt() {
        // SAFETY: an interrupt here only sets a bit in `pending`. STI inhibits interrupts until
        // after HLT.
        unsafe { core::arch::asm!("sti", "hlt", "cli", options(nostack)) };
    }

    fn handle_pending(kernel: &Kernel<Self>, cpu_index: usize) {
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

    #[inline(always)]
    fn arm_timer(cpu_index: usize, deadline: u64) {
        arm(local(cpu_index), deadline);
    }

    #[inline(always)]
    fn load_space(
        kernel: &Kernel<Self>,
        cpu_index: usize,
        task: Handle<Task<Self>>,
        space: &Space<Self>,
    ) {
        kernel.cpus[cpu_index].space.set(Some(task));
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

    #[inline(always)]
    fn set_entry_context(context: *const Context) {
        cpu::set_interrupt_stack(Context::end(context));
    }

    #[inline(always)]
    fn run_vcpu(
        kernel: Guard,
        cpu_index: usize,
        thread: &Thread<Self>,
        vcpu: &Vcpu<Self>,
    ) -> (Guard, Option<ReturnToUser<Self>>) {
        vcpu::run(kernel, cpu_index, thread, vcpu)
    }
}

static CPUS: AtomicU64 = AtomicU64::new(1);

/// Sets the number of running CPUs.
pub fn set_cpus(cpus: usize) {
    CPUS.store(cpus as u64, Ordering::Relaxed);
}

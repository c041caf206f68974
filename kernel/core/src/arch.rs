//! What the generic kernel asks of an architecture.

use core::sync::atomic::AtomicU64;

use abi::Status;

use crate::object::{Irq, Vcpu};
use crate::pool::{Factory, Frame, Handle, Memory};
use crate::table::Format;

/// The user registers of a thread, as the entry path saves them.
///
/// Interior mutable: the entry and exit assembly reads and writes it between calls.
pub trait Context: Default + 'static {
    /// Operation number of the system call.
    fn operation(&self) -> u64;
    /// Argument `index` (0..6) of the system call.
    fn argument(&self, index: usize) -> u64;
    /// Sets the status that the system call returns.
    fn set_status(&self, status: Status);
    /// Sets result `index` (0..6).
    fn set_result(&self, index: usize, value: u64);
    /// Makes the thread repeat its system call when it runs again.
    fn restart(&self);
    /// Prepares a fresh start in user mode.
    fn start(&self, ip: u64, sp: u64, argument: u64);
    /// Instruction pointer, for messages.
    fn ip(&self) -> u64;
}

/// Where a hardware interrupt comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IrqSource {
    /// A line of the interrupt controllers.
    Line {
        /// Global interrupt number.
        gsi: u32,
        /// Level (else edge) triggered.
        level: bool,
        /// Active low.
        active_low: bool,
    },
    /// A message.
    Message,
}

/// An architecture. Everything is called with the kernel lock held, on the CPU that it concerns,
/// unless said otherwise.
pub trait Arch: Sized + 'static {
    /// User registers.
    type Context: Context;
    /// Page tables of tasks.
    type Host: Format;
    /// Page tables of guest-physical spaces.
    type Nested: Format;
    /// Processor structures of a vCPU.
    type Vcpu: Clone + 'static;
    /// Frames of a Vm's I/O permission map; 0 where there are no ports.
    const GUEST_PORT_FRAMES: u32;
    /// Frames of a task's I/O permission map; 0 where there are no ports.
    const PORT_FRAMES: u32;

    /// The CPU that executes this.
    fn this_cpu() -> usize;
    /// CPUs that run.
    fn cpus() -> usize;
    /// The time-stamp counter.
    fn now() -> u64;
    /// Converts nanoseconds to counts of [`Arch::now`].
    fn ticks(nanoseconds: u64) -> u64;
    /// Asks another CPU to enter the kernel soon. Any CPU.
    fn kick(cpu: usize);
    /// Makes every CPU of the mask leave user and guest mode and drop its cached translations;
    /// returns when all have. The mask does not name the caller's CPU.
    fn shootdown(cpus: u64);
    /// Drops this CPU's cached translations of the current task space.
    fn flush_local();
    /// Fills the kernel's part of a new task root table.
    fn init_root(root: &[AtomicU64; 512]);
    /// Root-table entries that belong to tasks.
    fn user_entries() -> core::ops::Range<usize>;
    /// Whether [`Arch::Vcpu`]s can exist on this machine.
    fn has_nested() -> bool;

    /// Makes the processor structures of a vCPU whose state page is `state`.
    fn vcpu_new(
        memory: &Memory,
        factory: Option<Handle<Factory>>,
        state: Frame,
    ) -> Result<Self::Vcpu, Status>;
    /// Gives them back. The vCPU is not running.
    fn vcpu_free(memory: &Memory, vcpu: &Self::Vcpu);
    /// Another thread runs instead of the vCPU's, which is in the guest and wants to run.
    fn vcpu_preempted(vcpu: &Self::Vcpu);
    /// Copies state groups to the state page.
    fn vcpu_state(memory: &Memory, vcpu: &Vcpu<Self>, groups: u64);

    /// Whether the source exists.
    fn irq_valid(source: IrqSource) -> bool;
    /// Routes a source to a vector of a CPU and unmasks it, or masks it.
    fn irq_set(irq: &Irq<Self>, masked: bool);
    /// Address and data that make a device's message arrive as this interrupt.
    fn irq_message(irq: &Irq<Self>) -> (u64, u64);

    /// Appends text to the kernel log.
    fn log(text: core::fmt::Arguments<'_>);
    /// Appends a task's text to the kernel log; control bytes do no harm there. Returns the number of bytes in the log's
    /// buffer that wait to be sent.
    fn log_text(text: &[u8]) -> usize;
    /// Resets the machine.
    fn reset() -> !;
}

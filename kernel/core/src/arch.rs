//! Interface of the generic kernel to a processor architecture.

use core::sync::atomic::AtomicU64;

use abi::Status;
use abi::args::IrqSource;

use crate::Result;
use crate::mdb::Extent;
use crate::object::{Irq, Translation, Vcpu};
use crate::pool::{Account, Frame, Memory};
use crate::table::Format;

/// User registers of a thread, as the entry path saves them.
///
/// Interior mutable: entry and exit assembly reads and writes them between calls.
pub trait Context: Default + 'static {
    /// Operation number of the system call.
    fn operation(&self) -> u64;
    /// Argument `index` (0..6) of the system call.
    fn argument(&self, index: usize) -> u64;
    /// Sets the status that the system call returns.
    fn set_status(&self, status: Status);
    /// Sets result `index` (0..6).
    fn set_result(&self, index: usize, value: u64);
    /// Makes the thread repeat its system call when it next runs.
    fn restart(&self);
    /// Resets the registers for a start in user mode at `ip`.
    fn start(&self, ip: u64, sp: u64, argument: u64);
    /// Instruction pointer, for log messages.
    fn ip(&self) -> u64;
}

/// Processor structures of a vCPU. Every function is called with the kernel lock held.
pub trait ArchVcpu: Clone + 'static {
    /// Allocates the structures of a vCPU whose state page is `state`.
    fn new(
        memory: &Memory,
        factory: Account,
        state: Frame,
        translation: Translation,
    ) -> Result<Self>;
    /// Frees the structures of a vCPU that is not running.
    fn free(&self, memory: &Memory);
    /// Records that the scheduler preempted the vCPU's thread while it was in the guest.
    fn count_preemption(&self);
}

/// A processor architecture. Unless stated otherwise, every function is called with the kernel lock
/// held, on the CPU that it concerns.
pub trait Arch: Copy + Default + PartialEq + 'static {
    /// User registers.
    type Context: Context;
    /// Page-table format of tasks.
    type Host: Format;
    /// Page-table format of guest-physical address spaces.
    type Nested: Format;
    /// Processor structures of a vCPU.
    type Vcpu: ArchVcpu;
    /// Frames of a VM's I/O permission map; 0 on architectures without I/O ports.
    const GUEST_PORT_FRAMES: u32;
    /// Frames of a task's I/O permission map; 0 on architectures without I/O ports.
    const PORT_FRAMES: u32;

    /// Index of the executing CPU.
    fn this_cpu() -> usize;
    /// Number of running CPUs.
    fn cpus() -> usize;
    /// Current time, in ticks of a counter that all CPUs share and that never stops.
    fn now() -> u64;
    /// Converts nanoseconds to ticks of [`Arch::now`].
    fn ticks(nanoseconds: u64) -> u64;
    /// Sends an IPI that makes CPU `cpu` enter the kernel. `cpu` may be any CPU.
    fn kick(cpu: usize);
    /// Forces every CPU in the mask out of user and guest mode and flushes its TLB. Returns when
    /// all have done so. The mask excludes the calling CPU.
    fn shootdown(cpus: u64);
    /// Flushes this CPU's TLB entries of the current task.
    fn flush_local();
    /// Fills the kernel half of a new task's root table.
    fn init_root(root: &[AtomicU64; 512]);
    /// Root-table entries of the user half.
    fn user_entries() -> core::ops::Range<usize>;
    /// Returns whether this machine supports [`Arch::Vcpu`] with nested paging.
    fn has_nested() -> bool;
    /// Returns whether it supports [`Arch::Vcpu`] without nested paging.
    fn has_vtlb() -> bool;

    /// Device memory that every VM with nested paging has from the start, at a guest-physical
    /// address of the ABI: registers that the processor keeps apart by guest. No task has it.
    fn guest_device() -> Option<Extent> {
        None
    }

    /// Copies state groups ([`abi::vcpu`]) to the vCPU's state page.
    fn vcpu_state(memory: &Memory, vcpu: &Vcpu<Self>, groups: u64);

    /// Returns whether the interrupt source exists.
    fn irq_valid(source: IrqSource) -> bool;
    /// Masks an interrupt, or routes it to its CPU and unmasks it. The architecture reports it by
    /// its number ([`crate::Kernel::interrupt`]).
    fn irq_set(irq: &Irq<Self>, masked: bool);
    /// MSI address and data that a device must write to raise this interrupt.
    fn irq_message(irq: &Irq<Self>) -> (u64, u64);

    /// Appends text to the kernel log.
    fn log(text: core::fmt::Arguments<'_>);
    /// Appends a task's text to the kernel log, with control characters replaced. Returns the
    /// number of buffered bytes not sent yet.
    fn log_text(text: &[u8]) -> usize;
    /// Resets the machine.
    fn reset() -> !;
}

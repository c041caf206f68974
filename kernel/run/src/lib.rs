//! Running the kernel on processors of any architecture: the kernel lock, the way out of the
//! kernel, TLB shootdown, the start of root, memory at boot, and the kernel log.
//!
//! An architecture implements [`Processor`] beside [`kernel_core::arch::Arch`].
#![cfg_attr(not(test), no_std)]

use kernel_core::Kernel;
use kernel_core::arch::Arch;
use kernel_core::object::{Space, Task, Thread, Vcpu};
use kernel_core::pool::Handle;

pub mod boot_memory;
pub mod command_line;
pub mod epitaph;
pub mod exit;
pub mod lock;
pub mod log;
pub mod ranges;
pub mod root;
pub mod start;
pub mod tables;
pub mod time;

use exit::ReturnToUser;
use lock::{Guard, KernelLock};

/// A processor that executes the kernel. Unless stated otherwise the functions are called on the
/// CPU with index `cpu_index`, with the kernel lock held and interrupts off.
///
/// # Safety
/// [`Processor::kernel_lock`] always returns the same lock, on which guards rely. All bytes of RAM
/// that was allocated at boot can be written at [`Processor::direct`].
pub unsafe trait Processor: Arch {
    /// Returns the lock with the kernel's state.
    fn kernel_lock() -> &'static KernelLock<Self>;

    /// Called after the lock was acquired, to measure for how long it is held.
    #[inline(always)]
    fn lock_acquired() {}
    /// Called before the lock is released.
    #[inline(always)]
    fn lock_released() {}

    /// Gives way to other CPUs in a loop that waits for them.
    #[inline(always)]
    fn relax() {
        core::hint::spin_loop();
    }

    /// Kernel virtual address of RAM that was allocated at boot.
    fn direct(physical: u64) -> *mut u8;

    /// Waits for an interrupt, without the lock. An interrupt that is already pending ends the wait
    /// at once. Interrupts are only recorded, for [`Processor::handle_pending`].
    fn wait_for_interrupt();
    /// Handles the interrupts that were recorded while the kernel had enabled them.
    fn handle_pending(kernel: &Kernel<Self>, cpu_index: usize);
    /// Arms the timer to interrupt at `deadline`, in ticks, at the latest.
    fn arm_timer(cpu_index: usize, deadline: u64);

    /// Loads the address space `space` of `task`.
    fn load_space(
        kernel: &Kernel<Self>,
        cpu_index: usize,
        task: Handle<Task<Self>>,
        space: &Space<Self>,
    );
    /// Makes the next kernel entry save the registers of user mode in `context`.
    fn set_entry_context(context: *const Self::Context);

    /// Enters the vCPU that `thread`, the CPU's current thread, runs in `VcpuRun`. Unless the VMM
    /// gets an exit, the thread stays in `VcpuRun`.
    fn run_vcpu(
        kernel: Guard<Self>,
        cpu_index: usize,
        thread: &Thread<Self>,
        vcpu: &Vcpu<Self>,
    ) -> (Guard<Self>, Option<ReturnToUser<Self>>);
}

//! Handlers of entries to the kernel from user mode, and of exceptions in the kernel.
//!
//! The entry code calls each on the empty stack of its CPU, with interrupts masked.

use hw_arm64::esr::{self, class};
use kernel_core::arch::Context as _;
use kernel_run::{exit, lock};

use super::leave_to;
use crate::context::ThreadContext;
use crate::run::Guard;
use crate::{Arm64, cpu, fastpath, has_vhe, read_register, run};

/// Handles a system call on the general path.
pub(super) extern "C" fn system_call_handler(context: *const ThreadContext) -> ! {
    let cpu_index = cpu::current().id;
    handle_system_call(lock::lock::<Arm64>(cpu_index), cpu_index, context)
}

/// Handles a system call of the thread with this context, with the lock held.
#[inline(always)]
pub fn handle_system_call(kernel: Guard, cpu_index: usize, context: *const ThreadContext) -> ! {
    // SAFETY: the entry code has passed the stack pointer of user mode.
    let caller = unsafe { fastpath::calling_thread(&kernel, cpu_index, context) };
    let next = caller
        .and_then(|(handle, thread)| kernel.system_call(cpu_index, handle, thread))
        .map(|next| exit::Next::new(&next));
    let context = exit::leave(kernel, cpu_index, next);
    // SAFETY: a thread's context; the next entry starts on an empty stack.
    unsafe { leave_to(context) }
}

/// Handles interrupts in user mode.
pub(super) extern "C" fn interrupt_handler() -> *const ThreadContext {
    let cpu_index = cpu::current().id;
    let kernel = lock::lock::<Arm64>(cpu_index);
    run::handle_interrupts_inline(&kernel, cpu_index);
    exit::leave(kernel, cpu_index, None)
}

/// Handles an exception in user mode that is no system call: a fault of the thread. Without VHE, a
/// task that had no tables when it was loaded may have them now.
pub(super) extern "C" fn exception_handler(syndrome: u64, address: u64) -> *const ThreadContext {
    let cpu_index = cpu::current().id;
    let kernel = lock::lock::<Arm64>(cpu_index);
    let current = kernel.cpus[cpu_index].current.get();
    if (has_vhe() || !run::has_new_tables(&kernel, cpu_index))
        && let Some(handle) = current
        && let Some(thread) = kernel.memory.get(handle)
    {
        let kind = esr::class(syndrome);
        let has_address = matches!(kind, class::INSTRUCTION_ABORT | class::DATA_ABORT);
        let address = if has_address { address } else { 0 };
        kernel.fault(cpu_index, handle, [kind, syndrome, address, thread.context.ip()]);
    }
    exit::leave(kernel, cpu_index, None)
}

/// Stops the machine: an exception in the kernel is a bug.
pub(super) extern "C" fn kernel_exception(kind: u64, syndrome: u64, address: u64, far: u64) -> ! {
    crate::panic::stop_if_dying();
    let el = hw_arm64::registers::exception_level(read_register!("CurrentEL"));
    panic!(
        "exception by vector {kind} at EL{el}: syndrome {syndrome:#x} at {address:#x}, \
         address {far:#x}"
    );
}

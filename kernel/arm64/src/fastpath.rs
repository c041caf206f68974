//! Fast path of IPC: kernel entry and exit for calls and replies in registers.

use core::mem::offset_of;

use abi::Op;
use kernel_core::Kernel;
use kernel_core::object::Thread;
use kernel_core::pool::Handle;
use kernel_run::Processor as _;
use kernel_run::lock::{lock, unlock};

use crate::context::ThreadContext;
use crate::entry::handlers::handle_system_call;
use crate::entry::leave_to;
use crate::{Arm64, cpu};

/// Highest number of an operation with a fast path, for the entry code.
pub const LAST_IPC: u64 = Op::GateReplyWait as u64;

// Only these operations have a fast path.
const _: () = assert!(Op::GateCall as u64 == 0 && Op::GateReplyWait as u64 == 1);

/// The thread whose system call this CPU handles; `None` if another CPU has stopped it meanwhile.
///
/// # Safety
/// This CPU has entered the kernel from user mode in this kernel entry, with the stack pointer
/// `context`, and has not changed its current thread since.
#[inline(always)]
pub unsafe fn calling_thread(
    kernel: &Kernel<Arm64>,
    cpu_index: usize,
    context: *const ThreadContext,
) -> Option<(Handle<Thread<Arm64>>, &Thread<Arm64>)> {
    let handle = kernel.cpus[cpu_index].current.get()?;
    let thread = context.wrapping_byte_sub(offset_of!(Thread<Arm64>, context)).cast();
    // SAFETY: `leave_kernel` sets the stack pointer to the current thread's context. While a CPU is
    // in user mode, its current thread changes only to `None` (`Kernel::stop_thread`), so this is
    // the current one, which exists. It is not freed while the kernel is borrowed.
    Some((handle, unsafe { &*thread }))
}

/// Attempts a system call on the fast path of IPC ([`Kernel::fast_ipc`]); if that has no effect,
/// handles it on the general path. Every thread that the fast path resumes is in a system call.
pub extern "C" fn fast_ipc_handler(context: *const ThreadContext) -> ! {
    let cpu_index = cpu::current().id;
    let kernel = lock::<Arm64>(cpu_index);
    // SAFETY: the entry code calls this only for a system call.
    let caller = unsafe { calling_thread(&kernel, cpu_index, context) };
    let Some(next) = caller.and_then(|(handle, thread)| kernel.fast_ipc(cpu_index, handle, thread))
    else {
        handle_system_call(kernel, cpu_index, context)
    };
    // The timer is armed for the CPU's deadline, which the switch has not changed.
    if kernel.cpus[cpu_index].space.get() != Some(next.thread.task) {
        Arm64::load_space(&kernel, cpu_index, next.thread.task, next.space);
    }
    let context = &raw const next.thread.context;
    unlock(kernel);
    // SAFETY: a thread's context; the next entry starts on an empty stack.
    unsafe { leave_to(context) }
}

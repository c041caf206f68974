//! Fast path of IPC: kernel entry and exit for calls and replies in registers.

use core::mem::offset_of;
use core::ptr;

use kernel_core::Kernel;
use kernel_core::object::Thread;
use kernel_core::pool::Handle;
use kernel_run::Processor as _;
use kernel_run::lock::{lock, unlock};

use crate::X86;
use crate::context::Context;
use crate::cpu;

/// The thread whose system call this CPU handles; `None` if another CPU has stopped it meanwhile.
///
/// # Safety
/// This CPU has entered the kernel from user mode in this kernel entry, and has not changed its
/// current thread since.
#[inline(always)]
pub unsafe fn calling_thread(
    kernel: &Kernel<X86>,
    cpu_index: usize,
) -> Option<(Handle<Thread<X86>>, &Thread<X86>)> {
    const FROM_THREAD: usize = offset_of!(Thread<X86>, context) + size_of::<Context>();
    let handle = kernel.cpus[cpu_index].current.get()?;
    let thread = (cpu::interrupt_stack() as usize - FROM_THREAD) as *const Thread<X86>;
    // SAFETY: `leave` sets the stack to the end of the current thread's context. While a CPU is in
    // user mode, its current thread changes only to `None` (`Kernel::stop_thread`), so this is the
    // current one, which exists. It is not freed while the kernel is borrowed.
    Some((handle, unsafe { &*thread }))
}

/// Attempts a system call on the fast path of IPC ([`Kernel::fast_ipc`]). Returns the context of
/// the thread to be resumed, or null, without effect, if the call needs the general path. Every
/// thread that this resumes is in a system call.
///
/// # Safety
/// This CPU has entered the kernel from user mode in this kernel entry.
#[inline(always)]
pub unsafe fn fast_ipc() -> *const Context {
    let cpu_index = cpu::current().id as usize;
    let kernel = lock::<X86>(cpu_index);
    // SAFETY: the caller's contract.
    let caller = unsafe { calling_thread(&kernel, cpu_index) };
    let Some(next) = caller.and_then(|(handle, thread)| kernel.fast_ipc(cpu_index, handle, thread))
    else {
        unlock(kernel);
        return ptr::null();
    };
    // The timer is armed for the CPU's deadline, which the switch has not changed.
    if kernel.cpus[cpu_index].space.get() != Some(next.thread.task) {
        X86::load_space(&kernel, cpu_index, next.thread.task, next.space);
    }
    let context = &raw const next.thread.context;
    cpu::set_interrupt_stack(Context::end(context));
    unlock(kernel);
    context
}

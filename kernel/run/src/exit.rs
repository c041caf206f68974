//! Kernel exit: the thread or guest that runs next, and idling.

use core::ptr;

use abi::Status;
use kernel_core::Kernel;
use kernel_core::object::{Task, Thread, ThreadState, Vcpu};
use kernel_core::pool::Handle;

use crate::Processor;
use crate::lock::{Guard, lock, unlock};

/// Return to user mode of the CPU's current thread. A VMM's thread whose `VcpuRun` has ended
/// returns as any other does.
pub struct ReturnToUser<A: Processor> {
    /// Task of the thread.
    pub task: Handle<Task<A>>,
    /// Saved registers of the thread.
    pub context: *const A::Context,
}

/// Ends the `VcpuRun` of a thread whose vCPU was destroyed. Returns null.
#[cold]
fn abort_destroyed_vcpu<A: Processor>(kernel: &Kernel<A>, thread: &Thread<A>) -> *const Vcpu<A> {
    kernel.vcpu_return(thread, None, Status::Aborted);
    ptr::null()
}

/// Releases the lock until an interrupt, at the latest that of the timer.
#[cold]
#[inline(never)]
fn idle<A: Processor>(kernel: Guard<A>, cpu_index: usize) -> Guard<A> {
    A::arm_timer(cpu_index, kernel.cpus[cpu_index].deadline());
    unlock(kernel);
    A::wait_for_interrupt();
    let kernel = lock(cpu_index);
    A::handle_pending(&kernel, cpu_index);
    kernel
}

/// Thread to be resumed, and the vCPU that it runs in `VcpuRun`, else null. Valid while the lock is
/// held and no object is freed.
pub struct Next<A: Processor> {
    thread: *const Thread<A>,
    vcpu: *const Vcpu<A>,
}

impl<A: Processor> Next<A> {
    /// Converts a [`kernel_core::thread::Next`].
    #[inline(always)]
    pub fn new(next: &kernel_core::thread::Next<'_, A>) -> Self {
        Self { thread: next.thread, vcpu: next.vcpu.map_or(ptr::null(), ptr::from_ref) }
    }
}

/// Finishes the current kernel entry, and idles until there is a thread to resume.
#[inline(never)]
fn pick_next<A: Processor>(mut kernel: Guard<A>, cpu_index: usize) -> (Guard<A>, Next<A>) {
    loop {
        kernel.finish(cpu_index);
        let Some(thread) = kernel.scheduled(cpu_index) else {
            // No thread is runnable: continue the destruction of dying tasks and VMs. After each
            // step other CPUs get the lock, and interrupts are handled.
            kernel.reap_when_idle(cpu_index);
            kernel = idle(kernel, cpu_index);
            continue;
        };
        let vcpu = match thread.state.get() {
            ThreadState::InGuest { vcpu } => kernel
                .vcpu_of(thread, vcpu)
                .map_or_else(|| abort_destroyed_vcpu(&kernel, thread), ptr::from_ref),
            _ => ptr::null(),
        };
        let next = Next { thread, vcpu };
        return (kernel, next);
    }
}

/// Runs guests until a thread is to return to user mode, and returns that thread's context. Begins
/// with `next`, unless other work waits on this CPU; else the scheduler picks.
#[inline(always)]
pub fn leave<A: Processor>(
    kernel: Guard<A>,
    cpu_index: usize,
    next: Option<Next<A>>,
) -> *const A::Context {
    let (mut kernel, mut next) = match next {
        Some(next) if !kernel.has_work(cpu_index) => (kernel, next),
        _ => pick_next(kernel, cpu_index),
    };
    let target = loop {
        // SAFETY: looked up under the lock, which is held since; only `pick_next` frees objects.
        let (thread, guest) = unsafe { (&*next.thread, next.vcpu.as_ref()) };
        let Some(guest) = guest else {
            A::arm_timer(cpu_index, kernel.cpus[cpu_index].deadline());
            break ReturnToUser { task: thread.task, context: &raw const thread.context };
        };
        let (after, target) = A::run_vcpu(kernel, cpu_index, thread, guest);
        kernel = after;
        // Most VM exits: return to the VMM directly. The timer need not be armed: guests are
        // entered with the CPU's own deadline at the latest, which has not changed.
        if let Some(target) = target.filter(|_| !kernel.has_work(cpu_index)) {
            break target;
        }
        (kernel, next) = pick_next(kernel, cpu_index);
    };
    if kernel.cpus[cpu_index].space.get() != Some(target.task) {
        A::load_space(&kernel, cpu_index, target.task, &kernel.memory.at(target.task).space);
    }
    A::set_entry_context(target.context);
    unlock(kernel);
    target.context
}

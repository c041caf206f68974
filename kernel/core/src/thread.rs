//! Threads, IPC and notifications.
//!
//! # Invariants
//!
//! * A calling thread is either in its server's queue (`queued`) or is the server's `caller`.
//! * A caller donates its scheduling context to a server on the same CPU that is receiving or has
//!   none of its own, transitively along the call chain. Every holder except the owner records its
//!   `donor`, which waits for it, so the chain always leads back to the owner. Only calling threads
//!   have donated their context; it is returned with the reply, or when the caller or any thread of
//!   the chain stops.
//! * A ready thread without a scheduling context gets one from a thread that waits for it, if any
//!   of these has one.
//! * A stopped thread has no callers, or is in the kernel's list of stopped threads: their callers
//!   are aborted [`ABORTS`] at a time, and a destroyed thread is freed afterwards.
//! * A message is read from the sender once, on delivery; it is never copied twice.

use core::cell::Cell;

use abi::Status;

use crate::Kernel;
use crate::arch::{Arch, Context};
use crate::object::*;
use crate::pool::{Factory, Handle};
use crate::tree::Links;

mod donation;
pub(crate) mod fault;
mod ipc;
mod irq;
mod message;
mod notification;
mod vcpu;

/// Maximum number of calls to stopped threads aborted per kernel entry.
const ABORTS: u32 = 8;

/// Current thread of a CPU, to be resumed.
pub struct Next<'a, A: Arch> {
    /// The thread.
    pub thread: &'a Thread<A>,
    /// vCPU that the thread runs in `VcpuRun`, if any.
    pub vcpu: Option<&'a Vcpu<A>>,
}

impl<A: Arch> Kernel<A> {
    /// Creates a stopped thread of `task` on `cpu` and maps its message page at `message_address`.
    pub fn new_thread(
        &self,
        factory: Option<Handle<Factory>>,
        task: Handle<Task<A>>,
        cpu: usize,
        message_address: u64,
    ) -> Result<Handle<Thread<A>>, Status> {
        if cpu >= A::cpus() {
            return Err(Status::BadCpu);
        }
        let message = self.memory.alloc_raw(factory, 1)?;
        let message_node = self
            .map_fixed(task, message_address, message, true)
            .inspect_err(|_| self.memory.free_raw(message, 1))?;
        let owner = self.memory.at(task);
        let handle = self
            .memory
            .alloc(
                factory,
                Thread {
                    context: A::Context::default(),
                    caps: Cell::new(0),
                    task,
                    cpu,
                    message,
                    message_node,
                    state: Cell::new(ThreadState::Stopped),
                    own_sched: Cell::new(None),
                    sched: Cell::new(None),
                    donor: Cell::new(None),
                    stopping: Cell::new(false),
                    stopping_next: Cell::new(None),
                    destroyed: Cell::new(false),
                    caller: Cell::new(None),
                    queue_head: Cell::new(None),
                    queue_tail: Cell::new(None),
                    server: Cell::new(None),
                    queued: Cell::new(false),
                    badge: Cell::new(0),
                    queue_next: Cell::new(None),
                    queue_prev: Cell::new(None),
                    fault: Cell::new(None),
                    waiting_on: Cell::new(None),
                    fault_gate: Cell::new(None),
                    bound: Cell::new(None),
                    vcpu: Cell::new(None),
                    vcpu_lookup: Cell::new(None),
                    deadline: Cell::new(u64::MAX),
                    timeout: Links::new(),
                    task_next: Cell::new(owner.threads.get()),
                    task_prev: Cell::new(None),
                },
            )
            .inspect_err(|_| {
                self.remove_fixed(message_node);
                self.memory.free_raw(message, 1);
            })?;
        if let Some(next) = owner.threads.replace(Some(handle)) {
            self.memory.at(next).task_prev.set(Some(handle));
        }
        Ok(handle)
    }

    /// Starts a stopped thread.
    pub fn start_thread(
        &self,
        handle: Handle<Thread<A>>,
        ip: u64,
        sp: u64,
        argument: u64,
    ) -> Result<(), Status> {
        let thread = self.memory.at(handle);
        if thread.state.get() != ThreadState::Stopped {
            return Err(Status::Busy);
        }
        if self.memory.get(thread.task).is_none_or(|task| task.space.dying.get()) {
            return Err(Status::Aborted);
        }
        if ip >= abi::USER_END || sp > abi::USER_END {
            return Err(Status::BadArgument);
        }
        thread.fault.set(None);
        thread.context.start(ip, sp, argument);
        self.wake(handle);
        Ok(())
    }

    /// Makes a thread ready and enqueues its scheduling context.
    pub fn wake(&self, handle: Handle<Thread<A>>) {
        let thread = self.memory.at(handle);
        thread.state.set(ThreadState::Ready);
        match thread.sched.get() {
            Some(sched) => self.enqueue(sched),
            None => self.find_donor(handle),
        }
    }

    /// Sets a waiting or stopped state and dequeues the thread's scheduling context.
    fn block(&self, handle: Handle<Thread<A>>, state: ThreadState) {
        let thread = self.memory.at(handle);
        thread.state.set(state);
        if let Some(sched) = thread.sched.get() {
            self.dequeue(sched);
        }
        let cpu = &self.cpus[thread.cpu];
        if cpu.current.get() == Some(handle) {
            cpu.resched.set(true);
        }
    }

    /// Stops a thread in any state and aborts its own call and its callers. Queued callers may be
    /// aborted later, but before they can call again.
    pub fn stop_thread(&self, handle: Handle<Thread<A>>) {
        let thread = self.memory.at(handle);
        match thread.state.get() {
            ThreadState::Stopped | ThreadState::Ready | ThreadState::Receiving => {}
            ThreadState::Blocked => self.end_wait(handle, thread),
            ThreadState::Calling => {
                if let Some(server) = thread.server.take()
                    && let Some(partner) = self.memory.get(server)
                {
                    if thread.queued.get() {
                        self.dequeue_caller(partner, handle);
                    } else if partner.caller.get() == Some(handle) {
                        partner.caller.set(None);
                    }
                    self.reclaim_donation(handle, thread, server);
                }
            }
        }
        if let Some(vcpu) = thread.vcpu.take().and_then(|vcpu| self.memory.get(vcpu)) {
            vcpu.runner.set(None);
        }
        thread.fault.set(None);
        self.block(handle, ThreadState::Stopped);
        // The caller being served would wait for ever.
        if let Some(caller) = thread.caller.take() {
            self.abort_call(handle, caller);
        }
        self.defer_abort_calls(handle, thread);
        // A thread that runs on another CPU keeps running until that CPU enters the kernel.
        if thread.cpu != A::this_cpu() && self.cpus[thread.cpu].current.get() == Some(handle) {
            self.cpus[thread.cpu].current.set(None);
            self.cpus[thread.cpu].resched.set(true);
            A::shootdown(1 << thread.cpu);
            self.clear_loaded_space(thread.cpu);
        }
    }

    /// Adds a stopped thread with callers to the list for [`Kernel::abort_calls`].
    fn defer_abort_calls(&self, handle: Handle<Thread<A>>, thread: &Thread<A>) {
        // Return a donated context at once: this thread may be freed before the donor is aborted.
        if let Some(donor) = thread.donor.get() {
            self.return_donation(thread, donor);
        }
        let awaited = thread.caller.get().is_some() || thread.queue_head.get().is_some();
        if awaited && !thread.stopping.replace(true) {
            thread.stopping_next.set(self.stopping.replace(Some(handle)));
            self.memory.request_work();
        }
    }

    /// Aborts up to [`ABORTS`] calls to stopped threads. A thread restarted meanwhile serves its
    /// remaining callers. Returns whether calls remain.
    pub(crate) fn abort_calls(&self) -> bool {
        for _ in 0..ABORTS {
            let Some(handle) = self.stopping.get() else { return false };
            let thread = self.memory.at(handle);
            let stopped = thread.state.get() == ThreadState::Stopped;
            let waits = thread.caller.get().or(thread.queue_head.get()).filter(|_| stopped);
            let Some(caller) = waits else {
                self.stopping.set(thread.stopping_next.take());
                thread.stopping.set(false);
                if thread.destroyed.get() {
                    self.memory.free(handle);
                }
                continue;
            };
            if thread.caller.take().is_none() {
                self.dequeue_caller(thread, caller);
            }
            self.abort_call(handle, caller);
        }
        self.stopping.get().is_some()
    }

    /// Ends the call of `caller`, which is no longer linked to the server. A thread whose call
    /// reports a fault is stopped.
    fn abort_call(&self, server: Handle<Thread<A>>, caller: Handle<Thread<A>>) {
        let Some(thread) = self.memory.get(caller) else { return };
        self.return_donation(self.memory.at(server), caller);
        thread.server.set(None);
        if thread.fault.take().is_some() {
            self.block(caller, ThreadState::Stopped);
            self.defer_abort_calls(caller, thread);
            return;
        }
        thread.context.set_status(Status::Aborted);
        self.wake(caller);
    }

    /// Removes a thread from its dying task. It never runs again.
    pub(crate) fn detach_thread(&self, handle: Handle<Thread<A>>) {
        self.stop_thread(handle);
        let thread = self.memory.at(handle);
        if let Some(task) = self.memory.get(thread.task) {
            match thread.task_prev.get() {
                Some(prev) => self.memory.at(prev).task_next.set(thread.task_next.get()),
                None if task.threads.get() == Some(handle) => {
                    task.threads.set(thread.task_next.get())
                }
                None => return,
            }
            if let Some(next) = thread.task_next.get() {
                self.memory.at(next).task_prev.set(thread.task_prev.get());
            }
        }
        thread.task_prev.set(None);
        thread.task_next.set(None);
        self.remove_fixed(thread.message_node);
    }

    pub(crate) fn destroy_thread(&self, handle: Handle<Thread<A>>) {
        self.detach_thread(handle);
        let thread = self.memory.at(handle);
        for sched in [thread.sched.take(), thread.own_sched.take()].into_iter().flatten() {
            self.dequeue(sched);
            if let Some(sched) = self.memory.get(sched) {
                if sched.owner.get() == Some(handle) {
                    sched.owner.set(None);
                }
                if sched.holder.get() == Some(handle) {
                    sched.holder.set(None);
                }
            }
        }
        if let Some(bound) = thread.bound.get().and_then(|bound| self.memory.get(bound)) {
            bound.thread.set(None);
        }
        self.memory.free_raw(thread.message, 1);
        if thread.stopping.get() {
            thread.destroyed.set(true);
        } else {
            self.memory.free(handle);
        }
    }
}

#[cfg(test)]
mod tests;

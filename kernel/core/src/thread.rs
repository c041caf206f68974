//! Threads, IPC and notifications.
//!
//! # Invariants
//!
//! * [`ThreadState`] holds the data of each state. A thread is `Sending` while it is in its
//!   server's queue, and `AwaitingReply` while it is the caller being served.
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

use crate::arch::{Arch, Context};
use crate::object::*;
use crate::pool::{Account, Handle};
use crate::tree::Links;
use crate::{Kernel, Result};

mod donation;
pub mod fastpath;
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
        factory: Account,
        task: Handle<Task<A>>,
        cpu: usize,
        message_address: u64,
    ) -> Result<Handle<Thread<A>>> {
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
                    callers: Callers::default(),
                    queue: ListLinks::default(),
                    fault: Cell::new([0; 4]),
                    fault_gate: Cell::new(None),
                    bound: Cell::new(None),
                    task_lookup: Cell::default(),
                    gate_lookup: GateLookup::default(),
                    caller_lookup: Cell::default(),
                    vcpu_lookup: VcpuLookup::default(),
                    timeout: Links::default(),
                    stopping: Cell::new(Stopping::No),
                    stopping_next: Cell::new(None),
                    siblings: ListLinks {
                        next: Cell::new(owner.threads.get()),
                        prev: Cell::new(None),
                    },
                },
            )
            .inspect_err(|_| {
                self.remove_fixed(message_node);
                self.memory.free_raw(message, 1);
            })?;
        if let Some(next) = owner.threads.replace(Some(handle)) {
            self.memory.at(next).siblings.prev.set(Some(handle));
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
    ) -> Result<()> {
        let thread = self.memory.at(handle);
        if !matches!(thread.state.get(), ThreadState::Stopped) {
            return Err(Status::Busy);
        }
        self.living_task(thread.task)?;
        if ip >= abi::USER_END || sp > abi::USER_END {
            return Err(Status::BadArgument);
        }
        thread.context.start(ip, sp, argument);
        self.wake(handle);
        Ok(())
    }

    /// Makes a thread ready and enqueues its scheduling context.
    pub fn wake(&self, handle: Handle<Thread<A>>) {
        let thread = self.memory.at(handle);
        thread.state.set(ThreadState::Ready);
        self.enqueue_thread(handle, thread);
    }

    /// Enqueues the scheduling context of a runnable thread. A thread without one gets it from a
    /// caller.
    #[inline(always)]
    pub(crate) fn enqueue_thread(&self, handle: Handle<Thread<A>>, thread: &Thread<A>) {
        match thread.sched.get() {
            Some(sched) => self.enqueue(sched),
            None => self.find_donor(handle),
        }
    }

    /// Sets a waiting or stopped state and dequeues the thread's scheduling context.
    fn block(&self, handle: Handle<Thread<A>>, thread: &Thread<A>, state: ThreadState<A>) {
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
        let state = thread.state.get();
        self.end_wait(handle, thread);
        if let Some(partner) = state.server().and_then(|server| self.memory.get(server)) {
            if matches!(state, ThreadState::Sending { .. }) {
                self.dequeue_caller(partner, handle);
            } else if partner.callers.served.get() == Some(handle) {
                partner.callers.served.set(None);
            }
        }
        if let Some(vcpu) = state.vcpu().and_then(|vcpu| self.memory.get(vcpu)) {
            vcpu.runner.set(None);
        }
        self.block(handle, thread, ThreadState::Stopped);
        if let Some(server) = state.server() {
            self.reclaim_donation(handle, server);
        }
        // The caller being served would wait for ever.
        if let Some(caller) = thread.callers.served.take() {
            self.abort_call(handle, caller);
        }
        self.defer_abort_calls(handle, thread);
        // A thread that runs on another CPU keeps running until that CPU enters the kernel.
        if thread.cpu != A::this_cpu() && self.cpus[thread.cpu].current.get() == Some(handle) {
            self.cpus[thread.cpu].current.set(None);
            self.cpus[thread.cpu].resched.set(true);
            A::shootdown(1 << thread.cpu);
            self.cpus[thread.cpu].space.set(None);
        }
    }

    /// Adds a stopped thread with callers to the list for [`Kernel::abort_calls`].
    fn defer_abort_calls(&self, handle: Handle<Thread<A>>, thread: &Thread<A>) {
        // Return a donated context at once: this thread may be freed before the donor is aborted.
        if let Some(donor) = thread.donor.get() {
            self.return_donation(thread, donor);
        }
        if thread.callers.first().is_some() && thread.stopping.get() == Stopping::No {
            thread.stopping.set(Stopping::AbortsCallers);
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
            let stopped = matches!(thread.state.get(), ThreadState::Stopped);
            let Some(caller) = thread.callers.first().filter(|_| stopped) else {
                self.stopping.set(thread.stopping_next.take());
                if thread.stopping.replace(Stopping::No) == Stopping::Destroyed {
                    self.memory.free(handle);
                }
                continue;
            };
            if thread.callers.served.take().is_none() {
                self.dequeue_caller(thread, caller);
            }
            self.abort_call(handle, caller);
        }
        self.stopping.get().is_some()
    }

    /// Ends the call of `caller`, which is no longer linked to the server. A thread whose call
    /// reports a fault is stopped.
    #[inline(never)]
    fn abort_call(&self, server: Handle<Thread<A>>, caller: Handle<Thread<A>>) {
        let Some(thread) = self.memory.get(caller) else { return };
        self.return_donation(self.memory.at(server), caller);
        let faulted = matches!(
            thread.state.get(),
            ThreadState::Sending { content: CallContent::Fault, .. }
                | ThreadState::AwaitingReply { content: CallContent::Fault, .. }
        );
        if faulted {
            self.block(caller, thread, ThreadState::Stopped);
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
            match thread.siblings.prev.get() {
                Some(prev) => self.memory.at(prev).siblings.next.set(thread.siblings.next.get()),
                None if task.threads.get() == Some(handle) => {
                    task.threads.set(thread.siblings.next.get())
                }
                None => return,
            }
            if let Some(next) = thread.siblings.next.get() {
                self.memory.at(next).siblings.prev.set(thread.siblings.prev.get());
            }
        }
        thread.siblings.prev.set(None);
        thread.siblings.next.set(None);
        self.remove_fixed(thread.message_node);
    }

    pub(crate) fn destroy_thread(&self, handle: Handle<Thread<A>>) {
        self.detach_thread(handle);
        let thread = self.memory.at(handle);
        for sched in [thread.sched.take(), thread.own_sched.take()].into_iter().flatten() {
            self.dequeue(sched);
            if let Some(sched) = self.memory.get(sched) {
                sched.owner.set(sched.owner.get().filter(|&owner| owner != handle));
                sched.holder.set(sched.holder.get().filter(|&holder| holder != handle));
            }
        }
        if let Some(bound) = thread.bound.get().and_then(|bound| self.memory.get(bound)) {
            bound.thread.set(None);
        }
        self.memory.free_raw(thread.message, 1);
        match thread.stopping.get() {
            Stopping::No => self.memory.free(handle),
            _ => thread.stopping.set(Stopping::Destroyed),
        }
    }
}

#[cfg(test)]
mod tests;

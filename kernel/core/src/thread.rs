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
use core::sync::atomic::Ordering;

use abi::vcpu::doorbell;
use abi::{Item, MessagePage, Status, Tag};

use crate::arch::{Arch, Context};
use crate::mdb::Delegation;
use crate::mdb::work::MESSAGE_WORK;
use crate::object::*;
use crate::pool::{Factory, Frame, Handle};
use crate::sched::SchedContext;
use crate::tree::Links;
use crate::{Kernel, count};

/// Offsets in a [`MessagePage`], in words.
const ITEMS_AT: usize = core::mem::offset_of!(MessagePage, items) / 8;
const WINDOWS_AT: usize = core::mem::offset_of!(MessagePage, windows) / 8;
/// Rate limit of fault messages, for all tasks together: burst size, and nanoseconds per further
/// message.
pub(crate) const FAULT_LINES: u64 = 20;
const FAULT_LINE_NS: u64 = 100_000_000;
/// Maximum length of a chain of servers that a new caller donates along, and maximum number of
/// callers searched for a donor.
const MAX_DONATION_HOPS: u32 = 64;
/// Maximum number of nested donations of one scheduling context.
const MAX_DONORS: u32 = 64;
/// Maximum number of calls to stopped threads aborted per kernel entry.
const ABORTS: u32 = 8;
/// Maximum number of undeliverable calls that a server skips per kernel entry.
const MAX_REFUSED: u32 = 4;

/// Current thread of a CPU, to be resumed.
pub struct Next<'a, A: Arch> {
    /// The thread.
    pub thread: &'a Thread<A>,
    /// vCPU that the thread runs in `VcpuRun`, if any.
    pub vcpu: Option<&'a Vcpu<A>>,
}

impl<A: Arch> Kernel<A> {
    // ---- life ----------------------------------------------------------------------------------

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

    // ---- scheduling-context donation -----------------------------------------------------------

    /// Moves a caller's scheduling context to its server. If the context is not running, the caller
    /// of this function must update its holder.
    #[inline(always)]
    fn transfer_sched(
        name: Handle<Thread<A>>,
        caller: &Thread<A>,
        sched: Handle<SchedContext<A>>,
        server: &Thread<A>,
    ) {
        caller.sched.set(None);
        server.sched.set(Some(sched));
        server.donor.set(Some(name));
    }

    /// Returns whether the thread's scheduling context has been donated too often to be donated
    /// `further` times.
    #[cold]
    #[inline(never)]
    fn donation_chain_is_full(&self, thread: &Thread<A>, further: u32) -> bool {
        let donor = |thread: &&Thread<A>| thread.donor.get().and_then(|name| self.memory.get(name));
        let chain = core::iter::successors(Some(thread), donor);
        chain.take((MAX_DONORS + 1) as usize).count() as u32 + further > MAX_DONORS + 1
    }

    /// Returns a donated scheduling context to `caller`, if `caller` is the server's donor.
    fn return_donation(&self, server: &Thread<A>, caller: Handle<Thread<A>>) {
        if server.donor.get() != Some(caller) {
            return;
        }
        if let Some(sched) = Self::revert_donation(server) {
            self.set_holder(sched, caller);
        }
    }

    /// Reverts a server to its own scheduling context, if any. Returns the donated context that it
    /// held.
    pub(crate) fn revert_donation(thread: &Thread<A>) -> Option<Handle<SchedContext<A>>> {
        thread.donor.set(None);
        thread.sched.replace(thread.own_sched.get())
    }

    pub(crate) fn set_holder(&self, sched: Handle<SchedContext<A>>, holder: Handle<Thread<A>>) {
        self.dequeue(sched);
        self.memory.at(holder).sched.set(Some(sched));
        if let Some(sched) = self.memory.get(sched) {
            sched.holder.set(Some(holder));
        }
    }

    /// Takes back the scheduling context that a caller donated, from its current holder.
    fn reclaim_donation(
        &self,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        server: Handle<Thread<A>>,
    ) {
        debug_assert!(thread.server.get().is_none(), "else it would donate again at once");
        let (mut donor, mut next) = (handle, Some(server));
        while let Some(name) = next
            && let Some(server) = self.memory.get(name)
            && server.donor.get() == Some(donor)
        {
            if let Some(sched) = Self::revert_donation(server) {
                self.set_holder(sched, handle);
                if server.state.get() == ThreadState::Ready {
                    self.wake(name);
                }
                return;
            }
            (donor, next) = (name, server.server.get());
        }
    }

    /// Handles destruction of the scheduling context that `holder` runs on: every thread of the
    /// donation chain reverts to its own context.
    pub(crate) fn donor_destroyed(&self, holder: Handle<Thread<A>>) {
        let mut next = Some(holder);
        while let Some(thread) = next.and_then(|name| self.memory.get(name)) {
            next = thread.donor.get();
            let _ = Self::revert_donation(thread);
        }
        if self.memory.at(holder).state.get() == ThreadState::Ready {
            self.wake(holder);
        }
    }

    /// Finds a scheduling context for a ready thread without one, among the threads that wait for
    /// it.
    fn find_donor(&self, handle: Handle<Thread<A>>) {
        let cpu = self.memory.at(handle).cpu;
        let mut next = Some(handle);
        let mut visited = 0;
        while let Some(thread) = next.map(|name| self.memory.at(name)) {
            let mut candidate = thread.caller.get().or(thread.queue_head.get());
            while let Some(name) = candidate {
                let waiting = self.memory.at(name);
                if waiting.cpu == cpu && waiting.sched.get().is_some() {
                    return self.donate(name);
                }
                visited += 1;
                if visited == MAX_DONATION_HOPS {
                    return;
                }
                candidate = if waiting.queued.get() {
                    waiting.queue_next.get()
                } else {
                    thread.queue_head.get()
                };
            }
            next = thread.caller.get();
        }
    }

    /// Donates the caller's scheduling context along its call chain to the first ready server, if
    /// no server on the way has one.
    pub(crate) fn donate(&self, caller: Handle<Thread<A>>) {
        let Thread { cpu, sched, .. } = self.memory.at(caller);
        if sched.get().is_none() {
            return;
        }
        let mut end = caller;
        for hops in 1..=MAX_DONATION_HOPS {
            let Some(name) = self.memory.at(end).server.get() else { return };
            let server = self.memory.at(name);
            if server.cpu != *cpu || server.sched.get().is_some() {
                return;
            }
            end = name;
            if server.state.get() == ThreadState::Ready {
                if self.donation_chain_is_full(self.memory.at(caller), hops) {
                    return;
                }
                let mut donor = caller;
                for _ in 0..hops {
                    let thread = self.memory.at(donor);
                    let Some(server) = thread.server.get() else { return };
                    if let Some(sched) = thread.sched.get() {
                        Self::transfer_sched(donor, thread, sched, self.memory.at(server));
                        self.memory.at(sched).holder.set(Some(server));
                    }
                    donor = server;
                }
                return self.wake(end);
            }
        }
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

    // ---- calls ---------------------------------------------------------------------------------

    fn enqueue_caller(&self, server: &Thread<A>, caller: Handle<Thread<A>>) {
        let thread = self.memory.at(caller);
        let last = server.queue_tail.replace(Some(caller));
        thread.queue_prev.set(last);
        thread.queue_next.set(None);
        thread.queued.set(true);
        match last {
            Some(last) => self.memory.at(last).queue_next.set(Some(caller)),
            None => server.queue_head.set(Some(caller)),
        }
    }

    fn dequeue_caller(&self, server: &Thread<A>, caller: Handle<Thread<A>>) {
        let thread = self.memory.at(caller);
        let (prev, next) = (thread.queue_prev.take(), thread.queue_next.take());
        match prev {
            Some(prev) => self.memory.at(prev).queue_next.set(next),
            None => server.queue_head.set(next),
        }
        match next {
            Some(next) => self.memory.at(next).queue_prev.set(prev),
            None => server.queue_tail.set(prev),
        }
        thread.queued.set(false);
    }

    /// `GateCall`. Returns the server if it becomes the CPU's current thread directly.
    #[inline(always)]
    pub fn gate_call(
        &self,
        cpu: usize,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        gate: Handle<Gate<A>>,
    ) -> Result<Option<Next<'_, A>>, Status> {
        let gate = self.memory.get(gate).ok_or(Status::BadCapability)?;
        let server = gate.thread;
        let Some(partner) = self.memory.get(server) else { return Err(Status::Aborted) };
        let here = &self.cpus[cpu];
        debug_assert!(here.current.get() == Some(handle), "only the current thread calls");
        // Fast path: the server is receiving on this CPU and runs directly, on the caller's
        // scheduling context. The server is not the caller, whose state is `Ready`.
        if partner.state.get() == ThreadState::Receiving
            && partner.cpu == cpu
            && let Some(sched) = thread.sched.get()
        {
            if thread.donor.get().is_some() && self.donation_chain_is_full(thread, 1) {
                return Err(Status::Overflow);
            }
            self.deliver(thread, partner, gate.badge)?;
            thread.state.set(ThreadState::Calling);
            thread.server.set(Some(server));
            partner.caller.set(Some(handle));
            Self::transfer_sched(handle, thread, sched, partner);
            partner.state.set(ThreadState::Ready);
            here.current.set(Some(server));
            return Ok(Some(Next { thread: partner, vcpu: None }));
        }
        self.gate_call_slow(cpu, handle, thread, gate, partner)?;
        Ok(None)
    }

    #[inline(never)]
    fn gate_call_slow(
        &self,
        cpu: usize,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        gate: &Gate<A>,
        partner: &Thread<A>,
    ) -> Result<(), Status> {
        let server = gate.thread;
        if server == handle || partner.state.get() == ThreadState::Stopped {
            return Err(Status::Aborted);
        }
        if partner.cpu != cpu && partner.own_sched.get().is_none() {
            return Err(Status::BadCpu);
        }
        if partner.state.get() == ThreadState::Receiving {
            self.deliver(thread, partner, gate.badge)?;
            thread.state.set(ThreadState::Calling);
            thread.server.set(Some(server));
            partner.caller.set(Some(handle));
            self.block(handle, ThreadState::Calling);
            self.wake(server);
            return Ok(());
        }
        thread.badge.set(gate.badge);
        thread.server.set(Some(server));
        self.enqueue_caller(partner, handle);
        self.block(handle, ThreadState::Calling);
        // A server without a scheduling context continues on its caller's.
        self.donate(handle);
        Ok(())
    }

    /// `GateReplyWait`. If the reply cannot be delivered, the server gets the error and may reply
    /// again. Returns the caller if it becomes the CPU's current thread directly.
    #[inline(always)]
    pub fn gate_reply_wait(
        &self,
        cpu: usize,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        flags: u64,
    ) -> Result<Option<Next<'_, A>>, Status> {
        let mut next = None;
        if let Some(caller) = thread.caller.get() {
            if flags & abi::reply_wait::REPLY != 0 {
                next = self.reply(cpu, handle, thread, caller)?;
            } else if flags & abi::reply_wait::WAIT != 0 {
                self.abort_caller(handle, thread, caller);
            }
        }
        if flags & abi::reply_wait::WAIT == 0 {
            thread.context.set_status(Status::Ok);
            self.wake(handle);
            return Ok(next);
        }
        self.receive(cpu, handle, thread);
        Ok(next)
    }

    /// Aborts the call being served: no reply will follow.
    #[inline(never)]
    fn abort_caller(
        &self,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        caller: Handle<Thread<A>>,
    ) {
        thread.caller.set(None);
        self.abort_call(handle, caller);
    }

    #[inline(always)]
    fn reply(
        &self,
        cpu: usize,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        caller: Handle<Thread<A>>,
    ) -> Result<Option<Next<'_, A>>, Status> {
        let Some(partner) = self.memory.get(caller) else {
            thread.caller.set(None);
            return Ok(None);
        };
        if partner.fault.get().is_some() {
            self.reply_to_fault(handle, thread, caller, partner);
            self.cpus[cpu].resched.set(true);
            return Ok(None);
        }
        self.deliver(thread, partner, 0)?;
        thread.caller.set(None);
        partner.server.set(None);
        let here = &self.cpus[cpu];
        debug_assert!(here.current.get() == Some(handle), "only the current thread replies");
        // Fast path: resume the caller on its own scheduling context, without the scheduler.
        if thread.donor.get() == Some(caller)
            && let Some(sched) = thread.sched.get()
        {
            thread.donor.set(None);
            thread.sched.set(thread.own_sched.get());
            partner.sched.set(Some(sched));
            partner.state.set(ThreadState::Ready);
            here.current.set(Some(caller));
            // A server with its own scheduling context is enqueued when it next receives.
            return Ok(Some(Next { thread: partner, vcpu: None }));
        }
        self.resume_caller(handle, thread, caller, true);
        here.resched.set(true);
        Ok(None)
    }

    /// Handles the reply to a fault message: the faulting thread resumes or stops.
    #[cold]
    #[inline(never)]
    fn reply_to_fault(
        &self,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        caller: Handle<Thread<A>>,
        partner: &Thread<A>,
    ) {
        partner.fault.set(None);
        thread.caller.set(None);
        partner.server.set(None);
        let resumed = thread.context.argument(2) == abi::FaultAction::Resume as u64;
        self.resume_caller(handle, thread, caller, resumed);
    }

    #[inline(never)]
    fn resume_caller(
        &self,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        caller: Handle<Thread<A>>,
        resumed: bool,
    ) {
        self.return_donation(thread, caller);
        if resumed {
            self.wake(caller);
        } else {
            self.stop_thread(caller);
        }
        self.wake(handle);
    }

    /// Receives a pending event or the next queued caller, else blocks the server.
    #[inline(always)]
    fn receive(&self, cpu: usize, handle: Handle<Thread<A>>, thread: &Thread<A>) {
        let pending = thread.bound.get().is_some() || thread.queue_head.get().is_some();
        if pending && self.receive_pending(handle, thread) {
            return;
        }
        let own = thread.sched.get();
        thread.state.set(ThreadState::Receiving);
        if let Some(own) = own {
            self.dequeue(own);
        }
        if self.cpus[cpu].current.get() == Some(handle) {
            self.cpus[cpu].resched.set(true);
        }
    }

    /// Delivers a pending event or the next queued call to the server. Returns `false` if there is
    /// none.
    #[inline(never)]
    fn receive_pending(&self, handle: Handle<Thread<A>>, thread: &Thread<A>) -> bool {
        if let Some(bound) = thread.bound.get().and_then(|bound| self.memory.get(bound)) {
            let bits = bound.bits.take();
            if bits != 0 {
                Self::deliver_events(thread, bits);
                self.wake(handle);
                return true;
            }
        }
        for _ in 0..MAX_REFUSED {
            let Some(caller) = thread.queue_head.get() else { return false };
            let partner = self.memory.at(caller);
            self.dequeue_caller(thread, caller);
            if let Err(status) = self.deliver(partner, thread, partner.badge.get()) {
                self.return_donation(thread, caller);
                partner.server.set(None);
                partner.context.set_status(status);
                self.wake(caller);
                continue;
            }
            thread.caller.set(Some(caller));
            // Runs on its own scheduling context, or on one donated by a waiting caller, this one
            // first.
            self.wake(handle);
            return true;
        }
        // Too many undeliverable calls: repeat the system call, whose reply part is done.
        thread.context.restart();
        self.wake(handle);
        true
    }

    fn deliver_events(thread: &Thread<A>, bits: u64) {
        let context = &thread.context;
        context.set_status(Status::Ok);
        context.set_result(0, abi::NOTIFICATION_BADGE);
        context.set_result(1, 0);
        context.set_result(2, bits);
    }

    /// Transfers a message from `sender` to `receiver`, which gets status `Ok` and the badge.
    #[inline(always)]
    fn deliver(&self, sender: &Thread<A>, receiver: &Thread<A>, badge: u64) -> Result<(), Status> {
        let to = &receiver.context;
        if sender.fault.get().is_some() {
            Self::deliver_fault(sender, receiver);
        } else {
            let from = &sender.context;
            let raw = from.argument(1);
            if raw & 0xffff != 0 {
                self.deliver_page(sender, receiver, Tag::unpack(raw))?;
            }
            to.set_result(1, raw);
            for index in 2..6 {
                to.set_result(index, from.argument(index));
            }
        }
        to.set_result(0, badge);
        to.set_status(Status::Ok);
        Ok(())
    }

    #[cold]
    #[inline(never)]
    fn deliver_fault(sender: &Thread<A>, receiver: &Thread<A>) {
        let to = &receiver.context;
        to.set_result(1, Tag::label(abi::FAULT_LABEL).pack());
        for (index, word) in sender.fault.get().into_iter().flatten().enumerate() {
            to.set_result(2 + index, word);
        }
    }

    /// Transfers the part of a message in the message page: words and delegations.
    #[inline(never)]
    fn deliver_page(
        &self,
        sender: &Thread<A>,
        receiver: &Thread<A>,
        tag: Tag,
    ) -> Result<(), Status> {
        let (words, items) = (tag.words as usize, tag.items as usize);
        if words > MessagePage::WORDS || items > MessagePage::ITEMS {
            return Err(Status::Overflow);
        }
        let from = self.memory.words(sender.message);
        let to = self.memory.words(receiver.message);
        // A copy of the window bounds: user tasks may write the page at any time.
        let mut windows = [(0u64, 0u64); 3];
        for (kind, window) in windows.iter_mut().enumerate() {
            let at = WINDOWS_AT + 2 * kind;
            let base = to[at].load(Ordering::Relaxed);
            *window = (base, base.saturating_add(to[at + 1].load(Ordering::Relaxed)));
        }
        let mut budget = MESSAGE_WORK;
        for index in 0..items {
            let at = ITEMS_AT + 2 * index;
            let item = Item::unpack(from[at].load(Ordering::Relaxed)).ok_or(Status::BadArgument)?;
            let source = from[at + 1].load(Ordering::Relaxed);
            let window = &mut windows[item.kind as usize];
            let size = 1u64 << item.order;
            let base = window.0.checked_next_multiple_of(size).ok_or(Status::Overflow)?;
            let end = base.checked_add(size).ok_or(Status::Overflow)?;
            if end > window.1 {
                return Err(Status::Overflow);
            }
            let (from, target) = (sender.task, SpaceRef::Task(receiver.task));
            let delegation = Delegation { from, item, source, to: target, destination: base };
            if !self.delegate_part(&delegation, &mut 0, &mut budget)? {
                return Err(Status::Overflow);
            }
            window.0 = end;
            to[at].store(item.pack(), Ordering::Relaxed);
            to[at + 1].store(base, Ordering::Relaxed);
        }
        for index in 0..words {
            to[index].store(from[index].load(Ordering::Relaxed), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Handles an exception of a user thread: calls its fault gate, or stops the thread.
    pub fn fault(&self, cpu: usize, handle: Handle<Thread<A>>, words: [u64; 4]) {
        let thread = self.memory.at(handle);
        if let Some(gate) = thread.fault_gate.get() {
            thread.fault.set(Some(words));
            if self.gate_call(cpu, handle, thread, gate).is_ok() {
                return;
            }
            thread.fault.set(None);
        }
        self.log_fault(thread, words);
        self.stop_thread(handle);
    }

    /// Logs the fault of a thread without a fault gate, rate-limited over all tasks: a task can
    /// create such threads at any rate. Suppressed messages are counted.
    fn log_fault(&self, thread: &Thread<A>, [vector, error, address, ip]: [u64; 4]) {
        let now = A::now();
        let interval = A::ticks(FAULT_LINE_NS);
        let full_at = self.fault_lines.get().max(now);
        if full_at - now > (FAULT_LINES - 1) * interval {
            count(&self.faults_not_logged);
            return;
        }
        self.fault_lines.set(full_at.saturating_add(interval));
        let more = self.faults_not_logged.take();
        if more != 0 {
            A::log(format_args!(
                "{more} further threads stopped by exceptions (messages rate-limited)"
            ));
        }
        A::log(format_args!(
            "task {:#x}: thread stopped by exception {vector} (error {error:#x}, address {address:#x}) at {ip:#x}",
            thread.task.id(),
        ));
    }

    // ---- notifications -------------------------------------------------------------------------

    /// Sets event bits and wakes the waiting thread.
    pub fn signal(&self, handle: Handle<Notification<A>>, bits: u64) {
        if let Some(notification) = self.memory.get(handle) {
            self.notify(notification, bits);
        }
    }

    #[inline(always)]
    fn notify(&self, notification: &Notification<A>, bits: u64) {
        let old = notification.bits.get();
        // For bits already pending the receiver has been woken before.
        if old & bits != bits || bits == 0 {
            notification.bits.set(old | bits);
            self.wake_waiter(notification);
        }
    }

    #[inline(never)]
    fn wake_waiter(&self, notification: &Notification<A>) {
        if notification.bits.get() == 0 {
            return;
        }
        if let Some(waiter) = notification.waiter.take() {
            let thread = self.memory.at(waiter);
            thread.waiting_on.set(None);
            self.clear_timeout(waiter, thread);
            // A thread in `VcpuRun` reads the bits itself.
            if thread.vcpu.get().is_none() {
                thread.context.set_status(Status::Ok);
                thread.context.set_result(0, notification.bits.take());
            }
            self.wake(waiter);
        } else if let Some(bound) = notification.thread.get()
            && let Some(thread) = self.memory.get(bound)
            && thread.state.get() == ThreadState::Receiving
        {
            Self::deliver_events(thread, notification.bits.take());
            self.wake(bound);
        } else if let Some(vcpu) = notification.vcpu.get().and_then(|vcpu| self.memory.get(vcpu))
            && let Some(runner) = vcpu.runner.get().and_then(|runner| self.memory.get(runner))
            && runner.cpu != A::this_cpu()
        {
            A::kick(runner.cpu);
        }
    }

    /// Signals a doorbell of a VM. Returns the result of `HYPERCALL_DOORBELL`.
    #[inline(always)]
    pub fn ring_doorbell(&self, vm: &Vm<A>, index: u64) -> u64 {
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        if let Some(bell) = vm.doorbells.get(index).and_then(Cell::get)
            && let Some(notification) = self.memory.get(bell.notification)
        {
            self.notify(notification, bell.bits);
            doorbell::RUNG
        } else {
            doorbell::UNBOUND
        }
    }

    /// `NotificationWait`.
    pub fn notification_wait(
        &self,
        handle: Handle<Thread<A>>,
        name: Handle<Notification<A>>,
        deadline: u64,
    ) -> Result<(), Status> {
        let thread = self.memory.at(handle);
        let notification = self.memory.get(name).ok_or(Status::BadCapability)?;
        let bits = notification.bits.take();
        thread.context.set_result(0, bits);
        if bits != 0 {
            thread.context.set_status(Status::Ok);
            return Ok(());
        }
        if deadline == 0 || deadline <= A::now() {
            return Err(Status::Timeout);
        }
        if notification.waiter.get().is_some() {
            return Err(Status::Busy);
        }
        self.block_on(handle, thread, name, notification, deadline);
        Ok(())
    }

    /// Blocks a thread in `VcpuRun`, whose guest executed HLT, until the vCPU's notification has
    /// events or the deadline passes. Returns `false` if events are pending or another thread is
    /// blocked there.
    #[inline(always)]
    pub fn halt(
        &self,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        (name, notification): (Handle<Notification<A>>, &Notification<A>),
        deadline: u64,
    ) -> bool {
        let can = notification.bits.get() == 0 && notification.waiter.get().is_none();
        if can {
            self.block_on(handle, thread, name, notification, deadline);
        }
        can
    }

    #[inline(always)]
    fn block_on(
        &self,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        name: Handle<Notification<A>>,
        notification: &Notification<A>,
        deadline: u64,
    ) {
        notification.waiter.set(Some(handle));
        thread.waiting_on.set(Some(name));
        self.set_timeout(handle, thread, deadline);
        thread.state.set(ThreadState::Blocked);
        // The current thread: the scheduler dequeues its context when it picks another.
        self.cpus[thread.cpu].resched.set(true);
    }

    /// Ends a thread's wait for a notification, if it is blocked on one.
    pub(crate) fn end_wait(&self, handle: Handle<Thread<A>>, thread: &Thread<A>) {
        if let Some(on) = thread.waiting_on.take().and_then(|on| self.memory.get(on)) {
            on.waiter.set(None);
        }
        self.clear_timeout(handle, thread);
    }

    pub(crate) fn destroy_notification(&self, handle: Handle<Notification<A>>) {
        let notification = self.memory.at(handle);
        if let Some(waiter) = notification.waiter.take() {
            let thread = self.memory.at(waiter);
            thread.waiting_on.set(None);
            self.clear_timeout(waiter, thread);
            thread.context.set_status(Status::Aborted);
            self.wake(waiter);
        }
        self.memory.free(handle);
    }

    // ---- vCPUs and interrupts ------------------------------------------------------------------

    /// Creates a vCPU of `vm` and maps its state page at `address` of `task`.
    pub fn new_vcpu(
        &self,
        factory: Option<Handle<Factory>>,
        task: Handle<Task<A>>,
        vm: Handle<Vm<A>>,
        address: u64,
        notification: Handle<Notification<A>>,
    ) -> Result<Handle<Vcpu<A>>, Status> {
        let events = self.memory.get(notification).ok_or(Status::BadCapability)?;
        if events.vcpu.get().is_some_and(|vcpu| self.memory.get(vcpu).is_some()) {
            return Err(Status::Busy);
        }
        let state: Frame = self.memory.alloc_raw(factory, 1)?;
        let undo_state = || self.memory.free_raw(state, 1);
        let state_node =
            self.map_fixed(task, address, state, true).inspect_err(|_| undo_state())?;
        let undo_node = || {
            self.remove_fixed(state_node);
            undo_state();
        };
        let arch = A::vcpu_new(&self.memory, factory, state).inspect_err(|_| undo_node())?;
        let spare = arch.clone();
        let vcpu = Vcpu {
            caps: Cell::new(0),
            vm,
            notification,
            factory,
            state,
            state_node,
            cpu: Cell::new(None),
            runner: Cell::new(None),
            arch,
        };
        match self.memory.alloc(factory, vcpu) {
            Ok(handle) => {
                events.vcpu.set(Some(handle));
                Ok(handle)
            }
            Err(status) => {
                A::vcpu_free(&self.memory, &spare);
                undo_node();
                Err(status)
            }
        }
    }

    /// `VcpuRun`: binds the thread to the vCPU, which it enters when next dispatched. The existence
    /// of the VM is checked then.
    #[inline(always)]
    pub fn vcpu_run(
        &self,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        name: Handle<Vcpu<A>>,
    ) -> Result<&Vcpu<A>, Status> {
        let vcpu = self.memory.get(name).ok_or(Status::BadCapability)?;
        if vcpu.cpu.get().is_some_and(|cpu| cpu != thread.cpu) {
            return Err(Status::BadCpu);
        }
        if vcpu.runner.get().is_some() {
            return Err(Status::Busy);
        }
        vcpu.cpu.set(Some(thread.cpu));
        vcpu.runner.set(Some(handle));
        thread.vcpu.set(Some(name));
        Ok(vcpu)
    }

    /// Ends the thread's `VcpuRun` with `status`.
    pub fn vcpu_return(&self, thread: &Thread<A>, vcpu: Option<&Vcpu<A>>, status: Status) {
        thread.vcpu.set(None);
        if let Some(vcpu) = vcpu {
            vcpu.runner.set(None);
        }
        thread.context.set_status(status);
    }

    pub(crate) fn destroy_vcpu(&self, handle: Handle<Vcpu<A>>) {
        let vcpu = self.memory.at(handle);
        if let Some(name) = vcpu.runner.take()
            && let Some(runner) = self.memory.get(name)
        {
            // The CPU must leave the guest before the processor structures are freed.
            if runner.cpu != A::this_cpu() {
                A::shootdown(1 << runner.cpu);
                self.clear_loaded_space(runner.cpu);
            }
            self.vcpu_return(runner, None, Status::Aborted);
            if runner.state.get() == ThreadState::Blocked {
                self.end_wait(name, runner);
                self.wake(name);
            }
        }
        A::vcpu_free(&self.memory, &vcpu.arch);
        self.remove_fixed(vcpu.state_node);
        self.memory.free_raw(vcpu.state, 1);
        self.memory.free(handle);
    }

    pub(crate) fn destroy_irq(&self, handle: Handle<Irq<A>>) {
        let irq = self.memory.at(handle);
        A::irq_set(irq, true);
        if let Some(slot) = self.irq_slot(irq.vector) {
            slot.set(None);
        }
        self.memory.free(handle);
    }

    /// Handles a device interrupt at `vector`: signals the bound notification.
    pub fn interrupt(&self, vector: u8) {
        let Some(irq) =
            self.irq_slot(vector).and_then(Cell::get).and_then(|irq| self.memory.get(irq))
        else {
            return;
        };
        if matches!(irq.source, crate::arch::IrqSource::Line { level: true, .. }) {
            // A level-triggered line stays asserted until the driver has served the device.
            A::irq_set(irq, true);
        }
        if let Some(notification) = irq.notification.get() {
            self.signal(notification, 1 << irq.bit.get());
        }
    }
}

#[cfg(test)]
mod tests;

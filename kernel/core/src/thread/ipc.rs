//! Calls through gates and their replies.

use crate::Kernel;
use crate::arch::{Arch, Context};
use crate::object::*;
use crate::pool::Handle;
use crate::thread::Next;
use abi::Status;

/// Maximum number of undeliverable calls that a server skips per kernel entry.
pub(super) const MAX_REFUSED: u32 = 4;

impl<A: Arch> Kernel<A> {
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

    pub(super) fn dequeue_caller(&self, server: &Thread<A>, caller: Handle<Thread<A>>) {
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

    pub(super) fn deliver_events(thread: &Thread<A>, bits: u64) {
        let context = &thread.context;
        context.set_status(Status::Ok);
        context.set_result(0, abi::NOTIFICATION_BADGE);
        context.set_result(1, 0);
        context.set_result(2, bits);
    }
}

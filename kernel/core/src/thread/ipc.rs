//! Calls through gates and their replies.

use crate::arch::{Arch, Context};
use crate::object::*;
use crate::pool::Handle;
use crate::thread::Next;
use crate::{Kernel, Result};
use abi::Status;
use abi::args::GateReplyWait;

/// Maximum number of undeliverable calls that a server skips per kernel entry.
pub(super) const MAX_REFUSED: u32 = 2;

impl<A: Arch> Kernel<A> {
    fn enqueue_caller(&self, server: &Thread<A>, caller: Handle<Thread<A>>) {
        let thread = self.memory.at(caller);
        let last = server.callers.tail.replace(Some(caller));
        thread.queue.prev.set(last);
        thread.queue.next.set(None);
        match last {
            Some(last) => self.memory.at(last).queue.next.set(Some(caller)),
            None => server.callers.head.set(Some(caller)),
        }
    }

    pub(super) fn dequeue_caller(&self, server: &Thread<A>, caller: Handle<Thread<A>>) {
        let thread = self.memory.at(caller);
        let (prev, next) = (thread.queue.prev.take(), thread.queue.next.take());
        match prev {
            Some(prev) => self.memory.at(prev).queue.next.set(next),
            None => server.callers.head.set(next),
        }
        match next {
            Some(next) => self.memory.at(next).queue.prev.set(prev),
            None => server.callers.tail.set(prev),
        }
    }

    /// `GateCall`, or the call that reports a fault. Returns the server if it becomes the CPU's
    /// current thread directly.
    #[inline(always)]
    pub fn gate_call(
        &self,
        cpu: usize,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        gate: Handle<Gate<A>>,
        content: CallContent,
    ) -> Result<Option<Next<'_, A>>> {
        let gate = self.memory.get(gate).ok_or(Status::BadCapability)?;
        let server = gate.thread;
        let Some(partner) = self.memory.get(server) else { return Err(Status::Aborted) };
        let here = &self.cpus[cpu];
        debug_assert!(here.current.get() == Some(handle), "only the current thread calls");
        // Fast path: the server is receiving on this CPU and runs directly, on the caller's
        // scheduling context. The server is not the caller, whose state is `Ready`.
        if matches!(partner.state.get(), ThreadState::Receiving)
            && partner.cpu == cpu
            && let Some(sched) = thread.sched.get()
            // While this CPU waited for the lock, another one may have taken the donation back.
            && here.sched.get() == Some(sched)
        {
            if thread.donor.get().is_some() && self.donation_chain_is_full(thread, 1) {
                return Err(Status::Overflow);
            }
            self.deliver(thread, partner, gate.badge, content)?;
            thread.state.set(ThreadState::AwaitingReply { server, content });
            partner.callers.served.set(Some(handle));
            Self::transfer_sched(handle, thread, sched, partner);
            partner.state.set(ThreadState::Ready);
            here.current.set(Some(server));
            return Ok(Some(Next { thread: partner, vcpu: None }));
        }
        self.gate_call_slow((handle, thread), gate, partner, content)?;
        Ok(None)
    }

    #[inline(never)]
    fn gate_call_slow(
        &self,
        (handle, thread): (Handle<Thread<A>>, &Thread<A>),
        gate: &Gate<A>,
        partner: &Thread<A>,
        content: CallContent,
    ) -> Result<()> {
        let server = gate.thread;
        let state = partner.state.get();
        if server == handle || matches!(state, ThreadState::Stopped) {
            return Err(Status::Aborted);
        }
        if partner.cpu != thread.cpu && partner.own_sched.get().is_none() {
            return Err(Status::BadCpu);
        }
        if matches!(state, ThreadState::Receiving) {
            self.deliver(thread, partner, gate.badge, content)?;
            partner.callers.served.set(Some(handle));
            self.block(handle, thread, ThreadState::AwaitingReply { server, content });
            self.wake(server);
            return Ok(());
        }
        self.enqueue_caller(partner, handle);
        let badge = gate.badge;
        self.block(handle, thread, ThreadState::Sending { server, badge, content });
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
        args: GateReplyWait,
    ) -> Result<Option<Next<'_, A>>> {
        let mut next = None;
        if let Some(caller) = thread.callers.served.get() {
            if args.replies() {
                next = self.reply(cpu, handle, thread, caller)?;
            } else if args.waits() {
                // No reply will follow.
                thread.callers.served.set(None);
                self.abort_call(handle, caller);
            }
        }
        if !args.waits() {
            thread.context.set_status(Status::Ok);
            self.wake(handle);
            return Ok(next);
        }
        let pending = thread.bound.get().is_some() || thread.callers.head.get().is_some();
        if !pending || !self.receive_pending(handle, thread) {
            self.block(handle, thread, ThreadState::Receiving);
        }
        Ok(next)
    }

    /// Replies to `caller`. The reply to a fault message specifies if the faulting thread resumes
    /// or stops.
    #[inline(always)]
    fn reply(
        &self,
        cpu: usize,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        caller: Handle<Thread<A>>,
    ) -> Result<Option<Next<'_, A>>> {
        let Some(partner) = self.memory.get(caller) else {
            thread.callers.served.set(None);
            return Ok(None);
        };
        let is_message = matches!(
            partner.state.get(),
            ThreadState::AwaitingReply { content: CallContent::Message, .. }
        );
        if is_message {
            self.deliver(thread, partner, 0, CallContent::Message)?;
        }
        thread.callers.served.set(None);
        let here = &self.cpus[cpu];
        debug_assert!(here.current.get() == Some(handle), "only the current thread replies");
        // Fast path: resume the caller on its own scheduling context, without the scheduler.
        if is_message
            && thread.donor.get() == Some(caller)
            && let Some(sched) = thread.sched.get()
            && here.sched.get() == Some(sched)
        {
            thread.donor.set(None);
            thread.sched.set(thread.own_sched.get());
            partner.sched.set(Some(sched));
            partner.state.set(ThreadState::Ready);
            here.current.set(Some(caller));
            // A server with its own scheduling context is enqueued when it next receives.
            return Ok(Some(Next { thread: partner, vcpu: None }));
        }
        let resumed = is_message || thread.context.argument(2) == abi::FaultAction::Resume as u64;
        self.resume_caller(handle, thread, caller, resumed);
        here.resched.set(true);
        Ok(None)
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
            let Some(caller) = thread.callers.head.get() else { return false };
            let partner = self.memory.at(caller);
            let ThreadState::Sending { server, badge, content } = partner.state.get() else {
                return false;
            };
            self.dequeue_caller(thread, caller);
            if let Err(status) = self.deliver(partner, thread, badge, content) {
                self.return_donation(thread, caller);
                partner.context.set_status(status);
                self.wake(caller);
                continue;
            }
            partner.state.set(ThreadState::AwaitingReply { server, content });
            thread.callers.served.set(Some(caller));
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

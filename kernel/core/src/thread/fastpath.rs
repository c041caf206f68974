//! Fast path of IPC: a call, or a reply and wait, with the message in registers, between two
//! threads on one CPU.
//!
//! It is taken if the calling thread runs the server on its own scheduling context, or the server
//! returns that context to the caller and then waits: no scheduling decision, no message page, no
//! selector look-up. Otherwise it has no effect and the general path ([`Kernel::system_call`])
//! executes the system call. Both leave the same state (`thread/tests/fastpath.rs`).

use abi::args::{GateCall, GateReplyWait};
use abi::{Op, Tag, rights};

use crate::arch::{Arch, Context};
use crate::object::*;
use crate::pool::Handle;
use crate::{Kernel, count};

/// Thread that the fast path has made the CPU's current one, and its address space.
pub struct FastSwitch<'a, A: Arch> {
    /// The thread. It is in a system call.
    pub thread: &'a Thread<A>,
    /// Memory and I/O ports of its task.
    pub space: &'a Space<A>,
}

impl<A: Arch> Kernel<A> {
    /// Executes a system call of `thread`, the current thread of `cpu`, on the fast path. Returns
    /// the thread to be resumed, or `None`, without effect, if the call needs the general path.
    #[inline(always)]
    pub fn fast_ipc(
        &self,
        cpu: usize,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
    ) -> Option<FastSwitch<'_, A>> {
        const GATE_CALL: u64 = Op::GateCall as u64;
        const GATE_REPLY_WAIT: u64 = Op::GateReplyWait as u64;
        let tag = thread.context.argument(1);
        if !Tag::is_in_registers(tag) || self.has_work(cpu) {
            return None;
        }
        let next = match thread.context.operation() {
            GATE_CALL => self.fast_call(cpu, handle, thread, tag)?,
            GATE_REPLY_WAIT => self.fast_reply_wait(cpu, handle, thread, tag)?,
            _ => return None,
        };
        count(&self.counters.system_calls);
        Some(next)
    }

    #[inline(always)]
    fn fast_call(
        &self,
        cpu: usize,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        tag: u64,
    ) -> Option<FastSwitch<'_, A>> {
        let selector = GateCall::read(|index| thread.context.argument(index)).gate;
        let lookup = &thread.gate_lookup;
        let server = match self.memory.cached(lookup.server_thread.get()) {
            Some(server) if lookup.selector.get() == selector => server,
            _ => self.look_up_gate(handle, thread, selector)?,
        };
        let name = lookup.server.get()?;
        let sched = thread.sched.get()?;
        if !matches!(server.state.get(), ThreadState::Receiving)
            || thread.donor.get().is_some() && self.donation_chain_is_full(thread, 1)
        {
            return None;
        }
        let space = self.space_of(server)?;
        Self::deliver_registers(thread, server, tag);
        server.context.set_result(0, lookup.badge.get());
        server.context.set_status(abi::Status::Ok);
        thread
            .state
            .set(ThreadState::AwaitingReply { server: name, content: CallContent::Message });
        server.callers.served.set(Some(handle));
        server.caller_lookup.set(lookup.caller.get());
        Self::transfer_sched(handle, thread, sched, server);
        server.state.set(ThreadState::Ready);
        self.cpus[cpu].current.set(Some(name));
        Some(FastSwitch { thread: server, space })
    }

    #[inline(always)]
    fn fast_reply_wait(
        &self,
        cpu: usize,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        tag: u64,
    ) -> Option<FastSwitch<'_, A>> {
        let name = thread.donor.get()?;
        let sched = thread.sched.get()?;
        let caller = self.memory.cached(thread.caller_lookup.get())?;
        // The only thread that awaits a reply of this one is the caller being served.
        let ThreadState::AwaitingReply { server, content: CallContent::Message } =
            caller.state.get()
        else {
            return None;
        };
        let waits = server == handle
            && thread.callers.served.get() == Some(name)
            && thread.callers.head.get().is_none()
            && thread.bound.get().is_none();
        let args = GateReplyWait::read(|index| thread.context.argument(index));
        if !waits || !args.replies() || !args.waits() {
            return None;
        }
        let space = self.space_of(caller)?;
        Self::deliver_registers(thread, caller, tag);
        caller.context.set_result(0, 0);
        caller.context.set_status(abi::Status::Ok);
        thread.callers.served.set(None);
        thread.donor.set(None);
        // A server's own scheduling context is idle while it runs on a donated one.
        thread.sched.set(thread.own_sched.get());
        thread.state.set(ThreadState::Receiving);
        caller.sched.set(Some(sched));
        caller.state.set(ThreadState::Ready);
        self.cpus[cpu].current.set(Some(name));
        Some(FastSwitch { thread: caller, space })
    }

    /// Looks up a gate and caches it, if its server is on the caller's CPU.
    #[cold]
    #[inline(never)]
    fn look_up_gate(
        &self,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        selector: u64,
    ) -> Option<&Thread<A>> {
        let capability = self.capability(self.memory.get(thread.task)?, selector).ok()?;
        let ObjectRef::Gate(gate) = capability.object else { return None };
        let gate = self.memory.get(gate)?;
        let server = self.memory.get(gate.thread)?;
        if capability.rights & rights::CALL == 0 || server.cpu != thread.cpu {
            return None;
        }
        let lookup = &thread.gate_lookup;
        lookup.selector.set(selector);
        lookup.badge.set(gate.badge);
        lookup.server.set(Some(gate.thread));
        lookup.server_thread.set(self.memory.cache(gate.thread)?);
        lookup.caller.set(self.memory.cache(handle)?);
        Some(server)
    }

    /// Address space of a thread that can run.
    #[inline(always)]
    fn space_of(&self, thread: &Thread<A>) -> Option<&Space<A>> {
        let task = match self.memory.cached(thread.task_lookup.get()) {
            Some(task) => task,
            None => self.look_up_task(thread)?,
        };
        Some(&task.space)
    }

    #[cold]
    #[inline(never)]
    fn look_up_task(&self, thread: &Thread<A>) -> Option<&Task<A>> {
        thread.task_lookup.set(self.memory.cache(thread.task)?);
        self.memory.get(thread.task)
    }
}

//! Donation of scheduling contexts along call chains.

use crate::Kernel;
use crate::arch::Arch;
use crate::object::*;
use crate::pool::Handle;
use crate::sched::SchedContext;

/// Maximum length of a chain of servers that a new caller donates along, and maximum number of
/// callers searched for a donor.
const MAX_DONATION_HOPS: u32 = 64;
/// Maximum number of nested donations of one scheduling context.
pub(super) const MAX_DONORS: u32 = 64;

impl<A: Arch> Kernel<A> {
    /// Moves a caller's scheduling context to its server. If the context is not running, the caller
    /// of this function must update its holder.
    #[inline(always)]
    pub(super) fn transfer_sched(
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
    pub(super) fn donation_chain_is_full(&self, thread: &Thread<A>, further: u32) -> bool {
        let donor = |thread: &&Thread<A>| thread.donor.get().and_then(|name| self.memory.get(name));
        let chain = core::iter::successors(Some(thread), donor);
        chain.take((MAX_DONORS + 1) as usize).count() as u32 + further > MAX_DONORS + 1
    }

    /// Returns a donated scheduling context to `caller`, if `caller` is the server's donor.
    pub(super) fn return_donation(&self, server: &Thread<A>, caller: Handle<Thread<A>>) {
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
    pub(super) fn reclaim_donation(&self, handle: Handle<Thread<A>>, server: Handle<Thread<A>>) {
        let state = self.memory.at(handle).state.get();
        debug_assert!(state.server().is_none(), "else it would donate again at once");
        let (mut donor, mut next) = (handle, Some(server));
        while let Some(name) = next
            && let Some(server) = self.memory.get(name)
            && server.donor.get() == Some(donor)
        {
            if let Some(sched) = Self::revert_donation(server) {
                self.set_holder(sched, handle);
                if server.state.get().is_runnable() {
                    self.enqueue_thread(name, server);
                }
                return;
            }
            (donor, next) = (name, server.state.get().server());
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
        let thread = self.memory.at(holder);
        if thread.state.get().is_runnable() {
            self.enqueue_thread(holder, thread);
        }
    }

    /// Finds a scheduling context for a ready thread without one, among the threads that wait for
    /// it.
    pub(super) fn find_donor(&self, handle: Handle<Thread<A>>) {
        let cpu = self.memory.at(handle).cpu;
        let mut next = Some(handle);
        let mut visited = 0;
        while let Some(thread) = next.map(|name| self.memory.at(name)) {
            let mut candidate = thread.callers.first();
            while let Some(name) = candidate {
                let waiting = self.memory.at(name);
                if waiting.cpu == cpu && waiting.sched.get().is_some() {
                    return self.donate(name);
                }
                visited += 1;
                if visited == MAX_DONATION_HOPS {
                    return;
                }
                candidate = match waiting.state.get() {
                    ThreadState::Sending { .. } => waiting.queue.next.get(),
                    _ => thread.callers.head.get(),
                };
            }
            next = thread.callers.served.get();
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
            let Some(name) = self.memory.at(end).state.get().server() else { return };
            let server = self.memory.at(name);
            if server.cpu != *cpu || server.sched.get().is_some() {
                return;
            }
            end = name;
            if server.state.get().is_runnable() {
                if self.donation_chain_is_full(self.memory.at(caller), hops) {
                    return;
                }
                let mut donor = caller;
                for _ in 0..hops {
                    let thread = self.memory.at(donor);
                    let Some(server) = thread.state.get().server() else { return };
                    if let Some(sched) = thread.sched.get() {
                        Self::transfer_sched(donor, thread, sched, self.memory.at(server));
                        self.memory.at(sched).holder.set(Some(server));
                    }
                    donor = server;
                }
                return self.enqueue_thread(end, server);
            }
        }
    }
}

//! Scheduler: fixed priorities, budgets and timeouts, per CPU.
//!
//! # Invariants
//!
//! * A scheduling context is in exactly one state: idle, queued, running on its CPU, or depleted.
//! * It runs its `holder`: the thread bound to it, or a server that it was donated to. While the
//!   context is running, the holder is the CPU's `current`; the `holder` field is updated only when
//!   the context stops running, because calls and replies are frequent.
//! * Each CPU runs the queued context of highest priority that has budget, first come first served.
//!   A context that exhausts its budget goes to the tail of its priority (round robin) or waits for
//!   its next replenishment ([`refills`]).
//! * A server whose donor has exhausted its budget continues on its own context, if it has one.

use core::cell::Cell;

use crate::Kernel;
use crate::arch::{Arch, ArchVcpu as _};
use crate::object::{Task, Thread};
use crate::pool::Handle;
use crate::tree::Tree;

pub use context::{SchedContext, SchedState};

pub mod context;
mod queues;
pub mod refills;
#[cfg(test)]
mod testing;
mod timeouts;

/// Number of priorities.
pub const PRIORITIES: usize = 64;

type Link<T> = Cell<Option<Handle<T>>>;

struct Queue<A: Arch> {
    head: Link<SchedContext<A>>,
    tail: Link<SchedContext<A>>,
}

/// Scheduler state of a CPU.
pub struct Cpu<A: Arch> {
    /// Running thread, or the one to be resumed on kernel exit.
    pub current: Link<Thread<A>>,
    /// Scheduling context that `current` runs on.
    pub sched: Link<SchedContext<A>>,
    /// Task whose address space is loaded. The CPU that sets it loads the root table at once.
    pub space: Link<Task<A>>,
    /// Reschedule before returning to user mode.
    pub resched: Cell<bool>,
    /// The current thread may wait without blocking: result of [`Kernel::may_wait`].
    pub waits: Cell<bool>,
    /// Time up to which the running context has been charged.
    charged: Cell<u64>,
    queues: [Queue<A>; PRIORITIES],
    ready: Cell<u64>,
    timeouts: Tree<Thread<A>>,
    refills: Tree<SchedContext<A>>,
    /// Earliest timeout or replenishment, in ticks.
    next_event: Cell<u64>,
    /// End of the running context's slice or budget; `u64::MAX` if not enforced.
    slice_end: Cell<u64>,
}

impl<A: Arch> Cpu<A> {
    /// An idle CPU.
    pub(crate) const fn new() -> Self {
        Self {
            current: Cell::new(None),
            sched: Cell::new(None),
            space: Cell::new(None),
            resched: Cell::new(false),
            waits: Cell::new(false),
            charged: Cell::new(0),
            queues: [const { Queue { head: Cell::new(None), tail: Cell::new(None) } }; PRIORITIES],
            ready: Cell::new(0),
            timeouts: Tree::new(),
            refills: Tree::new(),
            next_event: Cell::new(u64::MAX),
            slice_end: Cell::new(u64::MAX),
        }
    }

    /// Requests a timer interrupt as soon as possible.
    pub(crate) fn arm_immediately(&self) {
        self.next_event.set(0);
    }

    /// Latest time for the next timer interrupt of this CPU.
    #[inline(always)]
    pub fn deadline(&self) -> u64 {
        self.next_event.get().min(self.slice_end.get())
    }
}

impl<A: Arch> Kernel<A> {
    /// Requests rescheduling of a CPU.
    pub fn request_schedule(&self, cpu: usize) {
        self.cpus[cpu].resched.set(true);
        self.interrupt_if_other(cpu);
    }

    /// Sends an IPI to another CPU whose scheduler state or timer has changed.
    #[inline(always)]
    pub(crate) fn interrupt_if_other(&self, cpu: usize) {
        if cpu != A::this_cpu() {
            A::kick(cpu);
        }
    }

    /// Enqueues an idle context whose holder has become runnable.
    pub fn enqueue(&self, handle: Handle<SchedContext<A>>) {
        let sched = self.memory.at(handle);
        if sched.state.get() != SchedState::Idle {
            return;
        }
        let now = A::now();
        if sched.remaining.get() == 0 || sched.period.get() != 0 {
            sched.replenish(now);
        }
        if sched.remaining.get() == 0 {
            return self.deplete(handle, sched);
        }
        let cpu = &self.cpus[sched.cpu.get()];
        self.push(cpu, (handle, sched), false);
        match cpu.sched.get().and_then(|running| self.memory.get(running)) {
            // One that may wait must not be left waiting.
            Some(running) if running.priority.get() > sched.priority.get() && !cpu.waits.get() => {}
            // A running context of equal priority keeps its slice, whose end must now be enforced.
            Some(running) if running.priority.get() == sched.priority.get() => {
                let end = cpu.charged.get().saturating_add(running.remaining.get());
                if end <= now {
                    self.request_schedule(sched.cpu.get());
                } else if end < cpu.slice_end.get() {
                    cpu.slice_end.set(end);
                    self.interrupt_if_other(sched.cpu.get());
                }
            }
            _ => self.request_schedule(sched.cpu.get()),
        }
    }

    /// Suspends a context until its next replenishment, unless its holder reverts to its own.
    fn deplete(&self, handle: Handle<SchedContext<A>>, sched: &SchedContext<A>) {
        if !self.revert_depleted_donation(handle, sched) {
            sched.refill.set(sched.refills.next());
            sched.state.set(SchedState::Depleted);
            self.cpus[sched.cpu.get()].refills.insert(&self.memory, handle);
            self.update_next_event(sched.cpu.get());
        }
    }

    /// Handles the end of the slice or budget of a context whose holder is still runnable.
    fn end_of_run(&self, handle: Handle<SchedContext<A>>, sched: &SchedContext<A>, now: u64) {
        sched.account_run();
        sched.replenish(now);
        if sched.remaining.get() != 0 {
            self.push(&self.cpus[sched.cpu.get()], (handle, sched), false);
        } else {
            self.deplete(handle, sched);
        }
    }

    /// Reverts a server with its own context from a depleted donation: other callers wait for it,
    /// too. Returns whether it has done so.
    fn revert_depleted_donation(
        &self,
        handle: Handle<SchedContext<A>>,
        sched: &SchedContext<A>,
    ) -> bool {
        let Some(name) = sched.holder.get() else { return false };
        let server = self.memory.at(name);
        let has_own = server.own_sched.get().is_some_and(|own| self.memory.get(own).is_some());
        let Some(donor) = server.donor.get().filter(|_| has_own) else { return false };
        let _ = Self::revert_donation(server);
        self.set_holder(handle, donor);
        self.enqueue_thread(name, server);
        true
    }

    /// Dequeues a context whose holder is no longer runnable.
    #[inline(always)]
    pub fn dequeue(&self, handle: Handle<SchedContext<A>>) {
        if let Some(sched) = self.memory.get(handle)
            && sched.state.get() != SchedState::Idle
        {
            self.dequeue_slow(handle, sched);
        }
    }

    #[inline(never)]
    fn dequeue_slow(&self, handle: Handle<SchedContext<A>>, sched: &SchedContext<A>) {
        if sched.state.get() == SchedState::Running {
            let cpu = &self.cpus[sched.cpu.get()];
            self.charge(sched.cpu.get());
            sched.account_run();
            sched.holder.set(cpu.current.get());
            cpu.sched.set(None);
        }
        self.remove_from_queue(handle);
    }

    /// Charges the running context for the time since the last charge, and returns it.
    #[inline(always)]
    fn charge(&self, cpu: usize) -> Option<&SchedContext<A>> {
        let cpu = &self.cpus[cpu];
        let now = A::now();
        let elapsed = now.saturating_sub(cpu.charged.replace(now));
        let sched = self.memory.get(cpu.sched.get()?)?;
        sched.remaining.set(sched.remaining.get().saturating_sub(elapsed));
        sched.used.set(sched.used.get().wrapping_add(elapsed));
        Some(sched)
    }

    /// Returns whether the current thread may wait for an interrupt of its CPU without blocking: no
    /// other thread is ready there, and its time is not limited. After that, a thread that becomes
    /// ready interrupts the wait even if it is of lower priority. The time of the wait is passed to
    /// [`Kernel::exclude_wait`].
    #[inline(always)]
    pub fn may_wait(&self, cpu: usize) -> bool {
        let cpu = &self.cpus[cpu];
        // A context with a period has an end of its slice.
        cpu.waits.set(cpu.ready.get() == 0 && cpu.slice_end.get() == u64::MAX);
        cpu.waits.get()
    }

    /// Excludes a wait of the current thread from the time that its context is charged.
    pub fn exclude_wait(&self, cpu: usize, ticks: u64) {
        let charged = &self.cpus[cpu].charged;
        charged.set(charged.get().saturating_add(ticks));
    }

    /// Yields the rest of the running context's slice; with a period, it counts as used.
    pub fn yield_now(&self, cpu: usize) {
        if let Some(sched) = self.charge(cpu) {
            sched.accounted.set(sched.accounted.get().wrapping_sub(sched.remaining.take()));
        }
        self.cpus[cpu].resched.set(true);
    }

    /// Picks and returns the next thread of a CPU. Called before the kernel exits if `resched` is
    /// set.
    #[inline(always)]
    pub fn schedule(&self, index: usize) -> Option<&Thread<A>> {
        let cpu = &self.cpus[index];
        cpu.resched.set(false);
        self.counters.switches.set(self.counters.switches.get() + 1);
        let (mut runnable, mut before, mut next) = (None, None, None);
        if let (Some(sched), Some(handle)) = (self.charge(index), cpu.sched.take()) {
            before = Some((handle, sched));
            sched.state.set(SchedState::Idle);
            sched.holder.set(cpu.current.get());
            let is_runnable = |thread: &Thread<A>| thread.state.get().is_runnable();
            let current = cpu.current.get();
            runnable = current.filter(|&name| self.memory.get(name).is_some_and(is_runnable));
            if runnable.is_some() && sched.remaining.get() == 0 {
                self.end_of_run(handle, sched, cpu.charged.get());
            } else if runnable.is_some() {
                self.push(cpu, (handle, sched), true);
            }
        }
        cpu.current.set(None);
        cpu.slice_end.set(u64::MAX);
        while cpu.ready.get() != 0 {
            let priority = 63 - cpu.ready.get().leading_zeros() as usize;
            let Some(handle) = cpu.queues[priority].head.get() else { break };
            let sched = self.memory.at(handle);
            self.pop(cpu, priority, sched);
            let Some(holder) = sched.holder.get() else { continue };
            next = self.memory.get(holder).filter(|thread| thread.state.get().is_runnable());
            if next.is_none() {
                continue;
            }
            sched.state.set(SchedState::Running);
            cpu.sched.set(Some(handle));
            cpu.current.set(Some(holder));
            if sched.period.get() != 0 && before.is_none_or(|(before, _)| before != handle) {
                sched.replenish(cpu.charged.get());
            }
            // Round robin needs the timer only if another context of the same priority is queued.
            if sched.period.get() != 0 || cpu.queues[priority].head.get().is_some() {
                cpu.slice_end.set(cpu.charged.get().saturating_add(sched.remaining.get()));
            }
            break;
        }
        if let Some((before, sched)) = before
            && cpu.sched.get() != Some(before)
        {
            sched.account_run();
        }
        if let Some(preempted) = runnable.filter(|&holder| cpu.current.get() != Some(holder)) {
            self.preempted(preempted);
        }
        next
    }

    /// Records preemption of a runnable thread.
    #[cold]
    fn preempted(&self, handle: Handle<Thread<A>>) {
        let vcpu = self.memory.at(handle).state.get().vcpu();
        if let Some(vcpu) = vcpu.and_then(|vcpu| self.memory.get(vcpu)) {
            vcpu.arch.count_preemption();
        }
    }
}

#[cfg(test)]
mod tests;

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

use abi::{SHARE_OF_CPU, Status};

use crate::Kernel;
use crate::arch::{Arch, Context};
use crate::object::{Task, Thread, ThreadState};
use crate::pool::{Factory, Handle};
use crate::tree::{Keyed, Links, Tree};

use refills::Refills;

pub mod refills;

/// Number of priorities.
pub const PRIORITIES: usize = 64;
/// Minimum budget and period in ns: below this, timer interrupts would consume the CPU.
pub const MIN_BUDGET_NS: u64 = 20_000;
/// Maximum number of timeouts and replenishments handled per timer interrupt.
const MAX_EXPIRED: u32 = 8;
/// Maximum period in ns.
pub const MAX_PERIOD_NS: u64 = 10_000_000_000;

type Link<T> = Cell<Option<Handle<T>>>;

/// State of a scheduling context.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SchedState {
    /// Its holder is not runnable, or it has no holder.
    Idle,
    /// In a ready queue.
    Queued,
    /// Dispatched on its CPU.
    Running,
    /// Out of budget until its next replenishment.
    Depleted,
}

/// Scheduling context: the right to CPU time.
pub struct SchedContext<A: Arch> {
    /// Number of capabilities to this context.
    pub caps: Cell<u32>,
    /// Priority, 0 to 63; 63 is the highest.
    pub priority: Cell<usize>,
    /// Upper limit of the priority.
    pub max_priority: u64,
    /// Budget per period, in ticks.
    pub budget: Cell<u64>,
    /// Period, in ticks; 0: round robin with `budget` as time slice.
    pub period: Cell<u64>,
    /// Ticks until the time slice or the usable budget ends.
    pub remaining: Cell<u64>,
    /// CPU time used in total, in ticks.
    used: Cell<u64>,
    /// With a period: part of `used` that has been charged to the refills.
    accounted: Cell<u64>,
    /// With a period: parts of the budget and the times from which they are usable.
    refills: Refills,
    /// Depleted: time of the next replenishment, in ticks.
    pub refill: Cell<u64>,
    /// Factory whose share of CPU time this context is charged to; `None` if unlimited.
    pub share_owner: Option<Handle<Factory>>,
    /// CPU of the bound thread.
    pub cpu: Cell<usize>,
    /// Bound thread.
    pub owner: Link<Thread<A>>,
    /// Thread that runs on it; valid unless the state is `Running`.
    pub holder: Link<Thread<A>>,
    /// Current state.
    pub state: Cell<SchedState>,
    /// Next context in the ready queue.
    pub next: Link<SchedContext<A>>,
    /// Previous context in the ready queue.
    pub prev: Link<SchedContext<A>>,
    /// Links in the CPU's tree of replenishments.
    pub links: Links<SchedContext<A>>,
}

impl<A: Arch> SchedContext<A> {
    /// With a period: charges the time used since the last call to the refills.
    #[inline(always)]
    fn account_run(&self) {
        if self.period.get() != 0 {
            self.end_refill_run();
        }
    }

    #[inline(never)]
    fn end_refill_run(&self) {
        let used = self.used.get().wrapping_sub(self.accounted.replace(self.used.get()));
        if used != 0 {
            self.refills.end(used, self.period.get());
        }
    }

    /// Sets `remaining`: to a full time slice, or with a period to the budget usable at `now`.
    #[inline(never)]
    fn replenish(&self, now: u64) {
        self.remaining.set(match self.period.get() {
            0 => self.budget.get(),
            _ => self.refills.begin(now),
        });
    }
}

impl<A: Arch> Keyed for SchedContext<A> {
    type Key = (u64, u64);
    fn key(&self, handle: Handle<Self>) -> (u64, u64) {
        (self.refill.get(), handle.id())
    }
    fn links(&self) -> &Links<Self> {
        &self.links
    }
}

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
    /// Task whose address space is loaded.
    pub space: Link<Task<A>>,
    /// Reschedule before returning to user mode.
    pub resched: Cell<bool>,
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
    pub const fn new() -> Self {
        Self {
            current: Cell::new(None),
            sched: Cell::new(None),
            space: Cell::new(None),
            resched: Cell::new(false),
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

impl<A: Arch> Default for Cpu<A> {
    fn default() -> Self {
        Self::new()
    }
}

impl<A: Arch> Kernel<A> {
    /// Validates and converts priority, budget and period (ns). Fails with `BadRights` if the
    /// priority exceeds `max_priority`.
    fn sched_parameters(
        priority: u64,
        budget: u64,
        period: u64,
        max_priority: u64,
    ) -> Result<(usize, u64, u64), Status> {
        let period = if period == budget { 0 } else { period };
        let valid = priority < PRIORITIES as u64
            && (MIN_BUDGET_NS..=MAX_PERIOD_NS).contains(&budget)
            && (period == 0 || (budget..=MAX_PERIOD_NS).contains(&period));
        if !valid {
            return Err(Status::BadArgument);
        }
        if priority > max_priority {
            return Err(Status::BadRights);
        }
        Ok((priority as usize, A::ticks(budget), A::ticks(period)))
    }

    /// Share of a CPU that `budget` per `period` (ticks) amounts to, in units of 1 /
    /// [`SHARE_OF_CPU`], rounded up; a whole CPU for round robin.
    fn share(budget: u64, period: u64) -> u64 {
        match period {
            0 => SHARE_OF_CPU,
            _ => {
                (u128::from(budget) * u128::from(SHARE_OF_CPU)).div_ceil(u128::from(period)) as u64
            }
        }
    }

    /// Creates an unbound scheduling context. Fails with `BadRights` if the priority exceeds the
    /// factory's maximum, and with `NoQuota` if the factory's share of CPU time is exceeded.
    pub fn new_sched(
        &self,
        factory: Option<Handle<Factory>>,
        priority: u64,
        budget: u64,
        period: u64,
    ) -> Result<Handle<SchedContext<A>>, Status> {
        let account = self.memory.factory(factory)?;
        let (priority, budget, period) =
            Self::sched_parameters(priority, budget, period, account.max_priority)?;
        let (share, share_owner) = (Self::share(budget, period), self.memory.share_owner(factory));
        self.memory.exchange_share(share_owner, 0, share)?;
        let sched = SchedContext {
            caps: Cell::new(0),
            priority: Cell::new(priority),
            max_priority: account.max_priority,
            budget: Cell::new(budget),
            period: Cell::new(period),
            remaining: Cell::new(0),
            used: Cell::new(0),
            accounted: Cell::new(0),
            refills: Refills::new(budget, A::now()),
            refill: Cell::new(0),
            share_owner,
            cpu: Cell::new(0),
            owner: Cell::new(None),
            holder: Cell::new(None),
            state: Cell::new(SchedState::Idle),
            next: Cell::new(None),
            prev: Cell::new(None),
            links: Links::new(),
        };
        let made = self.memory.alloc(factory, sched);
        made.inspect_err(|_| self.memory.return_share(share_owner, share))
    }

    /// CPU time used so far, in ticks.
    pub fn used(&self, handle: Handle<SchedContext<A>>) -> u64 {
        let sched = self.memory.at(handle);
        if sched.state.get() == SchedState::Running {
            self.charge(sched.cpu.get());
        }
        sched.used.get()
    }

    /// Changes priority, budget and period. Time used so far stays charged. Fails with `NoQuota` if
    /// the share of CPU time is exceeded.
    pub fn change_sched(
        &self,
        handle: Handle<SchedContext<A>>,
        priority: u64,
        budget: u64,
        period: u64,
    ) -> Result<(), Status> {
        let sched = self.memory.at(handle);
        let (priority, budget, period) =
            Self::sched_parameters(priority, budget, period, sched.max_priority)?;
        let (before, old) = (sched.period.get(), sched.budget.get());
        self.memory.exchange_share(
            sched.share_owner,
            Self::share(old, before),
            Self::share(budget, period),
        )?;
        let state = sched.state.get();
        if state == SchedState::Running {
            // Time used until now is charged to the old budget.
            self.charge(sched.cpu.get());
        }
        if matches!(state, SchedState::Queued | SchedState::Depleted) {
            self.remove_from_queue(handle);
        }
        let now = A::now();
        sched.account_run();
        match (before, period) {
            (_, 0) => {}
            // Round robin keeps no refills: the whole budget counts as used.
            (0, _) => {
                sched.refills.change((sched.refills.total(), 0), (0, 0), now);
                sched.refills.change((0, budget), (period, period), now);
                sched.accounted.set(sched.used.get());
            }
            _ => sched.refills.change((old, budget), (before, period), now),
        }
        sched.priority.set(priority);
        sched.budget.set(budget);
        sched.period.set(period);
        sched.replenish(now);
        match state {
            SchedState::Idle => {}
            SchedState::Running => self.request_schedule(sched.cpu.get()),
            SchedState::Queued | SchedState::Depleted => self.enqueue(handle),
        }
        Ok(())
    }

    /// Requests rescheduling of a CPU.
    pub fn request_schedule(&self, cpu: usize) {
        self.cpus[cpu].resched.set(true);
        self.interrupt_if_other(cpu);
    }

    /// Sends an IPI to another CPU whose scheduler state or timer has changed.
    fn interrupt_if_other(&self, cpu: usize) {
        if cpu != A::this_cpu() {
            A::kick(cpu);
        }
    }

    fn push(&self, handle: Handle<SchedContext<A>>, front: bool) {
        let sched = self.memory.at(handle);
        let cpu = &self.cpus[sched.cpu.get()];
        let queue = &cpu.queues[sched.priority.get()];
        let (near, far) =
            if front { (&queue.head, &queue.tail) } else { (&queue.tail, &queue.head) };
        let neighbour = near.replace(Some(handle));
        let (before, after) = if front { (None, neighbour) } else { (neighbour, None) };
        sched.prev.set(before);
        sched.next.set(after);
        match neighbour.map(|neighbour| self.memory.at(neighbour)) {
            Some(neighbour) if front => neighbour.prev.set(Some(handle)),
            Some(neighbour) => neighbour.next.set(Some(handle)),
            None => far.set(Some(handle)),
        }
        sched.state.set(SchedState::Queued);
        cpu.ready.set(cpu.ready.get() | 1 << sched.priority.get());
    }

    /// Removes `sched`, the first context of a ready queue.
    #[inline(always)]
    fn pop(&self, cpu: &Cpu<A>, priority: usize, sched: &SchedContext<A>) {
        let queue = &cpu.queues[priority];
        let next = sched.next.get();
        queue.head.set(next);
        match next {
            Some(next) => self.memory.at(next).prev.set(None),
            None => {
                queue.tail.set(None);
                cpu.ready.set(cpu.ready.get() & !(1 << priority));
            }
        }
        sched.state.set(SchedState::Idle);
    }

    /// Removes a context from the ready queue or the tree of replenishments.
    fn remove_from_queue(&self, handle: Handle<SchedContext<A>>) {
        let sched = self.memory.at(handle);
        let cpu = &self.cpus[sched.cpu.get()];
        match sched.state.get() {
            SchedState::Queued => {
                let queue = &cpu.queues[sched.priority.get()];
                match sched.prev.get() {
                    Some(prev) => self.memory.at(prev).next.set(sched.next.get()),
                    None => queue.head.set(sched.next.get()),
                }
                match sched.next.get() {
                    Some(next) => self.memory.at(next).prev.set(sched.prev.get()),
                    None => queue.tail.set(sched.prev.get()),
                }
                if queue.head.get().is_none() {
                    cpu.ready.set(cpu.ready.get() & !(1 << sched.priority.get()));
                }
            }
            SchedState::Depleted => {
                cpu.refills.remove(&self.memory, handle);
                self.update_next_event(sched.cpu.get());
            }
            SchedState::Running => self.request_schedule(sched.cpu.get()),
            SchedState::Idle => {}
        }
        sched.state.set(SchedState::Idle);
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
            self.deplete(handle, sched);
            return;
        }
        self.push(handle, false);
        let cpu = &self.cpus[sched.cpu.get()];
        match cpu.sched.get().and_then(|running| self.memory.get(running)) {
            Some(running) if running.priority.get() > sched.priority.get() => {}
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

    /// Suspends a context until its next replenishment.
    fn deplete(&self, handle: Handle<SchedContext<A>>, sched: &SchedContext<A>) {
        sched.refill.set(sched.refills.next());
        sched.state.set(SchedState::Depleted);
        self.cpus[sched.cpu.get()].refills.insert(&self.memory, handle);
        self.update_next_event(sched.cpu.get());
    }

    /// Handles the end of the slice or budget of a context whose holder is still runnable.
    fn end_of_run(&self, handle: Handle<SchedContext<A>>, sched: &SchedContext<A>, now: u64) {
        sched.account_run();
        sched.replenish(now);
        if sched.remaining.get() != 0 {
            self.push(handle, false);
        } else if !self.revert_depleted_donation(handle, sched) {
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
        let Some(donor) = server.donor.get() else { return false };
        if server.own_sched.get().is_none_or(|own| self.memory.get(own).is_none()) {
            return false;
        }
        let _ = Self::revert_donation(server);
        self.set_holder(handle, donor);
        self.wake(name);
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

    /// Yields the rest of the running context's slice; with a period, it counts as used.
    pub fn yield_now(&self, cpu: usize) {
        if let Some(sched) = self.charge(cpu) {
            sched.accounted.set(sched.accounted.get().wrapping_sub(sched.remaining.take()));
        }
        self.cpus[cpu].resched.set(true);
    }

    /// Picks the next thread of a CPU. Called before the kernel exits if `resched` is set.
    #[inline(always)]
    pub fn schedule(&self, index: usize) {
        let cpu = &self.cpus[index];
        cpu.resched.set(false);
        self.counters.switches.set(self.counters.switches.get() + 1);
        let (mut runnable, mut before) = (None, None);
        if let (Some(sched), Some(handle)) = (self.charge(index), cpu.sched.take()) {
            before = Some((handle, sched));
            sched.state.set(SchedState::Idle);
            sched.holder.set(cpu.current.get());
            runnable = cpu.current.get().filter(|&holder| {
                let holder = self.memory.get(holder);
                holder.is_some_and(|holder| holder.state.get() == ThreadState::Ready)
            });
            if runnable.is_some() && sched.remaining.get() == 0 {
                self.end_of_run(handle, sched, cpu.charged.get());
            } else if runnable.is_some() {
                self.push(handle, true);
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
            if self.memory.get(holder).is_none_or(|holder| holder.state.get() != ThreadState::Ready)
            {
                continue;
            }
            sched.state.set(SchedState::Running);
            cpu.sched.set(Some(handle));
            cpu.current.set(Some(holder));
            if sched.period.get() != 0 && before.is_none_or(|(before, _)| before != handle) {
                sched.replenish(cpu.charged.get());
            }
            // Round robin needs the timer only if another context of the same priority is queued.
            let contested = cpu.queues[priority].head.get().is_some();
            if sched.period.get() != 0 || contested {
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
    }

    /// Records preemption of a runnable thread.
    #[cold]
    fn preempted(&self, handle: Handle<Thread<A>>) {
        let vcpu = self.memory.at(handle).vcpu.get();
        if let Some(vcpu) = vcpu.and_then(|vcpu| self.memory.get(vcpu)) {
            A::vcpu_preempted(&vcpu.arch);
        }
    }

    // ---- timeouts ----------------------------------------------------------------------------

    fn update_next_event(&self, index: usize) {
        let cpu = &self.cpus[index];
        let before = cpu.next_event.get();
        let timeout = cpu.timeouts.first(&self.memory).map(|t| self.memory.at(t).deadline.get());
        let refill = cpu.refills.first(&self.memory).map(|s| self.memory.at(s).refill.get());
        let next = timeout.unwrap_or(u64::MAX).min(refill.unwrap_or(u64::MAX));
        cpu.next_event.set(next);
        // The other CPU's timer is armed for the previous event, or not armed.
        if next < before {
            self.interrupt_if_other(index);
        }
    }

    /// Arms a thread's timeout; `u64::MAX` means none.
    #[inline(always)]
    pub fn set_timeout(&self, handle: Handle<Thread<A>>, thread: &Thread<A>, deadline: u64) {
        if deadline != u64::MAX {
            self.arm_timeout(handle, thread, deadline);
        }
    }

    #[inline(never)]
    fn arm_timeout(&self, handle: Handle<Thread<A>>, thread: &Thread<A>, deadline: u64) {
        thread.deadline.set(deadline);
        self.cpus[thread.cpu].timeouts.insert(&self.memory, handle);
        self.update_next_event(thread.cpu);
    }

    /// Disarms a thread's timeout, if it has one.
    #[inline(always)]
    pub fn clear_timeout(&self, handle: Handle<Thread<A>>, thread: &Thread<A>) {
        if thread.deadline.get() != u64::MAX {
            self.disarm_timeout(handle, thread);
        }
    }

    #[inline(never)]
    fn disarm_timeout(&self, handle: Handle<Thread<A>>, thread: &Thread<A>) {
        self.cpus[thread.cpu].timeouts.remove(&self.memory, handle);
        thread.deadline.set(u64::MAX);
        self.update_next_event(thread.cpu);
    }

    /// Handles a timer interrupt: expired timeouts, due replenishments, end of slice. If more than
    /// [`MAX_EXPIRED`] events are due, the timer interrupts again.
    pub fn timer(&self, index: usize) {
        let cpu = &self.cpus[index];
        let now = A::now();
        for _ in 0..MAX_EXPIRED {
            if let Some(handle) = cpu.timeouts.first(&self.memory)
                && self.memory.at(handle).deadline.get() <= now
            {
                self.time_out(handle);
            } else if let Some(handle) = cpu.refills.first(&self.memory)
                && self.memory.at(handle).refill.get() <= now
            {
                self.remove_from_queue(handle);
                self.enqueue(handle);
            } else {
                break;
            }
        }
        if cpu.slice_end.get() <= now {
            cpu.resched.set(true);
        }
        self.update_next_event(index);
    }

    fn time_out(&self, handle: Handle<Thread<A>>) {
        let thread = self.memory.at(handle);
        self.end_wait(handle, thread);
        if thread.vcpu.get().is_none() {
            thread.context.set_status(Status::Timeout);
            thread.context.set_result(0, 0);
        }
        self.wake(handle);
    }

    // ---- binding -----------------------------------------------------------------------------

    /// Binds a scheduling context to a thread.
    pub fn bind_sched(
        &self,
        thread_handle: Handle<Thread<A>>,
        handle: Handle<SchedContext<A>>,
    ) -> Result<(), Status> {
        let thread = self.memory.at(thread_handle);
        let sched = self.memory.at(handle);
        if thread.own_sched.get().is_some_and(|own| self.memory.get(own).is_some())
            || sched.owner.get().is_some_and(|owner| self.memory.get(owner).is_some())
        {
            return Err(Status::Busy);
        }
        sched.cpu.set(thread.cpu);
        sched.owner.set(Some(thread_handle));
        sched.holder.set(Some(thread_handle));
        thread.own_sched.set(Some(handle));
        let server = thread.server.get().and_then(|server| self.memory.get(server));
        let has_donated = server.is_some_and(|server| server.donor.get() == Some(thread_handle));
        // A thread that runs on a donated context, or has passed that on, keeps its own in reserve.
        if thread.sched.get().is_none() && !has_donated {
            thread.sched.set(Some(handle));
            match thread.state.get() {
                ThreadState::Ready => self.enqueue(handle),
                ThreadState::Calling => self.donate(thread_handle),
                _ => {}
            }
        }
        Ok(())
    }

    /// Destroys a scheduling context; its holder stops running on it.
    pub(crate) fn destroy_sched(&self, handle: Handle<SchedContext<A>>) {
        self.dequeue(handle);
        let sched = self.memory.at(handle);
        if let Some(owner) = sched.owner.get().and_then(|owner| self.memory.get(owner)) {
            owner.own_sched.set(None);
        }
        if let Some(holder) = sched.holder.get()
            && self.memory.get(holder).is_some_and(|thread| thread.sched.get() == Some(handle))
        {
            self.donor_destroyed(holder);
        }
        let share = Self::share(sched.budget.get(), sched.period.get());
        self.memory.return_share(sched.share_owner, share);
        self.memory.free(handle);
    }
}

#[cfg(test)]
mod testing {
    use super::*;

    impl<A: Arch> Kernel<A> {
        /// Checks the queues and trees of a CPU.
        pub fn check_queues(&self, index: usize) {
            let cpu = &self.cpus[index];
            let mut queued = 0;
            for (priority, queue) in cpu.queues.iter().enumerate() {
                let (mut next, mut before) = (queue.head.get(), None);
                assert_eq!(cpu.ready.get() >> priority & 1 != 0, next.is_some());
                while let Some(handle) = next {
                    let sched = self.memory.at(handle);
                    assert_eq!(sched.state.get(), SchedState::Queued);
                    assert_eq!((sched.priority.get(), sched.cpu.get()), (priority, index));
                    assert!(sched.prev.get() == before && sched.remaining.get() > 0);
                    (before, next) = (next, sched.next.get());
                    queued += 1;
                }
                assert!(queue.tail.get() == before);
            }
            let all = crate::pool::testing::all::<SchedContext<A>>(&self.memory);
            let mut waiting = 0;
            let mut earliest = u64::MAX;
            for handle in all {
                let sched = self.memory.at(handle);
                if sched.cpu.get() == index && sched.state.get() == SchedState::Queued {
                    queued -= 1;
                }
                if sched.cpu.get() == index && sched.state.get() == SchedState::Depleted {
                    let key = sched.key(handle);
                    assert!(cpu.refills.at_most(&self.memory, key) == Some(handle));
                    earliest = earliest.min(sched.refill.get());
                    waiting += 1;
                }
            }
            assert_eq!(queued, 0, "queued contexts are in their queue, once");
            assert_eq!(waiting == 0, cpu.refills.any().is_none());
            let mut sleeping = false;
            for handle in crate::pool::testing::all::<Thread<A>>(&self.memory) {
                let thread = self.memory.at(handle);
                if thread.cpu == index && thread.deadline.get() != u64::MAX {
                    let key = thread.key(handle);
                    assert!(cpu.timeouts.at_most(&self.memory, key) == Some(handle));
                    earliest = earliest.min(thread.deadline.get());
                    sleeping = true;
                }
            }
            assert_eq!(sleeping, cpu.timeouts.any().is_some());
            // 0: an immediate interrupt has been requested and has not arrived yet.
            let at_once = cpu.next_event.get() == 0;
            assert!(at_once || cpu.next_event.get() == earliest);
        }
    }
}

#[cfg(test)]
mod tests;

//! Scheduling: fixed priorities, budgets, and timeouts, per CPU.
//!
//! # Invariants
//!
//! * A scheduling context is in exactly one state: idle, queued, running on its CPU, or depleted.
//! * It runs its `holder`: the thread bound to it, or the server that works for that thread. While it runs, that
//!   is the CPU's `current`, and the field is brought up to date when it stops: calls and replies are frequent.
//! * On every CPU the queued context of the highest priority that has budget runs, first come
//!   first served; a context that has used up its budget goes to the tail of its priority (round robin) or
//!   waits until time that it used comes back ([`refills`]).
//! * A server whose lender has used up its budget goes on with its own time, if it has any.

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
/// Shortest budget and period: below this the timer would take all the time. In nanoseconds.
pub const MIN_BUDGET_NS: u64 = 20_000;
/// Timeouts and refills that one interrupt of the timer takes care of.
const MAX_EXPIRED: u32 = 8;
/// Longest period. In nanoseconds.
pub const MAX_PERIOD_NS: u64 = 10_000_000_000;

type Link<T> = Cell<Option<Handle<T>>>;

/// Where a scheduling context is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SchedState {
    /// Its holder does not want to run, or it has none.
    Idle,
    /// In a ready queue.
    Queued,
    /// Chosen by its CPU.
    Running,
    /// Waits for time that it used to come back.
    Depleted,
}

/// Right to CPU time.
pub struct SchedContext<A: Arch> {
    /// Capabilities to it.
    pub caps: Cell<u32>,
    /// Priority, 63 first.
    pub priority: Cell<usize>,
    /// Highest priority that it may be given.
    pub max_priority: u64,
    /// Budget per period, in ticks.
    pub budget: Cell<u64>,
    /// Period, in ticks; 0: round robin with `budget` as time slice.
    pub period: Cell<u64>,
    /// Ticks until its turn or run ends.
    pub remaining: Cell<u64>,
    /// Time used in all, in ticks.
    used: Cell<u64>,
    /// With a period: the part of `used` that has been taken from the refills.
    accounted: Cell<u64>,
    /// With a period: its time, and when it may use it.
    refills: Refills,
    /// Depleted: when it has time again.
    pub refill: Cell<u64>,
    /// The factory whose share of CPU time it takes part of; `None`: nobody counts.
    pub share_owner: Option<Handle<Factory>>,
    /// CPU of the thread that it is bound to.
    pub cpu: Cell<usize>,
    /// Thread that it is bound to.
    pub owner: Link<Thread<A>>,
    /// Thread that runs on it, while the state is not `Running`.
    pub holder: Link<Thread<A>>,
    /// Where it is.
    pub state: Cell<SchedState>,
    /// Next in the queue.
    pub next: Link<SchedContext<A>>,
    /// Previous in the queue.
    pub prev: Link<SchedContext<A>>,
    /// Links in the CPU's tree of refills.
    pub links: Links<SchedContext<A>>,
}

impl<A: Arch> SchedContext<A> {
    /// With a period: what was used since the last time is taken from the refills.
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

    /// Sets what is left: a new turn, or what may be used now.
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

/// What the scheduler knows of a CPU.
pub struct Cpu<A: Arch> {
    /// The thread that runs, or will when the kernel is left.
    pub current: Link<Thread<A>>,
    /// The scheduling context that it runs on.
    pub sched: Link<SchedContext<A>>,
    /// Task whose space is loaded.
    pub space: Link<Task<A>>,
    /// The choice must be made anew before the kernel is left.
    pub resched: Cell<bool>,
    /// Up to when the running context has been charged.
    charged: Cell<u64>,
    queues: [Queue<A>; PRIORITIES],
    ready: Cell<u64>,
    timeouts: Tree<Thread<A>>,
    refills: Tree<SchedContext<A>>,
    /// Earliest of timeouts and refills.
    next_event: Cell<u64>,
    /// End of the running context's budget, if it must be enforced.
    slice_end: Cell<u64>,
}

impl<A: Arch> Cpu<A> {
    /// A CPU with nothing to do.
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

    /// The timer is to interrupt this CPU as soon as it can.
    pub(crate) fn arm_immediately(&self) {
        self.next_event.set(0);
    }

    /// When the timer must interrupt this CPU at the latest.
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
    /// Checks and converts parameters: priority, budget and period in nanoseconds. `BadRights`: above the highest
    /// priority.
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

    /// The part of a CPU that a budget (ticks) per period is, in units of 1 / [`SHARE_OF_CPU`], rounded up;
    /// a whole one for round robin.
    fn share(budget: u64, period: u64) -> u64 {
        match period {
            0 => SHARE_OF_CPU,
            _ => {
                (u128::from(budget) * u128::from(SHARE_OF_CPU)).div_ceil(u128::from(period)) as u64
            }
        }
    }

    /// A scheduling context that belongs to nobody yet, made from a factory. `BadRights`: above its highest priority;
    /// `NoQuota`: more than is left of its share of CPU time.
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

    /// Changes the parameters. What has been used stays used, whatever they were before. `NoQuota`: more than is left of
    /// the share of CPU time.
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
            // The time until now is not the new budget's.
            self.charge(sched.cpu.get());
        }
        if matches!(state, SchedState::Queued | SchedState::Depleted) {
            self.remove_from_queue(handle);
        }
        let now = A::now();
        sched.account_run();
        match (before, period) {
            (_, 0) => {}
            // Nobody has counted what it used in its turns: all of it.
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

    /// Makes a CPU choose anew.
    pub fn request_schedule(&self, cpu: usize) {
        self.cpus[cpu].resched.set(true);
        self.interrupt_if_other(cpu);
    }

    /// Makes another CPU look at what has been changed of it: its choice, its timer.
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

    /// Takes the first context, `sched`, out of a ready queue.
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

    /// Takes a context out of the ready queue or the refills.
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

    /// A context's holder wants to run.
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
            // An equal goes on with its slice; only, the slice must end some time.
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

    /// Waits for time to come back.
    fn deplete(&self, handle: Handle<SchedContext<A>>, sched: &SchedContext<A>) {
        sched.refill.set(sched.refills.next());
        sched.state.set(SchedState::Depleted);
        self.cpus[sched.cpu.get()].refills.insert(&self.memory, handle);
        self.update_next_event(sched.cpu.get());
    }

    /// The turn or the run of a context that wants to go on has ended.
    fn end_of_run(&self, handle: Handle<SchedContext<A>>, sched: &SchedContext<A>, now: u64) {
        sched.account_run();
        sched.replenish(now);
        if sched.remaining.get() != 0 {
            self.push(handle, false);
        } else if !self.revert_depleted_donation(handle, sched) {
            self.deplete(handle, sched);
        }
    }

    /// A server with time of its own goes on without that of a lender who has none left: others wait for it, too.
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

    /// A context's holder does not want to run any more.
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

    /// Charges the running context, which it gives, for the time since the last charge.
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

    /// The running context gives up the rest of its slice; with a period, that counts as used.
    pub fn yield_now(&self, cpu: usize) {
        if let Some(sched) = self.charge(cpu) {
            sched.accounted.set(sched.accounted.get().wrapping_sub(sched.remaining.take()));
        }
        self.cpus[cpu].resched.set(true);
    }

    /// Chooses what runs on this CPU next. Called before the kernel is left when `resched` is set.
    #[inline(always)]
    pub fn schedule(&self, index: usize) {
        let cpu = &self.cpus[index];
        cpu.resched.set(false);
        self.counters.switches.set(self.counters.switches.get() + 1);
        let (mut willing, mut before) = (None, None);
        if let (Some(sched), Some(handle)) = (self.charge(index), cpu.sched.take()) {
            before = Some((handle, sched));
            sched.state.set(SchedState::Idle);
            sched.holder.set(cpu.current.get());
            willing = cpu.current.get().filter(|&holder| {
                let holder = self.memory.get(holder);
                holder.is_some_and(|holder| holder.state.get() == ThreadState::Ready)
            });
            if willing.is_some() && sched.remaining.get() == 0 {
                self.end_of_run(handle, sched, cpu.charged.get());
            } else if willing.is_some() {
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
            // Round robin needs the timer only if somebody waits for the turn.
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
        if let Some(left) = willing.filter(|&left| cpu.current.get() != Some(left)) {
            self.preempted(left);
        }
    }

    /// A thread that wants to run does not.
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
        // Its timer is set for what was next before, or not at all.
        if next < before {
            self.interrupt_if_other(index);
        }
    }

    /// Arms a thread's timeout, unless it is never (`u64::MAX`).
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

    /// Does what is due on this CPU: timeouts, refills, end of slice. If more is due than is done at once, the timer
    /// interrupts again.
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
        // A thread that was lent time, and even if it has lent that on, keeps its own for later.
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

    /// Ends a scheduling context: whoever runs on it stops getting time from it.
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
            // 0: it was told to come at once, and has not yet.
            let at_once = cpu.next_event.get() == 0;
            assert!(at_once || cpu.next_event.get() == earliest);
        }
    }
}

#[cfg(test)]
mod tests;

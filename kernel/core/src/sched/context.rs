//! Scheduling contexts: creation, parameters, binding.

use core::cell::Cell;

use abi::{SHARE_OF_CPU, Status};

use crate::arch::Arch;
use crate::object::{Thread, ThreadState};
use crate::pool::{Account, Factory, Handle};
use crate::tree::{Keyed, Links};
use crate::{Kernel, Result};

use super::refills::Refills;
use super::{Link, PRIORITIES};

/// Minimum budget and period in ns: below this, timer interrupts would consume the CPU.
pub const MIN_BUDGET_NS: u64 = 20_000;
/// Maximum period in ns.
pub const MAX_PERIOD_NS: u64 = 10_000_000_000;

/// State of a scheduling context.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum SchedState {
    /// Its holder is not runnable, or it has no holder.
    #[default]
    Idle,
    /// In a ready queue.
    Queued,
    /// Dispatched on its CPU.
    Running,
    /// Out of budget until its next replenishment.
    Depleted,
}

/// Scheduling context: the right to CPU time.
#[derive(Default)]
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
    pub(super) used: Cell<u64>,
    /// With a period: part of `used` that has been charged to the refills.
    pub(super) accounted: Cell<u64>,
    /// With a period: parts of the budget and the times from which they are usable.
    pub(super) refills: Refills,
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
    pub(super) fn account_run(&self) {
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
    pub(super) fn replenish(&self, now: u64) {
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

impl<A: Arch> Kernel<A> {
    /// Validates and converts priority, budget and period (ns). Fails with `BadRights` if the
    /// priority exceeds `max_priority`.
    fn sched_parameters(
        priority: u64,
        budget: u64,
        period: u64,
        max_priority: u64,
    ) -> Result<(usize, u64, u64)> {
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
        factory: Account,
        priority: u64,
        budget: u64,
        period: u64,
    ) -> Result<Handle<SchedContext<A>>> {
        let account = self.memory.factory(factory)?;
        let (priority, budget, period) =
            Self::sched_parameters(priority, budget, period, account.max_priority)?;
        let (share, share_owner) = (Self::share(budget, period), self.memory.share_owner(factory));
        self.memory.exchange_share(share_owner, 0, share)?;
        let sched = SchedContext {
            priority: Cell::new(priority),
            max_priority: account.max_priority,
            budget: Cell::new(budget),
            period: Cell::new(period),
            refills: Refills::new(budget, A::now()),
            share_owner,
            ..SchedContext::default()
        };
        let made = self.memory.alloc(factory, sched);
        made.inspect_err(|_| self.memory.return_share(share_owner, share))
    }

    /// CPU time used so far, in ticks.
    pub fn used(&self, handle: Handle<SchedContext<A>>) -> u64 {
        let sched = self.memory.at(handle);
        let cpu = sched.cpu.get();
        // Only the CPU itself knows for how long its thread has waited.
        let may_have_waited = cpu != A::this_cpu() && self.cpus[cpu].waits.get();
        if sched.state.get() == SchedState::Running && !may_have_waited {
            self.charge(cpu);
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
    ) -> Result<()> {
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

    /// Binds a scheduling context to a thread.
    pub fn bind_sched(
        &self,
        thread_handle: Handle<Thread<A>>,
        handle: Handle<SchedContext<A>>,
    ) -> Result<()> {
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
        let server = thread.state.get().server().and_then(|server| self.memory.get(server));
        let has_donated = server.is_some_and(|server| server.donor.get() == Some(thread_handle));
        // A thread that runs on a donated context, or has passed that on, keeps its own in reserve.
        if thread.sched.get().is_none() && !has_donated {
            thread.sched.set(Some(handle));
            match thread.state.get() {
                ThreadState::Ready | ThreadState::InGuest { .. } => self.enqueue(handle),
                ThreadState::Sending { .. } | ThreadState::AwaitingReply { .. } => {
                    self.donate(thread_handle);
                }
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

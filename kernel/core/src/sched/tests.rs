use std::collections::BTreeMap;
use std::vec::Vec;

use abi::{FOREVER, Op, SHARE_OF_CPU, Status};

use super::context::{MAX_PERIOD_NS, MIN_BUDGET_NS};
use super::*;
use crate::testing::{
    Fake, NORMAL, Phase, Random, World, check_threads, machine, on_cpu, set_time,
};

/// Handles a timer interrupt of this CPU at `now`.
fn tick(world: &mut World, now: u64) {
    set_time(now);
    let cpu = Fake::this_cpu();
    world.kernel.timer(cpu);
    world.finish();
}

#[test]
fn the_highest_priority_runs_and_equal_priorities_alternate() {
    set_time(0);
    let mut world = World::new();
    let make = |world: &mut World, priority: u64| {
        let thread = world.passive(0);
        let (sched, _) = world.sched(priority, 100_000, 0);
        world.kernel.bind_sched(thread, sched).unwrap();
        world.start(thread);
        thread
    };
    let low = make(&mut world, 3);
    assert!(world.current(0) == Some(low));
    assert_eq!(world.kernel.cpus[0].deadline(), u64::MAX, "a single thread needs no timer");
    let first = make(&mut world, 7);
    let second = make(&mut world, 7);
    let third = make(&mut world, 7);
    for turn in 0..9u64 {
        let expected = [first, second, third][turn as usize % 3];
        assert!(world.current(0) == Some(expected), "turn {turn}");
        assert_eq!(world.kernel.cpus[0].deadline(), (turn + 1) * 100_000);
        tick(&mut world, turn * 100_000 + 50_000);
        assert!(world.current(0) == Some(expected), "half of the slice is left");
        tick(&mut world, (turn + 1) * 100_000);
    }
    world.call_here(Op::Yield, &[]);
    assert!(world.current(0) == Some(second));
    // A higher priority preempts; the preempted thread continues with the rest of its slice.
    tick(&mut world, 930_000);
    let urgent = make(&mut world, 9);
    assert!(world.current(0) == Some(urgent));
    tick(&mut world, 990_000);
    world.kernel.stop_thread(urgent);
    world.finish();
    assert!(world.current(0) == Some(second));
    assert_eq!(world.kernel.cpus[0].deadline(), 990_000 + 70_000);
    for thread in [first, second, third] {
        world.kernel.stop_thread(thread);
    }
    world.finish();
    assert!(world.current(0) == Some(low));
    world.end();
}

#[test]
fn a_budget_limits_each_period() {
    set_time(0);
    let mut world = World::new();
    let thread = world.passive(0);
    let (sched, slot) = world.sched(7, 100_000, 400_000);
    world.kernel.bind_sched(thread, sched).unwrap();
    world.start(thread);
    for period in 0..5u64 {
        let start = period * 400_000;
        assert!(world.current(0) == Some(thread));
        assert_eq!(world.kernel.cpus[0].deadline(), start + 100_000);
        tick(&mut world, start + 100_000);
        assert!(world.current(0).is_none(), "used up");
        tick(&mut world, start + 399_999);
        assert!(world.current(0).is_none(), "not yet");
        assert_eq!(world.kernel.cpus[0].deadline(), start + 400_000);
        tick(&mut world, start + 400_000);
    }
    // Stopping and starting does not replenish it.
    tick(&mut world, 2_100_000);
    world.kernel.stop_thread(thread);
    world.start(thread);
    assert!(world.current(0).is_none());
    // Nor do new parameters: time used at 2,000,000 is replenished one new period later.
    world.kernel.change_sched(sched, 7, 50_000, 1_000_000).unwrap();
    world.finish();
    assert!(world.current(0).is_none());
    tick(&mut world, 2_999_999);
    assert!(world.current(0).is_none());
    tick(&mut world, 3_000_000);
    assert!(world.current(0) == Some(thread));
    tick(&mut world, 3_050_000);
    assert!(world.current(0).is_none());
    world.drop_slot(slot);
    assert_eq!(world.kernel.cpus[0].deadline(), u64::MAX, "its refill was removed, too");
    world.end();
}

#[test]
fn new_parameters_are_not_charged_for_the_past() {
    set_time(0);
    let mut world = World::new();
    let thread = world.thread(0);
    let sched = world.at(thread).sched.get().unwrap();
    set_time(5_000_000);
    world.kernel.change_sched(sched, NORMAL, 100_000, 300_000).unwrap();
    world.finish();
    // Round robin could have used the whole budget, so one period passes.
    assert_eq!(world.kernel.cpus[0].deadline(), 5_300_000);
    tick(&mut world, 5_300_000);
    assert!(world.current(0) == Some(thread));
    assert_eq!(world.kernel.cpus[0].deadline(), 5_400_000);
    world.end();
}

#[test]
fn a_wait_without_blocking_is_not_charged_and_ends_for_every_thread() {
    set_time(0);
    let mut world = World::new();
    let waiting = world.thread(0);
    let sched = world.at(waiting).sched.get().unwrap();
    assert!(world.kernel.may_wait(0) && world.kernel.cpus[0].waits.get());
    set_time(5_000_000);
    // Another CPU does not know whether it waits.
    on_cpu(1);
    assert_eq!(world.kernel.used(sched), 0);
    on_cpu(0);
    world.kernel.exclude_wait(0, 4_000_000);
    assert_eq!(world.kernel.used(sched), 1_000_000);
    // A thread of lower priority becomes ready.
    let low = world.passive(0);
    let (of_low, _) = world.sched(NORMAL - 1, 100_000, 0);
    world.kernel.bind_sched(low, of_low).unwrap();
    on_cpu(1);
    machine(|machine| machine.kicks.take());
    world.kernel.start_thread(low, 0x1000, 0, 0).unwrap();
    assert_eq!(machine(|machine| machine.kicks.take()), [0]);
    on_cpu(0);
    assert!(!world.kernel.may_wait(0) && !world.kernel.cpus[0].waits.get());
    world.kernel.stop_thread(low);
    assert!(world.kernel.may_wait(0));
    // A thread whose time is limited must leave its CPU.
    world.kernel.change_sched(sched, NORMAL, 100_000, 300_000).unwrap();
    world.finish();
    tick(&mut world, 6_000_000);
    assert!(world.current(0) == Some(waiting) && !world.kernel.may_wait(0));
    world.end();
}

#[test]
fn time_used_is_counted() {
    set_time(0);
    let mut world = World::new();
    let first = world.thread(0);
    let sched = |world: &World, thread| world.at(thread).sched.get().unwrap();
    let used = |world: &World, thread| world.kernel.used(sched(world, thread));
    set_time(5_000_000);
    assert_eq!(used(&world, first), 5_000_000, "it runs");
    world.kernel.stop_thread(first);
    world.finish();
    set_time(9_000_000);
    assert_eq!(used(&world, first), 5_000_000);
    // The counter covers the lifetime of the context: new parameters do not reset it.
    world.kernel.change_sched(sched(&world, first), NORMAL, 100_000, 300_000).unwrap();
    assert_eq!(used(&world, first), 5_000_000);
    world.end();
}

#[test]
fn absurd_parameters_are_refused() {
    let world = World::new();
    let make = |priority, budget, period| world.kernel.new_sched(None, priority, budget, period);
    let bad = [(64, 100_000, 0), (1, MIN_BUDGET_NS - 1, 0), (1, 100_000, 99_999)];
    for (priority, budget, period) in bad {
        assert_eq!(make(priority, budget, period).err(), Some(Status::BadArgument));
    }
    assert!(make(1, MAX_PERIOD_NS + 1, 0).is_err());
    assert!(make(1, MIN_BUDGET_NS, MAX_PERIOD_NS + 1).is_err());
    let most = make(63, MIN_BUDGET_NS, MAX_PERIOD_NS).unwrap();
    world.kernel.destroy_sched(most);
    world.end();
}

/// Run times of a context, observed between steps of at most `most` ticks.
struct Watch {
    runs: Vec<(u64, u64)>,
}

impl Watch {
    /// Records the time used since the last call as one run that ended at `now`.
    fn look(&mut self, world: &World, sched: Handle<SchedContext<Fake>>, before: &mut u64) {
        let used = world.kernel.used(sched);
        let (now, part) = (Fake::now(), used - core::mem::replace(before, used));
        if part != 0 {
            self.runs.push((now - part, now));
        }
    }
}

#[test]
fn in_every_window_of_a_period_is_at_most_the_budget() {
    const BUDGET: u64 = 100_000;
    const PERIOD: u64 = 400_000;
    for seed in 0..30 {
        set_time(0);
        let mut world = World::new();
        let mut random = Random(seed);
        let mut make = |priority, budget, period| {
            let thread = world.passive(0);
            let (sched, _) = world.sched(priority, budget, period);
            world.kernel.bind_sched(thread, sched).unwrap();
            world.start(thread);
            (thread, sched)
        };
        let (other, _) = make(9, 50_000, 130_000);
        let (equal, _) = make(7, 30_000, 0);
        let (thread, sched) = make(7, BUDGET, PERIOD);
        let (mut watch, mut used, mut now) = (Watch { runs: Vec::new() }, 0, 0);
        for _ in 0..3000 {
            // The timer is never late; other events come at any time.
            let due = world.kernel.cpus[0].deadline().saturating_sub(now);
            now += due.min(random.below(40_000));
            set_time(now);
            watch.look(&world, sched, &mut used);
            world.kernel.timer(0);
            match random.below(12) {
                0 => world.kernel.stop_thread(thread),
                1 | 2 => world.kernel.start_thread(thread, 0x1000, 0x2000, 0).unwrap_or(()),
                3 if world.current(0) == Some(thread) => world.kernel.yield_now(0),
                4 => world.kernel.stop_thread(other),
                5 => world.kernel.start_thread(other, 0x1000, 0x2000, 0).unwrap_or(()),
                6 => world.kernel.stop_thread(equal),
                7 => world.kernel.start_thread(equal, 0x1000, 0x2000, 0).unwrap_or(()),
                // Sets the same parameters again, or round robin in between.
                8 => world.kernel.change_sched(sched, 7, BUDGET, PERIOD).unwrap(),
                9 => {
                    world.kernel.change_sched(sched, 7, BUDGET / 2, PERIOD).unwrap();
                    world.kernel.change_sched(sched, 7, BUDGET, PERIOD).unwrap();
                }
                _ => {}
            }
            world.finish();
            world.kernel.check_queues(0);
        }
        let worst = refills::tests::most(&watch.runs, PERIOD);
        assert!(worst <= BUDGET, "seed {seed}: {worst}");
        assert!(used >= 10 * BUDGET, "seed {seed}: it ran for {used} in {now}");
        world.end();
    }
}

#[test]
fn a_factory_has_a_share_of_the_cpus() {
    let mut world = World::new();
    let (kernel, memory) = (&world.kernel, &world.kernel.memory);
    let factory = memory.new_factory(None, 40, 63, SHARE_OF_CPU / 2).unwrap();
    // As if a capability to it existed.
    memory.at(factory).caps.set(1);
    let make = |factory, budget, period| kernel.new_sched(Some(factory), 1, budget, period);
    assert_eq!(
        make(factory, 100_000, 0).err(),
        Some(Status::NoQuota),
        "round robin counts as a whole CPU"
    );
    let quarter = make(factory, 100_000, 400_000).unwrap();
    // A child factory takes part of the share, or uses it without a share of its own.
    let same = memory.new_factory(Some(factory), 10, 63, 0).unwrap();
    let own = memory.new_factory(Some(factory), 10, 63, SHARE_OF_CPU / 8).unwrap();
    assert!(memory.new_factory(Some(same), 2, 63, SHARE_OF_CPU / 4).is_err());
    let eighth = make(same, 100_000, 800_000).unwrap();
    assert_eq!(make(same, MIN_BUDGET_NS, MAX_PERIOD_NS).err(), Some(Status::NoQuota));
    let inner = make(own, 100_000, 800_000).unwrap();
    assert_eq!(make(own, MIN_BUDGET_NS, MAX_PERIOD_NS).err(), Some(Status::NoQuota));
    // Changes are charged, and refused as a whole.
    assert_eq!(kernel.change_sched(eighth, 2, 100_001, 800_000), Err(Status::NoQuota));
    assert_eq!(memory.at(eighth).priority.get(), 1);
    kernel.change_sched(quarter, 1, 100_000, 800_000).unwrap();
    kernel.change_sched(eighth, 1, 200_000, 800_000).unwrap();
    // The whole share is returned.
    for sched in [quarter, eighth, inner] {
        kernel.destroy_sched(sched);
    }
    world.finish();
    world.kernel.memory.destroy_factory(same);
    world.kernel.memory.destroy_factory(own);
    world.finish();
    let half = world.kernel.new_sched(Some(factory), 1, 100_000, 200_000).unwrap();
    world.kernel.destroy_sched(half);
    world.finish();
    world.kernel.memory.at(factory).caps.set(0);
    world.kernel.memory.destroy_factory(factory);
    let absurd = world.kernel.memory.new_factory(None, 4, 63, u64::MAX);
    assert_eq!(absurd.err(), Some(Status::BadArgument));
    world.end();
}

#[test]
fn a_depleted_donor_does_not_stop_a_server_with_its_own_context() {
    set_time(0);
    let mut world = World::new();
    let server = world.thread(0);
    let gate = world.gate(server, 7);
    world.call(server, Op::GateReplyWait, &[abi::reply_wait::WAIT]);
    let client = world.passive(0);
    let (sched, _) = world.sched(NORMAL, 100_000, 10_000_000);
    world.kernel.bind_sched(client, sched).unwrap();
    world.start(client);
    world.call_here(Op::GateCall, &[gate]);
    assert!(world.current(0) == Some(server));
    assert!(world.at(server).sched.get() == Some(sched), "donated");
    tick(&mut world, 100_000);
    // The server continues on its own context, and its reply reaches the caller.
    assert!(world.current(0) == Some(server));
    assert!(world.at(server).sched.get() != Some(sched));
    check_threads(&world.kernel);
    world.call_here(Op::GateReplyWait, &[abi::reply_wait::REPLY | abi::reply_wait::WAIT]);
    assert!(world.current(0).is_none());
    assert_eq!(world.phase(client), Phase::Runnable);
    tick(&mut world, 10_000_000);
    assert!(world.current(0) == Some(client));
    world.end();
}

/// A client with a context of 0.1 ms in this period, which has called `gate`; and the context.
fn calling(
    world: &mut World,
    gate: u64,
    period: u64,
) -> (Handle<Thread<Fake>>, Handle<SchedContext<Fake>>) {
    let client = world.passive(0);
    let (sched, _) = world.sched(NORMAL, 100_000, period);
    world.kernel.bind_sched(client, sched).unwrap();
    world.start(client);
    world.call_here(Op::GateCall, &[gate]);
    (client, sched)
}

/// A server with its own context that waits for calls, and its gate.
fn serving(world: &mut World, badge: u64) -> (Handle<Thread<Fake>>, u64) {
    let server = world.thread(0);
    let gate = world.gate(server, badge);
    world.call(server, Op::GateReplyWait, &[abi::reply_wait::WAIT]);
    (server, gate)
}

#[test]
fn a_server_that_gets_a_depleted_donation_back_has_its_own_context() {
    set_time(0);
    let mut world = World::new();
    let (second, to_second) = serving(&mut world, 8);
    let (first, to_first) = serving(&mut world, 7);
    let (_, sched) = calling(&mut world, to_first, 10_000_000);
    world.call_here(Op::GateCall, &[to_second]);
    assert!(world.current(0) == Some(second) && world.at(second).sched.get() == Some(sched));
    tick(&mut world, 100_000);
    assert!(world.current(0) == Some(second) && world.at(second).sched.get() != Some(sched));
    world.call_here(Op::GateReplyWait, &[abi::reply_wait::REPLY | abi::reply_wait::WAIT]);
    assert!(world.current(0) == Some(first) && world.at(first).sched.get() != Some(sched));
    check_threads(&world.kernel);
    world.end();
}

#[test]
fn a_donation_that_loses_its_budget_does_not_stop_a_server_with_its_own_context() {
    set_time(0);
    let mut world = World::new();
    let (server, gate) = serving(&mut world, 7);
    let (_, sched) = calling(&mut world, gate, 0);
    // It is preempted. A new period begins with the whole budget used.
    let other = world.passive(0);
    let (high, _) = world.sched(NORMAL + 1, 1_000_000, 10_000_000);
    world.kernel.bind_sched(other, high).unwrap();
    set_time(50_000);
    world.start(other);
    assert!(world.current(0) == Some(other));
    world.kernel.change_sched(sched, NORMAL, 20_000, 10_000_000_000).unwrap();
    assert!(world.at(server).sched.get() != Some(sched));
    assert_eq!(world.phase(server), Phase::Runnable);
    check_threads(&world.kernel);
    world.end();
}

#[test]
fn a_server_that_loses_its_donation_calls_another_one() {
    set_time(0);
    let mut world = World::new();
    let (second, to_second) = serving(&mut world, 8);
    let (first, to_first) = serving(&mut world, 7);
    let (client, sched) = calling(&mut world, to_first, 10_000_000);
    assert!(world.current(0) == Some(first) && world.at(first).sched.get() == Some(sched));
    // Another CPU stops the client while this one waits for the lock to call.
    world.kernel.stop_thread(client);
    world.call_here(Op::GateCall, &[to_second]);
    assert!(world.current(0) == Some(second));
    check_threads(&world.kernel);
    world.call_here(Op::GateReplyWait, &[abi::reply_wait::REPLY | abi::reply_wait::WAIT]);
    assert!(world.current(0) == Some(first));
    world.end();
}

#[test]
fn timeouts_come_in_order_and_only_once() {
    set_time(0);
    let mut world = World::new();
    let mut random = Random(4);
    let sleepers: Vec<_> = (0..20)
        .map(|_| {
            let thread = world.thread(0);
            let (_, selector) = world.notification();
            // Some deadlines are equal.
            let deadline = 1000 + random.below(12) * 1000;
            world.call(thread, Op::NotificationWait, &[selector, deadline]);
            assert_eq!(world.phase(thread), Phase::Blocked);
            (thread, deadline, selector)
        })
        .collect();
    assert!(world.current(0).is_none());
    // One thread is signalled before its deadline, one is stopped.
    let signaller = world.thread(0);
    world.call(signaller, Op::NotificationSignal, &[sleepers[3].2, 6]);
    assert_eq!(
        (world.result(sleepers[3].0).0, world.result(sleepers[3].0).1[0]),
        (Some(Status::Ok), 6)
    );
    world.kernel.stop_thread(sleepers[4].0);
    world.finish();
    for now in (0..14_000).step_by(500) {
        tick(&mut world, now);
        for (number, (thread, deadline, _)) in sleepers.iter().enumerate() {
            if number == 3 || number == 4 {
                continue;
            }
            let awake = world.phase(*thread) == Phase::Runnable;
            assert_eq!(awake, *deadline <= now);
            assert_eq!(world.result(*thread).0 == Some(Status::Timeout), awake);
        }
    }
    let (_, selector) = world.notification();
    world.call(signaller, Op::NotificationWait, &[selector, 0]);
    assert_eq!(world.result(signaller).0, Some(Status::Timeout), "a poll does not block");
    world.call(signaller, Op::NotificationWait, &[selector, FOREVER]);
    assert_eq!(world.phase(signaller), Phase::Blocked);
    world.end();
}

/// A scheduling context of the reference model.
#[derive(Default)]
struct Plain {
    priority: u64,
    budget: u64,
    period: u64,
    remaining: u64,
    /// Time used in this run.
    used: u64,
    /// Parts of the budget, ordered by the time from which each is usable.
    parts: Vec<(u64, u64)>,
    runnable: bool,
    /// Position among equal priorities: smaller is earlier.
    turn: i64,
    depleted: bool,
}

impl Plain {
    fn add(&mut self, at: u64, amount: u64) {
        let at = self.parts.last().map_or(at, |last| at.max(last.0));
        let is_full = self.parts.len() == refills::REFILLS;
        if amount != 0 && (is_full || self.parts.last().is_some_and(|last| last.0 == at)) {
            let amount = amount + self.parts.pop().unwrap().1;
            self.parts.push((at, amount));
        } else if amount != 0 {
            self.parts.push((at, amount));
        }
    }
    fn replenish(&mut self, now: u64) {
        if self.period == 0 {
            self.remaining = self.budget;
            return;
        }
        let due = self.parts.iter().take_while(|part| part.0 <= now).count();
        self.remaining = self.parts.drain(..due).map(|part| part.1).sum();
        if self.remaining != 0 {
            self.parts.insert(0, (now, self.remaining));
        }
    }
    fn account_run(&mut self) {
        let mut used = core::mem::take(&mut self.used);
        for _ in 0..self.parts.len() {
            let (at, amount) = self.parts[0];
            if self.period == 0 || used == 0 {
                return;
            }
            let part = used.min(amount);
            self.parts[0].1 -= part;
            self.parts.retain(|part| part.1 != 0);
            self.add(at + self.period, part);
            used -= part;
        }
    }
    fn change(&mut self, budget: u64, period: u64, now: u64) {
        if period != 0 && self.period == 0 {
            self.parts.clear();
            self.add(now + period, budget);
        } else if period != 0 {
            for part in self.parts.iter_mut().filter(|part| part.0 > now) {
                part.0 += period.saturating_sub(self.period);
            }
            self.add(now + period, budget.saturating_sub(self.budget));
            for _ in budget..self.budget {
                self.parts.last_mut().unwrap().1 -= 1;
                self.parts.retain(|part| part.1 != 0);
            }
        }
        (self.budget, self.period) = (budget, period);
    }
}

/// Reference model without queues: every decision scans all contexts.
struct Naive {
    contexts: BTreeMap<usize, Plain>,
    running: Option<usize>,
    charged: u64,
    turns: i64,
}

impl Naive {
    fn last_turn(&mut self) -> i64 {
        self.turns += 1;
        self.turns
    }
    fn charge(&mut self, now: u64) {
        let elapsed = now - core::mem::replace(&mut self.charged, now);
        if let Some(running) = self.running {
            let context = self.contexts.get_mut(&running).unwrap();
            context.remaining = context.remaining.saturating_sub(elapsed);
            context.used += elapsed;
        }
    }
    fn use_up(&mut self, name: usize, now: u64) {
        let turn = self.last_turn();
        let context = self.contexts.get_mut(&name).unwrap();
        context.account_run();
        context.replenish(now);
        context.turn = turn;
        context.depleted = context.remaining == 0;
    }
    fn make_runnable(&mut self, name: usize, now: u64) {
        let turn = self.last_turn();
        let context = self.contexts.get_mut(&name).unwrap();
        (context.runnable, context.turn) = (true, turn);
        if context.period != 0 || context.remaining == 0 {
            context.replenish(now);
        }
        context.depleted = context.remaining == 0;
    }
    fn dequeue_slow(&mut self, name: usize, now: u64) {
        if self.running == Some(name) {
            self.charge(now);
            self.running = None;
        }
        let context = self.contexts.get_mut(&name).unwrap();
        context.account_run();
        context.runnable = false;
    }
    fn choose(&mut self, now: u64) {
        self.charge(now);
        let before = self.running.take();
        if let Some(running) = before
            && self.contexts[&running].remaining == 0
        {
            self.use_up(running, now);
        }
        let ready =
            self.contexts.iter().filter(|(_, context)| context.runnable && !context.depleted);
        self.running = ready
            .min_by_key(|(_, c)| (core::cmp::Reverse(c.priority), c.turn))
            .map(|(name, _)| *name);
        if let Some(before) = before.filter(|_| before != self.running) {
            self.contexts.get_mut(&before).unwrap().account_run();
        }
        // A preempted context stays first of its priority.
        if let Some(running) = self.running {
            let first = self.contexts.values().map(|context| context.turn).min().unwrap_or(0) - 1;
            let context = self.contexts.get_mut(&running).unwrap();
            context.turn = first;
            if before != self.running && context.period != 0 {
                context.replenish(now);
            }
        }
    }
    fn refill(&mut self, now: u64) {
        let mut due: Vec<_> = self
            .contexts
            .iter()
            .filter(|(_, c)| c.runnable && c.depleted && c.parts[0].0 <= now)
            .map(|(name, c)| (c.parts[0].0, *name))
            .collect();
        due.sort_unstable();
        for (_, name) in due {
            self.make_runnable(name, now);
        }
    }
}

fn against_the_naive_one(seed: u64) {
    let mut random = Random(seed);
    let mut now = 1_000_000;
    set_time(now);
    on_cpu(0);
    let mut world = World::new();
    let mut naive = Naive { contexts: BTreeMap::new(), running: None, charged: now, turns: 0 };
    let threads: Vec<_> = (0..8)
        .map(|name| {
            let thread = world.passive(0);
            let budget = 20_000 + random.below(80_000);
            let period = if random.once_in(2) { 0 } else { budget + 1 + random.below(300_000) };
            let priority = random.below(4);
            let (sched, _) = world.sched(priority, budget, period);
            world.kernel.bind_sched(thread, sched).unwrap();
            let parts = std::vec![(now, budget)];
            let plain = Plain { priority, budget, period, parts, ..Plain::default() };
            naive.contexts.insert(name, plain);
            (thread, sched)
        })
        .collect();
    let mut choices = [0; 8];
    for step in 0..20_000 {
        // The timer interrupts at the requested time; other events come before.
        let deadline = world.kernel.cpus[0].deadline();
        let step_to = now + random.below(60_000);
        now = step_to.min(deadline.max(now));
        set_time(now);
        if now >= deadline {
            naive.refill(now);
            world.kernel.timer(0);
        }
        let name = random.below(8) as usize;
        let (thread, sched) = threads[name];
        match random.below(8) {
            0 | 1 if world.phase(thread) == Phase::Stopped => {
                world.kernel.start_thread(thread, 1, 2, 3).unwrap();
                naive.make_runnable(name, now);
            }
            2 if world.phase(thread) == Phase::Runnable => {
                world.kernel.stop_thread(thread);
                naive.dequeue_slow(name, now);
            }
            3 if world.current(0).is_some() && random.once_in(3) => {
                world.kernel.yield_now(0);
                naive.charge(now);
                if let Some(running) = naive.running {
                    let context = naive.contexts.get_mut(&running).unwrap();
                    context.used += core::mem::take(&mut context.remaining);
                }
            }
            4 if random.once_in(4) && naive.running != Some(name) => {
                let (priority, budget) = (random.below(4), 20_000 + random.below(80_000));
                let period = if random.once_in(2) { 0 } else { budget + 1 + random.below(300_000) };
                world.kernel.change_sched(sched, priority, budget, period).unwrap();
                let context = naive.contexts.get_mut(&name).unwrap();
                context.priority = priority;
                context.change(budget, period, now);
                context.replenish(now);
                if context.runnable {
                    naive.make_runnable(name, now);
                }
            }
            _ => {}
        }
        let rescheduled = world.kernel.cpus[0].resched.get();
        world.kernel.finish(0);
        world.kernel.scheduled(0);
        if rescheduled {
            naive.choose(now);
        }
        check_threads(&world.kernel);
        let running = naive.running.map(|name| threads[name].0);
        assert!(world.current(0) == running, "step {step}");
        for (name, (_, sched)) in threads.iter().enumerate() {
            let (sched, context) = (world.kernel.memory.at(*sched), &naive.contexts[&name]);
            assert_eq!(sched.remaining.get(), context.remaining, "step {step}");
            let depleted = context.runnable && context.depleted;
            assert_eq!(sched.state.get() == SchedState::Depleted, depleted);
        }
        // No runnable thread of higher priority waits.
        let highest =
            naive.contexts.values().filter(|c| c.runnable && !c.depleted).map(|c| c.priority);
        if let Some(running) = naive.running {
            assert_eq!(highest.max(), Some(naive.contexts[&running].priority));
            choices[running] += 1;
        } else {
            assert_eq!(highest.max(), None);
        }
    }
    assert!(choices.iter().all(|count| *count > 100), "{choices:?}");
    world.end();
}

#[test]
fn random_histories_against_a_naive_scheduler() {
    for seed in 0..6 {
        against_the_naive_one(seed);
    }
}

#[test]
fn another_cpu_is_asked_to_reschedule() {
    set_time(0);
    on_cpu(0);
    let mut world = World::new();
    let thread = world.thread(1);
    assert!(world.current(1) == Some(thread));
    assert_eq!(machine(|machine| machine.kicks.take()), [1]);
    world.kernel.stop_thread(thread);
    assert_eq!(machine(|machine| machine.shootdowns.take()), [2], "it must leave user mode now");
    world.finish();
    assert!(world.current(1).is_none());
    world.end();
}

#[test]
fn another_cpu_is_notified_of_an_earlier_event() {
    set_time(0);
    on_cpu(1);
    let mut world = World::new();
    let thread = world.passive(1);
    let (sched, slot) = world.sched(7, 100_000, 400_000);
    world.kernel.bind_sched(thread, sched).unwrap();
    world.start(thread);
    tick(&mut world, 100_000);
    world.kernel.stop_thread(thread);
    world.finish();
    assert_eq!(world.kernel.cpus[1].deadline(), u64::MAX, "idle, with its timer off");
    on_cpu(0);
    machine(|machine| machine.kicks.take());
    // Its budget of this period is used up: the other CPU's timer must be armed for the next one.
    world.start(thread);
    assert_eq!(world.kernel.cpus[1].deadline(), 400_000);
    assert_eq!(machine(|machine| machine.kicks.take()), [1]);
    on_cpu(1);
    tick(&mut world, 400_000);
    assert!(world.current(1) == Some(thread));
    world.drop_slot(slot);
    on_cpu(0);
    world.end();
}

#[test]
fn priorities_have_a_ceiling() {
    let world = World::new();
    let low = world.kernel.memory.new_factory(None, 4, 10, 0).unwrap();
    let result = world.kernel.new_sched(Some(low), 11, 100_000, 0);
    assert_eq!(result.err(), Some(Status::BadRights));
    let sched = world.kernel.new_sched(Some(low), 10, 100_000, 0).unwrap();
    let raised = world.kernel.change_sched(sched, 11, 100_000, 0);
    assert_eq!(raised, Err(Status::BadRights));
    assert_eq!(world.kernel.memory.at(sched).priority.get(), 10);
    world.kernel.change_sched(sched, 9, 100_000, 0).unwrap();
    world.kernel.change_sched(sched, 10, 100_000, 0).unwrap();
    world.kernel.destroy_sched(sched);
    let higher = world.kernel.memory.new_factory(Some(low), 2, 11, 0);
    assert_eq!(higher.err(), Some(Status::BadRights));
    world.kernel.memory.destroy_factory(low);
    world.end();
}

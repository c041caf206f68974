use std::collections::BTreeMap;
use std::vec::Vec;

use abi::{FOREVER, Op, Status};

use super::*;
use crate::testing::{Fake, NORMAL, Random, World, check_threads, machine, on_cpu, set_time};

/// Makes this CPU do what is due at `now`.
fn tick(world: &mut World, now: u64) {
    set_time(now);
    let cpu = Fake::this_cpu();
    world.kernel.timer(cpu);
    world.finish();
}

#[test]
fn the_highest_priority_runs_and_equals_take_turns() {
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
    assert_eq!(world.kernel.cpus[0].deadline(), u64::MAX, "alone it needs no timer");
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
    // A higher one interrupts; the interrupted goes on with what was left of its slice.
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
fn a_budget_is_what_a_period_has_and_no_more() {
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
    // Being stopped and started does not refill it.
    tick(&mut world, 2_100_000);
    world.kernel.stop_thread(thread);
    world.start(thread);
    assert!(world.current(0).is_none());
    // New parameters begin a new period.
    world.kernel.change_sched(sched, 7, 50_000, 1_000_000).unwrap();
    world.finish();
    assert!(world.current(0) == Some(thread));
    tick(&mut world, 2_150_000);
    assert!(world.current(0).is_none());
    world.drop_slot(slot);
    assert_eq!(world.kernel.cpus[0].deadline(), u64::MAX, "its refill went with it");
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
    assert_eq!(world.kernel.cpus[0].deadline(), 5_100_000);
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
    // The count is of the context's life: new parameters do not change it.
    world.kernel.change_sched(sched(&world, first), NORMAL, 100_000, 300_000).unwrap();
    assert_eq!(used(&world, first), 5_000_000);
    world.end();
}

#[test]
fn absurd_parameters_are_refused() {
    let bad = [(64, 100_000, 0), (1, MIN_BUDGET_NS - 1, 0), (1, 100_000, 99_999)];
    for (priority, budget, period) in bad {
        let result = Kernel::<Fake>::new_sched(priority, budget, period, 63);
        assert_eq!(result.err(), Some(Status::BadArgument));
    }
    assert!(Kernel::<Fake>::new_sched(1, MAX_PERIOD_NS + 1, 0, 63).is_err());
    assert!(Kernel::<Fake>::new_sched(1, MIN_BUDGET_NS, MAX_PERIOD_NS + 1, 63).is_err());
    assert!(Kernel::<Fake>::new_sched(63, MIN_BUDGET_NS, MAX_PERIOD_NS, 63).is_ok());
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
            assert_eq!(world.state(thread), ThreadState::Sleeping);
            (thread, deadline, selector)
        })
        .collect();
    assert!(world.current(0).is_none());
    // One is signalled before its time, one is stopped.
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
            let awake = world.state(*thread) == ThreadState::Ready;
            assert_eq!(awake, *deadline <= now);
            assert_eq!(world.result(*thread).0 == Some(Status::Timeout), awake);
        }
    }
    let (_, selector) = world.notification();
    world.call(signaller, Op::NotificationWait, &[selector, 0]);
    assert_eq!(world.result(signaller).0, Some(Status::Timeout), "a poll does not wait");
    world.call(signaller, Op::NotificationWait, &[selector, FOREVER]);
    assert_eq!(world.state(signaller), ThreadState::Sleeping);
    world.end();
}

/// A context of the reference.
struct Plain {
    priority: u64,
    budget: u64,
    period: u64,
    left: u64,
    started: u64,
    wants: bool,
    /// Place among equals: smaller is earlier.
    turn: i64,
    depleted: bool,
}

/// The reference: no queues, every choice looks at everything.
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
            context.left = context.left.saturating_sub(elapsed);
        }
    }
    fn use_up(&mut self, name: usize) {
        let turn = self.last_turn();
        let context = self.contexts.get_mut(&name).unwrap();
        if context.period == 0 {
            context.left = context.budget;
            context.turn = turn;
        } else {
            context.depleted = true;
        }
    }
    fn want(&mut self, name: usize, now: u64) {
        let turn = self.last_turn();
        let context = self.contexts.get_mut(&name).unwrap();
        (context.wants, context.depleted, context.turn) = (true, false, turn);
        if context.period != 0 && now - context.started >= context.period {
            (context.started, context.left) = (now, context.budget);
        }
        if context.left == 0 {
            self.use_up(name);
        }
    }
    fn rest(&mut self, name: usize, now: u64) {
        if self.running == Some(name) {
            self.charge(now);
            self.running = None;
        }
        self.contexts.get_mut(&name).unwrap().wants = false;
    }
    fn choose(&mut self, now: u64) {
        self.charge(now);
        if let Some(running) = self.running.take()
            && self.contexts[&running].left == 0
        {
            self.use_up(running);
        }
        let ready = self.contexts.iter().filter(|(_, context)| context.wants && !context.depleted);
        self.running = ready
            .min_by_key(|(_, c)| (core::cmp::Reverse(c.priority), c.turn))
            .map(|(name, _)| *name);
        // Whoever is interrupted later is still the first of its priority.
        if let Some(running) = self.running {
            let first = self.contexts.values().map(|context| context.turn).min().unwrap_or(0) - 1;
            self.contexts.get_mut(&running).unwrap().turn = first;
        }
    }
    fn refill(&mut self, now: u64) {
        let mut due: Vec<_> = self
            .contexts
            .iter()
            .filter(|(_, c)| c.wants && c.depleted && c.started + c.period <= now)
            .map(|(name, c)| (c.started + c.period, *name))
            .collect();
        due.sort_unstable();
        for (_, name) in due {
            self.contexts.get_mut(&name).unwrap().started = 0;
            self.want(name, now);
        }
    }
}

fn against_the_naive_one(seed: u64) {
    let mut random = Random(seed);
    // Later than any period, so that a refill can be written as a start long ago.
    let mut now = 20_000_000_000;
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
            naive.contexts.insert(
                name,
                Plain {
                    priority,
                    budget,
                    period,
                    left: budget,
                    started: 0,
                    wants: false,
                    turn: 0,
                    depleted: false,
                },
            );
            (thread, sched)
        })
        .collect();
    let mut choices = [0; 8];
    for step in 0..20_000 {
        // The timer comes when it is asked for; other things happen before.
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
            0 | 1 if world.state(thread) == ThreadState::Stopped => {
                world.kernel.start_thread(thread, 1, 2, 3).unwrap();
                naive.want(name, now);
            }
            2 if world.state(thread) == ThreadState::Ready => {
                world.kernel.stop_thread(thread);
                naive.rest(name, now);
            }
            3 if world.current(0).is_some() && random.once_in(3) => {
                world.kernel.yield_now(0);
                naive.charge(now);
                if let Some(running) = naive.running {
                    naive.contexts.get_mut(&running).unwrap().left = 0;
                }
            }
            4 if random.once_in(4) && naive.running != Some(name) => {
                let (priority, budget) = (random.below(4), 20_000 + random.below(80_000));
                let period = if random.once_in(2) { 0 } else { budget + 1 + random.below(300_000) };
                world.kernel.change_sched(sched, priority, budget, period).unwrap();
                let context = naive.contexts.get_mut(&name).unwrap();
                (context.priority, context.budget, context.period) = (priority, budget, period);
                (context.left, context.started) = (budget, now);
                if context.wants {
                    naive.want(name, now);
                }
            }
            _ => {}
        }
        let chosen_anew = world.kernel.cpus[0].resched.get();
        world.kernel.finish(0);
        if chosen_anew {
            naive.choose(now);
        }
        check_threads(&world.kernel);
        let running = naive.running.map(|name| threads[name].0);
        assert!(world.current(0) == running, "step {step}");
        for (name, (_, sched)) in threads.iter().enumerate() {
            let (sched, context) = (world.kernel.memory.at(*sched), &naive.contexts[&name]);
            assert_eq!(sched.left.get(), context.left, "step {step}");
            let depleted = context.wants && context.depleted;
            assert_eq!(sched.state.get() == SchedState::Depleted, depleted);
        }
        // Whatever was chosen, nobody with more right to run waits.
        let highest =
            naive.contexts.values().filter(|c| c.wants && !c.depleted).map(|c| c.priority);
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
fn another_cpu_is_asked_to_choose() {
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
fn another_cpu_is_told_of_an_earlier_event() {
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
    // It has no time left in this period: the other CPU's timer must be set for the next.
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
    let result = Kernel::<Fake>::new_sched(11, 100_000, 0, 10);
    assert_eq!(result.err(), Some(Status::BadRights));
    let sched = Kernel::<Fake>::new_sched(10, 100_000, 0, 10).unwrap();
    let sched = world.kernel.memory.alloc(None, sched).unwrap();
    let raised = world.kernel.change_sched(sched, 11, 100_000, 0);
    assert_eq!(raised, Err(Status::BadRights));
    assert_eq!(world.kernel.memory.at(sched).priority.get(), 10);
    world.kernel.change_sched(sched, 9, 100_000, 0).unwrap();
    world.kernel.change_sched(sched, 10, 100_000, 0).unwrap();
    world.kernel.end_sched(sched);
    let low = world.kernel.memory.new_factory(None, 4, 10).unwrap();
    let higher = world.kernel.memory.new_factory(Some(low), 2, 11);
    assert_eq!(higher.err(), Some(Status::BadRights));
    world.kernel.memory.end_factory(low);
    world.end();
}

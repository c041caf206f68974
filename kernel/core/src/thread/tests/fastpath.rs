//! The fast path of IPC against the general path.

use std::string::String;
use std::vec::Vec;

use super::{Fake, REPLY, WAIT, World, outcome, start, waiting_passive};
use crate::object::*;
use crate::pool::Handle;
use crate::pool::testing::all;
use crate::sched::SchedContext;
use crate::testing::{Random, machine, on_cpu, set_time};
use abi::{Op, Status, Tag};

/// Text of the complete state of threads, scheduling contexts, CPUs and notifications, except
/// cached look-ups.
fn state(world: &World) -> String {
    let memory = &world.kernel.memory;
    let mut text = std::format!("calls {}", world.kernel.counters.system_calls.get());
    let id = |thread: Option<Handle<Thread<Fake>>>| thread.map(Handle::id);
    for handle in all::<Thread<Fake>>(memory) {
        let thread = memory.at(handle);
        let state = match thread.state.get() {
            ThreadState::Stopped => String::from("stopped"),
            ThreadState::Receiving => String::from("receiving"),
            ThreadState::Sending { server, badge, content } => {
                std::format!("sending {server:?} {badge} {content:?}")
            }
            ThreadState::AwaitingReply { server, content } => {
                std::format!("awaiting {server:?} {content:?}")
            }
            ThreadState::Blocked { on, deadline } => std::format!("blocked {on:?} {deadline}"),
            ThreadState::Halted { vcpu, deadline } => std::format!("halted {vcpu:?} {deadline}"),
            ThreadState::InGuest { vcpu } => std::format!("in guest {vcpu:?}"),
            ThreadState::Ready => String::from("ready"),
        };
        let callers = [&thread.callers.served, &thread.callers.head, &thread.callers.tail];
        let links = [&thread.queue.prev, &thread.queue.next, &thread.donor];
        text += &std::format!(
            "\n{handle:?} {state} {:?} {:?} {:?} {:?} {:?} {:?}",
            callers.map(|link| id(link.get())),
            links.map(|link| id(link.get())),
            [&thread.sched, &thread.own_sched].map(|sched| sched.get().map(Handle::id)),
            thread.context.status.get(),
            thread.context.words.each_ref().map(core::cell::Cell::get),
            thread.context.restarts.get(),
        );
    }
    for handle in all::<SchedContext<Fake>>(memory) {
        let sched = memory.at(handle);
        // The holder of a running context is the CPU's current thread.
        let holder = match sched.state.get() {
            crate::sched::SchedState::Running => None,
            _ => id(sched.holder.get()),
        };
        text += &std::format!("\n{handle:?} {:?} {holder:?}", sched.state.get());
        text += &std::format!(" {} {:?}", sched.remaining.get(), sched.next.get());
    }
    for cpu in &world.kernel.cpus[..2] {
        let (current, sched, resched) = (cpu.current.get(), cpu.sched.get(), cpu.resched.get());
        text += &std::format!("\n{current:?} {sched:?} {resched} {}", cpu.deadline());
    }
    for handle in all::<Notification<Fake>>(memory) {
        let notification = memory.at(handle);
        let waiter = id(notification.waiter.get());
        text += &std::format!("\n{handle:?} {:x} {waiter:?}", notification.bits.get());
    }
    text
}

/// Number of threads of [`crowd`].
const THREADS: usize = 10;
/// Number of threads among them, the last ones, that are mostly servers.
const SERVERS: usize = 4;
/// Instruction pointers of servers and clients.
const SERVER: u64 = 0x2000;
const CLIENT: u64 = 0x1000;
/// Number of notifications of [`crowd`].
const NOTIFICATIONS: usize = 2;

/// Starts a thread, if it is stopped.
fn start_again(world: &mut World, thread: Handle<Thread<Fake>>, index: usize) {
    let ip = if index < THREADS - SERVERS { CLIENT } else { SERVER };
    let _ = world.kernel.start_thread(thread, ip, 2, 3);
    world.finish();
}

/// A world of threads with and without scheduling contexts on two CPUs, a gate to each of them, and
/// notifications.
struct Crowd {
    world: World,
    threads: Vec<Handle<Thread<Fake>>>,
    /// Selectors of the gates, by thread.
    gates: Vec<u64>,
    /// Selectors of the notifications.
    notifications: Vec<u64>,
}

fn crowd() -> Crowd {
    let mut world = start();
    let mut threads = Vec::new();
    for index in 0..THREADS {
        let cpu = usize::from(index % 5 == 4);
        let thread = world.passive(cpu);
        // Some servers have no scheduling context; some contexts have a period.
        if index % 3 != 1 {
            let period = if index % 4 == 0 { 4_000_000 } else { 0 };
            let (sched, _) = world.sched(10 + index as u64 % 3, 1_000_000, period);
            world.kernel.bind_sched(thread, sched).unwrap();
        }
        start_again(&mut world, thread, index);
        threads.push(thread);
    }
    let gates = threads.iter().zip(100..).map(|(thread, badge)| world.gate(*thread, badge));
    let gates = gates.collect();
    let notifications: Vec<_> = (0..NOTIFICATIONS).map(|_| world.notification()).collect();
    let (bound, _) = notifications[0];
    world.at(threads[2]).bound.set(Some(bound));
    world.kernel.memory.at(bound).thread.set(Some(threads[2]));
    let notifications = notifications.iter().map(|(_, selector)| *selector).collect();
    Crowd { world, threads, gates, notifications }
}

/// Sets the registers of the current thread to those of a random system call.
fn some_call(
    random: &mut Random,
    world: &World,
    thread: Handle<Thread<Fake>>,
    (gates, notifications): (&[u64], &[u64]),
) {
    let context = &world.at(thread).context;
    let serves = context.ip.get() == SERVER;
    let (operation, first) = match random.below(20) {
        0..14 if !serves => (Op::GateCall, random.pick(&gates[THREADS - SERVERS..])),
        0..14 => (Op::GateReplyWait, REPLY | WAIT),
        14 => (Op::GateCall, random.pick(gates)),
        15 => (Op::GateReplyWait, random.pick(&[3, 1, 2, 0])),
        16 | 17 => (Op::NotificationSignal, random.pick(notifications)),
        18 => (Op::NotificationWait, random.pick(notifications)),
        _ => (Op::Yield, 0),
    };
    context.operation.set(operation as u64);
    context.status.set(None);
    let words = if random.once_in(12) { random.pick(&[3, 65]) } else { 0 };
    let tag = Tag { words, items: 0, label: random.below(1 << 20) }.pack();
    for (word, value) in context.words.iter().zip([first, tag]) {
        word.set(value);
    }
    for word in &context.words[2..] {
        word.set(random.below(1 << 30));
    }
    if operation == Op::NotificationWait {
        let now = machine(|machine| machine.now.get());
        context.words[1].set(now + random.below(200_000));
    }
    if operation == Op::NotificationSignal {
        context.words[1].set(1 << random.below(4));
    }
}

/// Tries the fast path. Returns whether it switched; a refusal must leave the state as it is.
fn try_fast(world: &World, cpu: usize, current: Handle<Thread<Fake>>) -> bool {
    let before = state(world);
    let Some(next) = world.kernel.fast_ipc(cpu, current, world.at(current)) else {
        assert_eq!(before, state(world), "a refusal has no effect");
        return false;
    };
    assert!(core::ptr::eq(next.thread, world.at(world.current(cpu).unwrap())));
    let task = world.kernel.memory.at(next.thread.task);
    assert!(core::ptr::eq(next.space, &task.space));
    true
}

/// Executes a random history and returns the state after every kernel entry, and the number of
/// calls and of replies on the fast path.
fn history(seed: u64, steps: u32, fast: bool) -> (Vec<String>, [u32; 2]) {
    let mut random = Random(seed);
    let Crowd { mut world, threads, gates, notifications } = crowd();
    let (mut states, mut taken) = (Vec::new(), [0; 2]);
    let mut now = 0;
    for _ in 0..steps {
        let cpu = usize::from(random.once_in(6));
        on_cpu(cpu);
        now += random.below(20_000);
        set_time(now);
        if world.kernel.cpus[cpu].deadline() <= now {
            world.kernel.timer(cpu);
            world.finish();
        }
        match random.below(60) {
            0 => world.kernel.stop_thread(random.pick(&threads)),
            1 => {
                threads
                    .iter()
                    .enumerate()
                    .for_each(|(index, t)| start_again(&mut world, *t, index));
            }
            2 => world.kernel.request_schedule(cpu),
            3 => {
                // The destruction of any object invalidates the cached look-ups.
                let (_, slot) = world.notification();
                world.drop_slot(slot);
            }
            4 => {
                if let Some(current) = world.current(cpu) {
                    world.kernel.fault(cpu, current, [14, 0, 0, 0]);
                }
            }
            _ => {
                let Some(current) = world.current(cpu) else {
                    // Nothing is runnable: a thread gives up what it waits for.
                    let index = random.below(THREADS as u64) as usize;
                    world.kernel.stop_thread(threads[index]);
                    start_again(&mut world, threads[index], index);
                    continue;
                };
                some_call(&mut random, &world, current, (&gates, &notifications));
                let operation = world.at(current).context.operation.get();
                let switched = fast && try_fast(&world, cpu, current);
                if switched {
                    taken[operation as usize] += 1;
                } else {
                    world.system_call(cpu);
                }
            }
        }
        world.finish();
        states.push(state(&world));
    }
    on_cpu(0);
    world.end();
    (states, taken)
}

#[test]
fn the_fast_path_leaves_the_state_of_the_general_path() {
    let mut taken = [0; 2];
    for seed in 0..6 {
        let (general, none) = history(seed, 3000, false);
        let (fast, some) = history(seed, 3000, true);
        assert_eq!(none, [0, 0]);
        for (step, (general, fast)) in general.iter().zip(&fast).enumerate() {
            assert_eq!(general, fast, "seed {seed}, step {step}");
        }
        taken = [taken[0] + some[0], taken[1] + some[1]];
    }
    assert!(taken.iter().all(|count| *count > 500), "the fast path was taken: {taken:?}");
}

/// A caller on CPU 0 and its receiving server, with the selector of the gate.
fn pair() -> (World, Handle<Thread<Fake>>, Handle<Thread<Fake>>, u64) {
    let mut world = start();
    let server = waiting_passive(&mut world);
    let gate = world.gate(server, 7);
    let caller = world.thread(0);
    world.choose(caller);
    world.finish();
    (world, caller, server, gate)
}

/// Sets the registers of the current thread of CPU 0 and attempts the fast path.
fn attempt(world: &World, operation: Op, arguments: &[u64]) -> bool {
    let current = world.current(0).expect("a current thread");
    let context = &world.at(current).context;
    context.operation.set(operation as u64);
    for (index, word) in context.words.iter().enumerate() {
        word.set(arguments.get(index).copied().unwrap_or(0));
    }
    world.kernel.fast_ipc(0, current, world.at(current)).is_some()
}

#[test]
fn a_revoked_gate_is_not_called_from_the_cache() {
    let (mut world, caller, server, gate) = pair();
    for _ in 0..2 {
        assert!(attempt(&world, Op::GateCall, &[gate, 0, 1]));
        assert_eq!(world.result(server), (Some(Status::Ok), [7, 0, 1, 0, 0, 0]));
        assert!(attempt(&world, Op::GateReplyWait, &[REPLY | WAIT]));
        assert!(world.current(0) == Some(caller));
    }
    world.drop_slot(gate);
    assert!(!attempt(&world, Op::GateCall, &[gate]));
    world.call_here(Op::GateCall, &[gate]);
    assert_eq!(outcome(&world, caller), Some(Status::BadCapability));
    world.end();
}

#[test]
fn the_fast_path_needs_every_condition() {
    let (mut world, caller, server, gate) = pair();
    let in_page = Tag { words: 1, ..Tag::label(0) }.pack();
    assert!(!attempt(&world, Op::GateCall, &[gate, in_page]), "a message in the page");
    assert!(!attempt(&world, Op::GateCall, &[499]), "no capability");
    let event = world.notification().1;
    assert!(!attempt(&world, Op::GateCall, &[event]), "no gate");
    let far = world.thread(1);
    let far_gate = world.gate(far, 0);
    world.call(far, Op::GateReplyWait, &[WAIT]);
    world.choose(caller);
    assert!(!attempt(&world, Op::GateCall, &[far_gate]), "a server on another CPU");
    world.kernel.cpus[0].resched.set(true);
    assert!(!attempt(&world, Op::GateCall, &[gate]), "another thread may be more urgent");
    world.finish();
    assert!(!attempt(&world, Op::Yield, &[gate]), "another operation");
    assert!(attempt(&world, Op::GateCall, &[gate]));
    assert!(!attempt(&world, Op::GateReplyWait, &[REPLY]), "no wait");
    assert!(!attempt(&world, Op::GateReplyWait, &[WAIT]), "no reply");
    assert!(!attempt(&world, Op::GateReplyWait, &[REPLY | WAIT, in_page]), "a message in the page");
    let second = world.thread(0);
    world.call(second, Op::GateCall, &[gate]);
    world.choose(server);
    assert!(!attempt(&world, Op::GateReplyWait, &[REPLY | WAIT]), "another caller is queued");
    world.call_here(Op::GateReplyWait, &[REPLY | WAIT]);
    world.end();
}

use core::sync::atomic::Ordering;
use std::vec::Vec;

use abi::reply_wait::{REPLY, WAIT};
use abi::vcpu::DOORBELLS;
use abi::vcpu::doorbell;
use abi::{FAULT_LABEL, FOREVER, FaultAction, Item, NOTIFICATION_BADGE, Op, Tag, rights};

use super::donation::MAX_DONORS;
use super::fault::FAULT_LINES;
use super::ipc::MAX_REFUSED;
use super::message::{ITEMS_AT, WINDOWS_AT};
use super::*;
use crate::mdb::Extent;
use crate::pool::testing::all;
use crate::sched::SchedState;
use crate::testing::{Fake, NORMAL, Phase, World, check, machine, on_cpu, set_time, translate};

#[cfg(test)]
mod fastpath;
#[cfg(test)]
mod messages;

type T = Handle<Thread<Fake>>;

fn start() -> World {
    set_time(0);
    on_cpu(0);
    World::new()
}

/// Creates a receiving server with its own scheduling context.
fn waiting(world: &mut World, cpu: usize) -> T {
    let server = world.thread(cpu);
    world.call(server, Op::GateReplyWait, &[WAIT]);
    assert_eq!(world.phase(server), Phase::Receiving);
    server
}

/// Creates a receiving server without a scheduling context, brought there by a first caller.
fn waiting_passive(world: &mut World) -> T {
    let server = world.passive(0);
    world.start(server);
    let gate = world.gate(server, 0);
    let caller = world.thread(0);
    world.call(caller, Op::GateCall, &[gate]);
    world.call_here(Op::GateReplyWait, &[WAIT]);
    world.call_here(Op::GateReplyWait, &[REPLY | WAIT]);
    assert_eq!(world.phase(server), Phase::Receiving);
    world.kernel.stop_thread(caller);
    world.finish();
    server
}

fn outcome(world: &World, thread: T) -> Option<Status> {
    world.result(thread).0
}

#[test]
fn calls_and_replies_transfer_words_and_scheduling_context() {
    let mut world = start();
    let server = waiting_passive(&mut world);
    let gate = world.gate(server, 77);
    let caller = world.thread(0);
    let time = world.at(caller).sched.get();
    world.choose(caller);
    world.finish();
    let switches = world.kernel.counters.switches.get();
    world.call_here(Op::GateCall, &[gate, Tag::label(5).pack(), 1, 2, 3, 4]);
    assert!(world.current(0) == Some(server), "donated");
    assert_eq!(world.result(server), (Some(Status::Ok), [77, Tag::label(5).pack(), 1, 2, 3, 4]));
    assert!(world.at(server).sched.get() == time && world.at(server).donor.get() == Some(caller));
    world.call_here(Op::GateReplyWait, &[REPLY | WAIT, Tag::label(6).pack(), 9, 8, 7, 6]);
    assert!(world.current(0) == Some(caller));
    assert_eq!(world.result(caller), (Some(Status::Ok), [0, Tag::label(6).pack(), 9, 8, 7, 6]));
    assert!(world.at(caller).sched.get() == time && world.at(server).sched.get().is_none());
    assert_eq!(world.kernel.counters.switches.get(), switches, "no scheduler invocation");
    world.end();
}

#[test]
fn callers_are_served_in_order() {
    let mut world = start();
    let server = world.thread(0);
    let gate = world.gate(server, 3);
    let callers: Vec<_> = (0..5).map(|_| world.thread(0)).collect();
    for caller in &callers {
        world.call(*caller, Op::GateCall, &[gate, 0, caller.id()]);
        assert_eq!(world.phase(*caller), Phase::Sending);
    }
    world.call(server, Op::GateReplyWait, &[WAIT]);
    for (index, caller) in callers.iter().enumerate() {
        assert!(world.at(server).callers.served.get() == Some(*caller));
        assert_eq!(world.result(server).1[2], caller.id());
        world.call(server, Op::GateReplyWait, &[REPLY | WAIT, 0, index as u64]);
        assert_eq!(world.result(*caller).1[2], index as u64);
        assert_eq!(world.phase(*caller), Phase::Runnable);
    }
    assert_eq!(world.phase(server), Phase::Receiving);
    world.end();
}

#[test]
fn a_call_to_another_cpu_uses_the_server_s_context() {
    let mut world = start();
    let server = waiting(&mut world, 1);
    let gate = world.gate(server, 4);
    let caller = world.thread(0);
    machine(|machine| machine.kicks.take());
    world.call(caller, Op::GateCall, &[gate, 0, 5]);
    assert!(machine(|machine| machine.kicks.take()).contains(&1));
    assert!(world.at(caller).sched.get().is_some(), "contexts are not donated across CPUs");
    assert!(world.current(1) == Some(server) && world.current(0).is_none());
    world.call(server, Op::GateReplyWait, &[REPLY | WAIT, 0, 6]);
    assert_eq!((outcome(&world, caller), world.result(caller).1[2]), (Some(Status::Ok), 6));
    assert!(world.current(0) == Some(caller));
    // A server without a context of its own cannot be called from another CPU.
    let passive = world.passive(1);
    world.start(passive);
    let gate = world.gate(passive, 4);
    world.call(caller, Op::GateCall, &[gate]);
    assert_eq!(outcome(&world, caller), Some(Status::BadCpu));
    world.end();
}

#[test]
fn a_reply_returns_only_what_its_receiver_donated() {
    let mut world = start();
    // The server loses the context of its first caller; a second caller donates its own.
    let server = waiting_passive(&mut world);
    let gate = world.gate(server, 0);
    let first = world.passive(0);
    let (lost, slot) = world.sched(10, 1_000_000, 0);
    world.kernel.bind_sched(first, lost).unwrap();
    world.start(first);
    world.call(first, Op::GateCall, &[gate]);
    world.drop_slot(slot);
    assert!(world.at(server).sched.get().is_none() && world.current(0).is_none());
    let second = world.thread(0);
    let time = world.at(second).own_sched.get();
    world.call(second, Op::GateCall, &[gate]);
    assert!(world.current(0) == Some(server) && world.at(server).sched.get() == time);
    world.call_here(Op::GateReplyWait, &[REPLY | WAIT]);
    assert_eq!(world.phase(first), Phase::Runnable);
    assert!(
        world.at(first).sched.get().is_none(),
        "the second caller's context is not the first one's"
    );
    assert!(
        world.at(server).callers.served.get() == Some(second) && world.current(0) == Some(server)
    );
    world.call_here(Op::GateReplyWait, &[REPLY | WAIT]);
    assert!(world.current(0) == Some(second) && world.at(second).sched.get() == time);
    world.end();
}

#[test]
fn donation_passes_through_waiting_servers() {
    let mut world = start();
    let back = waiting_passive(&mut world);
    let front = waiting_passive(&mut world);
    let (to_back, to_front) = (world.gate(back, 0), world.gate(front, 0));
    let first = world.thread(0);
    world.call(first, Op::GateCall, &[to_front]);
    world.call_here(Op::GateCall, &[to_back]);
    assert!(world.current(0) == Some(back));
    // A second caller calls the front server before the first one is stopped, a third afterwards.
    let time = world.at(first).own_sched.get().unwrap();
    world.kernel.change_sched(time, 5, 1_000_000, 0).unwrap();
    let second = world.thread(0);
    world.call(second, Op::GateCall, &[to_front]);
    assert!(world.at(back).sched.get() == Some(time));
    world.kernel.stop_thread(first);
    world.finish();
    assert!(world.at(first).sched.get() == Some(time), "taken back at once");
    assert!(world.current(0) == Some(back), "the second caller's context was donated");
    assert!(world.at(back).donor.get() == Some(front));
    world.kernel.stop_thread(second);
    world.finish();
    assert!(world.current(0).is_none());
    let third = world.thread(0);
    world.call(third, Op::GateCall, &[to_front]);
    assert!(world.current(0) == Some(back));
    world.call_here(Op::GateReplyWait, &[REPLY | WAIT]);
    assert!(world.current(0) == Some(front));
    world.call_here(Op::GateReplyWait, &[REPLY | WAIT]);
    assert!(world.current(0) == Some(front) && world.at(front).callers.served.get() == Some(third));
    world.call_here(Op::GateReplyWait, &[REPLY | WAIT]);
    assert!(world.current(0) == Some(third));
    world.end();
}

#[test]
fn cyclic_calls_block_and_can_be_stopped() {
    let mut world = start();
    let ring: Vec<_> = (0..3).map(|_| world.thread(0)).collect();
    let gates: Vec<_> = ring.iter().map(|thread| world.gate(*thread, 0)).collect();
    for (index, thread) in ring.iter().enumerate() {
        world.call(*thread, Op::GateCall, &[gates[(index + 1) % 3]]);
    }
    let outside = world.thread(0);
    world.call(outside, Op::GateCall, &[gates[0]]);
    assert!(world.current(0).is_none());
    let own = world.gate(outside, 0);
    world.kernel.stop_thread(ring[0]);
    world.finish();
    assert_eq!(outcome(&world, outside), Some(Status::Aborted));
    assert_eq!(outcome(&world, ring[2]), Some(Status::Aborted));
    assert_eq!(world.phase(ring[1]), Phase::Sending);
    world.call(outside, Op::GateCall, &[own]);
    assert_eq!(outcome(&world, outside), Some(Status::Aborted), "a thread cannot call itself");
    world.end();
}

/// Destroys or stops a caller or its server while one waits for the other.
fn destroy_during_a_call(served: bool, passive: bool, end_server: bool, destroy: bool) {
    let mut world = start();
    let server = if passive { waiting_passive(&mut world) } else { waiting(&mut world, 0) };
    let gate = world.gate(server, 1);
    if !served {
        let other = world.thread(0);
        world.call(other, Op::GateCall, &[gate]);
    }
    let caller = world.thread(0);
    let time = world.at(caller).own_sched.get().unwrap();
    world.call(caller, Op::GateCall, &[gate]);
    let waits = if served { Phase::AwaitingReply } else { Phase::Sending };
    assert_eq!(world.phase(caller), waits);
    let victim = if end_server { server } else { caller };
    if destroy {
        let slot = (0..500).find(|slot| {
            let capability = world.kernel.capability(world.kernel.memory.at(world.task), *slot);
            matches!(capability.map(|c| c.object), Ok(ObjectRef::Thread(thread)) if thread == victim)
        });
        world.drop_slot(slot.unwrap());
        assert!(world.kernel.memory.get(victim).is_none());
    } else {
        world.kernel.stop_thread(victim);
        world.finish();
        assert_eq!(world.phase(victim), Phase::Stopped);
    }
    if end_server {
        assert_eq!(outcome(&world, caller), Some(Status::Aborted));
        assert!(world.at(caller).sched.get() == Some(time));
        assert_ne!(world.kernel.memory.at(time).state.get(), SchedState::Idle);
    } else {
        assert_eq!(world.phase(server), Phase::Runnable);
        assert!(world.at(server).sched.get() != Some(time));
        if passive && served {
            // The server continues where it was, on the context of the next caller.
            let next = world.thread(0);
            world.call(next, Op::GateCall, &[gate]);
            assert!(world.current(0) == Some(server));
        } else {
            world.choose(server);
        }
        world.call_here(Op::GateReplyWait, &[REPLY | WAIT]);
        if !destroy {
            world.start(caller);
            world.choose(caller);
        }
    }
    check(&world.kernel);
    world.end();
}

#[test]
fn either_side_may_be_destroyed_at_any_time() {
    for case in 0..16 {
        let bit = |number: u32| case >> number & 1 != 0;
        destroy_during_a_call(bit(0), bit(1), bit(2), bit(3));
    }
}

#[test]
fn a_call_to_a_stopped_server_is_aborted() {
    let mut world = start();
    let stopped = world.passive(0);
    let gate = world.gate(stopped, 0);
    let caller = world.thread(0);
    world.call(caller, Op::GateCall, &[gate]);
    assert_eq!(outcome(&world, caller), Some(Status::Aborted));
    world.end();
}

#[test]
fn a_caller_without_reply_is_aborted() {
    let mut world = start();
    let server = waiting(&mut world, 0);
    let gate = world.gate(server, 0);
    let caller = world.thread(0);
    world.call(caller, Op::GateCall, &[gate]);
    world.call(server, Op::GateReplyWait, &[WAIT]);
    assert_eq!(outcome(&world, caller), Some(Status::Aborted));
    assert!(world.current(0) == Some(caller));
    assert_eq!(world.phase(server), Phase::Receiving);
    world.end();
}

#[test]
fn a_context_bound_to_a_busy_server_is_used_after_the_reply() {
    let mut world = start();
    let server = waiting_passive(&mut world);
    let gate = world.gate(server, 0);
    let caller = world.thread(0);
    world.call(caller, Op::GateCall, &[gate]);
    let (own, _) = world.sched(20, 1_000_000, 0);
    world.kernel.bind_sched(server, own).unwrap();
    world.finish();
    assert_eq!(world.kernel.bind_sched(server, own), Err(Status::Busy));
    world.call_here(Op::GateReplyWait, &[REPLY]);
    assert!(world.at(server).sched.get() == Some(own));
    assert!(
        world.current(0) == Some(server),
        "it continues beside the caller, at its own priority"
    );
    assert_eq!(outcome(&world, caller), Some(Status::Ok));
    world.end();
}

#[test]
fn faults_are_calls() {
    let mut world = start();
    let handler = waiting(&mut world, 0);
    let gate = world.gate(handler, 42);
    let thread = world.thread(0);
    let slot = world.insert_cap(ObjectRef::Thread(thread));
    world.call(thread, Op::ThreadBind, &[slot, abi::Binding::FaultGate as u64, gate]);
    world.choose(thread);
    world.at(thread).context.words[3].set(0xabcd);
    world.kernel.fault(0, thread, [14, 2, 0x1000, 0x2000]);
    world.finish();
    let message = [42, Tag::label(FAULT_LABEL).pack(), 14, 2, 0x1000, 0x2000];
    assert_eq!(world.result(handler), (Some(Status::Ok), message));
    world.call(handler, Op::GateReplyWait, &[REPLY | WAIT, 0, FaultAction::Resume as u64]);
    assert!(world.current(0) == Some(thread));
    assert_eq!(world.result(thread).1[3], 0xabcd, "its registers are as they were");
    // A caller of the faulting thread does not wait for ever.
    let own = world.gate(thread, 0);
    let caller = world.thread(0);
    world.call(caller, Op::GateCall, &[own]);
    world.choose(thread);
    world.kernel.fault(0, thread, [13, 0, 0, 0]);
    world.finish();
    world.call(handler, Op::GateReplyWait, &[REPLY | WAIT, 0, FaultAction::Stop as u64]);
    assert_eq!(world.phase(thread), Phase::Stopped);
    assert_eq!(outcome(&world, caller), Some(Status::Aborted));
    // Without a fault gate the thread is stopped, and the fault is logged.
    let logged = machine(|machine| machine.logged.get());
    world.choose(caller);
    world.kernel.fault(0, caller, [6, 0, 0, 0]);
    world.finish();
    assert_eq!(world.phase(caller), Phase::Stopped);
    assert_eq!(machine(|machine| machine.logged.get()), logged + 1);
    world.end();
}

#[test]
fn faults_without_a_gate_do_not_fill_the_log() {
    let mut world = start();
    let thread = world.thread(0);
    let before = machine(|machine| machine.logged.get());
    let fault = |world: &World| world.kernel.log_fault(world.at(thread), [14, 0, 0, 0]);
    (0..10_000).for_each(|_| fault(&world));
    let logged = |before| machine(|machine| machine.logged.get()) - before;
    assert_eq!(u64::from(logged(before)), FAULT_LINES, "ten thousand faults at one time");
    // One second later: one message with the suppressed count, and as many as the rate permits.
    set_time(1_000_000_000);
    (0..10_000).for_each(|_| fault(&world));
    assert_eq!(u64::from(logged(before)), FAULT_LINES + 1 + 10);
}

#[test]
fn a_chain_of_fault_handlers_stops_with_the_last() {
    let mut world = start();
    let chain: Vec<_> = (0..60).map(|_| world.thread(0)).collect();
    for pair in chain.windows(2) {
        let gate = world.gate(pair[1], 0);
        let slot = world.insert_cap(ObjectRef::Thread(pair[0]));
        world.call(pair[0], Op::ThreadBind, &[slot, abi::Binding::FaultGate as u64, gate]);
        world.choose(pair[0]);
        world.kernel.fault(0, pair[0], [14, 0, 0, 0]);
        world.finish();
        assert_eq!(world.phase(pair[0]), Phase::Sending);
    }
    world.kernel.stop_thread(chain[59]);
    world.finish_all();
    assert!(chain.iter().all(|thread| world.phase(*thread) == Phase::Stopped));
    world.end();
}

/// Creates a stopped server with `count` waiting callers, and a capability to it.
fn crowded(world: &mut World, count: usize) -> (Handle<Thread<Fake>>, Vec<Handle<Thread<Fake>>>) {
    let server = waiting(world, 0);
    let gate = world.gate(server, 0);
    let callers: Vec<_> = (0..count).map(|_| world.thread(0)).collect();
    for caller in &callers {
        world.call(*caller, Op::GateCall, &[gate]);
    }
    (server, callers)
}

#[test]
fn calls_to_a_stopped_thread_are_aborted_a_few_at_a_time() {
    let mut world = start();
    let (server, callers) = crowded(&mut world, 100);
    world.kernel.stop_thread(server);
    let aborted = |world: &World| {
        callers.iter().filter(|caller| outcome(world, **caller) == Some(Status::Aborted)).count()
    };
    let mut before = aborted(&world);
    assert!(before <= 1);
    while world.kernel.has_work(0) {
        world.kernel.finish(0);
        world.kernel.scheduled(0);
        let now = aborted(&world);
        assert!(now - before <= ABORTS as usize, "{before} -> {now}");
        assert!(now == 100 || world.kernel.cpus[0].deadline() == 0, "the timer interrupts at once");
        before = now;
    }
    assert_eq!(before, 100);
    assert!(callers.iter().all(|caller| world.phase(*caller) == Phase::Runnable));
    world.end();
}

#[test]
fn a_destroyed_thread_is_freed_after_its_callers_are_aborted() {
    let mut world = start();
    let (server, callers) = crowded(&mut world, 60);
    let slot = (0..500).find(|slot| {
        let capability = world.kernel.capability(world.kernel.memory.at(world.task), *slot);
        matches!(capability.map(|c| c.object), Ok(ObjectRef::Thread(thread)) if thread == server)
    });
    world.drop_slot(slot.unwrap());
    // One waiting caller is stopped, and one destroyed.
    world.kernel.stop_thread(callers[58]);
    assert!(world.finish_all() > 1);
    assert!(world.kernel.memory.get(server).is_none());
    let others = callers.iter().filter(|caller| **caller != callers[58]);
    assert!(others.clone().all(|caller| world.phase(*caller) == Phase::Runnable));
    assert!(others.clone().all(|caller| {
        let thread = world.at(*caller);
        thread.sched.get() == thread.own_sched.get()
    }));
    world.end();
}

#[test]
fn a_restarted_thread_serves_the_remaining_callers() {
    let mut world = start();
    let (server, callers) = crowded(&mut world, 60);
    world.kernel.stop_thread(server);
    world.finish();
    world.kernel.start_thread(server, 0, 0, 0).unwrap();
    world.finish_all();
    let left = callers.iter().filter(|caller| world.phase(**caller) == Phase::Sending);
    assert!(left.count() > 40, "they wait as before");
    world.call(server, Op::GateReplyWait, &[WAIT]);
    assert!(world.at(server).callers.served.get().is_some());
    world.end();
}

#[test]
fn callers_whose_messages_do_not_fit_are_refused_a_few_at_a_time() {
    let mut world = start();
    let server = waiting(&mut world, 0);
    let gate = world.gate(server, 0);
    let first = world.thread(0);
    world.call(first, Op::GateCall, &[gate]);
    let callers: Vec<_> = (0..30).map(|_| world.thread(0)).collect();
    let too_much = Tag { words: 0xff, ..Tag::label(0) }.pack();
    for caller in &callers {
        world.call(*caller, Op::GateCall, &[gate, too_much]);
    }
    world.choose(server);
    world.call_here(Op::GateReplyWait, &[REPLY | WAIT]);
    let refused = |world: &World| {
        callers.iter().filter(|caller| outcome(world, **caller) == Some(Status::Overflow)).count()
    };
    assert_eq!(refused(&world), MAX_REFUSED as usize);
    assert_eq!(
        world.at(server).context.restarts.get(),
        1,
        "the timer interrupts again for the rest"
    );
    while world.phase(server) == Phase::Runnable {
        world.choose(server);
        world.call_here(Op::GateReplyWait, &[REPLY | WAIT]);
    }
    assert_eq!(refused(&world), 30);
    world.end();
}

#[test]
fn nested_donations_are_limited() {
    let mut world = start();
    let servers: Vec<_> = (0..MAX_DONORS + 1).map(|_| waiting_passive(&mut world)).collect();
    let gates: Vec<_> = servers.iter().map(|server| world.gate(*server, 0)).collect();
    let first = world.thread(0);
    world.choose(first);
    for gate in &gates[..MAX_DONORS as usize] {
        world.call_here(Op::GateCall, &[*gate]);
    }
    let last = servers[MAX_DONORS as usize - 1];
    assert!(world.current(0) == Some(last));
    world.call_here(Op::GateCall, &[gates[MAX_DONORS as usize]]);
    assert!(world.current(0) == Some(last));
    assert_eq!(outcome(&world, last), Some(Status::Overflow));
    world.kernel.stop_thread(first);
    world.finish();
    let own = world.at(first).own_sched.get();
    assert!(world.at(first).sched.get() == own, "taken back at once");
    world.end();
}

#[test]
fn a_server_also_wakes_for_its_notification() {
    let mut world = start();
    let server = waiting(&mut world, 1);
    let (events, selector) = world.notification();
    let slot = world.insert_cap(ObjectRef::Thread(server));
    let other = world.thread(0);
    world.call(other, Op::ThreadBind, &[slot, abi::Binding::Notification as u64, selector]);
    assert_eq!(outcome(&world, other), Some(Status::Ok));
    world.call(other, Op::ThreadBind, &[slot, abi::Binding::Notification as u64, selector]);
    assert_eq!(outcome(&world, other), Some(Status::Busy));
    world.call(other, Op::NotificationSignal, &[selector, 0b101]);
    assert_eq!(world.result(server), (Some(Status::Ok), [NOTIFICATION_BADGE, 0, 0b101, 0, 0, 0]));
    // Events accumulate while the server is busy.
    world.call(other, Op::NotificationSignal, &[selector, 1]);
    world.call(other, Op::NotificationSignal, &[selector, 2]);
    world.call(server, Op::GateReplyWait, &[REPLY | WAIT]);
    assert_eq!(world.result(server).1[2], 3);
    world.call(server, Op::GateReplyWait, &[REPLY | WAIT]);
    assert_eq!(world.phase(server), Phase::Receiving);
    world.drop_slot(selector);
    assert!(world.kernel.memory.get(events).is_none());
    world.end();
}

#[test]
fn at_most_one_thread_waits_for_a_notification() {
    let mut world = start();
    let (_, selector) = world.notification();
    let (first, second) = (world.thread(0), world.thread(0));
    world.call(first, Op::NotificationWait, &[selector, FOREVER]);
    world.call(second, Op::NotificationWait, &[selector, FOREVER]);
    assert_eq!(outcome(&world, second), Some(Status::Busy));
    world.call(second, Op::NotificationSignal, &[selector, 0]);
    assert_eq!(world.phase(first), Phase::Blocked, "no event, no wake-up");
    world.drop_slot(selector);
    assert_eq!(outcome(&world, first), Some(Status::Aborted));
    world.end();
}

/// A VM with a vCPU and its notification.
struct Guest {
    vm: Handle<Vm<Fake>>,
    events: Handle<Notification<Fake>>,
    /// Selector of `events`.
    selector: u64,
    vcpu: Handle<Vcpu<Fake>>,
    /// Selector of `vcpu`.
    slot: u64,
}

fn new_vcpu(
    world: &World,
    vm: Handle<Vm<Fake>>,
    events: Handle<Notification<Fake>>,
) -> Result<Handle<Vcpu<Fake>>, Status> {
    world.kernel.new_vcpu(Some(world.factory), world.task, vm, 0x5000, events)
}

fn guest(world: &mut World) -> Guest {
    let vm = world.kernel.new_vm(Some(world.factory), abi::vm_mode::NESTED).unwrap();
    world.insert_cap(ObjectRef::Vm(vm));
    let (events, selector) = world.notification();
    let vcpu = new_vcpu(world, vm, events).unwrap();
    let slot = world.insert_cap(ObjectRef::Vcpu(vcpu));
    Guest { vm, events, selector, vcpu, slot }
}

#[test]
fn preemptions_of_a_vcpu_are_counted() {
    let mut world = start();
    let Guest { slot, .. } = guest(&mut world);
    let preemptions = || machine(|machine| machine.preemptions.get());
    let runner = world.thread(0);
    world.call(runner, Op::VcpuRun, &[slot]);
    // Without competition the thread continues at every scheduling decision.
    world.kernel.request_schedule(0);
    world.finish();
    assert!(world.current(0) == Some(runner) && preemptions() == 0);
    let urgent = world.passive(0);
    let (sched, _) = world.sched(NORMAL + 1, 100_000, 0);
    world.kernel.bind_sched(urgent, sched).unwrap();
    world.start(urgent);
    assert!(world.current(0) == Some(urgent) && preemptions() == 1);
    // It resumes; a thread that blocks voluntarily does not count as preempted.
    world.kernel.stop_thread(urgent);
    world.finish();
    assert!(world.current(0) == Some(runner) && preemptions() == 1);
    world.kernel.stop_thread(runner);
    world.finish();
    assert!(world.current(0).is_none() && preemptions() == 1);
    world.end();
}

#[test]
fn a_thread_blocks_while_its_guest_is_halted() {
    let mut world = start();
    let Guest { events, selector, vcpu, slot, .. } = guest(&mut world);
    let (runner, other) = (world.thread(0), world.thread(0));
    let halt = |world: &mut World, deadline| {
        world.choose(runner);
        let notification = world.kernel.memory.at(events);
        let halts = world.kernel.halt(runner, world.at(runner), notification, deadline);
        world.finish();
        halts
    };
    world.call(runner, Op::VcpuRun, &[slot]);
    assert!(halt(&mut world, FOREVER));
    assert_eq!(world.phase(runner), Phase::Blocked);
    check(&world.kernel);
    // The thread stays in its call, in which it reads the events itself.
    world.call(other, Op::NotificationSignal, &[selector, 0b10]);
    assert_eq!(world.phase(runner), Phase::Runnable);
    assert!(world.at(runner).state.get().vcpu() == Some(vcpu));
    assert!(!halt(&mut world, FOREVER), "there are events");
    assert_eq!(world.kernel.memory.at(events).bits.take(), 0b10);
    // Or when the deadline passes.
    assert!(halt(&mut world, 500));
    set_time(500);
    world.kernel.timer(0);
    world.finish();
    assert_eq!(world.phase(runner), Phase::Runnable);
    assert!(world.at(runner).state.get().vcpu() == Some(vcpu));
    // The vCPU is destroyed meanwhile.
    assert!(halt(&mut world, FOREVER));
    world.drop_slot(slot);
    assert_eq!(world.phase(runner), Phase::Runnable);
    assert_eq!(outcome(&world, runner), Some(Status::Aborted));
    // The cached look-up of its last call is stale.
    world.call(runner, Op::VcpuRun, &[slot]);
    assert_eq!(outcome(&world, runner), Some(Status::BadCapability));
    world.end();
}

#[test]
fn a_vcpu_is_notified_without_events() {
    let mut world = start();
    let Guest { events, vcpu, slot, .. } = guest(&mut world);
    let (runner, other) = (world.thread(1), world.thread(0));
    let notified = |world: &mut World| {
        world.call(other, Op::VcpuNotify, &[slot]);
        assert_eq!(outcome(world, other), Some(Status::Ok));
        world.result(other).1[0]
    };
    assert_eq!(notified(&mut world), 0, "no thread is in it");
    world.call(runner, Op::VcpuRun, &[slot]);
    machine(|machine| machine.kicks.take());
    assert_eq!(notified(&mut world), 1);
    assert!(machine(|machine| machine.kicks.take()).contains(&1));
    // Its guest waits.
    world.choose(runner);
    let notification = world.kernel.memory.at(events);
    assert!(world.kernel.halt(runner, world.at(runner), notification, FOREVER));
    world.finish();
    assert_eq!(world.phase(runner), Phase::Blocked);
    assert_eq!(notified(&mut world), 1);
    check(&world.kernel);
    assert_eq!(world.phase(runner), Phase::Runnable);
    assert!(world.at(runner).state.get().vcpu() == Some(vcpu));
    assert_eq!(world.kernel.memory.at(events).bits.get(), 0);
    assert!(world.kernel.memory.at(events).waiter.get().is_none());
    world.end();
}

#[test]
fn a_notified_vcpu_does_not_wait_for_its_deadline() {
    let mut world = start();
    let Guest { events, vcpu, slot, .. } = guest(&mut world);
    let (runner, other) = (world.thread(1), world.thread(0));
    world.call(runner, Op::VcpuRun, &[slot]);
    world.choose(runner);
    let notification = world.kernel.memory.at(events);
    assert!(world.kernel.halt(runner, world.at(runner), notification, 500));
    world.finish();
    assert_eq!(world.kernel.cpus[1].deadline(), 500);
    machine(|machine| machine.kicks.take());
    world.call(other, Op::VcpuNotify, &[slot]);
    assert_eq!(world.kernel.cpus[1].deadline(), u64::MAX, "the timeout is disarmed");
    assert!(machine(|machine| machine.kicks.take()).contains(&1));
    check(&world.kernel);
    assert!(world.current(1) == Some(runner));
    assert!(matches!(world.at(runner).state.get(), ThreadState::InGuest { vcpu: in_guest }
        if in_guest == vcpu));
    // The next wait has a deadline of its own.
    world.choose(runner);
    let notification = world.kernel.memory.at(events);
    assert!(world.kernel.halt(runner, world.at(runner), notification, 900));
    world.finish();
    assert_eq!((world.phase(runner), world.kernel.cpus[1].deadline()), (Phase::Blocked, 900));
    world.end();
}

#[test]
fn a_vcpu_s_notification_reaches_its_cpu() {
    let mut world = start();
    let Guest { vm, events, selector, vcpu, slot } = guest(&mut world);
    assert!(new_vcpu(&world, vm, events).is_err(), "the notification has its vCPU");
    let (runner, other) = (world.thread(1), world.thread(0));
    world.call(runner, Op::VcpuRun, &[slot]);
    assert!(world.at(runner).state.get().vcpu() == Some(vcpu));
    assert_eq!(world.phase(runner), Phase::Runnable);
    world.call(other, Op::VcpuRun, &[slot]);
    assert_eq!(outcome(&world, other), Some(Status::BadCpu));
    world.call(other, Op::VcpuState, &[slot, 1]);
    assert_eq!(outcome(&world, other), Some(Status::Busy));
    machine(|machine| machine.kicks.take());
    world.call(other, Op::NotificationSignal, &[selector, 1]);
    assert!(machine(|machine| machine.kicks.take()).contains(&1));
    machine(|machine| machine.shootdowns.take());
    world.drop_slot(slot);
    assert_eq!(machine(|machine| machine.shootdowns.take()), [2]);
    assert_eq!(outcome(&world, runner), Some(Status::Aborted));
    assert!(translate(&world.kernel, SpaceRef::Task(world.task), 5).is_none());
    world.end();
}

#[test]
fn an_event_of_a_guest_for_its_own_vcpu_ends_its_run() {
    let mut world = start();
    let Guest { events, vcpu, slot, .. } = guest(&mut world);
    let runner = world.thread(0);
    world.call(runner, Op::VcpuRun, &[slot]);
    assert!(world.at(runner).state.get().vcpu() == Some(vcpu) && !world.kernel.has_work(0));
    // As by a doorbell that is bound to its own notification.
    world.kernel.signal(events, 1);
    assert!(world.kernel.has_work(0));
    world.finish();
    assert!(world.current(0) == Some(runner) && !world.kernel.has_work(0));
    // Of another vCPU's it takes no notice.
    let (other, _) = world.notification();
    world.kernel.signal(other, 1);
    assert!(!world.kernel.has_work(0));
    world.end();
}

/// Writes items and windows to message pages.
fn write_page(world: &World, thread: T, at: usize, words: &[u64]) {
    let page = world.kernel.memory.words(world.at(thread).message);
    for (place, word) in page[at..].iter().zip(words) {
        place.store(*word, Ordering::Relaxed);
    }
}

fn read_page(world: &World, thread: T, at: usize) -> u64 {
    world.kernel.memory.words(world.at(thread).message)[at].load(Ordering::Relaxed)
}

#[test]
fn items_arrive_in_the_receiver_s_windows() {
    let mut world = start();
    let other = world.new_task();
    let extent = Extent { kind: abi::ItemKind::Memory, base: 0x100, physical: 0x100, order: 4 };
    let own = SpaceRef::Task(world.task);
    world.kernel.add_mapping(own, extent, rights::ALL, false, None).unwrap();
    let server = world.thread_in(other, 0);
    let (time, _) = world.sched(10, 1_000_000, 0);
    world.kernel.bind_sched(server, time).unwrap();
    world.start(server);
    world.call(server, Op::GateReplyWait, &[WAIT]);
    let gate = world.gate(server, 0);
    let caller = world.thread(0);
    write_page(&world, server, WINDOWS_AT, &[0x203, 20, 40, 2, 0, 0]);
    let pages = Item::memory(2, rights::READ);
    let capability = Item::capability(rights::ALL);
    let items = [pages.pack(), 0x104, capability.pack(), 0, pages.pack(), 0x108];
    write_page(&world, caller, ITEMS_AT, &items);
    write_page(&world, caller, 0, &[11, 22, 33]);
    let tag = Tag { words: 3, items: 3, label: 1 }.pack();
    world.call(caller, Op::GateCall, &[gate, tag]);
    assert_eq!(world.result(server).1[1], tag);
    let there = SpaceRef::Task(other);
    let (physical, access) = translate(&world.kernel, there, 0x204).expect("the first item");
    assert!(physical == 0x104 && !access.write && !access.execute);
    assert_eq!(translate(&world.kernel, there, 0x208).map(|(physical, _)| physical), Some(0x108));
    assert!(world.kernel.capability(world.kernel.memory.at(other), 40).is_ok());
    let placed = [1, 3, 5].map(|at| read_page(&world, server, ITEMS_AT + at));
    assert_eq!(placed, [0x204, 40, 0x208]);
    assert_eq!([0, 1, 2].map(|at| read_page(&world, server, at)), [11, 22, 33]);
    world.call_here(Op::GateReplyWait, &[REPLY]);
    check(&world.kernel);
    world.end();
}

#[test]
fn oversized_messages_are_refused() {
    let mut world = start();
    let server = waiting(&mut world, 0);
    let gate = world.gate(server, 0);
    let caller = world.thread(0);
    let refused = |world: &mut World, words: u8, items: u8| {
        let tag = Tag { words, items, label: 0 }.pack();
        world.call(caller, Op::GateCall, &[gate, tag]);
        assert_eq!(world.phase(server), Phase::Receiving, "the server is not affected");
        outcome(world, caller)
    };
    assert_eq!(refused(&mut world, 65, 0), Some(Status::Overflow));
    assert_eq!(refused(&mut world, 0, 17), Some(Status::Overflow));
    write_page(&world, caller, ITEMS_AT, &[Item::capability(rights::ALL).pack(), 0]);
    assert_eq!(refused(&mut world, 0, 1), Some(Status::Overflow), "no window");
    write_page(&world, server, WINDOWS_AT + 2, &[u64::MAX, u64::MAX]);
    assert_eq!(refused(&mut world, 0, 1), Some(Status::Overflow));
    write_page(&world, server, WINDOWS_AT + 2, &[400, 1]);
    write_page(&world, caller, ITEMS_AT, &[u64::MAX, 0]);
    assert_eq!(refused(&mut world, 0, 1), Some(Status::BadArgument));
    write_page(&world, caller, ITEMS_AT, &[Item::capability(rights::ALL).pack(), 499]);
    assert_eq!(refused(&mut world, 0, 1), Some(Status::BadCapability));
    // An undeliverable reply fails in the server, which may reply again.
    world.call(caller, Op::GateCall, &[gate]);
    world.call_here(
        Op::GateReplyWait,
        &[REPLY | WAIT, Tag { words: 99, items: 0, label: 0 }.pack()],
    );
    assert_eq!(outcome(&world, server), Some(Status::Overflow));
    world.call_here(Op::GateReplyWait, &[REPLY | WAIT]);
    assert_eq!(outcome(&world, caller), Some(Status::Ok));
    assert_eq!(all::<Thread<Fake>>(&world.kernel.memory).len(), 2);
    world.end();
}

#[test]
fn a_queued_message_that_does_not_fit_goes_back_to_its_sender() {
    let mut world = start();
    let server = world.thread(0);
    let gate = world.gate(server, 0);
    let (bad, good) = (world.thread(0), world.thread(0));
    let too_long = Tag { words: 99, items: 0, label: 0 }.pack();
    world.call(bad, Op::GateCall, &[gate, too_long]);
    world.call(good, Op::GateCall, &[gate, 0, 5]);
    world.call(server, Op::GateReplyWait, &[WAIT]);
    assert_eq!(outcome(&world, bad), Some(Status::Overflow));
    assert!(world.at(server).callers.served.get() == Some(good));
    world.end();
}

#[test]
fn a_guest_rings_the_doorbells_that_are_bound() {
    let mut world = start();
    let vmm = world.thread(0);
    let (bell, selector) = world.notification();
    let vm = world.kernel.new_vm(Some(world.factory), abi::vm_mode::NESTED).unwrap();
    let own = world.insert_cap(ObjectRef::Vm(vm));
    let ring = |world: &World, index| world.kernel.ring_doorbell(world.kernel.memory.at(vm), index);
    assert_eq!(ring(&world, 0), doorbell::UNBOUND);
    for (index, status) in
        [(0, Status::Ok), (DOORBELLS as u64, Status::BadArgument), (u64::MAX, Status::BadArgument)]
    {
        world.call(vmm, Op::VmDoorbell, &[own, index, selector, 6]);
        assert_eq!(outcome(&world, vmm), Some(status));
    }
    let waiter = world.thread(0);
    world.call(waiter, Op::NotificationWait, &[selector, abi::FOREVER]);
    assert_eq!(ring(&world, 0), doorbell::RUNG);
    world.finish();
    assert_eq!(world.result(waiter).1[0], 6);
    for index in [1, DOORBELLS as u64, u64::MAX] {
        assert_eq!(ring(&world, index), doorbell::UNBOUND);
    }
    // The same slot, but another notification: it must not be signalled.
    world.drop_slot(selector);
    let (next, other) = world.notification();
    assert!(next != bell);
    assert_eq!(ring(&world, 0), doorbell::UNBOUND);
    assert_eq!(world.kernel.memory.at(next).bits.get(), 0);
    world.call(vmm, Op::VmDoorbell, &[own, 0, other, 1]);
    assert_eq!(ring(&world, 0), doorbell::RUNG);
    world.call(vmm, Op::VmDoorbell, &[own, 0, 0, 0]);
    assert_eq!(ring(&world, 0), doorbell::UNBOUND);
    world.end();
}

use std::vec::Vec;

use abi::vcpu::SGI_TARGETS;
use abi::{Item, ItemKind, Kind, Tag};

use super::*;
use crate::mdb::Extent;
use crate::pool;
use crate::testing::{Fake, Phase, Random, World, check, machine, on_cpu, set_time};

/// Number of selectors used for objects of the hostile tasks.
const SLOTS: u64 = 96;
/// Words of the message page with the first four items.
const ITEMS: core::ops::Range<usize> = 64..72;
/// Words of the message page with the receive windows.
const WINDOWS: core::ops::Range<usize> = 96..102;

fn hostile_world(random: &mut Random) -> World {
    let mut world = World::new();
    let extent = Extent { kind: ItemKind::Memory, base: 0, physical: 0, order: 8 };
    let own = SpaceRef::Task(world.task);
    world.kernel.add_mapping(own, extent, rights::ALL, false, None).unwrap();
    let ports = Extent { kind: ItemKind::Port, ..extent };
    world.kernel.add_mapping(own, ports, rights::ALL, false, None).unwrap();
    let platform = rights::LOG | rights::MAKE_IRQ | rights::DELEGATE;
    world.kernel.insert_capability(world.task, 90, ObjectRef::Platform, platform, None).unwrap();
    let other = world.new_task();
    for cpu in [0, 1, 0, 1, 0, 1] {
        world.thread(cpu);
    }
    for cpu in [0, 0, 1] {
        let passive = world.passive(cpu);
        world.gate(passive, 100 + cpu as u64);
        world.start(passive);
    }
    for cpu in 0..2 {
        let thread = world.thread_in(other, cpu);
        let (sched, _) = world.sched(5, 100_000, 1_000_000);
        world.kernel.bind_sched(thread, sched).unwrap();
        world.start(thread);
    }
    for thread in pool::testing::all::<Thread<Fake>>(&world.kernel.memory) {
        if random.once_in(2) {
            world.gate(thread, random.below(9));
        }
    }
    for _ in 0..4 {
        world.notification();
    }
    let vm = world.kernel.new_vm(Some(world.factory), abi::vm_mode::NESTED).unwrap();
    world.insert_cap(ObjectRef::Vm(vm));
    // The other task gets some of the capabilities, too.
    let item = Item { kind: ItemKind::Capability, grant: false, order: 4, rights: rights::ALL };
    for slot in [0, 16, 32] {
        let _ = world.kernel.delegate(world.task, item, slot, SpaceRef::Task(other), slot);
    }
    world
}

fn some_item(random: &mut Random) -> u64 {
    let kind = random.pick(&[ItemKind::Memory, ItemKind::Capability, ItemKind::Port]);
    let order = match kind {
        ItemKind::Capability => random.pick(&[0, 0, 0, 1, 3]),
        _ => random.pick(&[0, 0, 1, 4, 8, 26]),
    };
    let mask = random.pick(&[rights::ALL, rights::ALL, 0x87, 1]);
    Item { kind, grant: random.once_in(5), order, rights: mask }.pack()
}

/// Returns a plausible or absurd argument of any operation.
fn some_word(random: &mut Random) -> u64 {
    match random.below(12) {
        0..5 => random.below(SLOTS),
        5 => random.below(12),
        6 => random.below(512) << random.below(9),
        7 => some_item(random),
        8 => 0x7000_0000 + (random.below(64) << 12) + u64::from(random.once_in(40)),
        9 => random.pick(&[20_000, 100_000, 1_000_000, 50_000_000]),
        10 => random.pick(&[u64::MAX, 1 << 63, abi::USER_END, abi::USER_END - 4096, 1 << 47, 0]),
        _ => random.below(u64::MAX),
    }
}

/// Returns a slot with an object of the kind that the operation needs, if the task has one.
fn slot_of(world: &World, random: &mut Random, task: &Task<Fake>, operation: Op) -> u64 {
    let wanted = |object: ObjectRef<Fake>| {
        matches!(
            (operation, object),
            (Op::GateCall, ObjectRef::Gate(_))
                | (Op::VcpuRun | Op::VcpuState | Op::VcpuNotify, ObjectRef::Vcpu(_))
                | (Op::NotificationSignal | Op::NotificationWait, ObjectRef::Notification(_))
                | (Op::Create, ObjectRef::Factory(_))
                | (Op::Delegate | Op::UnmapAt, ObjectRef::Task(_) | ObjectRef::Vm(_))
                | (Op::VmDoorbell | Op::VmSgiTarget, ObjectRef::Vm(_))
                | (Op::ThreadStart | Op::ThreadStop | Op::ThreadBind, ObjectRef::Thread(_))
                | (Op::IrqControl, ObjectRef::Irq(_))
                | (Op::SchedControl, ObjectRef::SchedContext(_))
                | (Op::PlatformControl, ObjectRef::Platform)
        )
    };
    let start = random.below(SLOTS);
    let mut slots = (0..SLOTS).map(|offset| (start + offset) % SLOTS);
    slots
        .find(|slot| {
            world.kernel.capability(task, *slot).is_ok_and(|capability| wanted(capability.object))
        })
        .unwrap_or(start)
}

/// Fills the registers, and sometimes the message page, of the current thread.
fn some_call(world: &World, random: &mut Random, thread: &Thread<Fake>) -> Op {
    let mut operation = Op::from_code(random.below(abi::OPERATIONS.len() as u64)).unwrap();
    if random.once_in(3) {
        operation = random.pick(&[Op::GateCall, Op::GateReplyWait, Op::GateReplyWait]);
    }
    let context = &thread.context;
    context.operation.set(operation as u64);
    for word in &context.words {
        word.set(some_word(random));
    }
    let set = |index: usize, value: u64| context.words[index].set(value);
    if let Some(task) = world.kernel.memory.get(thread.task)
        && !random.once_in(10)
    {
        set(0, slot_of(world, random, task, operation));
    }
    let page = world.kernel.memory.words(thread.message);
    match operation {
        Op::GateCall | Op::GateReplyWait => {
            if operation == Op::GateReplyWait {
                set(0, random.pick(&[0, 1, 2, 3, 3, 3, 3]));
            }
            let items = if random.once_in(4) { random.below(4) as u8 } else { 0 };
            let words = random.pick(&[0, 0, 0, 3, 64, 65]);
            set(1, Tag { words, items, label: 7 }.pack());
            set(2, random.below(2));
            for pair in page[ITEMS].chunks(2) {
                pair[0].store(some_item(random), Ordering::Relaxed);
                pair[1].store(some_word(random), Ordering::Relaxed);
            }
            for word in &page[WINDOWS] {
                word.store(random.below(600), Ordering::Relaxed);
            }
        }
        Op::Create if !random.once_in(8) => plausible_creation(world, random, thread),
        Op::SchedControl if !random.once_in(4) => {
            set(1, random.below(64));
            set(2, 30_000 + random.below(100_000));
            set(3, random.pick(&[0, 200_000, 500_000]));
        }
        // Otherwise the tasks would soon have unmapped everything.
        Op::Unmap if !random.once_in(20) => {
            set(0, some_item(random) & !(0x3f << 3));
            set(1, random.below(SLOTS));
            set(2, random.below(2));
        }
        Op::UnmapAt if !random.once_in(4) => {
            if random.once_in(2) {
                set(0, abi::ops::SELF);
            }
            set(1, some_item(random));
            set(3, random.below(2));
            set(4, random.below(3));
        }
        Op::ThreadStop if !random.once_in(4) => set(0, 1000),
        Op::Delegate if random.once_in(2) => {
            set(0, abi::ops::SELF);
            set(1, some_item(random));
            if random.once_in(2) {
                set(1, Item::capability(rights::ALL).pack());
                set(2, random.below(SLOTS));
                set(3, random.below(SLOTS));
            }
        }
        Op::NotificationWait if !random.once_in(3) => {
            let now = machine(|machine| machine.now.get());
            set(1, now + random.below(2_000_000));
        }
        Op::VmDoorbell => {
            set(1, random.below(5));
            if let Some(task) = world.kernel.memory.get(thread.task) {
                set(2, slot_of(world, random, task, Op::NotificationSignal));
            }
        }
        Op::VmSgiTarget => {
            set(1, random.below(SGI_TARGETS as u64 + 1));
            if let Some(task) = world.kernel.memory.get(thread.task) {
                set(2, slot_of(world, random, task, Op::VcpuRun));
            }
        }
        Op::ThreadBind => {
            let binding = random.below(4);
            set(1, binding);
            let same_object = [Op::SchedControl, Op::GateCall, Op::NotificationWait];
            if let Some(other) = same_object.get(binding as usize)
                && let Some(task) = world.kernel.memory.get(thread.task)
            {
                set(2, slot_of(world, random, task, *other));
            }
        }
        _ => {}
    }
    operation
}

/// Plausible arguments of `Create`.
fn plausible_creation(world: &World, random: &mut Random, thread: &Thread<Fake>) {
    let Some(task) = world.kernel.memory.get(thread.task) else { return };
    let start = random.below(SLOTS);
    let mut slots = (0..SLOTS).map(|offset| (start + offset) % SLOTS);
    let find = |wanted: fn(ObjectRef<Fake>) -> bool| {
        let holds = |slot: &u64| {
            world.kernel.capability(task, *slot).is_ok_and(|capability| wanted(capability.object))
        };
        slots.clone().find(holds).unwrap_or(0)
    };
    let address = 0x7100_0000 + (random.below(64) << 12);
    let kind = Kind::from_code(1 + random.below(9)).unwrap();
    let rest = match kind {
        Kind::Task => [64, 0, 0],
        Kind::Thread => {
            [find(|object| matches!(object, ObjectRef::Task(_))), random.below(2), address]
        }
        Kind::Gate => [find(|object| matches!(object, ObjectRef::Thread(_))), random.below(9), 0],
        Kind::Irq => {
            let platform = find(|object| matches!(object, ObjectRef::Platform));
            [platform, random.below(30), random.below(8)]
        }
        Kind::Factory => [random.below(100), random.below(70), 0],
        Kind::SchedContext => [random.below(64), 50_000, random.pick(&[0, 200_000])],
        Kind::Vcpu => {
            let vm = find(|object| matches!(object, ObjectRef::Vm(_)));
            [vm, address, find(|object| matches!(object, ObjectRef::Notification(_)))]
        }
        Kind::Notification | Kind::Vm | Kind::Platform => [0; 3],
    };
    let words = &thread.context.words;
    words[1].set(kind as u64);
    let is_free = |slot: &u64| world.kernel.capability(task, *slot).is_err();
    words[2].set(slots.find(is_free).unwrap_or(0));
    for (word, value) in words[3..].iter().zip(rest) {
        word.set(value);
    }
}

/// Restarts threads and re-creates objects from outside, so that the tasks stay active.
fn revive(world: &mut World, random: &mut Random) {
    for thread in pool::testing::all::<Thread<Fake>>(&world.kernel.memory) {
        let state = world.phase(thread);
        if state == Phase::Stopped {
            let _ = world.kernel.start_thread(thread, 0x1000, 0x2000, 0);
        } else if state != Phase::Runnable && random.once_in(4) {
            world.kernel.stop_thread(thread);
        }
        if random.once_in(4)
            && let Ok(sched) =
                world.kernel.new_sched(Some(world.factory), random.below(64), 30_000, 0)
        {
            let free = (100..500).find(|slot| {
                let task = world.kernel.memory.at(world.task);
                world.kernel.capability(task, *slot).is_err()
            });
            let object = ObjectRef::SchedContext(sched);
            let given = free.is_some_and(|slot| {
                world.kernel.insert_capability(world.task, slot, object, rights::ALL, None).is_ok()
            });
            if given {
                let _ = world.kernel.bind_sched(thread, sched);
            } else {
                world.kernel.destroy(object);
            }
        }
    }
    world.finish();
}

/// Executes one kernel entry.
fn step(world: &mut World, random: &mut Random, now: &mut u64) {
    let cpu = random.below(2) as usize;
    on_cpu(cpu);
    *now += random.below(30_000);
    set_time(*now);
    if world.kernel.cpus[cpu].deadline() <= *now || random.once_in(50) {
        world.kernel.timer(cpu);
        world.finish();
    }
    if random.once_in(40) {
        world.kernel.interrupt(IrqNumber(random.below(3) as u32));
        world.finish();
    }
    let Some(current) = world.current(cpu) else { return };
    let thread = world.at(current);
    if let Some(vcpu) = thread.state.get().vcpu() {
        if random.once_in(3) {
            world.kernel.vcpu_return(thread, world.kernel.memory.get(vcpu), Status::Ok);
        }
        return;
    }
    if random.once_in(30) {
        world.kernel.fault(cpu, current, [14, 2, 0x1234, 0x1000]);
        world.finish();
        return;
    }
    let restarts = thread.context.restarts.get();
    let operation = some_call(world, random, thread);
    thread.context.status.set(None);
    world.system_call(cpu);
    let thread = world.kernel.memory.get(current);
    if let Some(thread) = thread.filter(|thread| matches!(thread.state.get(), ThreadState::Ready)) {
        let again = thread.context.restarts.get() != restarts;
        assert!(again != thread.context.status.get().is_some(), "{operation:?} has an outcome");
        assert!(!again || matches!(operation, Op::Unmap | Op::UnmapAt | Op::GateReplyWait));
    }
    world.finish();
}

/// Executes this number of system calls mixed with other events; `World::finish` checks after each.
fn hostile(seed: u64, system_calls: u64) {
    let mut random = Random(seed);
    let mut now = 1000;
    set_time(now);
    on_cpu(0);
    let mut world = hostile_world(&mut random);
    check(&world.kernel);
    let mut idle = 0;
    let mut calls = 0;
    let mut number = 0u64;
    while calls < system_calls {
        number += 1;
        step(&mut world, &mut random, &mut now);
        if number.is_multiple_of(100) {
            check(&world.kernel);
        }
        calls += world.kernel.counters.system_calls.take();
        let runs = (0..2).any(|cpu| world.current(cpu).is_some());
        idle = if runs { 0 } else { idle + 1 };
        let alive = world.kernel.memory.get(world.task).is_some()
            && world.kernel.memory.get(world.factory).is_some();
        if alive && idle > 4 {
            revive(&mut world, &mut random);
        }
        if number % 5000 == 4999 || !alive || idle > 200 {
            on_cpu(0);
            world.end();
            on_cpu(0);
            world = hostile_world(&mut random);
        }
    }
    world.end();
}

#[test]
fn random_system_calls_break_nothing() {
    for seed in 0..8 {
        hostile(seed, 12_500);
    }
}

#[test]
fn every_operation_refuses_every_kind_of_object_it_is_not_for() {
    let mut world = World::new();
    let thread = world.thread(0);
    let platform = world.insert_cap(ObjectRef::Platform);
    let refused: Vec<_> = [
        Op::GateCall,
        Op::NotificationSignal,
        Op::NotificationWait,
        Op::Create,
        Op::ThreadStart,
        Op::ThreadStop,
        Op::ThreadBind,
        Op::VcpuRun,
        Op::VcpuState,
        Op::VcpuNotify,
        Op::IrqControl,
        Op::SchedControl,
        Op::Delegate,
        Op::VmDoorbell,
        Op::UnmapAt,
        Op::VmSgiTarget,
    ]
    .into_iter()
    .map(|operation| {
        let item = Item::memory(0, rights::ALL).pack();
        world.call(thread, operation, &[platform, item, 0, 0]);
        world.result(thread).0
    })
    .collect();
    assert!(refused.iter().all(|status| *status == Some(Status::BadCapability)), "{refused:?}");
    world.choose(thread);
    world.at(thread).context.operation.set(99);
    world.system_call(0);
    assert_eq!(world.result(thread).0, Some(Status::BadOperation));
    world.end();
}

#[test]
fn only_a_vm_s_own_vcpus_become_targets_of_its_interrupts() {
    let mut world = World::new();
    let vmm = world.thread(0);
    let mut guest = |address| {
        let kernel = &world.kernel;
        let vm = kernel.new_vm(Some(world.factory), abi::vm_mode::NESTED).unwrap();
        let events = kernel.memory.alloc(Some(world.factory), Notification::default()).unwrap();
        let vcpu = kernel.new_vcpu(Some(world.factory), world.task, vm, address, events).unwrap();
        let slots = [ObjectRef::Vm(vm), ObjectRef::Vcpu(vcpu), ObjectRef::Notification(events)]
            .map(|object| world.insert_cap(object));
        (vm, vcpu, slots)
    };
    let (vm, vcpu, [own, of_vcpu, events]) = guest(0x5000);
    let (_, _, [other, of_other, _]) = guest(0x6000);
    let last = SGI_TARGETS as u64 - 1;
    for (vm, index, vcpu, status) in [
        (own, last, of_vcpu, Status::Ok),
        (own, last + 1, of_vcpu, Status::BadArgument),
        (own, u64::MAX, of_vcpu, Status::BadArgument),
        (own, last, of_other, Status::BadArgument),
        (other, 0, of_vcpu, Status::BadArgument),
        (own, 0, events, Status::BadCapability),
        (of_vcpu, 0, of_vcpu, Status::BadCapability),
        (own, 0, 1000, Status::BadCapability),
    ] {
        world.call(vmm, Op::VmSgiTarget, &[vm, index, vcpu]);
        assert_eq!(world.result(vmm).0, Some(status));
    }
    let target = |world: &World, index: u64| {
        let of = world.kernel.memory.at(vm).sgi_targets[index as usize].get();
        of.filter(|&of| world.kernel.memory.get(of).is_some())
    };
    assert!(target(&world, last) == Some(vcpu) && target(&world, 0).is_none());
    world.drop_slot(of_vcpu);
    assert!(target(&world, last).is_none(), "it does not exist any more");
    world.end();
}

#[test]
fn what_a_task_has_made_goes_with_its_factory() {
    let mut world = World::new();
    let (task, factory) = (world.task, world.factory);
    let own = world.kernel.memory.new_factory(Some(factory), 500, 63, 0).unwrap();
    let child = world.kernel.new_task(Some(own), 64).unwrap();
    let [slot, of_child] =
        [ObjectRef::Factory(own), ObjectRef::Task(child)].map(|object| world.insert_cap(object));
    let item = Item::capability(rights::CREATE);
    world.kernel.delegate(task, item, slot, SpaceRef::Task(child), 0).unwrap();
    let thread = world.thread_in(child, 0);
    let (sched, _) = world.sched(5, 100_000, 0);
    world.kernel.bind_sched(thread, sched).unwrap();
    world.start(thread);
    // A second task, which has the last capability to itself and to its notification.
    let grant = Item { grant: true, ..Item::capability(rights::ALL) }.pack();
    for (operation, arguments) in [
        (Op::Create, [0, Kind::Task as u64, 10, 64]),
        (Op::Create, [0, Kind::Notification as u64, 11, 0]),
        (Op::Delegate, [10, grant, 11, 5]),
        (Op::Delegate, [10, grant, 10, 6]),
    ] {
        world.call(thread, operation, &arguments);
        assert_eq!(world.result(thread).0, Some(Status::Ok), "{arguments:?}");
    }
    assert_eq!(pool::testing::all::<Task<Fake>>(&world.kernel.memory).len(), 3);
    let of_thread = of_child + 1;
    [of_thread, of_child, slot].into_iter().for_each(|slot| world.drop_slot(slot));
    assert!(world.kernel.reap(&mut 10_000));
    world.finish();
    assert_eq!(pool::testing::all::<Task<Fake>>(&world.kernel.memory).len(), 1);
    assert!(world.kernel.memory.get(own).is_none(), "the quota is lost");
    world.end();
}

//! Destruction in steps, and what CPUs still have loaded.

use super::*;

#[test]
fn an_idle_cpu_destroys_a_task_in_steps() {
    on_cpu(0);
    let mut kernel = kernel(1024);
    let (giver, taker) = (task(&kernel, None), task(&kernel, None));
    give_memory(&kernel, giver, 0, 0);
    for page in 0..500 {
        let item = memory_item(0, rights::ALL);
        kernel.delegate(giver, item, 0, SpaceRef::Task(taker), page).unwrap();
    }
    drop_task(&kernel, taker);
    let mut nodes = testing::nodes(&kernel).len();
    while kernel.memory.get(taker).is_some() {
        kernel.timer(0);
        kernel.reap_when_idle(0);
        let left = testing::nodes(&kernel).len();
        assert!(nodes - left <= (work::WORK / work::LEAF) as usize, "one budget for each step");
        assert_eq!(kernel.cpus[0].deadline(), 0, "the next step follows an interrupt");
        assert!(!kernel.has_work(0), "memory is reclaimed, TLBs are flushed");
        nodes = left;
    }
    kernel.timer(0);
    kernel.reap_when_idle(0);
    assert_ne!(kernel.cpus[0].deadline(), 0, "nothing is left to destroy");
    check(&kernel);
}

#[test]
fn opened_ports_reach_a_cpu_that_has_the_task_loaded() {
    on_cpu(0);
    let mut kernel = kernel(256);
    let (owner, driver) = (task(&kernel, None), task(&kernel, None));
    let ports = Extent { kind: ItemKind::Port, base: 0, physical: 0, order: 6 };
    kernel.add_mapping(SpaceRef::Task(owner), ports, rights::ALL, false, None).unwrap();
    kernel.cpus[1].space.set(Some(driver));
    kernel.delegate(owner, Item::ports(3), 8, SpaceRef::Task(driver), 8).unwrap();
    finish(&mut kernel);
    assert_eq!(machine(|machine| machine.shootdowns.take()), [1 << 1]);
    assert!(kernel.cpus[1].space.get().is_none(), "it loads the space again");
}

#[test]
fn empty_page_tables_of_a_dying_vm_are_freed_after_a_flush() {
    on_cpu(0);
    let mut kernel = kernel(256);
    let owner = task(&kernel, None);
    give_memory(&kernel, owner, 0x10, 0);
    let vm = kernel.new_vm(None, vm_mode::NESTED).unwrap();
    kernel.memory.at(vm).caps.set(1);
    let page = memory_item(0, rights::ALL);
    kernel.delegate(owner, page, 0x10, SpaceRef::Vm(vm), 0x10).unwrap();
    kernel.unmap(owner, (page, 0x10), false, &mut 0, &mut { work::WORK }).unwrap();
    finish(&mut kernel);
    machine(|machine| machine.shootdowns.take());
    kernel.memory.at(vm).space.active.set(1 << 1);
    let before = kernel.memory.free_frames();
    kernel.destroy(ObjectRef::Vm(vm));
    assert!(!kernel.reap(&mut { work::TABLE }), "one table");
    finish(&mut kernel);
    assert_eq!(kernel.memory.free_frames(), before + 1);
    assert_eq!(machine(|machine| machine.shootdowns.take()), [1 << 1]);
}

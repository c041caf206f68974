//! Creation and destruction of tasks and VMs.

use core::cell::Cell;

use super::{Space, work};
use crate::arch::Arch;
use crate::object::*;
use crate::pool::{Account, Handle};
use crate::table;
use crate::{Kernel, Result};
use abi::vcpu::{DOORBELLS, SGI_TARGETS};
use abi::vm_mode;
use abi::{Status, rights};

impl<A: Arch> Kernel<A> {
    /// Creates a task with `slots` capability slots.
    pub fn new_task(&self, factory: Account, slots: u64) -> Result<Handle<Task<A>>> {
        if slots == 0 || slots > MAX_SLOTS {
            return Err(Status::BadArgument);
        }
        let root = self.memory.alloc_raw(factory, 1)?;
        A::init_root(self.memory.words(root));
        self.memory
            .alloc(
                factory,
                Task {
                    caps: Cell::new(0),
                    space: Space::new(factory, root),
                    slots,
                    pages: [const { Cell::new(None) }; SLOT_PAGES],
                    threads: Cell::new(None),
                    dying_next: Cell::new(None),
                },
            )
            .inspect_err(|_| self.memory.free_raw(root, 1))
    }

    /// Creates a VM, of a mode of [`abi::vm_mode`].
    pub fn new_vm(&self, factory: Account, mode: u64) -> Result<Handle<Vm<A>>> {
        let translation = match (mode & vm_mode::KIND, mode >> vm_mode::POOL_SHIFT) {
            (vm_mode::NESTED, 0) => Translation::Nested,
            (vm_mode::GUEST_VIRTUAL, 0) => Translation::GuestVirtual,
            (vm_mode::VTLB, pool @ vm_mode::MIN_POOL..=vm_mode::MAX_POOL) => {
                Translation::Vtlb(pool)
            }
            _ => return Err(Status::BadArgument),
        };
        let is_nested = translation == Translation::Nested;
        if !(if is_nested { A::has_nested() } else { A::has_vtlb() }) {
            return Err(Status::Unsupported);
        }
        let root = self.memory.alloc_raw(factory, 1)?;
        let handle = self
            .memory
            .alloc(
                factory,
                Vm {
                    caps: Cell::new(0),
                    space: Space::new(factory, root),
                    translation,
                    doorbells: [const { Cell::new(None) }; DOORBELLS],
                    sgi_targets: [const { Cell::new(None) }; SGI_TARGETS],
                    dying_next: Cell::new(None),
                },
            )
            .inspect_err(|_| self.memory.free_raw(root, 1))?;
        if let Some(device) = A::guest_device().filter(|_| is_nested) {
            let data = rights::READ | rights::WRITE;
            let node = self
                .add_mapping(SpaceRef::Vm(handle), device, data, true, None)
                .inspect_err(|_| self.destroy(ObjectRef::Vm(handle)))?;
            self.memory.at(node).fixed.set(true);
        }
        Ok(handle)
    }

    /// Destroys an object whose last capability was removed.
    pub(crate) fn destroy(&self, object: ObjectRef<A>) {
        match object {
            ObjectRef::Task(handle) => {
                let task = self.memory.at(handle);
                task.space.dying.set(true);
                task.dying_next.set(self.dying_tasks.replace(Some(handle)));
            }
            ObjectRef::Vm(handle) => {
                let vm = self.memory.at(handle);
                vm.space.dying.set(true);
                // Its page tables may be freed before a mapping is removed.
                self.need_flush(SpaceRef::Vm(handle), &vm.space);
                vm.dying_next.set(self.dying_vms.replace(Some(handle)));
            }
            ObjectRef::Thread(handle) => self.destroy_thread(handle),
            ObjectRef::Gate(handle) => self.memory.free(handle),
            ObjectRef::Notification(handle) => self.destroy_notification(handle),
            ObjectRef::Irq(handle) => self.destroy_irq(handle),
            ObjectRef::Factory(handle) => self.memory.destroy_factory(handle),
            ObjectRef::SchedContext(handle) => self.destroy_sched(handle),
            ObjectRef::Vcpu(handle) => self.destroy_vcpu(handle),
            ObjectRef::Platform => {}
        }
    }

    /// Takes a step of the destruction of dying tasks and VMs, on a CPU without a runnable thread.
    /// If there was any, the CPU's timer interrupts immediately: the next step follows after a
    /// release of the kernel lock.
    pub fn reap_when_idle(&mut self, cpu: usize) {
        let mut budget = work::WORK;
        self.reap(&mut budget);
        if budget != work::WORK {
            self.finish(cpu);
            self.cpus[cpu].arm_immediately();
        }
    }

    /// Continues the destruction of dying tasks and VMs. `false`: out of budget.
    pub fn reap(&self, budget: &mut u32) -> bool {
        while let Some(handle) = self.dying_tasks.get() {
            let task = self.memory.at(handle);
            while let Some(thread) = task.threads.get() {
                if !work::charge(budget, work::THREAD) {
                    return false;
                }
                self.detach_thread(thread);
            }
            for page in &task.pages {
                let Some(slots) = page.get() else { continue };
                for slot in &self.memory.at(slots).slots {
                    if let Some(capability) = slot.get()
                        && !self.remove_subtree(capability.node, budget)
                    {
                        return false;
                    }
                }
                if !work::charge(budget, work::SLOT_PAGE) {
                    return false;
                }
                page.set(None);
                self.memory.free(slots);
            }
            // Its capabilities may have been the last of other tasks, which now precede it in the
            // list.
            if self.dying_tasks.get() != Some(handle) {
                continue;
            }
            let of = SpaceRef::Task(handle);
            let (entries, frames) = (A::user_entries(), A::PORT_FRAMES);
            if !self.reap_space::<A::Host>(of, &task.space, entries, frames, budget) {
                return false;
            }
            self.dying_tasks.set(task.dying_next.get());
            self.memory.free(handle);
        }
        while let Some(handle) = self.dying_vms.get() {
            let vm = self.memory.at(handle);
            let of = SpaceRef::Vm(handle);
            let frames = A::GUEST_PORT_FRAMES;
            if !self.reap_space::<A::Nested>(of, &vm.space, 0..512, frames, budget) {
                return false;
            }
            self.dying_vms.set(vm.dying_next.get());
            self.memory.free(handle);
        }
        true
    }

    fn reap_space<F: table::Format>(
        &self,
        of: SpaceRef<A>,
        space: &Space<A>,
        entries: core::ops::Range<usize>,
        port_frames: u32,
        budget: &mut u32,
    ) -> bool {
        for tree in [&space.memory, &space.ports] {
            while let Some(node) = tree.any() {
                if !self.remove_subtree(node, budget) {
                    return false;
                }
            }
        }
        let tables = space.tables(&self.memory);
        let mut may_continue = || work::charge(budget, work::TABLE);
        if !table::clear::<F>(&tables, self.memory.physical(space.root), entries, &mut may_continue)
        {
            return false;
        }
        // CPUs that still have this address space loaded must switch away before its root is freed.
        self.need_flush(of, space);
        self.memory.free_raw(space.root, 1);
        if let Some(map) = space.port_map.take() {
            self.memory.free_raw(map, port_frames);
        }
        true
    }
}

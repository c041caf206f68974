//! Ready queues and the tree of replenishments.

use crate::Kernel;
use crate::arch::Arch;
use crate::pool::Handle;

use super::{Cpu, SchedContext, SchedState};

impl<A: Arch> Kernel<A> {
    /// Enqueues `sched`, whose CPU is `cpu`: at the front or at the end of its priority.
    #[inline(always)]
    pub(super) fn push(
        &self,
        cpu: &Cpu<A>,
        (handle, sched): (Handle<SchedContext<A>>, &SchedContext<A>),
        front: bool,
    ) {
        debug_assert!(core::ptr::eq(cpu, &self.cpus[sched.cpu.get()]), "the queue of another CPU");
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
    pub(super) fn pop(&self, cpu: &Cpu<A>, priority: usize, sched: &SchedContext<A>) {
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
    pub(super) fn remove_from_queue(&self, handle: Handle<SchedContext<A>>) {
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
}

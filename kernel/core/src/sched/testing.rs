//! Checks of the scheduler's invariants.

use super::*;
use crate::tree::Keyed;

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
            if thread.cpu == index && thread.state.get().deadline() != u64::MAX {
                let key = thread.key(handle);
                assert!(cpu.timeouts.at_most(&self.memory, key) == Some(handle));
                earliest = earliest.min(thread.state.get().deadline());
                sleeping = true;
            }
        }
        assert_eq!(sleeping, cpu.timeouts.any().is_some());
        // 0: an immediate interrupt has been requested and has not arrived yet.
        let at_once = cpu.next_event.get() == 0;
        assert!(at_once || cpu.next_event.get() == earliest);
    }
}

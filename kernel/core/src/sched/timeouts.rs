//! Timeouts of threads and the timer interrupt.

use core::cell::Cell;

use abi::Status;

use crate::Kernel;
use crate::arch::Arch;
use crate::object::{Thread, ThreadState};
use crate::pool::Handle;

/// Maximum number of timeouts and replenishments handled per timer interrupt.
const MAX_EXPIRED: u32 = 8;

impl<A: Arch> Kernel<A> {
    pub(super) fn update_next_event(&self, index: usize) {
        let cpu = &self.cpus[index];
        let before = cpu.next_event.get();
        let timeout =
            cpu.timeouts.first(&self.memory).map(|t| self.memory.at(t).state.get().deadline());
        let refill = cpu.refills.first(&self.memory).map(|s| self.memory.at(s).refill.get());
        let next = timeout.unwrap_or(u64::MAX).min(refill.unwrap_or(u64::MAX));
        cpu.next_event.set(next);
        // The other CPU's timer is armed for the previous event, or not armed.
        if next < before {
            self.interrupt_if_other(index);
        }
    }

    /// Arms the timeout of a thread that waits until `deadline`, as its state says; `FOREVER`
    /// means none.
    #[inline(always)]
    pub fn set_timeout(&self, handle: Handle<Thread<A>>, thread: &Thread<A>, deadline: u64) {
        if deadline != abi::FOREVER {
            self.arm_timeout(handle, thread);
        }
    }

    #[inline(never)]
    fn arm_timeout(&self, handle: Handle<Thread<A>>, thread: &Thread<A>) {
        self.cpus[thread.cpu].timeouts.insert(&self.memory, handle);
        self.update_next_event(thread.cpu);
    }

    /// Disarms the timeout of a thread that waits until `deadline`, as its state says. The caller
    /// sets another state at once.
    #[inline(always)]
    pub fn clear_timeout(&self, handle: Handle<Thread<A>>, thread: &Thread<A>, deadline: u64) {
        if deadline != abi::FOREVER {
            self.disarm_timeout(handle, thread);
        }
    }

    #[inline(never)]
    fn disarm_timeout(&self, handle: Handle<Thread<A>>, thread: &Thread<A>) {
        self.cpus[thread.cpu].timeouts.remove(&self.memory, handle);
        self.update_next_event(thread.cpu);
    }

    /// Handles a timer interrupt: expired timeouts, due replenishments, end of slice. If more than
    /// [`MAX_EXPIRED`] events are due, the timer interrupts again.
    pub fn timer(&self, index: usize) {
        let cpu = &self.cpus[index];
        let now = A::now();
        for _ in 0..MAX_EXPIRED {
            if let Some(handle) = cpu.timeouts.first(&self.memory)
                && self.memory.at(handle).state.get().deadline() <= now
            {
                let thread = self.memory.at(handle);
                self.leave_notification(thread);
                if let ThreadState::Halted { vcpu, .. } = thread.state.get() {
                    // The next event is computed once, below.
                    cpu.timeouts.remove(&self.memory, handle);
                    thread.state.set(ThreadState::Halted { vcpu, deadline: abi::FOREVER });
                }
                self.end_blocking(handle, Status::Timeout, &Cell::new(0));
            } else if let Some(handle) = cpu.refills.first(&self.memory)
                && self.memory.at(handle).refill.get() <= now
            {
                self.remove_from_queue(handle);
                self.enqueue(handle);
            } else {
                break;
            }
        }
        cpu.resched.set(cpu.resched.get() || cpu.slice_end.get() <= now);
        self.update_next_event(index);
    }
}

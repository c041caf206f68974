//! Kernel objects and algorithms, independent of the processor architecture.
//!
//! One lock protects all state of this crate (`docs/design/0001`): only the CPU that holds the lock
//! uses a [`Kernel`]. Kernel entries run with interrupts off on one stack per CPU and never block;
//! the state of a waiting thread is in [`object::Thread`]. Errors are returned to the caller; a
//! thread that cannot receive an error is stopped.
#![cfg_attr(not(test), no_std)]
#![deny(unsafe_code)]

#[cfg(feature = "testing")]
extern crate std;

pub mod arch;
pub mod mdb;
pub mod object;
pub mod pool;
pub mod sched;
mod syscall;
pub mod table;
#[cfg(test)]
mod testing;
pub mod thread;
pub mod tree;
pub mod vtlb;

use core::cell::Cell;

use abi::Status;
use arch::Arch;
use object::{Irq, Task, Thread, Vm};
use pool::{Handle, Memory};
use sched::Cpu;

/// Result of an operation that a system call may request: its failure is the caller's status.
pub type Result<T, E = Status> = core::result::Result<T, E>;

/// Maximum number of CPUs that the kernel schedules.
pub const MAX_CPUS: usize = 64;
/// Maximum number of hardware interrupts with a kernel object.
pub const MAX_IRQS: usize = 192;

/// Event counters, exported as [`abi::boot::KernelStats`].
pub struct Counters {
    /// System calls.
    pub system_calls: Cell<u64>,
    /// Host interrupts.
    pub interrupts: Cell<u64>,
    /// World switches into guests.
    pub vm_entries: Cell<u64>,
    /// VM exits handled in the kernel, without the VMM.
    pub handled_in_kernel: Cell<u64>,
    /// Scheduler invocations.
    pub switches: Cell<u64>,
    /// TLB shootdowns of other CPUs.
    pub shootdowns: Cell<u64>,
}

impl Counters {
    const fn new() -> Self {
        Self {
            system_calls: Cell::new(0),
            interrupts: Cell::new(0),
            vm_entries: Cell::new(0),
            handled_in_kernel: Cell::new(0),
            switches: Cell::new(0),
            shootdowns: Cell::new(0),
        }
    }
}

/// Increments a counter.
#[inline(always)]
pub fn count(counter: &Cell<u64>) {
    counter.set(counter.get() + 1);
}

/// Kernel state.
pub struct Kernel<A: Arch> {
    /// Objects and frames.
    pub memory: Memory,
    /// Scheduler state of each CPU.
    pub cpus: [Cpu<A>; MAX_CPUS],
    /// Counters.
    pub counters: Counters,
    platform_caps: Cell<u32>,
    irqs: [Cell<Option<Handle<Irq<A>>>>; MAX_IRQS],
    /// CPUs whose TLBs must be flushed before the current kernel entry ends (bit mask).
    flush: Cell<u64>,
    /// Time, in ticks, from which a full burst of [`FAULT_LINES`](thread::FAULT_LINES) fault
    /// messages may be logged again.
    fault_lines: Cell<u64>,
    /// Faults not logged since the last fault message.
    faults_not_logged: Cell<u64>,
    /// Stopped threads whose callers have not been aborted yet.
    stopping: Cell<Option<Handle<Thread<A>>>>,
    dying_tasks: Cell<Option<Handle<Task<A>>>>,
    dying_vms: Cell<Option<Handle<Vm<A>>>>,
}

impl<A: Arch> Kernel<A> {
    /// A kernel without objects or memory. Too large to be moved: it must be constructed in place.
    #[expect(clippy::new_without_default, reason = "only in constants")]
    pub const fn new() -> Self {
        Self {
            memory: Memory::empty(),
            cpus: [const { Cpu::new() }; MAX_CPUS],
            counters: Counters::new(),
            platform_caps: Cell::new(0),
            irqs: [const { Cell::new(None) }; MAX_IRQS],
            flush: Cell::new(0),
            fault_lines: Cell::new(0),
            faults_not_logged: Cell::new(0),
            stopping: Cell::new(None),
            dying_tasks: Cell::new(None),
            dying_vms: Cell::new(None),
        }
    }

    /// Executes the TLB flushes that were requested ([`table::Flush`]) during this kernel entry.
    #[cold]
    #[inline(never)]
    fn commit_flush(&self, cpu: usize) {
        let cpus = self.flush.take();
        if cpus & 1 << cpu != 0 {
            A::flush_local();
            self.cpus[cpu].space.set(None);
        }
        let others = cpus & !(1 << cpu);
        if others != 0 {
            count(&self.counters.shootdowns);
            A::shootdown(others);
            for other in (0..MAX_CPUS).filter(|other| others & 1 << other != 0) {
                self.cpus[other].space.set(None);
            }
        }
    }

    /// Returns whether [`Kernel::finish`] has anything to do.
    #[inline(always)]
    pub fn has_work(&self, cpu: usize) -> bool {
        self.memory.has_work() || self.cpus[cpu].resched.get()
    }

    /// Ends a kernel entry: flushes TLBs and reclaims freed memory, as needed.
    /// [`Kernel::scheduled`] follows.
    #[inline(always)]
    pub fn finish(&mut self, cpu: usize) {
        if self.memory.has_work() {
            self.finish_work(cpu);
        }
    }

    /// Reschedules, if requested, and returns the thread that the CPU resumes.
    #[inline(always)]
    pub fn scheduled(&self, cpu: usize) -> Option<&Thread<A>> {
        if self.cpus[cpu].resched.get() {
            return self.schedule(cpu);
        }
        self.cpus[cpu].current.get().map(|handle| self.memory.at(handle))
    }

    /// Executes the deferred work of [`Kernel::finish`]. If work remains, arms the timer to
    /// interrupt immediately, so that the scheduled thread runs first.
    #[cold]
    #[inline(never)]
    fn finish_work(&mut self, cpu: usize) {
        let more = self.abort_calls();
        // Before memory that a TLB may still refer to is reused.
        if self.flush.get() != 0 {
            self.commit_flush(cpu);
        }
        self.memory.reclaim();
        self.scheduled(cpu);
        if more || self.memory.has_retired_frames() {
            self.memory.request_work();
            self.cpus[cpu].arm_immediately();
        }
    }
}

//! The kernel's objects and algorithms, independent of the processor.
//!
//! One lock protects everything here (`docs/design/0001`): a [`Kernel`] is only ever used by the CPU that
//! holds it. Kernel entries run with interrupts off, on one stack per CPU, and never block: what a
//! thread waits for is written in the thread. Errors go to the caller; a thread that cannot be told is stopped.
#![cfg_attr(not(test), no_std)]
#![deny(unsafe_code)]

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

use core::cell::Cell;

use arch::Arch;
use object::{Irq, Space, Task, Thread, Vm};
use pool::{Handle, Memory};
use sched::Cpu;

/// Most CPUs that the kernel schedules.
pub const MAX_CPUS: usize = 64;
/// First vector that a device interrupt may have.
pub const FIRST_IRQ_VECTOR: u8 = 0x30;
/// Number of vectors for device interrupts.
pub const IRQ_VECTORS: usize = 0xf0 - FIRST_IRQ_VECTOR as usize;

/// Counters, for [`abi::boot::KernelStats`].
pub struct Counters {
    /// System calls.
    pub system_calls: Cell<u64>,
    /// Host interrupts.
    pub interrupts: Cell<u64>,
    /// World switches into guests.
    pub vm_entries: Cell<u64>,
    /// Exits settled without the VMM.
    pub handled_in_kernel: Cell<u64>,
    /// Choices of the scheduler.
    pub switches: Cell<u64>,
    /// Shootdowns of other CPUs.
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

impl<A: Arch> Default for Kernel<A> {
    fn default() -> Self {
        Self::new()
    }
}

/// Adds one to a counter.
#[inline(always)]
pub fn count(counter: &Cell<u64>) {
    counter.set(counter.get() + 1);
}

/// The kernel's state.
pub struct Kernel<A: Arch> {
    /// Objects and frames.
    pub memory: Memory,
    /// What each CPU runs.
    pub cpus: [Cpu<A>; MAX_CPUS],
    /// Counters.
    pub counters: Counters,
    platform_caps: Cell<u32>,
    irqs: [Cell<Option<Handle<Irq<A>>>>; IRQ_VECTORS],
    /// CPUs that must drop translations before this entry of the kernel ends.
    flush: Cell<u64>,
    /// Time, in ticks, at which [`FAULT_LINES`](thread::FAULT_LINES) lines about faults may be logged at once again.
    fault_lines: Cell<u64>,
    /// Faults that the next such line counts.
    faults_not_logged: Cell<u64>,
    /// Stopped threads whose callers are still to be told.
    stopping: Cell<Option<Handle<Thread<A>>>>,
    dying_tasks: Cell<Option<Handle<Task<A>>>>,
    dying_vms: Cell<Option<Handle<Vm<A>>>>,
}

impl<A: Arch> Kernel<A> {
    /// A kernel without objects and without memory: too large to be built anywhere but where it stays.
    pub const fn new() -> Self {
        Self {
            memory: Memory::empty(),
            cpus: [const { Cpu::new() }; MAX_CPUS],
            counters: Counters::new(),
            platform_caps: Cell::new(0),
            irqs: [const { Cell::new(None) }; IRQ_VECTORS],
            flush: Cell::new(0),
            fault_lines: Cell::new(0),
            faults_not_logged: Cell::new(0),
            stopping: Cell::new(None),
            dying_tasks: Cell::new(None),
            dying_vms: Cell::new(None),
        }
    }

    fn irq_slot(&self, vector: u8) -> Option<&Cell<Option<Handle<Irq<A>>>>> {
        self.irqs.get(vector.wrapping_sub(FIRST_IRQ_VECTOR) as usize)
    }

    /// The CPU no longer has a task's space loaded.
    pub fn clear_loaded_space(&self, cpu: usize) {
        self.cpus[cpu].space.set(None);
    }

    /// Makes a task's space the one that is loaded on a CPU; its root table is to be loaded at once.
    #[inline(always)]
    pub fn enter_space(&self, cpu: usize, handle: Handle<Task<A>>) -> &Space<A> {
        self.cpus[cpu].space.set(Some(handle));
        &self.memory.at(handle).space
    }

    /// Keeps the promise of every [`table::Flush`] of this entry.
    #[cold]
    #[inline(never)]
    fn commit_flush(&self, cpu: usize) {
        let cpus = self.flush.take();
        if cpus & 1 << cpu != 0 {
            A::flush_local();
            self.clear_loaded_space(cpu);
        }
        let others = cpus & !(1 << cpu);
        if others != 0 {
            count(&self.counters.shootdowns);
            A::shootdown(others);
            for other in (0..MAX_CPUS).filter(|other| others & 1 << other != 0) {
                self.clear_loaded_space(other);
            }
        }
    }

    /// Whether [`Kernel::finish`] has anything to do.
    #[inline(always)]
    pub fn has_work(&self, cpu: usize) -> bool {
        self.flush.get() != 0 || self.memory.has_work() || self.cpus[cpu].resched.get()
    }

    /// Ends an entry of the kernel: flushes, reuses freed memory, chooses who runs.
    #[inline(always)]
    pub fn finish(&mut self, cpu: usize) {
        if self.flush.get() != 0 {
            self.commit_flush(cpu);
        }
        if self.memory.has_work() {
            return self.finish_work(cpu);
        }
        if self.cpus[cpu].resched.get() {
            self.schedule(cpu);
        }
    }

    /// The rest of [`Kernel::finish`] where something was put off. If it is too much, the timer is to come at once: who is
    /// chosen goes on first.
    #[cold]
    #[inline(never)]
    fn finish_work(&mut self, cpu: usize) {
        let more = self.abort_calls();
        self.memory.reclaim();
        if self.cpus[cpu].resched.get() {
            self.schedule(cpu);
        }
        if more {
            self.memory.request_work();
            self.cpus[cpu].arm_immediately();
        }
    }
}

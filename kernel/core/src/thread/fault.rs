//! Exceptions of user threads.

use crate::Kernel;
use crate::arch::Arch;
use crate::count;
use crate::object::*;
use crate::pool::Handle;

/// Rate limit of fault messages, for all tasks together: burst size, and nanoseconds per further
/// message.
pub(crate) const FAULT_LINES: u64 = 20;
const FAULT_LINE_NS: u64 = 100_000_000;

impl<A: Arch> Kernel<A> {
    /// Handles an exception of a user thread: calls its fault gate, or stops the thread.
    pub fn fault(&self, cpu: usize, handle: Handle<Thread<A>>, words: [u64; 4]) {
        let thread = self.memory.at(handle);
        if let Some(gate) = thread.fault_gate.get() {
            thread.fault.set(words);
            if self.gate_call(cpu, handle, thread, gate, CallContent::Fault).is_ok() {
                return;
            }
        }
        self.log_fault(thread, words);
        self.stop_thread(handle);
    }

    /// Logs the fault of a thread without a fault gate, rate-limited over all tasks: a task can
    /// create such threads at any rate. Suppressed messages are counted.
    pub(super) fn log_fault(&self, thread: &Thread<A>, [vector, error, address, ip]: [u64; 4]) {
        let now = A::now();
        let interval = A::ticks(FAULT_LINE_NS);
        let full_at = self.fault_lines.get().max(now);
        if full_at - now > (FAULT_LINES - 1) * interval {
            count(&self.faults_not_logged);
            return;
        }
        self.fault_lines.set(full_at.saturating_add(interval));
        let more = self.faults_not_logged.take();
        if more != 0 {
            A::log(format_args!(
                "{more} further threads stopped by exceptions (messages rate-limited)"
            ));
        }
        A::log(format_args!(
            "task {:#x}: thread stopped by exception {vector} (error {error:#x}, address {address:#x}) at {ip:#x}",
            thread.task.id(),
        ));
    }
}

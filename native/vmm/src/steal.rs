//! Steal time of a vCPU: time in which its thread neither ran nor was idle, in ticks.

use abi::vcpu::RunControl;
use native_rt::SchedContext;

use crate::control::CONTROL;

/// Steal time of a vCPU since the start of its VM.
#[derive(Default)]
pub struct StealTime {
    /// Index of the vCPU, and scheduling context of its thread.
    vcpu: Option<(usize, SchedContext)>,
    /// Missed time of the thread when the VM started.
    before: u64,
    /// `preemptions` of the state page, and steal time, at the last update.
    preemptions: u64,
    ticks: u64,
}

impl StealTime {
    /// No time stolen yet from vCPU `index`, whose thread runs on `context`. `run`: of its state
    /// page.
    pub fn start(index: usize, context: SchedContext, run: &RunControl) -> Self {
        Self {
            vcpu: Some((index, context)),
            before: CONTROL.missed_ticks(index, context).wrapping_sub(run.halted.get()),
            preemptions: run.preemptions.get(),
            ticks: 0,
        }
    }

    /// Returns whether the thread has been preempted since the last update.
    pub fn is_stale(&self, run: &RunControl) -> bool {
        run.preemptions.get() != self.preemptions
    }

    /// Returns the ticks up to the last preemption.
    #[inline]
    pub fn ticks(&mut self, run: &RunControl) -> u64 {
        // Reading the used CPU time takes a system call.
        if let (true, Some((index, context))) = (self.is_stale(run), self.vcpu) {
            self.preemptions = run.preemptions.get();
            let missed = CONTROL.missed_ticks(index, context).wrapping_sub(run.halted.get());
            // It is the difference of several clocks, which all advance meanwhile.
            self.ticks = self.ticks.max(missed.wrapping_sub(self.before));
        }
        self.ticks
    }
}

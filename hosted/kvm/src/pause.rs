//! Pauses of all vCPUs.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::vcpu_thread::{Notify, VcpuThread, event};

/// Barrier at which vCPUs wait while the VM is paused.
#[derive(Default)]
pub struct PauseGate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    is_closed: bool,
    /// Number of vCPUs at the barrier.
    waiting: usize,
}

impl PauseGate {
    fn state(&self) -> MutexGuard<'_, State> {
        // Every update is atomic under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks a vCPU that has received [`event::PAUSE`] while the VM is paused.
    pub fn wait_if_paused(&self) {
        self.outside_guest(|| ());
    }

    /// Runs a blocking operation of a vCPU outside of the guest. If the VM is paused at its end,
    /// waits until it is resumed.
    pub fn outside_guest<T>(&self, act: impl FnOnce() -> T) -> T {
        self.state().waiting += 1;
        self.changed.notify_all();
        let done = act();
        let state = self.state();
        let is_closed = |state: &mut State| state.is_closed;
        let mut state =
            self.changed.wait_while(state, is_closed).unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        done
    }

    /// Pauses all vCPUs; returns when they have stopped.
    pub fn pause(&self, vcpu_threads: &[VcpuThread]) {
        let mut state = self.state();
        state.is_closed = true;
        vcpu_threads.iter().for_each(|vcpu_thread| vcpu_thread.notify(event::PAUSE));
        let is_passed = |state: &mut State| state.waiting < vcpu_threads.len();
        drop(self.changed.wait_while(state, is_passed).unwrap_or_else(PoisonError::into_inner));
    }

    /// Resumes all vCPUs.
    pub fn resume(&self) {
        self.state().is_closed = false;
        self.changed.notify_all();
    }
}

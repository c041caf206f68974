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
    /// The VM has ended: its vCPUs stop for no pause, and some do not arrive any more.
    has_ended: bool,
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
        let is_closed = |state: &mut State| state.is_closed && !state.has_ended;
        let mut state =
            self.changed.wait_while(state, is_closed).unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        done
    }

    /// Pauses all vCPUs; returns when they have stopped or the VM has ended.
    pub fn pause(&self, vcpu_threads: &[VcpuThread]) {
        let mut state = self.state();
        state.is_closed = true;
        vcpu_threads.iter().for_each(|vcpu_thread| vcpu_thread.notify(event::PAUSE));
        let is_awaited = |state: &mut State| state.waiting < vcpu_threads.len() && !state.has_ended;
        drop(self.changed.wait_while(state, is_awaited).unwrap_or_else(PoisonError::into_inner));
    }

    /// Resumes all vCPUs.
    pub fn resume(&self) {
        self.state().is_closed = false;
        self.changed.notify_all();
    }

    /// Returns whether the VM has ended.
    pub fn has_ended(&self) -> bool {
        self.state().has_ended
    }

    /// Releases all vCPUs for good, because the VM has ended.
    pub fn end(&self) {
        self.state().has_ended = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    #[test]
    fn the_end_of_the_vm_ends_a_pause() {
        let gate = Arc::new(PauseGate::default());
        let (done, ended) = channel();
        let spawn = |act: fn(&PauseGate)| {
            let (gate, done) = (Arc::clone(&gate), done.clone());
            thread::spawn(move || {
                act(&gate);
                done.send(()).unwrap();
            });
        };
        spawn(|gate| gate.pause(&[VcpuThread::default(), VcpuThread::default()]));
        while !gate.state().is_closed {
            thread::yield_now();
        }
        spawn(PauseGate::wait_if_paused);
        while gate.state().waiting == 0 {
            thread::yield_now();
        }
        // The second vCPU ends the VM instead of arriving.
        gate.end();
        for _ in 0..2 {
            ended.recv_timeout(Duration::from_secs(60)).expect("a thread waits for ever");
        }
    }
}

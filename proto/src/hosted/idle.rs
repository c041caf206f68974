//! Waiting vCPUs of a guest in Linux processes. Device processes outside of the VM, which cannot
//! send signals to it, notify a vCPU here that polls or sleeps; for a running one they notify the
//! VM's device process.

use core::sync::atomic::{AtomicU32, Ordering::SeqCst};

use super::layout;
use crate::system::MAX_VCPUS;

/// Values of [`IdleRecord::state`].
pub mod state {
    /// Running: must be interrupted.
    pub const BUSY: u32 = 0;
    /// Sleeping: waits for the futex [`IdleRecord::wakeups`](super::IdleRecord::wakeups).
    pub const SLEEPING: u32 = 1;
    /// Polling for events: needs no notification.
    pub const POLLING: u32 = 2;
}

/// Wait of a vCPU. The guest can overwrite all of it.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct IdleRecord {
    /// See [`state`].
    pub state: AtomicU32,
    /// Not 0: requests of devices have completed since the vCPU looked last.
    pub completions: AtomicU32,
    /// Number of wake-ups: futex of the sleeping vCPU.
    pub wakeups: AtomicU32,
}

/// Records of all vCPUs, at [`layout::IDLE`].
pub type IdleRecords = [IdleRecord; MAX_VCPUS];

const _: () = assert!(layout::IDLE + size_of::<IdleRecords>() as u64 <= layout::DEBUG);

impl IdleRecord {
    /// Creates the record of a vCPU that does not wait, equal to zeroed memory.
    #[expect(clippy::new_without_default, reason = "as `Queue::new`")]
    pub const fn new() -> Self {
        let [state, completions, wakeups] = [const { AtomicU32::new(0) }; 3];
        Self { state, completions, wakeups }
    }

    /// Notifies the vCPU of completed requests, if it waits; returns whether it does. `wake` wakes
    /// the threads that wait for a futex.
    pub fn notify(&self, wake: impl FnOnce(&AtomicU32)) -> bool {
        if self.state.load(SeqCst) == state::BUSY {
            return false;
        }
        self.completions.store(1, SeqCst);
        // A vCPU looks at the completions after it has changed its state.
        match self.state.load(SeqCst) {
            state::BUSY => return false,
            state::POLLING => {}
            _ => self.wake(wake),
        }
        true
    }

    /// Wakes the sleeping vCPU; `wake` is as in [`IdleRecord::notify`].
    pub fn wake(&self, wake: impl FnOnce(&AtomicU32)) {
        self.wakeups.fetch_add(1, SeqCst);
        wake(&self.wakeups);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn woken(state: u32) -> (bool, u32, bool) {
        let record = IdleRecord::new();
        record.state.store(state, SeqCst);
        let mut is_woken = false;
        let waits = record.notify(|wakeups| is_woken = wakeups.load(SeqCst) == 1);
        (waits, record.completions.load(SeqCst), is_woken)
    }

    #[test]
    fn a_waiting_vcpu_is_notified() {
        assert_eq!(woken(state::BUSY), (false, 0, false));
        assert_eq!(woken(state::POLLING), (true, 1, false));
        assert_eq!(woken(state::SLEEPING), (true, 1, true));
        // The guest may write anything.
        assert_eq!(woken(u32::MAX), (true, 1, true));
    }
}

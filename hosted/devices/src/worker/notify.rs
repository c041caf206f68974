//! Notification of the VM that requests have completed.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use proto::hosted::idle::IdleRecords;
use proto::requests::Queue;

/// Means of a device process to notify its VM.
#[derive(Debug)]
pub struct Notifier {
    /// Waiting vCPUs. The guest can overwrite it.
    pub vcpus: &'static IdleRecords,
    /// eventfd(2) of the VM's device process or thread.
    pub doorbell: OwnedFd,
}

impl Notifier {
    /// Notifies the vCPU of a queue of completions: directly if it waits, otherwise by the device
    /// process, which can interrupt it. `wake` wakes the threads that wait for a futex.
    pub fn notify(&self, queue: &Queue, wake: impl FnOnce(&AtomicU32)) {
        let vcpu = self.vcpus.get(queue.target.load(Relaxed) as usize);
        if vcpu.is_some_and(|vcpu| vcpu.notify(wake)) {
            return;
        }
        queue.pending.store(1, SeqCst);
        // The counter of the eventfd cannot overflow: each read resets it.
        let _ = rustix::io::write(&self.doorbell, &1_u64.to_ne_bytes());
    }
}

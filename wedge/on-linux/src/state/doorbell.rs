//! Requests of a guest process to the device process.

use core::sync::atomic::Ordering::SeqCst;

use host_linux::sys;
use proto::hosted::layout;

use crate::state::shared::{shared, started};

/// Wakes the device process.
pub fn notify() {
    let shared = shared();
    if shared.pending.swap(1, SeqCst) == 0 {
        let one = 1_u64.to_ne_bytes();
        // The eventfd counter cannot overflow: it is incremented once for each read.
        let _ = sys::write(layout::DOORBELL_FD, &one);
    }
}

/// Waits until the device process has acknowledged that the guest is about to execute its first
/// instruction.
pub fn await_start() {
    let word = &shared().started;
    word.store(started::READY, SeqCst);
    notify();
    while word.load(SeqCst) == started::READY {
        sys::wait(word, started::READY, None);
    }
}

/// Ends the VM with an exit code.
pub fn end_vm(code: u8) -> ! {
    let shared = shared();
    // The first call determines the exit code.
    let _ = shared.ended.compare_exchange(0, u32::from(code) + 1, SeqCst, SeqCst);
    shared.pending.store(0, SeqCst);
    notify();
    // The device process kills all other processes.
    loop {
        sys::wait(&shared.ended, shared.ended.load(SeqCst), None);
    }
}

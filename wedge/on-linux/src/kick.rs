//! Notification of vCPUs.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use host_linux::sys;

use crate::linux::signals::KICK;
use crate::state::config;
use crate::state::doorbell;
use crate::state::shared::{SharedVcpu, idle_state, shared, vcpus};

/// Wakes a sleeping vCPU after an event was posted. `false`: it is running and must be interrupted.
pub fn wake(vcpu: &SharedVcpu) -> bool {
    match vcpu.idle.load(SeqCst) {
        idle_state::BUSY => return false,
        idle_state::POLLING => {}
        _ => sys::wake(vcpu.events()),
    }
    true
}

/// Posts an event to a vCPU, from processes other than the device process. Where these may not send
/// signals, the device process does.
pub fn raise_event(index: usize, what: u32) {
    let Some(vcpu) = vcpus().get(index) else { return };
    if vcpu.events().fetch_or(what, SeqCst) & what != 0 || wake(vcpu) {
        return;
    }
    interrupt(index);
}

/// Posts the event of a completion to the vCPU that its device interrupts (see
/// [`Shared::targets`](crate::state::shared::Shared::targets)).
pub fn raise_completion(device: usize, what: u32) {
    raise_event(target(device), what);
}

/// Returns the vCPU to notify of a device's completions.
pub fn target(device: usize) -> usize {
    shared().targets.get(device).map_or(0, |target| target.load(Relaxed).into())
}

/// Interrupts a vCPU, directly or by the device process.
pub fn interrupt(index: usize) {
    let Some(vcpu) = vcpus().get(index) else { return };
    if config::kicks() {
        // During a switch of the process, or before the process has its handler, the next process
        // checks.
        let slot = vcpu.slots.get(vcpu.running.load(SeqCst) as usize);
        let process = slot.map_or(0, |slot| slot.process.load(SeqCst));
        if process != 0 {
            sys::kill(process, KICK);
        }
        return;
    }
    shared().kick.fetch_or(1 << index, SeqCst);
    doorbell::notify();
}

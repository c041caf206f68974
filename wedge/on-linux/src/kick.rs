//! Notification of vCPUs.

use core::sync::atomic::Ordering::SeqCst;

use host_linux::sys;

use crate::idle;
use crate::linux::signals::KICK;
use crate::state::config;
use crate::state::doorbell;
use crate::state::shared::{SharedVcpu, idle_state, shared, vcpus};

/// Wakes a sleeping vCPU after an event was posted. `false`: it is running and must be interrupted.
pub fn wake(index: usize, vcpu: &SharedVcpu) -> bool {
    match vcpu.idle.load(SeqCst) {
        idle_state::BUSY => return false,
        idle_state::POLLING => {}
        _ => idle::record(index).wake(sys::wake),
    }
    true
}

/// Posts an event to a vCPU, from processes other than the device process. Where these may not send
/// signals, the device process does.
pub fn raise_event(index: usize, what: u32) {
    let Some(vcpu) = vcpus().get(index) else { return };
    if vcpu.events().fetch_or(what, SeqCst) & what != 0 || wake(index, vcpu) {
        return;
    }
    interrupt(index);
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

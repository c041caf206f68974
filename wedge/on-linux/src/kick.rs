//! Notification of vCPUs.
//!
//! Linux wakes threads of other vCPUs under spin locks, with interrupts disabled. The process of a
//! vCPU that the host wakes may preempt its waker, the owner of the lock, for which others spin
//! then for a time slice of the host. So wakes by a guest with interrupts disabled are deferred
//! until it enables them, or has nothing to do, or for [`LONGEST`] at most: a guest may wait for
//! the other vCPU with interrupts disabled.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use host_linux::sys;

use crate::clock;
use crate::idle;
use crate::linux::signals::KICK;
use crate::state::config;
use crate::state::doorbell;
use crate::state::shared::{SharedVcpu, event, idle_state, shared, vcpu, vcpus};
use crate::timer;

/// Longest time in microseconds for which a wake is deferred.
const LONGEST: u64 = 1_000;

/// Wakes a sleeping vCPU after an event was posted. `false`: it is running and must be interrupted.
pub fn wake(index: usize, vcpu: &SharedVcpu) -> bool {
    match vcpu.idle.load(SeqCst) {
        idle_state::BUSY => return false,
        idle_state::POLLING => {}
        _ => idle::record(index).wake(sys::wake),
    }
    true
}

/// Notifies another vCPU on behalf of the guest. Its wake may be deferred.
pub fn notify(index: usize) {
    let (own, Some(target)) = (vcpu(), vcpus().get(index)) else { return };
    let is_asleep = || target.idle.load(SeqCst) == idle_state::SLEEPING;
    if !own.may_defer.load(Relaxed) || !is_asleep() {
        return raise_event(index, event::KICK);
    }
    // The vCPU that has posted it before wakes the target, which looks for events before it sleeps.
    if target.events().fetch_or(event::KICK, SeqCst) & event::KICK == 0 {
        own.deferred.fetch_or(1 << index, Relaxed);
        timer::arm_by(clock::tsc().saturating_add(clock::ticks(LONGEST)));
    }
}

/// Carries out the deferred wakes of this vCPU.
pub fn wake_deferred() {
    let own = vcpu();
    if own.deferred.load(Relaxed) == 0 {
        return;
    }
    let mut deferred = own.deferred.swap(0, Relaxed);
    while deferred != 0 {
        let index = deferred.trailing_zeros() as usize;
        deferred &= deferred - 1;
        idle::record(index).wake(sys::wake);
    }
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

//! Idle vCPUs: polling and waiting for events.
//!
//! On a host with several CPUs an idle vCPU polls first: then a notifier on another CPU need not
//! wake it, which would cost both more than a short wait. As in KVM (`halt_poll_ns`,
//! `Documentation/virt/kvm/halt-polling.rst` in Linux), the polling time grows while waits are
//! slightly longer than it, and drops to 0 after long waits.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use host_linux::sys;

use crate::clock::tsc;
use crate::state::process::process;
use crate::state::shared::{event, events, idle_state, vcpu};
use crate::{clock, cpu_affinity, steal_time, timer};

/// Initial polling time in microseconds.
const MIN_POLL: u64 = 10;
/// Longest polling time in microseconds; polling starts after a wait that was not longer. It bounds
/// the delay of other threads on this host CPU.
const MAX_POLL: u64 = 50;

/// Waits until an event is pending or the TSC reaches `deadline`; returns the pending events and
/// clears them.
pub fn wait(deadline: u64) -> u32 {
    let vcpu = vcpu();
    if !poll(deadline) {
        cpu_affinity::on_idle();
        vcpu.idle.store(idle_state::SLEEPING, SeqCst);
        let limit = (deadline != u64::MAX).then(|| timer::until(deadline));
        if limit != Some(0) && events().load(SeqCst) == 0 {
            let begin = tsc();
            steal_time::on_idle();
            sys::wait(events(), 0, limit);
            steal_time::on_resume();
            vcpu.poll_ticks.set(next(vcpu.poll_ticks.get(), tsc().saturating_sub(begin)));
        }
    }
    vcpu.idle.store(idle_state::BUSY, SeqCst);
    let pending = events().swap(0, SeqCst);
    if pending & event::TIMER != 0 {
        // The caller checks the time; the timer must be set again in any case.
        process().armed.store(u64::MAX, Relaxed);
        timer::arm_timer();
    }
    pending
}

/// Polls for events; returns whether one is pending or the deadline has passed.
fn poll(deadline: u64) -> bool {
    let vcpu = vcpu();
    let limit = vcpu.poll_ticks.get();
    if limit == 0 || !cpu_affinity::has_several_cpus() {
        return false;
    }
    vcpu.idle.store(idle_state::POLLING, SeqCst);
    let end = tsc().saturating_add(limit);
    loop {
        if events().load(SeqCst) != 0 {
            return true;
        }
        let now = tsc();
        if now >= deadline {
            return true;
        }
        if now >= end {
            return false;
        }
        core::hint::spin_loop();
    }
}

/// Returns the next polling time in ticks, after polling for `looks` and waiting for `waited`
/// ticks.
fn next(polled: u64, waited: u64) -> u64 {
    let most = clock::ticks(MAX_POLL);
    if waited > most { 0 } else { (2 * polled).clamp(clock::ticks(MIN_POLL), most) }
}

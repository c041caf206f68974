//! A virtual CPU that has nothing to do waits for events.
//!
//! Where the host has several CPUs it looks for them itself at first: whoever runs on another CPU then has nobody to wake, which would cost
//! both sides more than a short wait. As KVM does (`halt_poll_ns`, `Documentation/virt/kvm/halt-polling.rst` in Linux), it looks for longer when its
//! last waits were a little longer than that, and not at all when they were long.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use crate::guest::tsc;
use crate::shared::{event, events, mine, vcpu};
use crate::{clock, cpu_affinity, signal, steal_time, sys};

/// It looks for so long when it begins to, in microseconds.
const MIN_POLL: u64 = 10;
/// It never looks for longer, and begins to when a wait was not longer. Whoever needs this host CPU waits for so long at most.
const MAX_POLL: u64 = 50;

/// Values of [`crate::shared::SharedVcpu::idle`].
pub mod state {
    /// It does something: whoever has an event must interrupt it.
    pub const BUSY: u32 = 0;
    /// It is to be woken.
    pub const SLEEPING: u32 = 1;
    /// It looks for events.
    pub const POLLING: u32 = 2;
}

/// Whoever has left an event for a virtual CPU wakes it if that waits; `false`: it has to be interrupted.
pub fn wake(vcpu: &crate::shared::SharedVcpu) -> bool {
    match vcpu.idle.load(SeqCst) {
        state::BUSY => return false,
        state::POLLING => {}
        _ => sys::wake(vcpu.events()),
    }
    true
}

/// Waits for events, which it takes, or until the time-stamp counter has this value. A halted virtual CPU does not take them itself.
pub fn wait(deadline: u64) -> u32 {
    let vcpu = vcpu();
    if !poll(deadline) {
        cpu_affinity::on_idle();
        vcpu.idle.store(state::SLEEPING, SeqCst);
        let limit = (deadline != u64::MAX).then(|| signal::until(deadline));
        if limit != Some(0) && events().load(SeqCst) == 0 {
            let begin = tsc();
            steal_time::on_idle();
            sys::wait(events(), 0, limit);
            steal_time::on_resume();
            vcpu.poll_ticks.set(next(vcpu.poll_ticks.get(), tsc().saturating_sub(begin)));
        }
    }
    vcpu.idle.store(state::BUSY, SeqCst);
    let pending = events().swap(0, SeqCst);
    if pending & event::TIMER != 0 {
        // The machine looks at the time itself; the timer has to be set again in any case.
        mine().armed.store(u64::MAX, Relaxed);
        signal::arm();
    }
    pending
}

/// Looks for events for as long as seems right; whether there are any, or the time has come.
fn poll(deadline: u64) -> bool {
    let vcpu = vcpu();
    let limit = vcpu.poll_ticks.get();
    if limit == 0 || !cpu_affinity::has_several_cpus() {
        return false;
    }
    vcpu.idle.store(state::POLLING, SeqCst);
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

/// For how long it looks the next time if it has looked for `looks` and then waited for `waited`, in ticks.
fn next(polled: u64, waited: u64) -> u64 {
    let most = clock::ticks(MAX_POLL);
    if waited > most { 0 } else { (2 * polled).clamp(clock::ticks(MIN_POLL), most) }
}

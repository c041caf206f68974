//! Idle vCPUs: polling and waiting for events.
//!
//! On a host with several CPUs an idle vCPU polls first: then a notifier on another CPU need not
//! wake it, which would cost both more than a short wait. The polling time follows the length of
//! the waits ([`proto::polling`]).

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use host_linux::sys;
use proto::hosted::idle::{IdleRecord, IdleRecords, state};
use proto::hosted::layout;
use proto::polling;
use vmm_vcpu::MAX_VCPUS;

use crate::clock::tsc;
use crate::state::fixed::Fixed;
use crate::state::process::{own_index, process};
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
    let [least, most] = [MIN_POLL, MAX_POLL].map(clock::ticks);
    let polled = vcpu.poll_ticks.get();
    if poll(deadline) {
        vcpu.poll_ticks.set(polling::after_event(polled, most));
    } else {
        cpu_affinity::on_idle();
        let record = own_record();
        let seen = record.wakeups.load(SeqCst);
        vcpu.idle.store(idle_state::SLEEPING, SeqCst);
        record.state.store(state::SLEEPING, SeqCst);
        let limit = (deadline != u64::MAX).then(|| timer::until(deadline));
        if limit != Some(0) && !is_notified() {
            let begin = tsc();
            steal_time::on_idle();
            sys::wait(&record.wakeups, seen, limit);
            steal_time::on_resume();
            let waited = tsc().saturating_sub(begin);
            vcpu.poll_ticks.set(polling::after_wait(polled, waited, least, most));
        }
    }
    vcpu.idle.store(idle_state::BUSY, SeqCst);
    own_record().state.store(state::BUSY, SeqCst);
    let mut pending = events().swap(0, SeqCst);
    if own_record().completions.swap(0, SeqCst) != 0 {
        pending |= event::DISK | event::SHARE;
    }
    if pending & event::TIMER != 0 {
        // The caller checks the time; the timer must be set again in any case.
        process().armed.store(u64::MAX, Relaxed);
        timer::arm_timer();
    }
    pending
}

/// Returns whether an event is pending.
fn is_notified() -> bool {
    events().load(SeqCst) != 0 || own_record().completions.load(SeqCst) != 0
}

/// Returns the record of a vCPU, for device processes outside of the VM.
pub fn record(index: usize) -> &'static IdleRecord {
    &IdleRecords::get()[index % MAX_VCPUS]
}

fn own_record() -> &'static IdleRecord {
    record(own_index())
}

// SAFETY: the device process has mapped the shared memory, initially zero; all fields are atomic.
unsafe impl Fixed for IdleRecords {
    const ADDRESS: u64 = layout::SHARED + layout::IDLE;
}

/// Polls for events; returns whether one is pending or the deadline has passed.
fn poll(deadline: u64) -> bool {
    let vcpu = vcpu();
    let limit = vcpu.poll_ticks.get();
    if limit == 0 || !cpu_affinity::has_several_cpus() {
        return false;
    }
    vcpu.idle.store(idle_state::POLLING, SeqCst);
    own_record().state.store(state::POLLING, SeqCst);
    let end = tsc().saturating_add(limit);
    loop {
        for _ in 0..polling::LOOKS {
            if is_notified() {
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
        // The notifier may wait for this CPU.
        sys::yield_now();
    }
}

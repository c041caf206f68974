//! Stolen time: the time for which a vCPU was ready and the host ran something else.
//!
//! The processes of a vCPU run it one after another. The TSC measures how long each held it,
//! without its idle time; the host's CPU-time clock of the process measures how much of that it
//! ran. The difference is stolen time. Reading that clock is a system call, so it is read only
//! before the guest reads its stolen time, and at most [`QUERIES_PER_SECOND`] times per second; the
//! time of a process that is not running then is accounted in one of its next turns. A switch of
//! the process reads only the TSC: a delay beyond the cost of a switch ([`SWITCH_TIME`]) is stolen
//! time, too.
//!
//! Switches and waits use CPU time outside of turns, so the reported time is a lower bound. A wait
//! for a host CPU when the vCPU stops being idle counts as idle time; a pause of the VM counts as
//! stolen time.

use linux_raw_sys::general as linux;

use crate::clock;
use crate::clock::tsc;
use crate::state::config::config;
use crate::state::process::process;
use crate::state::records::{StealState, TurnTimes};
use crate::state::shared::vcpu;

/// Largest number of queries of the host clock per second.
const QUERIES_PER_SECOND: u64 = 125;
/// Cost of a switch of the process on an idle host in microseconds.
const SWITCH_TIME: u64 = 250;

fn update(change: impl FnOnce(&mut StealState, &mut TurnTimes)) {
    let (steal, turns) = (&vcpu().steal, &process().turns);
    let (mut of_vcpu, mut own) = (steal.get(), turns.get());
    change(&mut of_vcpu, &mut own);
    steal.set(of_vcpu);
    turns.set(own);
}

/// Ends the running interval: the vCPU is about to wait.
pub fn on_idle() {
    update(|steal, turns| {
        turns.held = turns.held.saturating_add(tsc().saturating_sub(steal.since));
    });
}

/// Starts a running interval: the vCPU resumes or starts.
pub fn on_resume() {
    update(|steal, _| steal.since = tsc());
}

/// Ends the running interval before another process takes over the vCPU.
pub fn on_hand_over() {
    update(|steal, turns| {
        let now = tsc();
        turns.held = turns.held.saturating_add(now.saturating_sub(steal.since));
        steal.handed_over = now;
    });
}

/// Starts a running interval after taking over the vCPU.
pub fn on_take_over() {
    update(|steal, _| {
        let now = tsc();
        let waited = now.saturating_sub(steal.handed_over);
        if waited > clock::ticks(SWITCH_TIME) {
            steal.ticks = steal.ticks.saturating_add(waited);
        }
        steal.since = now;
    });
}

/// Returns the stolen time of this process's vCPU in TSC ticks.
pub fn stolen_ticks() -> u64 {
    update(|steal, turns| {
        let now = tsc();
        if now.saturating_sub(steal.queried) < clock::ticks(1_000_000 / QUERIES_PER_SECOND) {
            return;
        }
        let cpu = clock::now(linux::CLOCK_PROCESS_CPUTIME_ID);
        let ran =
            u128::from(cpu.saturating_sub(turns.cpu)) * u128::from(config().tsc_khz) / 1_000_000;
        let held = turns.held.saturating_add(now.saturating_sub(steal.since));
        let stolen = held.saturating_sub(u64::try_from(ran).unwrap_or(u64::MAX));
        steal.ticks = steal.ticks.saturating_add(stolen);
        *steal = StealState { since: now, queried: now, ..*steal };
        *turns = TurnTimes { held: 0, cpu };
    });
    vcpu().steal.get().ticks
}

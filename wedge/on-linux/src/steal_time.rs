//! Stolen time: how long a virtual CPU was ready and the host ran something else.
//!
//! One process after another has the virtual CPU. The time-stamp counter says how long each held it, without the time that it was idle, and the
//! host's clock of the process says how much of that it ran; the difference is stolen. To read that clock is a system call, so it is
//! done when the guest is about to be told, and not more often than [`QUERIES_PER_SECOND`] times a second; what a process was not asked about it is asked
//! when that falls into one of its next turns. At a change of the process nothing but the counter is read: what the next one comes
//! later than a change takes by itself ([`SWITCH_TIME`]) is stolen, too.
//!
//! Changes and waits cost CPU time outside of turns, so less counts as stolen than was. What the virtual CPU waits for its host CPU when it stops
//! being idle counts as idle; a pause of the machine counts as stolen.

use linux_raw_sys::general as linux;

use crate::clock;
use crate::config::config;
use crate::guest::tsc;
use crate::shared::{mine, vcpu};

/// Times a second that the host is queried, at most.
const QUERIES_PER_SECOND: u64 = 125;
/// Microseconds that a change of the process may take on a host that has nothing else to do.
const SWITCH_TIME: u64 = 250;

/// Of a virtual CPU. Times are ticks of the time-stamp counter.
#[derive(Clone, Copy, Debug)]
pub struct StealState {
    /// Since when it has been running, without the host being queried.
    since: u64,
    /// When a process gave it to another one.
    handed_over: u64,
    /// When the host was asked last.
    queried: u64,
    /// What has been stolen so far.
    ticks: u64,
}

/// Of a process.
#[derive(Clone, Copy, Debug)]
pub struct TurnTimes {
    /// Ticks that it has held the virtual CPU, which was not idle, since the host was queried.
    held: u64,
    /// CPU time when the host was queried, in nanoseconds.
    cpu: u64,
}

fn update(change: impl FnOnce(&mut StealState, &mut TurnTimes)) {
    let (steal, turns) = (&vcpu().steal, &mine().turns);
    let (mut of_vcpu, mut own) = (steal.get(), turns.get());
    change(&mut of_vcpu, &mut own);
    steal.set(of_vcpu);
    turns.set(own);
}

/// The virtual CPU is about to wait.
pub fn on_idle() {
    update(|steal, turns| {
        turns.held = turns.held.saturating_add(tsc().saturating_sub(steal.since));
    });
}

/// The virtual CPU has something to do again, or for the first time.
pub fn on_resume() {
    update(|steal, _| steal.since = tsc());
}

/// This process is about to give the virtual CPU to another one.
pub fn on_hand_over() {
    update(|steal, turns| {
        let now = tsc();
        turns.held = turns.held.saturating_add(now.saturating_sub(steal.since));
        steal.handed_over = now;
    });
}

/// This process has got the virtual CPU.
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

/// Ticks that have been stolen of this process's virtual CPU, which is running.
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

//! Stolen time: how long a virtual CPU was ready and the host ran something else.
//!
//! One process after another has the virtual CPU. The time-stamp counter says how long each had it, without the time that it was idle, and the
//! host's clock of the process says how much of that it ran; the difference is stolen. To read that clock is a system call, so it is
//! done when the guest is about to be told, and not more often than [`QUESTIONS`] times a second; what a process was not asked about it is asked
//! when that falls into one of its next turns. At a change of the process nothing but the counter is read: what the next one comes
//! later than a change takes by itself ([`LATE`]) is stolen, too.
//!
//! Changes and waits cost CPU time outside of turns, so less counts as stolen than was. What the virtual CPU waits for its host CPU when it stops
//! being idle counts as idle; a pause of the machine counts as stolen.

use linux_raw_sys::general as linux;

use crate::clock;
use crate::config::config;
use crate::guest::tsc;
use crate::shared::{mine, vcpu};

/// Times a second that the host is asked, at most.
const QUESTIONS: u64 = 125;
/// Microseconds that a change of the process may take on a host that has nothing else to do.
const LATE: u64 = 250;

/// Of a virtual CPU. Times are ticks of the time-stamp counter.
#[derive(Clone, Copy, Debug)]
pub struct Steal {
    /// Since when it has been running, without the host being asked.
    since: u64,
    /// When a process gave it to another one.
    given: u64,
    /// When the host was asked last.
    asked: u64,
    /// What has been stolen so far.
    ticks: u64,
}

/// Of a process.
#[derive(Clone, Copy, Debug)]
pub struct Turns {
    /// Ticks that it has had the virtual CPU, which was not idle, since the host was asked.
    had: u64,
    /// CPU time when the host was asked, in nanoseconds.
    cpu: u64,
}

fn update(change: impl FnOnce(&mut Steal, &mut Turns)) {
    let (steal, turns) = (&vcpu().steal, &mine().turns);
    let (mut of_vcpu, mut own) = (steal.get(), turns.get());
    change(&mut of_vcpu, &mut own);
    steal.set(of_vcpu);
    turns.set(own);
}

/// The virtual CPU is about to wait.
pub fn rest() {
    update(|steal, turns| {
        turns.had = turns.had.saturating_add(tsc().saturating_sub(steal.since));
    });
}

/// The virtual CPU has something to do again, or for the first time.
pub fn go_on() {
    update(|steal, _| steal.since = tsc());
}

/// This process is about to give the virtual CPU to another one.
pub fn give() {
    update(|steal, turns| {
        let now = tsc();
        turns.had = turns.had.saturating_add(now.saturating_sub(steal.since));
        steal.given = now;
    });
}

/// This process has got the virtual CPU.
pub fn take() {
    update(|steal, _| {
        let now = tsc();
        let waited = now.saturating_sub(steal.given);
        if waited > clock::ticks(LATE) {
            steal.ticks = steal.ticks.saturating_add(waited);
        }
        steal.since = now;
    });
}

/// Ticks that have been stolen of this process's virtual CPU, which is running.
pub fn stolen() -> u64 {
    update(|steal, turns| {
        let now = tsc();
        if now.saturating_sub(steal.asked) < clock::ticks(1_000_000 / QUESTIONS) {
            return;
        }
        let cpu = clock::now(linux::CLOCK_PROCESS_CPUTIME_ID);
        let ran =
            u128::from(cpu.saturating_sub(turns.cpu)) * u128::from(config().tsc_khz) / 1_000_000;
        let had = turns.had.saturating_add(now.saturating_sub(steal.since));
        let stolen = had.saturating_sub(u64::try_from(ran).unwrap_or(u64::MAX));
        steal.ticks = steal.ticks.saturating_add(stolen);
        *steal = Steal { since: now, asked: now, ..*steal };
        *turns = Turns { had: 0, cpu };
    });
    vcpu().steal.get().ticks
}

//! Timer of a process: it expires at the deadline of the vCPU that the process runs.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use host_linux::sys::{self, Errno};
use linux_raw_sys::general as linux;

use crate::clock::tsc;
use crate::linux::signals::TIMER;
use crate::report;
use crate::state::config::config;
use crate::state::process::process;
use crate::state::shared::{event, events, vcpu};

/// Sets this process's timer to the deadline of the vCPU.
pub fn arm_timer() {
    let deadline = vcpu().deadline.load(Relaxed);
    if deadline <= tsc() {
        // This process's timer may have expired while another process ran the vCPU.
        events().fetch_or(event::TIMER, SeqCst);
        return;
    }
    let armed = process().armed.load(Relaxed);
    if armed == deadline || armed < deadline && vcpu().deferred.load(Relaxed) != 0 {
        return;
    }
    arm(deadline);
}

/// Sets this process's timer to a time before the deadline of the vCPU, unless it expires sooner.
pub fn arm_by(time: u64) {
    if process().armed.load(Relaxed) > time {
        arm(time);
    }
}

fn arm(time: u64) {
    process().armed.store(time, Relaxed);
    if let Err(error) = set_timer(time) {
        report::fatal(format_args!("timer_settime failed: {error}"));
    }
}

/// Returns the time until the TSC reaches a value in nanoseconds.
pub fn until(deadline: u64) -> u64 {
    let ticks = deadline.saturating_sub(tsc());
    let nanoseconds = u128::from(ticks) * 1_000_000 / u128::from(config().tsc_khz);
    u64::try_from(nanoseconds).unwrap_or(u64::MAX)
}

fn set_timer(deadline: u64) -> Result<(), Errno> {
    let timer = process().timer.load(Relaxed).into();
    // A time of 0 disarms the timer.
    let wait = if deadline == u64::MAX { 0 } else { until(deadline).max(1) };
    let time = [0, 0, wait / 1_000_000_000, wait % 1_000_000_000];
    sys::set_timer(timer, &time)
}

/// Creates this process's timer. Its clock continues while the host is suspended, as the TSC does
/// (suspend-to-idle). Timers count against a per-user limit, so the guest kernel must not create
/// any.
pub fn create_timer() -> Result<(), Errno> {
    let timer = sys::create_timer(linux::CLOCK_BOOTTIME, TIMER)?;
    process().timer.store(timer, Relaxed);
    Ok(())
}

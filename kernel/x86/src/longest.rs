//! Measurement of the longest path through the kernel, from lock to unlock, with interrupts off.
//! Only in a kernel built for it (`--cfg parador_longest_path`), on one CPU, where the lock is
//! never contended.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::time;

/// Time at which the lock was acquired, in TSC ticks; 0 during boot.
static BEGIN: AtomicU64 = AtomicU64::new(0);
/// Longest path so far, in TSC ticks.
static LONGEST: AtomicU64 = AtomicU64::new(0);

/// Cause of the current path.
static CAUSE: AtomicU64 = AtomicU64::new(0);

/// Records the cause of the current path: an operation, or [`VECTOR`] plus a vector.
#[inline(always)]
pub fn caused_by(cause: u64) {
    CAUSE.store(cause, Ordering::Relaxed);
}

/// Flag of a vector in [`caused_by`].
pub const VECTOR: u64 = 1 << 32;

/// Begins a path: the lock has been acquired.
#[inline(always)]
pub fn begin() {
    BEGIN.store(time::tsc(), Ordering::Relaxed);
}

/// Ends a path, before the lock is released. Logs it if it is the longest so far, in nanoseconds,
/// which equal instructions under QEMU's icount.
#[inline(always)]
pub fn end() {
    let begin = BEGIN.load(Ordering::Relaxed);
    let ticks = time::tsc().wrapping_sub(begin);
    if begin != 0 && ticks > LONGEST.load(Ordering::Relaxed) {
        LONGEST.store(ticks, Ordering::Relaxed);
        let cause = CAUSE.load(Ordering::Relaxed);
        let length = time::to_nanoseconds(ticks);
        crate::log!("VB kernel_max {length} ns begun by {cause:#x}");
    }
}

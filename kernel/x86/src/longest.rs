//! The longest path through the kernel: from where the lock is taken to where it is given back interrupts are off. Only in
//! the kernel that is built to be measured (`--cfg parador_longest_path`), on one CPU, where nobody waits for the lock.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::time;

/// When the lock was taken; 0: not since boot.
static BEGIN: AtomicU64 = AtomicU64::new(0);
/// The longest so far, in ticks of the TSC.
static LONGEST: AtomicU64 = AtomicU64::new(0);

/// What the path began with.
static CAUSE: AtomicU64 = AtomicU64::new(0);

/// Says what the path began with: an operation, or [`VECTOR`] and a vector.
#[inline(always)]
pub fn caused_by(cause: u64) {
    CAUSE.store(cause, Ordering::Relaxed);
}

/// Marks a vector for [`caused_by`].
pub const VECTOR: u64 = 1 << 32;

/// The lock has been taken.
#[inline(always)]
pub fn begin() {
    BEGIN.store(time::tsc(), Ordering::Relaxed);
}

/// The lock is about to be given back. Logs the path if it is longer than all before it, in nanoseconds, which are
/// instructions where QEMU counts them.
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

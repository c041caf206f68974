//! Signal stacks, which user mode can read with protection keys: what signals have left on them is
//! cleared before the guest runs.

use core::sync::atomic::Ordering::Relaxed;

use crate::state::process::process;
use crate::state::shared::{SIGNAL_STACK, SIGNAL_STACK_LENGTH};

/// Records the part of the signal stack that a frame has used.
pub fn note_frame(context: u64) {
    // Below the context is only the return address of the handler.
    let page = context & !0xfff;
    if (SIGNAL_STACK..SIGNAL_STACK + SIGNAL_STACK_LENGTH).contains(&page) {
        process().frames.fetch_max(SIGNAL_STACK + SIGNAL_STACK_LENGTH - page, Relaxed);
    }
}

/// Marks all used parts of the signal stacks for clearing.
pub fn mark_stale() {
    process().scrubs.store(ALL, Relaxed);
}

/// Values of [`crate::state::process::ProcessState::scrubs`]: frames of the kernel only; frames of
/// any origin.
const KERNEL: u8 = 1;
const ALL: u8 = 2;

/// Clears the used parts of the signal stacks before the guest runs, with protection keys: user
/// mode can read them.
pub fn scrub() {
    /// Largest stack usage of a handler on its own stack in bytes.
    const HANDLER: usize = 0x2000;
    let process = process();
    let scrubs = process.scrubs.swap(0, Relaxed);
    if scrubs == 0 {
        return;
    }
    let length = process.frames.swap(0, Relaxed).min(SIGNAL_STACK_LENGTH);
    let handler = if scrubs == ALL { HANDLER } else { 0 };
    for (end, length) in [
        (SIGNAL_STACK + SIGNAL_STACK_LENGTH, length as usize),
        (wedge_x86::HANDLER_STACK_TOP, handler),
    ] {
        // SAFETY: these stacks are unused now: a handler that interrupts this function has finished
        // when it continues.
        unsafe { core::ptr::write_bytes((end - length as u64) as *mut u8, 0, length) };
    }
}

/// Notes that a signal has interrupted the kernel or the wedge, with its context at an address.
pub fn note_kernel_signal(context: u64) {
    note_frame(context);
    process().scrubs.fetch_max(KERNEL, Relaxed);
}

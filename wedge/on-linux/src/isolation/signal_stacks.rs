//! Signal stacks, which user mode can read with protection keys: what signals have left on them is
//! cleared before the guest runs.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use crate::state::process::process;
use crate::state::shared::{SIGNAL_STACK, SIGNAL_STACK_LENGTH};

/// Records the part of the signal stack that is used from this address on.
fn note_used(frames: &AtomicU64, lowest: u64) {
    let page = lowest & !0xfff;
    if (SIGNAL_STACK..SIGNAL_STACK + SIGNAL_STACK_LENGTH).contains(&page) {
        frames.fetch_max(SIGNAL_STACK + SIGNAL_STACK_LENGTH - page, Relaxed);
    }
}

/// Reads the frame of a signal that has interrupted user mode. Returns whether it is valid:
/// according to `read`, and because the host has put no other frame on the signal stack meanwhile.
/// It does that only if user mode has jumped to the handler, with the stack still set.
pub fn read_user_frame(context: u64, read: impl FnOnce() -> bool) -> bool {
    read_undisturbed(&process().frames, context, read)
}

fn read_undisturbed(frames: &AtomicU64, context: u64, read: impl FnOnce() -> bool) -> bool {
    let used = frames.swap(0, SeqCst);
    let is_valid = read();
    let is_undisturbed = frames.fetch_max(used, SeqCst) == 0;
    // Below the context is only the return address of the handler, which has its own stack.
    note_used(frames, context);
    is_valid && is_undisturbed
}

/// Marks all used parts of the signal stacks for clearing.
pub fn mark_stale() {
    process().scrubs.store(ALL, Relaxed);
}

/// Values of [`crate::state::process::ProcessState::scrubs`]: frames of the kernel only; frames of
/// any origin.
const KERNEL: u8 = 1;
const ALL: u8 = 2;

/// Largest stack usage of a handler in bytes: on its own stack, or below the context of a signal.
const HANDLER: u64 = 0x2000;

/// Clears the used parts of the signal stacks before the guest runs, with protection keys: user
/// mode can read them.
pub fn scrub() {
    let process = process();
    let scrubs = process.scrubs.swap(0, Relaxed);
    if scrubs == 0 {
        return;
    }
    let length = process.frames.swap(0, Relaxed).min(SIGNAL_STACK_LENGTH);
    let handler = if scrubs == ALL { HANDLER as usize } else { 0 };
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
    note_used(&process().frames, context.saturating_sub(HANDLER));
    process().scrubs.fetch_max(KERNEL, Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_that_another_signal_may_have_overwritten_is_invalid() {
        const TOP: u64 = SIGNAL_STACK + SIGNAL_STACK_LENGTH;
        let frames = AtomicU64::new(0x2000);
        let read = |nested: u64, is_valid| {
            read_undisturbed(&frames, TOP - 0x400, || {
                note_used(&frames, nested);
                is_valid
            })
        };
        // The stack of handlers, where frames of nested signals belong.
        assert!(read(wedge_x86::HANDLER_STACK_TOP - 0x800, true));
        assert!(!read(wedge_x86::HANDLER_STACK_TOP - 0x800, false));
        assert_eq!(frames.load(Relaxed), 0x2000);
        assert!(!read(TOP - 0x3800, true));
        assert_eq!(frames.load(Relaxed), 0x4000);
        assert!(read(0, true), "once");
    }
}

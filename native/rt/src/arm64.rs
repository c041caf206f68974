//! Instructions of AArch64: system calls, the counter, memory, starts.

use core::arch::{asm, naked_asm};

/// Results of a system call: `x0` to `x5`.
pub(crate) type Words = [u64; 6];

/// Performs the system call with this number, valid or not.
///
/// # Safety
/// As `syscall::call`.
#[inline(always)]
pub(crate) unsafe fn raw(op: u64, arguments: Words) -> (u64, Words) {
    let [mut a, mut b, mut c, mut d, mut e, mut f] = arguments;
    let status;
    // SAFETY: the registers are those of `abi`'s convention; the kernel preserves all others and
    // the stack is not used.
    unsafe {
        asm!(
            "svc #0",
            inlateout("x8") op => status,
            inlateout("x0") a,
            inlateout("x1") b,
            inlateout("x2") c,
            inlateout("x3") d,
            inlateout("x4") e,
            inlateout("x5") f,
            options(nostack),
        );
    }
    (status, [a, b, c, d, e, f])
}

/// Reads the system counter.
#[inline(always)]
pub(crate) fn counter() -> u64 {
    let value;
    // SAFETY: reads a counter; the kernel permits it at EL0.
    unsafe { asm!("mrs {}, cntpct_el0", out(reg) value, options(nomem, nostack)) };
    value
}

/// Copies bytes.
///
/// # Safety
/// Source and destination are mapped, do not overlap, and the caller has the only live reference to
/// the destination.
pub(crate) unsafe fn copy(source: u64, destination: u64, length: u64) {
    // SAFETY: the caller guarantees the ranges.
    unsafe {
        asm!(
            "2: subs {words}, {words}, #1",
            "b.lo 3f",
            "ldr {word}, [{from}], #8",
            "str {word}, [{to}], #8",
            "b 2b",
            "3: subs {bytes}, {bytes}, #1",
            "b.lo 4f",
            "ldrb {word:w}, [{from}], #1",
            "strb {word:w}, [{to}], #1",
            "b 3b",
            "4:",
            from = inout(reg) source => _,
            to = inout(reg) destination => _,
            words = inout(reg) length / 8 => _,
            bytes = inout(reg) length % 8 => _,
            word = out(reg) _,
            options(nostack),
        );
    }
}

/// Fills memory with zeros.
///
/// # Safety
/// The range is mapped, and the caller has the only live reference to it.
pub(crate) unsafe fn clear(base: u64, length: u64) {
    // SAFETY: by the caller.
    unsafe {
        asm!(
            "2: subs {words}, {words}, #1",
            "b.lo 3f",
            "str xzr, [{to}], #8",
            "b 2b",
            "3: subs {bytes}, {bytes}, #1",
            "b.lo 4f",
            "strb wzr, [{to}], #1",
            "b 3b",
            "4:",
            to = inout(reg) base => _,
            words = inout(reg) length / 8 => _,
            bytes = inout(reg) length % 8 => _,
            options(nostack),
        );
    }
}

/// Returns whether the processor makes random numbers: its feature registers cannot be read at EL0,
/// so this is not known.
pub(crate) fn has_random() -> bool {
    false
}

/// A random number; `None`: there is no source.
///
/// # Safety
/// [`has_random`] has returned `true`.
pub(crate) unsafe fn random() -> Option<u64> {
    None
}

/// Executes an undefined instruction, for which the kernel stops the thread.
pub(crate) fn undefined() {
    // SAFETY: faults.
    unsafe { asm!("udf #0", options(nomem, nostack)) }
}

/// First instructions of the program: the kernel and root enter with an aligned stack.
#[cfg(target_os = "none")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
extern "C" fn _start() -> ! {
    unsafe extern "C" {
        safe fn native_main() -> !;
    }
    naked_asm!("mov x29, xzr", "mov x30, xzr", "bl {main}", "udf #0", main = sym native_main)
}

/// First instructions of a thread: the body's address and its argument are on the stack.
#[unsafe(naked)]
pub(crate) extern "C" fn start_of_thread() -> ! {
    naked_asm!("ldp x1, x0, [sp], #16", "mov x29, xzr", "mov x30, xzr", "blr x1", "udf #0")
}

//! Instructions of x86-64: system calls, the counter, memory, random numbers, starts.

use core::arch::x86_64::{__cpuid, _rdrand64_step, _rdtsc};
use core::arch::{asm, naked_asm};

/// Results of a system call: `rdi, rsi, rdx, r10, r8, r9`.
pub(crate) type Words = [u64; 6];

/// `CPUID` leaf 1, `ECX`: `RDRAND` (AMD APM vol. 3, appendix E.3.2).
const RDRAND: u32 = 1 << 30;
/// Attempts to read a number; more do not help (Intel, Digital Random Number Generator guide,
/// section 5.2.1).
const TRIES: u32 = 10;

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
            "syscall",
            inlateout("rax") op => status,
            inlateout("rdi") a,
            inlateout("rsi") b,
            inlateout("rdx") c,
            inlateout("r10") d,
            inlateout("r8") e,
            inlateout("r9") f,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    (status, [a, b, c, d, e, f])
}

/// Reads the time-stamp counter.
#[inline(always)]
pub(crate) fn counter() -> u64 {
    // SAFETY: reads a counter; the kernel permits `RDTSC` in user mode.
    unsafe { _rdtsc() }
}

/// Copies bytes.
///
/// # Safety
/// Source and destination are mapped, do not overlap, and the caller has the only live reference to
/// the destination.
pub(crate) unsafe fn copy(source: u64, destination: u64, length: u64) {
    let head = length & !7;
    // SAFETY: the caller guarantees the ranges. The direction flag is clear in Rust code.
    unsafe {
        asm!("rep movsq", inout("rcx") length / 8 => _, inout("rsi") source => _,
             inout("rdi") destination => _, options(nostack, preserves_flags));
        asm!("rep movsb", inout("rcx") length % 8 => _, inout("rsi") source + head => _,
             inout("rdi") destination + head => _, options(nostack, preserves_flags));
    }
}

/// Fills memory with zeros.
///
/// # Safety
/// The range is mapped, and the caller has the only live reference to it.
pub(crate) unsafe fn clear(base: u64, length: u64) {
    // SAFETY: by the caller. The direction flag is clear in Rust code.
    unsafe {
        asm!("rep stosq", inout("rcx") length / 8 => _, inout("rdi") base => _,
             in("rax") 0, options(nostack, preserves_flags));
        asm!("rep stosb", inout("rcx") length % 8 => _, inout("rdi") base + (length & !7) => _,
             in("rax") 0, options(nostack, preserves_flags));
    }
}

/// Returns whether the processor makes random numbers.
pub(crate) fn has_random() -> bool {
    __cpuid(1).ecx & RDRAND != 0
}

/// A random number; `None`: the source has failed.
///
/// # Safety
/// [`has_random`] has returned `true`.
#[target_feature(enable = "rdrand")]
pub(crate) unsafe fn random() -> Option<u64> {
    let mut number = 0;
    (0..TRIES).any(|_| _rdrand64_step(&mut number) == 1).then_some(number)
}

/// Executes an undefined instruction, for which the kernel stops the thread.
pub(crate) fn undefined() {
    // SAFETY: faults.
    unsafe { asm!("ud2", options(nomem, nostack)) }
}

/// First instructions of the program: the kernel and root enter with an aligned stack.
#[cfg(target_os = "none")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
extern "C" fn _start() -> ! {
    unsafe extern "C" {
        safe fn native_main() -> !;
    }
    naked_asm!("xor ebp, ebp", "and rsp, -16", "call {main}", "ud2", main = sym native_main)
}

/// First instructions of a thread: the body's address and its argument are on the stack.
#[unsafe(naked)]
pub(crate) extern "C" fn start_of_thread() -> ! {
    naked_asm!("pop rax", "pop rdi", "xor ebp, ebp", "call rax", "ud2")
}

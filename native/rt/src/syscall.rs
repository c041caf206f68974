//! The `SYSCALL` instruction.

use abi::{Op, Status};
use core::arch::asm;

/// Results of a system call: `rdi, rsi, rdx, r10, r8, r9`.
pub(crate) type Words = [u64; 6];

/// Performs a system call.
///
/// # Safety
/// The operation must not change memory that holds Rust objects, as the crate's documentation
/// explains.
#[inline(always)]
pub(crate) unsafe fn call(op: Op, arguments: Words) -> Result<Words, Status> {
    let (status, words) = {
        // SAFETY: the caller guarantees the operation.
        unsafe { raw(op as u64, arguments) }
    };
    if status == Status::Ok as u64 { Ok(words) } else { Err(Status::from_code(status)) }
}

/// Performs the system call with this number, valid or not.
///
/// # Safety
/// As [`call`].
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

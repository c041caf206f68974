//! Exit codes of VMs (`docs/spec/exit-codes.md`) that a guest can cause.

/// Largest exit code that a guest chooses itself, from 0 on.
pub const LAST_CHOSEN: u8 = 63;
/// Panic of the guest kernel.
pub const PANIC: u8 = 80;
/// Triple fault, or an unhandled fault.
pub const FAULT: u8 = 81;
/// Reset by the guest.
pub const RESET: u8 = 83;

/// Signals by which Linux ends a process for an action of its own: `SIGILL`, `SIGTRAP`,
/// `SIGABRT`, `SIGBUS`, `SIGFPE`, `SIGSEGV`, `SIGPIPE`, `SIGXFSZ` and `SIGSYS` (signal(7),
/// x86).
pub const SELF_INFLICTED: [u32; 9] = [4, 5, 6, 7, 8, 11, 13, 25, 31];

/// Returns whether a guest may cause this exit code.
pub const fn is_guest_code(code: u8) -> bool {
    matches!(code, 0..=LAST_CHOSEN | PANIC | FAULT | RESET)
}

//! Signals of the host: their numbers, and the frames that the host kernel writes for them.

use linux_raw_sys::general as linux;
use proto::hosted::layout;
use wedge_core::cpu::rflags;
use wedge_core::vector;
use wedge_x86::CODE_64;

/// Flags that user mode may change and rt_sigreturn(2) does not restore (`FIX_EFLAGS` in Linux).
pub const UNRESTORED: u64 = rflags::NT | rflags::ID;

/// Assembly before rt_sigreturn(2), for [`UNRESTORED`]: takes them of the context at RSP. Operands:
/// `flags`, the offset of its flags, and `unrestored`, these bits.
macro_rules! set_unrestored_flags {
    () => {
        "push qword ptr [rsp + {flags}]
        and qword ptr [rsp], {unrestored}
        or qword ptr [rsp], 2
        popfq"
    };
}
pub(crate) use set_unrestored_flags;

/// Signal by which the device process notifies a guest process of events.
pub const KICK: u32 = layout::KICK_SIGNAL;
/// Signal of a vCPU's timer.
pub const TIMER: u32 = 35;
/// Mask of the signals between processes of the VM; only processes with a handler unblock them.
pub const SENT: u64 = 1 << (KICK - 1) | 1 << (TIMER - 1);
/// Mask of all signals.
pub const ALL_SIGNALS: u64 = u64::MAX;

/// Host signal that has stopped the guest.
#[derive(Clone, Copy, Debug)]
pub struct Signal {
    /// Signal number.
    pub number: u32,
    /// Exception vector.
    pub vector: u64,
    /// Error code of the exception; of a debug exception, which has none, `si_code`.
    pub code: u64,
    /// Page-fault address.
    pub address: u64,
}

/// `struct ucontext` of x86-64 (`arch/x86/include/uapi/asm/sigcontext.h`).
#[repr(C)]
pub struct Context {
    flags: u64,
    link: u64,
    stack: [u64; 3],
    /// `r8` to `r15`, `rdi`, `rsi`, `rbp`, `rbx`, `rdx`, `rax`, `rcx`, `rsp`.
    pub registers: [u64; 16],
    pub rip: u64,
    pub rflags: u64,
    segments: u64,
    /// Error code of the exception.
    pub code: u64,
    /// Exception vector.
    pub vector: u64,
    mask: u64,
    /// Page-fault address.
    pub address: u64,
    /// Address of the extended state.
    pub extended: *const u8,
}

impl Context {
    /// Returns whether `CS`, the low part of [`Self::segments`], is that of 64-bit code.
    pub fn is_64_bit(&self) -> bool {
        self.segments as u16 == CODE_64.into()
    }
}

/// Signal frame (`struct rt_sigframe`) from its context to the last field of the siginfo that the
/// wedge uses.
#[repr(C)]
pub struct SignalFrame {
    pub context: Context,
    reserved: [u64; 8],
    mask: u64,
    /// `siginfo_t`; of a dispatched system call (`_sigsys`), the last word is the architecture.
    info: [u32; 8],
}

/// Length of a context in bytes, with reserved words and signal mask.
pub const CONTEXT: u64 = core::mem::offset_of!(SignalFrame, info) as u64;
/// [`Signal::vector`] of a dispatched system call by `int $0x80`.
pub const INT_80: u8 = 0x80;

impl SignalFrame {
    /// Returns [`Signal::vector`] of a dispatched system call.
    pub fn call_vector(&self) -> u64 {
        /// `AUDIT_ARCH_I386` (`linux/audit.h`).
        const I386: u32 = 0x4000_0003;
        if self.info[7] == I386 { INT_80.into() } else { 0 }
    }

    /// Returns [`Signal::code`] of a CPU exception.
    pub fn exception_code(&self) -> u64 {
        match self.context.vector {
            DEBUG => self.info[2].into(),
            _ => self.context.code,
        }
    }
}

/// Vector of debug exceptions: single step, breakpoint register or `INT1`.
pub const DEBUG: u64 = vector::DEBUG as u64;

/// Returns the bits of DR6 for a debug exception with this [`Signal::code`]: BS for a single step,
/// none for `INT1` (APM vol. 2, section 13.1.1). The flag TF does not tell: a `POPF` that clears it
/// still traps. The breakpoint registers are the host's.
pub fn debug_status(code: u64) -> u64 {
    const SINGLE_STEP: u64 = 1 << 14;
    if code == u64::from(linux::TRAP_TRACE) { SINGLE_STEP } else { 0 }
}

/// Register numbers in the frame, by their index in [`Context::registers`].
pub const ORDER: [usize; 16] = [8, 9, 10, 11, 12, 13, 14, 15, 7, 6, 5, 3, 2, 0, 1, 4];

/// Signals of CPU exceptions and of dispatched system calls.
pub const SYNCHRONOUS: [u32; 6] =
    [linux::SIGSEGV, linux::SIGBUS, linux::SIGILL, linux::SIGFPE, linux::SIGTRAP, linux::SIGSYS];
/// Restricts a signal to one that user mode can cause.
pub fn sanitize(number: u32, frame: &SignalFrame) -> Signal {
    const PAGE_FAULT: u64 = vector::PAGE_FAULT as u64;
    const PROTECTION: u64 = vector::PROTECTION as u64;
    let context = &frame.context;
    let is_possible = match number {
        linux::SIGSYS | linux::SIGILL => true,
        linux::SIGFPE => matches!(context.vector, 0 | 16 | 19),
        linux::SIGTRAP => matches!(context.vector, 1 | 3),
        // Linux reports #NP and #SS of user mode so; #SS of a non-canonical address, too.
        linux::SIGBUS => matches!(context.vector, 11 | 12 | 17 | PAGE_FAULT),
        linux::SIGSEGV => matches!(context.vector, 4 | 5 | 11..=14),
        TIMER => true,
        _ => false,
    };
    let code = match context.vector {
        // Write and fetch bits; user mode.
        PAGE_FAULT => context.code & 0x12 | 4,
        11..=PROTECTION => context.code & 0xffff,
        DEBUG => frame.exception_code(),
        _ => 0,
    };
    let number = if is_possible { number } else { KICK };
    Signal { number, vector: context.vector, code, address: context.address }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(vector: u64, code: u64) -> SignalFrame {
        // SAFETY: it consists of integers and an address.
        let mut frame: SignalFrame = unsafe { core::mem::zeroed() };
        let context = &mut frame.context;
        (context.vector, context.code, context.address) = (vector, code, 0x1234);
        frame
    }

    #[test]
    fn signals_of_user_mode_keep_what_it_can_cause() {
        let fault = sanitize(linux::SIGSEGV, &frame(14, 0xffff_ffff));
        assert_eq!(
            (fault.number, fault.vector, fault.code, fault.address),
            (linux::SIGSEGV, 14, 0x16, 0x1234)
        );
        assert_eq!(sanitize(linux::SIGSEGV, &frame(13, 0x1_0018)).code, 0x18);
        assert_eq!(sanitize(linux::SIGFPE, &frame(16, 7)).code, 0);
        for (vector, code) in [(11, 0x18), (12, 0), (17, 0), (14, 0x14)] {
            let fault = sanitize(linux::SIGBUS, &frame(vector, code));
            assert_eq!((fault.number, fault.vector, fault.code), (linux::SIGBUS, vector, code));
        }
    }

    #[test]
    fn debug_exceptions_have_the_reason_of_the_host() {
        // `INT1` is `TRAP_BRKPT` (`get_si_code` in Linux), and sets no bit of DR6.
        for (reason, is_step) in [(linux::TRAP_TRACE, true), (linux::TRAP_BRKPT, false)] {
            let mut frame = frame(DEBUG, 0);
            frame.info[2] = reason;
            let signal = sanitize(linux::SIGTRAP, &frame);
            assert_eq!((signal.number, signal.code), (linux::SIGTRAP, reason.into()));
            assert_eq!(frame.exception_code(), reason.into(), "of the guest's kernel");
            assert_eq!(debug_status(signal.code), if is_step { 1 << 14 } else { 0 });
        }
        assert_eq!(frame(vector::BREAKPOINT.into(), 7).exception_code(), 7);
    }

    #[test]
    fn impossible_signals_become_notifications() {
        for (number, vector) in [
            (linux::SIGSEGV, 8),
            (linux::SIGFPE, 14),
            (linux::SIGTRAP, 14),
            (linux::SIGBUS, 1),
            (9, 0),
            (KICK, 0),
        ] {
            assert_eq!(sanitize(number, &frame(vector, 0)).number, KICK, "{number} {vector}");
        }
        assert_eq!(sanitize(TIMER, &frame(0, 0)).number, TIMER);
    }

    #[test]
    fn each_register_has_one_place() {
        let mut seen = [false; 16];
        ORDER.iter().for_each(|&register| seen[register] = true);
        assert_eq!(seen, [true; 16]);
        // Linux: 304 bytes of `struct ucontext` with its mask, 28 bytes before the architecture.
        assert_eq!(CONTEXT, 304);
        assert_eq!(size_of::<SignalFrame>(), 304 + 28 + 4);
    }
}

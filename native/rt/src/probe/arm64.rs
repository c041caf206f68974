//! Deliberate faults on AArch64, for programs that test the kernel: see the module above.

use core::arch::{asm, global_asm};

use abi::{Op, PAGE_SIZE, reply_wait};

use crate::memory::Window;

/// Ways to fault that only this architecture has, with their names.
pub const FAULTS: &[(&str, fn())] = &[
    ("privileged", || privileged(0)),
    ("breakpoint", || privileged(PRIVILEGED.len() - 1)),
    ("floating-point", use_floating_point),
];

macro_rules! privileged {
    ($($index:literal $instruction:literal)+) => {
        /// Instructions that no task may execute.
        pub const PRIVILEGED: &[&str] = &[$($instruction),+];

        /// Executes one of [`PRIVILEGED`], with the value of its register chosen to harm: all bits
        /// set.
        #[inline(never)]
        pub fn privileged(index: usize) {
            match index {
                // SAFETY: none; it faults and stops the thread.
                $($index => unsafe {
                    asm!($instruction, inout("x0") u64::MAX => _, options(nostack));
                },)+
                _ => {}
            }
        }
    };
}

privileged! {
    0 "eret"
    1 "hvc #0"
    2 "smc #0"
    3 "tlbi vmalle1is"
    4 "tlbi alle1is"
    5 "msr daifset, #15"
    6 "msr spsel, #1"
    7 "msr sctlr_el1, x0"
    8 "msr ttbr0_el1, x0"
    9 "msr spsr_el1, x0"
    10 "msr elr_el1, x0"
    11 "msr vbar_el1, x0"
    12 "msr hcr_el2, x0"
    13 "mrs x0, sctlr_el1"
    14 "at s1e1r, x0"
    15 "dc isw, x0"
    16 "ic iallu"
    17 "msr cntp_ctl_el0, x0"
    18 "msr mdscr_el1, x0"
    19 "msr S3_0_C12_C11_5, x0"
    20 "mrs x0, S3_0_C12_C12_0"
    21 "msr S3_0_C4_C2_3, x0"
    22 "msr cpacr_el1, x0"
    23 "brk #0"
}

/// Reads a byte at any address.
pub fn read(address: u64) -> u8 {
    let value: u32;
    // SAFETY: reading is harmless, or faults and stops the thread.
    unsafe {
        asm!("ldrb {:w}, [{}]", out(reg) value, in(reg) address, options(nostack, readonly));
    }
    value as u8
}

/// Writes a byte at any address.
pub fn write(address: u64, value: u8) {
    // SAFETY: none; see the head of the module above.
    unsafe { asm!("strb {:w}, [{}]", in(reg) u32::from(value), in(reg) address, options(nostack)) }
}

/// Jumps to any address.
pub fn jump(address: u64) -> ! {
    // SAFETY: none; see the head of the module above.
    unsafe { asm!("br {}", in(reg) address, options(noreturn)) }
}

/// Executes an undefined instruction.
pub fn undefined() -> ! {
    // SAFETY: faults and stops the thread.
    unsafe { asm!("udf #0", options(noreturn)) }
}

/// Uses a register of the floating-point unit, which tasks do not have.
fn use_floating_point() {
    // SAFETY: faults and stops the thread; no code here uses the register.
    unsafe { asm!(".arch_extension fp", "fmov d0, xzr", options(nomem, nostack)) }
}

/// Returns a register that no program can write and the kernel clears: TPIDRRO_EL0.
pub fn foreign_register() -> Option<u64> {
    let value;
    // SAFETY: reads a register.
    unsafe { asm!("mrs {}, tpidrro_el0", out(reg) value, options(nomem, nostack)) };
    Some(value)
}

/// Pushes until the stack overflows.
pub fn exhaust_stack() -> ! {
    // SAFETY: writes to the unused part of the stack, then faults at the guard page.
    unsafe { asm!("2: str x0, [sp, #-16]!", "b 2b", options(noreturn)) }
}

/// Fills the general registers and TPIDR_EL0 with a pattern derived from `seed`, spins for `loops`
/// rounds, and returns the number of checks that failed.
pub fn check_registers(seed: u64, loops: u64) -> u64 {
    let mismatches: u64;
    // SAFETY: `x19` and `x29` are saved on the stack, all others are declared; balanced stack. The
    // thread register has no other use here.
    unsafe {
        asm!(
            "stp x19, x29, [sp, #-16]!",
            "msr tpidr_el0, x0",
            ".irp n, 2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,19,20,21,22,23,24,25,26,27,28,29,30",
            "add x\\n, x0, #\\n",
            ".endr",
            "2:",
            "subs x1, x1, #1",
            "b.ne 2b",
            // Each expected difference to x0 cancels out; any other leaves bits in x1.
            ".irp n, 2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,19,20,21,22,23,24,25,26,27,28,29,30",
            "sub x\\n, x\\n, x0",
            "sub x\\n, x\\n, #\\n",
            "orr x1, x1, x\\n",
            ".endr",
            "mrs x2, tpidr_el0",
            "eor x2, x2, x0",
            "orr x1, x1, x2",
            "ldp x19, x29, [sp], #16",
            inout("x0") seed => _,
            inout("x1") loops.max(1) => mismatches,
            out("x2") _, out("x3") _, out("x4") _, out("x5") _, out("x6") _, out("x7") _,
            out("x8") _, out("x9") _, out("x10") _, out("x11") _, out("x12") _, out("x13") _,
            out("x14") _, out("x15") _, out("x16") _, out("x17") _, out("x20") _, out("x21") _,
            out("x22") _, out("x23") _, out("x24") _, out("x25") _, out("x26") _, out("x27") _,
            out("x28") _, out("x30") _,
        );
    }
    (mismatches != 0) as u64
}

// A server that replies to every call with the caller's words, the last of them replaced by the
// gate's badge. It uses no memory, so a task needs only its page to run it. Aligned to lie in one
// page.
global_asm!(
    ".pushsection .text.native_echo, \"ax\", @progbits",
    ".balign 64",
    ".global native_echo",
    "native_echo:",
    "mov x0, #{wait}",
    "mov x1, xzr",
    "2:",
    "mov x8, #{reply_wait}",
    "svc #0",
    "mov x5, x0",
    "mov x0, #{both}",
    "b 2b",
    ".popsection",
    wait = const reply_wait::WAIT,
    both = const reply_wait::REPLY | reply_wait::WAIT,
    reply_wait = const Op::GateReplyWait as u64,
);

// A thread that performs the system call that its argument points to: four words, the operation and
// three arguments; then it waits for ever. It needs no stack.
global_asm!(
    ".pushsection .text.native_call_once, \"ax\", @progbits",
    ".balign 64",
    ".global native_call_once",
    "native_call_once:",
    "ldp x8, x3, [x0]",
    "ldp x1, x2, [x0, #16]",
    "mov x0, x3",
    "svc #0",
    "2:",
    "b 2b",
    ".popsection",
);

/// Returns a page of this program with a guest that writes the first word of each page of a range,
/// and the guest's entry address. The page is to be mapped in a VM, at any address. The guest takes
/// the range's address in `x0` and the number of pages in `x1`, executes four instructions a page
/// without memory translation, and then `HVC` for ever.
pub fn page_writer() -> (Window, u64) {
    unsafe extern "C" {
        safe fn native_page_writer();
    }
    super::page_of(native_page_writer as *const () as u64)
}

global_asm!(
    ".pushsection .text.native_page_writer, \"ax\", @progbits",
    ".balign 64",
    ".global native_page_writer",
    "native_page_writer:",
    "2:",
    "str xzr, [x0]",
    "add x0, x0, #{page}",
    "subs x1, x1, #1",
    "b.ne 2b",
    "3:",
    "hvc #0",
    "b 3b",
    ".popsection",
    page = const PAGE_SIZE,
);

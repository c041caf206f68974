//! Deliberate faults on AArch64, for programs that test the kernel: see the module for x86-64.

use core::arch::asm;

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

//! Kernel entry and exit.
//!
//! While a task runs, the stack pointer of EL2 points to its thread's [`ThreadContext`]: the entry
//! code saves the registers there, and continues on the CPU's own stack. Interrupts are masked in
//! the kernel; idle CPUs wait with WFI, which a masked interrupt ends. An exception in the kernel
//! is a bug, except one of [`translate_address`]. While a guest runs, the stack pointer points to
//! its state page, which begins with the same registers, and vectors of their own return from
//! [`enter_guest`]. Few exits are handled before that, in assembly: the hypercall of the version,
//! the interrupt of the guest's timer, and the wait for it.

pub mod handlers;

use core::arch::global_asm;
use core::mem::offset_of;
use core::sync::atomic::Ordering;

use abi::vcpu::HYPERCALL_VERSION;
use abi::vcpu::arm64::{VcpuState, virq};
use hw_arm64::aarch32;
use hw_arm64::esr::{self, class};
use hw_arm64::gic::{FIRST_SPECIAL, virtual_interface as ich};
use hw_arm64::paging::entry;
use hw_arm64::registers::{CNTHCTL_HOST, CNTKCTL_TASKS, hcr, sctlr};

use crate::context::{ThreadContext, UserRegisters};
use crate::vcpu::virqs;
use crate::{alternative, cpu, fastpath, memory, run};

/// Stores or loads of the registers from x4 to x29, in pairs, at their places in the saved ones.
macro_rules! further_registers {
    ($instruction:literal) => {
        further_registers!($instruction: x4 x5 32, x6 x7 48, x8 x9 64, x10 x11 80, x12 x13 96,
            x14 x15 112, x16 x17 128, x18 x19 144, x20 x21 160, x22 x23 176, x24 x25 192,
            x26 x27 208, x28 x29 224)
    };
    ($instruction:literal: $($first:ident $second:ident $at:literal),+) => {
        concat!($($instruction, " ", stringify!($first), ", ", stringify!($second), ", [sp, #",
            $at, "]\n"),+)
    };
}

global_asm!(
    ".macro save_registers stack",
    "stp x0, x1, [sp]",
    "stp x2, x3, [sp, #16]",
    "save_further \\stack",
    ".endm",
    // Saves the registers from x4 on. Leaves x0 and x8 as they are, and the syndrome in x1, or in
    // the given register. x3 is the word after the stack pointer: of a guest the ticks that the CPU
    // has waited in its place.
    ".macro save_further stack, syndrome=x1",
    further_registers!("stp"),
    "mrs x2, sp_el0",
    "mrs x3, elr_el2",
    "mrs x4, spsr_el2",
    "mrs x5, tpidr_el0",
    "mrs \\syndrome, esr_el2",
    "stp x30, x2, [sp, #240]",
    "stp x3, x4, [sp, #{elr}]",
    "stp x5, \\syndrome, [sp, #{tpidr}]",
    "mrs x2, tpidr_el2",
    "ldp x2, x3, [x2, #\\stack]",
    "mov sp, x2",
    ".endm",
    ".macro bug kind",
    ".balign 128",
    "report_bug \\kind",
    ".endm",
    ".macro report_bug kind",
    "mrs x3, tpidr_el2",
    "ldr x3, [x3, #{bug_stack}]",
    "mov sp, x3",
    "mov x0, #\\kind",
    "mrs x1, esr_el2",
    "mrs x2, elr_el2",
    "mrs x3, far_el2",
    "b {bug_handler}",
    ".endm",
    // Vectors of exceptions from the kernel, which always uses its own stack pointer. A synchronous
    // one (4) is no bug if a guest's tables are where memory reports an error.
    ".macro bugs",
    "bug 0",
    "bug 1",
    "bug 2",
    "bug 3",
    ".balign 128",
    "mrs x3, elr_el2",
    "adr x4, translate_address",
    "cmp x3, x4",
    "b.eq 24f",
    "report_bug 4",
    "bug 5",
    "bug 6",
    "bug 7",
    ".endm",
    // What `save_registers` has saved, except x0 to x3, ELR and SPSR.
    ".macro load_registers",
    "ldr x3, [sp, #{tpidr}]",
    "ldp x30, x4, [sp, #240]",
    "msr tpidr_el0, x3",
    "msr sp_el0, x4",
    further_registers!("ldp"),
    "ldp x2, x3, [sp, #16]",
    "ldp x0, x1, [sp]",
    ".endm",
    // A guest was left by an exception with a syndrome. The hypercall of the version is answered
    // here, as it is without an exit on x86-64: other registers than x0 and x1 are not touched.
    ".macro guest_synchronous",
    ".balign 128",
    "stp x0, x1, [sp]",
    "mrs x1, esr_el2",
    "lsr x1, x1, #{length_shift}",
    "cmp x1, #{hypercall}",
    "b.eq 5f",
    "stp x2, x3, [sp, #16]",
    "cmp x1, #{wait}",
    "b.eq 7f",
    "b 6f",
    ".endm",
    // A 32-bit guest was left so, or by an error.
    ".macro guest_synchronous_32",
    ".balign 128",
    "save_registers {guest_stack}",
    "mov x0, x1",
    "mov x1, #{synchronous_32}",
    "b 22f",
    ".endm",
    // By an interrupt of the host.
    ".macro guest_interrupt",
    ".balign 128",
    "stp x0, x1, [sp]",
    "stp x2, x3, [sp, #16]",
    "b 8f",
    ".endm",
    // By an error.
    ".macro guest_error",
    ".balign 128",
    "save_registers {guest_stack}",
    "mov x0, x1",
    "mov x1, #{by_error}",
    "b 4f",
    ".endm",
    ".section .text.vectors, \"ax\"",
    ".balign 2048",
    ".global vectors",
    "vectors:",
    "bugs",
    // From tasks: synchronous, interrupt, fast interrupt (none is in group 0), error.
    ".balign 128",
    "stp x0, x1, [sp]",
    "mov x0, sp",
    "stp x2, x3, [sp, #16]",
    "save_further {kernel_stack}",
    "lsr w2, w1, #{class_shift}",
    "cmp w2, #{call}",
    "b.eq 23f",
    "b 3f",
    ".balign 128",
    "b 2f",
    "bug 10",
    "bug 11",
    // No task is 32-bit.
    "bug 12",
    "bug 13",
    "bug 14",
    "bug 15",
    ".balign 128",
    "2:",
    "save_registers {kernel_stack}",
    "bl {interrupt}",
    "b leave_kernel",
    // A system call: x0 is the thread's context.
    "23:",
    "cmp x8, #{last_ipc}",
    "b.hi {system_call}",
    "b {fast_ipc}",
    "3:",
    "mov x0, x1",
    "mrs x1, far_el2",
    "bl {exception}",
    "b leave_kernel",
    // While a guest runs: its exceptions, where EL1 is AArch64 and where it is AArch32.
    ".balign 2048",
    "guest_vectors:",
    "bugs",
    "guest_synchronous",
    "guest_interrupt",
    "bug 10",
    "guest_error",
    "guest_synchronous_32",
    "guest_interrupt",
    "bug 10",
    "guest_synchronous_32",
    // Skips the instruction that translates.
    "24:",
    "add x3, x3, #4",
    "msr elr_el2, x3",
    "eret",
    // Changes x3 and x4 if the instruction takes an exception.
    ".global translate_address",
    "translate_address:",
    "at s1e1r, x0",
    "isb",
    "ret",
    "5:",
    "ldr x1, ={version}",
    "cmp x0, x1",
    "b.ne 20f",
    "ldr x0, [sp, #{handled}]",
    "add x0, x0, #1",
    "str x0, [sp, #{handled}]",
    "mov x0, #{abi_version}",
    "ldr x1, [sp, #8]",
    "eret",
    // WFI. Where the CPU may, and no list register is in use (ICH_ELRSR_EL2), it waits here for the
    // guest's timer: the guest then continues as after any interrupt of its timer. Every other
    // interrupt stays pending, and `vcpu::wait` decides.
    "7:",
    "mrs x1, tpidr_el2",
    "ldr x2, [x1, #{may_wait}]",
    "cbz x2, 6f",
    "mrs x2, S3_4_C12_C11_5",
    "eor x2, x2, #{all_lists}",
    "tst x2, #{all_lists}",
    "b.ne 6f",
    "mrs x2, cntpct_el0",
    "dsb sy",
    "wfi",
    "mrs x3, cntpct_el0",
    "sub x3, x3, x2",
    "ldr x2, [x1, #{waited}]",
    "add x2, x2, x3",
    "str x2, [x1, #{waited}]",
    "ldr x1, [x1, #{timer_list}]",
    "cbz x1, 6f",
    "ubfx x2, x1, #{link_shift}, #10",
    "mrs x3, icc_hppir1_el1",
    "cmp x2, x3",
    "b.ne 6f",
    "mrs x2, elr_el2",
    "add x2, x2, #4",
    "msr elr_el2, x2",
    // An interrupt is taken. That of the guest's timer goes to the first list register
    // (ICH_LR0_EL2), linked to the host's, and the guest continues: nothing that was checked has
    // changed. Without such a timer the interrupt is left to the kernel, which knows the interrupt
    // controller.
    "8:",
    "mrs x1, tpidr_el2",
    "ldr x1, [x1, #{timer_list}]",
    "cbz x1, 21f",
    "mrs x0, icc_iar1_el1",
    "ubfx x2, x1, #{link_shift}, #10",
    "cmp x0, x2",
    "b.ne 9f",
    "ldr x2, [sp, #{timer_virq}]",
    "tbz x2, #{valid_bit}, 9f",
    "and x3, x2, #{number_mask}",
    "cmp x3, #{first_special}",
    "b.hs 9f",
    "orr x1, x1, x3",
    "ubfx x2, x2, #{priority_from}, #8",
    "orr x1, x1, x2, lsl #{priority_to}",
    "mrs x2, S3_4_C12_C11_5",
    "eor x2, x2, #{all_lists}",
    "tst x2, #{all_lists}",
    "b.ne 9f",
    "msr S3_4_C12_C12_0, x1",
    "msr icc_eoir1_el1, x0",
    "ldp x0, x1, [sp, #{entries}]",
    "add x0, x0, #1",
    "add x1, x1, #1",
    "stp x0, x1, [sp, #{entries}]",
    "ldp x2, x3, [sp, #16]",
    "ldp x0, x1, [sp]",
    "eret",
    "21:",
    "mov x0, #{first_special}",
    "9:",
    "save_further {guest_stack}",
    "mov x1, #{by_interrupt}",
    "b 4f",
    // WFI of a 32-bit guest, without a condition and in no IT block (SPSR is in x4), is like that
    // of 64-bit guests.
    "22:",
    "lsr x2, x0, #20",
    "mov x5, #{unconditional}",
    "and x2, x2, x5",
    "cmp x2, #{unconditional_wait}",
    "b.ne 4f",
    "ldr x5, ={it}",
    "tst x4, x5",
    "b.ne 4f",
    "lsl x1, x3, #{waited_shift}",
    "b 4f",
    "20:",
    "stp x2, x3, [sp, #16]",
    "6:",
    "save_further {guest_stack}, x0",
    "lsl x1, x3, #{waited_shift}",
    "4:",
    "ldr x2, ={host}",
    alternative!("msr hcr_el2, x2", "bl to_host"),
    "adr x2, vectors",
    "msr vbar_el2, x2",
    // The guest's PSTATE.PAN stays in force until here: MSR PAN, #1.
    alternative!(".inst 0xd500419f", "nop"),
    "isb",
    "ldp x19, x20, [sp, #16]",
    "ldp x21, x22, [sp, #32]",
    "ldp x23, x24, [sp, #48]",
    "ldp x25, x26, [sp, #64]",
    "ldp x27, x28, [sp, #80]",
    "ldp x29, x30, [sp], #96",
    "ret",
    ".global enter_guest",
    "enter_guest:",
    "stp x29, x30, [sp, #-96]!",
    "stp x19, x20, [sp, #16]",
    "stp x21, x22, [sp, #32]",
    "stp x23, x24, [sp, #48]",
    "stp x25, x26, [sp, #64]",
    "stp x27, x28, [sp, #80]",
    "mrs x3, tpidr_el2",
    "mov x4, sp",
    "str x4, [x3, #{guest_stack}]",
    "msr elr_el2, x1",
    "msr spsr_el2, x2",
    "adr x4, guest_vectors",
    "msr vbar_el2, x4",
    "ldr x3, [x3, #{guest_hcr}]",
    alternative!("msr hcr_el2, x3", "bl to_guest"),
    // Page-table entries that this CPU has written are visible to its walks.
    "dsb ishst",
    "mov sp, x0",
    "load_registers",
    "eret",
    ".global leave_kernel",
    "leave_kernel:",
    "dsb ishst",
    "mov sp, x0",
    "ldp x1, x2, [sp, #{elr}]",
    "msr elr_el2, x1",
    "msr spsr_el2, x2",
    "load_registers",
    "eret",
    // Without VHE: the registers of EL1 and the tables of stage 2 on which tasks depend, too,
    // change with HCR_EL2. Changes x3 to x5.
    "to_guest:",
    "mrs x3, tpidr_el2",
    "mrs x4, vttbr_el2",
    "str x4, [x3, #{tables_of_task}]",
    "ldr x4, [x3, #{tables_of_guest}]",
    "msr vttbr_el2, x4",
    "ldp x4, x5, [x3, #{registers_of_guest}]",
    "msr sctlr_el1, x4",
    "msr cntkctl_el1, x5",
    "msr cnthctl_el2, xzr",
    "ldr x4, [x3, #{guest_hcr}]",
    "msr hcr_el2, x4",
    "ret",
    "to_host:",
    "ldr x4, ={host_without_vhe}",
    "msr hcr_el2, x4",
    "mrs x3, tpidr_el2",
    "mrs x4, sctlr_el1",
    "mrs x5, cntkctl_el1",
    "stp x4, x5, [x3, #{registers_of_guest}]",
    "ldr x4, ={sctlr_of_tasks}",
    "mov x5, #{cntkctl_of_tasks}",
    "msr sctlr_el1, x4",
    "msr cntkctl_el1, x5",
    "mov x5, #{cnthctl_host}",
    "msr cnthctl_el2, x5",
    "ldr x4, [x3, #{tables_of_task}]",
    "msr vttbr_el2, x4",
    "ret",
    // The same registers of the guest while it does not run: to x9 and x10, from them. Changes x11.
    "get_guest_registers:",
    "mrs x11, tpidr_el2",
    "ldp x9, x10, [x11, #{registers_of_guest}]",
    "ret",
    "set_guest_registers:",
    "mrs x11, tpidr_el2",
    "stp x9, x10, [x11, #{registers_of_guest}]",
    "ret",
    // Tables of the guest at x9.
    "set_guest_tables:",
    "mrs x11, tpidr_el2",
    "str x9, [x11, #{tables_of_guest}]",
    "ret",
    // Tables of a task, whose root is at x9: the first entry of that, if there is one.
    "set_task_tables:",
    "mrs x11, tpidr_el2",
    "mov x10, #{direct_map}",
    "ldr x9, [x9, x10]",
    "tbnz x9, #0, 1f",
    "ldr x9, [x11, #{no_tables}]",
    "1: and x9, x9, #{address}",
    "orr x9, x9, #{vmid_of_tasks}",
    "msr vttbr_el2, x9",
    "ret",
    ".ltorg",
    ".text",
    elr = const offset_of!(UserRegisters, elr),
    tpidr = const offset_of!(UserRegisters, tpidr),
    kernel_stack = const cpu::KERNEL_STACK_TOP,
    bug_stack = const cpu::BUG_STACK_TOP,
    call = const class::SUPERVISOR_CALL,
    bug_handler = sym handlers::kernel_exception,
    class_shift = const esr::CLASS_SHIFT,
    last_ipc = const fastpath::LAST_IPC,
    fast_ipc = sym fastpath::fast_ipc_handler,
    system_call = sym handlers::system_call_handler,
    interrupt = sym handlers::interrupt_handler,
    exception = sym handlers::exception_handler,
    tables_of_task = const cpu::TASK_TABLES,
    tables_of_guest = const cpu::GUEST_TABLES,
    registers_of_guest = const cpu::GUEST_REGISTERS,
    no_tables = const cpu::NO_TABLES,
    host_without_vhe = const hcr::HOST_WITHOUT_VHE,
    sctlr_of_tasks = const sctlr::TASKS,
    cntkctl_of_tasks = const CNTKCTL_TASKS,
    cnthctl_host = const CNTHCTL_HOST,
    direct_map = const memory::DIRECT_MAP,
    address = const entry::ADDRESS,
    vmid_of_tasks = const run::VMID_OF_TASKS,
    guest_stack = const cpu::GUEST_STACK,
    length_shift = const esr::LENGTH_SHIFT,
    hypercall = const class::HYPERVISOR_CALL << 1 | 1,
    wait = const class::WAIT << 1 | 1,
    unconditional = const aarch32::UNCONDITIONAL,
    unconditional_wait = const class::WAIT << 6 | aarch32::UNCONDITIONAL & 0x1f,
    it = const aarch32::psr::IT,
    may_wait = const cpu::MAY_WAIT,
    waited = const cpu::WAITED,
    waited_shift = const exit_kind::WAITED_SHIFT,
    timer_list = const cpu::TIMER_LIST,
    all_lists = const virqs::ALL_LISTS,
    link_shift = const ich::LINK_SHIFT,
    timer_virq = const offset_of!(VcpuState, timer_virq),
    valid_bit = const virq::VALID.trailing_zeros(),
    number_mask = const virq::NUMBER,
    first_special = const FIRST_SPECIAL,
    priority_from = const virq::PRIORITY_SHIFT,
    priority_to = const ich::PRIORITY_SHIFT,
    entries = const offset_of!(VcpuState, run.entries),
    version = const HYPERCALL_VERSION,
    abi_version = const abi::ABI_VERSION,
    handled = const offset_of!(VcpuState, run.handled_in_kernel),
    synchronous_32 = const exit_kind::SYNCHRONOUS_32,
    by_interrupt = const exit_kind::INTERRUPT,
    by_error = const exit_kind::ERROR,
    host = const hcr::HOST,
    guest_hcr = const cpu::GUEST_HCR,
);

unsafe extern "C" {
    /// Vectors of the kernel's exception level.
    pub static vectors: u8;
    /// Returns to EL0 with the registers of a context.
    fn leave_kernel(context: *const ThreadContext) -> !;
    /// Enters the guest at this address with this processor state, the other registers being in the
    /// state page, and returns when the guest was left, with the registers saved there.
    ///
    /// # Safety
    /// The state is one of EL0 or EL1, of 64 or 32 bits as the loaded HCR_EL2 has it. The system
    /// registers and the tables of the guest are loaded.
    pub fn enter_guest(state: *const VcpuState, pc: u64, pstate: u64) -> GuestExit;
    /// Translates an address as EL1 does for a read: the result is in PAR_EL1, which keeps its
    /// value if the walk takes an exception, by memory that reports an error.
    ///
    /// # Safety
    /// Between [`to_guest`] and [`to_host`], with tables of stage 2 that exist. FAR_EL2 and the
    /// registers of the last exception change.
    pub fn translate_address(address: u64);
}

const _: () = {
    // The assembly saves both in the same way.
    assert!(offset_of!(VcpuState, sp) == offset_of!(UserRegisters, sp));
    assert!(offset_of!(VcpuState, pc) == offset_of!(UserRegisters, elr));
    assert!(offset_of!(VcpuState, pstate) == offset_of!(UserRegisters, spsr));
    assert!(offset_of!(VcpuState, tpidr) == offset_of!(UserRegisters, tpidr));
    assert!(offset_of!(VcpuState, syndrome) == offset_of!(UserRegisters, esr));
    assert!(offset_of!(VcpuState, run.handled_in_kernel) == offset_of!(VcpuState, run.entries) + 8);
};

/// Way in which a guest was left ([`GuestExit::kind`]).
pub mod exit_kind {
    /// An exception with a syndrome.
    pub const SYNCHRONOUS: u64 = 0;
    /// An interrupt of the host.
    pub const INTERRUPT: u64 = 1;
    /// An error that an access of the guest has caused (SError).
    pub const ERROR: u64 = 2;
    /// An exception with a syndrome of a 32-bit vCPU, or an error.
    pub const SYNCHRONOUS_32: u64 = 3;
    /// Of a synchronous exception: lowest bit of the ticks that the CPU has waited in place of the
    /// guest. If it has, the kind is not [`SYNCHRONOUS`].
    pub const WAITED_SHIFT: u32 = 8;
}

/// Result of [`enter_guest`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GuestExit {
    /// Syndrome of the exception. Interrupt: what the interrupt controller says ([`gic::taken`]),
    /// or a number of none, if it has not been asked.
    ///
    /// [`gic::taken`]: crate::gic::taken
    pub syndrome: u64,
    /// One of [`exit_kind`].
    pub kind: u64,
}

/// Enters user mode without an interrupted context.
///
/// # Safety
/// `context` is a thread's; nothing on this stack is used again.
#[inline(always)]
pub unsafe fn leave_to(context: *const ThreadContext) -> ! {
    // SAFETY: the caller's contract.
    unsafe { leave_kernel(context) }
}

/// Changes the exception level below the kernel's to the guest, whose registers are loaded, for an
/// instruction of the kernel that translates its addresses.
///
/// # Safety
/// [`to_host`] follows, before anything of a task is used.
pub unsafe fn to_guest() {
    // SAFETY: by the caller; the kernel's own translation remains.
    unsafe {
        core::arch::asm!(
            alternative!("msr hcr_el2, {0}", "bl to_guest"), "isb",
            in(reg) cpu::current().guest.hcr.load(Ordering::Relaxed), out("x3") _, out("x4") _, out("x5") _, out("x30") _,
            options(nostack)
        );
    }
}

/// The reverse of [`to_guest`].
///
/// # Safety
/// Follows that.
pub unsafe fn to_host() {
    // SAFETY: by the caller.
    unsafe {
        core::arch::asm!(
            alternative!("msr hcr_el2, {0}", "bl to_host"), "isb",
            in(reg) hcr::HOST, out("x3") _, out("x4") _, out("x5") _, out("x30") _,
            options(nostack)
        );
    }
}

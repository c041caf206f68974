//! Entry code. Everything is at fixed addresses below 2 GiB, so no register is needed to reach it.

use core::arch::{global_asm, naked_asm};
use core::mem::offset_of;

use wedge_core::{Frame, VirtualCpu};

use crate::{CELL, Cause, Cell, PRIVATE, Private};

const FRAME: u64 = CELL + (offset_of!(Cell, cpu) + offset_of!(VirtualCpu, frame)) as u64;
const WEDGE_RSP: u64 = CELL + offset_of!(Cell, wedge_rsp) as u64;
const EVENTS: u64 = CELL + offset_of!(Cell, events) as u64;
const DISPATCH_NEXT: u64 = CELL + offset_of!(Cell, dispatch) as u64;
const DISPATCH: u64 = PRIVATE + offset_of!(Private, dispatch) as u64;
const RIP: u64 = FRAME + offset_of!(Frame, rip) as u64;
const RFLAGS: u64 = FRAME + offset_of!(Frame, rflags) as u64;

/// Goes to the guest with the registers of its frame; gives the code of a [`Cause`] when it stops.
///
/// # Safety
/// The virtual CPU's frame must be a guest's state, in an address space that is set up for it; the caller's stack must be the wedge's.
#[unsafe(naked)]
pub unsafe extern "sysv64" fn enter() -> u64 {
    // The direction flag and the alignment check are the guest's from `popfq` on.
    naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "mov [{wedge_rsp}], rsp",
        ".globl parador_wedge_window",
        "parador_wedge_window:",
        "cmp dword ptr [{events}], 0",
        "jne parador_wedge_abort",
        "mov al, [{dispatch_next}]",
        "mov [{dispatch}], al",
        "push qword ptr [{rflags}]",
        "mov rax, [{frame} + 0x00]",
        "mov rcx, [{frame} + 0x08]",
        "mov rdx, [{frame} + 0x10]",
        "mov rbx, [{frame} + 0x18]",
        "mov rbp, [{frame} + 0x28]",
        "mov rsi, [{frame} + 0x30]",
        "mov rdi, [{frame} + 0x38]",
        "mov r8, [{frame} + 0x40]",
        "mov r9, [{frame} + 0x48]",
        "mov r10, [{frame} + 0x50]",
        "mov r11, [{frame} + 0x58]",
        "mov r12, [{frame} + 0x60]",
        "mov r13, [{frame} + 0x68]",
        "mov r14, [{frame} + 0x70]",
        "mov r15, [{frame} + 0x78]",
        "popfq",
        "mov rsp, [{frame} + 0x20]",
        "jmp qword ptr [{rip}]",
        ".globl parador_wedge_window_end",
        "parador_wedge_window_end:",
        wedge_rsp = const WEDGE_RSP,
        events = const EVENTS,
        dispatch_next = const DISPATCH_NEXT,
        dispatch = const DISPATCH,
        frame = const FRAME,
        rip = const RIP,
        rflags = const RFLAGS,
    )
}

global_asm!(
    // A site's stub has put RSP into the frame and its own address on the scratch stack.
    ".globl parador_wedge_site",
    "parador_wedge_site:",
    "mov [{frame} + 0x00], rax",
    "mov [{frame} + 0x08], rcx",
    "mov [{frame} + 0x10], rdx",
    "mov [{frame} + 0x18], rbx",
    "mov [{frame} + 0x28], rbp",
    "mov [{frame} + 0x30], rsi",
    "mov [{frame} + 0x38], rdi",
    "mov [{frame} + 0x40], r8",
    "mov [{frame} + 0x48], r9",
    "mov [{frame} + 0x50], r10",
    "mov [{frame} + 0x58], r11",
    "mov [{frame} + 0x60], r12",
    "mov [{frame} + 0x68], r13",
    "mov [{frame} + 0x70], r14",
    "mov [{frame} + 0x78], r15",
    "pop rax",
    "pushfq",
    "pop qword ptr [{rflags}]",
    "jmp parador_wedge_return",
    // Signal handlers jump here: the cause is a signal.
    ".globl parador_wedge_leave",
    "parador_wedge_leave:",
    "mov eax, {signal}",
    "jmp parador_wedge_return",
    ".globl parador_wedge_abort",
    "parador_wedge_abort:",
    "xor eax, eax",
    "parador_wedge_return:",
    "mov byte ptr [{dispatch}], 0",
    "mov rsp, [{wedge_rsp}]",
    // Neither direction flag nor alignment check nor single step are the guest's any longer.
    "push 2",
    "popfq",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbx",
    "pop rbp",
    "ret",
    wedge_rsp = const WEDGE_RSP,
    dispatch = const DISPATCH,
    frame = const FRAME,
    rflags = const RFLAGS,
    signal = const Cause::SIGNAL,
);

unsafe extern "C" {
    fn parador_wedge_site();
    fn parador_wedge_abort();
    fn parador_wedge_window();
    fn parador_wedge_window_end();
}

/// Address that stubs jump to.
pub fn site_entry() -> u64 {
    parador_wedge_site as *const () as u64
}

/// Where a signal handler sends a processor that it found in [`entry_window`], with everything but the instruction pointer as it was.
pub fn abort() -> u64 {
    parador_wedge_abort as *const () as u64
}

/// Addresses between the look for events and the guest: first, and first behind.
pub fn entry_window() -> (u64, u64) {
    let [start, end] = [parador_wedge_window, parador_wedge_window_end]
        .map(|label: unsafe extern "C" fn()| label as *const () as u64);
    (start, end)
}

/// Gives up a signal handler: [`enter`] returns with [`Cause::Signal`].
///
/// # Safety
/// The guest was running when the signal came, and the frame has its registers.
pub unsafe fn leave() -> ! {
    // SAFETY: `enter` has left what is needed to return from it.
    unsafe { core::arch::asm!("jmp parador_wedge_leave", options(noreturn)) }
}

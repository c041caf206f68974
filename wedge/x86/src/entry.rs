//! Entry code. Everything is at fixed addresses below 2 GiB, so no register is needed to reach it.

use core::arch::{global_asm, naked_asm};
use core::mem::offset_of;

use vmm_cpu::backend::Segment;
use wedge_core::{Frame, VirtualCpu};

use crate::{CELL, Cause, Cell, Entries, PRIVATE, Private};

const FRAME: u64 = CELL + (offset_of!(Cell, cpu) + offset_of!(VirtualCpu, frame)) as u64;
const WEDGE_RSP: u64 = CELL + offset_of!(Cell, wedge_rsp) as u64;
const EVENTS: u64 = CELL + offset_of!(Cell, events) as u64;
const DISPATCH_NEXT: u64 = CELL + offset_of!(Cell, dispatch) as u64;
const DISPATCH: u64 = PRIVATE + offset_of!(Private, dispatch) as u64;
const RIP: u64 = FRAME + offset_of!(Frame, rip) as u64;
const RFLAGS: u64 = FRAME + offset_of!(Frame, rflags) as u64;
const CPU: u64 = CELL + offset_of!(Cell, cpu) as u64;
const CPL: u64 = CPU + offset_of!(VirtualCpu, cpl) as u64;
const LSTAR: u64 = CPU + offset_of!(VirtualCpu, lstar) as u64;
/// The byte of the flags with `IF`.
const FLAG_BYTE: u64 = CPU + offset_of!(VirtualCpu, interrupt_flag) as u64 + 1;
const FLAG_ON: u8 = 2;
/// `CS` and `SS`, which follow each other.
const SEGMENTS: u64 = CPU + (offset_of!(VirtualCpu, segments) + size_of::<Segment>()) as u64;
const PROGRAM: u64 = CELL + offset_of!(Cell, program) as u64;
const KERNEL: u64 = CELL + offset_of!(Cell, kernel) as u64;
const CALLS: u64 = CELL + offset_of!(Cell, calls) as u64;
const SCRATCH_TOP: u64 = CELL + (offset_of!(Cell, scratch) + size_of::<[u64; 16]>()) as u64;

const _: () = assert!(size_of::<Segment>() == 16);

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

global_asm!(
    // `SYSRET` to 64-bit code, when nothing waits: the stub has looked. RCX and R11 are what the instruction takes.
    ".globl parador_wedge_sysret",
    "parador_wedge_sysret:",
    "mov [{rsp}], rsp",
    "mov esp, {scratch}",
    "push qword ptr [{program} + 0x00]",
    "pop qword ptr [{segments} + 0x00]",
    "push qword ptr [{program} + 0x08]",
    "pop qword ptr [{segments} + 0x08]",
    "push qword ptr [{program} + 0x10]",
    "pop qword ptr [{segments} + 0x10]",
    "push qword ptr [{program} + 0x18]",
    "pop qword ptr [{segments} + 0x18]",
    "mov byte ptr [{cpl}], 3",
    "mov byte ptr [{flag_byte}], {flag_on}",
    "mov byte ptr [{dispatch}], 1",
    "push r11",
    "popfq",
    ".globl parador_wedge_sysret_own_stack",
    "parador_wedge_sysret_own_stack:",
    "mov rsp, [{rsp}]",
    "jmp rcx",
    ".globl parador_wedge_sysret_end",
    "parador_wedge_sysret_end:",
    // A system call of a program: RCX is where it goes on, everything else but R11 as it was. It goes to the kernel's entry with the
    // flags that `SFMASK` leaves if it has all of them.
    ".globl parador_wedge_call",
    "parador_wedge_call:",
    "mov byte ptr [{dispatch}], 0",
    "mov [{rsp}], rsp",
    "mov esp, {scratch}",
    "pushfq",
    "pop r11",
    "push 2",
    "popfq",
    "inc qword ptr [{calls}]",
    "push qword ptr [{kernel} + 0x00]",
    "pop qword ptr [{segments} + 0x00]",
    "push qword ptr [{kernel} + 0x08]",
    "pop qword ptr [{segments} + 0x08]",
    "push qword ptr [{kernel} + 0x10]",
    "pop qword ptr [{segments} + 0x10]",
    "push qword ptr [{kernel} + 0x18]",
    "pop qword ptr [{segments} + 0x18]",
    "mov byte ptr [{cpl}], 0",
    "mov byte ptr [{flag_byte}], 0",
    "mov rsp, [{rsp}]",
    "jmp qword ptr [{lstar}]",
    rsp = const FRAME + 0x20,
    scratch = const SCRATCH_TOP,
    program = const PROGRAM,
    kernel = const KERNEL,
    segments = const SEGMENTS,
    cpl = const CPL,
    flag_byte = const FLAG_BYTE,
    flag_on = const FLAG_ON,
    dispatch = const DISPATCH,
    calls = const CALLS,
    lstar = const LSTAR,
);

unsafe extern "C" {
    fn parador_wedge_sysret();
    fn parador_wedge_sysret_own_stack();
    fn parador_wedge_sysret_end();
    fn parador_wedge_call();
    fn parador_wedge_site();
    fn parador_wedge_abort();
    fn parador_wedge_window();
    fn parador_wedge_window_end();
}

/// Addresses that stubs jump to.
pub fn entries() -> Entries {
    Entries {
        site: parador_wedge_site as *const () as u64,
        sysret: parador_wedge_sysret as *const () as u64,
    }
}

/// Address that rewritten system calls jump to.
pub fn call_entry() -> u64 {
    parador_wedge_call as *const () as u64
}

/// Addresses of the code that does `SYSRET`: first, the first from which the guest's stack pointer is in the frame and no longer, first
/// behind.
pub fn sysret_window() -> [u64; 3] {
    [parador_wedge_sysret, parador_wedge_sysret_own_stack, parador_wedge_sysret_end]
        .map(|label: unsafe extern "C" fn()| label as *const () as u64)
}

/// The jump to the guest at the end of [`entry_window`].
pub fn last_jump() -> u64 {
    const LENGTH: u64 = 7;
    entry_window().1 - LENGTH
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

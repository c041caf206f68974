//! Entry code. All data is at fixed addresses below 2 GiB, so no base register is needed.

use core::arch::{global_asm, naked_asm};
use core::mem::offset_of;

use vmm_x86::Segment;
use wedge_core::{RegisterFrame, VirtualCpu};

use crate::{
    CELL, CODE_64, CROSSING, Cause, Cell, Crossing, Entries, HANDLER_STACK_TOP, PRIVATE, Private,
    USER_FLAGS, USER_PKRU,
};

const FRAME: u64 = CELL + (offset_of!(Cell, cpu) + offset_of!(VirtualCpu, frame)) as u64;
const WEDGE_RSP: u64 = CELL + offset_of!(Cell, wedge_rsp) as u64;
const EVENTS: u64 = CELL + offset_of!(Cell, events) as u64;
const DISPATCH_NEXT: u64 = CELL + offset_of!(Cell, dispatch) as u64;
const DISPATCH: u64 = PRIVATE + offset_of!(Private, dispatch) as u64;
const RIP: u64 = FRAME + offset_of!(RegisterFrame, rip) as u64;
const RFLAGS: u64 = FRAME + offset_of!(RegisterFrame, rflags) as u64;
const CPU: u64 = CELL + offset_of!(Cell, cpu) as u64;
const CPL: u64 = CPU + offset_of!(VirtualCpu, cpl) as u64;
const LSTAR: u64 = CPU + offset_of!(VirtualCpu, lstar) as u64;
/// All relevant bits are in the lower half.
const HELD_FLAGS: u64 = CPU + offset_of!(VirtualCpu, held_flags) as u64;
const FLAG_ON: u32 = 1 << 9;
/// `IF`, and the reserved bit that is always set.
const ALWAYS_ON: u32 = 0x202;
/// `__USER_DS`.
const DATA: u8 = 0x2b;
/// `CS` and `SS`, which are adjacent.
const SEGMENTS: u64 = CPU + (offset_of!(VirtualCpu, segments) + size_of::<Segment>()) as u64;
const PROGRAM: u64 = CELL + offset_of!(Cell, user_segments) as u64;
const KERNEL: u64 = CELL + offset_of!(Cell, kernel_segments) as u64;
const CALLS: u64 = CELL + offset_of!(Cell, calls) as u64;
const SCRATCH_TOP: u64 = CELL + (offset_of!(Cell, scratch) + size_of::<[u64; 16]>()) as u64;
const KEYS: u64 = CELL + offset_of!(Cell, keys) as u64;
const CLOSE: u64 = CELL + offset_of!(Cell, close) as u64;
const CODE: u64 = CELL + offset_of!(Cell, code) as u64;
const CROSSING_RIP: u64 = CROSSING + offset_of!(Crossing, rip) as u64;
const CROSSING_FLAGS: u64 = CROSSING + offset_of!(Crossing, rflags) as u64;
const CROSSING_RSP: u64 = CROSSING + offset_of!(Crossing, rsp) as u64;

const _: () = assert!(size_of::<Segment>() == 16);
const _: () = assert!(offset_of!(Crossing, rcx) == 8 && offset_of!(Crossing, rdx) == 16);

/// RAX, RCX and RDX, from the three words at the named operand.
macro_rules! load_low {
    ($from:literal) => {
        concat!(
            "mov rax, [{",
            $from,
            "} + 0x00]\n",
            "mov rcx, [{",
            $from,
            "} + 0x08]\n",
            "mov rdx, [{",
            $from,
            "} + 0x10]",
        )
    };
}

/// RAX, RCX and RDX, to the three words at the named operand.
macro_rules! save_low {
    ($to:literal) => {
        concat!(
            "mov [{",
            $to,
            "} + 0x00], rax\n",
            "mov [{",
            $to,
            "} + 0x08], rcx\n",
            "mov [{",
            $to,
            "} + 0x10], rdx",
        )
    };
}

/// The general registers other than those of [`load_low`] and RSP, from the frame.
macro_rules! load_others {
    () => {
        "mov rbx, [{frame} + 0x18]
        mov rbp, [{frame} + 0x28]
        mov rsi, [{frame} + 0x30]
        mov rdi, [{frame} + 0x38]
        mov r8, [{frame} + 0x40]
        mov r9, [{frame} + 0x48]
        mov r10, [{frame} + 0x50]
        mov r11, [{frame} + 0x58]
        mov r12, [{frame} + 0x60]
        mov r13, [{frame} + 0x68]
        mov r14, [{frame} + 0x70]
        mov r15, [{frame} + 0x78]"
    };
}

/// A word of memory, to another one. Changes no register.
macro_rules! copy {
    ($from:literal, $to:literal $(, $offset:literal)?) => {
        concat!(
            "push qword ptr [", $from, $(" + ", $offset,)? "]\n",
            "pop qword ptr [", $to, $(" + ", $offset,)? "]\n",
        )
    };
}

/// CS and SS, from the two segments at an operand.
macro_rules! set_segments {
    ($from:literal) => {
        concat!(
            copy!($from, "{segments}"),
            copy!($from, "{segments}", "0x08"),
            copy!($from, "{segments}", "0x10"),
            copy!($from, "{segments}", "0x18"),
        )
    };
}

/// The registers of the frame that user mode gets from its crossing page.
macro_rules! fill_crossing {
    () => {
        concat!(
            copy!("{frame}", "{crossing}"),
            copy!("{frame}", "{crossing}", "0x08"),
            copy!("{frame}", "{crossing}", "0x10"),
            copy!("{rip}", "{crossing_rip}"),
            copy!("{rflags}", "{crossing_flags}"),
            copy!("{frame} + 0x20", "{crossing_rsp}"),
            copy!("{code}", "{crossing_rip} + 8"),
            "push {data}\npop qword ptr [{crossing_rsp} + 8]",
        )
    };
}

/// Opens all protection keys. Ends in `UD2` if user mode has jumped here with other registers, or
/// from 32-bit code.
macro_rules! open_keys {
    () => {
        "xor eax, eax
        xor ecx, ecx
        xor edx, edx
        wrpkru
        test eax, eax
        jnz parador_wedge_wrong
        mov eax, cs
        cmp al, {code_64}
        jne parador_wedge_wrong"
    };
}

/// Closes the protection keys that user mode lacks, and then restores the registers that this uses.
macro_rules! close_keys {
    () => {
        concat!(
            "mov byte ptr [{dispatch}], 1
            xor ecx, ecx
            xor edx, edx
            mov eax, {rights}
            wrpkru
            cmp eax, {rights}
            jne parador_wedge_wrong\n",
            load_low!("crossing"),
        )
    };
}

/// Runs the guest with the registers of its frame; returns the code of a [`Cause`] when it stops.
///
/// # Safety
/// The frame must be the state of a guest whose address space is set up. The caller must be on the
/// wedge's stack.
#[unsafe(naked)]
pub unsafe extern "sysv64" fn enter() -> u64 {
    // From `popfq` on, direction flag and alignment check are the guest's.
    naked_asm!(
        "push rbp; push rbx; push r12; push r13; push r14; push r15",
        "mov [{wedge_rsp}], rsp",
        ".globl parador_wedge_window",
        "parador_wedge_window:",
        "cmp dword ptr [{events}], 0",
        "jne parador_wedge_abort",
        "cmp byte ptr [{close}], 0",
        "je 2f",
        fill_crossing!(),
        load_others!(),
        "cmp byte ptr [{code}], {code_64}",
        "jne parador_wedge_close_32",
        "jmp parador_wedge_close",
        "2:",
        "mov al, [{dispatch_next}]",
        "mov [{dispatch}], al",
        "cmp byte ptr [{code}], {code_64}",
        "jne 3f",
        // After `POPFQ`, a single step would trap on the instructions below.
        "test byte ptr [{rflags} + 1], 1",
        "jnz 3f",
        "push qword ptr [{rflags}]",
        load_low!("frame"),
        load_others!(),
        "popfq",
        "mov rsp, [{frame} + 0x20]",
        "jmp qword ptr [{rip}]",
        // 32-bit user code, which has eight registers only, or a single step.
        "3:",
        "push {data}",
        "push qword ptr [{frame} + 0x20]",
        "push qword ptr [{rflags}]",
        "push qword ptr [{code}]",
        "push qword ptr [{rip}]",
        load_low!("frame"),
        load_others!(),
        "iretq",
        ".globl parador_wedge_window_end",
        "parador_wedge_window_end:",
        wedge_rsp = const WEDGE_RSP,
        events = const EVENTS,
        dispatch_next = const DISPATCH_NEXT,
        dispatch = const DISPATCH,
        frame = const FRAME,
        rip = const RIP,
        rflags = const RFLAGS,
        close = const CLOSE,
        crossing = const CROSSING,
        crossing_rip = const CROSSING_RIP,
        crossing_flags = const CROSSING_FLAGS,
        crossing_rsp = const CROSSING_RSP,
        code = const CODE,
        code_64 = const CODE_64,
        data = const DATA,
    )
}

global_asm!(
    // The stub of a site has saved RSP in the frame and pushed its own address on the scratch
    // stack.
    ".globl parador_wedge_site",
    "parador_wedge_site:",
    save_low!("frame"),
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
    // Signal handlers jump here; the cause is a signal.
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
    // Clear the guest's direction flag, alignment check and single step.
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
    // `SYSRET` to 64-bit code without pending events, which the stub has checked. RCX and R11 are
    // the operands of the instruction.
    ".globl parador_wedge_sysret",
    "parador_wedge_sysret:",
    "mov [{rsp}], rsp",
    "mov esp, {scratch}",
    set_segments!("{program}"),
    "mov byte ptr [{cpl}], 3",
    "mov dword ptr [{held_flags}], {flag_on}",
    "mov byte ptr [{dispatch}], 1",
    "push r11",
    "popfq",
    ".globl parador_wedge_sysret_own_stack",
    "parador_wedge_sysret_own_stack:",
    "mov rsp, [{rsp}]",
    "jmp rcx",
    ".globl parador_wedge_sysret_end",
    "parador_wedge_sysret_end:",
    // System call of user mode: RCX is the return address, all registers except R11 are unchanged.
    // Enters the kernel with the flags that remain after `SFMASK`, if that clears all user flags.
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
    set_segments!("{kernel}"),
    "mov byte ptr [{cpl}], 0",
    "mov dword ptr [{held_flags}], 0",
    "mov rsp, [{rsp}]",
    "jmp qword ptr [{lstar}]",
    rsp = const FRAME + 0x20,
    scratch = const SCRATCH_TOP,
    program = const PROGRAM,
    kernel = const KERNEL,
    segments = const SEGMENTS,
    cpl = const CPL,
    held_flags = const HELD_FLAGS,
    flag_on = const FLAG_ON,
    dispatch = const DISPATCH,
    calls = const CALLS,
    lstar = const LSTAR,
);

// Transitions with protection keys. User mode can jump to each instruction here, with arbitrary
// registers. After each `WRPKRU`, EAX is compared with the expected value; where keys are opened,
// CS must also be that of 64-bit code, in which these bytes decode as these instructions. An
// illegitimate entry ends at `UD2`, a fault of user mode.
global_asm!(
    // To user mode. All registers are loaded, except for those in the crossing page.
    ".globl parador_wedge_close",
    "parador_wedge_close:",
    close_keys!(),
    // A single step traps after this code.
    "test byte ptr [{flags} + 1], 1",
    "jnz 2f",
    "mov esp, {flags}",
    "popfq",
    "mov rsp, [{rsp}]",
    "jmp qword ptr [{rip}]",
    // To 32-bit user code.
    ".globl parador_wedge_close_32",
    "parador_wedge_close_32:",
    close_keys!(),
    "2:",
    "mov esp, {rip}",
    "iretq",
    ".globl parador_wedge_close_end",
    "parador_wedge_close_end:",
    // `SYSRET`, as `parador_wedge_sysret`.
    ".globl parador_wedge_keyed_sysret",
    "parador_wedge_keyed_sysret:",
    "mov [{frame_rsp}], rsp",
    "mov esp, {scratch}",
    set_segments!("{program}"),
    "mov byte ptr [{cpl}], 3",
    "mov dword ptr [{held_flags}], {flag_on}",
    save_low!("crossing"),
    "mov [{rip}], rcx",
    "mov [{flags}], r11",
    "push qword ptr [{frame_rsp}]",
    "pop qword ptr [{rsp}]",
    "jmp parador_wedge_close",
    ".globl parador_wedge_keyed_sysret_end",
    "parador_wedge_keyed_sysret_end:",
    // System call of user mode, as `parador_wedge_call`.
    ".globl parador_wedge_keyed_call",
    "parador_wedge_keyed_call:",
    save_low!("crossing"),
    "mov [{rsp}], rsp",
    "mov esp, {flags} + 8",
    ".globl parador_wedge_keyed_call_switched",
    "parador_wedge_keyed_call_switched:",
    "pushfq",
    ".globl parador_wedge_keyed_call_saved",
    "parador_wedge_keyed_call_saved:",
    open_keys!(),
    "mov byte ptr [{dispatch}], 0",
    ".globl parador_wedge_keyed_call_end",
    "parador_wedge_keyed_call_end:",
    "mov esp, {scratch}",
    "push 2",
    "popfq",
    "inc qword ptr [{calls}]",
    set_segments!("{kernel}"),
    "mov byte ptr [{cpl}], 0",
    "mov dword ptr [{held_flags}], 0",
    load_low!("crossing"),
    "mov r11, [{flags}]",
    // User mode that has jumped into this code has chosen the flags.
    "and r11d, {program_flags}",
    "or r11d, {always}",
    "mov rsp, [{rsp}]",
    "jmp qword ptr [{lstar}]",
    // Signal handler. Linux has closed all keys except 0, whose memory holds the frame. If user
    // mode was interrupted, or has jumped here, the stack must not be memory that user mode can
    // write.
    ".globl parador_wedge_keyed_handler",
    "parador_wedge_keyed_handler:",
    "mov r8, rdx",
    open_keys!(),
    "cmp byte ptr [{dispatch}], 0",
    "je 2f",
    // From here on, a signal interrupts the wedge; before, its frame must be on the signal stack.
    "mov byte ptr [{dispatch}], 0",
    ".globl parador_wedge_keyed_handler_end",
    "parador_wedge_keyed_handler_end:",
    "mov esp, {handler_stack}",
    "push 2",
    "popfq",
    "mov rdx, r8",
    "call parador_wedge_user_signal",
    "2:",
    "push 2",
    "popfq",
    "mov rdx, r8",
    "jmp parador_wedge_signal",
    // Hosts before Linux 6.12 write a signal frame with the interrupted rights, so these must be
    // user mode's.
    ".globl parador_wedge_wrong",
    "parador_wedge_wrong:",
    "xor ecx, ecx",
    "xor edx, edx",
    "mov eax, {rights}",
    "wrpkru",
    "cmp eax, {rights}",
    "jne parador_wedge_wrong",
    "ud2",
    rights = const USER_PKRU,
    crossing = const CROSSING,
    rip = const CROSSING_RIP,
    flags = const CROSSING_FLAGS,
    rsp = const CROSSING_RSP,
    frame_rsp = const FRAME + 0x20,
    scratch = const SCRATCH_TOP,
    program = const PROGRAM,
    kernel = const KERNEL,
    segments = const SEGMENTS,
    cpl = const CPL,
    held_flags = const HELD_FLAGS,
    flag_on = const FLAG_ON,
    dispatch = const DISPATCH,
    calls = const CALLS,
    lstar = const LSTAR,
    program_flags = const USER_FLAGS,
    always = const ALWAYS_ON,
    code_64 = const CODE_64,
    handler_stack = const HANDLER_STACK_TOP,
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
    fn parador_wedge_close();
    fn parador_wedge_close_32();
    fn parador_wedge_close_end();
    fn parador_wedge_keyed_sysret();
    fn parador_wedge_keyed_sysret_end();
    fn parador_wedge_keyed_call();
    fn parador_wedge_keyed_call_switched();
    fn parador_wedge_keyed_call_saved();
    fn parador_wedge_keyed_call_end();
    fn parador_wedge_keyed_handler();
    fn parador_wedge_keyed_handler_end();
}

/// Returns whether transitions change `PKRU`.
fn has_keys() -> bool {
    // SAFETY: the byte is set before the guest runs, and constant from then on.
    unsafe { *(KEYS as *const u8) != 0 }
}

fn addresses<const N: usize>(labels: [unsafe extern "C" fn(); N]) -> [u64; N] {
    labels.map(|label| label as *const () as u64)
}

/// Returns the jump targets of stubs.
pub fn entries() -> Entries {
    let sysret = if has_keys() { parador_wedge_keyed_sysret } else { parador_wedge_sysret };
    let [site, sysret] = addresses([parador_wedge_site, sysret]);
    Entries { site, sysret }
}

/// Returns the jump target of rewritten system calls.
pub fn call_entry() -> u64 {
    let call = if has_keys() { parador_wedge_keyed_call } else { parador_wedge_call };
    call as *const () as u64
}

/// Returns the code in which some of user mode's registers are in its [`Crossing`], on the way to
/// user mode: start, start for 32-bit code, and end.
pub fn crossing() -> [u64; 3] {
    addresses([parador_wedge_close, parador_wedge_close_32, parador_wedge_close_end])
}

/// Returns the system-call entry with keys: start; first address at which `RAX`, `RCX`, `RDX` and
/// `RSP` are in the [`Crossing`]; first address at which the flags are; and start of the kernel's
/// side.
pub fn call_gate() -> [u64; 4] {
    addresses([
        parador_wedge_keyed_call,
        parador_wedge_keyed_call_switched,
        parador_wedge_keyed_call_saved,
        parador_wedge_keyed_call_end,
    ])
}

/// Returns the signal handler with keys. It continues in `parador_wedge_user_signal` if user mode
/// was interrupted or has jumped to it, else in `parador_wedge_signal`, with the arguments of a
/// handler.
pub fn keyed_handler() -> u64 {
    parador_wedge_keyed_handler as *const () as u64
}

/// Returns the part of [`keyed_handler`] that counts as user mode: start and end. The context is in
/// `RDX` at the first instruction, then in `R8`.
pub fn keyed_handler_window() -> (u64, u64) {
    let [start, end] = addresses([parador_wedge_keyed_handler, parador_wedge_keyed_handler_end]);
    (start, end)
}

/// Returns the code of `SYSRET`: start, the first address at which the guest's stack pointer is no
/// longer in the frame, and end.
pub fn sysret_window() -> [u64; 3] {
    if has_keys() {
        let [start, end] = addresses([parador_wedge_keyed_sysret, parador_wedge_keyed_sysret_end]);
        return [start, end, end];
    }
    addresses([parador_wedge_sysret, parador_wedge_sysret_own_stack, parador_wedge_sysret_end])
}

/// Returns the address at which a signal handler resumes an interrupted [`entry_window`], with all
/// registers except the instruction pointer unchanged.
pub fn abort() -> u64 {
    parador_wedge_abort as *const () as u64
}

/// Returns the code between the check for events and the guest: start and end.
pub fn entry_window() -> (u64, u64) {
    let [start, end] = addresses([parador_wedge_window, parador_wedge_window_end]);
    (start, end)
}

/// Performs [`leave`] after a host system call `number` with one argument. The contents of the
/// stack are dropped.
///
/// # Safety
/// As [`leave`]; the system call must be sound.
pub unsafe fn leave_after(number: u32, argument: u64) -> ! {
    // SAFETY: the caller guarantees it.
    unsafe {
        core::arch::asm!(
            "syscall",
            "jmp parador_wedge_leave",
            in("eax") number,
            in("rdi") argument,
            in("rsi") 0,
            options(noreturn),
        )
    }
}

/// Abandons a signal handler: [`enter`] returns [`Cause::Signal`].
///
/// # Safety
/// The signal must have interrupted the guest, and the frame must hold its registers.
pub unsafe fn leave() -> ! {
    // SAFETY: `enter` has saved the state that its return needs.
    unsafe { core::arch::asm!("jmp parador_wedge_leave", options(noreturn)) }
}

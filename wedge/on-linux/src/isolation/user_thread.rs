//! Code of a user process: its set-up, the mapper thread, and the stop handler of the user thread
//! ([`crate::isolation::user_process`]).

use core::arch::{global_asm, naked_asm};
use core::convert::Infallible;
use core::mem::offset_of;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use host_linux::sys::{self, Backing, Errno};
use linux_raw_sys::general as linux;
use linux_raw_sys::prctl;
use proto::hosted::{Filters, layout};

use crate::isolation::mailbox::{Mapper, REQUEST, RESPONSE, Request, Response, STACK, mailbox};
use crate::linux::signals::{self, Context, KICK, UNRESTORED, set_unrestored_flags};
use crate::mmu::ram::PAGE;
use crate::report::{self, HOST};
use crate::state::process::{ProcessState, process};
use crate::state::setup::{self, Kind};
use crate::state::shared::PRIVATE_LENGTH;
use crate::{children, compat, processes};

/// Flag of sigaltstack(2): the host disables the signal stack while a handler runs.
const SS_AUTODISARM: u64 = 1 << 31;

/// Wakes a thread that waits for the word at an operand.
macro_rules! futex_wake {
    ($word:literal) => {
        concat!("mov edi, ", $word, "\nmov esi, {wake}\nmov edx, 1\nmov eax, {futex}\nsyscall")
    };
}

/// Waits while the word at an operand has the value of EDX.
macro_rules! futex_wait {
    ($word:literal) => {
        concat!("mov edi, ", $word, "\nmov esi, {wait}\nxor r10d, r10d\nmov eax, {futex}\nsyscall")
    };
}

/// Stores a segment register in the response.
macro_rules! save_selector {
    ($segment:literal, $offset:literal) => {
        concat!("mov eax, ", $segment, "\nmov [{selectors} + ", $offset, "], eax")
    };
}

/// Loads a segment register from the request.
macro_rules! load_selector {
    ($segment:literal, $offset:literal) => {
        concat!("mov eax, [{selectors_now} + ", $offset, "]\nmov ", $segment, ", eax")
    };
}

/// Makes set_thread_area(2) with a descriptor in the request, which must be 32-bit.
macro_rules! set_area {
    ($offset:literal) => {
        concat!("mov ebx, {areas} + ", $offset, "\nmov eax, {set_thread_area}\nint 0x80")
    };
}

/// Loads a system call from the command at R13.
macro_rules! load_call {
    () => {
        "mov rax, [r13]
        mov rdi, [r13 + 8]
        mov rsi, [r13 + 16]
        mov rdx, [r13 + 24]
        mov r10, [r13 + 32]
        mov r8, [r13 + 40]
        mov r9, [r13 + 48]"
    };
}

/// Reports batch EBX.
macro_rules! report {
    () => {
        concat!("mov [{done}], ebx\n", futex_wake!("{done}"))
    };
}

/// Creates a slot's user process; returns its id. For the device process.
pub fn create(vcpu: usize, slot: usize, filters: &Filters) -> Result<u32, Errno> {
    setup::words().confined(Kind::User, vcpu, slot).store(false, SeqCst);
    let child = children::fork()?;
    if child != 0 {
        return Ok(child);
    }
    match become_user_process(vcpu, slot, filters) {
        Ok(never) => match never {},
        Err(error) => {
            report::warn(format_args!("cannot set up a user process: {error}"));
            sys::exit(HOST)
        }
    }
}

/// Sets up a new user process with two threads, each with its own part of the mailbox. It receives
/// no signal before its seccomp filter is installed, except for the one that it raises then: the
/// handler continues with the context from the kernel process.
fn become_user_process(vcpu: usize, slot: usize, filters: &Filters) -> Result<Infallible, Errno> {
    sys::set_signal_mask(signals::ALL_SIGNALS & !(1 << (linux::SIGILL - 1)))?;
    children::die_with_parent(children::device())?;
    processes::set_vcpu_name(vcpu)?;
    // A copy: the configuration will be unmapped.
    let filters = *filters;
    let own = sys::process_id();
    replace_memory(layout::mailbox(vcpu, slot))?;
    // SAFETY: the previous process has ended, and this one does not use the response yet. The data
    // of the previous one belongs to another address space.
    unsafe { core::ptr::write_bytes(RESPONSE as *mut u8, 0, size_of::<Response>()) };
    mailbox().response.process.store(own.into(), Relaxed);
    sys::close(layout::MEMORY_FD + 1, u32::MAX)?;
    start_mapper(&filters)?;
    // With `SS_AUTODISARM` each signal frame is at the top, even if user mode's stack pointer is in
    // the signal stack: the kernel process expects it there, and it always fits.
    let stack = [RESPONSE + offset_of!(Response, stack) as u64, SS_AUTODISARM, STACK as u64];
    // Signals do not nest.
    let flags = linux::SA_SIGINFO | linux::SA_ONSTACK | linux::SA_RESTORER;
    let handler = stop_handler();
    let action = [handler, flags.into(), handler, u64::MAX];
    let numbers = signals::SYNCHRONOUS.into_iter().chain([KICK]);
    // SAFETY: the stack has no other use; the handler accesses the mailbox only.
    unsafe { sys::set_handlers(&stack, numbers, &action) }?;
    // Last, so that errors before can be printed.
    sys::close(layout::INPUT_FD, layout::MEMORY_FD)?;
    dispatch_calls()?;
    let [length, instructions @ ..] = &filters.programs[Filters::USER_THREAD];
    // `struct sock_fprog`.
    let program = [(*length).min(instructions.len() as u64), instructions.as_ptr() as u64];
    let mark = setup::words().confined(Kind::User, vcpu, slot);
    // SAFETY: the filter is only read, and has this length; the mapper unmaps the mark later.
    unsafe { confine_and_stop(program.as_ptr(), mark.as_ptr()) }
}

/// Replaces the memory of the device process by the mailbox at an offset of the shared memory, and
/// private memory. Of the rest the words of [`setup`] stay.
fn replace_memory(mailbox: u64) -> Result<(), Errno> {
    let rights = linux::PROT_READ | linux::PROT_WRITE;
    let request = RESPONSE - REQUEST;
    // SAFETY: the child does not use the memory that it inherited from the device process any more.
    // The unmapped ranges contain neither the wedge's code nor the stack of this function.
    unsafe {
        let shared = |offset| Backing::Shared(layout::SHARED_FD, offset);
        sys::map(REQUEST, request, linux::PROT_READ, shared(mailbox))?;
        sys::map(RESPONSE, layout::MAILBOX_LENGTH - request, rights, shared(mailbox + request))?;
        sys::map(layout::PRIVATE, PRIVATE_LENGTH, rights, Backing::Own)?;
        for (from, to) in [
            (PAGE, layout::WEDGE),
            (layout::SHARED, layout::PRIVATE),
            (layout::PRIVATE + PRIVATE_LENGTH, layout::MAILBOX),
            (layout::MAILBOX + layout::MAILBOX_LENGTH, layout::SETUP),
            (layout::SETUP + layout::SETUP_LENGTH, layout::HOST),
            (layout::CONFIG, layout::CPU_SETS),
        ] {
            sys::unmap(from, to - from)?;
        }
    }
    Ok(())
}

/// Makes the host raise a signal for each system call from outside of the stop handler.
fn dispatch_calls() -> Result<(), Errno> {
    let start = stop_handler();
    let on = [
        prctl::PR_SET_SYSCALL_USER_DISPATCH.into(),
        prctl::PR_SYS_DISPATCH_ON.into(),
        start,
        &raw const parador_wedge_user_end as u64 - start,
        // No selector byte that user mode could write.
        0,
        0,
    ];
    // SAFETY: no memory is accessed.
    unsafe { sys::call(linux::__NR_prctl, on) }?;
    Ok(())
}

/// Starts the mapper thread, which keeps the descriptor of guest memory; returns once its filter is
/// installed.
fn start_mapper(filters: &Filters) -> Result<(), Errno> {
    /// Top of its stack, which it needs until its filter is installed.
    const TOP: u64 = crate::state::shared::PRIVATE_STACK_TOP;
    let flags = linux::CLONE_VM | linux::CLONE_SIGHAND | linux::CLONE_THREAD;
    // SAFETY: the new thread has its own stack, and the filters stay in place until it reports that
    // it is ready.
    let thread = unsafe { clone(flags.into(), TOP, &raw const *filters) };
    if thread < 0 {
        return Err(Errno(-thread as i32));
    }
    let ready = &process().mapper.is_confined;
    while ready.load(SeqCst) == 0 {
        sys::wait(ready, 0, None);
    }
    Ok(())
}

/// Calls clone(2); the new thread starts in [`begin_mapper`].
#[unsafe(naked)]
unsafe extern "sysv64" fn clone(flags: u64, stack: u64, filters: *const Filters) -> i64 {
    naked_asm!(
        "mov r9, rdx",
        "xor edx, edx",
        "xor r10d, r10d",
        "xor r8d, r8d",
        "mov eax, {clone}",
        "syscall",
        "test rax, rax",
        "jz 2f",
        "ret",
        "2:",
        "mov rdi, r9",
        "call {begin}",
        "ud2",
        clone = const linux::__NR_clone,
        begin = sym begin_mapper,
    )
}

extern "sysv64" fn begin_mapper(filters: *const Filters) -> ! {
    // SAFETY: the user thread waits until this thread has read the filters.
    let filters = unsafe { &*filters };
    // The user thread handles the signals. Each thread has its own descriptors.
    let confined = sys::set_signal_mask(signals::ALL_SIGNALS)
        .and_then(|()| sys::close(layout::INPUT_FD, layout::MEMORY_FD - 1))
        .and_then(|()| children::confine(filters, Filters::GUEST));
    if confined.is_err() {
        sys::exit(HOST);
    }
    // SAFETY: nothing on this stack is needed any more.
    unsafe { mapper_main() }
}

const CONFINED: u64 =
    layout::PRIVATE + (offset_of!(ProcessState, mapper) + offset_of!(Mapper, is_confined)) as u64;
const MAY_MAP: u64 =
    layout::PRIVATE + (offset_of!(ProcessState, mapper) + offset_of!(Mapper, may_map)) as u64;

/// Reports that the mapper has its filter, waits until the user thread has its own, unmaps the
/// memory that both have used, [`setup`] included, and enters the mapper loop.
///
/// # Safety
/// The caller's stack is abandoned.
#[unsafe(naked)]
unsafe extern "sysv64" fn mapper_main() -> ! {
    naked_asm!(
        "mov dword ptr [{confined}], 1",
        futex_wake!("{confined}"),
        "2:",
        "cmp dword ptr [{may_map}], 0",
        "jne 3f",
        "xor edx, edx",
        futex_wait!("{may_map}"),
        "jmp 2b",
        "3:",
        "mov edi, {private}",
        "mov esi, {length}",
        "mov eax, {munmap}",
        "syscall",
        "mov edi, {setup}",
        "mov esi, {setup_length}",
        "mov eax, {munmap}",
        "syscall",
        "jmp {map}",
        confined = const CONFINED,
        may_map = const MAY_MAP,
        private = const layout::PRIVATE,
        length = const PRIVATE_LENGTH,
        setup = const layout::SETUP,
        setup_length = const layout::SETUP_LENGTH,
        munmap = const linux::__NR_munmap,
        wake = const linux::FUTEX_WAKE,
        wait = const linux::FUTEX_WAIT,
        futex = const linux::__NR_futex,
        map = sym mapper_loop,
    )
}

const BATCH: u64 = REQUEST + offset_of!(Request, batch) as u64;
const DONE: u64 = RESPONSE + offset_of!(Response, batch) as u64;

/// Executes batches, without a stack. After the last call of a batch it waits for a change of
/// `batch`; after a failed call it waits on `failed` forever. It waits on no other word and reads
/// nothing but the request, so user mode cannot make it wait on another word.
///
/// # Safety
/// The caller's stack is abandoned.
#[unsafe(naked)]
unsafe extern "sysv64" fn mapper_loop() -> ! {
    naked_asm!(
        // Batch 1 is empty and reports readiness.
        "mov ebx, 1",
        "2:",
        report!(),
        "3:",
        "mov edx, [{batch}]",
        "cmp edx, ebx",
        "je 4f",
        "test edx, edx",
        "jnz 5f",
        "4:",
        futex_wait!("{batch}"),
        "jmp 3b",
        "5:",
        "mov ebx, edx",
        "mov r12d, [{used}]",
        "mov r13d, {commands}",
        "6:",
        "test r12d, r12d",
        "jz 2b",
        load_call!(),
        "syscall",
        "cmp rax, -4096; jbe 7f",
        // mprotect(2) fails on a range with holes, or if a mapping cannot be split: unmap it, to be
        // faulted in again.
        "cmp dword ptr [r13], {mprotect}",
        "jne 12f",
        "mov eax, {munmap}",
        "syscall",
        "cmp rax, -4096; jbe 7f",
        "12:",
        // The thread's CPU is irrelevant for isolation.
        "cmp dword ptr [r13], {set_affinity}",
        "jne 8f",
        "7:",
        "add r13, 56",
        "dec r12d",
        "jmp 6b",
        "8:",
        report!(),
        "9:",
        "xor edx, edx",
        futex_wait!("{failed}"),
        "jmp 9b",
        done = const DONE,
        batch = const BATCH,
        failed = const REQUEST + offset_of!(Request, failed) as u64,
        mprotect = const linux::__NR_mprotect,
        munmap = const linux::__NR_munmap,
        set_affinity = const linux::__NR_sched_setaffinity,
        used = const REQUEST + offset_of!(Request, used) as u64,
        commands = const REQUEST + offset_of!(Request, commands) as u64,
        wake = const linux::FUTEX_WAKE,
        wait = const linux::FUTEX_WAIT,
        futex = const linux::__NR_futex,
    )
}

// Handles all signals of the user thread. User mode can jump to any instruction here, with
// arbitrary registers, and make any system call that its filter permits: futex wait, futex wake,
// and return from a signal. It resumes with the context in the request, or with one that it has
// forged, in its own process and with its own rights.
global_asm!(
    ".globl parador_wedge_user_stop",
    "parador_wedge_user_stop:",
    "mov [{number}], edi",
    "mov [{context}], rdx",
    "rdfsbase rax",
    "mov [{bases}], rax",
    "rdgsbase rax",
    "mov [{bases} + 8], rax",
    save_selector!("es", "0"),
    save_selector!("ds", "4"),
    save_selector!("fs", "8"),
    save_selector!("gs", "12"),
    "mov r12d, [{turn}]",
    "mov [{stopped}], r12d",
    futex_wake!("{stopped}"),
    "2:",
    "mov edx, [{turn}]",
    "cmp edx, r12d",
    "jne 3f",
    futex_wait!("{turn}"),
    "jmp 2b",
    "3:",
    "cmp dword ptr [{is_compat}], 0",
    "je 4f",
    // A descriptor that the host refuses is not used by any selector below.
    set_area!("0"),
    set_area!("16"),
    set_area!("32"),
    load_selector!("es", "0"),
    load_selector!("ds", "4"),
    load_selector!("fs", "8"),
    load_selector!("gs", "12"),
    "4:",
    "mov rdx, [{cpu_set}]",
    "test rdx, rdx",
    "jz 6f",
    "xor edi, edi",
    "mov esi, {set_length}",
    "mov eax, {set_affinity}",
    "syscall",
    "6:",
    "mov rax, [{bases_now}]",
    "wrfsbase rax",
    "mov rax, [{bases_now} + 8]",
    "wrgsbase rax",
    "mov rsp, [{context_now}]",
    set_unrestored_flags!(),
    "mov eax, {sigreturn}",
    "syscall",
    "ud2",
    // Entry of [`confine_and_stop`], with its arguments in RDX and R8.
    ".globl parador_wedge_user_confine",
    "parador_wedge_user_confine:",
    "mov edi, 1",
    "xor esi, esi",
    "mov eax, {seccomp}",
    "syscall",
    "test eax, eax",
    "jnz 5f",
    "mov byte ptr [r8], 1",
    "mov dword ptr [{may_map}], 1",
    futex_wake!("{may_map}"),
    // Raise a signal.
    "ud2",
    "5:",
    "mov edi, {host}",
    "mov eax, {exit}",
    "syscall",
    "ud2",
    ".globl parador_wedge_user_end",
    "parador_wedge_user_end:",
    number = const RESPONSE + offset_of!(Response, number) as u64,
    context = const RESPONSE + offset_of!(Response, context) as u64,
    bases = const RESPONSE + offset_of!(Response, bases) as u64,
    selectors = const RESPONSE + offset_of!(Response, selectors) as u64,
    stopped = const RESPONSE + offset_of!(Response, turn) as u64,
    turn = const REQUEST + offset_of!(Request, turn) as u64,
    is_compat = const REQUEST + offset_of!(Request, is_compat) as u64,
    areas = const REQUEST + offset_of!(Request, areas) as u64,
    selectors_now = const REQUEST + offset_of!(Request, selectors) as u64,
    bases_now = const REQUEST + offset_of!(Request, bases) as u64,
    context_now = const REQUEST + offset_of!(Request, context) as u64,
    set_thread_area = const compat::SET_THREAD_AREA,
    cpu_set = const REQUEST + offset_of!(Request, cpu_set) as u64,
    set_length = const layout::CPU_SET_LENGTH,
    set_affinity = const linux::__NR_sched_setaffinity,
    wake = const linux::FUTEX_WAKE,
    wait = const linux::FUTEX_WAIT,
    futex = const linux::__NR_futex,
    flags = const offset_of!(Context, rflags),
    unrestored = const UNRESTORED,
    sigreturn = const linux::__NR_rt_sigreturn,
    seccomp = const linux::__NR_seccomp,
    may_map = const MAY_MAP,
    exit = const linux::__NR_exit_group,
    host = const HOST as u32,
);

/// Installs a seccomp filter (`struct sock_fprog`), sets `mark`, and stops for the first time. The
/// system call is inside of the stop handler, because calls from elsewhere are dispatched as the
/// guest's.
///
/// # Safety
/// The filter must be as long as it says.
#[unsafe(naked)]
unsafe extern "sysv64" fn confine_and_stop(program: *const u64, mark: *mut bool) -> ! {
    naked_asm!("mov rdx, rdi", "mov r8, rsi", "jmp parador_wedge_user_confine")
}

unsafe extern "C" {
    static parador_wedge_user_stop: u8;
    static parador_wedge_user_end: u8;
}

/// Returns the address of the stop handler.
fn stop_handler() -> u64 {
    &raw const parador_wedge_user_stop as u64
}

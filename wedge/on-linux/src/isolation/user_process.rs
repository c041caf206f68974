//! User/kernel isolation without protection keys: a second process for each address space of the
//! guest, which maps the pages of guest user mode and nothing else
//! (`docs/design/0018-user-processes.md`).
//!
//! The *kernel process* runs the guest kernel and the wedge. To run user mode it resumes the *user
//! process* and waits until that has stopped. Both share the [`Mailbox`]: the kernel process writes
//! the [`Request`], which the user process can only read.
//!
//! The user process has two threads. The *user thread* runs user mode and, after each signal, the
//! stop handler below, which it leaves only by `rt_sigreturn` with the context that the kernel
//! process has written. Its seccomp filter permits only futex waits and wakes, and returns from
//! signals. The *mapper thread* performs the mapping system calls. Its code accesses no memory
//! except the request, so user mode, which can write all other memory of the process, cannot
//! control it.
//!
//! Invariant: the kernel process continues only when the host kernel reports that the user thread
//! waits for the next request ([`is_stopped`]). Whatever user mode has done to its process, it does
//! not run then, and resumes in the stop handler. Changes of its mappings are therefore queued
//! until it runs again.
//!
//! Invariant: the user thread is resumed only when the host kernel reports that the mapper waits
//! for the next batch, with all calls of this batch completed ([`await_mapper`]). No word of the
//! [`Response`] is evidence of either.

use core::arch::naked_asm;
use core::convert::Infallible;
use core::mem::offset_of;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use core::sync::atomic::{AtomicU32, AtomicU64};

use linux_raw_sys::general as linux;
use linux_raw_sys::prctl;
use proto::hosted::{Filters, layout, option};
use wedge_core::VirtualCpu;
use wedge_core::cpu::rflags;
use wedge_x86::Cause;

use crate::linux::sys::{self, Backing, Errno};
use crate::mmu::memory::PAGE;
use crate::processes::{self, KICK};
use crate::report::{self, HOST};
use crate::signal::{self, Context};
use crate::state::config::{self, has};
use crate::state::current::CurrentVcpu;
use crate::state::setup::{self, Kind};
use crate::state::shared::{PRIVATE_LENGTH, ProcessState, events, export_words, process, vcpu};
use crate::{clock, compat, cpu_affinity, guest, steal_time, xstate};

/// Capacity of the queue of mapping changes.
const MAX_COMMANDS: usize = 256;
/// Length of the user thread's signal stack in bytes. The thread always has one.
const STACK: usize = 0x8000;
/// Flag of sigaltstack(2): the host disables the signal stack while a handler runs.
const SS_AUTODISARM: u64 = 1 << 31;
/// Largest number of waits of [`WAIT_TIME`] each, after which the user process counts as
/// unresponsive. Elapsed time is no criterion, because the VM may be paused.
const MAX_WAITS: u32 = 10_000;
/// Duration of one wait in nanoseconds.
const WAIT_TIME: u64 = 1_000_000;
/// Consecutive user processes with a failed mapping call after which the VM ends.
const MAX_FAILURES: u32 = 16;
/// Upper bound of the time between the user thread's notification and its futex wait in
/// microseconds, unless its CPU is busy.
const SETTLE_TIME: u64 = 200;

/// Data for the user process. User mode can read it; it contains no secrets.
#[repr(C, align(4096))]
pub struct Request {
    /// Incremented to resume the user thread.
    turn: AtomicU32,
    /// Futex on which the user thread waits once the kernel process has seen it wait. Constant.
    parked: AtomicU32,
    /// Number of the current batch, incremented to start the mapper, which waits on it after each
    /// batch.
    batch: AtomicU32,
    /// Futex queue to which the kernel process moves a waiting mapper. Constant.
    batch_parked: AtomicU32,
    /// Futex on which the mapper waits forever after a failed call. Constant.
    failed: AtomicU32,
    /// Futex queue to which the kernel process moves a mapper that waits on `failed`. Constant.
    failed_parked: AtomicU32,
    /// Number of commands in the batch.
    used: AtomicU32,
    /// Not 0: 32-bit user code; load the descriptors, then the segment registers.
    is_compat: AtomicU32,
    /// Selectors of `ES`, `DS`, `FS`, `GS`.
    selectors: [AtomicU32; 4],
    /// Arguments of `set_thread_area`.
    areas: [[AtomicU32; 4]; 3],
    /// CPU set to which the user thread binds itself first, at an address in [`layout::CPU_SETS`];
    /// 0: unchanged.
    cpu_set: AtomicU64,
    /// Signal context from which user mode resumes.
    context: AtomicU64,
    /// Bases of `FS` and `GS`.
    bases: [AtomicU64; 2],
    /// System call number and arguments of each command.
    commands: [[AtomicU64; 7]; MAX_COMMANDS],
}

/// Data from the user process. User mode can overwrite all of it.
#[repr(C, align(4096))]
pub struct Response {
    /// [`Request::turn`] at the last stop. A hint: see [`is_stopped`].
    turn: AtomicU32,
    /// [`Request::batch`] of the last completed batch. A hint for when to query the host kernel:
    /// see [`await_mapper`].
    batch: AtomicU32,
    /// Signal number.
    number: AtomicU32,
    /// Selectors of `ES`, `DS`, `FS`, `GS`.
    selectors: [AtomicU32; 4],
    /// Bases of `FS` and `GS`.
    bases: [AtomicU64; 2],
    /// Signal context, read once, before user mode runs.
    context: AtomicU64,
    /// Process id, read once, before user mode runs.
    process: AtomicU64,
    /// Signal stack, [`STACK`] bytes.
    stack: [u8; STACK],
}

/// Memory shared by the two processes of a slot.
#[repr(C)]
pub struct Mailbox {
    request: Request,
    response: Response,
}

const _: () = assert!(size_of::<Mailbox>() as u64 <= layout::MAILBOX_LENGTH);
const REQUEST: u64 = layout::MAILBOX;
const RESPONSE: u64 = layout::MAILBOX + offset_of!(Mailbox, response) as u64;

export_words!("mailbox_request", REQUEST, Request; batch used commands);
export_words!("mailbox_response", RESPONSE, Response; batch);

/// State of the user process, as the kernel process knows it.
#[derive(Clone, Copy, Debug)]
pub struct UserProcess {
    /// Process id; 0: no process yet.
    process: u32,
    /// Address of the signal contexts. It is constant, because signals do not nest.
    context: u64,
    /// The first signal context; it contains the address of the extended state.
    template: [u64; signal::CONTEXT as usize / 8],
    /// Layout of the extended state in the signal frame, as the host kernel reports it (`struct
    /// _fpx_sw_bytes`).
    layout: [u64; 6],
    /// End of the extended state.
    end: u32,
    /// CPU on which it runs, plus 1; 0: unknown.
    cpu: u32,
    /// User mode's selectors in `ES`, `DS`, `FS`, `GS`.
    selectors: [u16; 4],
    /// Consecutive processes that were replaced because a batch had failed.
    failures: u32,
}

/// Returns whether user mode runs in processes of its own.
pub fn is_enabled() -> bool {
    has(option::USER_PROCESS)
}

fn mailbox() -> &'static Mailbox {
    // SAFETY: each guest process maps it first if this mode is enabled. Everything in it is atomic
    // except for the stack, of which only the address is used.
    unsafe { &*(layout::MAILBOX as *const Mailbox) }
}

/// Maps a slot's mailbox in the kernel process.
pub fn map_mailbox(vcpu: usize, slot: usize) -> Result<(), Errno> {
    let rights = linux::PROT_READ | linux::PROT_WRITE;
    let mailbox = Backing::Shared(layout::SHARED_FD, layout::mailbox(vcpu, slot));
    // SAFETY: nothing is mapped there.
    unsafe { sys::map(layout::MAILBOX, layout::MAILBOX_LENGTH, rights, mailbox) }
}

/// Creates a slot's user process; returns its id. For the device process.
pub fn create(vcpu: usize, slot: usize, filters: &Filters) -> Result<u32, Errno> {
    setup::words().confined(Kind::User, vcpu, slot).store(false, SeqCst);
    let child = processes::fork()?;
    if child != 0 {
        return Ok(child);
    }
    match become_user_process(vcpu, slot, filters) {
        Ok(never) => match never {},
        Err(_) => sys::exit(HOST),
    }
}

/// Sets up a new user process with two threads, each with its own part of the mailbox. It receives
/// no signal before its seccomp filter is installed, except for the one that it raises then: the
/// handler continues with the context from the kernel process.
fn become_user_process(vcpu: usize, slot: usize, filters: &Filters) -> Result<Infallible, Errno> {
    sys::set_signal_mask(processes::ALL_SIGNALS & !(1 << (linux::SIGILL - 1)))?;
    processes::die_with_parent(processes::device())?;
    // A copy: the configuration will be unmapped.
    let filters = *filters;
    // SAFETY: no memory is accessed.
    let own = unsafe { sys::call(linux::__NR_getpid, [0; 6]) }?;
    let rights = linux::PROT_READ | linux::PROT_WRITE;
    let request = RESPONSE - REQUEST;
    let at = layout::mailbox(vcpu, slot);
    setup::finish(Kind::User, vcpu, slot)?;
    // SAFETY: the child does not use the memory that it inherited from the device process any more.
    // The unmapped ranges contain neither the wedge's code nor the stack of this function.
    unsafe {
        let shared = |offset| Backing::Shared(layout::SHARED_FD, offset);
        sys::map(REQUEST, request, linux::PROT_READ, shared(at))?;
        sys::map(RESPONSE, layout::MAILBOX_LENGTH - request, rights, shared(at + request))?;
        sys::map(layout::PRIVATE, PRIVATE_LENGTH, rights, Backing::Own)?;
        for (from, to) in [
            (PAGE, layout::WEDGE),
            (layout::SHARED, layout::PRIVATE),
            (layout::PRIVATE + PRIVATE_LENGTH, layout::MAILBOX),
            (layout::MAILBOX + layout::MAILBOX_LENGTH, layout::HOST),
            (layout::CONFIG, layout::CPU_SETS),
        ] {
            sys::unmap(from, to - from)?;
        }
    }
    // SAFETY: the previous process has ended, and this one does not use the response yet. The data
    // of the previous one belongs to another address space.
    unsafe { core::ptr::write_bytes(RESPONSE as *mut u8, 0, size_of::<Response>()) };
    mailbox().response.process.store(own, Relaxed);
    sys::close(layout::INPUT_FD, layout::MEMORY_FD - 1)?;
    sys::close(layout::MEMORY_FD + 1, u32::MAX)?;
    start_mapper(&filters)?;
    sys::close(layout::MEMORY_FD, layout::MEMORY_FD)?;
    // With `SS_AUTODISARM` each signal frame is at the top, even if user mode's stack pointer is in
    // the signal stack: the kernel process expects it there, and it always fits.
    let stack = [RESPONSE + offset_of!(Response, stack) as u64, SS_AUTODISARM, STACK as u64];
    // SAFETY: the stack has no other use.
    unsafe { sys::call(linux::__NR_sigaltstack, [stack.as_ptr() as u64, 0, 0, 0, 0, 0]) }?;
    // Signals do not nest.
    let flags = linux::SA_SIGINFO | linux::SA_ONSTACK | linux::SA_RESTORER;
    let handler = stop_handler as *const () as u64;
    let action = [handler, flags.into(), handler, u64::MAX];
    for number in signal::SYNCHRONOUS.into_iter().chain([KICK]) {
        let arguments = [number.into(), action.as_ptr() as u64, 0, 8, 0, 0];
        // SAFETY: the handler accesses the mailbox only.
        unsafe { sys::call(linux::__NR_rt_sigaction, arguments) }?;
    }
    let start = stop_handler as *const () as u64;
    let on = [
        prctl::PR_SET_SYSCALL_USER_DISPATCH.into(),
        prctl::PR_SYS_DISPATCH_ON.into(),
        start,
        gate_end() - start,
        // No selector byte that user mode could write.
        0,
        0,
    ];
    // SAFETY: no memory is accessed.
    unsafe { sys::call(linux::__NR_prctl, on) }?;
    let [length, instructions @ ..] = &filters.programs[Filters::USER_THREAD];
    // `struct sock_fprog`.
    let program = [(*length).min(instructions.len() as u64), instructions.as_ptr() as u64];
    // SAFETY: the filter is only read, and has this length.
    unsafe { confine_and_stop(program.as_ptr()) }
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

/// Handshake of the two threads of a user process, in memory that is unmapped before either handles
/// a request.
#[repr(C)]
pub struct Mapper {
    /// Not 0: the mapper has installed its filter, and does not read the user thread's memory any
    /// more.
    is_confined: AtomicU32,
    /// Not 0: the user thread has installed its filter, so the mapper can no longer map code that
    /// would run without one.
    may_map: AtomicU32,
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
    // The user thread handles the signals.
    let masked = sys::set_signal_mask(processes::ALL_SIGNALS);
    if masked.is_err() || processes::confine(filters, Filters::GUEST).is_err() {
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
/// memory that both have used, and enters the mapper loop.
///
/// # Safety
/// The caller's stack is abandoned.
#[unsafe(naked)]
unsafe extern "sysv64" fn mapper_main() -> ! {
    naked_asm!(
        "mov dword ptr [{confined}], 1",
        "mov edi, {confined}",
        "mov esi, {wake}",
        "mov edx, 1",
        "mov eax, {futex}",
        "syscall",
        "2:",
        "cmp dword ptr [{may_map}], 0",
        "jne 3f",
        "mov edi, {may_map}",
        "mov esi, {wait}",
        "xor edx, edx",
        "xor r10d, r10d",
        "mov eax, {futex}",
        "syscall",
        "jmp 2b",
        "3:",
        "mov edi, {private}",
        "mov esi, {length}",
        "mov eax, {munmap}",
        "syscall",
        "jmp {map}",
        confined = const CONFINED,
        may_map = const MAY_MAP,
        private = const layout::PRIVATE,
        length = const PRIVATE_LENGTH,
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
        "mov [{done}], ebx",
        "mov edi, {done}",
        "mov esi, {wake}",
        "mov edx, 1",
        "mov eax, {futex}",
        "syscall",
        "3:",
        "mov edx, [{batch}]",
        "cmp edx, ebx",
        "je 4f",
        "test edx, edx",
        "jnz 5f",
        "4:",
        "mov edi, {batch}",
        "mov esi, {wait}",
        "xor r10d, r10d",
        "mov eax, {futex}",
        "syscall",
        "jmp 3b",
        "5:",
        "mov ebx, edx",
        "mov r12d, [{used}]",
        "mov r13d, {commands}",
        "6:",
        "test r12d, r12d",
        "jz 2b",
        "mov rax, [r13]",
        "mov rdi, [r13 + 8]",
        "mov rsi, [r13 + 16]",
        "mov rdx, [r13 + 24]",
        "mov r10, [r13 + 32]",
        "mov r8, [r13 + 40]",
        "mov r9, [r13 + 48]",
        "syscall",
        "cmp rax, -4096",
        "jbe 7f",
        // mprotect(2) fails on a range with holes, or if a mapping cannot be split: unmap it, to be
        // faulted in again.
        "cmp dword ptr [r13], {mprotect}",
        "jne 12f",
        "mov eax, {munmap}",
        "syscall",
        "cmp rax, -4096",
        "jbe 7f",
        "12:",
        // The thread's CPU is irrelevant for isolation.
        "cmp dword ptr [r13], {set_affinity}",
        "jne 8f",
        "7:",
        "add r13, 56",
        "dec r12d",
        "jmp 6b",
        "8:",
        "mov [{done}], ebx",
        "mov edi, {done}",
        "mov esi, {wake}",
        "mov edx, 1",
        "mov eax, {futex}",
        "syscall",
        "9:",
        "mov edi, {failed}",
        "mov esi, {wait}",
        "xor edx, edx",
        "xor r10d, r10d",
        "mov eax, {futex}",
        "syscall",
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

/// Handles all signals of the user thread. User mode can jump to any instruction here, with
/// arbitrary registers, and make any system call that its filter permits: futex wait, futex wake,
/// and return from a signal. It resumes with the context in the request, or with one that it has
/// forged, in its own process and with its own rights.
///
/// # Safety
/// Never called.
#[unsafe(naked)]
unsafe extern "sysv64" fn stop_handler() -> ! {
    naked_asm!(
        "mov [{number}], edi",
        "mov [{context}], rdx",
        "rdfsbase rax",
        "mov [{bases}], rax",
        "rdgsbase rax",
        "mov [{bases} + 8], rax",
        "mov eax, es",
        "mov [{selectors}], eax",
        "mov eax, ds",
        "mov [{selectors} + 4], eax",
        "mov eax, fs",
        "mov [{selectors} + 8], eax",
        "mov eax, gs",
        "mov [{selectors} + 12], eax",
        "mov r12d, [{turn}]",
        "mov [{stopped}], r12d",
        "mov edi, {stopped}",
        "mov esi, {wake}",
        "mov edx, 1",
        "mov eax, {futex}",
        "syscall",
        "2:",
        "mov edx, [{turn}]",
        "cmp edx, r12d",
        "jne 3f",
        "mov edi, {turn}",
        "mov esi, {wait}",
        "xor r10d, r10d",
        "mov eax, {futex}",
        "syscall",
        "jmp 2b",
        "3:",
        "cmp dword ptr [{is_compat}], 0",
        "je 4f",
        // A descriptor that the host refuses is not used by any selector below.
        "mov ebx, {areas}",
        "mov eax, {set_thread_area}",
        "int 0x80",
        "mov ebx, {areas} + 16",
        "mov eax, {set_thread_area}",
        "int 0x80",
        "mov ebx, {areas} + 32",
        "mov eax, {set_thread_area}",
        "int 0x80",
        "mov eax, [{selectors_now}]",
        "mov es, eax",
        "mov eax, [{selectors_now} + 4]",
        "mov ds, eax",
        "mov eax, [{selectors_now} + 8]",
        "mov fs, eax",
        "mov eax, [{selectors_now} + 12]",
        "mov gs, eax",
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
        "mov eax, {sigreturn}",
        "syscall",
        "ud2",
        // Entry of [`confine_and_stop`], with its argument in RDX.
        ".globl parador_wedge_user_confine",
        "parador_wedge_user_confine:",
        "mov edi, 1",
        "xor esi, esi",
        "mov eax, {seccomp}",
        "syscall",
        "test eax, eax",
        "jnz 5f",
        "mov dword ptr [{may_map}], 1",
        "mov edi, {may_map}",
        "mov esi, {wake}",
        "mov edx, 1",
        "mov eax, {futex}",
        "syscall",
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
        sigreturn = const linux::__NR_rt_sigreturn,
        seccomp = const linux::__NR_seccomp,
        may_map = const MAY_MAP,
        exit = const linux::__NR_exit_group,
        host = const HOST as u32,
    )
}

/// Installs a seccomp filter (`struct sock_fprog`) and stops for the first time. The system call is
/// inside of the stop handler, because calls from elsewhere are dispatched as the guest's.
///
/// # Safety
/// The filter must be as long as it says.
#[unsafe(naked)]
unsafe extern "sysv64" fn confine_and_stop(program: *const u64) -> ! {
    naked_asm!("mov rdx, rdi", "jmp parador_wedge_user_confine")
}

fn gate_end() -> u64 {
    unsafe extern "C" {
        static parador_wedge_user_end: u8;
    }
    &raw const parador_wedge_user_end as u64
}

/// Returns the instructions in which a signal prevents the futex wait: start, and the address at
/// which the handler resumes.
pub fn wait_window() -> (u64, u64) {
    unsafe extern "C" {
        static parador_wedge_user_window: u8;
        static parador_wedge_user_window_end: u8;
    }
    (&raw const parador_wedge_user_window as u64, &raw const parador_wedge_user_window_end as u64)
}

/// Waits until `word` differs from `seen`, unless events are pending. A signal, whose handler posts
/// an event, ends the wait.
///
/// # Safety
/// Both words must be mapped.
#[unsafe(naked)]
unsafe extern "sysv64" fn wait_unless(events: *const u32, word: *const u32, seen: u32) {
    naked_asm!(
        "mov r8, rdi",
        "mov rdi, rsi",
        "mov esi, {wait}",
        "xor r10d, r10d",
        "mov eax, {futex}",
        ".globl parador_wedge_user_window",
        "parador_wedge_user_window:",
        "cmp dword ptr [r8], 0",
        "jne 2f",
        "syscall",
        ".globl parador_wedge_user_window_end",
        "parador_wedge_user_window_end:",
        "2:",
        "ret",
        wait = const linux::FUTEX_WAIT,
        futex = const linux::__NR_futex,
    )
}

/// Returns whether a thread of the user process waits on `word` while that has the value `value`,
/// according to the host kernel (`FUTEX_CMP_REQUEUE`). If so, the thread waits on `parked` from
/// then on, without having been woken.
fn is_waiting(word: &AtomicU32, parked: &AtomicU32, value: u32) -> bool {
    let (none, one) = (0, 1);
    let arguments = [
        word.as_ptr() as u64,
        linux::FUTEX_CMP_REQUEUE.into(),
        none,
        one,
        parked.as_ptr() as u64,
        value.into(),
    ];
    // SAFETY: the call moves a thread from one futex queue to the other.
    let moved = unsafe { sys::call(linux::__NR_futex, arguments) };
    moved == Ok(1)
}

/// Returns whether the user thread waits for the next request, according to the host kernel. If so,
/// it waits on [`Request::parked`] from then on, without having been woken.
fn is_stopped() -> bool {
    let Request { turn, parked, .. } = &mailbox().request;
    is_waiting(turn, parked, turn.load(SeqCst))
}

/// Resumes the user thread.
fn resume_thread() {
    let Request { turn, parked, .. } = &mailbox().request;
    turn.fetch_add(1, SeqCst);
    let arguments = [parked.as_ptr() as u64, linux::FUTEX_WAKE.into(), 1, 0, 0, 0];
    // SAFETY: no memory is changed.
    if unsafe { sys::call(linux::__NR_futex, arguments) } != Ok(1) {
        // A pause of the VM has restarted its wait on `turn`.
        sys::wake(turn);
    }
}

fn peer() -> &'static mut UserProcess {
    // SAFETY: it is in the process's own memory, used by its only thread outside of signal
    // handlers. Each use ends before the next begins.
    unsafe { &mut *process().peer.at() }
}

/// Requests a new user process, waits for its first stop, before user mode runs, and records the
/// layout of the host's signal frames.
fn connect() {
    /// Offset of `struct _fpx_sw_bytes` in the extended state.
    const LAYOUT: u64 = 464;
    let request = &mailbox().request;
    // The mapper waits for another value; neither 0 nor 1 is the number of a batch.
    request.batch.store(0, SeqCst);
    request.used.store(0, Relaxed);
    let wanted = &vcpu().user_wanted;
    wanted.store(1 + process().slot.load(Relaxed), SeqCst);
    processes::notify();
    let mut times = 0;
    while let number @ 1.. = wanted.load(SeqCst) {
        wait_limited(wanted, number, &mut times);
    }
    let response = &mailbox().response;
    while !is_stopped() {
        if response.context.load(Relaxed) == 0 {
            wait_limited(&response.turn, response.turn.load(SeqCst), &mut times);
        } else {
            // Between its notification and its futex wait.
            sys::yield_now();
        }
    }
    // The mapper unmaps the memory of the handshake before user mode runs.
    let until = guest::tsc() + clock::ticks(SETTLE_TIME);
    while !is_waiting(&request.batch, &request.batch_parked, 0) {
        if guest::tsc() < until {
            sys::yield_now();
        } else {
            wait_limited(&response.turn, response.turn.load(SeqCst), &mut times);
        }
    }
    let peer = peer();
    peer.context = response.context.load(Relaxed);
    let stack = RESPONSE + offset_of!(Response, stack) as u64;
    let stack = stack..stack + STACK as u64;
    // SAFETY: a context written by the host kernel is complete.
    let is_whole = stack.contains(&peer.context)
        && unsafe {
            peer.template = (peer.context as *const [u64; 38]).read_volatile();
            // All signals were blocked until now.
            peer.template[MASK] = 0;
            let area = peer.template[EXTENDED];
            stack.contains(&area) && {
                peer.layout = ((area + LAYOUT) as *const [u64; 6]).read_volatile();
                peer.end = peer.layout[2] as u32;
                stack.contains(&(area + u64::from(peer.end)))
            }
        };
    if !is_whole || peer.end as usize > crate::state::shared::EXTENDED_STATE {
        report::fatal(format_args!("unknown format of the host's signal frames"));
    }
    peer.process = response.process.load(Relaxed) as u32;
    peer.cpu = 0;
    request.batch.store(1, SeqCst);
}

/// Waits until a word differs from `seen`, for [`WAIT_TIME`] at most; ends the VM after
/// [`MAX_WAITS`] waits.
fn wait_limited(word: &AtomicU32, seen: u32, times: &mut u32) {
    *times += 1;
    if *times > MAX_WAITS {
        report::fatal(format_args!("the user process does not stop"));
    }
    sys::wait(word, seen, Some(WAIT_TIME));
}

/// Index of the address of the extended state in a signal context.
const EXTENDED: usize = 28;
/// Index of the signal mask in a signal context.
const MASK: usize = signal::CONTEXT as usize / 8 - 1;

/// Queues a mapping change, which the mapper executes before user mode runs again.
fn push(command: [u64; 7]) {
    if peer().process == 0 {
        // The next process starts with nothing mapped.
        return;
    }
    let request = &mailbox().request;
    if request.used.load(Relaxed) as usize >= MAX_COMMANDS {
        commit();
    }
    let used = request.used.load(Relaxed);
    let Some(place) = request.commands.get(used as usize) else { return };
    for (to, word) in place.iter().zip(command) {
        to.store(word, Relaxed);
    }
    request.used.store(used + 1, Relaxed);
}

/// Lets the mapper execute the queued changes while user mode is stopped. Unless the host kernel
/// confirms that each call has succeeded, the process is abandoned: its mappings are unknown, so
/// user mode never runs in it again, and [`run_user`] replaces it.
fn commit() {
    let request = &mailbox().request;
    if request.used.load(Relaxed) == 0 {
        return;
    }
    // Neither 0 (no batch) nor 1 (ready).
    let batch = request.batch.load(Relaxed).checked_add(1).unwrap_or(2);
    request.batch.store(batch, SeqCst);
    // Wake both queues: a thread that waits on `batch` from here on has read its new value.
    sys::wake(&request.batch_parked);
    sys::wake(&request.batch);
    let is_done = await_mapper(batch);
    request.used.store(0, Relaxed);
    if !is_done {
        replace_process();
        process().unmapped.store(true, Relaxed);
    }
}

/// Waits until the mapper has finished this batch; returns whether each of its calls has succeeded.
///
/// The host kernel reports the futex queue in which the mapper waits. A thread enters the queue of
/// `batch` only while that has the value that the thread has read. The mapper does so only after
/// completing the batch of this number, and [`commit`] has woken all earlier waiters. The user
/// thread cannot be in that queue, because it waits for its turn.
fn await_mapper(batch: u32) -> bool {
    let Mailbox { request, response } = mailbox();
    let (mut times, mut settled_by) = (0, None);
    loop {
        // A hint only, because user mode can write it. A forged value makes the query too early or
        // slightly late.
        let seen = response.batch.load(SeqCst);
        if seen != batch || settled_by.is_some_and(|until| guest::tsc() >= until) {
            sys::wait(&response.batch, seen, Some(WAIT_TIME));
            times += 1;
        }
        if is_waiting(&request.batch, &request.batch_parked, batch) {
            return true;
        }
        if times > MAX_WAITS || is_waiting(&request.failed, &request.failed_parked, 0) {
            return false;
        }
        if seen == batch {
            settled_by.get_or_insert_with(|| guest::tsc() + clock::ticks(SETTLE_TIME));
            // The mapper may need this CPU.
            sys::yield_now();
        }
    }
}

/// Queues the mapping of guest memory in the user process.
pub fn map(linear: u64, size: u64, rights: u32, offset: u64) {
    let flags = linux::MAP_SHARED | linux::MAP_FIXED | linux::MAP_POPULATE;
    let arguments = [linear, size, rights.into(), flags.into(), layout::MEMORY_FD.into(), offset];
    call(linux::__NR_mmap, arguments);
}

/// Queues an unmapping in the user process.
pub fn unmap(start: u64, end: u64) {
    call(linux::__NR_munmap, [start, end - start, 0, 0, 0, 0]);
}

/// Queues a reduction of rights in the user process.
pub fn narrow(start: u64, end: u64, rights: u32) {
    call(linux::__NR_mprotect, [start, end - start, rights.into(), 0, 0, 0]);
}

fn call(number: u32, [a, b, c, d, e, f]: [u64; 6]) {
    if is_enabled() {
        push([number.into(), a, b, c, d, e, f]);
    }
}

/// Marks the user process for replacement: the next user code belongs to another address space.
pub fn replace_process() {
    peer().process = 0;
}

/// Runs user mode until it stops, by a signal or for events.
pub fn run_user(cpu: &mut CurrentVcpu) -> Cause {
    peer().selectors = compat::selectors();
    if peer().process == 0 {
        connect();
    }
    follow_cpu();
    commit();
    if process().unmapped.swap(false, Relaxed) {
        // The host is out of memory or mappings. The next process has nothing mapped, and all pages
        // can be faulted in again.
        peer().failures += 1;
        if peer().failures > MAX_FAILURES {
            report::fatal(format_args!(
                "cannot map or unmap user memory in {MAX_FAILURES} consecutive user processes"
            ));
        }
        crate::mmu::memory::drop_user_pages();
        return Cause::Events;
    }
    if events().load(SeqCst) != 0 {
        return Cause::Events;
    }
    write_context(cpu);
    cpu_affinity::on_hand_over();
    steal_time::on_idle();
    peer().failures = 0;
    resume_thread();
    wait();
    steal_time::on_resume();
    cpu_affinity::on_take_over();
    read_context(cpu);
    Cause::Signal
}

/// Moves the user process to this CPU: a switch to a thread on another CPU costs several times as
/// much.
fn follow_cpu() {
    let Some(cpu) = cpu_affinity::current_cpu() else { return };
    let (peer, request) = (peer(), &mailbox().request);
    let is_elsewhere = peer.cpu != cpu + 1;
    let set = if is_elsewhere { cpu_affinity::set_of_cpu(cpu) } else { 0 };
    request.cpu_set.store(set, Relaxed);
    if is_elsewhere {
        peer.cpu = cpu + 1;
        call(linux::__NR_sched_setaffinity, [0, layout::CPU_SET_LENGTH, set, 0, 0, 0]);
    }
}

/// Waits until user mode has stopped.
fn wait() {
    let Mailbox { request, response } = mailbox();
    let turn = request.turn.load(Relaxed);
    // Number of stop signals, and the time until which the user thread may be on its way to its
    // futex wait.
    let (mut times, mut settled_by) = (0, None);
    let mut is_stop_requested = false;
    loop {
        let seen = response.turn.load(SeqCst);
        if seen == turn && is_stopped() {
            if !is_stop_requested {
                return;
            }
            // User mode that has jumped to the stop handler may still receive the signal, which
            // writes to memory; after another wait it cannot.
            is_stop_requested = false;
            wait_until_stop_sent();
            sys::wake(&request.parked);
            settled_by = Some(guest::tsc() + clock::ticks(SETTLE_TIME));
            continue;
        }
        if seen == turn {
            let until = *settled_by.get_or_insert_with(|| guest::tsc() + clock::ticks(SETTLE_TIME));
            if guest::tsc() < until {
                // The user thread may need this CPU.
                sys::yield_now();
                continue;
            }
        }
        if seen != turn && !is_stop_requested && events().load(SeqCst) == 0 {
            // SAFETY: both words are in shared memory.
            unsafe { wait_unless(events().as_ptr(), response.turn.as_ptr(), seen) }
            continue;
        }
        // Events are pending, or the notification was forged.
        is_stop_requested = true;
        stop();
        wait_limited(&response.turn, seen, &mut times);
    }
}

/// Waits until the device process has sent the stop signal, if one was requested.
fn wait_until_stop_sent() {
    let vcpu = vcpu();
    let asked = vcpu.stop_requests.load(SeqCst);
    let mut times = 0;
    loop {
        let told = vcpu.stops_sent.load(SeqCst);
        if told == asked {
            break;
        }
        wait_limited(&vcpu.stops_sent, told, &mut times);
    }
}

/// Stops user mode.
fn stop() {
    if config::kicks() {
        sys::kill(peer().process, KICK);
    } else {
        let vcpu = vcpu();
        if vcpu.stops_sent.load(SeqCst) == vcpu.stop_requests.load(SeqCst) {
            vcpu.stop_requests.fetch_add(1, SeqCst);
            processes::notify();
        }
    }
}

/// Writes the vCPU's registers to the user thread's signal context. All of the context is written,
/// because user mode may have changed it.
fn write_context(cpu: &CurrentVcpu) {
    let peer = peer();
    let request = &mailbox().request;
    let mut words = peer.template;
    for (word, register) in words[5..].iter_mut().zip(signal::ORDER) {
        *word = cpu.frame.gpr[register];
    }
    words[21] = cpu.frame.rip;
    words[22] = cpu.frame.rflags;
    words[23] = words[23] & !0xffff | cpu.code_selector();
    let area = words[EXTENDED];
    let features = peer.layout[1] & !xstate::PKRU;
    // SAFETY: `connect` has validated the addresses; the memory has no other use, and the thread
    // waits.
    unsafe {
        (peer.context as *mut [u64; 38]).write_volatile(words);
        ((area + 464) as *mut [u64; 6]).write_volatile(peer.layout);
        ((area + u64::from(peer.end)) as *mut u32).write_unaligned(MAGIC_2);
        xstate::save(area, features);
    }
    request.context.store(peer.context, Relaxed);
    let (fs, gs) = compat::bases();
    request.bases[0].store(fs, Relaxed);
    request.bases[1].store(gs, Relaxed);
    let is_compat = has(option::COMPAT) && compat::has_selectors(cpu);
    if is_compat {
        for (to, area) in request.areas.iter().zip(compat::areas()) {
            to.iter().zip(area).for_each(|(to, word)| to.store(word, Relaxed));
        }
        for (to, selector) in request.selectors.iter().zip(peer.selectors) {
            to.store(selector.into(), Relaxed);
        }
    }
    request.is_compat.store(is_compat.into(), Relaxed);
}

/// `FP_XSTATE_MAGIC2`.
const MAGIC_2: u32 = 0x4650_5845;

/// Reads the vCPU's registers from the user thread's signal context, restricted to values that user
/// mode can have.
fn read_context(cpu: &mut VirtualCpu) {
    let (peer, response) = (peer(), &mailbox().response);
    let vcpu = vcpu();
    let at = peer.context as *const Context;
    // SAFETY: `connect` has validated the address; nothing writes this memory while the thread
    // waits.
    let context = unsafe { at.read_volatile() };
    for (value, place) in context.registers.iter().zip(signal::ORDER) {
        cpu.frame.gpr[place] = *value;
    }
    cpu.frame.rip = context.rip;
    cpu.frame.rflags = context.rflags & u64::from(wedge_x86::USER_FLAGS) | rflags::IF | 2;
    cpu.sync_code_segment(context.is_64_bit());
    let mut signal = signal::sanitize(response.number.load(Relaxed), &context);
    if signal.number == linux::SIGSYS {
        // SAFETY: as above.
        signal.vector = unsafe { signal::call_vector(at) };
    }
    vcpu.signal.set(signal);
    peer.selectors =
        core::array::from_fn(|index| match response.selectors[index].load(Relaxed) as u16 {
            none @ 0..4 => none,
            selector => selector | 3,
        });
    let area = vcpu.xsave.0.at();
    // SAFETY: as above. The copy has this length, and is used otherwise only during a switch of the
    // process.
    unsafe {
        let from = peer.template[EXTENDED] as *const u8;
        core::ptr::copy_nonoverlapping(from, area.cast(), peer.end as usize);
    }
    xstate::restore(area as u64, crate::state::shared::EXTENDED_STATE as u64);
    let base = |index: usize| {
        let base = response.bases[index].load(Relaxed);
        // User mode has no addresses above.
        if base < layout::TASK_SIZE { base } else { 0 }
    };
    compat::set_bases(base(0), base(1));
}

/// Returns `ES`, `DS`, `FS`, `GS` of stopped user mode.
pub fn selectors() -> [u16; 4] {
    peer().selectors
}

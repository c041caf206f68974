//! Programs apart from their kernel: without protection keys, a second process for each address space of the guest, which has mapped what its
//! programs may use and nothing else (`docs/design/0018-programs-apart.md`).
//!
//! The first process, where the guest's kernel and the wedge are, is the same as without all this. When it would go to a program it lets the
//! *program process* go on instead, and waits until that has stopped. They share the [`Mailbox`]: what the first one writes ([`Request`]) the other one
//! can only read.
//!
//! The program process has two threads. One runs programs, and after each signal the code here ("gate"), from which no way leads back but
//! `rt_sigreturn` with what the first process has written. The other one maps, since the filter of the first thread lets it only wait, wake
//! and return from signals; its code uses no memory but the request, so a program that can write everything else in the process cannot lead it astray.
//!
//! Invariant: the first process goes on only when the host's kernel says that the program's thread waits for the request ([`is_stopped`]).
//! Whatever a program has done to its process, it does not run then, and goes on in the gate. So changes of its mappings are collected until
//! it is to run again.
//!
//! Invariant: the program's thread goes on only when the host's kernel says that the mapper thread waits for the next batch, having
//! completed each call of this one ([`await_mapper`]). No word of [`Response`] is evidence of either.

use core::arch::naked_asm;
use core::convert::Infallible;
use core::mem::offset_of;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use core::sync::atomic::{AtomicU32, AtomicU64};

use linux_raw_sys::general as linux;
use linux_raw_sys::prctl;
use proto::wedge::{Filters, layout, option};
use wedge_core::cpu::rflags;
use wedge_x86::Cause;

use crate::config::{self, has};
use crate::memory::PAGE;
use crate::processes::{self, KICK};
use crate::report::{self, HOST};
use crate::setup::{self, Kind};
use crate::shared::{Mine, PRIVATE_LENGTH, cell, events, export_words, mine, vcpu};
use crate::signal::{self, Context};
use crate::sys::{self, Backing, Errno};
use crate::{clock, compat, cpu_affinity, guest, steal_time, xstate};

/// Changes of mappings that are collected.
const MAX_COMMANDS: usize = 256;
/// Bytes of the stack of the program's thread for signals, on which it always has one.
const STACK: usize = 0x8000;
/// How often it is waited at most, each time for [`WAIT_TIME`]: a program that does not stop until then does not want to. Time alone says nothing, since
/// the machine may be paused meanwhile.
const MAX_WAITS: u32 = 10_000;
/// Nanoseconds.
const WAIT_TIME: u64 = 1_000_000;
/// Processes in a row of which the host has refused to map or unmap something, before the machine ends.
const MAX_FAILURES: u32 = 16;
/// From saying that it has stopped to waiting, the program's thread takes less than that, in microseconds, unless others have its CPU.
const SETTLE_TIME: u64 = 200;

/// What the first process tells. Programs can read it: nothing here is a secret.
#[repr(C, align(4096))]
pub struct Request {
    /// Counts up when the program's thread is to go on.
    turn: AtomicU32,
    /// Where that waits when the first process has seen that it waits. Never changed.
    parked: AtomicU32,
    /// Counts up when the mapper has something to do. It waits here once it has completed that batch.
    batch: AtomicU32,
    /// Futex queue to which the first process moves the mapper when it finds it waiting. Never changed.
    batch_parked: AtomicU32,
    /// The mapper waits here for its end once a call has failed. Never changed.
    failed: AtomicU32,
    /// As `batch_parked`, for `failed`.
    failed_parked: AtomicU32,
    /// Commands of that batch.
    used: AtomicU32,
    /// Segment registers are to be loaded, and descriptors before: the program is one with 32-bit code.
    is_compat: AtomicU32,
    /// `ES`, `DS`, `FS`, `GS`.
    selectors: [AtomicU32; 4],
    /// Descriptions for `set_thread_area`.
    areas: [[AtomicU32; 4]; 3],
    /// The thread is to go to the CPUs of this set first, one at [`layout::CPU_SETS`]; 0: it stays where it is.
    cpu_set: AtomicU64,
    /// The signal's context, from which the program goes on.
    context: AtomicU64,
    /// Bases of `FS` and `GS`.
    bases: [AtomicU64; 2],
    /// Number of a system call and its arguments.
    commands: [[AtomicU64; 7]; MAX_COMMANDS],
}

/// What the program process tells. Programs can write anything there.
#[repr(C, align(4096))]
pub struct Response {
    /// [`Request::turn`] of the last stop. A hint: see [`is_stopped`].
    turn: AtomicU32,
    /// [`Request::batch`] that has ended. A hint of when to ask the host kernel: see [`await_mapper`].
    batch: AtomicU32,
    /// The signal.
    number: AtomicU32,
    /// `ES`, `DS`, `FS`, `GS`.
    selectors: [AtomicU32; 4],
    /// Bases of `FS` and `GS`.
    bases: [AtomicU64; 2],
    /// The signal's context, and the process's number: believed once, before any program.
    context: AtomicU64,
    /// See above.
    process: AtomicU64,
    /// See [`STACK`].
    stack: [u8; STACK],
}

/// What both processes of a slot share.
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

/// What the first process knows of the other one.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// Its number; 0: not known yet.
    process: u32,
    /// Where the contexts of its signals are: always the same address, since no signal interrupts another one.
    context: u64,
    /// The first context, and where it says that the extended state is.
    template: [u64; signal::CONTEXT as usize / 8],
    /// What the host's kernel has noted there of its layout (`struct _fpx_sw_bytes`), and behind it.
    layout: [u64; 6],
    /// See above.
    end: u32,
    /// The CPU that it is on, plus 1; 0: not known.
    cpu: u32,
    /// What the program has in `ES`, `DS`, `FS`, `GS`.
    selectors: [u16; 4],
    /// Processes replaced in a row because of a failed batch.
    failures: u32,
}

/// Whether programs have processes of their own.
pub fn is_enabled() -> bool {
    has(option::USER_PROCESS)
}

fn mailbox() -> &'static Mailbox {
    // SAFETY: each process of the guest has mapped it before anything else if there is one; all of it is atomic, but for the stack, which is
    // used by address only.
    unsafe { &*(layout::MAILBOX as *const Mailbox) }
}

/// Maps a slot's gate, for the first process.
pub fn map_mailbox(vcpu: usize, slot: usize) -> Result<(), Errno> {
    let rights = linux::PROT_READ | linux::PROT_WRITE;
    let mailbox = Backing::Shared(layout::SHARED_FD, layout::mailbox(vcpu, slot));
    // SAFETY: nothing is there.
    unsafe { sys::map(layout::MAILBOX, layout::MAILBOX_LENGTH, rights, mailbox) }
}

/// Makes a slot's program process; gives its number. For the device process.
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

/// Sets this new process up: two threads, in each its own part of the gate. It gets no signal until it has its filter, but for the one that
/// it causes itself then: the handler goes on with what the first process has written, which is the guest's.
fn become_user_process(vcpu: usize, slot: usize, filters: &Filters) -> Result<Infallible, Errno> {
    sys::set_signal_mask(processes::ALL_SIGNALS & !(1 << (linux::SIGILL - 1)))?;
    processes::die_with_parent(processes::device())?;
    // It lasts when the configuration is unmapped.
    let filters = *filters;
    // SAFETY: no memory is touched.
    let own = unsafe { sys::call(linux::__NR_getpid, [0; 6]) }?;
    let rights = linux::PROT_READ | linux::PROT_WRITE;
    let request = RESPONSE - REQUEST;
    let at = layout::mailbox(vcpu, slot);
    setup::finish(Kind::User, vcpu, slot)?;
    // SAFETY: what the child inherited was the device process's, and is not used here any longer; neither the wedge's own code nor the stack of
    // this function is in what is unmapped.
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
    // SAFETY: the process that was there has ended, and this one has not begun to use it. What programs have left is others'.
    unsafe { core::ptr::write_bytes(RESPONSE as *mut u8, 0, size_of::<Response>()) };
    mailbox().response.process.store(own, Relaxed);
    sys::close(layout::INPUT_FD, layout::MEMORY_FD - 1)?;
    sys::close(layout::MEMORY_FD + 1, u32::MAX)?;
    start_mapper(&filters)?;
    sys::close(layout::MEMORY_FD, layout::MEMORY_FD)?;
    let stack = [RESPONSE + offset_of!(Response, stack) as u64, 0, STACK as u64];
    // SAFETY: the stack is used for nothing else.
    unsafe { sys::call(linux::__NR_sigaltstack, [stack.as_ptr() as u64, 0, 0, 0, 0, 0]) }?;
    // No signal interrupts another one.
    let flags = linux::SA_SIGINFO | linux::SA_ONSTACK | linux::SA_RESTORER;
    let handler = stop_handler as *const () as u64;
    let action = [handler, flags.into(), handler, u64::MAX];
    for number in signal::SYNCHRONOUS.into_iter().chain([KICK]) {
        let arguments = [number.into(), action.as_ptr() as u64, 0, 8, 0, 0];
        // SAFETY: the handler uses the gate only.
        unsafe { sys::call(linux::__NR_rt_sigaction, arguments) }?;
    }
    let start = stop_handler as *const () as u64;
    let on = [
        prctl::PR_SET_SYSCALL_USER_DISPATCH.into(),
        prctl::PR_SYS_DISPATCH_ON.into(),
        start,
        gate_end() - start,
        // Nothing that a program could write says that they are not dispatched.
        0,
        0,
    ];
    // SAFETY: no memory is touched.
    unsafe { sys::call(linux::__NR_prctl, on) }?;
    let [length, instructions @ ..] = &filters.programs[Filters::USER_THREAD];
    // `struct sock_fprog`.
    let program = [(*length).min(instructions.len() as u64), instructions.as_ptr() as u64];
    // SAFETY: the program is read, and has this length.
    unsafe { confine_and_stop(program.as_ptr()) }
}

/// Starts the thread that maps, with the descriptor of guest memory; returns when it has its filter.
fn start_mapper(filters: &Filters) -> Result<(), Errno> {
    /// Of its stack, which it needs until it has taken its filter.
    const TOP: u64 = crate::shared::PRIVATE_STACK_TOP;
    let flags = linux::CLONE_VM | linux::CLONE_SIGHAND | linux::CLONE_THREAD;
    // SAFETY: the new thread has a stack of its own, and what it reads stays where it is until it says that it is ready.
    let thread = unsafe { clone(flags.into(), TOP, &raw const *filters) };
    if thread < 0 {
        return Err(Errno(-thread as i32));
    }
    let ready = &mine().mapper.is_confined;
    while ready.load(SeqCst) == 0 {
        sys::wait(ready, 0, None);
    }
    Ok(())
}

/// What the two threads of a program process tell each other before either obeys the guest, in memory that only they have.
#[repr(C)]
pub struct Mapper {
    /// The mapper has its filter, and reads the other thread's memory no longer.
    is_confined: AtomicU32,
    /// The other thread has its filter: what the mapper maps can no longer become code that runs without one.
    may_map: AtomicU32,
}

/// clone(2), by which the new thread goes to [`begin_mapper`].
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
    // SAFETY: the other thread waits until this one has read them.
    let filters = unsafe { &*filters };
    // Signals are the other thread's.
    let masked = sys::set_signal_mask(processes::ALL_SIGNALS);
    if masked.is_err() || processes::confine(filters, Filters::GUEST).is_err() {
        sys::exit(HOST);
    }
    // SAFETY: nothing of this stack is needed any longer.
    unsafe { mapper_main() }
}

const CONFINED: u64 =
    layout::PRIVATE + (offset_of!(Mine, mapper) + offset_of!(Mapper, is_confined)) as u64;
const MAY_MAP: u64 =
    layout::PRIVATE + (offset_of!(Mine, mapper) + offset_of!(Mapper, may_map)) as u64;

/// Says that the mapper has its filter, waits until the other thread has its own, unmaps what both have used, and carries batches out.
///
/// # Safety
/// The caller's stack is given up.
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

/// Carries the batches out, without a stack. After the last call of a batch it waits for `batch` to change; after a failed one it waits on
/// `failed` for ever. It waits on nothing else, and reads nothing but the request, so a program cannot make it wait on the wrong one.
///
/// # Safety
/// The caller's stack is given up.
#[unsafe(naked)]
unsafe extern "sysv64" fn mapper_loop() -> ! {
    naked_asm!(
        // The first batch is number 1: none, to say that it is ready.
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
        // Rights cannot be taken from a range with holes, or if a mapping had to be split: it goes, and is filled in again.
        "cmp dword ptr [r13], {mprotect}",
        "jne 12f",
        "mov eax, {munmap}",
        "syscall",
        "cmp rax, -4096",
        "jbe 7f",
        "12:",
        // Where this thread runs is no matter of protection.
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

/// The gate: handler of all signals of the program's thread. A program can jump to any instruction here, with any registers, and make any call
/// of the host that its filter allows: it waits, wakes, or returns from a signal. It goes on with what the request say, or with what it has written
/// itself, in its own process and with its own rights.
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
        // What the host does not take is a descriptor that no register has below.
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
        // [`confine_and_stop`]: its argument is in RDX.
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
        // A signal.
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

/// Takes this filter of system calls (`struct sock_fprog`), and stops for the first time. The call is one of the gate's: others are dispatched already.
///
/// # Safety
/// The filter is as long as it says.
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

/// Addresses between which a signal keeps the first process from waiting: the first of them, and where that goes on.
pub fn wait_window() -> (u64, u64) {
    unsafe extern "C" {
        static parador_wedge_user_window: u8;
        static parador_wedge_user_window_end: u8;
    }
    (&raw const parador_wedge_user_window as u64, &raw const parador_wedge_user_window_end as u64)
}

/// Waits until `word` is not `seen` any longer, unless there are events. A signal, which leaves some, ends it.
///
/// # Safety
/// Both words are mapped.
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

/// Whether a thread of the program process waits on `word` while that has the value `value`, as the host kernel says
/// (`FUTEX_CMP_REQUEUE`); the thread waits on `parked` then, without having been woken.
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
    // SAFETY: it moves a thread from one queue to the other.
    let moved = unsafe { sys::call(linux::__NR_futex, arguments) };
    moved == Ok(1)
}

/// Whether the program's thread waits for the request, by what the host's kernel says; it waits for [`Request::parked`] then, without having been
/// woken.
fn is_stopped() -> bool {
    let Request { turn, parked, .. } = &mailbox().request;
    is_waiting(turn, parked, turn.load(SeqCst))
}

/// Lets the program's thread go on.
fn resume_thread() {
    let Request { turn, parked, .. } = &mailbox().request;
    turn.fetch_add(1, SeqCst);
    let arguments = [parked.as_ptr() as u64, linux::FUTEX_WAKE.into(), 1, 0, 0, 0];
    // SAFETY: nothing is changed.
    if unsafe { sys::call(linux::__NR_futex, arguments) } != Ok(1) {
        // A pause of the machine has made it begin to wait anew.
        sys::wake(turn);
    }
}

fn peer() -> &'static mut Peer {
    // SAFETY: it is in the process's own memory, and only its one thread uses it, outside of signal handlers. Each use ends before the next begins.
    unsafe { &mut *mine().peer.at() }
}

/// Has a new process made for programs, waits for its first stop, before any program, and notes how the host's kernel lays out what it leaves.
fn connect() {
    /// Where `struct _fpx_sw_bytes` is in the extended state, and the size of that in it.
    const LAYOUT: u64 = 464;
    let request = &mailbox().request;
    // The mapper waits for another value, and takes neither this one nor 1 for the number of a batch.
    request.batch.store(0, SeqCst);
    request.used.store(0, Relaxed);
    let wanted = &vcpu().user_wanted;
    wanted.store(1 + mine().slot.load(Relaxed), SeqCst);
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
            // On its way to where it waits.
            sys::yield_now();
        }
    }
    // Before any program runs the mapper has unmapped the memory that both threads have used.
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
    // SAFETY: a context that the host's kernel has written is whole.
    let is_whole = stack.contains(&peer.context)
        && unsafe {
            peer.template = (peer.context as *const [u64; 38]).read_volatile();
            // What has been blocked until now.
            peer.template[MASK] = 0;
            let area = peer.template[EXTENDED];
            stack.contains(&area) && {
                peer.layout = ((area + LAYOUT) as *const [u64; 6]).read_volatile();
                peer.end = peer.layout[2] as u32;
                stack.contains(&(area + u64::from(peer.end)))
            }
        };
    if !is_whole || peer.end as usize > crate::shared::EXTENDED_STATE {
        report::fatal(format_args!("the host's signals are not understood"));
    }
    peer.process = response.process.load(Relaxed) as u32;
    peer.cpu = 0;
    request.batch.store(1, SeqCst);
}

/// Waits until a word is not `seen` any longer, for a short time; the machine ends if that has been too often.
fn wait_limited(word: &AtomicU32, seen: u32, times: &mut u32) {
    *times += 1;
    if *times > MAX_WAITS {
        report::fatal(format_args!("a program's process does not stop"));
    }
    sys::wait(word, seen, Some(WAIT_TIME));
}

/// Index of the address of the extended state in a context.
const EXTENDED: usize = 28;
/// Index of the mask of blocked signals.
const MASK: usize = signal::CONTEXT as usize / 8 - 1;

/// A change of mappings, for when a program goes on.
fn push(command: [u64; 7]) {
    if peer().process == 0 {
        // The next one has nothing mapped.
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

/// Has the mapper carry out what was collected. Programs do not run. If the host kernel does not say that each call has succeeded, the process
/// is given up: what it has mapped is not known, so no program runs in it any more, and [`run_user`] replaces it.
fn commit() {
    let request = &mailbox().request;
    if request.used.load(Relaxed) == 0 {
        return;
    }
    // Neither the number of none nor that of being ready.
    let batch = request.batch.load(Relaxed).checked_add(1).unwrap_or(2);
    request.batch.store(batch, SeqCst);
    // Both, whether the first one wakes it or not: who waits on `batch` from here on has read its new value.
    sys::wake(&request.batch_parked);
    sys::wake(&request.batch);
    let is_done = await_mapper(batch);
    request.used.store(0, Relaxed);
    if !is_done {
        replace_process();
        mine().unmapped.store(true, Relaxed);
    }
}

/// Waits until the mapper has ended this batch; gives whether each of its calls has succeeded.
///
/// The host kernel is asked where it waits. A thread enters the queue of `batch` only while that has the value that the thread has read,
/// the mapper does so only when it has completed the batch of this number, and who has entered before was woken by [`commit`]. The program's
/// thread cannot be there instead: it waits for its turn.
fn await_mapper(batch: u32) -> bool {
    let Mailbox { request, response } = mailbox();
    let (mut times, mut settled_by) = (0, None);
    loop {
        // Only a hint: programs can write it. What is forged makes the host kernel be asked too early, or a little later.
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
            // It may need this CPU.
            sys::yield_now();
        }
    }
}

/// Maps guest memory for programs, too.
pub fn map(linear: u64, size: u64, rights: u32, offset: u64) {
    let flags = linux::MAP_SHARED | linux::MAP_FIXED | linux::MAP_POPULATE;
    let arguments = [linear, size, rights.into(), flags.into(), layout::MEMORY_FD.into(), offset];
    call(linux::__NR_mmap, arguments);
}

/// Unmaps it.
pub fn unmap(start: u64, end: u64) {
    call(linux::__NR_munmap, [start, end - start, 0, 0, 0, 0]);
}

/// Takes rights.
pub fn narrow(start: u64, end: u64, rights: u32) {
    call(linux::__NR_mprotect, [start, end - start, rights.into(), 0, 0, 0]);
}

fn call(number: u32, [a, b, c, d, e, f]: [u64; 6]) {
    if is_enabled() {
        push([number.into(), a, b, c, d, e, f]);
    }
}

/// The next program is of another address space: it gets a process of its own.
pub fn replace_process() {
    peer().process = 0;
}

/// Lets a program go on until it stops, by a signal or for events.
pub fn run_user() -> Cause {
    peer().selectors = compat::selectors();
    if peer().process == 0 {
        connect();
    }
    follow_cpu();
    commit();
    if mine().unmapped.swap(false, Relaxed) {
        // The host has had no room. The next process has nothing mapped, and everything can be filled in again.
        peer().failures += 1;
        if peer().failures > MAX_FAILURES {
            report::fatal(format_args!(
                "the host refuses to map or unmap a program's memory in {MAX_FAILURES} processes in a row"
            ));
        }
        crate::memory::drop_programs();
        return Cause::Events;
    }
    if events().load(SeqCst) != 0 {
        return Cause::Events;
    }
    write_context();
    cpu_affinity::on_hand_over();
    steal_time::on_idle();
    peer().failures = 0;
    resume_thread();
    wait();
    steal_time::on_resume();
    cpu_affinity::on_take_over();
    read_context();
    Cause::Signal
}

/// Makes the other process come to this one's CPU: a change to another one costs several times as much.
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

/// Waits until the program has stopped.
fn wait() {
    let Mailbox { request, response } = mailbox();
    let turn = request.turn.load(Relaxed);
    // How often it was told to stop; until when it may be on its way to the place where it waits.
    let (mut times, mut settled_by) = (0, None);
    let mut is_stop_requested = false;
    loop {
        let seen = response.turn.load(SeqCst);
        if seen == turn && is_stopped() {
            if !is_stop_requested {
                return;
            }
            // A program that has gone to the gate by itself may still get the signal, which writes to memory: not when it waits once more.
            is_stop_requested = false;
            wait_until_stop_sent();
            sys::wake(&request.parked);
            settled_by = Some(guest::tsc() + clock::ticks(SETTLE_TIME));
            continue;
        }
        if seen == turn {
            let until = *settled_by.get_or_insert_with(|| guest::tsc() + clock::ticks(SETTLE_TIME));
            if guest::tsc() < until {
                // It may need this CPU.
                sys::yield_now();
                continue;
            }
        }
        if seen != turn && !is_stop_requested && events().load(SeqCst) == 0 {
            // SAFETY: both words are shared memory.
            unsafe { wait_unless(events().as_ptr(), response.turn.as_ptr(), seen) }
            continue;
        }
        // For events, or since it has said what is not true.
        is_stop_requested = true;
        stop();
        wait_limited(&response.turn, seen, &mut times);
    }
}

/// Waits until the device process has told the program to stop, if it was asked to.
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

/// Makes the program stop.
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

/// Gives the program's thread what the virtual CPU consists of. All of the context is written, whatever a program has made of it.
fn write_context() {
    let peer = peer();
    let request = &mailbox().request;
    // SAFETY: this process has the virtual CPU, and the guest does not run.
    let (cpu, code) = unsafe { (&(*cell()).cpu, (*cell()).code) };
    let mut words = peer.template;
    for (word, register) in words[5..].iter_mut().zip(signal::ORDER) {
        *word = cpu.frame.gpr[register];
    }
    words[21] = cpu.frame.rip;
    words[22] = cpu.frame.rflags;
    words[23] = words[23] & !0xffff | code;
    let area = words[EXTENDED];
    let features = peer.layout[1] & !xstate::PKRU;
    // SAFETY: `connect` has looked where they are, in memory that is used for nothing else; the thread waits.
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

/// Takes from a program's thread what it has made of it, as far as a program can have done that.
fn read_context() {
    let (peer, response) = (peer(), &mailbox().response);
    let vcpu = vcpu();
    // SAFETY: this process has the virtual CPU, and the guest does not run.
    let cpu = unsafe { &mut (*cell()).cpu };
    let at = peer.context as *const Context;
    // SAFETY: it is memory of this process's, which nobody writes while the thread waits; `connect` has looked where it is.
    let context = unsafe { at.read_volatile() };
    for (value, place) in context.registers.iter().zip(signal::ORDER) {
        cpu.frame.gpr[place] = *value;
    }
    cpu.frame.rip = context.rip;
    cpu.frame.rflags = context.rflags & u64::from(wedge_x86::USER_FLAGS) | rflags::IF | 2;
    cpu.found_in(context.is_64_bit());
    let mut signal = signal::sound(response.number.load(Relaxed), &context);
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
    // SAFETY: as above; the copy is as large as that, and only a change of the process uses it otherwise.
    unsafe {
        let from = peer.template[EXTENDED] as *const u8;
        core::ptr::copy_nonoverlapping(from, area.cast(), peer.end as usize);
    }
    xstate::restore(area as u64, crate::shared::EXTENDED_STATE as u64);
    let base = |index: usize| {
        let base = response.bases[index].load(Relaxed);
        // Programs have nothing above.
        if base < layout::TASK_SIZE { base } else { 0 }
    };
    compat::set_bases(base(0), base(1));
}

/// `ES`, `DS`, `FS`, `GS` of the program that has stopped, or of the one that has not gone on.
pub fn selectors() -> [u16; 4] {
    peer().selectors
}

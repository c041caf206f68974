//! Signals of the host: the processor's exceptions, system calls of programs, the timer and the device process.
//!
//! A handler that finds the guest running puts its registers into the frame and leaves for the wedge, without returning from the signal: no
//! signal is ever masked, so there is nothing to return to. If it finds the wedge, it leaves an event.

use core::arch::naked_asm;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use linux_raw_sys::general as linux;
use linux_raw_sys::prctl;
use proto::wedge::layout;
use wedge_core::cpu::rflags;
use wedge_core::{VirtualCpu, vector};
use wedge_x86::{CODE_64, Unwound};

use crate::config::config;
use crate::processes::{KICK, TIMER};
use crate::shared::{
    SIGNAL_STACK, SIGNAL_STACK_LENGTH, Signal, cell, count, counter, event, events, mine, vcpu,
};
use crate::sys::{self, Errno};
use crate::{pkeys, report, xstate};

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
    code: u64,
    vector: u64,
    mask: u64,
    address: u64,
    extended: *const u8,
}

impl Context {
    /// The low half of [`Self::segments`] is `CS`.
    pub fn is_64_bit(&self) -> bool {
        self.segments as u16 == CODE_64.into()
    }
}

/// Bytes of a context, with what is reserved and the signal mask. The signal's description follows it (`struct rt_sigframe`).
pub const CONTEXT: u64 = 304;
/// Where the architecture of a dispatched system call is in a description (`_sigsys` of `siginfo_t`).
const ARCHITECTURE: u64 = 28;
/// What a dispatched system call's [`Signal::vector`] is if it was `int $0x80`.
pub const INT_80: u8 = 0x80;

/// [`Signal::vector`] of a dispatched system call.
///
/// # Safety
/// The host has written a frame with this context.
pub unsafe fn call_vector(context: *const Context) -> u64 {
    /// `AUDIT_ARCH_I386` (`linux/audit.h`).
    const I386: u32 = 0x4000_0003;
    let at = context as u64 + CONTEXT + ARCHITECTURE;
    // SAFETY: the caller vouches for it.
    let is_int = unsafe { (at as *const u32).read() } == I386;
    if is_int { INT_80.into() } else { 0 }
}

/// Where [`Context::registers`] are in a frame, which is in the order of encoding.
pub const ORDER: [usize; 16] = [8, 9, 10, 11, 12, 13, 14, 15, 7, 6, 5, 3, 2, 0, 1, 4];

/// Index of the stack pointer in [`Context::registers`].
const STACK_POINTER: usize = 15;

/// Signals of the processor and of dispatched system calls.
pub const SYNCHRONOUS: [u32; 6] =
    [linux::SIGSEGV, linux::SIGBUS, linux::SIGILL, linux::SIGFPE, linux::SIGTRAP, linux::SIGSYS];
/// Number of a trap exception's vector: single step or breakpoint register.
const DEBUG: u64 = 1;

/// Makes signals come to this process's handler, and system calls of programs too. The signals are blocked until the process has
/// its seccomp filter: a handler would read what the guest can write.
pub fn set_up() -> Result<(), Errno> {
    make_timer()?;
    let stack = &STACKS[usize::from(pkeys::is_enabled())];
    // SAFETY: the stack is this process's own memory and used for nothing else.
    unsafe { sys::call(linux::__NR_sigaltstack, [stack.as_ptr() as u64, 0, 0, 0, 0, 0]) }?;
    let flags = linux::SA_SIGINFO | linux::SA_ONSTACK | linux::SA_NODEFER | linux::SA_RESTORER;
    let handler = match pkeys::is_enabled() {
        true => wedge_x86::keyed_handler(),
        false => handler as *const () as u64,
    };
    let action = [handler, flags.into(), restore as *const () as u64, 0];
    for number in SYNCHRONOUS.into_iter().chain([KICK, TIMER]) {
        let arguments = [number.into(), action.as_ptr() as u64, 0, 8, 0, 0];
        // SAFETY: the handler keeps to the rules of signal handlers.
        unsafe { sys::call(linux::__NR_rt_sigaction, arguments) }?;
    }
    let arguments = [
        prctl::PR_SET_SYSCALL_USER_DISPATCH.into(),
        prctl::PR_SYS_DISPATCH_ON.into(),
        0,
        0,
        mine().private.dispatch.as_ptr() as u64,
        0,
    ];
    // SAFETY: the byte is there as long as the process; only entry code sets it, on the way to programs.
    unsafe { sys::call(linux::__NR_prctl, arguments) }.map(drop)
}

/// The stack of signal handlers. With keys the host takes it away while a handler runs (`SS_AUTODISARM`, sigaltstack(2)), until that
/// returns or [`leave`]s: whatever a program's stack pointer is, its signal is at the top, and what interrupts a handler is below it.
static STACKS: [[u64; 3]; 2] =
    [[SIGNAL_STACK, 0, SIGNAL_STACK_LENGTH], [SIGNAL_STACK, 1 << 31, SIGNAL_STACK_LENGTH]];

/// Gives up a handler: the guest was running, and its registers are in the frame.
///
/// # Safety
/// Nothing on the signal stack is needed any longer.
unsafe fn leave() -> ! {
    // SAFETY: the guest was running; the stack is this process's own memory and used for nothing else.
    unsafe {
        if pkeys::is_enabled() {
            wedge_x86::leave_after(linux::__NR_sigaltstack, STACKS[1].as_ptr() as u64)
        }
        wedge_x86::leave()
    }
}

/// A signal has left a frame with this context.
fn note_frame(context: u64) {
    // Below it is only what the host's handlers are called with.
    let page = context & !0xfff;
    if (SIGNAL_STACK..SIGNAL_STACK + SIGNAL_STACK_LENGTH).contains(&page) {
        mine().frames.fetch_max(SIGNAL_STACK + SIGNAL_STACK_LENGTH - page, Relaxed);
    }
}

/// What signals have left is another's than the next program's.
pub fn forget_frames() {
    mine().scrubs.store(ALL, Relaxed);
}

/// Values of [`crate::shared::Mine::scrubs`]: only a handler that found no program has left something; any may have.
const KERNEL: u8 = 1;
const ALL: u8 = 2;

/// Before the guest goes on, with keys: a program finds nothing of others where its signals come.
pub fn scrub() {
    /// Most that handlers use of their own stack.
    const HANDLER: usize = 0x2000;
    let mine = mine();
    let scrubs = mine.scrubs.swap(0, Relaxed);
    if scrubs == 0 {
        return;
    }
    let length = mine.frames.swap(0, Relaxed).min(SIGNAL_STACK_LENGTH);
    let handler = if scrubs == ALL { HANDLER } else { 0 };
    for (end, length) in [
        (SIGNAL_STACK + SIGNAL_STACK_LENGTH, length as usize),
        (wedge_x86::HANDLER_STACK_TOP, handler),
    ] {
        // SAFETY: nobody uses these stacks now: a handler that interrupts this is done when it goes on.
        unsafe { core::ptr::write_bytes((end - length as u64) as *mut u8, 0, length) };
    }
}

#[unsafe(naked)]
unsafe extern "sysv64" fn restore() {
    naked_asm!("mov eax, {}", "syscall", const linux::__NR_rt_sigreturn)
}

/// The kernel calls it with 16-byte alignment as if by a call. Alignment checks may be on.
#[unsafe(naked)]
unsafe extern "sysv64" fn handler() {
    naked_asm!("push 2", "popfq", "jmp {}", sym on_signal)
}

#[unsafe(export_name = "parador_wedge_signal")]
extern "sysv64" fn on_signal(number: u32, _: *const u8, context: *mut Context) {
    if pkeys::is_enabled() {
        note_frame(context as u64);
        mine().scrubs.fetch_max(KERNEL, Relaxed);
    }
    // System calls from here on are the host's.
    mine().private.dispatch.store(0, Relaxed);
    let synchronous = SYNCHRONOUS.contains(&number);
    let vcpu = vcpu();
    // SAFETY: the kernel gives the context of this signal.
    let context = unsafe { &mut *context };
    if vcpu.running.load(SeqCst) != mine().slot.load(Relaxed) {
        // A timer that was not stopped, or a signal that came late: the process that runs knows.
        if synchronous {
            broken(number, context);
        }
        return;
    }
    // SAFETY: this process has the virtual CPU, and entry code or the guest was running, or the wedge was, in which case nothing but the mark
    // of attention is changed.
    let cpu = unsafe { &mut (*cell()).cpu };
    if !synchronous {
        leave_event(number);
    }
    if !(layout::WEDGE..layout::WEDGE_END).contains(&context.rip) {
        cpu.found_in(context.is_64_bit());
    } else if !in_wedge(number, synchronous, context, cpu) {
        return;
    }
    if !synchronous && cpu.cpl == 0 && cpu.held_flags & rflags::IF == 0 {
        // It could not be delivered; the guest looks when it turns interrupts on.
        cpu.attention = 1;
        crate::frames::note_interrupted_kernel();
        return;
    }
    for (value, place) in context.registers.iter().zip(ORDER) {
        cpu.frame.gpr[place] = *value;
    }
    cpu.frame.rip = context.rip;
    cpu.found_flags(context.rflags);
    let (code, address) = (context.code, context.address);
    let vector = match number {
        // SAFETY: the host has written what it is about behind the context.
        linux::SIGSYS => unsafe { call_vector(context) },
        _ => context.vector,
    };
    vcpu.signal.set(Signal { number, vector, code, address });
    xstate::restore(context.extended as u64, u64::MAX);
    // SAFETY: the guest was running.
    unsafe { leave() }
}

/// A signal that has found a program running, with keys: entry code is on a stack of its own. The program may also have jumped to the
/// handler, with anything for a context; then what it says of itself must be nothing that it could not have done.
#[unsafe(export_name = "parador_wedge_user_signal")]
extern "sysv64" fn on_user_signal(number: u32, _: *const u8, context: *const Context) -> ! {
    let vcpu = vcpu();
    // SAFETY: this process has the virtual CPU, and a program was running.
    let cpu = unsafe { &mut (*cell()).cpu };
    let end = SIGNAL_STACK + SIGNAL_STACK_LENGTH;
    let (window, window_end) = wedge_x86::keyed_handler_window();
    let (mut number, mut at) = (number, context as u64);
    let (context, mut signal) = loop {
        let last = end - (CONTEXT + ARCHITECTURE + 4);
        if !at.is_multiple_of(8) || !(SIGNAL_STACK..=last).contains(&at) {
            cpu.frame.gpr = [0; 16];
            cpu.frame.rip = wedge_x86::keyed_handler();
            cpu.frame.rflags = rflags::IF | 2;
            let vector = vector::UNDEFINED.into();
            vcpu.signal.set(Signal { number: linux::SIGILL, vector, code: 0, address: 0 });
            // SAFETY: a program was running.
            unsafe { leave() }
        }
        note_frame(at);
        // SAFETY: it is on the signal stack, and nobody writes there.
        let context = unsafe { (at as *const Context).read() };
        let signal = sound(number, &context);
        if SYNCHRONOUS.contains(&signal.number) {
            break (context, signal);
        }
        leave_event(signal.number);
        if !(window..window_end).contains(&context.rip) {
            break (context, signal);
        }
        // It has interrupted the beginning of another signal's handler, farther up on the stack.
        let [r8, rdi, rdx] = [0, 8, 12].map(|register: usize| context.registers[register]);
        let outer = if context.rip == window { rdx } else { r8 };
        (number, at) = (rdi as u32, if outer > at { outer } else { 0 });
    };
    for (value, place) in context.registers.iter().zip(ORDER) {
        cpu.frame.gpr[place] = *value;
    }
    cpu.frame.rip = context.rip;
    cpu.frame.rflags = context.rflags;
    let [crossing, _, crossing_end] = wedge_x86::crossing();
    if !(crossing..crossing_end).contains(&context.rip) {
        cpu.found_in(context.is_64_bit());
    }
    if signal.number == linux::SIGSYS {
        // SAFETY: the context is on the signal stack with what follows it.
        signal.vector = unsafe { call_vector(at as *const Context) };
    }
    find_crossing(cpu, &mut signal);
    cpu.frame.rflags = cpu.frame.rflags & u64::from(wedge_x86::USER_FLAGS) | rflags::IF | 2;
    vcpu.signal.set(signal);
    let extended = context.extended as u64;
    if (at..end).contains(&extended) && extended.is_multiple_of(64) {
        xstate::restore(extended, end - extended);
    }
    // SAFETY: a program was running.
    unsafe { leave() }
}

/// The signal as a program can get it.
pub fn sound(number: u32, context: &Context) -> Signal {
    const PAGE_FAULT: u64 = vector::PAGE_FAULT as u64;
    const PROTECTION: u64 = vector::PROTECTION as u64;
    let is_sound = match number {
        linux::SIGSYS | linux::SIGILL => true,
        linux::SIGFPE => matches!(context.vector, 0 | 16 | 19),
        linux::SIGTRAP => matches!(context.vector, 1 | 3),
        linux::SIGBUS => matches!(context.vector, 17 | PAGE_FAULT),
        linux::SIGSEGV => matches!(context.vector, 4 | 5 | 11..=14),
        TIMER => true,
        _ => false,
    };
    let code = match context.vector {
        // Write, fetch; of a program.
        PAGE_FAULT => context.code & 0x12 | 4,
        11..=PROTECTION => context.code & 0xffff,
        _ => 0,
    };
    let number = if is_sound { number } else { KICK };
    Signal { number, vector: context.vector, code, address: context.address }
}

/// If the program was on its way, where its registers are and what the signal means.
fn find_crossing(cpu: &mut VirtualCpu, signal: &mut Signal) {
    let rip = cpu.frame.rip;
    // SAFETY: it is this process's own memory, mapped as long as it lives.
    let crossing = unsafe { (wedge_x86::CROSSING as *const wedge_x86::Crossing).read_volatile() };
    let frame = &mut cpu.frame;
    let [start, _, end] = wedge_x86::crossing();
    if (start..end).contains(&rip) {
        frame.gpr[0] = crossing.rax;
        frame.gpr[1] = crossing.rcx;
        frame.gpr[2] = crossing.rdx;
        frame.gpr[4] = crossing.rsp;
        (frame.rip, frame.rflags) = (crossing.rip, crossing.rflags);
        return;
    }
    let [start, switched, saved, end] = wedge_x86::call_gate();
    if (start..end).contains(&rip) {
        if rip >= switched {
            frame.gpr[0] = crossing.rax;
            frame.gpr[1] = crossing.rcx;
            frame.gpr[2] = crossing.rdx;
            frame.gpr[4] = crossing.rsp;
        }
        if rip >= saved {
            frame.rflags = crossing.rflags;
        }
        // Whatever it was, it is a system call now.
        frame.rip = frame.gpr[1];
        (signal.number, signal.vector) = (linux::SIGSYS, 0);
        return;
    }
    if signal.number == linux::SIGTRAP
        && signal.vector == DEBUG
        && crate::syscall_patch::is_stub(rip)
    {
        // A step goes through what is there instead of the system call.
        signal.number = KICK;
    }
}

/// The signal came while the wedge was running, or what it does in the guest's place. `true`: the guest is where it is interrupted, as the
/// context says now; else the signal's work is done.
fn in_wedge(number: u32, synchronous: bool, context: &mut Context, cpu: &mut VirtualCpu) -> bool {
    let rip = context.rip;
    if synchronous {
        // A single step of the guest's goes through what the wedge does for it.
        if number != linux::SIGTRAP || context.vector != DEBUG {
            broken(number, context);
        }
        return false;
    }
    cpu.attention = 1;
    let (start, end) = wedge_x86::entry_window();
    if (start..end).contains(&rip) {
        context.rip = wedge_x86::abort();
        return false;
    }
    let (start, end) = crate::user_process::wait_window();
    if (start..end).contains(&rip) {
        context.rip = end;
        return false;
    }
    let [start, own_stack, end] = wedge_x86::sysret_window();
    if (start..end).contains(&rip) {
        // Before the first instruction and after the last but one the stack pointer is the guest's.
        if rip > start && rip <= own_stack {
            context.registers[STACK_POINTER] = cpu.frame.gpr[4];
        }
        return returned(context, cpu);
    }
    let [to_program, to_32, _] = wedge_x86::crossing();
    if rip == to_program || rip == to_32 {
        let mut signal = Signal { number, vector: 0, code: 0, address: 0 };
        for (value, place) in context.registers.iter().zip(ORDER) {
            cpu.frame.gpr[place] = *value;
        }
        cpu.frame.rip = rip;
        find_crossing(cpu, &mut signal);
        for (value, place) in context.registers.iter_mut().zip(ORDER) {
            *value = cpu.frame.gpr[place];
        }
        (context.rip, context.rflags) = (cpu.frame.rip, cpu.frame.rflags);
        return true;
    }
    let Some((stub, offset)) = crate::sites::stub_at(rip) else { return false };
    match stub.unwind(offset) {
        Unwound::Continue => false,
        Unwound::Restart(site, pushed) => {
            context.rip = site;
            context.registers[STACK_POINTER] += pushed;
            true
        }
        Unwound::Resume(resume) => {
            context.rip = resume;
            cpu.held_flags |= rflags::IF;
            true
        }
        Unwound::Sysret => returned(context, cpu),
    }
}

/// The guest has done `SYSRET`.
fn returned(context: &mut Context, cpu: &mut VirtualCpu) -> bool {
    let [rcx, r11] = [context.registers[14], context.registers[3]];
    (context.rip, context.rflags) = (rcx, r11);
    cpu.enter_user();
    true
}

fn leave_event(number: u32) {
    if number == TIMER {
        events().fetch_or(event::TIMER, SeqCst);
    } else {
        // Who sends it has said what it is.
        count(counter::KICKS);
    }
}

#[cold]
fn broken(number: u32, context: &Context) -> ! {
    report::fatal(format_args!(
        "signal {number} in the wedge: rip {:#x} rsp {:#x} vector {} code {:#x} address {:#x}",
        context.rip, context.registers[15], context.vector, context.code, context.address
    ))
}

/// Sets this process's timer to the deadline of the virtual CPU.
pub fn arm() {
    let mine = mine();
    let deadline = vcpu().deadline.load(Relaxed);
    if deadline <= crate::guest::tsc() {
        // The timer of this process may have expired while another one had the virtual CPU.
        events().fetch_or(event::TIMER, SeqCst);
        return;
    }
    if mine.armed.load(Relaxed) == deadline {
        return;
    }
    mine.armed.store(deadline, Relaxed);
    if let Err(error) = set_timer(deadline) {
        report::fatal(format_args!("cannot set the timer of a virtual CPU: {error}"));
    }
}

/// Time from now to a value of the time-stamp counter, in nanoseconds.
pub fn until(tsc: u64) -> u64 {
    let ticks = tsc.saturating_sub(crate::guest::tsc());
    let nanoseconds = u128::from(ticks) * 1_000_000 / u128::from(config().tsc_khz);
    u64::try_from(nanoseconds).unwrap_or(u64::MAX)
}

fn set_timer(deadline: u64) -> Result<(), Errno> {
    let timer = mine().timer.load(Relaxed).into();
    // A time of 0 stops it.
    let wait = if deadline == u64::MAX { 0 } else { until(deadline).max(1) };
    let time = [0, 0, wait / 1_000_000_000, wait % 1_000_000_000];
    // SAFETY: the kernel reads the time.
    unsafe {
        sys::call(linux::__NR_timer_settime, [timer, 0, time.as_ptr() as u64, 0, 0, 0]).map(drop)
    }
}

/// Makes this process's timer. Timers count against a limit of all processes of the user, so a guest's kernel must not make any.
fn make_timer() -> Result<(), Errno> {
    // `struct sigevent`: value, signal, how to notify.
    let event = [0_u64, u64::from(TIMER) | u64::from(linux::SIGEV_SIGNAL) << 32, 0, 0, 0, 0, 0, 0];
    let mut timer = 0_u32;
    let clock = u64::from(linux::CLOCK_MONOTONIC);
    let arguments = [clock, event.as_ptr() as u64, &raw mut timer as u64, 0, 0, 0];
    // SAFETY: the kernel reads the description and writes the number.
    unsafe { sys::call(linux::__NR_timer_create, arguments) }?;
    mine().timer.store(timer, Relaxed);
    Ok(())
}

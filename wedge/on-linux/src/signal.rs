//! Host signals: CPU exceptions, system calls of user mode, the timer, and notifications by the
//! device process.
//!
//! A handler that interrupts the guest saves its registers to the frame and jumps to the wedge
//! without returning from the signal. Signals are never masked, so no return is needed. A handler
//! that interrupts the wedge posts an event.

use core::arch::naked_asm;
use core::mem::offset_of;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use host_linux::sys::{self, Errno};
use hw_x86::paging::fault;
use linux_raw_sys::general as linux;
use linux_raw_sys::prctl;
use proto::hosted::{counter, layout};
use wedge_core::cpu::rflags;
use wedge_core::{VirtualCpu, vector};
use wedge_x86::Unwound;

use crate::isolation::contract::SignalEntry;
use crate::isolation::{self, signal_stacks, user_process};
use crate::linux::signals::{
    Context, DEBUG, KICK, ORDER, SYNCHRONOUS, Signal, SignalFrame, TIMER, UNRESTORED, sanitize,
    set_unrestored_flags,
};
use crate::mmu::frames::note_interrupted_kernel;
use crate::mmu::syscall_patch::is_call_code;
use crate::state::current::CurrentVcpu;
use crate::state::process::process;
use crate::state::shared::{
    SIGNAL_STACK, SIGNAL_STACK_LENGTH, attention, event, events, shared, vcpu,
};
use crate::state::statistics::count;
use crate::{report, sites, xstate};

/// Index of the stack pointer in [`Context::registers`].
const STACK_POINTER: usize = 15;

/// Installs the signal handlers of this process, and the dispatch of user-mode system calls. The
/// signals stay blocked until the seccomp filter is installed, because a handler reads memory that
/// the guest can write.
pub fn set_up() -> Result<(), Errno> {
    let SignalEntry { handler: keyed, stack } = isolation::current().signal_entry();
    let flags = linux::SA_SIGINFO | linux::SA_ONSTACK | linux::SA_NODEFER | linux::SA_RESTORER;
    let handler = keyed.unwrap_or(handler as *const () as u64);
    let action = [handler, flags.into(), restore as *const () as u64, 0];
    let signals = SYNCHRONOUS.into_iter().chain([KICK, TIMER]);
    // SAFETY: the stack is private memory without any other use; the handler complies with the
    // rules for signal handlers.
    unsafe { sys::set_handlers(stack, signals, &action) }?;
    let arguments = [
        prctl::PR_SET_SYSCALL_USER_DISPATCH.into(),
        prctl::PR_SYS_DISPATCH_ON.into(),
        0,
        0,
        process().private.dispatch.as_ptr() as u64,
        0,
    ];
    // SAFETY: the byte exists for the life of the process; only entry code sets it, on the way to
    // user mode.
    unsafe { sys::call(linux::__NR_prctl, arguments) }.map(drop)
}

/// The guest, which a signal has interrupted: its virtual CPU, and the right to abandon the
/// handler.
struct InterruptedGuest(CurrentVcpu);

impl InterruptedGuest {
    /// Takes the virtual CPU.
    ///
    /// # Safety
    /// The event loop must be in [`CurrentVcpu::enter`], and no other handler may run.
    unsafe fn take() -> Self {
        // SAFETY: the loop's value is borrowed there.
        Self(unsafe { CurrentVcpu::take() })
    }

    /// Abandons the handler: the event loop continues. Nothing on the signal stack is needed any
    /// more, because the guest's registers are in the frame.
    fn leave(self) -> ! {
        // SAFETY: the guest was interrupted; the stack is private memory without any other use.
        unsafe {
            if let Some(stack) = isolation::current().stack_after_handler() {
                wedge_x86::leave_after(linux::__NR_sigaltstack, stack.as_ptr() as u64)
            }
            wedge_x86::leave()
        }
    }
}

#[unsafe(naked)]
unsafe extern "sysv64" fn restore() {
    naked_asm!(
        set_unrestored_flags!(),
        "mov eax, {sigreturn}",
        "syscall",
        flags = const offset_of!(Context, rflags),
        unrestored = const UNRESTORED,
        sigreturn = const linux::__NR_rt_sigreturn,
    )
}

/// Signal handler. The kernel calls it with 16-byte alignment, as by a call, and possibly with
/// alignment checks enabled.
#[unsafe(naked)]
unsafe extern "sysv64" fn handler() {
    naked_asm!("push 2", "popfq", "jmp {}", sym on_signal)
}

#[unsafe(export_name = "parador_wedge_signal")]
extern "sysv64" fn on_signal(number: u32, _: *const u8, frame: *mut SignalFrame) {
    isolation::current().on_signal(frame as u64);
    // From here on, system calls are the wedge's.
    process().private.dispatch.store(0, Relaxed);
    let synchronous = SYNCHRONOUS.contains(&number);
    let vcpu = vcpu();
    // SAFETY: the kernel passes the context of this signal, which is in its frame.
    let frame = unsafe { &mut *frame };
    let context = &mut frame.context;
    if vcpu.running.load(SeqCst) != process().slot.load(Relaxed) {
        // A stale timer, or a late signal: the process that runs the vCPU has the event.
        if synchronous {
            unexpected(number, context);
        }
        return;
    }
    if !synchronous {
        post_event(number);
    }
    let is_in_wedge = (layout::WEDGE..layout::WEDGE_END).contains(&context.rip);
    let interrupted = match is_in_wedge && !(synchronous && is_fault_of_guest(context)) {
        true => classify(number, synchronous, context),
        false => Interrupted::Guest,
    };
    if interrupted == Interrupted::Wedge {
        return;
    }
    // SAFETY: the signal has interrupted the guest, or code that runs for it, so the event loop is
    // in `CurrentVcpu::enter`, and no other handler runs.
    let mut guest = unsafe { InterruptedGuest::take() };
    let cpu = &mut *guest.0;
    match interrupted {
        Interrupted::Guest => cpu.sync_code_segment(context.is_64_bit()),
        _ => complete(interrupted, context, cpu),
    }
    if !synchronous && cpu.cpl == 0 && cpu.held_flags & rflags::IF == 0 {
        // Interrupts are disabled; the guest checks when it enables them.
        attention().store(1, Relaxed);
        note_interrupted_kernel(vcpu, &shared().frames);
        return;
    }
    for (value, place) in context.registers.iter().zip(ORDER) {
        cpu.frame.gpr[place] = *value;
    }
    cpu.frame.rip = context.rip;
    cpu.sync_flags(context.rflags);
    let address = context.address;
    let (vector, code) = match number {
        linux::SIGSYS => (frame.call_vector(), 0),
        _ => (frame.context.vector, frame.exception_code()),
    };
    vcpu.signal.set(Signal { number, vector, code, address });
    xstate::restore(frame.context.extended as u64, u64::MAX);
    guest.leave()
}

/// Signal handler for interrupted user mode, with protection keys; entry code has switched to a
/// separate stack. User mode may also have jumped to the handler with an arbitrary context, so the
/// context is restricted to states that user mode can reach.
#[unsafe(export_name = "parador_wedge_user_signal")]
extern "sysv64" fn on_user_signal(number: u32, _: *const u8, frame: *const SignalFrame) -> ! {
    // SAFETY: user mode was interrupted, so the event loop is in `CurrentVcpu::enter`, and no other
    // handler runs: one whose entry code was interrupted continues here.
    let mut guest = unsafe { InterruptedGuest::take() };
    let cpu = &mut *guest.0;
    let at = frame as u64;
    if !signal_stacks::read_user_frame(at, || take_user_state(cpu, number, at)) {
        cpu.frame.gpr = [0; 16];
        cpu.frame.rip = wedge_x86::keyed_handler();
        cpu.frame.rflags = rflags::IF | 2;
        let vector = vector::UNDEFINED.into();
        vcpu().signal.set(Signal { number: linux::SIGILL, vector, code: 0, address: 0 });
    }
    guest.leave()
}

/// Takes the state of interrupted user mode and its signal from the frame at an address. `false`:
/// there is none. If user mode has jumped to the handler, another signal may overwrite the frame
/// meanwhile.
fn take_user_state(cpu: &mut VirtualCpu, mut number: u32, mut at: u64) -> bool {
    let end = SIGNAL_STACK + SIGNAL_STACK_LENGTH;
    let (window, window_end) = wedge_x86::keyed_handler_window();
    let (frame, mut signal) = loop {
        let last = end - size_of::<SignalFrame>() as u64;
        if !at.is_multiple_of(8) || !(SIGNAL_STACK..=last).contains(&at) {
            return false;
        }
        // SAFETY: it is on the signal stack, which is private memory.
        let frame = unsafe { (at as *const SignalFrame).read_volatile() };
        let context = &frame.context;
        let signal = sanitize(number, &frame);
        if SYNCHRONOUS.contains(&signal.number) {
            break (frame, signal);
        }
        post_event(signal.number);
        if !(window..window_end).contains(&context.rip) {
            break (frame, signal);
        }
        // The signal has interrupted the entry of another signal's handler, whose frame is further
        // up on the stack.
        let [r8, rdi, rdx] = [0, 8, 12].map(|register: usize| context.registers[register]);
        let outer = if context.rip == window { rdx } else { r8 };
        (number, at) = (rdi as u32, if outer > at { outer } else { 0 });
    };
    let context = &frame.context;
    for (value, place) in context.registers.iter().zip(ORDER) {
        cpu.frame.gpr[place] = *value;
    }
    cpu.frame.rip = context.rip;
    cpu.frame.rflags = context.rflags;
    let [crossing, _, crossing_end] = wedge_x86::crossing();
    if !(crossing..crossing_end).contains(&context.rip) {
        cpu.sync_code_segment(context.is_64_bit());
    }
    if signal.number == linux::SIGSYS {
        signal.vector = frame.call_vector();
    }
    recover_registers(cpu, &mut signal);
    cpu.frame.rflags = cpu.frame.rflags & u64::from(wedge_x86::USER_FLAGS) | rflags::IF | 2;
    vcpu().signal.set(signal);
    let extended = context.extended as u64;
    if (at..end).contains(&extended) && extended.is_multiple_of(64) {
        xstate::restore(extended, end - extended);
    }
    true
}

/// Recovers user mode's registers if it was interrupted in a transition, and adapts the signal.
fn recover_registers(cpu: &mut VirtualCpu, signal: &mut Signal) {
    let rip = cpu.frame.rip;
    // SAFETY: it is private memory, mapped for the life of the process.
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
        // Whatever the signal was, treat it as the system call.
        frame.rip = frame.gpr[1];
        (signal.number, signal.vector) = (linux::SIGSYS, 0);
    }
}

/// Code that a signal has interrupted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Interrupted {
    /// The guest.
    Guest,
    /// The wedge; the signal is handled.
    Wedge,
    /// A return to user mode by `SYSRET`, which is completed. The stack pointer is still in the
    /// frame, or in the context.
    Sysret { in_frame: bool },
    /// A transition to user mode, with registers in its [`wedge_x86::Crossing`].
    Crossing,
    /// A stub that the guest restarts at its site. The second value is added to the stack
    /// pointer.
    Restart(u64, u64),
    /// A stub after which the guest resumes, with interrupts enabled.
    Resume(u64),
}

/// Returns whether the guest has caused an exception at an address of the wedge: by a jump to
/// memory without code, since the wedge only executes its own, or in code of rewritten system
/// calls, such as an instruction that was moved to a stub. A single step continues through stubs.
fn is_fault_of_guest(context: &Context) -> bool {
    let is_jump =
        context.vector == u64::from(vector::PAGE_FAULT) && context.code & fault::FETCH != 0;
    is_jump || is_call_code(context.rip) && context.vector != DEBUG
}

/// Classifies the code of the wedge that a signal has interrupted, without access to the vCPU's
/// registers, which the wedge may be using.
fn classify(number: u32, synchronous: bool, context: &mut Context) -> Interrupted {
    let rip = context.rip;
    if synchronous {
        if number == linux::SIGSEGV && context.vector == u64::from(vector::PROTECTION) {
            // SAFETY: code of the wedge, which this process has just executed.
            let code = unsafe { (rip as *const [u8; 4]).read() };
            if let Some(length) = xstate::refused_restore(code) {
                context.rip = rip + length;
                return Interrupted::Wedge;
            }
        }
        // A single step of the guest continues through code of the wedge.
        if number != linux::SIGTRAP || context.vector != DEBUG {
            unexpected(number, context);
        }
        return Interrupted::Wedge;
    }
    attention().store(1, Relaxed);
    let (start, end) = wedge_x86::entry_window();
    if (start..end).contains(&rip) {
        context.rip = wedge_x86::abort();
        return Interrupted::Wedge;
    }
    let (start, end) = user_process::wait_window();
    if (start..end).contains(&rip) {
        context.rip = end;
        return Interrupted::Wedge;
    }
    let [start, own_stack, end] = wedge_x86::sysret_window();
    if (start..end).contains(&rip) {
        // The stack pointer is the guest's before the first instruction and after the last but one.
        return Interrupted::Sysret { in_frame: rip > start && rip <= own_stack };
    }
    let [to_program, to_32, _] = wedge_x86::crossing();
    if rip == to_program || rip == to_32 {
        return Interrupted::Crossing;
    }
    let Some((stub, offset)) = sites::stub_at(rip) else { return Interrupted::Wedge };
    match stub.unwind(offset) {
        Unwound::Continue => Interrupted::Wedge,
        Unwound::Restart(site, pushed) => Interrupted::Restart(site, pushed),
        Unwound::Resume(resume) => Interrupted::Resume(resume),
        Unwound::Sysret => Interrupted::Sysret { in_frame: false },
    }
}

/// Completes or undoes the interrupted code, so that the context is a state of the guest.
fn complete(interrupted: Interrupted, context: &mut Context, cpu: &mut VirtualCpu) {
    match interrupted {
        Interrupted::Guest | Interrupted::Wedge => {}
        Interrupted::Sysret { in_frame } => {
            if in_frame {
                context.registers[STACK_POINTER] = cpu.frame.gpr[4];
            }
            let [rcx, r11] = [context.registers[14], context.registers[3]];
            (context.rip, context.rflags) = (rcx, r11);
            cpu.enter_user();
        }
        Interrupted::Crossing => {
            let mut signal = Signal { number: KICK, vector: 0, code: 0, address: 0 };
            for (value, place) in context.registers.iter().zip(ORDER) {
                cpu.frame.gpr[place] = *value;
            }
            cpu.frame.rip = context.rip;
            recover_registers(cpu, &mut signal);
            for (value, place) in context.registers.iter_mut().zip(ORDER) {
                *value = cpu.frame.gpr[place];
            }
            (context.rip, context.rflags) = (cpu.frame.rip, cpu.frame.rflags);
        }
        Interrupted::Restart(site, pushed) => {
            context.rip = site;
            context.registers[STACK_POINTER] += pushed;
        }
        Interrupted::Resume(resume) => {
            context.rip = resume;
            cpu.held_flags |= rflags::IF;
        }
    }
}

fn post_event(number: u32) {
    if number == TIMER {
        events().fetch_or(event::TIMER, SeqCst);
    } else {
        // The sender has posted the event.
        count(counter::KICKS);
    }
}

#[cold]
fn unexpected(number: u32, context: &Context) -> ! {
    report::fatal(format_args!(
        "unexpected signal {number} in the wedge: rip {:#x} rsp {:#x} vector {} code {:#x} address {:#x}",
        context.rip, context.registers[15], context.vector, context.code, context.address
    ))
}

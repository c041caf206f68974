//! A virtual processor of KVM as the VMM library wants it.
//!
//! General registers lie in memory that KVM shares; the others are asked for when somebody wants to know. An access to a
//! device is answered in that memory, too; KVM finishes the instruction when it is entered next. So whoever changes registers in
//! between lets it finish first ([`KvmVcpu::complete`]).

use std::arch::x86_64::__cpuid;
use std::cell::Cell;
use std::io;
use std::os::raw::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst, compiler_fence};
use std::time::Duration;

use hw_x86::cpuid::{features_c, leaf};
use hw_x86::msr::efer;
use hw_x86::msr::{
    CSTAR, KERNEL_GS_BASE, LSTAR, PAT, SFMASK, STAR, SYSENTER_CS, SYSENTER_EIP, SYSENTER_ESP,
};
use hw_x86::paging::{cr0, cr4};
use hw_x86::vmcb::event;
use kvm_bindings::{Msrs, kvm_dtable, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs, kvm_xcrs};
use kvm_ioctls::{SyncReg, VcpuExit, VcpuFd};
use nix::sys::signal::{SigEvent, SigevNotify, Signal};
use nix::sys::time::TimeSpec;
use nix::sys::timer::{Expiration, Timer, TimerSetTimeFlags};
use nix::time::ClockId;
use proto::wedge::debug::{HALT, reason, register};
use proto::wedge::log;
use rustix::io::Errno;
use vmm_cpu::walk::CodeView;
use vmm_cpu::{
    Access, Event, Exit, Gpr, InterruptWindow, Reg, Seg, Segment, Space, TscClock, Vcpu,
};
use vmm_mem::GuestMemory;
use vmm_sys_util::signal::register_signal_handler;

use crate::debug::{self, Stops};
use crate::error::cause_of;
use crate::seat::{Seat, tsc};
use crate::{Error, calls};

/// What makes a thread leave the guest.
pub const KICK: Signal = Signal::SIGUSR1;
/// What KVM's exits say that are the guest's fault.
const NO_ENTRY: &str = "KVM cannot enter the guest with its registers (KVM_EXIT_FAIL_ENTRY)";
const NO_EMULATION: &str =
    "KVM cannot emulate what the guest does (KVM_EXIT_INTERNAL_ERROR), suberror";

thread_local! {
    /// `immediate_exit` of the processor that this thread drives.
    static IMMEDIATE_EXIT: Cell<*mut u8> = const { Cell::new(ptr::null_mut()) };
    /// How often this thread has been kicked.
    static KICKS: AtomicU64 = const { AtomicU64::new(0) };
}

/// A signal that comes just before the guest is entered makes KVM leave it at once.
extern "C" fn kicked(_: c_int, _: *mut nix::libc::siginfo_t, _: *mut c_void) {
    KICKS.with(|kicks| kicks.fetch_add(1, SeqCst));
    let flag = IMMEDIATE_EXIT.get();
    if !flag.is_null() {
        // SAFETY: the thread's own `KvmVcpu` has set the address, and clears it before it lets the memory go. KVM and this thread read and
        // write it, nobody else.
        unsafe { flag.write_volatile(1) };
    }
}

/// Lets threads be kicked. Once for the process.
pub fn listen_to_kicks() -> Result<(), Error> {
    register_signal_handler(KICK as c_int, kicked).map_err(Error::host("listen to signals"))
}

/// What KVM waits for before it can finish an instruction.
#[derive(Clone, Copy)]
enum Pending {
    /// Nothing.
    Nothing,
    /// The instruction can be finished.
    Answered,
    /// So many bytes at this place.
    Bytes(*mut u8, usize),
    /// An MSR's value.
    Msr,
}

/// Accesses of one `INS` or `OUTS` that KVM reports together.
struct Ports {
    port: u16,
    size: u8,
    write: bool,
    /// Where the values are, and where they end.
    next: *mut u8,
    left: usize,
}

/// A virtual processor of KVM.
pub struct KvmVcpu<'s> {
    fd: VcpuFd,
    seat: &'s Seat,
    /// The guest's memory, for a look at its code.
    memory: &'s GuestMemory,
    clock: TscClock,
    /// The host's processor is one that forgets interrupt shadows.
    is_forgetful: bool,
    timer: Timer,
    /// When the timer ends, as a value of the time-stamp counter. 0: it may have.
    armed: u64,
    /// Kicks that are known; one may have been the timer's.
    kicks: u64,
    deadline: u64,
    sregs: Option<kvm_sregs>,
    /// They have been changed here.
    sregs_changed: bool,
    tsc_offset: u64,
    /// `CR8` as the machine knows it.
    known_cr8: u8,
    pending: Pending,
    ports: Option<Ports>,
    event: Event,
    window: InterruptWindow,
    /// Address behind the `HLT` that the guest has left at.
    next_rip: u64,
    /// What has gone wrong outside of [`Vcpu::run`].
    failed: Option<io::Error>,
    /// A debugger may stop it.
    stops: Option<Stops<'s>>,
    /// It is to stop as soon as it is between two instructions.
    is_asked: bool,
    /// Where it is with an instruction for the debugger.
    step: Step,
}

/// Where an instruction for the debugger is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// There is none.
    Nothing,
    /// It is to be carried out. Until then the guest takes no interrupts.
    Wanted,
    /// It has been.
    Done,
}

impl<'s> KvmVcpu<'s> {
    /// Takes a processor that has not run. The calling thread is the one that drives it.
    pub fn new(
        mut fd: VcpuFd,
        seat: &'s Seat,
        memory: &'s GuestMemory,
        clock: TscClock,
        stops: Option<Stops<'s>>,
    ) -> Result<Self, Error> {
        let notify = SigevNotify::SigevThreadId {
            signal: KICK,
            thread_id: rustix::thread::gettid().as_raw_nonzero().get(),
            si_value: 0,
        };
        let timer = Timer::new(ClockId::CLOCK_MONOTONIC, SigEvent::new(notify))
            .map_err(Error::host("make a timer"))?;
        if stops.is_some() {
            fd.set_guest_debug(&debug::control(false))
                .map_err(Error::host("let a debugger stop a virtual processor"))?;
        }
        IMMEDIATE_EXIT.set(&raw mut fd.get_kvm_run().immediate_exit);
        Ok(Self {
            fd,
            seat,
            memory,
            clock,
            is_forgetful: forgets_shadows(),
            timer,
            armed: 0,
            kicks: 0,
            deadline: u64::MAX,
            sregs: None,
            sregs_changed: false,
            tsc_offset: 0,
            known_cr8: 0,
            pending: Pending::Nothing,
            ports: None,
            event: Event::NONE,
            window: InterruptWindow::Nothing,
            next_rip: 0,
            failed: None,
            stops,
            is_asked: false,
            step: Step::Nothing,
        })
    }

    fn note<T>(&mut self, result: Result<T, impl Into<io::Error>>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.failed.get_or_insert(error.into());
                None
            }
        }
    }

    /// Lets KVM finish the instruction that accesses something, before registers are changed.
    fn complete(&mut self) {
        // Rounds are those of a string instruction whose answers nobody waits for.
        while !matches!(self.pending, Pending::Nothing) {
            self.pending = Pending::Nothing;
            self.ports = None;
            self.fd.set_kvm_immediate_exit(1);
            let result = match self.fd.run() {
                Ok(
                    VcpuExit::IoIn(..)
                    | VcpuExit::IoOut(..)
                    | VcpuExit::MmioRead(..)
                    | VcpuExit::MmioWrite(..),
                ) => {
                    self.pending = Pending::Answered;
                    Ok(())
                }
                Ok(_) => Ok(()),
                Err(error) if error.errno() == Errno::INTR.raw_os_error() => Ok(()),
                Err(error) => Err(error),
            };
            self.note(result);
        }
    }

    fn regs(&mut self) -> &mut kvm_regs {
        &mut self.fd.sync_regs_mut().regs
    }

    /// General registers, to be changed.
    fn change_regs(&mut self) -> &mut kvm_regs {
        self.complete();
        // Whether the guest takes interrupts is to be found out again.
        self.fd.get_kvm_run().ready_for_interrupt_injection = 0;
        self.fd.set_sync_dirty_reg(SyncReg::Register);
        self.regs()
    }

    fn sregs(&mut self) -> kvm_sregs {
        if let Some(sregs) = self.sregs {
            return sregs;
        }
        let result = self.fd.get_sregs();
        let sregs = self.note(result).unwrap_or_default();
        self.sregs = Some(sregs);
        sregs
    }

    fn change_sregs(&mut self, change: impl FnOnce(&mut kvm_sregs)) {
        self.complete();
        let mut sregs = self.sregs();
        change(&mut sregs);
        self.sregs = Some(sregs);
        // All together, since some are valid only with others.
        self.sregs_changed = true;
    }

    /// Gives KVM the special registers, if they have been changed.
    fn put_sregs(&mut self) {
        if let (true, Some(sregs)) = (std::mem::take(&mut self.sregs_changed), self.sregs) {
            let result = self.fd.set_sregs(&sregs);
            self.note(result);
        }
    }

    fn msr(&mut self, index: u32) -> u64 {
        let mut one = [kvm_msr_entry { index, ..Default::default() }];
        let Ok(mut msrs) = Msrs::from_entries(&one) else { return 0 };
        let result = self.fd.get_msrs(&mut msrs);
        self.note(result);
        one.copy_from_slice(msrs.as_slice());
        one[0].data
    }

    fn set_msr(&mut self, index: u32, data: u64) {
        let Ok(msrs) = Msrs::from_entries(&[kvm_msr_entry { index, data, ..Default::default() }])
        else {
            return;
        };
        let result = self.fd.set_msrs(&msrs);
        self.note(result);
    }

    fn set_tsc_offset(&mut self, offset: u64) {
        self.tsc_offset = offset;
        let result = calls::set_tsc_offset(&self.fd, offset);
        self.note(result);
    }

    /// The guest takes this interrupt at once.
    fn interrupt(&mut self, vector: u8) {
        let result = calls::interrupt(&self.fd, vector);
        self.note(result);
        self.fd.get_kvm_run().ready_for_interrupt_injection = 0;
    }

    /// The guest takes this exception at once.
    fn exception(&mut self, event: Event) {
        let result = self.fd.get_vcpu_events().and_then(|mut events| {
            events.exception.injected = 1;
            events.exception.nr = event.vector();
            events.exception.has_error_code = u8::from(event.0 & event::ERROR_VALID != 0);
            events.exception.error_code = (event.0 >> 32) as u32;
            self.fd.set_vcpu_events(&events)
        });
        self.note(result);
    }

    /// The debugger wants it to stop, if it still does.
    pub fn stop(&mut self) {
        self.is_asked = self.stops.is_some();
        self.attend();
    }

    /// Stops if it is to, unless KVM is in the midst of an instruction.
    fn attend(&mut self) {
        if self.step == Step::Done {
            self.halt(reason::STEP);
        }
        let is_between = matches!(self.pending, Pending::Nothing) && self.ports.is_none();
        if self.is_asked && is_between {
            self.is_asked = false;
            if self.stops.is_some_and(|stops| stops.shared.is_wanted()) {
                self.halt(reason::WANTED);
            }
        }
    }

    /// Stops until the debugger lets it go on.
    fn halt(&mut self, why: u32) {
        let Some(stops) = self.stops else { return };
        // It looks when it goes on.
        self.seat.is_in_guest.store(false, SeqCst);
        self.withdraw();
        let mut registers = self.shown();
        let before = registers;
        let steps = stops.halt(why, &mut registers);
        self.is_asked = false;
        if registers[..register::CHANGEABLE] != before[..register::CHANGEABLE] {
            for (code, value) in (0..16).zip(registers) {
                self.set_gpr(Gpr::from_code(code), value);
            }
            self.set(Reg::Rip, registers[register::RIP]);
            self.set(Reg::Rflags, registers[register::RFLAGS]);
        }
        self.step = if steps { Step::Wanted } else { Step::Nothing };
        // KVM steps from the address that it knows: it must know this one.
        self.put_sregs();
        self.fd.set_kvm_immediate_exit(1);
        let result = match self.fd.run() {
            Err(error) if error.errno() != Errno::INTR.raw_os_error() => Err(error),
            _ => Ok(()),
        };
        self.note(result);
        let result = self.fd.set_guest_debug(&debug::control(steps));
        self.note(result);
    }

    /// Takes an interrupt back that the guest would take at once: the debugger may want another instruction first.
    fn withdraw(&mut self) {
        let result = self.fd.get_vcpu_events().and_then(|mut events| {
            let interrupt = std::mem::take(&mut events.interrupt.injected) != 0;
            if !interrupt || events.interrupt.soft != 0 || self.event.is_some() {
                return Ok(());
            }
            self.fd.set_vcpu_events(&events)?;
            self.event = Event::interrupt(events.interrupt.nr);
            Ok(())
        });
        self.note(result);
    }

    /// Registers as debuggers are shown them.
    fn shown(&mut self) -> [u64; register::COUNT] {
        let mut registers = [0; register::COUNT];
        for (code, value) in (0..16).zip(&mut registers) {
            *value = self.gpr(Gpr::from_code(code));
        }
        let sregs = self.sregs();
        registers[register::RIP] = self.regs().rip;
        registers[register::RFLAGS] = self.regs().rflags;
        registers[register::CS] = sregs.cs.selector.into();
        registers[register::SS] = sregs.ss.selector.into();
        registers[register::CR3] = sregs.cr3;
        registers[register::KERNEL_ROOT] = sregs.cr3;
        registers[register::LEVELS] = levels(sregs.cr0, sregs.cr4, sregs.efer);
        registers
    }

    /// The guest has carried out a `HLT`: its own, or it is where the debugger has put one.
    fn halted(&mut self) -> Option<Exit> {
        let rip = self.regs().rip;
        if let Some(stops) = self.stops {
            let at = rip.wrapping_sub(1);
            let is_breakpoint = stops.shared.has_breakpoint(at);
            // Another instruction is there again if the debugger has taken its breakpoint away.
            if is_breakpoint || self.code_at(at).is_some_and(|byte| byte != HALT) {
                // What is there, or is there again, is still to come.
                self.set(Reg::Rip, at);
                if is_breakpoint {
                    self.halt(reason::BREAKPOINT);
                }
                return None;
            }
        }
        self.next_rip = rip;
        if self.step == Step::Wanted {
            self.step = Step::Done;
        }
        Some(Exit::Hlt)
    }

    /// The byte of code at this value of `RIP`.
    fn code_at(&mut self, rip: u64) -> Option<u8> {
        let mut view = CodeView::of(self);
        view.linear = view.linear.wrapping_add(rip.wrapping_sub(self.regs().rip));
        let mut bytes = [0; 15];
        matches!(view.fetch(self.memory, &mut bytes), Ok((1.., _))).then_some(bytes[0])
    }

    /// Whether the guest is about to take an interrupt in front of a `HLT`, maybe that of `STI; HLT` where the host's processor has
    /// forgotten the shadow of the `STI`. Then the `HLT` comes first, as it may on every processor.
    fn halts_first(&mut self) -> bool {
        let is_interrupt = self.event.0 & event::TYPE_MASK == event::TYPE_INTR;
        let waits = self.window != InterruptWindow::Nothing || self.event.is_some() && is_interrupt;
        // Behind a `HLT` that it has carried out it may take one before the next.
        let is_between = matches!(self.pending, Pending::Nothing) && self.next_rip == 0;
        let rip = self.regs().rip;
        self.is_forgetful
            && waits
            && is_between
            && self.get(Reg::Cpl) == 0
            && self.code_at(rip) == Some(HALT)
    }

    /// Gives the guest what waits for it, as far as it takes it now; [`Exit::InterruptWindow`] if it could take what was announced.
    fn deliver(&mut self) -> Option<Exit> {
        let mut is_ready = self.fd.get_kvm_run().ready_for_interrupt_injection != 0;
        if self.step != Step::Nothing {
            let kind = self.event.0 & event::TYPE_MASK;
            if self.event.is_some() && kind != event::TYPE_INTR && kind != event::TYPE_NMI {
                self.exception(self.event);
                self.event = Event::NONE;
            }
            self.fd.get_kvm_run().request_interrupt_window = 0;
            return None;
        }
        if is_ready && self.halts_first() {
            let next = self.regs().rip.wrapping_add(1);
            self.set(Reg::Rip, next);
            return self.halted();
        }
        if self.event.is_some() {
            let event = self.event;
            match event.0 & event::TYPE_MASK {
                event::TYPE_INTR if !is_ready => {}
                event::TYPE_INTR => {
                    self.interrupt(event.vector());
                    self.event = Event::NONE;
                }
                event::TYPE_NMI => {
                    let result = self.fd.nmi();
                    self.note(result);
                    self.event = Event::NONE;
                }
                _ => {
                    self.exception(event);
                    self.event = Event::NONE;
                }
            }
            // One at a time.
            is_ready = false;
        }
        match self.window {
            InterruptWindow::Exit if is_ready => {
                self.window = InterruptWindow::Nothing;
                return Some(Exit::InterruptWindow);
            }
            InterruptWindow::DeliverVirq(vector) if is_ready => {
                self.interrupt(vector);
                self.window = InterruptWindow::Nothing;
            }
            _ => {}
        }
        let waits = self.event.is_some() || self.window != InterruptWindow::Nothing;
        self.fd.get_kvm_run().request_interrupt_window = waits.into();
        None
    }

    /// Sets the timer, if it would be late.
    fn arm(&mut self, now: u64) {
        let kicks = KICKS.with(|kicks| kicks.load(SeqCst));
        if std::mem::replace(&mut self.kicks, kicks) != kicks {
            self.armed = 0;
        }
        if (now..=self.deadline).contains(&self.armed) {
            return;
        }
        let left = Duration::from_nanos(self.clock.duration(self.deadline - now) + 1);
        let expiration = Expiration::OneShot(TimeSpec::from_duration(left));
        let result = self.timer.set(expiration, TimerSetTimeFlags::empty());
        self.note(result);
        self.armed = self.deadline;
    }

    /// The next of the accesses of a string instruction.
    fn next_port(&mut self) -> Option<Exit> {
        let ports = self.ports.as_mut()?;
        let size = usize::from(ports.size);
        if ports.left < size {
            self.ports = None;
            return None;
        }
        let place = ports.next;
        ports.next = place.wrapping_add(size);
        ports.left -= size;
        let value = ports.write.then(|| {
            let mut bytes = [0; 8];
            // SAFETY: KVM has left `size` bytes there, at most four, in the memory that it shares as long as `fd` is open. It does not change
            // them before it is entered again.
            unsafe { ptr::copy_nonoverlapping(place, bytes.as_mut_ptr(), size) };
            u64::from_le_bytes(bytes)
        });
        self.pending =
            if value.is_some() { Pending::Answered } else { Pending::Bytes(place, size) };
        let (address, size) = (ports.port.into(), ports.size);
        Some(Exit::Access(Access { space: Space::Port, address, size, value }))
    }

    /// `CR8` of the guest: KVM has put it there when the guest was left.
    fn present_cr8(&mut self) -> u8 {
        self.fd.get_kvm_run().cr8 as u8 & 0xf
    }

    /// Enters the guest once. `None`: nothing to tell.
    fn enter(&mut self) -> Option<Exit> {
        self.sregs = None;
        self.next_rip = 0;
        self.pending = Pending::Nothing;
        let mut ports = None;
        let exit = match self.fd.run() {
            Ok(VcpuExit::IoIn(port, data)) => {
                ports = Some((port, data.as_mut_ptr(), data.len(), false));
                None
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                ports = Some((port, data.as_ptr().cast_mut(), data.len(), true));
                None
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                self.pending = Pending::Bytes(data.as_mut_ptr(), data.len());
                let size = data.len() as u8;
                Some(Exit::Access(Access { space: Space::Memory, address, size, value: None }))
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                self.pending = Pending::Answered;
                let mut bytes = [0; 8];
                let size = data.len().min(bytes.len());
                bytes[..size].copy_from_slice(&data[..size]);
                let (size, value) = (size as u8, Some(u64::from_le_bytes(bytes)));
                Some(Exit::Access(Access { space: Space::Memory, address, size, value }))
            }
            Ok(VcpuExit::X86Rdmsr(read)) => {
                self.pending = Pending::Msr;
                let address = read.index.into();
                Some(Exit::Access(Access { space: Space::Msr, address, size: 8, value: None }))
            }
            Ok(VcpuExit::X86Wrmsr(write)) => {
                self.pending = Pending::Msr;
                let (address, value) = (write.index.into(), Some(write.data));
                Some(Exit::Access(Access { space: Space::Msr, address, size: 8, value }))
            }
            Ok(VcpuExit::Hlt) => return self.halted(),
            Ok(VcpuExit::Shutdown) => Some(Exit::Shutdown),
            Ok(VcpuExit::FailEntry(code, _)) => Some(Exit::InvalidState { why: NO_ENTRY, code }),
            Ok(VcpuExit::InternalError) => {
                // SAFETY: KVM has left for an internal error, so this is what the union has.
                Some(internal_error(unsafe {
                    self.fd.get_kvm_run().__bindgen_anon_1.internal.suberror
                }))
            }
            // Nothing else is asked for.
            Ok(VcpuExit::Debug(_)) => {
                self.step = Step::Done;
                None
            }
            // The machine's controller may now have an interrupt for it.
            Ok(VcpuExit::SetTpr) => Some(Exit::Recall { events: 0 }),
            Ok(VcpuExit::IrqWindowOpen | VcpuExit::Intr | VcpuExit::Nmi) => None,
            Ok(_) => Some(report(Exit::Unknown(self.fd.get_kvm_run().exit_reason.into()))),
            Err(error) => match Errno::from_raw_os_error(error.errno()) {
                Errno::INTR | Errno::AGAIN => None,
                _ => Some(report(Exit::HostError(error.errno() as u64))),
            },
        };
        if let Some((port, next, length, write)) = ports {
            // SAFETY: KVM has left for an access to ports, so this is what the union has.
            let io = unsafe { self.fd.get_kvm_run().__bindgen_anon_1.io };
            self.ports = Some(Ports { port, size: io.size.clamp(1, 4), write, next, left: length });
            return self.next_port();
        }
        exit
    }
}

impl Drop for KvmVcpu<'_> {
    fn drop(&mut self) {
        IMMEDIATE_EXIT.set(ptr::null_mut());
    }
}

/// Whose fault an internal error of KVM's is: the guest's, if it executes something that KVM would have to emulate and cannot (code in a
/// device's memory, say), or delivers an event through tables that are a device's memory. The rest is KVM's.
fn internal_error(suberror: u32) -> Exit {
    use kvm_bindings::{
        KVM_EXIT_INTERNAL_ERROR, KVM_INTERNAL_ERROR_DELIVERY_EV, KVM_INTERNAL_ERROR_EMULATION,
        KVM_INTERNAL_ERROR_SIMUL_EX,
    };
    match suberror {
        KVM_INTERNAL_ERROR_EMULATION
        | KVM_INTERNAL_ERROR_SIMUL_EX
        | KVM_INTERNAL_ERROR_DELIVERY_EV => {
            Exit::InvalidState { why: NO_EMULATION, code: suberror.into() }
        }
        _ => report(Exit::Unknown(KVM_EXIT_INTERNAL_ERROR.into())),
    }
}

/// Prints why the vCPU cannot go on, which ends the VM with nothing but an exit code.
fn report(exit: Exit) -> Exit {
    eprintln!("<{}>a vCPU cannot go on: {}", log::ERROR, cause_of(&exit));
    exit
}

/// Whether this processor is QEMU's, which enters guests without the interrupt shadow that they were left in (docs/CAVEATS.md).
fn forgets_shadows() -> bool {
    let has_leaf = __cpuid(leaf::FEATURES).ecx & features_c::HYPERVISOR != 0;
    let found = __cpuid(leaf::HYPERVISOR);
    let signature = [found.ebx, found.ecx, found.edx].map(u32::to_le_bytes);
    has_leaf && signature.as_flattened() == b"TCGTCGTCGTCG"
}

/// Levels of page tables in this mode, as [`register::LEVELS`] says.
fn levels(cr0: u64, cr4: u64, efer: u64) -> u64 {
    match (cr0 & cr0::PG != 0, efer & efer::LMA != 0, cr4 & cr4::LA57 != 0) {
        (false, ..) => 0,
        (true, true, is_deep) => 4 + u64::from(is_deep),
        // Of 32-bit code.
        (true, false, _) => 2,
    }
}

/// Where a general register is.
fn place(regs: &mut kvm_regs, register: Gpr) -> &mut u64 {
    match register {
        Gpr::Rax => &mut regs.rax,
        Gpr::Rcx => &mut regs.rcx,
        Gpr::Rdx => &mut regs.rdx,
        Gpr::Rbx => &mut regs.rbx,
        Gpr::Rsp => &mut regs.rsp,
        Gpr::Rbp => &mut regs.rbp,
        Gpr::Rsi => &mut regs.rsi,
        Gpr::Rdi => &mut regs.rdi,
        Gpr::R8 => &mut regs.r8,
        Gpr::R9 => &mut regs.r9,
        Gpr::R10 => &mut regs.r10,
        Gpr::R11 => &mut regs.r11,
        Gpr::R12 => &mut regs.r12,
        Gpr::R13 => &mut regs.r13,
        Gpr::R14 => &mut regs.r14,
        Gpr::R15 => &mut regs.r15,
    }
}

/// The MSR that a register is.
fn msr_of(register: Reg) -> Option<u32> {
    Some(match register {
        Reg::Star => STAR,
        Reg::Lstar => LSTAR,
        Reg::Cstar => CSTAR,
        Reg::Sfmask => SFMASK,
        Reg::KernelGsBase => KERNEL_GS_BASE,
        Reg::SysenterCs => SYSENTER_CS,
        Reg::SysenterEsp => SYSENTER_ESP,
        Reg::SysenterEip => SYSENTER_EIP,
        Reg::Pat => PAT,
        _ => return None,
    })
}

/// A segment as KVM has it. Attributes are those of a descriptor, without the bits of the limit (AMD APM vol. 2, section 15.5).
fn to_kvm(segment: Segment) -> kvm_segment {
    let bits = |shift: u32, mask: u16| (segment.attrib >> shift & mask) as u8;
    kvm_segment {
        base: segment.base,
        limit: segment.limit,
        selector: segment.selector,
        type_: bits(0, 15),
        s: bits(4, 1),
        dpl: bits(5, 3),
        present: bits(7, 1),
        avl: bits(8, 1),
        l: bits(9, 1),
        db: bits(10, 1),
        g: bits(11, 1),
        unusable: 1 - bits(7, 1),
        padding: 0,
    }
}

fn from_kvm(segment: &kvm_segment) -> Segment {
    let parts = [
        (segment.type_, 0),
        (segment.s, 4),
        (segment.dpl, 5),
        (segment.present, 7),
        (segment.avl, 8),
        (segment.l, 9),
        (segment.db, 10),
        (segment.g, 11),
    ];
    Segment {
        selector: segment.selector,
        attrib: parts.iter().fold(0, |all, (part, shift)| all | u16::from(*part) << shift),
        limit: segment.limit,
        base: segment.base,
    }
}

/// Where a segment is, or a table.
enum Place<'a> {
    Segment(&'a mut kvm_segment),
    Table(&'a mut kvm_dtable),
}

fn place_of(sregs: &mut kvm_sregs, segment: Seg) -> Place<'_> {
    Place::Segment(match segment {
        Seg::Es => &mut sregs.es,
        Seg::Cs => &mut sregs.cs,
        Seg::Ss => &mut sregs.ss,
        Seg::Ds => &mut sregs.ds,
        Seg::Fs => &mut sregs.fs,
        Seg::Gs => &mut sregs.gs,
        Seg::Ldtr => &mut sregs.ldt,
        Seg::Tr => &mut sregs.tr,
        Seg::Gdtr => return Place::Table(&mut sregs.gdt),
        Seg::Idtr => return Place::Table(&mut sregs.idt),
    })
}

impl Vcpu for KvmVcpu<'_> {
    fn gpr(&mut self, register: Gpr) -> u64 {
        *place(self.regs(), register)
    }

    fn set_gpr(&mut self, register: Gpr, value: u64) {
        *place(self.change_regs(), register) = value;
    }

    fn get(&mut self, register: Reg) -> u64 {
        match register {
            Reg::Rip => self.regs().rip,
            Reg::Rflags => self.regs().rflags,
            // KVM keeps it, and takes no interrupt in it.
            Reg::InterruptShadow => 0,
            Reg::Cr0 => self.sregs().cr0,
            Reg::Cr2 => self.sregs().cr2,
            Reg::Cr3 => self.sregs().cr3,
            Reg::Cr4 => self.sregs().cr4,
            Reg::Efer => self.sregs().efer,
            Reg::Cpl => self.sregs().ss.dpl.into(),
            Reg::Dr6 | Reg::Dr7 => {
                let result = self.fd.get_debug_regs();
                let debug = self.note(result).unwrap_or_default();
                if register == Reg::Dr6 { debug.dr6 } else { debug.dr7 }
            }
            Reg::TscOffset => self.tsc_offset,
            Reg::Xcr0 => {
                let result = self.fd.get_xcrs();
                self.note(result).map_or(0, |xcrs| xcrs.xcrs[0].value)
            }
            _ => msr_of(register).map_or(0, |index| self.msr(index)),
        }
    }

    fn set(&mut self, register: Reg, value: u64) {
        match register {
            // Behind a `HLT` it is already.
            Reg::Rip if self.regs().rip == value => {}
            Reg::Rip => self.change_regs().rip = value,
            Reg::Rflags => self.change_regs().rflags = value,
            Reg::InterruptShadow => {}
            Reg::Cr0 => self.change_sregs(|sregs| sregs.cr0 = value),
            Reg::Cr2 => self.change_sregs(|sregs| sregs.cr2 = value),
            Reg::Cr3 => self.change_sregs(|sregs| sregs.cr3 = value),
            Reg::Cr4 => self.change_sregs(|sregs| sregs.cr4 = value),
            Reg::Efer => self.change_sregs(|sregs| sregs.efer = value),
            Reg::Cpl => self.change_sregs(|sregs| sregs.ss.dpl = value as u8 & 3),
            Reg::Dr6 | Reg::Dr7 => {
                let result = self.fd.get_debug_regs().and_then(|mut debug| {
                    *(if register == Reg::Dr6 { &mut debug.dr6 } else { &mut debug.dr7 }) = value;
                    self.fd.set_debug_regs(&debug)
                });
                self.note(result);
            }
            Reg::TscOffset => self.set_tsc_offset(value),
            Reg::Xcr0 => {
                let mut xcrs = kvm_xcrs { nr_xcrs: 1, ..Default::default() };
                xcrs.xcrs[0].value = value;
                let result = self.fd.set_xcrs(&xcrs);
                self.note(result);
            }
            _ => {
                if let Some(index) = msr_of(register) {
                    self.set_msr(index, value);
                }
            }
        }
    }

    fn segment(&mut self, segment: Seg) -> Segment {
        match place_of(&mut self.sregs(), segment) {
            Place::Segment(found) => from_kvm(found),
            Place::Table(table) => {
                Segment { base: table.base, limit: table.limit.into(), ..Segment::default() }
            }
        }
    }

    fn set_segment(&mut self, segment: Seg, value: Segment) {
        self.change_sregs(|sregs| match place_of(sregs, segment) {
            Place::Segment(place) => *place = to_kvm(value),
            Place::Table(table) => {
                table.base = value.base;
                table.limit = value.limit as u16;
            }
        });
    }

    fn next_rip(&mut self) -> u64 {
        self.next_rip
    }

    fn instruction_bytes(&mut self) -> ([u8; 16], usize) {
        ([0; 16], 0)
    }

    fn complete_access(&mut self, value: Option<u64>) {
        match self.pending {
            Pending::Bytes(place, size) => {
                let bytes = value.unwrap_or(u64::MAX).to_le_bytes();
                // SAFETY: KVM has said that it reads `size` bytes there, at most eight, in the memory that it shares as long as `fd` is open.
                unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), place, size.min(bytes.len())) };
            }
            Pending::Msr => {
                let run = self.fd.get_kvm_run();
                run.__bindgen_anon_1.msr.error = u8::from(value.is_none());
                // Of a write it has been read.
                run.__bindgen_anon_1.msr.data = value.unwrap_or(0);
            }
            Pending::Nothing | Pending::Answered => return,
        }
        self.pending = Pending::Answered;
    }

    const KEEPS_CR8: bool = true;

    fn cr8(&mut self) -> u8 {
        self.known_cr8 = self.present_cr8();
        self.known_cr8
    }

    fn set_cr8(&mut self, value: u8) {
        self.known_cr8 = value;
        self.fd.get_kvm_run().cr8 = value.into();
    }

    fn event(&mut self) -> Event {
        self.event
    }

    fn set_event(&mut self, event: Event) {
        self.event = event;
    }

    fn set_window(&mut self, wanted: InterruptWindow) {
        self.window = wanted;
    }

    fn has_window(&mut self) -> bool {
        self.window != InterruptWindow::Nothing
    }

    fn set_deadline(&mut self, tsc: u64) {
        self.deadline = tsc;
    }

    fn stolen(&mut self) -> u64 {
        // No guest has the record that would say it.
        0
    }

    fn set_hlt_exits(&mut self, _: bool) {
        // Each is an exit.
    }

    fn flush_tlb(&mut self) {
        // KVM does it when control registers change, and has no other way.
        for _ in 0..2 {
            self.change_sregs(|sregs| sregs.cr4 ^= cr4::PGE);
            self.put_sregs();
        }
    }

    fn run(&mut self) -> Exit {
        if let Some(exit) = self.next_port() {
            return exit;
        }
        self.put_sregs();
        loop {
            self.attend();
            if let Some(exit) = self.deliver() {
                return exit;
            }
            if let Some(error) = self.failed.take() {
                return report(Exit::HostError(error.raw_os_error().unwrap_or(0) as u64));
            }
            // From here on a kick is not lost: it comes as a signal, which leaves its mark.
            // One that is asked to stop lets KVM finish an instruction.
            self.fd.set_kvm_immediate_exit(self.is_asked.into());
            compiler_fence(SeqCst);
            self.seat.is_in_guest.store(true, SeqCst);
            let events = self.seat.take();
            let now = tsc();
            let exit = if events != 0 {
                Some(Exit::Recall { events })
            } else if now >= self.deadline {
                Some(Exit::Deadline)
            } else {
                if self.deadline != u64::MAX {
                    self.arm(now);
                }
                self.enter()
            };
            self.seat.is_in_guest.store(false, SeqCst);
            if let Some(exit) = exit {
                return exit;
            }
            if self.present_cr8() != self.known_cr8 {
                // What waits for the guest may not be for it any longer.
                return Exit::Recall { events: 0 };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn internal_errors_are_the_guests_fault_or_kvms() {
        let fault = |suberror| matches!(internal_error(suberror), Exit::InvalidState { .. });
        assert_eq!([0, 1, 2, 3, 4, 5].map(fault), [false, true, true, true, false, false]);
        assert_eq!(internal_error(4), Exit::Unknown(17));
    }

    #[test]
    fn segments_come_back() {
        for attrib in [0xa9b, 0xc93, 0x8b, 0x82, 0xcf3, 0] {
            let segment = Segment { selector: 0x10, attrib, limit: 0xffff_ffff, base: 0x1234 };
            let kvm = to_kvm(segment);
            assert_eq!(from_kvm(&kvm), segment);
            assert_eq!(kvm.unusable, u8::from(attrib & 0x80 == 0));
        }
        let code = to_kvm(Segment { attrib: 0xa9b, ..Segment::default() });
        assert_eq!((code.type_, code.s, code.l, code.db, code.g), (11, 1, 1, 0, 1));
    }
}

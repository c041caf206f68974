//! KVM vCPU as an [`X86Vcpu`] of the VMM library.
//!
//! General registers lie in memory shared with KVM; all others are read on demand. The result of a
//! device access is written to shared memory, too; KVM completes the instruction at the next entry.
//! Code that changes registers in between must complete the instruction first
//! ([`KvmVcpu::complete`]).

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
use proto::hosted::debug::{HALT, reason, register};
use proto::hosted::log;
use rustix::io::Errno;
use vmm_mem::GuestMemory;
use vmm_sys_util::signal::register_signal_handler;
use vmm_vcpu::{CounterClock, Vcpu};
use vmm_x86::registers::{Group, store_each};
use vmm_x86::walk::CodeView;
use vmm_x86::{
    Access, Event, Exit, Gpr, Groups, InterruptWindow, Reg, Registers, Seg, Segment, Space, X86Vcpu,
};

use crate::debug::{self, DebugStops};
use crate::error::cause_of;
use crate::vcpu_thread::{VcpuThread, tsc};
use crate::{Error, calls};

/// Signal that makes a thread leave the guest.
pub const KICK: Signal = Signal::SIGUSR1;
/// Reasons of KVM exits that the guest causes.
const NO_ENTRY: &str = "KVM cannot enter the guest with its registers (KVM_EXIT_FAIL_ENTRY)";
const NO_EMULATION: &str =
    "KVM cannot emulate a guest instruction (KVM_EXIT_INTERNAL_ERROR), suberror";

thread_local! {
    /// `immediate_exit` of this thread's vCPU.
    static IMMEDIATE_EXIT: Cell<*mut u8> = const { Cell::new(ptr::null_mut()) };
    /// Number of kicks of this thread.
    static KICKS: AtomicU64 = const { AtomicU64::new(0) };
}

/// Signal handler. Sets `immediate_exit`, so a signal just before a guest entry makes KVM exit
/// immediately.
extern "C" fn kicked(_: c_int, _: *mut nix::libc::siginfo_t, _: *mut c_void) {
    KICKS.with(|kicks| kicks.fetch_add(1, SeqCst));
    let flag = IMMEDIATE_EXIT.get();
    if !flag.is_null() {
        // SAFETY: the thread's own `KvmVcpu` has set the address, and clears it before it releases
        // the memory. Only KVM and this thread access it.
        unsafe { flag.write_volatile(1) };
    }
}

/// Installs the handler of the kick signal, once per process.
pub fn install_kick_handler() -> Result<(), Error> {
    register_signal_handler(KICK as c_int, kicked)
        .map_err(Error::host("install the signal handler"))
}

/// State of an instruction that KVM has not completed.
#[derive(Clone, Copy)]
enum Pending {
    /// No such instruction.
    Nothing,
    /// The instruction can be completed.
    Answered,
    /// KVM expects this many bytes at this address.
    Bytes(*mut u8, usize),
    /// KVM expects the value of an MSR.
    Msr,
}

/// Accesses of one `INS` or `OUTS` that KVM reports together.
struct Ports {
    port: u16,
    size: u8,
    write: bool,
    /// Next value and end of the values.
    next: *mut u8,
    left: usize,
}

/// A KVM vCPU.
pub struct KvmVcpu<'s> {
    fd: VcpuFd,
    vcpu_thread: &'s VcpuThread,
    /// Guest memory, to read code.
    memory: &'s GuestMemory,
    clock: CounterClock,
    /// The host CPU does not preserve interrupt shadows.
    is_forgetful: bool,
    timer: Timer,
    /// Deadline of the armed timer as a time-stamp counter value; 0: it may have expired.
    armed: u64,
    /// Number of handled kicks; the timer causes kicks, too.
    kicks: u64,
    deadline: u64,
    sregs: Option<kvm_sregs>,
    /// Special registers have been changed here.
    sregs_changed: bool,
    tsc_offset: u64,
    /// `CR8` as the VM's local APIC knows it.
    known_cr8: u8,
    pending: Pending,
    ports: Option<Ports>,
    event: Event,
    window: InterruptWindow,
    /// Address after the `HLT` that caused the exit.
    next_rip: u64,
    /// Error outside of [`Vcpu::run`].
    failed: Option<io::Error>,
    /// Debugger stops, if they are enabled.
    stops: Option<DebugStops<'s>>,
    /// A stop is requested at the next instruction boundary.
    is_asked: bool,
    /// State of a single step.
    step: StepState,
}

/// State of a single step.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StepState {
    /// No step.
    Nothing,
    /// Requested. The guest takes no interrupts until it is executed.
    Wanted,
    /// Executed.
    Done,
}

impl<'s> KvmVcpu<'s> {
    /// Creates the vCPU from one that has not run. The calling thread must be the one that runs it.
    pub fn new(
        mut fd: VcpuFd,
        vcpu_thread: &'s VcpuThread,
        memory: &'s GuestMemory,
        clock: CounterClock,
        stops: Option<DebugStops<'s>>,
    ) -> Result<Self, Error> {
        let notify = SigevNotify::SigevThreadId {
            signal: KICK,
            thread_id: rustix::thread::gettid().as_raw_nonzero().get(),
            si_value: 0,
        };
        let timer = Timer::new(ClockId::CLOCK_MONOTONIC, SigEvent::new(notify))
            .map_err(Error::host("create a timer"))?;
        if stops.is_some() {
            fd.set_guest_debug(&debug::control(false))
                .map_err(Error::host("enable debug exits of a vCPU"))?;
        }
        IMMEDIATE_EXIT.set(&raw mut fd.get_kvm_run().immediate_exit);
        Ok(Self {
            fd,
            vcpu_thread,
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
            step: StepState::Nothing,
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

    /// Lets KVM complete the pending instruction before registers are changed.
    fn complete(&mut self) {
        // Iterates for a string instruction, whose further accesses are discarded.
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

    /// Returns the general registers for modification.
    fn change_regs(&mut self) -> &mut kvm_regs {
        self.complete();
        // The interruptibility of the guest must be determined again.
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
        // All together, because some are only valid with others.
        self.sregs_changed = true;
    }

    /// Writes the special registers to KVM if they have changed.
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

    /// Sets MSRs, each with its value, by one call of KVM.
    fn set_msrs(&mut self, values: &[(u32, u64)]) {
        let entry = |&(index, data)| kvm_msr_entry { index, data, ..Default::default() };
        let entries: Vec<_> = values.iter().map(entry).collect();
        let Ok(msrs) = Msrs::from_entries(&entries) else { return };
        let result = self.fd.set_msrs(&msrs);
        self.note(result);
    }

    fn set_tsc_offset(&mut self, offset: u64) {
        self.tsc_offset = offset;
        let result = calls::set_tsc_offset(&self.fd, offset);
        self.note(result);
    }

    /// Injects an interrupt at the next entry.
    fn interrupt(&mut self, vector: u8) {
        let result = calls::interrupt(&self.fd, vector);
        self.note(result);
        self.fd.get_kvm_run().ready_for_interrupt_injection = 0;
    }

    /// Injects an exception at the next entry.
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

    /// Requests a debugger stop, if it is still wanted.
    pub fn stop(&mut self) {
        self.is_asked = self.stops.is_some();
        self.service_debug_stop();
    }

    /// Performs a requested stop, unless KVM has an incomplete instruction.
    fn service_debug_stop(&mut self) {
        if self.step == StepState::Done {
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

    /// Stops until the debugger resumes the vCPU.
    fn halt(&mut self, why: u32) {
        let Some(stops) = self.stops else { return };
        // The event state is checked after the resumption.
        self.vcpu_thread.is_in_guest.store(false, SeqCst);
        self.cancel_interrupt();
        let mut registers = self.debug_registers();
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
        self.step = if steps { StepState::Wanted } else { StepState::Nothing };
        // KVM steps from the address in its registers, which must be current.
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

    /// Cancels an injected interrupt: the debugger may continue at another instruction first.
    fn cancel_interrupt(&mut self) {
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

    /// Returns the registers in the debugger's format.
    fn debug_registers(&mut self) -> [u64; register::COUNT] {
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

    /// Handles an executed `HLT`: the guest's own, or a breakpoint of the debugger.
    fn halted(&mut self) -> Option<Exit> {
        let rip = self.regs().rip;
        if let Some(stops) = self.stops {
            let at = rip.wrapping_sub(1);
            let is_breakpoint = stops.shared.has_breakpoint(at);
            // The debugger may have removed the breakpoint and restored the instruction.
            if is_breakpoint || self.code_at(at).is_some_and(|byte| byte != HALT) {
                // The restored instruction has not been executed.
                self.set(Reg::Rip, at);
                if is_breakpoint {
                    self.halt(reason::BREAKPOINT);
                }
                return None;
            }
        }
        self.next_rip = rip;
        if self.step == StepState::Wanted {
            self.step = StepState::Done;
        }
        Some(Exit::Hlt)
    }

    /// Returns the code byte at this value of `RIP`.
    fn code_at(&mut self, rip: u64) -> Option<u8> {
        let mut view = CodeView::of(self);
        view.linear = view.linear.wrapping_add(rip.wrapping_sub(self.regs().rip));
        let mut bytes = [0; 15];
        matches!(view.fetch(self.memory, &mut bytes), Ok((1.., _))).then_some(bytes[0])
    }

    /// Returns whether the guest would take an interrupt at a `HLT`, possibly that of `STI; HLT` on
    /// a host CPU that has lost the shadow of the `STI`. The `HLT` is then executed first, which
    /// every CPU may do.
    fn hlt_precedes_interrupt(&mut self) -> bool {
        let is_interrupt = self.event.0 & event::TYPE_MASK == event::TYPE_INTR;
        let waits = self.window != InterruptWindow::Nothing || self.event.is_some() && is_interrupt;
        // After an executed `HLT`, an interrupt may precede the next one.
        let is_between = matches!(self.pending, Pending::Nothing) && self.next_rip == 0;
        let rip = self.regs().rip;
        self.is_forgetful
            && waits
            && is_between
            && self.get(Reg::Cpl) == 0
            && self.code_at(rip) == Some(HALT)
    }

    /// Injects pending events as far as the guest is interruptible; returns
    /// [`Exit::InterruptWindow`] if an announced interrupt could be delivered.
    fn deliver(&mut self) -> Option<Exit> {
        let mut is_ready = self.fd.get_kvm_run().ready_for_interrupt_injection != 0;
        if self.step != StepState::Nothing {
            let kind = self.event.0 & event::TYPE_MASK;
            if self.event.is_some() && kind != event::TYPE_INTR && kind != event::TYPE_NMI {
                self.exception(self.event);
                self.event = Event::NONE;
            }
            self.fd.get_kvm_run().request_interrupt_window = 0;
            return None;
        }
        if is_ready && self.hlt_precedes_interrupt() {
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

    /// Arms the timer if its current deadline is too late.
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

    /// Returns the next access of a string instruction.
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
            // SAFETY: KVM has written `size` bytes there, at most four, in the memory that it
            // shares as long as `fd` is open. It does not change them before the next entry.
            unsafe { ptr::copy_nonoverlapping(place, bytes.as_mut_ptr(), size) };
            u64::from_le_bytes(bytes)
        });
        self.pending =
            if value.is_some() { Pending::Answered } else { Pending::Bytes(place, size) };
        let (address, size) = (ports.port.into(), ports.size);
        Some(Exit::Access(Access { space: Space::Port, address, size, value }))
    }

    /// Returns the guest's `CR8`, which KVM has stored at the exit.
    fn present_cr8(&mut self) -> u8 {
        self.fd.get_kvm_run().cr8 as u8 & 0xf
    }

    /// Enters the guest once. `None`: no exit to report.
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
                // SAFETY: the exit reason is an internal error, which selects this member of the
                // union.
                Some(internal_error(unsafe {
                    self.fd.get_kvm_run().__bindgen_anon_1.internal.suberror
                }))
            }
            // No other exits are enabled.
            Ok(VcpuExit::Debug(_)) => {
                self.step = StepState::Done;
                None
            }
            // The VM's interrupt controller may have an interrupt that is deliverable now.
            Ok(VcpuExit::SetTpr) => Some(Exit::Recall { events: 0 }),
            Ok(VcpuExit::IrqWindowOpen | VcpuExit::Intr | VcpuExit::Nmi) => None,
            Ok(_) => Some(report_failure(Exit::Unknown(self.fd.get_kvm_run().exit_reason.into()))),
            Err(error) => match Errno::from_raw_os_error(error.errno()) {
                Errno::INTR | Errno::AGAIN => None,
                _ => Some(report_failure(Exit::HostError(error.errno() as u64))),
            },
        };
        if let Some((port, next, length, write)) = ports {
            // SAFETY: the exit reason is a port access, which selects this member of the union.
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

/// Attributes an internal error of KVM: to the guest if it executes an instruction that KVM would
/// have to emulate and cannot (such as code in device memory), or delivers an event through tables
/// in device memory; otherwise to KVM.
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
        _ => report_failure(Exit::Unknown(KVM_EXIT_INTERNAL_ERROR.into())),
    }
}

/// Prints the reason of a vCPU failure, which ends the VM with an exit code only.
fn report_failure(exit: Exit) -> Exit {
    eprintln!("<{}>vCPU failure: {}", log::ERROR, cause_of(&exit));
    exit
}

/// Returns whether the CPU is QEMU's, which enters guests without the interrupt shadow of their
/// exit (docs/CAVEATS.md).
fn forgets_shadows() -> bool {
    let has_leaf = __cpuid(leaf::FEATURES).ecx & features_c::HYPERVISOR != 0;
    let found = __cpuid(leaf::HYPERVISOR);
    let signature = [found.ebx, found.ecx, found.edx].map(u32::to_le_bytes);
    has_leaf && signature.as_flattened() == b"TCGTCGTCGTCG"
}

/// Returns the levels of page tables in this mode, as in [`register::LEVELS`].
fn levels(cr0: u64, cr4: u64, efer: u64) -> u64 {
    match (cr0 & cr0::PG != 0, efer & efer::LMA != 0, cr4 & cr4::LA57 != 0) {
        (false, ..) => 0,
        (true, true, is_deep) => 4 + u64::from(is_deep),
        // 32-bit code.
        (true, false, _) => 2,
    }
}

/// Returns a general register.
fn gpr_slot(regs: &mut kvm_regs, register: Gpr) -> &mut u64 {
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

/// Returns a special register of the group [`Group::Control`].
fn sregs_slot(sregs: &mut kvm_sregs, register: Reg) -> Option<&mut u64> {
    Some(match register {
        Reg::Cr0 => &mut sregs.cr0,
        Reg::Cr2 => &mut sregs.cr2,
        Reg::Cr3 => &mut sregs.cr3,
        Reg::Cr4 => &mut sregs.cr4,
        Reg::Efer => &mut sregs.efer,
        _ => return None,
    })
}

/// Returns the MSR of a register.
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

/// Converts a segment to KVM's format. Attributes are those of a descriptor, without the limit bits
/// (AMD APM vol. 2, section 15.5).
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

/// A segment register or descriptor-table register.
enum SegmentSlot<'a> {
    Segment(&'a mut kvm_segment),
    Table(&'a mut kvm_dtable),
}

fn segment_slot(sregs: &mut kvm_sregs, segment: Seg) -> SegmentSlot<'_> {
    SegmentSlot::Segment(match segment {
        Seg::Es => &mut sregs.es,
        Seg::Cs => &mut sregs.cs,
        Seg::Ss => &mut sregs.ss,
        Seg::Ds => &mut sregs.ds,
        Seg::Fs => &mut sregs.fs,
        Seg::Gs => &mut sregs.gs,
        Seg::Ldtr => &mut sregs.ldt,
        Seg::Tr => &mut sregs.tr,
        Seg::Gdtr => return SegmentSlot::Table(&mut sregs.gdt),
        Seg::Idtr => return SegmentSlot::Table(&mut sregs.idt),
    })
}

impl X86Vcpu for KvmVcpu<'_> {
    fn gpr(&mut self, register: Gpr) -> u64 {
        *gpr_slot(self.regs(), register)
    }

    fn set_gpr(&mut self, register: Gpr, value: u64) {
        *gpr_slot(self.change_regs(), register) = value;
    }

    fn get(&mut self, register: Reg) -> u64 {
        match register {
            Reg::Rip => self.regs().rip,
            Reg::Rflags => self.regs().rflags,
            // KVM keeps the interrupt shadow and takes no interrupt in it.
            Reg::InterruptShadow => 0,
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
            _ => match msr_of(register) {
                Some(index) => self.msr(index),
                None => sregs_slot(&mut self.sregs(), register).map_or(0, |found| *found),
            },
        }
    }

    fn set(&mut self, register: Reg, value: u64) {
        match register {
            // After a `HLT`, `RIP` already has this value.
            Reg::Rip if self.regs().rip == value => {}
            Reg::Rip => self.change_regs().rip = value,
            Reg::Rflags => self.change_regs().rflags = value,
            Reg::InterruptShadow => {}
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
            _ => match msr_of(register) {
                Some(index) => self.set_msrs(&[(index, value)]),
                None => self.change_sregs(|sregs| {
                    if let Some(place) = sregs_slot(sregs, register) {
                        *place = value;
                    }
                }),
            },
        }
    }

    fn segment(&mut self, segment: Seg) -> Segment {
        match segment_slot(&mut self.sregs(), segment) {
            SegmentSlot::Segment(found) => from_kvm(found),
            SegmentSlot::Table(table) => {
                Segment { base: table.base, limit: table.limit.into(), ..Segment::default() }
            }
        }
    }

    fn set_segment(&mut self, segment: Seg, value: Segment) {
        self.change_sregs(|sregs| match segment_slot(sregs, segment) {
            SegmentSlot::Segment(place) => *place = to_kvm(value),
            SegmentSlot::Table(table) => {
                table.base = value.base;
                table.limit = value.limit as u16;
            }
        });
    }

    fn store(&mut self, registers: &Registers, groups: Groups) {
        if groups.contains(Group::Msrs) {
            let msr = |register| Some((msr_of(register)?, registers[register]));
            let msrs: Vec<_> = Reg::ALL.into_iter().filter_map(msr).collect();
            self.set_msrs(&msrs);
        }
        store_each(self, registers, groups.without(Group::Msrs));
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
                // SAFETY: KVM has reported that it reads `size` bytes there, at most eight, in the
                // memory that it shares as long as `fd` is open.
                unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), place, size.min(bytes.len())) };
            }
            Pending::Msr => {
                let run = self.fd.get_kvm_run();
                run.__bindgen_anon_1.msr.error = u8::from(value.is_none());
                // The value of a write has been read.
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
}

impl Vcpu for KvmVcpu<'_> {
    type Exit = Exit;

    fn set_deadline(&mut self, ticks: u64) {
        self.deadline = ticks;
    }

    fn stolen(&mut self) -> u64 {
        // Guests of this back end have no stolen-time record.
        0
    }

    fn set_wait_exits(&mut self, _: bool) {
        // Every `HLT` exits.
    }

    fn flush_tlb(&mut self) {
        // KVM flushes at changes of control registers, and has no other interface.
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
            self.service_debug_stop();
            if let Some(exit) = self.deliver() {
                return exit;
            }
            if let Some(error) = self.failed.take() {
                return report_failure(Exit::HostError(error.raw_os_error().unwrap_or(0) as u64));
            }
            // A kick is not lost from here on: its signal sets `immediate_exit`. A requested stop
            // lets KVM complete an instruction.
            self.fd.set_kvm_immediate_exit(self.is_asked.into());
            compiler_fence(SeqCst);
            self.vcpu_thread.is_in_guest.store(true, SeqCst);
            let events = self.vcpu_thread.take_events();
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
            self.vcpu_thread.is_in_guest.store(false, SeqCst);
            if let Some(exit) = exit {
                return exit;
            }
            if self.present_cr8() != self.known_cr8 {
                // A pending event may have become obsolete.
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
    fn segments_round_trip() {
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

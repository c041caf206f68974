//! The loop of a virtual CPU: enter the guest, see why it stopped, do what that asks for.
//!
//! Delivery of events. One event fits the slot. Order: what an exit cut short, an exception that emulation
//! raised, a non-maskable interrupt, a maskable interrupt (only if `RFLAGS.IF`, no shadow, slot free). What
//! does not fit stays where it waits (local APIC, 8259, [`Cpu`]) and an interrupt window is asked for; so
//! nothing is dropped and nothing is delivered twice.

use hw_x86::cpuid::leaf;
use hw_x86::paging::{cr0, xcr0};

use crate::MAX_VCPUS;
use crate::backend::{Backend, Event, Gpr, Reg, Seg, Segment};
use crate::board::{Board, Emulated, Outcome, Unknown};
use crate::cpuid::{CpuView, Patch};
use crate::exit::{EXIT_NAMES, Exit, IoExit, MemoryFault};
use crate::length::{FetchCache, Pattern, prefixes};
use crate::msr::Msrs;
use crate::walk::{CodeSize, CodeView};

/// `RFLAGS.IF`.
const RFLAGS_IF: u64 = 1 << 9;
/// `RFLAGS.TF`.
const RFLAGS_TF: u64 = 1 << 8;
/// `DR6.BS`: single step.
const DR6_SINGLE_STEP: u64 = 1 << 14;
/// Vector of a debug exception.
const DEBUG: u8 = 1;
/// Vector of an undefined opcode.
const UNDEFINED: Event = Event::exception(6);
/// General protection, error code 0.
const PROTECTION: Event = Event::exception_code(13, 0);
/// `rax` of a hypercall that does not exist, and of one from user mode (`KVM_ENOSYS`, `KVM_EPERM`).
const HYPERCALL_UNKNOWN: i64 = -1000;
const HYPERCALL_REFUSED: i64 = -1;

/// Why [`Cpu::run`] returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pause {
    /// The host's own events: handle them, tell the machine about input, run again.
    Recall(u64),
    /// The virtual CPU waits with nothing to do until the host's time-stamp counter reaches this
    /// value (`u64::MAX`: no timer), or until something is signalled. Run again after either.
    Idle {
        /// Host time-stamp counter value.
        deadline_tsc: u64,
    },
    /// The machine ended.
    End(Outcome),
}

/// What the virtual CPU is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Activity {
    Running,
    /// After `HLT`.
    Halted,
    /// An application processor before its start-up message.
    Parked,
}

/// A virtual CPU, apart from the registers, which are the back end's.
#[derive(Clone, Debug)]
pub struct Cpu {
    index: usize,
    activity: Activity,
    started: bool,
    nmi: bool,
    /// The window that the back end was asked for.
    window: bool,
    /// The deadline that the back end was told, in machine time.
    deadline: u64,
    /// Something may have to be delivered before the next entry.
    attention: bool,
    xcr0: u64,
    fetch: FetchCache,
    pub(crate) msrs: Msrs,
    exits: [u64; EXIT_NAMES.len()],
}

/// What an exit leads to.
type Flow = Result<(), Pause>;

impl Cpu {
    /// Virtual CPU `index`, which is also its APIC id. CPU 0 starts at the registers that the back end has, others
    /// wait for their start-up message. `physical_bits`: width of physical addresses.
    pub fn new(index: usize, physical_bits: u32) -> Self {
        Self {
            index: index.min(MAX_VCPUS - 1),
            activity: if index == 0 { Activity::Running } else { Activity::Parked },
            started: false,
            nmi: false,
            window: false,
            deadline: 0,
            attention: true,
            xcr0: xcr0::X87,
            fetch: FetchCache::new(),
            msrs: Msrs::new(physical_bits),
            exits: [0; EXIT_NAMES.len()],
        }
    }

    /// The index.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Exits so far, by [`Exit::index`].
    pub fn exits(&self) -> &[u64; EXIT_NAMES.len()] {
        &self.exits
    }

    /// Runs the guest until the host is needed.
    pub fn run<B: Backend, M: Board>(&mut self, vcpu: &mut B, board: &mut M) -> Pause {
        // Between calls anything may have happened.
        self.attention = true;
        loop {
            match self.step(vcpu, board) {
                Ok(()) => {}
                Err(pause) => return pause,
            }
        }
    }

    #[inline]
    fn step<B: Backend, M: Board>(&mut self, vcpu: &mut B, board: &mut M) -> Flow {
        if self.attention || board.attention(self.index) {
            self.prepare(vcpu, board)?;
        }
        let exit = vcpu.run();
        self.exits[exit.index()] += 1;
        match exit {
            Exit::Cpuid => {
                self.cpuid(vcpu, board);
                Ok(())
            }
            Exit::Io(io) if !io.string => {
                self.port(vcpu, board, io);
                Ok(())
            }
            Exit::Msr { write } => {
                self.msr(vcpu, board, write);
                Ok(())
            }
            _ => self.rare(vcpu, board, exit),
        }
    }

    /// Everything that has to be right before the guest is entered.
    fn prepare<B: Backend, M: Board>(&mut self, vcpu: &mut B, board: &mut M) -> Flow {
        self.attention = false;
        if !self.started {
            self.started = true;
            vcpu.set(Reg::TscOffset, board.clock().base().wrapping_neg());
            self.set_xcr0(vcpu, xcr0::X87);
        }
        let signals = board.settle(self.index);
        if let Some(outcome) = signals.end {
            return Err(Pause::End(outcome));
        }
        let signature = |board: &M| board.cpuid().lookup(leaf::FEATURES, 0).0[0];
        if signals.init {
            self.nmi = false;
            self.activity = Activity::Parked;
            vcpu.set_event(Event::NONE);
            start_up(vcpu, 0, signature(board));
        }
        if let (Some(page), Activity::Parked) = (signals.startup, self.activity) {
            start_up(vcpu, page, signature(board));
            self.activity = Activity::Running;
        }
        self.nmi |= signals.nmi;
        let waiting = self.deliver(vcpu, board, signals.interrupt);
        if waiting != self.window {
            self.window = waiting;
            vcpu.set_window(waiting);
        }
        if self.activity != Activity::Running {
            return Err(Pause::Idle { deadline_tsc: board.clock().tsc(signals.deadline) });
        }
        if signals.deadline != self.deadline {
            self.deadline = signals.deadline;
            vcpu.set_deadline(board.clock().tsc(signals.deadline));
        }
        Ok(())
    }

    /// Fills the slot with what comes first; whether something that a window would let through still waits.
    fn deliver<B: Backend, M: Board>(&mut self, vcpu: &mut B, board: &mut M, mut interrupt: bool) -> bool {
        if self.activity == Activity::Parked || !(self.nmi || interrupt) {
            return false;
        }
        if !vcpu.event().is_some() {
            if self.nmi {
                self.nmi = false;
                self.activity = Activity::Running;
                vcpu.set_event(Event::NMI);
            } else if accepts_interrupt(vcpu)
                && let Some(vector) = board.acknowledge(self.index)
            {
                self.activity = Activity::Running;
                vcpu.set_event(Event::interrupt(vector));
                interrupt = board.interrupt_pending(self.index);
            }
        }
        // An NMI needs no window, only a free slot: it is tried again at the next exit.
        self.attention |= self.nmi;
        self.nmi || interrupt
    }

    fn cpuid<B: Backend, M: Board>(&mut self, vcpu: &mut B, board: &mut M) {
        let (number, subleaf) = (vcpu.gpr(Gpr::Rax) as u32, vcpu.gpr(Gpr::Rcx) as u32);
        let (mut values, patch) = board.cpuid().lookup(number, subleaf);
        if patch != Patch::None {
            let cr4 = vcpu.get(Reg::Cr4);
            let view = CpuView { apic_id: self.index as u32, cr4, xcr0: self.xcr0 };
            values = board.cpuid().patch(values, patch, view);
        }
        let Some(next) = self.fetch.next_rip(vcpu, board.memory(), &[Pattern::CPUID]) else {
            return self.lost(vcpu, board);
        };
        vcpu.set_gpr(Gpr::Rax, values[0].into());
        vcpu.set_gpr(Gpr::Rbx, values[1].into());
        vcpu.set_gpr(Gpr::Rcx, values[2].into());
        vcpu.set_gpr(Gpr::Rdx, values[3].into());
        retire(vcpu, next);
    }

    fn port<B: Backend, M: Board>(&mut self, vcpu: &mut B, board: &mut M, io: IoExit) {
        // The processor always says where the instruction after `IN` and `OUT` is (EXITINFO2).
        if io.next_rip == 0 {
            return self.lost(vcpu, board);
        }
        let rax = vcpu.gpr(Gpr::Rax);
        if io.write {
            board.port_out(io.port, io.size, rax as u32 & mask(io.size));
        } else {
            let value = board.port_in(io.port, io.size) & mask(io.size);
            // A 32-bit result clears the upper half, narrower ones leave the rest.
            let kept = if io.size == 4 { 0 } else { rax & !u64::from(mask(io.size)) };
            vcpu.set_gpr(Gpr::Rax, kept | u64::from(value));
        }
        retire(vcpu, io.next_rip);
    }

    fn msr<B: Backend, M: Board>(&mut self, vcpu: &mut B, board: &mut M, write: bool) {
        let pattern = if write { Pattern::WRMSR } else { Pattern::RDMSR };
        let Some(next) = self.fetch.next_rip(vcpu, board.memory(), &[pattern]) else {
            return self.lost(vcpu, board);
        };
        let msr = vcpu.gpr(Gpr::Rcx) as u32;
        let done = if write {
            let value = vcpu.gpr(Gpr::Rdx) << 32 | vcpu.gpr(Gpr::Rax) & 0xffff_ffff;
            self.write_msr(vcpu, board, msr, value)
        } else {
            self.read_msr(vcpu, board, msr).map(|value| {
                vcpu.set_gpr(Gpr::Rax, value & 0xffff_ffff);
                vcpu.set_gpr(Gpr::Rdx, value >> 32);
            })
        };
        match done {
            Some(()) => retire(vcpu, next),
            None => self.raise(vcpu, PROTECTION),
        }
    }

    fn rare<B: Backend, M: Board>(&mut self, vcpu: &mut B, board: &mut M, exit: Exit) -> Flow {
        match exit {
            Exit::Io(io) => {
                let emulated = board.emulate_io(self.index, vcpu, io);
                self.emulated(vcpu, emulated);
            }
            Exit::MemoryFault(fault) => self.memory_fault(vcpu, board, fault)?,
            Exit::Hlt => {
                if self.skip(vcpu, board, &[Pattern::HLT]) {
                    self.activity = Activity::Halted;
                    self.attention = true;
                }
            }
            Exit::Hypercall => self.hypercall(vcpu, board),
            Exit::Window => {
                self.window = false;
                self.attention = true;
            }
            Exit::Deadline => {
                // The deadline is gone from the back end's mind only when a new one is set.
                self.deadline = 0;
                self.attention = true;
            }
            Exit::Recall { events } => return Err(Pause::Recall(events)),
            Exit::Xsetbv => self.xsetbv(vcpu, board),
            Exit::CacheFlush => {
                self.skip(vcpu, board, &[Pattern::WBINVD, Pattern::INVD]);
            }
            Exit::Pause => {
                self.skip(vcpu, board, &[Pattern::PAUSE]);
            }
            Exit::CrAccess { register: 8, write } => self.cr8(vcpu, board, write),
            Exit::Undefined => self.raise(vcpu, UNDEFINED),
            Exit::Protected => self.raise(vcpu, PROTECTION),
            Exit::CrAccess { .. } | Exit::TaskSwitch => self.lost(vcpu, board),
            Exit::Spurious => {}
            Exit::Shutdown => return Err(Pause::End(Outcome::TripleFault)),
            Exit::InvalidState => {
                board.unknown(Unknown::Other("the processor refuses the guest's state", 0));
                return Err(Pause::End(Outcome::TripleFault));
            }
            Exit::HostError(code) => return Err(Pause::End(Outcome::HostError(code))),
            Exit::Unknown(code) => {
                board.unknown(Unknown::Exit(code));
                return Err(Pause::End(Outcome::HostError(code)));
            }
            Exit::Cpuid | Exit::Msr { .. } => {}
        }
        Ok(())
    }

    fn memory_fault<B: Backend, M: Board>(
        &mut self,
        vcpu: &mut B,
        board: &mut M,
        fault: MemoryFault,
    ) -> Flow {
        if vcpu.event().is_some() {
            // An interrupt's stack or table is not memory: no instruction to emulate, and
            // delivering again would end here again.
            board.unknown(Unknown::Other("event delivery outside memory", fault.gpa));
            return Err(Pause::End(Outcome::TripleFault));
        }
        if fault.walk {
            board.unknown(Unknown::Other("page tables outside memory", fault.gpa));
            return Err(Pause::End(Outcome::TripleFault));
        }
        if fault.fetch {
            // Nothing answers, so all bits are 1: FF FF is an undefined opcode.
            board.unknown(Unknown::Other("code outside memory", fault.gpa));
            self.raise(vcpu, UNDEFINED);
            return Ok(());
        }
        let emulated = board.emulate_memory(self.index, vcpu, fault);
        self.emulated(vcpu, emulated);
        Ok(())
    }

    fn emulated<B: Backend>(&mut self, vcpu: &mut B, emulated: Emulated) {
        match emulated {
            Emulated::Next(next) => retire(vcpu, next),
            Emulated::Raise(event) => self.raise(vcpu, event),
            Emulated::Unknown => self.raise(vcpu, UNDEFINED),
        }
    }

    fn hypercall<B: Backend, M: Board>(&mut self, vcpu: &mut B, board: &mut M) {
        let number = vcpu.gpr(Gpr::Rax);
        if !self.skip(vcpu, board, &[Pattern::VMMCALL]) {
            return;
        }
        let result = if vcpu.get(Reg::Cpl) == 0 {
            board.unknown(Unknown::Hypercall(number));
            HYPERCALL_UNKNOWN
        } else {
            HYPERCALL_REFUSED
        };
        vcpu.set_gpr(Gpr::Rax, result as u64);
    }

    /// APM vol. 4, `XSETBV`: register 0 only, x87 always set, AVX only with SSE.
    fn xsetbv<B: Backend, M: Board>(&mut self, vcpu: &mut B, board: &mut M) {
        let Some(next) = self.fetch.next_rip(vcpu, board.memory(), &[Pattern::XSETBV]) else {
            return self.lost(vcpu, board);
        };
        let value = vcpu.gpr(Gpr::Rdx) << 32 | vcpu.gpr(Gpr::Rax) & 0xffff_ffff;
        let register = vcpu.gpr(Gpr::Rcx) as u32;
        let allowed = board.cpuid().xcr0_allowed();
        let avx512 = value & xcr0::AVX512;
        let good = register == 0
            && value & !allowed == 0
            && value & xcr0::X87 != 0
            && (value & xcr0::AVX == 0 || value & xcr0::SSE != 0)
            && (avx512 == 0 || avx512 == xcr0::AVX512 && value & xcr0::AVX != 0);
        if !good {
            return self.raise(vcpu, PROTECTION);
        }
        self.set_xcr0(vcpu, value);
        retire(vcpu, next);
    }

    fn set_xcr0<B: Backend>(&mut self, vcpu: &mut B, value: u64) {
        self.xcr0 = value;
        vcpu.set(Reg::Xcr0, value);
    }

    /// `MOV` to and from `CR8` (`[REX.R] 0F 22 /0`, `0F 20 /0`): the task priority.
    fn cr8<B: Backend, M: Board>(&mut self, vcpu: &mut B, board: &mut M, write: bool) {
        let code = CodeView::of(vcpu);
        let mut bytes = [0; 15];
        let Ok((count, _)) = code.fetch(board.memory(), &mut bytes) else {
            return self.lost(vcpu, board);
        };
        let start = prefixes(&bytes[..count], code.size);
        let opcode = if write { 0x22 } else { 0x20 };
        let &[0x0f, second, modrm, ..] = &bytes[start..count] else {
            return self.lost(vcpu, board);
        };
        if second != opcode {
            return self.lost(vcpu, board);
        }
        let rex = if start > 0 && code.size == CodeSize::Bits64 { bytes[start - 1] } else { 0 };
        let extended = rex & 0xf0 == 0x40 && rex & 1 != 0;
        let register = Gpr::from_code(modrm & 7 | u8::from(extended) << 3);
        if write {
            let value = vcpu.gpr(register);
            if value > 15 {
                return self.raise(vcpu, PROTECTION);
            }
            board.set_cr8(self.index, value as u8);
        } else {
            let value = board.cr8(self.index);
            vcpu.set_gpr(register, value.into());
        }
        let rip = vcpu.get(Reg::Rip);
        retire(vcpu, code.advance(rip, start as u64 + 3));
    }

    /// Goes on behind the present instruction; `false` (and `#UD`) if it is none of `patterns`.
    fn skip<B: Backend, M: Board>(&mut self, vcpu: &mut B, board: &mut M, patterns: &[Pattern]) -> bool {
        match self.fetch.next_rip(vcpu, board.memory(), patterns) {
            Some(next) => {
                retire(vcpu, next);
                true
            }
            None => {
                self.lost(vcpu, board);
                false
            }
        }
    }

    /// An exit whose instruction is not what the exit says, or cannot be emulated.
    #[cold]
    fn lost<B: Backend, M: Board>(&mut self, vcpu: &mut B, board: &mut M) {
        let rip = vcpu.get(Reg::Rip);
        let mut bytes = [0; 15];
        // What cannot be read stays 0 in the report.
        let _ = CodeView::of(vcpu).fetch(board.memory(), &mut bytes);
        let mut first = [0; 8];
        first.copy_from_slice(&bytes[..8]);
        board.unknown(Unknown::Instruction { rip, bytes: u64::from_le_bytes(first) });
        self.raise(vcpu, UNDEFINED);
    }

    /// Puts an exception into the slot. What waits is looked at again, since the slot is taken now.
    fn raise<B: Backend>(&mut self, vcpu: &mut B, event: Event) {
        vcpu.set_event(event);
        self.attention = true;
    }
}

/// Whether the guest takes a maskable interrupt now.
fn accepts_interrupt(vcpu: &mut impl Backend) -> bool {
    vcpu.get(Reg::Rflags) & RFLAGS_IF != 0 && vcpu.get(Reg::InterruptShadow) & 1 == 0
}

/// The present instruction is complete: what its completion does beside its effect.
#[inline]
fn retire(vcpu: &mut impl Backend, next: u64) {
    vcpu.set(Reg::Rip, next);
    if vcpu.get(Reg::InterruptShadow) != 0 {
        vcpu.set(Reg::InterruptShadow, 0);
    }
    if vcpu.get(Reg::Rflags) & RFLAGS_TF != 0 {
        let dr6 = vcpu.get(Reg::Dr6);
        vcpu.set(Reg::Dr6, dr6 | DR6_SINGLE_STEP);
        vcpu.set_event(Event::exception(DEBUG));
    }
}

#[inline]
fn mask(size: u8) -> u32 {
    u32::MAX >> (32 - 8 * u32::from(size.clamp(1, 4)))
}

/// The state after a start-up message (APM vol. 2, table 14-1 and section 15.27.8): real mode at
/// `page << 12`.
fn start_up(vcpu: &mut impl Backend, page: u8, signature: u32) {
    const DATA: u16 = 0x93;
    const CODE: u16 = 0x9b;
    const LDT: u16 = 0x82;
    const BUSY_TSS: u16 = 0x8b;
    let segment = |attrib| Segment { selector: 0, attrib, limit: 0xffff, base: 0 };
    for data in [Seg::Es, Seg::Ss, Seg::Ds, Seg::Fs, Seg::Gs] {
        vcpu.set_segment(data, segment(DATA));
    }
    let selector = u16::from(page) << 8;
    let base = u64::from(page) << 12;
    vcpu.set_segment(Seg::Cs, Segment { selector, base, ..segment(CODE) });
    vcpu.set_segment(Seg::Gdtr, segment(0));
    vcpu.set_segment(Seg::Idtr, segment(0));
    vcpu.set_segment(Seg::Ldtr, segment(LDT));
    vcpu.set_segment(Seg::Tr, segment(BUSY_TSS));
    for code in 0..16 {
        vcpu.set_gpr(Gpr::from_code(code), 0);
    }
    // Family, model and stepping.
    vcpu.set_gpr(Gpr::Rdx, signature.into());
    for register in [Reg::Rip, Reg::InterruptShadow, Reg::Cr2, Reg::Cr3, Reg::Cr4, Reg::Cpl] {
        vcpu.set(register, 0);
    }
    vcpu.set(Reg::Rflags, 2);
    vcpu.set(Reg::Cr0, cr0::CD | cr0::NW | cr0::ET);
    vcpu.set(Reg::Efer, 0);
    vcpu.set(Reg::Dr6, 0xffff_0ff0);
    vcpu.set(Reg::Dr7, 0x400);
}

//! The run loop of a vCPU: enters the guest, dispatches each VM exit, and returns when the host is
//! needed.
//!
//! Event injection. The vCPU has one injection slot. Priority: an event whose delivery an exit
//! interrupted, an exception raised by emulation, an NMI, a maskable interrupt (only with
//! `RFLAGS.IF`, without an interrupt shadow, and with a free slot). An event that does not fit
//! stays pending at its source (local APIC, 8259, [`Cpu`]), and the loop requests an
//! [`InterruptWindow`]: an interrupt of the local APIC is delivered as a virtual interrupt without
//! an exit and is accepted after the exit that finds it taken; for all other events the guest
//! exits. So no event is dropped and none is delivered twice.

use hw_x86::apic::local;
use hw_x86::cpuid::leaf;
use hw_x86::kvm::hypercall;
use hw_x86::msr::APIC_BASE;
use hw_x86::paging::xcr0;

use vmm_vcpu::deadline::Deadline;
use vmm_vcpu::{Activity, Flow, MAX_VCPUS, MemoryFault, Outcome, StopReason};

use crate::apic::InterruptMessage;
use crate::cpuid::{CpuView, Patch, Values};
use crate::exit::{Access, EXIT_NAMES, Exit, IoExit, Space};
use crate::length::{FetchCache, Pattern, prefixes};
use crate::msr::Msrs;
use crate::nmi::NmiMask;
use crate::platform::{Emulated, PcPlatform, PendingInterrupt, Unknown};
use crate::pv::{ApicIds, EoiWord, StealRecord};
use crate::registers::{Gpr, Groups, Reg, Registers};
use crate::vcpu::{Event, InterruptWindow, X86Vcpu};
use crate::walk::{CodeSize, CodeView};

/// `RFLAGS.IF`.
const RFLAGS_IF: u64 = 1 << 9;
/// `RFLAGS.TF`.
pub(crate) const RFLAGS_TF: u64 = 1 << 8;
/// `RFLAGS.RF`: no instruction breakpoint at the next instruction.
const RFLAGS_RF: u64 = 1 << 16;
/// `DR6.BS`: single step.
pub(crate) const DR6_SINGLE_STEP: u64 = 1 << 14;
/// `DR7.GD`: accesses of debug registers raise `#DB`, until one is delivered.
const DR7_GENERAL_DETECT: u64 = 1 << 13;
/// `APIC_BASE`: the local APIC is enabled.
const APIC_ENABLED: u64 = 1 << 11;
/// Vector of a debug exception.
const DEBUG: u8 = 1;
/// Vector of an alignment check.
const ALIGNMENT: u8 = 17;
/// Vector of an undefined opcode.
const UNDEFINED: Event = Event::exception(6);
/// General protection, error code 0.
const PROTECTION: Event = Event::exception_code(13, 0);

/// Run-loop state of a vCPU. Its registers belong to the [`X86Vcpu`].
#[derive(Clone, Debug)]
pub struct Cpu {
    index: usize,
    activity: Activity,
    started: bool,
    nmi: bool,
    nmi_mask: NmiMask,
    /// An interrupt that is in service already, and is delivered before others: the guest has yet
    /// to take it ([`InterruptWindow::DeliverVirq`]), or an exception interrupted its delivery.
    deferred: Event,
    /// The interrupt window requested from the [`X86Vcpu`].
    window: InterruptWindow,
    /// The task priority known to both the [`X86Vcpu`] and the local APIC.
    cr8: u8,
    /// The guest exits when it writes `CR8`: an interrupt is pending below the task priority, or
    /// the write clears bits that `CR8` does not show.
    cr8_exits: bool,
    pub(crate) eoi: EoiWord,
    pub(crate) steal: StealRecord,
    /// A virtual interrupt or an EOI without exit is on offer and may have completed without an
    /// exit.
    virq_offered: bool,
    deadline: Deadline,
    /// An event may have to be injected before the next entry.
    needs_service: bool,
    fetch: FetchCache,
    pub(crate) msrs: Msrs,
    exits: [u64; EXIT_NAMES.len()],
}

impl Cpu {
    /// Creates vCPU `index`, which is also its APIC id. CPU 0 starts with the current registers of
    /// its [`X86Vcpu`], other CPUs wait for a start-up IPI. `physical_bits`: width of physical
    /// addresses.
    pub fn new(index: usize, physical_bits: u32) -> Self {
        Self {
            index: index.min(MAX_VCPUS - 1),
            activity: if index == 0 { Activity::Running } else { Activity::Parked },
            started: false,
            nmi: false,
            nmi_mask: NmiMask::Open,
            deferred: Event::NONE,
            window: InterruptWindow::Nothing,
            cr8: 0,
            cr8_exits: false,
            eoi: EoiWord::OFF,
            steal: StealRecord::OFF,
            virq_offered: false,
            deadline: Deadline::UNSET,
            needs_service: true,
            fetch: FetchCache::new(),
            msrs: Msrs::new(physical_bits),
            exits: [0; EXIT_NAMES.len()],
        }
    }

    /// Index of the vCPU.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Number of exits so far, indexed by [`Exit::index`].
    pub fn exits(&self) -> &[u64; EXIT_NAMES.len()] {
        &self.exits
    }

    /// Runs the guest until the host is needed.
    pub fn run<V: X86Vcpu, P: PcPlatform>(&mut self, vcpu: &mut V, platform: &mut P) -> StopReason {
        // Other threads may have changed the platform's state between two calls.
        self.needs_service = true;
        loop {
            match self.step(vcpu, platform) {
                Ok(()) => {}
                Err(reason) => return reason,
            }
        }
    }

    /// Enters the guest once and handles the exit. The frequent exits are inlined, all others are
    /// calls.
    #[inline(always)]
    fn step<V: X86Vcpu, P: PcPlatform>(&mut self, vcpu: &mut V, platform: &mut P) -> Flow {
        if self.needs_service || platform.needs_service(self.index) {
            self.prepare(vcpu, platform)?;
        }
        let exit = vcpu.run();
        if V::KEEPS_CR8 && vcpu.cr8() != self.cr8 {
            self.note_cr8(vcpu, platform);
        }
        self.exits[exit.index()] += 1;
        if self.virq_offered {
            self.sync_interrupt_state(vcpu, platform);
        }
        match exit {
            Exit::Cpuid => {
                self.cpuid(vcpu, platform);
                Ok(())
            }
            Exit::Io(io) if !io.string => {
                self.port(vcpu, platform, io);
                Ok(())
            }
            Exit::Msr { write } => {
                self.msr(vcpu, platform, write);
                Ok(())
            }
            Exit::Recall { events } => Err(StopReason::Recall(events)),
            _ => self.handle_slow_exit(vcpu, platform, exit),
        }
    }

    /// Copies the guest's task priority to the local APIC, before any comparison with it.
    #[cold]
    fn note_cr8<V: X86Vcpu, P: PcPlatform>(&mut self, vcpu: &mut V, platform: &mut P) {
        self.cr8 = vcpu.cr8();
        platform.set_cr8(self.index, self.cr8);
        // The pending interrupt may be masked now, or a masked one may be deliverable.
        self.needs_service = true;
    }

    /// Synchronises the local APIC with virtual interrupts and PV EOIs that completed without an
    /// exit.
    #[inline(never)]
    fn sync_interrupt_state<V: X86Vcpu, P: PcPlatform>(&mut self, vcpu: &mut V, platform: &mut P) {
        self.virq_offered = false;
        if let InterruptWindow::DeliverVirq(vector) = self.window {
            if vcpu.has_window() {
                // The exit may change whether the interrupt is still pending.
                self.needs_service = true;
            } else {
                self.window = InterruptWindow::Nothing;
                if self.deferred.is_some() {
                    self.deferred = Event::NONE;
                    self.needs_service = true;
                } else {
                    platform.accept_virq(self.index, vector);
                }
            }
        }
        // The exit interrupted its delivery.
        self.needs_service |= vcpu.event().is_interrupt();
        // If the guest completed the offered EOI, its interrupt is in service now.
        if self.eoi.is_ended(platform.memory()) {
            platform.end_of_interrupt(self.index);
        }
    }

    /// Brings all state up to date before the guest is entered.
    #[inline(never)]
    fn prepare<V: X86Vcpu, P: PcPlatform>(&mut self, vcpu: &mut V, platform: &mut P) -> Flow {
        if self.virq_offered {
            // The last preparation ended without an entry.
            self.sync_interrupt_state(vcpu, platform);
        }
        self.needs_service = false;
        if !self.started {
            self.started = true;
            // The back end may have run another VM before.
            vcpu.set_event(Event::NONE);
            vcpu.set_window(InterruptWindow::Nothing);
            vcpu.set_cr8(0);
            vcpu.set_cr8_exits(false);
            self.nmi_mask.clear(vcpu);
            vcpu.set_wait_exits(false);
            vcpu.set(Reg::TscOffset, platform.clock().base().wrapping_neg());
            vcpu.set(Reg::Xcr0, xcr0::X87);
        }
        let signals = platform.service_timers(self.index);
        if let Some(outcome) = signals.end {
            return Err(StopReason::End(outcome));
        }
        let interrupts = signals.interrupts;
        let signature = |platform: &P| platform.cpuid().lookup(leaf::FEATURES, 0).0[0];
        if interrupts.init {
            self.nmi = false;
            self.nmi_mask.clear(vcpu);
            self.deferred = Event::NONE;
            self.activity = Activity::Parked;
            self.eoi = EoiWord::OFF;
            self.steal.reset();
            vcpu.set_wait_exits(false);
            vcpu.set_event(Event::NONE);
            start_up(vcpu, 0, signature(platform));
        }
        if let (Some(page), Activity::Parked) = (interrupts.startup, self.activity) {
            start_up(vcpu, page, signature(platform));
            self.activity = Activity::Running;
        }
        if self.activity == Activity::Running && vcpu.get(Reg::InterruptShadow) != 0 {
            self.halt_in_shadow(vcpu, platform);
        }
        self.nmi |= interrupts.nmi;
        if interrupts.cr8 != self.cr8 {
            // The guest wrote the priority through the APIC's TPR, or by an emulated instruction.
            self.cr8 = interrupts.cr8;
            vcpu.set_cr8(interrupts.cr8);
        }
        let held = interrupts.maskable == PendingInterrupt::Masked;
        let cr8_exits = held || interrupts.tpr_low;
        if cr8_exits != self.cr8_exits {
            self.cr8_exits = cr8_exits;
            vcpu.set_cr8_exits(cr8_exits);
        }
        self.deliver(
            vcpu,
            platform,
            if held { PendingInterrupt::None } else { interrupts.maskable },
        );
        if self.activity != Activity::Running {
            self.steal.leave(platform.memory());
            return Err(StopReason::Idle {
                deadline_ticks: platform.clock().ticks(signals.deadline),
            });
        }
        self.deadline.set(signals.deadline, vcpu, platform.clock());
        if self.steal.is_on()
            && self.steal.enter(platform.memory(), platform.clock(), vcpu.stolen())
        {
            vcpu.flush_tlb();
        }
        Ok(())
    }

    /// Fills the injection slot with the first event and requests a window for pending ones.
    fn deliver<V: X86Vcpu, P: PcPlatform>(
        &mut self,
        vcpu: &mut V,
        platform: &mut P,
        interrupt: PendingInterrupt,
    ) {
        let mut window = InterruptWindow::Nothing;
        let nmi = self.nmi && self.nmi_mask.is_open();
        let exit_if = |more| if more { InterruptWindow::Exit } else { InterruptWindow::Nothing };
        if self.deferred.is_some() && !nmi && !vcpu.event().is_some() && accepts_interrupt(vcpu) {
            self.activity = Activity::Running;
            vcpu.set_event(core::mem::take(&mut self.deferred));
        }
        let waits = interrupt != PendingInterrupt::None || self.deferred.is_some();
        if (nmi || waits) && self.activity != Activity::Parked {
            let is_free = !vcpu.event().is_some();
            if is_free && nmi {
                self.nmi = false;
                self.activity = Activity::Running;
                vcpu.set_event(Event::NMI);
                self.nmi_mask.delivered(vcpu);
                window = exit_if(waits);
            } else if self.deferred.is_some() {
                // Other pending events follow it.
                window = exit_if(nmi || interrupt != PendingInterrupt::None);
                self.needs_service |= nmi;
            } else if let (PendingInterrupt::Virq { vector, eoi_elidable }, false) =
                (interrupt, nmi)
            {
                // Used even if the slot is free: QEMU TCG sometimes delivers an injected interrupt
                // twice, but not a virtual interrupt.
                if self.activity == Activity::Halted && accepts_interrupt(vcpu) {
                    self.activity = Activity::Running;
                }
                window = InterruptWindow::DeliverVirq(vector);
                self.virq_offered = true;
                if eoi_elidable {
                    self.eoi.offer(platform.memory());
                }
            } else if is_free && accepts_interrupt(vcpu) {
                if let Some(taken) = platform.acknowledge(self.index) {
                    self.activity = Activity::Running;
                    vcpu.set_event(Event::interrupt(taken.vector));
                    window = exit_if(taken.more);
                    self.virq_offered = taken.eoi_elidable && self.eoi.offer(platform.memory());
                }
            } else {
                // An NMI needs a free slot but no window: delivery is tried again at the next exit.
                window = InterruptWindow::Exit;
                self.needs_service |= nmi;
            }
        }
        if window == InterruptWindow::Nothing {
            window = self.offer_deferred(vcpu);
        }
        if window != self.window {
            self.window = window;
            vcpu.set_window(window);
        }
    }

    /// Offers an interrupt that is in service already as a virtual one. The slot would deliver it
    /// at once, but QEMU TCG sometimes delivers an injected interrupt twice; and an interrupt in
    /// the slot after an exit always means that the exit interrupted its delivery.
    fn offer_deferred<V: X86Vcpu>(&mut self, vcpu: &mut V) -> InterruptWindow {
        if vcpu.event().is_interrupt() {
            self.deferred = vcpu.event();
            vcpu.set_event(Event::NONE);
        }
        if !self.deferred.is_some() {
            return InterruptWindow::Nothing;
        }
        self.virq_offered = true;
        InterruptWindow::DeliverVirq(self.deferred.vector())
    }

    /// Executes the `HLT` of `STI; HLT` if the host interrupted the guest between the two. Not
    /// every CPU restores the interrupt shadow on entry; without it an interrupt would be delivered
    /// before the `HLT` that waits for it.
    #[cold]
    fn halt_in_shadow<V: X86Vcpu, P: PcPlatform>(&mut self, vcpu: &mut V, platform: &P) {
        if vcpu.event().is_some() || vcpu.get(Reg::Cpl) != 0 {
            return;
        }
        if let Some(next) = self.fetch.next_rip_from_bytes(vcpu, platform.memory(), Pattern::HLT) {
            retire(vcpu, next);
            self.activity = Activity::Halted;
        }
    }

    #[inline(always)]
    fn cpuid<V: X86Vcpu, P: PcPlatform>(&mut self, vcpu: &mut V, platform: &mut P) {
        let Some(next) = self.fetch.next_rip(vcpu, platform.memory(), Pattern::CPUID) else {
            return self.inject_ud(vcpu, platform);
        };
        let (number, subleaf) = (vcpu.gpr(Gpr::Rax) as u32, vcpu.gpr(Gpr::Rcx) as u32);
        let (values, patch) = platform.cpuid().lookup(number, subleaf);
        let patched;
        let values = match patch {
            Patch::None => values,
            _ => {
                let values = *values;
                patched = self.patch_cpuid(vcpu, platform, &values, patch);
                &patched
            }
        };
        vcpu.set_gpr(Gpr::Rax, values[0].into());
        vcpu.set_gpr(Gpr::Rbx, values[1].into());
        vcpu.set_gpr(Gpr::Rcx, values[2].into());
        vcpu.set_gpr(Gpr::Rdx, values[3].into());
        retire(vcpu, next);
    }

    #[inline(never)]
    fn patch_cpuid<V: X86Vcpu, P: PcPlatform>(
        &self,
        vcpu: &mut V,
        platform: &mut P,
        values: &Values,
        patch: Patch,
    ) -> Values {
        let cr4 = vcpu.get(Reg::Cr4);
        let xcr0 = match patch {
            Patch::XsaveSize | Patch::XsaveCompactSize => vcpu.get(Reg::Xcr0),
            // Few leaves depend on it, and the back end may have to fetch it.
            _ => 0,
        };
        let apic = match patch {
            Patch::Features | Patch::AmdFeatures => {
                let base = platform.apic_read(self.index, APIC_BASE);
                base.is_none_or(|base| base & APIC_ENABLED != 0)
            }
            _ => true,
        };
        let view = CpuView { apic_id: self.index as u32, cr4, xcr0, apic };
        platform.cpuid().patch(values, patch, view)
    }

    #[inline(always)]
    fn port<V: X86Vcpu, P: PcPlatform>(&mut self, vcpu: &mut V, platform: &mut P, io: IoExit) {
        // The CPU always reports the address after `IN` and `OUT` (EXITINFO2).
        if io.next_rip == 0 {
            return self.inject_ud(vcpu, platform);
        }
        let rax = vcpu.gpr(Gpr::Rax);
        if io.write {
            platform.port_out(io.port, io.size, rax as u32 & mask(io.size));
        } else {
            let value = platform.port_in(io.port, io.size) & mask(io.size);
            // A 32-bit result clears the upper half; narrower results keep the other bits.
            let kept = if io.size == 4 { 0 } else { rax & !u64::from(mask(io.size)) };
            vcpu.set_gpr(Gpr::Rax, kept | u64::from(value));
        }
        retire(vcpu, io.next_rip);
    }

    #[inline(never)]
    fn msr<V: X86Vcpu, P: PcPlatform>(&mut self, vcpu: &mut V, platform: &mut P, write: bool) {
        let pattern = if write { Pattern::WRMSR } else { Pattern::RDMSR };
        let Some(next) = self.fetch.next_rip(vcpu, platform.memory(), pattern) else {
            return self.inject_ud(vcpu, platform);
        };
        let msr = vcpu.gpr(Gpr::Rcx) as u32;
        let done = if write {
            let value = vcpu.gpr(Gpr::Rdx) << 32 | vcpu.gpr(Gpr::Rax) & 0xffff_ffff;
            self.write_msr(vcpu, platform, msr, value)
        } else {
            self.read_msr(vcpu, platform, msr).map(|value| {
                vcpu.set_gpr(Gpr::Rax, value & 0xffff_ffff);
                vcpu.set_gpr(Gpr::Rdx, value >> 32);
            })
        };
        match done {
            Some(()) => retire(vcpu, next),
            None => self.raise(vcpu, PROTECTION),
        }
    }

    #[inline(never)]
    fn handle_slow_exit<V: X86Vcpu, P: PcPlatform>(
        &mut self,
        vcpu: &mut V,
        platform: &mut P,
        exit: Exit,
    ) -> Flow {
        match exit {
            Exit::Io(io) => {
                let emulated = platform.emulate_io(self.index, vcpu, io);
                self.emulated(vcpu, emulated);
            }
            Exit::MemoryFault(fault) => self.memory_fault(vcpu, platform, fault)?,
            Exit::Access(access) => self.access(vcpu, platform, access),
            Exit::Hlt => {
                if self.skip(vcpu, platform, Pattern::HLT) {
                    self.activity = Activity::Halted;
                    self.needs_service = true;
                }
            }
            Exit::Halted { events } => {
                if self.skip(vcpu, platform, Pattern::HLT) {
                    self.activity = Activity::Halted;
                }
                return Err(StopReason::Recall(events));
            }
            Exit::Hypercall => self.hypercall(vcpu, platform),
            Exit::InterruptWindow => {
                self.window = InterruptWindow::Nothing;
                self.needs_service = true;
            }
            Exit::Deadline => {
                self.deadline.passed();
                self.needs_service = true;
            }
            Exit::Recall { events } => return Err(StopReason::Recall(events)),
            Exit::Xsetbv => self.xsetbv(vcpu, platform),
            Exit::CacheFlush => {
                self.skip(vcpu, platform, Pattern::CACHE_FLUSH);
            }
            Exit::Pause => {
                self.skip(vcpu, platform, Pattern::PAUSE);
            }
            Exit::CrAccess { register: 8, write } => self.cr8(vcpu, platform, write),
            Exit::Exception { vector, code } => self.exception(vcpu, platform, vector, code)?,
            Exit::Undefined => self.raise(vcpu, UNDEFINED),
            Exit::Protected => self.raise(vcpu, PROTECTION),
            Exit::Iret => self.nmi_mask.begin_return(vcpu),
            Exit::CrAccess { .. } | Exit::TaskSwitch => self.inject_ud(vcpu, platform),
            Exit::Spurious => {}
            Exit::Shutdown => return Err(StopReason::End(Outcome::TripleFault)),
            Exit::InvalidState { why, code } => {
                platform.unknown(Unknown::Other(why, code));
                return Err(StopReason::End(Outcome::TripleFault));
            }
            Exit::HostError(code) => return Err(StopReason::End(Outcome::HostError(code))),
            Exit::Unknown(code) => {
                platform.unknown(Unknown::Exit(code));
                return Err(StopReason::End(Outcome::HostError(code)));
            }
            Exit::Cpuid | Exit::Msr { .. } => {}
        }
        Ok(())
    }

    /// Performs an access for an instruction that the host emulates.
    fn access<V: X86Vcpu, P: PcPlatform>(
        &mut self,
        vcpu: &mut V,
        platform: &mut P,
        access: Access,
    ) {
        let Access { space, address, size, value } = access;
        let answer = match (space, value) {
            (Space::Port, None) => Some(platform.port_in(address as u16, size).into()),
            (Space::Port, Some(value)) => {
                platform.port_out(address as u16, size, value as u32);
                Some(0)
            }
            (Space::Memory, None) => Some(platform.mmio_read(self.index, address, size)),
            (Space::Memory, Some(value)) => {
                platform.mmio_write(self.index, address, size, value);
                Some(0)
            }
            (Space::Msr, None) => self.read_msr(vcpu, platform, address as u32),
            (Space::Msr, Some(value)) => {
                self.write_msr(vcpu, platform, address as u32, value).map(|()| 0)
            }
        };
        vcpu.complete_access(answer);
    }

    fn memory_fault<V: X86Vcpu, P: PcPlatform>(
        &mut self,
        vcpu: &mut V,
        platform: &mut P,
        fault: MemoryFault,
    ) -> Flow {
        if vcpu.event().is_some() {
            // The interrupt's stack or table is not memory: there is no instruction to emulate, and
            // another delivery would exit here again.
            platform.unknown(Unknown::Other("event delivery outside memory", fault.gpa));
            return Err(StopReason::End(Outcome::TripleFault));
        }
        if fault.walk {
            platform.unknown(Unknown::Other("page tables outside memory", fault.gpa));
            return Err(StopReason::End(Outcome::TripleFault));
        }
        if fault.fetch {
            // No device responds, so all bits read as 1: FF FF is an undefined opcode.
            platform.unknown(Unknown::Other("code outside memory", fault.gpa));
            self.raise(vcpu, UNDEFINED);
            return Ok(());
        }
        let emulated = platform.emulate_memory(self.index, vcpu, fault);
        self.emulated(vcpu, emulated);
        Ok(())
    }

    fn emulated<V: X86Vcpu>(&mut self, vcpu: &mut V, emulated: Emulated) {
        match emulated {
            Emulated::Next(next) => retire(vcpu, next),
            Emulated::Again => interrupt_repetition(vcpu),
            Emulated::Raise(event) => self.raise(vcpu, event),
            Emulated::Unknown => self.raise(vcpu, UNDEFINED),
        }
    }

    fn hypercall<V: X86Vcpu, P: PcPlatform>(&mut self, vcpu: &mut V, platform: &mut P) {
        let number = vcpu.gpr(Gpr::Rax);
        if !self.skip(vcpu, platform, Pattern::VMMCALL) {
            return;
        }
        let result = match number {
            _ if vcpu.get(Reg::Cpl) != 0 => hypercall::NOT_PERMITTED as u64,
            hypercall::SEND_IPI => send_ipi(vcpu, platform) as u64,
            _ => platform.hypercall(vcpu).unwrap_or_else(|| {
                platform.unknown(Unknown::Hypercall(number));
                hypercall::UNKNOWN as u64
            }),
        };
        vcpu.set_gpr(Gpr::Rax, result);
    }

    /// APM vol. 4, `XSETBV`: register 0 only, x87 always set, AVX only with SSE.
    fn xsetbv<V: X86Vcpu, P: PcPlatform>(&mut self, vcpu: &mut V, platform: &mut P) {
        let Some(next) = self.fetch.next_rip(vcpu, platform.memory(), Pattern::XSETBV) else {
            return self.inject_ud(vcpu, platform);
        };
        let value = vcpu.gpr(Gpr::Rdx) << 32 | vcpu.gpr(Gpr::Rax) & 0xffff_ffff;
        let register = vcpu.gpr(Gpr::Rcx) as u32;
        let allowed = platform.cpuid().xcr0_allowed();
        let avx512 = value & xcr0::AVX512;
        let good = register == 0
            && value & !allowed == 0
            && value & xcr0::X87 != 0
            && (value & xcr0::AVX == 0 || value & xcr0::SSE != 0)
            && (avx512 == 0 || avx512 == xcr0::AVX512 && value & xcr0::AVX != 0);
        if !good {
            return self.raise(vcpu, PROTECTION);
        }
        vcpu.set(Reg::Xcr0, value);
        retire(vcpu, next);
    }

    /// `MOV` to and from `CR8` (`[REX.R] 0F 22 /0`, `0F 20 /0`): the task priority.
    fn cr8<V: X86Vcpu, P: PcPlatform>(&mut self, vcpu: &mut V, platform: &mut P, write: bool) {
        let code = CodeView::of(vcpu);
        let mut bytes = [0; 15];
        let Ok((count, _)) = code.fetch(platform.memory(), &mut bytes) else {
            return self.inject_ud(vcpu, platform);
        };
        let start = prefixes(&bytes[..count], code.size);
        let opcode = if write { 0x22 } else { 0x20 };
        let &[0x0f, second, modrm, ..] = &bytes[start..count] else {
            return self.inject_ud(vcpu, platform);
        };
        if second != opcode {
            return self.inject_ud(vcpu, platform);
        }
        let rex = if start > 0 && code.size == CodeSize::Bits64 { bytes[start - 1] } else { 0 };
        let extended = rex & 0xf0 == 0x40 && rex & 1 != 0;
        let register = Gpr::from_code(modrm & 7 | u8::from(extended) << 3);
        if write {
            let value = vcpu.gpr(register);
            if value > 15 {
                return self.raise(vcpu, PROTECTION);
            }
            platform.set_cr8(self.index, value as u8);
            self.needs_service = true;
        } else {
            let value = platform.cr8(self.index);
            vcpu.set_gpr(register, value.into());
        }
        let rip = vcpu.get(Reg::Rip);
        retire(vcpu, code.advance(rip, start as u64 + 3));
    }

    /// Advances past the current instruction; raises `#UD` and returns `false` if it is not
    /// `pattern`.
    #[inline(never)]
    fn skip<V: X86Vcpu, P: PcPlatform>(
        &mut self,
        vcpu: &mut V,
        platform: &mut P,
        pattern: Pattern,
    ) -> bool {
        match self.fetch.next_rip(vcpu, platform.memory(), pattern) {
            Some(next) => {
                retire(vcpu, next);
                true
            }
            None => {
                self.inject_ud(vcpu, platform);
                false
            }
        }
    }

    /// Injects `#UD`: the instruction does not match the exit, or cannot be emulated.
    #[cold]
    fn inject_ud<V: X86Vcpu, P: PcPlatform>(&mut self, vcpu: &mut V, platform: &mut P) {
        let rip = vcpu.get(Reg::Rip);
        let mut bytes = [0; 15];
        // Unreadable bytes stay 0 in the report.
        let _ = CodeView::of(vcpu).fetch(platform.memory(), &mut bytes);
        let mut first = [0; 8];
        first.copy_from_slice(&bytes[..8]);
        platform.unknown(Unknown::Instruction { rip, bytes: u64::from_le_bytes(first) });
        self.raise(vcpu, UNDEFINED);
    }

    /// Reflects an intercepted exception to the guest. The CPU has already performed the side
    /// effects before delivery: DR6 has the cause of a `#DB` (APM vol. 2, section 15.12.2).
    #[cold]
    fn exception<V: X86Vcpu, P: PcPlatform>(
        &mut self,
        vcpu: &mut V,
        platform: &mut P,
        vector: u8,
        code: u32,
    ) -> Flow {
        if vector == DEBUG && self.nmi_mask.ends_return(vcpu) {
            self.needs_service = true;
            return Ok(());
        }
        let event = match vector {
            DEBUG => Event::exception(DEBUG),
            // Its error code is always 0, and EXITINFO1 is undefined (APM vol. 2, section 8.2.18).
            ALIGNMENT => Event::exception_code(ALIGNMENT, 0),
            _ => {
                platform.unknown(Unknown::Other("unexpected intercepted exception", code.into()));
                return Err(StopReason::End(Outcome::HostError(vector.into())));
            }
        };
        let first = vcpu.event();
        match interrupted_by_benign(first) {
            Interrupted::Shutdown => return Err(StopReason::End(Outcome::TripleFault)),
            Interrupted::Dropped => {}
            Interrupted::Deferred if first == Event::NMI => {
                self.nmi = true;
                self.nmi_mask.clear(vcpu);
            }
            Interrupted::Deferred => self.deferred = first,
        }
        if vector == DEBUG {
            raise_debug(vcpu, 0);
            self.needs_service = true;
        } else {
            self.raise(vcpu, event);
        }
        Ok(())
    }

    /// Puts a fault into the injection slot and requests service, because the slot is occupied now.
    /// The saved flags of a fault have RF set, so that the instruction breakpoint is not reported
    /// again (APM vol. 2, section 13.1.1); a CPU does not set RF for an injected event.
    fn raise<V: X86Vcpu>(&mut self, vcpu: &mut V, event: Event) {
        let rflags = vcpu.get(Reg::Rflags);
        vcpu.set(Reg::Rflags, rflags | RFLAGS_RF);
        vcpu.set_event(event);
        self.needs_service = true;
    }
}

/// Fate of an event whose delivery an exception interrupted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Interrupted {
    /// No event, or an exception that is raised again if its cause persists.
    Dropped,
    /// An interrupt, which is delivered after the exception.
    Deferred,
    /// The vCPU shuts down (triple fault).
    Shutdown,
}

/// Decides the fate of `first`, whose delivery `#DB` or `#AC` interrupted (APM vol. 2, table 8-5).
/// Both are benign, so the pair is no double fault; but an exception during the delivery of a
/// double fault shuts the vCPU down, as in KVM.
fn interrupted_by_benign(first: Event) -> Interrupted {
    const DOUBLE_FAULT: u8 = 8;
    match first {
        _ if first.is_exception() && first.vector() == DOUBLE_FAULT => Interrupted::Shutdown,
        _ if !first.is_some() || first.is_exception() => Interrupted::Dropped,
        _ => Interrupted::Deferred,
    }
}

/// Returns true if the guest can take a maskable interrupt now.
fn accepts_interrupt(vcpu: &mut impl X86Vcpu) -> bool {
    vcpu.get(Reg::Rflags) & RFLAGS_IF != 0 && vcpu.get(Reg::InterruptShadow) & 1 == 0
}

/// Completes the current instruction, with the side effects of its completion.
#[inline(always)]
fn retire(vcpu: &mut impl X86Vcpu, next: u64) {
    vcpu.set(Reg::Rip, next);
    let shadow = vcpu.get(Reg::InterruptShadow) != 0;
    if shadow || vcpu.get(Reg::Rflags) & (RFLAGS_TF | RFLAGS_RF) != 0 {
        retire_marked(vcpu);
    }
}

/// Completes an instruction in an interrupt shadow (the shadow ends), after an instruction
/// breakpoint (breakpoints are armed again for the next instruction), or in single-step mode.
#[cold]
fn retire_marked(vcpu: &mut impl X86Vcpu) {
    vcpu.set(Reg::InterruptShadow, 0);
    let rflags = vcpu.get(Reg::Rflags);
    if rflags & RFLAGS_RF != 0 {
        vcpu.set(Reg::Rflags, rflags & !RFLAGS_RF);
    }
    single_step(vcpu, rflags);
}

/// Handles the boundary between two iterations of a repeated string instruction. As on a CPU, an
/// instruction breakpoint at it has been reported already, and single-step mode traps here (APM
/// vol. 2, sections 13.1.1 and 13.1.4).
#[cold]
fn interrupt_repetition(vcpu: &mut impl X86Vcpu) {
    vcpu.set(Reg::InterruptShadow, 0);
    let rflags = vcpu.get(Reg::Rflags);
    vcpu.set(Reg::Rflags, rflags | RFLAGS_RF);
    single_step(vcpu, rflags);
}

/// Raises the `#DB` of single-step mode if `RFLAGS.TF` is set.
fn single_step(vcpu: &mut impl X86Vcpu, rflags: u64) {
    if rflags & RFLAGS_TF == 0 {
        return;
    }
    raise_debug(vcpu, DR6_SINGLE_STEP);
}

/// Puts a `#DB` into the injection slot with its side effects: adds `causes` to DR6 and clears
/// general detection. An injected event has neither.
fn raise_debug(vcpu: &mut impl X86Vcpu, causes: u64) {
    if causes != 0 {
        let dr6 = vcpu.get(Reg::Dr6);
        vcpu.set(Reg::Dr6, dr6 | causes);
    }
    let dr7 = vcpu.get(Reg::Dr7);
    if dr7 & DR7_GENERAL_DETECT != 0 {
        vcpu.set(Reg::Dr7, dr7 & !DR7_GENERAL_DETECT);
    }
    vcpu.set_event(Event::exception(DEBUG));
}

/// Handles [`hypercall::SEND_IPI`]; returns the value for `rax`.
fn send_ipi<V: X86Vcpu, P: PcPlatform>(vcpu: &mut V, platform: &mut P) -> i64 {
    const DELIVERY: u32 = 7 << 8;
    let command = vcpu.gpr(Gpr::Rsi) as u32;
    let delivery = command & DELIVERY;
    let to_few = command & (local::ICR_LOGICAL | local::ICR_SHORTHAND) == 0;
    if !to_few || delivery != 0 && delivery != local::DELIVER_NMI {
        return hypercall::INVALID;
    }
    // The second half begins at 32 in a 32-bit guest: no VM has that many CPUs.
    const { assert!(MAX_VCPUS <= 32) };
    let [low, high] = [Gpr::Rbx, Gpr::Rcx].map(|half| u128::from(vcpu.gpr(half)));
    let to = ApicIds { first: vcpu.gpr(Gpr::Rdx) as u32, set: low | high << 64 };
    let message = InterruptMessage {
        destination: 0,
        logical: false,
        delivery: (delivery >> 8) as u8,
        vector: command as u8,
        level: false,
    };
    platform.multicast(to, message).into()
}

#[inline]
fn mask(size: u8) -> u32 {
    u32::MAX >> (32 - 8 * u32::from(size.clamp(1, 4)))
}

/// Sets the state after a start-up IPI (APM vol. 2, section 15.27.8): real mode at `page << 12`.
fn start_up(vcpu: &mut impl X86Vcpu, page: u8, signature: u32) {
    vcpu.store(&Registers::reset(page, signature), Groups::INIT);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpuid::{CpuidConfig, CpuidTable};
    use crate::platform::{Acknowledged, Interrupts};
    use crate::registers::{Seg, Segment};
    use crate::testing::{ScriptEntry, ScriptedVcpu};
    use crate::walk::{Intent, Paging};
    use hw_x86::kvm::steal_time;
    use hw_x86::msr::kvm;
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::vec::Vec;
    use vmm_mem::{GuestMemory, testing};
    use vmm_vcpu::{CounterClock, Platform, Signals};

    /// A platform whose interrupt controller delivers the highest requested vector, whatever is in
    /// service.
    struct TestPlatform {
        /// Reports the vector only on acknowledgement, as an 8259 does.
        asks: bool,
        in_service: Vec<u8>,
        /// Interrupts that the guest has taken without an exit.
        taken: Vec<u8>,
        memory: GuestMemory,
        cpuid: CpuidTable,
        clock: CounterClock,
        tsc: u64,
        requested: BTreeSet<u8>,
        nmi: bool,
        needs_service: bool,
        deadline: u64,
        end: Option<Outcome>,
        init: bool,
        startup: Option<u8>,
        ports: Vec<(u16, u8, u32)>,
        written: Vec<(u64, u8, u64)>,
        unknown: Vec<Unknown>,
        multicasts: Vec<(ApicIds, InterruptMessage)>,
        tsc_written: Vec<u64>,
        cr8: u8,
        tpr_low: bool,
        apic_base: Option<u64>,
        emulated: Emulated,
    }

    impl TestPlatform {
        fn new() -> Self {
            let config = CpuidConfig {
                vcpus: 1,
                xcr0_mask: 7,
                tsc_khz: 1_000_000,
                apic_khz: 1_000_000,
                kvmclock: true,
                steal_time: true,
                pv_flush: true,
                pv_ipi: true,
            };
            let cpuid = CpuidTable::new(&config, |number, _| match number {
                0 => [0xd, 1, 2, 3],
                1 => [0x800f12, 0, u32::MAX, u32::MAX],
                0xd => [7, 0, 0, 0],
                0x8000_0000 => [0x8000_0008, 0, 0, 0],
                0x8000_0001 => [0, 0, 0, u32::MAX],
                _ => [0; 4],
            });
            Self {
                asks: true,
                in_service: Vec::new(),
                taken: Vec::new(),
                memory: testing::memory(&[(0, 0x10_000)]),
                cpuid,
                clock: CounterClock::new(1_000_000, 1000),
                tsc: 1000,
                requested: BTreeSet::new(),
                nmi: false,
                needs_service: false,
                deadline: vmm_bus::NEVER,
                end: None,
                init: false,
                startup: None,
                ports: Vec::new(),
                written: Vec::new(),
                unknown: Vec::new(),
                multicasts: Vec::new(),
                tsc_written: Vec::new(),
                cr8: 0,
                tpr_low: false,
                apic_base: None,
                emulated: Emulated::Unknown,
            }
        }

        fn request(&mut self, vector: u8) {
            self.requested.insert(vector);
            self.needs_service = true;
        }

        fn waiting(&self) -> PendingInterrupt {
            match self.requested.last() {
                None => PendingInterrupt::None,
                Some(_) if self.asks => PendingInterrupt::Pic,
                Some(&vector) => {
                    let eoi_elidable = self.requested.len() == 1 && self.in_service.is_empty();
                    PendingInterrupt::Virq { vector, eoi_elidable }
                }
            }
        }
    }

    const KNOWN_HYPERCALL: u64 = 0x1234_5678_0000;

    impl Platform for TestPlatform {
        type Interrupts = Interrupts;

        fn memory(&self) -> &GuestMemory {
            &self.memory
        }
        fn clock(&self) -> &CounterClock {
            &self.clock
        }
        fn counter(&self) -> u64 {
            self.tsc
        }
        fn start_unix(&self) -> u64 {
            1_700_000_000
        }
        fn mmio_read(&mut self, _: usize, address: u64, size: u8) -> u64 {
            address << 8 | u64::from(size)
        }
        fn mmio_write(&mut self, _: usize, address: u64, size: u8, value: u64) {
            self.written.push((address, size, value));
        }
        fn needs_service(&self, _: usize) -> bool {
            self.needs_service
        }
        fn service_timers(&mut self, _: usize) -> Signals<Interrupts> {
            self.needs_service = false;
            let interrupts = Interrupts {
                nmi: core::mem::take(&mut self.nmi),
                maskable: self.waiting(),
                init: core::mem::take(&mut self.init),
                startup: self.startup.take(),
                cr8: self.cr8,
                tpr_low: self.tpr_low,
            };
            Signals { end: self.end, deadline: self.deadline, interrupts }
        }
    }

    impl PcPlatform for TestPlatform {
        fn cpuid(&self) -> &CpuidTable {
            &self.cpuid
        }
        fn port_in(&mut self, port: u16, size: u8) -> u32 {
            self.ports.push((port, size, 0));
            0xffff_ffff
        }
        fn port_out(&mut self, port: u16, size: u8, value: u32) {
            self.ports.push((port, size, value));
        }
        fn apic_read(&mut self, _: usize, msr: u32) -> Option<u64> {
            Some(self.apic_base.filter(|_| msr == APIC_BASE).unwrap_or(0x55))
        }
        fn apic_write(&mut self, _: usize, _: u32, value: u64) -> Option<()> {
            self.request(value as u8);
            Some(())
        }
        fn cr8(&mut self, _: usize) -> u8 {
            self.cr8
        }
        fn set_cr8(&mut self, _: usize, value: u8) {
            self.cr8 = value;
        }
        fn tsc_written(&mut self, _: usize, tsc: u64) {
            self.tsc_written.push(tsc);
        }
        fn emulate_memory<V: X86Vcpu>(&mut self, _: usize, _: &mut V, _: MemoryFault) -> Emulated {
            self.emulated
        }
        fn emulate_io<V: X86Vcpu>(&mut self, _: usize, _: &mut V, _: IoExit) -> Emulated {
            self.emulated
        }
        fn hypercall<V: X86Vcpu>(&mut self, vcpu: &mut V) -> Option<u64> {
            (vcpu.gpr(Gpr::Rax) == KNOWN_HYPERCALL).then_some(77)
        }
        fn multicast(&mut self, to: ApicIds, message: InterruptMessage) -> u32 {
            self.multicasts.push((to, message));
            (0..8).filter(|&id| to.contains(id)).count() as u32
        }
        fn acknowledge(&mut self, _: usize) -> Option<Acknowledged> {
            let vector = self.requested.pop_last()?;
            self.in_service.push(vector);
            let more = !self.requested.is_empty();
            Some(Acknowledged { vector, eoi_elidable: !more, more })
        }
        fn accept_virq(&mut self, _: usize, vector: u8) {
            assert!(self.requested.remove(&vector));
            self.in_service.push(vector);
            self.taken.push(vector);
            self.needs_service |= !self.requested.is_empty();
        }
        fn end_of_interrupt(&mut self, _: usize) {
            self.in_service.pop();
        }
        fn unknown(&mut self, what: Unknown) {
            self.unknown.push(what);
        }
    }

    const CODE: u64 = 0x1000;

    fn guest(code: &[u8]) -> (Cpu, ScriptedVcpu, TestPlatform) {
        let platform = TestPlatform::new();
        platform.memory.write_slice(CODE, code).unwrap();
        let mut vcpu = ScriptedVcpu::flat32();
        vcpu.set(Reg::Rip, CODE);
        (Cpu::new(0, 40), vcpu, platform)
    }

    /// Runs until the script ends; returns for each entry the event that the guest gets, injected
    /// or offered, and whether there is an exit window.
    fn play(
        cpu: &mut Cpu,
        vcpu: &mut ScriptedVcpu,
        platform: &mut TestPlatform,
    ) -> Vec<(Event, bool)> {
        assert_eq!(cpu.run(vcpu, platform), StopReason::End(Outcome::HostError(0)));
        let seen = |entry: ScriptEntry| {
            // A back end may make an interrupt pending instead of injecting it, unless there is a
            // window.
            assert!(!entry.event.is_interrupt() || entry.window != InterruptWindow::Nothing);
            match entry.window {
                InterruptWindow::DeliverVirq(vector) if !entry.event.is_some() => {
                    (Event::interrupt(vector), false)
                }
                window => (entry.event, window == InterruptWindow::Exit),
            }
        };
        vcpu.entries.drain(..).map(seen).collect()
    }

    /// The guest takes the virtual interrupt that is offered to it.
    fn take(vcpu: &mut ScriptedVcpu) {
        assert!(matches!(vcpu.window, InterruptWindow::DeliverVirq(_)), "{:?}", vcpu.window);
        vcpu.window = InterruptWindow::Nothing;
    }

    /// A step in which that is all.
    fn taking(vcpu: &mut ScriptedVcpu) -> Exit {
        take(vcpu);
        Exit::Spurious
    }

    fn interrupts(vcpu: &mut ScriptedVcpu, on: bool) {
        vcpu.set(Reg::Rflags, if on { RFLAGS_IF } else { 0 });
    }

    /// Plays one exit with `first` in the slot, whose delivery it interrupted; returns later
    /// entries.
    fn reflect(first: Event, vector: u8) -> (Cpu, ScriptedVcpu, Vec<(Event, bool)>) {
        let (mut cpu, mut vcpu, mut platform) = guest(&[0x90]);
        vcpu.set(Reg::Dr6, 0xffff_4ff0);
        vcpu.set(Reg::Dr7, 0x400 | DR7_GENERAL_DETECT);
        vcpu.then(move |vcpu| {
            vcpu.slot = first;
            Exit::Exception { vector, code: 0xdead }
        });
        let entries = play(&mut cpu, &mut vcpu, &mut platform);
        (cpu, vcpu, entries)
    }

    #[test]
    fn intercepted_exceptions_are_reflected() {
        let (_, mut vcpu, entries) = reflect(Event::NONE, DEBUG);
        assert_eq!(entries[1], (Event::exception(DEBUG), false));
        // DR6 is written by the CPU, as is RF: it is clear after an instruction breakpoint.
        assert_eq!((vcpu.get(Reg::Dr6), vcpu.get(Reg::Dr7)), (0xffff_4ff0, 0x400));
        assert_eq!(vcpu.get(Reg::Rflags) & RFLAGS_RF, 0);

        let (_, mut vcpu, entries) = reflect(Event::NONE, ALIGNMENT);
        assert_eq!(entries[1], (Event::exception_code(ALIGNMENT, 0), false));
        assert_eq!(vcpu.get(Reg::Dr7), 0x400 | DR7_GENERAL_DETECT);
        assert_ne!(vcpu.get(Reg::Rflags) & RFLAGS_RF, 0);
        assert_eq!(vcpu.get(Reg::Rip), CODE);
    }

    #[test]
    fn exceptions_while_an_event_is_delivered() {
        let page_fault = Event::exception_code(14, 2);
        for vector in [DEBUG, ALIGNMENT] {
            // Serial: the exception is raised again by its cause.
            for first in [page_fault, PROTECTION, UNDEFINED, Event::exception(DEBUG)] {
                let (cpu, _, entries) = reflect(first, vector);
                assert_eq!((entries[1].0.vector(), cpu.deferred), (vector, Event::NONE));
            }
            // An NMI is delivered at the next exit.
            let (cpu, _, entries) = reflect(Event::NMI, vector);
            assert_eq!((entries[1].0.vector(), cpu.nmi), (vector, true));

            let (mut cpu, mut vcpu, mut platform) = guest(&[0x90]);
            vcpu.then(|vcpu| {
                vcpu.slot = Event::exception_code(8, 0);
                Exit::Exception { vector: ALIGNMENT, code: 0 }
            });
            assert_eq!(cpu.run(&mut vcpu, &mut platform), StopReason::End(Outcome::TripleFault));
        }
    }

    #[test]
    fn an_interrupt_waits_for_the_exception_in_its_delivery() {
        let (mut cpu, mut vcpu, mut platform) = guest(&[0x90]);
        interrupts(&mut vcpu, true);
        vcpu.then(|vcpu| {
            vcpu.slot = Event::interrupt(0x31);
            Exit::Exception { vector: ALIGNMENT, code: 0 }
        });
        vcpu.then(|vcpu| {
            // In the handler of the exception.
            assert_eq!(vcpu.window, InterruptWindow::DeliverVirq(0x31));
            interrupts(vcpu, false);
            Exit::Spurious
        });
        vcpu.then(|vcpu| {
            interrupts(vcpu, true);
            take(vcpu);
            Exit::Spurious
        });
        let entries = play(&mut cpu, &mut vcpu, &mut platform);
        let exception = Event::exception_code(ALIGNMENT, 0);
        let events = [Event::NONE, exception, Event::interrupt(0x31), Event::NONE];
        assert_eq!(entries, events.map(|event| (event, false)));
        assert_eq!(platform.taken, [], "the local APIC knows of it already");
    }

    #[test]
    fn others_follow_the_interrupt_that_waited() {
        let (mut cpu, mut vcpu, mut platform) = guest(&[0x90]);
        interrupts(&mut vcpu, true);
        vcpu.then(|vcpu| {
            vcpu.slot = Event::interrupt(0x31);
            Exit::Exception { vector: ALIGNMENT, code: 0 }
        });
        vcpu.then(|vcpu| {
            // In the handler of the exception, which requests another one.
            interrupts(vcpu, false);
            vcpu.set_gpr(Gpr::Rcx, 0x80b);
            vcpu.set_gpr(Gpr::Rax, 0x40);
            vcpu.next_rip = CODE + 2;
            Exit::Msr { write: true }
        });
        for _ in 0..2 {
            vcpu.then(|vcpu| {
                interrupts(vcpu, true);
                Exit::InterruptWindow
            });
        }
        let entries = play(&mut cpu, &mut vcpu, &mut platform);
        let events = [
            (Event::NONE, false),
            (Event::exception_code(ALIGNMENT, 0), false),
            (Event::NONE, true),
            (Event::interrupt(0x31), true),
            (Event::interrupt(0x40), false),
        ];
        assert_eq!(entries, events);
    }

    #[test]
    fn an_interrupt_that_the_guest_takes_late_is_not_cut_short() {
        let (mut cpu, mut vcpu, mut platform) = guest(&[0x90]);
        platform.emulated = Emulated::Raise(PROTECTION);
        platform.request(0x31);
        interrupts(&mut vcpu, true);
        // It may be taken at once; but this processor is slow, and the guest does something else
        // first, which even faults.
        vcpu.then(|vcpu| {
            interrupts(vcpu, false);
            Exit::MemoryFault(MemoryFault { gpa: 0, write: true, fetch: false, walk: false })
        });
        vcpu.then(|_| Exit::Spurious);
        vcpu.then(|vcpu| {
            interrupts(vcpu, true);
            take(vcpu);
            Exit::Spurious
        });
        let entries = play(&mut cpu, &mut vcpu, &mut platform);
        let interrupt = Event::interrupt(0x31);
        let events = [interrupt, PROTECTION, interrupt, Event::NONE];
        assert_eq!(entries, events.map(|event| (event, false)));
        assert_eq!((platform.in_service, platform.unknown), (std::vec![0x31], std::vec![]));
    }

    #[test]
    fn an_exception_that_is_not_intercepted_ends_the_machine() {
        let (mut cpu, mut vcpu, mut platform) = guest(&[]);
        vcpu.then(|_| Exit::Exception { vector: 3, code: 0 });
        assert_eq!(cpu.run(&mut vcpu, &mut platform), StopReason::End(Outcome::HostError(3)));
    }

    #[test]
    fn accesses_are_answered_and_change_no_register() {
        const NO_SUCH_MSR: u64 = 0xdead_0000;
        let (mut cpu, mut vcpu, mut platform) = guest(&[]);
        let accesses = [
            (Space::Port, 0x3f8, 1, None),
            (Space::Port, 0x3f8, 2, Some(0x4142)),
            (Space::Memory, 0xfe00_0000, 3, None),
            (Space::Memory, 0xfe00_0010, 8, Some(u64::MAX)),
            (Space::Msr, 0x830, 8, None),
            (Space::Msr, 0x830, 8, Some(0x31)),
            (Space::Msr, NO_SUCH_MSR, 8, None),
            (Space::Msr, NO_SUCH_MSR, 8, Some(1)),
        ];
        for (space, address, size, value) in accesses {
            vcpu.then(move |_| Exit::Access(Access { space, address, size, value }));
        }
        play(&mut cpu, &mut vcpu, &mut platform);
        let answers = [
            Some(0xffff_ffff),
            Some(0),
            Some(0xfe_0000_0003),
            Some(0),
            Some(0x55),
            Some(0),
            None,
            None,
        ];
        assert_eq!(vcpu.answers, answers);
        assert_eq!(platform.ports, [(0x3f8, 1, 0), (0x3f8, 2, 0x4142)]);
        assert_eq!(platform.written, [(0xfe00_0010, 8, u64::MAX)]);
        assert!(platform.requested.contains(&0x31));
        assert_eq!((vcpu.get(Reg::Rip), vcpu.gpr(Gpr::Rax)), (CODE, 0));
    }

    #[test]
    fn interrupts_are_delivered_in_order_through_windows() {
        let (mut cpu, mut vcpu, mut platform) = guest(&[]);
        for vector in [0x31, 0xef, 0x40] {
            platform.request(vector);
        }
        interrupts(&mut vcpu, true);
        // Each handler runs with interrupts off, then ends.
        for _ in 0..3 {
            vcpu.then(|vcpu| {
                interrupts(vcpu, true);
                Exit::InterruptWindow
            });
        }
        let entries = play(&mut cpu, &mut vcpu, &mut platform);
        let expected = [
            (Event::interrupt(0xef), true),
            (Event::interrupt(0x40), true),
            (Event::interrupt(0x31), false),
            (Event::NONE, false),
        ];
        assert_eq!(entries, expected);
    }

    #[test]
    fn nothing_is_delivered_while_interrupts_are_off() {
        let (mut cpu, mut vcpu, mut platform) = guest(&[]);
        platform.request(0x31);
        interrupts(&mut vcpu, false);
        vcpu.then(|vcpu| {
            interrupts(vcpu, true);
            vcpu.set(Reg::InterruptShadow, 1); // STI
            Exit::Spurious
        });
        vcpu.then(|vcpu| {
            vcpu.set(Reg::InterruptShadow, 0);
            Exit::InterruptWindow
        });
        let entries = play(&mut cpu, &mut vcpu, &mut platform);
        let expected = [(Event::NONE, true), (Event::NONE, true), (Event::interrupt(0x31), false)];
        assert_eq!(entries, expected);
    }

    #[test]
    fn virtual_interrupts_are_delivered_without_an_exit() {
        let (mut cpu, mut vcpu, mut platform) = guest(&[]);
        platform.asks = false;
        interrupts(&mut vcpu, false);
        vcpu.then(|_| Exit::Recall { events: 1 });
        vcpu.then(|_| Exit::Recall { events: 1 });
        vcpu.then(|vcpu| {
            vcpu.window = InterruptWindow::Nothing;
            Exit::Spurious
        });
        platform.request(0x31);
        let recall = StopReason::Recall(1);
        assert_eq!(
            (cpu.run(&mut vcpu, &mut platform), vcpu.window),
            (recall, InterruptWindow::DeliverVirq(0x31))
        );
        // One interrupt of higher and one of lower priority.
        platform.request(0x40);
        assert_eq!(
            (cpu.run(&mut vcpu, &mut platform), vcpu.window),
            (recall, InterruptWindow::DeliverVirq(0x40))
        );
        assert_eq!(platform.taken, []);
        play(&mut cpu, &mut vcpu, &mut platform);
        assert_eq!(
            (&platform.taken[..], vcpu.window),
            (&[0x40][..], InterruptWindow::DeliverVirq(0x31))
        );
        // The request may be withdrawn.
        platform.requested.clear();
        play(&mut cpu, &mut vcpu, &mut platform);
        assert_eq!((&platform.taken[..], vcpu.window), (&[0x40][..], InterruptWindow::Nothing));
    }

    #[test]
    fn interrupts_are_completed_without_an_exit() {
        const WORD: u64 = 0x2000;
        let (mut cpu, mut vcpu, mut platform) = guest(&[]);
        platform.asks = false;
        for bad in [WORD | 3, 0x1_0001, 1 << 40 | 1] {
            assert_eq!(cpu.write_msr(&mut vcpu, &mut platform, kvm::EOI, bad), None);
        }
        assert!(cpu.write_msr(&mut vcpu, &mut platform, kvm::EOI, WORD | 1).is_some());
        assert_eq!(cpu.read_msr(&mut vcpu, &mut platform, kvm::EOI), Some(WORD | 1));
        let memory = platform.memory;
        let word = move || memory.read::<u32>(WORD).unwrap();
        let end = move || memory.write(WORD, 0_u32).unwrap();
        // One interrupt is injected, one is virtual: the guest completes both in memory, or not
        // (yet).
        for (open, ends) in [(true, true), (true, false), (false, true), (false, false)] {
            interrupts(&mut vcpu, open);
            platform.request(0x31);
            vcpu.then(move |vcpu| {
                assert_eq!(word(), 1);
                vcpu.window = InterruptWindow::Nothing;
                if ends {
                    end();
                }
                Exit::Spurious
            });
            play(&mut cpu, &mut vcpu, &mut platform);
            assert_eq!((platform.in_service.is_empty(), word()), (ends, 0));
            platform.in_service.clear();
        }
        // A write of the guest to the word before it takes the interrupt completes nothing.
        interrupts(&mut vcpu, false);
        platform.request(0x31);
        vcpu.then(move |_| {
            end();
            Exit::Spurious
        });
        vcpu.then(move |vcpu| {
            vcpu.window = InterruptWindow::Nothing;
            Exit::Spurious
        });
        play(&mut cpu, &mut vcpu, &mut platform);
        assert_eq!((&platform.in_service[..], word()), (&[0x31][..], 0));
        // Another interrupt is pending: its EOI must exit.
        interrupts(&mut vcpu, true);
        platform.request(0x32);
        platform.request(0x33);
        vcpu.then(move |_| {
            assert_eq!(word(), 0);
            Exit::Spurious
        });
        play(&mut cpu, &mut vcpu, &mut platform);
    }

    #[test]
    fn interrupts_to_several_by_hypercall() {
        // VMMCALL.
        let (mut cpu, mut vcpu, mut platform) = guest(&[0x0f, 0x01, 0xd9]);
        let mut call = |platform: &mut TestPlatform, [low, high, first, command]: [u64; 4]| {
            vcpu.set(Reg::Rip, CODE);
            vcpu.set_gpr(Gpr::Rax, hypercall::SEND_IPI);
            for (register, value) in
                [(Gpr::Rbx, low), (Gpr::Rcx, high), (Gpr::Rdx, first), (Gpr::Rsi, command)]
            {
                vcpu.set_gpr(register, value);
            }
            vcpu.then(|_| Exit::Hypercall);
            play(&mut cpu, &mut vcpu, platform);
            assert_eq!(vcpu.get(Reg::Rip), CODE + 3);
            vcpu.gpr(Gpr::Rax) as i64
        };
        assert_eq!(call(&mut platform, [0b101, 0, 2, 0x4031]), 2, "ids 2 and 4");
        assert_eq!(call(&mut platform, [0, 1, 0, 0x400]), 0, "id 64");
        // Shorthands, logical destinations, INIT and start-up are not supported by the hypercall.
        for command in [0x4_0031, 0xc_0031, 0x831, 0x500, 0x604, 0x131] {
            assert_eq!(call(&mut platform, [1, 0, 0, command]), hypercall::INVALID);
        }
        let message = InterruptMessage {
            destination: 0,
            logical: false,
            delivery: 0,
            vector: 0x31,
            level: false,
        };
        let nmi = InterruptMessage { delivery: 4, vector: 0, ..message };
        let expected = [
            (ApicIds { first: 2, set: 0b101 }, message),
            (ApicIds { first: 0, set: 1 << 64 }, nmi),
        ];
        assert_eq!(platform.multicasts, expected);
        let ids = ApicIds { first: 250, set: u128::MAX };
        assert_eq!(
            [249, 250, 377, 378, 0].map(|id| ids.contains(id)),
            [false, true, true, false, false]
        );
    }

    #[test]
    fn stolen_time_and_flushes_by_the_record() {
        const RECORD: u64 = 0x2000;
        const STATE: u64 = RECORD + steal_time::STATE;
        let (mut cpu, mut vcpu, mut platform) = guest(&[0xf4]);
        let write = |cpu: &mut Cpu, vcpu: &mut ScriptedVcpu, platform: &mut TestPlatform, value| {
            cpu.write_msr(vcpu, platform, kvm::STEAL_TIME, value)
        };
        let memory = platform.memory;
        let record = || {
            let word = |field| memory.read::<u32>(RECORD + field).unwrap();
            let steal = memory.read::<u64>(RECORD + steal_time::STEAL).unwrap();
            (steal, word(steal_time::VERSION), word(steal_time::STATE))
        };
        for bad in [RECORD | 3, RECORD | 0x21, 0x1_0001, 0xffc1 + 0x40] {
            assert_eq!(write(&mut cpu, &mut vcpu, &mut platform, bad), None);
        }
        // Time stolen before the record was named is not reported.
        vcpu.stolen = 500;
        assert!(write(&mut cpu, &mut vcpu, &mut platform, RECORD | 1).is_some());
        assert_eq!(cpu.read_msr(&mut vcpu, &mut platform, kvm::STEAL_TIME), Some(RECORD | 1));
        assert_eq!((record(), vcpu.halts), ((0, 2, 0), true));
        play(&mut cpu, &mut vcpu, &mut platform);
        assert_eq!(record(), (0, 2, 0), "nothing was stolen, nothing is written");
        vcpu.stolen = 800;
        play(&mut cpu, &mut vcpu, &mut platform);
        assert_eq!(record(), (300, 4, 0));
        // The vCPU sleeps and is woken: by itself, or after another vCPU requested a flush.
        for (asks, flushes) in [(false, 0), (true, 1), (false, 1)] {
            vcpu.set(Reg::Rip, CODE);
            interrupts(&mut vcpu, true);
            vcpu.then(|_| Exit::Hlt);
            assert!(matches!(cpu.run(&mut vcpu, &mut platform), StopReason::Idle { .. }));
            assert!(matches!(cpu.run(&mut vcpu, &mut platform), StopReason::Idle { .. }), "still");
            assert_eq!(record().2, steal_time::PREEMPTED);
            if asks {
                memory.write(STATE, steal_time::PREEMPTED | steal_time::FLUSH_TLB).unwrap();
            }
            platform.request(0x31);
            vcpu.then(move |vcpu| {
                assert_eq!((vcpu.flushes, memory.read(STATE)), (flushes, Ok(0_u32)));
                take(vcpu);
                Exit::Spurious
            });
            play(&mut cpu, &mut vcpu, &mut platform);
        }
        // A guest that corrupts the word harms only itself.
        cpu.steal.leave(&memory);
        memory.write(STATE, u32::MAX).unwrap();
        play(&mut cpu, &mut vcpu, &mut platform);
        assert_eq!((vcpu.flushes, record()), (2, (300, 4, 0)));
        // Another record continues the count; a cleared enable bit disables it.
        assert!(write(&mut cpu, &mut vcpu, &mut platform, RECORD | 1).is_some());
        assert_eq!(record(), (300, 6, 0));
        platform.init = true;
        assert!(matches!(cpu.run(&mut vcpu, &mut platform), StopReason::Idle { .. }));
        assert_eq!((record(), cpu.steal.get(), vcpu.halts), ((300, 6, 0), 0, false));
    }

    #[test]
    fn interrupted_events_are_injected_first() {
        let (mut cpu, mut vcpu, mut platform) = guest(&[]);
        interrupts(&mut vcpu, true);
        // Delivery of a page fault was interrupted while an interrupt and an NMI arrive.
        vcpu.then(|vcpu| {
            vcpu.slot = Event::exception_code(14, 2);
            Exit::Spurious
        });
        vcpu.then(|_| Exit::Spurious);
        vcpu.then(|_| Exit::InterruptWindow);
        platform.request(0x31);
        platform.nmi = true;
        let entries = play(&mut cpu, &mut vcpu, &mut platform);
        let expected = [
            (Event::NMI, true),
            (Event::exception_code(14, 2), true),
            (Event::NONE, true), // a window is open only when the processor says so
            (Event::interrupt(0x31), false),
        ];
        assert_eq!(entries, expected);
    }

    #[test]
    fn an_exception_of_emulation_keeps_interrupts_waiting() {
        let (mut cpu, mut vcpu, mut platform) = guest(&[]);
        interrupts(&mut vcpu, true);
        platform.emulated = Emulated::Raise(Event::exception_code(14, 2));
        let fault = MemoryFault { gpa: 0, write: false, fetch: false, walk: false };
        vcpu.then(move |_| Exit::MemoryFault(fault));
        vcpu.then(|_| Exit::InterruptWindow);
        let entries = play(&mut cpu, &mut vcpu, &mut platform);
        assert_eq!(entries[1], (Event::exception_code(14, 2), false));
        // The same with an interrupt arriving meanwhile.
        vcpu.set_gpr(Gpr::Rcx, 0x80b);
        vcpu.set_gpr(Gpr::Rax, 0x31);
        vcpu.next_rip = CODE + 2;
        vcpu.then(|vcpu| {
            vcpu.set(Reg::Rflags, RFLAGS_IF | RFLAGS_TF);
            Exit::Msr { write: true }
        });
        vcpu.then(|_| Exit::InterruptWindow);
        let entries = play(&mut cpu, &mut vcpu, &mut platform);
        let expected = [
            (Event::NONE, false),
            (Event::exception(DEBUG), true),
            (Event::interrupt(0x31), false),
        ];
        assert_eq!(entries, expected);
    }

    #[test]
    fn a_disabled_local_apic_is_hidden() {
        const APIC: u64 = 1 << 9;
        let has = |number: u64, base: u64| {
            let (mut cpu, mut vcpu, mut platform) = guest(&[0x0f, 0xa2]);
            platform.apic_base = Some(base);
            vcpu.set_gpr(Gpr::Rax, number);
            vcpu.next_rip = CODE + 2;
            vcpu.then(|_| Exit::Cpuid);
            play(&mut cpu, &mut vcpu, &mut platform);
            vcpu.gpr(Gpr::Rdx) & APIC != 0
        };
        for number in [1, 0x8000_0001] {
            assert!(has(number, 0xfee0_0000 | APIC_ENABLED), "{number:#x}");
            assert!(!has(number, 0xfee0_0000), "{number:#x}");
        }
    }

    /// `RFLAGS.RF` ends with the instruction, also if it is emulated.
    #[test]
    fn a_breakpoint_is_armed_again_after_an_emulated_instruction() {
        let io =
            IoExit { port: 1, size: 1, write: true, string: false, rep: false, next_rip: CODE };
        let fault = MemoryFault { gpa: 0, write: false, fetch: false, walk: false };
        let flags = |exit: Exit, emulated| {
            let (mut cpu, mut vcpu, mut platform) = guest(&[0x0f, 0xa2]);
            platform.emulated = emulated;
            vcpu.set_gpr(Gpr::Rcx, 0x80b);
            vcpu.next_rip = CODE + 2;
            vcpu.then(move |vcpu| {
                vcpu.set(Reg::Rflags, RFLAGS_RF | 2);
                exit
            });
            let entries = play(&mut cpu, &mut vcpu, &mut platform);
            (vcpu.get(Reg::Rflags), entries[1].0)
        };
        let next = Emulated::Next(CODE + 2);
        for exit in [Exit::Cpuid, Exit::Io(io), Exit::Msr { write: true }, Exit::MemoryFault(fault)]
        {
            assert_eq!(flags(exit, next), (2, Event::NONE), "{exit:?}");
        }
        let string = Exit::Io(IoExit { string: true, ..io });
        assert_eq!(flags(string, next), (2, Event::NONE));
        // Not finished, or not emulated.
        assert_eq!(flags(string, Emulated::Again), (RFLAGS_RF | 2, Event::NONE));
        let raised = Event::exception_code(14, 0);
        assert_eq!(flags(string, Emulated::Raise(raised)), (RFLAGS_RF | 2, raised));
    }

    /// An iteration of a repeated string instruction is a step; its breakpoint is not reported
    /// again.
    #[test]
    fn steps_and_iterations() {
        let string = IoExit { port: 1, size: 1, write: true, string: true, rep: true, next_rip: 0 };
        let (mut cpu, mut vcpu, mut platform) = guest(&[]);
        platform.emulated = Emulated::Again;
        vcpu.then(move |vcpu| {
            vcpu.set(Reg::Rflags, RFLAGS_TF | 2);
            vcpu.set(Reg::Dr7, DR7_GENERAL_DETECT | 0x400);
            vcpu.set(Reg::InterruptShadow, 1);
            Exit::Io(string)
        });
        let entries = play(&mut cpu, &mut vcpu, &mut platform);
        assert_eq!(entries[1].0, Event::exception(DEBUG));
        assert_eq!((vcpu.get(Reg::Rip), vcpu.get(Reg::InterruptShadow)), (CODE, 0));
        assert_eq!(vcpu.get(Reg::Rflags), RFLAGS_TF | RFLAGS_RF | 2);
        assert_eq!((vcpu.get(Reg::Dr6), vcpu.get(Reg::Dr7)), (DR6_SINGLE_STEP, 0x400));
        // The last iteration.
        platform.emulated = Emulated::Next(CODE + 2);
        vcpu.then(move |_| Exit::Io(string));
        let entries = play(&mut cpu, &mut vcpu, &mut platform);
        assert_eq!(entries[1].0, Event::exception(DEBUG));
        assert_eq!((vcpu.get(Reg::Rip), vcpu.get(Reg::Rflags)), (CODE + 2, RFLAGS_TF | 2));
    }

    #[test]
    fn event_delivery_outside_memory_ends_the_machine() {
        let (mut cpu, mut vcpu, mut platform) = guest(&[]);
        let fault = MemoryFault { gpa: 0x1_0000, write: true, fetch: false, walk: false };
        vcpu.then(move |vcpu| {
            vcpu.slot = Event::interrupt(0x31);
            Exit::MemoryFault(fault)
        });
        assert_eq!(cpu.run(&mut vcpu, &mut platform), StopReason::End(Outcome::TripleFault));
        assert_eq!(platform.unknown.len(), 1);
    }

    #[test]
    fn an_nmi_is_masked_until_the_end_of_iret() {
        const OLD: u64 = 0xffff_0ff1;
        let steps = |vcpu: &mut ScriptedVcpu| vcpu.get(Reg::Rflags) & RFLAGS_TF != 0;
        let (mut cpu, mut vcpu, mut platform) = guest(&[0x48, 0xcf]);
        vcpu.iret_exits = Some(false);
        vcpu.set(Reg::Dr6, OLD);
        let mut delivered = |vcpu: &mut ScriptedVcpu, platform: &mut TestPlatform| {
            vcpu.entries.clear();
            vcpu.then(|_| Exit::Recall { events: 1 });
            assert_eq!(cpu.run(vcpu, platform), StopReason::Recall(1));
            vcpu.entries.iter().map(|entry| entry.event).find(|event| event.is_some())
        };
        platform.nmi = true;
        assert_eq!(delivered(&mut vcpu, &mut platform), Some(Event::NMI));
        assert_eq!(vcpu.iret_exits, Some(true));
        // Two further NMIs merge into one, which stays pending. A fault or an interrupt does not
        // end masking.
        for _ in 0..2 {
            platform.nmi = true;
            assert_eq!(delivered(&mut vcpu, &mut platform), None);
        }
        vcpu.then(|_| Exit::Undefined);
        assert_eq!(delivered(&mut vcpu, &mut platform), Some(UNDEFINED));
        // The IRET is single-stepped, which stays hidden from the guest.
        vcpu.then(|_| Exit::Iret);
        assert_eq!(delivered(&mut vcpu, &mut platform), None);
        assert!(steps(&mut vcpu) && vcpu.iret_exits == Some(false));
        let ends = |vcpu: &mut ScriptedVcpu, causes: u64| {
            vcpu.then(move |vcpu| {
                let dr6 = vcpu.get(Reg::Dr6);
                vcpu.set(Reg::Dr6, dr6 | causes);
                interrupts(vcpu, true);
                Exit::Exception { vector: DEBUG, code: 0 }
            });
        };
        // A breakpoint at the IRET is delivered first and does not end masking.
        vcpu.then(|_| Exit::Exception { vector: DEBUG, code: 0 });
        assert_eq!(delivered(&mut vcpu, &mut platform), Some(Event::exception(DEBUG)));
        ends(&mut vcpu, DR6_SINGLE_STEP);
        assert_eq!(delivered(&mut vcpu, &mut platform), Some(Event::NMI));
        assert_eq!((vcpu.get(Reg::Dr6), vcpu.iret_exits), (OLD, Some(true)));
        // A breakpoint hit by the IRET belongs to the guest, as does the guest's own single step.
        for (own_steps, causes, dr6) in [(false, 2, OLD | 2), (true, 0, OLD | DR6_SINGLE_STEP)] {
            vcpu.set(Reg::Dr6, OLD);
            vcpu.set(Reg::Rflags, if own_steps { RFLAGS_TF } else { 0 });
            vcpu.then(|_| Exit::Iret);
            ends(&mut vcpu, DR6_SINGLE_STEP | causes);
            assert_eq!(delivered(&mut vcpu, &mut platform), Some(Event::exception(DEBUG)));
            assert_eq!(vcpu.get(Reg::Dr6), dr6);
            platform.nmi = true;
            assert_eq!(delivered(&mut vcpu, &mut platform), Some(Event::NMI));
        }
        // INIT ends masking; a back end with virtual NMIs is not asked to intercept.
        platform.init = true;
        assert!(matches!(cpu.run(&mut vcpu, &mut platform), StopReason::Idle { .. }));
        assert_eq!(vcpu.iret_exits, Some(false));
    }

    #[test]
    fn halt_waits_and_wakes() {
        let (mut cpu, mut vcpu, mut platform) = guest(&[0xf4]);
        interrupts(&mut vcpu, true);
        platform.deadline = 5000;
        vcpu.then(|vcpu| {
            vcpu.set(Reg::InterruptShadow, 1); // STI; HLT
            Exit::Hlt
        });
        let idle = StopReason::Idle { deadline_ticks: 6000 };
        assert_eq!(cpu.run(&mut vcpu, &mut platform), idle);
        assert_eq!(vcpu.get(Reg::Rip), CODE + 1);
        // No event: still idle. Then an interrupt.
        assert_eq!(cpu.run(&mut vcpu, &mut platform), idle);
        platform.request(0x31);
        vcpu.entries.clear();
        vcpu.then(taking);
        let wakes = [(Event::interrupt(0x31), false), (Event::NONE, false)];
        assert_eq!(play(&mut cpu, &mut vcpu, &mut platform), wakes);
        assert_eq!(vcpu.deadline, 6000);
        // With interrupts off only an NMI wakes the vCPU.
        vcpu.set(Reg::Rip, CODE);
        interrupts(&mut vcpu, false);
        vcpu.then(|_| Exit::Hlt);
        platform.request(0x32);
        assert_eq!(cpu.run(&mut vcpu, &mut platform), idle);
        platform.nmi = true;
        vcpu.entries.clear();
        assert_eq!(play(&mut cpu, &mut vcpu, &mut platform), [(Event::NMI, true)]);
    }

    #[test]
    fn no_wake_up_is_lost_between_sti_and_hlt() {
        let (mut cpu, mut vcpu, mut platform) = guest(&[0xf4, 0xf4]);
        let idle = StopReason::Idle { deadline_ticks: u64::MAX };
        let shadow = |vcpu: &mut ScriptedVcpu| {
            interrupts(vcpu, true);
            vcpu.set(Reg::InterruptShadow, 1);
            vcpu.next_rip = 0x7777; // of an earlier exit
        };
        // The host interrupts after STI; the guest's timer is due, or not.
        shadow(&mut vcpu);
        platform.request(0x31);
        let wakes = |vector| [(Event::interrupt(vector), false), (Event::NONE, false)];
        vcpu.then(taking);
        assert_eq!(play(&mut cpu, &mut vcpu, &mut platform), wakes(0x31));
        assert_eq!((vcpu.get(Reg::Rip), vcpu.get(Reg::InterruptShadow)), (CODE + 1, 0));
        shadow(&mut vcpu);
        assert_eq!(cpu.run(&mut vcpu, &mut platform), idle);
        assert_eq!(vcpu.get(Reg::Rip), CODE + 2);
        platform.request(0x32);
        vcpu.then(taking);
        vcpu.entries.clear();
        assert_eq!(play(&mut cpu, &mut vcpu, &mut platform), wakes(0x32));
        // Other instructions and an exception of higher priority stay as they are.
        for (rip, event) in [(CODE + 2, Event::NONE), (CODE, Event::exception(DEBUG))] {
            vcpu.set(Reg::Rip, rip);
            shadow(&mut vcpu);
            vcpu.slot = event;
            assert_eq!(play(&mut cpu, &mut vcpu, &mut platform), [(event, false)]);
            assert_eq!((vcpu.get(Reg::Rip), vcpu.get(Reg::InterruptShadow)), (rip, 1));
        }
    }

    #[test]
    fn cpuid_with_and_without_help() {
        // CPUID at CODE, with a prefix at CODE + 8.
        let code = [0x0f, 0xa2, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x66, 0x0f, 0xa2];
        let (mut cpu, mut vcpu, mut platform) = guest(&code);
        vcpu.then(|_| Exit::Cpuid);
        vcpu.then(|vcpu| {
            assert_eq!(vcpu.get(Reg::Rip), CODE + 2);
            assert_eq!([Gpr::Rbx, Gpr::Rcx, Gpr::Rdx].map(|r| vcpu.gpr(r)), [1, 2, 3]);
            vcpu.set(Reg::Rip, CODE + 8);
            Exit::Cpuid
        });
        vcpu.then(|vcpu| {
            assert_eq!(vcpu.get(Reg::Rip), CODE + 11);
            vcpu.next_rip = 0x7777;
            Exit::Cpuid
        });
        vcpu.then(|vcpu| {
            assert_eq!(vcpu.get(Reg::Rip), 0x7777);
            vcpu.next_rip = 0;
            vcpu.set(Reg::Rip, CODE + 3); // no CPUID there
            Exit::Cpuid
        });
        let entries = play(&mut cpu, &mut vcpu, &mut platform);
        assert_eq!(entries[4].0, UNDEFINED);
        assert!(matches!(platform.unknown[..], [Unknown::Instruction { .. }]));
        assert_eq!(cpu.exits()[Exit::Cpuid.index()], 4);
    }

    #[test]
    fn cached_instructions_are_verified() {
        use hw_x86::paging::entry;
        let memory = &TestPlatform::new().memory;
        let table = entry::PRESENT | entry::WRITE;
        memory.write(0x8000, 0x9000 | table).unwrap();
        memory.write(0x9000, 0xa000 | table).unwrap();
        memory.write(0xa000, 0xb000 | table).unwrap();
        memory.write(0xb008, CODE | table).unwrap();
        memory.write_slice(CODE, &[0x0f, 0xa2]).unwrap();
        let mut vcpu = ScriptedVcpu::long(0x8000);
        let translated = Paging::of(&mut vcpu).translate(memory, 0x1000, Intent::Fetch, false);
        assert_eq!(translated, Ok((CODE, 0x1000)));
        let mut cache = FetchCache::new();
        vcpu.set(Reg::Rip, 0x1000);
        let next = |cache: &mut FetchCache, vcpu: &mut ScriptedVcpu, memory: &GuestMemory| {
            cache.next_rip(vcpu, memory, Pattern::CPUID)
        };
        for _ in 0..2 {
            assert_eq!(next(&mut cache, &mut vcpu, memory), Some(0x1002));
        }
        // The page moves and the instruction gets a prefix: the old page is overwritten, so the
        // entry fails.
        memory.write(0xb008, 0x2000 | table).unwrap();
        memory.write_slice(0x2000, &[0x48, 0x0f, 0xa2]).unwrap();
        memory.write_slice(CODE, &[0x90, 0x90]).unwrap();
        assert_eq!(next(&mut cache, &mut vcpu, memory), Some(0x1003));
        // In the same page: without prefix, with one, across words, across pages, another
        // instruction.
        memory.write_slice(0x2005, &[0x0f, 0xa2, 0x0f, 0xa2, 0xf3, 0x0f, 0xa2]).unwrap();
        for (offset, length) in [(5, 2), (7, 2), (9, 3), (0xfff, 2)] {
            memory.write_slice(0x2fff, &[0x0f]).unwrap();
            memory.write(0xb010, 0x5000 | table).unwrap();
            memory.write_slice(0x5000, &[0xa2]).unwrap();
            vcpu.set(Reg::Rip, 0x1000 + offset);
            assert_eq!(next(&mut cache, &mut vcpu, memory), Some(0x1000 + offset + length));
        }
        vcpu.set(Reg::Rip, 0x1020);
        assert_eq!(next(&mut cache, &mut vcpu, memory), None);
        // The same address in a 32-bit code segment is elsewhere: at its base.
        memory.write_slice(0x5005, &[0x66, 0x0f, 0xa2]).unwrap();
        vcpu.set(Reg::Rip, 0x1005);
        let code = vcpu.segment(Seg::Cs);
        vcpu.set_segment(Seg::Cs, Segment { attrib: 0xc9b, base: 0x1000, ..code });
        assert_eq!(next(&mut cache, &mut vcpu, memory), Some(0x1008));
        vcpu.set_segment(Seg::Cs, code);
        assert_eq!(next(&mut cache, &mut vcpu, memory), Some(0x1007));
        // Another address space: not the same entry. A missing table, or one outside memory.
        for root in [0xc000, 1 << 40] {
            vcpu.set(Reg::Cr3, root);
            assert_eq!(next(&mut cache, &mut vcpu, memory), None);
        }
    }

    #[test]
    fn code_is_found_in_pages_of_every_size() {
        use crate::walk::locate_64_bit;
        use hw_x86::paging::entry;
        let memory = &TestPlatform::new().memory;
        let mut vcpu = ScriptedVcpu::long(0x8000);
        let table = entry::PRESENT | entry::WRITE;
        let large = table | entry::LARGE;
        let entries = [
            (0x8000, 0x9000 | table),
            (0x8ff8, 0x9000 | table | entry::NX),
            (0x9000, 0xa000 | table),
            (0x9008, 0x4000_0000 | large),
            (0xa000, 0xb000 | table),
            (0xa008, 0x20_0000 | large | 1 << 12),
            (0xb008, 0x7000 | table),
        ];
        for (at, value) in entries {
            memory.write(at, value).unwrap();
        }
        for linear in [0x1234, 0x20_1234, 0x4012_3456, 0x2000, 0x40_0000, 0x80_0000_0000, 0x0123] {
            let expected = Paging::of(&mut vcpu).translate(memory, linear, Intent::Fetch, false);
            let found = locate_64_bit(memory, 0x8000, linear);
            assert_eq!(found, expected.ok().map(|(address, _)| address), "{linear:#x}");
        }
        // Execute rights are not checked: the CPU did execute.
        assert_eq!(locate_64_bit(memory, 0x8fff, 0xffff_ff80_0000_1fff), Some(0x7fff));
    }

    #[test]
    fn msrs() {
        let (mut cpu, mut vcpu, mut platform) = guest(&[]);
        let mut access = |vcpu: &mut ScriptedVcpu,
                          platform: &mut TestPlatform,
                          msr,
                          value: Option<u64>| match value {
            Some(value) => cpu.write_msr(vcpu, platform, msr, value).map(|()| value),
            None => cpu.read_msr(vcpu, platform, msr),
        };
        // Registers of the back end, storage, constants, refused values.
        let cases: &[(u32, u64, bool)] = &[
            (0xc000_0082, 0xffff_8000_0000_1000, true),
            (0x277, 0x0007_0406_0007_0406, true),
            (0x277, 0x0207_0406_0007_0406, false),
            (0x2ff, 0xc06, true),
            (0x2ff, 0xc02, false),
            (0x200, 0xe000_0000, true),
            (0x200, 1 << 50, false),
            (0xc000_0080, 0xd01, true),
            (0xc000_0080, 0x1d01, false), // SVME
            (0xc000_0101, 1 << 62, false),
            (0xc001_0015, 1 << 24 | 1 << 8, true),
            (0x1234, 0, false),
        ];
        for &(msr, value, good) in cases {
            let done = access(&mut vcpu, &mut platform, msr, Some(value));
            assert_eq!(done.is_some(), good, "MSR {msr:#x} = {value:#x}");
            if good && msr != 0xc000_0080 {
                assert_eq!(
                    access(&mut vcpu, &mut platform, msr, None),
                    Some(value),
                    "MSR {msr:#x}"
                );
            }
        }
        assert_eq!(platform.unknown.len(), 6);
        assert_eq!(access(&mut vcpu, &mut platform, 0x1234, None), None);
        assert_eq!(access(&mut vcpu, &mut platform, 0x1b, None), Some(0x55));
        // The time-stamp counter.
        platform.tsc = 9000;
        access(&mut vcpu, &mut platform, 0x10, Some(0));
        assert_eq!(
            (vcpu.get(Reg::TscOffset), &platform.tsc_written[..]),
            (9000_u64.wrapping_neg(), &[0][..])
        );
        platform.tsc = 9500;
        assert_eq!(access(&mut vcpu, &mut platform, 0x10, None), Some(500));
        // The paravirtual clock: version even, TSC, time, 1 ns per tick.
        access(&mut vcpu, &mut platform, 0x4b56_4d01, Some(0x2001));
        let word = |at| platform.memory.read::<u64>(at).unwrap();
        assert_eq!([word(0x2000), word(0x2008), word(0x2010)], [2, 500, 8500]);
        assert_eq!(word(0x2018), 0x8000_0000 | 1 << 32 | 1 << 40);
        access(&mut vcpu, &mut platform, 0x4b56_4d00, Some(0x3000));
        assert_eq!(platform.memory.read::<u64>(0x3000), Ok(1_700_000_000 << 32 | 2));
        // Outside memory: refused and reported, no other effect.
        assert_eq!(access(&mut vcpu, &mut platform, 0x4b56_4d00, Some(1 << 40)), None);
    }

    #[test]
    fn ports_keep_the_rest_of_rax() {
        let (mut cpu, mut vcpu, mut platform) = guest(&[]);
        let io = |port, size, write| {
            let next_rip = CODE + 1;
            Exit::Io(IoExit { port, size, write, string: false, rep: false, next_rip })
        };
        vcpu.set_gpr(Gpr::Rax, 0x1122_3344_5566_7788);
        vcpu.then(move |_| io(0x80, 1, true));
        vcpu.then(move |_| io(0x60, 1, false));
        vcpu.then(move |vcpu| {
            assert_eq!(vcpu.gpr(Gpr::Rax), 0x1122_3344_5566_77ff);
            io(0x60, 4, false)
        });
        play(&mut cpu, &mut vcpu, &mut platform);
        assert_eq!(vcpu.gpr(Gpr::Rax), 0xffff_ffff);
        assert_eq!(platform.ports, [(0x80, 1, 0x88), (0x60, 1, 0), (0x60, 4, 0)]);
    }

    #[test]
    fn xcr0_and_cr8() {
        let (mut cpu, mut vcpu, mut platform) = guest(&[0x0f, 0x01, 0xd1, 0x44, 0x0f, 0x22, 0xc3]);
        vcpu.set_gpr(Gpr::Rax, 7);
        vcpu.then(|_| Exit::Xsetbv);
        vcpu.then(|vcpu| {
            assert_eq!((vcpu.get(Reg::Xcr0), vcpu.get(Reg::Rip)), (7, CODE + 3));
            vcpu.set(Reg::Rip, CODE);
            vcpu.set_gpr(Gpr::Rax, 5); // AVX without SSE
            Exit::Xsetbv
        });
        // mov cr8, rbx in 64-bit code needs tables: here the 32-bit form, LOCK MOV CR0.
        vcpu.then(|vcpu| {
            vcpu.set(Reg::Rip, CODE + 4);
            vcpu.set_gpr(Gpr::Rbx, 9);
            Exit::CrAccess { register: 8, write: true }
        });
        let entries = play(&mut cpu, &mut vcpu, &mut platform);
        assert_eq!(entries[2].0, PROTECTION);
        assert_eq!((platform.cr8, vcpu.get(Reg::Rip)), (9, CODE + 7));
    }

    #[test]
    fn a_priority_of_the_guests_own() {
        let (mut cpu, mut vcpu, mut platform) = guest(&[0x90]);
        platform.cr8 = 3;
        vcpu.then(|vcpu| {
            assert_eq!(std::mem::replace(&mut vcpu.cr8, 5), 3);
            Exit::Recall { events: 1 }
        });
        assert_eq!(cpu.run(&mut vcpu, &mut platform), StopReason::Recall(1));
        assert_eq!(platform.cr8, 5);
        // The guest sets the same through the APIC's TPR.
        platform.cr8 = 7;
        vcpu.then(|vcpu| {
            assert_eq!(vcpu.cr8, 7);
            Exit::Recall { events: 2 }
        });
        assert_eq!((cpu.run(&mut vcpu, &mut platform), platform.cr8), (StopReason::Recall(2), 7));
    }

    #[test]
    fn application_processors_start_on_a_start_up_ipi() {
        let mut platform = TestPlatform::new();
        let mut cpu = Cpu::new(1, 40);
        let mut vcpu = ScriptedVcpu::flat32();
        let idle = StopReason::Idle { deadline_ticks: u64::MAX };
        platform.request(0x31);
        assert_eq!(cpu.run(&mut vcpu, &mut platform), idle);
        platform.init = true;
        assert_eq!(cpu.run(&mut vcpu, &mut platform), idle);
        platform.startup = Some(0x9a);
        platform.requested.clear();
        assert_eq!(play(&mut cpu, &mut vcpu, &mut platform), [(Event::NONE, false)]);
        let cs = vcpu.segment(Seg::Cs);
        assert_eq!((cs.selector, cs.base, vcpu.get(Reg::Rip)), (0x9a00, 0x9a000, 0));
        assert_eq!(vcpu.gpr(Gpr::Rdx), 0x800f12);
        // A running processor ignores start-up messages.
        platform.startup = Some(1);
        vcpu.set(Reg::Rip, 5);
        play(&mut cpu, &mut vcpu, &mut platform);
        assert_eq!(vcpu.get(Reg::Rip), 5);
    }

    #[test]
    fn ends() {
        let cases = [
            (Exit::Shutdown, Outcome::TripleFault),
            (Exit::InvalidState { why: "no", code: 1 }, Outcome::TripleFault),
            (Exit::HostError(5), Outcome::HostError(5)),
            (Exit::Unknown(0x99), Outcome::HostError(0x99)),
        ];
        for (exit, outcome) in cases {
            let (mut cpu, mut vcpu, mut platform) = guest(&[]);
            vcpu.then(move |_| exit);
            assert_eq!(cpu.run(&mut vcpu, &mut platform), StopReason::End(outcome));
        }
        let (mut cpu, mut vcpu, mut platform) = guest(&[]);
        platform.end = Some(Outcome::PowerOff);
        assert_eq!(cpu.run(&mut vcpu, &mut platform), StopReason::End(Outcome::PowerOff));
    }

    /// One random step of the guest or the platform.
    #[derive(Clone, Copy, Debug)]
    enum Move {
        Request(u8),
        Nmi,
        Toggle,
        CutShort,
        Exception,
        Exit,
    }

    fn moves() -> impl Strategy<Value = Vec<Move>> {
        let one = prop_oneof![
            (0x20_u8..0x60).prop_map(Move::Request),
            Just(Move::Nmi),
            Just(Move::Toggle),
            Just(Move::CutShort),
            Just(Move::Exception),
            Just(Move::Exit),
        ];
        proptest::collection::vec(one, 1..60)
    }

    proptest! {
        /// A guest that switches interrupts on and off at random and whose event deliveries are
        /// interrupted at random: each requested event arrives exactly once, maskable interrupts
        /// only while enabled, and none is pending at the end.
        #[test]
        fn nothing_is_lost_or_doubled(moves in moves(), asks: bool) {
            let (mut cpu, mut vcpu, mut platform) = guest(&[]);
            platform.asks = asks;
            let mut accepted = Vec::new();
            let taken = std::rc::Rc::new(core::cell::RefCell::new(Vec::new()));
            let mut requested = Vec::new();
            let mut nmis = 0;
            let mut steps = moves.into_iter();
            // After the moves the guest enables interrupts and completes handler after handler.
            let mut closing = 200;
            loop {
                let step = steps.next();
                if step.is_none() {
                    closing -= 1;
                    if closing == 0 {
                        break;
                    }
                }
                match step {
                    Some(Move::Request(vector)) if !platform.requested.contains(&vector) => {
                        requested.push(vector);
                        platform.request(vector);
                    }
                    // A second NMI merges with a pending one, as on hardware.
                    Some(Move::Nmi) if !platform.nmi && !cpu.nmi => {
                        nmis += 1;
                        platform.nmi = true;
                        platform.needs_service = true;
                    }
                    _ => {}
                }
                vcpu.entries.clear();
                let cut = matches!(step, Some(Move::CutShort));
                let exception = matches!(step, Some(Move::Exception));
                let toggle = matches!(step, Some(Move::Toggle)) || step.is_none();
                let taken_by_guest = taken.clone();
                vcpu.then(move |vcpu| {
                    let mut delivered = vcpu.entries.last().map_or(Event::NONE, |entry| entry.event);
                    if let (InterruptWindow::DeliverVirq(vector), true) = (vcpu.window, cut || exception)
                        && !delivered.is_some()
                        && vcpu.get(Reg::Rflags) & RFLAGS_IF != 0
                    {
                        // It takes the interrupt, of which there is an end at once.
                        vcpu.window = InterruptWindow::Nothing;
                        delivered = Event::interrupt(vector);
                    }
                    if cut && delivered.is_some() {
                        vcpu.slot = delivered;
                        return Exit::Recall { events: 1 };
                    }
                    if exception {
                        vcpu.slot = delivered;
                        return Exit::Exception { vector: ALIGNMENT, code: 0 };
                    }
                    if delivered.is_some() {
                        interrupts(vcpu, false); // the handler
                    }
                    if toggle {
                        let open = vcpu.get(Reg::Rflags) & RFLAGS_IF != 0;
                        interrupts(vcpu, !open);
                    }
                    let open = vcpu.get(Reg::Rflags) & RFLAGS_IF != 0;
                    match vcpu.window {
                        InterruptWindow::Exit if open => return Exit::InterruptWindow,
                        InterruptWindow::DeliverVirq(vector) if open => {
                            vcpu.window = InterruptWindow::Nothing;
                            interrupts(vcpu, false);
                            taken_by_guest.borrow_mut().push(vector);
                        }
                        _ => {}
                    }
                    Exit::Recall { events: 0 }
                });
                let pause = cpu.run(&mut vcpu, &mut platform);
                // After a window exit the next entry finds an empty script.
                prop_assert!(matches!(pause, StopReason::Recall(_) | StopReason::End(Outcome::HostError(0))));
                for (at, entry) in vcpu.entries.iter().enumerate() {
                    let is_cut = (cut || exception) && at == 0;
                    if !entry.event.is_some() || entry.event.is_exception() || is_cut {
                        continue;
                    }
                    if entry.event == Event::NMI {
                        nmis -= 1;
                    } else {
                        prop_assert!(entry.open);
                        accepted.push(entry.event.vector());
                    }
                }
                let ended = matches!(pause, StopReason::End(_));
                if ended && vcpu.entries.last().is_some_and(|entry| entry.event.is_some()) {
                    interrupts(&mut vcpu, false);
                }
            }
            accepted.append(&mut taken.borrow_mut());
            requested.sort_unstable();
            accepted.sort_unstable();
            prop_assert_eq!(accepted, requested);
            prop_assert_eq!(nmis, 0);
            prop_assert!(platform.requested.is_empty() && vcpu.window == InterruptWindow::Nothing);
        }
    }
}

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

use hw_x86::cpuid::leaf;
use hw_x86::paging::xcr0;
use vmm_vcpu::deadline::Deadline;
use vmm_vcpu::{Activity, Flow, MAX_VCPUS, StopReason};

use crate::exit::{EXIT_NAMES, Exit};
use crate::length::{FetchCache, Pattern};
use crate::msr::Msrs;
use crate::nmi::NmiMask;
use crate::platform::{PcPlatform, PendingInterrupt};
use crate::pv::{EoiWord, StealRecord};
use crate::registers::{Groups, Reg, Registers};
use crate::vcpu::{Event, InterruptWindow, X86Vcpu};
use exception::retire;

mod control;
mod exception;
mod exits;
#[cfg(test)]
mod tests;

/// `RFLAGS.IF`.
const RFLAGS_IF: u64 = 1 << 9;
/// `RFLAGS.TF`.
pub(crate) const RFLAGS_TF: u64 = 1 << 8;
/// `DR6.BS`: single step.
pub(crate) const DR6_SINGLE_STEP: u64 = 1 << 14;

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
            self.power_on(vcpu, platform);
        }
        let signals = platform.service_timers(self.index);
        if let Some(outcome) = signals.end {
            return Err(StopReason::End(outcome));
        }
        let interrupts = signals.interrupts;
        let signature = |platform: &P| platform.cpuid().lookup(leaf::FEATURES, 0).0[0];
        if interrupts.init {
            self.reset(vcpu, signature(platform));
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

    /// Initialises the vCPU before its first entry.
    #[cold]
    fn power_on<V: X86Vcpu, P: PcPlatform>(&mut self, vcpu: &mut V, platform: &mut P) {
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

    /// Carries out an INIT. `signature`: that of the processor in `CPUID`.
    #[cold]
    fn reset<V: X86Vcpu>(&mut self, vcpu: &mut V, signature: u32) {
        self.nmi = false;
        self.nmi_mask.clear(vcpu);
        self.deferred = Event::NONE;
        self.activity = Activity::Parked;
        self.eoi = EoiWord::OFF;
        self.steal.reset();
        vcpu.set_wait_exits(false);
        vcpu.set_event(Event::NONE);
        start_up(vcpu, 0, signature);
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
}

/// Returns true if the guest can take a maskable interrupt now.
#[inline(always)]
fn accepts_interrupt(vcpu: &mut impl X86Vcpu) -> bool {
    vcpu.get(Reg::Rflags) & RFLAGS_IF != 0 && vcpu.get(Reg::InterruptShadow) & 1 == 0
}

/// Sets the state after a start-up IPI (APM vol. 2, section 15.27.8): real mode at `page << 12`.
fn start_up(vcpu: &mut impl X86Vcpu, page: u8, signature: u32) {
    vcpu.store(&Registers::reset(page, signature), Groups::INIT);
}

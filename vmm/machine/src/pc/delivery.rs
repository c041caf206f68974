//! Delivery of interrupts to local APICs and vCPUs, and service of timers.

use vmm_bus::{Device, Nanos};
use vmm_vcpu::Signals;
use vmm_x86::apic::InterruptMessage;
use vmm_x86::apic::local::{self, LocalApic};
use vmm_x86::pv::ApicIds;
use vmm_x86::{Acknowledged, Interrupts, PendingInterrupt};

use super::{Machine, PcBoard};
use crate::interrupts::{CHIPS, Chip, ChipEnv, FUNCTIONS};
use crate::{Host, layout};

impl<H: Host, const CPUS: usize> PcBoard<'_, '_, H, CPUS> {
    /// Propagates all recorded effects. Terminates: a line change or a message makes no line
    /// change, and only an EOI makes messages.
    pub(super) fn propagate(&mut self) {
        loop {
            if let Some((irq, pulse, level)) = self.machine.router.take_change() {
                for level in pulse.into_iter().chain([level]) {
                    self.set_irq(irq, level);
                }
            } else if let Some(message) = self.machine.router.take_message() {
                self.deliver(&message, None);
            } else if !self.take_apic_events() {
                break;
            }
        }
        self.update_intr();
    }

    pub(super) fn set_irq(&mut self, irq: u8, level: bool) {
        let Machine { chips, router, .. } = &mut *self.machine;
        chips.pic.set_irq(irq, level);
        if let Some(pin) = layout::gsi(irq) {
            let mut env = ChipEnv { router, host: &mut *self.host, chip: Chip::IoApic as usize };
            chips.io_apic.set_irq(pin, level, &mut env);
        }
    }

    /// Connects the 8259's output to LINT0 of every local APIC.
    pub(super) fn update_intr(&mut self) {
        let level = self.machine.chips.pic.intr();
        if level == self.machine.intr {
            return;
        }
        self.machine.intr = level;
        for cpu in 0..self.fixed.vcpus {
            self.machine.apics[cpu].set_lint(0, level);
            // A pin in another mode than ExtINT may have turned the edge into an event.
            self.take_events_of(cpu);
            self.request_service_if_waiting(cpu);
        }
    }

    /// Delivers a message to its local APICs, except the sender; returns the CPU of the last one.
    #[inline]
    pub(super) fn deliver(
        &mut self,
        message: &InterruptMessage,
        sender: Option<usize>,
    ) -> Option<usize> {
        if message.delivery == local::spec::LOWEST {
            return self.deliver_lowest(message, sender);
        }
        let mut target = None;
        for cpu in 0..self.fixed.vcpus {
            if Some(cpu) != sender && self.machine.apics[cpu].matches(message) {
                self.deliver_to(cpu, message);
                target = Some(cpu);
            }
        }
        target
    }

    /// Delivers a message to the destination of lowest priority. APICs that are disabled by
    /// software take no part: they would drop the message.
    #[cold]
    pub(super) fn deliver_lowest(
        &mut self,
        message: &InterruptMessage,
        sender: Option<usize>,
    ) -> Option<usize> {
        let apics = &self.machine.apics;
        let takes_part = |apic: &LocalApic| apic.is_software_enabled() && apic.matches(message);
        let lowest = (0..self.fixed.vcpus)
            .filter(|&cpu| Some(cpu) != sender && takes_part(&apics[cpu]))
            .min_by_key(|&cpu| apics[cpu].ppr());
        lowest.inspect(|&cpu| self.deliver_to(cpu, message))
    }

    /// Delivers a message to the local APICs with these ids, including the sender's; returns their
    /// number.
    pub(super) fn multicast(&mut self, to: ApicIds, message: &InterruptMessage) -> u32 {
        let mut count = 0;
        for cpu in 0..self.fixed.vcpus {
            if to.contains(self.machine.apics[cpu].id()) {
                count += 1;
                self.deliver_to(cpu, message);
            }
        }
        count
    }

    #[inline(always)]
    pub(super) fn deliver_to(&mut self, cpu: usize, message: &InterruptMessage) {
        if self.machine.apics[cpu].deliver(message) {
            self.take_events_of(cpu);
            self.request_service(cpu);
        }
    }

    /// Requests that the CPU services its pending events.
    pub(super) fn request_service(&mut self, cpu: usize) {
        self.machine.router.needs_service |= 1 << cpu;
    }

    /// Requests service of the CPU if an interrupt is pending for it.
    #[inline]
    pub(super) fn request_service_if_waiting(&mut self, cpu: usize) {
        if self.interrupt_waits(cpu) {
            self.request_service(cpu);
        }
    }

    /// Takes the events of local APICs for the board; true if there was any.
    pub(super) fn take_apic_events(&mut self) -> bool {
        let mut any = false;
        for cpu in 0..self.fixed.vcpus {
            any |= self.take_events_of(cpu);
        }
        any
    }

    #[inline]
    pub(super) fn take_events_of(&mut self, cpu: usize) -> bool {
        let any = self.machine.apics[cpu].has_events();
        if any {
            self.take_known_events_of(cpu);
        }
        any
    }

    #[inline(never)]
    pub(super) fn take_known_events_of(&mut self, cpu: usize) {
        let machine = &mut *self.machine;
        let events = machine.apics[cpu].take_events();
        let bit = 1 << cpu;
        if events.nmi {
            machine.nmi |= bit;
        }
        if events.init {
            machine.init |= bit;
            machine.startup[cpu] = None;
        }
        if events.startup.is_some() {
            machine.startup[cpu] = events.startup;
        }
        if events.ext_int {
            machine.ext_int |= bit;
        }
        if let Some(vector) = events.eoi {
            let Machine { chips, router, .. } = machine;
            let mut env = ChipEnv { router, host: &mut *self.host, chip: Chip::IoApic as usize };
            chips.io_apic.eoi(vector, &mut env);
        }
        if events.smi {
            self.machine.router.counters.other += 1;
        }
        let alerts = events.nmi || events.init || events.ext_int || events.priority;
        if alerts || events.startup.is_some() {
            self.request_service(cpu);
        }
    }

    /// True if the 8259 has an interrupt for this CPU.
    #[inline]
    pub(super) fn pic_waits(&self, cpu: usize) -> bool {
        let machine = &*self.machine;
        let asked = machine.ext_int & 1 << cpu != 0;
        machine.intr && (asked || machine.apics[cpu].accepts_pic() && cpu == 0)
    }

    /// True if an interrupt is pending for this CPU, even below the task priority: the CPU may have
    /// a lower task priority that its local APIC does not know yet.
    #[inline]
    pub(super) fn interrupt_waits(&self, cpu: usize) -> bool {
        self.machine.apics[cpu].has_pending() || self.pic_waits(cpu)
    }

    /// The interrupt pending for this CPU.
    pub(super) fn waiting(&self, cpu: usize) -> PendingInterrupt {
        let apic = &self.machine.apics[cpu];
        match apic.pending() {
            _ if self.pic_waits(cpu) => PendingInterrupt::Pic,
            Some(vector) => {
                PendingInterrupt::Virq { vector, eoi_elidable: apic.will_eoi_be_elidable(vector) }
            }
            None if apic.is_masked_by_priority() => PendingInterrupt::Masked,
            None => PendingInterrupt::None,
        }
    }

    /// Services the timers from index `start` on that are due at `now`; returns the slot of the
    /// first function with one. Each timer once: one that is due again at once is serviced by the
    /// next call from 0 on.
    pub(super) fn service_timers(&mut self, start: &mut usize, now: Nanos) -> Option<usize> {
        while let Some(timer) = self.machine.router.take_due(*start, now) {
            *start = timer + 1;
            match CHIPS.get(timer) {
                Some(&chip) => {
                    self.with_chip(chip, |chip, env| chip.wake(0, env));
                }
                None if timer >= FUNCTIONS => return Some(timer - FUNCTIONS),
                None => {
                    let owner = timer - CHIPS.len();
                    // Requests service of the owner if the timer creates an event.
                    self.with_apic(owner, |apic, env| apic.wake(0, env));
                }
            }
        }
        None
    }

    /// Takes the events pending for a CPU.
    pub(super) fn take_signals(&mut self, cpu: usize) -> Signals<Interrupts> {
        let bit = 1 << cpu;
        let init = self.machine.init & bit != 0;
        if init {
            self.with_apic(cpu, |apic, env| apic.init(env));
        }
        let maskable = self.waiting(cpu);
        let machine = &mut *self.machine;
        let offered =
            if let PendingInterrupt::Virq { vector, .. } = maskable { Some(vector) } else { None };
        machine.apics[cpu].set_offered(offered);
        let interrupts = Interrupts {
            nmi: machine.nmi & bit != 0,
            maskable,
            init,
            startup: machine.startup[cpu].take(),
            cr8: machine.apics[cpu].cr8(),
            tpr_low: machine.apics[cpu].tpr() & 0xf != 0,
        };
        machine.nmi &= !bit;
        machine.init &= !bit;
        machine.router.mark_serviced(cpu);
        let deadline = machine.router.deadline(cpu);
        Signals { end: machine.router.end, deadline, interrupts }
    }

    pub(super) fn acknowledge(&mut self, cpu: usize) -> Option<Acknowledged> {
        if self.pic_waits(cpu) {
            self.machine.ext_int &= !(1 << cpu);
            let vector = self.machine.chips.pic.acknowledge();
            self.update_intr();
            let more = self.machine.apics[cpu].pending().is_some() || self.pic_waits(cpu);
            return Some(Acknowledged { vector, eoi_elidable: false, more });
        }
        let apic = &mut self.machine.apics[cpu];
        let vector = apic.pending()?;
        apic.set_offered(None);
        apic.accept(vector);
        // No other requested interrupt has a higher priority.
        Some(Acknowledged { vector, eoi_elidable: apic.is_eoi_elidable(), more: false })
    }
}

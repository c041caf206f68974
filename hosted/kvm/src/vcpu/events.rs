//! Injection of interrupts and exceptions.

use hw_x86::vmcb::event;
use kvm_bindings::{KVM_VCPUEVENT_VALID_NMI_PENDING, KVM_VCPUEVENT_VALID_SHADOW, kvm_vcpu_events};
use proto::hosted::debug::HALT;
use vmm_x86::{Event, Exit, InterruptWindow, Reg, X86Vcpu};

use super::{KvmVcpu, Pending, StepState};
use crate::calls;

impl KvmVcpu<'_> {
    /// Injects an interrupt at the next entry.
    pub fn interrupt(&mut self, vector: u8) {
        let result = calls::interrupt(&self.fd, vector);
        self.note(result);
        self.fd.get_kvm_run().ready_for_interrupt_injection = 0;
    }

    /// Injects an exception at the next entry.
    pub fn exception(&mut self, event: Event) {
        let result = self.fd.get_vcpu_events().and_then(|mut events| {
            events.exception.injected = 1;
            events.exception.nr = event.vector();
            events.exception.has_error_code = u8::from(event.0 & event::ERROR_VALID != 0);
            events.exception.error_code = (event.0 >> 32) as u32;
            self.fd.set_vcpu_events(&events)
        });
        self.note(result);
    }

    /// Cancels an injected interrupt: the debugger may continue at another instruction first.
    pub fn cancel_interrupt(&mut self) {
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

    /// Drops the events that KVM has and the state of their delivery, as an INIT does.
    pub fn drop_events(&mut self) {
        let result = self.fd.get_vcpu_events();
        let result = result.and_then(|events| self.fd.set_vcpu_events(&without_events(events)));
        self.note(result);
    }

    /// Returns whether the guest would take an interrupt at a `HLT`, possibly that of `STI; HLT` on
    /// a host CPU that has lost the shadow of the `STI`. The `HLT` is then executed first, which
    /// every CPU may do.
    pub fn hlt_precedes_interrupt(&mut self) -> bool {
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
    pub fn deliver(&mut self) -> Option<Exit> {
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
}

/// Returns KVM's event state without exceptions, interrupts, NMIs, and what blocks them.
fn without_events(events: kvm_vcpu_events) -> kvm_vcpu_events {
    kvm_vcpu_events {
        exception: Default::default(),
        exception_has_payload: 0,
        exception_payload: 0,
        interrupt: Default::default(),
        nmi: Default::default(),
        flags: events.flags | KVM_VCPUEVENT_VALID_NMI_PENDING | KVM_VCPUEVENT_VALID_SHADOW,
        ..events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_init_leaves_no_events() {
        let mut events = kvm_vcpu_events { sipi_vector: 5, ..Default::default() };
        events.smi.smm = 1;
        let expected = kvm_vcpu_events { flags: 5, ..events };
        (events.exception.injected, events.exception.pending) = (1, 1);
        (events.interrupt.injected, events.interrupt.nr, events.interrupt.shadow) = (1, 0x31, 1);
        (events.nmi.injected, events.nmi.pending, events.nmi.masked) = (1, 1, 1);
        assert_eq!(without_events(events), expected);
    }
}

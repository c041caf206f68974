//! Events of a vCPU's notification that reach its guest as interrupts, without the VMM: doorbells
//! of peer VMs. The VMM states event and interrupt in [`VcpuState::event_virqs`]. A task or guest
//! that signals the event needs the right to do so; the interrupt is one of the vCPU's own guest,
//! whatever the VMM writes.
//!
//! Events stay pending in the notification until list registers are free.

use core::cell::Cell;

use abi::vcpu::arm64::{VcpuState, virq};

use super::virqs;

/// Event of a word, as a bit; 0: the word has none.
#[inline(always)]
fn event(word: u64) -> u64 {
    u64::from(word & virq::VALID != 0) << (word >> virq::EVENT_SHIFT & virq::EVENT_MASK)
}

/// Events for which the state page has an interrupt.
#[inline(never)]
pub fn with_virq(state: &VcpuState) -> u64 {
    state.event_virqs.iter().fold(0, |all, word| all | event(word.get()))
}

/// Moves the interrupts of pending events to list registers, before an entry.
#[inline(always)]
pub fn deliver(pending: &Cell<u64>, state: &VcpuState) {
    if pending.get() != 0 {
        deliver_pending(pending, state);
    }
}

#[inline(never)]
fn deliver_pending(pending: &Cell<u64>, state: &VcpuState) {
    for word in &state.event_virqs {
        let word = word.get();
        let event = event(word);
        if pending.get() & event != 0 && virqs::place_word(word, 0) {
            pending.set(pending.get() & !event);
        }
    }
    if pending.get() != 0 {
        // No list register is free, or the VMM has changed the words meanwhile: if they are free,
        // the processor interrupts at once, and the VMM gets the events.
        virqs::request_maintenance();
    }
}

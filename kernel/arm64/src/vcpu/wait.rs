//! Wait of a guest for an interrupt (`WFI`).

use abi::vcpu::arm64::virq;
use abi::vcpu::exit;
use kernel_core::Kernel;
use kernel_run::exit::ReturnToUser;

use super::guest_entry::GuestEntry;
use super::{count_handled, return_exit, sgi, timer, virqs};
use crate::{Arm64, time};

/// Handles the wait of a guest for an interrupt, for which the CPU has not waited in its place
/// (`entry.rs`), or which something else than its timer has ended. Returns the exit reason for the
/// VMM, if it gets the exit.
pub fn begin(kernel: &Kernel<Arm64>, cpu_index: usize, entry: GuestEntry<'_>) -> Option<u64> {
    let (state, now) = (entry.state(), time::counter());
    // A timer whose interrupt the guest has not enabled does not end the wait.
    let has_timer = state.timer_virq.get() & virq::VALID != 0;
    let deadline = if has_timer { timer::deadline() } else { abi::FOREVER };
    let has_word = state.virqs.iter().any(|word| word.get() != 0);
    let has_sgi = sgi::is_pending(&entry.vcpu.arch.sgis, state);
    if has_word || has_sgi || virqs::has_pending() || deadline <= now {
        count_handled(kernel, state);
        return None;
    }
    state.timer_deadline.set(deadline);
    if state.run.halt.get() == 0 {
        return Some(exit::HALT);
    }
    let deadline = state.run.deadline.get().min(deadline);
    let events = entry.notification.bits.take();
    if events != 0 || deadline <= now {
        state.run.events.set(events);
        return Some(exit::HALTED);
    }
    // The thread may have been stopped meanwhile.
    let name = kernel.cpus[cpu_index].current.get();
    match name.is_some_and(|name| kernel.halt(name, entry.thread, entry.notification, deadline)) {
        true => entry.vcpu.arch.halted.set(now),
        false => return Some(exit::HALT),
    }
    None
}

/// Ends the wait of a guest for an interrupt: events are pending, or a deadline has passed. `None`:
/// that of the guest's timer, so the guest continues.
pub fn end(kernel: &Kernel<Arm64>, entry: GuestEntry<'_>) -> Option<ReturnToUser<Arm64>> {
    let run = &entry.state().run;
    let (since, now) = (entry.vcpu.arch.halted.take(), time::counter());
    run.halted.add(now.saturating_sub(since));
    let events = entry.notification.bits.take();
    if events == 0 && now < run.deadline.get() {
        count_handled(kernel, entry.state());
        return None;
    }
    run.events.set(events);
    Some(return_exit(kernel, entry, exit::HALTED, 0))
}

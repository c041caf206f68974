//! Wait of a guest for an interrupt (`WFI`).

use abi::vcpu::arm64::virq;
use abi::vcpu::exit;
use hw_arm64::esr;
use kernel_core::Kernel;
use kernel_run::exit::ReturnToUser;

use super::guest_entry::GuestEntry;
use super::{GuestCpu, count_handled, events, return_exit, sgi, timer, virqs};
use crate::{Arm64, time};

/// Handles the wait of a guest for an interrupt, for which the CPU has not waited in its place
/// (`entry.rs`), or which something else than its timer has ended. Returns the exit to the VMM, if
/// it gets it.
#[inline(always)]
pub fn begin(
    kernel: &Kernel<Arm64>,
    cpu_index: usize,
    local: &GuestCpu,
    entry: GuestEntry<'_>,
    syndrome: u64,
) -> Option<ReturnToUser<Arm64>> {
    entry.state.pc.add(esr::instruction_length(syndrome));
    let reason = block(kernel, cpu_index, local, entry)?;
    Some(return_exit(kernel, entry, reason, syndrome))
}

/// Blocks the thread, unless the guest need not wait. Returns the exit reason for the VMM, if it
/// gets the exit.
#[inline(always)]
fn block(
    kernel: &Kernel<Arm64>,
    cpu_index: usize,
    local: &GuestCpu,
    entry: GuestEntry<'_>,
) -> Option<u64> {
    let (state, now) = (entry.state, time::counter());
    // A timer whose interrupt the guest has not enabled does not end the wait.
    let has_timer = state.timer_virq.get() & virq::VALID != 0;
    let deadline = if has_timer { timer::deadline() } else { abi::FOREVER };
    let has_sgi = sgi::is_pending(&entry.vcpu.arch.sgis, state);
    let has_event = || {
        let pending = entry.notification.bits.get();
        pending != 0 && pending & events::with_virq(state) != 0
    };
    let has_virq = virqs::has_words(state) || has_sgi || virqs::has_pending();
    if has_virq || deadline <= now || has_event() {
        count_handled(kernel, state);
        local.continues.set(true);
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
    if let Some(name) = name
        && kernel.halt(name, entry.thread, entry.notification, deadline)
    {
        entry.vcpu.arch.halted.set(now);
        return None;
    }
    Some(exit::HALT)
}

/// Ends the wait of a guest for an interrupt: these events were pending, or a deadline has passed.
/// `true`: that of the guest's timer, or an interrupt for it, so the guest continues.
#[inline(always)]
pub fn end(kernel: &Kernel<Arm64>, entry: GuestEntry<'_>, events: u64) -> bool {
    let run = &entry.state.run;
    let (since, now) = (entry.vcpu.arch.halted.take(), time::counter());
    run.halted.add(now.saturating_sub(since));
    if events == 0 && now < run.deadline.get() {
        count_handled(kernel, entry.state);
        return true;
    }
    run.events.set(events);
    false
}

//! Wait of a guest for an interrupt (`WFI`).

use abi::vcpu::arm64::virq;
use abi::vcpu::exit;
use kernel_core::Kernel;
use kernel_run::exit::ReturnToUser;

use super::guest_entry::GuestEntry;
use super::{count_handled, return_exit, timer, virqs};
use crate::{Arm64, time};

/// Handles the wait of a guest for an interrupt. Returns `false` if the VMM gets the exit.
pub fn begin(kernel: &Kernel<Arm64>, cpu_index: usize, entry: GuestEntry<'_>) -> bool {
    let state = entry.state();
    // A timer whose interrupt the guest has not enabled does not end the wait.
    let has_timer = state.timer_virq.get() & virq::VALID != 0;
    let deadline = if has_timer { timer::deadline() } else { abi::FOREVER };
    let has_word = state.virqs.iter().any(|word| word.get() != 0);
    if has_word || virqs::has_pending() || deadline <= time::counter() {
        count_handled(kernel, state);
        return true;
    }
    state.timer_deadline.set(deadline);
    state.run.halt.get() != 0 && halt(kernel, cpu_index, entry, deadline)
}

/// Blocks the VMM's thread in `VcpuRun` until an event, its deadline or that of the guest's timer.
/// Returns `false` if it cannot wait.
fn halt(
    kernel: &Kernel<Arm64>,
    cpu_index: usize,
    entry: GuestEntry<'_>,
    timer_deadline: u64,
) -> bool {
    // The thread may have been stopped meanwhile.
    let Some(name) = kernel.cpus[cpu_index].current.get() else { return false };
    let since = time::counter();
    let deadline = entry.state().run.deadline.get().min(timer_deadline);
    let halts = deadline > since && kernel.halt(name, entry.thread, entry.notification, deadline);
    if halts {
        entry.vcpu.arch.halted.set(since);
    }
    halts
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

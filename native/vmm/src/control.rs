//! Control of a running VM by root: power button, pause, reports.
//!
//! vCPU 0 receives root's events. A request to all vCPUs is an *order*: vCPU 0 increments the order
//! number and kicks the other vCPUs. Each vCPU that finds a new order number publishes its figures,
//! and parks as long as the VM is paused.
//!
//! Root writes to the report page whether the VM is to be paused. The events for pause and resume
//! only make vCPU 0 read that word: event bits have no order, so of two that arrive together, they
//! do not tell which came last. A pause outlives a reset of the VM.
//!
//! While all vCPUs are parked, the VM's time stands still: it is less than the host's by the length
//! of all pauses. A pause begins when the last vCPU has parked, so no vCPU sees time go back.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use abi::FOREVER;
use native_rt::{Notification, SchedContext, Status, Window, time};
use proto::control::REASONS;
use proto::manage::{PAUSE_WORD, Report};
use proto::start::event;
use vmm_vcpu::MAX_VCPUS;

use crate::Cell;
use crate::platform::NativeVcpu;

/// Events that root signals.
pub const ROOT_EVENTS: u64 = event::POWER_BUTTON | event::PAUSE | event::RESUME | event::REPORT;
/// Maximum wait for the other vCPUs to park, in yields of the CPU. They have been kicked.
const PARK_YIELDS: u32 = 100_000;

/// Figures of a vCPU.
#[derive(Clone, Copy)]
pub struct VcpuFigures {
    /// World switches.
    pub entries: u64,
    /// Exits handled in the kernel.
    pub handled: u64,
    /// Exits by reason.
    pub exits: [u64; REASONS],
    /// Ticks that the kernel has waited while the guest was halted.
    halted: u64,
    /// CPU time of the thread, in ticks.
    used: u64,
}

const NO_FIGURES: VcpuFigures =
    VcpuFigures { entries: 0, handled: 0, exits: [0; REASONS], halted: 0, used: 0 };

/// Idle time of a vCPU in the VMM.
struct Idle {
    /// Total, without a current idle phase.
    ticks: AtomicU64,
    /// Start of the current idle phase; 0: not idle.
    since: AtomicU64,
}

struct AllFigures {
    each: [VcpuFigures; MAX_VCPUS],
    /// Exits before the last reset of the VM.
    past: [u64; REASONS],
    sequence: u64,
    /// Page for reports.
    page: Option<Window>,
}

/// Control of this program's VM: too large for a stack.
pub static CONTROL: Control = Control::new();

/// State of a VM's control.
pub struct Control {
    orders: AtomicU32,
    paused: AtomicBool,
    parked: AtomicU32,
    /// TSC value at which the last vCPU parked.
    parked_since: AtomicU64,
    paused_ticks: AtomicU64,
    idle: [Idle; MAX_VCPUS],
    figures: Cell<AllFigures>,
}

/// A VM as the thread of one vCPU passes it to [`Control::serve`].
pub trait ControlledVm {
    /// Presses the power button.
    fn press_power_button(&mut self);
    /// Returns whether the VM has ended.
    fn has_ended(&self) -> bool;
    /// Returns whether root wants the VM paused.
    fn is_pause_wanted(&self) -> bool;
    /// Returns the figures of the vCPU, without CPU time.
    fn figures(&mut self) -> VcpuFigures;
}

impl VcpuFigures {
    /// Returns figures without CPU time.
    pub fn new(vcpu: &mut NativeVcpu, exits: &[u64]) -> Self {
        let (entries, handled) = vcpu.counts();
        let mut own = Self { entries, handled, halted: vcpu.halted(), ..NO_FIGURES };
        for (sum, count) in own.exits.iter_mut().zip(exits) {
            *sum = *count;
        }
        own
    }
}

impl Control {
    /// Creates a control without orders.
    const fn new() -> Self {
        Self {
            orders: AtomicU32::new(0),
            paused: AtomicBool::new(false),
            parked: AtomicU32::new(0),
            parked_since: AtomicU64::new(0),
            paused_ticks: AtomicU64::new(0),
            idle: [const { Idle { ticks: AtomicU64::new(0), since: AtomicU64::new(0) } };
                MAX_VCPUS],
            figures: Cell::new(AllFigures {
                each: [NO_FIGURES; MAX_VCPUS],
                past: [0; REASONS],
                sequence: 0,
                page: None,
            }),
        }
    }

    /// Sets the page for reports.
    pub fn report_to(&self, page: Option<Window>) {
        self.figures.lock().page = page;
    }

    /// Returns the ticks by which the VM's time is less than the host's.
    pub fn paused_ticks(&self) -> u64 {
        self.paused_ticks.load(Ordering::Relaxed)
    }

    /// Returns the number of the last order. What vCPU 0 changed before that order is visible.
    pub fn orders(&self) -> u32 {
        self.orders.load(Ordering::Acquire)
    }

    /// Returns whether root wants the VM paused.
    pub fn is_pause_wanted(&self) -> bool {
        let page = self.figures.lock().page;
        let mut word = [0; 8];
        page.is_some_and(|page| page.read(PAUSE_WORD, &mut word)) && word != [0; 8]
    }

    /// Returns whether vCPU `index` has to park before it boots: the VM was reset during a pause,
    /// or root's event was lost with the end of the previous boot.
    pub fn boots_paused(&self, index: usize) -> bool {
        self.paused.load(Ordering::Acquire) || index == 0 && self.is_pause_wanted()
    }

    /// Returns the ticks in which the thread of vCPU `index` neither ran, on `context`, nor was
    /// idle or parked here, relative to a fixed moment in the past.
    pub fn missed_ticks(&self, index: usize, context: SchedContext) -> u64 {
        let rest =
            context.used() + self.idle[index].ticks.load(Ordering::Relaxed) + self.paused_ticks();
        time::tsc().wrapping_sub(rest)
    }

    /// Waits for events of an idle vCPU until `deadline`, a host TSC value.
    pub fn idle(&self, index: usize, of: Notification, deadline: u64) -> Result<u64, Status> {
        let since = time::tsc();
        let idle = &self.idle[index];
        idle.since.store(since, Ordering::Relaxed);
        let result = of.wait(deadline);
        idle.since.store(0, Ordering::Relaxed);
        // After the deadline the vCPU was ready.
        let until = match result {
            Err(Status::Timeout) => time::tsc().min(deadline),
            _ => time::tsc(),
        };
        // Only this thread writes it.
        let ticks = idle.ticks.load(Ordering::Relaxed) + until.saturating_sub(since);
        idle.ticks.store(ticks, Ordering::Relaxed);
        result
    }

    /// Adds the exits of a VM that is about to be reset.
    pub fn close(&self, index: usize, exits: &[u64]) {
        let mut figures = self.figures.lock();
        figures.each[index].exits = [0; REASONS];
        for (sum, count) in figures.past.iter_mut().zip(exits) {
            *sum += *count;
        }
    }

    /// Handles root's events (only on vCPU 0) and new orders. Returns other events that arrived
    /// meanwhile. `context` is the thread's scheduling context.
    #[cold]
    #[inline(never)]
    pub fn serve(
        &self,
        index: usize,
        events: u64,
        notifications: &[Notification],
        context: SchedContext,
        vm: &mut impl ControlledVm,
    ) -> u64 {
        let mut remaining = 0;
        let own = notifications[index];
        if index == 0 {
            self.handle_root_events(events, notifications, vm);
        }
        self.publish(index, notifications.len(), context, vm);
        if self.paused.load(Ordering::Acquire) {
            self.parked_since.fetch_max(time::tsc(), Ordering::Relaxed);
            self.parked.fetch_add(1, Ordering::AcqRel);
            loop {
                if index == 0 {
                    self.end_unwanted_pause(notifications, vm);
                }
                if !self.paused.load(Ordering::Acquire) || vm.has_ended() {
                    break;
                }
                // It fails only if the notification is gone, and the whole VM with it.
                let Ok(events) = own.wait(FOREVER) else { break };
                remaining |= events & !ROOT_EVENTS;
                if index == 0 {
                    self.handle_root_events(events, notifications, vm);
                }
                self.publish(index, notifications.len(), context, vm);
            }
            self.parked.fetch_sub(1, Ordering::AcqRel);
            if vm.has_ended() {
                // The pause begins again when the vCPUs of the next boot have parked.
                self.parked_since.store(0, Ordering::Relaxed);
            }
        }
        remaining
    }

    /// Handles root's events, except the end of a pause.
    fn handle_root_events(
        &self,
        events: u64,
        notifications: &[Notification],
        vm: &mut impl ControlledVm,
    ) {
        if events & event::POWER_BUTTON != 0 {
            vm.press_power_button();
        }
        // A pause revoked before it began has no effect.
        let begins = events & (event::PAUSE | event::RESUME) != 0
            && vm.is_pause_wanted()
            && !self.paused.swap(true, Ordering::Release);
        if begins || events & event::REPORT != 0 {
            self.kick_all(notifications);
        }
    }

    /// Issues an order to the other vCPUs.
    fn kick_all(&self, notifications: &[Notification]) {
        self.orders.fetch_add(1, Ordering::Release);
        for other in notifications.iter().skip(1) {
            // It fails only if the vCPU is gone.
            let _ = other.signal(event::KICK);
        }
    }

    /// Ends a pause that root no longer wants, once it has begun for all vCPUs.
    fn end_unwanted_pause(&self, notifications: &[Notification], vm: &impl ControlledVm) {
        if vm.is_pause_wanted() {
            return;
        }
        for _ in 0..PARK_YIELDS {
            let parked = self.parked.load(Ordering::Acquire) as usize;
            if parked >= notifications.len() || vm.has_ended() {
                break;
            }
            native_rt::yield_now();
        }
        let since = self.parked_since.swap(0, Ordering::Relaxed);
        // A vCPU that ended the VM had not parked: it has seen the time since then.
        if !vm.has_ended() {
            self.paused_ticks.fetch_add(time::tsc().saturating_sub(since), Ordering::Relaxed);
        }
        self.paused.store(false, Ordering::Release);
        self.kick_all(notifications);
    }

    /// Publishes the figures of a vCPU: together with the last ones of the other vCPUs, once each
    /// of `count` has published its first. Otherwise the exits of a vCPU before its first
    /// publication would be counted after the report.
    fn publish(
        &self,
        index: usize,
        count: usize,
        context: SchedContext,
        vm: &mut impl ControlledVm,
    ) {
        let Some(page) = self.figures.lock().page else { return };
        let own = VcpuFigures { used: context.used(), ..vm.figures() };
        let mut figures = self.figures.lock();
        figures.each[index] = own;
        if figures.each.iter().take(count).any(|vcpu| vcpu.used == 0) {
            return;
        }
        let report = self.sum(&figures);
        let begun = figures.sequence + 1;
        figures.sequence += 2;
        let mut bytes = [0; Report::LENGTH];
        for (chunk, word) in bytes[8..].as_chunks_mut::<8>().0.iter_mut().zip(report.pack()) {
            *chunk = word.to_le_bytes();
        }
        // The page has a fixed size. An odd number marks the rest as being written.
        let _ = page.write(0, &begun.to_le_bytes())
            && page.write(8, &bytes[8..])
            && page.write(0, &figures.sequence.to_le_bytes());
    }

    fn sum(&self, figures: &AllFigures) -> Report {
        let now = time::tsc();
        let mut report = Report { written: now, exits: figures.past, ..Report::default() };
        for (vcpu, idle) in figures.each.iter().zip(&self.idle) {
            report.entries += vcpu.entries;
            report.handled_in_kernel += vcpu.handled;
            report.halted += vcpu.halted;
            report.used += vcpu.used;
            for (sum, count) in report.exits.iter_mut().zip(vcpu.exits) {
                *sum += count;
            }
            let since = idle.since.load(Ordering::Relaxed);
            let current = if since == 0 { 0 } else { now.saturating_sub(since) };
            report.halted += idle.ticks.load(Ordering::Relaxed) + current;
        }
        let since = self.parked_since.load(Ordering::Relaxed);
        let current = if since == 0 { 0 } else { now.saturating_sub(since) };
        report.paused = self.paused_ticks() + current;
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A VM whose threads make no system calls.
    struct FakeVm {
        wanted: bool,
        ended: bool,
    }

    impl ControlledVm for FakeVm {
        fn press_power_button(&mut self) {}

        fn has_ended(&self) -> bool {
            self.ended
        }

        fn is_pause_wanted(&self) -> bool {
            self.wanted
        }

        fn figures(&mut self) -> VcpuFigures {
            NO_FIGURES
        }
    }

    const BOTH: u64 = event::PAUSE | event::RESUME;

    fn vcpus<const N: usize>() -> [Notification; N] {
        [Notification::at(0); N]
    }

    fn is_paused(control: &Control) -> bool {
        control.paused.load(Ordering::Relaxed)
    }

    #[test]
    fn last_wish_counts_while_running() {
        let control = Control::new();
        control.handle_root_events(BOTH, &[], &mut FakeVm { wanted: false, ended: false });
        assert!(!is_paused(&control));
        control.handle_root_events(BOTH, &[], &mut FakeVm { wanted: true, ended: false });
        assert!(is_paused(&control));
        assert_eq!(control.orders(), 1);
    }

    #[test]
    fn last_wish_counts_while_parked() {
        let control = Control::new();
        control.paused.store(true, Ordering::Relaxed);
        control.parked_since.store(time::tsc(), Ordering::Relaxed);
        // Resume, pause.
        let mut vm = FakeVm { wanted: true, ended: false };
        control.handle_root_events(BOTH, &[], &mut vm);
        control.end_unwanted_pause(&[], &vm);
        assert!(is_paused(&control) && control.paused_ticks() == 0);
        // Pause, resume.
        vm.wanted = false;
        let context = SchedContext::at(0);
        assert_eq!(control.serve(0, BOTH, &vcpus::<1>(), context, &mut vm), 0);
        assert!(!is_paused(&control));
        assert_eq!(control.parked.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn pause_outlives_a_reset() {
        let control = Control::new();
        control.paused.store(true, Ordering::Relaxed);
        let mut vm = FakeVm { wanted: true, ended: true };
        control.serve(1, 0, &vcpus::<2>(), SchedContext::at(0), &mut vm);
        assert!(control.boots_paused(0) && control.boots_paused(1));
        assert_eq!(control.parked.load(Ordering::Relaxed), 0);
        assert_eq!(control.parked_since.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn pause_that_a_reset_cuts_takes_no_time() {
        let control = Control::new();
        control.paused.store(true, Ordering::Relaxed);
        let mut vm = FakeVm { wanted: false, ended: true };
        control.serve(0, event::RESUME, &vcpus::<1>(), SchedContext::at(0), &mut vm);
        assert!(!control.boots_paused(0));
        assert_eq!(control.paused_ticks(), 0);
    }
}

//! Control of a running VM by root: power button, pause, reports.
//!
//! vCPU 0 receives root's events. A request to all vCPUs is an *order*: vCPU 0 increments the order
//! number and kicks the other vCPUs. Each vCPU that finds a new order number publishes its figures,
//! and parks as long as the VM is paused.
//!
//! While all vCPUs are parked, the VM's time stands still: it is less than the host's by the length
//! of all pauses. A pause begins when the last vCPU has parked, so no vCPU sees time go back.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use abi::FOREVER;
use native_rt::{Notification, SchedContext, Status, Window, time};
use proto::control::REASONS;
use proto::manage::Report;
use proto::start::event;
use vmm_cpu::MAX_VCPUS;

use crate::Cell;
use crate::backend::NativeVcpu;

/// Events that root signals.
pub const ORDERS: u64 = event::POWER_BUTTON | event::PAUSE | event::RESUME | event::REPORT;
/// Maximum wait for the other vCPUs to park, in yields of the CPU. They have been kicked.
const REST_TURNS: u32 = 100_000;

/// Figures of a vCPU.
#[derive(Clone, Copy)]
pub struct Share {
    /// World switches.
    pub entries: u64,
    /// Exits handled in the kernel.
    pub settled: u64,
    /// Exits by reason.
    pub exits: [u64; REASONS],
    /// Ticks that the kernel has waited while the guest was halted.
    halted: u64,
    /// CPU time of the thread, in ticks.
    used: u64,
}

const NO_SHARE: Share = Share { entries: 0, settled: 0, exits: [0; REASONS], halted: 0, used: 0 };

/// Idle time of a vCPU in the VMM.
struct Idle {
    /// Total, without a current idle phase.
    ticks: AtomicU64,
    /// Start of the current idle phase; 0: not idle.
    since: AtomicU64,
}

struct Shares {
    each: [Share; MAX_VCPUS],
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
    resting: AtomicU32,
    /// TSC value at which the last vCPU parked.
    rests_since: AtomicU64,
    behind: AtomicU64,
    idle: [Idle; MAX_VCPUS],
    shares: Cell<Shares>,
}

/// A VM as the thread of one vCPU passes it to [`Control::serve`].
pub trait Machine {
    /// Presses the power button.
    fn press_power_button(&mut self);
    /// Returns whether the VM has ended.
    fn has_ended(&self) -> bool;
    /// Returns the figures of the vCPU, without CPU time.
    fn share(&mut self) -> Share;
}

impl Share {
    /// Returns figures without CPU time.
    pub fn new(vcpu: &mut NativeVcpu, exits: &[u64]) -> Self {
        let (entries, settled) = vcpu.counts();
        let mut share = Self { entries, settled, halted: vcpu.halted(), ..NO_SHARE };
        for (sum, count) in share.exits.iter_mut().zip(exits) {
            *sum = *count;
        }
        share
    }
}

impl Control {
    /// Creates a control without orders.
    const fn new() -> Self {
        Self {
            orders: AtomicU32::new(0),
            paused: AtomicBool::new(false),
            resting: AtomicU32::new(0),
            rests_since: AtomicU64::new(0),
            behind: AtomicU64::new(0),
            idle: [const { Idle { ticks: AtomicU64::new(0), since: AtomicU64::new(0) } };
                MAX_VCPUS],
            shares: Cell::new(Shares {
                each: [NO_SHARE; MAX_VCPUS],
                past: [0; REASONS],
                sequence: 0,
                page: None,
            }),
        }
    }

    /// Sets the page for reports.
    pub fn report_to(&self, page: Option<Window>) {
        self.shares.lock().page = page;
    }

    /// Returns the ticks by which the VM's time is less than the host's.
    pub fn behind(&self) -> u64 {
        self.behind.load(Ordering::Relaxed)
    }

    /// Returns the number of the last order.
    pub fn orders(&self) -> u32 {
        self.orders.load(Ordering::Relaxed)
    }

    /// Returns the ticks in which the thread of vCPU `index` neither ran, on `context`, nor was
    /// idle or parked here, relative to a fixed moment in the past.
    pub fn missed(&self, index: usize, context: SchedContext) -> u64 {
        let rest = context.used() + self.idle[index].ticks.load(Ordering::Relaxed) + self.behind();
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
        let mut shares = self.shares.lock();
        shares.each[index].exits = [0; REASONS];
        for (sum, count) in shares.past.iter_mut().zip(exits) {
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
        machine: &mut impl Machine,
    ) -> u64 {
        let mut events = events;
        let mut left = 0;
        let own = notifications[index];
        if index == 0 {
            self.obey(events, notifications, machine);
        }
        self.publish(index, notifications.len(), context, machine);
        if self.paused.load(Ordering::Acquire) {
            self.rests_since.fetch_max(time::tsc(), Ordering::Relaxed);
            self.resting.fetch_add(1, Ordering::AcqRel);
            while self.paused.load(Ordering::Acquire) && !machine.has_ended() {
                // It fails only if the notification is gone, and the whole VM with it.
                let Ok(new) = own.wait(FOREVER) else { break };
                events = new;
                left |= events & !ORDERS;
                if index == 0 && events & event::RESUME != 0 {
                    self.resume(notifications);
                } else if index == 0 {
                    self.obey(events, notifications, machine);
                }
                self.publish(index, notifications.len(), context, machine);
            }
            self.resting.fetch_sub(1, Ordering::AcqRel);
        }
        left
    }

    /// Handles root's events.
    fn obey(&self, events: u64, notifications: &[Notification], machine: &mut impl Machine) {
        if events & event::POWER_BUTTON != 0 {
            machine.press_power_button();
        }
        // A pause revoked before it began has no effect.
        if events & event::PAUSE != 0 && events & event::RESUME == 0 {
            self.paused.store(true, Ordering::Release);
        }
        if events & (event::PAUSE | event::REPORT) != 0 {
            self.order(notifications);
        }
    }

    /// Issues an order to the other vCPUs.
    fn order(&self, notifications: &[Notification]) {
        self.orders.fetch_add(1, Ordering::Relaxed);
        for other in notifications.iter().skip(1) {
            // It fails only if the vCPU is gone.
            let _ = other.signal(event::KICK);
        }
    }

    /// Ends a pause, once it has begun for all vCPUs.
    fn resume(&self, notifications: &[Notification]) {
        for _ in 0..REST_TURNS {
            if self.resting.load(Ordering::Acquire) as usize >= notifications.len() {
                break;
            }
            native_rt::yield_now();
        }
        let since = self.rests_since.swap(0, Ordering::Relaxed);
        self.behind.fetch_add(time::tsc().saturating_sub(since), Ordering::Relaxed);
        self.paused.store(false, Ordering::Release);
        self.order(notifications);
    }

    /// Publishes the figures of a vCPU: together with the last ones of the other vCPUs, once each
    /// of `count` has published its first. Otherwise the exits of a vCPU before its first
    /// publication would be counted after the report.
    fn publish(
        &self,
        index: usize,
        count: usize,
        context: SchedContext,
        machine: &mut impl Machine,
    ) {
        let share = Share { used: context.used(), ..machine.share() };
        let mut shares = self.shares.lock();
        let Some(page) = shares.page else { return };
        shares.each[index] = share;
        if shares.each.iter().take(count).any(|share| share.used == 0) {
            return;
        }
        let report = self.sum(&shares);
        let begun = shares.sequence + 1;
        shares.sequence += 2;
        let mut bytes = [0; Report::LENGTH];
        for (chunk, word) in bytes[8..].as_chunks_mut::<8>().0.iter_mut().zip(report.pack()) {
            *chunk = word.to_le_bytes();
        }
        // The page has a fixed size. An odd number marks the rest as being written.
        let _ = page.write(0, &begun.to_le_bytes())
            && page.write(8, &bytes[8..])
            && page.write(0, &shares.sequence.to_le_bytes());
    }

    fn sum(&self, shares: &Shares) -> Report {
        let now = time::tsc();
        let mut report = Report { written: now, exits: shares.past, ..Report::default() };
        for (share, idle) in shares.each.iter().zip(&self.idle) {
            report.entries += share.entries;
            report.settled += share.settled;
            report.halted += share.halted;
            report.used += share.used;
            for (sum, count) in report.exits.iter_mut().zip(share.exits) {
                *sum += count;
            }
            let since = idle.since.load(Ordering::Relaxed);
            let current = if since == 0 { 0 } else { now.saturating_sub(since) };
            report.halted += idle.ticks.load(Ordering::Relaxed) + current;
        }
        let since = self.rests_since.load(Ordering::Relaxed);
        let current = if since == 0 { 0 } else { now.saturating_sub(since) };
        report.paused = self.behind() + current;
        report
    }
}

//! vCPU threads: delivery of events to them, and their waits.

use std::arch::x86_64::_rdtsc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread::{self, Thread};
use std::time::Duration;

use nix::sys::pthread::{Pthread, pthread_kill, pthread_self};
use vmm_vcpu::CounterClock;

use crate::kick::KICK;

/// Returns the host's time-stamp counter.
pub fn tsc() -> u64 {
    // SAFETY: every x86-64 CPU has the counter, and user mode may read it.
    unsafe { _rdtsc() }
}

/// Events for a vCPU.
pub mod event {
    /// IPI or interrupt from another vCPU.
    pub const KICK: u64 = 1 << 0;
    /// The serial line has input, or space for output again.
    pub const CONSOLE: u64 = 1 << 1;
    /// A disk has completed requests.
    pub const DISK: u64 = 1 << 2;
    /// The virtio console has input, or space for output again.
    pub const VIRTIO_CONSOLE: u64 = 1 << 3;
    /// A network has frames, or space for frames again.
    pub const NET: u64 = 1 << 6;
    /// The VM is paused.
    pub const PAUSE: u64 = 1 << 4;
    /// The power button is pressed.
    pub const POWER_BUTTON: u64 = 1 << 5;
    /// A debugger requests a stop.
    pub const DEBUG: u64 = 1 << 7;
    /// Statistics of the guest's memory are requested.
    pub const BALLOON: u64 = 1 << 8;
}

/// A receiver of events.
pub trait Notify {
    /// Notifies a vCPU of events, whether it runs or waits.
    fn notify(&self, events: u64);
}

/// Event state of a vCPU thread.
#[derive(Default)]
pub struct VcpuThread {
    events: AtomicU64,
    /// The vCPU is in the guest or about to enter it: a signal makes it check for events.
    pub is_in_guest: AtomicBool,
    thread: OnceLock<(Thread, Pthread)>,
}

impl VcpuThread {
    /// Registers the calling thread.
    pub fn register_current(&self) {
        self.thread.get_or_init(|| (thread::current(), pthread_self()));
    }

    /// Takes the pending events.
    pub fn take_events(&self) -> u64 {
        self.events.swap(0, SeqCst)
    }

    /// Drops pending events.
    pub fn clear(&self, events: u64) {
        self.events.fetch_and(!events, SeqCst);
    }

    /// Waits for events and takes them, at most until the host's counter reaches `deadline`.
    pub fn wait(&self, clock: &CounterClock, deadline: u64) -> u64 {
        loop {
            let events = self.take_events();
            let now = tsc();
            if events != 0 || now >= deadline {
                return events;
            }
            match deadline {
                u64::MAX => thread::park(),
                _ => {
                    thread::park_timeout(Duration::from_nanos(
                        clock.duration(deadline - now).max(1),
                    ));
                }
            }
        }
    }
}

impl Notify for VcpuThread {
    fn notify(&self, events: u64) {
        if self.events.fetch_or(events, SeqCst) & events == events {
            // The earlier notification of the same events has woken the vCPU.
            return;
        }
        let Some((thread, id)) = self.thread.get() else { return };
        if self.is_in_guest.load(SeqCst) {
            // Fails only if the thread, and thus the VM, has ended.
            let _ = pthread_kill(*id, KICK);
        } else {
            thread.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn events_are_not_lost() {
        let clock = CounterClock::new(1_000_000, 0);
        let vcpu_thread = VcpuThread::default();
        vcpu_thread.register_current();
        vcpu_thread.notify(event::CONSOLE);
        vcpu_thread.notify(event::CONSOLE | event::DISK);
        assert_eq!(vcpu_thread.wait(&clock, u64::MAX), event::CONSOLE | event::DISK);
        thread::scope(|scope| {
            scope.spawn(|| vcpu_thread.notify(event::KICK));
            assert_eq!(vcpu_thread.wait(&clock, u64::MAX), event::KICK);
        });
        let start = Instant::now();
        assert_eq!(vcpu_thread.wait(&clock, tsc() + 1_000_000), 0);
        assert!(start.elapsed() < Duration::from_secs(5));
    }
}

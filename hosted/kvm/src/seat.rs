//! Threads of virtual processors: how they are told of events, and how they wait.

use std::arch::x86_64::_rdtsc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread::{self, Thread};
use std::time::Duration;

use nix::sys::pthread::{Pthread, pthread_kill, pthread_self};
use vmm_cpu::TscClock;

use crate::vcpu::KICK;

/// The host's time-stamp counter.
pub fn tsc() -> u64 {
    // SAFETY: every processor has it, and programs may read it.
    unsafe { _rdtsc() }
}

/// What happens outside of a virtual processor.
pub mod event {
    /// Another one has left something for it.
    pub const KICK: u64 = 1 << 0;
    /// The console has bytes, or takes bytes again.
    pub const CONSOLE: u64 = 1 << 1;
    /// A disk has finished requests.
    pub const DISK: u64 = 1 << 2;
    /// The virtio console has bytes, or takes bytes again.
    pub const SECOND: u64 = 1 << 3;
    /// A network has something, or takes something again.
    pub const NET: u64 = 1 << 6;
    /// The machine is paused.
    pub const PAUSE: u64 = 1 << 4;
    /// The power button is pressed.
    pub const POWER_BUTTON: u64 = 1 << 5;
    /// A debugger wants it to stop.
    pub const DEBUG: u64 = 1 << 7;
}

/// The place of a virtual processor's thread.
#[derive(Default)]
pub struct Seat {
    events: AtomicU64,
    /// It is in the guest, or about to enter it: a signal makes it look.
    pub is_in_guest: AtomicBool,
    thread: OnceLock<(Thread, Pthread)>,
}

impl Seat {
    /// The calling thread takes it.
    pub fn take_place(&self) {
        self.thread.get_or_init(|| (thread::current(), pthread_self()));
    }

    /// Takes the events that have come.
    pub fn take(&self) -> u64 {
        self.events.swap(0, SeqCst)
    }

    /// Drops events that have come.
    pub fn forget(&self, events: u64) {
        self.events.fetch_and(!events, SeqCst);
    }

    /// Tells the processor of events, wherever it is.
    pub fn tell(&self, events: u64) {
        if self.events.fetch_or(events, SeqCst) & events == events {
            // Who has told it before has seen to it that it looks.
            return;
        }
        let Some((thread, id)) = self.thread.get() else { return };
        if self.is_in_guest.load(SeqCst) {
            // It fails only if the thread has ended, and the machine with it.
            let _ = pthread_kill(*id, KICK);
        } else {
            thread.unpark();
        }
    }

    /// Waits for events, which it takes, at most until the host's counter has this value.
    pub fn wait(&self, clock: &TscClock, deadline: u64) -> u64 {
        loop {
            let events = self.take();
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn events_are_not_lost() {
        let clock = TscClock::new(1_000_000, 0);
        let seat = Seat::default();
        seat.take_place();
        seat.tell(event::CONSOLE);
        seat.tell(event::CONSOLE | event::DISK);
        assert_eq!(seat.wait(&clock, u64::MAX), event::CONSOLE | event::DISK);
        thread::scope(|scope| {
            scope.spawn(|| seat.tell(event::KICK));
            assert_eq!(seat.wait(&clock, u64::MAX), event::KICK);
        });
        let start = Instant::now();
        assert_eq!(seat.wait(&clock, tsc() + 1_000_000), 0);
        assert!(start.elapsed() < Duration::from_secs(5));
    }
}

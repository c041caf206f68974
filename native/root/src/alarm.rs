//! Alarm: a second thread that signals root's notification at a set time. A wait for callers has no
//! deadline, so root needs the time as an event.

use core::sync::atomic::{AtomicU64, Ordering};

use abi::FOREVER;
use native_rt::thread::{Stack, ThreadResources, spawn};
use native_rt::{Notification, Status};

static STACK: Stack<{ 16 << 10 }> = Stack::new();
/// TSC value at which the alarm signals.
static DEADLINE: AtomicU64 = AtomicU64::new(FOREVER);
/// Slots of root's notification and of the alarm's own.
static ROOT: AtomicU64 = AtomicU64::new(0);
static OWN: AtomicU64 = AtomicU64::new(0);

/// Event that the alarm signals.
pub const ALARM: u64 = 1 << 1;

/// One-shot alarm.
pub struct Alarm {
    own: Notification,
}

impl Alarm {
    /// Starts the thread.
    pub fn start(
        resources: ThreadResources,
        own: Notification,
        root: Notification,
    ) -> Result<Self, Status> {
        ROOT.store(root.selector(), Ordering::Relaxed);
        OWN.store(own.selector(), Ordering::Relaxed);
        spawn(resources, &STACK, run, 0)?;
        Ok(Self { own })
    }

    /// Sets the time, a TSC value, replacing the previous one; [`FOREVER`] for none.
    pub fn set(&self, deadline: u64) {
        DEADLINE.store(deadline, Ordering::Release);
        // Both notifications are root's own.
        let _ = self.own.signal(1);
    }
}

extern "C" fn run(_: u64) -> ! {
    let own = Notification::at(OWN.load(Ordering::Relaxed));
    let root = Notification::at(ROOT.load(Ordering::Relaxed));
    loop {
        let deadline = DEADLINE.load(Ordering::Acquire);
        if own.wait(deadline) == Err(Status::Timeout) {
            // A new time may have been set meanwhile.
            let _ =
                DEADLINE.compare_exchange(deadline, FOREVER, Ordering::AcqRel, Ordering::Relaxed);
            let _ = root.signal(ALARM);
        }
    }
}

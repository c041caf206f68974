//! The outside of the machine.

use core::fmt;

use native_rt::{Notification, log, time};
use proto::start::event;
use vmm_machine::{Host, Level};

use crate::console::{Console, Line};
use crate::devices::Listeners;

/// The outside of the machine as one thread reaches it: clock, console, log, other threads.
pub struct NativeHost<'a> {
    /// The serial line.
    pub console: &'a Console,
    /// What wakes each virtual CPU.
    pub notifications: &'a [Notification],
    /// The devices that events are about.
    pub listeners: Listeners,
    /// Ticks that the machine's time is behind the host's, because it was paused.
    pub behind: u64,
}

impl Host for NativeHost<'_> {
    #[inline(always)]
    fn tsc(&self) -> u64 {
        time::tsc().wrapping_sub(self.behind)
    }

    fn put(&mut self, byte: u8) -> bool {
        self.console.put(Line::Serial, byte)
    }

    fn take(&mut self) -> Option<u8> {
        self.console.take(Line::Serial)
    }

    fn log(&mut self, level: Level, text: fmt::Arguments<'_>) {
        let level = match level {
            Level::Error => log::Level::Error,
            Level::Warning => log::Level::Warn,
            Level::Info => log::Level::Info,
        };
        log::write(level, text);
    }

    fn kick(&mut self, index: usize) {
        if let Some(notification) = self.notifications.get(index) {
            // It fails only if the capability is gone, and the virtual CPU with it.
            let _ = notification.signal(event::KICK);
        }
    }
}

//! The outside of the machine.

use core::fmt;

use native_rt::{log, time};
use vmm_machine::{Host, Level};

use crate::console::Console;

/// The outside of the machine: clock, console, log.
pub struct NativeHost<'a> {
    /// The serial line.
    pub console: &'a Console,
}

impl Host for NativeHost<'_> {
    #[inline(always)]
    fn tsc(&self) -> u64 {
        time::tsc()
    }

    fn put(&mut self, byte: u8) -> bool {
        self.console.put(byte)
    }

    fn take(&mut self) -> Option<u8> {
        self.console.take()
    }

    fn log(&mut self, level: Level, text: fmt::Arguments<'_>) {
        let level = match level {
            Level::Error => log::Level::Error,
            Level::Warning => log::Level::Warn,
            Level::Info => log::Level::Info,
        };
        log::write(level, text);
    }

    /// There is one virtual CPU, so nobody else to tell.
    fn kick(&mut self, _: usize) {}
}

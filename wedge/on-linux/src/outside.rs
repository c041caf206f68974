//! The outside of the machine: the console's rings and the device process.

use core::fmt;

use vmm_machine::{Host, Level};

use crate::shared::shared;
use crate::{processes, report};

/// The outside as the virtual CPU reaches it.
pub struct LinuxHost;

impl Host for LinuxHost {
    fn tsc(&self) -> u64 {
        crate::guest::tsc()
    }

    fn put(&mut self, byte: u8) -> bool {
        let put = shared().output.put(byte);
        processes::ring();
        put
    }

    fn take(&mut self) -> Option<u8> {
        let byte = shared().input.take();
        if byte.is_none() {
            // There may be more, now that there is room.
            processes::ring();
        }
        byte
    }

    fn log(&mut self, level: Level, text: fmt::Arguments<'_>) {
        if level != Level::Info {
            report::say(text);
        }
    }

    fn kick(&mut self, _: usize) {
        // There is one virtual CPU, which never needs it.
    }
}

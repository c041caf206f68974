//! POST code port (port 0x80).
//!
//! State: the last byte written.
//! Features: latch, read back.
//! Missing: no feature.
//! Documentation: IBM PC/AT Technical Reference, "Manufacturing test port"; Linux writes it as an
//! I/O delay.

use vmm_bus::{Access, Device, Env};

/// The latch at port 0x80. Offset 0 is the port.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PostPort {
    code: u8,
}

impl PostPort {
    /// Creates the port in its power-on state.
    pub const fn new() -> Self {
        Self { code: 0 }
    }

    /// Last code written by the guest.
    pub const fn code(&self) -> u8 {
        self.code
    }
}

impl Device for PostPort {
    fn read(&mut self, _: Access, _: &mut dyn Env) -> u64 {
        self.code.into()
    }

    fn write(&mut self, _: Access, value: u64, _: &mut dyn Env) {
        self.code = value as u8;
    }

    fn wake(&mut self, _: u8, _: &mut dyn Env) {}

    fn reset(&mut self, _: &mut dyn Env) {
        self.code = 0;
    }
}

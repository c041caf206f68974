//! System control port A (port 0x92).
//!
//! State: the register.
//! Features: fast reset (rising bit 0), the A20 bit reads back.
//! Missing: masking of address line 20, which is always enabled.
//! Documentation: IBM PS/2 Hardware Technical Reference, "System Control Port A"; Intel ICH9
//! datasheet, section 13.7.3 "PORT92".

use vmm_bus::{Access, Device, Env, MachineEvent};

/// Register bits.
pub mod spec {
    /// RW: a rising edge resets the CPU.
    pub const FAST_RESET: u8 = 1 << 0;
    /// RW: address line 20 is enabled.
    pub const A20: u8 = 1 << 1;
}

/// System control port A. Offset 0 is the port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Port92 {
    control: u8,
}

impl Default for Port92 {
    fn default() -> Self {
        Self::new()
    }
}

impl Port92 {
    /// Creates the port as firmware leaves it: address line 20 enabled.
    pub const fn new() -> Self {
        Self { control: spec::A20 }
    }
}

impl Device for Port92 {
    fn read(&mut self, _: Access, _: &mut dyn Env) -> u64 {
        self.control.into()
    }

    fn write(&mut self, _: Access, value: u64, env: &mut dyn Env) {
        let value = value as u8 & (spec::FAST_RESET | spec::A20);
        if value & spec::A20 == 0 {
            env.missing("port 92: A20 off", value.into());
        }
        let risen = value & !self.control & spec::FAST_RESET != 0;
        self.control = value;
        if risen {
            env.machine(MachineEvent::Reset);
        }
    }

    fn wake(&mut self, _: u8, _: &mut dyn Env) {}

    fn reset(&mut self, _: &mut dyn Env) {
        *self = Self::new();
    }
}

//! Reset control register (port 0xCF9).
//!
//! State: the register.
//! Features: a rising RST_CPU bit resets the VM (soft, hard and full reset are the same).
//! Missing: no feature.
//! Documentation: Intel ICH9 datasheet, section 13.7.5 "RST_CNT"; ACPI 6.5, section 4.8.3.6
//! (`RESET_REG`).

use vmm_bus::{Access, Device, Env, MachineEvent};

/// Register bits.
pub mod spec {
    /// RW: a reset is a hard reset.
    pub const SYS_RST: u8 = 1 << 1;
    /// RW: a rising edge resets the CPU.
    pub const RST_CPU: u8 = 1 << 2;
    /// RW: a hard reset includes a power cycle.
    pub const FULL_RST: u8 = 1 << 3;
    /// Implemented bits.
    pub const MASK: u8 = SYS_RST | RST_CPU | FULL_RST;
}

/// The reset control register. Offset 0 is the port.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ResetPort {
    control: u8,
}

impl ResetPort {
    /// Creates the register in its power-on state.
    pub const fn new() -> Self {
        Self { control: 0 }
    }
}

impl Device for ResetPort {
    fn read(&mut self, _: Access, _: &mut dyn Env) -> u64 {
        self.control.into()
    }

    fn write(&mut self, _: Access, value: u64, env: &mut dyn Env) {
        let value = value as u8 & spec::MASK;
        let risen = value & !self.control & spec::RST_CPU != 0;
        self.control = value;
        if risen {
            env.machine(MachineEvent::Reset);
        }
    }

    fn wake(&mut self, _: u8, _: &mut dyn Env) {}

    fn reset(&mut self, _: &mut dyn Env) {
        self.control = 0;
    }
}

//! pvpanic: the guest kernel reports a panic.
//!
//! State: none.
//! Features: a read returns the supported events; a write reports each event whose bit is set, as
//! [`MachineEvent`].
//! Missing: the shutdown event (bit 2).
//! Documentation: QEMU `docs/specs/pvpanic.rst`.

use vmm_bus::{Access, Device, Env, MachineEvent};

/// Registers.
pub mod spec {
    /// Event: the kernel has panicked.
    pub const PANICKED: u8 = 1 << 0;
    /// Event: the kernel has crashed and its crash kernel runs now.
    pub const CRASH_LOADED: u8 = 1 << 1;
}

/// The pvpanic port. Offset 0 is the port.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PvPanic;

impl PvPanic {
    /// Creates the port.
    pub const fn new() -> Self {
        Self
    }
}

impl Device for PvPanic {
    fn read(&mut self, _: Access, _: &mut dyn Env) -> u64 {
        (spec::PANICKED | spec::CRASH_LOADED).into()
    }

    fn write(&mut self, _: Access, value: u64, env: &mut dyn Env) {
        let events = value as u8;
        if events & !(spec::PANICKED | spec::CRASH_LOADED) != 0 {
            env.missing("pvpanic: unknown event", value);
        }
        if events & spec::CRASH_LOADED != 0 {
            env.machine(MachineEvent::GuestCrashLoaded);
        }
        if events & spec::PANICKED != 0 {
            env.machine(MachineEvent::GuestPanic);
        }
    }

    fn wake(&mut self, _: u8, _: &mut dyn Env) {}

    fn reset(&mut self, _: &mut dyn Env) {}
}

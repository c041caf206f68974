//! Debug exit port: the guest ends its VM with an exit code.
//!
//! State: none.
//! Features: writing `v` up to 63 sends [`MachineEvent::ExitCode`]; reads return 0, as QEMU's
//! device of the same name.
//! Missing: codes above 63 (no exit codes are reserved for them).
//! Documentation: QEMU `isa-debug-exit`.

use vmm_bus::{Access, Device, Env, MachineEvent};

/// Largest code that a guest can choose.
pub const LARGEST_CODE: u8 = 63;

/// The debug exit port. Offset 0 is the port.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DebugExit;

impl DebugExit {
    /// Creates the port.
    pub const fn new() -> Self {
        Self
    }
}

impl Device for DebugExit {
    fn read(&mut self, _: Access, _: &mut dyn Env) -> u64 {
        0
    }

    fn write(&mut self, _: Access, value: u64, env: &mut dyn Env) {
        match u8::try_from(value) {
            Ok(code @ 0..=LARGEST_CODE) => env.machine(MachineEvent::ExitCode(code)),
            _ => env.missing("debug exit: code above 63", value),
        }
    }

    fn wake(&mut self, _: u8, _: &mut dyn Env) {}

    fn reset(&mut self, _: &mut dyn Env) {}
}

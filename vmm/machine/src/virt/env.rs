//! Environment of the board's own devices.

use vmm_bus::{BackendRef, Env, MachineEvent, Msi, NEVER, Nanos};
use vmm_dev::arm64::gic::Gic;
use vmm_mem::GuestMemory;
use vmm_vcpu::Outcome;

use super::{Effects, Fixed};
use crate::{Host, Level};

/// Calls a device, then passes its line to the interrupt controller, as this interrupt.
pub(super) fn with_line<const CPUS: usize, H: Host, T>(
    (gic, interrupt): (&mut Gic<CPUS>, u32),
    effects: &mut Effects,
    (fixed, host): (&Fixed<'_>, &mut H),
    call: impl FnOnce(&mut dyn Env) -> T,
) -> T {
    let mut env = ChipEnv { fixed, effects, host, line: None };
    let result = call(&mut env);
    if let Some(level) = env.line {
        gic.set_level(interrupt, level);
        env.effects.has_line = true;
    }
    result
}

/// Environment of a device.
pub(super) struct ChipEnv<'a, 'm, H> {
    pub(super) fixed: &'a Fixed<'m>,
    pub(super) effects: &'a mut Effects,
    pub(super) host: &'a mut H,
    /// Last level of the device's line 0.
    pub(super) line: Option<bool>,
}

impl<H: Host> Env for ChipEnv<'_, '_, H> {
    fn now(&self) -> Nanos {
        self.fixed.clock.nanos(self.host.counter())
    }

    fn set_line(&mut self, line: u8, level: bool) {
        if line == 0 {
            self.line = Some(level);
        }
    }

    fn arm(&mut self, _: u8, deadline: Nanos) {
        // No device of this board has a timer.
        debug_assert!(deadline == NEVER);
    }

    fn memory(&self) -> &GuestMemory {
        self.fixed.memory
    }

    fn backend(&mut self) -> (BackendRef<'_>, &GuestMemory) {
        (self.host.serial(), self.fixed.memory)
    }

    fn msi(&mut self, msi: Msi) {
        self.missing("interrupt message to no controller", msi.address);
    }

    fn machine(&mut self, event: MachineEvent) {
        let outcome = match event {
            MachineEvent::PowerOff => Outcome::PowerOff,
            MachineEvent::Reset => Outcome::Reset,
            MachineEvent::GuestPanic => Outcome::GuestPanic,
            MachineEvent::ExitCode(code) => Outcome::Code(code),
            MachineEvent::GuestCrashLoaded => return,
        };
        self.effects.end.get_or_insert(outcome);
    }

    fn missing(&mut self, what: &'static str, value: u64) {
        self.effects.counters.missing += 1;
        // The address identifies the text: each is one literal of one device.
        let key = what.as_ptr().addr() as u64;
        let text = format_args!("{what} ({value:#x})");
        self.effects.once.log(self.host, Level::Warning, key, text);
    }
}

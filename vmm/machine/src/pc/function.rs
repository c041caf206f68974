//! Calls of PCI functions, outside of the board's lock.

use core::sync::atomic::Ordering::Relaxed;

use spin::relax::RelaxStrategy;
use vmm_bus::{BackendRef, DeviceBackend, Env, MachineEvent, Msi, Nanos};
use vmm_dev::pci::Function;
use vmm_mem::GuestMemory;
use vmm_x86::apic::InterruptMessage;

use super::{Pc, PcBoard};
use crate::Host;
use crate::functions::Functions;
use crate::interrupts::{ChipEnv, FUNCTIONS};

/// Environment of one PCI function. The function's lock is held; each effect takes the lock of the
/// board.
struct FunctionEnv<'a, 'm, H, R, const CPUS: usize, P> {
    pc: &'a Pc<'m, R, CPUS, P>,
    host: &'a mut H,
    backend: &'a mut dyn DeviceBackend,
    slot: usize,
    /// vCPU on whose behalf the function is called.
    running: usize,
    /// An effect has left events for that vCPU.
    needs_service: bool,
}

impl<'m, R: RelaxStrategy, const CPUS: usize, P: Functions> Pc<'m, R, CPUS, P> {
    /// Calls the function in a slot on behalf of vCPU `running` ([`CPUS`](Self): none). Returns the
    /// result, and whether that vCPU has events to service; `None` for an empty slot.
    pub(super) fn with_function<H: Host, T>(
        &self,
        slot: usize,
        host: &mut H,
        running: usize,
        call: impl FnOnce(&mut dyn Function, &mut dyn Env) -> T,
    ) -> Option<(T, bool)> {
        let (mut call, mut result) = (Some(call), None);
        self.functions.with(slot, &mut |function, backend| {
            let Some(call) = call.take() else { return };
            let host = &mut *host;
            let mut env =
                FunctionEnv { pc: self, host, backend, slot, running, needs_service: false };
            let value = call(function, &mut env);
            result = Some((value, env.needs_service));
        });
        result
    }
}

impl<'m, H: Host, R: RelaxStrategy, const CPUS: usize, P: Functions>
    FunctionEnv<'_, 'm, H, R, CPUS, P>
{
    fn board<T>(&mut self, act: impl FnOnce(&mut PcBoard<'_, 'm, H, CPUS>) -> T) -> T {
        let (running, bit) = (self.running, 1 << self.running);
        let (result, needs_service) = self.pc.locked(self.host, running, |board| {
            (act(board), board.machine.router.needs_service & bit != 0)
        });
        self.needs_service |= needs_service;
        result
    }

    fn chip<T>(&mut self, act: impl FnOnce(&mut ChipEnv<'_, H>) -> T) -> T {
        let chip = FUNCTIONS + self.slot;
        self.board(|board| {
            let router = &mut board.machine.router;
            act(&mut ChipEnv { router, host: &mut *board.host, chip })
        })
    }
}

impl<H: Host, R: RelaxStrategy, const CPUS: usize, P: Functions> Env
    for FunctionEnv<'_, '_, H, R, CPUS, P>
{
    fn now(&self) -> Nanos {
        self.pc.fixed.clock.nanos(self.host.counter())
    }

    /// Functions have no lines.
    fn set_line(&mut self, _: u8, _: bool) {}

    fn arm(&mut self, timer: u8, deadline: Nanos) {
        self.chip(|env| env.arm(timer, deadline));
    }

    fn memory(&self) -> &GuestMemory {
        self.pc.fixed.memory
    }

    fn backend(&mut self) -> (BackendRef<'_>, &GuestMemory) {
        (self.backend.get(), self.pc.fixed.memory)
    }

    fn msi(&mut self, msi: Msi) {
        // By reference: the compiler packs a copy in a word, and takes it apart again.
        let Some(message) = &InterruptMessage::decode(msi) else {
            return self.missing("interrupt message to no local APIC", msi.address);
        };
        // Not by way of the router: no other effect waits while no chip works.
        let target = self.board(|board| board.deliver(message, None));
        if let (Some(target), Some(known)) = (target, self.pc.targets.get(self.slot)) {
            known.store(target as u8, Relaxed);
        }
    }

    fn machine(&mut self, event: MachineEvent) {
        self.chip(|env| env.machine(event));
    }

    fn missing(&mut self, what: &'static str, value: u64) {
        self.chip(|env| env.missing(what, value));
    }
}

//! The board as seen by one vCPU.

use core::time::Duration;
use spin::relax::RelaxStrategy;
use vmm_emu::{Control, Devices, Done, Stop};
use vmm_mem::GuestMemory;
use vmm_vcpu::{CounterClock, MemoryFault, Platform, Signals};
use vmm_x86::apic::InterruptMessage;
use vmm_x86::cpuid::CpuidTable;
use vmm_x86::platform::Emulated;
use vmm_x86::pv::ApicIds;
use vmm_x86::{Acknowledged, DecodedControl, Interrupts, IoExit, PcPlatform, Unknown, X86Vcpu};

use super::{Pc, PcBoard};
use crate::functions::Functions;
use crate::pci::PciBoard;
use crate::{Host, hypercalls};

/// The board as seen by one vCPU while it runs.
pub(super) struct CpuBus<'a, 'm, H, R, const CPUS: usize, P> {
    pub(super) pc: &'a Pc<'m, R, CPUS, P>,
    pub(super) host: &'a mut H,
    pub(super) cpu: usize,
    /// This CPU has events to service. Events from other threads come with a kick.
    pub(super) needs_service: bool,
}

impl<'m, H: Host, R: RelaxStrategy, const CPUS: usize, P: Functions> CpuBus<'_, 'm, H, R, CPUS, P> {
    #[inline]
    pub(super) fn locked<T>(&mut self, act: impl FnOnce(&mut PcBoard<'_, 'm, H, CPUS>) -> T) -> T {
        let bit = 1 << self.cpu;
        let (result, needs_service) = self.pc.locked(self.host, self.cpu, |board| {
            (act(board), board.machine.router.needs_service & bit != 0)
        });
        self.needs_service |= needs_service;
        result
    }

    /// Result of an emulated access.
    fn finish<V: X86Vcpu>(&mut self, vcpu: &mut V, result: Result<Done, Stop>) -> Emulated {
        match result {
            Ok(Done::Next(next)) => Emulated::Next(next),
            Ok(Done::Again) => Emulated::Again,
            Err(Stop::Raise(event)) => Emulated::Raise(event),
            Err(Stop::Unknown(bytes)) => {
                let rip = vcpu.get(vmm_x86::Reg::Rip);
                self.unknown(Unknown::Instruction { rip, bytes });
                Emulated::Unknown
            }
        }
    }
}

impl<H: Host, R: RelaxStrategy, const CPUS: usize, P: Functions> Platform
    for CpuBus<'_, '_, H, R, CPUS, P>
{
    type Interrupts = Interrupts;

    #[inline]
    fn memory(&self) -> &GuestMemory {
        self.pc.fixed.memory
    }

    #[inline]
    fn clock(&self) -> &CounterClock {
        &self.pc.fixed.clock
    }

    #[inline]
    fn counter(&self) -> u64 {
        self.host.counter()
    }

    fn start_unix(&self) -> Duration {
        self.pc.fixed.start_unix
    }

    fn mmio_read(&mut self, cpu: usize, address: u64, size: u8) -> u64 {
        if self.in_pci(address) {
            return self.pci_read(address, size);
        }
        self.locked(|board| board.read_memory(cpu, address, size))
    }

    fn mmio_write(&mut self, cpu: usize, address: u64, size: u8, value: u64) {
        if self.in_pci(address) {
            return self.pci_write(address, size, value);
        }
        self.locked(|board| board.write_memory(cpu, address, size, value));
    }

    #[inline]
    fn needs_service(&self, _: usize) -> bool {
        self.needs_service
    }

    fn service_timers(&mut self, cpu: usize) -> Signals<Interrupts> {
        let now = self.pc.fixed.clock.nanos(self.host.counter());
        let mut start = 0;
        loop {
            self.needs_service = false;
            let serviced = self.locked(|board| match board.service_timers(&mut start, now) {
                Some(slot) => Err(slot),
                None => Ok(board.take_signals(cpu)),
            });
            match serviced {
                Ok(signals) => return signals,
                Err(slot) => {
                    self.with_function(slot, |function, env| function.wake(0, env));
                }
            }
        }
    }
}

impl<H: Host, R: RelaxStrategy, const CPUS: usize, P: Functions> PcPlatform
    for CpuBus<'_, '_, H, R, CPUS, P>
{
    #[inline]
    fn cpuid(&self) -> &CpuidTable {
        &self.pc.fixed.cpuid
    }

    #[inline]
    fn port_in(&mut self, port: u16, size: u8) -> u32 {
        self.config_in(port, size).unwrap_or_else(|| self.locked(|board| board.port_in(port, size)))
    }

    #[inline]
    fn port_out(&mut self, port: u16, size: u8, value: u32) {
        if self.config_out(port, size, value).is_none() {
            self.locked(|board| board.port_out(port, size, value));
        }
    }

    fn apic_read(&mut self, cpu: usize, msr: u32) -> Option<u64> {
        self.locked(|board| board.apic_read(cpu, msr))
    }

    fn apic_write(&mut self, cpu: usize, msr: u32, value: u64) -> Option<()> {
        self.locked(|board| board.apic_write(cpu, msr, value))
    }

    fn cr8(&mut self, cpu: usize) -> u8 {
        self.locked(|board| board.machine.apics[cpu].cr8())
    }

    fn set_cr8(&mut self, cpu: usize, value: u8) {
        self.locked(|board| board.with_apic(cpu, |apic, _| apic.set_cr8(value)));
    }

    fn tsc_written(&mut self, cpu: usize, tsc: u64) {
        self.locked(|board| board.with_apic(cpu, |apic, env| apic.sync_tsc(tsc, env)));
    }

    fn emulate_memory<V: X86Vcpu>(&mut self, _: usize, vcpu: &mut V, _: MemoryFault) -> Emulated {
        let memory = self.pc.fixed.memory;
        let result = vmm_emu::memory_access(vcpu, memory, self);
        self.finish(vcpu, result)
    }

    fn emulate_io<V: X86Vcpu>(&mut self, _: usize, vcpu: &mut V, io: IoExit) -> Emulated {
        let memory = self.pc.fixed.memory;
        let result = vmm_emu::string_io(vcpu, memory, self, io);
        self.finish(vcpu, result)
    }

    fn decode_control<V: X86Vcpu>(
        &mut self,
        _: usize,
        vcpu: &mut V,
    ) -> Result<DecodedControl, Emulated> {
        let memory = self.pc.fixed.memory;
        let done = match vmm_emu::control(vcpu, memory, self) {
            Ok(Control::Access(access)) => return Ok(access),
            Ok(Control::Completed(done)) => Ok(done),
            Err(stop) => Err(stop),
        };
        Err(self.finish(vcpu, done))
    }

    fn hypercall<V: X86Vcpu>(&mut self, vcpu: &mut V) -> Option<u64> {
        hypercalls::serve(vcpu, self.pc.fixed.id, &self.pc.functions)
    }

    fn multicast(&mut self, to: ApicIds, message: InterruptMessage) -> u32 {
        self.locked(|board| board.multicast(to, &message))
    }

    fn acknowledge(&mut self, cpu: usize) -> Option<Acknowledged> {
        self.locked(|board| board.acknowledge(cpu))
    }

    fn accept_virq(&mut self, cpu: usize, vector: u8) {
        // Neither this nor an EOI without further effect has an effect on other devices.
        self.locked(|board| {
            board.machine.apics[cpu].accept_offered(vector);
            board.request_service_if_waiting(cpu);
        });
    }

    fn end_of_interrupt(&mut self, cpu: usize) {
        self.locked(|board| {
            board.machine.apics[cpu].eoi();
            board.request_service_if_waiting(cpu);
        });
    }

    #[cold]
    fn unknown(&mut self, what: Unknown) {
        self.locked(|board| board.unknown(what));
    }
}

/// Devices for the emulator: the lock is taken for each access, not for the whole instruction.
impl<H: Host, R: RelaxStrategy, const CPUS: usize, P: Functions> Devices
    for CpuBus<'_, '_, H, R, CPUS, P>
{
    fn read(&mut self, address: u64, size: u8) -> u64 {
        self.mmio_read(self.cpu, address, size)
    }

    fn write(&mut self, address: u64, size: u8, value: u64) {
        self.mmio_write(self.cpu, address, size, value);
    }

    fn port_in(&mut self, port: u16, size: u8) -> u32 {
        PcPlatform::port_in(self, port, size)
    }

    fn port_out(&mut self, port: u16, size: u8, value: u32) {
        PcPlatform::port_out(self, port, size, value);
    }
}

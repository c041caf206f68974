//! Scripts for the run loop.

mod control;
mod events;
mod exits;

use super::exception::{ALIGNMENT, DEBUG, DR7_GENERAL_DETECT, PROTECTION, RFLAGS_RF, UNDEFINED};
use super::*;
use crate::apic::InterruptMessage;
use crate::control::{ControlAccess, DecodedControl};
use crate::cpuid::{CpuidConfig, CpuidTable};
use crate::exit::{Access, IoExit, Space};
use crate::platform::{Acknowledged, Emulated, Interrupts, Unknown};
use crate::pv::ApicIds;
use crate::registers::{Gpr, Seg, Segment};
use crate::testing::{ScriptEntry, ScriptedVcpu};
use crate::walk::{GuestTables, paging};
use core::time::Duration;
use hw_walk::Intent;
use hw_x86::kvm::steal_time;
use hw_x86::msr::{APIC_BASE, kvm};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::vec::Vec;
use vmm_mem::{GuestMemory, testing};
use vmm_vcpu::{CounterClock, MemoryFault, Outcome, Platform, Signals};

/// A platform whose interrupt controller delivers the highest requested vector, whatever is in
/// service.
struct TestPlatform {
    /// Reports the vector only on acknowledgement, as an 8259 does.
    asks: bool,
    in_service: Vec<u8>,
    /// Interrupts that the guest has taken without an exit.
    taken: Vec<u8>,
    memory: GuestMemory,
    cpuid: CpuidTable,
    clock: CounterClock,
    tsc: u64,
    requested: BTreeSet<u8>,
    nmi: bool,
    needs_service: bool,
    deadline: u64,
    end: Option<Outcome>,
    init: bool,
    startup: Option<u8>,
    ports: Vec<(u16, u8, u32)>,
    written: Vec<(u64, u8, u64)>,
    unknown: Vec<Unknown>,
    multicasts: Vec<(ApicIds, InterruptMessage)>,
    tsc_written: Vec<u64>,
    cr8: u8,
    tpr_low: bool,
    apic_base: Option<u64>,
    emulated: Emulated,
    /// The current instruction, of three bytes, if it is one with control registers.
    control: Option<ControlAccess>,
}

impl TestPlatform {
    fn new() -> Self {
        let config = CpuidConfig {
            vcpus: 1,
            xcr0_mask: 7,
            tsc_khz: 1_000_000,
            apic_khz: 1_000_000,
            kvmclock: true,
            steal_time: true,
            pv_flush: true,
            pv_ipi: true,
            nested_paging: true,
        };
        let cpuid = CpuidTable::new(&config, |number, _| match number {
            0 => [0xd, 1, 2, 3],
            1 => [0x800f12, 0, u32::MAX, u32::MAX],
            0xd => [7, 0, 0, 0],
            0x8000_0000 => [0x8000_0008, 0, 0, 0],
            0x8000_0001 => [0, 0, 0, u32::MAX],
            _ => [0; 4],
        });
        Self {
            asks: true,
            in_service: Vec::new(),
            taken: Vec::new(),
            memory: testing::memory(&[(0, 0x10_000)]),
            cpuid,
            clock: CounterClock::new(1_000_000, 1000),
            tsc: 1000,
            requested: BTreeSet::new(),
            nmi: false,
            needs_service: false,
            deadline: vmm_bus::NEVER,
            end: None,
            init: false,
            startup: None,
            ports: Vec::new(),
            written: Vec::new(),
            unknown: Vec::new(),
            multicasts: Vec::new(),
            tsc_written: Vec::new(),
            cr8: 0,
            tpr_low: false,
            apic_base: None,
            emulated: Emulated::Unknown,
            control: None,
        }
    }

    fn request(&mut self, vector: u8) {
        self.requested.insert(vector);
        self.needs_service = true;
    }

    fn waiting(&self) -> PendingInterrupt {
        match self.requested.last() {
            None => PendingInterrupt::None,
            Some(_) if self.asks => PendingInterrupt::Pic,
            Some(&vector) => {
                let eoi_elidable = self.requested.len() == 1 && self.in_service.is_empty();
                PendingInterrupt::Virq { vector, eoi_elidable }
            }
        }
    }
}

const KNOWN_HYPERCALL: u64 = 0x1234_5678_0000;

impl Platform for TestPlatform {
    type Interrupts = Interrupts;

    fn memory(&self) -> &GuestMemory {
        &self.memory
    }
    fn clock(&self) -> &CounterClock {
        &self.clock
    }
    fn counter(&self) -> u64 {
        self.tsc
    }
    fn start_unix(&self) -> Duration {
        Duration::new(1_700_000_000, 250_000_000)
    }
    fn mmio_read(&mut self, _: usize, address: u64, size: u8) -> u64 {
        address << 8 | u64::from(size)
    }
    fn mmio_write(&mut self, _: usize, address: u64, size: u8, value: u64) {
        self.written.push((address, size, value));
    }
    fn needs_service(&self, _: usize) -> bool {
        self.needs_service
    }
    fn service_timers(&mut self, _: usize) -> Signals<Interrupts> {
        self.needs_service = false;
        let interrupts = Interrupts {
            nmi: core::mem::take(&mut self.nmi),
            maskable: self.waiting(),
            init: core::mem::take(&mut self.init),
            startup: self.startup.take(),
            cr8: self.cr8,
            tpr_low: self.tpr_low,
        };
        Signals { end: self.end, deadline: self.deadline, interrupts }
    }
}

impl PcPlatform for TestPlatform {
    fn cpuid(&self) -> &CpuidTable {
        &self.cpuid
    }
    fn port_in(&mut self, port: u16, size: u8) -> u32 {
        self.ports.push((port, size, 0));
        0xffff_ffff
    }
    fn port_out(&mut self, port: u16, size: u8, value: u32) {
        self.ports.push((port, size, value));
    }
    fn apic_read(&mut self, _: usize, msr: u32) -> Option<u64> {
        Some(self.apic_base.filter(|_| msr == APIC_BASE).unwrap_or(0x55))
    }
    fn apic_write(&mut self, _: usize, _: u32, value: u64) -> Option<()> {
        self.request(value as u8);
        Some(())
    }
    fn cr8(&mut self, _: usize) -> u8 {
        self.cr8
    }
    fn set_cr8(&mut self, _: usize, value: u8) {
        self.cr8 = value;
    }
    fn tsc_written(&mut self, _: usize, tsc: u64) {
        self.tsc_written.push(tsc);
    }
    fn emulate_memory<V: X86Vcpu>(&mut self, _: usize, _: &mut V, _: MemoryFault) -> Emulated {
        self.emulated
    }
    fn emulate_io<V: X86Vcpu>(&mut self, _: usize, _: &mut V, _: IoExit) -> Emulated {
        self.emulated
    }
    fn decode_control<V: X86Vcpu>(
        &mut self,
        _: usize,
        vcpu: &mut V,
    ) -> Result<DecodedControl, Emulated> {
        let next = vcpu.get(Reg::Rip) + 3;
        self.control.map(|access| DecodedControl { access, next }).ok_or(self.emulated)
    }
    fn hypercall<V: X86Vcpu>(&mut self, vcpu: &mut V) -> Option<u64> {
        (vcpu.gpr(Gpr::Rax) == KNOWN_HYPERCALL).then_some(77)
    }
    fn multicast(&mut self, to: ApicIds, message: InterruptMessage) -> u32 {
        self.multicasts.push((to, message));
        (0..8).filter(|&id| to.contains(id)).count() as u32
    }
    fn acknowledge(&mut self, _: usize) -> Option<Acknowledged> {
        let vector = self.requested.pop_last()?;
        self.in_service.push(vector);
        let more = !self.requested.is_empty();
        Some(Acknowledged { vector, eoi_elidable: !more, more })
    }
    fn accept_virq(&mut self, _: usize, vector: u8) {
        assert!(self.requested.remove(&vector));
        self.in_service.push(vector);
        self.taken.push(vector);
        self.needs_service |= !self.requested.is_empty();
    }
    fn end_of_interrupt(&mut self, _: usize) {
        self.in_service.pop();
    }
    fn unknown(&mut self, what: Unknown) {
        self.unknown.push(what);
    }
}

const CODE: u64 = 0x1000;

fn guest(code: &[u8]) -> (Cpu, ScriptedVcpu, TestPlatform) {
    let platform = TestPlatform::new();
    platform.memory.write_slice(CODE, code).unwrap();
    let mut vcpu = ScriptedVcpu::flat32();
    vcpu.set(Reg::Rip, CODE);
    (Cpu::new(0, 40), vcpu, platform)
}

/// Runs until the script ends; returns for each entry the event that the guest gets, injected
/// or offered, and whether there is an exit window.
fn play(cpu: &mut Cpu, vcpu: &mut ScriptedVcpu, platform: &mut TestPlatform) -> Vec<(Event, bool)> {
    assert_eq!(cpu.run(vcpu, platform), StopReason::End(Outcome::HostError(0)));
    let seen = |entry: ScriptEntry| {
        // A back end may make an interrupt pending instead of injecting it, unless there is a
        // window.
        assert!(!entry.event.is_interrupt() || entry.window != InterruptWindow::Nothing);
        match entry.window {
            InterruptWindow::DeliverVirq(vector) if !entry.event.is_some() => {
                (Event::interrupt(vector), false)
            }
            window => (entry.event, window == InterruptWindow::Exit),
        }
    };
    vcpu.entries.drain(..).map(seen).collect()
}

/// The guest takes the virtual interrupt that is offered to it.
fn take(vcpu: &mut ScriptedVcpu) {
    assert!(matches!(vcpu.window, InterruptWindow::DeliverVirq(_)), "{:?}", vcpu.window);
    vcpu.window = InterruptWindow::Nothing;
}

/// A step in which that is all.
fn taking(vcpu: &mut ScriptedVcpu) -> Exit {
    take(vcpu);
    Exit::Spurious
}

fn interrupts(vcpu: &mut ScriptedVcpu, on: bool) {
    vcpu.set(Reg::Rflags, if on { RFLAGS_IF } else { 0 });
}

/// Plays one exit with `first` in the slot, whose delivery it interrupted; returns later
/// entries.
fn reflect(first: Event, vector: u8) -> (Cpu, ScriptedVcpu, Vec<(Event, bool)>) {
    let (mut cpu, mut vcpu, mut platform) = guest(&[0x90]);
    vcpu.set(Reg::Dr6, 0xffff_4ff0);
    vcpu.set(Reg::Dr7, 0x400 | DR7_GENERAL_DETECT);
    vcpu.then(move |vcpu| {
        vcpu.slot = first;
        Exit::Exception { vector, code: 0xdead }
    });
    let entries = play(&mut cpu, &mut vcpu, &mut platform);
    (cpu, vcpu, entries)
}

//! The run loop with a vCPU that plays a list of exits.

mod aarch32;

use super::*;
use crate::platform::{Interrupts, PowerState};
use crate::testing::ScriptVcpu;
use crate::vcpu::{System, Virq, Width};
use core::time::Duration;
use hw_arm64::psci;
use std::vec::Vec;
use vmm_mem::{GuestMemory, testing};
use vmm_vcpu::{CounterClock, Platform, Signals};

const PC: u64 = 0x8000;
const DEVICE: u64 = 0x900_0000;
/// The VM's counter.
const COUNTER: u64 = 0x9_8765_4321;

struct ScriptBus {
    memory: GuestMemory,
    clock: CounterClock,
    start: Option<StartRequest>,
    deadline: Nanos,
    end: Option<Outcome>,
    waiting: Vec<Virq>,
    writes: Vec<(u64, u8, u64)>,
    unknown: Vec<Unknown>,
    sent: Vec<SoftwareInterrupt>,
    ended: Vec<u32>,
    services: u32,
    has_no_record: bool,
}

impl Platform for ScriptBus {
    type Interrupts = Interrupts;
    fn memory(&self) -> &GuestMemory {
        &self.memory
    }
    fn clock(&self) -> &CounterClock {
        &self.clock
    }
    fn counter(&self) -> u64 {
        COUNTER
    }
    fn start_unix(&self) -> Duration {
        Duration::ZERO
    }
    fn mmio_read(&mut self, _: usize, _: u64, size: u8) -> u64 {
        if size == 1 { 0x80 } else { 0x8000_0000 }
    }
    fn mmio_write(&mut self, _: usize, address: u64, size: u8, value: u64) {
        self.writes.push((address, size, value));
    }
    fn needs_service(&self, _: usize) -> bool {
        self.end.is_some()
    }
    fn service_timers(&mut self, _: usize) -> Signals<Interrupts> {
        self.services += 1;
        let interrupts = Interrupts { start: self.start.take(), timer: None };
        Signals { end: self.end, deadline: self.deadline, interrupts }
    }
}

impl Arm64Platform for ScriptBus {
    fn send(&mut self, _: usize, interrupt: SoftwareInterrupt) {
        self.sent.push(interrupt);
    }
    fn put_virqs<V: Arm64Vcpu>(&mut self, _: usize, vcpu: &mut V) -> bool {
        while vcpu.has_room()
            && let Some(virq) = self.waiting.pop()
        {
            vcpu.put_virq(virq);
        }
        self.waiting.is_empty()
    }
    fn end_virq(&mut self, _: usize, number: u32) {
        self.ended.push(number);
    }
    fn start(&mut self, affinity: u64, _: StartRequest) -> i64 {
        if affinity == 1 { psci::SUCCESS } else { psci::INVALID_PARAMETERS }
    }
    fn stopped(&mut self, _: usize) {}
    fn power_state(&mut self, affinity: u64) -> Option<PowerState> {
        let states = [PowerState::On, PowerState::Off, PowerState::OnPending];
        states.get(affinity as usize).copied()
    }
    fn end(&mut self, outcome: Outcome) {
        self.end = Some(outcome);
    }
    fn has_device(&self, address: u64) -> bool {
        (DEVICE..DEVICE + 0x1000).contains(&address)
    }
    fn stolen_time_record(&self, cpu: usize) -> Option<u64> {
        Some(64 * cpu as u64 + 0x100).filter(|_| !self.has_no_record)
    }
    fn unknown(&mut self, what: Unknown) {
        self.unknown.push(what);
    }
}

fn bus() -> ScriptBus {
    ScriptBus {
        memory: testing::memory(&[(0, 4096)]),
        clock: CounterClock::new(1_000_000, 0),
        start: Some(StartRequest { entry: PC, argument: 0x77 }),
        deadline: NEVER,
        end: None,
        waiting: Vec::new(),
        writes: Vec::new(),
        unknown: Vec::new(),
        sent: Vec::new(),
        ended: Vec::new(),
        services: 0,
        has_no_record: false,
    }
}

/// Runs a vCPU that makes these exits until it ends by an error of the host.
fn run(vcpu: &mut ScriptVcpu, bus: &mut ScriptBus, exits: &[Exit]) -> StopReason {
    vcpu.exits.extend(exits);
    VcpuLoop::new(0, Width::Bits64).run(vcpu, bus)
}

const STOPPED: StopReason = StopReason::End(Outcome::HostError(7));

fn fault(gpa: u64, syndrome: u64) -> Exit {
    let fault = MemoryFault { gpa, write: false, fetch: false, walk: false };
    Exit::MemoryFault { fault, syndrome }
}

#[test]
fn a_vcpu_waits_for_its_start() {
    let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
    let start = bus.start.take();
    let idle = StopReason::Idle { deadline_ticks: u64::MAX };
    assert_eq!(run(&mut vcpu, &mut bus, &[]), idle);
    // It serves timers of devices while it is off.
    bus.deadline = 5000;
    let idle = StopReason::Idle { deadline_ticks: bus.clock.ticks(5000) };
    assert_eq!(run(&mut vcpu, &mut bus, &[]), idle);
    bus.start = start;
    assert_eq!(run(&mut vcpu, &mut bus, &[]), STOPPED);
    assert_eq!((vcpu.pc, vcpu.general[0], vcpu.affinity), (PC, 0x77, Some(0)));
}

#[test]
fn devices_are_accessed_by_syndrome() {
    let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
    // str w0; ldrsb x3; ldr wzr
    let exits =
        [fault(DEVICE, 0x9380_0046), fault(DEVICE, 0x9323_8006), fault(DEVICE, 0x939f_0006)];
    assert_eq!(run(&mut vcpu, &mut bus, &exits), STOPPED);
    assert_eq!(bus.writes, [(DEVICE, 4, 0x77)]);
    assert_eq!((vcpu.general[3], vcpu.pc), (-0x80_i64 as u64, PC + 12));
}

#[test]
fn devices_get_the_bytes_of_a_store_alone() {
    let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
    vcpu.general[2] = 0x1234_5678_9abc_def0;
    // strb w2; strh w2; str w2; str x2
    let exits = [0, 1, 2, 3].map(|size| fault(DEVICE, 0x9302_0046 | size << 22));
    assert_eq!(run(&mut vcpu, &mut bus, &exits), STOPPED);
    let values = [(1, 0xf0), (2, 0xdef0), (4, 0x9abc_def0), (8, 0x1234_5678_9abc_def0)];
    assert_eq!(bus.writes, values.map(|(size, value)| (DEVICE, size, value)));
}

/// Runs a vCPU that accesses the device, at the address in `x1`, by this instruction. A block of
/// its tables has the instruction.
fn access_by(instruction: u32, address: u64, write: bool) -> (ScriptVcpu, ScriptBus) {
    const BLOCK: u64 = 2 << 30;
    let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
    bus.memory.write(2 * 8, 0x701_u64).expect("in memory");
    bus.memory.write(0xabc, instruction).expect("in memory");
    bus.start = Some(StartRequest { entry: BLOCK + 0xabc, argument: 0x77 });
    vcpu.system[System::Sctlr as usize] = 1;
    // Addresses of 39 bits, pages of 4 KiB.
    vcpu.system[System::Tcr as usize] = 25;
    vcpu.system[System::Vbar as usize] = 0x1_0000;
    (vcpu.general[1], vcpu.general[2]) = (address, 0x1234_5678_9abc_def0);
    let fault = MemoryFault { gpa: DEVICE, write, fetch: false, walk: false };
    let syndrome = 0x9200_0007 | u64::from(write) << 6;
    assert_eq!(run(&mut vcpu, &mut bus, &[Exit::MemoryFault { fault, syndrome }]), STOPPED);
    (vcpu, bus)
}

#[test]
fn devices_are_accessed_by_pairs_and_with_an_index() {
    let next = (2 << 30) + 0xac0;
    // str w0, [x1], #4
    let (vcpu, bus) = access_by(0xb800_4420, 0xff80_5000, true);
    assert_eq!(bus.writes, [(DEVICE, 4, 0x77)]);
    assert_eq!((vcpu.general[1], vcpu.pc), (0xff80_5004, next));
    // stp x2, xzr, [x1, #16]
    let (vcpu, bus) = access_by(0xa901_7c22, 0xff80_4ff0, true);
    assert_eq!(bus.writes, [(DEVICE, 8, 0x1234_5678_9abc_def0), (DEVICE + 8, 8, 0)]);
    assert_eq!((vcpu.general[1], vcpu.pc), (0xff80_4ff0, next));
    // ldpsw x2, x3, [x1, #-8]!
    let (vcpu, bus) = access_by(0x69ff_0c22, 0xff80_5008, false);
    assert!(bus.unknown.is_empty() && bus.writes.is_empty());
    assert_eq!(vcpu.general[1..4], [0xff80_5000, 0xffff_ffff_8000_0000, 0xffff_ffff_8000_0000]);
    assert_eq!(vcpu.pc, next);
    // ldrsb w2, [x1], #1
    let (vcpu, _) = access_by(0x38c0_1422, 0xff80_5000, false);
    assert_eq!(vcpu.general[1..3], [0xff80_5001, 0xffff_ff80]);
}

/// Runs a 64-bit vCPU whose user mode in this state of AArch32 makes an exit.
fn user_of_32_bit(state: u64, exit: Exit) -> (ScriptVcpu, ScriptBus) {
    let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
    let mut running = VcpuLoop::new(0, Width::Bits64);
    assert_eq!(running.run(&mut vcpu, &mut bus), STOPPED);
    vcpu.state = state;
    vcpu.exits.push_back(exit);
    assert_eq!(running.run(&mut vcpu, &mut bus), STOPPED);
    (vcpu, bus)
}

#[test]
fn instructions_of_32_bit_programs_have_their_own_length() {
    // A T32 instruction of 16 bits, the first of an IT block with two, both if equal: ITSTATE 0x04.
    let (vcpu, bus) = user_of_32_bit(0x4000_0430, fault(DEVICE, 0x9180_0046));
    assert_eq!(bus.writes, [(DEVICE, 4, 0x77)]);
    assert_eq!((vcpu.pc, vcpu.state), (PC + 2, 0x4000_0830));
    // Without a description it is none of A64.
    let (mut vcpu, bus) = user_of_32_bit(0x10, fault(DEVICE, 0x9200_0006));
    assert_eq!((vcpu.system(System::Elr), bus.unknown.len()), (PC, 1));
}

#[test]
fn maintenance_of_caches_has_no_effect_on_devices() {
    // dc civac, x1
    let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
    assert_eq!(run(&mut vcpu, &mut bus, &[fault(DEVICE, 0x9200_0147)]), STOPPED);
    assert_eq!((vcpu.pc, bus.unknown.len()), (PC + 4, 0));
}

#[test]
fn other_instructions_abort() {
    for (instruction, address, write, reason) in [
        (0xb800_4420, 0xff80_5004, true, "another place in the page"),
        (0xb800_4420, 0xff80_5000, false, "a write"),
        (0x885f_7c20, 0xff80_5000, false, "an exclusive load"),
        (0xb800_07e0, 0xff80_5000, true, "the stack pointer"),
    ] {
        let (vcpu, bus) = access_by(instruction, address, write);
        assert!(bus.writes.is_empty() && bus.unknown.len() == 1, "{reason}");
        assert_eq!((vcpu.general[1], vcpu.pc), (address, 0x1_0200), "{reason}");
    }
}

#[test]
fn other_accesses_abort() {
    for exit in [fault(DEVICE + 0x1_0000, 0x9380_0046), fault(DEVICE, 0x9200_0046)] {
        let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
        vcpu.system[System::Vbar as usize] = 0x1_0000;
        assert_eq!(run(&mut vcpu, &mut bus, &[exit]), STOPPED);
        assert_eq!((vcpu.pc, vcpu.system(System::Elr)), (0x1_0200, PC));
        assert_eq!(esr::class(vcpu.system(System::Esr)), class::DATA_ABORT + 1);
        assert_eq!(bus.unknown.len(), 1);
    }
}

#[test]
fn an_error_has_a_vector_of_its_own() {
    for (kind, vector) in [(class::SYSTEM_ERROR, 0x1_0380), (0x3f, 0x1_0200)] {
        let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
        vcpu.system[System::Vbar as usize] = 0x1_0000;
        let exit = Exit::Unknown { syndrome: kind << esr::CLASS_SHIFT };
        assert_eq!(run(&mut vcpu, &mut bus, &[exit]), STOPPED);
        assert_eq!((vcpu.pc, vcpu.system(System::Elr)), (vector, PC));
        assert_eq!(bus.unknown.len(), 1);
    }
}

#[test]
fn system_registers() {
    let access = |fields: u64| Exit::SystemRegister { syndrome: 0x6000_0000 | fields };
    // msr icc_sgi1r_el1, x0; mrs x5, mdscr_el1; mrs x5, pmcr_el0
    let sgi = access(3 << 20 | 5 << 17 | 12 << 10 | 11 << 1);
    let debug = access(2 << 20 | 2 << 17 | 2 << 1 | 5 << 5 | 1);
    let monitor = access(3 << 20 | 3 << 14 | 9 << 10 | 12 << 1 | 5 << 5 | 1);
    let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
    vcpu.general[5] = 1;
    assert_eq!(run(&mut vcpu, &mut bus, &[sgi, debug, monitor]), STOPPED);
    assert_eq!(bus.sent, [SoftwareInterrupt::decode(0x77)]);
    assert_eq!((vcpu.general[5], vcpu.pc), (0, 0x200));
    assert_eq!(bus.unknown, [Unknown::SystemRegister(system_register(3, 3, 9, 12, 0))]);
}

#[test]
fn the_physical_counter_is_the_virtual_one() {
    // mrs x5, cntpct_el0; mrs x6, cntpctss_el0; mrs xzr, cntpct_el0; msr cntp_ctl_el0, x0
    let access = |fields: u64| Exit::SystemRegister {
        syndrome: 0x6000_0000 | 3 << 20 | 3 << 14 | 14 << 10 | fields,
    };
    let exits = [
        access(1 << 17 | 5 << 5 | 1),
        access(5 << 17 | 6 << 5 | 1),
        access(1 << 17 | 31 << 5 | 1),
        access(1 << 17 | 2 << 1),
    ];
    let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
    assert_eq!(run(&mut vcpu, &mut bus, &exits[..3]), STOPPED);
    assert_eq!((&vcpu.general[5..7], vcpu.pc), (&[COUNTER; 2][..], PC + 12));
    assert_eq!(bus.unknown, []);
    // Its timer does not exist.
    bus.start = Some(StartRequest { entry: PC, argument: 0 });
    assert_eq!(run(&mut vcpu, &mut bus, &exits[3..]), STOPPED);
    assert_eq!(bus.unknown, [Unknown::SystemRegister(system_register(3, 3, 14, 2, 1))]);
}

#[test]
fn firmware_calls() {
    for (call, argument, result) in [
        (psci::VERSION, 0, psci::VERSION_1_1 as i64),
        (psci::CPU_ON, 1, psci::SUCCESS),
        (psci::CPU_ON, 5, psci::INVALID_PARAMETERS),
        (psci::AFFINITY_INFO, 0, 0),
        (psci::AFFINITY_INFO, 1, 1),
        (psci::AFFINITY_INFO, 2, 2),
        (psci::AFFINITY_INFO, 3, psci::INVALID_PARAMETERS),
        (psci::FEATURES, psci::CPU_ON, psci::SUCCESS),
        (psci::FEATURES, 0x8400_0099, psci::NOT_SUPPORTED),
        (psci::trng::VERSION, 0, psci::NOT_SUPPORTED),
        (psci::smccc::ARCH_FEATURES, psci::stolen_time::FEATURES, psci::SUCCESS),
        (psci::stolen_time::FEATURES, psci::stolen_time::RECORD, psci::SUCCESS),
        (psci::stolen_time::FEATURES, psci::VERSION, psci::NOT_SUPPORTED),
        (psci::stolen_time::RECORD, 0, 0x100),
    ] {
        let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
        bus.start = Some(StartRequest { entry: PC, argument: call });
        vcpu.general[1] = argument;
        assert_eq!(run(&mut vcpu, &mut bus, &[Exit::Hypercall]), STOPPED);
        assert_eq!(vcpu.general[0] as i64, result, "{call:#x}");
    }
    let (mut vcpu, mut bus) = (ScriptVcpu::with_random(0xa5), self::bus());
    bus.start = Some(StartRequest { entry: PC, argument: psci::trng::RND64 });
    vcpu.general[1] = 72;
    assert_eq!(run(&mut vcpu, &mut bus, &[Exit::Hypercall]), STOPPED);
    assert_eq!(vcpu.general[..4], [0, 0, 0xa5, 0xa5a5_a5a5_a5a5_a5a5], "with all its results");
    let (mut vcpu, mut bus) = (ScriptVcpu::default(), self::bus());
    bus.start = Some(StartRequest { entry: PC, argument: psci::SYSTEM_OFF });
    let end = StopReason::End(Outcome::PowerOff);
    assert_eq!(run(&mut vcpu, &mut bus, &[Exit::SecureCall]), end);
}

#[test]
fn interrupts_are_put_while_there_is_room() {
    let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
    let virq = |number| Virq { number, priority: 0, report_end: true };
    bus.waiting = [33, 34, 35].map(virq).into();
    let exits = [Exit::VirqEnded { number: 35 }, Exit::Recall { events: 4 }];
    assert_eq!(run(&mut vcpu, &mut bus, &exits), StopReason::Recall(4));
    assert_eq!((vcpu.virqs.len(), bus.waiting.len()), (2, 1));
    assert_eq!(bus.ended, [35]);
    assert_eq!(bus.services, 1, "the host continues the vCPU with a look at all events");
}

#[test]
fn stolen_time_is_in_a_record_once_the_guest_asks_for_it() {
    let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
    bus.memory.write_slice(0x100, &[0xff; 64]).expect("in memory");
    bus.start = Some(StartRequest { entry: PC, argument: psci::stolen_time::RECORD });
    let preempted = Exit::Preempted;
    let exits = [preempted, Exit::Hypercall, preempted, Exit::SecureCall, preempted];
    assert_eq!(run(&mut vcpu, &mut bus, &exits), STOPPED);
    assert!(vcpu.has_preemption_exits);
    let words: [u64; 8] =
        core::array::from_fn(|index| bus.memory.read(0x100 + 8 * index as u64).expect("in memory"));
    // Nanoseconds since the first call; the second one is of a function without a meaning.
    assert_eq!(words, [0, 1000, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn without_a_record_there_is_no_stolen_time() {
    for function in [psci::stolen_time::FEATURES, psci::stolen_time::RECORD] {
        let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
        bus.has_no_record = true;
        bus.start = Some(StartRequest { entry: PC, argument: function });
        vcpu.general[1] = psci::stolen_time::RECORD;
        let exits = [Exit::Hypercall, Exit::Preempted];
        assert_eq!(run(&mut vcpu, &mut bus, &exits), STOPPED);
        assert_eq!(vcpu.general[0] as i64, psci::NOT_SUPPORTED);
        assert!(!vcpu.has_preemption_exits);
    }
}

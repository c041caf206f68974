//! Exits of 32-bit vCPUs.

use super::*;
use crate::run::aarch32::memory_fault;
use hw_arm64::aarch32::{psr, sctlr};

/// Runs a vCPU in this state from [`PC`] on, after its start.
fn run_32(
    vcpu: &mut ScriptVcpu,
    bus: &mut ScriptBus,
    state: u64,
    exits: &[(u64, u64)],
) -> StopReason {
    let mut vcpu_loop = VcpuLoop::new(0, Width::Bits32);
    let general = vcpu.general;
    assert_eq!(vcpu_loop.run(vcpu, bus), STOPPED);
    vcpu.general = general;
    assert_eq!(vcpu.width, Width::Bits32);
    vcpu.state = state;
    for &(syndrome, address) in exits {
        let exit = match memory_fault(syndrome, address, vcpu.pc, vcpu.state) {
            Some((exit, pc, state)) => {
                (vcpu.pc, vcpu.state) = (pc, state);
                exit
            }
            None => Exit::AArch32 { syndrome },
        };
        vcpu.exits.push_back(exit);
        let stop = vcpu_loop.run(vcpu, bus);
        if stop != STOPPED {
            return stop;
        }
    }
    STOPPED
}

const fn syndrome(class: u64, iss: u64) -> u64 {
    class << esr::CLASS_SHIFT | 1 << esr::LENGTH_SHIFT | iss
}

#[test]
fn the_first_vcpu_starts_as_linux_demands() {
    let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
    assert_eq!(VcpuLoop::new(0, Width::Bits32).run(&mut vcpu, &mut bus), STOPPED);
    assert_eq!(vcpu.general[..3], [0, 0xffff_ffff, 0x77]);
    assert_eq!((vcpu.pc, vcpu.state), (PC, 0x1d3));
}

#[test]
fn others_start_as_psci_demands() {
    for (entry, state) in [(PC, 0x1d3), (PC | 1, 0x1f3)] {
        let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
        bus.start = Some(StartRequest { entry, argument: 0x77 });
        assert_eq!(VcpuLoop::new(1, Width::Bits32).run(&mut vcpu, &mut bus), STOPPED);
        assert_eq!((vcpu.general[0], vcpu.pc, vcpu.state), (0x77, PC, state));
    }
}

#[test]
fn devices_are_accessed_by_syndrome() {
    let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
    vcpu.general[18] = 0xffff_ffff_0000_0055;
    // str lr; ldrsb r3 in 16 bits
    let exits = [(0x938e_0046, DEVICE), (0x9123_0006, DEVICE)];
    assert_eq!(run_32(&mut vcpu, &mut bus, psr::RESET | psr::T, &exits), STOPPED);
    assert_eq!(bus.writes, [(DEVICE, 4, 0x55)]);
    assert_eq!((vcpu.general[3], vcpu.pc), (0xffff_ff80, PC + 6));
}

#[test]
fn other_accesses_abort() {
    let read = (0x9380_0006, DEVICE + 0x1_0000);
    let write = (0x9200_0046, DEVICE);
    let fetch = (syndrome(class::INSTRUCTION_ABORT, 0x10), DEVICE);
    for (exit, is_long, status, [vector, after]) in [
        (read, false, 0x1_0008, [0x10, 8]),
        (write, false, 0x1_0808, [0x10, 8]),
        (write, true, 0x1_0a10, [0x10, 8]),
        (fetch, false, 0x1_0008, [0xc, 4]),
    ] {
        let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
        vcpu.system[System::Vbar as usize] = 0x1_0000;
        vcpu.system[System::Sctlr as usize] = sctlr::SPAN;
        vcpu.system[System::Tcr as usize] = if is_long { 1 << 31 } else { 0 };
        let before = psr::USER | psr::T | psr::IT;
        assert_eq!(run_32(&mut vcpu, &mut bus, before, &[exit]), STOPPED);
        assert_eq!((vcpu.pc, vcpu.general[20]), (0x1_0000 + vector, PC + after));
        assert_eq!(vcpu.state, psr::ABORT | psr::A | psr::I);
        assert_eq!(vcpu.system(System::SpsrAbort), before);
        let register = if vector == 0xc { System::Ifsr } else { System::Esr };
        assert_eq!(vcpu.system(register), status);
        assert_eq!(bus.unknown.len(), 1);
    }
}

#[test]
fn undefined_instructions_have_the_state_that_the_guest_demands() {
    for (before, after) in [(psr::SUPERVISOR, 4), (psr::SUPERVISOR | psr::T, 2)] {
        let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
        vcpu.system[System::Sctlr as usize] = sctlr::V | sctlr::TE | sctlr::EE;
        // mcr p15, 0, r0, c9, c12, 0: performance monitors.
        let monitor = syndrome(class::CP15, 9 << 10 | 12 << 1);
        assert_eq!(run_32(&mut vcpu, &mut bus, before, &[(monitor, 0)]), STOPPED);
        assert_eq!((vcpu.pc, vcpu.general[22]), (0xffff_0004, PC + after));
        assert_eq!(vcpu.state, psr::UNDEFINED | psr::I | psr::T | psr::E | psr::PAN);
        assert_eq!(vcpu.system(System::SpsrUndefined), before);
        let register = hw_arm64::aarch32::coprocessor_register(0, 9, 12, 0);
        assert_eq!(bus.unknown, [Unknown::Coprocessor(register)]);
    }
}

#[test]
fn registers_of_coprocessors() {
    let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
    vcpu.general[5] = 1;
    vcpu.general[6] = 1;
    vcpu.general[2] = 0x77;
    vcpu.general[3] = 1 << 8;
    let exits = [
        // mcrr p15, 0, r2, r3, c12; the same with opc1 1 and 2
        syndrome(class::CP15_WIDE, 3 << 10 | 2 << 5 | 12 << 1),
        syndrome(class::CP15_WIDE, 1 << 16 | 3 << 10 | 2 << 5 | 12 << 1),
        syndrome(class::CP15_WIDE, 2 << 16 | 3 << 10 | 2 << 5 | 12 << 1),
        // mrc p15, 0, r5, c1, c0, 1; mcr p15, 0, r5, c7, c14, 2; mrc p14, 0, r6, c0, c0, 0
        syndrome(class::CP15, 1 << 17 | 1 << 10 | 5 << 5 | 1),
        syndrome(class::CP15, 2 << 17 | 7 << 10 | 5 << 5 | 14 << 1),
        syndrome(class::CP14, 6 << 5 | 1),
    ];
    let exits = exits.map(|syndrome| (syndrome, 0));
    assert_eq!(run_32(&mut vcpu, &mut bus, psr::RESET, &exits), STOPPED);
    assert_eq!(bus.sent, [SoftwareInterrupt::decode(1 << 40 | 0x77)]);
    assert_eq!((vcpu.general[5], vcpu.general[6], vcpu.pc), (0, 0, PC + 24));
    assert_eq!(bus.unknown, []);
}

#[test]
fn the_physical_counter_is_the_virtual_one() {
    let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
    // mrrc p15, 0, r2, r3, c14; the same with opc1 8
    let exits = [
        syndrome(class::CP15_WIDE, 3 << 10 | 2 << 5 | 14 << 1 | 1),
        syndrome(class::CP15_WIDE, 8 << 16 | 5 << 10 | 4 << 5 | 14 << 1 | 1),
    ];
    let exits = exits.map(|syndrome| (syndrome, 0));
    assert_eq!(run_32(&mut vcpu, &mut bus, psr::RESET, &exits), STOPPED);
    let halves = [COUNTER & 0xffff_ffff, COUNTER >> 32];
    assert_eq!((&vcpu.general[2..6], vcpu.pc), (&[halves; 2].concat()[..], PC + 8));
    assert_eq!(bus.unknown, []);
}

#[test]
fn firmware_calls() {
    let call = syndrome(class::HYPERVISOR_CALL_32, 0);
    for (number, argument, result) in [
        (psci::VERSION, 0, psci::VERSION_1_1 as i64),
        (0x8400_0003, 1, psci::SUCCESS),
        (psci::CPU_ON, 1, psci::NOT_SUPPORTED),
        (psci::trng::RND64, 64, psci::NOT_SUPPORTED),
    ] {
        let (mut vcpu, mut bus) = (ScriptVcpu::with_random(1), bus());
        vcpu.general[0] = number;
        vcpu.general[1] = argument;
        assert_eq!(run_32(&mut vcpu, &mut bus, psr::RESET, &[(call, 0)]), STOPPED);
        assert_eq!((vcpu.general[0] as i64, vcpu.pc), (result, PC), "{number:#x}");
    }
    let (mut vcpu, mut bus) = (ScriptVcpu::default(), bus());
    vcpu.general[0] = psci::SYSTEM_OFF;
    let secure = (syndrome(class::SECURE_CALL_32, 0), 0);
    let end = StopReason::End(Outcome::PowerOff);
    assert_eq!(run_32(&mut vcpu, &mut bus, psr::RESET, &[secure]), end);
}

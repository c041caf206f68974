//! 32-bit vCPUs: the kernel refuses states that are not of their kind, whatever the order in which
//! a VMM changes a vCPU; exits have the registers of the modes, and registers of one vCPU are not
//! in another.

use abi::boot::{FEATURE_AARCH32, slot};
use abi::vcpu::arm64::{exit as arm64_exit, group, pstate, system};
use abi::{PAGE_SIZE, Status, rights, vm_mode};
use native_rt::start::Boot;
use native_rt::{Factory, Space, Vcpu, Window, drop_capability, info};

use crate::{Named, Outcome, Slots, ensure, guest};

/// Guest-physical address of the code.
const CODE: u64 = 0x4000_0000;
/// Modes of AArch32 that a guest may have.
const MODES: [u64; 7] = [0x10, 0x11, 0x12, 0x13, 0x17, 0x1b, 0x1f];
/// Supervisor mode, everything masked.
const SUPERVISOR: u64 = 0x1d3;
/// Instructions of A32: `hvc #0`; `mcr p15, 0, r0, c1, c0, 1` (ACTLR); the same if equal.
const CALL: u32 = 0xe140_0070;
const ACTLR: u32 = 0xee01_0f30;
const ACTLR_IF_EQUAL: u32 = 0x0e01_0f30;
/// `mrc p15, 0, r1, c0, c1, 1` (ID_PFR1), which the kernel answers.
const ID_PFR1: u32 = 0xee10_1f31;
/// `ldr lr, [r2]`
const LOAD: u32 = 0xe592_e000;
/// `vmrs r3, fpexc`, for which the registers of floating point change hands.
const FPEXC: u32 = 0xeef8_3a10;
const INSTRUCTIONS: [u32; 7] = [ACTLR, ACTLR_IF_EQUAL, ID_PFR1, LOAD, CALL, FPEXC, CALL];
/// CPACR: floating point does not trap to the guest's kernel.
const FLOATING_POINT: u64 = 3 << 20;
/// Exception classes: CP15, data abort, HVC of AArch32.
const CP15: u64 = 0x03;
const DATA_ABORT: u64 = 0x24;
const HYPERVISOR_CALL: u64 = 0x12;
/// Address without memory.
const UNMAPPED: u64 = 0x0900_0010;

/// Checks two 32-bit vCPUs with memory at the start of `ram`.
pub fn check(slots: &mut Slots, boot: &Boot, ram: Window) -> Outcome {
    let factory = Factory::at(slot::FACTORY);
    let vm_slot = slots.next();
    let vm = factory.vm(vm_slot, vm_mode::NESTED).named("VM")?;
    let code = ram.part(0, PAGE_SIZE).ok_or(("memory for a guest", Status::Ok))?;
    for (index, instruction) in INSTRUCTIONS.iter().enumerate() {
        let is_written = code.write(4 * index as u64, &instruction.to_le_bytes());
        ensure(is_written, "the guest's code can be written")?;
    }
    vm.map(code, CODE, rights::READ | rights::EXECUTE).named("memory of a guest")?;
    let mut vcpus = [0, 1].map(|index: u32| {
        let events = factory.notification(slots.next()).named("notification of a vCPU")?;
        Vcpu::create(factory, slots.next(), vm, guest::CREATED + index, events).named("vCPU")
    });
    if boot.info.features & FEATURE_AARCH32 == 0 {
        let [Ok(vcpu), _] = &mut vcpus else { return Err(("vCPU", Status::Ok)) };
        become_32_bit(vcpu, SUPERVISOR);
        let refused = vcpu.run() == Err(Status::Unsupported);
        ensure(refused, "a processor without AArch32 runs no 32-bit vCPU")?;
        info!("guest: 32-bit vCPUs refused");
        return drop_capability(vm_slot).named("end of the VM");
    }
    let [first, second] = vcpus;
    let (mut first, mut second) = (first?, second?);
    for vcpu in [&mut first, &mut second] {
        refuses(vcpu)?;
    }
    for index in 0..INSTRUCTIONS.len() {
        for (vcpu, seed) in [(&mut first, 0x1000), (&mut second, 0x2000)] {
            step(vcpu, index, seed)?;
        }
    }
    info!("guest: 32-bit vCPUs work");
    drop_capability(vm_slot).named("end of the VM")
}

/// Makes the vCPU a 32-bit one that starts in this state.
fn become_32_bit(vcpu: &mut Vcpu, pstate: u64) {
    let state = vcpu.state();
    state.is_32_bit.set(1);
    state.pstate.set(pstate);
    state.pc.set(CODE);
    state.run.dirty.set(group::SYSTEM);
}

/// Runs a vCPU in a state that the kernel refuses.
fn is_refused(vcpu: &mut Vcpu, pstate: u64) -> Outcome {
    vcpu.state().pstate.set(pstate);
    vcpu.run().named("run of a guest in a wrong state")?;
    let reason = vcpu.state().run.exit_reason.get();
    ensure(reason == arm64_exit::INVALID_STATE, "the kernel enters no guest in a wrong state")
}

/// The kernel enters no vCPU in a state of the other kind, or in one of EL2 or EL3.
fn refuses(vcpu: &mut Vcpu) -> Outcome {
    // As a 64-bit one, before it becomes another.
    for mode in MODES.into_iter().filter(|&mode| mode != MODES[0]) {
        is_refused(vcpu, mode | 0x1c0)?;
    }
    become_32_bit(vcpu, SUPERVISOR);
    for mode in (0..32).filter(|mode| !MODES.contains(mode)) {
        is_refused(vcpu, mode | 0x1c0)?;
    }
    // Its kind changes in an entry that is refused, and nothing tells so later.
    for (is_32_bit, first, second) in
        [(0, SUPERVISOR, pstate::EL1_MASKED), (1, pstate::EL1_MASKED, SUPERVISOR)]
    {
        let state = vcpu.state();
        state.is_32_bit.set(is_32_bit);
        state.run.dirty.set(group::SYSTEM);
        is_refused(vcpu, first)?;
        let state = vcpu.state();
        state.run.dirty.set(0);
        // It aborts: there is no memory.
        state.pc.set(UNMAPPED);
        state.pstate.set(second);
        vcpu.run().named("run of a guest after a change")?;
        let reason = vcpu.state().run.exit_reason.get();
        let wanted =
            if is_32_bit == 0 { abi::vcpu::exit::MEMORY_FAULT } else { arm64_exit::AARCH32 };
        ensure(reason == wanted, "a vCPU whose kind has changed runs as that")?;
    }
    Ok(())
}

/// Runs the vCPU until the exit of an instruction.
fn step(vcpu: &mut Vcpu, index: usize, seed: u64) -> Outcome {
    // The others make no exit for the VMM.
    let class = match index {
        0 => CP15,
        3 => DATA_ABORT,
        4 | 6 => HYPERVISOR_CALL,
        _ => return Ok(()),
    };
    if index == 0 {
        become_32_bit(vcpu, SUPERVISOR);
        let state = vcpu.state();
        for register in system::FIRST_OF_32_BIT..system::COUNT {
            state.system[register].set(value_of(register, seed));
        }
        state.system[system::CPACR_EL1].set(FLOATING_POINT);
        state.x[2].set(UNMAPPED);
        state.x[18].set(seed);
    }
    vcpu.run().named("run of a 32-bit guest")?;
    let state = vcpu.state();
    ensure(state.run.exit_reason.get() == arm64_exit::AARCH32, "an exit of a 32-bit vCPU")?;
    ensure(state.run.exit_info.get() >> 26 == class, "exits come in order")?;
    let wanted = CODE + 4 * (index as u64 + u64::from(class == HYPERVISOR_CALL));
    ensure(state.pc.get() == wanted, "an exit has the address of its instruction")?;
    match index {
        3 => {
            ensure(state.run.fault_address.get() == UNMAPPED, "an abort has its address")?;
            ensure(state.x[18].get() == seed, "registers of a mode are its own")?;
            // ID_PFR1 has neither security extensions nor virtualization.
            ensure(state.x[1].get() & 0xf0f0 == 0, "a guest reads what it has")?;
        }
        6 => {
            let is_own = state.x[3].get() == value_of(system::FPEXC32_EL2, seed);
            ensure(is_own, "a guest reads its own FPEXC")?;
            vcpu.fetch(group::SYSTEM).named("registers of a vCPU")?;
            let state = vcpu.state();
            for register in system::FIRST_OF_32_BIT..system::COUNT {
                let is_own = state.system[register].get() == value_of(register, seed);
                ensure(is_own, "a 32-bit vCPU has registers of its own")?;
            }
            return Ok(());
        }
        _ => {}
    }
    if class != HYPERVISOR_CALL {
        state.pc.add(4);
    }
    Ok(())
}

/// Value of a register of a vCPU that no reserved bit changes.
fn value_of(register: usize, seed: u64) -> u64 {
    match register {
        system::FPEXC32_EL2 => (seed & 0x1000) << 18,
        system::IFSR32_EL2 => seed >> 10 & 0xf,
        system::DACR32_EL2 => seed + register as u64,
        // Saved processor states: flags and a mode.
        _ => seed << 16 | SUPERVISOR,
    }
}

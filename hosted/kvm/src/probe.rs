//! Whether KVM runs ordinary kernels here.
//!
//! A device `/dev/kvm` does not say so: there are hosts whose KVM runs special kernels only and emulates all others, instruction by
//! instruction, as far as it knows them. So a processor in 64-bit mode runs a loop with an instruction that KVM's emulator does not
//! know, so often that emulation would be noticed by who waits.

use hw_x86::paging::cr4;
use vmm_boot::InitialState;
use vmm_cpu::{Exit, Gpr, TscClock, Vcpu};
use vmm_machine::registers;
use vmm_mem::GuestMemory;
use vmm_mem::shared::SharedMemory;

use crate::Error;
use crate::seat::Seat;
use crate::vcpu::{KvmVcpu, listen_to_kicks};
use crate::vm::Vm;

/// Bytes of the machine's memory.
const MEMORY: u64 = 2 << 20;
/// Where the program is.
const PROGRAM: u64 = 1 << 20;
/// Rounds of its loop: a millisecond on a processor, seconds if each is emulated.
const ROUNDS: u32 = 1_000_000;

/// Whether a virtual processor runs a program to its end. It may never return: give it a process of its own, and a time limit.
///
/// # Errors
/// Why not.
pub fn probe() -> Result<(), Error> {
    listen_to_kicks()?;
    let vm = Vm::new()?;
    let fd = vm.vcpu(0)?;
    let clock = TscClock::new(vm.tsc_khz(&fd)?, 0);
    let mut memory = SharedMemory::new("parador-probe", MEMORY)
        .map_err(Error::host("make the guest's memory"))?;
    let run = |memory: &GuestMemory| {
        vm.map(memory)?;
        memory.write_slice(PROGRAM, &program()).map_err(|error| Error::Boot(error.into()))?;
        let mut state = InitialState::long_mode(memory, PROGRAM, 0).map_err(Error::Boot)?;
        state.cr4 |= cr4::OSFXSR;
        let seat = Seat::default();
        let mut vcpu = KvmVcpu::new(fd, &seat, memory, clock, None)?;
        registers::set(&mut vcpu, &state);
        match vcpu.run() {
            Exit::Hlt if vcpu.gpr(Gpr::Rcx) == 0 => Ok(()),
            exit => Err(Error::NotRunning(exit)),
        }
    };
    memory.with([(0, MEMORY)], run).map_err(Error::host("lay the guest's memory out"))?
}

/// `mov ecx, ROUNDS`; `1: pxor xmm0, xmm0`; `dec ecx`; `jnz 1b`; `hlt`
fn program() -> Vec<u8> {
    let mut program = vec![0xb9];
    program.extend(ROUNDS.to_le_bytes());
    program.extend([0x66, 0x0f, 0xef, 0xc0, 0xff, 0xc9, 0x75, 0xf8, 0xf4]);
    program
}

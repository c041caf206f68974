//! Probe whether KVM runs ordinary kernels on this host.
//!
//! The presence of `/dev/kvm` does not show that: some hosts' KVM runs special kernels only and
//! emulates all others, as far as its emulator knows the instructions. The probe therefore runs a
//! loop in 64-bit mode with an instruction that KVM's emulator does not support, often enough that
//! emulation would exceed the caller's time limit.

use hw_x86::paging::cr4;
use vmm_boot::InitialState;
use vmm_machine::registers;
use vmm_mem::GuestMemory;
use vmm_mem::shared::SharedMemory;
use vmm_vcpu::{CounterClock, Vcpu};
use vmm_x86::{Exit, Gpr, X86Vcpu};

use crate::Error;
use crate::kick;
use crate::vcpu::KvmVcpu;
use crate::vcpu_thread::VcpuThread;
use crate::vm::KvmVm;

/// Guest memory in bytes.
const MEMORY: u64 = 2 << 20;
/// Address of the program.
const PROGRAM: u64 = 1 << 20;
/// Iterations of the loop: a millisecond on hardware, seconds if each is emulated.
const ROUNDS: u32 = 1_000_000;

/// Runs a program on a vCPU. It may never return: run it in a process of its own with a time limit.
///
/// # Errors
/// Reason of the failure.
pub fn probe() -> Result<(), Error> {
    kick::install_handler()?;
    let vm = KvmVm::new()?;
    let fd = vm.vcpu(0)?;
    let clock = CounterClock::new(vm.tsc_khz(&fd)?, 0);
    let mut memory =
        SharedMemory::new("parador-probe", MEMORY).map_err(Error::host("create guest memory"))?;
    let run = |memory: &GuestMemory| {
        vm.map(memory)?;
        memory.write_slice(PROGRAM, &program()).map_err(|error| Error::Boot(error.into()))?;
        let mut state = InitialState::long_mode(memory, PROGRAM, 0).map_err(Error::Boot)?;
        state.cr4 |= cr4::OSFXSR;
        let vcpu_thread = VcpuThread::default();
        let mut vcpu = KvmVcpu::new(fd, &vcpu_thread, memory, clock, None)?;
        registers::set(&mut vcpu, &state);
        match vcpu.run() {
            Exit::Hlt if vcpu.gpr(Gpr::Rcx) == 0 => Ok(()),
            exit => Err(Error::NotRunning(exit)),
        }
    };
    memory.with([(0, MEMORY)], run).map_err(Error::host("lay out guest memory"))?
}

/// `mov ecx, ROUNDS`; `1: pxor xmm0, xmm0`; `dec ecx`; `jnz 1b`; `hlt`
fn program() -> Vec<u8> {
    let mut program = vec![0xb9];
    program.extend(ROUNDS.to_le_bytes());
    program.extend([0x66, 0x0f, 0xef, 0xc0, 0xff, 0xc9, 0x75, 0xf8, 0xf4]);
    program
}

//! Exits of guests: those that the kernel handles, and the others for the VMM.

use abi::vcpu::arm64::{VcpuState, exit as arm64_exit};
use abi::vcpu::{HYPERCALL_DOORBELL, exit};
use hw_arm64::esr::{self, class};
use kernel_core::Kernel;
use kernel_core::object::Vm;
use kernel_run::exit::ReturnToUser;

use super::guest_entry::GuestEntry;
use super::{
    GuestCpu, INSTRUCTION, aarch32, count_handled, fault, features, float, return_exit, sgi, virqs,
    wait,
};
use crate::entry::{GuestExit, exit_kind};
use crate::run::handle_interrupts;
use crate::{Arm64, time};

/// Registers by number in the hypercall convention.
const NUMBER: usize = 0;
const ARGUMENT: usize = 1;

/// Handles an exit. Returns it to the VMM unless the kernel handles it alone.
pub fn handle(
    kernel: &Kernel<Arm64>,
    cpu_index: usize,
    local: &GuestCpu,
    entry: GuestEntry<'_>,
    GuestExit { syndrome, kind }: GuestExit,
) -> Option<ReturnToUser<Arm64>> {
    let state = entry.state;
    if kind == exit_kind::INTERRUPT {
        if let Some(number) = virqs::take_ended() {
            return Some(return_exit(kernel, entry, arm64_exit::VIRQ_ENDED, number));
        }
        count_handled(kernel, state);
        handle_interrupts(kernel, cpu_index);
        return after_interrupt(kernel, cpu_index);
    }
    let to_vmm = match (kind, esr::class(syndrome)) {
        (exit_kind::SYNCHRONOUS_32, _) => return aarch32::handle(kernel, local, entry, syndrome),
        (exit_kind::ERROR, _) => Some((exit::UNKNOWN, syndrome)),
        (_, class::WAIT) => return wait_after_wait(kernel, cpu_index, local, entry, syndrome),
        // Without an address the guest accesses again.
        (_, class::INSTRUCTION_ABORT | class::DATA_ABORT) => {
            fault::address(entry.vcpu, entry.vm, syndrome).map(|address| {
                state.run.fault_address.set(address);
                (exit::MEMORY_FAULT, fault::kind(syndrome))
            })
        }
        (_, class::HYPERVISOR_CALL) if rang_doorbell(kernel, entry.vm, state) => None,
        (_, class::HYPERVISOR_CALL) => Some((exit::HYPERCALL, syndrome)),
        (_, class::SYSTEM_REGISTER) if sent_sgi(kernel, entry, syndrome) => None,
        (_, class::SYSTEM_REGISTER) if identify(state, syndrome) => None,
        (_, class::SYSTEM_REGISTER) => Some((arm64_exit::SYSTEM_REGISTER, syndrome)),
        (_, class::SECURE_CALL) => Some((arm64_exit::SECURE_CALL, syndrome)),
        (_, class::FLOATING_POINT) => {
            float::take_over(kernel, local, entry.vcpu);
            None
        }
        _ => Some((exit::UNKNOWN, syndrome)),
    };
    let Some((reason, information)) = to_vmm else {
        count_handled(kernel, state);
        return None;
    };
    Some(return_exit(kernel, entry, reason, information))
}

/// Handles a hypercall of the kernel's own, except that of the version, which the entry code
/// answers. Returns whether it was one.
#[inline(always)]
pub fn handle_hypercall(kernel: &Kernel<Arm64>, vm: &Vm<Arm64>, state: &VcpuState) -> bool {
    let is_doorbell = state.x[NUMBER].get() == HYPERCALL_DOORBELL;
    if is_doorbell {
        state.x[NUMBER].set(kernel.ring_doorbell(vm, state.x[ARGUMENT].get()));
    }
    is_doorbell
}

/// Begins a wait ([`wait::begin`]) where the CPU has waited before, or an object has been destroyed
/// while the guest ran. This and the next two are not part of [`handle`], which seldom calls them.
#[inline(never)]
fn wait_after_wait(
    kernel: &Kernel<Arm64>,
    cpu_index: usize,
    local: &GuestCpu,
    entry: GuestEntry<'_>,
    syndrome: u64,
) -> Option<ReturnToUser<Arm64>> {
    wait::begin(kernel, cpu_index, local, entry, syndrome)
}

/// Sends an SGI in the same cases.
#[cold]
#[inline(never)]
fn sent_sgi(kernel: &Kernel<Arm64>, entry: GuestEntry<'_>, syndrome: u64) -> bool {
    sgi::send(kernel, (entry.vcpu, entry.vm), syndrome)
}

/// Handles a hypercall in the same cases.
#[cold]
#[inline(never)]
fn rang_doorbell(kernel: &Kernel<Arm64>, vm: &Vm<Arm64>, state: &VcpuState) -> bool {
    handle_hypercall(kernel, vm, state)
}

/// Handles a read of an identification register, and skips its instruction. Returns whether it was
/// one.
fn identify(state: &VcpuState, syndrome: u64) -> bool {
    let access = esr::system_access(syndrome);
    let Some(value) = features::read(access) else { return false };
    if let Some(register) = state.x.get(access.general) {
        register.set(value);
    }
    state.pc.add(INSTRUCTION);
    true
}

/// Returns an exit to the VMM after an interrupt of the host, if the vCPU's deadline has passed.
fn after_interrupt(kernel: &Kernel<Arm64>, cpu_index: usize) -> Option<ReturnToUser<Arm64>> {
    // The thread may have been stopped, or its `VcpuRun` aborted.
    let entry = GuestEntry::current(kernel, cpu_index)?;
    if entry.state.run.deadline.get() <= time::counter() {
        // Another thread may be current by now: `pick_next` chooses.
        return_exit(kernel, entry, exit::DEADLINE, 0);
    }
    None
}

//! Exits of 32-bit vCPUs, which have vectors of their own: the paths of 64-bit vCPUs have no code
//! for them.

use abi::vcpu::arm64::{VcpuState, exit as arm64_exit};
use hw_arm64::aarch32::{self, SGI1R, WideAccess};
use hw_arm64::esr::{self, class, system_register};
use hw_arm64::gic::SoftwareInterrupt;
use kernel_core::Kernel;
use kernel_run::exit::ReturnToUser;

use super::guest_entry::GuestEntry;
use super::{GuestCpu, count_handled, fault, features, float, return_exit, sgi};
use crate::Arm64;

/// Handles an exit with a syndrome. Returns it to the VMM unless the kernel handles it alone.
#[cold]
pub fn handle(
    kernel: &Kernel<Arm64>,
    local: &GuestCpu,
    entry: GuestEntry<'_>,
    syndrome: u64,
) -> Option<ReturnToUser<Arm64>> {
    let (state, class) = (entry.state, esr::class(syndrome));
    let is_abort = matches!(class, class::INSTRUCTION_ABORT | class::DATA_ABORT);
    let is_handled = if !aarch32::condition_holds(syndrome, state.pstate.get()) {
        skip(state, syndrome);
        true
    } else if class == class::WAIT {
        // In an IT block: it may end at any time. Any other is no exit of this kind (`entry.rs`).
        skip(state, syndrome);
        true
    } else if class == class::FLOATING_POINT {
        float::take_over(kernel, local, entry.vcpu);
        true
    } else if is_abort {
        let address = fault::address(entry.vcpu, entry.vm, syndrome);
        state.run.fault_address.set(address.unwrap_or_default());
        // Without one the guest accesses again.
        address.is_none()
    } else {
        let is_handled = identify(state, syndrome) || send(kernel, entry, syndrome);
        if is_handled {
            skip(state, syndrome);
        }
        is_handled
    };
    if is_handled {
        count_handled(kernel, state);
        return None;
    }
    Some(return_exit(kernel, entry, arm64_exit::AARCH32, syndrome))
}

/// Skips the instruction that has trapped.
fn skip(state: &VcpuState, syndrome: u64) {
    let (pc, psr) = aarch32::after(syndrome, state.pc.get(), state.pstate.get());
    state.pc.set(pc);
    state.pstate.set(psr);
}

/// Handles a read of an identification register. Returns whether it was one.
fn identify(state: &VcpuState, syndrome: u64) -> bool {
    let access = aarch32::coprocessor_access(syndrome, state.pstate.get());
    let [opc1, crn] = [access.register >> 11 & 7, access.register >> 7 & 15];
    let [crm, opc2] = [access.register >> 3 & 15, access.register & 7];
    let register = match (esr::class(syndrome), opc1, crn, crm) {
        (class::CP15, 0, 0, 1 | 2) => system_register(3, 0, 0, crm, opc2),
        (class::CP15, 0, 0, 3..=7) => system_register(3, 0, 0, 7, 7),
        // MVFR0 is register 7, MVFR1 is 6, MVFR2 is 5.
        (class::FLOATING_POINT_ID_32, 7, 5..=7, _) => system_register(3, 0, 0, 3, 7 - crn),
        _ => return false,
    };
    let value = access.is_read.then(|| features::value(register)).flatten();
    if let (Some(value), Some(general)) = (value, state.x.get(access.general)) {
        general.set(value);
    }
    value.is_some()
}

/// Handles an SGI. Returns whether it has delivered one.
fn send(kernel: &Kernel<Arm64>, entry: GuestEntry<'_>, syndrome: u64) -> bool {
    let state = entry.state;
    let WideAccess { register, general, is_read } =
        aarch32::wide_access(syndrome, state.pstate.get());
    if esr::class(syndrome) != class::CP15_WIDE || register != SGI1R || is_read {
        return false;
    }
    let [low, high] = general.map(|index| state.x.get(index).map_or(0, |value| value.get()));
    let value = low & 0xffff_ffff | high << 32;
    sgi::deliver_to_targets(kernel, (entry.vcpu, entry.vm), SoftwareInterrupt::decode(value))
}

//! Interrupts that a guest sends by software (SGIs), by writes to ICC_SGI1R_EL1. The kernel
//! delivers those whose targets ([`kernel_core::object::Vm::sgi_targets`]) are in `VcpuRun` and
//! have them enabled, by the words of their state pages; all others are exits to the VMM of the
//! sender.
//!
//! Pending SGIs of a vCPU are in kernel memory. They move to list registers before an entry.

use core::cell::Cell;

use abi::vcpu::SharedU64;
use abi::vcpu::arm64::{VcpuState, virq};
use hw_arm64::esr;
use hw_arm64::gic::{SGI1R, SoftwareInterrupt, bits};
use hw_arm64::registers::AFFINITY;
use kernel_core::Kernel;
use kernel_core::object::{Vcpu, Vm};

use super::{INSTRUCTION, virqs};
use crate::{Arm64, read_register};

/// SGIs of a vCPU that are pending and in no list register yet: a bit each.
pub type PendingSgis = Cell<u32>;

/// Decodes the guest's write to ICC_SGI1R_EL1; `None`: the exit has another cause.
#[inline(always)]
fn sent(state: &VcpuState, syndrome: u64) -> Option<SoftwareInterrupt> {
    let general = esr::written_to(SGI1R, syndrome)?;
    Some(SoftwareInterrupt::decode(state.x.get(general).map_or(0, SharedU64::get)))
}

/// Word ([`virq`]) of an SGI.
#[inline(always)]
fn word(state: &VcpuState, number: u32) -> u64 {
    let priorities = state.sgi_priorities[number as usize / 8 % 2].get();
    let priority = priorities >> (8 * (number % 8)) & virq::PRIORITY_MASK;
    priority << virq::PRIORITY_SHIFT | u64::from(number)
}

/// Delivers an SGI that the guest, whose registers are loaded, has sent to itself alone. Needs no
/// kernel lock. Returns `false` for any other exit, and if no list register is free.
#[inline(always)]
pub fn send_to_itself(state: &VcpuState, syndrome: u64) -> bool {
    let Some(interrupt) = sent(state, syndrome) else { return false };
    interrupt.is_for_sender_only(read_register!("vmpidr_el2") & AFFINITY)
        && state.sgi_enabled.get() >> interrupt.number & 1 != 0
        && virqs::place_word(word(state, interrupt.number), 0)
}

/// Handles a write to ICC_SGI1R_EL1 ([`deliver_to_targets`]), whose instruction is then skipped.
/// Returns whether it has done so.
#[inline(always)]
pub fn send(kernel: &Kernel<Arm64>, (vcpu, vm): (&Vcpu<Arm64>, &Vm<Arm64>), syndrome: u64) -> bool {
    let state = vcpu.arch.state();
    let Some(interrupt) = sent(state, syndrome) else { return false };
    let is_sent = deliver_to_targets(kernel, (vcpu, vm), interrupt);
    if is_sent {
        state.pc.add(INSTRUCTION);
    }
    is_sent
}

/// Delivers an SGI to its targets: all of them, or none and the VMM gets the exit. Returns whether
/// it has done so.
#[inline(always)]
pub fn deliver_to_targets(
    kernel: &Kernel<Arm64>,
    (vcpu, vm): (&Vcpu<Arm64>, &Vm<Arm64>),
    interrupt: SoftwareInterrupt,
) -> bool {
    let (own, targets) = (vcpu.arch.system.affinity(), &vm.sgi_targets);
    // The targets begin with affinity 0, and the sender is one of them.
    let sender = targets.get(own as usize).and_then(Cell::get);
    if sender != vcpu.handle.get() || !interrupt.to_others && interrupt.first != 0 {
        return false;
    }
    let addressed = if interrupt.to_others { !(1 << own) } else { interrupt.list };
    let targets = bits(addressed.into()).filter_map(|index| targets[index as usize].get());
    let vcpus = targets.filter_map(|target| kernel.memory.get(target));
    let bit = 1 << interrupt.number;
    let is_ready = |vcpu: &Vcpu<Arm64>| {
        vcpu.runner.get().is_some() && vcpu.arch.state().sgi_enabled.get() as u32 & bit != 0
    };
    let make_pending = |vcpu: &Vcpu<Arm64>| {
        let before = vcpu.arch.sgis.replace(vcpu.arch.sgis.get() | bit);
        if before & bit == 0 {
            kernel.vcpu_notify(vcpu);
        }
    };
    let mut last = None;
    for vcpu in vcpus.clone() {
        if !is_ready(vcpu) {
            return false;
        }
        last = Some(vcpu);
    }
    // Most have one target, which need not be looked up again.
    match last {
        Some(target) if addressed.is_power_of_two() => make_pending(target),
        _ => vcpus.for_each(make_pending),
    }
    true
}

/// Returns whether an SGI is pending that the guest has enabled.
pub fn is_pending(pending: &PendingSgis, state: &VcpuState) -> bool {
    pending.get() & state.sgi_enabled.get() as u32 != 0
}

/// Moves pending SGIs that the guest has enabled to list registers, before an entry.
#[inline(always)]
pub fn deliver(pending: &PendingSgis, state: &VcpuState) {
    if pending.get() != 0 {
        deliver_enabled(pending, state);
    }
}

fn deliver_enabled(pending: &PendingSgis, state: &VcpuState) {
    for number in bits(pending.get() & state.sgi_enabled.get() as u32) {
        if !virqs::place_word(word(state, number), 0) {
            return virqs::request_maintenance();
        }
        pending.set(pending.get() & !(1 << number));
    }
}

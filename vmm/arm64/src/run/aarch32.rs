//! Exits of 32-bit vCPUs. The host reports only instructions whose condition holds.

use hw_arm64::aarch32::{self, CoprocessorAccess, SGI1R, coprocessor_register, psr};
use hw_arm64::esr::{self, class};
use hw_arm64::gic::SoftwareInterrupt;
use hw_arm64::psci as numbers;
use vmm_vcpu::{Flow, MemoryFault};

use super::{INSTRUCTION, VcpuLoop, read_general, write_general};
use crate::exception::aarch32::{external_abort, undefined};
use crate::platform::{Arm64Platform, Unknown};
use crate::vcpu::{Arm64Vcpu, Exit};

/// ACTLR, ACTLR2.
const AUXILIARY: [u32; 2] = [coprocessor_register(0, 1, 0, 1), coprocessor_register(0, 1, 0, 3)];
/// DCISW, DCCSW, DCCISW: maintenance of caches by set and way.
const SET_WAY: [u32; 3] = [
    coprocessor_register(0, 7, 6, 2),
    coprocessor_register(0, 7, 10, 2),
    coprocessor_register(0, 7, 14, 2),
];

/// Exit for an abort of a 32-bit vCPU, so that accesses to devices have one path in the run loop;
/// `None`: it is no abort. `address` is its guest-physical address. Also returns the program
/// counter and the state that the vCPU gets: the loop skips four bytes, whatever the length of the
/// instruction. The upper half of the exit's syndrome is the state before.
pub fn memory_fault(syndrome: u64, address: u64, pc: u64, state: u64) -> Option<(Exit, u64, u64)> {
    let fetch = esr::class(syndrome) == class::INSTRUCTION_ABORT;
    if !fetch && esr::class(syndrome) != class::DATA_ABORT {
        return None;
    }
    let write = !fetch && syndrome & esr::WRITE != 0;
    let fault = MemoryFault { gpa: address, write, fetch, walk: syndrome & esr::WALK != 0 };
    let (next, after) = aarch32::after(syndrome, pc, state);
    let general = aarch32::general(state, esr::transferred(syndrome));
    let syndrome = esr::with_transferred(syndrome, general) & 0xffff_ffff | state << 32;
    Some((Exit::MemoryFault { fault, syndrome }, next.wrapping_sub(INSTRUCTION), after))
}

/// Makes the guest's kernel handle an access to nothing ([`memory_fault`]).
#[cold]
pub(super) fn abort(vcpu: &mut impl Arm64Vcpu, is_fetch: bool, syndrome: u64) {
    let next = vcpu.pc().wrapping_add(INSTRUCTION);
    vcpu.set_pc(next.wrapping_sub(esr::instruction_length(syndrome)));
    vcpu.set_state(syndrome >> 32);
    external_abort(vcpu, is_fetch, syndrome & esr::WRITE != 0);
}

/// Sets the registers of a vCPU that starts. The first one's are those of the protocol of Linux
/// (Documentation/arm/booting.rst), which the loader follows; others are started by PSCI.
pub(super) fn start(index: usize, entry: u64, argument: u64, vcpu: &mut impl Arm64Vcpu) {
    let thumb = if entry & 1 != 0 { psr::T } else { 0 };
    vcpu.set_state(psr::RESET | thumb);
    vcpu.set_pc(entry & !1);
    match index {
        0 => {
            // No number of a machine: the device tree describes it.
            vcpu.set_general(1, 0xffff_ffff);
            vcpu.set_general(2, argument);
        }
        _ => vcpu.set_general(0, argument),
    }
}

impl VcpuLoop {
    /// Handles an exit that is no abort.
    #[cold]
    pub(super) fn handle_32<V: Arm64Vcpu, P: Arm64Platform>(
        &mut self,
        syndrome: u64,
        vcpu: &mut V,
        bus: &mut P,
    ) -> Flow {
        match esr::class(syndrome) {
            class::HYPERVISOR_CALL_32 => return self.call_32(vcpu, bus),
            class::SECURE_CALL_32 => {
                skip(syndrome, vcpu);
                return self.call_32(vcpu, bus);
            }
            class::CP15_WIDE => self.wide_access(syndrome, vcpu, bus),
            class::CP15 => coprocessor(syndrome, vcpu, bus),
            // Debugging and tracing, Jazelle: registers read as zero and ignore writes.
            class::CP14 => ignore(syndrome, vcpu),
            class::CP14_WIDE => {
                let access = aarch32::wide_access(syndrome, vcpu.state());
                access.general.into_iter().for_each(|index| write_general(vcpu, index, 0));
                skip(syndrome, vcpu);
            }
            _ => {
                bus.unknown(Unknown::Exit(syndrome));
                undefined(vcpu);
            }
        }
        Ok(())
    }

    /// Call of firmware. Functions with 64-bit arguments do not exist for 32-bit callers (DEN
    /// 0028).
    fn call_32<V: Arm64Vcpu, P: Arm64Platform>(&mut self, vcpu: &mut V, bus: &mut P) -> Flow {
        if vcpu.general(0) & numbers::WIDE != 0 {
            vcpu.set_general(0, numbers::NOT_SUPPORTED as u64);
            return Ok(());
        }
        self.call(vcpu, bus)
    }

    /// Access to a 64-bit register of coprocessor 15: SGIs that the host has not delivered, and the
    /// physical counter, which is the same as the virtual one.
    fn wide_access<V: Arm64Vcpu, P: Arm64Platform>(
        &self,
        syndrome: u64,
        vcpu: &mut V,
        bus: &mut P,
    ) {
        let access = aarch32::wide_access(syndrome, vcpu.state());
        match access.register {
            SGI1R if !access.is_read => {
                let [low, high] = access.general.map(|index| read_general(vcpu, index));
                let value = low & 0xffff_ffff | high << 32;
                bus.send(self.index, SoftwareInterrupt::decode(value));
            }
            // There is one security state, and no interrupt of group 0.
            aarch32::ASGI1R | aarch32::SGI0R if !access.is_read => {}
            aarch32::CNTPCT | aarch32::CNTPCTSS if access.is_read => {
                let counter = bus.counter();
                let halves = [counter & 0xffff_ffff, counter >> 32];
                for (index, half) in access.general.into_iter().zip(halves) {
                    write_general(vcpu, index, half);
                }
            }
            (opc1, crm) => {
                bus.unknown(Unknown::Coprocessor(coprocessor_register(opc1, 0, crm, 0)));
                return undefined(vcpu);
            }
        }
        skip(syndrome, vcpu);
    }
}

/// Access to a register of coprocessor 15.
fn coprocessor<V: Arm64Vcpu, P: Arm64Platform>(syndrome: u64, vcpu: &mut V, bus: &mut P) {
    let access = aarch32::coprocessor_access(syndrome, vcpu.state());
    let CoprocessorAccess { register, is_read, .. } = access;
    if AUXILIARY.contains(&register) || SET_WAY.contains(&register) && !is_read {
        return ignore(syndrome, vcpu);
    }
    bus.unknown(Unknown::Coprocessor(register));
    undefined(vcpu);
}

/// Reads zero, or ignores a write.
fn ignore(syndrome: u64, vcpu: &mut impl Arm64Vcpu) {
    let access = aarch32::coprocessor_access(syndrome, vcpu.state());
    if access.is_read {
        write_general(vcpu, access.general, 0);
    }
    skip(syndrome, vcpu);
}

pub(super) fn skip(syndrome: u64, vcpu: &mut impl Arm64Vcpu) {
    let (pc, state) = aarch32::after(syndrome, vcpu.pc(), vcpu.state());
    vcpu.set_pc(pc);
    vcpu.set_state(state);
}

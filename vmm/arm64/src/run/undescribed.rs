//! Accesses to devices by instructions that their syndrome does not describe: the VMM reads the
//! instruction from guest memory, by the guest's own tables, and carries it out.
//!
//! Another vCPU may change instruction and tables meanwhile. So the access must have the direction
//! and the place in its page that the fault has.

use hw_arm64::esr::{self, MemoryAccess};
use hw_arm64::load_store::{LoadStore, decode};
use vmm_vcpu::MemoryFault;

use super::{extend, read_general, skip, write_general};
use crate::platform::Arm64Platform;
use crate::stage1::Stage1;
use crate::vcpu::{Arm64Vcpu, System};

/// Mask of the offset in a page.
const OFFSET: u64 = 0xfff;

/// Carries out the instruction of vCPU `cpu` that has accessed a device. Returns `false` if it is
/// none of those, or accesses more than one page; nothing has happened then.
#[cold]
pub fn access<V: Arm64Vcpu, P: Arm64Platform>(
    cpu: usize,
    fault: MemoryFault,
    syndrome: u64,
    (vcpu, bus): (&mut V, &mut P),
) -> bool {
    let is_cache_maintenance = syndrome & esr::CACHE_MAINTENANCE != 0;
    if esr::is_described(syndrome) || is_cache_maintenance || fault.fetch || fault.walk {
        return false;
    }
    let Some(instruction) = fetch(vcpu, bus).and_then(decode) else { return false };
    let LoadStore { size, registers, base, offset, change, .. } = instruction;
    let address = vcpu.general(base).wrapping_add_signed(offset);
    let length = registers.iter().flatten().count() as u64 * u64::from(size);
    let is_same = address & OFFSET == fault.gpa & OFFSET
        && (address & OFFSET) + length <= OFFSET + 1
        && instruction.is_write == fault.write;
    if !is_same {
        return false;
    }
    let changed = vcpu.general(base).wrapping_add_signed(change);
    for (register, at) in registers.into_iter().flatten().zip((fault.gpa..).step_by(size.into())) {
        if instruction.is_write {
            let value = read_general(vcpu, register);
            bus.mmio_write(cpu, at, size, value);
        } else {
            let value = bus.mmio_read(cpu, at, size);
            let LoadStore { is_signed, is_wide, is_write, .. } = instruction;
            let access = MemoryAccess { size, general: register, is_signed, is_wide, is_write };
            write_general(vcpu, register, extend(access, value));
        }
    }
    if change != 0 {
        vcpu.set_general(base, changed);
    }
    skip(vcpu);
    true
}

/// The instruction at the program counter, if it is in guest memory.
fn fetch<V: Arm64Vcpu, P: Arm64Platform>(vcpu: &mut V, bus: &P) -> Option<u32> {
    let registers = Stage1 {
        sctlr: vcpu.system(System::Sctlr),
        tcr: vcpu.system(System::Tcr),
        ttbr0: vcpu.system(System::Ttbr0),
        ttbr1: vcpu.system(System::Ttbr1),
    };
    let place = registers.translate(vcpu.pc(), |at| bus.memory().read(at).ok())?;
    bus.memory().read(place).ok()
}

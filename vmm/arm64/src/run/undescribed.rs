//! Accesses to devices by instructions that their syndrome does not describe: the VMM reads the
//! instruction from guest memory, by the guest's own tables, and replaces its access by one or two
//! that are described.
//!
//! Another vCPU may change instruction and tables meanwhile. So the access must have the direction
//! and the place in its page that the fault has.

use hw_arm64::aarch32::psr;
use hw_arm64::esr::{self, MemoryAccess};
use hw_arm64::load_store::{LoadStore, decode};
use vmm_vcpu::MemoryFault;

use super::INSTRUCTION;
use crate::platform::Arm64Platform;
use crate::stage1::Stage1;
use crate::vcpu::{Arm64Vcpu, System};

/// Mask of the offset in a page.
const OFFSET: u64 = 0xfff;

/// A fault, and the syndrome that describes its access.
pub type Described = (MemoryFault, u64);

/// Returns the described accesses of the instruction that has accessed a device, and changes its
/// address register. After each of them the caller skips an instruction, so the program counter is
/// set back for the second. `None`: the instruction is none of those, or accesses more than one
/// page; nothing has changed then.
pub fn parts<V: Arm64Vcpu, P: Arm64Platform>(
    fault: MemoryFault,
    syndrome: u64,
    vcpu: &mut V,
    bus: &P,
) -> Option<[Option<Described>; 2]> {
    // User mode may execute A32 and T32.
    let is_32_bit = vcpu.state() & psr::IS_32_BIT != 0;
    if esr::is_described(syndrome) || is_32_bit || fault.fetch || fault.walk {
        return None;
    }
    let instruction = decode(fetch(vcpu, bus)?)?;
    let LoadStore { size, registers: [first, second], base, offset, change, .. } = instruction;
    let (first, size) = (first?, u64::from(size));
    let address = vcpu.general(base).wrapping_add_signed(offset);
    let length = if second.is_some() { 2 * size } else { size };
    let is_same = address & OFFSET == fault.gpa & OFFSET
        && (address & OFFSET) + length <= OFFSET + 1
        && instruction.is_write == fault.write;
    if !is_same {
        return None;
    }
    let changed = vcpu.general(base).wrapping_add_signed(change);
    if change != 0 {
        // No register of the access is the address register then.
        vcpu.set_general(base, changed);
    }
    if second.is_some() {
        let before = vcpu.pc().wrapping_sub(INSTRUCTION);
        vcpu.set_pc(before);
    }
    let part = |general, gpa| {
        let LoadStore { size, is_signed, is_wide, is_write, .. } = instruction;
        let access = MemoryAccess { size, general, is_signed, is_wide, is_write };
        (MemoryFault { gpa, ..fault }, esr::describe(access))
    };
    Some([Some(part(first, fault.gpa)), second.map(|second| part(second, fault.gpa + size))])
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

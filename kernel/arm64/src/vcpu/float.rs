//! Registers of floating point and SIMD. The kernel and tasks use none, so those of the vCPU that
//! used them last stay in the CPU: they trap in every other guest, and then change hands.
//!
//! Guests have no SVE ([`super::features`]): its registers trap.

use core::arch::{asm, global_asm};
use core::mem::offset_of;

use abi::vcpu::arm64::VcpuState;
use hw_arm64::registers::{CPTR_WITH_VHE, CPTR_WITHOUT_VHE, FLOATING_POINT, NO_FLOATING_POINT};
use kernel_core::Kernel;
use kernel_core::object::Vcpu;

use super::GuestCpu;
use crate::{Arm64, alternative, io, read_register, write_register};

global_asm!(
    ".arch_extension fp",
    ".arch_extension simd",
    ".macro each_vector operation",
    ".irp tens, , 1, 2",
    ".irp ones, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9",
    "\\operation q\\tens\\ones, [x0], #16",
    ".endr",
    ".endr",
    "\\operation q30, [x0], #16",
    "\\operation q31, [x0], #16",
    ".endm",
    ".text",
    ".global save_vectors",
    "save_vectors:",
    "each_vector str",
    "mrs x1, fpcr",
    "mrs x2, fpsr",
    "stp x1, x2, [x0]",
    "ret",
    ".global load_vectors",
    "load_vectors:",
    "each_vector ldr",
    "ldp x1, x2, [x0]",
    "msr fpcr, x1",
    "msr fpsr, x2",
    "ret",
    ".arch_extension nosimd",
    ".arch_extension nofp",
);

unsafe extern "C" {
    /// Saves the registers of this CPU to a state page's `vectors` and `float_control`.
    ///
    /// # Safety
    /// The pointer is to a state page's `vectors`; floating point does not trap.
    fn save_vectors(to: *const [[abi::vcpu::SharedU64; 2]; 32]);
    /// Loads them.
    ///
    /// # Safety
    /// As [`save_vectors`].
    fn load_vectors(from: *const [[abi::vcpu::SharedU64; 2]; 32]);
}

const _: () = {
    // The assembly finds one after the other.
    assert!(offset_of!(VcpuState, float_control) == offset_of!(VcpuState, vectors) + 32 * 16);
};

/// Lets the guest that is entered next use the registers, if they are its own. Called before every
/// entry.
#[inline(always)]
pub fn permit(local: &GuestCpu, vcpu: &Vcpu<Arm64>) {
    if local.float_owner.get() == vcpu.handle.get() {
        set_permitted(true);
    }
}

/// Keeps tasks and other guests from the registers. Called after every exit.
#[inline(always)]
pub fn forbid() {
    set_permitted(false);
}

#[inline(always)]
fn set_permitted(is_permitted: bool) {
    const FORBIDDEN: u64 = CPTR_WITHOUT_VHE | NO_FLOATING_POINT;
    const PERMITTED: u64 = CPTR_WITH_VHE | FLOATING_POINT;
    // SAFETY: whether EL0 and EL1 have floating point, which the kernel does not use.
    unsafe {
        match is_permitted {
            true => asm!(
                alternative!("mov {0}, #{vhe}", "mov {0}, #{other}"), "msr cptr_el2, {0}",
                out(reg) _, vhe = const PERMITTED, other = const CPTR_WITHOUT_VHE,
                options(nostack)
            ),
            false => asm!(
                alternative!("mov {0}, #{vhe}", "mov {0}, #{other}"), "msr cptr_el2, {0}",
                out(reg) _, vhe = const CPTR_WITH_VHE, other = const FORBIDDEN,
                options(nostack)
            ),
        }
    }
}

/// Handles a guest's first use: its registers replace those in the CPU.
#[cold]
pub fn take_over(kernel: &Kernel<Arm64>, local: &GuestCpu, vcpu: &Vcpu<Arm64>) {
    set_permitted(true);
    io::instruction_barrier();
    let old = local.float_owner.get().and_then(|owner| kernel.memory.get(owner));
    // SAFETY: state pages of vCPUs that exist; floating point does not trap.
    unsafe {
        if let Some(old) = old {
            save_vectors(&raw const old.arch.state().vectors);
        }
        load_vectors(&raw const vcpu.arch.state().vectors);
    }
    local.float_owner.set(vcpu.handle.get());
    set_permitted(false);
    if let Some(old) = old {
        old.arch.system.set_has_float(false);
    }
    vcpu.arch.system.set_has_float(true);
}

/// FPEXC32_EL2 of this CPU, which has AArch32 at EL1.
#[cold]
pub fn fpexc() -> u64 {
    set_permitted(true);
    io::instruction_barrier();
    let value = read_register!("fpexc32_el2");
    set_permitted(false);
    value
}

/// Sets it. Outside guests floating point traps, this register, too.
#[cold]
pub fn set_fpexc(value: u64) {
    set_permitted(true);
    io::instruction_barrier();
    // SAFETY: it concerns guests alone; floating point does not trap.
    unsafe { write_register!("fpexc32_el2", value) };
    set_permitted(false);
}

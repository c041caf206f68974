//! Tables of stage 2 of guests.

use core::sync::atomic::Ordering;

use kernel_core::Kernel;
use kernel_core::object::{Space, Vcpu, Vm};
use kernel_core::table::Format;

use crate::format::Stage2;
use crate::{Arm64, alternative, boot, memory};

/// Returns whether the tables of stage 2 with which the vCPU was entered last still exist.
#[inline(always)]
pub fn are_current(vcpu: &Vcpu<Arm64>, vm: &Vm<Arm64>) -> bool {
    vcpu.arch.generation.get() == vm.space.generation.get() && !vm.space.dying.get()
}

/// Physical address of the VM's tables for 39 bits, if it has any: the first entry of the root,
/// since not every processor walks four levels at stage 2.
#[inline(always)]
pub fn root(kernel: &Kernel<Arm64>, space: &Space<Arm64>) -> Option<u64> {
    let first = kernel.memory.words(space.root)[0].load(Ordering::Relaxed);
    Stage2::is_present(first).then(|| Stage2::address(first))
}

/// Sets the tables of the guest that is entered next: those of its VM, or an empty one.
#[inline(always)]
pub fn set(physical: u64) {
    // SAFETY: they have no effect on the kernel, nor on tasks.
    unsafe {
        core::arch::asm!(
            alternative!("msr vttbr_el2, x9", "bl set_guest_tables"),
            in("x9") physical, out("x11") _, out("x30") _, options(nostack),
        );
    }
}

/// Physical address of a table without entries.
#[inline(always)]
pub fn none() -> u64 {
    memory::physical_of(&raw const boot::empty_table)
}

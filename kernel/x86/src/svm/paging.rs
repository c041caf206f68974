//! Memory virtualization of a vCPU on SVM: by the processor, by shadow tables, or by the VMM.

use abi::vcpu::x86::{VcpuState, group};
use hw_x86::vmcb::{ControlArea, Vmcb};
use kernel_core::Result;
use kernel_core::object::Translation;
use kernel_core::pool::{Account, Memory};

use super::exit;
use crate::guest_virtual::GuestVirtual;
use crate::shadow::Shadow;
use crate::shadow::control::ControlRegisters;

/// Memory virtualization.
#[derive(Clone)]
pub enum GuestPaging {
    /// Nested paging.
    Nested,
    /// By shadow tables.
    Shadow(Shadow),
    /// By the VMM.
    GuestVirtual(GuestVirtual),
}

impl GuestPaging {
    /// Creates its state, and configures the VMCB for it. Fails without quota.
    pub fn new(memory: &Memory, factory: Account, kind: Translation, vmcb: &Vmcb) -> Result<Self> {
        match kind {
            Translation::Nested => Ok(Self::Nested),
            Translation::Vtlb(pool) => Shadow::new(memory, factory, pool, vmcb).map(Self::Shadow),
            Translation::GuestVirtual => {
                GuestVirtual::new(memory, factory, vmcb).map(Self::GuestVirtual)
            }
        }
    }

    /// Frees its state.
    pub fn free(&self, memory: &Memory) {
        match self {
            Self::Nested => {}
            Self::Shadow(shadow) => shadow.free(memory),
            Self::GuestVirtual(space) => space.free(memory),
        }
    }

    /// The guest's own control registers, if the processor has others.
    #[inline(always)]
    pub fn control(&self) -> Option<&ControlRegisters> {
        match self {
            Self::Nested => None,
            Self::Shadow(shadow) => Some(shadow.control()),
            Self::GuestVirtual(space) => Some(space.control()),
        }
    }

    /// Returns address and information of the page fault that caused the exit, unless the processor
    /// translates by itself.
    pub fn fault(&self, reason: u64, control: &ControlArea) -> Option<(u64, u64)> {
        match self {
            Self::Nested => None,
            Self::Shadow(shadow) => Some(shadow.fault()),
            Self::GuestVirtual(_) => Some((control.exit_info2.get(), exit::info(reason, control))),
        }
    }

    /// Takes over what the VMM wrote to the state page: the groups `dirty`.
    pub fn take_groups(&self, vmcb: &Vmcb, state: &VcpuState, dirty: u64) {
        match self {
            Self::Shadow(shadow) => {
                if dirty & group::CONTROL != 0 {
                    shadow.take_control(vmcb);
                }
                if dirty & group::INVALIDATE != 0 {
                    shadow.invalidate(state.invalidate.get());
                }
            }
            Self::GuestVirtual(space) if dirty & group::CONTROL != 0 => space.take_control(vmcb),
            _ => {}
        }
    }
}

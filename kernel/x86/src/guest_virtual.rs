//! Guests on SVM without nested paging whose VMM walks their page tables (APM vol. 2 §15.25.1): the
//! tables of the VM's space, which is guest-virtual, translate. The VMM gets all page faults, and
//! the instructions that change or drop translations.
//!
//! # Invariants
//!
//! * The processor always pages, by the space's tables: in their format, or by a root of four
//!   pointers in the three-level format (PAE) while the guest is not in long mode.
//! * A pointer refers to a table of the space. The pointers are written before each entry, so they
//!   miss no table of a new mapping, and none refers to a table that was freed.

use core::sync::atomic::Ordering::Relaxed;

use abi::Status;
use hw_x86::vmcb::Vmcb;
use kernel_core::pool::{Account, Frame, Memory};
use kernel_core::table::Format;
use kernel_core::vtlb::ShadowFormat;

use crate::format::UserFormat;
use crate::shadow::control::{ControlRegisters, Mode, Registers, set_intercepts};

/// Pointers of the three-level format.
const POINTERS: usize = 4;

/// State of a vCPU in a guest-virtual space.
#[derive(Clone)]
pub struct GuestVirtual {
    /// The guest's own control registers.
    control: ControlRegisters,
    /// Root of the three-level format, below 4 GiB as all kernel memory is.
    root: Frame,
}

impl GuestVirtual {
    /// Allocates the root, and sets the intercepts.
    pub fn new(memory: &Memory, factory: Account, vmcb: &Vmcb) -> Result<Self, Status> {
        set_intercepts(&vmcb.control);
        let this =
            Self { control: ControlRegisters::default(), root: memory.alloc_raw(factory, 1)? };
        this.take_control(vmcb);
        Ok(this)
    }

    /// Frees it.
    pub fn free(&self, memory: &Memory) {
        memory.free_raw(self.root, 1);
    }

    /// Takes over the control registers that the VMM has written to the VMCB.
    pub fn take_control(&self, vmcb: &Vmcb) {
        self.control.set(vmcb, Registers::written(&vmcb.save));
    }

    /// The guest's own control registers.
    pub fn control(&self) -> &ControlRegisters {
        &self.control
    }

    /// Sets the VMCB's CR3 for the space's tables, whose root is the VMCB's `n_cr3`. Returns
    /// whether this holds for further entries.
    pub fn load(&self, memory: &Memory, Vmcb { control, save }: &Vmcb) -> bool {
        let table = control.n_cr3.get();
        let is_long = self.control.get(save).mode() == Mode::Long;
        save.cr3.set(if is_long { table } else { memory.physical(self.root) });
        let words = |table| memory.words(memory.frame_at(table));
        let first = words(table)[0].load(Relaxed);
        for (index, pointer) in memory.words(self.root)[..POINTERS].iter().enumerate() {
            let entry = UserFormat::is_present(first)
                .then(|| words(UserFormat::address(first))[index].load(Relaxed));
            pointer.store(entry.map_or(0, to_pointer), Relaxed);
        }
        is_long
    }
}

/// Returns the pointer for an entry of level 2, which may be a leaf: the three-level format has
/// none there.
fn to_pointer(entry: u64) -> u64 {
    let is_table = UserFormat::is_present(entry) && !UserFormat::is_leaf(entry, 2);
    if is_table { UserFormat::pointer(UserFormat::address(entry)) } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hw_x86::paging::entry;
    use kernel_core::table::Access;

    #[test]
    fn no_leaf_becomes_a_pointer() {
        let access =
            Access { write: true, execute: true, device: false, user: true, global: false };
        assert_eq!(to_pointer(UserFormat::table(0x7000)), 0x7000 | entry::PRESENT);
        assert_eq!(to_pointer(UserFormat::leaf(0x4000_0000, access, 2)), 0, "guest memory");
        assert_eq!(to_pointer(0), 0);
    }
}

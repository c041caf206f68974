//! Rights of a host mapping that a leaf of the guest's page tables allows.

use hw_walk::{Leaf, set_accessed};
use linux_raw_sys::general as linux;
use vmm_mem::GuestMemory;
use vmm_x86::walk::GuestTables;

use crate::mmu::ram::Ram;

/// Returns the rights of a host mapping.
pub fn rights(leaf: &Leaf) -> u32 {
    let mut rights = linux::PROT_READ;
    if leaf.writable && leaf.dirty {
        rights |= linux::PROT_WRITE;
    }
    if leaf.executable {
        rights |= linux::PROT_EXEC;
    }
    rights
}

/// Returns the rights that a host mapping of `linear` to this offset of guest memory may keep.
pub fn still_allows(
    leaf: &Leaf,
    (ram, memory): (&Ram, &GuestMemory),
    linear: u64,
    offset: u64,
) -> u32 {
    let address = leaf.address + (linear & (leaf.size - 1));
    let is_same = ram.offset(address).is_some_and(|(now, _)| now == offset);
    let valid = is_same && set_accessed(&GuestTables(memory), leaf.at, leaf.entry);
    if valid { rights(leaf) } else { 0 }
}

#[cfg(test)]
mod tests {
    use hw_x86::paging::entry;

    use super::*;
    use crate::mmu::testing::{DATA, READ, Rig, USER, WRITE};

    fn leaf_of(rig: &Rig) -> Leaf {
        hw_walk::leaf(&GuestTables(&rig.memory), rig.cpu.cr3, USER).unwrap()
    }

    #[test]
    fn only_a_dirty_page_is_writable() {
        let mut rig = Rig::new();
        rig.set(USER, 0x8000, DATA);
        assert_eq!(rights(&leaf_of(&rig)), READ | WRITE);
        rig.set(USER, 0x8000, DATA & !entry::DIRTY);
        assert_eq!(rights(&leaf_of(&rig)), READ);
    }

    #[test]
    fn a_mapping_keeps_its_rights_only_for_its_frame() {
        let mut rig = Rig::new();
        rig.set(USER, 0x8000, DATA);
        let found = leaf_of(&rig);
        let vm = rig.mmu().vm;
        assert_eq!(still_allows(&found, (&vm.ram, vm.memory), USER, 0x8000), READ | WRITE);
        assert_eq!(still_allows(&found, (&vm.ram, vm.memory), USER, 0x9000), 0);
    }
}

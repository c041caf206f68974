//! Walk of the guest's page tables to the leaf entry of an address.

use hw_x86::paging::entry;
use linux_raw_sys::general as linux;
use vmm_mem::GuestMemory;

use crate::mmu::ram::Ram;

/// Leaf entry of the guest's page tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaf {
    /// Guest-physical address.
    pub address: u64,
    /// Guest-physical address of the entry.
    pub at: u64,
    /// Value of the entry.
    pub entry: u64,
    /// Page size in bytes.
    pub size: u64,
    /// All levels permit writes.
    pub writable: bool,
    /// All levels permit fetches.
    pub executable: bool,
    /// All levels permit user mode.
    pub user: bool,
    /// The dirty bit is set.
    pub dirty: bool,
}

impl Leaf {
    /// Returns the rights of a host mapping.
    pub fn rights(&self) -> u32 {
        let mut rights = linux::PROT_READ;
        if self.writable && self.dirty {
            rights |= linux::PROT_WRITE;
        }
        if self.executable {
            rights |= linux::PROT_EXEC;
        }
        rights
    }

    /// Returns the rights that a host mapping of `linear` to this offset of guest memory may keep.
    pub fn still_allows(&self, ram: &Ram, memory: &GuestMemory, linear: u64, offset: u64) -> u32 {
        let address = self.address + (linear & (self.size - 1));
        let is_same = ram.offset(address).is_some_and(|(now, _)| now == offset);
        if is_same && access(memory, self.at, self.entry) { self.rights() } else { 0 }
    }
}

/// Sets the accessed bit of the entry at `at` if it still has this value; `false`: it has changed.
/// A CPU may set it for any page that it translates (APM vol. 2, 5.4.2).
pub fn access(memory: &GuestMemory, at: u64, value: u64) -> bool {
    value & entry::ACCESSED != 0
        || memory
            .compare_exchange(at, value, value | entry::ACCESSED)
            .is_ok_and(|exchanged| exchanged.is_ok())
}

/// Returns the leaf entry that maps `linear`.
pub fn leaf(memory: &GuestMemory, root: u64, linear: u64) -> Option<Leaf> {
    let mut value = root;
    let (mut writable, mut executable, mut user) = (true, true, true);
    for shift in [39, 30, 21, 12] {
        let at = value & entry::ADDRESS | (linear >> shift & 0x1ff) << 3;
        value = memory.read::<u64>(at).ok()?;
        if value & entry::PRESENT == 0 {
            return None;
        }
        writable &= value & entry::WRITE != 0;
        executable &= value & entry::NX == 0;
        user &= value & entry::USER != 0;
        if shift == 12 || shift != 39 && value & entry::LARGE != 0 {
            let size = 1 << shift;
            let address = value & entry::ADDRESS & !(size - 1);
            return Some(Leaf {
                address,
                at,
                entry: value,
                size,
                writable,
                executable,
                user,
                dirty: value & entry::DIRTY != 0,
            });
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mmu::ram::PAGE;
    use crate::mmu::testing::{CODE, DATA, EXEC, READ, Rig, USER, WRITE};

    #[test]
    fn rights_are_those_of_all_levels() {
        let mut rig = Rig::new();
        rig.set(USER, 0x8000, DATA);
        let root = rig.cpu.cr3;
        let found = leaf(&rig.memory, root, USER + 5).unwrap();
        assert_eq!((found.address, found.size, found.rights()), (0x8000, PAGE, READ | WRITE));
        // The level above takes the right to write, and the one above that user mode.
        for (level, bit) in [(21, entry::WRITE), (30, entry::USER)] {
            let at = rig.entry(USER, level);
            let value = rig.memory.read::<u64>(at).unwrap();
            rig.memory.write(at, value & !bit).unwrap();
        }
        let found = leaf(&rig.memory, root, USER).unwrap();
        assert_eq!((found.rights(), found.user), (READ, false));
    }

    #[test]
    fn a_clean_page_is_not_writable() {
        let mut rig = Rig::new();
        rig.set(USER, 0x8000, DATA & !entry::DIRTY);
        assert_eq!(leaf(&rig.memory, rig.cpu.cr3, USER).unwrap().rights(), READ);
    }

    #[test]
    fn large_pages_end_the_walk() {
        let mut rig = Rig::new();
        let at = rig.entry(USER, 21);
        rig.memory.write(at, 0x40_0000 | CODE | entry::LARGE).unwrap();
        let found = leaf(&rig.memory, rig.cpu.cr3, USER + 0x12_3456).unwrap();
        assert_eq!((found.address, found.size, found.rights()), (0x40_0000, 2 << 20, READ | EXEC));
    }

    #[test]
    fn absent_entries_and_tables_outside_of_memory_map_nothing() {
        let mut rig = Rig::new();
        assert_eq!(leaf(&rig.memory, rig.cpu.cr3, USER), None);
        let at = rig.entry(USER, 30);
        rig.memory.write(at, 0xf000_0000_u64 | DATA).unwrap();
        assert_eq!(leaf(&rig.memory, rig.cpu.cr3, USER), None);
    }

    #[test]
    fn the_accessed_bit_is_set_only_on_an_unchanged_entry() {
        let mut rig = Rig::new();
        let flags = DATA & !entry::ACCESSED;
        rig.set(USER, 0x8000, flags);
        let at = rig.entry(USER, 12);
        assert!(!access(&rig.memory, at, 0x9000 | flags));
        assert!(access(&rig.memory, at, 0x8000 | flags));
        assert_eq!(rig.memory.read::<u64>(at).unwrap(), 0x8000 | DATA);
        assert!(access(&rig.memory, at, 0x8000 | DATA));
    }

    #[test]
    fn a_mapping_keeps_its_rights_only_for_its_frame() {
        let mut rig = Rig::new();
        rig.set(USER, 0x8000, DATA);
        let found = leaf(&rig.memory, rig.cpu.cr3, USER).unwrap();
        let vm = rig.mmu().vm;
        assert_eq!(found.still_allows(&vm.ram, vm.memory, USER, 0x8000), READ | WRITE);
        assert_eq!(found.still_allows(&vm.ram, vm.memory, USER, 0x9000), 0);
    }
}

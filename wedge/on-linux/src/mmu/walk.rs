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

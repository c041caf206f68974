//! Look-up of a leaf of 4-level tables, without the checks of an access: for addresses that a CPU
//! has translated before.

use hw_x86::paging::entry;

use crate::PageTables;

/// Leaf of 4-level tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaf {
    /// Physical address of the page.
    pub address: u64,
    /// Physical address of the entry.
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

/// Returns the leaf that maps `linear` below `root`, a value of `CR3`. `None` if an entry on the way
/// is absent or outside of memory.
#[inline]
pub fn leaf(tables: &impl PageTables, root: u64, linear: u64) -> Option<Leaf> {
    let mut value = root;
    let (mut writable, mut executable, mut user) = (true, true, true);
    for shift in [39, 30, 21, 12] {
        let at = value & entry::ADDRESS | (linear >> shift & 0x1ff) << 3;
        value = tables.read(at, 8)?;
        if value & entry::PRESENT == 0 {
            return None;
        }
        writable &= value & entry::WRITE != 0;
        executable &= value & entry::NX == 0;
        user &= value & entry::USER != 0;
        if shift == 12 || shift != 39 && value & entry::LARGE != 0 {
            let size = 1 << shift;
            let address = value & entry::ADDRESS & !(size - 1);
            let dirty = value & entry::DIRTY != 0;
            return Some(Leaf {
                address,
                at,
                entry: value,
                size,
                writable,
                executable,
                user,
                dirty,
            });
        }
    }
    None
}

/// Sets the accessed bit of the entry at `at` if it still has this value; `false`: it has changed.
/// A CPU may set it for any page that it translates (APM vol. 2 §5.4.2).
pub fn set_accessed(tables: &impl PageTables, at: u64, value: u64) -> bool {
    value & entry::ACCESSED != 0 || tables.replace(at, 8, value, value | entry::ACCESSED)
}

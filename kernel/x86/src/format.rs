//! Long-mode page tables (APM vol. 2 §5.3): those of tasks and guest-physical spaces, and the kernel's own.

use hw_x86::paging::entry;
use kernel_core::table::{Access, Format};

use crate::features::features;

/// Long-mode tables. `LEAF` are bits of every leaf, `TABLE` those of every entry that points to a table.
pub struct LongMode<const LEAF: u64, const TABLE: u64>;

/// Tables of tasks and of guest-physical spaces. Nested tables use the same format and demand the user bit
/// (APM vol. 2 §15.25.5).
pub type UserFormat = LongMode<{ entry::USER }, { entry::USER }>;

/// Tables of the kernel's own half, the same in every address space.
pub type KernelFormat = LongMode<{ entry::GLOBAL }, 0>;

impl<const LEAF: u64, const TABLE: u64> Format for LongMode<LEAF, TABLE> {
    const ROOT_LEVEL: u32 = 3;

    fn max_leaf_level() -> u32 {
        if features().huge_pages { 2 } else { 1 }
    }

    fn leaf(physical: u64, access: Access, level: u32) -> u64 {
        // Accessed and dirty are set at once: nobody asks for them, and setting them costs a walk.
        let mut bits = entry::PRESENT | LEAF | entry::ACCESSED | entry::DIRTY;
        bits |= if access.write { entry::WRITE } else { 0 };
        bits |= if access.execute { 0 } else { entry::NX };
        bits |= if access.device { entry::UNCACHED } else { 0 };
        bits |= if level > 0 { entry::LARGE } else { 0 };
        physical | bits
    }

    fn table(physical: u64) -> u64 {
        physical | entry::PRESENT | TABLE | entry::WRITE | entry::ACCESSED
    }

    fn is_present(raw: u64) -> bool {
        raw & entry::PRESENT != 0
    }

    fn is_leaf(raw: u64, level: u32) -> bool {
        level == 0 || raw & entry::LARGE != 0
    }

    fn address(raw: u64) -> u64 {
        raw & entry::ADDRESS
    }
}

//! Long-mode page tables (APM vol. 2 §5.3) of tasks, VMs and the kernel.

use hw_x86::paging::entry;
use kernel_core::table::{Access, Format};
use kernel_core::vtlb::ShadowFormat;

use crate::features::features;

/// Long-mode page tables. `TABLE` is set in every entry that refers to a table.
pub struct LongMode<const TABLE: u64>;

/// Page tables of tasks and VMs. Nested tables use the same format and require the user bit (APM
/// vol. 2 §15.25.5).
pub type UserFormat = LongMode<{ entry::USER }>;

/// Page tables of the kernel half, which all address spaces share.
pub type KernelFormat = LongMode<0>;

impl<const TABLE: u64> Format for LongMode<TABLE> {
    const ROOT_LEVEL: u32 = 3;

    fn max_leaf_level() -> u32 {
        if features().huge_pages { 2 } else { 1 }
    }

    fn may_replace_table() -> bool {
        // APM vol. 2 §5.5: stale entries are used until they are invalidated, which is no error.
        true
    }

    fn leaf(physical: u64, access: Access, level: u32) -> u64 {
        // Accessed and dirty are preset: the kernel never reads them, and setting them later costs
        // a walk.
        let mut bits = entry::PRESENT | entry::ACCESSED | entry::DIRTY;
        bits |= if access.write { entry::WRITE } else { 0 };
        bits |= if access.execute { 0 } else { entry::NX };
        bits |= if access.device { entry::UNCACHED } else { 0 };
        bits |= if access.user { entry::USER } else { 0 };
        bits |= if access.global { entry::GLOBAL } else { 0 };
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

impl ShadowFormat for UserFormat {
    const MARKS: u64 = entry::ACCESSED | entry::DIRTY;
    const MEANING: u64 = entry::PRESENT
        | entry::WRITE
        | entry::USER
        | Self::MARKS
        | entry::LARGE
        | entry::GLOBAL
        | entry::ADDRESS
        | entry::NX;
    const FORBIDS: u64 = entry::NX;
    const WRITE: u64 = entry::WRITE;
    const DIRTY: u64 = entry::DIRTY;

    fn pointer(physical: u64) -> u64 {
        // The other bits are reserved (APM vol. 2, figure 5-9).
        physical | entry::PRESENT
    }
}

//! Translation tables of tasks and the kernel (stage 1), and of VMs (stage 2), with granules of
//! 4 KiB (Arm ARM, D8.3).

use hw_arm64::paging::{entry, stage1, stage2};
use hw_arm64::registers::mair;
use kernel_core::table::{Access, Format};

/// Stage 1, of tasks and of the kernel.
pub struct Stage1;

/// Stage 2, of VMs.
pub struct Stage2;

/// Level of the leaves of 1 GiB, the largest.
const MAX_LEAF_LEVEL: u32 = 2;

/// Attributes of every leaf: valid, a page or a block, accessed.
fn leaf(physical: u64, level: u32) -> u64 {
    let kind = if level == 0 { entry::TABLE } else { 0 };
    physical | entry::VALID | kind | entry::ACCESSED
}

macro_rules! common {
    () => {
        const ROOT_LEVEL: u32 = 3;

        fn max_leaf_level() -> u32 {
            MAX_LEAF_LEVEL
        }

        fn may_replace_table() -> bool {
            // Arm ARM, D8.17.1: break-before-make.
            false
        }

        fn table(physical: u64) -> u64 {
            physical | entry::VALID | entry::TABLE
        }

        fn is_present(raw: u64) -> bool {
            raw & entry::VALID != 0
        }

        fn is_leaf(raw: u64, level: u32) -> bool {
            level == 0 || raw & entry::TABLE == 0
        }

        fn address(raw: u64) -> u64 {
            raw & entry::ADDRESS
        }
    };
}

impl Format for Stage1 {
    common!();

    fn leaf(physical: u64, access: Access, level: u32) -> u64 {
        let mut bits = leaf(physical, level);
        bits |= match access.device {
            true => mair::DEVICE << stage1::TYPE_SHIFT,
            false => mair::NORMAL << stage1::TYPE_SHIFT | entry::INNER_SHAREABLE,
        };
        bits |= if access.write { 0 } else { stage1::READ_ONLY };
        bits |= if access.global { 0 } else { stage1::NOT_GLOBAL };
        // What EL0 may access, the kernel never executes, and the reverse.
        let (user, kernel) = (access.user && access.execute, !access.user && access.execute);
        bits |= if access.user { stage1::USER } else { 0 };
        bits |= if user { 0 } else { stage1::USER_NX };
        bits | if kernel { 0 } else { stage1::KERNEL_NX }
    }
}

impl Format for Stage2 {
    common!();

    fn leaf(physical: u64, access: Access, level: u32) -> u64 {
        let mut bits = leaf(physical, level) | stage2::READ;
        bits |= match access.device {
            true => stage2::DEVICE,
            false => stage2::NORMAL | entry::INNER_SHAREABLE,
        };
        bits |= if access.write { stage2::WRITE } else { 0 };
        bits | if access.execute { 0 } else { stage2::NX }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: Access =
        Access { write: true, execute: false, device: false, user: true, global: false };

    #[test]
    fn leaves_of_tasks() {
        let data = Stage1::leaf(0x4000_0000, DATA, 0);
        assert_eq!(data, 0x0060_0000_4000_0f43);
        let code = Stage1::leaf(0x4020_0000, Access { write: false, execute: true, ..DATA }, 1);
        assert_eq!(code, 0x0020_0000_4020_0fc1);
        assert!(Stage1::is_leaf(code, 1) && !Stage1::is_leaf(Stage1::table(0x1000), 1));
        assert_eq!(Stage1::address(code), 0x4020_0000);
    }

    #[test]
    fn leaves_of_the_kernel() {
        let code = Access { write: false, execute: true, device: false, user: false, global: true };
        assert_eq!(Stage1::leaf(0x1000, code, 0), 0x0040_0000_0000_1783);
        let device = Access { execute: false, write: true, device: true, ..code };
        assert_eq!(Stage1::leaf(0x900_0000, device, 0), 0x0060_0000_0900_0407);
    }

    #[test]
    fn leaves_of_vms() {
        assert_eq!(Stage2::leaf(0x1000, DATA, 0), 0x0040_0000_0000_17ff);
        let device = Access { device: true, ..DATA };
        assert_eq!(Stage2::leaf(0x1000, device, 0), 0x0040_0000_0000_14c7);
    }
}

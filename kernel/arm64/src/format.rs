//! Translation tables of tasks and the kernel (stage 1), and of VMs (stage 2), with granules of
//! 4 KiB (Arm ARM, D8.3). Without VHE tasks' tables are stage 2, too, and the kernel's are those of
//! a single privilege level.

use hw_arm64::paging::{entry, stage1, stage2};
use hw_arm64::registers::mair;
use kernel_core::table::{Access, Format};

#[cfg(target_os = "none")]
use crate::has_vhe;

/// Stage 1 with VHE, of tasks and of the kernel.
pub struct Stage1;

/// Stage 2, of VMs.
pub struct Stage2;

/// Stage 1 of the kernel.
pub struct KernelStage1;

/// Tables of tasks: [`Stage1`], or [`Stage2`] without VHE. They differ in their leaves.
pub struct TaskTables;

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

impl Format for KernelStage1 {
    common!();

    fn leaf(physical: u64, access: Access, level: u32) -> u64 {
        let bits = Stage1::leaf(physical, access, level);
        if has_vhe() { bits } else { for_one_level(bits) }
    }
}

/// The leaf of stage 1 where the kernel's exception level is the only one (D8.4.1.2): one bit
/// forbids execution, and the bit for EL0 is 1.
const fn for_one_level(bits: u64) -> u64 {
    let nx = if bits & stage1::KERNEL_NX != 0 { stage1::USER_NX } else { 0 };
    bits & !(stage1::KERNEL_NX | stage1::USER_NX) | stage1::USER | nx
}

impl Format for TaskTables {
    common!();

    fn leaf(physical: u64, access: Access, level: u32) -> u64 {
        match has_vhe() {
            true => Stage1::leaf(physical, access, level),
            false => Stage2::leaf(physical, access, level),
        }
    }
}

/// Returns whether the kernel would run with VHE.
#[cfg(not(any(test, target_os = "none")))]
pub const fn has_vhe() -> bool {
    true
}

#[cfg(test)]
pub use tests::has_vhe;

#[cfg(test)]
mod tests {
    use core::cell::{Cell, RefCell};
    use std::collections::BTreeMap;

    use abi::Status;
    use kernel_core::table::{self, Tables};

    use super::*;

    std::thread_local! {
        static HAS_VHE: Cell<bool> = const { Cell::new(true) };
    }

    /// Returns what a test has set.
    pub fn has_vhe() -> bool {
        HAS_VHE.get()
    }

    /// Tables without VHE. Every store is recorded, and must take the pages of `watched` from one
    /// state to another one at once.
    struct Recorder {
        tables: RefCell<BTreeMap<u64, [u64; 512]>>,
        stores: RefCell<Vec<(u64, usize, u64)>>,
        watched: Cell<(u64, [Option<u64>; 2])>,
    }

    const ROOT: u64 = 0x10_0000;

    impl Recorder {
        fn new() -> Self {
            Self {
                tables: RefCell::new(BTreeMap::from([(ROOT, [0; 512])])),
                stores: RefCell::default(),
                watched: Cell::new((0, [None; 2])),
            }
        }

        /// Leaf of a page as the processor finds it: from the first entry of the root on, with
        /// three levels.
        fn walk(&self, page: u64) -> Option<u64> {
            let mut at = Some(self.read(ROOT, 0)).filter(|entry| entry & 3 == 3)?;
            for level in (0..3).rev() {
                at = self.read(at & entry::ADDRESS, (page >> (9 * level) & 511) as usize);
                match at & 3 {
                    3 if level > 0 => {}
                    1 if level > 0 => return Some(at),
                    3 => return Some(at),
                    _ => return None,
                }
            }
            None
        }

        fn watch(&self, page: u64, before: Option<u64>, after: Option<u64>) {
            assert_eq!(self.walk(page), before);
            self.watched.set((page, [before, after]));
        }
    }

    impl Tables for Recorder {
        fn read(&self, table: u64, index: usize) -> u64 {
            self.tables.borrow()[&table][index]
        }
        fn write(&self, table: u64, index: usize, entry: u64) {
            self.tables.borrow_mut().get_mut(&table).expect("a table")[index] = entry;
            self.stores.borrow_mut().push((table, index, entry));
            let (page, states) = self.watched.get();
            assert!(states.contains(&self.walk(page)), "page {page:#x} is neither old nor new");
        }
        fn alloc(&self) -> Result<u64, Status> {
            let new = ROOT + 0x1000 * self.tables.borrow().len() as u64;
            self.tables.borrow_mut().insert(new, [0; 512]);
            Ok(new)
        }
        fn free(&self, _table: u64) {}
    }

    #[test]
    fn stores_to_tables_of_tasks_without_vhe() {
        HAS_VHE.set(false);
        let tables = Recorder::new();
        let page = 0x20_0000_0000 >> 12;
        // Data: readable and writable, write-back, never executed.
        let data = Some(0x0040_0000_4000_07ff);
        tables.watch(page, None, data);
        table::map::<TaskTables>(&tables, ROOT, page, 0x4000_0000, 0, DATA).expect("tables");
        let [first, second, third] = [1, 2, 3].map(|index| ROOT + index * 0x1000);
        let expected = [
            (ROOT, 0, first | 3),
            (first, 128, second | 3),
            (second, 0, third | 3),
            (third, 0, 0x0040_0000_4000_07ff),
        ];
        assert_eq!(*tables.stores.borrow(), expected);
        assert_eq!(tables.walk(page), data);
        // Code in a block of 2 MiB: not writable.
        let code = Access { write: false, execute: true, ..DATA };
        let block = Some(0x0000_0000_4020_077d);
        tables.watch(page + 512, None, block);
        table::map::<TaskTables>(&tables, ROOT, page + 512, 0x4020_0000, 9, code).expect("tables");
        assert_eq!(tables.walk(page + 512), block);
        tables.watch(page, data, None);
        assert!(table::unmap::<TaskTables>(&tables, ROOT, page, 0).is_needed());
        assert_eq!(tables.stores.borrow().len(), 6);
        assert_eq!((tables.walk(page), tables.walk(page + 512)), (None, block));
        // A block does not take the place of the table before the flush.
        let (is_free, flush) = table::make_room::<TaskTables>(&tables, ROOT, page, 9, &mut || true);
        assert!(!is_free && flush.root() == Some(ROOT));
        assert_eq!(tables.walk(page), None);
        // With VHE the same mapping is stage 1.
        HAS_VHE.set(true);
        assert_eq!(TaskTables::leaf(0x4000_0000, DATA, 0), Stage1::leaf(0x4000_0000, DATA, 0));
    }

    #[test]
    fn leaves_of_the_kernel_without_vhe() {
        HAS_VHE.set(false);
        let code = Access { write: false, execute: true, device: false, user: false, global: true };
        assert_eq!(KernelStage1::leaf(0x1000, code, 0), 0x0000_0000_0000_17c3);
        let data = Access { write: true, execute: false, ..code };
        assert_eq!(KernelStage1::leaf(0x20_0000, data, 1), 0x0040_0000_0020_0741);
        HAS_VHE.set(true);
        assert_eq!(KernelStage1::leaf(0x1000, code, 0), Stage1::leaf(0x1000, code, 0));
    }

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

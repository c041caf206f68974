//! The kernel's page tables, built once at boot: the image, the direct map of physical memory, and
//! memory of each CPU. Invariant: no page is both writable and executable.

use core::cell::RefCell;
use core::marker::PhantomData;

use abi::Status;
use kernel_core::table::{Access, Format, Tables, map};

use crate::boot_memory::{BootMemory, FOUR_GIB};
use crate::ranges::Range;

/// Entries of a table.
const ENTRIES: usize = 512;

/// Access to constants.
pub const READ_ONLY: Access =
    Access { write: false, execute: false, device: false, user: false, global: true };
/// Access to data.
pub const READ_WRITE: Access = Access { write: true, ..READ_ONLY };
/// Access to code.
pub const CODE: Access = Access { execute: true, ..READ_ONLY };
/// Access to device registers.
pub const DEVICE: Access = Access { device: true, ..READ_WRITE };

/// The kernel's page tables under construction.
pub struct KernelTables<'a, F> {
    memory: RefCell<&'a mut BootMemory>,
    direct: fn(u64) -> *mut u8,
    root: u64,
    of: PhantomData<F>,
}

impl<F: Format> Tables for KernelTables<'_, F> {
    fn read(&self, table: u64, index: usize) -> u64 {
        assert!(index < ENTRIES);
        // SAFETY: a table that `alloc` returned, in the direct map; the index is inside it.
        unsafe { (self.direct)(table).cast::<u64>().add(index).read() }
    }

    fn write(&self, table: u64, index: usize, entry: u64) {
        assert!(index < ENTRIES);
        // SAFETY: as in `read`; the callers below pass correct entries.
        unsafe { (self.direct)(table).cast::<u64>().add(index).write_volatile(entry) }
    }

    fn alloc(&self) -> Result<u64, Status> {
        let page = zeroed_pages(&mut self.memory.borrow_mut(), self.direct, 1);
        page.ok_or(Status::NoQuota)
    }

    fn free(&self, _table: u64) {
        // Nothing is unmapped during construction, so no table is freed.
    }
}

/// Allocates zeroed pages below 4 GiB, which the start-up tables map, too.
fn zeroed_pages(memory: &mut BootMemory, direct: fn(u64) -> *mut u8, pages: u64) -> Option<u64> {
    let length = pages * abi::PAGE_SIZE;
    let base = memory.allocate(length, abi::PAGE_SIZE, FOUR_GIB)?;
    // SAFETY: free RAM until now, in the direct map.
    unsafe { direct(base).write_bytes(0, length as usize) };
    Some(base)
}

impl<'a, F: Format> KernelTables<'a, F> {
    /// Empty tables in `memory`; `None`: there is too little. `direct`: virtual address of a
    /// physical one.
    ///
    /// # Safety
    /// RAM below 4 GiB that `memory` allocates can be read and written at its address by `direct`.
    pub unsafe fn new(memory: &'a mut BootMemory, direct: fn(u64) -> *mut u8) -> Option<Self> {
        let root = zeroed_pages(memory, direct, 1)?;
        Some(Self { memory: RefCell::new(memory), direct, root, of: PhantomData })
    }

    /// Maps a page-aligned range with the largest leaves that its alignment allows.
    pub fn map_range(&self, address: u64, range: Range, access: Access) -> Result<(), Status> {
        let mut base = range.base;
        while base < range.end {
            let virtual_address = address + (base - range.base);
            let aligned = (base | virtual_address | 1 << 63).trailing_zeros();
            let order = aligned.min((range.end - base).ilog2()) - abi::PAGE_SHIFT;
            // The range is unmapped.
            map::<F>(
                self,
                self.root,
                (virtual_address & 0xffff_ffff_ffff) >> abi::PAGE_SHIFT,
                base,
                order as u8,
                access,
            )?;
            base += abi::PAGE_SIZE << order;
        }
        Ok(())
    }

    /// Maps `pages` new zeroed pages, readable and writable.
    pub fn map_new(&self, address: u64, pages: u64) -> Result<(), Status> {
        for page in 0..pages {
            let base = self.alloc()?;
            let range = Range::sized(base, abi::PAGE_SIZE);
            self.map_range(address + page * abi::PAGE_SIZE, range, READ_WRITE)?;
        }
        Ok(())
    }

    /// Maps all RAM, and the rest below 4 GiB as device memory.
    pub fn map_physical(&self) -> Result<(), Status> {
        let (ram, holes) = {
            let memory = self.memory.borrow();
            (memory.ram.clone(), memory.holes())
        };
        for &range in ram.as_slice() {
            self.map_range((self.direct)(range.base) as u64, range, READ_WRITE)?;
        }
        for &range in holes.as_slice() {
            self.map_range((self.direct)(range.base) as u64, range, DEVICE)?;
        }
        Ok(())
    }

    /// Maps the sections of the image, each with the access that it needs. `offset`: their virtual
    /// addresses minus the physical ones.
    pub fn map_image(&self, image: &ImageLayout, offset: u64) -> Result<(), Status> {
        for (range, access) in
            [(image.code, CODE), (image.constants, READ_ONLY), (image.data, READ_WRITE)]
        {
            let physical =
                Range::new(range.base.wrapping_sub(offset), range.end.wrapping_sub(offset));
            self.map_range(range.base, physical, access)?;
        }
        Ok(())
    }

    /// Finishes the tables, and returns the physical address of their root.
    pub fn finish(self) -> u64 {
        self.root
    }
}

/// Sections of the image, page-aligned, by virtual address.
#[derive(Clone, Copy, Debug)]
pub struct ImageLayout {
    /// Physical address of the first byte.
    pub start: u64,
    /// Code.
    pub code: Range,
    /// Constants.
    pub constants: Range,
    /// Data, including zero-initialised data.
    pub data: Range,
}

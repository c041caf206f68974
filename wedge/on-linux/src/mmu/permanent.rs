//! Mappings of guest memory for the life of a process: for the wedge, the kernel's direct map, its
//! image, and with protection keys the vCPU's code copies.

use host_linux::sys::{Backing, Errno};
use linux_raw_sys::general as linux;
use proto::hosted::{Start, layout};
use vmm_mem::{GuestMemory, Window};
use wedge_x86::CLOSED;

use crate::isolation::pkeys;
use crate::mmu::guest_range;
use crate::mmu::ram::{FOUR_GIB, PAGE, Ram};

const DATA: u32 = linux::PROT_READ | linux::PROT_WRITE;

impl Ram {
    /// Maps all guest memory non-executable, except for the kernel image.
    pub fn map(&self) -> Result<(), Errno> {
        self.map_at(layout::WINDOW)?;
        self.map_at(layout::DIRECT)?;
        for base in [layout::DIRECT, layout::WINDOW] {
            pkeys::protect(base, self.low, DATA, CLOSED)?;
            pkeys::protect(base + FOUR_GIB, self.high, DATA, CLOSED)?;
        }
        Ok(())
    }

    /// Maps the kernel image executable, in guest processes.
    pub fn map_image(&self, start: &Start) -> Result<(), Errno> {
        self.open_image()?;
        let (image, length) = self.image_mapping();
        pkeys::protect(image, length, DATA, CLOSED)?;
        let code = start.code_end.next_multiple_of(PAGE) - start.code;
        pkeys::protect(start.code, code, DATA | linux::PROT_EXEC, CLOSED)
    }

    /// Maps all guest memory at an address.
    fn map_at(&self, base: u64) -> Result<(), Errno> {
        guest_range::map(base, self.low, DATA, Backing::Shared(layout::MEMORY_FD, 0))?;
        if self.high != 0 {
            let high = Backing::Shared(layout::MEMORY_FD, self.low);
            guest_range::map(base + FOUR_GIB, self.high, DATA, high)?;
        }
        Ok(())
    }

    /// Maps the kernel's permanent mappings: direct map and image.
    pub fn open(&self) -> Result<(), Errno> {
        self.map_at(layout::DIRECT)?;
        self.open_image()
    }

    fn open_image(&self) -> Result<(), Errno> {
        let (image, length) = self.image_mapping();
        let memory = Backing::Shared(layout::MEMORY_FD, self.image_start);
        guest_range::map(image, length, DATA | linux::PROT_EXEC, memory)
    }

    /// Unmaps the mappings of [`Self::open`].
    pub fn close(&self) -> Result<(), Errno> {
        let end = if self.high == 0 { self.low } else { FOUR_GIB + self.high };
        guest_range::unmap(layout::DIRECT, end)?;
        let (image, length) = self.image_mapping();
        guest_range::unmap(image, length)
    }

    /// Returns guest memory for the VMM library.
    pub fn memory(&self) -> Option<GuestMemory> {
        let window = |base, length| {
            let host = (layout::WINDOW + base) as *mut u8;
            Window { base, length, host }
        };
        let windows = [window(0, self.low), window(FOUR_GIB, self.high)];
        let used = if self.high == 0 { 1 } else { 2 };
        // SAFETY: `map` has mapped both in every process for its life, and no Rust object is there.
        unsafe { GuestMemory::new(&windows[..used]) }.ok()
    }
}

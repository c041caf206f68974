//! Guest memory and frames as the walks of a vTLB access them: by the direct map.
//!
//! The nested tables of the VM are read without the kernel lock, as a processor's page walker reads
//! them: entries are atomic words, and no table is reused before this CPU has answered the
//! shootdown that follows its removal.

use core::cell::Cell;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use hw_walk::PageTables;
use hw_x86::paging::{ENTRIES, entry};
use kernel_core::table::translate;
use kernel_core::vtlb::FrameAccess;

#[cfg(not(feature = "testing"))]
use crate::features::features;
use crate::format::UserFormat;
#[cfg(not(feature = "testing"))]
use crate::memory::direct;

/// Number of large pages that the cache of translations holds.
const CACHED: usize = 32;
/// Width of guest-physical addresses.
const GUEST_BITS: u32 = 48;

/// Page of guest memory in the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HostPage {
    /// Leaf of the nested tables.
    pub leaf: u64,
    /// Its level.
    pub level: u32,
    /// Physical address of the page.
    pub physical: u64,
}

impl HostPage {
    /// Returns whether the guest may write it.
    pub fn is_writable(self) -> bool {
        self.leaf & entry::WRITE != 0
    }

    /// Returns whether the guest may execute it.
    pub fn is_executable(self) -> bool {
        self.leaf & entry::NX == 0
    }

    /// Returns whether it is device memory.
    pub fn is_device(self) -> bool {
        self.leaf & entry::UNCACHED != 0
    }
}

/// Second-stage translation of a VM, by software. Zero: without nested tables.
pub struct GuestMemory {
    /// Physical address of the nested tables; 0: not known yet.
    root: Cell<u64>,
    /// Address bits that the processor does not have.
    reserved: Cell<u64>,
    /// Recently used large leaves: number of the 2 MiB plus 1, and their first page.
    large: [(Cell<u64>, Cell<HostPage>); CACHED],
}

/// Width of physical addresses.
#[cfg(not(feature = "testing"))]
pub fn physical_bits() -> u32 {
    features().physical_bits.min(52)
}

#[cfg(feature = "testing")]
pub use super::testing::{page, physical_bits, word};

/// Words of a page in the direct map.
#[cfg(not(feature = "testing"))]
fn page(physical: u64) -> &'static [AtomicU64; ENTRIES] {
    // SAFETY: callers pass frames of a vCPU's pool, nested tables, and RAM that nested tables map:
    // the direct map includes all of them, for ever. Others may write guest memory at any time:
    // only atomic words are accessed.
    unsafe { &*direct(physical & entry::ADDRESS).cast() }
}

/// Word in the direct map.
#[cfg(not(feature = "testing"))]
#[inline(always)]
fn word(physical: u64) -> &'static AtomicU64 {
    // SAFETY: as for `page`; the word is in the same page.
    unsafe { &*direct(physical & (entry::ADDRESS | 0xff8)).cast() }
}

impl GuestMemory {
    /// Returns whether these are the nested tables.
    pub fn has_root(&self, root: u64) -> bool {
        self.root.get() == root
    }

    /// Sets the nested tables, and forgets translations.
    pub fn set_root(&self, root: u64) {
        self.root.set(root);
        let bits = physical_bits();
        self.reserved.set(entry::ADDRESS >> bits << bits);
        self.large.iter().for_each(|(number, _)| number.set(0));
    }

    /// Translates a guest-physical address.
    #[inline(always)]
    pub fn translate(&self, address: u64) -> Option<HostPage> {
        const LARGE: u64 = 1 << 21;
        let number = address / LARGE;
        let (known, first) = &self.large[number as usize % CACHED];
        if known.get() != number + 1 {
            let found = self.walk(address)?;
            if found.level == 0 {
                return Some(found);
            }
            known.set(number + 1);
            first.set(HostPage { physical: found.physical & !(LARGE - 1), ..found });
        }
        let first = first.get();
        Some(HostPage { physical: first.physical + (address & (LARGE - 1) & !0xfff), ..first })
    }

    #[inline(never)]
    fn walk(&self, address: u64) -> Option<HostPage> {
        if address >> GUEST_BITS != 0 || self.root.get() == 0 {
            return None;
        }
        let read = |table, index: usize| page(table)[index].load(Relaxed);
        let (physical, leaf, level) =
            translate::<UserFormat>(read, self.root.get(), address >> 12)?;
        Some(HostPage { leaf, level, physical })
    }

    /// Page of RAM at a guest-physical address.
    #[inline(always)]
    fn table(&self, address: u64) -> Option<HostPage> {
        self.translate(address).filter(|found| !found.is_device())
    }
}

impl PageTables for GuestMemory {
    #[inline(always)]
    fn read(&self, at: u64, bytes: u64) -> Option<u64> {
        let word = word(self.table(at)?.physical | at & 0xfff).load(Relaxed);
        Some(if bytes == 8 { word } else { word >> (8 * (at & 4)) & 0xffff_ffff })
    }

    fn replace(&self, at: u64, bytes: u64, old: u64, new: u64) -> bool {
        // Marks of tables in read-only memory are lost, as in ROM.
        let found = self.table(at).filter(|found| found.is_writable() && bytes == 8);
        let Some(found) = found else { return true };
        let word = word(found.physical | at & 0xfff);
        word.compare_exchange(old, new, Relaxed, Relaxed).is_ok()
    }

    #[inline(always)]
    fn reserved(&self) -> u64 {
        self.reserved.get()
    }
}

impl FrameAccess for GuestMemory {
    fn guest_page(&self, guest: u64) -> u64 {
        self.table(guest).map_or(0, |found| found.physical)
    }

    #[inline(always)]
    fn words(&self, physical: u64) -> &[AtomicU64; ENTRIES] {
        page(physical)
    }

    #[inline(always)]
    fn word(&self, physical: u64) -> &AtomicU64 {
        word(physical)
    }
}

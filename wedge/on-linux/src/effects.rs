//! Effects of emulated instructions on the host: bases of `FS` and `GS`, flushes, and switches of
//! the address space.

use core::sync::atomic::Ordering::Relaxed;

use hw_x86::paging::entry;
use wedge_core::{Flush, Host};

use crate::compat;
use crate::guest_space::GuestSpace;
use crate::processes;
use crate::state::config;
use crate::state::process::process;
use crate::state::shared::{EVERYTHING, vcpu};

/// Effects of emulated instructions on the host.
pub struct HostEffects<'a> {
    /// Address space in this process.
    pub space: &'a mut GuestSpace,
}

impl Host for HostEffects<'_> {
    fn fs_base(&mut self) -> u64 {
        compat::fs_base()
    }

    fn set_fs_base(&mut self, base: u64) {
        compat::set_fs_base(base);
    }

    fn gs_base(&mut self) -> u64 {
        compat::gs_base()
    }

    fn set_gs_base(&mut self, base: u64) {
        compat::set_gs_base(base);
    }

    fn flush(&mut self, what: Flush) {
        match what {
            Flush::Page(linear) => self.space.mmu().flush_page(linear),
            Flush::PageOf { pcid, linear } => self.flush_space(pcid, Some(linear)),
            Flush::Space(pcid) => self.flush_space(pcid, None),
            Flush::Spaces | Flush::All => {
                for slot in &vcpu().slots {
                    slot.stale.store(true, Relaxed);
                }
                if what == Flush::All {
                    self.space.mmu().kernel_changed(EVERYTHING);
                }
                self.space.mmu().follow();
            }
        }
    }

    fn enter_space(&mut self, cr3: u64, keep: bool) {
        let pcid = (cr3 & 0xfff) as u16;
        let slot_index = config::slot_of(pcid);
        let slot = &vcpu().slots[slot_index];
        let known = slot.pcid.swap(pcid.into(), Relaxed) == u32::from(pcid);
        let is_same = slot_index == process().slot.load(Relaxed) as usize
            && slot.root.load(Relaxed) & entry::ADDRESS == cr3 & entry::ADDRESS;
        if !keep || !known {
            slot.stale.store(true, Relaxed);
        }
        slot.root.store(cr3, Relaxed);
        processes::switch_to_slot(self.space.process(), slot_index);
        // Reloading the same root continues the same address space: Linux has not reused its
        // tables.
        if !(known && (keep || is_same)) {
            self.space.user_process().replace();
        }
        self.space.mmu().follow();
    }
}

impl HostEffects<'_> {
    /// Drops user-mode mappings of an address space: one page, or all. An address space that is not
    /// active drops all of them later.
    fn flush_space(&mut self, pcid: u16, linear: Option<u64>) {
        let slot_index = config::slot_of(pcid);
        let slot = &vcpu().slots[slot_index];
        if slot.pcid.load(Relaxed) != u32::from(pcid) {
            return;
        }
        match linear {
            Some(linear) if slot_index == process().slot.load(Relaxed) as usize => {
                self.space.mmu().drop_page(linear);
            }
            _ => {
                slot.stale.store(true, Relaxed);
                self.space.mmu().follow();
            }
        }
    }
}

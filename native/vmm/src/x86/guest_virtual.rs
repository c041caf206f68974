//! Guest-virtual address space of a vCPU (rung `user` of a vTLB): the VMM walks the guest's page
//! tables at a page fault and maps the page, and removes mappings where the guest drops
//! translations.
//!
//! The space has the rules of a TLB: it holds no more than the guest's tables held when the page
//! was mapped, and a flush by the guest removes it. The kernel limits the rights to those of the
//! VMM.

use abi::vcpu::x86::{VcpuState, vtlb_counter};
use abi::{Status, rights};
use heapless::Vec;
use hw_walk::{Intent, PageTables, Paging, Rights};
use hw_x86::msr::efer;
use hw_x86::paging::{cr0, entry};
use native_rt::Vm;
use vmm_mem::GuestMemory;
use vmm_vcpu::MemoryFault;
use vmm_x86::Reg;
use vmm_x86::exit::Exit;
use vmm_x86::walk::GuestTables;

use crate::space::{MAX_ORDER, Page, SPACE};

/// `log2` of the bytes of an area: the largest range of an unmapping.
const AREA_SHIFT: u32 = abi::PAGE_SHIFT + abi::Item::MAX_ORDER as u32;
/// Areas with mappings that are remembered; with more, all mappings are removed.
const AREAS: usize = 16;
/// Bits of a guest-virtual address that count.
const ADDRESS: u64 = (1 << 48) - 1;

/// Page tables of the guest, on this processor.
struct Tables<'a> {
    inner: GuestTables<'a>,
    /// Address bits that the processor does not have.
    reserved: u64,
}

impl PageTables for Tables<'_> {
    fn read(&self, at: u64, bytes: u64) -> Option<u64> {
        self.inner.read(at, bytes)
    }

    fn replace(&self, at: u64, bytes: u64, old: u64, new: u64) -> bool {
        self.inner.replace(at, bytes, old, new)
    }

    fn reserved(&self) -> u64 {
        self.reserved
    }
}

/// Space of a vCPU.
pub struct GuestVirtual<'a> {
    vm: Vm,
    tables: Tables<'a>,
    /// Areas with mappings.
    areas: Vec<Area, AREAS>,
    /// See [`vtlb_counter`].
    counters: [u64; vtlb_counter::COUNT],
}

/// Part of the space with mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Area {
    number: u64,
    /// Order of the largest guest page that is mapped in parts: `INVLPG` drops all of them.
    split: u8,
}

impl<'a> GuestVirtual<'a> {
    /// Wraps an empty space of a guest with this memory, on a processor whose physical addresses
    /// have this width.
    pub const fn new(vm: Vm, memory: &'a GuestMemory, physical_bits: u32) -> Self {
        let reserved = entry::ADDRESS >> physical_bits << physical_bits;
        let tables = Tables { inner: GuestTables(memory), reserved };
        Self { vm, tables, areas: Vec::new(), counters: [0; vtlb_counter::COUNT] }
    }

    /// Counters of the space.
    pub fn counters(&self) -> [u64; vtlb_counter::COUNT] {
        self.counters
    }

    /// Handles a page fault, which the state page describes. Returns the exit for the run loop.
    pub fn page_fault(&mut self, state: &VcpuState) -> Exit {
        let code = state.run.exit_info.get() >> 32;
        let address = state.run.fault_address.get();
        let paging = Paging {
            cr0: state.cr0.get(),
            cr3: state.cr3.get(),
            cr4: state.cr4.get(),
            efer: state.efer.get(),
            rflags: state.rflags.get(),
            user: state.cpl.get() == 3,
        };
        let (paging, intent) = paging.of_fault(code);
        let found = match paging.translate(&self.tables, address, intent, true) {
            Ok(found) => found,
            Err(fault) => {
                self.counters[vtlb_counter::FAULTS] += 1;
                return Exit::PageFault { address, code: fault.code };
            }
        };
        // If another vCPU changes the entry all the time, the guest repeats the access.
        let filled = if found.is_marked() {
            let page = page(&paging, intent, address, &found);
            let guest_order = (found.page_shift - abi::PAGE_SHIFT) as u8;
            self.fill(&page, guest_order)
        } else {
            Ok(true)
        };
        match filled {
            // The next entry might lose the shadow: the run loop executes an instruction in it.
            Ok(true) if state.interrupt_shadow.get() != 0 => Exit::Recall { events: 0 },
            Ok(true) => Exit::Spurious,
            Ok(false) => Exit::MemoryFault(MemoryFault {
                gpa: found.address,
                write: intent == Intent::Write,
                fetch: intent == Intent::Fetch,
                walk: false,
            }),
            Err(status) => Exit::HostError(status as u64),
        }
    }

    /// Maps a page of a guest page of `2^guest_order` pages; `false`: it is no memory.
    fn fill(&mut self, page: &Page, guest_order: u8) -> Result<bool, Status> {
        let number = (page.linear & ADDRESS) >> AREA_SHIFT;
        self.enter(number)?;
        let filled = match SPACE.fill(self.vm, page) {
            // The guest has touched more than fits: start again.
            Err(Status::NoQuota) => {
                self.counters[vtlb_counter::EVICTIONS] += 1;
                self.remove_all(true)?;
                self.enter(number)?;
                SPACE.fill(self.vm, page)?
            }
            filled => filled?,
        };
        let Some(order) = filled else { return Ok(false) };
        self.counters[vtlb_counter::FILLS] += 1;
        let area = self.areas.iter_mut().find(|area| area.number == number);
        if let Some(area) = area.filter(|_| order < guest_order) {
            area.split = area.split.max(guest_order);
        }
        Ok(true)
    }

    /// Remembers an area.
    fn enter(&mut self, number: u64) -> Result<(), Status> {
        if self.areas.iter().any(|area| area.number == number) {
            return Ok(());
        }
        if self.areas.is_full() {
            self.remove_all(false)?;
        }
        self.areas.push(Area { number, split: 0 }).map_err(|_| Status::Overflow)
    }

    fn remove_all(&mut self, free_tables: bool) -> Result<(), Status> {
        for area in &self.areas {
            self.vm.unmap_at(area.number << AREA_SHIFT, abi::Item::MAX_ORDER, free_tables)?;
        }
        self.areas.clear();
        Ok(())
    }

    /// Removes all mappings: the guest drops its translations.
    pub fn flush(&mut self) {
        self.counters[vtlb_counter::FLUSHES] += 1;
        // It fails only for a wrong selector or right, which the next run reports.
        let _ = self.remove_all(false);
    }

    /// The guest writes a control register.
    pub fn control_written(&mut self, register: Reg, old: u64, new: u64) {
        // Bits that all translations depend on.
        let role = match register {
            Reg::Cr0 => cr0::PG | cr0::WP,
            Reg::Efer => efer::LMA | efer::NXE,
            Reg::Cr3 | Reg::Cr4 => u64::MAX,
            _ => 0,
        };
        self.counters[vtlb_counter::LOADS] += u64::from(register == Reg::Cr3);
        if (old ^ new) & role != 0 {
            self.flush();
        }
    }

    /// Removes the mapping of an address, and all others of the same guest page (`INVLPG`).
    pub fn invalidate(&mut self, address: u64) {
        self.counters[vtlb_counter::INVALIDATIONS] += 1;
        let address = address & ADDRESS;
        let area = self.areas.iter().find(|area| area.number == address >> AREA_SHIFT);
        if let Some(Area { split, .. }) = area {
            let first = address & !((abi::PAGE_SIZE << split) - 1);
            // As above.
            let _ = self.vm.unmap_at(first, *split, false);
        }
    }
}

/// Returns the page to be mapped for an access.
fn page(paging: &Paging, intent: Intent, address: u64, found: &hw_walk::Translation) -> Page {
    let granted = paging.rights_of_copy(intent, &found.page());
    let right = |is_granted: bool, right: u8| if is_granted { right } else { 0 };
    // Without paging every block has one translation.
    let is_flat = found.entries().is_empty();
    let guest_order = (found.page_shift - abi::PAGE_SHIFT) as u8;
    Page {
        linear: address,
        physical: found.address,
        order: if is_flat { MAX_ORDER } else { guest_order },
        rights: rights::READ
            | right(granted.has(Rights::WRITE), rights::WRITE)
            | right(granted.has(Rights::EXECUTE), rights::EXECUTE)
            | right(granted.has(Rights::USER), rights::USER)
            | right(paging.is_global(&found.page()), rights::GLOBAL),
        needs: right(intent == Intent::Write, rights::WRITE)
            | right(intent == Intent::Fetch, rights::EXECUTE)
            | right(paging.user, rights::USER),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Page tables that are nowhere.
    struct Nowhere;

    impl PageTables for Nowhere {
        fn read(&self, _: u64, _: u64) -> Option<u64> {
            None
        }

        fn replace(&self, _: u64, _: u64, _: u64, _: u64) -> bool {
            false
        }
    }

    #[test]
    fn pages_have_what_the_access_needs() {
        const ALL: u8 = rights::READ | rights::WRITE | rights::EXECUTE | rights::USER;
        let flat = Paging::default();
        for (user, intent, needs) in [
            (false, Intent::Read, 0),
            (false, Intent::Write, rights::WRITE),
            (true, Intent::Fetch, rights::EXECUTE | rights::USER),
        ] {
            let paging = Paging { user, ..flat };
            let found = paging.translate(&Nowhere, 0x1_2345_6789, intent, true).unwrap();
            let page = page(&paging, intent, 0x1_2345_6789, &found);
            let expected =
                Page { linear: 0x1_2345_6789, physical: 0x2345_6789, order: 9, rights: ALL, needs };
            assert_eq!(page, expected, "{intent:?}");
        }
    }
}

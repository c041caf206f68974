//! Profiler of writes to page tables, descriptor tables and devices: counts them by instruction,
//! and reports whether the instruction has a patch site.
//!
//! With [`option::PROFILE`] every page found as a page table in a walk, and the pages of the
//! descriptor tables, are write-protected in all kernel mappings. A write faults, is counted by its
//! instruction, and is executed by a single step with the page writable. A page is watched while
//! the entry that led to it still refers to it; after that it is not a page table any more.
//!
//! Invariants: no event is delivered during a single step. All state is in shared memory used only
//! by the process that runs the vCPU, and each process applies the list of watched pages when it
//! takes over the vCPU.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

use hw_x86::paging::entry;
use linux_raw_sys::general as linux;
use proto::hosted::{layout, log, option};
use vmm_mem::GuestMemory;
use vmm_x86::walk::GuestTables;
use wedge_core::VirtualCpu;
use wedge_core::cpu::rflags;

use crate::mmu::guest_range;
use crate::mmu::ram::{PAGE, Ram};
use crate::report::{fatal, print_line};
use crate::state::config::config;
use crate::state::fixed::Fixed;
use crate::state::shared::Slot;

/// Number of guest-physical pages that can be watched: 4 GiB.
const PAGES: usize = 1 << 20;
/// Capacity of the list of watched pages.
const LIST: usize = 1 << 16;
/// Capacity of the table of instructions.
const PLACES: usize = 1 << 13;
/// Address of the profiler's tables, after the stubs.
const AT: u64 = layout::STUBS + layout::STUBS_LENGTH;

/// Kind of a watched page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Watched {
    /// A page table.
    PageTable,
    /// Part of a descriptor table or a task-state segment.
    Descriptors,
    /// Not a page, but a device.
    Device,
}

/// [`Tables::watched`]: roots of address spaces and descriptor tables are watched unconditionally.
const ROOT: u64 = 1;
const DESCRIPTORS: u64 = 2;

struct Instruction {
    rip: AtomicU64,
    /// Writes by [`Watched`].
    counts: [AtomicU64; 3],
    annotated: AtomicU64,
}

/// Tables of the profiler, in shared memory.
pub struct Tables {
    /// By page: 0, [`ROOT`], [`DESCRIPTORS`], or the address of the entry that refers to it.
    watched: [AtomicU64; PAGES],
    /// Length of the list.
    listed: AtomicU64,
    /// Page that is writable for one step, plus 1.
    stepping: AtomicU64,
    /// Entry of an inactive root that an instruction at `rip` without a patch site has written. No
    /// entry refers to a root, so only its contents show whether its page is still a table. 0:
    /// none.
    doubtful: AtomicU64,
    rip: AtomicU64,
    list: [AtomicU64; LIST],
    places: [Instruction; PLACES],
}

const _: () = assert!(AT + size_of::<Tables>() as u64 <= layout::SHARED + layout::VSOCK);

fn tables() -> &'static Tables {
    Tables::get()
}

// SAFETY: it is in shared memory, mapped for the life of the process and initially zero; all fields
// are atomic.
unsafe impl Fixed for Tables {
    const ADDRESS: u64 = AT;
}

/// Returns whether the profiler is enabled.
pub fn is_on() -> bool {
    crate::state::config::has(option::PROFILE)
}

/// Watches the page tables that translate `linear`.
pub fn watch_walk(memory: &GuestMemory, slot: &Slot, root: u64, linear: u64) {
    watch(slot, root & entry::ADDRESS, ROOT);
    let mut table = root & entry::ADDRESS;
    for shift in [39, 30, 21] {
        let at = table | (linear >> shift & 0x1ff) << 3;
        let Ok(value) = memory.read::<u64>(at) else { return };
        if value & entry::PRESENT == 0 || shift != 39 && value & entry::LARGE != 0 {
            return;
        }
        table = value & entry::ADDRESS;
        watch(slot, table, at);
    }
}

/// Watches the descriptor tables.
pub fn watch_descriptors(cpu: &VirtualCpu, memory: &GuestMemory, slot: &Slot) {
    for linear in [cpu.gdtr.base, cpu.idtr.base, cpu.tr.base] {
        let paging = cpu.paging(linear, false);
        if let Some(found) = hw_walk::leaf(&GuestTables(memory), paging.cr3, linear) {
            let address = found.address + (linear & (found.size - 1));
            watch(slot, address & !(PAGE - 1), DESCRIPTORS);
        }
    }
}

fn watch(slot: &Slot, address: u64, how: u64) {
    let tables = tables();
    let Some(watched) = tables.watched.get((address / PAGE) as usize) else { return };
    if watched.swap(how, Relaxed) != 0 {
        return;
    }
    let number = tables.listed.load(Relaxed);
    let Some(place) = tables.list.get(number as usize) else { return };
    place.store(address, Relaxed);
    tables.listed.store(number + 1, Relaxed);
    follow(slot);
}

/// Write-protects in this process the pages watched since it last ran the vCPU.
pub fn follow(slot: &Slot) {
    let tables = tables();
    let listed = tables.listed.load(Relaxed);
    for number in slot.protected.swap(listed, Relaxed)..listed {
        let address = tables.list[number as usize].load(Relaxed);
        if tables.watched[(address / PAGE) as usize].load(Relaxed) != 0 {
            protect(address, false);
        }
    }
}

fn protect(address: u64, writable: bool) {
    let write = if writable { linux::PROT_WRITE } else { 0 };
    let set = |linear: u64, rights: u32| {
        let result = guest_range::protect(linear, PAGE, rights);
        if let Err(error) = result {
            fatal(format_args!("cannot write-protect guest memory: {error}"));
        }
    };
    set(layout::DIRECT + address, linux::PROT_READ | write);
    if Ram::new(&config().start).image().contains(&address) {
        set(layout::IMAGE + address, linux::PROT_READ | linux::PROT_EXEC | write);
    }
}

/// Returns the guest-physical address of a kernel address that is always mapped.
fn physical(linear: u64) -> Option<u64> {
    if (layout::IMAGE..layout::IMAGE + layout::IMAGE_LENGTH).contains(&linear) {
        return Some(linear - layout::IMAGE);
    }
    (layout::DIRECT..layout::VMALLOC).contains(&linear).then(|| linear - layout::DIRECT)
}

/// Handles a write fault of the guest. `true`: it was caused by a watched page, and the guest
/// continues for one step.
pub fn write_fault(
    cpu: &mut VirtualCpu,
    memory: &GuestMemory,
    linear: u64,
    mut is_annotated: impl FnMut(&VirtualCpu) -> bool,
) -> bool {
    let tables = tables();
    let Some(address) = physical(linear).map(|address| address & !(PAGE - 1)) else { return false };
    let Some(watched) = tables.watched.get((address / PAGE) as usize) else { return false };
    let how = watched.load(Relaxed);
    let what = match how {
        DESCRIPTORS => Watched::Descriptors,
        _ => Watched::PageTable,
    };
    let leads_here = |at: u64| {
        memory
            .read::<u64>(at)
            .is_ok_and(|value| value & entry::PRESENT != 0 && value & entry::ADDRESS == address)
    };
    protect(address, true);
    let is_stale = how > DESCRIPTORS && !leads_here(how);
    if how == 0 || is_stale {
        watched.store(0, Relaxed);
        return true;
    }
    let rip = cpu.frame.rip;
    let is_doubtful = how == ROOT && cpu.cr3 & entry::ADDRESS != address && !is_annotated(cpu);
    if is_doubtful {
        tables.doubtful.store(address | linear & (PAGE - 8), Relaxed);
        tables.rip.store(rip, Relaxed);
    } else {
        count(rip, what, || is_annotated(cpu));
    }
    tables.stepping.store(address + 1, Relaxed);
    cpu.frame.rflags |= rflags::TF;
    true
}

/// Returns whether an instruction is single-stepped.
pub fn is_stepping() -> bool {
    tables().stepping.load(Relaxed) != 0
}

/// Ends the single step, after it completed or was interrupted.
pub fn stepped(cpu: &mut VirtualCpu, memory: &GuestMemory) {
    let tables = tables();
    let page = tables.stepping.swap(0, Relaxed);
    if page == 0 {
        return;
    }
    cpu.frame.rflags &= !rflags::TF;
    let (at, rip) = (tables.doubtful.swap(0, Relaxed), tables.rip.load(Relaxed));
    if at != 0 {
        let value = memory.read::<u64>(at).unwrap_or(0);
        if !leads_to_table(value, memory) {
            tables.watched[(at / PAGE) as usize].store(0, Relaxed);
            return;
        }
        count(rip, Watched::PageTable, || false);
    }
    protect(page - 1, false);
}

/// Returns whether a value is a root entry as kernels write them: present, writable, referring to a
/// table in memory, ignored bits 0.
fn leads_to_table(value: u64, memory: &GuestMemory) -> bool {
    const MUST: u64 = entry::PRESENT | entry::WRITE;
    const MAY: u64 = MUST | entry::USER | entry::ACCESSED | entry::DIRTY | entry::NX;
    value & MUST == MUST
        && value & !entry::ADDRESS & !MAY == 0
        && memory.read::<u64>(value & entry::ADDRESS).is_ok()
}

/// Counts an access by the instruction at `rip`; `is_annotated` is called once per instruction.
pub fn count(rip: u64, what: Watched, is_annotated: impl FnOnce() -> bool) {
    let tables = tables();
    let first = (rip ^ rip >> 13) as usize;
    for step in 0..PLACES {
        let place = &tables.places[(first + step) % PLACES];
        let known = place.rip.load(Relaxed);
        if known == 0 {
            place.rip.store(rip, Relaxed);
            place.annotated.store(is_annotated().into(), Relaxed);
            place.counts[what as usize].store(1, Relaxed);
            return;
        }
        if known == rip {
            place.counts[what as usize].fetch_add(1, Relaxed);
            return;
        }
    }
}

/// Prints a line for each instruction: address, patch site (0 or 1), writes to page tables and to
/// descriptor tables, and device accesses.
pub fn print() {
    if !is_on() {
        return;
    }
    for place in &tables().places {
        let rip = place.rip.load(Relaxed);
        if rip != 0 {
            let [page_tables, descriptors, devices] =
                [0, 1, 2].map(|what: usize| place.counts[what].load(Relaxed));
            let annotated = place.annotated.load(Relaxed);
            print_line(
                log::INFO,
                format_args!("profile {rip:#x} {annotated} {page_tables} {descriptors} {devices}"),
            );
        }
    }
}

//! Finds writes to page tables, descriptor tables and devices, and whether their instructions are annotated.
//!
//! With [`option::PROFILE`] each page that a walk meets as a page table, and the pages of the descriptor tables, are write-protected
//! wherever the kernel has them mapped. A write faults, is counted by its instruction, and is carried out by a single step with the page writable.
//! A page stays watched as long as the entry by which it was found still leads to it; what is written later is no page table any more.
//!
//! Invariants: while an instruction is stepped through, no event is delivered; everything here is shared memory that only the process with
//! the virtual CPU uses, and each process follows the list of watched pages when it gets it.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

use hw_x86::paging::entry;
use linux_raw_sys::general as linux;
use proto::wedge::{layout, log, option};
use vmm_mem::GuestMemory;
use wedge_core::VirtualCpu;
use wedge_core::cpu::rflags;

use crate::memory::PAGE;
use crate::report::{fatal, print_line};
use crate::shared::Slot;
use crate::sys;

/// Guest-physical pages that can be watched: 4 GiB.
const PAGES: usize = 1 << 20;
/// Pages ever watched.
const LIST: usize = 1 << 16;
/// Instructions that are counted.
const PLACES: usize = 1 << 13;
/// Behind the stubs.
const AT: u64 = layout::STUBS + layout::STUBS_LENGTH;

/// What a page is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Watched {
    /// A page table.
    PageTable,
    /// Part of a descriptor table or a task-state segment.
    Descriptors,
    /// No page at all but a device.
    Device,
}

/// [`Tables::watched`]: the page is watched whatever leads to it: the root of an address space, a descriptor table.
const ROOT: u64 = 1;
const DESCRIPTORS: u64 = 2;

struct Instruction {
    rip: AtomicU64,
    /// By [`Watched`].
    counts: [AtomicU64; 3],
    annotated: AtomicU64,
}

struct Tables {
    /// By page: 0, [`ROOT`], [`DESCRIPTORS`], or where the entry is that leads to it.
    watched: [AtomicU64; PAGES],
    /// Number of pages in the list.
    listed: AtomicU64,
    /// The page that is writable for one step, plus 1.
    stepping: AtomicU64,
    /// The entry of a root that is not loaded, written by an instruction that is not annotated, at `rip`: nothing leads to a root, so only
    /// what is in it then tells whether its page is a table still. 0: none.
    doubtful: AtomicU64,
    rip: AtomicU64,
    list: [AtomicU64; LIST],
    places: [Instruction; PLACES],
}

const _: () = assert!(AT + size_of::<Tables>() as u64 <= layout::SHARED + layout::VSOCK);

fn tables() -> &'static Tables {
    // SAFETY: in shared memory that is mapped as long as the process lives, zeroed in the beginning; all of it is atomic.
    unsafe { &*(AT as *const Tables) }
}

/// Whether anything is watched.
pub fn is_on() -> bool {
    crate::shared::has(option::PROFILE)
}

/// Watches the tables by which `linear` is translated.
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
        if let Some(found) = crate::memory::leaf(memory, paging.cr3, linear) {
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

/// Protects in this process what is watched since it had the virtual CPU.
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
        // SAFETY: guest memory in the guest's own part of the address space; the wedge's writes there go through this function first.
        let result =
            unsafe { sys::call(linux::__NR_mprotect, [linear, PAGE, rights.into(), 0, 0, 0]) };
        if let Err(error) = result {
            fatal(format_args!("cannot write-protect guest memory: {error}"));
        }
    };
    set(layout::DIRECT + address, linux::PROT_READ | write);
    if address < layout::IMAGE_LENGTH {
        set(layout::IMAGE + address, linux::PROT_READ | linux::PROT_EXEC | write);
    }
}

/// The guest-physical address of a kernel's linear address that is always mapped.
fn physical(linear: u64) -> Option<u64> {
    if (layout::IMAGE..layout::IMAGE + layout::IMAGE_LENGTH).contains(&linear) {
        return Some(linear - layout::IMAGE);
    }
    (layout::DIRECT..layout::VMALLOC).contains(&linear).then(|| linear - layout::DIRECT)
}

/// A write fault of the guest. `true`: it was because of a watched page; the guest goes on, for one step.
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

/// Whether an instruction is being stepped through.
pub fn is_stepping() -> bool {
    tables().stepping.load(Relaxed) != 0
}

/// The step is done, or something came between.
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

/// Whether this is an entry of a root as kernels write them: present, writable, of a table in memory, the ignored bits 0.
fn leads_to_table(value: u64, memory: &GuestMemory) -> bool {
    const MUST: u64 = entry::PRESENT | entry::WRITE;
    const MAY: u64 = MUST | entry::USER | entry::ACCESSED | entry::DIRTY | entry::NX;
    value & MUST == MUST
        && value & !entry::ADDRESS & !MAY == 0
        && memory.read::<u64>(value & entry::ADDRESS).is_ok()
}

/// Counts an access by the instruction at `rip`; whether that is annotated is asked once.
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

/// Prints what was counted, a line for each instruction: address as the kernel runs, whether it is annotated, writes to page tables, to
/// descriptor tables, accesses to devices.
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

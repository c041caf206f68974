//! Guest memory in the address space of a process: the host's page tables serve as the TLB of the
//! guest.
//!
//! All guest-physical memory (the kernel's direct map) and its beginning once more (the kernel
//! image) are always mapped. All other pages are mapped on demand. A flush of an address space
//! unmaps exactly the pages whose translation has changed, from the process's list of user-mode
//! mappings.
//!
//! Invariants: each mapping was in the guest's page tables at some time since its last flush, with
//! no more rights than they gave. Pages without accessed or dirty bit are not accessible in the way
//! that would set it. The rights of the direct map and the image are not restricted.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use hw_x86::paging::entry;
use linux_raw_sys::general as linux;
use proto::hosted::{Start, layout, option};
use vmm_cpu::walk::{Intent, PageFault};
use vmm_mem::{GuestMemory, Window};
use wedge_core::VirtualCpu;
use wedge_core::mapped::{Mapped, Piece};
use wedge_x86::CLOSED;

use crate::isolation::pkeys;
use crate::isolation::user_process;
use crate::linux::sys::{self, Backing};
use crate::mmu::exec_scan;
use crate::mmu::frames;
use crate::mmu::syscall_patch;
use crate::profile;
use crate::state::shared::{EVERYTHING, FLUSHES, Slot, count, counter, has, process, vcpu};

/// Page size in bytes.
pub const PAGE: u64 = 4096;
/// Capacity of the list of user-mode mappings.
pub const PIECES: usize = 1024;
/// Largest number of system calls by which a flush drops stale mappings individually, before it
/// drops all.
const CHANGES: usize = 24;
const LARGE: u64 = 2 << 20;
const FOUR_GIB: u64 = 1 << 32;

/// Layout of guest memory.
#[derive(Clone, Copy, Debug)]
pub struct Ram {
    low: u64,
    high: u64,
}

impl Ram {
    /// Creates the layout from the loader's record.
    pub fn new(start: &Start) -> Self {
        let low = start.memory.min(start.hole);
        Self { low, high: start.memory - low }
    }

    /// Returns its length in bytes.
    pub fn length(&self) -> u64 {
        self.low + self.high
    }

    /// Returns the offset of a guest-physical address in the file of guest memory, and the number
    /// of bytes that follow.
    pub fn offset(&self, address: u64) -> Option<(u64, u64)> {
        if address < self.low {
            return Some((address, self.low - address));
        }
        let above = address.checked_sub(FOUR_GIB)?;
        (above < self.high).then(|| (self.low + above, self.high - above))
    }

    /// Returns the guest-physical address of an offset in the file.
    pub fn address(&self, offset: u64) -> Option<u64> {
        match offset.checked_sub(self.low) {
            None => Some(offset),
            Some(above) => (above < self.high).then_some(FOUR_GIB + above),
        }
    }

    /// Maps all guest memory non-executable, except for the kernel image.
    pub fn map(&self) -> Result<(), sys::Errno> {
        self.map_at(layout::WINDOW)?;
        self.map_at(layout::DIRECT)?;
        let data = linux::PROT_READ | linux::PROT_WRITE;
        for base in [layout::DIRECT, layout::WINDOW] {
            pkeys::protect(base, self.low, data, CLOSED)?;
            pkeys::protect(base + FOUR_GIB, self.high, data, CLOSED)?;
        }
        Ok(())
    }

    /// Maps the kernel image executable, in guest processes.
    pub fn map_image(&self, start: &Start) -> Result<(), sys::Errno> {
        self.open_image()?;
        let data = linux::PROT_READ | linux::PROT_WRITE;
        pkeys::protect(layout::IMAGE, self.image(), data, CLOSED)?;
        let code = page_end(start.code_end) - start.code;
        pkeys::protect(start.code, code, data | linux::PROT_EXEC, CLOSED)
    }

    /// Maps all guest memory at an address.
    fn map_at(&self, base: u64) -> Result<(), sys::Errno> {
        let all = linux::PROT_READ | linux::PROT_WRITE;
        // SAFETY: the callers pass ranges reserved for the guest, without memory of this program.
        unsafe {
            sys::map(base, self.low, all, Backing::Shared(layout::MEMORY_FD, 0))?;
            if self.high != 0 {
                let high = Backing::Shared(layout::MEMORY_FD, self.low);
                sys::map(base + FOUR_GIB, self.high, all, high)?;
            }
        }
        Ok(())
    }

    /// Returns the length of the kernel image mapping in bytes.
    pub fn image(&self) -> u64 {
        self.low.min(layout::IMAGE_LENGTH)
    }

    /// Maps the kernel's permanent mappings: direct map and image.
    pub fn open(&self) -> Result<(), sys::Errno> {
        self.map_at(layout::DIRECT)?;
        self.open_image()
    }

    fn open_image(&self) -> Result<(), sys::Errno> {
        let rights = linux::PROT_READ | linux::PROT_WRITE | linux::PROT_EXEC;
        let image = Backing::Shared(layout::MEMORY_FD, 0);
        // SAFETY: the range is reserved for it.
        unsafe { sys::map(layout::IMAGE, self.image(), rights, image) }
    }

    /// Unmaps the mappings of [`Self::open`].
    pub fn close(&self) -> Result<(), sys::Errno> {
        let end = if self.high == 0 { self.low } else { FOUR_GIB + self.high };
        // SAFETY: only the guest uses these ranges, and it does not run.
        unsafe {
            sys::unmap(layout::DIRECT, end)?;
            sys::unmap(layout::IMAGE, self.image())
        }
    }

    /// Maps the code copies of a vCPU, with protection keys.
    pub fn map_copies(&self, index: usize) -> Result<(), sys::Errno> {
        if !pkeys::is_enabled() {
            return Ok(());
        }
        let all = linux::PROT_READ | linux::PROT_WRITE;
        let length = self.length();
        let copies = Backing::Shared(layout::MEMORY_FD, exec_scan::copies(length, index));
        // SAFETY: the range is reserved for them.
        unsafe { sys::map(layout::COPIES, length, all, copies) }?;
        pkeys::protect(layout::COPIES, length, all, CLOSED)
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

fn page_end(address: u64) -> u64 {
    address.next_multiple_of(PAGE)
}

/// Leaf entry of the guest's page tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaf {
    /// Guest-physical address.
    pub address: u64,
    /// Guest-physical address of the entry.
    at: u64,
    entry: u64,
    /// Page size in bytes.
    pub size: u64,
    /// All levels permit writes.
    pub writable: bool,
    /// All levels permit fetches.
    pub executable: bool,
    /// All levels permit user mode.
    user: bool,
    dirty: bool,
}

impl Leaf {
    /// Returns the rights of a host mapping.
    fn rights(&self) -> u32 {
        let mut rights = linux::PROT_READ;
        if self.writable && self.dirty {
            rights |= linux::PROT_WRITE;
        }
        if self.executable {
            rights |= linux::PROT_EXEC;
        }
        rights
    }

    /// Returns the rights that a host mapping of `linear` to this offset of guest memory may keep.
    fn still_allows(&self, ram: &Ram, memory: &GuestMemory, linear: u64, offset: u64) -> u32 {
        let address = self.address + (linear & (self.size - 1));
        let is_same = ram.offset(address).is_some_and(|(now, _)| now == offset);
        if is_same && access(memory, self.at, self.entry) { self.rights() } else { 0 }
    }
}

/// Sets the accessed bit of the entry at `at` if it still has this value; `false`: it has changed.
/// A CPU may set it for any page that it translates (APM vol. 2, 5.4.2).
fn access(memory: &GuestMemory, at: u64, value: u64) -> bool {
    value & entry::ACCESSED != 0
        || memory
            .compare_exchange(at, value, value | entry::ACCESSED)
            .is_ok_and(|exchanged| exchanged.is_ok())
}

/// Returns the leaf entry that maps `linear`.
pub fn leaf(memory: &GuestMemory, root: u64, linear: u64) -> Option<Leaf> {
    let mut value = root;
    let (mut writable, mut executable, mut user) = (true, true, true);
    for shift in [39, 30, 21, 12] {
        let at = value & entry::ADDRESS | (linear >> shift & 0x1ff) << 3;
        value = memory.read::<u64>(at).ok()?;
        if value & entry::PRESENT == 0 {
            return None;
        }
        writable &= value & entry::WRITE != 0;
        executable &= value & entry::NX == 0;
        user &= value & entry::USER != 0;
        if shift == 12 || shift != 39 && value & entry::LARGE != 0 {
            let size = 1 << shift;
            let address = value & entry::ADDRESS & !(size - 1);
            return Some(Leaf {
                address,
                at,
                entry: value,
                size,
                writable,
                executable,
                user,
                dirty: value & entry::DIRTY != 0,
            });
        }
    }
    None
}

/// Result of a page fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The guest's own page fault.
    Guest(PageFault),
    /// Access to a device at this guest-physical address.
    Device(u64),
    /// The page is mapped now.
    Filled,
    /// A page of code that must not be executed ([`exec_scan`]).
    Sequence,
    /// With protection keys: a write to a page of code that may contain the instruction itself.
    OwnCode,
    /// The host is out of memory or mappings.
    Full(sys::Errno),
}

/// Number of pages of a fault-around block, which is aligned: as many as the guest kernel maps at
/// once.
const AROUND: u64 = 256;
/// Number of pages of a fault-around block of copied code.
const CODE_AROUND: u64 = 16;

/// Maps the page for an access, and contiguous pages around it.
pub fn fill(
    cpu: &VirtualCpu,
    ram: &Ram,
    memory: &GuestMemory,
    linear: u64,
    intent: Intent,
) -> Fault {
    let paging = cpu.paging(linear, cpu.cpl == 3);
    let address = match paging.translate(memory, linear, intent, true) {
        Ok((address, _)) => address,
        Err(fault) => return Fault::Guest(fault),
    };
    if ram.offset(address).is_none() {
        return Fault::Device(address);
    }
    if profile::is_on() {
        profile::watch_walk(memory, slot(), paging.cr3, linear);
    }
    let Some(leaf) = leaf(memory, paging.cr3, linear) else { return Fault::Filled };
    let is_own =
        intent == Intent::Write && cpu.cpl == 3 && exec_scan::is_beside(cpu.frame.rip, linear);
    if is_own && is_code(linear, &leaf) {
        return Fault::OwnCode;
    }
    let is_alone = profile::is_on() || has(option::NO_BATCHES) || needs_look(&leaf);
    if leaf.size == PAGE && !is_alone {
        return fill_around(ram, memory, linear & !(PAGE - 1), &leaf, intent);
    }
    if let Some(fault) = fill_code(cpu, ram, memory, linear, intent, &leaf) {
        return fault;
    }
    let size = leaf.size.min(LARGE);
    let first = linear & !(size - 1);
    if leaf.executable && is_kernel(linear) && pkeys::is_enabled() {
        exec_scan::close_kernel(cpu, memory, first, first + size);
    }
    let base = leaf.address + (first & (leaf.size - 1));
    let whole = ram.offset(base).filter(|&(_, left)| left >= size);
    let (linear, offset, size) = match whole {
        Some((offset, _)) => (first, offset, size),
        // A large page that is not all memory.
        None => match ram.offset(address & !(PAGE - 1)) {
            Some((offset, _)) => (linear & !(PAGE - 1), offset, PAGE),
            None => return Fault::Device(address),
        },
    };
    if size > PAGE {
        slot().large.store(true, Relaxed);
    }
    let rights = rights_in_place(linear, &leaf);
    if rights & linux::PROT_WRITE != 0 && frames::write(offset, size) {
        // It is mapped once no copy remains.
        return Fault::Filled;
    }
    map(linear, size, rights, offset, leaf.user)
}

/// Returns whether a page must be scanned: executable, with protection keys.
fn needs_look(leaf: &Leaf) -> bool {
    leaf.executable && pkeys::is_enabled()
}

/// Returns whether a page is executable user code, with protection keys.
fn is_code(linear: u64, leaf: &Leaf) -> bool {
    leaf.executable && is_user(linear) && pkeys::is_enabled()
}

/// Returns the rights of a mapping of guest memory itself.
fn rights_in_place(linear: u64, leaf: &Leaf) -> u32 {
    let rights = leaf.rights();
    if is_code(linear, leaf) { rights & !linux::PROT_EXEC } else { rights }
}

/// With protection keys, maps executable pages from copies. A page that is also writable is mapped
/// in one way at a time. `None`: another kind of access, or a read by the kernel that must not wait
/// for a copy.
fn fill_code(
    cpu: &VirtualCpu,
    ram: &Ram,
    memory: &GuestMemory,
    linear: u64,
    intent: Intent,
    leaf: &Leaf,
) -> Option<Fault> {
    if !is_code(linear, leaf) || intent == Intent::Write {
        return None;
    }
    if leaf.writable && intent != Intent::Fetch {
        return None;
    }
    let page = linear & !(PAGE - 1);
    let (run, base, size) = if leaf.size == PAGE {
        let (before, after) = contiguous(ram, memory, page, leaf, CODE_AROUND)?;
        (page - before, leaf.address - before, before + PAGE + after)
    } else {
        // A part of a large page, which a flush drops as a whole.
        const PIECE: u64 = CODE_AROUND * PAGE;
        slot().large.store(true, Relaxed);
        let run = linear & !(PIECE - 1);
        (run, leaf.address + (run & (leaf.size - 1)), PIECE)
    };
    count(counter::FILLS);
    // If a page before it ends the run, map the page alone.
    for (start, length) in [(run, size), (page, PAGE)] {
        let address = base + (start - run);
        let (offset, left) = ram.offset(address)?;
        let length = length.min(left);
        if !frames::track(offset, length, cpu.cpl == 3) && intent != Intent::Fetch {
            return None;
        }
        match exec_scan::map(memory, start, length, address, offset) {
            Err(error) => return Some(Fault::Full(error)),
            Ok(end) if end > page => return Some(Fault::Filled),
            Ok(_) => {}
        }
    }
    (intent == Intent::Fetch).then_some(Fault::Sequence)
}

/// Maps a range of guest memory, given by its offset in the file.
fn map(linear: u64, size: u64, rights: u32, offset: u64, user: bool) -> Fault {
    count(counter::FILLS);
    syscall_patch::forget(linear, linear + size);
    exec_scan::forget(linear, linear + size);
    let end = linear + size;
    for attempt in 0..2 {
        // SAFETY: a range of the guest, without memory of this program.
        match unsafe { sys::map_now(linear, size, rights, layout::MEMORY_FD, offset) } {
            Ok(()) => break,
            // Too many mappings: drop all; they can be faulted in again.
            Err(_) if attempt == 0 => drop_all(),
            Err(error) => return Fault::Full(error),
        }
    }
    if is_user(linear) {
        mapped().add(Piece { start: linear, end, offset, rights });
        if user {
            user_process::map(linear, size, rights, offset);
        }
        return Fault::Filled;
    }
    match pkeys::protect(linear, size, rights, CLOSED) {
        Ok(()) => Fault::Filled,
        Err(error) => Fault::Full(error),
    }
}

/// Returns the list of user-mode mappings of this process.
pub fn mapped() -> &'static mut Mapped<PIECES> {
    // SAFETY: it is in the process's own memory, used by its only thread outside of signal
    // handlers. Each use ends before the next begins.
    unsafe { &mut *process().mapped.at() }
}

/// Maps a page and contiguous pages around it.
fn fill_around(ram: &Ram, memory: &GuestMemory, linear: u64, leaf: &Leaf, intent: Intent) -> Fault {
    let Some((offset, _)) = ram.offset(leaf.address) else { return Fault::Device(leaf.address) };
    if intent == Intent::Write && frames::write(offset, PAGE) {
        // It is mapped once no copy remains.
        return Fault::Filled;
    }
    let Some((before, after)) = contiguous(ram, memory, linear, leaf, AROUND) else {
        return Fault::Filled;
    };
    let (start, size) = (offset - before, before + PAGE + after);
    let rights = leaf.rights();
    if rights & linux::PROT_WRITE != 0 && frames::holds(start, size) {
        let is_held = frames::holds(offset, PAGE);
        let rights = if is_held { rights & !linux::PROT_WRITE } else { rights };
        return map(linear, PAGE, rights, offset, leaf.user);
    }
    map(linear - before, size, rights, start, leaf.user)
}

/// Drops the writable user-mode mappings of frames, given by their offset in guest memory.
pub fn drop_writable(offset: u64, length: u64) {
    drop_mapped(offset, length, linux::PROT_WRITE);
}

/// Drops the user-mode mappings of a range of the file of guest memory that have some of these
/// rights.
pub fn drop_mapped(offset: u64, length: u64, rights: u32) {
    if !mapped().is_complete() {
        drop_user_pages();
        return;
    }
    let end = offset + length;
    let is_wanted = |piece: &&Piece| {
        let last = piece.offset + (piece.end - piece.start);
        piece.rights & rights != 0 && piece.offset < end && offset < last
    };
    while let Some(piece) = mapped().pieces().iter().find(is_wanted).copied() {
        let at = |offset: u64| piece.start + (offset - piece.offset);
        let last = piece.offset + (piece.end - piece.start);
        unmap(at(offset.max(piece.offset)), at(end.min(last)));
    }
}

/// Returns the number of bytes before and after a page that are contiguous with it: in its block of
/// `around` pages, in guest memory, with the same rights, and not mapped yet. Sets their accessed
/// bits.
fn contiguous(
    ram: &Ram,
    memory: &GuestMemory,
    linear: u64,
    leaf: &Leaf,
    around: u64,
) -> Option<(u64, u64)> {
    /// Bits that must be equal in contiguous entries.
    const SAME: u64 = entry::PRESENT | entry::WRITE | entry::USER | entry::DIRTY | entry::NX;
    let index = linear / PAGE % around;
    let (offset, _) = ram.offset(leaf.address)?;
    let is_mapped = |page: u64, offset: u64| {
        let found = mapped().at(page);
        found.is_some_and(|piece| {
            piece.rights == leaf.rights() && piece.offset + (page - piece.start) == offset
        })
    };
    // `step` pages further; negative steps in two's complement. Other vCPUs may change the entries.
    let joins = |step: u64| {
        let at = leaf.at.wrapping_add(step.wrapping_mul(8));
        let expected = leaf.address.wrapping_add(step.wrapping_mul(PAGE));
        // Guest memory has a hole, its file has none.
        let wanted = offset.wrapping_add(step.wrapping_mul(PAGE));
        let page = linear.wrapping_add(step.wrapping_mul(PAGE));
        let in_piece = ram.offset(expected).is_some_and(|(offset, _)| offset == wanted);
        in_piece
            && memory.read::<u64>(at).is_ok_and(|value| {
                value & entry::ADDRESS == expected
                    && value & SAME == leaf.entry & SAME
                    && !syscall_patch::has_copy(page)
                    && !is_mapped(page, wanted)
                    && access(memory, at, value)
            })
    };
    let before = (1..=index).take_while(|&step| joins(step.wrapping_neg())).count() as u64;
    let after = (1..around - index).take_while(|&step| joins(step)).count() as u64;
    Some((before * PAGE, after * PAGE))
}

/// Returns whether an address may be mapped on demand: not permanently mapped, and not the wedge's.
pub fn is_filled_in(linear: u64) -> bool {
    is_user(linear) || is_kernel(linear)
}

/// Returns whether an address belongs to user mode.
pub fn is_user(linear: u64) -> bool {
    linear < layout::TASK_SIZE && !(layout::IMAGE..layout::LOW_END).contains(&linear)
}

fn is_kernel(linear: u64) -> bool {
    (layout::MODULES..layout::MODULES_END).contains(&linear)
        || (layout::FIXMAP..layout::LOW_END).contains(&linear)
        || (layout::VMALLOC..layout::GUEST_END).contains(&linear)
}

/// Returns the slot of this process.
pub fn slot() -> &'static Slot {
    &vcpu().slots[process().slot.load(Relaxed) as usize]
}

fn unmap(start: u64, end: u64) {
    syscall_patch::forget(start, end);
    mapped().remove(start, end);
    exec_scan::forget(start, end);
    // SAFETY: the callers pass ranges of the guest. It fails only without memory for splitting a
    // mapping.
    let result = unsafe { sys::unmap(start, end - start) };
    if let Err(error) = result {
        crate::report::fatal(format_args!("cannot unmap guest memory at {start:#x}: {error}"));
    }
    if is_user(start) {
        user_process::unmap(start, end);
    }
}

/// Drops all user-mode mappings of this process.
pub fn drop_user_pages() {
    // The host may refuse mappings of the first pages.
    unmap(0, layout::IMAGE);
    unmap(layout::LOW_END, layout::TASK_SIZE);
    mapped().clear();
    crate::signal::mark_stale();
    slot().large.store(false, Relaxed);
    slot().stale.store(false, Relaxed);
}

/// Drops user-mode mappings of this process.
pub fn drop_range(start: u64, end: u64) {
    if is_user(start) && is_user(end - 1) {
        unmap(start, end);
    }
}

/// With protection keys: permits the kernel to execute its image outside of its code segment, where
/// its page tables permit it, until the next flush.
pub fn fill_image(cpu: &VirtualCpu, memory: &GuestMemory, linear: u64) -> bool {
    if !pkeys::is_enabled()
        || !(layout::IMAGE..layout::IMAGE + layout::IMAGE_LENGTH).contains(&linear)
    {
        return false;
    }
    let page = linear & !(PAGE - 1);
    let root = cpu.paging(linear, false).cr3;
    if !leaf(memory, root, page).is_some_and(|leaf| leaf.executable) {
        return false;
    }
    exec_scan::close_kernel(cpu, memory, page, page + PAGE);
    process().image.store(true, Relaxed);
    let rights = linux::PROT_READ | linux::PROT_WRITE | linux::PROT_EXEC;
    pkeys::protect(page, PAGE, rights, CLOSED).is_ok()
}

fn drop_kernel() {
    if process().image.swap(false, Relaxed) {
        close_image();
    }
    unmap(layout::MODULES, layout::MODULES_END);
    unmap(layout::FIXMAP, layout::LOW_END);
    unmap(layout::VMALLOC, layout::GUEST_END);
}

/// Makes the kernel image non-executable outside of its code.
fn close_image() {
    let Some(start) = crate::state::shared::start() else { return };
    let image = Ram::new(&start).low.min(layout::IMAGE_LENGTH);
    let end = page_end(start.code_end);
    let rights = linux::PROT_READ | linux::PROT_WRITE;
    for (from, to) in [(layout::IMAGE, start.code), (end, layout::IMAGE + image)] {
        if let Err(error) = pkeys::protect(from, to - from, rights, CLOSED) {
            crate::report::fatal(format_args!("cannot protect the guest kernel's image: {error}"));
        }
    }
}

fn drop_all() {
    drop_user_pages();
    drop_kernel();
}

/// Drops a page of this process, with the large page that may contain it.
pub fn drop_page(linear: u64) {
    if !is_filled_in(linear) {
        return;
    }
    let size = if slot().large.load(Relaxed) { LARGE } else { PAGE };
    let start = linear & !(size - 1);
    if size == PAGE || !is_user(linear) || !drop_stale(start, start + size) {
        unmap(start, start + size);
    }
}

/// Change of mapped pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    Drop,
    /// Reduce the rights.
    Narrow(u32),
}

/// Drops the user-mode mappings between two addresses that the page tables do not contain any more,
/// and reduces rights. `false`: too many changes, or the list is incomplete.
fn drop_stale(start: u64, end: u64) -> bool {
    let Some(ram) = crate::state::shared::start().map(|start| Ram::new(&start)) else {
        return false;
    };
    let Some(memory) = ram.memory() else { return false };
    let mapped = mapped();
    if !mapped.is_complete() || has(option::NO_BATCHES) {
        return false;
    }
    let root = slot().root.load(Relaxed);
    let mut changes = [(0, 0, Change::Drop); CHANGES];
    let mut used: usize = 0;
    // The last page belongs to the last change: no page is kept in between.
    let mut continues = false;
    let first = mapped.pieces().partition_point(|piece| piece.end <= start);
    for piece in mapped.pieces()[first..].iter().take_while(|piece| piece.start < end) {
        let mut at = piece.start.max(start);
        let last = piece.end.min(end);
        while at < last {
            let leaf = leaf(&memory, root, at);
            let size = leaf.map_or(PAGE, |leaf| leaf.size);
            let offset = piece.offset + (at - piece.start);
            // A copy is of code, which user mode cannot write.
            let copied = exec_scan::original(&ram, offset);
            let unit = if copied.is_some() { PAGE } else { size };
            let next = last.min((at & !(unit - 1)) + unit);
            let wanted = leaf
                .map_or(0, |leaf| leaf.still_allows(&ram, &memory, at, copied.unwrap_or(offset)));
            let is_old = |leaf: Leaf| {
                let address = leaf.address + (at & (size - 1));
                // With protection keys all copies follow their frames.
                !pkeys::is_enabled()
                    && unit == PAGE
                    && syscall_patch::has_copy(at)
                    && !syscall_patch::is_current(at, address, &memory)
            };
            let change = match wanted & piece.rights {
                rights if rights & linux::PROT_READ == 0 || leaf.is_some_and(is_old) => {
                    Some(Change::Drop)
                }
                // Executable copies are all or nothing.
                rights if copied.is_some() && rights != piece.rights => Some(Change::Drop),
                rights if rights != piece.rights => Some(Change::Narrow(rights)),
                _ => None,
            };
            match (change, used.checked_sub(1).map(|index| &mut changes[index])) {
                (None, _) => continues = false,
                // No mappings lie between, except for the hole of the kernel image.
                (Some(Change::Drop), Some((from, to, Change::Drop)))
                    if continues && (*from < layout::IMAGE) == (at < layout::IMAGE) =>
                {
                    *to = next;
                }
                (Some(change), Some((_, to, before)))
                    if continues && *to == at && change == *before =>
                {
                    *to = next;
                }
                (Some(change), _) => {
                    let Some(place) = changes.get_mut(used) else { return false };
                    *place = (at, next, change);
                    used += 1;
                    continues = true;
                }
            }
            at = next;
        }
    }
    for &(start, end, change) in &changes[..used] {
        match change {
            Change::Drop => unmap(start, end),
            Change::Narrow(rights) => narrow(start, end, rights),
        }
    }
    true
}

/// Reduces the rights of pages that are mapped by one call, or parts of them.
fn narrow(start: u64, end: u64, rights: u32) {
    // SAFETY: the pages are user mode's; the rights are only reduced.
    if unsafe { sys::protect(start, end - start, rights) }.is_err() {
        unmap(start, end);
        return;
    }
    user_process::narrow(start, end, rights);
    let mapped = mapped();
    let mut at = start;
    while let Some(piece) = mapped.at(at).filter(|_| at < end) {
        let to = piece.end.min(end);
        let offset = piece.offset + (at - piece.start);
        mapped.add(Piece { start: at, end: to, offset, rights });
        at = to;
    }
}

/// Notifies all processes of this vCPU that the beginning or end of a code copy has changed: none
/// may execute it next to previously mapped neighbours.
pub fn copy_changed(offset: u64) {
    let vcpu = vcpu();
    let number = vcpu.renewals.load(Relaxed);
    vcpu.renewed[number as usize % FLUSHES].store(offset, Relaxed);
    vcpu.renewals.store(number + 1, Relaxed);
    follow_copies();
}

/// Drops in this process the copies that have changed since it last ran the vCPU.
fn follow_copies() {
    let (vcpu, slot) = (vcpu(), slot());
    let now = vcpu.renewals.load(Relaxed);
    let seen = slot.renewals.swap(now, Relaxed);
    if now != seen && (now - seen > FLUSHES as u64 || !mapped().is_complete()) {
        drop_user_pages();
        return;
    }
    for number in seen..now {
        let offset = vcpu.renewed[number as usize % FLUSHES].load(Relaxed);
        drop_mapped(offset, PAGE, linux::PROT_READ);
    }
}

/// Notifies all processes of this vCPU of a changed kernel mapping; [`EVERYTHING`]: of all kernel
/// mappings.
pub fn kernel_changed(linear: u64) {
    let vcpu = vcpu();
    let number = vcpu.changes.load(Relaxed);
    vcpu.changed[number as usize % FLUSHES].store(linear, Relaxed);
    vcpu.changes.store(number + 1, SeqCst);
    follow();
}

/// Returns whether an address belongs to the kernel, whose mappings are the same in all processes.
pub fn is_shared(linear: u64) -> bool {
    is_kernel(linear)
}

/// Applies to this process all changes since it last ran the vCPU.
pub fn follow() {
    let (vcpu, slot) = (vcpu(), slot());
    if profile::is_on() {
        profile::follow(slot);
    }
    let now = vcpu.changes.load(SeqCst);
    let seen = slot.followed.load(Relaxed);
    if now - seen > FLUSHES as u64 {
        drop_kernel();
    } else {
        for number in seen..now {
            match vcpu.changed[number as usize % FLUSHES].load(Relaxed) {
                EVERYTHING => drop_kernel(),
                linear => drop_page(linear),
            }
        }
    }
    slot.followed.store(now, Relaxed);
    follow_copies();
    if slot.stale.load(Relaxed) {
        count(counter::FLUSHES);
        crate::signal::mark_stale();
        if drop_stale(0, layout::TASK_SIZE) {
            slot.stale.store(false, Relaxed);
        } else {
            drop_user_pages();
        }
    }
}

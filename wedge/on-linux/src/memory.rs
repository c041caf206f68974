//! Guest memory in the address space of a process: the vTLB is the host's own page tables.
//!
//! Guest-physical memory as a whole (the kernel's direct map) and the beginning of it once more (the kernel's image) are always mapped.
//! Everything else is filled in when it is touched. When the guest flushes an address space, what its tables say no longer is dropped, and only that: a
//! process knows what it has mapped for programs. Invariants: what is mapped is what the guest's
//! tables said at some time since the last flush of it, with no more rights than they gave; pages whose accessed and dirty bits are not set are not
//! accessible in the way that would set them. Rights of the direct map and the image are not narrowed.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use hw_x86::paging::entry;
use linux_raw_sys::general as linux;
use proto::wedge::{Start, layout, option};
use vmm_cpu::walk::{Intent, PageFault};
use vmm_mem::{GuestMemory, Window};
use wedge_core::VirtualCpu;
use wedge_core::mapped::{Mapped, Piece};
use wedge_x86::CLOSED;

use crate::shared::{EVERYTHING, FLUSHES, Slot, count, counter, has, mine, vcpu};
use crate::sys::{self, Backing};
use crate::{exec_scan, frames, pkeys, profile, syscall_patch, user_process};

/// Page size.
pub const PAGE: u64 = 4096;
/// Pieces of programs that a process knows to have mapped.
pub const PIECES: usize = 1024;
/// Calls of the host by which a flush drops what is out of date, one by one, before it drops everything.
const CHANGES: usize = 24;
const LARGE: u64 = 2 << 20;
const FOUR_GIB: u64 = 1 << 32;

/// Where the parts of guest memory are.
#[derive(Clone, Copy, Debug)]
pub struct Ram {
    low: u64,
    high: u64,
}

impl Ram {
    /// As the loader has laid it out.
    pub fn new(start: &Start) -> Self {
        let low = start.memory.min(start.hole);
        Self { low, high: start.memory - low }
    }

    /// Bytes of it.
    pub fn length(&self) -> u64 {
        self.low + self.high
    }

    /// Where guest-physical memory is in the descriptor, and how much follows.
    pub fn offset(&self, address: u64) -> Option<(u64, u64)> {
        if address < self.low {
            return Some((address, self.low - address));
        }
        let above = address.checked_sub(FOUR_GIB)?;
        (above < self.high).then(|| (self.low + above, self.high - above))
    }

    /// The guest-physical address of an offset in the descriptor.
    pub fn address(&self, offset: u64) -> Option<u64> {
        match offset.checked_sub(self.low) {
            None => Some(offset),
            Some(above) => (above < self.high).then_some(FOUR_GIB + above),
        }
    }

    /// Maps guest memory, none of which can be executed: what is always there, but for the kernel's image.
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

    /// Maps the kernel's image, which can be executed: for guest processes only.
    pub fn map_image(&self, start: &Start) -> Result<(), sys::Errno> {
        self.open_image()?;
        let data = linux::PROT_READ | linux::PROT_WRITE;
        pkeys::protect(layout::IMAGE, self.image(), data, CLOSED)?;
        let code = page_end(start.code_end) - start.code;
        pkeys::protect(start.code, code, data | linux::PROT_EXEC, CLOSED)
    }

    /// All of guest memory at an address.
    fn map_at(&self, base: u64) -> Result<(), sys::Errno> {
        let all = linux::PROT_READ | linux::PROT_WRITE;
        // SAFETY: the callers give ranges that are set aside for the guest; nothing of this program is there.
        unsafe {
            sys::map(base, self.low, all, Backing::Shared(layout::MEMORY_FD, 0))?;
            if self.high != 0 {
                let high = Backing::Shared(layout::MEMORY_FD, self.low);
                sys::map(base + FOUR_GIB, self.high, all, high)?;
            }
        }
        Ok(())
    }

    /// Bytes of it that are the kernel's image, too.
    pub fn image(&self) -> u64 {
        self.low.min(layout::IMAGE_LENGTH)
    }

    /// Maps what the guest's kernel has at all times: memory, and its image.
    pub fn open(&self) -> Result<(), sys::Errno> {
        self.map_at(layout::DIRECT)?;
        self.open_image()
    }

    fn open_image(&self) -> Result<(), sys::Errno> {
        let rights = linux::PROT_READ | linux::PROT_WRITE | linux::PROT_EXEC;
        let image = Backing::Shared(layout::MEMORY_FD, 0);
        // SAFETY: the range is set aside for it.
        unsafe { sys::map(layout::IMAGE, self.image(), rights, image) }
    }

    /// Takes away what [`Self::open`] has mapped.
    pub fn close(&self) -> Result<(), sys::Errno> {
        let end = if self.high == 0 { self.low } else { FOUR_GIB + self.high };
        // SAFETY: only the guest uses these ranges, and it does not run.
        unsafe {
            sys::unmap(layout::DIRECT, end)?;
            sys::unmap(layout::IMAGE, self.image())
        }
    }

    /// Maps the copies of a virtual CPU, if there are any.
    pub fn map_copies(&self, index: usize) -> Result<(), sys::Errno> {
        if !pkeys::is_enabled() {
            return Ok(());
        }
        let all = linux::PROT_READ | linux::PROT_WRITE;
        let length = self.length();
        let copies = Backing::Shared(layout::MEMORY_FD, exec_scan::copies(length, index));
        // SAFETY: the range is set aside for them.
        unsafe { sys::map(layout::COPIES, length, all, copies) }?;
        pkeys::protect(layout::COPIES, length, all, CLOSED)
    }

    /// As the VMM library knows it.
    pub fn memory(&self) -> Option<GuestMemory> {
        let window = |base, length| {
            let host = (layout::WINDOW + base) as *mut u8;
            Window { base, length, host }
        };
        let windows = [window(0, self.low), window(FOUR_GIB, self.high)];
        let used = if self.high == 0 { 1 } else { 2 };
        // SAFETY: `map` has mapped both in every process, for as long as it lives, and no Rust object is there.
        unsafe { GuestMemory::new(&windows[..used]) }.ok()
    }
}

fn page_end(address: u64) -> u64 {
    address.next_multiple_of(PAGE)
}

/// A page as the guest's tables have it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaf {
    /// Guest-physical address.
    pub address: u64,
    /// Guest-physical address of its entry, and the entry.
    at: u64,
    entry: u64,
    /// Size in bytes.
    pub size: u64,
    /// All levels allow writes.
    pub writable: bool,
    /// No level forbids fetches.
    pub executable: bool,
    /// All levels allow programs.
    user: bool,
    dirty: bool,
}

impl Leaf {
    /// What the host is to allow.
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

    /// What the host may go on to allow of a page at `linear`, which it has mapped from this offset of guest memory.
    fn still_allows(&self, ram: &Ram, memory: &GuestMemory, linear: u64, offset: u64) -> u32 {
        let address = self.address + (linear & (self.size - 1));
        let is_same = ram.offset(address).is_some_and(|(now, _)| now == offset);
        if is_same && access(memory, self.at, self.entry) { self.rights() } else { 0 }
    }
}

/// Makes a page count as accessed, whose entry at `at` had this value; `false`: it has another one now. A processor may do that to any page
/// that it translates (APM vol. 2, 5.4.2).
fn access(memory: &GuestMemory, at: u64, value: u64) -> bool {
    value & entry::ACCESSED != 0
        || memory
            .compare_exchange(at, value, value | entry::ACCESSED)
            .is_ok_and(|exchanged| exchanged.is_ok())
}

/// The page that maps `linear`, if there is one.
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

/// What a fault is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The guest's own.
    Guest(PageFault),
    /// An access to this guest-physical address, where a device is.
    Device(u64),
    /// Nothing: it is mapped now.
    Filled,
    /// A page of code that must not be executed ([`exec_scan`]).
    Sequence,
    /// The host has no room for the mapping.
    Full(sys::Errno),
}

/// Pages that are looked at around one, in its part of this size: as many as the guest's kernel makes at once.
const AROUND: u64 = 256;
/// The same of code that is copied first.
const CODE_AROUND: u64 = 16;

/// Fills in what an access needs, and what is in one piece with it.
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
    let is_alone = profile::is_on() || has(option::NO_BATCHES) || needs_look(&leaf);
    if leaf.size == PAGE && !is_alone {
        return fill_around(ram, memory, linear & !(PAGE - 1), &leaf, intent);
    }
    if let Some(fault) = fill_code(ram, memory, linear, intent, &leaf) {
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
        // It is mapped when no copy is left.
        return Fault::Filled;
    }
    map(linear, size, rights, offset, leaf.user)
}

/// With keys: what can be executed is looked at.
fn needs_look(leaf: &Leaf) -> bool {
    leaf.executable && pkeys::is_enabled()
}

/// With keys: whether it is a page of a program that may be executed.
fn is_code(linear: u64, leaf: &Leaf) -> bool {
    leaf.executable && is_program(linear) && pkeys::is_enabled()
}

/// The rights of a mapping of guest memory itself.
fn rights_in_place(linear: u64, leaf: &Leaf) -> u32 {
    let rights = leaf.rights();
    if is_code(linear, leaf) { rights & !linux::PROT_EXEC } else { rights }
}

/// With keys, fills in what is executed, from copies. A page that is written, too, is either. `None`: it is no such access.
fn fill_code(
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
        let (before, behind) = joined(ram, memory, page, leaf, CODE_AROUND)?;
        (page - before, leaf.address - before, before + PAGE + behind)
    } else {
        // Some pages of a large one, which a flush drops as a whole.
        const PIECE: u64 = CODE_AROUND * PAGE;
        slot().large.store(true, Relaxed);
        let run = linear & !(PIECE - 1);
        (run, leaf.address + (run & (leaf.size - 1)), PIECE)
    };
    count(counter::FILLS);
    // If a page before it ends the run, the page alone.
    for (start, length) in [(run, size), (page, PAGE)] {
        let address = base + (start - run);
        let (offset, left) = ram.offset(address)?;
        match exec_scan::map(memory, start, length.min(left), address, offset) {
            Err(error) => return Some(Fault::Full(error)),
            Ok(end) if end > page => return Some(Fault::Filled),
            Ok(_) => {}
        }
    }
    (intent == Intent::Fetch).then_some(Fault::Sequence)
}

/// Maps what begins in guest memory at an offset of its descriptor.
fn map(linear: u64, size: u64, rights: u32, offset: u64, user: bool) -> Fault {
    count(counter::FILLS);
    syscall_patch::forget(linear, linear + size);
    exec_scan::forget(linear, linear + size);
    let end = linear + size;
    for attempt in 0..2 {
        // SAFETY: `reachable` by the guest only: nothing of this program is there.
        match unsafe { sys::map_now(linear, size, rights, layout::MEMORY_FD, offset) } {
            Ok(()) => break,
            // Too many mappings: everything can be filled in again.
            Err(_) if attempt == 0 => drop_all(),
            Err(error) => return Fault::Full(error),
        }
    }
    if is_program(linear) {
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

/// What this process has mapped for programs.
pub fn mapped() -> &'static mut Mapped<PIECES> {
    // SAFETY: it is in the process's own memory, and only its one thread uses it, outside of signal handlers. Each use ends before the next
    // begins.
    unsafe { &mut *mine().mapped.at() }
}

/// Fills in a page and those around it that are in one piece with it.
fn fill_around(ram: &Ram, memory: &GuestMemory, linear: u64, leaf: &Leaf, intent: Intent) -> Fault {
    let Some((offset, _)) = ram.offset(leaf.address) else { return Fault::Device(leaf.address) };
    if intent == Intent::Write && frames::write(offset, PAGE) {
        // It is mapped when no copy is left.
        return Fault::Filled;
    }
    let Some((before, behind)) = joined(ram, memory, linear, leaf, AROUND) else {
        return Fault::Filled;
    };
    let (start, size) = (offset - before, before + PAGE + behind);
    let rights = leaf.rights();
    if rights & linux::PROT_WRITE != 0 && frames::holds(start, size) {
        let is_held = frames::holds(offset, PAGE);
        let rights = if is_held { rights & !linux::PROT_WRITE } else { rights };
        return map(linear, PAGE, rights, offset, leaf.user);
    }
    map(linear - before, size, rights, start, leaf.user)
}

/// Drops the mappings for user mode by which a frame, given by its offset in guest memory, could be written.
pub fn drop_writable(offset: u64) {
    if !mapped().is_complete() {
        drop_programs();
        return;
    }
    let is_writable = |piece: &&Piece| {
        piece.rights & linux::PROT_WRITE != 0
            && (piece.offset..piece.offset + (piece.end - piece.start)).contains(&offset)
    };
    while let Some(piece) = mapped().pieces().iter().find(is_writable).copied() {
        let at = piece.start + (offset - piece.offset);
        unmap(at, at + PAGE);
    }
}

/// Bytes before and behind a page that are in one piece with it: in its part of `around` pages, in guest memory, with the same rights, and not mapped
/// yet. They count as accessed.
fn joined(
    ram: &Ram,
    memory: &GuestMemory,
    linear: u64,
    leaf: &Leaf,
    around: u64,
) -> Option<(u64, u64)> {
    /// Bits in which the entries of a piece are equal.
    const SAME: u64 = entry::PRESENT | entry::WRITE | entry::USER | entry::DIRTY | entry::NX;
    let index = linear / PAGE % around;
    let (offset, _) = ram.offset(leaf.address)?;
    let is_mapped = |page: u64, offset: u64| {
        let found = mapped().at(page);
        found.is_some_and(|piece| {
            piece.rights == leaf.rights() && piece.offset + (page - piece.start) == offset
        })
    };
    // `step` pages on; in two's complement, so also back. Other virtual CPUs may change the entries.
    let joins = |step: u64| {
        let at = leaf.at.wrapping_add(step.wrapping_mul(8));
        let expected = leaf.address.wrapping_add(step.wrapping_mul(PAGE));
        // Guest memory has a hole, its descriptor has none.
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
    let behind = (1..around - index).take_while(|&step| joins(step)).count() as u64;
    Some((before * PAGE, behind * PAGE))
}

/// Whether a guest may have something filled in here: not what is always mapped, and not the wedge.
pub fn is_filled_in(linear: u64) -> bool {
    is_program(linear) || is_kernel(linear)
}

/// Whether an address is a program's.
pub fn is_program(linear: u64) -> bool {
    linear < layout::TASK_SIZE && !(layout::IMAGE..layout::LOW_END).contains(&linear)
}

fn is_kernel(linear: u64) -> bool {
    (layout::MODULES..layout::MODULES_END).contains(&linear)
        || (layout::FIXMAP..layout::LOW_END).contains(&linear)
        || (layout::VMALLOC..layout::GUEST_END).contains(&linear)
}

/// The slot of this process.
pub fn slot() -> &'static Slot {
    &vcpu().slots[mine().slot.load(Relaxed) as usize]
}

fn unmap(start: u64, end: u64) {
    syscall_patch::forget(start, end);
    mapped().remove(start, end);
    exec_scan::forget(start, end);
    // SAFETY: the callers give ranges of the guest only. It fails only for want of the host's memory, when a mapping has to be split.
    let result = unsafe { sys::unmap(start, end - start) };
    if let Err(error) = result {
        crate::report::fatal(format_args!("cannot unmap guest memory at {start:#x}: {error}"));
    }
    if is_program(start) {
        user_process::unmap(start, end);
    }
}

/// Drops what programs have mapped in this process.
pub fn drop_programs() {
    // The host may forbid mappings of the first pages.
    unmap(0, layout::IMAGE);
    unmap(layout::LOW_END, layout::TASK_SIZE);
    mapped().clear();
    crate::signal::mark_stale();
    slot().large.store(false, Relaxed);
    slot().stale.store(false, Relaxed);
}

/// Drops pages of a program in this process.
pub fn drop_range(start: u64, end: u64) {
    if is_program(start) && is_program(end - 1) {
        unmap(start, end);
    }
}

/// With keys: the kernel executes its image outside of its code, where it may do so until it says otherwise.
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
    mine().image.store(true, Relaxed);
    let rights = linux::PROT_READ | linux::PROT_WRITE | linux::PROT_EXEC;
    pkeys::protect(page, PAGE, rights, CLOSED).is_ok()
}

fn drop_kernel() {
    if mine().image.swap(false, Relaxed) {
        close_image();
    }
    unmap(layout::MODULES, layout::MODULES_END);
    unmap(layout::FIXMAP, layout::LOW_END);
    unmap(layout::VMALLOC, layout::GUEST_END);
}

/// Nothing but the kernel's code can be executed in its image.
fn close_image() {
    let Some(start) = crate::shared::start() else { return };
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
    drop_programs();
    drop_kernel();
}

/// Drops one page of this process, and the large one that it may be part of.
pub fn drop_page(linear: u64) {
    if !is_filled_in(linear) {
        return;
    }
    let size = if slot().large.load(Relaxed) { LARGE } else { PAGE };
    let start = linear & !(size - 1);
    if size == PAGE || !is_program(linear) || !drop_stale(start, start + size) {
        unmap(start, start + size);
    }
}

/// What is to be done to pages that were mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    Drop,
    /// They keep these rights.
    Narrow(u32),
}

/// Drops what programs have mapped between two addresses and the tables do not say any longer, and takes rights that they do not give any
/// longer. `false`: there is too much to do, or it is not known.
fn drop_stale(start: u64, end: u64) -> bool {
    let Some(ram) = crate::shared::start().map(|start| Ram::new(&start)) else { return false };
    let Some(memory) = ram.memory() else { return false };
    let mapped = mapped();
    if !mapped.is_complete() || has(option::NO_BATCHES) {
        return false;
    }
    let root = slot().root.load(Relaxed);
    let mut changes = [(0, 0, Change::Drop); CHANGES];
    let mut used: usize = 0;
    // The last page belongs to the last change: nothing is kept in between.
    let mut goes_on = false;
    let first = mapped.pieces().partition_point(|piece| piece.end <= start);
    for piece in mapped.pieces()[first..].iter().take_while(|piece| piece.start < end) {
        let mut at = piece.start.max(start);
        let last = piece.end.min(end);
        while at < last {
            let leaf = leaf(&memory, root, at);
            let size = leaf.map_or(PAGE, |leaf| leaf.size);
            let offset = piece.offset + (at - piece.start);
            // A copy is of code, which nobody writes.
            let copied = exec_scan::original(&ram, offset);
            let unit = if copied.is_some() { PAGE } else { size };
            let next = last.min((at & !(unit - 1)) + unit);
            let wanted = leaf
                .map_or(0, |leaf| leaf.still_allows(&ram, &memory, at, copied.unwrap_or(offset)));
            let is_old = |leaf: Leaf| {
                let address = leaf.address + (at & (size - 1));
                if syscall_patch::has_copy(at) {
                    unit == PAGE && !syscall_patch::is_current(at, address, &memory)
                } else {
                    copied.is_some_and(|offset| !exec_scan::is_current(&memory, address, offset))
                }
            };
            let change = match wanted & piece.rights {
                rights if rights & linux::PROT_READ == 0 || leaf.is_some_and(is_old) => {
                    Some(Change::Drop)
                }
                // It is for what can be executed.
                rights if copied.is_some() && rights != piece.rights => Some(Change::Drop),
                rights if rights != piece.rights => Some(Change::Narrow(rights)),
                _ => None,
            };
            match (change, used.checked_sub(1).map(|index| &mut changes[index])) {
                (None, _) => goes_on = false,
                // What lies between is mapped for nobody, but for the hole of the kernel's image.
                (Some(Change::Drop), Some((from, to, Change::Drop)))
                    if goes_on && (*from < layout::IMAGE) == (at < layout::IMAGE) =>
                {
                    *to = next;
                }
                (Some(change), Some((_, to, before)))
                    if goes_on && *to == at && change == *before =>
                {
                    *to = next;
                }
                (Some(change), _) => {
                    let Some(place) = changes.get_mut(used) else { return false };
                    *place = (at, next, change);
                    used += 1;
                    goes_on = true;
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

/// Takes rights of pages that are mapped in one go, or pieces of them.
fn narrow(start: u64, end: u64, rights: u32) {
    let arguments = [start, end - start, rights.into(), 0, 0, 0];
    // SAFETY: the pages are a program's; only rights are taken.
    if unsafe { sys::call(linux::__NR_mprotect, arguments) }.is_err() {
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

/// The beginning or the end of a copy has changed: no process of this virtual CPU may go on executing it beside what it has mapped before or
/// behind.
pub fn copy_changed(offset: u64) {
    let vcpu = vcpu();
    let number = vcpu.renewals.load(Relaxed);
    vcpu.renewed[number as usize % FLUSHES].store(offset, Relaxed);
    vcpu.renewals.store(number + 1, Relaxed);
    follow_copies();
}

/// Drops in this process the copies that have changed since it had the virtual CPU.
fn follow_copies() {
    let (vcpu, slot) = (vcpu(), slot());
    let now = vcpu.renewals.load(Relaxed);
    let seen = slot.renewals.swap(now, Relaxed);
    if now != seen && (now - seen > FLUSHES as u64 || !mapped().is_complete()) {
        drop_programs();
        return;
    }
    for number in seen..now {
        let offset = vcpu.renewed[number as usize % FLUSHES].load(Relaxed);
        let has_it = |piece: &&Piece| {
            (piece.offset..piece.offset + (piece.end - piece.start)).contains(&offset)
        };
        while let Some(piece) = mapped().pieces().iter().find(has_it).copied() {
            let at = piece.start + (offset - piece.offset);
            unmap(at, at + PAGE);
        }
    }
}

/// The kernel's mapping of an address is to be forgotten by all processes of this virtual CPU; [`EVERYTHING`]: of any.
pub fn kernel_changed(linear: u64) {
    let vcpu = vcpu();
    let number = vcpu.changes.load(Relaxed);
    vcpu.changed[number as usize % FLUSHES].store(linear, Relaxed);
    vcpu.changes.store(number + 1, SeqCst);
    follow();
}

/// Whether an address is the kernel's, so that its mapping is the same in all processes.
pub fn is_shared(linear: u64) -> bool {
    is_kernel(linear)
}

/// Does in this process what has changed since it had the virtual CPU.
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
            drop_programs();
        }
    }
}

//! Page frames of guest memory of which guest processes have private copies: pages with rewritten
//! system calls ([`crate::mmu::syscall_patch`]), and with protection keys all executable user pages
//! ([`crate::mmu::exec_scan`]).
//!
//! While a frame is in the VM's table, no process maps it writable for the guest: not in the direct
//! map, not in the kernel image, not for user mode. A write faults, and a device's write is
//! reported on completion: the frame leaves the table, each process drops its copies before it runs
//! the guest again, and then the write is carried out.
//!
//! The table holds the frames in groups, with a log of its changes, which each process applies. A
//! vCPU applies it before it runs the guest ([`sync_before_entry`]). If frames have left the table,
//! it also waits until every other vCPU has applied that, is idle, or is in the guest kernel with
//! interrupts disabled and calls [`sync_before_entry`] before user mode. A copy is created only
//! once every vCPU that is not idle write-protects the frame. Rewritten system calls can be
//! postponed until then ([`may_copy`]); a page that executes only from its copy waits ([`track`]),
//! which only user mode may do, since it holds no lock of the guest kernel. A frequently written
//! frame has no rewritten system calls for a while.

use core::sync::atomic::Ordering::SeqCst;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use linux_raw_sys::general as linux;
use proto::hosted::layout;

use crate::isolation::pkeys;
use crate::linux::sys;
use crate::mmu::exec_scan;
use crate::mmu::memory::{self, PAGE, Ram};
use crate::mmu::syscall_patch;
use crate::state::shared::{SharedVcpu, process, shared, vcpu, vcpus};
use crate::{device, idle, report};

/// Frames of an entry, one bit each.
const GROUP: u64 = 16;
/// Length of a group in bytes.
const GROUP_LENGTH: u64 = GROUP * PAGE;
/// All frames of an entry.
const ALL: u64 = (1 << GROUP) - 1;
/// Number of groups in the table. As long as frames of a group lie together, they use less than
/// half of the mappings that Linux permits to a process (65,530, `vm.max_map_count`).
const ENTRIES: usize = 1 << ENTRIES_SHIFT;
const ENTRIES_SHIFT: u32 = 13;
/// Number of places of a group.
const PROBES: usize = 16;
/// Capacity of the log.
const LOG: u32 = 1024;
/// Log entry: frames leave the table.
const REMOVED: u64 = 1 << 63;
/// Log entry: all frames leave the table.
const EMPTIED: u64 = 0;
/// Capacity in recently written frames.
const WRITTEN: usize = 256;
/// Number of writes after which a frame is not copied for a while.
const OFTEN: u64 = 4;
/// Number of refusals for which that lasts.
const REFUSALS: u64 = 64;
/// Number of checks of the other vCPUs between interrupts.
const LOOKS: u32 = 256;
/// Failures of protecting memory after which the VM ends, with protection keys.
const MOST_REFUSED: u32 = 8;

/// Table of the VM, in shared memory.
#[repr(C)]
pub struct CopiedFrames {
    /// A vCPU changes the table.
    is_locked: AtomicBool,
    /// Changes begun so far.
    begun: AtomicU32,
    /// Changes completed so far.
    changes: AtomicU32,
    /// Last change that has removed a frame.
    removals: AtomicU32,
    /// Number of frames.
    used: AtomicU32,
    /// Group number plus 1, and its frames from bit 0 on ([`GROUP`]); 0: free.
    entries: [AtomicU64; ENTRIES],
    /// Last changes: frames that enter, as in [`Self::entries`], or leave, with [`REMOVED`];
    /// [`EMPTIED`].
    log: [AtomicU64; LOG as usize],
    /// Number, refusals and writes of written frames: 48, 8 and 8 bits.
    written: [AtomicU64; WRITTEN],
}

/// Changes of the table that a process has applied.
#[derive(Clone, Copy)]
pub struct AppliedFrames {
    /// Last change applied to its mappings.
    changes: u32,
    /// Last removal that all vCPUs of the VM have applied.
    settled: u32,
    /// Consecutive failures of protecting frames.
    refused: u32,
}

/// Frames of one group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Frames {
    group: u64,
    bits: u64,
}

impl Frames {
    /// Decodes an entry of the table or the log.
    fn of(entry: u64) -> Option<Self> {
        let group = (entry & !REMOVED) >> GROUP;
        Some(Self { group: group.checked_sub(1)?, bits: entry & ALL })
    }

    fn entry(self) -> u64 {
        ((self.group + 1) << GROUP) | self.bits
    }

    /// Returns the frames in a range of guest memory, given by its offset.
    fn in_range(offset: u64, length: u64) -> impl Iterator<Item = Self> {
        let (first, last) = (offset / PAGE, (offset + length.max(1) - 1) / PAGE);
        (first / GROUP..=last / GROUP).map(move |group| {
            let from = first.saturating_sub(group * GROUP);
            let to = (last - group * GROUP).min(GROUP - 1);
            Self { group, bits: (ALL << from) & (ALL >> (GROUP - 1 - to)) }
        })
    }

    /// Returns the contiguous ranges as offsets in guest memory and lengths.
    fn runs(self) -> impl Iterator<Item = (u64, u64)> {
        let Self { group, bits: mut left } = self;
        core::iter::from_fn(move || {
            let first = u64::from(left.trailing_zeros());
            let length = u64::from((left >> first.min(63)).trailing_ones());
            left &= !((ALL >> (GROUP - length.min(GROUP))) << first.min(63));
            (length != 0).then_some((group * GROUP_LENGTH + first * PAGE, length * PAGE))
        })
    }
}

fn table() -> &'static CopiedFrames {
    &shared().frames
}

fn applied() -> &'static mut AppliedFrames {
    // SAFETY: it is in the process's own memory, used by its only thread outside of signal
    // handlers. The functions here do not call each other while they hold it.
    unsafe { &mut *process().copied.at() }
}

fn is_after(change: u32, other: u32) -> bool {
    change.wrapping_sub(other) as i32 >= 0
}

impl CopiedFrames {
    /// Returns the places of a group.
    fn places(&self, group: u64) -> impl Iterator<Item = &AtomicU64> {
        let hash = group.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - ENTRIES_SHIFT);
        (0..PROBES).map(move |probe| &self.entries[(hash as usize + probe) % ENTRIES])
    }

    /// Returns the frames that the table contains.
    fn has(&self, frames: Frames) -> u64 {
        if self.used.load(SeqCst) == 0 {
            return 0;
        }
        let entries = self.places(frames.group).map(|place| place.load(SeqCst));
        let found = entries
            .take_while(|entry| *entry != 0)
            .find_map(|entry| Frames::of(entry).filter(|found| found.group == frames.group));
        found.map_or(0, |found| found.bits & frames.bits)
    }

    /// Calls `act` under the table's lock, with a function that executes a change and logs it.
    fn change(&self, act: impl FnOnce(&mut dyn FnMut(u64, &mut dyn FnMut()))) {
        while self.is_locked.swap(true, SeqCst) {
            sys::yield_now();
        }
        act(&mut |record, act| {
            let number = self.changes.load(SeqCst).wrapping_add(1);
            // Before the entries: a vCPU that misses one waits for all vCPUs that may not.
            self.begun.store(number, SeqCst);
            if record == EMPTIED || record & REMOVED != 0 {
                self.removals.store(number, SeqCst);
            }
            act();
            self.log[(number % LOG) as usize].store(record, SeqCst);
            self.changes.store(number, SeqCst);
        });
        self.is_locked.store(false, SeqCst);
    }

    /// Adds frames; removes all other frames first if the table is full.
    fn insert(&self, frames: Frames) {
        self.change(|record| {
            let is_same = |place: &&AtomicU64| {
                Frames::of(place.load(SeqCst)).is_some_and(|found| found.group == frames.group)
            };
            let is_free = |place: &&AtomicU64| place.load(SeqCst) & ALL == 0;
            let mut places = self.places(frames.group);
            let place = places.find(is_same);
            let place = place.or_else(|| self.places(frames.group).find(is_free));
            let Some(place) = place else {
                record(EMPTIED, &mut || self.clear());
                return;
            };
            let old = Frames::of(place.load(SeqCst)).filter(|old| old.group == frames.group);
            let bits = old.map_or(0, |old| old.bits);
            let new = frames.bits & !bits;
            if new != 0 {
                record(Frames { bits: new, ..frames }.entry(), &mut || {
                    self.used.fetch_add(new.count_ones(), SeqCst);
                    place.store(Frames { bits: bits | new, ..frames }.entry(), SeqCst);
                });
            }
        });
    }

    /// Removes frames.
    fn remove(&self, frames: Frames) {
        self.change(|record| {
            let bits = self.has(frames);
            if bits == 0 {
                return;
            }
            let gone = Frames { bits, ..frames };
            record(gone.entry() | REMOVED, &mut || {
                for place in self.places(frames.group) {
                    let entry = place.load(SeqCst);
                    if Frames::of(entry).is_some_and(|found| found.group == frames.group) {
                        place.store(entry & !bits, SeqCst);
                    }
                }
                self.used.fetch_sub(bits.count_ones(), SeqCst);
            });
        });
    }

    /// Removes all frames.
    fn empty(&self) {
        self.change(|record| record(EMPTIED, &mut || self.clear()));
    }

    fn clear(&self) {
        self.entries.iter().for_each(|place| place.store(0, SeqCst));
        self.used.store(0, SeqCst);
    }

    /// Returns the log entry of a change; `None`: overwritten.
    fn record(&self, change: u32) -> Option<u64> {
        let record = self.log[(change % LOG) as usize].load(SeqCst);
        let is_there = self.begun.load(SeqCst).wrapping_sub(change) < LOG;
        (is_there && record != EMPTIED).then_some(record)
    }
}

/// Returns whether this process may copy the frame at this offset of guest memory now. If not, a
/// later call may succeed.
pub fn may_copy(offset: u64) -> bool {
    let table = table();
    if is_written_often(offset / PAGE) {
        return false;
    }
    if holds(offset, PAGE) {
        let changes = table.changes.load(SeqCst);
        return applied().changes == changes
            && other_vcpus().all(|(_, vcpu)| is_up_to(vcpu, changes));
    }
    Frames::in_range(offset, PAGE).for_each(|frames| table.insert(frames));
    false
}

/// Returns whether a vCPU has write-protected the frames of the table as of a change, or is idle.
fn is_up_to(vcpu: &SharedVcpu, change: u32) -> bool {
    vcpu.idle.load(SeqCst) != idle::state::BUSY
        || is_after(vcpu.frames_applied.load(SeqCst), change)
}

/// With protection keys: makes every vCPU write-protect frames of guest memory, given by their
/// offset, so that they may be copied. Waits for the other vCPUs only if permitted, which is not
/// the case in the guest kernel; else returns whether they have done so already.
pub fn track(offset: u64, length: u64, may_wait: bool) -> bool {
    let table = table();
    let is_missing = |frames: &Frames| table.has(*frames) != frames.bits;
    let mut looks = 0;
    loop {
        for frames in Frames::in_range(offset, length).filter(is_missing) {
            table.insert(frames);
        }
        let changes = apply();
        if Frames::in_range(offset, length).any(|frames| is_missing(&frames)) {
            continue;
        }
        let Some((index, _)) = other_vcpus().find(|(_, vcpu)| !is_up_to(vcpu, changes)) else {
            return true;
        };
        if !may_wait {
            return false;
        }
        if looks % LOOKS == 0 {
            device::interrupt(index);
        }
        looks += 1;
        sys::yield_now();
    }
}

/// Handles a write of the guest to a range of guest memory, given by its offset: all copies of
/// these frames are dropped before the guest continues. Returns whether the table contained one.
pub fn write(offset: u64, length: u64) -> bool {
    let table = table();
    let mut is_listed = false;
    for frames in Frames::in_range(offset, length) {
        let bits = table.has(frames);
        if bits == 0 {
            continue;
        }
        is_listed = true;
        table.remove(frames);
        (0..GROUP)
            .filter(|bit| bits >> bit & 1 != 0)
            .for_each(|bit| note_written(frames.group * GROUP + bit));
    }
    is_listed
}

/// Handles a device's write to guest-physical memory, before or after it: observer of the device
/// models' memory, also called for requests that other processes carry out.
pub fn write_by_device(address: u64, length: u64) {
    if table().used.load(SeqCst) == 0 || length == 0 {
        return;
    }
    let Some(start) = crate::state::shared::start() else { return };
    if let Some((offset, left)) = Ram::new(&start).offset(address) {
        write(offset, left.min(length));
    }
}

/// Returns whether the table contains a frame of this range of guest memory.
pub fn holds(offset: u64, length: u64) -> bool {
    let table = table();
    table.used.load(SeqCst) != 0
        && Frames::in_range(offset, length).any(|frames| table.has(frames) != 0)
}

fn is_written_often(frame: u64) -> bool {
    let place = &table().written[frame as usize % WRITTEN];
    let value = place.load(SeqCst);
    let (writes, refusals) = (value & 0xff, value >> 8 & 0xff);
    if value >> 16 != frame || writes < OFTEN {
        return false;
    }
    let next = if refusals + 1 == REFUSALS { 0 } else { value + 0x100 };
    // A concurrent count of another vCPU is equally good.
    let _ = place.compare_exchange(value, next, SeqCst, SeqCst);
    true
}

fn note_written(frame: u64) {
    let place = &table().written[frame as usize % WRITTEN];
    let value = place.load(SeqCst);
    let writes = if value >> 16 == frame { (value & 0xff) + 1 } else { 1 };
    place.store(frame << 16 | writes.min(OFTEN), SeqCst);
}

fn other_vcpus() -> impl Iterator<Item = (usize, &'static SharedVcpu)> {
    let own = process().vcpu.load(SeqCst) as usize;
    vcpus().iter().enumerate().filter(move |(index, _)| *index != own)
}

/// Applies the changes of the table before the guest runs, and waits until no vCPU executes a stale
/// copy.
pub fn sync_before_entry() {
    if applied().settled == table().begun.load(SeqCst) {
        return;
    }
    loop {
        let changes = apply();
        let removals = table().removals.load(SeqCst);
        let is_done = |vcpu: &SharedVcpu| {
            is_up_to(vcpu, removals) || is_after(vcpu.frames_seen.load(SeqCst), removals)
        };
        let mut looks = 0;
        while let Some((index, _)) = other_vcpus().find(|(_, vcpu)| !is_done(vcpu)) {
            if table().changes.load(SeqCst) != changes {
                break;
            }
            if looks % LOOKS == 0 {
                device::interrupt(index);
            }
            looks += 1;
            sys::yield_now();
        }
        if table().begun.load(SeqCst) == changes {
            applied().settled = changes;
            return;
        }
    }
}

/// Notes in a signal handler that the guest kernel was interrupted with interrupts disabled: the
/// vCPU calls [`sync_before_entry`] before it runs user mode.
pub fn note_interrupted_kernel() {
    vcpu().frames_seen.store(table().changes.load(SeqCst), SeqCst);
}

/// Applies the table's changes to this process's mappings; returns the last applied change.
fn apply() -> u32 {
    let table = table();
    let changes = table.changes.load(SeqCst);
    let mut next = applied().changes;
    if let Some(ram) = crate::state::shared::start().map(|start| Ram::new(&start)) {
        while next != changes {
            next = next.wrapping_add(1);
            match table.record(next) {
                Some(record) => follow(&ram, record),
                None => {
                    follow_all(&ram);
                    break;
                }
            }
        }
    }
    applied().changes = changes;
    vcpu().frames_applied.store(changes, SeqCst);
    changes
}

/// Applies one change to this process's mappings.
fn follow(ram: &Ram, record: u64) {
    let Some(frames) = Frames::of(record) else { return };
    if record & REMOVED == 0 {
        frames.runs().for_each(|(offset, length)| memory::drop_writable(offset, length));
        add(ram, frames);
        return;
    }
    for (offset, length) in frames.runs() {
        match pkeys::is_enabled() {
            true => exec_scan::drop_copies(offset, length),
            false => syscall_patch::drop_copies(offset, length),
        }
        if protect(ram, offset, length, linux::PROT_READ | linux::PROT_WRITE).is_err() {
            // The host has no memory for splitting the mapping; one mapping for all needs none.
            follow_all(ram);
            return;
        }
    }
}

/// Write-protects frames in this process.
fn add(ram: &Ram, frames: Frames) {
    for (offset, length) in frames.runs() {
        let Err(error) = protect(ram, offset, length, linux::PROT_READ) else {
            applied().refused = 0;
            continue;
        };
        // The host has no memory for the mapping.
        if !pkeys::is_enabled() {
            write(offset, length);
            continue;
        }
        applied().refused += 1;
        if applied().refused > MOST_REFUSED {
            report::fatal(format_args!("cannot protect guest memory: {error}"));
        }
        table().empty();
        return;
    }
}

/// Makes this process's mappings equal to the table, whatever they have applied.
fn follow_all(ram: &Ram) {
    memory::drop_user_pages();
    // A page that stays read-only is handled when it faults.
    let _ = protect(ram, 0, ram.length(), linux::PROT_READ | linux::PROT_WRITE);
    for place in &table().entries {
        if let Some(frames) = Frames::of(place.load(SeqCst)) {
            add(ram, frames);
        }
    }
}

/// Changes the rights of frames in the direct map, and without protection keys in the kernel image:
/// with keys user mode executes no original pages, and the kernel writes other memory than its
/// image through the direct map.
fn protect(ram: &Ram, offset: u64, length: u64, rights: u32) -> Result<(), sys::Errno> {
    let mut done = 0;
    while done < length {
        // Guest memory has a hole, its file has none.
        let Some(address) = ram.address(offset + done) else { break };
        let left = ram.offset(address).map_or(0, |(_, left)| left).min(length - done);
        if left == 0 {
            break;
        }
        // SAFETY: the wedge accesses guest memory through another mapping.
        unsafe { sys::protect(layout::DIRECT + address, left, rights) }?;
        if address < ram.image() && !pkeys::is_enabled() {
            let left = left.min(ram.image() - address);
            // SAFETY: as above.
            unsafe { sys::protect(layout::IMAGE + address, left, rights | linux::PROT_EXEC) }?;
        }
        done += left;
    }
    Ok(())
}

/// Handles a write fault of the guest kernel in its direct map or image that is due to the table;
/// the frame leaves the table.
pub fn write_by_kernel(ram: &Ram, linear: u64) -> bool {
    // With protection keys the image is never write-protected. Modules after it are mapped on
    // demand.
    let image = linear.checked_sub(layout::IMAGE);
    let image = image.filter(|&address| address < ram.image() && !pkeys::is_enabled());
    let address = image.or_else(|| linear.checked_sub(layout::DIRECT));
    let found = address.and_then(|address| ram.offset(address));
    let Some((offset, _)) = found else { return false };
    let page = offset & !(PAGE - 1);
    if !write(page, PAGE) {
        // Another vCPU has removed it, or the host has refused to make it writable.
        let rights = linux::PROT_READ | linux::PROT_WRITE;
        if let Err(error) = protect(ram, page, PAGE, rights) {
            report::fatal(format_args!("cannot protect guest memory: {error}"));
        }
    }
    true
}

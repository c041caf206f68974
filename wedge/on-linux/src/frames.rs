//! Page frames of guest memory of which guest processes have private copies: of pages with rewritten system calls ([`crate::calls`]), and with
//! protection keys of all executable pages of user mode ([`crate::code`]).
//!
//! While a frame is in the table of the VM, no process maps it writable where the guest writes: not in the direct map, not in the
//! kernel's image, not for user mode. A write faults, and a device's write is known when it completes: the frame leaves the table,
//! each process drops its copies of it before it runs the guest again, and then the write is carried out.
//!
//! The table has the frames in groups, and a log of its changes, which each process follows. A vCPU follows it before it runs the guest ([`settle`]);
//! if frames have left the table, it also waits until every other vCPU has followed, is idle, or is in the guest's kernel with interrupts disabled
//! and comes here before user mode. A copy is only made once every vCPU that is not idle write-protects the frame. Rewritten system calls can do
//! without one meanwhile ([`may_copy`]); a page that is only executed from its copy waits ([`track`]), which only user mode may do: it has no lock of
//! the guest's kernel. A frame that is written often has no rewritten system calls for a while.

use core::sync::atomic::Ordering::SeqCst;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use linux_raw_sys::general as linux;
use proto::wedge::layout;

use crate::memory::{self, PAGE, Ram};
use crate::shared::{Vcpu, mine, shared, vcpu, vcpus};
use crate::{calls, code, device, idle, keys, report, sys};

/// Frames of an entry, which has a bit for each.
const GROUP: u64 = 16;
/// Bytes of a group.
const GROUP_LENGTH: u64 = GROUP * PAGE;
/// All bits of an entry.
const ALL: u64 = (1 << GROUP) - 1;
/// Groups in the table: of what a process of Linux can have mapped (65,530 pieces, `vm.max_map_count`) they take less than half while frames of one
/// group lie together.
const ENTRIES: usize = 1 << ENTRIES_SHIFT;
const ENTRIES_SHIFT: u32 = 13;
/// Places that a group can have.
const PROBES: usize = 16;
/// Changes that the log has.
const LOG: u32 = 1024;
/// In the log: frames leave the table.
const REMOVED: u64 = 1 << 63;
/// In the log: all frames leave the table.
const EMPTIED: u64 = 0;
/// Written frames that are remembered.
const WRITTEN: usize = 256;
/// Writes after which a frame is not copied for a while.
const OFTEN: u64 = 4;
/// Refusals for which that lasts.
const REFUSALS: u64 = 64;
/// Looks at the other vCPUs before they are interrupted once more.
const LOOKS: u32 = 256;
/// How often the host may refuse to protect memory before that is the machine's end, with protection keys.
const MOST_REFUSED: u32 = 8;

/// The table of the VM, in shared memory.
#[repr(C)]
pub struct Table {
    /// A vCPU changes the table.
    is_locked: AtomicBool,
    /// Changes that have begun so far.
    begun: AtomicU32,
    /// Changes so far.
    changes: AtomicU32,
    /// The last change that took a frame out.
    removals: AtomicU32,
    /// Frames in it.
    used: AtomicU32,
    /// Number of a group plus 1, and its frames as bits from bit 0 on ([`GROUP`]); 0: free.
    entries: [AtomicU64; ENTRIES],
    /// The last changes: as in [`Self::entries`] the frames that come, or with [`REMOVED`] that go; [`EMPTIED`].
    log: [AtomicU64; LOG as usize],
    /// Frame number, refusals and writes of frames that were written: 48, 8 and 8 bits.
    written: [AtomicU64; WRITTEN],
}

/// What a process has followed of the table.
#[derive(Clone, Copy)]
pub struct Applied {
    /// Changes that its mappings follow.
    changes: u32,
    /// Changes that no vCPU of the VM is behind any longer, as far as frames have left the table.
    settled: u32,
    /// How often the host has refused to protect frames, one time after the other.
    refused: u32,
}

/// Some frames of a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Frames {
    group: u64,
    bits: u64,
}

impl Frames {
    /// Of an entry of the table or the log.
    fn of(entry: u64) -> Option<Self> {
        let group = (entry & !REMOVED) >> GROUP;
        Some(Self { group: group.checked_sub(1)?, bits: entry & ALL })
    }

    fn entry(self) -> u64 {
        ((self.group + 1) << GROUP) | self.bits
    }

    /// Those in a range of guest memory, given by its offset.
    fn in_range(offset: u64, length: u64) -> impl Iterator<Item = Self> {
        let (first, last) = (offset / PAGE, (offset + length.max(1) - 1) / PAGE);
        (first / GROUP..=last / GROUP).map(move |group| {
            let from = first.saturating_sub(group * GROUP);
            let to = (last - group * GROUP).min(GROUP - 1);
            Self { group, bits: (ALL << from) & (ALL >> (GROUP - 1 - to)) }
        })
    }

    /// Offsets in guest memory and lengths of what follows each other.
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

fn table() -> &'static Table {
    &shared().frames
}

fn applied() -> &'static mut Applied {
    // SAFETY: it is in the process's own memory, and only its one thread uses it, outside of signal handlers. The functions here do
    // not call each other while they have it.
    unsafe { &mut *mine().copied.at() }
}

fn is_after(change: u32, other: u32) -> bool {
    change.wrapping_sub(other) as i32 >= 0
}

impl Table {
    /// Places where a group can be.
    fn places(&self, group: u64) -> impl Iterator<Item = &AtomicU64> {
        let hash = group.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - ENTRIES_SHIFT);
        (0..PROBES).map(move |probe| &self.entries[(hash as usize + probe) % ENTRIES])
    }

    /// Which of some frames it has.
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

    /// Carries out a change, by a function that gets the table and what the log is told; no other vCPU does meanwhile.
    fn change(&self, act: impl FnOnce(&mut dyn FnMut(u64, &mut dyn FnMut()))) {
        while self.is_locked.swap(true, SeqCst) {
            sys::yield_now();
        }
        act(&mut |record, act| {
            let number = self.changes.load(SeqCst).wrapping_add(1);
            // Before the entries: a vCPU that misses one waits for all that may not.
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

    /// Puts frames in; if there is no room, all others go first.
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

    /// Takes frames out.
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

    /// Takes all frames out.
    fn empty(&self) {
        self.change(|record| record(EMPTIED, &mut || self.clear()));
    }

    fn clear(&self) {
        self.entries.iter().for_each(|place| place.store(0, SeqCst));
        self.used.store(0, SeqCst);
    }

    /// What the log says of a change; `None`: it is too old.
    fn record(&self, change: u32) -> Option<u64> {
        let record = self.log[(change % LOG) as usize].load(SeqCst);
        let is_there = self.begun.load(SeqCst).wrapping_sub(change) < LOG;
        (is_there && record != EMPTIED).then_some(record)
    }
}

/// Whether this process may copy the frame at this offset of guest memory now. If not, it may be allowed to later.
pub fn may_copy(offset: u64) -> bool {
    let table = table();
    if is_written_often(offset / PAGE) {
        return false;
    }
    if holds(offset, PAGE) {
        let changes = table.changes.load(SeqCst);
        return applied().changes == changes && others().all(|(_, vcpu)| is_up_to(vcpu, changes));
    }
    Frames::in_range(offset, PAGE).for_each(|frames| table.insert(frames));
    false
}

/// Whether a vCPU write-protects what is in the table since a change, or has nothing to run.
fn is_up_to(vcpu: &Vcpu, change: u32) -> bool {
    vcpu.idle.load(SeqCst) != idle::state::BUSY
        || is_after(vcpu.frames_applied.load(SeqCst), change)
}

/// With protection keys: makes every vCPU write-protect frames of guest memory, given by their offset, so that they may be copied. Waits
/// for the other vCPUs if it may, which it must not while this one is in the guest's kernel; then returns whether they do already.
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
        let Some((index, _)) = others().find(|(_, vcpu)| !is_up_to(vcpu, changes)) else {
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

/// The guest writes to a range of guest memory, given by its offset: before it goes on, all copies of these frames go. Returns
/// whether there was one in the table.
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

/// A device writes to guest-physical memory, or has done so: the observer of the only memory that the device models of the wedge have, and
/// what the processes that carry out their requests say of the rest.
pub fn write_by_device(address: u64, length: u64) {
    if table().used.load(SeqCst) == 0 || length == 0 {
        return;
    }
    let Some(start) = crate::shared::start() else { return };
    if let Some((offset, left)) = Ram::new(&start).offset(address) {
        write(offset, left.min(length));
    }
}

/// Whether a frame of this range of guest memory is in the table.
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
    // Another vCPU's count is as good.
    let _ = place.compare_exchange(value, next, SeqCst, SeqCst);
    true
}

fn note_written(frame: u64) {
    let place = &table().written[frame as usize % WRITTEN];
    let value = place.load(SeqCst);
    let writes = if value >> 16 == frame { (value & 0xff) + 1 } else { 1 };
    place.store(frame << 16 | writes.min(OFTEN), SeqCst);
}

fn others() -> impl Iterator<Item = (usize, &'static Vcpu)> {
    let own = mine().vcpu.load(SeqCst) as usize;
    vcpus().iter().enumerate().filter(move |(index, _)| *index != own)
}

/// Before the guest runs: follows the changes of the table, and waits until no vCPU executes a copy that has to go.
pub fn settle() {
    if applied().settled == table().begun.load(SeqCst) {
        return;
    }
    loop {
        let changes = apply();
        let removals = table().removals.load(SeqCst);
        let is_done = |vcpu: &Vcpu| {
            is_up_to(vcpu, removals) || is_after(vcpu.frames_seen.load(SeqCst), removals)
        };
        let mut looks = 0;
        while let Some((index, _)) = others().find(|(_, vcpu)| !is_done(vcpu)) {
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

/// A signal has found the guest's kernel with interrupts disabled: the vCPU comes to [`settle`] before it runs user mode. For signal handlers.
pub fn see() {
    vcpu().frames_seen.store(table().changes.load(SeqCst), SeqCst);
}

/// Makes this process's mappings follow the table; returns the last change that they follow.
fn apply() -> u32 {
    let table = table();
    let changes = table.changes.load(SeqCst);
    let mut next = applied().changes;
    if let Some(ram) = crate::shared::start().map(|start| Ram::new(&start)) {
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

/// Makes this process's mappings follow one change.
fn follow(ram: &Ram, record: u64) {
    let Some(frames) = Frames::of(record) else { return };
    if record & REMOVED == 0 {
        frames.runs().for_each(|(offset, length)| memory::drop_writable(offset, length));
        add(ram, frames);
        return;
    }
    for (offset, length) in frames.runs() {
        match keys::are_on() {
            true => code::drop_copies(offset, length),
            false => calls::drop_copies(offset, length),
        }
        if protect(ram, offset, length, linux::PROT_READ | linux::PROT_WRITE).is_err() {
            // The host has no room for the pieces: in one there is.
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
        // The host has no room for the mapping.
        if !keys::are_on() {
            write(offset, length);
            continue;
        }
        applied().refused += 1;
        if applied().refused > MOST_REFUSED {
            report::fatal(format_args!("the host cannot protect guest memory: {error}"));
        }
        table().empty();
        return;
    }
}

/// Makes this process's mappings what the table says now, whatever they follow.
fn follow_all(ram: &Ram) {
    memory::drop_programs();
    // What cannot be written then is, when it faults.
    let _ = protect(ram, 0, ram.length(), linux::PROT_READ | linux::PROT_WRITE);
    for place in &table().entries {
        if let Some(frames) = Frames::of(place.load(SeqCst)) {
            add(ram, frames);
        }
    }
}

/// Changes the rights of frames in the direct map, and without protection keys in the kernel's image: with them user mode executes nothing in
/// place, and the kernel writes to what is no part of its image by the direct map.
fn protect(ram: &Ram, offset: u64, length: u64, rights: u32) -> Result<(), sys::Errno> {
    let mut done = 0;
    while done < length {
        // Guest memory has a hole, its descriptor has none.
        let Some(address) = ram.address(offset + done) else { break };
        let left = ram.offset(address).map_or(0, |(_, left)| left).min(length - done);
        if left == 0 {
            break;
        }
        // SAFETY: the wedge uses guest memory by another address.
        unsafe { sys::protect(layout::DIRECT + address, left, rights) }?;
        if address < ram.image() && !keys::are_on() {
            let left = left.min(ram.image() - address);
            // SAFETY: as above.
            unsafe { sys::protect(layout::IMAGE + address, left, rights | linux::PROT_EXEC) }?;
        }
        done += left;
    }
    Ok(())
}

/// Whether the guest's kernel has been kept from writing in its direct map or image because of the table; then the frame leaves that.
pub fn write_by_kernel(ram: &Ram, linear: u64) -> bool {
    // What follows the image is filled in, and with protection keys that is never write-protected.
    let image = linear.checked_sub(layout::IMAGE);
    let image = image.filter(|&address| address < ram.image() && !keys::are_on());
    let address = image.or_else(|| linear.checked_sub(layout::DIRECT));
    let found = address.and_then(|address| ram.offset(address));
    let Some((offset, _)) = found else { return false };
    let page = offset & !(PAGE - 1);
    if !write(page, PAGE) {
        // Another vCPU has taken it out, or the host has refused to make it writable.
        let rights = linux::PROT_READ | linux::PROT_WRITE;
        if let Err(error) = protect(ram, page, PAGE, rights) {
            report::fatal(format_args!("the host cannot protect guest memory: {error}"));
        }
    }
    true
}

//! Page frames of guest memory of which guest processes have private copies ([`crate::syscall_patch`]).
//!
//! While a frame is in the table of the VM, no process maps it writable where the guest writes: not in the direct map, not in the
//! kernel's image, not for user mode. A write faults, and a device's write is known when it completes: the frame leaves the table,
//! each process drops its copies of it before it runs the guest again, and then the write is carried out. A frame that is written
//! often is not copied for a while.
//!
//! Each process keeps the table as it has applied it. A vCPU applies it before it runs the guest ([`sync_before_entry`]); if frames have left the
//! table, it also waits until every other vCPU has applied that, is idle, or is in the guest's kernel with interrupts disabled and comes
//! here before user mode. A copy is only made once every vCPU write-protects the frame, without waiting. Entries have
//! generations: a frame that left and came back is another entry.
//!
//! With protection keys all executable pages are copies that flushes compare ([`crate::exec_scan`]); this table is not used.

use core::sync::atomic::Ordering::SeqCst;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use linux_raw_sys::general as linux;
use proto::wedge::layout;

use crate::memory::{self, PAGE, Ram};
use crate::shared::{SharedVcpu, mine, shared, vcpu, vcpus};
use crate::{device, idle, pkeys, sys, syscall_patch};

/// Frames in the table.
pub const FRAMES: usize = 256;
/// Written frames that are remembered.
const WRITTEN: usize = 256;
/// Writes after which a frame is not copied for a while.
const OFTEN: u64 = 4;
/// Refusals for which that lasts.
const REFUSALS: u64 = 64;
/// Looks at the other vCPUs before they are interrupted once more.
const LOOKS: u32 = 256;

/// The table of the VM, in shared memory.
#[repr(C)]
pub struct CopiedFrames {
    /// A vCPU changes the table.
    is_locked: AtomicBool,
    /// Changes so far.
    changes: AtomicU32,
    /// The last change that took a frame out.
    removals: AtomicU32,
    /// Frame number in the upper half, generation in the lower; 0: free.
    entries: [AtomicU64; FRAMES],
    /// Frame number, refusals and writes of frames that were written: 48, 8 and 8 bits.
    written: [AtomicU64; WRITTEN],
}

/// The table as a process has applied it.
#[derive(Clone, Copy)]
pub struct AppliedFrames {
    changes: u32,
    entries: [u64; FRAMES],
    /// Frame numbers in ascending order.
    sorted: [u32; FRAMES],
    used: usize,
}

fn table() -> &'static CopiedFrames {
    &shared().frames
}

fn applied() -> &'static mut AppliedFrames {
    // SAFETY: it is in the process's own memory, and only its one thread uses it, outside of signal handlers. The functions here do
    // not call each other while they have it.
    unsafe { &mut *mine().copied.at() }
}

fn number(entry: u64) -> u32 {
    (entry >> 32) as u32
}

fn is_after(change: u32, other: u32) -> bool {
    change.wrapping_sub(other) as i32 >= 0
}

/// Changes the table, by a function that gets the change's number; no other vCPU does meanwhile.
fn change(act: impl FnOnce(&CopiedFrames, u32)) {
    let table = table();
    while table.is_locked.swap(true, SeqCst) {
        sys::yield_now();
    }
    let number = table.changes.load(SeqCst).wrapping_add(1);
    act(table, number);
    // Who has seen this number has seen all of the change.
    table.changes.store(number, SeqCst);
    table.is_locked.store(false, SeqCst);
}

/// Whether this process may copy the frame at this offset of guest memory now. If not, it may be allowed to later.
pub fn may_copy(offset: u64) -> bool {
    let frame = (offset / PAGE) as u32;
    let table = table();
    if is_written_often(frame) {
        return false;
    }
    if holds(offset, PAGE) {
        let changes = table.changes.load(SeqCst);
        let has_applied = |vcpu: &SharedVcpu| {
            vcpu.idle.load(SeqCst) != idle::state::BUSY
                || is_after(vcpu.frames_applied.load(SeqCst), changes)
        };
        return applied().changes == changes && other_vcpus().all(|(_, vcpu)| has_applied(vcpu));
    }
    insert(frame);
    false
}

fn insert(frame: u32) {
    change(|table, change| {
        let (mut free, mut is_there) = (None, false);
        for place in &table.entries {
            match place.load(SeqCst) {
                0 => free = Some(place),
                entry => is_there |= number(entry) == frame,
            }
        }
        match free {
            _ if is_there => {}
            Some(place) => place.store(u64::from(frame) << 32 | u64::from(change), SeqCst),
            None => {
                // Another one makes room; it comes back if it is in use.
                table.removals.store(change, SeqCst);
                table.entries[change as usize % FRAMES].store(0, SeqCst);
            }
        }
    });
}

/// Takes the entries of some frames out.
fn remove(is_wanted: impl Fn(u64) -> bool) {
    change(|table, change| {
        // Before the entries: who misses one waits for all who may not.
        table.removals.store(change, SeqCst);
        for place in &table.entries {
            let entry = place.load(SeqCst);
            if entry != 0 && is_wanted(entry) {
                note_written(number(entry));
                place.store(0, SeqCst);
            }
        }
    });
}

/// The guest writes to a range of guest memory, given by its offset: before it goes on, all copies of these frames go. Returns
/// whether there was one in the table.
pub fn write(offset: u64, length: u64) -> bool {
    let (first, last) = (offset / PAGE, (offset + length - 1) / PAGE);
    let is_written = |entry| (first..=last).contains(&u64::from(number(entry)));
    let is_listed = match is_applied() {
        true => holds(offset, length),
        // It was idle: others may have copied what it has not write-protected.
        false => table()
            .entries
            .iter()
            .map(|place| place.load(SeqCst))
            .any(|entry| entry != 0 && is_written(entry)),
    };
    if is_listed {
        remove(is_written);
    }
    is_listed
}

/// A device writes to guest-physical memory, or has done so: the observer of the only memory that the device models of the wedge have, and
/// what who carries out their requests says of the rest.
pub fn write_by_device(address: u64, length: u64) {
    if is_applied() && applied().used == 0 {
        return;
    }
    let Some(start) = crate::shared::start() else { return };
    if let Some((offset, left)) = Ram::new(&start).offset(address)
        && length != 0
    {
        write(offset, left.min(length));
    }
}

/// Whether this process follows the table as it is now.
fn is_applied() -> bool {
    applied().changes == table().changes.load(SeqCst)
}

/// Whether a frame of this range of guest memory is in the table, as far as this process has applied it.
pub fn holds(offset: u64, length: u64) -> bool {
    let applied = applied();
    let frames = &applied.sorted[..applied.used];
    let next = frames.partition_point(|&frame| u64::from(frame) < offset / PAGE);
    frames.get(next).is_some_and(|&frame| u64::from(frame) * PAGE < offset + length)
}

fn is_written_often(frame: u32) -> bool {
    let place = &table().written[frame as usize % WRITTEN];
    let value = place.load(SeqCst);
    let (writes, refusals) = (value & 0xff, value >> 8 & 0xff);
    if value >> 16 != u64::from(frame) || writes < OFTEN {
        return false;
    }
    let next = if refusals + 1 == REFUSALS { 0 } else { value + 0x100 };
    // Another vCPU's count is as good.
    let _ = place.compare_exchange(value, next, SeqCst, SeqCst);
    true
}

fn note_written(frame: u32) {
    let place = &table().written[frame as usize % WRITTEN];
    let value = place.load(SeqCst);
    let writes = if value >> 16 == u64::from(frame) { (value & 0xff) + 1 } else { 1 };
    place.store(u64::from(frame) << 16 | writes.min(OFTEN), SeqCst);
}

fn other_vcpus() -> impl Iterator<Item = (usize, &'static SharedVcpu)> {
    let own = mine().vcpu.load(SeqCst) as usize;
    vcpus().iter().enumerate().filter(move |(index, _)| *index != own)
}

/// Before the guest runs: applies the changes of the table, and waits until no vCPU executes a copy that has to go.
pub fn sync_before_entry() {
    if applied().changes == table().changes.load(SeqCst) {
        return;
    }
    loop {
        let changes = apply();
        vcpu().frames_applied.store(changes, SeqCst);
        let removals = table().removals.load(SeqCst);
        let is_done = |vcpu: &SharedVcpu| {
            vcpu.idle.load(SeqCst) != idle::state::BUSY
                || is_after(vcpu.frames_applied.load(SeqCst), removals)
                || is_after(vcpu.frames_seen.load(SeqCst), removals)
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
        if table().changes.load(SeqCst) == changes {
            return;
        }
    }
}

/// A signal has found the guest's kernel with interrupts disabled: the vCPU comes to [`sync_before_entry`] before it runs user mode. For signal handlers.
pub fn note_interrupted_kernel() {
    vcpu().frames_seen.store(table().changes.load(SeqCst), SeqCst);
}

/// Makes this process's mappings follow the table; returns the last change that they follow.
fn apply() -> u32 {
    let changes = table().changes.load(SeqCst);
    if applied().changes == changes {
        return changes;
    }
    for (index, place) in table().entries.iter().enumerate() {
        let entry = place.load(SeqCst);
        let old = core::mem::replace(&mut applied().entries[index], entry);
        if old == entry {
            continue;
        }
        if old != 0 {
            syscall_patch::drop_copies(u64::from(number(old)) * PAGE);
            protect(number(old), linux::PROT_READ | linux::PROT_WRITE);
        }
        if entry != 0 && !protect(number(entry), linux::PROT_READ) {
            // The host has no room for the mapping: it is not copied.
            remove(|other| other == entry);
        }
    }
    let applied = applied();
    applied.changes = changes;
    applied.used = 0;
    for entry in applied.entries.into_iter().filter(|&entry| entry != 0) {
        applied.sorted[applied.used] = number(entry);
        applied.used += 1;
    }
    applied.sorted[..applied.used].sort_unstable();
    changes
}

/// Changes the rights of a frame in the direct map and in the kernel's image, and drops its writable mappings of user mode; `false`:
/// the host refuses.
fn protect(frame: u32, rights: u32) -> bool {
    let offset = u64::from(frame) * PAGE;
    let Some(ram) = crate::shared::start().map(|start| Ram::new(&start)) else { return false };
    let Some(address) = ram.address(offset) else { return false };
    if rights & linux::PROT_WRITE == 0 {
        memory::drop_writable(offset);
    }
    let mut done = syscall_patch::protect(layout::DIRECT + address, rights).is_ok();
    if address < ram.image() {
        done &= syscall_patch::protect(layout::IMAGE + address, rights | linux::PROT_EXEC).is_ok();
    }
    done
}

/// Whether the table is used: the mode has private copies of other pages than protection keys have.
pub fn is_enabled() -> bool {
    !pkeys::is_enabled()
}

/// The offset in guest memory of a write by the guest's kernel in its direct map or image, if it is in the table.
pub fn written_by_kernel(ram: &Ram, linear: u64) -> Option<u64> {
    let address = match linear {
        layout::IMAGE..layout::LOW_END => linear - layout::IMAGE,
        _ => linear.checked_sub(layout::DIRECT)?,
    };
    let (offset, _) = ram.offset(address)?;
    holds(offset & !(PAGE - 1), PAGE).then_some(offset & !(PAGE - 1))
}

//! Copies of page frames of guest memory: pages with rewritten system calls
//! ([`crate::mmu::rewrite`]), and with protection keys all executable user pages
//! ([`crate::mmu::copies`]).
//!
//! While a frame is in the VM's table ([`CopiedFrames`]), no process maps it writable for the
//! guest: not in the direct map, not in the kernel image, not for user mode. A write faults, and a
//! device's write is reported on completion: the frame leaves the table, each process drops its
//! copies before it runs the guest again, and then the write is carried out.
//!
//! A vCPU applies the table before it runs the guest ([`Mmu::sync_before_entry`]). If frames have
//! left the table, it also waits until every other vCPU has applied that, is idle, or is in the
//! guest kernel with interrupts disabled and calls [`Mmu::sync_before_entry`] before user mode. A
//! copy is created only once every vCPU that is not idle write-protects the frame. Rewritten system
//! calls can be postponed until then ([`Mmu::may_copy`]); a page that executes only from its copy
//! waits ([`Mmu::track`]), which only user mode may do, since it holds no lock of the guest kernel.
//! A frequently written frame has no rewritten system calls for a while.

use core::sync::atomic::Ordering::SeqCst;

use linux_raw_sys::general as linux;
use proto::errno::Errno;
use proto::hosted::layout;

use crate::mmu::Mmu;
use crate::mmu::frame_table::{CopiedFrames, Frames, REMOVED, is_after};
use crate::mmu::host::{HostMap, MappingListener};
use crate::mmu::ram::{PAGE, Ram};
use crate::state::config::config;
use crate::state::shared::{SharedVcpu, idle_state, shared};

/// Number of checks of the other vCPUs between interrupts.
const LOOKS: u32 = 256;
/// Failures of protecting memory after which the VM ends, with protection keys.
const MOST_REFUSED: u32 = 8;

/// Returns whether a vCPU has write-protected the frames of the table as of a change, or is idle.
fn is_up_to(vcpu: &SharedVcpu, change: u32) -> bool {
    vcpu.idle.load(SeqCst) != idle_state::BUSY || is_after(vcpu.frames_applied.load(SeqCst), change)
}

/// Notes in a signal handler that the guest kernel was interrupted with interrupts disabled: the
/// vCPU calls [`Mmu::sync_before_entry`] before it runs user mode.
pub fn note_interrupted_kernel(vcpu: &SharedVcpu, table: &CopiedFrames) {
    vcpu.frames_seen.store(table.changes.load(SeqCst), SeqCst);
}

/// Handles a device's write to guest-physical memory, before or after it: observer of the device
/// models' memory, also called for requests that other processes carry out.
pub fn write_by_device(address: u64, length: u64) {
    let table = &shared().frames;
    if table.is_empty() || length == 0 {
        return;
    }
    if let Some((offset, left)) = Ram::new(&config().start).offset(address) {
        table.write(offset, left.min(length));
    }
}

impl<H: HostMap + MappingListener> Mmu<'_, H> {
    fn other_vcpus(&self) -> impl Iterator<Item = (usize, &SharedVcpu)> {
        let own = self.vm.index;
        self.vm.vcpus.iter().enumerate().filter(move |(index, _)| *index != own)
    }

    /// Returns whether this process may copy the frame at this offset of guest memory now. If not,
    /// a later call may succeed.
    pub(super) fn may_copy(&mut self, offset: u64) -> bool {
        let table = self.vm.table;
        if table.is_written_often(offset / PAGE) {
            return false;
        }
        if table.holds(offset, PAGE) {
            let changes = table.changes.load(SeqCst);
            return self.space.applied.changes == changes
                && self.other_vcpus().all(|(_, vcpu)| is_up_to(vcpu, changes));
        }
        table.insert_range(offset, PAGE);
        false
    }

    /// With protection keys: makes every vCPU write-protect frames of guest memory, given by their
    /// offset, so that they may be copied. Waits for the other vCPUs only if permitted, which is
    /// not the case in the guest kernel; else returns whether they have done so already.
    pub(super) fn track(&mut self, offset: u64, length: u64, may_wait: bool) -> bool {
        let table = self.vm.table;
        let mut looks = 0;
        loop {
            table.insert_range(offset, length);
            let changes = self.apply();
            if !table.has_all(offset, length) {
                continue;
            }
            let late = self.other_vcpus().find(|(_, vcpu)| !is_up_to(vcpu, changes));
            let Some((index, _)) = late else { return true };
            if !may_wait {
                return false;
            }
            if looks % LOOKS == 0 {
                self.host.interrupt(index);
            }
            looks += 1;
            self.host.yield_now();
        }
    }

    /// Returns whether this process has nothing to apply or to wait for before the guest runs.
    pub fn is_in_sync(&self) -> bool {
        self.space.applied.settled == self.vm.table.begun.load(SeqCst)
    }

    /// Applies the changes of the table before the guest runs, and waits until no vCPU executes a
    /// stale copy.
    pub fn sync_before_entry(&mut self) {
        if self.is_in_sync() {
            return;
        }
        let table = self.vm.table;
        loop {
            let changes = self.apply();
            let removals = table.removals.load(SeqCst);
            let is_done = |vcpu: &SharedVcpu| {
                is_up_to(vcpu, removals) || is_after(vcpu.frames_seen.load(SeqCst), removals)
            };
            let mut looks = 0;
            loop {
                let late = self.other_vcpus().find(|(_, vcpu)| !is_done(vcpu));
                let Some((index, _)) = late else { break };
                if table.changes.load(SeqCst) != changes {
                    break;
                }
                if looks % LOOKS == 0 {
                    self.host.interrupt(index);
                }
                looks += 1;
                self.host.yield_now();
            }
            if table.begun.load(SeqCst) == changes {
                self.space.applied.settled = changes;
                return;
            }
        }
    }

    /// Applies the table's changes to this process's mappings; returns the last applied change.
    fn apply(&mut self) -> u32 {
        let table = self.vm.table;
        let changes = table.changes.load(SeqCst);
        let mut next = self.space.applied.changes;
        while next != changes {
            next = next.wrapping_add(1);
            match table.record(next) {
                Some(record) => self.apply_one(record),
                None => {
                    self.apply_all();
                    break;
                }
            }
        }
        self.space.applied.changes = changes;
        self.vm.vcpu.frames_applied.store(changes, SeqCst);
        changes
    }

    /// Applies one change to this process's mappings.
    fn apply_one(&mut self, record: u64) {
        let Some(frames) = Frames::of(record) else { return };
        if record & REMOVED == 0 {
            frames.runs().for_each(|(offset, length)| self.drop_writable(offset, length));
            self.protect_frames(frames);
            return;
        }
        for (offset, length) in frames.runs() {
            match self.vm.modes.keys {
                true => self.drop_code_copies(offset, length),
                false => self.drop_call_copies(offset, length),
            }
            if self.protect(offset, length, linux::PROT_READ | linux::PROT_WRITE).is_err() {
                // The host has no memory for splitting the mapping; one mapping for all needs none.
                self.apply_all();
                return;
            }
        }
    }

    /// Write-protects frames in this process.
    fn protect_frames(&mut self, frames: Frames) {
        for (offset, length) in frames.runs() {
            let Err(error) = self.protect(offset, length, linux::PROT_READ) else {
                self.space.applied.refused = 0;
                continue;
            };
            // The host has no memory for the mapping.
            if !self.vm.modes.keys {
                self.vm.table.write(offset, length);
                continue;
            }
            self.space.applied.refused += 1;
            if self.space.applied.refused > MOST_REFUSED {
                self.host.fatal(format_args!("cannot protect guest memory: {error}"));
            }
            self.vm.table.empty();
            return;
        }
    }

    /// Makes this process's mappings equal to the table, whatever they have applied.
    fn apply_all(&mut self) {
        self.drop_user_pages();
        let all = self.vm.ram.length();
        // A page that stays read-only is handled when it faults.
        let _ = self.protect(0, all, linux::PROT_READ | linux::PROT_WRITE);
        for frames in self.vm.table.all() {
            self.protect_frames(frames);
        }
    }

    /// Changes the rights of frames in the direct map, and without protection keys in the kernel
    /// image: with keys user mode executes no original pages, and the kernel writes other memory
    /// than its image through the direct map.
    fn protect(&mut self, offset: u64, length: u64, rights: u32) -> Result<(), Errno> {
        let ram = self.vm.ram;
        let mut done = 0;
        while done < length {
            // Guest memory has a hole, its file has none.
            let Some(address) = ram.address(offset + done) else { break };
            let left = ram.offset(address).map_or(0, |(_, left)| left).min(length - done);
            if left == 0 {
                break;
            }
            self.host.protect(layout::DIRECT + address, left, rights)?;
            let image = ram.image();
            let (from, to) = (address.max(image.start), (address + left).min(image.end));
            if from < to && !self.vm.modes.keys {
                let rights = rights | linux::PROT_EXEC;
                self.host.protect(layout::IMAGE + from, to - from, rights)?;
            }
            done += left;
        }
        Ok(())
    }

    /// Handles a write fault of the guest kernel in its direct map or image that is due to the
    /// table; the frame leaves the table.
    pub fn write_by_kernel(&mut self, linear: u64) -> bool {
        let ram = self.vm.ram;
        // With protection keys the image is never write-protected. Modules after it are mapped on
        // demand.
        let image = linear.checked_sub(layout::IMAGE);
        let image = image.filter(|address| ram.image().contains(address) && !self.vm.modes.keys);
        let address = image.or_else(|| linear.checked_sub(layout::DIRECT));
        let found = address.and_then(|address| ram.offset(address));
        let Some((offset, _)) = found else { return false };
        let page = offset & !(PAGE - 1);
        if !self.vm.table.write(page, PAGE) {
            // Another vCPU has removed it, or the host has refused to make it writable.
            let rights = linux::PROT_READ | linux::PROT_WRITE;
            if self.protect(page, PAGE, rights).is_ok() {
                return true;
            }
            // At its limit of mappings the host cannot split one.
            self.drop_user_pages();
            if let Err(error) = self.protect(page, PAGE, rights) {
                self.host.fatal(format_args!("cannot protect guest memory: {error}"));
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mmu::testing::{
        Call, DATA, EXEC, Event, HIGH, IMAGE_START, LOW, READ, Rig, USER, WRITE,
    };
    use hw_walk::Intent;

    #[test]
    fn frames_in_the_table_are_write_protected() {
        let mut rig = Rig::new();
        rig.set(USER, 0x8_0000, DATA);
        rig.fill(USER, Intent::Write);
        rig.table.insert_range(0x8_0000, 2 * PAGE);
        rig.sync();
        // The writable mapping is dropped, and direct map and image are protected.
        assert_eq!(rig.host.at(USER), None);
        assert_eq!(rig.host.closed[&(layout::DIRECT + 0x8_0000)], (2 * PAGE, READ));
        assert_eq!(rig.host.closed[&(layout::IMAGE + 0x8_0000)], (2 * PAGE, READ | EXEC));
        assert!(rig.mmu().is_in_sync());
        assert_eq!(rig.vcpus[0].frames_applied.load(SeqCst), 1);
    }

    #[test]
    fn with_keys_the_image_stays_writable() {
        let mut rig = Rig::with_keys();
        rig.table.insert_range(0x8_0000, PAGE);
        rig.sync();
        assert!(!rig.host.closed.contains_key(&(layout::IMAGE + 0x8_0000)));
    }

    #[test]
    fn protection_follows_the_hole_of_guest_memory() {
        let mut rig = Rig::new();
        let all = LOW + HIGH;
        rig.mmu().protect(0, all, READ | WRITE).unwrap();
        assert_eq!(rig.host.closed[&layout::DIRECT], (LOW, READ | WRITE));
        assert_eq!(rig.host.closed[&(layout::DIRECT + (1 << 32))], (HIGH, READ | WRITE));
        let image = (LOW - IMAGE_START, READ | WRITE | EXEC);
        assert_eq!(rig.host.closed[&(layout::IMAGE + IMAGE_START)], image);
    }

    #[test]
    fn a_kernel_write_takes_the_frame_from_the_table() {
        let mut rig = Rig::new();
        for base in [layout::DIRECT, layout::IMAGE] {
            rig.table.insert_range(0x8_0000, PAGE);
            rig.sync();
            assert!(rig.mmu().write_by_kernel(base + 0x8_0123));
            assert!(!rig.table.holds(0x8_0000, PAGE));
            rig.sync();
            assert_eq!(rig.host.closed[&(layout::DIRECT + 0x8_0000)], (PAGE, READ | WRITE));
        }
        // A frame that another vCPU has removed is made writable at once.
        rig.host.closed.clear();
        assert!(rig.mmu().write_by_kernel(layout::DIRECT + 0x8_0000));
        assert_eq!(rig.host.closed[&(layout::DIRECT + 0x8_0000)], (PAGE, READ | WRITE));
        assert!(!rig.mmu().write_by_kernel(layout::DIRECT + LOW));
        assert!(!rig.mmu().write_by_kernel(USER));
        // Memory below the image is not mapped there.
        assert!(!rig.mmu().write_by_kernel(layout::IMAGE + IMAGE_START - 1));
    }

    #[test]
    fn a_kernel_write_that_needs_a_mapping_drops_user_pages() {
        let mut rig = Rig::new();
        rig.set(USER, 0x9_0000, DATA);
        rig.fill(USER, Intent::Read);
        rig.host.fails_after = Some(0);
        assert!(rig.mmu().write_by_kernel(layout::DIRECT + 0x8_0000));
        assert_eq!(rig.host.closed[&(layout::DIRECT + 0x8_0000)], (PAGE, READ | WRITE));
        assert!(rig.host.pages.is_empty());
    }

    #[test]
    #[should_panic(expected = "cannot protect guest memory")]
    fn a_frame_that_stays_read_only_for_the_kernel_ends_the_vm() {
        let mut rig = Rig::new();
        (rig.host.fails_after, rig.host.fails_again) = (Some(0), usize::MAX);
        rig.host.fails = |call| call == Call::Protect;
        rig.mmu().write_by_kernel(layout::DIRECT + 0x8_0000);
    }

    #[test]
    fn a_frame_may_be_copied_once_all_busy_vcpus_protect_it() {
        let mut rig = Rig::new();
        assert!(!rig.mmu().may_copy(0x8_0000));
        // Not applied yet.
        assert!(!rig.mmu().may_copy(0x8_0000));
        rig.sync();
        assert!(rig.mmu().may_copy(0x8_0000));
        rig.vcpus[1].idle.store(idle_state::BUSY, SeqCst);
        assert!(!rig.mmu().may_copy(0x8_0000));
        rig.vcpus[1].frames_applied.store(1, SeqCst);
        assert!(rig.mmu().may_copy(0x8_0000));
    }

    #[test]
    fn tracking_waits_only_if_permitted() {
        let mut rig = Rig::with_keys();
        rig.vcpus[1].idle.store(idle_state::BUSY, SeqCst);
        assert!(!rig.mmu().track(0x8_0000, PAGE, false));
        let other = &rig.vcpus[1];
        rig.host.on_yield = Some(std::boxed::Box::new(|| other.frames_applied.store(1, SeqCst)));
        assert!(rig.mmu().track(0x8_0000, PAGE, true));
        assert!(rig.host.events.contains(&Event::Interrupt(1)));
    }

    #[test]
    fn a_removal_is_awaited_unless_the_other_vcpu_has_seen_it_in_the_kernel() {
        let mut rig = Rig::new();
        rig.vcpus[1].idle.store(idle_state::BUSY, SeqCst);
        rig.table.insert_range(0x8_0000, PAGE);
        rig.sync();
        rig.table.write(0x8_0000, PAGE);
        let (other, table) = (&rig.vcpus[1], rig.table);
        rig.host.on_yield =
            Some(std::boxed::Box::new(move || note_interrupted_kernel(other, table)));
        assert!(!rig.mmu().is_in_sync());
        rig.sync();
        assert!(rig.mmu().is_in_sync() && rig.host.events.contains(&Event::Interrupt(1)));
    }

    #[test]
    fn a_process_that_has_missed_the_log_starts_over() {
        let mut rig = Rig::new();
        rig.set(USER, 0x8_0000, DATA);
        rig.fill(USER, Intent::Write);
        for frame in 0..1100 {
            rig.table.insert_range((0x200 + frame) * PAGE, PAGE);
        }
        rig.sync();
        assert!(rig.host.pages.is_empty());
        assert_eq!(rig.host.closed[&layout::DIRECT], (LOW, READ | WRITE));
        assert_eq!(rig.host.closed[&(layout::DIRECT + 0x20_0000)].1, READ);
    }

    #[test]
    fn a_frame_that_cannot_be_protected_leaves_the_table() {
        let mut rig = Rig::new();
        rig.table.insert_range(0x8_0000, PAGE);
        rig.host.fails_after = Some(0);
        rig.sync();
        assert!(rig.table.is_empty());
        // With protection keys the whole table is given up.
        let mut rig = Rig::with_keys();
        rig.table.insert_range(0x8_0000, PAGE);
        rig.table.insert_range(0x200_000, PAGE);
        rig.host.fails_after = Some(0);
        rig.sync();
        assert!(rig.table.is_empty());
    }
}

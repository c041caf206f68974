//! Another vCPU writes an entry while the kernel handles a page fault of this one, between any two
//! of its accesses to memory.

use super::*;
use kernel_x86::shadow::testing::set_store;

/// Bits that a walk sets.
const MARKS: u64 = entry::ACCESSED | entry::DIRTY;
/// Most accesses to memory before the store: more than those of most page faults.
const LATEST: u64 = 48;

/// A store of another vCPU.
pub(super) struct Race {
    at: u64,
    value: u64,
}

impl World<'_> {
    /// An access with a store in the middle of its page fault; then the address is flushed, and
    /// accessed again.
    pub(super) fn race(&mut self) -> Found {
        let address = self.address();
        let (at, value) = self.change_on_path(address);
        let after = self.choices.below(LATEST);
        let user = self.choices.below(2) == 0;
        let intent = if self.choices.below(2) == 0 { Intent::Write } else { Intent::Read };
        let access = GuestAccess { address, intent, user };
        self.racing = Some((after, at, value));
        let result = self.check(access);
        self.racing = None;
        result?;
        match self.choices.below(3) {
            0 => self.invalidate_address(address)?,
            1 => self.load_root(self.guest.registers.cr3)?,
            _ => {}
        }
        self.check(access)
    }

    /// A new value of an entry, most often of one that a walk for the address reads.
    fn change_on_path(&mut self, address: u64) -> (u64, u64) {
        let path = self.guest.walk(address).path;
        let last = path.len().saturating_sub(1);
        let depth = if self.choices.below(2) == 0 { last } else { self.choices.below(4) as usize };
        match path.get(depth).map(|&at| (at, slot_of(at))) {
            Some((at, (number, slot))) if (number as u64) < TABLES => {
                let level = (last - depth) as u32;
                (at, self.entry(level, self.guest.tables[number][slot]))
            }
            _ => self.change(),
        }
    }

    /// Lets the store begin, unless a walk may use its entry at two levels: such a walk may find
    /// the old value and the new one.
    pub(super) fn begin_race(&mut self) -> Option<Race> {
        let (after, at, value) = self.racing.take()?;
        let (number, slot) = slot_of(at);
        let is_once = |guest: &Guest| {
            let twice = |address| {
                let path = guest.walk(address).path;
                path.iter().filter(|&&other| other == at).count() > 1
            };
            !addresses(guest.registers.mode()).into_iter().any(twice)
        };
        let was_once = is_once(&self.guest);
        let old = core::mem::replace(&mut self.guest.tables[number][slot], value);
        let is_safe = was_once && is_once(&self.guest);
        self.guest.tables[number][slot] = old;
        let physical = (GUEST_AT << 12) + at;
        if is_safe {
            set_store(Some(Store { after, at: physical, value }));
        }
        is_safe.then_some(Race { at, value })
    }

    /// Takes the store over, and the bits that the walk has set before and after it.
    pub(super) fn end_race(&mut self, race: Race, address: u64, walk: &Walk) -> Found {
        let Race { at, value } = race;
        let (number, slot) = slot_of(at);
        let word = &self.memory(number as u64)[slot];
        if let Some(store) = set_store(None) {
            word.store(store.value, Relaxed);
        }
        let now = word.load(Relaxed);
        if now & !MARKS != value & !MARKS || value & !now != 0 {
            return Err(format!("entry {at:#x} is {now:#x} after the store of {value:#x}"));
        }
        if self.options & option::TRACE != 0 {
            self.note_unseen(at, value);
        }
        self.last = Some((at, self.guest.tables[number][slot]));
        self.guest.tables[number][slot] = now;
        let after = self.guest.walk(address);
        for &at in walk.path.iter().chain(&after.path) {
            let (number, slot) = slot_of(at);
            let Some(table) = self.guest.tables.get(number) else { continue };
            let (real, known) = (self.memory(number as u64)[slot].load(Relaxed), table[slot]);
            if (real ^ known) & !MARKS != 0 {
                return Err(format!("entry {at:#x} is {real:#x} instead of {known:#x}"));
            }
            self.guest.tables[number][slot] = real;
        }
        self.note(Some(at));
        self.unmark_all();
        Ok(())
    }
}

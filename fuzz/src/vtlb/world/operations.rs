//! Operations of the model: what the guest, devices and the VMM change.

use super::*;

impl World<'_> {
    /// An entry on the way to a watched address, and a new value for it; or the entry that was
    /// written last, and its value before.
    pub(super) fn change(&mut self) -> (u64, u64) {
        if let (Some(last), 0) = (self.last, self.choices.below(10)) {
            return last;
        }
        let mode = self.mode();
        let mode = if mode == Mode::Off { Mode::Long } else { mode };
        let choice = self.choices.below(Guest::roots(mode));
        let mut table = self.guest.root(mode, choice);
        let all = addresses(mode);
        let address = all[self.choices.below(all.len() as u64) as usize];
        let stop = self.choices.below(6) as u32;
        let top = if mode == Mode::Long { 3 } else { 2 };
        for level in (0..=top).rev() {
            let slots = if mode == Mode::Pae && level == 2 { 4 } else { 512 };
            let at = table + 8 * (address >> (12 + 9 * level) & (slots - 1));
            let (number, slot) = slot_of(at);
            let old = self.guest.tables[number][slot];
            let next = (old & entry::ADDRESS) >> 12;
            let is_leaf = level == 0 || level < 3 && old & entry::LARGE != 0 || next >= TABLES;
            if is_leaf || old & entry::PRESENT == 0 || level == stop {
                return (at, self.entry(level, old));
            }
            table = old & entry::ADDRESS;
        }
        unreachable!("level 0 is a leaf")
    }

    /// A new entry, often similar to the old one.
    pub(super) fn entry(&mut self, level: u32, old: u64) -> u64 {
        let mut bit = |mask: u64| if self.choices.below(2) == 0 { mask } else { 0 };
        let mut rights = entry::PRESENT | bit(entry::WRITE) | bit(entry::USER);
        let global = bit(entry::GLOBAL);
        if bit(entry::NX) & bit(entry::NX) != 0 {
            rights |= entry::NX;
        }
        match self.choices.below(10) {
            0 => 0,
            1 => old & !entry::ACCESSED & !entry::DIRTY,
            2 => old ^ entry::WRITE,
            3 => old ^ entry::USER,
            // Beyond the physical addresses: reserved.
            4 if self.choices.below(8) == 0 => old | 1 << 45,
            _ if level == 0 => self.data_page() << 12 | rights | global,
            _ if level == 1 && self.choices.below(3) == 0 => {
                self.choices.below(PAGES >> 9) << 21 | rights | entry::LARGE | global
            }
            _ if level == 2 && self.choices.below(12) == 0 => rights | entry::LARGE | global,
            // Any table, also one that is in use at another level.
            _ if self.choices.below(24) == 0 => self.choices.below(TABLES) << 12 | rights,
            // A table of the right level: each page is of one.
            _ => {
                let first = ROOTS + KINDS * (3 - u64::from(level));
                let rights = rights & !entry::NX | entry::WRITE | entry::USER;
                (first + self.choices.below(KINDS)) << 12 | rights
            }
        }
    }

    /// A guest page for a leaf: data, a page table, often one in use, or any.
    pub(super) fn data_page(&mut self) -> u64 {
        match self.choices.below(8) {
            0 => self.choices.below(TABLES),
            1 => {
                let address = self.address();
                let path = self.guest.walk(address).path;
                let at = path.get(self.choices.below(4) as usize).or(path.last());
                at.map_or(0, |at| slot_of(*at).0 as u64)
            }
            2 => self.choices.below(PAGES + 8),
            _ => DATA + self.choices.below(DATA_PAGES),
        }
    }

    /// Writes an entry. Returns its value before.
    pub(super) fn write_entry(&mut self, at: u64, value: u64) -> u64 {
        let (number, slot) = slot_of(at);
        self.memory(number as u64)[slot].store(value, Relaxed);
        core::mem::replace(&mut self.guest.tables[number][slot], value)
    }

    /// The guest has written an entry.
    pub(super) fn written(&mut self, at: u64, value: u64) {
        let old = self.write_entry(at, value);
        self.last = Some((at, old));
        let is_cleared = old & !value & (entry::ACCESSED | entry::DIRTY) != 0;
        self.note(is_cleared.then_some(at));
    }

    /// The guest writes an entry by its map of memory, which may be traced.
    pub(super) fn store_by_map(&mut self) -> Found {
        let (at, value) = self.change();
        self.store(at, value)
    }

    pub(super) fn store(&mut self, at: u64, value: u64) -> Found {
        let address = self.guest.direct(at);
        if let Outcome::Done(_) = self.access_fixed(address, Intent::Write)? {
            self.written(at, value);
        }
        Ok(())
    }

    /// Accesses an address whose translation does not change.
    pub(super) fn access_fixed(&mut self, address: u64, intent: Intent) -> Found<Outcome> {
        let access = GuestAccess { address, intent, user: false };
        let outcome = self.access(access)?;
        match self.agrees(self.guest.walk(address).fact, access, outcome) {
            true => Ok(outcome),
            false => Err(format!("{access:x?} in the map of memory: {outcome:x?}")),
        }
    }

    /// The guest writes an entry of a table that one of the watched addresses leads to.
    pub(super) fn store_by_alias(&mut self) -> Found {
        let mut address = self.address();
        let is_table = |address: u64| match self.guest.walk(address).fact {
            Fact::Page(right) => right.write && right.page < TABLES,
            _ => false,
        };
        if let Some(other) = addresses(self.mode()).into_iter().find(|other| is_table(*other)) {
            address = other;
        }
        let access =
            GuestAccess { address, intent: Intent::Write, user: self.choices.below(4) == 0 };
        self.check(access)?;
        // The same translation again.
        let outcome = self.access(access)?;
        let other = self.address();
        let (at, value) = self.change();
        let Outcome::Done(host) = outcome else { return Ok(()) };
        let table = host.wrapping_sub(GUEST_AT);
        if table < TABLES {
            let path = self.guest.walk(other).path;
            let used = path.into_iter().find(|at| slot_of(*at).0 as u64 == table);
            self.written(used.unwrap_or(table << 12 | at & 0xff8), value);
        }
        Ok(())
    }

    /// The guest changes an entry on the way to an address, flushes the address while another root
    /// is loaded, and accesses it.
    pub(super) fn invalidate_elsewhere(&mut self) -> Found {
        let address = self.address();
        let read = GuestAccess { address, intent: Intent::Read, user: false };
        self.check(read)?;
        let (mode, root) = (self.mode(), self.guest.registers.cr3);
        if let Some(&at) = self.guest.walk(address).path.last() {
            let (number, slot) = slot_of(at);
            if (number as u64) < TABLES {
                let value = self.entry(0, self.guest.tables[number][slot]);
                self.store(at, value)?;
            }
        }
        let choice = self.choices.below(Guest::roots(mode));
        self.load_root(self.guest.root(mode, choice))?;
        self.invalidate_address(address)?;
        self.load_root(root)?;
        self.check(read)
    }

    /// The guest grants a right in an entry above the leaf of an address, uses it, takes it back
    /// and loads the root again.
    pub(super) fn change_above(&mut self) -> Found {
        let address = self.address();
        let user = self.choices.below(2) == 0;
        let bit = if user { entry::USER } else { entry::WRITE };
        let access = GuestAccess { address, intent: Intent::Write, user };
        let path = self.guest.walk(address).path;
        let depth = self.choices.below(4) as usize;
        let Some(&at) = path.get(depth).filter(|_| depth + 1 < path.len()) else { return Ok(()) };
        let (number, slot) = slot_of(at);
        if number as u64 >= TABLES {
            return Ok(());
        }
        self.store(at, self.guest.tables[number][slot] & !bit)?;
        self.load_root(self.guest.registers.cr3)?;
        for grants in [false, true, false] {
            let value = self.guest.tables[number][slot] & !bit;
            self.store(at, value | if grants { bit } else { 0 })?;
            self.check(GuestAccess { address, intent: Intent::Read, user: false })?;
            self.check(access)?;
        }
        self.load_root(self.guest.registers.cr3)?;
        self.check(access)
    }

    /// The guest fills its lower half with whole tables of pages, reads all of them, and maps other
    /// pages there. Then it loads another root and this one.
    pub(super) fn fill_tables(&mut self) -> Found {
        let mode = self.mode();
        let all = addresses(mode).into_iter().filter(|address| address >> 63 == 0);
        let ranges: BTreeSet<u64> = all.map(|address| address >> 21).collect();
        let first = self.choices.below(DATA_PAGES);
        self.map_ranges(&ranges, first)?;
        for page in ranges.iter().flat_map(|range| range << 9..(range + 1) << 9) {
            self.access(GuestAccess { address: page << 12, intent: Intent::Read, user: false })?;
        }
        self.map_ranges(&ranges, first + 1)?;
        let root = self.guest.registers.cr3;
        self.load_root(self.guest.root(mode, 0))?;
        self.load_root(root)
    }

    /// Maps pages of data from `first` on to ranges of 2 MiB.
    pub(super) fn map_ranges(&mut self, ranges: &BTreeSet<u64>, first: u64) -> Found {
        let mode = self.mode();
        let bits = entry::PRESENT | entry::WRITE | entry::ACCESSED;
        for (number, range) in (0..).zip(ranges) {
            let [upper, middle] = [range >> 18, range >> 9].map(|index| index % KINDS);
            let tables = [ROOTS + upper, ROOTS + KINDS + middle, ROOTS + 2 * KINDS + number];
            let mut table = self.guest.registers.cr3 & !0x1f;
            for (level, next) in (1..=3).rev().zip(tables) {
                if mode == Mode::Long || mode == Mode::Pae && level < 3 {
                    let slots = if mode == Mode::Pae && level == 2 { 4 } else { ENTRIES as u64 };
                    let slot = (range >> (9 * (level - 1))) % slots;
                    self.store(table + 8 * slot, next << 12 | bits)?;
                    table = next << 12;
                }
            }
            for slot in 0..ENTRIES as u64 * u64::from(mode != Mode::Off) {
                let page = DATA + (first + slot) % DATA_PAGES;
                let at = table + 8 * slot;
                let address = self.guest.direct(at);
                if let Outcome::Done(_) = self.access_fixed(address, Intent::Write)? {
                    self.write_entry(at, page << 12 | bits);
                }
            }
        }
        self.note(None);
        self.unmark_all();
        Ok(())
    }

    /// A device or another vCPU writes an entry: no shadow leaf of this vCPU shows it.
    pub(super) fn store_by_device(&mut self) {
        let (at, value) = self.change();
        if self.options & option::TRACE != 0 {
            self.note_unseen(at, value);
        }
        self.written(at, value);
    }

    /// With tracing such a store takes effect with `INVLPG` only: what the tables say in any root
    /// before it remains allowed there.
    pub(super) fn note_unseen(&mut self, at: u64, value: u64) {
        let (number, slot) = slot_of(at);
        let mode = self.mode();
        let current = self.guest.registers.cr3;
        for choice in 0..Guest::roots(mode) {
            let root = self.guest.root(mode, choice);
            for address in addresses(mode) {
                self.guest.registers.cr3 = root;
                let before = self.guest.walk(address);
                if !before.path.contains(&at) {
                    continue;
                }
                let old = core::mem::replace(&mut self.guest.tables[number][slot], value);
                let after = self.guest.walk(address);
                self.guest.tables[number][slot] = old;
                let unseen = self.unseen.entry((root, address)).or_default();
                for fact in [before.fact, after.fact] {
                    if !unseen.facts.contains(&fact) {
                        unseen.facts.push(fact);
                    }
                }
            }
        }
        self.guest.registers.cr3 = current;
    }

    pub(super) fn invalidate(&mut self) -> Found {
        let address = self.address();
        self.invalidate_address(address)
    }

    pub(super) fn invalidate_address(&mut self, address: u64) -> Found {
        let by_vmm = self.choices.below(4) == 0;
        if by_vmm || !self.instruction(exit::INVLPG, INVALIDATE, address)? {
            self.bounded(|vcpu| vcpu.invalidate(address));
            self.enter();
        }
        self.flush_address(address);
        Ok(())
    }

    pub(super) fn load(&mut self) -> Found {
        let mode = self.mode();
        let choice = self.choices.below(Guest::roots(mode));
        self.load_root(self.guest.root(mode, choice))
    }

    pub(super) fn load_root(&mut self, cr3: u64) -> Found {
        let by_vmm = self.choices.below(4) == 0;
        if by_vmm || !self.instruction(exit::CR3_WRITE, LOAD_ROOT, cr3)? {
            self.write_control(GuestRegisters { cr3, ..self.guest.registers });
        }
        self.guest.registers.cr3 = cr3;
        self.flush_space();
        Ok(())
    }

    /// Changes a bit of a control register, or the mode of paging.
    pub(super) fn change_control(&mut self) {
        let mut new = self.guest.registers;
        let flushes = match self.choices.below(11) {
            0 | 1 => {
                new.cr0 ^= cr0::WP;
                false
            }
            2 | 3 => {
                new.cr4 ^= cr4::SMEP;
                false
            }
            4 => {
                new.cr4 ^= cr4::PGE;
                true
            }
            5 => {
                new.efer ^= efer::NXE;
                true
            }
            6 => {
                new.cr4 ^= cr4::SMAP;
                false
            }
            7 => return self.guest.has_ac = !self.guest.has_ac,
            _ => {
                let modes = [Mode::Long, Mode::Long, Mode::Pae, Mode::Pae, Mode::Off];
                let mode = modes[self.choices.below(5) as usize];
                let cr3 = self.guest.root(mode, self.choices.below(Guest::roots(mode)));
                let base = registers(mode, cr3);
                let kept = cr0::WP;
                new = GuestRegisters {
                    cr0: base.cr0 & !kept | new.cr0 & kept,
                    cr4: new.cr4,
                    efer: base.efer & !efer::NXE | new.efer & efer::NXE,
                    ..base
                };
                true
            }
        };
        let old = self.guest.registers;
        self.write_control(new);
        if flushes && old == (GuestRegisters { cr3: old.cr3, ..new }) {
            self.flush_space();
        } else if flushes {
            self.flush_all();
        }
    }

    /// The VMM delegates or revokes a page, or all.
    pub(super) fn change_memory(&mut self) {
        let number = match self.choices.below(8) {
            0 => self.choices.below(TABLES),
            1 => PAGES,
            _ => DATA + self.choices.below(DATA_PAGES),
        };
        let mut bit = || self.choices.below(2) == 0;
        let (write, execute, is_device) = (bit(), bit(), bit() && bit() && bit());
        let is_elsewhere = bit() && bit() && number >= DATA;
        let is_absent = bit() && bit();
        let whole = |page| Delegation {
            host: GUEST_AT + page,
            write: true,
            execute: true,
            is_device: false,
        };
        let mut has_lost = true;
        if number == PAGES {
            for page in 0..PAGES {
                self.guest.delegated[page as usize] = Some(whole(page));
            }
        } else {
            let host = match is_elsewhere {
                true => OTHER_AT + number % OTHERS,
                false => GUEST_AT + number,
            };
            let new = Delegation { host, write, execute, is_device };
            let page = &mut self.guest.delegated[number as usize];
            // A page that was absent is added without a flush.
            has_lost = page.is_some();
            *page = if is_absent { None } else { Some(new) };
        }
        self.nested.write(&self.guest.delegated);
        // What the tables say may have changed, if one of them is elsewhere.
        if has_lost {
            let root = self.nested.root();
            self.bounded(|vcpu| vcpu.unmapped(root));
            self.enter();
        }
        self.note(None);
        self.unmark_all();
    }

    /// Tables may have become writable: their bits may be absent.
    pub(super) fn unmark_all(&mut self) {
        self.watched.values_mut().for_each(|watched| watched.is_unmarked = true);
    }

    /// The options change while the guest runs.
    pub(super) fn change_options(&mut self) {
        let before = core::mem::replace(&mut self.options, options(&mut self.choices));
        self.vcpu.set_options(self.options);
        self.enter();
        if before != self.options {
            self.flush_all();
        }
    }
}

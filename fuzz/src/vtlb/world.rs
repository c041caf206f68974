//! The model: a guest, its vCPU and a processor, and what each access must end with.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::Relaxed;

use super::choices::Choices;
use super::guest::{
    CODE, Delegation, Fact, Guest, GuestAccess, Intent, KINDS, KNOWN, PAGES, ROOTS, Right, TABLES,
    Walk, registers, slot_of,
};
use super::nested::Nested;
use super::processor::{Processor, RFLAGS_AC};
use abi::vcpu::exit::MEMORY_FAULT;
use abi::vcpu::memory_fault;
use abi::vcpu::x86::exit::EXCEPTION;
use abi::vcpu::x86::vtlb as option;
use hw_x86::msr::efer;
use hw_x86::paging::{ENTRIES, cr0, cr4, entry};
use hw_x86::vmcb::{event, exit};
use kernel_x86::shadow::testing::{
    GuestRegisters, Mode, NEEDS_FRAMES, Store, TestVcpu, clear, page, steps,
};

mod operations;
mod race;

/// First physical page of guest memory: aligned as a large page needs it.
const GUEST_AT: u64 = 512;
/// Further physical pages for guest memory.
const OTHER_AT: u64 = GUEST_AT + PAGES;
const OTHERS: u64 = 64;
/// First frame of the pool.
const POOL_AT: u64 = OTHER_AT + OTHERS;
/// Guest pages that leaves refer to most often, and their number.
const DATA: u64 = CODE + 1;
const DATA_PAGES: u64 = 32;
/// Event whose delivery faults: an external interrupt.
const INTERRUPT: u64 = event::VALID | event::TYPE_INTR | 0x41;
/// Attempts after which an access must end.
const ATTEMPTS: u32 = 8;
/// Most steps of an operation of the vTLB: two for each of 2,048 entries that are compared and of
/// 511 that are removed in the table where the comparison ends, and looks at the tables of the
/// pool.
pub const STEPS: u64 = 5600;
/// Accesses between two checks of all tables.
const CHECK_EVERY: u32 = 128;
/// Offsets of instructions in the page of code: `MOV CR3, RAX` and `INVLPG [RAX]`. As entries of a
/// page table their words are not present.
const LOAD_ROOT: u64 = 1;
const INVALIDATE: u64 = 17;

/// End of an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Outcome {
    /// At a physical page.
    Done(u64),
    /// With a page fault for the guest: its error code.
    Fault(u64),
    /// With an exit: guest-physical address, and information.
    Memory(u64, u64),
}

/// Observations that the guest may make at an address.
#[derive(Clone, Default, Debug)]
struct Watched {
    /// Statements of the tables since the last flush.
    facts: Vec<Fact>,
    /// Accessed or dirty bits may be absent: they were cleared, or an entry was replaced, since
    /// the last flush.
    is_unmarked: bool,
    path: Vec<u64>,
}

/// The model.
pub struct World<'a> {
    choices: Choices<'a>,
    guest: Guest,
    vcpu: TestVcpu,
    processor: Processor,
    nested: Nested,
    options: u64,
    watched: BTreeMap<u64, Watched>,
    /// Observations that a load of CR3 does not flush, because devices have written traced tables:
    /// by root.
    unseen: BTreeMap<(u64, u64), Watched>,
    next_frame: u64,
    /// Entry that was written last, and its value before.
    last: Option<(u64, u64)>,
    /// Store of another vCPU during the next page fault: number of accesses before it, entry and
    /// value.
    racing: Option<(u64, u64, u64)>,
    accesses: u32,
    most_steps: u64,
}

/// An error with its reason.
pub type Found<T = ()> = Result<T, String>;

/// Linear addresses that the model uses: neighbours, and others in other tables. None has an entry
/// at the places of the guest's map of its memory, in a table of any level.
fn addresses(mode: Mode) -> Vec<u64> {
    let tops: &[u64] = if mode == Mode::Long { &[0, 1, 256 + 5] } else { &[0] };
    let places = [(0, 0, 0), (0, 0, 1), (0, 0, 8), (0, 1, 0), (0, 1, 300), (1, 0, 0), (1, 5, 9)];
    let all = tops.iter().flat_map(|top| {
        places.map(|(middle, low, small)| {
            let address: u64 = top << 39 | middle << 30 | low << 21 | small << 12;
            ((address << 16) as i64 >> 16) as u64
        })
    });
    all.collect()
}

/// Rungs to choose from; the higher ones have more to go wrong.
const RUNGS: [u64; 12] = [0, 1, 2, 3, 3, 4, 4, 5, 5, 6, 6, 6];

/// Chooses options: those of a rung.
fn options(choices: &mut Choices<'_>) -> u64 {
    let rung = RUNGS[choices.below(RUNGS.len() as u64) as usize];
    let spaces = if rung >= 2 { 1 + choices.below(6) } else { 1 };
    let mut bits = spaces << option::SPACES_SHIFT;
    let rungs =
        [option::GLOBAL, 0, option::SYNC, option::TRACE, option::ASID, option::INVALIDATE_PAGE];
    bits |= rungs[..rung as usize].iter().fold(0, |all, bit| all | bit);
    if rung >= 4 && choices.below(3) == 0 {
        bits |= option::TRACE_WRITES;
    }
    bits
}

impl<'a> World<'a> {
    /// A guest in long mode, with options and a pool that the choices select.
    pub fn new(mut choices: Choices<'a>) -> Self {
        // Often so few that an access evicts tables.
        let most = [4, 16, 57][choices.below(3) as usize];
        let tables = 8 + choices.below(most);
        let bits = options(&mut choices);
        let guest = Guest::new(GUEST_AT);
        clear(0..GUEST_AT + KNOWN as u64 + 1);
        clear(POOL_AT..POOL_AT + 2 * tables);
        let nested = Nested::new(&guest.delegated);
        let vcpu = TestVcpu::new(tables, guest.registers, bits, nested.root());
        let mut this = Self {
            choices,
            guest,
            vcpu,
            processor: Processor::default(),
            nested,
            options: bits,
            watched: BTreeMap::new(),
            unseen: BTreeMap::new(),
            next_frame: POOL_AT,
            last: None,
            racing: None,
            accesses: 0,
            most_steps: 0,
        };
        this.write_guest_memory();
        this.enter();
        this.flush_all();
        this
    }

    fn write_guest_memory(&self) {
        for (number, table) in self.guest.tables.iter().enumerate() {
            for (word, value) in self.memory(number as u64).iter().zip(table) {
                word.store(*value, Relaxed);
            }
        }
        let code = self.memory(CODE);
        code[LOAD_ROOT as usize / 8].store(0xd822_0f00, Relaxed);
        code[INVALIDATE as usize / 8].store(0x3801_0f00, Relaxed);
    }

    /// Words of a guest page in its first physical page.
    fn memory(&self, number: u64) -> &'static [core::sync::atomic::AtomicU64; 512] {
        page((GUEST_AT + number) << 12)
    }

    fn mode(&self) -> Mode {
        self.guest.registers.mode()
    }

    fn address(&mut self) -> u64 {
        let all = addresses(self.mode());
        all[self.choices.below(all.len() as u64) as usize]
    }

    /// Most steps that an operation took.
    pub fn most_steps(&self) -> u64 {
        self.most_steps
    }

    /// Returns the bytes of an input that are the recorded choices.
    pub fn into_choices(self) -> Vec<u8> {
        self.choices.into_bytes()
    }

    /// Number of ASIDs that were assigned.
    pub fn asids(&self) -> u64 {
        self.vcpu.asids()
    }

    // ---- the vCPU -------------------------------------------------------------------------------

    /// Does something with the vCPU in a bounded number of steps.
    fn bounded<T>(&mut self, act: impl FnOnce(&TestVcpu) -> T) -> T {
        let before = steps();
        let result = act(&self.vcpu);
        self.most_steps = self.most_steps.max(steps() - before);
        result
    }

    /// Prepares and begins an entry.
    fn enter(&mut self) {
        let before = steps();
        let mut next = self.next_frame;
        self.vcpu.prepare(|| {
            next += 2;
            (next - 2) << 12
        });
        self.next_frame = next;
        self.most_steps = self.most_steps.max(steps() - before);
        self.processor.enter(&self.vcpu);
        Processor::check_registers(self.vcpu.vmcb());
    }

    /// Writes the guest's control registers as the VMM does.
    fn write_control(&mut self, new: GuestRegisters) {
        self.guest.registers = new;
        self.bounded(|vcpu| vcpu.write_control(new));
        self.enter();
    }

    /// Lets the kernel execute an instruction, or else the VMM.
    fn instruction(&mut self, code: u64, offset: u64, operand: u64) -> Found<bool> {
        let rip = self.guest.direct(CODE << 12) + offset;
        if self.mode() != Mode::Long {
            return Ok(false);
        }
        if self.access_fixed(rip, Intent::Fetch)? != Outcome::Done(GUEST_AT + CODE) {
            return Ok(false);
        }
        let reason = self.bounded(|vcpu| vcpu.instruction(code, rip, operand));
        match reason {
            None => self.processor.enter(&self.vcpu),
            Some(NEEDS_FRAMES) => self.enter(),
            // Its translation has left the shadow tables, but not the TLB.
            Some(_) => return Ok(false),
        }
        Ok(true)
    }

    /// The kernel's part of a page fault. `None`: the guest repeats the access.
    fn page_fault(&mut self, access: GuestAccess, code: u64) -> Found<Option<Outcome>> {
        let walk = self.guest.walk(access.address);
        if self.guest.check(walk.fact, access).is_ok() {
            self.guest.mark(&walk, access.intent);
        }
        let level = if access.user { 3 } else { 0 };
        // Sometimes it is an access of the delivery of an interrupt.
        let event = if self.choices.below(16) == 0 { INTERRUPT } else { 0 };
        self.vcpu.vmcb().control.exit_int_info.set(event);
        let race = self.begin_race();
        let reason = self.bounded(|vcpu| vcpu.page_fault(access.address, code, level));
        match race {
            Some(race) => self.end_race(race, access.address, &walk)?,
            None => self.check_path(&walk)?,
        }
        let vmcb = self.vcpu.vmcb();
        match reason {
            None => {
                self.processor.enter(&self.vcpu);
                let injected = vmcb.control.event_inj.get();
                if injected == event {
                    return Ok(None);
                }
                if event != 0 {
                    return Err(format!("injected {injected:#x} instead of {event:#x}"));
                }
                const PAGE_FAULT: u64 =
                    event::VALID | event::TYPE_EXCEPTION | event::ERROR_VALID | 14;
                if injected & 0xffff_ffff != PAGE_FAULT || vmcb.save.cr2.get() != access.address {
                    return Err(format!("injected {injected:#x} at {:#x}", vmcb.save.cr2.get()));
                }
                Ok(Some(Outcome::Fault(injected >> 32)))
            }
            Some(NEEDS_FRAMES) => {
                self.enter();
                Ok(None)
            }
            // The VMM decides what becomes of the interrupt.
            Some(EXCEPTION) if event != 0 => {
                let (address, info) = self.vcpu.fault();
                match (address == access.address, info & 0xffff_ffff) {
                    (true, 14) => Ok(Some(Outcome::Fault(info >> 32))),
                    _ => Err(format!("exception {info:#x} at {address:#x} for {access:x?}")),
                }
            }
            Some(MEMORY_FAULT) => {
                let (address, info) = self.vcpu.fault();
                self.enter();
                Ok(Some(Outcome::Memory(address, info)))
            }
            Some(other) => Err(format!("exit {other} at {access:x?}")),
        }
    }

    /// Performs an access.
    fn access(&mut self, access: GuestAccess) -> Found<Outcome> {
        // An injected fault has set RF, which the guest's handler clears by IRET.
        self.vcpu.vmcb().save.rflags.set(if self.guest.has_ac { RFLAGS_AC } else { 0 });
        for _ in 0..ATTEMPTS {
            let code = match self.processor.access(self.vcpu.vmcb(), access) {
                Ok(found) => return Ok(Outcome::Done(found)),
                Err(code) => code,
            };
            if let Some(outcome) = self.page_fault(access, code)? {
                return Ok(outcome);
            }
        }
        Err(format!("no progress at {access:x?}, {:x?}", self.guest.registers))
    }

    // ---- what the guest may observe -------------------------------------------------------------

    /// The guest's tables have changed: what holds now is allowed, too. `at`: entry whose accessed
    /// or dirty bits were cleared.
    fn note(&mut self, at: Option<u64>) {
        for (&address, watched) in &mut self.watched {
            let walk = self.guest.walk(address);
            if !watched.facts.contains(&walk.fact) {
                watched.facts.push(walk.fact);
            }
            let is_cleared = at.is_some_and(|at| walk.path.contains(&at));
            watched.is_unmarked |= is_cleared || walk.path != watched.path;
            watched.path = walk.path;
        }
    }

    fn fresh(&self, address: u64) -> Watched {
        let Walk { fact, path, .. } = self.guest.walk(address);
        Watched { facts: vec![fact], is_unmarked: false, path }
    }

    /// The guest has loaded CR3.
    fn flush_space(&mut self) {
        let old = core::mem::take(&mut self.watched);
        let root = self.guest.registers.cr3;
        for address in addresses(self.mode()) {
            let mut fresh = self.fresh(address);
            if let Some(unseen) = self.unseen.get(&(root, address)) {
                fresh.facts.extend(&unseen.facts);
                fresh.is_unmarked = true;
            }
            if let Some(before) = old.get(&address) {
                let is_global = |fact: &&Fact| matches!(fact, Fact::Page(right) if right.is_global);
                let kept: Vec<Fact> = before.facts.iter().filter(is_global).copied().collect();
                fresh.is_unmarked |= !kept.is_empty();
                fresh.facts.extend(kept);
            }
            self.watched.insert(address, fresh);
        }
    }

    /// The guest has flushed everything.
    fn flush_all(&mut self) {
        self.unseen.clear();
        let all = addresses(self.mode());
        self.watched = all.into_iter().map(|address| (address, self.fresh(address))).collect();
    }

    fn flush_address(&mut self, address: u64) {
        let root = self.guest.registers.cr3;
        let unseen = self.unseen.remove(&(root, address)).unwrap_or_default();
        let old = self.watched.insert(address, self.fresh(address)).unwrap_or_default();
        // A large page is one translation: what it was is gone at its other addresses, too.
        let large = |fact: &Fact| match fact {
            Fact::Page(right) if right.order > 0 => Some(right.leaf()),
            _ => None,
        };
        let gone: Vec<_> = old.facts.iter().chain(&unseen.facts).filter_map(large).collect();
        for (&other, watched) in &mut self.watched {
            let now = self.guest.walk(other).fact;
            let is_gone = |fact: &Fact| {
                large(fact).is_some_and(|(first, order)| {
                    let same_range = other >> (12 + order) == address >> (12 + order);
                    same_range && gone.contains(&(first, order))
                })
            };
            watched.facts.retain(|fact| *fact == now || !is_gone(fact));
        }
    }

    /// Performs an access and compares.
    fn check(&mut self, access: GuestAccess) -> Found {
        let outcome = self.access(access)?;
        let watched = &self.watched[&access.address];
        if !watched.facts.iter().any(|&fact| self.agrees(fact, access, outcome)) {
            let memory = watched.facts.iter().map(|fact| match fact {
                Fact::Page(right) => self.guest.delegated.get(right.page as usize),
                _ => None,
            });
            let memory: Vec<_> = memory.collect();
            return Err(format!(
                "{access:x?} ends with {outcome:x?}, allowed: {watched:x?}, {memory:x?}, {:x?}",
                self.guest.registers
            ));
        }
        let walk = self.guest.walk(access.address);
        let is_certain = watched.facts.len() == 1 && !watched.is_unmarked;
        let is_done = matches!(outcome, Outcome::Done(_));
        if is_done && is_certain && !self.guest.is_marked(&walk, access.intent) {
            return Err(format!("{access:x?} without its bits in {walk:x?}"));
        }
        self.accesses += 1;
        if self.accesses.is_multiple_of(CHECK_EVERY) {
            self.check_everything()?;
        }
        if self.most_steps > STEPS {
            return Err(format!("{} steps", self.most_steps));
        }
        Ok(())
    }

    fn agrees(&self, fact: Fact, access: GuestAccess, outcome: Outcome) -> bool {
        let unchecked = self.guest.check_without_smap(fact, access);
        match self.guest.check(fact, access) {
            Ok(right) => self.reaches(right, access, outcome),
            Err(code) if outcome == Outcome::Fault(code) => true,
            Err(_) => unchecked.is_some_and(|right| self.reaches(right, access, outcome)),
        }
    }

    /// Returns whether an access with a right ends so, with the memory that the VM has.
    fn reaches(&self, right: Right, access: GuestAccess, outcome: Outcome) -> bool {
        let memory = self.guest.delegated.get(right.page as usize).copied().flatten();
        let is_allowed = |memory: &Delegation| match access.intent {
            Intent::Read => true,
            Intent::Write => memory.write,
            Intent::Fetch => memory.execute,
        };
        match memory.filter(is_allowed) {
            Some(memory) => outcome == Outcome::Done(memory.host),
            None => {
                let info = match access.intent {
                    Intent::Read => 0,
                    Intent::Write => memory_fault::WRITE,
                    Intent::Fetch => memory_fault::FETCH,
                };
                outcome == Outcome::Memory(right.page << 12 | access.address & 0xfff, info)
            }
        }
    }

    /// Compares the entries of a path.
    fn check_path(&self, walk: &Walk) -> Found {
        for &at in &walk.path {
            let (number, slot) = slot_of(at);
            let Some(table) = self.guest.tables.get(number) else { continue };
            let (real, known) = (self.memory(number as u64)[slot].load(Relaxed), table[slot]);
            if real != known {
                return Err(format!("entry {at:#x} is {real:#x} instead of {known:#x}"));
            }
        }
        Ok(())
    }

    /// Compares all guest tables, and checks that all leaves are memory of the VM.
    fn check_everything(&self) -> Found {
        for (number, table) in self.guest.tables.iter().enumerate() {
            let real = self.memory(number as u64);
            if let Some(slot) = (0..512).find(|&slot| real[slot].load(Relaxed) != table[slot]) {
                let real = real[slot].load(Relaxed);
                let known = table[slot];
                return Err(format!("table {number}, entry {slot}: {real:#x}, not {known:#x}"));
            }
        }
        let save = &self.vcpu.vmcb().save;
        let top = if save.efer.get() & efer::LMA != 0 { 3 } else { 2 };
        self.check_leaves(save.cr3.get(), top)
    }

    fn check_leaves(&self, table: u64, level: u32) -> Found {
        for word in page(table) {
            let value = word.load(Relaxed);
            let is_table = level > 0 && value & entry::LARGE == 0 || level > 1;
            match value & entry::PRESENT != 0 {
                false => {}
                true if is_table => self.check_leaves(value & entry::ADDRESS, level - 1)?,
                true => self.check_leaf(value, 1 << (9 * level))?,
            }
        }
        Ok(())
    }

    fn check_leaf(&self, leaf: u64, pages: u64) -> Found {
        let first = (leaf & entry::ADDRESS) >> 12;
        let is_allowed = |memory: &Delegation| {
            (memory.write || leaf & entry::WRITE == 0)
                && (memory.execute || leaf & entry::NX != 0)
                && memory.is_device == (leaf & entry::UNCACHED != 0)
        };
        for host in first..first + pages {
            let mut all = self.guest.delegated.iter().flatten();
            // Most pages are where they were at first.
            let at_first = host
                .checked_sub(GUEST_AT)
                .and_then(|page| self.guest.delegated.get(page as usize).copied().flatten());
            let is_known = at_first.is_some_and(|one| one.host == host && is_allowed(&one));
            if !is_known && !all.any(|one| one.host == host && is_allowed(one)) {
                return Err(format!("leaf {leaf:#x} has page {host:#x}, which the VM lacks"));
            }
        }
        Ok(())
    }

    // ---- operations -----------------------------------------------------------------------------

    /// Performs an operation.
    pub fn step(&mut self) -> Found {
        match self.choices.below(40) {
            0..6 => self.store_by_map(),
            6 | 17 | 18 => self.store_by_alias(),
            7 => {
                self.store_by_device();
                Ok(())
            }
            8 | 9 => self.invalidate(),
            10..13 => self.load(),
            13 => {
                self.change_control();
                Ok(())
            }
            14 => {
                self.change_memory();
                Ok(())
            }
            15 if self.choices.below(16) == 0 => {
                self.change_options();
                Ok(())
            }
            16 if self.choices.below(64) == 0 => self.fill_tables(),
            19 => self.invalidate_elsewhere(),
            20 => self.change_above(),
            21 => self.race(),
            _ => {
                let intents = [Intent::Read, Intent::Write, Intent::Fetch];
                let address = self.address();
                let choice = self.choices.below(6);
                let intent = intents[choice as usize % 3];
                self.check(GuestAccess { address, intent, user: choice >= 3 })
            }
        }
    }

    /// Returns true if there is nothing left to choose from.
    pub fn is_done(&self) -> bool {
        self.choices.is_empty()
    }
}

//! Interrupt controller GICv3, distributor and redistributors, or GICv2, distributor alone
//! (`v2.rs`). The interface to a CPU is the processor's own, into which the host puts what
//! [`Gic::take_virq`] returns.
//!
//! State: for each interrupt group, enable, pending, level, trigger, priority, and route; the CPUs
//! that have sent each SGI (GICv2); whether the host has a level-triggered interrupt whose end it
//! has not reported yet.
//! Features: 16 SGIs, 16 private and 96 shared interrupts; one security state; affinity routing, to
//! one CPU or to any (the first), or with a GICv2 to the first of its targets.
//! Interrupt messages come by a frame of GICv2m (`v2m.rs`).
//! Missing: group 0 of a GICv3 (its interrupts stay pending), groups of a GICv2; reads and sets of
//! the active state, clears of it for the timer's interrupt and for those that the host delivers by
//! itself, withdrawal of an interrupt that the host already has, messages (ITS).
//! Documentation: Arm IHI 0069, IHI 0048.

mod bank;
mod v2;
pub mod v2m;

use hw_arm64::gic::distributor::*;
use hw_arm64::gic::{FIRST_SHARED, SoftwareInterrupt, Version, bits, redistributor};
use vmm_bus::Access;

use bank::Bank;

/// Words of 32 shared interrupts.
const SHARED_WORDS: usize = 3;
/// Number of interrupts.
const INTERRUPTS: u32 = FIRST_SHARED + 32 * SHARED_WORDS as u32;
/// Interrupt of the virtual timer.
pub const TIMER: u32 = 27;
/// Bits of TYPER: numbers of ten bits, no "1 of N".
const TYPE: u32 = 9 << 19 | 1 << 25;
/// SGIs, which are always edge-triggered.
const SGIS: u32 = 0xffff;
/// Number of SGIs.
const SGI_COUNT: usize = 16;

/// An interrupt for a CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Virq {
    /// Its number. An SGI of a GICv2 has the CPU that has sent it from bit 10 on.
    pub number: u32,
    /// Its priority; lower values are more urgent.
    pub priority: u8,
    /// The host reports its end by [`Gic::end_virq`], and the interrupt is not active before: it is
    /// level-triggered, or the guest has made it inactive.
    pub report_end: bool,
}

/// SGIs of a CPU, as far as the host needs it to deliver them by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sgis {
    /// Those that the guest has enabled, in group 1: a bit each.
    pub enabled: u16,
    /// Priorities, by number.
    pub priorities: [u8; 16],
}

/// Distributor and redistributors of up to `CPUS` CPUs, whose affinities are their indices.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Gic<const CPUS: usize> {
    version: Version,
    cpus: usize,
    is_enabled: bool,
    private: [Bank; CPUS],
    shared: [Bank; SHARED_WORDS],
    /// GICv3: affinity of the target. GICv2: targets, a bit each.
    routes: [[u64; 32]; SHARED_WORDS],
    /// GICv2: CPUs whose SGI is pending, a bit each, by target and number.
    sources: [[u8; SGI_COUNT]; CPUS],
    /// Shared interrupts that this CPU took last: a bit each.
    taken: [[u32; SHARED_WORDS]; CPUS],
    /// The redistributor of a CPU sleeps: a bit each. Only software looks at it.
    asleep: u32,
    /// CPUs to which an interrupt is to be delivered: a bit each.
    waiting: u32,
}

impl<const CPUS: usize> Gic<CPUS> {
    /// State after a reset, with this many CPUs, at most eight in version 2.
    pub fn new(version: Version, cpus: usize) -> Self {
        // A GICv2 without groups delivers all interrupts.
        let group = if version == Version::V2 { u32::MAX } else { 0 };
        Self {
            version,
            cpus: if cpus < CPUS { cpus } else { CPUS },
            is_enabled: false,
            private: core::array::from_fn(|_| Bank { edge: SGIS, group, ..Bank::RESET }),
            shared: core::array::from_fn(|_| Bank { group, ..Bank::RESET }),
            routes: [[0; 32]; SHARED_WORDS],
            sources: [[0; SGI_COUNT]; CPUS],
            taken: [[0; SHARED_WORDS]; CPUS],
            asleep: u32::MAX,
            waiting: 0,
        }
    }

    /// Sets the level of a shared interrupt's line.
    pub fn set_level(&mut self, number: u32, level: bool) {
        if let Some((word, bit)) = shared(number) {
            self.shared[word].set_level(bit, level);
            self.changed();
        }
    }

    /// Makes a shared interrupt pending, as a message does.
    pub fn set_pending(&mut self, number: u32) {
        if let Some((word, bit)) = shared(number) {
            self.shared[word].pending |= bit;
            self.changed();
        }
    }

    /// Makes an SGI of a GICv3 pending for the CPUs to which it is sent.
    pub fn send(&mut self, sender: usize, interrupt: SoftwareInterrupt) {
        for (cpu, bank) in self.private[..self.cpus].iter_mut().enumerate() {
            if interrupt.is_for(cpu as u64, cpu == sender) {
                bank.pending |= 1 << (interrupt.number & 15);
            }
        }
        self.changed();
    }

    /// Returns whether an interrupt is to be delivered to a CPU.
    pub fn is_waiting(&self, cpu: usize) -> bool {
        self.waiting & 1 << cpu != 0
    }

    /// Takes the most urgent interrupt that is to be delivered to a CPU.
    pub fn take_virq(&mut self, cpu: usize) -> Option<Virq> {
        let (priority, number) = self.next(cpu)?;
        let report_end = match shared(number) {
            Some((word, bit)) => {
                self.taken.iter_mut().for_each(|taken| taken[word] &= !bit);
                self.taken[cpu][word] |= bit;
                self.shared[word].take(number % 32)
            }
            None => self.private[cpu].take(number),
        };
        let number =
            if self.version == Version::V2 { self.with_source(cpu, number) } else { number };
        self.changed();
        Some(Virq { number, priority, report_end })
    }

    /// The guest has ended an interrupt that was to be reported.
    pub fn end_virq(&mut self, cpu: usize, number: u32) {
        match shared(number) {
            Some((word, bit)) => self.shared[word].in_service &= !bit,
            None if number < FIRST_SHARED => self.private[cpu].in_service &= !(1 << number),
            None => {}
        }
        self.changed();
    }

    /// A CPU is off: shared interrupts that it took follow their routes, since it may not have
    /// handled them. One that it has handled occurs once more if it is edge-triggered and enabled.
    /// The host forgets its private ones when the CPU starts.
    pub fn release(&mut self, cpu: usize) {
        self.private[cpu].in_service = 0;
        let taken = core::mem::take(&mut self.taken[cpu]);
        for (bank, taken) in self.shared.iter_mut().zip(taken) {
            bank.in_service &= !taken;
            bank.pending |= taken & bank.edge & bank.enabled;
        }
        self.changed();
    }

    /// The interrupt of a CPU's virtual timer, if the guest has enabled it.
    pub fn timer_virq(&self, cpu: usize) -> Option<Virq> {
        let bank = &self.private[cpu];
        let is_enabled = self.is_enabled && bank.group & bank.enabled & 1 << TIMER != 0;
        let priority = bank.priorities[TIMER as usize];
        is_enabled.then_some(Virq { number: TIMER, priority, report_end: false })
    }

    /// A shared interrupt, if the guest has enabled it for this CPU and it is edge-triggered.
    pub fn edge_virq(&self, cpu: usize, number: u32) -> Option<Virq> {
        let (word, bit) = shared(number)?;
        let bank = &self.shared[word];
        let is_enabled = self.is_enabled && bank.group & bank.enabled & bank.edge & bit != 0;
        let priority = bank.priorities[number as usize % 32];
        (is_enabled && self.target(number) == Some(cpu)).then_some(Virq {
            number,
            priority,
            report_end: false,
        })
    }

    /// SGIs of a CPU; those of a GICv2 are sent by a register of the distributor.
    pub fn sgis(&self, cpu: usize) -> Sgis {
        if self.version == Version::V2 {
            return Sgis::default();
        }
        let Bank { group, enabled, priorities, .. } = &self.private[cpu];
        let enabled = if self.is_enabled { (group & enabled & SGIS) as u16 } else { 0 };
        Sgis { enabled, priorities: core::array::from_fn(|number| priorities[number]) }
    }

    /// CPUs whose [`Gic::sgis`] or [`Gic::timer_virq`] may have changed by a write of this CPU to
    /// the distributor: a bit each.
    pub fn changed_by_distributor(&self, cpu: usize, access: Access) -> u32 {
        let own = self.version == Version::V2 && v2::is_private(access.offset as usize);
        match access.offset as usize {
            CTLR => ((1u64 << self.cpus) - 1) as u32,
            _ => u32::from(own) << cpu,
        }
    }

    /// The same by a write to the redistributors.
    pub fn changed_by_redistributor(&self, access: Access) -> u32 {
        self.frame(access).map_or(0, |(cpu, _)| 1 << cpu)
    }

    /// CPUs to which an interrupt is to be delivered: a bit each.
    fn find_waiting(&self) -> u32 {
        if !self.is_enabled {
            return 0;
        }
        let mut waiting = 0;
        for (cpu, bank) in self.private[..self.cpus].iter().enumerate() {
            waiting |= u32::from(bank.deliverable() != 0) << cpu;
        }
        for (word, bank) in self.shared.iter().enumerate() {
            for index in bits(bank.deliverable()) {
                let target = self.target(FIRST_SHARED + 32 * word as u32 + index);
                waiting |= target.map_or(0, |cpu| 1 << cpu);
            }
        }
        waiting
    }

    /// Keeps [`Gic::find_waiting`] after a change. It is asked for far more often than it changes.
    fn changed(&mut self) {
        self.waiting = self.find_waiting();
    }

    /// Priority and number of the next interrupt for a CPU.
    fn next(&self, cpu: usize) -> Option<(u8, u32)> {
        debug_assert_eq!(self.waiting, self.find_waiting());
        if !self.is_waiting(cpu) {
            return None;
        }
        let own = &self.private[cpu];
        let mut next = own.most_urgent(own.deliverable());
        let banks =
            self.shared.iter().enumerate().map(|(word, bank)| (word, bank, bank.deliverable()));
        for (word, bank, deliverable) in banks.filter(|&(.., deliverable)| deliverable != 0) {
            let routed = self.routed(word, deliverable, cpu);
            if let Some((priority, index)) = bank.most_urgent(routed) {
                let found = (priority, FIRST_SHARED + 32 * word as u32 + index);
                next = Some(next.map_or(found, |other| other.min(found)));
            }
        }
        next
    }

    /// Returns the CPU to which a shared interrupt goes; `None`: there is no such CPU.
    pub fn target(&self, number: u32) -> Option<usize> {
        let (word, _) = shared(number)?;
        let route = self.routes[word][number as usize % 32];
        let cpu = match self.version {
            // Targets of the only CPU cannot be written (GICv2, section 4.3.12).
            Version::V2 if self.cpus == 1 => 0,
            Version::V2 => route.trailing_zeros() as usize,
            Version::V3 if route & ANY != 0 => 0,
            Version::V3 => usize::try_from(route).ok()?,
        };
        (cpu < self.cpus).then_some(cpu)
    }

    /// Those of the interrupts of a word that go to this CPU.
    fn routed(&self, word: usize, of: u32, cpu: usize) -> u32 {
        let number = |index| FIRST_SHARED + 32 * word as u32 + index;
        bits(of)
            .filter(|&index| self.target(number(index)) == Some(cpu))
            .map(|index| 1 << index)
            .sum()
    }

    /// Bank with a word of a block that has a bit for each interrupt.
    fn bank(&self, word: usize) -> Option<&Bank> {
        self.shared.get(word.checked_sub(1)?)
    }

    /// Reads a register of the distributor, on a CPU.
    pub fn read_distributor(&self, cpu: usize, access: Access) -> u64 {
        match self.version {
            Version::V2 => self.read_v2(cpu, access),
            Version::V3 => self.read_v3(access),
        }
    }

    /// Writes a register of the distributor, on a CPU.
    pub fn write_distributor(&mut self, cpu: usize, access: Access, value: u64) {
        match self.version {
            Version::V2 => self.write_v2(cpu, access, value),
            Version::V3 => self.write_v3(access, value),
        }
        self.changed();
    }

    fn read_v3(&self, access: Access) -> u64 {
        let offset = access.offset as usize;
        match offset {
            CTLR => (ONE_STATE | if self.is_enabled { ENABLE_GROUP_1 } else { 0 }).into(),
            TYPER => (TYPE | (INTERRUPTS / 32 - 1)).into(),
            PIDR2 => VERSION_3.into(),
            IGROUPR..IPRIORITYR => {
                self.bank(offset % 0x80 / 4).map_or(0, |bank| bank.read_word(offset & !0x7f).into())
            }
            IPRIORITYR..0x800 => bytes(access, IPRIORITYR, |number| {
                Some(self.shared[shared(number)?.0].priorities[number as usize % 32])
            }),
            ICFGR..0xd00 => {
                let index = (offset - ICFGR) / 4;
                let bank = self.bank(index / 2);
                bank.map_or(0, |bank| bank.read_triggers(16 * (index as u32 % 2)).into())
            }
            IROUTER..0x7fe0 => {
                let number = ((offset - IROUTER) / 8) as u32;
                let route =
                    shared(number).map_or(0, |(word, _)| self.routes[word][number as usize % 32]);
                if offset.is_multiple_of(8) { route } else { route >> 32 }
            }
            _ => 0,
        }
    }

    fn write_v3(&mut self, access: Access, value: u64) {
        let offset = access.offset as usize;
        match offset {
            CTLR => self.is_enabled = value as u32 & ENABLE_GROUP_1 != 0,
            IGROUPR..IPRIORITYR => {
                let word = (offset % 0x80 / 4).checked_sub(1);
                if let Some(bank) = word.and_then(|word| self.shared.get_mut(word)) {
                    bank.write_word(offset & !0x7f, value as u32);
                }
            }
            IPRIORITYR..0x800 => for_each_byte(access, IPRIORITYR, value, |number, priority| {
                if let Some((word, _)) = shared(number) {
                    self.shared[word].priorities[number as usize % 32] = priority;
                }
            }),
            ICFGR..0xd00 => {
                let index = (offset - ICFGR) / 4;
                let word = (index / 2).checked_sub(1);
                if let Some(bank) = word.and_then(|word| self.shared.get_mut(word)) {
                    bank.write_triggers(16 * (index as u32 % 2), value as u32);
                }
            }
            IROUTER..0x7fe0 => self.write_route(access, value),
            _ => {}
        }
    }

    fn write_route(&mut self, access: Access, value: u64) {
        let offset = access.offset as usize - IROUTER;
        let number = (offset / 8) as u32;
        let Some((word, _)) = shared(number) else { return };
        let route = &mut self.routes[word][number as usize % 32];
        *route = match (access.size, offset.is_multiple_of(8)) {
            (8, _) => value,
            (_, true) => *route >> 32 << 32 | value & 0xffff_ffff,
            (_, false) => *route & 0xffff_ffff | value << 32,
        };
    }

    /// Reads a register of the redistributors, one after the other.
    pub fn read_redistributor(&self, access: Access) -> u64 {
        let Some((cpu, offset)) = self.frame(access) else { return 0 };
        let bank = &self.private[cpu];
        match offset {
            redistributor::TYPER => {
                let is_last = cpu + 1 == self.cpus;
                // Affinity, number of the CPU, last one.
                let last = if is_last { redistributor::LAST } else { 0 };
                (cpu as u64) << 32 | (cpu as u64) << 8 | last
            }
            // Upper half of the register before.
            0xc => cpu as u64,
            redistributor::WAKER => {
                let is_asleep = self.asleep & 1 << cpu != 0;
                let bits = redistributor::SLEEP | redistributor::CHILDREN_ASLEEP;
                if is_asleep { bits.into() } else { 0 }
            }
            PIDR2 => VERSION_3.into(),
            _ => match offset.checked_sub(redistributor::PRIVATE) {
                Some(offset @ IGROUPR..IPRIORITYR) if offset % 0x80 == 0 => {
                    bank.read_word(offset).into()
                }
                Some(offset @ IPRIORITYR..0x420) => {
                    let place = Access::new(offset as u64, access.size);
                    bytes(place, IPRIORITYR, |number| bank.priorities.get(number as usize).copied())
                }
                Some(ICFGR) => bank.read_triggers(0).into(),
                Some(0xc04) => bank.read_triggers(16).into(),
                _ => 0,
            },
        }
    }

    /// Writes a register of the redistributors.
    pub fn write_redistributor(&mut self, access: Access, value: u64) {
        let Some((cpu, offset)) = self.frame(access) else { return };
        if offset == redistributor::WAKER {
            let bit = 1 << cpu;
            let sleeps = value as u32 & redistributor::SLEEP != 0;
            self.asleep = self.asleep & !bit | if sleeps { bit } else { 0 };
            return;
        }
        let bank = &mut self.private[cpu];
        match offset.checked_sub(redistributor::PRIVATE) {
            Some(offset @ IGROUPR..IPRIORITYR) if offset % 0x80 == 0 => {
                bank.write_word(offset, value as u32);
            }
            Some(offset @ IPRIORITYR..0x420) => {
                let place = Access::new(offset as u64, access.size);
                for_each_byte(place, IPRIORITYR, value, |number, priority| {
                    if let Some(place) = bank.priorities.get_mut(number as usize) {
                        *place = priority;
                    }
                });
            }
            Some(0xc04) => bank.write_triggers(16, value as u32),
            _ => {}
        }
        self.changed();
    }

    /// CPU of an access to the redistributors, and offset in its frames; `None`: there is none.
    fn frame(&self, access: Access) -> Option<(usize, usize)> {
        let cpu = (access.offset / redistributor::LENGTH) as usize;
        let offset = (access.offset % redistributor::LENGTH) as usize;
        (cpu < self.cpus && self.version == Version::V3).then_some((cpu, offset))
    }
}

/// Word and bit of a shared interrupt.
fn shared(number: u32) -> Option<(usize, u32)> {
    let index = number.checked_sub(FIRST_SHARED)?;
    (number < INTERRUPTS).then_some((index as usize / 32, 1 << (index % 32)))
}

/// Value of an access to registers from `block` on with a byte for each interrupt.
fn bytes(access: Access, block: usize, read: impl Fn(u32) -> Option<u8>) -> u64 {
    let first = (access.offset as usize - block) as u32;
    let byte = |index: u32| u64::from(read(first + index).unwrap_or(0)) << (8 * index);
    (0..u32::from(access.size)).map(byte).sum()
}

fn for_each_byte(access: Access, block: usize, value: u64, mut write: impl FnMut(u32, u8)) {
    let first = (access.offset as usize - block) as u32;
    for index in 0..u32::from(access.size) {
        write(first + index, (value >> (8 * index)) as u8);
    }
}

#[cfg(test)]
mod tests;

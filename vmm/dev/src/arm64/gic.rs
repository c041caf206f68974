//! Interrupt controller GICv3: distributor and redistributors. The interface to a CPU is the
//! processor's own, into which the host puts what [`Gic::take_virq`] returns.
//!
//! State: for each interrupt group, enable, pending, level, trigger, priority, and route; whether
//! the host has a level-triggered interrupt whose end it has not reported yet.
//! Features: 16 SGIs, 16 private and 64 shared interrupts; one security state; affinity routing, to
//! one CPU or to any (the first).
//! Missing: group 0 (its interrupts stay pending), reads and writes of the active state,
//! withdrawal of an interrupt that the host already has, messages (ITS).
//! Documentation: Arm IHI 0069.

use hw_arm64::gic::distributor::*;
use hw_arm64::gic::{FIRST_SHARED, SoftwareInterrupt, bits, redistributor};
use vmm_bus::Access;

/// Words of 32 shared interrupts.
const SHARED_WORDS: usize = 2;
/// Number of interrupts.
const INTERRUPTS: u32 = FIRST_SHARED + 32 * SHARED_WORDS as u32;
/// Interrupt of the virtual timer.
pub const TIMER: u32 = 27;
/// Bits of TYPER: numbers of ten bits, no "1 of N".
const TYPE: u32 = 9 << 19 | 1 << 25;
/// SGIs, which are always edge-triggered.
const SGIS: u32 = 0xffff;

/// An interrupt for a CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Virq {
    /// Its number.
    pub number: u32,
    /// Its priority; lower values are more urgent.
    pub priority: u8,
    /// The host reports its end by [`Gic::end_virq`]: it is level-triggered.
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

/// 32 interrupts: a bit each.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Bank {
    group: u32,
    enabled: u32,
    pending: u32,
    level: u32,
    edge: u32,
    /// The host has the interrupt until it reports the end.
    in_service: u32,
    priorities: [u8; 32],
}

impl Bank {
    const RESET: Self = Self {
        group: 0,
        enabled: 0,
        pending: 0,
        level: 0,
        edge: 0,
        in_service: 0,
        priorities: [0; 32],
    };

    /// Interrupts that a CPU is to get.
    fn deliverable(&self) -> u32 {
        let pending = self.pending | self.level & !self.edge;
        self.group & self.enabled & pending & !self.in_service
    }

    fn set_level(&mut self, bit: u32, level: bool) {
        if level && self.level & bit == 0 {
            self.pending |= bit & self.edge;
        }
        self.level = self.level & !bit | if level { bit } else { 0 };
    }

    /// The most urgent of these interrupts.
    fn most_urgent(&self, of: u32) -> Option<(u8, u32)> {
        bits(of).map(|index| (self.priorities[index as usize], index)).min()
    }

    fn take(&mut self, index: u32) -> bool {
        let bit = 1 << index;
        self.pending &= !bit;
        let is_level = self.edge & bit == 0;
        self.in_service |= if is_level { bit } else { 0 };
        is_level
    }

    /// Register at an offset of a register block that has a bit for each interrupt.
    fn read_word(&self, block: usize) -> u32 {
        match block {
            IGROUPR => self.group,
            ISENABLER | ICENABLER => self.enabled,
            ISPENDR | ICPENDR => self.pending | self.level & !self.edge,
            _ => 0,
        }
    }

    fn write_word(&mut self, block: usize, value: u32) {
        match block {
            IGROUPR => self.group = value,
            ISENABLER => self.enabled |= value,
            ICENABLER => self.enabled &= !value,
            ISPENDR => self.pending |= value,
            ICPENDR => self.pending &= !value,
            _ => {}
        }
    }

    /// Triggers of 16 interrupts from `first` on: the upper of two bits is 1 for edges.
    fn read_triggers(&self, first: u32) -> u32 {
        (0..16).map(|index| (self.edge >> (first + index) & 1) << (2 * index + 1)).sum()
    }

    fn write_triggers(&mut self, first: u32, value: u32) {
        for index in 0..16 {
            let bit = 1 << (first + index);
            let is_edge = value >> (2 * index + 1) & 1 != 0;
            self.edge = self.edge & !bit | if is_edge { bit } else { 0 };
        }
    }
}

/// Distributor and redistributors of up to `CPUS` CPUs, whose affinities are their indices.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Gic<const CPUS: usize> {
    cpus: usize,
    is_enabled: bool,
    private: [Bank; CPUS],
    shared: [Bank; SHARED_WORDS],
    routes: [[u64; 32]; SHARED_WORDS],
    /// The redistributor of a CPU sleeps: a bit each. Only software looks at it.
    asleep: u32,
}

impl<const CPUS: usize> Gic<CPUS> {
    /// State after a reset, with this many CPUs.
    pub const fn new(cpus: usize) -> Self {
        Self {
            cpus: if cpus < CPUS { cpus } else { CPUS },
            is_enabled: false,
            private: [const { Bank { edge: SGIS, ..Bank::RESET } }; CPUS],
            shared: [const { Bank::RESET }; SHARED_WORDS],
            routes: [[0; 32]; SHARED_WORDS],
            asleep: u32::MAX,
        }
    }

    /// Sets the level of a shared interrupt's line.
    pub fn set_level(&mut self, number: u32, level: bool) {
        if let Some((word, bit)) = shared(number) {
            self.shared[word].set_level(bit, level);
        }
    }

    /// Makes an SGI pending for the CPUs to which it is sent.
    pub fn send(&mut self, sender: usize, interrupt: SoftwareInterrupt) {
        for (cpu, bank) in self.private[..self.cpus].iter_mut().enumerate() {
            if interrupt.is_for(cpu as u64, cpu == sender) {
                bank.pending |= 1 << (interrupt.number & 15);
            }
        }
    }

    /// Returns whether an interrupt is to be delivered to a CPU.
    pub fn is_waiting(&self, cpu: usize) -> bool {
        self.next(cpu).is_some()
    }

    /// Takes the most urgent interrupt that is to be delivered to a CPU.
    pub fn take_virq(&mut self, cpu: usize) -> Option<Virq> {
        let (priority, number) = self.next(cpu)?;
        let report_end = match shared(number) {
            Some((word, _)) => self.shared[word].take(number % 32),
            None => self.private[cpu].take(number),
        };
        Some(Virq { number, priority, report_end })
    }

    /// The guest has ended an interrupt that was to be reported.
    pub fn end_virq(&mut self, cpu: usize, number: u32) {
        match shared(number) {
            Some((word, bit)) => self.shared[word].in_service &= !bit,
            None if number < FIRST_SHARED => self.private[cpu].in_service &= !(1 << number),
            None => {}
        }
    }

    /// The interrupt of a CPU's virtual timer, if the guest has enabled it.
    pub fn timer_virq(&self, cpu: usize) -> Option<Virq> {
        let bank = &self.private[cpu];
        let is_enabled = self.is_enabled && bank.group & bank.enabled & 1 << TIMER != 0;
        let priority = bank.priorities[TIMER as usize];
        is_enabled.then_some(Virq { number: TIMER, priority, report_end: false })
    }

    /// SGIs of a CPU.
    pub fn sgis(&self, cpu: usize) -> Sgis {
        let Bank { group, enabled, priorities, .. } = &self.private[cpu];
        let enabled = if self.is_enabled { (group & enabled & SGIS) as u16 } else { 0 };
        Sgis { enabled, priorities: core::array::from_fn(|number| priorities[number]) }
    }

    /// CPUs whose [`Gic::sgis`] or [`Gic::timer_virq`] may have changed by a write to the
    /// distributor: a bit each.
    pub fn changed_by_distributor(&self, access: Access) -> u32 {
        if access.offset as usize == CTLR { ((1u64 << self.cpus) - 1) as u32 } else { 0 }
    }

    /// The same by a write to the redistributors.
    pub fn changed_by_redistributor(&self, access: Access) -> u32 {
        self.frame(access).map_or(0, |(cpu, _)| 1 << cpu)
    }

    /// Priority and number of the next interrupt for a CPU.
    fn next(&self, cpu: usize) -> Option<(u8, u32)> {
        if !self.is_enabled {
            return None;
        }
        let own = self.private[cpu].deliverable();
        let mut next = self.private[cpu].most_urgent(own);
        for (word, bank) in self.shared.iter().enumerate() {
            let routed = self.routed(word, bank.deliverable(), cpu);
            if let Some((priority, index)) = bank.most_urgent(routed) {
                let found = (priority, FIRST_SHARED + 32 * word as u32 + index);
                next = Some(next.map_or(found, |other| other.min(found)));
            }
        }
        next
    }

    /// Those of the interrupts of a word that go to this CPU.
    fn routed(&self, word: usize, of: u32, cpu: usize) -> u32 {
        let is_for = |route: u64| match route & ANY != 0 {
            true => cpu == 0,
            false => route == cpu as u64,
        };
        bits(of)
            .filter(|&index| is_for(self.routes[word][index as usize]))
            .map(|index| 1 << index)
            .sum()
    }

    /// Bank with a word of a block that has a bit for each interrupt.
    fn bank(&self, word: usize) -> Option<&Bank> {
        self.shared.get(word.checked_sub(1)?)
    }

    /// Reads a register of the distributor.
    pub fn read_distributor(&self, access: Access) -> u64 {
        let offset = access.offset as usize;
        match offset {
            CTLR => (ONE_STATE | if self.is_enabled { ENABLE_GROUP_1 } else { 0 }).into(),
            TYPER => (TYPE | (INTERRUPTS / 32 - 1)).into(),
            PIDR2 => VERSION_3.into(),
            IGROUPR..IPRIORITYR => {
                self.bank(offset % 0x80 / 4).map_or(0, |bank| bank.read_word(offset & !0x7f).into())
            }
            IPRIORITYR..0x800 => bytes(access, |number| {
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

    /// Writes a register of the distributor.
    pub fn write_distributor(&mut self, access: Access, value: u64) {
        let offset = access.offset as usize;
        match offset {
            CTLR => self.is_enabled = value as u32 & ENABLE_GROUP_1 != 0,
            IGROUPR..IPRIORITYR => {
                let word = (offset % 0x80 / 4).checked_sub(1);
                if let Some(bank) = word.and_then(|word| self.shared.get_mut(word)) {
                    bank.write_word(offset & !0x7f, value as u32);
                }
            }
            IPRIORITYR..0x800 => for_each_byte(access, value, |number, priority| {
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
                    bytes(place, |number| bank.priorities.get(number as usize).copied())
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
                for_each_byte(place, value, |number, priority| {
                    if let Some(place) = bank.priorities.get_mut(number as usize) {
                        *place = priority;
                    }
                });
            }
            Some(0xc04) => bank.write_triggers(16, value as u32),
            _ => {}
        }
    }

    /// CPU of an access to the redistributors, and offset in its frames.
    fn frame(&self, access: Access) -> Option<(usize, usize)> {
        let cpu = (access.offset / redistributor::LENGTH) as usize;
        let offset = (access.offset % redistributor::LENGTH) as usize;
        (cpu < self.cpus).then_some((cpu, offset))
    }
}

/// Word and bit of a shared interrupt.
fn shared(number: u32) -> Option<(usize, u32)> {
    let index = number.checked_sub(FIRST_SHARED)?;
    (number < INTERRUPTS).then_some((index as usize / 32, 1 << (index % 32)))
}

/// Value of an access to priorities, one byte for each interrupt.
fn bytes(access: Access, read: impl Fn(u32) -> Option<u8>) -> u64 {
    let first = access.offset as u32 - IPRIORITYR as u32;
    let byte = |index: u32| u64::from(read(first + index).unwrap_or(0)) << (8 * index);
    (0..u32::from(access.size)).map(byte).sum()
}

fn for_each_byte(access: Access, value: u64, mut write: impl FnMut(u32, u8)) {
    let first = access.offset as u32 - IPRIORITYR as u32;
    for index in 0..u32::from(access.size) {
        write(first + index, (value >> (8 * index)) as u8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(offset: usize) -> Access {
        Access::new(offset as u64, 4)
    }

    /// A controller that a guest has set up, with two CPUs.
    fn enabled() -> Gic<4> {
        let mut gic = Gic::new(2);
        gic.write_distributor(word(CTLR), 0x13);
        gic.write_distributor(word(IGROUPR + 4), 0xffff_ffff);
        gic.write_distributor(word(ISENABLER + 4), 0b11);
        gic.write_distributor(word(IPRIORITYR + 32), 0xa0b0);
        for cpu in 0..2 {
            let frame = cpu * redistributor::LENGTH as usize + redistributor::PRIVATE;
            gic.write_redistributor(word(frame + IGROUPR), 0xffff_ffff);
            gic.write_redistributor(word(frame + ISENABLER), 0x0800_ffff);
            gic.write_redistributor(word(frame + IPRIORITYR), 0xc0c0_c0c0);
        }
        gic
    }

    #[test]
    fn levels_come_again_while_they_last() {
        let mut gic = enabled();
        gic.set_level(33, true);
        gic.set_level(32, true);
        let first = Virq { number: 33, priority: 0xa0, report_end: true };
        assert_eq!(gic.take_virq(0), Some(first));
        assert_eq!(gic.take_virq(0).map(|virq| virq.number), Some(32));
        assert!(!gic.is_waiting(0) && !gic.is_waiting(1));
        gic.end_virq(0, 33);
        assert!(gic.is_waiting(0));
        gic.set_level(33, false);
        assert!(!gic.is_waiting(0));
    }

    #[test]
    fn routes_and_edges() {
        let mut gic = enabled();
        gic.write_distributor(Access::new((IROUTER + 8 * 32) as u64, 8), 1);
        gic.write_distributor(word(ICFGR + 8), 0b10);
        assert_eq!(gic.read_distributor(word(ICFGR + 8)), 0b10);
        gic.set_level(32, true);
        gic.set_level(32, false);
        assert!(!gic.is_waiting(0));
        let virq = Virq { number: 32, priority: 0xb0, report_end: false };
        assert_eq!((gic.take_virq(1), gic.take_virq(1)), (Some(virq), None));
    }

    #[test]
    fn software_interrupts_and_timers() {
        let mut gic = enabled();
        gic.send(0, SoftwareInterrupt::decode(1 << 40 | 3 << 24));
        assert!(!gic.is_waiting(0));
        let virq = Virq { number: 3, priority: 0xc0, report_end: false };
        assert_eq!(gic.take_virq(1), Some(virq));
        assert_eq!(gic.timer_virq(1).map(|virq| virq.number), Some(TIMER));
        gic.write_redistributor(word(redistributor::PRIVATE + ICENABLER), 1 << TIMER);
        assert_eq!(gic.timer_virq(0), None);
    }

    #[test]
    fn settings_of_a_cpu() {
        let mut gic = enabled();
        let frame = redistributor::LENGTH as usize + redistributor::PRIVATE;
        gic.write_redistributor(word(frame + ICENABLER), 1 << 4);
        let second = gic.sgis(1);
        assert_eq!(second.enabled, 0xffef);
        assert_eq!(second.priorities[..5], [0xc0, 0xc0, 0xc0, 0xc0, 0]);
        assert_eq!(gic.sgis(0).enabled, 0xffff);
        assert_eq!(gic.changed_by_redistributor(word(frame + ICENABLER)), 0b10);
        assert_eq!(gic.changed_by_redistributor(word(4 * frame)), 0);
        assert_eq!(gic.changed_by_distributor(word(CTLR)), 0b11);
        assert_eq!(gic.changed_by_distributor(word(ISENABLER + 4)), 0);
        gic.write_distributor(word(CTLR), 0);
        assert_eq!(gic.sgis(0).enabled, 0);
    }

    #[test]
    fn identification() {
        let gic = enabled();
        assert_eq!(gic.read_distributor(word(PIDR2)) >> 4 & 15, 3);
        assert_eq!(gic.read_distributor(word(TYPER)) & 31, 2);
        let second = redistributor::LENGTH + redistributor::TYPER as u64;
        assert_eq!(gic.read_redistributor(Access::new(second, 8)), 1 << 32 | 1 << 8 | 1 << 4);
        assert_eq!(gic.read_redistributor(Access::new(2 * redistributor::LENGTH, 4)), 0);
    }

    #[test]
    fn no_access_is_fatal() {
        let mut gic = enabled();
        for offset in 0..4 * redistributor::LENGTH {
            for size in [1, 2, 4, 8] {
                let access = Access::new(offset, size);
                if !offset.is_multiple_of(size.into()) {
                    continue;
                }
                gic.write_redistributor(access, u64::MAX);
                gic.read_redistributor(access);
                if offset < LENGTH {
                    gic.write_distributor(access, u64::MAX);
                    gic.read_distributor(access);
                }
            }
        }
        for number in 0..1100 {
            gic.set_level(number, true);
            gic.end_virq(0, number);
        }
        while gic.take_virq(0).is_some() {}
    }
}

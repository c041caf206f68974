//! The distributor of a GICv2: private interrupts by the CPU that accesses them, SGIs with their
//! sources, targets.

use hw_arm64::gic::bits;
use hw_arm64::gic::distributor::*;
use hw_arm64::gic::v2::distributor as spec;
use hw_arm64::gic::v2::{MAX_CPUS, SOURCE_SHIFT, SoftwareInterrupt};
use vmm_bus::Access;

use super::bank::Bank;
use super::{FIRST_SHARED, Gic, INTERRUPTS, SGI_COUNT, SGIS, bytes, for_each_byte, shared};

/// Ends of blocks.
const END_TRIGGERS: usize = ICFGR + 0x100;
const END_CLEAR: usize = spec::CPENDSGIR + SGI_COUNT;
const END_SET: usize = spec::SPENDSGIR + SGI_COUNT;

/// Returns whether the register at an offset has private interrupts, with enables or priorities.
pub(super) fn is_private(offset: usize) -> bool {
    let is_first_word = (IGROUPR..IPRIORITYR).contains(&offset) && offset % 0x80 < 4;
    is_first_word || (IPRIORITYR..IPRIORITYR + FIRST_SHARED as usize).contains(&offset)
}

impl<const CPUS: usize> Gic<CPUS> {
    /// All CPUs: a bit each.
    fn all_cpus(&self) -> u8 {
        ((1u32 << self.cpus.min(MAX_CPUS)) - 1) as u8
    }

    /// Bank with a word of interrupts, as a CPU sees it.
    fn bank_of(&self, cpu: usize, word: usize) -> Option<&Bank> {
        match word.checked_sub(1) {
            None => self.private.get(cpu),
            Some(word) => self.shared.get(word),
        }
    }

    fn bank_of_mut(&mut self, cpu: usize, word: usize) -> Option<&mut Bank> {
        match word.checked_sub(1) {
            None => self.private.get_mut(cpu),
            Some(word) => self.shared.get_mut(word),
        }
    }

    /// Targets of an interrupt. Private ones have the CPU that reads; with one CPU there are none.
    fn targets(&self, cpu: usize, number: u32) -> Option<u8> {
        if self.cpus == 1 {
            return None;
        }
        if number < FIRST_SHARED {
            return Some(1 << (cpu % MAX_CPUS));
        }
        shared(number).map(|(word, _)| self.routes[word][number as usize % 32] as u8)
    }

    #[inline(never)]
    pub(super) fn read_v2(&self, cpu: usize, access: Access) -> u64 {
        let offset = access.offset as usize;
        match offset {
            CTLR => self.is_enabled.into(),
            TYPER => {
                let cpus = (self.cpus as u32 - 1) << spec::CPUS_SHIFT;
                (cpus | (INTERRUPTS / 32 - 1)).into()
            }
            spec::PIDR2 => spec::VERSION_2.into(),
            ISENABLER..IPRIORITYR => {
                let bank = self.bank_of(cpu, offset % 0x80 / 4);
                bank.map_or(0, |bank| bank.read_word(offset & !0x7f).into())
            }
            IPRIORITYR..spec::ITARGETSR => bytes(access, IPRIORITYR, |number| {
                let bank = self.bank_of(cpu, number as usize / 32)?;
                Some(bank.priorities[number as usize % 32])
            }),
            spec::ITARGETSR..ICFGR => {
                bytes(access, spec::ITARGETSR, |number| self.targets(cpu, number))
            }
            ICFGR..END_TRIGGERS => {
                let index = (offset - ICFGR) / 4;
                let bank = self.bank_of(cpu, index / 2);
                bank.map_or(0, |bank| bank.read_triggers(16 * (index as u32 % 2)).into())
            }
            spec::CPENDSGIR..END_CLEAR => self.read_sources(cpu, access, spec::CPENDSGIR),
            spec::SPENDSGIR..END_SET => self.read_sources(cpu, access, spec::SPENDSGIR),
            _ => 0,
        }
    }

    #[inline(never)]
    pub(super) fn write_v2(&mut self, cpu: usize, access: Access, value: u64) {
        let offset = access.offset as usize;
        match offset {
            CTLR => self.is_enabled = value as u32 & spec::ENABLED != 0,
            ISENABLER..IPRIORITYR => {
                let (word, block) = (offset % 0x80 / 4, offset & !0x7f);
                // SGIs become pending by their own registers.
                let fixed = word == 0 && matches!(block, ISPENDR | ICPENDR);
                let value = value as u32 & if fixed { !SGIS } else { u32::MAX };
                if let Some(bank) = self.bank_of_mut(cpu, word) {
                    bank.write_word(block, value);
                }
            }
            IPRIORITYR..spec::ITARGETSR => {
                for_each_byte(access, IPRIORITYR, value, |number, priority| {
                    if let Some(bank) = self.bank_of_mut(cpu, number as usize / 32) {
                        bank.priorities[number as usize % 32] = priority;
                    }
                });
            }
            spec::ITARGETSR..ICFGR => {
                let all = self.all_cpus();
                for_each_byte(access, spec::ITARGETSR, value, |number, targets| {
                    if let Some((word, _)) = shared(number) {
                        self.routes[word][number as usize % 32] = (targets & all).into();
                    }
                });
            }
            ICFGR..END_TRIGGERS => {
                let index = (offset - ICFGR) / 4;
                // Those of SGIs are constant.
                if let Some(bank) = self.bank_of_mut(cpu, index / 2).filter(|_| index > 0) {
                    bank.write_triggers(16 * (index as u32 % 2), value as u32);
                }
            }
            spec::SGIR => self.send_v2(cpu, SoftwareInterrupt::decode(value as u32, cpu)),
            spec::CPENDSGIR..END_CLEAR => {
                for_each_byte(access, spec::CPENDSGIR, value, |number, sources| {
                    self.change_sources(cpu, number, |before| before & !sources);
                });
            }
            spec::SPENDSGIR..END_SET => {
                let all = self.all_cpus();
                for_each_byte(access, spec::SPENDSGIR, value, |number, sources| {
                    self.change_sources(cpu, number, |before| before | sources & all);
                });
            }
            _ => {}
        }
    }

    fn read_sources(&self, cpu: usize, access: Access, block: usize) -> u64 {
        let of_cpu = self.sources.get(cpu);
        bytes(access, block, |number| of_cpu?.get(number as usize).copied())
    }

    /// Makes an SGI pending for its targets.
    fn send_v2(&mut self, sender: usize, interrupt: SoftwareInterrupt) {
        for target in bits((interrupt.targets & self.all_cpus()).into()) {
            let source = 1 << (sender % MAX_CPUS);
            self.change_sources(target as usize, interrupt.number, |before| before | source);
        }
    }

    /// Changes the sources of an SGI, which is pending while it has any.
    fn change_sources(&mut self, cpu: usize, number: u32, change: impl FnOnce(u8) -> u8) {
        let of_cpu = self.sources.get_mut(cpu).and_then(|of_cpu| of_cpu.get_mut(number as usize));
        let Some((sources, bank)) = of_cpu.zip(self.private.get_mut(cpu)) else { return };
        *sources = change(*sources);
        let bit = 1 << number;
        bank.pending = bank.pending & !bit | if *sources != 0 { bit } else { 0 };
    }

    /// Returns the number of an interrupt that is taken, with the first source of an SGI, which is
    /// no longer pending.
    pub(super) fn with_source(&mut self, cpu: usize, number: u32) -> u32 {
        let sources = self.sources.get(cpu).and_then(|of_cpu| of_cpu.get(number as usize));
        let Some(&sources) = sources.filter(|&&sources| sources != 0) else { return number };
        self.change_sources(cpu, number, |before| before & before.wrapping_sub(1));
        sources.trailing_zeros() << SOURCE_SHIFT | number
    }
}

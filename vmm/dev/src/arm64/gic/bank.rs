//! State of 32 interrupts, as the registers with a bit or a byte for each show it.

use hw_arm64::gic::bits;
use hw_arm64::gic::distributor::*;

/// 32 interrupts: a bit each.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Bank {
    pub(super) group: u32,
    pub(super) enabled: u32,
    pub(super) pending: u32,
    pub(super) level: u32,
    pub(super) edge: u32,
    /// The host has the interrupt until it reports the end.
    pub(super) in_service: u32,
    /// The guest has made the interrupt inactive, which the host does not know yet.
    pub(super) deactivated: u32,
    pub(super) priorities: [u8; 32],
}

impl Bank {
    pub(super) const RESET: Self = Self {
        group: 0,
        enabled: 0,
        pending: 0,
        level: 0,
        edge: 0,
        in_service: 0,
        deactivated: 0,
        priorities: [0; 32],
    };

    /// Interrupts that a CPU is to get.
    pub(super) fn deliverable(&self) -> u32 {
        let pending = self.pending | self.level & !self.edge;
        self.group & self.enabled & pending & !self.in_service
    }

    pub(super) fn set_level(&mut self, bit: u32, level: bool) {
        if level && self.level & bit == 0 {
            self.pending |= bit & self.edge;
        }
        self.level = self.level & !bit | if level { bit } else { 0 };
    }

    /// The most urgent of these interrupts.
    pub(super) fn most_urgent(&self, of: u32) -> Option<(u8, u32)> {
        bits(of).map(|index| (self.priorities[index as usize], index)).min()
    }

    /// Takes an interrupt; returns whether the host reports its end.
    pub(super) fn take(&mut self, index: u32) -> bool {
        let bit = 1 << index;
        let report_end = bit & (!self.edge | self.deactivated) != 0;
        self.pending &= !bit;
        self.deactivated &= !bit;
        self.in_service |= bit & !self.edge;
        report_end
    }

    /// Register at an offset of a register block that has a bit for each interrupt.
    pub(super) fn read_word(&self, block: usize) -> u32 {
        match block {
            IGROUPR => self.group,
            ISENABLER | ICENABLER => self.enabled,
            ISPENDR | ICPENDR => self.pending | self.level & !self.edge,
            _ => 0,
        }
    }

    pub(super) fn write_word(&mut self, block: usize, value: u32) {
        match block {
            IGROUPR => self.group = value,
            ISENABLER => self.enabled |= value,
            ICENABLER => self.enabled &= !value,
            ISPENDR => self.pending |= value,
            ICPENDR => self.pending &= !value,
            ICACTIVER => {
                self.in_service &= !value;
                self.deactivated |= value;
            }
            _ => {}
        }
    }

    /// Triggers of 16 interrupts from `first` on: the upper of two bits is 1 for edges.
    pub(super) fn read_triggers(&self, first: u32) -> u32 {
        (0..16).map(|index| (self.edge >> (first + index) & 1) << (2 * index + 1)).sum()
    }

    pub(super) fn write_triggers(&mut self, first: u32, value: u32) {
        for index in 0..16 {
            let bit = 1 << (first + index);
            let is_edge = value >> (2 * index + 1) & 1 != 0;
            self.edge = self.edge & !bit | if is_edge { bit } else { 0 };
        }
    }
}

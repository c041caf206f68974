//! The outside of the machine: the console's rings, the disks' requests, and the device process.

use core::fmt;

use proto::wedge::{MAX_DISKS, Start, log};
use vmm_bus::{Balloon, Block};
use vmm_machine::{Host, Level, Model, Outside, Slots};

use crate::shared::{self, event, shared};
use crate::{balloon, device, disk, processes, report, sys};

/// The outside as the virtual CPU reaches it.
pub struct LinuxHost {
    log: u64,
}

impl LinuxHost {
    /// As the loader wants it.
    pub fn new(start: &Start) -> Self {
        Self { log: start.log }
    }
}

impl Host for LinuxHost {
    fn tsc(&self) -> u64 {
        crate::guest::tsc()
    }

    fn put(&mut self, byte: u8) -> bool {
        let put = shared().output.put(byte);
        processes::ring();
        put
    }

    fn take(&mut self) -> Option<u8> {
        let byte = shared().input.take();
        if byte.is_none() {
            // There may be more, now that there is room.
            processes::ring();
        }
        byte
    }

    fn log(&mut self, level: Level, text: fmt::Arguments<'_>) {
        let grave = match level {
            Level::Error => log::ERROR,
            Level::Warning => log::WARN,
            Level::Info => log::INFO,
        };
        if grave <= self.log {
            report::say(text);
        }
    }

    fn kick(&mut self, index: usize) {
        device::tell_by_bell(index, event::KICK);
    }
}

/// PCI functions of a machine: disks, then the source of random numbers and the balloon.
pub const MAX_FUNCTIONS: usize = MAX_DISKS + 2;

/// What a PCI function is connected to.
pub enum Link {
    /// A file.
    Disk(disk::Link),
    /// The host's random numbers.
    Entropy,
    /// The host's memory.
    Balloon(balloon::Link),
}

impl Outside for Link {
    fn block(&mut self) -> Option<&mut dyn Block> {
        match self {
            Self::Disk(disk) => Some(disk),
            _ => None,
        }
    }

    fn balloon(&mut self) -> Option<&mut dyn Balloon> {
        match self {
            Self::Balloon(balloon) => Some(balloon),
            _ => None,
        }
    }

    fn entropy(&mut self, to: &mut [u8]) -> bool {
        sys::random(to)
    }
}

/// Fills the slots of the bus; disk `n` is in slot `n`. Gives the slot of the balloon.
pub fn fill(slots: &mut Slots<Link, MAX_FUNCTIONS>, start: &Start, disks: usize) -> Option<usize> {
    for number in 0..disks {
        let info = disk::info(&shared::disk(number));
        // There are as many slots.
        let _ = slots.add(Model::Block(info), Link::Disk(disk::Link::new(number)));
    }
    let _ = slots.add(Model::Entropy, Link::Entropy);
    let balloon = balloon::Link::new(start)?;
    slots.add(Model::Balloon, Link::Balloon(balloon)).ok()
}

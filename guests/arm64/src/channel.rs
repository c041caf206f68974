//! The first channel of a VM on the board `virt`.

use core::sync::atomic::AtomicU64;

use proto::channel::register::{MAGIC, MAGIC_VALUE, NAME_LEN, SIDE, SIZE};
use proto::channel::{Receiver, Sender};

use crate::board::{enable_edge, enable_interrupts, read};

/// Registers of the device in the first slot, those of the next one after a page; number of slots.
const SLOTS: usize = 0xa00_0000;
const PAGE: usize = 0x1000;
const SLOT_COUNT: usize = 16;
/// Interrupts of the device in the first slot: two for each slot, all below 96.
const FIRST_INTERRUPT: usize = 48;
/// Memory of the first channel.
const MEMORY: usize = 0x1000_0000;

/// The channel.
#[derive(Clone, Copy)]
pub struct FirstChannel {
    slot: usize,
}

impl FirstChannel {
    /// The channel, if there is one.
    pub fn find() -> Option<Self> {
        let mut all = (0..SLOT_COUNT).map(|slot| Self { slot });
        all.find(|channel| channel.register(MAGIC) == MAGIC_VALUE)
    }

    /// Address of a register.
    pub fn address(self, register: u64) -> usize {
        SLOTS + PAGE * self.slot + register as usize
    }

    /// Reads a register.
    pub fn register(self, register: u64) -> u32 {
        read(self.address(register))
    }

    /// A name in the registers, filled up with zeros.
    pub fn name(self, first: u64) -> [u8; NAME_LEN] {
        let mut name = [0; NAME_LEN];
        for (index, bytes) in name.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *bytes = self.register(first + 4 * index as u64).to_le_bytes();
        }
        name
    }

    /// Side of this VM.
    pub fn side(self) -> usize {
        self.register(SIDE) as usize & 1
    }

    /// The channel's memory.
    pub fn memory(self) -> &'static [AtomicU64] {
        let length = self.register(SIZE) as usize / 8;
        // SAFETY: the channel's memory, which stays there and is accessed by atomic operations
        // only.
        unsafe { core::slice::from_raw_parts(MEMORY as *const AtomicU64, length) }
    }

    /// The rings; `None`: the memory is too short.
    pub fn rings(self) -> Option<(Sender<'static>, Receiver<'static>)> {
        let (memory, side) = (self.memory(), self.side());
        Some((Sender::attach(memory, side)?, Receiver::attach(memory, side)?))
    }

    /// Enables the doorbell's interrupt, which stays masked and ends a wait.
    pub fn enable_doorbell(self) {
        enable_interrupts(0);
        enable_edge(FIRST_INTERRUPT + 2 * self.slot);
    }
}

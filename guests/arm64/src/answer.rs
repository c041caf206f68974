//! Micro-guest that answers every message that comes through its first channel.
#![no_std]
#![no_main]

#[path = "../../micro/src/answers.rs"]
mod answers;
mod board;

use core::sync::atomic::AtomicU64;

use answers::{Peer, Rings};
use board::{ConsoleOutput, enable_interrupts, enable_shared, read, take, wait, write};
use proto::channel::register::{DOORBELL, MAGIC, MAGIC_VALUE, NAME_LEN, PEER_NAME, SIDE, SIZE};
use proto::channel::{Receiver, Sender};

/// Registers of the device in the first slot, those of the next one after a page; number of slots.
const SLOTS: usize = 0xa00_0000;
const PAGE: usize = 0x1000;
const SLOT_COUNT: usize = 16;
/// Interrupts of the device in the first slot: two for each slot, all below 96.
const FIRST_INTERRUPT: usize = 48;
/// Memory of the first channel.
const MEMORY: usize = 0x1000_0000;

fn register(base: usize, register: u64) -> u32 {
    read(base + register as usize)
}

/// A name in the registers, filled up with zeros.
fn name(base: usize, first: u64) -> [u8; NAME_LEN] {
    let mut name = [0; NAME_LEN];
    for (index, bytes) in name.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        *bytes = register(base, first + 4 * index as u64).to_le_bytes();
    }
    name
}

fn rings(base: usize) -> Option<Rings> {
    let length = register(base, SIZE) as usize / 8;
    // SAFETY: the channel's memory, which stays there and is accessed by atomic operations only.
    let memory = unsafe { core::slice::from_raw_parts(MEMORY as *const AtomicU64, length) };
    let side = register(base, SIDE) as usize & 1;
    Some((Sender::attach(memory, side)?, Receiver::attach(memory, side)?))
}

/// Enables the doorbell's interrupt, which stays masked and ends a wait.
fn enable_doorbell(slot: usize) {
    enable_interrupts(0);
    enable_shared(FIRST_INTERRUPT + 2 * slot);
}

/// Answers for ever.
pub extern "C" fn guest_main() {
    let base = |slot| SLOTS + PAGE * slot;
    let mut slots = 0..SLOT_COUNT;
    let Some(slot) = slots.find(|&slot| register(base(slot), MAGIC) == MAGIC_VALUE) else {
        line!("FAILED: there is no channel");
        return;
    };
    let base = base(slot);
    let Some(rings_at_start) = rings(base) else {
        line!("FAILED: the channel's memory is too short");
        return;
    };
    enable_doorbell(slot);
    let mut peer = Peer::new(name(base, PEER_NAME), rings_at_start);
    line!("each message of {} gets an answer", peer.name());
    loop {
        // Taken first: a doorbell after this ends the next wait.
        take();
        let ring = || write(base + DOORBELL as usize, 1);
        if !peer.answer(&mut ConsoleOutput, ring, || rings(base)) {
            wait();
        }
    }
}

/// There is no other vCPU.
pub extern "C" fn other_main() {}

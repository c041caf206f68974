//! Micro-guest that gets and ends level-triggered interrupts as fast as it can: each end is an exit
//! of its own, which the VMM has asked for.
#![no_std]
#![no_main]

mod board;

use board::{DISTRIBUTOR, ENABLE, GROUP, PEND, TARGETS, enable_interrupts, is_v2, take, write};

/// A shared interrupt without a device; it is level-triggered after a reset.
const NUMBER: usize = 50;
/// Offset of its word in registers with a bit for each interrupt.
const WORD: usize = NUMBER / 32 * 4;
const BIT: u32 = 1 << (NUMBER % 32);

/// Entry of the first vCPU.
pub extern "C" fn guest_main() {
    enable_interrupts(0);
    if is_v2() {
        write(DISTRIBUTOR + TARGETS + NUMBER / 4 * 4, 0x0101_0101);
    }
    write(DISTRIBUTOR + GROUP + WORD, u32::MAX);
    write(DISTRIBUTOR + ENABLE + WORD, BIT);
    let mut count = 0u64;
    loop {
        write(DISTRIBUTOR + PEND + WORD, BIT);
        while take() != NUMBER as u64 {}
        count += 1;
        if count == 1000 {
            line!("{count} interrupts have ended");
        }
    }
}

/// Entry of another vCPU, which is never started.
pub extern "C" fn other_main() {}

//! Micro-guest that prints a number each second, and waits in between.
#![no_std]
#![no_main]

mod board;

use board::{TIMER, call, counter, enable_interrupts, frequency, set_timer, take_with, wait};

const TICKS: u64 = 1_000;

/// Prints a line a second.
pub extern "C" fn guest_main() {
    enable_interrupts(0);
    let mut next = counter();
    for tick in 0..TICKS {
        line!("tick {tick}");
        next += frequency();
        set_timer(Some(next));
        let off = |number| {
            if number == TIMER {
                set_timer(None);
            }
        };
        loop {
            wait();
            if take_with(off) == TIMER {
                break;
            }
        }
        if counter() < next {
            // PSCI: system reset.
            call(0x8400_0009, [0; 3]);
        }
    }
}

/// There is no other vCPU.
pub extern "C" fn other_main() {}

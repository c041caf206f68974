//! Micro-guest that makes the interrupt of its timer pending by the redistributor while the timer's
//! own is, ends it, and waits for ever. Other guests' timers must not notice.
#![no_std]
#![no_main]

mod board;

use board::{PEND, TIMER, counter, enable_interrupts, is_pending, private, set_timer, take, wait};

/// Entry of the first vCPU.
pub extern "C" fn guest_main() {
    enable_interrupts(0);
    set_timer(Some(counter()));
    while !is_pending() {}
    board::write(private(0) + PEND, 1 << TIMER);
    let number = take();
    set_timer(None);
    line!("interrupt {number} was made pending");
    loop {
        wait();
    }
}

/// Entry of another vCPU, which is never started.
pub extern "C" fn other_main() {}

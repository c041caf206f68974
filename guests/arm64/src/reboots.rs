//! Micro-guest that resets the VM again and again, each time while an interrupt is active, and the
//! same and another are pending. After a reset there is none of them, and each interrupt arrives.
#![no_std]
#![no_main]

mod board;

use board::{
    TIMER, call, counter, enable_interrupts, frequency, is_pending, send, set_timer, take,
    take_with,
};

/// Number of the SGI of [`send`].
const SGI: u64 = 1;

/// Waits until an interrupt is pending. Returns `false` after a second.
fn arrives() -> bool {
    let end = counter() + frequency();
    while !is_pending() {
        if counter() > end {
            return false;
        }
    }
    true
}

/// Entry of the first vCPU.
pub extern "C" fn guest_main() {
    enable_interrupts(0);
    let has_stale = is_pending();
    send(0);
    let has_sgi = arrives() && take() == SGI;
    set_timer(Some(counter()));
    // It is pending as long as the timer has expired.
    let has_timer = arrives() && take_with(|_| set_timer(None)) == TIMER;
    let others = is_pending();
    line!("stale {has_stale} SGI {has_sgi} timer {has_timer} others {others}");
    send(0);
    take_with(|_| {
        send(0);
        set_timer(Some(counter()));
        // PSCI: system reset.
        call(0x8400_0009, [0; 3]);
    });
}

/// Entry of another vCPU, which is never started.
pub extern "C" fn other_main() {}

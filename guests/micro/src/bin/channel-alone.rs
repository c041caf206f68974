//! A channel whose other end does not run, though it was meant to: a second long it must not look
//! as if it did.
#![no_std]
#![no_main]

use guests_micro::{apic, channel, check, cpu, guest, println};
use proto::channel::register::PEER;

guest!(main, apic::acknowledge);

const VECTOR: u8 = 0x40;
/// Ticks of the time-stamp counter: about a second.
const LONG: u64 = 1 << 31;

fn main() {
    apic::enable();
    let Some(channel) = channel::first(VECTOR) else { return };
    let start = cpu::tsc();
    while cpu::tsc() - start < LONG {
        check!(channel.read(PEER) == 0, "a peer that was never started runs");
        // The kernel's result for a doorbell without a receiver.
        check!(channel.ring() != 0, "a peer that was never started has heard the doorbell");
    }
    println!("the peer does not run");
}

//! Micro-guest that measures the cost of messages to another VM, and of world switches between two
//! VMs (`messages`), in the counter's time: side 0 prints `VB NAME TIME ns`.
#![no_std]
#![no_main]

mod board;
#[allow(dead_code, reason = "no guest uses everything")]
mod channel;
#[path = "../../micro/src/messages.rs"]
mod messages;

use core::sync::atomic::{AtomicU64, Ordering};

use abi::vcpu::HYPERCALL_DOORBELL;
use board::v3::take;
use board::{call, counter, frequency, is_pending, report, set_timer, wait};
use channel::FirstChannel;
use messages::{Board, Pair};
use proto::channel::FREE_AREA;
use proto::channel::register::NUMBER;

/// Numbers from here on are no interrupts.
const NONE: u64 = 1_020;
/// The timer interrupts after this part of a second.
const PAUSE: u64 = 1_000;
/// The counter has a tick for this number of instructions.
const TICK: u64 = 16;

/// Counter at which the last interrupt has arrived.
static RUNG: AtomicU64 = AtomicU64::new(0);

/// The board, with the number of its channel.
struct Virt {
    number: u64,
}

/// Records the time, and takes all interrupts. That of the timer does not occur again.
#[inline(always)]
fn take_all() {
    RUNG.store(counter(), Ordering::Relaxed);
    set_timer(None);
    while take() < NONE {}
}

impl Board for Virt {
    const BATCHES: u64 = 9;
    const SWITCHES: u64 = 16;
    const GAP: u64 = 12;
    const TURN: u64 = 6_250;

    #[inline(always)]
    fn counter() -> u64 {
        counter()
    }

    #[inline(always)]
    fn ring(&self) {
        call(HYPERCALL_DOORBELL, [self.number, 0, 0]);
    }

    #[inline(always)]
    fn rung() -> u64 {
        RUNG.load(Ordering::Relaxed)
    }

    #[inline(always)]
    fn halt() {
        wait();
        take_all();
    }

    #[inline(always)]
    fn poll() {
        while !is_pending() {}
        take_all();
    }

    fn start_timer() {
        set_timer(Some(counter() + frequency() / PAUSE));
    }

    /// Three instructions a round, so that an event begins at all times between two ticks.
    #[inline(always)]
    fn vary(step: u64) {
        for _ in 0..step % TICK {
            core::hint::spin_loop();
        }
    }

    fn report(name: &str, ticks: u64, count: u64) {
        report(format_args!("arm_{name}"), ticks, count);
    }

    fn fail(why: &str) {
        line!("FAILED: {why}");
        board::power_off();
    }
}

/// Measures as the side of the channel that this VM has.
pub extern "C" fn guest_main() {
    let found = FirstChannel::find().and_then(|channel| Some((channel, channel.rings()?)));
    let Some((channel, rings)) = found else {
        line!("FAILED: there is no channel");
        return;
    };
    channel.enable_doorbell();
    let area = &channel.memory()[FREE_AREA as usize / 8..];
    let board = Virt { number: channel.register(NUMBER).into() };
    Pair::new(board, rings, area).measure(channel.side() as u64);
}

/// There is no other vCPU.
pub extern "C" fn other_main() {}

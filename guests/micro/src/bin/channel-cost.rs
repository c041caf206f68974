//! What a message to another machine costs, and a switch between two machines: side 0 prints `VB name value ns`, in ticks
//! of the time-stamp counter. On the measuring machine a tick is a nanosecond and an instruction. Both machines share one
//! CPU and have the same priority.
//!
//! - `message_noswitch`: from before a message is written to after the doorbell. The peer is ready to run and will find it.
//! - `message_wake`: the same; the peer has halted, and is woken.
//! - `message_switch`: from before a message is written, by way of `HLT`, to the beginning of the peer's handler. The
//!   machines' counters differ; what they differ by cancels out between there and back.
//! - `world_switch`: from before a `HLT` to the next instruction of the other machine, which was ready. Measured in both
//!   directions, so that it cancels out if the two ways of a message do not take as long.
#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use guests_micro::channel::{self, Channel};
use guests_micro::trap::Frame;
use guests_micro::{apic, check, cpu, guest, println};
use hw_x86::apic::local::TIMER_ONE_SHOT;
use hw_x86::cpuid::{features_c, leaf};
use proto::channel::register::SIDE;
use proto::channel::{Message, Receiver, Sender};

guest!(main, trap);

const DOORBELL: u8 = 0x40;
const EVENT: u8 = 0x41;
const TIMER: u8 = 0x48;
/// Messages each way before measuring, so that every table is warm, and with them.
const WARM: u64 = 200;
const ALL: u64 = 5_200;
/// Messages to a peer that does not run, in one turn of the CPU and in all. They have room in the ring.
const BATCH: u64 = 32;
const BATCHES: u64 = 20;
/// Switches before measuring, in which what the machines have printed leaves them, and with them.
const WARM_SWITCHES: u64 = 10;
const ALL_SWITCHES: u64 = 60;
/// A longer time between two looks at the counter is a switch, or an interrupt of the host's.
const GAP: u64 = 400;
/// A still longer time is one in which the other machine had the CPU.
const TURN: u64 = 100_000;
/// Ticks of the local timer after which the halting machine goes on.
const PAUSE: u32 = 1_000_000;

/// When the last doorbell's handler began.
static RUNG: AtomicU64 = AtomicU64::new(0);

/// Words of the free area: what the follower's counter is ahead, and for each side what it writes while it halts and what
/// the other finds.
const OFFSET: usize = 0;
const OFFSET_KNOWN: usize = 1;
/// Messages that the follower has taken while it did not sleep.
const TAKEN: usize = 2;
const STAMP: [usize; 2] = [8, 16];
const SWITCH_TICKS: [usize; 2] = [9, 17];
const SWITCHED: [usize; 2] = [10, 18];

fn trap(frame: &mut Frame) {
    match frame.vector() {
        DOORBELL => RUNG.store(cpu::tsc(), SeqCst),
        // The peer has ended, which comes last.
        TIMER | EVENT => {}
        _ => guests_micro::trap::unexpected(frame),
    }
    apic::end_of_interrupt();
}

/// The rings, and what the messages cost.
struct Pair {
    channel: Channel,
    sender: Sender<'static>,
    receiver: Receiver<'static>,
    /// Ticks of sending.
    sending: u64,
}

impl Pair {
    /// Sends two words; gives when that began.
    fn send(&mut self, words: [u64; 2]) -> u64 {
        let [first, second] = words;
        let begin = cpu::tsc();
        let payload = [begin, first, second, 0, 0, 0, 0];
        match self.sender.send(&Message { tag: 0, length: 32, payload }) {
            Ok(true) => _ = self.channel.ring(),
            Ok(false) => {}
            Err(error) => check!(false, "sending: {error:?}"),
        }
        self.sending += cpu::tsc() - begin;
        begin
    }

    /// Sleeps until there is a message: its words.
    fn receive(&mut self) -> [u64; 3] {
        loop {
            cpu::disable_interrupts();
            match self.receiver.receive() {
                Ok(Some((message, _))) => {
                    let [a, b, c, ..] = message.payload;
                    return [a, b, c];
                }
                Ok(None) => cpu::enable_and_halt(),
                Err(_) => check!(false, "the ring is broken"),
            }
        }
    }
}

fn main() {
    if cpu::cpuid(leaf::FEATURES, 0).ecx & features_c::X2APIC == 0 {
        println!("channel-cost: this processor has no x2APIC");
        return;
    }
    apic::enable();
    check!(apic::enter_x2apic().is_ok(), "the processor cannot enter x2APIC mode");
    let found = channel::all().next().and_then(|mut channel| {
        channel.enable(DOORBELL);
        let (sender, receiver) = channel.rings()?;
        Some(Pair { channel, sender, receiver, sending: 0 })
    });
    let Some(mut pair) = found else {
        check!(false, "there is no channel");
        return;
    };
    // The peer always rings: both always sleep.
    pair.receiver.want_messages(true);
    cpu::disable_interrupts();
    if pair.channel.read(SIDE) == 0 {
        lead(&mut pair);
    } else {
        follow(&mut pair);
    }
}

fn lead(pair: &mut Pair) {
    let area = pair.channel.free_area();
    for batch in 0..BATCHES {
        wait_for_turn();
        for _ in 0..BATCH {
            pair.send([0; 2]);
        }
        while area[TAKEN].load(SeqCst) <= batch * BATCH {
            core::hint::spin_loop();
        }
    }
    print("message_noswitch", pair.sending, BATCHES * BATCH);
    let (mut there_and_back, mut difference) = (0, 0u64);
    for round in 0..ALL {
        if round == WARM {
            (there_and_back, difference, pair.sending) = (0, 0, 0);
        }
        let sent = pair.send([0; 2]);
        // When its handler began, and when it sent this: by the peer's counter.
        let [answered, handled, _] = pair.receive();
        let back = RUNG.load(SeqCst);
        there_and_back += (back - sent) - (answered - handled);
        // Twice what the peer's counter is ahead, if both ways take as long.
        difference = difference
            .wrapping_add(handled.wrapping_sub(sent))
            .wrapping_add(answered.wrapping_sub(back));
    }
    let count = ALL - WARM;
    print("message_wake", pair.sending, count);
    print("message_switch", there_and_back, 2 * count);
    let ahead = (difference as i64 / (2 * count) as i64) as u64;
    area[OFFSET].store(ahead, SeqCst);
    area[OFFSET_KNOWN].store(1, SeqCst);
    halt(area, 0);
    watch(area, 1, ahead.wrapping_neg());
    let ticks = SWITCH_TICKS.map(|word| area[word].load(SeqCst));
    print("world_switch", ticks[0].wrapping_add(ticks[1]), 2 * (ALL_SWITCHES - WARM_SWITCHES));
}

fn follow(pair: &mut Pair) {
    let area = pair.channel.free_area();
    let mut taken = 0;
    while taken < BATCHES * BATCH {
        // All of a batch have come before the CPU comes here.
        if let Ok(Some(_)) = pair.receiver.receive() {
            taken += 1;
            area[TAKEN].store(taken, SeqCst);
        }
    }
    for _ in 0..ALL {
        pair.receive();
        pair.send([RUNG.load(SeqCst), 0]);
    }
    while area[OFFSET_KNOWN].load(SeqCst) == 0 {
        core::hint::spin_loop();
    }
    watch(area, 0, area[OFFSET].load(SeqCst));
    halt(area, 1);
}

/// Waits until the other machine has had the CPU, so that a whole turn is left.
fn wait_for_turn() {
    let mut last = cpu::tsc();
    loop {
        let now = cpu::tsc();
        if now - last > TURN {
            return;
        }
        last = now;
    }
}

/// Halts again and again, as `side`, until the other one has seen it often enough.
fn halt(area: &[AtomicU64], side: usize) {
    while area[SWITCHED[side]].load(SeqCst) < ALL_SWITCHES {
        apic::start_timer(TIMER_ONE_SHOT, TIMER, PAUSE);
        area[STAMP[side]].store(cpu::tsc(), SeqCst);
        cpu::enable_and_halt();
        cpu::disable_interrupts();
    }
}

/// Finds how long after the other one, `side`, has halted this one goes on. `ahead`: what this one's counter is ahead.
fn watch(area: &[AtomicU64], side: usize, ahead: u64) {
    let stamp = &area[STAMP[side]];
    let (mut sum, mut count, mut seen) = (0u64, 0, stamp.load(SeqCst));
    let mut last = cpu::tsc();
    while count < ALL_SWITCHES {
        let now = cpu::tsc();
        let gap = now - last;
        last = now;
        if gap < GAP {
            continue;
        }
        let stamp = stamp.load(SeqCst);
        if stamp != seen {
            seen = stamp;
            if count == WARM_SWITCHES {
                sum = 0;
            }
            sum = sum.wrapping_add(now.wrapping_sub(stamp.wrapping_add(ahead)));
            count += 1;
        }
        last = cpu::tsc();
    }
    area[SWITCH_TICKS[side]].store(sum, SeqCst);
    area[SWITCHED[side]].store(count, SeqCst);
}

fn print(name: &str, ticks: u64, count: u64) {
    let tenths = ticks * 10 / count;
    println!("VB {name} {}.{} ns", tenths / 10, tenths % 10);
}

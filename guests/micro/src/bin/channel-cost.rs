//! Cost of a message to another VM, and of a world switch between two VMs: side 0 prints `VB name
//! value ns`, in ticks of the time-stamp counter. On the measuring machine a tick is a nanosecond
//! and an instruction. Both machines share one CPU and have the same priority.
//!
//! - `message_noswitch`: from before a message is written to after the doorbell. The peer is ready
//!   to run and will find it.
//! - `message_wake`: the same; the peer has halted, and is woken.
//! - `message_switch`: from before a message is written, by way of `HLT`, to the beginning of the
//!   handler of the peer, which was ready.
//! - `message_wake_switch`: the same; the peer has halted, and is woken.
//! - `world_switch`: from before a `HLT` to the next instruction of the other machine, which was
//!   ready.
//!
//! The machines' counters differ; what they differ by cancels out between there and back.
#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use guests_micro::channel::{self, ChannelEnd};
use guests_micro::trap::TrapFrame;
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
/// Messages to a peer that does not run, in one turn of the CPU and in all. They have room in the
/// ring.
const BATCH: u64 = 32;
const BATCHES: u64 = 5;
/// Switches before measuring, in which what the machines have printed leaves them, and with them.
/// Few, since the one that has halted gets the CPU again only at the end of the other one's turn.
const WARM_SWITCHES: u64 = 3;
const ALL_SWITCHES: u64 = 8;
/// A longer time between two looks at the counter is a switch, or an interrupt of the host's.
const GAP: u64 = 400;
/// A still longer time is one in which the other machine had the CPU.
const TURN: u64 = 100_000;
/// Ticks of the local timer after which the halting VM continues.
const PAUSE: u32 = 1_000_000;

/// When the last doorbell's handler began.
static RUNG: AtomicU64 = AtomicU64::new(0);

/// Words of the free area: what the follower's counter is ahead.
const OFFSET: usize = 0;
const OFFSET_KNOWN: usize = 1;
/// Messages that the follower has taken while it did not sleep.
const TAKEN: usize = 2;

/// Measured part of a switch to a ready VM.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Until its next instruction.
    Plain = 0,
    /// Until its handler of a message that was sent before.
    Message = 1,
}

/// The words of the free area for the switches in which `side` halts: when it did, how long they
/// took, and how many there were.
fn words(area: &[AtomicU64], way: Way, side: usize) -> &[AtomicU64] {
    let first = 8 * (1 + 2 * way as usize + side);
    &area[first..first + 3]
}

fn trap(frame: &mut TrapFrame) {
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
    channel: ChannelEnd,
    sender: Sender<'static>,
    receiver: Receiver<'static>,
    /// Ticks of sending.
    sending: u64,
}

impl Pair {
    /// Sends two words; gives when that began. One and the same code in all measurements.
    #[inline(never)]
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

    /// Takes all messages that there are.
    fn drain(&mut self) {
        while let Ok(Some(_)) = self.receiver.receive() {}
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
        if batch == 1 {
            pair.sending = 0;
        }
        for _ in 0..BATCH {
            pair.send([0; 2]);
        }
        while area[TAKEN].load(SeqCst) <= batch * BATCH {
            core::hint::spin_loop();
        }
    }
    // Without the first one.
    print("message_noswitch", pair.sending, (BATCHES - 1) * BATCH);
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
    print("message_wake_switch", there_and_back, 2 * count);
    let ahead = (difference as i64 / (2 * count) as i64) as u64;
    area[OFFSET].store(ahead, SeqCst);
    area[OFFSET_KNOWN].store(1, SeqCst);
    for (way, name) in [(Way::Plain, "world_switch"), (Way::Message, "message_switch")] {
        halt(pair, way, 0);
        watch(pair, way, 1, ahead.wrapping_neg());
        let ticks = [0, 1].map(|side| words(area, way, side)[1].load(SeqCst));
        // In both directions, so that it cancels out if `ahead` is not right.
        print(name, ticks[0].wrapping_add(ticks[1]), 2 * (ALL_SWITCHES - WARM_SWITCHES));
    }
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
    for way in [Way::Plain, Way::Message] {
        watch(pair, way, 0, area[OFFSET].load(SeqCst));
        halt(pair, way, 1);
    }
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

/// Halts repeatedly, as `side`, until the peer has seen it often enough.
fn halt(pair: &mut Pair, way: Way, side: usize) {
    let [stamp, _, seen] = words(pair.channel.free_area(), way, side) else { return };
    while seen.load(SeqCst) < ALL_SWITCHES {
        // The peer answers a message.
        if way == Way::Plain {
            apic::start_timer(TIMER_ONE_SHOT, TIMER, PAUSE);
        }
        stamp.store(cpu::tsc(), SeqCst);
        if way == Way::Message {
            pair.send([0; 2]);
        }
        cpu::enable_and_halt();
        cpu::disable_interrupts();
        pair.drain();
    }
}

/// Measures the time from the peer's `HLT` (the peer is `side`) to this VM's next instruction.
/// `ahead`: lead of this VM's counter.
fn watch(pair: &mut Pair, way: Way, side: usize, ahead: u64) {
    let [stamp, ticks, seen] = words(pair.channel.free_area(), way, side) else { return };
    let (mut sum, mut count, mut last) = (0u64, 0, 0);
    if way == Way::Message {
        // The first one may have been taken before.
        pair.send([0; 2]);
    }
    while count < ALL_SWITCHES {
        let began = match way {
            Way::Plain => after_gap(),
            Way::Message => handled(pair),
        };
        let stamp = stamp.load(SeqCst);
        // An interrupt of the host's makes a gap too.
        if stamp == last {
            continue;
        }
        last = stamp;
        if count == WARM_SWITCHES {
            sum = 0;
        }
        sum = sum.wrapping_add(began.wrapping_sub(stamp.wrapping_add(ahead)));
        count += 1;
        ticks.store(sum, SeqCst);
        seen.store(count, SeqCst);
        if way == Way::Message {
            pair.send([0; 2]);
        }
    }
}

/// Waits until this machine has not had the CPU for some time, and then has it.
fn after_gap() -> u64 {
    let mut last = cpu::tsc();
    loop {
        let now = cpu::tsc();
        if now - last > GAP {
            return now;
        }
        last = now;
    }
}

/// Waits, ready to run, for the next message: when its handler began.
fn handled(pair: &mut Pair) -> u64 {
    let before = RUNG.load(SeqCst);
    cpu::enable_interrupts();
    while RUNG.load(SeqCst) == before {
        core::hint::spin_loop();
    }
    cpu::disable_interrupts();
    pair.drain();
    RUNG.load(SeqCst)
}

fn print(name: &str, ticks: u64, count: u64) {
    let tenths = ticks * 10 / count;
    println!("VB {name} {}.{} ns", tenths / 10, tenths % 10);
}

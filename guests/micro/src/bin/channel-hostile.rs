//! A peer that keeps no rule of channels: random words in the memory, random registers, doorbells
//! without end, shares of what is no memory, foreign numbers. It must harm itself only; those
//! beside it judge.
#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use guests_micro::channel::{self, ChannelEnd};
use guests_micro::pci::base_address;
use guests_micro::random::Random;
use guests_micro::trap::{FIRST_INTERRUPT, TrapFrame};
use guests_micro::{apic, boot, cpu, guest, println};
use hw_tables::pci::{BARS, register};
use proto::channel::register::*;
use proto::channel::{ENTRIES, MAX_PAYLOAD, Message, SHARES, hypercall};

guest!(main, trap);

const VECTOR: u8 = 0x40;
const STEPS: u64 = 800;
/// Words of both rings.
const RING_WORDS: u64 = 0x200 / 8;
const PAGE: u64 = 4096;

static INTERRUPTS: AtomicU32 = AtomicU32::new(0);

fn trap(frame: &mut TrapFrame) {
    if u64::from(frame.vector()) < FIRST_INTERRUPT {
        guests_micro::trap::unexpected(frame);
    }
    INTERRUPTS.fetch_add(1, Relaxed);
    apic::end_of_interrupt();
}

fn main() {
    apic::enable();
    let Some(mut channel) = channel::first(VECTOR) else { return };
    cpu::enable_interrupts();
    let mut random = Random(cpu::tsc());
    for _ in 0..STEPS {
        step(&mut channel, &mut random);
    }
    println!("{} interrupts", INTERRUPTS.load(Relaxed));
}

fn step(channel: &mut ChannelEnd, random: &mut Random) {
    match random.below(12) {
        0 => scribble(channel, random),
        // Indices that are nearly right do more than random ones.
        1 => {
            let word = &channel.memory()[random.below(RING_WORDS) as usize];
            word.store(word.load(Relaxed).wrapping_add(random.below(80)), Relaxed);
        }
        2 => {
            for _ in 0..random.below(100) {
                channel.ring();
            }
        }
        3 => channel.write(DOORBELL, random.word() as u32),
        4 => _ = channel::ring(random.word() >> random.below(64)),
        5 => offer(channel, random),
        6 => _ = channel.command(random.below(SHARES as u64) as usize, random.below(3) as u32),
        7 => {
            let share = channel.share(random.below(SHARES as u64) as usize);
            let word = &share[random.below(share.len() as u64) as usize];
            word.store(random.word(), Relaxed);
            _ = word.load(Relaxed);
        }
        8 => channel.write(random.below(WINDOW.into()) & !3, random.word() as u32),
        9 => {
            let number = hypercall::ID + random.below(4);
            let words = [0; 5].map(|_: u64| random.word());
            _ = cpu::hypercall_with(number, random.below(3), words);
        }
        10 => flood(channel, random),
        _ => move_windows(channel, random),
    }
}

/// Random words in the rings, sometimes in their entries.
fn scribble(channel: &ChannelEnd, random: &mut Random) {
    let words = if random.below(4) == 0 { channel.memory().len() as u64 } else { RING_WORDS };
    for _ in 0..random.below(32) {
        let bits = random.below(64);
        channel.memory()[random.below(words) as usize].store(random.word() >> bits, Relaxed);
    }
}

/// A share of memory, of what is none, or of both.
fn offer(channel: &ChannelEnd, random: &mut Random) {
    let ram = boot::free_ram().map(|(_, end)| end).max().unwrap_or(0);
    let address = match random.below(4) {
        0 => random.word(),
        1 => ram - random.below(4) * PAGE,
        2 => channel.memory_address(),
        _ => boot::free_ram().map(|(start, _)| start).next().unwrap_or(0).next_multiple_of(PAGE),
    };
    let length = (random.below(70) * PAGE) as u32;
    let share = random.below(SHARES as u64) as usize;
    channel.offer(share, address, length, random.below(5) as u32);
}

/// Messages until the ring is full, as far as it still is one; their lengths are wrong now and
/// then.
fn flood(channel: &ChannelEnd, random: &mut Random) {
    let Some((mut sender, _)) = channel.rings() else { return };
    for _ in 0..2 * ENTRIES {
        let payload = [random.word(); MAX_PAYLOAD / 8];
        let tag = random.word() as u32;
        if sender.send(&Message { tag, length: random.below(57) as u32, payload }).is_err() {
            break;
        }
    }
    channel.ring();
}

/// Moves windows to random places, over each other and over other resources, and restores them.
fn move_windows(channel: &mut ChannelEnd, random: &mut Random) {
    let function = channel.function();
    let at = base_address(random.below(BARS.into()) as u8);
    let old = function.read(at);
    function.write(at, (random.word() >> random.below(40)) as u32);
    function.write(register::COMMAND, random.below(8) as u32);
    function.write(at, old);
    channel.enable(VECTOR);
}

//! A channel whose one end restarts repeatedly: side 1 has many lives, side 0 has one and
//! continues. It does not matter who ends a life, and where in the program that is: no message is
//! lost, and shares are those of this life.
//!
//! Side 1 asks, with numbers that continue across lives in the free area, and side 0 answers. A
//! question in flight when a life ended is asked again in the next one, so a question may come
//! twice, and so may its answer.
//!
//! Command line: with `messages=N` side 1 ends its life after N answers; with `lives=N` side 0 ends
//! in the peer's life N.
#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use guests_micro::channel::{self, ChannelEnd, Ends, is_intact, words};
use guests_micro::cpu::sleep_until;
use guests_micro::random::mix;
use guests_micro::{apic, boot, check, guest, println};
use proto::channel::register::*;

guest!(main, apic::acknowledge);

const VECTOR: u8 = 0x40;
const PAGE: u64 = 4096;
/// The share of each side.
const SHARE: usize = 0;
/// Value that an absent share reads as.
const ABSENT: u64 = u64::MAX;

/// Words of the free area: the next question, and lives of side 1 so far.
const NEXT: usize = 0;
const LIVES: usize = 1;

fn main() {
    apic::enable();
    let Some(channel) = channel::first(VECTOR) else { return };
    let Some(ends) = Ends::new(channel) else {
        check!(false, "the memory is too short");
        return;
    };
    offer(channel);
    if channel.read(SIDE) == 0 { answer(ends) } else { ask(ends) }
}

/// Offers a page, of which each word is known.
fn offer(channel: ChannelEnd) {
    let found = boot::free_ram().find(|(start, end)| end - start >= 2 * PAGE);
    let address = found.map_or(0, |(start, _)| start.next_multiple_of(PAGE));
    for (index, word) in words(address, PAGE).iter().enumerate() {
        word.store(mix(index as u64), SeqCst);
    }
    let accepted = channel.offer(SHARE, address, PAGE as u32, COMMAND_OPEN);
    check!(accepted, "a share cannot be offered in a new life");
}

/// Returns true if a share of the peer is as offered, or absent, when all its words have one value.
fn is_right(share: &[AtomicU64], may_be_absent: bool) -> bool {
    share[..(PAGE / 8) as usize].iter().enumerate().all(|(index, word)| match word.load(SeqCst) {
        ABSENT => may_be_absent,
        value => value == mix(index as u64),
    })
}

/// Side 1.
fn ask(mut ends: Ends) {
    let channel = ends.channel;
    let area = channel.free_area();
    area[LIVES].fetch_add(1, SeqCst);
    // In the first life the peer may not have offered it yet.
    sleep_until(|| channel.command(SHARE, COMMAND_OPEN).then_some(()));
    let mut left = boot::argument("messages").unwrap_or(u64::MAX);
    while left > 0 {
        let next = area[NEXT].load(SeqCst);
        ends.tell(2 * next);
        loop {
            let received = ends.receive();
            let number = u64::from(received.tag);
            check!(is_intact(&received, number), "answer {number:#x} is another one");
            if number == 2 * next + 1 {
                break;
            }
            check!(number < 2 * next, "answer {number:#x} before its question");
        }
        area[NEXT].store(next + 1, SeqCst);
        if !is_right(channel.share(SHARE), false) {
            // It is gone with the peer, or something is wrong.
            check!(is_right(channel.share(SHARE), true), "the peer's share has changed");
            sleep_until(|| (channel.read(PEER) == 0).then_some(()));
            return;
        }
        left -= 1;
    }
}

/// Side 0.
fn answer(mut ends: Ends) {
    let channel = ends.channel;
    let area = channel.free_area();
    let lives = boot::argument("lives").unwrap_or(u64::MAX);
    let (mut next, mut mapped, mut changes) = (0, 0, 0);
    while area[LIVES].load(SeqCst) < lives {
        let received = ends.receive();
        let number = u64::from(received.tag);
        check!(is_intact(&received, number), "question {number:#x} is another one");
        let question = number / 2;
        check!(question <= next && question + 1 >= next, "{question} comes instead of {next}");
        next = question + 1;
        if channel.peers(SHARE, SHARE_STATE) == 1 && channel.command(SHARE, COMMAND_OPEN) {
            mapped += 1;
        }
        check!(is_right(channel.share(SHARE), true), "the peer's share is something else");
        if channel.read(EVENTS) & EVENT_PEER != 0 {
            channel.write(EVENTS, EVENT_PEER);
            changes += 1;
        }
        ends.tell(number + 1);
    }
    check!(mapped > 1 && changes > 1, "{mapped} shares, {changes} changes of the peer");
    println!("{next} questions, {mapped} shares, {changes} changes of the peer");
}

//! Both ends of a channel: messages with checksums, a full ring, shares. The description starts it
//! in two machines; their side of the first channel decides their roles. Further channels lead to
//! peers that may do anything.
#![no_std]
#![no_main]

use abi::vcpu::doorbell;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use guests_micro::channel::{self, ChannelEnd, Ends, is_intact, message, words};
use guests_micro::cpu::sleep_until;
use guests_micro::random::mix;
use guests_micro::trap::{FIRST_INTERRUPT, TrapFrame};
use guests_micro::{apic, boot, check, cpu, guest, println};
use proto::channel::register::*;
use proto::channel::{ENTRIES, MAX_PAYLOAD, Message, SHARE_BYTES, SHARES, SendError, hypercall};

guest!(main, trap);

const DOORBELL_VECTOR: u8 = 0x40;
const EVENT_VECTOR: u8 = 0x41;
/// Vectors of channels to others.
const OTHER_VECTORS: u8 = 0x50;
const ROUNDS: u64 = 2_000;
/// Messages beyond the ring's length that are sent at once.
const BEYOND: u64 = 10;
/// Pages that are shared.
const PAGES: u64 = 3;
const PAGE: u64 = 4096;
/// The share that is used.
const SHARE: usize = 2;
const WRITTEN: u64 = 0x1234_5678_9abc_def0;
/// No message of the test has this tag.
const FOREIGN: u32 = 0xffff_0000;

static DOORBELLS: AtomicU32 = AtomicU32::new(0);
static EVENTS_SEEN: AtomicU32 = AtomicU32::new(0);
static OTHERS: AtomicU32 = AtomicU32::new(0);

fn trap(frame: &mut TrapFrame) {
    match frame.vector() {
        DOORBELL_VECTOR => DOORBELLS.fetch_add(1, SeqCst),
        EVENT_VECTOR => EVENTS_SEEN.fetch_add(1, SeqCst),
        OTHER_VECTORS.. => OTHERS.fetch_add(1, SeqCst),
        vector if u64::from(vector) < FIRST_INTERRUPT => guests_micro::trap::unexpected(frame),
        vector => {
            println!("FAILED: interrupt {vector:#x}");
            guests_micro::exit(guests_micro::FAILED)
        }
    };
    apic::end_of_interrupt();
}

fn main() {
    apic::enable();
    let mut all = channel::all();
    let Some(mut channel) = all.next() else {
        check!(false, "there is no channel");
        return;
    };
    channel.enable(DOORBELL_VECTOR);
    check!(channel.read(MAGIC) == MAGIC_VALUE, "magic {:#x}", channel.read(MAGIC));
    check!(channel.read(VERSION) == VERSION_VALUE, "version {}", channel.read(VERSION));
    let mut others = Others::default();
    for (mut other, slot) in all.zip(&mut others.ends) {
        other.enable(OTHER_VECTORS);
        *slot = Other::new(other);
    }
    let id = cpu::hypercall_with(hypercall::ID, 0, [0; 5]).0;
    check!(id == channel.read(OWN_ID).into(), "hypercall says id {id}");
    check!(id != channel.read(PEER_ID).into(), "the peer has the same id");
    check!(channel.name(OWN_NAME) != channel.name(PEER_NAME), "the peer has the same name");
    check!(channel::ring(77) == doorbell::UNBOUND, "a doorbell that does not exist");
    cpu::enable_interrupts();
    let Some(mut ends) = Ends::new(channel) else {
        check!(false, "the memory is too short");
        return;
    };
    let leads = channel.read(SIDE) == 0;
    let mut step = ping_pong(&mut ends, leads, &mut others);
    step = full_ring(&mut ends, leads, step);
    step = user_mode(&mut ends, leads, step);
    if leads {
        share_own(&mut ends, step);
        move_window(&mut ends);
    } else {
        use_share(&mut ends, step);
    }
    by_hypercall(&mut ends, leads);
    println!("{} doorbells, {} from others", DOORBELLS.load(SeqCst), OTHERS.load(SeqCst));
    println!("channel ok, {} messages of others", others.messages);
}

/// Messages back and forth; the number of the next one.
fn ping_pong(ends: &mut Ends, leads: bool, others: &mut Others) -> u64 {
    for round in 0..ROUNDS {
        let (ping, pong) = (2 * round, 2 * round + 1);
        if leads {
            ends.tell(ping);
            ends.expect(pong);
        } else {
            ends.expect(ping);
            ends.tell(pong);
        }
        others.endure();
    }
    if leads {
        others.wait_for_ends();
    }
    2 * ROUNDS
}

/// More messages than the ring holds: the sender gets an error, and no message is lost.
fn full_ring(ends: &mut Ends, leads: bool, step: u64) -> u64 {
    let count = u64::from(ENTRIES) + BEYOND;
    let proceed = &ends.channel.free_area()[0];
    if leads {
        for number in 0..count {
            let sent = ends.sender.send(&message(step + number));
            if number < ENTRIES.into() {
                check!(sent.is_ok(), "message {number} of an empty ring: {sent:?}");
            } else {
                check!(sent == Err(SendError::Full), "message {number} of a full ring: {sent:?}");
            }
        }
        proceed.store(1, SeqCst);
        ends.channel.ring();
        for number in u64::from(ENTRIES)..count {
            ends.tell(step + number);
        }
    } else {
        sleep_until(|| (proceed.load(SeqCst) == 1).then_some(()));
        for number in 0..count {
            ends.expect(step + number);
        }
    }
    step + count
}

/// Hypercalls are the kernel's: a user program's are refused, and the peer hears and gets nothing.
fn user_mode(ends: &mut Ends, leads: bool, step: u64) -> u64 {
    const TIMES: u64 = 20;
    // A doorbell from before may still be on its way.
    const LATE: u32 = 2;
    let before = DOORBELLS.load(SeqCst);
    for time in 0..TIMES {
        let (ready, done) = (step + 2 * time, step + 2 * time + 1);
        if leads {
            ends.expect(ready);
            let number = ends.channel.number();
            for call in [hypercall::DOORBELL, hypercall::ID, hypercall::SEND, hypercall::RECEIVE] {
                let result = cpu::hypercall_as_user(call, number);
                check!(result == u64::MAX, "a user's hypercall {call:#x} gives {result:#x}");
            }
            ends.tell(done);
        } else {
            ends.tell(ready);
            // Without a wish to be rung.
            let received = loop {
                if let Ok(Some((received, _))) = ends.receiver.receive() {
                    break received;
                }
            };
            check!(is_intact(&received, done), "a user has sent {:#x}", received.tag);
        }
    }
    let heard = DOORBELLS.load(SeqCst) - before;
    check!(leads || heard <= LATE, "users have rung {heard} times");
    step + 2 * TIMES
}

/// A piece of RAM that no other code uses.
fn own_pages() -> u64 {
    let found = boot::free_ram().find(|(start, end)| end - start >= 2 * PAGES * PAGE);
    found.map_or(0, |(start, _)| start.next_multiple_of(PAGE))
}

/// The side that shares.
fn share_own(ends: &mut Ends, step: u64) {
    let address = own_pages();
    check!(address != 0, "no free memory");
    let length = (PAGES * PAGE) as u32;
    let pages = words(address, PAGES * PAGE);
    for (index, word) in pages.iter().enumerate() {
        word.store(mix(index as u64), SeqCst);
    }
    let channel = ends.channel;
    let ram: u64 = boot::free_ram().map(|(_, end)| end).max().unwrap_or(0);
    for (what, address, length) in [
        ("what is no RAM", ram, PAGE),
        ("the end of RAM and more", ram - PAGE, 2 * PAGE),
        ("a window", 0xd000_0000, PAGE),
        ("the local APIC", 0xfee0_0000, PAGE),
        ("an address beyond all", u64::MAX - PAGE + 1, PAGE),
        ("half a page", address, PAGE / 2),
        ("nothing", address, 0),
        ("a wrong address", address + 8, PAGE),
        ("too much", address, SHARE_BYTES + PAGE),
    ] {
        let accepted = channel.offer(SHARE, address, length as u32, COMMAND_OPEN | COMMAND_WRITE);
        check!(!accepted, "{what} is accepted as a share");
        check!(channel.own(SHARE, SHARE_STATE) == 0, "{what} is offered");
    }
    // To read and write.
    check!(channel.offer(SHARE, address, length, COMMAND_OPEN | COMMAND_WRITE), "not accepted");
    check!(channel.own(SHARE, SHARE_STATE) == 1, "it is not offered");
    check!(!channel.offer(SHARE, address, length, COMMAND_OPEN), "it is offered twice");
    ends.tell(step);
    ends.expect(step + 1);
    check!(channel.own(SHARE, SHARE_STATE) == 2, "the peer has not mapped it");
    check!(pages[7].load(SeqCst) == WRITTEN, "what the peer wrote did not come");
    check!(channel.offer(SHARE, 0, 0, COMMAND_CLOSE), "it is not revoked");
    check!(channel.own(SHARE, SHARE_STATE) == 0, "it is still offered");
    ends.tell(step + 2);
    ends.expect(step + 3);
    check!(pages[7].load(SeqCst) == WRITTEN, "the peer can still write");
    // To read only; the peer lets it go.
    check!(channel.offer(SHARE, address, length, COMMAND_OPEN), "not accepted again");
    ends.tell(step + 4);
    ends.expect(step + 5);
    check!(pages[8].load(SeqCst) == mix(8), "the peer can write to what it may read");
    check!(channel.own(SHARE, SHARE_STATE) == 1, "the peer has not let it go");
    check!(channel.offer(SHARE, 0, 0, COMMAND_CLOSE), "it is not revoked");
}

/// The side that maps.
fn use_share(ends: &mut Ends, step: u64) {
    let channel = ends.channel;
    let share = channel.share(SHARE);
    let there = (PAGES * PAGE / 8) as usize;
    let is_absent =
        |what: &str| check!(share[7].load(SeqCst) == u64::MAX, "{what}: the share is readable");
    ends.expect(step);
    sleep_until(|| (EVENTS_SEEN.load(SeqCst) != 0).then_some(()));
    sleep_until(|| (channel.read(EVENTS) & EVENT_SHARES != 0).then_some(()));
    channel.write(EVENTS, EVENT_SHARES);
    is_absent("offered");
    check!(channel.peers(SHARE, SHARE_STATE) == 1 | STATE_WRITABLE, "it is not offered");
    check!(channel.peers(SHARE, SHARE_LENGTH) == (PAGES * PAGE) as u32, "it has another length");
    for other in (0..SHARES).filter(|&other| other != SHARE) {
        check!(!channel.command(other, COMMAND_OPEN), "share {other} can be mapped");
    }
    check!(channel.command(SHARE, COMMAND_OPEN), "it cannot be mapped");
    check!(channel.command(SHARE, COMMAND_OPEN), "it cannot be mapped when it is");
    for (index, word) in share[..there].iter().enumerate() {
        check!(word.load(SeqCst) == mix(index as u64), "word {index} of the share");
    }
    check!(share[there].load(SeqCst) == u64::MAX, "there is more than was offered");
    share[7].store(WRITTEN, SeqCst);
    ends.tell(step + 1);
    ends.expect(step + 2);
    is_absent("revoked");
    share[7].store(!WRITTEN, SeqCst);
    check!(channel.peers(SHARE, SHARE_STATE) == 0, "a revoked share has a state");
    check!(!channel.command(SHARE, COMMAND_OPEN), "a revoked share can be mapped");
    ends.tell(step + 3);
    ends.expect(step + 4);
    check!(channel.peers(SHARE, SHARE_STATE) == 1, "it may be written");
    check!(channel.command(SHARE, COMMAND_OPEN), "it cannot be mapped again");
    check!(share[7].load(SeqCst) == WRITTEN, "it has changed");
    share[8].store(WRITTEN, SeqCst);
    check!(channel.command(SHARE, COMMAND_CLOSE), "it cannot be let go");
    is_absent("let go");
    ends.tell(step + 5);
}

/// The window of the memory can be moved, and shows the same there.
fn move_window(ends: &mut Ends) {
    let mut channel = ends.channel;
    let home = channel.memory_address() as u32;
    let word = |channel: &ChannelEnd| channel.free_area()[3].load(SeqCst);
    channel.free_area()[3].store(WRITTEN, SeqCst);
    channel.move_memory(home + (1 << 24));
    check!(word(&channel) == WRITTEN, "the window shows something else where it was moved");
    channel.move_memory(home);
    check!(word(&channel) == WRITTEN, "the window shows something else where it was");
}

/// A last message each way, without touching the rings.
fn by_hypercall(ends: &mut Ends, leads: bool) {
    let number = ends.channel.number();
    let send = |words: [u64; 5]| cpu::hypercall_with(hypercall::SEND, number, words).0;
    let receive = || {
        ends.receiver.want_messages(true);
        sleep_until(|| {
            let (result, words) = cpu::hypercall_with(hypercall::RECEIVE, number, [0; 5]);
            check!(matches!(result, hypercall::DONE | hypercall::NOT_NOW), "it gives {result}");
            (result == hypercall::DONE).then_some(words)
        })
    };
    let (ping, pong) = ([1, 2, 3, 4, 5], [6, 7, 8, 9, u64::MAX]);
    let absent = cpu::hypercall_with(hypercall::SEND, 77, ping).0;
    check!(absent == hypercall::NO_CHANNEL, "a message to no channel gives {absent}");
    if leads {
        check!(send(ping) == hypercall::DONE, "it is not sent");
        check!(receive() == pong, "it came as something else");
    } else {
        check!(receive() == ping, "it came as something else");
        check!(send(pong) == hypercall::DONE, "it is not sent");
    }
}

// ---- channels to peers that may do anything
// --------------------------------------------------------

/// The rings of a channel whose peer may do anything.
struct Other {
    ends: Ends,
    /// A life of the peer has ended.
    has_ended: bool,
}

impl Other {
    fn new(channel: ChannelEnd) -> Option<Self> {
        Some(Self { ends: Ends::new(channel)?, has_ended: false })
    }

    /// Takes and gives messages, maps what is offered and lets it go; the number of messages that
    /// came.
    fn endure(&mut self) -> u64 {
        self.look_at_peer();
        let Ends { channel, sender, receiver } = &mut self.ends;
        let mut messages = 0;
        for _ in 0..ENTRIES {
            match receiver.receive() {
                Ok(Some((message, _))) => {
                    check!(message.length as usize <= MAX_PAYLOAD, "{} bytes", message.length);
                    messages += 1;
                }
                Ok(None) => break,
                Err(_) => {
                    if let Some((new_sender, new_receiver)) = channel.rings() {
                        (*sender, *receiver) = (new_sender, new_receiver);
                    }
                }
            }
        }
        // Full or broken is as good.
        let _ = sender.send(&Message { tag: FOREIGN, ..message(messages) });
        for share in 0..SHARES {
            if channel.peers(share, SHARE_STATE) != 0 && channel.command(share, COMMAND_OPEN) {
                SUM.fetch_xor(channel.share(share)[9].load(SeqCst), SeqCst);
                channel.command(share, COMMAND_CLOSE);
            }
        }
        messages
    }

    /// Notes that the peer has ended; a peer that has not started yet has no event.
    fn look_at_peer(&mut self) {
        let channel = &self.ends.channel;
        if channel.read(EVENTS) & EVENT_PEER != 0 {
            channel.write(EVENTS, EVENT_PEER);
            self.has_ended |= channel.read(PEER) == 0;
        }
    }
}

/// So that what peers share is really read.
static SUM: AtomicU64 = AtomicU64::new(0);

/// All of them.
#[derive(Default)]
struct Others {
    ends: [Option<Other>; 3],
    messages: u64,
}

impl Others {
    fn endure(&mut self) {
        for other in self.ends.iter_mut().flatten() {
            self.messages += other.endure();
        }
    }

    /// Waits until each peer has ended at least once: however fast this program was, it has seen
    /// a whole life of theirs.
    fn wait_for_ends(&mut self) {
        for other in self.ends.iter_mut().flatten() {
            sleep_until(|| {
                other.look_at_peer();
                other.has_ended.then_some(())
            });
        }
    }
}

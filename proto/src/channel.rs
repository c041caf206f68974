//! Channels between virtual machines: what guests see (`docs/spec/channel.md` is the specification), and what a VMM asks
//! of root for them.
//!
//! The memory is two guests', who do not trust each other, and neither does anybody trust them. Each side keeps its own
//! position of a ring privately; what it reads of the other side is checked against that, so random words in the memory
//! make an operation fail with [`Broken`], and never an access beyond the ring. An entry is copied before it is looked at.
//!
//! These rings are not [`crate::ring`]: they begin with zeros that nobody writes, go on when one side starts
//! again, and their words have 32 bits, for drivers in any language.
//!
//! A VMM calls root through its control gate, for shares; the reply's label is [`crate::DONE`] or [`crate::REFUSED`].
//!
//! | label | words | reply |
//! |---|---|---|
//! | [`OFFER`] | [`ShareRef`], offset in guest memory, bytes, 1 if it may be written | |
//! | [`REVOKE`] | [`ShareRef`] | |
//! | [`MAP`] | [`ShareRef`] | the pages are mapped at [`crate::start::shares`] |
//! | [`LET_GO`] | [`ShareRef`] | |
//! | [`LOOK`] | [`ShareRef`], of which the share is ignored | [`View`] |

use core::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// Most channels in a system.
pub const MAX_CHANNELS: usize = 16;
/// Most channels of a virtual machine.
pub const MAX_VM_CHANNELS: usize = 4;
/// Least bytes of a channel's memory.
pub const MIN_SIZE: u64 = 16 << 10;
/// Most bytes of a channel's memory.
pub const MAX_SIZE: u64 = 16 << 20;
/// Messages that a ring holds.
pub const ENTRIES: u32 = 64;
/// Bytes of an entry.
pub const ENTRY: usize = 64;
/// Most bytes of a message's payload.
pub const MAX_PAYLOAD: usize = 56;
/// Offset of the free area of the memory.
pub const FREE_AREA: u64 = 0x3000;
/// Shares of a side.
pub const SHARES: usize = 4;
/// Most bytes of a share.
pub const SHARE_BYTES: u64 = 256 << 10;

/// Registers of the PCI function, in its window.
pub mod register {
    #![allow(missing_docs, reason = "the specification has them")]
    pub const MAGIC: u64 = 0x00;
    /// Value of [`MAGIC`].
    pub const MAGIC_VALUE: u32 = u32::from_le_bytes(*b"CHAN");
    pub const VERSION: u64 = 0x04;
    /// Value of [`VERSION`].
    pub const VERSION_VALUE: u32 = 1;
    pub const SIDE: u64 = 0x08;
    pub const NUMBER: u64 = 0x0c;
    pub const OWN_ID: u64 = 0x10;
    pub const PEER_ID: u64 = 0x14;
    pub const SIZE: u64 = 0x18;
    pub const FLAGS: u64 = 0x1c;
    pub const PEER: u64 = 0x20;
    pub const EVENTS: u64 = 0x24;
    /// Bit of [`EVENTS`]: the peer was started or has ended.
    pub const EVENT_PEER: u32 = 1;
    /// Bit of [`EVENTS`]: the state of a share has changed.
    pub const EVENT_SHARES: u32 = 2;
    pub const DOORBELL: u64 = 0x28;
    pub const OWN_NAME: u64 = 0x40;
    pub const PEER_NAME: u64 = 0x60;
    /// Bytes of a name.
    pub const NAME_LEN: usize = 32;
    pub const OWN_SHARES: u64 = 0x100;
    pub const PEER_SHARES: u64 = 0x200;
    /// Bytes of a share's registers.
    pub const SHARE_STEP: u64 = 0x20;
    /// Of a share: first address, low half; the upper one follows.
    pub const SHARE_ADDRESS: u64 = 0x00;
    pub const SHARE_LENGTH: u64 = 0x08;
    pub const SHARE_COMMAND: u64 = 0x0c;
    /// Command, own share: offer to read; peer's share: map.
    pub const COMMAND_OPEN: u32 = 1;
    /// Bit of [`COMMAND_OPEN`]: also to write.
    pub const COMMAND_WRITE: u32 = 2;
    /// Command, own share: revoke; peer's share: let go.
    pub const COMMAND_CLOSE: u32 = 0;
    pub const SHARE_STATE: u64 = 0x10;
    /// Bit of [`SHARE_STATE`], peer's share: it may be written.
    pub const STATE_WRITABLE: u32 = 1 << 8;
    pub const SHARE_RESULT: u64 = 0x14;
    /// First MSI-X vector's table entry.
    pub const TABLE: u64 = 0x1000;
    /// MSI-X pending bits.
    pub const PENDING: u64 = 0x1800;
    /// Bytes of the window.
    pub const WINDOW: u32 = 0x2000;
}

/// Hypercalls that the VMM answers, and their results.
pub mod hypercall {
    /// `rax`: ring. Our kernel answers it without the VMM (`HYPERCALL_DOORBELL` in `abi`); other hosts may not.
    pub const DOORBELL: u64 = 0x5041_5241_0001;
    /// `rax`: the number of this machine.
    pub const ID: u64 = 0x5041_5241_0010;
    /// `rax`: send a message.
    pub const SEND: u64 = 0x5041_5241_0011;
    /// `rax`: receive a message.
    pub const RECEIVE: u64 = 0x5041_5241_0012;
    /// Words of payload in registers.
    pub const WORDS: usize = 4;
    /// Result: done, or rung.
    pub const DONE: u64 = 0;
    /// Result: there is no such channel; or no doorbell, or nobody to hear it.
    pub const NO_CHANNEL: u64 = 1;
    /// Result: the ring is full, or empty.
    pub const NOT_NOW: u64 = 2;
    /// Result: the peer had broken the ring.
    pub const BROKEN: u64 = 3;
}

// ---- messages --------------------------------------------------------------------------------------

/// The other side has written what it never may. Attaching again makes the ring usable, and empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken;

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// For the two guests' use.
    pub tag: u32,
    /// Bytes of the payload, at most [`MAX_PAYLOAD`].
    pub length: u32,
    /// The payload, little-endian; what is beyond its length has no meaning.
    pub payload: [u64; MAX_PAYLOAD / 8],
}

/// Why a message is not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendError {
    /// There is no room.
    Full,
    /// The message is longer than [`MAX_PAYLOAD`].
    TooLong,
    /// See there.
    Broken,
}

const WORD: usize = size_of::<u64>();
/// Words (of 64 bits, of which rings use the lower half) of a ring, and where in them each is.
const RING_WORDS: usize = 0x100 / WORD;
const TAIL: usize = 0;
const HEAD: usize = 0x40 / WORD;
const WANT_MESSAGES: usize = 0x80 / WORD;
const WANT_ROOM: usize = 0xc0 / WORD;
const ENTRIES_AT: usize = 0x1000 / WORD;
const ENTRY_WORDS: usize = ENTRY / WORD;
const RING_ENTRY_WORDS: usize = ENTRIES as usize * ENTRY_WORDS;

/// A ring in a channel's memory.
#[derive(Clone, Copy)]
struct Ring<'m> {
    /// [`RING_WORDS`] of them.
    words: &'m [AtomicU64],
    /// [`RING_ENTRY_WORDS`] of them.
    entries: &'m [AtomicU64],
}

impl<'m> Ring<'m> {
    /// The ring from side `side` to the other one.
    fn new(memory: &'m [AtomicU64], side: usize) -> Option<Self> {
        let (words, entries) = (side * RING_WORDS, ENTRIES_AT + side * RING_ENTRY_WORDS);
        Some(Self {
            words: memory.get(words..words + RING_WORDS)?,
            entries: memory.get(entries..entries + RING_ENTRY_WORDS)?,
        })
    }

    fn entry(self, position: u32) -> &'m [AtomicU64] {
        let first = (position % ENTRIES) as usize * ENTRY_WORDS;
        &self.entries[first..first + ENTRY_WORDS]
    }

    fn load(self, word: usize) -> u32 {
        self.words[word].load(Ordering::SeqCst) as u32
    }

    /// Sequentially consistent, like [`Ring::load`]: so whoever is about to sleep sees the message, or the other side
    /// sees that it wants to be woken.
    fn store(self, word: usize, value: u32) {
        self.words[word].store(value.into(), Ordering::SeqCst);
    }
}

/// Messages in a ring, if there can be as many.
fn filled(tail: u32, head: u32) -> Result<u32, Broken> {
    let filled = tail.wrapping_sub(head);
    if filled <= ENTRIES { Ok(filled) } else { Err(Broken) }
}

/// The sending end of a ring.
pub struct Sender<'m> {
    ring: Ring<'m>,
    tail: u32,
}

impl<'m> Sender<'m> {
    /// The sender of side `side` (0 or 1); goes on where the last one stopped. `None` if the memory is too short.
    pub fn attach(memory: &'m [AtomicU64], side: usize) -> Option<Self> {
        let ring = Ring::new(memory, side)?;
        let (mut tail, head) = (ring.load(TAIL), ring.load(HEAD));
        if filled(tail, head).is_err() {
            tail = head;
            ring.store(TAIL, tail);
        }
        Some(Self { ring, tail })
    }

    /// Puts a message into the ring; gives whether the receiver wants to be rung.
    pub fn send(&mut self, message: &Message) -> Result<bool, SendError> {
        if message.length as usize > MAX_PAYLOAD {
            return Err(SendError::TooLong);
        }
        let Ok(filled) = filled(self.tail, self.ring.load(HEAD)) else {
            return Err(SendError::Broken);
        };
        if filled == ENTRIES {
            return Err(SendError::Full);
        }
        let entry = self.ring.entry(self.tail);
        let first = u64::from(message.length) | u64::from(message.tag) << 32;
        for (word, value) in entry.iter().zip(core::iter::once(first).chain(message.payload)) {
            word.store(value, Ordering::Relaxed);
        }
        self.tail = self.tail.wrapping_add(1);
        self.ring.store(TAIL, self.tail);
        Ok(self.ring.load(WANT_MESSAGES) != 0)
    }

    /// Whether the receiver is to ring when there is room. After `true`, try once more before sleeping.
    pub fn want_room(&self, wanted: bool) {
        self.ring.store(WANT_ROOM, wanted.into());
    }
}

/// The receiving end of a ring.
pub struct Receiver<'m> {
    ring: Ring<'m>,
    head: u32,
}

impl<'m> Receiver<'m> {
    /// The receiver of side `side` (0 or 1); goes on where the last one stopped. `None` if the memory is too short.
    pub fn attach(memory: &'m [AtomicU64], side: usize) -> Option<Self> {
        let ring = Ring::new(memory, side ^ 1)?;
        let (tail, mut head) = (ring.load(TAIL), ring.load(HEAD));
        if filled(tail, head).is_err() {
            head = tail;
            ring.store(HEAD, head);
        }
        Some(Self { ring, head })
    }

    /// Takes a message, if there is one; gives also whether the sender wants to be rung.
    pub fn receive(&mut self) -> Result<Option<(Message, bool)>, Broken> {
        if filled(self.ring.load(TAIL), self.head)? == 0 {
            return Ok(None);
        }
        let entry = self.ring.entry(self.head);
        let first = entry[0].load(Ordering::Relaxed);
        let mut payload = [0; MAX_PAYLOAD / 8];
        for (value, word) in payload.iter_mut().zip(&entry[1..]) {
            *value = word.load(Ordering::Relaxed);
        }
        let message = Message { tag: (first >> 32) as u32, length: first as u32, payload };
        if message.length as usize > MAX_PAYLOAD {
            return Err(Broken);
        }
        self.head = self.head.wrapping_add(1);
        self.ring.store(HEAD, self.head);
        Ok(Some((message, self.ring.load(WANT_ROOM) != 0)))
    }

    /// Whether the sender is to ring when there is a message. After `true`, look once more before sleeping.
    pub fn want_messages(&self, wanted: bool) {
        self.ring.store(WANT_MESSAGES, wanted.into());
    }
}

// ---- a VMM's end -----------------------------------------------------------------------------------

/// What a VMM knows of a channel from the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct End<'a> {
    /// 0 or 1.
    pub side: u8,
    /// Number of the peer among all virtual machines, from 1.
    pub peer: u32,
    /// Its name.
    pub peer_name: &'a str,
    /// There is a doorbell.
    pub doorbell: bool,
    /// Events to signal to the peer.
    pub signal: u64,
}

/// Label: offer guest memory to the peer.
pub const OFFER: u64 = 16;
/// Label: take it back.
pub const REVOKE: u64 = 17;
/// Label: map what the peer offers.
pub const MAP: u64 = 18;
/// Label: let it go.
pub const LET_GO: u64 = 19;
/// Label: what the channel is like now.
pub const LOOK: u64 = 20;

/// A share of a channel, in a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareRef {
    /// Number of the channel with the VMM.
    pub channel: usize,
    /// Number of the share, below [`SHARES`].
    pub share: usize,
}

impl ShareRef {
    /// As a word.
    pub const fn pack(self) -> u64 {
        self.channel as u64 | (self.share as u64) << 8
    }

    /// Reads a word.
    pub fn unpack(word: u64) -> Option<Self> {
        let (channel, share) = ((word & 0xff) as usize, (word >> 8) as usize);
        (channel < MAX_VM_CHANNELS && share < SHARES).then_some(Self { channel, share })
    }
}

/// What has become of a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ShareState {
    /// There is none.
    #[default]
    None,
    /// Offered.
    Offered,
    /// Offered, and mapped by the other side.
    Mapped,
}

impl ShareState {
    const fn unpack(bits: u64) -> Self {
        match bits & 3 {
            0 => Self::None,
            1 => Self::Offered,
            _ => Self::Mapped,
        }
    }
}

/// A share of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PeerShare {
    /// Whether it is there, and mapped here.
    pub state: ShareState,
    /// It may be written.
    pub writable: bool,
    /// Bytes; 0: there is none.
    pub length: u32,
}

/// What a channel is like, as one side sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct View {
    /// The peer runs.
    pub peer_runs: bool,
    /// How often it was started, modulo 2^16.
    pub starts: u16,
    /// Shares of this side.
    pub own: [ShareState; SHARES],
    /// Shares of the peer.
    pub peers: [PeerShare; SHARES],
}

impl View {
    /// As words of a reply.
    pub fn pack(&self) -> [u64; 4] {
        let mut words = [0; SHARES];
        for ((word, own), peers) in words.iter_mut().zip(self.own).zip(self.peers) {
            *word = own as u64
                | (peers.state as u64) << 8
                | u64::from(peers.writable) << 16
                | u64::from(peers.length) << 32;
        }
        words[0] |= u64::from(self.peer_runs) << 24;
        words[1] |= u64::from(self.starts & 0xff) << 24;
        words[2] |= u64::from(self.starts >> 8) << 24;
        words
    }

    /// Reads words of a reply.
    pub fn unpack(words: [u64; 4]) -> Self {
        let byte = |index: usize| (words[index] >> 24 & 0xff) as u16;
        Self {
            peer_runs: byte(0) != 0,
            starts: byte(1) | byte(2) << 8,
            own: words.map(ShareState::unpack),
            peers: words.map(|word| PeerShare {
                state: ShareState::unpack(word >> 8),
                writable: word >> 16 & 1 != 0,
                length: (word >> 32) as u32,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn memory() -> Vec<AtomicU64> {
        testing::memory(MIN_SIZE as usize / WORD)
    }

    fn message(number: u32) -> Message {
        let payload = core::array::from_fn(|word| u64::from(number) << 8 | word as u64);
        Message { tag: !number, length: number % 57, payload }
    }

    #[test]
    fn messages_arrive_in_order_and_a_full_ring_loses_nothing() {
        let memory = memory();
        let (mut to_1, mut to_0) =
            (Sender::attach(&memory, 0).unwrap(), Sender::attach(&memory, 1).unwrap());
        let (mut at_1, mut at_0) =
            (Receiver::attach(&memory, 1).unwrap(), Receiver::attach(&memory, 0).unwrap());
        for round in 0..3 {
            for number in 0..ENTRIES {
                assert_eq!(to_1.send(&message(round * 100 + number)), Ok(false));
            }
            assert_eq!(to_1.send(&message(7)), Err(SendError::Full));
            assert_eq!(to_0.send(&message(round)), Ok(false));
            for number in 0..ENTRIES {
                let expected = message(round * 100 + number);
                assert_eq!(at_1.receive(), Ok(Some((expected, false))));
            }
            assert_eq!(at_1.receive(), Ok(None));
            assert_eq!(at_0.receive(), Ok(Some((message(round), false))));
        }
        let long = Message { length: MAX_PAYLOAD as u32 + 1, ..message(0) };
        assert_eq!(to_1.send(&long), Err(SendError::TooLong));
        assert!(Sender::attach(&memory[..0x2ff8 / 8], 1).is_none());
    }

    #[test]
    fn wishes_are_seen() {
        let memory = memory();
        let mut sender = Sender::attach(&memory, 1).unwrap();
        let mut receiver = Receiver::attach(&memory, 0).unwrap();
        receiver.want_messages(true);
        assert_eq!(sender.send(&message(1)), Ok(true));
        receiver.want_messages(false);
        assert_eq!(sender.send(&message(2)), Ok(false));
        sender.want_room(true);
        assert_eq!(receiver.receive(), Ok(Some((message(1), true))));
        sender.want_room(false);
        assert_eq!(receiver.receive(), Ok(Some((message(2), false))));
    }

    #[test]
    fn each_side_may_start_again() {
        let memory = memory();
        let mut sender = Sender::attach(&memory, 0).unwrap();
        sender.send(&message(1)).unwrap();
        sender.send(&message(2)).unwrap();
        Receiver::attach(&memory, 1).unwrap().receive().unwrap();
        let mut sender = Sender::attach(&memory, 0).unwrap();
        sender.send(&message(3)).unwrap();
        let mut receiver = Receiver::attach(&memory, 1).unwrap();
        for number in [2, 3] {
            assert_eq!(receiver.receive(), Ok(Some((message(number), false))));
        }
    }

    #[test]
    fn what_the_peer_must_not_write_breaks_its_ring_only() {
        let memory = memory();
        let mut sender = Sender::attach(&memory, 0).unwrap();
        let mut receiver = Receiver::attach(&memory, 1).unwrap();
        memory[TAIL].store(65, Ordering::Relaxed);
        assert_eq!(receiver.receive(), Err(Broken));
        let mut again = Receiver::attach(&memory, 1).unwrap();
        assert_eq!(again.receive(), Ok(None));
        memory[HEAD].store(1, Ordering::Relaxed);
        assert_eq!(sender.send(&message(0)), Err(SendError::Broken));
        memory[TAIL].store(0, Ordering::Relaxed);
        let mut sender = Sender::attach(&memory, 0).unwrap();
        assert_eq!(sender.send(&message(9)), Ok(false));
        let mut receiver = Receiver::attach(&memory, 1).unwrap();
        // Word 0 of entry 1: the length grows after the message was sent.
        memory[ENTRIES_AT + ENTRY_WORDS].store(57, Ordering::Relaxed);
        assert_eq!(receiver.receive(), Err(Broken));
    }

    #[test]
    fn random_words_do_no_harm() {
        let memory = memory();
        let mut random = 5u64;
        let mut sender = Sender::attach(&memory, 0).unwrap();
        let mut receiver = Receiver::attach(&memory, 1).unwrap();
        for _ in 0..20_000 {
            // Numerical Recipes' generator; its upper bits are good enough.
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let place = random >> 40 & (2 * RING_WORDS as u64 - 1);
            memory[place as usize].store(random >> 33 & 0x7f, Ordering::Relaxed);
            if sender.send(&message(3)) == Err(SendError::Broken) {
                sender = Sender::attach(&memory, 0).unwrap();
            }
            match receiver.receive() {
                Ok(Some((message, _))) => assert!(message.length as usize <= MAX_PAYLOAD),
                Ok(None) => {}
                Err(Broken) => receiver = Receiver::attach(&memory, 1).unwrap(),
            }
        }
    }

    #[test]
    fn words_round_trip() {
        let mut view = View { peer_runs: true, starts: 0xabcd, ..View::default() };
        view.own = [ShareState::Mapped, ShareState::None, ShareState::Offered, ShareState::None];
        view.peers[3] =
            PeerShare { state: ShareState::Mapped, writable: true, length: SHARE_BYTES as u32 };
        assert_eq!(View::unpack(view.pack()), view);
        let place = ShareRef { channel: 3, share: 2 };
        assert_eq!(ShareRef::unpack(place.pack()), Some(place));
        for word in [u64::MAX, 4, 4 << 8, 1 << 63] {
            assert_eq!(ShareRef::unpack(word), None);
        }
    }
}

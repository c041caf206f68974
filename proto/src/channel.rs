//! Channels between VMs: the layout that guests see (specified in `docs/spec/channel.md`), and the
//! calls of a VMM to root.
//!
//! Two guests share the memory; they do not trust each other, and the VMMs trust neither. Each side
//! keeps its position of a ring privately. Positions of the other side are checked against it, so
//! arbitrary words in the memory make an operation fail with [`Broken`], and never cause an access
//! outside of the ring. An entry is copied before it is validated.
//!
//! These rings are not [`crate::ring`]: their memory starts as zeros without initialisation, they
//! keep their positions when one side restarts, and their words have 32 bits, for drivers in any
//! language.
//!
//! A VMM calls root through its control gate for operations on shares; the label of the reply is
//! [`crate::DONE`] or [`crate::REFUSED`].
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

/// Largest number of channels in a system.
pub const MAX_CHANNELS: usize = 16;
/// Largest number of channels of a VM.
pub const MAX_VM_CHANNELS: usize = 4;
/// Smallest channel memory in bytes.
pub const MIN_SIZE: u64 = 16 << 10;
/// Largest channel memory in bytes.
pub const MAX_SIZE: u64 = 16 << 20;
/// Capacity of a ring in messages.
pub const ENTRIES: u32 = 64;
/// Bytes of an entry.
pub const ENTRY: usize = 64;
/// Largest payload of a message in bytes.
pub const MAX_PAYLOAD: usize = 56;
/// Offset of the free area of the memory.
pub const FREE_AREA: u64 = 0x3000;
/// Number of shares of a side.
pub const SHARES: usize = 4;
/// Largest share in bytes.
pub const SHARE_BYTES: u64 = 256 << 10;

/// Registers of the PCI function, as offsets in its BAR.
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
    /// Bit of [`EVENTS`]: the peer has started or ended.
    pub const EVENT_PEER: u32 = 1;
    /// Bit of [`EVENTS`]: a share has changed its state.
    pub const EVENT_SHARES: u32 = 2;
    pub const DOORBELL: u64 = 0x28;
    pub const OWN_NAME: u64 = 0x40;
    pub const PEER_NAME: u64 = 0x60;
    /// Length of a name in bytes.
    pub const NAME_LEN: usize = 32;
    pub const OWN_SHARES: u64 = 0x100;
    pub const PEER_SHARES: u64 = 0x200;
    /// Stride of the shares' registers.
    pub const SHARE_STEP: u64 = 0x20;
    /// Register of a share: low half of its address; the high half follows.
    pub const SHARE_ADDRESS: u64 = 0x00;
    pub const SHARE_LENGTH: u64 = 0x08;
    pub const SHARE_COMMAND: u64 = 0x0c;
    /// Command. Own share: offer it read-only. Peer's share: map it.
    pub const COMMAND_OPEN: u32 = 1;
    /// Bit of [`COMMAND_OPEN`]: writable.
    pub const COMMAND_WRITE: u32 = 2;
    /// Command. Own share: revoke it. Peer's share: unmap it.
    pub const COMMAND_CLOSE: u32 = 0;
    pub const SHARE_STATE: u64 = 0x10;
    /// Bit of [`SHARE_STATE`], peer's share: it is writable.
    pub const STATE_WRITABLE: u32 = 1 << 8;
    pub const SHARE_RESULT: u64 = 0x14;
    /// MSI-X table.
    pub const TABLE: u64 = 0x1000;
    /// MSI-X pending bit array.
    pub const PENDING: u64 = 0x1800;
    /// Length of the BAR in bytes.
    pub const WINDOW: u32 = 0x2000;
}

/// Hypercalls that the VMM handles, and their results.
pub mod hypercall {
    /// `rax`: ring the doorbell. The kernel handles it without the VMM (`HYPERCALL_DOORBELL` in
    /// `abi`); other hosts may not.
    pub const DOORBELL: u64 = 0x5041_5241_0001;
    /// `rax`: return the id of this VM.
    pub const ID: u64 = 0x5041_5241_0010;
    /// `rax`: send a message.
    pub const SEND: u64 = 0x5041_5241_0011;
    /// `rax`: receive a message.
    pub const RECEIVE: u64 = 0x5041_5241_0012;
    /// Words of payload in registers.
    pub const WORDS: usize = 4;
    /// Result: success.
    pub const DONE: u64 = 0;
    /// Result: no such channel, no doorbell, or the peer does not run.
    pub const NO_CHANNEL: u64 = 1;
    /// Result: the ring is full (send) or empty (receive).
    pub const NOT_NOW: u64 = 2;
    /// Result: the peer had violated the protocol of the ring.
    pub const BROKEN: u64 = 3;
}

// ---- messages ----

/// The other side has violated the protocol. Attaching again empties the ring and makes it usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken;

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// For the guests' own use.
    pub tag: u32,
    /// Bytes of the payload, at most [`MAX_PAYLOAD`].
    pub length: u32,
    /// Payload, little-endian; words beyond its length are undefined.
    pub payload: [u64; MAX_PAYLOAD / 8],
}

/// Failure to send a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendError {
    /// The ring is full.
    Full,
    /// The message is longer than [`MAX_PAYLOAD`].
    TooLong,
    /// The other side has violated the protocol.
    Broken,
}

const WORD: usize = size_of::<u64>();
/// Words of a ring (of 64 bits, of which rings use the lower half), and their offsets.
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
    /// Exactly [`RING_WORDS`] words.
    words: &'m [AtomicU64],
    /// Exactly [`RING_ENTRY_WORDS`] words.
    entries: &'m [AtomicU64],
}

impl<'m> Ring<'m> {
    /// Returns the ring from side `side` to the other side.
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

    /// Sequentially consistent, like [`Ring::load`]: either the side that is about to sleep sees
    /// the message, or the other side sees its request for a doorbell.
    fn store(self, word: usize, value: u32) {
        self.words[word].store(value.into(), Ordering::SeqCst);
    }
}

/// Returns the number of messages in a ring, if it does not exceed the capacity.
fn filled(tail: u32, head: u32) -> Result<u32, Broken> {
    let filled = tail.wrapping_sub(head);
    if filled <= ENTRIES { Ok(filled) } else { Err(Broken) }
}

/// Sending end of a ring.
pub struct Sender<'m> {
    ring: Ring<'m>,
    tail: u32,
}

impl<'m> Sender<'m> {
    /// Creates the sender of side `side` (0 or 1), at the position of the previous one. `None` if
    /// the memory is too short.
    pub fn attach(memory: &'m [AtomicU64], side: usize) -> Option<Self> {
        let ring = Ring::new(memory, side)?;
        let (mut tail, head) = (ring.load(TAIL), ring.load(HEAD));
        if filled(tail, head).is_err() {
            tail = head;
            ring.store(TAIL, tail);
        }
        Some(Self { ring, tail })
    }

    /// Sends a message; returns whether the receiver requests a doorbell.
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

    /// Requests a doorbell from the receiver when the ring has room. After `true`, retry once
    /// before sleeping.
    pub fn want_room(&self, wanted: bool) {
        self.ring.store(WANT_ROOM, wanted.into());
    }
}

/// Receiving end of a ring.
pub struct Receiver<'m> {
    ring: Ring<'m>,
    head: u32,
}

impl<'m> Receiver<'m> {
    /// Creates the receiver of side `side` (0 or 1), at the position of the previous one. `None` if
    /// the memory is too short.
    pub fn attach(memory: &'m [AtomicU64], side: usize) -> Option<Self> {
        let ring = Ring::new(memory, side ^ 1)?;
        let (tail, mut head) = (ring.load(TAIL), ring.load(HEAD));
        if filled(tail, head).is_err() {
            head = tail;
            ring.store(HEAD, head);
        }
        Some(Self { ring, head })
    }

    /// Receives a message, if there is one, with the sender's request for a doorbell.
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

    /// Requests a doorbell from the sender when it has sent a message. After `true`, receive once
    /// more before sleeping.
    pub fn want_messages(&self, wanted: bool) {
        self.ring.store(WANT_MESSAGES, wanted.into());
    }
}

// ---- the VMM side ----

/// Description of a channel in a VMM's start page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct End<'a> {
    /// Side of this VM, 0 or 1.
    pub side: u8,
    /// Id of the peer VM, from 1.
    pub peer: u32,
    /// Name of the peer VM.
    pub peer_name: &'a str,
    /// The sides can ring each other's doorbell.
    pub doorbell: bool,
    /// Events to signal to the peer.
    pub signal: u64,
}

/// Label: offer guest memory to the peer.
pub const OFFER: u64 = 16;
/// Label: revoke a share.
pub const REVOKE: u64 = 17;
/// Label: map a share of the peer.
pub const MAP: u64 = 18;
/// Label: unmap a share of the peer.
pub const LET_GO: u64 = 19;
/// Label: return the channel's [`View`].
pub const LOOK: u64 = 20;

/// Reference to a share of a channel, packed into a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareRef {
    /// Index of the channel in the VMM.
    pub channel: usize,
    /// Index of the share, below [`SHARES`].
    pub share: usize,
}

impl ShareRef {
    /// Packs the reference.
    pub const fn pack(self) -> u64 {
        self.channel as u64 | (self.share as u64) << 8
    }

    /// Unpacks a reference; `None` if an index is out of range.
    pub fn unpack(word: u64) -> Option<Self> {
        let (channel, share) = ((word & 0xff) as usize, (word >> 8) as usize);
        (channel < MAX_VM_CHANNELS && share < SHARES).then_some(Self { channel, share })
    }
}

/// State of a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ShareState {
    /// Not offered.
    #[default]
    None,
    /// Offered.
    Offered,
    /// Offered, and mapped by the peer.
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

/// Share of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PeerShare {
    /// State; [`ShareState::Mapped`] if this side has mapped it.
    pub state: ShareState,
    /// The share is writable.
    pub writable: bool,
    /// Length in bytes; 0: not offered.
    pub length: u32,
}

/// State of a channel, as one side sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct View {
    /// The peer runs.
    pub peer_runs: bool,
    /// Number of starts of the peer, modulo 2^16.
    pub starts: u16,
    /// Shares of this side.
    pub own: [ShareState; SHARES],
    /// Shares of the peer.
    pub peers: [PeerShare; SHARES],
}

impl View {
    /// Packs the state into the words of a reply.
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

    /// Unpacks the words of a reply.
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
        // Word 0 of entry 1: grows the length after the message was sent.
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
            // Generator of Numerical Recipes; only its upper bits are used.
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

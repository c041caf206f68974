//! Network session: Ethernet frames between a client and a switch, in shared memory ([`session`](crate::session)).
//!
//! | bytes | what |
//! |---|---|
//! | 0–8191 | header, ring of frames to the switch, ring of frames to the client |
//! | 8192… | two areas of equal length: data to the switch, data to the client |
//!
//! Who sends owns the area: it puts frames into it one behind the other and uses a place again when the frame there was
//! taken. Frames are dropped where there is no room, and all that wait are lost when either side is restarted.
//!
//! A frame carries what virtio-net says about it (virtio 1.2, section 5.1.6: checksum still to be made, segments still
//! to be cut), so that guests hand each other large frames without any work on them.
//!
//! Entry: word 0 offset (low half) and length (high half); words 1 and 2 [`Offload`].

use core::sync::atomic::AtomicU64;

use crate::ring::{self, Broken, Consumer, Producer};
use crate::session::{ClientLink, Connection, HEADER, INFO, Link, ServerLink};

/// Frames of a ring.
pub const FRAMES: usize = 128;
/// Offset of the data areas.
pub const DATA: u64 = 8192;
/// Shortest frame: two addresses and a type.
pub const MIN_FRAME: u64 = 14;
/// Longest frame: IPv6 with the longest payload, behind an Ethernet header with a VLAN tag.
pub const MAX_FRAME: u64 = 65_535 + 40 + 18;
/// Usual length of a session's memory in bytes.
pub const SESSION_BYTES: u64 = DATA + 2 * (160 << 10);

const ENTRY: usize = 3;
const TO_SWITCH: usize = HEADER;
const TO_CLIENT: usize = TO_SWITCH + ring::words(ENTRY, FRAMES);
const WORDS: usize = TO_CLIENT + ring::words(ENTRY, FRAMES);
const _: () = assert!(8 * WORDS as u64 <= DATA);
/// Frames begin at multiples of this.
const ALIGN: u64 = 64;

/// An Ethernet address.
pub type Mac = [u8; 6];

/// What is still to be done to a frame: the fields of `virtio_net_hdr` (virtio 1.2, section 5.1.6), with the same
/// values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// [`NEEDS_SUM`], [`SUM_VALID`].
    pub flags: u8,
    /// [`segments`]; other values are not passed on.
    pub segments: u8,
    /// Length of the headers of each segment.
    pub header: u16,
    /// Payload bytes of a segment.
    pub segment: u16,
    /// First byte to be summed.
    pub sum_start: u16,
    /// Where the checksum goes, from there.
    pub sum_offset: u16,
}

/// [`Offload::flags`]: the checksum is still to be made.
pub const NEEDS_SUM: u8 = 1;
/// [`Offload::flags`]: the checksum was verified.
pub const SUM_VALID: u8 = 2;

/// Values of [`Offload::segments`].
pub mod segments {
    /// The frame is whole.
    pub const NONE: u8 = 0;
    /// TCP over IPv4.
    pub const TCP4: u8 = 1;
    /// TCP over IPv6.
    pub const TCP6: u8 = 4;
    /// Added to one of the TCP kinds: its congestion bit is set.
    pub const ECN: u8 = 0x80;
}

impl Offload {
    fn pack(self) -> [u64; 2] {
        let first = u64::from(self.flags)
            | u64::from(self.segments) << 8
            | u64::from(self.header) << 16
            | u64::from(self.segment) << 32
            | u64::from(self.sum_start) << 48;
        [first, self.sum_offset.into()]
    }

    fn unpack([first, second]: [u64; 2]) -> Self {
        Self {
            flags: first as u8,
            segments: (first >> 8) as u8,
            header: (first >> 16) as u16,
            segment: (first >> 32) as u16,
            sum_start: (first >> 48) as u16,
            sum_offset: second as u16,
        }
    }
}

/// A frame in the session's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Offset in the session's memory.
    pub offset: u64,
    /// Length in bytes, [`MIN_FRAME`]..=[`MAX_FRAME`].
    pub length: u64,
    /// What is still to be done to it.
    pub offload: Offload,
}

/// What a switch tells a client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Info {
    /// The client's address: frames with another source are dropped.
    pub mac: Mac,
}

impl Info {
    fn pack(&self) -> [u64; INFO] {
        let [a, b, c, d, e, f] = self.mac;
        [u64::from_le_bytes([a, b, c, d, e, f, 0, 0]), 0, 0, 0, 0, 0, 0, 0]
    }

    fn unpack(words: [u64; INFO]) -> Self {
        let [a, b, c, d, e, f, _, _] = words[0].to_le_bytes();
        Self { mac: [a, b, c, d, e, f] }
    }
}

/// What frames a client takes besides whole ones with all checksums. The switch finishes others before it passes them
/// on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OffloadCaps {
    /// The checksum may be missing.
    pub sums: bool,
    /// TCP over IPv4 may be uncut.
    pub tcp4: bool,
    /// TCP over IPv6 may be uncut.
    pub tcp6: bool,
}

impl OffloadCaps {
    fn pack(self) -> u64 {
        u64::from(self.sums) | u64::from(self.tcp4) << 1 | u64::from(self.tcp6) << 2
    }

    fn unpack(word: u64) -> Self {
        Self { sums: word & 1 != 0, tcp4: word & 2 != 0, tcp6: word & 4 != 0 }
    }
}

/// An area of the session's memory.
#[derive(Clone, Copy)]
struct Area {
    first: u64,
    length: u64,
}

/// The areas of a session of `length` bytes: to the switch, to the client.
fn areas(length: u64) -> Option<(Area, Area)> {
    let each = (length.checked_sub(DATA)? / 2).min(u32::MAX.into()) & !(ALIGN - 1);
    let (first, second) = (DATA, DATA + each);
    let fits = each >= MAX_FRAME.next_multiple_of(ALIGN) && second + each <= u32::MAX.into();
    fits.then_some((Area { first, length: each }, Area { first: second, length: each }))
}

/// The side that sends frames in one direction.
pub struct Sender<'m> {
    ring: Producer<'m, ENTRY, FRAMES>,
    area: Area,
    /// Where the frame put as number `n` ends, at `n % FRAMES`.
    ends: [u32; FRAMES],
    /// Number of the oldest frame that was not taken when last looked.
    oldest: u32,
    /// First byte of the oldest frame and end of the newest one, from the start of the area.
    tail: u64,
    head: u64,
}

impl<'m> Sender<'m> {
    fn new(words: &'m [AtomicU64], area: Area) -> Option<Self> {
        let ring = Producer::new(words)?;
        Some(Self { ring, area, ends: [0; FRAMES], oldest: 0, tail: 0, head: 0 })
    }

    fn restart(&mut self) {
        self.ring.restart();
        (self.oldest, self.tail, self.head) = (0, 0, 0);
    }

    /// Gives the places of taken frames back.
    fn reclaim(&mut self) -> Result<(), Broken> {
        let taken = self.ring.total_taken()?;
        if taken.wrapping_sub(self.oldest) as usize > FRAMES {
            // The other side went back on what it had taken.
            return Err(Broken);
        }
        if taken == self.ring.total_put() {
            (self.tail, self.head) = (0, 0);
        } else if taken != self.oldest {
            self.tail = self.ends[taken.wrapping_sub(1) as usize % FRAMES].into();
        }
        self.oldest = taken;
        Ok(())
    }

    /// A place for a frame of `length` bytes: its offset in the session's memory. `None` if there is no room, or no
    /// frame is of that length. The place may be written to until [`send`](Self::send).
    pub fn place(&mut self, length: u64) -> Result<Option<u64>, Broken> {
        if !(MIN_FRAME..=MAX_FRAME).contains(&length) {
            return Ok(None);
        }
        self.reclaim()?;
        let filled = self.ring.total_put().wrapping_sub(self.oldest) as usize;
        Ok((filled < FRAMES).then(|| self.find(length, filled == 0)).flatten())
    }

    /// Finds the place, from the start of the session.
    fn find(&self, length: u64, empty: bool) -> Option<u64> {
        let length = length.next_multiple_of(ALIGN);
        let place = if empty || self.head > self.tail {
            // Free: behind the newest, and before the oldest.
            if self.head + length <= self.area.length {
                Some(self.head)
            } else {
                (length <= self.tail).then_some(0)
            }
        } else {
            (self.head + length <= self.tail).then_some(self.head)
        };
        place.map(|place| self.area.first + place)
    }

    /// Sends the frame whose [place](Self::place) was asked for last.
    pub fn send(&mut self, frame: Frame) -> Result<(), Broken> {
        let [second, third] = frame.offload.pack();
        let number = self.ring.total_put() as usize % FRAMES;
        if self.ring.put([frame.offset | frame.length << 32, second, third])? {
            let end =
                frame.offset.wrapping_sub(self.area.first) + frame.length.next_multiple_of(ALIGN);
            self.head = end.min(self.area.length);
            self.ends[number] = self.head as u32;
        }
        Ok(())
    }

    /// Whether the receiver sleeps and is to be signalled now; answered with `true` once.
    #[must_use]
    pub fn must_signal(&self) -> bool {
        self.ring.must_signal()
    }

    /// Asks for a signal when frames were taken. `false`: everything was taken already.
    pub fn sleep(&mut self) -> Result<bool, Broken> {
        self.ring.sleep(FRAMES)
    }
}

/// The side that receives frames in one direction.
pub struct Receiver<'m> {
    ring: Consumer<'m, ENTRY, FRAMES>,
    area: Area,
}

impl<'m> Receiver<'m> {
    fn new(words: &'m [AtomicU64], area: Area) -> Option<Self> {
        Some(Self { ring: Consumer::new(words)?, area })
    }

    /// The oldest frame, which stays where it is until [`done`](Self::done). Its data may change meanwhile if the
    /// sender breaks the rules: copy first, then look.
    pub fn peek(&mut self) -> Result<Option<Frame>, Broken> {
        let Some([first, second, third]) = self.ring.peek()? else { return Ok(None) };
        let (offset, length) = (first & u64::from(u32::MAX), first >> 32);
        let fits = (MIN_FRAME..=MAX_FRAME).contains(&length)
            && offset >= self.area.first
            && offset + length <= self.area.first + self.area.length;
        if !fits {
            return Err(Broken);
        }
        Ok(Some(Frame { offset, length, offload: Offload::unpack([second, third]) }))
    }

    /// Gives the oldest frame's place back.
    pub fn done(&mut self) {
        self.ring.advance();
    }

    /// Whether the sender sleeps and is to be signalled now; answered with `true` once.
    #[must_use]
    pub fn must_signal(&self) -> bool {
        self.ring.must_signal()
    }

    /// Asks for a signal when a frame comes. `false`: one is there.
    pub fn sleep(&mut self) -> Result<bool, Broken> {
        self.ring.sleep()
    }
}

/// A side of a session: what both do with frames. See [`Client`] and [`Port`].
pub struct End<'m, L> {
    link: L,
    sender: Sender<'m>,
    receiver: Receiver<'m>,
    must_signal: bool,
}

/// The client's side: a network card's connection.
pub type Client<'m> = End<'m, ClientLink<'m>>;
/// The switch's side of one client's session.
pub type Port<'m> = End<'m, PortLink<'m>>;

/// The switch's side of a connection.
pub struct PortLink<'m> {
    link: ServerLink<'m>,
    memory: &'m [AtomicU64],
    info: Info,
}

impl Link for PortLink<'_> {
    fn is_connected(&self) -> bool {
        self.link.is_connected()
    }

    fn give_up(&mut self) {
        self.link.give_up();
    }
}

impl<'m, L: Link> End<'m, L> {
    /// What `body` gives, if there is a connection; it ends if the other side has broken the rules.
    fn connected<T>(
        &mut self,
        otherwise: T,
        body: impl FnOnce(&mut Sender<'m>, &mut Receiver<'m>) -> Result<T, Broken>,
    ) -> T {
        if !self.link.is_connected() {
            return otherwise;
        }
        body(&mut self.sender, &mut self.receiver).unwrap_or_else(|Broken| {
            self.link.give_up();
            otherwise
        })
    }

    /// A place for a frame of `length` bytes to send, as an offset in the session's memory; `None` if there is no room.
    pub fn place(&mut self, length: u64) -> Option<u64> {
        self.connected(None, |sender, _| sender.place(length))
    }

    /// Sends the frame whose [place](Self::place) was asked for last, after its data was copied there.
    pub fn send(&mut self, frame: Frame) {
        let signal = self.connected(false, |sender, _| {
            sender.send(frame)?;
            Ok(sender.must_signal())
        });
        self.must_signal |= signal;
    }

    /// The oldest frame that came; it stays where it is until [`done`](Self::done).
    pub fn receive(&mut self) -> Option<Frame> {
        self.connected(None, |_, receiver| receiver.peek())
    }

    /// Gives the place of the oldest frame back.
    pub fn done(&mut self) {
        let signal = self.connected(false, |_, receiver| {
            receiver.done();
            Ok(receiver.must_signal())
        });
        self.must_signal |= signal;
    }

    /// Asks the other side to signal the next frame. `false`: [`receive`](Self::receive) again first.
    pub fn sleep(&mut self) -> bool {
        self.connected(true, |_, receiver| receiver.sleep())
    }

    /// Asks the other side to signal when it has taken frames, after [`place`](Self::place) found no room. `false`: it has
    /// taken all already.
    pub fn sleep_for_room(&mut self) -> bool {
        self.connected(true, |sender, _| sender.sleep())
    }

    /// Whether the other side is to be signalled now; asked after everything else.
    #[must_use]
    pub fn take_signal(&mut self) -> bool {
        core::mem::take(&mut self.must_signal)
    }

    /// Begins a connection with empty rings.
    fn restart(&mut self) {
        self.sender.restart();
        self.receiver.ring.restart();
    }
}

impl<'m> Client<'m> {
    /// The client of a session of `length` bytes whose first words are `memory`. `None` if it is too short.
    pub fn new(memory: &'m [AtomicU64], length: u64) -> Option<Self> {
        let (to_switch, to_client) = areas(length)?;
        let mut link = ClientLink::new(memory)?;
        link.set_client_info(OffloadCaps::default().pack());
        Some(Self {
            link,
            sender: Sender::new(memory.get(TO_SWITCH..)?, to_switch)?,
            receiver: Receiver::new(memory.get(TO_CLIENT..)?, to_client)?,
            must_signal: false,
        })
    }

    /// Looks after the connection; to be called when the switch has signalled, and before sending. `false`: there is
    /// none, and frames to be sent are to be dropped.
    pub fn poll(&mut self) -> bool {
        match self.link.poll() {
            Connection::Down => false,
            Connection::Asked => {
                self.must_signal = true;
                false
            }
            Connection::Fresh => {
                self.restart();
                true
            }
            Connection::Up => true,
        }
    }

    /// Says what frames the client takes from now on; at first, whole ones only.
    pub fn set_offload_caps(&mut self, caps: OffloadCaps) {
        self.link.set_client_info(caps.pack());
    }

    /// What the switch tells, if connected.
    pub fn info(&self) -> Option<Info> {
        self.link.info().map(Info::unpack)
    }
}

impl<'m> Port<'m> {
    /// The switch's end of a session of `length` bytes whose first words are `memory`, in a new generation. `None` if
    /// it is too short.
    pub fn new(memory: &'m [AtomicU64], length: u64, info: Info) -> Option<Self> {
        let (to_switch, to_client) = areas(length)?;
        Some(Self {
            link: PortLink { link: ServerLink::new(memory)?, memory, info },
            sender: Sender::new(memory.get(TO_CLIENT..)?, to_client)?,
            receiver: Receiver::new(memory.get(TO_SWITCH..)?, to_switch)?,
            must_signal: true,
        })
    }

    /// Looks after the connection; to be called when the client has signalled.
    pub fn poll(&mut self) -> bool {
        if let Some(request) = self.link.link.request() {
            ring::clear(&self.link.memory[TO_SWITCH..]);
            ring::clear(&self.link.memory[TO_CLIENT..]);
            self.restart();
            self.link.link.accept(request, self.link.info.pack());
            self.must_signal = true;
        }
        self.link.is_connected()
    }

    /// What frames the client takes.
    pub fn offload_caps(&self) -> OffloadCaps {
        OffloadCaps::unpack(self.link.link.client_info())
    }

    /// The client's address.
    pub fn mac(&self) -> Mac {
        self.link.info.mac
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::atomic::Ordering;

    use proptest::prelude::*;

    use super::*;
    use crate::testing::memory;

    const LENGTH: u64 = DATA + 2 * (66 << 10);
    const INFO: Info = Info { mac: [2, 1, 2, 3, 4, 5] };

    fn connect(client: &mut Client, port: &mut Port) {
        assert!(!client.poll());
        assert!(client.take_signal());
        assert!(port.poll());
        assert!(port.take_signal());
        assert!(client.poll());
        assert_eq!(client.info(), Some(INFO));
    }

    fn frame(offset: u64, length: u64) -> Frame {
        let offload = Offload {
            flags: NEEDS_SUM,
            segments: 0x81,
            header: 54,
            segment: 1448,
            sum_start: 34,
            sum_offset: 16,
        };
        Frame { offset, length, offload }
    }

    #[test]
    fn both_directions_and_signals() {
        let memory = memory(1024);
        let mut client = Client::new(&memory, LENGTH).unwrap();
        let mut port = Port::new(&memory, LENGTH, INFO).unwrap();
        assert_eq!(client.place(60), None, "not connected");
        connect(&mut client, &mut port);
        assert!(port.sleep());
        let place = client.place(60).unwrap();
        client.send(frame(place, 60));
        assert!(client.take_signal());
        assert_eq!(port.receive(), Some(frame(place, 60)));
        assert_eq!(port.receive(), Some(frame(place, 60)));
        port.done();
        assert_eq!(port.receive(), None);
        assert!(client.sleep());
        let place = port.place(MAX_FRAME).unwrap();
        port.send(frame(place, MAX_FRAME));
        assert!(port.take_signal());
        assert_eq!(port.place(MAX_FRAME), None, "no room for a second one");
        assert_eq!(client.receive(), Some(frame(place, MAX_FRAME)));
        client.done();
        assert!(port.place(MAX_FRAME).is_some());
    }

    #[test]
    fn no_frames_of_other_lengths() {
        let memory = memory(1024);
        let mut client = Client::new(&memory, LENGTH).unwrap();
        let mut port = Port::new(&memory, LENGTH, INFO).unwrap();
        connect(&mut client, &mut port);
        assert_eq!(client.place(MIN_FRAME - 1), None);
        assert_eq!(client.place(MAX_FRAME + 1), None);
        assert!(Client::new(&memory, DATA + MAX_FRAME).is_none());
        assert!(Client::new(&memory[..1023 - 160], LENGTH).is_none());
    }

    proptest! {
        /// Frames arrive in order, whole and unchanged: no two that wait overlap.
        #[test]
        fn places_never_overlap(steps in prop::collection::vec(prop_oneof![
            3 => (MIN_FRAME..2000).prop_map(Some),
            1 => (MIN_FRAME..=MAX_FRAME).prop_map(Some),
            3 => Just(None),
        ], 0..400)) {
            let memory = memory(1024);
            let mut client = Client::new(&memory, LENGTH).unwrap();
            let mut port = Port::new(&memory, LENGTH, INFO).unwrap();
            connect(&mut client, &mut port);
            let mut model: VecDeque<Frame> = VecDeque::new();
            for step in steps {
                match step {
                    Some(length) => {
                        if let Some(place) = client.place(length) {
                            let new = frame(place, length);
                            prop_assert!(place >= DATA && place + length <= DATA + (66 << 10));
                            for old in &model {
                                prop_assert!(old.offset + old.length <= place || place + length <= old.offset);
                            }
                            client.send(new);
                            model.push_back(new);
                        } else {
                            prop_assert!(!model.is_empty(), "an empty area takes every frame");
                        }
                    }
                    None => {
                        prop_assert_eq!(port.receive(), model.pop_front());
                        port.done();
                    }
                }
            }
        }

        #[test]
        fn hostile_words(writes in prop::collection::vec((0..1024usize, any::<u64>(), 0..4u8), 0..200)) {
            let memory = memory(1024);
            let mut client = Client::new(&memory, LENGTH).unwrap();
            let mut port = Port::new(&memory, LENGTH, INFO).unwrap();
            for (index, value, how) in writes {
                match how {
                    0 => memory[index].store(value, Ordering::Relaxed),
                    1 => memory[index].store(value % 256, Ordering::Relaxed),
                    2 => {
                        let _ = memory[TO_SWITCH].fetch_add(1, Ordering::Relaxed);
                        memory[TO_SWITCH + 16 + index % 384].store(value & 0xffff_0001_ffff, Ordering::Relaxed);
                    }
                    _ => {
                        let _ = memory[TO_CLIENT + 8].fetch_add(value % 3, Ordering::Relaxed);
                    }
                }
                let _ = (client.poll(), port.poll());
                let length = 1000 + value % 1000;
                for _ in 0..4 {
                    if let Some(place) = port.place(length) {
                        prop_assert!(place >= DATA + (66 << 10) && place + length <= LENGTH);
                        port.send(frame(place, length));
                    }
                    if let Some(frame) = port.receive() {
                        prop_assert!(frame.offset >= DATA && frame.offset + frame.length <= DATA + (66 << 10));
                        port.done();
                    }
                    let _ = (client.receive(), client.done(), client.place(100));
                }
                let _ = (client.sleep(), port.sleep(), client.sleep_for_room(), client.info());
            }
        }
    }
}

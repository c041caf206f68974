//! Network session: Ethernet frames between a client and a switch in shared memory
//! ([`session`](crate::session)).
//!
//! | bytes | content |
//! |---|---|
//! | 0–8191 | header, ring of frames to the switch, ring of frames to the client |
//! | 8192… | two areas of equal length: data to the switch, data to the client |
//!
//! The sender allocates its area as a ring: it reuses the place of a frame once the receiver has
//! consumed it. Frames are dropped where there is no room; a restart of either side drops all
//! frames in flight.
//!
//! A frame carries the offload fields of virtio-net (VIRTIO 1.2, section 5.1.6: missing checksum,
//! pending segmentation), so that guests exchange large frames without processing.
//!
//! Entry: word 0 offset (low half) and length (high half); words 1 and 2 [`Offload`].

use core::sync::atomic::AtomicU64;

use crate::ring::{self, Broken, Consumer, Producer};
use crate::session::{ClientLink, Connection, HEADER, INFO, Link, ServerLink};

/// Capacity of a ring in frames.
pub const FRAMES: usize = 128;
/// Offset of the data areas.
pub const DATA: u64 = 8192;
/// Shortest frame in bytes: two addresses and a type.
pub const MIN_FRAME: u64 = 14;
/// Longest frame in bytes: IPv6 with the longest payload, an Ethernet header with a VLAN tag.
pub const MAX_FRAME: u64 = 65_535 + 40 + 18;
/// Default length of a session's memory in bytes.
pub const SESSION_BYTES: u64 = DATA + 2 * (160 << 10);

const ENTRY: usize = 3;
const TO_SWITCH: usize = HEADER;
const TO_CLIENT: usize = TO_SWITCH + ring::words(ENTRY, FRAMES);
const WORDS: usize = TO_CLIENT + ring::words(ENTRY, FRAMES);
const _: () = assert!(8 * WORDS as u64 <= DATA);
/// Alignment of frames in bytes.
const ALIGN: u64 = 64;

/// An Ethernet address.
pub type Mac = [u8; 6];

/// Pending work on a frame: the fields of `virtio_net_hdr` (VIRTIO 1.2, section 5.1.6), with the
/// same values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// Flags: [`NEEDS_SUM`], [`SUM_VALID`].
    pub flags: u8,
    /// Kind of segmentation: see [`segments`]. Frames with other values are dropped.
    pub segments: u8,
    /// Length of the headers of each segment in bytes.
    pub header: u16,
    /// Payload of a segment in bytes (MSS).
    pub segment: u16,
    /// Offset of the first byte covered by the checksum.
    pub sum_start: u16,
    /// Offset of the checksum field from [`Self::sum_start`].
    pub sum_offset: u16,
}

/// [`Offload::flags`]: the checksum is incomplete.
pub const NEEDS_SUM: u8 = 1;
/// [`Offload::flags`]: the checksum is valid.
pub const SUM_VALID: u8 = 2;

/// Values of [`Offload::segments`].
pub mod segments {
    /// No segmentation.
    pub const NONE: u8 = 0;
    /// TCP over IPv4.
    pub const TCP4: u8 = 1;
    /// TCP over IPv6.
    pub const TCP6: u8 = 4;
    /// Flag in addition to a TCP kind: the segment has the ECN bit set.
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
    /// Pending work on the frame.
    pub offload: Offload,
}

/// Information of a switch for its client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Info {
    /// MAC address of the client: frames with another source are dropped.
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

/// Offloads that a client accepts. The switch completes checksums and segments frames for clients
/// that do not accept them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OffloadCaps {
    /// Frames with an incomplete checksum.
    pub sums: bool,
    /// TCP segmentation over IPv4 (TSO).
    pub tcp4: bool,
    /// TCP segmentation over IPv6 (TSO).
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

/// Data area of one direction.
#[derive(Clone, Copy)]
struct Area {
    first: u64,
    length: u64,
}

/// Returns the areas of a session of `length` bytes: to the switch, to the client.
fn areas(length: u64) -> Option<(Area, Area)> {
    let each = (length.checked_sub(DATA)? / 2).min(u32::MAX.into()) & !(ALIGN - 1);
    let (first, second) = (DATA, DATA + each);
    let fits = each >= MAX_FRAME.next_multiple_of(ALIGN) && second + each <= u32::MAX.into();
    fits.then_some((Area { first, length: each }, Area { first: second, length: each }))
}

/// Sending end of one direction.
pub struct Sender<'m> {
    ring: Producer<'m, ENTRY, FRAMES>,
    area: Area,
    /// End of the frame with sequence number `n`, at index `n % FRAMES`.
    ends: [u32; FRAMES],
    /// Sequence number of the oldest frame that was not consumed when last checked.
    oldest: u32,
    /// Start of the oldest frame and end of the newest one, from the start of the area.
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

    /// Reclaims the places of consumed frames.
    fn reclaim(&mut self) -> Result<(), Broken> {
        let taken = self.ring.total_taken()?;
        if taken.wrapping_sub(self.oldest) as usize > FRAMES {
            // The receiver has moved its position backwards.
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

    /// Allocates a place for a frame of `length` bytes: its offset in the session's memory. `None`
    /// if there is no room, or the length is out of range. The caller may write to the place until
    /// [`send`](Self::send).
    pub fn place(&mut self, length: u64) -> Result<Option<u64>, Broken> {
        if !(MIN_FRAME..=MAX_FRAME).contains(&length) {
            return Ok(None);
        }
        self.reclaim()?;
        let filled = self.ring.total_put().wrapping_sub(self.oldest) as usize;
        Ok((filled < FRAMES).then(|| self.find(length, filled == 0)).flatten())
    }

    /// Finds a free place; returns its offset from the start of the session.
    fn find(&self, length: u64, empty: bool) -> Option<u64> {
        let length = length.next_multiple_of(ALIGN);
        let place = if empty || self.head > self.tail {
            // Free: after the newest frame, and before the oldest.
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

    /// Sends the frame at the [place](Self::place) allocated last.
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

    /// Returns whether to signal the receiver, once per request.
    #[must_use]
    pub fn must_signal(&self) -> bool {
        self.ring.must_signal()
    }

    /// Requests a signal when frames are consumed. `false`: all frames were consumed already.
    pub fn sleep(&mut self) -> Result<bool, Broken> {
        self.ring.sleep(FRAMES)
    }
}

/// Receiving end of one direction.
pub struct Receiver<'m> {
    ring: Consumer<'m, ENTRY, FRAMES>,
    area: Area,
}

impl<'m> Receiver<'m> {
    fn new(words: &'m [AtomicU64], area: Area) -> Option<Self> {
        Some(Self { ring: Consumer::new(words)?, area })
    }

    /// Returns the oldest frame without consuming it. A sender that violates the protocol may
    /// change its data at any time: copy before validating.
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

    /// Consumes the oldest frame.
    pub fn done(&mut self) {
        self.ring.advance();
    }

    /// Returns whether to signal the sender, once per request.
    #[must_use]
    pub fn must_signal(&self) -> bool {
        self.ring.must_signal()
    }

    /// Requests a signal when a frame arrives. `false`: a frame is pending.
    pub fn sleep(&mut self) -> Result<bool, Broken> {
        self.ring.sleep()
    }
}

/// Frame operations common to both sides of a session. See [`Client`] and [`Port`].
pub struct End<'m, L> {
    link: L,
    sender: Sender<'m>,
    receiver: Receiver<'m>,
    must_signal: bool,
}

/// Client side of a session: the connection of a network card.
pub type Client<'m> = End<'m, ClientLink<'m>>;
/// Switch side of one client's session.
pub type Port<'m> = End<'m, PortLink<'m>>;

/// Switch side of a connection.
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
    /// Returns the result of `body`, or `otherwise` without a connection. Closes the connection if
    /// the other side has violated the protocol.
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

    /// Allocates a place for a frame of `length` bytes, as an offset in the session's memory;
    /// `None` if there is no room.
    pub fn place(&mut self, length: u64) -> Option<u64> {
        self.connected(None, |sender, _| sender.place(length))
    }

    /// Sends the frame at the [place](Self::place) allocated last, after its data was copied there.
    pub fn send(&mut self, frame: Frame) {
        let signal = self.connected(false, |sender, _| {
            sender.send(frame)?;
            Ok(sender.must_signal())
        });
        self.must_signal |= signal;
    }

    /// Returns the oldest received frame; it stays in place until [`done`](Self::done).
    pub fn receive(&mut self) -> Option<Frame> {
        self.connected(None, |_, receiver| receiver.peek())
    }

    /// Consumes the oldest received frame.
    pub fn done(&mut self) {
        let signal = self.connected(false, |_, receiver| {
            receiver.done();
            Ok(receiver.must_signal())
        });
        self.must_signal |= signal;
    }

    /// Requests a signal for the next frame. `false`: call [`receive`](Self::receive) again first.
    pub fn sleep(&mut self) -> bool {
        self.connected(true, |_, receiver| receiver.sleep())
    }

    /// Requests a signal when frames are consumed, after [`place`](Self::place) found no room.
    /// `false`: all frames were consumed already.
    pub fn sleep_for_room(&mut self) -> bool {
        self.connected(true, |sender, _| sender.sleep())
    }

    /// Returns whether to signal the other side. To be called after all other operations.
    #[must_use]
    pub fn take_signal(&mut self) -> bool {
        core::mem::take(&mut self.must_signal)
    }

    /// Starts a connection with empty rings.
    fn restart(&mut self) {
        self.sender.restart();
        self.receiver.ring.restart();
    }
}

impl<'m> Client<'m> {
    /// Creates the client of a session of `length` bytes whose first words are `memory`. `None` if
    /// it is too short.
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

    /// Polls the connection. To be called after a signal of the switch, and before sending.
    /// `false`: not connected, frames must be dropped.
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

    /// Publishes the offloads that the client accepts; initially none.
    pub fn set_offload_caps(&mut self, caps: OffloadCaps) {
        self.link.set_client_info(caps.pack());
    }

    /// Returns the information of the switch, if connected.
    pub fn info(&self) -> Option<Info> {
        self.link.info().map(Info::unpack)
    }
}

impl<'m> Port<'m> {
    /// Creates the switch side of a session of `length` bytes whose first words are `memory`, in a
    /// new generation. `None` if it is too short.
    pub fn new(memory: &'m [AtomicU64], length: u64, info: Info) -> Option<Self> {
        let (to_switch, to_client) = areas(length)?;
        Some(Self {
            link: PortLink { link: ServerLink::new(memory)?, memory, info },
            sender: Sender::new(memory.get(TO_CLIENT..)?, to_client)?,
            receiver: Receiver::new(memory.get(TO_SWITCH..)?, to_switch)?,
            must_signal: true,
        })
    }

    /// Polls for a new connection and accepts it. To be called after a signal of the client.
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

    /// Returns the offloads that the client accepts.
    pub fn offload_caps(&self) -> OffloadCaps {
        OffloadCaps::unpack(self.link.link.client_info())
    }

    /// Returns the index of the client's vCPU to signal ([`ServerLink::notified_vcpu`]).
    #[inline]
    pub fn notified_vcpu(&self) -> usize {
        self.link.link.notified_vcpu()
    }

    /// Returns the client's MAC address.
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
        /// Frames arrive in order, complete and unchanged: no two pending frames overlap.
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

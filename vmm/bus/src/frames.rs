//! Network cards and sockets whose frames and packets wait in the host's memory, in order: each side is a stream or a tap device of the host.

use core::iter;
use core::ops::RangeInclusive;

use proto::vsock::{HEADER, Header, MOST_DATA};
use proto::wedge;

use crate::backend::{Data, MAX_FRAME, Net, NetInfo, Offload, OffloadCaps, Packets};

/// Shortest frame: an Ethernet header.
const MIN_FRAME: u32 = 14;
/// Longest frame of a stream: what `passt` takes.
const MAX_STREAM_FRAME: u32 = 0xffff;

/// Where frames wait.
pub trait Frames {
    /// Puts data behind these bytes. `false`: there is no room; the virtual CPU is told when there is.
    fn put(&mut self, before: &[u8], data: &mut Data<'_>) -> bool;
    /// The length of the first frame. If there is none, the virtual CPU is told when there is.
    fn await_first(&mut self) -> Option<u32>;
    /// Copies bytes of the first frame, from behind so many, to guest memory.
    fn copy_first(&self, before: u32, to: &mut Data<'_>);
    /// Bytes of the first frame, from behind so many, if it has them.
    fn first_bytes<const N: usize>(&self, before: u32) -> Option<[u8; N]>;
    /// Forgets the first frame.
    fn forget_first(&mut self);
}

/// What a network card is connected to.
pub trait NetEndpoint: Frames {
    /// The other side is there.
    fn is_up(&self) -> bool;
    /// From now on the guest takes these frames.
    fn set_offload_caps(&mut self, caps: OffloadCaps);
}

/// What a network is like for the device model.
pub fn info(record: &wedge::Net) -> NetInfo {
    NetInfo { mac: record.mac, mtu: record.mtu, no_offloads: !record.is_tap() }
}

/// The outside of a network card.
#[derive(Debug)]
pub struct NetPort<P> {
    endpoint: P,
    /// Bytes of an offload header.
    header: u32,
    /// Lengths of what the guest may send; what is of another one is lost.
    sends: RangeInclusive<u32>,
}

impl<P: NetEndpoint> NetPort<P> {
    /// A card with frames of streams, or of tap devices behind their offload headers.
    pub fn new(endpoint: P, record: &wedge::Net) -> Self {
        let (header, most) = match record.is_tap() {
            true => (Offload::HEADER as u32, MAX_FRAME),
            false => (0, MAX_STREAM_FRAME),
        };
        Self { endpoint, header, sends: MIN_FRAME..=most }
    }
}

impl<P: NetEndpoint> Net for NetPort<P> {
    fn link_up(&self) -> bool {
        self.endpoint.is_up()
    }

    fn set_offload_caps(&mut self, caps: OffloadCaps) {
        self.endpoint.set_offload_caps(caps);
    }

    fn send(&mut self, offload: Offload, frame: &mut Data<'_>) -> bool {
        if !self.link_up() || !self.sends.contains(&frame.remaining()) {
            // As on a wire.
            return true;
        }
        self.endpoint.put(&offload.to_header()[..self.header as usize], frame)
    }

    fn first(&mut self) -> Option<(Offload, u32)> {
        loop {
            let length = self.endpoint.await_first()?;
            let offload = match self.header {
                0 => Some(Offload::default()),
                _ => self.endpoint.first_bytes(0).and_then(|bytes| Offload::from_header(&bytes)),
            };
            match (offload, length.checked_sub(self.header)) {
                (Some(offload), Some(rest)) if rest <= MAX_FRAME => return Some((offload, rest)),
                _ => self.endpoint.forget_first(),
            }
        }
    }

    fn copy(&mut self, offset: u32, to: &mut Data<'_>) {
        self.endpoint.copy_first(self.header.saturating_add(offset), to);
    }

    fn drop_first(&mut self) {
        self.endpoint.forget_first();
    }
}

/// The outside of a socket device. Packets go over a stream to a process of the host's (`hosted/jail`), which keeps connections. A packet of no bytes
/// says that the guest's device was reset.
#[derive(Debug)]
pub struct Sockets<F> {
    stream: F,
    /// The other side has packets of this driver.
    has_sent: bool,
    /// The other side does not know of a reset yet.
    is_reset: bool,
}

impl<F: Frames> Sockets<F> {
    /// Without packets.
    pub fn new(stream: F) -> Self {
        Self { stream, has_sent: false, is_reset: false }
    }
}

impl<F: Frames> Packets for Sockets<F> {
    fn send(&mut self, packet: &mut Data<'_>) -> bool {
        if !(HEADER as u32..=HEADER as u32 + MOST_DATA).contains(&packet.remaining()) {
            return true;
        }
        if self.is_reset {
            let mut nothing = iter::empty();
            let mut nothing = Data::new(packet.memory(), &mut nothing, 0);
            self.is_reset = !self.stream.put(&[], &mut nothing);
        }
        let is_taken = !self.is_reset && self.stream.put(&[], packet);
        self.has_sent |= is_taken;
        is_taken
    }

    fn first(&mut self) -> Option<(Header, u32)> {
        loop {
            let length = self.stream.await_first()?;
            if let Some(bytes) = self.stream.first_bytes(0) {
                return Some((Header::from_bytes(&bytes), length.saturating_sub(HEADER as u32)));
            }
            // No packet: somebody has changed what is in shared memory.
            self.stream.forget_first();
        }
    }

    fn copy(&mut self, offset: u32, to: &mut Data<'_>) {
        self.stream.copy_first(offset.saturating_add(HEADER as u32), to);
    }

    fn drop_first(&mut self) {
        self.stream.forget_first();
    }

    fn reset(&mut self) {
        // Whoever of the host waits for the first driver goes on waiting.
        self.is_reset |= core::mem::take(&mut self.has_sent);
    }
}

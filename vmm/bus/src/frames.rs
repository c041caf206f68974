//! Network and socket back ends whose frames and packets are queued in host memory, in order. The
//! host side of each is a stream socket or a tap device.

use core::iter;
use core::ops::RangeInclusive;

use proto::vsock::{HEADER, Header, MOST_DATA};

use crate::backend::{Data, MAX_FRAME, Net, NetInfo, Offload, OffloadCaps, Packets};

/// Shortest frame: an Ethernet header.
const MIN_FRAME: u32 = 14;
/// Longest frame of a stream: the limit of `passt`.
const MAX_STREAM_FRAME: u32 = 0xffff;

/// Queues of frames in both directions.
pub trait Frames {
    /// Queues `before`, then `data`, as one frame. Returns `false` without room; the vCPU is
    /// notified when there is room.
    fn put(&mut self, before: &[u8], data: &mut Data<'_>) -> bool;
    /// Length of the first frame. Without one, the vCPU is notified when a frame arrives.
    fn await_first(&mut self) -> Option<u32>;
    /// Copies bytes of the first frame, after the first `before` bytes, to guest memory.
    fn copy_first(&self, before: u32, to: &mut Data<'_>);
    /// Bytes of the first frame, after the first `before` bytes, if it has that many.
    fn first_bytes<const N: usize>(&self, before: u32) -> Option<[u8; N]>;
    /// Drops the first frame.
    fn forget_first(&mut self);
}

/// Host side of a network device.
pub trait NetEndpoint: Frames {
    /// True if the peer is connected.
    fn is_up(&self) -> bool;
    /// Sets the offloads that the guest accepts on receive.
    fn set_offload_caps(&mut self, caps: OffloadCaps);
}

/// Returns the properties of a network for the device model: a stream, or a tap device.
pub const fn info(mac: [u8; 6], mtu: u16, is_tap: bool) -> NetInfo {
    NetInfo { mac, mtu, no_offloads: !is_tap, has_fixed_link: is_tap }
}

/// Back end of a network device.
#[derive(Debug)]
pub struct NetPort<P> {
    endpoint: P,
    /// Bytes of an offload header.
    header: u32,
    /// Accepted lengths of frames from the guest; frames of another length are dropped.
    sends: RangeInclusive<u32>,
}

impl<P: NetEndpoint> NetPort<P> {
    /// Creates a port with frames of a stream, or of a tap device with offload headers.
    pub fn new(endpoint: P, is_tap: bool) -> Self {
        let (header, most) = match is_tap {
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
            // Dropped, as on a disconnected wire.
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

/// Back end of a socket device. Packets go over a stream to a host process (`hosted/devices`) that
/// keeps the connections. An empty packet signals a reset of the guest's device.
#[derive(Debug)]
pub struct Sockets<F> {
    stream: F,
    /// The host process has packets of this driver.
    has_sent: bool,
    /// The host process has not been notified of a reset yet.
    is_reset: bool,
}

impl<F: Frames> Sockets<F> {
    /// Creates a back end without queued packets.
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
            // Not a packet: shared memory was corrupted.
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
        // A driver that has sent no packet needs no reset: host clients that wait for it keep
        // waiting.
        self.is_reset |= core::mem::take(&mut self.has_sent);
    }
}

//! Network device.
//!
//! State: a pair of queues, negotiated offloads, the link status known to the guest.
//! Features: checksum and TCP segmentation offload in both directions, mergeable receive buffers
//! for long frames, MAC address, MTU, link status. Offload headers from the guest are validated:
//! the back end gets only offsets inside the frame. A frame that the guest must not send, or has no
//! room to receive, is dropped, as on a wire.
//! Missing: a control queue (receive filters, VLANs, announcements), several pairs, UDP
//! segmentation.
//! Documentation: VIRTIO 1.2, section 5.1 "Network Device".

use super::queue::{Queue, RingError, with_readable, with_writable};
use super::{BATCH, CONFIG_LEN, Kind, VirtioDevice, more};
use vmm_bus::Env;
use vmm_bus::backend::{MAX_FRAME, NetInfo, Offload, OffloadCaps, Segments};

/// Queues, features, configuration, offload header.
pub mod spec {
    pub use vmm_bus::backend::header::*;

    /// Queue: frames to the guest.
    pub const RECEIVE: usize = 0;
    /// Queue: frames from the guest.
    pub const TRANSMIT: usize = 1;

    /// Feature: the device completes checksums.
    pub const F_CSUM: u64 = 1 << 0;
    /// Feature: the guest completes and trusts checksums.
    pub const F_GUEST_CSUM: u64 = 1 << 1;
    /// Feature: MTU.
    pub const F_MTU: u64 = 1 << 3;
    /// Feature: MAC address.
    pub const F_MAC: u64 = 1 << 5;
    /// Feature: the guest accepts unsegmented TCP over IPv4.
    pub const F_GUEST_TSO4: u64 = 1 << 7;
    /// Feature: the guest accepts unsegmented TCP over IPv6.
    pub const F_GUEST_TSO6: u64 = 1 << 8;
    /// Feature: the device accepts unsegmented TCP over IPv4.
    pub const F_HOST_TSO4: u64 = 1 << 11;
    /// Feature: the device accepts unsegmented TCP over IPv6.
    pub const F_HOST_TSO6: u64 = 1 << 12;
    /// Feature: a frame may occupy several receive buffers.
    pub const F_MRG_RXBUF: u64 = 1 << 15;
    /// Feature: link status.
    pub const F_STATUS: u64 = 1 << 16;

    /// Configuration: MAC address, 6 bytes.
    pub const MAC: usize = 0;
    /// Configuration: status, 16 bits.
    pub const STATUS: usize = 6;
    /// Configuration: MTU, 16 bits.
    pub const MTU: usize = 10;
    /// Status: the link is up.
    pub const S_LINK_UP: u8 = 1;

    /// Bytes of the offload header: flags, segmentation, then 16 bits each of header length,
    /// segment size, checksum start, checksum offset, number of buffers.
    pub const HEADER: usize = 12;
    /// Offset of the number of buffers.
    pub const NUM_BUFFERS: u32 = 10;
}
use spec::*;

/// Entries of each queue.
const ENTRIES: u16 = 256;
/// Bytes before a packet in a frame: an Ethernet header with the tags of two VLANs.
const HEADERS: u32 = 14 + 8;

/// A network device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NetCard {
    info: NetInfo,
    queues: [Queue; 2],
    features: u64,
    link_up: bool,
}

/// Result of receiving a frame.
enum Receipt {
    /// Delivered or dropped.
    Done,
    /// The guest has too few buffers; it notifies when it adds more.
    NoBuffers,
}

impl NetCard {
    /// Creates the device in its power-on state, with the link up.
    pub const fn new(info: NetInfo) -> Self {
        let queues = [Queue::new(ENTRIES), Queue::new(ENTRIES)];
        Self { info, queues, features: 0, link_up: true }
    }

    fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    /// Sends frames until the queue is empty or the back end has no room.
    fn transmit(&mut self, env: &mut dyn Env) -> Result<(), RingError> {
        let mut given_back = false;
        let mut result = Ok(true);
        for _ in 0..BATCH {
            result = self.transmit_one(env, &mut given_back);
            if result != Ok(true) {
                break;
            }
        }
        if given_back {
            self.queues[TRANSMIT].publish(env.memory());
        }
        if result? {
            more(env);
        }
        Ok(())
    }

    /// Sends a frame; returns true if more may be available.
    fn transmit_one(
        &mut self,
        env: &mut dyn Env,
        given_back: &mut bool,
    ) -> Result<bool, RingError> {
        let queue = &mut self.queues[TRANSMIT];
        let Some(chain) = queue.pop(env.memory())? else {
            return queue.await_driver(env.memory());
        };
        let length = chain.readable.checked_sub(HEADER as u32).ok_or(RingError::Short)?;
        let queue = *queue;
        // Without a back end, the link is down.
        if let Some((port, memory)) = env.net()
            && length != 0
            && length <= MAX_FRAME
        {
            let taken = with_readable(&queue, memory, chain, |mut data| {
                let mut header = [0; HEADER];
                data.read(&mut header);
                let offload = self.parse(&header, length);
                offload.is_none_or(|offload| port.send(offload, &mut data))
            });
            if !taken {
                self.queues[TRANSMIT].undo_pop();
                return Ok(false);
            }
        }
        self.queues[TRANSMIT].add_used(env.memory(), chain.head, 0);
        *given_back = true;
        Ok(true)
    }

    /// Parses the offload header of a frame of `length` bytes; `None` if it is invalid (section
    /// 5.1.6.2).
    fn parse(&self, header: &[u8; HEADER], length: u32) -> Option<Offload> {
        let said = Offload::from_header(header.first_chunk()?)?;
        let fine = match said.segments {
            Segments::None => true,
            Segments::Tcp4 => self.has(F_HOST_TSO4),
            Segments::Tcp6 => self.has(F_HOST_TSO6),
        };
        let Offload { needs_csum, segments, ecn, .. } = said;
        let mut offload = Offload { needs_csum, segments, ..Offload::default() };
        if needs_csum {
            (offload.csum_start, offload.csum_offset) = (said.csum_start, said.csum_offset);
            let end = u32::from(offload.csum_start) + u32::from(offload.csum_offset) + 2;
            if !self.has(F_CSUM) || end > length {
                return None;
            }
        }
        if segments != Segments::None {
            (offload.header_length, offload.segment_size) = (said.header_length, said.segment_size);
            // ECN has a separate feature, which is not offered.
            if !needs_csum || offload.segment_size == 0 || ecn {
                return None;
            }
        }
        fine.then_some(offload)
    }

    /// Delivers frames to the guest until none is queued or it has no buffers.
    fn receive(&mut self, env: &mut dyn Env) -> Result<(), RingError> {
        for _ in 0..BATCH {
            let first = env.net().and_then(|(port, _)| port.first());
            let Some((offload, length)) = first else {
                // The driver need not notify while no frame is queued.
                return Ok(());
            };
            let receipt = match self.header(offload) {
                Some(header) if length <= self.most(offload) => {
                    self.receive_one(&header, length, env)?
                }
                _ => Receipt::Done,
            };
            match receipt {
                Receipt::Done => {
                    if let Some((port, _)) = env.net() {
                        port.drop_first();
                    }
                }
                Receipt::NoBuffers => return Ok(()),
            }
        }
        more(env);
        Ok(())
    }

    /// Longest frame in bytes that the guest may get: with an MTU that it knows no longer one
    /// (section 5.1.4.1), and tags of VLANs.
    fn most(&self, offload: Offload) -> u32 {
        match offload.segments {
            Segments::None if self.has(F_MTU) => u32::from(self.info.mtu) + HEADERS,
            _ => MAX_FRAME,
        }
    }

    /// Offload header for the guest; `None` if it does not accept the offload.
    fn header(&self, offload: Offload) -> Option<[u8; HEADER]> {
        let caps = self.offload_caps();
        let fine = match offload.segments {
            Segments::None => true,
            Segments::Tcp4 => caps.tcp4,
            Segments::Tcp6 => caps.tcp6,
        };
        if !fine || offload.needs_csum && !caps.csum || offload.ecn {
            return None;
        }
        let data_valid = offload.data_valid && caps.csum;
        let mut header = [0; HEADER];
        header[..Offload::HEADER].copy_from_slice(&Offload { data_valid, ..offload }.to_header());
        Some(header)
    }

    /// Copies a frame to the buffers that it needs, one unless they are merged (section 5.1.6.4).
    fn receive_one(
        &mut self,
        header: &[u8; HEADER],
        length: u32,
        env: &mut dyn Env,
    ) -> Result<Receipt, RingError> {
        let merged = self.has(F_MRG_RXBUF);
        let queue = &mut self.queues[RECEIVE];
        let before = *queue;
        let mut first = None;
        let mut buffers = 0_u16;
        let mut copied = 0;
        while first.is_none() || copied < length {
            let Some(chain) = queue.pop(env.memory())? else {
                // The event index must refer to buffers after the available ones: set it while they
                // are taken.
                if queue.await_driver(env.memory())? {
                    continue;
                }
                *queue = before;
                // A frame that the whole queue would not hold must not stop those after it.
                let whole = u64::from(copied + HEADER as u32) * u64::from(queue.size());
                let wanted = u64::from(length + HEADER as u32) * u64::from(buffers);
                let waits = buffers == 0 || whole >= wanted;
                return Ok(if waits { Receipt::NoBuffers } else { Receipt::Done });
            };
            let head = if first.is_none() { HEADER as u32 } else { 0 };
            let room = chain.writable.checked_sub(head).ok_or(RingError::Short)?;
            let part = room.min(length - copied);
            // The frame exceeds its only buffer, or the driver adds buffers without end.
            if !merged && part < length || buffers == queue.size() {
                *queue = before;
                return Ok(Receipt::Done);
            }
            let Some((port, memory)) = env.net() else {
                *queue = before;
                return Ok(Receipt::NoBuffers);
            };
            with_writable(queue, memory, chain, |mut data| {
                data.write(&header[..head as usize]);
                data.truncate(part);
                port.copy(copied, &mut data);
            });
            queue.add_used(memory, chain.head, head + part);
            first.get_or_insert(chain);
            copied += part;
            buffers += 1;
        }
        let memory = env.memory();
        if let Some(chain) = first {
            with_writable(queue, memory, chain, |mut data| {
                data.skip(NUM_BUFFERS);
                data.write(&buffers.to_le_bytes());
            });
        }
        queue.publish(memory);
        Ok(Receipt::Done)
    }

    fn offload_caps(&self) -> OffloadCaps {
        let csum = self.has(F_GUEST_CSUM);
        let tcp4 = csum && self.has(F_GUEST_TSO4);
        let tcp6 = csum && self.has(F_GUEST_TSO6);
        OffloadCaps { csum, tcp4, tcp6 }
    }

    /// Updates the link status; returns true if it has changed.
    fn update_link(&mut self, env: &mut dyn Env) -> bool {
        let up = env.net().is_some_and(|(port, _)| port.link_up());
        core::mem::replace(&mut self.link_up, up) != up
    }
}

impl VirtioDevice for NetCard {
    fn kind(&self) -> Kind {
        Kind::Net
    }

    fn features(&self) -> u64 {
        let sends = F_CSUM | F_HOST_TSO4 | F_HOST_TSO6;
        let receives = F_GUEST_CSUM | F_GUEST_TSO4 | F_GUEST_TSO6;
        let offloads = if self.info.no_offloads { 0 } else { sends | receives };
        let mtu = if self.info.mtu == 0 { 0 } else { F_MTU };
        let status = if self.info.has_fixed_link { 0 } else { F_STATUS };
        offloads | mtu | status | F_MRG_RXBUF | F_MAC
    }

    fn queues(&mut self) -> &mut [Queue] {
        &mut self.queues
    }

    fn config(&self, to: &mut [u8; CONFIG_LEN]) {
        to[MAC..MAC + 6].copy_from_slice(&self.info.mac);
        to[STATUS] = if self.link_up { S_LINK_UP } else { 0 };
        to[MTU..MTU + 2].copy_from_slice(&self.info.mtu.to_le_bytes());
    }

    fn start(&mut self, features: u64, env: &mut dyn Env) {
        self.features = features;
        let caps = self.offload_caps();
        if let Some((port, _)) = env.net() {
            port.set_offload_caps(caps);
        }
    }

    fn notify(&mut self, queue: usize, env: &mut dyn Env) -> Result<(), RingError> {
        if queue == TRANSMIT { self.transmit(env) } else { self.receive(env) }
    }

    fn wake(&mut self, _: u8, env: &mut dyn Env) -> Result<bool, RingError> {
        self.transmit(env)?;
        self.receive(env)?;
        Ok(self.update_link(env))
    }

    fn reset(&mut self, env: &mut dyn Env) {
        self.features = 0;
        self.update_link(env);
        if let Some((port, _)) = env.net() {
            port.set_offload_caps(OffloadCaps::default());
        }
    }
}

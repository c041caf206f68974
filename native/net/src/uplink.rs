//! Driver of virtio-net (virtio 1.2, section 5.1): the switch's uplink to the external network.
//!
//! Received frames are complete; sent frames are too, except for a checksum if the device supports
//! it.

use core::fmt;

use native_rt::device::Shared;
use native_virtio::{Broken, QUEUE_BYTES, Queue, SetupError, Transport, WRITE};
use proto::net::{MIN_FRAME, NEEDS_SUM, Offload, OffloadCaps};
use proto::start::Start;

use crate::offload::is_accepted;

/// Feature: the device computes checksums.
const CSUM: u64 = 1 << 0;

const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;
/// Number of frames in each direction.
const FRAMES: u16 = 32;
/// Bytes of a frame buffer, including the header.
const BUFFER: u64 = 2048;
/// `virtio_net_hdr` with `num_buffers` (section 5.1.6).
const HEADER: u64 = 12;
/// Maximum length of a frame.
pub const MAX_FRAME: u64 = BUFFER - HEADER;

const RECEIVED: u64 = 2 * QUEUE_BYTES;
const SENT: u64 = RECEIVED + FRAMES as u64 * BUFFER;
/// Bytes of shared memory that the driver needs.
pub const BYTES: u64 = SENT + FRAMES as u64 * BUFFER;

/// Driver of the network card.
pub struct Uplink {
    transport: Transport,
    receive: Queue<'static>,
    transmit: Queue<'static>,
    doorbells: [u64; 2],
    memory: Shared,
    /// Free transmit buffers.
    free: u32,
    offload_caps: OffloadCaps,
    /// Receive buffers were returned to the device without a notification.
    returned: bool,
}

/// Failure of the network card. The remedy is a reset, by a restart of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UplinkError {
    /// It used a chain that was not offered.
    Chain,
    /// It has stopped and reports so.
    NeedsReset,
}

impl From<Broken> for UplinkError {
    fn from(_: Broken) -> Self {
        Self::Chain
    }
}

impl fmt::Display for UplinkError {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        to.write_str(match self {
            Self::Chain => "the network card used a chain that was not offered",
            Self::NeedsReset => "the network card needs a reset",
        })
    }
}

/// A received frame.
#[derive(Clone, Copy, Debug)]
pub struct Received {
    place: u16,
    /// Offset in the shared memory.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

impl Uplink {
    /// Resets the task's device and sets it up.
    pub fn new(start: &Start, memory: Shared) -> Result<Self, SetupError> {
        let (transport, features) = Transport::new(start, CSUM)?;
        let words = memory.words();
        let queue = |number: u16| {
            let offset = u64::from(number) * QUEUE_BYTES;
            let words = words.get(offset as usize / 8..);
            let size = transport.queue_size(number);
            words
                .and_then(|words| Queue::new(words, memory.physical() + offset, size))
                .filter(|queue| queue.size() >= FRAMES && memory.window().length() >= BYTES)
                .ok_or(SetupError::Queue(number))
        };
        let (receive, transmit) = (queue(RECEIVE)?, queue(TRANSMIT)?);
        transport.set_queue(RECEIVE, &receive)?;
        transport.set_queue(TRANSMIT, &transmit)?;
        transport.start();
        let mut uplink = Self {
            doorbells: [transport.doorbell(RECEIVE), transport.doorbell(TRANSMIT)],
            transport,
            receive,
            transmit,
            memory,
            free: u32::MAX,
            offload_caps: OffloadCaps { sums: features & CSUM != 0, tcp4: false, tcp6: false },
            returned: false,
        };
        (0..FRAMES).for_each(|place| uplink.offer(place));
        uplink.notify();
        Ok(uplink)
    }

    fn offer(&mut self, place: u16) {
        let address = self.memory.physical() + RECEIVED + u64::from(place) * BUFFER;
        self.returned |= self.receive.offer(place, &[(address, BUFFER as u32, WRITE)]);
    }

    /// Makes the card withdraw its interrupt. Frames that came before need not interrupt again.
    pub fn acknowledge_interrupt(&mut self) {
        self.transport.acknowledge_interrupt();
    }

    /// Returns the next received frame; the caller must [give its buffer
    /// back](Self::return_buffer).
    pub fn receive(&mut self) -> Result<Option<Received>, UplinkError> {
        while let Some((place, written)) = self.receive.take()? {
            let length = u64::from(written).saturating_sub(HEADER);
            if (MIN_FRAME..=MAX_FRAME).contains(&length) {
                let offset = RECEIVED + u64::from(place) * BUFFER + HEADER;
                return Ok(Some(Received { place, offset, length }));
            }
            self.offer(place);
        }
        if self.transport.has_failed() { Err(UplinkError::NeedsReset) } else { Ok(None) }
    }

    /// Returns the buffer of a frame to the device.
    pub fn return_buffer(&mut self, received: Received) {
        self.offer(received.place);
    }

    /// Notifies the device of returned buffers.
    pub fn notify(&mut self) {
        if core::mem::take(&mut self.returned) && self.receive.must_notify() {
            self.transport.notify(self.doorbells[0], RECEIVE);
        }
    }

    /// Returns whether the card can send such a frame without software offloads.
    pub fn accepts(&self, length: u64, offload: &Offload) -> bool {
        length <= MAX_FRAME && is_accepted(self.offload_caps, length, offload)
    }

    /// Sends a frame that `fill` writes to the shared memory at an offset. Drops it without room.
    pub fn send(
        &mut self,
        length: u64,
        offload: &Offload,
        fill: impl FnOnce(Shared, u64) -> bool,
    ) -> Result<(), UplinkError> {
        while let Some((place, _)) = self.transmit.take()? {
            self.free |= 1 << (place % FRAMES);
        }
        if self.free == 0 || !self.accepts(length, offload) {
            return Ok(());
        }
        let place = self.free.trailing_zeros() as u16;
        let offset = SENT + u64::from(place) * BUFFER;
        let mut header = [0; HEADER as usize];
        if offload.flags & NEEDS_SUM != 0 {
            header[0] = NEEDS_SUM;
            header[6..8].copy_from_slice(&offload.sum_start.to_le_bytes());
            header[8..10].copy_from_slice(&offload.sum_offset.to_le_bytes());
        }
        let filled =
            self.memory.window().write(offset, &header) && fill(self.memory, offset + HEADER);
        let address = self.memory.physical() + offset;
        if filled && self.transmit.offer(place, &[(address, (HEADER + length) as u32, 0)]) {
            self.free &= !(1 << place);
            if self.transmit.must_notify() {
                self.transport.notify(self.doorbells[1], TRANSMIT);
            }
        }
        Ok(())
    }

    /// Returns the shared memory.
    pub fn memory(&self) -> Shared {
        self.memory
    }
}

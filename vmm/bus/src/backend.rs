//! Interfaces between block, network and other devices and their back ends.
//!
//! A device keeps only a request's id: the back end keeps requests and frames, the device names the
//! guest memory that holds or receives their data. No call blocks. When a request has completed or
//! there is room again, the host calls [`Device::wake`](crate::Device::wake) with
//! [`WAKE_INPUT`](crate::WAKE_INPUT).

use proto::channel::{Broken, Message, SendError, View, register::NAME_LEN};
use proto::hosted::balloon::TAGS;
use proto::vsock::Header;
use vmm_mem::GuestMemory;

/// A contiguous part of guest-physical memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// First guest-physical address.
    pub address: u64,
    /// Bytes.
    pub length: u32,
}

/// A scatter-gather list of guest memory, read or written once from first to last.
///
/// The guest can change the bytes and the descriptors at any time, which harms only itself: the
/// list never has more bytes than announced, but may have fewer. A part outside memory ends the
/// data.
pub struct Data<'a> {
    memory: &'a GuestMemory,
    parts: &'a mut dyn Iterator<Item = Part>,
    part: Part,
    remaining: u32,
}

impl<'a> Data<'a> {
    /// Creates the list of the first `length` bytes of these parts.
    pub fn new(
        memory: &'a GuestMemory,
        parts: &'a mut dyn Iterator<Item = Part>,
        length: u32,
    ) -> Self {
        Self { memory, parts, part: Part { address: 0, length: 0 }, remaining: length }
    }

    /// Guest memory of the parts.
    pub fn memory(&self) -> &'a GuestMemory {
        self.memory
    }

    /// Number of bytes that remain.
    pub fn remaining(&self) -> u32 {
        self.remaining
    }

    /// Drops all but `length` of the remaining bytes.
    pub fn truncate(&mut self, length: u32) {
        self.remaining = self.remaining.min(length);
    }

    /// Takes the next contiguous part of at most `most` bytes for a back end that copies it itself.
    /// The part may be outside memory.
    pub fn part(&mut self, most: u32) -> Option<Part> {
        let most = most.min(self.remaining);
        if most == 0 {
            return None;
        }
        while self.part.length == 0 {
            let Some(part) = self.parts.next() else {
                self.remaining = 0;
                return None;
            };
            self.part = part;
        }
        let length = self.part.length.min(most);
        let taken = Part { address: self.part.address, length };
        self.part.address = self.part.address.wrapping_add(length.into());
        self.part.length -= length;
        self.remaining -= length;
        Some(taken)
    }

    /// Skips `count` bytes.
    pub fn skip(&mut self, mut count: u32) {
        while let Some(part) = self.part(count) {
            count -= part.length;
        }
    }

    /// Copies bytes from guest memory; returns their number, less than `to.len()` only at the end.
    pub fn read(&mut self, to: &mut [u8]) -> usize {
        self.for_each_part(to.len(), |memory, part, done| {
            memory.read_slice(part.address, &mut to[done..done + part.length as usize]).is_ok()
        })
    }

    /// Copies bytes to guest memory; returns their number, less than `from.len()` only at the end.
    pub fn write(&mut self, from: &[u8]) -> usize {
        self.for_each_part(from.len(), |memory, part, done| {
            memory.write_slice(part.address, &from[done..done + part.length as usize]).is_ok()
        })
    }

    /// Calls `copy` with parts of at most `length` bytes in total, and the number of bytes before
    /// each.
    fn for_each_part(
        &mut self,
        length: usize,
        mut copy: impl FnMut(&GuestMemory, Part, usize) -> bool,
    ) -> usize {
        let mut done = 0;
        while let Some(part) = self.part(u32::try_from(length - done).unwrap_or(u32::MAX)) {
            if !copy(self.memory, part, done) {
                self.remaining = 0;
                break;
            }
            done += part.length as usize;
        }
        done
    }
}

/// Bytes of a sector, the unit of [`Block`].
pub const SECTOR: u32 = 512;

/// Properties of a block device, fixed for the life of a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BlockInfo {
    /// Size in sectors of [`SECTOR`] bytes.
    pub sectors: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// Sectors can be discarded: [`BlockOp::Discard`].
    pub discard: bool,
    /// Sectors can be zeroed: [`BlockOp::WriteZeroes`].
    pub write_zeroes: bool,
    /// Maximum bytes of a read or write; at least 4096.
    pub max_bytes: u32,
    /// Serial number, padded with zeros.
    pub serial: [u8; 20],
}

impl BlockInfo {
    /// Maximum bytes of a read or write of a file: all segments that the device model accepts.
    pub const FILE_BYTES: u32 = 126 * 4096;

    /// Properties of a disk backed by a file of the host.
    pub const fn of_file(sectors: u64, read_only: bool, serial: [u8; 20]) -> Self {
        Self {
            sectors,
            read_only,
            discard: !read_only,
            write_zeroes: !read_only,
            max_bytes: Self::FILE_BYTES,
            serial,
        }
    }
}

/// Operation of a block request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockOp {
    /// Reads sectors from `sector` on into the request's data.
    Read {
        /// First sector.
        sector: u64,
    },
    /// Writes the request's data to sectors from `sector` on.
    Write {
        /// First sector.
        sector: u64,
    },
    /// Makes all writes completed before this request durable.
    Flush,
    /// Discards the content of sectors.
    Discard {
        /// First sector.
        sector: u64,
        /// Number of sectors.
        count: u32,
    },
    /// Makes sectors read as zeros.
    WriteZeroes {
        /// First sector.
        sector: u64,
        /// Number of sectors.
        count: u32,
        /// The sectors may be deallocated if they then read as zeros.
        unmap: bool,
    },
}

/// Result of a block request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockStatus {
    /// Done.
    Done,
    /// Failed, completely or in part.
    Failed,
    /// The back end does not support the operation.
    Unsupported,
}

/// Back end of a block device. The device numbers its requests; an id is in use from
/// [`start`](Block::start) to [`finish`](Block::finish). Requests may complete in any order.
pub trait Block {
    /// Starts a request. The data of a write is copied now; for a read, `data` only gives the
    /// length. Returns `false` without room; the back end wakes the device when there is room.
    fn start(&mut self, id: u16, op: BlockOp, data: &mut Data<'_>) -> bool;
    /// Next completed request.
    fn completed(&mut self) -> Option<(u16, BlockStatus)>;
    /// Copies the data of a completed read into `data` and drops the request. Called once for each
    /// request that [`completed`](Block::completed) has returned; `data` is empty if no data is
    /// wanted.
    fn finish(&mut self, id: u16, data: &mut Data<'_>);
    /// Drops all requests after a reset of the device: the back end reports none of them, and their
    /// ids are free. Requests already started may still be carried out.
    fn forget(&mut self);
}

/// Properties of a network device, fixed for the life of a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NetInfo {
    /// MAC address of the port.
    pub mac: [u8; 6],
    /// Largest packet in a frame (MTU) that the back end accepts; 0: not announced to the guest.
    pub mtu: u16,
    /// The back end exchanges only frames without offloads: unsegmented and with all checksums.
    pub no_offloads: bool,
    /// The link is always up. The guest gets no link status then: Linux reports an interface with
    /// one as not running for up to a second after its start.
    pub has_fixed_link: bool,
}

/// Offloaded work on a frame, for the receiver to do (VIRTIO 1.2, section 5.1.6: `virtio_net_hdr`
/// without `num_buffers`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Offload {
    /// The checksum of the bytes from `csum_start` on is missing and belongs at `csum_start +
    /// csum_offset`.
    pub needs_csum: bool,
    /// The checksum has been verified.
    pub data_valid: bool,
    /// Segmentation of the frame.
    pub segments: Segments,
    /// The headers have ECN with the congestion bit (`VIRTIO_NET_HDR_GSO_ECN`).
    pub ecn: bool,
    /// Length of the headers before the segments; a hint.
    pub header_length: u16,
    /// Payload of each segment.
    pub segment_size: u16,
    /// Offset of the first byte that the checksum covers.
    pub csum_start: u16,
    /// Offset of the checksum, from `csum_start`.
    pub csum_offset: u16,
}

/// Values in the first bytes of an offload header.
pub mod header {
    /// Flag: the checksum must be completed.
    pub const NEEDS_CSUM: u8 = 1;
    /// Flag: the checksum has been verified.
    pub const DATA_VALID: u8 = 2;
    /// Segmentation: none.
    pub const GSO_NONE: u8 = 0;
    /// Segmentation: TCP over IPv4.
    pub const GSO_TCPV4: u8 = 1;
    /// Segmentation: TCP over IPv6.
    pub const GSO_TCPV6: u8 = 4;
    /// Segmentation, further bit: explicit congestion notification.
    pub const GSO_ECN: u8 = 0x80;
}

impl Offload {
    /// Bytes of a header.
    pub const HEADER: usize = 10;

    /// Encodes the header that virtio drivers and tap devices put before a frame: flags,
    /// segmentation, then 16 bits each of header length, segment size, checksum start and checksum
    /// offset.
    pub fn to_header(&self) -> [u8; Self::HEADER] {
        let mut bytes = [0; Self::HEADER];
        let flag = |set, flag| if set { flag } else { 0 };
        bytes[0] =
            flag(self.needs_csum, header::NEEDS_CSUM) | flag(self.data_valid, header::DATA_VALID);
        let kind = match self.segments {
            Segments::None => header::GSO_NONE,
            Segments::Tcp4 => header::GSO_TCPV4,
            Segments::Tcp6 => header::GSO_TCPV6,
        };
        bytes[1] = kind | flag(self.ecn, header::GSO_ECN);
        let halves = [self.header_length, self.segment_size, self.csum_start, self.csum_offset];
        for (place, value) in bytes[2..].chunks_exact_mut(2).zip(halves) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    /// Decodes such a header; `None` for an unsupported segmentation.
    pub fn from_header(bytes: &[u8; Self::HEADER]) -> Option<Self> {
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        Some(Self {
            needs_csum: bytes[0] & header::NEEDS_CSUM != 0,
            data_valid: bytes[0] & header::DATA_VALID != 0,
            segments: match bytes[1] & !header::GSO_ECN {
                header::GSO_NONE => Segments::None,
                header::GSO_TCPV4 => Segments::Tcp4,
                header::GSO_TCPV6 => Segments::Tcp6,
                _ => return None,
            },
            ecn: bytes[1] & header::GSO_ECN != 0,
            header_length: half(2),
            segment_size: half(4),
            csum_start: half(6),
            csum_offset: half(8),
        })
    }
}

/// Segmentation of a frame before it reaches a receiver without that offload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Segments {
    /// No segmentation.
    #[default]
    None,
    /// TCP over IPv4.
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
}

/// Offloads that the guest accepts on receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OffloadCaps {
    /// Frames with a missing or verified checksum.
    pub csum: bool,
    /// [`Segments::Tcp4`].
    pub tcp4: bool,
    /// [`Segments::Tcp6`].
    pub tcp6: bool,
}

/// Maximum bytes of a frame without its offload header: the largest TCP segmentation offload, after
/// an Ethernet header with a VLAN tag.
pub const MAX_FRAME: u32 = 65_536 + 18;

/// Back end of a network device: a port of a switch.
pub trait Net {
    /// True if the port is connected.
    fn link_up(&self) -> bool;
    /// Sets the offloads that the guest accepts on receive, in addition to frames without offloads.
    fn set_offload_caps(&mut self, caps: OffloadCaps);
    /// Sends a frame of the guest. Returns `false` without room; the back end wakes the device
    /// later.
    fn send(&mut self, offload: Offload, frame: &mut Data<'_>) -> bool;
    /// First queued frame for the guest: its offload header, and its length of at most
    /// [`MAX_FRAME`].
    fn first(&mut self) -> Option<(Offload, u32)>;
    /// Copies bytes of the first frame, from `offset` on.
    fn copy(&mut self, offset: u32, to: &mut Data<'_>);
    /// Drops the first frame.
    fn drop_first(&mut self);
}

/// Back end of a memory balloon. Pages have 4 KiB.
pub trait BalloonBackend {
    /// Target size of the balloon, in pages.
    fn target_pages(&self) -> u32;
    /// Reports the current size of the balloon, in pages.
    fn set_inflated(&mut self, pages: u32);
    /// Discards whole pages that the guest does not need: they may read as zeros from now on.
    fn discard(&mut self, address: u64, length: u64);
    /// Returns true once for each request of statistics.
    fn take_statistics_request(&mut self) -> bool;
    /// Reports the guest's statistics: values by tag (VIRTIO 1.2, section 5.5.6.3).
    fn report_statistics(&mut self, values: &[Option<u64>; TAGS]);
}

/// Back end of a device that forwards messages to a server, each with a reply. The device numbers
/// its messages; an id is in use from [`start`](Messages::start) to [`finish`](Messages::finish).
/// Replies may come in any order.
pub trait Messages {
    /// Starts a message; its reply goes to `answer`, now or on completion. Returns `false` without
    /// room; the back end wakes the device later.
    fn start(&mut self, id: u16, message: &mut Data<'_>, answer: &mut Data<'_>) -> bool;
    /// Next message with a reply, and the reply's length.
    fn completed(&mut self) -> Option<(u16, u32)>;
    /// Copies a reply that is not in place yet into `answer` and drops the message. Called once for
    /// each message that [`completed`](Messages::completed) has returned; `answer` is empty if no
    /// reply is wanted.
    fn finish(&mut self, id: u16, answer: &mut Data<'_>);
    /// Drops all messages after a reset of the device: no reply is reported, and their ids are
    /// free.
    fn forget(&mut self);
}

/// Back end of a socket device. It loses no packet.
pub trait Packets {
    /// Sends a packet of the guest: header and data. Returns `false` without room; the back end
    /// wakes the device later.
    fn send(&mut self, packet: &mut Data<'_>) -> bool;
    /// First queued packet for the guest: its header, and the length of its data.
    fn first(&mut self) -> Option<(Header, u32)>;
    /// Copies data of the first packet, from `offset` on.
    fn copy(&mut self, offset: u32, to: &mut Data<'_>);
    /// Drops the first packet.
    fn drop_first(&mut self);
    /// Handles a reset of the device: the driver has no connection any more.
    fn reset(&mut self);
}

/// Properties of a channel to another VM, fixed for the life of a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChannelInfo {
    /// Number of the channel in this VM.
    pub number: u8,
    /// Side, 0 or 1.
    pub side: u8,
    /// Id of this VM among all VMs.
    pub own_id: u32,
    /// Id of the peer.
    pub peer_id: u32,
    /// Bytes of shared memory, a power of two.
    pub size: u32,
    /// The channel has a doorbell.
    pub doorbell: bool,
    /// Name of this VM, padded with zeros.
    pub own_name: [u8; NAME_LEN],
    /// Name of the peer.
    pub peer_name: [u8; NAME_LEN],
}

/// Back end of a channel: its shared memory, and the peer.
///
/// Guests access the shared memory directly. The keeper of the shares validates every request here,
/// so its safety does not depend on the device model.
pub trait ChannelBackend {
    /// Rings the peer's doorbell. Returns `false` without a doorbell or a running peer.
    fn notify(&mut self) -> bool;
    /// Current state of the channel.
    fn view(&mut self) -> View;
    /// Offers `length` bytes of guest memory at `address` to the peer, as this side's share
    /// `share`.
    fn offer(&mut self, share: usize, address: u64, length: u32, writable: bool) -> bool;
    /// Revokes a share of this side. Afterwards the peer has no access.
    fn revoke(&mut self, share: usize);
    /// Maps a share of the peer.
    fn map(&mut self, share: usize) -> bool;
    /// Unmaps a share of the peer.
    fn unmap(&mut self, share: usize);
    /// Sets the guest-physical addresses of the channel's memory and of mapped peer shares; `None`:
    /// not mapped.
    fn set_addresses(&mut self, memory: Option<u64>, shares: Option<u64>);
    /// Sends a message for a guest that uses hypercalls, and rings the doorbell if the peer waits.
    fn send(&mut self, message: &Message) -> Result<(), SendError>;
    /// Receives a message for such a guest.
    fn receive(&mut self) -> Result<Option<Message>, Broken>;
    /// Resets this side: no share is offered or mapped, and no memory has an address.
    fn reset(&mut self);
}

/// Back end of a byte stream: a serial line or a console.
pub trait ByteStream {
    /// Writes a byte. `false`: not accepted, keep it.
    fn put(&mut self, byte: u8) -> bool;
    /// Reads a byte, if one is available.
    fn take(&mut self) -> Option<u8>;
}

/// Back end of an entropy source.
pub trait EntropySource {
    /// Fills `to` with cryptographically secure random bytes. `false`: none are available now.
    fn fill(&mut self, to: &mut [u8]) -> bool;
}

macro_rules! kinds {
    ($($kind:ident, $get:ident, $interface:ident;)*) => {
        /// Back end of a device: one variant and one accessor for each interface above.
        pub enum BackendRef<'a> {
            /// The device is not connected.
            None,
            $(#[doc = concat!("See [`", stringify!($interface), "`].")]
            $kind(&'a mut dyn $interface),)*
        }

        impl dyn crate::Env + '_ {
            $(#[doc = concat!("Back end of a device that needs a [`", stringify!($interface),
                "`], and guest memory; `None` if it is not connected.")]
            pub fn $get(&mut self) -> Option<(&mut dyn $interface, &GuestMemory)> {
                match self.backend() {
                    (BackendRef::$kind(backend), memory) => Some((backend, memory)),
                    _ => None,
                }
            })*
        }
    };
}
kinds! {
    Block, block, Block;
    Net, net, Net;
    Balloon, balloon, BalloonBackend;
    Messages, messages, Messages;
    Packets, packets, Packets;
    Channel, channel, ChannelBackend;
    Bytes, bytes, ByteStream;
    Entropy, entropy, EntropySource;
}

impl dyn crate::Env + '_ {
    /// Writes a byte to the device's byte stream. `false`: not accepted, keep it. Without one, the
    /// byte is dropped.
    pub fn put(&mut self, byte: u8) -> bool {
        self.bytes().is_none_or(|(stream, _)| stream.put(byte))
    }

    /// Reads a byte from the device's byte stream, if one is available.
    pub fn take(&mut self) -> Option<u8> {
        self.bytes()?.0.take()
    }
}

/// An owner of a back end. A slot of the PCI bus pairs a device with one.
pub trait DeviceBackend {
    /// The back end.
    fn get(&mut self) -> BackendRef<'_>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_mem::testing::memory;

    fn parts() -> [Part; 4] {
        let part = |address, length| Part { address, length };
        [part(0x10, 3), part(0x20, 0), part(0x30, 2), part(0xfff, 9)]
    }

    #[test]
    fn data_is_in_order_and_ends() {
        let memory = memory(&[(0, 4096)]);
        memory.write_slice(0x10, b"abc").unwrap();
        memory.write_slice(0x30, b"de").unwrap();
        let mut iterator = parts().into_iter();
        let mut data = Data::new(&memory, &mut iterator, 5);
        let mut bytes = [0; 8];
        assert_eq!(data.read(&mut bytes[..2]), 2);
        assert_eq!(data.part(9), Some(Part { address: 0x12, length: 1 }));
        assert_eq!((data.read(&mut bytes), data.remaining()), (2, 0));
        assert_eq!(&bytes[..2], b"de");
        assert_eq!((data.read(&mut bytes), data.part(1)), (0, None));
    }

    #[test]
    fn offload_headers_round_trip() {
        let offload = Offload {
            needs_csum: true,
            data_valid: false,
            segments: Segments::Tcp6,
            ecn: true,
            header_length: 74,
            segment_size: 1440,
            csum_start: 54,
            csum_offset: 16,
        };
        let header = offload.to_header();
        assert_eq!(header, [1, 0x84, 74, 0, 0xa0, 5, 54, 0, 16, 0]);
        assert_eq!(Offload::from_header(&header), Some(offload));
        assert_eq!(Offload::from_header(&[0; 10]), Some(Offload::default()));
        assert_eq!(Offload::from_header(&[0, 3, 0, 0, 0, 0, 0, 0, 0, 0]), None, "UDP");
    }

    #[test]
    fn fewer_bytes_than_announced() {
        let memory = memory(&[(0, 4096)]);
        let mut iterator = parts().into_iter().take(1);
        let mut data = Data::new(&memory, &mut iterator, 100);
        assert_eq!((data.write(b"0123456789"), data.remaining()), (3, 0));
        let mut iterator = parts().into_iter();
        let mut data = Data::new(&memory, &mut iterator, 100);
        data.skip(1);
        data.truncate(8);
        assert_eq!(
            (data.write(b"0123456789"), data.remaining()),
            (4, 0),
            "the last part is outside memory"
        );
        let mut bytes = [0; 2];
        memory.read_slice(0x30, &mut bytes).unwrap();
        assert_eq!(&bytes, b"23");
    }
}

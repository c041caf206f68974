//! What block and network devices and channels ask of their outside, and how their data is handed over.
//!
//! A device holds no request of its own beyond a number: the outside keeps requests and frames, the device
//! says where in guest memory their data is or goes. Nothing here blocks. When something has completed or
//! there is room again, the host calls [`Device::wake`](crate::Device::wake) with
//! [`WAKE_INPUT`](crate::WAKE_INPUT).

use proto::channel::{Broken, Message, SendError, View, register::NAME_LEN};
use proto::vsock::Header;
use proto::wedge::Disk;
use vmm_mem::GuestMemory;

/// A contiguous part of guest-physical memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// First guest-physical address.
    pub address: u64,
    /// Bytes.
    pub length: u32,
}

/// Bytes of guest memory in order, wherever they lie: read or written once, from first to last.
///
/// The guest can change both the bytes and where they are at any time, which is its own loss: there are never more
/// than announced, perhaps fewer. A part that is not memory ends the data.
pub struct Data<'a> {
    memory: &'a GuestMemory,
    parts: &'a mut dyn Iterator<Item = Part>,
    part: Part,
    left: u32,
}

impl<'a> Data<'a> {
    /// The first `length` bytes of these parts.
    pub fn new(
        memory: &'a GuestMemory,
        parts: &'a mut dyn Iterator<Item = Part>,
        length: u32,
    ) -> Self {
        Self { memory, parts, part: Part { address: 0, length: 0 }, left: length }
    }

    /// The memory that the parts are in.
    pub fn memory(&self) -> &'a GuestMemory {
        self.memory
    }

    /// Bytes that are left.
    pub fn remaining(&self) -> u32 {
        self.left
    }

    /// Leaves at most `length` of the bytes that are left.
    pub fn truncate(&mut self, length: u32) {
        self.left = self.left.min(length);
    }

    /// Takes the next contiguous part of at most `most` bytes, for who copies it himself. It need not be memory.
    pub fn part(&mut self, most: u32) -> Option<Part> {
        let most = most.min(self.left);
        if most == 0 {
            return None;
        }
        while self.part.length == 0 {
            let Some(part) = self.parts.next() else {
                self.left = 0;
                return None;
            };
            self.part = part;
        }
        let length = self.part.length.min(most);
        let taken = Part { address: self.part.address, length };
        self.part.address = self.part.address.wrapping_add(length.into());
        self.part.length -= length;
        self.left -= length;
        Some(taken)
    }

    /// Passes over `count` bytes.
    pub fn skip(&mut self, mut count: u32) {
        while let Some(part) = self.part(count) {
            count -= part.length;
        }
    }

    /// Copies bytes from guest memory; gives their number, less than asked for only at the end.
    pub fn read(&mut self, to: &mut [u8]) -> usize {
        self.each(to.len(), |memory, part, done| {
            memory.read_slice(part.address, &mut to[done..done + part.length as usize]).is_ok()
        })
    }

    /// Copies bytes to guest memory; gives their number, less than asked for only at the end.
    pub fn write(&mut self, from: &[u8]) -> usize {
        self.each(from.len(), |memory, part, done| {
            memory.write_slice(part.address, &from[done..done + part.length as usize]).is_ok()
        })
    }

    /// Calls `copy` with parts of together at most `length` bytes, and how many came before each.
    fn each(
        &mut self,
        length: usize,
        mut copy: impl FnMut(&GuestMemory, Part, usize) -> bool,
    ) -> usize {
        let mut done = 0;
        while let Some(part) = self.part(u32::try_from(length - done).unwrap_or(u32::MAX)) {
            if !copy(self.memory, part, done) {
                self.left = 0;
                break;
            }
            done += part.length as usize;
        }
        done
    }
}

/// Bytes of a sector, the unit of [`Block`].
pub const SECTOR: u32 = 512;

/// What a block device is like; does not change while a machine has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BlockInfo {
    /// Size in sectors of [`SECTOR`] bytes.
    pub sectors: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// Sectors can be given up: [`BlockOp::Discard`].
    pub discard: bool,
    /// Sectors can be made zeros: [`BlockOp::WriteZeroes`].
    pub write_zeroes: bool,
    /// Most bytes of one read or write; at least 4096.
    pub max_bytes: u32,
    /// Name for the guest, padded with zeros.
    pub serial: [u8; 20],
}

impl BlockInfo {
    /// Most bytes of one read or write of a file: all segments that the device model takes.
    pub const FILE_BYTES: u32 = 126 * 4096;

    /// Of a disk that is a file of the host.
    pub const fn of_file(disk: &Disk) -> Self {
        Self {
            sectors: disk.sectors,
            read_only: disk.read_only,
            discard: !disk.read_only,
            write_zeroes: !disk.read_only,
            max_bytes: Self::FILE_BYTES,
            serial: disk.serial,
        }
    }
}

/// What a block request does.
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
    /// All writes completed before this request began are to survive a loss of power.
    Flush,
    /// The content of these sectors is no longer needed.
    Discard {
        /// First sector.
        sector: u64,
        /// Number of sectors.
        count: u32,
    },
    /// These sectors read as zeros from now on.
    WriteZeroes {
        /// First sector.
        sector: u64,
        /// Number of sectors.
        count: u32,
        /// They may be given up where that makes them zeros too.
        unmap: bool,
    },
}

/// How a block request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockStatus {
    /// Done.
    Done,
    /// Failed, wholly or in part.
    Failed,
    /// The outside cannot do this.
    Unsupported,
}

/// The outside of a block device. Requests are numbered by the device; a number is in use from
/// [`start`](Block::start) to [`finish`](Block::finish). They may complete in any order.
pub trait Block {
    /// Starts a request; for a write, `data` is taken now, for a read it only says how long the request is.
    /// `false`: no room now; the device is woken when there is.
    fn start(&mut self, id: u16, op: BlockOp, data: &mut Data<'_>) -> bool;
    /// The next request that has completed.
    fn completed(&mut self) -> Option<(u16, BlockStatus)>;
    /// Puts what a completed read has brought into `data`, and forgets the request. Called once for each request
    /// that [`completed`](Block::completed) has given; `data` is empty if there is nothing to take over.
    fn finish(&mut self, id: u16, data: &mut Data<'_>);
    /// Forgets all requests, because the device has been reset: none of them is reported any more, and their numbers
    /// are free. Those that have begun may still be carried out.
    fn forget(&mut self);
}

/// What a network device is like; does not change while a machine has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NetInfo {
    /// Address of the port.
    pub mac: [u8; 6],
    /// Longest packet in a frame (MTU) that the outside takes; 0: the guest is not told.
    pub mtu: u16,
    /// The outside takes and brings whole frames with all checksums only.
    pub no_offloads: bool,
}

/// Work on frames that is left to the other side (VIRTIO 1.2, section 5.1.6: `virtio_net_hdr` without
/// `num_buffers`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Offload {
    /// The checksum from `csum_start` on is missing and belongs at `csum_start + csum_offset`.
    pub needs_csum: bool,
    /// The checksum has been checked.
    pub data_valid: bool,
    /// What the frame is to be cut into.
    pub segments: Segments,
    /// The headers have ECN with the congestion bit (`VIRTIO_NET_HDR_GSO_ECN`).
    pub ecn: bool,
    /// Length of the headers before the segments; a hint.
    pub header_length: u16,
    /// Payload of each segment.
    pub segment_size: u16,
    /// Where the checksum begins to count.
    pub csum_start: u16,
    /// Where it is put, from `csum_start`.
    pub csum_offset: u16,
}

/// Values in the first bytes of an offload header.
pub mod header {
    /// Flag: a checksum is to be completed.
    pub const NEEDS_CSUM: u8 = 1;
    /// Flag: the checksum is good.
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

    /// As drivers of virtio and tap devices have it before a frame: flags, segmentation, then 16 bits each of header length,
    /// segment size, start and offset of the checksum.
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

    /// What such a header says; `None`: the frame is to be cut into something that has no name here.
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

/// What a frame is to be cut into before it goes to who cannot take it whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Segments {
    /// It is a frame as it is.
    #[default]
    None,
    /// TCP over IPv4.
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
}

/// What frames the guest takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OffloadCaps {
    /// Frames whose checksum is missing, or marked as checked.
    pub csum: bool,
    /// [`Segments::Tcp4`].
    pub tcp4: bool,
    /// [`Segments::Tcp6`].
    pub tcp6: bool,
}

/// Most bytes of a frame without its offload header: what TCP segmentation offload makes at most, behind an
/// Ethernet header with a VLAN tag.
pub const MAX_FRAME: u32 = 65_536 + 18;

/// The outside of a network device: a port of a switch.
pub trait Net {
    /// Whether the port is connected.
    fn link_up(&self) -> bool;
    /// From now on the guest takes these frames, besides whole ones with all checksums.
    fn set_offload_caps(&mut self, caps: OffloadCaps);
    /// Takes a frame from the guest. `false`: no room now; the device is woken when there is.
    fn send(&mut self, offload: Offload, frame: &mut Data<'_>) -> bool;
    /// The frame for the guest that waits first: its offload header, and its length of at most [`MAX_FRAME`].
    fn first(&mut self) -> Option<(Offload, u32)>;
    /// Copies bytes of the first frame from `offset` on.
    fn copy(&mut self, offset: u32, to: &mut Data<'_>);
    /// Forgets the first frame.
    fn drop_first(&mut self);
}

/// The outside of a memory balloon. Pages have 4 KiB.
pub trait BalloonBackend {
    /// Pages that the guest is to give up.
    fn target_pages(&self) -> u32;
    /// So many pages the guest says that it has given up.
    fn set_inflated(&mut self, pages: u32);
    /// The guest does not need what is in these whole pages of its memory: they may read as zeros from now on.
    fn discard(&mut self, address: u64, length: u64);
    /// Whether somebody asks for statistics; asking takes the question.
    fn take_statistics_request(&mut self) -> bool;
    /// A statistic of the guest (VIRTIO 1.2, section 5.5.6.3): a tag below 16, and what the guest says.
    fn report_statistic(&mut self, tag: u16, value: u64);
}

/// The outside of a device that hands messages on, each of which has an answer: a server. Messages are numbered by the device; a number is in
/// use from [`start`](Messages::start) to [`finish`](Messages::finish). They may be answered in any order.
pub trait Messages {
    /// Takes a message; `answer` is where its answer goes, now or at the end. `false`: no room now; the device is woken when there is.
    fn start(&mut self, id: u16, message: &mut Data<'_>, answer: &mut Data<'_>) -> bool;
    /// The next message that has been answered, and the length of the answer.
    fn completed(&mut self) -> Option<(u16, u32)>;
    /// Puts an answer that is not there yet into `answer`, and forgets the message. Called once for each that [`completed`](Messages::completed) has
    /// given; `answer` is empty if nobody wants it.
    fn finish(&mut self, id: u16, answer: &mut Data<'_>);
    /// Forgets all messages, because the device has been reset: none is answered any more, and their numbers are free.
    fn forget(&mut self);
}

/// The outside of a socket device, where packets go and come from. None is lost.
pub trait Packets {
    /// Takes a packet from the guest: a header, and data. `false`: no room now; the device is woken when there is.
    fn send(&mut self, packet: &mut Data<'_>) -> bool;
    /// The packet for the guest that waits first: its header, and bytes of data behind it.
    fn first(&mut self) -> Option<(Header, u32)>;
    /// Copies data of the first packet from `offset` on.
    fn copy(&mut self, offset: u32, to: &mut Data<'_>);
    /// Forgets the first packet.
    fn drop_first(&mut self);
    /// The device has been reset: the driver knows nothing of what was before.
    fn reset(&mut self);
}

/// What a channel to another machine is like; does not change while a machine has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChannelInfo {
    /// Number of the channel in this machine.
    pub number: u8,
    /// Side, 0 or 1.
    pub side: u8,
    /// Number of this machine among all.
    pub own_id: u32,
    /// Number of the peer.
    pub peer_id: u32,
    /// Bytes of memory, a power of two.
    pub size: u32,
    /// There is a doorbell.
    pub doorbell: bool,
    /// Name of this machine, filled up with zeros.
    pub own_name: [u8; NAME_LEN],
    /// Name of the peer.
    pub peer_name: [u8; NAME_LEN],
}

/// The outside of a channel: its memory, and the peer.
///
/// Guests access the memory without anybody's help. All that is said here of shares is checked by who keeps them, so that
/// nothing depends on what a device believes.
pub trait ChannelBackend {
    /// Rings at the peer. `false`: there is no doorbell, or the peer does not run.
    fn notify(&mut self) -> bool;
    /// What the channel is like now.
    fn view(&mut self) -> View;
    /// Offers `length` bytes of guest memory at `address` to the peer, as this side's share `share`.
    fn offer(&mut self, share: usize, address: u64, length: u32, writable: bool) -> bool;
    /// Takes a share of this side back. Afterwards the peer has no access.
    fn revoke(&mut self, share: usize);
    /// Maps a share of the peer.
    fn map(&mut self, share: usize) -> bool;
    /// Lets a share of the peer go.
    fn unmap(&mut self, share: usize);
    /// From now on the guest has the channel's memory, and what is mapped of the peer's shares, at these guest-physical
    /// addresses; `None`: nowhere.
    fn set_addresses(&mut self, memory: Option<u64>, shares: Option<u64>);
    /// Sends a message on behalf of a guest that leaves the ring to others, and rings if the peer wants that.
    fn send(&mut self, message: &Message) -> Result<(), SendError>;
    /// Receives a message for such a guest.
    fn receive(&mut self) -> Result<Option<Message>, Broken>;
    /// The machine starts anew: no share of this side is offered, none of the peer mapped, nothing has a place.
    fn reset(&mut self);
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
    fn offload_headers_come_back() {
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
        assert_eq!((data.write(b"0123456789"), data.remaining()), (4, 0), "the last is no memory");
        let mut bytes = [0; 2];
        memory.read_slice(0x30, &mut bytes).unwrap();
        assert_eq!(&bytes, b"23");
    }
}

//! Driver of virtio-blk (virtio 1.2, section 5.2).
//!
//! Each command has three descriptors and a record of its own in the memory shared with the device,
//! so command numbers determine offsets and the driver allocates nothing.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use native_rt::time;
use native_virtio::{QUEUE_BYTES, Queue, SetupError, Transport, WRITE};
use proto::disk::{Operation, SECTOR, Status};
use proto::start::Start;

use crate::device::{
    Command, DeviceError, Disk, DiskRecord, Geometry, Identity, IssueTimes, MAX_DEPTH, OVERDUE,
    OtherDisk,
};

/// Feature bits.
mod feature {
    pub const SIZE_MAX: u64 = 1 << 1;
    pub const RO: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    pub const ALL: u64 = SIZE_MAX | RO | BLK_SIZE | FLUSH | DISCARD | WRITE_ZEROES;
}

/// Offsets in the device's registers (section 5.2.4).
mod config {
    pub const CAPACITY: u64 = 0;
    pub const SIZE_MAX: u64 = 8;
    pub const BLK_SIZE: u64 = 20;
    pub const MAX_DISCARD_SECTORS: u64 = 36;
    pub const MAX_WRITE_ZEROES_SECTORS: u64 = 48;
}

/// Request types (section 5.2.6).
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

const QUEUE: u16 = 0;
/// Descriptors of a command: header, data, status.
const DESCRIPTORS: u16 = 3;
/// Words of a command's record: header (2), status, unused, range of a discard (2).
const RECORD: usize = 8;
const STATUS: usize = 2;
const RANGE: usize = 4;
/// Bytes of the serial number.
const ID_BYTES: u32 = 20;
const RECORDS: usize = QUEUE_BYTES as usize / 8;

/// Bytes of shared memory that the driver needs.
pub const BYTES: u64 = QUEUE_BYTES + (8 * RECORD * MAX_DEPTH) as u64;

/// Maximum number of sectors of a request, and the least that clients count on.
const MAX_SECTORS: u32 = 1 << 16;
const MIN_SECTORS: u32 = 8;

/// Error of the set-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VirtioError {
    /// The transport or a queue cannot be set up.
    Setup(SetupError),
    /// The disk has logical blocks of this size. It fails requests that are not multiples of it.
    BlockSize(u32),
    /// The disk accepts only segments of at most this size.
    SegmentSize(u32),
    /// The device fails while it reports its serial number.
    Device(DeviceError),
    /// The last server had another disk.
    OtherDisk(OtherDisk),
}

impl From<SetupError> for VirtioError {
    fn from(error: SetupError) -> Self {
        Self::Setup(error)
    }
}

impl fmt::Display for VirtioError {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Setup(error) => error.fmt(to),
            Self::Device(error) => to.write_str(error.0),
            Self::OtherDisk(error) => error.fmt(to),
            Self::BlockSize(size) => write!(
                to,
                "logical blocks of {size} bytes instead of {SECTOR} \
                 (QEMU: logical_block_size={SECTOR})"
            ),
            Self::SegmentSize(size) => write!(
                to,
                "segments of at most {size} bytes instead of {} or more",
                u64::from(MIN_SECTORS) * SECTOR
            ),
        }
    }
}

/// Returns the maximum number of sectors of a request to a disk with these features, maximum
/// segment size and logical block size.
fn max_sectors(features: u64, size_max: u32, blk_size: u32) -> Result<u32, VirtioError> {
    if features & feature::BLK_SIZE != 0 && u64::from(blk_size) != SECTOR {
        return Err(VirtioError::BlockSize(blk_size));
    }
    if features & feature::SIZE_MAX == 0 {
        return Ok(MAX_SECTORS);
    }
    match size_max / SECTOR as u32 {
        ..MIN_SECTORS => Err(VirtioError::SegmentSize(size_max)),
        sectors => Ok(sectors.min(MAX_SECTORS)),
    }
}

/// A virtio disk.
pub struct VirtioDisk<'m> {
    transport: Transport,
    doorbell: u64,
    queue: Queue<'m>,
    memory: &'m [AtomicU64],
    physical: u64,
    geometry: Geometry,
    has_flush: bool,
    max_discard: u32,
    max_zeroes: u32,
    /// Commands that complete without the device.
    ended: [Option<Status>; MAX_DEPTH],
    /// Commands of the device, a mask of numbers.
    in_flight: u64,
    times: IssueTimes,
    tsc_khz: u64,
}

impl<'m> VirtioDisk<'m> {
    /// Resets the task's device and sets it up. `memory` is [`BYTES`] long and at address
    /// `physical` for the device; `record` identifies the last server's disk; `wait` waits for an
    /// event of the device.
    pub fn new(
        start: &Start,
        memory: &'m [AtomicU64],
        physical: u64,
        record: DiskRecord,
        wait: impl FnMut(&mut Self),
    ) -> Result<Self, VirtioError> {
        let mut disk = Self::set_up(start, memory, physical)?;
        let sectors = disk.geometry.sectors;
        let serial = disk.serial(wait).map_err(VirtioError::Device)?;
        record.admit(&Identity { port: 0, sectors, serial }).map_err(VirtioError::OtherDisk)?;
        Ok(disk)
    }

    fn set_up(start: &Start, memory: &'m [AtomicU64], physical: u64) -> Result<Self, VirtioError> {
        let (transport, features) = Transport::new(start, feature::ALL)?;
        let has = |bit| features & bit != 0;
        let (capacity, size_max, blk_size) = transport.consistent(|device| {
            let low = device.read32(config::CAPACITY);
            let high = device.read32(config::CAPACITY + 4);
            let capacity = u64::from(low) | u64::from(high) << 32;
            (capacity, device.read32(config::SIZE_MAX), device.read32(config::BLK_SIZE))
        });
        let max_sectors = max_sectors(features, size_max, blk_size)?;
        let size = transport.queue_size(QUEUE);
        let queue = Queue::new(memory, physical, size).ok_or(SetupError::Queue(QUEUE))?;
        if queue.size() < DESCRIPTORS || (memory.len() as u64) < BYTES / 8 {
            return Err(SetupError::Queue(QUEUE).into());
        }
        transport.set_queue(QUEUE, &queue)?;
        transport.start();
        let geometry = Geometry {
            sectors: capacity,
            read_only: has(feature::RO),
            discard: has(feature::DISCARD),
            write_zeroes: has(feature::WRITE_ZEROES),
            max_sectors,
            depth: usize::from(queue.size() / DESCRIPTORS).min(MAX_DEPTH),
        };
        Ok(Self {
            doorbell: transport.doorbell(QUEUE),
            max_discard: transport.device().read32(config::MAX_DISCARD_SECTORS),
            max_zeroes: transport.device().read32(config::MAX_WRITE_ZEROES_SECTORS),
            transport,
            queue,
            memory,
            physical,
            geometry,
            has_flush: has(feature::FLUSH),
            ended: [None; MAX_DEPTH],
            in_flight: 0,
            times: IssueTimes::NEW,
            tsc_khz: start.clock.tsc_khz,
        })
    }

    fn now(&self) -> u64 {
        time::nanos(self.tsc_khz, time::tsc())
    }

    /// Reads the serial number, before any command; zeros if the disk reports none.
    fn serial(&mut self, mut wait: impl FnMut(&mut Self)) -> Result<[u64; 3], DeviceError> {
        // The record of the second command, which is not in flight, takes the number.
        (0..3).for_each(|word| self.store(1, word, 0));
        self.put_header(0, GET_ID, 0);
        let record = self.record(0);
        let status = (record + 8 * STATUS as u64, 1, WRITE);
        let buffers = [(record, 16, 0), (self.record(1), ID_BYTES, WRITE), status];
        if self.queue.offer(0, &buffers) {
            self.note_issue(0);
            self.flush_doorbell();
        }
        while self.in_flight != 0 {
            match self.completed()? {
                None => wait(self),
                Some((_, Status::Ok)) => {}
                Some(_) => return Ok([0; 3]),
            }
        }
        let number = |word: usize| self.memory[RECORDS + RECORD + word].load(Ordering::Acquire);
        Ok([number(0), number(1), number(2)])
    }

    fn store(&self, number: usize, word: usize, value: u64) {
        self.memory[RECORDS + RECORD * number + word].store(value, Ordering::Relaxed);
    }

    /// Returns the address of a command's record for the device.
    fn record(&self, number: usize) -> u64 {
        self.physical + 8 * (RECORDS + RECORD * number) as u64
    }

    fn put_header(&self, number: usize, kind: u32, sector: u64) {
        self.store(number, 0, kind.into());
        self.store(number, 1, sector);
        self.store(number, STATUS, u64::from(u8::MAX));
    }

    fn note_issue(&mut self, number: usize) {
        self.in_flight |= 1 << number;
        self.times.issue(1 << number, self.now());
    }

    /// Offers the command to the device; returns a status if it completes without the device.
    fn offer(&mut self, number: usize, command: &Command) -> Option<Status> {
        let range = command.sectors;
        let (kind, sector) = match command.operation {
            Operation::Read => (IN, command.sector),
            Operation::Write => (OUT, command.sector),
            // A device without the feature completes a write only when it is on stable storage.
            Operation::Flush if !self.has_flush => return Some(Status::Ok),
            Operation::Flush => (FLUSH, 0),
            // A discard is only a hint.
            Operation::Discard if range > self.max_discard => return Some(Status::Ok),
            Operation::Discard => (DISCARD, 0),
            Operation::WriteZeroes if range > self.max_zeroes => return Some(Status::Unsupported),
            Operation::WriteZeroes => (WRITE_ZEROES, 0),
        };
        self.put_header(number, kind, sector);
        self.store(number, RANGE, command.sector);
        self.store(number, RANGE + 1, range.into());
        let record = self.record(number);
        let header = (record, 16, 0);
        let status = (record + 8 * STATUS as u64, 1, WRITE);
        let bytes = range.wrapping_mul(SECTOR as u32);
        let first = DESCRIPTORS * number as u16;
        let offered = match command.operation {
            Operation::Read => {
                self.queue.offer(first, &[header, (command.address, bytes, WRITE), status])
            }
            Operation::Write => {
                self.queue.offer(first, &[header, (command.address, bytes, 0), status])
            }
            Operation::Flush => self.queue.offer(first, &[header, status]),
            Operation::Discard | Operation::WriteZeroes => {
                let range = (record + 8 * RANGE as u64, 16, 0);
                self.queue.offer(first, &[header, range, status])
            }
        };
        if offered {
            self.note_issue(number);
            return None;
        }
        // The server never reuses a number in flight; if it did, the client gets an error instead
        // of no answer.
        Some(Status::Failed)
    }
}

impl Disk for VirtioDisk<'_> {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn start(&mut self, number: usize, command: &Command) {
        if number < self.geometry.depth
            && let Some(status) = self.offer(number, command)
        {
            self.ended[number] = Some(status);
        }
    }

    fn flush_doorbell(&mut self) {
        if self.queue.must_notify() {
            self.transport.notify(self.doorbell, QUEUE);
        }
    }

    fn acknowledge_interrupt(&mut self) {
        self.transport.acknowledge_interrupt();
    }

    fn completed(&mut self) -> Result<Option<(usize, Status)>, DeviceError> {
        if let Some(number) = self.ended.iter().position(Option::is_some) {
            return Ok(self.ended[number].take().map(|status| (number, status)));
        }
        let now = self.now();
        let taken = self
            .queue
            .take()
            .map_err(|_| DeviceError("the device used a chain that was not offered"))?;
        let Some((first, _)) = taken else {
            if self.transport.has_failed() {
                return Err(DeviceError("the device needs a reset"));
            }
            let is_overdue = self.times.is_overdue(self.in_flight, now);
            return if is_overdue { Err(OVERDUE) } else { Ok(None) };
        };
        let number = usize::from(first / DESCRIPTORS);
        self.in_flight &= !(1 << number);
        let word = &self.memory[RECORDS + RECORD * number + STATUS];
        let status = match word.load(Ordering::Acquire) as u8 {
            0 => Status::Ok,
            2 => Status::Unsupported,
            _ => Status::Failed,
        };
        Ok(Some((number, status)))
    }
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::AtomicU32;
    use core::sync::atomic::Ordering::SeqCst;

    use proto::start::{Clock, Range, RangeKind, Role};

    use super::*;

    /// Registers of the transport over MMIO (virtio 1.2, section 4.2.2), and their values: magic
    /// number, version, both words of the features (version 1), maximum size of a queue.
    const REGISTERS: [(usize, u32); 4] =
        [(0x00, 0x7472_6976), (0x04, 2), (0x10, 1), (0x34, MAX_DEPTH as u32)];
    const DEVICE_STATUS: usize = 0x70;
    const REGISTER_BYTES: u64 = 0x200;

    #[test]
    fn requests_fit_the_disk() {
        let both = feature::SIZE_MAX | feature::BLK_SIZE;
        for (features, size_max, blk_size, expected) in [
            (both, 1 << 20, 512, Ok(2048)),
            (both, u32::MAX, 512, Ok(MAX_SECTORS)),
            (both, 4096, 512, Ok(8)),
            (both, 4095, 512, Err(VirtioError::SegmentSize(4095))),
            (both, 0, 512, Err(VirtioError::SegmentSize(0))),
            (both, 1 << 20, 4096, Err(VirtioError::BlockSize(4096))),
            (both, 1 << 20, 0, Err(VirtioError::BlockSize(0))),
            // Registers without their feature mean nothing.
            (0, 0, 0, Ok(MAX_SECTORS)),
        ] {
            assert_eq!(max_sectors(features, size_max, blk_size), expected);
        }
        let text = VirtioError::BlockSize(4096).to_string();
        assert_eq!(
            text,
            "logical blocks of 4096 bytes instead of 512 (QEMU: logical_block_size=512)"
        );
    }

    /// A disk whose registers are plain memory, and those registers.
    fn disk(memory: &[AtomicU64]) -> (VirtioDisk<'_>, &'static [AtomicU32]) {
        let words = (0..REGISTER_BYTES / 4).map(|_| AtomicU32::new(0));
        let registers = words.collect::<std::vec::Vec<_>>().leak();
        for (register, value) in REGISTERS {
            registers[register / 4].store(value, SeqCst);
        }
        let base = registers.as_ptr().expose_provenance() as u64;
        let range = Range { kind: RangeKind::Registers, base, length: REGISTER_BYTES, physical: 0 };
        let start = Start {
            name: "disk",
            cpu: 0,
            priority: 1,
            cpu_time: None,
            // No time passes.
            clock: Clock { tsc_khz: u64::MAX, tsc: 0, unix_seconds: 0 },
            ranges: [range].into_iter().collect(),
            role: Role::Program(Default::default()),
        };
        (VirtioDisk::set_up(&start, memory, 1 << 20).unwrap(), registers)
    }

    fn memory() -> std::vec::Vec<AtomicU64> {
        (0..BYTES / 8).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn a_device_that_needs_a_reset_is_an_error() {
        let memory = memory();
        let (mut disk, registers) = disk(&memory);
        disk.start(0, &Command { operation: Operation::Read, sectors: 1, ..Command::FLUSH });
        disk.flush_doorbell();
        registers[DEVICE_STATUS / 4].fetch_or(0x40, SeqCst);
        assert_eq!(disk.completed(), Ok(None), "its status is read after an interrupt only");
        disk.acknowledge_interrupt();
        assert_eq!(disk.completed(), Err(DeviceError("the device needs a reset")));
    }

    #[test]
    fn a_device_that_stops_is_an_error() {
        let memory = memory();
        let (mut disk, _) = disk(&memory);
        disk.start(0, &Command { operation: Operation::Read, sectors: 1, ..Command::FLUSH });
        disk.flush_doorbell();
        assert_eq!(disk.completed(), Ok(None));
        // A minute passes with a few ticks.
        disk.tsc_khz = 1;
        assert_eq!(disk.completed(), Err(OVERDUE));
    }
}

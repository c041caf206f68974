//! Driver of one port of an AHCI controller (AHCI 1.3.1; commands from ATA8-ACS).
//!
//! Each command has a slot, with a table of its own in the memory shared with the device. Where controller and disk can, reads
//! and writes are queued in the disk (NCQ), which does them in the order that it likes. Other commands are plain: one after the
//! other, and while none of the queued ones is under way.
//!
//! A disk that fails at a queued command gives up all of them. They are sent again as plain ones, so that it is seen which one
//! it was.

use core::sync::atomic::{AtomicU64, Ordering};

use native_rt::device::Registers;
use proto::disk::{Operation, SECTOR, Status};

use crate::device::{Command, DeviceError, Disk, Geometry, MAX_DEPTH};

/// Registers of the controller (section 3.1).
mod host {
    pub const CAPABILITIES: u64 = 0x00;
    pub const CONTROL: u64 = 0x04;
    pub const INTERRUPTS: u64 = 0x08;
    pub const PORTS: u64 = 0x0c;
    /// Of `CAPABILITIES`: queued commands.
    pub const QUEUES: u32 = 1 << 30;
    /// Of `CONTROL`: reset, interrupts on, AHCI on.
    pub const RESET: u32 = 1 << 0;
    pub const INTERRUPT: u32 = 1 << 1;
    pub const ENABLE: u32 = 1 << 31;
}

/// Registers of a port (section 3.3), from `0x100 + 0x80 * port`.
mod port {
    pub const COMMANDS: u64 = 0x00;
    pub const RECEIVED: u64 = 0x08;
    pub const INTERRUPTS: u64 = 0x10;
    pub const INTERRUPT_ENABLE: u64 = 0x14;
    pub const COMMAND: u64 = 0x18;
    pub const TASK_FILE: u64 = 0x20;
    pub const SIGNATURE: u64 = 0x24;
    pub const LINK: u64 = 0x28;
    pub const LINK_CONTROL: u64 = 0x2c;
    pub const ERROR: u64 = 0x30;
    pub const QUEUED: u64 = 0x34;
    pub const ISSUE: u64 = 0x38;
    /// Of `COMMAND`: start, receive, receiving, running.
    pub const START: u32 = 1 << 0;
    pub const RECEIVE: u32 = 1 << 4;
    pub const RECEIVING: u32 = 1 << 14;
    pub const RUNNING: u32 = 1 << 15;
    /// Of `INTERRUPTS`: an answer, also of queued commands, and every kind of error.
    pub const ANSWERS: u32 = 0b1111;
    pub const ERRORS: u32 = 0xf << 27;
    /// Of `LINK_CONTROL`: the link is reset.
    pub const LINK_RESET: u32 = 1;
    /// Of `TASK_FILE`: busy, data request.
    pub const BUSY: u32 = 0x88;
}

/// Signature of a disk, as opposed to a CD drive.
const DISK_SIGNATURE: u32 = 0x0101;
/// The link is up, and the device awake.
const LINK_ACTIVE: u32 = 0x103;
const LINK_MASK: u32 = 0xf0f;

/// ATA commands.
mod ata {
    pub const READ: u8 = 0x25;
    pub const WRITE: u8 = 0x35;
    pub const READ_QUEUED: u8 = 0x60;
    pub const WRITE_QUEUED: u8 = 0x61;
    pub const FLUSH: u8 = 0xea;
    pub const MANAGE_DATA: u8 = 0x06;
    /// Of `MANAGE_DATA`, in the features.
    pub const TRIM: u16 = 1;
    pub const IDENTIFY: u8 = 0xec;
}

/// Layout of the shared memory: command list, received FIS, IDENTIFY's data, tables, sectors of ranges to be discarded.
const LIST: usize = 0;
const RECEIVED: usize = 1024;
const IDENTITY: usize = 2048;
const TABLES: usize = 4096;
const TABLE: usize = 256;
/// Offset of the data's description in a table.
const REGION: usize = 0x80;
const SLOTS: usize = 32;
const RANGES: usize = TABLES + SLOTS * TABLE;
/// Ranges in a sector, and most sectors of one.
const RANGE_COUNT: usize = SECTOR as usize / 8;
const MAX_RANGE: u64 = 0xffff;
/// Bytes of shared memory that the driver needs.
pub const BYTES: u64 = (RANGES + SLOTS * SECTOR as usize) as u64;
/// Reads of a register until what was asked for must have happened.
const PATIENCE: u32 = 1_000_000;
/// Reads of a register in which a link comes up, at least a millisecond.
const LINK_READS: u32 = 10_000;
/// Sectors of one description of data: 4 MiB.
const MAX_SECTORS: u32 = 8192;
const _: () = assert!(SLOTS <= MAX_DEPTH);

/// Why there is no disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AhciError {
    /// The registers or the shared memory are too short.
    Memory,
    /// The controller does not answer, or no disk is at the port.
    NoDisk,
    /// The disk cannot be identified.
    Identify,
    /// It has no 48-bit commands.
    Old,
}

/// A disk at a port.
pub struct AhciDisk<'m> {
    host: Registers,
    port: Registers,
    number: u32,
    memory: &'m [AtomicU64],
    physical: u64,
    slots: usize,
    sectors: u64,
    /// Reads and writes are queued in the disk.
    queues: bool,
    /// It knows which sectors are not needed.
    trims: bool,
    /// What is in each slot.
    commands: [Command; SLOTS],
    /// Slots under way.
    issued: u32,
    failed: u32,
    /// Slots whose turn at the controller has not come.
    waiting: u32,
    /// Slots whose command is not queued in the disk.
    plain: u32,
    /// The last ones that were told to the controller were such.
    was_plain: bool,
}

/// A command as the disk gets it.
struct Fis {
    command: u8,
    features: u16,
    sector: u64,
    count: u16,
}

/// Which slots to tell to the controller next: queued commands together, plain ones one at a time, in turns. Masks of slots:
/// those that wait, those under way, those with plain commands.
fn turn(waiting: u32, issued: u32, plain: u32, was_plain: bool) -> u32 {
    let (others, queued) = (waiting & plain, waiting & !plain);
    let others_wait = others != 0 && (queued == 0 || !was_plain || issued != 0);
    match (others_wait, issued & plain) {
        (true, _) if issued == 0 => others & others.wrapping_neg(),
        (false, 0) => queued,
        _ => 0,
    }
}

/// Waits until `done`, for a while.
fn wait(mut done: impl FnMut() -> bool) -> bool {
    (0..PATIENCE).any(|_| done())
}

impl<'m> AhciDisk<'m> {
    /// Resets the controller `host` and sets up the disk at a port, or at the first one with a disk. `memory` is
    /// [`BYTES`] long and has the address `physical` for the device.
    pub fn new(
        host: Registers,
        wanted: Option<u8>,
        memory: &'m [AtomicU64],
        physical: u64,
    ) -> Result<Self, AhciError> {
        if (memory.len() as u64) < BYTES / 8 {
            return Err(AhciError::Memory);
        }
        let control = |bits: u32| host.write32(host::CONTROL, host.read32(host::CONTROL) | bits);
        control(host::ENABLE);
        control(host::RESET);
        if !wait(|| host.read32(host::CONTROL) & host::RESET == 0) {
            return Err(AhciError::NoDisk);
        }
        control(host::ENABLE);
        let there = host.read32(host::PORTS);
        memory.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        let capabilities = host.read32(host::CAPABILITIES);
        let slots = (capabilities >> 8 & 0x1f) as usize + 1;
        let mut disk = (0..32u32)
            .filter(|number| there >> number & 1 != 0)
            .filter(|&number| wanted.is_none_or(|wanted| u32::from(wanted) == number))
            .filter_map(|number| {
                let port = host.part(0x100 + 0x80 * u64::from(number), 0x80)?;
                Some(Self {
                    host,
                    port,
                    number,
                    memory,
                    physical,
                    slots,
                    sectors: 0,
                    queues: capabilities & host::QUEUES != 0,
                    trims: false,
                    commands: [Command::FLUSH; SLOTS],
                    issued: 0,
                    failed: 0,
                    waiting: 0,
                    plain: 0,
                    was_plain: false,
                })
            })
            .find(Self::begin)
            .ok_or(AhciError::NoDisk)?;
        let port = disk.port;
        disk.identify()?;
        port.write32(port::INTERRUPT_ENABLE, port::ANSWERS | port::ERRORS);
        control(host::INTERRUPT);
        Ok(disk)
    }

    /// Starts the port. Whether a disk is at it; a link takes some time to come up after a reset.
    fn begin(&self) -> bool {
        const SPIN_UP: u32 = 1 << 1;
        const POWER: u32 = 1 << 2;
        let port = self.port;
        port.write32(port::COMMAND, port.read32(port::COMMAND) | SPIN_UP | POWER);
        if !self.is_linked() || !self.stop() {
            return false;
        }
        let set = |register: u64, address: u64| {
            port.write32(register, address as u32);
            port.write32(register + 4, (address >> 32) as u32);
        };
        set(port::COMMANDS, self.physical + LIST as u64);
        set(port::RECEIVED, self.physical + RECEIVED as u64);
        self.run();
        // It comes with the first message of the device.
        (0..LINK_READS).any(|_| port.read32(port::SIGNATURE) == DISK_SIGNATURE) || {
            self.stop();
            false
        }
    }

    /// Waits until the link is up.
    fn is_linked(&self) -> bool {
        (0..LINK_READS).any(|_| self.port.read32(port::LINK) & LINK_MASK == LINK_ACTIVE)
    }

    fn stop(&self) -> bool {
        let command = self.port.read32(port::COMMAND) & !port::START;
        self.port.write32(port::COMMAND, command);
        let stopped = wait(|| self.port.read32(port::COMMAND) & port::RUNNING == 0);
        self.port.write32(port::COMMAND, command & !port::RECEIVE);
        stopped && wait(|| self.port.read32(port::COMMAND) & port::RECEIVING == 0)
    }

    fn run(&self) {
        self.port.write32(port::ERROR, u32::MAX);
        self.port.write32(port::INTERRUPTS, u32::MAX);
        let command = self.port.read32(port::COMMAND) | port::RECEIVE;
        self.port.write32(port::COMMAND, command);
        // A command that is not over ends with the reset of the link that this waits for.
        wait(|| self.port.read32(port::TASK_FILE) & port::BUSY == 0);
        self.port.write32(port::COMMAND, command | port::START);
    }

    fn put(&self, byte: usize, value: u64) {
        self.memory[byte / 8].store(value, Ordering::Relaxed);
    }

    /// Fills a slot (sections 4.2.2 and 4.2.3). `data`: address, bytes, and whether the disk gets them.
    fn fill(&self, slot: usize, fis: &Fis, data: Option<(u64, u64, bool)>) {
        const FIS_WORDS: u64 = 5;
        const WRITES: u64 = 1 << 6;
        const HOST_TO_DEVICE: u8 = 0x27;
        const COMMAND: u8 = 0x80;
        const BY_SECTOR_NUMBER: u8 = 0x40;
        let table = TABLES + TABLE * slot;
        let [a, b, c, d, e, f, _, _] = fis.sector.to_le_bytes();
        let [features, high_features] = fis.features.to_le_bytes();
        let [count, high_count] = fis.count.to_le_bytes();
        let head = [HOST_TO_DEVICE, COMMAND, fis.command, features, a, b, c, BY_SECTOR_NUMBER];
        self.put(table, u64::from_le_bytes(head));
        let rest = [d, e, f, high_features, count, high_count, 0, 0];
        self.put(table + 8, u64::from_le_bytes(rest));
        self.put(table + 16, 0);
        let (regions, writes) = match data {
            None => (0, false),
            Some((address, bytes, writes)) => {
                self.put(table + REGION, address);
                self.put(table + REGION + 8, bytes.saturating_sub(1) << 32);
                (1u64, writes)
            }
        };
        let flags = FIS_WORDS | if writes { WRITES } else { 0 } | regions << 16;
        self.put(LIST + 32 * slot, flags);
        self.put(LIST + 32 * slot + 8, self.physical + table as u64);
    }

    /// Fills a slot with its command, to be queued in the disk or not.
    fn fill_with(&mut self, slot: usize, queued: bool) {
        let Command { operation, sector, sectors, address } = self.commands[slot];
        let (command, queued_command) = match operation {
            Operation::Read => (ata::READ, ata::READ_QUEUED),
            Operation::Write => (ata::WRITE, ata::WRITE_QUEUED),
            Operation::Discard => {
                let ranges = RANGES + SECTOR as usize * slot;
                self.put_ranges(ranges, sector, sectors);
                let fis =
                    Fis { command: ata::MANAGE_DATA, features: ata::TRIM, sector: 0, count: 1 };
                let address = self.physical + ranges as u64;
                return self.fill(slot, &fis, Some((address, SECTOR, true)));
            }
            // The last is not offered to clients.
            Operation::Flush | Operation::WriteZeroes => {
                let fis = Fis { command: ata::FLUSH, features: 0, sector: 0, count: 0 };
                return self.fill(slot, &fis, None);
            }
        };
        let count = sectors as u16;
        let fis = if queued {
            // The count is elsewhere; in its place is the slot's number.
            Fis { command: queued_command, features: count, sector, count: (slot as u16) << 3 }
        } else {
            Fis { command, features: 0, sector, count }
        };
        let bytes = u64::from(sectors) * SECTOR;
        self.fill(slot, &fis, Some((address, bytes, operation == Operation::Write)));
    }

    /// Describes sectors to be discarded. Those for which there is no room stay: nobody may count on it.
    fn put_ranges(&self, place: usize, sector: u64, sectors: u32) {
        let (mut sector, mut left) = (sector, u64::from(sectors));
        for index in 0..RANGE_COUNT {
            let length = left.min(MAX_RANGE);
            self.put(place + 8 * index, if length == 0 { 0 } else { sector | length << 48 });
            sector += length;
            left -= length;
        }
    }

    fn identify(&mut self) -> Result<(), AhciError> {
        const HAS_48_BITS: u64 = 1 << 10;
        const HAS_QUEUE: u64 = 1 << 8;
        const HAS_TRIM: u64 = 1 << 0;
        let fis = Fis { command: ata::IDENTIFY, features: 0, sector: 0, count: 0 };
        self.fill(0, &fis, Some((self.physical + IDENTITY as u64, SECTOR, false)));
        core::sync::atomic::fence(Ordering::SeqCst);
        self.port.write32(port::ISSUE, 1);
        let done = wait(|| {
            self.port.read32(port::ISSUE) & 1 == 0
                || self.port.read32(port::INTERRUPTS) & port::ERRORS != 0
        });
        let failed = self.port.read32(port::INTERRUPTS) & port::ERRORS != 0;
        self.acknowledge();
        if !done || failed {
            return Err(AhciError::Identify);
        }
        // Words of 16 bits: 75 length of the queue, 76 and 83 features, 100 to 103 number of sectors, 169 trim.
        let word = |index: usize| {
            let word = self.memory[(IDENTITY + 2 * index) / 8].load(Ordering::Acquire);
            word >> (16 * (index % 4)) & 0xffff
        };
        if word(83) & HAS_48_BITS == 0 {
            return Err(AhciError::Old);
        }
        self.queues &= word(76) & HAS_QUEUE != 0;
        if self.queues {
            self.slots = self.slots.min((word(75) & 0x1f) as usize + 1);
        }
        self.trims = word(169) & HAS_TRIM != 0;
        self.sectors = (0..4).fold(0, |sum, index| sum | word(100 + index) << (16 * index));
        Ok(())
    }

    fn acknowledge(&self) -> u32 {
        let interrupts = self.port.read32(port::INTERRUPTS);
        self.port.write32(port::INTERRUPTS, interrupts);
        self.host.write32(host::INTERRUPTS, 1 << self.number);
        interrupts
    }

    /// Tells the controller about the slots whose turn it is.
    fn issue(&mut self) {
        let slots = turn(self.waiting, self.issued, self.plain, self.was_plain);
        if slots == 0 {
            return;
        }
        self.was_plain = slots & self.plain != 0;
        self.waiting &= !slots;
        self.issued |= slots;
        core::sync::atomic::fence(Ordering::SeqCst);
        if !self.was_plain {
            self.port.write32(port::QUEUED, slots);
        }
        self.port.write32(port::ISSUE, slots);
    }

    /// Slots that the controller or the disk still works on.
    fn active(&self) -> u32 {
        self.port.read32(port::ISSUE) | self.port.read32(port::QUEUED)
    }

    /// After an error (section 6.2.2). If only one command was under way, it has failed. Queued ones are forgotten by the disk,
    /// by a reset of the link, and come back as plain ones.
    fn recover(&mut self) -> Result<(), DeviceError> {
        if !self.stop() {
            return Err(DeviceError("the port does not stop"));
        }
        if self.issued & !self.plain != 0 {
            self.port.write32(port::LINK_CONTROL, port::LINK_RESET);
            (0..LINK_READS).for_each(|_| {
                self.port.read32(port::LINK);
            });
            self.port.write32(port::LINK_CONTROL, 0);
            if !self.is_linked() {
                return Err(DeviceError("the link does not come up again"));
            }
        }
        self.run();
        if self.issued.is_power_of_two() {
            self.failed |= self.issued;
        } else {
            let again = core::mem::take(&mut self.issued);
            for slot in (0..SLOTS).filter(|slot| again >> slot & 1 != 0) {
                self.fill_with(slot, false);
            }
            self.plain |= again;
            self.waiting |= again;
            self.issue();
        }
        Ok(())
    }
}

impl Disk for AhciDisk<'_> {
    fn geometry(&self) -> Geometry {
        Geometry {
            sectors: self.sectors,
            read_only: false,
            discard: self.trims,
            write_zeroes: false,
            max_sectors: MAX_SECTORS,
            depth: self.slots,
        }
    }

    fn start(&mut self, number: usize, command: &Command) {
        if number >= self.slots {
            return;
        }
        let queued = self.queues && matches!(command.operation, Operation::Read | Operation::Write);
        self.commands[number] = *command;
        self.fill_with(number, queued);
        let bit = 1 << number;
        self.plain = if queued { self.plain & !bit } else { self.plain | bit };
        self.waiting |= bit;
    }

    fn flush_doorbell(&mut self) {
        self.issue();
    }

    fn completed(&mut self) -> Result<Option<(usize, Status)>, DeviceError> {
        if self.issued == 0 {
            return Ok(None);
        }
        // First the interrupt, then what it tells of: what ends in between interrupts again.
        if self.acknowledge() & port::ERRORS != 0 {
            self.recover()?;
        }
        let done = self.issued & (!self.active() | self.failed);
        if done == 0 {
            return Ok(None);
        }
        let slot = done.trailing_zeros();
        let status = if self.failed >> slot & 1 != 0 { Status::Failed } else { Status::Ok };
        self.issued &= !(1 << slot);
        self.failed &= !(1 << slot);
        self.issue();
        Ok(Some((slot as usize, status)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_take_turns() {
        const PLAIN: u32 = 0b0011;
        let cases = [
            // Nothing under way: what there is, and of both the kind that was not the last.
            (0b1100, 0, true, 0b1100),
            (0b0011, 0, true, 0b0001),
            (0b0110, 0, false, 0b0010),
            (0b0110, 0, true, 0b0100),
            // More queued ones as long as no plain one waits, and nothing beside a plain one.
            (0b0100, 0b1000, false, 0b0100),
            (0b0101, 0b1000, false, 0),
            (0b0101, 0b1000, true, 0),
            (0b0101, 0b0010, true, 0),
            (0b0100, 0b0010, true, 0),
            (0b0001, 0b0010, true, 0),
            (0, 0, false, 0),
        ];
        for (waiting, issued, was_plain, next) in cases {
            assert_eq!(turn(waiting, issued, PLAIN, was_plain), next, "{waiting:b} {issued:b}");
        }
    }
}

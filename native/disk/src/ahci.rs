//! Driver of one port of an AHCI controller (AHCI 1.3.1; commands from ATA8-ACS).
//!
//! Each command has a slot, with a table of its own in the memory shared with the device. Commands are not queued in the
//! disk (no NCQ): the controller sends them one after the other by itself.

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
    pub const ERROR: u64 = 0x30;
    pub const ISSUE: u64 = 0x38;
    /// Of `COMMAND`: start, receive, receiving, running; number of the slot that it is at.
    pub const START: u32 = 1 << 0;
    pub const RECEIVE: u32 = 1 << 4;
    pub const RECEIVING: u32 = 1 << 14;
    pub const RUNNING: u32 = 1 << 15;
    pub const CURRENT: u32 = 8;
    /// Of `INTERRUPTS`: an answer, and every kind of error.
    pub const ANSWERS: u32 = 0b111;
    pub const ERRORS: u32 = 0xf << 27;
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
    pub const FLUSH: u8 = 0xea;
    pub const IDENTIFY: u8 = 0xec;
}

/// Layout of the shared memory: command list, received FIS, IDENTIFY's data, tables.
const LIST: usize = 0;
const RECEIVED: usize = 1024;
const IDENTITY: usize = 2048;
const TABLES: usize = 4096;
const TABLE: usize = 256;
/// Offset of the data's description in a table.
const REGION: usize = 0x80;
const SLOTS: usize = 32;
/// Bytes of shared memory that the driver needs.
pub const BYTES: u64 = (TABLES + SLOTS * TABLE) as u64;
/// Reads of a register until what was asked for must have happened.
const PATIENCE: u32 = 1_000_000;
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
    /// Slots under way.
    issued: u32,
    failed: u32,
    /// Slots that are filled and not told to the controller yet.
    filled: u32,
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
        let slots = (host.read32(host::CAPABILITIES) >> 8 & 0x1f) as usize + 1;
        let mut disk = (0..32u32)
            .filter(|number| there >> number & 1 != 0)
            .filter(|&number| wanted.is_none_or(|wanted| u32::from(wanted) == number))
            .filter_map(|number| {
                let port = host.part(0x100 + 0x80 * u64::from(number), 0x80)?;
                let (sectors, issued, failed, filled) = (0, 0, 0, 0);
                Some(Self {
                    host,
                    port,
                    number,
                    memory,
                    physical,
                    slots,
                    sectors,
                    issued,
                    failed,
                    filled,
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
        const LINK_READS: u32 = 10_000;
        let port = self.port;
        port.write32(port::COMMAND, port.read32(port::COMMAND) | SPIN_UP | POWER);
        let active = (0..LINK_READS).any(|_| port.read32(port::LINK) & LINK_MASK == LINK_ACTIVE);
        if !active || !self.stop() {
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

    /// Fills a slot (sections 4.2.2 and 4.2.3).
    fn fill(&self, slot: usize, command: u8, sector: u64, sectors: u32, data: Option<(u64, bool)>) {
        const FIS_WORDS: u64 = 5;
        const WRITES: u64 = 1 << 6;
        const HOST_TO_DEVICE: u64 = 0x27 | 0x80 << 8;
        const BY_SECTOR_NUMBER: u64 = 0x40;
        let table = TABLES + TABLE * slot;
        let [a, b, c, d, e, f, _, _] = sector.to_le_bytes();
        let low = u64::from_le_bytes([0, 0, 0, 0, a, b, c, 0]);
        self.put(table, HOST_TO_DEVICE | u64::from(command) << 16 | low | BY_SECTOR_NUMBER << 56);
        let [count, high_count, _, _] = sectors.to_le_bytes();
        self.put(table + 8, u64::from_le_bytes([d, e, f, 0, count, high_count, 0, 0]));
        self.put(table + 16, 0);
        let (regions, writes) = match data {
            None => (0, false),
            Some((address, writes)) => {
                self.put(table + REGION, address);
                let length = (u64::from(sectors.max(1)) * SECTOR).saturating_sub(1);
                self.put(table + REGION + 8, length << 32);
                (1u64, writes)
            }
        };
        let flags = FIS_WORDS | if writes { WRITES } else { 0 } | regions << 16;
        self.put(LIST + 32 * slot, flags);
        self.put(LIST + 32 * slot + 8, self.physical + table as u64);
    }

    fn identify(&mut self) -> Result<(), AhciError> {
        const HAS_48_BITS: u64 = 1 << 10;
        self.fill(0, ata::IDENTIFY, 0, 1, Some((self.physical + IDENTITY as u64, false)));
        // The count is no argument of this command, only the length of its data.
        self.put(TABLES + 8, 0);
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
        // Words of 16 bits: 83 features, 100 to 103 number of sectors.
        let word = |index: usize| {
            let word = self.memory[(IDENTITY + 2 * index) / 8].load(Ordering::Acquire);
            word >> (16 * (index % 4)) & 0xffff
        };
        if word(83) & HAS_48_BITS == 0 {
            return Err(AhciError::Old);
        }
        self.sectors = (0..4).fold(0, |sum, index| sum | word(100 + index) << (16 * index));
        Ok(())
    }

    fn acknowledge(&self) -> u32 {
        let interrupts = self.port.read32(port::INTERRUPTS);
        self.port.write32(port::INTERRUPTS, interrupts);
        self.host.write32(host::INTERRUPTS, 1 << self.number);
        interrupts
    }

    /// After an error: the command that it was fails, and the others are sent again (section 6.2.2.1).
    fn recover(&mut self) -> Result<(), DeviceError> {
        let current = self.port.read32(port::COMMAND) >> port::CURRENT & 0x1f;
        let done = self.issued & !self.port.read32(port::ISSUE);
        if !self.stop() {
            return Err(DeviceError("the port does not stop"));
        }
        self.run();
        self.failed |= 1 << current & self.issued & !done;
        let again = self.issued & !done & !self.failed;
        self.port.write32(port::ISSUE, again);
        Ok(())
    }
}

impl Disk for AhciDisk<'_> {
    fn geometry(&self) -> Geometry {
        Geometry {
            sectors: self.sectors,
            read_only: false,
            discard: false,
            write_zeroes: false,
            max_sectors: MAX_SECTORS,
            depth: self.slots,
        }
    }

    fn start(&mut self, number: usize, command: &Command) {
        if number >= self.slots {
            return;
        }
        let (sector, sectors) = (command.sector, command.sectors);
        match command.operation {
            Operation::Read => {
                self.fill(number, ata::READ, sector, sectors, Some((command.address, false)));
            }
            Operation::Write => {
                self.fill(number, ata::WRITE, sector, sectors, Some((command.address, true)));
            }
            // The others are not offered to clients.
            Operation::Flush | Operation::Discard | Operation::WriteZeroes => {
                self.fill(number, ata::FLUSH, 0, 0, None);
            }
        }
        self.filled |= 1 << number;
    }

    fn flush_doorbell(&mut self) {
        core::sync::atomic::fence(Ordering::SeqCst);
        self.port.write32(port::ISSUE, self.filled);
        self.issued |= core::mem::take(&mut self.filled);
    }

    fn completed(&mut self) -> Result<Option<(usize, Status)>, DeviceError> {
        if self.issued == 0 {
            return Ok(None);
        }
        // First the interrupt, then what it tells of: what ends in between interrupts again.
        if self.acknowledge() & port::ERRORS != 0 {
            self.recover()?;
        }
        let done = self.issued & (!self.port.read32(port::ISSUE) | self.failed);
        if done == 0 {
            return Ok(None);
        }
        let slot = done.trailing_zeros();
        let status = if self.failed >> slot & 1 != 0 { Status::Failed } else { Status::Ok };
        self.issued &= !(1 << slot);
        self.failed &= !(1 << slot);
        Ok(Some((slot as usize, status)))
    }
}

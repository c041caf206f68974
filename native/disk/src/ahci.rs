//! Driver of one port of an AHCI controller (AHCI 1.3.1; commands from ATA8-ACS).
//!
//! Each command uses a slot with a command table of its own in the memory shared with the device.
//! If controller and disk support NCQ, reads and writes are queued in the disk, which may reorder
//! them. Other commands are non-queued (*plain*): the driver issues one at a time, and only while
//! no queued command is in flight.
//!
//! A disk that fails a queued command aborts all of them. The driver reissues them as plain
//! commands to identify the failed one.
//!
//! The device may clear the bit of a failed command as it does for a successful one. So a command
//! has succeeded only if no error is reported after the driver has seen its bit clear.

mod registers;

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use proto::disk::{Operation, SECTOR, Status};

use self::registers::{host, port};
use crate::device::{
    Command, DeviceError, Disk, DiskRecord, Geometry, Identity, IssueTimes, MAX_DEPTH, OVERDUE,
    OtherDisk,
};

/// Registers of a controller, and a clock.
pub trait Controller {
    /// Returns the size of the registers in bytes.
    fn length(&self) -> u64;
    /// Reads a register; returns all ones for an absent one.
    fn read(&self, register: u64) -> u32;
    /// Writes a register.
    fn write(&self, register: u64, value: u32);
    /// Returns the time since an arbitrary fixed moment, in nanoseconds.
    fn now(&self) -> u64;
    /// Yields the CPU briefly.
    fn pause(&self);
}

const PORT: u64 = 0x100;
const PORT_LENGTH: u64 = 0x80;
const PORTS: u32 = 32;

/// Time limits, in nanoseconds.
mod limit {
    const MILLISECOND: u64 = 1_000_000;
    /// Reset of the controller (section 10.4.3).
    pub const RESET: u64 = 1000 * MILLISECOND;
    /// Stop of a port (section 10.1.2).
    pub const STOP: u64 = 500 * MILLISECOND;
    /// Minimum length of a link reset (section 10.4.2).
    pub const LINK_RESET: u64 = MILLISECOND;
    /// Detection of a device: 10 ms after a reset (Serial ATA, out-of-band signalling).
    pub const DETECTION: u64 = 100 * MILLISECOND;
    /// Link-up of a detected device.
    pub const LINK: u64 = 2000 * MILLISECOND;
    /// Readiness of a disk after a reset, including its spin-up (ATA8-ACS, power-on and hardware
    /// reset).
    pub const SPIN_UP: u64 = 31_000 * MILLISECOND;
    /// Completion of a command that transfers at most one sector.
    pub const COMMAND: u64 = 31_000 * MILLISECOND;
}

/// Signature of a disk; CD drives have another one.
const DISK_SIGNATURE: u32 = 0x0101;

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

/// Layout of the shared memory: command list, received FIS, IDENTIFY data, command tables, range
/// sectors for TRIM.
const LIST: usize = 0;
const RECEIVED: usize = 1024;
const IDENTITY: usize = 2048;
const TABLES: usize = 4096;
const TABLE: usize = 256;
/// Offset of the PRDT in a command table.
const REGION: usize = 0x80;
const SLOTS: usize = 32;
const RANGES: usize = TABLES + SLOTS * TABLE;
/// Number of ranges in a sector, and maximum number of sectors of a range.
const RANGE_COUNT: usize = SECTOR as usize / 8;
const MAX_RANGE: u64 = 0xffff;
/// Bytes of shared memory that the driver needs.
pub const BYTES: u64 = (RANGES + SLOTS * SECTOR as usize) as u64;
/// Maximum sectors of one PRDT entry: 4 MiB.
const MAX_SECTORS: u32 = 8192;
const _: () = assert!(SLOTS <= MAX_DEPTH);

/// Error of the set-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AhciError {
    /// The registers or the shared memory are too short.
    Memory,
    /// The controller does not answer, or no disk is at the port.
    NoDisk,
    /// IDENTIFY fails.
    Identify,
    /// The disk lacks 48-bit commands.
    Old,
    /// The disk has sectors of another size than 512 bytes (ATA/ATAPI Command Set, word 106).
    SectorSize,
    /// The controller ignores the upper half of addresses, and memory of the server or of a client
    /// ends here, above 4 GiB.
    Narrow(u64),
    /// The last server had another disk.
    OtherDisk(OtherDisk),
}

impl fmt::Display for AhciError {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Narrow(end) => write!(
                to,
                "the controller has only 32-bit addresses (CAP.S64A is 0), and memory for it ends \
                 at {end:#x}: use another controller, or a machine with less memory"
            ),
            Self::OtherDisk(error) => error.fmt(to),
            error => write!(to, "{error:?}"),
        }
    }
}

/// A disk at a port.
pub struct AhciDisk<'m, C> {
    controller: C,
    number: u32,
    memory: &'m [AtomicU64],
    physical: u64,
    slots: usize,
    sectors: u64,
    /// Reads and writes use NCQ.
    queues: bool,
    /// The disk supports TRIM.
    trims: bool,
    /// Command of each slot.
    commands: [Command; SLOTS],
    /// Slots in flight.
    issued: u32,
    /// Slots that have ended and were not reported, and those of them that failed.
    ended: u32,
    /// Interrupts that the disk has withdrawn and [`collect`](Self::collect) has not seen.
    withdrawn: u32,
    failed: u32,
    /// Slots that wait for issue.
    waiting: u32,
    /// Slots with plain commands.
    plain: u32,
    /// The last issued slots held a plain command.
    last_was_plain: bool,
    times: IssueTimes,
}

/// A command FIS.
struct Fis {
    command: u8,
    features: u16,
    sector: u64,
    count: u16,
}

/// Returns the slots to issue next: all queued commands together, or one plain command,
/// alternating. The arguments are masks of slots: waiting, in flight, plain.
fn next_slots(waiting: u32, issued: u32, plain: u32, last_was_plain: bool) -> u32 {
    let (others, queued) = (waiting & plain, waiting & !plain);
    let others_wait = others != 0 && (queued == 0 || !last_was_plain || issued != 0);
    match (others_wait, issued & plain) {
        (true, _) if issued == 0 => others & others.wrapping_neg(),
        (false, 0) => queued,
        _ => 0,
    }
}

/// Resets the controller and enables AHCI (section 10.4.3).
fn reset(controller: &impl Controller) -> bool {
    let control = |bits| controller.write(host::CONTROL, controller.read(host::CONTROL) | bits);
    control(host::ENABLE);
    control(host::RESET);
    let done = wait(controller, limit::RESET, || controller.read(host::CONTROL) & host::RESET == 0);
    control(host::ENABLE);
    done
}

/// Waits until `done` or for `limit` nanoseconds. Checks once more after the limit: the thread may
/// have been preempted meanwhile.
fn wait(controller: &impl Controller, limit: u64, mut done: impl FnMut() -> bool) -> bool {
    let start = controller.now();
    loop {
        let over = controller.now().saturating_sub(start) >= limit;
        if done() {
            return true;
        }
        if over {
            return false;
        }
        controller.pause();
    }
}

impl<'m, C: Controller> AhciDisk<'m, C> {
    /// Resets the controller and sets up the disk at a port, or at the first port with a disk. If
    /// `record` names the disk of an earlier server, only that one: its link may take too long, or
    /// it may have failed, and the disk at the next port is another. `memory` is [`BYTES`] long and
    /// at address `physical` for the device. That memory and all that commands access ends at or
    /// below the address `end`.
    pub fn new(
        controller: C,
        wanted: Option<u8>,
        memory: &'m [AtomicU64],
        (physical, end): (u64, u64),
        record: DiskRecord,
    ) -> Result<Self, AhciError> {
        if (memory.len() as u64) < BYTES / 8 {
            return Err(AhciError::Memory);
        }
        if !reset(&controller) {
            return Err(AhciError::NoDisk);
        }
        let there = controller.read(host::PORTS);
        let capabilities = controller.read(host::CAPABILITIES);
        if capabilities & host::WIDE == 0 && end > 1 << 32 {
            return Err(AhciError::Narrow(end));
        }
        memory.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        let mut disk = Self {
            controller,
            number: 0,
            memory,
            physical,
            slots: (capabilities >> 8 & 0x1f) as usize + 1,
            sectors: 0,
            queues: capabilities & host::QUEUES != 0,
            trims: false,
            commands: [Command::FLUSH; SLOTS],
            issued: 0,
            ended: 0,
            withdrawn: 0,
            failed: 0,
            waiting: 0,
            plain: 0,
            last_was_plain: false,
            times: IssueTimes::NEW,
        };
        let length = disk.controller.length();
        let wanted = record.port().or(wanted.map(u32::from));
        let mut ports = (0..PORTS)
            .filter(|number| there >> number & 1 != 0)
            .filter(|&number| wanted.is_none_or(|wanted| wanted == number))
            .filter(|number| PORT + PORT_LENGTH * u64::from(number + 1) <= length);
        let number = ports.find(|&number| disk.start_port(number)).ok_or(AhciError::NoDisk)?;
        disk.number = number;
        let identity = disk.identify()?;
        record.admit(&identity).map_err(AhciError::OtherDisk)?;
        disk.write(port::INTERRUPT_ENABLE, port::ANSWERS | port::ERRORS);
        let control = disk.controller.read(host::CONTROL);
        disk.controller.write(host::CONTROL, control | host::INTERRUPT);
        Ok(disk)
    }

    // Registers of the port.

    fn read(&self, register: u64) -> u32 {
        self.controller.read(PORT + PORT_LENGTH * u64::from(self.number) + register)
    }

    fn write(&self, register: u64, value: u32) {
        self.controller.write(PORT + PORT_LENGTH * u64::from(self.number) + register, value);
    }

    fn wait(&self, limit: u64, done: impl FnMut() -> bool) -> bool {
        wait(&self.controller, limit, done)
    }

    /// Starts a port; returns whether it has a disk. The link takes time to come up after a reset.
    fn start_port(&mut self, number: u32) -> bool {
        self.number = number;
        self.write(port::COMMAND, self.read(port::COMMAND) | port::SPIN_UP | port::POWER);
        if !self.is_linked() || !self.stop() || !self.stop_receiving() {
            return false;
        }
        let set = |register: u64, address: u64| {
            self.write(register, address as u32);
            self.write(register + 4, (address >> 32) as u32);
        };
        set(port::COMMANDS, self.physical + LIST as u64);
        set(port::RECEIVED, self.physical + RECEIVED as u64);
        // The signature arrives with the device's first FIS, which ends the busy state.
        let found = self.run() && self.read(port::SIGNATURE) == DISK_SIGNATURE;
        if !found {
            self.stop();
            self.stop_receiving();
        }
        found
    }

    /// Waits for the link if a device is present; returns whether the link is up.
    fn is_linked(&self) -> bool {
        let present = || self.read(port::LINK) & port::PRESENT != 0;
        let active = || self.read(port::LINK) & port::LINK_MASK == port::LINK_ACTIVE;
        self.wait(limit::DETECTION, present) && self.wait(limit::LINK, active)
    }

    /// Stops the command list, which discards issued commands (section 10.3.2).
    fn stop(&self) -> bool {
        self.write(port::COMMAND, self.read(port::COMMAND) & !port::START);
        self.wait(limit::STOP, || self.read(port::COMMAND) & port::RUNNING == 0)
    }

    fn stop_receiving(&self) -> bool {
        self.write(port::COMMAND, self.read(port::COMMAND) & !port::RECEIVE);
        self.wait(limit::STOP, || self.read(port::COMMAND) & port::RECEIVING == 0)
    }

    /// Starts the command list once the device is ready (section 10.3.1); returns `false` if it
    /// does not become ready.
    fn run(&self) -> bool {
        self.write(port::ERROR, u32::MAX);
        self.write(port::INTERRUPTS, u32::MAX);
        let command = self.read(port::COMMAND) | port::RECEIVE;
        self.write(port::COMMAND, command);
        let ready = self.wait(limit::SPIN_UP, || !self.is_busy());
        if ready {
            self.write(port::COMMAND, command | port::START);
        }
        ready
    }

    fn is_busy(&self) -> bool {
        self.read(port::TASK_FILE) & port::BUSY != 0
    }

    fn put(&self, byte: usize, value: u64) {
        self.memory[byte / 8].store(value, Ordering::Relaxed);
    }

    /// Fills a slot (sections 4.2.2 and 4.2.3). `data`: address, bytes, and whether the disk reads
    /// them (a write).
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

    /// Fills a slot with its command, queued or plain.
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
            // The driver does not offer write-zeroes to clients.
            Operation::Flush | Operation::WriteZeroes => {
                let fis = Fis { command: ata::FLUSH, features: 0, sector: 0, count: 0 };
                return self.fill(slot, &fis, None);
            }
        };
        let count = sectors as u16;
        let fis = if queued {
            // The features hold the count; the count field holds the slot's number.
            Fis { command: queued_command, features: count, sector, count: (slot as u16) << 3 }
        } else {
            Fis { command, features: 0, sector, count }
        };
        let bytes = u64::from(sectors) * SECTOR;
        self.fill(slot, &fis, Some((address, bytes, operation == Operation::Write)));
    }

    /// Writes the ranges of a TRIM. Ranges without room are not discarded: a discard is only a
    /// hint.
    fn put_ranges(&self, place: usize, sector: u64, sectors: u32) {
        let (mut sector, mut left) = (sector, u64::from(sectors));
        for index in 0..RANGE_COUNT {
            let length = left.min(MAX_RANGE);
            self.put(place + 8 * index, if length == 0 { 0 } else { sector | length << 48 });
            sector += length;
            left -= length;
        }
    }

    fn identify(&mut self) -> Result<Identity, AhciError> {
        const HAS_48_BITS: u64 = 1 << 10;
        const HAS_QUEUE: u64 = 1 << 8;
        const HAS_TRIM: u64 = 1 << 0;
        const SIZE_IS_VALID: u64 = 3 << 14;
        const OTHER_SIZE: u64 = 1 << 12;
        let fis = Fis { command: ata::IDENTIFY, features: 0, sector: 0, count: 0 };
        self.fill(0, &fis, Some((self.physical + IDENTITY as u64, SECTOR, false)));
        core::sync::atomic::fence(Ordering::SeqCst);
        self.write(port::ISSUE, 1);
        let errors = || self.read(port::INTERRUPTS) & port::ERRORS != 0;
        let done = self.wait(limit::COMMAND, || self.read(port::ISSUE) & 1 == 0 || errors());
        // The device may clear the bit before or after it reports an error.
        let failed = errors();
        self.acknowledge();
        if !done || failed {
            return Err(AhciError::Identify);
        }
        // Words of 16 bits: 10 to 19 serial number, 75 queue depth, 76 and 83 features, 100 to 103
        // number of sectors, 106 their size (valid if bits 15:14 are 01), 169 TRIM.
        let word = |index: usize| {
            let word = self.memory[(IDENTITY + 2 * index) / 8].load(Ordering::Acquire);
            word >> (16 * (index % 4)) & 0xffff
        };
        if word(83) & HAS_48_BITS == 0 {
            return Err(AhciError::Old);
        }
        if word(106) & (SIZE_IS_VALID | OTHER_SIZE) == 1 << 14 | OTHER_SIZE {
            return Err(AhciError::SectorSize);
        }
        self.queues &= word(76) & HAS_QUEUE != 0;
        if self.queues {
            self.slots = self.slots.min((word(75) & 0x1f) as usize + 1);
        }
        self.trims = word(169) & HAS_TRIM != 0;
        let words = |first: usize, count: usize| {
            (0..count).fold(0, |sum, index| sum | word(first + index) << (16 * index))
        };
        self.sectors = words(100, 4);
        let serial = [words(10, 4), words(14, 4), words(18, 2)];
        Ok(Identity { port: self.number, sectors: self.sectors, serial })
    }

    fn acknowledge(&self) -> u32 {
        let interrupts = self.read(port::INTERRUPTS);
        self.write(port::INTERRUPTS, interrupts);
        self.controller.write(host::INTERRUPTS, 1 << self.number);
        interrupts
    }

    /// Issues the next slots to the controller.
    fn issue(&mut self) {
        let slots = next_slots(self.waiting, self.issued, self.plain, self.last_was_plain);
        if slots == 0 {
            return;
        }
        self.last_was_plain = slots & self.plain != 0;
        self.waiting &= !slots;
        self.issued |= slots;
        self.times.issue(slots.into(), self.controller.now());
        core::sync::atomic::fence(Ordering::SeqCst);
        if !self.last_was_plain {
            self.write(port::QUEUED, slots);
        }
        self.write(port::ISSUE, slots);
    }

    /// Returns whether an error has interrupted that [`collect`](Self::collect) has not seen.
    fn has_error(&self) -> bool {
        self.withdrawn & port::ERRORS != 0
    }

    /// Returns the slots that the controller or the disk is still processing.
    fn active(&self) -> u32 {
        self.read(port::ISSUE) | self.read(port::QUEUED)
    }

    /// Collects completed slots.
    fn collect(&mut self) -> Result<(), DeviceError> {
        let now = self.controller.now();
        // The interrupt status comes first: a completion after that read interrupts again.
        let before = core::mem::take(&mut self.withdrawn) | self.acknowledge();
        let done = self.issued & !self.active();
        // Registers of a function that is switched off, or gone, read as zeros or ones.
        let control = self.controller.read(host::CONTROL);
        if control & host::ENABLE == 0 || control == u32::MAX {
            return Err(DeviceError("the controller is switched off"));
        }
        // An error up to this point is reported now.
        let errors = (before | self.read(port::INTERRUPTS)) & port::ERRORS;
        if errors & port::LINK_CHANGED != 0 {
            // There may be another disk now, which only the set-up of the next server detects.
            return Err(DeviceError("the link to the disk was lost"));
        }
        if errors != 0 {
            return self.recover();
        }
        self.issued &= !done;
        self.ended |= done;
        if self.times.is_overdue(self.issued.into(), now) {
            return Err(OVERDUE);
        }
        self.issue();
        Ok(())
    }

    /// Recovers from an error (section 6.2.2). If only one command was in flight, it has failed. Of
    /// several commands the completed ones are not known reliably, so the driver reissues all of
    /// them as plain ones; none has been reported. A link reset makes the disk forget queued
    /// commands, and one that keeps it busy.
    fn recover(&mut self) -> Result<(), DeviceError> {
        if !self.stop() {
            return Err(DeviceError("the port does not stop"));
        }
        if self.issued & !self.plain != 0 || self.is_busy() {
            self.reset_link()?;
        }
        if !self.run() {
            return Err(DeviceError("the disk stays busy after an error"));
        }
        let again = core::mem::take(&mut self.issued);
        if again.is_power_of_two() {
            self.ended |= again;
            self.failed |= again;
        } else {
            for slot in (0..SLOTS).filter(|slot| again >> slot & 1 != 0) {
                self.fill_with(slot, false);
            }
            self.plain |= again;
            self.waiting |= again;
        }
        self.issue();
        Ok(())
    }

    /// Resets the link, which aborts the disk's commands (section 10.4.2).
    fn reset_link(&self) -> Result<(), DeviceError> {
        let control = self.read(port::LINK_CONTROL) & !port::PRESENT;
        self.write(port::LINK_CONTROL, control | port::LINK_RESET);
        // This minimum length has no early end.
        self.wait(limit::LINK_RESET, || false);
        self.write(port::LINK_CONTROL, control);
        match self.is_linked() {
            true => Ok(()),
            false => Err(DeviceError("the link stays down after a reset")),
        }
    }
}

impl<C: Controller> Disk for AhciDisk<'_, C> {
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
        if self.issued == 0 {
            self.withdrawn |= self.read(port::INTERRUPTS) & port::ERRORS;
        }
        // An error from before these commands is not theirs, and comes first.
        if !self.has_error() {
            self.issue();
        }
    }

    fn acknowledge_interrupt(&mut self) {
        // Also without commands in flight: one may have been collected before it interrupted, and a
        // line that stays high interrupts for ever.
        self.withdrawn |= self.acknowledge();
    }

    fn completed(&mut self) -> Result<Option<(usize, Status)>, DeviceError> {
        // Errors also come without commands. Their interrupt by line would never end.
        if self.ended == 0 && (self.issued != 0 || self.has_error()) {
            self.collect()?;
        }
        if self.ended == 0 {
            return Ok(None);
        }
        let slot = self.ended.trailing_zeros();
        let bit = 1 << slot;
        let status = if self.failed & bit != 0 { Status::Failed } else { Status::Ok };
        self.ended &= !bit;
        self.failed &= !bit;
        Ok(Some((slot as usize, status)))
    }
}

#[cfg(test)]
mod fake;
#[cfg(test)]
mod tests;

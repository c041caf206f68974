//! Interface of disk drivers to the server.

use core::sync::atomic::{AtomicU64, Ordering};

use proto::disk::{Operation, Status};

/// Properties of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Length in sectors of 512 bytes.
    pub sectors: u64,
    /// The disk is read-only.
    pub read_only: bool,
    /// The disk supports [`Operation::Discard`].
    pub discard: bool,
    /// The disk supports [`Operation::WriteZeroes`].
    pub write_zeroes: bool,
    /// Maximum number of sectors of a read or write.
    pub max_sectors: u32,
    /// Number of concurrent requests, at most [`MAX_DEPTH`].
    pub depth: usize,
}

/// Maximum number of requests in flight at a disk.
pub const MAX_DEPTH: usize = 64;

/// A command to a disk, within its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// Operation.
    pub operation: Operation,
    /// First sector.
    pub sector: u64,
    /// Number of sectors.
    pub sectors: u32,
    /// Physical address of the data.
    pub address: u64,
}

impl Command {
    /// A flush.
    pub const FLUSH: Self = Self { operation: Operation::Flush, sector: 0, sectors: 0, address: 0 };
}

/// A disk driver. The server numbers commands, below the disk's depth; they complete in any order.
pub trait Disk {
    /// Returns the disk's properties.
    fn geometry(&self) -> Geometry;
    /// Starts command `number`, which is not in flight.
    fn start(&mut self, number: usize, command: &Command);
    /// Notifies the disk of started commands.
    fn flush_doorbell(&mut self);
    /// Makes the disk withdraw its interrupt. Commands that completed before need not interrupt
    /// again.
    fn acknowledge_interrupt(&mut self);
    /// Returns the next completed command. An error of the device ends the server.
    fn completed(&mut self) -> Result<Option<(usize, Status)>, DeviceError>;
}

/// A protocol violation by the device. The remedy is a reset, by a restart of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceError(pub &'static str);

/// Error text: the disk does not complete a command within [`COMMAND_LIMIT`].
pub const OVERDUE: DeviceError = DeviceError("the disk does not complete a command");

/// Time for a command from its issue to its completion, in nanoseconds. Disks retry a bad sector
/// for half a minute, and clients give up after 30 s; the rest is for slow emulators.
pub const COMMAND_LIMIT: u64 = 60_000_000_000;

/// Time of the last issue of each command number, to find commands that the device has lost.
pub struct IssueTimes([u64; MAX_DEPTH]);

const _: () = assert!(MAX_DEPTH <= u64::BITS as usize);

impl IssueTimes {
    /// No command has been issued.
    pub const NEW: Self = Self([0; MAX_DEPTH]);

    /// Notes the issue of `commands`, a mask of numbers.
    pub fn issue(&mut self, commands: u64, now: u64) {
        let all = self.0.iter_mut().enumerate();
        all.filter(|(number, _)| commands >> number & 1 != 0).for_each(|(_, time)| *time = now);
    }

    /// Returns whether one of the `commands` has not completed in time. `now` is a time before the
    /// look at the device: the server may have been preempted between the two.
    pub fn is_overdue(&self, commands: u64, now: u64) -> bool {
        let mut issued = self.0.iter().enumerate().filter(|(it, _)| commands >> it & 1 != 0);
        issued.any(|(_, time)| now.saturating_sub(*time) >= COMMAND_LIMIT)
    }
}

/// Identity of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Port of the controller.
    pub port: u32,
    /// Length in sectors.
    pub sectors: u64,
    /// Serial number of 20 bytes, as the disk reports it; zeros: it has none.
    pub serial: [u64; 3],
}

/// The disk differs from the one in the [`DiskRecord`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtherDisk;

impl core::fmt::Display for OtherDisk {
    fn fmt(&self, to: &mut core::fmt::Formatter) -> core::fmt::Result {
        to.write_str(
            "serial number or size differ from those of the disk of the last server, whose clients \
             repeat their writes: attach that disk again, or restart the machine",
        )
    }
}

/// Words of a [`DiskRecord`].
pub const RECORD_WORDS: usize = 5;

/// Memory that outlives the server and identifies its disk. Clients repeat unanswered writes to the
/// next server, which must not execute them on another disk.
#[derive(Clone, Copy)]
pub struct DiskRecord<'m>(&'m [AtomicU64; RECORD_WORDS]);

impl<'m> DiskRecord<'m> {
    /// The record at the beginning of `words`, zeros for the first server; `None` if they are too
    /// few.
    pub fn new(words: &'m [AtomicU64]) -> Option<Self> {
        words.first_chunk().map(Self)
    }

    /// Returns the port of the last server's disk; `None` for the first server.
    pub fn port(self) -> Option<u32> {
        self.0[0].load(Ordering::Acquire).checked_sub(1).map(|port| port as u32)
    }

    /// Stores the identity of the first server's disk; of a later one, compares it.
    pub fn admit(self, disk: &Identity) -> Result<(), OtherDisk> {
        let [first, rest @ ..] = self.0;
        let words = [disk.sectors, disk.serial[0], disk.serial[1], disk.serial[2]];
        let pairs = || rest.iter().zip(words);
        if let Some(port) = self.port() {
            let is_same = pairs().all(|(word, value)| word.load(Ordering::Relaxed) == value);
            return if is_same && port == disk.port { Ok(()) } else { Err(OtherDisk) };
        }
        pairs().for_each(|(word, value)| word.store(value, Ordering::Relaxed));
        // At last: a server that ends before has stored nothing.
        first.store(u64::from(disk.port) + 1, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_server_has_the_same_disk() {
        let words = [const { AtomicU64::new(0) }; RECORD_WORDS];
        let record = DiskRecord::new(&words).unwrap();
        assert!(DiskRecord::new(&words[1..]).is_none());
        let disk = Identity { port: 0, sectors: 4096, serial: [1, 2, 3] };
        assert_eq!((record.port(), record.admit(&disk)), (None, Ok(())));
        assert_eq!((record.port(), record.admit(&disk)), (Some(0), Ok(())));
        for other in [
            Identity { port: 1, ..disk },
            Identity { sectors: 4097, ..disk },
            Identity { serial: [1, 2, 4], ..disk },
            Identity { serial: [0; 3], ..disk },
        ] {
            assert_eq!(record.admit(&other), Err(OtherDisk), "{other:?}");
        }
        assert_eq!(record.admit(&disk), Ok(()));
    }

    #[test]
    fn a_command_has_its_own_time() {
        let mut times = IssueTimes::NEW;
        times.issue(0b01, 5);
        times.issue(1 << 63, 8);
        assert!(!times.is_overdue(1 << 63 | 1, COMMAND_LIMIT + 4));
        assert!(times.is_overdue(1 << 63 | 1, COMMAND_LIMIT + 5));
        assert!(!times.is_overdue(1 << 63, COMMAND_LIMIT + 5));
        assert!(!times.is_overdue(0, u64::MAX));
        times.issue(0b01, 10);
        assert!(!times.is_overdue(0b01, COMMAND_LIMIT + 9));
    }
}

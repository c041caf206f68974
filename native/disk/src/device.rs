//! Interface of disk drivers to the server.

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

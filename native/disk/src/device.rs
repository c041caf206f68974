//! What a disk is to the server.

use proto::disk::{Operation, Status};

/// What a disk is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Length in sectors of 512 bytes.
    pub sectors: u64,
    /// It cannot be written.
    pub read_only: bool,
    /// It knows [`Operation::Discard`].
    pub discard: bool,
    /// It knows [`Operation::WriteZeroes`].
    pub write_zeroes: bool,
    /// Most sectors of one read or write.
    pub max_sectors: u32,
    /// Requests that it works on at once, at most [`MAX_DEPTH`].
    pub depth: usize,
}

/// Most requests under way at a disk.
pub const MAX_DEPTH: usize = 64;

/// A command to a disk, within its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// What to do.
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

/// A disk. Commands are numbered by the server, below the disk's depth; they complete in any order.
pub trait Disk {
    /// What it is like.
    fn geometry(&self) -> Geometry;
    /// Starts command `number`, which is not under way.
    fn start(&mut self, number: usize, command: &Command);
    /// Lets the disk see what was started.
    fn flush_doorbell(&mut self);
    /// The next command that has ended. An error of the device itself is the server's end.
    fn completed(&mut self) -> Result<Option<(usize, Status)>, DeviceError>;
}

/// The device does what none may. Only a reset, that is a restart of the server, helps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceError(pub &'static str);

//! What servers of disks and networks serve, and to whom: in the compiled description and in start pages.

use heapless::Vec;
use serde::{Deserialize, Serialize};

use crate::net::Mac;

/// Most sessions of a task, client or server.
pub const MAX_SESSIONS: usize = 16;

/// Kinds of session in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Service {
    /// [`crate::disk`].
    Disk,
    /// [`crate::net`].
    Net,
}

/// A session of a client. The first one has the first range of kind `Session`, slot `SESSIONS` and event `session(0)`,
/// and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// What it is for.
    pub service: Service,
    /// Events to signal to the server.
    pub signal: u64,
}

/// A part of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRange {
    /// Number of the partition, from 1, in the order of the partition table; `None`: the whole disk.
    pub partition: Option<u8>,
    /// First sector, from the start of the partition or disk.
    pub first: u64,
    /// Number of sectors; 0: all from there on.
    pub sectors: u64,
}

impl DiskRange {
    /// All of the disk.
    pub const WHOLE: Self = Self { partition: None, first: 0, sectors: 0 };
}

/// A client of a disk server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskClient {
    /// What it sees.
    pub part: DiskRange,
    /// It cannot change it.
    pub read_only: bool,
    /// Events to signal to it.
    pub signal: u64,
}

/// How to drive a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DiskDriver {
    /// virtio-blk over PCI.
    Virtio,
    /// A port of an AHCI controller; `None`: the first one with a disk.
    Ahci(Option<u8>),
}

/// What a disk server is to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskServer {
    /// Its device.
    pub driver: DiskDriver,
    /// Clients, numbered as the task's sessions.
    pub clients: Vec<DiskClient, MAX_SESSIONS>,
}

/// A port of a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwitchPort {
    /// The client's address, the only one that it may send from.
    pub mac: Mac,
    /// Isolation group: ports of different groups do not reach each other. The uplink is in all of them.
    pub group: u8,
    /// Most bytes per second that the client may send; 0: as many as it can.
    pub rate: u64,
    /// Events to signal to the client.
    pub signal: u64,
}

/// What a switch is to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetServer {
    /// It owns a network card, virtio-net over PCI.
    pub uplink: bool,
    /// Ports, numbered as the task's sessions.
    pub ports: Vec<SwitchPort, MAX_SESSIONS>,
}

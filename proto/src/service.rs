//! Configuration of disk and network servers and of their clients, in the compiled description and
//! in start pages.

use heapless::Vec;
use serde::{Deserialize, Serialize};

use crate::net::Mac;

/// Largest number of sessions of a task, client or server.
pub const MAX_SESSIONS: usize = 16;

/// Kinds of session in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Service {
    /// [`crate::disk`].
    Disk,
    /// [`crate::net`].
    Net,
}

/// Session of a client. The session with index `n` uses memory range `n` of kind `Session`, slot
/// `SESSIONS + n` and event `session(n)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// Kind of session.
    pub service: Service,
    /// Events to signal to the server.
    pub signal: u64,
}

/// Range of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRange {
    /// Number of the partition, from 1, in the order of the partition table; `None`: the whole
    /// disk.
    pub partition: Option<u8>,
    /// First sector, from the start of the partition or disk.
    pub first: u64,
    /// Number of sectors; 0: up to the end.
    pub sectors: u64,
}

impl DiskRange {
    /// The whole disk.
    pub const WHOLE: Self = Self { partition: None, first: 0, sectors: 0 };
}

/// Client of a disk server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskClient {
    /// Range of the disk that the client accesses.
    pub part: DiskRange,
    /// The client's writes are refused.
    pub read_only: bool,
    /// Events to signal to the client.
    pub signal: u64,
}

/// Driver of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DiskDriver {
    /// virtio-blk, over PCI or MMIO.
    Virtio,
    /// Port of an AHCI controller; `None`: the first port with a disk.
    Ahci(Option<u8>),
}

/// Configuration of a disk server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskServer {
    /// Driver of its device.
    pub driver: DiskDriver,
    /// Clients, in the order of the task's sessions.
    pub clients: Vec<DiskClient, MAX_SESSIONS>,
}

/// Port of a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwitchPort {
    /// MAC address of the client, the only source address that it may use.
    pub mac: Mac,
    /// Isolation group: ports of different groups do not reach each other. The uplink is in all
    /// groups.
    pub group: u8,
    /// Limit of the client's transmitted bytes per second; 0: unlimited.
    pub rate: u64,
    /// Events to signal to the client.
    pub signal: u64,
}

/// Configuration of a switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetServer {
    /// The switch owns a network card (virtio-net) as its uplink.
    pub uplink: bool,
    /// Ports, in the order of the task's sessions.
    pub ports: Vec<SwitchPort, MAX_SESSIONS>,
}

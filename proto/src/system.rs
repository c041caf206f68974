//! The compiled system description: what `parador system build` makes of a TOML file and `root`
//! reads from the bundle file `system`.
//!
//! The description is already checked when it is encoded: names are unique, everything a name refers to exists,
//! no device has two owners and guest memory fits the machine that was described. `root` still
//! compares it with the machine it finds (memory, CPUs), because that may be another one.
//!
//! Encoding: one version number, then the structs below, in postcard's format. Strings are borrowed from
//! the bundle, lists have fixed capacity, nothing allocates.

use heapless::Vec;
use serde::{Deserialize, Serialize};

use crate::channel::MAX_CHANNELS;
use crate::net::Mac;
use crate::service::DiskRange;

/// Version of the encoding. Incremented by every change of a type in this module.
pub const VERSION: u32 = 6;
/// Most virtual machines in a system.
pub const MAX_VMS: usize = 16;
/// Most vCPUs of one virtual machine.
pub const MAX_VCPUS: usize = 8;
/// Most native programs in a system.
pub const MAX_TASKS: usize = 16;
/// Most arguments of a native program.
pub const MAX_ARGUMENTS: usize = 8;
/// Most servers in a system.
pub const MAX_SERVERS: usize = 8;
/// Most disks of one virtual machine.
pub const MAX_VM_DISKS: usize = 4;
/// Most network cards of one virtual machine.
pub const MAX_VM_NETS: usize = 4;
/// Longest name of a virtual machine, task or server, in bytes.
pub const MAX_NAME: usize = 31;
/// Longest guest kernel command line in bytes, without a terminating zero
/// (`COMMAND_LINE_SIZE` of Linux/x86 is 2048).
pub const MAX_COMMAND_LINE: usize = 2047;
/// Highest priority (see `Kind::SchedContext` in `abi::ops`).
pub const MAX_PRIORITY: u8 = 63;

/// A whole system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct System<'a> {
    /// The machine that the description was checked against.
    pub board: Board,
    /// Where the kernel's log goes; no server may own that port.
    pub log: SerialPort,
    /// Number of CPUs that the description was checked against; 0: not known (board `pc`).
    pub cpus: u32,
    /// Device servers, started first, in this order.
    #[serde(borrow)]
    pub servers: Vec<Server<'a>, MAX_SERVERS>,
    /// Native programs, started second.
    #[serde(borrow)]
    pub tasks: Vec<Task<'a>, MAX_TASKS>,
    /// Virtual machines, started last.
    #[serde(borrow)]
    pub vms: Vec<Vm<'a>, MAX_VMS>,
    /// Channels between them.
    pub channels: Vec<Channel, MAX_CHANNELS>,
}

/// A channel between two virtual machines ([`crate::channel`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Channel {
    /// Indices into [`System::vms`] of sides 0 and 1: two different ones, and no templates.
    pub between: [u8; 2],
    /// Bytes of its memory: a power of two, [`crate::channel::MIN_SIZE`] to [`crate::channel::MAX_SIZE`].
    pub size: u32,
    /// The sides can ring at each other.
    pub doorbell: bool,
}

/// A machine that Parador runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Board {
    /// QEMU's `q35` with `isa-debug-exit` at port 0xf4: the outcome is written there, then the machine ends.
    QemuQ35,
    /// Any PC with SVM and nested paging; at the end the log says so and the machine stays on.
    Pc,
}

/// A serial port of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SerialPort {
    /// No port.
    None,
    /// Port 0x3f8, ISA interrupt 4.
    Com1,
    /// Port 0x2f8, ISA interrupt 3.
    Com2,
}

/// A device server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Server<'a> {
    /// Unique among servers.
    pub name: &'a str,
    /// What it serves.
    pub kind: ServerKind,
    /// The device that it owns alone.
    pub device: Device,
    /// Bundle name of its program.
    pub binary: &'a str,
    /// 0..=[`MAX_PRIORITY`], highest first.
    pub priority: u8,
    /// CPU time of its thread; `None`: what others leave.
    pub cpu_time: Option<CpuTime>,
    /// Which ends make `root` start it again.
    pub restart: Restart,
}

/// CPU time that a context of a thread may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuTime {
    /// In any time of one period, in ns.
    pub budget: u64,
    /// In ns, longer than the budget.
    pub period: u64,
}

/// A device that a server owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Device {
    /// None: a switch without uplink.
    None,
    /// A serial port.
    Serial(SerialPort),
    /// A PCI function: the one with this number, from 0, among those of its class, in the order of their addresses.
    Pci(PciClass, u8),
}

/// Classes of PCI functions that servers drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PciClass {
    /// virtio-blk.
    VirtioBlk,
    /// virtio-net.
    VirtioNet,
    /// A SATA controller with AHCI, and the port that the disk is at; `None`: the first one with a disk.
    Ahci(Option<u8>),
}

/// What a server serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ServerKind {
    /// `proto`'s console over a serial port, for one client.
    Console,
    /// The same for many clients: an escape key selects the one that is shown.
    Multiplexer,
    /// `proto`'s disk.
    Block,
    /// `proto`'s network.
    Switch,
}

/// A virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vm<'a> {
    /// Unique among virtual machines and tasks.
    pub name: &'a str,
    /// Guest memory in bytes, a multiple of 1 MiB.
    pub memory: u64,
    /// Number of vCPUs, 1..=[`MAX_VCPUS`].
    pub vcpus: u32,
    /// CPU of each vCPU, `vcpus` entries; empty: `root` chooses.
    pub pins: Vec<u32, MAX_VCPUS>,
    /// Bundle name of the VMM program.
    pub binary: &'a str,
    /// Bundle name of the kernel: bzImage or PVH ELF.
    pub kernel: &'a str,
    /// Bundle name of the initial RAM disk.
    pub initrd: Option<&'a str>,
    /// Kernel command line.
    pub command_line: &'a str,
    /// Index into [`System::servers`] of the console its first serial port is connected to.
    /// Without one, output is discarded.
    pub console: Option<u8>,
    /// 0..=[`MAX_PRIORITY`], highest first.
    pub priority: u8,
    /// CPU time of each of its vCPUs, work of the VMM for it included; `None`: what others leave.
    pub cpu_time: Option<CpuTime>,
    /// Which ends make `root` start it again.
    pub restart: Restart,
    /// What a reset by the guest does.
    pub on_reset: OnReset,
    /// The paravirtual clock of KVM is offered to the guest.
    pub kvmclock: bool,
    /// The guest also has the console as a virtio device.
    pub virtio_console: bool,
    /// The system ends when every essential virtual machine and task has ended.
    pub essential: bool,
    /// Not started: virtual machines are made after it at run time.
    pub template: bool,
    /// Disks, in the order in which the guest sees them.
    pub disks: Vec<VmDisk, MAX_VM_DISKS>,
    /// Network cards, in the order in which the guest sees them.
    pub nets: Vec<VmNet, MAX_VM_NETS>,
}

/// A disk of a virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmDisk {
    /// Index into [`System::servers`] of the disk server.
    pub server: u8,
    /// Which part of the server's disk. No two that overlap, unless both are read-only.
    pub part: DiskRange,
    /// The guest cannot change it.
    pub read_only: bool,
}

/// A network card of a virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmNet {
    /// Index into [`System::servers`] of the switch.
    pub server: u8,
    /// Its address.
    pub mac: Mac,
    /// Isolation group at the switch.
    pub group: u8,
    /// Most bytes per second that it may send; 0: as many as it can.
    pub rate: u64,
}

/// Which ends of a virtual machine make `root` start it again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Restart {
    /// None.
    Never,
    /// Guest panic, triple fault, reset, a fault of the VMM. After a reset it starts at once, after the others later each time.
    OnCrash,
    /// Every end, power-off included.
    Always,
}

/// What a reset by the guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnReset {
    /// Ends the virtual machine; its exit code is 83 (reset).
    Exit,
    /// Starts the virtual machine from the beginning.
    Reset,
}

/// A native program started by `root`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task<'a> {
    /// Unique among virtual machines and tasks.
    pub name: &'a str,
    /// Bundle name of the program.
    pub binary: &'a str,
    /// Arguments; the meaning is the program's.
    #[serde(borrow)]
    pub arguments: Vec<&'a str, MAX_ARGUMENTS>,
    /// CPU of its first thread.
    pub cpu: u32,
    /// 0..=[`MAX_PRIORITY`], highest first.
    pub priority: u8,
    /// CPU time of all its threads together; `None`: what others leave.
    pub cpu_time: Option<CpuTime>,
    /// The system ends when every essential virtual machine and task has ended.
    pub essential: bool,
    /// Index into [`System::servers`] of its console.
    pub console: Option<u8>,
    /// It gets the management gate.
    pub manage: bool,
}

/// Why a compiled description cannot be read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DescriptionError {
    /// Made by a `parador` of another version; holds that version.
    Version(u32),
    /// Cut short, damaged, or longer than the lists here can hold.
    Malformed,
    /// The buffer to encode into is too short.
    BufferFull,
}

impl<'a> System<'a> {
    /// Reads a compiled description. Bytes after it are ignored.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, DescriptionError> {
        let (version, rest) =
            postcard::take_from_bytes::<u32>(bytes).map_err(|_| DescriptionError::Malformed)?;
        if version != VERSION {
            return Err(DescriptionError::Version(version));
        }
        postcard::from_bytes(rest).map_err(|_| DescriptionError::Malformed)
    }

    /// Writes the description into `buffer` and returns the written part.
    pub fn encode<'b>(&self, buffer: &'b mut [u8]) -> Result<&'b mut [u8], DescriptionError> {
        postcard::to_slice(&(VERSION, self), buffer).map_err(|_| DescriptionError::BufferFull)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> System<'static> {
        System {
            board: Board::QemuQ35,
            log: SerialPort::Com2,
            cpus: 2,
            servers: Vec::from_iter([Server {
                name: "console",
                kind: ServerKind::Console,
                device: Device::Serial(SerialPort::Com1),
                binary: "console",
                priority: 40,
                cpu_time: None,
                restart: Restart::OnCrash,
            }]),
            tasks: Vec::from_iter([Task {
                name: "neighbour",
                binary: "check",
                arguments: Vec::from_iter(["neighbour", "1000"]),
                cpu: 1,
                priority: 5,
                cpu_time: Some(CpuTime { budget: 1, period: 2 }),
                essential: true,
                console: None,
                manage: true,
            }]),
            vms: Vec::from_iter([Vm {
                name: "linux",
                memory: 256 << 20,
                vcpus: 2,
                pins: Vec::from_iter([0, 1]),
                binary: "vmm",
                kernel: "linux.kernel",
                initrd: Some("linux.initrd"),
                command_line: "console=ttyS0",
                console: Some(0),
                priority: 10,
                cpu_time: Some(CpuTime { budget: 1_000_000, period: u64::MAX }),
                restart: Restart::OnCrash,
                on_reset: OnReset::Exit,
                kvmclock: true,
                virtio_console: true,
                essential: true,
                template: false,
                disks: Vec::from_iter([VmDisk {
                    server: 1,
                    part: DiskRange { partition: Some(2), first: 0, sectors: 0 },
                    read_only: false,
                }]),
                nets: Vec::from_iter([VmNet {
                    server: 2,
                    mac: [2, 0, 0, 0, 0, 1],
                    group: 0,
                    rate: 1 << 20,
                }]),
            }]),
            channels: Vec::from_iter([Channel { between: [0, 1], size: 1 << 20, doorbell: true }]),
        }
    }

    #[test]
    fn round_trip() {
        let mut buffer = [0; 512];
        let system = example();
        let bytes = system.encode(&mut buffer).unwrap();
        assert_eq!(System::decode(bytes), Ok(system));
    }

    #[test]
    fn every_truncation_is_refused() {
        let mut buffer = [0; 512];
        let bytes = example().encode(&mut buffer).unwrap();
        for length in 0..bytes.len() {
            assert_eq!(
                System::decode(&bytes[..length]),
                Err(DescriptionError::Malformed),
                "{length}"
            );
        }
    }

    #[test]
    fn other_versions_and_short_buffers_are_refused() {
        assert_eq!(
            System::decode(&[VERSION as u8 + 1, 0, 0]),
            Err(DescriptionError::Version(VERSION + 1))
        );
        assert_eq!(example().encode(&mut [0; 16]), Err(DescriptionError::BufferFull));
    }
}

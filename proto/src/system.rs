//! The compiled system description: output of `parador system build` from a TOML file, input of
//! `root` in the bundle file `system`.
//!
//! The description was validated before it was encoded: names are unique, references resolve, each
//! device has one owner, and guest memory fits the described board. `root` validates it against the
//! actual host (memory, CPUs), which may differ.
//!
//! Encoding: a version number, then the structs below in postcard's format. Strings are borrowed
//! from the bundle, lists have a fixed capacity, nothing allocates.

use heapless::Vec;
use serde::{Deserialize, Serialize};

use crate::channel::MAX_CHANNELS;
use crate::net::Mac;
use crate::service::DiskRange;
use crate::vtlb::Vtlb;

/// Version of the encoding. Incremented by every change of a type in this module.
pub const VERSION: u32 = 10;
/// Largest number of VMs in a system.
pub const MAX_VMS: usize = 16;
/// Largest number of vCPUs of a VM.
pub const MAX_VCPUS: usize = 8;
/// Largest number of native programs in a system.
pub const MAX_TASKS: usize = 16;
/// Largest number of arguments of a native program.
pub const MAX_ARGUMENTS: usize = 8;
/// Largest number of servers in a system.
pub const MAX_SERVERS: usize = 8;
/// Largest number of disks of a VM.
pub const MAX_VM_DISKS: usize = 4;
/// Largest number of network cards of a VM.
pub const MAX_VM_NETS: usize = 4;
/// Largest number of devices of the machine that a VM drives itself.
pub const MAX_VM_DEVICES: usize = 4;
/// Longest name of a VM, task or server in bytes.
pub const MAX_NAME: usize = 31;
/// Longest guest kernel command line in bytes, without a terminating zero
/// (`COMMAND_LINE_SIZE` of Linux/x86 is 2048).
pub const MAX_COMMAND_LINE: usize = 2047;
/// Highest priority (see `Kind::SchedContext` in `abi::ops`).
pub const MAX_PRIORITY: u8 = 63;

/// A whole system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct System<'a> {
    /// Board that the description was validated against.
    pub board: Board,
    /// Port of the kernel's log; no server may own it.
    pub log: SerialPort,
    /// Number of CPUs that the description was validated against; 0: unknown (board `pc`).
    pub cpus: u32,
    /// Device servers, started first, in this order.
    #[serde(borrow)]
    pub servers: Vec<Server<'a>, MAX_SERVERS>,
    /// Native programs, started second.
    #[serde(borrow)]
    pub tasks: Vec<TaskSpec<'a>, MAX_TASKS>,
    /// VMs, started last.
    #[serde(borrow)]
    pub vms: Vec<Vm<'a>, MAX_VMS>,
    /// Channels between VMs.
    pub channels: Vec<Channel, MAX_CHANNELS>,
}

/// A channel between two VMs ([`crate::channel`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Channel {
    /// Indices into [`System::vms`] of sides 0 and 1: different VMs, no templates.
    pub between: [u8; 2],
    /// Length of its memory in bytes: a power of two, [`crate::channel::MIN_SIZE`] to
    /// [`crate::channel::MAX_SIZE`].
    pub size: u32,
    /// The sides can ring each other's doorbell.
    pub doorbell: bool,
}

/// Host hardware that Parador runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Board {
    /// QEMU's `q35` with `isa-debug-exit` at port 0xf4: the outcome is written there, which ends
    /// QEMU.
    QemuQ35,
    /// Any PC with SVM; at the end the outcome is logged and the host stays on.
    Pc,
    /// QEMU's AArch64 machine `virt`: at the end the outcome is logged, then the machine is reset,
    /// which ends QEMU.
    QemuVirt,
}

/// Serial port of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SerialPort {
    /// No port.
    None,
    /// Port 0x3f8, ISA interrupt 4; on AArch64 the PL011 that the device tree names.
    Com1,
    /// Port 0x2f8, ISA interrupt 3; on AArch64 a virtio console, which only the kernel uses.
    Com2,
}

/// A device server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Server<'a> {
    /// Unique among servers.
    pub name: &'a str,
    /// Service.
    pub kind: ServerKind,
    /// Device that it owns exclusively.
    pub device: Device,
    /// Bundle name of its binary.
    pub binary: &'a str,
    /// Priority, 0 to [`MAX_PRIORITY`], highest first.
    pub priority: u8,
    /// CPU time of its thread; `None`: no reservation.
    pub cpu_time: Option<CpuTime>,
    /// Restart policy.
    pub restart: Restart,
}

/// CPU time budget of a scheduling context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuTime {
    /// Budget per period in ns.
    pub budget: u64,
    /// Period in ns, longer than the budget.
    pub period: u64,
}

/// Device of a server, or of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Device {
    /// No device: a switch without uplink.
    None,
    /// A serial port.
    Serial(SerialPort),
    /// A PCI function: index among the functions of its class, in the order of their addresses.
    Pci(PciClass, u8),
    /// A virtio device over MMIO in the device tree: index among those of its class, in the order
    /// of their addresses.
    Mmio(VirtioClass, u8),
}

/// Classes of virtio devices with a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VirtioClass {
    /// virtio-blk.
    Block,
    /// virtio-net.
    Net,
}

/// Classes of PCI functions with a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PciClass {
    /// A virtio device.
    Virtio(VirtioClass),
    /// AHCI controller, and the port of the disk; `None`: the first port with a disk.
    Ahci(Option<u8>),
}

/// Service of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ServerKind {
    /// The console protocol over a serial port, for one client.
    Console,
    /// The console protocol for several clients: an escape key selects the displayed one.
    Multiplexer,
    /// The disk protocol.
    Block,
    /// The network protocol.
    Switch,
}

/// A VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vm<'a> {
    /// Name, unique among VMs and tasks.
    pub name: &'a str,
    /// Guest memory in bytes, a multiple of 1 MiB.
    pub memory: u64,
    /// Number of vCPUs, 1..=[`MAX_VCPUS`].
    pub vcpus: u32,
    /// Host CPU of each vCPU, `vcpus` entries; empty: `root` chooses.
    pub pins: Vec<u32, MAX_VCPUS>,
    /// Bundle name of the VMM binary.
    pub binary: &'a str,
    /// Bundle name of the kernel: bzImage or PVH ELF.
    pub kernel: &'a str,
    /// Bundle name of the initial RAM disk.
    pub initrd: Option<&'a str>,
    /// Kernel command line.
    pub command_line: &'a str,
    /// Index into [`System::servers`] of the console of its first serial port. Without a console,
    /// output is discarded.
    pub console: Option<u8>,
    /// Priority, 0 to [`MAX_PRIORITY`], highest first.
    pub priority: u8,
    /// CPU time of each vCPU, including the VMM's work for it; `None`: no reservation.
    pub cpu_time: Option<CpuTime>,
    /// Restart policy.
    pub restart: Restart,
    /// Action on a reset by the guest.
    pub on_reset: OnReset,
    /// The guest is offered KVM's paravirtual clock.
    pub kvmclock: bool,
    /// The guest also has the console as a virtio device.
    pub virtio_console: bool,
    /// Transport of the guest's virtio devices.
    pub transport: VirtioTransport,
    /// vTLB; `None`: nested paging.
    pub vtlb: Option<Vtlb>,
    /// Essential: the system ends when all essential VMs and tasks have ended.
    pub essential: bool,
    /// Template: not started; VMs are created from it at run time.
    pub template: bool,
    /// Disks, in the order of their discovery by the guest.
    pub disks: Vec<VmDisk, MAX_VM_DISKS>,
    /// Network cards, in the order of their discovery by the guest.
    pub nets: Vec<VmNet, MAX_VM_NETS>,
    /// Devices of the machine that the guest drives itself: serial ports, virtio devices over MMIO
    /// of a device tree, and virtio devices on PCI. A device over MMIO accesses all memory of the
    /// machine, and needs guest memory whose guest-physical addresses are the physical ones; one on
    /// PCI accesses guest memory only, because the IOMMU restricts it.
    pub devices: Vec<Device, MAX_VM_DEVICES>,
}

/// Disk of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmDisk {
    /// Index into [`System::servers`] of the disk server.
    pub server: u8,
    /// Range of the server's disk. Ranges must not overlap, unless all are read-only.
    pub part: DiskRange,
    /// The guest's writes are refused.
    pub read_only: bool,
}

/// Network card of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmNet {
    /// Index into [`System::servers`] of the switch.
    pub server: u8,
    /// MAC address.
    pub mac: Mac,
    /// Isolation group at the switch.
    pub group: u8,
    /// Limit of transmitted bytes per second; 0: unlimited.
    pub rate: u64,
}

/// Restart policy of a VM or server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Restart {
    /// Never restart.
    Never,
    /// Restart after a guest panic, triple fault, reset or fault of the VMM. After a reset the
    /// restart is immediate, else it is delayed with exponential back-off.
    OnCrash,
    /// Always restart, after a power-off too.
    Always,
}

/// Action on a reset by the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnReset {
    /// The VM ends with exit code 83 (reset).
    Exit,
    /// The VM restarts.
    Reset,
}

/// Transport of a guest's virtio devices: the way by which it finds them and they interrupt it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum VirtioTransport {
    /// Functions of a PCI bus, with interrupt messages.
    #[default]
    Pci,
    /// Registers at fixed addresses, with an interrupt line each; not on a PC.
    Mmio,
}

/// A native program that `root` starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskSpec<'a> {
    /// Name, unique among VMs and tasks.
    pub name: &'a str,
    /// Bundle name of the binary.
    pub binary: &'a str,
    /// Arguments, interpreted by the program.
    #[serde(borrow)]
    pub arguments: Vec<&'a str, MAX_ARGUMENTS>,
    /// CPU of its first thread.
    pub cpu: u32,
    /// Priority, 0 to [`MAX_PRIORITY`], highest first.
    pub priority: u8,
    /// CPU time of all its threads together; `None`: no reservation.
    pub cpu_time: Option<CpuTime>,
    /// Essential: the system ends when all essential VMs and tasks have ended.
    pub essential: bool,
    /// Index into [`System::servers`] of its console.
    pub console: Option<u8>,
    /// The program has the management gate.
    pub manage: bool,
}

/// Failure to read or write a compiled description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DescriptionError {
    /// Encoded by another version of `parador`, this one.
    Version(u32),
    /// Truncated, malformed, or longer than the lists' capacities.
    Malformed,
    /// The buffer to encode into is too short.
    BufferFull,
}

impl Vm<'_> {
    /// Returns whether the guest-physical addresses of guest memory are the physical ones: a device
    /// that the guest drives itself accesses it.
    pub fn has_identity_memory(&self) -> bool {
        self.devices.iter().any(|device| matches!(device, Device::Mmio(..)))
    }

    /// Returns whether root restarts the VM at a reset by the guest that is to reset it
    /// ([`OnReset::Reset`]): the guest drives a PCI function itself, which only root can reset.
    pub fn restarts_at_reset(&self) -> bool {
        let has_function = self.devices.iter().any(|device| matches!(device, Device::Pci(..)));
        has_function && self.on_reset == OnReset::Reset
    }
}

impl<'a> System<'a> {
    /// Decodes a compiled description. Bytes after it are ignored.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, DescriptionError> {
        let (version, rest) =
            postcard::take_from_bytes::<u32>(bytes).map_err(|_| DescriptionError::Malformed)?;
        if version != VERSION {
            return Err(DescriptionError::Version(version));
        }
        postcard::from_bytes(rest).map_err(|_| DescriptionError::Malformed)
    }

    /// Encodes the description into `buffer` and returns the written part.
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
            tasks: Vec::from_iter([TaskSpec {
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
                transport: VirtioTransport::Mmio,
                vtlb: Some(Vtlb {
                    pool: 256,
                    rung: crate::vtlb::Rung::Asid,
                    spaces: 8,
                    trace_writes: true,
                }),
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
                devices: Vec::from_iter([Device::Mmio(VirtioClass::Net, 1)]),
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

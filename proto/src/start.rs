//! Environment of a task that root starts: fixed addresses, fixed capability slots, and the start
//! page.
//!
//! Everything except guest memory is within the first few megabytes, so that few page tables are
//! needed:
//!
//! | address | content |
//! |---|---|
//! | `0x20_0000` | program, as linked |
//! | [`START_PAGE`] | this description, read-only |
//! | [`MESSAGE_PAGE`] | message page of the first thread |
//! | [`THREAD_PAGES`] | message pages of further threads |
//! | [`STATE_PAGES`] | vCPU state pages |
//! | [`REPORT_PAGE`] | a VMM's report to root |
//! | [`MEMORY`] | private memory: heap, further stacks |
//! | up to [`STACK_TOP`] | stack of the first thread; the page below it is never mapped |
//! | [`DEVICES`] | registers of a server's device |
//! | [`SESSIONS`] | memory shared with servers or clients |
//! | [`CHANNELS`] | a VMM's channels: their memory, and the shares of their peers |
//! | [`FILES`] | read-only files: kernel, initial RAM disk |
//! | [`GUEST_MEMORY`] | guest memory |

use heapless::Vec;
use serde::{Deserialize, Serialize};

use crate::channel::{End, MAX_SIZE, MAX_VM_CHANNELS, SHARE_BYTES, SHARES};
use crate::service::{Attachment, DiskServer, MAX_SESSIONS, NetServer};
use crate::system::{CpuTime, MAX_ARGUMENTS, MAX_VCPUS, MAX_VM_DEVICES, OnReset, VirtioTransport};
use crate::vtlb::Vtlb;

/// Address of the start page; also the first argument of the task.
pub const START_PAGE: u64 = 0x40_0000;
/// Address of the message page of the first thread.
pub const MESSAGE_PAGE: u64 = 0x40_1000;
/// Address of the message page of the second thread; those of further threads follow.
pub const THREAD_PAGES: u64 = 0x40_2000;
/// Largest number of threads of a task.
pub const MAX_THREADS: usize = 14;
/// Address of the state page of the first vCPU; those of further vCPUs follow.
pub const STATE_PAGES: u64 = 0x41_0000;
/// Address of a VMM's report page ([`crate::manage::Report`]).
pub const REPORT_PAGE: u64 = STATE_PAGES + MAX_VCPUS as u64 * 4096;
const _: () = assert!(REPORT_PAGE < MEMORY);
/// Bytes of the stack of each vCPU after the first, in a VMM's private memory.
pub const VCPU_STACK: u64 = 20 << 10;
/// Start of private memory.
pub const MEMORY: u64 = 0x42_0000;
/// Top of the first thread's stack.
pub const STACK_TOP: u64 = 0x60_0000;
/// First byte of device registers.
pub const DEVICES: u64 = 0x100_0000;
/// Bytes for device registers.
pub const DEVICES_LENGTH: u64 = 0x100_0000;
/// Memory of the first session; further sessions follow.
pub const SESSIONS: u64 = 0x200_0000;
/// Distance between sessions, and the largest memory of one, in bytes.
pub const SESSION_STRIDE: u64 = 0x8_0000;
/// Memory of a VMM's first channel; further channels follow.
pub const CHANNELS: u64 = 0x1000_0000;
/// Distance between channels in bytes.
pub const CHANNEL_STRIDE: u64 = 0x200_0000;
const _: () = assert!(MAX_SIZE + SHARES as u64 * SHARE_BYTES <= CHANNEL_STRIDE);
const _: () = assert!(CHANNELS + MAX_VM_CHANNELS as u64 * CHANNEL_STRIDE <= FILES);
/// Returns the address of a peer's share in a VMM's channel, if it is mapped.
pub const fn shares(channel: usize, share: usize) -> u64 {
    CHANNELS + channel as u64 * CHANNEL_STRIDE + MAX_SIZE + share as u64 * SHARE_BYTES
}
/// Start of read-only files. The offset within equals the boot bundle's physical address modulo
/// [`FILES_ALIGN`], so that large pages can map large files.
pub const FILES: u64 = 0x4000_0000;
/// Alignment of [`FILES`] in bytes, and upper limit of the bundle's size.
pub const FILES_ALIGN: u64 = 0x4000_0000;
/// Registers of the PCI functions that a guest drives itself: those of the first one; those of
/// further ones follow, each in [`FUNCTION_STRIDE`] bytes.
pub const FUNCTIONS: u64 = DEVICES + DEVICES_LENGTH - MAX_VM_DEVICES as u64 * FUNCTION_STRIDE;
/// Bytes for the registers and the configuration space of a PCI function that a guest drives.
pub const FUNCTION_STRIDE: u64 = 0x20_0000;
const _: () = assert!(FUNCTIONS >= DEVICES + MAX_VM_DEVICES as u64 * 4096);
/// Guest-physical address of guest memory on board `virt`, unless it is [`Vmm::identity`].
pub const GUEST_RAM: u64 = 0x4000_0000;
/// Returns the number of the range, of kind `Registers`, that a VMM has for a base address register
/// of a PCI function, device `device` of its guest's own. Its pages with the MSI-X table are not
/// mapped.
pub const fn function_registers(device: usize, register: u8) -> u64 {
    const REGISTERS: u64 = 8;
    MAX_VM_DEVICES as u64 + device as u64 * REGISTERS + register as u64 % REGISTERS
}
/// First byte of guest memory; aligned for the largest delegation.
pub const GUEST_MEMORY: u64 = 0x40_0000_0000;

/// Capability slots of a task that root starts. Slots that do not apply to a task are empty.
pub mod slot {
    /// The task itself.
    pub const TASK: u64 = 1;
    /// Its first thread.
    pub const THREAD: u64 = 2;
    /// The factory for its kernel objects.
    pub const FACTORY: u64 = 3;
    /// Its notification; bound to the first thread.
    pub const NOTIFICATION: u64 = 4;
    /// Log gate.
    pub const LOG: u64 = 5;
    /// Control gate.
    pub const CONTROL: u64 = 6;
    /// VMM, native program: console session. Server: interrupt of its device.
    pub const DEVICE: u64 = 7;
    /// The scheduling context of its first thread.
    pub const SCHED: u64 = 9;
    /// Native program: management gate.
    pub const MANAGE: u64 = 15;
    /// First free slot.
    pub const FREE: u64 = 16;
    /// Notification of the peer of the first session, right `SIGNAL`; those of further sessions
    /// follow.
    pub const SESSIONS: u64 = COUNT - crate::service::MAX_SESSIONS as u64;
    /// VMM: notification of the peer of the first channel, right `SIGNAL`; those of further
    /// channels follow.
    pub const CHANNELS: u64 = SESSIONS - crate::channel::MAX_VM_CHANNELS as u64;
    /// VMM: notification of the second vCPU; those of further vCPUs follow. That of the first vCPU
    /// is [`NOTIFICATION`].
    pub const VCPU_NOTIFICATIONS: u64 = CHANNELS - FURTHER_VCPUS;
    /// VMM: interrupt of the first device that its guest drives itself; those of further ones
    /// follow.
    pub const PASS_THROUGH: u64 = VCPU_NOTIFICATIONS - crate::system::MAX_VM_DEVICES as u64;
    /// Number of slots of a task, except a server with sessions.
    pub const COUNT: u64 = 120;
    /// Server with sessions: notification of the second vCPU of the first session's client, right
    /// `SIGNAL`; those of further vCPUs, and then those of further sessions, follow.
    pub const PEER_VCPUS: u64 = COUNT;
    /// Number of slots of a server with sessions.
    pub const SERVER_COUNT: u64 = PEER_VCPUS + crate::service::MAX_SESSIONS as u64 * FURTHER_VCPUS;
    /// Largest number of a VM's vCPUs after the first.
    const FURTHER_VCPUS: u64 = crate::system::MAX_VCPUS as u64 - 1;

    /// Returns the slot of a vCPU's notification in its VMM.
    pub const fn vcpu_notification(vcpu: usize) -> u64 {
        match vcpu {
            0 => NOTIFICATION,
            further => VCPU_NOTIFICATIONS + further as u64 - 1,
        }
    }

    /// Returns the slot of the peer's notification of a session: of the server, or of this vCPU of
    /// the client.
    pub const fn peer(session: usize, vcpu: usize) -> u64 {
        match vcpu {
            0 => SESSIONS + session as u64,
            further => PEER_VCPUS + session as u64 * FURTHER_VCPUS + further as u64 - 1,
        }
    }
}

/// Event bits of a task's notification.
pub mod event {
    /// Console: input has arrived, or output has room.
    pub const CONSOLE: u64 = 1 << 0;
    /// Root requests the task to end.
    pub const STOP: u64 = 1 << 2;
    /// Server: interrupt of its device.
    pub const INTERRUPT: u64 = 1 << 3;
    /// VMM: press the power button of the VM.
    pub const POWER_BUTTON: u64 = 1 << 8;
    /// VMM: stop all vCPUs and the virtual time until [`RESUME`].
    pub const PAUSE: u64 = 1 << 9;
    /// VMM: continue after [`PAUSE`].
    pub const RESUME: u64 = 1 << 10;
    /// VMM: write the report ([`crate::manage::Report`]).
    pub const REPORT: u64 = 1 << 11;
    /// VMM: the state of a channel has changed: [`crate::channel::LOOK`].
    pub const CHANNELS: u64 = 1 << 12;
    /// VMM: the peer of channel `number` has rung the doorbell.
    pub const fn channel(number: usize) -> u64 {
        1 << (16 + number % crate::channel::MAX_VM_CHANNELS)
    }
    /// Number of the bit of [`pass_through`].
    pub const fn pass_through_bit(number: usize) -> u32 {
        20 + (number % crate::system::MAX_VM_DEVICES) as u32
    }
    /// VMM: interrupt of a device that the guest drives itself.
    pub const fn pass_through(number: usize) -> u64 {
        1 << pass_through_bit(number)
    }
    /// VMM: a vCPU has pending work.
    pub const KICK: u64 = 1 << 4;
    /// The peer of session `number` has signalled, or was restarted.
    pub const fn session(number: usize) -> u64 {
        1 << (32 + number % crate::service::MAX_SESSIONS)
    }
}

/// Largest number of memory ranges of a task.
pub const MAX_RANGES: usize = 44;
/// Largest encoded start page in bytes.
pub const MAX_START: usize = 4096;

/// Purpose of a memory range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RangeKind {
    /// Private memory of the task.
    Private,
    /// Guest memory, a naturally aligned power of two. The ranges are in ascending order of
    /// guest-physical addresses, largest first. With [`Vmm::identity`]: one range of any length.
    Guest,
    /// The guest's kernel image, read-only.
    Kernel,
    /// The guest's initial RAM disk, read-only.
    Initrd,
    /// Page of a VMM's [`crate::manage::Report`].
    Report,
    /// Memory that root shares with a multiplexer, read-only: see [`crate::console::directory`].
    Directory,
    /// Memory of a session, in the order of the sessions.
    Session,
    /// Memory of a channel, in the order of the channels.
    Channel,
    /// DMA memory of a server, physically contiguous.
    Dma,
    /// Registers of a server's device: of a PCI function, the range of one base address register;
    /// `physical` is the index of the register, in ascending order. Pages that contain the MSI-X
    /// table are omitted. Of another device, all its registers, with index 0; they may begin and
    /// end inside a page. VMM: those of device `physical` of [`Vmm::devices`]; of a PCI function,
    /// see [`function_registers`].
    Registers,
    /// Configuration space of a server's device, read-only; `physical` is 0. VMM: that of device
    /// `physical` of [`Vmm::devices`].
    Configuration,
}

/// A range of the task's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// Purpose.
    pub kind: RangeKind,
    /// First address; page-aligned, unless the kind says otherwise.
    pub base: u64,
    /// Length in bytes; exact for read-only files and registers, else a multiple of the page size.
    pub length: u64,
    /// Session, DMA memory: device address of the first byte. Registers: see
    /// [`RangeKind::Registers`]. Else 0.
    pub physical: u64,
}

/// Clocks of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clock {
    /// Frequency of the time-stamp counter in kHz.
    pub tsc_khz: u64,
    /// Time-stamp counter at which `unix_seconds` was read.
    pub tsc: u64,
    /// Wall-clock time in seconds since 1970, UTC.
    pub unix_seconds: u64,
}

/// Purpose of a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role<'a> {
    /// A native program with arguments.
    Program(#[serde(borrow)] Vec<&'a str, MAX_ARGUMENTS>),
    /// A console server.
    Console {
        /// First I/O port of its 16550; 0: its registers are memory range 0 of kind `Registers`
        /// (PL011).
        port: u16,
        /// Several clients share the port; else a single client uses it.
        multiplex: bool,
    },
    /// A VMM.
    Vmm(#[serde(borrow)] Vmm<'a>),
    /// A disk server.
    Disk(DiskServer),
    /// A switch.
    Net(NetServer),
}

/// Seed of random numbers.
pub type Seed = [u8; 32];

/// Kinds of devices that a guest can drive itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PassThroughKind {
    /// A PL011, which accesses no memory.
    Pl011,
    /// A virtio device over MMIO.
    Virtio,
    /// A PCI function, which the IOMMU restricts to guest memory. Root resets it.
    Pci,
}

/// A device of the machine that a guest drives itself. Device `n` uses memory range `n` of kind
/// `Registers`, or those of [`function_registers`] and of kind `Configuration`, slot
/// `PASS_THROUGH + n` and event `pass_through(n)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassThrough {
    /// Kind.
    pub kind: PassThroughKind,
    /// Its interrupt is level-triggered.
    pub is_level: bool,
}

/// Configuration of a VMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vmm<'a> {
    /// Id of the VM, from 1.
    pub id: u32,
    /// Host CPU of each vCPU.
    pub cpus: Vec<u32, MAX_VCPUS>,
    /// Guest memory in bytes.
    pub memory: u64,
    /// Kernel command line.
    pub command_line: &'a str,
    /// A console session is in [`slot::DEVICE`].
    pub console: bool,
    /// Action on a reset by the guest.
    pub on_reset: OnReset,
    /// The guest is offered KVM's paravirtual clock.
    pub kvmclock: bool,
    /// The guest also has the console as a virtio device, after all other devices.
    pub virtio_console: bool,
    /// Transport of the guest's virtio devices.
    pub transport: VirtioTransport,
    /// vTLB; `None`: nested paging.
    pub vtlb: Option<Vtlb>,
    /// `XCR0` bits that the guest may enable.
    pub xcr0_mask: u64,
    /// The guest's interrupt controller is a GICv2, as the machine's (AArch64).
    pub gicv2: bool,
    /// The processor has 32-bit guests, too (AArch64).
    pub aarch32: bool,
    /// Secret seed of the VM's random numbers; `None`: the VMM has the processor's source only.
    pub seed: Option<Seed>,
    /// Disks and network cards, in the order of their discovery by the guest.
    pub attachments: Vec<Attachment, MAX_SESSIONS>,
    /// Channels to peer VMs. Channel `n` uses memory range `n` of kind `Channel`, slot `CHANNELS +
    /// n` and event `channel(n)`.
    #[serde(borrow)]
    pub channels: Vec<End<'a>, MAX_VM_CHANNELS>,
    /// Devices of the machine that the guest drives itself.
    pub devices: Vec<PassThrough, MAX_VM_DEVICES>,
    /// Guest-physical address of guest memory, which is its physical one; `None`: the board's.
    pub identity: Option<u64>,
}

/// The start page.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start<'a> {
    /// Name of the task; for a VMM that of its VM.
    pub name: &'a str,
    /// CPU of the first thread.
    pub cpu: u32,
    /// Priority of the first thread.
    pub priority: u8,
    /// CPU time of the first thread's scheduling context, and of each further one like it.
    pub cpu_time: Option<CpuTime>,
    /// Clocks.
    pub clock: Clock,
    /// Memory ranges.
    pub ranges: Vec<Range, MAX_RANGES>,
    /// Purpose.
    #[serde(borrow)]
    pub role: Role<'a>,
}

impl<'a> Start<'a> {
    /// Decodes a start page; `None` if it is malformed.
    pub fn decode(bytes: &'a [u8]) -> Option<Self> {
        postcard::from_bytes(bytes).ok()
    }

    /// Encodes the description into `buffer` and returns the written part; `None` if it does not
    /// fit.
    pub fn encode<'b>(&self, buffer: &'b mut [u8]) -> Option<&'b mut [u8]> {
        postcard::to_slice(self, buffer).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_description_fits_a_page() {
        let line = "x".repeat(crate::system::MAX_COMMAND_LINE);
        let range =
            Range { kind: RangeKind::Guest, base: u64::MAX, length: u64::MAX, physical: u64::MAX };
        let attachment = Attachment { service: crate::service::Service::Net, signal: u64::MAX };
        let end = End {
            side: 1,
            peer: u32::MAX,
            peer_name: "a-name-of-the-longest-kind-there",
            doorbell: true,
            signal: u64::MAX,
        };
        let device = PassThrough { kind: PassThroughKind::Virtio, is_level: true };
        let start = Start {
            name: "a-name-of-the-longest-kind-there",
            cpu: u32::MAX,
            priority: u8::MAX,
            cpu_time: Some(CpuTime { budget: u64::MAX, period: u64::MAX }),
            clock: Clock { tsc_khz: u64::MAX, tsc: u64::MAX, unix_seconds: u64::MAX },
            ranges: Vec::from_iter([range; MAX_RANGES]),
            role: Role::Vmm(Vmm {
                id: u32::MAX,
                cpus: Vec::from_iter([u32::MAX; MAX_VCPUS]),
                memory: u64::MAX,
                command_line: &line,
                console: true,
                on_reset: OnReset::Reset,
                kvmclock: true,
                virtio_console: true,
                transport: VirtioTransport::Pci,
                vtlb: Some(Vtlb {
                    pool: u32::MAX,
                    rung: crate::vtlb::Rung::InvalidatePage,
                    spaces: u8::MAX,
                    trace_writes: true,
                }),
                xcr0_mask: u64::MAX,
                gicv2: true,
                aarch32: true,
                seed: Some([u8::MAX; 32]),
                attachments: Vec::from_iter([attachment; MAX_SESSIONS]),
                channels: Vec::from_iter([end; MAX_VM_CHANNELS]),
                devices: Vec::from_iter([device; MAX_VM_DEVICES]),
                identity: Some(u64::MAX),
            }),
        };
        let mut buffer = [0; MAX_START];
        let bytes = start.encode(&mut buffer).unwrap();
        assert_eq!(Start::decode(bytes), Some(start));
    }

    #[test]
    fn nonsense_is_refused() {
        assert_eq!(Start::decode(&[0xff; 64]), None);
        assert_eq!(Start::decode(&[]), None);
    }
}

//! TOML schema of system descriptions, with the position of every value.
//!
//! This module defines the syntax; `validate` checks the meaning.

use crate::cpu_time::{Budget, TaskCpu};
use hosted_command::architecture::Architecture;
use hosted_command::value::Size;
use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, Visitor};
use std::fmt;
use toml::Spanned;

/// System description.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// The machine.
    pub system: Spanned<System>,
    /// `[[server]]`: device servers.
    #[serde(default)]
    pub server: Vec<Spanned<Server>>,
    /// `[[task]]`: native tasks.
    #[serde(default)]
    pub task: Vec<Spanned<Task>>,
    /// `[[vm]]`: virtual machines.
    #[serde(default)]
    pub vm: Vec<Spanned<Vm>>,
    /// `[[channel]]`: channels between VMs.
    #[serde(default)]
    pub channel: Vec<Spanned<Channel>>,
}

/// `[system]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct System {
    /// Board that the system is built for.
    pub board: Board,
    /// Destination of the kernel log.
    #[serde(default)]
    pub log: Log,
    /// Memory of the machine.
    pub memory: Option<Spanned<Size>>,
    /// Number of CPUs of the machine.
    pub cpus: Option<Spanned<u32>>,
    /// vCPUs may share CPUs by time slices.
    #[serde(default)]
    pub share_cpus: bool,
    /// The emulated machine has an IOMMU, which restricts DMA of devices to memory of their
    /// servers. On `qemu-virt` its devices are on PCI then.
    #[serde(default)]
    pub iommu: bool,
    /// Files in `/root` of the RAM disk `busybox`.
    #[serde(default)]
    pub files: Vec<Spanned<String>>,
    /// Disks of the emulated machine: see `attach::EmulatedDisk`.
    #[serde(default)]
    pub disk: Vec<Spanned<String>>,
    /// Network cards of the emulated machine: see `attach::EmulatedNic`.
    #[serde(default)]
    pub net: Vec<Spanned<String>>,
}

/// Board.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Board {
    /// QEMU's q35.
    #[serde(rename = "qemu-q35")]
    QemuQ35,
    /// Any PC.
    #[serde(rename = "pc")]
    Pc,
    /// QEMU's AArch64 machine `virt`. Its PL011 is `com1`, a virtio console `com2`.
    #[serde(rename = "qemu-virt")]
    QemuVirt,
}

impl Board {
    /// Returns its name in descriptions.
    pub const fn name(self) -> &'static str {
        match self {
            Self::QemuQ35 => "qemu-q35",
            Self::Pc => "pc",
            Self::QemuVirt => "qemu-virt",
        }
    }

    /// Returns the architecture of its processors, and of its guests.
    pub const fn architecture(self) -> Architecture {
        match self {
            Self::QemuQ35 | Self::Pc => Architecture::X86,
            Self::QemuVirt => Architecture::Arm64,
        }
    }

    /// Returns the board that QEMU emulates for an architecture.
    pub const fn emulated(architecture: Architecture) -> Self {
        match architecture {
            Architecture::X86 => Self::QemuQ35,
            Architecture::Arm64 => Self::QemuVirt,
        }
    }
}

/// Destination of the kernel log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Log {
    /// First serial port.
    Com1,
    /// Second serial port.
    #[default]
    Com2,
    /// No log.
    None,
}

/// `[[server]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Server {
    /// Unique among servers.
    pub name: Spanned<String>,
    /// Kind of service.
    pub kind: ServerKind,
    /// Device that the server owns: see `attach::MachineDevice`. A switch needs none.
    pub device: Option<Spanned<String>>,
    /// Binary that replaces the default one.
    pub program: Option<Spanned<String>>,
    /// VMs that may be connected to a switch; without it, all.
    #[serde(default)]
    pub ports: Option<Vec<Spanned<String>>>,
    /// Restart policy.
    pub restart: Option<Restart>,
    /// 0 to 63.
    pub priority: Option<Spanned<u32>>,
    /// CPU time budget.
    pub cpu: Option<Budget>,
}

/// Kind of service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ServerKind {
    /// A serial port.
    Console,
    /// A disk.
    Block,
    /// A network.
    Switch,
}

/// `[[task]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Task {
    /// Unique among VMs and tasks.
    pub name: Spanned<String>,
    /// Binary.
    pub binary: Spanned<String>,
    /// Arguments.
    #[serde(default)]
    pub args: Vec<Spanned<String>>,
    /// CPU of the first thread, CPU time budget, or both.
    pub cpu: Option<TaskCpu>,
    /// 0 to 63.
    pub priority: Option<Spanned<u32>>,
    /// The system waits for its end.
    pub essential: Option<bool>,
    /// Console connection.
    pub console: Option<Spanned<Console>>,
    /// May list, start, stop, create and destroy VMs.
    #[serde(default)]
    pub manage: bool,
}

/// `[[vm]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vm {
    /// Unique among VMs and tasks.
    pub name: Spanned<String>,
    /// Number of vCPUs, or the CPU of each.
    pub cpus: Option<Spanned<Cpus>>,
    /// Guest memory.
    pub memory: Spanned<Size>,
    /// `debian`, `debian-armmp`, `micro:` and the name of a micro-guest, or a file.
    pub kernel: Spanned<String>,
    /// `busybox` or a file.
    pub initrd: Option<Spanned<String>>,
    /// Kernel command line.
    pub cmdline: Option<Spanned<String>>,
    /// Connection of the first serial port.
    pub console: Option<Spanned<Console>>,
    /// The guest has the console as a virtio device, too (`hvc0` in Linux).
    #[serde(default)]
    pub virtio_console: bool,
    /// Transport of virtio devices: `pci` (the default), or `mmio` on board `qemu-virt`.
    pub transport: Option<Spanned<GuestTransport>>,
    /// VMM binary that replaces Parador's.
    pub vmm: Option<Spanned<String>>,
    /// 0 to 63.
    pub priority: Option<Spanned<u32>>,
    /// CPU time budget of each vCPU.
    pub cpu: Option<Budget>,
    /// Restart policy.
    #[serde(default)]
    pub restart: Restart,
    /// Action on a reset by the guest.
    #[serde(default)]
    pub on_reset: OnReset,
    /// Offer kvmclock to the guest (the default). Without it, Linux reads the time-stamp counter,
    /// which costs less, but must calibrate its frequency.
    pub kvmclock: Option<bool>,
    /// The processor translates guest memory (nested paging, the default). `false`: software does,
    /// by a vTLB.
    #[serde(default = "yes")]
    pub npt: bool,
    /// Memory for the vTLB of each vCPU, 256K to 1M (the default).
    pub vtlb: Option<Spanned<Size>>,
    /// Optimisations of the vTLB, each with all before it: `user` (none, and by the VMM), `kernel`
    /// (none), `global`, `cache` (or `cache=N` with a number of address spaces), `sync`, `trace`,
    /// `asid`, `invlpga` (the default).
    pub rung: Option<Spanned<String>>,
    /// Number of address spaces that the vTLB keeps from the rung `cache` on: 1 to 32 (8).
    pub vtlb_spaces: Option<Spanned<u32>>,
    /// Sign by which the vTLB finds page tables that the guest has written.
    pub trace: Option<Spanned<Trace>>,
    /// The system waits for its end.
    pub essential: Option<bool>,
    /// Template: not started; VMs are created from it at run time.
    #[serde(default)]
    pub template: bool,
    /// Disks: see `attach::DiskAttachment`.
    #[serde(default)]
    pub disk: Vec<Spanned<String>>,
    /// Network cards: see `attach::NetAttachment`.
    #[serde(default)]
    pub net: Vec<Spanned<String>>,
    /// Devices of the machine that the guest drives itself, on board `qemu-virt`: `com1`,
    /// `virtio-blk:0` or `virtio-net:0`. With `iommu = true` the IOMMU restricts the latter to the
    /// guest's memory; else the guest must be `trusted`.
    #[serde(default)]
    pub devices: Vec<Spanned<String>>,
    /// The guest may have devices that access all memory of the machine.
    #[serde(default)]
    pub trusted: bool,
}

/// `[[channel]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Channel {
    /// Names of the two VMs: sides 0 and 1.
    pub between: Spanned<Vec<Spanned<String>>>,
    /// Kind; there is one, and it must be named.
    pub kind: ChannelKind,
    /// Size of the shared memory in bytes.
    pub size: Spanned<Size>,
    /// Both sides have a doorbell to the other.
    #[serde(default = "yes")]
    pub doorbell: bool,
}

fn yes() -> bool {
    true
}

/// Kind of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChannelKind {
    /// Shared memory with a message ring in each direction.
    Shmem,
}

/// Connection of a VM's first serial port, or of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Console {
    /// First serial port of the machine, exclusively.
    Com1,
    /// First serial port of the machine, shared.
    Mux,
    /// Nothing.
    None,
}

/// Restart policy of a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Restart {
    /// Never.
    #[default]
    Never,
    /// After panic, triple fault, reset or a VMM fault.
    OnCrash,
    /// After every exit.
    Always,
}

/// Action on a reset by the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnReset {
    /// End the VM.
    #[default]
    Exit,
    /// Restart the VM.
    Reset,
}

/// Transport of a guest's virtio devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GuestTransport {
    /// Functions of a PCI bus, with interrupt messages.
    Pci,
    /// Registers at fixed addresses.
    Mmio,
}

/// Sign by which a vTLB finds page tables that the guest has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Trace {
    /// The processor's dirty bits (the default).
    Dirty,
    /// Write faults.
    Write,
}

/// vCPUs of a VM: `2` or `{ pin = [0, 1] }`.
#[derive(Debug)]
pub enum Cpus {
    /// This number, on any CPUs.
    Count(u32),
    /// One on each of these CPUs.
    Pin(Vec<Spanned<u32>>),
}

impl<'de> Deserialize<'de> for Cpus {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct CpusVisitor;

        impl<'de> Visitor<'de> for CpusVisitor {
            type Value = Cpus;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of CPUs, or { pin = [0, 1] }")
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Cpus, E> {
                let count = u32::try_from(value);
                count
                    .map(Cpus::Count)
                    .map_err(|_| E::invalid_value(de::Unexpected::Signed(value), &self))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Cpus, A::Error> {
                #[derive(Deserialize)]
                #[serde(deny_unknown_fields)]
                struct Pins {
                    pin: Vec<Spanned<u32>>,
                }
                Pins::deserialize(de::value::MapAccessDeserializer::new(map))
                    .map(|pins| Cpus::Pin(pins.pin))
            }
        }

        deserializer.deserialize_any(CpusVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hosted_command::toml_text::parse;

    #[test]
    fn problems_have_their_place() {
        let at = |text: &str| {
            let problem = parse::<Description>(text).unwrap_err();
            let span = problem.span.unwrap();
            (text[span].to_owned(), problem.message)
        };
        let vm = "[system]\nboard = \"pc\"\n[[vm]]\nname = \"a\"\nkernel = \"k\"\n";
        assert_eq!(at(&format!("{vm}memory = 256")).0, "256");
        let (place, message) = at(&format!("{vm}memory = \"256\""));
        assert_eq!(place, "\"256\"");
        assert!(message.contains("256M"), "{message}");
        assert_eq!(at(&format!("{vm}memroy = \"1M\"")).0, "memroy");
        assert_eq!(at(&format!("{vm}memory = \"1M\"\ncpus = {{ pins = [1] }}")).0, "pins");
        assert_eq!(at(&format!("{vm}memory = \"1M\"\ncpus = -1")).0, "-1");
        assert_eq!(at("[system]\nboard = \"amiga\"").0, "\"amiga\"");
    }
}

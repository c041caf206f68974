//! A validated system description.

use crate::attach::{EmulatedDisk, EmulatedNic, MachineDevice};
use crate::description::{Board, Log, OnReset, Restart, ServerKind};
use hosted_command::architecture::{Architecture, GuestArchitecture};
use hosted_command::failure::Failure;
use hosted_command::problem::{Diagnostics, Problem};
use hosted_command::value::Size;
use proto::system as compiled;
use proto::vtlb::Vtlb;
use std::ops::Range;
use std::path::{Path, PathBuf};
use toml::Spanned;

/// Binary of a console server.
const CONSOLE_BINARY: &str = "console";
/// Binaries of a disk server and of a switch.
const DISK_BINARY: &str = "disk";
const NET_BINARY: &str = "net";
/// Binary of a VMM.
const VMM_BINARY: &str = "vmm";

/// A validated description.
#[derive(Debug)]
pub struct ResolvedSystem {
    /// Board.
    pub board: Board,
    /// Destination of the kernel log.
    pub log: Log,
    /// CPUs of the machine; `None`: unknown (board `pc`).
    pub cpus: Option<u32>,
    /// Requested memory in bytes.
    pub(crate) memory: Option<(Size, Option<Range<usize>>)>,
    pub(crate) share_cpus: bool,
    /// The emulated machine has an IOMMU.
    pub iommu: bool,
    /// Files for the RAM disk with busybox.
    pub files: Vec<PathBuf>,
    /// Servers, by index.
    pub servers: Vec<ResolvedServer>,
    /// Native tasks.
    pub tasks: Vec<ResolvedTask>,
    /// Virtual machines.
    pub vms: Vec<ResolvedVm>,
    /// Channels between VMs.
    pub channels: Vec<compiled::Channel>,
    /// Disks of the emulated machine.
    pub disks: Vec<EmulatedDisk>,
    /// Network cards of the emulated machine.
    pub nets: Vec<EmulatedNic>,
    pub(crate) source: Source,
}

/// Text of the description.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) file: String,
    pub(crate) text: String,
}

/// A validated server.
#[derive(Debug)]
pub struct ResolvedServer {
    /// Its name.
    pub name: String,
    /// Kind of service.
    pub kind: ServerKind,
    /// The server has several clients.
    pub shared: bool,
    /// Device that the server owns.
    pub device: Option<MachineDevice>,
    /// Binary, if it is not the default.
    pub(crate) program: Option<Spanned<String>>,
    /// Restart policy.
    pub restart: Restart,
    /// 0 to [`compiled::MAX_PRIORITY`].
    pub priority: u8,
    /// CPU time budget, if there is one.
    pub cpu_time: Option<compiled::CpuTime>,
}

impl ResolvedServer {
    /// Returns the name of the binary.
    pub(crate) fn binary(&self) -> &str {
        if let Some(program) = &self.program {
            return program.get_ref();
        }
        match self.kind {
            ServerKind::Console => CONSOLE_BINARY,
            ServerKind::Block => DISK_BINARY,
            ServerKind::Switch => NET_BINARY,
        }
    }
}

/// A validated native task.
#[derive(Debug)]
pub struct ResolvedTask {
    /// Its name.
    pub name: String,
    pub(crate) binary: Spanned<String>,
    pub(crate) arguments: Vec<String>,
    pub(crate) cpu: u32,
    /// 0 to [`compiled::MAX_PRIORITY`].
    pub priority: u8,
    /// CPU time budget, if there is one.
    pub cpu_time: Option<compiled::CpuTime>,
    pub(crate) essential: bool,
    /// Index of the console server.
    pub console: Option<u8>,
    /// The task has root's management gate.
    pub manage: bool,
}

/// A validated VM.
#[derive(Debug)]
pub struct ResolvedVm {
    /// Its name.
    pub name: String,
    /// Guest memory.
    pub(crate) memory: Spanned<Size>,
    pub(crate) vcpus: u32,
    pub(crate) pins: Vec<u32>,
    /// Source of the kernel.
    pub kernel: Spanned<KernelSource>,
    /// Source of the initial RAM disk.
    pub initrd: Option<Spanned<InitrdSource>>,
    pub(crate) command_line: String,
    /// Index of the console server.
    pub console: Option<u8>,
    /// VMM binary, if it is not [`VMM_BINARY`].
    pub(crate) vmm: Option<Spanned<String>>,
    /// 0 to [`compiled::MAX_PRIORITY`].
    pub priority: u8,
    /// CPU time budget, if there is one.
    pub cpu_time: Option<compiled::CpuTime>,
    /// Restart policy.
    pub restart: Restart,
    pub(crate) on_reset: OnReset,
    pub(crate) kvmclock: bool,
    pub(crate) virtio_console: bool,
    pub(crate) transport: compiled::VirtioTransport,
    /// vTLB; `None`: nested paging.
    pub vtlb: Option<Vtlb>,
    pub(crate) essential: bool,
    /// Template for VMs that are created at run time.
    pub template: bool,
    /// Disks, each with the index of its server.
    pub disks: Vec<compiled::VmDisk>,
    /// Network cards, each with the index of its switch.
    pub nets: Vec<compiled::VmNet>,
    /// Devices of the machine that the guest drives itself.
    pub devices: Vec<MachineDevice>,
}

impl ResolvedVm {
    /// Returns the architecture of the guest on a machine of this one.
    pub(crate) fn guest_architecture(&self, machine: Architecture) -> GuestArchitecture {
        match self.kernel.get_ref() {
            KernelSource::Debian(architecture) => *architecture,
            KernelSource::Micro(_) | KernelSource::File(_) => machine.into(),
        }
    }
}

/// Source of a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum KernelSource {
    /// Debian's kernel for guests of this architecture, fetched with apt.
    Debian(GuestArchitecture),
    /// Micro-guest of the build, by file name.
    Micro(String),
    /// A file.
    File(PathBuf),
}

/// Source of an initial RAM disk.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum InitrdSource {
    /// Built from busybox.
    Busybox,
    /// A file.
    File(PathBuf),
}

/// Boot files of a VM.
#[derive(Clone, Debug)]
pub struct VmFiles {
    /// The kernel.
    pub kernel: PathBuf,
    /// The initial RAM disk.
    pub initrd: Option<PathBuf>,
}

impl Source {
    /// Creates the failure with these problems.
    pub(crate) fn refuse(&self, problems: Vec<Problem>) -> Failure {
        Diagnostics { file: self.file.clone(), text: self.text.clone(), problems }.into()
    }
}

impl ResolvedSystem {
    /// Returns Parador's kernel command line.
    pub fn kernel_command_line(&self) -> String {
        let is_arm64 = self.board.architecture() == Architecture::Arm64;
        let log = match self.log {
            Log::Com1 if is_arm64 => "uart",
            Log::Com2 if is_arm64 => "virtio",
            Log::Com1 => "com1",
            Log::Com2 => "com2",
            Log::None => "none",
        };
        // After a panic, an emulated machine exits; a real one halts with the message on its
        // screen.
        let panic = match self.board {
            Board::QemuQ35 => "debug-exit",
            Board::Pc => "halt",
            Board::QemuVirt => "off",
        };
        format!("log={log} panic={panic}")
    }

    /// Returns the clients of a shared console, in the order of their numbers there, from 1; empty
    /// if the console is not shared.
    pub fn console_clients(&self) -> Vec<&str> {
        let shared =
            |console: Option<u8>| console.and_then(|server| self.servers.get(usize::from(server)));
        let tasks = self.tasks.iter().map(|task| (&task.name, task.console));
        let vms = self.vms.iter().filter(|vm| !vm.template).map(|vm| (&vm.name, vm.console));
        tasks
            .chain(vms)
            .filter(|&(_, console)| shared(console).is_some_and(|server| server.shared))
            .map(|(name, _)| name.as_str())
            .collect()
    }

    /// Returns the binaries that the system needs besides the kernel and `root`: name, and position
    /// in the description if it is named there.
    pub fn binaries(&self) -> Vec<(&str, Option<Range<usize>>)> {
        let mut binaries: Vec<(&str, Option<Range<usize>>)> = Vec::new();
        let servers = self
            .servers
            .iter()
            .map(|server| (server.binary(), server.program.as_ref().map(|program| program.span())));
        let vms = self.vms.iter().map(|vm| match &vm.vmm {
            Some(vmm) => (vmm.get_ref().as_str(), Some(vmm.span())),
            None => (VMM_BINARY, None),
        });
        let tasks = self
            .tasks
            .iter()
            .map(|task| (task.binary.get_ref().as_str(), Some(task.binary.span())));
        for (name, span) in servers.chain(vms).chain(tasks) {
            if !binaries.iter().any(|(known, _)| *known == name) {
                binaries.push((name, span));
            }
        }
        binaries
    }

    /// Checks that the binaries that the description names are in the folder `programs`.
    pub fn check_programs(&self, programs: &Path) -> Result<(), Failure> {
        let file = |name: &str| self.board.architecture().program(name);
        let missing = |name: &str| !programs.join(file(name)).is_file();
        let problems: Vec<Problem> = self
            .binaries()
            .into_iter()
            .filter_map(|(name, span)| Some((name, span.filter(|_| missing(name))?)))
            .map(|(name, span)| {
                let message = format!("no binary `{}` in {}", file(name), programs.display());
                Problem::missing(span, message)
                    .help("correct the name, or build it: `cargo xtask build`")
            })
            .collect();
        if problems.is_empty() { Ok(()) } else { Err(self.source.refuse(problems)) }
    }
}

impl ResolvedVm {
    /// Returns the name of the VMM binary.
    pub fn binary(&self) -> &str {
        self.vmm.as_ref().map_or(VMM_BINARY, |vmm| vmm.get_ref().as_str())
    }

    /// Describes vCPUs and memory for messages.
    pub fn cpus_and_memory(&self) -> String {
        format!("{}, {}", plural(self.vcpus, "vCPU"), self.memory.get_ref())
    }

    /// Returns whether the VM is a client of the server with this index.
    pub(crate) fn uses(&self, server: u8) -> bool {
        self.console == Some(server)
            || self.disks.iter().any(|disk| disk.server == server)
            || self.nets.iter().any(|net| net.server == server)
    }
}

/// Returns a count with its noun.
pub(crate) fn plural(count: u32, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}

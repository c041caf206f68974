//! Validation of system descriptions. The rules, each reported with its position in the file:
//!
//! - names are unique, short and of `a-z 0-9 -`; referenced objects exist;
//! - a channel connects two different VMs (`channels`);
//! - a device has one owner; a console has one client, or all of its clients share it;
//! - CPUs exist, and without `share_cpus` every vCPU has a CPU of its own;
//! - no CPU is reserved beyond 100 % (`cpu_time`);
//! - guests, boot files and Parador itself fit into the machine's memory;
//! - a kernel file is complete, and its guest has enough memory for it.
//!
//! The last rule and the sizes of boot files need the files: [`validate`] checks the files that
//! exist, and [`ResolvedSystem::check_files`] is called again when all have been fetched.

mod attachments;
mod cpus;
mod devices;
mod features;
mod names;
mod servers;

use crate::attach::{MachineDevice, VirtioBus};
use crate::channels;
use crate::cpu_time::Budget;
use crate::description::{self, Board, Console, Description, GuestTransport};
use crate::resolved::{
    InitrdSource, KernelSource, ResolvedServer, ResolvedSystem, ResolvedTask, ResolvedVm, Source,
};
use crate::vtlb;
use attachments::Attached;
use cpus::{CpuRequest, least_cpus, most_cpus};
use devices::MachineDevices;
use hosted_command::architecture::{Architecture, GuestArchitecture};
use hosted_command::failure::Failure;
use hosted_command::input;
use hosted_command::problem::Problem;
use hosted_command::toml_text;
use hosted_command::value::Size;
use names::{Names, is_name};
use proto::channel::MAX_CHANNELS;
use proto::system as compiled;
use std::ops::Range;
use std::path::Path;
use toml::Spanned;

/// Default kernel command line.
const DEFAULT_COMMAND_LINE: &str = "console=ttyS0";
const DEFAULT_COMMAND_LINE_ARM64: &str = "console=ttyAMA0";
const DEFAULT_PRIORITY: u8 = 10;

/// Kernel: Debian's for AArch32.
const DEBIAN_32_BIT: &str = "debian-armmp";
/// Prefix of the name of a micro-guest.
const MICRO_PREFIX: &str = "micro:";
/// Granularity of guest memory in bytes: it is mapped in large pages.
const GUEST_MEMORY_STEP: u64 = 1 << 20;
/// Most guest memory in bytes: more than physical addresses of a guest reach.
const MAX_GUEST_MEMORY: u64 = 1 << 46;

/// Values of the command line that override a description.
#[derive(Clone, Copy, Debug, Default)]
pub struct Overrides {
    /// CPUs of the emulated machine.
    pub cpus: Option<u32>,
    /// Memory of the emulated machine in bytes.
    pub memory: Option<Size>,
    /// Architecture of the emulated machine: its board replaces that of the description.
    pub architecture: Option<Architecture>,
}

/// Reads and validates the description in `file`.
pub fn validate(file: &Path, overrides: Overrides) -> Result<ResolvedSystem, Failure> {
    let text = input::text(file)?;
    let source = Source { file: file.display().to_string(), text };
    let description = match toml_text::parse::<Description>(&source.text) {
        Ok(description) => description,
        Err(problem) => return Err(source.refuse(vec![problem])),
    };
    let folder = file.parent().unwrap_or(Path::new(""));
    let mut checker = Validator {
        problems: Vec::new(),
        folder,
        architecture: Architecture::X86,
        bus: VirtioBus::Pci,
    };
    let resolved = checker.resolved(description, overrides, source);
    if checker.problems.is_empty() {
        Ok(resolved)
    } else {
        Err(resolved.source.refuse(checker.problems))
    }
}

/// Collects problems during validation; a placeholder replaces each invalid value, so that the rest
/// is checked, too.
struct Validator<'a> {
    problems: Vec<Problem>,
    folder: &'a Path,
    /// Architecture of the machine and its guests.
    architecture: Architecture,
    /// Transport of the machine's virtio devices.
    bus: VirtioBus,
}

impl Validator<'_> {
    fn resolved(
        &mut self,
        description: Description,
        overrides: Overrides,
        source: Source,
    ) -> ResolvedSystem {
        let Description { system, server, task, vm, channel } = description;
        let system_span = system.span();
        let mut system = system.into_inner();
        if let Some(architecture) = overrides.architecture {
            system.board = Board::emulated(architecture);
        }
        self.architecture = system.board.architecture();
        self.bus = VirtioBus::of(self.architecture, system.iommu);
        self.features(&system, &vm);
        self.limits(&vm, &task, &server);
        if vm.is_empty() && task.is_empty() {
            self.problems.push(empty_system(system_span));
        }
        self.limit("channels", MAX_CHANNELS, &channel);
        let channels = channels::check(&channel, &vm, &mut self.problems);
        let disks = self.machine_disks(&system.disk);
        let nets = self.machine_nets(&system.net);
        let files = self.guest_files(&system.files);
        let emulated = (system.board != Board::Pc).then_some((&disks[..], &nets[..]));
        let machine = MachineDevices { log: system.log, emulated };
        self.ports(&server, &vm);
        let consoles = self.consoles(&vm, &task);
        let servers = self.servers(server, &consoles, machine);
        let mut names = Names::new("task or virtual machine");
        let console = console_server(&servers);
        let tasks = task.into_iter().map(|task| self.task(task.into_inner(), &mut names, console));
        let tasks: Vec<ResolvedTask> = tasks.collect();
        // VMs created from a template share CPUs with other VMs.
        let started = vm.iter().map(Spanned::get_ref).filter(|vm| !vm.template);
        let requests: Vec<CpuRequest> = started.map(CpuRequest::of).collect();
        let vms = self.vms(vm, machine, &servers, &mut names, console);
        let cpus = self.machine_cpus(&system, overrides, &requests, &tasks);
        self.cpus(&requests, &tasks, cpus, system.share_cpus);
        let resolved = ResolvedSystem {
            board: system.board,
            log: system.log,
            cpus,
            memory: machine_memory(&system, overrides),
            share_cpus: system.share_cpus,
            iommu: system.iommu,
            files,
            servers,
            tasks,
            vms,
            channels,
            disks,
            nets,
            source,
        };
        self.promises(&resolved);
        resolved.file_problems(&resolved.visible_files(), &mut self.problems);
        resolved
    }

    /// Checks the numbers of VMs, tasks and servers.
    fn limits<V, T, S>(
        &mut self,
        vms: &[Spanned<V>],
        tasks: &[Spanned<T>],
        servers: &[Spanned<S>],
    ) {
        self.limit("virtual machines", compiled::MAX_VMS, vms);
        self.limit("tasks", compiled::MAX_TASKS, tasks);
        self.limit("servers", compiled::MAX_SERVERS, servers);
    }

    /// Resolves all VMs with their disks and network cards.
    fn vms(
        &mut self,
        described: Vec<Spanned<description::Vm>>,
        machine: MachineDevices,
        servers: &[ResolvedServer],
        names: &mut Names,
        console: Option<u8>,
    ) -> Vec<ResolvedVm> {
        let mut attached = Attached::default();
        let mut taken = Vec::new();
        let numbered = described.into_iter().enumerate();
        numbered
            .map(|(index, vm)| {
                let vm = vm.into_inner();
                let disks = self.disks(&vm, servers, &mut attached);
                let nets = self.nets(index, &vm, servers, &mut attached);
                let devices = self.own_devices(&vm, machine, servers, &mut taken);
                ResolvedVm { disks, nets, devices, ..self.vm(vm, names, console) }
            })
            .collect()
    }

    /// Returns the number of CPUs of the machine; `None`: unknown.
    fn machine_cpus(
        &mut self,
        system: &description::System,
        overrides: Overrides,
        requests: &[CpuRequest],
        tasks: &[ResolvedTask],
    ) -> Option<u32> {
        let most = most_cpus(self.architecture);
        let described = system.cpus.as_ref().map(|cpus| (*cpus.get_ref(), Some(cpus.span())));
        match overrides.cpus.map(|cpus| (cpus, None)).or(described) {
            Some((cpus, span)) => {
                if cpus == 0 || cpus > most {
                    let message = format!("cpus must be 1 to {most} (got {cpus})");
                    self.problems.push(Problem { span, ..Problem::new(0..0, message) });
                }
                Some(cpus)
            }
            None if system.board == Board::Pc => None,
            None => Some(least_cpus(requests, tasks, system.share_cpus, most)),
        }
    }

    fn limit<T>(&mut self, what: &str, most: usize, items: &[Spanned<T>]) {
        let count = items.len();
        if count > most {
            let message = format!("{count} {what} (limit {most})");
            self.problems.push(Problem::new(items[most].span(), message));
        }
    }

    fn task(
        &mut self,
        task: description::Task,
        names: &mut Names,
        console: Option<u8>,
    ) -> ResolvedTask {
        names.add(&task.name, &mut self.problems);
        self.binary(&task.binary);
        if let Some(argument) = task.args.get(compiled::MAX_ARGUMENTS) {
            let message =
                format!("too many arguments of a task (limit {})", compiled::MAX_ARGUMENTS);
            self.problems.push(Problem::new(argument.span(), message));
        }
        let cpu = task.cpu.unwrap_or_default();
        ResolvedTask {
            name: task.name.into_inner(),
            arguments: task.args.into_iter().map(Spanned::into_inner).collect(),
            cpu: cpu.number.unwrap_or(0),
            priority: self.priority(task.priority, DEFAULT_PRIORITY),
            cpu_time: self.cpu_time(cpu.budget.as_ref()),
            essential: task.essential.unwrap_or(true),
            console: console.filter(|_| uses_console(task.console.as_ref())),
            manage: task.manage,
            binary: task.binary,
        }
    }

    fn binary(&mut self, name: &Spanned<String>) {
        if !is_name(name.get_ref()) {
            let message = format!("`{}` is not the name of a binary", name.get_ref());
            let problem = Problem::new(name.span(), message);
            self.problems
                .push(problem.help("use a file name without a folder, as in \"check-hostile\""));
        }
    }

    fn vm(&mut self, vm: description::Vm, names: &mut Names, console: Option<u8>) -> ResolvedVm {
        names.add(&vm.name, &mut self.problems);
        let request = CpuRequest::of(&vm);
        self.memory_and_vcpus(&vm, &request);
        let command_line = match &vm.cmdline {
            Some(text) => {
                self.command_line(text);
                text.get_ref().clone()
            }
            None if self.architecture == Architecture::Arm64 => {
                DEFAULT_COMMAND_LINE_ARM64.to_owned()
            }
            None => DEFAULT_COMMAND_LINE.to_owned(),
        };
        let kernel = self.kernel(&vm.kernel);
        let vtlb = vtlb::check(&vm, &mut self.problems);
        let initrd = vm.initrd.map(|initrd| {
            let source = match initrd.get_ref().as_str() {
                "busybox" => InitrdSource::Busybox,
                path => InitrdSource::File(self.folder.join(path)),
            };
            Spanned::new(initrd.span(), source)
        });
        if let Some(vmm) = &vm.vmm {
            self.binary(vmm);
        }
        ResolvedVm {
            name: vm.name.into_inner(),
            memory: vm.memory,
            vcpus: request.vcpus,
            pins: request.pins.iter().map(|pin| *pin.get_ref()).collect(),
            kernel: Spanned::new(vm.kernel.span(), kernel),
            initrd,
            command_line,
            console: console.filter(|_| uses_console(vm.console.as_ref())),
            vmm: vm.vmm,
            priority: self.priority(vm.priority, DEFAULT_PRIORITY),
            cpu_time: self.cpu_time(vm.cpu.as_ref()),
            restart: vm.restart,
            on_reset: vm.on_reset,
            kvmclock: vm.kvmclock.unwrap_or(true),
            virtio_console: vm.virtio_console,
            transport: self.transport(vm.transport.as_ref()),
            vtlb,
            essential: vm.essential.unwrap_or(!vm.template),
            template: vm.template,
            disks: Vec::new(),
            nets: Vec::new(),
            devices: Vec::new(),
        }
    }

    fn memory_and_vcpus(&mut self, vm: &description::Vm, request: &CpuRequest) {
        let Size(memory) = *vm.memory.get_ref();
        if memory == 0 || memory % GUEST_MEMORY_STEP != 0 {
            let message = format!("guest memory must be a multiple of {}", Size(GUEST_MEMORY_STEP));
            self.problems.push(Problem::new(vm.memory.span(), message));
        }
        if memory > MAX_GUEST_MEMORY {
            let message = format!("guest memory must be at most {}", Size(MAX_GUEST_MEMORY));
            self.problems.push(Problem::new(vm.memory.span(), message));
        }
        if request.vcpus == 0 || request.vcpus as usize > compiled::MAX_VCPUS {
            let message = format!(
                "a virtual machine must have 1 to {} vCPUs (got {})",
                compiled::MAX_VCPUS,
                request.vcpus
            );
            self.problems.push(Problem::new(request.span.clone(), message));
        }
    }

    /// Returns the transport of virtio devices.
    fn transport(&mut self, given: Option<&Spanned<GuestTransport>>) -> compiled::VirtioTransport {
        match given.map(|given| (given.span(), *given.get_ref())) {
            Some((span, GuestTransport::Mmio)) if self.architecture != Architecture::Arm64 => {
                let problem = Problem::new(span, "a PC has no virtio devices with transport mmio");
                self.problems.push(problem.help("use \"pci\", or `board = \"qemu-virt\"`"));
                compiled::VirtioTransport::Pci
            }
            Some((_, GuestTransport::Mmio)) => compiled::VirtioTransport::Mmio,
            Some((_, GuestTransport::Pci)) | None => compiled::VirtioTransport::Pci,
        }
    }

    /// Returns the source of a kernel.
    fn kernel(&mut self, kernel: &Spanned<String>) -> KernelSource {
        let text = kernel.get_ref();
        if text == DEBIAN_32_BIT && self.architecture != Architecture::Arm64 {
            let message = format!("kernel \"{DEBIAN_32_BIT}\" is for machines of AArch64 alone");
            let problem = Problem::new(kernel.span(), message);
            self.problems.push(problem.help("use \"debian\", or `board = \"qemu-virt\"`"));
        }
        match text.strip_prefix(MICRO_PREFIX).filter(|name| is_name(name)) {
            _ if text == "debian" => KernelSource::Debian(self.architecture.into()),
            _ if text == DEBIAN_32_BIT => KernelSource::Debian(GuestArchitecture::Arm32),
            Some(name) => KernelSource::Micro(self.architecture.micro_guest(name)),
            None => KernelSource::File(self.folder.join(text)),
        }
    }

    fn command_line(&mut self, text: &Spanned<String>) {
        let line = text.get_ref();
        if line.len() > compiled::MAX_COMMAND_LINE {
            let message = format!(
                "the kernel command line has {} bytes (limit {})",
                line.len(),
                compiled::MAX_COMMAND_LINE
            );
            self.problems.push(Problem::new(text.span(), message));
        }
        if line.contains(|character: char| character.is_control()) {
            let message = "the kernel command line must be one line without control characters";
            self.problems.push(Problem::new(text.span(), message));
        }
    }

    fn priority(&mut self, given: Option<Spanned<u32>>, default: u8) -> u8 {
        let Some(given) = given else { return default };
        match u8::try_from(*given.get_ref()) {
            Ok(priority) if priority <= compiled::MAX_PRIORITY => priority,
            _ => {
                let message =
                    format!("priorities must be 0 to {} (highest)", compiled::MAX_PRIORITY);
                self.problems.push(Problem::new(given.span(), message));
                default
            }
        }
    }

    fn cpu_time(&mut self, given: Option<&Budget>) -> Option<compiled::CpuTime> {
        given?.check(&mut self.problems)
    }
}

/// Returns the index of the server that has the first serial line.
fn console_server(servers: &[ResolvedServer]) -> Option<u8> {
    let found = servers.iter().position(|server| server.device == Some(MachineDevice::Com1));
    found.map(|index| index as u8)
}

/// Returns the memory of the machine, and its place in the description.
fn machine_memory(
    system: &description::System,
    overrides: Overrides,
) -> Option<(Size, Option<Range<usize>>)> {
    let described = system.memory.as_ref().map(|size| (*size.get_ref(), Some(size.span())));
    overrides.memory.map(|size| (size, None)).or(described)
}

/// Creates the problem of a description without VMs and tasks.
fn empty_system(span: Range<usize>) -> Problem {
    Problem::new(span, "the system has no virtual machine and no task")
        .help("add a [[vm]] or a [[task]]")
}

fn uses_console(console: Option<&Spanned<Console>>) -> bool {
    console.is_some_and(|console| *console.get_ref() != Console::None)
}

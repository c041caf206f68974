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

use crate::attach::{
    Bus, DiskAttachment, EmulatedDisk, EmulatedNic, NetAttachment, ServerDevice, chosen_mac,
};
use crate::channels;
use crate::cpu_time::{Budget, Promises};
use crate::description::{
    self, Board, Console, Cpus, Description, Log, OnReset, Restart, ServerKind,
};
use crate::guest;
use crate::rootfs;
use hosted_command::failure::{self, Failure};
use hosted_command::problem::{Diagnostics, Problem};
use hosted_command::toml_text;
use hosted_command::value::Size;
use proto::channel::MAX_CHANNELS;
use proto::service::MAX_SESSIONS;
use proto::system as compiled;
use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use toml::Spanned;
use vmm_boot::Kernel;

/// Name of the console server that is added when a VM uses COM1 and none is described.
const CONSOLE_NAME: &str = "console";
/// Binary of a console server.
const CONSOLE_BINARY: &str = "console";
/// Binaries of a disk server and of a switch.
const DISK_BINARY: &str = "disk";
const NET_BINARY: &str = "net";
/// Binary of a VMM.
const VMM_BINARY: &str = "vmm";
/// Default kernel command line.
const DEFAULT_COMMAND_LINE: &str = "console=ttyS0";
const DEFAULT_PRIORITY: u8 = 10;
/// Servers have a higher priority than their clients, or a busy client could starve its own
/// console.
const DEFAULT_SERVER_PRIORITY: u8 = 40;

/// Memory of the kernel with its objects, `root` and the servers, in bytes.
const FIXED_MEMORY: u64 = 16 << 20;
/// Memory of a VM beyond guest memory: VMM and kernel objects, in bytes.
const PER_VM_MEMORY: u64 = 1 << 20;
/// Nested page tables take 8 bytes per 4 KiB page at worst, and the mapping database as much again.
const PAGE_TABLE_SHIFT: u32 = 8;
/// Assumed length of the boot files of a VM whose kernel has not been fetched, in bytes.
const UNFETCHED_FILES: u64 = 20 << 20;
/// Assumed length of a micro-guest that has not been built, in bytes.
const MICRO_FILES: u64 = 1 << 20;
/// Prefix of the name of a micro-guest.
const MICRO_PREFIX: &str = "micro:";
/// Granularity of an emulated machine's memory in bytes.
const MEMORY_STEP: u64 = 64 << 20;
/// QEMU's limit for the q35 board with default settings.
const MAX_CPUS: u32 = 288;
/// Granularity of guest memory in bytes: it is mapped in large pages.
const GUEST_MEMORY_STEP: u64 = 1 << 20;

/// Values of the command line that override a description.
#[derive(Clone, Copy, Debug, Default)]
pub struct Overrides {
    /// CPUs of the emulated machine.
    pub cpus: Option<u32>,
    /// Memory of the emulated machine in bytes.
    pub memory: Option<Size>,
}

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
    memory: Option<(Size, Option<Range<usize>>)>,
    share_cpus: bool,
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
    source: Source,
}

#[derive(Debug)]
struct Source {
    file: String,
    text: String,
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
    pub device: Option<ServerDevice>,
    /// Binary, if it is not the default.
    program: Option<Spanned<String>>,
    /// Restart policy.
    pub restart: Restart,
    /// 0 to [`compiled::MAX_PRIORITY`].
    pub priority: u8,
    /// CPU time budget, if there is one.
    pub cpu_time: Option<compiled::CpuTime>,
}

impl ResolvedServer {
    fn binary(&self) -> &str {
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
    binary: Spanned<String>,
    arguments: Vec<String>,
    cpu: u32,
    /// 0 to [`compiled::MAX_PRIORITY`].
    pub priority: u8,
    /// CPU time budget, if there is one.
    pub cpu_time: Option<compiled::CpuTime>,
    essential: bool,
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
    memory: Spanned<Size>,
    vcpus: u32,
    pins: Vec<u32>,
    /// Source of the kernel.
    pub kernel: Spanned<KernelSource>,
    /// Source of the initial RAM disk.
    pub initrd: Option<Spanned<InitrdSource>>,
    command_line: String,
    /// Index of the console server.
    pub console: Option<u8>,
    /// VMM binary, if it is not [`VMM_BINARY`].
    vmm: Option<Spanned<String>>,
    /// 0 to [`compiled::MAX_PRIORITY`].
    pub priority: u8,
    /// CPU time budget, if there is one.
    pub cpu_time: Option<compiled::CpuTime>,
    /// Restart policy.
    pub restart: Restart,
    on_reset: OnReset,
    kvmclock: bool,
    virtio_console: bool,
    essential: bool,
    /// Template for VMs that are created at run time.
    pub template: bool,
    /// Disks, each with the index of its server.
    pub disks: Vec<compiled::VmDisk>,
    /// Network cards, each with the index of its switch.
    pub nets: Vec<compiled::VmNet>,
}

/// Source of a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum KernelSource {
    /// Debian's cloud kernel, fetched with apt.
    Debian,
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

/// Reads and validates the description in `file`.
pub fn validate(file: &Path, overrides: Overrides) -> Result<ResolvedSystem, Failure> {
    let text = fs::read_to_string(file).map_err(|error| match error.kind() {
        std::io::ErrorKind::InvalidData => {
            Failure::new(failure::BAD_CONFIG, format!("{} is not UTF-8 text", file.display()))
        }
        _ => Failure::file("read", file, &error),
    })?;
    let source = Source { file: file.display().to_string(), text };
    let description = match toml_text::parse::<Description>(&source.text) {
        Ok(description) => description,
        Err(problem) => return Err(source.refuse(vec![problem])),
    };
    let folder = file.parent().unwrap_or(Path::new(""));
    let mut checker = Validator { problems: Vec::new(), folder };
    let resolved = checker.resolved(description, overrides, source);
    if checker.problems.is_empty() {
        Ok(resolved)
    } else {
        Err(resolved.source.refuse(checker.problems))
    }
}

impl Source {
    fn refuse(&self, problems: Vec<Problem>) -> Failure {
        Diagnostics { file: self.file.clone(), text: self.text.clone(), problems }.into()
    }
}

/// Collects problems during validation; a placeholder replaces each invalid value, so that the rest
/// is checked, too.
struct Validator<'a> {
    problems: Vec<Problem>,
    folder: &'a Path,
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
        let system = system.into_inner();
        self.limit("virtual machines", vm.len(), compiled::MAX_VMS, &vm);
        self.limit("tasks", task.len(), compiled::MAX_TASKS, &task);
        self.limit("servers", server.len(), compiled::MAX_SERVERS, &server);
        if vm.is_empty() && task.is_empty() {
            let problem =
                Problem::new(system_span, "the system has no virtual machine and no task");
            self.problems.push(problem.help("add a [[vm]] or a [[task]]"));
        }

        self.limit("channels", channel.len(), MAX_CHANNELS, &channel);
        let channels = channels::check(&channel, &vm, &mut self.problems);
        let disks = self.machine_disks(&system.disk);
        let nets = self.machine_nets(&system.net);
        let files = self.guest_files(&system.files);
        let machine = (system.board == Board::QemuQ35).then_some((&disks[..], &nets[..]));
        self.ports(&server, &vm);
        let consoles = self.consoles(&vm, &task);
        let servers = self.servers(server, &consoles, system.log, machine);
        let mut names = Names::new("task or virtual machine");
        let console = servers.iter().position(|server| server.device == Some(ServerDevice::Com1));
        let console = console.map(|index| index as u8);
        let tasks: Vec<ResolvedTask> = task
            .into_iter()
            .map(|task| self.task(task.into_inner(), &mut names, console))
            .collect();
        // VMs created from a template share CPUs with other VMs.
        let started = vm.iter().map(Spanned::get_ref).filter(|vm| !vm.template);
        let requests: Vec<CpuRequest> = started.map(CpuRequest::of).collect();
        let mut attached = Attached::default();
        let vms = vm
            .into_iter()
            .enumerate()
            .map(|(index, vm)| {
                let vm = vm.into_inner();
                let disks = self.disks(&vm, &servers, &mut attached);
                let nets = self.nets(index, &vm, &servers, &mut attached);
                ResolvedVm { disks, nets, ..self.vm(vm, &mut names, console) }
            })
            .collect();

        let described = system.cpus.as_ref().map(|cpus| (*cpus.get_ref(), Some(cpus.span())));
        let cpus = match overrides.cpus.map(|cpus| (cpus, None)).or(described) {
            Some((cpus, span)) => {
                if cpus == 0 || cpus > MAX_CPUS {
                    let message = format!("cpus must be 1 to {MAX_CPUS} (got {cpus})");
                    self.problems.push(Problem { span, ..Problem::new(0..0, message) });
                }
                Some(cpus)
            }
            None if system.board == Board::Pc => None,
            None => Some(least_cpus(&requests, &tasks, system.share_cpus)),
        };
        self.cpus(&requests, &tasks, cpus, system.share_cpus);

        let described = system.memory.as_ref().map(|size| (*size.get_ref(), Some(size.span())));
        let resolved = ResolvedSystem {
            board: system.board,
            log: system.log,
            cpus,
            memory: overrides.memory.map(|size| (size, None)).or(described),
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
        let files = resolved.visible_files();
        resolved.file_problems(&files, &mut self.problems);
        resolved
    }

    fn limit<T>(&mut self, what: &str, count: usize, most: usize, items: &[Spanned<T>]) {
        if count > most {
            let message = format!("{count} {what} (limit {most})");
            self.problems.push(Problem::new(items[most].span(), message));
        }
    }

    fn servers(
        &mut self,
        described: Vec<Spanned<description::Server>>,
        consoles: &[Client],
        log: Log,
        machine: Option<(&[EmulatedDisk], &[EmulatedNic])>,
    ) -> Vec<ResolvedServer> {
        let shared = consoles.iter().any(|client| client.shares);
        let mut names = Names::new("server");
        let mut servers: Vec<ResolvedServer> = Vec::new();
        for server in described {
            let server = server.into_inner();
            names.add(&server.name, &mut self.problems);
            let device = self.device(&server);
            if let (Some(device), Some(written)) = (device, &server.device) {
                let owner = servers
                    .iter()
                    .find(|other| other.device.is_some_and(|other| other.overlaps(device)));
                if let Some(owner) = owner {
                    let message = format!("{device} already belongs to server `{}`", owner.name);
                    let problem = Problem::new(written.span(), message);
                    self.problems.push(
                        problem.help("a device has one owner; remove one of the two servers"),
                    );
                }
                if device == ServerDevice::Com1 && log == Log::Com1 {
                    self.problems.push(log_conflict(written.span()));
                }
                if let Some(missing) = machine.and_then(|machine| missing_device(device, machine)) {
                    let message = format!("the machine has no {device}");
                    self.problems.push(Problem::new(written.span(), message).help(missing));
                }
            }
            if let Some(program) = &server.program {
                self.binary(program);
            }
            servers.push(ResolvedServer {
                name: server.name.into_inner(),
                kind: server.kind,
                shared,
                device,
                program: server.program,
                restart: server.restart.unwrap_or(Restart::OnCrash),
                priority: self.priority(server.priority, DEFAULT_SERVER_PRIORITY),
                cpu_time: self.cpu_time(server.cpu.as_ref()),
            });
        }
        let has_console = servers.iter().any(|server| server.kind == ServerKind::Console);
        if let (Some(user), false) = (consoles.first(), has_console) {
            if log == Log::Com1 {
                self.problems.push(log_conflict(user.span.clone()));
            }
            servers.push(ResolvedServer {
                name: CONSOLE_NAME.to_owned(),
                kind: ServerKind::Console,
                shared,
                device: Some(ServerDevice::Com1),
                program: None,
                restart: Restart::OnCrash,
                priority: DEFAULT_SERVER_PRIORITY,
                cpu_time: None,
            });
        }
        servers
    }

    /// Checks that the console has one client, or several that all share it.
    fn consoles(
        &mut self,
        vms: &[Spanned<description::Vm>],
        tasks: &[Spanned<description::Task>],
    ) -> Vec<Client> {
        let vms = vms.iter().map(|vm| (&vm.get_ref().name, &vm.get_ref().console));
        let tasks = tasks.iter().map(|task| (&task.get_ref().name, &task.get_ref().console));
        let clients: Vec<Client> = tasks
            .chain(vms)
            .filter_map(|(name, console)| {
                let console = console.as_ref()?;
                let shares = *console.get_ref() == Console::Mux;
                let uses = shares || *console.get_ref() == Console::Com1;
                uses.then(|| Client { name: name.get_ref().clone(), span: console.span(), shares })
            })
            .collect();
        for (index, client) in clients.iter().enumerate() {
            let Some(other) = clients[..index].iter().find(|other| !other.shares || !client.shares)
            else {
                continue;
            };
            let message = format!("com1 is already the console of `{}`", other.name);
            let problem = Problem::new(client.span.clone(), message);
            self.problems.push(problem.help(
                "let all of them share it with console = \"mux\", or give all but one \"none\"",
            ));
        }
        clients
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
        let Size(memory) = *vm.memory.get_ref();
        if memory == 0 || memory % GUEST_MEMORY_STEP != 0 {
            let message = format!("guest memory must be a multiple of {}", Size(GUEST_MEMORY_STEP));
            self.problems.push(Problem::new(vm.memory.span(), message));
        }
        let request = CpuRequest::of(&vm);
        if request.vcpus == 0 || request.vcpus as usize > compiled::MAX_VCPUS {
            let message = format!(
                "a virtual machine must have 1 to {} vCPUs (got {})",
                compiled::MAX_VCPUS,
                request.vcpus
            );
            self.problems.push(Problem::new(request.span.clone(), message));
        }
        let command_line = match &vm.cmdline {
            Some(text) => {
                self.command_line(text);
                text.get_ref().clone()
            }
            None => DEFAULT_COMMAND_LINE.to_owned(),
        };
        let kernel = match vm.kernel.get_ref().as_str() {
            "debian" => KernelSource::Debian,
            text => match text.strip_prefix(MICRO_PREFIX).filter(|name| is_name(name)) {
                Some(name) => KernelSource::Micro(format!("guest-{name}")),
                None => KernelSource::File(self.folder.join(text)),
            },
        };
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
            essential: vm.essential.unwrap_or(!vm.template),
            template: vm.template,
            disks: Vec::new(),
            nets: Vec::new(),
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

    /// Sums the reservations of each CPU, with the VMs placed as root places them.
    fn promises(&mut self, resolved: &ResolvedSystem) {
        let mut promises = Promises::default();
        for server in &resolved.servers {
            promises.add(0, &server.name, server.cpu_time);
        }
        for task in &resolved.tasks {
            promises.add(task.cpu, &task.name, task.cpu_time);
        }
        for (index, vm) in resolved.vms.iter().enumerate().filter(|(_, vm)| !vm.template) {
            let count = resolved.cpus.unwrap_or(MAX_CPUS).max(1);
            for vcpu in 0..vm.vcpus {
                let chosen = (index as u32 + vcpu) % count;
                let cpu = vm.pins.get(vcpu as usize).copied().unwrap_or(chosen);
                promises.add(cpu, &vm.name, vm.cpu_time);
            }
        }
        promises.check(&mut self.problems);
    }

    fn cpus(
        &mut self,
        requests: &[CpuRequest],
        tasks: &[ResolvedTask],
        cpus: Option<u32>,
        share: bool,
    ) {
        let mut owners: HashMap<u32, &str> = HashMap::new();
        for request in requests {
            let mut own: Vec<u32> = Vec::new();
            for pin in &request.pins {
                let cpu = *pin.get_ref();
                if let Some(count) = cpus.filter(|&count| cpu >= count) {
                    let problem = Problem::new(pin.span(), no_such_cpu(cpu, count));
                    self.problems.push(problem.help("change the pin, or [system] cpus"));
                }
                if own.contains(&cpu) && !share {
                    let message = format!("CPU {cpu} is listed twice");
                    self.problems.push(Problem::new(pin.span(), message));
                } else if let (Some(other), false) = (owners.get(&cpu), share) {
                    let message = format!("CPU {cpu} already belongs to `{other}`");
                    let problem = Problem::new(pin.span(), message);
                    self.problems.push(problem.help(SHARE_HELP));
                }
                own.push(cpu);
            }
            owners.extend(own.into_iter().map(|cpu| (cpu, request.name.as_str())));
        }
        for task in tasks {
            if let Some(count) = cpus.filter(|&count| task.cpu >= count) {
                let message = format!("task `{}`: {}", task.name, no_such_cpu(task.cpu, count));
                let problem = Problem::new(task.binary.span(), message);
                self.problems.push(problem.help("change the task's `cpu`, or [system] cpus"));
            }
        }
        let Some(count) = cpus else { return };
        let mut total = 0_u32;
        for request in requests {
            total = total.saturating_add(request.vcpus);
            if request.vcpus > count && !share {
                let message = format!(
                    "`{}` has {}, the machine has {}",
                    request.name,
                    plural(request.vcpus, "vCPU"),
                    plural(count, "CPU")
                );
                let problem = Problem::new(request.span.clone(), message);
                self.problems.push(
                    problem.help(
                        "give it fewer, the machine more ([system] cpus), or share_cpus = true",
                    ),
                );
            } else if total > count && !share && request.pins.is_empty() {
                let message = format!(
                    "no CPU left for `{}`: {total} vCPUs so far on {}",
                    request.name,
                    plural(count, "CPU")
                );
                self.problems.push(Problem::new(request.span.clone(), message).help(SHARE_HELP));
            }
        }
    }
}

/// A client of the console.
struct Client {
    name: String,
    span: Range<usize>,
    shares: bool,
}

fn uses_console(console: Option<&Spanned<Console>>) -> bool {
    console.is_some_and(|console| *console.get_ref() != Console::None)
}

/// Disks and sessions attached to servers so far.
#[derive(Default)]
struct Attached {
    /// Disks and their VMs.
    disks: Vec<(String, DiskAttachment)>,
    macs: Vec<proto::net::Mac>,
    /// Sessions per server.
    sessions: HashMap<u8, usize>,
}

/// Disks, network cards and the servers that provide them.
impl Validator<'_> {
    fn parsed<T>(
        &mut self,
        text: &Spanned<String>,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<T> {
        let parsed = parse(text.get_ref());
        parsed.map_err(|message| self.problems.push(Problem::new(text.span(), message))).ok()
    }

    fn machine_disks(&mut self, written: &[Spanned<String>]) -> Vec<EmulatedDisk> {
        let folder = self.folder;
        let mut disks = Vec::new();
        for text in written {
            let Some(disk) = self.parsed(text, |text| EmulatedDisk::parse(text, folder)) else {
                continue;
            };
            disks.push(disk);
        }
        disks
    }

    fn machine_nets(&mut self, written: &[Spanned<String>]) -> Vec<EmulatedNic> {
        written.iter().filter_map(|text| self.parsed(text, EmulatedNic::parse)).collect()
    }

    /// Resolves the files for the RAM disk, which holds them in one folder.
    fn guest_files(&mut self, written: &[Spanned<String>]) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = Vec::new();
        for text in written {
            let path = self.folder.join(text.get_ref());
            if let Err(error) = file_length(&path) {
                self.problems.push(unreadable(text.span(), "file", &path, &error));
            } else if files.iter().any(|other| other.file_name() == path.file_name()) {
                let message = format!("another file has the same name as {}", path.display());
                let help = "all files are in /root in the guest; rename one";
                self.problems.push(Problem::new(text.span(), message).help(help));
            }
            files.push(path);
        }
        files
    }

    /// Returns the device of a server, if the server can drive it.
    fn device(&mut self, server: &description::Server) -> Option<ServerDevice> {
        let Some(written) = &server.device else {
            if server.kind != ServerKind::Switch {
                let message = format!("server `{}` has no device", server.name.get_ref());
                let problem = Problem::new(server.name.span(), message);
                self.problems.push(problem.help(device_help(server.kind)));
            }
            return None;
        };
        let device = self.parsed(written, ServerDevice::parse)?;
        let fits = match server.kind {
            ServerKind::Console => device == ServerDevice::Com1,
            ServerKind::Block => {
                matches!(device, ServerDevice::VirtioBlk(_) | ServerDevice::Ahci(..))
            }
            ServerKind::Switch => matches!(device, ServerDevice::VirtioNet(_)),
        };
        if !fits {
            let message = format!("server `{}` cannot drive {device}", server.name.get_ref());
            let problem = Problem::new(written.span(), message);
            self.problems.push(problem.help(device_help(server.kind)));
        }
        Some(device)
    }

    /// Checks that ports name VMs, and that every client of a switch is among its ports.
    fn ports(
        &mut self,
        servers: &[Spanned<description::Server>],
        vms: &[Spanned<description::Vm>],
    ) {
        for server in servers.iter().map(Spanned::get_ref) {
            let Some(ports) = &server.ports else { continue };
            if server.kind != ServerKind::Switch {
                let message = format!("server `{}` has no ports", server.name.get_ref());
                let problem = Problem::new(server.name.span(), message);
                self.problems.push(problem.help("remove `ports`, or set kind = \"switch\""));
                continue;
            }
            for port in ports {
                let known = vms.iter().any(|vm| vm.get_ref().name.get_ref() == port.get_ref());
                if !known {
                    let message = format!("no such virtual machine: `{}`", port.get_ref());
                    self.problems.push(Problem::new(port.span(), message));
                }
            }
            for vm in vms.iter().map(Spanned::get_ref) {
                let connected = vm.net.iter().find(|net| {
                    net.get_ref().split(',').next() == Some(server.name.get_ref().as_str())
                });
                let listed = ports.iter().any(|port| port.get_ref() == vm.name.get_ref());
                if let (Some(net), false) = (connected, listed) {
                    let message = format!(
                        "`{}` is not a port of switch `{}`",
                        vm.name.get_ref(),
                        server.name.get_ref()
                    );
                    let problem = Problem::new(net.span(), message);
                    self.problems.push(problem.help("add it to the switch's `ports`"));
                }
            }
        }
    }

    /// Returns the index of the server with this name and kind.
    fn server_of(
        &mut self,
        name: &str,
        kind: ServerKind,
        span: Range<usize>,
        servers: &[ResolvedServer],
        attached: &mut Attached,
    ) -> Option<u8> {
        let what = match kind {
            ServerKind::Console => "console",
            ServerKind::Block => "disk server",
            ServerKind::Switch => "switch",
        };
        let found = servers.iter().position(|server| server.name == name);
        let Some(index) = found.filter(|&index| servers[index].kind == kind) else {
            let message = format!("no such {what}: `{name}`");
            let kind = if kind == ServerKind::Block { "block" } else { "switch" };
            let help = format!("add a [[server]] with name = \"{name}\" and kind = \"{kind}\"");
            self.problems.push(Problem::new(span, message).help(help));
            return None;
        };
        let index = index as u8;
        let sessions = attached.sessions.entry(index).or_default();
        *sessions += 1;
        if *sessions == MAX_SESSIONS + 1 {
            let message = format!("{what} `{name}` has too many clients (limit {MAX_SESSIONS})");
            self.problems.push(Problem::new(span, message).help("add a second server"));
        }
        Some(index)
    }

    fn disks(
        &mut self,
        vm: &description::Vm,
        servers: &[ResolvedServer],
        attached: &mut Attached,
    ) -> Vec<compiled::VmDisk> {
        let mut disks = Vec::new();
        if let (Some(text), true) = (vm.disk.first().or(vm.net.first()), vm.template) {
            let message = "a template cannot have disks or network cards";
            self.problems.push(Problem::new(text.span(), message));
        }
        if let Some(text) = vm.disk.get(compiled::MAX_VM_DISKS) {
            let message =
                format!("too many disks of a virtual machine (limit {})", compiled::MAX_VM_DISKS);
            self.problems.push(Problem::new(text.span(), message));
        }
        for text in &vm.disk {
            let Some(disk) = self.parsed(text, DiskAttachment::parse) else { continue };
            let kind = ServerKind::Block;
            let Some(server) = self.server_of(&disk.server, kind, text.span(), servers, attached)
            else {
                continue;
            };
            if let Some((other, _)) = attached.disks.iter().find(|(_, other)| disk.conflicts(other))
            {
                let message = format!("these sectors already belong to `{other}`");
                let problem = Problem::new(text.span(), message);
                self.problems.push(
                    problem.help("shared sectors must be read-only for all: add `,ro` to each"),
                );
            }
            disks.push(compiled::VmDisk { server, part: disk.part, read_only: disk.read_only });
            attached.disks.push((vm.name.get_ref().clone(), disk));
        }
        disks
    }

    fn nets(
        &mut self,
        index: usize,
        vm: &description::Vm,
        servers: &[ResolvedServer],
        attached: &mut Attached,
    ) -> Vec<compiled::VmNet> {
        let mut nets = Vec::new();
        if let Some(text) = vm.net.get(compiled::MAX_VM_NETS) {
            let most = compiled::MAX_VM_NETS;
            let message = format!("too many network cards of a virtual machine (limit {most})");
            self.problems.push(Problem::new(text.span(), message));
        }
        for (card, text) in vm.net.iter().enumerate() {
            let Some(net) = self.parsed(text, NetAttachment::parse) else { continue };
            let kind = ServerKind::Switch;
            let Some(server) = self.server_of(&net.server, kind, text.span(), servers, attached)
            else {
                continue;
            };
            let mac = net.mac.unwrap_or(chosen_mac(index, card));
            if attached.macs.contains(&mac) {
                let problem = Problem::new(text.span(), "another network card has this address");
                self.problems.push(problem.help("use another address, or remove `mac`"));
            }
            attached.macs.push(mac);
            nets.push(compiled::VmNet { server, mac, group: net.group, rate: net.rate });
        }
        nets
    }
}

fn device_help(kind: ServerKind) -> &'static str {
    match kind {
        ServerKind::Console => "a console drives com1",
        ServerKind::Block => "a disk server drives pci:virtio-blk:0 or pci:ahci:0",
        ServerKind::Switch => "a switch drives pci:virtio-net:0, or nothing",
    }
}

/// Returns whether the emulated machine lacks the device, and the remedy.
fn missing_device(
    device: ServerDevice,
    (disks, nets): (&[EmulatedDisk], &[EmulatedNic]),
) -> Option<&'static str> {
    let on = |bus| disks.iter().filter(|disk| disk.bus == bus).count();
    let (there, help) = match device {
        ServerDevice::Com1 => (true, ""),
        ServerDevice::VirtioBlk(index) => {
            (usize::from(index) < on(Bus::Virtio), "add [system] disk = [\"disk.img\"]")
        }
        // The board has one AHCI controller; disks occupy its first ports.
        ServerDevice::Ahci(index, port) => (
            index == 0 && usize::from(port.unwrap_or(0)) < on(Bus::Ahci),
            "add [system] disk = [\"disk.img,bus=ahci\"]; the board has one controller",
        ),
        ServerDevice::VirtioNet(index) => {
            (usize::from(index) < nets.len(), "add [system] net = [\"user\"]")
        }
    };
    (!there).then_some(help)
}

fn compile_restart(restart: Restart) -> compiled::Restart {
    match restart {
        Restart::Never => compiled::Restart::Never,
        Restart::OnCrash => compiled::Restart::OnCrash,
        Restart::Always => compiled::Restart::Always,
    }
}

const SHARE_HELP: &str = "use other CPUs, or allow time slices with [system] share_cpus = true";

fn log_conflict(span: Range<usize>) -> Problem {
    Problem::new(span, "com1 already belongs to the kernel log")
        .help("set [system] log = \"com2\" or \"none\"")
}

fn no_such_cpu(cpu: u32, count: u32) -> String {
    match count {
        1 => format!("the machine has no CPU {cpu}, only CPU 0"),
        _ => format!("the machine has no CPU {cpu}, only 0 to {}", count - 1),
    }
}

fn plural(count: u32, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}

/// CPUs that a VM requests.
struct CpuRequest {
    name: String,
    vcpus: u32,
    pins: Vec<Spanned<u32>>,
    span: Range<usize>,
}

impl CpuRequest {
    fn of(vm: &description::Vm) -> Self {
        let name = vm.name.get_ref().clone();
        match &vm.cpus {
            None => Self { name, vcpus: 1, pins: Vec::new(), span: vm.name.span() },
            Some(cpus) => match cpus.get_ref() {
                Cpus::Count(vcpus) => {
                    Self { name, vcpus: *vcpus, pins: Vec::new(), span: cpus.span() }
                }
                Cpus::Pin(pins) => {
                    Self { name, vcpus: pins.len() as u32, pins: pins.clone(), span: cpus.span() }
                }
            },
        }
    }
}

/// Returns the default number of CPUs of an emulated machine.
fn least_cpus(requests: &[CpuRequest], tasks: &[ResolvedTask], share: bool) -> u32 {
    let vcpus = requests.iter().map(|request| request.vcpus);
    let together = if share { vcpus.max() } else { vcpus.reduce(u32::saturating_add) };
    let pins = requests.iter().flat_map(|request| &request.pins).map(|pin| *pin.get_ref());
    let named = pins.chain(tasks.iter().map(|task| task.cpu)).max();
    let least = together.unwrap_or(1).max(named.map_or(1, |cpu| cpu.saturating_add(1)));
    least.clamp(1, MAX_CPUS)
}

/// Names of one kind, with the position of the first use.
struct Names {
    kind: &'static str,
    known: Vec<String>,
}

impl Names {
    fn new(kind: &'static str) -> Self {
        Self { kind, known: Vec::new() }
    }

    fn add(&mut self, name: &Spanned<String>, problems: &mut Vec<Problem>) {
        let text = name.get_ref();
        if !is_name(text) {
            let message = format!("invalid name `{text}`");
            problems.push(Problem::new(name.span(), message).help(format!(
                "names consist of 1 to {} characters of a-z, 0-9 and -",
                compiled::MAX_NAME
            )));
        }
        if self.known.contains(text) {
            let message = format!("duplicate {} name `{text}`", self.kind);
            problems.push(Problem::new(name.span(), message).help("choose another name"));
        }
        self.known.push(text.clone());
    }
}

fn is_name(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=compiled::MAX_NAME).contains(&text.len()) && text.bytes().all(allowed)
}

impl ResolvedSystem {
    /// Returns Parador's kernel command line.
    pub fn kernel_command_line(&self) -> String {
        let log = match self.log {
            Log::Com1 => "com1",
            Log::Com2 => "com2",
            Log::None => "none",
        };
        // After a panic, an emulated machine exits; a real one halts with the message on its
        // screen.
        let panic = match self.board {
            Board::QemuQ35 => "debug-exit",
            Board::Pc => "halt",
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
        let missing = |name: &str| !programs.join(name).is_file();
        let problems: Vec<Problem> = self
            .binaries()
            .into_iter()
            .filter_map(|(name, span)| Some((name, span.filter(|_| missing(name))?)))
            .map(|(name, span)| {
                let message = format!("no binary `{name}` in {}", programs.display());
                Problem::missing(span, message)
                    .help("correct the name, or build it: `cargo xtask build`")
            })
            .collect();
        if problems.is_empty() { Ok(()) } else { Err(self.source.refuse(problems)) }
    }

    /// Returns the files that exist without fetching or building.
    fn visible_files(&self) -> Vec<Option<VmFiles>> {
        let files = self.vms.iter().map(|vm| {
            let KernelSource::File(kernel) = vm.kernel.get_ref() else { return None };
            let initrd = match vm.initrd.as_ref().map(Spanned::get_ref) {
                Some(InitrdSource::File(path)) => Some(path.clone()),
                _ => None,
            };
            Some(VmFiles { kernel: kernel.clone(), initrd })
        });
        files.collect()
    }

    /// Checks all files of all VMs, and the memory for them.
    pub fn check_files(&self, files: &[VmFiles]) -> Result<(), Failure> {
        let mut problems = Vec::new();
        let files: Vec<Option<VmFiles>> = files.iter().cloned().map(Some).collect();
        self.file_problems(&files, &mut problems);
        if problems.is_empty() { Ok(()) } else { Err(self.source.refuse(problems)) }
    }

    fn file_problems(&self, files: &[Option<VmFiles>], problems: &mut Vec<Problem>) {
        let mut boot_files = 0;
        for (vm, files) in self.vms.iter().zip(files) {
            let initrd_path = files.as_ref().and_then(|files| files.initrd.as_ref());
            let described = vm.initrd.as_ref().and_then(|initrd| match initrd.get_ref() {
                InitrdSource::File(path) => Some(path),
                InitrdSource::Busybox => None,
            });
            let mut initrd_length = 0;
            if let (Some(path), Some(initrd)) = (initrd_path.or(described), &vm.initrd) {
                match file_length(path) {
                    Ok(length) => initrd_length = length,
                    Err(error) => {
                        problems.push(unreadable(initrd.span(), "RAM disk", path, &error))
                    }
                }
            }
            match files {
                None if matches!(vm.kernel.get_ref(), KernelSource::Micro(_)) => {
                    boot_files += MICRO_FILES + initrd_length;
                }
                None => {
                    boot_files += UNFETCHED_FILES + initrd_length;
                    if vm.memory.get_ref().0 < guest::LINUX_MINIMUM {
                        problems.push(vm.too_little_memory(guest::LINUX_MINIMUM));
                    }
                }
                Some(files) => {
                    let kernel_length = vm.kernel_problems(&files.kernel, initrd_length, problems);
                    boot_files += kernel_length + initrd_length;
                }
            }
        }
        if let Some((given, span)) = &self.memory {
            let needed = self.memory_needed(boot_files);
            if given.0 < needed {
                let message = format!(
                    "not enough memory ({given}): guests need {}, boot files {}, Parador {}",
                    Size(self.guest_memory()),
                    Size(boot_files),
                    Size(needed - self.guest_memory() - boot_files),
                );
                let help = format!("give the machine at least {}M", needed.div_ceil(1 << 20));
                problems
                    .push(Problem { span: span.clone(), ..Problem::new(0..0, message).help(help) });
            }
        }
    }

    fn guest_memory(&self) -> u64 {
        self.vms.iter().fold(0, |sum: u64, vm| sum.saturating_add(vm.memory.get_ref().0))
    }

    /// Returns the least memory of a machine for this system in bytes, with boot files of this
    /// length.
    fn memory_needed(&self, boot_files: u64) -> u64 {
        let guests = self.guest_memory();
        let disks = self.vms.iter().map(|vm| vm.disks.len()).sum::<usize>() as u64;
        let nets = self.vms.iter().map(|vm| vm.nets.len()).sum::<usize>() as u64;
        let sessions = disks * proto::disk::SESSION_BYTES + nets * proto::net::SESSION_BYTES;
        let channels: u64 = self.channels.iter().map(|channel| u64::from(channel.size)).sum();
        let fixed = FIXED_MEMORY + PER_VM_MEMORY * self.vms.len() as u64 + sessions + channels;
        guests.saturating_add(guests >> PAGE_TABLE_SHIFT).saturating_add(fixed + boot_files)
    }

    /// Returns the memory of the emulated machine in bytes: as requested, else the least plus a
    /// margin.
    pub fn machine_memory(&self, boot_files: u64) -> u64 {
        match &self.memory {
            Some((size, _)) => size.0,
            None => self
                .memory_needed(boot_files)
                .saturating_add(MEMORY_STEP / 2)
                .next_multiple_of(MEMORY_STEP),
        }
    }

    /// Encodes the description for `root`. `names` are the kernels and RAM disks in the bundle, in
    /// the order of `vms`.
    pub fn compile(&self, names: &[(String, Option<String>)]) -> Result<Vec<u8>, Failure> {
        let servers = self.servers.iter().map(|server| compiled::Server {
            name: &server.name,
            kind: match server.kind {
                ServerKind::Console if server.shared => compiled::ServerKind::Multiplexer,
                ServerKind::Console => compiled::ServerKind::Console,
                ServerKind::Block => compiled::ServerKind::Block,
                ServerKind::Switch => compiled::ServerKind::Switch,
            },
            device: match server.device {
                None => compiled::Device::None,
                Some(ServerDevice::Com1) => compiled::Device::Serial(compiled::SerialPort::Com1),
                Some(ServerDevice::VirtioBlk(index)) => {
                    compiled::Device::Pci(compiled::PciClass::VirtioBlk, index)
                }
                Some(ServerDevice::VirtioNet(index)) => {
                    compiled::Device::Pci(compiled::PciClass::VirtioNet, index)
                }
                Some(ServerDevice::Ahci(index, port)) => {
                    compiled::Device::Pci(compiled::PciClass::Ahci(port), index)
                }
            },
            binary: server.binary(),
            priority: server.priority,
            cpu_time: server.cpu_time,
            restart: compile_restart(server.restart),
        });
        let tasks = self.tasks.iter().map(|task| compiled::TaskSpec {
            name: &task.name,
            binary: task.binary.get_ref(),
            arguments: task.arguments.iter().map(String::as_str).collect(),
            cpu: task.cpu,
            priority: task.priority,
            cpu_time: task.cpu_time,
            essential: task.essential,
            console: task.console,
            manage: task.manage,
        });
        let vms = self.vms.iter().zip(names).map(|(vm, (kernel, initrd))| compiled::Vm {
            name: &vm.name,
            memory: vm.memory.get_ref().0,
            vcpus: vm.vcpus,
            pins: vm.pins.iter().copied().collect(),
            binary: vm.binary(),
            kernel,
            initrd: initrd.as_deref(),
            command_line: &vm.command_line,
            console: vm.console,
            priority: vm.priority,
            cpu_time: vm.cpu_time,
            restart: compile_restart(vm.restart),
            on_reset: match vm.on_reset {
                OnReset::Exit => compiled::OnReset::Exit,
                OnReset::Reset => compiled::OnReset::Reset,
            },
            kvmclock: vm.kvmclock,
            virtio_console: vm.virtio_console,
            essential: vm.essential,
            template: vm.template,
            disks: vm.disks.iter().copied().collect(),
            nets: vm.nets.iter().copied().collect(),
        });
        let system = compiled::System {
            board: match self.board {
                Board::QemuQ35 => compiled::Board::QemuQ35,
                Board::Pc => compiled::Board::Pc,
            },
            log: match self.log {
                Log::Com1 => compiled::SerialPort::Com1,
                Log::Com2 => compiled::SerialPort::Com2,
                Log::None => compiled::SerialPort::None,
            },
            cpus: self.cpus.unwrap_or(0),
            servers: servers.collect(),
            tasks: tasks.collect(),
            vms: vms.collect(),
            channels: self.channels.iter().copied().collect(),
        };
        // Strings dominate; 64 KiB hold sixteen VMs with the longest command lines.
        let mut buffer = vec![0; 64 << 10];
        match system.encode(&mut buffer) {
            Ok(bytes) => Ok(bytes.to_vec()),
            Err(_) => {
                Err(Failure::new(failure::BAD_CONFIG, "the texts in the description exceed 64 KiB")
                    .help("shorten the arguments of tasks"))
            }
        }
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
    fn uses(&self, server: u8) -> bool {
        self.console == Some(server)
            || self.disks.iter().any(|disk| disk.server == server)
            || self.nets.iter().any(|net| net.server == server)
    }

    /// Checks the kernel file and returns its length.
    fn kernel_problems(&self, path: &Path, initrd: u64, problems: &mut Vec<Problem>) -> u64 {
        let span = self.kernel.span();
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) => {
                problems.push(unreadable(span, "kernel", path, &error));
                return 0;
            }
        };
        match Kernel::detect(&bytes) {
            Err(error) => {
                let message = format!("{}: {error}", path.display());
                problems.push(Problem::new(span, message).help(
                    "use a complete bzImage for x86-64 (vmlinuz), a PVH or Multiboot kernel, or \"debian\"",
                ));
            }
            Ok(kernel) => {
                let least = guest::least_memory(&kernel, initrd);
                if self.memory.get_ref().0 < least {
                    problems.push(self.too_little_memory(least));
                }
            }
        }
        bytes.len() as u64
    }

    fn too_little_memory(&self, least: u64) -> Problem {
        let message = format!(
            "{} of memory is not enough for the kernel of `{}`",
            self.memory.get_ref(),
            self.name
        );
        let help = format!("give it at least {}M", least.div_ceil(1 << 20));
        Problem::new(self.memory.span(), message).help(help)
    }
}

fn unreadable(span: Range<usize>, what: &str, path: &Path, error: &std::io::Error) -> Problem {
    let reason = failure::describe(error);
    let message = format!("cannot read the {what} {}: {reason}", path.display());
    let help = rootfs::advice(path)
        .unwrap_or_else(|| "paths are relative to the folder of this description".to_owned());
    Problem::missing(span, message).code(failure::code_of(error)).help(help)
}

/// Returns the length of a readable regular file.
fn file_length(path: &Path) -> std::io::Result<u64> {
    let metadata = fs::File::open(path)?.metadata()?;
    if metadata.is_file() {
        Ok(metadata.len())
    } else {
        Err(std::io::ErrorKind::IsADirectory.into())
    }
}

/// Summary of the verified properties.
impl fmt::Display for ResolvedSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let board = match self.board {
            Board::QemuQ35 => "qemu-q35",
            Board::Pc => "pc",
        };
        writeln!(f, "{}: no problem found", self.source.file)?;
        writeln!(f, "  board    {board}")?;
        let count = |items: usize, what: &str| plural(items as u32, what);
        writeln!(
            f,
            "  parts    {}, {}, {}: names unique, references valid",
            count(self.vms.len(), "virtual machine"),
            count(self.tasks.len(), "task"),
            count(self.servers.len(), "server"),
        )?;
        let vcpus = self.vms.iter().filter(|vm| !vm.template).map(|vm| vm.vcpus).sum();
        match self.cpus {
            None => writeln!(f, "  CPUs     {}; number of CPUs unknown", plural(vcpus, "vCPU"))?,
            Some(cpus) if self.share_cpus => {
                writeln!(
                    f,
                    "  CPUs     {} on {}, sharing allowed",
                    plural(vcpus, "vCPU"),
                    plural(cpus, "CPU")
                )?;
            }
            Some(cpus) => {
                writeln!(
                    f,
                    "  CPUs     {} on {}, none shared",
                    plural(vcpus, "vCPU"),
                    plural(cpus, "CPU")
                )?;
            }
        }
        let guests = Size(self.guest_memory());
        match &self.memory {
            Some((size, _)) => {
                writeln!(
                    f,
                    "  memory   {guests} for guests, boot files and Parador fit into {size}"
                )?;
            }
            None if self.board == Board::Pc => {
                writeln!(f, "  memory   {guests} for guests; memory size unknown")?;
            }
            None => writeln!(f, "  memory   {guests} for guests; memory size chosen to fit")?,
        }
        let log = match self.log {
            Log::Com1 => "com1: kernel log",
            Log::Com2 => "com2: kernel log",
            Log::None => "no kernel log",
        };
        write!(f, "  devices  {log}")?;
        for (index, server) in self.servers.iter().enumerate() {
            match server.device {
                Some(device) => write!(f, "; {device}: server {}", server.name)?,
                None => write!(f, "; server {}", server.name)?,
            }
            let index = index as u8;
            let tasks = self.tasks.iter().map(|task| (&task.name, task.console == Some(index)));
            let vms = self.vms.iter().map(|vm| (&vm.name, vm.uses(index)));
            let clients: Vec<&str> = tasks
                .chain(vms)
                .filter(|(_, is_client)| *is_client)
                .map(|(name, _)| name.as_str())
                .collect();
            if !clients.is_empty() {
                write!(f, " for {}", clients.join(", "))?;
            }
        }
        writeln!(f)?;
        for vm in &self.vms {
            let kernel = match vm.kernel.get_ref() {
                KernelSource::Debian => "Debian's kernel, checked after fetching".to_owned(),
                KernelSource::Micro(name) => format!("{name} of the build"),
                KernelSource::File(path) => format!("{} is complete", path.display()),
            };
            writeln!(f, "  {:<8} {}, {kernel}", vm.name, vm.memory.get_ref())?;
        }
        Ok(())
    }
}

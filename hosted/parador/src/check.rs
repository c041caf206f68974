//! What makes sense in a system description. The rules, each refused with its place:
//!
//! - names are unique, short and of `a-z 0-9 -`; what they refer to exists;
//! - a channel connects two different virtual machines (`channels`);
//! - a device has one owner; a console has one client, or all of its clients share it;
//! - CPUs that are named exist, and without `share_cpus` every vCPU has a CPU of its own;
//! - no CPU is promised more than once (`cpu_time`);
//! - guests, boot files and Parador itself fit into the machine's memory;
//! - a kernel is whole, and its guest has the memory that it needs.
//!
//! The last rule and the sizes of boot files need the files: [`check`] judges what it can see
//! and [`Plan::check_files`] is called again when everything is there.

use crate::attach::{Bus, Device, Disk, MachineDisk, MachineNet, Net, chosen_mac};
use crate::channels;
use crate::cpu_time::{Budget, Promises};
use crate::description::{
    self, Board, Console, Cpus, Description, Log, OnReset, Restart, ServerKind, Size,
};
use crate::failure::{self, Failure};
use crate::guest;
use crate::problem::{Problem, Report};
use crate::rootfs;
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

/// Name of the console server that is added when a virtual machine uses COM1 and none is described.
const CONSOLE_NAME: &str = "console";
/// Program of a console server.
const CONSOLE_BINARY: &str = "console";
/// Programs of a disk server and of a switch.
const DISK_BINARY: &str = "disk";
const NET_BINARY: &str = "net";
/// Program of a VMM.
const VMM_BINARY: &str = "vmm";
/// Kernel command line where none is given.
const DEFAULT_COMMAND_LINE: &str = "console=ttyS0";
const DEFAULT_PRIORITY: u8 = 10;
/// Servers go before their clients, or a busy client could starve its own console.
const DEFAULT_SERVER_PRIORITY: u8 = 40;

/// Memory for the kernel with its objects, `root` and the servers, in bytes.
const FIXED_MEMORY: u64 = 16 << 20;
/// Memory beyond its own that a virtual machine needs: VMM and kernel objects, in bytes.
const PER_VM_MEMORY: u64 = 1 << 20;
/// Nested page tables take 8 bytes for each 4 KiB page at worst, and as much again for the mapping database.
const PAGE_TABLE_SHIFT: u32 = 8;
/// Assumed length of the boot files of a virtual machine whose kernel was not fetched yet, in bytes.
const UNFETCHED_FILES: u64 = 20 << 20;
/// Assumed length of a micro-guest that was not built yet, in bytes.
const MICRO_FILES: u64 = 1 << 20;
/// What the name of a micro-guest follows.
const MICRO_PREFIX: &str = "micro:";
/// An emulated machine's memory is a multiple of this, in bytes.
const MEMORY_STEP: u64 = 64 << 20;
/// QEMU's limit for the q35 board with default settings.
const MAX_CPUS: u32 = 288;
/// Guest memory is mapped in large pages and given in multiples of this, in bytes.
const GUEST_MEMORY_STEP: u64 = 1 << 20;

/// What the command line changes in a description.
#[derive(Clone, Copy, Debug, Default)]
pub struct Overrides {
    /// CPUs of the machine.
    pub cpus: Option<u32>,
    /// Memory of the machine in bytes.
    pub memory: Option<Size>,
}

/// A checked description.
#[derive(Debug)]
pub struct Plan {
    /// The machine.
    pub board: Board,
    /// Where the kernel's log goes.
    pub log: Log,
    /// Parador's CPUs; `None`: not known (board `pc`).
    pub cpus: Option<u32>,
    /// Memory that was asked for, in bytes.
    memory: Option<(Size, Option<Range<usize>>)>,
    share_cpus: bool,
    /// The emulated machine has an IOMMU.
    pub iommu: bool,
    /// Files for the RAM disk that is made from busybox.
    pub files: Vec<PathBuf>,
    /// Servers, in the order of their indices.
    pub servers: Vec<Server>,
    /// Native programs.
    pub tasks: Vec<Task>,
    /// Virtual machines.
    pub vms: Vec<Vm>,
    /// Channels between them.
    pub channels: Vec<compiled::Channel>,
    /// Disks of the emulated machine.
    pub disks: Vec<MachineDisk>,
    /// Network cards of the emulated machine.
    pub nets: Vec<MachineNet>,
    source: Source,
}

#[derive(Debug)]
struct Source {
    file: String,
    text: String,
}

/// A checked server.
#[derive(Debug)]
pub struct Server {
    /// Its name.
    pub name: String,
    /// What it serves.
    pub kind: ServerKind,
    /// It has several clients.
    pub shared: bool,
    /// What it owns.
    pub device: Option<Device>,
    /// Its program, if it is not the usual one.
    program: Option<Spanned<String>>,
    /// Which ends start it again.
    pub restart: Restart,
    /// 0 to [`compiled::MAX_PRIORITY`].
    pub priority: u8,
    /// Its CPU time, if it has a budget.
    pub cpu_time: Option<compiled::CpuTime>,
}

impl Server {
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

/// A checked native program.
#[derive(Debug)]
pub struct Task {
    /// Its name.
    pub name: String,
    binary: Spanned<String>,
    arguments: Vec<String>,
    cpu: u32,
    /// 0 to [`compiled::MAX_PRIORITY`].
    pub priority: u8,
    /// Its CPU time, if it has a budget.
    pub cpu_time: Option<compiled::CpuTime>,
    essential: bool,
    /// Index of its console server.
    pub console: Option<u8>,
    /// It has root's management gate.
    pub manage: bool,
}

/// A checked virtual machine.
#[derive(Debug)]
pub struct Vm {
    /// Its name.
    pub name: String,
    /// Guest memory.
    memory: Spanned<Size>,
    vcpus: u32,
    pins: Vec<u32>,
    /// Where its kernel comes from.
    pub kernel: Spanned<KernelSource>,
    /// Where its initial RAM disk comes from.
    pub initrd: Option<Spanned<InitrdSource>>,
    command_line: String,
    /// Index of its console server.
    pub console: Option<u8>,
    /// Another VMM than [`VMM_BINARY`].
    vmm: Option<Spanned<String>>,
    /// 0 to [`compiled::MAX_PRIORITY`].
    pub priority: u8,
    /// Its CPU time, if it has a budget.
    pub cpu_time: Option<compiled::CpuTime>,
    /// Which ends start it again.
    pub restart: Restart,
    on_reset: OnReset,
    kvmclock: bool,
    virtio_console: bool,
    essential: bool,
    /// Virtual machines are made after it at run time.
    pub template: bool,
    /// Its disks, each with the index of its server.
    pub disks: Vec<compiled::VmDisk>,
    /// Its network cards, each with the index of its switch.
    pub nets: Vec<compiled::VmNet>,
}

/// Where a kernel comes from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum KernelSource {
    /// Debian's cloud kernel, fetched with apt.
    Debian,
    /// A micro-guest of the build, the name of its file.
    Micro(String),
    /// A file.
    File(PathBuf),
}

/// Where an initial RAM disk comes from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum InitrdSource {
    /// Made from busybox.
    Busybox,
    /// A file.
    File(PathBuf),
}

/// Files of a virtual machine, as found or made.
#[derive(Clone, Debug)]
pub struct VmFiles {
    /// The kernel.
    pub kernel: PathBuf,
    /// The initial RAM disk.
    pub initrd: Option<PathBuf>,
}

/// Reads and checks the description in `file`.
pub fn check(file: &Path, overrides: Overrides) -> Result<Plan, Failure> {
    let text = fs::read_to_string(file).map_err(|error| match error.kind() {
        std::io::ErrorKind::InvalidData => {
            Failure::new(failure::BAD_CONFIG, format!("{} is not UTF-8 text", file.display()))
        }
        _ => Failure::file("read", file, &error),
    })?;
    let source = Source { file: file.display().to_string(), text };
    let description = match description::parse(&source.text) {
        Ok(description) => description,
        Err(problem) => return Err(source.refuse(vec![problem])),
    };
    let folder = file.parent().unwrap_or(Path::new(""));
    let mut checker = Checker { problems: Vec::new(), folder };
    let plan = checker.plan(description, overrides, source);
    if checker.problems.is_empty() { Ok(plan) } else { Err(plan.source.refuse(checker.problems)) }
}

impl Source {
    fn refuse(&self, problems: Vec<Problem>) -> Failure {
        Failure::Description(Report { file: self.file.clone(), text: self.text.clone(), problems })
    }
}

/// Collects problems while the plan is made; where something is refused, a stand-in lets the rest be judged.
struct Checker<'a> {
    problems: Vec<Problem>,
    folder: &'a Path,
}

impl Checker<'_> {
    fn plan(&mut self, description: Description, overrides: Overrides, source: Source) -> Plan {
        let Description { system, server, task, vm, channel } = description;
        let system_span = system.span();
        let system = system.into_inner();
        self.limit("virtual machines", vm.len(), compiled::MAX_VMS, &vm);
        self.limit("tasks", task.len(), compiled::MAX_TASKS, &task);
        self.limit("servers", server.len(), compiled::MAX_SERVERS, &server);
        if vm.is_empty() && task.is_empty() {
            let problem = Problem::new(system_span, "the system has nothing to run");
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
        let console = servers.iter().position(|server| server.device == Some(Device::Com1));
        let console = console.map(|index| index as u8);
        let tasks: Vec<Task> = task
            .into_iter()
            .map(|task| self.task(task.into_inner(), &mut names, console))
            .collect();
        // What is made after a template at run time shares CPUs with others.
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
                Vm { disks, nets, ..self.vm(vm, &mut names, console) }
            })
            .collect();

        let described = system.cpus.as_ref().map(|cpus| (*cpus.get_ref(), Some(cpus.span())));
        let cpus = match overrides.cpus.map(|cpus| (cpus, None)).or(described) {
            Some((cpus, span)) => {
                if cpus == 0 || cpus > MAX_CPUS {
                    let message = format!("a machine has 1 to {MAX_CPUS} CPUs, not {cpus}");
                    self.problems.push(Problem { span, ..Problem::new(0..0, message) });
                }
                Some(cpus)
            }
            None if system.board == Board::Pc => None,
            None => Some(least_cpus(&requests, &tasks, system.share_cpus)),
        };
        self.cpus(&requests, &tasks, cpus, system.share_cpus);

        let described = system.memory.as_ref().map(|size| (*size.get_ref(), Some(size.span())));
        let plan = Plan {
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
        self.promises(&plan);
        let files = plan.visible_files();
        plan.file_problems(&files, &mut self.problems);
        plan
    }

    fn limit<T>(&mut self, what: &str, count: usize, most: usize, items: &[Spanned<T>]) {
        if count > most {
            let message = format!("{count} {what}, but a system has at most {most}");
            self.problems.push(Problem::new(items[most].span(), message));
        }
    }

    fn servers(
        &mut self,
        described: Vec<Spanned<description::Server>>,
        consoles: &[Client],
        log: Log,
        machine: Option<(&[MachineDisk], &[MachineNet])>,
    ) -> Vec<Server> {
        let shared = consoles.iter().any(|client| client.shares);
        let mut names = Names::new("server");
        let mut servers: Vec<Server> = Vec::new();
        for server in described {
            let server = server.into_inner();
            names.add(&server.name, &mut self.problems);
            let device = self.device(&server);
            if let (Some(device), Some(written)) = (device, &server.device) {
                let owner = servers
                    .iter()
                    .find(|other| other.device.is_some_and(|other| other.overlaps(device)));
                if let Some(owner) = owner {
                    let message = format!("{device} belongs to server `{}` already", owner.name);
                    let problem = Problem::new(written.span(), message);
                    self.problems.push(
                        problem.help("a device has one owner; remove one of the two servers"),
                    );
                }
                if device == Device::Com1 && log == Log::Com1 {
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
            servers.push(Server {
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
            servers.push(Server {
                name: CONSOLE_NAME.to_owned(),
                kind: ServerKind::Console,
                shared,
                device: Some(Device::Com1),
                program: None,
                restart: Restart::OnCrash,
                priority: DEFAULT_SERVER_PRIORITY,
                cpu_time: None,
            });
        }
        servers
    }

    /// Who uses the console: one client alone, or several that all know of each other.
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
            let message = format!("com1 is the console of `{}` already", other.name);
            let problem = Problem::new(client.span.clone(), message);
            self.problems.push(problem.help(
                "let all of them share it with console = \"mux\", or give all but one \"none\"",
            ));
        }
        clients
    }

    fn task(&mut self, task: description::Task, names: &mut Names, console: Option<u8>) -> Task {
        names.add(&task.name, &mut self.problems);
        self.binary(&task.binary);
        if let Some(argument) = task.args.get(compiled::MAX_ARGUMENTS) {
            let message = format!("a task has at most {} arguments", compiled::MAX_ARGUMENTS);
            self.problems.push(Problem::new(argument.span(), message));
        }
        let cpu = task.cpu.unwrap_or_default();
        Task {
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
            let message = format!("`{}` is no program of the build", name.get_ref());
            let problem = Problem::new(name.span(), message);
            self.problems.push(problem.help("name it without a folder, as in \"check-hostile\""));
        }
    }

    fn vm(&mut self, vm: description::Vm, names: &mut Names, console: Option<u8>) -> Vm {
        names.add(&vm.name, &mut self.problems);
        let Size(memory) = *vm.memory.get_ref();
        if memory == 0 || memory % GUEST_MEMORY_STEP != 0 {
            let message = format!("guest memory is a multiple of {}", Size(GUEST_MEMORY_STEP));
            self.problems.push(Problem::new(vm.memory.span(), message));
        }
        let request = CpuRequest::of(&vm);
        if request.vcpus == 0 || request.vcpus as usize > compiled::MAX_VCPUS {
            let message = format!(
                "a virtual machine has 1 to {} vCPUs, not {}",
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
        Vm {
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
                "the kernel command line has {} bytes; Linux takes {}",
                line.len(),
                compiled::MAX_COMMAND_LINE
            );
            self.problems.push(Problem::new(text.span(), message));
        }
        if line.contains(|character: char| character.is_control()) {
            let message = "the kernel command line is one line without control characters";
            self.problems.push(Problem::new(text.span(), message));
        }
    }

    fn priority(&mut self, given: Option<Spanned<u32>>, default: u8) -> u8 {
        let Some(given) = given else { return default };
        match u8::try_from(*given.get_ref()) {
            Ok(priority) if priority <= compiled::MAX_PRIORITY => priority,
            _ => {
                let message = format!("priorities are 0 to {} (first)", compiled::MAX_PRIORITY);
                self.problems.push(Problem::new(given.span(), message));
                default
            }
        }
    }

    fn cpu_time(&mut self, given: Option<&Budget>) -> Option<compiled::CpuTime> {
        given?.check(&mut self.problems)
    }

    /// Adds up what is promised of each CPU, as root places it.
    fn promises(&mut self, plan: &Plan) {
        let mut promises = Promises::default();
        for server in &plan.servers {
            promises.add(0, &server.name, server.cpu_time);
        }
        for task in &plan.tasks {
            promises.add(task.cpu, &task.name, task.cpu_time);
        }
        for (index, vm) in plan.vms.iter().enumerate().filter(|(_, vm)| !vm.template) {
            let count = plan.cpus.unwrap_or(MAX_CPUS).max(1);
            for vcpu in 0..vm.vcpus {
                let chosen = (index as u32 + vcpu) % count;
                let cpu = vm.pins.get(vcpu as usize).copied().unwrap_or(chosen);
                promises.add(cpu, &vm.name, vm.cpu_time);
            }
        }
        promises.check(&mut self.problems);
    }

    fn cpus(&mut self, requests: &[CpuRequest], tasks: &[Task], cpus: Option<u32>, share: bool) {
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
                    let message = format!("CPU {cpu} belongs to `{other}` already");
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

/// What was attached to servers so far.
#[derive(Default)]
struct Attached {
    /// Disks, with the virtual machine that has it.
    disks: Vec<(String, Disk)>,
    macs: Vec<proto::net::Mac>,
    /// Sessions of each server.
    sessions: HashMap<u8, usize>,
}

/// Disks, network cards and the servers behind them.
impl Checker<'_> {
    fn parsed<T>(
        &mut self,
        text: &Spanned<String>,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<T> {
        let parsed = parse(text.get_ref());
        parsed.map_err(|message| self.problems.push(Problem::new(text.span(), message))).ok()
    }

    fn machine_disks(&mut self, written: &[Spanned<String>]) -> Vec<MachineDisk> {
        let folder = self.folder;
        let mut disks = Vec::new();
        for text in written {
            let Some(disk) = self.parsed(text, |text| MachineDisk::parse(text, folder)) else {
                continue;
            };
            disks.push(disk);
        }
        disks
    }

    fn machine_nets(&mut self, written: &[Spanned<String>]) -> Vec<MachineNet> {
        written.iter().filter_map(|text| self.parsed(text, MachineNet::parse)).collect()
    }

    /// Files for the RAM disk, which has them in one folder.
    fn guest_files(&mut self, written: &[Spanned<String>]) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = Vec::new();
        for text in written {
            let path = self.folder.join(text.get_ref());
            if let Err(error) = file_length(&path) {
                self.problems.push(unreadable(text.span(), "file", &path, &error));
            } else if files.iter().any(|other| other.file_name() == path.file_name()) {
                let message = format!("another file has the name of {}", path.display());
                let help = "guests find them all in /root; rename one";
                self.problems.push(Problem::new(text.span(), message).help(help));
            }
            files.push(path);
        }
        files
    }

    /// The device of a server, if it is one that such a server can drive.
    fn device(&mut self, server: &description::Server) -> Option<Device> {
        let Some(written) = &server.device else {
            if server.kind != ServerKind::Switch {
                let message = format!("server `{}` has no device", server.name.get_ref());
                let problem = Problem::new(server.name.span(), message);
                self.problems.push(problem.help(device_help(server.kind)));
            }
            return None;
        };
        let device = self.parsed(written, Device::parse)?;
        let fits = match server.kind {
            ServerKind::Console => device == Device::Com1,
            ServerKind::Block => matches!(device, Device::VirtioBlk(_) | Device::Ahci(..)),
            ServerKind::Switch => matches!(device, Device::VirtioNet(_)),
        };
        if !fits {
            let message = format!("server `{}` cannot drive {device}", server.name.get_ref());
            let problem = Problem::new(written.span(), message);
            self.problems.push(problem.help(device_help(server.kind)));
        }
        Some(device)
    }

    /// Checks that lists of ports name virtual machines, and all that are connected.
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
                    let message = format!("there is no virtual machine `{}`", port.get_ref());
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
                        "`{}` is no port of switch `{}`",
                        vm.name.get_ref(),
                        server.name.get_ref()
                    );
                    let problem = Problem::new(net.span(), message);
                    self.problems.push(problem.help("add it to the switch's `ports`"));
                }
            }
        }
    }

    /// Index of the server of that name and kind.
    fn server_of(
        &mut self,
        name: &str,
        kind: ServerKind,
        span: Range<usize>,
        servers: &[Server],
        attached: &mut Attached,
    ) -> Option<u8> {
        let what = match kind {
            ServerKind::Console => "console",
            ServerKind::Block => "disk server",
            ServerKind::Switch => "switch",
        };
        let found = servers.iter().position(|server| server.name == name);
        let Some(index) = found.filter(|&index| servers[index].kind == kind) else {
            let message = format!("there is no {what} `{name}`");
            let kind = if kind == ServerKind::Block { "block" } else { "switch" };
            let help = format!("add a [[server]] with name = \"{name}\" and kind = \"{kind}\"");
            self.problems.push(Problem::new(span, message).help(help));
            return None;
        };
        let index = index as u8;
        let sessions = attached.sessions.entry(index).or_default();
        *sessions += 1;
        if *sessions == MAX_SESSIONS + 1 {
            let message = format!("{what} `{name}` has more than {MAX_SESSIONS} clients");
            self.problems.push(Problem::new(span, message).help("add a second server"));
        }
        Some(index)
    }

    fn disks(
        &mut self,
        vm: &description::Vm,
        servers: &[Server],
        attached: &mut Attached,
    ) -> Vec<compiled::VmDisk> {
        let mut disks = Vec::new();
        if let (Some(text), true) = (vm.disk.first().or(vm.net.first()), vm.template) {
            let message = "what is made after a template has neither disks nor network cards";
            self.problems.push(Problem::new(text.span(), message));
        }
        if let Some(text) = vm.disk.get(compiled::MAX_VM_DISKS) {
            let message = format!("a virtual machine has at most {} disks", compiled::MAX_VM_DISKS);
            self.problems.push(Problem::new(text.span(), message));
        }
        for text in &vm.disk {
            let Some(disk) = self.parsed(text, Disk::parse) else { continue };
            let kind = ServerKind::Block;
            let Some(server) = self.server_of(&disk.server, kind, text.span(), servers, attached)
            else {
                continue;
            };
            if let Some((other, _)) = attached.disks.iter().find(|(_, other)| disk.conflicts(other))
            {
                let message = format!("`{other}` has these sectors already");
                let problem = Problem::new(text.span(), message);
                self.problems
                    .push(problem.help("what is shared is read-only for all: add `,ro` to each"));
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
        servers: &[Server],
        attached: &mut Attached,
    ) -> Vec<compiled::VmNet> {
        let mut nets = Vec::new();
        if let Some(text) = vm.net.get(compiled::MAX_VM_NETS) {
            let most = compiled::MAX_VM_NETS;
            let message = format!("a virtual machine has at most {most} network cards");
            self.problems.push(Problem::new(text.span(), message));
        }
        for (card, text) in vm.net.iter().enumerate() {
            let Some(net) = self.parsed(text, Net::parse) else { continue };
            let kind = ServerKind::Switch;
            let Some(server) = self.server_of(&net.server, kind, text.span(), servers, attached)
            else {
                continue;
            };
            let mac = net.mac.unwrap_or(chosen_mac(index, card));
            if attached.macs.contains(&mac) {
                let problem = Problem::new(text.span(), "another network card has this address");
                self.problems.push(problem.help("choose another one, or leave `mac` out"));
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

/// What to do if the emulated machine lacks a device.
fn missing_device(
    device: Device,
    (disks, nets): (&[MachineDisk], &[MachineNet]),
) -> Option<&'static str> {
    let on = |bus| disks.iter().filter(|disk| disk.bus == bus).count();
    let (there, help) = match device {
        Device::Com1 => (true, ""),
        Device::VirtioBlk(index) => {
            (usize::from(index) < on(Bus::Virtio), "add [system] disk = [\"disk.img\"]")
        }
        // The board has one controller; its disks are at the first ports.
        Device::Ahci(index, port) => (
            index == 0 && usize::from(port.unwrap_or(0)) < on(Bus::Ahci),
            "add [system] disk = [\"disk.img,bus=ahci\"]; the board has one controller",
        ),
        Device::VirtioNet(index) => {
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
    Problem::new(span, "com1 belongs to the kernel's log already")
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

/// What a virtual machine asks of the machine's CPUs.
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

/// CPUs of an emulated machine for which none are given.
fn least_cpus(requests: &[CpuRequest], tasks: &[Task], share: bool) -> u32 {
    let vcpus = requests.iter().map(|request| request.vcpus);
    let together = if share { vcpus.max() } else { vcpus.reduce(u32::saturating_add) };
    let pins = requests.iter().flat_map(|request| &request.pins).map(|pin| *pin.get_ref());
    let named = pins.chain(tasks.iter().map(|task| task.cpu)).max();
    let least = together.unwrap_or(1).max(named.map_or(1, |cpu| cpu.saturating_add(1)));
    least.clamp(1, MAX_CPUS)
}

/// Names of one kind, with the line of the first use.
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
            let message = format!("`{text}` is not a name");
            problems.push(Problem::new(name.span(), message).help(format!(
                "names have 1 to {} characters of a-z, 0-9 and -",
                compiled::MAX_NAME
            )));
        }
        if self.known.contains(text) {
            let message = format!("there is a {} `{text}` already", self.kind);
            problems.push(Problem::new(name.span(), message).help("choose another name"));
        }
        self.known.push(text.clone());
    }
}

fn is_name(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=compiled::MAX_NAME).contains(&text.len()) && text.bytes().all(allowed)
}

impl Plan {
    /// The kernel's command line.
    pub fn kernel_command_line(&self) -> String {
        let log = match self.log {
            Log::Com1 => "com1",
            Log::Com2 => "com2",
            Log::None => "none",
        };
        // After a panic an emulated machine ends, a real one halts with the message on its screen.
        let panic = match self.board {
            Board::QemuQ35 => "debug-exit",
            Board::Pc => "halt",
        };
        format!("log={log} panic={panic}")
    }

    /// Who shares the console, in the order of their numbers there, from 1; nobody if one has it alone.
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

    /// Programs of the build that the system needs beside the kernel and `root`: name and place in
    /// the description, if it is named there.
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

    /// Checks that the programs that the description names are in the folder `programs`.
    pub fn check_programs(&self, programs: &Path) -> Result<(), Failure> {
        let missing = |name: &str| !programs.join(name).is_file();
        let problems: Vec<Problem> = self
            .binaries()
            .into_iter()
            .filter_map(|(name, span)| Some((name, span.filter(|_| missing(name))?)))
            .map(|(name, span)| {
                let message = format!("no program `{name}` in {}", programs.display());
                Problem::missing(span, message)
                    .help("correct the name, or build the program: `cargo xtask build`")
            })
            .collect();
        if problems.is_empty() { Ok(()) } else { Err(self.source.refuse(problems)) }
    }

    /// Files that are there without fetching or making anything.
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

    /// Checks all files of all virtual machines, and the memory for them.
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
                    "{given} of memory is too little: guests take {}, boot files {}, Parador {}",
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

    /// Least memory of a machine for this system, in bytes, with boot files of the given length.
    fn memory_needed(&self, boot_files: u64) -> u64 {
        let guests = self.guest_memory();
        let disks = self.vms.iter().map(|vm| vm.disks.len()).sum::<usize>() as u64;
        let nets = self.vms.iter().map(|vm| vm.nets.len()).sum::<usize>() as u64;
        let sessions = disks * proto::disk::SESSION_BYTES + nets * proto::net::SESSION_BYTES;
        let channels: u64 = self.channels.iter().map(|channel| u64::from(channel.size)).sum();
        let fixed = FIXED_MEMORY + PER_VM_MEMORY * self.vms.len() as u64 + sessions + channels;
        guests.saturating_add(guests >> PAGE_TABLE_SHIFT).saturating_add(fixed + boot_files)
    }

    /// Memory of an emulated machine in bytes: as asked for, or with some to spare.
    pub fn machine_memory(&self, boot_files: u64) -> u64 {
        match &self.memory {
            Some((size, _)) => size.0,
            None => self
                .memory_needed(boot_files)
                .saturating_add(MEMORY_STEP / 2)
                .next_multiple_of(MEMORY_STEP),
        }
    }

    /// The description as `root` reads it. Names of kernels and RAM disks in the bundle are given
    /// in the order of `vms`.
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
                Some(Device::Com1) => compiled::Device::Serial(compiled::SerialPort::Com1),
                Some(Device::VirtioBlk(index)) => {
                    compiled::Device::Pci(compiled::PciClass::VirtioBlk, index)
                }
                Some(Device::VirtioNet(index)) => {
                    compiled::Device::Pci(compiled::PciClass::VirtioNet, index)
                }
                Some(Device::Ahci(index, port)) => {
                    compiled::Device::Pci(compiled::PciClass::Ahci(port), index)
                }
            },
            binary: server.binary(),
            priority: server.priority,
            cpu_time: server.cpu_time,
            restart: compile_restart(server.restart),
        });
        let tasks = self.tasks.iter().map(|task| compiled::Task {
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
        // Strings dominate; 64 KiB hold sixteen virtual machines with the longest command lines.
        let mut buffer = vec![0; 64 << 10];
        match system.encode(&mut buffer) {
            Ok(bytes) => Ok(bytes.to_vec()),
            Err(_) => Err(Failure::new(
                failure::BAD_CONFIG,
                "the texts in the description are too long: more than 64 KiB together",
            )
            .help("shorten the arguments of tasks")),
        }
    }
}

impl Vm {
    /// Name of its VMM's program.
    pub fn binary(&self) -> &str {
        self.vmm.as_ref().map_or(VMM_BINARY, |vmm| vmm.get_ref().as_str())
    }

    /// What it has of the machine, for people.
    pub fn cpus_and_memory(&self) -> String {
        format!("{}, {}", plural(self.vcpus, "vCPU"), self.memory.get_ref())
    }

    /// Whether it is a client of the server with this index.
    fn uses(&self, server: u8) -> bool {
        self.console == Some(server)
            || self.disks.iter().any(|disk| disk.server == server)
            || self.nets.iter().any(|net| net.server == server)
    }

    /// Returns the kernel's length.
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
                    "give a whole bzImage for x86-64 (vmlinuz), a PVH or Multiboot kernel, or \"debian\"",
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
            "{} of memory is too little for the kernel of `{}`",
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
        .unwrap_or_else(|| "paths start at the folder of this description".to_owned());
    Problem::missing(span, message).code(failure::code_of(error)).help(help)
}

/// Length of a regular file that can be read.
fn file_length(path: &Path) -> std::io::Result<u64> {
    let metadata = fs::File::open(path)?.metadata()?;
    if metadata.is_file() {
        Ok(metadata.len())
    } else {
        Err(std::io::ErrorKind::IsADirectory.into())
    }
}

/// What [`check`] proved, for people.
impl fmt::Display for Plan {
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
            "  parts    {}, {}, {}: names unique, nothing dangling",
            count(self.vms.len(), "virtual machine"),
            count(self.tasks.len(), "task"),
            count(self.servers.len(), "server"),
        )?;
        let vcpus = self.vms.iter().filter(|vm| !vm.template).map(|vm| vm.vcpus).sum();
        match self.cpus {
            None => writeln!(
                f,
                "  CPUs     {}; the machine's number is not known",
                plural(vcpus, "vCPU")
            )?,
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
                writeln!(f, "  memory   {guests} for guests; the machine's size is not known")?;
            }
            None => writeln!(f, "  memory   {guests} for guests; the machine is given enough")?,
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
                KernelSource::Debian => "Debian's kernel, checked when it is fetched".to_owned(),
                KernelSource::Micro(name) => format!("{name} of the build"),
                KernelSource::File(path) => format!("{} is whole", path.display()),
            };
            writeln!(f, "  {:<8} {}, {kernel}", vm.name, vm.memory.get_ref())?;
        }
        Ok(())
    }
}

//! `parador run`: runs a VM with KVM or as processes of this host.

use crate::api::ApiServer;
use crate::compat;
use crate::config::{
    Backend, Config, Log, OnExit, Optimisation, Protection, Sandbox, VmConfig, is_busybox,
    is_stdout,
};
use crate::console::{HostConsole, Target};
use crate::control::{Control, Supervisor};
use crate::debugger::{self, Debugger, GdbEndpoint, GuestKernel, Ram};
use crate::descriptors;
use crate::device;
use crate::disk::{self, Disk};
use crate::kvm;
use crate::net::{self, NetBackend};
use crate::orphans;
use crate::perf::Maps;
use crate::profile;
use crate::share::{self, Share};
use crate::vm_process::{self, ExitCause, SecondaryConsole, VmProcess};
use crate::vsock::Vsock;
use crate::wedge::{self, Wedge};
use clap::Args;
use command_fds::FdMapping;
use hosted_command::failure::{self, Failure};
use hosted_command::fetch;
use hosted_command::interrupt::Interruptible;
use hosted_command::messages::{self, Level, More, say};
use hosted_command::output::print;
use hosted_command::programs::Named;
use hosted_command::steps::Steps;
use hosted_kbuild::kernel::{self, UseLock};
use hosted_kbuild::refused;
use hosted_loader::{Error, Image, Prepared};
use hosted_system::initramfs;
use proto::hosted::{MAX_DISKS, MAX_NETS, MAX_SHARES, exit, layout, log, option};
use proto::system::MAX_VCPUS;
use rustix::event::{EventfdFlags, eventfd};
use rustix::process::Signal;
use signal_hook::consts::{SIGUSR1, SIGXFSZ};
use signal_hook::flag;
use signal_hook::low_level::pipe;
use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;
use vmm_mem::large::Large;

/// Page size.
const PAGE: u64 = 4096;
/// Default memory size in bytes.
const MEMORY: u64 = 1 << 30;
/// Smallest memory size in bytes that a kernel boots with.
const MIN_MEMORY: u64 = 64 << 20;
/// Kernel command line of KVM guests, after the consoles.
const KVM_COMMAND_LINE: &str = "panic=-1";
/// Kernel command line of process guests, between the consoles and the user's text.
/// `mitigations=off`: they defend the kernel against user mode on a physical CPU that the guest
/// does not own. `transparent_hugepage=always`: a large page of user mode costs one fault and one
/// mapping of the host (Linux needs 512 MiB or more for it).
pub const COMMAND_LINE: &str = "panic=-1 mitigations=off transparent_hugepage=always";

/// Longest command line in bytes: Linux truncates it (`COMMAND_LINE_SIZE`, terminating zero
/// included).
const MAX_COMMAND_LINE: usize = 2047;
/// Added to the command line where the host has no 32-bit user mode.
const NO_COMPAT: &str = "ia32_emulation=off";

/// Name of the serial line in messages.
const SERIAL: &str = "the serial line";
/// Help on the terminal keys.
const KEYS: &str = "Ctrl-A X kills the VM; all other keys go to the guest";

/// Command line of `parador run`.
#[derive(Debug, Args)]
pub struct Options {
    /// Kernel: `vmlinux` of `parador kernel build`; with KVM also a bzImage, PVH or Multiboot
    /// kernel. [default: the cached kernel of `parador kernel build`]
    #[arg(value_name = "KERNEL", conflicts_with = "kernel")]
    positional: Option<PathBuf>,
    /// VM configuration (TOML) with the keys of these options. Options override it; each `-d` adds
    /// a disk.
    #[arg(long = "config", value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    config: Config,
    /// Print the merged configuration as TOML and exit.
    #[arg(long)]
    dump_config: bool,
    /// Validate everything without starting the VM.
    #[arg(long)]
    dry_run: bool,
    /// Print errors and guest output only.
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    programs: Named,
}

impl Options {
    /// Merges the options into the configuration file.
    fn merged(&self) -> Result<Config, Failure> {
        let mut over = self.config.clone();
        over.vm.kernel = over.vm.kernel.or_else(|| self.positional.clone());
        match &self.file {
            Some(file) => Config::read(file)?.merge(&over),
            None => Ok(over),
        }
    }
}

/// Decides whether protection keys isolate the guest kernel from guest user mode. Returns the
/// reason, too, if they are wanted but unavailable.
fn use_protection_keys(vm: &VmConfig) -> Result<(bool, Option<&'static str>), Failure> {
    let lacking = if vm.profile_writes.is_some() {
        Some("`--profile-writes` changes the access rights of kernel memory")
    } else if vm.without.contains(&Optimisation::Functions) {
        Some("`--without functions` lets the kernel modify its code unnoticed")
    } else if !hosted_loader::has_keys() {
        Some("the host has no protection keys (PKU)")
    } else {
        None
    };
    let apart = vm.protection == Some(Protection::Process);
    if apart && (vm.profile_writes.is_some() || vm.without.contains(&Optimisation::InProcess)) {
        let text = "--protection process conflicts with --profile-writes and --without in-process";
        return Err(Failure::new(failure::USAGE, text).help("remove one of the options"));
    }
    match (vm.protection.unwrap_or_default(), lacking) {
        (Protection::None | Protection::Process | Protection::Remap, _) => Ok((false, None)),
        (Protection::Auto, lacking) => Ok((lacking.is_none(), lacking)),
        (Protection::Keys, None) => Ok((true, None)),
        (Protection::Keys, Some(why)) => {
            let text = format!("cannot isolate the guest kernel from guest user mode: {why}");
            let failure = Failure::new(failure::UNAVAILABLE, text);
            let help = "`--protection process` isolates it on any host, slowly; `--protection none` if guest user mode is trusted";
            Err(failure.help(help))
        }
    }
}

/// Returns the bits of [`option`] for the wedge.
fn option_bits(vm: &VmConfig) -> u64 {
    let counters = if vm.counters { option::COUNTERS } else { 0 };
    let debug = if vm.gdb.is_some() { option::DEBUG } else { 0 };
    let profile = if vm.profile_writes.is_some() { option::PROFILE } else { 0 };
    let sandbox = match vm.sandbox.unwrap_or_default() {
        Sandbox::On => option::SANDBOX,
        Sandbox::Off => 0,
        Sandbox::Strict => option::SANDBOX | option::STRICT,
    };
    let protection = match vm.protection.unwrap_or_default() {
        Protection::Auto | Protection::Keys | Protection::None => 0,
        // System calls switch to another process.
        Protection::Process => option::USER_PROCESS | option::NO_CALL_SITES,
        // Transitions in place would bypass the wedge, which maps and unmaps the kernel.
        Protection::Remap => option::REMAP | option::NO_FAST_PATHS | option::NO_CALL_SITES,
    };
    let all = counters | profile | debug | sandbox | protection;
    vm.without.iter().fold(all, |option_bits, optimisation| {
        option_bits
            | match optimisation {
                Optimisation::FastSites => option::NO_FAST_PATHS,
                Optimisation::CallSites => option::NO_CALL_SITES,
                Optimisation::Functions => option::NO_FUNCTIONS,
                Optimisation::Batches => option::NO_BATCHES,
                Optimisation::Spaces => option::ONE_SPACE,
                Optimisation::InProcess => option::TRACED,
            }
    })
}

/// Returns the connections of the serial line and of the virtio console, if there is one.
fn console_targets(vm: &VmConfig) -> Result<(Target, Option<Target>), Failure> {
    let second = vm.console.as_ref().and_then(|console| console.0.clone());
    let first = match (&vm.serial, &second) {
        (None, Some(Target::Stdio)) => Target::Null,
        (serial, _) => serial.clone().unwrap_or_default(),
    };
    let is_shared = !matches!(first, Target::Null | Target::Pty) && second.as_ref() == Some(&first);
    if is_shared {
        let text = "--serial and --console have the same target";
        let failure = Failure::new(failure::BAD_CONFIG, text);
        return Err(failure.help("use another target, such as --serial null"));
    }
    Ok((first, second))
}

/// Back end chosen for a kernel.
enum Runner<'a> {
    /// KVM: contents of the kernel file.
    Kvm(&'a [u8]),
    /// Processes: the parsed kernel.
    Process(Box<Image<'a>>),
}

/// VM that can be started: descriptors for its first process, without those of its devices.
struct Ready {
    prepared: Prepared,
    /// Descriptors of the KVM back end.
    more: Vec<(OwnedFd, u32)>,
}

/// Chooses the back end. An explicit request is never replaced by another back end.
fn runner<'a>(config: &Config, bytes: &'a [u8], kernel: &Path) -> Result<Runner<'a>, Failure> {
    let vm = &config.vm;
    // Options that only the process back end has count as a request for it.
    let for_processes = vm.counters
        || vm.profile_writes.is_some()
        || vm.perf_map
        || !vm.without.is_empty()
        || matches!(
            vm.protection,
            Some(Protection::Keys | Protection::Process | Protection::Remap)
        );
    let parse = || Image::parse(bytes);
    Ok(match vm.backend.unwrap_or_default() {
        Backend::Kvm if for_processes => {
            let text = "--counters, --perf-map, --profile-writes, --protection keys|process|remap and --without require --backend process";
            return Err(Failure::new(failure::USAGE, text).help("remove --backend kvm"));
        }
        Backend::Kvm => match kvm::trial() {
            Ok(()) => Runner::Kvm(bytes),
            Err(why) => {
                let text = format!("KVM is not usable: {why}");
                let failure = Failure::new(failure::UNAVAILABLE, text);
                return Err(failure
                    .help("--backend process runs kernels of `parador kernel build` without KVM"));
            }
        },
        Backend::Auto if !for_processes => match kvm::trial() {
            Ok(()) => Runner::Kvm(bytes),
            Err(why) => match parse() {
                Ok(image) => Runner::Process(Box::new(image)),
                Err(Error::Kernel(..)) if vmm_boot::Kernel::detect(bytes).is_ok() => {
                    let kernel = kernel.display();
                    let text =
                        format!("{kernel} is not pre-virtualized, and KVM is not usable: {why}");
                    return Err(Failure::new(failure::UNAVAILABLE, text)
                        .help("`parador kernel build` builds a kernel that does not need KVM"));
                }
                Err(error) => return Err(refused(&error, kernel)),
            },
        },
        Backend::Auto | Backend::Process => {
            Runner::Process(Box::new(parse().map_err(|error| refused(&error, kernel))?))
        }
    })
}

/// Runs the VM to its end and returns the exit code.
pub fn run(options: &Options) -> Result<u8, Failure> {
    let config = options.merged()?;
    messages::set(config.vm.log_format.unwrap_or_default());
    messages::set_quiet(options.quiet);
    // The handlers turn exceeding RLIMIT_FSIZE into an error of the write, and make a SIGUSR1
    // without --metrics harmless.
    for signal in [SIGXFSZ, SIGUSR1] {
        flag::register(signal, Arc::default())
            .map_err(|error| Failure::os("install signal handlers", &error))?;
    }
    if options.dump_config {
        print(config.to_toml()?)?;
        return Ok(0);
    }
    orphans::adopt()?;
    let vm = &config.vm;
    let memory = vm.memory.map_or(MEMORY, |size| size.0);
    if memory < MIN_MEMORY || !memory.is_multiple_of(PAGE) {
        let text = format!("memory must be page-aligned and at least 64 MiB (got {memory} bytes)");
        return Err(Failure::new(failure::USAGE, text).help("use --memory 64M or more"));
    }
    let balloon = vm.balloon.unwrap_or_default().0.map(|size| size.0);
    if balloon.is_some_and(|bytes| bytes > memory - MIN_MEMORY) {
        let text = "--balloon leaves the guest less than 64 MiB";
        return Err(Failure::new(failure::USAGE, text).help("use --balloon on, or more --memory"));
    }
    let vcpus = vm.cpus.unwrap_or(1);
    if !(1..=MAX_VCPUS).contains(&vcpus.into()) {
        let text = format!("--cpus must be 1 to {MAX_VCPUS} (got {vcpus})");
        return Err(Failure::new(failure::BAD_CONFIG, text));
    }
    if vm.profile_writes.is_some() && vcpus != 1 {
        let text = "--profile-writes supports one virtual CPU only";
        return Err(Failure::new(failure::USAGE, text).help("remove --cpus"));
    }
    if vm.wait_boot && vm.api_socket.is_none() {
        let text = "--wait-boot requires --api-socket";
        return Err(Failure::new(failure::USAGE, text).help("add --api-socket PATH"));
    }
    // A cached kernel stays locked until the VM ends: a restart reads it again.
    let (kernel, _held) = kernel_file(vm.kernel.as_deref())?;
    let kernel = kernel.as_path();
    let disks = open_disks(&config.disk)?;
    let shares = open_shares(&config.share)?;
    let read = |path: &Path| fs::read(path).map_err(|error| Failure::file("read", path, &error));
    let bytes = read_large(kernel).map_err(|failure| {
        failure.help("`parador kernel build` builds a kernel for the process back end")
    })?;
    let runner = runner(&config, &bytes, kernel)?;
    let initrd = || match &vm.initrd {
        None => Ok(None),
        Some(path) if is_busybox(path) => busybox().map(Some),
        Some(path) => read(path).map(Some),
    };
    let (target, second) = console_targets(vm)?;
    let log = match vm.log.unwrap_or(if options.quiet { Log::Error } else { Log::default() }) {
        Log::Error => log::ERROR,
        Log::Warn => log::WARN,
        Log::Info => log::INFO,
    };
    let records: Vec<_> = disks.iter().map(|disk| disk.record).collect();
    let share_records: Vec<_> = shares.iter().map(|share| share.record).collect();
    let deadline = vm_process::deadline(vm.timeout.map(|time| time.0));
    let program = match runner {
        Runner::Kvm(_) => Program::Kvm,
        Runner::Process(_) => Program::Wedge(Wedge::find(&options.programs)?),
    };
    let (use_protection_keys, open) = match runner {
        Runner::Kvm(_) => (false, None),
        Runner::Process(_) => use_protection_keys(vm)?,
    };
    let compat = compat::is_there();
    let line = match runner {
        Runner::Kvm(_) => KVM_COMMAND_LINE.to_owned(),
        Runner::Process(_) if compat => COMMAND_LINE.to_owned(),
        Runner::Process(_) => format!("{COMMAND_LINE} {NO_COMPAT}"),
    };
    let compat = if compat { option::COMPAT } else { 0 };
    // The last console is the one of the first user process.
    let consoles = match (&target, &second) {
        (_, None) => "console=ttyS0",
        (Target::Null, Some(_)) => "console=hvc0",
        (_, Some(_)) => "console=ttyS0 console=hvc0",
    };
    let line = match &vm.cmdline {
        Some(more) => format!("{consoles} {line} {more}"),
        None => format!("{consoles} {line}"),
    };
    if matches!(runner, Runner::Process(_)) && line.len() > MAX_COMMAND_LINE {
        let text =
            format!("the kernel command line has {} bytes (limit {MAX_COMMAND_LINE})", line.len());
        return Err(Failure::new(failure::BAD_CONFIG, text)
            .help("shorten --cmdline; move settings to a script on a disk or --share"));
    }
    let prepare = |runner: &Runner<'_>| {
        let mut nets = open_nets(&config.net)?;
        let net_records: Vec<_> = nets.iter().map(|net| net.record).collect();
        let initrd = initrd()?;
        let ready = match runner {
            Runner::Process(image) => {
                let machine = hosted_loader::VmSpec {
                    memory,
                    vcpus,
                    initrd: initrd.as_deref(),
                    command_line: &line,
                    options: option_bits(vm)
                        | compat
                        | if use_protection_keys { option::KEYS } else { 0 },
                    log,
                    balloon,
                    disks: &records,
                    nets: &net_records,
                    shares: &share_records,
                    vsock: config.vsock.as_ref().map(|vsock| vsock.cid()),
                    console: second.is_some(),
                };
                let prepared = hosted_loader::prepare(image, &machine)
                    .map_err(|error| refused(&error, kernel))?;
                Ready { prepared, more: Vec::new() }
            }
            Runner::Kvm(bytes) => {
                let initrd = initrd.unwrap_or_default();
                kvm::check(kernel, bytes, initrd.len() as u64, memory)?;
                let machine = hosted_kvm::KvmConfig {
                    memory,
                    cpus: vcpus,
                    command_line: line.clone(),
                    log,
                    disks: records.iter().map(|record| record.to_words()).collect(),
                    nets: net_records.iter().map(|record| record.to_words()).collect(),
                    shares: share_records.iter().map(|record| record.to_words()).collect(),
                    vsock: config.vsock.as_ref().map(|vsock| vsock.cid()),
                    console: second.is_some(),
                    balloon,
                    sandbox: match vm.sandbox.unwrap_or_default() {
                        Sandbox::On => hosted_kvm::Sandbox::On,
                        Sandbox::Off => hosted_kvm::Sandbox::Off,
                        Sandbox::Strict => hosted_kvm::Sandbox::Strict,
                    },
                    debug: vm.gdb.is_some(),
                };
                let more = kvm::files(&machine, bytes, &initrd)?;
                let prepared =
                    hosted_loader::empty(memory).map_err(|error| refused(&error, kernel))?;
                Ready { prepared, more }
            }
        };
        nets.iter_mut().try_for_each(NetBackend::wait)?;
        Ok::<_, Failure>((ready, nets))
    };
    let (mut ready, mut nets) = prepare(&runner)?;
    let image = match &runner {
        Runner::Process(image) => Some(image),
        Runner::Kvm(_) => None,
    };
    let debugged = vm
        .gdb
        .as_ref()
        .map(|place| (place, image.map_or(GuestKernel::Kvm, |image| GuestKernel::new(image))));
    let maps = image.filter(|_| vm.perf_map).map(|image| Maps::new(image));
    let mut maps = maps.transpose()?;
    // The kernel is only needed again for a restart.
    drop(runner);
    drop(bytes);
    if options.dry_run {
        let how = match program {
            Program::Kvm => "run with KVM",
            Program::Wedge(_) => "run in processes of this host",
        };
        say(Level::Info, &format!("{} would {how}", kernel.display()));
        return Ok(0);
    }
    if let Some(why) = open {
        let text = format!(
            "the guest kernel is not isolated from guest user mode: {why} (`--protection process` isolates it, slowly)"
        );
        say(Level::Warn, &text);
    }
    let mut console = HostConsole::open(&target, SERIAL)?;
    let open = |target: &Target| HostConsole::open(target, "the virtio console");
    let mut second = second.as_ref().map(open).transpose()?;
    let vsock = config.vsock.as_ref().map(Vsock::open).transpose()?;
    let sink = vm.event_fd.map(event_sink).transpose()?;
    let metrics = vm.metrics.as_deref().map(metrics_sink).transpose()?;
    let (control, woken) = Control::new(config.clone(), memory, program.backend(), sink)?;
    if vm.wait_boot {
        control.created();
    }
    let socket = vm.api_socket.as_deref();
    let server = socket.map(|path| ApiServer::start(path, control.clone())).transpose()?;
    let debugger = debugged.map(|(place, kernel)| {
        let ram = Ram { low: ready.prepared.low, size: memory };
        Debugger::start(place, control.clone(), kernel, (vcpus, ram))
    });
    let debugger = debugger.transpose()?;
    let write_metrics = || {
        if let Some(mut file) = metrics.as_ref() {
            // Failing statistics do not end the VM.
            let line = serde_json::to_string(&control.statistics()).unwrap_or_default();
            let _ = writeln!(file, "{line}");
        }
    };
    let metrics_request = metrics.as_ref().map(|_| subscribe_sigusr1()).transpose()?;
    say(Level::Info, &format!("back end `{}`", program.backend()));
    if vm.wait_boot {
        let start = Instant::now();
        let metrics_request =
            metrics_request.as_ref().map(|pipe| (pipe, &write_metrics as &dyn Fn()));
        if let Some(end) = control.await_boot(&woken, deadline, metrics_request)? {
            let (code, text) = exit_status(&end, &program);
            report_exit(code, &text, start);
            control.ended(code, &text);
            write_metrics();
            drop((server, debugger));
            return Ok(code);
        }
    }
    loop {
        let Ready { prepared, more } = ready;
        let start = Instant::now();
        let shown = (clone(&prepared.memory)?, clone(&prepared.shared)?);
        let (ours, theirs) = UnixStream::pair()
            .and_then(|(ours, theirs)| ours.set_nonblocking(true).map(|()| (ours, theirs)))
            .map_err(|error| Failure::os("create a socket pair", &error))?;
        let doorbell = eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|error| Failure::os("create an eventfd", &error.into()))?;
        let devices = device::VmDescriptors {
            memory,
            descriptors: [prepared.memory.as_fd(), prepared.shared.as_fd(), doorbell.as_fd()],
        };
        let images = disks.iter().enumerate();
        let images = images.filter_map(|(queue, disk)| disk.start(&devices, queue));
        let served = (MAX_DISKS..).zip(&shares).map(|(queue, share)| share.start(&devices, queue));
        let mut served = images.chain(served).collect::<Result<Vec<_>, _>>()?;
        let mut descriptors = vec![
            (prepared.memory, layout::MEMORY_FD),
            (prepared.shared, layout::SHARED_FD),
            (doorbell, layout::DOORBELL_FD),
            (theirs.into(), layout::CONTROL_FD),
        ];
        let mut stream = None;
        if second.is_some() {
            let pair = UnixStream::pair();
            let (ours, theirs) =
                pair.map_err(|error| Failure::os("create a socket pair", &error))?;
            stream = Some(ours);
            descriptors.push((theirs.into(), layout::CONSOLE_FD));
        }
        if let Some(vsock) = &vsock {
            let (other, stream) = vsock.start()?;
            served.push(other);
            descriptors.push((stream, layout::NETS_FD + MAX_NETS as u32));
        }
        let numbered = disks.iter().zip(layout::DISKS_FD..);
        for (disk, number) in numbered.filter(|(disk, _)| !disk.record.is_external) {
            descriptors.push((clone(&disk.file)?, number));
        }
        // The host ends of the networks end with this start.
        let (own, _others): (Vec<_>, Vec<_>) = nets.into_iter().map(NetBackend::split).unzip();
        descriptors.extend(own.into_iter().zip(layout::NETS_FD..));
        let descriptors = descriptors
            .into_iter()
            .chain(more)
            .map(|(parent_fd, number)| FdMapping { parent_fd, child_fd: number as i32 });
        let mut command = program.command()?;
        descriptors::give(&mut command, descriptors.collect(), program.last(), program.name())?;
        if vm.gdb.as_ref().is_some_and(GdbEndpoint::waits) {
            debugger::make_wait(&shown.1)?;
        }
        let mut machine = VmProcess::start(program.name(), command)?;
        machine.add(served);
        control.started(machine.process(), shown, start);
        let metrics_request =
            metrics_request.as_ref().map(|pipe| (pipe, &write_metrics as &dyn Fn()));
        let mut supervisor =
            Supervisor::new(&control, &woken, ours, metrics_request, maps.as_mut());
        hosted_devices::release_memory();
        let second = match (&mut second, stream) {
            (Some(console), Some(stream)) => Some(SecondaryConsole { stream, console }),
            _ => None,
        };
        let (end, mut messages) =
            machine.serve(deadline, KEYS, &mut console, second, Some(&mut supervisor))?;
        if let Some(path) = &vm.profile_writes {
            let console_targets = messages.take_marked();
            let report = |runner: &Runner<'_>| match runner {
                Runner::Process(image) => Ok(profile::report(&console_targets, image)),
                Runner::Kvm(_) => Ok(String::new()),
            };
            let profile = program.with_kernel(kernel, report)?;
            fs::write(path, profile).map_err(|error| Failure::file("write", path, &error))?;
        }
        messages.print();
        let (code, text) = exit_status(&end, &program);
        if code == failure::GUEST_PANIC {
            control.panicked();
        }
        let code = match action_after(vm, &end, code) {
            OnExit::Exit => code,
            OnExit::Code(code) => code,
            OnExit::Reset => {
                control.reset(code);
                say(Level::Info, &format!("{text}; restarting the VM"));
                (ready, nets) = program.with_kernel(kernel, prepare)?;
                continue;
            }
        };
        report_exit(code, &text, start);
        control.ended(code, &text);
        write_metrics();
        drop((server, debugger));
        disk::release(disks);
        return Ok(code);
    }
}

fn read_large(path: &Path) -> Result<Large, Failure> {
    let read = File::open(path).and_then(|mut file| Large::read(&mut file));
    read.map_err(|error| Failure::file("read", path, &error))
}

/// Program of the VM's first process.
enum Program {
    /// `parador` itself as a KVM process.
    Kvm,
    /// The wedge.
    Wedge(Wedge),
}

impl Program {
    /// Returns the name of the back end.
    fn backend(&self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Wedge(_) => "process",
        }
    }

    /// Returns the name of the process in messages.
    fn name(&self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Wedge(_) => wedge::NAME,
        }
    }

    /// Returns the highest descriptor that the process creates by itself.
    fn last(&self) -> i32 {
        match self {
            Self::Kvm => layout::CONTROL_FD as i32,
            Self::Wedge(_) => layout::RING_FD as i32,
        }
    }

    /// Returns the command that starts it, without an environment: the guest could read it in its
    /// processes.
    fn command(&self) -> Result<Command, Failure> {
        let mut command = match self {
            Self::Kvm => kvm::command(),
            Self::Wedge(wedge) => wedge.command(),
        }?;
        command.env_clear();
        Ok(command)
    }

    /// Reads the kernel again for `then`.
    fn with_kernel<T>(
        &self,
        kernel: &Path,
        action_after: impl FnOnce(&Runner<'_>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let bytes = read_large(kernel)?;
        match self {
            Self::Kvm => action_after(&Runner::Kvm(&bytes)),
            Self::Wedge(_) => {
                let image = Image::parse(&bytes).map_err(|error| refused(&error, kernel))?;
                action_after(&Runner::Process(Box::new(image)))
            }
        }
    }
}

/// Reports the end of the VM.
fn report_exit(code: u8, text: &str, start: Instant) {
    let seconds = start.elapsed().as_secs_f64();
    let more = More { code: Some(code), reason: failure::word(code), help: None };
    let level = if code == 0 { Level::Info } else { Level::Warn };
    messages::emit(level, &format!("{text} (exit code {code}, {seconds:.1} s)"), more);
}

/// Returns the action after an end with this code.
fn action_after(vm: &VmConfig, end: &ExitCause, code: u8) -> OnExit {
    let wanted = match (end, code) {
        (ExitCause::Reset, _) => Some(OnExit::Reset),
        (ExitCause::Exited(_), 0) => vm.on_shutdown,
        (ExitCause::Exited(_), failure::GUEST_RESET) => vm.on_reset,
        (ExitCause::Exited(_), failure::GUEST_PANIC) => vm.on_panic,
        _ => None,
    };
    wanted.unwrap_or_default()
}

fn clone(descriptor: &impl AsFd) -> Result<OwnedFd, Failure> {
    let copy = descriptor.as_fd().try_clone_to_owned();
    copy.map_err(|error| Failure::os("duplicate a descriptor", &error))
}

/// Opens the descriptor of `--event-fd`.
fn event_sink(number: u32) -> Result<File, Failure> {
    let path = PathBuf::from(format!("/proc/self/fd/{number}"));
    let opened = OpenOptions::new().append(true).open(&path);
    opened.map_err(|error| {
        Failure::file("write to the descriptor", &path, &error).help(
            "--event-fd takes the number of an open file or pipe, as in --event-fd 9 9>events",
        )
    })
}

/// Opens the file of `--metrics`.
fn metrics_sink(path: &Path) -> Result<File, Failure> {
    let path = if is_stdout(path) { Path::new("/proc/self/fd/1") } else { path };
    let opened = OpenOptions::new().append(true).create(true).open(path);
    opened.map_err(|error| Failure::file("write", path, &error))
}

/// Returns a pipe that is readable after SIGUSR1.
fn subscribe_sigusr1() -> Result<UnixStream, Failure> {
    let registered = UnixStream::pair().and_then(|(ours, theirs)| {
        ours.set_nonblocking(true)?;
        pipe::register(SIGUSR1, theirs)?;
        Ok(ours)
    });
    registered.map_err(|error| Failure::os("install signal handlers", &error))
}

/// Opens the configured disks.
fn open_disks(disks: &[disk::DiskConfig]) -> Result<Vec<Disk>, Failure> {
    if disks.len() > MAX_DISKS {
        let text = format!("{} disks (limit {MAX_DISKS})", disks.len());
        return Err(Failure::new(failure::USAGE, text));
    }
    disks.iter().enumerate().map(|(number, disk)| disk.open(number)).collect()
}

/// Connects the configured networks.
fn open_nets(nets: &[net::NetConfig]) -> Result<Vec<NetBackend>, Failure> {
    if nets.len() > MAX_NETS {
        let text = format!("{} networks (limit {MAX_NETS})", nets.len());
        return Err(Failure::new(failure::USAGE, text));
    }
    let opened: Vec<_> = nets.iter().map(net::NetConfig::open).collect::<Result<_, _>>()?;
    if nets.len() > 1 && opened.iter().any(Option::is_none) {
        return Err(Failure::new(failure::BAD_CONFIG, "--net none conflicts with another --net"));
    }
    Ok(opened.into_iter().flatten().collect())
}

/// Opens the configured shared directories.
fn open_shares(shares: &[share::ShareConfig]) -> Result<Vec<Share>, Failure> {
    if shares.len() > MAX_SHARES {
        let text = format!("{} shared directories (limit {MAX_SHARES})", shares.len());
        return Err(Failure::new(failure::USAGE, text));
    }
    let opened: Vec<_> = shares.iter().map(share::ShareConfig::open).collect::<Result<_, _>>()?;
    let tags: HashSet<_> = opened.iter().map(|share| share.record.tag).collect();
    if tags.len() < opened.len() {
        return Err(Failure::new(failure::BAD_CONFIG, "two shared directories have the same tag"));
    }
    Ok(opened)
}

/// Returns the exit code and message for the end of a VM (`docs/spec/exit-codes.md`). A guest never
/// causes 82, 124 or 128 and above.
fn exit_status(end: &ExitCause, program: &Program) -> (u8, String) {
    let text = |code, text: &str| (code, text.to_owned());
    match end {
        ExitCause::Timeout => text(failure::TIMEOUT, "time limit reached"),
        ExitCause::Signal(signal) => (128 + *signal as u8, format!("ended by signal {signal}")),
        ExitCause::Keyboard => text(0, "ended from the keyboard"),
        ExitCause::Request => text(0, "ended by request"),
        ExitCause::Reset => text(failure::GUEST_RESET, "reset by request"),
        ExitCause::OutputClosed => {
            text(128 + Signal::PIPE.as_raw() as u8, "the reader of the console has closed it")
        }
        ExitCause::DeviceProcess(name, status) => {
            let code = status.signal().map_or(failure::INTERNAL, code_of_signal);
            (code, format!("the process of {name} exited ({status})"))
        }
        ExitCause::Exited(status) => match (status.code(), status.signal()) {
            (Some(code), _) => exit_status_of_code(code as u8, program),
            (None, signal) => {
                let signal = signal.unwrap_or(0);
                (code_of_signal(signal), format!("the VM was killed by signal {signal}"))
            }
        },
    }
}

/// Returns the exit code and message for the exit code of the VM's first process. A KVM guest
/// controls its exit code entirely; with processes, the wedge's first process reports why another
/// one ended.
fn exit_status_of_code(code: u8, program: &Program) -> (u8, String) {
    let is_said = match program {
        Program::Wedge(_) => !matches!(code, failure::WATCHDOG | failure::TIMEOUT | 128),
        Program::Kvm => exit::is_guest_code(code) || (failure::USAGE..exit::PANIC).contains(&code),
    };
    if !is_said {
        let text = format!("the VM's first process exited with status {code}");
        return (failure::INTERNAL, text);
    }
    match code.checked_sub(128) {
        Some(signal) => (code, format!("a process of the VM was killed by signal {signal}")),
        None => (code, failure::meaning_of_end(code)),
    }
}

/// Returns the exit code for the death of a Parador process by a signal: sent from outside, or
/// caused by its own fault.
fn code_of_signal(signal: i32) -> u8 {
    match exit::SELF_INFLICTED.contains(&(signal as u32)) {
        true => failure::INTERNAL,
        false => 128 + signal as u8,
    }
}

/// Returns the named kernel, else the cached one, and the lock that keeps it in the cache.
fn kernel_file(named: Option<&Path>) -> Result<(PathBuf, UseLock), Failure> {
    let keep = |path: &Path| kernel::hold(path.parent().unwrap_or(Path::new("")));
    match named {
        Some(path) => Ok((path.to_owned(), keep(path))),
        None => {
            let cached = kernel::cached()?;
            let path = cached.vmlinux();
            let held = keep(&path);
            Ok((path, held))
        }
    }
}

/// Builds the RAM disk with a shell.
fn busybox() -> Result<Vec<u8>, Failure> {
    let interruptible = Interruptible::new()?;
    let (busybox, _) = Steps::stderr().run("RAM disk", |step| {
        let (path, title) = fetch::busybox(step, &interruptible)?;
        Ok(((path, ()), title))
    })?;
    initramfs::busybox(&busybox, &[], &[])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::ExitStatus;

    const KVM: Program = Program::Kvm;

    fn wedge() -> Program {
        Program::Wedge(Wedge::Copy)
    }

    /// As wait(2) has it: an exit, a signal.
    fn exited(code: u8) -> ExitCause {
        ExitCause::Exited(ExitStatus::from_raw(i32::from(code) << 8))
    }

    fn killed(signal: i32) -> ExitCause {
        ExitCause::Exited(ExitStatus::from_raw(signal))
    }

    #[test]
    fn guests_have_their_codes_and_no_others() {
        for program in [wedge(), KVM] {
            for code in 0..=u8::MAX {
                let is_signal = code > 128 && matches!(program, Program::Wedge(_));
                let is_own = matches!(code, 0..=81 | 83) || is_signal || {
                    matches!(program, Program::Wedge(_)) && !matches!(code, 82 | 124 | 128)
                };
                let wanted = if is_own { code } else { failure::INTERNAL };
                assert_eq!(exit_status(&exited(code), &program).0, wanted, "{code}");
            }
        }
    }

    #[test]
    fn signals_that_others_send_have_their_codes() {
        for program in [wedge(), KVM] {
            for (signal, code) in [(9, 137), (15, 143), (31, 70), (11, 70), (6, 70)] {
                assert_eq!(exit_status(&killed(signal), &program).0, code, "{signal}");
                let other =
                    ExitCause::DeviceProcess("a disk".to_owned(), ExitStatus::from_raw(signal));
                assert_eq!(exit_status(&other, &program).0, code, "{signal}");
            }
        }
        assert_eq!(exit_status(&ExitCause::Timeout, &KVM).0, 124);
        assert_eq!(exit_status(&ExitCause::Signal(15), &KVM).0, 143);
    }
}

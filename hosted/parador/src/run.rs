//! `parador run`: a virtual machine, by KVM or as processes of this host.

use crate::api::Server;
use crate::compat;
use crate::config::{
    Backend, Config, Log, Optimisation, Protection, Sandbox, Then, Vm, is_busybox, is_stdout,
};
use crate::console::{Console, Target};
use crate::control::{Control, Supervisor};
use crate::debugger::{self, Debugger, Kernel, Place, Ram};
use crate::descriptors;
use crate::device;
use crate::disk::{self, Disk};
use crate::failure::{self, Failure};
use crate::fetch;
use crate::initramfs;
use crate::interrupt::Interruptible;
use crate::kernel::{self, Held};
use crate::kvm;
use crate::machine::{self, End, Machine, Second};
use crate::messages::{self, Level, More, say};
use crate::net::{self, Net};
use crate::output::print;
use crate::perf::Maps;
use crate::profile;
use crate::programs::Named;
use crate::remains;
use crate::share::{self, Share};
use crate::steps::Steps;
use crate::vsock::Vsock;
use crate::wedge::{self, Wedge};
use clap::Args;
use command_fds::FdMapping;
use hosted_vmm::{Error, Image, Prepared};
use proto::system::MAX_VCPUS;
use proto::wedge::{MAX_DISKS, MAX_NETS, MAX_SHARES, exit, layout, log, option};
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
/// Memory if nothing is said of it.
const MEMORY: u64 = 1 << 30;
/// Least memory that any kernel starts in.
const LEAST_MEMORY: u64 = 64 << 20;
/// What a kernel is told that KVM runs, behind its consoles.
const KVM_COMMAND_LINE: &str = "panic=-1";
/// What a kernel is told before what the user says, behind its consoles: time comes from the counter that the wedge has no part in; what defends a kernel against its programs on a processor that it does not own is of no use; and large pages of programs are one fault and one
/// mapping of the host each (Linux has them with 512 MiB or more).
pub const COMMAND_LINE: &str = "panic=-1 mitigations=off transparent_hugepage=always";

/// Most bytes of a command line: Linux cuts off what is behind them (`COMMAND_LINE_SIZE`, with the zero at its end).
const MOST_COMMAND_LINE: usize = 2047;
/// What is added to it where the host has no 32-bit programs.
const NO_COMPAT: &str = "ia32_emulation=off";

/// The serial line in messages.
const SERIAL: &str = "the serial line";
/// What the keys of a terminal do.
const KEYS: &str = "Ctrl-A X ends the machine; all other keys go to the guest";

/// Options of `parador run`.
#[derive(Debug, Args)]
pub struct Options {
    /// Kernel: the pre-virtualized `vmlinux` that `parador kernel build` makes; with KVM also any bzImage, and any PVH or Multiboot kernel.
    /// [default: the kernel of `parador kernel build` in the cache]
    #[arg(value_name = "KERNEL", conflicts_with = "kernel")]
    positional: Option<PathBuf>,
    /// Description of the machine, a TOML file with the keys of these options, which override it; `-d` adds to its disks.
    #[arg(long = "config", value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    config: Config,
    /// Print what file and options say together, as a file, and end.
    #[arg(long)]
    dump_config: bool,
    /// Check everything, but do not start.
    #[arg(long)]
    dry_run: bool,
    /// Print nothing but errors and what the guest prints.
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    programs: Named,
}

impl Options {
    /// What the options and the file say together.
    fn merged(&self) -> Result<Config, Failure> {
        let mut over = self.config.clone();
        over.vm.kernel = over.vm.kernel.or_else(|| self.positional.clone());
        match &self.file {
            Some(file) => Config::read(file)?.merge(&over),
            None => Ok(over),
        }
    }
}

/// Whether protection keys keep the guest's kernel from its programs; if they were wanted and do not, why.
fn keys(vm: &Vm) -> Result<(bool, Option<&'static str>), Failure> {
    let lacking = if vm.profile_writes.is_some() {
        Some("`--profile-writes` changes the rights of its memory")
    } else if vm.without.contains(&Optimisation::Functions) {
        Some("`--without functions` lets it change its code unseen")
    } else if !hosted_vmm::has_keys() {
        Some("this host has no protection keys")
    } else {
        None
    };
    let apart = vm.protection == Some(Protection::Process);
    if apart && (vm.profile_writes.is_some() || vm.without.contains(&Optimisation::InProcess)) {
        let text = "--protection process has neither --profile-writes nor --without in-process";
        return Err(Failure::new(failure::USAGE, text).help("leave one of them out"));
    }
    match (vm.protection.unwrap_or_default(), lacking) {
        (Protection::None | Protection::Process | Protection::Remap, _) => Ok((false, None)),
        (Protection::Auto, lacking) => Ok((lacking.is_none(), lacking)),
        (Protection::Keys, None) => Ok((true, None)),
        (Protection::Keys, Some(why)) => {
            let text = format!("programs of the guest cannot be kept from its kernel: {why}");
            let failure = Failure::new(failure::UNAVAILABLE, text);
            let help = "`--protection process` keeps them from it anywhere, slowly; `none` is for programs that are trusted";
            Err(failure.help(help))
        }
    }
}

/// Bits of [`option`], as the wedge is told.
fn bits(vm: &Vm) -> u64 {
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
        // A program's way out and in is through another process.
        Protection::Process => option::USER_PROCESS | option::NO_CALL_SITES,
        // Whatever is done in place goes to programs and back without the wedge.
        Protection::Remap => option::REMAP | option::NO_FAST_PATHS | option::NO_CALL_SITES,
    };
    let all = counters | profile | debug | sandbox | protection;
    vm.without.iter().fold(all, |bits, optimisation| {
        bits | match optimisation {
            Optimisation::FastSites => option::NO_FAST_PATHS,
            Optimisation::CallSites => option::NO_CALL_SITES,
            Optimisation::Functions => option::NO_FUNCTIONS,
            Optimisation::Batches => option::NO_BATCHES,
            Optimisation::Spaces => option::ONE_SPACE,
            Optimisation::InProcess => option::TRACED,
        }
    })
}

/// What the serial line is connected to, and the virtio console if there is one.
fn lines(vm: &Vm) -> Result<(Target, Option<Target>), Failure> {
    let second = vm.console.as_ref().and_then(|console| console.0.clone());
    let first = match (&vm.serial, &second) {
        (None, Some(Target::Stdio)) => Target::Null,
        (serial, _) => serial.clone().unwrap_or_default(),
    };
    let is_shared = !matches!(first, Target::Null | Target::Pty) && second.as_ref() == Some(&first);
    if is_shared {
        let text = "--serial and --console are connected to the same";
        let failure = Failure::new(failure::BAD_CONFIG, text);
        return Err(failure.help("connect one of them elsewhere: --serial null"));
    }
    Ok((first, second))
}

/// How a kernel is run.
enum Runner<'a> {
    /// By KVM: the kernel's file.
    Kvm(&'a [u8]),
    /// As processes: the kernel, checked.
    Process(Box<Image<'a>>),
}

/// A machine that can be started: the descriptors that its first process has beside those of its devices.
struct Ready {
    prepared: Prepared,
    /// Of the back end alone.
    more: Vec<(OwnedFd, u32)>,
}

/// Decides how the kernel is run. Nothing that was asked for is replaced by something else.
fn runner<'a>(config: &Config, bytes: &'a [u8], kernel: &Path) -> Result<Runner<'a>, Failure> {
    let vm = &config.vm;
    // What only processes have decides, too.
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
            let text = "--counters, --perf-map, --profile-writes, --protection keys, process or remap and --without are of processes";
            return Err(Failure::new(failure::USAGE, text).help("leave out --backend kvm"));
        }
        Backend::Kvm => match kvm::trial() {
            Ok(()) => Runner::Kvm(bytes),
            Err(why) => {
                let text = format!("KVM cannot be used here: {why}");
                let failure = Failure::new(failure::UNAVAILABLE, text);
                return Err(failure
                    .help("--backend process runs kernels of `parador kernel build` without it"));
            }
        },
        Backend::Auto if !for_processes => match kvm::trial() {
            Ok(()) => Runner::Kvm(bytes),
            Err(why) => match parse() {
                Ok(image) => Runner::Process(Box::new(image)),
                Err(Error::Kernel(..)) if vmm_boot::Kernel::detect(bytes).is_ok() => {
                    let kernel = kernel.display();
                    let text = format!(
                        "{kernel} is not pre-virtualized, and KVM cannot be used here: {why}"
                    );
                    return Err(Failure::new(failure::UNAVAILABLE, text)
                        .help("`parador kernel build` makes a kernel that needs no KVM"));
                }
                Err(error) => return Err(refused(&error, kernel)),
            },
        },
        Backend::Auto | Backend::Process => {
            Runner::Process(Box::new(parse().map_err(|error| refused(&error, kernel))?))
        }
    })
}

/// Runs the machine to its end and returns the exit code.
pub fn run(options: &Options) -> Result<u8, Failure> {
    let config = options.merged()?;
    messages::set(config.vm.log_format.unwrap_or_default());
    messages::set_quiet(options.quiet);
    // A limit of the size of files is an error then, not the end; who asks for statistics that nobody prints ends nothing.
    for signal in [SIGXFSZ, SIGUSR1] {
        flag::register(signal, Arc::default())
            .map_err(|error| Failure::os("listen to signals", &error))?;
    }
    if options.dump_config {
        print(config.to_toml()?)?;
        return Ok(0);
    }
    remains::adopt()?;
    let vm = &config.vm;
    let memory = vm.memory.map_or(MEMORY, |size| size.0);
    if memory < LEAST_MEMORY || !memory.is_multiple_of(PAGE) {
        let text = format!("{memory} bytes of memory are too few, or no whole pages");
        return Err(Failure::new(failure::USAGE, text).help("take 64M at least"));
    }
    let balloon = vm.balloon.unwrap_or_default().0.map(|size| size.0);
    if balloon.is_some_and(|bytes| bytes > memory - LEAST_MEMORY) {
        let text = "the balloon leaves the guest less than 64M";
        return Err(Failure::new(failure::USAGE, text).help("take --balloon on, or more --memory"));
    }
    let vcpus = vm.cpus.unwrap_or(1);
    if !(1..=MAX_VCPUS).contains(&vcpus.into()) {
        let text = format!("{vcpus} virtual CPUs; a machine has 1 to {MAX_VCPUS}");
        return Err(Failure::new(failure::BAD_CONFIG, text));
    }
    if vm.profile_writes.is_some() && vcpus != 1 {
        let text = "a profile of writes is of one virtual CPU";
        return Err(Failure::new(failure::USAGE, text).help("leave --cpus out"));
    }
    if vm.wait_boot && vm.api_socket.is_none() {
        let text = "--wait-boot: nobody could say when";
        return Err(Failure::new(failure::USAGE, text).help("name an --api-socket, too"));
    }
    // A kernel of the cache stays there until the machine has ended: a new start reads it again.
    let (kernel, _held) = kernel_file(vm.kernel.as_deref())?;
    let kernel = kernel.as_path();
    let disks = open_disks(&config.disk)?;
    let shares = open_shares(&config.share)?;
    let read = |path: &Path| fs::read(path).map_err(|error| Failure::file("read", path, &error));
    let bytes = read_large(kernel).map_err(|failure| {
        failure.help("`parador kernel build` makes a kernel that runs in processes")
    })?;
    let runner = runner(&config, &bytes, kernel)?;
    let initrd = || match &vm.initrd {
        None => Ok(None),
        Some(path) if is_busybox(path) => busybox().map(Some),
        Some(path) => read(path).map(Some),
    };
    let (target, second) = lines(vm)?;
    let log = match vm.log.unwrap_or(if options.quiet { Log::Error } else { Log::default() }) {
        Log::Error => log::ERROR,
        Log::Warn => log::WARN,
        Log::Info => log::INFO,
    };
    let records: Vec<_> = disks.iter().map(|disk| disk.record).collect();
    let share_records: Vec<_> = shares.iter().map(|share| share.record).collect();
    let deadline = machine::deadline(vm.timeout.map(|time| time.0));
    let program = match runner {
        Runner::Kvm(_) => Program::Kvm,
        Runner::Process(_) => Program::Wedge(Wedge::find(&options.programs)?),
    };
    let (keys, open) = match runner {
        Runner::Kvm(_) => (false, None),
        Runner::Process(_) => keys(vm)?,
    };
    let compat = compat::is_there();
    let line = match runner {
        Runner::Kvm(_) => KVM_COMMAND_LINE.to_owned(),
        Runner::Process(_) if compat => COMMAND_LINE.to_owned(),
        Runner::Process(_) => format!("{COMMAND_LINE} {NO_COMPAT}"),
    };
    let compat = if compat { option::COMPAT } else { 0 };
    // The last one is the first program's.
    let consoles = match (&target, &second) {
        (_, None) => "console=ttyS0",
        (Target::Null, Some(_)) => "console=hvc0",
        (_, Some(_)) => "console=ttyS0 console=hvc0",
    };
    let line = match &vm.cmdline {
        Some(more) => format!("{consoles} {line} {more}"),
        None => format!("{consoles} {line}"),
    };
    if matches!(runner, Runner::Process(_)) && line.len() > MOST_COMMAND_LINE {
        let text = format!(
            "the kernel's command line has {} bytes; Linux takes {MOST_COMMAND_LINE}",
            line.len()
        );
        return Err(Failure::new(failure::BAD_CONFIG, text)
            .help("say less with --cmdline; a script on a --share or disk can have the rest"));
    }
    let prepare = |runner: &Runner<'_>| {
        let mut nets = open_nets(&config.net)?;
        let net_records: Vec<_> = nets.iter().map(|net| net.record).collect();
        let initrd = initrd()?;
        let ready = match runner {
            Runner::Process(image) => {
                let machine = hosted_vmm::Machine {
                    memory,
                    vcpus,
                    initrd: initrd.as_deref(),
                    command_line: &line,
                    options: bits(vm) | compat | if keys { option::KEYS } else { 0 },
                    log,
                    balloon,
                    disks: &records,
                    nets: &net_records,
                    shares: &share_records,
                    vsock: config.vsock.as_ref().map(|vsock| vsock.cid()),
                    console: second.is_some(),
                };
                let prepared = hosted_vmm::prepare(image, &machine)
                    .map_err(|error| refused(&error, kernel))?;
                Ready { prepared, more: Vec::new() }
            }
            Runner::Kvm(bytes) => {
                let initrd = initrd.unwrap_or_default();
                kvm::check(kernel, bytes, initrd.len() as u64, memory)?;
                let machine = hosted_kvm::Machine {
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
                    hosted_vmm::empty(memory).map_err(|error| refused(&error, kernel))?;
                Ready { prepared, more }
            }
        };
        nets.iter_mut().try_for_each(Net::wait)?;
        Ok::<_, Failure>((ready, nets))
    };
    let (mut ready, mut nets) = prepare(&runner)?;
    let image = match &runner {
        Runner::Process(image) => Some(image),
        Runner::Kvm(_) => None,
    };
    let debugged =
        vm.gdb.as_ref().map(|place| (place, image.map_or(Kernel::Kvm, |image| Kernel::new(image))));
    let maps = image.filter(|_| vm.perf_map).map(|image| Maps::new(image));
    let mut maps = maps.transpose()?;
    // A machine runs for long, and needs it again only for a new start.
    drop(runner);
    drop(bytes);
    if options.dry_run {
        let how = match program {
            Program::Kvm => "be run by KVM",
            Program::Wedge(_) => "run in processes of this host",
        };
        say(Level::Info, &format!("{} would {how}", kernel.display()));
        return Ok(0);
    }
    if let Some(why) = open {
        let text = format!(
            "programs of this guest can reach its kernel: {why} (`--protection process` keeps them from it, slowly)"
        );
        say(Level::Warn, &text);
    }
    let mut console = Console::open(&target, SERIAL)?;
    let open = |target: &Target| Console::open(target, "the virtio console");
    let mut second = second.as_ref().map(open).transpose()?;
    let vsock = config.vsock.as_ref().map(Vsock::open).transpose()?;
    let sink = vm.event_fd.map(event_sink).transpose()?;
    let metrics = vm.metrics.as_deref().map(metrics_sink).transpose()?;
    let (control, woken) = Control::new(config.clone(), memory, program.backend(), sink)?;
    if vm.wait_boot {
        control.created();
    }
    let socket = vm.api_socket.as_deref();
    let server = socket.map(|path| Server::start(path, control.clone())).transpose()?;
    let debugger = debugged.map(|(place, kernel)| {
        let ram = Ram { low: ready.prepared.low, size: memory };
        Debugger::start(place, control.clone(), kernel, (vcpus, ram))
    });
    let debugger = debugger.transpose()?;
    let write_metrics = || {
        if let Some(mut file) = metrics.as_ref() {
            // What has been counted is not worth ending a machine for.
            let line = serde_json::to_string(&control.statistics()).unwrap_or_default();
            let _ = writeln!(file, "{line}");
        }
    };
    let asked = metrics.as_ref().map(|_| asked()).transpose()?;
    say(Level::Info, &format!("back end `{}`", program.backend()));
    if vm.wait_boot {
        let start = Instant::now();
        let asked = asked.as_ref().map(|pipe| (pipe, &write_metrics as &dyn Fn()));
        if let Some(end) = control.await_boot(&woken, deadline, asked)? {
            let (code, text) = judge(&end, &program);
            say_end(code, &text, start);
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
            .map_err(|error| Failure::os("make a pipe", &error))?;
        let doorbell = eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|error| Failure::os("make an event descriptor", &error.into()))?;
        let devices = device::Machine {
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
            let (ours, theirs) = pair.map_err(|error| Failure::os("make a pipe", &error))?;
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
        // What is on the other sides of networks ends with this start.
        let (own, _others): (Vec<_>, Vec<_>) = nets.into_iter().map(Net::split).unzip();
        descriptors.extend(own.into_iter().zip(layout::NETS_FD..));
        let descriptors = descriptors
            .into_iter()
            .chain(more)
            .map(|(parent_fd, number)| FdMapping { parent_fd, child_fd: number as i32 });
        let mut command = program.command()?;
        descriptors::give(&mut command, descriptors.collect(), program.last(), program.name())?;
        if vm.gdb.as_ref().is_some_and(Place::waits) {
            debugger::make_wait(&shown.1)?;
        }
        let mut machine = Machine::start(program.name(), command)?;
        machine.add(served);
        control.started(machine.process(), shown, start);
        let asked = asked.as_ref().map(|pipe| (pipe, &write_metrics as &dyn Fn()));
        let mut supervisor = Supervisor::new(&control, &woken, ours, asked, maps.as_mut());
        hosted_jail::give_back();
        let second = match (&mut second, stream) {
            (Some(console), Some(stream)) => Some(Second { stream, console }),
            _ => None,
        };
        let (end, mut messages) =
            machine.serve(deadline, KEYS, &mut console, second, Some(&mut supervisor))?;
        if let Some(path) = &vm.profile_writes {
            let lines = messages.take_marked();
            let report = |runner: &Runner<'_>| match runner {
                Runner::Process(image) => Ok(profile::report(&lines, image)),
                Runner::Kvm(_) => Ok(String::new()),
            };
            let profile = program.with_kernel(kernel, report)?;
            fs::write(path, profile).map_err(|error| Failure::file("write", path, &error))?;
        }
        messages.print();
        let (code, text) = judge(&end, &program);
        if code == failure::GUEST_PANIC {
            control.panicked();
        }
        let code = match then(vm, &end, code) {
            Then::Exit => code,
            Then::Code(code) => code,
            Then::Reset => {
                control.reset(code);
                say(Level::Info, &format!("{text}; the machine starts anew"));
                (ready, nets) = program.with_kernel(kernel, prepare)?;
                continue;
            }
        };
        say_end(code, &text, start);
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

/// The program of a machine's first process.
enum Program {
    /// This one, as a machine of KVM.
    Kvm,
    /// The wedge.
    Wedge(Wedge),
}

impl Program {
    /// The back end's name.
    fn backend(&self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Wedge(_) => "process",
        }
    }

    /// What the process is called in messages.
    fn name(&self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Wedge(_) => wedge::NAME,
        }
    }

    /// The highest number of a descriptor that it makes for itself.
    fn last(&self) -> i32 {
        match self {
            Self::Kvm => layout::CONTROL_FD as i32,
            Self::Wedge(_) => layout::RING_FD as i32,
        }
    }

    /// To start it, without the environment, which the guest could read in its processes.
    fn command(&self) -> Result<Command, Failure> {
        let mut command = match self {
            Self::Kvm => kvm::command(),
            Self::Wedge(wedge) => wedge.command(),
        }?;
        command.env_clear();
        Ok(command)
    }

    /// Reads a kernel once more, for as long as `then` needs it.
    fn with_kernel<T>(
        &self,
        kernel: &Path,
        then: impl FnOnce(&Runner<'_>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let bytes = read_large(kernel)?;
        match self {
            Self::Kvm => then(&Runner::Kvm(&bytes)),
            Self::Wedge(_) => {
                let image = Image::parse(&bytes).map_err(|error| refused(&error, kernel))?;
                then(&Runner::Process(Box::new(image)))
            }
        }
    }
}

/// Says how a machine has ended.
fn say_end(code: u8, text: &str, start: Instant) {
    let seconds = start.elapsed().as_secs_f64();
    let more = More { code: Some(code), reason: failure::word(code), help: None };
    let level = if code == 0 { Level::Info } else { Level::Warn };
    messages::tell(level, &format!("{text} (exit code {code}, {seconds:.1} s)"), more);
}

/// What follows an end with this code.
fn then(vm: &Vm, end: &End, code: u8) -> Then {
    let wanted = match (end, code) {
        (End::Reset, _) => Some(Then::Reset),
        (End::Exited(_), 0) => vm.on_shutdown,
        (End::Exited(_), failure::GUEST_RESET) => vm.on_reset,
        (End::Exited(_), failure::GUEST_PANIC) => vm.on_panic,
        _ => None,
    };
    wanted.unwrap_or_default()
}

fn clone(descriptor: &impl AsFd) -> Result<OwnedFd, Failure> {
    let copy = descriptor.as_fd().try_clone_to_owned();
    copy.map_err(|error| Failure::os("copy a descriptor", &error))
}

/// Where events go that the user has given a descriptor for.
fn event_sink(number: u32) -> Result<File, Failure> {
    let path = PathBuf::from(format!("/proc/self/fd/{number}"));
    let opened = OpenOptions::new().append(true).open(&path);
    opened.map_err(|error| {
        Failure::file("write to the descriptor", &path, &error).help(
            "--event-fd takes the number of an open file or pipe: as in --event-fd 9 9>events",
        )
    })
}

/// Where statistics go.
fn metrics_sink(path: &Path) -> Result<File, Failure> {
    let path = if is_stdout(path) { Path::new("/proc/self/fd/1") } else { path };
    let opened = OpenOptions::new().append(true).create(true).open(path);
    opened.map_err(|error| Failure::file("write", path, &error))
}

/// Readable when somebody asks for statistics by a signal.
fn asked() -> Result<UnixStream, Failure> {
    let registered = UnixStream::pair().and_then(|(ours, theirs)| {
        ours.set_nonblocking(true)?;
        pipe::register(SIGUSR1, theirs)?;
        Ok(ours)
    });
    registered.map_err(|error| Failure::os("listen to signals", &error))
}

/// Opens the disks that the user names.
fn open_disks(disks: &[disk::Description]) -> Result<Vec<Disk>, Failure> {
    if disks.len() > MAX_DISKS {
        let text = format!("{} disks are more than {MAX_DISKS}", disks.len());
        return Err(Failure::new(failure::USAGE, text));
    }
    disks.iter().enumerate().map(|(number, disk)| disk.open(number)).collect()
}

/// Connects the networks that the user names.
fn open_nets(nets: &[net::Description]) -> Result<Vec<Net>, Failure> {
    if nets.len() > MAX_NETS {
        let text = format!("{} networks are more than {MAX_NETS}", nets.len());
        return Err(Failure::new(failure::USAGE, text));
    }
    let opened: Vec<_> = nets.iter().map(net::Description::open).collect::<Result<_, _>>()?;
    if nets.len() > 1 && opened.iter().any(Option::is_none) {
        return Err(Failure::new(failure::BAD_CONFIG, "--net none: there is another network"));
    }
    Ok(opened.into_iter().flatten().collect())
}

/// Opens the folders that the user names.
fn open_shares(shares: &[share::Description]) -> Result<Vec<Share>, Failure> {
    if shares.len() > MAX_SHARES {
        let text = format!("{} shared directories are more than {MAX_SHARES}", shares.len());
        return Err(Failure::new(failure::USAGE, text));
    }
    let opened: Vec<_> = shares.iter().map(share::Description::open).collect::<Result<_, _>>()?;
    let tags: HashSet<_> = opened.iter().map(|share| share.record.tag).collect();
    if tags.len() < opened.len() {
        return Err(Failure::new(failure::BAD_CONFIG, "two shared directories have one tag"));
    }
    Ok(opened)
}

/// Exit code and text of an end (`docs/spec/exit-codes.md`). What a guest says or does is never 82, 124 or 128 and more.
fn judge(end: &End, program: &Program) -> (u8, String) {
    let text = |code, text: &str| (code, text.to_owned());
    match end {
        End::Timeout => text(failure::TIMEOUT, "the time limit was reached"),
        End::Signal(signal) => (128 + *signal as u8, format!("ended by signal {signal}")),
        End::Keys => text(0, "ended from the keyboard"),
        End::Request => text(0, "ended by request"),
        End::Reset => text(failure::GUEST_RESET, "reset by request"),
        End::OutputClosed => text(128 + Signal::PIPE.as_raw() as u8, "nobody reads the console"),
        End::Other(name, status) => {
            let code = status.signal().map_or(failure::INTERNAL, code_of_signal);
            (code, format!("the process of {name} has ended ({status})"))
        }
        End::Exited(status) => match (status.code(), status.signal()) {
            (Some(code), _) => judge_code(code as u8, program),
            (None, signal) => {
                let signal = signal.unwrap_or(0);
                (code_of_signal(signal), format!("the machine was killed by signal {signal}"))
            }
        },
    }
}

/// The same of the exit code of a machine's first process. That of KVM may be a guest's doing altogether; the device process says what
/// has ended one of the others.
fn judge_code(code: u8, program: &Program) -> (u8, String) {
    let is_said = match program {
        Program::Wedge(_) => !matches!(code, failure::WATCHDOG | failure::TIMEOUT | 128),
        Program::Kvm => exit::is_guest_code(code) || (failure::USAGE..exit::PANIC).contains(&code),
    };
    if !is_said {
        let text = format!("the machine's first process has ended with status {code}");
        return (failure::INTERNAL, text);
    }
    match code.checked_sub(128) {
        Some(signal) => (code, format!("a process of the machine was killed by signal {signal}")),
        None => (code, failure::meaning_of_end(code)),
    }
}

/// What the end of one of Parador's own processes by a signal means: somebody has sent it, or the process is wrong.
fn code_of_signal(signal: i32) -> u8 {
    match exit::SELF_INFLICTED.contains(&(signal as u32)) {
        true => failure::INTERNAL,
        false => 128 + signal as u8,
    }
}

/// The kernel that was named, else the one in the cache; and what keeps it there.
fn kernel_file(named: Option<&Path>) -> Result<(PathBuf, Held), Failure> {
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

/// The RAM disk with a shell, in which the modules and files that the user names are.
fn busybox() -> Result<Vec<u8>, Failure> {
    let interruptible = Interruptible::new()?;
    let (busybox, _) = Steps::new().run("RAM disk", |step| {
        let (path, title) = fetch::busybox(step, &interruptible)?;
        Ok(((path, ()), title))
    })?;
    initramfs::busybox(&busybox, &[], &[])
}

pub fn refused(error: &Error, kernel: &Path) -> Failure {
    let code = match error {
        Error::Host(..) | Error::TooMuchMemory { .. } => failure::OS_ERROR,
        Error::Lacking(_) => failure::UNAVAILABLE,
        _ => failure::BAD_CONFIG,
    };
    let failure = match error {
        Error::Host(action, error) => Failure::os(action, error),
        Error::Lacking(_)
        | Error::TooMuchMemory { .. }
        | Error::TooManyDisks(_)
        | Error::TooManyNets(_)
        | Error::TooManyShares(_) => Failure::new(code, error.to_string()),
        _ => Failure::new(code, format!("{}: {error}", kernel.display())),
    };
    match error.help() {
        Some(help) => failure.help(help),
        None => failure,
    }
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
    fn exited(code: u8) -> End {
        End::Exited(ExitStatus::from_raw(i32::from(code) << 8))
    }

    fn killed(signal: i32) -> End {
        End::Exited(ExitStatus::from_raw(signal))
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
                assert_eq!(judge(&exited(code), &program).0, wanted, "{code}");
            }
        }
    }

    #[test]
    fn signals_that_others_send_have_their_codes() {
        for program in [wedge(), KVM] {
            for (signal, code) in [(9, 137), (15, 143), (31, 70), (11, 70), (6, 70)] {
                assert_eq!(judge(&killed(signal), &program).0, code, "{signal}");
                let other = End::Other("a disk".to_owned(), ExitStatus::from_raw(signal));
                assert_eq!(judge(&other, &program).0, code, "{signal}");
            }
        }
        assert_eq!(judge(&End::Timeout, &KVM).0, 124);
        assert_eq!(judge(&End::Signal(15), &KVM).0, 143);
    }
}

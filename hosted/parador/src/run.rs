//! `parador run`: a virtual machine as processes of this host.

use crate::description::Size;
use crate::disk::{self, Disk};
use crate::failure::{self, Failure};
use crate::fetch;
use crate::initramfs;
use crate::interrupt::Interruptible;
use crate::machine::{End, Machine};
use crate::profile;
use crate::programs::Programs;
use crate::steps::Steps;
use crate::supervise::{self, AtEnd};
use clap::{Args, ValueEnum};
use command_fds::{CommandFdExt, FdMapping};
use hosted_vmm::{Error, Image};
use proto::wedge::{MAX_DISKS, layout, log, option};
use rustix::process::Signal;
use signal_hook::consts::SIGXFSZ;
use signal_hook::flag;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The program that is the wedge, among Parador's own.
const WEDGE: &str = "parador-wedge";
/// Page size.
const PAGE: u64 = 4096;
/// Least memory that any kernel starts in.
const LEAST_MEMORY: u64 = 64 << 20;
/// What a kernel is told before what the user says: the serial line is the console; time comes from the counter that the wedge has no part in;
/// what defends a kernel against its programs on a processor that it does not own is of no use; and large pages of programs are one fault and one
/// mapping of the host each (Linux has them with 512 MiB or more).
const COMMAND_LINE: &str = "console=ttyS0 panic=-1 mitigations=off transparent_hugepage=always";

/// How a guest is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// What this host can do.
    Auto,
    /// Ordinary processes; pre-virtualized kernels only.
    Process,
}

/// What is printed of the machine itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Log {
    /// The machine cannot go on.
    Error,
    /// The guest wanted something that the machine has not.
    Warn,
    /// What the guest has looked for in vain, too.
    Info,
}

/// Options of `parador run`.
#[derive(Debug, Args)]
pub struct Options {
    /// Pre-virtualized kernel: the `vmlinux` that `parador kernel build` makes.
    #[arg(value_name = "KERNEL", required_unless_present = "kernel_option")]
    kernel: Option<PathBuf>,
    /// The same.
    #[arg(short, long = "kernel", value_name = "FILE", conflicts_with = "kernel")]
    kernel_option: Option<PathBuf>,
    /// Initial RAM disk, or `busybox` for one with a shell.
    #[arg(short, long, value_name = "FILE")]
    initrd: Option<PathBuf>,
    /// Added to the kernel's command line.
    #[arg(short = 'p', long, value_name = "TEXT", alias = "append")]
    cmdline: Option<String>,
    /// Disk: FILE, or path=FILE,ro=on,id=NAME,format=raw; up to four.
    #[arg(short, long = "disk", value_name = "DISK")]
    disks: Vec<String>,
    /// Memory.
    #[arg(short, long, value_name = "SIZE", value_parser = Size::parse, default_value = "1G")]
    memory: Size,
    /// Virtual CPUs; this version has one.
    #[arg(short, long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=1))]
    cpus: u8,
    /// How to run the guest.
    #[arg(long, value_enum, default_value = "auto")]
    backend: Backend,
    /// End the machine after this time, as in 60s, with exit code 124.
    #[arg(long, value_name = "TIME", value_parser = crate::commands::parse_time)]
    timeout: Option<Duration>,
    /// Print in the end how often the wedge was needed, and for what.
    #[arg(long)]
    counters: bool,
    /// Count writes to page tables, descriptor tables and devices, and write to this file which functions of the kernel they are from and
    /// whether they are annotated. Slow.
    #[arg(long, value_name = "FILE")]
    profile_writes: Option<PathBuf>,
    /// Do without an optimisation, to see what it is worth.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME")]
    without: Vec<Optimisation>,
    /// Messages about the machine that are printed when it has ended.
    #[arg(long, value_enum, value_name = "LEVEL", default_value = "warn")]
    log: Log,
    /// Check everything, but do not start.
    #[arg(long)]
    dry_run: bool,
    /// Folder of finished programs [default: those built in the source tree, if any].
    #[arg(long, value_name = "FOLDER", env = "PARADOR_ARTIFACTS")]
    artifacts: Option<PathBuf>,
}

/// What can be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Optimisation {
    /// Frequent sensitive instructions are done in place.
    FastSites,
    /// System calls of programs come without a signal.
    CallSites,
    /// The wedge does in its own way what some functions of the kernel do.
    Functions,
}

impl Options {
    /// As the wedge is told.
    fn bits(&self) -> u64 {
        let counters = if self.counters { option::COUNTERS } else { 0 };
        let profile = if self.profile_writes.is_some() { option::PROFILE } else { 0 };
        self.without.iter().fold(counters | profile, |bits, optimisation| {
            bits | match optimisation {
                Optimisation::FastSites => option::NO_FAST_PATHS,
                Optimisation::CallSites => option::NO_CALL_SITES,
                Optimisation::Functions => option::NO_FUNCTIONS,
            }
        })
    }
}

/// Runs the machine to its end and returns the exit code.
pub fn run(options: &Options) -> Result<u8, Failure> {
    let Some(kernel) = options.kernel.as_ref().or(options.kernel_option.as_ref()) else {
        return Err(Failure::new(failure::USAGE, "no kernel is named"));
    };
    let memory = options.memory.0;
    if memory < LEAST_MEMORY || !memory.is_multiple_of(PAGE) {
        let text = format!("{memory} bytes of memory are too few, or no whole pages");
        return Err(Failure::new(failure::USAGE, text).help("take 64M at least"));
    }
    let disks = open_disks(&options.disks)?;
    let read = |path: &Path| fs::read(path).map_err(|error| Failure::file("read", path, &error));
    let bytes = read(kernel).map_err(|failure| {
        failure.help("`parador kernel build` makes a kernel that runs in processes")
    })?;
    let image = Image::parse(&bytes).map_err(|error| refused(&error, kernel))?;
    let initrd = match &options.initrd {
        None => None,
        Some(path) if path == Path::new("busybox") => Some(busybox()?),
        Some(path) => Some(read(path)?),
    };
    let wedge = wedge(options.artifacts.as_deref())?;
    let mut command_line = COMMAND_LINE.to_owned();
    if let Some(more) = &options.cmdline {
        command_line.push(' ');
        command_line.push_str(more);
    }
    let records: Vec<_> = disks.iter().map(|disk| disk.record).collect();
    let machine = hosted_vmm::Machine {
        memory,
        initrd: initrd.as_deref(),
        command_line: &command_line,
        options: options.bits(),
        log: match options.log {
            Log::Error => log::ERROR,
            Log::Warn => log::WARN,
            Log::Info => log::INFO,
        },
        disks: &records,
    };
    // A limit of the size of files is an error then, not the end.
    flag::register(SIGXFSZ, Arc::default())
        .map_err(|error| Failure::os("listen to signals", &error))?;
    let prepared =
        hosted_vmm::prepare(&image, &machine).map_err(|error| refused(&error, kernel))?;
    if options.dry_run {
        eprintln!("parador: {} would run in processes of this host", kernel.display());
        return Ok(0);
    }
    let mut command = supervise::command(wedge.as_os_str(), AtEnd::Kill)?;
    let memory = [(prepared.memory, layout::MEMORY_FD), (prepared.shared, layout::SHARED_FD)];
    let disks = disks.into_iter().map(|disk| disk.file.into()).zip(layout::DISKS_FD..);
    let descriptors = memory.into_iter().chain(disks);
    let descriptors =
        descriptors.map(|(parent_fd, number)| FdMapping { parent_fd, child_fd: number as i32 });
    command
        .fd_mappings(descriptors.collect())
        .map_err(|_| Failure::new(failure::INTERNAL, "descriptors collide"))?;
    let start = Instant::now();
    let machine = Machine::start(WEDGE, command)?;
    let keys = "Ctrl-A X ends the machine; all other keys go to the guest";
    let (end, messages) = machine.serve(options.timeout, keys)?;
    let messages = match &options.profile_writes {
        None => messages,
        Some(path) => {
            let (profile, rest) = profile::report(&messages, &image);
            fs::write(path, profile).map_err(|error| Failure::file("write", path, &error))?;
            rest
        }
    };
    eprint!("{messages}");
    let (code, text) = judge(&end);
    let seconds = start.elapsed().as_secs_f64();
    eprintln!("parador: {text} (exit code {code}, {seconds:.1} s)");
    Ok(code)
}

/// Opens the disks that the user names.
fn open_disks(texts: &[String]) -> Result<Vec<Disk>, Failure> {
    if texts.len() > MAX_DISKS {
        let text = format!("{} disks are more than {MAX_DISKS}", texts.len());
        return Err(Failure::new(failure::USAGE, text));
    }
    let opened = texts.iter().enumerate().map(|(number, text)| disk::parse(text)?.open(number));
    opened.collect()
}

/// What an end means.
fn judge(end: &End) -> (u8, String) {
    let text = |code, text: &str| (code, text.to_owned());
    match end {
        End::Timeout => text(failure::TIMEOUT, "the time limit was reached"),
        End::Signal(signal) => (128 + *signal as u8, format!("ended by signal {signal}")),
        End::Keys => text(0, "ended from the keyboard"),
        End::OutputClosed => text(128 + Signal::PIPE.as_raw() as u8, "nobody reads the console"),
        End::Exited(status) => match (status.code(), status.signal()) {
            (Some(code), _) => {
                let code = code as u8;
                match code.checked_sub(128) {
                    Some(signal) if signal != 0 => {
                        (code, format!("a process of the machine was killed by signal {signal}"))
                    }
                    _ => (code, failure::meaning_of_end(code)),
                }
            }
            (None, signal) => {
                let signal = signal.unwrap_or(0);
                (128 + signal as u8, format!("the machine was killed by signal {signal}"))
            }
        },
    }
}

/// The RAM disk with a shell, in which the modules and files that the user names are.
fn busybox() -> Result<Vec<u8>, Failure> {
    let cache = crate::programs::cache_folder()?;
    let interruptible = Interruptible::new()?;
    let (busybox, _) = Steps::new().run("RAM disk", |step| {
        let (path, title) = fetch::busybox(&cache, step, &interruptible)?;
        Ok(((path, ()), title))
    })?;
    initramfs::busybox(&busybox, &[], &[])
}

/// The wedge's program, built if this is a source tree.
fn wedge(named: Option<&Path>) -> Result<PathBuf, Failure> {
    let programs = Programs::find(named)?;
    let folder = match programs.finished() {
        Some(folder) if folder.join(WEDGE).is_file() => folder,
        _ => {
            let steps = Steps::new();
            steps.run("Building Parador's programs", |step| programs.build(step))?
        }
    };
    let wedge = folder.join(WEDGE);
    if !wedge.is_file() {
        let text = format!("no program {}", wedge.display());
        return Err(Failure::new(failure::MISSING_FILE, text).help("run `cargo xtask build`"));
    }
    Ok(wedge)
}

fn refused(error: &Error, kernel: &Path) -> Failure {
    let code = match error {
        Error::Host(..) | Error::TooMuchMemory { .. } => failure::OS_ERROR,
        Error::Lacking(_) => failure::UNAVAILABLE,
        _ => failure::BAD_CONFIG,
    };
    let failure = match error {
        Error::Host(action, error) => Failure::os(action, error),
        Error::Lacking(_) | Error::TooMuchMemory { .. } | Error::TooManyDisks(_) => {
            Failure::new(code, error.to_string())
        }
        _ => Failure::new(code, format!("{}: {error}", kernel.display())),
    };
    match error.help() {
        Some(help) => failure.help(help),
        None => failure,
    }
}

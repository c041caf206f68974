//! `parador kernel`: a Linux kernel that runs in either half of the address space, with a table of its sensitive instructions.
//!
//! What is ours in it (`guests/linux/kernel`) is part of this program: a configuration, edits,
//! headers that stand before Linux' own. The compiler finds this program as its assembler
//! (`wedge/afterburn`). Equal inputs give equal kernels: dates, names and paths of the host go into
//! none. A kernel is built once for its inputs and kept in the user's cache (`store`).

mod edits;
mod list;
mod source;
mod store;

use crate::failure::{self, Failure};
use crate::interrupt::Interruptible;
use crate::output;
use crate::run::refused;
use crate::steps::{Step, Steps};
use crate::supervise::{self, AtEnd};
use clap::{Args, Subcommand};
use hosted_vmm::{Image, symbols};
use nix::sys::resource::{UsageWho, getrusage};
use serde::{Deserialize, Serialize};
use source::Source;
use std::collections::VecDeque;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;
pub use store::{Held, hold};
use store::{Inputs, Lock, Made, Store};
use tempfile::{NamedTempFile, TempDir};

/// Changes when this module builds kernels otherwise than before. Configuration, edits, headers and
/// the afterburner's sources count by themselves.
const VERSION: u32 = 4;
/// Digest of the afterburner's sources.
const AFTERBURNER: &str = env!("PARADOR_AFTERBURNER");

macro_rules! ours {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_str!(concat!("../../../guests/linux/kernel/", $name)))),*]
    };
}

const CONFIG: &str = include_str!("../../../guests/linux/kernel/config");
/// In the order in which they are made.
const EDITS: [(&str, &str); 14] = ours![
    "edits/1-checks.diff",
    "edits/2-kernel-addresses.diff",
    "edits/3-user-access.diff",
    "edits/4-user-mappings.diff",
    "edits/5-start.diff",
    "edits/6-address-spaces.diff",
    "edits/7-modules.diff",
    "edits/8-sections.diff",
    "edits/9-accessed-bits.diff",
    "edits/10-forks.diff",
    "edits/11-32-bit-programs.diff",
    "edits/12-more-at-once.diff",
    "edits/13-compiled-filters.diff",
    "edits/14-refused-requests.diff",
];
const HEADERS: [(&str, &str); 9] = ours![
    "include/asm/page_64.h",
    "include/asm/page_64_types.h",
    "include/asm/parador.h",
    "include/asm/parador_module.h",
    "include/asm/pgtable.h",
    "include/asm/pgtable_64.h",
    "include/asm/pgtable_64_types.h",
    "include/asm-generic/access_ok.h",
    "include/asm-generic/fixmap.h",
];
/// What is ours in Linux' tree.
const OURS: &str = "parador";
/// A file there: the date that the kernel says it was built at, which is that of its source.
const DATE: &str = "date";

/// File names in a kernel's folder: the kernel with symbols and relocations, the same for boot loaders of PCs, what it was
/// configured with, its modules as below `/`, and what other modules are built against.
const VMLINUX: &str = "vmlinux";
const BZIMAGE: &str = "bzImage";
const SYMBOLS: &str = "System.map";
const CONFIGURED: &str = "config";
const MODULES: &str = "modules";
const HEADERS_FOLDER: &str = "headers";
/// What the build cost, which is not the same every time.
const COST: &str = "cost.json";

/// What modules are built against, in Linux' tree.
const FOR_MODULES: [&str; 11] = [
    ".config",
    "Makefile",
    "Kbuild",
    "Module.symvers",
    "arch/x86/Makefile",
    "arch/x86/Makefile_32.cpu",
    "arch/x86/include",
    "include",
    "scripts",
    "tools/objtool/objtool",
    OURS,
];

/// Programs that are needed, and their packages.
const NEEDED: [(&str, &str); 9] = [
    ("bc", "bc"),
    ("bison", "bison"),
    ("flex", "flex"),
    ("gcc", "gcc"),
    ("ld", "binutils"),
    ("make", "make"),
    ("cmp", "diffutils"),
    ("depmod", "kmod"),
    ("xz", "xz-utils"),
];
/// A header that Linux' own tools need, and its package.
const NEEDED_HEADER: (&str, &str) = ("/usr/include/libelf.h", "libelf-dev");

/// Kind of a kernel with pads and tables of sites.
const KERNEL_KIND: &str = "previrt";

/// Bytes that a site owns at least: `wedge/afterburn` says what they are for.
const PAD: &str = "pad=8";
/// 64-bit code that runs outside the kernel's image, where nobody rewrites it: outputs, as the front-end takes them. Beside
/// each there are files of the kernel itself.
const SKIPPED: &[&str] = &[
    "arch/x86/boot/*",
    "arch/x86/entry/vdso/vdso-note.o",
    "arch/x86/entry/vdso/vclock_gettime.o",
    "arch/x86/entry/vdso/vgetcpu.o",
    "arch/x86/purgatory/*",
    "arch/x86/realmode/rm/*",
];

/// About how many files are compiled, for those who wait.
const OBJECTS: usize = 1650;
/// Lines of a failed program that are shown.
const SHOWN_LINES: usize = 40;

#[derive(Debug, Subcommand)]
pub enum KernelCommand {
    /// Build a pre-virtualized Linux 6.1 from Debian's source.
    #[command(after_help = "\
Examples:
  parador kernel build
  parador kernel build -o kernel

Prints the SHA-256 of `vmlinux` and its place. Beside it are `bzImage`, `config`, `System.map`,
`modules` (as below /), `headers`, which `parador kernel module` uses, and `cost.json`, the CPU time
of the build. Equal inputs give equal kernels, so a kernel is built once and kept in the user's cache
($XDG_CACHE_HOME/parador, else ~/.cache/parador); that takes 8 to 14 minutes on two CPUs. The newest
three are kept. A second build of the same kernel waits for the first.")]
    Build {
        /// Copy the result to this folder.
        #[arg(short, long, value_name = "FOLDER")]
        output: Option<PathBuf>,
        #[command(flatten)]
        how: KernelArguments,
    },
    /// Build modules for such a kernel from the sources in a folder.
    #[command(after_help = "\
Example: parador kernel module driver

The folder has a Kbuild or Makefile with `obj-m := NAME.o`; the modules appear in it.")]
    Module {
        /// Folder of sources.
        folder: PathBuf,
        /// Folder of `parador kernel build` [default: that of its result, built if need be].
        #[arg(long, value_name = "FOLDER")]
        kernel: Option<PathBuf>,
        #[command(flatten)]
        how: KernelArguments,
    },
    /// List the kernels in the cache.
    #[command(after_help = "\
The one that `parador run` takes when it is given none is marked with `*`.")]
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove kernels from the cache.
    #[command(after_help = "\
Examples:
  parador kernel prune --keep 1
  parador kernel prune --all

Those that were used last are kept, and those that a virtual machine or a build uses now.")]
    Prune {
        /// Keep none.
        #[arg(long, conflicts_with = "keep")]
        all: bool,
        /// Keep so many.
        #[arg(long, value_name = "N", default_value_t = store::KEPT)]
        keep: usize,
    },
    /// Write down a kernel's functions so that perf finds them in machines of `parador run`.
    #[command(after_help = "\
Example: parador kernel symbols vmlinux symbols
         perf record -a -g sleep 10
         perf report --symfs symbols

Every machine of processes has its kernel at the same addresses, so this can be done when the
machine has ended, too. Modules are not in it.")]
    Symbols {
        /// The kernel: `vmlinux` of `parador kernel build`.
        kernel: PathBuf,
        /// Folder for what perf reads.
        folder: PathBuf,
    },
}

#[derive(Debug, Args)]
pub struct KernelArguments {
    /// Source of Linux 6.1: an archive `.tar.xz` or a folder [default: Debian's package
    /// linux-source-6.1].
    #[arg(long, value_name = "PATH")]
    source: Option<PathBuf>,
    /// Without pads and tables of sites, to compare with.
    #[arg(long)]
    plain: bool,
    /// Compilers at the same time [default: one for each CPU].
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,
}

impl KernelArguments {
    fn options(self) -> Options {
        let Self { source, plain, jobs } = self;
        Options { source, plain, jobs: jobs.map(usize::from) }
    }
}

/// Does what the command line says and returns the exit code.
pub fn run(command: KernelCommand) -> Result<u8, Failure> {
    match command {
        KernelCommand::Build { output, how } => {
            let mut kernel = build(&how.options(), &Steps::new())?;
            if let Some(output) = output {
                kernel = kernel.copy_to(&output)?;
            }
            output::print(format!("{}  {}\n", kernel.digest()?, kernel.vmlinux().display()))?;
        }
        KernelCommand::Module { folder, kernel, how } => {
            module(&folder, kernel.as_deref(), &how.options(), &Steps::new())?;
        }
        KernelCommand::List { json } => list::list(json)?,
        KernelCommand::Prune { all, keep } => list::prune(if all { 0 } else { keep })?,
        KernelCommand::Symbols { kernel, folder } => write_symbols(&kernel, &folder)?,
    }
    Ok(0)
}

/// Writes what `perf report --symfs FOLDER` reads of a kernel.
fn write_symbols(kernel: &Path, folder: &Path) -> Result<(), Failure> {
    let bytes = fs::read(kernel).map_err(|error| Failure::file("read", kernel, &error))?;
    let object = Image::parse(&bytes).and_then(|image| symbols::object(&image));
    let object = object.map_err(|error| refused(&error, kernel))?;
    let path = folder.join(symbols::name());
    fs::create_dir_all(folder)
        .and_then(|()| {
            let mut file = NamedTempFile::new_in(folder)?;
            file.write_all(&object)?;
            file.persist(&path).map_err(io::Error::from)
        })
        .map_err(|error| Failure::file("write", &path, &error))?;
    Ok(())
}

/// How to make a kernel.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Linux' source, an archive or a folder; `None`: Debian's package.
    pub source: Option<PathBuf>,
    /// Without pads and tables of sites, to compare with.
    pub plain: bool,
    /// Compilers at the same time; `None`: one for each CPU.
    pub jobs: Option<usize>,
}

/// A kernel in its folder.
#[derive(Debug)]
pub struct Kernel {
    folder: PathBuf,
    // In the cache it stays as long as this lives.
    _held: Option<Held>,
}

impl Kernel {
    /// The kernel.
    pub fn vmlinux(&self) -> PathBuf {
        self.folder.join(VMLINUX)
    }

    /// The SHA-256 of the kernel as hexadecimal digits.
    pub fn digest(&self) -> Result<String, Failure> {
        let path = self.vmlinux();
        store::file_digest(&path).map_err(|error| Failure::file("read", &path, &error))
    }

    /// Copies everything to another folder, which appears complete or not at all.
    pub fn copy_to(&self, output: &Path) -> Result<Self, Failure> {
        let parent = match output.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let failed = |path: &Path, error| Failure::file("make the folder", path, &error);
        fs::create_dir_all(parent).map_err(|error| failed(parent, error))?;
        if output.exists() && !output.join(VMLINUX).is_file() {
            let empty = fs::read_dir(output).is_ok_and(|mut entries| entries.next().is_none());
            if !empty {
                let message = format!("{} holds other things", output.display());
                return Err(Failure::new(failure::USAGE, message)
                    .help("name a folder that is not there yet, or one with a kernel"));
            }
        }
        let interruptible = Interruptible::new()?;
        let work =
            TempDir::with_prefix_in(".partial-", parent).map_err(|error| failed(parent, error))?;
        interruptible.remove_on_signal(work.path());
        let copy = work.path().join("kernel");
        let mut command = tool("cp")?;
        command.arg("--recursive").arg("--preserve=mode,links,timestamps");
        follow(command.arg(&self.folder).arg(&copy), "cp", &interruptible, |_| {})?;
        let put = |from: &Path, to: &Path| {
            fs::rename(from, to).map_err(|error| Failure::file("move", from, &error))
        };
        if output.exists() {
            put(output, &work.path().join("old"))?;
        }
        put(&copy, output)?;
        Ok(Self { folder: output.to_owned(), _held: None })
    }
}

/// The kernel of these options: the one in the cache, else a new one.
pub fn build(options: &Options, steps: &Steps) -> Result<Kernel, Failure> {
    check_host()?;
    let store = Store::open()?;
    let interruptible = Interruptible::new()?;
    let (source, inputs) = steps.run("source", |step| {
        let source = Source::find(options.source.as_deref(), step, &interruptible)?;
        let inputs = inputs(&source, options)?;
        let (Source::Archive(path) | Source::Folder(path)) = &source;
        let text = path.display().to_string();
        Ok(((source, inputs), text))
    })?;
    let (entry, held) = store.get(&inputs, &interruptible, steps, |work, lock| {
        let making = Making { work, options, interruptible: &interruptible, lock };
        let version = steps.run("tree", |step| making.tree(&source, step))?;
        steps.run("configuration", |_| making.configure())?;
        let cost = steps.run("kernel", |step| making.compile(&version, step))?;
        let folder = steps.run("modules", |_| making.collect(&cost))?;
        Ok(Made { folder, linux: version })
    })?;
    Ok(Kernel { folder: entry.folder, _held: Some(held) })
}

/// The kernel in the cache for `parador run` without one ([`list::default`]).
///
/// # Errors
/// There is none; the message names the command that builds one.
pub fn cached() -> Result<Kernel, Failure> {
    let none = |place: String| {
        let text = format!("no kernel is named, and there is none of this parador {place}");
        Failure::new(failure::MISSING_FILE, text).help(
            "`parador kernel build` builds one, once, in 8 to 14 minutes on two CPUs; or name a \
             KERNEL",
        )
    };
    let store = Store::existing()?.ok_or_else(|| none("in the cache".to_owned()))?;
    let entries = store.entries()?;
    let entry = list::default(&entries);
    let entry = entry.ok_or_else(|| none(format!("in {}", store.folder().display())))?;
    Ok(Kernel { folder: entry.folder.clone(), _held: Some(entry.hold()) })
}

/// Builds the modules whose sources are in `folder`, there, for the kernel that [`build`] makes with the same options or
/// that is in the folder `kernel`.
pub fn module(
    folder: &Path,
    kernel: Option<&Path>,
    options: &Options,
    steps: &Steps,
) -> Result<(), Failure> {
    let folder = modules_source(folder)?;
    check_host()?;
    let kernel = match kernel {
        Some(path) => Kernel { folder: path.to_owned(), _held: Some(hold(path)) },
        None => build(options, steps)?,
    };
    let made = kernel.folder.join(HEADERS_FOLDER);
    if !made.join("Makefile").is_file() {
        let message = format!("nothing to build modules against in {}", made.display());
        return Err(Failure::new(failure::MISSING_FILE, message)
            .help("name a folder of `parador kernel build` as --kernel"));
    }
    let interruptible = Interruptible::new()?;
    let bin = tempfile::tempdir().map_err(|error| Failure::os("make a folder", &error))?;
    interruptible.remove_on_signal(bin.path());
    steps.run("module", |step| {
        let mut make = make(&made, (!options.plain).then_some(bin.path()), None)?;
        let mut argument = OsString::from("M=");
        argument.push(&folder);
        make.arg(jobs(options)).arg(argument).arg("modules");
        follow(&mut make, "make", &interruptible, |line| step.now(line))?;
        Ok(((), folder.display().to_string()))
    })
}

/// The folder `folder` of sources of modules as an absolute path, after checking that modules can
/// be built there.
fn modules_source(folder: &Path) -> Result<PathBuf, Failure> {
    let path = folder.canonicalize().map_err(|error| {
        Failure::file("find the folder of the module's sources", folder, &error)
    })?;
    let wrong = |text: String, help: &str| Err(Failure::new(failure::BAD_CONFIG, text).help(help));
    let shown = folder.display();
    if !path.is_dir() {
        return wrong(format!("{shown} is no folder"), "name the folder that the sources are in");
    }
    let Some(makefile) =
        ["Kbuild", "Makefile"].iter().map(|name| path.join(name)).find(|path| path.is_file())
    else {
        let help = "write a Kbuild with `obj-m := NAME.o` for a source NAME.c";
        return wrong(format!("{shown} has neither Kbuild nor Makefile"), help);
    };
    let text = fs::read(&makefile).map_err(|error| Failure::file("read", &makefile, &error))?;
    // Another Makefile may say it.
    let text = String::from_utf8_lossy(&text);
    if !text.contains("obj-") && !text.contains("include") {
        let text = format!("{} names no module to build", makefile.display());
        return wrong(text, "add a line `obj-m := NAME.o` for a source NAME.c");
    }
    // The modules and Linux' own files of the build appear there.
    tempfile::tempfile_in(&path).map_err(|error| Failure::file("write to", folder, &error))?;
    Ok(path)
}

/// A kernel in the making.
struct Making<'a> {
    work: &'a Path,
    options: &'a Options,
    interruptible: &'a Interruptible,
    /// Says to other builders what this one does.
    lock: &'a Lock,
}

impl Making<'_> {
    fn linux(&self) -> PathBuf {
        self.work.join("linux")
    }

    /// `make` in Linux' tree, with what would otherwise be the host's.
    fn make(&self) -> Result<Command, Failure> {
        make(&self.linux(), self.assembler().as_deref(), None)
    }

    /// The folder for the afterburner as the assembler.
    fn assembler(&self) -> Option<PathBuf> {
        (!self.options.plain).then(|| self.work.join("bin"))
    }

    /// Unpacks the source and makes it ours. Returns Linux' version.
    fn tree(&self, source: &Source, step: &Step) -> Result<(String, String), Failure> {
        self.lock.note("unpacking the source");
        let linux = self.linux();
        step.now("unpacking");
        source.unpack(&linux)?;
        let version = source::version(&linux)?;
        let date = source::date(&linux)?;
        for (name, text) in EDITS {
            step.now(name);
            edits::apply(name, text, &linux)?;
        }
        for (name, text) in HEADERS {
            let path = linux.join(OURS).join(name);
            let failed = |error| Failure::file("write", &path, &error);
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder).map_err(failed)?;
            }
            fs::write(&path, text).map_err(failed)?;
        }
        let mut command = tool("date")?;
        let text = command.args(["--utc", "--date", &format!("@{date}")]).output();
        let text = text.map_err(|error| Failure::program("date", &error))?.stdout;
        let path = linux.join(OURS).join(DATE);
        fs::write(&path, text).map_err(|error| Failure::file("write", &path, &error))?;
        let result = format!("Linux {version}, {} edits", EDITS.len());
        Ok((version, result))
    }

    /// Writes the configuration, and checks that Linux takes it as it stands.
    fn configure(&self) -> Result<((), String), Failure> {
        let path = self.linux().join(".config");
        follow(self.make()?.arg("allnoconfig"), "make", self.interruptible, |_| {})?;
        let read =
            || fs::read_to_string(&path).map_err(|error| Failure::file("read", &path, &error));
        let whole = read()? + CONFIG;
        fs::write(&path, whole).map_err(|error| Failure::file("write", &path, &error))?;
        follow(self.make()?.arg("olddefconfig"), "make", self.interruptible, |_| {})?;
        let configured = read()?;
        if let Some(line) = unmet(CONFIG, &configured) {
            let message = format!("Linux cannot be configured with `{line}`");
            return Err(Failure::new(failure::BAD_CONFIG, message).help(
                "the configuration is for Linux 6.1 and the compiler of Debian 12; was another \
                 source given?",
            ));
        }
        let count = configured.lines().filter(|line| line.starts_with("CONFIG_")).count();
        Ok(((), format!("{count} options")))
    }

    fn compile(&self, version: &str, step: &Step) -> Result<(Cost, String), Failure> {
        let before = children_cpu()?;
        let stats = self.work.join("stats");
        let mut make = make(&self.linux(), self.assembler().as_deref(), Some(&stats))?;
        make.arg(jobs(self.options)).args([VMLINUX, BZIMAGE, "modules"]);
        let mut count = 0;
        follow(&mut make, "make", self.interruptible, |line| {
            if let Some(file) = compiled(line) {
                count += 1;
                let text = format!("{count} of about {}: {file}", OBJECTS.max(count));
                self.lock.note(&text);
                step.now(text);
            }
        })?;
        let kind = if self.options.plain { "plain" } else { "pre-virtualized" };
        let cost = Cost {
            cpu_seconds: (children_cpu()? - before).as_secs_f64(),
            afterburner_cpu_seconds: afterburner_cpu(&stats)?.as_secs_f64(),
        };
        let text = format!(
            "Linux {version}, {kind}, {count} files compiled; {:.0} s of CPU, {:.1} % of them for sites",
            cost.cpu_seconds,
            cost.afterburner_cpu_seconds / cost.cpu_seconds * 100.0
        );
        Ok((cost, text))
    }

    /// Puts what is kept into a folder, and returns it.
    fn collect(&self, cost: &Cost) -> Result<(PathBuf, String), Failure> {
        let linux = self.linux();
        let kept = self.work.join("kept");
        let modules = kept.join(MODULES);
        let mut install = OsString::from("INSTALL_MOD_PATH=");
        install.push(&modules);
        let mut make = self.make()?;
        make.arg(install).args(["INSTALL_MOD_STRIP=1", "modules_install"]);
        fs::create_dir_all(&modules)
            .map_err(|error| Failure::file("make the folder", &modules, &error))?;
        let mut count = 0;
        follow(&mut make, "make", self.interruptible, |line| {
            count += usize::from(line.trim_start().starts_with("INSTALL"));
        })?;
        remove_links(&modules)?;

        let mut wanted = vec![
            (VMLINUX, PathBuf::from(VMLINUX)),
            ("arch/x86/boot/bzImage", PathBuf::from(BZIMAGE)),
            (SYMBOLS, PathBuf::from(SYMBOLS)),
        ];
        fs::copy(linux.join(".config"), kept.join(CONFIGURED))
            .map_err(|error| Failure::file("copy", &linux.join(".config"), &error))?;
        let headers = Path::new(HEADERS_FOLDER);
        wanted.extend(FOR_MODULES.map(|name| (name, headers.join(name))));
        for (from, to) in wanted {
            let (from, to) = (linux.join(from), kept.join(to));
            let moved = to.parent().map_or(Ok(()), fs::create_dir_all);
            moved
                .and_then(|()| fs::rename(&from, &to))
                .map_err(|error| Failure::file("move", &from, &error))?;
        }
        let path = kept.join(COST);
        serde_json::to_vec(cost)
            .map_err(io::Error::from)
            .and_then(|text| fs::write(&path, text))
            .map_err(|error| Failure::file("write", &path, &error))?;
        Ok((kept, format!("{count} modules")))
    }
}

/// What a build cost: CPU time of all its programs, and of the afterburner's part among them.
#[derive(Serialize)]
struct Cost {
    cpu_seconds: f64,
    afterburner_cpu_seconds: f64,
}

/// CPU time of the programs that this one started and that ended.
fn children_cpu() -> Result<Duration, Failure> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN)
        .map_err(|error| Failure::os("read the CPU time of programs", &error.into()))?;
    Ok([usage.user_time(), usage.system_time()]
        .map(|time| {
            Duration::from_secs(time.tv_sec().max(0) as u64)
                + Duration::from_micros(time.tv_usec().max(0) as u64)
        })
        .into_iter()
        .sum())
}

/// CPU time of the afterburner, by what it noted.
fn afterburner_cpu(stats: &Path) -> Result<Duration, Failure> {
    #[derive(Deserialize)]
    struct Line {
        cpu_us: u64,
    }
    let failed = |error: io::Error| Failure::file("read", stats, &error);
    let file = match File::open(stats) {
        // Nothing came to it, as in a plain kernel.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Duration::ZERO),
        opened => opened.map_err(failed)?,
    };
    let mut sum = 0;
    for line in serde_json::Deserializer::from_reader(BufReader::new(file)).into_iter::<Line>() {
        sum += line.map_err(|error| failed(error.into()))?.cpu_us;
    }
    Ok(Duration::from_micros(sum))
}

/// The file that a line of `make` says is compiled or assembled for the kernel.
fn compiled(line: &str) -> Option<&str> {
    let mut words = line.split_whitespace();
    let what = words.next()?;
    matches!(what, "CC" | "AS").then(|| words.find(|word| *word != "[M]")).flatten()
}

/// The first line of the wanted configuration that did not come out.
fn unmet<'a>(wanted: &'a str, configured: &str) -> Option<&'a str> {
    let has = |line: &str| configured.lines().any(|other| other == line);
    wanted.lines().find(|line| match line.strip_prefix("# CONFIG_") {
        Some(rest) => rest.split_once(' ').is_some_and(|(name, rest)| {
            // What depends on something else that is off is not mentioned at all.
            rest == "is not set" && configured.contains(&format!("\nCONFIG_{name}="))
        }),
        None => line.starts_with("CONFIG_") && !has(line),
    })
}

/// Removes the links to where the kernel was built.
fn remove_links(modules: &Path) -> Result<(), Failure> {
    let folder = modules.join("lib/modules");
    let failed = |error: io::Error| Failure::file("read", &folder, &error);
    for version in fs::read_dir(&folder).map_err(failed)? {
        let version = version.map_err(failed)?.path();
        for name in ["build", "source"] {
            let path = version.join(name);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(Failure::file("remove", &path, &error));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// Digest of what is Parador's own in its kernels.
fn recipe(plain: bool) -> String {
    let version = VERSION.to_string();
    let files = EDITS.iter().chain(&HEADERS).flat_map(|(name, text)| [*name, *text]);
    let mut parts: Vec<&str> = [&*version, CONFIG].into_iter().chain(files).collect();
    if !plain {
        parts.extend([AFTERBURNER, PAD].into_iter().chain(SKIPPED.iter().copied()));
    }
    store::digest(parts.into_iter().map(str::as_bytes))
}

/// Everything that the kernel is built from.
fn inputs(source: &Source, options: &Options) -> Result<Inputs, Failure> {
    let first_line = |program: &str| {
        let output = tool(program)?.arg("--version").output();
        let output = output.map_err(|error| Failure::program(program, &error))?.stdout;
        let text = String::from_utf8_lossy(&output).into_owned();
        Ok::<_, Failure>(text.lines().next().unwrap_or_default().trim().to_owned())
    };
    Ok(Inputs {
        kind: if options.plain { "plain" } else { KERNEL_KIND }.to_owned(),
        recipe: recipe(options.plain),
        source: source.identity()?,
        compiler: format!("{}; {}", first_line("gcc")?, first_line("ld")?),
    })
}

/// What is needed of the host.
fn check_host() -> Result<(), Failure> {
    let programs = NEEDED
        .iter()
        .filter(|(program, _)| {
            let sbin = Path::new("/sbin").join(program);
            supervise::find(Path::new(program)).is_none() && !sbin.is_file()
        })
        .map(|(_, package)| *package);
    let (header, package) = NEEDED_HEADER;
    let header = (!Path::new(header).is_file()).then_some(package);
    let missing: Vec<&str> = programs.chain(header).collect();
    match missing.is_empty() {
        true => Ok(()),
        false => {
            let message = format!("a kernel cannot be built without {}", missing.join(", "));
            let help = format!("apt-get install {}", missing.join(" "));
            Err(Failure::new(failure::UNAVAILABLE, message).help(help))
        }
    }
}

fn jobs(options: &Options) -> String {
    let cpus = || thread::available_parallelism().map_or(1, usize::from);
    format!("-j{}", options.jobs.unwrap_or_else(cpus))
}

/// A program of the tool chain. The environment could change what is built, so it gets nearly none.
fn tool(name: &str) -> Result<Command, Failure> {
    let mut command = supervise::command(OsStr::new(name), AtEnd::Terminate)?;
    command.env_clear().env("LC_ALL", "C").stdin(Stdio::null());
    // `depmod` is in the last ones.
    let folders = supervise::search_path().chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    // None of them has a colon in its name: they come from such a list.
    command.env("PATH", env::join_paths(folders).unwrap_or_default());
    Ok(command)
}

/// `make` in a tree of Linux. With a folder `bin`, this program stands there as the assembler, and notes in the file `stats`
/// what it did.
fn make(linux: &Path, bin: Option<&Path>, stats: Option<&Path>) -> Result<Command, Failure> {
    // In place, so that no path of the host is in a file's name: `srctree` is `.`.
    let mut compiler = OsString::from("CC=gcc -I$(srctree)/");
    compiler.push(Path::new(OURS).join("include"));
    let mut make = tool("make")?;
    if let Some(bin) = bin {
        let own = env::current_exe().map_err(|error| Failure::os("find this program", &error))?;
        let link = bin.join("as");
        fs::create_dir_all(bin)
            .and_then(|()| match std::os::unix::fs::symlink(own, &link) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
                _ => Ok(()),
            })
            .map_err(|error| Failure::file("make", &link, &error))?;
        compiler.push(" -B");
        compiler.push(bin);
        let mut options = OsString::from(format!("{PAD},skip={}", SKIPPED.join(":")));
        if let Some(stats) = stats {
            options.push(",stats=");
            options.push(stats);
        }
        make.env("PARADOR_AFTERBURN", options);
    }
    let path = linux.join(OURS).join(DATE);
    let date = fs::read_to_string(&path).map_err(|error| Failure::file("read", &path, &error))?;
    make.arg("-C").arg(linux).args(["ARCH=x86_64", "LOCALVERSION="]).arg(compiler);
    make.env("KBUILD_BUILD_TIMESTAMP", date.trim())
        .env("KBUILD_BUILD_USER", "parador")
        .env("KBUILD_BUILD_HOST", "parador")
        .env("KBUILD_BUILD_VERSION", "1");
    Ok(make)
}

/// Runs a command and hands out the lines that it writes.
fn follow(
    command: &mut Command,
    name: &str,
    interruptible: &Interruptible,
    mut line: impl FnMut(&str),
) -> Result<(), Failure> {
    let (reader, writer) = io::pipe().map_err(|error| Failure::os("make a pipe", &error))?;
    let errors = writer.try_clone().map_err(|error| Failure::os("make a pipe", &error))?;
    let spawned = command.stdout(writer).stderr(errors).spawn();
    // Or this process keeps the pipe open.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = spawned.map_err(|error| Failure::program(name, &error))?;
    interruptible.kill_on_signal(&child)?;
    let mut last: VecDeque<String> = VecDeque::new();
    for text in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
        let text = String::from_utf8_lossy(&text).trim_end().to_owned();
        line(&text);
        // With many compilers at once the reason is not the last thing that is said.
        if !text.is_empty() && compiled(&text).is_none() {
            if last.len() == SHOWN_LINES {
                last.pop_front();
            }
            last.push_back(text);
        }
    }
    let status = child.wait().map_err(|error| Failure::os("wait for a program", &error))?;
    match status.success() {
        true => Ok(()),
        false => {
            let lines = Vec::from(last).join("\n");
            Err(Failure::new(failure::INTERNAL, format!("{name} failed:\n{lines}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_make() {
        assert_eq!(compiled("  CC      mm/slub.o"), Some("mm/slub.o"));
        assert_eq!(compiled("  CC [M]  net/bridge/br.o"), Some("net/bridge/br.o"));
        assert_eq!(compiled("  HOSTCC  scripts/kallsyms"), None);
        assert_eq!(compiled(""), None);
    }

    #[test]
    fn every_line_of_the_configuration_must_come_out() {
        let wanted = "# why\nCONFIG_A=y\n# CONFIG_B is not set\n# CONFIG_C is not set\n";
        let configured = "\nCONFIG_A=y\n# CONFIG_B is not set\n";
        assert_eq!(unmet(wanted, configured), None);
        assert_eq!(unmet(wanted, "\nCONFIG_A=m\n"), Some("CONFIG_A=y"));
        assert_eq!(unmet(wanted, "\nCONFIG_A=y\nCONFIG_C=\"x\"\n"), Some("# CONFIG_C is not set"));
    }

    #[test]
    fn all_that_is_ours_is_built_in() {
        let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guests/linux/kernel");
        let known: Vec<&str> = EDITS.iter().chain(&HEADERS).map(|(name, _)| *name).collect();
        for folder in ["edits", "include/asm", "include/asm-generic"] {
            for entry in fs::read_dir(ours.join(folder)).unwrap() {
                let name = format!("{folder}/{}", entry.unwrap().file_name().display());
                assert!(known.contains(&&*name), "{name} is not built in");
            }
        }
    }
}

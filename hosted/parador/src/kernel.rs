//! `parador kernel`: a Linux kernel that runs in either half of the address space, with a table of its sensitive instructions.
//!
//! What is ours in it (`guests/linux/kernel`) is part of this program: a configuration, edits, headers that stand before
//! Linux' own. The compiler finds this program as its assembler (`wedge/afterburn`). Equal inputs give equal kernels: dates,
//! names and paths of the host go into none. A kernel is made once for its inputs; its folder in the cache appears
//! complete or not at all.

mod edits;
mod source;

use crate::failure::{self, Failure};
use crate::interrupt::Interruptible;
use crate::output;
use crate::programs;
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
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;
use tempfile::{NamedTempFile, TempDir};

/// Changes when sites are padded or recorded otherwise than before.
const VERSION: u32 = 3;

macro_rules! ours {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_str!(concat!("../../../guests/linux/kernel/", $name)))),*]
    };
}

const CONFIG: &str = include_str!("../../../guests/linux/kernel/config");
/// In the order in which they are made.
const EDITS: [(&str, &str); 12] = ours![
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
of the build. Equal inputs give equal kernels, so a kernel is built once and kept; that takes
8 to 14 minutes on two CPUs.")]
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
}

impl Kernel {
    /// The kernel.
    pub fn vmlinux(&self) -> PathBuf {
        self.folder.join(VMLINUX)
    }

    /// The SHA-256 of the kernel as hexadecimal digits.
    pub fn digest(&self) -> Result<String, Failure> {
        let path = self.vmlinux();
        let mut command = tool("sha256sum")?;
        let output = command.arg("--binary").arg(&path).output();
        let output = output.map_err(|error| Failure::program("sha256sum", &error))?;
        let text = String::from_utf8_lossy(&output.stdout);
        match text.split_whitespace().next() {
            Some(digest) if output.status.success() => Ok(digest.to_owned()),
            _ => {
                let message = format!("sha256sum cannot read {}", path.display());
                Err(Failure::new(failure::INTERNAL, message))
            }
        }
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
        Ok(Self { folder: output.to_owned() })
    }
}

/// What names of folders of kernels in the making begin with.
const WORK: &str = ".kernel-";
/// A younger one may be about to be locked.
const YOUNG: Duration = Duration::from_secs(60);

/// Removes what builds have left that were killed: folders that nobody has locked. What cannot be removed is in nobody's way but that of other files.
fn remove_abandoned(cache: &Path) {
    for entry in fs::read_dir(cache).into_iter().flatten().flatten() {
        let age = entry.metadata().and_then(|metadata| metadata.modified());
        let is_old = age.is_ok_and(|time| time.elapsed().is_ok_and(|age| age > YOUNG));
        let is_work = entry.file_name().as_encoded_bytes().starts_with(WORK.as_bytes());
        if is_work && is_old && File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Makes a kernel, unless one was made from the same inputs before.
pub fn build(options: &Options, steps: &Steps) -> Result<Kernel, Failure> {
    check_host()?;
    let cache = cache()?;
    let interruptible = Interruptible::new()?;
    let source = steps.run("source", |step| {
        let source = Source::find(options.source.as_deref(), &cache, step, &interruptible)?;
        let (Source::Archive(path) | Source::Folder(path)) = &source;
        let text = path.display().to_string();
        Ok((source, text))
    })?;
    let folder = cache.join(name(&source, options)?);
    let kernel = Kernel { folder };
    if kernel.vmlinux().is_file() {
        steps.run("kernel", |_| Ok(((), "kept from before".to_owned())))?;
        return Ok(kernel);
    }
    remove_abandoned(&cache);
    let failed = |error| Failure::file("make a folder in", &cache, &error);
    let work = TempDir::with_prefix_in(WORK, &cache).map_err(failed)?;
    interruptible.remove_on_signal(work.path());
    // Held until the end, however that comes.
    let lock = File::open(work.path()).map_err(failed)?;
    lock.lock().map_err(failed)?;
    let making = Making { work: work.path(), options, interruptible: &interruptible };

    let version = steps.run("tree", |step| making.tree(&source, step))?;
    steps.run("configuration", |_| making.configure())?;
    let cost = steps.run("kernel", |step| making.compile(&version, step))?;
    let made = steps.run("modules", |_| making.collect(&cost))?;
    match fs::rename(&made, &kernel.folder) {
        // Somebody else was faster.
        Err(_) if kernel.vmlinux().is_file() => {}
        Err(error) => return Err(Failure::file("make", &kernel.folder, &error)),
        Ok(()) => {}
    }
    Ok(kernel)
}

/// Builds the modules whose sources are in `folder`, there, for the kernel that [`build`] makes with the same options or
/// that is in the folder `kernel`.
pub fn module(
    folder: &Path,
    kernel: Option<&Path>,
    options: &Options,
    steps: &Steps,
) -> Result<(), Failure> {
    let made = match kernel {
        Some(path) => path.join(HEADERS_FOLDER),
        None => build(options, steps)?.folder.join(HEADERS_FOLDER),
    };
    check_host()?;
    if !made.join("Makefile").is_file() {
        let message = format!("nothing to build modules against in {}", made.display());
        return Err(Failure::new(failure::MISSING_FILE, message)
            .help("name a folder of `parador kernel build` as --kernel"));
    }
    let folder = folder.canonicalize().map_err(|error| Failure::file("find", folder, &error))?;
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

/// A kernel in the making.
struct Making<'a> {
    work: &'a Path,
    options: &'a Options,
    interruptible: &'a Interruptible,
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
                step.now(format!("{count} of about {}: {file}", OBJECTS.max(count)));
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

/// The folder where kernels are kept.
fn cache() -> Result<PathBuf, Failure> {
    let cache = programs::cache_folder()?;
    fs::create_dir_all(&cache)
        .and_then(|()| cache.canonicalize())
        .map_err(|error| Failure::file("make the folder", &cache, &error))
}

/// A name for the kernel that these inputs make.
fn name(source: &Source, options: &Options) -> Result<String, Failure> {
    let mut hasher = DefaultHasher::new();
    (CONFIG, EDITS, HEADERS).hash(&mut hasher);
    if !options.plain {
        (VERSION, PAD, SKIPPED).hash(&mut hasher);
    }
    source.identity()?.hash(&mut hasher);
    for program in ["gcc", "ld"] {
        let output = tool(program)?.arg("--version").output();
        output.map_err(|error| Failure::program(program, &error))?.stdout.hash(&mut hasher);
    }
    let kind = if options.plain { "plain" } else { "previrt" };
    Ok(format!("linux-{kind}-{:016x}", hasher.finish()))
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
    let mut path = env::var_os("PATH").unwrap_or_default();
    // `depmod` is there.
    path.push(":/usr/sbin:/sbin");
    command.env("PATH", path);
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
    fn what_killed_builds_leave_goes() {
        let cache = tempfile::tempdir().unwrap();
        let make = |name: &str, age| {
            let path = cache.path().join(name);
            fs::create_dir(&path).unwrap();
            fs::write(path.join("file"), "").unwrap();
            let folder = File::open(path).unwrap();
            folder.set_modified(std::time::SystemTime::now() - age).unwrap();
            folder
        };
        let old = 2 * YOUNG;
        let held = make(".kernel-held", old);
        held.lock().unwrap();
        drop(make(".kernel-left", old));
        drop(make(".kernel-young", Duration::ZERO));
        drop(make("linux-1", old));
        remove_abandoned(cache.path());
        let mut left: Vec<_> = fs::read_dir(cache.path()).unwrap().flatten().collect();
        left.sort_by_key(|entry| entry.file_name());
        let left: Vec<_> = left.iter().map(|entry| entry.file_name()).collect();
        assert_eq!(left, [".kernel-held", ".kernel-young", "linux-1"]);
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

//! `parador kernel`: builds a Linux kernel that runs in either half of the address space and has a
//! table of its sensitive instructions.
//!
//! Parador's part (`guests/linux/kernel`) is compiled into `parador`: configuration, patches, and
//! headers that precede Linux' own. The compiler uses `parador` as its assembler
//! (`wedge/afterburn`). Equal inputs give equal kernels: no date, name or path of the host enters
//! the result. A kernel is built once for its inputs and kept in the user's cache (`store`).

mod built;
mod file;
mod layout;
mod list;
mod make;
mod source;
mod store;
mod tools;
mod variant;

use crate::refusal::refused;
pub use built::Kernel;
use clap::{Args, Subcommand};
pub use file::KernelFile;
use hosted_command::digest::digest;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::input;
use hosted_command::interrupt::Interruptible;
use hosted_command::lock::Lock;
use hosted_command::output;
use hosted_command::programs;
use hosted_command::release::{self, Mark};
use hosted_command::steps::{Step, Steps};
use hosted_command::trust;
use hosted_loader::{Image, KernelReader, symbols};
use layout::{BZIMAGE, CONFIGURED, COST, HEADERS_FOLDER, MODULES, SYMBOLS, VMLINUX};
pub(crate) use make::check_path;
use make::{PAD, SKIPPED, TYPES, check_host, make};
use nix::sys::resource::{UsageWho, getrusage};
use serde::{Deserialize, Serialize};
use source::Source;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;
use store::{BuiltKernel, Inputs, Store, hold};
use tempfile::{NamedTempFile, TempDir};
use tools::{compiled, follow, tool};
pub use variant::Variant;

/// Version of the build procedure. Configuration, patches, headers and the afterburner's sources
/// are hashed separately.
const VERSION: u32 = 6;
/// Digest of the afterburner's sources.
const AFTERBURNER: &str = env!("PARADOR_AFTERBURNER");

/// Parador's folder in Linux' tree.
const OURS: &str = "parador";
/// File there with the kernel's build date, which is the date of its source.
const DATE: &str = "date";

/// Files in Linux' tree that external modules are built against.
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

/// Approximate number of compiled files, for the progress display.
const OBJECTS: usize = 2800;

/// Subcommands of `parador kernel`.
#[derive(Debug, Subcommand)]
pub enum KernelCommand {
    /// Build a pre-virtualized Linux 6.1 from Debian's source.
    #[command(after_help = "\
Examples:
  parador kernel build
  parador kernel build -o kernel

Prints the SHA-256 of `vmlinux` and its path. The folder also contains `bzImage`, `config`, `System.map`,
`modules` (as below /), `headers`, which `parador kernel module` uses, and `cost.json`, the CPU time
of the build. Equal inputs give equal kernels, so a kernel is built once and kept in the user's cache
($XDG_CACHE_HOME/parador, else ~/.cache/parador); that takes about 14 minutes on two idle CPUs. The newest
three of each variant are kept. A concurrent build of the same kernel waits for the first.")]
    Build {
        /// Also copy the result to this folder, which must be new, empty or such a copy.
        #[arg(short, long, value_name = "FOLDER")]
        output: Option<PathBuf>,
        /// Options of the build.
        #[command(flatten)]
        how: KernelArguments,
    },
    /// Build external modules for such a kernel from a source folder.
    #[command(after_help = "\
Example: parador kernel module driver

The folder contains a Kbuild or Makefile with `obj-m := NAME.o`; the modules are built in it.")]
    Module {
        /// Source folder.
        folder: PathBuf,
        /// Output folder of `parador kernel build` [default: the cached kernel, built if
        /// necessary].
        #[arg(long, value_name = "FOLDER")]
        kernel: Option<PathBuf>,
        /// Options of the build.
        #[command(flatten)]
        how: KernelArguments,
    },
    /// List the cached kernels.
    #[command(after_help = "\
`*` marks the default kernel of `parador run`.")]
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove cached kernels.
    #[command(after_help = "\
Examples:
  parador kernel prune --keep 1
  parador kernel prune --all

The most recently used kernels are kept, and kernels in use by a VM or a build.")]
    Prune {
        /// Remove all kernels that are not in use.
        #[arg(long, conflicts_with = "keep")]
        all: bool,
        /// Number of kernels of each variant to keep.
        #[arg(long, value_name = "N", default_value_t = store::KEPT)]
        keep: usize,
    },
    /// Write a kernel's symbols in a form that perf uses for VMs of `parador run`.
    #[command(after_help = "\
Example: parador kernel symbols vmlinux symbols
         perf record -a -g sleep 10
         perf report --symfs symbols

All VMs of the process back end have the kernel at the same addresses, so this also works when the
VM has exited. Module symbols are not included.")]
    Symbols {
        /// The kernel: `vmlinux` of `parador kernel build`.
        kernel: PathBuf,
        /// Output folder for `perf report --symfs`.
        folder: PathBuf,
    },
}

/// Options of a kernel build.
#[derive(Debug, Args)]
pub struct KernelArguments {
    /// Linux 6.1 source: an archive `.tar.xz` or a folder [default: Debian's package
    /// linux-source-6.1].
    #[arg(long, value_name = "PATH")]
    source: Option<PathBuf>,
    /// Changes to Linux; all but `previrt` are for comparison.
    #[arg(long, value_name = "VARIANT", default_value = "previrt")]
    variant: Variant,
    /// Number of parallel compilers [default: number of CPUs].
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,
}

impl KernelArguments {
    fn options(self) -> Options {
        let Self { source, variant, jobs } = self;
        Options { source, variant, jobs: jobs.map(usize::from) }
    }
}

/// Executes the command and returns the exit code.
pub fn run(command: KernelCommand) -> Result<u8, Failure> {
    match command {
        KernelCommand::Build { output, how } => {
            // Before a build of many minutes.
            output.as_deref().map(built::check_output).transpose()?;
            let mut kernel = build(&how.options(), &Steps::stderr())?;
            if let Some(output) = output {
                kernel = kernel.copy_to(&output)?;
            }
            output::print(format!("{}  {}\n", kernel.digest()?, kernel.vmlinux().display()))?;
        }
        KernelCommand::Module { folder, kernel, how } => {
            module(&folder, kernel.as_deref(), &how.options(), &Steps::stderr())?;
        }
        KernelCommand::List { json } => list::list(json)?,
        KernelCommand::Prune { all, keep } => list::prune(if all { 0 } else { keep })?,
        KernelCommand::Symbols { kernel, folder } => write_symbols(&kernel, &folder)?,
    }
    Ok(0)
}

/// Writes a kernel's symbols for `perf report --symfs FOLDER`.
fn write_symbols(kernel: &Path, folder: &Path) -> Result<(), Failure> {
    let source = KernelReader::new(input::open(kernel)?).file_error("read", kernel)?;
    let object = Image::parse(&source).and_then(|image| symbols::object(&image));
    let object = object.map_err(|error| refused(&error, kernel))?;
    let path = folder.join(symbols::name());
    fs::create_dir_all(folder)
        .and_then(|()| {
            let mut file = NamedTempFile::new_in(folder)?;
            file.write_all(&object)?;
            file.persist(&path).map_err(io::Error::from)
        })
        .file_error("write", &path)?;
    Ok(())
}

/// Options of a kernel build.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Linux source, an archive or a folder; `None`: Debian's package.
    pub source: Option<PathBuf>,
    /// Changes to Linux.
    pub variant: Variant,
    /// Number of parallel compilers; `None`: one per CPU.
    pub jobs: Option<usize>,
}

/// Returns the cached kernel for these options, else builds it.
pub fn build(options: &Options, steps: &Steps) -> Result<Kernel, Failure> {
    check_host()?;
    let store = Store::open()?;
    // Before the source is fetched. The build's folder is there, with a name of letters and digits.
    check_path(store.folder())?;
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
        let version = steps.run("tree", |step| making.tree(&source, &inputs.source, step))?;
        steps.run("configuration", |_| making.configure())?;
        let cost = steps.run("kernel", |step| making.compile(&version, step))?;
        let folder = steps.run("modules", |_| making.collect(&cost))?;
        Ok(BuiltKernel { folder, linux: version })
    })?;
    Ok(Kernel::new(entry.folder, held))
}

/// Returns the kernel that was installed with `parador` ([`programs::installed`]).
///
/// # Errors
/// Another user can change it ([`trust::check`]); the folder has no kernel.
pub fn installed() -> Result<Option<PathBuf>, Failure> {
    let Some(folder) = programs::installed()? else { return Ok(None) };
    let path = folder.join(VMLINUX);
    if !path.is_file() {
        let text = format!("no such kernel: {}", path.display());
        return Err(Failure::new(failure::MISSING_FILE, text)
            .help("install the package again, or give a KERNEL"));
    }
    trust::check(&path).map(Some)
}

/// Returns the default kernel of `parador run` from the cache ([`list::default`]).
///
/// # Errors
/// The cache has none; the message names the command that builds one.
pub fn cached() -> Result<Kernel, Failure> {
    let none = |place: String| {
        let text = format!("no kernel given, and no kernel of this parador version {place}");
        Failure::new(failure::MISSING_FILE, text).help(
            "`parador kernel build` builds one in about 14 minutes on two idle CPUs; or give \
             a KERNEL",
        )
    };
    let store = Store::existing()?.ok_or_else(|| none("in the cache".to_owned()))?;
    let mut entries = store.entries()?;
    loop {
        let entry = list::default(&entries);
        let entry = entry.ok_or_else(|| none(format!("in {}", store.folder().display())))?;
        let folder = entry.folder.clone();
        match entry.hold() {
            Some(held) => return Ok(Kernel::new(folder, held)),
            // Another process has removed it meanwhile.
            None => entries.retain(|entry| entry.folder != folder),
        }
    }
}

/// Describes the default kernel of `parador run`: its release and its path; `None`: there is none,
/// or it cannot be used.
pub fn describe_default() -> Option<String> {
    let shown = |linux: &str, path: &Path| format!("Linux {linux}, {}", path.display());
    match installed() {
        Ok(Some(path)) => {
            let source = File::open(&path).and_then(KernelReader::new).ok()?;
            let mark = Mark::of(source.parts()).filter(|mark| mark.release == release::RELEASE)?;
            Some(shown(mark.kernel, &path))
        }
        Ok(None) => {
            let entries = Store::existing().ok()??.entries().ok()?;
            let entry = list::default(&entries)?;
            Some(shown(&entry.record.linux, &entry.folder.join(VMLINUX)))
        }
        Err(_) => None,
    }
}

/// Builds the modules with sources in `folder`, in that folder, for the kernel of [`build`] with
/// these options or for the one in the folder `kernel`.
pub fn module(
    folder: &Path,
    kernel: Option<&Path>,
    options: &Options,
    steps: &Steps,
) -> Result<(), Failure> {
    let folder = modules_source(folder)?;
    check_host()?;
    let interruptible = Interruptible::new()?;
    let bin = options.variant.is_padded().then(tempfile::tempdir).transpose();
    let bin = bin.os_error("create a folder")?;
    let bin = bin.as_ref().map(TempDir::path);
    if let Some(bin) = bin {
        interruptible.remove_on_signal(bin);
        check_path(bin)?;
    }
    let kernel = match kernel {
        Some(path) => Kernel::new(path.to_owned(), hold(path)?),
        None => build(options, steps)?,
    };
    let made = kernel.folder.join(HEADERS_FOLDER);
    if !made.join("Makefile").is_file() {
        let message = format!("no kernel headers in {}", made.display());
        return Err(Failure::new(failure::MISSING_FILE, message)
            .help("use --kernel with an output folder of `parador kernel build`"));
    }
    steps.run("module", |step| {
        let mut make = make(&made, bin, None)?;
        let mut argument = OsString::from("M=");
        argument.push(&folder);
        make.arg(jobs(options)).arg(argument).arg("modules");
        follow(&mut make, "make", &interruptible, |line| step.now(line))?;
        Ok(((), folder.display().to_string()))
    })
}

/// Checks that modules can be built in `folder` and returns it as an absolute path.
fn modules_source(folder: &Path) -> Result<PathBuf, Failure> {
    let path = folder.canonicalize().file_error("find the module source folder", folder)?;
    check_path(&path)?;
    let wrong = |text: String, help: &str| Err(Failure::new(failure::BAD_CONFIG, text).help(help));
    let shown = folder.display();
    if !path.is_dir() {
        return wrong(
            format!("{shown} is not a folder"),
            "use the folder that contains the sources",
        );
    }
    let Some(makefile) =
        ["Kbuild", "Makefile"].iter().map(|name| path.join(name)).find(|path| path.is_file())
    else {
        let help = "write a Kbuild with `obj-m := NAME.o` for a source NAME.c";
        return wrong(format!("{shown} has neither Kbuild nor Makefile"), help);
    };
    let text = fs::read(&makefile).file_error("read", &makefile)?;
    // An included Makefile may define the modules.
    let text = String::from_utf8_lossy(&text);
    if !text.contains("obj-") && !text.contains("include") {
        let text = format!("{} defines no module", makefile.display());
        return wrong(text, "add a line `obj-m := NAME.o` for a source NAME.c");
    }
    // The modules and Linux' intermediate files are created there.
    tempfile::tempfile_in(&path).file_error("write to", folder)?;
    Ok(path)
}

/// A kernel build in progress.
struct Making<'a> {
    work: &'a Path,
    options: &'a Options,
    interruptible: &'a Interruptible,
    /// Reports progress to other builders.
    lock: &'a Lock,
}

impl Making<'_> {
    fn linux(&self) -> PathBuf {
        self.work.join("linux")
    }

    /// Creates a `make` command for Linux' tree, with reproducible settings.
    fn make(&self) -> Result<Command, Failure> {
        make(&self.linux(), self.assembler().as_deref(), None)
    }

    /// Returns the folder with the afterburner as the assembler.
    fn assembler(&self) -> Option<PathBuf> {
        self.options.variant.is_padded().then(|| self.work.join("bin"))
    }

    /// Unpacks the source with this identity and applies Parador's changes. Returns Linux' version.
    fn tree(
        &self,
        source: &Source,
        identity: &str,
        step: &Step,
    ) -> Result<(String, String), Failure> {
        self.lock.note("unpacking the source");
        let linux = self.linux();
        step.now("unpacking");
        source.unpack_unchanged(identity, &linux)?;
        let version = source::version(&linux)?;
        let date = source::date(&linux)?;
        self.options.variant.apply(&linux, |name| step.now(name))?;
        let mut command = tool("date")?;
        let text = command.args(["--utc", "--date", &format!("@{date}")]).output();
        let text = text.start_error("date")?.stdout;
        let path = linux.join(OURS).join(DATE);
        fs::create_dir_all(linux.join(OURS))
            .and_then(|()| fs::write(&path, text))
            .file_error("write", &path)?;
        let count = self.options.variant.patches().count();
        let result = format!("Linux {version}, {count} patches");
        Ok((version, result))
    }

    /// Writes the configuration and checks that Linux accepts all of it.
    fn configure(&self) -> Result<((), String), Failure> {
        let path = self.linux().join(".config");
        follow(self.make()?.arg("allnoconfig"), "make", self.interruptible, |_| {})?;
        let read = || fs::read_to_string(&path).file_error("read", &path);
        let wanted = self.options.variant.config();
        let whole = read()? + &wanted;
        fs::write(&path, whole).file_error("write", &path)?;
        follow(self.make()?.arg("olddefconfig"), "make", self.interruptible, |_| {})?;
        let configured = read()?;
        if let Some(line) = unmet(&wanted, &configured) {
            let message = format!("Linux rejects the configuration line `{line}`");
            return Err(Failure::new(failure::BAD_CONFIG, message).help(
                "the configuration is for Linux 6.1 and the compiler of Debian 12; check \
                 --source",
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
        let kind = self.options.variant.name();
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

    /// Moves the results into a folder and returns it.
    fn collect(&self, cost: &Cost) -> Result<(PathBuf, String), Failure> {
        let linux = self.linux();
        let kept = self.work.join("kept");
        let modules = kept.join(MODULES);
        let mut install = OsString::from("INSTALL_MOD_PATH=");
        install.push(&modules);
        let mut make = self.make()?;
        make.arg(install).args(["INSTALL_MOD_STRIP=1", "modules_install"]);
        fs::create_dir_all(&modules).file_error("create the folder", &modules)?;
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
        // The types are in a section of their own.
        let mut strip = tool("objcopy")?;
        follow(
            strip.arg("--strip-debug").arg(linux.join(VMLINUX)),
            "objcopy",
            self.interruptible,
            |_| {},
        )?;
        fs::copy(linux.join(".config"), kept.join(CONFIGURED))
            .file_error("copy", &linux.join(".config"))?;
        let headers = Path::new(HEADERS_FOLDER);
        wanted.extend(FOR_MODULES.map(|name| (name, headers.join(name))));
        for (from, to) in wanted {
            let (from, to) = (linux.join(from), kept.join(to));
            let moved = to.parent().map_or(Ok(()), fs::create_dir_all);
            moved.and_then(|()| fs::rename(&from, &to)).file_error("move", &from)?;
        }
        let path = kept.join(COST);
        serde_json::to_vec(cost)
            .map_err(io::Error::from)
            .and_then(|text| fs::write(&path, text))
            .file_error("write", &path)?;
        Ok((kept, format!("{count} modules")))
    }
}

/// Cost of a build: CPU time of all programs, and the afterburner's part of it.
#[derive(Serialize)]
struct Cost {
    cpu_seconds: f64,
    afterburner_cpu_seconds: f64,
}

/// Returns the CPU time of exited child processes.
fn children_cpu() -> Result<Duration, Failure> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).os_error("read the CPU time of programs")?;
    Ok([usage.user_time(), usage.system_time()]
        .map(|time| {
            Duration::from_secs(time.tv_sec().max(0) as u64)
                + Duration::from_micros(time.tv_usec().max(0) as u64)
        })
        .into_iter()
        .sum())
}

/// Returns the afterburner's CPU time, from its records.
fn afterburner_cpu(stats: &Path) -> Result<Duration, Failure> {
    #[derive(Deserialize)]
    struct Line {
        cpu_us: u64,
    }
    let failed = |error: io::Error| Failure::file("read", stats, &error);
    let file = match File::open(stats) {
        // A kernel without padding has no records.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Duration::ZERO),
        opened => opened.map_err(failed)?,
    };
    let mut sum = 0;
    for line in serde_json::Deserializer::from_reader(BufReader::new(file)).into_iter::<Line>() {
        sum += line.map_err(|error| failed(error.into()))?.cpu_us;
    }
    Ok(Duration::from_micros(sum))
}

/// Returns the first requested configuration line that is not in effect.
fn unmet<'a>(wanted: &'a str, configured: &str) -> Option<&'a str> {
    let has = |line: &str| configured.lines().any(|other| other == line);
    wanted.lines().find(|line| match line.strip_prefix("# CONFIG_") {
        Some(rest) => rest.split_once(' ').is_some_and(|(name, rest)| {
            // Options with unmet dependencies are not listed at all.
            rest == "is not set" && configured.contains(&format!("\nCONFIG_{name}="))
        }),
        None => line.starts_with("CONFIG_") && !has(line),
    })
}

/// Removes the links to the build folder.
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

/// Returns the digest of Parador's part of a kernel.
fn recipe(variant: Variant) -> String {
    let version = VERSION.to_string();
    let config = variant.config();
    let files = variant.patches().chain(variant.headers()).flat_map(|(name, text)| [*name, *text]);
    let mut parts: Vec<&str> =
        [&*version, &*config].into_iter().chain(files).chain(TYPES.iter().copied()).collect();
    if variant.is_padded() {
        parts.extend([AFTERBURNER, PAD].into_iter().chain(SKIPPED.iter().copied()));
    }
    digest(parts.into_iter().map(str::as_bytes))
}

/// Returns all inputs of a kernel.
fn inputs(source: &Source, options: &Options) -> Result<Inputs, Failure> {
    let first_line = |program: &str| {
        let output = tool(program)?.arg("--version").output();
        let output = output.start_error(program)?.stdout;
        let text = String::from_utf8_lossy(&output).into_owned();
        Ok::<_, Failure>(text.lines().next().unwrap_or_default().trim().to_owned())
    };
    Ok(Inputs {
        kind: options.variant.name().to_owned(),
        recipe: recipe(options.variant),
        source: source.identity()?,
        compiler: format!(
            "{}; {}; pahole {}",
            first_line("gcc")?,
            first_line("ld")?,
            first_line("pahole")?
        ),
    })
}

fn jobs(options: &Options) -> String {
    let cpus = || thread::available_parallelism().map_or(1, usize::from);
    format!("-j{}", options.jobs.unwrap_or_else(cpus))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hosted_command::input::testing::with_named_pipe;

    #[test]
    fn symbols_do_not_wait_for_a_named_pipe() {
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join("symbols");
        let failure = with_named_pipe(move |pipe| write_symbols(pipe, &to)).unwrap_err();
        assert_eq!(failure.code(), failure::BAD_CONFIG);
    }

    #[test]
    fn modules_are_not_built_in_a_path_of_several_words() {
        let folder = tempfile::tempdir().unwrap();
        let [one, two] = ["driver", "my driver"].map(|name| folder.path().join(name));
        for path in [&one, &two] {
            fs::create_dir(path).unwrap();
            fs::write(path.join("Kbuild"), "obj-m := driver.o\n").unwrap();
        }
        assert_eq!(modules_source(&one).unwrap(), one.canonicalize().unwrap());
        let failure = modules_source(&two).unwrap_err();
        assert_eq!(failure.code(), failure::BAD_CONFIG);
        assert!(failure.to_string().contains("separates words"), "{failure}");
    }

    #[test]
    fn every_line_of_the_configuration_must_come_out() {
        let wanted = "# why\nCONFIG_A=y\n# CONFIG_B is not set\n# CONFIG_C is not set\n";
        let configured = "\nCONFIG_A=y\n# CONFIG_B is not set\n";
        assert_eq!(unmet(wanted, configured), None);
        assert_eq!(unmet(wanted, "\nCONFIG_A=m\n"), Some("CONFIG_A=y"));
        assert_eq!(unmet(wanted, "\nCONFIG_A=y\nCONFIG_C=\"x\"\n"), Some("# CONFIG_C is not set"));
    }
}

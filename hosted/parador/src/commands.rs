//! The command line.

use crate::afterburn::{self, AfterburnCommand};
use crate::check::{self, Overrides, Plan};
use crate::ctl;
use crate::description::{Board, Size};
use crate::doctor;
use crate::emulate;
use crate::failure::{self, Failure};
use crate::graph::{self, Graph};
use crate::image::{self, Image};
use crate::kernel::{self, KernelCommand};
use crate::output::print;
use crate::programs::{Named, Programs};
use crate::rootfs;
use crate::run;
use crate::steps::Steps;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Hosts whole operating systems on Parador's microhypervisor.
#[derive(Debug, Parser)]
#[command(
    name = "parador",
    version,
    after_help = "\
Example: parador system emulate examples/one-linux.toml"
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a kernel by KVM, or a pre-virtualized one as ordinary processes of this host.
    #[command(after_help = "\
Examples:
  parador run vmlinux -i busybox
  parador run -k vmlinux -i initrd.cpio -p \"root=/dev/ram0\" -m 512M --timeout 60s
  parador run vmlinux -i busybox -d disk.img -d path=data.img,ro=on,id=data
  parador run --config vm.toml -m 2G

On a terminal all keys go to the guest, Ctrl-C too; Ctrl-A X ends the machine.

Exit codes: 0 the guest powered off; 1-63 code of the guest; 64 usage; 65 bad kernel or option;
66 missing file; 69 something needed is not available; 70 internal; 71 operating system;
77 permission; 80 guest panic; 81 guest triple fault; 83 guest reset; 124 time limit;
128+n signal n.")]
    Run(Box<run::Options>),
    /// Ask a running machine, or make it pause, go on, start anew, end.
    #[command(after_help = "\
Examples:
  parador run vmlinux -i busybox --api-socket vm.sock
  parador ctl -s vm.sock status
  parador ctl -s vm.sock shutdown

Exit codes: 0 done; 1 the machine is not in the state for it; 64 usage; 66 no such socket;
69 nobody answers; 71 operating system; 77 permission.")]
    Ctl(ctl::Options),
    /// Say what this host has of what virtual machines need.
    #[command(after_help = "\
Exit codes: 0 `parador run` works here; 69 it does not, as the line MISSING says.")]
    Doctor(doctor::Options),
    /// Make, check and start bootable systems.
    #[command(subcommand)]
    System(SystemCommand),
    /// Make disks for guests.
    #[command(subcommand)]
    Rootfs(RootfsCommand),
    /// Pre-virtualize kernels while they are assembled, and check them.
    #[command(subcommand)]
    Afterburn(AfterburnCommand),
    /// Make Linux kernels that run with and without a hypervisor below them.
    #[command(subcommand)]
    Kernel(KernelCommand),
}

#[derive(Debug, Subcommand)]
enum RootfsCommand {
    /// Make a disk with Debian, and the kernel and RAM disk that it boots with.
    #[command(after_help = "\
Examples:
  sudo parador rootfs debian -o debian
  sudo parador rootfs debian -o debian --size 8G --include postgresql,git --ssh-key ~/.ssh/id_ed25519.pub

The folder then has `disk.img`, `vmlinuz`, `initrd.img`, and without --ssh-key a pair of keys `ssh-key`:
see examples/debian.toml. On the console root logs in without a password, by ssh with the key only.
Called again, it leaves the disk as it is. Packages are kept for the next disk.")]
    Debian {
        /// Folder for the disk and what belongs to it.
        #[arg(short, long, value_name = "FOLDER")]
        output: PathBuf,
        /// Size of the disk. It takes as much room as is used of it.
        #[arg(long, value_name = "SIZE", value_parser = Size::parse, default_value = "4G")]
        size: Size,
        /// Further packages.
        #[arg(long, value_name = "PACKAGE", value_delimiter = ',')]
        include: Vec<String>,
        /// Public key that may log in, instead of a new one.
        #[arg(long, value_name = "FILE")]
        ssh_key: Option<PathBuf>,
        /// Debian's release.
        #[arg(long, default_value = "bookworm")]
        suite: String,
        /// Where packages and their updates come from: a mirror of Debian, whose signature is
        /// verified.
        #[arg(long, value_name = "URL", default_value = "http://deb.debian.org/debian")]
        mirror: String,
        /// Where security updates come from; `none`: nowhere [default: `debian-security` beside a
        /// mirror that ends in `debian`].
        #[arg(long, value_name = "URL")]
        security_mirror: Option<String>,
        /// Make the disk anew; what is on it is lost.
        #[arg(long)]
        force: bool,
    },
}

#[derive(Debug, Subcommand)]
enum SystemCommand {
    /// Check a system description and say what was proved.
    #[command(after_help = "Example: parador system check examples/one-linux.toml")]
    Check {
        /// The description, a TOML file.
        file: PathBuf,
        #[command(flatten)]
        programs: Named,
    },
    /// Draw who holds which capability to what.
    #[command(after_help = "\
Examples:
  parador system graph examples/three-guests.toml -o three-guests.svg
  parador system graph --dot examples/three-guests.toml | dot -Tpdf > three-guests.pdf")]
    Graph {
        /// The description, a TOML file.
        file: PathBuf,
        /// A picture, or text for Graphviz [default: as the name of the output ends, else svg].
        #[arg(long, value_name = "FORMAT")]
        format: Option<Format>,
        /// The same as --format dot.
        #[arg(long, conflicts_with = "format")]
        dot: bool,
        /// Write to this file instead of standard output.
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Build a bootable image from a system description.
    #[command(after_help = "\
Examples:
  parador system build examples/one-linux.toml
  parador system build examples/one-linux.toml -o image --iso parador.iso

The image is a folder with `kernel.elf` (PVH and multiboot2) and `bundle`, its boot module.")]
    Build {
        /// The description, a TOML file.
        file: PathBuf,
        #[command(flatten)]
        place: Place,
        /// Also make a CD-ROM image that GRUB boots.
        #[arg(long, value_name = "FILE")]
        iso: Option<PathBuf>,
    },
    /// Build a system and start it in QEMU, with the terminal as its console.
    #[command(after_help = "\
Examples:
  parador system emulate examples/one-linux.toml
  parador system emulate examples/one-linux.toml --timeout 60s </dev/null
  parador system emulate examples/one-linux.toml --cpus 4 -- -gdb tcp::1234

On a terminal all keys go to the guest, Ctrl-C too; Ctrl-A X ends the machine.

Exit codes: 0 the guest powered off; 1-63 code of the guest; 64 usage; 65 bad description;
66 missing file; 69 something needed is not installed; 70 internal; 71 operating system;
77 permission; 80 guest panic; 81 guest triple fault; 82 watchdog; 83 guest reset;
124 time limit; 128+n signal n.")]
    Emulate(EmulateArguments),
}

/// Formats of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A picture.
    Svg,
    /// The language of Graphviz.
    Dot,
}

impl Format {
    /// As a file's name ends.
    fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "svg" => Some(Self::Svg),
            "dot" | "gv" => Some(Self::Dot),
            _ => None,
        }
    }
}

#[derive(Debug, Args)]
struct EmulateArguments {
    /// The description, a TOML file.
    file: PathBuf,
    #[command(flatten)]
    place: Place,
    /// CPUs of the machine, instead of the description's.
    #[arg(long, value_name = "N")]
    cpus: Option<u32>,
    /// Memory of the machine, instead of the description's.
    #[arg(short, long, value_name = "SIZE", value_parser = Size::parse)]
    memory: Option<Size>,
    /// End the machine after this time: 60s, 5m, 1h.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    timeout: Option<Duration>,
    /// Count instructions instead of time: every run takes the same course.
    #[arg(long)]
    icount: bool,
    /// File for the kernel's log [default: kernel.log in the image's folder].
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Boot from a CD-ROM image through GRUB.
    #[arg(long)]
    iso: bool,
    /// Start the image that is there from before.
    #[arg(long)]
    no_build: bool,
    /// QEMU's program.
    #[arg(
        long,
        value_name = "PROGRAM",
        env = "PARADOR_QEMU",
        default_value = "qemu-system-x86_64"
    )]
    qemu: PathBuf,
    /// Further arguments for QEMU.
    #[arg(last = true, value_name = "QEMU ARGUMENTS")]
    extra: Vec<OsString>,
}

#[derive(Debug, Args)]
struct Place {
    /// Folder for the image [default: target/images/NAME in a source tree].
    #[arg(short, long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    #[command(flatten)]
    programs: Named,
}

impl Place {
    fn options(self, iso: Option<PathBuf>) -> image::Options {
        image::Options { output: self.output, programs: self.programs, iso }
    }
}

/// File name of the kernel's log in an image's folder.
const LOG: &str = "kernel.log";
/// File name of the CD-ROM image in an image's folder.
const ISO: &str = "boot.iso";

/// Does what the command line says and returns the exit code.
pub fn run(cli: Cli) -> Result<u8, Failure> {
    match cli.command {
        Command::Run(options) => run::run(&options),
        Command::Ctl(options) => ctl::run(&options),
        Command::Doctor(options) => doctor::run(&options),
        Command::System(command) => system(command),
        Command::Afterburn(command) => afterburn::run(command),
        Command::Kernel(command) => kernel::run(command),
        Command::Rootfs(RootfsCommand::Debian {
            output,
            size,
            include,
            ssh_key,
            suite,
            mirror,
            security_mirror,
            force,
        }) => {
            let options = rootfs::Options {
                output,
                size,
                include,
                ssh_key,
                suite,
                mirror,
                security_mirror,
                force,
            };
            rootfs::debian(&options, &Steps::new())?;
            print(format!("{}\n", options.output.display()))?;
            Ok(0)
        }
    }
}

fn system(command: SystemCommand) -> Result<u8, Failure> {
    match command {
        SystemCommand::Check { file, programs: named } => {
            let plan = check::check(&file, Overrides::default())?;
            // A description can be judged where Parador itself is not, or not yet; but a folder that was
            // named exists.
            let programs = match Programs::find(&named) {
                Ok(programs) => programs.finished(),
                Err(failure) if named.is_some() || failure.code() != failure::MISSING_FILE => {
                    return Err(failure);
                }
                Err(_) => None,
            };
            programs.iter().try_for_each(|folder| plan.check_programs(folder))?;
            let state = match programs {
                Some(folder) => format!("all there, in {}", folder.display()),
                None => "not built yet: `system build` looks for them".to_owned(),
            };
            print(format!("{plan}  programs {state}\n"))?;
            Ok(0)
        }
        SystemCommand::Graph { file, format, dot, output } => {
            let format = if dot { Some(Format::Dot) } else { format };
            let format = format.or_else(|| output.as_deref().and_then(Format::of));
            graph(&file, format.unwrap_or(Format::Svg), output.as_deref())
        }
        SystemCommand::Build { file, place, iso } => {
            let plan = check::check(&file, Overrides::default())?;
            let options = place.options(iso);
            let folder = Image::folder(&file, &options)?;
            image::build(&plan, &folder, &options, &Steps::new())?;
            let made = [&folder].into_iter().chain(&options.iso);
            let lines: String = made.map(|path| format!("{}\n", path.display())).collect();
            print(lines)?;
            Ok(0)
        }
        SystemCommand::Emulate(arguments) => emulate(arguments),
    }
}

fn graph(file: &Path, format: Format, output: Option<&Path>) -> Result<u8, Failure> {
    let graph = Graph::new(&check::check(file, Overrides::default())?);
    let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy();
    let text = match format {
        Format::Svg => graph::svg::render(&graph, &name),
        Format::Dot => graph::dot::render(&graph, &name),
    };
    match output {
        Some(path) => fs::write(path, text).map_err(|error| Failure::file("write", path, &error)),
        None => print(text),
    }?;
    Ok(0)
}

fn emulate(arguments: EmulateArguments) -> Result<u8, Failure> {
    let EmulateArguments { file, place, cpus, memory, .. } = arguments;
    let plan: Plan = check::check(&file, Overrides { cpus, memory })?;
    if plan.board != Board::QemuQ35 {
        let message = format!("{} is not for an emulated machine", file.display());
        return Err(Failure::new(failure::BAD_CONFIG, message).help(
            "set [system] board = \"qemu-q35\", or build it with --iso and boot a real machine",
        ));
    }
    let mut options = place.options(None);
    let folder = Image::folder(&file, &options)?;
    options.iso = arguments.iso.then(|| folder.join(ISO));
    let image = match arguments.no_build {
        true => Image::existing(&folder)?,
        false => image::build(&plan, &folder, &options, &Steps::new())?,
    };
    let emulation = emulate::Options {
        qemu: arguments.qemu,
        timeout: arguments.timeout,
        icount: arguments.icount,
        log: arguments.log.unwrap_or_else(|| folder.join(LOG)),
        iso: options.iso,
        extra: arguments.extra,
    };
    emulate::run(&plan, &image, &emulation)
}

/// Reads a time: digits and s, m or h; seconds without a unit.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    let refuse = || format!("`{text}` is not a time: write digits and s, m or h, as in 60s");
    let (digits, unit) = match text.strip_suffix(['s', 'm', 'h']) {
        Some(digits) => (digits, &text[digits.len()..]),
        None => (text, "s"),
    };
    let seconds = match unit {
        "h" => 3600,
        "m" => 60,
        _ => 1,
    };
    let number: u64 = digits.parse().map_err(|_| refuse())?;
    match number.checked_mul(seconds).filter(|&seconds| seconds > 0) {
        Some(seconds) => Ok(Duration::from_secs(seconds)),
        None => Err(refuse()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn times() {
        assert_eq!(parse_time("60s"), Ok(Duration::from_secs(60)));
        assert_eq!(parse_time("5m"), Ok(Duration::from_secs(300)));
        assert_eq!(parse_time("1h"), Ok(Duration::from_secs(3600)));
        assert_eq!(parse_time("7"), Ok(Duration::from_secs(7)));
        for wrong in
            ["", "s", "-1", "0s", "1d", "1.5s", "99999999999999999999h", "6148914691236517205h"]
        {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }
}

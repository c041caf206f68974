//! Command line of `parador`: subcommands, options and help texts.

use clap::{Args, Parser, Subcommand, ValueEnum};
use hosted_command::architecture::Architecture;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::output::print;
use hosted_command::programs::{Named, Programs};
use hosted_command::release::RELEASE;
use hosted_command::steps::Steps;
use hosted_command::value::{Size, parse_time};
use hosted_kbuild::afterburn::{self, AfterburnCommand};
use hosted_kbuild::kernel::{self, KernelCommand};
use hosted_monitor::ctl;
use hosted_monitor::doctor;
use hosted_monitor::emulate;
use hosted_monitor::fleet;
use hosted_monitor::run;
use hosted_system::description::Board;
use hosted_system::graph::{self, Graph};
use hosted_system::image::{self, Image};
use hosted_system::rootfs;
use hosted_system::validate::{self, Overrides};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Runs virtual machines on Parador's microhypervisor or on Linux.
#[derive(Debug, Parser)]
#[command(
    name = "parador",
    version = RELEASE,
    after_help = "\
Example: parador system emulate examples/one-linux.toml"
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a kernel in a VM, with KVM or as ordinary processes of this host.
    #[command(after_help = "\
Examples:
  parador run vmlinux -i busybox
  parador run -k vmlinux -i initrd.cpio -p \"root=/dev/ram0\" -m 512M --timeout 60s
  parador run vmlinux -i busybox -d disk.img -d path=data.img,ro=on,id=data
  parador run --config vm.toml -m 2G

On a terminal all keys go to the guest, Ctrl-C too; Ctrl-A X kills the VM.

Exit codes: 0 the guest powered off; 1-63 code of the guest; 64 usage; 65 invalid kernel or option;
66 missing file; 69 required facility unavailable; 70 internal error; 71 OS error;
77 permission denied; 80 guest panic; 81 guest triple fault; 83 guest reset; 124 time limit;
128+n signal n.")]
    Run(Box<run::Options>),
    /// Run one command in a VM of its own.
    #[command(after_help = "\
Examples:
  parador exec / -- uname -r
  parador exec --net user debian-root -- apt-get update
  parador exec disk.img --ro /srv -- make -C /srv/project check

The current folder is shared with changes, at its own path, and the command has the caller's user ID.

Exit codes: the command's own, 0-255; 128+n signal n; 124 time limit; 125 Parador failed;
126 the command cannot be started; 127 it does not exist.")]
    Exec(Box<hosted_exec::Options>),
    /// Run a VM by the command line of QEMU, as tools pass it.
    #[command(
        disable_help_flag = true,
        after_help = "\
Examples:
  parador qemu -kernel vmlinuz -initrd initrd.img -append console=ttyS0 -nographic -no-reboot
  PATH=/usr/lib/parador/qemu:$PATH vng --run vmlinuz -- uname -r

docs/spec/qemu.md lists the options. The program's name qemu-system-x86_64 has the same effect."
    )]
    Qemu {
        /// Options of qemu-system-x86_64.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS")]
        arguments: Vec<OsString>,
    },
    /// Be the OCI runtime of a container engine: containers run in VMs.
    #[command(
        disable_help_flag = true,
        after_help = "\
Examples:
  podman --runtime /usr/bin/parador-oci run IMAGE uname -r
  parador oci list

docs/spec/oci.md lists the commands and what VMs cannot do. The program's name parador-oci has the
same effect.

Exit codes: 0 success; 1 failure; `run` and `exec`: that of the process."
    )]
    Oci {
        /// Command line of runc.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
        arguments: Vec<OsString>,
    },
    /// Query or control a running VM (pause, resume, reset, shutdown).
    #[command(after_help = "\
Examples:
  parador run vmlinux -i busybox --api-socket vm.sock
  parador ctl -s vm.sock status
  parador run vmlinux -i busybox --name web
  parador ctl web shutdown

Exit codes: 0 success; 1 the request does not fit the VM's state; 64 usage; 66 no such socket;
69 no answer; 71 OS error; 77 permission denied.")]
    Ctl(ctl::Options),
    /// List the VMs that have names (parador run --name).
    #[command(after_help = "\
Example: parador ps --json

Exit codes: 0 success; 77 the runtime folder is another user's.")]
    Ps(fleet::PsOptions),
    /// Show CPU time and memory of the VMs that have names, every second.
    #[command(after_help = "\
Example: parador top --once")]
    Top(fleet::TopOptions),
    /// Print or serve statistics of the VMs that have names, for Prometheus.
    #[command(after_help = "\
Example: parador metrics --listen 127.0.0.1:9750

Exit codes: 0 success; 71 the address cannot be used; 77 the runtime folder is another user's;
128+n signal n.")]
    Metrics(fleet::MetricsOptions),
    /// Report which host prerequisites are met.
    #[command(after_help = "\
Exit codes: 0 `parador run` works on this host; 69 it does not: see the lines marked MISSING.")]
    Doctor(doctor::Options),
    /// Build, check and start bootable systems.
    #[command(subcommand)]
    System(SystemCommand),
    /// Build disk images for guests.
    #[command(subcommand)]
    Rootfs(RootfsCommand),
    /// Pre-virtualize kernels during assembly, and verify them.
    #[command(subcommand)]
    Afterburn(AfterburnCommand),
    /// Build pre-virtualized Linux kernels, which run on bare hardware, too.
    #[command(subcommand)]
    Kernel(KernelCommand),
}

#[derive(Debug, Subcommand)]
enum RootfsCommand {
    /// Build a Debian disk image, with the kernel and initial RAM disk that boot it.
    #[command(after_help = "\
Examples:
  sudo parador rootfs debian -o debian
  sudo parador rootfs debian -o debian --size 8G --include postgresql,git --ssh-key ~/.ssh/id_ed25519.pub
  sudo parador rootfs debian -o debian-arm64 --arch arm64

Output: `disk.img`, `vmlinuz`, `initrd.img` and, without --ssh-key, a key pair `ssh-key`;
see examples/debian.toml. root logs in on the console without a password, and over ssh with the key.
An existing disk is kept unless --force is given. Downloaded packages are cached.")]
    Debian(rootfs::Options),
}

#[derive(Debug, Subcommand)]
enum SystemCommand {
    /// Validate a system description and report what was verified.
    #[command(after_help = "Example: parador system check examples/one-linux.toml")]
    Check {
        /// System description (TOML).
        file: PathBuf,
        #[command(flatten)]
        programs: Named,
    },
    /// Draw the capability graph: holders, objects and rights.
    #[command(after_help = "\
Examples:
  parador system graph examples/three-guests.toml -o three-guests.svg
  parador system graph --dot examples/three-guests.toml | dot -Tpdf > three-guests.pdf")]
    Graph {
        /// The description, a TOML file.
        file: PathBuf,
        /// SVG, or text for Graphviz [default: by the extension of the output file, else svg].
        #[arg(long, value_name = "FORMAT")]
        format: Option<Format>,
        /// Same as --format dot.
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

Output: a folder with `kernel.elf` (PVH and Multiboot2) and `bundle`, its boot module.")]
    Build {
        /// System description (TOML).
        file: PathBuf,
        #[command(flatten)]
        place: ImageArguments,
        /// Also build a CD-ROM image that boots with GRUB.
        #[arg(long, value_name = "FILE")]
        iso: Option<PathBuf>,
    },
    /// Build a system and start it in QEMU, with the terminal as its console.
    #[command(after_help = "\
Examples:
  parador system emulate examples/one-linux.toml
  parador system emulate examples/one-linux.toml --timeout 60s </dev/null
  parador system emulate examples/one-linux.toml --cpus 4 -- -gdb tcp::1234

On a terminal all keys go to the guest, Ctrl-C too; Ctrl-A X kills QEMU.

An image is not built while another process builds or emulates it, nor used while it is built, and
two emulations do not write one kernel log: 71. Several with --no-build and a --log each may run.

Exit codes: 0 the guest powered off; 1-63 code of the guest; 64 usage; 65 invalid description;
66 missing file; 69 required program not installed; 70 internal error; 71 OS error;
77 permission denied; 80 guest panic; 81 guest triple fault; 82 watchdog; 83 guest reset;
124 time limit; 128+n signal n.")]
    Emulate(EmulateArguments),
}

/// Output formats of the capability graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// SVG picture.
    Svg,
    /// Graphviz language.
    Dot,
}

impl Format {
    /// Returns the format that the extension of `path` names.
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
    /// System description (TOML).
    file: PathBuf,
    #[command(flatten)]
    place: ImageArguments,
    /// CPUs of the emulated machine; overrides the description.
    #[arg(long, value_name = "N")]
    cpus: Option<u32>,
    /// Memory of the emulated machine; overrides the description.
    #[arg(short, long, value_name = "SIZE", value_parser = Size::parse)]
    memory: Option<Size>,
    /// Kill QEMU after this time: 60s, 5m, 1h.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    timeout: Option<Duration>,
    /// Advance time by executed instructions (QEMU -icount), for reproducible runs.
    #[arg(long)]
    icount: bool,
    /// File for the kernel log [default: kernel.log in the image's folder].
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Boot from a CD-ROM image through GRUB.
    #[arg(long)]
    iso: bool,
    /// Start the existing image instead of building it.
    #[arg(long)]
    no_build: bool,
    /// QEMU binary [default: qemu-system-x86_64 or qemu-system-aarch64].
    #[arg(long, value_name = "PROGRAM", env = "PARADOR_QEMU")]
    qemu: Option<PathBuf>,
    /// Architecture of the emulated machine; its board replaces that of the description.
    #[arg(long, value_enum, value_name = "NAME")]
    arch: Option<Architecture>,
    /// Additional QEMU arguments.
    #[arg(last = true, value_name = "QEMU ARGUMENTS")]
    extra: Vec<OsString>,
}

#[derive(Debug, Args)]
struct ImageArguments {
    /// Output folder of the image [default: target/images/NAME in a source tree].
    #[arg(short, long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    #[command(flatten)]
    programs: Named,
}

impl ImageArguments {
    fn options(self, iso: Option<PathBuf>) -> image::Options {
        image::Options { output: self.output, programs: self.programs, iso }
    }
}

/// File name of the kernel log in an image's folder.
const LOG: &str = "kernel.log";
/// File name of the CD-ROM image in an image's folder.
const ISO: &str = "boot.iso";

/// Executes the parsed command line and returns the exit code.
pub fn run(cli: Cli) -> Result<u8, Failure> {
    match cli.command {
        Command::Run(options) => run::run(&options),
        Command::Exec(options) => Ok(hosted_exec::run(&options)),
        Command::Qemu { arguments } => hosted_qemu::run(arguments),
        Command::Oci { arguments } => Ok(hosted_oci::run(arguments)),
        Command::Ctl(options) => ctl::run(&options),
        Command::Ps(options) => fleet::ps(&options),
        Command::Top(options) => fleet::top(&options),
        Command::Metrics(options) => fleet::metrics(&options),
        Command::Doctor(options) => doctor::run(&options),
        Command::System(command) => system(command),
        Command::Afterburn(command) => afterburn::run(command),
        Command::Kernel(command) => kernel::run(command),
        Command::Rootfs(RootfsCommand::Debian(options)) => {
            rootfs::debian(&options, &Steps::stderr())?;
            print(format!("{}\n", options.output.display()))?;
            Ok(0)
        }
    }
}

fn system(command: SystemCommand) -> Result<u8, Failure> {
    match command {
        SystemCommand::Check { file, programs: named } => {
            let resolved = validate::validate(&file, Overrides::default())?;
            // A description can be validated before Parador itself is built; a folder that was
            // named explicitly must exist.
            let programs = match Programs::find(&named) {
                Ok(programs) => programs.finished(),
                Err(failure) if named.is_some() || failure.code() != failure::MISSING_FILE => {
                    return Err(failure);
                }
                Err(_) => None,
            };
            programs.iter().try_for_each(|folder| resolved.check_programs(folder))?;
            let state = match programs {
                Some(folder) => format!("all there, in {}", folder.display()),
                None => "not built yet; `system build` checks them".to_owned(),
            };
            print(format!("{resolved}  programs {state}\n"))?;
            Ok(0)
        }
        SystemCommand::Graph { file, format, dot, output } => {
            let format = if dot { Some(Format::Dot) } else { format };
            let format = format.or_else(|| output.as_deref().and_then(Format::of));
            graph(&file, format.unwrap_or(Format::Svg), output.as_deref())
        }
        SystemCommand::Build { file, place, iso } => {
            let resolved = validate::validate(&file, Overrides::default())?;
            let options = place.options(iso);
            let folder = Image::folder(&file, &options)?;
            image::build(&resolved, &folder, &options, &Steps::stderr())?;
            let made = [&folder].into_iter().chain(&options.iso);
            let lines: String = made.map(|path| format!("{}\n", path.display())).collect();
            print(lines)?;
            Ok(0)
        }
        SystemCommand::Emulate(arguments) => emulate(arguments),
    }
}

fn graph(file: &Path, format: Format, output: Option<&Path>) -> Result<u8, Failure> {
    let graph = Graph::new(&validate::validate(file, Overrides::default())?);
    let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy();
    let text = match format {
        Format::Svg => graph::svg::render(&graph, &name),
        Format::Dot => graph::dot::render(&graph, &name),
    };
    match output {
        Some(path) => fs::write(path, text).file_error("write", path),
        None => print(text),
    }?;
    Ok(0)
}

fn emulate(arguments: EmulateArguments) -> Result<u8, Failure> {
    let EmulateArguments { file, place, cpus, memory, .. } = arguments;
    let overrides = Overrides { cpus, memory, architecture: arguments.arch };
    let resolved = validate::validate(&file, overrides)?;
    if resolved.board == Board::Pc {
        let message = format!("{} is not for an emulated board", file.display());
        return Err(Failure::new(failure::BAD_CONFIG, message).help(
            "set [system] board = \"qemu-q35\" or \"qemu-virt\", or build it with --iso and boot \
             it on hardware",
        ));
    }
    let architecture = resolved.board.architecture();
    let mut options = place.options(None);
    let folder = Image::folder(&file, &options)?;
    options.iso = arguments.iso.then(|| folder.join(ISO));
    let image = match arguments.no_build {
        true => Image::existing(&resolved, &folder)?,
        false => image::build(&resolved, &folder, &options, &Steps::stderr())?.share(&folder)?,
    };
    let emulation = emulate::Options {
        qemu: arguments.qemu.unwrap_or_else(|| qemu(architecture)),
        timeout: arguments.timeout,
        icount: arguments.icount,
        log: arguments.log.unwrap_or_else(|| folder.join(LOG)),
        iso: options.iso,
        extra: arguments.extra,
    };
    emulate::run(&resolved, &image, &emulation)
}

/// Returns the name of QEMU for an architecture.
fn qemu(architecture: Architecture) -> PathBuf {
    match architecture {
        Architecture::X86 => "qemu-system-x86_64".into(),
        Architecture::Arm64 => "qemu-system-aarch64".into(),
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
}

//! `parador run`: runs a VM with KVM or as processes of this host.
//!
//! Options become a configuration ([`Config`]), which is validated ([`Spec`](crate::spec::Spec)); a
//! back end ([`Backend`]) prepares the VM, and the [`Supervisor`] runs it to its end.

use crate::backend::{Backend, KernelImage};
use crate::config::Config;
use crate::descriptors;
use crate::event_loop;
use crate::kvm;
use crate::orphans;
use crate::passt;
use crate::supervisor::{Supervisor, Symbols};
use crate::vm_files::VmFiles;
use clap::Args;
use hosted_command::failure::{Failure, IoContext};
use hosted_command::input;
use hosted_command::messages;
use hosted_command::output::print;
use hosted_command::programs::Named;
use hosted_command::supervise;
use hosted_loader::MAX_KERNEL;
use signal_hook::consts::{SIGUSR1, SIGXFSZ};
use signal_hook::flag;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use vmm_boot::Kernel;

/// Command line of `parador run`.
#[derive(Debug, Args)]
pub struct Options {
    /// Kernel: `vmlinux` of `parador kernel build`; with KVM also a bzImage, PVH or Multiboot
    /// kernel. [default: the installed kernel, else the cached one of `parador kernel build`]
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

/// Parameters of a start besides the VM's configuration.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// Prints errors and guest output only.
    pub is_quiet: bool,
    /// Checks everything and does not start the VM.
    pub is_dry: bool,
    /// Location of Parador's binaries.
    pub programs: &'a Named,
}

/// Runs the VM to its end and returns the exit code.
pub fn run(options: &Options) -> Result<u8, Failure> {
    let config = options.merged()?;
    messages::set(config.vm.log_format.unwrap_or_default());
    messages::set_quiet(options.quiet);
    if options.dump_config {
        print(config.to_toml()?)?;
        return Ok(0);
    }
    let Options { quiet: is_quiet, dry_run: is_dry, ref programs, .. } = *options;
    launch(config, Launch { is_quiet, is_dry, programs })
}

/// Runs the VM of a configuration to its end and returns the exit code.
///
/// # Errors
/// The configuration is invalid, or the VM cannot be started: codes of
/// [`failure`](hosted_command::failure).
pub fn launch(config: Config, launch: Launch<'_>) -> Result<u8, Failure> {
    // The handlers turn exceeding RLIMIT_FSIZE into an error of the write, and make a SIGUSR1
    // without --metrics harmless.
    for signal in [SIGXFSZ, SIGUSR1] {
        flag::register(signal, Arc::default()).os_error("install signal handlers")?;
    }
    descriptors::withhold_inherited();
    orphans::adopt()?;
    let spec = config.validate(launch.is_quiet)?;
    let files = VmFiles::open(&spec.config)?;
    let source = files.open_kernel()?;
    let kernel = KernelImage::choose(&spec, &source, &files.kernel.path)?;
    let deadline = event_loop::deadline(spec.vm().timeout.map(|time| time.0));
    let backend = Backend::new(&spec, &kernel, launch.programs)?;
    let start = backend.prepare(&spec, &files, &kernel)?;
    let symbols = Symbols::new(&spec, &kernel)?;
    // The kernel is only needed again for a restart.
    drop(kernel);
    drop(source);
    if launch.is_dry {
        backend.say_dry_run(&files.kernel.path);
        return Ok(0);
    }
    backend.warn_if_open();
    let low = start.prepared.low;
    Supervisor::new(spec, files, backend, symbols, low, deadline)?.run(start)
}

/// Returns whether a file is a bzImage, which only KVM runs.
///
/// # Errors
/// The file cannot be read: code 66, 71 or 77.
pub fn is_bzimage(kernel: &Path) -> Result<bool, Failure> {
    let bytes = input::bytes(kernel, MAX_KERNEL)?;
    Ok(matches!(Kernel::detect(&bytes), Ok(Kernel::BzImage(_))))
}

/// Tests whether KVM is usable; the error is the reason.
///
/// # Errors
/// It is not.
pub fn probe_kvm() -> Result<(), String> {
    kvm::trial()
}

/// Returns whether the program of networks of kind `user` is installed.
pub fn has_user_network() -> bool {
    supervise::find(Path::new(passt::PROGRAM)).is_some()
}

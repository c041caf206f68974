//! `parador run`: runs a VM with KVM or as processes of this host.
//!
//! Options become a configuration ([`Config`]), which is validated ([`Spec`](crate::spec::Spec)); a
//! back end ([`Backend`]) prepares the VM, and the [`Supervisor`] runs it to its end.

use crate::backend::{Backend, KernelImage};
use crate::config::Config;
use crate::event_loop;
use crate::orphans;
use crate::supervisor::{Supervisor, Symbols};
use crate::vm_files::VmFiles;
use clap::Args;
use hosted_command::failure::{Failure, IoContext};
use hosted_command::messages;
use hosted_command::output::print;
use hosted_command::programs::Named;
use signal_hook::consts::{SIGUSR1, SIGXFSZ};
use signal_hook::flag;
use std::path::PathBuf;
use std::sync::Arc;

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

/// Runs the VM to its end and returns the exit code.
pub fn run(options: &Options) -> Result<u8, Failure> {
    let config = options.merged()?;
    messages::set(config.vm.log_format.unwrap_or_default());
    messages::set_quiet(options.quiet);
    // The handlers turn exceeding RLIMIT_FSIZE into an error of the write, and make a SIGUSR1
    // without --metrics harmless.
    for signal in [SIGXFSZ, SIGUSR1] {
        flag::register(signal, Arc::default()).os_error("install signal handlers")?;
    }
    if options.dump_config {
        print(config.to_toml()?)?;
        return Ok(0);
    }
    orphans::adopt()?;
    let spec = config.validate(options.quiet)?;
    let files = VmFiles::open(&spec.config)?;
    let bytes = files.read_kernel()?;
    let kernel = KernelImage::choose(&spec, &bytes, &files.kernel)?;
    let deadline = event_loop::deadline(spec.vm().timeout.map(|time| time.0));
    let backend = Backend::new(&spec, &kernel, &options.programs)?;
    let start = backend.prepare(&spec, &files, &kernel)?;
    let symbols = Symbols::new(&spec, &kernel)?;
    // The kernel is only needed again for a restart.
    drop(kernel);
    drop(bytes);
    if options.dry_run {
        backend.say_dry_run(&files.kernel);
        return Ok(0);
    }
    backend.warn_if_open();
    let low = start.prepared.low;
    Supervisor::new(spec, files, backend, symbols, low, deadline)?.run(start)
}

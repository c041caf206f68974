//! `parador exec`: runs one command in a VM of its own.
//!
//! The VM is another `parador` (`parador run`), whose RAM disk is the agent (`guests/agent`). This
//! process is the command's *carrier*: it owns standard input, output, error and the exit code, and
//! moves bytes between them and the agent over vsock ([`proto::agent`]). The VM ends with it.
//!
//! | module | contents |
//! |---|---|
//! | `guest` | the guest as the options state it: root, directories, command |
//! | `vm` | the VM: its description, its process, the end of both |
//! | `connection` | connections to the agent |
//! | `patience` | time limit of the agent's first answer |
//! | `carrier` | streams, signals and the end of the command |
//!
//! `parador oci` has its VMs and carriers of `vm` and `carrier`, too.
#![forbid(unsafe_code)]
// It panics where standard error cannot be written: messages::to_stderr.
#![deny(clippy::print_stderr)]

pub mod carrier;
pub mod connection;
mod guest;
pub mod patience;
#[cfg(test)]
mod testing;
pub mod vm;

use carrier::Carrier;
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use guest::Plan;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::interrupt;
use hosted_command::messages::{self, Format, Level};
use hosted_command::programs::Named;
use hosted_command::scratch::{self, ScratchFolder};
use hosted_command::value::Size;
use hosted_monitor::config::Config;
use hosted_monitor::config::net::NetConfig;
use hosted_monitor::config::vm::{BackendChoice, Time, VmConfig};
use hosted_monitor::runtime::RuntimeFolder;
use patience::AgentTimeout;
use proto::agent::{AgentRequest, Guest, Network, Prefix, Route};
use proto::system::MAX_VCPUS;
use rustix::stdio::{stderr, stdin, stdout};
use rustix::termios::isatty;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use std::ffi::{OsStr, OsString};
use std::net::Ipv4Addr;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Instant;
use vm::AgentVm;

/// Exit code of all errors that are not the command's, as with env(1) and podman.
pub const FAILED: u8 = 125;

/// Prefix of the VM's folder.
const PREFIX: &str = "exec-";
/// Name of the guest.
const NAME: &str = "parador";
/// Signals that the command gets.
const FORWARDED: [i32; 7] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH];
/// Network of guests, which passt and the agent agree on; it is that of QEMU's user networking.
const NETWORK_ADDRESS: [u8; 4] = [10, 0, 2, 15];
const NETWORK_LENGTH: u8 = 24;
const GATEWAY: [u8; 4] = [10, 0, 2, 2];
const RESOLVER: [u8; 4] = [10, 0, 2, 3];

/// Command line of `parador exec`.
#[derive(Debug, Args)]
pub struct Options {
    /// Root directory: a folder, `/` for this host's, an archive of a container image (OCI layout
    /// or docker save), or a disk image (ext4 in a raw or qcow2 file). It is read only; the
    /// command's changes are discarded, except for those in shared folders.
    #[arg(value_name = "ROOT")]
    root: PathBuf,
    /// Command and its arguments [default: those of a container image].
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
    /// Share this folder at its own path, with changes; with `,owners=on` (root only) new files
    /// have the guest's owners, set-user-ID bits and device numbers. The current folder is
    /// shared with changes, too, unless it is `/` or in `/proc`, `/sys` or `/dev`.
    #[arg(long, value_name = "DIR[,owners=on]", value_parser = OsStringValueParser::new().map(Changed::parse))]
    rw: Vec<Changed>,
    /// Share this folder at its own path, read-only.
    #[arg(long, value_name = "DIR")]
    ro: Vec<PathBuf>,
    /// Set a variable of the command's environment, or pass this host's.
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    env: Vec<OsString>,
    /// Working directory [default: that of a container image, else the current folder if it is
    /// shared, else /].
    #[arg(short, long, value_name = "DIR")]
    workdir: Option<PathBuf>,
    /// Network: user-mode networking by passt, or none.
    #[arg(long, value_enum, value_name = "NET", default_value_t)]
    net: Net,
    /// Memory size, which also holds changed files.
    #[arg(short, long, value_name = "SIZE", value_parser = Size::parse, default_value = "2G")]
    memory: Size,
    /// Virtual CPUs, up to 8 [default: those of this host, up to 8].
    #[arg(short, long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=MAX_VCPUS as i64))]
    cpus: Option<u8>,
    /// End the command after this time, e.g. 60s, with exit code 124.
    #[arg(long, value_name = "TIME", value_parser = Time::parse)]
    timeout: Option<Time>,
    /// Give up if the guest has not started its agent by then: 1s to 1h, without its waits for
    /// host CPUs (up to six times as long) [default: 10s].
    #[arg(long, value_name = "TIME", value_parser = AgentTimeout::parse)]
    agent_timeout: Option<AgentTimeout>,
    /// Kernel [default: the installed kernel, else the cached one of `parador kernel build`].
    #[arg(short, long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// Back end [default: auto].
    #[arg(long, value_enum)]
    backend: Option<BackendChoice>,
    /// Message format: lines of text, or one JSON object per line.
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    log_format: Format,
    #[command(flatten)]
    programs: Named,
}

/// Folder that the command may change.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Changed {
    folder: PathBuf,
    /// Files have the guest's owners.
    owners: bool,
}

impl Changed {
    /// Parses `DIR[,owners=on|off]`. Other commas are part of the path.
    fn parse(text: OsString) -> Self {
        let bytes = text.as_bytes();
        let found = [(b",owners=on".as_slice(), true), (b",owners=off", false)]
            .into_iter()
            .find_map(|(suffix, owners)| Some((bytes.strip_suffix(suffix)?, owners)));
        let (path, owners) = found.unwrap_or((bytes, false));
        Self { folder: OsStr::from_bytes(path).into(), owners }
    }
}

/// Network of the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Net {
    /// No network but the loopback interface.
    #[default]
    None,
    /// User-mode networking by passt.
    User,
}

/// Runs the command and returns its exit code, or one of Parador's own.
pub fn run(options: &Options) -> u8 {
    messages::set(options.log_format);
    match carry_out(options) {
        Ok(code) => code,
        Err(failure) => {
            failure.print();
            // `timeout` has the same code with env(1)'s relatives.
            if failure.code() == failure::TIMEOUT { failure::TIMEOUT } else { FAILED }
        }
    }
}

fn carry_out(options: &Options) -> Result<u8, Failure> {
    let deadline = options.timeout.and_then(|time| Instant::now().checked_add(time.0));
    let plan = Plan::new(options)?;
    let runtime = RuntimeFolder::open()?;
    scratch::remove_abandoned(runtime.path(), PREFIX);
    let folder = ScratchFolder::new_in(runtime.path(), PREFIX);
    let folder = folder.os_error("create a folder for the VM")?;
    let config = config(options, &plan, folder.path())?;
    let mut vm = AgentVm::start(folder.path(), &config, &options.programs)?;
    let limit = options.agent_timeout.unwrap_or_default();
    let carried = carry(&mut vm, limit, &plan, deadline);
    vm.end();
    carried
}

/// Returns the description of the VM.
fn config(options: &Options, plan: &Plan, folder: &Path) -> Result<Config, Failure> {
    let absolute = |path: &PathBuf| std::path::absolute(path).file_error("find", path);
    let vm = VmConfig {
        kernel: options.kernel.as_ref().map(absolute).transpose()?,
        memory: Some(options.memory),
        cpus: Some(options.cpus.unwrap_or_else(vm::host_cpus)),
        backend: options.backend,
        log_format: Some(options.log_format),
        ..VmConfig::default()
    };
    let (share, disk) = plan.devices()?;
    let net = plan.has_network.then(|| NetConfig::user(NETWORK_ADDRESS.into()));
    Ok(Config { share, disk, net: net.into_iter().collect(), ..vm::describe(folder, vm)? })
}

/// Returns the network of guests.
fn network() -> Network {
    let address = Prefix { address: NETWORK_ADDRESS.into(), length: NETWORK_LENGTH };
    let all = Prefix { address: Ipv4Addr::UNSPECIFIED.into(), length: 0 };
    let default = Route { destination: all, gateway: Some(GATEWAY.into()) };
    Network {
        addresses: [address].into_iter().collect(),
        routes: [default].into_iter().collect(),
        resolver: Some(RESOLVER),
        mtu: None,
        mac: None,
    }
}

/// Runs the command of a VM to its end and returns its exit code.
fn carry(
    vm: &mut AgentVm,
    limit: AgentTimeout,
    plan: &Plan,
    deadline: Option<Instant>,
) -> Result<u8, Failure> {
    let guest = Guest {
        name: NAME,
        root: plan.root(),
        mounts: plan.mounts(),
        network: plan.has_network.then(network),
    };
    let has_terminal = are_terminals([stdin(), stdout(), stderr()]);
    let set_up = AgentRequest::Configure(guest);
    let forwarded = interrupt::heeded(&FORWARDED);
    let connected = Carrier::connect(vm, limit, deadline, &forwarded, has_terminal, Some(&set_up))?;
    let carrier = match connected {
        Ok(carrier) => carrier,
        Err(code) => return Ok(code),
    };
    let command = plan.command(carrier.terminal())?;
    carrier.request_by(vm, &AgentRequest::Start(command), deadline)?;
    let code = carrier.carry(vm, deadline)?.code;
    if code != 0
        && let Some(folder) = plan.of_other_user()
    {
        let folder = folder.display();
        let text = format!(
            "root of the guest cannot change files of other users, as in {folder}; \
            `--rw {folder},owners=on` lets it"
        );
        messages::say(Level::Warn, &text);
    }
    Ok(code)
}

/// Returns whether the command gets a terminal, which mixes output and errors: all are of one.
fn are_terminals(streams: [BorrowedFd<'_>; 3]) -> bool {
    streams.into_iter().all(isatty)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd;

    #[test]
    fn redirected_errors_stay_separate() {
        let [terminal, file] = ["/dev/ptmx", "/dev/null"].map(|path| File::open(path).unwrap());
        let [terminal, file] = [terminal.as_fd(), file.as_fd()];
        assert!(are_terminals([terminal; 3]));
        for redirected in 0..3 {
            let mut streams = [terminal; 3];
            streams[redirected] = file;
            assert!(!are_terminals(streams), "{redirected}");
        }
    }

    #[test]
    fn owners_follow_the_path() {
        let parsed = |text: &str| {
            let Changed { folder, owners } = Changed::parse(text.into());
            (folder.into_os_string().into_string().unwrap(), owners)
        };
        assert_eq!(parsed("/a"), ("/a".to_owned(), false));
        assert_eq!(parsed("/a,owners=on"), ("/a".to_owned(), true));
        assert_eq!(parsed("a,b,owners=off"), ("a,b".to_owned(), false));
        assert_eq!(parsed("a,owner=on"), ("a,owner=on".to_owned(), false));
    }
}

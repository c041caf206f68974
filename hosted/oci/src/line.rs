//! Command line of the runtime: that of runc.

use clap::{Args, Parser, Subcommand, ValueEnum};
use hosted_command::programs::Named;
use hosted_monitor::config::vm::{BackendChoice, Time};
use std::path::PathBuf;

/// OCI runtime whose containers run in VMs.
#[derive(Debug, Parser)]
#[command(name = "parador-oci", version = concat!(env!("CARGO_PKG_VERSION"), "\nspec: 1.0.2"))]
pub struct RuntimeLine {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: RuntimeCommand,
}

/// Options before the command.
#[derive(Debug, Args)]
pub struct Global {
    /// Folder of the containers' states [default: $XDG_RUNTIME_DIR/parador-oci, else
    /// /run/parador-oci].
    #[arg(long, value_name = "FOLDER")]
    pub root: Option<PathBuf>,
    /// File to append failures to.
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
    /// Format of the log.
    #[arg(long, value_enum, default_value_t)]
    pub log_format: LogFormat,
    /// Accepted for engines.
    #[arg(long)]
    pub debug: bool,
    /// The cgroup path of a configuration is that of a scope of systemd, `slice:prefix:name`.
    #[arg(long)]
    pub systemd_cgroup: bool,
    /// Accepted for engines: rootless operation is detected.
    #[arg(long, value_name = "MODE")]
    pub rootless: Option<String>,
    /// Guest kernel [default: the installed kernel, else the cached one].
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Back end of the VMs [default: auto].
    #[arg(long, value_enum)]
    pub backend: Option<BackendChoice>,
    #[command(flatten)]
    pub programs: Named,
}

/// Format of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines of text.
    #[default]
    Text,
    /// A JSON object a line.
    Json,
}

#[derive(Debug, Subcommand)]
pub enum RuntimeCommand {
    /// Create a container.
    Create(Create),
    /// Start a created container.
    Start { id: String },
    /// Create and start a container.
    Run {
        #[command(flatten)]
        create: Create,
        /// Return once it has started.
        #[arg(short, long)]
        detach: bool,
    },
    /// Print the state of a container as JSON.
    State { id: String },
    /// Send a signal to a container's first process.
    Kill {
        /// Accepted for engines.
        #[arg(short, long)]
        all: bool,
        id: String,
        #[arg(default_value = "TERM")]
        signal: String,
    },
    /// Delete a stopped container.
    Delete {
        /// Kill it if it runs; it need not exist.
        #[arg(short, long)]
        force: bool,
        id: String,
    },
    /// Start another process in a running container.
    Exec(Exec),
    /// Print the processes of a container.
    Ps {
        #[arg(short, long, default_value = "table")]
        format: String,
        id: String,
        /// Options of ps(1), which are not supported.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<String>,
    },
    /// List the containers.
    List {
        #[arg(short, long, default_value = "table")]
        format: String,
        /// Print only the names.
        #[arg(short, long)]
        quiet: bool,
    },
    /// Stop all processes of a container's VM.
    Pause { id: String },
    /// Continue a paused container.
    Resume { id: String },
    /// Change limits of a container.
    Update(Update),
    /// Print statistics of a container, until it ends.
    Events {
        /// Print them once.
        #[arg(long)]
        stats: bool,
        /// Interval, e.g. 5s.
        #[arg(long, value_name = "TIME", value_parser = Time::parse, default_value = "5s")]
        interval: Time,
        id: String,
    },
    /// Print the features of the runtime as JSON.
    Features,
    /// Become the carrier of a container or of another process.
    #[command(hide = true)]
    Carry(Carry),
    /// Use more memory than this process' cgroup permits.
    #[command(hide = true)]
    Exceed { bytes: usize },
}

#[derive(Debug, Args)]
pub struct Create {
    /// Folder with config.json [default: the current one].
    #[arg(short, long, value_name = "FOLDER")]
    pub bundle: Option<PathBuf>,
    /// File for the number of the process that represents the container.
    #[arg(long, value_name = "FILE")]
    pub pid_file: Option<PathBuf>,
    /// Socket that gets the terminal.
    #[arg(long, value_name = "SOCKET")]
    pub console_socket: Option<PathBuf>,
    /// Accepted for engines.
    #[arg(long)]
    pub no_pivot: bool,
    /// Accepted for engines.
    #[arg(long)]
    pub no_new_keyring: bool,
    /// Descriptors to pass on: VMs get none, 0 only.
    #[arg(long, default_value_t)]
    pub preserve_fds: u32,
    pub id: String,
}

#[derive(Debug, Args)]
pub struct Exec {
    /// File with the process as JSON; of the options only --tty counts then.
    #[arg(short, long, value_name = "FILE")]
    pub process: Option<PathBuf>,
    /// Return once it has started.
    #[arg(short, long)]
    pub detach: bool,
    #[arg(long, value_name = "FILE")]
    pub pid_file: Option<PathBuf>,
    #[arg(long, value_name = "SOCKET")]
    pub console_socket: Option<PathBuf>,
    /// Give it a terminal.
    #[arg(short, long)]
    pub tty: bool,
    /// Variable of its environment.
    #[arg(short, long, value_name = "NAME=VALUE")]
    pub env: Vec<String>,
    /// Working directory.
    #[arg(long, value_name = "FOLDER")]
    pub cwd: Option<PathBuf>,
    /// User, and group after a colon, as numbers.
    #[arg(short, long, value_name = "UID[:GID]")]
    pub user: Option<String>,
    /// Capability that it has besides the container's.
    #[arg(short, long, value_name = "NAME")]
    pub cap: Vec<String>,
    /// It cannot gain privileges.
    #[arg(long)]
    pub no_new_privs: bool,
    #[arg(long, default_value_t)]
    pub preserve_fds: u32,
    pub id: String,
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<String>,
}

/// New limits; those that are not stated stay.
#[derive(Debug, Args)]
pub struct Update {
    /// File with `linux.resources` as JSON, - for standard input: memory limit, CPU quota, period
    /// and shares, limit of processes; the rest has no effect. It takes precedence.
    #[arg(short, long, value_name = "FILE")]
    pub resources: Option<PathBuf>,
    /// Memory in bytes, or with a unit, as in 512M; -1: no limit.
    #[arg(short, long, value_name = "BYTES", value_parser = bytes, allow_negative_numbers = true)]
    pub memory: Option<i64>,
    /// CPU time in each period, in microseconds; -1: no limit.
    #[arg(long, value_name = "US", allow_negative_numbers = true)]
    pub cpu_quota: Option<i64>,
    /// Period in microseconds.
    #[arg(long, value_name = "US")]
    pub cpu_period: Option<u64>,
    /// Share of CPU time, from 2 to 262144.
    #[arg(long, value_name = "SHARES")]
    pub cpu_share: Option<u64>,
    /// Processes and threads; -1: no limit.
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true)]
    pub pids_limit: Option<i64>,
    /// CPUs of the host, e.g. 0-3,5.
    #[arg(long, value_name = "LIST")]
    pub cpuset_cpus: Option<String>,
    /// Memory nodes of the host.
    #[arg(long, value_name = "LIST")]
    pub cpuset_mems: Option<String>,
    pub id: String,
}

/// Reads a number of bytes, with a binary unit after it if there is one, as runc does.
fn bytes(text: &str) -> Result<i64, String> {
    let lower = text.to_lowercase();
    let digits = lower.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match lower[digits.len()..].trim_end_matches('b').trim_end_matches('i') {
        "" => Some(0),
        "k" => Some(10),
        "m" => Some(20),
        "g" => Some(30),
        "t" => Some(40),
        _ => None,
    };
    let number: Option<i64> = digits.parse().ok();
    let size = number.zip(shift).and_then(|(number, shift)| number.checked_mul(1 << shift));
    size.ok_or_else(|| "expected bytes, or a size such as 512M".to_owned())
}

/// Arguments of a carrier.
#[derive(Debug, Args)]
pub struct Carry {
    pub id: String,
    /// Socket for the report to the process that has started it.
    #[arg(long)]
    pub report: PathBuf,
    #[arg(long)]
    pub console_socket: Option<PathBuf>,
    /// File with another process of the container, which is removed.
    #[arg(long)]
    pub process: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn engines_are_understood() {
        RuntimeLine::command().debug_assert();
        let parse = |line: &str| RuntimeLine::try_parse_from(line.split(' ')).unwrap();
        // podman by conmon, and containerd's shim.
        let line = parse("parador-oci create --bundle /b --pid-file /p 0123abc");
        assert!(matches!(line.command, RuntimeCommand::Create(create) if create.id == "0123abc"));
        let line = parse(
            "parador-oci --root /r --log /l --log-format json --systemd-cgroup exec --process /f \
             --detach --pid-file /p --console-socket /s abc",
        );
        assert!(line.global.systemd_cgroup && line.global.log_format == LogFormat::Json);
        assert!(matches!(line.command, RuntimeCommand::Exec(exec) if exec.detach));
        // conmon for `podman exec --tty`.
        let line = parse(
            "parador-oci exec --pid-file /p --process /f --detach --tty --console-socket /s abc",
        );
        assert!(matches!(line.command, RuntimeCommand::Exec(exec) if exec.tty));
        let line = parse("parador-oci exec -t abc sh -c x");
        assert!(
            matches!(line.command, RuntimeCommand::Exec(exec) if exec.command == ["sh", "-c", "x"])
        );
        let line = parse("parador-oci exec --cap CAP_A -c B abc x");
        assert!(matches!(line.command, RuntimeCommand::Exec(exec) if exec.cap == ["CAP_A", "B"]));
        let line = parse("parador-oci kill --all abc 9");
        assert!(matches!(line.command, RuntimeCommand::Kill { signal, .. } if signal == "9"));
        let line = parse("parador-oci update --memory -1 --cpu-share 512 abc");
        assert!(matches!(line.command, RuntimeCommand::Update(it) if it.memory == Some(-1)));
        for (text, bytes) in [("64M", 64 << 20), ("1gib", 1 << 30), ("5b", 5), ("7", 7)] {
            let line = parse(&format!("parador-oci update --memory {text} abc"));
            assert!(matches!(line.command, RuntimeCommand::Update(it) if it.memory == Some(bytes)));
        }
        for wrong in ["x", "1x", "", "9999999999G"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
        let line = parse("parador-oci update --resources - abc");
        assert!(matches!(line.command, RuntimeCommand::Update(it) if it.resources.is_some()));
        let line = parse("parador-oci events --stats abc");
        assert!(matches!(line.command, RuntimeCommand::Events { stats: true, .. }));
        assert!(RuntimeLine::try_parse_from(["parador-oci", "checkpoint", "abc"]).is_err());
    }
}

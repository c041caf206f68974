//! Configuration of the VM itself: `[vm]`.

use super::console::{Target, Virtio};
use super::gdb::GdbEndpoint;
use super::name::VmName;
use clap::{Args, ValueEnum};
use hosted_command::messages::Format;
use hosted_command::value::{Size, parse_time};
use proto::system::MAX_VCPUS;
use schemars::JsonSchema;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::path::PathBuf;
use std::time::Duration;

/// `[vm]`.
// `remote`: the derived functions are called by the implementations below, for `no_reboot`.
#[derive(Clone, Debug, Default, PartialEq, Args, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case", remote = "Self")]
pub struct VmConfig {
    /// Kernel; same as KERNEL.
    #[arg(short, long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Initial RAM disk; `busybox` builds one with a shell, `agent` that of `parador exec`.
    #[arg(short, long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// Text appended to the kernel command line.
    #[arg(short = 'p', long, value_name = "TEXT")]
    pub cmdline: Option<String>,
    /// Memory size, at least 64M [default: 1G].
    #[arg(short, long, value_name = "SIZE", value_parser = Size::parse)]
    pub memory: Option<Size>,
    /// Memory balloon: `on` returns free guest memory to the host, SIZE also inflates it at boot,
    /// `off` disables it [default: on].
    #[arg(long, value_name = "SIZE|on|off", value_parser = BalloonConfig::parse)]
    pub balloon: Option<BalloonConfig>,
    /// Virtual CPUs, up to 8 [default: 1].
    #[arg(short, long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=MAX_VCPUS as i64))]
    #[schemars(range(min = 1, max = MAX_VCPUS))]
    pub cpus: Option<u8>,
    /// Back end [default: auto].
    #[arg(long, value_enum)]
    pub backend: Option<BackendChoice>,
    /// Isolation of the guest kernel from guest user mode [default: auto].
    #[arg(long, value_enum, value_name = "HOW")]
    pub protection: Option<Protection>,
    /// Kill the VM after this time, e.g. 60s, with exit code 124.
    #[arg(long, value_name = "TIME", value_parser = Time::parse)]
    pub timeout: Option<Time>,
    /// At exit, print how often each wedge service was entered.
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub counters: bool,
    /// Count guest writes to page tables, descriptor tables and devices, and write a report by
    /// kernel function to this file, with whether each function is annotated. Slow.
    #[arg(long, value_name = "FILE")]
    pub profile_writes: Option<PathBuf>,
    /// Disable an optimisation, to measure its effect.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub without: Vec<Optimisation>,
    /// Sandbox the VM's processes with empty namespaces and Landlock: as far as the host permits,
    /// off, or strict [default: on].
    #[arg(long, value_enum, value_name = "WHICH")]
    pub sandbox: Option<Sandbox>,
    /// Least severe messages about the VM that are printed at exit [default: warn].
    #[arg(long, value_enum, value_name = "LEVEL")]
    pub log: Option<Log>,
    /// Connection of the serial line (ttyS0): stdio, pty, null, file=PATH, tail=PATH, unix=PATH
    /// [default: stdio; null with --console stdio].
    #[arg(long, value_name = "TARGET", value_parser = Target::parse)]
    pub serial: Option<Target>,
    /// Add a virtio console (hvc0), which becomes the guest's primary console, and connect it: off,
    /// or as --serial; with `,kernel=off` it is no console of the guest kernel [default: off].
    #[arg(long, value_name = "TARGET", value_parser = Virtio::parse)]
    pub console: Option<Virtio>,
    /// Listen for GDB: unix=SOCKET, or tcp=:PORT on the loopback address; with `,wait` the guest
    /// does not start before GDB connects.
    #[arg(long, value_name = "PLACE", value_parser = GdbEndpoint::parse)]
    pub gdb: Option<GdbEndpoint>,
    /// Write /tmp/perf-PID.map with the guest kernel's functions for each process of the VM, for
    /// host profilers.
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub perf_map: bool,
    /// Message format: lines of text, or one JSON object per line [default: text].
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub log_format: Option<Format>,
    /// Name of the VM for `parador ps` and `parador ctl NAME`, unique among those of a user.
    #[arg(long, value_name = "NAME", value_parser = VmName::parse)]
    pub name: Option<VmName>,
    /// Path of the control socket to create: see docs/spec/api.md.
    #[arg(long, value_name = "SOCKET")]
    pub api_socket: Option<PathBuf>,
    /// Start the guest only at PUT /v1/vm/boot on the control socket.
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub wait_boot: bool,
    /// File descriptor to write events to, one JSON object per line.
    #[arg(long, value_name = "NUMBER")]
    pub event_fd: Option<u32>,
    /// File to append statistics to, one JSON object per line, at exit and at each SIGUSR1; `-`:
    /// standard output.
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// Action when the guest powers off: exit, exit:CODE, reset [default: exit].
    #[arg(long, value_name = "WHAT", value_parser = OnExit::parse)]
    pub on_shutdown: Option<OnExit>,
    /// Action when the guest resets: exit, exit:CODE, reset [default: exit, with code 83].
    #[arg(long, value_name = "WHAT", value_parser = OnExit::parse, conflicts_with = "no_reboot")]
    pub on_reset: Option<OnExit>,
    /// Action when the guest kernel panics: exit, exit:CODE, reset [default: exit, with code 80].
    #[arg(long, value_name = "WHAT", value_parser = OnExit::parse)]
    pub on_panic: Option<OnExit>,
    /// Same as --on-reset exit.
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub no_reboot: bool,
}

impl VmConfig {
    /// Replaces `no_reboot` by the action that it stands for; another action is an error.
    fn with_reset_action(self) -> Result<Self, String> {
        match (self.no_reboot, self.on_reset) {
            (false, _) => Ok(self),
            (true, None | Some(OnExit::Exit)) => {
                Ok(Self { on_reset: Some(OnExit::Exit), no_reboot: false, ..self })
            }
            (true, Some(_)) => {
                Err("`no-reboot` conflicts with `on-reset`: remove one of them".to_owned())
            }
        }
    }
}

/// Writes `no_reboot` as the action that it stands for: merged into a file, it replaces the file's.
impl Serialize for VmConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let config = self.clone().with_reset_action().map_err(serde::ser::Error::custom)?;
        Self::serialize(&config, serializer)
    }
}

impl<'de> Deserialize<'de> for VmConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::deserialize(deserializer)?.with_reset_action().map_err(D::Error::custom)
    }
}

/// Action after a guest power-off, reset or panic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnExit {
    /// `parador run` exits with the default code of the event.
    #[default]
    Exit,
    /// `parador run` exits with this code.
    Code(u8),
    /// The VM is reset.
    Reset,
}

impl OnExit {
    fn parse(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix("exit:").map(str::parse)) {
            ("exit", _) => Ok(Self::Exit),
            ("reset", _) => Ok(Self::Reset),
            (_, Some(Ok(code))) => Ok(Self::Code(code)),
            _ => Err(format!("invalid action `{text}`: expected exit, exit:CODE or reset")),
        }
    }

    fn text(self) -> Option<String> {
        Some(match self {
            Self::Exit => "exit".to_owned(),
            Self::Code(code) => format!("exit:{code}"),
            Self::Reset => "reset".to_owned(),
        })
    }
}

string_value!(
    OnExit,
    "OnExit",
    "^(exit(:[0-9]+)?|reset)$",
    "Action after a guest power-off, reset or panic: reset the VM, or exit with the default code or with CODE."
);

/// Back end that runs the guest.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize, Serialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
#[schemars(rename = "Backend")]
pub enum BackendChoice {
    /// KVM if it is usable, else processes.
    #[default]
    Auto,
    /// KVM of this host; any kernel.
    Kvm,
    /// Ordinary processes; pre-virtualized kernels only.
    Process,
}

/// Isolation of the guest kernel from guest user mode.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize, Serialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Protection {
    /// Protection keys (PKU) if the host has them; else none, with a warning.
    #[default]
    Auto,
    /// Protection keys (PKU).
    Keys,
    /// None: guest user mode can modify the guest kernel.
    None,
    /// User mode runs in processes of its own, without kernel memory: works on any host, slow.
    Process,
    /// The kernel is unmapped in user mode: slow, and only against accidents.
    Remap,
}

/// Sandboxing of the VM's processes in addition to their seccomp filters.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize, Serialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Sandbox {
    /// As far as the host permits it to unprivileged users.
    #[default]
    On,
    /// Disabled.
    Off,
    /// Complete, or the VM does not start.
    Strict,
}

/// Least severe messages of the VM's own processes that are printed.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize, Serialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Log {
    /// Errors that stop the VM.
    Error,
    /// Guest requests that the VM does not support, too.
    #[default]
    Warn,
    /// Guest probes for absent devices and features, too.
    Info,
}

/// Optimisations that can be disabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Optimisation {
    /// Frequent sensitive instructions are emulated in place.
    FastSites,
    /// System calls of guest user mode enter the guest kernel without a signal.
    CallSites,
    /// The wedge replaces some kernel functions with its own versions.
    Functions,
    /// A page fault also maps neighbouring pages, and a TLB flush drops only stale mappings.
    Batches,
    /// Each guest address space has a process of its own.
    Spaces,
    /// Guest processes handle their own system calls and faults; without it, a tracer process does.
    InProcess,
}

/// A time with a unit: `"60s"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema)]
#[schemars(transparent)]
pub struct Time(#[schemars(with = "String", regex(pattern = "^[0-9]+[smh]?$"))] pub Duration);

impl Time {
    /// Parses digits and s, m or h.
    pub fn parse(text: &str) -> Result<Self, String> {
        parse_time(text).map(Self)
    }

    fn text(self) -> Option<String> {
        Some(format!("{}s", self.0.as_secs()))
    }
}

string_value!(Time);

/// Memory that the guest returns to the host: this size from the start, and free memory; `None`: no
/// balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema)]
#[schemars(transparent)]
pub struct BalloonConfig(
    #[schemars(with = "String", regex(pattern = "^(on|off|[0-9]+[KMGkmg])$"))] pub Option<Size>,
);

impl BalloonConfig {
    const ON: Self = Self(Some(Size(0)));

    /// Parses a size, `on` or `off`.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "on" => Ok(Self::ON),
            "off" => Ok(Self(None)),
            size => Size::parse(size).map(|size| Self(Some(size))),
        }
    }

    fn text(self) -> Option<String> {
        Some(match self {
            Self::ON => "on".to_owned(),
            Self(None) => "off".to_owned(),
            Self(Some(size)) => size.text(),
        })
    }
}

impl Default for BalloonConfig {
    fn default() -> Self {
        Self::ON
    }
}

string_value!(BalloonConfig);

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use crate::config::vm::{OnExit, VmConfig};

    fn parsed(vm: &str) -> Result<Config, toml::de::Error> {
        toml::from_str(&format!("[vm]\n{vm}"))
    }

    #[test]
    fn no_reboot_is_an_exit() {
        let no_reboot = VmConfig { no_reboot: true, ..VmConfig::default() };
        let option = Config { vm: no_reboot, ..Config::default() };
        let file = parsed("on-reset = \"reset\"").unwrap();
        let merged = file.merge(&option).unwrap();
        assert_eq!(merged.vm.on_reset, Some(OnExit::Exit));
        assert_eq!(option.to_toml().unwrap(), "[vm]\non-reset = \"exit\"\n");
        // Options replace the file's actions, this one, too.
        let no_reboot = parsed("no-reboot = true").unwrap();
        assert_eq!(no_reboot.vm.on_reset, Some(OnExit::Exit));
        assert_eq!(no_reboot.merge(&file).unwrap().vm.on_reset, Some(OnExit::Reset));
    }

    #[test]
    fn no_reboot_allows_no_other_action() {
        assert!(parsed("no-reboot = true\non-reset = \"exit\"").is_ok());
        for action in ["reset", "exit:3"] {
            let wrong = parsed(&format!("no-reboot = true\non-reset = \"{action}\""));
            assert!(wrong.unwrap_err().to_string().contains("conflicts with `on-reset`"));
        }
    }
}

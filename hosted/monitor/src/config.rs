//! Configuration of one VM: one schema for the command line, `--config FILE` (TOML) and the control
//! interface (JSON).
//!
//! Each key is one field; its doc comment is both the help text of the option and the description
//! in the JSON schema. Every field defaults to "unset", so that a file and a command line can be
//! merged; the code that uses a field applies its default.

use crate::console::{Target, Virtio};
use crate::debugger::GdbEndpoint;
use crate::disk;
use crate::net;
use crate::share;
use crate::vsock;
use clap::{Args, ValueEnum};
use hosted_command::failure::{self, Failure};
use hosted_command::messages::Format;
use hosted_command::problem::{Diagnostics, Problem};
use hosted_command::toml_text;
use hosted_command::value::Size;
use proto::system::MAX_VCPUS;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize, Serializer};
use std::borrow::Cow;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use toml::{Table, Value};

/// Configuration of a VM, as `parador run` takes it. Relative paths in a file start at the file's
/// folder.
#[derive(Clone, Debug, Default, PartialEq, Args, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(title = "Virtual machine of `parador run`")]
pub struct Config {
    /// The VM.
    #[command(flatten)]
    pub vm: VmConfig,
    /// Disk: FILE, or path=FILE,ro=on,id=NAME,format=raw|qcow2; up to four.
    #[arg(short, long = "disk", value_name = "DISK", value_parser = disk::parse)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disk: Vec<disk::DiskConfig>,
    /// Network: user or passt, with hostfwd=tcp:2222:22; tap=NAME; switch=SOCKET; or none; each
    /// with mac=ADDRESS; up to four.
    #[arg(long = "net", value_name = "NET", value_parser = net::parse)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub net: Vec<net::NetConfig>,
    /// Shared directory (9P): DIR:TAG, DIR:TAG,ro=on; up to four.
    #[arg(long, value_name = "DIR:TAG", value_parser = share::parse)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub share: Vec<share::ShareConfig>,
    /// Vsock device: guest CID and the path of the Unix socket for host connections.
    #[arg(long, value_name = "cid=CID,path=SOCKET", value_parser = vsock::parse)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vsock: Option<vsock::VsockConfig>,
}

/// `[vm]`.
#[derive(Clone, Debug, Default, PartialEq, Args, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct VmConfig {
    /// Kernel; same as KERNEL.
    #[arg(short, long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Initial RAM disk; `busybox` builds one with a shell.
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
    pub backend: Option<Backend>,
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
    /// Connection of the serial line (ttyS0): stdio, pty, null, file=PATH, unix=PATH [default:
    /// stdio; null with --console stdio].
    #[arg(long, value_name = "TARGET", value_parser = Target::parse)]
    pub serial: Option<Target>,
    /// Add a virtio console (hvc0), which becomes the guest's primary console, and connect it: off,
    /// or as --serial [default: off].
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
}

impl JsonSchema for OnExit {
    fn schema_name() -> Cow<'static, str> {
        "OnExit".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "Action after a guest power-off, reset or panic: reset the VM, or exit with the default code or with CODE.",
            "type": "string",
            "pattern": "^(exit(:[0-9]+)?|reset)$",
        })
    }
}

impl Serialize for OnExit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Exit => serializer.serialize_str("exit"),
            Self::Code(code) => serializer.serialize_str(&format!("exit:{code}")),
            Self::Reset => serializer.serialize_str("reset"),
        }
    }
}

impl<'de> Deserialize<'de> for OnExit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

/// Back end that runs the guest.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize, Serialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Backend {
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
        hosted_command::value::parse_time(text).map(Self)
    }
}

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{}s", self.0.as_secs()))
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

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
}

impl Default for BalloonConfig {
    fn default() -> Self {
        Self::ON
    }
}

impl Serialize for BalloonConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match *self {
            Self::ON => serializer.serialize_str("on"),
            Self(None) => serializer.serialize_str("off"),
            Self(Some(size)) => size.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for BalloonConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

impl Config {
    /// Reads a configuration file.
    ///
    /// # Errors
    /// Invalid contents, with the position in the file: code 65. The file cannot be read: 66, 71 or
    /// 77.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let text = fs::read_to_string(path).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => {
                Failure::new(failure::BAD_CONFIG, format!("{} is not UTF-8 text", path.display()))
            }
            _ => Failure::file("read", path, &error),
        })?;
        match Self::parse(&text) {
            Ok(config) => Ok(config.in_folder(path.parent().unwrap_or(Path::new("")))),
            Err(problem) => {
                let file = path.display().to_string();
                Err(Failure::Description(Diagnostics { file, text, problems: vec![problem] }))
            }
        }
    }

    fn parse(text: &str) -> Result<Self, Problem> {
        toml_text::parse(text)
    }

    /// Resolves relative paths against `folder`.
    fn in_folder(mut self, folder: &Path) -> Self {
        let VmConfig {
            kernel,
            initrd,
            profile_writes,
            api_socket,
            metrics,
            serial,
            console,
            gdb,
            ..
        } = &mut self.vm;
        let gdb = gdb.iter_mut().filter_map(GdbEndpoint::path_mut);
        let targets = console.iter_mut().filter_map(|console| console.0.as_mut());
        let console = targets.filter_map(Target::path_mut);
        let serial = serial.iter_mut().filter_map(Target::path_mut);
        let initrd = initrd.iter_mut().filter(|path| !is_busybox(path));
        let metrics = metrics.iter_mut().filter(|path| !is_stdout(path));
        let disks = self.disk.iter_mut().map(|disk| &mut disk.path);
        let shares = self.share.iter_mut().map(|share| &mut share.path);
        let switches = self.net.iter_mut().filter_map(|net| net.switch.as_mut());
        let vsock = self.vsock.iter_mut().map(|vsock| &mut vsock.path);
        let files = kernel.iter_mut().chain(profile_writes).chain(api_socket);
        let paths = files.chain(initrd).chain(metrics).chain(serial).chain(console).chain(gdb);
        for path in paths.chain(disks).chain(switches).chain(shares).chain(vsock) {
            *path = folder.join(&*path);
        }
        self
    }

    /// Merges `over` into this configuration: its values replace, its lists are appended.
    ///
    /// # Errors
    /// A path is not UTF-8.
    pub fn merge(&self, over: &Self) -> Result<Self, Failure> {
        let mut table = self.table()?;
        overlay(&mut table, over.table()?);
        table.try_into().map_err(|error| {
            Failure::new(
                failure::BAD_CONFIG,
                format!("the options and the configuration file conflict: {error}"),
            )
        })
    }

    fn table(&self) -> Result<Table, Failure> {
        Table::try_from(self).map_err(|error| {
            Failure::new(failure::BAD_CONFIG, format!("cannot serialize an option: {error}"))
        })
    }

    /// Returns the configuration as a TOML file.
    ///
    /// # Errors
    /// A path is not UTF-8.
    pub fn to_toml(&self) -> Result<String, Failure> {
        toml::to_string(self).map_err(|error| {
            Failure::new(failure::BAD_CONFIG, format!("cannot serialize an option: {error}"))
        })
    }
}

/// Returns whether an initial RAM disk is the one built from busybox.
pub fn is_busybox(path: &Path) -> bool {
    path == Path::new("busybox")
}

/// Returns whether a file is standard output.
pub fn is_stdout(path: &Path) -> bool {
    path == Path::new("-")
}

/// Merges the table `over` into `below`.
fn overlay(below: &mut Table, over: Table) {
    for (key, value) in over {
        match (below.get_mut(&key), value) {
            (Some(Value::Table(below)), Value::Table(over)) => overlay(below, over),
            (Some(Value::Array(below)), Value::Array(over)) => below.extend(over),
            (_, value) => drop(below.insert(key, value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        config: Config,
    }

    fn line(words: &[&str]) -> Config {
        let words = ["run"].iter().chain(words);
        Line::try_parse_from(words).unwrap_or_else(|error| panic!("{error}")).config
    }

    const FILE: &str = "\
[vm]
kernel = \"vmlinux\"
initrd = \"busybox\"
memory = \"512M\"
timeout = \"2m\"
without = [\"functions\"]

[[disk]]
path = \"root.img\"
ro = true

[[net]]
kind = \"user\"
hostfwd = [\"tcp:2222:22\", \"udp:0.0.0.0:53-:53\"]

[[net]]
switch = \"lan\"
mac = \"02:00:00:00:00:01\"

[[share]]
path = \"src\"
tag = \"host\"
";

    #[test]
    fn a_file_and_a_command_line_say_the_same() {
        let words = ["-k", "vmlinux", "-i", "busybox", "-m", "512M", "--timeout", "2m"];
        let more = ["--without", "functions", "-d", "root.img,ro=on"];
        let nets = ["--net", "user,hostfwd=tcp:2222:22,hostfwd=udp:0.0.0.0:53-:53"];
        let last = ["--net", "switch=lan,mac=02:00:00:00:00:01"];
        let share = ["--share", "src:host"];
        let all = [&words[..], &more, &nets, &last, &share].concat();
        assert_eq!(Config::parse(FILE).unwrap(), line(&all));
    }

    #[test]
    fn the_command_line_is_laid_over_the_file() {
        let file = Config::parse(FILE).unwrap().in_folder(Path::new("/vm"));
        assert_eq!(file.vm.kernel.as_deref(), Some(Path::new("/vm/vmlinux")));
        assert_eq!(file.vm.initrd.as_deref(), Some(Path::new("busybox")));
        let merged = file.merge(&line(&["-m", "1G", "--counters", "-k", "/k", "-d", "b"])).unwrap();
        assert_eq!(merged.vm.memory, Some(Size(1 << 30)));
        assert_eq!(merged.vm.kernel.as_deref(), Some(Path::new("/k")));
        assert_eq!(merged.share[0].path.to_str(), Some("/vm/src"));
        assert_eq!(merged.vm.timeout, file.vm.timeout);
        assert!(merged.vm.counters);
        let disks: Vec<_> = merged.disk.iter().map(|disk| disk.path.to_str().unwrap()).collect();
        assert_eq!(disks, ["/vm/root.img", "b"]);
        assert_eq!(merged.net[1].switch.as_deref(), Some(Path::new("/vm/lan")));
        assert_eq!(file.merge(&Config::default()).unwrap(), file);
    }

    #[test]
    fn what_is_written_is_read_again() {
        let config = Config::parse(FILE).unwrap();
        let text = config.to_toml().unwrap();
        assert_eq!(text, FILE.replace("\"2m\"", "\"120s\""));
        assert_eq!(Config::parse(&text).unwrap(), config);
        assert_eq!(Config::parse("").unwrap(), Config::default());
        for word in ["on", "off", "64M"] {
            let config = line(&["--balloon", word]);
            let text = config.to_toml().unwrap();
            assert_eq!((text.contains(word), Config::parse(&text).unwrap()), (true, config));
        }
    }

    #[test]
    fn the_schema_is_in_the_specification() {
        let schema = schemars::schema_for!(Config);
        crate::specification::assert_shipped("vm.schema.json", schema.as_value());
    }

    #[test]
    fn problems_have_their_place() {
        let at = |text: &str| {
            let problem = Config::parse(text).unwrap_err();
            text[problem.span.unwrap()].to_owned()
        };
        assert_eq!(at("[vm]\nmemroy = \"1G\""), "memroy");
        assert_eq!(at("[vm]\nmemory = 7"), "7");
        assert_eq!(at("[vm]\ntimeout = \"soon\""), "\"soon\"");
        assert_eq!(at("[vm]\nbackend = \"tcg\""), "\"tcg\"");
        assert_eq!(at("[[disk]]\npath = \"a\"\nrw = true"), "rw");
        assert_eq!(
            at("[[disk]]\npath = \"a\"\nid = \"a name of more than twenty\""),
            "\"a name of more than twenty\""
        );
        assert_eq!(at("[machine]\n"), "machine");
    }
}

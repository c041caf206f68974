//! The description of one virtual machine: the one schema of the command line, of `--config FILE` (TOML) and of the control interface
//! (JSON).
//!
//! A key is a field here and nothing else: its text is the help of the option and the description in the JSON schema. Every field says
//! nothing by default, so that a file and a command line can be merged; what is the case then, the code that uses it knows.

use crate::console::{Target, Virtio};
use crate::debugger::Place;
use crate::description::{self, Size};
use crate::disk;
use crate::failure::{self, Failure};
use crate::messages::Format;
use crate::net;
use crate::problem::{Problem, Report};
use crate::share;
use crate::vsock;
use clap::{Args, ValueEnum};
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

/// A virtual machine as `parador run` takes it. Paths in a file start at the file's folder.
#[derive(Clone, Debug, Default, PartialEq, Args, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(title = "Virtual machine of `parador run`")]
pub struct Config {
    /// The machine.
    #[command(flatten)]
    pub vm: Vm,
    /// Disk: FILE, or path=FILE,ro=on,id=NAME,format=raw (or qcow2); up to four.
    #[arg(short, long = "disk", value_name = "DISK", value_parser = disk::parse)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disk: Vec<disk::Description>,
    /// Network: user or passt, with hostfwd=tcp:2222:22; or tap=NAME; or switch=SOCKET; or none; mac=ADDRESS; up to four.
    #[arg(long = "net", value_name = "NET", value_parser = net::parse)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub net: Vec<net::Description>,
    /// Folder of this host as a file system for the guest: DIR:TAG,ro=on; up to four.
    #[arg(long, value_name = "DIR:TAG", value_parser = share::parse)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub share: Vec<share::Description>,
    /// Sockets between guest and host: cid=NUMBER,path=SOCKET, with which programs of the host connect.
    #[arg(long, value_name = "cid=CID,path=SOCKET", value_parser = vsock::parse)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vsock: Option<vsock::Description>,
}

/// `[vm]`.
#[derive(Clone, Debug, Default, PartialEq, Args, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Vm {
    /// Kernel, as KERNEL.
    #[arg(short, long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Initial RAM disk, or `busybox` for one with a shell.
    #[arg(short, long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// Added to the kernel's command line.
    #[arg(short = 'p', long, value_name = "TEXT")]
    pub cmdline: Option<String>,
    /// Memory [default: 1G].
    #[arg(short, long, value_name = "SIZE", value_parser = Size::parse)]
    pub memory: Option<Size>,
    /// Memory that the guest is to do without; `on`: it gives back what it does not use; `off`: it keeps all that it has used [default: on].
    #[arg(long, value_name = "SIZE|on|off", value_parser = Balloon::parse)]
    pub balloon: Option<Balloon>,
    /// Virtual CPUs, up to 8 [default: 1].
    #[arg(short, long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=MAX_VCPUS as i64))]
    #[schemars(range(min = 1, max = MAX_VCPUS))]
    pub cpus: Option<u8>,
    /// How to run the guest [default: auto].
    #[arg(long, value_enum)]
    pub backend: Option<Backend>,
    /// How to keep the guest's kernel from the guest's programs [default: auto].
    #[arg(long, value_enum, value_name = "HOW")]
    pub protection: Option<Protection>,
    /// End the machine after this time, as in 60s, with exit code 124.
    #[arg(long, value_name = "TIME", value_parser = Time::parse)]
    pub timeout: Option<Time>,
    /// Print in the end how often the wedge was needed, and for what.
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub counters: bool,
    /// Count writes to page tables, descriptor tables and devices, and write to this file which functions of the kernel they are from and
    /// whether they are annotated. Slow.
    #[arg(long, value_name = "FILE")]
    pub profile_writes: Option<PathBuf>,
    /// Do without an optimisation, to see what it is worth.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub without: Vec<Optimisation>,
    /// Namespaces without anything in them and Landlock for the machine's processes: as the host permits, none, or all of it [default: on].
    #[arg(long, value_enum, value_name = "WHICH")]
    pub sandbox: Option<Sandbox>,
    /// Messages about the machine that are printed when it has ended [default: warn].
    #[arg(long, value_enum, value_name = "LEVEL")]
    pub log: Option<Log>,
    /// What the serial line (ttyS0) is connected to: stdio, pty, null, file=PATH, unix=PATH [default: stdio; null with --console stdio].
    #[arg(long, value_name = "TARGET", value_parser = Target::parse)]
    pub serial: Option<Target>,
    /// A virtio console (hvc0), which is the guest's first one then, and what it is connected to: off, or as --serial [default: off].
    #[arg(long, value_name = "TARGET", value_parser = Virtio::parse)]
    pub console: Option<Virtio>,
    /// Wait for a debugger (GDB): unix=SOCKET, or tcp=:PORT on the loopback address; with `,wait` the guest waits for it, too.
    #[arg(long, value_name = "PLACE", value_parser = Place::parse)]
    pub gdb: Option<Place>,
    /// Let profilers of the host find the functions of the guest's kernel: /tmp/perf-PID.map for each process of the machine.
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub perf_map: bool,
    /// How messages look: lines, or a JSON object a line [default: text].
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub log_format: Option<Format>,
    /// Control socket, which is made: see docs/spec/api.md.
    #[arg(long, value_name = "SOCKET")]
    pub api_socket: Option<PathBuf>,
    /// Start when the control socket says so: PUT /v1/vm/boot.
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub wait_boot: bool,
    /// Descriptor that events are written to, a JSON object a line.
    #[arg(long, value_name = "NUMBER")]
    pub event_fd: Option<u32>,
    /// File that statistics are added to, a JSON object a line: at the end, and at SIGUSR1; `-`: standard output.
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// When the guest powers off: exit, exit:CODE, reset [default: exit].
    #[arg(long, value_name = "WHAT", value_parser = Then::parse)]
    pub on_shutdown: Option<Then>,
    /// When the guest resets its machine: exit, exit:CODE, reset [default: exit, with 83].
    #[arg(long, value_name = "WHAT", value_parser = Then::parse, conflicts_with = "no_reboot")]
    pub on_reset: Option<Then>,
    /// When the guest's kernel panics: exit, exit:CODE, reset [default: exit, with 80].
    #[arg(long, value_name = "WHAT", value_parser = Then::parse)]
    pub on_panic: Option<Then>,
    /// The same as --on-reset exit.
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub no_reboot: bool,
}

/// What follows an end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Then {
    /// The end of `parador run`, with the end's own exit code.
    #[default]
    Exit,
    /// The end, with this exit code.
    Code(u8),
    /// The machine starts anew.
    Reset,
}

impl Then {
    fn parse(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix("exit:").map(str::parse)) {
            ("exit", _) => Ok(Self::Exit),
            ("reset", _) => Ok(Self::Reset),
            (_, Some(Ok(code))) => Ok(Self::Code(code)),
            _ => Err(format!("`{text}` is none of exit, exit:CODE and reset")),
        }
    }
}

impl JsonSchema for Then {
    fn schema_name() -> Cow<'static, str> {
        "Then".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "What follows an end: the machine starts anew, or that is it, with the end's exit code or this one.",
            "type": "string",
            "pattern": "^(exit(:[0-9]+)?|reset)$",
        })
    }
}

impl Serialize for Then {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Exit => serializer.serialize_str("exit"),
            Self::Code(code) => serializer.serialize_str(&format!("exit:{code}")),
            Self::Reset => serializer.serialize_str("reset"),
        }
    }
}

impl<'de> Deserialize<'de> for Then {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

/// How a guest is run.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize, Serialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Backend {
    /// KVM where it works, else processes.
    #[default]
    Auto,
    /// KVM of this host; any kernel.
    Kvm,
    /// Ordinary processes; pre-virtualized kernels only.
    Process,
}

/// How a guest's kernel is kept from the guest's programs.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize, Serialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Protection {
    /// By protection keys where the host has them; else not at all, which is said.
    #[default]
    Auto,
    /// By the processor's protection keys.
    Keys,
    /// Not at all: programs can change their kernel.
    None,
    /// Programs have processes of their own, which have nothing of their kernel: on any host, but slow.
    Process,
    /// It is not mapped while programs run: slow, and against accidents only.
    Remap,
}

/// How far the machine's processes are shut in, beside their filters of system calls.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize, Serialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Sandbox {
    /// As far as the host lets its users.
    #[default]
    On,
    /// Not at all.
    Off,
    /// Wholly, or the machine does not start.
    Strict,
}

/// What is printed of the machine itself.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize, Serialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Log {
    /// The machine cannot go on.
    Error,
    /// The guest wanted something that the machine has not.
    #[default]
    Warn,
    /// What the guest has looked for in vain, too.
    Info,
}

/// What can be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Optimisation {
    /// Frequent sensitive instructions are done in place.
    FastSites,
    /// System calls of programs come without a signal.
    CallSites,
    /// The wedge does in its own way what some functions of the kernel do.
    Functions,
    /// A fault fills in what is around it, too, and a flush drops only what is out of date.
    Batches,
    /// Each address space of the guest has a process.
    Spaces,
    /// The guest's processes handle their system calls and faults themselves; without, each goes through a process that traces them.
    InProcess,
}

/// A time, written with a unit: `"60s"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema)]
#[schemars(transparent)]
pub struct Time(#[schemars(with = "String", regex(pattern = "^[0-9]+[smh]?$"))] pub Duration);

impl Time {
    /// Reads digits and s, m or h.
    pub fn parse(text: &str) -> Result<Self, String> {
        crate::commands::parse_time(text).map(Self)
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

/// What a guest gives back of its memory: so much from the start and what it does not use; `None`: nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema)]
#[schemars(transparent)]
pub struct Balloon(
    #[schemars(with = "String", regex(pattern = "^(on|off|[0-9]+[KMGkmg])$"))] pub Option<Size>,
);

impl Balloon {
    const ON: Self = Self(Some(Size(0)));

    /// Reads a size, `on` or `off`.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "on" => Ok(Self::ON),
            "off" => Ok(Self(None)),
            size => Size::parse(size).map(|size| Self(Some(size))),
        }
    }
}

impl Default for Balloon {
    fn default() -> Self {
        Self::ON
    }
}

impl Serialize for Balloon {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match *self {
            Self::ON => serializer.serialize_str("on"),
            Self(None) => serializer.serialize_str("off"),
            Self(Some(size)) => size.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Balloon {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// What is wrong, with its place in the file: code 65. It cannot be read: 66, 71 or 77.
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
                Err(Failure::Description(Report { file, text, problems: vec![problem] }))
            }
        }
    }

    fn parse(text: &str) -> Result<Self, Problem> {
        description::parse(text)
    }

    /// With paths that start at a folder.
    fn in_folder(mut self, folder: &Path) -> Self {
        let Vm {
            kernel, initrd, profile_writes, api_socket, metrics, serial, console, gdb, ..
        } = &mut self.vm;
        let gdb = gdb.iter_mut().filter_map(Place::path_mut);
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

    /// With what `over` says in the place of what this says; lists become longer.
    ///
    /// # Errors
    /// A path that is not UTF-8.
    pub fn merge(&self, over: &Self) -> Result<Self, Failure> {
        let mut table = self.table()?;
        overlay(&mut table, over.table()?);
        table.try_into().map_err(|error| {
            Failure::new(failure::BAD_CONFIG, format!("the options do not go together: {error}"))
        })
    }

    fn table(&self) -> Result<Table, Failure> {
        Table::try_from(self).map_err(|error| {
            Failure::new(failure::BAD_CONFIG, format!("an option cannot be written: {error}"))
        })
    }

    /// As a file.
    ///
    /// # Errors
    /// A path that is not UTF-8.
    pub fn to_toml(&self) -> Result<String, Failure> {
        toml::to_string(self).map_err(|error| {
            Failure::new(failure::BAD_CONFIG, format!("an option cannot be written: {error}"))
        })
    }
}

/// Whether an initial RAM disk is the one that is made from busybox.
pub fn is_busybox(path: &Path) -> bool {
    path == Path::new("busybox")
}

/// Whether a file is standard output.
pub fn is_stdout(path: &Path) -> bool {
    path == Path::new("-")
}

/// Lays a table over another one.
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

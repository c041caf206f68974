//! Configuration of one VM: one schema for the command line, `--config FILE` (TOML) and the control
//! interface (JSON).
//!
//! Each key is one field; its doc comment is both the help text of the option and the description
//! in the JSON schema. Every field defaults to "unset", so that a file and a command line can be
//! merged; the code that uses a field applies its default.

/// Implements the forms of a value that is a string in files and options: `parse` reads it, `text`
/// writes it (`None`: a path is not UTF-8). With a name, the JSON schema follows, too.
macro_rules! string_value {
    ($type:ident) => {
        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let not_utf8 = || serde::ser::Error::custom("a path is not UTF-8");
                serializer.serialize_str(&self.text().ok_or_else(not_utf8)?)
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                Self::parse(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
            }
        }
    };
    ($type:ident, $name:literal, $pattern:literal, $description:literal) => {
        string_value!($type);

        impl schemars::JsonSchema for $type {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                $name.into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!({
                    "description": $description,
                    "type": "string",
                    "pattern": $pattern,
                })
            }
        }
    };
}

pub mod console;
pub mod disk;
pub mod gdb;
pub mod name;
pub mod net;
pub mod port;
pub mod share;
pub mod vm;
pub mod vsock;

use clap::Args;
use console::Target;
use gdb::GdbEndpoint;
use hosted_command::failure::{self, Failure};
use hosted_command::input;
use hosted_command::problem::{Diagnostics, Problem};
use hosted_command::toml_text;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::Path;
use toml::{Table, Value};
use vm::VmConfig;

/// Configuration of a VM, as `parador run` takes it. Relative paths in a file start at the file's
/// folder.
#[derive(Clone, Debug, Default, PartialEq, Args, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(title = "Virtual machine of `parador run`")]
pub struct Config {
    /// The VM.
    #[command(flatten)]
    pub vm: VmConfig,
    /// Disk: FILE, or path=FILE,ro=on,overlay=on,id=NAME,format=raw|qcow2; up to eight.
    #[arg(short, long = "disk", value_name = "DISK", value_parser = disk::parse)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disk: Vec<disk::DiskConfig>,
    /// Network: user or passt, with hostfwd=tcp:2222:22; tap=NAME; switch=SOCKET; or none; each
    /// with mac=ADDRESS; up to four.
    #[arg(long = "net", value_name = "NET", value_parser = net::parse)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub net: Vec<net::NetConfig>,
    /// Shared directory (9P): DIR:TAG, DIR:TAG,ro=on; up to 16.
    #[arg(long, value_name = "DIR:TAG", value_parser = share::parse)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub share: Vec<share::ShareConfig>,
    /// Vsock device: guest CID and the path of the Unix socket for host connections.
    #[arg(long, value_name = "cid=CID,path=SOCKET", value_parser = vsock::parse)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vsock: Option<vsock::VsockConfig>,
    /// Named port of the virtio console (/dev/virtio-ports/NAME): NAME,target=TARGET, with the
    /// targets of --serial; up to seven.
    #[arg(long, value_name = "PORT", value_parser = port::parse)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub port: Vec<port::PortConfig>,
}

impl Config {
    /// Reads a configuration file.
    ///
    /// # Errors
    /// Invalid contents, with the position in the file: code 65. The file cannot be read: 66, 71 or
    /// 77.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let text = input::text(path)?;
        match Self::parse(&text) {
            Ok(config) => Ok(config.in_folder(path.parent().unwrap_or(Path::new("")))),
            Err(problem) => {
                let file = path.display().to_string();
                Err(Diagnostics { file, text, problems: vec![problem] }.into())
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
        let targets = console.iter_mut().filter_map(|console| console.target.as_mut());
        let console = targets.filter_map(Target::path_mut);
        let serial = serial.iter_mut().filter_map(Target::path_mut);
        let initrd = initrd.iter_mut().filter(|path| BuiltInitrd::of(path).is_none());
        let metrics = metrics.iter_mut().filter(|path| !is_stdout(path));
        let disks = self
            .disk
            .iter_mut()
            .flat_map(|disk| [Some(&mut disk.path), disk.backing.as_mut()].into_iter().flatten());
        let shares = self.share.iter_mut().map(|share| &mut share.path);
        let switches = self.net.iter_mut().filter_map(|net| net.switch.as_mut());
        let vsock = self.vsock.iter_mut().map(|vsock| &mut vsock.path);
        let ports = self.port.iter_mut().filter_map(|port| port.target.path_mut());
        let files = kernel.iter_mut().chain(profile_writes).chain(api_socket);
        let paths = files.chain(initrd).chain(metrics).chain(serial).chain(console).chain(gdb);
        for path in paths.chain(disks).chain(switches).chain(shares).chain(vsock).chain(ports) {
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

/// Initial RAM disk that is built when the VM starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuiltInitrd {
    /// With a shell, by busybox.
    Busybox,
    /// With the agent of `parador exec` alone.
    Agent,
}

impl BuiltInitrd {
    /// Returns the RAM disk that this value of `--initrd` names; `None`: it is a file.
    pub fn of(path: &Path) -> Option<Self> {
        match path.to_str()? {
            "busybox" => Some(Self::Busybox),
            "agent" => Some(Self::Agent),
            _ => None,
        }
    }
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
    use hosted_command::value::Size;

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
        let disk = "[[disk]]\npath = \"top.qcow2\"\nbacking = \"base\"\n";
        let disk = Config::parse(disk).unwrap().in_folder(Path::new("/vm")).disk.remove(0);
        assert_eq!(disk.backing.as_deref(), Some(Path::new("/vm/base")));
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

//! The system description as written: the TOML schema, with the place of every value.
//!
//! This module only says what may be written; `check` says what makes sense.

use crate::cpu_time::{Budget, TaskCpu};
use crate::keyvalue;
use crate::problem::Problem;
use schemars::JsonSchema;
use serde::de::{self, DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use std::fmt;
use toml::Spanned;

/// A whole description.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// The machine.
    pub system: Spanned<System>,
    /// `[[server]]`: device servers.
    #[serde(default)]
    pub server: Vec<Spanned<Server>>,
    /// `[[task]]`: native programs.
    #[serde(default)]
    pub task: Vec<Spanned<Task>>,
    /// `[[vm]]`: virtual machines.
    #[serde(default)]
    pub vm: Vec<Spanned<Vm>>,
    /// `[[channel]]`: channels between virtual machines.
    #[serde(default)]
    pub channel: Vec<Spanned<Channel>>,
}

/// `[system]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct System {
    /// The machine that it is for.
    pub board: Board,
    /// Where the kernel's log goes.
    #[serde(default)]
    pub log: Log,
    /// The machine's memory.
    pub memory: Option<Spanned<Size>>,
    /// The machine's CPUs.
    pub cpus: Option<Spanned<u32>>,
    /// vCPUs may share CPUs by time slices.
    #[serde(default)]
    pub share_cpus: bool,
    /// The emulated machine has an IOMMU, which keeps devices from what is not their server's.
    #[serde(default)]
    pub iommu: bool,
    /// Files that the RAM disk `busybox` has in `/root`.
    #[serde(default)]
    pub files: Vec<Spanned<String>>,
    /// Disks of the emulated machine: see `attach::MachineDisk`.
    #[serde(default)]
    pub disk: Vec<Spanned<String>>,
    /// Network cards of the emulated machine: see `attach::MachineNet`.
    #[serde(default)]
    pub net: Vec<Spanned<String>>,
}

/// A machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Board {
    /// QEMU's q35.
    #[serde(rename = "qemu-q35")]
    QemuQ35,
    /// Any PC.
    #[serde(rename = "pc")]
    Pc,
}

/// Where the kernel's log goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Log {
    /// First serial port.
    Com1,
    /// Second serial port.
    #[default]
    Com2,
    /// Nowhere.
    None,
}

/// `[[server]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Server {
    /// Unique among servers.
    pub name: Spanned<String>,
    /// What it serves.
    pub kind: ServerKind,
    /// The device that it owns: see `attach::Device`. A switch needs none.
    pub device: Option<Spanned<String>>,
    /// A native program of the build that takes the place of the usual one.
    pub program: Option<Spanned<String>>,
    /// Virtual machines that a switch is for; if it is given, no others may be connected to it.
    #[serde(default)]
    pub ports: Option<Vec<Spanned<String>>>,
    /// Which ends start it again.
    pub restart: Option<Restart>,
    /// 0 to 63.
    pub priority: Option<Spanned<u32>>,
    /// Its CPU time.
    pub cpu: Option<Budget>,
}

/// What a server serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ServerKind {
    /// A serial port.
    Console,
    /// A disk.
    Block,
    /// A network.
    Switch,
}

/// `[[task]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Task {
    /// Unique among virtual machines and tasks.
    pub name: Spanned<String>,
    /// A native program of the build.
    pub binary: Spanned<String>,
    /// Its arguments.
    #[serde(default)]
    pub args: Vec<Spanned<String>>,
    /// CPU of its first thread, or its CPU time, or both.
    pub cpu: Option<TaskCpu>,
    /// 0 to 63.
    pub priority: Option<Spanned<u32>>,
    /// The system waits for its end.
    pub essential: Option<bool>,
    /// Where it writes to and reads from.
    pub console: Option<Spanned<Console>>,
    /// It may list, start, stop, make and destroy virtual machines.
    #[serde(default)]
    pub manage: bool,
}

/// `[[vm]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vm {
    /// Unique among virtual machines and tasks.
    pub name: Spanned<String>,
    /// Number of vCPUs, or the CPU of each.
    pub cpus: Option<Spanned<Cpus>>,
    /// Guest memory.
    pub memory: Spanned<Size>,
    /// `debian`, `micro:` and the name of a micro-guest, or a file.
    pub kernel: Spanned<String>,
    /// `busybox` or a file.
    pub initrd: Option<Spanned<String>>,
    /// Kernel command line.
    pub cmdline: Option<Spanned<String>>,
    /// What the first serial port is connected to.
    pub console: Option<Spanned<Console>>,
    /// The guest also has the console as a virtio device (`hvc0` in Linux).
    #[serde(default)]
    pub virtio_console: bool,
    /// A program of the build that serves as its VMM instead of Parador's own.
    pub vmm: Option<Spanned<String>>,
    /// 0 to 63.
    pub priority: Option<Spanned<u32>>,
    /// CPU time of each of its virtual CPUs.
    pub cpu: Option<Budget>,
    /// Which ends start it again.
    #[serde(default)]
    pub restart: Restart,
    /// What a reset by the guest does.
    #[serde(default)]
    pub on_reset: OnReset,
    /// Offered to the guest (the default). Without it Linux reads the time-stamp counter, which costs less, but has to find out
    /// its frequency.
    pub kvmclock: Option<bool>,
    /// The system waits for its end.
    pub essential: Option<bool>,
    /// Not started: virtual machines are made after it at run time.
    #[serde(default)]
    pub template: bool,
    /// Its disks: see `attach::Disk`.
    #[serde(default)]
    pub disk: Vec<Spanned<String>>,
    /// Its network cards: see `attach::Net`.
    #[serde(default)]
    pub net: Vec<Spanned<String>>,
}

/// `[[channel]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Channel {
    /// Names of its two virtual machines: sides 0 and 1.
    pub between: Spanned<Vec<Spanned<String>>>,
    /// What it is.
    #[expect(dead_code, reason = "there is one kind, and it must be named")]
    pub kind: ChannelKind,
    /// Bytes of its memory.
    pub size: Spanned<Size>,
    /// The sides can ring at each other.
    #[serde(default = "yes")]
    pub doorbell: bool,
}

fn yes() -> bool {
    true
}

/// What a channel is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChannelKind {
    /// Shared memory with a ring of messages each way.
    Shmem,
}

/// What a virtual machine's first serial port, or a native program, is connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Console {
    /// The machine's first serial port, alone.
    Com1,
    /// The machine's first serial port, with others.
    Mux,
    /// Nothing.
    None,
}

/// Which ends of a virtual machine start it again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Restart {
    /// None.
    #[default]
    Never,
    /// Panic, triple fault, reset, a fault of the VMM.
    OnCrash,
    /// Every end.
    Always,
}

/// What a reset by the guest does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnReset {
    /// Ends the virtual machine.
    #[default]
    Exit,
    /// Starts it from the beginning.
    Reset,
}

/// vCPUs of a virtual machine: `2` or `{ pin = [0, 1] }`.
#[derive(Debug)]
pub enum Cpus {
    /// So many, anywhere.
    Count(u32),
    /// One on each of these CPUs.
    Pin(Vec<Spanned<u32>>),
}

impl<'de> Deserialize<'de> for Cpus {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct CpusVisitor;

        impl<'de> Visitor<'de> for CpusVisitor {
            type Value = Cpus;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of CPUs, or { pin = [0, 1] }")
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Cpus, E> {
                let count = u32::try_from(value);
                count
                    .map(Cpus::Count)
                    .map_err(|_| E::invalid_value(de::Unexpected::Signed(value), &self))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Cpus, A::Error> {
                #[derive(Deserialize)]
                #[serde(deny_unknown_fields)]
                struct Pins {
                    pin: Vec<Spanned<u32>>,
                }
                Pins::deserialize(de::value::MapAccessDeserializer::new(map))
                    .map(|pins| Cpus::Pin(pins.pin))
            }
        }

        deserializer.deserialize_any(CpusVisitor)
    }
}

/// A number of bytes, written with a unit: `"256M"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, JsonSchema)]
#[schemars(transparent)]
pub struct Size(#[schemars(with = "String", regex(pattern = "^[0-9]+[KMGkmg]$"))] pub u64);

impl Size {
    /// Reads digits and one of the units K, M, G (powers of 1024).
    pub fn parse(text: &str) -> Result<Self, String> {
        let refuse =
            || format!("`{text}` is not a size: write digits and K, M or G, as in \"256M\"");
        let unit = text.chars().last().ok_or_else(refuse)?;
        let shift = match unit.to_ascii_uppercase() {
            'K' => 10,
            'M' => 20,
            'G' => 30,
            _ => return Err(refuse()),
        };
        let digits = &text[..text.len() - 1];
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(refuse());
        }
        let too_large = || format!("`{text}` is too large");
        let number: u64 = digits.parse().map_err(|_| too_large())?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(too_large)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes % (1 << 30) == 0 && bytes > 0 => write!(f, "{} GiB", bytes >> 30),
            bytes if bytes % (1 << 20) == 0 => write!(f, "{} MiB", bytes >> 20),
            bytes if bytes < 1 << 20 => write!(f, "{} KiB", bytes.div_ceil(1 << 10)),
            bytes => write!(f, "{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        }
    }
}

/// In the largest unit that leaves no rest.
impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (shift, unit) = match self.0.trailing_zeros() {
            30.. => (30, 'G'),
            20.. => (20, 'M'),
            _ => (10, 'K'),
        };
        serializer.serialize_str(&format!("{}{unit}", self.0 >> shift))
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SizeVisitor;

        impl Visitor<'_> for SizeVisitor {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size in quotes with a unit, as in \"256M\"")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
                Size::parse(text).map_err(E::custom)
            }
        }

        deserializer.deserialize_any(SizeVisitor)
    }
}

/// Reads a description: [`Description`], or what else is written in this way.
pub fn parse<T: DeserializeOwned>(text: &str) -> Result<T, Problem> {
    toml::from_str(text).map_err(|error: toml::de::Error| {
        let mut lines = error.message().lines();
        let first = lines.next().unwrap_or("not TOML").to_owned();
        let problem = Problem::new(error.span().unwrap_or(0..0), first.clone());
        let rest: Vec<&str> = lines.collect();
        match () {
            () if !rest.is_empty() => problem.help(rest.join("; ")),
            () if first.starts_with("unknown field") => {
                // unknown field `KEY`, expected one of `A`, `B`
                let mut names = first.split('`').skip(1).step_by(2);
                let written = names.next().unwrap_or("");
                problem.help(match keyvalue::nearest(written, names) {
                    Some(meant) => format!("did you mean `{meant}`?"),
                    None => "correct or remove this key; unknown keys are never ignored".to_owned(),
                })
            }
            () => problem,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(Size::parse("256M"), Ok(Size(256 << 20)));
        assert_eq!(Size::parse("4k"), Ok(Size(4096)));
        assert_eq!(Size::parse("2G"), Ok(Size(2 << 30)));
        for wrong in [
            "",
            "M",
            "256",
            "-1M",
            "1.5G",
            "256MB",
            "1 M",
            "ä",
            "99999999999999999999G",
            "17179869184G",
        ] {
            assert!(Size::parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(Size(256 << 20).to_string(), "256 MiB");
        assert_eq!(Size(2 << 30).to_string(), "2 GiB");
        assert_eq!(Size(3 << 19).to_string(), "1.5 MiB");
        assert_eq!(Size(700).to_string(), "1 KiB");
    }

    #[test]
    fn problems_have_their_place() {
        let at = |text: &str| {
            let problem = parse::<Description>(text).unwrap_err();
            let span = problem.span.unwrap();
            (text[span].to_owned(), problem.message)
        };
        let vm = "[system]\nboard = \"pc\"\n[[vm]]\nname = \"a\"\nkernel = \"k\"\n";
        assert_eq!(at(&format!("{vm}memory = 256")).0, "256");
        let (place, message) = at(&format!("{vm}memory = \"256\""));
        assert_eq!(place, "\"256\"");
        assert!(message.contains("256M"), "{message}");
        assert_eq!(at(&format!("{vm}memroy = \"1M\"")).0, "memroy");
        assert_eq!(at(&format!("{vm}memory = \"1M\"\ncpus = {{ pins = [1] }}")).0, "pins");
        assert_eq!(at(&format!("{vm}memory = \"1M\"\ncpus = -1")).0, "-1");
        assert_eq!(at("[system]\nboard = \"amiga\"").0, "\"amiga\"");
    }
}

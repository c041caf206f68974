//! Command line of QEMU: its options, which of them have a value, and their treatment.

use crate::refuse;
use hosted_command::failure::{self, Failure};
use hosted_command::keyvalue::nearest;
use std::ffi::OsString;

/// Treatment of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// Mapped, without a value.
    Flag,
    /// Mapped, with a value.
    Value,
    /// Without effect, and without a value.
    IgnoredFlag,
    /// Without effect, with a value.
    IgnoredValue,
    /// Not supported, for this reason.
    Refused(&'static str),
}

use Treatment::{Flag, IgnoredFlag, IgnoredValue, Refused, Value};

/// Reason: no BIOS.
const FIRMWARE: &str = "VMs have no firmware: use -kernel";
/// Reason: no disks but those of virtio.
const DISKS: &str = "VMs have virtio disks only: use -drive file=FILE,if=virtio";
/// Reason: another way to a debugger.
const DEBUGGER: &str = "use `parador run --gdb`";
/// Reason: no monitor.
const MONITOR: &str = "VMs have no QEMU monitor: `parador run --api-socket` controls one";
/// Reason: no graphics.
const GRAPHICS: &str = "VMs have no graphics: use -display none or -nographic";

/// All known options.
const OPTIONS: &[(&str, Treatment)] = &[
    ("M", Value),
    ("accel", Value),
    ("append", Value),
    ("bios", Refused(FIRMWARE)),
    ("boot", IgnoredValue),
    ("cdrom", Refused(DISKS)),
    ("chardev", Value),
    ("cpu", Value),
    ("curses", Refused(GRAPHICS)),
    ("device", Value),
    ("display", Value),
    ("drive", Value),
    ("echr", IgnoredValue),
    ("enable-kvm", Flag),
    ("fda", Refused(DISKS)),
    ("fdb", Refused(DISKS)),
    ("fsdev", Value),
    ("gdb", Refused(DEBUGGER)),
    ("global", IgnoredValue),
    ("h", Flag),
    ("hda", Refused(DISKS)),
    ("hdb", Refused(DISKS)),
    ("hdc", Refused(DISKS)),
    ("hdd", Refused(DISKS)),
    ("help", Flag),
    ("initrd", Value),
    ("kernel", Value),
    ("loadvm", Refused("VMs have no snapshots")),
    ("m", Value),
    ("machine", Value),
    ("mon", Value),
    ("monitor", Value),
    ("msg", IgnoredValue),
    ("name", IgnoredValue),
    ("net", Value),
    ("netdev", Value),
    ("nic", Value),
    ("no-acpi", Refused("the guest's devices are described by ACPI")),
    ("no-fd-bootchk", IgnoredFlag),
    ("no-hpet", IgnoredFlag),
    ("no-reboot", Flag),
    ("no-user-config", IgnoredFlag),
    ("nodefaults", Flag),
    ("nographic", Flag),
    ("object", Value),
    ("parallel", IgnoredValue),
    ("pflash", Refused(FIRMWARE)),
    ("qmp", Refused(MONITOR)),
    ("qmp-pretty", Refused(MONITOR)),
    ("rtc", IgnoredValue),
    ("s", Refused(DEBUGGER)),
    ("sandbox", IgnoredValue),
    ("serial", Value),
    ("smp", Value),
    ("snapshot", Refused("use `parador run -d path=FILE,overlay=on`")),
    ("spice", Refused(GRAPHICS)),
    ("usb", IgnoredFlag),
    ("uuid", IgnoredValue),
    ("version", Flag),
    ("vga", Value),
    ("virtfs", Value),
    ("vnc", Refused(GRAPHICS)),
];

/// Options of a command line.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Line {
    /// Mapped options without their dashes, and their values; empty for those that have none.
    pub options: Vec<(&'static str, String)>,
    /// Ignored options, each with its dash and value.
    pub ignored: Vec<String>,
}

impl Line {
    /// Parses the arguments after the program's name.
    ///
    /// # Errors
    /// An unknown option, or one without its value: code 64. One that is not supported: 69.
    pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Self, Failure> {
        let mut line = Self::default();
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            let argument = text(argument)?;
            let (name, treatment) = find(&argument)?;
            let mut value = || match arguments.next() {
                Some(value) => text(value),
                None => Err(refuse(format!("option -{name} requires a value"))),
            };
            match treatment {
                Flag => line.options.push((name, String::new())),
                Value => line.options.push((name, value()?)),
                IgnoredFlag => line.ignored.push(format!("-{name}")),
                IgnoredValue => {
                    let value = value()?;
                    line.ignored.push(format!("-{name} {value}"));
                }
                Refused(why) => {
                    let text = format!("option -{name} is not supported: {why}");
                    return Err(Failure::new(failure::UNAVAILABLE, text));
                }
            }
        }
        Ok(line)
    }
}

fn text(argument: OsString) -> Result<String, Failure> {
    argument.into_string().map_err(|argument| {
        refuse(format!("the argument {} is not UTF-8 text", argument.to_string_lossy()))
    })
}

/// Returns the option of an argument with one or two dashes.
fn find(argument: &str) -> Result<(&'static str, Treatment), Failure> {
    let name = argument.strip_prefix("--").or_else(|| argument.strip_prefix('-'));
    let Some(name) = name.filter(|name| !name.is_empty()) else {
        let text = format!("unexpected argument `{argument}`");
        return Err(refuse(text).help("a disk image is -drive file=FILE,if=virtio"));
    };
    if let Some(found) = OPTIONS.iter().find(|option| option.0 == name) {
        return Ok(*found);
    }
    let failure = refuse(format!("unknown option {argument}"));
    Err(match nearest(name, OPTIONS.iter().map(|option| option.0)) {
        Some(meant) => failure.help(format!("did you mean -{meant}?")),
        None => failure.help("docs/spec/qemu.md has the options of `parador qemu`"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Line, Failure> {
        Line::parse(words.iter().map(OsString::from))
    }

    #[test]
    fn options_and_values() {
        let line = parse(&["-m", "1G", "--no-reboot", "-append", "-x -- y", "-usb", "-name", "a"]);
        let line = line.unwrap();
        let options = [("m", "1G"), ("no-reboot", ""), ("append", "-x -- y")];
        assert_eq!(line.options, options.map(|(name, value)| (name, value.to_owned())));
        assert_eq!(line.ignored, ["-usb", "-name a"]);
    }

    #[test]
    fn wrong_lines() {
        for (words, code, said) in [
            (&["-kernal", "x"][..], 64, "did you mean -kernel?"),
            (&["-m"], 64, "option -m requires a value"),
            (&["disk.img"], 64, "unexpected argument `disk.img`"),
            (&["-"], 64, "unexpected argument `-`"),
            (&["--"], 64, "unexpected argument"),
            (&["-daemonize"], 64, "unknown option -daemonize"),
            (&["-bios", "x"], 69, "no firmware"),
            (&["-pflash", "x"], 69, "no firmware"),
            (&["-qmp", "stdio"], 69, "no QEMU monitor"),
            (&["-hda", "x"], 69, "-drive file=FILE,if=virtio"),
            (&["-cdrom", "x"], 69, "-drive file=FILE,if=virtio"),
            (&["-gdb", "tcp::1234"], 69, "parador run --gdb"),
            (&["-s", "-S"], 69, "parador run --gdb"),
            (&["-snapshot"], 69, "overlay=on"),
            (&["-vnc", ":1"], 69, "no graphics"),
        ] {
            let failure = parse(words).unwrap_err();
            assert_eq!(failure.code(), code, "{words:?}");
            assert!(failure.to_string().contains(said), "{words:?}: {failure}");
        }
        use std::os::unix::ffi::OsStringExt;
        let failure = Line::parse([OsString::from_vec(vec![b'-', 0xff])]).unwrap_err();
        assert!(failure.to_string().contains("not UTF-8"));
    }

    #[test]
    fn options_are_sorted_and_documented() {
        assert!(OPTIONS.is_sorted_by_key(|option| option.0));
        let document = include_str!("../../../docs/spec/qemu.md");
        for (name, _) in OPTIONS {
            assert!(document.contains(&format!("`-{name}")), "docs/spec/qemu.md lacks -{name}");
        }
    }
}

//! Configuration of consoles: `--serial` and `--console`.

use std::path::PathBuf;

/// Configured connection of a console line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Target {
    /// Standard input and output.
    #[default]
    Stdio,
    /// A new pseudoterminal.
    Pty,
    /// No connection.
    Null,
    /// Output to this file.
    File(PathBuf),
    /// The last 64 to 128 KiB of the output to this file.
    Tail(PathBuf),
    /// A Unix socket; one client at a time.
    Unix(PathBuf),
}

impl Target {
    /// Parses `stdio`, `pty`, `null`, `file=PATH`, `tail=PATH` or `unix=PATH`.
    pub fn parse(text: &str) -> Result<Self, String> {
        match (text, text.split_once('=')) {
            ("stdio", _) => Ok(Self::Stdio),
            ("pty", _) => Ok(Self::Pty),
            ("null", _) => Ok(Self::Null),
            (_, Some(("file", path))) if !path.is_empty() => Ok(Self::File(path.into())),
            (_, Some(("tail", path))) if !path.is_empty() => Ok(Self::Tail(path.into())),
            (_, Some(("unix", path))) if !path.is_empty() => Ok(Self::Unix(path.into())),
            _ => Err(format!(
                "invalid target `{text}`: expected stdio, pty, null, file=PATH, tail=PATH or unix=PATH"
            )),
        }
    }

    fn text(&self) -> Option<String> {
        Some(match self {
            Self::Stdio => "stdio".to_owned(),
            Self::Pty => "pty".to_owned(),
            Self::Null => "null".to_owned(),
            Self::File(path) => format!("file={}", path.to_str()?),
            Self::Tail(path) => format!("tail={}", path.to_str()?),
            Self::Unix(path) => format!("unix={}", path.to_str()?),
        })
    }

    /// Returns the path, if the target has one.
    pub fn path_mut(&mut self) -> Option<&mut PathBuf> {
        match self {
            Self::File(path) | Self::Tail(path) | Self::Unix(path) => Some(path),
            _ => None,
        }
    }

    /// Returns whether two lines cannot have the target. Devices and descriptors of this process
    /// can be written by several.
    pub fn is_exclusive(&self) -> bool {
        match self {
            Self::Stdio | Self::Tail(_) | Self::Unix(_) => true,
            Self::File(path) => !path.starts_with("/dev") && !path.starts_with("/proc"),
            Self::Pty | Self::Null => false,
        }
    }
}

/// Configuration of the virtio console.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Virtio {
    /// Connection; `None`: the VM has none.
    pub target: Option<Target>,
    /// The guest kernel has it as a console.
    pub kernel: bool,
}

/// Suffix of a target: the guest kernel does not have it as a console.
const NOT_OF_KERNEL: &str = ",kernel=off";

impl Virtio {
    /// Parses `off`, or a target as [`Target::parse`] does, with `,kernel=off` or without.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (target, kernel) = match text.strip_suffix(NOT_OF_KERNEL) {
            Some(target) => (target, false),
            None => (text, true),
        };
        match text {
            "off" => Ok(Self { target: None, kernel }),
            _ => Target::parse(target)
                .map(|target| Self { target: Some(target), kernel })
                .map_err(|text| text.replace("expected", "expected off,")),
        }
    }

    fn text(&self) -> Option<String> {
        let Some(target) = &self.target else { return Some("off".to_owned()) };
        let suffix = if self.kernel { "" } else { NOT_OF_KERNEL };
        Some(format!("{}{suffix}", target.text()?))
    }
}

string_value!(
    Virtio,
    "Console",
    "^(off|(stdio|pty|null|file=.+|tail=.+|unix=.+)(,kernel=off)?)$",
    "Connection of the virtio console; `off`: the VM has none; `,kernel=off`: it is no console of the guest kernel."
);

string_value!(
    Target,
    "Serial",
    "^(stdio|pty|null|file=.+|tail=.+|unix=.+)$",
    "Connection of the serial line."
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets() {
        for text in ["stdio", "pty", "null", "file=a=b", "tail=a", "unix=/run/s"] {
            let target = Target::parse(text).unwrap();
            assert_eq!(serde_json::to_string(&target).unwrap(), format!("\"{text}\""));
        }
        for text in ["", "file=", "tail=", "unix", "tty"] {
            assert!(Target::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn virtio_consoles() {
        for text in ["off", "pty", "stdio,kernel=off", "file=a,b,kernel=off"] {
            let console = Virtio::parse(text).unwrap();
            assert_eq!(console.kernel, !text.ends_with("off") || text == "off", "{text}");
            assert_eq!(serde_json::to_string(&console).unwrap(), format!("\"{text}\""));
        }
        for text in ["off,kernel=off", "stdio,kernel=on", ",kernel=off"] {
            assert!(Virtio::parse(text).is_err(), "{text}");
        }
    }
}

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
    /// A Unix socket; one client at a time.
    Unix(PathBuf),
}

impl Target {
    /// Parses `stdio`, `pty`, `null`, `file=PATH` or `unix=PATH`.
    pub fn parse(text: &str) -> Result<Self, String> {
        match (text, text.split_once('=')) {
            ("stdio", _) => Ok(Self::Stdio),
            ("pty", _) => Ok(Self::Pty),
            ("null", _) => Ok(Self::Null),
            (_, Some(("file", path))) if !path.is_empty() => Ok(Self::File(path.into())),
            (_, Some(("unix", path))) if !path.is_empty() => Ok(Self::Unix(path.into())),
            _ => Err(format!(
                "invalid target `{text}`: expected stdio, pty, null, file=PATH or unix=PATH"
            )),
        }
    }

    fn text(&self) -> Option<String> {
        Some(match self {
            Self::Stdio => "stdio".to_owned(),
            Self::Pty => "pty".to_owned(),
            Self::Null => "null".to_owned(),
            Self::File(path) => format!("file={}", path.to_str()?),
            Self::Unix(path) => format!("unix={}", path.to_str()?),
        })
    }

    /// Returns the path, if the target has one.
    pub fn path_mut(&mut self) -> Option<&mut PathBuf> {
        match self {
            Self::File(path) | Self::Unix(path) => Some(path),
            _ => None,
        }
    }
}

/// Configured connection of the virtio console; `None`: the VM has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Virtio(pub Option<Target>);

impl Virtio {
    /// Parses `off`, or a target as [`Target::parse`] does.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self(None)),
            _ => Target::parse(text)
                .map(|target| Self(Some(target)))
                .map_err(|text| text.replace("expected", "expected off,")),
        }
    }

    fn text(&self) -> Option<String> {
        self.0.as_ref().map_or_else(|| Some("off".to_owned()), Target::text)
    }
}

string_value!(
    Virtio,
    "Console",
    "^(off|stdio|pty|null|file=.+|unix=.+)$",
    "Connection of the virtio console; `off`: the VM has none."
);

string_value!(
    Target,
    "Serial",
    "^(stdio|pty|null|file=.+|unix=.+)$",
    "Connection of the serial line."
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets() {
        for text in ["stdio", "pty", "null", "file=a=b", "unix=/run/s"] {
            let target = Target::parse(text).unwrap();
            assert_eq!(serde_json::to_string(&target).unwrap(), format!("\"{text}\""));
        }
        for text in ["", "file=", "unix", "tty"] {
            assert!(Target::parse(text).is_err(), "{text}");
        }
    }
}

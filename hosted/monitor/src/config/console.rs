//! Configuration of consoles: `--serial` and `--console`.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize, Serializer};
use std::borrow::Cow;
use std::path::{Path, PathBuf};

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
}

impl JsonSchema for Virtio {
    fn schema_name() -> Cow<'static, str> {
        "Console".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "Connection of the virtio console; `off`: the VM has none.",
            "type": "string",
            "pattern": "^(off|stdio|pty|null|file=.+|unix=.+)$",
        })
    }
}

impl Serialize for Virtio {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0 {
            None => serializer.serialize_str("off"),
            Some(target) => target.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Virtio {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

impl JsonSchema for Target {
    fn schema_name() -> Cow<'static, str> {
        "Serial".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "Connection of the serial line.",
            "type": "string",
            "pattern": "^(stdio|pty|null|file=.+|unix=.+)$",
        })
    }
}

impl Serialize for Target {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = |key: &str, path: &Path| match path.to_str() {
            Some(path) => Ok(format!("{key}={path}")),
            None => Err(serde::ser::Error::custom("a path is not UTF-8")),
        };
        match self {
            Self::Stdio => serializer.serialize_str("stdio"),
            Self::Pty => serializer.serialize_str("pty"),
            Self::Null => serializer.serialize_str("null"),
            Self::File(file) => serializer.serialize_str(&text("file", file)?),
            Self::Unix(socket) => serializer.serialize_str(&text("unix", socket)?),
        }
    }
}

impl<'de> Deserialize<'de> for Target {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

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

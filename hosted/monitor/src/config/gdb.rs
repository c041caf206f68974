//! Configuration of the debugger: `--gdb`.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize, Serializer};
use std::borrow::Cow;
use std::path::PathBuf;

/// Listening address for a debugger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GdbEndpoint {
    /// Socket.
    address: GdbAddress,
    /// The guest does not start before the debugger connects.
    wait: bool,
}

/// Kinds of addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GdbAddress {
    /// Path of a Unix socket.
    Unix(PathBuf),
    /// Host (default: the loopback address) and port.
    Tcp(String),
}

impl GdbEndpoint {
    /// Parses `unix=SOCKET` or `tcp=[HOST]:PORT`, and `,wait`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (address, wait) = match text.strip_suffix(",wait") {
            Some(address) => (address, true),
            None => (text, false),
        };
        let refuse = || {
            format!(
                "invalid debugger address `{text}`: expected unix=SOCKET or tcp=:PORT, optionally with `,wait`"
            )
        };
        let address = match address.split_once('=').ok_or_else(refuse)? {
            ("unix", path) if !path.is_empty() => GdbAddress::Unix(path.into()),
            ("tcp", address) => {
                let (_, port) = address.rsplit_once(':').ok_or_else(refuse)?;
                port.parse::<u16>().map_err(|_| refuse())?;
                GdbAddress::Tcp(address.to_owned())
            }
            _ => return Err(refuse()),
        };
        Ok(Self { address, wait })
    }

    /// Returns the address.
    pub fn address(&self) -> &GdbAddress {
        &self.address
    }

    /// Returns whether the guest waits for the debugger.
    pub fn waits(&self) -> bool {
        self.wait
    }

    /// Returns the path of the Unix socket, if it is one.
    pub fn path_mut(&mut self) -> Option<&mut PathBuf> {
        match &mut self.address {
            GdbAddress::Unix(path) => Some(path),
            GdbAddress::Tcp(_) => None,
        }
    }
}

impl JsonSchema for GdbEndpoint {
    fn schema_name() -> Cow<'static, str> {
        "Gdb".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "Listening address for GDB; with `,wait` the guest does not start before GDB connects.",
            "type": "string",
            "pattern": "^(unix=.+|tcp=.*:[0-9]+)(,wait)?$",
        })
    }
}

impl Serialize for GdbEndpoint {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let wait = if self.wait { ",wait" } else { "" };
        match &self.address {
            GdbAddress::Unix(path) => match path.to_str() {
                Some(path) => serializer.serialize_str(&format!("unix={path}{wait}")),
                None => Err(serde::ser::Error::custom("a path is not UTF-8")),
            },
            GdbAddress::Tcp(address) => serializer.serialize_str(&format!("tcp={address}{wait}")),
        }
    }
}

impl<'de> Deserialize<'de> for GdbEndpoint {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places() {
        for text in ["unix=/run/gdb", "unix=g,wait", "tcp=:1234", "tcp=[::1]:1,wait"] {
            let place = GdbEndpoint::parse(text).unwrap();
            assert_eq!(place.wait, text.ends_with(",wait"));
            assert_eq!(serde_json::to_string(&place).unwrap(), format!("\"{text}\""));
        }
        for text in ["", "unix=", "tcp=1234", "tcp=:port", ":1234", "tcp=:1234,stop"] {
            assert!(GdbEndpoint::parse(text).is_err(), "{text}");
        }
    }
}

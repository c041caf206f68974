//! Configuration of the debugger: `--gdb`.

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

    fn text(&self) -> Option<String> {
        let wait = if self.wait { ",wait" } else { "" };
        Some(match &self.address {
            GdbAddress::Unix(path) => format!("unix={}{wait}", path.to_str()?),
            GdbAddress::Tcp(address) => format!("tcp={address}{wait}"),
        })
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

string_value!(
    GdbEndpoint,
    "Gdb",
    "^(unix=.+|tcp=.*:[0-9]+)(,wait)?$",
    "Listening address for GDB; with `,wait` the guest does not start before GDB connects."
);

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

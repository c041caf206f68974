//! Configuration of named ports: `--port`.

use super::console::Target;
use hosted_command::failure::Failure;
use hosted_command::keyvalue;
use proto::ports::MAX_NAME;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Largest number of named ports: one is the console's.
pub const MAX_NAMED: usize = proto::ports::MAX_PORTS - 1;

/// Configuration of a named port of the virtio console: `[[port]]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PortConfig {
    /// Name for the guest, which has the device /dev/virtio-ports/NAME.
    #[schemars(length(min = 1, max = 64))]
    pub name: PortName,
    /// Connection of the port.
    pub target: Target,
}

/// Name of a port: 1 to 64 printable ASCII characters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize, Serialize, JsonSchema)]
#[serde(try_from = "String")]
pub struct PortName(pub(crate) String);

impl TryFrom<String> for PortName {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        let is_printable = name.bytes().all(|byte| byte.is_ascii_graphic());
        match (1..=MAX_NAME).contains(&name.len()) && is_printable {
            true => Ok(Self(name)),
            false => Err(format!(
                "the name `{name}` must have 1 to {MAX_NAME} printable ASCII characters"
            )),
        }
    }
}

/// Parses `NAME,target=TARGET`.
pub fn parse(text: &str) -> Result<PortConfig, Failure> {
    let parsed: Result<_, Failure> = keyvalue::parse("--port", "name", text);
    parsed.map_err(|failure| failure.help("use --port NAME,target=unix=SOCKET"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hosted_command::failure;

    #[test]
    fn descriptions() {
        let port = parse("org.test,target=unix=a=b").unwrap();
        assert_eq!((&*port.name.0, port.target), ("org.test", Target::Unix("a=b".into())));
        let long = format!("{},target=null", "x".repeat(MAX_NAME + 1));
        for text in ["", "a", "a,target=tty", ",target=null", "a b,target=null", &long] {
            assert_eq!(parse(text).unwrap_err().code(), failure::BAD_CONFIG, "{text}");
        }
    }
}

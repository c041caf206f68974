//! Configuration of the vsock device: `--vsock`.

use hosted_command::failure::Failure;
use hosted_command::keyvalue;
use proto::vsock::GUESTS;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Configuration of the vsock device: `[vsock]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VsockConfig {
    /// Guest CID, 3 or more. Several VMs may use the same CID: they are not connected.
    #[schemars(range(min = 3))]
    pub cid: Cid,
    /// Socket for host-to-guest connections. Guest connections to port P arrive at the socket with
    /// `_P` appended to this path.
    pub path: PathBuf,
}

/// Guest CID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(try_from = "u32")]
pub struct Cid(u32);

impl TryFrom<u32> for Cid {
    type Error = String;

    fn try_from(cid: u32) -> Result<Self, String> {
        match GUESTS.contains(&cid) {
            true => Ok(Self(cid)),
            false => {
                let (first, last) = (GUESTS.start(), GUESTS.end());
                Err(format!("invalid guest CID {cid}: must be {first} to {last}"))
            }
        }
    }
}

/// Parses `cid=CID,path=SOCKET`.
pub fn parse(text: &str) -> Result<VsockConfig, Failure> {
    let parsed = keyvalue::parse("--vsock", "cid", text);
    parsed.map_err(|failure| failure.help("use --vsock cid=3,path=SOCKET"))
}

impl VsockConfig {
    /// Returns the guest CID.
    pub fn cid(&self) -> u32 {
        self.cid.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hosted_command::failure;

    #[test]
    fn descriptions() {
        let wanted = VsockConfig { cid: Cid(3), path: "a=b".into() };
        assert_eq!(parse("cid=3,path=a=b").unwrap(), wanted);
        assert_eq!(parse("3,path=a=b").unwrap(), wanted);
        for (text, said) in [
            ("", "not ``"),
            ("cid=3", "`path` is missing"),
            ("path=a", "`cid` is missing"),
            ("cid=2,path=a", "invalid guest CID 2"),
            ("cid=4294967295,path=a", "invalid guest CID"),
            ("cid=4294967296,path=a", "4294967296"),
            ("cid=3,path=a,port=1", "unknown key `port`"),
        ] {
            let failure = parse(text).unwrap_err();
            assert_eq!(failure.code(), failure::BAD_CONFIG, "{text}");
            assert!(failure.to_string().contains(said), "{text}: {failure}");
        }
    }
}

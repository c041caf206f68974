//! Configuration of networks: `--net`.

use hosted_command::failure::{self, Failure};
use hosted_command::keyvalue;
use hosted_command::value::parse_mac;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

/// Option that may be given several times.
const FORWARD: &str = "hostfwd=";
/// Longest name of a network device (`IFNAMSIZ` in Linux, terminating zero included).
const NAME: usize = 15;

/// Last bytes of the addresses of a guest's router and its name server.
pub const ROUTER: u8 = 2;
/// See [`ROUTER`].
pub const RESOLVER: u8 = 3;
/// Least MTU of Linux' interfaces with IPv4 (RFC 791).
const MIN_MTU: u16 = 68;

/// Configuration of a network: `[[net]]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NetConfig {
    /// Kind, unless it is a tap device or a switch.
    pub kind: Option<Kind>,
    /// Tap device of the host.
    pub tap: Option<DeviceName>,
    /// Socket of a virtual switch between all VMs that name it.
    pub switch: Option<PathBuf>,
    /// Port forwardings from the host to the guest: `tcp:2222:22`, or `udp:0.0.0.0:53-:53` to
    /// listen on an address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hostfwd: Vec<Forward>,
    /// Let the guest reach services on the host's loopback address, at the address of its router.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hostloopback: bool,
    /// IPv4 address that the guest is given, in a network of 24 bits whose address 2 is its router
    /// and address 3 its name server [default: this host's address, router and name servers].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<Ipv4Addr>,
    /// MAC address of the guest's card [default: random].
    pub mac: Option<Mac>,
    /// MTU of the guest's card in bytes [default: that of the tap device, else 1500].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
}

/// Networks without a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// User-mode networking with `passt`.
    User,
    /// Same as `user`.
    Passt,
    /// No network.
    None,
}

/// Name of a network device.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(try_from = "String")]
pub struct DeviceName(pub(crate) String);

impl TryFrom<String> for DeviceName {
    type Error = String;

    /// Applies Linux' rule (`dev_valid_name`).
    fn try_from(name: String) -> Result<Self, String> {
        let is_fine = |byte: u8| byte.is_ascii_graphic() && !b"/:%".contains(&byte);
        let fits = (1..=NAME).contains(&name.len()) && !matches!(name.as_str(), "." | "..");
        match fits && name.bytes().all(is_fine) {
            true => Ok(Self(name)),
            false => Err(format!("invalid device name `{name}`")),
        }
    }
}

/// MAC address of a network card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
pub struct Mac(pub(crate) [u8; 6]);

impl TryFrom<String> for Mac {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        parse_mac(&text).map(Self)
    }
}

impl Mac {
    /// Returns the bytes in the order of transmission.
    pub fn bytes(&self) -> [u8; 6] {
        self.0
    }
}

impl From<Mac> for String {
    fn from(mac: Mac) -> Self {
        mac.0.map(|byte| format!("{byte:02x}")).join(":")
    }
}

impl NetConfig {
    /// No kind of network.
    const EMPTY: Self = Self {
        kind: None,
        tap: None,
        switch: None,
        hostfwd: Vec::new(),
        hostloopback: false,
        address: None,
        mac: None,
        mtu: None,
    };

    /// User-mode networking with `passt`, for a guest with this address.
    pub fn user(address: Ipv4Addr) -> Self {
        Self { kind: Some(Kind::User), address: Some(address), ..Self::EMPTY }
    }

    /// Tap device of the host, for a card with this address.
    pub fn tap(name: DeviceName, mac: Mac) -> Self {
        Self { tap: Some(name), mac: Some(mac), ..Self::EMPTY }
    }

    /// Returns whether the guest has a card for it.
    pub fn is_connected(&self) -> bool {
        self.kind != Some(Kind::None)
    }

    /// Checks that the keys are consistent.
    pub fn check(&self) -> Result<(), String> {
        let said = [self.kind.is_some(), self.tap.is_some(), self.switch.is_some()];
        if said.into_iter().filter(|said| *said).count() != 1 {
            return Err("exactly one of `kind`, `tap`, `switch` is required".to_owned());
        }
        if !self.hostfwd.is_empty() && !matches!(self.kind, Some(Kind::User | Kind::Passt)) {
            return Err("`hostfwd` requires `user` or `passt`".to_owned());
        }
        if self.address.is_some() && !matches!(self.kind, Some(Kind::User | Kind::Passt)) {
            return Err("`address` requires `user` or `passt`".to_owned());
        }
        if let Some((address, reason)) = self.address.and_then(|it| Some((it, unusable(it)?))) {
            return Err(format!("`address` must be one for the guest: {address} {reason}"));
        }
        if self.hostloopback && !matches!(self.kind, Some(Kind::User | Kind::Passt)) {
            return Err("`hostloopback` requires `user` or `passt`".to_owned());
        }
        if self.mtu.is_some() && self.tap.is_none() {
            return Err("`mtu` requires `tap`".to_owned());
        }
        if let Some(mtu) = self.mtu.filter(|mtu| *mtu < MIN_MTU) {
            return Err(format!("`mtu` must be at least {MIN_MTU} bytes (got {mtu})"));
        }
        Ok(())
    }
}

/// Returns the reason why a guest cannot have an address; `None`: it can.
fn unusable(address: Ipv4Addr) -> Option<&'static str> {
    Some(match address.octets() {
        // "This network", loopback, multicast and reserved addresses (RFC 6890).
        [0 | 127 | 224.., ..] => "is not the address of a single host",
        [.., 0] => "is that of its network",
        [.., ROUTER] => "is that of its router",
        [.., RESOLVER] => "is that of its name server",
        [.., u8::MAX] => "is the broadcast address of its network",
        _ => return None,
    })
}

/// Port forwarding from the host to the guest.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
pub struct Forward {
    /// UDP instead of TCP.
    pub udp: bool,
    /// Listening address on the host.
    pub address: IpAddr,
    /// Host port.
    pub port: u16,
    /// Guest port.
    pub to: u16,
}

impl Forward {
    /// Parses `tcp:HOST_PORT:PORT`, or QEMU's form `tcp:[ADDRESS]:HOST_PORT-:PORT`. The default
    /// address is the loopback address.
    pub fn parse(text: &str) -> Result<Self, String> {
        let refuse = || {
            format!(
                "invalid port forwarding `{text}`: expected tcp:2222:22 or tcp:0.0.0.0:2222-:22"
            )
        };
        let (protocol, rest) = text.split_once(':').ok_or_else(refuse)?;
        let (host, to) = match rest.split_once("-:") {
            Some(pair) => pair,
            None => rest.split_once(':').ok_or_else(refuse)?,
        };
        let (address, port) = host.rsplit_once(':').unwrap_or(("", host));
        let number = |text: &str| text.parse().ok().filter(|&port| port != 0).ok_or_else(refuse);
        let udp = match protocol {
            "tcp" => false,
            "udp" => true,
            _ => return Err(refuse()),
        };
        let address = match address.trim_matches(['[', ']']) {
            "" => Ipv4Addr::LOCALHOST.into(),
            address => address.parse().map_err(|_| refuse())?,
        };
        Ok(Self { udp, address, port: number(port)?, to: number(to)? })
    }

    /// Formats the forwarding as it is parsed.
    fn text(&self) -> String {
        let protocol = if self.udp { "udp" } else { "tcp" };
        let Self { address, port, to, .. } = self;
        match address {
            IpAddr::V4(Ipv4Addr::LOCALHOST) => format!("{protocol}:{port}:{to}"),
            IpAddr::V4(address) => format!("{protocol}:{address}:{port}-:{to}"),
            IpAddr::V6(address) => format!("{protocol}:[{address}]:{port}-:{to}"),
        }
    }
}

impl TryFrom<String> for Forward {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Self::parse(&text)
    }
}

impl From<Forward> for String {
    fn from(forward: Forward) -> Self {
        forward.text()
    }
}

/// Parses `KIND[,KEY=VALUE]...`; `hostfwd` may be given several times.
pub fn parse(text: &str) -> Result<NetConfig, Failure> {
    let forward = |part: &&str| part.starts_with(FORWARD);
    let (forwards, rest): (Vec<_>, Vec<_>) = text.split(',').partition(forward);
    let refuse =
        |message: String| Failure::new(failure::BAD_CONFIG, format!("--net {text}: {message}"));
    let forwards = forwards.iter().map(|part| Forward::parse(&part[FORWARD.len()..]));
    let forwards = forwards.collect::<Result<Vec<_>, _>>().map_err(refuse);
    let net = forwards.and_then(|hostfwd| {
        let net: NetConfig = keyvalue::parse("--net", "kind", &rest.join(","))?;
        let net = NetConfig { hostfwd, ..net };
        net.check().map_err(refuse)?;
        Ok(net)
    });
    net.map_err(|failure| {
        failure.help(
            "use --net user,hostfwd=tcp:2222:22 or --net tap=NAME or --net switch=SOCKET, \
             optionally with mac=02:00:00:00:00:01",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions() {
        let kind = |kind| NetConfig { kind: Some(kind), ..NetConfig::EMPTY };
        assert_eq!(parse("none").unwrap(), kind(Kind::None));
        assert_eq!(parse("user").unwrap(), kind(Kind::User));
        assert_eq!(parse("passt").unwrap(), kind(Kind::Passt));
        let tap = Some(DeviceName("tap0".into()));
        let wanted = NetConfig { tap, ..NetConfig::EMPTY };
        assert_eq!(parse("tap=tap0").unwrap(), wanted);
        let wanted = NetConfig { mtu: Some(9000), ..wanted };
        assert_eq!(parse("tap=tap0,mtu=9000").unwrap(), wanted);
        for wrong in ["tap=tap0,mtu=67", "tap=tap0,mtu=65536", "tap=tap0,mtu=x", "user,mtu=1500"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        let switch = Some("a=b".into());
        assert_eq!(parse("switch=a=b").unwrap(), NetConfig { switch, ..NetConfig::EMPTY });
        for (text, hostloopback) in
            [("user,hostloopback=on", true), ("user,hostloopback=off", false)]
        {
            let wanted = NetConfig { hostloopback, ..kind(Kind::User) };
            assert_eq!(parse(text).unwrap(), wanted);
        }
        for last in [1, 4, 15, 254] {
            let address = Ipv4Addr::new(10, 0, 2, last);
            assert_eq!(
                parse(&format!("user,address={address}")).unwrap(),
                NetConfig::user(address)
            );
        }
        let forward = |text| Forward::parse(text).unwrap();
        let wanted = NetConfig {
            hostfwd: vec![forward("tcp:2222:22"), forward("udp:0.0.0.0:53-:53")],
            mac: Some(Mac([2, 0, 0, 0, 0, 1])),
            ..kind(Kind::User)
        };
        let text = "user,hostfwd=tcp:2222:22,mac=02:00:00:00:00:01,hostfwd=udp:0.0.0.0:53-:53";
        assert_eq!(parse(text).unwrap(), wanted);
    }

    #[test]
    fn bad_descriptions() {
        for (text, said) in [
            ("", "one of user, passt, none"),
            ("usr", "one of user, passt, none"),
            ("bridge=br0", "unknown key `bridge`"),
            ("mac=02:00:00:00:00:01", "exactly one of `kind`, `tap`, `switch`"),
            ("user,tap=a", "exactly one of `kind`, `tap`, `switch`"),
            ("tap=a/b", "invalid device name"),
            ("tap=..", "invalid device name"),
            ("tap=sixteen-is-a-lot", "invalid device name"),
            ("user,mac=1", "`1`"),
            ("user,mac=03:00:00:00:00:01", "invalid MAC address"),
            ("user,hostfw=tcp:1:2", "did you mean `hostfwd`?"),
            ("user,x=1", "unknown key `x`"),
            ("user,hostfwd", "no value"),
            ("user,hostfwd=tcp:0:22", "`tcp:0:22`"),
            ("tap=a,hostfwd=tcp:1:22", "`hostfwd` requires"),
            ("none,hostfwd=tcp:1:22", "`hostfwd` requires"),
            ("user,hostloopback=yes", "`on` or `off`"),
            ("switch=a,hostloopback=on", "`hostloopback` requires `user` or `passt`"),
            ("tap=a,address=10.0.2.15", "`address` requires `user` or `passt`"),
            ("user,address=10.0.2", "address"),
            ("user,address=10.0.2.0", "10.0.2.0 is that of its network"),
            ("user,address=10.0.2.2", "10.0.2.2 is that of its router"),
            ("passt,address=192.168.7.3", "192.168.7.3 is that of its name server"),
            ("user,address=10.0.2.255", "10.0.2.255 is the broadcast address"),
            ("user,address=0.0.0.9", "0.0.0.9 is not the address of a single host"),
            ("user,address=127.0.0.9", "127.0.0.9 is not the address"),
            ("user,address=224.0.0.9", "224.0.0.9 is not the address"),
            ("user,address=255.255.255.255", "255.255.255.255 is not the address"),
        ] {
            let failure = parse(text).unwrap_err();
            assert_eq!(failure.code(), failure::BAD_CONFIG, "{text}");
            assert!(failure.to_string().contains(said), "{text}: {failure}");
        }
    }

    #[test]
    fn forwards() {
        for text in ["tcp:2222:22", "udp:0.0.0.0:53-:5353", "tcp:[::1]:80-:80"] {
            assert_eq!(Forward::parse(text).unwrap().text(), text);
        }
        for text in ["", "tcp", "tcp:22", "icmp:1:2", "tcp:1:70000", "tcp:a:1:2", "tcp:a:1-:2"] {
            assert!(Forward::parse(text).is_err(), "{text}");
        }
    }
}

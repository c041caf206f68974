//! Networks of `parador run`: what the user says of them, and descriptors that carry their frames.

use crate::attach::parse_mac;
use crate::failure::{self, Failure};
use crate::keyvalue;
use crate::passt::{Forward, Passt};
use crate::switch;
use rustix::process::geteuid;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// What makes tap devices.
const TUN: &str = "/dev/net/tun";
/// The option that may be there several times.
const FORWARD: &str = "hostfwd=";
/// Most bytes of the name of a network device (`IFNAMSIZ` in Linux, with a zero behind it).
const NAME: usize = 15;
/// Longest packet in a frame that streams carry. Fewer and longer frames cost less; with much longer ones TCP stops at each frame, because a few of them
/// fill its usual window. Measured: 16 KiB is where it is fastest in both directions.
pub const STREAM_MTU: u16 = 16_384;
/// Longest packet of a device that says nothing else.
const ETHERNET_MTU: u16 = 1500;
/// What the user says of a network: `[[net]]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// What it is, unless it is a tap device or a switch.
    kind: Option<Kind>,
    /// Tap device of the host.
    tap: Option<DeviceName>,
    /// Socket of a switch between all machines that name it.
    pub switch: Option<PathBuf>,
    /// Ports of the host that lead to the guest: `tcp:2222:22`, or `udp:0.0.0.0:53-:53` to listen at an address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    hostfwd: Vec<Forward>,
    /// The guest reaches services that listen on the host's loopback address, at the address of its router.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    hostloopback: bool,
    /// Address of the guest's card [default: a random one].
    mac: Option<Mac>,
}

/// What a network can be that needs no name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Kind {
    /// The host's own network, by `passt`.
    User,
    /// The same.
    Passt,
    /// No network.
    None,
}

/// Name of a network device.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(try_from = "String")]
struct DeviceName(String);

impl TryFrom<String> for DeviceName {
    type Error = String;

    /// As Linux has it (`dev_valid_name`).
    fn try_from(name: String) -> Result<Self, String> {
        let is_fine = |byte: u8| byte.is_ascii_graphic() && !b"/:%".contains(&byte);
        let fits = (1..=NAME).contains(&name.len()) && !matches!(name.as_str(), "." | "..");
        match fits && name.bytes().all(is_fine) {
            true => Ok(Self(name)),
            false => Err(format!("`{name}` is no name of a device")),
        }
    }
}

/// Address of a network card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
struct Mac([u8; 6]);

impl TryFrom<String> for Mac {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        parse_mac(&text).map(Self)
    }
}

impl From<Mac> for String {
    fn from(mac: Mac) -> Self {
        mac.0.map(|byte| format!("{byte:02x}")).join(":")
    }
}

/// A network, ready to be given to a machine.
#[derive(Debug)]
pub struct Net {
    /// What carries the frames.
    descriptor: OwnedFd,
    /// What the machine is told of it.
    pub record: proto::wedge::NetRecord,
    /// The program on the other side, which ends with this.
    passt: Option<Passt>,
}

/// Reads `KIND[,KEY=VALUE]...`; `hostfwd` may be there several times.
pub fn parse(text: &str) -> Result<Description, Failure> {
    let forward = |part: &&str| part.starts_with(FORWARD);
    let (forwards, rest): (Vec<_>, Vec<_>) = text.split(',').partition(forward);
    let refuse =
        |message: String| Failure::new(failure::BAD_CONFIG, format!("--net {text}: {message}"));
    let forwards = forwards.iter().map(|part| Forward::parse(&part[FORWARD.len()..]));
    let forwards = forwards.collect::<Result<Vec<_>, _>>().map_err(refuse);
    let net = forwards.and_then(|hostfwd| {
        let net: Description = keyvalue::parse("--net", "kind", &rest.join(","))?;
        let net = Description { hostfwd, ..net };
        net.check().map_err(refuse)?;
        Ok(net)
    });
    net.map_err(|failure| {
        failure.help(
            "write --net user,hostfwd=tcp:2222:22 or --net tap=NAME or --net switch=SOCKET, \
             with mac=02:00:00:00:00:01 if you like",
        )
    })
}

impl Description {
    /// Whether it is one network.
    fn check(&self) -> Result<(), String> {
        let said = [self.kind.is_some(), self.tap.is_some(), self.switch.is_some()];
        if said.into_iter().filter(|said| *said).count() != 1 {
            return Err("a network is one of `kind`, `tap`, `switch`".to_owned());
        }
        if !self.hostfwd.is_empty() && !matches!(self.kind, Some(Kind::User | Kind::Passt)) {
            return Err("only `user` and `passt` forward ports".to_owned());
        }
        if self.hostloopback && !matches!(self.kind, Some(Kind::User | Kind::Passt)) {
            return Err("only `user` and `passt` have `hostloopback`".to_owned());
        }
        Ok(())
    }

    /// Connects the network, and starts what it needs. `None`: there is none.
    pub fn open(&self) -> Result<Option<Net>, Failure> {
        self.check().map_err(|message| Failure::new(failure::BAD_CONFIG, message))?;
        let mac = match self.mac {
            Some(Mac(mac)) => mac,
            None => random_mac()?,
        };
        let stream = proto::wedge::NetRecord { mac, mtu: STREAM_MTU, tap: [0; 16] };
        if let Some(DeviceName(name)) = &self.tap {
            let mtu = look_at_tap(name)?;
            let mut tap = [0; 16];
            tap[..name.len()].copy_from_slice(name.as_bytes());
            let opened = OpenOptions::new().read(true).write(true).open(TUN);
            let file = opened.map_err(|error| {
                let failure = Failure::file("open", Path::new(TUN), &error);
                failure.help("`--net user` needs no device of the host")
            })?;
            let record = proto::wedge::NetRecord { mac, mtu, tap };
            return Ok(Some(Net { descriptor: file.into(), record, passt: None }));
        }
        if let Some(path) = &self.switch {
            let socket = switch::join(path)?;
            return Ok(Some(Net { descriptor: socket.into(), record: stream, passt: None }));
        }
        if self.kind == Some(Kind::None) {
            return Ok(None);
        }
        let (passt, socket) = Passt::start(&self.hostfwd, self.hostloopback)?;
        Ok(Some(Net { descriptor: socket.into(), record: stream, passt: Some(passt) }))
    }
}

impl Net {
    /// Waits until the network is there.
    pub fn wait(&mut self) -> Result<(), Failure> {
        let Some(passt) = &mut self.passt else { return Ok(()) };
        let socket = self.descriptor.try_clone();
        let socket = socket.map_err(|error| Failure::os("copy a descriptor", &error))?;
        passt.wait(&mut socket.into(), self.record.mac)
    }

    /// What carries the frames, and what has to live as long as the machine.
    pub fn split(self) -> (OwnedFd, Option<Passt>) {
        (self.descriptor, self.passt)
    }
}

/// An address that no manufacturer has given and that no other machine will have: locally administered, of one card.
fn random_mac() -> Result<[u8; 6], Failure> {
    let mut mac = [0; 6];
    File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut mac))
        .map_err(|error| Failure::os("get random numbers", &error))?;
    mac[0] = mac[0] & !1 | 2;
    Ok(mac)
}

/// Whether the user may have the tap device, or make one of this name; its longest packet.
fn look_at_tap(name: &str) -> Result<u16, Failure> {
    /// `IFF_TAP` among the kinds of devices.
    const TAP: u32 = 2;
    const KIND: u32 = 3;
    let folder = Path::new("/sys/class/net").join(name);
    let read = |file: &str| fs::read_to_string(folder.join(file)).unwrap_or_default();
    let make = "as root: `ip tuntap add NAME mode tap user USER; ip link set NAME up`";
    let own = geteuid();
    if !folder.exists() {
        if !own.is_root() {
            let text = format!("there is no tap device {name}, and only root can make one");
            return Err(Failure::new(failure::PERMISSION, text).help(make));
        }
        return Ok(ETHERNET_MTU);
    }
    let flags = read("tun_flags");
    let flags = flags.trim().strip_prefix("0x").and_then(|text| u32::from_str_radix(text, 16).ok());
    if flags.is_none_or(|flags| flags & KIND != TAP) {
        let text = format!("{name} is no tap device");
        return Err(Failure::new(failure::BAD_CONFIG, text).help(make));
    }
    if !own.is_root() && read("owner").trim() != own.as_raw().to_string() {
        let text = format!("tap device {name} belongs to another user");
        return Err(Failure::new(failure::PERMISSION, text).help(make));
    }
    // Somebody has it open.
    if read("carrier").trim() == "1" {
        let text = format!("tap device {name} is in use by another machine");
        return Err(Failure::new(failure::OS_ERROR, text));
    }
    Ok(read("mtu").trim().parse().unwrap_or(ETHERNET_MTU))
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: Description = Description {
        kind: None,
        tap: None,
        switch: None,
        hostfwd: Vec::new(),
        hostloopback: false,
        mac: None,
    };

    #[test]
    fn descriptions() {
        let kind = |kind| Description { kind: Some(kind), ..EMPTY };
        assert_eq!(parse("none").unwrap(), kind(Kind::None));
        assert_eq!(parse("user").unwrap(), kind(Kind::User));
        assert_eq!(parse("passt").unwrap(), kind(Kind::Passt));
        let tap = Some(DeviceName("tap0".into()));
        assert_eq!(parse("tap=tap0").unwrap(), Description { tap, ..EMPTY });
        let switch = Some("a=b".into());
        assert_eq!(parse("switch=a=b").unwrap(), Description { switch, ..EMPTY });
        for (text, hostloopback) in
            [("user,hostloopback=on", true), ("user,hostloopback=off", false)]
        {
            let wanted = Description { hostloopback, ..kind(Kind::User) };
            assert_eq!(parse(text).unwrap(), wanted);
        }
        let forward = |text| Forward::parse(text).unwrap();
        let wanted = Description {
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
            ("mac=02:00:00:00:00:01", "one of `kind`, `tap`, `switch`"),
            ("user,tap=a", "one of `kind`, `tap`, `switch`"),
            ("tap=a/b", "no name"),
            ("tap=..", "no name"),
            ("tap=sixteen-is-a-lot", "no name"),
            ("user,mac=1", "`1`"),
            ("user,mac=03:00:00:00:00:01", "no address of a network card"),
            ("user,hostfw=tcp:1:2", "did you mean `hostfwd`?"),
            ("user,x=1", "unknown key `x`"),
            ("user,hostfwd", "no value"),
            ("user,hostfwd=tcp:0:22", "`tcp:0:22`"),
            ("tap=a,hostfwd=tcp:1:22", "forward"),
            ("none,hostfwd=tcp:1:22", "forward"),
            ("user,hostloopback=yes", "`on` or `off`"),
            ("switch=a,hostloopback=on", "only `user` and `passt` have `hostloopback`"),
        ] {
            let failure = parse(text).unwrap_err();
            assert_eq!(failure.code(), failure::BAD_CONFIG, "{text}");
            assert!(failure.to_string().contains(said), "{text}: {failure}");
        }
    }

    #[test]
    fn addresses_differ() {
        let (first, second) = (random_mac().unwrap(), random_mac().unwrap());
        assert_ne!(first, second);
        assert_eq!(first[0] & 3, 2);
    }

    #[test]
    fn devices_that_are_no_tap() {
        // Every Linux has it.
        let failure = look_at_tap("lo").unwrap_err();
        assert_eq!(failure.code(), failure::BAD_CONFIG);
    }
}

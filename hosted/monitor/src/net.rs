//! Networks of `parador run`: their configuration, and the descriptors that carry their frames.

use crate::passt::{Forward, Passt};
use crate::switch;
use hosted_command::failure::{self, Failure};
use hosted_command::keyvalue;
use hosted_command::value::parse_mac;
use rustix::process::geteuid;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Device that creates tap devices.
const TUN: &str = "/dev/net/tun";
/// Option that may be given several times.
const FORWARD: &str = "hostfwd=";
/// Longest name of a network device (`IFNAMSIZ` in Linux, terminating zero included).
const NAME: usize = 15;
/// MTU of streams. Long frames cost less per byte; with much longer ones TCP stalls at each frame,
/// because a few of them fill its usual window. Measured optimum in both directions: 16 KiB.
pub const STREAM_MTU: u16 = 16_384;
/// MTU of a tap device that reports none.
const ETHERNET_MTU: u16 = 1500;
/// Configuration of a network: `[[net]]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NetConfig {
    /// Kind, unless it is a tap device or a switch.
    kind: Option<Kind>,
    /// Tap device of the host.
    tap: Option<DeviceName>,
    /// Socket of a virtual switch between all VMs that name it.
    pub switch: Option<PathBuf>,
    /// Port forwardings from the host to the guest: `tcp:2222:22`, or `udp:0.0.0.0:53-:53` to
    /// listen on an address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    hostfwd: Vec<Forward>,
    /// Let the guest reach services on the host's loopback address, at the address of its router.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    hostloopback: bool,
    /// MAC address of the guest's card [default: random].
    mac: Option<Mac>,
}

/// Networks without a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Kind {
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
struct DeviceName(String);

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

/// Connected network of a VM.
#[derive(Debug)]
pub struct NetBackend {
    /// Descriptor that carries the frames.
    descriptor: OwnedFd,
    /// Description for the VM.
    pub record: proto::hosted::NetRecord,
    /// User-mode network process, which ends with this.
    passt: Option<Passt>,
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

impl NetConfig {
    /// Checks that the keys are consistent.
    fn check(&self) -> Result<(), String> {
        let said = [self.kind.is_some(), self.tap.is_some(), self.switch.is_some()];
        if said.into_iter().filter(|said| *said).count() != 1 {
            return Err("exactly one of `kind`, `tap`, `switch` is required".to_owned());
        }
        if !self.hostfwd.is_empty() && !matches!(self.kind, Some(Kind::User | Kind::Passt)) {
            return Err("`hostfwd` requires `user` or `passt`".to_owned());
        }
        if self.hostloopback && !matches!(self.kind, Some(Kind::User | Kind::Passt)) {
            return Err("`hostloopback` requires `user` or `passt`".to_owned());
        }
        Ok(())
    }

    /// Connects the network and starts its processes; `None`: no network.
    pub fn open(&self) -> Result<Option<NetBackend>, Failure> {
        self.check().map_err(|message| Failure::new(failure::BAD_CONFIG, message))?;
        let mac = match self.mac {
            Some(Mac(mac)) => mac,
            None => random_mac()?,
        };
        let stream = proto::hosted::NetRecord { mac, mtu: STREAM_MTU, tap: [0; 16] };
        if let Some(DeviceName(name)) = &self.tap {
            let mtu = look_at_tap(name)?;
            let mut tap = [0; 16];
            tap[..name.len()].copy_from_slice(name.as_bytes());
            let opened = OpenOptions::new().read(true).write(true).open(TUN);
            let file = opened.map_err(|error| {
                let failure = Failure::file("open", Path::new(TUN), &error);
                failure.help("use `--net user`, which needs no host device")
            })?;
            let record = proto::hosted::NetRecord { mac, mtu, tap };
            return Ok(Some(NetBackend { descriptor: file.into(), record, passt: None }));
        }
        if let Some(path) = &self.switch {
            let socket = switch::join(path)?;
            return Ok(Some(NetBackend { descriptor: socket.into(), record: stream, passt: None }));
        }
        if self.kind == Some(Kind::None) {
            return Ok(None);
        }
        let (passt, socket) = Passt::start(&self.hostfwd, self.hostloopback)?;
        Ok(Some(NetBackend { descriptor: socket.into(), record: stream, passt: Some(passt) }))
    }
}

impl NetBackend {
    /// Waits until the network is ready.
    pub fn wait(&mut self) -> Result<(), Failure> {
        let Some(passt) = &mut self.passt else { return Ok(()) };
        let socket = self.descriptor.try_clone();
        let socket = socket.map_err(|error| Failure::os("duplicate a descriptor", &error))?;
        passt.wait(&mut socket.into(), self.record.mac)
    }

    /// Returns the descriptor of the frames, and the process that must live as long as the VM.
    pub fn split(self) -> (OwnedFd, Option<Passt>) {
        (self.descriptor, self.passt)
    }
}

/// Returns a random locally administered unicast address.
fn random_mac() -> Result<[u8; 6], Failure> {
    let mut mac = [0; 6];
    File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut mac))
        .map_err(|error| Failure::os("read random numbers", &error))?;
    mac[0] = mac[0] & !1 | 2;
    Ok(mac)
}

/// Checks that the user may open or create the tap device; returns its MTU.
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
            let text = format!("no tap device {name}, and only root can create one");
            return Err(Failure::new(failure::PERMISSION, text).help(make));
        }
        return Ok(ETHERNET_MTU);
    }
    let flags = read("tun_flags");
    let flags = flags.trim().strip_prefix("0x").and_then(|text| u32::from_str_radix(text, 16).ok());
    if flags.is_none_or(|flags| flags & KIND != TAP) {
        let text = format!("{name} is not a tap device");
        return Err(Failure::new(failure::BAD_CONFIG, text).help(make));
    }
    if !own.is_root() && read("owner").trim() != own.as_raw().to_string() {
        let text = format!("tap device {name} belongs to another user");
        return Err(Failure::new(failure::PERMISSION, text).help(make));
    }
    // Another process has it open.
    if read("carrier").trim() == "1" {
        let text = format!("tap device {name} is in use by another VM");
        return Err(Failure::new(failure::OS_ERROR, text));
    }
    Ok(read("mtu").trim().parse().unwrap_or(ETHERNET_MTU))
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: NetConfig = NetConfig {
        kind: None,
        tap: None,
        switch: None,
        hostfwd: Vec::new(),
        hostloopback: false,
        mac: None,
    };

    #[test]
    fn descriptions() {
        let kind = |kind| NetConfig { kind: Some(kind), ..EMPTY };
        assert_eq!(parse("none").unwrap(), kind(Kind::None));
        assert_eq!(parse("user").unwrap(), kind(Kind::User));
        assert_eq!(parse("passt").unwrap(), kind(Kind::Passt));
        let tap = Some(DeviceName("tap0".into()));
        assert_eq!(parse("tap=tap0").unwrap(), NetConfig { tap, ..EMPTY });
        let switch = Some("a=b".into());
        assert_eq!(parse("switch=a=b").unwrap(), NetConfig { switch, ..EMPTY });
        for (text, hostloopback) in
            [("user,hostloopback=on", true), ("user,hostloopback=off", false)]
        {
            let wanted = NetConfig { hostloopback, ..kind(Kind::User) };
            assert_eq!(parse(text).unwrap(), wanted);
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

//! Network of a pod: the engine has set a network namespace up, whose interface the guest takes
//! over with its address.
//!
//! The VM's tap device is connected to the interface by two filters that redirect every frame
//! (tc-u32(8), tc-mirred(8)), so the namespace's own network stack gets none. The tap device ends
//! with the VM.
//!
//! An interface that is a tap device itself belongs to a network in user space (slirp4netns), whose
//! port forwarder connects to the pod's address from inside of the namespace (rootlesskit). There
//! the namespace gives that address up and reaches the guest by the VM's tap device, from another
//! address of the network, which has no other members.

use crate::refuse;
use hosted_command::failure::{Failure, IoContext};
use hosted_command::input;
use hosted_monitor::config::net::{DeviceName, Mac, NetConfig};
use nix::sched::{CloneFlags, unshare};
use oci_spec::runtime::LinuxNamespaceType;
use proto::agent::{Network, Prefix, Route};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::Deserialize;
use std::fs::{self, File, Metadata};
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Refusal of the host's namespace.
const OF_HOST: &str = "a VM cannot have the host's network namespace";
/// Name of the tap device in the pod's namespace.
const TAP: &str = "parador0";
/// Multicast groups of routers: router solicitations (RFC 4861, section 6.3.7), and reports of
/// multicast listeners (RFC 3810, section 5.2.14).
const OF_ROUTERS: [&str; 2] = ["ff02::2", "ff02::16"];
/// Device that makes tap devices.
const TUN_DEVICE: &str = "/dev/net/tun";
/// Addresses of a card before its network is known: one that a host chooses itself (IEEE 802-2014,
/// section 8.4), and the size of the largest packet.
const AWAITED: (&str, u16) = ("02:00:00:00:00:01", u16::MAX);
/// Interfaces of the thread's namespace (proc(5)).
const INTERFACES: &str = "/proc/thread-self/net/dev";
/// Kind of tap devices for `ip`.
const TUN: &str = "tun";

/// Network of a VM.
#[derive(Debug)]
pub enum VmNetwork {
    /// None.
    Missing,
    /// The engine set it up before the VM was started.
    Found(Box<PodNetwork>),
    /// The engine may set it up between `create` and `start`, in a namespace that it demanded.
    Awaited,
}

/// Interface of a pod.
#[derive(Debug, PartialEq, Eq)]
pub struct PodNetwork {
    interface: String,
    mac: Mac,
    /// The interface is a tap device.
    is_tap: bool,
    /// Configuration of the guest.
    pub guest: Network,
}

/// Link, as `ip -details -json address` prints it.
#[derive(Deserialize)]
struct Link {
    ifname: String,
    #[serde(default)]
    address: String,
    #[serde(default)]
    link_type: String,
    mtu: Option<u32>,
    #[serde(default)]
    addr_info: Vec<Address>,
    #[serde(default)]
    linkinfo: LinkKind,
}

#[derive(Default, Deserialize)]
struct LinkKind {
    #[serde(default)]
    info_kind: String,
}

#[derive(Deserialize)]
struct Address {
    #[serde(default)]
    scope: String,
    local: Option<String>,
    #[serde(default)]
    prefixlen: u8,
}

/// Route, as `ip -json route` prints it.
#[derive(Deserialize)]
struct FoundRoute {
    /// Address with a prefix length or without, or `default`.
    dst: String,
    gateway: Option<IpAddr>,
    dev: Option<String>,
    #[serde(default)]
    protocol: String,
}

/// Moves this process to a network namespace. Processes that it starts later are in it, too.
///
/// # Errors
/// There is none at the path, or it is the host's: the VM would take the host's network over.
fn enter(namespace: &Path) -> Result<(), Failure> {
    move_to(&open(namespace)?).file_error("enter the network namespace", namespace)
}

/// Opens a network namespace.
///
/// # Errors
/// There is none at the path, or it is the host's.
pub fn open(namespace: &Path) -> Result<File, Failure> {
    let opened = input::try_open(namespace);
    let file = opened.file_error("open the network namespace", namespace)?;
    let found = file.metadata().file_error("examine the network namespace", namespace)?;
    if is_of_host(&found, LinuxNamespaceType::Network) {
        return Err(refuse(OF_HOST));
    }
    Ok(file)
}

/// Returns whether a namespace is that of this process, in which engines start it, or of the host's
/// first process.
pub fn is_of_host(namespace: &Metadata, kind: LinuxNamespaceType) -> bool {
    let is_same = |process: &str| {
        let other =
            fs::metadata(Path::new("/proc").join(process).join("ns").join(kind.to_string()));
        // An ordinary user may not examine the first process.
        other.is_ok_and(|other| (other.dev(), other.ino()) == (namespace.dev(), namespace.ino()))
    };
    ["self", "1"].into_iter().any(is_same)
}

/// Moves this thread to an open network namespace.
///
/// # Errors
/// The host refuses it.
pub fn move_to(namespace: &File) -> std::io::Result<()> {
    Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
}

/// Opens the network namespace of this thread.
///
/// # Errors
/// `/proc` is missing.
pub fn current() -> Result<File, Failure> {
    let path = Path::new("/proc/thread-self/ns/net");
    File::open(path).file_error("open the network namespace", path)
}

/// Moves this thread, and processes that it starts later, to a network namespace of its own.
///
/// # Errors
/// The host refuses it.
pub fn enter_own() -> Result<(), Failure> {
    let made = unshare(CloneFlags::CLONE_NEWNET).map_err(std::io::Error::from);
    made.os_error("make a network namespace")
}

/// Runs a program that configures the network.
///
/// # Errors
/// It is missing, or fails.
pub fn run(program: &str, arguments: &str) -> Result<Vec<u8>, Failure> {
    let ended = Command::new(program).args(arguments.split(' ')).output().start_error(program)?;
    printed(ended, &format!("{program} {arguments}"))
}

/// Runs commands of tc(8), one per line, until one fails: each process would delay the pod.
fn run_tc(lines: &str) -> Result<(), Failure> {
    let mut command = Command::new("tc");
    command.args(["-batch", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::piped()).spawn().start_error("tc")?;
    if let Some(mut input) = child.stdin.take() {
        // A process that has failed before states the reason.
        let _ = input.write_all(lines.as_bytes());
    }
    let ended = child.wait_with_output().start_error("tc")?;
    printed(ended, &format!("tc -batch with {lines:?}")).map(drop)
}

/// Returns what a program has printed.
fn printed(ended: Output, command: &str) -> Result<Vec<u8>, Failure> {
    if ended.status.success() {
        return Ok(ended.stdout);
    }
    let text = String::from_utf8_lossy(&ended.stderr);
    Err(refuse(format!("{command}: {}", text.trim())))
}

impl VmNetwork {
    /// Enters the network namespace at a path, or a new one, and finds its network.
    ///
    /// # Errors
    /// The host refuses it; iproute2 is missing, or fails.
    pub fn enter(namespace: Option<&Path>) -> Result<Self, Failure> {
        let Some(namespace) = namespace else {
            enter_own()?;
            // Some containers have no tap devices.
            let tun = File::options().read(true).write(true).open(TUN_DEVICE);
            return Ok(if tun.is_ok() { Self::Awaited } else { Self::Missing });
        };
        enter(namespace)?;
        if interfaces()?.iter().any(|name| name == TAP) {
            let text = "another VM has the network namespace, and two cannot share one";
            return Err(refuse(format!("{}: {text}", namespace.display())));
        }
        Ok(PodNetwork::find()?.map_or(Self::Missing, |found| Self::Found(Box::new(found))))
    }

    /// Returns the network card of the VM.
    ///
    /// # Errors
    /// The interface has no address of a network card.
    pub fn card(&self) -> Result<Option<NetConfig>, Failure> {
        match self {
            Self::Missing => Ok(None),
            Self::Found(network) => network.card().map(Some),
            Self::Awaited => card(mac(AWAITED.0)?, Some(AWAITED.1)).map(Some),
        }
    }
}

fn mac(text: &str) -> Result<Mac, Failure> {
    Mac::try_from(text.to_owned()).map_err(refuse)
}

/// Returns the network card of a VM.
fn card(mac: Mac, mtu: Option<u16>) -> Result<NetConfig, Failure> {
    let name = DeviceName::try_from(TAP.to_owned()).map_err(refuse)?;
    Ok(NetConfig { mtu, ..NetConfig::tap(name, mac) })
}

impl Link {
    /// Returns the addresses that the guest takes. It makes those of the link from the MAC.
    fn addresses(&self) -> impl Iterator<Item = Prefix> {
        self.addr_info.iter().filter(|all| all.scope != "link").filter_map(|all| {
            Some(Prefix { address: all.local.as_ref()?.parse().ok()?, length: all.prefixlen })
        })
    }
}

impl FoundRoute {
    /// Returns whether the guest makes it by itself: it belongs to an address.
    fn is_automatic(&self) -> bool {
        self.protocol == "kernel"
    }

    /// Returns it for the guest; `None`: it is of another kind.
    fn read(&self) -> Option<Route> {
        let is_new = self.gateway.is_some_and(|gateway| gateway.is_ipv6());
        let destination = match &*self.dst {
            "default" if is_new => Prefix { address: Ipv6Addr::UNSPECIFIED.into(), length: 0 },
            "default" => Prefix { address: Ipv4Addr::UNSPECIFIED.into(), length: 0 },
            network => {
                let (address, length) = network.split_once('/').unwrap_or((network, ""));
                let address: IpAddr = address.parse().ok()?;
                let whole = if address.is_ipv4() { u32::BITS } else { u128::BITS };
                let length = if length.is_empty() { whole as u8 } else { length.parse().ok()? };
                Prefix { address, length }
            }
        };
        Some(Route { destination, gateway: self.gateway })
    }
}

/// Returns the names of the interfaces of this thread's namespace.
fn interfaces() -> Result<Vec<String>, Failure> {
    let path = Path::new(INTERFACES);
    Ok(names(&fs::read_to_string(path).file_error("read", path)?))
}

fn names(list: &str) -> Vec<String> {
    // Two lines of titles.
    let names = list.lines().skip(2).filter_map(|line| line.split(':').next());
    names.map(|name| name.trim().to_owned()).collect()
}

/// Returns a list for the message to the agent.
fn few<T: Clone, const MOST: usize>(
    all: &[T],
    kind: &str,
    interface: &str,
) -> Result<heapless::Vec<T, MOST>, Failure> {
    heapless::Vec::from_slice(all)
        .map_err(|_| refuse(format!("{interface} has {} {kind}; the most are {MOST}", all.len())))
}

impl PodNetwork {
    /// Finds the interface that has come to this thread's namespace since the VM was started.
    ///
    /// # Errors
    /// See [`Self::find`]; without interfaces iproute2 is not needed.
    pub fn find_late() -> Result<Option<Self>, Failure> {
        if interfaces()?.iter().any(|name| name != "lo" && name != TAP) {
            Self::find()
        } else {
            Ok(None)
        }
    }

    /// Finds the interface of this process' namespace; `None`: there is only the loopback one.
    ///
    /// # Errors
    /// iproute2 is missing, or fails.
    pub fn find() -> Result<Option<Self>, Failure> {
        let links = run("ip", "-details -json address")?;
        let routes = [run("ip", "-json -4 route")?, run("ip", "-json -6 route")?];
        Self::read(&links, &routes)
    }

    fn read(links: &[u8], routes: &[Vec<u8>; 2]) -> Result<Option<Self>, Failure> {
        let malformed = |error| refuse(format!("the answer of ip is malformed: {error}"));
        let links: Vec<Link> = serde_json::from_slice(links).map_err(malformed)?;
        let mut found = Vec::new();
        for routes in routes {
            // Older versions print nothing instead of an empty list.
            if !routes.trim_ascii().is_empty() {
                let routes: Vec<FoundRoute> = serde_json::from_slice(routes).map_err(malformed)?;
                found.extend(routes);
            }
        }
        let of_engine = |link: &&Link| link.link_type == "ether" && link.addresses().count() > 0;
        let Some(link) = links.iter().find(of_engine) else { return Ok(None) };
        let name = &link.ifname;
        let own = |route: &&FoundRoute| route.dev.as_ref() == Some(name) && !route.is_automatic();
        let mut routes: Vec<Route> =
            found.iter().filter(own).filter_map(FoundRoute::read).collect();
        // Gateways are in networks of the link.
        routes.sort_by_key(|route| route.gateway.is_some());
        let addresses = link.addresses().collect::<Vec<_>>();
        let mac = mac(&link.address)?;
        Ok(Some(Self {
            interface: name.clone(),
            mac,
            is_tap: link.linkinfo.info_kind == TUN,
            guest: Network {
                addresses: few(&addresses, "addresses", name)?,
                routes: few(&routes, "routes", name)?,
                // The engine mounts a file into each container.
                resolver: None,
                mtu: link.mtu,
                // The card has it.
                mac: None,
            },
        }))
    }

    /// Returns the configuration for a guest whose card has another MAC address.
    pub fn with_mac(self) -> Network {
        Network { mac: Some(self.mac.bytes()), ..self.guest }
    }

    fn card(&self) -> Result<NetConfig, Failure> {
        // A guest accepts no larger one than that of its card.
        card(self.mac, self.guest.mtu.and_then(|mtu| u16::try_from(mtu).ok()))
    }

    /// Connects the VM's tap device, which the VM has made, to the interface.
    ///
    /// # Errors
    /// iproute2 is missing, or fails.
    pub fn connect(&self) -> Result<(), Failure> {
        let mtu = self.guest.mtu.map_or_else(String::new, |mtu| format!(" mtu {mtu}"));
        run("ip", &format!("link set {TAP} up{mtu}"))?;
        for device in [&*self.interface, TAP] {
            // A former VM may have left it in the namespace.
            let _ = run("tc", &format!("qdisc del dev {device} ingress"));
        }
        run_tc(&self.filters())?;
        if self.is_tap { self.let_reach_guest() } else { Ok(()) }
    }

    /// Returns the commands of tc(8) that connect the devices.
    ///
    /// The guest is no router, and gets no messages to all of them: those of the other pods of a
    /// node would wake it several times a second. A filter without an action leaves them to the
    /// namespace, which drops them.
    fn filters(&self) -> String {
        let mut lines = String::new();
        for (from, to) in [(&*self.interface, TAP), (TAP, &*self.interface)] {
            lines += &format!(
                "qdisc add dev {from} ingress\n\
                 filter add dev {from} parent ffff: protocol all u32 match u8 0 0 \
                 action mirred egress redirect dev {to}\n"
            );
        }
        for group in OF_ROUTERS {
            lines += &format!(
                "filter add dev {} parent ffff: prio 1 protocol ipv6 u32 match ip6 dst {group}/128 \
                 flowid 1:1\n",
                self.interface
            );
        }
        lines
    }

    /// Lets processes of the namespace reach the guest's IPv4 address.
    fn let_reach_guest(&self) -> Result<(), Failure> {
        let Some((guest, own)) = self.namespace_address() else { return Ok(()) };
        run("ip", &format!("-4 address flush dev {}", self.interface))?;
        run("ip", &format!("address add {own}/32 dev {TAP}"))?;
        run("ip", &format!("route replace {guest}/32 dev {TAP} src {own}"))?;
        // The guest asks both for addresses; a filter without an action leaves its packets for the
        // namespace to the namespace.
        let filter = format!("filter add dev {TAP} parent ffff: prio");
        let mirror = format!("action mirred egress mirror dev {}", self.interface);
        run("tc", &format!("{filter} 1 protocol arp u32 match u8 0 0 {mirror}"))?;
        let own = format!("match ip dst {own}/32 flowid 1:1");
        run("tc", &format!("{filter} 2 protocol ip u32 {own}")).map(drop)
    }

    /// Returns the guest's first IPv4 address, and one for the namespace in the same network, which
    /// is not that of a gateway; `None`: there is none.
    fn namespace_address(&self) -> Option<(Ipv4Addr, Ipv4Addr)> {
        let mut addresses = self.guest.addresses.iter();
        let (guest, length) = addresses.find_map(|prefix| match prefix.address {
            IpAddr::V4(address) => Some((address, prefix.length)),
            IpAddr::V6(_) => None,
        })?;
        let hosts = u32::MAX.checked_shr(length.into()).unwrap_or(0);
        let is_free = |address: &Ipv4Addr| {
            let is_gateway =
                |route: &Route| route.gateway.is_some_and(|gateway| gateway == *address);
            let host = address.to_bits() & hosts;
            host != 0 && host != hosts && !self.guest.routes.iter().any(is_gateway)
        };
        let bits = (0..u32::BITS).map(|bit| 1 << bit).take_while(|bit| bit & hosts != 0);
        let mut others = bits.map(|bit| Ipv4Addr::from_bits(guest.to_bits() ^ bit));
        Some((guest, others.find(is_free)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hosted_command::input::testing::with_named_pipe;

    #[test]
    fn a_named_pipe_is_no_namespace() {
        assert!(with_named_pipe(enter).unwrap_err().to_string().contains("it is a named pipe"));
    }

    const LINKS: &str = r#"[
        {"ifname": "lo", "link_type": "loopback", "address": "00:00:00:00:00:00", "mtu": 65536,
         "addr_info": [{"family": "inet", "local": "127.0.0.1", "prefixlen": 8}]},
        {"ifname": "eth0", "link_type": "ether", "address": "6a:01:02:03:04:05", "mtu": 1450,
         "addr_info": [{"family": "inet6", "local": "fe80::1", "prefixlen": 64, "scope": "link"},
                       {"family": "inet6", "local": "fd00::2", "prefixlen": 64},
                       {"family": "inet", "local": "10.88.0.2", "prefixlen": 16}]}]"#;
    const ROUTES: [&str; 2] = [
        r#"[{"dst": "default", "gateway": "169.254.1.1", "dev": "eth0"},
            {"dst": "10.88.0.0/16", "dev": "eth0", "protocol": "kernel"},
            {"dst": "10.9.0.0/16", "gateway": "10.9.0.1", "dev": "eth1"},
            {"dst": "169.254.1.1", "dev": "eth0", "scope": "link"}]"#,
        r#"[{"dst": "default", "gateway": "fd00::1", "dev": "eth0"}]"#,
    ];

    #[test]
    fn names_of_interfaces() {
        let titles = "Inter-| Receive\n face |bytes\n";
        assert!(names(titles).is_empty());
        assert_eq!(names(&[titles, "    lo: 0\nparador0: 0 0\n"].concat()), ["lo", TAP]);
    }

    #[test]
    fn the_guest_takes_the_interface_over() {
        let prefix = |address: &str, length| Prefix { address: address.parse().unwrap(), length };
        let route = |network: &str, length, gateway: Option<&str>| Route {
            destination: prefix(network, length),
            gateway: gateway.map(|gateway| gateway.parse().unwrap()),
        };
        let routes = ROUTES.map(|routes| routes.as_bytes().to_vec());
        let found = PodNetwork::read(LINKS.as_bytes(), &routes).unwrap().unwrap();
        let addresses = [prefix("fd00::2", 64), prefix("10.88.0.2", 16)];
        let routes = [
            route("169.254.1.1", 32, None),
            route("0.0.0.0", 0, Some("169.254.1.1")),
            route("::", 0, Some("fd00::1")),
        ];
        let guest = Network {
            addresses: addresses.into_iter().collect(),
            routes: routes.into_iter().collect(),
            resolver: None,
            mtu: Some(1450),
            mac: None,
        };
        assert_eq!((&*found.interface, &found.guest, found.is_tap), ("eth0", &guest, false));
        assert_eq!(found.card().unwrap().mtu, Some(1450));
        let mac = Some([0x6a, 1, 2, 3, 4, 5]);
        assert_eq!(found.with_mac(), Network { mac, ..guest });
        let tap = LINKS.replace("\"mtu\": 1450", "\"linkinfo\": {\"info_kind\": \"tun\"}");
        let none = [Vec::new(), Vec::new()];
        assert!(PodNetwork::read(tap.as_bytes(), &none).unwrap().unwrap().is_tap);
    }

    #[test]
    fn the_guest_gets_no_messages_to_routers() {
        let none = [Vec::new(), Vec::new()];
        let found = PodNetwork::read(LINKS.as_bytes(), &none).unwrap().unwrap();
        let filters = found.filters();
        let lines: Vec<&str> = filters.lines().collect();
        assert_eq!(lines[0], "qdisc add dev eth0 ingress");
        assert!(lines[1].starts_with("filter add dev eth0 parent ffff: protocol all"));
        assert!(lines[1].ends_with("redirect dev parador0") && lines[3].ends_with("dev eth0"));
        for (line, group) in lines[4..].iter().zip(["ff02::2/128", "ff02::16/128"]) {
            assert!(line.starts_with("filter add dev eth0 parent ffff: prio 1 protocol ipv6"));
            assert!(line.ends_with(&format!("match ip6 dst {group} flowid 1:1")), "{line}");
        }
        assert_eq!(lines.len(), 6);
    }

    #[test]
    fn the_namespace_has_a_free_address() {
        let own = |address: &str, gateway: &str| {
            let links = LINKS.replace("10.88.0.2\", \"prefixlen\": 16", address);
            let routes = ROUTES.map(|routes| routes.replace("169.254.1.1\", \"dev", gateway));
            let routes = routes.map(String::into_bytes);
            let found = PodNetwork::read(links.as_bytes(), &routes).unwrap().unwrap();
            found.namespace_address().map(|(_, own)| own.to_string())
        };
        let slirp = "10.0.2.100\", \"prefixlen\": 24";
        assert_eq!(own(slirp, "10.0.2.2\", \"dev").as_deref(), Some("10.0.2.101"));
        assert_eq!(own(slirp, "10.0.2.101\", \"dev").as_deref(), Some("10.0.2.102"));
        let last = "10.0.2.254\", \"prefixlen\": 24";
        assert_eq!(own(last, "10.0.2.2\", \"dev").as_deref(), Some("10.0.2.252"));
        for whole in ["10.0.2.1\", \"prefixlen\": 32", "10.0.2.1\", \"prefixlen\": 31"] {
            assert_eq!(own(whole, "10.0.2.2\", \"dev"), None, "{whole}");
        }
    }

    #[test]
    fn other_answers() {
        let none = [b"\n".to_vec(), Vec::new()];
        assert_eq!(PodNetwork::read(b"[]", &none).unwrap(), None);
        assert!(PodNetwork::read(b"x", &none).is_err());
        let many = few::<u8, 2>(&[1, 2, 3], "routes", "eth0").unwrap_err();
        assert_eq!(crate::report::text(&many), "eth0 has 3 routes; the most are 2");
    }
}

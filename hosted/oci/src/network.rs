//! Network of a pod: the engine has set a network namespace up, whose interface the guest takes
//! over with its address.
//!
//! The VM's tap device is connected to the interface by two filters that redirect every frame
//! (tc-u32(8), tc-mirred(8)), so the namespace's own network stack gets none. The tap device ends
//! with the VM.

use crate::refuse;
use hosted_command::failure::{Failure, IoContext};
use hosted_monitor::config::net::{DeviceName, Mac, NetConfig};
use proto::agent::Network;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::Deserialize;
use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;

/// Name of the tap device in the pod's namespace.
const TAP: &str = "parador0";

/// Interface of a pod.
#[derive(Debug, PartialEq, Eq)]
pub struct PodNetwork {
    interface: String,
    mac: String,
    /// Configuration of the guest.
    pub guest: Network,
}

/// Link, as `ip -json address` prints it.
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
}

#[derive(Deserialize)]
struct Address {
    #[serde(default)]
    family: String,
    local: Option<String>,
    #[serde(default)]
    prefixlen: u8,
}

/// Route, as `ip -json route` prints it.
#[derive(Deserialize)]
struct Route {
    gateway: Option<Ipv4Addr>,
    dev: Option<String>,
}

/// Moves this process to a network namespace. Processes that it starts later are in it, too.
///
/// # Errors
/// There is none at the path.
pub fn enter(namespace: &Path) -> Result<(), Failure> {
    let file = File::open(namespace).file_error("open the network namespace", namespace)?;
    let kind = Some(LinkNameSpaceType::Network);
    let entered = move_into_link_name_space(file.as_fd(), kind).map_err(std::io::Error::from);
    entered.file_error("enter the network namespace", namespace)
}

/// Runs a program of iproute2.
fn run(program: &str, arguments: &str) -> Result<Vec<u8>, Failure> {
    let ended = Command::new(program).args(arguments.split(' ')).output().start_error(program)?;
    if ended.status.success() {
        return Ok(ended.stdout);
    }
    let text = String::from_utf8_lossy(&ended.stderr);
    Err(refuse(format!("{program} {arguments}: {}", text.trim())))
}

impl PodNetwork {
    /// Finds the interface of this process' namespace; `None`: there is only the loopback one.
    ///
    /// # Errors
    /// iproute2 is missing, or fails.
    pub fn find() -> Result<Option<Self>, Failure> {
        let links = run("ip", "-json address")?;
        let routes = run("ip", "-json -4 route show default")?;
        Self::read(&links, &routes)
    }

    fn read(links: &[u8], routes: &[u8]) -> Result<Option<Self>, Failure> {
        let malformed = |error| refuse(format!("the answer of ip is malformed: {error}"));
        let links: Vec<Link> = serde_json::from_slice(links).map_err(malformed)?;
        // Older versions print nothing instead of an empty list.
        let routes: Vec<Route> = match routes.trim_ascii() {
            [] => Vec::new(),
            routes => serde_json::from_slice(routes).map_err(malformed)?,
        };
        let found = links.iter().filter(|link| link.link_type == "ether").find_map(|link| {
            let own = link.addr_info.iter().find(|address| address.family == "inet")?;
            Some((link, own.local.as_ref()?.parse::<Ipv4Addr>().ok()?, own.prefixlen))
        });
        Ok(found.map(|(link, address, prefix)| {
            let route = routes.iter().find(|route| route.dev.as_ref() == Some(&link.ifname));
            Self {
                interface: link.ifname.clone(),
                mac: link.address.clone(),
                guest: Network {
                    address: address.octets(),
                    prefix,
                    gateway: route.and_then(|route| route.gateway).map(|it| it.octets()),
                    // The engine mounts a file into each container.
                    resolver: None,
                    mtu: link.mtu,
                },
            }
        }))
    }

    /// Returns the network card of the VM.
    ///
    /// # Errors
    /// The interface has no address of a network card.
    pub fn card(&self) -> Result<NetConfig, Failure> {
        let name = DeviceName::try_from(TAP.to_owned()).map_err(refuse)?;
        Ok(NetConfig::tap(name, Mac::try_from(self.mac.clone()).map_err(refuse)?))
    }

    /// Connects the VM's tap device, which the VM has made, to the interface.
    ///
    /// # Errors
    /// iproute2 is missing, or fails.
    pub fn connect(&self) -> Result<(), Failure> {
        let mtu = self.guest.mtu.map_or_else(String::new, |mtu| format!(" mtu {mtu}"));
        run("ip", &format!("link set {TAP} up{mtu}"))?;
        for (from, to) in [(&*self.interface, TAP), (TAP, &*self.interface)] {
            // A former VM may have left it in the namespace.
            let _ = run("tc", &format!("qdisc del dev {from} ingress"));
            run("tc", &format!("qdisc add dev {from} ingress"))?;
            let filter = format!(
                "filter add dev {from} parent ffff: protocol all u32 match u8 0 0 \
                 action mirred egress redirect dev {to}"
            );
            run("tc", &filter)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINKS: &str = r#"[
        {"ifname": "lo", "link_type": "loopback", "address": "00:00:00:00:00:00", "mtu": 65536,
         "addr_info": [{"family": "inet", "local": "127.0.0.1", "prefixlen": 8}]},
        {"ifname": "eth0", "link_type": "ether", "address": "6a:01:02:03:04:05", "mtu": 1450,
         "addr_info": [{"family": "inet6", "local": "fe80::1", "prefixlen": 64},
                       {"family": "inet", "local": "10.88.0.2", "prefixlen": 16}]}]"#;

    #[test]
    fn the_guest_takes_the_interface_over() {
        let routes = br#"[{"dst": "default", "gateway": "10.88.0.1", "dev": "eth0"}]"#;
        let found = PodNetwork::read(LINKS.as_bytes(), routes).unwrap().unwrap();
        let guest = Network {
            address: [10, 88, 0, 2],
            prefix: 16,
            gateway: Some([10, 88, 0, 1]),
            resolver: None,
            mtu: Some(1450),
        };
        assert_eq!((&*found.interface, found.guest), ("eth0", guest));
        assert!(found.card().is_ok());
        let alone = PodNetwork::read(b"[]", b"\n").unwrap();
        assert_eq!(alone, None);
        assert!(PodNetwork::read(b"x", b"").is_err());
    }
}

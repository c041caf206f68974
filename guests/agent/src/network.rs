//! The guest's network interfaces, by messages of rtnetlink(7).

use proto::agent::{Network, Prefix, Route};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};
use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Interface of the first network.
const INTERFACE: &str = "eth0";
/// The loopback interface always has this index.
const LOOPBACK: u32 = 1;
const RESOLVERS: &str = "/etc/resolv.conf";
/// Names of hosts (hosts(5)).
const HOSTS: &str = "/etc/hosts";

/// Message types, and flags of a request that is acknowledged (`linux/rtnetlink.h`,
/// `linux/netlink.h`).
const NEWLINK: u16 = 16;
const NEWADDR: u16 = 20;
const NEWROUTE: u16 = 24;
const REQUEST: u16 = 0x1 | 0x4;
const CREATE: u16 = 0x400;
/// Length of a header, and of its error code after it.
const HEADER: usize = 16;
const ERROR: u16 = 2;

/// Attributes.
const ADDRESS: u16 = 1;
const LINK_ADDRESS: u16 = 1;
const LOCAL: u16 = 2;
const DESTINATION: u16 = 1;
const MTU: u16 = 4;
const OUTPUT_INTERFACE: u16 = 4;
const GATEWAY: u16 = 5;
/// Flag of an address that is used at once (`IFA_F_NODAD`): the engine has given it to this guest
/// alone.
const NO_DETECTION: u8 = 2;
/// Flag of a route whose gateway need not be in a known network (`RTNH_F_ONLINK`).
const ON_LINK: u32 = 4;

/// Brings the loopback interface up, and the first interface if it has an address.
pub fn configure(network: Option<&Network>) -> io::Result<()> {
    let flags = SocketFlags::CLOEXEC;
    // The protocol's number is 0 (`NETLINK_ROUTE`).
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
    request(&socket, NEWLINK, 0, &link_up(LOOPBACK))?;
    let Some(network) = network else { return Ok(()) };
    let index = fs::read_to_string(format!("/sys/class/net/{INTERFACE}/ifindex"))?;
    let index = index.trim().parse().map_err(io::Error::other)?;
    if let Some(mac) = network.mac {
        request(&socket, NEWLINK, 0, &link_attribute(index, LINK_ADDRESS, &mac))?;
    }
    if let Some(mtu) = network.mtu {
        request(&socket, NEWLINK, 0, &link_attribute(index, MTU, &mtu.to_ne_bytes()))?;
    }
    request(&socket, NEWLINK, 0, &link_up(index))?;
    for prefix in &network.addresses {
        request(&socket, NEWADDR, CREATE, &address(index, prefix))?;
    }
    for all in &network.routes {
        request(&socket, NEWROUTE, CREATE, &route(index, all))?;
    }
    let Some([a, b, c, d]) = network.resolver else { return Ok(()) };
    replace(RESOLVERS, &format!("nameserver {a}.{b}.{c}.{d}\n"))
}

/// Removes the first interface, by detaching its device from the driver.
pub fn remove() -> io::Result<()> {
    let device = fs::canonicalize(format!("/sys/class/net/{INTERFACE}/device"))?;
    let name = device.file_name().unwrap_or_default();
    fs::write(device.join("driver/unbind"), name.as_encoded_bytes())
}

/// Gives a root without names of hosts those of its loopback interface and its own: container
/// images leave them to the engine.
pub fn complete_hosts(name: &str) -> io::Result<()> {
    match fs::symlink_metadata(HOSTS) {
        Ok(found) if !found.is_file() || found.len() > 0 => return Ok(()),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let text = format!(
        "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{name}\n"
    );
    replace(HOSTS, &text)
}

/// Writes a file instead of the one at `path`, if any.
fn replace(path: &str, text: &str) -> io::Result<()> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("write {path}: {error}"));
    // A link may lead to a file that the guest does not have.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(named(error)),
        _ => {}
    }
    if let Some(folder) = Path::new(path).parent() {
        fs::create_dir_all(folder).map_err(named)?;
    }
    fs::write(path, text).map_err(named)
}

/// `ifinfomsg` that sets the flag `IFF_UP`.
fn link_up(index: u32) -> Vec<u8> {
    [[0; 4], index.to_ne_bytes(), 1_u32.to_ne_bytes(), 1_u32.to_ne_bytes()].concat()
}

/// `ifinfomsg` that sets an attribute.
fn link_attribute(index: u32, kind: u16, value: &[u8]) -> Vec<u8> {
    let mut message = [[0; 4], index.to_ne_bytes(), [0; 4], [0; 4]].concat();
    attribute(&mut message, kind, value);
    message
}

/// `ifaddrmsg`: family, prefix, flags, scope, interface.
fn address(index: u32, prefix: &Prefix) -> Vec<u8> {
    let mut message = vec![family(prefix.address), prefix.length, NO_DETECTION, 0];
    message.extend(index.to_ne_bytes());
    attribute(&mut message, LOCAL, &bytes(prefix.address));
    attribute(&mut message, ADDRESS, &bytes(prefix.address));
    message
}

/// `rtmsg`: family, lengths of destination and source, type of service, table, protocol, scope,
/// type, flags.
fn route(index: u32, route: &Route) -> Vec<u8> {
    const MAIN: u8 = 254;
    const BOOT: u8 = 3;
    const UNICAST: u8 = 1;
    // Scopes of a route by a gateway, and of one on the link.
    const UNIVERSE: u8 = 0;
    const LINK: u8 = 253;
    let Prefix { address, length } = route.destination;
    let scope = if route.gateway.is_some() { UNIVERSE } else { LINK };
    let flags = if route.gateway.is_some() { ON_LINK } else { 0 };
    let mut message = vec![family(address), length, 0, 0, MAIN, BOOT, scope, UNICAST];
    message.extend(flags.to_ne_bytes());
    if length > 0 {
        attribute(&mut message, DESTINATION, &bytes(address));
    }
    if let Some(gateway) = route.gateway {
        attribute(&mut message, GATEWAY, &bytes(gateway));
    }
    attribute(&mut message, OUTPUT_INTERFACE, &index.to_ne_bytes());
    message
}

fn family(address: IpAddr) -> u8 {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    family.as_raw() as u8
}

fn bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// Appends an attribute; the next one begins at a multiple of four bytes.
fn attribute(message: &mut Vec<u8>, kind: u16, value: &[u8]) {
    message.extend((4 + value.len() as u16).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(value);
    message.resize(message.len().next_multiple_of(4), 0);
}

/// Sends a request and waits for its acknowledgement.
fn request(socket: &OwnedFd, kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
    let mut message = ((HEADER + body.len()) as u32).to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend((REQUEST | flags).to_ne_bytes());
    // Sequence number and sender: one request at a time.
    message.extend([0; 8]);
    message.extend(body);
    send(socket, &message, SendFlags::empty())?;
    let mut answer = [0; 1024];
    let (_, length) = recv(socket, &mut answer[..], RecvFlags::empty())?;
    let invalid = || io::Error::other("the kernel's answer is malformed");
    let answer = answer.get(..length).ok_or_else(invalid)?;
    let found = answer.get(4..6).and_then(|kind| kind.try_into().ok()).map(u16::from_ne_bytes);
    let code = answer.get(HEADER..HEADER + 4).and_then(|code| code.try_into().ok());
    match (found, code.map(i32::from_ne_bytes)) {
        (Some(ERROR), Some(0)) => Ok(()),
        (Some(ERROR), Some(code)) => Err(Errno::from_raw_os_error(-code).into()),
        _ => Err(invalid()),
    }
}

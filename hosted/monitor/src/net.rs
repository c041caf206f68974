//! Networks of `parador run`: their configuration, and the descriptors that carry their frames.

use crate::config::net::{DeviceName, Kind, Mac, NetConfig};
use crate::passt::Passt;
use crate::switch::{self, STREAM_MTU};
use hosted_command::failure::{self, Failure, IoContext};
use rustix::process::geteuid;
use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Device that creates tap devices.
const TUN: &str = "/dev/net/tun";
/// MTU of a tap device that reports none.
const ETHERNET_MTU: u16 = 1500;
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

impl NetConfig {
    /// Connects the network and starts its processes; `None`: no network.
    pub fn open(&self) -> Result<Option<NetBackend>, Failure> {
        self.check().map_err(|message| Failure::new(failure::BAD_CONFIG, message))?;
        let mac = match self.mac {
            Some(Mac(mac)) => mac,
            None => random_mac()?,
        };
        let stream = proto::hosted::NetRecord { mac, mtu: STREAM_MTU, tap: [0; 16] };
        if let Some(DeviceName(name)) = &self.tap {
            let found = look_at_tap(name)?;
            let mtu = self.mtu.unwrap_or(found);
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
        let (passt, socket) = Passt::start(&self.hostfwd, self.hostloopback, self.address)?;
        Ok(Some(NetBackend { descriptor: socket.into(), record: stream, passt: Some(passt) }))
    }
}

impl NetBackend {
    /// Waits until the network is ready.
    pub fn wait(&mut self) -> Result<(), Failure> {
        let Some(passt) = &mut self.passt else { return Ok(()) };
        let socket = self.descriptor.try_clone();
        let socket = socket.os_error("duplicate a descriptor")?;
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
        .os_error("read random numbers")?;
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

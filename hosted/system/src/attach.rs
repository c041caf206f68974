//! Attachments in a system description: disks and network cards of VMs and of the emulated machine,
//! and devices of servers. All are strings of the same form, a first word and options:
//! `"blk0:part1,ro"`, `"sw0,group=2,rate=10M"`, `"disk.img,bus=ahci,snapshot=on"`,
//! `"user,hostfwd=tcp:2222:22"`.

use std::fmt;
use std::path::{Path, PathBuf};

use hosted_command::architecture::Architecture;
use hosted_command::value::{Size, parse_mac};
use proto::net::Mac;
use proto::service::DiskRange;

/// Bytes per sector.
const SECTOR: u64 = proto::disk::SECTOR;

/// Transports over MMIO of QEMU's board `virt` whose registers share a page: servers get pages.
pub const MMIO_PER_PAGE: usize = 8;
/// Maximum number of disks and network cards of that board: one per page, without the page of the
/// kernel log, the last one.
pub const MAX_MMIO_DEVICES: usize = 3;
/// Maximum number of PCI functions with servers on that board: each needs one of its four interrupt
/// lines for itself.
pub const MAX_LINES: usize = 4;

/// Transport of virtio devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VirtioBus {
    /// PCI.
    Pci,
    /// MMIO, by device tree.
    Mmio,
}

impl VirtioBus {
    /// Returns the transport on emulated machines of an architecture. IOMMUs translate for PCI.
    pub const fn of(architecture: Architecture, iommu: bool) -> Self {
        match architecture {
            Architecture::Arm64 if !iommu => Self::Mmio,
            Architecture::X86 | Architecture::Arm64 => Self::Pci,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Pci => "pci",
            Self::Mmio => "mmio",
        }
    }
}

/// Device or port of the machine that a server, or a VM, can own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MachineDevice {
    /// First serial port.
    Com1,
    /// virtio-blk device with this index.
    VirtioBlk(VirtioBus, u8),
    /// virtio-net device with this index.
    VirtioNet(VirtioBus, u8),
    /// Port of an AHCI controller; `None`: the first port with a disk.
    Ahci(u8, Option<u8>),
}

impl MachineDevice {
    /// Parses `com1`, `virtio-blk:0`, `virtio-net:0`, `pci:ahci:0` or `pci:ahci:0.2`. Before the
    /// names of virtio devices, `pci:` or `mmio:` may state the transport, which is `bus` else.
    pub fn parse(text: &str, bus: VirtioBus) -> Result<Self, String> {
        let refuse = || {
            format!(
                "invalid device `{text}`: expected com1, virtio-blk:0, virtio-net:0, pci:ahci:0, \
                 or pci:ahci:0.2 for a port"
            )
        };
        if text == "com1" {
            return Ok(Self::Com1);
        }
        let stated = [VirtioBus::Pci, VirtioBus::Mmio]
            .into_iter()
            .find_map(|bus| Some((bus, text.strip_prefix(bus.name())?.strip_prefix(':')?)));
        let (bus, rest) = stated.unwrap_or((bus, text));
        let (class, place) = rest.split_once(':').ok_or_else(refuse)?;
        let number = |text: &str| text.parse::<u8>().map_err(|_| refuse());
        match class {
            "virtio-blk" => Ok(Self::VirtioBlk(bus, number(place)?)),
            "virtio-net" => Ok(Self::VirtioNet(bus, number(place)?)),
            "ahci" if bus == VirtioBus::Pci && stated.is_some() => {
                let (index, port) = match place.split_once('.') {
                    None => (number(place)?, None),
                    Some((index, port)) => (number(index)?, Some(number(port)?)),
                };
                let is_port = port.is_none_or(|port| port < 32);
                is_port.then_some(Self::Ahci(index, port)).ok_or_else(refuse)
            }
            _ => Err(refuse()),
        }
    }

    /// Returns the transport of a virtio device, or of another device on PCI; `None`: it is on
    /// neither.
    pub fn bus(self) -> Option<VirtioBus> {
        match self {
            Self::Com1 => None,
            Self::VirtioBlk(bus, _) | Self::VirtioNet(bus, _) => Some(bus),
            Self::Ahci(..) => Some(VirtioBus::Pci),
        }
    }

    /// Returns whether two owners cannot have these devices.
    pub fn overlaps(self, other: Self) -> bool {
        match (self, other) {
            // A controller is programmed as a whole.
            (Self::Ahci(a, _), Self::Ahci(b, _)) => a == b,
            _ => self == other,
        }
    }
}

impl fmt::Display for MachineDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Com1 => f.write_str("com1"),
            Self::VirtioBlk(bus, index) => write!(f, "{}:virtio-blk:{index}", bus.name()),
            Self::VirtioNet(bus, index) => write!(f, "{}:virtio-net:{index}", bus.name()),
            Self::Ahci(index, None) => write!(f, "pci:ahci:{index}"),
            Self::Ahci(index, Some(port)) => write!(f, "pci:ahci:{index}.{port}"),
        }
    }
}

/// Disk of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskAttachment {
    /// Name of the server.
    pub server: String,
    /// Part of the disk that the guest sees.
    pub part: DiskRange,
    /// Read-only for the guest.
    pub read_only: bool,
}

impl DiskAttachment {
    /// Parses `SERVER[:partN][:FIRST+LENGTH][,ro]`; first byte and length are sizes.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut words = text.split(',');
        let mut places = words.next().unwrap_or("").split(':');
        let server = places.next().unwrap_or("").to_owned();
        let mut part = DiskRange::WHOLE;
        for place in places {
            let refuse = || {
                format!(
                    "invalid part of a disk `{place}`: expected part1, or 1M+64M for first byte and length"
                )
            };
            if let Some(number) = place.strip_prefix("part") {
                let number = number.parse().ok().filter(|&number| number > 0).ok_or_else(refuse)?;
                if part != DiskRange::WHOLE {
                    return Err(refuse());
                }
                part.partition = Some(number);
            } else {
                let (first, length) = place.split_once('+').ok_or_else(refuse)?;
                let first = if first == "0" { 0 } else { Size::parse(first)?.0 };
                let length = Size::parse(length)?.0;
                let whole = first % SECTOR == 0 && length % SECTOR == 0 && length != 0;
                if !whole || part.sectors != 0 || first.checked_add(length).is_none() {
                    return Err(refuse());
                }
                (part.first, part.sectors) = (first / SECTOR, length / SECTOR);
            }
        }
        let mut read_only = false;
        for word in words {
            match word {
                "ro" | "ro=on" => read_only = true,
                "ro=off" => read_only = false,
                _ => return Err(format!("unknown option `{word}`: disks support `ro`")),
            }
        }
        Ok(Self { server, part, read_only })
    }

    /// Returns whether both may cover the same sectors and one of them is writable.
    pub fn conflicts(&self, other: &Self) -> bool {
        if self.server != other.server || (self.read_only && other.read_only) {
            return false;
        }
        let (a, b) = (self.part, other.part);
        if a.partition != b.partition {
            // Positions of partitions are unknown here; different partitions do not overlap.
            return a.partition.is_none() || b.partition.is_none();
        }
        let end = |part: DiskRange| match part.sectors {
            0 => u64::MAX,
            sectors => part.first + sectors,
        };
        a.first < end(b) && b.first < end(a)
    }
}

/// Network card of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetAttachment {
    /// Name of the switch.
    pub server: String,
    /// Isolation group.
    pub group: u8,
    /// Rate limit in bytes per second; 0: none.
    pub rate: u64,
    /// MAC address; `None`: chosen automatically.
    pub mac: Option<Mac>,
}

impl NetAttachment {
    /// Parses `SERVER[,group=N][,rate=SIZE][,mac=ADDRESS]`; the rate is per second.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut words = text.split(',');
        let server = words.next().unwrap_or("").to_owned();
        let mut net = Self { server, group: 0, rate: 0, mac: None };
        for word in words {
            let refuse = || {
                format!(
                    "unknown option `{word}`: network cards support group=2, rate=10M and mac=02:00:00:00:00:01"
                )
            };
            let (key, value) = word.split_once('=').ok_or_else(refuse)?;
            match key {
                "group" => net.group = value.parse().map_err(|_| refuse())?,
                "rate" => net.rate = Size::parse(value)?.0,
                "mac" => net.mac = Some(parse_mac(value)?),
                _ => return Err(refuse()),
            }
        }
        Ok(net)
    }
}

/// Returns the MAC address of network card `card` of VM `vm`: locally administered.
pub fn chosen_mac(vm: usize, card: usize) -> Mac {
    [0x02, b'P', b'a', b'r', vm as u8, card as u8]
}

/// Bus of an emulated disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bus {
    /// virtio-blk.
    Virtio,
    /// Port of the board's SATA controller.
    Ahci,
}

/// Disk of the emulated machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmulatedDisk {
    /// File with its contents.
    pub path: PathBuf,
    /// Bus.
    pub bus: Bus,
    /// Format of the file: `raw` or `qcow2`.
    pub format: String,
    /// Read-only.
    pub read_only: bool,
    /// Writes are discarded at the end.
    pub snapshot: bool,
}

impl EmulatedDisk {
    /// Parses `[path=]FILE[,bus=virtio|ahci][,format=raw|qcow2][,ro=on][,snapshot=on]`; a relative
    /// path starts at `folder`.
    pub fn parse(text: &str, folder: &Path) -> Result<Self, String> {
        let mut words = text.split(',');
        let first = words.next().unwrap_or("");
        let path = first.strip_prefix("path=").unwrap_or(first);
        if path.is_empty() {
            return Err("a disk begins with its file, as in \"disk.img,bus=ahci\"".to_owned());
        }
        let mut disk = Self {
            path: folder.join(path),
            bus: Bus::Virtio,
            format: "raw".to_owned(),
            read_only: false,
            snapshot: false,
        };
        for word in words {
            match word {
                "bus=virtio" => disk.bus = Bus::Virtio,
                "bus=ahci" => disk.bus = Bus::Ahci,
                "format=raw" => disk.format = "raw".to_owned(),
                "format=qcow2" => disk.format = "qcow2".to_owned(),
                "ro=on" | "ro" => disk.read_only = true,
                "ro=off" => disk.read_only = false,
                "snapshot=on" => disk.snapshot = true,
                "snapshot=off" => disk.snapshot = false,
                _ => {
                    return Err(format!(
                        "unknown option `{word}`: disks support bus=virtio|ahci, format=raw|qcow2, ro=on, snapshot=on"
                    ));
                }
            }
        }
        Ok(disk)
    }
}

/// Network card of the emulated machine, connected to QEMU's user network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EmulatedNic {
    /// Port forwardings, in QEMU's syntax.
    pub forwards: Vec<String>,
}

impl EmulatedNic {
    /// Parses `user[,hostfwd=tcp:HOST_PORT:[ADDRESS:]PORT]...`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut words = text.split(',');
        if words.next() != Some("user") {
            return Err(format!(
                "invalid network `{text}`: expected \"user\", as in \"user,hostfwd=tcp:2222:22\""
            ));
        }
        let mut net = Self::default();
        for word in words {
            let refuse = || format!("unknown option `{word}`: expected hostfwd=tcp:2222:22");
            let forward = word.strip_prefix("hostfwd=").ok_or_else(refuse)?;
            let parts: Vec<&str> = forward.split(':').collect();
            let (protocol, host, address, guest) = match parts[..] {
                [protocol, host, guest] => (protocol, host, "", guest),
                [protocol, host, address, guest] => (protocol, host, address, guest),
                _ => return Err(refuse()),
            };
            let is_port = |text: &str| text.parse::<u16>().is_ok_and(|port| port != 0);
            let is_address = address.is_empty() || address.parse::<std::net::Ipv4Addr>().is_ok();
            if !matches!(protocol, "tcp" | "udp")
                || !is_port(host)
                || !is_port(guest)
                || !is_address
            {
                return Err(refuse());
            }
            net.forwards.push(format!("{protocol}:127.0.0.1:{host}-{address}:{guest}"));
        }
        Ok(net)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices() {
        let parse = |text| MachineDevice::parse(text, VirtioBus::Mmio);
        for text in [
            "com1",
            "pci:virtio-blk:0",
            "mmio:virtio-blk:1",
            "pci:virtio-net:3",
            "pci:ahci:0",
            "pci:ahci:1.5",
        ] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
        assert_eq!(parse("virtio-net:2"), Ok(MachineDevice::VirtioNet(VirtioBus::Mmio, 2)));
        for text in [
            "com2",
            "pci:",
            "pci:virtio-blk",
            "pci:virtio-blk:x",
            "pci:ahci:0.32",
            "pci:nvme:0",
            "mmio:ahci:0",
            "ahci:0",
            "pcivirtio-blk:0",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert!(MachineDevice::Ahci(0, None).overlaps(MachineDevice::Ahci(0, Some(2))));
        let [disk, card] = ["virtio-blk:0", "virtio-net:0"].map(|text| parse(text).unwrap());
        assert!(!disk.overlaps(card));
    }

    #[test]
    fn disks_and_their_conflicts() {
        let disk = |text| DiskAttachment::parse(text).unwrap();
        assert_eq!(disk("blk0").part, DiskRange::WHOLE);
        let part = DiskRange { partition: Some(2), first: 2048, sectors: 128 };
        assert_eq!(
            disk("blk0:part2:1M+64K,ro"),
            DiskAttachment { server: "blk0".into(), part, read_only: true }
        );
        assert_eq!(disk("blk0:0+1M").part, DiskRange { partition: None, first: 0, sectors: 2048 });
        for text in [
            "b:part0",
            "b:part1:part2",
            "b:1M",
            "b:1M+0K",
            "b:1M+1M:2M+1M",
            "b,rw",
            "b:1M+1M:part1",
        ] {
            assert!(DiskAttachment::parse(text).is_err(), "{text}");
        }
        let conflict = |a, b| disk(a).conflicts(&disk(b));
        assert!(conflict("b", "b:part1"));
        assert!(conflict("b:part1", "b:part1"));
        assert!(conflict("b:part1,ro", "b:part1"));
        assert!(!conflict("b:part1,ro", "b:part1,ro"));
        assert!(!conflict("b:part1", "b:part2"));
        assert!(!conflict("b", "c"));
        assert!(!conflict("b:0+1M", "b:1M+1M"));
        assert!(conflict("b:0+1025K", "b:1M+1M"));
        assert!(conflict("b:part1:0+1M", "b:part1"));
        assert!(conflict("b:1M+1M", "b:part1"));
    }

    #[test]
    fn network_cards() {
        let net = NetAttachment::parse("sw0,group=3,rate=10M,mac=02:00:00:00:00:0a").unwrap();
        assert_eq!((net.group, net.rate, net.mac), (3, 10 << 20, Some([2, 0, 0, 0, 0, 10])));
        for text in [
            "s,group=256",
            "s,x",
            "s,mac=1",
            "s,mac=01:00:00:00:00:00",
            "s,mac=00:00:00:00:00:00",
            "s,rate=1",
        ] {
            assert!(NetAttachment::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_emulated_machines_devices() {
        let disk = EmulatedDisk::parse("a.img,bus=ahci,ro=on", Path::new("/d")).unwrap();
        assert_eq!((disk.path, disk.bus, disk.read_only), ("/d/a.img".into(), Bus::Ahci, true));
        assert!(EmulatedDisk::parse("", Path::new("")).is_err());
        assert!(EmulatedDisk::parse("a,bus=scsi", Path::new("")).is_err());
        let net =
            EmulatedNic::parse("user,hostfwd=tcp:2222:22,hostfwd=udp:53:10.0.2.16:53").unwrap();
        assert_eq!(net.forwards, ["tcp:127.0.0.1:2222-:22", "udp:127.0.0.1:53-10.0.2.16:53"]);
        for text in ["tap", "user,x", "user,hostfwd=tcp:0:22", "user,hostfwd=tcp:1:a,b:22"] {
            assert!(EmulatedNic::parse(text).is_err(), "{text}");
        }
    }
}

//! Disks, shared directories, networks and ports: back ends (`-drive`, `-fsdev`, `-netdev`) and the
//! devices (`-device`) that name them.
//!
//! Each becomes a table of the VM's description, in the order of the devices: those of `-device`
//! first, then the ones that an option brings along, as in QEMU.

use crate::chardev::Chardevs;
use crate::params::Params;
use crate::refuse;
use hosted_command::failure::Failure;
use hosted_monitor::config::console::Target;
use rustix::process::geteuid;
use serde_json::{Map, Value, json};

/// Table of a VM's description.
type Table = Map<String, Value>;

/// Parameters of every device without effect.
const IGNORED: &[&str] = &[
    "addr",
    "bootindex",
    "bus",
    "disable-legacy",
    "disable-modern",
    "id",
    "iommu_platform",
    "max-bytes",
    "max_ports",
    "multifunction",
    "nr",
    "num-queues",
    "packed",
    "period",
    "rng",
    "romfile",
    "rombar",
    "vectors",
    "write-cache",
];
/// Parameters of drives without effect.
const DRIVE_IGNORED: &[&str] =
    &["aio", "cache", "detect-zeroes", "discard", "index", "rerror", "werror"];
/// Parameters of shared directories without effect.
const SHARE_IGNORED: &[&str] = &["dmode", "fmode", "id", "multidevs", "writeout"];
/// Parameters of networks without effect.
const NET_IGNORED: &[&str] = &["domainname", "downscript", "id", "name", "script", "vhost"];
/// Devices without effect: Parador has them anyway, or no guest needs them.
const IGNORED_DEVICES: &[&str] =
    &["i6300esb", "pvpanic", "pvpanic-pci", "virtio-balloon", "virtio-rng", "virtio-serial"];
/// Address of the guest in QEMU's user-mode network.
const GUEST_ADDRESS: &str = "10.0.2.15";

/// Back ends and devices of a command line.
#[derive(Debug, Default)]
pub struct Devices {
    drives: Vec<(String, Table)>,
    folders: Vec<(String, Table)>,
    networks: Vec<(String, Table)>,
    /// Disks of `-drive if=virtio`, which follow the others.
    own_disks: Vec<Value>,
    /// Disks.
    pub disks: Vec<Value>,
    /// Shared directories.
    pub shares: Vec<Value>,
    /// Network cards.
    pub nets: Vec<Value>,
    /// The command line decides on networks.
    pub has_net_options: bool,
    /// Named ports.
    pub ports: Vec<Value>,
    /// Target of the virtio console.
    pub console: Option<Target>,
    /// IDs of devices, and of drives.
    ids: Vec<String>,
    drive_ids: Vec<String>,
    /// A card and a network of `-net`.
    hub: (Option<Table>, Option<Table>),
}

/// Adds a back end with its ID.
fn add(
    all: &mut Vec<(String, Table)>,
    what: &str,
    id: String,
    backend: Table,
) -> Result<(), Failure> {
    if all.iter().any(|other| other.0 == id) {
        return Err(refuse(format!("{what}: duplicate ID `{id}`")));
    }
    all.push((id, backend));
    Ok(())
}

/// Reserves the ID of an object, which has one.
fn reserve(ids: &mut Vec<String>, what: &str, id: Option<&String>) -> Result<(), Failure> {
    let Some(id) = id else { return Ok(()) };
    if ids.contains(id) {
        return Err(refuse(format!("{what}: duplicate ID `{id}`")));
    }
    ids.push(id.clone());
    Ok(())
}

/// Takes the back end that a device names.
fn claim(
    all: &mut Vec<(String, Table)>,
    params: &mut Params,
    key: &str,
    option: &str,
) -> Result<Table, Failure> {
    let id = params.require(key)?;
    let found = all.iter().position(|backend| backend.0 == id);
    let missing = || params.invalid(&format!("no free {option} has the ID `{id}`"));
    found.map(|index| all.remove(index).1).ok_or_else(missing)
}

/// Returns a table with these keys.
fn table(value: Value) -> Table {
    match value {
        Value::Object(table) => table,
        _ => Map::new(),
    }
}

impl Devices {
    /// Adds the value of a `-drive`.
    ///
    /// # Errors
    /// A wrong parameter: code 64. A kind that is not supported: 69.
    pub fn drive(&mut self, text: &str) -> Result<(), Failure> {
        let mut params = Params::parse("-drive", None, text)?;
        let interface = params.take("if").unwrap_or_else(|| "ide".to_owned());
        match interface.as_str() {
            "virtio" | "none" => {}
            "pflash" => return Err(params.unsupported("VMs have no firmware: use -kernel")),
            "ide" => return Err(params.unsupported("VMs have no IDE disks: use if=virtio")),
            other => return Err(params.unsupported(&format!("no interface `{other}`: use virtio"))),
        }
        if params.take("media").is_some_and(|media| media != "disk") {
            return Err(params.unsupported("VMs have no CD-ROM drives: use media=disk"));
        }
        if params.take_switch("snapshot")? {
            let help = "changes are kept: use `parador run -d path=FILE,overlay=on`";
            return Err(params.unsupported(help));
        }
        let read_only = params.take_switch("readonly")? | params.take_switch("read-only")?;
        let mut disk = table(json!({ "path": params.require("file")?, "ro": read_only }));
        match params.take("format").as_deref() {
            None => {}
            Some(format @ ("raw" | "qcow2")) => drop(disk.insert("format".into(), format.into())),
            Some(_) => return Err(params.unsupported("the format must be raw or qcow2")),
        }
        if let Some(serial) = params.take("serial") {
            disk.insert("id".into(), serial.into());
        }
        let what = params.what().to_owned();
        let id = params.take("id");
        params.finish(DRIVE_IGNORED)?;
        reserve(&mut self.drive_ids, &what, id.as_ref())?;
        match (interface.as_str(), id) {
            ("none", Some(id)) => self.drives.push((id, disk)),
            ("none", None) => return Err(refuse(format!("{what}: `id` is missing"))),
            _ => self.own_disks.push(disk.into()),
        }
        Ok(())
    }

    /// Adds the value of a `-fsdev`, or with `is_device` of a `-virtfs`.
    ///
    /// # Errors
    /// See [`Self::drive`].
    pub fn folder(&mut self, text: &str, is_device: bool) -> Result<(), Failure> {
        let option = if is_device { "-virtfs" } else { "-fsdev" };
        let mut params = Params::parse(option, Some("fsdriver"), text)?;
        if params.require("fsdriver")? != "local" {
            return Err(params.unsupported("only local folders can be shared"));
        }
        let model = params.take("security_model").unwrap_or_else(|| "none".to_owned());
        if !matches!(model.as_str(), "none" | "passthrough") {
            return Err(params.unsupported("the security_model must be none or passthrough"));
        }
        let read_only = params.take_switch("readonly")?;
        // QEMU keeps the guest's owners if it is root.
        let owners = geteuid().is_root();
        let path = params.require("path")?;
        let share = table(json!({ "path": path, "ro": read_only, "owners": owners }));
        let what = params.what().to_owned();
        if is_device {
            let tag = params.require("mount_tag")?;
            params.finish(SHARE_IGNORED)?;
            self.share(share, tag);
            return Ok(());
        }
        let id = params.require("id")?;
        params.finish(SHARE_IGNORED)?;
        add(&mut self.folders, &what, id, share)
    }

    fn share(&mut self, mut share: Table, tag: String) {
        share.insert("tag".into(), tag.into());
        self.shares.push(share.into());
    }

    /// Adds the value of a `-netdev`.
    ///
    /// # Errors
    /// See [`Self::drive`].
    pub fn network(&mut self, text: &str) -> Result<(), Failure> {
        self.has_net_options = true;
        let mut params = Params::parse("-netdev", Some("type"), text)?;
        let id = params.require("id")?;
        let what = params.what().to_owned();
        let network = network(&mut params)?;
        params.finish(NET_IGNORED)?;
        add(&mut self.networks, &what, id, network)
    }

    /// Adds the value of a `-nic`: a card and its network.
    ///
    /// # Errors
    /// See [`Self::drive`].
    pub fn nic(&mut self, text: &str) -> Result<(), Failure> {
        self.has_net_options = true;
        let mut params = Params::parse("-nic", Some("type"), text)?;
        check_model(&mut params)?;
        let address = params.take("mac");
        if params.value("type") == Some("none") {
            return params.finish(&["type"]);
        }
        let network = network(&mut params)?;
        params.finish(NET_IGNORED)?;
        self.card(network, address);
        Ok(())
    }

    /// Adds the value of a `-net`: a card (`nic`), a network, or `none`.
    ///
    /// # Errors
    /// See [`Self::drive`].
    pub fn net(&mut self, text: &str) -> Result<(), Failure> {
        self.has_net_options = true;
        let mut params = Params::parse("-net", Some("type"), text)?;
        match params.value("type") {
            Some("none") => params.finish(&["type"]),
            Some("nic") => {
                check_model(&mut params)?;
                let address = params.take("macaddr");
                self.hub.0 =
                    Some(address.map_or_else(Map::new, |mac| table(json!({ "mac": mac }))));
                params.finish(&["type", "netdev", "name", "addr", "vectors"])
            }
            _ => {
                self.hub.1 = Some(network(&mut params)?);
                params.finish(NET_IGNORED)
            }
        }
    }

    fn card(&mut self, mut network: Table, address: Option<String>) {
        if let Some(address) = address {
            network.insert("mac".into(), address.into());
        }
        self.nets.push(network.into());
    }

    /// Adds the value of a `-device`. Returns whether it has no effect.
    ///
    /// # Errors
    /// An unknown device or parameter: code 64. A device that is not supported: 69.
    pub fn device(&mut self, text: &str, chardevs: &mut Chardevs) -> Result<bool, Failure> {
        let mut params = Params::parse("-device", Some("driver"), text)?;
        let driver = params.require("driver")?;
        let id = params.take("id");
        reserve(&mut self.ids, params.what(), id.as_ref())?;
        // Names of the transport; that of `microvm` is MMIO.
        let name = driver.trim_end_matches("-non-transitional").trim_end_matches("-pci");
        let name = name.trim_end_matches("-device");
        let name = if name.starts_with("virtio") { name } else { driver.as_str() };
        match name {
            "virtio-blk" => {
                let mut disk = claim(&mut self.drives, &mut params, "drive", "-drive if=none")?;
                if let Some(serial) = params.take("serial") {
                    disk.insert("id".into(), serial.into());
                }
                self.disks.push(disk.into());
            }
            "virtio-9p" => {
                let folder = claim(&mut self.folders, &mut params, "fsdev", "-fsdev")?;
                let tag = params.require("mount_tag")?;
                self.share(folder, tag);
            }
            "virtio-net" => {
                let network = claim(&mut self.networks, &mut params, "netdev", "-netdev")?;
                let address = params.take("mac");
                self.card(network, address);
            }
            "virtconsole" => {
                let chardev = params.require("chardev")?;
                let target = chardevs.connect(params.what(), &chardev)?;
                params.take("name");
                if self.console.replace(target).is_some() {
                    return Err(params.unsupported("VMs have one virtio console"));
                }
            }
            "virtserialport" => {
                let chardev = params.require("chardev")?;
                let target = chardevs.connect(params.what(), &chardev)?;
                let name = params.require("name")?;
                self.ports.push(json!({ "name": name, "target": target }));
            }
            "virtio-scsi" | "scsi-hd" | "scsi-cd" => {
                return Err(params.unsupported("VMs have no SCSI disks: use virtio-blk-pci"));
            }
            "vhost-user-fs-pci" => {
                return Err(params.unsupported("VMs share directories by virtio-9p-pci"));
            }
            name if IGNORED_DEVICES.contains(&name) => return Ok(true),
            _ => return Err(refuse(format!("-device {text}: unknown device `{driver}`"))),
        }
        params.finish(IGNORED).map(|()| false)
    }

    /// Returns whether the virtio console or a port is on standard input and output.
    pub fn use_stdio(&self) -> bool {
        let stdio = json!(Target::Stdio);
        self.console == Some(Target::Stdio) || self.ports.iter().any(|port| port["target"] == stdio)
    }

    /// Ends the options: adds the devices that need none of their own.
    ///
    /// # Errors
    /// A `-net nic` without a network, or the reverse: code 64.
    pub fn finish(&mut self) -> Result<(), Failure> {
        self.disks.append(&mut self.own_disks);
        match std::mem::take(&mut self.hub) {
            (None, None) => Ok(()),
            (Some(card), Some(network)) => {
                let both = network.into_iter().chain(card).collect::<Map<_, _>>();
                self.nets.push(both.into());
                Ok(())
            }
            _ => Err(refuse("-net nic and -net user belong together")),
        }
    }

    /// Adds the card that QEMU has without any option on networks.
    pub fn add_default_net(&mut self) {
        self.nets.push(json!({ "kind": "user", "address": GUEST_ADDRESS }));
    }
}

/// Takes the kind of a network and its parameters.
fn network(params: &mut Params) -> Result<Table, Failure> {
    match params.require("type")?.as_str() {
        "user" => {
            let forwards = params.take_all("hostfwd");
            let forward = |text: &String| {
                // The only guest of the network.
                let text = text.replace(&format!("-{GUEST_ADDRESS}:"), "-:");
                if text.starts_with(':') { format!("tcp{text}") } else { text }
            };
            let forwards: Vec<_> = forwards.iter().map(forward).collect();
            Ok(table(json!({ "kind": "user", "address": GUEST_ADDRESS, "hostfwd": forwards })))
        }
        "tap" => Ok(table(json!({ "tap": params.require("ifname")? }))),
        other => Err(params.unsupported(&format!("no network `{other}`: use user or tap"))),
    }
}

/// Takes the model of a card.
fn check_model(params: &mut Params) -> Result<(), Failure> {
    match params.take("model").as_deref() {
        None | Some("virtio" | "virtio-net-pci") => Ok(()),
        Some(_) => Err(params.unsupported("the model must be virtio")),
    }
}

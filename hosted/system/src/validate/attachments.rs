//! Disks and network cards of the machine and of VMs, and files for guests.

use super::Validator;
use crate::attach::{
    Bus, DiskAttachment, EmulatedDisk, EmulatedNic, NetAttachment, VirtioBus, chosen_mac,
};
use crate::boot_files::{file_length, unreadable};
use crate::description::{self, ServerKind};
use crate::initramfs::LONGEST;
use crate::resolved::ResolvedServer;
use hosted_command::problem::Problem;
use proto::service::MAX_SESSIONS;
use proto::system as compiled;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::{PathBuf, absolute};
use toml::Spanned;

/// Disks and sessions attached to servers so far.
#[derive(Default)]
pub(super) struct Attached {
    /// Disks and their VMs.
    disks: Vec<(String, DiskAttachment)>,
    macs: Vec<proto::net::Mac>,
    /// Sessions per server.
    sessions: HashMap<u8, usize>,
}

impl Validator<'_> {
    /// Parses a text; `None`: it is invalid, which is reported.
    pub(super) fn parsed<T>(
        &mut self,
        text: &Spanned<String>,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<T> {
        let parsed = parse(text.get_ref());
        parsed.map_err(|message| self.problems.push(Problem::new(text.span(), message))).ok()
    }

    pub(super) fn machine_disks(&mut self, written: &[Spanned<String>]) -> Vec<EmulatedDisk> {
        let folder = self.folder;
        let mut disks = Vec::new();
        for text in written {
            let Some(disk) = self.parsed(text, |text| EmulatedDisk::parse(text, folder)) else {
                continue;
            };
            if disk.bus == Bus::Ahci && self.bus == VirtioBus::Mmio {
                let message = "board \"qemu-virt\" has no AHCI controller without an IOMMU";
                let help = "remove `bus=ahci`, or set [system] iommu = true";
                self.problems.push(Problem::new(text.span(), message).help(help));
            }
            let writes = |disk: &EmulatedDisk| !disk.read_only && !disk.snapshot;
            let same =
                |other: &&EmulatedDisk| absolute(&other.path).ok() == absolute(&disk.path).ok();
            let other = disks.iter().find(same);
            if other.is_some_and(|other| writes(other) || writes(&disk)) {
                let message = format!("another disk has the same file {}", disk.path.display());
                let help = "use another file, or `ro=on` or `snapshot=on` for all of its disks";
                self.problems.push(Problem::new(text.span(), message).help(help));
            }
            disks.push(disk);
        }
        disks
    }

    pub(super) fn machine_nets(&mut self, written: &[Spanned<String>]) -> Vec<EmulatedNic> {
        let mut nics = Vec::new();
        let mut ports = BTreeSet::new();
        for text in written {
            let Some(nic) = self.parsed(text, EmulatedNic::parse) else { continue };
            // Before the guest's part are the protocol, and the port of the host.
            let hosts = nic.forwards.iter().filter_map(|forward| forward.split('-').next());
            for host in hosts {
                if !ports.insert(host.to_owned()) {
                    let message = format!("the host's port in {host} is forwarded twice");
                    let problem = Problem::new(text.span(), message);
                    self.problems.push(problem.help("use another port for one of them"));
                }
            }
            nics.push(nic);
        }
        nics
    }

    /// Resolves the files for the RAM disk, which holds them in one folder.
    pub(super) fn guest_files(&mut self, written: &[Spanned<String>]) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = Vec::new();
        for text in written {
            let path = self.folder.join(text.get_ref());
            let length = file_length(&path);
            if let Err(error) = &length {
                self.problems.push(unreadable(text.span(), "file", &path, error));
            } else if length.is_ok_and(|length| length > LONGEST) {
                let message = format!("{} has 4 GiB or more", path.display());
                let help = "a RAM disk holds shorter files only; attach a disk with this file";
                self.problems.push(Problem::new(text.span(), message).help(help));
            } else if files.iter().any(|other| other.file_name() == path.file_name()) {
                let message = format!("another file has the same name as {}", path.display());
                let help = "all files are in /root in the guest; rename one";
                self.problems.push(Problem::new(text.span(), message).help(help));
            }
            files.push(path);
        }
        files
    }

    /// Returns the index of the server with this name and kind.
    fn server_of(
        &mut self,
        name: &str,
        kind: ServerKind,
        span: Range<usize>,
        servers: &[ResolvedServer],
        attached: &mut Attached,
    ) -> Option<u8> {
        let what = match kind {
            ServerKind::Console => "console",
            ServerKind::Block => "disk server",
            ServerKind::Switch => "switch",
        };
        let found = servers.iter().position(|server| server.name == name);
        let Some(index) = found.filter(|&index| servers[index].kind == kind) else {
            let message = format!("no such {what}: `{name}`");
            let kind = if kind == ServerKind::Block { "block" } else { "switch" };
            let help = format!("add a [[server]] with name = \"{name}\" and kind = \"{kind}\"");
            self.problems.push(Problem::new(span, message).help(help));
            return None;
        };
        let index = index as u8;
        let sessions = attached.sessions.entry(index).or_default();
        *sessions += 1;
        if *sessions == MAX_SESSIONS + 1 {
            let message = format!("{what} `{name}` has too many clients (limit {MAX_SESSIONS})");
            self.problems.push(Problem::new(span, message).help("add a second server"));
        }
        Some(index)
    }

    pub(super) fn disks(
        &mut self,
        vm: &description::Vm,
        servers: &[ResolvedServer],
        attached: &mut Attached,
    ) -> Vec<compiled::VmDisk> {
        let mut disks = Vec::new();
        if let (Some(text), true) = (vm.disk.first().or(vm.net.first()), vm.template) {
            let message = "a template cannot have disks or network cards";
            self.problems.push(Problem::new(text.span(), message));
        }
        if let Some(text) = vm.disk.get(compiled::MAX_VM_DISKS) {
            let message =
                format!("too many disks of a virtual machine (limit {})", compiled::MAX_VM_DISKS);
            self.problems.push(Problem::new(text.span(), message));
        }
        for text in &vm.disk {
            let Some(disk) = self.parsed(text, DiskAttachment::parse) else { continue };
            let kind = ServerKind::Block;
            let Some(server) = self.server_of(&disk.server, kind, text.span(), servers, attached)
            else {
                continue;
            };
            if let Some((other, _)) = attached.disks.iter().find(|(_, other)| disk.conflicts(other))
            {
                let message = format!("these sectors already belong to `{other}`");
                let problem = Problem::new(text.span(), message);
                self.problems.push(
                    problem.help("shared sectors must be read-only for all: add `,ro` to each"),
                );
            }
            disks.push(compiled::VmDisk { server, part: disk.part, read_only: disk.read_only });
            attached.disks.push((vm.name.get_ref().clone(), disk));
        }
        disks
    }

    pub(super) fn nets(
        &mut self,
        index: usize,
        vm: &description::Vm,
        servers: &[ResolvedServer],
        attached: &mut Attached,
    ) -> Vec<compiled::VmNet> {
        let mut nets = Vec::new();
        if let Some(text) = vm.net.get(compiled::MAX_VM_NETS) {
            let most = compiled::MAX_VM_NETS;
            let message = format!("too many network cards of a virtual machine (limit {most})");
            self.problems.push(Problem::new(text.span(), message));
        }
        for (card, text) in vm.net.iter().enumerate() {
            let Some(net) = self.parsed(text, NetAttachment::parse) else { continue };
            let kind = ServerKind::Switch;
            let Some(server) = self.server_of(&net.server, kind, text.span(), servers, attached)
            else {
                continue;
            };
            let mac = net.mac.unwrap_or(chosen_mac(index, card));
            if attached.macs.contains(&mac) {
                let problem = Problem::new(text.span(), "another network card has this address");
                self.problems.push(problem.help("use another address, or remove `mac`"));
            }
            attached.macs.push(mac);
            nets.push(compiled::VmNet { server, mac, group: net.group, rate: net.rate });
        }
        nets
    }
}

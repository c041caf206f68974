//! Several guests at once and the servers between them: cost of data transfers, of idle guests, and
//! memory per VM. The peer, KVM with QEMU as VMM, does the same on the same emulated machine in the
//! same command.

use crate::counted::{Counter, Counts};
use crate::guest::{Tree, folder};
use crate::kvm::{self, KVM};
use crate::linux::Linux;
use crate::report::Figure;
use crate::runs::{self, COMMAND_LINE, NO_SLEEP, Output, SLEEP};
use crate::statistics::VmStatistics;
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::path::PathBuf;

/// Number of disk reads between the marks.
const READS: u32 = 500;
/// MiB transferred between the marks.
const MIB: u32 = 32;
/// Rounds that the busy guest computes, in millions.
const ROUNDS: u32 = 400;
/// Number of guests at once, of which one is busy.
const GUESTS: usize = 16;
/// IPIs that the two vCPUs of guest `ipi` send, including those before it measures.
const MESSAGES: f64 = 10_200.0;
/// Seconds after boot at which the busy guest starts to compute: the other guests are idle by then.
const SETTLED: u32 = 90;
/// Seconds after which an idle guest ends.
const IDLE: u32 = 200;
/// Disk requests per second: slow enough that a waiting task always sleeps, so that all runs take
/// the same course.
const DISK_RATE: u32 = 100;

/// Modules of guests, and of the peer's host.
const VIRTIO: [&str; 6] = [
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
];
const VIRTIO_NET: [&str; 3] = ["failover", "net_failover", "virtio_net"];
const BRIDGE: [&str; 8] =
    ["tun", "llc", "stp", "bridge", "vhost_iotlb", "vhost", "tap", "vhost_net"];
/// Kernels, RAM disks and disk image of these measurements.
pub struct Consolidation {
    linux: PathBuf,
    guest: PathBuf,
    host: PathBuf,
    disk: PathBuf,
}

impl Consolidation {
    /// Builds the RAM disks and the disk image.
    pub fn new() -> Result<Self> {
        let linux = Linux::fetch()?;
        let image = linux.image()?;
        let disk = folder().join("disk.img");
        File::create(&disk)?.set_len(64 << 20).context("cannot make a disk")?;
        let guest = guest_disk(&linux)?;
        let host = kvm::Host {
            name: "host",
            modules: &[&VIRTIO[..], &KVM, &BRIDGE].concat(),
            guest: &guest,
            micro_guest: "guest-ipi",
        }
        .ram_disk(&linux)?;
        Ok(Self { linux: image, guest, host, disk })
    }

    /// Measures the part with this name, or all parts if it is empty.
    pub fn figures(&self, part: &str) -> Result<Vec<Figure>> {
        let is_wanted = |name| part.is_empty() || part == name;
        let mut figures = Vec::new();
        if is_wanted("ipi") {
            figures.push(self.ipi()?);
        }
        if is_wanted("disk") {
            figures.push(self.disk()?);
        }
        if is_wanted("net") {
            figures.push(self.net()?);
        }
        if is_wanted("many") {
            figures.extend(self.many()?);
        }
        Ok(figures)
    }

    /// Returns the `[system]` table of a description.
    fn head(&self, more: &str) -> String {
        format!("[system]\nboard = \"qemu-q35\"\nlog = \"com2\"\nshare_cpus = true\n{more}\n")
    }

    /// Returns a `[[vm]]` table of a description.
    fn guest(&self, name: &str, memory: u32, line: &str, more: &str) -> String {
        format!(
            "\n[[vm]]\nname = \"{name}\"\nmemory = \"{memory}M\"\nkernel = \"{}\"\ninitrd = \"{}\"\n\
             cmdline = \"{COMMAND_LINE} {line}\"\n{more}\n",
            self.linux.display(),
            self.guest.display()
        )
    }

    /// Runs a row once under KVM.
    fn peer(&self, name: &str, line: &str, icount: &str, arguments: &[String]) -> Result<Counts> {
        let counter = Counter::new(&format!("kvm-{name}"))?;
        let arguments = [&counter.arguments(), arguments].concat();
        let output = self.kvm(name, line, icount, &arguments)?;
        counter.read().with_context(|| output.console)
    }

    /// Runs the peer's host system.
    fn kvm(&self, name: &str, line: &str, icount: &str, arguments: &[String]) -> Result<Output> {
        println!("running under KVM: {name}");
        kvm::run(&self.linux, &self.host, line, icount, arguments)
    }

    /// Runs a row once under Parador and returns the counts and the log.
    fn ours(
        &self,
        name: &str,
        description: &str,
        icount: &str,
        arguments: &[String],
    ) -> Result<(Counts, String)> {
        println!("running: {name}");
        let counter = Counter::new(name)?;
        let arguments = [&counter.arguments(), arguments].concat();
        let output = runs::system_with(name, description, icount, &arguments)?;
        Ok((counter.read().with_context(|| output.console)?, output.log))
    }

    /// Runs a row twice under Parador and compares it with the peer's counts.
    fn compare(
        &self,
        row: Row,
        ours: impl Fn() -> Result<(Counts, String)>,
        peer: Counts,
    ) -> Result<Figure> {
        let (first, second) = (ours()?.0, ours()?.0);
        let count = f64::from(row.count);
        let difference = (first.instructions - second.instructions).abs();
        println!("under KVM: {:.1} world switches for each", peer.entries / count);
        Ok(Figure {
            key: row.key.into(),
            title: row.title.into(),
            value: first.instructions / count,
            unit: "instructions",
            world_switches: Some(first.entries / count),
            peer: Some(peer.instructions / count),
            limit: peer.instructions / count,
            spread: difference / first.instructions,
        })
    }

    /// IPI from a vCPU to another one that sleeps. Both run on one CPU, so the figure includes the
    /// switch between them: QEMU 7.2 hangs when it counts instructions of several CPUs.
    fn ipi(&self) -> Result<Figure> {
        let peer = self.kvm("ipi", " what=micro", NO_SLEEP, &[])?.value("ipi")?;
        let description = self.head("cpus = 1")
            + "\n[[vm]]\nname = \"ipi\"\nmemory = \"16M\"\nkernel = \"{artifacts}/guest-ipi\"\n\
               cpus = 2\nconsole = \"com1\"\n";
        let run = || {
            println!("running: ipi");
            runs::system(&description)
        };
        let (first, second) = (run()?, run()?);
        let value = first.value("ipi")?;
        let title = "message to a sleeping vCPU on the same CPU";
        Ok(Figure {
            world_switches: Some(VmStatistics::read(&first.log)?.entries / MESSAGES),
            peer: Some(peer),
            spread: (second.value("ipi")? - value).abs() / value,
            ..Figure::new("ipi", title, value, "instructions")?
        })
    }

    /// Disk reads at queue depth 1.
    fn disk(&self) -> Result<Figure> {
        let line = format!("data=read,/dev/vda,{READS}");
        let rate = format!("throttling.iops-total={DISK_RATE}");
        let drive = format!("file={},format=raw,if=none,id=disk0,{rate}", self.disk.display());
        let device = "virtio-blk-pci,drive=disk0".to_owned();
        let arguments = ["-drive".into(), drive, "-device".into(), device];
        let peer = self.peer("disk", &format!(" what=disk {line}"), SLEEP, &arguments)?;
        let description = self.head(&format!("disk = [\"{}\"]", self.disk.display()))
            + "\n[[server]]\nname = \"disk\"\nkind = \"block\"\ndevice = \"pci:virtio-blk:0\"\n"
            + &self.guest("guest", 192, &line, "console = \"com1\"\ndisk = [\"disk\"]");
        let arguments = ["-set".into(), format!("drive.disk0.{rate}")];
        let row =
            Row { key: "blk_4k_read", title: "virtio-blk, random read of 4 KiB", count: READS };
        self.compare(row, || self.ours("disk", &description, SLEEP, &arguments), peer)
    }

    /// TCP from guest to guest.
    fn net(&self) -> Result<Figure> {
        let line = format!("data=send,10.0.0.1,{MIB}");
        let peer = self.peer("net", &format!(" what=net {line}"), NO_SLEEP, &[])?;
        let port = "net = [\"switch\"]";
        let description = self.head("")
            + "\n[[server]]\nname = \"switch\"\nkind = \"switch\"\n"
            + &self.guest("server", 192, "address=10.0.0.1 data=serve", port)
            + &self.guest(
                "client",
                192,
                &format!("address=10.0.0.2 {line}"),
                &format!("console = \"com1\"\n{port}"),
            );
        let row = Row { key: "net_per_mb", title: "TCP between two guests, one MiB", count: MIB };
        self.compare(row, || self.ours("net", &description, NO_SLEEP, &[]), peer)
    }

    /// One guest that computes, alone and beside many idle guests.
    fn many(&self) -> Result<[Figure; 2]> {
        let line = format!("wait={SETTLED} data=compute,{ROUNDS}");
        let worker = self.head("") + &self.guest("worker", 96, &line, "console = \"com1\"");
        let (alone, _) = self.ours("alone", &worker, NO_SLEEP, &[])?;
        let idle = |number| self.guest(&format!("idle-{number}"), 96, &format!("wait={IDLE}"), "");
        let description = worker.clone() + &(1..GUESTS).map(idle).collect::<String>();
        let (beside, log) = self.ours("many", &description, NO_SLEEP, &[])?;
        let bytes: Vec<f64> = VmStatistics::all(&log).map(|one| one.bytes).collect();
        ensure!(bytes.len() == GUESTS, "{} guests have ended instead of {GUESTS}", bytes.len());
        let others = (GUESTS - 1) as f64;
        let share = (beside.instructions - alone.instructions) / others / alone.instructions;
        let most = bytes.into_iter().fold(0.0, f64::max);
        Ok([
            Figure {
                world_switches: Some((beside.entries - alone.entries) / others),
                ..Figure::new(
                    "idle_guest_share",
                    "idle guest beside a working one",
                    share,
                    "of the working guest's instructions",
                )?
            },
            Figure::new(
                "vmm_bytes_16",
                "16 guests: memory for each beyond its own",
                most,
                "bytes",
            )?,
        ])
    }
}

/// A row with a peer.
#[derive(Clone, Copy)]
struct Row {
    key: &'static str,
    title: &'static str,
    /// Number of operations between the marks.
    count: u32,
}

fn guest_disk(linux: &Linux) -> Result<PathBuf> {
    let applets = ["sh", "mount", "echo", "cat", "tr", "insmod", "ifconfig", "sleep", "poweroff"];
    let tree = Tree::new("data", &applets)?;
    tree.program("data")?;
    tree.init("data-init")?;
    linux.modules(&tree, &[&VIRTIO[..], &VIRTIO_NET].concat())?;
    tree.pack()
}

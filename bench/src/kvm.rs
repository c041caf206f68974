//! The peer on the emulated machine: Debian's kernel with `kvm-amd`, and QEMU as the VMM.

use crate::guest::Tree;
use crate::linux::{Linux, output};
use crate::runs::{Bare, Output, PC};
use anyhow::{Context, Result};
use parador_tests::system::artifacts;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Modules of KVM, in load order.
pub const KVM: [&str; 3] = ["irqbypass", "kvm", "kvm-amd"];
/// Firmware that QEMU loads for its guests.
const FIRMWARE: [&str; 4] = ["bios-256k.bin", "linuxboot_dma.bin", "kvmvapic.bin", "pvh.bin"];
const FIRMWARE_FOLDERS: [&str; 2] = ["/usr/share/qemu", "/usr/share/seabios"];
/// Memory of the host in MiB: enough for QEMU and two guests.
const MEMORY: &str = "1024";

/// Contents of the RAM disk of a host.
pub struct Host<'a> {
    /// Name of the RAM disk.
    pub name: &'a str,
    /// Modules in load order.
    pub modules: &'a [&'a str],
    /// RAM disk of the guests, whose kernel is the host's.
    pub guest: &'a Path,
    /// Name of the micro-guest's artifact.
    pub micro_guest: &'a str,
}

impl Host<'_> {
    /// Builds the RAM disk.
    pub fn ram_disk(&self, linux: &Linux) -> Result<PathBuf> {
        let applets =
            ["sh", "mount", "echo", "cat", "insmod", "ifconfig", "brctl", "tunctl", "reboot"];
        let tree = Tree::new(self.name, &applets)?;
        tree.init("kvm-init")?;
        linux.modules(&tree, self.modules)?;
        tree.file(&linux.image()?, "vmlinuz")?;
        tree.file(self.guest, "guest.cpio")?;
        tree.file(&artifacts().join(self.micro_guest), "micro")?;
        let qemu = output(Command::new("sh").args(["-c", "command -v qemu-system-x86_64"]))?;
        tree.dynamic_program(Path::new(qemu.trim()), "qemu")?;
        for name in FIRMWARE {
            let mut paths = FIRMWARE_FOLDERS.iter().map(|folder| Path::new(folder).join(name));
            let path = paths.find(|path| path.exists());
            let path = path.with_context(|| format!("QEMU's firmware {name} is not installed"))?;
            tree.file(&path, &format!("firmware/{name}"))?;
        }
        tree.pack()
    }
}

/// Runs a host to its end. `line` is appended to the kernel command line: `what=` and further
/// parameters of `bench/guest/kvm-init`.
pub fn run(
    kernel: &Path,
    ram_disk: &Path,
    line: &str,
    icount: &str,
    arguments: &[String],
) -> Result<Output> {
    Bare { machine: PC, memory: MEMORY, kernel, ram_disk, more: line, icount }.run(arguments)
}

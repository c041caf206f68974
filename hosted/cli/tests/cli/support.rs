//! A folder with a description, substitutes for Parador's binaries and for QEMU, and `parador` run
//! in it.

use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use tempfile::TempDir;

/// The folder of a test.
pub struct Folder(TempDir);

impl Folder {
    /// A folder with stand-ins in `programs` and this `system.toml`.
    pub fn new(description: &str) -> Self {
        let folder = Self(TempDir::new().unwrap());
        fs::create_dir(folder.path("programs")).unwrap();
        let x86 = ["kernel.elf", "root", "console", "vmm", "steward", "check-hostile"];
        let arm64 = ["kernel-arm64.image", "root-arm64", "disk-arm64", "net-arm64", "vmm-arm64"];
        for name in x86.iter().chain(&arm64).chain(&["steward-arm64"]) {
            fs::write(folder.path("programs").join(name), format!("stand-in for {name}")).unwrap();
        }
        folder.write("system.toml", description.as_bytes());
        folder
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, content: &[u8]) {
        fs::write(self.path(name), content).unwrap();
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    /// An executable shell script.
    pub fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// Copies `parador` to `place`, in whose folders it looks for its source tree.
    ///
    /// Another process does: a descriptor for writing that a test beside this one inherits into a
    /// process of its own would keep the copy from being executed.
    pub fn copy_parador(&self, place: &Path) {
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        let copy = Command::new("cp").arg(env!("CARGO_BIN_EXE_parador")).arg(place).status();
        assert!(copy.unwrap().success());
    }

    /// `parador` with these arguments, in this folder.
    pub fn parador(&self, arguments: &[&str]) -> Command {
        // The tests may run below nohup(1), or in the background of a script. By its path: some
        // tests clear PATH, in which a program without one would be searched.
        let mut command = Command::new("/usr/bin/env");
        command
            .args(["--default-signal=HUP,INT,QUIT", env!("CARGO_BIN_EXE_parador")])
            .args(arguments)
            .current_dir(self.0.path())
            .env("PARADOR_ARTIFACTS", "programs")
            .env("XDG_CACHE_HOME", self.path("cache"))
            .env_remove("PARADOR_QEMU");
        command
    }

    /// `parador system emulate` with a stand-in for QEMU that runs this script.
    pub fn emulate(&self, script: &str, arguments: &[&str]) -> Command {
        let qemu = self.script("qemu", script);
        let mut command = self.parador(&["system", "emulate", "system.toml", "-o", "image"]);
        command.args(arguments).env("PARADOR_QEMU", qemu);
        command
    }

    /// Names in a subfolder, hidden ones too, in order.
    pub fn list(&self, name: &str) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(self.path(name))
            .map(|entries| {
                entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
            })
            .unwrap_or_default();
        names.sort();
        names
    }
}

/// Sends a signal to a running `parador`.
pub fn send(child: &Child, signal: Signal) {
    let pid = Pid::from_child(child);
    kill_process(pid, signal).unwrap();
}

/// Exit code of a finished `parador`.
pub fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

/// Returns the standard error of a finished `parador`.
pub fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Waits until a file appears and has content.
pub fn wait_for(path: &Path) -> String {
    for _ in 0..500 {
        match fs::read_to_string(path) {
            Ok(text) if text.ends_with('\n') => return text,
            _ => std::thread::sleep(std::time::Duration::from_millis(20)),
        }
    }
    panic!("{} does not appear", path.display());
}

/// Returns whether a process exists and is not a zombie.
pub fn alive(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
}

/// Waits until a process has ended.
pub fn wait_for_end(pid: &str) {
    for _ in 0..500 {
        if !alive(pid) {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    panic!("process {pid} does not end");
}

/// A bzImage as far as the checks look: 16 MiB + 1 MiB of memory needed.
pub fn bzimage() -> Vec<u8> {
    let mut image = vec![0; 2 * 512 + 64 * 16];
    image[0x1f1] = 1;
    image[0x1f4..0x1f8].copy_from_slice(&64_u32.to_le_bytes());
    image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x020f_u16.to_le_bytes());
    image[0x234] = 1;
    image[0x236] = 1;
    image[0x258..0x260].copy_from_slice(&(16_u64 << 20).to_le_bytes());
    image[0x260..0x264].copy_from_slice(&(1_u32 << 20).to_le_bytes());
    image
}

/// An `Image` for AArch64 as far as the checks look: 1 MiB of memory needed.
pub fn image_arm64() -> Vec<u8> {
    let mut image = vec![0; 4096];
    image[16..24].copy_from_slice(&(1_u64 << 20).to_le_bytes());
    image[56..60].copy_from_slice(b"ARM\x64");
    image
}

/// A virtual machine whose kernel is the file `kernel`.
pub const ONE_VM: &str = "\
[system]
board = \"qemu-q35\"

[[vm]]
name = \"linux\"
memory = \"64M\"
kernel = \"kernel\"
console = \"com1\"
";

//! Builds initial RAM disks: `busybox`, a cpio archive with busybox, kernel modules and `/init`,
//! and `agent`, with the agent of `parador exec`.
//!
//! The archive has the "newc" format (`Documentation/driver-api/early-userspace/buffer-format.rst`
//! in Linux). It is not compressed: decompression costs a guest more than copying. Times and owners
//! are 0, so equal inputs give equal archives.

use crate::machine_exit;
use hosted_command::architecture::Architecture;
use hosted_command::failure::{Failure, IoContext};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// First user process of the guest.
const INIT: &str = include_str!("init.sh");
/// Script of busybox' DHCP client.
const LEASE: &str = include_str!("lease.sh");
/// Folders, parents first.
const FOLDERS: [&str; 12] = [
    "bin",
    "dev",
    "etc",
    "etc/udhcpc",
    "lib",
    "lib/modules",
    "mnt",
    "proc",
    "root",
    "sbin",
    "sys",
    "tmp",
];

/// Begin of each entry's header, which [`FIELDS`] numbers of eight hexadecimal digits follow.
const MAGIC: &[u8] = b"070701";
const FIELDS: usize = 13;
/// Indices of fields: bytes of the content; bytes of the name with its terminating zero.
const SIZE: usize = 6;
const NAME_LENGTH: usize = 11;
/// Longest file in bytes, which eight digits state.
pub(crate) const LONGEST: u64 = u32::MAX as u64;
/// Name of the last entry.
const TRAILER: &str = "TRAILER!!!";
/// Name of the program that the kernel starts.
const INIT_NAME: &str = "init";

const FOLDER: u32 = 0o040_755;
const EXECUTABLE: u32 = 0o100_755;
const DATA: u32 = 0o100_644;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// Builds the archive with this busybox, these kernel modules (loaded in this order), and these
/// files in `/root`. The program that ends the VM with an exit code exists for x86-64 only.
pub fn busybox(
    architecture: Architecture,
    busybox: &Path,
    modules: &[PathBuf],
    files: &[PathBuf],
) -> Result<Vec<u8>, Failure> {
    let read = |path: &Path| fs::read(path).file_error("read", path);
    let mut archive = Archive::new();
    for folder in FOLDERS {
        archive.add(folder, FOLDER, (0, 0), &[]);
    }
    archive.add("etc/udhcpc/default.script", EXECUTABLE, (0, 0), LEASE.as_bytes());
    // The kernel opens the console before `/init` can mount anything.
    archive.add("dev/console", CHARACTER_DEVICE, (5, 1), &[]);
    archive.add("bin/busybox", EXECUTABLE, (0, 0), &read(busybox)?);
    if architecture == Architecture::X86 {
        archive.add(machine_exit::NAME, EXECUTABLE, (0, 0), &machine_exit::program());
    }
    archive.add(INIT_NAME, EXECUTABLE, (0, 0), INIT.as_bytes());
    for (index, module) in modules.iter().enumerate() {
        let name = module.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        archive.add(&format!("lib/modules/{index:02}-{name}"), DATA, (0, 0), &read(module)?);
    }
    for file in files {
        let name = file.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        // Only the execute permission is kept, whatever the user's umask.
        let executable =
            fs::metadata(file).is_ok_and(|file| file.permissions().mode() & 0o100 != 0);
        let mode = if executable { EXECUTABLE } else { DATA };
        archive.add(&format!("root/{name}"), mode, (0, 0), &read(file)?);
    }
    Ok(archive.finish())
}

/// Builds the archive with the agent as its only program.
pub fn agent(agent: &[u8]) -> Vec<u8> {
    let mut archive = Archive::new();
    archive.add("dev", FOLDER, (0, 0), &[]);
    // The kernel opens the console before `/init` can mount anything.
    archive.add("dev/console", CHARACTER_DEVICE, (5, 1), &[]);
    archive.add(INIT_NAME, EXECUTABLE, (0, 0), agent);
    archive.finish()
}

/// Returns the contents of `/init` in an archive of this format; `None`: it has none, or is
/// malformed.
pub fn init(archive: &[u8]) -> Option<&[u8]> {
    let mut rest = archive;
    loop {
        let field = |index: usize| {
            let digits = rest.get(MAGIC.len() + 8 * index..)?.get(..8)?;
            usize::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()
        };
        let (size, name_length) = (field(SIZE)?, field(NAME_LENGTH)?);
        let header = MAGIC.len() + 8 * FIELDS;
        let name =
            rest.strip_prefix(MAGIC).and(rest.get(header..)?.get(..name_length)?.split_last());
        let start = (header + name_length).next_multiple_of(4);
        let content = rest.get(start..)?.get(..size)?;
        match name? {
            (0, name) if name == INIT_NAME.as_bytes() => return Some(content),
            (0, name) if name != TRAILER.as_bytes() => {}
            _ => return None,
        }
        rest = rest.get((start + size).next_multiple_of(4)..)?;
    }
}

/// A cpio archive under construction.
struct Archive {
    bytes: Vec<u8>,
    inode: u32,
}

impl Archive {
    fn new() -> Self {
        Self { bytes: Vec::new(), inode: 0 }
    }

    /// Adds a file; its folder must precede it.
    fn add(&mut self, name: &str, mode: u32, (major, minor): (u32, u32), content: &[u8]) {
        self.inode += 1;
        let links = if mode == FOLDER { 2 } else { 1 };
        self.entry(name, [self.inode, mode, links, major, minor], content);
    }

    /// Returns the archive.
    fn finish(mut self) -> Vec<u8> {
        self.entry(TRAILER, [0, 0, 1, 0, 0], &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, [inode, mode, links, major, minor]: [u32; 5], content: &[u8]) {
        self.bytes.extend_from_slice(MAGIC);
        // inode, mode, uid, gid, links, mtime, size, device, rdevice, name length, checksum
        let size = content.len() as u32;
        let name_length = name.len() as u32 + 1;
        let fields = [inode, mode, 0, 0, links, 0, size, 0, 0, major, minor, name_length, 0];
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    #[test]
    fn the_first_program_is_found_again() {
        for program in [&b"#!"[..], b"1234", b""] {
            let archive = agent(program);
            assert_eq!(init(&archive), Some(program));
            for end in 0..archive.len() - 160 {
                assert_eq!(init(&archive[..end]), None, "{end}");
            }
        }
        assert_eq!(init(&Archive::new().finish()), None);
        assert_eq!(init(b"070701ffffffffffffffff"), None);
        let huge =
            agent(b"x").iter().map(|b| if *b == b'0' { b'f' } else { *b }).collect::<Vec<_>>();
        assert_eq!(init(&huge), None);
    }

    fn example() -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("busybox");
        let module = folder.path().join("a.ko");
        let file = folder.path().join("file");
        fs::write(&program, b"program").unwrap();
        fs::write(&module, b"module").unwrap();
        fs::write(&file, b"file").unwrap();
        busybox(Architecture::X86, &program, &[module], &[file]).unwrap()
    }

    #[test]
    fn the_format_is_that_of_newc() {
        let mut archive = Archive::new();
        archive.add("a", DATA, (0, 0), b"12345");
        let bytes = archive.finish();
        let header = concat!(
            "070701", "00000001", "000081a4", "00000000", "00000000", "00000001", "00000000",
            "00000005", "00000000", "00000000", "00000000", "00000000", "00000002", "00000000",
        );
        assert_eq!(&bytes[..110], header.as_bytes());
        assert_eq!(&bytes[110..120], b"a\x0012345\0\0\0");
        assert!(bytes.ends_with(b"TRAILER!!!\0\0\0\0"));
        assert_eq!(bytes.len() % 4, 0);
    }

    #[test]
    fn equal_inputs_give_equal_archives() {
        assert_eq!(example(), example());
    }

    #[test]
    fn cpio_lists_it() {
        let child = Command::new("cpio")
            .args(["-t", "--quiet"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        // Not installed everywhere; the format is checked above in any case.
        let Ok(mut child) = child else { return };
        child.stdin.take().unwrap().write_all(&example()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        let names = String::from_utf8(output.stdout).unwrap();
        let expected = [
            "bin",
            "dev",
            "etc",
            "etc/udhcpc",
            "lib",
            "lib/modules",
            "mnt",
            "proc",
            "root",
            "sbin",
            "sys",
            "tmp",
            "etc/udhcpc/default.script",
            "dev/console",
            "bin/busybox",
            "sbin/machine-exit",
            "init",
            "lib/modules/00-a.ko",
            "root/file",
        ];
        assert_eq!(names.lines().collect::<Vec<_>>(), expected);
    }
}

//! Programs with fixed addresses in a guest whose user address space has a hole and an end
//! (docs/CAVEATS.md).

use super::{Rig, end};
use anyhow::{Context, Result};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

/// First address that hosts let ordinary processes map.
const LEAST: u64 = 0x1_0000;
/// First address of the hole, the first behind it, and the end of the address space.
const HOLE: u64 = 0x4000_0000;
const BEHIND: u64 = 0x8000_0000;
const END: u64 = 0x3fff_ffff_f000;
/// Programs by name: their first address, the bytes that they have there, and whether they fit.
const PROGRAMS: [(&str, u64, u64, bool); 11] = [
    ("early", LEAST - 0x1000, 0x1000, false),
    ("lowest", LEAST, 0x1000, true),
    ("low", 0x40_0000, 0x1000, true),
    ("below", HOLE - 0x1000, 0x1000, true),
    ("into-hole", HOLE - 0x1000, 0x3000, false),
    ("large", 0x40_0000, 0x5000_0000, false),
    ("valgrind", 0x5800_0000, 0x1000, false),
    ("end-of-hole", BEHIND - 0x1000, 0x1000, false),
    ("behind", BEHIND, 0x1000, true),
    ("over-the-end", END - 0x1000, 0x3000, false),
    ("beyond", 0x6000_0000_0000, 0x1000, false),
];
/// `mov eax, 60; mov edi, 9; syscall`: ends with 9.
const CODE: [u8; 12] = [0xb8, 60, 0, 0, 0, 0xbf, 9, 0, 0, 0, 0x0f, 0x05];
/// Bytes of the headers of the file, and of its only segment.
const HEADERS: u64 = 64 + 56;

/// Returns a static program of one segment at an address, with this size in memory in bytes.
fn program(address: u64, length: u64) -> Vec<u8> {
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    let mut put = |bytes: u64, value: u64| file.extend(&value.to_le_bytes()[..bytes as usize]);
    // Executable, x86-64, version; entry, segments, no sections.
    [(2, 2), (2, 62), (4, 1), (8, address + HEADERS), (8, 64), (8, 0), (4, 0)]
        .into_iter()
        .chain([(2, 64), (2, 56), (2, 1), (2, 64), (2, 0), (2, 0)])
        // Loaded, to read, write and execute.
        .chain([(4, 1), (4, 7), (8, 0), (8, address), (8, address)])
        .chain([(8, HEADERS + CODE.len() as u64), (8, length), (8, 0x1000)])
        .for_each(|(bytes, value)| put(bytes, value));
    file.extend(CODE);
    file
}

/// A program outside of the user address space is not executed, and the console names it, its
/// addresses and the limits.
pub fn fixed() -> Result<()> {
    let rig = Rig::new()?;
    let mut files = Vec::new();
    for (name, address, length, _) in PROGRAMS {
        let path = rig.folder().join(name);
        fs::write(&path, program(address, length)).context("cannot write a program")?;
        fs::set_permissions(&path, Permissions::from_mode(0o755)).context("cannot set a mode")?;
        files.push(path);
    }
    let files: Vec<_> = files.iter().map(|path| path.as_path()).collect();
    let script = "run() { /mnt/$1 && code=0 || code=$?; echo \"$1 ends with $code\"; }\n";
    let runs: String = PROGRAMS.iter().map(|(name, ..)| format!("run {name}\n")).collect();
    for mode in ["none", "process"] {
        let mut run = rig.script_with(super::LIMIT, "quiet", &format!("{script}{runs}"), &files)?;
        let mut ended = end(run.args(["--protection", mode]), "")?.well(0, &[])?;
        for (name, .., fits) in PROGRAMS {
            let said = format!("{name}: execve failed: user addresses 0x");
            if fits {
                ended.never(&[&said])?;
                ended = ended.well(0, &[&format!("{name} ends with 9\n")])?;
            } else {
                let why = format!("are reserved or beyond the end {END:#x}\n");
                ended = ended.well(0, &[&said, &why, &format!("{name} ends with 139\n")])?;
            }
        }
    }
    Ok(())
}

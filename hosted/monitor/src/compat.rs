//! Detects 32-bit user mode on the host, whose system calls set up thread-local storage of a
//! guest's 32-bit applications.

use crate::companion::executable_memory;
use rustix::fs::MemfdFlags;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};

/// Load address of the program.
const BASE: u32 = 0x0804_8000;
/// Sizes of the ELF header and of a program header (System V ABI, Intel386 supplement, chapters 4
/// and 5).
const HEADER: u32 = 52;
const PART: u32 = 32;
/// `mov eax, 1; xor ebx, ebx; int 0x80`: exit(0).
const CODE: [u8; 9] = [0xb8, 1, 0, 0, 0, 0x31, 0xdb, 0xcd, 0x80];

/// Builds the smallest program that exits with 0.
fn program() -> Vec<u8> {
    let start = HEADER + PART;
    let length = start + CODE.len() as u32;
    // 32 bits, little-endian, version 1.
    let mut bytes = b"\x7fELF\x01\x01\x01".to_vec();
    bytes.resize(16, 0);
    let words = [
        // Executable, for the i386.
        2 | 3 << 16,
        1,
        BASE + start,
        HEADER,
        0,
        0,
        HEADER | PART << 16,
        1,
        0,
        // Loadable segment: the whole file, readable and executable.
        1,
        0,
        BASE,
        BASE,
        length,
        length,
        5,
        0x1000,
    ];
    bytes.extend(words.into_iter().flat_map(u32::to_le_bytes));
    bytes.extend(CODE);
    bytes
}

/// Runs the program.
pub fn is_there() -> bool {
    let file = executable_memory("parador-32-bit", MemfdFlags::CLOEXEC);
    let Ok(mut file) = file else { return false };
    if file.write_all(&program()).is_err() {
        return false;
    }
    let mut command = Command::new(format!("/proc/self/fd/{}", file.as_raw_fd()));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_one() {
        let bytes = program();
        assert_eq!(bytes.len(), 93);
        assert_eq!(bytes[24..28], (BASE + 84).to_le_bytes());
        assert_eq!(bytes[84..], CODE);
    }
}

//! A static program for the guest that ends the VM with an exit code through the debug exit port.
//!
//! The program requests access to the port (ioperm); where the guest kernel does not support that,
//! it writes to `/dev/port` (Debian's kernel supports the former, a kernel of `parador kernel
//! build` the latter). It consists of an ELF header, one segment and these instructions.

/// Path of the program in the guest.
pub const NAME: &str = "sbin/machine-exit";

/// `machine-exit CODE`: writes CODE, decimal digits up to 63, to port 0x501, the debug exit port of
/// `vmm_machine::layout` (and the default of QEMU's device). Returns 1 if the VM continues, or
/// for another CODE, whose low bits could report success.
#[rustfmt::skip]
const CODE: [u8; 139] = [
    0x48, 0x8b, 0x74, 0x24, 0x10,   //    mov    rsi, [rsp + 16]      argv[1]
    0x31, 0xdb,                     //    xor    ebx, ebx
    0x48, 0x85, 0xf6,               //    test   rsi, rsi
    0x74, 0x69,                     //    je     5f
    0x0f, 0xb6, 0x06,               // 1: movzx  eax, byte ptr [rsi]  decimal digits
    0x83, 0xe8, 0x30,               //    sub    eax, '0'
    0x83, 0xf8, 0x09,               //    cmp    eax, 9
    0x77, 0x5e,                     //    ja     5f
    0x6b, 0xdb, 0x0a,               //    imul   ebx, ebx, 10
    0x01, 0xc3,                     //    add    ebx, eax
    0x83, 0xfb, 0x3f,               //    cmp    ebx, 63
    0x77, 0x54,                     //    ja     5f
    0x48, 0xff, 0xc6,               //    inc    rsi
    0x80, 0x3e, 0x00,               //    cmp    byte ptr [rsi], 0
    0x75, 0xe3,                     //    jne    1b
    0xb8, 0xad, 0x00, 0x00, 0x00,   //    mov    eax, 173             ioperm(
    0xbf, 0x01, 0x05, 0x00, 0x00,   //    mov    edi, 0x501             from,
    0xbe, 0x01, 0x00, 0x00, 0x00,   //    mov    esi, 1                 number,
    0xba, 0x01, 0x00, 0x00, 0x00,   //    mov    edx, 1                 on)
    0x0f, 0x05,                     //    syscall
    0x85, 0xc0,                     //    test   eax, eax
    0x75, 0x08,                     //    jne    3f
    0x89, 0xd8,                     //    mov    eax, ebx
    0xba, 0x01, 0x05, 0x00, 0x00,   //    mov    edx, 0x501
    0xee,                           //    out    dx, al
    0xb8, 0x02, 0x00, 0x00, 0x00,   // 3: mov    eax, 2               open(
    0x48, 0x8d, 0x3d, 0x2a, 0x00, 0x00, 0x00, // lea rdi, [rip + 4f]      name,
    0xbe, 0x01, 0x00, 0x00, 0x00,   //    mov    esi, 1                 to write)
    0x0f, 0x05,                     //    syscall
    0x53,                           //    push   rbx
    0x89, 0xc7,                     //    mov    edi, eax             pwrite64(it,
    0x48, 0x89, 0xe6,               //    mov    rsi, rsp               the code,
    0x6a, 0x01,                     //    push   1
    0x5a,                           //    pop    rdx                    one byte,
    0x68, 0x01, 0x05, 0x00, 0x00,   //    push   0x501
    0x41, 0x5a,                     //    pop    r10                    at)
    0xb8, 0x12, 0x00, 0x00, 0x00,   //    mov    eax, 18
    0x0f, 0x05,                     //    syscall
    0xb8, 0x3c, 0x00, 0x00, 0x00,   // 5: mov    eax, 60              exit(
    0xbf, 0x01, 0x00, 0x00, 0x00,   //    mov    edi, 1                 1)
    0x0f, 0x05,                     //    syscall
    b'/', b'd', b'e', b'v', b'/', b'p', b'o', b'r', b't', 0, // 4:
];

const BASE: u64 = 0x40_0000;
/// ELF header and one program header (System V ABI, chapters 4 and 5).
const HEADERS: u64 = 64 + 56;

/// Returns the program as an ELF file.
pub fn program() -> Vec<u8> {
    let mut file = Vec::new();
    // 64 bit, little-endian, version 1; then padding.
    file.extend_from_slice(b"\x7fELF\x02\x01\x01");
    file.resize(16, 0);
    let halves = |file: &mut Vec<u8>, values: &[u16]| {
        values.iter().for_each(|value| file.extend_from_slice(&value.to_le_bytes()));
    };
    let words = |file: &mut Vec<u8>, values: &[u32]| {
        values.iter().for_each(|value| file.extend_from_slice(&value.to_le_bytes()));
    };
    let longs = |file: &mut Vec<u8>, values: &[u64]| {
        values.iter().for_each(|value| file.extend_from_slice(&value.to_le_bytes()));
    };
    // Executable for x86-64, version 1.
    halves(&mut file, &[2, 62]);
    words(&mut file, &[1]);
    // Entry, offset of the program headers, of the section headers; flags.
    longs(&mut file, &[BASE + HEADERS, 64, 0]);
    words(&mut file, &[0]);
    // Sizes and numbers of headers.
    halves(&mut file, &[64, 56, 1, 0, 0, 0]);
    // Loadable, readable and executable.
    words(&mut file, &[1, 5]);
    let length = HEADERS + CODE.len() as u64;
    // Offset, addresses, lengths, alignment.
    longs(&mut file, &[0, BASE, BASE, length, length, 4096]);
    file.extend_from_slice(&CODE);
    file
}

#[cfg(test)]
mod tests {
    use super::*;
    use hosted_command::fetch::is_static_program;
    use std::process::Command;
    use vmm_machine::layout::DEBUG_EXIT;

    #[test]
    fn it_is_a_static_program() {
        let program = program();
        assert_eq!(program.len() as u64, HEADERS + CODE.len() as u64);
        assert!(is_static_program(&program));
    }

    #[test]
    fn it_uses_the_port_of_the_machine() {
        const MOV_EDI: u8 = 0xbf;
        const MOV_EDX: u8 = 0xba;
        for instruction in [MOV_EDI, MOV_EDX] {
            let [low, high] = DEBUG_EXIT.to_le_bytes();
            let load = [instruction, low, high, 0, 0];
            assert_eq!(CODE.windows(5).filter(|bytes| *bytes == load).count(), 1);
        }
    }

    #[test]
    fn it_takes_codes_of_guests_only() {
        // The copy returns the code in place of a write to the port, which the host has, too:
        // mov eax, 60; mov edi, ebx; syscall.
        const IOPERM: [u8; 5] = [0xb8, 0xad, 0, 0, 0];
        const EXIT: [u8; 9] = [0xb8, 0x3c, 0, 0, 0, 0x89, 0xdf, 0x0f, 0x05];
        let mut copy = program();
        let place = copy.windows(IOPERM.len()).position(|bytes| bytes == IOPERM).unwrap();
        copy[place..place + EXIT.len()].copy_from_slice(&EXIT);
        let folder = tempfile::tempdir().unwrap();
        let [bytes, file] = ["bytes", "machine-exit"].map(|name| folder.path().join(name));
        std::fs::write(&bytes, copy).unwrap();
        // Another process writes the program: a descriptor for writing that a test beside this one
        // inherits into a process of its own would keep it from being executed.
        let install = Command::new("install").args(["-m", "755"]).arg(&bytes).arg(&file).status();
        assert!(install.unwrap().success());
        let code = |words: &[&str]| Command::new(&file).args(words).status().unwrap().code();
        for (word, expected) in [("0", 0), ("7", 7), ("042", 42), ("63", 63)] {
            assert_eq!(code(&[word]), Some(expected), "{word}");
        }
        assert_eq!(code(&[]), Some(1));
        for wrong in ["", "-1", "64", "256", "4294967296", "0x7", "7 ", "7:", "a"] {
            assert_eq!(code(&[wrong]), Some(1), "{wrong}");
        }
    }
}

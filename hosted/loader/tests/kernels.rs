//! Kernels that cannot run: each is refused with its reason. The tests build minimal files byte by
//! byte.

use hosted_loader::{Error, Image, KernelReader, VmSpec, prepare};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;

/// Link address of the test kernel, and its guest-physical address.
const LINKED: u64 = 0xffff_ffff_8100_0000;
const PHYSICAL: u64 = 0x100_0000;
/// `SHF_ALLOC`.
const ALLOC: u64 = 2;
/// Types of sections.
const PROGBITS: u32 = 1;
const SYMTAB: u32 = 2;
const STRTAB: u32 = 3;
const RELA: u32 = 4;
/// `R_X86_64_32S`.
const ABSOLUTE: u64 = 11;
/// A site: `cli`, padded to eight bytes; its record is at the place of the section.
const SITE: [u8; 8] = [0, 0, 0, 0, 1, 8, 0, 0];
/// Bytes of the ELF header with one program header.
const HEADERS: usize = 64 + 56;
const MEMORY: u64 = 64 << 20;

/// Name, type, flags, content, and the sections that it refers to.
type Section<'a> = (&'a str, u32, u64, &'a [u8], [u32; 2]);

/// An ELF file (System V ABI, chapters 4 and 5) with one segment, of which 48 bytes are in the
/// file, and these sections.
fn elf(sections: &[Section<'_>]) -> Vec<u8> {
    let mut names = vec![0];
    let starts: Vec<u32> = sections
        .iter()
        .map(|section| {
            let start = names.len() as u32;
            names.extend_from_slice(section.0.as_bytes());
            names.push(0);
            start
        })
        .collect();
    let names_section = ("", STRTAB, 0, &names[..], [0; 2]);
    let mut content = Vec::new();
    let mut table = vec![0; 64];
    for (number, &(_, kind, flags, bytes, [link, info])) in
        sections.iter().chain([&names_section]).enumerate()
    {
        let address = if flags & ALLOC != 0 { LINKED } else { 0 };
        let size = match kind {
            RELA | SYMTAB => 24,
            _ => 0,
        };
        let place = (HEADERS + content.len()) as u64;
        halves(&mut table, &[starts.get(number).copied().unwrap_or(0), kind]);
        words(&mut table, &[flags, address, place, bytes.len() as u64]);
        halves(&mut table, &[link, info]);
        words(&mut table, &[1, size]);
        content.extend_from_slice(bytes);
    }
    let count = sections.len() as u32 + 2;
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    // Executable, x86-64; version.
    halves(&mut file, &[2 | 62 << 16, 1]);
    words(&mut file, &[LINKED, 64, (HEADERS + content.len()) as u64]);
    // Flags; lengths and numbers of headers.
    halves(&mut file, &[0, 64 | 56 << 16, 1 | 64 << 16, count | (count - 1) << 16]);
    // Loadable, with all rights.
    halves(&mut file, &[1, 7]);
    words(&mut file, &[0, LINKED, PHYSICAL, 48, 0x2000, 0x1000]);
    file.extend(content);
    file.extend(table);
    file
}

fn halves(to: &mut Vec<u8>, values: &[u32]) {
    values.iter().for_each(|value| to.extend(value.to_le_bytes()));
}

fn words(to: &mut Vec<u8>, values: &[u64]) {
    values.iter().for_each(|value| to.extend(value.to_le_bytes()));
}

/// A kernel that can be moved, but has none of Linux' symbols.
fn kernel(sites: &[u8], relocations: &[u8]) -> Vec<u8> {
    elf(&[
        (".text", PROGBITS, ALLOC, &[0; 16], [0; 2]),
        ("parador_sites_1", PROGBITS, ALLOC, sites, [0; 2]),
        (".strtab", STRTAB, 0, b"\0x\0", [0; 2]),
        // No symbol, and one in the first section.
        (".symtab", SYMTAB, 0, &symbols(), [3, 1]),
        (".rela.text", RELA, 0, relocations, [4, 1]),
    ])
}

fn symbols() -> Vec<u8> {
    let mut symbols = vec![0; 24];
    symbol(&mut symbols, 1, LINKED);
    symbols
}

/// Global data in section 1, with the place of its name.
fn symbol(symbols: &mut Vec<u8>, name: u32, address: u64) {
    halves(symbols, &[name, 0x11 | 1 << 16]);
    words(symbols, &[address, 8]);
}

/// Symbols that the start of a VM uses.
const OF_LINUX: [&str; 15] = [
    "page_offset_base",
    "vmalloc_base",
    "vmemmap_base",
    "phys_base",
    "level2_kernel_pgt",
    "level1_fixmap_pgt",
    "early_top_pgt",
    "x86_64_start_kernel",
    "initial_stack",
    "initial_gs",
    "early_gdt_descr",
    "_text",
    "_etext",
    "initial_code",
    "init_top_pgt",
];

/// A kernel with Linux' symbols, at the end of its memory except for `changed`.
fn linux(changed: &[(&str, u64)]) -> Vec<u8> {
    let (mut names, mut symbols) = (b"\0x\0".to_vec(), symbols());
    for name in OF_LINUX {
        let found = changed.iter().find(|(other, _)| *other == name);
        symbol(&mut symbols, names.len() as u32, found.map_or(LINKED + 0x1000, |found| found.1));
        names.extend_from_slice(name.as_bytes());
        names.push(0);
    }
    elf(&[
        (".text", PROGBITS, ALLOC, &[1; 16], [0; 2]),
        ("parador_sites_1", PROGBITS, ALLOC, &SITE, [0; 2]),
        (".strtab", STRTAB, 0, &names, [0; 2]),
        (".symtab", SYMTAB, 0, &symbols, [3, 1]),
        (".rela.text", RELA, 0, &relocation(0, ABSOLUTE), [4, 1]),
    ])
}

fn relocation(at: u64, kind: u64) -> Vec<u8> {
    let mut relocation = Vec::new();
    words(&mut relocation, &[LINKED + at, 1 << 32 | kind, 0]);
    relocation
}

fn whole() -> Vec<u8> {
    kernel(&SITE, &relocation(0, ABSOLUTE))
}

fn machine(memory: u64) -> VmSpec<'static> {
    VmSpec {
        memory,
        vcpus: 1,
        initrd: None,
        command_line: "",
        options: 0,
        log: 0,
        balloon: None,
        disks: &[],
        nets: &[],
        shares: &[],
        vsock: None,
        console: 0,
    }
}

/// Why a kernel is refused, and what to do.
#[track_caller]
fn refusal(file: &[u8], machine: &VmSpec<'_>) -> (Error, String) {
    let (pipe, mut writer) = io::pipe().unwrap();
    // The pipe has room for all of these files.
    writer.write_all(file).unwrap();
    drop(writer);
    let source = KernelReader::new(File::from(OwnedFd::from(pipe))).unwrap();
    let error = Image::parse(&source).and_then(|image| prepare(&image, machine).map(drop));
    let error = error.unwrap_err();
    let text = format!("{error} | {}", error.help().unwrap_or_default());
    (error, text)
}

#[track_caller]
fn refused(file: &[u8], why: &str) {
    let (_, text) = refusal(file, &machine(MEMORY));
    assert!(text.contains(why), "{text}");
}

#[test]
fn files_of_other_kinds() {
    refused(b"", "not an ELF file");
    refused(b"\x7fEL", "not an ELF file");
    refused(b"MZ and so on, as a bzImage begins", "not a bzImage");
    let mut narrow = whole();
    narrow[4] = 1;
    refused(&narrow, "not a valid ELF file");
    let mut other = whole();
    other[18] = 183;
    refused(&other, "another architecture");
}

#[test]
fn files_cut_short() {
    let whole = whole();
    for length in 4..whole.len() {
        let (error, text) = refusal(&whole[..length], &machine(MEMORY));
        assert!(matches!(error, Error::Elf(_) | Error::Kernel(..)), "{length}: {text}");
    }
}

#[test]
fn kernels_without_sites_or_with_others() {
    let text = (".text", PROGBITS, ALLOC, &[0; 16][..], [0; 2]);
    refused(&elf(&[text]), "not pre-virtualized");
    refused(&elf(&[text, ("parador_sites_2", PROGBITS, ALLOC, &SITE, [0; 2])]), "build the kernel");
    refused(&kernel(&SITE[..7], &[]), "site tables");
    for (at, value) in [(4, 16), (5, 0), (6, 255), (7, 128)] {
        let mut site = SITE;
        site[at] = value;
        refused(&kernel(&site, &[]), "site tables");
    }
}

#[test]
fn kernels_that_cannot_be_moved() {
    refused(&kernel(&SITE, &[]), "do not strip it");
    refused(&kernel(&SITE, &relocation(0x10_0000, ABSOLUTE)), "reference to x at");
    refused(&kernel(&SITE, &relocation(0, 99)), "reference to x at");
    // Moved, but not Linux.
    refused(&whole(), "no symbol `");
}

#[test]
fn kernels_with_unusable_symbols() {
    // The segment begins with the ELF header, of which this place is not 0.
    const STACK: (&str, u64) = ("initial_stack", LINKED + 16);
    for name in OF_LINUX {
        // Before the image, behind it, and at the end of the address space.
        for address in [0xffff_ffff_7fff_f000, LINKED + 0x2000, 0] {
            refused(&linux(&[(name, address), STACK]), "outside of its image");
        }
    }
    // Filled with zeros: no room for a return address.
    refused(&linux(&[("initial_stack", LINKED + 0x1800)]), "invalid value");
    refused(&linux(&[STACK, ("_text", LINKED + 0x1008)]), "invalid value");
    let mut large = linux(&[STACK]);
    // Its length in memory.
    large[104..112].fill(0xff);
    refused(&large, "--memory");
    let valid = rustix::fs::memfd_create("kernel", rustix::fs::MemfdFlags::empty());
    let mut valid = File::from(valid.unwrap());
    valid.write_all(&linux(&[STACK])).unwrap();
    let source = KernelReader::new(valid).unwrap();
    Image::parse(&source).and_then(|image| prepare(&image, &machine(MEMORY))).unwrap();
}

#[test]
fn machines_that_do_not_fit() {
    let whole = whole();
    for (memory, why) in [(16 << 20, "--memory"), (1 << 60, "the host has")] {
        let (_, text) = refusal(&whole, &machine(memory));
        assert!(text.contains(why), "{text}");
    }
    let initrd = vec![0; 80 << 20];
    let (_, text) = refusal(&whole, &VmSpec { initrd: Some(&initrd), ..machine(MEMORY) });
    assert!(text.contains("--memory"), "{text}");
    let disks = [proto::hosted::DiskRecord::default(); proto::hosted::MAX_DISKS + 1];
    let (error, _) = refusal(&whole, &VmSpec { disks: &disks, ..machine(MEMORY) });
    assert!(matches!(error, Error::TooManyDisks(n) if n == disks.len()), "{error}");
    let line = "x".repeat(100_000);
    let (_, text) = refusal(&whole, &VmSpec { command_line: &line, ..machine(MEMORY) });
    assert!(text.contains("command line"), "{text}");
}

//! For tests: a layout, and kernels that consist of valid headers.

use crate::PcLayout;
use alloc::vec;
use alloc::vec::Vec;

/// Addresses of the devices.
pub const LAYOUT: PcLayout = PcLayout {
    hole_start: 0xc000_0000,
    local_apic: 0xfee0_0000,
    io_apic: 0xfec0_0000,
    io_apic_id: 0xff,
    pit_gsi: 2,
    sci: 9,
    pm1a_event: 0x600,
    pm1a_control: 0x604,
    pm_timer: 0x608,
    gpe0: 0x60c,
    sleep_type_off: 5,
    reset_port: 0xcf9,
    reset_value: 6,
    serial: 0x3f8,
    serial_irq: 4,
    rtc: 0x70,
    rtc_irq: 8,
    rtc_century: 0x32,
    pvpanic: Some(0x505),
    pci: None,
};

/// A bzImage with `length` bytes of code (rounded up to 16) that needs 16 MiB from 16 MiB on.
pub fn bzimage(length: usize) -> Vec<u8> {
    let mut image = vec![0; 1024];
    let mut set = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    let paragraphs = length.div_ceil(16);
    set(0x1f1, &[1]);
    set(0x1f4, &(paragraphs as u32).to_le_bytes());
    set(0x1fe, b"\x55\xaa\xeb\x6aHdrS\x0f\x02");
    set(0x22c, &0x7fff_ffffu32.to_le_bytes());
    set(0x234, &[1, 21, 1, 0]);
    set(0x238, &2047u32.to_le_bytes());
    set(0x258, &0x100_0000u64.to_le_bytes());
    set(0x260, &0x100_0000u32.to_le_bytes());
    image.extend((0..paragraphs * 16).map(|index| (index % 251) as u8));
    image
}

/// An ELF kernel of one segment at `address`, with the PVH entry note.
pub fn elf_kernel(address: u64, code: &[u8], memsz: u64, entry: u32) -> Vec<u8> {
    const CODE_AT: u64 = 64 + 2 * 56 + 20;
    let mut image = b"\x7fELF\x02\x01\x01".to_vec();
    image.resize(16, 0);
    image.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    for word in [address, 64, 0] {
        image.extend(word.to_le_bytes());
    }
    image.extend([0, 0, 0, 0, 64, 0, 56, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    let length = code.len() as u64;
    for (kind, offset, filesz, memsz) in [(4, CODE_AT - 20, 20, 20), (1, CODE_AT, length, memsz)] {
        image.extend([kind, 0, 0, 0, 7, 0, 0, 0]);
        for word in [offset, address, address, filesz, memsz, 4096] {
            image.extend(word.to_le_bytes());
        }
    }
    image.extend([4, 0, 0, 0, 4, 0, 0, 0, 18, 0, 0, 0]);
    image.extend(b"Xen\0");
    image.extend(entry.to_le_bytes());
    assert_eq!(image.len() as u64, CODE_AT);
    image.extend(code);
    image
}

/// Headers of a 32-bit ELF file (System V ABI, chapter 4) with these program headers: type, offset,
/// virtual and physical address, lengths in the file and in memory, flags, alignment.
pub fn elf32_headers(entry: u32, segments: &[[u32; 8]]) -> Vec<u8> {
    let mut image = b"\x7fELF\x01\x01\x01".to_vec();
    image.resize(16, 0);
    image.extend([2, 0, 3, 0, 1, 0, 0, 0]);
    for word in [entry, 52, 0, 0] {
        image.extend(word.to_le_bytes());
    }
    image.extend([52, 0, 32, 0, segments.len() as u8, 0, 0, 0, 0, 0, 0, 0]);
    image.extend(segments.as_flattened().iter().flat_map(|word| word.to_le_bytes()));
    image
}

/// Like [`elf_kernel`], with 32 bits.
pub fn elf_kernel_32(address: u32, code: &[u8], memsz: u32, entry: u32) -> Vec<u8> {
    const CODE_AT: u32 = 52 + 2 * 32 + 20;
    let length = code.len() as u32;
    let segments = [(4, CODE_AT - 20, 20, 20), (1, CODE_AT, length, memsz)];
    let segments = segments.map(|(kind, offset, filesz, memsz)| {
        [kind, offset, address, address, filesz, memsz, 7, 4096]
    });
    let mut image = elf32_headers(address, &segments);
    image.extend([4, 0, 0, 0, 4, 0, 0, 0, 18, 0, 0, 0]);
    image.extend(b"Xen\0");
    image.extend(entry.to_le_bytes());
    image.extend(code);
    image
}

/// A Multiboot kernel without ELF headers: its header, loaded at `address`, code, and zeros up to
/// `size` bytes.
pub fn multiboot_kernel(address: u32, code: &[u8], size: u32) -> Vec<u8> {
    const MAGIC: u32 = 0x1bad_b002;
    const ADDRESSES: u32 = 1 << 16;
    let end = address.wrapping_add(32 + code.len() as u32);
    let sum = 0u32.wrapping_sub(MAGIC).wrapping_sub(ADDRESSES);
    let zeros = address.wrapping_add(size);
    let words = [MAGIC, ADDRESSES, sum, address, address, end, zeros, address.wrapping_add(32)];
    let mut image: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    image.extend(code);
    image
}

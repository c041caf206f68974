//! Linux bzImages by the Linux/x86 boot protocol (`Documentation/arch/x86/boot.rst` in Linux).

use crate::layout::{BOOT_PARAMS, FOUR_GIB, ONE_MIB, PAGE, memory_map, write_command_line};
use crate::{BootError, InitialState};
use vmm_mem::GuestMemory;

/// Offsets in the image, and from [`BOOT_PARAMS`] on in memory ("The real-mode kernel header").
mod header {
    pub const SETUP_SECTS: usize = 0x1f1;
    pub const SYSSIZE: usize = 0x1f4;
    pub const VID_MODE: usize = 0x1fa;
    /// Length of the rest of the header, from [`MAGIC`] on.
    pub const LENGTH: usize = 0x201;
    pub const MAGIC: usize = 0x202;
    pub const VERSION: usize = 0x206;
    pub const TYPE_OF_LOADER: usize = 0x210;
    pub const RAMDISK_IMAGE: usize = 0x218;
    pub const RAMDISK_SIZE: usize = 0x21c;
    pub const CMD_LINE_PTR: usize = 0x228;
    pub const INITRD_ADDR_MAX: usize = 0x22c;
    pub const XLOADFLAGS: usize = 0x236;
    pub const CMDLINE_SIZE: usize = 0x238;
    pub const PREF_ADDRESS: usize = 0x258;
    pub const INIT_SIZE: usize = 0x260;
    /// End of the fields used; a header of version 2.12 has all of them.
    pub const END: usize = 0x264;
    /// End of the space for the header in `boot_params`.
    pub const ROOM: usize = 0x290;
}

/// Offsets in `boot_params` ("struct boot_params", `zero-page.rst`).
mod zero_page {
    pub const ACPI_RSDP_ADDR: u64 = 0x070;
    pub const E820_ENTRIES: u64 = 0x1e8;
    pub const E820_TABLE: u64 = 0x2d0;
    pub const E820_ENTRY: u64 = 20;
}

const MAGIC: &[u8; 4] = b"HdrS";
/// The first version with `xloadflags`.
const OLDEST_VERSION: u16 = 0x020c;
/// `XLF_KERNEL_64`: 64-bit entry at 0x200.
const XLF_KERNEL_64: u16 = 1;
const ENTRY_64: u64 = 0x200;
/// Type of an undefined loader.
const LOADER: u8 = 0xff;
/// `vid_mode`: "normal".
const VIDEO_NORMAL: u16 = 0xffff;
const SECTOR: usize = 512;
/// Unit of `syssize`.
const PARAGRAPH: u64 = 16;

/// A validated bzImage.
#[derive(Clone, Copy, Debug)]
pub struct BzImage<'a> {
    /// Header from [`header::SETUP_SECTS`] on.
    header: &'a [u8],
    /// Protected-mode code.
    code: &'a [u8],
    /// Load address of the code.
    address: u64,
    /// First address that is free while the kernel decompresses itself.
    end: u64,
    initrd_limit: u64,
    command_line_limit: u64,
}

impl<'a> BzImage<'a> {
    /// Parses and validates an image.
    pub(crate) fn parse(image: &'a [u8]) -> Result<Self, BootError> {
        let actual = image.len() as u64;
        let head = match image.get(..header::END) {
            Some(head) => head,
            None if image.get(header::MAGIC..header::VERSION) == Some(MAGIC) => {
                return Err(BootError::Truncated { needed: header::END as u64, actual });
            }
            None => return Err(BootError::UnknownFormat),
        };
        if head[header::MAGIC..header::VERSION] != *MAGIC {
            return Err(BootError::UnknownFormat);
        }
        let version = u16_at(head, header::VERSION);
        if version < OLDEST_VERSION {
            return Err(BootError::OldProtocol { version });
        }
        let sectors = match head[header::SETUP_SECTS] {
            // Old kernels leave the field 0.
            0 => 4,
            count => usize::from(count),
        };
        let code_at = (sectors + 1) * SECTOR;
        let code_length = u64::from(u32_at(head, header::SYSSIZE)) * PARAGRAPH;
        // Builds count paragraphs, and some do not fill the last one.
        let needed = code_at as u64 + code_length.saturating_sub(PARAGRAPH);
        let code = match image.get(code_at..) {
            Some(code) if needed <= actual => code,
            _ => return Err(BootError::Truncated { needed, actual }),
        };
        // The length fits `usize` if it does not exceed the image.
        let code = &code[..code_length.min(code.len() as u64) as usize];
        if u16_at(head, header::XLOADFLAGS) & XLF_KERNEL_64 == 0 {
            return Err(BootError::No64BitEntry);
        }
        // Kernels that are not relocatable must be at this address; others prefer it.
        let address = u64_at(head, header::PREF_ADDRESS);
        let room = u64::from(u32_at(head, header::INIT_SIZE)).max(code_length);
        let end = address.checked_add(room).and_then(|end| end.checked_next_multiple_of(PAGE));
        let end = end.filter(|&end| address >= ONE_MIB && end <= FOUR_GIB);
        let header_end = header::MAGIC + usize::from(head[header::LENGTH]);
        // Setup code follows the header, so a header that extends further is invalid.
        let header_end = header_end.clamp(header::END, header::ROOM).min(image.len());
        Ok(Self {
            header: &image[header::SETUP_SECTS..header_end],
            code,
            address,
            end: end.ok_or(BootError::BadHeader)?,
            initrd_limit: u64::from(u32_at(head, header::INITRD_ADDR_MAX)) + 1,
            command_line_limit: u32_at(head, header::CMDLINE_SIZE).into(),
        })
    }

    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    pub(crate) fn initrd_limit(&self) -> u64 {
        self.initrd_limit
    }
}

/// Loads a bzImage, its command line and `boot_params` into memory of sufficient size. `initrd` is
/// loaded already: (address, length), below 4 GiB.
pub fn load(
    memory: &GuestMemory,
    kernel: &BzImage<'_>,
    command_line: &[u8],
    initrd: Option<(u64, u64)>,
    rsdp: u64,
) -> Result<InitialState, BootError> {
    let command_line = write_command_line(memory, command_line, kernel.command_line_limit)?;
    memory.write_slice(kernel.address, kernel.code)?;

    boot_params(memory, kernel.header, command_line, initrd, rsdp)?;
    InitialState::long_mode(memory, kernel.address + ENTRY_64, BOOT_PARAMS)
}

/// Fills `boot_params`, with `header_bytes` of an image's header, or none.
pub(crate) fn boot_params(
    memory: &GuestMemory,
    header_bytes: &[u8],
    command_line: u64,
    initrd: Option<(u64, u64)>,
    rsdp: u64,
) -> Result<(), BootError> {
    let at = |offset: usize| BOOT_PARAMS + offset as u64;
    memory.fill(BOOT_PARAMS, PAGE, 0)?;
    memory.write_slice(at(header::SETUP_SECTS), header_bytes)?;
    memory.write(at(header::VID_MODE), VIDEO_NORMAL)?;
    memory.write(at(header::TYPE_OF_LOADER), LOADER)?;
    memory.write(at(header::CMD_LINE_PTR), command_line as u32)?;
    if let Some((address, length)) = initrd {
        memory.write(at(header::RAMDISK_IMAGE), address as u32)?;
        memory.write(at(header::RAMDISK_SIZE), length as u32)?;
    }
    memory.write(BOOT_PARAMS + zero_page::ACPI_RSDP_ADDR, rsdp)?;
    let mut entries = 0u8;
    for range in memory_map(memory) {
        let entry =
            BOOT_PARAMS + zero_page::E820_TABLE + zero_page::E820_ENTRY * u64::from(entries);
        memory.write(entry, range.start)?;
        memory.write(entry + 8, range.end - range.start)?;
        memory.write(entry + 16, range.kind.code())?;
        entries += 1;
    }
    memory.write(BOOT_PARAMS + zero_page::E820_ENTRIES, entries)?;
    Ok(())
}

// The callers have checked that the field at `at` is inside the header.

fn u16_at(head: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([head[at], head[at + 1]])
}

fn u32_at(head: &[u8], at: usize) -> u32 {
    u32::from(u16_at(head, at)) | u32::from(u16_at(head, at + 2)) << 16
}

fn u64_at(head: &[u8], at: usize) -> u64 {
    u64::from(u32_at(head, at)) | u64::from(u32_at(head, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{LAYOUT, bzimage};
    use crate::{BootConfig, Kernel, load};
    use std::vec;
    use std::vec::Vec;
    use vmm_mem::testing::memory;

    #[test]
    fn all_parts_are_at_the_addresses_of_the_boot_protocol() {
        let ram = memory(&[(0, 48 << 20), (FOUR_GIB, 16 << 20)]);
        let image = bzimage(5000);
        let initrd: Vec<u8> = (0..10_000).map(|index| index as u8).collect();
        let config = BootConfig {
            layout: &LAYOUT,
            vcpus: 2,
            kernel: &image,
            initrd: Some(&initrd),
            command_line: b"console=ttyS0",
        };
        let state = load(&ram, &config).unwrap();
        assert_eq!((state.rip, state.rsi), (0x100_0200, BOOT_PARAMS));
        let m = &ram;

        let mut code = vec![0; 5008];
        m.read_slice(0x100_0000, &mut code).unwrap();
        assert_eq!(code, image[1024..1024 + 5008]);

        let p = state.rsi;
        assert_eq!(m.read(p + 0x202), Ok(u32::from_le_bytes(*MAGIC)));
        assert_eq!(m.read(p + 0x210), Ok(LOADER));
        let line = u64::from(m.read::<u32>(p + 0x228).unwrap());
        let mut text = [0xff; 14];
        m.read_slice(line, &mut text).unwrap();
        assert_eq!(&text, b"console=ttyS0\0");

        let address = u64::from(m.read::<u32>(p + 0x218).unwrap());
        assert_eq!(m.read::<u32>(p + 0x21c), Ok(10_000));
        assert_eq!(address, (48 << 20) - 3 * PAGE);
        let mut disk = vec![0; initrd.len()];
        m.read_slice(address, &mut disk).unwrap();
        assert_eq!(disk, initrd);

        let rsdp: u64 = m.read(p + 0x70).unwrap();
        let mut signature = [0; 8];
        m.read_slice(rsdp, &mut signature).unwrap();
        assert_eq!(&signature, b"RSD PTR ");

        let entries = m.read::<u8>(p + 0x1e8).unwrap();
        let last = p + 0x2d0 + 20 * (u64::from(entries) - 1);
        assert_eq!(m.read(last), Ok(FOUR_GIB));
        assert_eq!(m.read(last + 8), Ok(16u64 << 20));
        assert_eq!(m.read(last + 16), Ok(1u32));
    }

    /// Some builds do not fill the last paragraph that they count.
    #[test]
    fn the_last_paragraph_may_be_short() {
        let image = bzimage(5000);
        for missing in [1, 15, 16] {
            let ram = memory(&[(0, 48 << 20)]);
            let short = &image[..image.len() - missing];
            let config = BootConfig {
                layout: &LAYOUT,
                vcpus: 1,
                kernel: short,
                initrd: None,
                command_line: b"",
            };
            load(&ram, &config).unwrap();
            let mut code = vec![0; 5008];
            ram.read_slice(0x100_0000, &mut code).unwrap();
            let there = 5008 - missing;
            assert_eq!(code[..there], image[1024..1024 + there]);
            assert!(code[there..].iter().all(|&byte| byte == 0));
        }
    }

    /// A kernel that is not relocatable is loaded at its preferred address.
    #[test]
    fn a_fixed_kernel_is_not_relocated() {
        const RELOCATABLE: usize = 0x234;
        let ram = memory(&[(0, 80 << 20)]);
        let mut image = bzimage(100);
        image[RELOCATABLE] = 0;
        image[header::PREF_ADDRESS..][..8].copy_from_slice(&0x340_0000u64.to_le_bytes());
        let config = BootConfig {
            layout: &LAYOUT,
            vcpus: 1,
            kernel: &image,
            initrd: None,
            command_line: b"",
        };
        assert_eq!(load(&ram, &config).unwrap().rip, 0x340_0200);
        assert_eq!(ram.read(0x340_0000 + 5), Ok(image[1024 + 5]));
        // Memory at the preferred address is required.
        let small = memory(&[(0, 48 << 20)]);
        assert!(matches!(load(&small, &config), Err(BootError::TooLittleMemory { .. })));
    }

    #[test]
    fn the_initrd_stays_below_its_limit() {
        let ram = memory(&[(0, 64 << 20)]);
        let mut image = bzimage(100);
        image[header::INITRD_ADDR_MAX..][..4].copy_from_slice(&0x2ff_ffffu32.to_le_bytes());
        let mut config = BootConfig {
            layout: &LAYOUT,
            vcpus: 1,
            kernel: &image,
            initrd: Some(&[1; 100]),
            command_line: b"",
        };
        load(&ram, &config).unwrap();
        assert_eq!(ram.read(BOOT_PARAMS + 0x218), Ok(0x2ff_f000u32));
        // The kernel needs the memory up to 32 MiB itself.
        let large = vec![0; (16 << 20) + 1];
        config.initrd = Some(&large);
        assert_eq!(
            load(&ram, &config),
            Err(BootError::InitrdTooLarge { limit: 16 << 20, length: (16 << 20) + 1 })
        );
    }

    #[test]
    fn rejects_invalid_images() {
        let good = bzimage(5000);
        let error = |image: &[u8]| Kernel::detect(image).err();
        let with = |at: usize, bytes: &[u8]| {
            let mut image = good.clone();
            image[at..at + bytes.len()].copy_from_slice(bytes);
            error(&image)
        };
        assert_eq!(error(&[]), Some(BootError::UnknownFormat));
        assert_eq!(error(&good[..0x205]), Some(BootError::UnknownFormat));
        assert_eq!(with(header::MAGIC, b"hdrs"), Some(BootError::UnknownFormat));
        for length in [0x206, header::END - 1, header::END, 1024, good.len() - 17] {
            assert!(matches!(error(&good[..length]), Some(BootError::Truncated { .. })));
        }
        let old = Some(BootError::OldProtocol { version: 0x20b });
        assert_eq!(with(header::VERSION, &[0xb, 2]), old);
        assert_eq!(with(header::XLOADFLAGS, &[0]), Some(BootError::No64BitEntry));
        let bad = Some(BootError::BadHeader);
        assert_eq!(with(header::PREF_ADDRESS, &[0xff; 8]), bad);
        assert_eq!(with(header::PREF_ADDRESS, &0x1000u64.to_le_bytes()), bad);
        assert_eq!(with(header::INIT_SIZE, &[0xff; 4]), bad);
        assert_eq!(error(&good), None);
    }

    #[test]
    fn rejects_images_that_do_not_fit() {
        let image = bzimage(100);
        let config = BootConfig {
            layout: &LAYOUT,
            vcpus: 1,
            kernel: &image,
            initrd: Some(&[1; 5000]),
            command_line: &[b'x'; 2048],
        };
        let small = memory(&[(0, (32 << 20) + PAGE)]);
        let needed = (32 << 20) + 2 * PAGE;
        let available = (32 << 20) + PAGE;
        assert_eq!(load(&small, &config), Err(BootError::TooLittleMemory { needed, available }));
        assert_eq!(Kernel::detect(&image).unwrap().memory_needed(5000), needed);
        let large = memory(&[(0, 33 << 20)]);
        let too_long = Err(BootError::CommandLineTooLong { limit: 2047, length: 2048 });
        assert_eq!(load(&large, &config), too_long);
        let zero = BootConfig { command_line: b"a\0b", ..config };
        assert_eq!(load(&large, &zero), Err(BootError::BadCommandLine));
        let tiny = memory(&[(0, PAGE)]);
        assert!(matches!(
            load(&tiny, &config),
            Err(BootError::TooLittleMemory { available: PAGE, .. })
        ));
    }
}

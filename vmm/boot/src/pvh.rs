//! ELF kernels by the PVH boot protocol (Xen, "x86/HVM direct boot ABI").

use crate::layout::{
    COMMAND_LINE_ROOM, FOUR_GIB, ONE_MIB, PAGE, START_INFO, memory_map, write_command_line,
};
use crate::{BootError, InitialState};
use hw_tables::elf::{Elf, Machine};
use hw_tables::pvh::{self, MemoryRange, Module, StartInfo, VERSION};
use vmm_mem::GuestMemory;

/// Offset of the module list from the start information.
const MODULES: u64 = 0x40;
/// Offset of the memory map.
const MEMORY_MAP: u64 = 0x80;

const _: () = assert!(StartInfo::LENGTH as u64 <= MODULES);
const _: () = assert!(MODULES + Module::LENGTH as u64 <= MEMORY_MAP);
/// Ranges below 1 MiB and one for each range of RAM fit into the page.
const _: () =
    assert!(MEMORY_MAP + ((4 + vmm_mem::MAX_RANGES) * MemoryRange::LENGTH) as u64 <= PAGE);

/// Returns true if an image is an ELF file (or the beginning of one).
pub fn is_elf(image: &[u8]) -> bool {
    image.starts_with(b"\x7fELF")
}

/// A validated ELF kernel.
#[derive(Clone, Copy, Debug)]
pub struct PvhKernel<'a> {
    elf: Elf<'a>,
    entry: u32,
    end: u64,
}

impl<'a> PvhKernel<'a> {
    /// Parses and validates an image.
    pub(crate) fn parse(image: &'a [u8]) -> Result<Self, BootError> {
        let elf = Elf::parse_any(image)?;
        if !matches!(elf.machine(), Machine::X86 | Machine::X86_64) {
            return Err(BootError::WrongMachine);
        }
        let entry = pvh::entry(&elf).ok_or(BootError::NoPvhEntry)?;
        let mut end = ONE_MIB;
        for segment in elf.segments().filter(|segment| segment.memsz != 0) {
            let range = segment.physical();
            if range.start < ONE_MIB || range.end > FOUR_GIB {
                return Err(BootError::BadSegment { start: range.start, end: range.end });
            }
            end = end.max(range.end);
        }
        Ok(Self { elf, entry, end: end.next_multiple_of(PAGE) })
    }

    pub(crate) fn end(&self) -> u64 {
        self.end
    }
}

/// Loads an ELF kernel, its command line and start information into memory of sufficient size.
/// `initrd` is loaded already: (address, length).
pub fn load(
    memory: &GuestMemory,
    kernel: &PvhKernel<'_>,
    command_line: &[u8],
    initrd: Option<(u64, u64)>,
    rsdp: u64,
) -> Result<InitialState, BootError> {
    let command_line = write_command_line(memory, command_line, COMMAND_LINE_ROOM - 1)?;
    for segment in kernel.elf.segments() {
        let data = kernel.elf.data(&segment);
        memory.write_slice(segment.paddr, data)?;
        memory.fill(segment.paddr + segment.filesz, segment.memsz - segment.filesz, 0)?;
    }
    if let Some((address, size)) = initrd {
        let module = Module { address, size, command_line: 0 };
        memory.write_slice(START_INFO + MODULES, &module.to_bytes())?;
    }
    let mut ranges = 0;
    for range in memory_map(memory) {
        let raw = MemoryRange {
            address: range.start,
            size: range.end - range.start,
            kind: range.kind.code(),
        };
        let at = START_INFO + MEMORY_MAP + u64::from(ranges) * MemoryRange::LENGTH as u64;
        memory.write_slice(at, &raw.to_bytes())?;
        ranges += 1;
    }
    let info = StartInfo {
        version: VERSION,
        flags: 0,
        modules: initrd.is_some().into(),
        module_list: START_INFO + MODULES,
        command_line,
        rsdp,
        memory_map: START_INFO + MEMORY_MAP,
        memory_ranges: ranges,
    };
    memory.write_slice(START_INFO, &info.to_bytes())?;
    InitialState::protected_mode(memory, kernel.entry, START_INFO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{LAYOUT, elf_kernel, elf_kernel_32};
    use crate::{BootConfig, Kernel};
    use std::vec;
    use std::vec::Vec;
    use vmm_mem::testing::memory;

    fn config<'a>(kernel: &'a [u8], initrd: Option<&'a [u8]>) -> BootConfig<'a> {
        BootConfig { layout: &LAYOUT, vcpus: 1, kernel, initrd, command_line: b"quiet" }
    }

    #[test]
    fn all_parts_are_at_the_addresses_of_the_boot_protocol() {
        let ram = memory(&[(0, 4 << 20)]);
        let m = &ram;
        m.fill(0x10_0000, 0x4000, 0xff).unwrap();
        let image = elf_kernel(0x10_0000, b"code", 0x3000, 0x10_0040);
        let state = crate::load(m, &config(&image, Some(&[7; 5]))).unwrap();
        assert_eq!((state.rip, state.rbx), (0x10_0040, START_INFO));
        let mut code = vec![0xff; 0x3000];
        m.read_slice(0x10_0000, &mut code).unwrap();
        assert_eq!(&code[..4], b"code");
        assert!(code[4..].iter().all(|&byte| byte == 0));
        assert_eq!(m.read(0x10_3000), Ok(0xffu8));

        let mut page = vec![0; PAGE as usize];
        m.read_slice(state.rbx, &mut page).unwrap();
        let info = StartInfo::parse(&page).unwrap();
        let part = |address: u64, length: usize| &page[(address - START_INFO) as usize..][..length];
        let modules: Vec<_> = Module::list(part(info.module_list, Module::LENGTH)).collect();
        let module = Module { address: (4 << 20) - PAGE, size: 5, command_line: 0 };
        assert_eq!((info.modules, modules), (1, vec![module]));
        assert_eq!(m.read(module.address + 4), Ok(7u8));
        let map = part(info.memory_map, info.memory_ranges as usize * MemoryRange::LENGTH);
        let last = MemoryRange::list(map).last().unwrap();
        assert_eq!(last, MemoryRange { address: ONE_MIB, size: 3 << 20, kind: 1 });
        assert_eq!(m.read(info.command_line), Ok(u32::from_le_bytes(*b"quie")));
        assert_eq!(m.read(info.rsdp), Ok(u64::from_le_bytes(*b"RSD PTR ")));
    }

    #[test]
    fn files_of_32_bits() {
        let ram = memory(&[(0, 4 << 20)]);
        ram.fill(0x10_0000, 0x4000, 0xff).unwrap();
        let image = elf_kernel_32(0x10_0000, b"code", 0x3000, 0x10_0040);
        let state = crate::load(&ram, &config(&image, None)).unwrap();
        assert_eq!((state.rip, state.rbx, state.rax), (0x10_0040, START_INFO, 0));
        assert_eq!(ram.read(0x10_0000), Ok(u32::from_le_bytes(*b"code")));
        assert_eq!((ram.read(0x10_2fff), ram.read(0x10_3000)), (Ok(0u8), Ok(0xffu8)));
        let low = elf_kernel_32(0x9_0000, b"code", 0x3000, 0);
        let start_end = BootError::BadSegment { start: 0x9_0000, end: 0x9_3000 };
        assert_eq!(Kernel::detect(&low).err(), Some(start_end));
    }

    #[test]
    fn rejects_invalid_images() {
        let good = elf_kernel(0x10_0000, b"code", 0x3000, 0x10_0040);
        for length in 4..good.len() {
            let error = Kernel::detect(&good[..length]).err();
            assert!(matches!(error, Some(BootError::BadElf(_))), "{length}: {error:?}");
        }
        let low = elf_kernel(0x9_0000, b"code", 0x3000, 0);
        let start_end = BootError::BadSegment { start: 0x9_0000, end: 0x9_3000 };
        assert_eq!(Kernel::detect(&low).err(), Some(start_end));
        let high = elf_kernel(FOUR_GIB - PAGE, b"code", 0x3000, 0);
        assert!(matches!(Kernel::detect(&high).err(), Some(BootError::BadSegment { .. })));
        let mut no_note = good.clone();
        let at = no_note.windows(4).position(|bytes| bytes == b"Xen\0").unwrap();
        no_note[at] = b'x';
        assert_eq!(Kernel::detect(&no_note).err(), Some(BootError::NoPvhEntry));
        let mut arm = good.clone();
        arm[18] = 183;
        assert_eq!(Kernel::detect(&arm).err(), Some(BootError::WrongMachine));

        let small = memory(&[(0, 0x10_2000)]);
        assert_eq!(
            crate::load(&small, &config(&good, None)),
            Err(BootError::TooLittleMemory { needed: 0x10_3000, available: 0x10_2000 })
        );
    }
}

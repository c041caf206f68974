//! Initial state of the first vCPU, and the tables in memory that it refers to.

use crate::BootError;
use crate::layout::{FOUR_GIB, GDT, PAGE, PAGE_TABLES, STACK_TOP};
use hw_x86::msr::efer;
use hw_x86::paging::{cr0, cr4, descriptor, entry};
use hw_x86::vmcb::VmcbSegment;
use vmm_mem::GuestMemory;

/// Flat 32-bit code, CPL 0.
const CODE_32: u64 = 0x00cf_9b00_0000_ffff;
/// Busy task-state segment of 104 bytes at address 0: unused, but required by the CPU.
const TASK_STATE: u64 = 0x0000_8b00_0000_0067;
/// Selectors required by the Linux boot protocol: `__BOOT_CS` and `__BOOT_DS`.
const SELECTOR_CODE: u16 = 0x10;
const SELECTOR_DATA: u16 = 0x18;
const SELECTOR_TASK: u16 = 0x20;
/// Descriptors by selector, with the given code segment.
const fn descriptors(code: u64) -> [u64; 6] {
    // A task-state descriptor has 16 bytes in long mode.
    [0, 0, code, descriptor::KERNEL_DATA, TASK_STATE, 0]
}

/// Registers of the first vCPU; registers not listed have their reset values, general registers are
/// 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InitialState {
    /// Instruction pointer.
    pub rip: u64,
    /// Stack pointer.
    pub rsp: u64,
    /// Flags: interrupts are disabled.
    pub rflags: u64,
    /// `rax`: magic of a Multiboot loader.
    pub rax: u64,
    /// `rbx`: PVH start information or Multiboot information.
    pub rbx: u64,
    /// `rsi`: Linux `boot_params`.
    pub rsi: u64,
    /// Control register 0.
    pub cr0: u64,
    /// Page-table root.
    pub cr3: u64,
    /// Control register 4.
    pub cr4: u64,
    /// Extended features.
    pub efer: u64,
    /// Code segment.
    pub cs: VmcbSegment,
    /// Data segments: `ds`, `es`, `ss`, `fs`, `gs`.
    pub data: VmcbSegment,
    /// Task register.
    pub tr: VmcbSegment,
    /// Global descriptor table.
    pub gdtr: VmcbSegment,
    /// Interrupt descriptor table: empty.
    pub idtr: VmcbSegment,
    /// Local descriptor table: unusable.
    pub ldtr: VmcbSegment,
}

impl InitialState {
    /// 64-bit mode with an identity map of the first 4 GiB.
    pub fn long_mode(memory: &GuestMemory, rip: u64, boot_params: u64) -> Result<Self, BootError> {
        write_page_tables(memory)?;
        Ok(Self {
            rsi: boot_params,
            cr0: cr0::PE | cr0::NE | cr0::PG,
            cr3: PAGE_TABLES,
            cr4: cr4::PAE,
            efer: efer::LME | efer::LMA,
            ..Self::flat(memory, rip, descriptor::KERNEL_CODE)?
        })
    }

    /// 32-bit protected mode without paging.
    pub fn protected_mode(
        memory: &GuestMemory,
        rip: u32,
        start_info: u64,
    ) -> Result<Self, BootError> {
        Ok(Self { rbx: start_info, ..Self::flat(memory, rip.into(), CODE_32)? })
    }

    fn flat(memory: &GuestMemory, rip: u64, code: u64) -> Result<Self, BootError> {
        let table = descriptors(code);
        for (address, descriptor) in (GDT..).step_by(8).zip(table) {
            memory.write(address, descriptor)?;
        }
        let limit = size_of_val(&table) as u32 - 1;
        Ok(Self {
            rip,
            rsp: STACK_TOP,
            // Bit 1 is always set.
            rflags: 2,
            rax: 0,
            rbx: 0,
            rsi: 0,
            cr0: cr0::PE | cr0::NE,
            cr3: 0,
            cr4: 0,
            efer: 0,
            cs: segment(SELECTOR_CODE, code),
            data: segment(SELECTOR_DATA, descriptor::KERNEL_DATA),
            tr: segment(SELECTOR_TASK, TASK_STATE),
            gdtr: VmcbSegment { base: GDT, limit, ..VmcbSegment::default() },
            idtr: VmcbSegment::default(),
            ldtr: VmcbSegment::default(),
        })
    }
}

/// Content of a segment register after loading a descriptor with base 0.
fn segment(selector: u16, descriptor: u64) -> VmcbSegment {
    const GRANULARITY: u64 = 1 << 55;
    let limit = (descriptor & 0xffff | descriptor >> 32 & 0xf_0000) as u32;
    VmcbSegment {
        selector,
        attrib: (descriptor >> 40 & 0xff | descriptor >> 44 & 0xf00) as u16,
        limit: if descriptor & GRANULARITY == 0 { limit } else { limit << 12 | 0xfff },
        base: 0,
    }
}

fn write_page_tables(memory: &GuestMemory) -> Result<(), BootError> {
    const LARGE_PAGE: u64 = 2 << 20;
    const TABLES: u64 = FOUR_GIB >> 30;
    const TABLE: u64 = entry::PRESENT | entry::WRITE;
    let level_3 = PAGE_TABLES + PAGE;
    let level_2 = level_3 + PAGE;
    memory.fill(PAGE_TABLES, 2 * PAGE, 0)?;
    memory.write(PAGE_TABLES, level_3 | TABLE)?;
    for index in 0..TABLES {
        memory.write(level_3 + 8 * index, (level_2 + PAGE * index) | TABLE)?;
    }
    for index in 0..FOUR_GIB / LARGE_PAGE {
        memory.write(level_2 + 8 * index, (index * LARGE_PAGE) | TABLE | entry::LARGE)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_mem::testing::memory;

    #[test]
    fn page_tables_map_4_gib_to_themselves() {
        let ram = memory(&[(0, 1 << 20)]);
        let state = InitialState::long_mode(&ram, 0, 0).unwrap();
        let walk = |address: u64| {
            let mut table = state.cr3;
            for shift in [39, 30, 21] {
                let entry: u64 = ram.read(table + 8 * (address >> shift & 0x1ff)).unwrap();
                if entry & entry::PRESENT == 0 {
                    return None;
                }
                table = entry & entry::ADDRESS;
            }
            Some(table + (address & 0x1f_ffff))
        };
        for address in [0, 0x7000, 0x10_0000, 0xbfff_ffff, 0xffff_fff8] {
            assert_eq!(walk(address), Some(address));
        }
        assert_eq!(walk(FOUR_GIB), None);
    }

    #[test]
    fn segments_as_the_manual_says() {
        let ram = memory(&[(0, 1 << 20)]);
        let long = InitialState::long_mode(&ram, 0, 0x7000).unwrap();
        assert_eq!((long.cs.attrib, long.cs.limit), (0xa9b, 0xffff_ffff));
        assert_eq!((long.data.attrib, long.data.limit), (0xc93, 0xffff_ffff));
        let protected = InitialState::protected_mode(&ram, 0, 0).unwrap();
        assert_eq!((protected.cs.attrib, protected.cs.limit), (0xc9b, 0xffff_ffff));
        assert_eq!((protected.tr.attrib, protected.tr.limit), (0x8b, 0x67));
        assert_eq!(protected.cr0 & cr0::PG, 0);
        assert_eq!(ram.read(protected.gdtr.base + 0x10), Ok(CODE_32));
    }
}

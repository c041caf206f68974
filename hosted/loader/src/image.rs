//! Pre-virtualized kernel: parsing of its file, and relocation to the lower half of the address
//! space.
//!
//! The file contains the linker's relocations (`--emit-relocs`). The rules are those of Linux' tool
//! for KASLR (`arch/x86/tools/relocs.c`): instruction-relative references need no change, except to
//! per-CPU data, which is linked at 0 and stays there; absolute symbols stay, except those that the
//! linker script derives from addresses.

use object::elf;
use object::read::elf::{ElfFile64, FileHeader, Rela, SectionHeader, Sym};
use object::{LittleEndian, Object, ObjectSection, ObjectSymbol};
use proto::hosted::layout;
use vmm_mem::large::Large;
use wedge_sites::{ConstantId, Constants, Sites, Table, Width};

use crate::Error;

type File<'a> = ElfFile64<'a, LittleEndian>;

/// Page size of page tables.
const PAGE: u64 = 4096;
const ENDIAN: LittleEndian = LittleEndian;
/// Offset from linked to relocated addresses: 2^64 - 2 GiB becomes [`layout::IMAGE`].
const DELTA: u64 = layout::IMAGE.wrapping_sub(LINKED);
/// Linked start of the image mapping (`__START_KERNEL_map`).
const LINKED: u64 = 0xffff_ffff_8000_0000;
/// Page tables: their entries are guest-physical addresses, which do not move with the image.
const PAGE_TABLES: [&str; 7] = [
    "early_top_pgt",
    "init_top_pgt",
    "level3_ident_pgt",
    "level2_ident_pgt",
    "level3_kernel_pgt",
    "level2_fixmap_pgt",
    "level2_kernel_pgt",
];

/// A validated kernel.
pub struct Image<'a> {
    file: File<'a>,
    /// Symbol names.
    names: &'a [u8],
    /// Address and length of the site table.
    sites: (u64, u64),
}

/// Segment of kernel memory.
pub struct KernelSegment {
    /// Guest-physical address.
    pub address: u64,
    /// Initial bytes; the rest is zero.
    pub bytes: Large,
    /// Linked address.
    linked: u64,
}

impl<'a> Image<'a> {
    /// Validates a kernel file.
    ///
    /// # Errors
    /// Not an x86-64 ELF file, no site table of this version, or truncated.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Error> {
        if !bytes.starts_with(b"\x7fELF") {
            return Err(Error::Kernel(
                "the kernel is not an ELF file",
                "use the `vmlinux` of `parador kernel build`, not a bzImage",
            ));
        }
        let file = File::parse(bytes)?;
        if file.elf_header().e_machine(ENDIAN) != elf::EM_X86_64 {
            return Err(Error::Kernel(
                "the kernel is for another architecture",
                "use an x86-64 kernel",
            ));
        }
        let mut sites = None;
        for section in file.sections() {
            let (name, address) = (section.name()?, section.address());
            match wedge_sites::section(name).transpose()? {
                Some(Table::Sites) => {
                    let table = Sites::parse(section.data()?, address)?;
                    sites = Some((address, (table.count() * wedge_sites::RECORD) as u64));
                }
                Some(Table::Constants) => drop(Constants::parse(section.data()?, address)?),
                None => {}
            }
        }
        let Some(sites) = sites else {
            return Err(Error::Kernel(
                "the kernel is not pre-virtualized: it has no site table",
                "build one with `parador kernel build`; unmodified kernels need --backend kvm",
            ));
        };
        let strings = file.elf_symbol_table().string_section();
        let names = match file.elf_section_table().section(strings) {
            Ok(section) => section.data(ENDIAN, bytes)?,
            // No site table, and no symbols.
            Err(_) => &[],
        };
        Ok(Self { file, names, sites })
    }

    /// Returns the linked address of a symbol.
    pub fn symbol(&self, name: &'static str) -> Result<u64, Error> {
        // Symbols are compared by name: a kernel has tens of thousands.
        let is_it = |symbol: &&elf::Sym64<LittleEndian>| {
            let start = symbol.st_name(ENDIAN) as usize;
            let rest =
                self.names.get(start..).and_then(|names| names.strip_prefix(name.as_bytes()));
            rest.is_some_and(|rest| rest.first() == Some(&0))
        };
        let found = self.file.elf_symbol_table().iter().find(is_it);
        found.map(|symbol| symbol.st_value(ENDIAN)).ok_or(Error::Symbol(name))
    }

    /// Returns the function at an address of the relocated image.
    pub fn function_at(&self, address: u64) -> Option<String> {
        let linked = address.wrapping_sub(DELTA);
        let functions =
            self.file.symbols().filter(|symbol| symbol.kind() == object::SymbolKind::Text);
        let found = functions
            .filter(|symbol| symbol.address() <= linked)
            .max_by_key(|symbol| symbol.address())?;
        (linked - found.address() < 1 << 16).then(|| found.name().unwrap_or_default().to_owned())
    }

    /// Returns the functions of the relocated image by address: address, size, name. A function
    /// without a size extends to the next one.
    pub fn functions(&self) -> Vec<(u64, u64, String)> {
        let functions =
            self.file.symbols().filter(|symbol| symbol.kind() == object::SymbolKind::Text);
        let mut all: Vec<_> = functions
            .filter_map(|symbol| {
                Some((moved(symbol.address()), symbol.size(), symbol.name().ok()?.to_owned()))
            })
            .collect();
        all.sort();
        let next: Vec<u64> = all.iter().skip(1).map(|function| function.0).collect();
        for (function, next) in all.iter_mut().zip(next) {
            if function.1 == 0 {
                function.1 = next - function.0;
            }
        }
        all
    }

    /// Returns the sites of the relocated image by address: address and length after rewriting.
    pub fn site_ranges(&self) -> Vec<(u64, u64)> {
        let mut all = Vec::new();
        for section in self.file.sections() {
            let name = section.name().unwrap_or_default();
            if !matches!(wedge_sites::section(name), Some(Ok(Table::Sites))) {
                continue;
            }
            // `parse` has validated the table.
            let data = section.data().unwrap_or_default();
            if let Ok(sites) = Sites::parse(data, section.address()) {
                all.extend(sites.iter().map(|site| (moved(site.address), site.padded.into())));
            }
        }
        all.sort_unstable();
        all
    }

    /// Returns the address of the relocated first segment, which contains the code.
    pub fn start(&self) -> u64 {
        let mut segments = self.file.elf_program_headers().iter();
        let first = segments.find(|segment| segment.p_type.get(ENDIAN) == elf::PT_LOAD);
        moved(first.map_or(LINKED, |segment| segment.p_vaddr.get(ENDIAN)))
    }

    /// Returns address and length of the site table in the relocated image.
    pub fn sites(&self) -> (u64, u64) {
        (moved(self.sites.0), self.sites.1)
    }

    /// Returns the relocated segments.
    ///
    /// # Errors
    /// The file is invalid, or a relocation overflows.
    pub fn moved(&self) -> Result<Vec<KernelSegment>, Error> {
        let mut parts = Vec::new();
        for segment in self.file.elf_program_headers() {
            if segment.p_type.get(ENDIAN) != elf::PT_LOAD || segment.p_memsz.get(ENDIAN) == 0 {
                continue;
            }
            let (offset, size) = (segment.p_offset.get(ENDIAN), segment.p_filesz.get(ENDIAN));
            let length = segment.p_memsz.get(ENDIAN);
            let address = segment.p_paddr.get(ENDIAN);
            let cut = || Error::Kernel("the kernel file is truncated", "build or copy it again");
            let bytes = offset.checked_add(size).and_then(|end| {
                self.file.data().get(usize::try_from(offset).ok()?..usize::try_from(end).ok()?)
            });
            let fits = address.checked_add(length).is_some_and(|end| end <= layout::IMAGE_LENGTH);
            if !fits || size > length {
                return Err(Error::Kernel(
                    "the kernel image is larger than 256 MiB or not linked at the beginning of memory",
                    "use the `vmlinux` of `parador kernel build`",
                ));
            }
            let linked = segment.p_vaddr.get(ENDIAN);
            let bytes = Large::copy_of(bytes.ok_or_else(cut)?)
                .map_err(|error| Error::Host("allocate memory for the kernel", error))?;
            parts.push(KernelSegment { address, bytes, linked });
        }
        self.relocate(&mut parts)?;
        self.set_constants(&mut parts)?;
        Ok(parts)
    }

    /// Returns the first guest-physical address after the kernel.
    pub fn end(&self) -> u64 {
        let ends = self.file.elf_program_headers().iter().filter_map(|segment| {
            let load = segment.p_type.get(ENDIAN) == elf::PT_LOAD;
            load.then(|| segment.p_paddr.get(ENDIAN).saturating_add(segment.p_memsz.get(ENDIAN)))
        });
        // The segment includes memory that Linux reserves after `_end`.
        ends.max().unwrap_or(0).next_multiple_of(PAGE)
    }

    fn relocate(&self, parts: &mut [KernelSegment]) -> Result<(), Error> {
        let sections = self.file.elf_section_table();
        let symbols = self.file.elf_symbol_table();
        let per_cpu = sections
            .enumerate()
            .find(|(_, section)| sections.section_name(ENDIAN, section) == Ok(b".data..percpu"))
            .map(|(index, _)| index.0);
        let tables: Vec<u64> =
            PAGE_TABLES.iter().filter_map(|&name| self.symbol(name).ok()).collect();
        let mut any = false;
        for section in sections.iter() {
            let Some((relocations, _)) = section.rela(ENDIAN, self.file.data())? else { continue };
            let target = sections.section(section.info_link(ENDIAN))?;
            let loaded = target.sh_flags(ENDIAN).0 & elf::SHF_ALLOC.0 != 0;
            if !loaded || target.sh_type(ENDIAN) == elf::SHT_NOBITS || relocations.is_empty() {
                continue;
            }
            let in_per_cpu = Some(section.info_link(ENDIAN).0) == per_cpu;
            // The section's start and the page tables in it are looked up once: there are hundreds
            // of thousands of relocations.
            let start = target.sh_addr(ENDIAN);
            let length = target.sh_size(ENDIAN);
            let bytes = field(parts, start, usize::try_from(length).unwrap_or(usize::MAX));
            let Some(bytes) = bytes else { return Err(relocation_overflow(start, b"a section")) };
            let tables: Vec<u64> = tables
                .iter()
                .copied()
                .filter(|&table| table.wrapping_sub(start) < length)
                .collect();
            for relocation in relocations {
                any = true;
                let at = relocation.r_offset(ENDIAN);
                if tables.iter().any(|&table| at.wrapping_sub(table) < PAGE) {
                    continue;
                }
                let Some(index) = relocation.symbol(ENDIAN, false) else { continue };
                let symbol = symbols.symbol(index)?;
                let name = || symbols.symbol_name(ENDIAN, symbol).unwrap_or_default();
                let kind = relocation.r_type(ENDIAN, false);
                let change = change(kind, symbol.st_shndx(ENDIAN), name(), per_cpu, in_per_cpu);
                let Some(change) = change else { continue };
                let Some(size) = field_size(kind) else {
                    return Err(relocation_overflow(at, name()));
                };
                let offset = usize::try_from(at.wrapping_sub(start)).ok();
                let field = offset.and_then(|offset| bytes.get_mut(offset..)?.get_mut(..size));
                add(field.ok_or_else(|| relocation_overflow(at, name()))?, change);
            }
        }
        if any {
            Ok(())
        } else {
            Err(Error::Kernel(
                "the kernel has no relocations",
                "build it with `parador kernel build` and do not strip it",
            ))
        }
    }

    fn set_constants(&self, parts: &mut [KernelSegment]) -> Result<(), Error> {
        for section in self.file.sections() {
            if wedge_sites::section(section.name()?) != Some(Ok(Table::Constants)) {
                continue;
            }
            for constant in Constants::parse(section.data()?, section.address())?.iter() {
                let size = match constant.width {
                    Width::Signed32 => 4,
                    Width::Full64 => 8,
                };
                let id: ConstantId = constant.id;
                let change = id.lower_half().wrapping_sub(id.upper_half());
                let place = field(parts, constant.address, size);
                add(
                    place.ok_or_else(|| relocation_overflow(constant.address, b"a constant"))?,
                    change,
                );
            }
        }
        Ok(())
    }
}

/// Returns the relocated address of a linked one.
pub fn moved(linked: u64) -> u64 {
    linked.wrapping_add(DELTA)
}

/// Returns the guest-physical address of a relocated address.
pub fn physical_of_moved(address: u64) -> u64 {
    address.wrapping_sub(layout::IMAGE)
}

/// Returns the guest-physical address of a linked address.
pub fn physical(linked: u64) -> u64 {
    linked.wrapping_sub(LINKED)
}

/// Returns what a relocation of this type adds when the image moves, `None` if nothing. `section`
/// and `name` are those of its symbol; `per_cpu` is the section of per-CPU data, where the
/// relocation is if `in_per_cpu`.
fn change(
    kind: elf::RelocationType,
    section: elf::SymbolSection,
    name: &[u8],
    per_cpu: Option<usize>,
    in_per_cpu: bool,
) -> Option<u64> {
    let to_per_cpu = Some(usize::from(section.0)) == per_cpu && !is_linear_per_cpu(name);
    let fixed = matches!(section, elf::SHN_ABS | elf::SHN_UNDEF) && !is_relative(name);
    match kind {
        elf::R_X86_64_PC32 | elf::R_X86_64_PLT32 | elf::R_X86_64_PC64 => {
            (to_per_cpu && !in_per_cpu).then_some(DELTA.wrapping_neg())
        }
        elf::R_X86_64_NONE => None,
        _ => (!fixed && !to_per_cpu).then_some(DELTA),
    }
}

/// Returns the size in bytes of the field of a relocation, if its type is known.
fn field_size(kind: elf::RelocationType) -> Option<usize> {
    match kind {
        elf::R_X86_64_64 | elf::R_X86_64_PC64 => Some(8),
        elf::R_X86_64_32 | elf::R_X86_64_32S | elf::R_X86_64_PC32 | elf::R_X86_64_PLT32 => Some(4),
        _ => None,
    }
}

fn relocation_overflow(at: u64, name: &[u8]) -> Error {
    Error::Relocation(at, String::from_utf8_lossy(name).into_owned())
}

/// Returns the bytes of the image at a linked address.
fn field(parts: &mut [KernelSegment], at: u64, size: usize) -> Option<&mut [u8]> {
    parts.iter_mut().find_map(|part| {
        let offset = usize::try_from(at.checked_sub(part.linked)?).ok()?;
        part.bytes.get_mut(offset..offset.checked_add(size)?)
    })
}

/// Adds to a little-endian number of four or eight bytes.
fn add(field: &mut [u8], change: u64) {
    let mut bytes = [0; 8];
    bytes[..field.len()].copy_from_slice(field);
    let value = u64::from_le_bytes(bytes).wrapping_add(change).to_le_bytes();
    field.copy_from_slice(&value[..field.len()]);
}

/// Returns whether a symbol of per-CPU data is an ordinary address.
fn is_linear_per_cpu(name: &[u8]) -> bool {
    matches!(name, b"__init_begin" | b"__per_cpu_load") || name.starts_with(b"init_per_cpu_")
}

/// Returns whether an absolute symbol is derived from an image address by the linker script.
fn is_relative(name: &[u8]) -> bool {
    const NAMES: [&[u8]; 17] = [
        b"__init_begin",
        b"__init_end",
        b"__x86_cpu_dev_start",
        b"__x86_cpu_dev_end",
        b"__alt_instructions",
        b"__alt_instructions_end",
        b"__apicdrivers",
        b"__apicdrivers_end",
        b"__smp_locks",
        b"__smp_locks_end",
        b"__initramfs_start",
        b"__initramfs_size",
        b"jiffies",
        b"jiffies_64",
        b"__per_cpu_load",
        b"__vvar_page",
        b"_end",
    ];
    const PREFIXES: [&[u8]; 6] = [
        b"__start_",
        b"__stop_",
        b"__end_rodata",
        b"init_per_cpu__",
        b"__start_pci_",
        b"__end_pci_",
    ];
    NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

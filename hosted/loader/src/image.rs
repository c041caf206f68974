//! Pre-virtualized kernel: parsing of its file, and relocation to the lower half of the address
//! space.
//!
//! The file contains the linker's relocations (`--emit-relocs`). The rules are those of Linux' tool
//! for KASLR (`arch/x86/tools/relocs.c`): instruction-relative references need no change, except to
//! per-CPU data, which is linked at 0 and stays there; absolute symbols stay, except those that the
//! linker script derives from addresses.

use object::elf;
use object::read::ReadCache;
use object::read::elf::{ElfFile64, FileHeader, Rela, SectionHeader, Sym};
use object::{LittleEndian, Object, ObjectSection, ObjectSymbol, ReadRef};
use proto::hosted::layout;
use std::fs::File as HostFile;
use vmm_mem::GuestMemory;
use vmm_mem::shared::SharedMemory;
use wedge_sites::{ConstantId, Constants, Sites, Table, Width};

use crate::{Error, KernelReader};

type File<'a> = ElfFile64<'a, LittleEndian, &'a ReadCache<HostFile>>;
type Relocation = elf::Rela64<LittleEndian>;

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

/// Bytes of a segment, and entries of a relocation table, that are read at once.
const BLOCK: usize = 256 << 10;
const ENTRIES: usize = 4096;

/// A validated kernel.
pub struct Image<'a> {
    source: &'a KernelReader,
    file: File<'a>,
    /// Symbol names.
    names: &'a [u8],
    /// Address and length of the site table.
    sites: (u64, u64),
}

/// Segment of kernel memory, whose initial bytes are in the file; the rest is zero.
struct Segment {
    /// Guest-physical address.
    address: u64,
    /// Linked address.
    linked: u64,
    /// Place and length of the initial bytes in the file.
    offset: u64,
    size: u64,
}

impl<'a> Image<'a> {
    /// Validates a kernel file.
    ///
    /// # Errors
    /// Not an x86-64 ELF file, no site table of this version, or truncated.
    pub fn parse(source: &'a KernelReader) -> Result<Self, Error> {
        let bytes = source.parts();
        if bytes.read_bytes_at(0, 4) != Ok(b"\x7fELF") {
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
        Ok(Self { source, file, names, sites })
    }

    /// Returns the linked address of a symbol.
    pub fn symbol(&self, name: &'static str) -> Result<u64, Error> {
        // A kernel has tens of thousands: nearly all differ in the place of the zero at the end.
        let is_it = |symbol: &&elf::Sym64<LittleEndian>| {
            let start = symbol.st_name(ENDIAN) as usize;
            let end = start.saturating_add(name.len());
            self.names.get(end) == Some(&0) && self.names.get(start..end) == Some(name.as_bytes())
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

    /// Writes the kernel to empty guest memory, at the addresses for which it is linked.
    ///
    /// # Errors
    /// The file is invalid, or cannot be read; memory cannot be written.
    pub fn write(&self, memory: &mut SharedMemory) -> Result<(), Error> {
        let failed = |error| Error::Host("write the kernel to memory", error);
        for Segment { address, offset, size, .. } in self.segments()? {
            self.source.read_blocks(offset, size, BLOCK, |done, block| {
                memory.write_at(address + done, block).map_err(failed)
            })?;
        }
        Ok(())
    }

    /// Moves the kernel in guest memory to the lower half of the address space.
    ///
    /// # Errors
    /// The file is invalid, or a relocation overflows.
    pub fn relocate(&self, memory: &GuestMemory) -> Result<(), Error> {
        let kernel = Loaded { segments: self.segments()?, memory };
        self.relocate_sections(&kernel)?;
        self.set_constants(&kernel)
    }

    /// Returns the segments, which are within [`layout::IMAGE_LENGTH`].
    fn segments(&self) -> Result<Vec<Segment>, Error> {
        let length = self.source.file().metadata();
        let length = length.map_err(|error| Error::Host("examine the kernel", error))?.len();
        let mut segments = Vec::new();
        for segment in self.file.elf_program_headers() {
            if segment.p_type.get(ENDIAN) != elf::PT_LOAD || segment.p_memsz.get(ENDIAN) == 0 {
                continue;
            }
            let (offset, size) = (segment.p_offset.get(ENDIAN), segment.p_filesz.get(ENDIAN));
            if offset.checked_add(size).is_none_or(|end| end > length) {
                return Err(Error::TRUNCATED);
            }
            let in_memory = segment.p_memsz.get(ENDIAN);
            let address = segment.p_paddr.get(ENDIAN);
            let fits =
                address.checked_add(in_memory).is_some_and(|end| end <= layout::IMAGE_LENGTH);
            if !fits || size > in_memory {
                return Err(Error::Kernel(
                    "the kernel image is larger than 256 MiB or not linked at the beginning of memory",
                    "use the `vmlinux` of `parador kernel build`",
                ));
            }
            let linked = segment.p_vaddr.get(ENDIAN);
            segments.push(Segment { address, linked, offset, size });
        }
        Ok(segments)
    }

    /// Returns the first guest-physical address after the kernel.
    pub fn end(&self) -> u64 {
        let ends = self.file.elf_program_headers().iter().filter_map(|segment| {
            let load = segment.p_type.get(ENDIAN) == elf::PT_LOAD;
            load.then(|| segment.p_paddr.get(ENDIAN).saturating_add(segment.p_memsz.get(ENDIAN)))
        });
        // The segment includes memory that Linux reserves after `_end`.
        ends.max().unwrap_or(0).checked_next_multiple_of(PAGE).unwrap_or(u64::MAX)
    }

    fn relocate_sections(&self, kernel: &Loaded<'_>) -> Result<(), Error> {
        let sections = self.file.elf_section_table();
        let is_per_cpu = |section: &&elf::SectionHeader64<LittleEndian>| {
            sections.section_name(ENDIAN, section) == Ok(b".data..percpu")
        };
        let per_cpu = sections.iter().position(|section| is_per_cpu(&section));
        let tables: Vec<u64> =
            PAGE_TABLES.iter().filter_map(|&name| self.symbol(name).ok()).collect();
        let mut any = false;
        for section in sections.iter() {
            if section.sh_type(ENDIAN) != elf::SHT_RELA {
                continue;
            }
            let target = sections.section(section.info_link(ENDIAN))?;
            let is_loaded = target.sh_flags(ENDIAN).0 & elf::SHF_ALLOC.0 != 0;
            let size = section.sh_size(ENDIAN);
            if !is_loaded || target.sh_type(ENDIAN) == elf::SHT_NOBITS || size == 0 {
                continue;
            }
            any = true;
            let (start, length) = (target.sh_addr(ENDIAN), target.sh_size(ENDIAN));
            // Those in the section are looked up once: there are hundreds of thousands of
            // relocations.
            let is_here = |table: &u64| table.wrapping_sub(start) < length;
            let section_change = SectionChange {
                place: kernel.place(start, length, b"a section")?,
                start,
                length,
                tables: tables.iter().copied().filter(is_here).collect(),
                per_cpu,
                in_per_cpu: Some(section.info_link(ENDIAN).0) == per_cpu,
            };
            let block = ENTRIES * size_of::<Relocation>();
            self.source.read_blocks(section.sh_offset(ENDIAN), size, block, |_, bytes| {
                let relocations = object::pod::slice_from_all_bytes::<Relocation>(bytes);
                let relocations = relocations.map_err(|()| Error::TRUNCATED)?;
                relocations.iter().try_for_each(|it| self.apply(&section_change, it, kernel))
            })?;
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

    /// Applies a relocation.
    fn apply(
        &self,
        section: &SectionChange,
        relocation: &Relocation,
        kernel: &Loaded<'_>,
    ) -> Result<(), Error> {
        let at = relocation.r_offset(ENDIAN);
        if section.tables.iter().any(|&table| at.wrapping_sub(table) < PAGE) {
            return Ok(());
        }
        let Some(index) = relocation.symbol(ENDIAN, false) else { return Ok(()) };
        let symbols = self.file.elf_symbol_table();
        let symbol = symbols.symbol(index)?;
        let name = || symbols.symbol_name(ENDIAN, symbol).unwrap_or_default();
        let kind = relocation.r_type(ENDIAN, false);
        let Some(change) = change(kind, symbol.st_shndx(ENDIAN), name, section) else {
            return Ok(());
        };
        let overflow = || relocation_overflow(at, name());
        let size = field_size(kind).ok_or_else(overflow)?;
        let offset = at.wrapping_sub(section.start);
        if offset.checked_add(size as u64).is_none_or(|end| end > section.length) {
            return Err(overflow());
        }
        kernel.add(section.place + offset, size, change)
    }

    fn set_constants(&self, kernel: &Loaded<'_>) -> Result<(), Error> {
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
                let place = kernel.place(constant.address, size as u64, b"a constant")?;
                kernel.add(place, size, change)?;
            }
        }
        Ok(())
    }
}

/// Kernel in guest memory.
struct Loaded<'a> {
    segments: Vec<Segment>,
    memory: &'a GuestMemory,
}

impl Loaded<'_> {
    /// Returns the guest-physical address of initial bytes, of which `name` is the name in errors.
    fn place(&self, linked: u64, length: u64, name: &[u8]) -> Result<u64, Error> {
        let found = self.segments.iter().find_map(|segment| {
            let offset = linked.checked_sub(segment.linked)?;
            let is_within = offset.checked_add(length)? <= segment.size;
            is_within.then(|| segment.address + offset)
        });
        found.ok_or_else(|| relocation_overflow(linked, name))
    }

    /// Adds to a little-endian number of `size` bytes, four or eight.
    fn add(&self, place: u64, size: usize, change: u64) -> Result<(), Error> {
        let failed = |error| Error::Boot(vmm_boot::BootError::from(error));
        let mut bytes = [0; 8];
        self.memory.read_slice(place, &mut bytes[..size]).map_err(failed)?;
        let value = u64::from_le_bytes(bytes).wrapping_add(change).to_le_bytes();
        self.memory.write_slice(place, &value[..size]).map_err(failed)
    }
}

/// Section that a relocation table is for.
struct SectionChange {
    /// Guest-physical address.
    place: u64,
    /// Linked address, and length in bytes.
    start: u64,
    length: u64,
    /// Linked addresses of page tables in it.
    tables: Vec<u64>,
    /// Number of the section of per-CPU data, and whether it is this one.
    per_cpu: Option<usize>,
    in_per_cpu: bool,
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
/// and `name` are those of its symbol; `place` is the section in which it is.
fn change<'a>(
    kind: elf::RelocationType,
    section: elf::SymbolSection,
    name: impl Fn() -> &'a [u8],
    place: &SectionChange,
) -> Option<u64> {
    let is_per_cpu = Some(usize::from(section.0)) == place.per_cpu;
    let to_per_cpu = is_per_cpu && !is_linear_per_cpu(name());
    match kind {
        elf::R_X86_64_PC32 | elf::R_X86_64_PLT32 | elf::R_X86_64_PC64 => {
            (to_per_cpu && !place.in_per_cpu).then_some(DELTA.wrapping_neg())
        }
        elf::R_X86_64_NONE => None,
        _ => {
            let is_absolute = matches!(section, elf::SHN_ABS | elf::SHN_UNDEF);
            let is_fixed = is_absolute && !is_relative(name());
            (!is_fixed && !to_per_cpu).then_some(DELTA)
        }
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

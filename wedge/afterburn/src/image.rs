//! A linked kernel or a module: its instructions and the tables about them (System V ABI, "Object
//! Files"; AMD64 psABI, 4.4).
//!
//! Sections of a module have no addresses yet. [`Image::parse`] assigns consecutive addresses and
//! relocates the module's tables to them.

use crate::error::Error;
use object::read::elf::{ElfFile64, ElfSection64};
use object::{
    Object, ObjectKind, ObjectSection, ObjectSymbol, RelocationFlags, RelocationTarget,
    SectionFlags, SymbolKind, elf,
};
use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Display;
use std::path::Path;
use wedge_sites::{Constants, Site, Sites, Table};

type File<'d> = ElfFile64<'d, object::LittleEndian>;
type Input<'d, 'f> = ElfSection64<'d, 'f, object::LittleEndian>;

/// An ELF file.
pub struct Image<'d> {
    /// Allocated sections, in the order of the file.
    pub sections: Vec<Section<'d>>,
    /// Symbols in these sections, by address.
    pub symbols: Vec<Symbol<'d>>,
    /// True for a module, which is not linked.
    pub is_module: bool,
    /// Address of the 32-bit entry point in the PVH note (Xen, docs/misc/pvh.pandoc).
    pub pvh_entry: Option<u64>,
    /// Addresses that relocations of a module refer to: every one in code begins an instruction.
    pub referred: Vec<u64>,
    /// Physical address, virtual address and bytes of each loaded segment of a linked image.
    loaded: Vec<(u64, u64, u64)>,
    /// Addresses in code that change when a linked image is moved, sorted. Known only if the linker
    /// kept relocations.
    relocations: Vec<u64>,
}

/// An allocated section.
pub struct Section<'d> {
    /// The section's name.
    pub name: &'d str,
    /// The section's address; in a module, the assigned one.
    pub address: u64,
    /// The section's contents; empty if it has none in the file.
    pub data: Cow<'d, [u8]>,
    /// Offset of the contents in the file.
    pub offset: u64,
    /// True if the section has instructions.
    pub executable: bool,
}

/// A named address.
#[derive(Clone, Copy, Debug)]
pub struct Symbol<'d> {
    /// The address.
    pub address: u64,
    /// Size in bytes; 0 if the file does not give one.
    pub size: u64,
    /// The name.
    pub name: &'d str,
    /// Index of the symbol's section in [`Image::sections`]: the address is ambiguous at a border
    /// of sections.
    pub section: usize,
}

/// Address of a module's first section: far from 0, so that distances cannot wrap around.
const MODULE_BASE: u64 = 0x1_0000_0000;

/// The sections of a file that occupy memory.
struct Allocated<'d, 'f> {
    sections: Vec<Section<'d>>,
    inputs: Vec<Input<'d, 'f>>,
    /// Address and index in `sections`, by index in the file.
    addresses: HashMap<object::SectionIndex, (u64, usize)>,
}

fn allocated<'d, 'f>(
    file: &'f File<'d>,
    wrong: &dyn Fn(&dyn Display) -> Error,
) -> Result<Allocated<'d, 'f>, Error> {
    let broken = |error: object::Error| wrong(&format_args!("damaged: {error}"));
    let is_module = file.kind() == ObjectKind::Relocatable;
    let mut addresses = HashMap::new();
    let mut next = MODULE_BASE;
    let mut sections = Vec::new();
    let mut inputs = Vec::new();
    for section in file.sections() {
        let SectionFlags::Elf { sh_flags, .. } = section.flags() else { continue };
        if sh_flags.0 & elf::SHF_ALLOC.0 == 0 {
            continue;
        }
        let address = match is_module {
            false => section.address(),
            true => {
                let align = section.align().max(1);
                let address = next.checked_next_multiple_of(align.min(1 << 20));
                let end = address.and_then(|address| address.checked_add(section.size()));
                next = end.ok_or_else(|| wrong(&"damaged: its sections are too large"))?;
                address.unwrap_or(next)
            }
        };
        if address.checked_add(section.size()).is_none() {
            return Err(wrong(&"damaged: a section is outside the address space"));
        }
        addresses.insert(section.index(), (address, sections.len()));
        sections.push(Section {
            name: section.name().map_err(broken)?,
            address,
            data: Cow::Borrowed(section.data().map_err(broken)?),
            offset: section.file_range().map_or(0, |(offset, _)| offset),
            executable: sh_flags.0 & elf::SHF_EXECINSTR.0 != 0,
        });
        inputs.push(section);
    }
    Ok(Allocated { sections, inputs, addresses })
}

/// Physical address, virtual address and size in the file of each loaded segment.
fn loaded(file: &File<'_>) -> Vec<(u64, u64, u64)> {
    let endian = object::LittleEndian;
    file.elf_program_headers()
        .iter()
        .filter(|header| header.p_type.get(endian) == elf::PT_LOAD)
        .map(|header| (&header.p_paddr, &header.p_vaddr, &header.p_filesz))
        .map(|(physical, address, size)| {
            (physical.get(endian), address.get(endian), size.get(endian))
        })
        .collect()
}

impl<'d> Image<'d> {
    /// Parses an ELF file. `path` is for messages.
    pub fn parse(path: &Path, data: &'d [u8]) -> Result<Self, Error> {
        let wrong = |what: &dyn Display| Error::Image(format!("{}: {what}", path.display()));
        if !data.starts_with(&elf::ELFMAG) {
            return Err(wrong(&"not an ELF file"));
        }
        let file = File::<'d>::parse(data)
            .map_err(|error| wrong(&format_args!("damaged or not 64-bit ELF: {error}")))?;
        if file.architecture() != object::Architecture::X86_64 {
            return Err(wrong(&"not for x86-64"));
        }
        let is_module = file.kind() == ObjectKind::Relocatable;
        let Allocated { mut sections, inputs, addresses } = allocated(&file, &wrong)?;
        if is_module {
            for (section, input) in sections.iter_mut().zip(&inputs) {
                if !section.executable {
                    relocate(&file, section, input, &addresses);
                }
            }
        }
        let relocations = if is_module { Vec::new() } else { absolute(&inputs) };
        let referred = if is_module { referred(&file, &inputs, &addresses) } else { Vec::new() };
        let loaded = loaded(&file);
        let pvh_entry = physical_entry(&sections).and_then(|entry| virtual_address(&loaded, entry));
        let mut symbols: Vec<Symbol<'d>> = file
            .symbols()
            .filter(|symbol| !matches!(symbol.kind(), SymbolKind::Section | SymbolKind::File))
            .filter_map(|symbol| {
                let &(base, section) = addresses.get(&symbol.section_index()?)?;
                let address =
                    if is_module { base.wrapping_add(symbol.address()) } else { symbol.address() };
                Some(Symbol { address, size: symbol.size(), name: symbol.name().ok()?, section })
            })
            .collect();
        symbols.sort_by_key(|symbol| symbol.address);
        Ok(Self { sections, symbols, is_module, pvh_entry, referred, loaded, relocations })
    }

    /// The section with this name.
    pub fn section(&self, name: &str) -> Option<&Section<'d>> {
        self.sections.iter().find(|section| section.name == name)
    }

    /// The address of a symbol.
    pub fn symbol(&self, name: &str) -> Option<u64> {
        self.symbols.iter().find(|symbol| symbol.name == name).map(|symbol| symbol.address)
    }

    /// The symbols of exactly this address.
    pub fn symbols_at(&self, address: u64) -> impl Iterator<Item = &Symbol<'d>> {
        let first = self.symbols.partition_point(|symbol| symbol.address < address);
        self.symbols[first..].iter().take_while(move |symbol| symbol.address == address)
    }

    /// The size of a symbol in bytes. A symbol without a size extends to the next one that is not a
    /// label.
    pub fn extent(&self, symbol: &Symbol<'_>) -> u64 {
        if symbol.size > 0 {
            return symbol.size;
        }
        let section = &self.sections[symbol.section];
        let after = self.symbols.partition_point(|other| other.address <= symbol.address);
        let others = &self.symbols[after..];
        let next =
            others.iter().find(|other| other.section == symbol.section && !is_local(other.name));
        let end = section.address.saturating_add(section.data.len() as u64);
        next.map_or(end, |next| next.address) - symbol.address
    }

    /// The virtual address of a physical address in a linked image.
    pub fn virtual_address(&self, physical: u64) -> Option<u64> {
        virtual_address(&self.loaded, physical)
    }

    /// Returns true if moving the image would change one of these bytes.
    pub fn has_relocation(&self, address: u64, length: u64) -> bool {
        let first = self.relocations.partition_point(|place| *place < address);
        self.relocations.get(first).is_some_and(|place| place - address < length)
    }

    /// `length` bytes at an address.
    pub fn bytes(&self, address: u64, length: usize) -> Option<&[u8]> {
        let section = self.section_at(address)?;
        let start = usize::try_from(address - section.address).ok()?;
        section.data.get(start..start.checked_add(length)?)
    }

    /// The section whose contents include this address.
    pub fn section_at(&self, address: u64) -> Option<&Section<'d>> {
        self.sections.iter().find(|section| section.contains(address))
    }

    /// Describes an address for messages: the last symbol at or before it, and the distance.
    pub fn describe(&self, address: u64) -> String {
        let after = self.symbols.partition_point(|symbol| symbol.address <= address);
        // The function's name is more useful than labels within it.
        let near = self.symbols[..after].iter().rev().take(64);
        let covers = |symbol: &&Symbol<'_>| address < symbol.address.saturating_add(symbol.size);
        let named = near
            .clone()
            .find(covers)
            .or_else(|| near.clone().find(|symbol| !is_local(symbol.name)));
        match named {
            Some(symbol) if symbol.address == address => symbol.name.to_owned(),
            Some(symbol) => format!("{}+{:#x}", symbol.name, address - symbol.address),
            None => format!("{address:#x}"),
        }
    }

    /// The sites. A module may have none; a linked image without a table of sites is an error.
    pub fn sites(&self, path: &Path) -> Result<Vec<Site>, Error> {
        let wrong = |what: &dyn Display| Error::Image(format!("{}: {what}", path.display()));
        let table = self.table(path, Table::Sites)?;
        if table.is_none() && self.is_module {
            return Ok(Vec::new());
        }
        let section = table.ok_or_else(|| {
            wrong(&format_args!(
                "no section {}: not assembled by `parador afterburn`",
                wedge_sites::SITES_SECTION
            ))
        })?;
        let sites = Sites::parse(&section.data, section.address)
            .map_err(|error| wrong(&format_args!("{}: {error}", section.name)))?;
        Ok(sites.iter().collect())
    }

    /// The number of layout constants.
    pub fn constants(&self, path: &Path) -> Result<usize, Error> {
        let Some(section) = self.table(path, Table::Constants)? else { return Ok(0) };
        let constants = Constants::parse(&section.data, section.address).map_err(|error| {
            Error::Image(format!("{}: {}: {error}", path.display(), section.name))
        })?;
        Ok(constants.count())
    }

    fn table(&self, path: &Path, which: Table) -> Result<Option<&Section<'d>>, Error> {
        let mut found = None;
        for section in &self.sections {
            match wedge_sites::section(section.name) {
                Some(Ok(table)) if table == which => found = Some(section),
                Some(Err(error)) => {
                    let text = format!("{}: {}: {error}", path.display(), section.name);
                    return Err(Error::Image(text));
                }
                _ => {}
            }
        }
        Ok(found)
    }
}

impl Section<'_> {
    /// Returns true if the section's contents include the address.
    pub fn contains(&self, address: u64) -> bool {
        address.checked_sub(self.address).is_some_and(|offset| offset < self.data.len() as u64)
    }
}

/// Returns true for labels and mapping symbols, as opposed to functions.
fn is_local(name: &str) -> bool {
    name.starts_with(".L") || name.starts_with('$') || name.is_empty()
}

/// Addresses of relocations in code, except distances within the image. Distances to per-CPU
/// variables are not within the image: these variables do not move.
fn absolute(sections: &[Input<'_, '_>]) -> Vec<u64> {
    let mut places = Vec::new();
    for section in sections.iter().filter(|section| section.kind() == object::SectionKind::Text) {
        for (place, relocation) in section.relocations() {
            let RelocationFlags::Elf { r_type } = relocation.flags() else { continue };
            if !matches!(r_type, elf::R_X86_64_PC32 | elf::R_X86_64_PLT32 | elf::R_X86_64_PC64) {
                places.push(place);
            }
        }
    }
    places.sort_unstable();
    places
}

/// Targets of a module's relocations. Those in instructions are distances from the end of their
/// 32-bit field, which in branches is the end of the instruction.
fn referred(
    file: &File<'_>,
    inputs: &[Input<'_, '_>],
    addresses: &HashMap<object::SectionIndex, (u64, usize)>,
) -> Vec<u64> {
    let mut list = Vec::new();
    for input in inputs {
        let code = input.kind() == object::SectionKind::Text;
        for (_, relocation) in input.relocations() {
            let RelocationFlags::Elf { r_type } = relocation.flags() else { continue };
            let RelocationTarget::Symbol(index) = relocation.target() else { continue };
            let Ok(symbol) = file.symbol_by_index(index) else { continue };
            let Some((base, _)) = symbol.section_index().and_then(|index| addresses.get(&index))
            else {
                continue;
            };
            let distance = matches!(r_type, elf::R_X86_64_PC32 | elf::R_X86_64_PLT32);
            let end = if code && distance { 4 } else { 0 };
            let target = base.wrapping_add(symbol.address());
            list.push(target.wrapping_add_signed(relocation.addend()).wrapping_add(end));
        }
    }
    list.sort_unstable();
    list.dedup();
    list
}

/// `XEN_ELFNOTE_PHYS32_ENTRY` (Xen, include/public/elfnote.h).
fn physical_entry(sections: &[Section<'_>]) -> Option<u64> {
    let notes = sections.iter().filter(|section| section.name.starts_with(".note"));
    notes.filter_map(|section| physical_entry_in(&section.data)).next()
}

/// The same, in the notes of one section (System V ABI, "Note Section").
fn physical_entry_in(data: &[u8]) -> Option<u64> {
    const PHYS32_ENTRY: u32 = 18;
    let word = |at: usize| data.get(at..)?.first_chunk().map(|word| u32::from_le_bytes(*word));
    let mut at = 0_usize;
    loop {
        let (name, size) = (word(at)? as usize, word(at + 4)? as usize);
        let contents = (at + 12).checked_add(name.checked_next_multiple_of(4)?)?;
        let is_xen = name == 4 && data.get(at + 12..)?.starts_with(b"Xen\0");
        if is_xen && word(at + 8)? == PHYS32_ENTRY {
            return word(contents).map(u64::from);
        }
        at = contents.checked_add(size.checked_next_multiple_of(4)?)?;
    }
}

fn virtual_address(loaded: &[(u64, u64, u64)], address: u64) -> Option<u64> {
    loaded.iter().find_map(|&(physical, start, length)| {
        let offset = address.checked_sub(physical).filter(|offset| *offset < length)?;
        Some(start.wrapping_add(offset))
    })
}

/// Applies the relocations of a module's section. References to other images stay 0.
fn relocate(
    file: &File<'_>,
    section: &mut Section<'_>,
    input: &Input<'_, '_>,
    addresses: &HashMap<object::SectionIndex, (u64, usize)>,
) {
    for (offset, relocation) in input.relocations() {
        let RelocationFlags::Elf { r_type } = relocation.flags() else { continue };
        let RelocationTarget::Symbol(index) = relocation.target() else { continue };
        let Ok(symbol) = file.symbol_by_index(index) else { continue };
        let Some((base, _)) = symbol.section_index().and_then(|index| addresses.get(&index)) else {
            continue;
        };
        let target = base.wrapping_add(symbol.address()).wrapping_add_signed(relocation.addend());
        let place = section.address.wrapping_add(offset);
        let distance = target.wrapping_sub(place);
        let (value, width) = match r_type {
            elf::R_X86_64_64 => (target, 8),
            elf::R_X86_64_PC64 => (distance, 8),
            elf::R_X86_64_32 | elf::R_X86_64_32S => (target, 4),
            elf::R_X86_64_PC32 | elf::R_X86_64_PLT32 => (distance, 4),
            _ => continue,
        };
        let Ok(at) = usize::try_from(offset) else { continue };
        let field = section.data.to_mut().get_mut(at..at.saturating_add(width));
        if let Some(field) = field {
            field.copy_from_slice(&value.to_le_bytes()[..width]);
        }
    }
}

//! Symbol file of a guest kernel for `perf`, which resolves an address in the file mapped there:
//! guest memory. The file has that name and a section at the kernel's offset in guest memory, with
//! symbols only.

use object::elf;
use object::endian::Endianness;
use object::write::StringId;
use object::write::elf::{FileHeader, SectionHeader, Sym, Writer};

use crate::image::physical_of_moved;
use crate::prepare::GUEST_MEMORY;
use crate::{Error, Image};

/// Returns the file name for `perf`: that of guest memory in `/proc/PID/maps`.
pub fn name() -> String {
    format!("memfd:{GUEST_MEMORY} (deleted)")
}

/// Returns an ELF object whose offsets are guest-physical addresses.
///
/// # Errors
/// The kernel has no functions, or too many for an object file.
pub fn object(image: &Image<'_>) -> Result<Vec<u8>, Error> {
    write(&image.functions())
}

const HEADER: FileHeader = FileHeader {
    os_abi: elf::ELFOSABI_NONE,
    abi_version: 0,
    e_type: elf::ET_EXEC,
    e_machine: elf::EM_X86_64,
    e_entry: 0,
    e_flags: elf::FileFlags(0),
};

/// Section header of the code in `start..end`, whose bytes are not in the file.
fn text_section(start: u64, end: u64, sh_name: u32) -> SectionHeader {
    SectionHeader {
        sh_name,
        sh_type: elf::SHT_NOBITS,
        sh_flags: elf::SHF_ALLOC | elf::SHF_EXECINSTR,
        sh_addr: start,
        sh_offset: start,
        sh_size: end - start,
        sh_link: 0,
        sh_info: 0,
        sh_addralign: 1,
        sh_entsize: 0,
    }
}

/// Writes functions in ascending order: relocated address, size, name.
fn write(functions: &[(u64, u64, String)]) -> Result<Vec<u8>, Error> {
    let bounds = functions.first().zip(functions.last());
    let ((first, ..), (last, size, _)) = bounds.ok_or(Error::Symbol("_stext"))?;
    let start = physical_of_moved(*first);
    let end = physical_of_moved(*last).checked_add(*size).filter(|end| *end >= start);
    let end = end.ok_or(Error::UNUSABLE)?;

    let mut bytes = Vec::new();
    let mut writer = Writer::new(Endianness::Little, true, &mut bytes);
    let failed =
        |_| Error::Kernel("the kernel has too many symbols", "use the kernel as it was built");
    writer.reserve_file_header();
    writer.reserve_null_section_index();
    let text_name = writer.add_section_name(b".text");
    let text = writer.reserve_section_index();
    writer.reserve_null_symbol_index();
    let names: Vec<StringId> = functions
        .iter()
        .map(|(_, _, name)| {
            writer.reserve_symbol_index(Some(text));
            writer.add_string(name.as_bytes())
        })
        .collect();
    writer.reserve_symtab_section_index();
    writer.reserve_symtab();
    writer.reserve_strtab_section_index();
    writer.reserve_strtab().map_err(failed)?;
    writer.reserve_shstrtab_section_index();
    writer.reserve_shstrtab().map_err(failed)?;
    writer.reserve_section_headers();

    writer.write_file_header(&HEADER).map_err(failed)?;
    writer.write_null_symbol();
    for ((address, size, _), name) in functions.iter().zip(names) {
        let st_name = writer.string_offset(Some(name));
        writer.write_symbol(&Sym {
            section: Some(text.0),
            st_name,
            st_info: elf::SymbolInfo::new(elf::STB_GLOBAL, elf::STT_FUNC),
            st_other: elf::SymbolOther(0),
            st_shndx: elf::SymbolSection(0),
            st_value: physical_of_moved(*address),
            st_size: *size,
        });
    }
    writer.write_strtab();
    writer.write_shstrtab();
    writer.write_null_section_header();
    let sh_name = writer.section_name_offset(Some(text_name));
    writer.write_section_header(&text_section(start, end, sh_name));
    writer.write_symtab_section_header(1);
    writer.write_strtab_section_header();
    writer.write_shstrtab_section_header();
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use object::{Object, ObjectSection, ObjectSymbol};

    #[test]
    fn addresses_are_offsets_in_guest_memory() {
        let functions = [(0x4100_0000, 16, "first"), (0x4100_0010, 32, "second")];
        let functions = functions.map(|(address, size, name)| (address, size, name.to_owned()));
        let bytes = write(&functions).unwrap();
        let file = object::File::parse(&*bytes).unwrap();
        let text = file.section_by_name(".text").unwrap();
        assert_eq!((text.address(), text.size()), (0x100_0000, 48));
        let found: Vec<_> = file
            .symbols()
            .map(|symbol| (symbol.address(), symbol.size(), symbol.name().unwrap()))
            .collect();
        assert_eq!(found, [(0x100_0000, 16, "first"), (0x100_0010, 32, "second")]);
        assert!(write(&[]).is_err());
        for (last, size) in [(0x4100_0010, u64::MAX), (0x3fff_ffff, 1), (0, u64::MAX)] {
            let functions = [(0x4100_0000, 16, "first".to_owned()), (last, size, String::new())];
            assert!(write(&functions).is_err(), "{last:#x}");
        }
    }
}

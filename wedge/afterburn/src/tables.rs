//! A Linux kernel's own tables about its instructions: addresses that it patches while it runs, or
//! that an exception refers to. A site must not overlap a range that the kernel itself writes.
//!
//! The layouts are those of Linux 5.10 to 6.12; where a size depends on the version, it is derived
//! from the contents.

use crate::image::{Image, Section};
use iced_x86::{Decoder, DecoderOptions, Mnemonic};

/// Name of the original texts of alternatives.
pub const ORIGINALS: &str = "alternatives";

/// The ranges of one table.
pub struct Places {
    /// The table's name.
    pub name: &'static str,
    /// Addresses and lengths.
    pub places: Vec<(u64, u64)>,
    /// True if a site may begin at such a range: the exception table refers to an instruction and
    /// does not change it.
    pub may_coincide: bool,
}

/// All tables of an image.
pub fn all(image: &Image<'_>) -> Vec<Places> {
    let reader = Reader { image };
    let list = |name, places| Places { name, places, may_coincide: false };
    let mut all = reader.alternatives();
    all.push(list("jump labels", reader.relative("__jump_table", "__jump_table", 16, None)));
    all.push(list(
        "static calls",
        reader.relative(".static_call_sites", "static_call_sites", 8, None),
    ));
    all.push(list("retpolines", reader.relative(".retpoline_sites", "", 4, None)));
    all.push(list("returns", reader.relative(".return_sites", "", 4, None)));
    all.push(list("endbr", reader.relative(".ibt_endbr_seal", "", 4, Some(4))));
    all.push(list("smp locks", reader.relative(".smp_locks", "", 4, Some(1))));
    all.push(list("bugs", reader.bugs()));
    all.push(list("paravirt", reader.paravirt()));
    all.push(list("mcount", reader.mcount()));
    all.push(Places {
        name: "exceptions",
        places: reader.relative("__ex_table", "__ex_table", 12, Some(1)),
        may_coincide: true,
    });
    all
}

struct Reader<'i, 'd> {
    image: &'i Image<'d>,
}

impl Reader<'_, '_> {
    /// Contents and address of a table: a section, or the range between `__start_NAME` and
    /// `__stop_NAME`.
    fn table(&self, section: &str, symbols: &str) -> Option<(&[u8], u64)> {
        if let Some(section) = self.image.section(section) {
            return Some((&section.data, section.address));
        }
        let start = self.image.symbol(&format!("__start_{symbols}"))?;
        let stop = self.image.symbol(&format!("__stop_{symbols}"))?;
        let length = usize::try_from(stop.checked_sub(start)?).ok()?;
        Some((self.image.bytes(start, length)?, start))
    }

    /// Entries that begin with the distance to their range. Without `length`, the range is the
    /// instruction there.
    fn relative(
        &self,
        section: &str,
        symbols: &str,
        size: usize,
        length: Option<u64>,
    ) -> Vec<(u64, u64)> {
        let Some((data, address)) = self.table(section, symbols) else { return Vec::new() };
        entries(data, address, size)
            .map(|(at, entry)| distance(at, entry, 0))
            .map(|place| (place, length.unwrap_or_else(|| self.length(place))))
            .collect()
    }

    /// Length of the instruction at an address; 1 if there is none.
    fn length(&self, address: u64) -> u64 {
        let bytes = (1..=15).rev().find_map(|length| self.image.bytes(address, length));
        let instruction =
            Decoder::with_ip(64, bytes.unwrap_or_default(), address, DecoderOptions::NONE).decode();
        instruction.len().max(1) as u64
    }

    /// `struct alt_instr`: 12 bytes until Linux 6.2, 13 in old kernels, then 14.
    fn alternatives(&self) -> Vec<Places> {
        let mut originals = Vec::new();
        let mut replacements = Vec::new();
        let replacement = self.image.section(".altinstr_replacement");
        if let (Some(table), Some(replacement)) =
            (self.image.section(".altinstructions"), replacement)
        {
            let size =
                [12, 14, 13].into_iter().find(|&size| self.is_size(table, replacement, size));
            for (at, entry) in entries(&table.data, table.address, size.unwrap_or(12)) {
                let lengths = alternative_lengths(entry);
                originals.push((distance(at, entry, 0), lengths.0));
                replacements.push((distance(at.wrapping_add(4), entry, 4), lengths.1));
            }
        }
        vec![
            Places { name: ORIGINALS, places: originals, may_coincide: false },
            Places { name: "alternatives' text", places: replacements, may_coincide: false },
        ]
    }

    /// Returns true if a table of alternatives is consistent with entries of this size.
    fn is_size(&self, table: &Section<'_>, replacement: &Section<'_>, size: usize) -> bool {
        table.data.len().is_multiple_of(size)
            && entries(&table.data, table.address, size).all(|(at, entry)| {
                let (original, new) = alternative_lengths(entry);
                let place = distance(at.wrapping_add(4), entry, 4);
                let inside = new == 0
                    || (replacement.contains(place)
                        && replacement.contains(place.wrapping_add(new - 1)));
                let code = self.image.section_at(distance(at, entry, 0));
                inside && new <= original && code.is_some_and(|code| code.executable)
            })
    }

    /// `struct bug_entry`: 12 bytes with source lines, else 8 or 6; each refers to an undefined
    /// instruction.
    fn bugs(&self) -> Vec<(u64, u64)> {
        let Some((data, address)) = self.table("__bug_table", "__bug_table") else {
            return Vec::new();
        };
        let undefined = |place: u64| {
            let bytes = self.image.bytes(place, 2).unwrap_or_default();
            let decoded = Decoder::new(64, bytes, DecoderOptions::NONE).decode();
            matches!(decoded.mnemonic(), Mnemonic::Ud0 | Mnemonic::Ud1 | Mnemonic::Ud2)
        };
        let places = |size| entries(data, address, size).map(|(at, entry)| distance(at, entry, 0));
        let size = [12, 8, 6].into_iter().find(|&size| places(size).all(undefined)).unwrap_or(12);
        places(size).map(|place| (place, 2)).collect()
    }

    /// `struct paravirt_patch_site`: address, type, length.
    fn paravirt(&self) -> Vec<(u64, u64)> {
        let Some((data, address)) = self.table(".parainstructions", "") else { return Vec::new() };
        entries(data, address, 16).map(|(_, entry)| (quad(entry), entry[9].into())).collect()
    }

    fn mcount(&self) -> Vec<(u64, u64)> {
        let table = self
            .table("__mcount_loc", "mcount_loc")
            .or_else(|| self.table("__patchable_function_entries", ""));
        let Some((data, address)) = table else { return Vec::new() };
        entries(data, address, 8).map(|(_, entry)| (quad(entry), 5)).collect()
    }
}

/// Whole entries with their addresses.
fn entries(data: &[u8], address: u64, size: usize) -> impl Iterator<Item = (u64, &[u8])> {
    let addresses = (0_u64..).map(move |index| address.wrapping_add(index * size as u64));
    addresses.zip(data.chunks_exact(size))
}

/// Resolves a 32-bit distance in an entry, relative to its field.
fn distance(field: u64, entry: &[u8], offset: usize) -> u64 {
    let bytes =
        entry.get(offset..).and_then(|rest| rest.first_chunk()).copied().unwrap_or_default();
    field.wrapping_add_signed(i32::from_le_bytes(bytes).into())
}

fn quad(entry: &[u8]) -> u64 {
    u64::from_le_bytes(entry.first_chunk().copied().unwrap_or_default())
}

/// Lengths of original and replacement: the last two bytes, before the length of padding in 13-byte
/// entries.
fn alternative_lengths(entry: &[u8]) -> (u64, u64) {
    let at = if entry.len() == 13 { 10 } else { entry.len() - 2 };
    (entry[at].into(), entry[at + 1].into())
}

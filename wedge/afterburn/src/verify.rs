//! Verifies a finished kernel or module: every sensitive instruction is a site, every site matches
//! its record, and no pad overlaps instructions that the kernel patches itself.
//!
//! The verifier does not rely on the rewriter: [`sweep`] decodes all bytes of executable sections
//! independently. The caller names the symbols that are not 64-bit code ([`Exceptions`]), and the
//! report lists them.

use crate::error::Error;
use crate::image::Image;
use crate::machine;
use crate::sweep;
use crate::tables::{self, Places};
use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use wedge_sites::{Flags, Kind, Site};

/// Result of a verification.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct VerifyReport {
    /// The file.
    pub file: String,
    /// Sites of each kind.
    pub kinds: BTreeMap<&'static str, Count>,
    /// Number of sites.
    pub sites: Count,
    /// Number of layout constants.
    pub constants: usize,
    /// Sensitive instructions that are not sites.
    pub missed: Vec<Missed>,
    /// Sites that do not match their record.
    pub wrong: Vec<Wrong>,
    /// Pads that overlap instructions which the kernel patches itself.
    pub overlaps: Vec<Overlap>,
    /// Bytes that no known address leads to, and that decode to a sensitive instruction from some
    /// byte.
    pub unjudged: Vec<Region>,
    /// Regions not checked as 64-bit code: the exceptions of the caller, and the PVH entry.
    pub excepted: Vec<Region>,
    /// Number of entries in each table that was compared.
    pub tables: BTreeMap<&'static str, usize>,
    /// Number of sites that begin at an address of the exception table, as intended.
    pub exception_starts: usize,
    /// Sizes.
    pub text: Text,
}

/// Numbers of sites.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct Count {
    /// With a pad.
    pub padded: usize,
    /// In text that alternatives copy.
    pub recorded: usize,
    /// Of the padded ones: flags are dead.
    pub flags_dead: usize,
}

/// A sensitive instruction that is not a site.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Missed {
    /// The instruction's address.
    pub address: u64,
    /// The instruction's kind.
    pub kind: &'static str,
    /// The section.
    pub section: String,
    /// The function, with an offset.
    pub function: String,
}

/// A site that does not match its record.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Wrong {
    /// The site's address.
    pub address: u64,
    /// The kind in the record.
    pub kind: &'static str,
    /// The function, with an offset.
    pub function: String,
    /// The mismatch.
    pub reason: String,
}

/// A pad that the kernel would overwrite.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Overlap {
    /// Address of the site.
    pub address: u64,
    /// The site's kind.
    pub kind: &'static str,
    /// The function, with an offset.
    pub function: String,
    /// The table.
    pub table: &'static str,
    /// The address that the table's entry refers to.
    pub place: u64,
}

/// Bytes of an executable section that are not 64-bit code, or not known to be.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Region {
    /// The first byte.
    pub address: u64,
    /// Length in bytes. For code in another mode, only the instructions reachable from its entry
    /// point.
    pub length: u64,
    /// The function, with an offset.
    pub function: String,
    /// The reason for which the region is not checked.
    pub reason: &'static str,
}

/// The caller's list of symbols that are not 64-bit code. The image itself adds only its PVH entry.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Exceptions {
    /// Entry points of 16-bit code.
    pub code16: Vec<String>,
    /// Entry points of 32-bit code.
    pub code32: Vec<String>,
    /// Data: all bytes of the symbol, or up to the next symbol if it has no size.
    pub data: Vec<String>,
}

/// Sizes in bytes.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize)]
pub struct Text {
    /// Instructions without pads and filler.
    pub code: u64,
    /// NOPs and prefixes of the sites.
    pub pads: u64,
    /// Pads in per cent of the code.
    pub growth_percent: f64,
    /// Bytes that were not decoded and are not a sensitive instruction from any byte: data.
    pub undecoded: u64,
}

impl VerifyReport {
    /// Returns true if no instruction is missed, no site is wrong or overlapping, and no region is
    /// undecided.
    pub fn is_good(&self) -> bool {
        self.missed.is_empty()
            && self.wrong.is_empty()
            && self.overlaps.is_empty()
            && self.unjudged.is_empty()
    }
}

/// Verifies the contents of a file. An exception that names no symbol of the file is an error.
pub fn verify(path: &Path, data: &[u8], exceptions: &Exceptions) -> Result<VerifyReport, Error> {
    let image = Image::parse(path, data)?;
    let mut sites = image.sites(path)?;
    sites.sort_by_key(|site| (site.address, site.padded));
    let mut report = VerifyReport {
        file: path.display().to_string(),
        kinds: BTreeMap::new(),
        sites: Count::default(),
        constants: image.constants(path)?,
        missed: Vec::new(),
        wrong: Vec::new(),
        overlaps: Vec::new(),
        unjudged: Vec::new(),
        excepted: Vec::new(),
        tables: BTreeMap::new(),
        exception_starts: 0,
        text: Text::default(),
    };
    for site in &sites {
        for count in [report.kinds.entry(site.kind.name()).or_default(), &mut report.sites] {
            match site.flags.contains(Flags::RECORD_ONLY) {
                true => count.recorded += 1,
                false => count.padded += 1,
            }
            count.flags_dead += usize::from(site.flags.contains(Flags::FLAGS_DEAD));
        }
        if let Err(reason) = check(&image, site) {
            report.wrong.push(Wrong {
                address: site.address,
                kind: site.kind.name(),
                function: image.describe(site.address),
                reason,
            });
        }
    }
    for pair in sites.windows(2) {
        if pair[0].end() > pair[1].address {
            report.wrong.push(Wrong {
                address: pair[1].address,
                kind: pair[1].kind.name(),
                function: image.describe(pair[1].address),
                reason: format!("overlaps the site before it ({})", pair[0].kind.name()),
            });
        }
    }
    let tables = tables::all(&image);
    let originals = tables.iter().find(|table| table.name == tables::ORIGINALS);
    let mut originals: Vec<(u64, u64)> = originals.map_or(Vec::new(), |table| table.places.clone());
    originals.sort_unstable();
    sweep::sweep(&image, &sites, &originals, exceptions, &mut report)?;
    overlaps(&image, tables, &sites, &mut report);
    let text = &mut report.text;
    text.growth_percent = 100.0 * text.pads as f64 / text.code.max(1) as f64;
    Ok(report)
}

/// Checks that the instructions at a site match its record.
fn check(image: &Image<'_>, site: &Site) -> Result<(), String> {
    let bytes = image.bytes(site.address, site.padded.into()).ok_or("it is not in the image")?;
    let (instructions, pad) = bytes.split_at(site.length.into());
    let mut decoder = Decoder::with_ip(64, instructions, site.address, DecoderOptions::NONE);
    let decoded: Vec<Instruction> = decoder.iter().collect();
    if decoded.iter().any(Instruction::is_invalid) {
        return Err("it does not decode".to_owned());
    }
    let found = match &decoded[..] {
        [] => None,
        [one] => machine::kind(one),
        [first, second] => machine::pair(first, second),
        _ => return Err(format!("it has {} instructions", decoded.len())),
    };
    let expected = match site.kind {
        kind if kind.is_marker() || kind == Kind::PageTable => None,
        kind => Some(kind),
    };
    if found != expected {
        let found = found.map_or("an instruction that is not sensitive", Kind::name);
        return Err(format!("there is {found}"));
    }
    let mut decoder = Decoder::new(64, pad, DecoderOptions::NONE);
    match decoder.iter().all(|instruction| instruction.mnemonic() == Mnemonic::Nop) {
        true => Ok(()),
        false => Err("its pad has other instructions than NOPs".to_owned()),
    }
}

/// The site that owns the byte at an address.
pub(crate) fn site_at(sites: &[Site], address: u64) -> Option<&Site> {
    let after = sites.partition_point(|site| site.address <= address);
    sites[..after].last().filter(|site| address < site.end())
}

/// Returns true if one of the sorted ranges begins at this address.
pub(crate) fn is_within(places: &[(u64, u64)], address: u64) -> bool {
    let after = places.partition_point(|(start, _)| *start <= address);
    places[..after].iter().rev().take(8).any(|(start, length)| address - start < *length)
}

fn overlaps(image: &Image<'_>, tables: Vec<Places>, sites: &[Site], report: &mut VerifyReport) {
    let padded: Vec<&Site> =
        sites.iter().filter(|site| !site.flags.contains(Flags::RECORD_ONLY)).collect();
    for table in tables {
        report.tables.insert(table.name, table.places.len());
        for (place, length) in table.places {
            let before = padded.partition_point(|site| site.address < place.saturating_add(length));
            let hit = padded[..before].iter().rev().take_while(|site| site.end() > place);
            for site in hit {
                if table.may_coincide && site.address == place {
                    report.exception_starts += 1;
                    continue;
                }
                report.overlaps.push(Overlap {
                    address: site.address,
                    kind: site.kind.name(),
                    function: image.describe(site.address),
                    table: table.name,
                    place,
                });
            }
        }
    }
}

impl fmt::Display for VerifyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { text, sites, .. } = self;
        writeln!(f, "{}", self.file)?;
        for missed in &self.missed {
            let Missed { address, kind, section, function } = missed;
            writeln!(f, "  missed: {address:#x} {kind} in {function} ({section})")?;
        }
        for wrong in &self.wrong {
            let Wrong { address, kind, function, reason } = wrong;
            writeln!(f, "  wrong: {address:#x} {kind} in {function}: {reason}")?;
        }
        for overlap in &self.overlaps {
            let Overlap { address, kind, function, table, place } = overlap;
            writeln!(f, "  overlap: {address:#x} {kind} in {function} with {table} at {place:#x}")?;
        }
        for Region { address, length, function, reason } in &self.unjudged {
            writeln!(f, "  unjudged: {address:#x} {length} bytes in {function}: {reason}")?;
        }
        for Region { address, length, function, reason } in &self.excepted {
            writeln!(f, "  excepted: {address:#x} {length} bytes in {function}: {reason}")?;
        }
        writeln!(f, "{:<20} {:>7} {:>9} {:>10}", "  kind", "padded", "recorded", "flags dead")?;
        for (kind, count) in self.kinds.iter().chain([(&"all", sites)]) {
            let Count { padded, recorded, flags_dead } = count;
            writeln!(f, "  {kind:<18} {padded:>7} {recorded:>9} {flags_dead:>10}")?;
        }
        write!(f, "  compared with:")?;
        for (name, entries) in self.tables.iter().filter(|(_, entries)| **entries > 0) {
            write!(f, " {name} {entries},")?;
        }
        writeln!(f, " {} sites begin where an exception may", self.exception_starts)?;
        writeln!(f, "  layout constants: {}", self.constants)?;
        writeln!(
            f,
            "  code: {} bytes and {} of pads, +{:.2} %; data {} bytes",
            text.code, text.pads, text.growth_percent, text.undecoded
        )?;
        writeln!(
            f,
            "  missed {}, wrong {}, overlapping {}, unjudged {}",
            self.missed.len(),
            self.wrong.len(),
            self.overlaps.len(),
            self.unjudged.len()
        )
    }
}

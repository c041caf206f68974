//! The null image: every site of a linked kernel jumps to a stub that executes the site's
//! instruction.
//!
//! The stubs emulate nothing, so the image must behave as the original kernel. This shows, on
//! hardware or an emulator, that every pad can be rewritten, and the cost of the jump through a
//! stub; with counters it shows how often each kind of site executes.
//!
//! The stubs are in the area that the kernel reserves between the symbols `parador_arena` and
//! `parador_arena_end`. A stub is the instruction, moved there, and a jump to the end of the site.
//! An instruction that an exception may refer to stays in its place, with the jump after it. Stubs
//! need no stack, so they work in entry code. A routine in the arena (`null/modules.S`) rewrites
//! the sites of modules in the same way; the sites `announce` and `retract` call it.

use crate::assembler;
use crate::error::Error;
use crate::image::Image;
use crate::machine;
use crate::tables;
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, RflagsBits};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::process::Command;
use wedge_sites::{Flags, JUMP, Kind, Site};

/// Start of the area for stubs.
const ARENA: &str = "parador_arena";
/// End of the area for stubs.
const ARENA_END: &str = "parador_arena_end";
/// Writable area with one 64-bit counter per kind: an object with a size, or with an end symbol.
const COUNTERS: &str = "parador_counters";
const COUNTERS_END: &str = "parador_counters_end";

/// Linux compares the address of a fault with this one: the `iret` there has to stay.
const FIXED: &[&str] = &["native_irq_return_iret"];
/// Linux copies these functions before it executes them: their instructions cannot jump away.
const COPIED: &[&str] =
    &["relocate_kernel", "identity_mapped", "virtual_mapped", "swap_pages", "core_restore_code"];
/// Code without a usable stack: Linux' start-up and entry code, by the symbols around it.
const WITHOUT_STACK: &[(&str, &str)] = &[
    ("_text", "__startup_64"),
    ("_stext", "__startup_64"),
    ("__entry_text_start", "__entry_text_end"),
];

/// A null image.
pub struct Null {
    /// The file's new contents.
    pub file: Vec<u8>,
    /// Summary of the rewriting.
    pub report: NullReport,
}

/// Summary of the rewritten sites.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct NullReport {
    /// Sites moved to a stub.
    pub moved: usize,
    /// Sites whose instruction stays in place, with a jump after it.
    pub in_place: usize,
    /// Sites with a counter.
    pub counted: usize,
    /// Sites not rewritten, by reason.
    pub left: BTreeMap<&'static str, usize>,
    /// Bytes of stubs.
    pub used: u64,
    /// Size of the area for stubs in bytes.
    pub room: u64,
    /// Number of module sites that fit.
    pub slots: u64,
    /// Address of the counters.
    pub counters: Option<u64>,
}

impl fmt::Display for NullReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "  rewritten: {} moved, {} with a jump after them", self.moved, self.in_place)?;
        for (reason, count) in &self.left {
            writeln!(f, "  not rewritten: {count}, {reason}")?;
        }
        if let Some(counters) = self.counters {
            writeln!(f, "  counted: {} sites, by kind from {counters:#x}", self.counted)?;
        }
        write!(
            f,
            "  stubs: {} of {} bytes, room for {} sites of modules",
            self.used, self.room, self.slots
        )
    }
}

/// `nop` of one byte.
const NOP: u8 = 0x90;
/// Bytes of a module's stub, as in `modules.S`.
const SLOT: u64 = 32;

/// Makes a null image from the contents of a kernel file. With `count`, the image counts executions
/// by kind.
pub fn null(path: &Path, data: &[u8], count: bool) -> Result<Null, Error> {
    let wrong = |what: String| Error::Image(format!("{}: {what}", path.display()));
    let image = Image::parse(path, data)?;
    if image.is_module {
        return Err(wrong(
            "a module; its sites are rewritten when a null image loads it".to_owned(),
        ));
    }
    let mut sites = image.sites(path)?;
    sites.sort_by_key(|site| site.address);
    let room = match (image.symbol(ARENA), image.symbol(ARENA_END)) {
        (Some(start), Some(end)) if start < end && end - start < u32::MAX.into() => start..end,
        _ => return Err(wrong(format!("no room for stubs: no symbols {ARENA} and {ARENA_END}"))),
    };
    if image.bytes(room.start, (room.end - room.start) as usize).is_none() {
        return Err(wrong(format!("the room for stubs from {ARENA} is not in the file")));
    }
    let counters = if count { Some(counters(&image).map_err(wrong)?) } else { None };
    let mut writer = Writer {
        image: &image,
        file: data.to_vec(),
        next: room.start,
        end: room.end,
        counters,
        report: NullReport { room: room.end - room.start, counters, ..NullReport::default() },
    };
    // The routine for modules comes first; it is assembled again when the room after the stubs is
    // known.
    let program = room.start;
    let first = assemble(path, room.end - room.start, room.end - room.start, counters, program)?;
    if sites.iter().any(|site| site.kind.is_marker()) {
        writer.next = (room.start + first.code.len() as u64).next_multiple_of(16);
    }
    let exceptions = exceptions(&image);
    for site in &sites {
        if site.kind.is_marker() {
            let to = if site.kind == Kind::Announce { program } else { program + first.retract };
            writer.call(path, site, to)?;
            continue;
        }
        match writer.obstacle(site) {
            Some(reason) => *writer.report.left.entry(reason).or_default() += 1,
            None => writer.rewrite(path, site, exceptions.contains(&site.address))?,
        }
    }
    let slots = writer.next.next_multiple_of(SLOT);
    writer.report.slots = room.end.saturating_sub(slots) / SLOT;
    writer.report.used = writer.next - room.start;
    let last = assemble(path, slots - program, room.end - program, counters, program)?;
    if sites.iter().any(|site| site.kind.is_marker()) {
        writer.write(path, program, &last.code)?;
        for slot in 0..writer.report.slots {
            writer.write(path, slots + slot * SLOT, &[0; 8])?;
        }
    }
    Ok(Null { file: writer.file, report: writer.report })
}

/// The addresses of instructions that exceptions may refer to.
fn exceptions(image: &Image<'_>) -> BTreeSet<u64> {
    let tables = tables::all(image);
    let tables = tables.iter().filter(|table| table.may_coincide);
    tables.flat_map(|table| table.places.iter().map(|(place, _)| *place)).collect()
}

/// The address of the counters.
fn counters(image: &Image<'_>) -> Result<u64, String> {
    let symbol = image.symbols.iter().find(|symbol| symbol.name == COUNTERS);
    let symbol = symbol.ok_or_else(|| format!("no room for counters: no symbol {COUNTERS}"))?;
    let end = image.symbol(COUNTERS_END).unwrap_or(symbol.address.saturating_add(symbol.size));
    let needed = 8 * Kind::ALL.len() as u64;
    match end.saturating_sub(symbol.address) {
        room if room < needed => {
            Err(format!("{COUNTERS} has {room} bytes, but {needed} are needed"))
        }
        _ => Ok(symbol.address),
    }
}

struct Writer<'i, 'd> {
    image: &'i Image<'d>,
    file: Vec<u8>,
    /// Address of the next stub.
    next: u64,
    end: u64,
    counters: Option<u64>,
    report: NullReport,
}

impl Writer<'_, '_> {
    /// The reason for which a site cannot be rewritten.
    fn obstacle(&self, site: &Site) -> Option<&'static str> {
        let name = self.image.describe(site.address);
        let function = name.split('+').next().unwrap_or_default();
        if site.flags.contains(Flags::RECORD_ONLY) {
            Some("texts of alternatives")
        } else if site.padded < JUMP {
            Some("too short for a jump")
        } else if self.image.has_relocation(site.address, site.length.into()) {
            Some("with an address that moving the image changes")
        } else if COPIED.contains(&function) {
            Some("in functions that are copied")
        } else if self.image.symbols_at(site.address).any(|symbol| FIXED.contains(&symbol.name)) {
            Some("compared with addresses of faults")
        } else {
            None
        }
    }

    fn rewrite(&mut self, path: &Path, site: &Site, stays: bool) -> Result<(), Error> {
        if stays && site.padded - site.length < JUMP {
            let reason = "may fault, and too long for a jump after them";
            *self.report.left.entry(reason).or_default() += 1;
            return Ok(());
        }
        let wrong = || {
            Error::Image(format!(
                "{}: a site at {:#x} is not in the image",
                path.display(),
                site.address
            ))
        };
        let bytes = self.image.bytes(site.address, site.length.into()).ok_or_else(wrong)?.to_vec();
        let decoded: Vec<Instruction> =
            Decoder::with_ip(64, &bytes, site.address, DecoderOptions::NONE).into_iter().collect();
        let away =
            [FlowControl::Return, FlowControl::UnconditionalBranch, FlowControl::IndirectBranch];
        let returns = decoded.last().is_none_or(|last| !away.contains(&last.flow_control()));
        let stub = self.next;
        let mut code = Vec::new();
        let counter =
            self.counters.map(|counters| counters.wrapping_add(8 * u64::from(site.kind.number())));
        if !returns {
            // An instruction that does not return nearby takes its flags from elsewhere.
            self.count(&mut code, stub, counter, Some(true));
        }
        if !stays {
            self.transplant(path, &mut code, stub, &bytes, &decoded)?;
        }
        if returns {
            let dies = site.flags.contains(Flags::FLAGS_DEAD) || flags_die(self.image, site.end());
            let dead = if dies || self.has_stack(site.address) { Some(dies) } else { None };
            self.count(&mut code, stub, counter, dead);
        }
        jump(&mut code, stub, site.end());
        if stub + code.len() as u64 > self.end {
            let room = self.report.room;
            return Err(Error::Image(format!(
                "{}: {room} bytes are not enough room for stubs",
                path.display()
            )));
        }
        self.write(path, stub, &code)?;
        self.next = stub + code.len() as u64;
        let from = if stays { site.address + u64::from(site.length) } else { site.address };
        let mut new = Vec::new();
        jump(&mut new, from, stub);
        // Execution does not reach these bytes any longer.
        new.resize((site.end() - from) as usize, 0xcc);
        self.write(path, from, &new)?;
        *(if stays { &mut self.report.in_place } else { &mut self.report.moved }) += 1;
        Ok(())
    }

    /// Puts a call in place of a site without an instruction.
    fn call(&mut self, path: &Path, site: &Site, to: u64) -> Result<(), Error> {
        if site.padded < JUMP {
            let text =
                format!("{}: the pad of `{}` is too short", path.display(), site.kind.name());
            return Err(Error::Image(text));
        }
        let mut code = vec![0xe8];
        code.extend(distance(site.address + 5, to));
        // The call returns to the rest of the pad, where a longer NOP would be cut in two.
        code.resize(site.padded.into(), NOP);
        self.write(path, site.address, &code)?;
        self.report.moved += 1;
        Ok(())
    }

    /// Encodes the site's instructions for the end of `code`, which begins at `stub`.
    fn transplant(
        &self,
        path: &Path,
        code: &mut Vec<u8>,
        stub: u64,
        bytes: &[u8],
        decoded: &[Instruction],
    ) -> Result<(), Error> {
        let start = code.len();
        code.extend_from_slice(bytes);
        let mut at = start;
        for instruction in decoded {
            if instruction.is_ip_rel_memory_operand() {
                // The decoder has the constant offsets of the instruction that it decoded last.
                let mut decoder = Decoder::with_ip(
                    64,
                    &bytes[at - start..],
                    instruction.ip(),
                    DecoderOptions::NONE,
                );
                let same = decoder.decode();
                let offsets = decoder.get_constant_offsets(&same);
                let field = at + offsets.displacement_offset();
                let end = stub + (at + instruction.len()) as u64;
                let Some(field) =
                    code.get_mut(field..field + 4).filter(|_| offsets.displacement_size() == 4)
                else {
                    let text = format!(
                        "{}: cannot move the site at {:#x}",
                        path.display(),
                        instruction.ip()
                    );
                    return Err(Error::Image(text));
                };
                field.copy_from_slice(&distance(end, instruction.ip_rel_memory_address()));
            }
            at += instruction.len();
        }
        Ok(())
    }

    /// Appends the increment of a counter. `dead`: true if the flags may change; `None` if they
    /// must not, and there is no stack to save them.
    fn count(&mut self, code: &mut Vec<u8>, stub: u64, counter: Option<u64>, dead: Option<bool>) {
        let (Some(counter), Some(dead)) = (counter, dead) else { return };
        const PUSHF: u8 = 0x9c;
        const POPF: u8 = 0x9d;
        if !dead {
            code.push(PUSHF);
        }
        // lock inc qword [rip + distance]
        code.extend([0xf0, 0x48, 0xff, 0x05]);
        code.extend(distance(stub + code.len() as u64 + 4, counter));
        if !dead {
            code.push(POPF);
        }
        self.report.counted += 1;
    }

    fn has_stack(&self, address: u64) -> bool {
        !WITHOUT_STACK.iter().any(|(start, end)| {
            let (start, end) = (self.image.symbol(start), self.image.symbol(end));
            start.is_some_and(|start| start <= address) && end.is_some_and(|end| address < end)
        })
    }

    /// Replaces the bytes of the file that are loaded at an address.
    fn write(&mut self, path: &Path, address: u64, bytes: &[u8]) -> Result<(), Error> {
        let section = self.image.section_at(address);
        let place = section
            .and_then(|section| usize::try_from(section.offset + (address - section.address)).ok());
        match place.and_then(|place| self.file.get_mut(place..place + bytes.len())) {
            Some(to) => {
                to.copy_from_slice(bytes);
                Ok(())
            }
            None => Err(Error::Image(format!(
                "{}: the file has no bytes for {address:#x}",
                path.display()
            ))),
        }
    }
}

/// The operand of an instruction that ends at `from`, in two's complement.
fn distance(from: u64, to: u64) -> [u8; 4] {
    // All segments of the image are within 2 GiB: that is the kernel's code model.
    (to.wrapping_sub(from) as u32).to_le_bytes()
}

/// Appends `jmp rel32` to `code`, which begins at `start`.
fn jump(code: &mut Vec<u8>, start: u64, to: u64) {
    code.push(0xe9);
    code.extend(distance(start + code.len() as u64 + 4, to));
}

/// Returns true if the code after an address does not use the arithmetic flags: a conservative look
/// ahead.
fn flags_die(image: &Image<'_>, address: u64) -> bool {
    const ARITHMETIC: u32 = RflagsBits::OF
        | RflagsBits::SF
        | RflagsBits::ZF
        | RflagsBits::AF
        | RflagsBits::CF
        | RflagsBits::PF;
    let mut missing = ARITHMETIC;
    let mut at = address;
    for _ in 0..24 {
        let Some(bytes) = (1..=15).rev().find_map(|length| image.bytes(at, length)) else {
            return false;
        };
        let instruction = Decoder::with_ip(64, bytes, at, DecoderOptions::NONE).decode();
        if instruction.is_invalid() || instruction.rflags_read() & missing != 0 {
            return false;
        }
        // These instructions save or replace all flags.
        match machine::kind(&instruction) {
            Some(Kind::Pushf) => return false,
            Some(Kind::Iret | Kind::Sysretq | Kind::Sysretl) => return true,
            _ => {}
        }
        missing &= !instruction.rflags_modified();
        if missing == 0 {
            return true;
        }
        at = match instruction.flow_control() {
            FlowControl::Next => instruction.next_ip(),
            FlowControl::UnconditionalBranch => instruction.near_branch_target(),
            // Functions neither receive flags nor return them.
            FlowControl::Return | FlowControl::Call | FlowControl::IndirectCall => return true,
            _ => return false,
        };
    }
    false
}

/// The routine for modules.
struct Program {
    code: Vec<u8>,
    /// Offset of its second entry point.
    retract: u64,
}

fn assemble(
    path: &Path,
    slots: u64,
    slots_end: u64,
    counters: Option<u64>,
    start: u64,
) -> Result<Program, Error> {
    let assembler = assembler::real()?;
    let folder = tempfile::tempdir()
        .map_err(|error| Error::file("make", Path::new("a temporary folder"), error))?;
    let (source, object) = (folder.path().join("modules.S"), folder.path().join("modules.o"));
    std::fs::write(&source, include_str!("null/modules.S"))
        .map_err(|error| Error::file("write", &source, error))?;
    let counters = counters.map_or(0, |counters| counters.wrapping_sub(start).cast_signed());
    let defined = [
        ("SLOTS", slots.cast_signed()),
        ("SLOTS_END", slots_end.cast_signed()),
        ("COUNTERS", counters),
    ];
    let mut command = Command::new(&assembler);
    command.arg("-o").arg(&object).arg(&source);
    for (name, value) in defined {
        command.arg("--defsym").arg(format!("{name}={value}"));
    }
    let output = command.output().map_err(|error| Error::file("start", &assembler, error))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(Error::Image(format!(
            "{}: cannot assemble the routine for modules: {text}",
            path.display()
        )));
    }
    let bytes = std::fs::read(&object).map_err(|error| Error::file("read", &object, error))?;
    let image = Image::parse(&object, &bytes)?;
    let text = image.section(".text");
    let retract = text.and_then(|text| Some(image.symbol("retract")? - text.address));
    match (text, retract) {
        (Some(text), Some(retract)) => Ok(Program { code: text.data.to_vec(), retract }),
        _ => Err(Error::Image(format!(
            "{}: the assembled routine for modules has no symbol `retract`",
            path.display()
        ))),
    }
}

//! Decodes all bytes of executable sections and finds sensitive instructions that are not sites.
//!
//! Decoding begins at each section, symbol and site, at each target of a branch, and at each
//! address that a relocation of a module refers to; it continues across symbols, so that no label
//! can cut an instruction in two. Where decoding fails it continues at the next of these addresses.
//! Bytes that none of them leads to are decoded from every single byte: if one of these attempts
//! gives a sensitive instruction, the bytes are reported, because the sweep cannot decide between
//! code and data.
//!
//! Code of other modes is followed from its entry point, in its own mode, along near branches; a
//! far jump out of it begins 64-bit code again. So an exception covers no byte that the processor
//! would not execute in that mode.

use crate::error::Error;
use crate::image::{Image, Symbol};
use crate::machine;
use crate::verify::{Exceptions, Missed, Region, VerifyReport, is_within, site_at};
use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind};
use wedge_sites::{Flags, Site};

/// An instruction begins at this byte.
const START: u8 = 1;
/// The byte is part of an instruction.
const INSIDE: u8 = 2;
/// The byte is part of an instruction that is neither a site nor filler.
const CODE: u8 = 4;
/// The byte is excepted: data, or code of another mode.
const EXCEPTED: u8 = 8;

/// Sweeps all executable sections of an image. Sites and originals of alternatives are sorted by
/// address.
pub fn sweep(
    image: &Image<'_>,
    sites: &[Site],
    originals: &[(u64, u64)],
    exceptions: &Exceptions,
    report: &mut VerifyReport,
) -> Result<(), Error> {
    let maps = image.sections.iter().map(|section| match is_judged(image, section.name) {
        true if section.executable => vec![0; section.data.len()],
        _ => Vec::new(),
    });
    let maps = maps.collect();
    let mut sweep = Sweep { image, sites, originals, maps, queue: Vec::new(), report };
    for section in image.sections.iter().filter(|section| section.executable) {
        if !is_judged(image, section.name) {
            sweep.excepted(section.address, section.data.len() as u64, "discarded by the linker");
        }
    }
    sweep.except(exceptions)?;
    sweep.decode_all();
    sweep.count();
    Ok(())
}

/// Returns true if a section is checked. Linkers discard such sections of object files; those in a
/// linked image stay.
fn is_judged(image: &Image<'_>, name: &str) -> bool {
    !(image.is_module && name.starts_with(".discard"))
}

struct Sweep<'s, 'd> {
    image: &'s Image<'d>,
    sites: &'s [Site],
    originals: &'s [(u64, u64)],
    /// State of each byte of each section; empty for sections that are not checked.
    maps: Vec<Vec<u8>>,
    /// Addresses to decode 64-bit code from.
    queue: Vec<u64>,
    report: &'s mut VerifyReport,
}

impl<'d> Sweep<'_, 'd> {
    // Exceptions.

    fn except(&mut self, exceptions: &Exceptions) -> Result<(), Error> {
        for name in &exceptions.data {
            let symbol = self.named(name)?;
            let map = &mut self.maps[symbol.section];
            let start = symbol.address - self.image.sections[symbol.section].address;
            let end = start.saturating_add(self.image.extent(&symbol)).min(map.len() as u64);
            let bytes = &mut map[start as usize..end as usize];
            bytes.iter_mut().for_each(|byte| *byte |= EXCEPTED);
            let length = bytes.len() as u64;
            self.excepted(symbol.address, length, "data");
        }
        for name in &exceptions.code16 {
            let symbol = self.named(name)?;
            self.other_mode(symbol.address, 16, "16-bit code");
        }
        for name in &exceptions.code32 {
            let symbol = self.named(name)?;
            self.other_mode(symbol.address, 32, "32-bit code");
        }
        if let Some(entry) = self.image.pvh_entry {
            self.other_mode(entry, 32, "32-bit code, the entry that the PVH note names");
        }
        Ok(())
    }

    /// A symbol in a section that is checked.
    fn named(&self, name: &str) -> Result<Symbol<'d>, Error> {
        let inside = |symbol: &&Symbol<'_>| {
            symbol.name == name && self.offset(symbol.address, symbol.section).is_some()
        };
        self.image.symbols.iter().find(inside).copied().ok_or_else(|| {
            Error::Usage(format!(
                "no symbol `{name}` in the code: an exception must name an existing symbol"
            ))
        })
    }

    fn excepted(&mut self, address: u64, length: u64, reason: &'static str) {
        let function = self.image.describe(address);
        self.report.excepted.push(Region { address, length, function, reason });
    }

    /// Follows code of another mode from its entry point.
    fn other_mode(&mut self, entry: u64, bits: u32, reason: &'static str) {
        let mut pending = vec![entry];
        let mut length = 0;
        while let Some(start) = pending.pop() {
            let Some((section, mut at)) = self.find(start) else { continue };
            while at < self.maps[section].len() && self.maps[section][at] & EXCEPTED == 0 {
                let Some(instruction) = self.instruction(section, at, bits) else { break };
                let end = at + instruction.len();
                self.maps[section][at..end].iter_mut().for_each(|byte| *byte |= EXCEPTED);
                length += instruction.len() as u64;
                at = end;
                match instruction.op0_kind() {
                    OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64 => {
                        pending.push(self.linked(instruction.near_branch_target(), start));
                    }
                    OpKind::FarBranch32 if bits == 32 => {
                        let target = instruction.far_branch32().into();
                        self.queue.push(self.linked(target, start));
                    }
                    _ => {}
                }
                if ends(&instruction) {
                    break;
                }
            }
        }
        self.excepted(entry, length, reason);
    }

    /// Resolves an address in code without paging, whose instructions lack the upper half, near
    /// another address of the image.
    fn linked(&self, target: u64, near: u64) -> u64 {
        let virtual_address = near & !u64::from(u32::MAX) | target & u64::from(u32::MAX);
        let moved = self.image.virtual_address(target).unwrap_or(virtual_address);
        if self.find(virtual_address).is_some() { virtual_address } else { moved }
    }

    // 64-bit code.

    fn decode_all(&mut self) {
        let mut starts: Vec<u64> =
            self.image.sections.iter().map(|section| section.address).collect();
        starts.extend(self.image.symbols.iter().map(|symbol| symbol.address));
        starts.extend(self.sites.iter().flat_map(|site| [site.address, site.end()]));
        starts.extend(&self.image.referred);
        starts.sort_unstable();
        starts.dedup();
        for start in starts {
            self.queue.push(start);
            while let Some(start) = self.queue.pop() {
                self.decode(start);
            }
        }
        for section in 0..self.maps.len() {
            self.judge_rest(section);
        }
    }

    /// Decodes from an address until it reaches bytes that are decoded or excepted.
    fn decode(&mut self, start: u64) {
        let Some((section, mut at)) = self.find(start) else { return };
        while at < self.maps[section].len() && self.maps[section][at] & (START | EXCEPTED) == 0 {
            let Some(instruction) = self.instruction(section, at, 64) else { return };
            let filler = matches!(instruction.mnemonic(), Mnemonic::Nop | Mnemonic::Int3)
                || self.image.sections[section].data[at..].starts_with(&[0, 0]);
            let counted = !filler && site_at(self.sites, instruction.ip()).is_none();
            let end = at + instruction.len();
            self.maps[section][at] |= START;
            for byte in &mut self.maps[section][at..end] {
                *byte |= INSIDE | if counted { CODE } else { 0 };
            }
            self.judge(section, &instruction);
            if instruction.op0_kind() == OpKind::NearBranch64 {
                self.queue.push(instruction.near_branch_target());
            }
            at = end;
        }
    }

    /// Reports a sensitive instruction that no site covers.
    fn judge(&mut self, section: usize, instruction: &Instruction) {
        let Some(kind) = machine::kind(instruction) else { return };
        if self.is_covered(section, instruction) {
            return;
        }
        let address = instruction.ip();
        self.report.missed.push(Missed {
            address,
            kind: kind.name(),
            section: self.image.sections[section].name.to_owned(),
            function: self.image.describe(address),
        });
    }

    /// Returns true if an instruction is not sensitive, or is the instruction of a site. An
    /// instruction that an alternative may overwrite need not be rewritten if it traps.
    fn is_covered(&self, section: usize, instruction: &Instruction) -> bool {
        let Some(kind) = machine::kind(instruction) else { return true };
        let address = instruction.ip();
        let replacement = self.image.sections[section].name.starts_with(".altinstr_replacement");
        let original = || kind.traps() && is_within(self.originals, address);
        site_at(self.sites, address).is_some_and(|site| {
            address < site.address + u64::from(site.length)
                && (!site.flags.contains(Flags::RECORD_ONLY) || replacement || original())
        })
    }

    /// Checks the bytes that decoding did not reach.
    fn judge_rest(&mut self, section: usize) {
        let mut at = 0;
        while at < self.maps[section].len() {
            let length = self.maps[section][at..].iter().take_while(|byte| **byte == 0).count();
            if length == 0 {
                at += 1;
                continue;
            }
            let sensitive = (at..at + length).any(|at| {
                self.instruction(section, at, 64)
                    .is_some_and(|instruction| !self.is_covered(section, &instruction))
            });
            let address = self.image.sections[section].address + at as u64;
            match sensitive {
                true => self.report.unjudged.push(Region {
                    address,
                    length: length as u64,
                    function: self.image.describe(address),
                    reason: "not reachable from a known address, but may contain sensitive instructions",
                }),
                false => self.report.text.undecoded += length as u64,
            }
            at += length;
        }
    }

    fn count(&mut self) {
        self.report.missed.sort_by_key(|missed| missed.address);
        let code = self.maps.iter().flatten().filter(|byte| **byte & CODE != 0).count();
        self.report.text.code += code as u64;
        for site in self.sites {
            let Some(bytes) = self.image.bytes(site.address, site.padded.into()) else { continue };
            if self.find(site.address).is_none() {
                continue;
            }
            let prefixes = match site.padded - site.length {
                0 => bytes.iter().take_while(|&&byte| byte == machine::CS).count() as u64,
                _ => 0,
            };
            self.report.text.code += u64::from(site.length) - prefixes;
            self.report.text.pads += u64::from(site.padded - site.length) + prefixes;
        }
    }

    // Places.

    /// Section and offset of an address that is checked.
    fn find(&self, address: u64) -> Option<(usize, usize)> {
        (0..self.maps.len()).find_map(|section| Some((section, self.offset(address, section)?)))
    }

    /// The offset of an address in a section; `None` outside of it or if the section is not
    /// checked.
    fn offset(&self, address: u64, section: usize) -> Option<usize> {
        let offset = address.checked_sub(self.image.sections[section].address)?;
        usize::try_from(offset).ok().filter(|offset| *offset < self.maps[section].len())
    }

    /// The instruction at an offset; `None` if the bytes are invalid.
    fn instruction(&self, section: usize, at: usize, bits: u32) -> Option<Instruction> {
        let section = &self.image.sections[section];
        let bytes = &section.data[at..section.data.len().min(at + LONGEST)];
        let address = section.address + at as u64;
        let instruction = Decoder::with_ip(bits, bytes, address, DecoderOptions::NONE).decode();
        (!instruction.is_invalid()).then_some(instruction)
    }
}

/// Longest instruction (APM vol. 3, 1.2).
const LONGEST: usize = 15;

/// Returns true if execution does not continue after an instruction.
fn ends(instruction: &Instruction) -> bool {
    let far = matches!(instruction.code(), Code::Jmp_ptr1616 | Code::Jmp_ptr1632);
    far || matches!(
        instruction.flow_control(),
        FlowControl::UnconditionalBranch
            | FlowControl::IndirectBranch
            | FlowControl::Return
            | FlowControl::Exception
    )
}

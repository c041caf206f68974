//! The new text: the old text with insertions.

use super::text::text_of;
use super::{Pad, Rewriter, Rewritten};
use crate::machine::CS;
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::ops::Range;
use wedge_sites::{Flags, Kind, SITES_SECTION};

/// A change of the text.
pub(super) struct Edit {
    pub(super) at: usize,
    pub(super) what: What,
}

/// Kinds of edits, in their order at the same position.
pub(super) enum What {
    /// After a site's last instruction; with flags for a site in a macro, and for padding by
    /// prefixes.
    End { kind: Kind, flags: Flags, in_macro: bool, prefixed: bool },
    /// As `End`, for the mnemonic that the macro's parameter expands to.
    EndUnknown(Range<usize>, Flags),
    /// A comma between two instructions in a list of bytes.
    Separate(usize),
    /// A site without instruction.
    Marker(Kind),
    /// Enables or disables padding in macros expanded from here on.
    Only(bool),
    /// Before a site's first instruction; as `End`.
    Begin { prefixed: bool },
    /// A directive for bytes that `Separate` cut from theirs.
    Bytes,
}

impl What {
    /// Order at the same place.
    pub(super) fn rank(&self) -> u8 {
        match self {
            Self::End { .. } | Self::EndUnknown(..) | Self::Only(false) => 0,
            Self::Separate(_) => 1,
            Self::Marker(_) | Self::Only(true) => 2,
            Self::Begin { .. } => 3,
            Self::Bytes => 4,
        }
    }
}

impl Rewriter<'_> {
    /// Builds the new text.
    pub(super) fn finish(mut self) -> Rewritten {
        let mut result =
            Rewritten { text: None, padded: BTreeMap::new(), recorded: BTreeMap::new() };
        if self.edits.is_empty() {
            return result;
        }
        self.edits.sort_by_key(|edit| (edit.at, edit.what.rank()));
        let mut out = Vec::with_capacity(self.text.len() + self.edits.len() * 200);
        let dynamic = self.edits.iter().any(|edit| matches!(edit.what, What::EndUnknown(..)));
        let macros = dynamic.then_some((&self.passed, self.pad));
        prelude(&mut out, macros, self.conditional, self.text);
        let mut done = 0;
        for edit in &self.edits {
            out.extend_from_slice(&self.text[done..edit.at.max(done)]);
            done = edit.at.max(done);
            if let What::Separate(end) = edit.what {
                done = end;
            }
            self.insert(&edit.what, &mut out, &mut result);
        }
        out.extend_from_slice(&self.text[done..]);
        result.text = Some(out);
        result
    }

    /// Appends the text of an edit, and counts its sites.
    fn insert(&self, what: &What, out: &mut Vec<u8>, result: &mut Rewritten) {
        match what {
            What::Begin { prefixed } => {
                out.extend_from_slice(b"97710:");
                if *prefixed {
                    let length = format!("({}-(97711f-97709f))", self.pad.0);
                    let text = format!(".skip -({length}>0)*{length},{CS};97709:");
                    out.extend_from_slice(text.as_bytes());
                }
            }
            What::Bytes => out.extend_from_slice(b".byte "),
            What::Separate(_) => out.push(b';'),
            What::Marker(kind) => {
                out.extend_from_slice(b"97710:");
                record(out, *kind, Flags::NONE, Some(self.pad), false);
                out.push(b' ');
                *result.padded.entry(*kind).or_default() += 1;
            }
            What::Only(only) => {
                let (before, after) = if *only { ("", ";") } else { (";", "") };
                let text = format!("{before}.set .Lparador_only,{}{after}", u8::from(*only));
                out.extend_from_slice(text.as_bytes());
            }
            What::End { kind, flags, in_macro, prefixed } => {
                let pad = (!prefixed).then_some(self.pad);
                record(out, *kind, *flags, pad, self.conditional && *in_macro);
                let counts = match flags.contains(Flags::RECORD_ONLY) {
                    true => &mut result.recorded,
                    false => &mut result.padded,
                };
                *counts.entry(*kind).or_default() += 1;
            }
            What::EndUnknown(name, flags) => {
                let name = text_of(&self.text[name.clone()]);
                let only = if self.conditional { "|.Lparador_only" } else { "" };
                let text = format!(";97711:parador_site \"{name}\",{}{only}", flags.bits());
                out.extend_from_slice(text.as_bytes());
                *result.padded.entry(Kind::Other).or_default() += 1;
            }
        }
    }
}

/// Text before everything else: sections keep the attributes of their first declaration, and
/// insertions in strings must not contain quotes.
pub(super) fn prelude(
    out: &mut Vec<u8>,
    dynamic: Option<(&BTreeMap<&str, Kind>, Pad)>,
    conditional: bool,
    text: &[u8],
) {
    let mut prelude = format!(".pushsection {SITES_SECTION},\"a\",@progbits;.popsection;");
    if conditional {
        prelude.push_str(".set .Lparador_only,0;");
    }
    if let Some((passed, pad)) = dynamic {
        prelude.push('\n');
        // Cannot fail: writing to a `String` is infallible.
        let _ = dynamic_macro(&mut prelude, passed, pad);
    }
    // Comments and line markers are recognized only at the start of a line.
    let first = text.iter().find(|byte| !matches!(byte, b' ' | b'\t'));
    if matches!(first, Some(b'#' | b'/')) {
        prelude.push('\n');
    }
    out.extend_from_slice(prelude.as_bytes());
}

/// Writes a macro that finds the kind of a mnemonic at its expansion, and records a site if there
/// is one.
pub(super) fn dynamic_macro(
    out: &mut String,
    passed: &BTreeMap<&str, Kind>,
    pad: Pad,
) -> fmt::Result {
    writeln!(out, ".macro parador_site name,flags\n.set .Lparador_kind,255")?;
    for (name, &kind) in passed {
        writeln!(out, ".ifeqs \"\\name\",\"{name}\"")?;
        writeln!(out, ".set .Lparador_kind,{}\n.set .Lparador_pad,{}", kind.number(), pad.0)?;
        writeln!(out, ".endif")?;
    }
    writeln!(out, ".if .Lparador_kind-255\n.if (\\flags)&1\n97712:\n.else")?;
    writeln!(
        out,
        ".nops -((.Lparador_pad-(97711b-97710b))>0)*(.Lparador_pad-(97711b-97710b))\n97712:\n.endif"
    )?;
    writeln!(out, ".pushsection {SITES_SECTION}\n.long 97710b-.")?;
    writeln!(out, ".byte 97711b-97710b,97712b-97710b,.Lparador_kind,\\flags")?;
    writeln!(out, ".popsection\n.endif\n.endm")
}

/// Writes the pad, if the site has one there, and the record after a site's last instruction.
/// `conditional`: the expansion decides on the pad.
pub(super) fn record(
    out: &mut Vec<u8>,
    kind: Kind,
    flags: Flags,
    pad: Option<Pad>,
    conditional: bool,
) {
    let (number, bits) = (kind.number(), flags.bits());
    let (end, pad) = match pad.filter(|_| !flags.contains(Flags::RECORD_ONLY)) {
        None => ("97711b", String::new()),
        Some(Pad(pad)) => {
            let times = if conditional { "*(1-.Lparador_only)" } else { "" };
            let nops =
                format!(".nops -(({pad}-(97711b-97710b))>0)*({pad}-(97711b-97710b)){times};97712:");
            ("97712b", nops)
        }
    };
    let only = if conditional { "|.Lparador_only" } else { "" };
    let text = format!(
        ";97711:{pad}.pushsection {SITES_SECTION};.long 97710b-.;\
         .byte 97711b-97710b,{end}-97710b,{number},{bits}{only};.popsection"
    );
    out.extend_from_slice(text.as_bytes());
}

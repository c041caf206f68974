//! Instructions written as bytes: `.byte 0x0f, 0x01, 0xca`, possibly across several statements.

use crate::machine;
use iced_x86::{Decoder, DecoderError, DecoderOptions};
use std::ops::Range;
use wedge_sites::Kind;

/// Consecutive bytes, as written in the text.
#[derive(Default)]
pub struct Run {
    elements: Vec<Element>,
}

/// One byte, or several of unknown value.
struct Element {
    /// The operand in the text.
    text: Range<usize>,
    /// Position of the directive of the statement that contains it.
    statement: usize,
    /// The value, if known.
    value: Option<u8>,
    /// Number of bytes: 1 if the value is known.
    width: usize,
}

/// The decoded run.
#[derive(PartialEq, Eq, Default, Debug)]
pub struct Meaning {
    /// The instructions, if one of them is sensitive.
    pub items: Vec<Item>,
    /// Start of the prefixes that belong to the next instruction.
    pub prefix: Option<usize>,
}

/// An instruction of a run.
#[derive(PartialEq, Eq, Debug)]
pub struct Item {
    /// Range in the text: from its directive, or its first operand, to the end of its last operand.
    pub text: Range<usize>,
    /// The comma between it and an instruction before it in the same statement.
    pub comma: Option<Range<usize>>,
    /// The kind, if it is sensitive.
    pub kind: Option<Kind>,
}

/// Longer runs are treated as data, whatever they decode to: tables and texts in code sections.
const LONGEST_RUN: usize = 16;

impl Run {
    /// Returns true if no bytes are collected.
    pub fn is_empty(&self) -> bool {
        self.elements.is_empty()
    }

    /// Adds the operands of a directive whose elements have `width` bytes.
    pub fn add(&mut self, text: &[u8], statement: usize, operands: Range<usize>, width: usize) {
        let mut start = operands.start;
        for operand in text[operands].split(|&byte| byte == b',') {
            let end = start + operand.len();
            let lead = operand.len() - operand.trim_ascii_start().len();
            let trimmed = start + lead..start + lead + operand.trim_ascii().len();
            let value = (width == 1).then(|| number(&text[trimmed.clone()])).flatten();
            if self.elements.len() <= LONGEST_RUN {
                self.elements.push(Element { text: trimmed, statement, value, width });
            }
            start = end + 1;
        }
    }

    /// Decodes the collected bytes. `in_front` is true if an instruction follows, so that the last
    /// bytes may be its prefix.
    pub fn take(&mut self, in_front: bool) -> Meaning {
        let elements = std::mem::take(&mut self.elements);
        let known = |element: &Element| element.value;
        // Almost every file has `ud2`.
        if elements.iter().map_while(known).eq([0x0f, 0x0b]) || width(&elements) > LONGEST_RUN {
            return Meaning::default();
        }
        let mut meaning = Meaning::default();
        let mut rest = &elements[..];
        while let Some(first) = rest.first() {
            let statement =
                rest.iter().take_while(|element| element.statement == first.statement).count();
            let taken = match instructions(rest) {
                Some((taken, items)) => {
                    meaning.items.extend(items);
                    taken
                }
                None if in_front
                    && rest.iter().all(|element| element.value.is_some_and(is_prefix)) =>
                {
                    meaning.prefix = Some(first.statement);
                    break;
                }
                // Data: the bytes after it may still be code.
                None => statement,
            };
            rest = &rest[taken..];
        }
        if meaning.items.iter().all(|item| item.kind.is_none()) {
            meaning.items.clear();
        }
        meaning
    }
}

fn width(elements: &[Element]) -> usize {
    elements.iter().map(|element| element.width).sum()
}

/// Instructions that begin and end with statements, and their number of elements.
fn instructions(elements: &[Element]) -> Option<(usize, Vec<Item>)> {
    elements.first()?.value?;
    let mut bytes = Vec::new();
    // The element that each byte belongs to.
    let mut owner = Vec::new();
    for (index, element) in elements.iter().enumerate() {
        bytes.extend(std::iter::repeat_n(element.value.unwrap_or(0), element.width));
        owner.extend(std::iter::repeat_n(index, element.width));
    }
    owner.push(elements.len());
    let mut decoder = Decoder::new(64, &bytes, DecoderOptions::NONE);
    let mut items = Vec::new();
    loop {
        let first = owner[decoder.position()];
        let instruction = decoder.decode();
        let next = owner[decoder.position()];
        let last = next.checked_sub(1)?;
        let splits = owner[decoder.position() - 1] != last;
        if decoder.last_error() != DecoderError::None || splits {
            return None;
        }
        let new_statement = |index: usize| {
            index == 0
                || elements
                    .get(index)
                    .is_none_or(|element| element.statement != elements[index - 1].statement)
        };
        let (start, comma) = match new_statement(first) {
            true => (elements[first].statement, None),
            false => {
                let start = elements[first].text.start;
                (start, Some(elements[first - 1].text.end..start))
            }
        };
        items.push(Item {
            text: start..elements[last].text.end,
            comma,
            kind: machine::kind(&instruction),
        });
        if new_statement(next) {
            return Some((next, items));
        }
    }
}

/// Legacy and REX prefixes (APM vol. 3, 1.2).
fn is_prefix(byte: u8) -> bool {
    matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0x40..=0x4f | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3)
}

/// Parses a literal: decimal, 0x, 0b, octal, `'c`, with a sign.
fn number(text: &[u8]) -> Option<u8> {
    let text = str::from_utf8(text).ok()?;
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits.trim_start()),
        None => (false, text),
    };
    let lower = digits.to_ascii_lowercase();
    let value = if let Some(hex) = lower.strip_prefix("0x") {
        i64::from_str_radix(hex, 16).ok()?
    } else if let Some(binary) = lower.strip_prefix("0b") {
        i64::from_str_radix(binary, 2).ok()?
    } else if let [b'\'', character] | [b'\'', character, b'\''] = digits.as_bytes() {
        i64::from(*character)
    } else if lower.len() > 1 && lower.starts_with('0') {
        i64::from_str_radix(&lower, 8).ok()?
    } else {
        lower.parse().ok()?
    };
    // The assembler truncates larger values, too.
    let value = if negative { value.wrapping_neg() } else { value };
    Some(value.to_le_bytes()[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(statements: &[&str], in_front: bool) -> Meaning {
        let mut run = Run::default();
        let mut text = String::new();
        for statement in statements {
            let start = text.len();
            text.push_str(statement);
            run.add(text.as_bytes(), start, start..text.len(), 1);
        }
        run.take(in_front)
    }

    #[test]
    fn literals() {
        for (text, value) in [
            ("0x0f", 15),
            ("0XCA", 0xca),
            ("15", 15),
            ("017", 15),
            ("0b11", 3),
            ("'a'", b'a'),
            ("-1", 255),
        ] {
            assert_eq!(number(text.as_bytes()), Some(value), "{text}");
        }
        for text in ["", "x", "1+1", "\\op", "0x", "661b-662b"] {
            assert_eq!(number(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn kinds() {
        let kinds = |statements: &[&str], in_front| {
            let meaning = run(statements, in_front);
            let kinds: Vec<_> = meaning.items.iter().map(|item| item.kind).collect();
            (kinds, meaning.prefix)
        };
        let (stac, clac) = (Some(Kind::Stac), Some(Kind::Clac));
        assert_eq!(kinds(&["0x0f,0x01,0xca"], false), (vec![clac], None));
        assert_eq!(kinds(&["0x0f", "0x01, 0xcb"], true), (vec![stac], None));
        assert_eq!(kinds(&["0x90, 0xfa"], false), (vec![None, Some(Kind::Cli)], None));
        assert_eq!(
            kinds(&["0x66,0x0f,0x38,0x82,\\modrm"], false),
            (vec![Some(Kind::Invpcid)], None)
        );
        assert_eq!(kinds(&["0x0f, 0x0b"], false), (vec![], None));
        assert_eq!(kinds(&["0x0f, 0x0b", "0xf4"], false), (vec![None, Some(Kind::Hlt)], None));
        assert_eq!(kinds(&["0xf3"], true), (vec![], Some(0)));
        assert_eq!(kinds(&["0xf3"], false), (vec![], None));
        assert_eq!(kinds(&["0xf4", "0xf3"], true), (vec![Some(Kind::Hlt)], Some(4)));
        assert_eq!(kinds(&["0xff, 0xff", "0xf4"], false), (vec![Some(Kind::Hlt)], None));
        assert_eq!(kinds(&["0xf4, 0x0f"], false), (vec![], None));
        let letters = "80,111,108,121,49,51,48,53,32,102,111";
        assert_eq!(kinds(&[letters, letters], false), (vec![], None));
    }
}

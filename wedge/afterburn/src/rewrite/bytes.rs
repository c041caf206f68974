//! Instructions written as bytes: `.byte 0x0f, 0x01, 0xca`, perhaps over several statements.

use crate::machine;
use iced_x86::{Decoder, DecoderError, DecoderOptions};
use std::ops::Range;
use wedge_sites::Kind;

/// Bytes that follow each other, as the text has them.
#[derive(Default)]
pub struct Run {
    elements: Vec<Element>,
}

/// One byte, or several that are not known.
struct Element {
    /// The operand in the text.
    text: Range<usize>,
    /// The statement that it is in: place of its directive.
    statement: usize,
    /// Known value.
    value: Option<u8>,
    /// Bytes: 1 if the value is known.
    width: usize,
}

/// What a run turned out to be.
#[derive(PartialEq, Eq, Debug)]
pub enum Meaning {
    /// Data, or instructions that are not sensitive.
    Nothing,
    /// Prefixes of the instruction that follows.
    Prefixes,
    /// Instructions, at least one of them sensitive.
    Instructions(Vec<Item>),
}

/// An instruction of a run.
#[derive(PartialEq, Eq, Debug)]
pub struct Item {
    /// Its operands in the text, from the first to the end of the last.
    pub text: Range<usize>,
    /// Place of the directive if the instruction begins with the statement.
    pub statement: Option<usize>,
    /// Whether it is the last of its statement.
    pub ends_statement: bool,
    /// Kind, if it is sensitive.
    pub kind: Option<Kind>,
}

/// Longer runs are taken for data, whatever they decode to: tables and texts in code sections.
const LONGEST_RUN: usize = 20;

impl Run {
    /// Whether there is anything.
    pub fn is_empty(&self) -> bool {
        self.elements.is_empty()
    }

    /// Place of the first directive.
    pub fn start(&self) -> Option<usize> {
        Some(self.elements.first()?.statement)
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

    /// Takes the run apart. `in_front` says that an instruction follows, so that it may be a prefix.
    pub fn take(&mut self, in_front: bool) -> Meaning {
        let elements = std::mem::take(&mut self.elements);
        let meaning = meaning(&elements, in_front);
        self.elements = elements;
        self.elements.clear();
        meaning
    }
}

fn meaning(elements: &[Element], in_front: bool) -> Meaning {
    let bytes: Vec<u8> = elements
        .iter()
        .flat_map(|element| std::iter::repeat_n(element.value.unwrap_or(0), element.width))
        .collect();
    if bytes.len() > LONGEST_RUN || elements.first().is_none_or(|first| first.value.is_none()) {
        return Meaning::Nothing;
    }
    // `ud2` is in almost every file.
    if bytes.starts_with(&[0x0f, 0x0b]) {
        return Meaning::Nothing;
    }
    if in_front && elements.iter().all(|element| element.value.is_some_and(is_prefix)) {
        return Meaning::Prefixes;
    }
    // Where each byte's element is.
    let owner: Vec<usize> = (0..elements.len())
        .flat_map(|index| std::iter::repeat_n(index, elements[index].width))
        .collect();
    let mut decoder = Decoder::new(64, &bytes, DecoderOptions::NONE);
    let mut items = Vec::new();
    while decoder.can_decode() {
        let start = decoder.position();
        let instruction = decoder.decode();
        let end = decoder.position();
        let whole = end == bytes.len() || owner[end] != owner[end - 1];
        if decoder.last_error() != DecoderError::None || !whole {
            return Meaning::Nothing;
        }
        let (first, last) = (owner[start], owner[end - 1]);
        let begins = first == 0 || elements[first - 1].statement != elements[first].statement;
        let ends =
            elements.get(last + 1).is_none_or(|next| next.statement != elements[last].statement);
        items.push(Item {
            text: elements[first].text.start..elements[last].text.end,
            statement: begins.then_some(elements[first].statement),
            ends_statement: ends,
            kind: machine::kind(&instruction),
        });
    }
    match items.iter().any(|item| item.kind.is_some()) {
        true => Meaning::Instructions(items),
        false => Meaning::Nothing,
    }
}

/// Legacy and REX prefixes (APM vol. 3, 1.2).
fn is_prefix(byte: u8) -> bool {
    matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0x40..=0x4f | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3)
}

/// A literal: decimal, 0x, 0b, octal, `'c`, with a sign.
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
    // What does not fit is cut off, as the assembler does.
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
        let kinds = |meaning| match meaning {
            Meaning::Instructions(items) => items.iter().map(|item| item.kind).collect::<Vec<_>>(),
            _ => Vec::new(),
        };
        assert_eq!(kinds(run(&["0x0f,0x01,0xca"], false)), [Some(Kind::Clac)]);
        assert_eq!(kinds(run(&["0x0f", "0x01, 0xc9"], true)), [Some(Kind::Mwait)]);
        assert_eq!(
            kinds(run(&["0x90, 0xfa, 0xfb"], false)),
            [None, Some(Kind::Cli), Some(Kind::Sti)]
        );
        assert_eq!(kinds(run(&["0x66,0x0f,0x38,0x82,\\modrm"], false)), [Some(Kind::Invpcid)]);
        assert_eq!(run(&["0x0f, 0x0b"], false), Meaning::Nothing);
        assert_eq!(run(&["0xf3"], true), Meaning::Prefixes);
        assert_eq!(run(&["0xf3"], false), Meaning::Nothing);
        assert_eq!(
            run(&["80,111,108,121,49,51,48,53,32,102,111,114,32,120,56,54,95,54,52,44"; 2], false),
            Meaning::Nothing
        );
    }
}

//! Pieces of a statement.

use std::borrow::Cow;

/// A statement without its labels.
pub(super) struct Statement<'s> {
    /// With labels, without comments.
    pub(super) body: &'s [u8],
    /// Place of `body` in the text.
    pub(super) place: usize,
    /// Place of the first character after the labels.
    pub(super) start: usize,
    /// Place of its end.
    pub(super) end: usize,
    /// Mnemonic, directive or macro.
    pub(super) name: &'s [u8],
    pub(super) operands: &'s [u8],
    pub(super) operands_at: usize,
}

/// The end of the label at `at`: after its colon.
pub(super) fn label(body: &[u8], at: usize) -> Option<usize> {
    let end = match body.get(at)? {
        b'"' => crate::lexer::string_end(body, at)?,
        _ => at + label_name(&body[at..]),
    };
    let colon = end + blanks(&body[end..]);
    (end > at && body.get(colon) == Some(&b':')).then_some(colon + 1)
}

pub(super) fn label_name(text: &[u8]) -> usize {
    let mut at = 0;
    while let Some(byte) = text.get(at) {
        match byte {
            b'\\' if text[at..].starts_with(b"\\()") => at += 3,
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'$' | b'\\' | b'@' => at += 1,
            128.. => at += 1,
            _ => break,
        }
    }
    at
}

/// Length of the mnemonic or directive that the text begins with.
pub(super) fn word(text: &[u8]) -> usize {
    let mut at = 0;
    while let Some(byte) = text.get(at) {
        match byte {
            b'\\' if text[at..].starts_with(b"\\()") => at += 3,
            b'\\' if text.get(at + 1) == Some(&b'@') => at += 2,
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'$' | b'\\' => {
                // `push$5`: the dollar sign begins an operand.
                if *byte == b'$' && at > 0 && text[0] != b'.' && !text[..at].contains(&b'\\') {
                    break;
                }
                at += 1;
            }
            128.. => at += 1,
            _ => break,
        }
    }
    at
}

pub(super) fn blanks(text: &[u8]) -> usize {
    text.iter().take_while(|byte| matches!(byte, b' ' | b'\t' | b'\r' | 0x0c)).count()
}

pub(super) fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    text.windows(what.len()).position(|window| window == what)
}

pub(super) fn text_of(text: &[u8]) -> String {
    String::from_utf8_lossy(text).into_owned()
}

/// The name in lower case: the assembler ignores the case of directives and macros.
pub(super) fn lowered(name: &[u8]) -> Cow<'_, [u8]> {
    match name.iter().any(u8::is_ascii_uppercase) {
        true => Cow::Owned(name.to_ascii_lowercase()),
        false => Cow::Borrowed(name),
    }
}

/// The offset of `part`, a slice of `whole`.
pub(super) fn offset(whole: &[u8], part: &[u8]) -> usize {
    part.as_ptr().addr() - whole.as_ptr().addr()
}

/// Replaces the comments of a statement by blanks of the same length.
pub(super) fn blank_comments(statement: &[u8]) -> Vec<u8> {
    let mut out = statement.to_vec();
    let mut at = 0;
    while at < out.len() {
        match out[at] {
            b'"' => at = crate::lexer::string_end(&out, at).unwrap_or(out.len()),
            b'\'' => at += 2,
            b'/' if out.get(at + 1) == Some(&b'*') => {
                let length = find(&out[at + 2..], b"*/").map_or(out.len() - at, |found| found + 4);
                out[at..at + length].fill(b' ');
                at += length;
            }
            _ => at += 1,
        }
    }
    out
}

//! Macros of the text: their use of arguments ("Using as", 7: `.macro`).

use super::section::{Change, Section};
use std::collections::HashMap;
use std::ops::Range;

/// A macro, as far as its body has been read.
#[derive(Clone, Default, Debug)]
pub struct Macro {
    /// Names of its parameters.
    pub parameters: Vec<Vec<u8>>,
    /// Sections in which it inserts parameters that are statements of their own.
    pub uses: HashMap<Vec<u8>, Section>,
    /// Changes of section that affect the text after its call.
    pub changes: Vec<Change>,
    /// True if it has sensitive instructions, or calls macros that have.
    pub has_sites: bool,
    /// True if it has a `mov`, `push` or `pop` with a parameter as an operand, so that a register
    /// could make it sensitive.
    pub moves_parameter: bool,
}

impl Macro {
    /// Parses the operands of `.macro`, without the name.
    pub fn new(operands: &[u8]) -> Self {
        let parameters = arguments(operands)
            .map(|range| {
                let word = &operands[range];
                let end =
                    word.iter().position(|byte| matches!(byte, b':' | b'=')).unwrap_or(word.len());
                word[..end].to_owned()
            })
            .collect();
        Self { parameters, ..Self::default() }
    }

    /// Records that a parameter is used in `section`.
    pub fn used(&mut self, parameter: &[u8], section: Section) {
        let use_of = self.uses.entry(parameter.to_owned()).or_insert(section);
        if *use_of != section {
            *use_of = Section::Unclear;
        }
    }

    /// Merges the properties of another macro with the same name.
    pub fn merge(&mut self, other: &Self) {
        for (parameter, section) in &other.uses {
            self.used(parameter, *section);
        }
        self.has_sites |= other.has_sites;
        self.moves_parameter |= other.moves_parameter;
    }

    /// The section that receives argument `index`, or the argument given as `name=`.
    pub fn section_of(&self, index: usize, name: Option<&[u8]>) -> Section {
        let parameter = name.or(self.parameters.get(index).map(Vec::as_slice));
        parameter.and_then(|name| self.uses.get(name)).copied().unwrap_or(Section::Unclear)
    }

    /// Returns true if the macro has this parameter.
    pub fn has(&self, parameter: &[u8]) -> bool {
        self.parameters.iter().any(|name| name == parameter)
    }
}

/// Ranges of the arguments of a call: separated by commas or blanks, outside quotes and
/// parentheses.
pub fn arguments(operands: &[u8]) -> impl Iterator<Item = Range<usize>> {
    let mut list = Vec::new();
    let mut at = 0;
    let mut start = None;
    let mut depth = 0_usize;
    while at < operands.len() {
        match operands[at] {
            b'"' => {
                start = start.or(Some(at));
                // The lexer has checked that the string ends.
                at = crate::lexer::string_end(operands, at).unwrap_or(operands.len());
                continue;
            }
            b',' | b' ' | b'\t' if depth == 0 => list.extend(start.take().map(|start| start..at)),
            byte => {
                start = start.or(Some(at));
                match byte {
                    b'(' => depth += 1,
                    b')' => depth = depth.saturating_sub(1),
                    _ => {}
                }
            }
        }
        at += 1;
    }
    list.extend(start.map(|start| start..operands.len()));
    list.into_iter()
}

/// The parameter in a text that is a single reference: `\name` or `\name\()`.
pub fn reference(text: &[u8]) -> Option<&[u8]> {
    let name = text.strip_prefix(b"\\")?;
    let name = name.strip_suffix(b"\\()").unwrap_or(name);
    let word = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'$');
    (!name.is_empty() && name.iter().all(word)).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(text: &str) -> Vec<&str> {
        arguments(text.as_bytes()).map(|range| &text[range]).collect()
    }

    #[test]
    fn arguments_of_calls() {
        assert_eq!(split("a, b c"), ["a", "b", "c"]);
        assert_eq!(split("\"cli; hlt\", ( 3*32+ 1)"), ["\"cli; hlt\"", "( 3*32+ 1)"]);
        assert_eq!(split("x=\"a, b\" y"), ["x=\"a, b\"", "y"]);
        assert_eq!(split("  "), [""; 0]);
    }

    #[test]
    fn parameters() {
        let found = Macro::new(b"a, b:req c=3, d:vararg");
        assert_eq!(found.parameters, [b"a", b"b", b"c", b"d"]);
        assert!(found.has(b"d") && !found.has(b"e"));
    }

    #[test]
    fn uses() {
        let mut found = Macro::new(b"a b");
        found.used(b"a", Section::Code);
        found.used(b"b", Section::Code);
        found.used(b"b", Section::Replacement);
        assert_eq!(found.section_of(0, None), Section::Code);
        assert_eq!(found.section_of(0, Some(b"b")), Section::Unclear);
        assert_eq!(found.section_of(2, None), Section::Unclear);
    }

    #[test]
    fn references() {
        assert_eq!(reference(b"\\op"), Some(&b"op"[..]));
        assert_eq!(reference(b"\\op\\()"), Some(&b"op"[..]));
        assert_eq!(reference(b"\\op\\()l"), None);
        assert_eq!(reference(b"op"), None);
    }
}

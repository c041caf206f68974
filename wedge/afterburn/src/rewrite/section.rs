//! The section of each statement ("Using as", 4 and 7: `.section`, `.pushsection`, `.previous`...).

use std::collections::HashMap;

/// The properties of a section that the rewriter needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Section {
    /// Instructions that execute in place. Also sections that are unknown inside of a macro.
    Code,
    /// Instructions that an alternative may overwrite.
    Replaced,
    /// Text that alternatives copy over instructions (Linux, `.altinstr_replacement`).
    Replacement,
    /// Data. An instruction in it is a template that is copied before execution.
    Data,
    /// Discarded by the linker; a reference to it would be an error.
    Discarded,
    /// A string that a macro inserts in an unknown section.
    Unclear,
}

/// A change of section.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// `.section`, `.text`...
    Set(Section),
    /// `.pushsection`
    Push(Section),
    /// `.popsection`
    Pop,
    /// `.previous`
    Previous,
}

/// Current section, previous one, and those below.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stack {
    current: Section,
    previous: Section,
    below: Vec<(Section, Section)>,
}

impl Default for Stack {
    fn default() -> Self {
        Self { current: Section::Code, previous: Section::Code, below: Vec::new() }
    }
}

impl Stack {
    /// The current section.
    pub fn current(&self) -> Section {
        self.current
    }

    /// Number of missing `.popsection`.
    pub fn depth(&self) -> usize {
        self.below.len()
    }

    /// Changes the section. Returns false if there is nothing to pop.
    pub fn apply(&mut self, change: Change) -> bool {
        match change {
            Change::Set(section) => (self.current, self.previous) = (section, self.current),
            Change::Push(section) => {
                self.below.push((self.current, self.previous));
                (self.current, self.previous) = (section, self.current);
            }
            Change::Previous => std::mem::swap(&mut self.current, &mut self.previous),
            Change::Pop => match self.below.pop() {
                Some((current, previous)) => (self.current, self.previous) = (current, previous),
                None => return false,
            },
        }
        true
    }
}

/// Returns true if the changes restore the section, whatever it was.
pub fn balanced(changes: &[Change]) -> bool {
    let mut depth = 0_usize;
    for change in changes {
        match change {
            Change::Push(_) => depth += 1,
            Change::Pop if depth > 0 => depth -= 1,
            Change::Set(_) | Change::Previous if depth > 0 => {}
            _ => return false,
        }
    }
    depth == 0
}

/// Sections by name. Only the first declaration gives attributes.
#[derive(Default)]
pub struct Names {
    known: HashMap<Vec<u8>, Section>,
}

impl Names {
    /// The section of a `.section` or `.pushsection` with these operands.
    pub fn section(&mut self, operands: &[u8]) -> Section {
        let mut parts = operands.split(|&byte| byte == b',').map(|part| part.trim_ascii());
        let name = unquote(parts.next().unwrap_or_default());
        let attributes = parts.next().filter(|part| part.starts_with(b"\""));
        let section = match attributes {
            _ if name.starts_with(b".altinstr_replacement") => Section::Replacement,
            _ if name.starts_with(b".discard") => Section::Discarded,
            Some(attributes) if attributes.contains(&b'x') => Section::Code,
            Some(_) => Section::Data,
            None => match self.known.get(name) {
                Some(&section) => section,
                None => by_name(name),
            },
        };
        self.known.insert(name.to_owned(), section);
        section
    }
}

fn by_name(name: &[u8]) -> Section {
    let code = name.starts_with(b".text")
        || name.ends_with(b".text")
        || matches!(name, b".init" | b".fini")
        // A macro's parameter.
        || name.contains(&b'\\');
    if code { Section::Code } else { Section::Data }
}

fn unquote(name: &[u8]) -> &[u8] {
    name.strip_prefix(b"\"").and_then(|name| name.strip_suffix(b"\"")).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let mut names = Names::default();
        let mut of = |operands: &str| names.section(operands.as_bytes());
        assert_eq!(of(".foo, \"ax\", @progbits"), Section::Code);
        assert_eq!(of(".foo"), Section::Code);
        assert_eq!(of(".rodata"), Section::Data);
        assert_eq!(of("\".init.text\",\"ax\""), Section::Code);
        assert_eq!(of(".noinstr.text"), Section::Code);
        assert_eq!(of(".altinstr_replacement, \"ax\""), Section::Replacement);
        assert_eq!(of(".discard.annotate"), Section::Discarded);
        assert_eq!(of("\\name"), Section::Code);
        assert_eq!(of("__ex_table,\"a\""), Section::Data);
    }

    #[test]
    fn the_stack() {
        let mut stack = Stack::default();
        assert!(stack.apply(Change::Set(Section::Data)));
        assert!(stack.apply(Change::Push(Section::Replacement)));
        assert_eq!(stack.current(), Section::Replacement);
        assert!(stack.apply(Change::Previous));
        assert_eq!(stack.current(), Section::Data);
        assert!(stack.apply(Change::Pop));
        assert!(stack.apply(Change::Previous));
        assert_eq!(stack.current(), Section::Code);
        assert!(!stack.apply(Change::Pop));
    }

    #[test]
    fn balance() {
        use Change::{Pop, Previous, Push, Set};
        assert!(balanced(&[Push(Section::Data), Set(Section::Code), Previous, Pop]));
        assert!(!balanced(&[Pop]));
        assert!(!balanced(&[Push(Section::Data)]));
        assert!(!balanced(&[Set(Section::Data), Previous]));
    }
}

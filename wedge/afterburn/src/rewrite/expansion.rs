//! Macros: their definitions, their calls, and decisions that depend on their expansion.

use super::flags::Watch;
use super::macros::{self, Macro};
use super::output::{Edit, What};
use super::section::{self, Section};
use super::text::{Statement, find, lowered, offset, text_of};
use super::{Class, Frame, Misunderstood, Mode, Rewriter, Step};
use crate::lexer::{Lexer, Token};
use crate::mnemonics;
use std::ops::Range;
use wedge_sites::Flags;

impl Rewriter<'_> {
    pub(super) fn is_parameter(&self, name: &[u8]) -> bool {
        self.alternate
            && matches!(self.frames.last(), Some(Frame::Macro { body, .. }) if body.has(name))
    }

    /// Marks every macro being defined as having a site. Returns true if there are such macros.
    pub(super) fn has_sites(&mut self) -> bool {
        let mut in_macro = false;
        for frame in &mut self.frames {
            if let Frame::Macro { body, .. } = frame {
                body.has_sites = true;
                in_macro = true;
            }
        }
        in_macro
    }

    /// Collects the words of a macro's arguments: they may be mnemonics, or their beginnings or
    /// ends.
    pub(super) fn pass(&mut self, arguments: &[u8]) -> Step {
        self.refuse_modes(arguments)?;
        for word in words(arguments).filter(|word| mnemonics::always_sensitive(word).is_some()) {
            let known = mnemonics::sensitive();
            let parts = known.filter(|(name, _)| {
                name.as_bytes().starts_with(word) || name.as_bytes().ends_with(word)
            });
            self.passed.extend(parts);
        }
        Ok(())
    }

    /// The macro being defined that has this parameter.
    pub(super) fn owner(&mut self, parameter: &[u8]) -> Option<&mut Macro> {
        self.frames.iter_mut().rev().find_map(|frame| match frame {
            Frame::Macro { body, .. } if body.has(parameter) => Some(body),
            _ => None,
        })
    }

    /// Processes a statement whose mnemonic is, or contains, a macro's parameter.
    pub(super) fn inserted(&mut self, statement: &Statement<'_>) -> Step {
        let name = statement.name;
        let whole = match statement.operands.is_empty() {
            true => macros::reference(name).or_else(|| self.is_parameter(name).then_some(name)),
            false => None,
        };
        let section = self.section();
        if let Some(parameter) = whole
            && let Some(body) = self.owner(parameter)
        {
            body.used(parameter, section);
        }
        self.settle_first()?;
        self.mnemonic_inserted = true;
        self.watch = Watch::Nothing;
        // `in\size`: the literal part limits the possible mnemonics.
        if let Some(at) = name.iter().position(|&byte| byte == b'\\').filter(|&at| at > 0) {
            let end = name.rsplit(|&byte| byte == b')').next().filter(|end| !end.contains(&b'\\'));
            self.passed.extend(mnemonics::completions(&name[..at], end.unwrap_or_default()));
        }
        let start = self.prefix.take().map_or(statement.start, |(start, _)| start);
        if !self.dynamic || self.string.is_some() {
            return Ok(());
        }
        if self.alternate {
            return Err(
                self.error("a sensitive mnemonic as a macro's argument, in `.altmacro` mode")
            );
        }
        self.has_sites();
        let flags = match section {
            Section::Code => Flags::NONE,
            _ => Flags::RECORD_ONLY,
        };
        let name_at = statement.place + offset(statement.body, name);
        self.edits.push(Edit { at: start, what: What::Begin { prefixed: false } });
        let what = What::EndUnknown(name_at..name_at + name.len(), flags);
        self.edits.push(Edit { at: statement.end, what });
        Ok(())
    }

    /// Checks operands inside of a macro: a parameter could make an instruction sensitive. Returns
    /// the class if the values of `.irp` decide it.
    pub(super) fn check_parameters(
        &mut self,
        statement: &Statement<'_>,
    ) -> Result<Option<Class>, Misunderstood> {
        let root =
            [&b"mov"[..], b"push", b"pop"].iter().any(|root| statement.name.starts_with(root));
        let from_outside = |operand: &[u8]| {
            macros::reference(operand.strip_prefix(b"%").unwrap_or(operand)).is_some()
        };
        if !root || !mnemonics::operand_list(statement.operands).any(from_outside) {
            return Ok(None);
        }
        let values = self.frames.iter().rev().find_map(|frame| match frame {
            Frame::Repeat { values } => Some(values.clone()),
            Frame::Macro { .. } => None,
        });
        if let Some(values) = values.filter(|values| names_register(&self.text[values.clone()])) {
            // With the same kind for each value, the instruction is of that kind.
            let mut words = macros::arguments(&self.text[values.clone()])
                .map(|word| &self.text[values.clone()][word]);
            let parameter = [b"\\", words.next().unwrap_or_default()].concat();
            let mut classes = words.map(|word| {
                mnemonics::class(statement.name, &replace(statement.operands, &parameter, word))
            });
            let class = classes.next().unwrap_or(Class::Other);
            if classes.any(|other| other != class) {
                return Err(self.error("sensitive registers and others as values of `.irp`"));
            }
            return Ok(Some(class));
        }
        for frame in &mut self.frames {
            if let Frame::Macro { body, .. } = frame {
                body.moves_parameter = true;
            }
        }
        Ok(None)
    }

    /// Processes the call of a macro.
    pub(super) fn call(&mut self, statement: &Statement<'_>, called: &Macro) -> Step {
        self.refuse_modes(statement.operands)?;
        self.settle()?;
        self.watch = Watch::Nothing;
        if self.mode == Mode::Long {
            let mut position = 0;
            for argument in macros::arguments(statement.operands) {
                let text = &statement.operands[argument.clone()];
                let name = text.iter().position(|&byte| byte == b'=').map(|at| &text[..at]);
                let name = name.filter(|name| called.has(name));
                let value = argument.start + name.map_or(0, |name| name.len() + 1)..argument.end;
                let section = called.section_of(position, name);
                position += usize::from(name.is_none());
                self.argument(statement, value, section, called)?;
            }
        }
        if called.has_sites {
            self.has_sites();
            let padded = matches!(self.section(), Section::Code | Section::Discarded);
            self.used_in_alternative |= !padded;
            if !padded && self.conditional {
                self.edits.push(Edit { at: statement.start, what: What::Only(true) });
                self.edits.push(Edit { at: statement.end, what: What::Only(false) });
            }
        }
        self.apply(&called.changes)
    }

    pub(super) fn argument(
        &mut self,
        statement: &Statement<'_>,
        range: Range<usize>,
        section: Section,
        called: &Macro,
    ) -> Step {
        let value = &statement.operands[range.clone()];
        let inner = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\""));
        if let Some(parameter) = macros::reference(inner.unwrap_or(value))
            && let Some(body) = self.owner(parameter)
        {
            if section != Section::Unclear {
                body.used(parameter, section);
            }
            body.moves_parameter |= called.moves_parameter;
            return Ok(());
        }
        if let Some(inner) = inner {
            let start = statement.operands_at + range.start + 1;
            return self.string(start..start + inner.len(), section);
        }
        if called.moves_parameter && names_register(value) {
            return Err(self.error(format!(
                "`{}` as an argument of a macro that moves it: write the instruction outside of the macro",
                text_of(value)
            )));
        }
        self.pass(value)
    }

    /// Processes statements in a string that a macro inserts in `section`.
    pub(super) fn string(&mut self, range: Range<usize>, section: Section) -> Step {
        // In nested strings the section of the inner macro's use applies.
        let outer = self.string.replace(section);
        let saved = (self.first.take(), self.prefix.take(), self.last.take());
        let mut lexer = Lexer::new(self.text, range);
        while let Some(token) = lexer.token().map_err(|what| self.unterminated(what))? {
            if let Token::Statement { range, commented } = token {
                self.statement(range, commented)?;
            }
        }
        self.settle()?;
        (self.first, self.prefix, self.last) = saved;
        self.string = outer;
        Ok(())
    }

    pub(super) fn macro_begins(&mut self, statement: &Statement<'_>) -> Step {
        self.settle()?;
        let operands = statement.operands;
        let end = operands
            .iter()
            .position(|byte| matches!(byte, b' ' | b'\t' | b','))
            .unwrap_or(operands.len());
        self.check_macro_name(&operands[..end])?;
        self.pass(&operands[end..])?;
        let sections = std::mem::take(&mut self.sections);
        self.frames.push(Frame::Macro {
            name: lowered(&operands[..end]).into_owned(),
            body: Macro::new(&operands[end..]),
            sections,
            mode: self.mode,
        });
        Ok(())
    }

    pub(super) fn macro_ends(&mut self) -> Step {
        self.settle()?;
        let Some(Frame::Macro { name, mut body, sections, mode }) = self.frames.pop() else {
            return Err(self.error("`.endm` without `.macro`"));
        };
        self.conditions_end();
        if section::balanced(&body.changes) {
            body.changes.clear();
        }
        self.sections = sections;
        self.mode = mode;
        self.define(name, body);
        Ok(())
    }
}

pub(super) fn words(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|byte| !(byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'%' | b'\\')))
}

/// Returns true if a word of a macro's arguments is a sensitive register.
pub(super) fn names_register(arguments: &[u8]) -> bool {
    words(arguments).any(mnemonics::is_sensitive_register)
}

/// Replaces each `from` in the text.
pub(super) fn replace(text: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = text;
    while let Some(at) = find(rest, from) {
        out.extend_from_slice(&rest[..at]);
        out.extend_from_slice(to);
        rest = &rest[at + from.len()..];
    }
    out.extend_from_slice(rest);
    out
}

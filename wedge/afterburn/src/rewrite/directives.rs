//! Directives of the assembler ("Using as", 7).

use super::conditional::{self, REGISTER_ALIAS, names_sensitive_register};
use super::flags::Watch;
use super::section::{Change, Section};
use super::text::{Statement, lowered};
use super::{Frame, Mode, Rewriter, Step};

impl Rewriter<'_> {
    pub(super) fn directive(&mut self, statement: &Statement<'_>) -> Step {
        let name = lowered(statement.name);
        let operands = statement.operands;
        if let Some(reason) = self.refusal(&name, operands) {
            return Err(self.error(reason));
        }
        match &*name {
            b".loc" | b".file" => self.tracker.directive(&name, operands),
            name if is_neutral(name) => {}
            b".byte" | b".dc.b" => return self.data(statement, 1),
            b".word" | b".value" | b".short" | b".hword" | b".2byte" => {
                return self.data(statement, 2);
            }
            b".long" | b".int" | b".4byte" => return self.data(statement, 4),
            b".quad" | b".8byte" => return self.data(statement, 8),
            b".macro" => return self.macro_begins(statement),
            b".endm" | b".endmacro" => return self.macro_ends(),
            b".purgem" => return self.purge(operands),
            b".rept" | b".rep" | b".irp" | b".irep" | b".irpc" | b".irepc" => {
                return self.repetition_begins(statement);
            }
            b".endr" => return self.repetition_ends(),
            b".text" | b".data" | b".bss" | b".section" | b".pushsection" | b".popsection"
            | b".previous" => {
                return self.change_section(&name, statement);
            }
            b".code64" => return self.change_mode(&name, Mode::Long),
            b".code32" | b".code16" | b".code16gcc" => {
                return self.change_mode(&name, Mode::Legacy);
            }
            b".altmacro" | b".noaltmacro" => {
                self.unconditional(&name)?;
                self.alternate = &*name == b".altmacro";
            }
            name if conditional::is_condition(name) => return self.condition(name),
            b".end" => {
                self.unconditional(&name)?;
                self.settle()?;
                self.ended = self.frames.is_empty();
            }
            name if name.contains(&b'\\') => self.settle()?,
            _ => {
                // Data, alignment, conditions: the instructions before and after do not form a
                // pair.
                self.settle()?;
                self.watch = Watch::Nothing;
            }
        }
        Ok(())
    }

    /// The reason for which a directive is refused.
    fn refusal(&self, name: &[u8], operands: &[u8]) -> Option<&'static str> {
        Some(match name {
            b".set" | b".equ" | b".equiv" | b".eqv" if names_sensitive_register(operands) => {
                REGISTER_ALIAS
            }
            b".intel_syntax" => "Intel syntax is not supported",
            b".att_syntax" if operands.trim_ascii() == b"noprefix" => {
                "registers without `%` are not supported"
            }
            b".include" => "`.include` hides instructions: let the preprocessor include the file",
            b".incbin" if self.section() != Section::Data => {
                "`.incbin` hides instructions: put the file into a data section"
            }
            b".insn" => "`.insn` hides an instruction: write its mnemonic, or `.byte`",
            name if name.contains(&b'\\') && conditional::may_be_mode(name) => {
                "a directive that may change the mode, made of a macro's parameter"
            }
            _ => return None,
        })
    }

    fn repetition_begins(&mut self, statement: &Statement<'_>) -> Step {
        self.settle()?;
        self.pass(statement.operands)?;
        let at = statement.operands_at;
        self.frames.push(Frame::Repeat { values: at..at + statement.operands.len() });
        Ok(())
    }

    fn repetition_ends(&mut self) -> Step {
        self.settle()?;
        if !matches!(self.frames.pop(), Some(Frame::Repeat { .. })) {
            return Err(self.error("`.endr` without `.rept` or `.irp`"));
        }
        self.conditions_end();
        Ok(())
    }

    /// Collects bytes that may be instructions.
    fn data(&mut self, statement: &Statement<'_>, width: usize) -> Step {
        let code =
            matches!(self.section(), Section::Code | Section::Replacement | Section::Unclear);
        if !code || self.mode != Mode::Long {
            return self.settle();
        }
        if self.bytes.is_empty() && width > 1 {
            return self.settle();
        }
        let at = statement.operands_at;
        let operands = at..at + statement.operands.len();
        self.bytes.add(self.text, statement.start, operands, width);
        Ok(())
    }

    fn change_section(&mut self, name: &[u8], statement: &Statement<'_>) -> Step {
        self.settle()?;
        let change = match name {
            b".text" => Change::Set(Section::Code),
            b".data" | b".bss" => Change::Set(Section::Data),
            b".section" => Change::Set(self.names.section(statement.operands)),
            b".pushsection" => Change::Push(self.names.section(statement.operands)),
            b".previous" => Change::Previous,
            _ => Change::Pop,
        };
        self.apply(&[change])
    }

    pub(super) fn apply(&mut self, changes: &[Change]) -> Step {
        for change in changes {
            let done = self.sections.apply(*change);
            match self.frames.iter_mut().rev().find_map(|frame| match frame {
                Frame::Macro { body, .. } => Some(body),
                Frame::Repeat { .. } => None,
            }) {
                Some(body) => body.changes.push(*change),
                None if !done => {
                    return Err(self.error("`.popsection` without `.pushsection`"));
                }
                None => {}
            }
        }
        Ok(())
    }
}

/// Directives that change neither source line nor section and emit no bytes here.
fn is_neutral(name: &[u8]) -> bool {
    matches!(
        name,
        b".loc"
            | b".globl"
            | b".global"
            | b".type"
            | b".size"
            | b".weak"
            | b".local"
            | b".hidden"
            | b".set"
            | b".equ"
    ) || name.starts_with(b".cfi_")
}

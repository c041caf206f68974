//! Text that the assembler may not assemble: conditionals, bodies of macros, strings that are their
//! arguments ("Using as", 7: `.if`, `.macro`).
//!
//! The rewriter sees the text, not the value of a condition. A branch must not decide how the
//! rewriter interprets the text after it: mode, section, macros and syntax are unchanged at the end
//! of a branch, or the text is refused.

use super::macros::Macro;
use super::section::Stack;
use super::text::{lowered, text_of};
use super::{Mode, Rewriter, Step};
use crate::mnemonics;

/// An open conditional.
pub(super) struct Condition {
    /// Number of macros and repetitions around it.
    pub(super) depth: usize,
    /// The section in which each of its branches begins, and has to end.
    sections: Stack,
}

/// Error for other names of registers.
pub(super) const REGISTER_ALIAS: &str =
    "another name for a register that makes instructions sensitive";

/// Directives that change the mode.
const MODES: &[&[u8]] = &[b".code16", b".code16gcc", b".code32", b".code64"];

impl Rewriter<'_> {
    /// Processes a directive that begins a branch of a conditional, or ends one.
    pub(super) fn condition(&mut self, name: &[u8]) -> Step {
        self.settle()?;
        self.watch = super::Watch::Nothing;
        let depth = self.frames.len();
        if name.starts_with(b".if") {
            self.conditions.push(Condition { depth, sections: self.sections.clone() });
            return Ok(());
        }
        let open = self.conditions.last().filter(|open| open.depth == depth);
        if open.is_some_and(|open| open.sections != self.sections) {
            return Err(self.error(
                "a branch of `.if` that ends in another section than it begins in: \
                 use `.pushsection` and `.popsection` in the same branch",
            ));
        }
        if open.is_some() && matches!(name, b".endif" | b".endc") {
            self.conditions.pop();
        }
        Ok(())
    }

    /// Ends the conditionals inside of a macro or a repetition that ends.
    pub(super) fn conditions_end(&mut self) {
        let depth = self.frames.len();
        self.conditions.retain(|open| open.depth <= depth);
    }

    /// Refuses a directive that the assembler may not reach.
    pub(super) fn unconditional(&self, name: &[u8]) -> Step {
        match self.conditions.is_empty() && self.string.is_none() {
            true => Ok(()),
            false => Err(self.error(format!(
                "`{}` where it may have no effect (in `.if` or a string): \
                 let the preprocessor decide (`#if`)",
                text_of(name)
            ))),
        }
    }

    /// Changes the mode: `.code64` and the like.
    pub(super) fn change_mode(&mut self, name: &[u8], mode: Mode) -> Step {
        self.settle()?;
        self.unconditional(name)?;
        if !self.frames.is_empty() {
            return Err(self.error(format!(
                "`{}` in a macro or a repetition: write it outside",
                text_of(name)
            )));
        }
        self.mode = mode;
        Ok(())
    }

    /// Refuses a mode as an argument.
    pub(super) fn refuse_modes(&self, arguments: &[u8]) -> Step {
        let mut words = super::expansion::words(arguments);
        match words.find(|word| MODES.iter().any(|mode| word.eq_ignore_ascii_case(mode))) {
            Some(word) => Err(self.error(format!("`{}` as an argument of a macro", text_of(word)))),
            None => Ok(()),
        }
    }

    /// Returns true if the assembler certainly executes a directive in this position.
    fn is_sure(&self) -> bool {
        self.frames.is_empty() && self.unconditional(b"").is_ok()
    }

    /// Processes `.purgem`. A macro that may still exist stays known, unless it would hide an
    /// instruction then.
    pub(super) fn purge(&mut self, operands: &[u8]) -> Step {
        let name = lowered(operands);
        if self.is_sure() {
            self.macros.remove(&*name);
        } else if mnemonics::may_be_sensitive(&name) {
            return Err(
                self.error(format!("`.purgem {}` where it may have no effect", text_of(&name)))
            );
        }
        Ok(())
    }

    /// Defines a macro. If an earlier definition may still exist, the macro has the properties of
    /// both.
    pub(super) fn define(&mut self, name: Vec<u8>, mut body: Macro) {
        if let (false, Some(other)) = (self.is_sure(), self.macros.get(&name)) {
            body.merge(other);
        }
        self.macros.insert(name, body);
    }

    /// Refuses names of macros that the assembler, or this rewriter, may interpret otherwise. A
    /// macro may have the name of an instruction if its definition is certain.
    pub(super) fn check_macro_name(&self, name: &[u8]) -> Step {
        let reason = if name.contains(&b'\\') {
            "a macro's name is made of a parameter"
        } else if name.starts_with(b".") {
            "a macro's name begins as directives do"
        } else if !self.is_sure() && mnemonics::may_be_sensitive(name) {
            "the name of an instruction, where the definition may have no effect"
        } else {
            return Ok(());
        };
        Err(self.error(format!("`.macro {}`: {reason}", text_of(name))))
    }
}

/// Directives that begin a branch of a conditional, or end one.
pub(super) fn is_condition(name: &[u8]) -> bool {
    name.starts_with(b".if")
        || matches!(name, b".else" | b".elsec" | b".elseif" | b".endif" | b".endc")
}

/// Returns true if a directive with a macro's parameter in its name may change the mode.
pub(super) fn may_be_mode(name: &[u8]) -> bool {
    let known = name.iter().position(|&byte| byte == b'\\').unwrap_or(name.len());
    let known = &name[..known];
    MODES.iter().any(|mode| mode.starts_with(known) || known.starts_with(b".code"))
}

/// Returns true if one of the operands is a register that makes instructions sensitive.
pub(super) fn names_sensitive_register(operands: &[u8]) -> bool {
    mnemonics::operand_list(operands).any(|operand| {
        let name = operand.strip_prefix(b"%").map(<[u8]>::trim_ascii);
        name.is_some_and(mnemonics::is_sensitive_register)
    })
}

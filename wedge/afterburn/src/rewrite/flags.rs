//! Whether the arithmetic flags are dead after a site in inline assembly.
//!
//! The compiler takes them to be lost after each statement, unless it has outputs in them. Then an instruction behind
//! the statement reads them, or Linux has said so in a comment.

use super::output::What;
use super::{Class, Rewriter};
use wedge_sites::{Flags, Kind};

/// Whether the arithmetic flags are dead after the last site.
#[derive(Clone, Copy)]
pub(super) enum Watch {
    Nothing,
    /// The edit is of the last instruction so far of an inline assembly statement.
    Inside(usize),
    /// The statement ended there.
    After(usize),
}

impl Rewriter<'_> {
    pub(super) fn statement_begins(&mut self) {
        if let Some(first) = &mut self.first {
            first.begun = first.ended;
        }
        self.flags_die();
        self.watch = Watch::Nothing;
        self.flags_out = false;
    }

    pub(super) fn statement_ends(&mut self) {
        if let Some(first) = &mut self.first {
            first.ended = true;
            first.flags_out |= self.flags_out;
        }
        if let Watch::Inside(edit) = self.watch {
            self.watch = if self.flags_out { Watch::Nothing } else { Watch::After(edit) };
        }
    }

    pub(super) fn flags_die(&mut self) {
        if let Watch::After(edit) = self.watch
            && let What::End { flags, .. } = &mut self.edits[edit].what
        {
            *flags = flags.with(Flags::FLAGS_DEAD);
        }
    }

    /// An instruction follows.
    pub(super) fn watch_instruction(&mut self, class: Class) {
        match (self.watch, class) {
            (Watch::After(_), Class::EndsFlags) => self.flags_die(),
            (Watch::After(_), Class::ReadsFlags | Class::Sensitive(_) | Class::Prefix) => {}
            (Watch::After(_), _) if !self.inline => return,
            _ => {}
        }
        self.watch = Watch::Nothing;
    }
}

/// Whether a site leaves nothing in the arithmetic flags that anybody could want.
pub(super) fn keeps_flags(kind: Kind) -> bool {
    !matches!(
        kind,
        Kind::Lar
            | Kind::Lsl
            | Kind::Verr
            | Kind::Verw
            | Kind::Popf
            | Kind::RestoreFlags
            | Kind::Iret
            | Kind::Encls
            | Kind::Vmcall
            | Kind::Vmmcall
            | Kind::Int
            | Kind::FarCall
            | Kind::Other
    )
}

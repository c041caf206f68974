//! Liveness of the arithmetic flags after a site in inline assembly.
//!
//! The compiler assumes that each statement overwrites them, unless it has outputs in them. In that
//! case an instruction after the statement reads them, or a comment of Linux marks the outputs.

use super::output::What;
use super::{Class, Rewriter};
use wedge_sites::{Flags, Kind};

/// State of the search for dead flags after the last site.
#[derive(Clone, Copy)]
pub(super) enum Watch {
    Nothing,
    /// The edit belongs to the last instruction so far of an inline assembly statement.
    Inside(usize),
    /// The statement ended after that instruction.
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

    /// Processes the next instruction.
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

/// Returns true if a site defines no arithmetic flag for the code after it.
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

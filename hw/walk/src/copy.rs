//! Copies of translations in other tables (shadow paging): the access that a page fault reports,
//! and the rights of the copy.

use hw_x86::paging::{cr4, entry, fault};

use crate::{Intent, Paging, RFLAGS_AC, Translation};

/// Rights of a page in a copy of its translation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageRights {
    /// Writes.
    pub write: bool,
    /// Fetches.
    pub execute: bool,
    /// User mode.
    pub user: bool,
    /// The translation is global.
    pub global: bool,
}

impl Paging {
    /// The access that a page fault with this error code reports, and the state that it depends on.
    /// `self.user`: the faulting code runs at privilege level 3.
    #[inline(always)]
    pub fn of_fault(self, code: u64) -> (Self, Intent) {
        let intent = match code {
            _ if code & fault::FETCH != 0 => Intent::Fetch,
            _ if code & fault::WRITE != 0 => Intent::Write,
            _ => Intent::Read,
        };
        let user = code & fault::USER != 0;
        // RFLAGS.AC does not permit implicit accesses of the processor at CPL 3 (SMAP).
        let implicit = if self.user && !user { RFLAGS_AC } else { 0 };
        (Self { rflags: self.rflags & !implicit, user, ..self }, intent)
    }

    /// Rights of the copy of a translation that an access has been allowed. A page whose dirty bit
    /// is clear is not writable, so that the first write is noticed.
    pub fn rights_of_copy(&self, intent: Intent, found: &Translation) -> PageRights {
        // A pointer of three-level tables has no rights.
        let pointers = usize::from(self.shape().is_some_and(|shape| shape.levels == 3));
        let levels = found.entries().iter().skip(pointers);
        let all = levels.clone().fold(u64::MAX, |bits, level| bits & level.value);
        let no_execute = levels.clone().any(|level| level.value & entry::NX != 0);
        let last = levels.last();
        let has = |bit: u64| last.is_some_and(|leaf| leaf.value & bit != 0);
        let is_dirty = intent == Intent::Write || last.is_none() || has(entry::DIRTY);
        let (is_user, is_writable) = (all & entry::USER != 0, all & entry::WRITE != 0);
        // Allowed because CR0.WP is clear: for the guest's kernel only, as long as nothing else
        // asks.
        let overrides = intent == Intent::Write && !is_writable;
        let smep = overrides && is_user && self.cr4 & cr4::SMEP != 0;
        PageRights {
            write: overrides || is_writable && is_dirty,
            execute: !no_execute && !smep,
            user: is_user && !overrides,
            global: self.cr4 & cr4::PGE != 0 && has(entry::GLOBAL),
        }
    }
}

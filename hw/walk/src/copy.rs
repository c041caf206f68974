//! Copies of translations in other tables (shadow paging): the access that a page fault reports,
//! and the rights of the copy.

use hw_x86::paging::{cr4, entry, fault};

use crate::{Intent, Paging, RFLAGS_AC, Rights, WalkedPage};

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
        let rflags = if self.user { self.rflags & !RFLAGS_AC } else { self.rflags };
        (Self { rflags, user, ..self }, intent)
    }

    /// Rights of the copy of a translation that an access has been allowed. A page whose dirty bit
    /// is clear is not writable, so that the first write is noticed.
    #[inline(always)]
    pub fn rights_of_copy(&self, intent: Intent, found: &WalkedPage) -> Rights {
        let Rights(granted) = found.rights;
        if intent == Intent::Write && !found.rights.has(Rights::WRITE) {
            // Allowed because CR0.WP is clear: for the guest's kernel only, as long as nothing else
            // asks.
            let smep = self.cr4 & cr4::SMEP != 0 && found.rights.has(Rights::USER);
            let execute = if smep { 0 } else { Rights::EXECUTE };
            return Rights(Rights::WRITE | granted & execute);
        }
        let hidden = if found.value & entry::DIRTY == 0 { Rights::WRITE } else { 0 };
        Rights(granted & !hidden)
    }

    /// Returns whether a page is global.
    #[inline(always)]
    pub fn is_global(&self, found: &WalkedPage) -> bool {
        self.cr4 & cr4::PGE != 0 && found.value & entry::GLOBAL != 0
    }
}

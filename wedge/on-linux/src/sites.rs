//! Patch sites of the guest kernel and its modules: rewritten when they are announced. When they
//! are retracted, their stubs become free; the code stays, because a kernel retracts the sites of
//! code that it executes no more, and may already use the memory of some of it (`__init`) for
//! other code.

use core::fmt;

use crate::mmu::kernel_code::write_code;
use proto::hosted::{layout, option};
use vmm_mem::GuestMemory;
use wedge_core::VirtualCpu;
use wedge_sites::{Flags, Kind, RECORD, Site};
use wedge_x86::{Entries, MAX_SITE, SiteTarget, Stub, Way, decode_all, reads_data_segment};

/// Capacity in stubs.
const MOST: usize = layout::STUBS_LENGTH as usize / size_of::<Stub>();

/// [`Stub::kind`] of a replaced function, in place of a kind of patch site.
pub const FUNCTION: u8 = u8::MAX;
/// Number of replaced bytes of a function.
const FUNCTION_BYTES: usize = 8;

/// Reason for refusing a site table.
#[derive(Clone, Copy, Debug)]
pub enum SiteError {
    /// This address is not mapped.
    Unreadable(u64),
    /// The table is malformed.
    Format(wedge_sites::Error),
    /// The instruction at this address is not supported.
    Instruction(u64),
    /// The table has too many sites.
    Full,
}

impl fmt::Display for SiteError {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable(at) => write!(to, "address {at:#x} is not mapped"),
            Self::Format(error) => write!(to, "{error}"),
            Self::Instruction(at) => write!(to, "unknown instruction at {at:#x}"),
            Self::Full => write!(to, "more than {MOST} patch sites"),
        }
    }
}

/// Rewritten sites.
pub struct Sites {
    /// Memory of the stubs, [`MOST`] of them.
    stubs: *mut Stub,
    /// Jump targets of the stubs.
    entries: Entries,
    /// Number of stubs that were ever used.
    used: usize,
    /// Address and length of the kernel's own table, for the lookup of page-table stores.
    table: (u64, u64),
    /// Sites may be handled in place.
    fast: bool,
    /// Returns to user mode may be, too: the wedge does not run user mode in another process.
    fast_sysret: bool,
}

impl Sites {
    /// Creates the state without sites.
    pub fn new(options: u64) -> Self {
        Self::with_stubs(layout::STUBS as *mut Stub, wedge_x86::entries(), options)
    }

    fn with_stubs(stubs: *mut Stub, entries: Entries, options: u64) -> Self {
        Self {
            stubs,
            entries,
            used: 0,
            table: (0, 0),
            fast: options & option::NO_FAST_PATHS == 0,
            fast_sysret: options & option::USER_PROCESS == 0,
        }
    }

    fn stub(&mut self, index: usize) -> &mut Stub {
        // SAFETY: there are `MOST` stubs, which were written or are zero, and only the owner of
        // this value changes them.
        unsafe { &mut *self.stubs.add(index) }
    }

    /// Rewrites all sites of the table at a linear address, or on an error none of them. Sites of
    /// modules with unsupported instructions stay as they are; returns the address of the first.
    pub fn rewrite_table(
        &mut self,
        cpu: &VirtualCpu,
        memory: &GuestMemory,
        table: u64,
        length: u64,
    ) -> Result<Option<u64>, SiteError> {
        if self.table.1 == 0 {
            self.table = (table, length);
        }
        let (needed, skipped) = self.rewrite_each(cpu, memory, table, length, true)?;
        let unused = (0..MOST).filter(|&index| self.is_unused(index));
        if unused.take(needed).count() < needed {
            return Err(SiteError::Full);
        }
        self.rewrite_each(cpu, memory, table, length, false)?;
        Ok(skipped)
    }

    /// Checks or rewrites the sites of a table. Returns the number of stubs that they need, and the
    /// address of the first skipped site.
    fn rewrite_each(
        &mut self,
        cpu: &VirtualCpu,
        memory: &GuestMemory,
        table: u64,
        length: u64,
        check: bool,
    ) -> Result<(usize, Option<u64>), SiteError> {
        let (mut needed, mut skipped) = (0, None);
        self.each(cpu, memory, table, length, |sites, site| {
            match sites.rewrite(cpu, memory, site, table, check) {
                Err(SiteError::Instruction(at)) if is_in_module(at) => {
                    skipped.get_or_insert(at);
                }
                rewritten => needed += usize::from(rewritten?),
            }
            Ok(())
        })?;
        Ok((needed, skipped))
    }

    /// Redirects the calls of a function to the wedge.
    pub fn replace_function(
        &mut self,
        cpu: &VirtualCpu,
        memory: &GuestMemory,
        at: u64,
    ) -> Result<(), SiteError> {
        let mut original = [0; FUNCTION_BYTES];
        cpu.read(memory, at, &mut original).map_err(|_| SiteError::Unreadable(at))?;
        self.put_stub(
            cpu,
            memory,
            &SiteTarget {
                site: at,
                original: &original,
                table: 0,
                padded: FUNCTION_BYTES as u8,
                kind: FUNCTION,
                flags_dead: false,
                fast: false,
            },
        )
    }

    fn each(
        &mut self,
        cpu: &VirtualCpu,
        memory: &GuestMemory,
        table: u64,
        length: u64,
        mut act: impl FnMut(&mut Self, &Site) -> Result<(), SiteError>,
    ) -> Result<(), SiteError> {
        for offset in (0..length).step_by(RECORD) {
            let at = table.wrapping_add(offset);
            let mut record = [0; RECORD];
            cpu.read(memory, at, &mut record).map_err(|_| SiteError::Unreadable(at))?;
            let sites = wedge_sites::Sites::parse(&record, at).map_err(SiteError::Format)?;
            for site in sites.iter() {
                act(self, &site)?;
            }
        }
        Ok(())
    }

    /// Returns whether the kernel's table has a page-table store at an address. Slow; for the
    /// profiler only.
    pub fn is_page_table_store(&mut self, cpu: &VirtualCpu, memory: &GuestMemory, at: u64) -> bool {
        let (table, length) = self.table;
        let mut found = false;
        let _ = self.each(cpu, memory, table, length, |_, site| {
            found |= site.kind == Kind::PageTable && site.address == at;
            Ok(())
        });
        found
    }

    /// Rewrites a site of a table, or only checks it; returns whether it needs a stub.
    fn rewrite(
        &mut self,
        cpu: &VirtualCpu,
        memory: &GuestMemory,
        site: &Site,
        table: u64,
        check: bool,
    ) -> Result<bool, SiteError> {
        if !site.is_rewritable() || needs_no_patch(site.kind) {
            return Ok(false);
        }
        let mut whole = [0; MAX_SITE];
        let whole = &mut whole[..usize::from(site.padded).min(MAX_SITE)];
        cpu.read(memory, site.address, whole).map_err(|_| SiteError::Unreadable(site.address))?;
        let bytes = whole.get(..site.length.into()).ok_or(SiteError::Instruction(site.address))?;
        if self.fast && !is_in_module(site.address) && reads_data_segment(bytes) {
            // The host's registers have the selectors that user mode has loaded
            // (`compat::load_segments`), which no module reads.
            return Ok(false);
        }
        decode_all(bytes).map_err(|_| SiteError::Instruction(site.address))?;
        if check {
            return Ok(true);
        }
        let target = SiteTarget {
            site: site.address,
            original: bytes,
            table,
            padded: site.padded,
            kind: site.kind.number(),
            flags_dead: site.flags.contains(Flags::FLAGS_DEAD),
            fast: self.fast && (site.kind != Kind::Sysretq || self.fast_sysret),
        };
        self.put_stub(cpu, memory, &target).map(|()| true)
    }

    fn put_stub(
        &mut self,
        cpu: &VirtualCpu,
        memory: &GuestMemory,
        target: &SiteTarget<'_>,
    ) -> Result<(), SiteError> {
        let index = self.free().ok_or(SiteError::Full)?;
        let address = layout::STUBS + (index * size_of::<Stub>()) as u64;
        let made = Stub::new(address, &self.entries, target);
        let (stub, patch) = made.ok_or(SiteError::Instruction(target.site))?;
        *self.stub(index) = stub;
        write_code(cpu, memory, target.site, patch.bytes())
            .ok_or(SiteError::Unreadable(target.site))
    }

    /// Returns the index of an unused stub.
    fn free(&mut self) -> Option<usize> {
        if self.used < MOST {
            self.used += 1;
            return Some(self.used - 1);
        }
        (0..MOST).find(|&index| self.is_unused(index))
    }

    fn is_unused(&mut self, index: usize) -> bool {
        self.stub(index).way == Way::Unused
    }

    /// Releases the stubs of a table's sites.
    fn release(&mut self, table: u64) {
        for index in 0..self.used {
            let stub = self.stub(index);
            if stub.table == table {
                stub.way = Way::Unused;
            }
        }
    }

    /// Returns whether a site is a marker that announces or retracts a module's sites.
    pub fn is_marker(stub: &Stub) -> bool {
        matches!(Kind::from_number(stub.kind), Some(Kind::Announce | Kind::Retract))
    }

    /// Executes a marker.
    pub fn marker(&mut self, stub: &Stub, cpu: &mut VirtualCpu, memory: &GuestMemory) {
        let [sites, sites_end] = [7, 6].map(|register| cpu.frame.gpr[register]);
        let kind = Kind::from_number(stub.kind);
        let length = sites_end.wrapping_sub(sites);
        match kind {
            Some(Kind::Announce) => match self.rewrite_table(cpu, memory, sites, length) {
                Ok(None) => {}
                Ok(Some(at)) => crate::report::warn(format_args!(
                    "a module has unknown instructions, the first at {at:#x}: these patch sites \
                     are not rewritten"
                )),
                Err(problem) => crate::report::warn(format_args!(
                    "cannot rewrite a module's patch sites: {problem}"
                )),
            },
            Some(Kind::Retract) => self.release(sites),
            _ => {}
        }
        cpu.frame.rip = stub.resume();
    }
}

/// Returns whether an address is in a module of the guest kernel.
fn is_in_module(address: u64) -> bool {
    (layout::MODULES..layout::MODULES_END).contains(&address)
}

/// Returns the stub with code at an address, and the offset in it.
pub fn stub_at(address: u64) -> Option<(&'static Stub, u64)> {
    if !(layout::STUBS..layout::STUBS + layout::STUBS_LENGTH).contains(&address) {
        return None;
    }
    let offset = address % size_of::<Stub>() as u64;
    // SAFETY: executed code there belongs to a stub that was written.
    Some((unsafe { &*((address - offset) as *const Stub) }, offset))
}

/// Returns whether a kind of site stays unpatched: page-table stores need no patch, because the
/// guest flushes translations.
fn needs_no_patch(kind: Kind) -> bool {
    matches!(kind, Kind::PageTable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mmu::testing::{CODE, Rig, USER};
    use hw_x86::paging::entry;
    use std::vec;
    use std::vec::Vec;

    const ENTRIES: Entries = Entries { site: 0x7000_0000, sysret: 0x7000_0100 };
    const FRAME: u64 = 0x8_0000;
    const CLI: [u8; 8] = [0xfa, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90];
    /// `lss (%rdi), %eax`, which the wedge does not decode.
    const LSS: [u8; 8] = [0x0f, 0xb2, 0x07, 0x90, 0x90, 0x90, 0x90, 0x90];
    const CPUID: [u8; 8] = [0x0f, 0xa2, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90];
    const RECORD_BYTES: u64 = RECORD as u64;

    /// Returns the state with unused stubs; those from `available` on are used.
    fn sites(available: usize) -> Sites {
        let (original, padded, kind) = (&CPUID[..2], 8, Kind::Cpuid.number());
        let site = layout::MODULES;
        let target =
            SiteTarget { site, original, table: 1, padded, kind, flags_dead: false, fast: true };
        let (mut stub, _) = Stub::new(layout::STUBS, &ENTRIES, &target).unwrap();
        let mut stubs = vec![stub; MOST];
        stub.way = Way::Unused;
        stubs[..available].fill(stub);
        let used = if available == MOST { 0 } else { MOST };
        Sites { used, ..Sites::with_stubs(stubs.leak().as_mut_ptr(), ENTRIES, 0) }
    }

    /// A guest kernel with a page for modules' code at `code`, and one for their tables.
    fn kernel(code: u64) -> Rig {
        let mut rig = Rig::new();
        rig.cpu.cpl = 0;
        rig.set(code, FRAME, CODE & !entry::USER);
        rig.set(code + 0x1000, FRAME + 0x1000, CODE & !entry::USER);
        rig
    }

    /// Writes a module to the kernel's memory: its code, and the table of its sites. Returns the
    /// address and the length of the table.
    fn load(rig: &Rig, at: u64, code: &[(Kind, u8, [u8; 8])], table: u64) -> (u64, u64) {
        for (index, &(kind, length, bytes)) in (0..).zip(code) {
            let address = at + 8 * index;
            let record = table + RECORD_BYTES * index;
            let site = Site { address, length, padded: 8, kind, flags: Flags::NONE };
            write_code(&rig.cpu, &rig.memory, address, &bytes).unwrap();
            write_code(&rig.cpu, &rig.memory, record, &site.encode(record).unwrap()).unwrap();
        }
        (table, RECORD_BYTES * code.len() as u64)
    }

    fn bytes(rig: &Rig, at: u64) -> [u8; 8] {
        let mut bytes = [0; 8];
        rig.cpu.read(&rig.memory, at, &mut bytes).unwrap();
        bytes
    }

    /// Returns the indices of the used stubs.
    fn used(sites: &mut Sites) -> Vec<usize> {
        (0..sites.used).filter(|&index| !sites.is_unused(index)).collect()
    }

    #[test]
    fn the_end_of_a_module_changes_no_memory() {
        let rig = kernel(layout::MODULES);
        let mut sites = sites(MOST);
        let [code, first, second] = [0, 0x1000, 0x1100].map(|offset| layout::MODULES + offset);
        for module in [(Kind::Cli, 1, CLI), (Kind::Cpuid, 2, CPUID)] {
            let (table, length) = load(&rig, code, &[module], first);
            assert_eq!(sites.rewrite_table(&rig.cpu, &rig.memory, table, length).unwrap(), None);
            // Linux reuses the memory of `__init`, here for a module with the same code.
            let (other, length) = load(&rig, code, &[module], second);
            assert_eq!(sites.rewrite_table(&rig.cpu, &rig.memory, other, length).unwrap(), None);
            let rewritten = bytes(&rig, code);
            assert_ne!(rewritten, module.2);
            let [stale, own] = used(&mut sites)[..] else { panic!("two stubs") };
            sites.release(table);
            assert_eq!(
                (bytes(&rig, code), used(&mut sites)),
                (rewritten, vec![own]),
                "not {stale}"
            );
            sites.release(other);
            assert_eq!((bytes(&rig, code), used(&mut sites)), (rewritten, vec![]));
        }
    }

    #[test]
    fn an_unknown_instruction_of_a_module_stays_and_the_others_are_rewritten() {
        let code = [(Kind::WriteSegment, 3, LSS), (Kind::Cli, 1, CLI)];
        let rig = kernel(layout::MODULES);
        let (table, length) = load(&rig, layout::MODULES, &code, layout::MODULES + 0x1000);
        let skipped = sites(MOST).rewrite_table(&rig.cpu, &rig.memory, table, length);
        assert_eq!(skipped.unwrap(), Some(layout::MODULES));
        assert_eq!(bytes(&rig, layout::MODULES), LSS);
        assert_ne!(bytes(&rig, layout::MODULES + 8), CLI);
        // The kernel itself is refused.
        let rig = kernel(USER);
        let (table, length) = load(&rig, USER, &code, USER + 0x1000);
        let refused = sites(MOST).rewrite_table(&rig.cpu, &rig.memory, table, length);
        assert!(matches!(refused, Err(SiteError::Instruction(USER))), "{refused:?}");
    }

    #[test]
    fn a_table_with_too_many_sites_is_not_rewritten_in_part() {
        let code = [(Kind::Cli, 1, CLI); 3];
        let rig = kernel(layout::MODULES);
        let (table, length) = load(&rig, layout::MODULES, &code, layout::MODULES + 0x1000);
        let done = sites(2).rewrite_table(&rig.cpu, &rig.memory, table, length);
        assert!(matches!(done, Err(SiteError::Full)), "{done:?}");
        assert_eq!(bytes(&rig, layout::MODULES), CLI);
        let done = sites(3).rewrite_table(&rig.cpu, &rig.memory, table, length);
        assert_eq!(done.unwrap(), None);
        assert_ne!(bytes(&rig, layout::MODULES), CLI);
    }
}

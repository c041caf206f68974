//! Patch sites of the guest kernel and its modules: rewritten when they are announced, restored
//! when they are retracted.

use core::fmt;

use crate::mmu::kernel_code::write_code;
use proto::hosted::{layout, option};
use vmm_mem::GuestMemory;
use wedge_core::VirtualCpu;
use wedge_sites::{Flags, Kind, RECORD, Site};
use wedge_x86::{MAX_SITE, SiteTarget, Stub, Way, decode_all, reads_data_segment};

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
        let fast_sysret = options & option::USER_PROCESS == 0;
        Self { used: 0, table: (0, 0), fast: options & option::NO_FAST_PATHS == 0, fast_sysret }
    }

    fn at(number: usize) -> *mut Stub {
        (layout::STUBS as usize + number * size_of::<Stub>()) as *mut Stub
    }

    /// Rewrites all sites of the table at a linear address, or none of them.
    pub fn rewrite_table(
        &mut self,
        cpu: &VirtualCpu,
        memory: &GuestMemory,
        table: u64,
        length: u64,
    ) -> Result<(), SiteError> {
        if self.table.1 == 0 {
            self.table = (table, length);
        }
        for check in [true, false] {
            self.each(cpu, memory, table, length, |sites, site| {
                sites.rewrite(cpu, memory, site, check)
            })?;
        }
        Ok(())
    }

    /// Redirects the calls of a function to the wedge.
    pub fn replace_function(
        &mut self,
        cpu: &VirtualCpu,
        memory: &GuestMemory,
        at: u64,
    ) -> Result<(), SiteError> {
        let mut whole = [0; FUNCTION_BYTES];
        cpu.read(memory, at, &mut whole).map_err(|_| SiteError::Unreadable(at))?;
        self.put_stub(
            cpu,
            memory,
            &SiteTarget {
                site: at,
                original: &whole,
                whole: &whole,
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

    fn rewrite(
        &mut self,
        cpu: &VirtualCpu,
        memory: &GuestMemory,
        site: &Site,
        check: bool,
    ) -> Result<(), SiteError> {
        if !site.is_rewritable() || needs_no_patch(site.kind) {
            return Ok(());
        }
        let mut whole = [0; MAX_SITE];
        let whole = &mut whole[..usize::from(site.padded).min(MAX_SITE)];
        cpu.read(memory, site.address, whole).map_err(|_| SiteError::Unreadable(site.address))?;
        let bytes = whole.get(..site.length.into()).ok_or(SiteError::Instruction(site.address))?;
        let is_module = (layout::MODULES..layout::MODULES_END).contains(&site.address);
        if self.fast && !is_module && reads_data_segment(bytes) {
            // The host's registers have the selectors that user mode has loaded
            // (`compat::load_segments`), which no module reads.
            return Ok(());
        }
        if check {
            return match decode_all(bytes) {
                Ok(_) => Ok(()),
                Err(_) => Err(SiteError::Instruction(site.address)),
            };
        }
        let target = SiteTarget {
            site: site.address,
            original: bytes,
            whole,
            padded: site.padded,
            kind: site.kind.number(),
            flags_dead: site.flags.contains(Flags::FLAGS_DEAD),
            fast: self.fast && (site.kind != Kind::Sysretq || self.fast_sysret),
        };
        self.put_stub(cpu, memory, &target)
    }

    fn put_stub(
        &mut self,
        cpu: &VirtualCpu,
        memory: &GuestMemory,
        target: &SiteTarget<'_>,
    ) -> Result<(), SiteError> {
        let number = self.free().ok_or(SiteError::Full)?;
        let place = Self::at(number);
        let made = Stub::new(place as u64, &wedge_x86::entries(), target);
        let (stub, patch) = made.ok_or(SiteError::Instruction(target.site))?;
        // SAFETY: the place is an unused stub in the stubs' part of the shared memory.
        unsafe { place.write(stub) };
        write_code(cpu, memory, target.site, patch.bytes())
            .ok_or(SiteError::Unreadable(target.site))
    }

    /// Returns the index of an unused stub.
    fn free(&mut self) -> Option<usize> {
        if self.used < MOST {
            self.used += 1;
            return Some(self.used - 1);
        }
        // SAFETY: all stubs were written, or are zero.
        (0..MOST).find(|&number| unsafe { (*Self::at(number)).way } == Way::Unused)
    }

    /// Restores the original code of a table's sites.
    fn retract(&mut self, cpu: &VirtualCpu, memory: &GuestMemory, table: u64, length: u64) {
        let _ = self.each(cpu, memory, table, length, |sites, site| {
            for number in 0..sites.used {
                // SAFETY: all stubs below `used` were written.
                let stub = unsafe { &mut *Self::at(number) };
                if stub.way != Way::Unused && stub.site == site.address {
                    stub.way = Way::Unused;
                    restore_code(stub, cpu, memory);
                }
            }
            Ok(())
        });
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
            Some(Kind::Announce) => {
                let done = self.rewrite_table(cpu, memory, sites, length);
                if let Err(problem) = done {
                    crate::report::warn(format_args!(
                        "cannot rewrite a module's patch sites: {problem}"
                    ));
                }
            }
            Some(Kind::Retract) => self.retract(cpu, memory, sites, length),
            _ => {}
        }
        cpu.frame.rip = stub.resume();
    }
}

/// Restores the original code of a site.
fn restore_code(stub: &Stub, cpu: &VirtualCpu, memory: &GuestMemory) {
    // A site that is not mapped any more needs no restoring.
    let _ = write_code(cpu, memory, stub.site, stub.overwritten());
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

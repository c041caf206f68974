//! The sites of the guest's kernel and of its modules: rewritten when they are announced, put back when they are retracted.

use core::fmt;

use crate::memory::PAGE;
use crate::user_process;
use proto::wedge::{layout, option};
use vmm_cpu::walk::Intent;
use vmm_mem::GuestMemory;
use wedge_core::VirtualCpu;
use wedge_sites::{Flags, Kind, RECORD, Site};
use wedge_x86::{MAX_SITE, Stub, Target, Way, decode_all};

/// Most stubs.
const MOST: usize = layout::STUBS_LENGTH as usize / size_of::<Stub>();

/// [`Stub::kind`] of a function that the wedge does in its own way, where other stubs have a kind of sites.
pub const FUNCTION: u8 = u8::MAX;
/// Most bytes that Linux' `__text_poke` changes at once: `text_poke_copy` fills two pages
/// (`arch/x86/kernel/alternative.c`).
pub const MOST_POKED: usize = 2 * PAGE as usize;
/// Bytes of a function that are replaced.
const FUNCTION_BYTES: usize = 8;

/// Why a table is refused.
#[derive(Clone, Copy, Debug)]
pub enum SiteError {
    /// It is not in memory.
    Unreadable(u64),
    /// It is not of the format.
    Format(wedge_sites::Error),
    /// The instructions at this address are not what a site may have.
    Instruction(u64),
    /// There are too many.
    Full,
}

impl fmt::Display for SiteError {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable(at) => write!(to, "no memory at {at:#x}"),
            Self::Format(error) => write!(to, "{error}"),
            Self::Instruction(at) => write!(to, "unknown instruction at {at:#x}"),
            Self::Full => write!(to, "more than {MOST} sites"),
        }
    }
}

/// The rewritten sites.
pub struct Sites {
    used: usize,
    /// The kernel's own table, where page-table stores are looked up.
    table: (u64, u64),
    /// Sites may be done without the wedge.
    fast: bool,
}

impl Sites {
    /// None yet.
    pub fn new(options: u64) -> Self {
        Self { used: 0, table: (0, 0), fast: options & option::NO_FAST_PATHS == 0 }
    }

    fn at(number: usize) -> *mut Stub {
        (layout::STUBS as usize + number * size_of::<Stub>()) as *mut Stub
    }

    /// Rewrites all sites of a table at a linear address. Nothing is changed unless all can be.
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

    /// Makes the calls of a function come to the wedge.
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
            &Target {
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

    /// Whether the kernel's table has a page-table store at an address. Slow: it is for profiles.
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
        if check {
            return match decode_all(bytes) {
                Ok(_) => Ok(()),
                Err(_) => Err(SiteError::Instruction(site.address)),
            };
        }
        let target = Target {
            site: site.address,
            original: bytes,
            whole,
            padded: site.padded,
            kind: site.kind.number(),
            flags_dead: site.flags.contains(Flags::FLAGS_DEAD),
            // The way to a program that is elsewhere is the wedge's.
            fast: self.fast && !(site.kind == Kind::Sysretq && user_process::is_enabled()),
        };
        self.put_stub(cpu, memory, &target)
    }

    fn put_stub(
        &mut self,
        cpu: &VirtualCpu,
        memory: &GuestMemory,
        target: &Target<'_>,
    ) -> Result<(), SiteError> {
        let number = self.free().ok_or(SiteError::Full)?;
        let place = Self::at(number);
        let made = Stub::new(place as u64, &wedge_x86::entries(), target);
        let (stub, patch) = made.ok_or(SiteError::Instruction(target.site))?;
        // SAFETY: the place is in the part of the shared memory that is for stubs, and not in use.
        unsafe { place.write(stub) };
        write_code(cpu, memory, target.site, patch.bytes())
            .ok_or(SiteError::Unreadable(target.site))
    }

    /// Number of a stub that is not in use.
    fn free(&mut self) -> Option<usize> {
        if self.used < MOST {
            self.used += 1;
            return Some(self.used - 1);
        }
        // SAFETY: all stubs have been written, or are zero.
        (0..MOST).find(|&number| unsafe { (*Self::at(number)).way } == Way::Unused)
    }

    /// Puts the sites of a table back as they were.
    fn retract(&mut self, cpu: &VirtualCpu, memory: &GuestMemory, table: u64, length: u64) {
        let _ = self.each(cpu, memory, table, length, |sites, site| {
            for number in 0..sites.used {
                // SAFETY: stubs below `used` have been written.
                let stub = unsafe { &mut *Self::at(number) };
                if stub.way != Way::Unused && stub.site == site.address {
                    stub.way = Way::Unused;
                    restore_code(stub, cpu, memory);
                }
            }
            Ok(())
        });
    }

    /// Whether a site is no instruction but tells of modules.
    pub fn is_marker(stub: &Stub) -> bool {
        matches!(Kind::from_number(stub.kind), Some(Kind::Announce | Kind::Retract))
    }

    /// Carries a marker out.
    pub fn marker(&mut self, stub: &Stub, cpu: &mut VirtualCpu, memory: &GuestMemory) {
        let [sites, sites_end] = [7, 6].map(|register| cpu.frame.gpr[register]);
        let kind = Kind::from_number(stub.kind);
        let length = sites_end.wrapping_sub(sites);
        match kind {
            Some(Kind::Announce) => {
                let done = self.rewrite_table(cpu, memory, sites, length);
                if let Err(problem) = done {
                    crate::report::warn(format_args!("a module is not rewritten: {problem}"));
                }
            }
            Some(Kind::Retract) => self.retract(cpu, memory, sites, length),
            _ => {}
        }
        cpu.frame.rip = stub.resume();
    }
}

/// Makes what was replaced what it was.
fn restore_code(stub: &Stub, cpu: &VirtualCpu, memory: &GuestMemory) {
    // What is not mapped any longer need not be.
    let _ = write_code(cpu, memory, stub.site, stub.overwritten());
}

/// Writes to the kernel's memory, whatever the rights of its mapping. `None`: nothing was written, since a part of it is not mapped.
pub fn write_code(cpu: &VirtualCpu, memory: &GuestMemory, to: u64, bytes: &[u8]) -> Option<()> {
    let place = |linear| {
        let found = cpu.paging(linear, false).translate(memory, linear, Intent::Read, false);
        Some(found.ok()?.0)
    };
    for is_check in [true, false] {
        let (mut at, mut left) = (to, bytes);
        while !left.is_empty() {
            let length = ((PAGE - at % PAGE) as usize).min(left.len());
            let (part, rest) = left.split_at(length);
            let address = place(at)?;
            if !is_check {
                // Where no memory is nothing is written, as by the kernel itself.
                let _ = memory.write_slice(address, part);
            }
            (at, left) = (at.wrapping_add(length as u64), rest);
        }
    }
    Some(())
}

/// The stub that has code at an address, and the offset there.
pub fn stub_at(address: u64) -> Option<(&'static Stub, u64)> {
    if !(layout::STUBS..layout::STUBS + layout::STUBS_LENGTH).contains(&address) {
        return None;
    }
    let offset = address % size_of::<Stub>() as u64;
    // SAFETY: code that runs there belongs to a stub that has been written.
    Some((unsafe { &*((address - offset) as *const Stub) }, offset))
}

/// Page-table stores need nothing: the guest says when translations are to be forgotten.
fn needs_no_patch(kind: Kind) -> bool {
    matches!(kind, Kind::PageTable)
}

//! Processor of the model: it walks the shadow tables that the VMCB names, and keeps translations
//! and pointers to tables until they are flushed, tagged by ASID.

use std::collections::BTreeMap;

use super::guest::{GuestAccess, Intent};
use hw_x86::msr::efer;
use hw_x86::paging::{cr0, cr4, entry, fault};
use hw_x86::vmcb::{Vmcb, tlb_control};
use kernel_x86::shadow::testing::{TestVcpu, page};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// `RFLAGS.AC`: SMAP does not apply.
pub const RFLAGS_AC: u64 = 1 << 18;
/// Most translations that it keeps.
const CAPACITY: usize = 64;

/// A translation.
#[derive(Clone, Copy, Debug)]
struct Cached {
    leaf: u64,
    /// Physical page number.
    page: u64,
}

/// The processor.
#[derive(Default)]
pub struct Processor {
    /// By ASID and page number.
    tlb: BTreeMap<(u32, u64), Cached>,
    /// Tables by ASID, level of their entries, and address bits above their range.
    tables: BTreeMap<(u32, u32, u64), u64>,
    clock: usize,
}

/// Page number of an address in the TLB.
fn number(address: u64) -> u64 {
    address << 16 >> 28
}

fn index(address: u64, level: u32) -> usize {
    (address >> (12 + 9 * level)) as usize % 512
}

impl Processor {
    /// Flushes what the vCPU asks for, as VMRUN and INVLPGA do.
    pub fn enter(&mut self, vcpu: &TestVcpu) {
        for (asid, address) in vcpu.take_invalidations() {
            self.forget(asid, address);
        }
        if vcpu.vmcb().control.tlb_control.replace(tlb_control::NOTHING) == tlb_control::FLUSH_ALL {
            self.tlb.clear();
            self.tables.clear();
        }
        assert_ne!(vcpu.vmcb().control.guest_asid.get(), 0, "ASID 0 is the host's");
    }

    fn forget(&mut self, asid: u32, address: u64) {
        let page = number(address);
        self.tlb.remove(&(asid, page));
        for level in 0..3 {
            self.tables.remove(&(asid, level, page >> (9 * (level + 1))));
        }
    }

    /// Performs an access: physical page number, or the error code of the page fault.
    pub fn access(
        &mut self,
        Vmcb { control, save }: &Vmcb,
        access: GuestAccess,
    ) -> Result<u64, u64> {
        let asid = control.guest_asid.get();
        let key = (asid, number(access.address));
        let is_write = access.intent == Intent::Write;
        let cached = self.tlb.get(&key).copied();
        let hides = |bit: u64| save.cr4.get() & bit != 0 && !access.user;
        let hides_users = match access.intent {
            Intent::Fetch => hides(cr4::SMEP),
            _ => hides(cr4::SMAP) && save.rflags.get() & RFLAGS_AC == 0,
        };
        let outcome = match cached {
            Some(known) if !is_write || known.leaf & entry::DIRTY != 0 => {
                allows(known.leaf, access, hides_users).map(|()| known)
            }
            _ => self.walk(asid, save.cr3.get(), save.efer.get(), access.address).and_then(
                |(word, page)| {
                    allows(word.load(Relaxed), access, hides_users)?;
                    let dirty = if is_write { entry::DIRTY } else { 0 };
                    word.fetch_or(entry::ACCESSED | dirty, Relaxed);
                    Ok(Cached { leaf: word.load(Relaxed), page })
                },
            ),
        };
        match outcome {
            Ok(found) => {
                self.insert(key, found);
                Ok(found.page)
            }
            Err(code) => {
                // A page fault forgets the translation (APM vol. 2 §5.5.2).
                self.forget(asid, access.address);
                let user = if access.user { fault::USER } else { 0 };
                Err(code | user | if is_write { fault::WRITE } else { 0 } | fetch(access))
            }
        }
    }

    fn insert(&mut self, key: (u32, u64), found: Cached) {
        self.tlb.insert(key, found);
        self.clock += 1;
        if self.tlb.len() > CAPACITY {
            let victim = self.tlb.keys().nth(self.clock % CAPACITY).copied();
            victim.map(|victim| self.tlb.remove(&victim));
        }
    }

    /// Walks the tables: leaf, and physical page number.
    fn walk(
        &mut self,
        asid: u32,
        root: u64,
        efer: u64,
        address: u64,
    ) -> Result<(&'static AtomicU64, u64), u64> {
        let top = if efer & efer::LMA != 0 { 3 } else { 2 };
        assert!(root != 0 && root & 0xfff == 0 && root >> 32 == 0, "root {root:#x}");
        let mut table = root;
        for level in (0..=top).rev() {
            let prefix = number(address) >> (9 * (level + 1));
            table = match self.tables.get(&(asid, level, prefix)) {
                Some(&known) if level < top => known,
                _ => table,
            };
            if level < top {
                self.tables.insert((asid, level, prefix), table);
            }
            let word = &page(table)[index(address, level)];
            let value = word.load(Relaxed);
            if value & entry::PRESENT == 0 {
                return Err(0);
            }
            let is_pointer = top == 2 && level == 2;
            if is_pointer {
                assert_eq!(value & !(entry::PRESENT | entry::ADDRESS), 0, "reserved bits");
            }
            if level > 0 && (is_pointer || value & entry::LARGE == 0) {
                let rights = entry::WRITE | entry::USER | entry::ACCESSED;
                assert!(is_pointer || value & rights == rights && value & entry::NX == 0);
                table = value & entry::ADDRESS;
                continue;
            }
            assert!(level < 2 && value & entry::GLOBAL == 0, "leaf {value:#x} at level {level}");
            let within = (address & ((1 << (12 + 9 * level)) - 1)) >> 12;
            let base = (value & entry::ADDRESS) >> 12;
            assert_eq!(base & ((1 << (9 * level)) - 1), 0, "an aligned leaf");
            return Ok((word, base + within));
        }
        unreachable!("level 0 has leaves")
    }

    /// The processor runs the guest with paging, write protection and no-execute.
    pub fn check_registers(Vmcb { save, .. }: &Vmcb) {
        let (cr0, cr4) = (save.cr0.get(), save.cr4.get());
        assert!(cr0 & cr0::PG != 0 && cr0 & cr0::WP != 0 && cr4 & cr4::PAE != 0);
        assert!(save.efer.get() & efer::NXE != 0);
    }
}

fn fetch(access: GuestAccess) -> u64 {
    if access.intent == Intent::Fetch { fault::FETCH } else { 0 }
}

/// Checks an access against a leaf, with write protection and no-execute. `hides_users`: SMEP or
/// SMAP applies.
fn allows(leaf: u64, access: GuestAccess, hides_users: bool) -> Result<(), u64> {
    let is_user = leaf & entry::USER != 0;
    let refused = access.user && !is_user
        || hides_users && is_user
        || match access.intent {
            Intent::Read => false,
            Intent::Write => leaf & entry::WRITE == 0,
            Intent::Fetch => leaf & entry::NX != 0,
        };
    if refused { Err(fault::PRESENT) } else { Ok(()) }
}

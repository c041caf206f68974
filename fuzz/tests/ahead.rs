//! Translations that the vTLB fills ahead, beside that of a fetch.

use abi::vcpu::x86::vtlb::{GLOBAL, SPACES_SHIFT, SYNC};
use hw_x86::msr::efer;
use hw_x86::paging::{cr0, cr4, entry, fault};
use kernel_x86::shadow::testing::{GuestRegisters, TestVcpu, page};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Physical pages of the nested tables, from the root down: they map the first 2 MiB.
const NESTED: [u64; 4] = [1, 2, 3, 4];
/// Physical page of the guest's first page.
const MEMORY: u64 = 1024;
/// First physical page of the pool.
const POOL: u64 = 2048;
/// Guest pages of the guest's tables, from the root down, and of another root.
const TABLES: [u64; 4] = [0x10, 0x11, 0x12, 0x13];
const OTHER_ROOT: u64 = 0x14;
/// Guest page of the first linear page.
const FIRST: u64 = 0x40;
/// Flags of a page of code that was used.
const CODE: u64 = entry::PRESENT | entry::USER | entry::ACCESSED;

fn set(physical_page: u64, slot: u64, value: u64) {
    page(physical_page << 12)[slot as usize].store(value, Relaxed);
}

/// Sets the guest's entry of a linear page.
fn map(slot: u64, flags: u64) {
    set(MEMORY + TABLES[3], slot, (FIRST + slot) << 12 | flags);
}

/// A vCPU whose guest has 384 pages of code.
struct Machine {
    vcpu: TestVcpu,
    registers: GuestRegisters,
    /// Next physical page of the pool.
    frames: u64,
}

impl Machine {
    fn new() -> Self {
        let table = entry::PRESENT | entry::USER | entry::WRITE | entry::ACCESSED;
        for levels in NESTED.windows(2) {
            set(levels[0], 0, levels[1] << 12 | table);
        }
        for slot in 0..512 {
            set(NESTED[3], slot, (MEMORY + slot) << 12 | table | entry::DIRTY);
        }
        for levels in TABLES.windows(2) {
            set(MEMORY + levels[0], 0, levels[1] << 12 | table);
        }
        (0..384).for_each(|slot| map(slot, CODE));
        let registers = GuestRegisters {
            cr0: cr0::PE | cr0::PG | cr0::WP,
            cr3: TABLES[0] << 12,
            cr4: cr4::PAE,
            efer: efer::LME | efer::LMA | efer::NXE,
        };
        let options = GLOBAL | SYNC | 4 << SPACES_SHIFT;
        let vcpu = TestVcpu::new(32, registers, options, NESTED[0] << 12);
        let mut this = Self { vcpu, registers, frames: POOL };
        this.prepare();
        this
    }

    fn prepare(&mut self) {
        self.vcpu.prepare(|| {
            self.frames += 2;
            (self.frames - 2) << 12
        });
    }

    /// Loads another root, and the first one again.
    fn reload(&mut self) {
        for cr3 in [OTHER_ROOT << 12, self.registers.cr3] {
            self.vcpu.write_control(GuestRegisters { cr3, ..self.registers });
            self.prepare();
        }
    }

    fn access(&self, slot: u64, code: u64) {
        let outcome = self.vcpu.page_fault(slot << 12, fault::USER | code, 3);
        assert_eq!(outcome, None, "page {slot:#x}");
    }

    /// Reads sixteen pages: the next fill is one of many.
    fn read_pages(&self) {
        (256..272).for_each(|slot| self.access(slot, 0));
    }

    /// Shadow leaf of a linear page.
    fn leaf(&self, slot: u64) -> &'static AtomicU64 {
        let down = |table: u64, _| page(table)[0].load(Relaxed) & entry::ADDRESS;
        let table = (0..3).fold(self.vcpu.vmcb().save.cr3.get(), down);
        &page(table)[slot as usize]
    }

    /// Those of the first pages that have a shadow leaf.
    fn filled(&self) -> Vec<u64> {
        let is_present = |slot: u64| self.leaf(slot).load(Relaxed) & entry::PRESENT != 0;
        (0..256).filter(|&slot| is_present(slot)).collect()
    }
}

#[test]
fn neighbours_of_a_fetch_are_filled_if_they_are_alike() {
    let machine = Machine::new();
    map(0x23, CODE & !entry::ACCESSED);
    map(0x24, CODE & !entry::USER);
    map(0x25, CODE | entry::NX);
    map(0x26, CODE | entry::WRITE);
    map(0x27, 0);
    set(MEMORY + TABLES[3], 0x28, 0xf00 << 12 | CODE);
    let nested = page(NESTED[3] << 12);
    nested[FIRST as usize + 0x29].fetch_or(entry::NX, Relaxed);
    nested[FIRST as usize + 0x2a].fetch_or(entry::UNCACHED, Relaxed);
    machine.read_pages();
    machine.access(0x22, fault::FETCH);
    let filled = machine.filled();
    assert_eq!(filled, [0x20, 0x21, 0x22, 0x2b, 0x2c, 0x2d, 0x2e, 0x2f]);
    for slot in filled {
        let expected = (MEMORY + FIRST + slot) << 12 | entry::PRESENT | entry::USER;
        let leaf = machine.leaf(slot).load(Relaxed) & !(entry::ACCESSED | entry::DIRTY);
        assert_eq!(leaf, expected, "page {slot:#x}");
    }
}

#[test]
fn only_fetches_after_many_fills_fill_ahead() {
    let machine = Machine::new();
    machine.access(0x22, fault::FETCH);
    assert_eq!(machine.filled(), [0x22]);
    machine.read_pages();
    machine.access(0x52, 0);
    assert_eq!(machine.filled(), [0x22, 0x52]);
    machine.access(0x62, fault::FETCH);
    assert_eq!(machine.filled().len(), 18);
}

#[test]
fn a_comparison_removes_those_that_were_not_used() {
    let mut machine = Machine::new();
    machine.read_pages();
    machine.access(0x22, fault::FETCH);
    machine.leaf(0x25).fetch_or(entry::ACCESSED, Relaxed);
    machine.reload();
    assert_eq!(machine.filled(), [0x22, 0x25]);
    machine.reload();
    assert_eq!(machine.filled(), [0x22, 0x25], "the used one is as any other");
}

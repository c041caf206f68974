//! Page tables outside of memory. Ends with a triple fault: a VM may end when its CPU walks such
//! tables, and on hardware, where they read as something, the access faults. The command line has
//! `case`: 0, a table where there is nothing; 1, in the local APIC; 2, a root beyond all memory.
#![no_std]
#![no_main]

use core::arch::asm;
use core::sync::atomic::Ordering::SeqCst;
use guests_micro::access::{self, AccessFault};
use guests_micro::paging::{ALL, FrameAllocator, RootTable, address};
use guests_micro::trap::{PAGE_FAULT, remove_table};
use guests_micro::{boot, check, cpu, guest, println};
use hw_x86::paging::entry;

guest!(main);

const HOLE: u64 = 0xd000_0000;
const APIC: u64 = 0xfee0_0000;
/// Below the least number of physical bits.
const BEYOND: u64 = 1 << 35;
/// Its entry is at the offset of the local APIC's version, whose bit 0 is clear.
const PLACE: u64 = address([17, 5, 7, 0x30 / 8]);
/// Levels of tables that are tried one after the other.
const LEVELS: [u32; 3] = [1, 2, 3];

fn main() {
    access::init();
    let mut frames = FrameAllocator::new();
    let tables = RootTable::new(&mut frames);
    tables.load();
    match boot::argument("case").unwrap_or(0) {
        0 => LEVELS.iter().for_each(|&level| walk(&mut frames, tables, level, HOLE)),
        1 => walk(&mut frames, tables, 1, APIC),
        _ => {
            println!("paging-unbacked: a root at {BEYOND:#x}");
            // SAFETY: the next fetch ends the VM, because nothing is mapped.
            unsafe { cpu::write_cr3(BEYOND) };
        }
    }
    println!("paging-unbacked: every access has faulted");
    remove_table();
    // SAFETY: raises an exception, for which there is no handler.
    unsafe { asm!("ud2", options(noreturn)) };
}

/// Accesses an address whose table of this level is outside of memory.
fn walk(frames: &mut FrameAllocator, tables: RootTable, level: u32, table: u64) {
    tables.map(frames, PLACE, 1, 0);
    let place = tables.entry(frames, PLACE, level + 1);
    let before = place.swap(table | ALL, SeqCst);
    cpu::invalidate_page(PLACE);
    println!("paging-unbacked: a table of level {level} at {table:#x}");
    let found = access::read(PLACE);
    let faulted =
        matches!(found, Err(AccessFault { vector: PAGE_FAULT, address, .. }) if address == PLACE);
    check!(faulted, "by a table outside of memory: {found:x?}");
    check!(place.load(SeqCst) & !entry::ACCESSED == table | ALL, "the entry has changed");
    place.store(before, SeqCst);
    cpu::invalidate_page(PLACE);
}

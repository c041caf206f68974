//! Cost of what a vTLB does: prints `VB name value ns n=operations mark=index` for INVLPG, a fill,
//! an injected page fault and a load of CR3, as `bench/guest/vbench.c` does. The value is in ticks
//! of the time-stamp counter. On the measuring machine a tick is a nanosecond and an instruction.
//! Its emulator counts world switches between two marks (`bench/plugin/count.c`).
#![no_std]
#![no_main]

use core::arch::{asm, global_asm};
use guests_micro::ram::Ram;
use guests_micro::{check, cpu, guest, println, trap};
use hw_x86::paging::{ENTRIES, entry};

guest!(main);

/// Bytes of a page and of a table.
const PAGE: u64 = 4096;
/// Pages that are touched: those of one table.
const PAGES: u64 = ENTRIES as u64;
/// First address of the mapped pages: entry 1 of the root, above what start-up maps.
const MAPPED: u64 = 1 << 39;
/// First address of absent pages, whose table is empty.
const ABSENT: u64 = MAPPED + PAGES * PAGE;
/// CR3 loads.
const LOADS: u32 = 1000;
/// CR3 loads before measuring.
const WARM_LOADS: u32 = 20;
/// Rights of a table's entry and of a page.
const RIGHTS: u64 = entry::PRESENT | entry::WRITE;

// The handler of page faults skips the instruction, one of `touch`, whose length is 3 bytes.
global_asm!(
    "    .text",
    "guest_skip_touch:",
    "    add rsp, 8",
    "    add qword ptr [rsp], 3",
    "    iretq",
);

// SAFETY: the label above; its address is taken only.
unsafe extern "C" {
    static guest_skip_touch: u8;
}

fn main() {
    let Some(ram) = Ram::free() else { return check!(false, "no RAM") };
    let roots = build(ram);
    load_root(roots[0]);

    // After the first round all tables exist; then only single translations are missing.
    let expected = PAGES * (PAGES - 1) / 2;
    check!(touch(MAPPED) == expected, "mapped pages hold something else");
    measure("invlpg", 0, PAGES as u32, || invalidate(MAPPED));
    let sum = measure("fill", 1, PAGES as u32, || touch(MAPPED));
    check!(sum == expected, "mapped pages hold something else after INVLPG");

    let handler = (&raw const guest_skip_touch).addr() as u64;
    // SAFETY: skips an instruction of `touch`, the only code that causes page faults from here on.
    unsafe { trap::set_entry(trap::PAGE_FAULT, handler) };
    touch(ABSENT);
    let sum = measure("inject", 2, PAGES as u32, || touch(ABSENT));
    check!(sum == 0, "absent pages can be read");

    alternate(roots, WARM_LOADS);
    measure("cr3", 3, LOADS, || alternate(roots, LOADS));
    check!(root() == roots[1], "CR3 holds {:#x} instead of {:#x}", root(), roots[1]);
}

/// Builds page tables in free RAM and returns two roots, each of which maps what start-up has
/// mapped, and [`PAGES`] pages with their numbers in their first words.
fn build(ram: Ram) -> [u64; 2] {
    let start = ram.start().next_multiple_of(PAGE);
    let [first, second, level_3, level_2, level_1, absent] =
        core::array::from_fn(|index| start + index as u64 * PAGE);
    let data = absent + PAGE;
    for address in (start..data).step_by(8) {
        ram.write(address, 0u64);
    }
    for root in [first, second] {
        ram.write(root, start_up_entry());
        ram.write(root + 8, level_3 | RIGHTS);
    }
    ram.write(level_3, level_2 | RIGHTS);
    ram.write(level_2, level_1 | RIGHTS);
    ram.write(level_2 + 8, absent | RIGHTS);
    for page in 0..PAGES {
        ram.write(level_1 + page * 8, (data + page * PAGE) | RIGHTS);
        ram.write(data + page * PAGE, page);
    }
    [first, second]
}

/// Returns the first entry of the present root, of the only 512 GiB that start-up maps.
fn start_up_entry() -> u64 {
    // SAFETY: start-up maps its own tables to themselves.
    unsafe { (root() as *const u64).read_volatile() }
}

fn root() -> u64 {
    let root;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, cr3", out(reg) root, options(nomem, nostack)) };
    root
}

fn load_root(root: u64) {
    // SAFETY: every root maps the program as start-up does.
    unsafe { asm!("mov cr3, {}", in(reg) root, options(nostack)) };
}

/// Loads CR3 `loads` times, an even number, with one root and the other.
fn alternate([first, second]: [u64; 2], loads: u32) {
    // SAFETY: as in `load_root`.
    unsafe {
        asm!("2:", "mov cr3, {first}", "mov cr3, {second}", "dec {count:e}", "jnz 2b",
            first = in(reg) first, second = in(reg) second, count = inout(reg) loads / 2 => _,
            options(nostack));
    }
}

/// Invalidates the translations of [`PAGES`] pages, one after another.
fn invalidate(address: u64) {
    // SAFETY: the next access finds the translation again.
    unsafe {
        asm!("2:", "invlpg [rdi]", "add rdi, {page}", "dec esi", "jnz 2b", page = const PAGE,
            inout("rdi") address => _, inout("esi") PAGES as u32 => _, options(nostack));
    }
}

/// Reads the first words of [`PAGES`] pages and returns their sum. The handler of page faults skips
/// a read.
fn touch(address: u64) -> u64 {
    let sum;
    // SAFETY: reads pages of `build`; absent ones only while the handler is there.
    unsafe {
        asm!("2:", "add rax, [rdi]", "add rdi, {page}", "dec esi", "jnz 2b",
            page = const PAGE, inout("rax") 0u64 => sum, inout("rdi") address => _,
            inout("esi") PAGES as u32 => _, options(readonly));
    }
    sum
}

/// Measures operations between marks, as pair number `pair`.
fn measure<T>(name: &str, pair: u32, operations: u32, run: impl FnOnce() -> T) -> T {
    mark::<1>();
    let start = cpu::tsc();
    let result = run();
    let tenths = (cpu::tsc() - start) * 10 / u64::from(operations);
    mark::<2>();
    println!("VB {name} {}.{} ns n={operations} mark={pair}", tenths / 10, tenths % 10);
    result
}

/// Executes a no-operation that the measuring emulator knows.
fn mark<const NUMBER: u32>() {
    // SAFETY: NOPL changes nothing.
    unsafe {
        asm!(".byte 0x0f, 0x1f, 0x84, 0x00", ".long 0x50617200 + {}", const NUMBER,
            options(nostack));
    }
}

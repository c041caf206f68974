//! Debug exceptions, which the host sees first and gives back: each comes once, at the right place,
//! with what the processor has put into DR6 and DR7 (APM vol. 2, sections 8.2.2 and 13.1). And one
//! of these without end leaves others their time.
#![no_std]
#![no_main]

use core::arch::asm;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use guests_micro::trap::TrapFrame;
use guests_micro::{check, guest, println};

guest!(main, trap);

const DEBUG: u8 = 1;
/// `RFLAGS.RF`.
const RESUME: u64 = 1 << 16;
/// `RFLAGS.TF`.
const TRAP: u64 = 1 << 8;
/// `DR6` without a cause.
const NO_CAUSE: u64 = 0xffff_0ff0;
/// `DR6.BS`.
const STEP: u64 = 1 << 14;
/// `DR7` with nothing on.
const OFF: u64 = 0x400;
/// `DR7`: breakpoint 0 is on, at writes of 8 bytes.
const WRITES: u64 = OFF | 0b01 | 0b1001 << 16;
/// `DR7`: breakpoint 0 is on, at the execution of an instruction.
const EXECUTION: u64 = OFF | 0b01;
/// Steps of the long run: more than enough for the host's timer to come in between.
const MANY: u64 = 2_000;

/// `#DB`s so far, and what the last one found: place, DR6, saved flags.
static COUNT: AtomicUsize = AtomicUsize::new(0);
static FOUND: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];
static WATCHED: AtomicU64 = AtomicU64::new(0);

fn trap(frame: &mut TrapFrame) {
    if frame.vector() != DEBUG {
        guests_micro::trap::unexpected(frame);
    }
    let status: u64;
    // SAFETY: reads and clears a status.
    unsafe {
        asm!("mov {0}, dr6", "mov dr6, {1}", out(reg) status, in(reg) NO_CAUSE, options(nomem, nostack));
    }
    COUNT.fetch_add(1, Relaxed);
    let values = [frame.rip, status, frame.rflags];
    FOUND.iter().zip(values).for_each(|(place, value)| place.store(value, Relaxed));
    if status & STEP == 0 {
        frame.rflags |= RESUME;
    }
}

/// Compares the only `#DB` since the last time with what it must have been.
fn expect(what: &str, place: u64, status: u64) {
    let count = COUNT.swap(0, Relaxed);
    let [at, found, rflags] = FOUND.each_ref().map(|value| value.load(Relaxed));
    check!(count == 1, "{what}: {count} debug exceptions");
    check!(at == place, "{what}: at {at:#x} instead of {place:#x}");
    check!(found == status, "{what}: DR6 {found:#x} instead of {status:#x}");
    check!(rflags & RESUME == 0, "{what}: RF is saved");
}

fn step() {
    let place: u64;
    // SAFETY: no handler changes registers; the stack is as before.
    unsafe {
        asm!(
            "lea {place}, [rip + 2f]",
            "pushfq", "or qword ptr [rsp], {trap}", "popfq",
            // The step is over here; the next one would be the second.
            "nop", "2:",
            "pushfq", "and qword ptr [rsp], ~{trap}", "popfq",
            place = out(reg) place, trap = const TRAP,
        );
    }
    let count = COUNT.load(Relaxed);
    check!(count == 4, "step: {count} debug exceptions instead of 4");
    let last = FOUND[1].load(Relaxed);
    check!(last == NO_CAUSE | STEP, "step: DR6 {last:#x}");
    check!(FOUND[0].load(Relaxed) > place, "step: the last one is behind the first");
    COUNT.store(0, Relaxed);
}

fn write() {
    let place: u64;
    // SAFETY: the breakpoint is at a static of this program, and off in the end.
    unsafe {
        asm!(
            "lea {place}, [rip + 2f]",
            "mov dr0, {watched}", "mov dr7, {on}",
            "mov qword ptr [{watched}], 1", "2:", "nop",
            "mov dr7, {off}",
            place = out(reg) place, watched = in(reg) WATCHED.as_ptr(), on = in(reg) WRITES, off = in(reg) OFF,
        );
    }
    expect("write", place, NO_CAUSE | 1);
}

fn execution() {
    let place: u64;
    // SAFETY: the breakpoint is at the instruction named, and off in the end.
    unsafe {
        asm!(
            "lea {place}, [rip + 2f]",
            "mov dr0, {place}", "mov dr7, {on}",
            "2:", "nop",
            "mov dr7, {off}",
            place = out(reg) place, on = in(reg) EXECUTION, off = in(reg) OFF,
        );
    }
    expect("execution", place, NO_CAUSE | 1);
}

/// Steps for a while: at each there is an exit, and interrupts of the host come in between.
fn many() {
    // SAFETY: no handler changes registers; the stack is as before.
    unsafe {
        asm!(
            "pushfq", "or qword ptr [rsp], {trap}", "popfq",
            "2:", "dec {count}", "jnz 2b",
            "pushfq", "and qword ptr [rsp], ~{trap}", "popfq",
            count = inout(reg) MANY => _, trap = const TRAP,
        );
    }
    let count = COUNT.swap(0, Relaxed) as u64;
    check!(count == 2 * MANY + 3, "{count} steps instead of {}", 2 * MANY + 3);
}

fn main() {
    step();
    write();
    execution();
    many();
    println!("debug: every exception once");
}

//! Single steps and instruction breakpoints over instructions that the host carries out (APM vol.
//! 2, sections 13.1.1 and 13.1.4): each round of a repeated string instruction is a step, and a
//! breakpoint behind such an instruction is hit.
#![no_std]
#![no_main]

use core::arch::asm;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use guests_micro::trap::TrapFrame;
use guests_micro::{check, guest, println};

guest!(main, trap);

/// A port that only exits.
const POST: u16 = 0x80;
const DEBUG: u8 = 1;
/// `RFLAGS.RF`.
const RESUME: u64 = 1 << 16;
/// `DR6.BS`, and the bits of breakpoints.
const STEP: u64 = 1 << 14;
const HIT: u64 = 0b1111;
/// `DR7`: breakpoints 0 and 1 are on, at the execution of an instruction.
const TWO_BREAKPOINTS: u64 = 0x400 | 0b0101;
const NO_BREAKPOINTS: u64 = 0x400;

/// State at a `#DB`: address, saved RF, RCX, DR6.
const RECORDS: usize = 16;
static FOUND: [[AtomicU64; 4]; RECORDS] = [const { [const { AtomicU64::new(0) }; 4] }; RECORDS];
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn trap(frame: &mut TrapFrame) {
    if frame.vector() != DEBUG {
        guests_micro::trap::unexpected(frame);
    }
    let status: u64;
    // SAFETY: reads and clears a status.
    unsafe {
        asm!("mov {0}, dr6", "mov dr6, {1}", out(reg) status, in(reg) 0xffff_0ff0_u64, options(nomem, nostack));
    }
    if let Some(found) = FOUND.get(COUNT.fetch_add(1, Relaxed)) {
        let values = [frame.rip, frame.rflags & RESUME, frame.rcx, status & (STEP | HIT)];
        found.iter().zip(values).for_each(|(place, value)| place.store(value, Relaxed));
    }
    if status & HIT != 0 {
        // The instruction is executed this time.
        frame.rflags |= RESUME;
    }
}

/// Compares what was found with what must have been.
fn expect(what: &str, expected: &[[u64; 4]]) {
    let count = COUNT.swap(0, Relaxed);
    check!(count >= expected.len(), "{what}: {count} debug exceptions");
    for (index, expected) in expected.iter().enumerate() {
        let found = FOUND[index].each_ref().map(|value| value.load(Relaxed));
        check!(found == *expected, "{what} {index}: {found:x?} instead of {expected:x?}");
    }
}

fn steps() {
    let bytes = [0_u8; 3];
    let (string, behind, next): (u64, u64, u64);
    // SAFETY: no device answers the port; the stack is as before, and no handler changes registers.
    unsafe {
        asm!(
            "lea {string}, [rip + 2f]", "lea {behind}, [rip + 3f]", "lea {next}, [rip + 4f]",
            "pushfq", "or qword ptr [rsp], 0x100", "popfq",
            "2: rep outsb", "3: out dx, al", "4: nop",
            "pushfq", "and qword ptr [rsp], -0x101", "popfq",
            string = out(reg) string, behind = out(reg) behind, next = out(reg) next,
            in("dx") POST, inout("rsi") bytes.as_ptr() => _, inout("rcx") bytes.len() => _,
        );
    }
    let expected = [
        [string, RESUME, 2, STEP],
        [string, RESUME, 1, STEP],
        [behind, 0, 0, STEP],
        [next, 0, 0, STEP],
    ];
    expect("step", &expected);
}

fn breakpoints() {
    let (first, second): (u64, u64);
    // SAFETY: no device answers the port; breakpoints are at the instructions named, and off in the
    // end.
    unsafe {
        asm!(
            "lea {first}, [rip + 2f]", "lea {second}, [rip + 3f]",
            "mov dr0, {first}", "mov dr1, {second}", "mov dr7, {on}",
            "2: out dx, al", "3: out dx, al",
            "mov dr7, {off}",
            first = out(reg) first, second = out(reg) second, on = in(reg) TWO_BREAKPOINTS,
            off = in(reg) NO_BREAKPOINTS, in("dx") POST, in("rcx") 0_u64, options(nomem),
        );
    }
    expect("breakpoint", &[[first, 0, 0, 1], [second, 0, 0, 2]]);
}

fn main() {
    steps();
    breakpoints();
    println!("steps: every round, and both breakpoints");
}

//! Computes while exits and interrupts come at random; the result must be that of the same
//! computation undisturbed.
#![no_std]
#![no_main]

use core::arch::asm;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use guests_micro::random::{Random, mix};
use guests_micro::trap::{PROTECTION, TrapFrame, UNDEFINED};
use guests_micro::{apic, boot, check, cpu, guest, port, println};
use hw_x86::apic::local::TIMER_PERIODIC;

guest!(main, trap);

const STEPS: u64 = 20_000;
/// Ticks between two interrupts of the timer. Longer than one takes on the slowest machine (KVM
/// inside of an emulated host, hundreds of microseconds): shorter, and the guest does nothing else.
const PERIOD: u32 = 2_000_000;
/// The first vector of messages to itself; the timer's is below.
const MESSAGES: u8 = 0x70;
const TIMER: u8 = 0x41;
const NOBODYS_PORT: u16 = 0x5678;
const NOBODYS_MSR: u32 = 0x1234_5678;
const POST: u16 = 0x80;

static TICKS: AtomicU32 = AtomicU32::new(0);
static RECEIVED: AtomicU32 = AtomicU32::new(0);

fn trap(frame: &mut TrapFrame) {
    match frame.vector() {
        TIMER => TICKS.fetch_add(1, Relaxed),
        MESSAGES.. => RECEIVED.fetch_add(1, Relaxed),
        _ => guests_micro::trap::unexpected(frame),
    };
    apic::end_of_interrupt();
}

fn main() {
    let expected = compute(|_| {});
    apic::enable();
    apic::start_timer(TIMER_PERIODIC, TIMER, PERIOD);
    let mut sent = 0;
    let mut random = Random(99);
    let found = compute(|step| disturb(&mut random, step, &mut sent));
    cpu::take_interrupts();
    apic::stop_timer();
    check!(found == expected, "computed {found:#x} instead of {expected:#x}");
    let received = RECEIVED.load(Relaxed);
    check!(received == sent, "{received} of {sent} messages arrived");
    check!(TICKS.load(Relaxed) > 0, "the timer never interrupted");
    println!("stress: checksum {found:#018x} over {STEPS} steps");
}

/// A chain of registers and memory in which every step depends on all before.
fn compute(mut between: impl FnMut(u64)) -> u64 {
    let mut sum = 1u64;
    let (start, end) = boot::free_ram().last().unwrap_or((0, 0));
    let words = (end - start) / 8;
    check!(words != 0, "no RAM");
    for step in 0..STEPS {
        let place = (start + mix(step) % words * 8) as *mut u64;
        // SAFETY: RAM that no other code uses, mapped and aligned.
        unsafe { place.write_volatile(sum) };
        between(step);
        // SAFETY: as above.
        sum = mix(sum ^ unsafe { place.read_volatile() }.rotate_left(17) ^ step);
    }
    sum
}

/// One thing that leaves the guest or interrupts it.
fn disturb(random: &mut Random, step: u64, sent: &mut u32) {
    match random.below(12) {
        0 => {
            cpu::cpuid(random.below(16) as u32, 0);
        }
        1 => port::write8(POST, step as u8),
        2 => check!(port::read32(NOBODYS_PORT) == u32::MAX, "step {step}: a port answered"),
        3 => {
            let mut buffer = [0; 24];
            port::read_string(NOBODYS_PORT, &mut buffer);
            check!(buffer == [0xff; 24], "step {step}: string read");
        }
        4 => {
            // One at a time, so that none are merged.
            apic::send_self(MESSAGES + random.below(0x80) as u8);
            *sent += 1;
            cpu::take_interrupts();
            let received = RECEIVED.load(Relaxed);
            check!(received == *sent, "step {step}: message {} is late", *sent);
        }
        5 => cpu::take_interrupts(),
        6 => {
            cpu::enable_and_halt();
            cpu::disable_interrupts();
        }
        7 => {
            let result = cpu::read_msr(NOBODYS_MSR);
            // Some emulators let every register be read.
            check!(matches!(result, Err(PROTECTION) | Ok(0)), "step {step}: {result:x?}");
        }
        8 => {
            let result = cpu::hypercall(!0);
            check!(
                !matches!(result, Err(vector) if vector != UNDEFINED),
                "step {step}: {result:x?}"
            );
        }
        9 => flags(step),
        10 => registers(random, step),
        _ => {
            let before = cpu::tsc();
            check!(cpu::tsc() >= before, "step {step}: time ran backwards");
        }
    }
}

/// Flags survive an exit.
fn flags(step: u64) {
    let (carry, zero): (u8, u8);
    // SAFETY: changes flags only.
    unsafe {
        asm!("xor {c}, {c}", "stc", "out 0x80, al", "setz {z}", "setc {c}",
            c = out(reg_byte) carry, z = out(reg_byte) zero, out("al") _, options(nostack));
    }
    check!((carry, zero) == (1, 1), "step {step}: flags {carry} {zero}");
}

/// General registers survive an exit.
fn registers(random: &mut Random, step: u64) {
    let seed = random.word();
    let sum: u64;
    // SAFETY: computes with registers that it declares.
    unsafe {
        asm!(
            "lea r9, [r8 + 1]", "lea r10, [r8 + 2]", "lea r11, [r8 + 3]", "lea r12, [r8 + 4]",
            "lea r13, [r8 + 5]", "lea r14, [r8 + 6]", "lea r15, [r8 + 7]", "lea rsi, [r8 + 8]",
            "lea rdi, [r8 + 9]", "out 0x80, al",
            "add r8, r9", "add r8, r10", "add r8, r11", "add r8, r12", "add r8, r13",
            "add r8, r14", "add r8, r15", "add r8, rsi", "add r8, rdi",
            inout("r8") seed => sum, out("r9") _, out("r10") _, out("r11") _, out("r12") _,
            out("r13") _, out("r14") _, out("r15") _, out("rsi") _, out("rdi") _,
            in("al") 0u8, options(nomem, nostack),
        );
    }
    let expected = seed.wrapping_mul(10).wrapping_add(45);
    check!(sum == expected, "step {step}: registers {sum:#x} instead of {expected:#x}");
}

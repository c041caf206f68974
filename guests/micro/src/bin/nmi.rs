//! Non-maskable interrupts are masked from the delivery of one to the end of the next `IRET`, of
//! whatever handler (APM vol. 2, section 8.2.3): one that comes meanwhile waits, several are one,
//! and the next begins on the stack of what was interrupted.
#![no_std]
#![no_main]

use core::arch::asm;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use guests_micro::trap::{NMI, TrapFrame, UNDEFINED};
use guests_micro::{apic, check, cpu, guest, println, trap};
use hw_x86::apic::local::{DELIVER_NMI, ICR_ASSERT};

guest!(main, trap);

const ROUNDS: usize = 50;
/// `DR6` without a cause, and with an uncleared one.
const NO_CAUSE: u64 = 0xffff_0ff0;
const OLD_CAUSE: u64 = NO_CAUSE | 1;
/// Action of the first handler of a round.
const NOTHING: usize = 0;
const SEND: usize = 1;
const SEND_AND_FAULT: usize = 2;

static TASK: AtomicUsize = AtomicUsize::new(NOTHING);
static DEPTH: AtomicUsize = AtomicUsize::new(0);
static DEEPEST: AtomicUsize = AtomicUsize::new(0);
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// The stack pointer of what the last one interrupted.
static STACK: AtomicU64 = AtomicU64::new(0);

fn trap(frame: &mut TrapFrame) {
    if frame.vector() != NMI {
        guests_micro::trap::unexpected(frame);
    }
    let depth = DEPTH.fetch_add(1, Relaxed) + 1;
    DEEPEST.fetch_max(depth, Relaxed);
    let count = COUNT.fetch_add(1, Relaxed) + 1;
    STACK.store(frame.rsp, Relaxed);
    let task = TASK.swap(NOTHING, Relaxed);
    if task != NOTHING {
        send();
        send();
        exits();
        let now = COUNT.load(Relaxed);
        check!(now == count, "an NMI came in the handler of another");
    }
    if task == SEND_AND_FAULT {
        fault();
        exits();
        let now = COUNT.load(Relaxed);
        check!(now == count + 1, "{} NMIs came after the IRET of an exception", now - count);
    }
    DEPTH.fetch_sub(1, Relaxed);
}

fn send() {
    apic::send(apic::id(), DELIVER_NMI | ICR_ASSERT);
}

/// Leaves the guest some times, if there is a host: each time it could deliver something.
fn exits() {
    for _ in 0..10 {
        cpu::cpuid(0, 0);
    }
}

/// An exception, whose handler ends with IRET.
fn fault() {
    let attempt = trap::recover();
    // SAFETY: after the exception the program continues at label 2.
    unsafe {
        asm!("lea {tmp}, [rip + 2f]", "mov [{resume}], {tmp}", "ud2", "2:",
            tmp = out(reg) _, resume = in(reg) attempt.resume(), options(nostack));
    }
    check!(attempt.finish() == Err(UNDEFINED), "no exception");
}

/// One round: an NMI whose handler does `task`. Returns the number of NMIs.
fn round(task: usize) -> usize {
    COUNT.store(0, Relaxed);
    DEEPEST.store(0, Relaxed);
    TASK.store(task, Relaxed);
    let status: u64;
    // SAFETY: a status register that no other code uses.
    unsafe { asm!("mov dr6, {}", in(reg) OLD_CAUSE, options(nomem, nostack)) };
    send();
    exits();
    // SAFETY: as above.
    unsafe { asm!("mov {}, dr6", out(reg) status, options(nomem, nostack)) };
    check!(status == OLD_CAUSE, "DR6 is {status:#x}");
    COUNT.load(Relaxed)
}

fn main() {
    apic::enable();
    let stack = cpu::stack_pointer();
    for number in 0..ROUNDS {
        for (task, wanted, deepest) in [(NOTHING, 1, 1), (SEND, 2, 1), (SEND_AND_FAULT, 2, 2)] {
            if number % 2 == 0 {
                cpu::enable_interrupts();
            }
            let count = round(task);
            cpu::disable_interrupts();
            check!(count == wanted, "task {task}: {count} NMIs instead of {wanted}");
            let found = DEEPEST.load(Relaxed);
            check!(found == deepest, "task {task}: {found} handlers at a time, not {deepest}");
            // A second one in front of the IRET would find the first one's frame below it.
            let below = stack.wrapping_sub(STACK.load(Relaxed));
            check!(deepest == 2 || below < 512, "task {task}: interrupted {below} bytes below");
        }
    }
    println!("nmi: masked until IRET in {ROUNDS} rounds");
}

//! Measures the cost of messages to another VM, and of world switches between two VMs
//! ([`guests_micro::messages`]): side 0 prints `VB name value ns`, in ticks of the time-stamp
//! counter. On the measuring machine a tick is a nanosecond and an instruction.
#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use guests_micro::channel::{self, ChannelEnd};
use guests_micro::messages::{Board, Pair};
use guests_micro::trap::TrapFrame;
use guests_micro::{apic, check, cpu, guest, println};
use hw_x86::apic::local::TIMER_ONE_SHOT;
use hw_x86::cpuid::{features_c, leaf};
use proto::channel::register::SIDE;

guest!(main, trap);

const DOORBELL: u8 = 0x40;
const EVENT: u8 = 0x41;
const TIMER: u8 = 0x48;
/// Ticks of the local timer after which the halting VM continues.
const PAUSE: u32 = 1_000_000;

/// When the last doorbell's handler began.
static RUNG: AtomicU64 = AtomicU64::new(0);

fn trap(frame: &mut TrapFrame) {
    match frame.vector() {
        DOORBELL => RUNG.store(cpu::tsc(), SeqCst),
        // The peer has ended, which comes last.
        TIMER | EVENT => {}
        _ => guests_micro::trap::unexpected(frame),
    }
    apic::end_of_interrupt();
}

/// The board, with its channel.
struct Pc(ChannelEnd);

impl Board for Pc {
    const BATCHES: u64 = 5;
    const SWITCHES: u64 = 5;
    const GAP: u64 = 400;
    const TURN: u64 = 100_000;

    #[inline(always)]
    fn counter() -> u64 {
        cpu::tsc()
    }

    #[inline(always)]
    fn ring(&self) {
        self.0.ring();
    }

    #[inline(always)]
    fn rung() -> u64 {
        RUNG.load(SeqCst)
    }

    #[inline(always)]
    fn halt() {
        cpu::enable_and_halt();
        cpu::disable_interrupts();
    }

    #[inline(always)]
    fn poll() {
        let before = Self::rung();
        cpu::enable_interrupts();
        while Self::rung() == before {
            core::hint::spin_loop();
        }
        cpu::disable_interrupts();
    }

    fn start_timer() {
        apic::start_timer(TIMER_ONE_SHOT, TIMER, PAUSE);
    }

    #[inline(always)]
    fn vary(_step: u64) {}

    fn report(name: &str, ticks: u64, count: u64) {
        let tenths = ticks * 10 / count;
        println!("VB {name} {}.{} ns", tenths / 10, tenths % 10);
    }

    fn fail(why: &str) {
        check!(false, "{why}");
    }
}

fn main() {
    if cpu::cpuid(leaf::FEATURES, 0).ecx & features_c::X2APIC == 0 {
        println!("channel-cost: this processor has no x2APIC");
        return;
    }
    apic::enable();
    check!(apic::enter_x2apic().is_ok(), "the processor cannot enter x2APIC mode");
    let found = channel::all().next().and_then(|mut channel| {
        channel.enable(DOORBELL);
        Some((channel.rings()?, channel))
    });
    let Some((rings, channel)) = found else {
        check!(false, "there is no channel");
        return;
    };
    cpu::disable_interrupts();
    let (side, area) = (channel.read(SIDE).into(), channel.free_area());
    Pair::new(Pc(channel), rings, area).measure(side);
}

//! Kernel panic: always a kernel bug or a hardware error. Writes an epitaph
//! ([`kernel_run::epitaph`]) and stops all CPUs: this one at once, the others at their next entry.

use core::panic::PanicInfo;
use core::sync::atomic::{AtomicBool, Ordering};

use kernel_run::epitaph::{self, Death, Dying};
use kernel_run::ranges::Range;

use crate::boot::image_layout;
use crate::io::{stack_pointer, stop};
use crate::log::LOG;
use crate::{cpu, psci};

/// By the lower half of the affinity.
static DYING: Dying = Dying::new();
static POWER_OFF: AtomicBool = AtomicBool::new(false);

/// Applies the command-line option `panic=`: `off` switches the machine off, any other value
/// halts.
pub fn init(choice: Option<&str>) {
    POWER_OFF.store(choice == Some("off"), Ordering::Relaxed);
}

/// Stops this CPU if a CPU has panicked.
pub fn stop_if_dying() {
    if DYING.has_begun() {
        stop();
    }
}

/// Implements the panic handler: reports the panic and stops.
pub fn die(info: &PanicInfo) -> ! {
    let me = cpu::affinity() as u32;
    match DYING.begin(me) {
        Death::First => {}
        Death::Again => finish(),
        Death::Other => stop(),
    }
    // SAFETY: the other CPUs stop at their next entry of the kernel; the lock is never released.
    unsafe { LOG.seize() };
    let report = |line: core::fmt::Arguments<'_>| epitaph::report_line(&LOG, line);
    report(format_args!("PANIC on the CPU with affinity {me:#x}: {}", info.message()));
    if let Some(place) = info.location() {
        report(format_args!("  at {}:{}", place.file(), place.line()));
    }
    let bottom = stack_pointer() & !7;
    let page = Range::new(bottom, bottom | (abi::PAGE_SIZE - 1));
    // SAFETY: the rest of the stack's page is mapped.
    unsafe { epitaph::report_callers(&LOG, image_layout().code, page) };
    finish()
}

fn finish() -> ! {
    if POWER_OFF.load(Ordering::Relaxed) {
        psci::end(false);
    }
    stop()
}

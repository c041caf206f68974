//! Kernel panic: always a kernel bug or a hardware error (`machine_check`). Writes an epitaph
//! ([`kernel_run::epitaph`]) and stops all CPUs.

use crate::boot_info::image;
use crate::io::{out8, read_cr2, read_cr3, stack_pointer, stop};
use crate::log::LOG;
use crate::{apic, cpu, features};
use core::fmt;
use core::panic::PanicInfo;
use core::sync::atomic::{AtomicBool, Ordering};
use kernel_run::epitaph::{self, Death, Dying};
use kernel_run::ranges::Range;

/// I/O port of QEMU's isa-debug-exit, and the value that `parador` expects there: larger than root
/// writes for any exit code.
const DEBUG_EXIT_PORT: u16 = 0xf4;
const DEBUG_EXIT_VALUE: u8 = 0x7f;

static DYING: Dying = Dying::new();
static EXIT_REQUESTED: AtomicBool = AtomicBool::new(false);
static DEBUG_EXIT: AtomicBool = AtomicBool::new(false);

/// Applies the command-line option `panic=`: `debug-exit` terminates an emulated machine, any other
/// value halts.
pub fn init(choice: Option<&str>) {
    DEBUG_EXIT.store(choice == Some("debug-exit"), Ordering::Relaxed);
}

/// Stops this CPU if a CPU has panicked. The NMI handler must call it first.
pub fn stop_if_dying() {
    if DYING.has_begun() {
        stop();
    }
}

fn report_line(line: fmt::Arguments) {
    epitaph::report_line(&LOG, line);
}

/// Implements the panic handler: reports the panic and stops all CPUs.
pub fn die(info: &PanicInfo) -> ! {
    let me = features::initial_apic_id();
    match DYING.begin(me) {
        Death::First => {}
        Death::Again => finish(),
        Death::Other => stop(),
    }
    if let Some(apic) = apic::try_local() {
        apic.send_nmi_to_others();
    }
    // SAFETY: the NMI stops the CPU that holds the buffer; if it is this one, it does not continue.
    unsafe { LOG.seize() };
    report_line(format_args!("PANIC on the CPU with APIC id {me}: {}", info.message()));
    if let Some(place) = info.location() {
        report_line(format_args!("  at {}:{}", place.file(), place.line()));
    }
    report_line(format_args!(
        "  cr2 {:#x}, cr3 {:#x}, rsp {:#x}",
        read_cr2(),
        read_cr3(),
        stack_pointer()
    ));
    let bottom = stack_pointer() & !7;
    // Early in boot the stack is part of the image; at least its page is mapped.
    let end = cpu::stack_end(bottom).unwrap_or(bottom | (abi::PAGE_SIZE - 1));
    // SAFETY: the words of a stack from the stack pointer upwards are mapped.
    unsafe { epitaph::report_callers(&LOG, image().code, Range::new(bottom, end)) };
    finish()
}

fn finish() -> ! {
    if DEBUG_EXIT.load(Ordering::Relaxed) && !EXIT_REQUESTED.swap(true, Ordering::Relaxed) {
        // SAFETY: terminates the machine if the device exists, else has no effect.
        unsafe { out8(DEBUG_EXIT_PORT, DEBUG_EXIT_VALUE) };
    }
    stop()
}

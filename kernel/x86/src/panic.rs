//! The end: a kernel panic is always a bug of ours, or an error of the hardware (`machine_check`). It leaves an epitaph on the log and at the symbol
//! `PARADOR_EPITAPH`, and stops all CPUs.

use crate::boot::image;
use crate::io::{out8, read_cr2, read_cr3, stack_pointer, stop};
use crate::{apic, cpu, features, log};
use core::fmt::{self, Write};
use core::panic::PanicInfo;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering};

/// Bytes of text in the epitaph.
const TEXT_LENGTH: usize = 1008;
/// "EPITAPH\0".
const EPITAPH_MAGIC: u64 = u64::from_le_bytes(*b"EPITAPH\0");
/// Most bytes of the stack that are looked at, and most return addresses shown.
const STACK_LENGTH: u64 = 4096;
const STACK_SHOWN: usize = 16;
/// QEMU's isa-debug-exit, and what `parador` expects there: larger than what root makes of any exit code.
const DEBUG_EXIT_PORT: u16 = 0xf4;
const DEBUG_EXIT_VALUE: u8 = 0x7f;

/// Why the kernel died, for whoever looks at its memory afterwards.
#[repr(C)]
pub struct Epitaph {
    /// [`EPITAPH_MAGIC`], so that it can be found without symbols.
    magic: u64,
    /// Bytes of text; 0 while the kernel lives.
    length: AtomicUsize,
    /// The lines of the panic, as logged.
    text: [AtomicU8; TEXT_LENGTH],
}

/// The epitaph.
#[unsafe(no_mangle)]
#[used]
pub static PARADOR_EPITAPH: Epitaph = Epitaph {
    magic: EPITAPH_MAGIC,
    length: AtomicUsize::new(0),
    text: [const { AtomicU8::new(0) }; TEXT_LENGTH],
};

impl Write for &Epitaph {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let at = self.length.load(Ordering::Relaxed);
        let room = self.text.get(at..).unwrap_or(&[]);
        let taken = room.iter().zip(text.bytes()).map(|(place, byte)| {
            place.store(byte, Ordering::Relaxed);
        });
        self.length.store(at + taken.count(), Ordering::Release);
        Ok(())
    }
}

const NO_CPU: u32 = u32::MAX;
/// APIC id of the CPU that panicked first.
static DYING: AtomicU32 = AtomicU32::new(NO_CPU);
static EXIT_REQUESTED: AtomicBool = AtomicBool::new(false);
static DEBUG_EXIT: AtomicBool = AtomicBool::new(false);

/// Obeys the command line's `panic=`: `debug-exit` ends an emulated machine, anything else halts.
pub fn init(choice: Option<&str>) {
    DEBUG_EXIT.store(choice == Some("debug-exit"), Ordering::Relaxed);
}

/// To be called first by the handler of non-maskable interrupts: does not return if a CPU has panicked.
pub fn stop_if_dying() {
    if DYING.load(Ordering::Acquire) != NO_CPU {
        stop();
    }
}

fn report_line(line: fmt::Arguments) {
    // Writing to memory cannot fail.
    let _ = writeln!(&PARADOR_EPITAPH, "{line}");
    log::line(line);
}

/// Ends the kernel: the panic handler.
pub fn die(info: &PanicInfo) -> ! {
    let me = features::initial_apic_id();
    match DYING.compare_exchange(NO_CPU, me, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {}
        // The epitaph itself failed: say no more, but end as asked.
        Err(first) if first == me => finish(),
        Err(_) => stop(),
    }
    if let Some(apic) = apic::try_local() {
        apic.send_nmi_to_others();
    }
    log::seize();
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
    report_callers();
    finish()
}

/// Shows what looks like return addresses, from here to the end of the stack.
fn report_callers() {
    let code = image().code;
    let bottom = stack_pointer() & !7;
    // Early in boot the stack is part of the image; its page at least is mapped.
    let end = cpu::stack_end(bottom).unwrap_or(bottom | (abi::PAGE_SIZE - 1));
    let addresses = (bottom..end.min(bottom + STACK_LENGTH))
        .step_by(8)
        // SAFETY: the aligned words of a stack from the stack pointer on are mapped.
        .map(|word| unsafe { (word as *const u64).read_volatile() })
        .filter(|address| (code.base..code.end).contains(address));
    for address in addresses.take(STACK_SHOWN) {
        report_line(format_args!("  stack: {address:#x}"));
    }
}

fn finish() -> ! {
    if DEBUG_EXIT.load(Ordering::Relaxed) && !EXIT_REQUESTED.swap(true, Ordering::Relaxed) {
        // SAFETY: ends the machine if there is such a device, and else does nothing.
        unsafe { out8(DEBUG_EXIT_PORT, DEBUG_EXIT_VALUE) };
    }
    stop()
}

//! Kernel panic: always a kernel bug or a hardware error (`machine_check`). Writes an epitaph to
//! the log and to the symbol `PARADOR_EPITAPH`, and stops all CPUs.

use crate::boot_info::image;
use crate::io::{out8, read_cr2, read_cr3, stack_pointer, stop};
use crate::log::LOG;
use crate::{apic, cpu, features};
use core::fmt::{self, Write};
use core::panic::PanicInfo;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering};

/// Maximum length of the epitaph's text in bytes.
const TEXT_LENGTH: usize = 1008;
/// "EPITAPH\0".
const EPITAPH_MAGIC: u64 = u64::from_le_bytes(*b"EPITAPH\0");
/// Limits of the stack scan: bytes read, and return addresses reported.
const STACK_LENGTH: u64 = 4096;
const STACK_SHOWN: usize = 16;
/// I/O port of QEMU's isa-debug-exit, and the value that `parador` expects there: larger than root
/// writes for any exit code.
const DEBUG_EXIT_PORT: u16 = 0xf4;
const DEBUG_EXIT_VALUE: u8 = 0x7f;

/// Record of a panic, for inspection of kernel memory.
#[repr(C)]
pub struct Epitaph {
    /// [`EPITAPH_MAGIC`], by which the record can be found without symbols.
    magic: u64,
    /// Length of the text in bytes; 0 before a panic.
    length: AtomicUsize,
    /// Lines of the panic message, as logged.
    text: [AtomicU8; TEXT_LENGTH],
}

/// The record.
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

/// Applies the command-line option `panic=`: `debug-exit` terminates an emulated machine, any other
/// value halts.
pub fn init(choice: Option<&str>) {
    DEBUG_EXIT.store(choice == Some("debug-exit"), Ordering::Relaxed);
}

/// Stops this CPU if a CPU has panicked. The NMI handler must call it first.
pub fn stop_if_dying() {
    if DYING.load(Ordering::Acquire) != NO_CPU {
        stop();
    }
}

fn report_line(line: fmt::Arguments) {
    // Writing to memory cannot fail.
    let _ = writeln!(&PARADOR_EPITAPH, "{line}");
    LOG.line(line);
}

/// Implements the panic handler: reports the panic and stops all CPUs.
pub fn die(info: &PanicInfo) -> ! {
    let me = features::initial_apic_id();
    match DYING.compare_exchange(NO_CPU, me, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {}
        // A panic while writing the epitaph: terminate without further output.
        Err(first) if first == me => finish(),
        Err(_) => stop(),
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
    report_callers();
    finish()
}

/// Reports words of the current stack that look like return addresses.
fn report_callers() {
    let code = image().code;
    let bottom = stack_pointer() & !7;
    // Early in boot the stack is part of the image; at least its page is mapped.
    let end = cpu::stack_end(bottom).unwrap_or(bottom | (abi::PAGE_SIZE - 1));
    let addresses = (bottom..end.min(bottom + STACK_LENGTH))
        .step_by(8)
        // SAFETY: the aligned words of a stack from the stack pointer upwards are mapped.
        .map(|word| unsafe { (word as *const u64).read_volatile() })
        .filter(|address| (code.base..code.end).contains(address));
    for address in addresses.take(STACK_SHOWN) {
        report_line(format_args!("  stack: {address:#x}"));
    }
}

fn finish() -> ! {
    if DEBUG_EXIT.load(Ordering::Relaxed) && !EXIT_REQUESTED.swap(true, Ordering::Relaxed) {
        // SAFETY: terminates the machine if the device exists, else has no effect.
        unsafe { out8(DEBUG_EXIT_PORT, DEBUG_EXIT_VALUE) };
    }
    stop()
}

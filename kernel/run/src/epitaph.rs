//! Record of a kernel panic, in the log and in memory (symbol `PARADOR_EPITAPH`), for inspection.

use core::fmt::{self, Write};
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize, Ordering};

use crate::log::{Log, Transmitter};
use crate::ranges::Range;

/// Maximum length of the epitaph's text in bytes.
const TEXT_LENGTH: usize = 1008;
/// "EPITAPH\0".
const EPITAPH_MAGIC: u64 = u64::from_le_bytes(*b"EPITAPH\0");
/// Limits of the stack scan: bytes read, and return addresses reported.
const STACK_LENGTH: u64 = 4096;
const STACK_SHOWN: usize = 16;

/// Record of a panic.
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

/// CPU that panicked first.
pub struct Dying(AtomicU32);

/// Panic of a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// It is the first one.
    First,
    /// The same CPU has panicked while it wrote the epitaph: no further output.
    Again,
    /// Another CPU has panicked before.
    Other,
}

impl Dying {
    /// No CPU has panicked.
    #[expect(clippy::new_without_default, reason = "only in constants")]
    pub const fn new() -> Self {
        Self(AtomicU32::new(NO_CPU))
    }

    /// Returns whether a CPU has panicked.
    pub fn has_begun(&self) -> bool {
        self.0.load(Ordering::Acquire) != NO_CPU
    }

    /// Records the panic of CPU `me`.
    pub fn begin(&self, me: u32) -> Death {
        match self.0.compare_exchange(NO_CPU, me, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Death::First,
            Err(first) if first == me => Death::Again,
            Err(_) => Death::Other,
        }
    }
}

/// Adds a line to the record and to the log.
pub fn report_line<T: Transmitter>(log: &Log<T>, line: fmt::Arguments<'_>) {
    // Writing to memory cannot fail.
    let _ = writeln!(&PARADOR_EPITAPH, "{line}");
    log.line(line);
}

/// Reports words of a stack that look like addresses of `code`.
///
/// # Safety
/// The aligned words of `stack` can be read.
pub unsafe fn report_callers<T: Transmitter>(log: &Log<T>, code: Range, stack: Range) {
    let addresses = (stack.base..stack.end.min(stack.base + STACK_LENGTH))
        .step_by(8)
        // SAFETY: the caller's contract.
        .map(|word| unsafe { (word as *const u64).read_volatile() })
        .filter(|address| (code.base..code.end).contains(address));
    for address in addresses.take(STACK_SHOWN) {
        report_line(log, format_args!("  stack: {address:#x}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_panic_counts() {
        let dying = Dying::new();
        assert!(!dying.has_begun());
        assert_eq!(dying.begin(3), Death::First);
        assert_eq!((dying.begin(3), dying.begin(0)), (Death::Again, Death::Other));
        assert!(dying.has_begun());
    }
}

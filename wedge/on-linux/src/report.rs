//! Messages of the wedge on standard error, which all processes inherit.

use core::fmt::{self, Write};

use host_linux::sys;
use proto::hosted::{layout, log};

/// Exit code for an unavailable host feature (`docs/spec/exit-codes.md`).
pub const UNAVAILABLE: u8 = 69;
/// Exit code for an internal error (`docs/spec/exit-codes.md`).
pub const INTERNAL: u8 = 70;
/// Exit code for a failed system call of the host (`docs/spec/exit-codes.md`).
pub const HOST: u8 = 71;

struct Line {
    bytes: [u8; 512],
    used: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = self.bytes.len() - self.used;
        let bytes = &text.as_bytes()[..text.len().min(room)];
        self.bytes[self.used..self.used + bytes.len()].copy_from_slice(bytes);
        self.used += bytes.len();
        Ok(())
    }
}

/// Prints a warning line.
pub fn warn(text: fmt::Arguments<'_>) {
    print_line(log::WARN, text);
}

/// Prints a line with a level of [`log`].
pub fn print_line(level: u64, text: fmt::Arguments<'_>) {
    let mut line = Line { bytes: [0; 512], used: 0 };
    // Formatting cannot fail; a line that is too long is truncated.
    let _ = writeln!(line, "<{level}>{text}");
    // An error of standard error cannot be reported.
    let _ = sys::write(layout::ERRORS_FD, &line.bytes[..line.used]);
}

/// Prints an error and ends the VM.
#[cold]
pub fn fatal(text: fmt::Arguments<'_>) -> ! {
    print_line(log::ERROR, text);
    crate::state::doorbell::end_vm(INTERNAL)
}

#[cfg(target_os = "none")]
#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    fatal(format_args!("the wedge panicked: {info}"))
}

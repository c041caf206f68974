//! Description of the machine that boot hands over, and addresses of the kernel image.

use kernel_run::boot_memory::{BootMemory, MAX_RAM};
use kernel_run::ranges::{Range, RangeSet};

use crate::memory::ImageLayout;

/// Maximum stored length of the command line, in bytes.
pub const COMMAND_LINE_LENGTH: usize = 1024;

/// Machine description found by boot.
pub struct Machine {
    /// Physical memory. Root gets everything that remains in `free`.
    pub memory: BootMemory,
    /// Device memory below 4 GiB: everything except RAM and the registers of the interrupt
    /// controllers.
    pub devices: RangeSet<MAX_RAM>,
    /// Boot module, page-aligned; in neither the free nor the used memory.
    pub bundle: Option<Range>,
    /// Physical address of the ACPI RSDP, 0 if none.
    pub rsdp: u64,
    /// TSC frequency in kHz.
    pub tsc_khz: u64,
    /// Number of started CPUs.
    pub cpus: usize,
    command_line: [u8; COMMAND_LINE_LENGTH],
    command_line_length: usize,
}

impl Machine {
    /// Value before boot has found anything.
    pub const NEW: Self = Self {
        memory: BootMemory { ram: RangeSet::new(), free: RangeSet::new(), used: RangeSet::new() },
        devices: RangeSet::new(),
        bundle: None,
        rsdp: 0,
        tsc_khz: 0,
        cpus: 1,
        command_line: [0; COMMAND_LINE_LENGTH],
        command_line_length: 0,
    };

    /// Kernel command line.
    pub fn command_line(&self) -> &str {
        let bytes = &self.command_line[..self.command_line_length];
        match core::str::from_utf8(bytes) {
            Ok(text) => text,
            // Ignore everything from the first invalid UTF-8 sequence.
            Err(error) => core::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or(""),
        }
    }

    /// Value of the last `name=value` on the command line.
    pub fn option(&self, name: &str) -> Option<&str> {
        self.command_line()
            .split_ascii_whitespace()
            .rev()
            .find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
    }

    /// Sets the command line, which ends at the first zero byte.
    pub fn set_command_line(&mut self, bytes: &[u8]) {
        let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        let length = end.min(COMMAND_LINE_LENGTH);
        self.command_line[..length].copy_from_slice(&bytes[..length]);
        self.command_line_length = length;
    }
}

unsafe extern "C" {
    static image_start: u8;
    static text_start: u8;
    static text_end: u8;
    static rodata_end: u8;
    static image_end: u8;
}

/// Addresses of the kernel image.
pub fn image() -> ImageLayout {
    let at = |symbol: *const u8| symbol as u64;
    ImageLayout {
        start: at(&raw const image_start),
        code: Range::new(at(&raw const text_start), at(&raw const text_end)),
        constants: Range::new(at(&raw const text_end), at(&raw const rodata_end)),
        data: Range::new(at(&raw const rodata_end), at(&raw const image_end)),
    }
}

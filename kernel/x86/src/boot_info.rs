//! Description of the machine that boot hands over, and addresses of the kernel image.

use kernel_run::boot_memory::{BootMemory, MAX_RAM};
use kernel_run::command_line::CommandLine;
use kernel_run::ranges::{Range, RangeSet};
use kernel_run::tables::ImageLayout;

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
    /// Kernel command line.
    pub command_line: CommandLine,
}

impl Machine {
    /// Value before boot has found anything.
    pub const NEW: Self = Self {
        memory: BootMemory { ram: RangeSet::EMPTY, free: RangeSet::EMPTY, used: RangeSet::EMPTY },
        devices: RangeSet::EMPTY,
        bundle: None,
        rsdp: 0,
        tsc_khz: 0,
        cpus: 1,
        command_line: CommandLine::EMPTY,
    };
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

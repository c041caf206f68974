//! Frame that turns interrupt messages into shared interrupts (GICv2m): Arm DEN 0029 (SBSA 3.0),
//! appendix E.

/// Name in a device tree.
pub const COMPATIBLE: &str = "arm,gic-v2m-frame";
/// Length of its registers in bytes.
pub const LENGTH: u64 = 0x1000;
/// Type (MSI_TYPER): first interrupt in bits 25 to 16, number of them in bits 9 to 0.
pub const TYPER: u64 = 0x008;
/// Makes the interrupt with the written number pending (MSI_SETSPI_NS).
pub const SETSPI: u64 = 0x040;

/// Value of [`TYPER`] for `count` interrupts from `first` on.
pub const fn typer(first: u32, count: u32) -> u32 {
    (first & 0x3ff) << 16 | count & 0x3ff
}

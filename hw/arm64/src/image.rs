//! Header of Linux' AArch64 boot image (Linux, Documentation/arm64/booting.rst), by which firmware
//! and emulators recognise a kernel.

/// Length of the header in bytes.
pub const HEADER: usize = 64;
/// Alignment of the image in bytes, to which its offset is added.
pub const ALIGNMENT: u64 = 2 << 20;
/// Value of the last field but one: "ARM\x64".
pub const MAGIC: u32 = 0x644d_5241;
/// Flag: the kernel is big-endian.
pub const BIG_ENDIAN: u64 = 1 << 0;
/// Flags: little-endian, pages of 4 KiB, anywhere in RAM.
pub const FLAGS: u64 = 0b1010;

//! I/O ports. No port access of these machines starts DMA, so they are
//! safe.

use core::arch::asm;

/// Reads a byte.
pub fn read8(port: u16) -> u8 {
    let value;
    // SAFETY: a port access touches no memory (module head).
    unsafe { asm!("in al, dx", in("dx") port, out("al") value, options(nomem, nostack)) };
    value
}

/// Reads two bytes.
pub fn read16(port: u16) -> u16 {
    let value;
    // SAFETY: as in `read8`.
    unsafe { asm!("in ax, dx", in("dx") port, out("ax") value, options(nomem, nostack)) };
    value
}

/// Reads four bytes.
pub fn read32(port: u16) -> u32 {
    let value;
    // SAFETY: as in `read8`.
    unsafe { asm!("in eax, dx", in("dx") port, out("eax") value, options(nomem, nostack)) };
    value
}

/// Writes a byte.
pub fn write8(port: u16, value: u8) {
    // SAFETY: as in `read8`.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack)) };
}

/// Writes two bytes.
pub fn write16(port: u16, value: u16) {
    // SAFETY: as in `read8`.
    unsafe { asm!("out dx, ax", in("dx") port, in("ax") value, options(nomem, nostack)) };
}

/// Writes four bytes.
pub fn write32(port: u16, value: u32) {
    // SAFETY: as in `read8`.
    unsafe { asm!("out dx, eax", in("dx") port, in("eax") value, options(nomem, nostack)) };
}

/// Fills a buffer from a port with one string instruction.
pub fn read_string(port: u16, to: &mut [u8]) {
    // SAFETY: writes exactly the buffer.
    unsafe {
        asm!("rep insb", in("dx") port, inout("rdi") to.as_mut_ptr() => _,
            inout("rcx") to.len() => _, options(nostack));
    }
}

/// Writes a buffer to a port with one string instruction.
pub fn write_string(port: u16, from: &[u8]) {
    // SAFETY: reads exactly the buffer.
    unsafe {
        asm!("rep outsb", in("dx") port, inout("rsi") from.as_ptr() => _,
            inout("rcx") from.len() => _, options(nostack, readonly));
    }
}

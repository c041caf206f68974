//! Instructions without a Rust equivalent: I/O ports, model-specific and control registers.
//!
//! Reads without side effects are safe. Everything that changes machine state is `unsafe`; its
//! callers justify that memory stays sound.

use core::arch::asm;

use hw_x86::paging::cr0;

macro_rules! port {
    ($read:ident, $write:ident, $type:ty, $register:tt) => {
        /// Reads a port.
        ///
        /// # Safety
        /// Side effects in the device must not affect memory that Rust relies on.
        #[inline]
        pub unsafe fn $read(port: u16) -> $type {
            let value;
            // SAFETY: the caller's contract.
            unsafe {
                asm!(concat!("in ", $register, ", dx"), in("dx") port, out($register) value,
                    options(nomem, nostack, preserves_flags));
            }
            value
        }

        /// Writes a port.
        ///
        /// # Safety
        /// The device must not be made to access memory that Rust relies on.
        #[inline]
        pub unsafe fn $write(port: u16, value: $type) {
            // SAFETY: the caller's contract.
            unsafe {
                asm!(concat!("out dx, ", $register), in("dx") port, in($register) value,
                    options(nomem, nostack, preserves_flags));
            }
        }
    };
}

port!(in8, out8, u8, "al");
port!(in16, out16, u16, "ax");
port!(in32, out32, u32, "eax");

/// Reads a model-specific register.
///
/// # Safety
/// The register must exist on this CPU; else the instruction faults.
#[inline]
pub unsafe fn rdmsr(msr: u32) -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: reading has no effect on memory; the register exists by contract.
    unsafe {
        asm!("rdmsr", in("ecx") msr, out("eax") low, out("edx") high,
            options(nomem, nostack, preserves_flags));
    }
    (high as u64) << 32 | low as u64
}

/// Writes a model-specific register.
///
/// # Safety
/// The register must exist and accept the value, and the change must keep the kernel sound.
#[inline]
pub unsafe fn wrmsr(msr: u32, value: u64) {
    // SAFETY: the caller's contract. No `nomem`: writes of some registers order memory accesses.
    unsafe {
        asm!("wrmsr", in("ecx") msr, in("eax") value as u32, in("edx") (value >> 32) as u32,
            options(nostack, preserves_flags));
    }
}

macro_rules! control_register {
    ($read:ident, $write:ident, $name:literal) => {
        /// Reads the control register.
        #[inline]
        pub fn $read() -> u64 {
            let value;
            // SAFETY: reading a control register at CPL 0 has no effect.
            unsafe {
                asm!(concat!("mov {}, ", $name), out(reg) value,
                    options(nomem, nostack, preserves_flags));
            }
            value
        }

        /// Writes the control register.
        ///
        /// # Safety
        /// The CPU must accept the value, and memory must stay as Rust sees it.
        #[inline]
        pub unsafe fn $write(value: u64) {
            // SAFETY: the caller's contract.
            unsafe {
                asm!(concat!("mov ", $name, ", {}"), in(reg) value, options(nostack, preserves_flags));
            }
        }
    };
}

control_register!(read_cr0, write_cr0, "cr0");
control_register!(read_cr2, write_cr2, "cr2");
control_register!(read_cr3, write_cr3, "cr3");
control_register!(read_cr4, write_cr4, "cr4");

/// Permits FPU and vector instructions until [`set_ts`]: clears CR0.TS. The registers may be a
/// guest's.
#[inline]
pub fn clear_ts() {
    // SAFETY: does not affect memory. Only `asm!` executes such instructions: the kernel is
    // compiled without them.
    unsafe { asm!("clts", options(nostack, preserves_flags)) };
}

/// Makes FPU and vector instructions trap: sets CR0.TS.
#[inline]
pub fn set_ts() {
    // SAFETY: as above.
    unsafe { write_cr0(read_cr0() | cr0::TS) };
}

/// XCR0.
///
/// # Safety
/// CR4.OSXSAVE is set.
pub unsafe fn read_xcr0() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: the caller's contract.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high,
            options(nomem, nostack, preserves_flags));
    }
    u64::from(high) << 32 | u64::from(low)
}

/// Sets XCR0.
///
/// # Safety
/// CR4.OSXSAVE is set, and the CPU has the features.
pub unsafe fn write_xcr0(value: u64) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!("xsetbv", in("ecx") 0, in("eax") value as u32, in("edx") (value >> 32) as u32,
            options(nomem, nostack, preserves_flags));
    }
}

/// Approximate stack pointer of the caller.
#[inline(always)]
pub fn stack_pointer() -> u64 {
    let value;
    // SAFETY: a register move.
    unsafe { asm!("mov {}, rsp", out(reg) value, options(nomem, nostack, preserves_flags)) };
    value
}

/// Stops this CPU permanently: only NMI, INIT or reset can wake it.
pub fn stop() -> ! {
    loop {
        // SAFETY: with interrupts off, halting has no effect on memory.
        unsafe { asm!("cli", "hlt", options(nomem, nostack)) };
    }
}

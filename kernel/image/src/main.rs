//! Kernel executable: a linker script defines its layout, `kernel-x86` or `kernel-arm64` its entry
//! points. Contains only the panic handler, which a library cannot define.
#![no_std]
#![no_main]

use core::panic::PanicInfo;

#[cfg(target_arch = "aarch64")]
use kernel_arm64 as kernel;
#[cfg(target_arch = "x86_64")]
use kernel_x86 as kernel;

#[panic_handler]
fn panic(info: &PanicInfo) -> ! {
    kernel::panic::die(info)
}
